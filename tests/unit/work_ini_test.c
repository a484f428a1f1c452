// SPDX-License-Identifier: Apache-2.0
// cli/work_ini: what a project says about its machine, and what its set-up depends on.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/work_ini.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static char dir[] = "/tmp/mayfly-work-ini-XXXXXX";

static void write_in(const char *name, const char *text)
{
	char path[128];
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	f = fopen(path, "w");
	assert_non_null(f);
	fputs(text, f);
	fclose(f);
}

static int read_ini(const char *text, struct work_ini *ini, struct config *config, struct err *err)
{
	write_in(WORK_INI_NAME, text);
	config_defaults(config);
	return work_ini_read(dir, ini, config, err);
}

static void says_what_the_machine_is(void **state)
{
	struct work_ini ini = {0};
	struct config config;
	struct err err = {0};

	(void)state;
	config_defaults(&config);
	assert_int_equal(work_ini_read(dir, &ini, &config, &err), 0); // there is none
	assert_int_equal(ini.setup.len, 0);
	assert_int_equal(read_ini("[work]\nmemory = 96M\ncpus=2\nsetup = a; b\nsetup = c\n"
				  "cache = x/y\npersist = ~/.cache/a /var/b\npersist=~/c\nenv = "
				  "A=b=c\n; more\n",
				 &ini, &config, &err),
		0);
	assert_int_equal(config.memory_bytes, 96 * MIB);
	assert_int_equal(config.cpus, 2);
	assert_int_equal(ini.setup.len, 7);
	assert_memory_equal(ini.setup.data, "a; b\nc\n", 7);
	assert_string_equal(ini.cache[0], "x/y");
	assert_string_equal(ini.env[0], "A=b=c");
	assert_int_equal(ini.nr_persist, 3);
	assert_string_equal(ini.persist[0], "/root/.cache/a");
	assert_string_equal(ini.persist[1], "/var/b");
	assert_string_equal(ini.persist[2], "/root/c");
	work_ini_fini(&ini);
}

static void says_where_it_is_wrong(void **state)
{
	static const struct {
		const char *text, *at;
	} rows[] = {
		{"[work]\nfoo = 1\n", ":2: 'foo'"},
		{"[other]\nimage = x\n", ":2: "},
		{"[work]\n\nenv = A\n", ":3: 'A'"},
		{"[work]\ncache = ../x\n", ":2: '../x'"},
		{"[work]\ncpus = 99\n", ":2: "},
		{"[work]\npersist = ~/a/../b\n", ":2: '~/a/../b'"},
		{"[work]\npersist = /\n", ":2: '/'"},
		{"[work]\npersist = a\n", ":2: 'a'"},
		{"[work]\nnonsense\n", ":2: "},
	};
	struct work_ini ini = {0};
	struct config config;
	struct err err;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		assert_true(read_ini(rows[i].text, &ini, &config, &err) < 0);
		if (!strstr(err.msg, WORK_INI_NAME) || !strstr(err.msg, rows[i].at))
			fail_msg("%s: %s", rows[i].text, err.msg);
	}
}

static void key(const char *text, const char *inside, struct buf *ret)
{
	CLEANUP_FD int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct work_ini ini = {0};
	struct config config;
	struct err err = {0};

	buf_fini(ret);
	if (read_ini(text, &ini, &config, &err) < 0 ||
		work_ini_key(&ini, fd, dir, inside, ret, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(strlen((const char *)ret->data) + 1, ret->len);
	work_ini_fini(&ini);
}

static void a_set_up_is_told_from_others(void **state)
{
	static const char text[] = "[work]\nsetup = make\ncache = deps\n";
	CLEANUP_FD int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CLEANUP_BUF struct buf one = {0}, two = {0};
	struct work_ini ini = {0};
	struct config config;
	struct err err = {0};

	(void)state;
	write_in("deps", "1");
	write_in("other", "1");
	key(text, "/work/p", &one);
	write_in("other", "2");
	key(text, "/work/p", &two);
	assert_string_equal(one.data, two.data);
	key(text, "/work/q", &two);
	assert_string_not_equal(one.data, two.data);
	key("[work]\nsetup = make all\ncache = deps\n", "/work/p", &two);
	assert_string_not_equal(one.data, two.data);
	write_in("deps", "2");
	key(text, "/work/p", &two);
	assert_string_not_equal(one.data, two.data);
	assert_int_equal(read_ini("[work]\nsetup = x\ncache = none\n", &ini, &config, &err), 0);
	buf_fini(&two);
	assert_int_equal(work_ini_key(&ini, fd, dir, "/work/p", &two, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "cache = none"));
	work_ini_fini(&ini);
}

static int group_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(dir));
	return 0;
}

static int group_teardown(void **state)
{
	char command[128];

	(void)state;
	snprintf(command, sizeof(command), "rm -rf %s", dir);
	return system(command);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(says_what_the_machine_is),
		cmocka_unit_test(says_where_it_is_wrong),
		cmocka_unit_test(a_set_up_is_told_from_others),
	};

	return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
