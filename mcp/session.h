// SPDX-License-Identifier: Apache-2.0
// One client of a machine's MCP endpoint, over a pair of streams: revisions 2026-07-28 (stateless)
// and 2025-11-25 and before (initialize), which each request tells apart.
//
// The thread that runs a session reads; each call of a tool has a thread and a connection to the
// agent of its own, so that none waits for another, and an eventfd that ends it.
#ifndef MAYFLY_MCP_SESSION_H
#define MAYFLY_MCP_SESSION_H

#include "mcp/rpc.h"
#include "mcp/tool.h"

#define SESSION_CALLS_MAX 32 // at a time

#define MCP_MODERN_VERSION "2026-07-28"
#define MCP_META_PREFIX    "io.modelcontextprotocol/"

// The versions that are spoken, the newest first: a fresh array.
json_t *mcp_session_versions(void);

struct mcp_session {
	const struct mcp_machine *machine;
	struct outputs *outputs;
	struct level_watch *watch; // of the machine's folder
	enum config_access ceiling; // whatever vm.ini says, no more than that
	const char *transport; // for the audit
	int in_fd, out_fd; // the caller's
	rpc_sink sink; // takes what would go to out_fd; NULL: none
	void *sink_opaque;
	int stop_fd; // ends the session as soon as it is readable; -1: none
};

// Serves the client until it leaves. 0, or why it had to be left: it did not read, or there was no
// memory. What the client's calls had started is ended by then, but for jobs.
int mcp_session_run(const struct mcp_session *config, struct err *err);

#endif
