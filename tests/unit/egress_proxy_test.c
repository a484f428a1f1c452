// SPDX-License-Identifier: Apache-2.0
// egress/proxy: what goes through, what is refused with which reason, that lists are in force at
// once, and that each request is told. On Unix sockets, against a server of our own on the loopback
// interface, which has to be named for that.
#include "tests/support/test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "egress/proxy.h"
#include "tests/support/hello_make.h"
#include "tests/support/tls_server.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

#define LIMIT_MS 20000

static char dir[] = "/tmp/mayfly-proxy-XXXXXX";
static char hosts[64];
static int channel, listener;
static pthread_t proxy, server;
static int server_fd;
static uint16_t port;
static unsigned int requests; // that the server has seen

// --- A server: says what it was asked, or what it was told ----------------------------------

static void *serve_one(void *arg)
{
	int fd = (int)(intptr_t)arg;
	char text[8192], head[256];
	size_t len = 0;
	ssize_t n;

	while (len < sizeof(text) - 1 && (n = read(fd, text + len, sizeof(text) - 1 - len)) > 0) {
		const bool http = text[0] == 'G' || text[0] == 'P';

		len += (size_t)n;
		text[len] = '\0';
		if (!http) {
			if (fd_write_all(fd, text, len) < 0)
				break;
			len = 0;
		} else if (strstr(text, "\r\n\r\n")) {
			// Whatever else comes at once is seen, too.
			struct pollfd p = {.fd = fd, .events = POLLIN};

			if (strstr(text, "Content-Length: 3") && !strstr(text, "\r\n\r\nabc"))
				continue;
			if (poll(&p, 1, 50) > 0 && (p.revents & POLLIN) &&
				(n = recv(fd, text + len, sizeof(text) - 1 - len, MSG_DONTWAIT)) >
					0)
				len += (size_t)n;
			__atomic_add_fetch(&requests, 1, __ATOMIC_SEQ_CST);
			snprintf(head, sizeof(head),
				"HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", len);
			if (fd_write_all(fd, head, strlen(head)) == 0)
				(void)fd_write_all(fd, text, len);
			break;
		}
	}
	fd_close(&fd);
	return NULL;
}

static void *serve(void *arg)
{
	const int from = (int)(intptr_t)arg;
	int fd;

	while ((fd = accept4(from, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		pthread_t thread;

		assert_int_equal(pthread_create(&thread, NULL, serve_one, (void *)(intptr_t)fd), 0);
		pthread_detach(thread);
	}
	return NULL;
}

// On 127.0.0.1; -1 where the port is not to be had.
static int listen_tcp(uint16_t want, uint16_t *ret_port)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
		.sin_port = htons(want),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(addr);
	CLEANUP_FD int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int on = 1;

	assert_true(fd >= 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0 || listen(fd, 64) < 0)
		return -1;
	assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
	*ret_port = ntohs(addr.sin_port);
	return TAKE_FD(fd);
}

// --- The proxy -------------------------------------------------------------------------------

static int theirs;
static struct secrets secrets;
static char authorities[128];

static void *run_proxy(void *arg)
{
	struct proxy_params params = {.listen_fd = listener,
		.channel_fd = theirs,
		.hosts_path = hosts,
		.secrets = &secrets,
		.authorities_path = authorities};
	struct err err = {0};
	(void)arg;

	return (void *)(intptr_t)proxy_run(&params, &err);
}

static json_t *record(void)
{
	char text[PROXY_PACKET_BYTES];
	struct pollfd p = {.fd = channel, .events = POLLIN};
	ssize_t n;
	json_t *json;

	assert_int_equal(poll(&p, 1, LIMIT_MS), 1);
	n = recv(channel, text, sizeof(text), 0);
	assert_true(n > 0);
	json = json_loadb(text, (size_t)n, 0, NULL);
	assert_non_null(json);
	return json;
}

static const char *word(const json_t *json, const char *key)
{
	const char *text = json_string_value(json_object_get(json, key));

	return text ? text : "";
}

// The next record is of that decision, and its reason holds that.
static void expect(const char *decision, const char *reason)
{
	json_t *json = record();

	assert_string_equal(word(json, "decision"), decision);
	if (!strstr(word(json, "reason"), reason))
		fail_msg("'%s' lacks '%s'", word(json, "reason"), reason);
	json_decref(json);
}

// %d stands for the server's port.
static unsigned int set_list(const char *format)
{
	char list[512];
	json_t *json;
	unsigned int cut;

	list[0] = 'L';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	snprintf(list + 1, sizeof(list) - 1, format, port, port);
#pragma GCC diagnostic pop
	assert_int_equal(send(channel, list, strlen(list), 0), (ssize_t)strlen(list));
	for (;;) { // those that were cut may come before
		json = record();
		if (!strcmp(word(json, "event"), "applied"))
			break;
		json_decref(json);
	}
	cut = (unsigned int)json_integer_value(json_object_get(json, "cut"));
	json_decref(json);
	return cut;
}

static int start(void **state)
{
	int fds[2], fd;
	struct err err = {0};
	(void)state;

	strcpy(dir + strlen(dir) - 6, "XXXXXX");
	assert_non_null(mkdtemp(dir));
	snprintf(hosts, sizeof(hosts), "%s/hosts", dir);
	fd = open(hosts, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0 &&
		    dprintf(fd, "127.0.0.1 a.test other.test\n169.254.169.254 meta.test\n") > 0);
	fd_close(&fd);
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
	channel = fds[0];
	theirs = fds[1];
	listener = unix_listen(dir, "sock", 100, &err);
	assert_true(listener >= 0);
	server_fd = listen_tcp(0, &port);
	assert_true(server_fd >= 0);
	assert_int_equal(pthread_create(&server, NULL, serve, (void *)(intptr_t)server_fd), 0);
	assert_int_equal(pthread_create(&proxy, NULL, run_proxy, NULL), 0);
	requests = 0;
	return 0;
}

static int stop(void **state)
{
	char path[128];
	void *result;
	(void)state;

	fd_close(&channel);
	assert_int_equal(pthread_join(proxy, &result), 0);
	assert_int_equal((int)(intptr_t)result, 0);
	shutdown(server_fd, SHUT_RDWR);
	pthread_join(server, NULL);
	fd_close(&server_fd);
	fd_close(&theirs);
	fd_close(&listener);
	snprintf(path, sizeof(path), "%s/sock", dir);
	unlink(path);
	unlink(hosts);
	assert_int_equal(rmdir(dir), 0);
	return 0;
}

// --- The guest -------------------------------------------------------------------------------

static int guest(void)
{
	const struct timeval limit = {.tv_sec = LIMIT_MS / 1000};
	struct err err = {0};
	int fd = unix_connect(dir, "sock", &err);

	assert_true(fd >= 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	return fd;
}

// Sends a request, in which %d is the server's port, and returns all of the answer.
static const char *ask(const char *format)
{
	static char answer[16384];
	char text[4096];
	int fd = guest();
	ssize_t n;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	snprintf(text, sizeof(text), format, port, port, port);
#pragma GCC diagnostic pop
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	n = fd_read_full(fd, answer, sizeof(answer) - 1);
	assert_true(n >= 0);
	answer[n] = '\0';
	fd_close(&fd);
	return answer;
}

static void has(const char *text, const char *part)
{
	if (!strstr(text, part))
		fail_msg("'%s' lacks '%s'", text, part);
}

static void read_exactly(int fd, const void *wanted, size_t len)
{
	uint8_t got[4096];

	assert_true(len <= sizeof(got));
	assert_int_equal(fd_read_full(fd, got, len), (ssize_t)len);
	assert_memory_equal(got, wanted, len);
}

static int tunnel(const char *format)
{
	static const char ok[] = "HTTP/1.1 200 Connection established\r\n\r\n";
	char text[512];
	int fd = guest();

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	snprintf(text, sizeof(text), format, port, port);
#pragma GCC diagnostic pop
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	read_exactly(fd, ok, strlen(ok));
	return fd;
}

#define CONNECT "CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"

// --- Tests -----------------------------------------------------------------------------------

static void plain_requests(void **state)
{
	json_t *json;
	const char *answer;
	(void)state;

	set_list("127.0.0.1:%d");
	answer = ask("GET http://127.0.0.1:%d/x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
		     "Proxy-Authorization: mine\r\n\r\n");
	has(answer, "200 OK");
	has(answer, "GET /x HTTP/1.1\r\nHost: 127.0.0.1:");
	assert_null(strstr(answer, "mine"));
	json = record();
	assert_string_equal(word(json, "decision"), "admitted");
	assert_string_equal(word(json, "address"), "127.0.0.1");
	json_decref(json);
	json = record();
	assert_string_equal(word(json, "decision"), "ended");
	assert_string_equal(word(json, "reason"), "done");
	assert_int_equal(
		json_integer_value(json_object_get(json, "bytes_in")), (int)strlen(answer));
	json_decref(json);
}

static void a_second_request_goes_nowhere(void **state)
{
	const char *answer;
	(void)state;

	set_list("127.0.0.1:%d");
	answer = ask("POST http://127.0.0.1:%d/first HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
		     "Content-Length: 3\r\n\r\nabcGET /second HTTP/1.1\r\nHost: other\r\n\r\n");
	has(answer, "/first");
	has(answer, "\r\n\r\nabc");
	assert_null(strstr(answer, "second"));
	expect("admitted", "");
	expect("ended", "");
	assert_int_equal(requests, 1);
}

static void what_is_not_on_the_list(void **state)
{
	(void)state;

	set_list("127.0.0.1:%d b.test");
	has(ask("GET http://c.test/ HTTP/1.1\r\nHost: c.test\r\n\r\n"), "403 Forbidden");
	expect("denied", "c.test:80 is not on this machine's list");
	has(ask("GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"), "403 ");
	expect("denied", "127.0.0.1:1 is not");
	has(ask("CONNECT 127.0.0.2:%d HTTP/1.1\r\n\r\n"), "400 "); // no Host
	expect("denied", "Host");
	has(ask("CONNECT 127.0.0.2:%d HTTP/1.0\r\n\r\n"), "403 ");
	expect("denied", "127.0.0.2:");
	has(ask("CONNECT [::1]:%d HTTP/1.0\r\n\r\n"), "403 ");
	expect("denied", "::1:");
	has(ask("CONNECT 169.254.169.254:443 HTTP/1.0\r\n\r\n"), "403 ");
	expect("denied", "169.254.169.254");
	has(ask("CONNECT b.test:80 HTTP/1.0\r\n\r\n"), "403 ");
	expect("denied", "no CONNECT to port 80");
	has(ask("GET http://b.test:443/ HTTP/1.0\r\n\r\n"), "403 ");
	expect("denied", "443");
	has(ask("GET / HTTP/1.1\r\nHost: b.test\r\n\r\n"), "400 ");
	expect("denied", "this is a proxy");
	has(ask("PUT http://b.test/ HTTP/1.1\r\nHost: b.test\r\nTransfer-Encoding: "
		"chunked\r\n\r\n"),
		"411 ");
	expect("denied", "Transfer-Encoding");
	has(ask("\x05\x01\n"), "400 ");
	expect("denied", "proxy for HTTP");
	assert_int_equal(requests, 0);
}

static void names_that_lead_inside(void **state)
{
	(void)state;

	set_list("a.test:%d *.test");
	has(ask("GET http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n"), "403 ");
	expect("denied", "a.test is 127.0.0.1, which is loopback");
	has(ask("GET http://meta.test/ HTTP/1.1\r\nHost: meta.test\r\n\r\n"), "403 ");
	expect("denied", "meta.test is 169.254.169.254, which is link-local");
	assert_int_equal(requests, 0);
	// Both are named.
	set_list("a.test:%d 127.0.0.1:%d");
	has(ask("GET http://A.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n"), "Host: a.test:");
	expect("admitted", "");
	expect("ended", "");
	// The address alone is not the name.
	set_list("127.0.0.1:%d");
	has(ask("GET http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n"), "403 ");
	expect("denied", "a.test:");
	assert_int_equal(requests, 1);
}

static void methods(void **state)
{
	(void)state;

	set_list("GET@a.test:%d 127.0.0.1:%d");
	has(ask("GET http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\n\r\n"), "Host: a.test:");
	expect("admitted", "");
	expect("ended", "");
	has(ask("POST http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\nContent-Length: "
		"0\r\n\r\n"),
		"403 ");
	expect("denied", "POST@a.test:");
	has(ask("CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n"), "403 ");
	expect("denied", "inside a tunnel none is seen");
	assert_int_equal(requests, 1);
	// An address that is named for one method is not named for another.
	set_list("a.test:%d GET@127.0.0.1:%d");
	has(ask("POST http://a.test:%d/ HTTP/1.1\r\nHost: a.test:%d\r\nContent-Length: "
		"0\r\n\r\n"),
		"403 ");
	expect("denied", "a.test is 127.0.0.1");
	assert_int_equal(requests, 1);
}

static void tunnels(void **state)
{
	static uint8_t data[3000];
	uint8_t byte;
	int fd;
	(void)state;

	memset(data, 0x80, sizeof(data));
	set_list("127.0.0.1:%d");
	fd = tunnel(CONNECT);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(fd_write_all(fd, data, sizeof(data)), 0);
		read_exactly(fd, data, sizeof(data));
	}
	// An end for each direction.
	assert_int_equal(shutdown(fd, SHUT_WR), 0);
	assert_int_equal(read(fd, &byte, 1), 0);
	fd_close(&fd);
	expect("admitted", "");
	expect("ended", "done");
}

// Each in the place of one that was cut, with words that come along with the request.
static void one_after_another(void **state)
{
	(void)state;

	for (int i = 0; i < 5; i++) {
		set_list("127.0.0.1:%d");
		int fd = tunnel(CONNECT "\x80 words");

		read_exactly(fd, "\x80 words", 7);
		assert_int_equal(fd_write_all(fd, "\x80 more", 6), 0);
		read_exactly(fd, "\x80 more", 6);
		assert_int_equal(set_list(""), 1);
		fd_close(&fd);
	}
}

static void a_list_is_in_force_at_once(void **state)
{
	uint8_t byte = 0x80;
	int fd;
	(void)state;

	set_list("127.0.0.1:%d b.test");
	fd = tunnel(CONNECT);
	expect("admitted", "");
	assert_int_equal(set_list("127.0.0.1:%d"), 0); // still there
	assert_int_equal(fd_write_all(fd, &byte, 1), 0);
	read_exactly(fd, &byte, 1);
	assert_int_equal(set_list("b.test"), 1);
	assert_int_equal(read(fd, &byte, 1), 0);
	fd_close(&fd);
	has(ask("CONNECT 127.0.0.1:%d HTTP/1.0\r\n\r\n"), "403 ");
	// What is no list admits nobody.
	set_list("127.0.0.1:%d");
	fd = tunnel(CONNECT);
	assert_int_equal(set_list("127.0.0.1:%d b..test"), 1);
	assert_true(read(fd, &byte, 1) <= 0);
	fd_close(&fd);
}

static void servers_that_are_not_there(void **state)
{
	uint16_t was = port;
	int fd;
	(void)state;

	fd = listen_tcp(0, &port);
	assert_true(fd >= 0);
	fd_close(&fd);
	set_list("127.0.0.1:%d");
	has(ask("GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"), "502 Bad");
	expect("admitted", "");
	expect("failed", "refused");
	port = was;
}

// More than there is room for wait, and are served when others have gone.
static void many(void **state)
{
	int fds[PROXY_CONNECTIONS_MAX], fd;
	char text[256], answer[2048];
	ssize_t n;
	(void)state;

	set_list("127.0.0.1:%d");
	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX; i++)
		fds[i] = tunnel(CONNECT);
	fd = guest();
	snprintf(text, sizeof(text),
		"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n", port, port);
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	fd_close(&fds[7]);
	n = fd_read_full(fd, answer, sizeof(answer) - 1);
	assert_true(n > 0);
	answer[n] = '\0';
	has(answer, "200 OK");
	fd_close(&fd);
	// The end of the channel is the end of all, stop() waits for it.
	for (size_t i = 8; i < PROXY_CONNECTIONS_MAX; i++)
		fd_close(&fds[i]);
	fd_close(&channel);
	for (size_t i = 0; i < 7; i++) {
		assert_true(read(fds[i], text, 1) <= 0);
		fd_close(&fds[i]);
	}
}

static void names_within_tls(void **state)
{
	static uint8_t hello[32768];
	const uint16_t was = port;
	pthread_t thread;
	uint8_t byte;
	size_t len;
	int fd, plain_fd = server_fd;
	(void)state;

	fd = listen_tcp(443, &port);
	if (fd < 0) {
		port = was;
		print_message("skip names within TLS: port 443 is not to be had\n");
		return;
	}
	server_fd = fd;
	assert_int_equal(pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd), 0);
	set_list("a.test:%d 127.0.0.1:%d");
	// Wherever it stands, and however it is cut.
	fd = tunnel("CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n");
	len = hello_make(hello, "A.test", 1500, 700);
	for (size_t off = 0; off < len; off += 500)
		assert_int_equal(fd_write_all(fd, hello + off, MIN(len - off, (size_t)500)), 0);
	read_exactly(fd, hello, len);
	fd_close(&fd);
	expect("admitted", "");
	expect("ended", "");
	fd = tunnel("CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n");
	len = hello_make(hello, "b.test", 0, 16384);
	assert_int_equal(fd_write_all(fd, hello, len), 0);
	assert_true(read(fd, &byte, 1) <= 0);
	fd_close(&fd);
	expect("admitted", "");
	expect("denied", "TLS asks for 'b.test' in a tunnel to a.test");
	fd = tunnel("CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n");
	len = hello_make(hello, NULL, 0, 16384);
	assert_int_equal(fd_write_all(fd, hello, len), 0);
	assert_true(read(fd, &byte, 1) <= 0);
	fd_close(&fd);
	expect("admitted", "");
	expect("denied", "TLS asks for ''");
	fd = tunnel("CONNECT a.test:%d HTTP/1.1\r\nHost: a.test:%d\r\n\r\n");
	assert_int_equal(fd_write_all(fd, "SSH-2.0-x\r\n", 11), 0);
	assert_true(read(fd, &byte, 1) <= 0);
	fd_close(&fd);
	expect("admitted", "");
	expect("denied", "not TLS");
	shutdown(server_fd, SHUT_RDWR);
	pthread_join(thread, NULL);
	fd_close(&server_fd);
	server_fd = plain_fd;
	port = was;
}

// One connection after another.
struct upstream {
	int listener;
	struct tls_server one;
};

static void *serve_upstream(void *arg)
{
	struct upstream *u = arg;

	while ((u->one.fd = accept4(u->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		u->one.echoed = 0;
		tls_serve(&u->one);
	}
	return NULL;
}

static int start_with_credentials(void **state)
{
	struct err err = {0};

	assert_int_equal(secret_set(&secrets.all[0], "mine", "a.test", "Authorization",
				 "Bearer 0123456789", &err),
		0);
	assert_int_equal(
		secret_set(&secrets.all[1], "other", "other.test", "X-Key", "abcdefghij", &err), 0);
	secrets.nr = 2;
	return start(state);
}

static int stop_with_credentials(void **state)
{
	int r = stop(state);

	secrets.nr = 0;
	unlink(authorities);
	return r;
}

static struct identity upstream_id;

static int start_upstream(void **state)
{
	int fd;

	identity_make(&upstream_id, "a.test", "20991231000000");
	strcpy(authorities, "/tmp/mayfly-ca-XXXXXX");
	fd = mkstemp(authorities);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, upstream_id.pem, strlen(upstream_id.pem)), 0);
	fd_close(&fd);
	return start_with_credentials(state);
}

static void credentials_are_put_in(void **state)
{
	struct upstream u = {.one = {.id = &upstream_id, .greeting = "HTTP/1.1 200 OK\r\n\r\n"}};
	uint16_t tls_port;
	const char *answer;
	pthread_t thread;
	json_t *json;
	(void)state;

	// Whatever comes of it, no tunnel.
	set_list("a.test 127.0.0.1:443 other.test");
	has(ask("CONNECT a.test:443 HTTP/1.0\r\n\r\n"), "ask for http://a.test,");
	expect("denied", "no credential can be put into a tunnel");
	u.listener = listen_tcp(443, &tls_port);
	if (u.listener < 0) {
		print_message("skip credentials: port 443 is not to be had\n");
		identity_free(&upstream_id);
		return;
	}
	assert_int_equal(pthread_create(&thread, NULL, serve_upstream, &u), 0);
	// The server gives back what it was sent, and ends when all of it has come.
	u.one.end_after = strlen("POST /v1 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n"
				 "Authorization: Bearer 0123456789\r\nAccept-Encoding: identity\r\n"
				 "Connection: close\r\n\r\nabc");
	answer = ask("POST http://a.test/v1 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n"
		     "Authorization: Bearer placeholder\r\nAccept-Encoding: gzip\r\n\r\nabcmore");
	assert_string_equal(answer,
		"HTTP/1.1 200 OK\r\n\r\n"
		"POST /v1 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n"
		"Authorization: *****************\r\nAccept-Encoding: identity\r\n"
		"Connection: close\r\n\r\nabc");
	json = record();
	assert_string_equal(word(json, "decision"), "admitted");
	assert_string_equal(word(json, "credential"), "mine");
	assert_int_equal(json_integer_value(json_object_get(json, "port")), 443);
	json_decref(json);
	expect("ended", "done");
	// Who does not prove that it is the host gets nothing.
	u.one.end_after = 0;
	has(ask("GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n"), "502 ");
	expect("admitted", "");
	expect("failed", "the credential 'other' was not sent: the certificate of other.test");
	assert_int_equal(u.one.echoed, 0);
	// Nor is it sent where the list does not let it be.
	set_list("a.test:80 127.0.0.1");
	has(ask("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n"), "403 ");
	expect("denied", "a.test:443 is not on");
	shutdown(u.listener, SHUT_RDWR);
	pthread_join(thread, NULL);
	fd_close(&u.listener);
	identity_free(&upstream_id);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(plain_requests, start, stop),
		cmocka_unit_test_setup_teardown(a_second_request_goes_nowhere, start, stop),
		cmocka_unit_test_setup_teardown(what_is_not_on_the_list, start, stop),
		cmocka_unit_test_setup_teardown(names_that_lead_inside, start, stop),
		cmocka_unit_test_setup_teardown(methods, start, stop),
		cmocka_unit_test_setup_teardown(tunnels, start, stop),
		cmocka_unit_test_setup_teardown(one_after_another, start, stop),
		cmocka_unit_test_setup_teardown(a_list_is_in_force_at_once, start, stop),
		cmocka_unit_test_setup_teardown(servers_that_are_not_there, start, stop),
		cmocka_unit_test_setup_teardown(many, start, stop),
		cmocka_unit_test_setup_teardown(names_within_tls, start, stop),
		cmocka_unit_test_setup_teardown(
			credentials_are_put_in, start_upstream, stop_with_credentials),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
