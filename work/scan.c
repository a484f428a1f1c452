// SPDX-License-Identifier: Apache-2.0
// Looks at a tree; see the header. One thread.
#include "work/scan.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <linux/openat2.h>

#include "vmm/base/fd.h"

// The clocks of file systems are that coarse: what was changed in the moment of the look before may
// have been changed after it.
#define CLOCK_SLACK_NS 2000000000LL
#define HASH_TRIES     3

struct scan {
	const struct work_scan *how;
	struct work_manifest m;
	char path[PATH_MAX];
};

static int fail(const struct scan *s, int code, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	return err_errno(err, code, "%s", work_quote(quoted, s->path[0] ? s->path : "."));
}

static bool keep_hash(const struct scan *s, struct work_entry *e)
{
	const struct work_manifest *before = s->how->before;
	const struct work_entry *b = before ? work_manifest_find(before, s->path) : NULL;

	if (!b || !b->hashed || !work_entry_untouched(b, e) ||
		b->ctime_ns > before->taken_ns - CLOCK_SLACK_NS)
		return false;
	e->hashed = true;
	memcpy(e->hash, b->hash, sizeof(e->hash));
	return true;
}

static int hash_file(
	const struct scan *s, int dir_fd, const char *name, struct work_entry *e, struct err *err)
{
	CLEANUP_FD int fd = openat(
		dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	char quoted[WORK_QUOTED_MAX];
	struct work_entry after;
	struct stat st;
	int r;

	if (fd < 0 || fstat(fd, &st) < 0)
		return fail(s, -errno, err);
	for (int i = 0; i < HASH_TRIES && S_ISREG(st.st_mode); i++) {
		*e = work_entry_of(&st);
		if (lseek(fd, 0, SEEK_SET) < 0)
			return fail(s, -errno, err);
		r = work_hash_fd(fd, e->hash);
		if (r == 0 && fstat(fd, &st) < 0)
			r = -errno;
		if (r < 0)
			return fail(s, r, err);
		e->hashed = true;
		after = work_entry_of(&st);
		if (work_entry_untouched(e, &after))
			return 0;
	}
	return err_set(err, -EAGAIN,
		"%s: it is being changed; try again when that has come to its end",
		work_quote(quoted, s->path));
}

static int scan_folder(struct scan *s, int fd, unsigned int depth, bool *ret_more, struct err *err);

static int add(struct scan *s, struct work_entry *e, struct err *err)
{
	if (s->how->progress)
		s->how->progress(s->how->ctx, s->m.nr);
	e->path = s->path;
	return work_manifest_add(&s->m, e, err);
}

static int scan_entry(struct scan *s, int dir_fd, const char *name, unsigned int depth,
	bool *ret_more, struct err *err)
{
	char target[PATH_MAX];
	struct work_entry e;
	struct stat st;
	bool more = false;
	ssize_t n;
	size_t at;
	int fd, r;

	if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? 0 : fail(s, -errno, err);
	e = work_entry_of(&st);
	if (work_ignored(s->how->ignore, s->path, e.type == 'd')) {
		*ret_more = true;
		return 0;
	}
	switch (e.type) {
	case 'f':
		r = keep_hash(s, &e) ? 0 : hash_file(s, dir_fd, name, &e, err);
		return r < 0 ? r : add(s, &e, err);
	case 'l':
		n = readlinkat(dir_fd, name, target, sizeof(target) - 1);
		if (n < 0)
			return fail(s, -errno, err);
		target[n] = '\0';
		e.link = target;
		return add(s, &e, err);
	case 'd':
		if (depth == 0)
			return fail(s, -ENAMETOOLONG, err);
		at = s->m.nr;
		r = add(s, &e, err);
		if (r < 0)
			return r;
		fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (fd < 0)
			return fail(s, -errno, err);
		r = scan_folder(s, fd, depth - 1, &more, err);
		s->m.entries[at].holds_more = more;
		*ret_more |= more;
		return r;
	default:
		*ret_more = true;
		if (s->how->left_out)
			s->how->left_out(s->how->ctx, s->path);
		return 0;
	}
}

// Takes fd.
static int scan_folder(struct scan *s, int fd, unsigned int depth, bool *ret_more, struct err *err)
{
	size_t len = strlen(s->path);
	bool more = false;
	struct dirent *d;
	DIR *dir = fdopendir(fd);
	int r = 0;

	if (!dir) {
		r = fail(s, -errno, err);
		fd_close(&fd);
		return r;
	}
	while (r == 0) {
		errno = 0;
		d = readdir(dir);
		if (!d) {
			r = errno ? fail(s, -errno, err) : 0;
			break;
		}
		if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
			continue;
		if (snprintf(s->path + len, sizeof(s->path) - len, "%s%s", len ? "/" : "",
			    d->d_name) >= (int)(sizeof(s->path) - len))
			r = fail(s, -ENAMETOOLONG, err);
		else
			r = scan_entry(s, dirfd(dir), d->d_name, depth, &more, err);
		s->path[len] = '\0';
	}
	closedir(dir);
	*ret_more |= more;
	return r;
}

int work_scan(const struct work_scan *how, int dir_fd, struct work_manifest *ret, struct err *err)
{
	struct scan s = {.how = how};
	struct timespec now;
	bool more = false;
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int r;

	if (fd < 0)
		return fail(&s, -errno, err);
	clock_gettime(CLOCK_REALTIME, &now);
	s.m.taken_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
	r = scan_folder(&s, fd, WORK_DEPTH_MAX - 1, &more, err);
	if (r == 0)
		r = work_manifest_finish(&s.m, err);
	if (r < 0) {
		work_manifest_fini(&s.m);
		return r;
	}
	*ret = s.m;
	return 0;
}

int work_open_parent(int dir_fd, const char *path, const char **ret_name)
{
	const char *slash = strrchr(path, '/');
	struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
	char folder[PATH_MAX] = ".";
	int fd;

	if (slash && (size_t)(slash - path) >= sizeof(folder))
		return -ENAMETOOLONG;
	if (slash) {
		memcpy(folder, path, (size_t)(slash - path));
		folder[slash - path] = '\0';
	}
	fd = (int)syscall(SYS_openat2, dir_fd, folder, &how, sizeof(how));
	if (fd < 0)
		return -errno;
	*ret_name = slash ? slash + 1 : path;
	return fd;
}

int work_make_parents(int dir_fd, const char *path)
{
	char folder[PATH_MAX];

	snprintf(folder, sizeof(folder), "%s", path);
	for (char *s = folder; (s = strchr(s, '/')); *s++ = '/') {
		*s = '\0';
		if (mkdirat(dir_fd, folder, 0700) < 0 && errno != EEXIST)
			return -errno;
	}
	return 0;
}

int work_copy(int from_dir, const char *path, int to_dir, const char *to, uint32_t mode)
{
	char bytes[32 * KIB];
	const char *name = path;
	CLEANUP_FD int parent_fd = work_open_parent(from_dir, path, &name);
	CLEANUP_FD int from_fd = -1;
	CLEANUP_FD int to_fd = -1;
	ssize_t n;
	int r = 0;

	if (parent_fd < 0)
		return parent_fd;
	from_fd = openat(
		parent_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (from_fd < 0)
		return -errno;
	to_fd = openat(to_dir, to, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (to_fd < 0 || fchmod(to_fd, mode) < 0)
		return -errno;
	do {
		n = fd_read_full(from_fd, bytes, sizeof(bytes));
		r = n < 0 ? (int)n : fd_write_all(to_fd, bytes, (size_t)n);
	} while (r == 0 && n);
	return r;
}

static int remove_in(int dir_fd, const char *name, unsigned int depth)
{
	struct dirent *d;
	DIR *dir;
	int fd, r = 0;

	if (unlinkat(dir_fd, name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR)
		return -errno;
	if (depth == 0)
		return -ENAMETOOLONG;
	fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	// Rights that keep its owner out too.
	if (fd < 0 && errno == EACCES && fchmodat(dir_fd, name, 0700, 0) == 0)
		fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	(void)fchmod(fd, 0700);
	dir = fdopendir(fd);
	if (!dir) {
		r = -errno;
		fd_close(&fd);
		return r;
	}
	while (r == 0 && (d = readdir(dir)))
		if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0)
			r = remove_in(dirfd(dir), d->d_name, depth - 1);
	closedir(dir);
	if (r == 0 && unlinkat(dir_fd, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
		r = -errno;
	return r;
}

int work_remove(int dir_fd, const char *name)
{
	return remove_in(dir_fd, name, WORK_DEPTH_MAX + 8);
}
