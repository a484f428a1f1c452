// SPDX-License-Identifier: Apache-2.0
// vmm/base/lock: one holder, found by others without taking part, gone when the holder dies.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/lock.h"

static void one_holder_and_its_pid(void **state)
{
	char dir[] = "/tmp/mayfly-test-XXXXXX", path[64], byte;
	struct err err = {0};
	int dir_fd, fd, ready[2];
	pid_t child, holder = 0;
	(void)state;

	assert_non_null(mkdtemp(dir));
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	snprintf(path, sizeof(path), "%s/lock", dir);
	assert_int_equal(lock_held(path, &holder), 0); // no file
	assert_int_equal(pipe(ready), 0);
	child = fork();
	if (child == 0) {
		if (lock_take(dir_fd, "lock", NULL) < 0 || write(ready[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	assert_int_equal(read(ready[0], &byte, 1), 1);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(lock_held(path, &holder), 1);
		assert_int_equal(holder, child);
	}
	assert_int_equal(lock_take(dir_fd, "lock", &err), -EBUSY);
	kill(child, SIGKILL);
	assert_int_equal(waitpid(child, NULL, 0), child);
	assert_int_equal(lock_held(path, &holder), 0);
	fd = lock_take(dir_fd, "lock", &err);
	assert_true(fd >= 0);
	assert_int_equal(lock_held(path, &holder), 1);
	assert_int_equal(holder, getpid());
	fd_close(&fd);
	assert_int_equal(lock_held(path, NULL), 0);
	unlink(path);
	assert_int_equal(symlink("/etc/passwd", path), 0);
	assert_int_equal(lock_take(dir_fd, "lock", &err), -ELOOP);
	unlink(path);
	rmdir(dir);
	fd_close(&dir_fd);
	fd_close(&ready[0]);
	fd_close(&ready[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_holder_and_its_pid),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
