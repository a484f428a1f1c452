// SPDX-License-Identifier: Apache-2.0
// The snapshots of this user: $MAYFLY_HOME/snapshots/ID/, each with the files of the monitor
// (snapshot/), the machine's vm.ini, and manifest.json, which says whose it is. What is being
// written has another name until it is whole. One thread.
//
// A snapshot with a parent needs it, and lies beside it: whatever has a child is not removed.
#ifndef MAYFLY_CLI_STORE_H
#define MAYFLY_CLI_STORE_H

#include <limits.h>

#include "snapshot/image.h"
#include "vmm/base/err.h"

struct config;

#define STORE_TAG_MAX 63

struct store_snapshot {
	char dir[PATH_MAX];
	char id[SNAPSHOT_ID_TEXT_LEN + 1];
	char parent[SNAPSHOT_ID_TEXT_LEN + 1]; // "": none
	char machine[64]; // that it is of
	char tag[STORE_TAG_MAX + 1]; // "": none
	int64_t created_s; // since 1970
	uint64_t memory_bytes, held_bytes, written_bytes;
	uint64_t blackout_ns;
};

// Letters, digits, '.', '_' and '-', not at the start. -EINVAL with what is wrong.
int store_check_tag(const char *tag, struct err *err);

// --- Writing ---------------------------------------------------------------------------------

struct store_writer {
	char store[PATH_MAX], dir[PATH_MAX]; // of the store, and of what is being written
	char id[SNAPSHOT_ID_TEXT_LEN + 1];
	int dir_fd; // owned
};

// -EEXIST if the machine has one of that tag: what store_commit() would find out at the end.
int store_check_free(const char *machine, const char *tag, struct err *err);

// Makes a folder for a new snapshot, under a fresh id. What commands that died have left is taken
// away.
int store_begin(struct store_writer *ret_writer, struct err *err);

// Adds the manifest and vm.ini, syncs and gives it its name. info->dir, id are filled in.
// -EEXIST if the machine has one of that tag already.
int store_commit(struct store_writer *writer, struct store_snapshot *info,
	const struct config *config, struct err *err);

// Puts what was written in the place of the snapshot info->id, in one step: its files, and info as
// its manifest. -ENOENT if that is gone.
int store_replace(struct store_writer *writer, const struct store_snapshot *info, struct err *err);

// Takes it away, unless it was committed. Accepts a zeroed writer.
void store_end(struct store_writer *writer);

// Takes away what commands that died have left. Returns how many folders, or a negative errno.
int store_sweep(struct err *err);

// --- Reading ---------------------------------------------------------------------------------

// name: MACHINE@TAG, MACHINE@ (its latest), an id or at least 6 digits of one. -ENOENT, or -EINVAL
// if several begin so.
int store_find(const char *name, struct store_snapshot *ret, struct err *err);

// Calls each() for every snapshot, the oldest first; what is damaged is reported by broken() (may
// be NULL) and left out. Ends early with what each() returns below 0.
int store_each(int (*each)(void *opaque, const struct store_snapshot *snapshot),
	void (*broken)(void *opaque, const char *dir, const struct err *err), void *opaque,
	struct err *err);

// Removes the snapshots of a machine that is going away, but for those that others need.
int store_forget(const char *machine, struct err *err);

// -EBUSY if another has it as its parent.
int store_remove(const struct store_snapshot *snapshot, struct err *err);

// The same, but one that is a parent stays, without its tag.
int store_release(const struct store_snapshot *snapshot, struct err *err);

#endif
