// SPDX-License-Identifier: Apache-2.0
// A TLS server of a test's own, with a certificate made for it. A connection has one thread.
#ifndef MAYFLY_TESTS_TLS_SERVER_H
#define MAYFLY_TESTS_TLS_SERVER_H

#include <mbedtls/pk.h>
#include <mbedtls/x509_crt.h>
#include <pthread.h>
#include <stddef.h>

// A certificate that vouches for itself, and its key.
struct identity {
	mbedtls_pk_context key;
	mbedtls_x509_crt cert;
	char pem[4096];
};

// until: like 20991231000000.
void identity_make(struct identity *id, const char *name, const char *until);
void identity_free(struct identity *id);

struct tls_server {
	const struct identity *id; // NULL: it does not speak TLS
	int fd; // closed by tls_serve()
	size_t end_after; // so many bytes; 0: never
	const char *greeting; // sent before the first echo; NULL: none
	size_t echoed;
	pthread_t thread; // the test's
};

// The thread of a connection, a struct tls_server: gives back what comes.
void *tls_serve(void *server);

#endif
