// SPDX-License-Identifier: Apache-2.0
// Starts one process the cheap way: the child borrows our memory until it has executed its program,
// so no page table is copied. The agent's only thread.
#ifndef MAYFLY_GUEST_SPAWN_H
#define MAYFLY_GUEST_SPAWN_H

#include <stdbool.h>
#include <sys/types.h>

#include "vmm/base/err.h"

#define SPAWN_GROUPS_MAX 64

struct spawn {
	const char *const *argv; // NULL-terminated, at least one
	const char *const *envp; // NULL-terminated
	const char *file; // to execute; NULL: what argv[0] names
	const char *path; // where argv[0] is looked for when it has no slash
	const char *cwd; // NULL: stay
	int fds[3]; // become 0, 1 and 2; any number above 2
	bool tty; // fds are a terminal, which becomes the controlling one
	bool set_user;
	uid_t uid;
	gid_t gid;
	gid_t groups[SPAWN_GROUPS_MAX];
	int ngroups;
	int cgroup_fd; // the process starts in there; -1: where we are
};

// Starts it as the leader of a session of its own, with all signals at their default and unblocked.
// Returns its pid once the program has been executed. On failure *ret_exit_code is what a shell
// would answer: 127 when there is no such command, 126 when it cannot be executed, 125 otherwise.
pid_t spawn(const struct spawn *s, int *ret_exit_code, struct err *err);

#endif
