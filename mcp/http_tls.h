// SPDX-License-Identifier: Apache-2.0
// TLS 1.2 in front of the endpoint over HTTP, by Mbed TLS: takes connections, and passes what they
// say to plain ones of its own making. A thread that accepts, and one a connection.
#ifndef MAYFLY_MCP_HTTP_TLS_H
#define MAYFLY_MCP_HTTP_TLS_H

#include "vmm/base/err.h"

struct http_tls;

// What is needed: certificate (with those that lead to its authority behind it) and key in PEM. A
// key that others may read is refused.
int http_tls_load(const char *cert, const char *key, struct http_tls **ret, struct err *err);

struct http_tls_config {
	int listen_fd; // the caller's
	int stop_fd; // the caller's: all ends when it is readable
	unsigned int connections_max;
	// Takes over a plain connection to a client. Any thread.
	void (*serve)(void *opaque, int fd);
	void *opaque;
};

int http_tls_start(struct http_tls *tls, const struct http_tls_config *config, struct err *err);

// Waits for all threads, which stop_fd has ended, if it was started; and frees. Accepts NULL.
void http_tls_destroy(struct http_tls *tls);

#endif
