// SPDX-License-Identifier: Apache-2.0
// What machines of one project hand on; see the header. One thread, and one more that sends.
#include "cli/work_persist.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/sha256.h"
#include "cli/work_ini.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"
#include "work/scan.h"

#define LIST      "persist"
#define TREE      "tree"
#define NEW       "new"
#define KEY_CHARS 32
// Others of the project wait meanwhile, and a guest can be as slow as it likes.
#define PATH_NS 600000000000ULL
#define WAIT_NS 60000000000ULL
#define TRY_MS  100

static void key_of(const char *text, char ret[KEY_CHARS + 1])
{
	char hash[SHA256_TEXT_LEN + 1];
	struct sha256_ctx sha;

	sha256_init(&sha);
	sha256_update(&sha, strlen(text), (const uint8_t *)text);
	sha256_text(&sha, hash);
	snprintf(ret, KEY_CHARS + 1, "%.*s", KEY_CHARS, hash);
}

static int open_folder(int dir_fd, const char *name)
{
	int fd;

	if (mkdirat(dir_fd, name, 0700) < 0 && errno != EEXIST)
		return -errno;
	fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

// Others of the project take their turns; the last one counts.
static int lock_store(int fd, int signal_fd, struct err *err)
{
	const uint64_t until_ns = now_ns() + WAIT_NS;

	while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		struct pollfd p = {.fd = signal_fd, .events = POLLIN};
		struct signalfd_siginfo info;

		if (errno != EWOULDBLOCK && errno != EINTR)
			return err_errno(err, -errno, "persist");
		if (now_ns() >= until_ns)
			return err_set(err, -EBUSY,
				"another machine of this folder is still handing on what is at the "
				"paths of persist: try again later");
		if (poll(&p, 1, TRY_MS) > 0 &&
			read(signal_fd, &info, sizeof(info)) == sizeof(info) &&
			info.ssi_signo != SIGWINCH)
			return err_set(err, -EINTR, "interrupted by signal %u", info.ssi_signo);
	}
	return 0;
}

// The project's folder, locked: an fd, the caller's.
static int open_store(const char *target, int signal_fd, char ret_path[PATH_MAX], struct err *err)
{
	char home[PATH_MAX], key[KEY_CHARS + 1];
	CLEANUP_FD int home_fd = -1;
	CLEANUP_FD int fd = -1;
	int r = home_persist(home, err);

	if (r < 0)
		return r;
	key_of(target, key);
	r = home_format(ret_path, err, "%s/%s", home, key);
	if (r < 0)
		return r;
	home_fd = open(home, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	fd = home_fd < 0 ? -errno : open_folder(home_fd, key);
	if (fd < 0)
		return err_errno(err, fd, "%s", ret_path);
	r = lock_store(fd, signal_fd, err);
	if (r < 0)
		return r;
	if (symlinkat(target, fd, "folder") < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s/folder", ret_path);
	return TAKE_FD(fd);
}

struct told {
	const char *path; // in the guest
	bool gone; // it is not there
	bool any; // something of it could not be copied
	bool no_room; // where it goes
};

static void problem(void *ctx, const char *path, int errno_value)
{
	struct told *told = ctx;
	char quoted[WORK_QUOTED_MAX];

	if (!errno_value)
		return;
	told->no_room |= errno_value == ENOSPC || errno_value == EDQUOT;
	told->any |= errno_value != TREE_LEFT_OUT;
	// Not to have it is no problem.
	if ((errno_value == ENOENT || errno_value == ENOTDIR) && !strcmp(path, told->path))
		told->gone = true;
	else
		fprintf(stderr, "mayfly: persist: %s: %s: %s\n", told->path,
			work_quote(quoted, path), strerror(errno_value));
}

static int open_files(struct work_machine *w, struct agent_files *ret, struct err *err)
{
	int r = work_files(w, ret, err);

	if (r == 0)
		ret->deadline_ns = now_ns() + PATH_NS;
	return r;
}

static int put(
	struct work_machine *w, int store_fd, const char *store, const char *path, struct err *err)
{
	char folder[PATH_MAX], key[KEY_CHARS + 1], from[PATH_MAX];
	struct told told = {.path = path};
	struct agent_put how = {
		.folder = folder, .parents = true, .problem = problem, .ctx = &told};
	struct agent_files files;
	struct stat st;
	char *slash;
	int r;

	key_of(path, key);
	r = home_format(from, err, "%s/%s/" TREE, store, key);
	if (r < 0)
		return r;
	if (fstatat(store_fd, key, &st, AT_SYMLINK_NOFOLLOW) < 0 || lstat(from, &st) < 0)
		return 0; // nobody has left anything yet
	snprintf(folder, sizeof(folder), "%s", path);
	slash = strrchr(folder, '/');
	how.name = path + (slash - folder) + 1;
	*slash = '\0';
	if (!folder[0])
		strcpy(folder, "/");
	r = open_files(w, &files, err);
	if (r < 0)
		return r;
	r = agent_put(&files, from, &how, TREE_DEPTH_MAX, err);
	fd_close(&files.conn_fd);
	// What could not be handed on has been told, and is no reason to have no machine. But one
	// without room for it would hand on a part in the place of the whole.
	if (r == -EIO && told.any && !told.no_room)
		return 0;
	return r < 0 ? err_wrap(err, r, "persist: %s", path) : 0;
}

int work_persist_in(struct work_machine *w, char *const *paths, unsigned int nr, struct err *err)
{
	char store[PATH_MAX];
	CLEANUP_FD int store_fd = nr ? open_store(w->target, w->signal_fd, store, err) : -1;
	CLEANUP_FD int fd = -1;
	int r = nr ? MIN(store_fd, 0) : 0;

	if (r < 0 || nr == 0)
		return r;
	fd = openat(w->state_fd, LIST, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, LIST);
	for (unsigned int i = 0; i < nr && r == 0; i++) {
		r = put(w, store_fd, store, paths[i], err);
		if (r == 0 && fd_write_all(fd, paths[i], strlen(paths[i]) + 1) < 0)
			r = err_errno(err, -EIO, LIST);
	}
	return r;
}

static int get(struct work_machine *w, int store_fd, const char *path, struct err *err)
{
	const struct agent_get what = {.depth = TREE_DEPTH_MAX, .content = true};
	struct told told = {.path = path};
	struct tree_receive to = {.rename = TREE,
		.max_bytes = WORK_PERSIST_MAX_BYTES,
		.readable = true,
		.done = problem,
		.ctx = &told};
	char key[KEY_CHARS + 1];
	CLEANUP_FD int new_fd = -1;
	struct agent_files files;
	struct stat st;
	bool have;
	int r = work_remove(store_fd, NEW);

	if (r == 0)
		r = new_fd = open_folder(store_fd, NEW);
	if (r < 0)
		return err_errno(err, r, "persist: %s", path);
	to.dir_fd = new_fd;
	r = open_files(w, &files, err);
	if (r < 0)
		return r;
	r = agent_get(&files, path, &what, &to, err);
	fd_close(&files.conn_fd);
	have = fstatat(new_fd, TREE, &st, AT_SYMLINK_NOFOLLOW) == 0;
	// The machine has no such thing: what others have left stays. What is not a file, a folder
	// or a link is not handed on, and has been told.
	if (!have && (r == 0 || (r == -EIO && told.gone)))
		return work_remove(store_fd, NEW) < 0 ? err_errno(err, -EIO, "persist") : 0;
	// What could not be copied has been told; for all else the machine stays.
	if (r < 0 && (r != -EIO || !have || !told.any || told.no_room))
		return err_wrap(err, r, "persist: %s", path);
	key_of(path, key);
	// On the disk before the machine goes, which has the only other one.
	if (syncfs(new_fd) < 0)
		return err_errno(err, -errno, "persist: %s", path);
	if (renameat2(store_fd, NEW, store_fd, key, RENAME_EXCHANGE) < 0 &&
		(errno != ENOENT || renameat(store_fd, NEW, store_fd, key) < 0))
		return err_errno(err, -errno, "persist: %s", path);
	if (fsync(store_fd) < 0)
		return err_errno(err, -errno, "persist: %s", path);
	(void)work_remove(store_fd, NEW); // else whoever comes next does
	return 0;
}

int work_persist_out(const char *name, int signal_fd, struct err *err)
{
	CLEANUP(work_machine_fini) struct work_machine w = WORK_MACHINE_NONE;
	char list[PATH_MAX], store[PATH_MAX];
	CLEANUP_FREE char *paths = NULL;
	CLEANUP_FD int store_fd = -1;
	size_t len = 0;
	int r = home_find(name, w.m.dir, err);

	w.signal_fd = signal_fd;
	if (r == 0)
		r = home_format(list, err, "%s/work/" LIST, w.m.dir);
	if (r == 0)
		r = fd_read_file(list, (size_t)WORK_INI_MAX * PATH_MAX, &paths, &len, NULL);
	if (r == -ENOENT || (r == 0 && len == 0))
		return 0;
	if (r == 0)
		r = work_target_of(w.m.dir, w.target, err);
	if (r == 0)
		r = running_find(name, &w.m, err);
	if (r == -ESRCH) {
		fprintf(stderr,
			"mayfly: %s does not run: what it has at the paths of persist is not "
			"handed on\n",
			name);
		return 0;
	}
	if (r == 0)
		r = store_fd = open_store(w.target, signal_fd, store, err);
	for (const char *path = paths; r >= 0 && path < paths + len; path += strlen(path) + 1)
		r = get(&w, store_fd, path, err);
	return MIN(r, 0);
}

int work_persist_gc(struct err *err)
{
	char home[PATH_MAX], target[PATH_MAX];
	const struct dirent *d;
	int r = home_persist(home, err), nr = 0;
	DIR *dir = r < 0 ? NULL : opendir(home);

	if (r < 0)
		return r;
	if (!dir)
		return err_errno(err, -errno, "%s", home);
	while (r == 0 && (d = readdir(dir))) {
		CLEANUP_FD int fd = openat(
			dirfd(dir), d->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		ssize_t n = fd < 0 ? -1 : readlinkat(fd, "folder", target, sizeof(target) - 1);

		if (n < 0 || d->d_name[0] == '.' || flock(fd, LOCK_EX | LOCK_NB) < 0)
			continue;
		target[n] = '\0';
		if (access(target, F_OK) == 0 || errno != ENOENT)
			continue;
		r = work_remove(dirfd(dir), d->d_name);
		nr++;
	}
	closedir(dir);
	return r < 0 ? err_errno(err, r, "%s", home) : nr;
}
