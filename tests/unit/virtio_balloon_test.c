// SPDX-License-Identifier: Apache-2.0
// devices/virtio_balloon: what the guest gives up returns to the host, and nothing else does.
#include "tests/support/test.h"

#include <errno.h>
#include <linux/virtio_balloon.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_mmio.h>
#include <sys/stat.h>

#include "devices/virtio_balloon.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"

#define INFLATE 0U
#define DEFLATE 1U
#define STATS   2U
#define REPORT  4U

#define MEM_PAGES 1024U
#define VERSION_1 (1ULL << VIRTIO_F_VERSION_1)
#define F_STATS   (1ULL << VIRTIO_BALLOON_F_STATS_VQ)
#define F_REPORT  (1ULL << VIRTIO_BALLOON_F_REPORTING)

static struct {
	struct fake_driver fake;
	gpa_t args, mem;
} t;

static void start(uint64_t features)
{
	fake_start_with(&t.fake, features, 128);
	t.args = fake_alloc(&t.fake, 2 * PAGE_BYTES);
	t.mem = fake_alloc(&t.fake, MEM_PAGES * PAGE_BYTES);
	for (unsigned int i = 0; i < MEM_PAGES; i++)
		guest_mem_write(&t.fake.mem, GPA(t.mem.v + i * PAGE_BYTES + 7), "full", 4);
}

static int setup(void **state)
{
	struct virtio_env env;
	struct virtio_dev *dev;

	(void)state;
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (virtio_balloon_create(&dev, &env, NULL) < 0)
		return -1;
	fake_attach(&t.fake, dev);
	start(fake_device_features(&t.fake));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&t.fake);
	return 0;
}

static struct virtio_balloon_stats stats(void)
{
	struct virtio_balloon_stats s;

	virtio_balloon_get_stats(t.fake.dev, &s);
	return s;
}

static uint64_t host_pages(void)
{
	uint64_t bitmap[1024] = {0}, pages = 0;

	assert_true(guest_mem_bitmap_words(&t.fake.mem) <= ARRAY_SIZE(bitmap));
	assert_int_equal(guest_mem_touched(&t.fake.mem, false, bitmap, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(bitmap); i++)
		pages += (uint64_t)__builtin_popcountll(bitmap[i]);
	return pages;
}

static bool page_full(unsigned int page)
{
	char text[4];

	guest_mem_read(&t.fake.mem, GPA(t.mem.v + page * PAGE_BYTES + 7), text, 4);
	return memcmp(text, "full", 4) == 0;
}

static void give(unsigned int queue, const struct fake_buf *bufs, unsigned int nr)
{
	assert_true(fake_add_indirect(&t.fake, queue, bufs, nr, GPA(t.args.v + PAGE_BYTES)) >= 0);
	fake_kick(&t.fake, queue);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, queue, NULL, NULL));
}

static void send_pfns(unsigned int queue, const uint32_t *pages, unsigned int nr)
{
	const struct fake_buf buf = {t.args, nr * 4, false};
	uint8_t raw[4];

	for (unsigned int i = 0; i < nr; i++) {
		put_le32(raw, (uint32_t)(t.mem.v / PAGE_BYTES) + pages[i]);
		guest_mem_write(&t.fake.mem, GPA(t.args.v + i * 4U), raw, 4);
	}
	give(queue, &buf, 1);
}

static void inflated_pages_return_to_the_host(void **state)
{
	// Ascending, descending, alone, twice.
	static const uint32_t pages[] = {10, 11, 12, 13, 33, 32, 31, 50, 70, 72, 71, 70};
	const uint64_t before = host_pages();
	uint64_t bitmap[FAKE_RAM_BYTES / PAGE_BYTES / 64] = {0};

	(void)state;
	assert_int_equal(guest_mem_track_start(&t.fake.mem, NULL), 0);
	send_pfns(INFLATE, pages, ARRAY_SIZE(pages));
	assert_int_equal(host_pages(), before - 11);
	guest_mem_track_collect(&t.fake.mem, bitmap);
	for (unsigned int i = 0; i < MEM_PAGES; i++) {
		const uint64_t page = t.mem.v / PAGE_BYTES + i;
		bool given = false;

		for (unsigned int k = 0; k < ARRAY_SIZE(pages); k++)
			given |= pages[k] == i;
		// Read through the bitmap first: reading makes the page anew.
		assert_int_equal(bitmap[page / 64] >> page % 64 & 1, given);
		assert_int_equal(page_full(i), !given);
	}
	assert_int_equal(stats().inflated_bytes, ARRAY_SIZE(pages) * PAGE_BYTES);
	assert_int_equal(stats().bad_pages, 0);
	// Taken back: usable at once.
	send_pfns(DEFLATE, pages, 4);
	guest_mem_write(&t.fake.mem, GPA(t.mem.v + 10 * PAGE_BYTES + 7), "full", 4);
	assert_true(page_full(10));
}

static void pages_outside_of_ram_are_ignored(void **state)
{
	static const uint32_t bad[] = {UINT32_MAX, FAKE_RAM_BYTES / PAGE_BYTES, UINT32_MAX - 1};
	const struct fake_buf buf = {t.args, sizeof(bad) + 3, false}; // and a fraction of one
	const uint64_t before = host_pages();
	uint8_t raw[4];

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		put_le32(raw, bad[i]);
		guest_mem_write(&t.fake.mem, GPA(t.args.v + i * 4U), raw, 4);
	}
	give(INFLATE, &buf, 1);
	assert_int_equal(host_pages(), before);
	assert_int_equal(stats().bad_pages, 3);
	assert_int_equal(fake_status(&t.fake), 15);
}

static void reported_blocks_return_to_the_host(void **state)
{
	struct fake_buf bufs[32];
	uint64_t before;

	(void)state;
	before = host_pages();
	for (unsigned int i = 0; i < 32; i++)
		bufs[i] = (struct fake_buf){
			GPA(t.mem.v + i * 32 * PAGE_BYTES), 16 * PAGE_BYTES, true};
	give(REPORT, bufs, 32);
	// The table of the descriptors took a page of its own.
	assert_in_range(host_pages(), before - 512, before - 512 + 1);
	for (unsigned int i = 0; i < MEM_PAGES; i++)
		assert_int_equal(page_full(i), i % 32 >= 16);
	assert_int_equal(stats().reported_bytes, 512 * PAGE_BYTES);
	// A block's edges are not the pages' around it.
	bufs[0] = (struct fake_buf){GPA(t.mem.v + 16 * PAGE_BYTES + 8), 3 * PAGE_BYTES, true};
	give(REPORT, bufs, 1);
	assert_true(page_full(16));
	assert_false(page_full(17));
	assert_false(page_full(18));
	assert_true(page_full(19));
}

// Linux numbers its queues without gaps for what was not negotiated.
static void the_queue_of_reports_is_found_by_any_count(void **state)
{
	static const struct {
		uint64_t features;
		unsigned int queue;
	} cases[] = {
		{F_STATS | F_REPORT, 4}, {F_STATS | F_REPORT, 3}, {F_REPORT, 2}, {F_REPORT, 4}};

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fake_buf buf;

		start(VERSION_1 | 1ULL << 28 | cases[i].features);
		buf = (struct fake_buf){GPA(t.mem.v + 8 * PAGE_BYTES), 8 * PAGE_BYTES, true};
		give(cases[i].queue, &buf, 1);
		assert_false(page_full(8));
		assert_true(page_full(7));
	}
}

static void a_target_is_announced_and_stays_ours(void **state)
{
	uint8_t raw[4];

	(void)state;
	fake_irqs(&t.fake);
	virtio_balloon_set_target(t.fake.dev, 100 * PAGE_BYTES + 5);
	assert_int_equal(fake_irqs(&t.fake), 1);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_CONFIG);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), 100);
	assert_int_equal(stats().target_bytes, 100 * PAGE_BYTES);
	put_le32(raw, 60);
	virtio_mmio_write_on_loop(t.fake.dev, VIRTIO_MMIO_CONFIG + 4, raw, 4);
	assert_int_equal(stats().actual_bytes, 60 * PAGE_BYTES);
	virtio_mmio_write_on_loop(t.fake.dev, VIRTIO_MMIO_CONFIG, raw, 4);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), 100);
	virtio_balloon_set_target(t.fake.dev, UINT64_MAX);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), UINT32_MAX);
	// A reset gives all back; the target stands.
	virtio_balloon_set_target(t.fake.dev, 4 * PAGE_BYTES);
	start(fake_device_features(&t.fake));
	assert_int_equal(stats().actual_bytes, 0);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), 4);
}

static void put_figure(unsigned int at, uint16_t tag, uint64_t val)
{
	uint8_t raw[10];

	put_le16(raw, tag);
	put_le64(raw + 2, val);
	guest_mem_write(&t.fake.mem, GPA(t.args.v + at * 10U), raw, sizeof(raw));
}

static void figures_come_when_asked(void **state)
{
	struct fake_buf buf = {t.args, 40 + 3, false};
	int head, used;

	(void)state;
	assert_int_equal(stats().free_bytes, VIRTIO_BALLOON_UNKNOWN);
	// The driver's first buffer is with us until somebody asks.
	put_figure(0, VIRTIO_BALLOON_S_MEMFREE, 1000);
	put_figure(1, VIRTIO_BALLOON_S_MEMTOT, 5000);
	put_figure(2, 999, 1);
	put_figure(3, VIRTIO_BALLOON_S_MAJFLT, 12);
	put_figure(4, VIRTIO_BALLOON_S_AVAIL, 77); // cut off
	head = fake_add(&t.fake, STATS, &buf, 1);
	fake_kick(&t.fake, STATS);
	fake_run(&t.fake);
	assert_false(fake_get_used(&t.fake, STATS, NULL, NULL));
	assert_int_equal(stats().free_bytes, 1000);
	assert_int_equal(stats().total_bytes, 5000);
	assert_int_equal(stats().major_faults, 12);
	assert_int_equal(stats().available_bytes, VIRTIO_BALLOON_UNKNOWN);
	assert_true(stats().updated_ns > 0);
	fake_want_irq(&t.fake, STATS);
	fake_irqs(&t.fake);
	virtio_balloon_ask_stats(t.fake.dev);
	assert_int_equal(fake_irqs(&t.fake), 1);
	assert_true(fake_get_used(&t.fake, STATS, &used, NULL));
	assert_int_equal(used, head);
	// Asked again before the answer: answered as soon as there is a buffer.
	virtio_balloon_ask_stats(t.fake.dev);
	assert_false(fake_get_used(&t.fake, STATS, NULL, NULL));
	put_figure(0, VIRTIO_BALLOON_S_MEMFREE, 900);
	fake_add(&t.fake, STATS, &buf, 1);
	fake_kick(&t.fake, STATS);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, STATS, NULL, NULL));
	assert_int_equal(stats().free_bytes, 900);
	// A second buffer frees the first.
	fake_add(&t.fake, STATS, &buf, 1);
	fake_add(&t.fake, STATS, &buf, 1);
	fake_kick(&t.fake, STATS);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, STATS, NULL, NULL));
	assert_false(fake_get_used(&t.fake, STATS, NULL, NULL));
	// After a reset they are the old driver's, and so is its buffer.
	start(fake_device_features(&t.fake));
	assert_int_equal(stats().free_bytes, VIRTIO_BALLOON_UNKNOWN);
	virtio_balloon_ask_stats(t.fake.dev);
	fake_run(&t.fake);
	assert_int_equal(fake_status(&t.fake), 15);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static struct buf save(void)
{
	struct buf out = {0};
	bool drained = false;

	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	assert_true(drained);
	assert_int_equal(virtio_dev_save(t.fake.dev, &out), 0);
	return out;
}

static int restore(const struct buf *saved, struct err *err)
{
	const struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev;

	virtio_dev_destroy(TAKE_PTR(t.fake.dev));
	assert_int_equal(virtio_balloon_create(&dev, &env, err), 0);
	fake_attach(&t.fake, dev);
	return virtio_dev_restore(dev, saved->data, saved->len, err);
}

// The target, what the guest has given, and the buffer that is with us.
static void goes_on_after_a_restore(void **state)
{
	const struct fake_buf buf = {t.args, 40, false};
	const uint8_t actual[4] = {60};
	struct err err = {0};
	struct buf saved;
	uint8_t *at, was;
	int head, used;

	(void)state;
	virtio_balloon_set_target(t.fake.dev, 100 * PAGE_BYTES);
	virtio_mmio_write_on_loop(t.fake.dev, VIRTIO_MMIO_CONFIG + 4, actual, sizeof(actual));
	head = fake_add(&t.fake, STATS, &buf, 1);
	fake_kick(&t.fake, STATS);
	fake_run(&t.fake);
	saved = save();
	if (restore(&saved, &err) < 0)
		fail_msg("%s", err.msg);
	virtio_dev_resume(t.fake.dev);
	fake_run(&t.fake);
	assert_int_equal(stats().target_bytes, 100 * PAGE_BYTES);
	assert_int_equal(stats().actual_bytes, 60 * PAGE_BYTES);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG), 100);
	assert_int_equal(fake_read(&t.fake, VIRTIO_MMIO_CONFIG + 4), 60);
	assert_false(fake_get_used(&t.fake, STATS, NULL, NULL));
	virtio_balloon_ask_stats(t.fake.dev);
	assert_true(fake_get_used(&t.fake, STATS, &used, NULL));
	assert_int_equal(used, head);
	// A buffer that cannot be one.
	at = memmem(saved.data, saved.len, "stats_head", 10);
	assert_non_null(at);
	at += 10 + sizeof(uint32_t) + 1;
	was = *at;
	*at = 0x80;
	assert_int_equal(restore(&saved, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "balloon: buffer"));
	*at = was;
	assert_int_equal(restore(&saved, &err), 0);
	buf_fini(&saved);
}

// So many chains that they take more than one turn: all are done, and others have their turns.
static void a_flood_is_taken_in_turns(void **state)
{
	unsigned int used = 0;

	(void)state;
	for (unsigned int i = 0; i < 100; i++) {
		const struct fake_buf buf = {
			GPA(t.mem.v + (uint64_t)i * PAGE_BYTES), PAGE_BYTES, true};

		fake_add(&t.fake, REPORT, &buf, 1);
	}
	fake_kick(&t.fake, REPORT);
	assert_int_equal(loop_turn(&t.fake.loop, 0, NULL), 0);
	while (fake_get_used(&t.fake, REPORT, NULL, NULL))
		used++;
	assert_in_range(used, 0, 16);
	while (used < 100) {
		fake_run(&t.fake);
		while (fake_get_used(&t.fake, REPORT, NULL, NULL))
			used++;
	}
	assert_int_equal(stats().reported_bytes, 100 * PAGE_BYTES);
}

#define WITH(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	static const struct device_case device = {.name = "balloon",
		.device_id = VIRTIO_ID_BALLOON,
		.eager_queues = 0x1f,
		.create = virtio_balloon_create};
	const struct CMUnitTest tests[] = {
		WITH(inflated_pages_return_to_the_host),
		WITH(pages_outside_of_ram_are_ignored),
		WITH(reported_blocks_return_to_the_host),
		WITH(the_queue_of_reports_is_found_by_any_count),
		WITH(a_target_is_announced_and_stays_ours),
		WITH(figures_come_when_asked),
		WITH(goes_on_after_a_restore),
		WITH(a_flood_is_taken_in_turns),
	};

	return device_suite(&device) + cmocka_run_group_tests(tests, NULL, NULL);
}
