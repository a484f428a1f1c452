// SPDX-License-Identifier: Apache-2.0
// Changes as a patch and as a branch, by git on this host: with nothing of the guest's as its
// configuration, and without hooks. One thread.
#ifndef MAYFLY_CLI_WORK_PATCH_H
#define MAYFLY_CLI_WORK_PATCH_H

#include "cli/work_machine.h"

// Takes the changes out of the look's stage (which cannot be kept afterwards) and writes them to
// patch_fd as git does, for `git apply`. What is below a .git is left out.
int work_patch(const struct work_machine *w, struct work_look *look, int patch_fd, struct err *err);

// A new branch of the folder's repository, one commit beyond its HEAD; the working tree stays as it
// is. -EEXIST.
int work_branch(
	const struct work_machine *w, struct work_look *look, const char *branch, struct err *err);

#endif
