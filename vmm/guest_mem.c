// SPDX-License-Identifier: Apache-2.0
// Guest RAM on a memfd. Any thread; see the header.
#include "vmm/guest_mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define BITS_PER_WORD 64

static size_t dirty_words(const struct guest_mem_region *region)
{
	uint64_t pages = region->size_bytes / PAGE_BYTES;

	return (size_t)((pages + BITS_PER_WORD - 1) / BITS_PER_WORD);
}

static int check_ranges(const struct guest_mem_range *ranges, unsigned int nr_ranges,
	uint64_t *ret_total_bytes, struct err *err)
{
	uint64_t total = 0, floor = 0;

	if (nr_ranges < 1 || nr_ranges > GUEST_MEM_REGIONS_MAX)
		return err_set(err, -EINVAL, "guest memory: %u regions", nr_ranges);
	for (unsigned int i = 0; i < nr_ranges; i++) {
		uint64_t base = ranges[i].base.v, size = ranges[i].size_bytes;

		if (size == 0 || size % PAGE_BYTES || base % PAGE_BYTES || base < floor ||
			__builtin_add_overflow(base, size, &floor) ||
			__builtin_add_overflow(total, size, &total) || total > INT64_MAX)
			return err_set(err, -EINVAL,
				"guest memory: bad region of %llu bytes at 0x%llx",
				(unsigned long long)size, (unsigned long long)base);
	}
	*ret_total_bytes = total;
	return 0;
}

int guest_mem_init(struct guest_mem *mem, const struct guest_mem_range *ranges,
	unsigned int nr_ranges, struct err *err)
{
	uint64_t total = 0, off = 0;
	int r;

	*mem = (struct guest_mem){.memfd = -1};
	r = check_ranges(ranges, nr_ranges, &total, err);
	if (r < 0)
		return r;
	mem->memfd = memfd_create("mayfly-guest-ram", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (mem->memfd < 0)
		return err_errno(err, -errno, "guest memory: memfd_create");
	if (ftruncate(mem->memfd, (off_t)total) < 0) {
		r = err_errno(err, -errno, "guest memory: %llu bytes", (unsigned long long)total);
		goto fail;
	}
	// A shrunken memfd would turn our accesses into SIGBUS.
	if (fcntl(mem->memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		r = err_errno(err, -errno, "guest memory: sealing the memfd");
		goto fail;
	}
	for (unsigned int i = 0; i < nr_ranges; i++) {
		struct guest_mem_region *region = &mem->regions[i];
		void *hva = mmap(NULL, ranges[i].size_bytes, PROT_READ | PROT_WRITE,
			MAP_SHARED | MAP_NORESERVE, mem->memfd, (off_t)off);

		if (hva == MAP_FAILED) {
			r = err_errno(err, -errno, "guest memory: mapping %llu bytes",
				(unsigned long long)ranges[i].size_bytes);
			goto fail;
		}
		// A core dump of the monitor must not hold the guest's secrets.
		madvise(hva, ranges[i].size_bytes, MADV_DONTDUMP);
		*region = (struct guest_mem_region){
			.base = ranges[i].base,
			.size_bytes = ranges[i].size_bytes,
			.memfd_off = off,
			.hva = hva,
		};
		mem->nr_regions = i + 1;
		off += ranges[i].size_bytes;
	}
	return 0;
fail:
	guest_mem_fini(mem);
	return r;
}

void guest_mem_fini(struct guest_mem *mem)
{
	guest_mem_track_stop(mem);
	for (unsigned int i = 0; i < mem->nr_regions; i++)
		munmap(mem->regions[i].hva, mem->regions[i].size_bytes);
	// In a zeroed object memfd is 0, which is not ours.
	if (mem->memfd > 0)
		fd_close(&mem->memfd);
	*mem = (struct guest_mem){.memfd = -1};
}

uint64_t guest_mem_size_bytes(const struct guest_mem *mem)
{
	uint64_t total = 0;

	for (unsigned int i = 0; i < mem->nr_regions; i++)
		total += mem->regions[i].size_bytes;
	return total;
}

int guest_mem_view(const struct guest_mem *mem, gpa_t gpa, size_t len, struct guest_view *ret_view)
{
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		const struct guest_mem_region *region = &mem->regions[i];
		uint64_t off = gpa.v - region->base.v;

		if (gpa.v < region->base.v || off >= region->size_bytes)
			continue;
		if (len == 0 || len > region->size_bytes - off)
			return -EFAULT;
		*ret_view = (struct guest_view){
			.hva = region->hva + off,
			.len_bytes = len,
			.region = region,
		};
		return 0;
	}
	return -EFAULT;
}

int guest_mem_read(const struct guest_mem *mem, gpa_t gpa, void *dst, size_t len)
{
	struct guest_view view;
	int r;

	if (len == 0)
		return 0;
	r = guest_mem_view(mem, gpa, len, &view);
	if (r < 0)
		return r;
	guest_view_read(&view, 0, dst, len);
	return 0;
}

int guest_mem_write(const struct guest_mem *mem, gpa_t gpa, const void *src, size_t len)
{
	struct guest_view view;
	int r;

	if (len == 0)
		return 0;
	r = guest_mem_view(mem, gpa, len, &view);
	if (r < 0)
		return r;
	guest_view_write(&view, 0, src, len);
	return 0;
}

int guest_mem_load_file(const struct guest_mem *mem, gpa_t gpa, int fd, off_t off, size_t len)
{
	struct guest_view view;
	ssize_t n;
	int r;

	if (len == 0)
		return 0;
	r = guest_mem_view(mem, gpa, len, &view);
	if (r < 0)
		return r;
	n = fd_pread_full(fd, view.hva, len, off);
	guest_view_mark_dirty(&view, 0, len);
	if (n < 0)
		return (int)n;
	return (size_t)n == len ? 0 : -ENODATA;
}

int guest_mem_place_file(const struct guest_mem *mem, gpa_t gpa, int fd, off_t off, size_t len)
{
	size_t mapped = ALIGN_DOWN(len, PAGE_BYTES);
	struct guest_view view;
	struct stat st;
	void *hva;

	if (mapped == 0 || gpa.v % PAGE_BYTES || off % (off_t)PAGE_BYTES)
		return guest_mem_load_file(mem, gpa, fd, off, len);
	if (guest_mem_view(mem, gpa, len, &view) < 0)
		return -EFAULT;
	// Beyond the end of the file there would be pages that nobody can touch.
	if (fstat(fd, &st) < 0)
		return -errno;
	if (off < 0 || st.st_size < off || (uint64_t)(st.st_size - off) < len)
		return -ENODATA;
	hva = mmap(view.hva, mapped, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, off);
	if (hva == MAP_FAILED)
		return guest_mem_load_file(mem, gpa, fd, off, len);
	madvise(hva, mapped, MADV_DONTDUMP);
	guest_view_mark_dirty(&view, 0, mapped);
	return guest_mem_load_file(mem, GPA(gpa.v + mapped), fd, off + (off_t)mapped, len - mapped);
}

void guest_view_mark_dirty(const struct guest_view *view, size_t off, size_t len)
{
	const struct guest_mem_region *region = view->region;
	uint64_t first, last;

	if (!region->dirty || len == 0)
		return;
	first = (uint64_t)(view->hva - region->hva + (ptrdiff_t)off) / PAGE_BYTES;
	last = (uint64_t)(view->hva - region->hva + (ptrdiff_t)(off + len - 1)) / PAGE_BYTES;
	for (uint64_t page = first; page <= last; page++)
		atomic_fetch_or_explicit(&region->dirty[page / BITS_PER_WORD],
			1ULL << page % BITS_PER_WORD, memory_order_relaxed);
}

void guest_mem_mark_iov_dirty(
	const struct guest_mem *mem, const struct iovec *iov, unsigned int nr, size_t len)
{
	for (unsigned int i = 0; i < nr && len; i++) {
		const uint8_t *hva = iov[i].iov_base;
		size_t part = MIN(iov[i].iov_len, len);

		for (unsigned int r = 0; r < mem->nr_regions; r++) {
			const struct guest_mem_region *region = &mem->regions[r];
			const struct guest_view view = {region->hva, region->size_bytes, region};

			if (hva >= region->hva && hva < region->hva + region->size_bytes)
				guest_view_mark_dirty(&view, (size_t)(hva - region->hva), part);
		}
		len -= part;
	}
}

int guest_mem_discard(const struct guest_mem *mem, gpa_t gpa, uint64_t len)
{
	struct guest_view view;
	uint64_t first, end;
	int r = guest_mem_view(mem, gpa, len, &view);

	if (r < 0)
		return r;
	first = ALIGN_UP(gpa.v, PAGE_BYTES) - view.region->base.v;
	end = ALIGN_DOWN(gpa.v + len, PAGE_BYTES) - view.region->base.v;
	if (first >= end)
		return 0;
	// The first is for what is not of the memfd but a private copy of a file's page.
	if (madvise(view.region->hva + first, end - first, MADV_DONTNEED) < 0 ||
		fallocate(mem->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			(off_t)(view.region->memfd_off + first), (off_t)(end - first)) < 0)
		return -errno;
	view = (struct guest_view){view.region->hva, view.region->size_bytes, view.region};
	guest_view_mark_dirty(&view, first, end - first);
	return 0;
}

int guest_mem_track_start(struct guest_mem *mem, struct err *err)
{
	guest_mem_track_stop(mem);
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		struct guest_mem_region *region = &mem->regions[i];

		region->dirty = calloc(dirty_words(region), sizeof(*region->dirty));
		if (!region->dirty) {
			guest_mem_track_stop(mem);
			return err_errno(err, -ENOMEM, "guest memory: dirty map");
		}
	}
	return 0;
}

void guest_mem_track_stop(struct guest_mem *mem)
{
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		free(mem->regions[i].dirty);
		mem->regions[i].dirty = NULL;
	}
}

void guest_mem_track_collect(struct guest_mem *mem, unsigned int region_idx, uint64_t *bitmap)
{
	struct guest_mem_region *region = &mem->regions[region_idx];

	ASSERT(region_idx < mem->nr_regions && region->dirty);
	for (size_t i = 0; i < dirty_words(region); i++)
		bitmap[i] |= atomic_exchange_explicit(&region->dirty[i], 0, memory_order_relaxed);
}
