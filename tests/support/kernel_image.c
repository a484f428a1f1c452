// SPDX-License-Identifier: Apache-2.0
// Small kernel images for tests and fuzzers, on the test's thread.
#include "tests/support/kernel_image.h"

#include <asm/bootparam.h>
#include <elf.h>
#include <string.h>
#include <sys/mman.h>

#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

_Static_assert(sizeof(Elf64_Phdr) == IMAGE_PHDR_BYTES && sizeof(Elf64_Ehdr) == IMAGE_PHDR_OFF,
	"as the header says");

// Bytes that are neither zero nor the same for long.
static void fill(uint8_t *p, size_t len, unsigned int seed)
{
	for (size_t i = 0; i < len; i++)
		p[i] = (uint8_t)(1 + (seed + i * 7) % 251);
}

static void note(uint8_t *p, const char name[static 4], uint32_t type, uint64_t desc)
{
	put_le32(p, 4);
	put_le32(p + 4, 8);
	put_le32(p + 8, type);
	memcpy(p + 12, name, 4);
	put_le64(p + 16, desc);
}

size_t image_make_elf(uint8_t buf[static IMAGE_BYTES_MAX])
{
	Elf64_Ehdr ehdr = {
		.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB,
			EV_CURRENT},
		.e_type = ET_EXEC,
		.e_machine = EM_X86_64,
		.e_version = EV_CURRENT,
		.e_entry = IMAGE_ENTRY64,
		.e_phoff = IMAGE_PHDR_OFF,
		.e_ehsize = sizeof(Elf64_Ehdr),
		.e_phentsize = IMAGE_PHDR_BYTES,
		.e_phnum = IMAGE_NR_PHDRS,
	};
	Elf64_Phdr phdrs[IMAGE_NR_PHDRS] = {
		[IMAGE_TEXT_PHDR] = {.p_type = PT_LOAD,
			.p_flags = PF_R | PF_X,
			.p_offset = IMAGE_TEXT_OFF,
			.p_vaddr = 0xffffffff81000000,
			.p_paddr = IMAGE_TEXT_GPA,
			.p_filesz = IMAGE_TEXT_BYTES,
			.p_memsz = IMAGE_TEXT_BYTES,
			.p_align = 0x200000},
		[IMAGE_DATA_PHDR] = {.p_type = PT_LOAD,
			.p_flags = PF_R | PF_W,
			.p_offset = IMAGE_DATA_OFF,
			.p_vaddr = 0xffffffff81002000,
			.p_paddr = IMAGE_DATA_GPA,
			.p_filesz = IMAGE_DATA_BYTES,
			.p_memsz = IMAGE_DATA_MEM,
			.p_align = 0x200000},
		[IMAGE_NOTE_PHDR] = {.p_type = PT_NOTE,
			.p_flags = PF_R,
			.p_offset = IMAGE_NOTE_OFF,
			.p_filesz = IMAGE_NOTE_BYTES,
			.p_memsz = IMAGE_NOTE_BYTES,
			.p_align = 4},
	};

	memset(buf, 0, IMAGE_ELF_BYTES);
	memcpy(buf, &ehdr, sizeof(ehdr));
	memcpy(buf + IMAGE_PHDR_OFF, phdrs, sizeof(phdrs));
	note(buf + IMAGE_NOTE_OFF, "GNU", NT_GNU_BUILD_ID, 0x1122334455667788);
	note(buf + IMAGE_PVH_NOTE_OFF, "Xen", 18, IMAGE_ENTRY_PVH);
	fill(buf + IMAGE_TEXT_OFF, IMAGE_TEXT_BYTES, 0);
	fill(buf + IMAGE_DATA_OFF, IMAGE_DATA_BYTES, 99);
	return IMAGE_ELF_BYTES;
}

size_t image_make_bzimage(uint8_t buf[static IMAGE_BYTES_MAX])
{
	struct setup_header hdr = {
		.setup_sects = 1,
		.syssize = IMAGE_BZ_CODE_BYTES / 16,
		.boot_flag = 0xaa55,
		.jump = (uint16_t)(0xeb | (0x1f1 + sizeof(hdr) - 0x202) << 8),
		.header = 0x53726448,
		.version = 0x020f,
		.loadflags = LOADED_HIGH,
		.initrd_addr_max = IMAGE_BZ_INITRD_MAX,
		.kernel_alignment = 0x200000,
		.relocatable_kernel = 1,
		.xloadflags = XLF_KERNEL_64,
		.cmdline_size = IMAGE_BZ_CMDLINE_MAX,
		.pref_address = IMAGE_BZ_GPA,
		.init_size = IMAGE_BZ_INIT_BYTES,
	};

	memset(buf, 0, IMAGE_BZ_BYTES);
	memcpy(buf + 0x1f1, &hdr, sizeof(hdr));
	// What must not reach boot_params, where it would mean that they were copied too
	// generously.
	buf[0x1ef] = 0xff;
	fill(buf + IMAGE_BZ_CODE_OFF, IMAGE_BZ_CODE_BYTES, 17);
	return IMAGE_BZ_BYTES;
}

int image_fd(const uint8_t *bytes, size_t len)
{
	int fd = memfd_create("kernel-image", MFD_CLOEXEC), r;

	ASSERT(fd >= 0);
	r = fd_write_all(fd, bytes, len);
	ASSERT(r == 0);
	return fd;
}
