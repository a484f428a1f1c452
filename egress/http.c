// SPDX-License-Identifier: Apache-2.0
// Heads of requests; see the header. Pure; any thread.
#include "egress/http.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define BODY_DIGITS_MAX 18U

// A part of the text.
struct span {
	const char *at;
	size_t len;
};

struct field {
	struct span name, value;
};

static bool is(const struct span *span, const char *name)
{
	return span->len == strlen(name) && strncasecmp(span->at, name, span->len) == 0;
}

static bool is_token(const struct span *span)
{
	for (size_t i = 0; i < span->len; i++) {
		const char c = span->at[i];

		if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
			    (c && strchr("!#$%&'*+-.^_`|~", c))))
			return false;
	}
	return span->len > 0;
}

// The line that begins at *at, without its end; *at is behind it then. False where there is none,
// or one that ends or goes on in another way than ours.
static bool take_line(const char **at, const char *end, struct span *ret)
{
	const char *cr = memchr(*at, '\r', (size_t)(end - *at));

	if (!cr || end - cr < 2 || cr[1] != '\n')
		return false;
	*ret = (struct span){*at, (size_t)(cr - *at)};
	*at = cr + 2;
	for (size_t i = 0; i < ret->len; i++) {
		const unsigned char c = (unsigned char)ret->at[i];

		if ((c < ' ' && c != '\t') || c == 0x7f)
			return false;
	}
	return true;
}

static bool take_word(struct span *line, struct span *ret)
{
	const char *space = memchr(line->at, ' ', line->len);
	const size_t n = space ? (size_t)(space - line->at) : line->len;

	*ret = (struct span){line->at, n};
	line->at += space ? n + 1 : n;
	line->len -= space ? n + 1 : n;
	return n > 0;
}

static bool take_field(const char **at, const char *end, struct field *ret)
{
	struct span line;
	const char *colon;

	if (!take_line(at, end, &line))
		return false;
	colon = memchr(line.at, ':', line.len);
	if (!colon)
		return false;
	ret->name = (struct span){line.at, (size_t)(colon - line.at)};
	ret->value = (struct span){colon + 1, line.len - ret->name.len - 1};
	while (ret->value.len && strchr(" \t", ret->value.at[0])) {
		ret->value.at++;
		ret->value.len--;
	}
	while (ret->value.len && strchr(" \t", ret->value.at[ret->value.len - 1]))
		ret->value.len--;
	// A line that goes on from the one before begins with a space, which no name does.
	return is_token(&ret->name);
}

// The target of a request line: http://HOST[:PORT][PATH], or HOST:PORT for a tunnel.
static int read_target(
	const char *text, const struct span *target, struct http_request *r, struct err *err)
{
	static const char scheme[] = "http://";
	struct span authority = *target;
	int rc;

	for (size_t i = 0; i < target->len; i++)
		if (target->at[i] <= ' ' || target->at[i] >= 0x7f || target->at[i] == '#')
			return err_set(
				err, -EINVAL, "the target has a character that none may have");
	if (!r->connect) {
		if (target->len < strlen(scheme) ||
			strncasecmp(target->at, scheme, strlen(scheme)) != 0)
			return err_set(
				err, -EINVAL, "this is a proxy: ask for http://..., or CONNECT");
		authority.at += strlen(scheme);
		authority.len -= strlen(scheme);
		for (size_t i = 0; i < authority.len; i++)
			if (strchr("/?", authority.at[i])) {
				r->path_off = (size_t)(authority.at + i - text);
				r->path_len = authority.len - i;
				authority.len = i;
				break;
			}
	}
	rc = allow_authority_parse(authority.at, authority.len, &r->host, &r->port, err);
	if (rc == 0 && r->connect && !r->port)
		rc = err_set(err, -EINVAL, "CONNECT wants HOST:PORT");
	if (rc == 0 && !r->port)
		r->port = HTTP_PORT;
	return rc;
}

static int read_request_line(
	const char *text, struct span line, struct http_request *r, struct err *err)
{
	struct span method, target;

	if (!take_word(&line, &method) || !take_word(&line, &target) || !is_token(&method) ||
		method.len >= sizeof(r->method))
		return err_set(err, -EINVAL, "the request line is none");
	r->http_10 = line.len == 8 && !memcmp(line.at, "HTTP/1.0", 8);
	if (!r->http_10 && (line.len != 8 || memcmp(line.at, "HTTP/1.1", 8) != 0))
		return err_set(err, -EINVAL, "neither HTTP/1.1 nor HTTP/1.0");
	memcpy(r->method, method.at, method.len);
	r->method[method.len] = '\0';
	r->connect = !strcmp(r->method, "CONNECT");
	return read_target(text, &target, r, err);
}

// Whether it says what the target says. Clients leave out the port that goes without saying, some
// also that of a tunnel.
static int check_host(const struct span *value, const struct http_request *r, struct err *err)
{
	struct allow_host host;
	uint16_t port = 0;
	int rc = allow_authority_parse(value->at, value->len, &host, &port, err);

	if (rc < 0)
		return err_wrap(err, rc, "Host");
	if (host.literal != r->host.literal || strcmp(host.name, r->host.name) != 0 ||
		(port ? port != r->port : !r->connect && r->port != HTTP_PORT))
		return err_set(err, -EINVAL, "Host is another than the target");
	return 0;
}

static int read_length(const struct span *value, uint64_t *ret, struct err *err)
{
	uint64_t n = 0;

	for (size_t i = 0; i < value->len; i++) {
		if (value->at[i] < '0' || value->at[i] > '9')
			return err_set(err, -EINVAL, "Content-Length is no number");
		n = n * 10 + (uint64_t)(value->at[i] - '0');
	}
	if (value->len == 0 || value->len > BODY_DIGITS_MAX)
		return err_set(err, -EINVAL, "Content-Length is no number");
	*ret = n;
	return 0;
}

static int read_fields(const char *at, const char *end, struct http_request *r, struct err *err)
{
	unsigned int fields = 0, hosts = 0, lengths = 0;
	int rc = 0;

	for (; at < end && rc == 0; fields++) {
		struct field f;

		if (fields == HTTP_FIELDS_MAX)
			return err_set(err, -E2BIG, "more than %u fields", HTTP_FIELDS_MAX);
		if (!take_field(&at, end, &f))
			return err_set(err, -EINVAL, "a field is malformed");
		if (is(&f.name, "transfer-encoding"))
			return err_set(err, -EOPNOTSUPP,
				"Transfer-Encoding: say the length beforehand, or use https");
		if (is(&f.name, "host")) {
			hosts++;
			rc = check_host(&f.value, r, err);
		} else if (is(&f.name, "content-length")) {
			lengths++;
			rc = read_length(&f.value, &r->body_bytes, err);
		}
	}
	if (rc == 0 && (hosts > 1 || lengths > 1))
		rc = err_set(
			err, -EINVAL, "%s stands twice", hosts > 1 ? "Host" : "Content-Length");
	if (rc == 0 && !r->http_10 && hosts == 0)
		rc = err_set(err, -EINVAL, "there is no Host");
	if (rc == 0 && r->connect && r->body_bytes)
		rc = err_set(err, -EINVAL, "CONNECT has no body");
	return rc;
}

int http_read(const char *text, size_t len, struct http_request *ret, struct err *err)
{
	struct http_request r = {0};
	const char *at = text, *last, *end;
	struct span line;
	int rc;

	// TLS, say: nobody need wait for a line that never ends. Methods are in capitals.
	if (len && (text[0] < 'A' || text[0] > 'Z'))
		return err_set(err, -EINVAL, "this is a proxy for HTTP");
	end = memmem(text, MIN(len, (size_t)HTTP_HEAD_BYTES), "\r\n\r\n", 4);
	if (!end) {
		if (len >= HTTP_HEAD_BYTES)
			return err_set(
				err, -E2BIG, "the head is longer than %u bytes", HTTP_HEAD_BYTES);
		return 0;
	}
	last = end + 2; // behind the last line
	r.head_bytes = (size_t)(end + 4 - text);
	if (!take_line(&at, last, &line))
		return err_set(err, -EINVAL, "the request line is malformed");
	rc = read_request_line(text, line, &r, err);
	if (rc == 0)
		rc = read_fields(at, last, &r, err);
	if (rc < 0)
		return rc;
	*ret = r;
	return 1;
}

// What is between the client and us.
static bool is_ours(const struct span *name)
{
	static const char *const names[] = {"host", "connection", "proxy-connection", "keep-alive",
		"proxy-authorization", "proxy-authenticate", "te", "trailer", "upgrade"};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (is(name, names[i]))
			return true;
	return false;
}

static void append_text(struct buf *out, const char *text)
{
	buf_append(out, text, strlen(text));
}

static bool is_replaced(const struct span *name, const struct http_field *fields, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++)
		if (is(name, fields[i].name))
			return true;
	return nr > 0 && (is(name, "accept-encoding") || is(name, "range") || is(name, "if-range"));
}

static void append_field(struct buf *out, const char *name, const char *value)
{
	append_text(out, name);
	append_text(out, ": ");
	append_text(out, value);
	append_text(out, "\r\n");
}

int http_forward(const char *text, const struct http_request *request,
	const struct http_field *fields, unsigned int nr, struct buf *out)
{
	const char *at = text, *last = text + request->head_bytes - 2;
	const bool v6 = request->host.literal && strchr(request->host.name, ':');
	char port[24] = "";
	struct span line;
	struct field f;

	ASSERT(take_line(&at, last, &line));
	append_text(out, request->method);
	append_text(out, request->path_len && text[request->path_off] == '/' ? " " : " /");
	buf_append(out, text + request->path_off, request->path_len);
	append_text(out, request->http_10 ? " HTTP/1.0\r\nHost: " : " HTTP/1.1\r\nHost: ");
	append_text(out, v6 ? "[" : "");
	append_text(out, request->host.name);
	// Port 443 is that of TLS here.
	if (request->port != HTTP_PORT && request->port != HTTPS_PORT)
		snprintf(port, sizeof(port), ":%u", request->port);
	append_text(out, v6 ? "]" : "");
	append_text(out, port);
	append_text(out, "\r\n");
	while (at < last && take_field(&at, last, &f)) {
		if (is_ours(&f.name) || is_replaced(&f.name, fields, nr))
			continue;
		buf_append(out, f.name.at, f.name.len);
		append_text(out, ": ");
		buf_append(out, f.value.at, f.value.len);
		append_text(out, "\r\n");
	}
	for (unsigned int i = 0; i < nr; i++)
		append_field(out, fields[i].name, fields[i].value);
	if (nr)
		append_field(out, "Accept-Encoding", "identity");
	append_text(out, "Connection: close\r\n\r\n");
	return buf_error(out);
}

int http_answer(char *ret, size_t size, const char *status, const char *why)
{
	int len = snprintf(ret, size,
		"HTTP/1.1 %s\r\nContent-Type: text/plain\r\nContent-Length: %zu\r\n"
		"Connection: close\r\n\r\nmayfly: %s\n",
		status, strlen(why) + 9, why);

	return MIN(len, (int)size - 1);
}
