// SPDX-License-Identifier: Apache-2.0
// The endpoint over HTTP with a real agent behind it, and clients that speak HTTP by hand: who may
// come, both revisions, streams, cancellation, and what ends when.
#include "tests/support/test.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mbedtls/ssl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/audit.h"
#include "mcp/http.h"
#include "mcp/http_sessions.h"
#include "mcp/http_tls.h"
#include "mcp/http_token.h"
#include "mcp/level.h"
#include "mcp/outputs.h"
#include "tests/support/fake_guest.h"
#include "tests/support/mcp_client.h"
#include "tests/support/tls_server.h"
#include "vmm/base/fd.h"

#define PATIENCE_MS 120000
#define TOKEN       "0123456789abcdef0123456789abcdef"
#define BEARER      "Authorization: Bearer " TOKEN "\r\n"
#define BOTH        "Accept: application/json, text/event-stream\r\n"
#define POSTING     BEARER BOTH "Content-Type: application/json\r\n"

static char dir[] = "/tmp/mayfly-http-test-XXXXXX";

static struct server {
	struct mcp_machine machine;
	struct mcp_session how;
	struct http_config config;
	char program[300];
	pthread_t thread;
	int started_fd;
	uint16_t port;
	int rc;
	struct err err;
} server;

static const char *at(const char *name)
{
	static char paths[4][256];
	static int which;

	which = (which + 1) % 4;
	snprintf(paths[which], sizeof(paths[0]), "%s/%s", dir, name);
	return paths[which];
}

static void set_level(const char *level)
{
	struct err err = {0};

	if (config_edit(at("vm.ini"), "mcp", "access", level, NULL, &err) < 0)
		fail_msg("%s", err.msg);
}

// --- The server ------------------------------------------------------------------------------

static void on_started(void *opaque, const char *url)
{
	struct server *s = opaque;
	const uint64_t one = 1;
	unsigned int port = 0;

	assert_int_equal(
		sscanf(url, s->config.tls ? "https://0.0.0.0:%u/mcp" : "http://127.0.0.1:%u/mcp",
			&port),
		1);
	s->port = (uint16_t)port;
	assert_int_equal(write(s->started_fd, &one, sizeof(one)), sizeof(one));
}

static void *server_main(void *opaque)
{
	struct server *s = opaque;

	s->rc = http_run(&s->config, on_started, s, &s->err);
	return NULL;
}

static void start_with_tls(uint64_t idle_ns, unsigned int rate, struct http_tls *tls)
{
	struct server *s = &server;
	uint64_t started;

	*s = (struct server){.started_fd = eventfd(0, EFD_CLOEXEC)};
	set_level("exec");
	mcp_client_program(dir, "exit 0");
	snprintf(s->machine.name, sizeof(s->machine.name), "box");
	snprintf(s->machine.dir, sizeof(s->machine.dir), "%s", dir);
	snprintf(s->machine.run_dir, sizeof(s->machine.run_dir), "%s", dir);
	snprintf(s->program, sizeof(s->program), "%s/mayfly", dir);
	s->machine.vsock = "vsock.sock";
	s->machine.program = s->program;
	s->how = (struct mcp_session){
		.machine = &s->machine,
		.outputs = outputs_create(),
		.watch = level_watch_create(dir, NULL),
		.ceiling = CONFIG_ACCESS_EXEC,
		.transport = "http",
		.stop_fd = eventfd(0, EFD_CLOEXEC),
	};
	s->config = (struct http_config){
		.how = &s->how,
		.address = tls ? "0.0.0.0:0" : "0",
		.tls = tls,
		.token = TOKEN,
		.idle_ns = idle_ns,
		.rate = rate,
	};
	assert_non_null(s->how.outputs);
	assert_int_equal(pthread_create(&s->thread, NULL, server_main, s), 0);
	assert_int_equal(read(s->started_fd, &started, sizeof(started)), sizeof(started));
}

static void start_with(uint64_t idle_ns, unsigned int rate)
{
	start_with_tls(idle_ns, rate, NULL);
}

static int start(void **state)
{
	(void)state;
	start_with(HTTP_IDLE_NS, 100000);
	return 0;
}

static int stop(void **state)
{
	const uint64_t one = 1;
	(void)state;

	assert_int_equal(write(server.how.stop_fd, &one, sizeof(one)), sizeof(one));
	assert_int_equal(pthread_join(server.thread, NULL), 0);
	if (server.rc < 0)
		fail_msg("%s", server.err.msg);
	fd_close(&server.how.stop_fd);
	fd_close(&server.started_fd);
	outputs_destroy(server.how.outputs);
	level_watch_destroy(server.how.watch);
	return 0;
}

// --- A client --------------------------------------------------------------------------------

struct answer {
	int status;
	char *text; // all of it, owned
	size_t len, cap;
	const char *body; // in text, and not chunked any more
	json_t *json; // owned; NULL if the body is none
};

static void answer_fini(struct answer *a)
{
	free(a->text);
	json_decref(a->json);
	*a = (struct answer){0};
}

static int dial_plain(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
		.sin_port = htons(server.port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(fd >= 0);
	assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	return fd;
}

static struct identity *trusted; // whose TLS we speak; NULL: none

static int chance(void *opaque, unsigned char *out, size_t len)
{
	(void)opaque;
	return getrandom(out, len, 0) == (ssize_t)len ? 0 : -1;
}

static int tls_send(void *opaque, const unsigned char *data, size_t len)
{
	ssize_t n = send(*(int *)opaque, data, len, MSG_NOSIGNAL);

	return n < 0 ? MBEDTLS_ERR_SSL_INTERNAL_ERROR : (int)n;
}

static int tls_receive(void *opaque, unsigned char *data, size_t len)
{
	ssize_t n = recv(*(int *)opaque, data, len, 0);

	return n < 0 ? MBEDTLS_ERR_SSL_INTERNAL_ERROR : (int)n;
}

// Passes on what is said at the other end of a pair, as TLS, until either side hangs up.
static void *tls_client(void *opaque)
{
	int plain_fd = (int)(intptr_t)opaque, fd = dial_plain();
	mbedtls_ssl_config config;
	mbedtls_ssl_context ssl;
	unsigned char bytes[4096];

	mbedtls_ssl_config_init(&config);
	mbedtls_ssl_init(&ssl);
	mbedtls_ssl_config_defaults(&config, MBEDTLS_SSL_IS_CLIENT, MBEDTLS_SSL_TRANSPORT_STREAM,
		MBEDTLS_SSL_PRESET_DEFAULT);
	mbedtls_ssl_conf_authmode(&config, MBEDTLS_SSL_VERIFY_REQUIRED);
	mbedtls_ssl_conf_ca_chain(&config, &trusted->cert, NULL);
	mbedtls_ssl_conf_rng(&config, chance, NULL);
	assert_int_equal(mbedtls_ssl_setup(&ssl, &config), 0);
	assert_int_equal(mbedtls_ssl_set_hostname(&ssl, "box.example"), 0);
	mbedtls_ssl_set_bio(&ssl, &fd, tls_send, tls_receive, NULL);
	assert_int_equal(mbedtls_ssl_handshake(&ssl), 0);
	for (;;) {
		struct pollfd p[2] = {
			{.fd = fd, .events = POLLIN}, {.fd = plain_fd, .events = POLLIN}};
		int n;

		if (!mbedtls_ssl_get_bytes_avail(&ssl))
			poll(p, 2, -1);
		if (p[0].revents || mbedtls_ssl_get_bytes_avail(&ssl)) {
			n = mbedtls_ssl_read(&ssl, bytes, sizeof(bytes));
			if (n <= 0 || fd_write_all(plain_fd, bytes, (size_t)n) < 0)
				break;
		}
		if (p[1].revents) {
			n = (int)recv(plain_fd, bytes, sizeof(bytes), 0);
			if (n <= 0 || mbedtls_ssl_write(&ssl, bytes, (size_t)n) != n)
				break;
		}
	}
	mbedtls_ssl_free(&ssl);
	mbedtls_ssl_config_free(&config);
	fd_close(&plain_fd);
	fd_close(&fd);
	return NULL;
}

static int dial(void)
{
	pthread_t thread;
	int pair[2];

	if (!trusted)
		return dial_plain();
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(pthread_create(&thread, NULL, tls_client, (void *)(intptr_t)pair[1]), 0);
	pthread_detach(thread);
	return pair[0];
}

static int send_request(const char *line, const char *headers, const char *body)
{
	char *text;
	int fd = dial(), len;

	len = asprintf(&text,
		"%s /mcp HTTP/1.1\r\nConnection: close\r\n%s%sContent-Length: %zu\r\n\r\n%s", line,
		strstr(headers, "Host:") ? "" : "Host: localhost\r\n", headers, strlen(body), body);
	assert_true(len > 0);
	assert_int_equal(fd_write_all(fd, text, (size_t)len), 0);
	free(text);
	return fd;
}

// Reads on; whether there was more.
static bool read_more(int fd, struct answer *a)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	ssize_t n;

	if (a->cap - a->len < 4097) {
		a->cap = 2 * a->cap + 16384;
		a->text = realloc(a->text, a->cap);
		assert_non_null(a->text);
	}
	if (poll(&p, 1, PATIENCE_MS) != 1)
		fail_msg("no answer");
	n = read(fd, a->text + a->len, 4096);
	if (n <= 0)
		return false;
	a->len += (size_t)n;
	a->text[a->len] = '\0';
	return true;
}

static bool has_header(const struct answer *a, const char *header)
{
	const char *found = strcasestr(a->text, header);

	return found && found < a->body;
}

// Until a stream has said that.
static void read_until(int fd, struct answer *a, const char *words)
{
	while (!a->text || !strstr(a->text, words))
		if (!read_more(fd, a))
			fail_msg("the stream ended: %s", a->text ? a->text : "");
}

// In place; what is there of it.
static void unchunk(char *body)
{
	char *from = body, *to = body;

	for (;;) {
		char *end;
		size_t n = strtoul(from, &end, 16);

		if (end == from || strncmp(end, "\r\n", 2) != 0 || n == 0)
			break;
		memmove(to, end + 2, n);
		to += n;
		from = end + 2 + n + 2;
	}
	*to = '\0';
}

// Everything up to the end of the connection.
static struct answer finish(int fd)
{
	struct answer a = {0};
	char *body;

	while (read_more(fd, &a))
		;
	fd_close(&fd);
	if (!a.len || sscanf(a.text, "HTTP/1.1 %d", &a.status) != 1)
		fail_msg("no answer: %s", a.len ? a.text : "");
	body = strstr(a.text, "\r\n\r\n");
	assert_non_null(body);
	a.body = body += 4;
	if (has_header(&a, "Transfer-Encoding: chunked"))
		unchunk(body);
	a.json = json_loads(a.body, 0, NULL);
	return a;
}

static struct answer request(const char *method, const char *headers, const char *body)
{
	return finish(send_request(method, headers, body));
}

static void expect(const char *method, const char *headers, const char *body, int status, int code)
{
	struct answer a = request(method, headers, body);
	int found = (int)json_integer_value(
		json_object_get(json_object_get(a.json, "error"), "code"));

	if (a.status != status || found != code)
		fail_msg("%s %s%s: %d, %d: %s", method, headers, body, a.status, found, a.body);
	answer_fini(&a);
}

#define RPC(id, method, params) \
	"{\"jsonrpc\":\"2.0\",\"id\":" id ",\"method\":\"" method "\",\"params\":" params "}"
#define HELLO                                                                              \
	RPC("1", "initialize",                                                             \
		"{\"protocolVersion\":\"2025-11-25\",\"capabilities\":{},\"clientInfo\":{" \
		"\"name\":\"t\",\"version\":\"1\"}}")
#define NOTICE "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}"
#define PING   RPC("2", "ping", "{}")

// A session's header, the caller's.
static char *begin_session(void)
{
	struct answer a = request("POST", POSTING, HELLO);
	char id[64], *header;

	assert_int_equal(a.status, 200);
	assert_string_equal(json_string_value(json_object_get(
				    json_object_get(a.json, "result"), "protocolVersion")),
		"2025-11-25");
	assert_true(has_header(&a, "Mcp-Session-Id: "));
	assert_int_equal(sscanf(strcasestr(a.text, "Mcp-Session-Id: ") + 16, "%63[0-9a-f]", id), 1);
	assert_int_equal(strlen(id), 32);
	assert_true(asprintf(&header, POSTING "Mcp-Session-Id: %s\r\n", id) > 0);
	answer_fini(&a);
	return header;
}

#define META                                    \
	"\"_meta\":{\"io.modelcontextprotocol/" \
	"protocolVersion\":\"2026-07-28\",\"io.modelcontextprotocol/clientCapabilities\":{}}"
#define MODERN POSTING "MCP-Protocol-Version: 2026-07-28\r\n"

static void sleeper(char ret[600], const char *meta)
{
	snprintf(ret, 600,
		RPC("7", "tools/call",
			"{\"name\":\"exec\",\"arguments\":{\"argv\":[\"sh\",\"-c\",\"sleep 1000 & "
			"echo $! "
			">%s/pid.new; mv %s/pid.new %s/pid; wait\"]}%s%s}"),
		dir, dir, dir, *meta ? "," : "", meta);
}

static void eventually(bool (*is)(void))
{
	const uint64_t deadline_ns = now_ns() + PATIENCE_MS * 1000000ULL;

	while (!is()) {
		if (now_ns() > deadline_ns)
			fail_msg("it did not happen");
		poll(NULL, 0, 5);
	}
}

static bool pid_is_there(void)
{
	struct stat st;

	return stat(at("pid"), &st) == 0 && st.st_size > 0;
}

static bool process_is_gone(void)
{
	char command[400];

	snprintf(command, sizeof(command),
		"! grep -qE '^State:.[^ZX]' /proc/$(cat %s/pid)/status 2>/dev/null", dir);
	return system(command) == 0;
}

// --- Who may come ----------------------------------------------------------------------------

static void only_who_bears_the_token(void **state)
{
	char *big = malloc(5 * MIB);
	struct answer a;
	int fd;
	(void)state;

	expect("POST", BOTH "Content-Type: application/json\r\n", HELLO, 401, -32600);
	expect("POST", "Authorization: Bearer 0123456789abcdef0123456789abcdeF\r\n", HELLO, 401,
		-32600);
	expect("POST", "Authorization: Bearer \r\n", HELLO, 401, -32600);
	expect("POST", "Authorization: Basic " TOKEN "\r\n", HELLO, 401, -32600);
	expect("POST", POSTING "Host: evil.example\r\n", HELLO, 403, -32600);
	expect("POST", POSTING "Host: 127.0.0.1.evil.example\r\n", HELLO, 403, -32600);
	expect("POST", POSTING "Host: 192.0.2.1:80\r\n", HELLO, 403, -32600);
	expect("POST", POSTING "Origin: http://evil.example\r\n", HELLO, 403, -32600);
	expect("POST", POSTING "Origin: null\r\n", HELLO, 403, -32600);
	expect("POST", POSTING "Host: 127.0.0.1:1\r\nOrigin: http://localhost:3000\r\n", HELLO, 200,
		0);
	expect("PUT", POSTING, HELLO, 405, -32600);
	expect("POST", BEARER BOTH "Content-Type: text/plain\r\n", HELLO, 415, -32600);
	expect("POST", BEARER "Content-Type: application/json\r\nAccept: application/json\r\n",
		HELLO, 406, -32600);
	expect("POST", POSTING, "", 400, -32700);
	expect("POST", POSTING, "[" HELLO "]", 400, -32600);
	expect("POST", POSTING, "{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}", 400, -32600);

	// Too long, said before and not said before.
	assert_non_null(big);
	memset(big, ' ', 5 * MIB - 1);
	big[5 * MIB - 1] = '\0';
	fd = dial();
	assert_true(dprintf(fd, "POST /mcp HTTP/1.1\r\nHost: localhost\r\n" POSTING
				"Connection: close\r\nContent-Length: 99999999\r\n\r\n") > 0);
	a = finish(fd);
	assert_int_equal(a.status, 413);
	answer_fini(&a);
	fd = dial();
	assert_true(dprintf(fd,
			    "POST /mcp HTTP/1.1\r\nHost: localhost\r\n" POSTING
			    "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n%zx\r\n",
			    strlen(big)) > 0);
	assert_int_equal(fd_write_all(fd, big, strlen(big)), 0);
	assert_int_equal(fd_write_all(fd, "\r\n0\r\n\r\n", 7), 0);
	a = finish(fd);
	assert_int_equal(a.status, 413);
	answer_fini(&a);
	free(big);
}

// As deep as JSON may be, and deeper.
static void deep_messages(void **state)
{
	static const struct {
		int depth, status;
	} cases[] = {{2000, 400}, {4000, 400}, {100000, 400}};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		size_t depth = (size_t)cases[i].depth;
		char *body = malloc(2 * depth + 100);
		int n;

		assert_non_null(body);
		n = sprintf(body,
			"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{\"x\":");
		memset(body + n, '[', depth);
		memset(body + n + depth, ']', depth);
		memcpy(body + n + 2 * depth, "}}", 3);
		// The first one is a message, but of no session.
		expect("POST", POSTING, body, cases[i].status, i == 0 ? -32600 : -32700);
		free(body);
	}
}

static void no_more_than_so_many_a_second(void **state)
{
	int busy = 0;
	(void)state;

	start_with(HTTP_IDLE_NS, 1);
	for (int i = 0; i < 200 && !busy; i++) { // far more than one a second
		struct answer a = request("POST", POSTING, PING);

		busy += a.status == 429;
		assert_true(a.status == 429 || a.status == 400);
		answer_fini(&a);
	}
	stop(NULL);
	assert_int_equal(busy, 1);
}

static void addresses(void **state)
{
	static const char *const bad[] = {"0.0.0.0:80", "192.0.2.1:80", "example.org:80", "x", "",
		"127.0.0.1:", "127.0.0.1:65536", "[::]:80", ":80"};
	struct http_config config = server.config;
	struct err err;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		config.address = bad[i];
		assert_int_equal(http_run(&config, on_started, &server, &err), -EINVAL);
		assert_non_null(strstr(err.msg, "http: "));
	}
}

static void the_token_file(void **state)
{
	char token[HTTP_TOKEN_BYTES], again[HTTP_TOKEN_BYTES];
	const char *path = at("token");
	struct err err = {0};
	struct stat st;
	int fd;
	(void)state;

	assert_int_equal(http_token_load(path, false, token, &err), -ENOENT);
	assert_int_equal(http_token_load(path, true, token, &err), 0);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(strlen(token), 64);
	assert_int_equal(http_token_load(path, true, again, &err), 0);
	assert_string_equal(token, again);
	assert_int_equal(chmod(path, 0640), 0);
	assert_int_equal(http_token_load(path, true, again, &err), -EPERM);
	assert_non_null(strstr(err.msg, "chmod 600"));
	assert_int_equal(chmod(path, 0600), 0);
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	assert_true(dprintf(fd, "short\n") > 0);
	assert_int_equal(http_token_load(path, true, again, &err), -EINVAL);
	assert_int_equal(ftruncate(fd, 0), 0);
	assert_int_equal(http_token_load(path, true, again, &err), -EINVAL);
	assert_int_equal(ftruncate(fd, 300), 0);
	assert_int_equal(http_token_load(path, true, again, &err), -EINVAL);
	fd_close(&fd);
	unlink(path);
}

// --- 2025-11-25 ------------------------------------------------------------------------------

static void a_session(void **state)
{
	char *session = begin_session(), headers[600];
	struct answer a;
	(void)state;

	expect("POST", session, NOTICE, 202, 0);
	expect("POST", session, PING, 200, 0);
	snprintf(headers, sizeof(headers), "%sMCP-Protocol-Version: 2025-06-18\r\n", session);
	expect("POST", headers, "{\n \"jsonrpc\": \"2.0\",\n \"id\": 2, \"method\": \"ping\"}\n",
		200, 0);
	snprintf(headers, sizeof(headers), "%sMCP-Protocol-Version: 1900-01-01\r\n", session);
	expect("POST", headers, PING, 400, -32022);
	expect("POST", session, RPC("3", "no/such", "{}"), 200, -32601);
	a = request("POST", session,
		RPC("\"four\"", "tools/call",
			"{\"name\":\"exec\",\"arguments\":{\"argv\":[\"printf\",\"\\\\303\\\\251\"]"
			"}}"));
	assert_int_equal(a.status, 200);
	assert_true(has_header(&a, "Content-Type: application/json"));
	assert_non_null(strstr(a.body, "\"stdout\":\"\303\251\""));
	assert_string_equal(json_string_value(json_object_get(a.json, "id")), "four");
	answer_fini(&a);

	expect("POST", POSTING, PING, 400, -32600);
	expect("POST", POSTING "Mcp-Session-Id: 00000000000000000000000000000000\r\n", PING, 404,
		-32600);
	expect("GET", BEARER BOTH, "", 405, -32600);
	expect("DELETE", BEARER, "", 405, -32600);
	expect("DELETE", session, "", 204, 0);
	expect("POST", session, PING, 404, -32600);
	expect("DELETE", session, "", 404, -32600);
	expect("GET", session, "", 404, -32600);
	free(session);
	// An initialize that fails leaves no session.
	a = request("POST", POSTING, RPC("1", "initialize", "{}"));
	assert_int_equal(
		json_integer_value(json_object_get(json_object_get(a.json, "error"), "code")),
		-32602);
	assert_false(has_header(&a, "Mcp-Session-Id"));
	answer_fini(&a);
}

static void a_stream_tells_of_changes(void **state)
{
	char *session = begin_session();
	struct answer a = {0};
	int fd = send_request("GET", session, "");
	(void)state;

	read_until(fd, &a, "text/event-stream");
	expect("GET", session, "", 409, -32600);
	set_level("observe");
	read_until(fd, &a,
		"data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}\n\n");
	// It ends with the session.
	expect("DELETE", session, "", 204, 0);
	while (read_more(fd, &a))
		;
	fd_close(&fd);
	answer_fini(&a);
	free(session);
}

// Of both revisions, each on its own stream.
static void resources_are_watched(void **state)
{
	static const char script[] =
		"cd %s && echo x >console.log && { (while :; do echo x >>console.log; sleep "
		"0.05; done) & echo $! >changer; }";
	char *session = begin_session(), command[300];
	struct answer a = {0}, modern = {0};
	int fd = send_request("GET", session, ""), modern_fd;
	(void)state;

	read_until(fd, &a, "text/event-stream");
	snprintf(command, sizeof(command), script, dir);
	assert_int_equal(system(command), 0);
	expect("POST", session, RPC("5", "resources/subscribe", "{\"uri\":\"mayfly://console\"}"),
		200, 0);
	read_until(fd, &a,
		"\"notifications/resources/updated\",\"params\":{\"uri\":\"mayfly://console\"}}");
	modern_fd = send_request("POST", MODERN "Mcp-Method: subscriptions/listen\r\n",
		RPC("\"s\"", "subscriptions/listen",
			"{\"notifications\":{\"resourceSubscriptions\":[\"mayfly://"
			"console\"]}," META "}"));
	read_until(modern_fd, &modern, "notifications/subscriptions/acknowledged");
	read_until(modern_fd, &modern, "notifications/resources/updated");
	assert_non_null(strstr(modern.text, "subscriptionId\":\"s\""));
	expect("POST", session, RPC("6", "resources/unsubscribe", "{\"uri\":\"mayfly://console\"}"),
		200, 0);
	expect("DELETE", session, "", 204, 0);
	snprintf(command, sizeof(command), "kill $(cat %s)", at("changer"));
	assert_int_equal(system(command), 0);
	fd_close(&fd);
	fd_close(&modern_fd);
	answer_fini(&a);
	answer_fini(&modern);
	free(session);
}

static void progress_comes_in_the_stream_of_its_call(void **state)
{
	char *session = begin_session(), body[600];
	struct answer a = {0};
	int fd;
	(void)state;

	snprintf(body, sizeof(body),
		RPC("8", "tools/call",
			"{\"name\":\"exec\",\"_meta\":{\"progressToken\":\"tok\"},\"arguments\":{"
			"\"argv\":["
			"\"sh\",\"-c\",\"until [ -e %s/go ]; do sleep 0.05; done; echo went\"]}}"),
		dir);
	fd = send_request("POST", session, body);
	read_until(fd, &a, "\"progressToken\":\"tok\"");
	assert_non_null(strcasestr(a.text, "Content-Type: text/event-stream"));
	// Others do not wait for it.
	expect("POST", session, PING, 200, 0);
	close(open(at("go"), O_CREAT | O_CLOEXEC, 0600));
	read_until(fd, &a, "went");
	while (read_more(fd, &a)) // and the stream ends
		;
	fd_close(&fd);
	unlink(at("go"));
	answer_fini(&a);
	free(session);
}

static void the_silent_make_room(void **state)
{
	char *first = begin_session(), *others[HTTP_SESSIONS_MAX];
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(others); i++)
		others[i] = begin_session();
	expect("POST", first, PING, 404, -32600);
	for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
		expect("POST", others[i], PING, 200, 0);
		free(others[i]);
	}
	free(first);
}

static void sessions_in_use_do_not(void **state)
{
	int fds[HTTP_SESSIONS_MAX];
	struct answer a = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		char *session = begin_session();

		fds[i] = send_request("GET", session, "");
		read_until(fds[i], &a, "text/event-stream");
		answer_fini(&a);
		free(session);
	}
	expect("POST", POSTING, HELLO, 503, -32000);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		fd_close(&fds[i]);
}

static char *forgotten;

static bool is_forgotten(void)
{
	struct answer a = request("POST", forgotten, PING);
	int status = a.status;

	answer_fini(&a);
	return status == 404;
}

static void a_session_that_nobody_uses_expires(void **state)
{
	(void)state;
	start_with(1, 100000);
	forgotten = begin_session();
	eventually(is_forgotten);
	free(forgotten);
	stop(NULL);
}

// Leaving is no cancellation in this revision; ending the session is.
static void deleting_a_session_kills(void **state)
{
	char *session = begin_session(), body[600];
	int fd;
	(void)state;

	unlink(at("pid"));
	sleeper(body, "");
	fd = send_request("POST", session, body);
	eventually(pid_is_there);
	expect("POST", session, body, 400, -32600); // the same id
	fd_close(&fd);
	expect("POST", session, PING, 200, 0);
	assert_false(process_is_gone());
	expect("DELETE", session, "", 204, 0);
	eventually(process_is_gone);
	free(session);
}

// --- 2026-07-28 ------------------------------------------------------------------------------

static void without_a_session(void **state)
{
	static const char list[] = RPC("1", "tools/list", "{" META "}");
	static const char status[] = RPC("1", "tools/call", "{\"name\":\"status\"," META "}");
	struct answer a;
	(void)state;

	a = request("POST", MODERN "mcp-method:   tools/list  \r\n", list);
	assert_int_equal(a.status, 200);
	assert_string_equal(
		json_string_value(json_object_get(json_object_get(a.json, "result"), "resultType")),
		"complete");
	answer_fini(&a);
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: status\r\n", status, 200, 0);
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: =?base64?c3RhdHVz?=\r\n", status,
		200, 0);
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: =?base64?c3RhdHVyz?=\r\n",
		status, 400, -32020);
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: Status\r\n", status, 400,
		-32020);
	expect("POST", MODERN "Mcp-Method: tools/call\r\n", status, 400, -32020);
	expect("POST", MODERN, list, 400, -32020);
	expect("POST", MODERN "Mcp-Method: Tools/list\r\n", list, 400, -32020);
	expect("POST", POSTING "Mcp-Method: tools/list\r\n", list, 400, -32020);
	expect("POST", POSTING "MCP-Protocol-Version: 2025-11-25\r\nMcp-Method: tools/list\r\n",
		list, 400, -32020);
	expect("POST", MODERN "Mcp-Method: tools/list\r\n", RPC("1", "tools/list", "{}"), 400,
		-32602);
	expect("POST", MODERN "Mcp-Method: tools/list\r\n",
		RPC("1", "tools/list",
			"{\"_meta\":{\"io.modelcontextprotocol/protocolVersion\":\"2026-07-28\"}}"),
		400, -32602);
	a = request("POST",
		POSTING "MCP-Protocol-Version: 2099-01-01\r\nMcp-Method: tools/list\r\n",
		RPC("1", "tools/list",
			"{\"_meta\":{\"io.modelcontextprotocol/protocolVersion\":\"2099-01-01\","
			"\"io.modelcontextprotocol/clientCapabilities\":{}}}"));
	assert_int_equal(a.status, 400);
	assert_non_null(strstr(a.body, "-32022"));
	assert_non_null(strstr(a.body, "\"requested\":\"2099-01-01\""));
	answer_fini(&a);
	expect("POST", MODERN "Mcp-Method: ping\r\n", RPC("1", "ping", "{" META "}"), 404, -32601);
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: none\r\n",
		RPC("1", "tools/call", "{\"name\":\"none\"," META "}"), 200, -32602);
	expect("POST", MODERN, NOTICE, 202, 0);
	expect("GET", MODERN, "", 405, -32600);
}

static void a_subscription_is_a_stream(void **state)
{
	struct answer a = {0};
	int fd = send_request("POST", MODERN "Mcp-Method: subscriptions/listen\r\n",
		RPC("5", "subscriptions/listen",
			"{\"notifications\":{\"toolsListChanged\":true}," META "}"));
	(void)state;

	read_until(fd, &a, "notifications/subscriptions/acknowledged");
	assert_non_null(strcasestr(a.text, "Content-Type: text/event-stream"));
	set_level("manage");
	read_until(fd, &a, "notifications/tools/list_changed");
	fd_close(&fd);
	answer_fini(&a);
}

static void leaving_cancels(void **state)
{
	char body[600];
	int fd;
	(void)state;

	unlink(at("pid"));
	sleeper(body, META);
	fd = send_request("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: exec\r\n", body);
	eventually(pid_is_there);
	fd_close(&fd);
	eventually(process_is_gone);
}

// --- The server's end ------------------------------------------------------------------------

static void its_end_is_everybodys(void **state)
{
	char *session, body[600];
	struct answer a = {0};
	int stream, call, idle;
	(void)state;

	start(NULL);
	session = begin_session();
	unlink(at("pid"));
	sleeper(body, "");
	stream = send_request("GET", session, "");
	read_until(stream, &a, "text/event-stream");
	call = send_request("POST", session, body);
	idle = dial();
	eventually(pid_is_there);
	stop(NULL);
	eventually(process_is_gone);
	fd_close(&stream);
	fd_close(&call);
	fd_close(&idle);
	answer_fini(&a);
	free(session);
}

static int nr_fds(void)
{
	DIR *fds = opendir("/proc/self/fd");
	int nr = 0;

	assert_non_null(fds);
	while (readdir(fds))
		nr++;
	closedir(fds);
	return nr;
}

static void nothing_is_left_open(void **state)
{
	int before = nr_fds();
	(void)state;

	start(NULL);
	for (int i = 0; i < 20; i++) {
		char *session = begin_session();

		expect("POST", session, PING, 200, 0);
		expect("POST", MODERN "Mcp-Method: tools/list\r\n",
			RPC("1", "tools/list", "{" META "}"), 200, 0);
		free(session);
	}
	stop(NULL);
	assert_int_equal(nr_fds(), before);
}

// Several requests, one after the other, on a connection.
static void a_connection_lives_on(void **state)
{
	struct answer a = {0};
	int fd = dial();
	(void)state;

	for (int i = 0; i < 3; i++) {
		static const char body[] = RPC("1", "tools/list", "{" META "}");

		assert_true(dprintf(fd,
				    "POST /mcp HTTP/1.1\r\nHost: localhost\r\n" MODERN
				    "Mcp-Method: tools/list\r\nContent-Length: %zu\r\n\r\n%s",
				    sizeof(body) - 1, body) > 0);
		read_until(fd, &a, "\"resultType\":\"complete\"");
		assert_int_equal(strncmp(a.text, "HTTP/1.1 200", 12), 0);
		answer_fini(&a);
	}
	fd_close(&fd);
}

static int count_http(void *opaque, const json_t *record)
{
	const char *transport = json_string_value(json_object_get(record, "transport"));

	*(int *)opaque += transport && !strcmp(transport, "http");
	return 0;
}

static void calls_are_written_down(void **state)
{
	struct err err = {0};
	int seen = 0;
	(void)state;

	unlink(at("audit.jsonl"));
	expect("POST", MODERN "Mcp-Method: tools/call\r\nMcp-Name: status\r\n",
		RPC("1", "tools/call", "{\"name\":\"status\"," META "}"), 200, 0);
	if (audit_each(dir, count_http, &seen, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(seen, 1);
}

static void write_file(const char *name, const char *text, mode_t mode)
{
	CLEANUP_FD int fd = open(at(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);

	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	assert_int_equal(fchmod(fd, mode), 0);
}

// The same over TLS: answers, streams, and hanging up.
static void with_tls(void **state)
{
	static struct identity id, other;
	char key[2048];
	struct http_tls *tls = NULL;
	struct err err = {0};
	struct answer a;
	unsigned char byte;
	int fd;

	identity_make(&id, "box.example", "20991231000000");
	identity_make(&other, "box.example", "20991231000000");
	assert_int_equal(mbedtls_pk_write_key_pem(&id.key, (unsigned char *)key, sizeof(key)), 0);
	write_file("cert.pem", id.pem, 0644);
	write_file("key.pem", key, 0644);
	assert_int_equal(http_tls_load(at("cert.pem"), at("key.pem"), &tls, &err), -EPERM);
	write_file("key.pem", key, 0600);
	write_file("other.pem", other.pem, 0644);
	assert_int_equal(http_tls_load(at("other.pem"), at("key.pem"), &tls, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "not the key"));
	assert_int_equal(http_tls_load(at("key.pem"), at("key.pem"), &tls, &err), -EINVAL);
	assert_int_equal(http_tls_load(at("cert.pem"), at("cert.pem"), &tls, &err), -EPERM);
	assert_int_equal(http_tls_load(at("none.pem"), at("key.pem"), &tls, &err), -ENOENT);
	if (http_tls_load(at("cert.pem"), at("key.pem"), &tls, &err) < 0)
		fail_msg("%s", err.msg);
	start_with_tls(HTTP_IDLE_NS, 100000, tls);

	// Whoever does not speak it gets nothing.
	fd = send_request("POST", POSTING, PING);
	while (read(fd, &byte, 1) > 0)
		assert_int_not_equal(byte, 'H');
	fd_close(&fd);

	trusted = &id;
	expect("POST", BOTH "Content-Type: application/json\r\n", HELLO, 401, RPC_INVALID_REQUEST);
	a = request(
		"POST", POSTING "Host: box.example:1\r\nOrigin: https://box.example:1\r\n", HELLO);
	assert_int_equal(a.status, 200);
	answer_fini(&a);
	expect("POST", POSTING "Host: box.example:1\r\nOrigin: https://box.example:2\r\n", HELLO,
		403, RPC_INVALID_REQUEST);
	a_session(state);
	a_stream_tells_of_changes(state);
	set_level("exec");
	progress_comes_in_the_stream_of_its_call(state);
	leaving_cancels(state);
	stop(state);
	trusted = NULL;
	identity_free(&other); // a client's thread may still hold the first
}

static int group_start(void **state)
{
	FILE *f;
	(void)state;

	signal(SIGPIPE, SIG_IGN);
	assert_non_null(mkdtemp(dir));
	f = fopen(at("vm.ini"), "we");
	assert_non_null(f);
	fputs("[machine]\n", f);
	fclose(f);
	fake_guest_start(dir);
	return 0;
}

static int group_stop(void **state)
{
	char command[100];
	(void)state;

	fake_guest_stop();
	snprintf(command, sizeof(command), "rm -rf %s", dir);
	return system(command);
}

#define with_server(test) cmocka_unit_test_setup_teardown(test, start, stop)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		with_server(only_who_bears_the_token),
		with_server(deep_messages),
		cmocka_unit_test(no_more_than_so_many_a_second),
		with_server(addresses),
		cmocka_unit_test(the_token_file),
		with_server(a_session),
		with_server(a_stream_tells_of_changes),
		with_server(resources_are_watched),
		with_server(progress_comes_in_the_stream_of_its_call),
		with_server(the_silent_make_room),
		with_server(sessions_in_use_do_not),
		cmocka_unit_test(a_session_that_nobody_uses_expires),
		with_server(deleting_a_session_kills),
		with_server(without_a_session),
		with_server(a_subscription_is_a_stream),
		with_server(leaving_cancels),
		cmocka_unit_test(its_end_is_everybodys),
		cmocka_unit_test(nothing_is_left_open),
		with_server(a_connection_lives_on),
		with_server(calls_are_written_down),
		cmocka_unit_test(with_tls),
	};
	int status = fake_guest_main(argc, argv);

	return status >= 0 ? status : cmocka_run_group_tests(tests, group_start, group_stop);
}
