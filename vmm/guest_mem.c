// SPDX-License-Identifier: Apache-2.0
// Guest RAM in private mappings. Any thread; see the header.
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

	*mem = (struct guest_mem){.pagemap_fd = -1};
	r = check_ranges(ranges, nr_ranges, &total, err);
	if (r < 0)
		return r;
	for (unsigned int i = 0; i < nr_ranges; i++) {
		struct guest_mem_region *region = &mem->regions[i];
		void *hva = mmap(NULL, ranges[i].size_bytes, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (hva == MAP_FAILED) {
			r = err_errno(err, -errno, "guest memory: mapping %llu bytes",
				(unsigned long long)ranges[i].size_bytes);
			guest_mem_fini(mem);
			return r;
		}
		// A core dump of the monitor must not hold the guest's secrets.
		madvise(hva, ranges[i].size_bytes, MADV_DONTDUMP);
		*region = (struct guest_mem_region){
			.base = ranges[i].base,
			.size_bytes = ranges[i].size_bytes,
			.ram_off = off,
			.hva = hva,
		};
		mem->nr_regions = i + 1;
		off += ranges[i].size_bytes;
	}
	mem->backed = calloc(guest_mem_bitmap_words(mem), sizeof(*mem->backed));
	if (!mem->backed) {
		guest_mem_fini(mem);
		return err_errno(err, -ENOMEM, "guest memory: map of files");
	}
	// While it can be: a process that is confined later has no /proc.
	mem->pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	return 0;
}

void guest_mem_fini(struct guest_mem *mem)
{
	guest_mem_track_stop(mem);
	for (unsigned int i = 0; i < mem->nr_regions; i++)
		munmap(mem->regions[i].hva, mem->regions[i].size_bytes);
	free(mem->backed);
	if (mem->nr_regions > 0) // in a zeroed object the fd is 0, which is not ours
		fd_close(&mem->pagemap_fd);
	*mem = (struct guest_mem){.pagemap_fd = -1};
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

int guest_mem_place_file(struct guest_mem *mem, gpa_t gpa, int fd, off_t off, size_t len)
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
	guest_mem_set_backed(
		mem, view.region->ram_off + (uint64_t)(view.hva - view.region->hva), mapped);
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
	if (madvise(view.region->hva + first, end - first, MADV_DONTNEED) < 0)
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

// Bits of a region's last word beyond its end are zero, so this stays within the map.
static void add_word(uint64_t *bitmap, uint64_t at, uint64_t word)
{
	unsigned int shift = (unsigned int)(at % BITS_PER_WORD);

	if (!word)
		return;
	bitmap[at / BITS_PER_WORD] |= word << shift;
	if (shift && word >> (BITS_PER_WORD - shift))
		bitmap[at / BITS_PER_WORD + 1] |= word >> (BITS_PER_WORD - shift);
}

void guest_mem_bitmap_add(const struct guest_mem *mem, unsigned int region_idx,
	const uint64_t *region_bitmap, uint64_t *bitmap)
{
	const struct guest_mem_region *region = &mem->regions[region_idx];

	for (size_t i = 0; i < dirty_words(region); i++)
		add_word(
			bitmap, region->ram_off / PAGE_BYTES + i * BITS_PER_WORD, region_bitmap[i]);
}

void guest_mem_track_collect(struct guest_mem *mem, uint64_t *bitmap)
{
	for (unsigned int r = 0; r < mem->nr_regions; r++) {
		struct guest_mem_region *region = &mem->regions[r];

		ASSERT(region->dirty);
		for (size_t i = 0; i < dirty_words(region); i++)
			add_word(bitmap, region->ram_off / PAGE_BYTES + i * BITS_PER_WORD,
				atomic_exchange_explicit(
					&region->dirty[i], 0, memory_order_relaxed));
	}
}

// --- The regions counted through as one ------------------------------------------------------

size_t guest_mem_bitmap_words(const struct guest_mem *mem)
{
	return (size_t)((guest_mem_size_bytes(mem) / PAGE_BYTES + BITS_PER_WORD - 1) /
			BITS_PER_WORD);
}

void guest_mem_set_backed(struct guest_mem *mem, uint64_t ram_off, uint64_t len)
{
	for (uint64_t page = ram_off / PAGE_BYTES; page < (ram_off + len) / PAGE_BYTES; page++)
		mem->backed[page / BITS_PER_WORD] |= 1ULL << page % BITS_PER_WORD;
}

uint8_t *guest_mem_at(const struct guest_mem *mem, uint64_t ram_off)
{
	const struct guest_mem_region *region = &mem->regions[0];

	ASSERT(ram_off < guest_mem_size_bytes(mem));
	while (ram_off - region->ram_off >= region->size_bytes)
		region++;
	return region->hva + (ram_off - region->ram_off);
}

int guest_mem_map_file(struct guest_mem *mem, uint64_t ram_off, uint64_t len, int fd, uint64_t off,
	struct err *err)
{
	ASSERT(ram_off % PAGE_BYTES == 0 && len % PAGE_BYTES == 0 && off % PAGE_BYTES == 0);
	ASSERT(ram_off <= guest_mem_size_bytes(mem) && len <= guest_mem_size_bytes(mem) - ram_off);
	while (len > 0) {
		const struct guest_mem_region *region = &mem->regions[0];
		uint64_t part;
		void *hva;

		while (ram_off - region->ram_off >= region->size_bytes)
			region++;
		part = MIN(len, region->size_bytes - (ram_off - region->ram_off));
		hva = mmap(region->hva + (ram_off - region->ram_off), part, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, (off_t)off);
		if (hva == MAP_FAILED)
			return err_errno(err, -errno, "guest memory: mapping a file");
		madvise(hva, part, MADV_DONTDUMP);
		ram_off += part;
		off += part;
		len -= part;
	}
	return 0;
}

// Documentation/admin-guide/mm/pagemap.rst.
#define PAGEMAP_PRESENT (1ULL << 63)
#define PAGEMAP_SWAP    (1ULL << 62)
#define PAGEMAP_FILE    (1ULL << 61) // of a file, or shared and anonymous

static int region_touched(const struct guest_mem_region *region, int pagemap, bool changed_only,
	uint64_t *bitmap, struct err *err)
{
	uint64_t entries[512], pages = region->size_bytes / PAGE_BYTES;

	for (uint64_t page = 0; page < pages; page += ARRAY_SIZE(entries)) {
		size_t nr = (size_t)MIN(pages - page, (uint64_t)ARRAY_SIZE(entries));
		off_t at =
			(off_t)(((uintptr_t)region->hva / PAGE_BYTES + page) * sizeof(entries[0]));
		ssize_t n = fd_pread_full(pagemap, entries, nr * sizeof(entries[0]), at);

		if (n != (ssize_t)(nr * sizeof(entries[0])))
			return err_errno(err, n < 0 ? (int)n : -EIO, "/proc/self/pagemap");
		for (size_t i = 0; i < nr; i++) {
			uint64_t bit = region->ram_off / PAGE_BYTES + page + i;
			bool there = entries[i] & (PAGEMAP_PRESENT | PAGEMAP_SWAP);

			if (there && !(changed_only && (entries[i] & PAGEMAP_FILE)))
				bitmap[bit / BITS_PER_WORD] |= 1ULL << bit % BITS_PER_WORD;
		}
	}
	return 0;
}

int guest_mem_touched(
	const struct guest_mem *mem, bool changed_only, uint64_t *bitmap, struct err *err)
{
	int r = 0;

	if (mem->pagemap_fd < 0)
		return err_errno(err, -ENOENT, "/proc/self/pagemap");
	for (unsigned int i = 0; i < mem->nr_regions && r == 0; i++)
		r = region_touched(&mem->regions[i], mem->pagemap_fd, changed_only, bitmap, err);
	for (size_t i = 0; i < guest_mem_bitmap_words(mem) && r == 0 && !changed_only; i++)
		bitmap[i] |= mem->backed[i];
	return r;
}
