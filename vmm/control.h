// SPDX-License-Identifier: Apache-2.0
// The control socket of a monitor: JSON-RPC 2.0, one object a line. Loop thread.
//
// Who may connect (mode 0600) may do with the machine what they like, so a request is trusted in
// what it asks for, but not to be well-formed, nor its sender to stay or to read. A client has one
// request in work at a time; what follows waits in its socket. Who passes a descriptor waits for
// the answer before the next request, or it might go to another one.
#ifndef MAYFLY_CONTROL_H
#define MAYFLY_CONTROL_H

#include <jansson.h>

#include "vmm/base/err.h"

struct control;
struct control_client;
struct loop;

#define CONTROL_SOCKET      "control.sock" // in the machine's run folder
#define CONTROL_LINE_BYTES  65536U
#define CONTROL_CLIENTS_MAX 16U
#define CONTROL_FDS_MAX     2U // descriptors that may come along with a request
#define CONTROL_NO_METHOD   1 // from call(): there is none of that name

struct control_config {
	struct loop *loop;
	const char *dir; // of the socket; borrowed during control_create()
	// A request. params is an object or NULL, fd what came along with the line or -1; the fd is
	// taken over; if there were more, control_take_fd() has the next. Returns 0 and replies,
	// now or later; or CONTROL_NO_METHOD; or a negative errno with *err filled.
	int (*call)(void *opaque, struct control_client *client, const char *method,
		const json_t *params, int fd, struct err *err);
	// The client is gone; no reply to it may follow.
	void (*gone)(void *opaque, struct control_client *client);
	void *opaque;
};

int control_create(
	struct control **ret_control, const struct control_config *config, struct err *err);

// The socket's file stays, for the next monitor to replace. Accepts NULL.
void control_destroy(struct control *control);

// Within call(): the next descriptor that came along, the caller's; -1 if there is none.
int control_take_fd(struct control_client *client);

// Answers the client's request; result is taken over, NULL stands for {}.
void control_reply(struct control_client *client, json_t *result);
void control_fail(struct control_client *client, const struct err *err);

#endif
