// SPDX-License-Identifier: Apache-2.0
// devices/i8042: resets on 0xfe and on nothing else; no probe of it waits.
#include "tests/support/test.h"

#include "devices/i8042.h"

static void count_reset(void *opaque)
{
	++*(int *)opaque;
}

static void only_the_reset_pulse_resets(void **state)
{
	int resets = 0;
	struct i8042 dev = {.reset = count_reset, .opaque = &resets};

	(void)state;
	for (unsigned int off = 0; off < I8042_NR_PORTS; off++) {
		for (unsigned int val = 0; val < 256; val++) {
			uint8_t byte = (uint8_t)val;

			i8042_bus_ops.write(&dev, off, &byte, 1);
			assert_int_equal(resets, off == 4 && val >= 0xfe);
			if (resets)
				break;
		}
	}
	i8042_bus_ops.write(&dev, 4, (uint8_t[]){0xfe, 0}, 2);
	assert_int_equal(resets, 1);
}

static void status_never_asks_to_wait(void **state)
{
	uint8_t data[2] = {0xff, 0xff};

	(void)state;
	i8042_bus_ops.read(NULL, 4, data, 1);
	assert_int_equal(data[0] & 0x02, 0); // input buffer free: kb_wait() ends at once
	assert_int_equal(data[0] & 0x01, 1); // output never ends: i8042_flush() gives up
	assert_int_equal(data[1], 0xff);
	i8042_bus_ops.read(NULL, 0, data, 2);
	assert_int_equal(data[0] | data[1], 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(only_the_reset_pulse_resets),
		cmocka_unit_test(status_never_asks_to_wait),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
