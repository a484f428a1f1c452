// SPDX-License-Identifier: Apache-2.0
// An address bus: which device answers at an address. One for MMIO, one for port I/O.
//
// Ranges are added before the vCPUs start; afterwards the table does not change and any thread
// may dispatch. The devices behind it take care of their own locking.
#ifndef MAYFLY_BUS_H
#define MAYFLY_BUS_H

#include "vmm/base/err.h"

struct bus_ops {
	// off is relative to the range; off + len is within it. len is 1 to 8, and not always a
	// power of two: KVM cuts an access in two where it crosses a page.
	// data is little-endian. read fills all of it. Neither can fail: a device answers an
	// access that makes no sense as hardware does, with zeros or by ignoring it.
	void (*read)(void *opaque, uint64_t off, uint8_t *data, unsigned int len);
	void (*write)(void *opaque, uint64_t off, const uint8_t *data, unsigned int len);
};

#define BUS_RANGES_MAX 64

struct bus_range {
	uint64_t base;
	uint64_t len;
	const struct bus_ops *ops;
	void *opaque;
};

// Zeroed is empty.
struct bus {
	unsigned int nr_ranges;
	struct bus_range ranges[BUS_RANGES_MAX]; // ascending, disjoint
	_Atomic uint64_t unclaimed; // accesses that no device answered
};

// -EEXIST if it overlaps another range, -EINVAL if it is empty or wraps, -ENOSPC when full.
int bus_add(struct bus *bus, uint64_t base, uint64_t len, const struct bus_ops *ops, void *opaque,
	struct err *err);

// Dispatches one access. Where no device answers, or an access straddles the end of a range, a
// read gives all ones and a write is dropped; both are counted. len is 1 to 8.
void bus_read(struct bus *bus, uint64_t addr, uint8_t *data, unsigned int len);
void bus_write(struct bus *bus, uint64_t addr, const uint8_t *data, unsigned int len);

#endif
