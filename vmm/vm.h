// SPDX-License-Identifier: Apache-2.0
// Puts a machine together out of its parts, runs it, takes it apart. The only module that knows
// them all. Loop thread.
#ifndef MAYFLY_VM_H
#define MAYFLY_VM_H

#include "vmm/config.h"
#include "vmm/vcpu.h"

struct vm;

// In the working directory of the process, which is the machine's run folder.
#define VM_VSOCK_SOCKET "vsock.sock"

enum vm_end {
	VM_END_RESET, // the guest asked for a reset, which ends the VM
	VM_END_STOPPED, // vm_stop()
	VM_END_ERROR, // something failed: err says what
};

struct vm_params {
	const struct config *config; // borrowed until vm_destroy()
	const char *dir; // the machine's folder, which is its identity; borrowed likewise
	// What the guest prints. Loop thread. It must not block.
	void (*console)(void *opaque, const uint8_t *data, size_t len);
	// All vCPUs have answered to vm_log_where(). A vCPU thread.
	void (*where_told)(void *opaque);
	void *opaque;
};

// Makes the machine, with its kernel loaded, ready to run.
int vm_create(struct vm **ret_vm, const struct vm_params *params, struct err *err);

// Accepts NULL.
void vm_destroy(struct vm *vm);

// Runs until the guest or somebody ends it. *ret_end is set in any case; negative only with
// VM_END_ERROR.
int vm_run(struct vm *vm, enum vm_end *ret_end, struct err *err);

// Ends it. Any thread, not from a signal handler.
void vm_stop(struct vm *vm);

// Logs where each vCPU is, with the kernel's symbol if System.map lies beside the kernel.
void vm_log_where(struct vm *vm);

struct vm_stats {
	uint64_t first_run_ns; // CLOCK_MONOTONIC of the first KVM_RUN, 0 if none
	uint64_t first_run_cpu_ns; // CPU time of this process until about then
	uint64_t exits[VCPU_EXIT_KINDS];
	uint64_t unclaimed; // accesses that no device answered
	uint64_t console_bytes;
	uint64_t console_dropped;
	bool emulated_ring0;
};

void vm_stats(struct vm *vm, struct vm_stats *ret_stats);

// Whether an address of this process lies in the guest's RAM.
bool vm_is_guest_ram(const struct vm *vm, const void *addr);

struct loop *vm_loop(struct vm *vm);

// Every machine has one: for virtio_balloon_set_target() and its sisters. Loop thread.
struct virtio_dev *vm_balloon(struct vm *vm);

#endif
