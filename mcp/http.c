// SPDX-License-Identifier: Apache-2.0
// The endpoint over HTTP; see the header. The caller's thread waits for the end; everything else is
// of a connection's thread.
#include "mcp/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mcp/http_check.h"
#include "mcp/http_sessions.h"
#include "mcp/http_tls.h"
#include "mcp/text.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

#define HEADER_MISMATCH (-32020)

#define PATIENCE_S  30U // with a client that neither sends nor takes
#define QUIET_MS    10000 // then a stream begins, or says that it is alive
#define EXPIRE_MS   1000
#define BACKLOG     64
#define EVENT_HEAD  "data: "
#define QUIET_EVENT ": still here\n\n"

struct http {
	const struct http_config *config;
	struct http_sessions *sessions;
	struct MHD_Daemon *daemon;
	pthread_mutex_t rate_lock;
	uint64_t rate_ns; // when the tokens were counted
	uint64_t rate_tokens; // in thousandths of a request
};

// One request; libmicrohttpd keeps it between its calls.
struct request {
	struct http *http;
	struct MHD_Connection *connection;
	struct buf body;
	bool body_too_long;
	struct http_session *session; // a reference, or NULL
	struct http_exchange *exchange;
	bool opened; // the session is new and listed: the client has to be told its id
	bool modern;
	// Of a stream of events:
	char *event; // that is being sent; owned
	size_t event_len, event_sent;
	bool answered; // what is being sent is the last
};

// --- Answers ---------------------------------------------------------------------------------

static const char *header_of(const struct request *q, const char *name)
{
	return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

static enum MHD_Result queue(struct request *q, unsigned int status, struct MHD_Response *response)
{
	enum MHD_Result r;

	if (!response)
		return MHD_NO;
	MHD_add_response_header(response, "Cache-Control", "no-store");
	if (q->opened)
		MHD_add_response_header(response, "Mcp-Session-Id", http_session_id(q->session));
	if (status == MHD_HTTP_UNAUTHORIZED)
		MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
	if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
		MHD_add_response_header(response, "Allow", "POST, GET, DELETE");
	r = MHD_queue_response(q->connection, status, response);
	MHD_destroy_response(response);
	return r;
}

static enum MHD_Result send_empty(struct request *q, unsigned int status)
{
	return queue(q, status, MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT));
}

// Takes the text over.
static enum MHD_Result send_json(struct request *q, unsigned int status, char *text, size_t len)
{
	struct MHD_Response *response = MHD_create_response_from_buffer(
		len, text, MHD_RESPMEM_MUST_FREE);

	if (!response)
		free(text);
	else
		MHD_add_response_header(response, "Content-Type", "application/json");
	return queue(q, status, response);
}

// An error of JSON-RPC; id and data (taken over) may be NULL.
static enum MHD_Result refuse_with(struct request *q, unsigned int status, const json_t *id,
	int code, const char *message, json_t *data)
{
	json_t *id_or_null = id ? (json_t *)(uintptr_t)id : json_null();
	json_t *error = json_pack("{s:s, s:O, s:{s:i, s:o, s:o*}}", "jsonrpc", "2.0", "id",
		id_or_null, "error", "code", code, "message",
		text_printable(message, strlen(message)), "data", data);
	char *text = error ? json_dumps(error, JSON_COMPACT) : NULL;

	json_decref(error);
	return text ? send_json(q, status, text, strlen(text)) : MHD_NO;
}

static enum MHD_Result refuse(struct request *q, unsigned int status, const char *message)
{
	return refuse_with(q, status, NULL, RPC_INVALID_REQUEST, message, NULL);
}

// --- What the session says -------------------------------------------------------------------

enum heard { HEARD_LINE, HEARD_NOTHING, HEARD_END, HEARD_GONE };

// Waits for the next line of the exchange, or for the client to leave, or for QUIET_MS.
static enum heard hear(struct request *q, struct http_line *ret)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(
		q->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
	struct pollfd p[3] = {{.fd = http_exchange_fd(q->exchange), .events = POLLIN},
		{.fd = info ? info->connect_fd : -1, .events = POLLRDHUP},
		{.fd = q->http->config->how->stop_fd, .events = POLLIN}};
	const uint64_t until_ns = now_ns() + QUIET_MS * 1000000ULL;

	for (;;) {
		int r = http_exchange_take(q->exchange, ret);
		uint64_t now = now_ns();

		if (r > 0)
			return HEARD_LINE;
		if (r < 0)
			return HEARD_END;
		if (now >= until_ns)
			return HEARD_NOTHING;
		if (poll(p, ARRAY_SIZE(p), (int)((until_ns - now) / 1000000) + 1) < 0)
			continue;
		if (p[1].revents || p[2].revents)
			return HEARD_GONE;
	}
}

// Makes the line, taken over, what is sent next.
static bool set_event(struct request *q, struct http_line *line)
{
	free(q->event);
	q->event = NULL;
	q->event_sent = 0;
	q->answered = line->answer;
	q->event_len = strlen(EVENT_HEAD) + line->len + 1;
	q->event = malloc(q->event_len);
	if (q->event) {
		memcpy(q->event, EVENT_HEAD, strlen(EVENT_HEAD));
		memcpy(q->event + strlen(EVENT_HEAD), line->text, line->len); // with its newline
		q->event[q->event_len - 1] = '\n';
	}
	free(line->text);
	return q->event;
}

static ssize_t read_events(void *opaque, uint64_t pos, char *ret, size_t max_bytes)
{
	struct request *q = opaque;
	struct http_line line;
	size_t n;
	(void)pos;

	if (!q->event || q->event_sent == q->event_len) {
		enum heard heard = q->answered ? HEARD_END : hear(q, &line);

		if (heard == HEARD_END)
			return MHD_CONTENT_READER_END_OF_STREAM;
		if (heard == HEARD_GONE || (heard == HEARD_LINE && !set_event(q, &line)))
			return MHD_CONTENT_READER_END_WITH_ERROR;
		if (heard == HEARD_NOTHING) {
			n = MIN(max_bytes, strlen(QUIET_EVENT));
			memcpy(ret, QUIET_EVENT, n);
			return (ssize_t)n;
		}
	}
	n = MIN(max_bytes, q->event_len - q->event_sent);
	memcpy(ret, q->event + q->event_sent, n);
	q->event_sent += n;
	return (ssize_t)n;
}

static enum MHD_Result send_events(struct request *q)
{
	struct MHD_Response *response = MHD_create_response_from_callback(
		MHD_SIZE_UNKNOWN, 16 * KIB, read_events, q, NULL);

	if (response)
		MHD_add_response_header(response, "Content-Type", "text/event-stream");
	return queue(q, MHD_HTTP_OK, response);
}

static unsigned int status_of(const struct request *q, int code)
{
	switch (code) {
	case RPC_UNSUPPORTED_VERSION:
	case RPC_INVALID_REQUEST:
		return MHD_HTTP_BAD_REQUEST;
	case RPC_NO_METHOD:
		return q->modern ? MHD_HTTP_NOT_FOUND : MHD_HTTP_OK;
	default:
		return MHD_HTTP_OK;
	}
}

// The answer, or a stream of events which ends with it if there is more to say before.
static enum MHD_Result send_answer(struct request *q)
{
	struct http_line line;

	switch (hear(q, &line)) {
	case HEARD_LINE:
		if (!line.answer)
			return set_event(q, &line) ? send_events(q) : MHD_NO;
		if (q->opened && line.code) { // no initialize, no session
			http_session_close(q->session);
			q->opened = false;
		}
		return send_json(q, status_of(q, line.code), line.text, line.len);
	case HEARD_NOTHING:
		return send_events(q);
	case HEARD_END:
		return refuse(q, MHD_HTTP_NOT_FOUND, "the session has ended");
	case HEARD_GONE:
		break;
	}
	return MHD_NO;
}

// --- Who asks --------------------------------------------------------------------------------

static bool take_rate(struct http *h)
{
	const uint64_t now = now_ns();
	bool granted;

	pthread_mutex_lock(&h->rate_lock);
	h->rate_tokens = MIN(h->rate_tokens + (now - h->rate_ns) / 1000000 * h->config->rate,
		h->config->rate * 2000ULL);
	h->rate_ns = now - (now - h->rate_ns) % 1000000;
	granted = h->rate_tokens >= 1000;
	if (granted)
		h->rate_tokens -= 1000;
	pthread_mutex_unlock(&h->rate_lock);
	return granted;
}

// Before the body is read. MHD_YES with *ret_good, or an answer is on its way.
static enum MHD_Result check(struct request *q, const char *url, const char *method, bool *ret_good)
{
	const char *origin = header_of(q, "Origin"), *length = header_of(q, "Content-Length");
	const bool post = !strcmp(method, "POST");
	uint64_t bytes;

	// Names that lead here by somebody else's DNS, and pages of others, are refused first. With
	// TLS there are no such names: the certificate is not theirs.
	if (!q->http->config->tls && !http_host_is_loopback(header_of(q, "Host")))
		return refuse(q, MHD_HTTP_FORBIDDEN, "Host: not this host's loopback");
	if (origin && !http_origin_is_loopback(origin) &&
		!(q->http->config->tls && http_origin_is(origin, header_of(q, "Host"))))
		return refuse(q, MHD_HTTP_FORBIDDEN,
			"Origin: neither this host's loopback nor this endpoint");
	if (!http_bears(header_of(q, "Authorization"), q->http->config->token))
		return refuse(q, MHD_HTTP_UNAUTHORIZED,
			"Authorization: 'Bearer' and the endpoint's token are needed");
	if (strcmp(url, HTTP_PATH) != 0)
		return refuse(q, MHD_HTTP_NOT_FOUND, "the endpoint is at " HTTP_PATH);
	if (!take_rate(q->http))
		return refuse(q, MHD_HTTP_TOO_MANY_REQUESTS, "too many requests: wait a second");
	if (!post && strcmp(method, "GET") != 0 && strcmp(method, "DELETE") != 0)
		return refuse(q, MHD_HTTP_METHOD_NOT_ALLOWED, "POST, GET and DELETE alone");
	if (post && !http_is_type(header_of(q, "Content-Type"), "application/json"))
		return refuse(q, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE,
			"Content-Type: application/json is needed");
	if (post && (!http_accepts(header_of(q, "Accept"), "application/json") ||
			    !http_accepts(header_of(q, "Accept"), "text/event-stream")))
		return refuse(q, MHD_HTTP_NOT_ACCEPTABLE,
			"Accept: application/json and text/event-stream are needed");
	if (length &&
		(parse_uint(length, 0, UINT64_MAX, &bytes, NULL) < 0 || bytes >= RPC_LINE_BYTES))
		return refuse(q, MHD_HTTP_CONTENT_TOO_LARGE, "a message is longer than 4 MiB");
	*ret_good = true;
	return MHD_YES;
}

static bool is_legacy_version(const char *version)
{
	json_t *versions = mcp_session_versions(), *known;
	bool is = false;
	size_t i;

	json_array_foreach(versions, i, known) is |= !strcmp(json_string_value(known), version);
	json_decref(versions);
	return is && strcmp(version, MCP_MODERN_VERSION) != 0;
}

static enum MHD_Result refuse_version(
	struct request *q, const struct rpc_message *m, const char *version)
{
	return refuse_with(q, MHD_HTTP_BAD_REQUEST, m->id, RPC_UNSUPPORTED_VERSION,
		"this version of the protocol is not supported",
		json_pack("{s:o, s:s}", "supported", mcp_session_versions(), "requested", version));
}

// 2026-07-28: the headers say what the body says, and _meta has what it must have.
static enum MHD_Result check_modern(struct request *q, const struct rpc_message *m, bool *ret_good)
{
	const json_t *meta = json_object_get(m->params, "_meta");
	const char *version = json_string_value(
		json_object_get(meta, MCP_META_PREFIX "protocolVersion"));
	const char *named = header_of(q, "MCP-Protocol-Version"), *wrong = NULL, *name;

	if (!version ||
		!json_is_object(json_object_get(meta, MCP_META_PREFIX "clientCapabilities")))
		return refuse_with(q, MHD_HTTP_BAD_REQUEST, m->id, RPC_INVALID_PARAMS,
			"_meta: " MCP_META_PREFIX
			"protocolVersion and clientCapabilities are needed",
			NULL);
	name = !strcmp(m->method, "resources/read")
		       ? json_string_value(json_object_get(m->params, "uri"))
	       : !strcmp(m->method, "tools/call") || !strcmp(m->method, "prompts/get")
		       ? json_string_value(json_object_get(m->params, "name"))
		       : NULL;
	if (!http_says(named, version))
		wrong = "MCP-Protocol-Version";
	else if (!http_says(header_of(q, "Mcp-Method"), m->method))
		wrong = "Mcp-Method";
	else if (name && !http_says(header_of(q, "Mcp-Name"), name))
		wrong = "Mcp-Name";
	if (wrong) {
		char message[80];

		snprintf(message, sizeof(message), "%s: not what the body says", wrong);
		return refuse_with(q, MHD_HTTP_BAD_REQUEST, m->id, HEADER_MISMATCH, message, NULL);
	}
	if (strcmp(version, MCP_MODERN_VERSION) != 0)
		return refuse_version(q, m, version);
	*ret_good = true;
	return MHD_YES;
}

// --- Methods ---------------------------------------------------------------------------------

static enum MHD_Result refuse_err(
	struct request *q, const json_t *id, unsigned int status, const struct err *err)
{
	return refuse_with(q, err->code == -EBUSY ? MHD_HTTP_SERVICE_UNAVAILABLE : status, id,
		err->code == -EBUSY ? RPC_BUSY : RPC_INVALID_REQUEST, err->msg, NULL);
}

// The session that the request is for, in q->session; or it is answered.
static enum MHD_Result find_session(struct request *q, const struct rpc_message *m, bool *ret_good)
{
	const char *id = q->modern ? NULL : header_of(q, "Mcp-Session-Id");
	const bool hello = m->kind == RPC_REQUEST && !strcmp(m->method, "initialize");
	struct err err = {0};
	int r = 0;

	if (id) {
		q->session = http_session_find(q->http->sessions, id);
		if (!q->session)
			return refuse_with(q, MHD_HTTP_NOT_FOUND, m->id, RPC_INVALID_REQUEST,
				"there is no such session any more: begin with initialize", NULL);
	} else if (q->modern || hello) {
		r = http_session_open(q->http->sessions, !q->modern, &q->session, &err);
		q->opened = r == 0 && !q->modern;
	} else {
		return refuse_with(q, MHD_HTTP_BAD_REQUEST, m->id, RPC_INVALID_REQUEST,
			"Mcp-Session-Id: missing: begin with initialize", NULL);
	}
	if (r < 0)
		return refuse_err(q, m->id, MHD_HTTP_INTERNAL_SERVER_ERROR, &err);
	*ret_good = true;
	return MHD_YES;
}

// A message that is one, of either revision.
static enum MHD_Result pass_on(struct request *q, const struct rpc_message *m)
{
	char *line = json_dumps(m->root, JSON_COMPACT); // on one line, whatever it was on
	size_t len = line ? strlen(line) : 0;
	bool good = false;
	struct err err = {0};
	enum MHD_Result done = MHD_NO;
	int r = 0;

	if (!line)
		return MHD_NO;
	if (len >= RPC_LINE_BYTES) {
		free(line);
		return refuse(q, MHD_HTTP_CONTENT_TOO_LARGE, "a message is longer than 4 MiB");
	}
	done = find_session(q, m, &good);
	if (good && m->kind == RPC_REQUEST)
		r = http_exchange_begin(q->session, m, &q->exchange, &err);
	if (good && r == 0)
		r = http_session_say(q->session, line, len, &err);
	free(line);
	if (!good)
		return done;
	if (r < 0)
		return refuse_err(
			q, m->id, r == -EPIPE ? MHD_HTTP_NOT_FOUND : MHD_HTTP_BAD_REQUEST, &err);
	return m->kind == RPC_REQUEST ? send_answer(q) : send_empty(q, MHD_HTTP_ACCEPTED);
}

static enum MHD_Result do_message(struct request *q, const struct rpc_message *m)
{
	const char *version = header_of(q, "MCP-Protocol-Version");
	const json_t *meta = json_object_get(m->params, "_meta");
	bool good = false;
	enum MHD_Result done;

	q->modern = (version && !strcmp(version, MCP_MODERN_VERSION)) ||
		    json_object_get(meta, MCP_META_PREFIX "protocolVersion");
	if (!q->modern && version && !is_legacy_version(version))
		return refuse_version(q, m, version);
	if (!q->modern)
		return pass_on(q, m);
	// Nothing of it could be cancelled but by leaving: a notification is for nobody.
	if (m->kind != RPC_REQUEST)
		return send_empty(q, MHD_HTTP_ACCEPTED);
	done = check_modern(q, m, &good);
	return good ? pass_on(q, m) : done;
}

static enum MHD_Result do_post(struct request *q)
{
	struct rpc_message m;
	struct err err = {0};
	enum MHD_Result done;
	int code;

	if (q->body_too_long)
		return refuse(q, MHD_HTTP_CONTENT_TOO_LARGE, "a message is longer than 4 MiB");
	code = rpc_parse((const char *)q->body.data, q->body.len, &m, &err);
	done = code ? refuse_with(q, MHD_HTTP_BAD_REQUEST, m.id, code, err.msg, NULL)
		    : do_message(q, &m);
	rpc_message_fini(&m);
	return done;
}

// The stream, and the end, of a session of 2025-11-25.
static enum MHD_Result do_session(struct request *q, bool is_delete)
{
	const char *id = header_of(q, "Mcp-Session-Id");
	struct err err = {0};

	if (!id)
		return refuse(q, MHD_HTTP_METHOD_NOT_ALLOWED,
			"without a session (Mcp-Session-Id) there is only POST");
	q->session = http_session_find(q->http->sessions, id);
	if (!q->session)
		return refuse(q, MHD_HTTP_NOT_FOUND, "there is no such session any more");
	if (is_delete) {
		http_session_close(q->session);
		return send_empty(q, MHD_HTTP_NO_CONTENT);
	}
	if (!http_accepts(header_of(q, "Accept"), "text/event-stream"))
		return refuse(q, MHD_HTTP_NOT_ACCEPTABLE, "Accept: text/event-stream is needed");
	if (http_exchange_begin(q->session, NULL, &q->exchange, &err) < 0)
		return refuse_err(q, NULL, MHD_HTTP_CONFLICT, &err);
	return send_events(q);
}

// --- The server ------------------------------------------------------------------------------

static enum MHD_Result on_request(void *opaque, struct MHD_Connection *connection, const char *url,
	const char *method, const char *version, const char *upload, size_t *upload_len,
	void **context)
{
	struct request *q = *context;
	(void)version;

	if (!q) { // its headers have come
		bool good = false;
		enum MHD_Result done;

		q = calloc(1, sizeof(*q));
		if (!q)
			return MHD_NO;
		q->http = opaque;
		q->connection = connection;
		*context = q;
		done = check(q, url, method, &good);
		return good ? MHD_YES : done;
	}
	if (*upload_len) {
		if (q->body.len + *upload_len >= RPC_LINE_BYTES ||
			buf_append(&q->body, upload, *upload_len) < 0)
			q->body_too_long = true;
		*upload_len = 0;
		return MHD_YES;
	}
	return !strcmp(method, "POST") ? do_post(q) : do_session(q, !strcmp(method, "DELETE"));
}

// Answered, or the client has gone.
static void on_completed(void *opaque, struct MHD_Connection *connection, void **context,
	enum MHD_RequestTerminationCode why)
{
	struct request *q = *context;
	(void)opaque;
	(void)connection;
	(void)why;

	if (!q)
		return;
	*context = NULL;
	http_exchange_end(q->exchange);
	http_session_put(q->session);
	buf_fini(&q->body);
	free(q->event);
	free(q);
}

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

static int take_address(const char *text, bool any, union address *ret, struct err *err)
{
	const char *colon = strrchr(text, ':'), *port_text = colon ? colon + 1 : text;
	union address addr = {
		.v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}};
	char name[INET6_ADDRSTRLEN + 2];
	size_t len;
	uint64_t port;

	if (parse_uint(port_text, 0, 65535, &port, NULL) < 0)
		return err_set(err, -EINVAL,
			"http: '%.80s' is neither PORT nor ADDRESS:PORT, with a port up to 65535",
			text);
	snprintf(name, sizeof(name), "%.*s", colon ? (int)MIN(colon - text, 47L) : 9,
		colon ? text : "localhost");
	if (!any && !http_host_is_loopback(name))
		return err_set(err, -EINVAL,
			"http: '%.80s' is not of the loopback, and what is said is not encrypted: "
			"give --tls-cert and --tls-key, or let ssh -L lead to 127.0.0.1",
			text);
	len = strlen(name);
	if (name[0] == '[' && name[len - 1] == ']') {
		name[len - 1] = '\0';
		addr.v6 = (struct sockaddr_in6){.sin6_family = AF_INET6};
		if (inet_pton(AF_INET6, name + 1, &addr.v6.sin6_addr) != 1)
			return err_set(err, -EINVAL, "http: '%.80s' is no address", text);
		addr.v6.sin6_port = htons((uint16_t)port);
	} else if (strcasecmp(name, "localhost") != 0 &&
		   inet_pton(AF_INET, name, &addr.v4.sin_addr) != 1) {
		return err_set(err, -EINVAL, "http: '%.80s' is no address", text);
	} else {
		addr.v4.sin_port = htons((uint16_t)port);
	}
	*ret = addr;
	return 0;
}

// Returns the socket, the caller's, and where it listens.
static int listen_on(const char *address, bool tls, char ret_url[80], struct err *err)
{
	const char *scheme = tls ? "https" : "http";
	union address addr = {0};
	socklen_t len = sizeof(addr);
	CLEANUP_FD int fd = -1;
	const int yes = 1;
	char name[INET6_ADDRSTRLEN] = "";
	int r = take_address(address, tls, &addr, err);

	if (r < 0)
		return r;
	fd = socket(addr.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return err_errno(err, -errno, "http: a socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (bind(fd, &addr.any, sizeof(addr)) < 0 || listen(fd, BACKLOG) < 0 ||
		getsockname(fd, &addr.any, &len) < 0)
		return err_errno(err, -errno, "http: %s", address);
	if (addr.any.sa_family == AF_INET6)
		snprintf(ret_url, 80, "%s://[%s]:%u" HTTP_PATH, scheme,
			inet_ntop(AF_INET6, &addr.v6.sin6_addr, name, sizeof(name)),
			ntohs(addr.v6.sin6_port));
	else
		snprintf(ret_url, 80, "%s://%s:%u" HTTP_PATH, scheme,
			inet_ntop(AF_INET, &addr.v4.sin_addr, name, sizeof(name)),
			ntohs(addr.v4.sin_port));
	return TAKE_FD(fd);
}

static int wait_for_end(struct http *h, struct err *err)
{
	for (;;) {
		struct pollfd p = {.fd = h->config->how->stop_fd, .events = POLLIN};
		int n = poll(&p, 1, EXPIRE_MS);

		if (n < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (n > 0)
			return 0;
		http_sessions_expire(h->sessions);
	}
}

// A plain connection, taken over, which TLS has been taken off.
static void serve_plain(void *opaque, int fd)
{
	struct http *h = opaque;
	const struct sockaddr from = {.sa_family = AF_UNIX};

	(void)MHD_add_connection(h->daemon, fd, &from, sizeof(from)); // closes it if it fails
}

static int start(struct http *h, int *listen_fd, struct err *err)
{
	const bool tls = h->config->tls;
	const struct http_tls_config front = {.listen_fd = *listen_fd,
		.stop_fd = h->config->how->stop_fd,
		.connections_max = HTTP_CONNECTIONS_MAX,
		.serve = serve_plain,
		.opaque = h};

	h->daemon = MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD |
					     MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL |
					     MHD_USE_ITC | (tls ? MHD_USE_NO_LISTEN_SOCKET : 0),
		0, NULL, NULL, on_request, h, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL,
		MHD_OPTION_CONNECTION_LIMIT, HTTP_CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT,
		PATIENCE_S, tls ? MHD_OPTION_END : MHD_OPTION_LISTEN_SOCKET, *listen_fd,
		MHD_OPTION_END);
	if (!h->daemon)
		return err_set(err, -EIO, "http: the server could not be started");
	if (tls)
		return http_tls_start(h->config->tls, &front, err);
	(void)TAKE_FD(*listen_fd); // the daemon's
	return 0;
}

int http_run(const struct http_config *config, void (*started)(void *opaque, const char *url),
	void *opaque, struct err *err)
{
	struct http h = {.config = config,
		.rate_lock = PTHREAD_MUTEX_INITIALIZER,
		.rate_ns = now_ns(),
		.rate_tokens = config->rate * 2000ULL};
	char url[80];
	CLEANUP_FD int fd = listen_on(config->address, config->tls, url, err);
	int r = fd < 0 ? fd : 0;

	if (r == 0 && !(h.sessions = http_sessions_create(config->how, config->idle_ns)))
		r = err_errno(err, -ENOMEM, "http");
	if (r == 0)
		r = start(&h, &fd, err);
	if (r == 0) {
		started(opaque, url);
		r = wait_for_end(&h, err);
	}
	http_tls_destroy(config->tls); // its connections have seen stop_fd, too
	if (h.daemon)
		MHD_stop_daemon(h.daemon); // waits for its connections, who have seen stop_fd
	http_sessions_destroy(h.sessions);
	return r;
}
