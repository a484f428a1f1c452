// SPDX-License-Identifier: Apache-2.0
// The server's name in the first message of a TLS client (RFC 8446, 4.1.2; RFC 6066, 3), wherever
// in it the name stands and however many records the message is cut into. The bytes are a guest's.
// Pure; any thread.
#ifndef MAYFLY_EGRESS_HELLO_H
#define MAYFLY_EGRESS_HELLO_H

#include "vmm/base/util.h"

#define HELLO_NAME_BYTES 256

// As much as such a message and its records' headers may have.
#define HELLO_MAX_BYTES 16384U

enum hello {
	HELLO_MORE, // not all of it is there yet
	HELLO_NAME, // *ret_name is the name
	HELLO_NAMELESS, // it has none
	HELLO_BAD, // this is no such message
};

// Looks at what a client has sent so far, from its first byte. The name is as it stands there:
// without NUL or control characters, but any case.
enum hello hello_read(const uint8_t *bytes, size_t len, char ret_name[HELLO_NAME_BYTES]);

#endif
