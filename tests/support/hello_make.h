// SPDX-License-Identifier: Apache-2.0
// The first message of a TLS client, as a test wants it. One thread.
#ifndef MAYFLY_TESTS_HELLO_MAKE_H
#define MAYFLY_TESTS_HELLO_MAKE_H

#include <string.h>

#include "vmm/base/util.h"

// name: NULL for none. padding: bytes of an extension before that of the name. record_bytes: of the
// message in one record. Returns the length of what is in out.
static inline size_t hello_make(uint8_t *out, const char *name, size_t padding, size_t record_bytes)
{
	static uint8_t m[20000];
	const size_t name_len = name ? strlen(name) : 0;
	const size_t exts = (name ? 9 + name_len : 0) + (padding ? 4 + padding : 0);
	const size_t body = 2 + 32 + 1 + 2 + 2 + 2 + 2 + exts, total = 4 + body;
	size_t at = 0, len = 0;

	memset(m, 0, sizeof(m));
	m[0] = 1;
	m[1] = (uint8_t)(body >> 16);
	m[2] = (uint8_t)(body >> 8);
	m[3] = (uint8_t)body;
	m[4] = m[5] = 3;
	at = 4 + 2 + 32 + 1; // no session id
	m[at + 1] = 2; // one cipher suite
	m[at + 2] = 0x13;
	m[at + 3] = 0x01;
	m[at + 4] = 1; // one compression method: none
	at += 6;
	m[at++] = (uint8_t)(exts >> 8);
	m[at++] = (uint8_t)exts;
	if (padding) {
		m[at + 1] = 21;
		m[at + 2] = (uint8_t)(padding >> 8);
		m[at + 3] = (uint8_t)padding;
		at += 4 + padding;
	}
	if (name) {
		m[at + 2] = (uint8_t)((5 + name_len) >> 8);
		m[at + 3] = (uint8_t)(5 + name_len);
		m[at + 4] = (uint8_t)((3 + name_len) >> 8);
		m[at + 5] = (uint8_t)(3 + name_len);
		m[at + 7] = (uint8_t)(name_len >> 8);
		m[at + 8] = (uint8_t)name_len;
		memcpy(m + at + 9, name, name_len);
	}
	for (size_t off = 0; off < total; off += record_bytes) {
		const size_t n = MIN(record_bytes, total - off);

		out[len] = 22;
		out[len + 1] = 3;
		out[len + 2] = 1;
		out[len + 3] = (uint8_t)(n >> 8);
		out[len + 4] = (uint8_t)n;
		memcpy(out + len + 5, m + off, n);
		len += 5 + n;
	}
	return len;
}

#endif
