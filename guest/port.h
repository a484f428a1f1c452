// SPDX-License-Identifier: Apache-2.0
// Ports: a connection from the host becomes one to a TCP port of the guest, and one to a TCP port
// of the guest becomes one to the host, without any network. Inside the agent only. The agent's
// only thread.
//
// A session that has got through is raw: what comes on one side goes out on the other, the end of a
// direction is passed on by itself, and a side that does not read stops the other. Its TCP socket
// is FD_STDOUT, in both directions; `in` holds what goes to it, `out` what comes from it.
#ifndef MAYFLY_GUEST_PORT_H
#define MAYFLY_GUEST_PORT_H

#include <stdint.h>

#include "vmm/base/err.h"

struct agent;
struct session;

// Begins to connect the session to a TCP port of this machine. The answer is an empty reply, after
// which the stream is raw, or an error.
int port_connect(struct agent *a, struct session *s, uint16_t port, struct err *err);

// Listens on a TCP port of the loopback interface for as long as the session lasts, and takes each
// connection to a port of the host. The answer is an empty reply, and nothing after it.
int port_listen(struct session *s, uint16_t port, uint32_t host_port, struct err *err);

// A turn of a session that is connecting, listening or raw. Returns false when it is over.
bool port_step(struct agent *a, struct session *s);

// What such a session waits for; see task_watch().
void port_want(struct session *s, uint32_t want[]);

#endif
