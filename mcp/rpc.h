// SPDX-License-Identifier: Apache-2.0
// JSON-RPC 2.0, an object a line: the framing of MCP's stdio transport, and of its Unix socket. The
// client is not trusted to be well-formed, brief, or to read what it is sent. A reader is one
// thread's; a writer any thread's.
#ifndef MAYFLY_MCP_RPC_H
#define MAYFLY_MCP_RPC_H

#include <jansson.h>
#include <pthread.h>

#include "vmm/base/err.h"

#define RPC_LINE_BYTES (4 * MIB) // of a message that comes in
#define RPC_ID_BYTES   256U

// JSON-RPC's codes, and MCP's.
#define RPC_PARSE_ERROR         (-32700)
#define RPC_INVALID_REQUEST     (-32600)
#define RPC_NO_METHOD           (-32601)
#define RPC_INVALID_PARAMS      (-32602)
#define RPC_INTERNAL            (-32603)
#define RPC_BUSY                (-32000) // ours
#define RPC_NO_RESOURCE         (-32002) // before 2026-07-28
#define RPC_UNSUPPORTED_VERSION (-32022)

// --- Coming in -------------------------------------------------------------------------------

struct rpc_reader {
	int fd; // the caller's
	char *buf; // owned
	size_t cap;
	size_t start, len; // of what is not taken yet
	bool skipping; // the rest of a line that was too long
	bool ended;
};

void rpc_reader_init(struct rpc_reader *r, int fd);
void rpc_reader_fini(struct rpc_reader *r);

// Takes a line that has come already: 1, with the line (without its end, valid until the next
// call); 0 if there is none yet; -EMSGSIZE for one that was too long, which is dropped.
int rpc_next(struct rpc_reader *r, const char **ret_line, size_t *ret_len);

// Reads what there is, blocking until there is some. 0, or -EPIPE at the end, or what read() says.
int rpc_fill(struct rpc_reader *r);

enum rpc_kind { RPC_REQUEST, RPC_NOTIFICATION, RPC_RESPONSE };

struct rpc_message {
	enum rpc_kind kind;
	json_t *root; // owned; the rest points into it
	json_t *id; // of requests: a string or an integer
	const char *method; // not of responses
	json_t *params; // an object, or NULL
};

// 0, or a code of JSON-RPC with what is wrong in *err; then *ret has an id, if one could be made
// out, and has to be freed as well.
int rpc_parse(const char *text, size_t len, struct rpc_message *ret, struct err *err);
void rpc_message_fini(struct rpc_message *m);

// --- Going out -------------------------------------------------------------------------------

// Takes a message as JSON (borrowed) and as its line (len bytes, owned). Must not block for long.
typedef void (*rpc_sink)(void *opaque, const json_t *message, char *line, size_t len);

struct rpc_writer {
	int fd; // the caller's; not used with a sink
	rpc_sink sink; // NULL: to fd
	void *sink_opaque;
	bool failed; // the client does not read, or is gone: nothing more is sent
	pthread_mutex_t lock;
};

void rpc_writer_init(struct rpc_writer *w, int fd);
void rpc_writer_fini(struct rpc_writer *w);

// Each takes the json over and sends a line. id is borrowed; NULL stands for null.
void rpc_send(struct rpc_writer *w, json_t *message);
void rpc_send_result(struct rpc_writer *w, json_t *id, json_t *result);
void rpc_send_error(struct rpc_writer *w, json_t *id, int code, const char *message, json_t *data);

bool rpc_writer_failed(struct rpc_writer *w);

#endif
