// SPDX-License-Identifier: Apache-2.0
// One connection from the host. Nothing here blocks: what cannot go on waits for an event, and a
// host that does not read stops only the command of its own session. The agent's only thread.
#include "guest/session.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest/port.h"
#include "vmm/base/bytes.h"

// Output is read when at least this much fits, so that a host that reads slowly does not make
// frames of a few bytes.
#define OUT_MIN_BYTES 4096U

#define TTY_EOF 4 // Ctrl-D, as long as nobody has changed it

void session_open(struct agent *a, struct session *s, int conn_fd)
{
	bool dirty = s->dirty; // of its former user, in this very turn

	ASSERT(!s->used);
	// All but the buffers.
	memset(s, 0, offsetof(struct session, in));
	s->used = true;
	s->dirty = dirty;
	s->parser.dir = FRAME_TO_GUEST;
	s->window_bytes = STDIN_WINDOW_BYTES;
	task_init(a, &s->task, (uint32_t)(s - a->sessions));
	s->task.fds[FD_CONN] = conn_fd;
	a->used++;
	agent_mark(a, s);
}

static void release_if_done(struct agent *a, struct session *s)
{
	if (s->task.fds[FD_CONN] >= 0 || s->task.pid)
		return;
	task_fini(a, &s->task);
	s->used = false;
	a->used--;
	agent_slot_freed(a);
}

void session_close(struct agent *a, struct session *s)
{
	for (enum task_fd i = 0; i < FD_COUNT; i++)
		task_close_fd(&s->task, i);
	if (s->proxy && a->proxy_port == s->port)
		a->proxy_port = 0;
	s->proxy = false;
	s->job = NULL;
	task_kill(&s->task);
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

static void queue_exit(struct session *s, const struct task *t)
{
	uint8_t payload[FRAME_EXIT_BYTES];
	const struct frame_exit e = task_exit(t);

	frame_exit_put(payload, &e);
	queue(s, FRAME_EXIT, payload, sizeof(payload), NULL, 0);
	s->state = SESSION_FLUSH;
}

bool session_flush(struct session *s)
{
	while (s->out_len) {
		ssize_t n = send(s->task.fds[FD_CONN], s->out + s->out_head, s->out_len,
			MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		s->out_head += (uint32_t)n;
		s->out_len -= (uint32_t)n;
	}
	s->out_head = 0;
	return true;
}

uint32_t session_out_room(struct session *s)
{
	uint32_t room = out_room(s);

	return room < OUT_MIN_BYTES ? 0 : room;
}

// What output there is room for now, 0 for less than is worth a frame.
static uint32_t output_room(struct session *s)
{
	uint32_t room = out_room(s);

	if (room < OUT_RESERVE_BYTES + FRAME_HEADER_BYTES + OUT_MIN_BYTES)
		return 0;
	return room - OUT_RESERVE_BYTES - FRAME_HEADER_BYTES;
}

// --- From the command ------------------------------------------------------------------------

// Moves one piece of the command's output to the queue if there is room.
static void pass_output(struct session *s, enum task_fd i)
{
	uint32_t room = output_room(s), n;
	uint8_t *to = s->out + s->out_len;

	if (!room)
		return;
	n = task_read(&s->task, i, to + FRAME_HEADER_BYTES, room);
	if (!n)
		return;
	frame_header_put(to, i == FD_STDERR ? FRAME_STDERR : FRAME_STDOUT, n);
	s->out_len += FRAME_HEADER_BYTES + n;
}

void session_reaped(struct agent *a, struct session *s, int status, const struct rusage *usage)
{
	task_reaped(&s->task, status, usage);
	if (s->task.fds[FD_CONN] < 0)
		release_if_done(a, s);
	else
		agent_mark(a, s);
}

// --- From a job ------------------------------------------------------------------------------

void session_view(struct session *s, struct job *job)
{
	s->job = job;
	s->state = SESSION_VIEW;
}

void session_job_gone(struct agent *a, struct session *s)
{
	struct err err = {0};

	s->job = NULL;
	if (s->state != SESSION_VIEW)
		return;
	err_set(&err, -ESTALE, "the job has been forgotten");
	session_error(s, 125, &err);
	agent_mark(a, s);
}

// One piece of a log. Returns false when there is no more of it, or no room.
static bool pass_log(struct session *s, int which)
{
	const struct job_log *log = &s->job->logs[which];
	const uint8_t *bytes = NULL;
	uint32_t room, n;

	if (s->view_off[which] < job_log_start(log)) { // we were too slow, or asked too late
		s->view_off[which] = job_log_start(log);
		s->view_told[which] = false;
	}
	room = output_room(s);
	if (room < OUT_MIN_BYTES)
		return false;
	if (!s->view_told[which]) {
		uint8_t payload[FRAME_OFFSET_BYTES];

		put_le32(payload, which ? FRAME_STDERR : FRAME_STDOUT);
		put_le64(payload + 4, s->view_off[which]);
		queue(s, FRAME_OFFSET, payload, sizeof(payload), NULL, 0);
		s->view_told[which] = true;
		room -= FRAME_HEADER_BYTES + FRAME_OFFSET_BYTES;
	}
	n = job_log_at(log, s->view_off[which], room, &bytes);
	if (!n)
		return false;
	queue(s, which ? FRAME_STDERR : FRAME_STDOUT, bytes, n, NULL, 0);
	s->view_off[which] += n;
	return true;
}

static bool has_seen_all(const struct session *s)
{
	return s->view_told[0] && s->view_told[1] && s->view_off[0] == s->job->logs[0].end &&
	       s->view_off[1] == s->job->logs[1].end;
}

static void step_view(struct session *s)
{
	bool more = true;

	while (more) {
		more = pass_log(s, 0);
		more |= pass_log(s, 1);
	}
	if (!has_seen_all(s))
		return;
	if (s->job->finished) {
		queue_exit(s, &s->job->task);
	} else if (!s->follow) {
		char text[1024];
		struct json_out out = {.buf = text, .cap = sizeof(text)};

		job_write(&out, s->job);
		ASSERT(!out.full);
		session_reply(s, text, out.len);
	}
}

// --- To the command --------------------------------------------------------------------------

// The command that our stdin is for.
static struct task *target(struct session *s)
{
	return s->job ? &s->job->task : &s->task;
}

static void write_stdin(struct session *s)
{
	struct task *t = target(s);

	while (s->in_len && t->fds[FD_STDIN] >= 0) {
		uint32_t piece = MIN(s->in_len, STDIN_WINDOW_BYTES - s->in_head);
		ssize_t n = write(t->fds[FD_STDIN], s->in + s->in_head, piece);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0) { // nobody reads it any more: the rest goes nowhere
			task_close_fd(t, FD_STDIN);
			break;
		}
		s->in_head = (s->in_head + (uint32_t)n) % STDIN_WINDOW_BYTES;
		s->in_len -= (uint32_t)n;
		s->consumed_bytes += (uint32_t)n;
	}
	if (t->fds[FD_STDIN] < 0) {
		s->in_len = 0;
		return;
	}
	if (s->stdin_eof && s->in_len == 0) {
		if (!t->tty) // to a terminal it was a character
			task_close_fd(t, FD_STDIN);
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
	task_kill(&s->task); // a job lives on
	session_error(s, 125, &err);
}

static void on_signal(struct session *s, uint32_t number)
{
	if (number < 1 || number > 64) {
		protocol_error(s, "no such signal");
		return;
	}
	if (target(s)->pid)
		kill(-target(s)->pid, (int)number); // it leads a group of its own
}

static void on_resize(struct session *s, uint16_t rows, uint16_t columns)
{
	if (!target(s)->tty)
		protocol_error(s, "resize without a terminal");
	else
		task_resize(target(s), rows, columns);
}

static void on_stdin(struct session *s, const struct frame_piece *piece)
{
	if (s->stdin_eof || piece->len > s->window_bytes) {
		protocol_error(
			s, s->stdin_eof ? "stdin after its end" : "more stdin than asked for");
		return;
	}
	s->window_bytes -= piece->len;
	if (target(s)->fds[FD_STDIN] >= 0)
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
		if (target(s)->tty && s->in_len < STDIN_WINDOW_BYTES)
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
	ssize_t n = recv(s->task.fds[FD_CONN], a->scratch, sizeof(a->scratch), MSG_DONTWAIT);
	const uint8_t *data = a->scratch;
	size_t left = (size_t)n;

	s->task.ready[FD_CONN] = false;
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

static bool is_port(const struct session *s)
{
	return s->state >= SESSION_CONNECT;
}

// A file at its end is always ready, so it must not be watched while there is no room for what it
// would bring.
static bool watch(struct agent *a, struct session *s)
{
	const struct task *t = &s->task;
	bool output = s->state == SESSION_RUN && !t->exited && output_room(s);
	uint32_t want[FD_COUNT] = {
		[FD_CONN] = EPOLLIN | EPOLLRDHUP | (s->out_len ? EPOLLOUT : 0U),
		[FD_STDIN] = t->fds[FD_STDIN] >= 0 && s->in_len ? EPOLLOUT : 0U,
		[FD_STDOUT] = output && t->fds[FD_STDOUT] >= 0 ? EPOLLIN : 0U,
		[FD_STDERR] = output && t->fds[FD_STDERR] >= 0 ? EPOLLIN : 0U,
	};

	if (is_port(s))
		port_want(s, want);
	return task_watch(a, &s->task, want) == 0;
}

void session_step(struct agent *a, struct session *s)
{
	struct task *t = &s->task;
	bool alive = true;

	if (t->fds[FD_CONN] < 0)
		return;
	if (t->ready[FD_CONN] && s->state != SESSION_RAW && s->state != SESSION_DIAL)
		alive = receive(a, s);
	if (alive && is_port(s))
		alive = port_step(a, s);
	while (alive && !is_port(s)) {
		if (s->state == SESSION_RUN) {
			for (enum task_fd i = FD_STDOUT; i <= FD_STDERR; i++)
				pass_output(s, i);
			write_stdin(s);
			if (task_is_drained(t))
				queue_exit(s, t);
		} else if (s->state == SESSION_VIEW) {
			write_stdin(s);
			if (s->in_len)
				agent_mark_job(a, s->job); // it waits for room with us
			step_view(s);
		}
		alive = session_flush(s);
		// A living command's output is fetched once a turn, so that all sessions have
		// theirs; that of a dead one, and that in a log, is bounded, and no event will tell
		// of it.
		if (s->out_len || s->state == SESSION_FLUSH || s->state == SESSION_REQUEST ||
			(s->state == SESSION_RUN && !t->exited) ||
			(s->state == SESSION_VIEW && has_seen_all(s)))
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
