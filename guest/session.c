// SPDX-License-Identifier: Apache-2.0
// One connection from the host. Nothing here blocks: what cannot go on waits for an event, and a
// host that does not read stops only the command of its own session. The agent's only thread.
#include "guest/session.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

// Output is read when at least this much fits, so that a host that reads slowly does not make
// frames of a few bytes.
#define OUT_MIN_BYTES 4096U

// A terminal's output is bounded by the kernel's own buffers; this is more than they hold.
#define TTY_DRAIN_BYTES (256U * 1024)

#define TTY_EOF 4 // Ctrl-D, as long as nobody has changed it

void session_open(struct agent *a, struct session *s, int conn_fd)
{
	ASSERT(!s->used);
	// All but the buffers.
	memset(s, 0, offsetof(struct session, in));
	s->used = true;
	s->generation = ++a->generation;
	s->parser.dir = FRAME_TO_GUEST;
	s->tree = TREE_NONE;
	for (int i = 0; i < FD_COUNT; i++)
		s->fds[i] = -1;
	s->fds[FD_CONN] = conn_fd;
	s->window_bytes = STDIN_WINDOW_BYTES;
	a->used++;
	agent_mark(a, s);
}

static void release_if_done(struct agent *a, struct session *s)
{
	if (s->fds[FD_CONN] >= 0 || s->pid)
		return;
	if (s->deadline_ns)
		a->deadlines--;
	tree_release(&s->tree);
	s->used = false;
	a->used--;
	agent_slot_freed(a);
}

static void kill_command(struct session *s)
{
	if (s->pid && !s->killed)
		tree_kill(s->tree, s->pid);
	s->killed = true;
}

static void close_fd(struct session *s, enum session_fd i)
{
	fd_close(&s->fds[i]);
	s->watched[i] = 0; // epoll forgets a file that is closed
	s->ready[i] = false;
}

void session_fd_ended(struct session *s, enum session_fd i)
{
	close_fd(s, i);
}

void session_close(struct agent *a, struct session *s)
{
	for (enum session_fd i = 0; i < FD_COUNT; i++)
		close_fd(s, i);
	kill_command(s);
	release_if_done(a, s);
}

// --- To the host -----------------------------------------------------------------------------

static uint32_t out_room(struct session *s)
{
	if (s->out_head) {
		memmove(s->out, s->out + s->out_head, s->out_len);
		s->out_head = 0;
	}
	return OUT_BYTES - s->out_len;
}

static void queue(struct session *s, enum frame_type type, const void *head, size_t head_len,
	const void *tail, size_t tail_len)
{
	uint8_t *to;

	ASSERT(out_room(s) >= FRAME_HEADER_BYTES + head_len + tail_len);
	to = s->out + s->out_len;
	frame_header_put(to, type, (uint32_t)(head_len + tail_len));
	memcpy(to + FRAME_HEADER_BYTES, head, head_len);
	if (tail_len)
		memcpy(to + FRAME_HEADER_BYTES + head_len, tail, tail_len);
	s->out_len += (uint32_t)(FRAME_HEADER_BYTES + head_len + tail_len);
}

void session_error(struct session *s, int exit_code, const struct err *err)
{
	uint8_t head[FRAME_ERROR_BYTES];
	size_t len = strnlen(err->msg, FRAME_ERROR_TEXT_MAX);

	frame_error_put(head, &(struct frame_error){.errno_value = (uint32_t)-err->code,
				      .exit_code = (uint32_t)exit_code});
	queue(s, FRAME_ERROR, head, sizeof(head), err->msg, len);
	s->state = SESSION_FLUSH;
}

void session_reply(struct session *s, const char *json, size_t len)
{
	queue(s, FRAME_REPLY, json, len, NULL, 0);
	s->state = SESSION_FLUSH;
}

static uint64_t us_of(struct timeval t)
{
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_usec;
}

static void queue_exit(struct session *s)
{
	uint8_t payload[FRAME_EXIT_BYTES];
	struct frame_exit e = {
		.flags = s->timed_out ? EXIT_TIMED_OUT : 0,
		.user_us = us_of(s->usage.ru_utime),
		.system_us = us_of(s->usage.ru_stime),
		.max_rss_bytes = (uint64_t)s->usage.ru_maxrss * 1024,
	};

	if (WIFEXITED(s->status)) {
		e.code = (uint32_t)WEXITSTATUS(s->status);
	} else {
		e.signal = (uint32_t)WTERMSIG(s->status);
		if (WCOREDUMP(s->status))
			e.flags |= EXIT_CORE;
	}
	frame_exit_put(payload, &e);
	queue(s, FRAME_EXIT, payload, sizeof(payload), NULL, 0);
	s->state = SESSION_FLUSH;
}

// Returns false when the host is gone.
static bool flush(struct session *s)
{
	while (s->out_len) {
		ssize_t n = send(s->fds[FD_CONN], s->out + s->out_head, s->out_len,
			MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		s->out_head += (uint32_t)n;
		s->out_len -= (uint32_t)n;
	}
	s->out_head = 0;
	return true;
}

// --- From the command ------------------------------------------------------------------------

// Moves one piece of the command's output to the queue if there is room.
static void read_output(struct session *s, enum session_fd i)
{
	uint32_t room = out_room(s);
	uint32_t want;
	ssize_t n;
	uint8_t *to = s->out + s->out_len;

	if (s->fds[i] < 0 || room < OUT_RESERVE_BYTES + FRAME_HEADER_BYTES + OUT_MIN_BYTES)
		return;
	want = room - OUT_RESERVE_BYTES - FRAME_HEADER_BYTES;
	if (s->exited)
		want = MIN(want, s->drain_bytes[i]);
	// The pipes block, to save a system call each: we read one only when epoll or FIONREAD
	// has said that there is something, and nobody else reads it.
	n = want ? read(s->fds[i], to + FRAME_HEADER_BYTES, want) : 0;
	s->ready[i] = false;
	if (n < 0 && errno == EINTR) {
		s->ready[i] = true;
		return;
	}
	if (n < 0 && errno == EAGAIN && !s->exited)
		return;
	if (n <= 0) { // the end; EIO is that of a terminal
		close_fd(s, i);
		return;
	}
	if (s->exited) {
		s->drain_bytes[i] -= (uint32_t)n;
		s->ready[i] = true;
	}
	frame_header_put(to, i == FD_STDERR ? FRAME_STDERR : FRAME_STDOUT, (uint32_t)n);
	s->out_len += FRAME_HEADER_BYTES + (uint32_t)n;
}

void session_reaped(struct agent *a, struct session *s, int status, const struct rusage *usage)
{
	s->pid = 0;
	s->exited = true;
	s->status = status;
	s->usage = *usage;
	if (s->fds[FD_CONN] < 0) {
		release_if_done(a, s);
		return;
	}
	close_fd(s, FD_STDIN);
	for (enum session_fd i = FD_STDOUT; i <= FD_STDERR; i++) {
		int bytes = 0;

		if (s->fds[i] < 0)
			continue;
		// What it has written is in the pipe now; what comes later is of its children, who
		// may never end.
		if (!s->tty && ioctl(s->fds[i], FIONREAD, &bytes) < 0)
			bytes = 0;
		s->drain_bytes[i] = s->tty ? TTY_DRAIN_BYTES : (uint32_t)bytes;
		s->ready[i] = true;
	}
	agent_mark(a, s);
}

void session_deadline(struct agent *a, struct session *s)
{
	s->deadline_ns = 0;
	a->deadlines--;
	if (!s->pid)
		return;
	s->timed_out = true;
	kill_command(s);
}

// --- To the command --------------------------------------------------------------------------

static void write_stdin(struct session *s)
{
	while (s->in_len && s->fds[FD_STDIN] >= 0) {
		uint32_t piece = MIN(s->in_len, STDIN_WINDOW_BYTES - s->in_head);
		ssize_t n = write(s->fds[FD_STDIN], s->in + s->in_head, piece);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0) { // nobody reads it any more: the rest goes nowhere
			close_fd(s, FD_STDIN);
			break;
		}
		s->in_head = (s->in_head + (uint32_t)n) % STDIN_WINDOW_BYTES;
		s->in_len -= (uint32_t)n;
		s->consumed_bytes += (uint32_t)n;
	}
	if (s->fds[FD_STDIN] < 0) {
		s->in_len = 0;
		return;
	}
	if (s->stdin_eof && s->in_len == 0) {
		close_fd(s, FD_STDIN);
		return;
	}
	if (s->consumed_bytes >= STDIN_WINDOW_BYTES / 2 && out_room(s) >= OUT_RESERVE_BYTES) {
		uint8_t more[4];

		put_le32(more, s->consumed_bytes);
		queue(s, FRAME_WINDOW, more, sizeof(more), NULL, 0);
		s->window_bytes += s->consumed_bytes;
		s->consumed_bytes = 0;
	}
}

static void push_stdin(struct session *s, const uint8_t *data, uint32_t len)
{
	uint32_t tail = (s->in_head + s->in_len) % STDIN_WINDOW_BYTES;
	uint32_t first = MIN(len, STDIN_WINDOW_BYTES - tail);

	ASSERT(len <= STDIN_WINDOW_BYTES - s->in_len);
	memcpy(s->in + tail, data, first);
	memcpy(s->in, data + first, len - first);
	s->in_len += len;
}

// --- From the host ---------------------------------------------------------------------------

static void protocol_error(struct session *s, const char *what)
{
	struct err err = {0};

	err_set(&err, -EPROTO, "protocol error: %s", what);
	kill_command(s);
	session_error(s, 125, &err);
}

static void on_signal(struct session *s, uint32_t number)
{
	if (number < 1 || number > 64) {
		protocol_error(s, "no such signal");
		return;
	}
	if (s->pid)
		kill(-s->pid, (int)number); // it leads a group of its own
}

static void on_resize(struct session *s, uint16_t rows, uint16_t columns)
{
	struct winsize size = {.ws_row = rows, .ws_col = columns};

	if (!s->tty)
		protocol_error(s, "resize without a terminal");
	else if (s->fds[FD_STDOUT] >= 0)
		ioctl(s->fds[FD_STDOUT], TIOCSWINSZ, &size); // a shell that just went away
}

static void on_stdin(struct session *s, const struct frame_piece *piece)
{
	if (s->stdin_eof || piece->len > s->window_bytes) {
		protocol_error(
			s, s->stdin_eof ? "stdin after its end" : "more stdin than asked for");
		return;
	}
	s->window_bytes -= piece->len;
	if (s->fds[FD_STDIN] >= 0)
		push_stdin(s, piece->data, piece->len);
}

static void on_piece(struct agent *a, struct session *s, const struct frame_piece *piece)
{
	if (s->state == SESSION_FLUSH)
		return; // it is over, the host does not know yet
	if (s->state == SESSION_REQUEST) {
		if (piece->type != FRAME_REQUEST) {
			protocol_error(s, "the request is missing");
			return;
		}
		memcpy(s->in + piece->off, piece->data, piece->len);
		if (piece->last)
			request_dispatch(a, s, piece->frame_len);
		return;
	}
	switch (piece->type) {
	case FRAME_STDIN:
		on_stdin(s, piece);
		break;
	case FRAME_STDIN_EOF:
		s->stdin_eof = true;
		if (s->tty && s->in_len < STDIN_WINDOW_BYTES)
			push_stdin(s, &(const uint8_t){TTY_EOF}, 1);
		break;
	case FRAME_SIGNAL:
	case FRAME_RESIZE:
		memcpy(s->control + piece->off, piece->data, piece->len);
		if (!piece->last)
			break;
		if (piece->type == FRAME_SIGNAL)
			on_signal(s, get_le32(s->control));
		else
			on_resize(s, get_le16(s->control), get_le16(s->control + 2));
		break;
	default:
		protocol_error(s, "a second request");
	}
}

// Returns false when the host is gone. A host that closes only its sending side is gone too: the
// end of stdin is a frame.
static bool receive(struct agent *a, struct session *s)
{
	ssize_t n = recv(s->fds[FD_CONN], a->scratch, sizeof(a->scratch), MSG_DONTWAIT);
	const uint8_t *data = a->scratch;
	size_t left = (size_t)n;

	s->ready[FD_CONN] = false;
	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	if (n == 0)
		return false;
	while (s->state != SESSION_FLUSH) {
		struct frame_piece piece;
		int rc = frame_parse(&s->parser, &data, &left, &piece);

		if (rc == 0)
			break;
		if (rc < 0)
			protocol_error(s, "not a frame");
		else
			on_piece(a, s, &piece);
	}
	return true;
}

// --- All of it -------------------------------------------------------------------------------

static bool wants_output(struct session *s, enum session_fd i)
{
	return s->state == SESSION_RUN && s->fds[i] >= 0 && !s->exited &&
	       out_room(s) >= OUT_RESERVE_BYTES + FRAME_HEADER_BYTES + OUT_MIN_BYTES;
}

// Asks epoll for what we wait for now, and no more: a file at its end is always ready, so it must
// not be watched while there is no room for what it would bring.
static bool watch(struct agent *a, struct session *s)
{
	uint32_t want[FD_COUNT] = {
		[FD_CONN] = EPOLLIN | EPOLLRDHUP | (s->out_len ? EPOLLOUT : 0U),
		[FD_STDIN] = s->fds[FD_STDIN] >= 0 && s->in_len ? EPOLLOUT : 0U,
		[FD_STDOUT] = wants_output(s, FD_STDOUT) ? EPOLLIN : 0U,
		[FD_STDERR] = wants_output(s, FD_STDERR) ? EPOLLIN : 0U,
	};

	for (enum session_fd i = 0; i < FD_COUNT; i++) {
		struct epoll_event event = {.events = want[i]};
		int op = !s->watched[i] ? EPOLL_CTL_ADD : !want[i] ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;

		if (want[i] == s->watched[i])
			continue;
		event.data.u64 = agent_event_of(a, s, i);
		if (epoll_ctl(a->epoll_fd, op, s->fds[i], &event) < 0)
			return false;
		s->watched[i] = want[i];
	}
	return true;
}

void session_step(struct agent *a, struct session *s)
{
	bool alive = true;

	if (s->fds[FD_CONN] < 0)
		return;
	if (s->ready[FD_CONN])
		alive = receive(a, s);
	while (alive) {
		if (s->state == SESSION_RUN) {
			for (enum session_fd i = FD_STDOUT; i <= FD_STDERR; i++)
				if (s->ready[i])
					read_output(s, i);
			write_stdin(s);
			if (s->exited && !s->ready[FD_STDOUT] && !s->ready[FD_STDERR])
				queue_exit(s);
		}
		alive = flush(s);
		// A living command's output is fetched once a turn, so that all sessions have
		// theirs; that of a dead one is bounded, and no event will tell of it.
		if (s->out_len || !s->exited || s->state != SESSION_RUN)
			break;
	}
	if (alive && s->state == SESSION_FLUSH && s->out_len == 0) {
		if (s->shutdown)
			a->end = AGENT_SHUTDOWN;
		alive = false;
	}
	if (!alive || !watch(a, s))
		session_close(a, s);
}
