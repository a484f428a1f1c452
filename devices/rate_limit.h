// SPDX-License-Identifier: Apache-2.0
// Token buckets: so many bytes and so many operations a second, with a tenth of a second's worth
// of either in one burst. Loop thread of its owner.
//
// A bucket is one word, the time at which it will be full again. A request may go while anything is
// left in both, whatever its size, and what it takes too much the next one waits for: so none is
// ever too large to go, and none need be cut.
#ifndef MAYFLY_DEVICES_RATE_LIMIT_H
#define MAYFLY_DEVICES_RATE_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

#define RATE_LIMIT_BURST_NS 100000000ULL
// Whoever has to wait waits for so much of the rate at once: else each request would wait, and wake
// the loop, by itself.
#define RATE_LIMIT_STEP_NS 5000000ULL

// Zeroed: no limit. The rates may be changed at any time.
struct rate_limit {
	struct rate_bucket {
		uint64_t per_s; // 0: no limit
		uint64_t full_ns; // CLOCK_MONOTONIC
	} bytes, ops;
};

static inline bool rate_limit_any(const struct rate_limit *limit)
{
	return limit->bytes.per_s || limit->ops.per_s;
}

// 0 if a request may go now, else when to ask again: CLOCK_MONOTONIC, in the future.
uint64_t rate_limit_wait_ns(const struct rate_limit *limit, uint64_t now_ns);

// Accounts for one operation of so many bytes.
void rate_limit_take(struct rate_limit *limit, uint64_t bytes, uint64_t now_ns);

#endif
