// SPDX-License-Identifier: Apache-2.0
// Looks at a tree of this host. No symbolic link is followed. One thread.
#ifndef MAYFLY_WORK_SCAN_H
#define MAYFLY_WORK_SCAN_H

#include "work/ignore.h"
#include "work/manifest.h"

struct work_scan {
	const struct work_ignore *ignore;
	// An earlier look at the same tree, or NULL: what nobody has touched since keeps its hash.
	const struct work_manifest *before;
	void (*progress)(void *ctx, size_t entries); // may be NULL
	// Told what cannot travel (sockets, devices) and is left out; may be NULL.
	void (*left_out)(void *ctx, const char *path);
	void *ctx;
};

// Looks at all that is in dir_fd, and hashes its files. -EAGAIN if one changes all the time.
int work_scan(const struct work_scan *how, int dir_fd, struct work_manifest *ret, struct err *err);

// The folder of a path in a tree, opened without following links, and its last name. The fd, the
// caller's.
int work_open_parent(int dir_fd, const char *path, const char **ret_name);

// Makes the folders that path is in, where they are not, in a tree of our own.
int work_make_parents(int dir_fd, const char *path);

// Copies a file at path in a tree to a new one, of that mode: to in to_dir. No link is followed.
int work_copy(int from_dir, const char *path, int to_dir, const char *to, uint32_t mode);

// Removes name and all that is in it; what is not there is no error. 0 or a negative errno.
int work_remove(int dir_fd, const char *name);

#endif
