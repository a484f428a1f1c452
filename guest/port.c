// SPDX-License-Identifier: Apache-2.0
// Ports. The agent's only thread.
#include "guest/port.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest/session.h"
#include "vmm/base/fd.h"

#define LISTEN_BACKLOG 128

// A server that does not read what a host has left behind for so long will not get it.
#define LINGER_NS 5000000000ULL

static int tcp_socket(int family)
{
	return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

// Programs listen on one family or the other, or on both: the older one first.
static int tcp_connect(uint16_t port, int family)
{
	const struct sockaddr_in v4 = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	const struct sockaddr_in6 v6 = {
		.sin6_family = AF_INET6,
		.sin6_port = htons(port),
		.sin6_addr = IN6ADDR_LOOPBACK_INIT,
	};
	CLEANUP_FD int fd = tcp_socket(family);
	int rc;

	if (fd < 0)
		return -errno;
	rc = family == AF_INET ? connect(fd, (const struct sockaddr *)&v4, sizeof(v4))
			       : connect(fd, (const struct sockaddr *)&v6, sizeof(v6));
	if (rc < 0 && errno != EINPROGRESS)
		return -errno;
	return TAKE_FD(fd);
}

// Small writes of a dialogue are not to wait for each other.
static void set_nodelay(int fd)
{
	int on = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

int port_connect(struct agent *a, struct session *s, uint16_t port, struct err *err)
{
	int fd = tcp_connect(port, AF_INET);

	(void)a;
	if (fd == -ECONNREFUSED)
		fd = tcp_connect(port, AF_INET6);
	if (fd < 0)
		return err_errno(err, fd, "port %u of the guest", port);
	s->task.fds[FD_STDOUT] = fd;
	s->port = port;
	s->state = SESSION_CONNECT;
	return 0;
}

int port_listen(struct session *s, uint16_t port, uint32_t host_port, struct err *err)
{
	const struct sockaddr_in addr = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	CLEANUP_FD int fd = tcp_socket(AF_INET);
	int on = 1;

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0 ||
		bind(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0 ||
		listen(fd, LISTEN_BACKLOG) < 0)
		return err_errno(err, -errno, "port %u of the guest", port);
	s->task.fds[FD_STDOUT] = TAKE_FD(fd);
	s->port = port;
	s->host_port = host_port;
	session_reply(s, "{}", 2);
	s->state = SESSION_LISTEN;
	return 0;
}

static int pending_error(int fd)
{
	int error = 0;
	socklen_t len = sizeof(error);

	return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0 ? errno : error;
}

static void become_raw(struct session *s)
{
	set_nodelay(s->task.fds[FD_STDOUT]);
	s->state = SESSION_RAW;
	// It was the request until now.
	s->in_head = s->in_len = 0;
	s->task.ready[FD_CONN] = s->task.ready[FD_STDOUT] = true;
}

static bool step_connect(struct session *s)
{
	struct task *t = &s->task;
	struct err err = {0};
	int error, fd;

	if (!t->ready[FD_STDOUT])
		return true;
	t->ready[FD_STDOUT] = false;
	error = pending_error(t->fds[FD_STDOUT]);
	if (error == ECONNREFUSED && !s->tried_v6) {
		s->tried_v6 = true;
		fd = tcp_connect(s->port, AF_INET6);
		if (fd >= 0) {
			task_close_fd(t, FD_STDOUT);
			t->fds[FD_STDOUT] = fd;
			return true;
		}
	}
	if (error) {
		err_errno(&err, -error, "port %u of the guest", s->port);
		session_error(s, 125, &err);
		return true;
	}
	session_reply(s, "{}", 2);
	become_raw(s);
	return true;
}

// The other side: a connection to the host, made for a program of the guest.
static bool step_dial(struct session *s)
{
	struct task *t = &s->task;

	if (!t->ready[FD_CONN])
		return true;
	if (pending_error(t->fds[FD_CONN]) != 0)
		return false; // which the program sees as the end of its connection
	become_raw(s);
	return true;
}

static void step_listen(struct agent *a, struct session *s)
{
	struct task *t = &s->task;
	CLEANUP_FD int tcp = -1;
	CLEANUP_FD int host = -1;
	struct session *made;

	if (!t->ready[FD_STDOUT])
		return;
	t->ready[FD_STDOUT] = false;
	tcp = accept4(t->fds[FD_STDOUT], NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (tcp < 0)
		return; // it has gone again, or there are too many: epoll will ask again
	host = a->config.dial(s->host_port);
	if (host < 0)
		return;
	made = agent_session(a);
	if (!made)
		return;
	session_open(a, made, TAKE_FD(host));
	made->task.fds[FD_STDOUT] = TAKE_FD(tcp);
	made->state = SESSION_DIAL;
}

// --- Raw -------------------------------------------------------------------------------------

static uint32_t in_room(const struct session *s)
{
	return STDIN_WINDOW_BYTES - s->in_len;
}

// Each of these returns false when the socket is broken, which ends both sides.
static bool read_conn(struct session *s)
{
	uint32_t tail = (s->in_head + s->in_len) % STDIN_WINDOW_BYTES;
	uint32_t want = MIN(in_room(s), STDIN_WINDOW_BYTES - tail);
	ssize_t n;

	if (s->conn_ended || !s->task.ready[FD_CONN] || !want)
		return true;
	n = recv(s->task.fds[FD_CONN], s->in + tail, want, MSG_DONTWAIT);
	if (n < 0) {
		s->task.ready[FD_CONN] = false;
		return errno == EAGAIN || errno == EINTR;
	}
	if (n == 0)
		s->conn_ended = true;
	s->in_len += (uint32_t)n;
	return true;
}

static bool write_tcp(struct agent *a, struct session *s)
{
	while (s->in_len) {
		uint32_t piece = MIN(s->in_len, STDIN_WINDOW_BYTES - s->in_head);
		ssize_t n = send(s->task.fds[FD_STDOUT], s->in + s->in_head, piece, MSG_NOSIGNAL);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		s->in_head = (s->in_head + (uint32_t)n) % STDIN_WINDOW_BYTES;
		s->in_len -= (uint32_t)n;
		if (s->hung_up)
			task_set_deadline(a, &s->task, now_ns() + LINGER_NS);
	}
	if (s->conn_ended && !s->tcp_shut) {
		s->tcp_shut = true;
		shutdown(s->task.fds[FD_STDOUT], SHUT_WR);
	}
	return true;
}

static bool read_tcp(struct session *s)
{
	uint32_t room = session_out_room(s);
	ssize_t n;

	if (s->tcp_ended || !s->task.ready[FD_STDOUT] || !room)
		return true;
	n = recv(s->task.fds[FD_STDOUT], s->out + s->out_len, room, MSG_DONTWAIT);
	if (n < 0) {
		s->task.ready[FD_STDOUT] = false;
		return errno == EAGAIN || errno == EINTR;
	}
	if (n == 0)
		s->tcp_ended = true;
	s->out_len += (uint32_t)n;
	return true;
}

static bool write_conn(struct session *s)
{
	if (!session_flush(s))
		return false;
	if (s->tcp_ended && !s->out_len && !s->conn_shut) {
		s->conn_shut = true;
		shutdown(s->task.fds[FD_CONN], SHUT_WR);
	}
	return true;
}

// The host is gone. What it had sent still goes to the server, what the server says goes nowhere.
static void hang_up(struct agent *a, struct session *s)
{
	s->conn_shut = s->tcp_ended = true;
	s->out_len = 0;
	task_set_deadline(a, &s->task, now_ns() + LINGER_NS);
}

static bool step_raw(struct agent *a, struct session *s)
{
	if (s->hung_up && !s->conn_shut)
		hang_up(a, s);
	if (!read_conn(s) || !write_tcp(a, s) || !read_tcp(s))
		return false;
	if (!s->hung_up && !write_conn(s))
		return false;
	return !(s->tcp_shut && s->conn_shut);
}

bool port_step(struct agent *a, struct session *s)
{
	switch (s->state) {
	case SESSION_CONNECT:
		return step_connect(s);
	case SESSION_DIAL:
		return step_dial(s);
	case SESSION_LISTEN:
		step_listen(a, s);
		return session_flush(s);
	default:
		return step_raw(a, s);
	}
}

void port_want(struct session *s, uint32_t want[])
{
	switch (s->state) {
	case SESSION_CONNECT:
		want[FD_STDOUT] = EPOLLOUT;
		break;
	case SESSION_DIAL:
		want[FD_CONN] = EPOLLOUT;
		break;
	case SESSION_LISTEN:
		want[FD_STDOUT] = EPOLLIN;
		break;
	default:
		// Its hang-up must not be missed while there is no room to read.
		want[FD_CONN] = (!s->conn_ended && in_room(s) ? EPOLLIN : 0U) |
				(s->out_len ? EPOLLOUT : 0U) | (s->hung_up ? 0U : EPOLLHUP);
		want[FD_STDOUT] = (!s->tcp_ended && session_out_room(s) ? EPOLLIN : 0U) |
				  (s->in_len ? EPOLLOUT : 0U);
	}
}
