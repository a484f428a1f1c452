// SPDX-License-Identifier: Apache-2.0
// Keyboard controller, reset only. vCPU threads; see the header.
#include "devices/i8042.h"

#include <string.h>

#define REG_STATUS  4
#define REG_COMMAND 4

#define STATUS_OUTPUT_FULL 0x01 // for ever; input-full (0x02) never
#define CMD_PULSE_RESET    0xfe

static void i8042_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	(void)opaque;
	memset(data, 0, len);
	if (off == REG_STATUS)
		data[0] = STATUS_OUTPUT_FULL;
}

static void i8042_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	const struct i8042 *dev = opaque;

	if (off == REG_COMMAND && len == 1 && data[0] == CMD_PULSE_RESET)
		dev->reset(dev->opaque);
}

const struct bus_ops i8042_bus_ops = {.read = i8042_read, .write = i8042_write};
