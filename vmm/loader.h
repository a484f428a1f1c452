// SPDX-License-Identifier: Apache-2.0
// Brings a kernel and an initramfs from files into guest memory. Runs on the main thread, before
// the vCPUs start. Files are hostile: every field is checked before it is used.
//
// Guest memory must be fresh, as guest_mem_init() makes it: all that a file does not cover (bss,
// the gaps between segments) is taken to be zero already and is not touched.
#ifndef MAYFLY_LOADER_H
#define MAYFLY_LOADER_H

#include "vmm/base/err.h"
#include "vmm/guest_mem.h"

enum boot_protocol {
	BOOT_ANY, // as a wish: what the image can do, 64-bit entry first
	BOOT_LINUX64, // x86: long mode, RSI = boot_params (Linux: x86/boot.rst, 64-bit protocol)
	BOOT_PVH, // x86: 32-bit protected mode, EBX = hvm_start_info (Xen: misc/pvh.pandoc)
};

// A piece of the initramfs: len_bytes at data if that is not NULL, else at off of fd. name is for
// messages. Nothing is owned.
struct initramfs_part {
	const char *name;
	const void *data;
	int fd;
	uint64_t off;
	uint64_t len_bytes; // may be 0
};

#define LOADER_INITRAMFS_ALIGN 4 // the start of each archive in Linux' buffer format

// What is to be loaded, and the room there is for it.
struct loader_job {
	struct guest_mem *mem;
	const char *name; // of the kernel's file, for messages
	int fd;
	enum boot_protocol want;
	uint64_t min_gpa; // nothing of the kernel may lie below
	uint64_t end_gpa; // nor at or above: the end of RAM
	uint64_t max_gpa; // what end_gpa could be with more memory; below 2^63
	uint64_t initramfs_bytes; // will be wanted beside it
};

struct loaded_kernel {
	enum boot_protocol protocol;
	uint64_t entry_gpa;
	uint64_t start_gpa, end_gpa; // what it occupies, bss and start-up heap included
	uint64_t initramfs_end_gpa; // the initramfs must end here or below
	uint32_t cmdline_max_bytes; // without the NUL, below CMDLINE_MAX_BYTES
	// bzImage: its setup header, from offset 0x1f1 of the file.
	uint8_t setup_header[128];
	unsigned int setup_header_bytes;
};

// A kernel image format: `matches` sees the first bytes of the file.
#define LOADER_HEAD_BYTES 1024
struct loader_format {
	const char *name;
	bool (*matches)(const uint8_t *head, size_t len);
	int (*load)(const struct loader_job *job, const uint8_t *head, size_t head_len,
		uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err);
};

// What an architecture boots. One constant in vmm/ARCH/; the loader itself is the same for all.
struct loader_arch {
	const char *formats_text; // after "is neither", for the message
	const struct loader_format *formats;
	size_t nr_formats;
};

// Loads the kernel. -ENOEXEC for a file that is not a sound kernel of this architecture or fits no
// memory, -ENOMEM if kernel and initramfs need more memory than there is (the message says how
// much), or the errno of reading.
int loader_load_kernel(const struct loader_arch *arch, const struct loader_job *job,
	struct loaded_kernel *ret_kernel, struct err *err);

// The bytes that the parts take together, each padded to LOADER_INITRAMFS_ALIGN. -EFBIG if that is
// 4 GiB or more.
int loader_initramfs_bytes(const struct initramfs_part *parts, unsigned int nr_parts,
	uint64_t *ret_bytes, struct err *err);

// Puts the parts one after the other as high as the kernel lets them. ret_gpa is page-aligned, and
// 0 when there are no bytes. kernel is the one that was loaded with the same job.
int loader_load_initramfs(const struct loader_job *job, const struct loaded_kernel *kernel,
	const struct initramfs_part *parts, unsigned int nr_parts, gpa_t *ret_gpa, struct err *err);

// For formats: whether [start_gpa, end_gpa) and the initramfs fit, as above.
int loader_check_fit(
	const struct loader_job *job, const struct loaded_kernel *kernel, struct err *err);

// A format's load() for ELF64 images of one machine (EM_…), loaded at their physical addresses.
int loader_load_elf(uint16_t machine, const struct loader_job *job, const uint8_t *head,
	size_t head_len, uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err);
bool loader_is_elf(const uint8_t *head, size_t len);

#endif
