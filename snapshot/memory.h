// SPDX-License-Identifier: Apache-2.0
// The file "memory" of a snapshot: guest RAM, counted through, at its own offsets, so that it can
// be mapped as it is; or compressed, in frames one behind the other. A snapshot with a parent holds
// some of the pages; the others are the parent's. Pages of zeros are holes. What is held, and
// checksums, are in the section "memory" of the state file (the index); a trailer at the end binds
// both. See docs/snapshot-format.md. Reading it: chain.h.
//
// Any thread; memory_write() usually in a forked child, with the guest's memory of that instant.
#ifndef MAYFLY_SNAPSHOT_MEMORY_H
#define MAYFLY_SNAPSHOT_MEMORY_H

#include "snapshot/image.h"
#include "vmm/guest_mem.h"

#define MEMORY_FILE_NAME  "memory"
#define MEMORY_SECTION    "memory" // of the state file
#define MEMORY_LAYERS_MAX 64U

#define MEMORY_CHUNK_PAGES 512ULL // that share a checksum
// That are compressed as one: a page that the guest waits for brings its neighbours along. Divides
// a word of a bit map, and a chunk.
#define MEMORY_FRAME_PAGES 16ULL
#define MEMORY_FRAME_BYTES (MEMORY_FRAME_PAGES * PAGE_BYTES)

struct memory_stats {
	uint64_t held_pages; // by this snapshot; all if it has no parent
	uint64_t written_pages; // of them, those that are not zeros
	uint64_t written_bytes; // what they take in the file
};

struct memory_save {
	int fd; // an empty file
	const struct guest_mem *mem;
	// A bit a page of RAM: of a snapshot with a parent what changed since that, of another what
	// may be other than zeros.
	const uint64_t *pages;
	const struct snapshot_id *id, *parent;
	bool compress;
};

// Appends the index to ret_index. The caller syncs. Errno of the system calls.
int memory_write(const struct memory_save *save, struct buf *ret_index,
	struct memory_stats *ret_stats, struct err *err);

// Of a file whose pages have been put in their places by another, RAM and a page long: appends the
// index, writes the trailer, and makes holes of pages of zeros. No parent. The caller syncs.
int memory_index(int fd, const struct snapshot_id *id, struct buf *ret_index,
	struct memory_stats *ret_stats, struct err *err);

struct memory_layer {
	int fd; // owned
	bool full; // no parent
	uint64_t ram_bytes;
	// A bit a page; owned. The others are the parent's or, without one, zeros.
	uint64_t *held;
	uint64_t *checksums; // a chunk each; owned
	uint64_t *frame_ends; // where each frame ends in the file; owned; NULL: not compressed
};

static inline uint64_t memory_frames(uint64_t ram_bytes)
{
	return (ram_bytes + MEMORY_FRAME_BYTES - 1) / MEMORY_FRAME_BYTES;
}

// A bit a page of the frame: those that the layer holds.
static inline uint32_t memory_held(const struct memory_layer *layer, uint64_t frame)
{
	uint64_t page = frame * MEMORY_FRAME_PAGES;

	return (uint32_t)(layer->held[page / 64] >> page % 64) & ((1U << MEMORY_FRAME_PAGES) - 1);
}

// Opens the memory that belongs to a state file, in the folder dir_fd. -EBADMSG for what is damaged
// or does not belong together.
int memory_open(
	struct memory_layer *ret_layer, int dir_fd, const struct image *image, struct err *err);

// Accepts a zeroed layer.
void memory_close(struct memory_layer *layer);

// -EBADMSG unless layers[0] is full and the others are not; -EINVAL if RAM is of another size.
int memory_check_chain(
	const struct memory_layer *layers, unsigned int nr, uint64_t ram_bytes, struct err *err);

// Maps layers[0], which is full, and over it what the others hold, each a child of the one before,
// copy on write: pages are read when the guest touches them. Before the vCPUs start. -ENOTSUP if
// any of them is compressed.
int memory_map(
	struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr, struct err *err);

// Tells where RAM that nobody has touched is not zeros.
void memory_set_backed(struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr);

// --- For chain.c -----------------------------------------------------------------------------

// The next page from page on whose bit is set (or not), or nr_pages.
uint64_t memory_next_page(const uint64_t *map, bool set, uint64_t page, uint64_t nr_pages);
bool memory_is_zero(const uint8_t *page);

#endif
