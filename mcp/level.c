// SPDX-License-Identifier: Apache-2.0
// The access level; see the header. Any thread.
#include "mcp/level.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "vmm/base/fd.h"

int level_read(const char *dir, enum config_access *ret, struct err *err)
{
	struct config config;
	char path[PATH_MAX];
	int r;

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	r = config_read(path, &config, err);
	if (r == 0)
		*ret = config.access;
	return r;
}

// --- Changes ---------------------------------------------------------------------------------

struct level_watch {
	int fd;
	pthread_mutex_t lock; // of the list
	struct level_watcher *watchers;
};

struct level_watch *level_watch_create(const char *dir, struct err *err)
{
	struct level_watch *w = calloc(1, sizeof(*w));

	if (!w) {
		err_errno(err, -ENOMEM, "%s", dir);
		return NULL;
	}
	pthread_mutex_init(&w->lock, NULL);
	w->fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (w->fd < 0 ||
		inotify_add_watch(w->fd, dir, IN_CLOSE_WRITE | IN_MOVED_TO | IN_DELETE) < 0) {
		err_errno(err, -errno,
			"%s: it cannot be watched (fs.inotify.max_user_instances may be too low)",
			dir);
		level_watch_destroy(w);
		return NULL;
	}
	return w;
}

void level_watch_destroy(struct level_watch *w)
{
	if (!w)
		return;
	ASSERT(!w->watchers);
	fd_close(&w->fd);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

void level_watch_join(struct level_watch *w, struct level_watcher *watcher)
{
	pthread_mutex_lock(&w->lock);
	watcher->next = w->watchers;
	w->watchers = watcher;
	pthread_mutex_unlock(&w->lock);
}

void level_watch_leave(struct level_watch *w, struct level_watcher *watcher)
{
	pthread_mutex_lock(&w->lock);
	for (struct level_watcher **at = &w->watchers; *at; at = &(*at)->next) {
		if (*at != watcher)
			continue;
		*at = watcher->next;
		break;
	}
	pthread_mutex_unlock(&w->lock);
}

int level_watch_fd(const struct level_watch *w)
{
	return w->fd;
}

void level_watch_take(struct level_watch *w)
{
	const uint64_t one = 1;
	char events[4096];
	bool any = false;

	while (read(w->fd, events, sizeof(events)) > 0)
		any = true;
	if (!any) // somebody else was faster
		return;
	pthread_mutex_lock(&w->lock);
	for (const struct level_watcher *at = w->watchers; at; at = at->next)
		(void)!write(at->fd, &one, sizeof(one));
	pthread_mutex_unlock(&w->lock);
}
