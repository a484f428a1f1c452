// SPDX-License-Identifier: Apache-2.0
// A terminal of a machine to come back to: a job that terminals look at. One thread.
#ifndef MAYFLY_CLI_SESSION_H
#define MAYFLY_CLI_SESSION_H

#include "cli/exec_options.h"
#include "cli/running.h"

// Starts cmd as the session of that name unless there is one; shows what it has shown before and
// then, with this terminal, what it shows and types into it, until it ends or the person leaves.
// Returns the exit status for this process (0 when it was left), or a negative errno.
int session_main(const struct running *m, const struct exec_command *cmd, const char *session,
	struct err *err);

#endif
