// SPDX-License-Identifier: Apache-2.0
// The agent: one loop, one thread, a fixed number of sessions. A session is one connection from the
// host: a request, then what it asked for. It knows neither where its sockets come from nor whether
// it is PID 1, so the tests run it as it is on socket pairs.
#ifndef MAYFLY_GUEST_AGENT_H
#define MAYFLY_GUEST_AGENT_H

#include <stdbool.h>
#include <stdint.h>

#include "vmm/base/err.h"

struct agent;

// Why the agent stopped serving.
enum agent_end { AGENT_SHUTDOWN = 1, AGENT_SIGNAL };

struct agent_config {
	// Takes connections from here: a listening socket of AF_VSOCK (of which only those of the
	// host are served) or, in tests, AF_UNIX. Owned by the agent from now on.
	int listen_fd;
	const char *etc_dir; // where passwd and group are
	// Begins to connect to a port of the host: a fd that does not block, or a negative errno.
	// NULL: it cannot be reached.
	int (*dial)(uint32_t port);
};

// The one agent of this process. It blocks the signals that it reads itself: SIGCHLD, so it reaps
// every child of the process, and those that end it.
int agent_create(const struct agent_config *config, struct agent **ret, struct err *err);

// Ends all sessions and kills their commands. Accepts NULL.
void agent_destroy(struct agent *agent);

// Connects fd, which must not block and is owned by the agent from now on, and sends the ready
// message on it as soon as the host has taken the connection. Nothing is wrong when nobody listens.
int agent_announce(struct agent *agent, int fd, const void *addr, uint32_t addr_len,
	uint64_t started_ns, struct err *err);

// Serves until it is asked to end; why is the result. Only an internal error is negative.
int agent_run(struct agent *agent, struct err *err);

// For tests: gives the agent a connected socket, as if it had been accepted. -EAGAIN when it serves
// as many as it can.
int agent_adopt(struct agent *agent, int conn_fd);

// For tests: one turn of the loop, waiting at most timeout_ms (-1: for ever). Returns 0 or as
// agent_run().
int agent_turn(struct agent *agent, int timeout_ms, struct err *err);

// For tests: sessions that hold anything at all.
unsigned agent_sessions(const struct agent *agent);

#endif
