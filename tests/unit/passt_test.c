// SPDX-License-Identifier: Apache-2.0
// vmm/passt: what it is started with, that it serves when the start returns and ends with our end
// of the socket, and what each failure says. The program is a stand-in, a script.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/util.h"
#include "vmm/passt.h"

static char dir[] = "/tmp/mayfly-test-XXXXXX";

static const struct passt_config config = {
	.address = "10.0.2.15/24", .gateway = "10.0.2.2", .dns = "10.0.2.3", .mtu = 65520};

static int start_script(const char *script, int *ret_fd, struct err *err)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "%s/passt", dir);
	unlink(path);
	if (script) {
		fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
		assert_true(fd >= 0);
		assert_int_equal(fd_write_all(fd, script, strlen(script)), 0);
		fd_close(&fd);
	}
	return passt_start(&config, ret_fd, err);
}

static unsigned int count_fds(void)
{
	unsigned int nr = 0;

	for (int fd = 0; fd < 1024; fd++)
		nr += fcntl(fd, F_GETFD) >= 0;
	return nr;
}

static void serves_and_ends_with_the_socket(void **state)
{
	const unsigned int before = count_fds();
	struct err err = {0};
	char args[512] = "", gone[64];
	struct pollfd poll_fd;
	int fd = -1;

	(void)state;
	// Says with what it was started, and on a file when its socket was closed.
	snprintf(gone, sizeof(gone), "%s/gone", dir);
	assert_int_equal(mkfifo(gone, 0600), 0);
	assert_int_equal(setenv("GONE", gone, 1), 0);
	assert_int_equal(
		start_script("#!/bin/sh\n"
			     "[ ! -e /proc/self/fd/4 ] || exit 1\n"
			     "echo 'Failed to send 3 bytes to syslog' >&2\n"
			     "(echo \"$*\" >&3; cat <&3 >/dev/null; : >$GONE) 2>/dev/null &\n",
			&fd, &err),
		0);
	assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
	poll_fd = (struct pollfd){.fd = fd, .events = POLLIN};
	assert_int_equal(poll(&poll_fd, 1, 10000), 1);
	assert_true(read(fd, args, sizeof(args) - 1) > 0);
	assert_string_equal(args, "-q -F 3 -t none -u none --no-map-gw -a 10.0.2.15 -n 24 -g "
				  "10.0.2.2 -m 65520 --dns-forward 10.0.2.3\n");
	fd_close(&fd);
	// Blocks until it opens the other side.
	fd = open(gone, O_RDONLY | O_CLOEXEC);
	assert_true(fd >= 0);
	fd_close(&fd);
	unlink(gone);
	assert_int_equal(count_fds(), before);
}

static void failures_say_why(void **state)
{
	static const struct {
		const char *script, *says;
	} bad[] = {
		{NULL, "apt-get install passt"},
		{"#!/bin/sh\necho 'Failed to send 9 bytes to syslog' >&2; echo no way out >&2; "
		 "exit 1\n",
			"does not start: no way out"},
		{"#!/bin/sh\nexit 1\n", "it says nothing"},
		{"#!/bin/sh\nkill -9 $$\n", "does not start"},
		{"#!/bin/sh\nyes >&2\n", "does not start: y"},
	};
	const unsigned int before = count_fds();

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = {0};
		int fd = -1;

		assert_true(start_script(bad[i].script, &fd, &err) < 0);
		assert_int_equal(fd, -1);
		if (!strstr(err.msg, bad[i].says))
			fail_msg("'%s' does not say '%s'", err.msg, bad[i].says);
	}
	assert_int_equal(count_fds(), before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(serves_and_ends_with_the_socket),
		cmocka_unit_test(failures_say_why),
	};
	char path[256];
	int failed;

	if (!mkdtemp(dir))
		return 1;
	// The stand-in alone, with what it uses.
	snprintf(path, sizeof(path), "%s", dir);
	for (unsigned int i = 0; i < 2; i++) {
		static const char *const used[] = {"cat", "yes"};
		char from[64], to[64];

		snprintf(from, sizeof(from), "/usr/bin/%s", used[i]);
		snprintf(to, sizeof(to), "%s/%s", dir, used[i]);
		if (symlink(from, to) < 0)
			return 1;
	}
	setenv("PATH", path, 1);
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	setenv("PATH", "/usr/bin:/bin", 1);
	snprintf(path, sizeof(path), "rm -r %s", dir);
	return failed + (system(path) != 0);
}
