// SPDX-License-Identifier: Apache-2.0
// cli/golden: what a warm start goes on from depends on all that a machine is made of, and on
// nothing else.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/golden.h"
#include "cli/home.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static char home[64], kernel[128], other[128], disk[128];

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	fd_close(&fd);
}

static int setup(void **state)
{
	(void)state;
	strcpy(home, "/tmp/mayfly-golden-XXXXXX");
	assert_non_null(mkdtemp(home));
	assert_int_equal(setenv("MAYFLY_HOME", home, 1), 0);
	snprintf(kernel, sizeof(kernel), "%s/kernel", home);
	snprintf(other, sizeof(other), "%s/other", home);
	snprintf(disk, sizeof(disk), "%s/disk", home);
	write_file(kernel, "kernel");
	write_file(other, "kernel");
	write_file(disk, "disk");
	return 0;
}

static int teardown(void **state)
{
	struct err err = {0};
	(void)state;

	return home_remove(home, &err);
}

static struct config base_config(void)
{
	struct config config;

	config_defaults(&config);
	snprintf(config.kernel, sizeof(config.kernel), "%s", kernel);
	return config;
}

static void key_of(const struct config *config, char ret[PATH_MAX], int expect)
{
	struct golden golden;
	struct err err = {0};

	assert_int_equal(golden_find(&golden, config, NULL, &err), expect);
	memcpy(ret, golden.dir, PATH_MAX);
	golden_fini(&golden);
}

static void each_part_of_a_machine_counts(void **state)
{
	static const char *const sets[][3] = {
		{"machine", "memory", "96M"},
		{"machine", "cpus", "2"},
		{"machine", "append", "quiet"},
		{"machine", "kernel", other},
		{"machine", "initramfs", disk},
		{"vsock", "cid", "77"},
	};
	char keys[ARRAY_SIZE(sets) + 3][PATH_MAX];
	struct config config = base_config();
	struct err err = {0};
	size_t nr = 0;
	(void)state;

	key_of(&config, keys[nr++], 0);
	for (size_t i = 0; i < ARRAY_SIZE(sets); i++) {
		config = base_config();
		assert_int_equal(config_set(&config, sets[i][0], sets[i][1], sets[i][2], &err), 0);
		key_of(&config, keys[nr++], 0);
	}
	config = base_config();
	assert_int_equal(config_set(&config, "disk", "file", disk, &err), 0);
	assert_int_equal(config_set(&config, "disk", "mode", "ro", &err), 0);
	key_of(&config, keys[nr++], 0);
	// The kernel under its name is another one now, of the same size.
	assert_int_equal(rename(other, kernel), 0);
	config = base_config();
	key_of(&config, keys[nr++], 0);
	for (size_t i = 0; i < nr; i++)
		for (size_t j = 0; j < i; j++)
			if (!strcmp(keys[i], keys[j]))
				fail_msg("%zu and %zu are the same", i, j);
	// And the same again is the same.
	key_of(&config, keys[0], 0);
	assert_string_equal(keys[0], keys[nr - 1]);
}

static void what_is_there_is_found(void **state)
{
	struct config config = base_config();
	char dir[PATH_MAX], path[PATH_MAX];
	struct golden golden;
	struct err err = {0};
	(void)state;

	key_of(&config, dir, 0);
	assert_int_equal(mkdir(dir, 0700), 0);
	key_of(&config, dir, 0); // empty: not it
	assert_true(snprintf(path, sizeof(path), "%s/state", dir) < (int)sizeof(path));
	write_file(path, "state");
	assert_int_equal(golden_find(&golden, &config, NULL, &err), 1);
	// What passes is no reason to make another; damage is.
	golden_failed(&golden, -ENOMEM);
	golden_failed(&golden, -EINTR);
	golden_fini(&golden);
	assert_int_equal(golden_find(&golden, &config, NULL, &err), 1);
	golden_failed(&golden, -EBADMSG);
	golden_fini(&golden);
	key_of(&config, dir, 0);
	assert_int_equal(unlink(kernel), 0);
	assert_int_equal(golden_find(&golden, &config, NULL, &err), -ENOENT);
	assert_non_null(strstr(err.msg, kernel));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(each_part_of_a_machine_counts, setup, teardown),
		cmocka_unit_test_setup_teardown(what_is_there_is_found, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
