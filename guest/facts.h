// SPDX-License-Identifier: Apache-2.0
// What a machine says about itself: load, memory, disk, what listens. Read from the kernel at the
// moment of asking. The agent's only thread.
#ifndef MAYFLY_GUEST_FACTS_H
#define MAYFLY_GUEST_FACTS_H

#include "guest/proto/json.h"

#define FACTS_PROCESSES_MAX 128

// Writes one object, with the processes that have had the most CPU time, at most so many. What
// cannot be read is left out. proc is "/proc" but in tests.
void facts_write(struct json_out *out, const char *proc, unsigned processes_max);

#endif
