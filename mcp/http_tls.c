// SPDX-License-Identifier: Apache-2.0
// TLS in front of HTTP; see the header. The accepting thread, and one a connection.
#include "mcp/http_tls.h"

#include <errno.h>
#include <fcntl.h>
#include <mbedtls/pk.h>
#include <mbedtls/ssl.h>
#include <mbedtls/x509_crt.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define STACK_BYTES  (256 * KIB)
#define PIECE_BYTES  (16 * KIB)
#define FILE_BYTES   (256 * KIB)
#define HANDSHAKE_NS 10000000000ULL
#define IDLE_MS      60000 // the endpoint says something more often than that

struct http_tls {
	mbedtls_x509_crt chain;
	mbedtls_pk_context key;
	mbedtls_ssl_config ssl;
	struct http_tls_config config;
	pthread_t thread;
	bool started;
	pthread_mutex_t lock; // of what follows, and of the key, which handshakes share
	pthread_cond_t ended;
	unsigned int connections;
};

struct connection {
	struct http_tls *tls;
	mbedtls_ssl_context ssl;
	int fd, plain_fd; // owned
};

// The kernel's: no state of ours that threads would share.
static int chance(void *opaque, unsigned char *out, size_t len)
{
	(void)opaque;
	while (len > 0) {
		ssize_t n = getrandom(out, len, 0);

		if (n < 0)
			return -1;
		out += n;
		len -= (size_t)n;
	}
	return 0;
}

// --- Certificate and key ---------------------------------------------------------------------

static int load_cert(struct http_tls *tls, const char *path, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	size_t len;
	int r = fd_read_file(path, FILE_BYTES, &text, &len, err);

	if (r < 0)
		return r;
	if (mbedtls_x509_crt_parse(&tls->chain, (unsigned char *)text, len + 1) != 0)
		return err_set(err, -EINVAL, "%s: no certificate in PEM that could be read", path);
	return 0;
}

static int load_key(struct http_tls *tls, const char *path, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	struct stat st;
	size_t len = 0;
	int r = fd_read_file(path, FILE_BYTES, &text, &len, err);

	if (r == 0 && (stat(path, &st) < 0 || (st.st_mode & 077)))
		r = err_set(err, -EPERM, "%s: others may read it (chmod 600 %s)", path, path);
	if (r == 0 && mbedtls_pk_parse_key(&tls->key, (unsigned char *)text, len + 1, NULL, 0) != 0)
		r = err_set(err, -EINVAL,
			"%s: no key in PEM that could be read (one without a password)", path);
	if (text)
		explicit_bzero(text, len);
	if (r == 0 && mbedtls_pk_check_pair(&tls->chain.pk, &tls->key) != 0)
		r = err_set(err, -EINVAL, "%s: not the key of the certificate", path);
	return r;
}

int http_tls_load(const char *cert, const char *key, struct http_tls **ret, struct err *err)
{
	struct http_tls *tls = calloc(1, sizeof(*tls));
	int r;

	if (!tls)
		return err_errno(err, -ENOMEM, "TLS");
	mbedtls_x509_crt_init(&tls->chain);
	mbedtls_pk_init(&tls->key);
	mbedtls_ssl_config_init(&tls->ssl);
	pthread_mutex_init(&tls->lock, NULL);
	pthread_cond_init(&tls->ended, NULL);
	r = load_cert(tls, cert, err);
	if (r == 0)
		r = load_key(tls, key, err);
	if (r == 0 && (mbedtls_ssl_config_defaults(&tls->ssl, MBEDTLS_SSL_IS_SERVER,
			       MBEDTLS_SSL_TRANSPORT_STREAM, MBEDTLS_SSL_PRESET_DEFAULT) != 0 ||
			      mbedtls_ssl_conf_own_cert(&tls->ssl, &tls->chain, &tls->key) != 0))
		r = err_errno(err, -ENOMEM, "TLS");
	mbedtls_ssl_conf_rng(&tls->ssl, chance, NULL);
	mbedtls_ssl_conf_min_version(
		&tls->ssl, MBEDTLS_SSL_MAJOR_VERSION_3, MBEDTLS_SSL_MINOR_VERSION_3); // 1.2
	if (r < 0)
		http_tls_destroy(tls);
	else
		*ret = tls;
	return r;
}

void http_tls_destroy(struct http_tls *tls)
{
	if (!tls)
		return;
	if (tls->started) {
		pthread_join(tls->thread, NULL);
		pthread_mutex_lock(&tls->lock);
		while (tls->connections)
			pthread_cond_wait(&tls->ended, &tls->lock);
		pthread_mutex_unlock(&tls->lock);
	}
	mbedtls_ssl_config_free(&tls->ssl);
	mbedtls_pk_free(&tls->key);
	mbedtls_x509_crt_free(&tls->chain);
	pthread_cond_destroy(&tls->ended);
	pthread_mutex_destroy(&tls->lock);
	free(tls);
}

// --- A connection, in its thread -------------------------------------------------------------

static int send_some(void *opaque, const unsigned char *data, size_t len)
{
	const struct connection *c = opaque;
	ssize_t n = send(c->fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? MBEDTLS_ERR_SSL_WANT_WRITE
							 : MBEDTLS_ERR_SSL_INTERNAL_ERROR;
	return (int)n;
}

static int receive_some(void *opaque, unsigned char *data, size_t len)
{
	const struct connection *c = opaque;
	ssize_t n = recv(c->fd, data, len, MSG_DONTWAIT);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? MBEDTLS_ERR_SSL_WANT_READ
							 : MBEDTLS_ERR_SSL_INTERNAL_ERROR;
	return (int)n;
}

static short events_of(int wants)
{
	return wants == MBEDTLS_ERR_SSL_WANT_READ    ? POLLIN
	       : wants == MBEDTLS_ERR_SSL_WANT_WRITE ? POLLOUT
						     : 0;
}

// Whether something came of it in time.
static bool wait_for(const struct connection *c, short events, short plain_events, int timeout_ms)
{
	struct pollfd p[3] = {{.fd = events ? c->fd : -1, .events = events},
		{.fd = plain_events ? c->plain_fd : -1, .events = plain_events},
		{.fd = c->tls->config.stop_fd, .events = POLLIN}};
	int n;

	while ((n = poll(p, ARRAY_SIZE(p), timeout_ms)) < 0)
		;
	return n > 0 && !p[2].revents;
}

static bool shake_hands(struct connection *c)
{
	const uint64_t until_ns = now_ns() + HANDSHAKE_NS;

	for (;;) {
		uint64_t now = now_ns();
		int result;

		pthread_mutex_lock(&c->tls->lock);
		result = mbedtls_ssl_handshake(&c->ssl);
		pthread_mutex_unlock(&c->tls->lock);
		if (result == 0)
			return true;
		if (!events_of(result) || now >= until_ns ||
			!wait_for(c, events_of(result), 0, (int)((until_ns - now) / 1000000) + 1))
			return false;
	}
}

// One direction: what was read and is not written yet.
struct piece {
	uint8_t bytes[PIECE_BYTES];
	size_t start, end;
};

// From the client. What it waits for is added to the events. -EPIPE at the end.
static int pass_up(struct connection *c, struct piece *up, short *events, short *plain_events)
{
	ssize_t n;

	if (up->start == up->end) {
		int got = mbedtls_ssl_read(&c->ssl, up->bytes, sizeof(up->bytes));

		*events |= events_of(got);
		if (got <= 0)
			return events_of(got) ? 0 : -EPIPE;
		up->start = 0;
		up->end = (size_t)got;
	}
	n = send(c->plain_fd, up->bytes + up->start, up->end - up->start,
		MSG_NOSIGNAL | MSG_DONTWAIT);
	if (n < 0) {
		*plain_events |= POLLOUT;
		return errno == EAGAIN || errno == EINTR ? 0 : -EPIPE;
	}
	up->start += (size_t)n;
	return 1;
}

static int pass_down(struct connection *c, struct piece *down, short *events, short *plain_events)
{
	int put;

	if (down->start == down->end) {
		ssize_t n = recv(c->plain_fd, down->bytes, sizeof(down->bytes), MSG_DONTWAIT);

		*plain_events |= POLLIN;
		if (n <= 0)
			return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -EPIPE;
		down->start = 0;
		down->end = (size_t)n;
	}
	// Again with the same bytes, if it is not done.
	put = mbedtls_ssl_write(&c->ssl, down->bytes + down->start, down->end - down->start);
	*events |= events_of(put);
	if (put <= 0)
		return events_of(put) ? 0 : -EPIPE;
	down->start += (size_t)put;
	return 1;
}

// Until either side has gone: a client that ends its half has gone, as it has in plain HTTP here.
static void pass_on(struct connection *c)
{
	struct piece *up = calloc(2, sizeof(*up)), *down = up + 1;

	while (up) {
		short events = 0, plain_events = 0;
		int went_down = pass_down(c, down, &events, &plain_events);
		int went_up = went_down < 0 ? 0 : pass_up(c, up, &events, &plain_events);

		if (went_down < 0 || went_up < 0)
			break;
		if (went_down == 0 && went_up == 0 && !wait_for(c, events, plain_events, IDLE_MS))
			break;
	}
	free(up);
	(void)mbedtls_ssl_close_notify(&c->ssl);
}

static void serve(struct connection *c)
{
	int pair[2];

	if (mbedtls_ssl_setup(&c->ssl, &c->tls->ssl) != 0)
		return;
	mbedtls_ssl_set_bio(&c->ssl, c, send_some, receive_some, NULL);
	if (!shake_hands(c) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return;
	c->plain_fd = pair[0];
	c->tls->config.serve(c->tls->config.opaque, pair[1]);
	pass_on(c);
}

static void *connection_main(void *opaque)
{
	struct connection *c = opaque;
	struct http_tls *tls = c->tls;

	mbedtls_ssl_init(&c->ssl);
	serve(c);
	mbedtls_ssl_free(&c->ssl);
	fd_close(&c->plain_fd);
	fd_close(&c->fd);
	free(c);
	pthread_mutex_lock(&tls->lock);
	tls->connections--;
	pthread_cond_signal(&tls->ended);
	pthread_mutex_unlock(&tls->lock);
	return NULL;
}

// --- Accepting -------------------------------------------------------------------------------

// Takes fd over.
static void begin(struct http_tls *tls, int fd)
{
	struct connection *c = calloc(1, sizeof(*c));
	pthread_attr_t attr;
	pthread_t thread;
	bool good = false;

	if (c) {
		*c = (struct connection){.tls = tls, .fd = fd, .plain_fd = -1};
		pthread_attr_init(&attr);
		pthread_attr_setstacksize(&attr, STACK_BYTES);
		pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
		pthread_mutex_lock(&tls->lock);
		good = tls->connections < tls->config.connections_max &&
		       pthread_create(&thread, &attr, connection_main, c) == 0;
		tls->connections += good;
		pthread_mutex_unlock(&tls->lock);
		pthread_attr_destroy(&attr);
	}
	if (good)
		return;
	free(c);
	fd_close(&fd);
}

static void *accept_main(void *opaque)
{
	struct http_tls *tls = opaque;

	for (;;) {
		struct pollfd p[2] = {{.fd = tls->config.listen_fd, .events = POLLIN},
			{.fd = tls->config.stop_fd, .events = POLLIN}};
		int fd;

		if (poll(p, ARRAY_SIZE(p), -1) < 0)
			continue;
		if (p[1].revents)
			return NULL;
		fd = accept4(tls->config.listen_fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd >= 0)
			begin(tls, fd);
		else if (errno != EAGAIN)
			poll(&p[1], 1, 100); // no descriptors: not at once again
	}
}

int http_tls_start(struct http_tls *tls, const struct http_tls_config *config, struct err *err)
{
	int flags = fcntl(config->listen_fd, F_GETFL), r;

	// Who knocked may have gone when it is their turn.
	if (flags < 0 || fcntl(config->listen_fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return err_errno(err, -errno, "TLS");
	tls->config = *config;
	r = -pthread_create(&tls->thread, NULL, accept_main, tls);
	if (r < 0)
		return err_errno(err, r, "TLS");
	tls->started = true;
	return 0;
}
