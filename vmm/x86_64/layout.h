// SPDX-License-Identifier: Apache-2.0
// The guest physical address space of an x86-64 machine, in one place. Before the vCPUs start.
//
//   0x00001000  GDT                                 all of this up to 1 MiB is ours until the
//   0x00002000  boot_params                         kernel has copied what it wants; nothing
//   0x00003000  hvm_start_info and its lists (PVH)  of the kernel may be loaded below 1 MiB
//   0x00004000  command line
//   0x00010000  page tables: PML4, PDPT, four PDs
//   0x0009e000  MP configuration table              reserved from here to 1 MiB
//   0x0009fc00  MP floating pointer                 (where Linux looks for it)
//   0x00100000  RAM: the kernel where its headers say (usually 16 MiB), the initramfs at the top
//   0xc0000000  MMIO: virtio slots, IOAPIC, local APICs, KVM's own pages
//  0x100000000  RAM beyond 3 GiB
#ifndef MAYFLY_X86_64_LAYOUT_H
#define MAYFLY_X86_64_LAYOUT_H

#include "vmm/base/err.h"
#include "vmm/guest_mem.h"

#define LAYOUT_GDT_GPA          0x1000ULL
#define LAYOUT_BOOT_PARAMS_GPA  0x2000ULL
#define LAYOUT_PVH_START_GPA    0x3000ULL
#define LAYOUT_PVH_MODULES_GPA  0x3400ULL
#define LAYOUT_PVH_MEMMAP_GPA   0x3800ULL
#define LAYOUT_CMDLINE_GPA      0x4000ULL
#define LAYOUT_PAGE_TABLES_GPA  0x10000ULL
#define LAYOUT_MP_TABLE_GPA     0x9e000ULL
#define LAYOUT_MP_FLOATING_GPA  0x9fc00ULL
#define LAYOUT_LOW_RAM_END      LAYOUT_MP_TABLE_GPA
#define LAYOUT_KERNEL_MIN_GPA   (1 * MIB)
#define LAYOUT_MMIO_GAP_START   (3 * GIB)
#define LAYOUT_MMIO_GAP_END     (4 * GIB)
#define LAYOUT_MEMORY_MAX_BYTES (1024 * GIB)

// virtio-mmio: a slot a device, its GSI an IOAPIC pin of its own, edge-triggered. Pin 8 is left
// out: for KVM it is that of an RTC, and it wants to hear of each end of an interrupt there: an
// exit that others are spared.
#define LAYOUT_VIRTIO_GPA        0xd0000000ULL
#define LAYOUT_VIRTIO_SLOT_BYTES 0x1000ULL
#define LAYOUT_VIRTIO_SLOTS      16U
#define LAYOUT_VIRTIO_GSI        5U
#define LAYOUT_RTC_GSI           8U

#define LAYOUT_IOAPIC_GPA  0xfec00000ULL
#define LAYOUT_IOAPIC_PINS 24U
#define LAYOUT_LAPIC_GPA   0xfee00000ULL

// For KVM_SET_IDENTITY_MAP_ADDR (a page) and KVM_SET_TSS_ADDR (three pages).
#define LAYOUT_KVM_IDENTITY_MAP_GPA 0xfffbc000ULL
#define LAYOUT_KVM_TSS_GPA          0xfffbd000ULL

static inline gpa_t layout_virtio_gpa(unsigned int slot)
{
	ASSERT(slot < LAYOUT_VIRTIO_SLOTS);
	return GPA(LAYOUT_VIRTIO_GPA + slot * LAYOUT_VIRTIO_SLOT_BYTES);
}

static inline unsigned int layout_virtio_gsi(unsigned int slot)
{
	ASSERT(slot < LAYOUT_VIRTIO_SLOTS);
	return LAYOUT_VIRTIO_GSI + slot + (LAYOUT_VIRTIO_GSI + slot >= LAYOUT_RTC_GSI);
}

// As it was before snapshots told: one after another.
static inline unsigned int layout_virtio_old_gsi(unsigned int slot)
{
	ASSERT(slot < LAYOUT_VIRTIO_SLOTS);
	return LAYOUT_VIRTIO_GSI + slot;
}

// Where memory_bytes of RAM lie: one range, or two around the MMIO gap. Returns their number.
// -EINVAL unless it is a multiple of the page size between 1 MiB, which the boot structures need,
// and LAYOUT_MEMORY_MAX_BYTES. (Whether a kernel fits is known only to boot_load().)
int layout_ram_ranges(uint64_t memory_bytes,
	struct guest_mem_range ret_ranges[static GUEST_MEM_REGIONS_MAX], struct err *err);

#endif
