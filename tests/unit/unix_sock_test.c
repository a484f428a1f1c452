// SPDX-License-Identifier: Apache-2.0
// vmm/base/unix_sock: long folders, modes, stale sockets.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

static void sockets_by_folder_and_name(void **state)
{
	char base[] = "/tmp/mayfly-test-XXXXXX", dir[400], path[500], deep[201];
	CLEANUP_FD int a = -1;
	CLEANUP_FD int b = -1;
	CLEANUP_FD int c = -1;
	struct err err = {0};
	struct stat st;
	(void)state;

	assert_non_null(mkdtemp(base));
	memset(deep, 'd', 200);
	deep[200] = '\0';
	snprintf(dir, sizeof(dir), "%s/%s", base, deep);
	assert_int_equal(mkdir(dir, 0700), 0);
	assert_int_equal(unix_connect(dir, "s", &err), -ENOENT);
	a = unix_listen(dir, "s", 4, &err);
	assert_true(a >= 0);
	snprintf(path, sizeof(path), "%s/s", dir);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	b = unix_connect(dir, "s", &err);
	assert_true(b >= 0);
	assert_int_equal(unix_listen(dir, "s", 4, &err), -EADDRINUSE);
	fd_close(&a);
	fd_close(&b);
	assert_int_equal(unix_connect(dir, "s", &err), -ECONNREFUSED);
	c = unix_listen(dir, "s", 4, &err);
	assert_true(c >= 0);
	assert_int_equal(unix_listen("/nonexistent", "s", 4, &err), -ENOENT);
	memset(deep, 'x', 150);
	deep[150] = '\0';
	assert_int_equal(unix_listen(base, deep, 4, &err), -ENAMETOOLONG);
	unlink(path);
	rmdir(dir);
	rmdir(base);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sockets_by_folder_and_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
