// SPDX-License-Identifier: Apache-2.0
// boot_params and hvm_start_info. Main thread, before the vCPUs start.
#include "vmm/x86_64/boot_params.h"

#include <asm/bootparam.h>
#include <errno.h>
#include <string.h>

#include "vmm/x86_64/layout.h"

// Fields of the setup header that a vmlinux does not bring itself.
#define BOOT_FLAG           0xaa55
#define HEADER_MAGIC        0x53726448 // "HdrS"
#define PROTOCOL_VERSION    0x020f
#define LOADER_TYPE_UNKNOWN 0xff
#define ALT_MEM_START       (1 * MIB)

// Xen: public/arch-x86/hvm/start_info.h, version 1.
#define PVH_MAGIC   0x336ec578
#define PVH_VERSION 1

struct pvh_start_info {
	le32_t magic;
	le32_t version;
	le32_t flags;
	le32_t nr_modules;
	le64_t modlist_paddr;
	le64_t cmdline_paddr;
	le64_t rsdp_paddr;
	le64_t memmap_paddr;
	le32_t memmap_entries;
	le32_t reserved;
};

struct pvh_module {
	le64_t paddr;
	le64_t size_bytes;
	le64_t cmdline_paddr;
	le64_t reserved;
};

struct pvh_memmap_entry {
	le64_t addr;
	le64_t size_bytes;
	le32_t type;
	le32_t reserved;
};

_Static_assert(sizeof(struct boot_params) == PAGE_BYTES, "the zero page is a page");
_Static_assert(E820_ENTRIES_MAX <= E820_MAX_ENTRIES_ZEROPAGE, "the memory map fits");
_Static_assert(sizeof(struct pvh_start_info) == 56 && sizeof(struct pvh_module) == 32 &&
		       sizeof(struct pvh_memmap_entry) == 24,
	"as Xen lays them out");

unsigned int e820_map(
	const struct guest_mem *mem, struct e820_range ret_ranges[static E820_ENTRIES_MAX])
{
	unsigned int nr = 0;

	ASSERT(mem->nr_regions >= 1 && mem->nr_regions <= 2 && mem->regions[0].base.v == 0 &&
		mem->regions[0].size_bytes >= LAYOUT_KERNEL_MIN_GPA);
	ret_ranges[nr++] = (struct e820_range){0, LAYOUT_LOW_RAM_END, E820_RAM};
	ret_ranges[nr++] = (struct e820_range){
		LAYOUT_LOW_RAM_END, LAYOUT_KERNEL_MIN_GPA - LAYOUT_LOW_RAM_END, E820_RESERVED};
	if (mem->regions[0].size_bytes > LAYOUT_KERNEL_MIN_GPA)
		ret_ranges[nr++] = (struct e820_range){LAYOUT_KERNEL_MIN_GPA,
			mem->regions[0].size_bytes - LAYOUT_KERNEL_MIN_GPA, E820_RAM};
	if (mem->nr_regions == 2)
		ret_ranges[nr++] = (struct e820_range){
			mem->regions[1].base.v, mem->regions[1].size_bytes, E820_RAM};
	return nr;
}

static int write_at(
	const struct guest_mem *mem, uint64_t gpa, const void *src, size_t len, struct err *err)
{
	int r = guest_mem_write(mem, GPA(gpa), src, len);

	if (r < 0)
		return err_set(err, r, "boot structures at 0x%llx: no memory there",
			(unsigned long long)gpa);
	return 0;
}

int boot_params_write(const struct guest_mem *mem, const struct boot_info *info, struct err *err)
{
	struct e820_range ranges[E820_ENTRIES_MAX];
	unsigned int nr = e820_map(mem, ranges);
	struct boot_params params;

	memset(&params, 0, sizeof(params));
	if (info->kernel->setup_header_bytes) {
		memcpy(&params.hdr, info->kernel->setup_header, info->kernel->setup_header_bytes);
	} else {
		params.hdr.boot_flag = BOOT_FLAG;
		params.hdr.header = HEADER_MAGIC;
		params.hdr.version = PROTOCOL_VERSION;
		params.hdr.loadflags = LOADED_HIGH;
		params.hdr.initrd_addr_max = (uint32_t)(info->kernel->initramfs_end_gpa - 1);
	}
	params.hdr.type_of_loader = LOADER_TYPE_UNKNOWN;
	params.hdr.cmd_line_ptr = (uint32_t)info->cmdline.v;
	if (info->initramfs_bytes) {
		ASSERT(info->initramfs.v + info->initramfs_bytes <= LAYOUT_MMIO_GAP_START);
		params.hdr.ramdisk_image = (uint32_t)info->initramfs.v;
		params.hdr.ramdisk_size = (uint32_t)info->initramfs_bytes;
	}
	params.alt_mem_k = (uint32_t)((mem->regions[0].size_bytes - ALT_MEM_START) / KIB);
	for (unsigned int i = 0; i < nr; i++)
		params.e820_table[i] = (struct boot_e820_entry){
			ranges[i].base, ranges[i].size_bytes, ranges[i].type};
	params.e820_entries = (uint8_t)nr;
	return write_at(mem, LAYOUT_BOOT_PARAMS_GPA, &params, sizeof(params), err);
}

int pvh_start_info_write(const struct guest_mem *mem, const struct boot_info *info, struct err *err)
{
	struct pvh_memmap_entry memmap[E820_ENTRIES_MAX];
	struct e820_range ranges[E820_ENTRIES_MAX];
	unsigned int nr = e820_map(mem, ranges);
	struct pvh_module module = {
		.paddr = le64_of(info->initramfs.v),
		.size_bytes = le64_of(info->initramfs_bytes),
	};
	struct pvh_start_info start = {
		.magic = le32_of(PVH_MAGIC),
		.version = le32_of(PVH_VERSION),
		.cmdline_paddr = le64_of(info->cmdline.v),
		.memmap_paddr = le64_of(LAYOUT_PVH_MEMMAP_GPA),
		.memmap_entries = le32_of(nr),
	};
	int r;

	for (unsigned int i = 0; i < nr; i++)
		memmap[i] = (struct pvh_memmap_entry){
			.addr = le64_of(ranges[i].base),
			.size_bytes = le64_of(ranges[i].size_bytes),
			.type = le32_of(ranges[i].type),
		};
	if (info->initramfs_bytes) {
		start.nr_modules = le32_of(1);
		start.modlist_paddr = le64_of(LAYOUT_PVH_MODULES_GPA);
		r = write_at(mem, LAYOUT_PVH_MODULES_GPA, &module, sizeof(module), err);
		if (r < 0)
			return r;
	}
	r = write_at(mem, LAYOUT_PVH_MEMMAP_GPA, memmap, nr * sizeof(memmap[0]), err);
	if (r < 0)
		return r;
	return write_at(mem, LAYOUT_PVH_START_GPA, &start, sizeof(start), err);
}
