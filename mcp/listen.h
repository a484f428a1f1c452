// SPDX-License-Identifier: Apache-2.0
// A machine's MCP endpoint on a Unix socket: each connection is a session (mcp/session.h) in a
// thread of its own. The caller's thread accepts.
#ifndef MAYFLY_MCP_LISTEN_H
#define MAYFLY_MCP_LISTEN_H

#include "mcp/session.h"

#define LISTEN_SOCKET       "mcp.sock" // in the machine's run folder, mode 0600
#define LISTEN_SESSIONS_MAX 8U // at a time; who comes then is hung up on

// Serves clients until how->stop_fd is readable; its in_fd and out_fd are not used. -EADDRINUSE if
// another process does so already. started() (may be NULL) is called when they may come.
int mcp_listen_run(const struct mcp_session *how, void (*started)(void *opaque), void *opaque,
	struct err *err);

#endif
