// SPDX-License-Identifier: Apache-2.0
// What a guest has changed in a tree, beside what has changed on the host meanwhile: a plan that
// can be shown, judged and carried out (keep.h). Nothing in it is trusted to be harmless because
// the guest says so. Any thread.
#ifndef MAYFLY_WORK_COMPARE_H
#define MAYFLY_WORK_COMPARE_H

#include "work/ignore.h"
#include "work/manifest.h"

enum work_kind {
	WORK_ADDED,
	WORK_CHANGED, // content, type, or rights
	WORK_DELETED,
};

// What a person should look at.
enum {
	WORK_NOTE_EXEC = 1, // can be executed, and could not before
	WORK_NOTE_LOCK = 2, // decides what is downloaded
	WORK_NOTE_CI = 4, // runs on the machines of a CI service
	WORK_NOTE_TOOL = 8, // runs by itself on a developer's machine: editors, direnv, hooks
	WORK_NOTE_CASE = 16, // differs from another name by case alone
	WORK_NOTE_GIT = 32, // git on the host would run what it says: withheld unless it is named
};

struct work_change {
	const char *path;
	enum work_kind kind;
	const struct work_entry *host, *guest; // NULL: not there
	const char *from; // where this content was before and is no more; else NULL
	bool moved; // of a path that has gone: to another's, whose from it is
	unsigned int notes;
	bool withheld; // is not kept with the rest
	const char *conflict; // why it cannot be kept; NULL: it can
};

// In the order of their paths.
struct work_plan {
	struct work_change *changes;
	size_t nr, cap;
	size_t conflicts, withheld;
	const struct work_manifest *host; // that the changes are to
};

void work_plan_fini(struct work_plan *plan);
#define CLEANUP_PLAN CLEANUP(work_plan_fini)

struct work_trees {
	const struct work_manifest *base; // of the host's tree when it went in
	const struct work_manifest *before; // of the guest's then
	const struct work_manifest *host, *guest; // as they are now
	const struct work_ignore *ignore;
};

// Whether the file in guest must be hashed (from its content, not by its word) before
// work_compare(): it is not what came in.
bool work_must_hash(const struct work_trees *trees, const struct work_entry *guest);

// The manifests must outlive the plan.
int work_compare(const struct work_trees *trees, struct work_plan *ret, struct err *err);

// Leaves in the plan what is at or below one of the paths, which thereby are named, and the folders
// that these need. -ENOENT if nothing has changed at one of them.
int work_plan_only(struct work_plan *plan, const char *const *paths, size_t nr, struct err *err);

// Takes what is withheld out, and judges the rest as a whole: conflicts are counted anew.
int work_plan_settle(struct work_plan *plan, struct err *err);

// The same without taking anything out, to be shown.
int work_plan_judge(struct work_plan *plan, struct err *err);

// What old knew, with what the plan has kept as it is in guest, which is what the plan is of: for
// the next comparison. of_guest: old is of the guest's tree, and not of the host's.
int work_rebase(const struct work_manifest *old, const struct work_plan *plan,
	const struct work_manifest *guest, bool of_guest, struct work_manifest *ret,
	struct err *err);

// Those of a path's own.
unsigned int work_notes_of(const char *path);

#endif
