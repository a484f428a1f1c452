// SPDX-License-Identifier: Apache-2.0
// From files to a machine that is ready for its first instruction: kernel, initramfs, command line,
// tables, and the registers of the boot processor. Main thread, before the vCPUs start; no ioctls.
#ifndef MAYFLY_X86_64_BOOT_H
#define MAYFLY_X86_64_BOOT_H

#include <linux/kvm.h>

#include "vmm/loader.h"

struct boot_config {
	const char *kernel_name; // for messages
	int kernel_fd; // borrowed
	enum boot_protocol want;
	const struct initramfs_part *initramfs; // may be NULL when nr_initramfs is 0
	unsigned int nr_initramfs;
	const char *cmdline;
	unsigned int nr_cpus; // 1 to MPTABLE_CPUS_MAX, APIC ids from 0
};

struct boot_entry {
	enum boot_protocol protocol; // not BOOT_ANY
	uint64_t rip;
	gpa_t info; // boot_params for RSI, or hvm_start_info for EBX
};

// Loads everything into mem, which must be fresh and laid out by layout_ram_ranges(). Errors as
// those of loader_load_kernel(), and -E2BIG for a command line that the kernel would cut off,
// -EINVAL for nr_cpus.
int boot_load(struct guest_mem *mem, const struct boot_config *config, struct boot_entry *ret_entry,
	struct err *err);

// All general registers of the boot processor.
void boot_regs(const struct boot_entry *entry, struct kvm_regs *ret_regs);

// The special registers: *sregs is as KVM_GET_SREGS gave it, and keeps apic_base, cr8 and the
// interrupt bitmap.
void boot_sregs(const struct boot_entry *entry, struct kvm_sregs *sregs);

#endif
