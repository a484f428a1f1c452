// SPDX-License-Identifier: Apache-2.0
// Fuzzes the opening of a disk's layers: headers, maps, lengths and chains, mostly sound, with the
// checksum right more often than not. What is opened is compared, block by block, with a second
// reading of the same files; it is written to, flushed, frozen, and has to open again with the same
// blocks. What is refused changes no file. Nothing is ever said to lie outside of a file.
//
// Input: how many layers, a byte of options, then each file.
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BLOCK       4096U
#define BLOCKS      96U // of a disk that is sound
#define DISK_BYTES  ((uint64_t)BLOCKS * BLOCK)
#define BASE_BYTES  (40U * BLOCK + 100U)
#define HEADER      512U
#define MAP_MAX     (4U * BLOCK)
#define LAYERS_MAX  3U
#define FILE_MAX    (2 * GIB) // sparse
#define TOP         "disk.overlay"
#define CHANGES_MAX 12U
#define LOOKED_AT   128U // blocks of a disk of any size

enum { BELOW, DATA, ZERO };

// A file as the fuzzer has made it.
struct file {
	char name[64];
	uint8_t header[HEADER];
	uint8_t map[MAP_MAX];
	uint64_t bytes;
	ino_t ino;
};

static struct {
	char path[40];
	int dir, base;
	ino_t base_ino;
	uint64_t base_print;
	struct file files[LAYERS_MAX]; // the top first
	unsigned int nr_files;
	uint64_t disk_bytes;
	ino_t frozen_ino; // of the top that the fuzzer has made, once it is frozen
	uint8_t frozen[MAP_MAX];
	struct overlay_params params;
	struct overlay *ov;
} t;

// The format's sum, written down once more.
static uint64_t sum_of(const uint8_t *data, size_t len)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < len; i += 8) {
		sum = (sum ^ get_le64(data + i)) * 0x9e3779b97f4a7c15ULL;
		sum ^= sum >> 32;
	}
	return sum;
}

static void write_at(int fd, const void *data, size_t len, off_t off)
{
	if (pwrite(fd, data, len, off) != (ssize_t)len)
		abort();
}

static void remove_in(int dir_fd)
{
	DIR *dir = fdopendir(openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));

	if (!dir)
		abort();
	for (struct dirent *e; (e = readdir(dir));)
		if (e->d_type == DT_REG)
			unlinkat(dir_fd, e->d_name, 0);
	closedir(dir);
}

static void remove_all(void)
{
	CLEANUP_FD int layers = openat(t.dir, "layers", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	remove_in(t.dir);
	remove_in(layers);
}

static void leave(void)
{
	remove_all();
	unlinkat(t.dir, "layers", AT_REMOVEDIR);
	rmdir(t.path);
}

static void setup(void)
{
	static uint8_t base[BASE_BYTES];
	struct overlay_params params = {.disk = "disk", .base_name = "base"};
	struct overlay *ov;
	uint8_t header[HEADER];
	struct stat st;
	int fd;

	// In memory, where syncing takes no time.
	snprintf(t.path, sizeof(t.path), "%s/overlay-fuzz-XXXXXX",
		access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
	if (!mkdtemp(t.path))
		abort();
	atexit(leave);
	t.dir = open(t.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (t.dir < 0 || mkdirat(t.dir, "layers", 0700) < 0)
		abort();
	t.base = memfd_create("base", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	for (uint32_t i = 0; i < sizeof(base); i++)
		base[i] = (uint8_t)(i * 31 >> 4);
	write_at(t.base, base, sizeof(base), 0);
	// Who writes to it fails.
	if (fcntl(t.base, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) < 0 ||
		fstat(t.base, &st) < 0)
		abort();
	t.base_ino = st.st_ino;
	// The base's fingerprint, as a new layer has it.
	params.dir_fd = t.dir;
	params.base_fd = dup(t.base);
	if (overlay_open(&ov, &params, NULL) < 0)
		abort();
	overlay_close(ov);
	fd = openat(t.dir, TOP, O_RDONLY | O_CLOEXEC);
	if (fd_pread_full(fd, header, sizeof(header), 0) != (ssize_t)sizeof(header))
		abort();
	fd_close(&fd);
	t.base_print = get_le64(header + 64);
}

static void id_of(unsigned int idx, uint8_t id[16])
{
	memset(id, 0x11 * (int)(idx + 1), 16);
}

// --- Making the files ----------------------------------------------------------------------------

static uint64_t map_bytes_of(uint64_t disk_bytes)
{
	return ALIGN_UP(disk_bytes / BLOCK / 4 + 1, (uint64_t)BLOCK);
}

static void make_header(struct fuzz_input *in, struct file *file, unsigned int idx, bool last)
{
	const uint8_t how = fuzz_u8(in);
	uint8_t *h = file->header;

	memset(h, 0, HEADER);
	memcpy(h, "mayflyOV", 8);
	put_le32(h + 8, 1);
	put_le32(h + 12, idx || how == 7);
	put_le64(h + 16, DISK_BYTES);
	id_of(idx, h + 24);
	if (!last || how == 8)
		id_of(last ? idx : idx + 1, h + 40); // or on itself
	if (t.params.base_fd >= 0) {
		put_le64(h + 56, BASE_BYTES);
		put_le64(h + 64, t.base_print);
	}
	if (how >= 200)
		for (unsigned int i = 0; i <= how % 4U; i++)
			h[fuzz_u16(in) % HEADER] = fuzz_u8(in);
	if (how >= 180 && how < 200)
		put_le64(h + 16, fuzz_u16(in) * (how < 190 ? 512ULL : 1ULL << how % 32));
	if (how < 240)
		put_le64(h + HEADER - 8, sum_of(h, HEADER - 8));
}

static void make_map(struct fuzz_input *in, struct file *file)
{
	const uint8_t nr = fuzz_u8(in);

	memset(file->map, 0, sizeof(file->map));
	// Blocks and what is known of them; now and then anything anywhere.
	for (unsigned int i = 0; i < nr % 32U && in->left; i++) {
		const unsigned int block = fuzz_u8(in) % BLOCKS, shift = 2 * (block % 4);
		const uint8_t state = fuzz_u8(in);

		file->map[block / 4] = (uint8_t)((file->map[block / 4] & ~(3 << shift)) |
						 (state < 3 ? state : 1 + state % 2) << shift);
	}
	if (nr >= 224)
		file->map[fuzz_u16(in) % (nr >= 240 ? MAP_MAX : BLOCKS / 4)] = fuzz_u8(in);
}

static void make_file(struct fuzz_input *in, unsigned int idx, bool last)
{
	struct file *file = &t.files[idx];
	uint8_t how;
	struct stat st;
	int fd;

	if (idx == 0) {
		snprintf(file->name, sizeof(file->name), TOP);
	} else {
		uint8_t id[16];
		int at = snprintf(file->name, sizeof(file->name), "layers/");

		id_of(idx, id);
		for (unsigned int i = 0; i < sizeof(id); i++)
			at += snprintf(
				file->name + at, sizeof(file->name) - (size_t)at, "%02x", id[i]);
	}
	make_header(in, file, idx, last);
	make_map(in, file);
	how = fuzz_u8(in);
	file->bytes = get_le64(file->header + 16);
	file->bytes += BLOCK + map_bytes_of(file->bytes);
	if (how >= 240 || file->bytes > FILE_MAX)
		file->bytes = how >= 250 ? fuzz_u16(in) : (file->bytes + how - 247) % FILE_MAX;
	fd = openat(t.dir, file->name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		abort();
	write_at(fd, file->header, HEADER, 0);
	write_at(fd, file->map, MAP_MAX, BLOCK);
	if (ftruncate(fd, (off_t)file->bytes) < 0 || fstat(fd, &st) < 0)
		abort();
	file->ino = st.st_ino;
	fd_close(&fd);
}

// --- The second reading --------------------------------------------------------------------------

static unsigned int state_in(const uint8_t *map, uint64_t block)
{
	return map[block / 4] >> 2 * (block % 4) & 3;
}

static void set_state(uint64_t first, uint64_t nr, unsigned int state)
{
	for (uint64_t block = first; block < first + nr && block < MAP_MAX * 4; block++) {
		uint8_t *byte = &t.files[0].map[block / 4];
		const unsigned int shift = 2 * (block % 4);

		*byte = (uint8_t)((*byte & ~(3 << shift)) | state << shift);
	}
}

// Where a block lies: the file, 0 for nowhere, and where in it.
static ino_t place_of(uint64_t block, uint64_t *ret_off)
{
	unsigned int state = state_in(t.files[0].map, block);
	ino_t ino = t.files[0].ino;

	*ret_off = BLOCK + map_bytes_of(t.disk_bytes) + block * BLOCK;
	if (state == BELOW && t.frozen_ino) {
		state = state_in(t.frozen, block);
		ino = t.frozen_ino;
	}
	for (unsigned int i = 1; state == BELOW && i < t.nr_files; i++) {
		state = state_in(t.files[i].map, block);
		ino = t.files[i].ino;
	}
	if (state == DATA)
		return ino;
	if (state == ZERO || t.params.base_fd < 0 || block * BLOCK >= BASE_BYTES)
		return 0;
	*ret_off = block * BLOCK;
	return t.base_ino;
}

static void check_run(const struct overlay_run *run, uint64_t off, uint64_t len)
{
	struct stat st;

	FUZZ_CHECK(run->bytes > 0 && run->bytes <= len && off + run->bytes <= t.disk_bytes);
	if (run->kind == OVERLAY_ZEROS)
		return;
	if (fstat(run->fd, &st) < 0)
		abort();
	FUZZ_CHECK(run->file_off <= (uint64_t)st.st_size &&
		   (run->kind == OVERLAY_COPY ? BLOCK : run->bytes) <=
			   (uint64_t)st.st_size - run->file_off);
	// No write ever goes to another file than the top, nor to its header and map.
	if (run->kind == OVERLAY_FILE)
		return;
	FUZZ_CHECK(st.st_ino == t.files[0].ino);
	FUZZ_CHECK(run->file_off >= BLOCK + map_bytes_of(t.disk_bytes));
}

static void check_block(uint64_t block)
{
	const uint64_t len = MIN(t.disk_bytes - block * BLOCK, 64ULL * BLOCK);
	uint64_t off;
	const ino_t ino = place_of(block, &off);
	struct overlay_run run;
	struct stat st;

	overlay_read(t.ov, block * BLOCK, len, &run);
	check_run(&run, block * BLOCK, len);
	FUZZ_CHECK((run.kind == OVERLAY_ZEROS) == !ino);
	if (!ino)
		return;
	if (fstat(run.fd, &st) < 0)
		abort();
	FUZZ_CHECK(run.kind == OVERLAY_FILE && st.st_ino == ino && run.file_off == off);
}

static void check_blocks(void)
{
	const uint64_t blocks = t.disk_bytes / BLOCK;

	for (uint64_t block = 0; block < MIN(blocks, (uint64_t)LOOKED_AT); block++)
		check_block(block);
	if (blocks < MAP_MAX * 4)
		check_block(blocks - 1);
}

// --- Changes -------------------------------------------------------------------------------------

static void change(struct fuzz_input *in)
{
	const uint8_t what = fuzz_u8(in);
	const uint64_t off = fuzz_u32(in) % MIN(t.disk_bytes, (uint64_t)LOOKED_AT * BLOCK);
	const uint64_t len = 1 + fuzz_u16(in) % (t.disk_bytes - off);
	const uint64_t first = off / BLOCK;
	const bool good = what % 8;
	struct overlay_run run;

	if (what < 192) {
		if (overlay_write(t.ov, off, len, &run) < 0) {
			FUZZ_CHECK(t.params.quota_bytes);
			return;
		}
		check_run(&run, off, len);
		FUZZ_CHECK((run.kind == OVERLAY_FILE) == (state_in(t.files[0].map, first) == DATA));
		overlay_wrote(t.ov, run.kind, off, run.bytes, good);
		if (run.kind != OVERLAY_FILE && good)
			set_state(first, run.kind == OVERLAY_COPY ? 1 : run.bytes / BLOCK, DATA);
	} else {
		const uint64_t nr = MIN(1 + len / BLOCK, t.disk_bytes / BLOCK - first);

		overlay_zero(t.ov, first * BLOCK, nr * BLOCK, &run);
		set_state(first, nr, ZERO);
	}
}

static int open_it(void)
{
	struct overlay_params params = t.params;
	struct err err;
	int r;

	if (params.base_fd >= 0)
		params.base_fd = dup(t.base);
	r = overlay_open(&t.ov, &params, &err);
	if (r < 0)
		fd_close(&params.base_fd);
	return r;
}

static ino_t top_ino(void)
{
	struct stat st;

	if (fstat(overlay_top_fd(t.ov), &st) < 0)
		abort();
	return st.st_ino;
}

// The top has become a layer, and an empty one lies on it.
static void was_frozen(void)
{
	t.frozen_ino = t.files[0].ino;
	memcpy(t.frozen, t.files[0].map, MAP_MAX);
	memset(t.files[0].map, 0, MAP_MAX);
	t.files[0].ino = top_ino();
}

static void check_unchanged(void)
{
	static uint8_t map[MAP_MAX];

	for (unsigned int i = 0; i < t.nr_files; i++) {
		const struct file *file = &t.files[i];
		const uint64_t in_map = MIN(MAP_MAX, file->bytes > BLOCK ? file->bytes - BLOCK : 0);
		CLEANUP_FD int fd = openat(t.dir, file->name, O_RDONLY | O_CLOEXEC);
		uint8_t header[HEADER];
		struct stat st;

		FUZZ_CHECK(fd >= 0 && fstat(fd, &st) == 0);
		FUZZ_CHECK(st.st_ino == file->ino && (uint64_t)st.st_size == file->bytes);
		FUZZ_CHECK(
			fd_pread_full(fd, header, HEADER, 0) == (ssize_t)MIN(HEADER, file->bytes));
		FUZZ_CHECK(memcmp(header, file->header, MIN(HEADER, file->bytes)) == 0);
		FUZZ_CHECK(fd_pread_full(fd, map, in_map, BLOCK) == (ssize_t)in_map);
		FUZZ_CHECK(memcmp(map, file->map, in_map) == 0);
	}
}

static void use(struct fuzz_input *in)
{
	t.disk_bytes = overlay_disk_bytes(t.ov);
	FUZZ_CHECK(t.disk_bytes == get_le64(t.files[0].header + 16));
	FUZZ_CHECK(t.disk_bytes % BLOCK == 0 && t.disk_bytes >= BLOCK);
	// One that was on its way to be frozen has been brought there.
	if (get_le32(t.files[0].header + 12))
		was_frozen();
	check_blocks();
	for (unsigned int i = 0; i < CHANGES_MAX && in->left; i++)
		change(in);
	check_blocks();
	if (!t.frozen_ino && fuzz_u8(in) % 4 == 1) {
		FUZZ_CHECK(overlay_freeze(t.ov, NULL) == 0);
		was_frozen();
		check_blocks();
	}
	overlay_close(TAKE_PTR(t.ov));
	if (t.params.throwaway)
		return;
	FUZZ_CHECK(open_it() == 0);
	check_blocks();
	overlay_close(TAKE_PTR(t.ov));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_input in = {data, size};
	uint8_t how;

	if (!t.path[0])
		setup();
	remove_all();
	t.nr_files = 1 + fuzz_u8(&in) % LAYERS_MAX;
	how = fuzz_u8(&in);
	t.frozen_ino = 0;
	t.params = (struct overlay_params){
		.dir_fd = t.dir,
		.disk = "disk",
		.base_fd = how & 1 ? -1 : t.base,
		.base_name = "base",
		.size_bytes = how & 1 || how & 2 ? DISK_BYTES : 0,
		.quota_bytes = how & 4 ? 16ULL * BLOCK : 0,
		.throwaway = how & 8,
	};
	for (unsigned int i = 0; i < t.nr_files; i++)
		make_file(&in, i, i + 1 == t.nr_files);
	if (open_it() < 0)
		check_unchanged();
	else
		use(&in);
	return 0;
}
