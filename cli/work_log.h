// SPDX-License-Identifier: Apache-2.0
// The work on a folder in the machine's audit log (mcp/audit.h), beside what agents do there
// through MCP: all of it under one run id, that of the machine. One thread.
#ifndef MAYFLY_CLI_WORK_LOG_H
#define MAYFLY_CLI_WORK_LOG_H

#include "cli/work_machine.h"

// Gives the machine its run id.
int work_log_start(const struct work_machine *w, struct err *err);

struct work_log {
	const struct work_machine *w;
	const char *tool;
	uint64_t start_ns;
};

// Before a command is run or changes are kept: what cannot be written down is not done. words is
// NULL-terminated.
int work_log_call(struct work_log *ret, const struct work_machine *w, const char *tool,
	const char *const *words, struct err *err);

// How it ended: a command's status, or -1; what was kept, or NULL.
void work_log_result(const struct work_log *log, int rc, const struct err *err, int status,
	const struct work_plan *kept);

#endif
