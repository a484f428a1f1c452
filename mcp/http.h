// SPDX-License-Identifier: Apache-2.0
// A machine's MCP endpoint over HTTP (MCP's "Streamable HTTP", of both revisions), on the loopback
// or with TLS, for clients that bear its token. libmicrohttpd speaks HTTP: each connection has a
// thread of its own, which waits for what its session (mcp/http_sessions.h) has to say.
#ifndef MAYFLY_MCP_HTTP_H
#define MAYFLY_MCP_HTTP_H

#include "mcp/session.h"

#define HTTP_CONNECTIONS_MAX 96U
#define HTTP_PATH            "/mcp"
#define HTTP_IDLE_NS         (30ULL * 60 * 1000000000)
#define HTTP_RATE            200U

struct http_config {
	const struct mcp_session *how; // its in_fd, out_fd and sink are not used
	const char *address; // "PORT", "127.0.0.1:PORT", "[::1]:PORT", "localhost:PORT"
	struct http_tls *tls; // NULL: none; http_run() takes it over
	const char *token;
	uint64_t idle_ns; // after which a session of 2025-11-25 that nobody uses ends
	unsigned int rate; // requests a second, of all clients together; twice that at once
};

// Serves clients until how->stop_fd is readable. started() is called with the URL when they may
// come. -EINVAL for an address that is not of the loopback, without TLS.
int http_run(const struct http_config *config, void (*started)(void *opaque, const char *url),
	void *opaque, struct err *err);

#endif
