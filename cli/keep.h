// SPDX-License-Identifier: Apache-2.0
// Keeping what a machine has changed, for the verbs that do. One thread.
#ifndef MAYFLY_CLI_KEEP_H
#define MAYFLY_CLI_KEEP_H

#include "cli/work_machine.h"

struct keep {
	const char *verb; // for messages
	const char *const *paths; // NULL-terminated
	size_t nr_paths; // 0: everything
	uint64_t max_bytes; // of the disk
	const char *patch, *branch; // a file to write, or a branch to make, instead; NULL: neither
	bool json;
};

#define KEEP_MAX_BYTES (2 * GIB)

// Brings changes out and says what there was. Returns the exit status, or a negative errno.
int keep_changes(struct work_machine *w, const struct keep *keep, struct err *err);

#endif
