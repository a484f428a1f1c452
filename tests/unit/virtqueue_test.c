// SPDX-License-Identifier: Apache-2.0
// devices/virtqueue: what a driver may do works, what it may not ends the queue, and neither makes
// the device do unbounded work or trust a value twice.
#include "tests/support/test.h"

#include <errno.h>
#include <linux/virtio_ring.h>
#include <pthread.h>
#include <stdlib.h>

#include "devices/virtqueue.h"

#define RAM_BYTES (4 * MIB)
#define DESC      0x1000U
#define AVAIL     0x4000U
#define USED      0x8000U
#define BUF       0x10000U
#define TABLE     0x80000U

static struct {
	struct guest_mem mem;
	struct virtq q;
	struct virtq_chain chain;
	struct guest_view segs[VIRTQ_CHAIN_MAX];
	uint16_t size;
	uint16_t avail_idx;
} t;

static void put16(uint64_t gpa, uint16_t val)
{
	struct guest_view view;

	assert_int_equal(guest_mem_view(&t.mem, GPA(gpa), 2, &view), 0);
	guest_view_store16(&view, 0, val);
}

static uint16_t get16(uint64_t gpa)
{
	struct guest_view view;

	assert_int_equal(guest_mem_view(&t.mem, GPA(gpa), 2, &view), 0);
	return guest_view_load16(&view, 0);
}

static void put_desc(
	uint64_t table, uint32_t idx, uint64_t addr, uint32_t len, uint16_t flags, uint16_t next)
{
	uint8_t raw[16];

	put_le64(raw, addr);
	put_le32(raw + 8, len);
	put_le16(raw + 12, flags);
	put_le16(raw + 14, next);
	assert_int_equal(guest_mem_write(&t.mem, GPA(table + idx * 16ULL), raw, sizeof(raw)), 0);
}

static void offer(uint16_t head)
{
	put16(AVAIL + 4 + 2U * (t.avail_idx % t.size), head);
	put16(AVAIL + 2, ++t.avail_idx);
}

static struct virtq_config config_of(uint32_t size)
{
	return (struct virtq_config){.size = size,
		.desc = GPA(DESC),
		.avail = GPA(AVAIL),
		.used = GPA(USED),
		.event_idx = true,
		.indirect = true};
}

static void start(uint16_t size, bool event_idx, bool indirect)
{
	struct virtq_config config = config_of(size);
	static const uint8_t zeros[BUF - DESC];

	config.event_idx = event_idx;
	config.indirect = indirect;
	assert_int_equal(guest_mem_write(&t.mem, GPA(DESC), zeros, sizeof(zeros)), 0);
	t.size = size;
	t.avail_idx = 0;
	t.chain.segs = t.segs;
	assert_int_equal(virtq_activate(&t.q, &config, VIRTQ_SIZE_MAX, &t.mem), 0);
}

static int setup(void **state)
{
	const struct guest_mem_range range = {GPA(0), RAM_BYTES};

	(void)state;
	memset(&t, 0, sizeof(t));
	if (guest_mem_init(&t.mem, &range, 1, NULL) < 0)
		return -1;
	start(8, true, true);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	guest_mem_fini(&t.mem);
	return 0;
}

static void assert_refused(void)
{
	assert_int_equal(virtq_pop(&t.q, &t.chain), -EPROTO);
	assert_int_equal(virtq_pop(&t.q, &t.chain), -EPROTO); // for ever
	assert_true(virtq_wait(&t.q));
	start(t.size, true, true);
}

static void activation_checks_size_alignment_and_range(void **state)
{
	static const uint32_t bad_sizes[] = {0, 3, 7, 257, 512, 65536, 65544, UINT32_MAX};
	struct virtq q = {0};
	struct virtq_config config;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(bad_sizes); i++) {
		config = config_of(bad_sizes[i]);
		assert_int_equal(virtq_activate(&q, &config, VIRTQ_SIZE_MAX, &t.mem), -EINVAL);
		assert_false(virtq_ready(&q));
	}
	config = config_of(64);
	assert_int_equal(virtq_activate(&q, &config, 32, &t.mem), -EINVAL);
	for (unsigned int bit = 1; bit < 16; bit <<= 1) {
		config = config_of(8);
		config.desc.v += bit;
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
	}
	config = config_of(8);
	config.avail.v += 1;
	assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
	config = config_of(8);
	config.used.v += 2;
	assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
	// Up to the last byte of RAM, and not one step further.
	for (uint32_t size = 1; size <= VIRTQ_SIZE_MAX; size *= 2) {
		const uint64_t desc = RAM_BYTES - 16 * size, avail = RAM_BYTES - 6 - 2 * size,
			       used = ALIGN_DOWN(RAM_BYTES - 6 - 8 * size, 4U);

		config = config_of(size);
		config.desc = GPA(desc);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), 0);
		config.desc = GPA(desc + 16);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
		config = config_of(size);
		config.avail = GPA(avail);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), 0);
		config.avail = GPA(avail + 2);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
		config = config_of(size);
		config.used = GPA(used);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), 0);
		config.used = GPA(used + 4);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
		config.used = GPA(UINT64_MAX - 3);
		assert_int_equal(virtq_activate(&q, &config, 256, &t.mem), -EINVAL);
	}
	virtq_deactivate(&q);
	assert_int_equal(virtq_pop(&q, &t.chain), 0);
	assert_false(virtq_wait(&q));
	assert_false(virtq_publish(&q));
}

static void a_chain_is_read_and_written(void **state)
{
	char text[32] = {0};

	(void)state;
	assert_int_equal(guest_mem_write(&t.mem, GPA(BUF), "hello, ", 7), 0);
	assert_int_equal(guest_mem_write(&t.mem, GPA(BUF + 100), "world", 6), 0);
	put_desc(DESC, 5, BUF, 7, VRING_DESC_F_NEXT, 2);
	put_desc(DESC, 2, BUF + 100, 6, VRING_DESC_F_NEXT, 3);
	put_desc(DESC, 3, 0, 0, VRING_DESC_F_NEXT, 7); // empty: left out
	put_desc(DESC, 7, BUF + 200, 3, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, 0);
	put_desc(DESC, 0, BUF + 300, 10, VRING_DESC_F_WRITE, 0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 0);
	offer(5);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.head, 5);
	assert_int_equal(t.chain.nr_readable, 2);
	assert_int_equal(t.chain.nr_writable, 2);
	assert_int_equal(t.chain.readable_bytes, 13);
	assert_int_equal(t.chain.writable_bytes, 13);
	assert_int_equal(virtq_chain_read(&t.chain, 0, text, sizeof(text)), 13);
	assert_string_equal(text, "hello, world");
	assert_int_equal(virtq_chain_read(&t.chain, 8, text, 3), 3);
	assert_memory_equal(text, "orl", 3);
	assert_int_equal(virtq_chain_read(&t.chain, 13, text, 1), 0);
	assert_int_equal(virtq_chain_write(&t.chain, 1, "abcd", 4), 4);
	assert_int_equal(virtq_chain_write(&t.chain, 10, "wxyz", 4), 3);
	assert_int_equal(guest_mem_read(&t.mem, GPA(BUF + 201), text, 2), 0);
	assert_memory_equal(text, "ab", 2);
	assert_int_equal(guest_mem_read(&t.mem, GPA(BUF + 300), text, 11), 0);
	assert_memory_equal(text, "cd\0\0\0\0\0wxy\0", 11);
	virtq_push(&t.q, 5, 13);
	assert_int_equal(get16(USED + 2), 0); // not before it is published
	assert_true(virtq_publish(&t.q));
	assert_int_equal(get16(USED + 2), 1);
	assert_int_equal(get16(USED + 4), 5);
	assert_int_equal(get16(USED + 8), 13);
}

static void iovecs_cover_exactly_what_is_asked(void **state)
{
	struct iovec iov[4];
	size_t bytes;

	(void)state;
	put_desc(DESC, 0, BUF, 10, VRING_DESC_F_NEXT, 1);
	put_desc(DESC, 1, BUF + 100, 20, VRING_DESC_F_NEXT, 2);
	put_desc(DESC, 2, BUF + 200, 30, VRING_DESC_F_NEXT | VRING_DESC_F_WRITE, 3);
	put_desc(DESC, 3, BUF + 300, 40, VRING_DESC_F_WRITE, 0);
	offer(0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	for (size_t off = 0; off <= 71; off++) {
		for (size_t len = 0; len <= 71; len++) {
			unsigned int nr = virtq_chain_iov(&t.chain, true, off, len, iov, 4, &bytes);
			size_t sum = 0;

			assert_int_equal(bytes, off >= 70 ? 0 : MIN(len, 70 - off));
			for (unsigned int i = 0; i < nr; i++) {
				const uint8_t *seg = t.mem.regions[0].hva + BUF;
				size_t at = off + sum;

				assert_true(iov[i].iov_len > 0);
				assert_ptr_equal(iov[i].iov_base,
					at < 30 ? seg + 200 + at : seg + 300 + at - 30);
				sum += iov[i].iov_len;
			}
			assert_int_equal(sum, bytes);
		}
	}
	assert_int_equal(virtq_chain_iov(&t.chain, false, 5, 100, iov, 4, &bytes), 2);
	assert_int_equal(bytes, 25);
	assert_int_equal(virtq_chain_iov(&t.chain, false, 5, 100, iov, 1, &bytes), 1);
	assert_int_equal(bytes, 5);
}

static void written_pages_are_marked(void **state)
{
	uint64_t bitmap[RAM_BYTES / PAGE_BYTES / 64] = {0};

	(void)state;
	put_desc(DESC, 0, BUF, 2 * PAGE_BYTES, VRING_DESC_F_WRITE, 0);
	offer(0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(guest_mem_track_start(&t.mem, NULL), 0);
	virtq_chain_mark_dirty(&t.chain, PAGE_BYTES, 1);
	virtq_push(&t.q, 0, 1);
	virtq_publish(&t.q);
	guest_mem_track_collect(&t.mem, bitmap);
	assert_int_equal(bitmap[0], 1ULL << (BUF / PAGE_BYTES + 1) | 1ULL << USED / PAGE_BYTES);
	guest_mem_track_stop(&t.mem);
}

static void indirect_tables(void **state)
{
	(void)state;
	put_desc(TABLE, 0, BUF, 4, VRING_DESC_F_NEXT, 2);
	put_desc(TABLE, 2, BUF + 8, 4, VRING_DESC_F_WRITE, 0);
	// Alone; its own WRITE flag means nothing.
	put_desc(DESC, 1, TABLE, 48, VRING_DESC_F_INDIRECT | VRING_DESC_F_WRITE, 0);
	offer(1);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.nr_readable, 1);
	assert_int_equal(t.chain.nr_writable, 1);
	virtq_push(&t.q, 1, 0);
	// At the end of a plain chain, and at an odd address.
	put_desc(TABLE + 5, 0, BUF, 4, VRING_DESC_F_WRITE, 0);
	put_desc(DESC, 2, BUF, 4, VRING_DESC_F_NEXT, 3);
	put_desc(DESC, 3, TABLE + 5, 16, VRING_DESC_F_INDIRECT, 0);
	offer(2);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.nr_readable, 1);
	assert_int_equal(t.chain.nr_writable, 1);
	virtq_push(&t.q, 2, 0);
	// Longer than the queue, as Linux makes them, up to the most that we take.
	for (uint16_t i = 0; i < VIRTQ_CHAIN_MAX; i++)
		put_desc(TABLE, i, BUF + i * 16U, 16,
			i + 1U < VIRTQ_CHAIN_MAX ? VRING_DESC_F_NEXT : 0, (uint16_t)(i + 1));
	put_desc(DESC, 4, TABLE, VIRTQ_CHAIN_MAX * 16, VRING_DESC_F_INDIRECT, 0);
	offer(4);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.nr_readable, VIRTQ_CHAIN_MAX);
	virtq_push(&t.q, 4, 0);

	// One more is refused,
	put_desc(TABLE, VIRTQ_CHAIN_MAX - 1, BUF, 16, VRING_DESC_F_NEXT, VIRTQ_CHAIN_MAX);
	put_desc(TABLE, VIRTQ_CHAIN_MAX, BUF, 16, 0, 0);
	put_desc(DESC, 4, TABLE, (VIRTQ_CHAIN_MAX + 1) * 16, VRING_DESC_F_INDIRECT, 0);
	offer(4);
	assert_refused();
	// a table in a table,
	put_desc(TABLE, 0, TABLE, 16, VRING_DESC_F_INDIRECT, 0);
	put_desc(DESC, 0, TABLE, 16, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_refused();
	// a table with something behind it,
	put_desc(TABLE, 0, BUF, 16, 0, 0);
	put_desc(DESC, 0, TABLE, 16, VRING_DESC_F_INDIRECT | VRING_DESC_F_NEXT, 1);
	offer(0);
	assert_refused();
	// an empty one, a fraction of an entry, one outside of RAM, one that leads out of itself,
	for (uint32_t len = 0; len < 48; len++) {
		if (len == 16 || len == 32)
			continue;
		put_desc(DESC, 0, TABLE, len, VRING_DESC_F_INDIRECT, 0);
		offer(0);
		assert_refused();
	}
	put_desc(DESC, 0, RAM_BYTES - 16, 32, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_refused();
	put_desc(TABLE, 0, BUF, 16, VRING_DESC_F_NEXT, 1);
	put_desc(DESC, 0, TABLE, 16, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_refused();
	// and any at all where the feature was not negotiated.
	start(8, true, false);
	put_desc(TABLE, 0, BUF, 16, 0, 0);
	put_desc(DESC, 0, TABLE, 16, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), -EPROTO);
}

static void lies_are_refused(void **state)
{
	(void)state;
	// A head or a next out of range.
	offer(8);
	assert_refused();
	offer(UINT16_MAX);
	assert_refused();
	put_desc(DESC, 0, BUF, 4, VRING_DESC_F_NEXT, 8);
	offer(0);
	assert_refused();
	// A loop: of one, and of all.
	put_desc(DESC, 0, BUF, 4, VRING_DESC_F_NEXT, 0);
	offer(0);
	assert_refused();
	put_desc(DESC, 0, BUF, 0, VRING_DESC_F_NEXT, 0); // of nothing
	offer(0);
	assert_refused();
	for (uint16_t i = 0; i < 8; i++)
		put_desc(DESC, i, BUF, 4, VRING_DESC_F_NEXT, (uint16_t)((i + 1) % 8));
	offer(3);
	assert_refused();
	// Readable after writable.
	put_desc(DESC, 0, BUF, 4, VRING_DESC_F_NEXT | VRING_DESC_F_WRITE, 1);
	put_desc(DESC, 1, BUF, 4, 0, 0);
	offer(0);
	assert_refused();
	// Outside of RAM; also by its last byte, and around the end of the address space.
	put_desc(DESC, 0, RAM_BYTES - 4, 5, 0, 0);
	offer(0);
	assert_refused();
	put_desc(DESC, 0, UINT64_MAX, 2, 0, 0);
	offer(0);
	assert_refused();
	put_desc(DESC, 0, 1ULL << 63, 4, VRING_DESC_F_WRITE, 0);
	offer(0);
	assert_refused();
	put_desc(DESC, 0, RAM_BYTES - 4, 4, 0, 0);
	offer(0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	// More available than the queue can hold.
	start(8, true, true);
	put16(AVAIL + 2, 9);
	assert_refused();
	put16(AVAIL + 2, UINT16_MAX);
	assert_refused();
}

static void a_chain_above_4_gib_is_refused(void **state)
{
	(void)state;
	start(128, true, true);
	// 2,048 times 2 MiB would be needed to wrap: by indirect chains it is 256 times 16 MiB, and
	// RAM is smaller. So make RAM that large, of which nothing is touched.
	guest_mem_fini(&t.mem);
	const struct guest_mem_range range = {GPA(0), 64 * MIB};

	assert_int_equal(guest_mem_init(&t.mem, &range, 1, NULL), 0);
	start(128, true, true);
	for (uint16_t i = 0; i < 128; i++)
		put_desc(TABLE, i, 32 * MIB, 32 * MIB, i < 127 ? VRING_DESC_F_NEXT : 0,
			(uint16_t)(i + 1));
	put_desc(DESC, 0, TABLE, 128 * 16, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_refused();
	put_desc(TABLE, 127, 32 * MIB, 32 * MIB - 1, 0, 0);
	put_desc(DESC, 0, TABLE, 128 * 16, VRING_DESC_F_INDIRECT, 0);
	offer(0);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.readable_bytes, UINT32_MAX);
}

static void a_live_head_is_not_taken_again(void **state)
{
	(void)state;
	put_desc(DESC, 3, BUF, 4, 0, 0);
	offer(3);
	offer(3);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.q.nr_in_flight, 1);
	assert_int_equal(virtq_pop(&t.q, &t.chain), -EPROTO);
	// What is in flight can still be given back.
	virtq_push(&t.q, 3, 0);
	assert_int_equal(t.q.nr_in_flight, 0);
}

static void unpop_offers_the_same_chain_again(void **state)
{
	(void)state;
	put_desc(DESC, 1, BUF, 4, 0, 0);
	put_desc(DESC, 2, BUF, 4, 0, 0);
	offer(1);
	offer(2);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.head, 2);
	assert_false(virtq_wait(&t.q));
	virtq_unpop(&t.q, 2);
	virtq_unpop(&t.q, 1);
	assert_true(virtq_wait(&t.q));
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.head, 1);
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(t.chain.head, 2);
}

// The guest scribbles on the used ring, and both indices wrap.
static void indices_are_our_own_and_wrap(void **state)
{
	(void)state;
	start(4, false, false);
	for (uint16_t i = 0; i < 4; i++)
		put_desc(DESC, i, BUF + i, 1, 0, 0);
	for (uint32_t i = 0; i < 70000; i++) {
		uint16_t head = (uint16_t)(i * 7 % 4);

		offer(head);
		assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
		assert_int_equal(t.chain.head, head);
		put16(USED + 2, (uint16_t)(i * 31));
		virtq_push(&t.q, head, i);
		put16(USED + 2, (uint16_t)(i * 17));
		assert_true(virtq_publish(&t.q));
		assert_int_equal(get16(USED + 2), (uint16_t)(i + 1));
		assert_int_equal(get16(USED + 4 + 8 * (i % 4)), head);
		assert_int_equal(get16(USED + 4 + 8 * (i % 4) + 4), (uint16_t)i);
		assert_int_equal(virtq_pop(&t.q, &t.chain), 0);
	}
}

static void one_interrupt_for_many_and_only_if_wanted(void **state)
{
	const uint64_t used_event = AVAIL + 4 + 2 * 8;

	(void)state;
	for (uint16_t i = 0; i < 8; i++)
		put_desc(DESC, i, BUF, 1, 0, 0);
	put16(used_event, 2); // wants to hear of the third
	for (uint16_t i = 0; i < 4; i++) {
		offer(i);
		assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	}
	assert_false(virtq_publish(&t.q));
	virtq_push(&t.q, 0, 0);
	virtq_push(&t.q, 1, 0);
	assert_false(virtq_publish(&t.q));
	virtq_push(&t.q, 2, 0);
	virtq_push(&t.q, 3, 0);
	assert_true(virtq_publish(&t.q));
	assert_false(virtq_publish(&t.q));
	// Without EVENT_IDX there is the flag.
	start(8, false, false);
	for (uint16_t i = 0; i < 2; i++) {
		put_desc(DESC, i, BUF, 1, 0, 0);
		offer(i);
		assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	}
	put16(AVAIL, VRING_AVAIL_F_NO_INTERRUPT);
	virtq_push(&t.q, 0, 0);
	assert_false(virtq_publish(&t.q));
	put16(AVAIL, 0);
	virtq_push(&t.q, 1, 0);
	assert_true(virtq_publish(&t.q));
}

static void waiting_asks_for_the_next_and_sees_what_came_meanwhile(void **state)
{
	const uint64_t avail_event = USED + 4 + 8 * 8;

	(void)state;
	put_desc(DESC, 0, BUF, 1, 0, 0);
	assert_false(virtq_wait(&t.q));
	assert_int_equal(get16(avail_event), 0);
	offer(0);
	assert_true(virtq_wait(&t.q));
	assert_int_equal(virtq_pop(&t.q, &t.chain), 1);
	assert_int_equal(get16(avail_event), 0); // not a word before we wait
	assert_false(virtq_wait(&t.q));
	assert_int_equal(get16(avail_event), 1);
}

// A double fetch: the guest flips the length while the chain is parsed. Whatever we got, it has
// been checked.
struct flipper {
	_Atomic bool stop;
	uint64_t flips;
};

static void *flip_len(void *arg)
{
	struct flipper *flipper = arg;
	volatile uint32_t *len = (volatile uint32_t *)(void *)(t.mem.regions[0].hva + DESC + 8);

	while (!flipper->stop) {
		*len = UINT32_MAX;
		*len = 16;
		flipper->flips++;
	}
	return NULL;
}

// It is a data race by design, which TSan would report.
#if defined(__SANITIZE_THREAD__)
#define RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RACES 1
#endif
#endif

static void a_length_that_flips_is_read_once(void **state)
{
	struct flipper flipper = {0};
	pthread_t thread;
	unsigned int refused = 0, taken = 0;

	(void)state;
#ifdef RACES
	skip();
#endif
	put_desc(DESC, 0, RAM_BYTES - 16, 16, VRING_DESC_F_WRITE, 0);
	assert_int_equal(pthread_create(&thread, NULL, flip_len, &flipper), 0);
	for (uint32_t i = 0; i < 300000 || !refused || !taken; i++) {
		int r;

		offer(0);
		r = virtq_pop(&t.q, &t.chain);
		if (r == 1) {
			assert_int_equal(t.chain.writable_bytes, 16);
			assert_int_equal(t.chain.segs[0].len_bytes, 16);
			virtq_push(&t.q, 0, 16);
			virtq_publish(&t.q);
			taken++;
			continue;
		}
		assert_int_equal(r, -EPROTO);
		refused++;
		t.avail_idx = 0;
		put16(AVAIL + 2, 0);
		struct virtq_config config = config_of(8);

		assert_int_equal(virtq_activate(&t.q, &config, VIRTQ_SIZE_MAX, &t.mem), 0);
	}
	flipper.stop = true;
	pthread_join(thread, NULL);
}

// Both sides at full speed, sleeping on event indices alone: a lost notification would hang it.
#define ROUNDS 200000U

static struct {
	pthread_mutex_t lock;
	pthread_cond_t cond;
	unsigned int kicks, irqs;
} bell = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};

static void ring_bell(unsigned int *which)
{
	pthread_mutex_lock(&bell.lock);
	++*which;
	pthread_cond_broadcast(&bell.cond);
	pthread_mutex_unlock(&bell.lock);
}

static void wait_bell(unsigned int *which)
{
	pthread_mutex_lock(&bell.lock);
	while (!*which)
		pthread_cond_wait(&bell.cond, &bell.lock);
	*which = 0;
	pthread_mutex_unlock(&bell.lock);
}

static void *device_side(void *arg)
{
	uint32_t done = 0;

	while (done < ROUNDS) {
		int r = virtq_pop(&t.q, &t.chain);
		uint32_t val;

		if (r < 0)
			return arg;
		if (r == 0) {
			if (virtq_publish(&t.q))
				ring_bell(&bell.irqs);
			if (!virtq_wait(&t.q))
				wait_bell(&bell.kicks);
			continue;
		}
		virtq_chain_read(&t.chain, 0, &val, sizeof(val));
		val = ~val;
		virtq_chain_write(&t.chain, 0, &val, sizeof(val));
		virtq_push(&t.q, t.chain.head, sizeof(val));
		done++;
	}
	if (virtq_publish(&t.q))
		ring_bell(&bell.irqs);
	return NULL;
}

static void no_notification_is_lost_between_threads(void **state)
{
	const uint64_t used_event = AVAIL + 4 + 2 * 8, avail_event = USED + 4 + 8 * 8;
	uint32_t sent = 0, got = 0;
	uint16_t kicked = 0;
	pthread_t thread;
	void *failed;

	(void)state;
	for (uint16_t i = 0; i < 4; i++) {
		put_desc(DESC, (uint32_t)i * 2, BUF + i * 64U, 4, VRING_DESC_F_NEXT,
			(uint16_t)(i * 2 + 1));
		put_desc(DESC, (uint32_t)i * 2 + 1, BUF + i * 64U + 32, 4, VRING_DESC_F_WRITE, 0);
	}
	assert_int_equal(pthread_create(&thread, NULL, device_side, &t), 0);
	while (got < ROUNDS) {
		while (sent < ROUNDS && sent - got < 4) {
			assert_int_equal(guest_mem_write(&t.mem, GPA(BUF + sent % 4 * 64), &sent,
						 sizeof(sent)),
				0);
			offer((uint16_t)(sent % 4 * 2));
			sent++;
		}
		atomic_thread_fence(memory_order_seq_cst);
		if ((uint16_t)(t.avail_idx - get16(avail_event) - 1) <
			(uint16_t)(t.avail_idx - kicked))
			ring_bell(&bell.kicks);
		kicked = t.avail_idx;
		if (get16(USED + 2) == (uint16_t)got) {
			put16(used_event, (uint16_t)got);
			atomic_thread_fence(memory_order_seq_cst);
			if (get16(USED + 2) == (uint16_t)got)
				wait_bell(&bell.irqs);
		}
		while (get16(USED + 2) != (uint16_t)got) {
			uint32_t val;

			assert_int_equal(guest_mem_read(&t.mem, GPA(BUF + got % 4 * 64 + 32), &val,
						 sizeof(val)),
				0);
			assert_int_equal(val, ~got);
			got++;
		}
	}
	pthread_join(thread, &failed);
	assert_null(failed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			activation_checks_size_alignment_and_range, setup, teardown),
		cmocka_unit_test_setup_teardown(a_chain_is_read_and_written, setup, teardown),
		cmocka_unit_test_setup_teardown(
			iovecs_cover_exactly_what_is_asked, setup, teardown),
		cmocka_unit_test_setup_teardown(written_pages_are_marked, setup, teardown),
		cmocka_unit_test_setup_teardown(indirect_tables, setup, teardown),
		cmocka_unit_test_setup_teardown(lies_are_refused, setup, teardown),
		cmocka_unit_test_setup_teardown(a_chain_above_4_gib_is_refused, setup, teardown),
		cmocka_unit_test_setup_teardown(a_live_head_is_not_taken_again, setup, teardown),
		cmocka_unit_test_setup_teardown(unpop_offers_the_same_chain_again, setup, teardown),
		cmocka_unit_test_setup_teardown(indices_are_our_own_and_wrap, setup, teardown),
		cmocka_unit_test_setup_teardown(
			one_interrupt_for_many_and_only_if_wanted, setup, teardown),
		cmocka_unit_test_setup_teardown(
			waiting_asks_for_the_next_and_sees_what_came_meanwhile, setup, teardown),
		cmocka_unit_test_setup_teardown(a_length_that_flips_is_read_once, setup, teardown),
		cmocka_unit_test_setup_teardown(
			no_notification_is_lost_between_threads, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
