// SPDX-License-Identifier: Apache-2.0
// The suite that every virtio device passes; see the header.
#include "tests/support/device_suite.h"

#include <errno.h>
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <stdlib.h>

#include "tests/support/fake_driver.h"
#include "tests/support/test.h"

#define S_READY             11 // ACKNOWLEDGE, DRIVER, FEATURES_OK
#define S_RUNNING           (S_READY | VIRTIO_CONFIG_S_DRIVER_OK)
#define VERSION_1           (1ULL << VIRTIO_F_VERSION_1)
#define NR_CREATES          1000
#define NR_RESETS           200
#define NR_HOSTILE          300
#define DESC_BYTES_OF(size) ((size)*16U)

static const struct device_case *device;
static struct fake_driver fake;

static void attach(void)
{
	struct virtio_env env = fake_env(&fake);
	struct virtio_dev *dev = NULL;
	struct err err = {0};

	if (device->create(&dev, &env, &err) < 0)
		fail_msg("%s", err.msg);
	fake_attach(&fake, dev);
}

static int setup(void **state)
{
	(void)state;
	fake_init(&fake);
	attach();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&fake);
	return 0;
}

static uint16_t size_max(void)
{
	fake_write(&fake, VIRTIO_MMIO_QUEUE_SEL, 0);
	return (uint16_t)fake_read(&fake, VIRTIO_MMIO_QUEUE_NUM_MAX);
}

static void says_what_it_is(void **state)
{
	(void)state;
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_MAGIC_VALUE), 0x74726976);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_VERSION), 2);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_DEVICE_ID), device->device_id);
	assert_int_equal(fake_status(&fake), 0);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), 0);
	assert_true(fake_device_features(&fake) & VERSION_1);
	fake_write(&fake, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_DEVICE_FEATURES), 0);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_SHM_LEN_LOW), UINT32_MAX);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_SHM_BASE_HIGH), UINT32_MAX);
	for (unsigned int i = 0; i < fake.dev->nr_queues; i++) {
		fake_write(&fake, VIRTIO_MMIO_QUEUE_SEL, i);
		assert_true(fake_read(&fake, VIRTIO_MMIO_QUEUE_NUM_MAX) > 0);
		assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), 0);
	}
	static const uint32_t none[] = {8, 31, 32, 65536, UINT32_MAX};

	for (unsigned int i = 0; i < ARRAY_SIZE(none); i++) {
		fake_write(&fake, VIRTIO_MMIO_QUEUE_SEL, none[i]);
		assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
	}
}

static void takes_any_offered_features_with_version_1_and_no_others(void **state)
{
	uint64_t offered = fake_device_features(&fake);

	(void)state;
	for (unsigned int bit = 0; bit < 64; bit++) {
		uint64_t one = 1ULL << bit;

		assert_int_equal(fake_negotiate(&fake, VERSION_1 | one), (offered & one) != 0);
		assert_int_equal(fake_negotiate(&fake, offered ^ one),
			(offered & one) != 0 && one != VERSION_1);
	}
	assert_true(fake_negotiate(&fake, offered));
	// They stand once they are accepted.
	fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES, 0);
	fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING);
	assert_int_equal(fake_status(&fake), S_RUNNING);
	assert_int_equal(fake.dev->features, offered);
}

static void other_orders_of_status_do_nothing(void **state)
{
	static const uint32_t legal[] = {0, 1, 3, 11, 15};

	(void)state;
	for (unsigned int at = 0; at < ARRAY_SIZE(legal); at++) {
		for (uint32_t val = 1; val < 512; val++) {
			uint32_t want = legal[at];

			fake_negotiate(&fake, VERSION_1);
			if (at < 3)
				fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
			for (unsigned int i = 1; i <= at; i++) {
				if (i == 3) {
					fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
					fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES, 1);
				}
				fake_write(&fake, VIRTIO_MMIO_STATUS, legal[i]);
			}
			assert_int_equal(fake_status(&fake), legal[at]);
			if (at == 2) {
				fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
				fake_write(&fake, VIRTIO_MMIO_DRIVER_FEATURES, 1);
			}
			fake_write(&fake, VIRTIO_MMIO_STATUS, val);
			// NEEDS_RESET is the device's to say.
			if (at + 1 < ARRAY_SIZE(legal) && (val & ~64U) == legal[at + 1])
				want = legal[at + 1];
			if ((val & ~64U) == (legal[at] | 128U))
				want = legal[at] | 128U;
			assert_int_equal(fake_status(&fake), want);
		}
	}
	// After FAILED there is only reset.
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	fake_write(&fake, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_FAILED);
	fake_write(&fake, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_FAILED | VIRTIO_CONFIG_S_ACKNOWLEDGE);
	assert_int_equal(fake_status(&fake), VIRTIO_CONFIG_S_FAILED);
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	assert_int_equal(fake_status(&fake), 0);
}

static void bad_queues_end_in_needs_reset_and_reset_mends_it(void **state)
{
	const uint16_t size = size_max();
	const struct {
		uint32_t size;
		uint64_t desc, avail, used;
	} bad[] = {
		{0, 0x20000, 0x40000, 0x60000},
		{size * 2U, 0x20000, 0x40000, 0x60000},
		{size - 1U, 0x20000, 0x40000, 0x60000},
		{0x10000U + size, 0x20000, 0x40000, 0x60000},
		{size, 0x20008, 0x40000, 0x60000},
		{size, 0x20000, 0x40001, 0x60000},
		{size, 0x20000, 0x40000, 0x60002},
		{size, FAKE_RAM_BYTES, 0x40000, 0x60000},
		{size, FAKE_RAM_BYTES - DESC_BYTES_OF(size) + 16U, 0x40000, 0x60000},
		{size, 0x20000, UINT64_MAX - 1, 0x60000},
		{size, 0x20000, 0x40000, FAKE_RAM_BYTES - 4},
		{size, 0x20000, 0x40000, 1ULL << 63},
	};

	(void)state;
	for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++) {
		for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
			assert_true(fake_negotiate(&fake, VERSION_1));
			for (unsigned int k = 0; k < fake.dev->nr_queues; k++)
				if (k != queue)
					fake_setup_queue(&fake, k, size);
			fake_write_queue(
				&fake, queue, bad[i].size, bad[i].desc, bad[i].avail, bad[i].used);
			fake_irqs(&fake);
			fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING);
			assert_int_equal(
				fake_status(&fake), S_RUNNING | VIRTIO_CONFIG_S_NEEDS_RESET);
			assert_int_equal(fake_irqs(&fake), 1);
			assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS),
				VIRTIO_MMIO_INT_CONFIG);
			fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
			fake_run(&fake);
		}
	}
	fake_start(&fake);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

static void queues_stand_once_running(void **state)
{
	const uint16_t size = size_max();

	(void)state;
	// Nothing of a queue can be set before FEATURES_OK,
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	fake_write_queue(&fake, 0, size, 0x20000, 0x40000, 0x60000);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), 0);
	// while it is ready, or while the device runs.
	assert_true(fake_negotiate(&fake, VERSION_1));
	fake_setup_queue(&fake, 0, size);
	fake_write_queue(&fake, 0, 3, 1, 1, 1);
	fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING);
	assert_int_equal(fake_status(&fake), S_RUNNING);
	fake_write_queue(&fake, 0, 3, 1, 1, 1);
	fake_write(&fake, VIRTIO_MMIO_QUEUE_READY, 0);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), 1);
	assert_int_equal(fake.dev->queues[0].saved.size, size);
	// A queue that the driver did not set up is not touched.
	for (unsigned int i = 0; i < fake.dev->nr_queues; i++) {
		fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, i);
		fake_run(&fake);
	}
	fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, fake.dev->nr_queues);
	fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, UINT32_MAX);
	fake_run(&fake);
	assert_int_equal(fake_status(&fake), S_RUNNING);
}

static void lie_head(unsigned int queue)
{
	fake_put_avail(&fake, queue, fake.queues[queue].size);
}

static void lie_loop(unsigned int queue)
{
	gpa_t buf = fake_alloc(&fake, PAGE_BYTES);

	fake_put_desc(&fake, queue, 0, buf.v, 64, VRING_DESC_F_NEXT, 0);
	fake_put_avail(&fake, queue, 0);
}

static void lie_jump(unsigned int queue)
{
	fake_put_avail_idx(&fake, queue, (uint16_t)(fake.queues[queue].size + 1));
}

static void lie_address(unsigned int queue)
{
	fake_put_desc(&fake, queue, 0, FAKE_RAM_BYTES - 1, 64, VRING_DESC_F_WRITE, 0);
	fake_put_avail(&fake, queue, 0);
}

static void lie_order(unsigned int queue)
{
	gpa_t buf = fake_alloc(&fake, PAGE_BYTES);

	fake_put_desc(&fake, queue, 0, buf.v, 64, VRING_DESC_F_NEXT | VRING_DESC_F_WRITE, 1);
	fake_put_desc(&fake, queue, 1, buf.v, 64, 0, 0);
	fake_put_avail(&fake, queue, 0);
}

static void lies_in_a_ring_end_in_needs_reset_and_reset_mends_it(void **state)
{
	static void (*const lies[])(unsigned int queue) = {
		lie_head, lie_loop, lie_jump, lie_address, lie_order};

	(void)state;
	for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++) {
		for (unsigned int i = 0; i < ARRAY_SIZE(lies); i++) {
			fake_start(&fake);
			fake_run(&fake);
			fake_irqs(&fake);
			lies[i](queue);
			fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
			fake_run(&fake);
			if (device->eager_queues & 1U << queue) {
				assert_int_equal(fake_status(&fake),
					S_RUNNING | VIRTIO_CONFIG_S_NEEDS_RESET);
				assert_int_equal(fake_irqs(&fake), 1);
			}
			// Nothing more is taken, on any queue.
			for (unsigned int k = 0; k < fake.dev->nr_queues; k++)
				fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, k);
			fake_run(&fake);
			assert_false(fake_get_used(&fake, queue, NULL, NULL));
		}
	}
	fake_start(&fake);
}

static void reset_at_any_moment(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < NR_RESETS; i++) {
		const uint16_t size = (uint16_t)(1U << i % 8);
		uint64_t features = VERSION_1;

		if (i % 2)
			features |= 1ULL << VIRTIO_RING_F_EVENT_IDX;
		fake_start_with(&fake, features, size < size_max() ? size : size_max());
		for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++) {
			struct fake_buf buf = {fake_alloc(&fake, PAGE_BYTES), PAGE_BYTES, i % 3};

			fake_add(&fake, queue, &buf, 1);
			fake_kick(&fake, queue);
		}
		for (unsigned int k = 0; k < i % 4; k++)
			loop_turn(&fake.loop, 0, NULL);
		fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
		assert_int_equal(fake_status(&fake), 0);
		assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), 0);
		fake_write(&fake, VIRTIO_MMIO_QUEUE_SEL, 0);
		assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), 0);
	}
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static bool flag(void *opaque)
{
	return *(bool *)opaque;
}

// Nothing is taken while drained, and nothing of what came meanwhile is forgotten.
static void drain_stops_intake_and_resume_catches_up(void **state)
{
	bool drained = false;

	(void)state;
	fake_start(&fake);
	virtio_dev_drain(fake.dev, set_flag, &drained);
	assert_true(fake_run_until(&fake, flag, &drained));
	for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++) {
		fake_put_avail(&fake, queue, fake.queues[queue].size);
		fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
	}
	fake_run(&fake);
	assert_int_equal(fake_status(&fake), S_RUNNING);
	virtio_dev_resume(fake.dev);
	fake_run(&fake);
	assert_int_equal(fake_status(&fake),
		S_RUNNING | (device->eager_queues ? VIRTIO_CONFIG_S_NEEDS_RESET : 0));
}

// --- Saved state -----------------------------------------------------------------------------

static void every_byte_is_saved_or_said_not_to_be(void **state)
{
	struct err err = {0};

	(void)state;
	if (state_check(fake.dev->ops->state, &err) < 0)
		fail_msg("%s", err.msg);
}

static struct buf save(void)
{
	struct buf out = {0};
	bool drained = false;

	virtio_dev_drain(fake.dev, set_flag, &drained);
	assert_true(fake_run_until(&fake, flag, &drained));
	assert_int_equal(virtio_dev_save(fake.dev, &out), 0);
	return out;
}

// Another device in the place of the one that is there, over the same memory.
static void replace(void)
{
	virtio_dev_destroy(TAKE_PTR(fake.dev));
	fake_run(&fake);
	attach();
	fake_irqs(&fake);
}

// The device goes on in another one, which is the same in all that counts.
static void move(void)
{
	struct buf before = save(), after = {0};
	const uint64_t features = fake.dev->features;
	const uint32_t gsi = virtio_dev_gsi(fake.dev);
	const bool pending = fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS) != 0;
	struct err err = {0};
	uint8_t config[VIRTIO_CONFIG_MAX_BYTES];

	memcpy(config, fake.dev->config, sizeof(config));
	replace();
	if (virtio_dev_restore(fake.dev, before.data, before.len, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(virtio_dev_save(fake.dev, &after), 0);
	assert_int_equal(before.len, after.len);
	assert_memory_equal(before.data, after.data, before.len);
	assert_int_equal(fake.dev->features, features);
	assert_int_equal(virtio_dev_gsi(fake.dev), gsi);
	assert_memory_equal(fake.dev->config, config, sizeof(config));
	assert_int_equal(fake_irqs(&fake), pending);
	virtio_dev_resume(fake.dev);
	fake_run(&fake);
	buf_fini(&before);
	buf_fini(&after);
}

static void goes_on_in_another_device_whatever_its_status(void **state)
{
	static const uint32_t statuses[] = {
		VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER};

	(void)state;
	// An interrupt that a new device would not have by itself; a driver's resets leave it.
	fake.dev->gsi = FAKE_GSI + 1;
	move();
	assert_int_equal(virtio_dev_gsi(fake.dev), FAKE_GSI + 1);
	assert_int_equal(fake_status(&fake), 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(statuses); i++) {
		fake_write(&fake, VIRTIO_MMIO_STATUS, statuses[i]);
		move();
		assert_int_equal(fake_status(&fake), statuses[i]);
	}
	assert_true(fake_negotiate(&fake, VERSION_1));
	fake_setup_queue(&fake, 0, size_max());
	move();
	assert_int_equal(fake_status(&fake), S_READY);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), 1);
	fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING);
	assert_int_equal(fake_status(&fake), S_RUNNING);
	fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING | VIRTIO_CONFIG_S_FAILED);
	move();
	assert_int_equal(fake_status(&fake), S_RUNNING | VIRTIO_CONFIG_S_FAILED);
	// A queue that could not be put into use.
	assert_true(fake_negotiate(&fake, VERSION_1));
	fake_write_queue(&fake, 0, 3, 0, 0, 0);
	fake_write(&fake, VIRTIO_MMIO_STATUS, S_RUNNING);
	move();
	assert_int_equal(fake_status(&fake), S_RUNNING | VIRTIO_CONFIG_S_NEEDS_RESET);
	fake_start(&fake);
	assert_int_equal(virtio_dev_gsi(fake.dev), FAKE_GSI + 1);
}

// Generation after generation, with the driver none the wiser: its rings go on where they stood.
static void goes_on_in_another_device_generation_after_generation(void **state)
{
	(void)state;
	fake_start(&fake);
	for (unsigned int i = 0; i < 4; i++) {
		move();
		assert_int_equal(fake_status(&fake), S_RUNNING);
	}
	for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++) {
		fake_put_avail(&fake, queue, fake.queues[queue].size);
		fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
	}
	fake_run(&fake);
	assert_int_equal(fake_status(&fake),
		S_RUNNING | (device->eager_queues ? VIRTIO_CONFIG_S_NEEDS_RESET : 0));
	move();
	assert_int_equal(fake_status(&fake),
		S_RUNNING | (device->eager_queues ? VIRTIO_CONFIG_S_NEEDS_RESET : 0));
	fake_start(&fake);
}

// What a driver has made available while its device was away is found.
static void what_came_before_the_move_is_found_after_it(void **state)
{
	struct buf saved;
	struct err err = {0};

	(void)state;
	fake_start(&fake);
	saved = save();
	for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++)
		fake_put_avail(&fake, queue, fake.queues[queue].size);
	replace();
	if (virtio_dev_restore(fake.dev, saved.data, saved.len, &err) < 0)
		fail_msg("%s", err.msg);
	fake_run(&fake);
	assert_int_equal(fake_status(&fake), S_RUNNING);
	virtio_dev_resume(fake.dev);
	fake_run(&fake);
	assert_int_equal(fake_status(&fake),
		S_RUNNING | (device->eager_queues ? VIRTIO_CONFIG_S_NEEDS_RESET : 0));
	buf_fini(&saved);
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

// A snapshot may come from anybody. What such a state does is an error, or the guest's loss alone.
static void a_hostile_state_is_an_error_or_the_guests_loss(void **state)
{
	unsigned int taken = 0;
	struct buf saved;

	(void)state;
	fake_start(&fake);
	saved = save();
	virtio_dev_resume(fake.dev);
	for (unsigned int i = 0; i < NR_HOSTILE; i++) {
		struct buf bad = {0};
		struct err err = {0};
		uint64_t dice = mix(i + 1);
		int r;

		buf_append(&bad, saved.data, i % 16 == 15 ? mix(dice) % saved.len : saved.len);
		for (unsigned int k = 0; k <= dice % 3 && bad.len; k++) {
			dice = mix(dice);
			bad.data[dice % bad.len] = (uint8_t)(dice >> 32);
		}
		replace();
		r = virtio_dev_restore(fake.dev, bad.data, bad.len, &err);
		buf_fini(&bad);
		if (r < 0) {
			assert_int_equal(r, -EINVAL);
			assert_true(err.msg[0] != 0);
			continue;
		}
		taken++;
		virtio_dev_resume(fake.dev);
		for (unsigned int queue = 0; queue < fake.dev->nr_queues; queue++)
			fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, queue);
		fake_run(&fake);
		fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
		assert_int_equal(fake_status(&fake), 0);
	}
	assert_in_range(taken, 1, NR_HOSTILE - 1);
	replace();
	fake_start(&fake);
	buf_fini(&saved);
}

static void accesses_of_other_widths_do_nothing(void **state)
{
	uint8_t data[8];

	(void)state;
	for (unsigned int off = 0; off < VIRTIO_MMIO_BYTES; off++) {
		for (unsigned int len = 1; len <= 8 && off + len <= VIRTIO_MMIO_BYTES; len *= 2) {
			if (off < VIRTIO_MMIO_CONFIG && len == 4 && off % 4 == 0)
				continue;
			memset(data, 0xff, sizeof(data));
			virtio_mmio_write_on_loop(fake.dev, off, data, len);
			virtio_mmio_bus_ops.read(fake.dev, off, data, len);
			for (unsigned int i = 0; i < len; i++)
				if (off < VIRTIO_MMIO_CONFIG ||
					off + i >= VIRTIO_MMIO_CONFIG + fake.dev->config_bytes)
					assert_int_equal(data[i], 0);
		}
	}
	assert_int_equal(fake_status(&fake), 0);
}

static void leaves_no_descriptor_behind(void **state)
{
	unsigned int before;

	(void)state;
	fake_detach(&fake);
	fake_run(&fake);
	before = fake_count_fds();
	for (unsigned int i = 0; i < NR_CREATES; i++) {
		attach();
		if (i % 10 == 0)
			fake_start(&fake);
		fake_detach(&fake);
		fake_run(&fake);
	}
	assert_int_equal(fake_count_fds(), before);
	virtio_dev_destroy(NULL);
}

int device_suite(const struct device_case *device_)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(says_what_it_is, setup, teardown),
		cmocka_unit_test_setup_teardown(
			takes_any_offered_features_with_version_1_and_no_others, setup, teardown),
		cmocka_unit_test_setup_teardown(other_orders_of_status_do_nothing, setup, teardown),
		cmocka_unit_test_setup_teardown(
			bad_queues_end_in_needs_reset_and_reset_mends_it, setup, teardown),
		cmocka_unit_test_setup_teardown(queues_stand_once_running, setup, teardown),
		cmocka_unit_test_setup_teardown(
			lies_in_a_ring_end_in_needs_reset_and_reset_mends_it, setup, teardown),
		cmocka_unit_test_setup_teardown(reset_at_any_moment, setup, teardown),
		cmocka_unit_test_setup_teardown(
			drain_stops_intake_and_resume_catches_up, setup, teardown),
		cmocka_unit_test_setup_teardown(
			every_byte_is_saved_or_said_not_to_be, setup, teardown),
		cmocka_unit_test_setup_teardown(
			goes_on_in_another_device_whatever_its_status, setup, teardown),
		cmocka_unit_test_setup_teardown(
			goes_on_in_another_device_generation_after_generation, setup, teardown),
		cmocka_unit_test_setup_teardown(
			what_came_before_the_move_is_found_after_it, setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_hostile_state_is_an_error_or_the_guests_loss, setup, teardown),
		cmocka_unit_test_setup_teardown(
			accesses_of_other_widths_do_nothing, setup, teardown),
		cmocka_unit_test_setup_teardown(leaves_no_descriptor_behind, setup, teardown),
	};

	device = device_;
	return cmocka_run_group_tests_name(device->name, tests, NULL, NULL);
}
