// SPDX-License-Identifier: Apache-2.0
// What has become of a guest's tree, point by point, so that it can be taken back: in a folder of
// the machine's on this host, out of the guest's reach. One thread; processes take turns.
//
//   history/lock       held by whoever works here
//   history/wait       held by whoever waits for that to take a point; nobody else needs to
//   history/now        the tree as it was when the last point was taken: a manifest
//   history/seen       the last record of the audit log when that was begun; the last number of
//                      a point that there has been
//   history/00000001   a point: what had changed since the one before, as it was and as it became
//   history/objects/   contents of files, each under its SHA-256
//
// A point takes as much as has changed. The oldest make room: WORK_HISTORY_POINTS_MAX of them and
// WORK_HISTORY_BYTES_MAX of everything are kept. Contents that are too large, or that nobody has
// any more, are not: then the point says what has changed, and that cannot be taken back. A change
// that is too large for a point takes a number, and those before it with it.
#ifndef MAYFLY_WORK_HISTORY_H
#define MAYFLY_WORK_HISTORY_H

#include "work/keep.h"

#define WORK_HISTORY            "history"
#define WORK_HISTORY_POINTS_MAX 200U
#define WORK_HISTORY_BYTES_MAX  GIB
#define WORK_HISTORY_BY_MAX     16384U

struct work_delta {
	struct work_entry old, new; // of type 0: nothing was there
	uint32_t point; // that it is of
};

// In the order of their paths; the strings are in data.
struct work_point {
	uint32_t nr;
	int64_t time_ns; // since 1970
	const char *by; // a JSON array: who may have done it
	struct work_delta *deltas;
	size_t nr_deltas;
	uint8_t *data;
};

void work_point_fini(struct work_point *p);
const char *work_delta_path(const struct work_delta *d);
int work_point_parse(const uint8_t *data, size_t len, struct work_point *ret, struct err *err);

struct work_history {
	int dir_fd, objects_fd, lock_fd; // owned
	uint32_t first, last; // the points that there are; first > last: none
};

#define WORK_HISTORY_NONE                                     \
	{                                                     \
		.dir_fd = -1, .objects_fd = -1, .lock_fd = -1 \
	}

// Waits for its turn. wait_fd (-1: none) is closed when it has come. -ENOENT if there is none in
// state_fd.
int work_history_open(struct work_history *ret, int state_fd, int wait_fd, struct err *err);
void work_history_close(struct work_history *h);

// The place of whoever comes next: an fd, the caller's; -EAGAIN if somebody else has it.
int work_history_wait(int state_fd);

// Waits until nobody is at it, and keeps others away: an fd, the caller's; -ENOENT if there is
// none.
int work_history_settle(int state_fd);

// Before the host's files are replaced as the plan says: what they hold may be what was in the
// guest. What cannot be kept is not; nor is anything if somebody else is at it for longer than two
// seconds.
void work_history_save(int state_fd, int host_fd, const struct work_plan *plan);

// The tree at the last point; before the first one what came in.
int work_history_now(const struct work_history *h, const struct work_manifest *base,
	const struct work_manifest *before, struct work_manifest *ret, struct err *err);

struct work_take {
	const struct work_manifest *now; // of work_history_now()
	struct work_manifest *guest; // hashed where it is known, which is filled in
	const struct work_ignore *ignore;
	const struct work_stage *stage; // the files of it that have changed
	int host_fd; // where a content that has gone may still be
	uint64_t seq; // of the last record of the audit log before the guest was looked at
	// Who has worked since that of the take before: fills in a JSON array.
	int (*who)(void *ctx, uint64_t since, char ret[WORK_HISTORY_BY_MAX], struct err *err);
	void *ctx;
};

// Takes a point, if anything has changed: 1, else 0.
int work_history_take(struct work_history *h, const struct work_take *t, struct err *err);

int work_history_read(
	const struct work_history *h, uint32_t nr, struct work_point *ret, struct err *err);

struct work_back_step {
	const char *path;
	const struct work_entry *now, *to; // NULL: nothing
};

struct work_back {
	struct work_back_step *steps; // in the order of their paths
	size_t nr;
	struct work_point *points;
	size_t nr_points;
	const struct work_delta **all; // of each path that has changed since, the first
	size_t nr_all;
	const struct work_manifest *now;
};

// What leads from now, the tree at the last point, to how it was at the point nr (0: as it came
// in), at the paths, or everywhere. -ENOENT for no such point, -ENODATA if a content is not kept:
// one that it needs, or one that would be lost with it.
int work_history_back(const struct work_history *h, uint32_t nr, const struct work_manifest *now,
	const char *const *paths, size_t nr_paths, struct work_back *ret, struct err *err);
void work_back_fini(struct work_back *back);

// Lays out what there has to be, in an empty folder.
int work_back_lay_out(
	const struct work_history *h, const struct work_back *back, int dir_fd, struct err *err);

#endif
