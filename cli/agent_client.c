// SPDX-License-Identifier: Apache-2.0
// The host's end of the agent protocol; see the header. One thread a connection.
#include "cli/agent_client.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "guest/proto/frame.h"
#include "guest/proto/json.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

// How long after the guest's deadline for a command ours is: it has to kill, reap and tell.
#define TIMEOUT_GRACE_NS 10000000000ULL

// What a pipe that poll() calls writable takes without blocking.
#define WRITE_CHUNK_BYTES 4096U

#define SIGNALS_PATIENCE 3

#define LEAVE_KEY 0x1d // Ctrl-]

// How long a program may take to notice that its terminal is a row smaller before it is not: two
// changes at once would be one signal and no change.
#define REDRAW_NS 200000000ULL

// Turns in which a machine that has ended may still be heard: more than a socket holds.
#define CANCEL_TURNS 64

#define CONTROL_FRAME_BYTES (FRAME_HEADER_BYTES + 4U)
#define CONTROL_ROOM_BYTES  (4 * CONTROL_FRAME_BYTES)

#define CONNECT_LINE_MAX 32

// --- Waiting ---------------------------------------------------------------------------------

static int poll_timeout_ms(uint64_t deadline_ns)
{
	uint64_t now, left_ms;

	if (deadline_ns == AGENT_DEADLINE_NONE)
		return -1;
	now = now_ns();
	if (now >= deadline_ns)
		return 0;
	left_ms = (deadline_ns - now + 999999) / 1000000;
	return (int)MIN(left_ms, (uint64_t)INT32_MAX);
}

// Waits until fd is ready for events, or something is wrong with it.
static int wait_for(int fd, short events, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	for (;;) {
		struct pollfd p[2] = {
			{.fd = fd, .events = events}, {.fd = cancel_fd, .events = POLLIN}};
		int n = poll(p, 2, poll_timeout_ms(deadline_ns));

		if (n < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (n > 0 && p[1].revents)
			return err_set(err, -ECANCELED, "the machine ended");
		if (n > 0 && p[0].revents)
			return 0;
		if (now_ns() >= deadline_ns)
			return err_set(err, -ETIMEDOUT, "the guest did not answer in time");
	}
}

// Receives at least one byte.
static ssize_t receive_some(
	int fd, void *buf, size_t len, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	for (;;) {
		int rc = wait_for(fd, POLLIN, cancel_fd, deadline_ns, err);
		ssize_t n;

		if (rc < 0)
			return rc;
		n = recv(fd, buf, len, MSG_DONTWAIT);
		if (n > 0)
			return n;
		if (n == 0)
			return err_set(err, -ECONNRESET, "the guest closed the connection");
		if (errno != EAGAIN && errno != EINTR)
			return err_errno(err, -errno, "from the guest");
	}
}

static int send_all(
	int fd, const void *buf, size_t len, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	while (len) {
		int rc = wait_for(fd, POLLOUT, cancel_fd, deadline_ns, err);
		ssize_t n;

		if (rc < 0)
			return rc;
		n = send(fd, buf, len, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return err_errno(err, -errno, "to the guest");
		if (n > 0) {
			buf = (const char *)buf + n;
			len -= (size_t)n;
		}
	}
	return 0;
}

// --- Connections -----------------------------------------------------------------------------

int agent_ready_listen(const char *dir, const char *name, struct err *err)
{
	char ready_name[64];

	snprintf(ready_name, sizeof(ready_name), "%s_%u", name, AGENT_READY_PORT);
	return unix_listen(dir, ready_name, 1, err);
}

static void copy_printable(char *to, size_t size, const char *from)
{
	size_t n = 0;

	for (; *from && n + 1 < size; from++)
		to[n++] = *from > ' ' && *from < 0x7f ? *from : '?';
	to[n] = '\0';
}

static int parse_ready(char *json, size_t len, struct agent_ready *ret, struct err *err)
{
	struct json_node nodes[64];
	const char *version = "";
	struct err why = {0};
	int64_t protocol = 0, started_ns = 0, ready_ns = 0, clock_ns = 0;
	struct timespec now;
	const struct json_field fields[] = {
		{"v", JSON_INT, &protocol, 0, INT64_MAX},
		{"agent", JSON_STRING, &version, 0, 0},
		{"started_ns", JSON_INT, &started_ns, 0, INT64_MAX},
		{"ready_ns", JSON_INT, &ready_ns, 0, INT64_MAX},
		{"clock_ns", JSON_INT, &clock_ns, 0, INT64_MAX},
	};

	if (json_parse(json, len, nodes, ARRAY_SIZE(nodes)) < 0)
		return err_set(err, -EPROTO, "not valid JSON");
	if (json_decode(nodes, nodes, fields, ARRAY_SIZE(fields), JSON_SKIP_UNKNOWN, &why) < 0)
		return err_set(err, -EPROTO, "%s", why.msg);
	if (protocol != PROTO_VERSION)
		return err_set(err, -EPROTONOSUPPORT,
			"it speaks version %lld of the protocol, this program version %d",
			(long long)protocol, PROTO_VERSION);
	copy_printable(ret->version, sizeof(ret->version), version);
	ret->started_ns = (uint64_t)started_ns;
	ret->ready_ns = (uint64_t)ready_ns;
	clock_gettime(CLOCK_REALTIME, &now);
	ret->clock_ahead_ns = clock_ns ? clock_ns - ((int64_t)now.tv_sec * 1000000000 + now.tv_nsec)
				       : 0;
	return 0;
}

// Receives one frame, and not a byte of what is behind it. Its payload is copied to buf.
static int receive_frame(int fd, int cancel_fd, uint64_t deadline_ns, uint8_t *buf, size_t size,
	enum frame_type *ret_type, size_t *ret_len, struct err *err)
{
	struct frame_parser parser = {.dir = FRAME_TO_HOST};
	uint8_t bytes[4096];

	for (;;) {
		const uint8_t *data = bytes;
		size_t missing = parser.header_have < FRAME_HEADER_BYTES
					 ? FRAME_HEADER_BYTES - parser.header_have
					 : parser.payload_len - parser.payload_off;
		ssize_t n = receive_some(
			fd, bytes, MIN(missing, sizeof(bytes)), cancel_fd, deadline_ns, err);
		size_t left = (size_t)n;
		struct frame_piece piece;
		int rc;

		if (n < 0)
			return (int)n;
		while ((rc = frame_parse(&parser, &data, &left, &piece)) == 1) {
			if (piece.frame_len > size)
				return err_set(
					err, -EPROTO, "an answer of %u bytes", piece.frame_len);
			memcpy(buf + piece.off, piece.data, piece.len);
			if (piece.last) {
				*ret_type = piece.type;
				*ret_len = piece.frame_len;
				return 0;
			}
		}
		if (rc < 0)
			return err_set(err, rc, "what the guest sent is not a frame");
	}
}

int agent_ready_wait(int listen_fd, int cancel_fd, uint64_t deadline_ns, struct agent_ready *ret,
	struct err *err)
{
	CLEANUP_FD int fd = -1;
	uint8_t payload[4096];
	enum frame_type type = FRAME_READY;
	size_t len;
	int rc;

	while (fd < 0) {
		rc = wait_for(listen_fd, POLLIN, cancel_fd, deadline_ns, err);
		if (rc < 0)
			return rc;
		fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
			return err_errno(err, -errno, "ready socket");
	}
	rc = receive_frame(fd, cancel_fd, deadline_ns, payload, sizeof(payload), &type, &len, err);
	if (rc == 0 && type != FRAME_READY)
		rc = err_set(err, -EPROTO, "a frame of type %d", type);
	if (rc == 0)
		rc = parse_ready((char *)payload, len, ret, err);
	return rc < 0 ? err_wrap(err, rc, "ready message of the guest") : 0;
}

int agent_connect(const char *dir, const char *name, uint32_t port, int cancel_fd,
	uint64_t deadline_ns, struct err *err)
{
	CLEANUP_FD int fd = unix_connect(dir, name, err);
	char line[CONNECT_LINE_MAX];
	size_t have = 0;
	int rc, len;

	if (fd < 0)
		return fd;
	len = snprintf(line, sizeof(line), "CONNECT %u\n", port);
	rc = send_all(fd, line, (size_t)len, cancel_fd, deadline_ns, err);
	// Byte by byte: what follows the line belongs to the stream.
	while (rc == 0 && (have == 0 || line[have - 1] != '\n')) {
		ssize_t n = receive_some(fd, line + have, 1, cancel_fd, deadline_ns, err);

		if (n == -ECONNRESET)
			return err_set(err, -ECONNREFUSED,
				"nothing listens on port %u of the guest", port);
		if (n < 0)
			rc = (int)n;
		else if (++have == sizeof(line))
			rc = err_set(err, -EPROTO, "the monitor's answer has no end");
	}
	if (rc == 0 && (have < 3 || memcmp(line, "OK ", 3) != 0))
		rc = err_set(err, -EPROTO, "the monitor's answer is not OK");
	if (rc < 0)
		return err_wrap(err, rc, "port %u of the guest", port);
	return TAKE_FD(fd);
}

// --- What the guest answers ------------------------------------------------------------------

static int error_of_frame(const uint8_t *payload, size_t len, int *ret_exit_code, struct err *err)
{
	struct frame_error e;
	char text[FRAME_ERROR_TEXT_MAX + 1];
	size_t n;

	if (!frame_error_get(payload, len, &e))
		return err_set(err, -EPROTO, "the guest sent a broken error");
	n = len - FRAME_ERROR_BYTES;
	memcpy(text, payload + FRAME_ERROR_BYTES, n);
	text[n] = '\0';
	// It must not drive the terminal that it will be printed on.
	for (size_t i = 0; i < n; i++)
		if ((unsigned char)text[i] < ' ' || text[i] == 0x7f)
			text[i] = '?';
	*ret_exit_code = (int)e.exit_code;
	return err_set(err, e.errno_value ? -(int)e.errno_value : -EIO, "%s", text);
}

static int result_of_frame(
	const uint8_t *payload, size_t len, struct agent_result *ret, struct err *err)
{
	struct frame_exit e;

	if (!frame_exit_get(payload, len, &e))
		return err_set(err, -EPROTO, "the guest sent a broken exit status");
	*ret = (struct agent_result){
		.exit_code = e.signal ? 128 + (int)e.signal : (int)e.code,
		.signal = e.signal,
		.timed_out = (e.flags & EXIT_TIMED_OUT) != 0,
		.core_dumped = (e.flags & EXIT_CORE) != 0,
		.over_limit = (e.flags & EXIT_LIMIT) != 0,
		.user_us = e.user_us,
		.system_us = e.system_us,
		.max_rss_bytes = e.max_rss_bytes,
	};
	return 0;
}

static int request(int conn_fd, const char *json, size_t len, int cancel_fd, uint64_t deadline_ns,
	char **ret_reply, int *ret_exit_code, struct err *err)
{
	CLEANUP_FREE char *reply = malloc(FRAME_PAYLOAD_MAX + 1);
	uint8_t header[FRAME_HEADER_BYTES];
	enum frame_type type = FRAME_READY;
	int rc;
	size_t reply_len;

	if (!reply)
		return err_errno(err, -ENOMEM, "request");
	if (len > FRAME_PAYLOAD_MAX)
		return err_set(
			err, -E2BIG, "the request is larger than %u KiB", FRAME_PAYLOAD_MAX / 1024);
	frame_header_put(header, FRAME_REQUEST, (uint32_t)len);
	rc = send_all(conn_fd, header, sizeof(header), cancel_fd, deadline_ns, err);
	if (rc == 0)
		rc = send_all(conn_fd, json, len, cancel_fd, deadline_ns, err);
	if (rc == 0)
		rc = receive_frame(conn_fd, cancel_fd, deadline_ns, (uint8_t *)reply,
			FRAME_PAYLOAD_MAX, &type, &reply_len, err);
	if (rc < 0)
		return rc;
	if (type == FRAME_ERROR)
		return error_of_frame((uint8_t *)reply, reply_len, ret_exit_code, err);
	if (type != FRAME_REPLY)
		return err_set(err, -EPROTO, "the guest answered with a frame of type %d", type);
	reply[reply_len] = '\0';
	if (strlen(reply) != reply_len)
		return err_set(err, -EPROTO, "the guest's answer is not text");
	*ret_reply = TAKE_PTR(reply);
	return 0;
}

int agent_request(int conn_fd, const char *json, size_t len, int cancel_fd, uint64_t deadline_ns,
	char **ret_reply, struct err *err)
{
	int exit_code;

	return request(conn_fd, json, len, cancel_fd, deadline_ns, ret_reply, &exit_code, err);
}

static int request_and_forget(int conn_fd, const struct json_out *json, int cancel_fd,
	uint64_t deadline_ns, struct err *err)
{
	CLEANUP_FREE char *reply = NULL;

	ASSERT(!json->full);
	return agent_request(conn_fd, json->buf, json->len, cancel_fd, deadline_ns, &reply, err);
}

static void open_request(struct json_out *json, const char *op)
{
	json_open(json, '{');
	json_key(json, "v");
	json_int(json, PROTO_VERSION);
	json_key(json, "op");
	json_str(json, op);
}

static void put_member(struct json_out *json, const char *key, const char *value)
{
	if (!value)
		return;
	json_key(json, key);
	json_str(json, value);
}

int agent_wake(int conn_fd, const struct agent_identity *identity, int cancel_fd,
	uint64_t deadline_ns, struct err *err)
{
	static const char digits[] = "0123456789abcdef";
	char text[1024], entropy[2 * sizeof(identity->entropy) + 1] = "";
	struct json_out json = {.buf = text, .cap = sizeof(text)};
	struct timespec now;

	for (size_t i = 0; i < sizeof(identity->entropy); i++) {
		entropy[2 * i] = digits[identity->entropy[i] >> 4];
		entropy[2 * i + 1] = digits[identity->entropy[i] & 15];
	}
	if (identity->hostname && strlen(identity->hostname) > 64)
		return err_set(err, -EINVAL, "hostname: longer than 64 bytes");
	open_request(&json, "wake");
	put_member(&json, "entropy", entropy);
	put_member(&json, "hostname", identity->hostname);
	put_member(&json, "boot_id", identity->boot_id);
	put_member(&json, "machine_id", identity->machine_id);
	put_member(&json, "mac", identity->mac);
	// The last that is done before it is sent.
	json_key(&json, "clock_ns");
	clock_gettime(CLOCK_REALTIME, &now);
	json_int(&json, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
	json_close(&json, '}');
	return request_and_forget(conn_fd, &json, cancel_fd, deadline_ns, err);
}

// A request without members.
static int ask(int conn_fd, const char *op, int cancel_fd, uint64_t deadline_ns, char **ret_json,
	struct err *err)
{
	char text[64];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	open_request(&json, op);
	json_close(&json, '}');
	ASSERT(!json.full);
	return agent_request(conn_fd, json.buf, json.len, cancel_fd, deadline_ns, ret_json, err);
}

int agent_shutdown(int conn_fd, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	CLEANUP_FREE char *reply = NULL;

	return ask(conn_fd, "shutdown", cancel_fd, deadline_ns, &reply, err);
}

int agent_kill_all(int conn_fd, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	CLEANUP_FREE char *reply = NULL;

	return ask(conn_fd, "kill-all", cancel_fd, deadline_ns, &reply, err);
}

int agent_port_connect(
	int conn_fd, uint16_t port, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	char text[64];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	open_request(&json, "connect");
	json_key(&json, "port");
	json_int(&json, port);
	json_close(&json, '}');
	return request_and_forget(conn_fd, &json, cancel_fd, deadline_ns, err);
}

int agent_port_listen(int conn_fd, uint16_t port, uint32_t host_port, bool proxy, int cancel_fd,
	uint64_t deadline_ns, struct err *err)
{
	char text[96];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	open_request(&json, "listen");
	json_key(&json, "port");
	json_int(&json, port);
	json_key(&json, "host_port");
	json_int(&json, host_port);
	if (proxy) {
		json_key(&json, "proxy");
		json_bool(&json, true);
	}
	json_close(&json, '}');
	return request_and_forget(conn_fd, &json, cancel_fd, deadline_ns, err);
}

int agent_facts(int conn_fd, int cancel_fd, uint64_t deadline_ns, char **ret_json, struct err *err)
{
	return ask(conn_fd, "facts", cancel_fd, deadline_ns, ret_json, err);
}

// --- A command -------------------------------------------------------------------------------

struct pump {
	int conn_fd;
	const struct agent_exec *x;
	const struct agent_attach *attach; // NULL: a command of our own
	struct frame_parser parser;
	struct agent_result result;
	uint64_t deadline_ns;
	uint64_t moved_ns; // when bytes have passed, or it was our turn, last
	bool done; // the last frame has come
	int rc; // how it ended then
	int signals; // that should have ended the command
	int cancel_turns; // since cancel_fd was seen
	bool resize_due;
	uint64_t redraw_ns; // when the right size is told, if not before; 0: it has been

	bool in_end;
	uint64_t window_bytes; // of stdin that we may send
	uint32_t out_len, out_off;

	const uint8_t *data; // received and not yet parsed
	size_t data_len;
	int local_fd; // where the output at hand goes; -1: none at hand
	const uint8_t *local;
	size_t local_len;

	size_t fixed_len; // of a short frame as it comes in
	uint8_t fixed[FRAME_ERROR_BYTES + FRAME_ERROR_TEXT_MAX];
	uint8_t out[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX + CONTROL_ROOM_BYTES]; // to the guest
	uint8_t in[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX]; // from the guest
};

static bool window_size(const struct agent_exec *x, struct winsize *ret)
{
	if (x->rows && x->columns) {
		*ret = (struct winsize){.ws_row = x->rows, .ws_col = x->columns};
		return true;
	}
	return (x->in_fd >= 0 && ioctl(x->in_fd, TIOCGWINSZ, ret) == 0) ||
	       (x->out_fd >= 0 && ioctl(x->out_fd, TIOCGWINSZ, ret) == 0);
}

static void put_strings(struct json_out *json, const char *key, const char *const *strings)
{
	json_key(json, key);
	json_open(json, '[');
	for (; *strings; strings++)
		json_str(json, *strings);
	json_close(json, ']');
}

static void put_amount(struct json_out *json, const char *key, uint64_t value, uint64_t max)
{
	if (!value)
		return;
	json_key(json, key);
	json_int(json, (int64_t)MIN(value, max));
}

static void put_size(const struct agent_exec *x, bool smaller, struct json_out *json)
{
	struct winsize size = {.ws_row = 24, .ws_col = 80};

	window_size(x, &size);
	if (smaller && size.ws_row > 1)
		size.ws_row--;
	json_key(json, "rows");
	json_int(json, size.ws_row);
	json_key(json, "columns");
	json_int(json, size.ws_col);
}

// Fills in the request; returns its length.
static int put_exec(char *buf, const struct agent_exec *x, const char *job, struct err *err)
{
	struct json_out json = {.buf = buf, .cap = FRAME_PAYLOAD_MAX};

	open_request(&json, x->files ? "files" : "exec");
	put_member(&json, "job", job);
	put_strings(&json, "argv", x->argv);
	if (x->env)
		put_strings(&json, "env", x->env);
	put_member(&json, "cwd", x->cwd);
	put_member(&json, "user", x->user);
	json_key(&json, "stdin");
	json_bool(&json, x->in_fd >= 0);
	if (x->tty) {
		json_key(&json, "tty");
		json_bool(&json, true);
		put_size(x, false, &json);
	}
	put_amount(&json, "timeout_ms", x->timeout_ms, INT64_MAX / 1000000);
	put_amount(&json, "memory_max_bytes", x->memory_max_bytes, INT64_MAX);
	put_amount(&json, "processes_max", x->processes_max, INT32_MAX);
	put_amount(&json, "cpu_time_ms", x->cpu_time_ms, INT64_MAX / 1000000);
	json_close(&json, '}');
	if (json.full)
		return err_set(err, -E2BIG,
			"the command and its environment take more than %u KiB; pass large input "
			"through stdin or a file",
			FRAME_PAYLOAD_MAX / 1024);
	return (int)json.len;
}

static int put_attach(
	char *buf, const struct agent_exec *x, const struct agent_attach *attach, struct err *err)
{
	struct json_out json = {.buf = buf, .cap = FRAME_PAYLOAD_MAX};

	open_request(&json, "attach");
	put_member(&json, "job", attach->job);
	json_key(&json, "follow");
	json_bool(&json, attach->follow);
	json_key(&json, "tail_bytes");
	json_int(&json, (int64_t)MIN(attach->tail_bytes, (uint64_t)INT64_MAX));
	if (attach->stdout_offset <= INT64_MAX) {
		json_key(&json, "stdout_offset");
		json_int(&json, (int64_t)attach->stdout_offset);
	}
	if (attach->stderr_offset <= INT64_MAX) {
		json_key(&json, "stderr_offset");
		json_int(&json, (int64_t)attach->stderr_offset);
	}
	if (x->tty) // only a change of size is told to a command, so the right one follows
		put_size(x, attach->redraw, &json);
	json_close(&json, '}');
	return json.full ? err_set(err, -E2BIG, "the job's name is too long") : (int)json.len;
}

static bool control_fits(const struct pump *p)
{
	return sizeof(p->out) - p->out_len >= CONTROL_FRAME_BYTES;
}

// A control frame, behind what is queued. It fits: stdin leaves room for several.
static void put_control(struct pump *p, enum frame_type type, const void *payload, uint32_t len)
{
	uint8_t *to;

	ASSERT(control_fits(p) && FRAME_HEADER_BYTES + len <= CONTROL_FRAME_BYTES);
	memmove(p->out, p->out + p->out_off, p->out_len);
	p->out_off = 0;
	to = p->out + p->out_len;
	frame_header_put(to, type, len);
	if (len)
		memcpy(to + FRAME_HEADER_BYTES, payload, len);
	p->out_len += FRAME_HEADER_BYTES + len;
}

static void put_resize(struct pump *p)
{
	struct winsize size;
	uint8_t payload[4];

	p->resize_due = false;
	if (!window_size(p->x, &size))
		return;
	put_le16(payload, size.ws_row);
	put_le16(payload + 2, size.ws_col);
	put_control(p, FRAME_RESIZE, payload, sizeof(payload));
}

// Its terminal gets its right size now.
static void redraw(struct pump *p)
{
	p->resize_due |= p->redraw_ns != 0;
	p->redraw_ns = 0;
}

static int on_fixed(struct pump *p, const struct frame_piece *piece, struct err *err)
{
	uint32_t more;

	if (piece->frame_len > sizeof(p->fixed))
		return err_set(err, -EPROTO, "a frame of %u bytes", piece->frame_len);
	memcpy(p->fixed + piece->off, piece->data, piece->len);
	if (!piece->last)
		return 0;
	switch (piece->type) {
	case FRAME_WINDOW:
		more = get_le32(p->fixed);
		if (more > STDIN_WINDOW_BYTES || p->window_bytes + more > STDIN_WINDOW_BYTES)
			return err_set(err, -EPROTO, "the guest asks for more than was agreed");
		p->window_bytes += more;
		return 0;
	case FRAME_OFFSET:
		if (p->attach && p->attach->offset)
			p->attach->offset(p->attach->ctx, get_le32(p->fixed) == FRAME_STDERR,
				get_le64(p->fixed + 4));
		return 0;
	case FRAME_EXIT:
		p->done = true;
		p->rc = result_of_frame(p->fixed, piece->frame_len, &p->result, err);
		return p->rc;
	case FRAME_ERROR:
		p->done = true;
		p->rc = error_of_frame(p->fixed, piece->frame_len, &p->result.exit_code, err);
		return p->rc;
	default:
		return err_set(err, -EPROTO, "a frame of type %d", piece->type);
	}
}

// Parses what was received until there is output to be written or nothing is left.
static int parse_received(struct pump *p, struct err *err)
{
	while (!p->done && p->local_fd < 0) {
		struct frame_piece piece;
		int rc = frame_parse(&p->parser, &p->data, &p->data_len, &piece);

		if (rc < 0)
			return err_set(err, rc, "what the guest sent is not a frame");
		if (rc == 0)
			return 0;
		if ((piece.type == FRAME_STDOUT || piece.type == FRAME_STDERR) && p->x->output) {
			rc = p->x->output(p->x->output_ctx, piece.type == FRAME_STDERR, piece.data,
				piece.len, err);
			if (rc < 0)
				return rc;
			continue;
		}
		if (piece.type == FRAME_STDOUT || piece.type == FRAME_STDERR) {
			p->local_fd = piece.type == FRAME_STDOUT ? p->x->out_fd : p->x->err_fd;
			p->local = piece.data;
			p->local_len = piece.len;
			redraw(p);
			continue;
		}
		if (piece.type == FRAME_REPLY && p->attach) { // what it says is for others
			p->result = (struct agent_result){.running = true};
			p->done = piece.last;
			continue;
		}
		rc = on_fixed(p, &piece, err);
		if (rc < 0)
			return rc;
	}
	return 0;
}

static int on_conn_readable(struct pump *p, struct err *err)
{
	ssize_t n = recv(p->conn_fd, p->in, sizeof(p->in), MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return err_set(err, -ECONNRESET, "the guest closed the connection");
	p->data = p->in;
	p->data_len = (size_t)n;
	return 0;
}

static int on_conn_writable(struct pump *p, struct err *err)
{
	ssize_t n = send(p->conn_fd, p->out + p->out_off, p->out_len, MSG_DONTWAIT | MSG_NOSIGNAL);

	// A guest that is done does not read the rest: what it has to say about that is on its way.
	if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) {
		p->out_len = 0;
		p->in_end = true;
		return 0;
	}
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0
							 : err_errno(err, -errno, "to the guest");
	p->out_off += (uint32_t)n;
	p->out_len -= (uint32_t)n;
	if (p->out_len == 0)
		p->out_off = 0;
	return 0;
}

static int on_local_writable(struct pump *p, struct err *err)
{
	struct stat st;
	size_t len = p->local_len;
	ssize_t n;

	if (fstat(p->local_fd, &st) < 0 || !S_ISREG(st.st_mode))
		len = MIN(len, (size_t)WRITE_CHUNK_BYTES);
	n = write(p->local_fd, p->local, len);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : err_errno(err, -errno, "output");
	p->local += n;
	p->local_len -= (size_t)n;
	if (p->local_len == 0)
		p->local_fd = -1;
	return 0;
}

static int on_stdin(struct pump *p, struct err *err)
{
	size_t want = MIN(p->window_bytes, (uint64_t)FRAME_PAYLOAD_MAX);
	ssize_t n = read(p->x->in_fd, p->out + FRAME_HEADER_BYTES, want);

	ASSERT(p->out_len == 0);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	// A terminal that is gone has ended. The command must not take half a file for all of it.
	if (n < 0 && !(errno == EIO && isatty(p->x->in_fd)))
		return err_errno(err, -errno, "input");
	if (n <= 0) {
		p->in_end = true;
		// A job's stdin is for the next one who comes, too.
		if (!p->attach)
			put_control(p, FRAME_STDIN_EOF, NULL, 0);
		return 0;
	}
	if (p->attach && p->x->tty && memchr(p->out + FRAME_HEADER_BYTES, LEAVE_KEY, (size_t)n)) {
		p->result = (struct agent_result){.running = true};
		p->done = true;
		return 0;
	}
	frame_header_put(p->out, FRAME_STDIN, (uint32_t)n);
	p->out_len = FRAME_HEADER_BYTES + (uint32_t)n;
	p->window_bytes -= (uint64_t)n;
	return 0;
}

static int on_signal(struct pump *p, struct err *err)
{
	struct signalfd_siginfo info;
	uint8_t payload[4];

	if (read(p->x->signal_fd, &info, sizeof(info)) != (ssize_t)sizeof(info))
		return 0;
	switch (info.ssi_signo) {
	case SIGWINCH:
		p->resize_due = p->x->tty; // only the last size counts
		return 0;
	case SIGINT:
	case SIGTERM:
	case SIGHUP:
	case SIGQUIT:
		// A shell in a terminal ignores most of these, and the keys travel as bytes.
		if (!p->x->tty && !(p->attach && p->x->in_fd < 0) &&
			++p->signals < SIGNALS_PATIENCE)
			break;
		p->result.exit_code = 128 + (int)info.ssi_signo;
		return err_set(err, -EINTR, "interrupted by signal %u", info.ssi_signo);
	default:
		break;
	}
	put_le32(payload, info.ssi_signo);
	put_control(p, FRAME_SIGNAL, payload, sizeof(payload));
	return 0;
}

enum { P_CONN, P_LOCAL, P_STDIN, P_SIGNAL, P_CANCEL, P_COUNT };

static int pump_turn(struct pump *p, struct err *err)
{
	bool want_in = p->local_fd < 0 && p->data_len == 0;
	bool want_stdin = !p->in_end && p->window_bytes && p->out_len == 0;
	struct pollfd fds[P_COUNT] = {
		// poll() reports a hang-up even when asked for nothing: then it is not asked.
		[P_CONN] = {.fd = want_in || p->out_len ? p->conn_fd : -1,
			.events = (short)((want_in ? POLLIN : 0) | (p->out_len ? POLLOUT : 0))},
		[P_LOCAL] = {.fd = p->local_fd, .events = POLLOUT},
		[P_STDIN] = {.fd = want_stdin ? p->x->in_fd : -1, .events = POLLIN},
		[P_SIGNAL] = {.fd = control_fits(p) ? p->x->signal_fd : -1, .events = POLLIN},
		[P_CANCEL] = {.fd = p->x->cancel_fd, .events = POLLIN},
	};
	uint64_t idle_at_ns = p->x->idle_ns ? p->moved_ns + p->x->idle_ns : AGENT_DEADLINE_NONE;
	uint64_t wake_ns = MIN(p->deadline_ns, idle_at_ns);
	int n, rc = 0;

	if (p->redraw_ns)
		wake_ns = MIN(wake_ns, p->redraw_ns);
	n = poll(fds, P_COUNT, poll_timeout_ms(wake_ns));

	if (n < 0)
		return errno == EINTR ? 0 : err_errno(err, -errno, "poll");
	if (p->redraw_ns && now_ns() >= p->redraw_ns)
		redraw(p);
	if (now_ns() >= p->deadline_ns)
		return err_set(err, -ETIMEDOUT, "the guest did not end the command in time");
	// Whoever waits for our input, or for our disk, owes nothing.
	if (n > 0 || want_stdin || !want_in)
		p->moved_ns = now_ns();
	else if (now_ns() >= idle_at_ns)
		return err_set(err, -ETIMEDOUT,
			"the guest does not go on: nothing has come for %llu s",
			(unsigned long long)(p->x->idle_ns / 1000000000));
	if (fds[P_STDIN].revents)
		rc = on_stdin(p, err);
	if (rc == 0 && fds[P_CONN].revents & POLLOUT)
		rc = on_conn_writable(p, err);
	if (rc == 0 && want_in && fds[P_CONN].revents & (POLLIN | POLLHUP | POLLERR))
		rc = on_conn_readable(p, err);
	if (rc == 0 && fds[P_LOCAL].revents)
		rc = on_local_writable(p, err);
	if (rc == 0 && fds[P_SIGNAL].revents && control_fits(p))
		rc = on_signal(p, err);
	if (rc == 0 && p->resize_due && control_fits(p))
		put_resize(p);
	if (rc == 0)
		rc = parse_received(p, err);
	// Last: what the guest had to say before its machine ended counts.
	if (rc == 0 && !p->done && fds[P_CANCEL].revents &&
		(!fds[P_CONN].revents || ++p->cancel_turns > CANCEL_TURNS))
		rc = err_set(err, -ECANCELED, "the machine ended");
	return rc;
}

bool agent_raw_mode(int fd, struct termios *ret_saved)
{
	struct termios raw;

	if (fd < 0 || tcgetattr(fd, ret_saved) < 0)
		return false;
	raw = *ret_saved;
	cfmakeraw(&raw);
	return tcsetattr(fd, TCSADRAIN, &raw) == 0;
}

// Sends the request and moves input and output until the end.
static int pump(int conn_fd, const struct agent_exec *x, const struct agent_attach *attach,
	struct agent_result *ret, struct err *err)
{
	CLEANUP_FREE struct pump *p = calloc(1, sizeof(*p));
	struct termios saved;
	bool raw = false;
	char *json;
	int rc;

	*ret = (struct agent_result){.exit_code = 125};
	if (!p)
		return err_errno(err, -ENOMEM, "exec");
	p->conn_fd = conn_fd;
	p->moved_ns = now_ns();
	p->x = x;
	p->attach = attach;
	p->parser.dir = FRAME_TO_HOST;
	p->result.exit_code = 125;
	p->local_fd = -1;
	p->in_end = x->in_fd < 0;
	p->window_bytes = STDIN_WINDOW_BYTES;
	if (attach && attach->redraw)
		p->redraw_ns = now_ns() + REDRAW_NS;
	p->deadline_ns = AGENT_DEADLINE_NONE;
	if (x->timeout_ms && x->timeout_ms < UINT64_MAX / 4000000)
		p->deadline_ns = now_ns() + x->timeout_ms * 1000000 + TIMEOUT_GRACE_NS;
	if (x->deadline_ns)
		p->deadline_ns = MIN(p->deadline_ns, x->deadline_ns);
	json = (char *)p->out + FRAME_HEADER_BYTES;
	rc = attach ? put_attach(json, x, attach, err) : put_exec(json, x, NULL, err);
	if (rc < 0)
		return rc;
	frame_header_put(p->out, FRAME_REQUEST, (uint32_t)rc);
	p->out_len = FRAME_HEADER_BYTES + (uint32_t)rc;
	rc = 0;
	if (x->tty)
		raw = agent_raw_mode(x->in_fd, &saved);
	while (rc == 0 && !p->done)
		rc = pump_turn(p, err);
	if (raw)
		tcsetattr(x->in_fd, TCSADRAIN, &saved);
	*ret = p->result;
	return p->done ? p->rc : rc;
}

int agent_exec(int conn_fd, const struct agent_exec *x, struct agent_result *ret, struct err *err)
{
	return pump(conn_fd, x, NULL, ret, err);
}

int agent_attach(
	int conn_fd, const struct agent_attach *attach, struct agent_result *ret, struct err *err)
{
	const struct agent_exec x = {
		.tty = attach->tty,
		.rows = attach->rows,
		.columns = attach->columns,
		.in_fd = attach->in_fd,
		.out_fd = attach->out_fd,
		.err_fd = attach->err_fd,
		.output = attach->output,
		.output_ctx = attach->ctx,
		.signal_fd = attach->signal_fd,
		.cancel_fd = attach->cancel_fd,
		.deadline_ns = attach->deadline_ns,
	};

	return pump(conn_fd, &x, attach, ret, err);
}

// --- Jobs ------------------------------------------------------------------------------------

int agent_job_start(int conn_fd, const struct agent_exec *x, const char *job, uint64_t deadline_ns,
	char ret_job[AGENT_JOB_NAME_MAX + 1], struct agent_result *ret, struct err *err)
{
	CLEANUP_FREE char *json = malloc(FRAME_PAYLOAD_MAX);
	CLEANUP_FREE char *reply = NULL;
	struct json_node nodes[128];
	const char *name = "";
	const struct json_field fields[] = {{"job", JSON_STRING, &name, 0, 0}};
	int rc;

	*ret = (struct agent_result){.exit_code = 125};
	if (!json)
		return err_errno(err, -ENOMEM, "job");
	rc = put_exec(json, x, job, err);
	if (rc >= 0)
		rc = request(conn_fd, json, (size_t)rc, x->cancel_fd, deadline_ns, &reply,
			&ret->exit_code, err);
	if (rc < 0)
		return rc;
	if (!reply || json_parse(reply, strlen(reply), nodes, ARRAY_SIZE(nodes)) < 0 ||
		json_decode(nodes, nodes, fields, 1, JSON_SKIP_UNKNOWN, NULL) < 0 || !name[0] ||
		strlen(name) > AGENT_JOB_NAME_MAX)
		return err_set(err, -EPROTO, "the guest's answer has no job");
	copy_printable(ret_job, AGENT_JOB_NAME_MAX + 1, name);
	*ret = (struct agent_result){.running = true};
	return 0;
}

int agent_job_signal(int conn_fd, const char *job, int signal, bool tree, int cancel_fd,
	uint64_t deadline_ns, struct err *err)
{
	char text[8 * AGENT_JOB_NAME_MAX + 128];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	if (strlen(job) > AGENT_JOB_NAME_MAX)
		return err_set(err, -ESRCH, "there is no job \"%.64s…\"", job);
	open_request(&json, "signal");
	put_member(&json, "job", job);
	if (signal) {
		json_key(&json, "signal");
		json_int(&json, signal);
	}
	json_key(&json, "tree");
	json_bool(&json, tree);
	json_close(&json, '}');
	return request_and_forget(conn_fd, &json, cancel_fd, deadline_ns, err);
}

int agent_job_forget(
	int conn_fd, const char *job, int cancel_fd, uint64_t deadline_ns, struct err *err)
{
	char text[8 * AGENT_JOB_NAME_MAX + 128];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	if (strlen(job) > AGENT_JOB_NAME_MAX)
		return err_set(err, -ESRCH, "there is no job \"%.64s…\"", job);
	open_request(&json, "forget");
	put_member(&json, "job", job);
	json_close(&json, '}');
	return request_and_forget(conn_fd, &json, cancel_fd, deadline_ns, err);
}

int agent_jobs(int conn_fd, int cancel_fd, uint64_t deadline_ns, char **ret_json, struct err *err)
{
	return ask(conn_fd, "jobs", cancel_fd, deadline_ns, ret_json, err);
}
