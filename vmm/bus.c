// SPDX-License-Identifier: Apache-2.0
// Address bus. Filled by the main thread, used by the vCPU threads; see the header.
#include "vmm/bus.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

int bus_add(struct bus *bus, uint64_t base, uint64_t len, const struct bus_ops *ops, void *opaque,
	struct err *err)
{
	uint64_t end;
	unsigned int at = 0;

	if (len == 0 || __builtin_add_overflow(base, len - 1, &end))
		return err_set(err, -EINVAL, "bus: bad range of 0x%llx bytes at 0x%llx",
			(unsigned long long)len, (unsigned long long)base);
	if (bus->nr_ranges == BUS_RANGES_MAX)
		return err_set(err, -ENOSPC, "bus: more than %d ranges", BUS_RANGES_MAX);
	while (at < bus->nr_ranges && bus->ranges[at].base < base)
		at++;
	if ((at > 0 && base - bus->ranges[at - 1].base < bus->ranges[at - 1].len) ||
		(at < bus->nr_ranges && bus->ranges[at].base <= end))
		return err_set(err, -EEXIST, "bus: range at 0x%llx overlaps another",
			(unsigned long long)base);
	memmove(&bus->ranges[at + 1], &bus->ranges[at],
		(bus->nr_ranges - at) * sizeof(bus->ranges[0]));
	bus->ranges[at] = (struct bus_range){
		.base = base, .len = len, .ops = ops, .opaque = opaque};
	bus->nr_ranges++;
	return 0;
}

static const struct bus_range *find(const struct bus *bus, uint64_t addr, unsigned int len)
{
	unsigned int lo = 0, hi = bus->nr_ranges;

	while (lo < hi) {
		unsigned int mid = lo + (hi - lo) / 2;
		const struct bus_range *range = &bus->ranges[mid];

		if (addr < range->base)
			hi = mid;
		else if (addr - range->base >= range->len)
			lo = mid + 1;
		else
			return len <= range->len - (addr - range->base) ? range : NULL;
	}
	return NULL;
}

void bus_read(struct bus *bus, uint64_t addr, uint8_t *data, unsigned int len)
{
	const struct bus_range *range = find(bus, addr, len);

	ASSERT(len >= 1 && len <= 8);
	if (!range) {
		memset(data, 0xff, len);
		atomic_fetch_add_explicit(&bus->unclaimed, 1, memory_order_relaxed);
		return;
	}
	range->ops->read(range->opaque, addr - range->base, data, len);
}

void bus_write(struct bus *bus, uint64_t addr, const uint8_t *data, unsigned int len)
{
	const struct bus_range *range = find(bus, addr, len);

	ASSERT(len >= 1 && len <= 8);
	if (!range) {
		atomic_fetch_add_explicit(&bus->unclaimed, 1, memory_order_relaxed);
		return;
	}
	range->ops->write(range->opaque, addr - range->base, data, len);
}
