// SPDX-License-Identifier: Apache-2.0
// What agents have asked the owner for: a file a request, in one folder for all machines that no
// machine's monitor can reach. A request is bound to the machine (its folder, not just its name),
// the action and its exact arguments. It is denied unless it is allowed in time, and what was
// allowed holds once. Several processes may ask and decide at a time. Any thread.
//
// Whoever asks cannot decide: approvals_decide() is the owner's command alone.
#ifndef MAYFLY_MCP_APPROVALS_H
#define MAYFLY_MCP_APPROVALS_H

#include <jansson.h>
#include <limits.h>

#include "vmm/base/err.h"

#define APPROVALS_MAX         16U // of a machine
#define APPROVAL_ID_BYTES     17 // hexadecimal, with its NUL
#define APPROVAL_PUBLISH_PORT "publish_port" // arguments: port, host_port
#define APPROVAL_RESTORE      "restore" // arguments: tag
#define APPROVAL_NETWORK      "set_network" // arguments: reach
#define APPROVAL_UPLOAD       "upload" // arguments: from, to, inode

#define APPROVAL_S 600 // how long a request waits, and a decision holds

struct approvals {
	const char *dir; // of all machines' requests; made by the caller
	const char *machine, *machine_dir;
};

enum approval_state { APPROVAL_PENDING, APPROVAL_ALLOWED, APPROVAL_DENIED };

const char *approval_state_name(enum approval_state state);

// Makes the request, or tells what has become of it. One that was allowed is used up with that: the
// next time it is a new one. -EBUSY if too many wait.
int approvals_ask(const struct approvals *a, const char *action, const json_t *arguments,
	char ret_id[APPROVAL_ID_BYTES], enum approval_state *ret, struct err *err);

// What the machine has asked for and is not over, the oldest first: a fresh array of objects with
// id, action, arguments, state, created_s and expires_s.
int approvals_list(const struct approvals *a, json_t **ret, struct err *err);

// The owner's word on a request that is pending, which is told, fresh. -ESRCH if there is none.
// record writes it down before it counts: what cannot be written down is not decided. May be NULL.
int approvals_decide(const struct approvals *a, const char *id, bool allow,
	int (*record)(const struct approvals *a, const json_t *request, struct err *err),
	json_t **ret, struct err *err);

#endif
