// SPDX-License-Identifier: Apache-2.0
// The memory of a snapshot, with what it builds upon: each page is found in the newest layer that
// holds it, wherever that has it in its file, compressed or not. One thread at a time; processes
// that fork may go on with it, on each side.
#ifndef MAYFLY_SNAPSHOT_CHAIN_H
#define MAYFLY_SNAPSHOT_CHAIN_H

#include "snapshot/memory.h"

struct chain;

// Takes over nr layers, layers[0] full and each of the others a child of the one before, for
// ram_bytes of RAM; on failure they stay the caller's. -EBADMSG or -EINVAL if they do not fit.
int chain_create(struct chain **ret_chain, struct memory_layer *layers, unsigned int nr,
	uint64_t ram_bytes, struct err *err);

// Accepts NULL.
void chain_destroy(struct chain *chain);

bool chain_compressed(const struct chain *chain); // any of its layers

// The files that it reads, of which there are *ret_nr.
void chain_fds(const struct chain *chain, int ret_fds[MEMORY_LAYERS_MAX], unsigned int *ret_nr);

// Reads the pages of a frame to buf, MEMORY_FRAME_PAGES of them but for the last frame of RAM.
// *ret_there: a bit a page, those that some layer holds; the others are zeros, and their part of
// buf is left as it was. -EBADMSG if a file is not as it was written, as far as reading it shows.
int chain_fetch(
	struct chain *chain, uint64_t frame, uint8_t *buf, uint32_t *ret_there, struct err *err);

// Reads all that one layer holds and compares. -EBADMSG if anything is not as it was written.
int chain_verify_layer(const struct memory_layer *layer, struct err *err);

// Maps it: pages are read when the guest touches them, and shared with others until it writes.
// -ENOTSUP if anything is compressed. Before the vCPUs start.
int chain_map(struct chain *chain, struct guest_mem *mem, struct err *err);

// Reads all of it into RAM that nobody has touched.
int chain_read(struct chain *chain, struct guest_mem *mem, struct err *err);

// For guest_mem_touched(): where RAM that nobody has touched is not zeros.
void chain_set_backed(const struct chain *chain, struct guest_mem *mem);

// Of pages (a bit a page of RAM), those that are absent of mem are read into it. present: a bit a
// page. Only for who has a copy of mem that nobody else sees.
int chain_fill(struct chain *chain, struct guest_mem *mem, const uint64_t *pages,
	const uint64_t *present, struct err *err);

// Clears in pages those which mem has as the chain has them.
int chain_drop_same(
	struct chain *chain, const struct guest_mem *mem, uint64_t *pages, struct err *err);

#endif
