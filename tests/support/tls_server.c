// SPDX-License-Identifier: Apache-2.0
// A TLS server; see the header.
#include "tests/support/test.h"

#include "tests/support/tls_server.h"

#include <mbedtls/ecp.h>
#include <mbedtls/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "vmm/base/fd.h"

static int chance(void *opaque, unsigned char *out, size_t len)
{
	(void)opaque;
	return getrandom(out, len, 0) == (ssize_t)len ? 0 : -1;
}

void identity_make(struct identity *id, const char *name, const char *until)
{
	mbedtls_x509write_cert w;
	mbedtls_mpi serial;
	char subject[64];

	snprintf(subject, sizeof(subject), "CN=%s", name);
	mbedtls_pk_init(&id->key);
	mbedtls_x509_crt_init(&id->cert);
	mbedtls_x509write_crt_init(&w);
	mbedtls_mpi_init(&serial);
	assert_int_equal(
		mbedtls_pk_setup(&id->key, mbedtls_pk_info_from_type(MBEDTLS_PK_ECKEY)), 0);
	assert_int_equal(
		mbedtls_ecp_gen_key(MBEDTLS_ECP_DP_SECP256R1, mbedtls_pk_ec(id->key), chance, NULL),
		0);
	mbedtls_mpi_lset(&serial, 1);
	mbedtls_x509write_crt_set_serial(&w, &serial);
	mbedtls_x509write_crt_set_md_alg(&w, MBEDTLS_MD_SHA256);
	mbedtls_x509write_crt_set_version(&w, MBEDTLS_X509_CRT_VERSION_3);
	mbedtls_x509write_crt_set_subject_key(&w, &id->key);
	mbedtls_x509write_crt_set_issuer_key(&w, &id->key);
	assert_int_equal(mbedtls_x509write_crt_set_subject_name(&w, subject), 0);
	assert_int_equal(mbedtls_x509write_crt_set_issuer_name(&w, subject), 0);
	assert_int_equal(mbedtls_x509write_crt_set_validity(&w, "20200101000000", until), 0);
	assert_int_equal(mbedtls_x509write_crt_set_basic_constraints(&w, 1, -1), 0);
	assert_int_equal(mbedtls_x509write_crt_pem(
				 &w, (unsigned char *)id->pem, sizeof(id->pem), chance, NULL),
		0);
	assert_int_equal(
		mbedtls_x509_crt_parse(&id->cert, (unsigned char *)id->pem, strlen(id->pem) + 1),
		0);
	mbedtls_mpi_free(&serial);
	mbedtls_x509write_crt_free(&w);
}

void identity_free(struct identity *id)
{
	mbedtls_pk_free(&id->key);
	mbedtls_x509_crt_free(&id->cert);
}

static int send_some(void *opaque, const unsigned char *data, size_t len)
{
	ssize_t n = send(((struct tls_server *)opaque)->fd, data, len, MSG_NOSIGNAL);

	return n < 0 ? MBEDTLS_ERR_SSL_INTERNAL_ERROR : (int)n;
}

static int receive_some(void *opaque, unsigned char *data, size_t len)
{
	ssize_t n = recv(((struct tls_server *)opaque)->fd, data, len, 0);

	return n < 0 ? MBEDTLS_ERR_SSL_INTERNAL_ERROR : (int)n;
}

void *tls_serve(void *server)
{
	struct tls_server *s = server;
	mbedtls_ssl_config config;
	mbedtls_ssl_context ssl;
	unsigned char data[4096];
	int n;

	if (!s->id) {
		(void)fd_write_all(s->fd, "SSH-2.0-x\r\n", 11);
		fd_close(&s->fd);
		return NULL;
	}
	mbedtls_ssl_config_init(&config);
	mbedtls_ssl_init(&ssl);
	if (mbedtls_ssl_config_defaults(&config, MBEDTLS_SSL_IS_SERVER,
		    MBEDTLS_SSL_TRANSPORT_STREAM, MBEDTLS_SSL_PRESET_DEFAULT) != 0)
		abort();
	mbedtls_ssl_conf_rng(&config, chance, NULL);
	// It takes what is not const, and leaves it as it is.
	if (mbedtls_ssl_conf_own_cert(&config, (mbedtls_x509_crt *)(uintptr_t)&s->id->cert,
		    (mbedtls_pk_context *)(uintptr_t)&s->id->key) != 0 ||
		mbedtls_ssl_setup(&ssl, &config) != 0)
		abort();
	mbedtls_ssl_set_bio(&ssl, s, send_some, receive_some, NULL);
	if (mbedtls_ssl_handshake(&ssl) == 0)
		while ((n = mbedtls_ssl_read(&ssl, data, sizeof(data))) > 0) {
			if (s->echoed == 0 && s->greeting)
				(void)mbedtls_ssl_write(&ssl, (const unsigned char *)s->greeting,
					strlen(s->greeting));
			s->echoed += (size_t)n;
			for (int off = 0, m; off < n; off += m) {
				m = mbedtls_ssl_write(&ssl, data + off, (size_t)(n - off));
				if (m <= 0)
					break;
			}
			if (s->end_after && s->echoed >= s->end_after) {
				mbedtls_ssl_close_notify(&ssl);
				break;
			}
		}
	mbedtls_ssl_free(&ssl);
	mbedtls_ssl_config_free(&config);
	fd_close(&s->fd);
	return NULL;
}
