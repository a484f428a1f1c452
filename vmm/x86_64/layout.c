// SPDX-License-Identifier: Apache-2.0
// The guest physical address space of an x86-64 machine. Before the vCPUs start.
#include "vmm/x86_64/layout.h"

#include <errno.h>

_Static_assert(LAYOUT_VIRTIO_GSI + LAYOUT_VIRTIO_SLOTS + 1 <= LAYOUT_IOAPIC_PINS,
	"each virtio slot has an IOAPIC pin");

int layout_ram_ranges(uint64_t memory_bytes,
	struct guest_mem_range ret_ranges[static GUEST_MEM_REGIONS_MAX], struct err *err)
{
	uint64_t low = MIN(memory_bytes, LAYOUT_MMIO_GAP_START);

	if (memory_bytes % PAGE_BYTES)
		return err_set(err, -EINVAL, "memory of %llu bytes is not a multiple of %llu",
			(unsigned long long)memory_bytes, PAGE_BYTES);
	if (memory_bytes < LAYOUT_KERNEL_MIN_GPA || memory_bytes > LAYOUT_MEMORY_MAX_BYTES)
		return err_set(err, -EINVAL, "memory of %llu KiB is not between 1 MiB and %llu GiB",
			(unsigned long long)(memory_bytes / KIB), LAYOUT_MEMORY_MAX_BYTES / GIB);
	ret_ranges[0] = (struct guest_mem_range){GPA(0), low};
	if (memory_bytes == low)
		return 1;
	ret_ranges[1] = (struct guest_mem_range){GPA(LAYOUT_MMIO_GAP_END), memory_bytes - low};
	return 2;
}
