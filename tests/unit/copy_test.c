// SPDX-License-Identifier: Apache-2.0
// cli/copy: where a copy goes, in both directions, with a real agent.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/copy.h"
#include "tests/support/fake_guest.h"
#include "vmm/base/fd.h"

static char dir[] = "/tmp/mayfly-copy-test-XXXXXX";

static int sh(const char *script)
{
	char command[4096];

	snprintf(command, sizeof(command), "cd %s && { %s\n}", dir, script);
	return system(command);
}

static unsigned problems;

static void count_problem(void *ctx, const char *path, int errno_value)
{
	(void)ctx;
	(void)path;
	(void)errno_value;
	problems++;
}

static const struct copy copy = {.run_dir = dir,
	.vsock = "vsock.sock",
	.signal_fd = -1,
	.cancel_fd = -1,
	.problem = count_problem};

// Each row is a copy from src/ to dst/ in a fresh tree, and what must be true afterwards.
static const struct row {
	const char *from, *to;
	int rc;
	const char *check;
} rows[] = {
	// A file: under a new name, over one that is there, into a folder.
	{"src/f", "dst/new", 0, "cmp src/f dst/new"},
	{"src/f", "dst/file", 0, "cmp src/f dst/file"},
	{"src/f", "dst/folder", 0, "cmp src/f dst/folder/f"},
	{"src/f", "dst/folder/", 0, "cmp src/f dst/folder/f"},
	{"src/f", "dst/folder/.", 0, "cmp src/f dst/folder/f"},
	{"src/f", "dst/to-folder", 0, "cmp src/f dst/folder/f && [ -L dst/to-folder ]"},
	{"src/f", "dst/to-file", 0,
		"cmp src/f dst/to-file && [ ! -L dst/to-file ] && [ $(cat dst/file) = old ]"},
	{"src/f", "dst/new/", -ENOENT, "[ ! -e dst/new ]"},
	{"src/f", "dst/file/", -ENOTDIR, "[ $(cat dst/file) = old ]"},
	{"src/f", "dst/no/such", -ENOENT, "[ ! -e dst/no ]"},
	{"src/none", "dst/new", -ENOENT, "[ ! -e dst/new ]"},
	// A folder: under a new name, into one that is there, or its content.
	{"src/d", "dst/new", 0, "diff -r src/d dst/new"},
	{"src/d/", "dst/new/", 0, "diff -r src/d dst/new"},
	{"src/d", "dst/folder", 0, "diff -r src/d dst/folder/d && [ -e dst/folder/keep ]"},
	{"src/d/.", "dst/folder", 0, "cmp src/d/x dst/folder/x && [ -e dst/folder/keep ]"},
	{"src/d/.", "dst/new", 0, "diff -r src/d dst/new"},
	{"src/d", "dst/file", -ENOTDIR, "[ $(cat dst/file) = old ]"},
	{"src/d/..", "dst/folder", -EINVAL, "[ $(ls dst/folder) = keep ]"},
	// A link is a link.
	{"src/l", "dst/new", 0, "[ $(readlink dst/new) = f ]"},
	{"src/l", "dst/folder", 0, "[ $(readlink dst/folder/l) = f ]"},
	{"src/dangling", "dst/new", 0, "[ $(readlink dst/new) = nowhere ]"},
	// What is of a machine and not of a tree is left out, and told, but is no failure; unless
	// it is all.
	{"src/mixed", "dst/new", 0, "cmp src/f dst/new/f && [ ! -e dst/new/sock ]"},
	{"src/mixed/sock", "dst/new", -EOPNOTSUPP, "[ ! -e dst/new ]"},
};

static void run_row(const struct row *row, bool in)
{
	char from[256], to[256];
	struct err err = {0};
	int rc;

	assert_int_equal(sh("rm -rf src dst && mkdir -p src/d/e src/mixed dst/folder && echo new "
			    ">src/f && echo x >src/d/x && "
			    "echo y >src/d/e/y && ln -s f src/l && ln -s nowhere src/dangling && "
			    "echo old >dst/file && "
			    "touch dst/folder/keep && ln -s folder dst/to-folder && ln -s file "
			    "dst/to-file && "
			    "cp src/f src/mixed/f && "
			    "python3 -c 'import socket; "
			    "socket.socket(socket.AF_UNIX).bind(\"src/mixed/sock\")'"),
		0);
	snprintf(from, sizeof(from), "%s/%s", dir, row->from);
	snprintf(to, sizeof(to), "%s/%s", dir, row->to);
	problems = 0;
	rc = in ? copy_in(&copy, from, to, &err) : copy_out(&copy, from, to, &err);
	if (rc != row->rc)
		fail_msg("%s to %s: %d, %s", row->from, row->to, rc, err.msg);
	if (sh(row->check) != 0)
		fail_msg("%s to %s: %s", row->from, row->to, row->check);
	assert_int_equal(problems, rc == 0 && strcmp(row->from, "src/mixed") == 0);
}

static void copies_into_the_guest(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		run_row(&rows[i], true);
}

static void copies_out_of_the_guest(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		run_row(&rows[i], false);
}

static uint64_t passed;

static void see_progress(void *ctx, uint64_t bytes)
{
	(void)ctx;
	assert_true(bytes >= passed);
	passed = bytes;
}

static void progress_is_told(void **state)
{
	struct copy c = copy;
	char from[256], to[256];
	struct err err = {0};
	(void)state;

	c.progress = see_progress;
	assert_int_equal(sh("head -c 2000000 /dev/urandom >big"), 0);
	snprintf(from, sizeof(from), "%s/big", dir);
	snprintf(to, sizeof(to), "%s/copy", dir);
	passed = 0;
	assert_int_equal(copy_in(&c, from, to, &err), 0);
	assert_true(passed > 2000000 && passed < 2010000);
	passed = 0;
	assert_int_equal(copy_out(&c, from, to, &err), 0);
	assert_true(passed > 2000000 && passed < 2010000);
	assert_int_equal(sh("cmp big copy"), 0);
}

static int group_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(dir));
	fake_guest_start(dir);
	return 0;
}

static int group_teardown(void **state)
{
	(void)state;
	fake_guest_stop();
	return sh("rm -rf \"$PWD\"");
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(copies_into_the_guest),
		cmocka_unit_test(copies_out_of_the_guest),
		cmocka_unit_test(progress_is_told),
	};
	int status = fake_guest_main(argc, argv);

	if (status >= 0)
		return status;
	return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
