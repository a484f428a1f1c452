// SPDX-License-Identifier: Apache-2.0
// JSON-RPC 2.0 by lines; see the header. A reader is one thread's; a writer any thread's.
#include "mcp/rpc.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vmm/base/fd.h"

// A client that takes nothing for so long is gone.
#define WRITE_PATIENCE_MS 30000

// What a pipe that poll() calls writable takes without blocking.
#define WRITE_CHUNK_BYTES 4096U

#define FIRST_BYTES (16 * KIB) // RPC_LINE_BYTES is a power of two times that

// --- Coming in -------------------------------------------------------------------------------

void rpc_reader_init(struct rpc_reader *r, int fd)
{
	*r = (struct rpc_reader){.fd = fd};
}

void rpc_reader_fini(struct rpc_reader *r)
{
	free(r->buf);
	*r = (struct rpc_reader){.fd = -1};
}

int rpc_next(struct rpc_reader *r, const char **ret_line, size_t *ret_len)
{
	for (;;) {
		char *line = r->buf + r->start;
		char *end = r->len ? memchr(line, '\n', r->len) : NULL;
		size_t len = end ? (size_t)(end - line) : r->len;
		bool skipped = r->skipping;

		if (!end) {
			if (len < RPC_LINE_BYTES && !skipped)
				return 0;
			r->skipping = true;
			r->len = 0;
			return 0;
		}
		r->start += len + 1;
		r->len -= len + 1;
		r->skipping = false;
		if (skipped)
			return -EMSGSIZE;
		if (len && line[len - 1] == '\r')
			len--;
		if (strspn(line, " \t\r") >= len) // up to the newline at most
			continue;
		*ret_line = line;
		*ret_len = len;
		return 1;
	}
}

int rpc_fill(struct rpc_reader *r)
{
	ssize_t n;

	if (r->ended)
		return -EPIPE;
	if (r->len && r->start)
		memmove(r->buf, r->buf + r->start, r->len);
	r->start = 0;
	// Most messages are small: it grows for those that are not.
	if (r->len == r->cap) {
		size_t cap = r->cap ? 2 * r->cap : FIRST_BYTES;
		char *grown = realloc(r->buf, cap);

		if (!grown)
			return -ENOMEM;
		r->buf = grown;
		r->cap = cap;
	}
	ASSERT(r->len < r->cap && r->cap <= RPC_LINE_BYTES);
	do
		n = read(r->fd, r->buf + r->len, r->cap - r->len);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	r->ended = n == 0;
	r->len += (size_t)n;
	return n == 0 ? -EPIPE : 0;
}

static bool good_id(const json_t *id)
{
	return json_is_integer(id) ||
	       (json_is_string(id) && json_string_length(id) <= RPC_ID_BYTES);
}

int rpc_parse(const char *text, size_t len, struct rpc_message *ret, struct err *err)
{
	struct rpc_message m = {0};
	const char *version;
	json_error_t why;
	json_t *method;

	m.root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
	*ret = m;
	if (!m.root) {
		err_set(err, -EINVAL, "not JSON: %s", why.text);
		return RPC_PARSE_ERROR;
	}
	m.id = json_object_get(m.root, "id");
	if (m.id && !good_id(m.id)) {
		err_set(err, -EINVAL, "id: a string of up to %u bytes or an integer", RPC_ID_BYTES);
		ret->root = m.root;
		return RPC_INVALID_REQUEST;
	}
	*ret = m;
	version = json_string_value(json_object_get(m.root, "jsonrpc"));
	method = json_object_get(m.root, "method");
	m.method = json_string_value(method);
	m.params = json_object_get(m.root, "params");
	m.kind = !method ? RPC_RESPONSE : m.id ? RPC_REQUEST : RPC_NOTIFICATION;
	if (!json_is_object(m.root) || !version || strcmp(version, "2.0") != 0)
		err_set(err, -EINVAL, "not an object with \"jsonrpc\": \"2.0\" (no batches)");
	else if (method && !m.method)
		err_set(err, -EINVAL, "method: not a string");
	else if (!method && !json_object_get(m.root, "result") && !json_object_get(m.root, "error"))
		err_set(err, -EINVAL, "neither a method nor a result nor an error");
	else if (m.params && !json_is_object(m.params))
		err_set(err, -EINVAL, "params: not an object");
	else {
		*ret = m;
		return 0;
	}
	return RPC_INVALID_REQUEST;
}

void rpc_message_fini(struct rpc_message *m)
{
	json_decref(m->root);
	*m = (struct rpc_message){0};
}

// --- Going out -------------------------------------------------------------------------------

void rpc_writer_init(struct rpc_writer *w, int fd)
{
	*w = (struct rpc_writer){.fd = fd};
	pthread_mutex_init(&w->lock, NULL);
}

void rpc_writer_fini(struct rpc_writer *w)
{
	pthread_mutex_destroy(&w->lock);
}

static bool write_patiently(int fd, const char *text, size_t len)
{
	while (len) {
		struct pollfd out = {.fd = fd, .events = POLLOUT};
		int n = poll(&out, 1, WRITE_PATIENCE_MS);
		ssize_t done;

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		done = write(fd, text, MIN(len, (size_t)WRITE_CHUNK_BYTES));
		if (done < 0 && errno != EINTR && errno != EAGAIN)
			return false;
		if (done > 0) {
			text += done;
			len -= (size_t)done;
		}
	}
	return true;
}

void rpc_send(struct rpc_writer *w, json_t *message)
{
	CLEANUP_FREE char *text = message ? json_dumps(message, JSON_COMPACT) : NULL;
	size_t len = text ? strlen(text) : 0;

	if (text)
		text[len] = '\n'; // in the place of the NUL
	pthread_mutex_lock(&w->lock);
	// Whoever waits for an answer that could not be made must not wait for ever.
	w->failed |= !text;
	if (!w->failed && w->sink)
		w->sink(w->sink_opaque, message, TAKE_PTR(text), len + 1);
	else if (!w->failed && !write_patiently(w->fd, text, len + 1))
		w->failed = true;
	pthread_mutex_unlock(&w->lock);
	json_decref(message);
}

void rpc_send_result(struct rpc_writer *w, json_t *id, json_t *result)
{
	rpc_send(w, json_pack("{s:s, s:O, s:o}", "jsonrpc", "2.0", "id", id, "result", result));
}

void rpc_send_error(struct rpc_writer *w, json_t *id, int code, const char *message, json_t *data)
{
	json_t *null = json_null(), *words = json_string(message);

	if (!words) // some may be the guest's
		words = json_string("it failed, with words that are not UTF-8");
	rpc_send(w, json_pack("{s:s, s:O, s:{s:i, s:o, s:o*}}", "jsonrpc", "2.0", "id",
			    id ? id : null, "error", "code", code, "message", words, "data", data));
}

bool rpc_writer_failed(struct rpc_writer *w)
{
	bool failed;

	pthread_mutex_lock(&w->lock);
	failed = w->failed;
	pthread_mutex_unlock(&w->lock);
	return failed;
}
