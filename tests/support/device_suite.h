// SPDX-License-Identifier: Apache-2.0
// What every virtio device must stand, whatever it does otherwise: negotiation, illegal orders,
// bad queues, lies in each ring, reset at any moment, a move into another device by way of its
// saved state, a hostile state, and no descriptor left behind.
#ifndef MAYFLY_TESTS_DEVICE_SUITE_H
#define MAYFLY_TESTS_DEVICE_SUITE_H

#include "devices/virtio_mmio.h"

struct device_case {
	const char *name;
	uint32_t device_id;
	// Queues whose chains the device takes as soon as it is notified.
	unsigned int eager_queues;
	int (*create)(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err);
};

// Runs the suite. Returns the number of failed tests.
int device_suite(const struct device_case *device);

#endif
