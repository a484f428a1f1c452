// SPDX-License-Identifier: Apache-2.0
// vmm/loader and vmm/x86_64/bzimage: a sound image lands where it says, each way to spoil it has a
// message that names the file, and nothing is written to guest memory before all has been checked.
#include "tests/support/test.h"

#include <asm/bootparam.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/kernel_image.h"
#include "vmm/base/fd.h"
#include "vmm/loader.h"
#include "vmm/x86_64/bzimage.h"

#define NAME           "some/kernel"
#define MIN_GPA        (1 * MIB)
#define MAX_GPA        (3 * GIB)
#define RAM_BYTES      (32 * MIB)
#define HDR(field)     (0x1f1 + offsetof(struct setup_header, field))
#define EHDR(field)    offsetof(Elf64_Ehdr, field)
#define PHDR(i, field) (IMAGE_PHDR(i) + offsetof(Elf64_Phdr, field))

struct fixture {
	struct guest_mem mem;
	uint8_t image[IMAGE_BYTES_MAX];
	size_t image_bytes;
	struct loader_job job;
	struct loaded_kernel kernel;
	struct err err;
};

static struct guest_mem *make_mem(struct guest_mem *mem, uint64_t bytes)
{
	struct guest_mem_range range = {GPA(0), bytes};
	struct err err = {0};

	assert_int_equal(guest_mem_init(mem, &range, 1, &err), 0);
	return mem;
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	if (!f)
		return -1;
	make_mem(&f->mem, RAM_BYTES);
	f->job = (struct loader_job){.mem = &f->mem,
		.name = NAME,
		.fd = -1,
		.min_gpa = MIN_GPA,
		.end_gpa = RAM_BYTES,
		.max_gpa = MAX_GPA};
	f->image_bytes = image_make_elf(f->image);
	*state = f;
	return 0;
}

static int setup_bzimage(void **state)
{
	struct fixture *f;

	if (setup(state) < 0)
		return -1;
	f = *state;
	f->image_bytes = image_make_bzimage(f->image);
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	guest_mem_fini(&f->mem);
	free(f);
	return 0;
}

// Loads the first len bytes of the image. On failure ret outputs must be untouched.
static int load_bytes(struct fixture *f, size_t len)
{
	struct loaded_kernel before;
	int r, fd = image_fd(f->image, len);

	memset(&f->kernel, 0x5a, sizeof(f->kernel));
	before = f->kernel;
	f->err = (struct err){0};
	f->job.fd = fd;
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	f->job.fd = -1;
	fd_close(&fd);
	if (r < 0) {
		assert_int_equal(r, f->err.code);
		assert_memory_equal(&f->kernel, &before, sizeof(before));
	}
	return r;
}

static int load(struct fixture *f)
{
	return load_bytes(f, f->image_bytes);
}

// The message names the file and holds text.
static void assert_refused(struct fixture *f, int r, int want, const char *text)
{
	if (r != want)
		fail_msg("got %d, not %d, for a message about \"%s\": %s", r, want, text,
			f->err.msg);
	if (strncmp(f->err.msg, NAME ": ", sizeof(NAME) + 1) != 0 || !strstr(f->err.msg, text))
		fail_msg("no \"%s\" in \"%s\"", text, f->err.msg);
}

// Nothing was written, nor placed: no page was touched.
static void assert_memory_untouched(struct fixture *f)
{
	uint64_t bitmap[1024] = {0};

	assert_true(guest_mem_bitmap_words(&f->mem) <= ARRAY_SIZE(bitmap));
	assert_int_equal(guest_mem_touched(&f->mem, false, bitmap, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(bitmap); i++)
		assert_int_equal(bitmap[i], 0);
}

static void poke(struct fixture *f, size_t off, size_t width, uint64_t val)
{
	assert_true(off + width <= sizeof(f->image));
	memcpy(f->image + off, &val, width);
}

struct spoiled {
	size_t off;
	size_t width;
	uint64_t val;
	int code;
	const char *text;
};

static void each_is_refused(struct fixture *f, const struct spoiled *cases, size_t nr)
{
	uint8_t sound[IMAGE_BYTES_MAX];

	memcpy(sound, f->image, sizeof(sound));
	for (size_t i = 0; i < nr; i++) {
		poke(f, cases[i].off, cases[i].width, cases[i].val);
		assert_refused(f, load(f), cases[i].code, cases[i].text);
		memcpy(f->image, sound, sizeof(sound));
	}
	assert_memory_untouched(f);
	assert_int_equal(load(f), 0); // and without the spoiling it loads
}

static void assert_guest_bytes(struct fixture *f, uint64_t gpa, const void *want, size_t len)
{
	uint8_t *got = malloc(len);

	assert_non_null(got);
	assert_int_equal(guest_mem_read(f->job.mem, GPA(gpa), got, len), 0);
	assert_memory_equal(got, want, len);
	free(got);
}

static void assert_guest_zero(struct fixture *f, uint64_t gpa, size_t len)
{
	uint8_t *zero = calloc(1, len);

	assert_non_null(zero);
	assert_guest_bytes(f, gpa, zero, len);
	free(zero);
}

// --- ELF -------------------------------------------------------------------------------------

static void elf_lands_at_its_physical_addresses(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.protocol, BOOT_LINUX64);
	assert_int_equal(f->kernel.entry_gpa, IMAGE_ENTRY64);
	assert_int_equal(f->kernel.start_gpa, IMAGE_TEXT_GPA);
	assert_int_equal(f->kernel.end_gpa, IMAGE_END_GPA);
	assert_int_equal(f->kernel.setup_header_bytes, 0);
	assert_guest_bytes(f, IMAGE_TEXT_GPA, f->image + IMAGE_TEXT_OFF, IMAGE_TEXT_BYTES);
	assert_guest_bytes(f, IMAGE_DATA_GPA, f->image + IMAGE_DATA_OFF, IMAGE_DATA_BYTES);
	assert_guest_zero(f, IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES,
		IMAGE_DATA_GPA - IMAGE_TEXT_GPA - IMAGE_TEXT_BYTES);
	assert_guest_zero(f, IMAGE_DATA_GPA + IMAGE_DATA_BYTES,
		RAM_BYTES - IMAGE_DATA_GPA - IMAGE_DATA_BYTES);
	assert_guest_zero(f, 0, IMAGE_TEXT_GPA);
}

static void spoiled_elf_headers_are_refused(void **state)
{
	static const struct spoiled cases[] = {
		{EI_CLASS, 1, ELFCLASS32, -ENOEXEC, "64-bit"},
		{EI_CLASS, 1, 0, -ENOEXEC, "64-bit"},
		{EI_DATA, 1, ELFDATA2MSB, -ENOEXEC, "little-endian"},
		{EI_VERSION, 1, 2, -ENOEXEC, "version"},
		{EHDR(e_version), 4, 0, -ENOEXEC, "version"},
		{EHDR(e_machine), 2, EM_AARCH64, -ENOEXEC, "machine 183; this host runs 62"},
		{EHDR(e_machine), 2, EM_386, -ENOEXEC, "machine 3;"},
		{EHDR(e_type), 2, ET_REL, -ENOEXEC, "type 1"},
		{EHDR(e_type), 2, ET_DYN, -ENOEXEC, "type 3"},
		{EHDR(e_type), 2, ET_CORE, -ENOEXEC, "type 4"},
		{EHDR(e_phentsize), 2, 32, -ENOEXEC, "headers of 32 bytes"},
		{EHDR(e_phnum), 2, 0, -ENOEXEC, "0 program headers"},
		{EHDR(e_phnum), 2, 65, -ENOEXEC, "65 program headers"},
		{EHDR(e_phnum), 2, 0xffff, -ENOEXEC, "65535 program headers"},
		{EHDR(e_phoff), 8, IMAGE_ELF_BYTES, -ENOEXEC, "before its program headers"},
		{EHDR(e_phoff), 8, IMAGE_ELF_BYTES - 3 * IMAGE_PHDR_BYTES + 1, -ENOEXEC,
			"before its program headers"},
		{EHDR(e_phoff), 8, UINT64_MAX - 100, -ENOEXEC, "before its program headers"},
		{EHDR(e_phoff), 8, 1ULL << 63, -ENOEXEC, "before its program headers"},
		{EHDR(e_phoff), 8, 0, -ENOEXEC, "no segment"},
	};

	each_is_refused(*state, cases, ARRAY_SIZE(cases));
}

static void lying_elf_segments_are_refused(void **state)
{
	static const struct spoiled cases[] = {
		{PHDR(0, p_offset), 8, IMAGE_ELF_BYTES, -ENOEXEC, "segment 0 "},
		{PHDR(0, p_offset), 8, IMAGE_ELF_BYTES - IMAGE_TEXT_BYTES + 1, -ENOEXEC,
			"beyond the end of the file"},
		{PHDR(0, p_offset), 8, UINT64_MAX, -ENOEXEC, "beyond the end of the file"},
		{PHDR(0, p_offset), 8, UINT64_MAX - IMAGE_TEXT_BYTES + 1, -ENOEXEC,
			"beyond the end of the file"},
		{PHDR(0, p_offset), 8, 1ULL << 63, -ENOEXEC, "beyond the end of the file"},
		{PHDR(1, p_filesz), 8, UINT64_MAX, -ENOEXEC, "segment 1 "},
		{PHDR(1, p_filesz), 8, IMAGE_DATA_BYTES + 1, -ENOEXEC,
			"beyond the end of the file"},
		{PHDR(1, p_memsz), 8, IMAGE_DATA_BYTES - 1, -ENOEXEC, "than in memory"},
		{PHDR(1, p_memsz), 8, 0, -ENOEXEC, "than in memory"},
		{PHDR(1, p_memsz), 8, UINT64_MAX, -ENOEXEC, "wraps"},
		{PHDR(1, p_paddr), 8, UINT64_MAX - IMAGE_DATA_MEM + 1, -ENOEXEC, "wraps"},
		// In a physical field, the kernel's virtual address.
		{PHDR(1, p_paddr), 8, 0xffffffff81002000, -ENOEXEC, "must lie between"},
		{PHDR(1, p_memsz), 8, UINT64_MAX - IMAGE_DATA_GPA, -ENOEXEC, "must lie between"},
		{PHDR(1, p_paddr), 8, MAX_GPA - IMAGE_DATA_MEM + 1, -ENOEXEC, "must lie between"},
		{PHDR(1, p_paddr), 8, MAX_GPA - IMAGE_DATA_MEM, -ENOMEM, "at least 3072 MiB"},
		{PHDR(1, p_paddr), 8, MIN_GPA - 1, -ENOEXEC, "between 0x100000 and"},
		{PHDR(1, p_paddr), 8, 0x2000, -ENOEXEC, "must lie between"},
		{PHDR(1, p_paddr), 8, 0, -ENOEXEC, "must lie between"},
		{PHDR(1, p_paddr), 8, RAM_BYTES - IMAGE_DATA_MEM + 1, -ENOMEM,
			"at least 33 MiB of memory; there are 32"},
		{PHDR(1, p_paddr), 8, IMAGE_TEXT_GPA, -ENOEXEC, "segments 0 and 1 overlap"},
		{PHDR(1, p_paddr), 8, IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES - 1, -ENOEXEC, "overlap"},
		{PHDR(1, p_paddr), 8, IMAGE_TEXT_GPA - IMAGE_DATA_MEM + 1, -ENOEXEC, "overlap"},
		{PHDR(0, p_memsz), 8, IMAGE_DATA_GPA - IMAGE_TEXT_GPA + 1, -ENOEXEC, "overlap"},
	};

	each_is_refused(*state, cases, ARRAY_SIZE(cases));
}

static void segments_may_touch_each_other_and_the_edges(void **state)
{
	static const uint64_t fine[] = {IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES,
		IMAGE_TEXT_GPA - IMAGE_DATA_MEM, MIN_GPA, RAM_BYTES - IMAGE_DATA_MEM};
	struct fixture *f = *state;

	for (size_t i = 0; i < ARRAY_SIZE(fine); i++) {
		struct guest_mem fresh;

		f->job.mem = make_mem(&fresh, RAM_BYTES);
		poke(f, PHDR(1, p_paddr), 8, fine[i]);
		assert_int_equal(load(f), 0);
		assert_guest_bytes(f, fine[i], f->image + IMAGE_DATA_OFF, IMAGE_DATA_BYTES);
		assert_guest_bytes(f, IMAGE_TEXT_GPA, f->image + IMAGE_TEXT_OFF, IMAGE_TEXT_BYTES);
		assert_int_equal(f->kernel.start_gpa, MIN(fine[i], IMAGE_TEXT_GPA));
		assert_int_equal(f->kernel.end_gpa,
			MAX(fine[i] + IMAGE_DATA_MEM, IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES));
		guest_mem_fini(&fresh);
	}
}

static void empty_and_foreign_segments_are_passed_over(void **state)
{
	struct fixture *f = *state;

	// Empty where it would overlap, or far outside.
	poke(f, PHDR(1, p_filesz), 8, 0);
	poke(f, PHDR(1, p_memsz), 8, 0);
	poke(f, PHDR(1, p_paddr), 8, 1ULL << 50);
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.end_gpa, IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES);
	// Of a type that does not concern a loader, with nonsense in it.
	poke(f, PHDR(1, p_type), 4, PT_GNU_STACK);
	poke(f, PHDR(1, p_offset), 8, UINT64_MAX);
	poke(f, PHDR(1, p_filesz), 8, UINT64_MAX);
	assert_int_equal(load(f), 0);
	// As many headers as are allowed, most of them empty.
	poke(f, EHDR(e_phnum), 2, 64);
	assert_int_equal(load(f), 0);
	poke(f, PHDR(0, p_type), 4, PT_NULL);
	assert_refused(f, load(f), -ENOEXEC, "no segment");
}

static void every_truncation_is_refused(void **state)
{
	struct fixture *f = *state;

	for (size_t len = 0; len < f->image_bytes; len++) {
		int r = load_bytes(f, len);

		assert_refused(f, r, -ENOEXEC, "");
	}
	assert_memory_untouched(f);
	assert_int_equal(load(f), 0);
}

// A file that shrinks after its size was taken.
static void a_shrinking_file_is_noticed(void **state)
{
	struct fixture *f = *state;
	int r;

	f->job.fd = image_fd(f->image, f->image_bytes - 1);
	r = loader_load_elf(
		EM_X86_64, &f->job, f->image, f->image_bytes, f->image_bytes, &f->kernel, &f->err);
	assert_refused(f, r, -ENODATA, "segment 1");
	assert_int_equal(ftruncate(f->job.fd, IMAGE_NOTE_OFF + 20), 0);
	r = loader_load_elf(
		EM_X86_64, &f->job, f->image, f->image_bytes, f->image_bytes, &f->kernel, &f->err);
	assert_refused(f, r, -ENOEXEC, "in the middle of a note");
	assert_int_equal(ftruncate(f->job.fd, IMAGE_PHDR(1)), 0);
	r = loader_load_elf(
		EM_X86_64, &f->job, f->image, f->image_bytes, f->image_bytes, &f->kernel, &f->err);
	assert_refused(f, r, -ENOEXEC, "in the middle of the program headers");
	fd_close(&f->job.fd);
}

static void pvh_is_taken_when_wished_or_needed(void **state)
{
	struct fixture *f = *state;

	f->job.want = BOOT_PVH;
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.protocol, BOOT_PVH);
	assert_int_equal(f->kernel.entry_gpa, IMAGE_ENTRY_PVH);
	f->job.want = BOOT_LINUX64;
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.protocol, BOOT_LINUX64);
	// A virtual entry point, as kernels other than Linux have.
	poke(f, EHDR(e_entry), 8, 0xffffffff81000010);
	assert_refused(f, load(f), -ENOEXEC, "entry point 0xffffffff81000010 is outside");
	f->job.want = BOOT_ANY;
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.protocol, BOOT_PVH);
	// A descriptor of 4 bytes.
	poke(f, IMAGE_PVH_NOTE_OFF + 4, 4, 4);
	poke(f, IMAGE_PVH_NOTE_OFF + 20, 4, UINT32_MAX);
	poke(f, PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, IMAGE_NOTE_BYTES - 4);
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.entry_gpa, IMAGE_ENTRY_PVH);
}

static void entry_points_must_hit_code(void **state)
{
	static const struct {
		uint64_t gpa;
		bool good;
	} cases[] = {
		{IMAGE_TEXT_GPA - 1, false},
		{IMAGE_TEXT_GPA, true},
		{IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES - 1, true},
		{IMAGE_TEXT_GPA + IMAGE_TEXT_BYTES, false},
		{IMAGE_DATA_GPA + IMAGE_DATA_BYTES, false}, // bss
		{0, false},
		{UINT64_MAX, false},
	};
	struct fixture *f = *state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		image_make_elf(f->image);
		f->job.want = BOOT_LINUX64;
		poke(f, EHDR(e_entry), 8, cases[i].gpa);
		if (cases[i].good)
			assert_int_equal(load(f), 0);
		else
			assert_refused(f, load(f), -ENOEXEC, "outside of its segments");
		image_make_elf(f->image);
		f->job.want = BOOT_PVH;
		poke(f, IMAGE_PVH_NOTE_OFF + 16, 8, cases[i].gpa);
		if (cases[i].good)
			assert_int_equal(load(f), 0);
		else
			assert_refused(f, load(f), -ENOEXEC, "its PVH entry point 0x");
		// A note that lies is refused even if it is not needed.
		f->job.want = BOOT_ANY;
		assert_int_equal(load(f), cases[i].good ? 0 : -ENOEXEC);
	}
}

static void spoiled_notes_are_refused(void **state)
{
	static const struct spoiled cases[] = {
		{IMAGE_NOTE_OFF, 4, 5, -ENOEXEC,
			"longer than its segment"}, // shifts all that follows
		{IMAGE_NOTE_OFF, 4, UINT32_MAX, -ENOEXEC, "longer than its segment"},
		{IMAGE_NOTE_OFF + 4, 4, UINT32_MAX, -ENOEXEC, "longer than its segment"},
		{IMAGE_PVH_NOTE_OFF + 4, 4, 9, -ENOEXEC, "longer than its segment"},
		{IMAGE_PVH_NOTE_OFF + 4, 4, 7, -ENOEXEC, "7 bytes instead of 4 or 8"},
		{IMAGE_PVH_NOTE_OFF + 4, 4, 0, -ENOEXEC, "0 bytes instead of 4 or 8"},
		{PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, IMAGE_NOTE_BYTES - 1, -ENOEXEC,
			"longer than its segment"},
		{PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, IMAGE_ELF_BYTES, -ENOEXEC,
			"beyond the end of the file"},
		{PHDR(IMAGE_NOTE_PHDR, p_offset), 8, UINT64_MAX, -ENOEXEC,
			"beyond the end of the file"},
	};
	static const struct spoiled no_entry[] = {
		{IMAGE_PVH_NOTE_OFF + 8, 4, 17, -ENOEXEC, "no PVH entry"},
		{IMAGE_PVH_NOTE_OFF + 12, 1, 'x', -ENOEXEC, "no PVH entry"},
		{IMAGE_PVH_NOTE_OFF + 15, 1, 'x', -ENOEXEC, "no PVH entry"},
		{IMAGE_PVH_NOTE_OFF, 4, 3, -ENOEXEC, "no PVH entry"},
		{PHDR(IMAGE_NOTE_PHDR, p_type), 4, PT_NULL, -ENOEXEC, "no PVH entry"},
		{PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, 24, -ENOEXEC, "no PVH entry"},
		{PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, 0, -ENOEXEC, "no PVH entry"},
	};
	struct fixture *f = *state;

	f->job.want = BOOT_PVH;
	for (size_t i = 0; i < ARRAY_SIZE(no_entry); i++) {
		poke(f, no_entry[i].off, no_entry[i].width, no_entry[i].val);
		assert_refused(f, load(f), no_entry[i].code, no_entry[i].text);
		image_make_elf(f->image);
	}
	f->job.want = BOOT_ANY;
	each_is_refused(f, cases, ARRAY_SIZE(cases));
}

// A sparse file of notes with no names: bounded work, not one read for each.
static void a_flood_of_notes_is_refused(void **state)
{
	struct fixture *f = *state;
	int r;

	poke(f, PHDR(IMAGE_NOTE_PHDR, p_offset), 8, 1 * MIB);
	poke(f, PHDR(IMAGE_NOTE_PHDR, p_filesz), 8, 1024 * GIB);
	f->job.fd = image_fd(f->image, f->image_bytes);
	assert_int_equal(ftruncate(f->job.fd, (off_t)(1025 * GIB)), 0);
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	assert_refused(f, r, -ENOEXEC, "bytes of notes");
	fd_close(&f->job.fd);
}

// --- bzImage ---------------------------------------------------------------------------------

static void bzimage_lands_at_its_preferred_address(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.protocol, BOOT_LINUX64);
	assert_int_equal(f->kernel.entry_gpa, IMAGE_BZ_GPA + 0x200);
	assert_int_equal(f->kernel.start_gpa, IMAGE_BZ_GPA);
	assert_int_equal(f->kernel.end_gpa, IMAGE_BZ_GPA + IMAGE_BZ_INIT_BYTES);
	assert_int_equal(f->kernel.initramfs_end_gpa, IMAGE_BZ_INITRD_MAX + 1ULL);
	assert_int_equal(f->kernel.cmdline_max_bytes, IMAGE_BZ_CMDLINE_MAX);
	assert_int_equal(f->kernel.setup_header_bytes, sizeof(struct setup_header));
	assert_memory_equal(f->kernel.setup_header, f->image + 0x1f1, sizeof(struct setup_header));
	assert_guest_bytes(f, IMAGE_BZ_GPA, f->image + IMAGE_BZ_CODE_OFF, IMAGE_BZ_CODE_BYTES);
	assert_guest_zero(f, 0, IMAGE_BZ_GPA);
	assert_guest_zero(f, IMAGE_BZ_GPA + IMAGE_BZ_CODE_BYTES,
		RAM_BYTES - IMAGE_BZ_GPA - IMAGE_BZ_CODE_BYTES);
	// What is larger than init_size counts.
	poke(f, HDR(init_size), 4, 1);
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.end_gpa, IMAGE_BZ_GPA + IMAGE_BZ_CODE_BYTES);
}

static void spoiled_bzimages_are_refused(void **state)
{
	static const struct spoiled cases[] = {
		{HDR(header), 4, 0, -ENOEXEC, "neither"},
		{HDR(boot_flag), 2, 0, -ENOEXEC, "boot flag"},
		{HDR(version), 2, 0x020b, -ENOEXEC, "2.11 is too old"},
		{HDR(version), 2, 0, -ENOEXEC, "too old"},
		{HDR(jump) + 1, 1, 0x10, -ENOEXEC, "setup header of only"},
		{HDR(jump) + 1, 1, 0x61, -ENOEXEC, "setup header of only"},
		{HDR(loadflags), 1, 0, -ENOEXEC, "zImage"},
		{HDR(xloadflags), 2, 0, -ENOEXEC, "no 64-bit entry"},
		{HDR(xloadflags), 2, 0xfffe, -ENOEXEC, "no 64-bit entry"},
		{HDR(setup_sects), 1, 2, -ENOEXEC, "truncated: it has 2048 bytes of 2560"},
		{HDR(setup_sects), 1, 255, -ENOEXEC, "truncated"},
		{HDR(setup_sects), 1, 0, -ENOEXEC, "truncated"}, // which means 4
		{HDR(syssize), 4, IMAGE_BZ_CODE_BYTES / 16 + 1, -ENOEXEC, "truncated"},
		{HDR(syssize), 4, UINT32_MAX, -ENOEXEC, "truncated"},
		{HDR(syssize), 4, 0, -ENOEXEC, "before its 64-bit entry"},
		{HDR(syssize), 4, 0x200 / 16, -ENOEXEC, "before its 64-bit entry"},
		{HDR(pref_address), 8, UINT64_MAX, -ENOEXEC, "wraps"},
		{HDR(pref_address), 8, UINT64_MAX - IMAGE_BZ_INIT_BYTES + 1, -ENOEXEC, "wraps"},
		{HDR(pref_address), 8, UINT64_MAX - IMAGE_BZ_INIT_BYTES, -ENOEXEC,
			"must lie between"},
		{HDR(pref_address), 8, 0, -ENOEXEC, "must lie between"},
		{HDR(pref_address), 8, MIN_GPA - 1, -ENOEXEC, "must lie between"},
		{HDR(pref_address), 8, MAX_GPA, -ENOEXEC, "must lie between"},
		{HDR(pref_address), 8, RAM_BYTES - IMAGE_BZ_INIT_BYTES + 1, -ENOMEM, "33 MiB"},
		{HDR(init_size), 4, RAM_BYTES - IMAGE_BZ_GPA + 1, -ENOMEM, "33 MiB"},
		{HDR(init_size), 4, UINT32_MAX, -ENOEXEC, "must lie between"},
	};
	struct fixture *f = *state;

	each_is_refused(f, cases, ARRAY_SIZE(cases));
	f->job.want = BOOT_PVH;
	assert_refused(f, load(f), -ENOEXEC, "PVH");
}

// The header of a newer kernel may be longer than ours, and one of protocol 2.12 is shorter.
static void the_setup_header_has_its_own_length(void **state)
{
	struct fixture *f = *state;

	poke(f, HDR(jump) + 1, 1, 0xff);
	assert_int_equal(load(f), 0);
	assert_int_equal(f->kernel.setup_header_bytes, sizeof(struct setup_header));
	poke(f, HDR(version), 2, 0x020c);
	poke(f, HDR(jump) + 1, 1, HDR(kernel_info_offset) - 0x202);
	poke(f, HDR(kernel_info_offset), 4, UINT32_MAX);
	assert_int_equal(load(f), 0);
	assert_int_equal(
		f->kernel.setup_header_bytes, offsetof(struct setup_header, kernel_info_offset));
	assert_int_equal(get_le32(f->kernel.setup_header +
				  offsetof(struct setup_header, kernel_info_offset)),
		0);
}

// --- Files -----------------------------------------------------------------------------------

static void what_is_no_kernel_is_refused(void **state)
{
	struct fixture *f = *state;
	char path[] = "/tmp/mayfly-test-XXXXXX";
	int r, fds[2], fd;

	assert_int_equal(load_bytes(f, 0), -ENOEXEC);
	assert_refused(f, f->err.code, -ENOEXEC, "is empty");
	memset(f->image, 'x', sizeof(f->image));
	assert_refused(f, load(f), -ENOEXEC, "neither an x86-64 ELF kernel");
	assert_refused(f, load_bytes(f, 1), -ENOEXEC, "neither");

	f->job.fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	assert_refused(f, r, -EINVAL, "is not a regular file");
	fd_close(&f->job.fd);
	assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
	f->job.fd = fds[0];
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	assert_refused(f, r, -EINVAL, "is not a regular file");
	fd_close(&fds[0]);
	fd_close(&fds[1]);
	f->job.fd = -1;
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	assert_refused(f, r, -EBADF, "Bad file descriptor");
	// Opened for writing only, so that reading fails.
	fd = mkstemp(path);
	assert_true(fd >= 0);
	f->job.fd = open(path, O_WRONLY | O_CLOEXEC);
	unlink(path);
	fd_close(&fd);
	r = loader_load_kernel(&loader_arch_x86_64, &f->job, &f->kernel, &f->err);
	assert_refused(f, r, -EBADF, "reading the kernel");
	fd_close(&f->job.fd);
}

// --- Initramfs -------------------------------------------------------------------------------

static int load_with_initramfs(
	struct fixture *f, const struct initramfs_part *parts, unsigned int nr, gpa_t *ret_gpa)
{
	int r = loader_initramfs_bytes(parts, nr, &f->job.initramfs_bytes, &f->err);

	if (r == 0)
		r = load(f);
	if (r == 0)
		r = loader_load_initramfs(&f->job, &f->kernel, parts, nr, ret_gpa, &f->err);
	return r;
}

static void parts_follow_each_other_aligned(void **state)
{
	struct fixture *f = *state;
	int fd = image_fd((const uint8_t *)"__FILE!", 7);
	struct initramfs_part parts[] = {
		{.name = "a", .data = "abcde", .fd = -1, .len_bytes = 5},
		{.name = "b", .data = "", .fd = -1, .len_bytes = 0},
		{.name = "c", .fd = fd, .off = 2, .len_bytes = 5},
		{.name = "d", .fd = -1, .len_bytes = 0}, // an empty file is not even read
		{.name = "e", .data = "12345678", .fd = -1, .len_bytes = 8},
	};
	gpa_t gpa = GPA(1);

	assert_int_equal(load_with_initramfs(f, parts, ARRAY_SIZE(parts), &gpa), 0);
	assert_int_equal(f->job.initramfs_bytes, 24);
	assert_int_equal(gpa.v, RAM_BYTES - PAGE_BYTES);
	assert_guest_bytes(f, gpa.v,
		"abcde\0\0\0FILE!\0\0\0"
		"12345678\0",
		25);
	fd_close(&fd);
	// None at all.
	assert_int_equal(load_with_initramfs(f, &parts[1], 1, &gpa), 0);
	assert_int_equal(gpa.v, 0);
	gpa = GPA(1);
	assert_int_equal(load_with_initramfs(f, NULL, 0, &gpa), 0);
	assert_int_equal(gpa.v, 0);
}

static void an_initramfs_fits_to_the_page(void **state)
{
	struct fixture *f = *state;
	size_t room = RAM_BYTES - ALIGN_UP(IMAGE_END_GPA, PAGE_BYTES);
	uint8_t *data = malloc(room + 1);
	struct initramfs_part part = {.name = "rd", .data = data, .fd = -1, .len_bytes = room + 1};
	gpa_t gpa = GPA(1);

	assert_non_null(data);
	memset(data, 0x77, room + 1);
	assert_refused(f, load_with_initramfs(f, &part, 1, &gpa), -ENOMEM,
		"at least 33 MiB of memory; there are 32");
	assert_int_equal(gpa.v, 1);
	assert_memory_untouched(f);
	part.len_bytes = room;
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), 0);
	assert_int_equal(gpa.v, IMAGE_END_GPA);
	assert_guest_bytes(f, gpa.v, data, room);
	assert_guest_zero(f, IMAGE_DATA_GPA + IMAGE_DATA_BYTES, IMAGE_DATA_MEM - IMAGE_DATA_BYTES);
	free(data);
}

static void an_initramfs_stays_below_its_limit(void **state)
{
	struct fixture *f = *state;
	struct initramfs_part part = {.name = "rd", .data = "x", .fd = -1, .len_bytes = 1};
	static const uint8_t page[PAGE_BYTES];
	struct guest_mem big;
	gpa_t gpa = GPA(0);

	// Sparse: only what is written takes memory.
	f->job.mem = make_mem(&big, 3 * GIB);
	f->job.end_gpa = 3 * GIB;
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), 0);
	assert_int_equal(gpa.v, 2 * GIB - PAGE_BYTES);
	assert_guest_bytes(f, gpa.v, "x", 2);

	image_make_bzimage(f->image);
	f->image_bytes = IMAGE_BZ_BYTES;
	poke(f, HDR(initrd_addr_max), 4, 0x37ffffff);
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), 0);
	assert_int_equal(gpa.v, 0x38000000 - PAGE_BYTES);
	poke(f, HDR(initrd_addr_max), 4, UINT32_MAX);
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), 0);
	assert_int_equal(gpa.v, 3 * GIB - PAGE_BYTES);
	// A page fits exactly above the kernel's end, and not if the limit is a byte lower.
	part.data = page;
	part.len_bytes = sizeof(page);
	poke(f, HDR(initrd_addr_max), 4, IMAGE_BZ_GPA + IMAGE_BZ_INIT_BYTES + sizeof(page) - 1);
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), 0);
	assert_int_equal(gpa.v, IMAGE_BZ_GPA + IMAGE_BZ_INIT_BYTES);
	poke(f, HDR(initrd_addr_max), 4, IMAGE_BZ_GPA + IMAGE_BZ_INIT_BYTES + sizeof(page) - 2);
	assert_refused(f, load_with_initramfs(f, &part, 1, &gpa), -ENOEXEC, "whatever the memory");
	// It may be within the kernel or below it.
	poke(f, HDR(initrd_addr_max), 4, IMAGE_BZ_GPA + IMAGE_BZ_INIT_BYTES - 1);
	assert_refused(f, load_with_initramfs(f, &part, 1, &gpa), -ENOEXEC, "whatever the memory");
	poke(f, HDR(initrd_addr_max), 4, 0);
	assert_refused(f, load_with_initramfs(f, &part, 1, &gpa), -ENOEXEC, "whatever the memory");
	guest_mem_fini(&big);
}

static void impossible_initramfs_sizes_are_refused(void **state)
{
	struct fixture *f = *state;
	struct initramfs_part parts[] = {
		{.name = "first", .data = "x", .fd = -1, .len_bytes = 1},
		{.name = "second", .data = "x", .fd = -1, .len_bytes = UINT64_MAX},
	};
	static const uint64_t too_big[] = {UINT64_MAX, 1ULL << 63, 4 * GIB, 4 * GIB - 4};
	uint64_t bytes = 77;
	gpa_t gpa;

	for (size_t i = 0; i < ARRAY_SIZE(too_big); i++) {
		parts[1].len_bytes = too_big[i];
		assert_int_equal(loader_initramfs_bytes(parts, 2, &bytes, &f->err), -EFBIG);
		assert_non_null(strstr(f->err.msg, "second: "));
		assert_int_equal(bytes, 77);
	}
	parts[1].len_bytes = 4 * GIB - 8;
	assert_int_equal(loader_initramfs_bytes(parts, 2, &bytes, &f->err), 0);
	assert_int_equal(bytes, 4 * GIB - 4);
	assert_refused(f, load_with_initramfs(f, parts, 2, &gpa), -ENOEXEC, "whatever the memory");
}

static void a_short_initramfs_file_is_noticed(void **state)
{
	struct fixture *f = *state;
	int fd = image_fd((const uint8_t *)"1234567", 7);
	struct initramfs_part part = {.name = "rd.cpio", .fd = fd, .len_bytes = 8};
	gpa_t gpa = GPA(1);

	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), -ENODATA);
	assert_string_equal(f->err.msg, "rd.cpio: ends before its 8 bytes were read");
	assert_int_equal(gpa.v, 1);
	fd_close(&fd);
	part.fd = -1;
	assert_int_equal(load_with_initramfs(f, &part, 1, &gpa), -EBADF);
	assert_non_null(strstr(f->err.msg, "rd.cpio: "));
}

#define WITH_ELF(test)     cmocka_unit_test_setup_teardown(test, setup, teardown)
#define WITH_BZIMAGE(test) cmocka_unit_test_setup_teardown(test, setup_bzimage, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		WITH_ELF(elf_lands_at_its_physical_addresses),
		WITH_ELF(spoiled_elf_headers_are_refused),
		WITH_ELF(lying_elf_segments_are_refused),
		WITH_ELF(segments_may_touch_each_other_and_the_edges),
		WITH_ELF(empty_and_foreign_segments_are_passed_over),
		WITH_ELF(every_truncation_is_refused),
		WITH_ELF(a_shrinking_file_is_noticed),
		WITH_ELF(pvh_is_taken_when_wished_or_needed),
		WITH_ELF(entry_points_must_hit_code),
		WITH_ELF(spoiled_notes_are_refused),
		WITH_ELF(a_flood_of_notes_is_refused),
		WITH_BZIMAGE(bzimage_lands_at_its_preferred_address),
		WITH_BZIMAGE(spoiled_bzimages_are_refused),
		WITH_BZIMAGE(the_setup_header_has_its_own_length),
		WITH_BZIMAGE(every_truncation_is_refused),
		WITH_ELF(what_is_no_kernel_is_refused),
		WITH_ELF(parts_follow_each_other_aligned),
		WITH_ELF(an_initramfs_fits_to_the_page),
		WITH_ELF(an_initramfs_stays_below_its_limit),
		WITH_ELF(impossible_initramfs_sizes_are_refused),
		WITH_ELF(a_short_initramfs_file_is_noticed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
