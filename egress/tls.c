// SPDX-License-Identifier: Apache-2.0
// TLS by Mbed TLS; see the header. A connection's own thread.
#include "egress/tls.h"

#include <errno.h>
#include <mbedtls/ssl.h>
#include <mbedtls/x509_crt.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

struct tls_authorities {
	mbedtls_x509_crt chain;
	mbedtls_ssl_config config;
};

struct tls {
	mbedtls_ssl_context ssl;
	struct tls_wait wait;
	int fd;
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

int tls_authorities_read(const char *path, struct tls_authorities **ret, struct err *err)
{
	struct tls_authorities *a = calloc(1, sizeof(*a));

	if (!a)
		return err_errno(err, -ENOMEM, "TLS");
	mbedtls_x509_crt_init(&a->chain);
	mbedtls_ssl_config_init(&a->config);
	// Above zero: so many were not understood.
	if (mbedtls_x509_crt_parse_file(&a->chain, path) < 0 || !a->chain.raw.p) {
		tls_authorities_free(a);
		return err_set(err, -EBADMSG,
			"%s: no certificates that a server could be verified by (apt-get install "
			"ca-certificates, or SSL_CERT_FILE)",
			path);
	}
	if (mbedtls_ssl_config_defaults(&a->config, MBEDTLS_SSL_IS_CLIENT,
		    MBEDTLS_SSL_TRANSPORT_STREAM, MBEDTLS_SSL_PRESET_DEFAULT) != 0) {
		tls_authorities_free(a);
		return err_errno(err, -ENOMEM, "TLS");
	}
	mbedtls_ssl_conf_authmode(&a->config, MBEDTLS_SSL_VERIFY_REQUIRED);
	mbedtls_ssl_conf_ca_chain(&a->config, &a->chain, NULL);
	mbedtls_ssl_conf_rng(&a->config, chance, NULL);
	mbedtls_ssl_conf_min_version(
		&a->config, MBEDTLS_SSL_MAJOR_VERSION_3, MBEDTLS_SSL_MINOR_VERSION_3); // 1.2
	*ret = a;
	return 0;
}

void tls_authorities_free(struct tls_authorities *a)
{
	if (!a)
		return;
	mbedtls_ssl_config_free(&a->config);
	mbedtls_x509_crt_free(&a->chain);
	free(a);
}

static int send_some(void *opaque, const unsigned char *data, size_t len)
{
	const struct tls *tls = opaque;
	ssize_t n = send(tls->fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? MBEDTLS_ERR_SSL_WANT_WRITE
							 : MBEDTLS_ERR_SSL_INTERNAL_ERROR;
	return (int)n;
}

static int receive_some(void *opaque, unsigned char *data, size_t len)
{
	const struct tls *tls = opaque;
	ssize_t n = recv(tls->fd, data, len, MSG_DONTWAIT);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? MBEDTLS_ERR_SSL_WANT_READ
							 : MBEDTLS_ERR_SSL_INTERNAL_ERROR;
	return (int)n;
}

// After a result of Mbed TLS that is none: waits for what it wants, or -EIO.
static int wait_more(const struct tls *tls, int result)
{
	if (result == MBEDTLS_ERR_SSL_WANT_READ)
		return tls->wait.wait(tls->wait.opaque, tls->fd, POLLIN);
	if (result == MBEDTLS_ERR_SSL_WANT_WRITE)
		return tls->wait.wait(tls->wait.opaque, tls->fd, POLLOUT);
	return -EIO;
}

static int explain(const struct tls *tls, const char *host, int r, struct err *err)
{
	const uint32_t flags = mbedtls_ssl_get_verify_result(&tls->ssl);

	if (r != -EIO)
		return err_errno(err, r, "TLS with %s", host);
	if (flags == 0 || flags == UINT32_MAX)
		return err_set(err, r, "%s does not speak TLS as we do", host);
	return err_set(err, r, "the certificate of %s is %s", host,
		flags & MBEDTLS_X509_BADCERT_CN_MISMATCH ? "another's"
		: flags & (MBEDTLS_X509_BADCERT_EXPIRED | MBEDTLS_X509_BADCERT_FUTURE)
			? "not valid today"
			: "of nobody whom this host trusts");
}

int tls_open(const struct tls_authorities *authorities, int fd, const char *host,
	const struct tls_wait *wait, struct tls **ret, struct err *err)
{
	struct tls *tls = calloc(1, sizeof(*tls));
	int result, r = 0;

	if (!tls)
		return err_errno(err, -ENOMEM, "TLS");
	tls->fd = fd;
	tls->wait = *wait;
	mbedtls_ssl_init(&tls->ssl);
	if (mbedtls_ssl_setup(&tls->ssl, &authorities->config) != 0 ||
		mbedtls_ssl_set_hostname(&tls->ssl, host) != 0)
		r = -ENOMEM;
	mbedtls_ssl_set_bio(&tls->ssl, tls, send_some, receive_some, NULL);
	while (r == 0 && (result = mbedtls_ssl_handshake(&tls->ssl)) != 0)
		r = wait_more(tls, result);
	if (r < 0) {
		explain(tls, host, r, err);
		tls_close(tls);
		return r;
	}
	*ret = tls;
	return 0;
}

void tls_close(struct tls *tls)
{
	if (!tls)
		return;
	(void)mbedtls_ssl_close_notify(&tls->ssl);
	mbedtls_ssl_free(&tls->ssl);
	free(tls);
}

int tls_write(struct tls *tls, const void *data, size_t len)
{
	const unsigned char *at = data;
	int r = 0;

	while (len > 0 && r == 0) {
		int n = mbedtls_ssl_write(&tls->ssl, at, len);

		if (n <= 0) {
			r = wait_more(tls, n);
			continue;
		}
		at += n;
		len -= (size_t)n;
	}
	return r;
}

ssize_t tls_read(struct tls *tls, void *data, size_t len)
{
	int n = mbedtls_ssl_read(&tls->ssl, data, len);

	if (n >= 0)
		return n;
	if (n == MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY || n == MBEDTLS_ERR_SSL_CONN_EOF)
		return 0;
	return n == MBEDTLS_ERR_SSL_WANT_READ || n == MBEDTLS_ERR_SSL_WANT_WRITE ? -EAGAIN : -EIO;
}
