// SPDX-License-Identifier: Apache-2.0
// Fuzzes boot_load(): a sound image with a few changed fields, which reaches much deeper than
// random files, or a file as it is. What loads is compared with a naive second reading of the same
// file.
//
// Input: byte 0 picks the image (ELF, bzImage, raw) and the wish for a protocol, byte 1 the memory
// in MiB, bytes 2 and 3 the initramfs in units of 16 bytes. Then, for raw, the file; otherwise
// changes of ten bytes each: where (two bytes, modulo the image; the top bit cuts the file there
// instead) and what (eight bytes, of which the two bits below the top say how many count).
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/kernel_image.h"
#include "vmm/base/fd.h"
#include "vmm/x86_64/boot.h"
#include "vmm/x86_64/layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define HEAD_BYTES     4
#define CHANGE_BYTES   10
#define CHANGE_CUT     0x8000
#define CHANGE_WIDTH   13 // the bit where it starts
#define FILE_BYTES_MAX (64 * KIB)
#define INITRAMFS_MAX  (65535 * 16)

#define CHECK(cond)                                                                \
	do {                                                                       \
		if (!(cond)) {                                                     \
			fprintf(stderr, "loader_fuzz: %s does not hold\n", #cond); \
			abort();                                                   \
		}                                                                  \
	} while (0)

static uint8_t file[FILE_BYTES_MAX];
static uint8_t initramfs[INITRAMFS_MAX];

static size_t make_file(unsigned int kind, const uint8_t *data, size_t size)
{
	size_t image_bytes, file_bytes;

	if (kind == 2) {
		file_bytes = MIN(size, sizeof(file));
		memcpy(file, data, file_bytes);
		return file_bytes;
	}
	image_bytes = kind == 0 ? image_make_elf(file) : image_make_bzimage(file);
	file_bytes = image_bytes;
	for (; size >= CHANGE_BYTES; data += CHANGE_BYTES, size -= CHANGE_BYTES) {
		uint16_t where = get_le16(data);
		size_t off = (where & ((1U << CHANGE_WIDTH) - 1)) % image_bytes;
		size_t width = 1U << (where >> CHANGE_WIDTH & 3);

		if (where & CHANGE_CUT)
			file_bytes = off;
		else
			memcpy(file + off, data + 2, MIN(width, image_bytes - off));
	}
	return file_bytes;
}

// Each loaded segment has the file's bytes in front and zeros behind.
static void check_elf(const struct guest_mem *mem, size_t file_bytes)
{
	Elf64_Ehdr ehdr;

	CHECK(file_bytes >= sizeof(ehdr));
	memcpy(&ehdr, file, sizeof(ehdr));
	for (unsigned int i = 0; i < ehdr.e_phnum; i++) {
		struct guest_view view;
		Elf64_Phdr phdr;

		CHECK(ehdr.e_phoff + (i + 1) * sizeof(phdr) <= file_bytes);
		memcpy(&phdr, file + ehdr.e_phoff + i * sizeof(phdr), sizeof(phdr));
		if (phdr.p_type != PT_LOAD || phdr.p_memsz == 0)
			continue;
		CHECK(phdr.p_offset + phdr.p_filesz <= file_bytes);
		CHECK(phdr.p_paddr >= LAYOUT_KERNEL_MIN_GPA);
		CHECK(guest_mem_view(mem, GPA(phdr.p_paddr), phdr.p_memsz, &view) == 0);
		CHECK(memcmp(view.hva, file + phdr.p_offset, phdr.p_filesz) == 0);
		// Not all of what may be megabytes: the ends.
		for (size_t k = phdr.p_filesz; k < MIN(phdr.p_memsz, phdr.p_filesz + 4096); k++)
			CHECK(view.hva[k] == 0);
		CHECK(phdr.p_memsz == phdr.p_filesz || view.hva[phdr.p_memsz - 1] == 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	struct initramfs_part part = {.name = "initramfs", .data = initramfs, .fd = -1};
	struct boot_config config = {.kernel_name = "a-kernel",
		.initramfs = &part,
		.nr_initramfs = 1,
		.cmdline = "quiet",
		.nr_cpus = 1};
	struct boot_entry entry = {0};
	struct guest_mem mem;
	struct err err = {0};
	struct kvm_sregs sregs = {0};
	struct kvm_regs regs;
	size_t file_bytes;
	unsigned int kind;
	int r;

	if (size < HEAD_BYTES)
		return 0;
	kind = data[0] % 3;
	config.want = (enum boot_protocol)(data[0] / 3 % 3);
	part.len_bytes = get_le16(data + 2) * 16ULL;
	memset(initramfs, 0x77, part.len_bytes);
	file_bytes = make_file(kind, data + HEAD_BYTES, size - HEAD_BYTES);
	CHECK(layout_ram_ranges((data[1] ? data[1] : 256) * MIB, ranges, &err) == 1);
	CHECK(guest_mem_init(&mem, ranges, 1, &err) == 0);
	config.kernel_fd = image_fd(file, file_bytes);

	r = boot_load(&mem, &config, &entry, &err);
	if (r < 0) {
		CHECK(err.code == r && strstr(err.msg, "a-kernel"));
		CHECK(entry.protocol == BOOT_ANY && entry.rip == 0 && entry.info.v == 0);
	} else {
		CHECK(entry.protocol == BOOT_LINUX64 || entry.protocol == BOOT_PVH);
		CHECK(config.want == BOOT_ANY || config.want == entry.protocol);
		CHECK(entry.rip >= LAYOUT_KERNEL_MIN_GPA && entry.rip < ranges[0].size_bytes);
		boot_regs(&entry, &regs);
		boot_sregs(&entry, &sregs);
		// An initramfs in the wrong place would have overwritten the kernel.
		if (memcmp(file, ELFMAG, SELFMAG) == 0)
			check_elf(&mem, file_bytes);
	}
	fd_close(&config.kernel_fd);
	guest_mem_fini(&mem);
	return 0;
}
