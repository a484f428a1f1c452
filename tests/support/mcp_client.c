// SPDX-License-Identifier: Apache-2.0
// A client of an MCP session; see the header. One thread.
#include "tests/support/test.h"

#include "tests/support/mcp_client.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/level.h"
#include "vmm/base/fd.h"

#define PATIENCE_MS 120000

void mcp_client_program(const char *dir, const char *script)
{
	char path[300];
	CLEANUP_FD int fd = -1;

	snprintf(path, sizeof(path), "%s/mayfly", dir);
	unlink(path);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
	assert_true(fd >= 0);
	assert_true(dprintf(fd, "#!/bin/sh\necho \"$@\" >>%s/verbs\n%s\n", dir, script) > 0);
}

static void *session_main(void *opaque)
{
	struct mcp_client *c = opaque;

	c->rc = mcp_session_run(&c->session, &c->err);
	return NULL;
}

void mcp_client_start(struct mcp_client *c, const char *dir, enum config_access ceiling)
{
	int pair[2];

	*c = (struct mcp_client){.next_id = 1};
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	c->fd = pair[0];
	c->session_fd = pair[1];
	snprintf(c->machine.name, sizeof(c->machine.name), "box");
	snprintf(c->machine.dir, sizeof(c->machine.dir), "%s", dir);
	snprintf(c->machine.run_dir, sizeof(c->machine.run_dir), "%s", dir);
	snprintf(c->program, sizeof(c->program), "%s/mayfly", dir);
	c->machine.vsock = "vsock.sock";
	snprintf(c->machine.approvals_dir, sizeof(c->machine.approvals_dir), "%s/approvals", dir);
	c->machine.program = c->program;
	c->session = (struct mcp_session){
		.machine = &c->machine,
		.outputs = outputs_create(),
		.watch = level_watch_create(dir, NULL),
		.ceiling = ceiling,
		.transport = "test",
		.in_fd = pair[1],
		.out_fd = pair[1],
		.stop_fd = -1,
	};
	assert_non_null(c->session.outputs);
	assert_int_equal(pthread_create(&c->thread, NULL, session_main, c), 0);
}

int mcp_client_stop(struct mcp_client *c)
{
	shutdown(c->fd, SHUT_WR);
	assert_int_equal(pthread_join(c->thread, NULL), 0);
	fd_close(&c->fd);
	fd_close(&c->session_fd);
	outputs_destroy(c->session.outputs);
	level_watch_destroy(c->session.watch);
	free(c->line);
	c->line = NULL;
	return c->rc;
}

void mcp_client_raw(struct mcp_client *c, const char *text, size_t len)
{
	assert_int_equal(fd_write_all(c->fd, text, len), 0);
}

json_t *mcp_client_receive(struct mcp_client *c)
{
	for (;;) {
		struct pollfd p = {.fd = c->fd, .events = POLLIN};
		char *end = c->len ? memchr(c->line, '\n', c->len) : NULL;
		json_t *message;
		ssize_t n;

		if (end) {
			message = json_loadb(c->line, (size_t)(end - c->line), 0, NULL);
			if (!message)
				fail_msg("not JSON: %.*s", (int)(end - c->line), c->line);
			c->len -= (size_t)(end + 1 - c->line);
			memmove(c->line, end + 1, c->len);
			return message;
		}
		if (c->cap - c->len < 65536) {
			c->cap = c->cap * 2 + 131072;
			c->line = realloc(c->line, c->cap);
			assert_non_null(c->line);
		}
		if (poll(&p, 1, PATIENCE_MS) != 1)
			fail_msg("no answer");
		n = read(c->fd, c->line + c->len, c->cap - c->len);
		if (n <= 0)
			fail_msg("the session has ended: %s", c->err.msg);
		c->len += (size_t)n;
	}
}

json_int_t mcp_client_send(struct mcp_client *c, const char *method, json_t *params)
{
	json_t *message = json_pack("{s:s, s:I, s:s, s:o}", "jsonrpc", "2.0", "id", c->next_id,
		"method", method, "params", params ? params : json_object());
	char *text;

	if (c->modern) {
		json_t *mine = json_object_get(message, "params"), *meta;

		if (!json_object_get(mine, "_meta"))
			json_object_set_new(mine, "_meta", json_object());
		meta = json_object_get(mine, "_meta");
		json_object_set_new(
			meta, "io.modelcontextprotocol/protocolVersion", json_string("2026-07-28"));
		json_object_set_new(meta, "io.modelcontextprotocol/clientCapabilities",
			c->elicits ? json_pack("{s:{}}", "elicitation") : json_object());
	}
	text = json_dumps(message, JSON_COMPACT);
	assert_non_null(text);
	mcp_client_raw(c, text, strlen(text));
	mcp_client_raw(c, "\n", 1);
	free(text);
	json_decref(message);
	return c->next_id++;
}

json_t *mcp_client_ask(struct mcp_client *c, const char *method, json_t *params)
{
	json_int_t id = mcp_client_send(c, method, params);

	for (;;) {
		json_t *answer = mcp_client_receive(c);

		if (json_integer_value(json_object_get(answer, "id")) == id)
			return answer;
		json_decref(answer);
	}
}

json_int_t mcp_client_send_call(struct mcp_client *c, const char *tool, json_t *arguments)
{
	return mcp_client_send(
		c, "tools/call", json_pack("{s:s, s:o}", "name", tool, "arguments", arguments));
}

static json_t *call(struct mcp_client *c, const char *tool, json_t *arguments)
{
	return mcp_client_ask(
		c, "tools/call", json_pack("{s:s, s:o}", "name", tool, "arguments", arguments));
}

static const char *words(const json_t *answer)
{
	const json_t *error = json_object_get(answer, "error");
	const json_t *content = json_object_get(json_object_get(answer, "result"), "content");

	return json_string_value(error ? json_object_get(error, "message")
				       : json_object_get(json_array_get(content, 0), "text"));
}

json_t *mcp_client_call(struct mcp_client *c, const char *tool, json_t *arguments)
{
	json_t *answer = call(c, tool, arguments);
	json_t *result = json_object_get(answer, "result"), *text;
	json_t *structured = json_incref(json_object_get(result, "structuredContent"));

	if (!structured || !json_is_false(json_object_get(result, "isError")))
		fail_msg("%s: %s", tool, words(answer));
	// The text is the same, for clients that know no other.
	text = json_loads(words(answer), 0, NULL);
	assert_true(json_equal(text, structured));
	json_decref(text);
	json_decref(answer);
	return structured;
}

char *mcp_client_fails(struct mcp_client *c, const char *tool, json_t *arguments)
{
	json_t *answer = call(c, tool, arguments);
	char *text;

	if (!json_is_true(json_object_get(json_object_get(answer, "result"), "isError"))) {
		text = json_dumps(answer, 0);
		fail_msg("%s did not fail: %s", tool, text);
	}
	text = strdup(words(answer));
	assert_non_null(text);
	json_decref(answer);
	return text;
}

int mcp_client_code(const json_t *answer)
{
	return (int)json_integer_value(json_object_get(json_object_get(answer, "error"), "code"));
}
