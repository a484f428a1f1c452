// SPDX-License-Identifier: Apache-2.0
// File descriptor helpers. Any thread.
#include "vmm/base/fd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

void fd_close(int *fd)
{
	int saved = errno;

	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	errno = saved;
}

ssize_t fd_read_full(int fd, void *buf, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = read(fd, (char *)buf + done, len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (ssize_t)done;
}

ssize_t fd_pread_full(int fd, void *buf, size_t len, off_t off)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = pread(fd, (char *)buf + done, len - done, off + (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (ssize_t)done;
}

int fd_write_all(int fd, const void *buf, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = write(fd, (const char *)buf + done, len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		done += (size_t)n;
	}
	return 0;
}

int fd_read_file(
	const char *path, size_t max_bytes, char **ret_buf, size_t *ret_len, struct err *err)
{
	CLEANUP_FD int fd = -1;
	CLEANUP_FREE char *buf = NULL;
	size_t cap = MIN(max_bytes, (size_t)65536), len = 0;
	struct stat st;

	// A FIFO would have us wait for its writer.
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", path);
	if (!S_ISREG(st.st_mode))
		return err_set(err, -EINVAL, "%s: not a regular file", path);
	for (;;) {
		char *bigger = realloc(buf, cap + 1);
		ssize_t n;

		if (!bigger)
			return err_errno(err, -ENOMEM, "%s", path);
		buf = bigger;
		n = fd_read_full(fd, buf + len, cap - len);
		if (n < 0)
			return err_errno(err, (int)n, "%s", path);
		len += (size_t)n;
		if (len < cap)
			break;
		if (cap == max_bytes) {
			char more;

			n = fd_read_full(fd, &more, 1);
			if (n < 0)
				return err_errno(err, (int)n, "%s", path);
			if (n == 0)
				break;
			return err_set(err, -EFBIG, "%s: larger than %zu bytes", path, max_bytes);
		}
		cap = MIN(cap * 2, max_bytes);
	}
	buf[len] = '\0';
	*ret_buf = TAKE_PTR(buf);
	*ret_len = len;
	return 0;
}
