// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/{boot,boot_params,layout}: what boot_load() leaves in guest memory and registers, read
// back as the kernel or the CPU would.
#include "tests/support/test.h"

#include <asm/bootparam.h>
#include <errno.h>
#include <stdlib.h>

#include "tests/support/kernel_image.h"
#include "vmm/base/fd.h"
#include "vmm/x86_64/boot.h"
#include "vmm/x86_64/boot_params.h"
#include "vmm/x86_64/layout.h"

#define CMDLINE "console=ttyS0 quiet"
#define RAM     (64 * MIB)

struct fixture {
	struct guest_mem mem;
	uint8_t image[IMAGE_BYTES_MAX];
	size_t image_bytes;
	struct boot_config config;
	struct boot_entry entry;
	struct err err;
};

static const struct initramfs_part parts[] = {
	{.name = "image", .data = "070701", .fd = -1, .len_bytes = 6},
	{.name = "job", .data = "070701 more", .fd = -1, .len_bytes = 11},
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	if (!f)
		return -1;
	f->image_bytes = image_make_elf(f->image);
	f->config = (struct boot_config){.kernel_name = "some/kernel",
		.kernel_fd = -1,
		.initramfs = parts,
		.nr_initramfs = ARRAY_SIZE(parts),
		.cmdline = CMDLINE,
		.nr_cpus = 2};
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	guest_mem_fini(&f->mem);
	free(f);
	return 0;
}

static void make_ram(struct fixture *f, uint64_t bytes)
{
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	int nr = layout_ram_ranges(bytes, ranges, &f->err);

	assert_true(nr > 0);
	guest_mem_fini(&f->mem);
	assert_int_equal(guest_mem_init(&f->mem, ranges, (unsigned int)nr, &f->err), 0);
}

static int boot(struct fixture *f)
{
	int r;

	f->config.kernel_fd = image_fd(f->image, f->image_bytes);
	r = boot_load(&f->mem, &f->config, &f->entry, &f->err);
	fd_close(&f->config.kernel_fd);
	return r;
}

static void read_guest(struct fixture *f, uint64_t gpa, void *dst, size_t len)
{
	assert_int_equal(guest_mem_read(&f->mem, GPA(gpa), dst, len), 0);
}

static uint64_t read64(struct fixture *f, uint64_t gpa)
{
	uint8_t bytes[8];

	read_guest(f, gpa, bytes, sizeof(bytes));
	return get_le64(bytes);
}

static uint32_t read32(struct fixture *f, uint64_t gpa)
{
	return (uint32_t)read64(f, gpa);
}

// --- Layout and memory map -------------------------------------------------------------------

static void ram_goes_around_the_gap(void **state)
{
	static const struct {
		uint64_t bytes, low, high;
	} cases[] = {
		{1 * MIB, 1 * MIB, 0},
		{128 * MIB, 128 * MIB, 0},
		{3 * GIB, 3 * GIB, 0},
		{3 * GIB + PAGE_BYTES, 3 * GIB, PAGE_BYTES},
		{16 * GIB, 3 * GIB, 13 * GIB},
		{LAYOUT_MEMORY_MAX_BYTES, 3 * GIB, LAYOUT_MEMORY_MAX_BYTES - 3 * GIB},
	};
	static const uint64_t bad[] = {0, PAGE_BYTES, 1 * MIB - PAGE_BYTES, 128 * MIB + 1,
		LAYOUT_MEMORY_MAX_BYTES + PAGE_BYTES, UINT64_MAX, ~(PAGE_BYTES - 1)};
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	struct err err;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		assert_int_equal(
			layout_ram_ranges(cases[i].bytes, ranges, &err), cases[i].high ? 2 : 1);
		assert_int_equal(ranges[0].base.v, 0);
		assert_int_equal(ranges[0].size_bytes, cases[i].low);
		if (!cases[i].high)
			continue;
		assert_int_equal(ranges[1].base.v, 4 * GIB);
		assert_int_equal(ranges[1].size_bytes, cases[i].high);
	}
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		err = (struct err){0};
		assert_int_equal(layout_ram_ranges(bad[i], ranges, &err), -EINVAL);
		assert_non_null(strstr(err.msg, "memory of "));
	}
}

static void devices_are_in_the_gap_and_apart(void **state)
{
	uint64_t end = LAYOUT_MMIO_GAP_START;
	(void)state;

	for (unsigned int i = 0; i < LAYOUT_VIRTIO_SLOTS; i++) {
		assert_true(layout_virtio_gpa(i).v >= end);
		end = layout_virtio_gpa(i).v + LAYOUT_VIRTIO_SLOT_BYTES;
		// All but the RTC's, each once.
		assert_int_equal(layout_virtio_gsi(i), i < 3 ? 5 + i : 6 + i);
		assert_int_not_equal(layout_virtio_gsi(i), LAYOUT_RTC_GSI);
	}
	assert_true(end <= LAYOUT_IOAPIC_GPA);
	assert_true(LAYOUT_KVM_TSS_GPA + 3 * PAGE_BYTES <= LAYOUT_MMIO_GAP_END);
}

// Whatever the size: ascending, disjoint, all of RAM but [0x9e000, 1 MiB), and nothing else.
static void the_memory_map_covers_ram(void **state)
{
	static const uint64_t sizes[] = {
		1 * MIB, 1 * MIB + PAGE_BYTES, 64 * MIB, 3 * GIB, 3 * GIB + PAGE_BYTES, 8 * GIB};
	struct fixture *f = *state;

	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
		struct e820_range ranges[E820_ENTRIES_MAX];
		uint64_t usable = 0, end = 0;
		unsigned int nr;

		make_ram(f, sizes[i]);
		nr = e820_map(&f->mem, ranges);
		assert_true(nr >= 2 && nr <= E820_ENTRIES_MAX);
		for (unsigned int k = 0; k < nr; k++) {
			struct guest_view view;

			assert_true(ranges[k].base >= end && ranges[k].size_bytes > 0);
			end = ranges[k].base + ranges[k].size_bytes;
			assert_int_equal(guest_mem_view(&f->mem, GPA(ranges[k].base),
						 ranges[k].size_bytes, &view),
				0);
			if (ranges[k].type == E820_RAM)
				usable += ranges[k].size_bytes;
			else
				assert_int_equal(ranges[k].type, E820_RESERVED);
		}
		assert_int_equal(usable, sizes[i] - (1 * MIB - 0x9e000));
	}
}

// --- 64-bit boot -----------------------------------------------------------------------------

static void boot_params_say_what_was_loaded(void **state)
{
	struct fixture *f = *state;
	struct boot_params params;
	char cmdline[sizeof(CMDLINE)], ramdisk[19];

	make_ram(f, 4 * GIB);
	assert_int_equal(boot(f), 0);
	assert_int_equal(f->entry.protocol, BOOT_LINUX64);
	assert_int_equal(f->entry.rip, IMAGE_ENTRY64);
	read_guest(f, f->entry.info.v, &params, sizeof(params));
	assert_int_equal(params.sentinel, 0);
	assert_int_equal(params.hdr.header, 0x53726448);
	assert_int_equal(params.hdr.boot_flag, 0xaa55);
	assert_int_equal(params.hdr.type_of_loader, 0xff);
	assert_true(params.hdr.version >= 0x020c);
	assert_int_equal(params.hdr.loadflags & LOADED_HIGH, LOADED_HIGH);
	assert_int_equal(params.hdr.setup_data, 0);
	read_guest(f, params.hdr.cmd_line_ptr, cmdline, sizeof(cmdline));
	assert_string_equal(cmdline, CMDLINE);
	assert_int_equal(params.ext_cmd_line_ptr, 0);
	assert_int_equal(params.hdr.ramdisk_image, 2 * GIB - PAGE_BYTES);
	assert_int_equal(params.hdr.ramdisk_size, 20);
	assert_int_equal(params.ext_ramdisk_image, 0);
	assert_int_equal(params.ext_ramdisk_size, 0);
	read_guest(f, params.hdr.ramdisk_image, ramdisk, sizeof(ramdisk));
	assert_memory_equal(ramdisk,
		"070701\0\0"
		"070701 more",
		sizeof(ramdisk));
	assert_int_equal(params.alt_mem_k, (3 * GIB - MIB) / KIB);
	assert_int_equal(params.e820_entries, 4);
	assert_int_equal(params.e820_table[3].addr, 4 * GIB);
	assert_int_equal(params.e820_table[3].size, 1 * GIB);
	assert_int_equal(params.e820_table[3].type, E820_RAM);
}

static void without_an_initramfs_there_is_none(void **state)
{
	struct fixture *f = *state;
	struct boot_params params;

	make_ram(f, RAM);
	f->config.nr_initramfs = 0;
	assert_int_equal(boot(f), 0);
	read_guest(f, f->entry.info.v, &params, sizeof(params));
	assert_int_equal(params.hdr.ramdisk_image, 0);
	assert_int_equal(params.hdr.ramdisk_size, 0);
	assert_int_equal(params.e820_entries, 3);
}

static void a_bzimage_brings_its_own_header(void **state)
{
	struct fixture *f = *state;
	struct boot_params params;
	char text[IMAGE_BZ_CMDLINE_MAX + 2];

	f->image_bytes = image_make_bzimage(f->image);
	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
	assert_int_equal(f->entry.protocol, BOOT_LINUX64);
	assert_int_equal(f->entry.rip, IMAGE_BZ_GPA + 0x200);
	read_guest(f, f->entry.info.v, &params, sizeof(params));
	assert_int_equal(params.sentinel, 0); // though the file has 0xff there
	assert_int_equal(params.hdr.init_size, IMAGE_BZ_INIT_BYTES);
	assert_int_equal(params.hdr.pref_address, IMAGE_BZ_GPA);
	assert_int_equal(params.hdr.type_of_loader, 0xff);
	assert_int_equal(params.hdr.cmd_line_ptr, LAYOUT_CMDLINE_GPA);
	assert_int_equal(params.hdr.ramdisk_size, 20);
	// It says how long a command line it takes.
	memset(text, 'x', sizeof(text));
	text[IMAGE_BZ_CMDLINE_MAX + 1] = '\0';
	f->config.cmdline = text;
	assert_int_equal(boot(f), -E2BIG);
	assert_non_null(strstr(f->err.msg, "256 bytes; some/kernel takes 255"));
	text[IMAGE_BZ_CMDLINE_MAX] = '\0';
	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
}

// --- PVH -------------------------------------------------------------------------------------

static void pvh_start_info_says_what_was_loaded(void **state)
{
	struct fixture *f = *state;
	uint64_t info, modules, memmap;
	char cmdline[sizeof(CMDLINE)];
	struct kvm_regs regs;

	f->config.want = BOOT_PVH;
	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
	assert_int_equal(f->entry.protocol, BOOT_PVH);
	boot_regs(&f->entry, &regs);
	assert_int_equal(regs.rip, IMAGE_ENTRY_PVH);
	assert_int_equal(regs.rflags, 2);
	info = regs.rbx;
	// Offsets of Xen's public/arch-x86/hvm/start_info.h.
	assert_int_equal(read32(f, info), 0x336ec578);
	assert_int_equal(read32(f, info + 4), 1);
	assert_int_equal(read32(f, info + 8), 0);
	assert_int_equal(read32(f, info + 12), 1);
	modules = read64(f, info + 16);
	read_guest(f, read64(f, info + 24), cmdline, sizeof(cmdline));
	assert_string_equal(cmdline, CMDLINE);
	assert_int_equal(read64(f, info + 32), 0);
	memmap = read64(f, info + 40);
	assert_int_equal(read32(f, info + 48), 3);
	assert_int_equal(read64(f, modules), RAM - PAGE_BYTES);
	assert_int_equal(read64(f, modules + 8), 20);
	assert_int_equal(read64(f, modules + 16), 0);
	assert_int_equal(read64(f, memmap), 0);
	assert_int_equal(read64(f, memmap + 8), 0x9e000);
	assert_int_equal(read32(f, memmap + 16), E820_RAM);
	assert_int_equal(read32(f, memmap + 24 + 16), E820_RESERVED);
	assert_int_equal(read64(f, memmap + 48), 1 * MIB);
	assert_int_equal(read64(f, memmap + 56), RAM - MIB);
	assert_int_equal(read32(f, memmap + 48 + 16), E820_RAM);

	f->config.nr_initramfs = 0;
	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
	assert_int_equal(read32(f, info + 12), 0);
	assert_int_equal(read64(f, info + 16), 0);
}

// --- Registers, descriptors, page tables -----------------------------------------------------

// Decodes a descriptor as the CPU does (Intel SDM volume 3, figure 3-8).
static void assert_descriptor_is(
	struct fixture *f, const struct kvm_sregs *sregs, const struct kvm_segment *seg)
{
	uint64_t d;
	uint32_t limit;

	assert_int_equal(seg->selector % 8, 0);
	assert_true(seg->selector + 7U <= sregs->gdt.limit);
	d = read64(f, sregs->gdt.base + seg->selector);
	limit = (uint32_t)((d & 0xffff) | (d >> 32 & 0xf0000));
	if (d >> 55 & 1)
		limit = limit << 12 | 0xfff;
	assert_int_equal(limit, seg->limit);
	assert_int_equal((d >> 16 & 0xffffff) | (d >> 56 << 24), seg->base);
	assert_int_equal(d >> 40 & 0xf, seg->type);
	assert_int_equal(d >> 44 & 1, seg->s);
	assert_int_equal(d >> 45 & 3, seg->dpl);
	assert_int_equal(d >> 47 & 1, seg->present);
	assert_int_equal(d >> 53 & 1, seg->l);
	assert_int_equal(d >> 54 & 1, seg->db);
	assert_int_equal(d >> 55 & 1, seg->g);
}

static void boot_and_get_sregs(struct fixture *f, struct kvm_sregs *sregs)
{
	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
	memset(sregs, 0xa5, sizeof(*sregs));
	boot_sregs(&f->entry, sregs);
	// KVM's own are left alone.
	assert_int_equal(sregs->apic_base, 0xa5a5a5a5a5a5a5a5);
	assert_int_equal(sregs->cr8, 0xa5a5a5a5a5a5a5a5);
	assert_descriptor_is(f, sregs, &sregs->cs);
	assert_descriptor_is(f, sregs, &sregs->ds);
	assert_descriptor_is(f, sregs, &sregs->es);
	assert_descriptor_is(f, sregs, &sregs->fs);
	assert_descriptor_is(f, sregs, &sregs->gs);
	assert_descriptor_is(f, sregs, &sregs->ss);
	assert_descriptor_is(f, sregs, &sregs->tr);
	assert_int_equal(sregs->idt.limit, 0);
	// Flat, and the types that VMX insists on: accessed code and data, a busy TSS.
	assert_int_equal(sregs->cs.base, 0);
	assert_int_equal(sregs->cs.limit, 0xffffffff);
	assert_int_equal(sregs->cs.type, 0xb);
	assert_int_equal(sregs->ds.type, 0x3);
	assert_int_equal(sregs->ds.limit, 0xffffffff);
	assert_int_equal(sregs->tr.type, 0xb);
	assert_int_equal(sregs->tr.limit, 0x67);
	assert_int_equal(sregs->ldt.unusable, 1);
}

// Translates as the CPU does with 4-level paging. Returns UINT64_MAX where nothing is mapped.
static uint64_t translate(struct fixture *f, uint64_t cr3, uint64_t va)
{
	uint64_t table = cr3 & ~0xfffULL;

	for (unsigned int shift = 39;; shift -= 9) {
		uint64_t e = read64(f, table + (va >> shift & 0x1ff) * 8);

		if (!(e & 1))
			return UINT64_MAX;
		assert_int_equal(e & 2, 2); // writable
		assert_int_equal(e & 0xfff0000000000004, 0); // supervisor, executable, no high bits
		if (shift == 12 || (e & 0x80)) {
			uint64_t mask = (1ULL << shift) - 1;

			assert_true(shift <= 21); // 1 GiB pages are not on every CPU
			assert_int_equal(e & mask & ~0x1fffULL, 0);
			return (e & ~mask & ~0x1fffULL) | (va & mask);
		}
		table = e & 0x000ffffffffff000;
	}
}

static void linux64_starts_in_long_mode(void **state)
{
	static const uint64_t probes[] = {0, 0x2000, 0x9fc00, MIB, IMAGE_ENTRY64, 0x1ffffff,
		GIB - 1, GIB, 2 * GIB - 4, 3 * GIB, LAYOUT_LAPIC_GPA, 4 * GIB - 1};
	struct fixture *f = *state;
	struct kvm_sregs sregs;
	struct kvm_regs regs;

	boot_and_get_sregs(f, &sregs);
	boot_regs(&f->entry, &regs);
	assert_int_equal(regs.rip, IMAGE_ENTRY64);
	assert_int_equal(regs.rsi, f->entry.info.v);
	assert_int_equal(regs.rflags, 2);
	// Linux: __BOOT_CS and __BOOT_DS.
	assert_int_equal(sregs.cs.selector, 0x10);
	assert_int_equal(sregs.ds.selector, 0x18);
	assert_true(sregs.cs.l && !sregs.cs.db);
	assert_int_equal(sregs.cr0 & 0x80000001, 0x80000001); // PG, PE
	assert_int_equal(sregs.cr4, 0x20); // PAE
	assert_int_equal(sregs.efer, 0x500); // LMA, LME
	for (size_t i = 0; i < ARRAY_SIZE(probes); i++)
		assert_int_equal(translate(f, sregs.cr3, probes[i]), probes[i]);
	assert_int_equal(translate(f, sregs.cr3, 4 * GIB), UINT64_MAX);
	assert_int_equal(translate(f, sregs.cr3, 1ULL << 47), UINT64_MAX);
	assert_int_equal(translate(f, sregs.cr3, UINT64_MAX), UINT64_MAX);
}

static void pvh_starts_in_protected_mode(void **state)
{
	struct fixture *f = *state;
	struct kvm_sregs sregs;

	f->config.want = BOOT_PVH;
	boot_and_get_sregs(f, &sregs);
	assert_true(!sregs.cs.l && sregs.cs.db);
	assert_int_equal(sregs.cr0 & 0x80000001, 1); // PE, no PG
	assert_int_equal(sregs.cr4, 0);
	assert_int_equal(sregs.efer, 0);
}

// --- The structures among each other ---------------------------------------------------------

// Whole-memory check: outside of what layout.h lists, the kernel and the initramfs, all is zero.
static void nothing_else_is_written(void **state)
{
	static const uint64_t ours[][2] = {
		{LAYOUT_GDT_GPA, 48},
		{LAYOUT_BOOT_PARAMS_GPA, PAGE_BYTES},
		{LAYOUT_CMDLINE_GPA, sizeof(CMDLINE)},
		{LAYOUT_PAGE_TABLES_GPA, 6 * PAGE_BYTES},
		{LAYOUT_MP_TABLE_GPA, 0x1c00},
		{LAYOUT_MP_FLOATING_GPA, 16},
		{IMAGE_TEXT_GPA, IMAGE_TEXT_BYTES},
		{IMAGE_DATA_GPA, IMAGE_DATA_BYTES},
		{RAM - PAGE_BYTES, 20},
	};
	struct fixture *f = *state;
	uint64_t at = 0;

	make_ram(f, RAM);
	assert_int_equal(boot(f), 0);
	for (size_t i = 0; i <= ARRAY_SIZE(ours); i++) {
		uint64_t end = i < ARRAY_SIZE(ours) ? ours[i][0] : RAM;

		assert_true(at <= end);
		for (; at < end; at += 8)
			if (read64(f, MIN(at, end - 8)) != 0)
				fail_msg("0x%llx is written", (unsigned long long)at);
		if (i < ARRAY_SIZE(ours))
			at = ALIGN_UP(ours[i][0] + ours[i][1], 8);
	}
}

static void little_memory_says_how_much_is_needed(void **state)
{
	struct fixture *f = *state;
	struct boot_entry before;

	memset(&f->entry, 0x5a, sizeof(f->entry));
	before = f->entry;
	make_ram(f, 1 * MIB);
	assert_int_equal(boot(f), -ENOMEM);
	assert_string_equal(f->err.msg, "some/kernel: with its initramfs of 20 bytes needs at "
					"least 17 MiB of memory; there "
					"are 1");
	f->config.nr_initramfs = 0;
	assert_int_equal(boot(f), -ENOMEM);
	assert_string_equal(
		f->err.msg, "some/kernel: needs at least 17 MiB of memory; there are 1");
	assert_memory_equal(&f->entry, &before, sizeof(before));
	// And that much is enough.
	f->config.nr_initramfs = ARRAY_SIZE(parts);
	make_ram(f, 17 * MIB);
	assert_int_equal(boot(f), 0);
}

static void impossible_cpus_are_refused(void **state)
{
	static const unsigned int bad[] = {0, 255, 10000};
	struct fixture *f = *state;

	make_ram(f, RAM);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		f->config.nr_cpus = bad[i];
		assert_int_equal(boot(f), -EINVAL);
		assert_non_null(strstr(f->err.msg, "1 to 254"));
	}
}

static void a_longer_command_line_than_linux_takes_is_refused(void **state)
{
	static char text[2049];
	struct fixture *f = *state;

	memset(text, 'x', sizeof(text) - 1);
	f->config.cmdline = text;
	make_ram(f, RAM);
	assert_int_equal(boot(f), -E2BIG);
	assert_non_null(strstr(f->err.msg, "2048 bytes; some/kernel takes 2047"));
	text[2047] = '\0';
	assert_int_equal(boot(f), 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ram_goes_around_the_gap),
		cmocka_unit_test(devices_are_in_the_gap_and_apart),
		TEST(the_memory_map_covers_ram),
		TEST(boot_params_say_what_was_loaded),
		TEST(without_an_initramfs_there_is_none),
		TEST(a_bzimage_brings_its_own_header),
		TEST(pvh_start_info_says_what_was_loaded),
		TEST(linux64_starts_in_long_mode),
		TEST(pvh_starts_in_protected_mode),
		TEST(nothing_else_is_written),
		TEST(little_memory_says_how_much_is_needed),
		TEST(impossible_cpus_are_refused),
		TEST(a_longer_command_line_than_linux_takes_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
