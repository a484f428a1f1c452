// SPDX-License-Identifier: Apache-2.0
// Credentials that the proxy puts into requests, so that the guest need not have them; and their
// removal from what comes back. Pure; any thread.
#ifndef MAYFLY_EGRESS_SECRET_H
#define MAYFLY_EGRESS_SECRET_H

#include "vmm/allow.h"
#include "vmm/base/buf.h"

#define SECRETS_MAX         16
#define SECRET_NAME_BYTES   64
#define SECRET_HEADER_BYTES 64
#define SECRET_VALUE_BYTES  4096
#define SECRET_VALUE_MIN    8 // shorter ones could not be told from other text
#define SECRETS_FILE_BYTES  (256 * KIB)

struct secret {
	char name[SECRET_NAME_BYTES];
	struct allow_host host;
	char header[SECRET_HEADER_BYTES];
	char value[SECRET_VALUE_BYTES];
};

struct secrets {
	struct secret all[SECRETS_MAX];
	unsigned int nr;
};

// Fills one and checks it: the host is a name, the header none that the proxy writes itself, the
// value printable. -EINVAL, never with the value in the message.
int secret_set(struct secret *ret, const char *name, const char *host, const char *header,
	const char *value, struct err *err);

// What secrets_print() writes; "" is none.
int secrets_parse(const char *text, size_t len, struct secrets *ret, struct err *err);

// As JSON, the caller's. NULL when memory runs out.
char *secrets_print(const struct secrets *secrets);

// The first from number `from` on that is for the host, or NULL; *ret_next is behind it.
const struct secret *secrets_of(const struct secrets *secrets, const struct allow_host *host,
	unsigned int from, unsigned int *ret_next);

// --- What comes back -------------------------------------------------------------------------

#define REDACTOR_PATTERNS_MAX (4 * SECRETS_MAX)

// Replaces each secret of a host in a stream, as it is, without the scheme before it ("Bearer "),
// and both in base64, by as many stars. A beginning of one at the end of what came is held back.
struct redactor {
	struct {
		char *text; // owned
		size_t len;
	} patterns[REDACTOR_PATTERNS_MAX];
	unsigned int nr;
	struct buf held;
};

int redactor_init(struct redactor *r, const struct secrets *secrets, const struct allow_host *host);
void redactor_fini(struct redactor *r);

// Takes the next bytes and appends to out what may go on. 0 or -ENOMEM.
int redactor_feed(struct redactor *r, const void *data, size_t len, struct buf *out);

// At the end: what was held back.
int redactor_end(struct redactor *r, struct buf *out);

#endif
