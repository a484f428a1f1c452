// SPDX-License-Identifier: Apache-2.0
// vmm/base: errors keep their code and gather context; fds are read whole; bytes are little-endian.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "vmm/base/bytes.h"
#include "vmm/base/err.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"

static void err_gathers_context(void **state)
{
	struct err err = {0};
	(void)state;

	assert_int_equal(err_errno(&err, -ENOENT, "open %s", "/x"), -ENOENT);
	assert_string_equal(err.msg, "open /x: No such file or directory");
	assert_int_equal(err_wrap(&err, -ENOENT, "kernel"), -ENOENT);
	assert_string_equal(err.msg, "kernel: open /x: No such file or directory");
	assert_int_equal(err_set(NULL, -EINVAL, "nobody listens"), -EINVAL);
	assert_int_equal(err_wrap(NULL, -EIO, "nobody listens"), -EIO);
}

static void err_truncates_long_messages(void **state)
{
	struct err err = {0};
	char long_name[2000];
	(void)state;

	memset(long_name, 'a', sizeof(long_name) - 1);
	long_name[sizeof(long_name) - 1] = '\0';
	err_errno(&err, -ENOENT, "%s", long_name);
	err_wrap(&err, -ENOENT, "%s", long_name);
	assert_true(strlen(err.msg) < sizeof(err.msg));
	assert_int_equal(err.code, -ENOENT);
}

static void fd_close_is_idempotent(void **state)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int copy = fd;
	(void)state;

	assert_true(fd >= 0);
	fd_close(&fd);
	assert_int_equal(fd, -1);
	assert_int_equal(fcntl(copy, F_GETFD), -1);
	fd_close(&fd);
}

static void fd_reads_across_short_pipes(void **state)
{
	int p[2];
	char buf[8] = {0};
	(void)state;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	assert_int_equal(fd_write_all(p[1], "abc", 3), 0);
	assert_int_equal(fd_write_all(p[1], "de", 2), 0);
	fd_close(&p[1]);
	assert_int_equal(fd_read_full(p[0], buf, sizeof(buf)), 5);
	assert_string_equal(buf, "abcde");
	fd_close(&p[0]);
}

static void fd_read_file_bounds(void **state)
{
	char path[] = "/tmp/mayfly-test-XXXXXX";
	int fd = mkstemp(path);
	CLEANUP_FREE char *buf = NULL;
	CLEANUP_FREE char *buf2 = NULL;
	size_t len = 0;
	struct err err = {0};
	(void)state;

	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, "0123456789", 10), 0);
	fd_close(&fd);
	assert_int_equal(fd_read_file(path, 10, &buf, &len, &err), 0);
	assert_int_equal(len, 10);
	assert_string_equal(buf, "0123456789");
	assert_int_equal(fd_read_file(path, 9, &buf2, &len, &err), -EFBIG);
	assert_null(buf2);
	unlink(path);
	assert_int_equal(fd_read_file(path, 9, &buf2, &len, &err), -ENOENT);
}

static void log_limit_drops_and_counts(void **state)
{
	struct log_limit limit = {0};
	uint32_t dropped = 0;
	int passed = 0;
	(void)state;

	for (int i = 0; i < 100; i++)
		passed += log_limit_pass(&limit, &dropped);
	assert_int_equal(passed, 5);
	assert_int_equal(limit.dropped, 95);
	limit.window_start_ns = 1; // long ago
	assert_true(log_limit_pass(&limit, &dropped));
	assert_int_equal(dropped, 95);
}

static void bytes_are_little_endian(void **state)
{
	uint8_t b[8] = {1, 2, 3, 4, 5, 6, 7, 8};
	(void)state;

	assert_int_equal(get_le16(b + 1), 0x0302);
	assert_int_equal(get_le32(b + 1), 0x05040302);
	assert_true(get_le64(b) == 0x0807060504030201ULL);
	put_le32(b, 0xaabbccdd);
	assert_int_equal(b[0], 0xdd);
	assert_int_equal(b[3], 0xaa);
	assert_int_equal(b[4], 5);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(err_gathers_context),
		cmocka_unit_test(err_truncates_long_messages),
		cmocka_unit_test(fd_close_is_idempotent),
		cmocka_unit_test(fd_reads_across_short_pipes),
		cmocka_unit_test(fd_read_file_bounds),
		cmocka_unit_test(log_limit_drops_and_counts),
		cmocka_unit_test(bytes_are_little_endian),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
