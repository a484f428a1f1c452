// SPDX-License-Identifier: Apache-2.0
// cli/tool: how a program ended, what it said, and that a signal ends it.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/tool.h"
#include "vmm/base/fd.h"

static int run(const char *script, int in, int out, int signal_fd, struct err *err)
{
	const char *argv[] = {"sh", "-c", script, NULL};
	struct tool tool = {.argv = argv,
		.package = "dash",
		.stdin_fd = in,
		.stdout_fd = out,
		.signal_fd = signal_fd};

	return tool_run(&tool, err);
}

static void ends(void **state)
{
	struct err err = {0};
	(void)state;

	assert_int_equal(run("exit 0", -1, -1, -1, &err), 0);
	assert_int_equal(run("echo warning >&2; exit 0", -1, -1, -1, &err), 0);
	assert_int_equal(run("exit 3", -1, -1, -1, &err), -EIO);
	assert_string_equal(err.msg, "sh ended with status 3");
	assert_int_equal(run("kill -9 $$", -1, -1, -1, &err), -EIO);
	assert_string_equal(err.msg, "sh ended with status 137");
}

static void says(void **state)
{
	struct err err = {0};
	(void)state;

	// One line, harmless to a terminal.
	assert_int_equal(
		run("printf 'one\\n\\n  two\\033[2J\\n' >&2; exit 1", -1, -1, -1, &err), -EIO);
	assert_string_equal(err.msg, "sh: one two?[2J");
	// However much it is, the end of it.
	assert_int_equal(
		run("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done >&2; exit 1",
			-1, -1, -1, &err),
		-EIO);
	assert_non_null(strstr(err.msg, "line 19998 line 19999"));
}

static void no_such_program(void **state)
{
	const char *argv[] = {"no-such-program-of-mayfly", NULL};
	struct tool tool = {.argv = argv,
		.package = "the-package",
		.stdin_fd = -1,
		.stdout_fd = -1,
		.signal_fd = -1};
	struct err err = {0};
	(void)state;

	assert_int_equal(tool_run(&tool, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "no-such-program-of-mayfly"));
	assert_non_null(strstr(err.msg, "the-package"));
}

static void passes_files_on(void **state)
{
	struct err err = {0};
	char got[16] = "";
	int in[2], out[2];
	(void)state;

	assert_int_equal(pipe2(in, O_CLOEXEC), 0);
	assert_int_equal(pipe2(out, O_CLOEXEC), 0);
	assert_int_equal(fd_write_all(in[1], "hello", 5), 0);
	fd_close(&in[1]);
	assert_int_equal(run("tr a-z A-Z", in[0], out[1], -1, &err), 0);
	fd_close(&in[0]);
	fd_close(&out[1]);
	assert_int_equal(fd_read_full(out[0], got, sizeof(got)), 5);
	assert_memory_equal(got, "HELLO", 5);
	fd_close(&out[0]);
}

static void a_signal_ends_it(void **state)
{
	struct err err = {0};
	sigset_t set;
	int fd;
	(void)state;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	assert_true(fd >= 0);
	raise(SIGUSR1);
	assert_int_equal(run("exec sleep 600", -1, -1, fd, &err), -EINTR);
	// Also one that does not listen.
	assert_int_equal(run("trap '' TERM; while :; do :; done", -1, -1, fd, &err), -EINTR);
	fd_close(&fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ends),
		cmocka_unit_test(says),
		cmocka_unit_test(no_such_program),
		cmocka_unit_test(passes_files_on),
		cmocka_unit_test(a_signal_ends_it),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
