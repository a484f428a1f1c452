// SPDX-License-Identifier: Apache-2.0
// devices/overlay: where bytes are, what a freeze leaves behind wherever it fails, and that no file
// is believed that lies.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define BLOCK      4096U
#define BLOCKS     256U
#define DISK_BYTES (BLOCKS * BLOCK)
#define BASE_BYTES (100U * BLOCK + 1000U) // not a whole number of blocks
#define MAP_OFF    BLOCK
#define DATA_OFF   (2 * BLOCK)

// --- System calls that fail from the nth on ------------------------------------------------------

static struct {
	unsigned int left; // calls until the first that fails; 0: none does
	bool for_good; // as after a crash: all later ones fail too
	bool failed;
} fail;

static bool fails(void)
{
	if (fail.failed)
		return fail.for_good;
	if (!fail.left || --fail.left)
		return false;
	fail.failed = true;
	return true;
}

#define WRAP(ret, name, params, args)      \
	ret __real_##name params;          \
	ret __wrap_##name params;          \
	ret __wrap_##name params           \
	{                                  \
		if (fails()) {             \
			errno = ENOSPC;    \
			return -1;         \
		}                          \
		return __real_##name args; \
	}

WRAP(ssize_t, pwrite, (int fd, const void *buf, size_t len, off_t off), (fd, buf, len, off))
WRAP(int, fdatasync, (int fd), (fd))
WRAP(int, fsync, (int fd), (fd))
WRAP(int, linkat, (int a, const char *b, int c, const char *d, int e), (a, b, c, d, e))
WRAP(int, renameat, (int a, const char *b, int c, const char *d), (a, b, c, d))
WRAP(int, ftruncate, (int fd, off_t len), (fd, len))

void *__real_calloc(size_t nr, size_t size);
void *__wrap_calloc(size_t nr, size_t size);
void *__wrap_calloc(size_t nr, size_t size)
{
	return fails() ? NULL : __real_calloc(nr, size);
}

// --- A folder, a base, a disk
// ----------------------------------------------------------------------

static struct {
	char path[64];
	int dir_fd;
	struct overlay_params params;
	struct overlay *ov;
	uint8_t disk[DISK_BYTES]; // what the guest is to see
} t;

static uint8_t base_byte(uint64_t at)
{
	return (uint8_t)(at * 131 >> 7 ^ at >> 3 ^ 1);
}

static int open_base(void)
{
	int fd = openat(t.dir_fd, "base.img", O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	return fd;
}

static int try_open(struct err *err)
{
	struct overlay_params params = t.params;
	int r;

	if (t.params.base_fd != -1)
		params.base_fd = open_base();
	r = overlay_open(&t.ov, &params, err);
	if (r < 0)
		fd_close(&params.base_fd);
	return r;
}

static void reopen(void)
{
	struct err err = {0};

	overlay_close(t.ov);
	t.ov = NULL;
	if (try_open(&err) < 0)
		fail_msg("%s", err.msg);
}

static void remove_all(int dir_fd)
{
	DIR *dir = fdopendir(openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));

	assert_non_null(dir);
	for (struct dirent *e; (e = readdir(dir));) {
		if (e->d_name[0] == '.')
			continue;
		if (e->d_type == DT_DIR) {
			int fd = openat(dir_fd, e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

			remove_all(fd);
			close(fd);
			unlinkat(dir_fd, e->d_name, AT_REMOVEDIR);
		} else {
			unlinkat(dir_fd, e->d_name, 0);
		}
	}
	closedir(dir);
}

static int setup(void **state)
{
	int fd;

	(void)state;
	memset(&t, 0, sizeof(t));
	snprintf(t.path, sizeof(t.path), "/tmp/mayfly-overlay-XXXXXX");
	assert_non_null(mkdtemp(t.path));
	t.dir_fd = open(t.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	for (size_t i = 0; i < BASE_BYTES; i++)
		t.disk[i] = base_byte(i);
	fd = openat(t.dir_fd, "base.img", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(fd_write_all(fd, t.disk, BASE_BYTES), 0);
	close(fd);
	t.params = (struct overlay_params){.dir_fd = t.dir_fd,
		.disk = "disk",
		.base_fd = 0,
		.base_name = "base.img",
		.size_bytes = DISK_BYTES};
	reopen();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	memset(&fail, 0, sizeof(fail));
	overlay_close(t.ov);
	remove_all(t.dir_fd);
	close(t.dir_fd);
	rmdir(t.path);
	return 0;
}

// As a device would, without a ring.
static void read_disk(uint8_t *out, uint64_t off, uint64_t len)
{
	struct overlay_run run;

	for (; len; off += run.bytes, out += run.bytes, len -= run.bytes) {
		overlay_read(t.ov, off, len, &run);
		assert_true(run.bytes > 0 && run.bytes <= len);
		if (run.kind == OVERLAY_ZEROS)
			memset(out, 0, run.bytes);
		else
			assert_int_equal(fd_pread_full(run.fd, out, run.bytes, (off_t)run.file_off),
				run.bytes);
	}
}

static int write_disk(const uint8_t *data, uint64_t off, uint64_t len)
{
	struct overlay_run run;
	uint8_t block[BLOCK];
	int r;

	for (; len; off += run.bytes, data += run.bytes, len -= run.bytes) {
		const uint8_t *from = data;
		uint64_t bytes;

		r = overlay_write(t.ov, off, len, &run);
		if (r < 0)
			return r;
		assert_true(run.bytes > 0 && run.bytes <= len);
		bytes = run.bytes;
		if (run.kind == OVERLAY_COPY) {
			read_disk(block, off / BLOCK * BLOCK, BLOCK);
			memcpy(block + off % BLOCK, data, run.bytes);
			from = block;
			bytes = BLOCK;
		}
		assert_int_equal(pwrite(run.fd, from, bytes, (off_t)run.file_off), bytes);
		overlay_wrote(t.ov, run.kind, off, run.bytes, true);
		memcpy(t.disk + off, data, run.bytes);
	}
	return 0;
}

static void fill(uint64_t off, uint64_t len, uint8_t seed)
{
	static uint8_t data[DISK_BYTES];

	for (uint64_t i = 0; i < len; i++)
		data[i] = (uint8_t)(seed + i * 7 + (i >> 8));
	assert_int_equal(write_disk(data, off, len), 0);
}

static void zero(uint64_t block, uint64_t nr)
{
	struct overlay_run run;

	if (overlay_zero(t.ov, block * BLOCK, nr * BLOCK, &run))
		assert_int_equal(fallocate(run.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					 (off_t)run.file_off, (off_t)run.bytes),
			0);
	memset(t.disk + block * BLOCK, 0, nr * BLOCK);
}

static void check_disk(void)
{
	static uint8_t back[DISK_BYTES];

	read_disk(back, 0, DISK_BYTES);
	assert_memory_equal(back, t.disk, DISK_BYTES);
}

static void check_base(void)
{
	static uint8_t base[BASE_BYTES + 1];
	int fd = open_base();

	assert_int_equal(fd_pread_full(fd, base, sizeof(base), 0), BASE_BYTES);
	for (size_t i = 0; i < BASE_BYTES; i++)
		assert_int_equal(base[i], base_byte(i));
	close(fd);
}

// --- Tests ---------------------------------------------------------------------------------------

static void what_is_written_is_there_and_the_rest_is_the_bases(void **state)
{
	(void)state;
	check_disk();
	fill(0, BLOCK, 1);
	fill(10 * BLOCK + 512, 512, 2); // a part, over the base
	fill(100 * BLOCK + 512, 1024, 3); // over its end
	fill(120 * BLOCK + 1024, 5000, 4); // over nothing
	fill(60 * BLOCK - 1024, 4 * BLOCK, 5); // part, whole, part
	check_disk();
	fill(58 * BLOCK, 6 * BLOCK, 6); // some there, some not
	fill(DISK_BYTES - 512, 512, 7);
	check_disk();
	reopen();
	check_disk();
	check_base();
	assert_int_equal(overlay_used_bytes(t.ov), (1 + 1 + 1 + 2 + 6 + 1) * BLOCK);
	assert_int_equal(overlay_disk_bytes(t.ov), DISK_BYTES);
}

static void zeros_hide_the_base_and_give_room_back(void **state)
{
	struct overlay_run run;

	(void)state;
	fill(20 * BLOCK, 10 * BLOCK, 1);
	zero(15, 10); // base and data
	check_disk();
	assert_int_equal(overlay_used_bytes(t.ov), 5 * BLOCK);
	reopen();
	check_disk();
	fill(16 * BLOCK + 512, 512, 2); // a part of zeros
	fill(99 * BLOCK, 1024, 2);
	zero(99, 2); // the base's end
	check_disk();
	// What nobody has need not be noted: nothing to flush.
	while (overlay_flush_begin(t.ov)) {
		const void *data;
		uint64_t bytes, off;

		while (overlay_flush_next(t.ov, &data, &bytes, &off))
			assert_int_equal(
				pwrite(overlay_top_fd(t.ov), data, bytes, (off_t)off), bytes);
		overlay_flush_end(t.ov, true);
	}
	assert_false(overlay_zero(t.ov, 200 * BLOCK, 50 * BLOCK, &run));
	assert_false(overlay_flush_begin(t.ov));
	reopen();
	check_disk();
	check_base();
}

static void a_quota_is_hard(void **state)
{
	static const uint8_t data[8 * BLOCK];

	(void)state;
	overlay_close(t.ov);
	t.ov = NULL;
	t.params.quota_bytes = 10 * BLOCK + 4095;
	reopen();
	fill(0, 8 * BLOCK, 1);
	assert_int_equal(write_disk(data, 20 * BLOCK, 3 * BLOCK), -ENOSPC);
	fill(20 * BLOCK, 2 * BLOCK, 2);
	assert_int_equal(write_disk(data, 30 * BLOCK + 512, 512), -ENOSPC);
	fill(0, 8 * BLOCK, 3); // what is there can be written over
	check_disk();
	zero(0, 2);
	fill(30 * BLOCK + 512, 512, 4);
	assert_int_equal(overlay_used_bytes(t.ov), 9 * BLOCK);
	reopen();
	assert_int_equal(overlay_used_bytes(t.ov), 9 * BLOCK);
	fill(31 * BLOCK, BLOCK, 4);
	assert_int_equal(write_disk(data, 40 * BLOCK, BLOCK), -ENOSPC);
	// A write that has failed gives back what was reserved for it.
	zero(31, 1);
	for (unsigned int i = 0; i < 20; i++) {
		struct overlay_run run;

		assert_int_equal(overlay_write(t.ov, 50 * BLOCK, BLOCK, &run), 0);
		assert_int_equal(overlay_write(t.ov, 51 * BLOCK, 512, &run), -ENOSPC);
		overlay_wrote(t.ov, OVERLAY_NEW, 50 * BLOCK, BLOCK, false);
	}
	check_disk();
}

static uint64_t sum_layer(const char *name)
{
	static uint8_t buf[DATA_OFF + DISK_BYTES];
	char path[64];
	uint64_t sum = 0;
	int fd;

	snprintf(path, sizeof(path), "layers/%s", name);
	fd = openat(t.dir_fd, path, O_RDONLY | O_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(fd_pread_full(fd, buf, sizeof(buf), 0), sizeof(buf));
	close(fd);
	for (size_t i = 0; i < sizeof(buf); i++)
		sum = sum * 31 + buf[i];
	return sum;
}

static void frozen_layers_stay(void **state)
{
	static uint8_t then[DISK_BYTES];
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	char chain[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	struct err err = {0};
	uint64_t sum, sum2;

	(void)state;
	fill(5 * BLOCK, 10 * BLOCK, 1);
	zero(30, 5);
	assert_int_equal(overlay_freeze(t.ov, &err), 0);
	assert_int_equal(overlay_frozen(t.ov, names), 1);
	assert_int_equal(overlay_used_bytes(t.ov), 0);
	sum = sum_layer(names[0]);
	memcpy(then, t.disk, sizeof(then));
	check_disk();
	fill(7 * BLOCK + 512, 512, 2); // a part, over the frozen one
	fill(32 * BLOCK + 512, 512, 3); // over its zeros
	zero(9, 2); // its data does not shine through
	check_disk();
	assert_int_equal(overlay_used_bytes(t.ov), 2 * BLOCK);
	reopen();
	check_disk();
	assert_int_equal(overlay_freeze(t.ov, &err), 0);
	assert_int_equal(overlay_frozen(t.ov, names), 2);
	// Nothing was written since: no layer more.
	assert_int_equal(overlay_freeze(t.ov, &err), 0);
	assert_int_equal(overlay_frozen(t.ov, names), 2);
	assert_int_equal(overlay_chain(t.dir_fd, names[1], chain, &err), 2);
	assert_string_equal(chain[0], names[1]);
	assert_string_equal(chain[1], names[0]);
	sum2 = sum_layer(names[1]);
	fill(0, DISK_BYTES, 9);
	zero(0, 100);
	reopen();
	check_disk();
	assert_true(sum_layer(names[0]) == sum && sum_layer(names[1]) == sum2);
	// Back to the first.
	overlay_close(t.ov);
	t.ov = NULL;
	assert_int_equal(overlay_create_on(t.dir_fd, "disk", names[0], false, &err), 0);
	memcpy(t.disk, then, sizeof(then));
	reopen();
	check_disk();
	assert_int_equal(overlay_frozen(t.ov, names), 1);
	assert_int_equal(
		overlay_create_on(t.dir_fd, "disk", "../disk.overlay", false, &err), -EUCLEAN);
	assert_int_equal(overlay_create_on(
				 t.dir_fd, "disk", "0123456789abcdef0123456789abcdef", false, &err),
		-ENOENT);
	check_base();
}

static void layers_are_bounded(void **state)
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	struct err err = {0};

	(void)state;
	for (unsigned int i = 1; i < OVERLAY_LAYERS_MAX; i++) {
		fill((uint64_t)i % 80 * 3 * BLOCK + 512, BLOCK, (uint8_t)i);
		assert_int_equal(overlay_freeze(t.ov, &err), 0);
	}
	assert_int_equal(overlay_freeze(t.ov, &err), 0); // nothing to freeze
	fill(0, BLOCK, 78);
	assert_int_equal(overlay_freeze(t.ov, &err), -EMLINK);
	assert_int_equal(overlay_frozen(t.ov, names), OVERLAY_LAYERS_MAX - 1);
	check_disk();
	fill(0, 2 * BLOCK, 77);
	reopen();
	check_disk();
}

// Each system call of a freeze fails: once, and the machine goes on; or it and all later ones, as
// in a crash, and what is opened then has all that was written.
static void a_freeze_that_fails_loses_nothing(void **state)
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	unsigned int failures = 0;

	(void)state;
	for (unsigned int mode = 0; mode < 2; mode++) {
		bool failed = true;

		for (unsigned int nth = 1; failed; nth++) {
			struct err err = {0};
			unsigned int before;
			int r;

			assert_true(nth < 40);
			fill((nth + 50 * mode) % BLOCKS * BLOCK, 2 * BLOCK - 512, (uint8_t)nth);
			if (mode)
				reopen(); // what was flushed is what a crash has to leave
			before = overlay_frozen(t.ov, names);
			memset(&fail, 0, sizeof(fail));
			fail.left = nth;
			fail.for_good = mode;
			r = overlay_freeze(t.ov, &err);
			failed = fail.failed;
			memset(&fail, 0, sizeof(fail));
			failures += failed;
			if (!failed)
				assert_int_equal(r, 0);
			if (r < 0)
				assert_int_equal(overlay_frozen(t.ov, names), before);
			check_disk();
			if (mode) {
				// Nothing is written on the way out of a crash.
				fail.left = 1;
				fail.for_good = true;
				overlay_close(t.ov);
				t.ov = NULL;
				memset(&fail, 0, sizeof(fail));
			} else {
				fill((nth + 20) * BLOCK + 512, BLOCK, (uint8_t)(nth + 1));
			}
			reopen();
			check_disk();
			if (overlay_frozen(t.ov, names) > OVERLAY_LAYERS_MAX - 4) {
				teardown(NULL);
				setup(NULL);
			}
		}
	}
	assert_true(failures > 15);
}

static unsigned int files_in_layers(void)
{
	DIR *dir = fdopendir(openat(t.dir_fd, "layers", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	unsigned int nr = 0;

	assert_non_null(dir);
	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr - 2;
}

// Three layers that overlap, with zeros over data and data over zeros, and a top.
static void make_layers(unsigned int seed)
{
	struct err err = {0};

	for (unsigned int i = 0; i < 3; i++) {
		fill((3 + i * 5) * BLOCK, 10 * BLOCK, (uint8_t)(seed + i));
		fill((60 + i) * BLOCK + 512, 512, (uint8_t)(seed + 40 + i));
		zero(5 + i * 4, 3);
		zero(99, 1 + i); // of the base, and beyond it
		assert_int_equal(overlay_freeze(t.ov, &err), 0);
	}
	fill(20 * BLOCK, BLOCK, (uint8_t)(seed + 77));
}

static void layers_are_merged(void **state)
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES], shared[64];
	char now[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	struct err err = {0};

	(void)state;
	make_layers(1);
	assert_int_equal(overlay_frozen(t.ov, names), 3);
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 2, &err), -EBUSY);
	overlay_close(t.ov);
	t.ov = NULL;
	assert_int_equal(overlay_merge(t.dir_fd, "none", 2, &err), 0);
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 4, &err), 0);
	assert_int_equal(files_in_layers(), 3);
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 2, &err), 2);
	assert_int_equal(files_in_layers(), 1);
	reopen();
	check_disk();
	check_base();
	// It is called as the highest was: who knows that name finds the same.
	assert_int_equal(overlay_frozen(t.ov, now), 1);
	assert_string_equal(now[0], names[2]);
	fill(2 * BLOCK, 30 * BLOCK, 99);
	assert_int_equal(overlay_freeze(t.ov, &err), 0);
	// What another folder has stays as it is, and what lies on it is merged.
	assert_int_equal(overlay_frozen(t.ov, names), 2);
	snprintf(shared, sizeof(shared), "layers/%s", names[1]);
	assert_int_equal(linkat(t.dir_fd, shared, t.dir_fd, "of-a-snapshot", 0), 0);
	snprintf(shared, sizeof(shared), "layers/%s", names[0]);
	assert_int_equal(linkat(t.dir_fd, shared, t.dir_fd, "of-it-too", 0), 0);
	make_layers(100);
	overlay_close(t.ov);
	t.ov = NULL;
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 2, &err), 2);
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 2, &err), 0);
	assert_int_equal(files_in_layers(), 3);
	reopen();
	check_disk();
	assert_int_equal(overlay_frozen(t.ov, now), 3);
	assert_string_equal(now[0], names[0]);
	assert_string_equal(now[1], names[1]);
	// When that has gone too.
	overlay_close(t.ov);
	t.ov = NULL;
	unlinkat(t.dir_fd, "of-a-snapshot", 0);
	unlinkat(t.dir_fd, "of-it-too", 0);
	assert_int_equal(overlay_merge(t.dir_fd, "disk", 2, &err), 2);
	reopen();
	check_disk();
}

// Each call of it fails, once or from there on, as in a crash: the disk is what it was, and the
// next one comes to its end.
static void a_merge_that_fails_loses_nothing(void **state)
{
	unsigned int failures = 0;

	(void)state;
	for (unsigned int mode = 0; mode < 2; mode++) {
		bool failed = true;

		for (unsigned int nth = 1; failed; nth++) {
			struct err err = {0};
			int r;

			assert_true(nth < 60);
			make_layers(nth);
			overlay_close(t.ov);
			t.ov = NULL;
			memset(&fail, 0, sizeof(fail));
			fail.left = nth;
			fail.for_good = mode;
			r = overlay_merge(t.dir_fd, "disk", 2, &err);
			failed = fail.failed;
			failures += failed;
			memset(&fail, 0, sizeof(fail));
			assert_true(failed ? r < 0 && err.msg[0] : r > 0);
			reopen();
			check_disk();
			overlay_close(t.ov);
			t.ov = NULL;
			assert_true(overlay_merge(t.dir_fd, "disk", 2, &err) >= 0);
			reopen();
			check_disk();
		}
	}
	assert_true(failures > 10);
}

static void base_and_size_have_to_be_those_it_was_made_with(void **state)
{
	struct err err = {0};
	int fd;

	(void)state;
	fill(0, BLOCK, 1);
	assert_int_equal(try_open(&err), -EBUSY); // while it is open
	overlay_close(t.ov);
	t.ov = NULL;
	t.params.size_bytes = DISK_BYTES + BLOCK;
	assert_int_equal(try_open(&err), -EINVAL);
	assert_non_null(strstr(err.msg, "1024K"));
	t.params.size_bytes = BASE_BYTES - 1;
	assert_int_equal(try_open(&err), -EINVAL);
	t.params.size_bytes = 0; // as it is
	t.params.base_fd = -1;
	assert_int_equal(try_open(&err), -EINVAL);
	t.params.size_bytes = DISK_BYTES;
	assert_int_equal(try_open(&err), -ESTALE);
	assert_non_null(strstr(err.msg, "none is named"));
	t.params.size_bytes = 0;
	t.params.base_fd = 0;
	fd = openat(t.dir_fd, "base.img", O_RDWR | O_CLOEXEC);
	assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
	assert_int_equal(try_open(&err), -EBUSY);
	assert_int_equal(flock(fd, LOCK_UN), 0);
	// The base has been mounted, or was another file: its size stays, its beginning does not.
	assert_int_equal(pwrite(fd, "x", 1, 1100), 1);
	assert_int_equal(try_open(&err), -ESTALE);
	assert_non_null(strstr(err.msg, "another base"));
	assert_int_equal(pwrite(fd, &(uint8_t){base_byte(1100)}, 1, 1100), 1);
	reopen();
	check_disk();
	overlay_close(t.ov);
	t.ov = NULL;
	assert_int_equal(ftruncate(fd, BASE_BYTES + 512), 0);
	assert_int_equal(try_open(&err), -ESTALE);
	close(fd);
}

static uint64_t header_sum(const uint8_t *data)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < 504; i += 8) {
		sum = (sum ^ get_le64(data + i)) * 0x9e3779b97f4a7c15ULL;
		sum ^= sum >> 32;
	}
	return sum;
}

// Changes bytes of a file's header, and mends its checksum.
static void spoil(const char *path, unsigned int at, uint64_t val, unsigned int len, bool mend)
{
	uint8_t header[512], le[8];
	int fd = openat(t.dir_fd, path, O_RDWR | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(fd_pread_full(fd, header, sizeof(header), 0), sizeof(header));
	put_le64(le, val);
	memcpy(header + at, le, len);
	if (mend)
		put_le64(header + 504, header_sum(header));
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	close(fd);
}

static void files_that_lie_are_refused(void **state)
{
	static const struct {
		unsigned int at;
		uint64_t val;
		unsigned int len;
		bool mend;
		const char *says;
	} lies[] = {
		{0, 'M', 1, true, "not a mayfly overlay"},
		{8, 2, 4, true, "version 2"},
		{20, 1, 1, false, "checksum"},
		{12, 2, 4, true, "no sense"}, // flags
		{16, 0, 8, true, "no sense"}, // size
		{16, DISK_BYTES - 512, 8, true, "no sense"},
		{16, DISK_BYTES + BLOCK, 8, true, "not what it should have"},
		{16, 1ULL << 63, 8, true, "no sense"},
		{16, UINT64_MAX, 8, true, "no sense"},
		{40, 77, 8, true, "No such file"}, // parent
		{56, BASE_BYTES + 1, 8, true, "another base"},
		{56, 0, 8, true, "another base"},
		{64, 1, 8, true, "another base"},
		{72, 1, 1, true, "no sense"}, // reserved
		{503, 1, 1, true, "no sense"},
	};
	static const struct {
		unsigned int at;
		uint8_t val;
	} maps[] = {{0, 3}, {0, 0xc0}, {BLOCKS / 4, 1}, {BLOCKS / 4 + 100, 0x80}, {BLOCK - 1, 2}};
	uint8_t header[512];
	struct stat st;
	struct err err = {0};
	int fd;

	(void)state;
	fill(0, BLOCK, 1);
	overlay_close(t.ov);
	t.ov = NULL;
	fd = openat(t.dir_fd, "disk.overlay", O_RDWR | O_CLOEXEC);
	assert_int_equal(fd_pread_full(fd, header, sizeof(header), 0), sizeof(header));
	for (unsigned int i = 0; i < ARRAY_SIZE(lies); i++) {
		t.params.size_bytes = 0;
		spoil("disk.overlay", lies[i].at, lies[i].val, lies[i].len, lies[i].mend);
		if (try_open(&err) >= 0)
			fail_msg("lie %u was believed", i);
		if (!strstr(err.msg, lies[i].says))
			fail_msg("'%s' does not say '%s'", err.msg, lies[i].says);
		assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(maps); i++) {
		uint8_t was;

		assert_int_equal(pread(fd, &was, 1, MAP_OFF + maps[i].at), 1);
		assert_int_equal(pwrite(fd, &maps[i].val, 1, MAP_OFF + maps[i].at), 1);
		assert_int_equal(try_open(&err), -EUCLEAN);
		assert_non_null(strstr(err.msg, "map makes no sense"));
		assert_int_equal(pwrite(fd, &was, 1, MAP_OFF + maps[i].at), 1);
	}
	assert_int_equal(fstat(fd, &st), 0);
	for (off_t bytes = st.st_size - 1;; bytes /= 3) {
		assert_int_equal(ftruncate(fd, bytes), 0);
		assert_int_equal(try_open(&err), -EUCLEAN);
		if (!bytes)
			break;
	}
	close(fd);
	assert_int_equal(unlinkat(t.dir_fd, "disk.overlay", 0), 0);
	assert_int_equal(mkdirat(t.dir_fd, "disk.overlay", 0700), 0);
	assert_true(try_open(&err) < 0);
	assert_int_equal(unlinkat(t.dir_fd, "disk.overlay", AT_REMOVEDIR), 0);
	assert_int_equal(mkfifoat(t.dir_fd, "disk.overlay", 0600), 0);
	assert_int_equal(try_open(&err), -EUCLEAN);
	assert_int_equal(unlinkat(t.dir_fd, "disk.overlay", 0), 0);
	memset(t.disk, 0, sizeof(t.disk));
	for (size_t i = 0; i < BASE_BYTES; i++)
		t.disk[i] = base_byte(i);
	t.params.size_bytes = DISK_BYTES;
	reopen();
	check_disk();
}

static void layers_that_lie_are_refused(void **state)
{
	char names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES], path[64];
	uint8_t header[512];
	struct err err = {0};
	int fd;

	(void)state;
	fill(0, BLOCK, 1);
	assert_int_equal(overlay_freeze(t.ov, &err), 0);
	overlay_frozen(t.ov, names);
	overlay_close(t.ov);
	t.ov = NULL;
	snprintf(path, sizeof(path), "layers/%s", names[0]);
	assert_int_equal(fchmodat(t.dir_fd, path, 0600, 0), 0);
	fd = openat(t.dir_fd, path, O_RDWR | O_CLOEXEC);
	assert_int_equal(fd_pread_full(fd, header, sizeof(header), 0), sizeof(header));
	spoil(path, 12, 0, 4, true); // not frozen
	assert_int_equal(try_open(&err), -EUCLEAN);
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	spoil(path, 24, 1, 8, true); // another's id
	assert_int_equal(try_open(&err), -EUCLEAN);
	assert_non_null(strstr(err.msg, "named after"));
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	spoil(path, 64, 1, 8, true); // another base's
	assert_int_equal(try_open(&err), -ESTALE);
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	// Its own parent: it ends.
	memcpy(header + 40, header + 24, 16);
	put_le64(header + 504, header_sum(header));
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	assert_int_equal(try_open(&err), -EMLINK);
	memset(header + 40, 0, 16);
	put_le64(header + 504, header_sum(header));
	assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
	close(fd);
	reopen();
	check_disk();
}

static void opening_fails_without_a_leak(void **state)
{
	struct err err = {0};
	bool failed = true;

	(void)state;
	for (unsigned int kind = 0; kind < 2; kind++, failed = true) {
		for (unsigned int nth = 1; failed; nth++) {
			overlay_close(t.ov);
			t.ov = NULL;
			if (kind)
				unlinkat(t.dir_fd, "disk.overlay", 0);
			fail.left = nth;
			if (try_open(&err) < 0) {
				assert_true(fail.failed);
				assert_true(err.code == -ENOSPC || err.code == -ENOMEM);
			}
			failed = fail.failed;
			memset(&fail, 0, sizeof(fail));
			if (!t.ov)
				reopen();
			check_disk();
		}
	}
}

static unsigned int count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	unsigned int nr = 0;

	assert_non_null(dir);
	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr;
}

static void leaves_no_descriptor_behind(void **state)
{
	const unsigned int before = count_fds();
	struct err err = {0};

	(void)state;
	for (unsigned int i = 0; i < 200; i++) {
		reopen();
		assert_int_equal(try_open(&err), -EBUSY);
		if (i % 20 != 0)
			continue;
		fill(0, BLOCK, (uint8_t)i);
		assert_int_equal(overlay_freeze(t.ov, &err), 0);
	}
	// Ten frozen layers are open, which were not.
	assert_int_equal(count_fds(), before + 10);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(what_is_written_is_there_and_the_rest_is_the_bases),
		TEST(zeros_hide_the_base_and_give_room_back),
		TEST(a_quota_is_hard),
		TEST(frozen_layers_stay),
		TEST(layers_are_bounded),
		TEST(a_freeze_that_fails_loses_nothing),
		TEST(layers_are_merged),
		TEST(a_merge_that_fails_loses_nothing),
		TEST(base_and_size_have_to_be_those_it_was_made_with),
		TEST(files_that_lie_are_refused),
		TEST(layers_that_lie_are_refused),
		TEST(opening_fails_without_a_leak),
		TEST(leaves_no_descriptor_behind),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
