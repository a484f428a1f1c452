// SPDX-License-Identifier: Apache-2.0
// Assertions and small helpers. Any thread.
#include "vmm/base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void assert_failed(const char *cond, const char *file, int line)
{
	fprintf(stderr, "mayfly: assertion failed: %s (%s:%d)\n", cond, file, line);
	abort();
}

void cleanup_free_(void *pp)
{
	free(*(void **)pp);
}

uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}
