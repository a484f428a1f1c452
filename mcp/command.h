// SPDX-License-Identifier: Apache-2.0
// The command that a tool's arguments describe: argv, cwd, env, user, stdin. A thread a call.
#ifndef MAYFLY_MCP_COMMAND_H
#define MAYFLY_MCP_COMMAND_H

#include "cli/agent_client.h"
#include "mcp/tool.h"

// Their schema, but for stdin.
// clang-format off
#define COMMAND_PROPERTIES \
	"\"argv\":{\"type\":\"array\",\"items\":{\"type\":\"string\"},\"minItems\":1,\"maxItems\":4096," \
		"\"description\":\"program and arguments; no shell: for pipes, $VAR or && use [\\\"sh\\\",\\\"-c\\\",\\\"...\\\"]\"}," \
	"\"cwd\":{\"type\":\"string\",\"description\":\"working folder, a whole path (default /)\"}," \
	"\"env\":{\"type\":\"object\",\"additionalProperties\":{\"type\":\"string\"},\"maxProperties\":256," \
		"\"description\":\"variables to set, besides PATH, HOME and the like\"}," \
	"\"user\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":128,\"description\":\"user or uid[:gid] (default root)\"}"
// clang-format on

struct command {
	const char **argv; // owned
	char **env; // owned, with what is in it
	int in_fd; // owned; -1 at first
};

// Fills in command, which has to be finished in any case, and *ret, which points into it and into
// the arguments.
int command_of(
	const struct tool_call *call, struct command *c, struct agent_exec *ret, struct err *err);
void command_fini(struct command *c);

#endif
