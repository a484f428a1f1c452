// SPDX-License-Identifier: Apache-2.0
// The monitor as its parent sees it: start it, hear from it, end it. One thread.
#ifndef MAYFLY_CLI_MONITOR_PROC_H
#define MAYFLY_CLI_MONITOR_PROC_H

#include <sys/types.h>

#include "vmm/base/err.h"

struct monitor_proc {
	pid_t pid; // 0 when there is none, or it is not our child
	bool adopted; // another process started it: pid_fd alone is known
	int pid_fd; // readable when it has ended
	int status_fd; // non-blocking; its reports
	char line[4096];
	size_t line_len;
	bool running; // it said so
	bool told_where; // it said so, after SIGUSR1
	bool failed; // it said so: err holds what
	struct err err;
	char *ended; // its last report as JSON text, or NULL; owned
};

// Starts `mayfly vmm DIR` from this program's own file. snapshot: the folder of one to go on from,
// or NULL; memory_way: how, or NULL. tied: it dies with this process, and logs
// to our stderr; else it is a session of its own and logs to DIR/monitor.log. console_fd (-1 for
// none) gets what the guest prints. The caller keeps and closes console_fd.
int monitor_proc_start(struct monitor_proc *proc, const char *dir, const char *snapshot,
	const char *memory_way, bool tied, int console_fd, struct err *err);

// To be called when status_fd is readable: takes what there is. Returns 1 when the monitor has
// closed its end, 0 otherwise.
int monitor_proc_hear(struct monitor_proc *proc);

// Goes on with one that another process has started, by a pidfd, which is taken over. It reports
// nothing.
void monitor_proc_adopt(struct monitor_proc *proc, int pid_fd);

// Asks the monitor to end (SIGTERM; SIGKILL after a second), waits for it and hears it out.
// Returns its exit status, or 128+n if signal n ended it; of an adopted one 0. Accepts one that has
// ended or was never started (0).
int monitor_proc_end(struct monitor_proc *proc);

// Leaves it running and forgets it.
void monitor_proc_let_go(struct monitor_proc *proc);

#endif
