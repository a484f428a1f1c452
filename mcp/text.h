// SPDX-License-Identifier: Apache-2.0
// Bytes of a guest as JSON, and back: text where they are UTF-8, base64 where not. Pure; any
// thread.
#ifndef MAYFLY_MCP_TEXT_H
#define MAYFLY_MCP_TEXT_H

#include <jansson.h>

#include "vmm/base/buf.h"
#include "vmm/base/err.h"

// The length of the longest beginning that is whole UTF-8 without NUL, if no more than a cut
// character follows it; -1 where the bytes are no such text.
ssize_t text_len(const void *bytes, size_t len);

// Sets object[key] to the bytes, and object[encoding_key] to "utf-8" or "base64". Of text that ends
// in the middle of a character the cut one is left out, if cut. Returns how many bytes were used.
size_t text_put(json_t *object, const char *key, const char *encoding_key, const void *bytes,
	size_t len, bool cut, bool base64);

// The bytes of a string, decoded if base64. -EINVAL.
int text_get(const json_t *string, bool base64, struct buf *ret, struct err *err);

// As a string in any case: what is not text becomes '?'.
json_t *text_printable(const void *bytes, size_t len);

#endif
