// SPDX-License-Identifier: Apache-2.0
// Sessions on a Unix socket; see the header.
#include "mcp/listen.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/base/unix_sock.h"

#define BACKLOG 16

struct listen {
	const struct mcp_session *how;
	pthread_mutex_t lock;
	pthread_cond_t ended;
	unsigned int sessions;
};

struct client {
	struct listen *listen;
	struct mcp_session session;
};

// A session's thread.
static void *client_main(void *opaque)
{
	struct client *c = opaque;
	struct listen *l = c->listen;
	struct err err = {0};

	if (mcp_session_run(&c->session, &err) < 0)
		log_line(LOG_WARN, "mcp", "%s", err.msg);
	fd_close(&c->session.in_fd);
	free(c);
	pthread_mutex_lock(&l->lock);
	l->sessions--;
	pthread_cond_signal(&l->ended);
	pthread_mutex_unlock(&l->lock);
	return NULL;
}

static bool start(struct listen *l, int fd)
{
	struct client *c = calloc(1, sizeof(*c));
	pthread_attr_t attr;
	pthread_t thread;
	bool good;

	if (!c)
		return false;
	c->listen = l;
	c->session = *l->how;
	c->session.in_fd = c->session.out_fd = fd;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_mutex_lock(&l->lock);
	good = l->sessions < LISTEN_SESSIONS_MAX &&
	       pthread_create(&thread, &attr, client_main, c) == 0;
	l->sessions += good;
	pthread_mutex_unlock(&l->lock);
	pthread_attr_destroy(&attr);
	if (!good)
		free(c);
	return good;
}

int mcp_listen_run(
	const struct mcp_session *how, void (*started)(void *opaque), void *opaque, struct err *err)
{
	struct listen l = {
		.how = how, .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
	CLEANUP_FD int fd = unix_listen(how->machine->run_dir, LISTEN_SOCKET, BACKLOG, err);
	int r = 0;

	if (fd < 0)
		return fd;
	if (started)
		started(opaque);
	while (r == 0) {
		struct pollfd p[2] = {
			{.fd = fd, .events = POLLIN}, {.fd = how->stop_fd, .events = POLLIN}};
		int client;

		if (poll(p, ARRAY_SIZE(p), -1) < 0 && errno != EINTR)
			r = err_errno(err, -errno, "poll");
		if (p[1].revents)
			break;
		client = p[0].revents ? accept4(fd, NULL, NULL, SOCK_CLOEXEC) : -1;
		if (client >= 0 && !start(&l, client))
			fd_close(&client);
	}
	// Their sessions see stop_fd, too; or the host has failed, and they are waited for.
	pthread_mutex_lock(&l.lock);
	while (l.sessions)
		pthread_cond_wait(&l.ended, &l.lock);
	pthread_mutex_unlock(&l.lock);
	return r;
}
