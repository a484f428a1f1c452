// SPDX-License-Identifier: Apache-2.0
// Pages out of layers; see the header. One thread at a time.
#include "snapshot/chain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>
#include <zstd.h>

#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

struct chain {
	struct memory_layer layers[MEMORY_LAYERS_MAX]; // the base first
	unsigned int nr_layers;
	uint64_t ram_bytes;
	// Where frames of compressed layers are read and taken apart; NULL without such.
	ZSTD_DCtx *zstd;
	uint8_t *in, *out;
};

static bool compressed(const struct memory_layer *layers, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++)
		if (layers[i].frame_ends)
			return true;
	return false;
}

static void free_buffers(struct chain *chain)
{
	ZSTD_freeDCtx(chain->zstd);
	free(chain->in);
	free(chain->out);
}

static int make_buffers(struct chain *chain, struct err *err)
{
	if (!compressed(chain->layers, chain->nr_layers))
		return 0;
	chain->zstd = ZSTD_createDCtx();
	chain->in = malloc(ZSTD_COMPRESSBOUND(MEMORY_FRAME_BYTES));
	chain->out = malloc(MEMORY_FRAME_BYTES);
	if (chain->zstd && chain->in && chain->out)
		return 0;
	free_buffers(chain);
	return err_errno(err, -ENOMEM, "the snapshot's memory");
}

int chain_create(struct chain **ret_chain, struct memory_layer *layers, unsigned int nr,
	uint64_t ram_bytes, struct err *err)
{
	struct chain *chain;
	int r = memory_check_chain(layers, nr, ram_bytes, err);

	if (r < 0)
		return r;
	chain = calloc(1, sizeof(*chain));
	if (!chain)
		return err_errno(err, -ENOMEM, "the snapshot's memory");
	memcpy(chain->layers, layers, nr * sizeof(*layers));
	chain->nr_layers = nr;
	chain->ram_bytes = ram_bytes;
	r = make_buffers(chain, err);
	if (r < 0) {
		free(chain);
		return r;
	}
	for (unsigned int i = 0; i < nr; i++)
		layers[i] = (struct memory_layer){.fd = -1};
	*ret_chain = chain;
	return 0;
}

void chain_destroy(struct chain *chain)
{
	if (!chain)
		return;
	for (unsigned int i = 0; i < chain->nr_layers; i++)
		memory_close(&chain->layers[i]);
	free_buffers(chain);
	free(chain);
}

bool chain_compressed(const struct chain *chain)
{
	return compressed(chain->layers, chain->nr_layers);
}

void chain_fds(const struct chain *chain, int ret_fds[MEMORY_LAYERS_MAX], unsigned int *ret_nr)
{
	for (unsigned int i = 0; i < chain->nr_layers; i++)
		ret_fds[i] = chain->layers[i].fd;
	*ret_nr = chain->nr_layers;
}

// --- A frame ---------------------------------------------------------------------------------

static int cut_short(ssize_t n, struct err *err)
{
	return err_errno(err, n < 0 ? (int)n : -EBADMSG, MEMORY_FILE_NAME);
}

// The pages of wanted, all held by the layer, to their places in buf.
static int fetch_plain(const struct memory_layer *layer, uint64_t frame, uint32_t wanted,
	uint8_t *buf, struct err *err)
{
	while (wanted) {
		unsigned int first = (unsigned int)__builtin_ctz(wanted);
		unsigned int nr = (unsigned int)__builtin_ctz(~(wanted >> first));
		size_t len = nr * PAGE_BYTES, at = first * PAGE_BYTES;
		ssize_t n = fd_pread_full(
			layer->fd, buf + at, len, (off_t)(frame * MEMORY_FRAME_BYTES + at));

		if (n != (ssize_t)len)
			return cut_short(n, err);
		wanted &= ~(((1U << nr) - 1) << first);
	}
	return 0;
}

static int fetch_compressed(struct chain *chain, const struct memory_layer *layer, uint64_t frame,
	uint32_t wanted, uint8_t *buf, struct err *err)
{
	uint64_t start = frame ? layer->frame_ends[frame - 1] : 0;
	size_t len = layer->frame_ends[frame] - start, got;
	uint32_t held = memory_held(layer, frame);
	ssize_t n = fd_pread_full(layer->fd, chain->in, len, (off_t)start);
	unsigned int rank = 0;

	if (n != (ssize_t)len)
		return cut_short(n, err);
	got = ZSTD_decompressDCtx(chain->zstd, chain->out, MEMORY_FRAME_BYTES, chain->in, len);
	if (ZSTD_isError(got) || got != (size_t)__builtin_popcount(held) * PAGE_BYTES)
		return err_set(err, -EBADMSG,
			"damaged: '" MEMORY_FILE_NAME "' is not as it was written, at %llu KiB of "
			"the guest's memory",
			(unsigned long long)(frame * MEMORY_FRAME_BYTES / KIB));
	for (unsigned int i = 0; i < MEMORY_FRAME_PAGES; i++) {
		if (!(held >> i & 1))
			continue;
		if (wanted >> i & 1)
			memcpy(buf + i * PAGE_BYTES, chain->out + rank * PAGE_BYTES, PAGE_BYTES);
		rank++;
	}
	return 0;
}

static int fetch_from(struct chain *chain, const struct memory_layer *layer, uint64_t frame,
	uint32_t wanted, uint8_t *buf, struct err *err)
{
	return layer->frame_ends ? fetch_compressed(chain, layer, frame, wanted, buf, err)
				 : fetch_plain(layer, frame, wanted, buf, err);
}

int chain_fetch(
	struct chain *chain, uint64_t frame, uint8_t *buf, uint32_t *ret_there, struct err *err)
{
	uint32_t there = 0;

	ASSERT(frame < memory_frames(chain->ram_bytes));
	for (unsigned int i = chain->nr_layers; i-- > 0;) {
		uint32_t wanted = memory_held(&chain->layers[i], frame) & ~there;
		int r = wanted ? fetch_from(chain, &chain->layers[i], frame, wanted, buf, err) : 0;

		if (r < 0)
			return r;
		there |= wanted;
	}
	*ret_there = there;
	return 0;
}

// --- Verifying -------------------------------------------------------------------------------

static int verify_chunk(
	struct chain *one, const struct memory_layer *layer, uint64_t chunk, struct err *err)
{
	uint64_t per_chunk = MEMORY_CHUNK_PAGES / MEMORY_FRAME_PAGES;
	uint64_t end = MIN((chunk + 1) * per_chunk, memory_frames(layer->ram_bytes));
	uint8_t buf[MEMORY_FRAME_BYTES], number[8];
	XXH3_state_t state;

	XXH3_64bits_reset(&state);
	for (uint64_t frame = chunk * per_chunk; frame < end; frame++) {
		uint32_t held = memory_held(layer, frame);
		int r = held ? fetch_from(one, layer, frame, held, buf, err) : 0;

		if (r < 0)
			return r;
		for (unsigned int i = 0; i < MEMORY_FRAME_PAGES; i++) {
			const uint8_t *page = buf + i * PAGE_BYTES;

			if (!(held >> i & 1) || memory_is_zero(page))
				continue;
			put_le64(number, frame * MEMORY_FRAME_PAGES + i);
			XXH3_64bits_update(&state, number, sizeof(number));
			XXH3_64bits_update(&state, page, PAGE_BYTES);
		}
	}
	if (XXH3_64bits_digest(&state) == layer->checksums[chunk])
		return 0;
	return err_set(err, -EBADMSG,
		"damaged: '" MEMORY_FILE_NAME "' is not as it was written, between %llu and %llu "
		"MiB",
		(unsigned long long)(chunk * MEMORY_CHUNK_PAGES * PAGE_BYTES / MIB),
		(unsigned long long)((chunk + 1) * MEMORY_CHUNK_PAGES * PAGE_BYTES / MIB));
}

// What is not held is a hole: a full one is mapped as it is, holes and all.
static int verify_holes(const struct memory_layer *layer, struct err *err)
{
	uint64_t nr_pages = layer->ram_bytes / PAGE_BYTES, page = 0;
	uint8_t bytes[PAGE_BYTES];

	while ((page = memory_next_page(layer->held, false, page, nr_pages)) < nr_pages) {
		off_t data = lseek(layer->fd, (off_t)(page * PAGE_BYTES), SEEK_DATA);
		ssize_t n;

		if (data < 0)
			return errno == ENXIO ? 0 : err_errno(err, -errno, MEMORY_FILE_NAME);
		// Others may come between, which are held.
		if ((uint64_t)data / PAGE_BYTES > page) {
			page = (uint64_t)data / PAGE_BYTES;
			continue;
		}
		n = fd_pread_full(layer->fd, bytes, sizeof(bytes), (off_t)(page * PAGE_BYTES));
		if (n != (ssize_t)sizeof(bytes))
			return cut_short(n, err);
		if (!memory_is_zero(bytes))
			return err_set(err, -EBADMSG,
				"damaged: '" MEMORY_FILE_NAME "' has something in a hole, at %llu "
				"KiB",
				(unsigned long long)(page * PAGE_BYTES / KIB));
		page++;
	}
	return 0;
}

int chain_verify_layer(const struct memory_layer *layer, struct err *err)
{
	uint64_t nr_pages = layer->ram_bytes / PAGE_BYTES;
	struct chain one = {.nr_layers = 1, .ram_bytes = layer->ram_bytes};
	int r;

	one.layers[0] = *layer; // borrowed
	r = make_buffers(&one, err);
	for (uint64_t chunk = 0; chunk * MEMORY_CHUNK_PAGES < nr_pages && r == 0; chunk++)
		r = verify_chunk(&one, layer, chunk, err);
	free_buffers(&one);
	return r == 0 && !layer->frame_ends ? verify_holes(layer, err) : r;
}

// --- Into RAM --------------------------------------------------------------------------------

int chain_map(struct chain *chain, struct guest_mem *mem, struct err *err)
{
	return memory_map(mem, chain->layers, chain->nr_layers, err);
}

void chain_set_backed(const struct chain *chain, struct guest_mem *mem)
{
	memory_set_backed(mem, chain->layers, chain->nr_layers);
}

// A bit a page of the frame.
static uint32_t bits_of(const uint64_t *map, uint64_t frame)
{
	uint64_t page = frame * MEMORY_FRAME_PAGES;

	return (uint32_t)(map[page / 64] >> page % 64) & ((1U << MEMORY_FRAME_PAGES) - 1);
}

// Calls for each page of wanted (NULL: all) that the chain has, or with others also for those that
// it has not (bytes NULL).
static int each_page(struct chain *chain, const uint64_t *wanted, bool others,
	void (*page)(void *opaque, uint64_t page, const uint8_t *bytes), void *opaque,
	struct err *err)
{
	uint64_t nr = memory_frames(chain->ram_bytes);
	uint8_t buf[MEMORY_FRAME_BYTES];

	for (uint64_t frame = 0; frame < nr; frame++) {
		uint32_t want = wanted ? bits_of(wanted, frame) : ~0U, there;
		int r;

		if (!want)
			continue;
		r = chain_fetch(chain, frame, buf, &there, err);
		if (r < 0)
			return r;
		if (!others)
			want &= there;
		for (unsigned int i = 0; i < MEMORY_FRAME_PAGES; i++)
			if (want >> i & 1)
				page(opaque, frame * MEMORY_FRAME_PAGES + i,
					there >> i & 1 ? buf + i * PAGE_BYTES : NULL);
	}
	return 0;
}

static void store_page(void *opaque, uint64_t page, const uint8_t *bytes)
{
	memcpy(guest_mem_at(opaque, page * PAGE_BYTES), bytes, PAGE_BYTES);
}

int chain_read(struct chain *chain, struct guest_mem *mem, struct err *err)
{
	return each_page(chain, NULL, false, store_page, mem, err);
}

int chain_fill(struct chain *chain, struct guest_mem *mem, const uint64_t *pages,
	const uint64_t *present, struct err *err)
{
	size_t words = guest_mem_bitmap_words(mem);
	uint64_t *absent = calloc(words, sizeof(*absent));
	int r;

	if (!absent)
		return err_errno(err, -ENOMEM, "the snapshot's memory");
	for (size_t i = 0; i < words; i++)
		absent[i] = pages[i] & ~present[i];
	r = each_page(chain, absent, false, store_page, mem, err);
	free(absent);
	return r;
}

struct drop {
	const struct guest_mem *mem;
	uint64_t *pages;
};

static void drop_same(void *opaque, uint64_t page, const uint8_t *bytes)
{
	const struct drop *drop = opaque;
	const uint8_t *now = guest_mem_at(drop->mem, page * PAGE_BYTES);

	if (bytes ? memcmp(now, bytes, PAGE_BYTES) == 0 : memory_is_zero(now))
		drop->pages[page / 64] &= ~(1ULL << page % 64);
}

int chain_drop_same(
	struct chain *chain, const struct guest_mem *mem, uint64_t *pages, struct err *err)
{
	struct drop drop = {mem, pages};

	ASSERT(pages);
	return each_page(chain, pages, true, drop_same, &drop, err);
}
