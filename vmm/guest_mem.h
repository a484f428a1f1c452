// SPDX-License-Identifier: Apache-2.0
// The guest's RAM: private pages of this process, in at most GUEST_MEM_REGIONS_MAX regions.
// Private, so that what lies beneath may be a file which the guest shares with others until it
// writes (its kernel, a snapshot), and so that fork() gives a copy of the whole at one instant.
//
// Whatever the guest supplies as an address goes through these accessors. Each checks that the
// whole range lies in one region and marks what it writes in the dirty map. The guest runs while
// we read: copy a structure once, validate the copy, use the copy.
//
// The mapping is made before the vCPUs start and does not change until they have stopped, so any
// thread may use the accessors. They may block for as long as a page takes to be populated.
#ifndef MAYFLY_GUEST_MEM_H
#define MAYFLY_GUEST_MEM_H

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "vmm/base/bytes.h"
#include "vmm/base/err.h"

#define GUEST_MEM_REGIONS_MAX 2

struct guest_mem_region {
	gpa_t base;
	uint64_t size_bytes;
	uint64_t ram_off; // of its first byte, when the regions are counted through as one
	uint8_t *hva;
	_Atomic uint64_t *dirty; // a bit a page, NULL while nothing tracks
};

struct guest_mem {
	unsigned int nr_regions;
	struct guest_mem_region regions[GUEST_MEM_REGIONS_MAX]; // ascending, disjoint
	// A bit a page of all RAM (guest_mem_bitmap_words()): where a file lies beneath, so that a
	// page that nobody has touched may not be zeros.
	uint64_t *backed;
	int pagemap_fd; // /proc/self/pagemap, of the process that made this; -1 if there is no
			// /proc
};

struct guest_mem_range {
	gpa_t base;
	uint64_t size_bytes; // a positive multiple of the page size
};

// Makes zeroed RAM in the given ascending, disjoint ranges. Owns what it makes until fini.
// -EINVAL for bad ranges, -ENOMEM when the address space or memory is not to be had.
int guest_mem_init(struct guest_mem *mem, const struct guest_mem_range *ranges,
	unsigned int nr_ranges, struct err *err);

// Accepts a zeroed or half-made object.
void guest_mem_fini(struct guest_mem *mem);

uint64_t guest_mem_size_bytes(const struct guest_mem *mem);

// Copies len bytes. -EFAULT if any byte of the range is outside of RAM; then nothing is copied.
int guest_mem_read(const struct guest_mem *mem, gpa_t gpa, void *dst, size_t len);
int guest_mem_write(const struct guest_mem *mem, gpa_t gpa, const void *src, size_t len);

// Reads len bytes at off of a file straight into RAM. -EFAULT as above, -ENODATA if the file ends
// early, or the errno of pread().
int guest_mem_load_file(const struct guest_mem *mem, gpa_t gpa, int fd, off_t off, size_t len);

// As guest_mem_load_file(), but whole pages are mapped from the file, copy on write, where both
// addresses are aligned and the file system can: nothing is copied, and what guests do not change
// is in the host's memory once. The file must not shrink or change while the guest runs; a reader
// of what is gone gets SIGBUS. Before the vCPUs start.
int guest_mem_place_file(struct guest_mem *mem, gpa_t gpa, int fd, off_t off, size_t len);

// Maps [off, off + len) of a file, copy on write, as the RAM from ram_off on; all are multiples of
// the page size and the range lies in RAM, which is asserted. The file is trusted to be that long,
// and not to shrink or change. The caller tells by guest_mem_set_backed() where it is not zeros.
// Before the vCPUs start. Errno of mmap().
int guest_mem_map_file(struct guest_mem *mem, uint64_t ram_off, uint64_t len, int fd, uint64_t off,
	struct err *err);

void guest_mem_set_backed(struct guest_mem *mem, uint64_t ram_off, uint64_t len);

// A bit a page of all RAM, counted through (bit 0 of word 0: the page at ram_off 0): set where the
// page may differ from zeros, or with changed_only from the file that lies beneath (pages that are
// ours alone, from the first write on). bitmap holds guest_mem_bitmap_words() zeroed words.
// Reads the pagemap of the process that made mem: not for its children.
int guest_mem_touched(
	const struct guest_mem *mem, bool changed_only, uint64_t *bitmap, struct err *err);
size_t guest_mem_bitmap_words(const struct guest_mem *mem);

// The address of a page of RAM, counted through; ram_off is asserted to be in it.
uint8_t *guest_mem_at(const struct guest_mem *mem, uint64_t ram_off);

// A checked range, for repeated access to a ring or as the target of I/O. Valid until fini.
struct guest_view {
	uint8_t *hva;
	size_t len_bytes;
	const struct guest_mem_region *region;
};

// -EFAULT if any byte of the range is outside of RAM, and for len 0.
int guest_mem_view(const struct guest_mem *mem, gpa_t gpa, size_t len, struct guest_view *ret_view);

// To be called after I/O has written to [off, off + len) of a view by other means than the
// accessors below.
void guest_view_mark_dirty(const struct guest_view *view, size_t off, size_t len);

// Bounds are asserted: offsets into a view come from our own checked arithmetic.
static inline void guest_view_read(const struct guest_view *view, size_t off, void *dst, size_t len)
{
	ASSERT(off <= view->len_bytes && len <= view->len_bytes - off);
	memcpy(dst, view->hva + off, len);
}

static inline void guest_view_write(
	const struct guest_view *view, size_t off, const void *src, size_t len)
{
	ASSERT(off <= view->len_bytes && len <= view->len_bytes - off);
	memcpy(view->hva + off, src, len);
	guest_view_mark_dirty(view, off, len);
}

// The same for I/O that has filled the first len bytes of some buffers, which lie in RAM.
void guest_mem_mark_iov_dirty(
	const struct guest_mem *mem, const struct iovec *iov, unsigned int nr, size_t len);

// Single aligned accesses with acquire or release order, for ring indices. off must be even.
static inline uint16_t guest_view_load16(const struct guest_view *view, size_t off)
{
	ASSERT(off % 2 == 0 && off <= view->len_bytes && view->len_bytes - off >= 2);
	return le16toh(atomic_load_explicit(
		(_Atomic uint16_t *)(void *)(view->hva + off), memory_order_acquire));
}

static inline void guest_view_store16(const struct guest_view *view, size_t off, uint16_t val)
{
	ASSERT(off % 2 == 0 && off <= view->len_bytes && view->len_bytes - off >= 2);
	atomic_store_explicit(
		(_Atomic uint16_t *)(void *)(view->hva + off), htole16(val), memory_order_release);
	guest_view_mark_dirty(view, off, 2);
}

// Gives the whole pages of the range back to the host. They count as written, and what they hold
// from then on is not defined: zeros, or where a file was placed there, that. -EFAULT if any byte
// of the range is outside of RAM, or the errno of madvise(). May take a while for much memory.
int guest_mem_discard(const struct guest_mem *mem, gpa_t gpa, uint64_t len);

// Starts recording the monitor's own writes, from an empty map. -ENOMEM.
int guest_mem_track_start(struct guest_mem *mem, struct err *err);
void guest_mem_track_stop(struct guest_mem *mem);

// Adds the pages written since the last call to bitmap (a bit a page of all RAM as above, the
// caller's) and forgets them.
void guest_mem_track_collect(struct guest_mem *mem, uint64_t *bitmap);

// Adds what a bitmap of one region says, a bit a page of it, to one of all RAM.
void guest_mem_bitmap_add(const struct guest_mem *mem, unsigned int region_idx,
	const uint64_t *region_bitmap, uint64_t *bitmap);

#endif
