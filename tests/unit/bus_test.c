// SPDX-License-Identifier: Apache-2.0
// vmm/bus: dispatch to the right device, refusal of overlaps, silence where nobody answers.
#include "tests/support/test.h"

#include <errno.h>

#include "vmm/bus.h"

struct dev {
	uint64_t last_off;
	unsigned int last_len;
	int reads, writes;
};

static void dev_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	struct dev *dev = opaque;

	dev->last_off = off;
	dev->last_len = len;
	dev->reads++;
	memset(data, 0x5a, len);
}

static void dev_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	struct dev *dev = opaque;

	(void)data;
	dev->last_off = off;
	dev->last_len = len;
	dev->writes++;
}

static const struct bus_ops ops = {dev_read, dev_write};

static void dispatch_finds_the_device(void **state)
{
	struct bus bus = {0};
	struct dev a = {0}, b = {0}, c = {0};
	struct err err = {0};
	uint8_t data[8];
	(void)state;

	assert_int_equal(bus_add(&bus, 0x2000, 0x1000, &ops, &b, &err), 0);
	assert_int_equal(bus_add(&bus, 0x1000, 0x1000, &ops, &a, &err), 0);
	assert_int_equal(bus_add(&bus, UINT64_MAX, 1, &ops, &c, &err), 0);
	bus_read(&bus, 0x1fff, data, 1);
	assert_int_equal(a.last_off, 0xfff);
	assert_int_equal(data[0], 0x5a);
	bus_write(&bus, 0x2000, data, 4);
	assert_int_equal(b.writes, 1);
	assert_int_equal(b.last_len, 4);
	bus_read(&bus, UINT64_MAX, data, 1);
	assert_int_equal(c.reads, 1);
	assert_int_equal(bus.unclaimed, 0);
}

static void nobody_answers_with_ones(void **state)
{
	struct bus bus = {0};
	struct dev a = {0};
	struct err err = {0};
	uint8_t data[8] = {0};
	(void)state;

	assert_int_equal(bus_add(&bus, 0x1000, 0x10, &ops, &a, &err), 0);
	bus_read(&bus, 0xfff, data, 1);
	bus_read(&bus, 0x1010, data, 8);
	assert_int_equal(data[7], 0xff);
	bus_read(&bus, 0x100d, data, 4); // straddles the end
	bus_write(&bus, UINT64_MAX, data, 8);
	assert_int_equal(a.reads + a.writes, 0);
	assert_int_equal(bus.unclaimed, 4);
}

static void overlaps_are_refused(void **state)
{
	struct bus bus = {0};
	struct err err = {0};
	(void)state;

	assert_int_equal(bus_add(&bus, 0x1000, 0x10, &ops, NULL, &err), 0);
	assert_int_equal(bus_add(&bus, 0x100f, 1, &ops, NULL, &err), -EEXIST);
	assert_int_equal(bus_add(&bus, 0xfff, 2, &ops, NULL, &err), -EEXIST);
	assert_int_equal(bus_add(&bus, 0, UINT64_MAX, &ops, NULL, &err), -EEXIST);
	assert_int_equal(bus_add(&bus, 0x1000, 0, &ops, NULL, &err), -EINVAL);
	assert_int_equal(bus_add(&bus, UINT64_MAX, 2, &ops, NULL, &err), -EINVAL);
	for (unsigned int i = 1; i < BUS_RANGES_MAX; i++)
		assert_int_equal(bus_add(&bus, 0x1000 + i * 0x10, 0x10, &ops, NULL, &err), 0);
	assert_int_equal(bus_add(&bus, 0x10, 0x10, &ops, NULL, &err), -ENOSPC);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(dispatch_finds_the_device),
		cmocka_unit_test(nobody_answers_with_ones),
		cmocka_unit_test(overlaps_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
