// SPDX-License-Identifier: Apache-2.0
// The VM side of KVM: opening it, what it can do, memory slots, interrupts and notifications.
// Only this file, vcpu and their architecture parts issue KVM ioctls. Main thread, before the
// vCPUs run, unless a function says otherwise.
// Specification: Documentation/virt/kvm/api.rst of Linux.
#ifndef MAYFLY_KVM_H
#define MAYFLY_KVM_H

#include "vmm/base/err.h"
#include "vmm/guest_mem.h"

struct buf;

struct kvm {
	int fd; // /dev/kvm, owned
	int vm_fd; // owned, -1 until kvm_create_vm()
	size_t run_bytes; // of the mapping of a vCPU's struct kvm_run
	unsigned int max_vcpus;
	bool emulation_bytes; // a failed emulation reports the instruction's bytes
};

// Opens path (normally "/dev/kvm") and checks that it offers what mayfly needs.
// -ENOENT, -EACCES, -ENODEV: no KVM for us, with the cure in the message; -ENOTSUP: KVM lacks a
// capability, which is named.
int kvm_open(struct kvm *kvm, const char *path, struct err *err);

// Creates the VM with the architecture's interrupt controller.
int kvm_create_vm(struct kvm *kvm, struct err *err);

// Accepts a zeroed or half-made object.
void kvm_close(struct kvm *kvm);

// Gives the guest its RAM, slot i for region i. log_dirty turns dirty logging on or off and may be
// changed later by calling again.
int kvm_set_ram(struct kvm *kvm, const struct guest_mem *mem, bool log_dirty, struct err *err);

// Adds the pages that the guest has written since dirty logging began, or since the last call, to
// bitmap (a bit a page of all RAM, as in guest_mem.h). vCPUs are parked. -ENOMEM, or the errno of
// KVM_GET_DIRTY_LOG.
int kvm_dirty_log(struct kvm *kvm, const struct guest_mem *mem, uint64_t *bitmap, struct err *err);

// Writing to event_fd raises an edge on the interrupt line gsi from now on.
int kvm_irqfd(struct kvm *kvm, int event_fd, uint32_t gsi, struct err *err);

// A 4-byte guest write of datamatch to addr (MMIO) signals event_fd without leaving the kernel.
int kvm_ioeventfd(struct kvm *kvm, int event_fd, gpa_t addr, uint32_t datamatch, struct err *err);

// KVM_CHECK_EXTENSION on the VM if there is one, else on KVM; 0 if absent.
int kvm_check(const struct kvm *kvm, int cap);

// Appends what of the VM is not in its vCPUs to out: interrupt controllers, timers, the clock. All
// vCPUs are parked, and are saved afterwards. Main thread. -ENOMEM, or the errno of an ioctl.
int kvm_save(struct kvm *kvm, struct buf *out, struct err *err);

// The reverse, into a VM whose vCPUs have all been restored and have not been started yet, or are
// parked; devices are restored afterwards. The guest's clock goes on from where it stood when it
// was saved. -EINVAL for data that is not a VM's, or the errno of an ioctl; then the VM is of no
// more use.
int kvm_restore(struct kvm *kvm, const void *data, size_t len, struct err *err);

// Implemented by vmm/ARCH: what the VM needs between its creation and that of its vCPUs.
int kvm_arch_init_vm(struct kvm *kvm, struct err *err);

// The capabilities that the architecture needs, ended by an entry without a name.
struct kvm_need {
	int cap;
	const char *name;
};
extern const struct kvm_need kvm_arch_needs[];

#endif
