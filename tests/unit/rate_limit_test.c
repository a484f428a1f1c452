// SPDX-License-Identifier: Apache-2.0
// devices/rate_limit: over any time what passes is the rate and one burst, whatever the sizes; a
// limit that is not set costs nothing. Time is the test's own.
#include "tests/support/test.h"

#include "devices/rate_limit.h"
#include "vmm/base/util.h"

#define S_NS  1000000000ULL
#define START (5 * S_NS)

static void zeroed_is_no_limit(void **state)
{
	struct rate_limit limit = {0};

	(void)state;
	assert_false(rate_limit_any(&limit));
	for (int i = 0; i < 1000; i++) {
		assert_int_equal(rate_limit_wait_ns(&limit, START), 0);
		rate_limit_take(&limit, UINT64_MAX, START);
	}
	// One that is set later begins with a full bucket.
	limit.ops.per_s = 10;
	assert_true(rate_limit_any(&limit));
	assert_int_equal(rate_limit_wait_ns(&limit, START), 0);
}

// Requests as fast as the limit lets them, for ten seconds. Returns how many went.
static uint64_t flood(
	struct rate_limit *limit, const uint64_t *sizes, unsigned int nr_sizes, uint64_t *ret_bytes)
{
	uint64_t now = START, nr = 0, nr_waits = 0;

	*ret_bytes = 0;
	while (now < START + 10 * S_NS) {
		const uint64_t wait = rate_limit_wait_ns(limit, now);

		if (wait) {
			assert_true(wait > now);
			// Not too late, and not for each one by itself.
			assert_true(rate_limit_wait_ns(limit, wait - RATE_LIMIT_STEP_NS) != 0);
			now = wait;
			nr_waits++;
			continue;
		}
		rate_limit_take(limit, sizes[nr % nr_sizes], now);
		*ret_bytes += sizes[nr % nr_sizes];
		nr++;
	}
	assert_true(nr_waits <= 10 * S_NS / RATE_LIMIT_STEP_NS);
	return nr;
}

static void the_rate_is_kept(void **state)
{
	static const uint64_t sizes[] = {60, 1500, 65536, 0, 4096};
	static const uint64_t rates[] = {1, 1000, 1000000, 333333333};

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(rates); i++) {
		struct rate_limit limit = {.bytes.per_s = rates[i]};
		const uint64_t due = rates[i] * 10 + rates[i] / 10;
		uint64_t bytes;

		flood(&limit, sizes, ARRAY_SIZE(sizes), &bytes);
		// The last may go though less is left than it takes.
		assert_in_range(bytes, due - due / 1000, due + 65536 + due / 1000);
	}
}

static void operations_are_counted_too(void **state)
{
	static const uint64_t size = 100;
	struct rate_limit limit = {.bytes.per_s = 1000 * 1000, .ops.per_s = 500};
	uint64_t bytes;

	(void)state;
	// 10,000 a second by the bytes: it is the tighter one that counts.
	assert_in_range(flood(&limit, &size, 1, &bytes), 5040, 5060);
	limit = (struct rate_limit){.bytes.per_s = 1000, .ops.per_s = 500};
	assert_in_range(flood(&limit, &size, 1, &bytes), 100, 103);
}

static void idle_time_saves_one_burst(void **state)
{
	struct rate_limit limit = {.ops.per_s = 1000};
	unsigned int nr = 0;

	(void)state;
	rate_limit_take(&limit, 0, START);
	while (!rate_limit_wait_ns(&limit, START + 3600 * S_NS)) {
		rate_limit_take(&limit, 0, START + 3600 * S_NS);
		nr++;
	}
	assert_int_equal(nr, 100);
}

static void no_size_overflows(void **state)
{
	struct rate_limit limit = {.bytes.per_s = 1, .ops.per_s = UINT64_MAX};
	uint64_t wait;

	(void)state;
	rate_limit_take(&limit, UINT64_MAX, START);
	wait = rate_limit_wait_ns(&limit, START);
	assert_true(wait > START + 3600ULL * 24 * 365 * 100 * S_NS);
	limit.bytes.per_s = UINT64_MAX;
	limit.bytes.full_ns = 0;
	rate_limit_take(&limit, UINT64_MAX, START);
	assert_int_equal(rate_limit_wait_ns(&limit, START),
		START + S_NS - RATE_LIMIT_BURST_NS + RATE_LIMIT_STEP_NS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(zeroed_is_no_limit),
		cmocka_unit_test(the_rate_is_kept),
		cmocka_unit_test(operations_are_counted_too),
		cmocka_unit_test(idle_time_saves_one_burst),
		cmocka_unit_test(no_size_overflows),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
