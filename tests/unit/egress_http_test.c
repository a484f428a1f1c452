// SPDX-License-Identifier: Apache-2.0
// egress/http: what is a request, what is none, and what a server gets of it.
#include "tests/support/test.h"

#include <errno.h>
#include <string.h>

#include "egress/http.h"

static int read_text(const char *text, struct http_request *ret, struct err *err)
{
	return http_read(text, strlen(text), ret, err);
}

static void requests(void **state)
{
	struct http_request r;
	struct err err = {0};
	(void)state;

	assert_int_equal(
		read_text("GET http://A.Example/x?y HTTP/1.1\r\nHost: a.example\r\n\r\nbody", &r,
			&err),
		1);
	assert_string_equal(r.method, "GET");
	assert_string_equal(r.host.name, "a.example");
	assert_int_equal(r.port, 80);
	assert_false(r.connect);
	assert_int_equal(r.body_bytes, 0);
	assert_int_equal(read_text("POST http://a.example:8080 HTTP/1.1\r\nHost: a.example:8080\r\n"
				   "content-length:  12 \r\n\r\n",
				 &r, &err),
		1);
	assert_int_equal(r.port, 8080);
	assert_int_equal(r.body_bytes, 12);
	assert_int_equal(
		read_text("CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", &r, &err),
		1);
	assert_true(r.connect);
	assert_int_equal(r.port, 443);
	assert_int_equal(read_text("CONNECT [::1]:443 HTTP/1.0\r\n\r\n", &r, &err), 1);
	assert_true(r.host.literal);
	assert_string_equal(r.host.name, "::1");
}

static void every_beginning_waits(void **state)
{
	static const char text[] = "GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n";
	struct http_request r;
	struct err err = {0};
	(void)state;

	for (size_t len = 0; len < strlen(text); len++)
		assert_int_equal(http_read(text, len, &r, &err), 0);
	assert_int_equal(http_read(text, strlen(text), &r, &err), 1);
	assert_int_equal(r.head_bytes, strlen(text));
}

#define H "Host: a.example\r\n"
#define G "GET http://a.example/ HTTP/1.1\r\n"

static void refused(void **state)
{
	static const struct {
		const char *text;
		int code;
	} bad[] = {
		{G "\r\n", -EINVAL}, // no Host
		{G H H "\r\n", -EINVAL},
		{G "Host: b.example\r\n\r\n", -EINVAL},
		{G "Host: a.example:81\r\n\r\n", -EINVAL},
		{G "Host: a.example, b.example\r\n\r\n", -EINVAL},
		{G "Host:\r\n\r\n", -EINVAL},
		{G "Host : a.example\r\n\r\n", -EINVAL},
		{G " Host: a.example\r\n\r\n", -EINVAL},
		{G H " folded\r\n\r\n", -EINVAL},
		{G H "\tfolded: x\r\n\r\n", -EINVAL},
		{G H "no colon\r\n\r\n", -EINVAL},
		{G H ": x\r\n\r\n", -EINVAL},
		{G H "X: a\nY: b\r\n\r\n", -EINVAL},
		{G H "X: a\rY: b\r\n\r\n", -EINVAL},
		{G H "X: \x01\r\n\r\n", -EINVAL},
		{G H "Content-Length: 1\r\nContent-Length: 1\r\n\r\n", -EINVAL},
		{G H "Content-Length: 1, 1\r\n\r\n", -EINVAL},
		{G H "Content-Length: +1\r\n\r\n", -EINVAL},
		{G H "Content-Length: 0x1\r\n\r\n", -EINVAL},
		{G H "Content-Length: -1\r\n\r\n", -EINVAL},
		{G H "Content-Length:\r\n\r\n", -EINVAL},
		{G H "Content-Length: 9999999999999999999\r\n\r\n", -EINVAL},
		{G H "Transfer-Encoding: chunked\r\n\r\n", -EOPNOTSUPP},
		{G H "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", -EOPNOTSUPP},
		{G H "Transfer-Encoding: identity\r\n\r\n", -EOPNOTSUPP},
		{"GET / HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET https://a.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://u:p@a.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://b.example@a.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example\\@b.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example#b HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example./ HTTP/1.1\r\nHost: a.example.\r\n\r\n", -EINVAL},
		{"GET http:///x HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET  http://a.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example/ x HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example/ HTTP/1.1 \r\n" H "\r\n", -EINVAL},
		{"GET http://a.example/ HTTP/2\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example/ HTTP/1.2\r\n" H "\r\n", -EINVAL},
		{"GET http://a.example/\r\n" H "\r\n", -EINVAL},
		{"G(T http://a.example/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"get http://a.example/ HTTP/1.1\r\n" H, -EINVAL},
		{"\r\n" G H "\r\n", -EINVAL},
		{"\x16\x03\x01", -EINVAL},
		{"CONNECT a.example HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"CONNECT http://a.example:443 HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"CONNECT a.example:443/ HTTP/1.1\r\n" H "\r\n", -EINVAL},
		{"CONNECT a.example:443 HTTP/1.1\r\nHost: b.example:443\r\n\r\n", -EINVAL},
		{"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:80\r\n\r\n", -EINVAL},
		{"CONNECT a.example:443 HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\n", -EINVAL},
		{"CONNECT 2130706433:443 HTTP/1.1\r\nHost: 2130706433:443\r\n\r\n", -EINVAL},
		{"CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: 0x7f.1:443\r\n\r\n", -EINVAL},
	};
	char text[HTTP_HEAD_BYTES + 1];
	struct http_request r;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = {0};
		int rc = read_text(bad[i].text, &r, &err);

		if (rc != bad[i].code || !err.msg[0])
			fail_msg("%d for: %s", rc, bad[i].text);
	}
	// NUL within; no end.
	memcpy(text, G H "X: a\0b\r\n\r\n", sizeof(G H "X: a\0b\r\n\r\n"));
	assert_int_equal(http_read(text, sizeof(G H "X: a\0b\r\n\r\n") - 1, &r, NULL), -EINVAL);
	memset(text, 'A', sizeof(text));
	assert_int_equal(http_read(text, HTTP_HEAD_BYTES - 1, &r, NULL), 0);
	assert_int_equal(http_read(text, HTTP_HEAD_BYTES, &r, NULL), -E2BIG);
}

static void fields_are_bounded(void **state)
{
	struct http_request r;
	CLEANUP_BUF struct buf text = {0};
	(void)state;

	buf_append(&text, G H, strlen(G H));
	for (unsigned int i = 1; i < HTTP_FIELDS_MAX; i++)
		buf_append(&text, "X: y\r\n", 6);
	buf_append(&text, "\r\n", 2);
	assert_int_equal(http_read((char *)text.data, text.len, &r, NULL), 1);
	text.len -= 2;
	buf_append(&text, "X: y\r\n\r\n", 8);
	assert_int_equal(http_read((char *)text.data, text.len, &r, NULL), -E2BIG);
}

static void check_forward(const char *text, const char *wanted)
{
	CLEANUP_BUF struct buf out = {0};
	struct http_request r;
	struct err err = {0};

	assert_int_equal(read_text(text, &r, &err), 1);
	assert_int_equal(http_forward(text, &r, NULL, 0, &out), 0);
	buf_append(&out, "", 1);
	assert_string_equal((char *)out.data, wanted);
}

static void forwarded(void **state)
{
	(void)state;
	check_forward(
		"GET http://A.example/x?y=1 HTTP/1.1\r\nX-A: 1\r\nHOST: a.EXAMPLE:80\r\n"
		"Proxy-Authorization: secret\r\nConnection: keep-alive, X-A\r\n"
		"Proxy-Connection: keep-alive\r\nKeep-Alive: 5\r\nUpgrade: h2c\r\nTE: trailers\r\n"
		"Content-Length: 3\r\n\r\nabc",
		"GET /x?y=1 HTTP/1.1\r\nHost: a.example\r\nX-A: 1\r\nContent-Length: 3\r\n"
		"Connection: close\r\n\r\n");
	check_forward("GET http://a.example?q HTTP/1.0\r\n\r\n",
		"GET /?q HTTP/1.0\r\nHost: a.example\r\nConnection: close\r\n\r\n");
	check_forward("HEAD http://[2001:DB8::1]:8080 HTTP/1.1\r\nHost: [2001:db8::1]:8080\r\n\r\n",
		"HEAD / HTTP/1.1\r\nHost: [2001:db8::1]:8080\r\nConnection: close\r\n\r\n");
}

static void fields_are_put_in(void **state)
{
	static const char text[] =
		"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nAUTHORIZATION: mine\r\n"
		"Range: bytes=1-2\r\nAccept-Encoding: gzip\r\nAuthorization-X: stays\r\n\r\n";
	const struct http_field fields[] = {{"Authorization", "Bearer real"}, {"X-Key", "k"}};
	CLEANUP_BUF struct buf out = {0};
	struct http_request r;
	(void)state;

	assert_int_equal(read_text(text, &r, NULL), 1);
	r.port = HTTPS_PORT;
	assert_int_equal(http_forward(text, &r, fields, 2, &out), 0);
	buf_append(&out, "", 1);
	assert_string_equal((char *)out.data,
		"GET / HTTP/1.1\r\nHost: a.example\r\nAuthorization-X: stays\r\n"
		"Authorization: Bearer real\r\nX-Key: k\r\nAccept-Encoding: identity\r\n"
		"Connection: close\r\n\r\n");
}

static void answers(void **state)
{
	char text[256];
	int len = http_answer(text, sizeof(text), "403 Forbidden", "no");
	(void)state;

	assert_int_equal(len, strlen(text));
	assert_non_null(strstr(text, "Content-Length: 11\r\n"));
	assert_string_equal(strstr(text, "\r\n\r\n") + 4, "mayfly: no\n");
	len = http_answer(text, 20, "403 Forbidden", "no");
	assert_int_equal(len, 19);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(requests),
		cmocka_unit_test(every_beginning_waits),
		cmocka_unit_test(refused),
		cmocka_unit_test(fields_are_bounded),
		cmocka_unit_test(forwarded),
		cmocka_unit_test(fields_are_put_in),
		cmocka_unit_test(answers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
