// SPDX-License-Identifier: Apache-2.0
// Layers of a disk; see the header. Loop thread.
#include "devices/overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define BLOCK        ((uint64_t)OVERLAY_BLOCK_BYTES)
#define HEADER_BYTES 512U // in the first block: a sector, which a disk writes whole or not at all
#define ID_BYTES     16U
#define MAGIC        "mayflyOV"
#define VERSION      1U
#define FLAG_FROZEN  1U
#define SAMPLES      16U

// What a layer knows of a block: two bits in its map, the lowest bits of a word first.
#define BELOW     0U // nothing: look below
#define DATA      1U
#define ZERO      2U
#define WORD      32U // blocks in a word of the map
#define PAGE_BLKS (BLOCK * 4) // blocks in a block of the map

struct header {
	uint32_t flags;
	uint64_t disk_bytes;
	uint8_t id[ID_BYTES];
	uint8_t parent[ID_BYTES]; // zeros: on the base
	uint64_t base_bytes; // 0: no base
	uint64_t base_print;
};

struct layer {
	int fd;
	struct header header;
	uint64_t *map; // in the byte order of the file
};

struct overlay {
	int dir_fd;
	char *disk;
	int base_fd;
	uint64_t base_bytes, base_print;
	bool throwaway;
	uint64_t disk_bytes, blocks, map_bytes;
	struct layer layers[OVERLAY_LAYERS_MAX]; // the lowest first
	unsigned int nr_layers;
	uint64_t quota_blocks; // UINT64_MAX: none
	uint64_t used_blocks, reserved_blocks;
	// The top's map: which of its blocks differ from what is in the file, which of them are in
	// the flush that is under way, and what they were when it began.
	bool *dirty, *flushing;
	uint64_t nr_dirty, flush_at;
	uint8_t *shadow;
	bool in_flush;
};

static struct layer *top(const struct overlay *ov)
{
	return (struct layer *)&ov->layers[ov->nr_layers - 1];
}

static uint64_t map_bytes_of(uint64_t disk_bytes)
{
	return ALIGN_UP(disk_bytes / BLOCK / 4 + 1, BLOCK);
}

static uint64_t data_off(const struct overlay *ov)
{
	return BLOCK + ov->map_bytes;
}

// --- The map -----------------------------------------------------------------------------------

static unsigned int state_of(const struct layer *layer, uint64_t block)
{
	return (unsigned int)(le64toh(layer->map[block / WORD]) >> 2 * (block % WORD)) & 3;
}

static void set_state(struct overlay *ov, uint64_t block, unsigned int state)
{
	uint64_t *word = &top(ov)->map[block / WORD], page = block / PAGE_BLKS;
	const unsigned int shift = 2 * (block % WORD), was = state_of(top(ov), block);

	if (was == state)
		return;
	*word = htole64((le64toh(*word) & ~(3ULL << shift)) | (uint64_t)state << shift);
	ov->used_blocks += state == DATA;
	ov->used_blocks -= was == DATA;
	ov->nr_dirty += !ov->dirty[page];
	ov->dirty[page] = true;
}

// The layer that a block is in, and its state there; -1: the base, or nothing.
static int find(const struct overlay *ov, uint64_t block, unsigned int *ret_state)
{
	for (unsigned int i = ov->nr_layers; i-- > 0;) {
		*ret_state = state_of(&ov->layers[i], block);
		if (*ret_state != BELOW)
			return (int)i;
	}
	*ret_state = BELOW;
	return -1;
}

void overlay_read(const struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run)
{
	const uint64_t last = (off + len - 1) / BLOCK;
	uint64_t block = off / BLOCK, end;
	unsigned int state, other;
	int layer = find(ov, block, &state);

	ASSERT(len && off < ov->disk_bytes && len <= ov->disk_bytes - off);
	while (block < last && find(ov, block + 1, &other) == layer && other == state)
		block++;
	end = MIN((block + 1) * BLOCK, off + len);
	*ret_run = (struct overlay_run){OVERLAY_ZEROS, -1, 0, end - off};
	if (state == DATA) {
		*ret_run = (struct overlay_run){
			OVERLAY_FILE, ov->layers[layer].fd, data_off(ov) + off, end - off};
	} else if (layer < 0 && off < ov->base_bytes) {
		end = MIN(end, ov->base_bytes);
		*ret_run = (struct overlay_run){OVERLAY_FILE, ov->base_fd, off, end - off};
	}
}

int overlay_write(struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run)
{
	const uint64_t first = off / BLOCK, last = (off + len - 1) / BLOCK;
	const bool there = state_of(top(ov), first) == DATA;
	uint64_t block = first, bytes, nr = 1;

	ASSERT(len && off < ov->disk_bytes && len <= ov->disk_bytes - off);
	while (block < last && (state_of(top(ov), block + 1) == DATA) == there)
		block++;
	bytes = MIN((block + 1) * BLOCK, off + len) - off;
	*ret_run = (struct overlay_run){OVERLAY_FILE, top(ov)->fd, data_off(ov) + off, bytes};
	if (there)
		return 0;
	if (off % BLOCK == 0 && bytes >= BLOCK) {
		nr = bytes / BLOCK;
		ret_run->kind = OVERLAY_NEW;
		ret_run->bytes = nr * BLOCK;
	} else {
		ret_run->kind = OVERLAY_COPY;
		ret_run->file_off = data_off(ov) + first * BLOCK;
		ret_run->bytes = MIN((first + 1) * BLOCK, off + len) - off;
	}
	if (ov->used_blocks + ov->reserved_blocks + nr > ov->quota_blocks)
		return -ENOSPC;
	ov->reserved_blocks += nr;
	return 0;
}

void overlay_wrote(
	struct overlay *ov, enum overlay_run_kind kind, uint64_t off, uint64_t bytes, bool good)
{
	const uint64_t first = off / BLOCK, nr = kind == OVERLAY_COPY ? 1 : bytes / BLOCK;

	// In place: if somebody has zeroed the block meanwhile, it stays so.
	if (kind == OVERLAY_FILE)
		return;
	ASSERT(ov->reserved_blocks >= nr);
	ov->reserved_blocks -= nr;
	for (uint64_t i = 0; good && i < nr; i++)
		set_state(ov, first + i, DATA);
}

bool overlay_zero(struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run)
{
	const uint64_t first = off / BLOCK, nr = len / BLOCK;
	bool data = false;

	ASSERT(len && off % BLOCK == 0 && len % BLOCK == 0 && off < ov->disk_bytes &&
		len <= ov->disk_bytes - off);
	for (uint64_t block = first; block < first + nr; block++) {
		unsigned int state;

		data |= state_of(top(ov), block) == DATA;
		// What is nowhere need not be noted.
		if (find(ov, block, &state) >= 0 || block * BLOCK < ov->base_bytes)
			set_state(ov, block, ZERO);
	}
	*ret_run = (struct overlay_run){OVERLAY_ZEROS, top(ov)->fd, data_off(ov) + off, len};
	return data;
}

// --- Flush -------------------------------------------------------------------------------------

bool overlay_flush_begin(struct overlay *ov)
{
	const uint64_t pages = ov->map_bytes / BLOCK;

	ASSERT(!ov->in_flush);
	if (!ov->nr_dirty)
		return false;
	// What is said of blocks that are written from here on is left for the next one, since
	// their data may not be there yet.
	for (uint64_t i = 0; i < pages; i++) {
		ov->flushing[i] = ov->dirty[i];
		ov->dirty[i] = false;
		if (ov->flushing[i])
			memcpy(ov->shadow + i * BLOCK, (uint8_t *)top(ov)->map + i * BLOCK, BLOCK);
	}
	ov->nr_dirty = ov->flush_at = 0;
	ov->in_flush = true;
	return true;
}

bool overlay_flush_next(
	struct overlay *ov, const void **ret_data, uint64_t *ret_bytes, uint64_t *ret_file_off)
{
	const uint64_t pages = ov->map_bytes / BLOCK;
	uint64_t from;

	while (ov->flush_at < pages && !ov->flushing[ov->flush_at])
		ov->flush_at++;
	if (ov->flush_at == pages)
		return false;
	from = ov->flush_at;
	while (ov->flush_at < pages && ov->flushing[ov->flush_at])
		ov->flush_at++;
	*ret_data = ov->shadow + from * BLOCK;
	*ret_bytes = (ov->flush_at - from) * BLOCK;
	*ret_file_off = BLOCK + from * BLOCK;
	return true;
}

void overlay_flush_end(struct overlay *ov, bool good)
{
	ASSERT(ov->in_flush);
	ov->in_flush = false;
	for (uint64_t i = 0; !good && i < ov->map_bytes / BLOCK; i++) {
		if (!ov->flushing[i] || ov->dirty[i])
			continue;
		ov->dirty[i] = true;
		ov->nr_dirty++;
	}
}

static int write_all_at(int fd, const void *data, uint64_t len, uint64_t off)
{
	uint64_t done = 0;

	while (done < len) {
		ssize_t n = pwrite(
			fd, (const uint8_t *)data + done, len - done, (off_t)(off + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		done += (uint64_t)n;
	}
	return 0;
}

// To the medium, unless nobody will look for it there.
static int sync_fd(const struct overlay *ov, int fd)
{
	return !ov->throwaway && fsync(fd) < 0 ? -errno : 0;
}

// The same, at once.
static int flush(struct overlay *ov)
{
	const int fd = top(ov)->fd;
	const void *data;
	uint64_t bytes, off;
	int r = !ov->throwaway && fdatasync(fd) < 0 ? -errno : 0;

	if (!overlay_flush_begin(ov))
		return r;
	while (r == 0 && overlay_flush_next(ov, &data, &bytes, &off))
		r = write_all_at(fd, data, bytes, off);
	if (r == 0 && !ov->throwaway && fdatasync(fd) < 0)
		r = -errno;
	overlay_flush_end(ov, r == 0);
	return r;
}

// --- Files -------------------------------------------------------------------------------------

// A sum against accidents, not against forgery. len is a multiple of 8.
static uint64_t sum_of(uint64_t sum, const uint8_t *data, size_t len)
{
	for (size_t i = 0; i < len; i += 8) {
		sum = (sum ^ get_le64(data + i)) * 0x9e3779b97f4a7c15ULL;
		sum ^= sum >> 32;
	}
	return sum;
}

// The size, the beginning and some blocks on the way: not the same for two images, nor for one
// that has been mounted for writing.
static int print_base(int fd, uint64_t bytes, uint64_t *ret_print)
{
	uint8_t buf[OVERLAY_BLOCK_BYTES];
	uint64_t sum = bytes;

	for (unsigned int i = 0; i < 2 * SAMPLES; i++) {
		uint64_t at = i < SAMPLES ? i * BLOCK
					  : ALIGN_DOWN(bytes / SAMPLES * (i - SAMPLES), BLOCK);
		ssize_t n;

		memset(buf, 0, sizeof(buf));
		n = fd_pread_full(fd, buf, sizeof(buf), (off_t)at);
		if (n < 0)
			return (int)n;
		sum = sum_of(sum, buf, sizeof(buf));
	}
	*ret_print = sum;
	return 0;
}

static void encode(const struct header *header, uint8_t out[HEADER_BYTES])
{
	memset(out, 0, HEADER_BYTES);
	memcpy(out, MAGIC, 8);
	put_le32(out + 8, VERSION);
	put_le32(out + 12, header->flags);
	put_le64(out + 16, header->disk_bytes);
	memcpy(out + 24, header->id, ID_BYTES);
	memcpy(out + 40, header->parent, ID_BYTES);
	put_le64(out + 56, header->base_bytes);
	put_le64(out + 64, header->base_print);
	put_le64(out + HEADER_BYTES - 8, sum_of(0, out, HEADER_BYTES - 8));
}

static int decode(
	const uint8_t in[HEADER_BYTES], struct header *header, const char *name, struct err *err)
{
	if (memcmp(in, MAGIC, 8) != 0)
		return err_set(err, -EUCLEAN, "%s: not a mayfly overlay", name);
	if (get_le32(in + 8) != VERSION)
		return err_set(err, -EUCLEAN,
			"%s: version %u of the format, of which this mayfly knows only %u", name,
			get_le32(in + 8), VERSION);
	if (get_le64(in + HEADER_BYTES - 8) != sum_of(0, in, HEADER_BYTES - 8))
		return err_set(err, -EUCLEAN, "%s: damaged: its header's checksum is wrong", name);
	header->flags = get_le32(in + 12);
	header->disk_bytes = get_le64(in + 16);
	memcpy(header->id, in + 24, ID_BYTES);
	memcpy(header->parent, in + 40, ID_BYTES);
	header->base_bytes = get_le64(in + 56);
	header->base_print = get_le64(in + 64);
	if (header->flags & ~FLAG_FROZEN || !header->disk_bytes || header->disk_bytes % BLOCK ||
		header->disk_bytes > OVERLAY_DISK_MAX)
		return err_set(err, -EUCLEAN, "%s: damaged: its header makes no sense", name);
	for (unsigned int i = 72; i < HEADER_BYTES - 8; i++)
		if (in[i])
			return err_set(
				err, -EUCLEAN, "%s: damaged: its header makes no sense", name);
	return 0;
}

static bool is_zero(const uint8_t id[ID_BYTES])
{
	static const uint8_t zeros[ID_BYTES];

	return memcmp(id, zeros, ID_BYTES) == 0;
}

static void id_name(const uint8_t id[ID_BYTES], char ret_name[OVERLAY_NAME_BYTES])
{
	for (size_t i = 0; i < ID_BYTES; i++)
		snprintf(ret_name + 2 * i, 3, "%02x", id[i]);
}

#define PATH_BYTES 256

static int path_of(char path[PATH_BYTES], const char *disk, const char *suffix, struct err *err)
{
	return snprintf(path, PATH_BYTES, "%s.overlay%s", disk, suffix) >= PATH_BYTES
		       ? err_errno(err, -ENAMETOOLONG, "%.60s", disk)
		       : 0;
}

static void layer_path(char path[PATH_BYTES], const uint8_t id[ID_BYTES])
{
	char name[OVERLAY_NAME_BYTES];

	id_name(id, name);
	snprintf(path, PATH_BYTES, "layers/%s", name);
}

static int sync_dir(int dir_fd)
{
	CLEANUP_FD int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return fd < 0 || fsync(fd) < 0 ? -errno : 0;
}

static int read_header(int fd, struct header *ret_header, const char *name, struct err *err)
{
	uint8_t raw[HEADER_BYTES];
	struct stat st;
	ssize_t n;
	int r;

	if (fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", name);
	if (!S_ISREG(st.st_mode))
		return err_set(err, -EUCLEAN, "%s: not a regular file", name);
	n = fd_pread_full(fd, raw, sizeof(raw), 0);
	if (n < 0)
		return err_errno(err, (int)n, "%s", name);
	if (n != HEADER_BYTES)
		return err_set(err, -EUCLEAN, "%s: not a mayfly overlay", name);
	r = decode(raw, ret_header, name, err);
	if (r == 0 && (uint64_t)st.st_size !=
			      BLOCK + map_bytes_of(ret_header->disk_bytes) + ret_header->disk_bytes)
		r = err_set(err, -EUCLEAN, "%s: damaged: %lld bytes are not what it should have",
			name, (long long)st.st_size);
	return r;
}

static int write_header(int fd, const struct header *header)
{
	uint8_t raw[HEADER_BYTES];

	encode(header, raw);
	return write_all_at(fd, raw, sizeof(raw), 0);
}

// Makes DISK.overlay, empty, whole or not at all, in the place of any that is there; on what header
// says, with an id of its own.
static int make_top(int dir_fd, const char *disk, struct header *header, bool durable, int *ret_fd,
	struct err *err)
{
	CLEANUP_FD int fd = -1;
	char path[PATH_BYTES], making[PATH_BYTES];
	int r = path_of(path, disk, "", err);

	if (r == 0)
		r = path_of(making, disk, ".new", err);
	if (r < 0)
		return r;
	header->flags = 0;
	if (getrandom(header->id, ID_BYTES, 0) != ID_BYTES)
		return err_errno(err, -errno, "getrandom");
	if (unlinkat(dir_fd, making, 0) < 0 && errno != ENOENT)
		return err_errno(err, -errno, "%s", making);
	fd = openat(dir_fd, making, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s", making);
	if (ftruncate(fd, (off_t)(BLOCK + map_bytes_of(header->disk_bytes) + header->disk_bytes)) <
		0)
		r = -errno;
	if (r == 0)
		r = write_header(fd, header);
	if (r == 0 && durable && fsync(fd) < 0)
		r = -errno;
	// Before it has its name: nobody else can be quicker.
	if (r == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
		r = -errno;
	if (r == 0 && renameat(dir_fd, making, dir_fd, path) < 0)
		r = -errno;
	if (r < 0) {
		unlinkat(dir_fd, making, 0);
		return err_errno(err, r, "%s", making);
	}
	// It is there; what can be lost in a power cut from here on is that it is.
	if (durable && sync_dir(dir_fd) < 0)
		log_line(LOG_WARN, "overlay", "%s: the folder could not be synced", path);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

static int check_word(uint64_t word, uint64_t first_block, uint64_t blocks)
{
	// 3 is no state, and beyond the end there is none.
	if (word & word >> 1 & 0x5555555555555555ULL)
		return -EUCLEAN;
	if (first_block >= blocks)
		return word ? -EUCLEAN : 0;
	if (blocks - first_block < WORD && word >> 2 * (blocks - first_block))
		return -EUCLEAN;
	return 0;
}

// Reads a layer's map. Only what is not zero is copied, so that an untouched page stays one.
static int read_map(
	const struct overlay *ov, struct layer *layer, const char *name, struct err *err)
{
	static const uint8_t zeros[OVERLAY_BLOCK_BYTES];
	uint64_t page[OVERLAY_BLOCK_BYTES / 8];

	layer->map = calloc(1, ov->map_bytes);
	if (!layer->map)
		return err_errno(err, -ENOMEM, "%s: its map", name);
	for (uint64_t at = 0; at < ov->map_bytes; at += BLOCK) {
		ssize_t n = fd_pread_full(layer->fd, page, sizeof(page), (off_t)(BLOCK + at));

		if (n != (ssize_t)sizeof(page))
			return err_errno(err, n < 0 ? (int)n : -EIO, "%s: its map", name);
		if (memcmp(page, zeros, sizeof(page)) == 0)
			continue;
		for (unsigned int i = 0; i < ARRAY_SIZE(page); i++)
			if (check_word(le64toh(page[i]), at * 4 + (uint64_t)i * WORD, ov->blocks) <
				0)
				return err_set(
					err, -EUCLEAN, "%s: damaged: its map makes no sense", name);
		memcpy((uint8_t *)layer->map + at, page, sizeof(page));
	}
	return 0;
}

static int check_base(
	const struct overlay *ov, const struct header *header, const char *name, struct err *err)
{
	if (header->base_bytes == ov->base_bytes && header->base_print == ov->base_print)
		return 0;
	return err_set(err, -ESTALE,
		ov->base_bytes ? "%s: made on another base, or its base has been changed since"
			       : "%s: made on a base, and none is named",
		name);
}

// Opens the layers below the first (the top) and puts all of them in order.
static int open_chain(struct overlay *ov, struct err *err)
{
	struct layer layers[OVERLAY_LAYERS_MAX]; // the top first
	unsigned int nr = 0;
	char path[PATH_BYTES];
	int r = path_of(path, ov->disk, "", err);

	layers[0] = ov->layers[0];
	ov->nr_layers = 0;
	while (r == 0) {
		const uint8_t *parent = layers[nr].header.parent;
		struct layer *layer;

		r = check_base(ov, &layers[nr].header, path, err);
		if (r == 0)
			r = read_map(ov, &layers[nr], path, err);
		nr++;
		if (r < 0 || is_zero(parent))
			break;
		if (nr == OVERLAY_LAYERS_MAX) {
			r = err_set(
				err, -EMLINK, "%s: more than %u layers", path, OVERLAY_LAYERS_MAX);
			break;
		}
		layer = &layers[nr];
		layer_path(path, parent);
		*layer = (struct layer){.fd = openat(ov->dir_fd, path,
						O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
		if (layer->fd < 0) {
			r = err_errno(err, -errno, "%s", path);
			break;
		}
		r = read_header(layer->fd, &layer->header, path, err);
		if (r == 0 && (memcmp(layer->header.id, parent, ID_BYTES) != 0 ||
				      !(layer->header.flags & FLAG_FROZEN) ||
				      layer->header.disk_bytes != ov->disk_bytes))
			r = err_set(
				err, -EUCLEAN, "%s: not the layer that it is named after", path);
		if (r < 0)
			nr++;
	}
	// Also after a failure: whoever closes it frees them.
	for (unsigned int i = 0; i < nr; i++)
		ov->layers[nr - 1 - i] = layers[i];
	ov->nr_layers = nr;
	return r;
}

static uint64_t count_data(const struct overlay *ov)
{
	const uint64_t *map = top(ov)->map;
	uint64_t nr = 0;

	ASSERT(map);
	for (uint64_t i = 0; i < ov->map_bytes / 8; i++)
		nr += (uint64_t)__builtin_popcountll(map[i] & htole64(0x5555555555555555ULL));
	return nr;
}

// Puts an empty layer on the top, which is frozen and has its name in layers/.
static int push_top(struct overlay *ov, struct err *err)
{
	struct layer layer = {.fd = -1, .header = top(ov)->header};
	int r;

	memcpy(layer.header.parent, top(ov)->header.id, ID_BYTES);
	layer.map = calloc(1, ov->map_bytes);
	if (!layer.map)
		return err_errno(err, -ENOMEM, "%s: a map", ov->disk);
	r = make_top(ov->dir_fd, ov->disk, &layer.header, !ov->throwaway, &layer.fd, err);
	if (r < 0) {
		free(layer.map);
		return r;
	}
	ov->layers[ov->nr_layers++] = layer;
	ov->used_blocks = 0;
	return 0;
}

// Gives the top, which is marked as frozen, its name in layers/, and puts a new one on it.
static int finish_freeze(struct overlay *ov, struct err *err)
{
	char path[PATH_BYTES], layer[PATH_BYTES];
	int fd, r = path_of(path, ov->disk, "", err);

	if (r < 0)
		return r;
	layer_path(layer, top(ov)->header.id);
	if (mkdirat(ov->dir_fd, "layers", 0700) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "layers");
	// There already after a power cut: then it is the same file, for ids do not come twice.
	if (linkat(ov->dir_fd, path, ov->dir_fd, layer, 0) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s", layer);
	fd = openat(ov->dir_fd, layer, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || fchmod(fd, 0400) < 0 || sync_fd(ov, fd) < 0) {
		r = err_errno(err, -errno, "%s", layer);
	} else {
		CLEANUP_FD int dir = openat(
			ov->dir_fd, "layers", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

		if (dir < 0 || sync_fd(ov, dir) < 0)
			r = err_errno(err, -errno, "layers");
	}
	if (r == 0)
		r = push_top(ov, err);
	if (r < 0) {
		fd_close(&fd);
		unlinkat(ov->dir_fd, layer, 0);
		return r;
	}
	// No way to write to it is left open.
	fd_close(&ov->layers[ov->nr_layers - 2].fd);
	ov->layers[ov->nr_layers - 2].fd = fd;
	return 0;
}

// Nothing has been written to the top, and it lies on a frozen layer.
static bool is_frozen_already(const struct overlay *ov)
{
	const uint64_t *map = top(ov)->map;

	if (ov->nr_layers == 1 || ov->used_blocks)
		return false;
	for (uint64_t i = 0; i < ov->map_bytes / 8; i++)
		if (map[i])
			return false;
	return true;
}

int overlay_freeze(struct overlay *ov, struct err *err)
{
	struct layer *layer = top(ov);
	int r;

	ASSERT(!ov->in_flush && !ov->reserved_blocks);
	if (is_frozen_already(ov))
		return 0;
	if (ov->nr_layers == OVERLAY_LAYERS_MAX)
		return err_set(err, -EMLINK, "%s: it has %u layers, and more are not possible",
			ov->disk, OVERLAY_LAYERS_MAX);
	r = flush(ov);
	if (r < 0)
		return err_errno(err, r, "%s.overlay", ov->disk);
	// From here on it is not written to any more, whatever happens: whoever opens it with this
	// mark goes on from there.
	layer->header.flags |= FLAG_FROZEN;
	r = write_header(layer->fd, &layer->header);
	if (r == 0)
		r = sync_fd(ov, layer->fd);
	if (r < 0)
		err_errno(err, r, "%s.overlay", ov->disk);
	else
		r = finish_freeze(ov, err);
	if (r < 0) {
		// Best effort: as it was, so that the machine can go on with it.
		layer->header.flags = 0;
		(void)fchmod(layer->fd, 0600);
		(void)write_header(layer->fd, &layer->header);
	}
	return r;
}

unsigned int overlay_frozen(
	const struct overlay *ov, char ret_names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES])
{
	for (unsigned int i = 0; i + 1 < ov->nr_layers; i++)
		id_name(ov->layers[i].header.id, ret_names[i]);
	return ov->nr_layers - 1;
}

// Opens a frozen layer and reads its header.
static int open_frozen(
	int dir_fd, const char *layer, int *ret_fd, struct header *ret_header, struct err *err)
{
	CLEANUP_FD int fd = -1;
	char path[PATH_BYTES], name[OVERLAY_NAME_BYTES];
	int r;

	if (strspn(layer, "0123456789abcdef") != OVERLAY_NAME_BYTES - 1 ||
		layer[OVERLAY_NAME_BYTES - 1])
		return err_set(err, -EUCLEAN, "'%.40s': not the name of a layer", layer);
	snprintf(path, sizeof(path), "layers/%s", layer);
	fd = openat(dir_fd, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return err_errno(err, -errno, "%s", path);
	r = read_header(fd, ret_header, path, err);
	if (r < 0)
		return r;
	id_name(ret_header->id, name);
	if (!(ret_header->flags & FLAG_FROZEN) || strcmp(name, layer) != 0)
		return err_set(err, -EUCLEAN, "%s: not the layer that it is named after", path);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

int overlay_chain(int dir_fd, const char *layer,
	char ret_names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES], struct err *err)
{
	struct header header;

	snprintf(ret_names[0], OVERLAY_NAME_BYTES, "%s", layer);
	for (int nr = 0; nr < (int)OVERLAY_LAYERS_MAX;) {
		CLEANUP_FD int fd = -1;
		int r = open_frozen(dir_fd, ret_names[nr++], &fd, &header, err);

		if (r < 0)
			return r;
		if (is_zero(header.parent))
			return nr;
		if (nr < (int)OVERLAY_LAYERS_MAX)
			id_name(header.parent, ret_names[nr]);
	}
	return err_set(err, -EMLINK, "layers/%s: more than %u layers", layer, OVERLAY_LAYERS_MAX);
}

int overlay_create_on(
	int dir_fd, const char *disk, const char *layer, bool throwaway, struct err *err)
{
	CLEANUP_FD int fd = -1;
	CLEANUP_FD int top_fd = -1;
	struct header header;
	int r = open_frozen(dir_fd, layer, &fd, &header, err);

	if (r < 0)
		return r;
	memcpy(header.parent, header.id, ID_BYTES);
	return make_top(dir_fd, disk, &header, !throwaway, &top_fd, err);
}

static void free_overlay(struct overlay *ov)
{
	for (unsigned int i = 0; i < ov->nr_layers; i++) {
		fd_close(&ov->layers[i].fd);
		free(ov->layers[i].map);
	}
	fd_close(&ov->base_fd);
	free(ov->dirty);
	free(ov->flushing);
	free(ov->shadow);
	free(ov->disk);
	free(ov);
}

// --- Merging -----------------------------------------------------------------------------------

#define MERGING    "layers/.merging" // no name of a layer
#define COPY_BYTES (256 * KIB)

static int copy_by_hand(int from, int to, uint64_t off, uint64_t len)
{
	uint8_t *buf = malloc(COPY_BYTES);
	int r = buf ? 0 : -ENOMEM;

	while (len > 0 && r == 0) {
		size_t part = (size_t)MIN(len, (uint64_t)COPY_BYTES);
		ssize_t n = fd_pread_full(from, buf, part, (off_t)off);

		r = n == (ssize_t)part ? write_all_at(to, buf, part, off) : n < 0 ? (int)n : -EIO;
		off += part;
		len -= part;
	}
	free(buf);
	return r;
}

// The same place of another file.
static int copy_range(int from, int to, uint64_t off, uint64_t len)
{
	while (len > 0) {
		off_t in = (off_t)off, out = (off_t)off;
		ssize_t n = copy_file_range(from, &in, to, &out, len, 0);

		if (n <= 0)
			return copy_by_hand(from, to, off, len);
		off += (uint64_t)n;
		len -= (uint64_t)n;
	}
	return 0;
}

// What the layers of ov say together, below it nothing: data and map to the file.
static int write_merged(const struct overlay *ov, int fd)
{
	uint64_t *map = calloc(1, ov->map_bytes);
	int r = map ? 0 : -ENOMEM;

	for (uint64_t block = 0, end; block < ov->blocks && r == 0; block = end) {
		unsigned int state, other;
		int layer = find(ov, block, &state);

		for (end = block + 1;
			end < ov->blocks && find(ov, end, &other) == layer && other == state; end++)
			;
		for (uint64_t b = block; b < end && state != BELOW; b++)
			map[b / WORD] |= htole64((uint64_t)state << 2 * (b % WORD));
		if (state == DATA)
			r = copy_range(ov->layers[layer].fd, fd, data_off(ov) + block * BLOCK,
				(end - block) * BLOCK);
	}
	for (uint64_t at = 0; at < ov->map_bytes && r == 0; at += BLOCK)
		r = write_all_at(fd, (uint8_t *)map + at, BLOCK, BLOCK + at);
	free(map);
	return r;
}

// In the place of the highest of ov's layers, which has all that is needed of it in its header.
static int replace_highest(const struct overlay *ov, struct err *err)
{
	struct header header = top(ov)->header;
	CLEANUP_FD int fd = -1;
	CLEANUP_FD int layers = -1;
	char path[PATH_BYTES];
	int r;

	layer_path(path, header.id);
	memcpy(header.parent, ov->layers[0].header.parent, ID_BYTES);
	if (unlinkat(ov->dir_fd, MERGING, 0) < 0 && errno != ENOENT)
		return err_errno(err, -errno, MERGING);
	fd = openat(ov->dir_fd, MERGING, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0400);
	layers = openat(ov->dir_fd, "layers", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	r = fd < 0 || layers < 0 || ftruncate(fd, (off_t)(data_off(ov) + ov->disk_bytes)) < 0
		    ? -errno
		    : 0;
	if (r == 0)
		r = write_merged(ov, fd);
	if (r == 0)
		r = write_header(fd, &header);
	if (r == 0 && (fsync(fd) < 0 || renameat(ov->dir_fd, MERGING, ov->dir_fd, path) < 0))
		r = -errno;
	if (r < 0) {
		unlinkat(ov->dir_fd, MERGING, 0);
		return err_errno(err, r, "%s", path);
	}
	// Before what it stands for goes.
	return fsync(layers) < 0 ? err_errno(err, -errno, "layers") : 0;
}

// Those below the top that have one name only, the highest first: then that is the one in this
// folder, for who has a layer has all below it.
static int open_own(struct overlay *ov, const char *disk, int top_fd, struct err *err)
{
	struct layer own[OVERLAY_LAYERS_MAX];
	char name[OVERLAY_NAME_BYTES];
	struct header header;
	int r = read_header(top_fd, &header, disk, err);

	if (r < 0)
		return r;
	ov->disk_bytes = header.disk_bytes;
	ov->blocks = ov->disk_bytes / BLOCK;
	ov->map_bytes = map_bytes_of(ov->disk_bytes);
	while (r == 0 && !is_zero(header.parent) && ov->nr_layers < OVERLAY_LAYERS_MAX) {
		struct layer layer = {.fd = -1};
		struct stat st = {0};

		id_name(header.parent, name);
		r = open_frozen(ov->dir_fd, name, &layer.fd, &layer.header, err);
		if (r == 0 && fstat(layer.fd, &st) < 0)
			r = err_errno(err, -errno, "layers/%s", name);
		if (r == 0 && layer.header.disk_bytes != ov->disk_bytes)
			r = err_set(err, -EUCLEAN, "layers/%s: of another size", name);
		if (r < 0 || st.st_nlink != 1) {
			fd_close(&layer.fd);
			break;
		}
		r = read_map(ov, &layer, name, err);
		header = layer.header;
		own[ov->nr_layers++] = layer;
	}
	for (unsigned int i = 0; i < ov->nr_layers; i++)
		ov->layers[ov->nr_layers - 1 - i] = own[i];
	return r;
}

// All that the own layers have is there twice for a while, where the file system has no reflinks.
static int check_room(const struct overlay *ov, struct err *err)
{
	struct statvfs fs;
	uint64_t need = 0;
	struct stat st;

	for (unsigned int i = 0; i < ov->nr_layers; i++)
		if (fstat(ov->layers[i].fd, &st) == 0)
			need += (uint64_t)st.st_blocks * 512;
	if (fstatvfs(ov->dir_fd, &fs) == 0 && fs.f_bavail * fs.f_frsize / 8 * 7 < need)
		return err_set(err, -ENOSPC, "layers: to merge them takes %llu MiB for a while",
			(unsigned long long)(need / MIB + 1));
	return 0;
}

int overlay_merge(int dir_fd, const char *disk, unsigned int at_least, struct err *err)
{
	struct overlay *ov = calloc(1, sizeof(*ov));
	CLEANUP_FD int top_fd = -1;
	char path[PATH_BYTES];
	int r;

	ASSERT(at_least >= 2);
	if (!ov)
		return err_errno(err, -ENOMEM, "%s", disk);
	ov->dir_fd = dir_fd;
	ov->base_fd = -1;
	r = path_of(path, disk, "", err);
	if (r == 0) {
		top_fd = openat(dir_fd, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
		if (top_fd < 0 && errno != ENOENT)
			r = err_errno(err, -errno, "%s", path);
		else if (top_fd >= 0 && flock(top_fd, LOCK_EX | LOCK_NB) < 0)
			r = err_set(err, -EBUSY, "%s: in use by a machine that runs", path);
	}
	if (r == 0 && top_fd >= 0)
		r = open_own(ov, disk, top_fd, err);
	if (r == 0 && ov->nr_layers >= at_least) {
		r = check_room(ov, err);
		if (r == 0)
			r = replace_highest(ov, err);
		for (unsigned int i = 0; i + 1 < ov->nr_layers && r >= 0; i++, r++) {
			layer_path(path, ov->layers[i].header.id);
			unlinkat(dir_fd, path, 0);
		}
	}
	free_overlay(ov);
	return r;
}

// --- Opening -----------------------------------------------------------------------------------

static int open_base(struct overlay *ov, const struct overlay_params *params, struct err *err)
{
	off_t bytes;
	int r;

	if (params->base_fd < 0)
		return 0;
	if (flock(params->base_fd, LOCK_SH | LOCK_NB) < 0)
		return err_set(err, -EBUSY, "%s: a machine writes to it", params->base_name);
	bytes = lseek(params->base_fd, 0, SEEK_END);
	if (bytes < 0)
		return err_errno(err, -errno, "%s", params->base_name);
	if (bytes == 0)
		return err_set(err, -EINVAL, "%s: empty", params->base_name);
	ov->base_bytes = (uint64_t)bytes;
	r = print_base(params->base_fd, ov->base_bytes, &ov->base_print);
	return r < 0 ? err_errno(err, r, "%s", params->base_name) : 0;
}

static int open_top(struct overlay *ov, const struct overlay_params *params, struct err *err)
{
	struct layer *layer = &ov->layers[0];
	uint64_t size = params->size_bytes ? params->size_bytes : ov->base_bytes;
	char path[PATH_BYTES];
	int r = path_of(path, ov->disk, "", err);

	if (r < 0)
		return r;
	if (size > OVERLAY_DISK_MAX || size < ov->base_bytes || !size)
		return err_set(err, -EINVAL,
			"%s: a size of %llu bytes: from its base's (%llu) to %lluG is possible",
			ov->disk, (unsigned long long)size, (unsigned long long)ov->base_bytes,
			OVERLAY_DISK_MAX / GIB);
	size = ALIGN_UP(size, BLOCK);
	*layer = (struct layer){
		.fd = openat(ov->dir_fd, path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
	if (layer->fd < 0 && errno == EACCES) // frozen, by one who is not root
		layer->fd = openat(
			ov->dir_fd, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	if (layer->fd < 0 && errno != ENOENT)
		return err_errno(err, -errno, "%s", path);
	if (layer->fd < 0) {
		layer->header = (struct header){.disk_bytes = size,
			.base_bytes = ov->base_bytes,
			.base_print = ov->base_print};
		r = make_top(ov->dir_fd, ov->disk, &layer->header, !ov->throwaway, &layer->fd, err);
		ov->nr_layers = r == 0;
	} else {
		ov->nr_layers = 1;
		if (flock(layer->fd, LOCK_EX | LOCK_NB) < 0)
			return err_set(err, -EBUSY, "%s: in use by another machine", path);
		r = read_header(layer->fd, &layer->header, path, err);
	}
	if (r < 0)
		return r;
	if (params->size_bytes && size != layer->header.disk_bytes)
		return err_set(err, -EINVAL,
			"%s: it was made with a size of %lluK, which cannot be changed", path,
			(unsigned long long)(layer->header.disk_bytes / KIB));
	ov->disk_bytes = layer->header.disk_bytes;
	ov->blocks = ov->disk_bytes / BLOCK;
	ov->map_bytes = map_bytes_of(ov->disk_bytes);
	if (ov->disk_bytes < ov->base_bytes)
		return err_set(err, -EUCLEAN, "%s: smaller than its base", path);
	return 0;
}

static int open_all(struct overlay *ov, const struct overlay_params *params, struct err *err)
{
	int r = open_base(ov, params, err);

	if (r == 0)
		r = open_top(ov, params, err);
	if (r == 0)
		r = open_chain(ov, err);
	if (r < 0)
		return r;
	ASSERT(ov->map_bytes);
	ov->shadow = calloc(1, ov->map_bytes);
	ov->dirty = calloc(ov->map_bytes / BLOCK, sizeof(*ov->dirty));
	ov->flushing = calloc(ov->map_bytes / BLOCK, sizeof(*ov->flushing));
	if (!ov->shadow || !ov->dirty || !ov->flushing)
		return err_errno(err, -ENOMEM, "%s: its map", ov->disk);
	if (top(ov)->header.flags & FLAG_FROZEN) {
		// The power was cut in overlay_freeze().
		if (ov->nr_layers == OVERLAY_LAYERS_MAX)
			return err_set(err, -EMLINK, "%s: more than %u layers", ov->disk,
				OVERLAY_LAYERS_MAX);
		return finish_freeze(ov, err);
	}
	ov->used_blocks = count_data(ov);
	return 0;
}

int overlay_open(struct overlay **ret_ov, const struct overlay_params *params, struct err *err)
{
	struct overlay *ov = calloc(1, sizeof(*ov));
	int r;

	if (!ov)
		return err_errno(err, -ENOMEM, "%s", params->disk);
	ov->dir_fd = params->dir_fd;
	ov->base_fd = -1;
	ov->throwaway = params->throwaway;
	ov->quota_blocks = params->quota_bytes ? params->quota_bytes / BLOCK : UINT64_MAX;
	ov->disk = strdup(params->disk);
	r = ov->disk ? open_all(ov, params, err) : err_errno(err, -ENOMEM, "%s", params->disk);
	if (r < 0) {
		free_overlay(ov);
		return r;
	}
	ov->base_fd = params->base_fd;
	*ret_ov = ov;
	return 0;
}

void overlay_close(struct overlay *ov)
{
	int r;

	if (!ov)
		return;
	r = ov->throwaway ? 0 : flush(ov);
	if (r < 0)
		log_line(LOG_ERROR, "overlay", "%s.overlay: what was written last is lost: %s",
			ov->disk, strerror(-r));
	free_overlay(ov);
}

uint64_t overlay_disk_bytes(const struct overlay *ov)
{
	return ov->disk_bytes;
}

uint64_t overlay_used_bytes(const struct overlay *ov)
{
	return ov->used_blocks * BLOCK;
}

int overlay_top_fd(const struct overlay *ov)
{
	return top(ov)->fd;
}
