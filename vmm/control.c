// SPDX-License-Identifier: Apache-2.0
// JSON-RPC over a Unix socket; see the header. Loop thread.
#include "vmm/control.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"
#include "vmm/loop.h"

#define BACKLOG 16

// The codes of JSON-RPC 2.0, 5.1.
#define RPC_PARSE_ERROR     (-32700)
#define RPC_INVALID_REQUEST (-32600)
#define RPC_NO_METHOD       (-32601)
#define RPC_FAILED          (-32000) // ours: the errno is in data

struct control_client {
	struct control *control;
	int fd;
	int watch;
	bool working; // on the request with this id
	bool processing; // process() is on the stack
	json_t *id; // NULL: a notification, which gets no answer
	int passed_fds[CONTROL_FDS_MAX]; // came with the line that is being read; -1: none
	size_t len;
	char line[CONTROL_LINE_BYTES];
};

struct control {
	struct control_config config;
	int listen_fd;
	int listen_watch;
	struct control_client *clients[CONTROL_CLIENTS_MAX];
};

static void close_passed(struct control_client *client)
{
	for (size_t i = 0; i < CONTROL_FDS_MAX; i++)
		fd_close(&client->passed_fds[i]);
}

int control_take_fd(struct control_client *client)
{
	for (size_t i = 0; i < CONTROL_FDS_MAX; i++)
		if (client->passed_fds[i] >= 0)
			return TAKE_FD(client->passed_fds[i]);
	return -1;
}

static void client_close(struct control_client *client)
{
	struct control *control = client->control;

	for (size_t i = 0; i < CONTROL_CLIENTS_MAX; i++)
		if (control->clients[i] == client)
			control->clients[i] = NULL;
	loop_watch_del(control->config.loop, &client->watch);
	control->config.gone(control->config.opaque, client);
	fd_close(&client->fd);
	close_passed(client);
	json_decref(client->id);
	free(client);
	if (control->listen_watch >= 0)
		loop_watch_set(control->config.loop, control->listen_watch, POLLIN);
}

// Takes both over. A client that does not read its answers is one to close, at its next event.
static void answer(struct control_client *client, const char *key, json_t *value)
{
	json_t *reply = json_pack("{s:s, s:O, s:o}", "jsonrpc", "2.0", "id",
		client->id ? client->id : json_null(), key, value);
	char *text = reply ? json_dumps(reply, JSON_COMPACT) : NULL;
	size_t len = text ? strlen(text) : 0;

	if (text) {
		text[len] = '\n'; // in the place of the NUL
		if (send(client->fd, text, len + 1, MSG_DONTWAIT | MSG_NOSIGNAL) !=
			(ssize_t)(len + 1))
			shutdown(client->fd, SHUT_RDWR);
	} else {
		shutdown(client->fd, SHUT_RDWR);
	}
	free(text);
	json_decref(reply);
}

static void process(struct control_client *client);

static void done(struct control_client *client)
{
	json_decref(client->id);
	client->id = NULL;
	client->working = false;
	process(client);
}

void control_reply(struct control_client *client, json_t *result)
{
	ASSERT(client->working);
	if (client->id)
		answer(client, "result", result ? result : json_object());
	else
		json_decref(result);
	done(client);
}

static void fail(struct control_client *client, int code, const struct err *err)
{
	if (client->id || code == RPC_PARSE_ERROR || code == RPC_INVALID_REQUEST)
		answer(client, "error",
			json_pack("{s:i, s:s+, s:{s:i}}", "code", code, "message", err->msg, "",
				"data", "errno", -err->code));
	done(client);
}

void control_fail(struct control_client *client, const struct err *err)
{
	ASSERT(client->working);
	fail(client, RPC_FAILED, err);
}

static void work(struct control_client *client, const char *line, size_t len)
{
	struct control_config *config = &client->control->config;
	json_t *request = json_loadb(line, len, JSON_REJECT_DUPLICATES, NULL);
	const json_t *params = json_object_get(request, "params");
	const char *method = json_string_value(json_object_get(request, "method"));
	json_t *id = json_object_get(request, "id");
	const char *version = json_string_value(json_object_get(request, "jsonrpc"));
	struct err err = {0};
	int r;

	client->working = true;
	if (json_is_string(id) || json_is_integer(id))
		client->id = json_incref(id);
	if (!request) {
		err_set(&err, -EINVAL, "not JSON");
		fail(client, RPC_PARSE_ERROR, &err);
	} else if (!method || !version || strcmp(version, "2.0") != 0 ||
		   (id && !client->id && !json_is_null(id)) ||
		   (params && !json_is_object(params))) {
		err_set(&err, -EINVAL, "not a request of JSON-RPC 2.0");
		fail(client, RPC_INVALID_REQUEST, &err);
	} else {
		r = config->call(
			config->opaque, client, method, params, control_take_fd(client), &err);
		if (r == CONTROL_NO_METHOD) {
			err_set(&err, -ENOSYS, "there is no method '%.60s'", method);
			fail(client, RPC_NO_METHOD, &err);
		} else if (r < 0) {
			control_fail(client, &err);
		}
	}
	// What came along and nobody wanted.
	close_passed(client);
	json_decref(request);
}

// Works on what has arrived, a line at a time.
static void process(struct control_client *client)
{
	char *newline;

	if (client->processing)
		return;
	client->processing = true;
	while (!client->working && (newline = memchr(client->line, '\n', client->len))) {
		size_t used = (size_t)(newline - client->line) + 1;
		char *line = malloc(used);

		if (!line) {
			shutdown(client->fd, SHUT_RDWR);
			break;
		}
		memcpy(line, client->line, used);
		client->len -= used;
		memmove(client->line, client->line + used, client->len);
		work(client, line, used - 1);
		free(line);
	}
	client->processing = false;
	if (!client->working && client->len == sizeof(client->line))
		shutdown(client->fd, SHUT_RDWR); // a line that is too long
	// Meanwhile only its end is heard: POLLERR stands for that and POLLHUP.
	loop_watch_set(
		client->control->config.loop, client->watch, client->working ? POLLERR : POLLIN);
}

// More than a request may bring are not kept.
static void keep_passed(struct control_client *client, int fd)
{
	for (size_t i = 0; i < CONTROL_FDS_MAX && fd >= 0; i++)
		if (client->passed_fds[i] < 0)
			client->passed_fds[i] = TAKE_FD(fd);
	fd_close(&fd);
}

// False when the client is gone.
static bool receive(struct control_client *client)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(int) * 4)];
	} control;
	struct iovec iov = {client->line + client->len, sizeof(client->line) - client->len};
	struct msghdr msg = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t n = recvmsg(client->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		size_t nr = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < nr; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			keep_passed(client, fd);
		}
	}
	client->len += (size_t)n;
	return n > 0;
}

static void on_client(void *opaque, uint32_t revents)
{
	struct control_client *client = opaque;

	if (client->working) {
		if (revents & (POLLHUP | POLLERR))
			client_close(client);
		return;
	}
	if (receive(client))
		process(client);
	else
		client_close(client);
}

static void on_listen(void *opaque, uint32_t revents)
{
	struct control *control = opaque;
	struct control_client *client;
	size_t slot = 0;
	int fd, r;

	(void)revents;
	while (slot < CONTROL_CLIENTS_MAX && control->clients[slot])
		slot++;
	if (slot == CONTROL_CLIENTS_MAX) {
		loop_watch_set(control->config.loop, control->listen_watch, 0);
		return; // the backlog waits for one to leave
	}
	fd = accept4(control->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0)
		return;
	client = calloc(1, sizeof(*client));
	if (!client) {
		fd_close(&fd);
		return;
	}
	client->control = control;
	client->fd = fd;
	for (size_t i = 0; i < CONTROL_FDS_MAX; i++)
		client->passed_fds[i] = -1;
	client->watch = -1;
	r = loop_watch_add(control->config.loop, fd, POLLIN, on_client, client, NULL);
	if (r < 0) {
		fd_close(&client->fd);
		free(client);
		return;
	}
	client->watch = r;
	control->clients[slot] = client;
}

int control_create(
	struct control **ret_control, const struct control_config *config, struct err *err)
{
	struct control *control = calloc(1, sizeof(*control));
	int r;

	if (!control)
		return err_errno(err, -ENOMEM, "control socket");
	control->config = *config;
	control->config.dir = NULL;
	control->listen_watch = -1;
	control->listen_fd = unix_listen(config->dir, CONTROL_SOCKET, BACKLOG, err);
	if (control->listen_fd < 0) {
		r = control->listen_fd;
		free(control);
		return r;
	}
	r = loop_watch_add(config->loop, control->listen_fd, POLLIN, on_listen, control, err);
	if (r < 0) {
		control_destroy(control);
		return r;
	}
	control->listen_watch = r;
	*ret_control = control;
	return 0;
}

void control_destroy(struct control *control)
{
	if (!control)
		return;
	loop_watch_del(control->config.loop, &control->listen_watch);
	for (size_t i = 0; i < CONTROL_CLIENTS_MAX; i++)
		if (control->clients[i])
			client_close(control->clients[i]);
	fd_close(&control->listen_fd);
	free(control);
}
