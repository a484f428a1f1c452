// SPDX-License-Identifier: Apache-2.0
// What the kernel is told about the machine: Linux' boot_params ("zero page") or Xen's
// hvm_start_info for PVH, each with the same memory map. Main thread, before the vCPUs start.
#ifndef MAYFLY_X86_64_BOOT_PARAMS_H
#define MAYFLY_X86_64_BOOT_PARAMS_H

#include "vmm/loader.h"

// Types of an e820 range, the same in both.
#define E820_RAM      1
#define E820_RESERVED 2

#define E820_ENTRIES_MAX 4

struct e820_range {
	uint64_t base;
	uint64_t size_bytes;
	uint32_t type;
};

// The memory map of mem, ascending. Returns the number of ranges.
unsigned int e820_map(
	const struct guest_mem *mem, struct e820_range ret_ranges[static E820_ENTRIES_MAX]);

struct boot_info {
	const struct loaded_kernel *kernel;
	gpa_t initramfs; // ignored when initramfs_bytes is 0
	uint64_t initramfs_bytes;
	gpa_t cmdline; // NUL-terminated, in guest memory
};

// Both write to the place that layout.h gives them. -EFAULT if guest memory is smaller than that.
int boot_params_write(const struct guest_mem *mem, const struct boot_info *info, struct err *err);
int pvh_start_info_write(
	const struct guest_mem *mem, const struct boot_info *info, struct err *err);

#endif
