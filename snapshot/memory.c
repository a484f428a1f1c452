// SPDX-License-Identifier: Apache-2.0
// Guest RAM in a file; see the header. Any thread.
#include "snapshot/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>
#include <zstd.h>

#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define BITS_PER_WORD 64
#define ZSTD_LEVEL    1
#define RAM_BYTES_MAX (1024 * GIB)
// Fewer pages in a row are copied, not mapped: a mapping costs the kernel as much as some pages.
#define MAP_RUN_PAGES 16ULL
#define MAPPINGS_MAX  16384U

static const uint8_t trailer_magic[8] = {'m', 'a', 'y', 'f', 'l', 'y', 'M', 'M'};

#define INDEX_FULL       1U
#define INDEX_COMPRESSED 2U

struct index_header {
	le64_t ram_bytes;
	le32_t flags;
	le32_t chunk_pages;
};

struct trailer {
	uint8_t magic[8];
	uint8_t id[16];
	le64_t ram_bytes;
	le64_t index_checksum;
};

uint64_t memory_next_page(const uint64_t *map, bool set, uint64_t page, uint64_t nr_pages)
{
	while (page < nr_pages) {
		uint64_t word = map[page / BITS_PER_WORD];

		word = (set ? word : ~word) >> page % BITS_PER_WORD;
		if (word)
			return MIN(page + (uint64_t)__builtin_ctzll(word), nr_pages);
		page = ALIGN_DOWN(page, BITS_PER_WORD) + BITS_PER_WORD;
	}
	return nr_pages;
}

bool memory_is_zero(const uint8_t *page)
{
	for (size_t i = 0; i < PAGE_BYTES; i += 64) {
		uint64_t words[8], any = 0;

		memcpy(words, page + i, sizeof(words));
		for (size_t w = 0; w < ARRAY_SIZE(words); w++)
			any |= words[w];
		if (any)
			return false;
	}
	return true;
}

// A chunk's checksum is that of the pages in it that are not zeros, each after its number.
static void checksum_page(XXH3_state_t *state, uint64_t page, const uint8_t *bytes)
{
	uint8_t number[8];

	put_le64(number, page);
	XXH3_64bits_update(state, number, sizeof(number));
	XXH3_64bits_update(state, bytes, PAGE_BYTES);
}

static int write_at(int fd, const uint8_t *data, size_t len, uint64_t off)
{
	while (len > 0) {
		ssize_t n = pwrite(fd, data, len, (off_t)off);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		data += n;
		off += (uint64_t)n;
		len -= (size_t)n;
	}
	return 0;
}

// --- Writing ---------------------------------------------------------------------------------

// Writes the pages of one chunk, those in a row at once as far as they lie in one region. Adds
// those that are not zeros to written.
static int write_chunk(int fd, const struct guest_mem *mem, const uint64_t *pages, uint64_t first,
	uint64_t end, uint64_t *written, uint64_t *ret_checksum, struct memory_stats *stats)
{
	const uint8_t *run = NULL;
	uint64_t run_page = 0, run_len = 0;
	XXH3_state_t state;
	int r = 0;

	XXH3_64bits_reset(&state);
	for (uint64_t page = first; page < end && r == 0; page++) {
		const uint8_t *bytes;

		page = memory_next_page(pages, true, page, end);
		if (page == end)
			break;
		stats->held_pages++;
		bytes = guest_mem_at(mem, page * PAGE_BYTES);
		if (memory_is_zero(bytes))
			continue;
		stats->written_pages++;
		written[page / BITS_PER_WORD] |= 1ULL << page % BITS_PER_WORD;
		checksum_page(&state, page, bytes);
		if (run && run_page + run_len == page && run + run_len * PAGE_BYTES == bytes) {
			run_len++;
			continue;
		}
		if (run)
			r = write_at(fd, run, run_len * PAGE_BYTES, run_page * PAGE_BYTES);
		run = bytes;
		run_page = page;
		run_len = 1;
	}
	if (run && r == 0)
		r = write_at(fd, run, run_len * PAGE_BYTES, run_page * PAGE_BYTES);
	*ret_checksum = XXH3_64bits_digest(&state);
	return r;
}

struct frames {
	ZSTD_CCtx *zstd;
	uint8_t *pages, *out; // of a frame, before and after
	size_t out_bytes;
	uint64_t off; // of the next one in the file
	struct buf ends;
};

static void frames_fini(struct frames *frames)
{
	ZSTD_freeCCtx(frames->zstd);
	free(frames->pages);
	free(frames->out);
	buf_fini(&frames->ends);
}

static int frames_init(struct frames *frames)
{
	frames->out_bytes = ZSTD_compressBound(MEMORY_FRAME_BYTES);
	frames->zstd = ZSTD_createCCtx();
	frames->pages = malloc(MEMORY_FRAME_BYTES);
	frames->out = malloc(frames->out_bytes);
	if (!frames->zstd || !frames->pages || !frames->out)
		return -ENOMEM;
	// A checksum each, so that a damaged one is not run on.
	ZSTD_CCtx_setParameter(frames->zstd, ZSTD_c_compressionLevel, ZSTD_LEVEL);
	ZSTD_CCtx_setParameter(frames->zstd, ZSTD_c_checksumFlag, 1);
	return 0;
}

// As write_chunk(), one frame behind the other: the pages that are held, of a full one those that
// are not zeros.
static int write_frames(struct frames *frames, const struct memory_save *save, bool full,
	uint64_t first, uint64_t end, uint64_t *written, uint64_t *ret_checksum,
	struct memory_stats *stats)
{
	XXH3_state_t state;
	int r = 0;

	XXH3_64bits_reset(&state);
	for (uint64_t frame = first; frame < end && r == 0; frame += MEMORY_FRAME_PAGES) {
		uint64_t frame_end = MIN(frame + MEMORY_FRAME_PAGES, end), page = frame;
		size_t len = 0, out;
		uint8_t le[8];

		while ((page = memory_next_page(save->pages, true, page, frame_end)) < frame_end) {
			const uint8_t *bytes = guest_mem_at(save->mem, page * PAGE_BYTES);
			bool zero = memory_is_zero(bytes);

			stats->held_pages++;
			if (!zero) {
				stats->written_pages++;
				written[page / BITS_PER_WORD] |= 1ULL << page % BITS_PER_WORD;
				checksum_page(&state, page, bytes);
			}
			if (!zero || !full) {
				memcpy(frames->pages + len, bytes, PAGE_BYTES);
				len += PAGE_BYTES;
			}
			page++;
		}
		if (len > 0) {
			out = ZSTD_compress2(
				frames->zstd, frames->out, frames->out_bytes, frames->pages, len);
			r = ZSTD_isError(out) ? -ENOMEM
					      : write_at(save->fd, frames->out, out, frames->off);
			frames->off += r < 0 ? 0 : out;
		}
		put_le64(le, frames->off);
		buf_append(&frames->ends, le, sizeof(le));
	}
	*ret_checksum = XXH3_64bits_digest(&state);
	return r;
}

static int write_pages(const struct memory_save *save, bool full, struct frames *frames,
	struct buf *index, struct memory_stats *stats)
{
	uint64_t nr_pages = guest_mem_size_bytes(save->mem) / PAGE_BYTES;
	size_t words = guest_mem_bitmap_words(save->mem);
	CLEANUP_FREE uint64_t *written = calloc(words, sizeof(*written));
	int r = written ? 0 : -ENOMEM;

	for (uint64_t page = 0; page < nr_pages && r == 0; page += MEMORY_CHUNK_PAGES) {
		uint64_t checksum = 0, end = MIN(page + MEMORY_CHUNK_PAGES, nr_pages);
		uint8_t le[8];

		r = save->compress
			    ? write_frames(frames, save, full, page, end, written, &checksum, stats)
			    : write_chunk(save->fd, save->mem, save->pages, page, end, written,
				      &checksum, stats);
		put_le64(le, checksum);
		buf_append(index, le, sizeof(le));
	}
	for (size_t i = 0; i < words && r == 0; i++) {
		uint8_t le[8];

		put_le64(le, full ? written[i] : save->pages[i]);
		buf_append(index, le, sizeof(le));
	}
	buf_append(index, frames->ends.data, frames->ends.len);
	return r == 0 && (buf_error(&frames->ends) < 0 || buf_error(index) < 0) ? -ENOMEM : r;
}

// At off. The index is what ret_index has from index_start on.
static int write_trailer(int fd, const struct snapshot_id *id, uint64_t ram_bytes, uint64_t off,
	const struct buf *index, size_t index_start)
{
	struct trailer trailer = {
		.ram_bytes = le64_of(ram_bytes),
		.index_checksum = le64_of(
			image_checksum(index->data + index_start, index->len - index_start)),
	};
	uint8_t block[PAGE_BYTES] = {0};

	memcpy(trailer.magic, trailer_magic, sizeof(trailer_magic));
	memcpy(trailer.id, id->bytes, sizeof(trailer.id));
	memcpy(block, &trailer, sizeof(trailer));
	return write_at(fd, block, sizeof(block), off);
}

int memory_write(const struct memory_save *save, struct buf *ret_index,
	struct memory_stats *ret_stats, struct err *err)
{
	uint64_t ram_bytes = guest_mem_size_bytes(save->mem), end = ram_bytes;
	bool full = snapshot_id_none(save->parent);
	struct index_header header = {
		.ram_bytes = le64_of(ram_bytes),
		.flags = le32_of((full ? INDEX_FULL : 0) | (save->compress ? INDEX_COMPRESSED : 0)),
		.chunk_pages = le32_of(MEMORY_CHUNK_PAGES),
	};
	CLEANUP(frames_fini) struct frames frames = {0};
	struct memory_stats stats = {0};
	size_t index_start = ret_index->len;
	int r = 0;

	buf_append(ret_index, &header, sizeof(header));
	if (save->compress)
		r = frames_init(&frames);
	else if (ftruncate(save->fd, (off_t)(ram_bytes + PAGE_BYTES)) < 0)
		r = -errno;
	if (r == 0)
		r = write_pages(save, full, &frames, ret_index, &stats);
	if (r == 0) {
		if (save->compress)
			end = frames.off;
		r = write_trailer(save->fd, save->id, ram_bytes, end, ret_index, index_start);
	}
	if (r < 0)
		return err_errno(err, r, "the snapshot's memory");
	if (full)
		stats.held_pages = ram_bytes / PAGE_BYTES;
	stats.written_bytes = save->compress ? frames.off : stats.written_pages * PAGE_BYTES;
	*ret_stats = stats;
	return 0;
}

// --- An index for what another has written ---------------------------------------------------

// Where a run of zeros is in the file, there is a hole then; that may fail, which costs room.
static void punch(int fd, uint64_t first, uint64_t end)
{
	if (first < end)
		(void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			(off_t)(first * PAGE_BYTES), (off_t)((end - first) * PAGE_BYTES));
}

static int index_chunk(int fd, uint64_t first, uint64_t end, uint8_t *bytes, uint64_t *held,
	uint64_t *ret_checksum, struct memory_stats *stats)
{
	off_t data = lseek(fd, (off_t)(first * PAGE_BYTES), SEEK_DATA);
	size_t len = (size_t)((end - first) * PAGE_BYTES);
	uint64_t zeros = first;
	XXH3_state_t state;
	ssize_t n;

	XXH3_64bits_reset(&state);
	*ret_checksum = XXH3_64bits_digest(&state);
	if (data < 0)
		return errno == ENXIO ? 0 : -errno;
	if ((uint64_t)data >= end * PAGE_BYTES)
		return 0;
	n = fd_pread_full(fd, bytes, len, (off_t)(first * PAGE_BYTES));
	if (n != (ssize_t)len)
		return n < 0 ? (int)n : -EIO;
	for (uint64_t page = first; page < end; page++) {
		const uint8_t *at = bytes + (page - first) * PAGE_BYTES;

		if (memory_is_zero(at))
			continue;
		punch(fd, zeros, page);
		zeros = page + 1;
		stats->written_pages++;
		held[page / BITS_PER_WORD] |= 1ULL << page % BITS_PER_WORD;
		checksum_page(&state, page, at);
	}
	punch(fd, zeros, end);
	*ret_checksum = XXH3_64bits_digest(&state);
	return 0;
}

int memory_index(int fd, const struct snapshot_id *id, struct buf *ret_index,
	struct memory_stats *ret_stats, struct err *err)
{
	struct index_header header = {
		.flags = le32_of(INDEX_FULL), .chunk_pages = le32_of(MEMORY_CHUNK_PAGES)};
	CLEANUP_FREE uint8_t *bytes = malloc(MEMORY_CHUNK_PAGES * PAGE_BYTES);
	CLEANUP_FREE uint64_t *held = NULL;
	struct memory_stats stats = {0};
	size_t index_start = ret_index->len;
	uint64_t ram_bytes, nr_pages;
	struct stat st;
	int r = 0;

	if (fstat(fd, &st) < 0)
		return err_errno(err, -errno, MEMORY_FILE_NAME);
	if (st.st_size < (off_t)(2 * PAGE_BYTES) || st.st_size % (off_t)PAGE_BYTES ||
		(uint64_t)st.st_size > RAM_BYTES_MAX)
		return err_set(err, -EBADMSG, "'" MEMORY_FILE_NAME "' has an impossible length");
	ram_bytes = (uint64_t)st.st_size - PAGE_BYTES;
	nr_pages = ram_bytes / PAGE_BYTES;
	held = calloc((size_t)(nr_pages / BITS_PER_WORD + 1), sizeof(*held));
	if (!bytes || !held)
		return err_errno(err, -ENOMEM, "the snapshot's memory");
	header.ram_bytes = le64_of(ram_bytes);
	buf_append(ret_index, &header, sizeof(header));
	for (uint64_t page = 0; page < nr_pages && r == 0; page += MEMORY_CHUNK_PAGES) {
		uint64_t checksum = 0, end = MIN(page + MEMORY_CHUNK_PAGES, nr_pages);
		uint8_t le[8];

		r = index_chunk(fd, page, end, bytes, held, &checksum, &stats);
		put_le64(le, checksum);
		buf_append(ret_index, le, sizeof(le));
	}
	for (uint64_t i = 0; i < (nr_pages + BITS_PER_WORD - 1) / BITS_PER_WORD && r == 0; i++) {
		uint8_t le[8];

		put_le64(le, held[i]);
		buf_append(ret_index, le, sizeof(le));
	}
	if (r == 0)
		r = buf_error(ret_index);
	if (r == 0)
		r = write_trailer(fd, id, ram_bytes, ram_bytes, ret_index, index_start);
	if (r < 0)
		return err_errno(err, r, "the snapshot's memory");
	stats.held_pages = nr_pages;
	stats.written_bytes = stats.written_pages * PAGE_BYTES;
	*ret_stats = stats;
	return 0;
}

// --- Opening ---------------------------------------------------------------------------------

static int read_words(const uint8_t *data, uint64_t nr, uint64_t **ret_words, struct err *err)
{
	uint64_t *words = calloc(MAX(nr, 1ULL), sizeof(*words));

	if (!words)
		return err_errno(err, -ENOMEM, "the snapshot's memory");
	for (uint64_t i = 0; i < nr; i++)
		words[i] = get_le64(data + i * 8);
	*ret_words = words;
	return 0;
}

static int parse_index(struct memory_layer *layer, const uint8_t *data, size_t len,
	const struct image *image, struct err *err)
{
	struct index_header header;
	uint64_t nr_pages, nr_chunks, nr_words, nr_frames;
	uint32_t flags;
	int r;

	if (len < sizeof(header))
		goto bad;
	memcpy(&header, data, sizeof(header));
	layer->ram_bytes = le64_get(header.ram_bytes);
	flags = le32_get(header.flags);
	layer->full = flags & INDEX_FULL;
	if (layer->ram_bytes == 0 || layer->ram_bytes % PAGE_BYTES ||
		layer->ram_bytes > RAM_BYTES_MAX || flags > (INDEX_FULL | INDEX_COMPRESSED) ||
		le32_get(header.chunk_pages) != MEMORY_CHUNK_PAGES ||
		layer->full != snapshot_id_none(&image->parent))
		goto bad;
	nr_pages = layer->ram_bytes / PAGE_BYTES;
	nr_chunks = (nr_pages + MEMORY_CHUNK_PAGES - 1) / MEMORY_CHUNK_PAGES;
	nr_words = (nr_pages + BITS_PER_WORD - 1) / BITS_PER_WORD;
	nr_frames = flags & INDEX_COMPRESSED ? memory_frames(layer->ram_bytes) : 0;
	if (len != sizeof(header) + (nr_chunks + nr_words + nr_frames) * 8)
		goto bad;
	r = read_words(data + sizeof(header), nr_chunks, &layer->checksums, err);
	if (r == 0)
		r = read_words(data + sizeof(header) + nr_chunks * 8, nr_words, &layer->held, err);
	if (r == 0 && nr_frames)
		r = read_words(data + sizeof(header) + (nr_chunks + nr_words) * 8, nr_frames,
			&layer->frame_ends, err);
	if (r < 0)
		return r;
	ASSERT(layer->held && (!nr_frames || layer->frame_ends));
	if (nr_pages % BITS_PER_WORD && layer->held[nr_words - 1] >> nr_pages % BITS_PER_WORD)
		goto bad;
	for (uint64_t i = 0, at = 0; i < nr_frames; at = layer->frame_ends[i++])
		if (layer->frame_ends[i] < at ||
			layer->frame_ends[i] - at > ZSTD_COMPRESSBOUND(MEMORY_FRAME_BYTES) ||
			(layer->frame_ends[i] > at) != (memory_held(layer, i) != 0))
			goto bad;
	return 0;
bad:
	return err_set(err, -EBADMSG, "damaged: the section '" MEMORY_SECTION "' makes no sense");
}

static int check_file(const struct memory_layer *layer, const struct image *image,
	uint64_t index_checksum, struct err *err)
{
	uint64_t end = layer->frame_ends ? layer->frame_ends[memory_frames(layer->ram_bytes) - 1]
					 : layer->ram_bytes;
	struct trailer trailer;
	struct stat st;
	ssize_t n;

	if (fstat(layer->fd, &st) < 0)
		return err_errno(err, -errno, MEMORY_FILE_NAME);
	if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != end + PAGE_BYTES)
		return err_set(err, -EBADMSG,
			"damaged: the file '" MEMORY_FILE_NAME "' is not as long as it was");
	n = fd_pread_full(layer->fd, &trailer, sizeof(trailer), (off_t)end);
	if (n < 0)
		return err_errno(err, (int)n, MEMORY_FILE_NAME);
	if (n != sizeof(trailer) || memcmp(trailer.magic, trailer_magic, sizeof(trailer_magic)) ||
		memcmp(trailer.id, image->id.bytes, sizeof(trailer.id)) ||
		le64_get(trailer.ram_bytes) != layer->ram_bytes ||
		le64_get(trailer.index_checksum) != index_checksum)
		return err_set(err, -EBADMSG,
			"damaged: the files 'state' and '" MEMORY_FILE_NAME
			"' do not belong together");
	return 0;
}

int memory_open(
	struct memory_layer *ret_layer, int dir_fd, const struct image *image, struct err *err)
{
	struct memory_layer layer = {.fd = -1};
	const void *index;
	size_t len;
	int r = image_section(image, MEMORY_SECTION, &index, &len, err);

	if (r == 0)
		r = parse_index(&layer, index, len, image, err);
	if (r == 0) {
		layer.fd = openat(
			dir_fd, MEMORY_FILE_NAME, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
		if (layer.fd < 0)
			r = err_errno(err, -errno, MEMORY_FILE_NAME);
	}
	if (r == 0)
		r = check_file(&layer, image, image_checksum(index, len), err);
	if (r < 0) {
		memory_close(&layer);
		return r;
	}
	*ret_layer = layer;
	return 0;
}

void memory_close(struct memory_layer *layer)
{
	if (layer->fd > 0)
		fd_close(&layer->fd);
	free(layer->held);
	free(layer->checksums);
	free(layer->frame_ends);
	*layer = (struct memory_layer){.fd = -1};
}

// Calls data(ctx, off, len) for each run of pages that the layer holds.
static int each_run(const struct memory_layer *layer,
	int (*data)(void *ctx, uint64_t off, uint64_t len, struct err *err), void *ctx,
	struct err *err)
{
	uint64_t nr_pages = layer->ram_bytes / PAGE_BYTES;
	uint64_t page = memory_next_page(layer->held, true, 0, nr_pages);
	int r = 0;

	while (page < nr_pages && r == 0) {
		uint64_t end = memory_next_page(layer->held, false, page, nr_pages);

		r = data(ctx, page * PAGE_BYTES, (end - page) * PAGE_BYTES, err);
		page = memory_next_page(layer->held, true, end, nr_pages);
	}
	return r;
}

// --- Into RAM --------------------------------------------------------------------------------

int memory_check_chain(
	const struct memory_layer *layers, unsigned int nr, uint64_t ram_bytes, struct err *err)
{
	ASSERT(nr >= 1 && nr <= MEMORY_LAYERS_MAX);
	for (unsigned int i = 0; i < nr; i++) {
		if (layers[i].full != (i == 0))
			return err_set(err, -EBADMSG, "damaged: the chain of snapshots is broken");
		if (layers[i].ram_bytes != ram_bytes)
			return err_set(err, -EINVAL,
				"the snapshot is of a machine with %llu MiB of memory, and this "
				"one has %llu",
				(unsigned long long)(layers[i].ram_bytes / MIB),
				(unsigned long long)(ram_bytes / MIB));
	}
	return 0;
}

static int read_pages(struct guest_mem *mem, const struct memory_layer *layer, uint64_t off,
	uint64_t len, struct err *err)
{
	while (len > 0) {
		// A run may cross from one region to the next: a page at a time finds the border.
		uint8_t *to = guest_mem_at(mem, off);
		uint64_t part = PAGE_BYTES;
		ssize_t n;

		while (part < len && guest_mem_at(mem, off + part) == to + part)
			part += PAGE_BYTES;
		n = fd_pread_full(layer->fd, to, part, (off_t)off);
		if (n != (ssize_t)part)
			return err_errno(err, n < 0 ? (int)n : -EIO, MEMORY_FILE_NAME);
		off += part;
		len -= part;
	}
	return 0;
}

struct target {
	struct guest_mem *mem;
	const struct memory_layer *layer;
	unsigned int mappings;
};

static int set_backed(void *ctx, uint64_t off, uint64_t len, struct err *err)
{
	const struct target *target = ctx;

	(void)err;
	guest_mem_set_backed(target->mem, off, len);
	return 0;
}

static int read_run(void *ctx, uint64_t off, uint64_t len, struct err *err)
{
	const struct target *target = ctx;

	return read_pages(target->mem, target->layer, off, len, err);
}

static int map_run(void *ctx, uint64_t off, uint64_t len, struct err *err)
{
	struct target *target = ctx;

	if (len < MAP_RUN_PAGES * PAGE_BYTES || target->mappings == MAPPINGS_MAX)
		return read_run(ctx, off, len, err);
	target->mappings++;
	guest_mem_set_backed(target->mem, off, len);
	return guest_mem_map_file(target->mem, off, len, target->layer->fd, off, err);
}

int memory_map(
	struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr, struct err *err)
{
	struct target target = {.mem = mem, .layer = &layers[0]};
	int r = memory_check_chain(layers, nr, guest_mem_size_bytes(mem), err);

	for (unsigned int i = 0; i < nr && r == 0; i++)
		if (layers[i].frame_ends)
			r = err_set(err, -ENOTSUP, "it is compressed, and cannot be mapped");
	// The holes of the first are zeros, so it is mapped whole.
	if (r == 0)
		r = guest_mem_map_file(mem, 0, layers[0].ram_bytes, layers[0].fd, 0, err);
	if (r == 0)
		r = each_run(&layers[0], set_backed, &target, err);
	for (unsigned int i = 1; i < nr && r == 0; i++) {
		target.layer = &layers[i];
		r = each_run(&layers[i], map_run, &target, err);
	}
	return r;
}

void memory_set_backed(struct guest_mem *mem, const struct memory_layer *layers, unsigned int nr)
{
	struct target target = {.mem = mem};

	for (unsigned int i = 0; i < nr; i++)
		(void)each_run(&layers[i], set_backed, &target, NULL);
}
