// SPDX-License-Identifier: Apache-2.0
// Token buckets; see the header. Loop thread of its owner.
#include "devices/rate_limit.h"

#include "vmm/base/util.h"

#define NS_PER_S 1000000000ULL

static uint64_t wait_ns(const struct rate_bucket *bucket, uint64_t now_ns)
{
	if (!bucket->per_s || bucket->full_ns < now_ns ||
		bucket->full_ns - now_ns < RATE_LIMIT_BURST_NS)
		return 0;
	return bucket->full_ns - RATE_LIMIT_BURST_NS + RATE_LIMIT_STEP_NS;
}

static void take(struct rate_bucket *bucket, uint64_t units, uint64_t now_ns)
{
	if (bucket->per_s) {
		const __uint128_t full_ns = MAX(bucket->full_ns, now_ns) +
					    (__uint128_t)units * NS_PER_S / bucket->per_s;

		bucket->full_ns = (uint64_t)MIN(full_ns, UINT64_MAX);
	}
}

uint64_t rate_limit_wait_ns(const struct rate_limit *limit, uint64_t now_ns)
{
	return MAX(wait_ns(&limit->bytes, now_ns), wait_ns(&limit->ops, now_ns));
}

void rate_limit_take(struct rate_limit *limit, uint64_t bytes, uint64_t now_ns)
{
	take(&limit->bytes, bytes, now_ns);
	take(&limit->ops, 1, now_ns);
}
