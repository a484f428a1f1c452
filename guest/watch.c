// SPDX-License-Identifier: Apache-2.0
// A watch over a tree: inotify, which knows single folders, over all of them. What the kernel could
// not queue is told as "lost"; so is a folder too many. Part of the agent's process for files; its
// only thread.
#include "guest/watch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest/proto/json.h"
#include "guest/proto/tree.h"
#include "vmm/base/fd.h"

#define FOLDERS_MAX 4096

#define EVENTS                                                                         \
	(IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | \
		IN_DELETE_SELF | IN_MOVE_SELF)

struct folder {
	int wd;
	char *path; // from the top, "" for the top
};

struct watch {
	int fd;
	char top[PATH_MAX]; // the folder that is watched; not kept open, or it would never be gone
	const char *only; // of a file: its name in there; NULL: all that is below
	bool (*say)(enum frame_type type, const void *payload, size_t len);
	bool deaf; // nobody listens any more
	bool gone; // the top is
	struct folder folders[FOLDERS_MAX];
	unsigned nfolders;

	// One that has left a folder: if it turns up elsewhere in the tree it has moved.
	char from[PATH_MAX];
	uint32_t from_cookie; // 0: none
	bool from_folder;
	char last[FRAME_CHANGE_MAX]; // what was told last
};

static void tell(
	struct watch *w, const char *change, const char *path, const char *from, bool folder)
{
	char text[FRAME_CHANGE_MAX] = "";
	struct json_out out = {.buf = text, .cap = sizeof(text) - 1};

	json_open(&out, '{');
	json_key(&out, "change");
	json_str(&out, change);
	json_key(&out, "path");
	json_str(&out, path);
	if (from) {
		json_key(&out, "from");
		json_str(&out, from);
	}
	json_key(&out, "folder");
	json_bool(&out, folder);
	json_close(&out, '}');
	if (out.full) {
		tell(w, "lost", "", NULL, false);
		return;
	}
	// A program that writes a file in small pieces changes it once.
	if (strcmp(text, w->last) == 0)
		return;
	memcpy(w->last, text, sizeof(text));
	if (!w->say(FRAME_CHANGE, text, out.len))
		w->deaf = true;
}

// The path of name in a folder. False: it is too long to be told.
static bool join(char ret[PATH_MAX], const char *folder, const char *name)
{
	return snprintf(ret, PATH_MAX, "%s%s%s", folder, folder[0] && name[0] ? "/" : "", name) <
	       PATH_MAX;
}

// Whether path is folder, or in it.
static bool is_below(const char *path, const char *folder)
{
	size_t len = strlen(folder);

	return len == 0 ||
	       (strncmp(path, folder, len) == 0 && (path[len] == '/' || path[len] == '\0'));
}

static void forget(struct watch *w, unsigned i)
{
	free(w->folders[i].path);
	w->folders[i] = w->folders[--w->nfolders];
}

static void forget_below(struct watch *w, const char *path)
{
	for (unsigned i = 0; i < w->nfolders;) {
		if (!is_below(w->folders[i].path, path)) {
			i++;
			continue;
		}
		inotify_rm_watch(w->fd, w->folders[i].wd);
		forget(w, i);
	}
}

// Returns whether the folder that moved is watched.
static bool rename_below(struct watch *w, const char *from, const char *to)
{
	bool known = false;

	for (unsigned i = 0; i < w->nfolders; i++) {
		char path[PATH_MAX], *own;

		if (!is_below(w->folders[i].path, from))
			continue;
		known |= strcmp(w->folders[i].path, from) == 0;
		own = snprintf(path, sizeof(path), "%s%s", to, w->folders[i].path + strlen(from)) <
				      (int)sizeof(path)
			      ? strdup(path)
			      : NULL;
		if (!own) {
			tell(w, "lost", "", NULL, false);
			continue;
		}
		free(w->folders[i].path);
		w->folders[i].path = own;
	}
	return known;
}

// Watches an open folder: it may move at any time, so its path is only its name.
static int add(struct watch *w, const char *path, int fd)
{
	char name[32], *own;
	int wd;

	if (w->nfolders == FOLDERS_MAX)
		return -ENOSPC;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	wd = inotify_add_watch(w->fd, name, EVENTS | IN_ONLYDIR | IN_EXCL_UNLINK);
	if (wd < 0)
		return -errno;
	for (unsigned i = 0; i < w->nfolders; i++)
		if (w->folders[i].wd == wd)
			return -EEXIST; // by its own event, a moment ago
	own = strdup(path);
	if (!own)
		return -ENOMEM;
	w->folders[w->nfolders++] = (struct folder){wd, own};
	return 0;
}

// Watches a folder, fd, and all that are in it. What is in a new one was made before we looked.
static int add_all(struct watch *w, const char *path, int fd, bool is_new, unsigned depth)
{
	char inner[PATH_MAX];
	const struct dirent *entry;
	DIR *dir;
	int rc = add(w, path, fd);

	dir = rc == 0 ? fdopendir(fd) : NULL;
	if (!dir) {
		rc = rc < 0 ? rc : -errno;
		fd_close(&fd);
		return rc;
	}
	while (!w->deaf && (entry = readdir(dir))) {
		struct stat st;
		int next;

		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (!join(inner, path, entry->d_name) ||
			fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		if (is_new)
			tell(w, "created", inner, NULL, S_ISDIR(st.st_mode));
		if (!S_ISDIR(st.st_mode))
			continue;
		next = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		rc = next < 0 ? -errno : depth > TREE_DEPTH_MAX ? fd_close(&next),
		-ELOOP : add_all(w, inner, next, is_new, depth + 1);
		// One that went again, or is known, is not missed.
		if (rc < 0 && rc != -ENOENT && rc != -ENOTDIR && rc != -EEXIST)
			tell(w, "lost", inner, NULL, true);
	}
	closedir(dir);
	return 0;
}

static void add_new(struct watch *w, const char *path)
{
	char full[PATH_MAX];
	int fd, rc = -ENAMETOOLONG;

	if (join(full, w->top, path)) {
		fd = open(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		rc = fd < 0 ? -errno : add_all(w, path, fd, true, 1);
	}
	if (rc < 0 && rc != -ENOENT && rc != -ENOTDIR && rc != -EEXIST)
		tell(w, "lost", path, NULL, true);
}

// What has left a folder and has not turned up.
static void settle(struct watch *w)
{
	if (!w->from_cookie)
		return;
	w->from_cookie = 0;
	if (w->from_folder)
		forget_below(w, w->from);
	tell(w, "deleted", w->from, NULL, w->from_folder);
}

static void on_name(struct watch *w, const struct inotify_event *e, const char *path)
{
	bool folder = (e->mask & IN_ISDIR) != 0;

	if (e->mask & IN_MOVED_FROM) {
		snprintf(w->from, sizeof(w->from), "%s", path);
		w->from_cookie = e->cookie;
		w->from_folder = folder;
	} else if (e->mask & IN_MOVED_TO && w->from_cookie == e->cookie && e->cookie) {
		bool known = folder && rename_below(w, w->from, path);

		w->from_cookie = 0;
		tell(w, "moved", path, w->from, folder);
		if (folder && !known) // it moved before we had looked into it
			add_new(w, path);
	} else if (e->mask & (IN_CREATE | IN_MOVED_TO)) {
		tell(w, "created", path, NULL, folder);
		if (folder)
			add_new(w, path);
	} else if (e->mask & IN_DELETE) {
		tell(w, "deleted", path, NULL, folder);
	} else if (e->mask & (IN_MODIFY | IN_ATTRIB)) {
		tell(w, e->mask & IN_MODIFY ? "modified" : "attributes", path, NULL, folder);
	}
}

static void on_event(struct watch *w, const struct inotify_event *e)
{
	char path[PATH_MAX];
	unsigned i;

	if (w->from_cookie && (!(e->mask & IN_MOVED_TO) || e->cookie != w->from_cookie))
		settle(w);
	if (e->mask & IN_Q_OVERFLOW) {
		tell(w, "lost", "", NULL, false);
		return;
	}
	for (i = 0; i < w->nfolders && w->folders[i].wd != e->wd; i++)
		;
	if (i == w->nfolders)
		return; // of one that we have left
	if (e->mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_IGNORED | IN_UNMOUNT)) {
		// Others are told of by the folder that they were in.
		if (w->folders[i].path[0] == '\0') {
			w->gone = true;
			tell(w, "deleted", "", NULL, true);
		} else if (e->mask & (IN_IGNORED | IN_UNMOUNT)) {
			forget(w, i);
		}
		return;
	}
	if (w->only) {
		if (e->len && strcmp(e->name, w->only) == 0)
			on_name(w, e, "");
		return;
	}
	if (join(path, w->folders[i].path, e->len ? e->name : ""))
		on_name(w, e, path);
}

// Opens the folder to watch; of a file, which may be replaced by another, the one that it is in.
static int open_top(struct watch *w, const char *path)
{
	const char *slash = strrchr(path, '/');
	struct stat st;
	int n, fd;

	if (stat(path, &st) < 0)
		return -errno;
	if (S_ISDIR(st.st_mode)) {
		n = snprintf(w->top, sizeof(w->top), "%s", path);
	} else {
		w->only = slash ? slash + 1 : path;
		n = snprintf(w->top, sizeof(w->top), "%.*s", slash ? (int)(slash - path) + 1 : 1,
			slash ? path : ".");
	}
	if (n >= (int)sizeof(w->top))
		return -ENAMETOOLONG;
	fd = open(w->top, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

int watch_path(const char *path, bool (*say)(enum frame_type type, const void *payload, size_t len))
{
	static struct watch w;
	static char buf[65536] __attribute__((aligned(__alignof__(struct inotify_event))));
	struct pollfd fds[2];
	int fd = open_top(&w, path), rc;

	if (fd < 0)
		return fd;
	w.say = say;
	w.fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (w.fd < 0)
		return -errno;
	if (w.only) {
		rc = add(&w, "", fd);
		fd_close(&fd);
	} else {
		rc = add_all(&w, "", fd, false, 0);
	}
	if (rc < 0)
		return rc;
	tell(&w, "watching", "", NULL, !w.only);
	while (!w.deaf && !w.gone) {
		ssize_t n = read(w.fd, buf, sizeof(buf));

		for (ssize_t off = 0; off < n && !w.deaf && !w.gone;) {
			const struct inotify_event *e = (const void *)(buf + off);

			on_event(&w, e);
			off += (ssize_t)(sizeof(*e) + e->len);
		}
		if (n > 0)
			continue;
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return -errno;
		settle(&w); // both halves of a move are queued at once
		w.last[0] = '\0';
		fds[0] = (struct pollfd){.fd = w.fd, .events = POLLIN};
		fds[1] = (struct pollfd){.fd = STDOUT_FILENO}; // who listened has gone
		if (!w.deaf && !w.gone && poll(fds, 2, -1) > 0 && fds[1].revents)
			w.deaf = true;
	}
	return w.deaf ? -EPIPE : 0;
}
