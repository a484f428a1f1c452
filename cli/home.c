// SPDX-License-Identifier: Apache-2.0
// Folders of machines, and shipped files; see the header. One thread.
#include "cli/home.h"

#include <ctype.h>
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
#include "vmm/base/lock.h"
#include "vmm/config.h"

#define THROWAWAY_PREFIX "run-"

int home_format(char ret[PATH_MAX], struct err *err, const char *fmt, ...)
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
		return home_format(ret, err, "%s", home);
	if (geteuid() == 0)
		return home_format(ret, err, "/var/lib/mayfly");
	if (state)
		return home_format(ret, err, "%s/mayfly", state);
	if (!env_or_null("HOME"))
		return err_set(err, -ENOENT, "neither MAYFLY_HOME nor HOME is set");
	return home_format(ret, err, "%s/.local/state/mayfly", getenv("HOME"));
}

// mkdir -p, each new folder for its owner alone.
static int make_dirs(const char *path, struct err *err)
{
	char partial[PATH_MAX];
	int r = home_format(partial, err, "%s", path);

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
	// What is gone already, another who sweeps has removed.
	return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

int home_remove(const char *dir, struct err *err)
{
	if (nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT)
		return err_errno(err, -errno, "removing %s", dir);
	return 0;
}

int home_remove_machine(const char *dir, struct err *err)
{
	const char *slash = strrchr(dir, '/');
	char dying[PATH_MAX];
	int r = home_format(
		dying, err, "%.*s/" THROWAWAY_PREFIX "%s", (int)(slash - dir), dir, slash + 1);

	if (r < 0)
		return r;
	// Where that is taken, or there is no room for it, it goes as it is.
	return home_remove(
		renameat2(AT_FDCWD, dir, AT_FDCWD, dying, RENAME_NOREPLACE) < 0 ? dir : dying, err);
}

// 1 if it is, 0 if not.
static int lock_is_free(const char *dir, const char *name, struct err *err)
{
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/%s", dir, name);

	if (r < 0)
		return r;
	r = lock_held(path, NULL);
	return r < 0 ? err_errno(err, r, "%s", path) : !r;
}

// Opens the folder of all machines, made if need be, and locks it until the fd is closed: for who
// makes or removes machines. (flock, since it is for waiting.)
static int open_vms(char ret_path[PATH_MAX], struct err *err)
{
	CLEANUP_FD int fd = -1;
	char home[PATH_MAX];
	int r = home_path(home, err);

	if (r == 0)
		r = home_format(ret_path, err, "%s/vms", home);
	if (r == 0)
		r = make_dirs(ret_path, err);
	if (r < 0)
		return r;
	fd = open(ret_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || flock(fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", ret_path);
	return TAKE_FD(fd);
}

// A command that was killed could not clean up: the next one does it. A folder that is being made
// has no lock yet; vms_fd's own lock keeps its maker and us apart.
// Goes on after what fails, and returns how many it was, or the last failure.
static int sweep(const char *vms, struct err *err)
{
	DIR *dir = opendir(vms);
	const struct dirent *e;
	char path[PATH_MAX];
	int swept = 0, bad = 0;

	if (!dir)
		return err_errno(err, -errno, "%s", vms);
	while (errno = 0, (e = readdir(dir))) {
		int r;

		if (strncmp(e->d_name, THROWAWAY_PREFIX, strlen(THROWAWAY_PREFIX)) != 0 ||
			home_format(path, NULL, "%s/%s", vms, e->d_name) < 0)
			continue;
		r = lock_is_free(path, HOME_OWNER_LOCK, err);
		if (r == 1)
			r = lock_is_free(path, "run/lock", err);
		if (r == 1)
			r = home_remove(path, err) < 0 ? -EIO : 1;
		swept += r == 1;
		bad = MIN(bad, r);
	}
	if (errno)
		bad = err_errno(err, -errno, "%s", vms);
	closedir(dir);
	return bad < 0 ? bad : swept;
}

int home_sweep(struct err *err)
{
	CLEANUP_FD int vms_fd = -1;
	char vms[PATH_MAX];

	vms_fd = open_vms(vms, err);
	return vms_fd < 0 ? vms_fd : sweep(vms, err);
}

int home_make_throwaway(char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err)
{
	CLEANUP_FD int vms_fd = -1;
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int lock_fd = -1;
	char vms[PATH_MAX], dir[PATH_MAX];
	int r;

	vms_fd = open_vms(vms, err);
	if (vms_fd < 0)
		return vms_fd;
	(void)sweep(vms, NULL);
	r = home_format(dir, err, "%s/" THROWAWAY_PREFIX "XXXXXX", vms);
	if (r < 0)
		return r;
	if (!mkdtemp(dir))
		return err_errno(err, -errno, "making a folder in %s", vms);
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd < 0 || mkdirat(dir_fd, "run", 0700) < 0)
		r = err_errno(err, -errno, "%s", dir);
	if (r == 0)
		r = lock_fd = lock_take(dir_fd, HOME_OWNER_LOCK, err);
	if (r < 0) {
		(void)home_remove(dir, NULL);
		return r;
	}
	strcpy(ret_dir, dir);
	*ret_lock_fd = TAKE_FD(lock_fd);
	return 0;
}

int home_check_name(const char *name, struct err *err)
{
	size_t len = strlen(name);
	const char *wrong = NULL;

	if (len == 0 || len > HOME_NAME_MAX)
		wrong = "1 to 63 characters long";
	else if (!isalnum((unsigned char)name[0]))
		wrong = "begun with a letter or digit";
	else if (strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") <
		 len)
		wrong = "made of letters, digits, '.', '_' and '-'";
	else if (!strncmp(name, THROWAWAY_PREFIX, strlen(THROWAWAY_PREFIX)))
		wrong = "other than run-…, which is for throwaway machines";
	return wrong ? err_set(err, -EINVAL, "'%.70s': a machine's name must be %s", name, wrong)
		     : 0;
}

static int machine_path(const char *name, char ret_dir[PATH_MAX], struct err *err)
{
	char home[PATH_MAX];
	int r = home_check_name(name, err);

	if (r == 0)
		r = home_path(home, err);
	return r < 0 ? r : home_format(ret_dir, err, "%s/vms/%s", home, name);
}

int home_find(const char *name, char ret_dir[PATH_MAX], struct err *err)
{
	struct stat st;
	int r = machine_path(name, ret_dir, err);

	if (r < 0)
		return r;
	if (lstat(ret_dir, &st) < 0)
		return errno == ENOENT
			       ? err_set(err, -ENOENT,
					 "there is no machine '%s' (mayfly ps lists them)", name)
			       : err_errno(err, -errno, "%s", ret_dir);
	return S_ISDIR(st.st_mode) ? 0 : err_errno(err, -ENOTDIR, "%s", ret_dir);
}

int home_create(
	const char *name, const struct config *config, char ret_dir[PATH_MAX], struct err *err)
{
	CLEANUP_FD int vms_fd = -1;
	char vms[PATH_MAX], making[PATH_MAX], path[PATH_MAX];
	int r = machine_path(name, ret_dir, err);

	if (r < 0)
		return r;
	vms_fd = open_vms(vms, err);
	if (vms_fd < 0)
		return vms_fd;
	(void)sweep(vms, NULL);
	// Complete before it has its name; a throwaway's, so that one that is left is swept.
	r = home_format(making, err, "%s/" THROWAWAY_PREFIX "XXXXXX", vms);
	if (r < 0)
		return r;
	if (!mkdtemp(making))
		return err_errno(err, -errno, "making a folder in %s", vms);
	r = home_format(path, err, "%s/run", making);
	if (r == 0 && mkdir(path, 0700) < 0)
		r = err_errno(err, -errno, "%s", path);
	if (r == 0)
		r = home_format(path, err, "%s/vm.ini", making);
	if (r == 0)
		r = config_write(path, config, err);
	if (r == 0 && renameat2(AT_FDCWD, making, AT_FDCWD, ret_dir, RENAME_NOREPLACE) < 0)
		r = errno == EEXIST ? err_set(err, -EEXIST, "there is a machine '%s' already", name)
				    : err_errno(err, -errno, "%s", ret_dir);
	if (r < 0)
		(void)home_remove(making, NULL);
	return r;
}

int home_running(const char *dir, pid_t *ret_pid, struct err *err)
{
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/run/lock", dir);

	if (r < 0)
		return r;
	r = lock_held(path, ret_pid);
	return r < 0 ? err_errno(err, r, "%s", path) : r;
}

static int is_machine(const struct dirent *e)
{
	return e->d_name[0] != '.';
}

static int each_of(const char *kind, int (*each)(void *opaque, const char *name, const char *dir),
	void *opaque, struct err *err)
{
	char home[PATH_MAX], folder[PATH_MAX], dir[PATH_MAX];
	struct dirent **list;
	int n, r = home_path(home, err);

	if (r == 0)
		r = home_format(folder, err, "%s/%s", home, kind);
	if (r < 0)
		return r;
	n = scandir(folder, &list, is_machine, alphasort);
	if (n < 0)
		return errno == ENOENT ? 0 : err_errno(err, -errno, "%s", folder);
	for (int i = 0; i < n; i++) {
		if (r == 0 && home_format(dir, NULL, "%s/%s", folder, list[i]->d_name) == 0)
			r = each(opaque, list[i]->d_name, dir);
		free(list[i]);
	}
	free(list);
	return r;
}

int home_each(
	int (*each)(void *opaque, const char *name, const char *dir), void *opaque, struct err *err)
{
	return each_of("vms", each, opaque, err);
}

int home_each_pool(
	int (*each)(void *opaque, const char *name, const char *dir), void *opaque, struct err *err)
{
	return each_of("pools", each, opaque, err);
}

static int home_folder(char ret_path[PATH_MAX], const char *name, struct err *err)
{
	char home[PATH_MAX];
	int r = home_path(home, err);

	if (r == 0)
		r = home_format(ret_path, err, "%s/%s", home, name);
	return r < 0 ? r : make_dirs(ret_path, err);
}

int home_snapshots(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "snapshots", err);
}

int home_golden(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "golden", err);
}

int home_approvals(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "approvals", err);
}

int home_persist(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "persist", err);
}

int home_images(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "images", err);
}

int home_pools(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "pools", err);
}

int home_secrets(char ret_path[PATH_MAX], struct err *err)
{
	return home_folder(ret_path, "secrets", err);
}

// A file of ours, beside this program or where it is installed.
static int find_shipped(
	const char *name, const char *made_by, char ret_path[PATH_MAX], struct err *err)
{
	static const char *const places[] = {"", "../lib/mayfly/"};
	char exe[PATH_MAX], path[PATH_MAX];
	ssize_t len = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	char *slash;

	if (len < 0)
		return err_errno(err, -errno, "/proc/self/exe");
	exe[len] = '\0';
	slash = strrchr(exe, '/');
	if (slash)
		*slash = '\0';
	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		if (home_format(path, NULL, "%s/%s%s", exe, places[i], name) < 0 ||
			access(path, R_OK) < 0)
			continue;
		strcpy(ret_path, path);
		return 0;
	}
	return err_set(err, -ENOENT,
		"no guest kernel: neither %s/%s nor %s/../lib/mayfly/%s (build one with `%s`, or "
		"name one with --kernel)",
		exe, name, exe, name, made_by);
}

int home_find_kernel(char ret_path[PATH_MAX], struct err *err)
{
	const char *named = env_or_null("MAYFLY_KERNEL");

	if (named)
		return realpath(named, ret_path)
			       ? 0
			       : err_errno(err, -errno, "MAYFLY_KERNEL: %s", named);
	return find_shipped("vmlinux", "make kernel", ret_path, err);
}

int home_find_standard_kernel(char ret_path[PATH_MAX], struct err *err)
{
	return find_shipped("standard/vmlinux", "make kernel-standard", ret_path, err);
}
