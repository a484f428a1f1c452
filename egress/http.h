// SPDX-License-Identifier: Apache-2.0
// The head of a request to a proxy (RFC 9110, RFC 9112), read strictly: what two readers could
// understand in two ways is refused, so that no server sees another request than the one that was
// admitted. The bytes are a guest's. Pure; any thread.
#ifndef MAYFLY_EGRESS_HTTP_H
#define MAYFLY_EGRESS_HTTP_H

#include "vmm/allow.h"
#include "vmm/base/buf.h"

#define HTTP_HEAD_BYTES   16384U
#define HTTP_FIELDS_MAX   100U
#define HTTP_METHOD_BYTES 24
#define HTTP_PORT         80
#define HTTPS_PORT        443

struct http_request {
	char method[HTTP_METHOD_BYTES];
	bool connect; // a tunnel
	bool http_10; // by a client that knows no chunks
	struct allow_host host;
	uint16_t port;
	uint64_t body_bytes; // that follow the head
	size_t head_bytes; // up to and with the empty line
	// Where in the text its path is: empty for none.
	size_t path_off, path_len;
};

// Reads the head at the beginning of text[0..len). 1 if it is whole, 0 if more of it has to come,
// or a negative errno: -E2BIG (431), -EOPNOTSUPP (501: a length that is not told beforehand),
// -EINVAL (400), with the reason for the client in err.
int http_read(const char *text, size_t len, struct http_request *ret, struct err *err);

struct http_field {
	const char *name, *value;
};

// Appends the head as the server is to get it: its path alone, Host as admitted, without what is
// between the client and us, and for one request only. The nr fields are put in instead of the
// client's of these names; then the answer is asked for whole and as it is, so that they can be
// found in it.
int http_forward(const char *text, const struct http_request *request,
	const struct http_field *fields, unsigned int nr, struct buf *out);

// An answer of our own, as text: a status line like "403 Forbidden", and a body that says why.
int http_answer(char *ret, size_t size, const char *status, const char *why);

#endif
