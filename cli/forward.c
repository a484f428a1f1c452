// SPDX-License-Identifier: Apache-2.0
// Moves bytes between two sockets. Any thread.
#include "cli/forward.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "vmm/base/util.h"

#define BUFFER_BYTES 65536

// One direction.
struct way {
	int from, to;
	bool ended, shut; // nothing more comes; and that has been passed on
	size_t head, len;
	uint8_t bytes[BUFFER_BYTES];
};

// Returns false when a socket is broken.
static bool way_move(struct way *w, short from_events, short to_events)
{
	ssize_t n;

	if (!w->ended && w->len == 0 && from_events) {
		n = recv(w->from, w->bytes, sizeof(w->bytes), MSG_DONTWAIT);
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return false;
		w->ended = n == 0;
		w->head = 0;
		w->len = n > 0 ? (size_t)n : 0;
		to_events = POLLOUT; // most often there is room
	}
	if (w->len && to_events) {
		n = send(w->to, w->bytes + w->head, w->len, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return false;
		if (n > 0) {
			w->head += (size_t)n;
			w->len -= (size_t)n;
		}
	}
	if (w->ended && !w->len && !w->shut) {
		w->shut = true;
		shutdown(w->to, SHUT_WR);
	}
	return true;
}

static short way_wants(const struct way *w, int fd)
{
	if (fd == w->from)
		return !w->ended && !w->len ? POLLIN : 0;
	return w->len ? POLLOUT : 0;
}

void forward(int a, int b, int stop_fd)
{
	CLEANUP_FREE struct way *ways = calloc(2, sizeof(*ways));

	if (!ways)
		return;
	ways[0].from = ways[1].to = a;
	ways[0].to = ways[1].from = b;
	while (!ways[0].shut || !ways[1].shut) {
		struct pollfd p[3] = {
			{.fd = a,
				.events = (short)(way_wants(&ways[0], a) | way_wants(&ways[1], a))},
			{.fd = b,
				.events = (short)(way_wants(&ways[0], b) | way_wants(&ways[1], b))},
			{.fd = stop_fd, .events = POLLIN}};

		// A hang-up is reported even when not asked for, and would be for ever.
		for (int i = 0; i < 2; i++)
			if (!p[i].events)
				p[i].fd = -1;
		if (poll(p, 3, -1) < 0 && errno != EINTR)
			return;
		if (p[2].revents)
			return;
		if (!way_move(&ways[0], p[0].revents, p[1].revents) ||
			!way_move(&ways[1], p[1].revents, p[0].revents))
			return;
	}
}
