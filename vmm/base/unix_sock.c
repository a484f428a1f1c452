// SPDX-License-Identifier: Apache-2.0
// Unix sockets by folder and name; see the header. Any thread.
#include "vmm/base/unix_sock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "vmm/base/fd.h"

// The address goes through the open folder, so the folder's own path may be of any length. The
// working directory needs neither that nor a /proc.
static int address(const char *dir, const char *name, int *ret_dir_fd, struct sockaddr_un *ret,
	struct err *err)
{
	int dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC), len;

	if (dir_fd < 0)
		return err_errno(err, -errno, "%s", dir);
	*ret = (struct sockaddr_un){.sun_family = AF_UNIX};
	len = strcmp(dir, ".") == 0 ? snprintf(ret->sun_path, sizeof(ret->sun_path), "%s", name)
				    : snprintf(ret->sun_path, sizeof(ret->sun_path),
					      "/proc/self/fd/%d/%s", dir_fd, name);
	if (len >= (int)sizeof(ret->sun_path)) {
		fd_close(&dir_fd);
		return err_errno(err, -ENAMETOOLONG, "%s/%s", dir, name);
	}
	*ret_dir_fd = dir_fd;
	return 0;
}

int unix_connect(const char *dir, const char *name, struct err *err)
{
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int fd = -1;
	struct sockaddr_un addr;
	int r = address(dir, name, &dir_fd, &addr, err);

	if (r < 0)
		return r;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return err_errno(err, -errno, "socket");
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		return err_errno(err, -errno, "%s/%s", dir, name);
	return TAKE_FD(fd);
}

int unix_listen(const char *dir, const char *name, int backlog, struct err *err)
{
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int fd = -1;
	CLEANUP_FD int probe = -1;
	struct sockaddr_un addr;
	int r = address(dir, name, &dir_fd, &addr, err);

	if (r < 0)
		return r;
	probe = unix_connect(dir, name, NULL);
	if (probe >= 0)
		return err_errno(err, -EADDRINUSE, "%s/%s", dir, name);
	if (probe == -ECONNREFUSED)
		unlinkat(dir_fd, name, 0);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return err_errno(err, -errno, "socket");
	// The mode of the file is that of the socket when it is bound, less the umask.
	if (fchmod(fd, 0600) < 0 || bind(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0 ||
		listen(fd, backlog) < 0)
		return err_errno(err, -errno, "%s/%s", dir, name);
	return TAKE_FD(fd);
}
