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
// Of what command_run() returns, and of its arguments.
#define COMMAND_ENCODING "{\"type\":\"string\",\"enum\":[\"utf-8\",\"base64\"]}"
#define COMMAND_COUNT "{\"type\":\"integer\",\"minimum\":0}"

#define COMMAND_RESULT \
	"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" \
	"\"exit_code\":{\"type\":\"integer\",\"description\":\"128 + signal if a signal ended it\"}," \
	"\"signal\":" COMMAND_COUNT "," \
	"\"timed_out\":{\"type\":\"boolean\"},\"over_limit\":{\"type\":\"boolean\"}," \
	"\"duration_ms\":" COMMAND_COUNT "," \
	"\"stdout\":{\"type\":\"string\"},\"stdout_encoding\":" COMMAND_ENCODING ",\"stdout_bytes\":" COMMAND_COUNT "," \
	"\"stderr\":{\"type\":\"string\"},\"stderr_encoding\":" COMMAND_ENCODING ",\"stderr_bytes\":" COMMAND_COUNT "," \
	"\"truncated\":{\"type\":\"boolean\",\"description\":\"there was more: see output\"}," \
	"\"output\":{\"type\":\"string\",\"description\":\"handle for job_output, which has the first 4 MiB of each stream; kept until 64 newer ones or the session's end\"}," \
	"\"denied\":{\"type\":\"array\",\"description\":\"what the machine may not reach, and was asked for since the command before: see set_network\",\"items\":" \
		"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"host\":{\"type\":\"string\"},\"port\":" COMMAND_COUNT "," \
		"\"reason\":{\"type\":\"string\"},\"times\":" COMMAND_COUNT "},\"required\":[\"host\",\"port\",\"reason\",\"times\"]}}}," \
	"\"required\":[\"exit_code\",\"signal\",\"timed_out\",\"over_limit\",\"duration_ms\",\"stdout\",\"stdout_encoding\",\"stdout_bytes\",\"stderr\",\"stderr_encoding\",\"stderr_bytes\",\"truncated\"]}"

#define MAX_OUTPUT_PROPERTY \
	"\"max_output_bytes\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":262144,\"default\":32768," \
		"\"description\":\"how much of each stream the result may hold; the rest can be read with job_output\"}"
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

// Runs it and sets call->result as COMMAND_RESULT describes it: a command that fails is data.
int command_run(struct tool_call *call, const struct agent_exec *x, struct err *err);

#endif
