// SPDX-License-Identifier: Apache-2.0
// egress/confine: a process that is confined has sockets of the Internet, and nothing else.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "egress/confine.h"
#include "vmm/base/fd.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FILTERED 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FILTERED 0
#else
#define FILTERED 1
#endif
#else
#define FILTERED 1
#endif

static void *nothing(void *arg)
{
	return arg;
}

static bool failed(const char *what)
{
	fprintf(stderr, "still possible: %s\n", what);
	return true;
}

// The exit status: 0 if it is as it should be.
static int confined(const char *empty_dir)
{
	const char *missing;
	char *const argv[] = {(char *)(uintptr_t) "/bin/false", NULL};
	struct err err = {0};
	pthread_t thread;
	bool bad = false;
	const bool root = geteuid() == 0;

	if (confine(empty_dir, &missing, &err) < 0) {
		fprintf(stderr, "%s\n", err.msg);
		return 1;
	}
	if (missing[0])
		printf("skip the host has no %s\n", missing);
	if (!missing[0] && open("/etc/passwd", O_RDONLY) >= 0)
		bad = failed("to read a file");
	if (!missing[0] && open("/new", O_WRONLY | O_CREAT, 0600) >= 0)
		bad = failed("to make a file");
	if (root && !missing[0] && (geteuid() == 0 || getuid() == 0 || setuid(0) == 0))
		bad = failed("to be root");
	if (socket(AF_INET, SOCK_STREAM, 0) < 0 || socket(AF_INET6, SOCK_DGRAM, 0) < 0)
		bad = failed("nothing: it gets no socket") || bad;
	if (pthread_create(&thread, NULL, nothing, NULL) != 0 || pthread_join(thread, NULL) != 0)
		bad = failed("nothing: it gets no thread") || bad;
	if (!FILTERED)
		return bad;
	if (socket(AF_UNIX, SOCK_STREAM, 0) >= 0 || socket(AF_NETLINK, SOCK_RAW, 0) >= 0)
		bad = failed("a socket of another kind");
	if (execv(argv[0], argv) < 0 && errno != EPERM)
		bad = failed("to execute a program");
	if (mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		    0) != MAP_FAILED)
		bad = failed("executable memory");
	return bad;
}

static void nothing_but_sockets(void **state)
{
	char dir[] = "/tmp/mayfly-confine-XXXXXX";
	int status;
	pid_t pid;
	(void)state;

	assert_non_null(mkdtemp(dir));
	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		status = confined(dir);
		fflush(NULL);
		_exit(status);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_int_equal(rmdir(dir), 0); // what was laid over it has gone with the process
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_but_sockets)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
