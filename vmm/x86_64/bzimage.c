// SPDX-License-Identifier: Apache-2.0
// Linux' bzImage, and the table of what x86-64 boots. Main thread, before the vCPUs start.
#include "vmm/x86_64/bzimage.h"

#include <asm/bootparam.h>
#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "vmm/cmdline.h"

// Offsets in the file, from Linux' x86/boot.rst. The file begins with the real-mode sectors, and
// the setup header lies in the first of them.
#define HEADER_OFF offsetof(struct boot_params, hdr)
#define MAGIC_OFF  (HEADER_OFF + offsetof(struct setup_header, header))
#define MAGIC      "HdrS"
// "The end of the setup header is 0x202 plus the byte at 0x201", the operand of its jump.
#define JUMP_OPERAND_OFF (HEADER_OFF + offsetof(struct setup_header, jump) + 1)

#define BOOT_FLAG             0xaa55
#define VERSION_MIN           0x020c // the first with xloadflags
#define SECTOR_BYTES          512ULL
#define SETUP_SECTORS_DEFAULT 4
#define SYSSIZE_UNIT_BYTES    16ULL
#define ENTRY64_OFF           0x200ULL

_Static_assert(sizeof(struct setup_header) <= sizeof(((struct loaded_kernel *)0)->setup_header),
	"a setup header fits into loaded_kernel");

bool bzimage_matches(const uint8_t *head, size_t len)
{
	return len >= MAGIC_OFF + 4 && memcmp(head + MAGIC_OFF, MAGIC, 4) == 0;
}

int bzimage_load(const struct loader_job *job, const uint8_t *head, size_t head_len,
	uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err)
{
	struct loaded_kernel kernel = {.protocol = BOOT_LINUX64};
	struct setup_header hdr = {0};
	uint64_t code_off, code_bytes;
	size_t header_bytes;
	int r;

	if (head_len < HEADER_OFF + sizeof(hdr))
		return err_set(
			err, -ENOEXEC, "%s: ends in the middle of the setup header", job->name);
	header_bytes = MAGIC_OFF + head[JUMP_OPERAND_OFF] - HEADER_OFF;
	// A newer kernel's header may be longer than what we know: the rest is not for us.
	header_bytes = MIN(header_bytes, sizeof(hdr));
	memcpy(&hdr, head + HEADER_OFF, header_bytes);

	if (hdr.boot_flag != BOOT_FLAG)
		return err_set(err, -ENOEXEC, "%s: bad boot flag 0x%x", job->name, hdr.boot_flag);
	if (hdr.version < VERSION_MIN)
		return err_set(err, -ENOEXEC,
			"%s: boot protocol %u.%02u is too old; 2.12 or later is needed", job->name,
			hdr.version >> 8, hdr.version & 0xffU);
	if (header_bytes < offsetof(struct setup_header, handover_offset))
		return err_set(err, -ENOEXEC, "%s: a setup header of only %zu bytes", job->name,
			header_bytes);
	if (!(hdr.loadflags & LOADED_HIGH))
		return err_set(err, -ENOEXEC, "%s: is a zImage, which loads low", job->name);
	if (!(hdr.xloadflags & XLF_KERNEL_64))
		return err_set(err, -ENOEXEC, "%s: has no 64-bit entry point", job->name);
	if (job->want == BOOT_PVH)
		return err_set(err, -ENOEXEC,
			"%s: a bzImage has no PVH entry point; give the vmlinux", job->name);

	code_off = (hdr.setup_sects ? hdr.setup_sects : SETUP_SECTORS_DEFAULT) * SECTOR_BYTES +
		   SECTOR_BYTES;
	code_bytes = hdr.syssize * SYSSIZE_UNIT_BYTES;
	if (code_off > file_bytes || code_bytes > file_bytes - code_off)
		return err_set(err, -ENOEXEC,
			"%s: is truncated: it has %" PRIu64 " bytes of %" PRIu64, job->name,
			file_bytes, code_off + code_bytes);
	if (code_bytes <= ENTRY64_OFF)
		return err_set(err, -ENOEXEC, "%s: its code ends before its 64-bit entry point",
			job->name);
	// We load at the preferred address, so whether it is relocatable does not matter.
	if (__builtin_add_overflow(
		    hdr.pref_address, MAX(code_bytes, (uint64_t)hdr.init_size), &kernel.end_gpa))
		return err_set(err, -ENOEXEC,
			"%s: its preferred address 0x%llx wraps around the address space",
			job->name, hdr.pref_address);
	kernel.start_gpa = hdr.pref_address;
	kernel.entry_gpa = kernel.start_gpa + ENTRY64_OFF;
	kernel.initramfs_end_gpa = (uint64_t)hdr.initrd_addr_max + 1;
	kernel.cmdline_max_bytes = MIN(hdr.cmdline_size, CMDLINE_MAX_BYTES - 1);
	kernel.setup_header_bytes = (unsigned int)header_bytes;
	memcpy(kernel.setup_header, &hdr, header_bytes);
	r = loader_check_fit(job, &kernel, err);
	if (r < 0)
		return r;
	r = guest_mem_load_file(
		job->mem, GPA(kernel.start_gpa), job->fd, (off_t)code_off, (size_t)code_bytes);
	if (r < 0)
		return err_errno(err, r, "%s: loading the kernel", job->name);
	*ret_kernel = kernel;
	return 0;
}

static int load_elf(const struct loader_job *job, const uint8_t *head, size_t head_len,
	uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err)
{
	return loader_load_elf(EM_X86_64, job, head, head_len, file_bytes, ret_kernel, err);
}

static const struct loader_format formats[] = {
	{"ELF", loader_is_elf, load_elf},
	{"bzImage", bzimage_matches, bzimage_load},
};

const struct loader_arch loader_arch_x86_64 = {
	.formats_text = "an x86-64 ELF kernel (vmlinux) nor a bzImage",
	.formats = formats,
	.nr_formats = ARRAY_SIZE(formats),
};
