// SPDX-License-Identifier: Apache-2.0
// Folders of machines, and shipped files; see the header. One thread.
#include "cli/home.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define THROWAWAY_PREFIX "run-"
// Held by the command for as long as the machine is its own; the monitor holds run/lock.
#define OWNER_LOCK "owner.lock"

static int path_of(char ret[PATH_MAX], struct err *err, const char *fmt, ...) PRINTF_LIKE(3, 4);

static int path_of(char ret[PATH_MAX], struct err *err, const char *fmt, ...)
{
	va_list ap;
	int len;

	va_start(ap, fmt);
	len = vsnprintf(ret, PATH_MAX, fmt, ap);
	va_end(ap);
	return len >= PATH_MAX ? err_errno(err, -ENAMETOOLONG, "%.60s…", ret) : 0;
}

static const char *env_or_null(const char *name)
{
	const char *value = getenv(name);

	return value && value[0] ? value : NULL;
}

static int home_path(char ret[PATH_MAX], struct err *err)
{
	const char *home = env_or_null("MAYFLY_HOME"), *state = env_or_null("XDG_STATE_HOME");

	if (home)
		return path_of(ret, err, "%s", home);
	if (geteuid() == 0)
		return path_of(ret, err, "/var/lib/mayfly");
	if (state)
		return path_of(ret, err, "%s/mayfly", state);
	if (!env_or_null("HOME"))
		return err_set(err, -ENOENT, "neither MAYFLY_HOME nor HOME is set");
	return path_of(ret, err, "%s/.local/state/mayfly", getenv("HOME"));
}

// mkdir -p, each new folder for its owner alone.
static int make_dirs(const char *path, struct err *err)
{
	char partial[PATH_MAX];
	int r = path_of(partial, err, "%s", path);

	if (r < 0)
		return r;
	for (char *p = partial + 1;; p++) {
		char c = *p;

		if (c != '/' && c != '\0')
			continue;
		*p = '\0';
		if (mkdir(partial, 0700) < 0 && errno != EEXIST)
			return err_errno(err, -errno, "%s", partial);
		if (c == '\0')
			return 0;
		*p = c;
	}
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	(void)ftw;
	return remove(path);
}

int home_remove(const char *dir, struct err *err)
{
	if (nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT)
		return err_errno(err, -errno, "removing %s", dir);
	return 0;
}

static bool lock_is_free(const char *dir, const char *name)
{
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX];

	if (path_of(path, NULL, "%s/%s", dir, name) < 0)
		return false;
	fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT;
	return flock(fd, LOCK_EX | LOCK_NB) == 0;
}

// A command that was killed could not clean up: the next one does it. A folder that is being made
// has no lock yet; vms_fd's own lock keeps its maker and us apart.
static void sweep(const char *vms)
{
	DIR *dir = opendir(vms);
	const struct dirent *e;
	char path[PATH_MAX];

	if (!dir)
		return;
	while ((e = readdir(dir))) {
		if (strncmp(e->d_name, THROWAWAY_PREFIX, strlen(THROWAWAY_PREFIX)) != 0 ||
			path_of(path, NULL, "%s/%s", vms, e->d_name) < 0)
			continue;
		if (lock_is_free(path, OWNER_LOCK) && lock_is_free(path, "run/lock"))
			(void)home_remove(path, NULL);
	}
	closedir(dir);
}

int home_make_throwaway(char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err)
{
	CLEANUP_FD int vms_fd = -1;
	CLEANUP_FD int lock_fd = -1;
	char home[PATH_MAX], vms[PATH_MAX], dir[PATH_MAX], path[PATH_MAX];
	int r;

	r = home_path(home, err);
	if (r == 0)
		r = path_of(vms, err, "%s/vms", home);
	if (r == 0)
		r = make_dirs(vms, err);
	if (r < 0)
		return r;
	vms_fd = open(vms, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (vms_fd < 0 || flock(vms_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", vms);
	sweep(vms);
	r = path_of(dir, err, "%s/" THROWAWAY_PREFIX "XXXXXX", vms);
	if (r < 0)
		return r;
	if (!mkdtemp(dir))
		return err_errno(err, -errno, "making a folder in %s", vms);
	r = path_of(path, err, "%s/" OWNER_LOCK, dir);
	if (r == 0) {
		lock_fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (lock_fd < 0 || flock(lock_fd, LOCK_EX | LOCK_NB) < 0)
			r = err_errno(err, -errno, "%s", path);
	}
	if (r == 0)
		r = path_of(path, err, "%s/run", dir);
	if (r == 0 && mkdir(path, 0700) < 0)
		r = err_errno(err, -errno, "%s", path);
	if (r < 0) {
		(void)home_remove(dir, NULL);
		return r;
	}
	strcpy(ret_dir, dir);
	*ret_lock_fd = TAKE_FD(lock_fd);
	return 0;
}

int home_find_kernel(char ret_path[PATH_MAX], struct err *err)
{
	static const char *const places[] = {"vmlinux", "../lib/mayfly/vmlinux"};
	const char *named = env_or_null("MAYFLY_KERNEL");
	char exe[PATH_MAX], path[PATH_MAX];
	ssize_t len;
	char *slash;

	if (named)
		return path_of(ret_path, err, "%s", named);
	len = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	if (len < 0)
		return err_errno(err, -errno, "/proc/self/exe");
	exe[len] = '\0';
	slash = strrchr(exe, '/');
	if (slash)
		*slash = '\0';
	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		if (path_of(path, NULL, "%s/%s", exe, places[i]) < 0 || access(path, R_OK) < 0)
			continue;
		strcpy(ret_path, path);
		return 0;
	}
	return err_set(err, -ENOENT,
		"no guest kernel: neither %s/vmlinux nor %s/../lib/mayfly/vmlinux (build one with "
		"`make kernel`, or name one with --kernel)",
		exe, exe);
}
