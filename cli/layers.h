// SPDX-License-Identifier: Apache-2.0
// The disks of snapshots. A snapshot's folder has the frozen layers of its machine's disks
// (devices/overlay.h) as hard links in layers/, and its state says on which one each disk goes on:
// no data is copied, and each folder can be removed without asking the others. One thread.
#ifndef MAYFLY_CLI_LAYERS_H
#define MAYFLY_CLI_LAYERS_H

#include <stdbool.h>

#include "vmm/base/err.h"

// Gives the snapshot in snapshot_fd, which has just been written, the layers of the machine in
// machine_dir that it stands on.
int layers_keep(int snapshot_fd, const char *machine_dir, struct err *err);

// Syncs them.
int layers_sync(int snapshot_fd, struct err *err);

// Gives the machine in machine_dir, which does not run, the disks of a snapshot. What it had is
// kept until layers_settle() or layers_undo(). throwaway: nothing is synced.
int layers_give(const char *snapshot_dir, const char *machine_dir, bool throwaway, struct err *err);

// The machine has started with its new disks: what it had before goes.
void layers_settle(const char *snapshot_dir, const char *machine_dir);

// It has not: its old disks are back.
void layers_undo(const char *machine_dir);

// Makes one of the frozen layers of each disk that nobody has but the machine, which does not run
// and is locked (life_lock()), if they are at least so many (2 or more). Returns how many are
// fewer.
int layers_merge(const char *machine_dir, unsigned int at_least, struct err *err);

// Takes all that the machine's overlays hold away, so that it begins with its bases.
int layers_clear(const char *machine_dir, struct err *err);

#endif
