// SPDX-License-Identifier: Apache-2.0
// A client of an MCP session that runs in a thread of this test, and the machine that it is for:
// the fake guest, a vm.ini, and a script in the place of mayfly itself. One thread.
#ifndef MAYFLY_TESTS_MCP_CLIENT_H
#define MAYFLY_TESTS_MCP_CLIENT_H

#include <jansson.h>
#include <pthread.h>

#include "mcp/outputs.h"
#include "mcp/session.h"

struct mcp_client {
	struct mcp_machine machine;
	struct mcp_session session;
	pthread_t thread;
	int fd; // ours
	int session_fd;
	json_int_t next_id;
	bool modern; // requests say that they are of 2026-07-28
	bool elicits; // and that the client can ask its user
	char program[300];
	int rc; // of the session
	struct err err;
	char *line; // that was received last; owned
	size_t cap, len;
};

// What mayfly would be in dir: a script that writes its arguments to dir/verbs, a line a call.
void mcp_client_program(const char *dir, const char *script);

// Starts a session for the machine in dir, which has a vm.ini.
void mcp_client_start(struct mcp_client *c, const char *dir, enum config_access ceiling);

// The client leaves; returns what the session did.
int mcp_client_stop(struct mcp_client *c);

void mcp_client_raw(struct mcp_client *c, const char *text, size_t len);

// The next message from the session, the caller's. Fails the test if none comes.
json_t *mcp_client_receive(struct mcp_client *c);

// Sends a request (params taken over, may be NULL); returns its id.
json_int_t mcp_client_send(struct mcp_client *c, const char *method, json_t *params);

// Sends one and waits for its answer; what else comes before it is dropped. The caller's.
json_t *mcp_client_ask(struct mcp_client *c, const char *method, json_t *params);

json_int_t mcp_client_send_call(struct mcp_client *c, const char *tool, json_t *arguments);

// A tool's result: its structuredContent, or fails the test. The caller's.
json_t *mcp_client_call(struct mcp_client *c, const char *tool, json_t *arguments);

// The words of one that fails, the caller's.
char *mcp_client_fails(struct mcp_client *c, const char *tool, json_t *arguments);

// The code of an error of JSON-RPC; 0 if the answer is a result.
int mcp_client_code(const json_t *answer);

#endif
