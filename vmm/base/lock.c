// SPDX-License-Identifier: Apache-2.0
// File locks (fcntl F_OFD_*); see the header. Any thread.
#include "vmm/base/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "vmm/base/fd.h"

int lock_take(int dir_fd, const char *name, struct err *err)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	if (fd < 0)
		return err_errno(err, -errno, "%s", name);
	if (fcntl(fd, F_OFD_SETLK, &lock) < 0) {
		int r = errno == EACCES || errno == EAGAIN ? -EBUSY : -errno;

		return err_errno(err, r, "%s", name);
	}
	if (ftruncate(fd, 0) < 0 || dprintf(fd, "%d\n", (int)getpid()) < 0)
		return err_errno(err, -errno, "%s", name);
	return TAKE_FD(fd);
}

int lock_held(const char *path, pid_t *ret_pid)
{
	CLEANUP_FD int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
	char text[16] = "";

	if (fd < 0)
		return errno == ENOENT ? 0 : -errno;
	// Asking for a read lock finds the write lock that a holder has.
	if (fcntl(fd, F_OFD_GETLK, &lock) < 0)
		return -errno;
	if (lock.l_type == F_UNLCK)
		return 0;
	if (ret_pid) {
		ssize_t n = fd_pread_full(fd, text, sizeof(text) - 1, 0);

		*ret_pid = n > 0 ? (pid_t)strtol(text, NULL, 10) : 0;
	}
	return 1;
}
