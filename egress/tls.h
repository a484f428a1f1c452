// SPDX-License-Identifier: Apache-2.0
// TLS towards a server, whose certificate is verified. The authorities are read once and shared; a
// connection belongs to its thread.
#ifndef MAYFLY_EGRESS_TLS_H
#define MAYFLY_EGRESS_TLS_H

#include <sys/types.h>

#include "vmm/base/err.h"

struct tls_authorities;
struct tls;

// path: certificates in PEM, of which those that are not understood are left out. -EBADMSG for
// none.
int tls_authorities_read(const char *path, struct tls_authorities **ret, struct err *err);
void tls_authorities_free(struct tls_authorities *authorities); // NULL, too

// How a connection waits: until fd has one of the events (as of poll()), 0, or a negative errno.
struct tls_wait {
	int (*wait)(void *opaque, int fd, short events);
	void *opaque;
};

// Shakes hands with the server at fd (the caller's, non-blocking), which has to prove that it is
// host.
int tls_open(const struct tls_authorities *authorities, int fd, const char *host,
	const struct tls_wait *wait, struct tls **ret, struct err *err);
void tls_close(struct tls *tls); // NULL, too

// All of it, or a negative errno.
int tls_write(struct tls *tls, const void *data, size_t len);

// Some of it; 0 at the end, -EAGAIN where nothing is there and all has been read that was.
ssize_t tls_read(struct tls *tls, void *data, size_t len);

#endif
