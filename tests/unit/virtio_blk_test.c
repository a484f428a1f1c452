// SPDX-License-Identifier: Apache-2.0
// devices/virtio_blk: what reaches the file is what the guest asked for, whatever the host does in
// part, late or not at all; and nothing beyond the disk's end.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_mmio.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/virtio_blk.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"
#include "tests/support/faulty_ring.h"
#include "vmm/base/fd.h"

#define SECTOR     512U
#define SECTORS    2048U // 1 MiB
#define DISK_BYTES (SECTORS * SECTOR)
#define RO_DISK    (1ULL << VIRTIO_BLK_F_RO)

static struct {
	struct fake_driver fake;
	char path[64];
	int file; // of our own, to look at what is there
	gpa_t hdr, status, data;
	struct virtio_blk_params params;
} t;

// --- The disk --------------------------------------------------------------------------------

static uint8_t pattern(uint64_t at)
{
	return (uint8_t)(at * 131 >> 5 ^ at >> 13);
}

static int create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	struct virtio_blk_params params = t.params;
	int r;

	params.fd = open(t.path, (params.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
	if (params.fd < 0)
		return -errno;
	r = virtio_blk_create(ret_dev, &params, env, err);
	if (r < 0)
		fd_close(&params.fd);
	return r;
}

static void attach(void)
{
	struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev;
	struct err err = {0};

	if (create(&dev, &env, &err) < 0)
		fail_msg("%s", err.msg);
	fake_attach(&t.fake, dev);
}

static void start(void)
{
	fake_start(&t.fake);
	t.hdr = fake_alloc(&t.fake, 2 * PAGE_BYTES);
	t.status = GPA(t.hdr.v + 256);
	t.data = fake_alloc(&t.fake, 2 * MIB);
}

static void make_file(void)
{
	static uint8_t disk[DISK_BYTES];

	snprintf(t.path, sizeof(t.path), "/tmp/mayfly-blk-XXXXXX");
	t.file = mkostemp(t.path, O_CLOEXEC);
	ASSERT(t.file >= 0);
	for (size_t i = 0; i < sizeof(disk); i++)
		disk[i] = pattern(i);
	ASSERT(fd_write_all(t.file, disk, sizeof(disk)) == 0);
}

static void setup_with(bool read_only, bool direct, unsigned int nr_queues)
{
	memset(&ring, 0, sizeof(ring));
	make_file();
	t.params = (struct virtio_blk_params){.read_only = read_only,
		.direct = direct,
		.nr_queues = nr_queues,
		.serial = "disk-serial",
		.name = t.path};
	fake_init(&t.fake);
	attach();
	start();
}

static int setup(void **state)
{
	(void)state;
	setup_with(false, false, 1);
	return 0;
}

static int setup_direct(void **state)
{
	(void)state;
	setup_with(false, true, 1);
	return 0;
}

static int setup_ro(void **state)
{
	(void)state;
	setup_with(true, false, 1);
	return 0;
}

static int setup_mq(void **state)
{
	(void)state;
	setup_with(false, false, 4);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&t.fake);
	fd_close(&t.file);
	unlink(t.path);
	for (unsigned int i = 0; i < PROXIES; i++)
		assert_false(ring.proxies[i].used);
	return 0;
}

static struct virtio_blk_stats stats(void)
{
	struct virtio_blk_stats s;

	virtio_blk_get_stats(t.fake.dev, &s);
	return s;
}

static void put_hdr(gpa_t at, uint32_t type, uint64_t sector)
{
	const struct virtio_blk_outhdr hdr = {.type = htole32(type), .sector = htole64(sector)};

	guest_mem_write(&t.fake.mem, at, &hdr, sizeof(hdr));
}

static bool has_used(void *opaque)
{
	const unsigned int queue = *(unsigned int *)opaque;
	uint8_t idx[2];

	guest_mem_read(&t.fake.mem, GPA(t.fake.queues[queue].used.v + 2), idx, 2);
	return get_le16(idx) != t.fake.queues[queue].used_idx;
}

static uint8_t wait_status(uint32_t *ret_written)
{
	unsigned int queue = 0;
	uint8_t status = 0xee;

	if (!fake_run_until(&t.fake, has_used, &queue))
		fail_msg("the request does not end");
	assert_true(fake_get_used(&t.fake, 0, NULL, ret_written));
	guest_mem_read(&t.fake.mem, t.status, &status, 1);
	return status;
}

// One request with the data in nr pieces of equal length, a page apart from each other.
static uint8_t request(uint32_t type, uint64_t sector, uint32_t bytes, unsigned int nr)
{
	struct fake_buf bufs[256];
	uint32_t written;
	uint8_t status;

	assert_true(nr + 2 <= ARRAY_SIZE(bufs));
	put_hdr(t.hdr, type, sector);
	guest_mem_write(&t.fake.mem, t.status, "\xee", 1);
	bufs[0] = (struct fake_buf){t.hdr, 16, false};
	for (unsigned int i = 0; i < nr; i++)
		bufs[1 + i] = (struct fake_buf){GPA(t.data.v + (uint64_t)i * 2 * (bytes / nr)),
			bytes / nr, type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID};
	bufs[nr + 1] = (struct fake_buf){t.status, 1, true};
	if (nr + 2 > 8)
		assert_true(fake_add_indirect(&t.fake, 0, bufs, nr + 2, GPA(t.hdr.v + 1024)) >= 0);
	else
		assert_true(fake_add(&t.fake, 0, bufs, nr + 2) >= 0);
	fake_kick(&t.fake, 0);
	status = wait_status(&written);
	assert_int_equal(written, type == VIRTIO_BLK_T_IN && status == VIRTIO_BLK_S_OK ? bytes + 1
				  : type == VIRTIO_BLK_T_GET_ID                        ? bytes + 1
										       : written);
	assert_true(written >= 1);
	return status;
}

// Fills the pieces, or compares them, with the pattern of another place.
static void data_fill(uint64_t from, uint32_t bytes, unsigned int nr)
{
	uint8_t piece[65536];

	for (unsigned int i = 0; i < nr; i++) {
		for (uint32_t k = 0; k < bytes / nr; k++)
			piece[k] = pattern(from + (uint64_t)i * (bytes / nr) + k);
		guest_mem_write(&t.fake.mem, GPA(t.data.v + (uint64_t)i * 2 * (bytes / nr)), piece,
			bytes / nr);
	}
}

static void data_check(uint64_t from, uint32_t bytes, unsigned int nr)
{
	uint8_t piece[65536];

	for (unsigned int i = 0; i < nr; i++) {
		guest_mem_read(&t.fake.mem, GPA(t.data.v + (uint64_t)i * 2 * (bytes / nr)), piece,
			bytes / nr);
		for (uint32_t k = 0; k < bytes / nr; k++)
			assert_int_equal(piece[k], pattern(from + (uint64_t)i * (bytes / nr) + k));
	}
}

static void file_check(uint64_t at, uint64_t from, uint32_t bytes)
{
	uint8_t *buf = malloc(bytes);

	assert_non_null(buf);
	assert_int_equal(fd_pread_full(t.file, buf, bytes, (off_t)at), bytes);
	for (uint32_t i = 0; i < bytes; i++)
		assert_int_equal(buf[i], pattern(from + i));
	free(buf);
}

// --- Tests -----------------------------------------------------------------------------------

static void reads_and_writes(void **state)
{
	static const struct {
		uint64_t sector;
		uint32_t bytes;
		unsigned int nr;
	} cases[] = {{0, SECTOR, 1}, {SECTORS - 1, SECTOR, 1}, {3, 4 * SECTOR, 4}, {8, 65536, 1},
		{64, 16 * SECTOR, 2}, {100, 254 * SECTOR, 254}, {0, 512 * KIB, 8},
		{5, 8 * SECTOR, 64}};

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(cases); i++) {
		const uint64_t at = cases[i].sector * SECTOR;
		const uint32_t bytes = cases[i].bytes;

		data_fill(7, bytes, cases[i].nr);
		assert_int_equal(request(VIRTIO_BLK_T_IN, cases[i].sector, bytes, cases[i].nr),
			VIRTIO_BLK_S_OK);
		data_check(at, bytes, cases[i].nr);
		data_fill(at + 99, bytes, cases[i].nr);
		assert_int_equal(request(VIRTIO_BLK_T_OUT, cases[i].sector, bytes, cases[i].nr),
			VIRTIO_BLK_S_OK);
		file_check(at, at + 99, bytes);
		data_fill(at, bytes, cases[i].nr);
		assert_int_equal(request(VIRTIO_BLK_T_OUT, cases[i].sector, bytes, cases[i].nr),
			VIRTIO_BLK_S_OK);
	}
	file_check(0, 0, DISK_BYTES); // and nowhere else
	assert_int_equal(stats().reads, ARRAY_SIZE(cases));
	assert_int_equal(stats().writes, 2 * ARRAY_SIZE(cases));
	assert_int_equal(stats().errors, 0);
}

// 2.7.4.3: the layout is the driver's to choose.
static void any_layout_of_descriptors(void **state)
{
	struct fake_buf bufs[] = {{t.hdr, 5, false}, {GPA(t.hdr.v + 5), 11 + 100, false},
		{GPA(t.hdr.v + 116), 412, false}, {t.status, 1, true}};
	uint8_t text[SECTOR + 16];

	(void)state;
	for (unsigned int i = 0; i < SECTOR; i++)
		text[16 + i] = pattern(12345 + i);
	guest_mem_write(&t.fake.mem, t.hdr, text, sizeof(text));
	put_hdr(t.hdr, VIRTIO_BLK_T_OUT, 10);
	bufs[3].gpa = GPA(t.hdr.v + 2048);
	fake_add(&t.fake, 0, bufs, 4);
	fake_kick(&t.fake, 0);
	wait_status(NULL);
	file_check(10 * SECTOR, 12345, SECTOR);

	// Read: data and status in one buffer.
	put_hdr(t.hdr, VIRTIO_BLK_T_IN, 10);
	bufs[0] = (struct fake_buf){t.hdr, 16, false};
	bufs[1] = (struct fake_buf){t.data, SECTOR + 1, true};
	guest_mem_write(&t.fake.mem, GPA(t.data.v + SECTOR), "\xee", 1);
	fake_add(&t.fake, 0, bufs, 2);
	fake_kick(&t.fake, 0);
	wait_status(NULL);
	guest_mem_read(&t.fake.mem, t.data, text, SECTOR + 1);
	assert_int_equal(text[SECTOR], VIRTIO_BLK_S_OK);
	data_check(12345, SECTOR, 1);
}

static void a_request_without_header_or_status_is_a_lie(void **state)
{
	const struct fake_buf no_status[] = {{t.hdr, 16, false}, {t.data, SECTOR, false}};
	const struct fake_buf no_header[] = {{t.hdr, 15, false}, {t.status, 1, true}};

	(void)state;
	put_hdr(t.hdr, VIRTIO_BLK_T_OUT, 0);
	fake_add(&t.fake, 0, no_status, 2);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	assert_int_equal(fake_status(&t.fake), 15 | 64);
	start();
	fake_add(&t.fake, 0, no_header, 2);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	assert_int_equal(fake_status(&t.fake), 15 | 64);
	file_check(0, 0, DISK_BYTES);
}

static void nothing_beyond_the_end(void **state)
{
	static const struct {
		uint64_t sector;
		uint32_t bytes;
	} bad[] = {{SECTORS, SECTOR}, {SECTORS - 1, 2 * SECTOR}, {UINT64_MAX, SECTOR},
		{1ULL << 55, SECTOR}, {(1ULL << 55) - 1, SECTOR}, {1ULL << 63, SECTOR},
		{UINT64_MAX - 1, 2 * SECTOR}, {0, SECTOR - 1}, {0, SECTOR + 1}, {0, 1},
		{SECTORS + 1, SECTOR}};
	struct stat st;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		assert_int_equal(request(VIRTIO_BLK_T_IN, bad[i].sector, bad[i].bytes, 1),
			VIRTIO_BLK_S_IOERR);
		assert_int_equal(request(VIRTIO_BLK_T_OUT, bad[i].sector, bad[i].bytes, 1),
			VIRTIO_BLK_S_IOERR);
	}
	assert_int_equal(request(VIRTIO_BLK_T_IN, 0, 0, 0 + 1), VIRTIO_BLK_S_IOERR);
	assert_int_equal(fstat(t.file, &st), 0);
	assert_int_equal(st.st_size, DISK_BYTES);
	file_check(0, 0, DISK_BYTES);
	assert_int_equal(ring.nr_ops, 0);
}

static void other_requests(void **state)
{
	char id[24] = {0};

	(void)state;
	assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0, 0), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().flushes, 1);
	assert_int_equal(request(VIRTIO_BLK_T_GET_ID, 0, 20, 1), VIRTIO_BLK_S_OK);
	guest_mem_read(&t.fake.mem, t.data, id, 20);
	assert_string_equal(id, "disk-serial");
	guest_mem_write(&t.fake.mem, t.data, "0123456789", 10);
	assert_int_equal(request(VIRTIO_BLK_T_GET_ID, 0, 4, 1), VIRTIO_BLK_S_OK);
	guest_mem_read(&t.fake.mem, t.data, id, 10);
	assert_memory_equal(id, "disk456789", 10);
	for (uint32_t type = 0; type < 64; type++) {
		if (type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_OUT ||
			type == VIRTIO_BLK_T_FLUSH || type == VIRTIO_BLK_T_GET_ID ||
			type == VIRTIO_BLK_T_DISCARD || type == VIRTIO_BLK_T_WRITE_ZEROES)
			continue;
		assert_int_equal(request(type, 0, SECTOR, 1), VIRTIO_BLK_S_UNSUPP);
	}
	assert_int_equal(request(1U << 31, 0, SECTOR, 1), VIRTIO_BLK_S_UNSUPP);
}

static void put_range(uint64_t sector, uint32_t sectors, uint32_t flags)
{
	const struct virtio_blk_discard_write_zeroes range = {
		htole64(sector), htole32(sectors), htole32(flags)};

	guest_mem_write(&t.fake.mem, t.data, &range, sizeof(range));
}

static bool is_zero(uint64_t at, size_t bytes)
{
	uint8_t *buf = malloc(bytes);
	bool zero = true;

	assert_non_null(buf);
	assert_int_equal(fd_pread_full(t.file, buf, bytes, (off_t)at), bytes);
	for (size_t i = 0; i < bytes; i++)
		zero &= buf[i] == 0;
	free(buf);
	return zero;
}

static void discard_and_write_zeroes(void **state)
{
	struct stat before, after;

	(void)state;
	assert_int_equal(fsync(t.file), 0);
	assert_int_equal(fstat(t.file, &before), 0);
	put_range(256, 512, 0);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16, 1), VIRTIO_BLK_S_OK);
	assert_true(is_zero(256 * SECTOR, 512 * SECTOR));
	file_check(0, 0, 256 * SECTOR);
	file_check(768 * SECTOR, 768 * SECTOR, 256 * SECTOR);
	assert_int_equal(fstat(t.file, &after), 0);
	assert_int_equal(after.st_size, DISK_BYTES);
	assert_true(after.st_blocks < before.st_blocks); // given back to the host
	put_range(1, 3, 0);
	assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_OK);
	assert_true(is_zero(SECTOR, 3 * SECTOR));
	put_range(1024, 64, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP);
	assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_OK);
	assert_true(is_zero(1024 * SECTOR, 64 * SECTOR));
	// A file that can only be punched.
	fault(FAULT_RESULT, 1, -EOPNOTSUPP);
	put_range(1500, 8, 0);
	assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_OK);
	assert_int_equal(ring.nr_faults, 1);
	assert_true(is_zero(1500 * SECTOR, 8 * SECTOR));
	fault(FAULT_RESULT, 1, -EOPNOTSUPP);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16, 1), VIRTIO_BLK_S_UNSUPP);
	// Flags that are not there; ranges that are not on the disk; none, or more than one.
	put_range(0, 8, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16, 1), VIRTIO_BLK_S_UNSUPP);
	put_range(0, 8, 2);
	assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_UNSUPP);
	static const struct {
		uint64_t sector;
		uint32_t sectors;
	} bad[] = {{SECTORS, 1}, {SECTORS - 1, 2}, {UINT64_MAX, 1}, {1ULL << 55, 1}, {0, 0},
		{0, UINT32_MAX}, {1, SECTORS}};

	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		put_range(bad[i].sector, bad[i].sectors, 0);
		assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16, 1), VIRTIO_BLK_S_IOERR);
		assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_IOERR);
	}
	put_range(0, 1, 0);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 15, 1), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 32, 1), VIRTIO_BLK_S_IOERR);
	file_check(0, 0, SECTOR);
}

static void a_read_only_disk_stays_as_it_is(void **state)
{
	const uint64_t features = fake_device_features(&t.fake);

	(void)state;
	assert_true(features & RO_DISK);
	assert_false(features & (1ULL << VIRTIO_BLK_F_FLUSH | 1ULL << VIRTIO_BLK_F_DISCARD |
					1ULL << VIRTIO_BLK_F_WRITE_ZEROES));
	assert_int_equal(request(VIRTIO_BLK_T_IN, 4, 4096, 1), VIRTIO_BLK_S_OK);
	data_check(4 * SECTOR, 4096, 1);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 4, 4096, 1), VIRTIO_BLK_S_IOERR);
	put_range(0, 8, 0);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16, 1), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_IOERR);
	file_check(0, 0, DISK_BYTES);
}

// The host does a part, at every point of a request, and the rest is not forgotten.
static void partial_operations_are_continued(void **state)
{
	static const enum fault kinds[] = {FAULT_HALF, FAULT_FIRST};
	const uint32_t bytes = 8 * 4096;
	const unsigned int nr = 8;

	(void)state;
	for (unsigned int kind = 0; kind < ARRAY_SIZE(kinds); kind++) {
		for (unsigned int times = 1; times <= 20; times++) {
			const uint64_t from = 4096 + kind * 1000 + times;

			data_fill(1, bytes, nr);
			fault(kinds[kind], times, 0);
			assert_int_equal(request(VIRTIO_BLK_T_IN, 16, bytes, nr), VIRTIO_BLK_S_OK);
			data_check(16 * SECTOR, bytes, nr);
			data_fill(from, bytes, nr);
			fault(kinds[kind], times, 0);
			assert_int_equal(
				request(VIRTIO_BLK_T_OUT, 512, bytes, nr), VIRTIO_BLK_S_OK);
			file_check(512 * SECTOR, from, bytes);
		}
	}
	assert_true(stats().continued > 200);
	file_check(0, 0, 512 * SECTOR);
	file_check(512 * SECTOR + bytes, 512 * SECTOR + bytes, DISK_BYTES - 512 * SECTOR - bytes);
}

static void errors_are_the_guests(void **state)
{
	static const int again[] = {-EAGAIN, -EINTR};
	static const int fatal[] = {-EIO, -ENOSPC, -EFAULT, -EDQUOT, -ECANCELED};

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(again); i++) {
		fault(FAULT_RESULT, 3, again[i]);
		assert_int_equal(request(VIRTIO_BLK_T_IN, 8, 8192, 2), VIRTIO_BLK_S_OK);
		data_check(8 * SECTOR, 8192, 2);
		assert_int_equal(ring.times, 0);
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(fatal); i++) {
		fault(FAULT_RESULT, 1, fatal[i]);
		assert_int_equal(request(VIRTIO_BLK_T_OUT, 8, 8192, 2), VIRTIO_BLK_S_IOERR);
		fault(FAULT_RESULT, 1, fatal[i]);
		assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0, 0), VIRTIO_BLK_S_IOERR);
	}
	// In the middle of a request.
	fault(FAULT_FIRST, 1, 0);
	ring.times = 1;
	assert_int_equal(request(VIRTIO_BLK_T_IN, 8, 8192, 2), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().errors, 2 * ARRAY_SIZE(fatal));
	// The file is shorter than it was.
	assert_int_equal(ftruncate(t.file, 8 * SECTOR + 100), 0);
	assert_int_equal(request(VIRTIO_BLK_T_IN, 8, 8192, 2), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_IN, 100, 8192, 2), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_IN, 0, 512, 1), VIRTIO_BLK_S_OK);
}

static void direct_where_it_is_aligned(void **state)
{
	(void)state;
	assert_int_equal(request(VIRTIO_BLK_T_IN, 8, 8192, 2), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().buffered, 0);
	data_check(8 * SECTOR, 8192, 2);
	data_fill(55, 8192, 2);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 8, 8192, 2), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().buffered, 0);
	file_check(8 * SECTOR, 55, 8192);
	// A sector, and buffers that are not at a page: through the cache, and coherent with it.
	assert_int_equal(request(VIRTIO_BLK_T_IN, 9, 512, 1), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().buffered, 1);
	data_check(55 + 512, 512, 1);
	data_fill(77, 512, 1);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 9, 512, 1), VIRTIO_BLK_S_OK);
	assert_int_equal(request(VIRTIO_BLK_T_IN, 8, 4096, 1), VIRTIO_BLK_S_OK);
	assert_int_equal(stats().buffered, 2);
	t.data.v += 512;
	data_check(77, 512, 1);
	t.data.v -= 512;
	// A part leaves a rest that is not aligned.
	fault(FAULT_HALF, 1, 0);
	data_fill(99, 4096, 1);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 64, 4096, 1), VIRTIO_BLK_S_OK);
	file_check(64 * SECTOR, 99, 4096);
}

static void read_pages_are_marked(void **state)
{
	uint64_t bitmap[FAKE_RAM_BYTES / PAGE_BYTES / 64] = {0};
	const uint64_t page = t.data.v / PAGE_BYTES;
	uint64_t data_pages = 0;

	(void)state;
	assert_int_equal(guest_mem_track_start(&t.fake.mem, NULL), 0);
	fault(FAULT_FIRST, 1, 0);
	put_hdr(t.hdr, VIRTIO_BLK_T_IN, 0);
	const struct fake_buf bufs[] = {{t.hdr, 16, false}, {t.data, 4096, true},
		{GPA(t.data.v + 4 * PAGE_BYTES + 1024), 4096, true}, {t.status, 1, true}};

	fake_add(&t.fake, 0, bufs, 4);
	guest_mem_track_collect(&t.fake.mem, bitmap);
	memset(bitmap, 0, sizeof(bitmap));
	fake_kick(&t.fake, 0);
	assert_int_equal(wait_status(NULL), VIRTIO_BLK_S_OK);
	guest_mem_track_collect(&t.fake.mem, bitmap);
	for (uint64_t i = 0; i < 8; i++)
		data_pages |= (bitmap[(page + i) / 64] >> (page + i) % 64 & 1) << i;
	assert_int_equal(data_pages, 0x31); // pages 0, 4 and 5
	assert_true(bitmap[t.status.v / PAGE_BYTES / 64] >> t.status.v / PAGE_BYTES % 64 & 1);
	guest_mem_track_stop(&t.fake.mem);
}

// Queues it with its own header and status at slot.
static void add_read(unsigned int queue, unsigned int slot, uint64_t sector)
{
	const gpa_t hdr = GPA(t.data.v + 1 * MIB + (uint64_t)slot * 64);
	const struct fake_buf bufs[] = {{hdr, 16, false},
		{GPA(t.data.v + (uint64_t)slot * SECTOR), SECTOR, true},
		{GPA(hdr.v + 32), 1, true}};

	put_hdr(hdr, VIRTIO_BLK_T_IN, sector);
	guest_mem_write(&t.fake.mem, bufs[2].gpa, "\xee", 1);
	assert_true(fake_add(&t.fake, queue, bufs, 3) >= 0);
}

static void many_at_once_cost_one_interrupt(void **state)
{
	unsigned int nr = 0;

	(void)state;
	for (unsigned int slot = 0; slot < 80; slot++)
		add_read(0, slot, slot);
	fake_want_irq(&t.fake, 0);
	fake_irqs(&t.fake);
	fault(FAULT_HOLD, 80, 0);
	fake_kick(&t.fake, 0);
	while (stats().in_flight < 80)
		fake_run(&t.fake);
	for (unsigned int held = 0; held < 80;) {
		fake_run(&t.fake);
		held = 0;
		for (unsigned int i = 0; i < PROXIES; i++)
			held += ring.proxies[i].held;
	}
	assert_int_equal(fake_irqs(&t.fake), 0);
	release_held();
	fake_run(&t.fake);
	assert_int_equal(fake_irqs(&t.fake), 1);
	while (fake_get_used(&t.fake, 0, NULL, NULL))
		nr++;
	assert_int_equal(nr, 80);
	for (unsigned int slot = 0; slot < 80; slot++) {
		uint8_t status, byte;

		guest_mem_read(&t.fake.mem, GPA(t.data.v + 1 * MIB + (uint64_t)slot * 64 + 32),
			&status, 1);
		assert_int_equal(status, VIRTIO_BLK_S_OK);
		guest_mem_read(&t.fake.mem, GPA(t.data.v + (uint64_t)slot * SECTOR + 9), &byte, 1);
		assert_int_equal(byte, pattern(slot * SECTOR + 9));
	}
}

static struct loop_timer release_timer;

static void on_release(struct loop_timer *timer)
{
	(void)timer;
	release_held();
}

static void release_later(void)
{
	release_timer = (struct loop_timer){.fire = on_release};
	loop_timer_set(&t.fake.loop, &release_timer, now_ns() + 20000000);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static bool flag(void *opaque)
{
	return *(bool *)opaque;
}

// CVE-2026-45782's kind: the buffers are the driver's again only when nothing uses them.
static void reset_drain_and_destroy_wait_for_what_is_in_flight(void **state)
{
	bool drained = false;

	(void)state;
	fault(FAULT_HOLD, 10, 0);
	for (unsigned int slot = 0; slot < 10; slot++)
		add_read(0, slot, slot);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	assert_int_equal(stats().in_flight, 10);
	release_later();
	fake_write(&t.fake, VIRTIO_MMIO_STATUS, 0);
	assert_int_equal(stats().in_flight, 0);
	assert_int_equal(fake_status(&t.fake), 0);

	start();
	fault(FAULT_HOLD, 1, 0);
	add_read(0, 0, 0);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	add_read(0, 1, 1);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	assert_false(drained);
	assert_int_equal(stats().in_flight, 1);
	release_held();
	assert_true(fake_run_until(&t.fake, flag, &drained));
	assert_true(fake_get_used(&t.fake, 0, NULL, NULL));
	assert_false(fake_get_used(&t.fake, 0, NULL, NULL));
	virtio_dev_resume(t.fake.dev);
	assert_int_equal(wait_status(NULL), 0);

	fault(FAULT_HOLD, 5, 0);
	for (unsigned int slot = 0; slot < 5; slot++)
		add_read(0, slot, slot);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	release_later();
	fake_detach(&t.fake);
	for (unsigned int i = 0; i < PROXIES; i++)
		assert_false(ring.proxies[i].used);
	fake_run(&t.fake);
}

static bool all_used(void *opaque)
{
	unsigned int *nr = opaque;

	while (fake_get_used(&t.fake, 0, NULL, NULL))
		++*nr;
	return *nr >= 15;
}

static int restore_from(const struct buf *saved, struct err *err)
{
	virtio_dev_destroy(TAKE_PTR(t.fake.dev));
	attach();
	return virtio_dev_restore(t.fake.dev, saved->data, saved->len, err);
}

// Saved with requests under way and others waiting: each is done once, before or after. And the
// disk beneath has to be the one that the guest knows.
static void no_request_is_lost_in_a_restore(void **state)
{
	bool drained = false;
	unsigned int nr = 0;
	struct buf saved = {0};
	struct err err = {0};

	(void)state;
	fault(FAULT_HOLD, 10, 0);
	for (unsigned int slot = 0; slot < 10; slot++)
		add_read(0, slot, slot);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	for (unsigned int slot = 10; slot < 15; slot++)
		add_read(0, slot, slot);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	assert_false(drained);
	release_held();
	assert_true(fake_run_until(&t.fake, flag, &drained));
	assert_int_equal(virtio_dev_save(t.fake.dev, &saved), 0);
	if (restore_from(&saved, &err) < 0)
		fail_msg("%s", err.msg);
	fake_run(&t.fake);
	assert_false(all_used(&nr));
	assert_int_equal(nr, 10);
	virtio_dev_resume(t.fake.dev);
	assert_true(fake_run_until(&t.fake, all_used, &nr));
	assert_int_equal(nr, 15);
	for (unsigned int slot = 0; slot < 15; slot++) {
		uint8_t status, byte;

		guest_mem_read(&t.fake.mem, GPA(t.data.v + 1 * MIB + (uint64_t)slot * 64 + 32),
			&status, 1);
		assert_int_equal(status, VIRTIO_BLK_S_OK);
		guest_mem_read(&t.fake.mem, GPA(t.data.v + (uint64_t)slot * SECTOR + 9), &byte, 1);
		assert_int_equal(byte, pattern(slot * SECTOR + 9));
	}
	t.params.serial = "another-disk";
	assert_int_equal(restore_from(&saved, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "blk: serial: not what this one was made with"));
	t.params.serial = "disk-serial";
	assert_int_equal(ftruncate(t.file, DISK_BYTES / 2), 0);
	assert_int_equal(restore_from(&saved, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "blk: capacity_sectors: not what"));
	buf_fini(&saved);
}

// The driver has lied while requests are in flight: they end, into memory that is still there.
static void a_lie_while_requests_are_in_flight(void **state)
{
	(void)state;
	fault(FAULT_HOLD, 3, 0);
	for (unsigned int slot = 0; slot < 3; slot++)
		add_read(0, slot, slot);
	fake_kick(&t.fake, 0);
	fake_run(&t.fake);
	fake_put_avail(&t.fake, 0, 0); // the head of the first, which is in flight
	fake_write(&t.fake, VIRTIO_MMIO_QUEUE_NOTIFY, 0);
	fake_run(&t.fake);
	assert_int_equal(fake_status(&t.fake), 15 | 64);
	release_held();
	fake_run(&t.fake);
	assert_int_equal(stats().in_flight, 0);
	start();
	assert_int_equal(request(VIRTIO_BLK_T_IN, 0, SECTOR, 1), VIRTIO_BLK_S_OK);
}

static void several_queues(void **state)
{
	(void)state;
	assert_int_equal(t.fake.dev->nr_queues, 4);
	assert_true(fake_device_features(&t.fake) & 1ULL << VIRTIO_BLK_F_MQ);
	for (unsigned int queue = 0; queue < 4; queue++) {
		for (unsigned int i = 0; i < 10; i++)
			add_read(queue, queue * 10 + i, queue * 10 + i);
		fake_kick(&t.fake, queue);
	}
	for (unsigned int queue = 0; queue < 4; queue++) {
		for (unsigned int i = 0; i < 10; i++) {
			assert_true(fake_run_until(&t.fake, has_used, &queue));
			assert_true(fake_get_used(&t.fake, queue, NULL, NULL));
		}
	}
	for (unsigned int slot = 0; slot < 40; slot++) {
		uint8_t byte;

		guest_mem_read(&t.fake.mem, GPA(t.data.v + (uint64_t)slot * SECTOR + 3), &byte, 1);
		assert_int_equal(byte, pattern(slot * SECTOR + 3));
	}
}

// Random requests, of which the host does some in part, against a copy of the disk.
static void a_thousand_random_requests(void **state)
{
	static uint8_t disk[DISK_BYTES], back[DISK_BYTES];
	uint32_t seed = 7;

	(void)state;
	for (size_t i = 0; i < sizeof(disk); i++)
		disk[i] = pattern(i);
	for (unsigned int i = 0; i < 1000; i++) {
		const unsigned int nr = 1 + (seed = seed * 1664525 + 1013904223) / 7 % 16;
		const uint32_t bytes = nr * SECTOR * (1 + seed / 1024 % 8);
		const uint64_t sector = (seed >> 3) % (SECTORS - bytes / SECTOR + 1);
		const uint64_t from = seed >> 7;

		if (seed % 5 == 0)
			fault(seed % 2 ? FAULT_HALF : FAULT_FIRST, 1 + seed % 4, 0);
		if (seed >> 30 == 0) {
			put_range(sector, bytes / SECTOR, 0);
			assert_int_equal(
				request(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16, 1), VIRTIO_BLK_S_OK);
			memset(disk + sector * SECTOR, 0, bytes);
		} else if (seed >> 30 == 1) {
			data_fill(from, bytes, nr);
			assert_int_equal(
				request(VIRTIO_BLK_T_OUT, sector, bytes, nr), VIRTIO_BLK_S_OK);
			for (uint32_t k = 0; k < bytes; k++)
				disk[sector * SECTOR + k] = pattern(from + k);
		} else {
			assert_int_equal(
				request(VIRTIO_BLK_T_IN, sector, bytes, nr), VIRTIO_BLK_S_OK);
			for (unsigned int p = 0; p < nr; p++) {
				guest_mem_read(&t.fake.mem,
					GPA(t.data.v + (uint64_t)p * 2 * (bytes / nr)), back,
					bytes / nr);
				assert_memory_equal(back,
					disk + sector * SECTOR + (uint64_t)p * (bytes / nr),
					bytes / nr);
			}
		}
	}
	assert_int_equal(fd_pread_full(t.file, back, sizeof(back), 0), sizeof(back));
	assert_memory_equal(disk, back, sizeof(disk));
}

static void a_file_is_one_writers_or_all_readers(void **state)
{
	struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev, *dev2;
	struct err err = {0};

	(void)state;
	assert_int_equal(create(&dev, &env, &err), -EBUSY);
	assert_non_null(strstr(err.msg, t.path));
	t.params.read_only = true;
	assert_int_equal(create(&dev, &env, &err), -EBUSY);
	fake_detach(&t.fake);
	assert_int_equal(create(&dev, &env, &err), 0);
	assert_int_equal(create(&dev2, &env, &err), 0);
	t.params.read_only = false;
	struct virtio_dev *dev3;

	assert_int_equal(create(&dev3, &env, &err), -EBUSY);
	virtio_dev_destroy(dev);
	virtio_dev_destroy(dev2);
	assert_int_equal(ftruncate(t.file, 511), 0);
	assert_int_equal(create(&dev, &env, &err), -EINVAL);
	assert_int_equal(ftruncate(t.file, 512 + 511), 0);
	assert_int_equal(create(&dev, &env, &err), 0);
	fake_attach(&t.fake, dev);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), 1); // whole sectors
}

#define WITH(fn, setup_fn) cmocka_unit_test_setup_teardown(fn, setup_fn, teardown)

int main(void)
{
	static const struct device_case device = {
		.name = "blk", .device_id = VIRTIO_ID_BLOCK, .eager_queues = 1, .create = create};
	const struct CMUnitTest tests[] = {
		WITH(reads_and_writes, setup),
		WITH(reads_and_writes, setup_direct),
		WITH(any_layout_of_descriptors, setup),
		WITH(a_request_without_header_or_status_is_a_lie, setup),
		WITH(nothing_beyond_the_end, setup),
		WITH(other_requests, setup),
		WITH(discard_and_write_zeroes, setup),
		WITH(a_read_only_disk_stays_as_it_is, setup_ro),
		WITH(partial_operations_are_continued, setup),
		WITH(partial_operations_are_continued, setup_direct),
		WITH(errors_are_the_guests, setup),
		WITH(direct_where_it_is_aligned, setup_direct),
		WITH(read_pages_are_marked, setup),
		WITH(many_at_once_cost_one_interrupt, setup),
		WITH(reset_drain_and_destroy_wait_for_what_is_in_flight, setup),
		WITH(no_request_is_lost_in_a_restore, setup),
		WITH(a_lie_while_requests_are_in_flight, setup),
		WITH(several_queues, setup_mq),
		WITH(a_thousand_random_requests, setup),
		WITH(a_thousand_random_requests, setup_direct),
		WITH(a_file_is_one_writers_or_all_readers, setup),
	};
	int failed;

	make_file();
	t.params = (struct virtio_blk_params){.nr_queues = 1, .serial = "", .name = t.path};
	failed = device_suite(&device);
	fd_close(&t.file);
	unlink(t.path);
	return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
