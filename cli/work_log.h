// SPDX-License-Identifier: Apache-2.0
// The work on a folder in the machine's audit log (mcp/audit.h), beside what agents do there
// through MCP: all of it under one run id, that of the machine. One thread.
#ifndef MAYFLY_CLI_WORK_LOG_H
#define MAYFLY_CLI_WORK_LOG_H

#include "cli/work_machine.h"

// Gives the machine its run id.
int work_log_start(const struct work_machine *w, struct err *err);

struct work_log {
	const char *dir; // of the machine; the caller's
	const char *tool;
	uint64_t start_ns;
};

// Before a command is run or changes are kept: what cannot be written down is not done. words is
// NULL-terminated.
int work_log_call(struct work_log *ret, const char *dir, const char *tool, const char *const *words,
	struct err *err);

// How it ended: a command's status, or -1; what was kept, or NULL.
void work_log_result(const struct work_log *log, int rc, const struct err *err, int status,
	const struct work_plan *kept);

// A point of the history: what has changed.
struct work_point;
void work_log_point(const char *dir, const struct work_point *p);

// Who may have changed files since the record seq: a JSON array of calls, the newest of them, each
// with its tool, session, call, client and what it was.
int work_log_who(const char *dir, uint64_t seq, char *ret, size_t size, struct err *err);

// The number of the last record; 0: none.
uint64_t work_log_last(const char *dir);

#endif
