// SPDX-License-Identifier: Apache-2.0
// How deep an agent may reach into a machine: [mcp] access of its vm.ini, read anew for every call,
// so that a change is in force at once. Any thread.
#ifndef MAYFLY_MCP_LEVEL_H
#define MAYFLY_MCP_LEVEL_H

#include "vmm/config.h"

// The level of the machine in dir. A vm.ini that cannot be read grants nothing, and is a failure.
int level_read(const char *dir, enum config_access *ret, struct err *err);

// --- Changes ---------------------------------------------------------------------------------

// Tells all sessions of an endpoint when vm.ini may have changed. One inotify instance for them
// all: a user has 128, and there may be a session for each request.
struct level_watch;

// Somebody who wants to know: fd, an eventfd and the owner's, is readable after a change.
struct level_watcher {
	int fd;
	struct level_watcher *next;
};

struct level_watch *level_watch_create(const char *dir, struct err *err);
void level_watch_destroy(struct level_watch *watch);

void level_watch_join(struct level_watch *watch, struct level_watcher *watcher);
void level_watch_leave(struct level_watch *watch, struct level_watcher *watcher);

// Each of the watchers polls this fd as well; who finds it readable calls level_watch_take(), which
// tells everybody. So there is no thread for it.
int level_watch_fd(const struct level_watch *watch);
void level_watch_take(struct level_watch *watch);

#endif
