// SPDX-License-Identifier: Apache-2.0
// A whole machine; see the header. Loop thread, but for the callbacks that say otherwise.
#include "vmm/vm_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "devices/serial.h"
#include "devices/virtio_balloon.h"
#include "devices/virtio_mmio.h"
#include "devices/virtio_net.h"
#include "devices/virtio_rng.h"
#include "devices/virtio_vsock.h"
#include "snapshot/lazy.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/builtin.h"
#include "vmm/disk.h"
#include "vmm/kvm.h"
#include "vmm/machine.h"
#include "vmm/passt.h"
#include "vmm/symbols.h"

void vm_end(struct vm *vm, enum vm_end_reason how, const struct err *err)
{
	pthread_mutex_lock(&vm->lock);
	if (!vm->ended) {
		vm->ended = true;
		vm->end = how;
		if (err)
			vm->end_err = *err;
	}
	pthread_mutex_unlock(&vm->lock);
	loop_stop(&vm->loop);
}

// vCPU thread.
static void on_vcpu_stopped(
	void *opaque, unsigned int id, enum vcpu_stop why, const struct err *err)
{
	struct err wrapped = *err;

	if (why == VCPU_STOP_ERROR)
		err_wrap(&wrapped, wrapped.code, "vCPU %u", id);
	vm_end(opaque, why == VCPU_STOP_RESET ? VM_END_RESET : VM_END_ERROR, &wrapped);
}

// vCPU thread.
static int on_vcpu_confine(void *opaque, struct err *err)
{
	struct vm *vm = opaque;

	return vm->params.confine_thread ? vm->params.confine_thread(JAIL_VCPU, err) : 0;
}

// vCPU thread.
static void on_reset(void *opaque)
{
	vm_end(opaque, VM_END_RESET, NULL);
}

// vCPU thread.
static void on_where(void *opaque, unsigned int id, const struct vcpu_where *where)
{
	struct vm *vm = opaque;
	char symbol[SYMBOL_BYTES] = "";

	if (where->privilege == 0)
		symbols_lookup(vm->symbols_fd, where->ip, symbol);
	log_line(LOG_WARN, "vcpu", "%u is at 0x%llx%s%s in %s mode, sp 0x%llx, after %llu exits",
		id, (unsigned long long)where->ip, symbol[0] ? " " : "", symbol,
		where->privilege == 0 ? "kernel" : "user", (unsigned long long)where->sp,
		(unsigned long long)where->exits);
	if (atomic_fetch_sub(&vm->where_owed, 1) == 1)
		vm->params.where_told(vm->params.opaque);
}

static void on_console(void *opaque, const uint8_t *data, size_t len)
{
	struct vm *vm = opaque;

	vm->params.console(vm->params.opaque, data, len);
}

static int init_memory(struct vm *vm, struct err *err)
{
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	int nr = machine_ram_ranges(vm->params.config->memory_bytes, ranges, err), r;

	if (nr < 0)
		return nr;
	r = guest_mem_init(&vm->mem, ranges, (unsigned int)nr, err);
	return r < 0 ? r : kvm_set_ram(&vm->kvm, &vm->mem, false, err);
}

static int init_vcpus(struct vm *vm, struct err *err)
{
	unsigned int nr = vm->params.config->cpus;
	int r;

	if (nr > vm->kvm.max_vcpus)
		return err_set(err, -ERANGE, "%u vCPUs: this host's KVM offers at most %u", nr,
			vm->kvm.max_vcpus);
	vm->env = (struct vcpu_env){
		.kvm = &vm->kvm,
		.mem = &vm->mem,
		.mmio = &vm->mmio,
		.pio = &vm->pio,
		.nr_vcpus = nr,
		.stopped = on_vcpu_stopped,
		.parked_one = vm_on_vcpu_parked,
		.confine = on_vcpu_confine,
		.where = on_where,
		.opaque = vm,
	};
	r = vcpu_env_init(&vm->env, err);
	if (r < 0)
		return r;
	vm->env_up = true;
	while (vm->nr_vcpus < nr) {
		r = vcpu_create(&vm->vcpus[vm->nr_vcpus], &vm->env, vm->nr_vcpus, err);
		if (r < 0)
			return r;
		vm->nr_vcpus++;
	}
	return 0;
}

// Gives a device its place on the MMIO bus: registers, notifications that do not exit, and a word
// on the kernel's command line. make() creates it.
static int add_virtio(struct vm *vm, struct cmdline *cmdline,
	int (*make)(struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev,
		struct err *err),
	struct err *err)
{
	struct virtio_slot *slot = &vm->virtio[vm->nr_virtio];
	struct virtio_env env = {.mem = &vm->mem, .loop = &vm->loop};
	gpa_t gpa;
	int r;

	ASSERT(vm->nr_virtio < VIRTIO_DEVICES_MAX);
	r = machine_virtio_slot(vm->nr_virtio, vm->params.snapshot != NULL, &gpa, &env.gsi, err);
	if (r < 0)
		return r;
	*slot = (struct virtio_slot){.irq_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
	if (slot->irq_fd < 0)
		return err_errno(err, -errno, "eventfd");
	vm->nr_virtio++;
	env.irq_fd = slot->irq_fd;
	r = make(vm, &env, &slot->dev, err);
	if (r == 0)
		r = bus_add(
			&vm->mmio, gpa.v, VIRTIO_MMIO_BYTES, &virtio_mmio_bus_ops, slot->dev, err);
	for (unsigned int q = 0; r == 0 && q < slot->dev->nr_queues; q++)
		r = kvm_ioeventfd(&vm->kvm, virtio_dev_notify_fd(slot->dev, q),
			GPA(gpa.v + VIRTIO_MMIO_NOTIFY_OFF), q, err);
	return r < 0 ? r
		     : cmdline_add_virtio_mmio(
			       cmdline, gpa, MACHINE_VIRTIO_SLOT_BYTES, env.gsi, err);
}

// Only now: a snapshot says which interrupt its guest was told of. It is one of the two that a slot
// may have. What was signalled before comes through.
static int connect_interrupts(struct vm *vm, struct err *err)
{
	int r = 0;

	for (unsigned int i = 0; r == 0 && i < vm->nr_virtio; i++) {
		const uint32_t gsi = virtio_dev_gsi(vm->virtio[i].dev);
		uint32_t own, old;
		gpa_t gpa;

		r = machine_virtio_slot(i, false, &gpa, &own, err);
		if (r == 0)
			r = machine_virtio_slot(i, true, &gpa, &old, err);
		if (r == 0 && gsi != own && gsi != old)
			r = err_set(err, -EINVAL,
				"device %u has interrupt %u, which is not its own", i, gsi);
		if (r == 0)
			r = kvm_irqfd(&vm->kvm, vm->virtio[i].irq_fd, gsi, err);
	}
	return r;
}

static int make_rng(
	struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev, struct err *err)
{
	(void)vm;
	return virtio_rng_create(ret_dev, env, err);
}

static int make_balloon(
	struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev, struct err *err)
{
	int r = virtio_balloon_create(ret_dev, env, err);

	if (r == 0)
		vm->balloon = *ret_dev;
	return r;
}

static int make_vsock(
	struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev, struct err *err)
{
	struct vsock_config config = {
		.guest_cid = vm->params.config->cid,
		.socket_path = VM_VSOCK_SOCKET,
		.listen_path = vm->params.snapshot ? VM_WAKING_SOCKET : NULL,
		.conn_ended = vm_on_conn_ended,
		.opaque = vm,
	};

	int r = virtio_vsock_create(ret_dev, &config, env, err);

	if (r == 0)
		vm->vsock = *ret_dev;
	return r;
}

// What passt's guests have where nothing else is said: nobody but the guest sees it.
#define PASST_ADDRESS "10.0.2.15/24"
#define PASST_GATEWAY "10.0.2.2"
#define PASST_DNS     "10.0.2.3"
#define PASST_MTU     65520U // it knows no segmentation: large packets instead

static const char *or_else(const char *text, const char *otherwise)
{
	return text[0] ? text : otherwise;
}

static int open_net(const struct config_net *net, const char *dir, struct virtio_net_params *params,
	struct err *err)
{
	if (net->mode == CONFIG_NET_TAP && !net->tap[0])
		return err_set(err, -EINVAL, "[net] mode is tap, but no tap is named");
	if (net->mode == CONFIG_NET_TAP) {
		params->kind = VIRTIO_NET_TAP;
		return virtio_net_open_tap(net->tap, &params->fd, &params->mtu, err);
	}
	params->kind = VIRTIO_NET_STREAM;
	params->mtu = PASST_MTU;
	return passt_start(
		&(struct passt_config){
			.address = or_else(net->address, PASST_ADDRESS),
			.gateway = or_else(net->gateway, PASST_GATEWAY),
			.dns = or_else(net->dns, PASST_DNS),
			.mtu = PASST_MTU,
			.rules_of = config_net_has_rules(net) ? dir : NULL,
		},
		&params->fd, err);
}

static int make_net(
	struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev, struct err *err)
{
	const struct config_net *net = &vm->params.config->net;
	struct virtio_net_params params = {
		.fd = -1,
		.rate = {.bytes.per_s = net->bytes_per_s, .ops.per_s = net->packets_per_s},
	};
	int r = open_net(net, vm->params.dir, &params, err);

	if (r < 0)
		return r;
	config_net_mac(net, vm->params.dir, params.mac);
	r = virtio_net_create(ret_dev, &params, env, err);
	if (r < 0)
		fd_close(&params.fd);
	return r;
}

// What the agent is to make of it: ADDRESS/BITS,GATEWAY,DNS.
static int add_net(struct vm *vm, struct cmdline *cmdline, struct err *err)
{
	const struct config_net *net = &vm->params.config->net;
	const bool passt = net->mode != CONFIG_NET_TAP;
	int r;

	if (!config_net_has_device(net))
		return 0;
	r = add_virtio(vm, cmdline, make_net, err);
	if (r < 0)
		return err_wrap(err, r, "network");
	return cmdline_add(cmdline, err, "mayfly_net=%s,%s,%s",
		or_else(net->address, passt ? PASST_ADDRESS : ""),
		or_else(net->gateway, passt ? PASST_GATEWAY : ""),
		or_else(net->dns, passt ? PASST_DNS : ""));
}

static int make_disk(
	struct vm *vm, const struct virtio_env *env, struct virtio_dev **ret_dev, struct err *err)
{
	const struct disk_params params = {
		.config = &vm->params.config->disks[vm->disk_idx],
		.name = config_disk_name(vm->disk_idx),
		.dir = vm->params.dir,
		.dir_fd = vm->params.dir_fd,
		.cpus = vm->params.config->cpus,
		.throwaway = vm->params.throwaway,
	};
	int r = disk_create(ret_dev, &params, env, err);

	vm->disks[vm->disk_idx] = r == 0 ? *ret_dev : NULL;
	return r;
}

// Tells the agent that its root is the first disk, and whether it may write there.
static int add_root(const struct vm *vm, struct cmdline *cmdline, struct err *err)
{
	const struct config *config = vm->params.config;
	int r;

	if (config->root != CONFIG_ROOT_DISK)
		return config->init[0] ? err_set(err, -EINVAL,
						 "[machine] init is for root = disk (--image)")
				       : 0;
	if (!config_has_disk(&config->disks[0]))
		return err_set(err, -EINVAL, "[machine] root is disk, but there is no [disk]");
	r = cmdline_add(cmdline, err, "mayfly_root=%s",
		config->disks[0].mode == CONFIG_DISK_RO ? "ro" : "rw");
	if (r == 0 && config->init[0])
		r = cmdline_add(cmdline, err, "mayfly_init=%s", config->init);
	return r;
}

static int open_image(const char *path, int *ret_fd, uint64_t *ret_bytes, struct err *err)
{
	struct stat st;
	CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", path);
	if (!S_ISREG(st.st_mode))
		return err_set(err, -EINVAL, "%s: not a regular file", path);
	*ret_fd = TAKE_FD(fd);
	*ret_bytes = (uint64_t)st.st_size;
	return 0;
}

static int load(struct vm *vm, const char *cmdline, struct err *err)
{
	const struct config *config = vm->params.config;
	CLEANUP_FD int kernel_fd = -1;
	CLEANUP_FD int initramfs_fd = -1;
	struct initramfs_part part = {.name = config->initramfs};
	struct machine_boot boot = {
		.kernel_path = config->kernel,
		.initramfs = &part,
		.cmdline = cmdline,
	};
	uint64_t kernel_bytes;
	int r;

	r = open_image(config->kernel, &kernel_fd, &kernel_bytes, err);
	if (r < 0)
		return err_wrap(err, r, "kernel");
	if (!strcmp(config->initramfs, BUILTIN_NAME)) {
		part.data = builtin_initramfs;
		part.len_bytes = (uint64_t)(builtin_initramfs_end - builtin_initramfs);
		boot.nr_initramfs = 1;
	} else if (config->initramfs[0]) {
		r = open_image(config->initramfs, &initramfs_fd, &part.len_bytes, err);
		if (r < 0)
			return err_wrap(err, r, "initramfs");
		part.fd = initramfs_fd;
		boot.nr_initramfs = 1;
	}
	boot.kernel_fd = kernel_fd;
	r = machine_boot(&vm->mem, vm->vcpus, vm->nr_vcpus, &boot, err);
	// It is in the guest now; the pages of the program need not stay.
	if (part.data)
		madvise((void *)(uintptr_t)builtin_initramfs, part.len_bytes, MADV_DONTNEED);
	return r;
}

int vm_confine(struct vm *vm, struct err *err)
{
	return vm->params.confine ? vm->params.confine(vm->params.opaque, err) : 0;
}

static int assemble(struct vm *vm, struct err *err)
{
	const struct config *config = vm->params.config;
	struct cmdline cmdline = {0};
	struct machine_config machine = {
		.kvm = &vm->kvm,
		.loop = &vm->loop,
		.mmio = &vm->mmio,
		.pio = &vm->pio,
		.console = on_console,
		.reset = on_reset,
		.opaque = vm,
	};
	int r;

	r = kvm_open(&vm->kvm, "/dev/kvm", err);
	if (r == 0)
		r = loop_init(&vm->loop, err);
	if (r == 0)
		r = kvm_create_vm(&vm->kvm, err);
	if (r == 0)
		r = init_memory(vm, err);
	if (r == 0)
		r = machine_create(&vm->machine, &machine, err);
	if (r == 0)
		r = init_vcpus(vm, err);
	if (r == 0)
		r = machine_cmdline(&vm->env, &cmdline, err);
	if (r == 0)
		// The order of the slots is fixed: a guest finds them by it, and a snapshot its
		// state.
		r = add_virtio(vm, &cmdline, make_vsock, err);
	if (r == 0)
		r = add_virtio(vm, &cmdline, make_rng, err);
	if (r == 0)
		r = add_virtio(vm, &cmdline, make_balloon, err);
	if (r == 0)
		r = add_net(vm, &cmdline, err);
	for (vm->disk_idx = 0; r == 0 && vm->disk_idx < CONFIG_DISKS_MAX; vm->disk_idx++)
		if (config_has_disk(&config->disks[vm->disk_idx]))
			r = add_virtio(vm, &cmdline, make_disk, err);
	if (r == 0)
		r = add_root(vm, &cmdline, err);
	if (r == 0 && config->append[0])
		r = cmdline_add_user(&cmdline, config->append, strlen(config->append), err);
	if (r == 0)
		r = vm_rest_init(vm, err);
	if (r == 0)
		r = vm->params.snapshot ? vm_load(vm, vm->params.snapshot, err)
					: load(vm, cmdline.text, err);
	if (r == 0)
		r = connect_interrupts(vm, err);
	if (r == 0 && !vm->params.snapshot)
		r = vm_confine(vm, err);
	return r;
}

static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

int vm_create(struct vm **ret_vm, const struct vm_params *params, struct err *err)
{
	struct vm *vm = calloc(1, sizeof(*vm));
	int r;

	if (!vm)
		return err_errno(err, -ENOMEM, "VM");
	vm->params = *params;
	vm->kvm = (struct kvm){.fd = -1, .vm_fd = -1};
	vm->rest = (struct vm_rest){.parked_fd = -1, .watch = -1, .resting = params->snapshot};
	vm->saving = (struct vm_saving){
		.request = {.state_fd = -1, .memory_fd = -1}, .result_fd = -1, .watch = -1};
	vm->working.fd = -1;
	vm->symbols_fd = symbols_open(params->config->kernel);
	vm->oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
	if (vm->oom_fd >= 0 && read(vm->oom_fd, vm->oom_score, sizeof(vm->oom_score) - 1) <= 0)
		fd_close(&vm->oom_fd);
	pthread_mutex_init(&vm->lock, NULL);
	r = assemble(vm, err);
	if (r < 0) {
		vm_destroy(vm);
		return r;
	}
	*ret_vm = vm;
	return 0;
}

void vm_destroy(struct vm *vm)
{
	if (!vm)
		return;
	for (unsigned int i = 0; i < vm->nr_vcpus; i++)
		vcpu_destroy(vm->vcpus[i]);
	vm_rest_fini(vm);
	if (vm->env_up)
		vcpu_env_fini(&vm->env);
	for (unsigned int i = 0; i < vm->nr_virtio; i++) {
		virtio_dev_destroy(vm->virtio[i].dev);
		fd_close(&vm->virtio[i].irq_fd);
	}
	machine_destroy(vm->machine);
	kvm_close(&vm->kvm);
	vm_memory_fini(vm);
	guest_mem_fini(&vm->mem);
	loop_fini(&vm->loop);
	fd_close(&vm->symbols_fd);
	fd_close(&vm->oom_fd);
	pthread_mutex_destroy(&vm->lock);
	free(vm);
}

int vm_run(struct vm *vm, enum vm_end_reason *ret_end, struct err *err)
{
	int r = 0;

	vm->start_cpu_ns = cpu_ns();
	if (vm->rest.resting)
		vm_resume_devices(vm);
	for (unsigned int i = 0; i < vm->nr_vcpus && r == 0; i++)
		r = vcpu_start(vm->vcpus[i], err);
	// Last, since it starts no threads then; and it has not listened to the guest yet.
	if (r == 0 && vm->params.confine_thread)
		r = vm->params.confine_thread(JAIL_LOOP, err);
	if (r == 0)
		r = loop_run(&vm->loop, err);
	// A vCPU may wait for the loop to act upon a register write: it does not turn any more.
	for (unsigned int i = 0; i < vm->nr_virtio; i++)
		virtio_dev_stop(vm->virtio[i].dev);
	// From here on the devices see no access by a vCPU.
	vcpus_pause(vm->vcpus, vm->nr_vcpus);
	serial_flush(machine_console(vm->machine));
	*ret_end = VM_END_ERROR;
	if (r < 0)
		return r;
	pthread_mutex_lock(&vm->lock);
	*ret_end = vm->end;
	if (vm->end == VM_END_ERROR) {
		r = vm->end_err.code;
		if (err)
			*err = vm->end_err;
	}
	pthread_mutex_unlock(&vm->lock);
	return r;
}

void vm_stop(struct vm *vm)
{
	vm_end(vm, VM_END_STOPPED, NULL);
}

void vm_log_where(struct vm *vm)
{
	// Asked again before all have answered: those answers will do.
	unsigned int none = 0;

	if (!atomic_compare_exchange_strong(&vm->where_owed, &none, vm->nr_vcpus))
		return;
	for (unsigned int i = 0; i < vm->nr_vcpus; i++)
		vcpu_ask_where(vm->vcpus[i]);
}

void vm_stats(struct vm *vm, struct vm_stats *ret_stats)
{
	*ret_stats = (struct vm_stats){
		.first_run_ns = atomic_load(&vm->env.first_run_ns),
		.first_run_cpu_ns = vm->start_cpu_ns,
		.unclaimed = atomic_load(&vm->mmio.unclaimed) + atomic_load(&vm->pio.unclaimed),
		.lazy_faults = vm->lazy ? lazy_faults(vm->lazy) : 0,
		.prefetched = vm->lazy ? lazy_prefetched(vm->lazy) : 0,
		.emulated_ring0 = vm->env.emulated_ring0,
	};
	for (unsigned int i = 0; i < vm->nr_vcpus; i++)
		for (int kind = 0; kind < VCPU_EXIT_KINDS; kind++)
			ret_stats->exits[kind] += vcpu_exits(
				vm->vcpus[i], (enum vcpu_exit_kind)kind);
	serial_counts(machine_console(vm->machine), &ret_stats->console_bytes,
		&ret_stats->console_dropped);
}

bool vm_is_guest_ram(const struct vm *vm, const void *addr)
{
	for (unsigned int i = 0; i < vm->mem.nr_regions; i++) {
		const struct guest_mem_region *region = &vm->mem.regions[i];
		uintptr_t off = (uintptr_t)addr - (uintptr_t)region->hva;

		if ((uintptr_t)addr >= (uintptr_t)region->hva && off < region->size_bytes)
			return true;
	}
	return false;
}

struct loop *vm_loop(struct vm *vm)
{
	return &vm->loop;
}

struct virtio_dev *vm_balloon(struct vm *vm)
{
	return vm->balloon;
}
