// SPDX-License-Identifier: Apache-2.0
// The proxy; see the header. The main thread takes connections and lists; each connection has a
// thread of its own, which alone uses its buffers and sockets. What both look at is under the lock.
#include "egress/proxy.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "egress/hello.h"
#include "egress/http.h"
#include "egress/tls.h"
#include "vmm/allow.h"
#include "vmm/base/fd.h"

#define HEAD_NS    30000000000ULL
#define HELLO_NS   30000000000ULL
#define CONNECT_NS 15000000000ULL
#define TLS_NS     60000000000ULL
#define IDLE_NS    600000000000ULL
#define FLOW_BYTES 16384U
#define WHY_BYTES  700

_Static_assert(HELLO_MAX_BYTES <= HTTP_HEAD_BYTES, "a hello has the room of a head");

// One direction.
struct flow {
	int from, to;
	uint64_t left; // that may still be read
	uint64_t total; // bytes that were passed on
	bool ended; // nothing more comes
	bool shut; // nor goes
	size_t off, len; // what was read and not yet written
	uint8_t data[FLOW_BYTES];
};

struct conn {
	struct proxy *proxy;
	struct resolve *resolve;
	int stop_fd; // readable: it is cut
	int client_fd, server_fd;
	uint64_t start_ns;

	// Under the lock.
	bool busy, cut;
	bool admitted; // host and port are
	bool connected; // and the address was chosen
	struct address address;

	struct http_request request;
	bool upgraded; // to TLS, with credentials
	uint8_t head[HTTP_HEAD_BYTES];
	size_t head_len;
	struct flow up, down;
};

struct proxy {
	const struct proxy_params *params;
	struct resolve_hosts hosts;
	struct tls_authorities *authorities; // NULL: there are no credentials
	pthread_mutex_t lock;
	pthread_cond_t changed; // a connection has ended
	struct allow_list allow;
	unsigned int busy;
	int free_fd; // an eventfd: tells the main thread that one has ended
	struct conn conns[PROXY_CONNECTIONS_MAX];
};

// --- Reports ---------------------------------------------------------------------------------

// What cannot be reported must not be done. record is taken over.
static int report(const struct proxy *p, json_t *record)
{
	char *text = record ? json_dumps(record, JSON_COMPACT) : NULL;
	const size_t len = text ? strlen(text) : 0;
	ssize_t n = -1;

	if (text && len < PROXY_PACKET_BYTES)
		n = send(p->params->channel_fd, text, len, MSG_NOSIGNAL);
	free(text);
	json_decref(record);
	return n < 0 ? -EIO : 0;
}

// The first one for the host, or NULL.
static const struct secret *credential_of(const struct conn *c)
{
	unsigned int next;

	return secrets_of(c->proxy->params->secrets, &c->request.host, 0, &next);
}

static json_t *record_of(const struct conn *c, const char *decision)
{
	json_t *record = json_pack("{s:s, s:s, s:s, s:s, s:i}", "event", "egress", "decision",
		decision, "method", c->request.method, "host", c->request.host.name, "port",
		(int)c->request.port);
	char text[ADDRESS_TEXT_BYTES];

	if (record && c->upgraded)
		json_object_set_new(record, "credential", json_string(credential_of(c)->name));
	if (record && c->connected) {
		address_text(&c->address, text);
		json_object_set_new(record, "address", json_string(text));
	}
	return record;
}

static int report_why(const struct conn *c, const char *decision, const char *why)
{
	json_t *record = record_of(c, decision);

	if (record)
		json_object_set_new(record, "reason", json_string(why));
	return report(c->proxy, record);
}

static void report_end(const struct conn *c, const char *why)
{
	json_t *record = record_of(c, "ended");

	if (record) {
		json_object_set_new(record, "reason", json_string(why));
		json_object_set_new(record, "bytes_out", json_integer((json_int_t)c->up.total));
		json_object_set_new(record, "bytes_in", json_integer((json_int_t)c->down.total));
		json_object_set_new(record, "duration_ms",
			json_integer((json_int_t)((now_ns() - c->start_ns) / 1000000)));
	}
	(void)report(c->proxy, record);
}

// --- Waiting ---------------------------------------------------------------------------------

// Waits for an event of the fd. 0, -ETIMEDOUT, or -ECANCELED once it is cut.
static int wait_for(const struct conn *c, int fd, short events, uint64_t deadline_ns)
{
	for (;;) {
		struct pollfd p[2] = {
			{.fd = c->stop_fd, .events = POLLIN}, {.fd = fd, .events = events}};
		const uint64_t now = now_ns();

		if (now >= deadline_ns)
			return -ETIMEDOUT;
		if (poll(p, 2, (int)((deadline_ns - now) / 1000000) + 1) < 0 && errno != EINTR)
			return -errno;
		if (p[0].revents)
			return -ECANCELED;
		if (p[1].revents)
			return 0;
	}
}

static int send_all(const struct conn *c, int fd, const void *data, size_t len)
{
	const uint64_t deadline_ns = now_ns() + IDLE_NS;
	const uint8_t *at = data;
	int r = 0;

	while (len > 0 && r == 0) {
		ssize_t n = send(fd, at, len, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return -errno;
		if (n < 0) {
			r = wait_for(c, fd, POLLOUT, deadline_ns);
			continue;
		}
		at += n;
		len -= (size_t)n;
	}
	return r;
}

// More of what the client says, behind what is there. -ENODATA at its end.
static int read_more(struct conn *c, uint64_t deadline_ns)
{
	int r = wait_for(c, c->client_fd, POLLIN, deadline_ns);
	ssize_t n;

	if (r < 0)
		return r;
	n = recv(c->client_fd, c->head + c->head_len, sizeof(c->head) - c->head_len, MSG_DONTWAIT);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	c->head_len += (size_t)n;
	return n == 0 ? -ENODATA : 0;
}

// --- Answers ---------------------------------------------------------------------------------

static void answer(const struct conn *c, const char *status, const char *why)
{
	char text[2 * WHY_BYTES + 256];
	int len = http_answer(text, sizeof(text), status, why);

	if (send_all(c, c->client_fd, text, (size_t)len) == 0)
		shutdown(c->client_fd, SHUT_WR);
}

static int refuse(const struct conn *c, const char *status, const char *why)
{
	(void)report_why(c, "denied", why);
	answer(c, status, why);
	return -EPERM;
}

static int fail(const struct conn *c, const char *status, const char *why)
{
	(void)report_why(c, "failed", why);
	answer(c, status, why);
	return -EIO;
}

// --- From a request to a server --------------------------------------------------------------

static int read_request(struct conn *c)
{
	const uint64_t deadline_ns = now_ns() + HEAD_NS;
	struct err err = {0};
	int r;

	while ((r = http_read((const char *)c->head, c->head_len, &c->request, &err)) == 0) {
		r = read_more(c, deadline_ns);
		if (r < 0)
			return r; // it never asked for anything
	}
	if (r > 0)
		return 0;
	return refuse(c,
		r == -E2BIG        ? "431 Request Header Fields Too Large"
		: r == -EOPNOTSUPP ? "411 Length Required"
				   : "400 Bad Request",
		err.msg);
}

// NULL where it is not seen.
static const char *method_of(const struct http_request *r)
{
	return r->connect ? NULL : r->method;
}

// With the lock held.
static bool is_named(
	const struct proxy *p, const struct address *address, const struct http_request *r)
{
	struct allow_host host = {.literal = true};

	address_text(address, host.name);
	return allow_admits(&p->allow, &host, r->port, method_of(r));
}

static bool may_connect(
	const struct proxy *p, const struct address *address, const struct http_request *r)
{
	return !address_not_public(address) || is_named(p, address, r);
}

static int admit(struct conn *c)
{
	struct proxy *p = c->proxy;
	struct http_request *r = &c->request;
	char why[WHY_BYTES];
	bool admitted, has_method;

	// A tunnel hides what is asked of whom, which TLS tells and plain HTTP would not.
	if (r->connect && r->port == HTTP_PORT)
		return refuse(c, "403 Forbidden", "no CONNECT to port 80: ask for http://...");
	if (!r->connect && r->port == HTTPS_PORT)
		return refuse(c, "403 Forbidden", "no plain HTTP to port 443: use CONNECT");
	if (credential_of(c) && r->connect && r->port == HTTPS_PORT) {
		snprintf(why, sizeof(why),
			"no credential can be put into a tunnel: ask for http://%s, which goes out "
			"over TLS",
			r->host.name);
		return refuse(c, "403 Forbidden", why);
	}
	if (credential_of(c) && !r->connect && r->port == HTTP_PORT) {
		c->upgraded = true;
		r->port = HTTPS_PORT;
	}
	pthread_mutex_lock(&p->lock);
	admitted = allow_admits(&p->allow, &r->host, r->port, method_of(r));
	has_method = allow_has_method(&p->allow, &r->host, r->port);
	c->admitted = admitted;
	pthread_mutex_unlock(&p->lock);
	if (admitted)
		return 0;
	if (has_method && r->connect)
		snprintf(why, sizeof(why),
			"%s:%u is on this machine's list for some methods alone, and inside a "
			"tunnel none is seen",
			r->host.name, r->port);
	else
		snprintf(why, sizeof(why), "%s%s%s:%u is not on this machine's list",
			has_method ? r->method : "", has_method ? "@" : "", r->host.name, r->port);
	return refuse(c, "403 Forbidden", why);
}

static int connect_to(struct conn *c, const struct address *address)
{
	const struct sockaddr_in v4 = {
		.sin_family = AF_INET, .sin_port = htons(c->request.port), .sin_addr = address->v4};
	const struct sockaddr_in6 v6 = {.sin6_family = AF_INET6,
		.sin6_port = htons(c->request.port),
		.sin6_addr = address->v6};
	const bool is_v4 = address->family == AF_INET;
	CLEANUP_FD int fd = socket(address->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int r, error = 0, on = 1;
	socklen_t len = sizeof(error);

	if (fd < 0)
		return -errno;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	r = connect(
		fd, is_v4 ? (const void *)&v4 : (const void *)&v6, is_v4 ? sizeof(v4) : sizeof(v6));
	if (r < 0 && errno != EINPROGRESS)
		return -errno;
	r = wait_for(c, fd, POLLOUT, now_ns() + CONNECT_NS);
	if (r == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0)
		r = -errno;
	if (r < 0 || error)
		return r < 0 ? r : -error;
	c->server_fd = TAKE_FD(fd);
	return 0;
}

// Says that it will be done, and does it, at the first of the addresses that may be had.
static int connect_any(struct conn *c, const struct address *addresses, unsigned int nr)
{
	struct proxy *p = c->proxy;
	char why[WHY_BYTES], text[ADDRESS_TEXT_BYTES];
	unsigned int tried = 0;
	int r = -ENOENT;

	for (unsigned int i = 0; i < nr && r < 0 && r != -ECANCELED; i++) {
		bool good;

		pthread_mutex_lock(&p->lock);
		good = !c->cut && may_connect(p, &addresses[i], &c->request);
		if (good) {
			c->address = addresses[i];
			c->connected = true;
		}
		pthread_mutex_unlock(&p->lock);
		if (!good)
			continue;
		if (tried++ == 0 && report(p, record_of(c, "admitted")) < 0)
			return -EIO;
		r = connect_to(c, &addresses[i]);
	}
	if (r == 0 || r == -ECANCELED)
		return r;
	if (tried == 0) {
		const char *what = address_not_public(&addresses[0]);

		address_text(&addresses[0], text);
		snprintf(why, sizeof(why), "%s is %s, which is %s, and not on the list by itself",
			c->request.host.name, text, what ? what : "no longer admitted");
		return refuse(c, "403 Forbidden", why);
	}
	snprintf(why, sizeof(why), "%s:%u: %s", c->request.host.name, c->request.port,
		r == -ETIMEDOUT ? "it does not answer" : strerror(-r));
	return fail(c, "502 Bad Gateway", why);
}

static int reach(struct conn *c)
{
	struct address addresses[RESOLVE_ADDRESSES_MAX] = {0};
	struct err err = {0};
	char why[ALLOW_HOST_BYTES + sizeof(err.msg) + 3];
	int nr = 1;

	if (c->request.host.literal)
		ASSERT(address_parse(c->request.host.name, &addresses[0]));
	else
		nr = resolve_name(
			c->resolve, &c->proxy->hosts, c->request.host.name, addresses, &err);
	if (nr < 0) {
		snprintf(why, sizeof(why), "%s: %s", c->request.host.name, err.msg);
		return fail(c, "502 Bad Gateway", why);
	}
	return connect_any(c, addresses, (unsigned int)nr);
}

// --- Tunnels ---------------------------------------------------------------------------------

// What the client of a tunnel says to its TLS server: to whom it wants to speak is whom we
// admitted.
static int check_hello(struct conn *c)
{
	const uint64_t deadline_ns = now_ns() + HELLO_NS;
	char name[HELLO_NAME_BYTES] = "", why[WHY_BYTES];
	enum hello hello;
	int r = 0;

	while ((hello = hello_read(c->head, c->head_len, name)) == HELLO_MORE && r == 0)
		r = read_more(c, deadline_ns);
	if (r < 0)
		return r;
	if (hello == HELLO_NAME && !c->request.host.literal &&
		!strcasecmp(name, c->request.host.name))
		return 0;
	// Addresses have no name in TLS.
	if (hello == HELLO_NAMELESS && c->request.host.literal)
		return 0;
	if (hello == HELLO_BAD)
		snprintf(why, sizeof(why), "what is sent to port 443 is not TLS");
	else
		snprintf(why, sizeof(why), "TLS asks for '%s' in a tunnel to %s", name,
			c->request.host.name);
	(void)report_why(c, "denied", why);
	return -EPERM;
}

static bool flow_read(struct flow *f)
{
	ssize_t n;

	if (f->len || f->ended)
		return true;
	n = recv(f->from, f->data, (size_t)MIN(f->left, (uint64_t)sizeof(f->data)), MSG_DONTWAIT);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	f->off = 0;
	f->len = (size_t)n;
	f->left -= (uint64_t)n;
	f->ended = n == 0 || f->left == 0;
	return true;
}

static bool flow_write(struct flow *f, bool pass_end)
{
	while (f->len) {
		ssize_t n = send(f->to, f->data + f->off, f->len, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		f->off += (size_t)n;
		f->len -= (size_t)n;
		f->total += (uint64_t)n;
	}
	if (f->ended && !f->shut) {
		f->shut = true;
		if (pass_end)
			shutdown(f->to, SHUT_WR);
	}
	return true;
}

// Until both directions have ended, or the server's, where a request has but one answer. Why is the
// result.
static const char *relay(struct conn *c)
{
	const bool tunnel = c->request.connect;

	for (;;) {
		struct pollfd p[3] = {
			{.fd = c->stop_fd, .events = POLLIN},
			{.fd = c->client_fd},
			{.fd = c->server_fd},
		};
		int n;

		if (!flow_write(&c->up, tunnel) || !flow_write(&c->down, true))
			return "broken";
		if (c->down.shut && (c->up.shut || !tunnel))
			return "done";
		p[1].events = (short)((c->down.len ? POLLOUT : 0) |
				      (c->up.len || c->up.ended ? 0 : POLLIN));
		p[2].events = (short)((c->up.len ? POLLOUT : 0) |
				      (c->down.len || c->down.ended ? 0 : POLLIN));
		// Their hang-ups come unasked, again and again. The client's is to be seen while
		// its answer is waited for.
		if (!p[1].events && c->up.len)
			p[1].fd = -1;
		if (!p[2].events)
			p[2].fd = -1;
		n = poll(p, 3, (int)(IDLE_NS / 1000000));
		if (n < 0 && errno != EINTR)
			return "broken";
		if (n == 0)
			return "idle for too long";
		if (p[0].revents)
			return "cut: no longer on the list";
		// A client that is gone altogether, even while nothing is read from it.
		if ((p[1].revents & (POLLHUP | POLLERR)) && !(p[1].revents & POLLIN) &&
			!c->up.len && c->up.ended)
			return "the guest hung up";
		if (((p[1].revents & (POLLIN | POLLHUP | POLLERR)) && !flow_read(&c->up)) ||
			((p[2].revents & (POLLIN | POLLHUP | POLLERR)) && !flow_read(&c->down)))
			return "broken";
	}
}

// What the client has sent already.
static void begin_flow(struct conn *c, const uint8_t *data, size_t len)
{
	struct flow *up = &c->up;

	ASSERT(len <= sizeof(up->data));
	memcpy(up->data, data, len);
	up->off = 0;
	up->len = len;
	up->left -= len;
	up->ended = up->left == 0;
}

static int begin_tunnel(struct conn *c)
{
	static const char established[] = "HTTP/1.1 200 Connection established\r\n\r\n";
	int r = send_all(c, c->client_fd, established, strlen(established));

	// Behind the head is what it has to say to its server.
	c->head_len -= c->request.head_bytes;
	memmove(c->head, c->head + c->request.head_bytes, c->head_len);
	if (r == 0 && c->request.port == HTTPS_PORT)
		r = check_hello(c);
	if (r == 0)
		begin_flow(c, c->head, c->head_len);
	return r;
}

static int begin_request(struct conn *c)
{
	CLEANUP_BUF struct buf out = {0};
	const size_t head_bytes = c->request.head_bytes;
	int r = http_forward((const char *)c->head, &c->request, NULL, 0, &out);

	if (r == 0)
		r = send_all(c, c->server_fd, out.data, out.len);
	if (r < 0)
		return r;
	c->up.total = out.len;
	c->up.left = c->request.body_bytes;
	// Another request, behind this one, is for a connection of its own.
	begin_flow(c, c->head + head_bytes,
		(size_t)MIN((uint64_t)(c->head_len - head_bytes), c->up.left));
	return 0;
}

// --- Requests with credentials ---------------------------------------------------------------

static int wait_server(void *opaque, int fd, short events)
{
	return wait_for(opaque, fd, events, now_ns() + TLS_NS);
}

// For more of the answer; a client that has gone is seen, too.
static int wait_answer(const struct conn *c)
{
	struct pollfd p[3] = {
		{.fd = c->stop_fd, .events = POLLIN},
		{.fd = c->client_fd},
		{.fd = c->server_fd, .events = POLLIN},
	};
	int n = poll(p, 3, (int)(IDLE_NS / 1000000));

	if (n < 0 && errno != EINTR)
		return -errno;
	if (n == 0)
		return -ETIMEDOUT;
	if (p[0].revents)
		return -ECANCELED;
	return p[1].revents ? -EPIPE : 0;
}

static int send_head(struct conn *c, struct tls *tls)
{
	const struct secrets *secrets = c->proxy->params->secrets;
	struct http_field fields[SECRETS_MAX];
	CLEANUP_BUF struct buf out = {0};
	const struct secret *s;
	unsigned int nr = 0, i = 0;
	int r;

	while ((s = secrets_of(secrets, &c->request.host, i, &i)))
		fields[nr++] = (struct http_field){s->header, s->value};
	r = http_forward((const char *)c->head, &c->request, fields, nr, &out);
	if (r == 0)
		r = tls_write(tls, out.data, out.len);
	c->up.total = out.len;
	if (out.data)
		explicit_bzero(out.data, out.len);
	return r;
}

static int send_body(struct conn *c, struct tls *tls)
{
	uint64_t left = c->request.body_bytes;
	size_t n = c->head_len - c->request.head_bytes;
	int r = 0;

	memmove(c->head, c->head + c->request.head_bytes, n);
	c->head_len = n;
	while (left > 0 && r == 0) {
		n = (size_t)MIN((uint64_t)c->head_len, left);
		r = n ? tls_write(tls, c->head, n) : read_more(c, now_ns() + IDLE_NS);
		if (n) {
			left -= n;
			c->up.total += n;
			c->head_len = 0;
		}
	}
	return r;
}

static int pass_answer(struct conn *c, struct tls *tls, struct redactor *redactor)
{
	CLEANUP_BUF struct buf out = {0};
	ssize_t n = 1;
	int r = 0;

	while (n != 0 && r == 0) {
		n = tls_read(tls, c->down.data, sizeof(c->down.data));
		if (n == -EAGAIN) {
			r = wait_answer(c);
			continue;
		}
		if (n < 0)
			return (int)n;
		out.len = 0;
		r = n ? redactor_feed(redactor, c->down.data, (size_t)n, &out)
		      : redactor_end(redactor, &out);
		if (r == 0)
			r = send_all(c, c->client_fd, out.data, out.len);
		c->down.total += out.len;
	}
	if (r == 0)
		shutdown(c->client_fd, SHUT_WR);
	return r;
}

static void serve_upgraded(struct conn *c)
{
	const struct tls_wait wait = {wait_server, c};
	struct redactor redactor = {.nr = 0};
	struct tls *tls = NULL;
	struct err err = {0};
	char why[WHY_BYTES];
	int r = tls_open(
		c->proxy->authorities, c->server_fd, c->request.host.name, &wait, &tls, &err);

	if (r < 0 && r != -ECANCELED) {
		snprintf(why, sizeof(why), "the credential '%s' was not sent: %s",
			credential_of(c)->name, err.msg);
		(void)fail(c, "502 Bad Gateway", why);
		return;
	}
	if (r == 0)
		r = redactor_init(&redactor, c->proxy->params->secrets, &c->request.host);
	if (r == 0)
		r = send_head(c, tls);
	if (r == 0)
		r = send_body(c, tls);
	if (r == 0)
		r = pass_answer(c, tls, &redactor);
	tls_close(tls);
	redactor_fini(&redactor);
	report_end(c, r == 0            ? "done"
		      : r == -ECANCELED ? "cut: no longer on the list"
		      : r == -ETIMEDOUT ? "idle for too long"
					: "broken");
}

static void serve(struct conn *c)
{
	const char *why;
	int r = read_request(c);

	if (r == 0)
		r = admit(c);
	if (r == 0)
		r = reach(c);
	if (r < 0 && !c->connected)
		return;
	if (r == 0 && c->upgraded) {
		serve_upgraded(c);
		return;
	}
	c->up.from = c->down.to = c->client_fd;
	c->up.to = c->down.from = c->server_fd;
	c->up.left = c->down.left = UINT64_MAX;
	if (r == 0)
		r = c->request.connect ? begin_tunnel(c) : begin_request(c);
	if (r == -EPERM || (r < 0 && c->server_fd < 0 && r != -ECANCELED))
		return; // it has been said why
	why = r == -ECANCELED ? "cut: no longer on the list" : r < 0 ? "broken" : relay(c);
	report_end(c, why);
}

// --- Connections -----------------------------------------------------------------------------

static void *conn_main(void *opaque)
{
	struct conn *c = opaque;
	struct proxy *p = c->proxy;
	const uint64_t one = 1;

	serve(c);
	pthread_mutex_lock(&p->lock);
	fd_close(&c->client_fd);
	fd_close(&c->server_fd);
	fd_close(&c->stop_fd);
	c->busy = false;
	p->busy--;
	(void)!write(p->free_fd, &one, sizeof(one));
	pthread_cond_signal(&p->changed);
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

// fd is taken over.
static void start(struct proxy *p, int fd)
{
	struct conn *c = NULL;
	pthread_attr_t attr;
	pthread_t thread;

	pthread_mutex_lock(&p->lock);
	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX && !c; i++)
		if (!p->conns[i].busy)
			c = &p->conns[i];
	ASSERT(c);
	c->client_fd = fd;
	c->server_fd = -1;
	c->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	c->start_ns = now_ns();
	c->cut = c->admitted = c->connected = c->upgraded = false;
	c->request = (struct http_request){0};
	c->head_len = 0;
	c->up.total = c->down.total = 0;
	c->up.ended = c->up.shut = c->down.ended = c->down.shut = false;
	c->up.len = c->down.len = 0;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 * KIB);
	c->busy = c->stop_fd >= 0 && pthread_create(&thread, &attr, conn_main, c) == 0;
	pthread_attr_destroy(&attr);
	p->busy += c->busy;
	if (!c->busy) {
		fd_close(&c->stop_fd);
		fd_close(&c->client_fd);
	}
	pthread_mutex_unlock(&p->lock);
}

// With the lock held.
static void cut(struct conn *c)
{
	const uint64_t one = 1;

	c->cut = true;
	(void)!write(c->stop_fd, &one, sizeof(one));
}

static unsigned int cut_refused(struct proxy *p)
{
	unsigned int nr = 0;

	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX; i++) {
		struct conn *c = &p->conns[i];

		if (!c->busy || c->cut || !c->admitted ||
			(allow_admits(&p->allow, &c->request.host, c->request.port,
				 method_of(&c->request)) &&
				(!c->connected || may_connect(p, &c->address, &c->request))))
			continue;
		cut(c);
		nr++;
	}
	return nr;
}

// Takes a list. 1 at the end of the channel.
static int take_list(struct proxy *p)
{
	static char text[PROXY_PACKET_BYTES];
	static struct allow_list list;
	struct err err = {0};
	unsigned int nr;
	ssize_t n = recv(p->params->channel_fd, text, sizeof(text) - 1, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n == 0 || (n < 0 && errno == ECONNRESET)) // with what it has not read
		return 1;
	if (n < 0)
		return -errno;
	text[n] = '\0';
	// Behind a byte of its own: an empty packet would be the end. What is none admits nobody.
	if (allow_parse(text + 1, &list, &err) < 0)
		list = (struct allow_list){0};
	pthread_mutex_lock(&p->lock);
	p->allow = list;
	nr = cut_refused(p);
	pthread_mutex_unlock(&p->lock);
	return report(p, json_pack("{s:s, s:i}", "event", "applied", "cut", (int)nr));
}

static int turn(struct proxy *p)
{
	struct pollfd polls[3] = {
		{.fd = p->params->channel_fd, .events = POLLIN},
		{.fd = p->params->listen_fd, .events = POLLIN},
		{.fd = p->free_fd, .events = POLLIN},
	};
	uint64_t freed;
	bool full;
	int fd;

	pthread_mutex_lock(&p->lock);
	full = p->busy == PROXY_CONNECTIONS_MAX;
	pthread_mutex_unlock(&p->lock);
	if (full)
		polls[1].fd = -1; // they wait in the kernel's queue
	if (poll(polls, 3, -1) < 0 && errno != EINTR)
		return -errno;
	if (polls[2].revents)
		(void)!read(p->free_fd, &freed, sizeof(freed));
	if (polls[0].revents)
		return take_list(p);
	if (polls[1].revents) {
		fd = accept4(p->params->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd >= 0)
			start(p, fd);
	}
	return 0;
}

static int prepare(struct proxy *p, struct err *err)
{
	int r = resolve_hosts_read(p->params->hosts_path, &p->hosts, err);

	if (r == 0 && p->params->secrets->nr)
		r = tls_authorities_read(p->params->authorities_path, &p->authorities, err);
	p->free_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (r == 0 && p->free_fd < 0)
		r = err_errno(err, -errno, "eventfd");
	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX && r == 0; i++) {
		p->conns[i].proxy = p;
		r = resolve_create(&p->conns[i].resolve, err);
	}
	if (r == 0 && p->params->confine)
		r = p->params->confine(p->params->opaque, err);
	return r;
}

int proxy_run(const struct proxy_params *params, struct err *err)
{
	struct proxy *p = calloc(1, sizeof(*p));
	int r;

	if (!p)
		return err_errno(err, -ENOMEM, "proxy");
	p->params = params;
	p->free_fd = -1;
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->changed, NULL);
	r = prepare(p, err);
	while (r == 0) {
		r = turn(p);
		if (r < 0)
			err_errno(err, r, "proxy");
	}
	pthread_mutex_lock(&p->lock);
	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX; i++)
		if (p->conns[i].busy)
			cut(&p->conns[i]);
	while (p->busy)
		pthread_cond_wait(&p->changed, &p->lock);
	pthread_mutex_unlock(&p->lock);
	for (size_t i = 0; i < PROXY_CONNECTIONS_MAX; i++)
		resolve_destroy(p->conns[i].resolve);
	resolve_hosts_fini(&p->hosts);
	tls_authorities_free(p->authorities);
	fd_close(&p->free_fd);
	pthread_cond_destroy(&p->changed);
	pthread_mutex_destroy(&p->lock);
	free(p);
	return MIN(r, 0);
}
