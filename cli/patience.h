// SPDX-License-Identifier: Apache-2.0
// How long to wait for an answer that takes no time of its own: longer on a host that is busy,
// where an answer takes as many times longer as there are programs for each processor. One thread.
#ifndef MAYFLY_CLI_PATIENCE_H
#define MAYFLY_CLI_PATIENCE_H

#include <stdint.h>

#define PATIENCE_MAX 64 // times

// That many machines are at work at once, whatever the host's load says yet.
void patience_set_peers(uint64_t nr);

// base_ns as it is when the host has a processor for everybody, and up to PATIENCE_MAX times that.
uint64_t patience_ns(uint64_t base_ns);

// The same of a load average, of peers and processors.
uint64_t patience_of(uint64_t base_ns, double load, uint64_t peers, long cpus);

#endif
