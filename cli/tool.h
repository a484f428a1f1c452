// SPDX-License-Identifier: Apache-2.0
// Programs of the host that do what others do well: run to their end, with what they complained
// about as the error. One thread.
#ifndef MAYFLY_CLI_TOOL_H
#define MAYFLY_CLI_TOOL_H

#include "vmm/base/err.h"

struct tool {
	const char *const *argv; // NULL-terminated; argv[0] is looked for in PATH
	const char *package; // of Debian, that has it: for the cure
	int stdin_fd, stdout_fd; // borrowed; -1: /dev/null
	int signal_fd; // a signalfd of blocked signals that end it, or -1; they stay unread
	// Called a few times a second while it runs. May be NULL.
	void (*progress)(void *opaque);
	void *opaque;
};

// Returns 0 if it succeeded; -ENOENT if there is no such program; -EINTR after a signal; -EIO with
// its last words.
int tool_run(const struct tool *tool, struct err *err);

#endif
