// SPDX-License-Identifier: Apache-2.0
// vmm/cgroup: what is written where, what is read back, errors, and what is swept, in a folder that
// stands for the hierarchy.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/cgroup.h"

static const char *const files[] = {"cgroup.procs", "cpu.max", "cpu.weight", "memory.max",
	"pids.max", "io.weight", "cpu.stat", "memory.current", "memory.events", "pids.current",
	"io.stat"};

struct fixture {
	char base[40], group[96];
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	if (!f)
		return -1;
	strcpy(f->base, "/tmp/mayfly-cgroup-XXXXXX");
	if (!mkdtemp(f->base))
		return -1;
	snprintf(f->group, sizeof(f->group), "%s/machine-m-%d", f->base, (int)getpid());
	*state = f;
	return mkdir(f->group, 0755);
}

static void path_of(const struct fixture *f, const char *name, char ret[160])
{
	snprintf(ret, 160, "%s/%s", f->group, name);
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char path[160];

	for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
		path_of(f, files[i], path);
		unlink(path);
	}
	rmdir(f->group);
	rmdir(f->base);
	free(f);
	return 0;
}

static void make(const struct fixture *f, const char *name, const char *text)
{
	char path[160];
	int fd;

	path_of(f, name, path);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	close(fd);
}

static void expect(const struct fixture *f, const char *name, const char *want)
{
	char path[160], got[64] = "";
	FILE *file;

	path_of(f, name, path);
	file = fopen(path, "re");
	assert_non_null(file);
	(void)!fgets(got, sizeof(got), file);
	fclose(file);
	assert_string_equal(got, want);
}

static void limits_are_written(void **state)
{
	const struct config_limits limits = {.cpu_milli = 1500,
		.cpu_weight = 50,
		.memory_bytes = 256 * MIB,
		.processes = 64,
		.io_weight = 20};
	struct cgroup cgroup = CGROUP_INIT;
	struct fixture *f = *state;
	struct err err = {0};

	for (size_t i = 0; i < 6; i++)
		make(f, files[i], "");
	assert_true(cgroup_wanted(&limits));
	if (cgroup_enter(&cgroup, f->base, "m", &limits, &err) < 0)
		fail_msg("%s", err.msg);
	expect(f, "cgroup.procs", "0");
	expect(f, "cpu.max", "150000 100000");
	expect(f, "cpu.weight", "50");
	expect(f, "memory.max", "268435456");
	expect(f, "pids.max", "64");
	expect(f, "io.weight", "20");
	cgroup_fini(&cgroup);
}

static long long number(const json_t *stats, const char *key)
{
	const json_t *value = json_object_get(stats, key);

	assert_true(json_is_integer(value));
	return json_integer_value(value);
}

static void what_was_used_is_told(void **state)
{
	const struct config_limits limits = {.processes = 64};
	struct cgroup cgroup = CGROUP_INIT;
	struct fixture *f = *state;
	json_t *stats;

	assert_null(cgroup_stats(&cgroup, &limits));
	make(f, "cgroup.procs", "");
	make(f, "pids.max", "");
	make(f, "cpu.stat", "usage_usec 1234\nuser_usec 1000\nnr_throttled 3\nthrottled_usec 77\n");
	make(f, "memory.events", "low 0\nhigh 1\nmax 5\noom 0\noom_group_max 9\n");
	make(f, "io.stat",
		"8:0 rbytes=100 wbytes=1 rios=2\n8:16 rbytes=11 wbytes=2 rios=2 dbytes=9\n");
	make(f, "pids.current", "7\n");
	assert_int_equal(cgroup_enter(&cgroup, f->base, "m", &limits, NULL), 0);
	stats = cgroup_stats(&cgroup, &limits);
	assert_int_equal(number(stats, "cpu_used_us"), 1234);
	assert_int_equal(number(stats, "cpu_throttled_us"), 77);
	assert_int_equal(number(stats, "memory_limit_hits"), 5);
	assert_int_equal(number(stats, "io_read_bytes"), 111);
	assert_int_equal(number(stats, "io_written_bytes"), 3);
	assert_int_equal(number(stats, "processes"), 7);
	assert_int_equal(number(stats, "processes_limit"), 64);
	// What the kernel does not count, and what is not limited.
	assert_null(json_object_get(stats, "memory_bytes"));
	assert_null(json_object_get(stats, "cpu_weight"));
	json_decref(stats);
	cgroup_fini(&cgroup);
	assert_null(cgroup_stats(&cgroup, &limits));
}

static void what_is_not_asked_for_is_not_touched(void **state)
{
	const struct config_limits limits = {.processes = 16}, none = {0};
	struct cgroup cgroup = CGROUP_INIT;
	struct fixture *f = *state;

	make(f, "cgroup.procs", "");
	make(f, "pids.max", "");
	assert_int_equal(cgroup_enter(&cgroup, f->base, "m", &limits, NULL), 0);
	expect(f, "pids.max", "16");
	assert_false(cgroup_wanted(&none));
	cgroup_fini(&cgroup);
}

static void what_is_missing_is_named(void **state)
{
	const struct config_limits limits = {.memory_bytes = MIB};
	struct cgroup cgroup = CGROUP_INIT;
	struct fixture *f = *state;
	struct err err = {0};

	make(f, "cgroup.procs", "");
	assert_int_equal(cgroup_enter(&cgroup, f->base, "m", &limits, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "/memory.max"));
	assert_non_null(strstr(err.msg, "Delegate"));
	assert_true(cgroup_enter(&cgroup, "/nonexistent/base", "m", &limits, &err) < 0);
	assert_non_null(strstr(err.msg, "/nonexistent/base"));
	assert_false(cgroup.entered);
}

static void ended_machines_are_swept(void **state)
{
	const struct config_limits limits = {.processes = 16};
	struct cgroup cgroup = CGROUP_INIT;
	struct fixture *f = *state;
	char old[80], other[80];

	make(f, "cgroup.procs", "");
	make(f, "pids.max", "");
	snprintf(old, sizeof(old), "%s/machine-old-1", f->base);
	snprintf(other, sizeof(other), "%s/other", f->base);
	assert_int_equal(mkdir(old, 0755), 0);
	assert_int_equal(mkdir(other, 0755), 0);
	assert_int_equal(cgroup_enter(&cgroup, f->base, "m", &limits, NULL), 0);
	assert_int_equal(access(old, F_OK), -1);
	assert_int_equal(rmdir(other), 0);
	cgroup_fini(&cgroup);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(limits_are_written, setup, teardown),
		cmocka_unit_test_setup_teardown(what_was_used_is_told, setup, teardown),
		cmocka_unit_test_setup_teardown(
			what_is_not_asked_for_is_not_touched, setup, teardown),
		cmocka_unit_test_setup_teardown(what_is_missing_is_named, setup, teardown),
		cmocka_unit_test_setup_teardown(ended_machines_are_swept, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
