// SPDX-License-Identifier: Apache-2.0
// One task of mayfly eval: a machine of its own, from set-up to the verifier's word. A process of
// its own, one thread.
#ifndef MAYFLY_CLI_EVAL_RUN_H
#define MAYFLY_CLI_EVAL_RUN_H

#include "cli/eval_task.h"

// Whether its image or pool is there.
int eval_check(const struct eval_task *task, struct err *err);

#define EVAL_RESULT_FILE "result.json" // in the task's folder

// Runs the task and leaves what it did in dir, a new folder: logs, artifacts, and its result, an
// object as docs/pools-and-evals.md has it, last and at once. Returns 0, or 1 if a signal came and
// there is no result. The process's signals are taken.
int eval_run(const struct eval_task *task, const char *folder, const char *dir);

#endif
