// SPDX-License-Identifier: Apache-2.0
// Saving and restoring vCPUs and VMs on a real /dev/kvm: guests of a few instructions go on in a
// new VM, or a new process, without a lost interrupt, a timer that never fires, a clock that jumps,
// or a register that changed. And what does not fit this host, or is made up, is refused.
//
// That each access happens once wherever a vCPU is moved is tested in vcpu_test.
#include <errno.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/kvm/box.h"
#include "vmm/x86_64/state_x86.h"

#define MOVES 20

// Checks that what is written to a port, or by MMIO, counts up from 1 by ones. vCPU threads.
struct counts {
	_Atomic uint64_t at[2]; // by port: the first, and the one 4 further
	_Atomic uint64_t bad, instead_of; // the first that is another, and what it should be
};

static void on_count(struct box *box, const struct access *access)
{
	struct counts *counts = box->opaque;
	_Atomic uint64_t *at = &counts->at[access->pio && access->off >= 4];
	const uint64_t mask = access->len == 8 ? UINT64_MAX : (1ULL << 8 * access->len) - 1;

	if (access->val != ((*at + 1) & mask) && !counts->instead_of) {
		counts->bad = access->val;
		counts->instead_of = *at + 1;
	}
	++*at;
}

static void expect_sound(const struct box *box, const struct counts *counts, const char *name)
{
	if (box->stopped)
		fail_msg("%s: the vCPU stopped: %s", name, box->stop_err.msg);
	if (counts->instead_of)
		fail_msg("%s: %llu instead of %llu", name, (unsigned long long)counts->bad,
			(unsigned long long)counts->instead_of);
}

// Moves the running machine MOVES times, each time after the guest has written at least twice.
static void move_and_count(struct box *box, struct counts *counts, const char *name)
{
	box->on_write = on_count;
	box->opaque = counts;
	box_start(box);
	for (unsigned int i = 0; i < MOVES; i++) {
		box_wait_writes(box, box_writes(box) + 2);
		vcpus_pause(box->vcpus, box->nr_vcpus);
		box_move(box);
		vcpus_resume(box->vcpus, box->nr_vcpus);
	}
	box_wait_writes(box, box_writes(box) + 2);
	vcpus_pause(box->vcpus, box->nr_vcpus);
	expect_sound(box, counts, name);
}

// --- Timers --------------------------------------------------------------------------------------

// The timer of the local APIC (SDM vol. 3, 11.5.4) wakes a halted guest, which counts, and arms it
// anew where it fires but once. Were it lost in a move, the guest would sleep for ever.
#define APIC         "0xfee00000"
#define TIMER_VECTOR 0x40
#define TIMER_START(lvt)                       \
	"mov %edx, %r10d\n"                    \
	"mov $" APIC ", %ebx\n"                \
	"movl $0x1ff, 0xf0(%rbx)\n"            \
	"movl $0x0b, 0x3e0(%rbx)\n" /* by 1 */ \
	"movl $" lvt ", 0x320(%rbx)\n"
#define TIMER_SLEEP "sti\n1: hlt\njmp 1b\n"
#define TIMER_COUNT         \
	"inc %r9d\n"        \
	"mov %r9d, %eax\n"  \
	"mov %r10d, %edx\n" \
	"out %eax, (%dx)\n"
#define TIMER_END "movl $0, 0xb0(%rbx)\niretq\n"
#define ARM_COUNT "movl $3000000, 0x380(%rbx)\n" // of KVM's 1 GHz
#define ARM_TSC                \
	"rdtsc\n"              \
	"shl $32, %rdx\n"      \
	"or %rdx, %rax\n"      \
	"add $8000000, %rax\n" \
	"mov %rax, %rdx\n"     \
	"shr $32, %rdx\n"      \
	"mov $0x6e0, %ecx\n"   \
	"wrmsr\n"

// clang-format off
GUEST(guest_periodic, 64, TIMER_START("0x20040") ARM_COUNT TIMER_SLEEP);
GUEST(handler_periodic, 64, TIMER_COUNT TIMER_END);
GUEST(guest_oneshot, 64, TIMER_START("0x00040") ARM_COUNT TIMER_SLEEP);
GUEST(handler_oneshot, 64, TIMER_COUNT ARM_COUNT TIMER_END);
GUEST(guest_deadline, 64, TIMER_START("0x40040") ARM_TSC TIMER_SLEEP);
GUEST(handler_deadline, 64, TIMER_COUNT ARM_TSC TIMER_END);
// clang-format on

static void no_timer_is_lost(void **state)
{
	static const struct {
		const char *name;
		const uint8_t *code, *code_end, *handler, *handler_end;
	} cases[] = {
		{"periodic", guest_periodic, guest_periodic_end, handler_periodic,
			handler_periodic_end},
		{"one-shot", guest_oneshot, guest_oneshot_end, handler_oneshot,
			handler_oneshot_end},
		{"TSC deadline", guest_deadline, guest_deadline_end, handler_deadline,
			handler_deadline_end},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct box *box = box_make(1, cases[i].code, cases[i].code_end);
		struct counts counts = {0};

		box_enter_long_mode(box);
		box_set_handler(box, TIMER_VECTOR, cases[i].handler, cases[i].handler_end);
		move_and_count(box, &counts, cases[i].name);
		print_message("%s: %llu interrupts, %d moves\n", cases[i].name,
			(unsigned long long)counts.at[0], MOVES);
		box_destroy(box);
	}
}

// Reads kvm-clock as cpuid.rst and msr.rst of Linux say, and shows it. The structure lies at rsi.
// clang-format off
GUEST(guest_clock, 64,
	"mov $0x4b564d01, %ecx\n"
	"lea 1(%rsi), %eax\n"
	"xor %edx, %edx\n"
	"wrmsr\n"
	"1: mov (%rsi), %r8d\n"
	"test $1, %r8d\n"
	"jnz 1b\n"
	"rdtsc\n"
	"shl $32, %rdx\n"
	"or %rdx, %rax\n"
	"sub 8(%rsi), %rax\n"
	"movsbl 28(%rsi), %ecx\n"
	"test %ecx, %ecx\n"
	"js 2f\n"
	"shl %cl, %rax\n"
	"jmp 3f\n"
	"2: neg %ecx\n"
	"shr %cl, %rax\n"
	"3: mov 24(%rsi), %r9d\n"
	"mul %r9\n"
	"shrd $32, %rdx, %rax\n"
	"add 16(%rsi), %rax\n"
	"cmp (%rsi), %r8d\n"
	"jne 1b\n"
	"mov %rax, (%rdi)\n"
	"jmp 1b");
// clang-format on

struct clock {
	uint64_t start_ns; // before there was a VM
	uint64_t last, back, ahead; // of the guest's clock; the first wrong ones
};

static void on_clock(struct box *box, const struct access *access)
{
	struct clock *clock = box->opaque;
	const uint64_t host = now_ns() - clock->start_ns;

	if (access->val < clock->last && !clock->back)
		clock->back = access->val;
	// It starts with its first VM and runs no faster than the host's, which NTP may slow down.
	if (access->val > host + host / 100 && !clock->ahead)
		clock->ahead = access->val;
	clock->last = access->val;
}

static void the_clock_goes_on_from_where_it_stood(void **state)
{
	struct clock clock = {.start_ns = now_ns()};
	struct box *box = box_make(1, guest_clock, guest_clock_end);
	uint64_t first;
	(void)state;

	box->on_write = on_clock;
	box->opaque = &clock;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_writes(box, 1);
	vcpus_pause(box->vcpus, 1);
	first = clock.last;
	for (unsigned int i = 0; i < MOVES; i++) {
		box_move(box);
		vcpus_resume(box->vcpus, 1);
		box_wait_writes(box, box_writes(box) + 2);
		vcpus_pause(box->vcpus, 1);
	}
	assert_false(box->stopped);
	print_message("from %llu to %llu ns in %d moves\n", (unsigned long long)first,
		(unsigned long long)clock.last, MOVES);
	if (clock.back)
		fail_msg("the clock went back to %llu", (unsigned long long)clock.back);
	if (clock.ahead)
		fail_msg("the clock went ahead to %llu", (unsigned long long)clock.ahead);
	assert_true(clock.last > first);
}

// --- Registers -----------------------------------------------------------------------------------

// A program (CPL 3, since no emulator knows such instructions) that keeps 512 bytes in the vector
// registers, and a control word, and looks whether they are still there.
#define V_LOAD(off, reg)  "vmovups " #off "(%rsi), %ymm" #reg "\n"
#define V_STORE(off, reg) "vmovups %ymm" #reg ", 0x1000+" #off "(%rsi)\n"
#define V_ALL(op)                                                                                 \
	op(0, 0) op(32, 1) op(64, 2) op(96, 3) op(128, 4) op(160, 5) op(192, 6) op(224, 7)        \
		op(256, 8) op(288, 9) op(320, 10) op(352, 11) op(384, 12) op(416, 13) op(448, 14) \
			op(480, 15)
#define V_BYTES 512

// clang-format off
GUEST(guest_vectors, 64,
	V_ALL(V_LOAD)
	"ldmxcsr 512(%rsi)\n"
	"1:\n"
	V_ALL(V_STORE)
	"stmxcsr 0x1000+512(%rsi)\n"
	"xor %ecx, %ecx\n"
	"2: mov (%rsi,%rcx,4), %eax\n"
	"cmp 0x1000(%rsi,%rcx,4), %eax\n"
	"jne 3f\n"
	"inc %ecx\n"
	"cmp $129, %ecx\n"
	"jb 2b\n"
	"inc %r9\n"
	"mov %r9, (%rdi)\n"
	"jmp 1b\n"
	"3: movq $0, (%rdi)\n"
	"jmp 1b");
GUEST(guest_no_handler, 64, "1: jmp 1b");
// clang-format on

static void vector_registers_stay(void **state)
{
	struct kvm_xcrs xcrs = {.nr_xcrs = 1, .xcrs = {{.xcr = 0, .value = 7}}};
	const uint32_t mxcsr = 0x1f80 | 3 << 13; // rounds towards zero
	struct counts counts = {0};
	struct kvm_sregs sregs;
	struct box *box;
	uint8_t pattern[V_BYTES];
	int fd;
	(void)state;

	if (!__builtin_cpu_supports("avx")) {
		print_message("skipped: this processor has no AVX\n");
		skip();
	}
	box = box_make(1, guest_vectors, guest_vectors_end);
	for (unsigned int i = 0; i < V_BYTES; i++)
		pattern[i] = (uint8_t)(i * 7 + i / 32 + 1);
	guest_mem_write(&box->mem, GPA(BOX_DATA), pattern, sizeof(pattern));
	guest_mem_write(&box->mem, GPA(BOX_DATA + V_BYTES), &mxcsr, sizeof(mxcsr));
	box_enter_user_mode(box, 6, guest_no_handler, guest_no_handler_end);
	fd = vcpu_fd(box->vcpus[0]);
	assert_int_equal(ioctl(fd, KVM_GET_SREGS, &sregs), 0);
	sregs.cr4 |= 1U << 9 | 1U << 10 | 1U << 18; // OSFXSR, OSXMMEXCPT, OSXSAVE
	assert_int_equal(ioctl(fd, KVM_SET_SREGS, &sregs), 0);
	assert_int_equal(ioctl(fd, KVM_SET_XCRS, &xcrs), 0);
	move_and_count(box, &counts, "vectors");
	print_message("%llu looks, %d moves\n", (unsigned long long)counts.at[0], MOVES);
}

// --- Interrupts on their way ---------------------------------------------------------------------

// As guest_irq of vcpu_test, but it does not take interrupts before the device says so.
// clang-format off
GUEST(guest_masked, 16,
	"cli\n"
	"mov $0x11, %al\n"
	"out %al, $0x20\n"
	"mov $0x20, %al\n"
	"out %al, $0x21\n"
	"mov $0x04, %al\n"
	"out %al, $0x21\n"
	"mov $0x01, %al\n"
	"out %al, $0x21\n"
	"mov $0xef, %al\n"
	"out %al, $0x21\n"
	"call 1f\n"
	"inc %bx\n"
	"mov %bx, %ax\n"
	"out %ax, (%dx)\n"
	"mov $0x20, %al\n"
	"out %al, $0x20\n"
	"iret\n"
	"1: pop %ax\n"
	"mov %ax, 0x24 * 4\n"
	"movw $0, 0x24 * 4 + 2\n"
	"mov $1, %bx\n"
	"mov %bx, %ax\n"
	"out %ax, (%dx)\n" // ready
	"2: in (%dx), %ax\n"
	"test %ax, %ax\n"
	"jz 2b\n"
	"sti\n"
	"3: hlt\n"
	"jmp 3b");
// clang-format on

static _Atomic uint64_t go;

static uint64_t answer_with_go(struct box *box, const struct access *access)
{
	(void)box;
	(void)access;
	return go;
}

static bool pic_has_irq4(const struct box *box)
{
	struct kvm_irqchip chip = {.chip_id = KVM_IRQCHIP_PIC_MASTER};

	assert_int_equal(ioctl(box->kvm.vm_fd, KVM_GET_IRQCHIP, &chip), 0);
	return chip.chip.pic.irr & 1U << 4;
}

static void a_pending_interrupt_comes_along(void **state)
{
	struct box *box = box_make(1, guest_masked, guest_masked_end);
	const uint64_t one = 1;
	struct counts counts = {0};
	struct err err = {0};
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	(void)state;

	go = 0;
	box->answer = answer_with_go;
	box->on_write = on_count;
	box->opaque = &counts;
	assert_true(fd >= 0);
	assert_int_equal(kvm_irqfd(&box->kvm, fd, 4, &err), 0);
	box_enter_real_mode(box);
	box_start(box);
	box_wait_writes(box, 1);
	assert_int_equal(write(fd, &one, sizeof(one)), sizeof(one));
	while (!pic_has_irq4(box)) // the kernel may take a moment for it
		;
	vcpus_pause(box->vcpus, 1);
	box_move(box);
	assert_true(pic_has_irq4(box));
	go = 1;
	vcpus_resume(box->vcpus, 1);
	box_wait_writes(box, 2);
	vcpus_pause(box->vcpus, 1);
	expect_sound(box, &counts, "masked");
	close(fd);
}

// --- Two vCPUs -----------------------------------------------------------------------------------

// The second waits for INIT and SIPI until the device says so; then both count.
// clang-format off
GUEST(guest_two, 64,
	"mov $" APIC ", %ebx\n"
	"1: in (%dx), %eax\n"
	"test %eax, %eax\n"
	"jz 1b\n"
	"movl $0x01000000, 0x310(%rbx)\n"
	"movl $0x00004500, 0x300(%rbx)\n"
	"movl $0x01000000, 0x310(%rbx)\n"
	"movl $0x00004609, 0x300(%rbx)\n"
	"xor %eax, %eax\n"
	"2: inc %eax\n"
	"out %eax, (%dx)\n"
	"jmp 2b");
GUEST(guest_second, 16,
	"mov $" BOX_STR(BOX_PORT) " + 4, %dx\n"
	"xor %ax, %ax\n"
	"1: inc %ax\n"
	"out %ax, (%dx)\n"
	"jmp 1b");
// clang-format on

static void two_vcpus_go_on(void **state)
{
	struct box *box = box_make(2, guest_two, guest_two_end);
	struct counts counts = {0};
	(void)state;

	go = 0;
	assert_int_equal(guest_mem_write(&box->mem, GPA(BOX_CODE + 0x1000), guest_second,
				 (size_t)(guest_second_end - guest_second)),
		0);
	box->answer = answer_with_go;
	box->on_write = on_count;
	box->opaque = &counts;
	box_enter_long_mode(box);
	box_start(box);
	vcpus_pause(box->vcpus, 2);
	box_move(box); // while the second waits
	go = 1;
	for (unsigned int i = 0; i < MOVES; i++) {
		const uint64_t before[] = {counts.at[0], counts.at[1]};

		vcpus_resume(box->vcpus, 2);
		while (counts.at[0] < before[0] + 2 || counts.at[1] < before[1] + 2)
			box_wait_writes(box, box_writes(box) + 1);
		vcpus_pause(box->vcpus, 2);
		box_move(box);
	}
	expect_sound(box, &counts, "two vCPUs");
	print_message("%llu and %llu, %d moves\n", (unsigned long long)counts.at[0],
		(unsigned long long)counts.at[1], MOVES);
}

// --- Elsewhere, and back -------------------------------------------------------------------------

GUEST(guest_count, 64, "1: inc %eax\nout %eax, (%dx)\njmp 1b");

static struct box *make_counting(struct counts *counts)
{
	struct box *box = box_make(1, guest_count, guest_count_end);
	const struct kvm_regs regs = {
		.rip = BOX_CODE, .rsp = BOX_STACK, .rdx = BOX_PORT, .rflags = 2};

	box->on_write = on_count;
	box->opaque = counts;
	box_enter_long_mode(box);
	assert_int_equal(ioctl(vcpu_fd(box->vcpus[0]), KVM_SET_REGS, &regs), 0);
	return box;
}

static void a_new_process_goes_on(void **state)
{
	struct counts counts = {0};
	struct box *box = make_counting(&counts);
	struct box_state saved = {0};
	uint64_t before;
	int status = 0;
	pid_t child;
	(void)state;

	box_start(box);
	box_wait_writes(box, 100);
	vcpus_pause(box->vcpus, 1);
	before = counts.at[0];
	box_save(box, &saved);
	box_forget_vm(box); // and its thread, of which a child would know without having it
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		alarm(60);
		box_new_vm(box);
		box_restore(box, &saved);
		box_start(box);
		box_wait_writes(box, box_writes(box) + 100);
		vcpus_pause(box->vcpus, 1);
		// A failed assertion above leaves by another way, with another status.
		_exit(counts.instead_of || counts.at[0] < before + 100 ? 1 : 42);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 42);
	box_state_fini(&saved);
}

// The same vCPU, parked, goes back to an earlier state.
static void a_parked_machine_goes_back(void **state)
{
	struct counts counts = {0};
	struct box *box = make_counting(&counts);
	struct box_state saved = {0};
	uint64_t then;
	(void)state;

	box_start(box);
	for (unsigned int i = 0; i < MOVES; i++) {
		box_wait_writes(box, box_writes(box) + 10);
		vcpus_pause(box->vcpus, 1);
		then = counts.at[0];
		box_save(box, &saved);
		vcpus_resume(box->vcpus, 1);
		box_wait_writes(box, box_writes(box) + 10);
		vcpus_pause(box->vcpus, 1);
		box_restore(box, &saved);
		counts.at[0] = then;
		vcpus_resume(box->vcpus, 1);
		box_state_fini(&saved);
	}
	box_wait_writes(box, box_writes(box) + 10);
	vcpus_pause(box->vcpus, 1);
	expect_sound(box, &counts, "back");
}

// --- What is refused -----------------------------------------------------------------------------

static struct x86_vcpu_state *decoded(const struct buf *saved)
{
	struct x86_vcpu_state *vcpu = calloc(1, sizeof(*vcpu));
	struct err err = {0};

	assert_non_null(vcpu);
	if (state_decode(&x86_vcpu_state_table, saved->data, saved->len, vcpu, &err) < 0)
		fail_msg("%s", err.msg);
	return vcpu;
}

static void change_nothing(struct x86_vcpu_state *vcpu)
{
	(void)vcpu;
}

static void add_feature(struct x86_vcpu_state *vcpu)
{
	cpuid_find(&vcpu->cpuid, 1, 0)->edx |= 1U << 10; // reserved
}

static void change_vendor(struct x86_vcpu_state *vcpu)
{
	cpuid_find(&vcpu->cpuid, 0, 0)->ebx ^= 1;
}

static void drop_cpuid(struct x86_vcpu_state *vcpu)
{
	vcpu->cpuid.nent = 0;
}

static void add_msr(struct x86_vcpu_state *vcpu, uint64_t value)
{
	vcpu->msrs[vcpu->nr_msrs++] = (struct x86_msr){.index = 0x12345678, .value = value};
}

static void add_unused_msr(struct x86_vcpu_state *vcpu)
{
	add_msr(vcpu, 0);
}

static void add_used_msr(struct x86_vcpu_state *vcpu)
{
	add_msr(vcpu, 0xab);
}

static void be_another_vcpu(struct x86_vcpu_state *vcpu)
{
	vcpu->vcpu_id = 3;
}

static void break_control_register(struct x86_vcpu_state *vcpu)
{
	vcpu->sregs.cr4 |= 1ULL << 63;
}

static void break_xsave(struct x86_vcpu_state *vcpu)
{
	vcpu->xsave[520] = 1; // XCOMP_BV: KVM takes the standard format alone
}

static void what_does_not_fit_is_refused(void **state)
{
	static const struct {
		void (*change)(struct x86_vcpu_state *vcpu);
		int code;
		const char *word;
	} cases[] = {
		{change_nothing, 0, ""},
		{add_unused_msr, 0, ""},
		{add_feature, -ENOTSUP, "bits 0x400 of CPUID leaf 0x1.0 EDX"},
		{change_vendor, -ENOTSUP, "another vendor"},
		{drop_cpuid, -EINVAL, "CPUID leaf"},
		{add_used_msr, -ENOTSUP, "MSR 0x12345678 cannot be set to 0xab"},
		{be_another_vcpu, -EINVAL, "vCPU 3"},
		{break_control_register, -EINVAL, "KVM_SET_SREGS"},
		{break_xsave, -EINVAL, "KVM_SET_XSAVE"},
		{change_nothing, 0, ""},
	};
	struct box *box = box_make(1, guest_count, guest_count_end);
	struct box_state saved = {0};
	(void)state;

	box_enter_long_mode(box);
	box_save(box, &saved);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct x86_vcpu_state *vcpu = decoded(&saved.vcpus[0]);
		struct buf changed = {0};
		struct err err = {0};
		int r;

		cases[i].change(vcpu);
		assert_int_equal(state_encode(&x86_vcpu_state_table, vcpu, &changed), 0);
		r = vcpu_restore(box->vcpus[0], changed.data, changed.len, &err);
		if (r != cases[i].code || !strstr(err.msg, cases[i].word))
			fail_msg("case %zu: %d '%s'", i, r, err.msg);
		buf_fini(&changed);
		free(vcpu);
	}
	box_state_fini(&saved);
}

static uint64_t roll(uint64_t *dice)
{
	*dice = *dice * 6364136223846793005ULL + 1442695040888963407ULL;
	return *dice >> 24;
}

static void scribble(uint8_t *bytes, size_t len, uint64_t *dice)
{
	for (unsigned int i = 0; i < 3; i++) {
		const uint64_t at = roll(dice) % len;

		bytes[at] = (uint8_t)roll(dice);
	}
}

// The encoding itself, or more often what it says.
static void mutate(const struct buf *from, struct buf *to, uint64_t *dice)
{
	struct x86_vcpu_state *vcpu = decoded(from);
	const struct {
		void *at;
		size_t len;
	} parts[] = {
		{&vcpu->regs, sizeof(vcpu->regs)},
		{&vcpu->sregs, sizeof(vcpu->sregs)},
		{&vcpu->debugregs, sizeof(vcpu->debugregs)},
		{&vcpu->xcrs.xcrs, sizeof(vcpu->xcrs.xcrs)},
		{vcpu->xsave, sizeof(vcpu->xsave)},
		{vcpu->lapic, sizeof(vcpu->lapic)},
		{&vcpu->events, sizeof(vcpu->events)},
		{vcpu->msrs, vcpu->nr_msrs * sizeof(vcpu->msrs[0])},
		{&vcpu->mp_state, sizeof(vcpu->mp_state)},
		{vcpu->cpuid.entries, vcpu->cpuid.nent * sizeof(vcpu->cpuid.entries[0])},
	};
	const uint64_t part = roll(dice) % (ARRAY_SIZE(parts) + 2);

	to->len = 0;
	if (part < ARRAY_SIZE(parts))
		scribble(parts[part].at, parts[part].len, dice);
	assert_int_equal(state_encode(&x86_vcpu_state_table, vcpu, to), 0);
	if (part >= ARRAY_SIZE(parts))
		scribble(to->data, to->len, dice);
	free(vcpu);
}

#define HOSTILE      400
#define HOSTILE_RUNS 40 // of those that are taken; a new VM each costs most of the time

// Whatever a made-up state holds, the monitor goes on: it is refused, or the guest fares ill.
static void a_hostile_state_harms_the_guest_alone(void **state)
{
	struct box *box = box_make(1, guest_count, guest_count_end);
	struct box_state saved = {0}, bad = {0};
	unsigned int taken = 0, run = 0, vm_taken = 0;
	uint64_t dice = 1;
	(void)state;

	box_enter_long_mode(box);
	box_save(box, &saved);
	for (unsigned int i = 0; i < HOSTILE; i++) {
		struct err err = {0}, vm_err = {0};
		int r, vm_r;

		mutate(&saved.vcpus[0], &bad.vcpus[0], &dice);
		bad.vm.len = 0;
		assert_int_equal(buf_append(&bad.vm, saved.vm.data, saved.vm.len), 0);
		scribble(bad.vm.data, bad.vm.len, &dice);
		r = vcpu_restore(box->vcpus[0], bad.vcpus[0].data, bad.vcpus[0].len, &err);
		vm_r = kvm_restore(&box->kvm, bad.vm.data, bad.vm.len, &vm_err);
		assert_true(r == 0 || (r < 0 && err.msg[0]));
		assert_true(vm_r == 0 || (vm_r < 0 && vm_err.msg[0]));
		taken += r == 0;
		vm_taken += vm_r == 0;
		if (r == 0 && run < HOSTILE_RUNS) {
			box_start(box);
			vcpus_pause(box->vcpus, 1);
			vcpus_resume(box->vcpus, 1);
			vcpus_pause(box->vcpus, 1);
			box_new_vm(box);
			run++;
		}
	}
	print_message("%d states, %u of a vCPU and %u of a VM taken, %u run\n", HOSTILE, taken,
		vm_taken, run);
	assert_in_range(taken, 1, HOSTILE - 1);
	assert_in_range(vm_taken, 1, HOSTILE - 1);
	box_new_vm(box);
	box_restore(box, &saved); // and what is sound is still taken
	box_state_fini(&saved);
	box_state_fini(&bad);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, box_setup, box_teardown)
		TEST(no_timer_is_lost),
		TEST(the_clock_goes_on_from_where_it_stood),
		TEST(vector_registers_stay),
		TEST(a_pending_interrupt_comes_along),
		TEST(two_vcpus_go_on),
		TEST(a_new_process_goes_on),
		TEST(a_parked_machine_goes_back),
		TEST(what_does_not_fit_is_refused),
		TEST(a_hostile_state_harms_the_guest_alone),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
