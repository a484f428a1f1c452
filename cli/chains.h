// SPDX-License-Identifier: Apache-2.0
// Snapshots in the store with those that they build upon: verified, made to stand alone, cleared
// away. One thread.
#ifndef MAYFLY_CLI_CHAINS_H
#define MAYFLY_CLI_CHAINS_H

#include "cli/store.h"

struct memory_stats;

// Whether the snapshot can be opened, with all that it builds upon; with read_memory also whether
// all of that is as it was written.
int chains_check(const struct store_snapshot *snapshot, bool read_memory, struct err *err);

// Completes and syncs what a monitor has written live to dir_fd: its state gets the index of its
// memory.
int chains_index(int dir_fd, struct memory_stats *ret_stats, struct err *err);

// Gives the snapshot all that it has from those that it builds upon. It stays who it is, for those
// that build upon it; at any moment it is as it was or as it will be. One that stands alone is left
// as it is.
int chains_merge(const struct store_snapshot *snapshot, struct err *err);

// Removes the snapshots of a machine that have no tag, but for the latest so many. What stays and
// builds upon one that goes is merged first; what others need stays.
int chains_prune(const char *machine, unsigned int keep, struct err *err);

#endif
