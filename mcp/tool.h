// SPDX-License-Identifier: Apache-2.0
// What an agent may do with a machine: the tools, and a call of one. Each call has a thread of its
// own; the tables are constant.
#ifndef MAYFLY_MCP_TOOL_H
#define MAYFLY_MCP_TOOL_H

#include <jansson.h>
#include <limits.h>
#include <stdatomic.h>

#include "cli/agent_files.h"
#include "mcp/approvals.h"
#include "vmm/base/buf.h"
#include "vmm/config.h"

struct outputs;

// The one machine that an endpoint is for.
struct mcp_machine {
	char name[64];
	char dir[PATH_MAX], run_dir[PATH_MAX];
	const char *vsock; // the socket in run_dir that leads to the guest
	const char *program; // mayfly itself, for its other verbs
	char approvals_dir[PATH_MAX]; // of all machines: see approvals.h
};

struct tool_call {
	const struct mcp_machine *machine;
	struct outputs *outputs;
	const char *client; // who calls, as it calls itself
	const json_t *arguments; // an object that the tool's schema describes
	int cancel_fd; // readable when nobody wants the result any more
	atomic_uint_fast64_t moved_bytes; // so far, for progress

	json_t *result; // owned: what its output schema describes
	bool asked_owner; // who has not decided yet
	int exit_code; // of a command, for the audit; -1: there was none
};

struct tool {
	const char *name, *title, *description;
	const char *input, *output; // JSON Schema
	// Sets call->result, or fails with a sentence that tells the model what to do next.
	int (*run)(struct tool_call *call, struct err *err);
	enum config_access level; // from which on it exists
	bool read_only, destructive, idempotent; // hints for the client
	bool is_method; // of MCP, and no tool: its result is the whole, its failure an error
	const char *changes; // files, for the audit: "Dfrom Ato", letters of git and arguments
};

// The tables, in the order in which they are listed.
extern const struct tool exec_tools[], pty_tools[], file_tools[], service_tools[], machine_tools[],
	owner_tools[];
extern const size_t nr_exec_tools, nr_pty_tools, nr_file_tools, nr_service_tools, nr_machine_tools,
	nr_owner_tools;

size_t tools_nr(void);
const struct tool *tools_at(size_t i);

// The one of that name which the level grants, or NULL; *ret_input (may be NULL) is its schema.
const struct tool *tools_find(const char *name, enum config_access level, const json_t **ret_input);

// What tools/list tells at that level: a fresh array.
json_t *tools_list(enum config_access level);

// --- For the tools ---------------------------------------------------------------------------

// Arguments, checked already; the fallback where one was not given.
const char *arg_text(const struct tool_call *call, const char *key, const char *fallback);
bool arg_flag(const struct tool_call *call, const char *key, bool fallback);
uint64_t arg_number(const struct tool_call *call, const char *key, uint64_t fallback);

// The path of that argument, which has to be a whole one. -EINVAL.
int arg_path(const struct tool_call *call, const char *key, const char **ret, struct err *err);

// A fresh connection to the agent, the caller's. -ESRCH with what to do when the machine is down.
int call_connect(const struct tool_call *call, struct err *err);

// The same for files; files->conn_fd is the caller's.
int call_files(const struct tool_call *call, struct agent_files *ret, struct err *err);

// Runs a program of the guest that only answers a question. Its output, at most max_bytes of it
// (*ret_cut: there was more), is appended to out. Returns its exit code, or a negative errno.
int call_ask(struct tool_call *call, const char *const *argv, size_t max_bytes, struct buf *out,
	bool *ret_cut, struct err *err);

// Runs mayfly VERB… on the host; what it printed, at most 1 MiB, is appended to out. A failure of
// it is -EIO with its own words. With no_cancel it is waited for whatever happens.
int call_own(struct tool_call *call, const char *const *argv, bool no_cancel, struct buf *out,
	struct err *err);

// Asks the owner, until it is decided or for wait_seconds, an argument of the call: what is still
// pending then is an answer, too.
int call_ask_owner(struct tool_call *call, const char *action, const json_t *arguments,
	char ret_id[APPROVAL_ID_BYTES], enum approval_state *ret, struct err *err);

// A call is over that may have changed files: in a machine that works on a folder of the host that
// becomes a point of its history.
void call_take_point(struct tool_call *call);

// Deadline for what takes an agent no time.
#define CALL_ANSWER_NS 60000000000ULL

#endif
