// SPDX-License-Identifier: Apache-2.0
// Brings a kernel and an initramfs from files into guest memory. Main thread, before the vCPUs
// start. Headers are read once into our own memory, checked there and used from there; segments go
// straight from the file into guest memory.
#include "vmm/loader.h"

#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "vmm/base/fd.h"
#include "vmm/cmdline.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ELF structures are used as they are");

// Real kernels have 4 to 10 program headers and half a kilobyte of notes.
#define PHDRS_MAX       64
#define NOTES_MAX_BYTES (64 * KIB)

// The Xen note that carries the 32-bit PVH entry point (Xen: public/elfnote.h).
#define XEN_NOTE_NAME         "Xen"
#define XEN_NOTE_PHYS32_ENTRY 18

// Linux takes the initramfs from any RAM that a 32-bit field can name; its own boot protocol says
// 2 GiB unless a header says otherwise.
#define INITRAMFS_END_GPA (2 * GIB)

struct elf_image {
	const struct loader_job *job;
	uint64_t file_bytes;
	uint64_t entry;
	unsigned int nr_phdrs;
	Elf64_Phdr phdrs[PHDRS_MAX];
	uint64_t start_gpa, end_gpa;
	bool has_pvh_entry;
	uint64_t pvh_entry;
};

static uint64_t to_mib(uint64_t bytes)
{
	return bytes / MIB + (bytes % MIB ? 1 : 0);
}

// Reads exactly len bytes; what names them for the message.
static int read_exact(const struct loader_job *job, uint64_t off, void *buf, size_t len,
	const char *what, struct err *err)
{
	ssize_t n = fd_pread_full(job->fd, buf, len, (off_t)off);

	if (n < 0)
		return err_errno(err, (int)n, "%s: reading %s", job->name, what);
	if ((size_t)n != len)
		return err_set(err, -ENOEXEC, "%s: ends in the middle of %s", job->name, what);
	return 0;
}

int loader_check_fit(
	const struct loader_job *job, const struct loaded_kernel *kernel, struct err *err)
{
	uint64_t kernel_end, initramfs_limit, need;

	if (kernel->start_gpa < job->min_gpa || kernel->end_gpa > job->max_gpa)
		return err_set(err, -ENOEXEC,
			"%s: wants to be loaded at 0x%" PRIx64 " to 0x%" PRIx64
			"; a kernel must lie between 0x%" PRIx64 " and 0x%" PRIx64,
			job->name, kernel->start_gpa, kernel->end_gpa, job->min_gpa, job->max_gpa);
	if (job->initramfs_bytes == 0) {
		if (kernel->end_gpa > job->end_gpa)
			return err_set(err, -ENOMEM,
				"%s: needs at least %" PRIu64 " MiB of memory; there are %" PRIu64,
				job->name, to_mib(kernel->end_gpa), job->end_gpa / (uint64_t)MIB);
		return 0;
	}
	// No overflow: max_gpa is below 2^63, and the initramfs below 2^32 bytes.
	kernel_end = ALIGN_UP(kernel->end_gpa, PAGE_BYTES);
	need = kernel_end + ALIGN_UP(job->initramfs_bytes, PAGE_BYTES);
	initramfs_limit = MIN(job->max_gpa, kernel->initramfs_end_gpa);
	if (need > initramfs_limit)
		return err_set(err, -ENOEXEC,
			"%s: its initramfs of %" PRIu64
			" bytes does not fit between the kernel's end at 0x%" PRIx64
			" and 0x%" PRIx64 ", whatever the memory",
			job->name, job->initramfs_bytes, kernel_end, initramfs_limit);
	if (need > job->end_gpa)
		return err_set(err, -ENOMEM,
			"%s: with its initramfs of %" PRIu64 " bytes needs at least %" PRIu64
			" MiB of memory; there are %" PRIu64,
			job->name, job->initramfs_bytes, to_mib(need),
			job->end_gpa / (uint64_t)MIB);
	return 0;
}

int loader_load_kernel(const struct loader_arch *arch, const struct loader_job *job,
	struct loaded_kernel *ret_kernel, struct err *err)
{
	uint8_t head[LOADER_HEAD_BYTES];
	struct stat st;
	ssize_t n;

	if (fstat(job->fd, &st) < 0)
		return err_errno(err, -errno, "%s: looking at the kernel", job->name);
	if (!S_ISREG(st.st_mode))
		return err_set(err, -EINVAL, "%s: is not a regular file", job->name);
	n = fd_pread_full(job->fd, head, sizeof(head), 0);
	if (n < 0)
		return err_errno(err, (int)n, "%s: reading the kernel", job->name);
	if (n == 0)
		return err_set(err, -ENOEXEC, "%s: is empty", job->name);
	for (size_t i = 0; i < arch->nr_formats; i++)
		if (arch->formats[i].matches(head, (size_t)n))
			return arch->formats[i].load(
				job, head, (size_t)n, (uint64_t)st.st_size, ret_kernel, err);
	return err_set(err, -ENOEXEC, "%s: is neither %s", job->name, arch->formats_text);
}

// --- ELF -------------------------------------------------------------------------------------

bool loader_is_elf(const uint8_t *head, size_t len)
{
	return len >= SELFMAG && memcmp(head, ELFMAG, SELFMAG) == 0;
}

static int elf_read_headers(struct elf_image *image, uint16_t machine, const uint8_t *head,
	size_t head_len, struct err *err)
{
	const char *name = image->job->name;
	uint64_t phdrs_end;
	Elf64_Ehdr ehdr;

	if (head_len < sizeof(ehdr))
		return err_set(err, -ENOEXEC, "%s: ends in the middle of the ELF header", name);
	memcpy(&ehdr, head, sizeof(ehdr));
	if (ehdr.e_ident[EI_CLASS] != ELFCLASS64)
		return err_set(err, -ENOEXEC, "%s: is not a 64-bit ELF file", name);
	if (ehdr.e_ident[EI_DATA] != ELFDATA2LSB)
		return err_set(err, -ENOEXEC, "%s: is not a little-endian ELF file", name);
	if (ehdr.e_ident[EI_VERSION] != EV_CURRENT || ehdr.e_version != EV_CURRENT)
		return err_set(err, -ENOEXEC, "%s: unknown ELF version %u", name, ehdr.e_version);
	if (ehdr.e_machine != machine)
		return err_set(err, -ENOEXEC,
			"%s: is for another kind of processor (ELF machine %u; this host runs %u)",
			name, ehdr.e_machine, machine);
	if (ehdr.e_type != ET_EXEC)
		return err_set(err, -ENOEXEC,
			"%s: is not an executable with fixed addresses (ELF type %u), so not a "
			"kernel",
			name, ehdr.e_type);
	if (ehdr.e_phentsize != sizeof(Elf64_Phdr))
		return err_set(err, -ENOEXEC, "%s: program headers of %u bytes instead of %zu",
			name, ehdr.e_phentsize, sizeof(Elf64_Phdr));
	if (ehdr.e_phnum == 0 || ehdr.e_phnum > PHDRS_MAX)
		return err_set(err, -ENOEXEC, "%s: %u program headers; 1 to %d are allowed", name,
			ehdr.e_phnum, PHDRS_MAX);
	if (__builtin_add_overflow(ehdr.e_phoff, ehdr.e_phnum * sizeof(Elf64_Phdr), &phdrs_end) ||
		phdrs_end > image->file_bytes)
		return err_set(err, -ENOEXEC, "%s: ends before its program headers do", name);
	image->entry = ehdr.e_entry;
	image->nr_phdrs = ehdr.e_phnum;
	return read_exact(image->job, ehdr.e_phoff, image->phdrs,
		image->nr_phdrs * sizeof(image->phdrs[0]), "the program headers", err);
}

static bool is_loaded(const Elf64_Phdr *phdr)
{
	return phdr->p_type == PT_LOAD && phdr->p_memsz > 0;
}

// Each segment by itself, then against each other. Finds what they span.
static int elf_check_segments(struct elf_image *image, struct err *err)
{
	const char *name = image->job->name;

	image->start_gpa = UINT64_MAX;
	image->end_gpa = 0;
	for (unsigned int i = 0; i < image->nr_phdrs; i++) {
		const Elf64_Phdr *phdr = &image->phdrs[i];
		uint64_t file_end, mem_end;

		if (phdr->p_type != PT_LOAD && phdr->p_type != PT_NOTE)
			continue;
		if (__builtin_add_overflow(phdr->p_offset, phdr->p_filesz, &file_end) ||
			file_end > image->file_bytes)
			return err_set(err, -ENOEXEC,
				"%s: segment %u (0x%" PRIx64 " bytes at offset 0x%" PRIx64
				") lies beyond the end of the file",
				name, i, phdr->p_filesz, phdr->p_offset);
		if (phdr->p_type != PT_LOAD)
			continue;
		if (phdr->p_filesz > phdr->p_memsz)
			return err_set(err, -ENOEXEC,
				"%s: segment %u has more bytes in the file (0x%" PRIx64
				") than in memory (0x%" PRIx64 ")",
				name, i, phdr->p_filesz, phdr->p_memsz);
		if (__builtin_add_overflow(phdr->p_paddr, phdr->p_memsz, &mem_end))
			return err_set(err, -ENOEXEC,
				"%s: segment %u (0x%" PRIx64 " bytes at 0x%" PRIx64
				") wraps around the address space",
				name, i, phdr->p_memsz, phdr->p_paddr);
		if (!is_loaded(phdr))
			continue;
		for (unsigned int k = 0; k < i; k++) {
			const Elf64_Phdr *other = &image->phdrs[k];

			if (is_loaded(other) && other->p_paddr < mem_end &&
				phdr->p_paddr < other->p_paddr + other->p_memsz)
				return err_set(err, -ENOEXEC, "%s: segments %u and %u overlap",
					name, k, i);
		}
		image->start_gpa = MIN(image->start_gpa, phdr->p_paddr);
		image->end_gpa = MAX(image->end_gpa, mem_end);
	}
	if (image->end_gpa == 0)
		return err_set(err, -ENOEXEC, "%s: has no segment to load", name);
	return 0;
}

// Looks for the PVH entry in one note segment. Notes are 4-byte aligned, as Linux and Xen make
// them.
static int elf_read_notes(struct elf_image *image, const Elf64_Phdr *phdr, struct err *err)
{
	const char *name = image->job->name;
	uint64_t left = phdr->p_filesz, off = phdr->p_offset;

	if (left > NOTES_MAX_BYTES)
		return err_set(err, -ENOEXEC,
			"%s: 0x%" PRIx64 " bytes of notes; 0x%llx are allowed", name, left,
			NOTES_MAX_BYTES);
	// Each turn takes a header's length at least. Less than a header at the end is padding.
	while (left >= sizeof(Elf64_Nhdr)) {
		struct {
			Elf64_Nhdr nhdr;
			char name[sizeof(XEN_NOTE_NAME)];
			uint8_t desc[8];
		} note = {0};
		uint64_t name_bytes, bytes;
		int r;

		r = read_exact(image->job, off, &note, MIN(left, sizeof(note)), "a note", err);
		if (r < 0)
			return r;
		name_bytes = ALIGN_UP((uint64_t)note.nhdr.n_namesz, 4);
		bytes = sizeof(note.nhdr) + name_bytes + ALIGN_UP((uint64_t)note.nhdr.n_descsz, 4);
		if (bytes > left)
			return err_set(err, -ENOEXEC,
				"%s: the note at offset 0x%" PRIx64 " is longer than its segment",
				name, off);
		if (note.nhdr.n_type == XEN_NOTE_PHYS32_ENTRY &&
			note.nhdr.n_namesz == sizeof(XEN_NOTE_NAME) &&
			memcmp(note.name, XEN_NOTE_NAME, sizeof(XEN_NOTE_NAME)) == 0) {
			if (note.nhdr.n_descsz == 8)
				image->pvh_entry = get_le64(note.desc);
			else if (note.nhdr.n_descsz == 4)
				image->pvh_entry = get_le32(note.desc);
			else
				return err_set(err, -ENOEXEC,
					"%s: its PVH entry point has %u bytes instead of 4 or 8",
					name, note.nhdr.n_descsz);
			image->has_pvh_entry = true;
		}
		off += bytes;
		left -= bytes;
	}
	return 0;
}

// Whether there is code from the file at gpa.
static bool elf_has_code_at(const struct elf_image *image, uint64_t gpa)
{
	for (unsigned int i = 0; i < image->nr_phdrs; i++) {
		const Elf64_Phdr *phdr = &image->phdrs[i];

		if (phdr->p_type == PT_LOAD && gpa >= phdr->p_paddr &&
			gpa - phdr->p_paddr < phdr->p_filesz)
			return true;
	}
	return false;
}

// The 64-bit entry point of Linux is a physical address. A kernel whose e_entry is a virtual one
// can only be entered through its PVH note.
static int elf_choose_entry(
	const struct elf_image *image, struct loaded_kernel *kernel, struct err *err)
{
	const struct loader_job *job = image->job;
	bool can64 = elf_has_code_at(image, image->entry);
	bool can_pvh = image->has_pvh_entry && elf_has_code_at(image, image->pvh_entry);

	if (image->has_pvh_entry && !can_pvh)
		return err_set(err, -ENOEXEC,
			"%s: its PVH entry point 0x%" PRIx64 " is outside of its segments",
			job->name, image->pvh_entry);
	if (job->want != BOOT_PVH && can64) {
		kernel->protocol = BOOT_LINUX64;
		kernel->entry_gpa = image->entry;
		return 0;
	}
	if (job->want != BOOT_LINUX64 && can_pvh) {
		kernel->protocol = BOOT_PVH;
		kernel->entry_gpa = image->pvh_entry;
		return 0;
	}
	if (job->want == BOOT_PVH)
		return err_set(err, -ENOEXEC, "%s: has no PVH entry point (CONFIG_PVH in Linux)",
			job->name);
	return err_set(err, -ENOEXEC,
		"%s: its entry point 0x%" PRIx64 " is outside of its segments", job->name,
		image->entry);
}

int loader_load_elf(uint16_t machine, const struct loader_job *job, const uint8_t *head,
	size_t head_len, uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err)
{
	struct elf_image image = {.job = job, .file_bytes = file_bytes};
	struct loaded_kernel kernel = {0};
	int r;

	r = elf_read_headers(&image, machine, head, head_len, err);
	if (r < 0)
		return r;
	r = elf_check_segments(&image, err);
	if (r < 0)
		return r;
	for (unsigned int i = 0; i < image.nr_phdrs; i++) {
		if (image.phdrs[i].p_type != PT_NOTE)
			continue;
		r = elf_read_notes(&image, &image.phdrs[i], err);
		if (r < 0)
			return r;
	}
	r = elf_choose_entry(&image, &kernel, err);
	if (r < 0)
		return r;
	kernel.start_gpa = image.start_gpa;
	kernel.end_gpa = image.end_gpa;
	kernel.initramfs_end_gpa = INITRAMFS_END_GPA;
	kernel.cmdline_max_bytes = CMDLINE_MAX_BYTES - 1;
	r = loader_check_fit(job, &kernel, err);
	if (r < 0)
		return r;
	for (unsigned int i = 0; i < image.nr_phdrs; i++) {
		const Elf64_Phdr *phdr = &image.phdrs[i];

		if (!is_loaded(phdr))
			continue;
		r = guest_mem_place_file(job->mem, GPA(phdr->p_paddr), job->fd,
			(off_t)phdr->p_offset, phdr->p_filesz);
		if (r < 0)
			return err_errno(err, r, "%s: loading segment %u", job->name, i);
	}
	*ret_kernel = kernel;
	return 0;
}

// --- Initramfs -------------------------------------------------------------------------------

int loader_initramfs_bytes(const struct initramfs_part *parts, unsigned int nr_parts,
	uint64_t *ret_bytes, struct err *err)
{
	uint64_t total = 0;

	for (unsigned int i = 0; i < nr_parts; i++) {
		if (parts[i].len_bytes > UINT32_MAX ||
			(total += ALIGN_UP(parts[i].len_bytes, LOADER_INITRAMFS_ALIGN)) >
				UINT32_MAX)
			return err_set(err, -EFBIG, "%s: an initramfs must be smaller than 4 GiB",
				parts[i].name);
	}
	*ret_bytes = total;
	return 0;
}

int loader_load_initramfs(const struct loader_job *job, const struct loaded_kernel *kernel,
	const struct initramfs_part *parts, unsigned int nr_parts, gpa_t *ret_gpa, struct err *err)
{
	uint64_t room_end = MIN(job->end_gpa, kernel->initramfs_end_gpa), start, at;
	int r;

	if (job->initramfs_bytes == 0) {
		*ret_gpa = GPA(0);
		return 0;
	}
	ASSERT(job->initramfs_bytes <= room_end);
	start = ALIGN_DOWN(room_end - job->initramfs_bytes, PAGE_BYTES);
	ASSERT(start >= kernel->end_gpa);
	at = start;
	for (unsigned int i = 0; i < nr_parts; i++) {
		const struct initramfs_part *part = &parts[i];

		if (part->data)
			r = guest_mem_write(job->mem, GPA(at), part->data, part->len_bytes);
		else
			r = guest_mem_load_file(
				job->mem, GPA(at), part->fd, (off_t)part->off, part->len_bytes);
		if (r == -ENODATA)
			return err_set(err, r, "%s: ends before its %" PRIu64 " bytes were read",
				part->name, part->len_bytes);
		if (r < 0)
			return err_errno(err, r, "%s: loading the initramfs", part->name);
		at += ALIGN_UP(part->len_bytes, LOADER_INITRAMFS_ALIGN);
	}
	ASSERT(at - start == job->initramfs_bytes);
	*ret_gpa = GPA(start);
	return 0;
}
