// SPDX-License-Identifier: Apache-2.0
// virtio_blk on an overlay: what the guest asked for, whatever the host does in part, late or not
// at all, however many write to one block at once; and what it has flushed, wherever the power is
// cut.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_ids.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "devices/virtio_blk.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"
#include "tests/support/faulty_ring.h"
#include "vmm/base/fd.h"

#define SECTOR      512U
#define BLOCK       4096U
#define BLOCK_SECS  (BLOCK / SECTOR)
#define BLOCKS      40000U // three blocks of the map
#define BASE_SECS   (12U * BLOCK_SECS + 3U) // ends within a block
#define AREAS       4U
#define AREA_BLOCKS 24U
#define AREA_SECS   (AREA_BLOCKS * BLOCK_SECS)
#define SECS        (AREAS * AREA_SECS) // that the test looks at
#define SLOTS       16U
#define SLOT_BYTES  (128U * 1024U)
#define RQ_SECS_MAX 64U

// Where the areas are: the beginning, on both sides of where the map's blocks end, the end.
static const uint64_t area_block[AREAS] = {
	0, 16384 - AREA_BLOCKS / 2, 2 * 16384 - AREA_BLOCKS / 2, BLOCKS - AREA_BLOCKS};

static struct {
	struct fake_driver fake;
	char path[64];
	int dir_fd, cut_fd;
	bool throwaway;
	uint64_t quota_bytes;
	gpa_t slots;
	uint32_t now[SECS]; // which version each sector has; 0: zeros, 1: the base's
	uint32_t versions;
	uint32_t seed;
} t;

static uint32_t rnd(uint32_t below)
{
	t.seed = t.seed * 1664525 + 1013904223;
	return (uint32_t)((uint64_t)(t.seed >> 4) * below >> 28);
}

static uint64_t sector_of(uint32_t idx)
{
	return area_block[idx / AREA_SECS] * BLOCK_SECS + idx % AREA_SECS;
}

static void fill_sector(uint8_t *out, uint64_t sector, uint32_t version)
{
	for (unsigned int i = 0; i < SECTOR; i += 8)
		put_le64(out + i, version ? (uint64_t)version << 40 | sector << 8 | i / 8 : 0);
}

static uint32_t version_of(const uint8_t *data, uint64_t sector)
{
	uint8_t want[SECTOR];
	uint32_t version = (uint32_t)(get_le64(data) >> 40);

	fill_sector(want, sector, version);
	return memcmp(want, data, SECTOR) == 0 ? version : UINT32_MAX;
}

static int open_overlay(struct overlay **ret_ov, int dir_fd, struct err *err)
{
	struct overlay_params params = {.dir_fd = dir_fd,
		.disk = "disk",
		.base_fd = openat(t.dir_fd, "base.img", O_RDONLY | O_CLOEXEC),
		.base_name = "base.img",
		.size_bytes = (uint64_t)BLOCKS * BLOCK,
		.quota_bytes = t.quota_bytes,
		.throwaway = t.throwaway};
	int r = overlay_open(ret_ov, &params, err);

	if (r < 0)
		fd_close(&params.base_fd);
	return r;
}

static int create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	struct virtio_blk_params params = {.fd = -1,
		.nr_queues = 1,
		.serial = "disk",
		.name = "disk",
		.throwaway = t.throwaway};
	int r = open_overlay(&params.overlay, t.dir_fd, err);

	return r < 0 ? r : virtio_blk_create(ret_dev, &params, env, err);
}

static void attach(void)
{
	struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev;
	struct err err = {0};

	if (create(&dev, &env, &err) < 0)
		fail_msg("%s", err.msg);
	fake_attach(&t.fake, dev);
	fake_start(&t.fake);
	t.slots = fake_alloc(&t.fake, SLOTS * SLOT_BYTES);
}

static void make_folder(void)
{
	uint8_t base[BASE_SECS * SECTOR];
	int fd;

	snprintf(t.path, sizeof(t.path), "/tmp/mayfly-disk-XXXXXX");
	assert_non_null(mkdtemp(t.path));
	t.dir_fd = open(t.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_int_equal(mkdirat(t.dir_fd, "cut", 0700), 0);
	t.cut_fd = openat(t.dir_fd, "cut", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	for (unsigned int i = 0; i < BASE_SECS; i++)
		fill_sector(base + i * SECTOR, i, 1);
	fd = openat(t.dir_fd, "base.img", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(fd_write_all(fd, base, sizeof(base)), 0);
	close(fd);
}

static void remove_folder(void)
{
	char cmd[96];

	close(t.dir_fd);
	close(t.cut_fd);
	snprintf(cmd, sizeof(cmd), "rm -rf %s", t.path);
	assert_int_equal(system(cmd), 0);
}

static int setup(void **state)
{
	(void)state;
	memset(&t, 0, sizeof(t));
	memset(&ring, 0, sizeof(ring));
	t.seed = 4711;
	t.versions = 1;
	for (unsigned int i = 0; i < SECS; i++)
		t.now[i] = sector_of(i) < BASE_SECS;
	make_folder();
	fake_init(&t.fake);
	attach();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&t.fake);
	remove_folder();
	for (unsigned int i = 0; i < PROXIES; i++)
		assert_false(ring.proxies[i].used);
	return 0;
}

static void reattach(void)
{
	fake_detach(&t.fake);
	attach();
}

static struct virtio_blk_stats stats(void)
{
	struct virtio_blk_stats s;

	virtio_blk_get_stats(t.fake.dev, &s);
	return s;
}

// --- Requests
// --------------------------------------------------------------------------------------

struct rq {
	uint32_t type;
	uint32_t idx, nr; // sectors
	uint32_t version;
	int head;
	bool done;
	uint8_t status;
};

static struct rq rqs[SLOTS];

static gpa_t slot_gpa(unsigned int slot, uint32_t off)
{
	return GPA(t.slots.v + (uint64_t)slot * SLOT_BYTES + off);
}

#define DATA_OFF 512U // in a slot; so that pieces are not at a page's beginning

static void add(unsigned int slot, uint32_t type, uint32_t idx, uint32_t nr)
{
	const bool data = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_OUT;
	const bool range = type == VIRTIO_BLK_T_DISCARD || type == VIRTIO_BLK_T_WRITE_ZEROES;
	const uint64_t sector = sector_of(idx);
	const struct virtio_blk_outhdr hdr = {
		.type = htole32(type), .sector = htole64(data ? sector : 0)};
	const struct virtio_blk_discard_write_zeroes what = {
		htole64(sector), htole32(nr), htole32(0)};
	const uint32_t bytes = data ? nr * SECTOR : range ? sizeof(what) : 0;
	const uint32_t first = data && nr > 1 ? rnd(nr) * SECTOR + rnd(2) * 100 : 0;
	struct fake_buf bufs[4] = {{slot_gpa(slot, 0), 16, false}};
	unsigned int nr_bufs = 1;
	uint8_t sec[SECTOR];

	rqs[slot] = (struct rq){.type = type, .idx = idx, .nr = nr};
	guest_mem_write(&t.fake.mem, slot_gpa(slot, 0), &hdr, sizeof(hdr));
	guest_mem_write(&t.fake.mem, slot_gpa(slot, 64), "\xee", 1);
	if (type == VIRTIO_BLK_T_OUT) {
		rqs[slot].version = ++t.versions;
		for (uint32_t i = 0; i < nr; i++) {
			fill_sector(sec, sector + i, rqs[slot].version);
			guest_mem_write(
				&t.fake.mem, slot_gpa(slot, DATA_OFF + i * SECTOR), sec, SECTOR);
		}
	}
	if (range)
		guest_mem_write(&t.fake.mem, slot_gpa(slot, DATA_OFF), &what, sizeof(what));
	if (first)
		bufs[nr_bufs++] = (struct fake_buf){
			slot_gpa(slot, DATA_OFF), first, type == VIRTIO_BLK_T_IN};
	if (bytes > first)
		bufs[nr_bufs++] = (struct fake_buf){
			slot_gpa(slot, DATA_OFF + first), bytes - first, type == VIRTIO_BLK_T_IN};
	bufs[nr_bufs++] = (struct fake_buf){slot_gpa(slot, 64), 1, true};
	rqs[slot].head = fake_add(&t.fake, 0, bufs, nr_bufs);
	assert_true(rqs[slot].head >= 0);
}

static bool has_used(void *opaque)
{
	uint8_t idx[2];

	(void)opaque;
	guest_mem_read(&t.fake.mem, GPA(t.fake.queues[0].used.v + 2), idx, 2);
	return get_le16(idx) != t.fake.queues[0].used_idx;
}

// The next request that ends.
static struct rq *wait_one(void)
{
	int head;

	if (!fake_run_until(&t.fake, has_used, NULL))
		fail_msg("a request does not end");
	assert_true(fake_get_used(&t.fake, 0, &head, NULL));
	for (unsigned int slot = 0; slot < SLOTS; slot++) {
		if (rqs[slot].head != head || rqs[slot].done)
			continue;
		rqs[slot].done = true;
		guest_mem_read(&t.fake.mem, slot_gpa(slot, 64), &rqs[slot].status, 1);
		return &rqs[slot];
	}
	fail_msg("a head that nobody knows");
	return NULL;
}

// What the disk holds after it.
static void apply(const struct rq *rq)
{
	uint32_t from = rq->idx, to = rq->idx + rq->nr;

	if (rq->type == VIRTIO_BLK_T_DISCARD) { // whole blocks
		from = ALIGN_UP(from, BLOCK_SECS);
		to = ALIGN_DOWN(to, BLOCK_SECS);
	}
	if (rq->type == VIRTIO_BLK_T_OUT || rq->type == VIRTIO_BLK_T_DISCARD ||
		rq->type == VIRTIO_BLK_T_WRITE_ZEROES)
		for (uint32_t i = from; i < to; i++)
			t.now[i] = rq->version;
}

static void check_read(unsigned int slot)
{
	const struct rq *rq = &rqs[slot];
	uint8_t sec[SECTOR];

	for (uint32_t i = 0; i < rq->nr; i++) {
		uint32_t got;

		guest_mem_read(&t.fake.mem, slot_gpa(slot, DATA_OFF + i * SECTOR), sec, SECTOR);
		got = version_of(sec, sector_of(rq->idx + i));
		if (got != t.now[rq->idx + i])
			fail_msg("sector %llu: version %u, wanted %u",
				(unsigned long long)sector_of(rq->idx + i), got,
				t.now[rq->idx + i]);
	}
}

static uint8_t request(uint32_t type, uint32_t idx, uint32_t nr)
{
	struct rq *rq;

	add(0, type, idx, nr);
	fake_kick(&t.fake, 0);
	rq = wait_one();
	if (rq->status == VIRTIO_BLK_S_OK && type == VIRTIO_BLK_T_IN)
		check_read(0);
	else if (rq->status == VIRTIO_BLK_S_OK)
		apply(rq);
	return rq->status;
}

static void check_all(void)
{
	for (uint32_t idx = 0; idx < SECS; idx += RQ_SECS_MAX)
		assert_int_equal(request(VIRTIO_BLK_T_IN, idx, RQ_SECS_MAX), VIRTIO_BLK_S_OK);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static void freeze(void)
{
	bool drained = false;
	struct err err = {0};

	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	assert_true(drained);
	if (overlay_freeze(virtio_blk_overlay(t.fake.dev), &err) < 0)
		fail_msg("%s", err.msg);
	virtio_dev_resume(t.fake.dev);
}

// --- Tests
// -----------------------------------------------------------------------------------------

static uint32_t pick_range(uint32_t *ret_nr)
{
	const uint32_t area = rnd(AREAS) * AREA_SECS, nr = 1 + rnd(rnd(2) ? 4 : RQ_SECS_MAX);
	uint32_t at = rnd(AREA_SECS - nr + 1);

	if (rnd(3) == 0)
		at = ALIGN_DOWN(at, BLOCK_SECS);
	*ret_nr = nr;
	return area + at;
}

static void random_requests(void **state)
{
	static const uint32_t types[] = {VIRTIO_BLK_T_IN, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
		VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES,
		VIRTIO_BLK_T_FLUSH};
	uint64_t continued = 0, copied = 0;

	(void)state;
	for (unsigned int i = 0; i < 3000; i++) {
		uint32_t nr, idx = pick_range(&nr);

		if (rnd(4) == 0) {
			fault(rnd(2) ? FAULT_HALF : FAULT_FIRST, 1 + rnd(3), 0);
			ring.skip = rnd(3);
		}
		assert_int_equal(request(types[rnd(ARRAY_SIZE(types))], idx, nr), VIRTIO_BLK_S_OK);
		if (i % 300 == 299)
			freeze();
		if (i % 200 == 199) {
			continued += stats().continued;
			copied += stats().copied;
			reattach();
		}
	}
	check_all();
	reattach();
	check_all();
	assert_true(continued > 100 && copied > 100);
}

// Ranges side by side, in few blocks, all under way at once.
static void many_write_to_one_block(void **state)
{
	(void)state;
	for (unsigned int round = 0; round < 400; round++) {
		const uint32_t area = rnd(AREAS) * AREA_SECS;
		uint32_t at = area + rnd(AREA_SECS - 4 * BLOCK_SECS);
		unsigned int nr = 0;

		if (rnd(3) == 0)
			fault(FAULT_HALF, 2, 0);
		while (nr < SLOTS && at < area + AREA_SECS) {
			const uint32_t len = MIN(1 + rnd(rnd(4) ? 3 : 20), area + AREA_SECS - at);
			const uint32_t kind = rnd(8);

			if (kind != 0) // else a gap
				add(nr++,
					kind == 1   ? VIRTIO_BLK_T_WRITE_ZEROES
					: kind == 2 ? VIRTIO_BLK_T_DISCARD
					: kind == 3 ? VIRTIO_BLK_T_FLUSH
						    : VIRTIO_BLK_T_OUT,
					at, len);
			at += len;
		}
		fake_kick(&t.fake, 0);
		for (unsigned int i = 0; i < nr; i++) {
			const struct rq *rq = wait_one();

			assert_int_equal(rq->status, VIRTIO_BLK_S_OK);
			apply(rq);
		}
		for (uint32_t idx = area; idx < area + AREA_SECS; idx += RQ_SECS_MAX)
			assert_int_equal(
				request(VIRTIO_BLK_T_IN, idx, RQ_SECS_MAX), VIRTIO_BLK_S_OK);
		if (round % 40 == 39)
			freeze();
	}
	assert_true(stats().copied > 100);
	reattach();
	check_all();
}

// One writes a sector of a block while another writes, or zeroes, the whole of it: that sector is
// either's (or of both, where the host does halves of it), the others are not as they were before.
static void a_part_and_the_whole_at_once(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < 300; i++) {
		const uint32_t block = rnd(SECS / BLOCK_SECS) * BLOCK_SECS, part = block + rnd(8);
		const uint32_t type = rnd(2) ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_WRITE_ZEROES;
		const unsigned int whole = rnd(2);
		uint32_t got;
		uint8_t sec[SECTOR];

		if (rnd(2)) // the first operation ends last
			fault(FAULT_HALF, 1, 0);
		add(0, whole ? VIRTIO_BLK_T_OUT : type, whole ? part : block,
			whole ? 1 : BLOCK_SECS);
		add(1, whole ? type : VIRTIO_BLK_T_OUT, whole ? block : part,
			whole ? BLOCK_SECS : 1);
		fake_kick(&t.fake, 0);
		for (unsigned int k = 0; k < 2; k++)
			assert_int_equal(wait_one()->status, VIRTIO_BLK_S_OK);
		apply(&rqs[whole]);
		add(2, VIRTIO_BLK_T_IN, part, 1);
		fake_kick(&t.fake, 0);
		assert_int_equal(wait_one()->status, VIRTIO_BLK_S_OK);
		guest_mem_read(&t.fake.mem, slot_gpa(2, DATA_OFF), sec, SECTOR);
		got = version_of(sec, sector_of(part));
		assert_true(got == rqs[0].version || got == rqs[1].version || got == UINT32_MAX);
		t.now[part] = got;
		assert_int_equal(request(VIRTIO_BLK_T_IN, block, BLOCK_SECS), VIRTIO_BLK_S_OK);
		if (i % 30 == 29)
			freeze();
	}
}

// Each operation of a request fails in turn; the disk is as it was, or as it was to be.
static void errors_are_the_guests(void **state)
{
	static const int errors[] = {-EIO, -ENOSPC};

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(errors); i++) {
		for (unsigned int nth = 0; nth < 2; nth++) { // read below, write
			const uint32_t idx = 8 + 16 * i + 8 * nth;

			fault(FAULT_RESULT, 1, errors[i]);
			ring.skip = nth;
			assert_int_equal(request(VIRTIO_BLK_T_OUT, idx + 3, 2), VIRTIO_BLK_S_IOERR);
			assert_int_equal(ring.times, 0);
			assert_int_equal(request(VIRTIO_BLK_T_IN, idx, 8), VIRTIO_BLK_S_OK);
			assert_int_equal(request(VIRTIO_BLK_T_OUT, idx + 3, 2), VIRTIO_BLK_S_OK);
			assert_int_equal(request(VIRTIO_BLK_T_IN, idx, 8), VIRTIO_BLK_S_OK);
		}
		// Data, map, map again, and all over: nothing of it is forgotten.
		for (unsigned int nth = 0; nth < 3; nth++) {
			const uint32_t idx = 40 + 24 * i + 8 * nth;

			assert_int_equal(request(VIRTIO_BLK_T_OUT, idx, 8), VIRTIO_BLK_S_OK);
			fault(FAULT_RESULT, 1, errors[i]);
			ring.skip = nth;
			assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_IOERR);
			assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_OK);
			ring.nr_ops = 0;
			assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_OK);
			assert_int_equal(ring.nr_ops, 1); // nothing but fdatasync
		}
		// A hole that cannot be punched: zeros all the same.
		fault(FAULT_RESULT, 1, errors[i]);
		assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 40 + 24 * i, 16), VIRTIO_BLK_S_OK);
		assert_int_equal(request(VIRTIO_BLK_T_OUT, 40 + 24 * i + 1, 1), VIRTIO_BLK_S_OK);
	}
	// One that a sync of somebody else was told of, too: once.
	virtio_blk_sync_failed(t.fake.dev);
	assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_OK);
	check_all();
	reattach();
	check_all();
}

static void a_full_quota_is_an_error_of_io(void **state)
{
	(void)state;
	t.quota_bytes = 4 * BLOCK;
	reattach();
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 0, 32), VIRTIO_BLK_S_OK);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 64, 8), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 64, 1), VIRTIO_BLK_S_IOERR);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 1, 17), VIRTIO_BLK_S_OK);
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 16), VIRTIO_BLK_S_OK);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 64, 1), VIRTIO_BLK_S_OK);
	check_all();
}

static void a_throwaway_does_not_sync(void **state)
{
	(void)state;
	t.throwaway = true;
	reattach();
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 0, 32), VIRTIO_BLK_S_OK);
	ring.nr_ops = 0;
	assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_OK);
	assert_int_equal(ring.nr_ops, 0);
	check_all();
	freeze(); // which does: what it makes is not for this machine alone
	t.throwaway = false;
	reattach();
	check_all();
}

// Runs of blocks that lie in one place are one operation.
static void operations_are_counted(void **state)
{
	(void)state;
	ring.nr_ops = 0;
	assert_int_equal(request(VIRTIO_BLK_T_IN, 0, 64), VIRTIO_BLK_S_OK); // base
	assert_int_equal(ring.nr_ops, 1);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 0, 64), VIRTIO_BLK_S_OK); // new
	assert_int_equal(ring.nr_ops, 2);
	assert_int_equal(request(VIRTIO_BLK_T_OUT, 3, 50), VIRTIO_BLK_S_OK); // in place
	assert_int_equal(ring.nr_ops, 3);
	assert_int_equal(request(VIRTIO_BLK_T_IN, 3 * AREA_SECS, 64), VIRTIO_BLK_S_OK); // nothing
	assert_int_equal(ring.nr_ops, 3);
	assert_int_equal(
		request(VIRTIO_BLK_T_OUT, 3 * AREA_SECS + 1, 1), VIRTIO_BLK_S_OK); // a part
	assert_int_equal(ring.nr_ops, 4); // of nothing: no read
	assert_int_equal(request(VIRTIO_BLK_T_FLUSH, 0, 0), VIRTIO_BLK_S_OK);
	assert_int_equal(ring.nr_ops, 4 + 4); // two places of the map, between two syncs
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 64), VIRTIO_BLK_S_OK);
	assert_int_equal(ring.nr_ops, 9); // its room
	assert_int_equal(request(VIRTIO_BLK_T_DISCARD, 0, 64), VIRTIO_BLK_S_OK);
	assert_int_equal(ring.nr_ops, 9); // there is none left
}

// --- The power is cut
// --------------------------------------------------------------------------------

// What went into the overlay's file, and what the guest did, in one order of time.
struct event {
	enum { EV_WRITE, EV_PUNCH, EV_SYNC, EV_GUEST_WRITE, EV_GUEST_FLUSH } kind;
	uint64_t off, len;
	uint8_t *data;
	uint32_t idx, nr, version;
	uint32_t submitted, done; // UINT32_MAX: not yet
};

#define EVENTS_MAX 4000U

static struct {
	struct event events[EVENTS_MAX];
	unsigned int nr;
	uint32_t clock;
} history;

static struct event *new_event(int kind)
{
	struct event *ev = &history.events[history.nr++];

	ASSERT(history.nr < EVENTS_MAX);
	*ev = (struct event){.kind = kind, .submitted = ++history.clock, .done = UINT32_MAX};
	return ev;
}

static void *on_submitted(const struct io_uring_sqe *sqe)
{
	const struct iovec *iov = (const struct iovec *)(uintptr_t)sqe->addr;
	struct event *ev;

	switch (sqe->opcode) {
	case IORING_OP_WRITE:
	case IORING_OP_WRITEV:
		ev = new_event(EV_WRITE);
		ev->off = sqe->off;
		if (sqe->opcode == IORING_OP_WRITE) {
			ev->data = malloc(sqe->len);
			memcpy(ev->data, (const void *)(uintptr_t)sqe->addr, sqe->len);
			return ev;
		}
		for (uint32_t i = 0; i < sqe->len; i++) {
			ev->data = realloc(ev->data, ev->len + iov[i].iov_len);
			memcpy(ev->data + ev->len, iov[i].iov_base, iov[i].iov_len);
			ev->len += iov[i].iov_len;
		}
		return ev;
	case IORING_OP_FSYNC:
		return new_event(EV_SYNC);
	case IORING_OP_FALLOCATE:
		ev = new_event(EV_PUNCH);
		ev->off = sqe->off;
		ev->len = sqe->addr;
		return ev;
	default:
		return NULL;
	}
}

static void on_completed(void *seen, int res)
{
	struct event *ev = seen;

	if (!ev)
		return;
	assert_true(res >= 0);
	ev->done = ++history.clock;
	if (ev->kind == EV_WRITE)
		ev->len = (uint64_t)res;
}

// What the medium makes of an event: all of it if it has to be there, else any of its sectors.
static void replay(int fd, const struct event *ev, bool whole)
{
	static const uint8_t zeros[SECTOR];

	for (uint64_t at = 0; at < ev->len; at += SECTOR) {
		const uint64_t len = MIN(ev->len - at, SECTOR - (ev->off + at) % SECTOR);

		if (!whole && rnd(2))
			continue;
		assert_int_equal(pwrite(fd, ev->kind == EV_PUNCH ? zeros : ev->data + at, len,
					 (off_t)(ev->off + at)),
			len);
	}
}

// At which time a sync was submitted that has ended by then; 0 if none has.
static uint32_t last_done(int kind, uint32_t when)
{
	uint32_t last = 0;

	for (unsigned int i = 0; i < history.nr; i++)
		if ((int)history.events[i].kind == kind && history.events[i].done <= when)
			last = MAX(last, history.events[i].submitted);
	return last;
}

static bool allowed(uint32_t idx, uint32_t version, uint32_t when, uint32_t flushed)
{
	const struct event *base = NULL;
	bool found = false;

	for (unsigned int i = 0; i < history.nr; i++) {
		const struct event *ev = &history.events[i];

		if (ev->kind != EV_GUEST_WRITE || idx < ev->idx || idx >= ev->idx + ev->nr)
			continue;
		if (ev->done < flushed) {
			if (!base || ev->done > base->done)
				base = ev;
		} else if (ev->submitted <= when) {
			found |= ev->version == version;
		}
	}
	return found || version == (base ? base->version : sector_of(idx) < BASE_SECS);
}

static void cut_at(uint32_t when, const uint8_t header[BLOCK], off_t file_bytes)
{
	const uint32_t synced = last_done(EV_SYNC, when);
	const uint32_t flushed = last_done(EV_GUEST_FLUSH, when);
	const unsigned int luck = rnd(4);
	struct overlay *ov;
	struct err err = {0};
	uint8_t sec[SECTOR];
	int fd = openat(t.cut_fd, "disk.overlay", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	assert_int_equal(pwrite(fd, header, BLOCK, 0), BLOCK);
	assert_int_equal(ftruncate(fd, file_bytes), 0);
	for (unsigned int i = 0; i < history.nr; i++) {
		const struct event *ev = &history.events[i];

		if (ev->kind != EV_WRITE && ev->kind != EV_PUNCH)
			continue;
		if (ev->done < synced)
			replay(fd, ev, true);
		else if (ev->submitted <= when && luck != 0) // all, none, or any
			replay(fd, ev, luck == 1);
	}
	close(fd);
	if (open_overlay(&ov, t.cut_fd, &err) < 0)
		fail_msg("cut at %u: %s", when, err.msg);
	for (uint32_t idx = 0; idx < SECS; idx++) {
		struct overlay_run run;
		uint32_t version;

		overlay_read(ov, sector_of(idx) * SECTOR, SECTOR, &run);
		assert_int_equal(run.bytes, SECTOR);
		memset(sec, 0, sizeof(sec));
		if (run.kind == OVERLAY_FILE)
			assert_int_equal(
				fd_pread_full(run.fd, sec, SECTOR, (off_t)run.file_off), SECTOR);
		version = version_of(sec, sector_of(idx));
		if (!allowed(idx, version, when, flushed))
			fail_msg("cut at %u: sector %llu has version %u", when,
				(unsigned long long)sector_of(idx), version);
	}
	overlay_close(ov);
}

static void a_power_cut_leaves_old_or_new(void **state)
{
	static uint8_t header[BLOCK];
	struct event *guest[SLOTS];
	struct stat st;
	int fd = openat(t.dir_fd, "disk.overlay", O_RDONLY | O_CLOEXEC);

	(void)state;
	assert_int_equal(fd_pread_full(fd, header, sizeof(header), 0), sizeof(header));
	assert_int_equal(fstat(fd, &st), 0);
	close(fd);
	memset(&history, 0, sizeof(history));
	ring.submitted = on_submitted;
	ring.completed = on_completed;
	for (unsigned int i = 0; i < 120; i++) {
		uint32_t nr, idx = pick_range(&nr);
		unsigned int nr_rqs = 0;

		// A write, a flush, or both at once.
		if (rnd(4)) {
			const uint32_t type = rnd(5) ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_WRITE_ZEROES;

			add(nr_rqs, type, idx, nr);
			guest[nr_rqs] = new_event(EV_GUEST_WRITE);
			guest[nr_rqs]->idx = idx;
			guest[nr_rqs]->nr = nr;
			guest[nr_rqs]->version = rqs[nr_rqs].version;
			nr_rqs++;
		}
		if (!nr_rqs || rnd(3) == 0) {
			add(nr_rqs, VIRTIO_BLK_T_FLUSH, 0, 0);
			guest[nr_rqs++] = new_event(EV_GUEST_FLUSH);
		}
		fake_kick(&t.fake, 0);
		for (unsigned int k = 0; k < nr_rqs; k++) {
			const struct rq *rq = wait_one();

			assert_int_equal(rq->status, VIRTIO_BLK_S_OK);
			guest[rq - rqs]->done = ++history.clock;
		}
	}
	ring.submitted = NULL;
	ring.completed = NULL;
	for (uint32_t when = 0; when <= history.clock; when++)
		for (unsigned int i = 0; i < 2; i++)
			cut_at(when, header, st.st_size);
	assert_true(history.clock > 400);
	for (unsigned int i = 0; i < history.nr; i++)
		free(history.events[i].data);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	static const struct device_case device = {.name = "blk on an overlay",
		.device_id = VIRTIO_ID_BLOCK,
		.eager_queues = 1,
		.create = create};
	const struct CMUnitTest tests[] = {
		TEST(random_requests),
		TEST(many_write_to_one_block),
		TEST(a_part_and_the_whole_at_once),
		TEST(errors_are_the_guests),
		TEST(a_full_quota_is_an_error_of_io),
		TEST(a_throwaway_does_not_sync),
		TEST(operations_are_counted),
		TEST(a_power_cut_leaves_old_or_new),
	};
	int failed;

	make_folder();
	failed = device_suite(&device);
	remove_folder();
	return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
