// SPDX-License-Identifier: Apache-2.0
// Requests to the owner: exactly what was allowed, once, in time, for that machine.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mcp/approvals.h"

static char home[] = "/tmp/mayfly-approvals-XXXXXX";
static char dir[64], machine_dir[64];
static struct approvals box = {.dir = dir, .machine = "box", .machine_dir = machine_dir};
static time_t later_s; // added to the time that is told

// In the place of libc's.
time_t __wrap_time(time_t *ret);

time_t __wrap_time(time_t *ret)
{
	struct timespec now;
	(void)ret;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec + later_s;
}

static void clear(void)
{
	char command[256];

	snprintf(command, sizeof(command), "rm -rf %s/*; mkdir %s %s", home, dir, machine_dir);
	assert_int_equal(system(command), 0);
	later_s = 0;
}

static int setup(void **state)
{
	(void)state;
	clear();
	return 0;
}

static int ask_port(
	const struct approvals *a, int port, char id[APPROVAL_ID_BYTES], enum approval_state *state)
{
	json_t *arguments = json_pack("{s:i}", "port", port);
	struct err err = {0};
	int r = approvals_ask(a, APPROVAL_PUBLISH_PORT, arguments, id, state, &err);

	json_decref(arguments);
	return r;
}

static void is_told(int port, enum approval_state wanted, char id[APPROVAL_ID_BYTES])
{
	enum approval_state state = APPROVAL_ALLOWED;

	assert_int_equal(ask_port(&box, port, id, &state), 0);
	if (state != wanted)
		fail_msg("%d is %s", port, approval_state_name(state));
}

static void decide(const char *id, bool allow, int wanted)
{
	struct err err = {0};
	json_t *request = NULL;

	assert_int_equal(approvals_decide(&box, id, allow, NULL, &request, &err), wanted);
	assert_int_equal(request != NULL, wanted == 0);
	json_decref(request);
}

static size_t listed(void)
{
	struct err err = {0};
	json_t *list = NULL;
	size_t nr;

	assert_int_equal(approvals_list(&box, &list, &err), 0);
	nr = json_array_size(list);
	json_decref(list);
	return nr;
}

static void what_is_allowed_holds_once(void **state)
{
	char id[APPROVAL_ID_BYTES], same[APPROVAL_ID_BYTES], other[APPROVAL_ID_BYTES];
	(void)state;

	is_told(80, APPROVAL_PENDING, id);
	is_told(80, APPROVAL_PENDING, same);
	assert_string_equal(id, same);
	is_told(81, APPROVAL_PENDING, other);
	assert_string_not_equal(id, other);
	assert_int_equal(listed(), 2);
	decide(id, true, 0);
	decide(id, true, -ESRCH); // it does not wait any more
	decide(id, false, -ESRCH);
	is_told(81, APPROVAL_PENDING, other); // not that one
	is_told(80, APPROVAL_ALLOWED, id);
	is_told(80, APPROVAL_PENDING, id); // a new one
	decide(id, false, 0);
	is_told(80, APPROVAL_DENIED, id);
	is_told(80, APPROVAL_DENIED, id); // and it is not asked for again so soon
	assert_int_equal(listed(), 2);
}

static int no_room(const struct approvals *a, const json_t *request, struct err *err)
{
	assert_ptr_equal(a, &box);
	assert_string_equal(json_string_value(json_object_get(request, "state")), "allowed");
	return err_errno(err, -ENOSPC, "audit.jsonl");
}

static void what_cannot_be_written_down_is_not_decided(void **state)
{
	char id[APPROVAL_ID_BYTES];
	struct err err = {0};
	json_t *request = NULL;
	(void)state;

	is_told(80, APPROVAL_PENDING, id);
	assert_int_equal(approvals_decide(&box, id, true, no_room, &request, &err), -ENOSPC);
	assert_null(request);
	is_told(80, APPROVAL_PENDING, id);
	decide(id, true, 0);
}

static void it_is_over_in_time(void **state)
{
	char id[APPROVAL_ID_BYTES];
	(void)state;

	is_told(80, APPROVAL_PENDING, id);
	later_s = APPROVAL_S - 5;
	assert_int_equal(listed(), 1);
	decide(id, true, 0);
	later_s = 2 * APPROVAL_S; // allowed too long ago
	assert_int_equal(listed(), 0);
	is_told(80, APPROVAL_PENDING, id);
	later_s = 4 * APPROVAL_S;
	decide(id, true, -ESRCH); // and nobody decides on what is over
	assert_int_equal(listed(), 0);
}

static void another_machine_of_that_name(void **state)
{
	char id[APPROVAL_ID_BYTES], again[APPROVAL_ID_BYTES], moved[80];
	struct approvals boxer = {.dir = dir, .machine = "boxer", .machine_dir = machine_dir};
	enum approval_state what;
	(void)state;

	is_told(80, APPROVAL_PENDING, id);
	decide(id, true, 0);
	snprintf(moved, sizeof(moved), "%s.old", machine_dir);
	assert_int_equal(rename(machine_dir, moved), 0);
	assert_int_equal(mkdir(machine_dir, 0700), 0);
	is_told(80, APPROVAL_PENDING, again);
	assert_string_not_equal(id, again);
	// A request of the old one cannot be allowed for the new one.
	assert_int_equal(rmdir(machine_dir), 0);
	assert_int_equal(mkdir(machine_dir, 0700), 0);
	decide(again, true, -ESRCH);
	assert_int_equal(ask_port(&boxer, 80, again, &what), 0);
	assert_int_equal(what, APPROVAL_PENDING);
	decide(again, true, -ESRCH);
}

static void no_more_than_so_many(void **state)
{
	char id[APPROVAL_ID_BYTES];
	enum approval_state what;
	(void)state;

	for (int i = 0; i < (int)APPROVALS_MAX; i++)
		is_told(1000 + i, APPROVAL_PENDING, id);
	assert_int_equal(ask_port(&box, 1, id, &what), -EBUSY);
	assert_int_equal(listed(), APPROVALS_MAX);
	later_s = APPROVAL_S;
	is_told(1, APPROVAL_PENDING, id);
}

static void bad_ids_and_files(void **state)
{
	static const char *const bad[] = {"", "x", "../box/../../etc", "0123456789abcde",
		"0123456789abcdef0", "0123456789abcdeF", "0123456789abcdef"};
	char id[APPROVAL_ID_BYTES], path[128];
	FILE *f;
	(void)state;

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
		decide(bad[i], true, -ESRCH);
	is_told(80, APPROVAL_PENDING, id);
	snprintf(path, sizeof(path), "%s/box@%s", dir, id);
	f = fopen(path, "w");
	assert_non_null(f);
	fputs("{\"state\":\"allowed\"", f); // cut
	fclose(f);
	is_told(80, APPROVAL_PENDING, id);
}

struct racer {
	pthread_t thread;
	enum approval_state state;
	int rc;
};

static void *race(void *opaque)
{
	struct racer *r = opaque;
	char id[APPROVAL_ID_BYTES];

	r->rc = ask_port(&box, 80, id, &r->state);
	return NULL;
}

// However many ask at once, one is allowed.
static void one_of_many(void **state)
{
	struct racer racers[16];
	char id[APPROVAL_ID_BYTES];
	int allowed = 0;
	(void)state;

	is_told(80, APPROVAL_PENDING, id);
	decide(id, true, 0);
	for (size_t i = 0; i < 16; i++)
		assert_int_equal(pthread_create(&racers[i].thread, NULL, race, &racers[i]), 0);
	for (size_t i = 0; i < 16; i++) {
		assert_int_equal(pthread_join(racers[i].thread, NULL), 0);
		assert_int_equal(racers[i].rc, 0);
		allowed += racers[i].state == APPROVAL_ALLOWED;
	}
	assert_int_equal(allowed, 1);
}

static int group_start(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(home));
	snprintf(dir, sizeof(dir), "%s/approvals", home);
	snprintf(machine_dir, sizeof(machine_dir), "%s/box", home);
	return 0;
}

static int group_stop(void **state)
{
	char command[64];
	(void)state;

	snprintf(command, sizeof(command), "rm -rf %s", home);
	return system(command);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(what_is_allowed_holds_once, setup),
		cmocka_unit_test_setup(what_cannot_be_written_down_is_not_decided, setup),
		cmocka_unit_test_setup(it_is_over_in_time, setup),
		cmocka_unit_test_setup(another_machine_of_that_name, setup),
		cmocka_unit_test_setup(no_more_than_so_many, setup),
		cmocka_unit_test_setup(bad_ids_and_files, setup),
		cmocka_unit_test_setup(one_of_many, setup),
	};

	return cmocka_run_group_tests(tests, group_start, group_stop);
}
