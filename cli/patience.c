// SPDX-License-Identifier: Apache-2.0
// Patience; see the header. One thread.
#include "cli/patience.h"

#include <stdlib.h>
#include <unistd.h>

#include "vmm/base/util.h"

static uint64_t peers;

void patience_set_peers(uint64_t nr)
{
	peers = nr;
}

uint64_t patience_of(uint64_t base_ns, double load, uint64_t nr_peers, long cpus)
{
	const double nr_cpus = cpus > 0 ? (double)cpus : 1;
	const double times = MAX(load, (double)nr_peers) / nr_cpus;

	if (!(times > 1))
		return base_ns;
	return (uint64_t)((double)base_ns * MIN(times, (double)PATIENCE_MAX));
}

uint64_t patience_ns(uint64_t base_ns)
{
	double load = 0;

	if (getloadavg(&load, 1) != 1)
		load = 0;
	return patience_of(base_ns, load, peers, sysconf(_SC_NPROCESSORS_ONLN));
}
