// SPDX-License-Identifier: Apache-2.0
// One connection from the host, from its request to its end: what is read, written and waited for.
// Inside the agent only. The agent's only thread.
//
//   REQUEST --exec--> RUN --the command ended, its output is queued--> FLUSH --all sent--> closed
//      |--attach--> VIEW ---the job ended, its output is queued--------/
//      |--connect-> CONNECT --> RAW --both directions ended--> closed
//      |--listen--> LISTEN, which makes sessions of its own: DIAL --> RAW
//      \_____________any answer in one frame, any error______________/
//
// The connection and the command end apart: a slot is free again when both are gone.
#ifndef MAYFLY_GUEST_SESSION_H
#define MAYFLY_GUEST_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>

#include "guest/agent.h"
#include "guest/job.h"
#include "guest/proto/frame.h"
#include "guest/proto/json.h"
#include "guest/task.h"

#define SESSIONS_MAX      256
#define REQUEST_NODES_MAX 8192
#define OUT_BYTES         (FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX)
// Kept free of output, so that what ends a stream and what asks for stdin always has room.
#define OUT_RESERVE_BYTES \
	(3 * FRAME_HEADER_BYTES + FRAME_ERROR_BYTES + FRAME_ERROR_TEXT_MAX + FRAME_EXIT_BYTES)

enum session_state {
	SESSION_REQUEST,
	SESSION_RUN,
	SESSION_VIEW,
	SESSION_FLUSH,
	// See port.h.
	SESSION_CONNECT, // to a port of the guest
	SESSION_DIAL, // to the host, for a program of the guest
	SESSION_LISTEN,
	SESSION_RAW,
};

struct session {
	bool used;
	bool dirty; // has something to do in this turn
	enum session_state state;
	struct task task; // its FD_CONN is -1 when the host is gone
	bool shutdown; // the agent ends when the answer has been sent

	struct frame_parser parser;
	uint8_t control[8]; // the payload of a short frame as it comes in

	// What it looks at, NULL: nothing, or no more.
	struct job *job;
	uint64_t view_off[2]; // of stdout and stderr: the next byte to be sent
	bool view_told[2]; // the host knows the offset
	bool follow; // until the job ends

	// A port.
	uint16_t port;
	uint32_t host_port;
	bool tried_v6;
	bool proxy; // what starts while it listens is told of it
	bool conn_ended, tcp_ended; // nothing more comes from there
	bool conn_shut, tcp_shut; // nothing more goes there
	bool hung_up; // the host is gone altogether

	// stdin: a ring of what the command has not taken.
	uint32_t window_bytes; // that the host may still send
	uint32_t consumed_bytes; // not yet told to the host
	bool stdin_eof;
	uint32_t in_head, in_len;

	uint32_t out_head, out_len; // to the host, not yet sent

	uint8_t in[STDIN_WINDOW_BYTES]; // first the request, then stdin
	uint8_t out[OUT_BYTES];
};

_Static_assert(STDIN_WINDOW_BYTES >= FRAME_PAYLOAD_MAX, "a request must fit");

struct agent {
	struct agent_config config;
	int epoll_fd, signal_fd, null_fd, announce_fd;
	bool check_peer; // the listening socket is of AF_VSOCK
	bool listening; // epoll watches the listening socket
	uint64_t retry_accept_ns;
	int end; // 0, or enum agent_end
	uint64_t started_ns;
	uint32_t generation;
	uint16_t proxy_port; // of the loopback interface; 0: there is none
	unsigned used; // sessions
	unsigned deadlines; // sessions that have one
	struct session *dirty[SESSIONS_MAX];
	unsigned ndirty;
	struct job *dirty_jobs[JOBS_MAX];
	unsigned ndirty_jobs;
	unsigned job_counter; // for names
	uint8_t scratch[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX]; // just received
	struct json_node nodes[REQUEST_NODES_MAX]; // of the request at hand
	struct job jobs[JOBS_MAX];
	struct session sessions[SESSIONS_MAX];
};

// session.c

// Takes over the connection.
void session_open(struct agent *a, struct session *s, int conn_fd);

// Something happened: reads, writes, ends, as far as nothing blocks.
void session_step(struct agent *a, struct session *s);

// The host is gone, or must go: closes all, kills the command.
void session_close(struct agent *a, struct session *s);

// The command has been reaped.
void session_reaped(struct agent *a, struct session *s, int status, const struct rusage *usage);

// For ports: the free bytes behind what is in `out`, 0 for less than is worth reading; and sending
// of what is there, false when the host is gone.
uint32_t session_out_room(struct session *s);
bool session_flush(struct session *s);

// Looks at a job from now on.
void session_view(struct session *s, struct job *job);

// The job that it looks at is being forgotten.
void session_job_gone(struct agent *a, struct session *s);

// Queues the last frame of the stream: an error from err, a reply, how the command ended.
void session_error(struct session *s, int exit_code, const struct err *err);
void session_reply(struct session *s, const char *json, size_t len);

// agent.c

// The session has its turn before the loop waits again.
void agent_mark(struct agent *a, struct session *s);
void agent_mark_job(struct agent *a, struct job *j);

// A free one, or NULL.
struct session *agent_session(struct agent *a);

// A session has ended: another can be taken.
void agent_slot_freed(struct agent *a);

// request.c

// Carries out the request in s->in[0..len): the session runs, or its answer is queued.
void request_dispatch(struct agent *a, struct session *s, size_t len);

#endif
