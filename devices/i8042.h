// SPDX-License-Identifier: Apache-2.0
// The one thing that a PC's keyboard controller is still good for: resetting the machine.
//
// There is no keyboard behind it. Linux's reboot=k waits for the input buffer to be free, and it
// always is; its i8042 driver reads out the output buffer first, gives up when that does not end
// after a few bytes ("No controller found"), and so never waits for an answer that does not come.
// No state and so no lock: any vCPU thread.
#ifndef MAYFLY_DEVICES_I8042_H
#define MAYFLY_DEVICES_I8042_H

#include "vmm/bus.h"

#define I8042_PORT     0x60
#define I8042_NR_PORTS 5

struct i8042 {
	// The guest asks for a reset. Called from a vCPU thread, maybe more than once.
	void (*reset)(void *opaque);
	void *opaque;
};

// I8042_NR_PORTS bytes of ports; the opaque is the struct i8042.
extern const struct bus_ops i8042_bus_ops;

#endif
