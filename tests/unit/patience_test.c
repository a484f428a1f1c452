// SPDX-License-Identifier: Apache-2.0
// cli/patience: how long is waited for, by load, peers and processors.
#include "tests/support/test.h"

#include "cli/patience.h"

#define SECOND 1000000000ULL

static void an_idle_host_gets_no_more(void **state)
{
	(void)state;
	assert_int_equal(patience_of(SECOND, 0, 0, 2), SECOND);
	assert_int_equal(patience_of(SECOND, 2.0, 2, 2), SECOND);
	assert_int_equal(patience_of(SECOND, 0, 0, -1), SECOND);
}

static void a_busy_one_gets_its_share(void **state)
{
	(void)state;
	assert_int_equal(patience_of(SECOND, 5.0, 0, 2), 5 * SECOND / 2);
	assert_int_equal(patience_of(SECOND, 1.0, 64, 2), 32 * SECOND);
	assert_int_equal(patience_of(SECOND, 3.0, 0, 0), 3 * SECOND);
}

static void there_is_a_bound(void **state)
{
	(void)state;
	assert_int_equal(patience_of(SECOND, 1e9, 0, 1), PATIENCE_MAX * SECOND);
	assert_int_equal(patience_of(SECOND, 0, UINT64_MAX, 1), PATIENCE_MAX * SECOND);
}

static void peers_count_at_once(void **state)
{
	(void)state;
	patience_set_peers(1 << 20);
	assert_int_equal(patience_ns(SECOND), PATIENCE_MAX * SECOND);
	patience_set_peers(0);
	assert_true(patience_ns(SECOND) >= SECOND);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_idle_host_gets_no_more),
		cmocka_unit_test(a_busy_one_gets_its_share),
		cmocka_unit_test(there_is_a_bound),
		cmocka_unit_test(peers_count_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
