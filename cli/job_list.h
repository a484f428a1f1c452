// SPDX-License-Identifier: Apache-2.0
// The jobs of a machine as its agent tells them: commands that outlive whoever started them. One
// thread.
#ifndef MAYFLY_CLI_JOB_LIST_H
#define MAYFLY_CLI_JOB_LIST_H

#include <jansson.h>

#include "cli/running.h"

// An array of objects as in docs/agent-protocol.md, each with a string "job"; all else in them is
// the guest's word. The caller's.
int job_list_get(const struct running *m, json_t **ret, struct err *err);

// The one of that name in the array, borrowed, or NULL.
json_t *job_list_find(const json_t *jobs, const char *name);

// A member of an object, 0 for what is missing or no number.
uint64_t job_number(const json_t *object, const char *key);

#endif
