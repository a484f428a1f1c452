// SPDX-License-Identifier: Apache-2.0
// Changes a tree of this host as a plan says, all of it or none. One thread.
//
// In the tree's top is a folder of our own (WORK_STAGE_NAME) as long as it lasts:
//
//   tree/     what came out of the guest, as it came
//   diff/     of those who show it
//   new/N     what the N-th step puts into its place
//   old/N     what that had there before
//   journal   the steps; it comes to be by a rename, when all that is new is on the disk
//   over      the journal, once the tree is the old or the new one
//
// Each step moves one entry to old/N and one from new/N, so that where these are tells how far it
// came: with a journal the steps are taken back, the last one first; without one there is nothing
// but to clear away. Whoever is killed leaves the one or the other to the next work_recover().
#ifndef MAYFLY_WORK_KEEP_H
#define MAYFLY_WORK_KEEP_H

#include "work/compare.h"

struct work_stage {
	int home_fd, dir_fd; // owned; the folder that it is in, locked, and its own
	int tree_fd; // owned: to unpack in
};

// Opens one in the tree of home_fd, after work_recover(). -EBUSY if somebody else is at it.
int work_stage_open(struct work_stage *ret, int home_fd, struct err *err);

// Takes it away, unless it was left because of an error that a person must look at. Accepts a
// closed one.
void work_stage_close(struct work_stage *stage);

#define WORK_STAGE_NONE                                    \
	{                                                  \
		.home_fd = -1, .dir_fd = -1, .tree_fd = -1 \
	}

// Hashes what is in tree/ for those of trees->guest that must be, which is guest. If not all must
// be there: what is not stays without a hash.
int work_stage_hash(const struct work_stage *stage, const struct work_trees *trees,
	struct work_manifest *guest, bool all, struct err *err);

// Carries out a plan without conflicts on the tree that the stage is in. If it fails the tree is as
// it was, but for -EUCLEAN: then err says what is where.
int work_keep(struct work_stage *stage, const struct work_plan *plan, struct err *err);

enum { WORK_CLEAR, WORK_TAKEN_BACK, WORK_FINISHED };

// Ends what somebody who was killed has begun in the tree of home_fd. Returns one of these, the
// first if there was nothing to do; -EBUSY if it is not dead; -EUCLEAN as work_keep().
int work_recover(int home_fd, struct err *err);

// --- The journal -----------------------------------------------------------------------------

struct work_step {
	char kind; // m: the rights of a folder; r: an entry in the place of another
	const char *path;
	char old_type, new_type; // of r; 0: nothing
	uint32_t old_mode, new_mode; // of m
	uint64_t old_ino, new_ino; // of r
};

#define WORK_JOURNAL_MAX (512 * MIB)

// Reads a journal without its hash: its steps, the caller's, whose paths are in data. -EBADMSG.
int work_journal_parse(const uint8_t *data, size_t len, struct work_step **ret_steps,
	size_t *ret_nr, struct err *err);

#endif
