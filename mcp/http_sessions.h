// SPDX-License-Identifier: Apache-2.0
// Sessions (mcp/session.h) whose messages come and go over HTTP, and exchanges: a request, or a
// stream, and the messages that are to be sent for it. A session has a thread of its own; exchanges
// belong to the threads of their connections.
//
// Of 2025-11-25 a session is listed: it has an id that the client gives with each request, and ends
// when the client says so or has not been there for long. Of 2026-07-28 each request is a session
// of its own, which ends with its connection, and all that it had started with it.
#ifndef MAYFLY_MCP_HTTP_SESSIONS_H
#define MAYFLY_MCP_HTTP_SESSIONS_H

#include "mcp/session.h"

#define HTTP_SESSIONS_MAX     32U // that are listed
#define HTTP_SESSION_ID_BYTES 33

struct http_sessions;
struct http_session;
struct http_exchange;

// how is borrowed: its machine, outputs, ceiling, transport and stop_fd are those of each session.
// NULL if there is no memory.
struct http_sessions *http_sessions_create(const struct mcp_session *how, uint64_t idle_ns);

// Ends those that are listed. Nobody may have a reference any more.
void http_sessions_destroy(struct http_sessions *all);

// Ends those that nobody has used for idle_ns.
void http_sessions_expire(struct http_sessions *all);

// A new one, with a reference that is the caller's. -EBUSY if there are too many.
int http_session_open(
	struct http_sessions *all, bool listed, struct http_session **ret, struct err *err);

// A reference to the listed one of that id, or NULL.
struct http_session *http_session_find(struct http_sessions *all, const char *id);

// Ends it: it is not found any more, what its calls had started is ended, its exchanges are over.
void http_session_close(struct http_session *session);

// Gives a reference back. The last one waits for the session's end.
void http_session_put(struct http_session *session);

const char *http_session_id(const struct http_session *session);

// A message of the client's, without a newline. -EPIPE when the session has ended.
int http_session_say(struct http_session *session, const char *line, size_t len, struct err *err);

// --- Exchanges -------------------------------------------------------------------------------

struct http_line {
	char *text; // ends in a newline; the taker's
	size_t len;
	bool answer; // to the request: the last
	int code; // of an error; 0: a result
};

// For a request, which is said afterwards; or with NULL for the stream of what belongs to none.
// Keeps a reference to the session of its own. -EEXIST if there is one already.
int http_exchange_begin(struct http_session *session, const struct rpc_message *request,
	struct http_exchange **ret, struct err *err);

// Accepts NULL.
void http_exchange_end(struct http_exchange *x);

// Readable when http_exchange_take() has something to tell.
int http_exchange_fd(const struct http_exchange *x);

// 1 with a line; 0 if there is none yet; -EPIPE if none will come any more.
int http_exchange_take(struct http_exchange *x, struct http_line *ret);

#endif
