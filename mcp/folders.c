// SPDX-License-Identifier: Apache-2.0
// Paths of the host; see the header. Any thread.
#include "mcp/folders.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vmm/base/fd.h"

static int open_beneath(int dir_fd, const char *path, int flags, uint64_t resolve)
{
	const struct open_how how = {
		.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = resolve | RESOLVE_NO_MAGICLINKS};
	long fd = syscall(SYS_openat2, dir_fd, path, &how, sizeof(how));

	return fd < 0 ? -errno : (int)fd;
}

int folders_check(const char *path, struct err *err)
{
	if (path[0] != '/')
		return err_set(err, -EINVAL,
			"'%.80s' is not a whole path of the host: begin it with /", path);
	for (const char *at = path; at; at = strchr(at, '/')) {
		size_t len = strcspn(++at, "/");

		if ((len == 1 || len == 2) && !strncmp(at, "..", len))
			return err_set(err, -EINVAL, "'%.80s': without '.' and '..', please", path);
	}
	return 0;
}

// What is left of path below the folder, or NULL if it is not in there.
static const char *below(const char *folder, const char *path)
{
	size_t len = strcmp(folder, "/") ? strlen(folder) : 0;

	if (strncmp(path, folder, len) != 0 || (path[len] && path[len] != '/'))
		return NULL;
	path += len;
	path += strspn(path, "/");
	return *path ? path : ".";
}

int folders_open(
	const struct config *config, const char *path, bool write, int flags, struct err *err)
{
	struct config_folder folder;

	for (unsigned int i = 0; config_folder(config, i, &folder); i++) {
		const char *rest = below(folder.path, path);
		CLEANUP_FD int dir_fd = -1;
		int fd;

		if (!rest || (write && !folder.write))
			continue;
		dir_fd = open(folder.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
		fd = dir_fd < 0 ? -errno : open_beneath(dir_fd, rest, flags, RESOLVE_BENEATH);
		if (fd < 0)
			err_errno(err, fd, "%s on the host", path);
		return fd;
	}
	if (!config->folders[0])
		return err_set(err, -EACCES,
			"the owner has allowed no folder of the host ([mcp] folders in vm.ini)");
	return err_set(err, -EACCES, "%s is in no folder of the host that the owner has allowed%s",
		path, write ? " to write to" : "");
}

int folders_open_elsewhere(const char *path)
{
	return open_beneath(AT_FDCWD, path, O_PATH, RESOLVE_NO_SYMLINKS);
}
