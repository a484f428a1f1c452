// SPDX-License-Identifier: Apache-2.0
// The file "memory" of a snapshot: guest RAM, counted through, at its own offsets, so that it can
// be mapped as it is. A snapshot with a parent holds some of the pages; the others are the
// parent's. Pages of zeros are holes. What is held, and checksums, are in the section "memory" of
// the state file (the index); a trailer behind the last page binds both. See
// docs/snapshot-format.md.
//
// Any thread; memory_write() usually in a forked child, with the guest's memory of that instant.
#ifndef MAYFLY_SNAPSHOT_MEMORY_H
#define MAYFLY_SNAPSHOT_MEMORY_H

#include "snapshot/image.h"
#include "vmm/guest_mem.h"

#define MEMORY_FILE_NAME  "memory"
#define MEMORY_SECTION    "memory" // of the state file
#define MEMORY_LAYERS_MAX 64U

struct memory_stats {
	uint64_t held_pages; // by this snapshot; all if it has no parent
	uint64_t written_pages; // of them, those that are not zeros
};

// Writes to fd, an empty file. pages: a bit a page of RAM; of a snapshot with a parent what changed
// since that, of another what may be other than zeros. The index is appended to ret_index. The
// caller syncs. Errno of the system calls.
int memory_write(int fd, const struct guest_mem *mem, const uint64_t *pages,
	const struct snapshot_id *id, const struct snapshot_id *parent, struct buf *ret_index,
	struct memory_stats *ret_stats, struct err *err);

struct memory_layer {
	int fd; // owned
	bool full; // no parent
	uint64_t ram_bytes;
	// A bit a page; owned. The others are the parent's or, without one, zeros.
	uint64_t *held;
	uint64_t *checksums; // a chunk each; owned
};

// Opens the memory that belongs to a state file, in the folder dir_fd. -EBADMSG for what is damaged
// or does not belong together.
int memory_open(
	struct memory_layer *ret_layer, int dir_fd, const struct image *image, struct err *err);

// Accepts a zeroed layer.
void memory_close(struct memory_layer *layer);

// Reads all that is held and compares. -EBADMSG if anything is not as it was written.
int memory_verify(const struct memory_layer *layer, struct err *err);

// Maps layers[0], which is full, and over it what the others hold, each a child of the one before,
// copy on write: pages are read when the guest touches them. Before the vCPUs start.
int memory_map(
	struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr, struct err *err);

// The same, read into RAM at once. RAM is untouched before.
int memory_read(
	struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr, struct err *err);

#endif
