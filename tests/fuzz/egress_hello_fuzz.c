// SPDX-License-Identifier: Apache-2.0
// egress/hello: what it says of a message it says of all that goes on behind it, and a message cut
// into other records has the same name.
#include <stdlib.h>
#include <string.h>

#include "egress/hello.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum hello read_exact(const uint8_t *data, size_t size, char name[HELLO_NAME_BYTES])
{
	uint8_t *copy = malloc(size + 1);
	enum hello hello;

	ASSERT(copy);
	memcpy(copy, data, size);
	hello = hello_read(copy, size, name);
	free(copy);
	return hello;
}

// The message of one record in records of n bytes.
static size_t cut(const uint8_t *data, size_t size, size_t n, uint8_t *out)
{
	size_t len = 0;

	for (size_t off = 5; off < size; off += n) {
		const size_t piece = MIN(n, size - off);

		memcpy(out + len, "\x16\x03\x01", 3);
		out[len + 3] = (uint8_t)(piece >> 8);
		out[len + 4] = (uint8_t)piece;
		memcpy(out + len + 5, data + off, piece);
		len += 5 + piece;
	}
	return len;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t other[HELLO_MAX_BYTES * 2];
	char name[HELLO_NAME_BYTES] = "", again[HELLO_NAME_BYTES] = "";
	enum hello hello, cut_hello;
	size_t len;

	if (size == 0 || size > HELLO_MAX_BYTES / 4)
		return 0;
	hello = read_exact(data, size, name);
	if (hello == HELLO_NAME)
		ASSERT(name[0] && strlen(name) < HELLO_NAME_BYTES);
	if (hello == HELLO_MORE)
		return 0;
	// More bytes change nothing.
	memcpy(other, data, size);
	memset(other + size, 0x5a, 64);
	ASSERT(hello == HELLO_BAD || read_exact(other, size + 64, again) == hello);
	// One record that is all of it.
	if (size <= 5 || ((size_t)data[3] << 8 | data[4]) != size - 5)
		return 0;
	len = cut(data, size, 200, other);
	memset(again, 0, sizeof(again));
	cut_hello = read_exact(other, len, again);
	ASSERT(hello == HELLO_BAD || (cut_hello == hello && !strcmp(name, again)));
	return 0;
}
