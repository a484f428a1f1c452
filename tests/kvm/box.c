// SPDX-License-Identifier: Apache-2.0
// The machine of the KVM tests; see the header.
#include "tests/kvm/box.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "vmm/x86_64/layout.h"
#include "vmm/x86_64/vcpu_x86.h"

#define HANG_SECONDS 120

#define PTE_TABLE 0x7ULL // present, writable, user
#define PTE_LARGE 0x87ULL // and a large page

#define GDT 0x20000ULL
#define IDT 0x21000ULL
#define TSS 0x22000ULL

static struct box *current;

void require_kvm(void)
{
	struct kvm kvm;
	struct err err = {0};

	if (kvm_open(&kvm, "/dev/kvm", &err) == 0) {
		kvm_close(&kvm);
		return;
	}
	print_message("skipped: %s\n", err.msg);
	skip();
}

static void on_alarm(int sig)
{
	static const char text[] = "the test hangs: gave up\n";
	ssize_t ignored = write(STDERR_FILENO, text, sizeof(text) - 1);

	(void)sig;
	(void)ignored;
	_exit(1);
}

int box_setup(void **state)
{
	(void)state;
	signal(SIGALRM, on_alarm);
	alarm(HANG_SECONDS);
	return 0;
}

int box_teardown(void **state)
{
	(void)state;
	if (current)
		box_destroy(current);
	alarm(0);
	return 0;
}

#define must(call)                                          \
	do {                                                \
		if ((call) < 0)                             \
			fail_msg("%s: %s", #call, err.msg); \
	} while (0)

#define must_ioctl(...)                                                          \
	do {                                                                     \
		if (ioctl(__VA_ARGS__) < 0)                                      \
			fail_msg("ioctl " #__VA_ARGS__ ": %s", strerror(errno)); \
	} while (0)

// --- The device --------------------------------------------------------------------------------

static void note(struct box *box, const struct access *access)
{
	pthread_mutex_lock(&box->lock);
	if (!box->on_write && box->nr_log < ARRAY_SIZE(box->log))
		box->log[box->nr_log++] = *access;
	box->nr_writes += access->write;
	pthread_cond_broadcast(&box->changed);
	pthread_mutex_unlock(&box->lock);
}

static void dev_read(struct box *box, bool pio, uint64_t off, uint8_t *data, unsigned int len)
{
	struct access access = {.pio = pio, .off = off, .len = len};
	le64_t val;

	access.val = box->answer ? box->answer(box, &access) : 0;
	val = le64_of(access.val);
	memcpy(data, &val, len);
	if (!box->on_write)
		note(box, &access);
}

static void dev_write(
	struct box *box, bool pio, uint64_t off, const uint8_t *data, unsigned int len)
{
	struct access access = {.pio = pio, .write = true, .off = off, .len = len};
	le64_t val = {0};

	memcpy(&val, data, len);
	access.val = le64_get(val);
	if (box->on_write)
		box->on_write(box, &access);
	note(box, &access);
}

static void mmio_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	dev_read(opaque, false, off, data, len);
}

static void mmio_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	dev_write(opaque, false, off, data, len);
}

static void pio_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	dev_read(opaque, true, off, data, len);
}

static void pio_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	dev_write(opaque, true, off, data, len);
}

static const struct bus_ops mmio_ops = {mmio_read, mmio_write}, pio_ops = {pio_read, pio_write};

static void on_stopped(void *opaque, unsigned int id, enum vcpu_stop why, const struct err *err)
{
	struct box *box = opaque;

	pthread_mutex_lock(&box->lock);
	if (!box->stopped) {
		box->stopped = true;
		box->stopped_id = id;
		box->stop = why;
		box->stop_err = *err;
	}
	pthread_cond_broadcast(&box->changed);
	pthread_mutex_unlock(&box->lock);
}

static void on_where(void *opaque, unsigned int id, const struct vcpu_where *where)
{
	struct box *box = opaque;

	pthread_mutex_lock(&box->lock);
	box->where[id] = *where;
	box->nr_where++;
	pthread_cond_broadcast(&box->changed);
	pthread_mutex_unlock(&box->lock);
}

// --- Making --------------------------------------------------------------------------------------

static void write_page_tables(struct box *box)
{
	const uint64_t pml4 = LAYOUT_PAGE_TABLES_GPA, pdpt = pml4 + PAGE_BYTES;
	le64_t pte = le64_of(pdpt | PTE_TABLE);

	guest_mem_write(&box->mem, GPA(pml4), &pte, sizeof(pte));
	for (uint64_t gib = 0; gib < 4; gib++) {
		uint64_t pd = pdpt + (gib + 1) * PAGE_BYTES;

		pte = le64_of(pd | PTE_TABLE);
		guest_mem_write(&box->mem, GPA(pdpt + gib * 8), &pte, sizeof(pte));
		for (uint64_t i = 0; i < 512; i++) {
			pte = le64_of((gib * 512 + i) * 2 * MIB | PTE_LARGE);
			guest_mem_write(&box->mem, GPA(pd + i * 8), &pte, sizeof(pte));
		}
	}
}

static void make_vm(struct box *box)
{
	struct err err = {0};

	must(kvm_open(&box->kvm, "/dev/kvm", &err));
	must(kvm_create_vm(&box->kvm, &err));
	must(kvm_set_ram(&box->kvm, &box->mem, false, &err));
	for (unsigned int i = 0; i < box->env.nr_vcpus; i++) {
		must(vcpu_create(&box->vcpus[i], &box->env, i, &err));
		box->nr_vcpus++;
	}
}

static void unmake_vm(struct box *box)
{
	for (unsigned int i = 0; i < box->nr_vcpus; i++)
		vcpu_destroy(box->vcpus[i]);
	box->nr_vcpus = 0;
	kvm_close(&box->kvm);
}

struct box *box_make(unsigned int nr_vcpus, const uint8_t *code, const uint8_t *code_end)
{
	struct box *box;
	struct guest_mem_range ram = {GPA(0), BOX_RAM_BYTES};
	struct err err = {0};

	require_kvm();
	assert_null(current);
	box = current = calloc(1, sizeof(*box));
	assert_non_null(box);
	box->kvm = (struct kvm){.fd = -1, .vm_fd = -1};
	pthread_mutex_init(&box->lock, NULL);
	pthread_cond_init(&box->changed, NULL);
	must(guest_mem_init(&box->mem, &ram, 1, &err));
	must(bus_add(&box->mmio, BOX_MMIO, BOX_MMIO_BYTES, &mmio_ops, box, &err));
	must(bus_add(&box->pio, BOX_PORT, BOX_NR_PORTS, &pio_ops, box, &err));
	box->env = (struct vcpu_env){.kvm = &box->kvm,
		.mem = &box->mem,
		.mmio = &box->mmio,
		.pio = &box->pio,
		.nr_vcpus = nr_vcpus,
		.stopped = on_stopped,
		.where = on_where,
		.opaque = box};
	must(vcpu_env_init(&box->env, &err));
	make_vm(box);
	write_page_tables(box);
	assert_int_equal(
		guest_mem_write(&box->mem, GPA(BOX_CODE), code, (size_t)(code_end - code)), 0);
	return box;
}

void box_destroy(struct box *box)
{
	current = NULL;
	unmake_vm(box);
	vcpu_env_fini(&box->env);
	guest_mem_fini(&box->mem);
	pthread_cond_destroy(&box->changed);
	pthread_mutex_destroy(&box->lock);
	free(box);
}

static const struct kvm_regs entry_regs = {
	.rip = BOX_CODE,
	.rsp = BOX_STACK,
	.rdi = BOX_MMIO,
	.rdx = BOX_PORT,
	.rsi = BOX_DATA,
	.rflags = 2,
};

void box_enter_long_mode(struct box *box)
{
	struct boot_entry entry = {.protocol = BOOT_LINUX64, .rip = BOX_CODE};
	struct err err = {0};
	int fd = vcpu_fd(box->vcpus[0]);

	must(vcpu_x86_boot(box->vcpus[0], &entry, &err));
	must_ioctl(fd, KVM_SET_REGS, &entry_regs);
}

void box_set_handler(
	struct box *box, unsigned int vector, const uint8_t *handler, const uint8_t *handler_end)
{
	// SDM vol. 3, 3.4.5, 7.7 and 6.14.1: ring 0 segments, also under the selectors that a guest
	// in long mode has, a TSS with RSP0, and an interrupt gate.
	const le64_t gdt[4] = {le64_of(0), le64_of(0x00209b0000000000), le64_of(0x00209b0000000000),
		le64_of(0x00cf93000000ffff)};
	const le64_t gate[2] = {
		le64_of(0x00008e0000080000 | (BOX_HANDLER & 0xffff) | BOX_HANDLER >> 16 << 48)};
	const le64_t rsp0 = le64_of(BOX_STACK);
	int fd = vcpu_fd(box->vcpus[0]);
	struct kvm_sregs sregs;

	guest_mem_write(&box->mem, GPA(BOX_HANDLER), handler, (size_t)(handler_end - handler));
	guest_mem_write(&box->mem, GPA(GDT), gdt, sizeof(gdt));
	guest_mem_write(&box->mem, GPA(IDT + vector * 16), gate, sizeof(gate));
	guest_mem_write(&box->mem, GPA(TSS + 4), &rsp0, sizeof(rsp0));
	must_ioctl(fd, KVM_GET_SREGS, &sregs);
	sregs.gdt = (struct kvm_dtable){.base = GDT, .limit = sizeof(gdt) - 1};
	sregs.idt = (struct kvm_dtable){.base = IDT, .limit = 0xfff};
	sregs.tr.base = TSS;
	must_ioctl(fd, KVM_SET_SREGS, &sregs);
}

void box_enter_user_mode(
	struct box *box, unsigned int vector, const uint8_t *handler, const uint8_t *handler_end)
{
	int fd = vcpu_fd(box->vcpus[0]);
	struct kvm_sregs sregs;

	box_enter_long_mode(box);
	box_set_handler(box, vector, handler, handler_end);
	must_ioctl(fd, KVM_GET_SREGS, &sregs);
	sregs.cs.dpl = sregs.ss.dpl = 3;
	sregs.cs.selector |= 3;
	sregs.ss.selector |= 3;
	must_ioctl(fd, KVM_SET_SREGS, &sregs);
}

void box_enter_real_mode(struct box *box)
{
	int fd = vcpu_fd(box->vcpus[0]);
	struct kvm_regs regs = entry_regs;
	struct kvm_sregs sregs;

	must_ioctl(fd, KVM_GET_SREGS, &sregs);
	sregs.cs.base = sregs.cs.selector = 0;
	must_ioctl(fd, KVM_SET_SREGS, &sregs);
	regs.rsp = BOX_CODE; // downwards from there
	must_ioctl(fd, KVM_SET_REGS, &regs);
}

void box_start(struct box *box)
{
	struct err err = {0};

	for (unsigned int i = 0; i < box->nr_vcpus; i++)
		must(vcpu_start(box->vcpus[i], &err));
}

void box_save(struct box *box, struct box_state *state)
{
	struct err err = {0};

	must(kvm_save(&box->kvm, &state->vm, &err));
	for (unsigned int i = 0; i < box->nr_vcpus; i++)
		must(vcpu_save(box->vcpus[i], &state->vcpus[i], &err));
}

void box_restore(struct box *box, const struct box_state *state)
{
	struct err err = {0};

	for (unsigned int i = 0; i < box->nr_vcpus; i++)
		must(vcpu_restore(box->vcpus[i], state->vcpus[i].data, state->vcpus[i].len, &err));
	must(kvm_restore(&box->kvm, state->vm.data, state->vm.len, &err));
}

void box_state_fini(struct box_state *state)
{
	buf_fini(&state->vm);
	for (unsigned int i = 0; i < BOX_VCPUS_MAX; i++)
		buf_fini(&state->vcpus[i]);
}

void box_forget_vm(struct box *box)
{
	unmake_vm(box);
}

void box_new_vm(struct box *box)
{
	unmake_vm(box);
	make_vm(box);
}

void box_move(struct box *box)
{
	struct box_state state = {0};

	box_save(box, &state);
	box_new_vm(box);
	box_restore(box, &state);
	box_state_fini(&state);
	vcpus_pause(box->vcpus, box->nr_vcpus);
	box_start(box);
	vcpus_pause(box->vcpus, box->nr_vcpus);
}

// --- Waiting -------------------------------------------------------------------------------------

// Sleeps until there is enough or nothing more can come.
static void wait_until(struct box *box, bool (*enough)(const struct box *box, uint64_t nr),
	uint64_t nr, const char *of)
{
	bool got;

	pthread_mutex_lock(&box->lock);
	while (!enough(box, nr) && !box->stopped)
		pthread_cond_wait(&box->changed, &box->lock);
	got = enough(box, nr);
	pthread_mutex_unlock(&box->lock);
	if (!got)
		fail_msg("the vCPU stopped (%s) before there were %llu %s: %s",
			box->stop == VCPU_STOP_RESET ? "reset" : "error", (unsigned long long)nr,
			of, box->stop_err.msg);
}

static bool enough_accesses(const struct box *box, uint64_t nr)
{
	return box->nr_log >= nr;
}

static bool enough_writes(const struct box *box, uint64_t nr)
{
	return box->nr_writes >= nr;
}

static bool enough_wheres(const struct box *box, uint64_t nr)
{
	return box->nr_where >= nr;
}

static bool has_stopped(const struct box *box, uint64_t nr)
{
	return box->stopped || nr == 0;
}

void box_wait_log(struct box *box, unsigned int nr)
{
	wait_until(box, enough_accesses, nr, "accesses");
}

void box_wait_write(struct box *box)
{
	wait_until(box, enough_writes, 1, "writes");
}

void box_wait_writes(struct box *box, uint64_t nr)
{
	wait_until(box, enough_writes, nr, "writes");
}

uint64_t box_writes(struct box *box)
{
	uint64_t nr;

	pthread_mutex_lock(&box->lock);
	nr = box->nr_writes;
	pthread_mutex_unlock(&box->lock);
	return nr;
}

void box_wait_where(struct box *box, unsigned int nr)
{
	wait_until(box, enough_wheres, nr, "answers to where");
}

void box_wait_stopped(struct box *box)
{
	wait_until(box, has_stopped, 1, "stops");
}
