// SPDX-License-Identifier: Apache-2.0
// devices/virtio_rng: fills what it is given, bounded.
#include "tests/support/test.h"

#include <linux/virtio_ids.h>

#include "devices/virtio_rng.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"

static struct fake_driver fake;

static int setup(void **state)
{
	struct virtio_env env;
	struct virtio_dev *dev;

	(void)state;
	fake_init(&fake);
	env = fake_env(&fake);
	if (virtio_rng_create(&dev, &env, NULL) < 0)
		return -1;
	fake_attach(&fake, dev);
	fake_start(&fake);
	fake_want_irq(&fake, 0);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&fake);
	return 0;
}

static void fills_each_buffer(void **state)
{
	gpa_t gpa = fake_alloc(&fake, PAGE_BYTES);
	const struct fake_buf bufs[] = {{gpa, 8, true}, {GPA(gpa.v + 64), 56, true}};
	uint8_t page[128], again[128];
	static const uint8_t zeros[128];
	uint32_t written;
	int head, used;

	(void)state;
	head = fake_add(&fake, 0, bufs, 2);
	fake_kick(&fake, 0);
	fake_run(&fake);
	assert_int_equal(fake_irqs(&fake), 1);
	assert_true(fake_get_used(&fake, 0, &used, &written));
	assert_int_equal(used, head);
	assert_int_equal(written, 64);
	assert_int_equal(guest_mem_read(&fake.mem, gpa, page, sizeof(page)), 0);
	assert_memory_not_equal(page, zeros, 8);
	assert_memory_equal(page + 8, zeros, 56);
	assert_memory_not_equal(page + 64, zeros, 56);
	assert_memory_equal(page + 120, zeros, 8);
	fake_add_indirect(&fake, 0, bufs, 2, GPA(0));
	fake_kick(&fake, 0);
	fake_run(&fake);
	assert_true(fake_get_used(&fake, 0, &used, &written));
	assert_int_equal(guest_mem_read(&fake.mem, gpa, again, sizeof(again)), 0);
	assert_memory_not_equal(page, again, 8);
}

static void a_request_is_bounded(void **state)
{
	const struct fake_buf big = {fake_alloc(&fake, 4 * MIB), 4 * MIB, true};
	const struct fake_buf readable = {big.gpa, 64, false};
	uint32_t written;

	(void)state;
	fake_add(&fake, 0, &big, 1);
	fake_add(&fake, 0, &readable, 1);
	fake_kick(&fake, 0);
	fake_run(&fake);
	assert_true(fake_get_used(&fake, 0, NULL, &written));
	assert_int_equal(written, VIRTIO_RNG_REQUEST_BYTES);
	assert_true(fake_get_used(&fake, 0, NULL, &written));
	assert_int_equal(written, 0);
}

static void written_pages_are_marked(void **state)
{
	gpa_t gpa = fake_alloc(&fake, 2 * PAGE_BYTES);
	const struct fake_buf buf = {GPA(gpa.v + PAGE_BYTES - 4), 8, true};
	uint64_t bitmap[FAKE_RAM_BYTES / PAGE_BYTES / 64] = {0};
	uint64_t page = gpa.v / PAGE_BYTES;

	(void)state;
	assert_int_equal(guest_mem_track_start(&fake.mem, NULL), 0);
	fake_add(&fake, 0, &buf, 1);
	guest_mem_track_collect(&fake.mem, bitmap);
	memset(bitmap, 0, sizeof(bitmap));
	fake_kick(&fake, 0);
	fake_run(&fake);
	guest_mem_track_collect(&fake.mem, bitmap);
	assert_true(bitmap[page / 64] & 1ULL << page % 64);
	assert_true(bitmap[(page + 1) / 64] & 1ULL << (page + 1) % 64);
	page = fake.queues[0].used.v / PAGE_BYTES;
	assert_true(bitmap[page / 64] & 1ULL << page % 64);
}

int main(void)
{
	static const struct device_case device = {.name = "rng",
		.device_id = VIRTIO_ID_RNG,
		.eager_queues = 1,
		.create = virtio_rng_create};
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(fills_each_buffer, setup, teardown),
		cmocka_unit_test_setup_teardown(a_request_is_bounded, setup, teardown),
		cmocka_unit_test_setup_teardown(written_pages_are_marked, setup, teardown),
	};

	return device_suite(&device) + cmocka_run_group_tests(tests, NULL, NULL);
}
