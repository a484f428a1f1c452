// SPDX-License-Identifier: Apache-2.0
// ClientHello; see the header. Pure; any thread.
#include "egress/hello.h"

#include <string.h>

#define RECORD_HEADER_BYTES 5U
#define RECORD_HANDSHAKE    22
#define CLIENT_HELLO        1
#define RECORD_MAX_BYTES    16384U
#define EXT_SERVER_NAME     0
#define NAME_IS_HOST        0

// A piece of bytes that is read from its front. Once it was too short it stays so.
struct piece {
	const uint8_t *at;
	size_t len;
	bool bad;
};

static const uint8_t *take(struct piece *p, size_t len)
{
	const uint8_t *at = p->at;

	if (p->bad || len > p->len) {
		p->bad = true;
		p->len = 0;
		return NULL;
	}
	p->at += len;
	p->len -= len;
	return at;
}

static size_t take_number(struct piece *p, size_t bytes)
{
	const uint8_t *at = take(p, bytes);
	size_t n = 0;

	for (size_t i = 0; at && i < bytes; i++)
		n = n << 8 | at[i];
	return n;
}

// What stands behind its own length.
static struct piece take_piece(struct piece *p, size_t length_bytes)
{
	struct piece inner = {.len = take_number(p, length_bytes)};

	inner.at = take(p, inner.len);
	inner.bad = p->bad;
	return inner;
}

// Puts the message together that the records carry. Returns its length, or 0 with *ret_bad where it
// is none.
static size_t assemble(
	const uint8_t *bytes, size_t len, uint8_t message[HELLO_MAX_BYTES], bool *ret_bad)
{
	size_t got = 0;

	*ret_bad = false;
	while (len > 0) {
		size_t n = 0, end;

		// What cannot become one is told as soon as it is seen.
		*ret_bad = bytes[0] != RECORD_HANDSHAKE || (len > 1 && bytes[1] != 3);
		if (*ret_bad || len < RECORD_HEADER_BYTES)
			return got;
		n = (size_t)bytes[3] << 8 | bytes[4];
		*ret_bad = n == 0 || n > RECORD_MAX_BYTES;
		if (*ret_bad)
			return got;
		bytes += RECORD_HEADER_BYTES;
		len -= RECORD_HEADER_BYTES;
		end = got + n;
		n = MIN(MIN(n, len), HELLO_MAX_BYTES - got);
		memcpy(message + got, bytes, n);
		got += n;
		bytes += n;
		len -= n;
		if (got >= 4) {
			const size_t want = 4 + ((size_t)message[1] << 16 |
							(size_t)message[2] << 8 | message[3]);

			// Its end is that of a record, whether that is there yet or not.
			*ret_bad = want > HELLO_MAX_BYTES || end > want;
			// All of it is there: what follows is no longer ours to read.
			if (*ret_bad || got >= want)
				return got;
		}
	}
	return got;
}

static enum hello read_name(struct piece ext, char ret_name[HELLO_NAME_BYTES])
{
	struct piece list = take_piece(&ext, 2), name;

	// One name, of a host: that is all there is (RFC 6066), and two could be understood in two
	// ways.
	if (take_number(&list, 1) != NAME_IS_HOST)
		return HELLO_BAD;
	name = take_piece(&list, 2);
	if (ext.bad || ext.len || list.bad || list.len || name.bad || name.len == 0 ||
		name.len >= HELLO_NAME_BYTES)
		return HELLO_BAD;
	for (size_t i = 0; i < name.len; i++)
		if (name.at[i] <= ' ' || name.at[i] >= 0x7f)
			return HELLO_BAD;
	memcpy(ret_name, name.at, name.len);
	ret_name[name.len] = '\0';
	return HELLO_NAME;
}

enum hello hello_read(const uint8_t *bytes, size_t len, char ret_name[HELLO_NAME_BYTES])
{
	uint8_t message[HELLO_MAX_BYTES];
	enum hello result = HELLO_NAMELESS;
	struct piece all = {.at = message}, body, exts;
	bool bad;

	all.len = assemble(bytes, len, message, &bad);
	if (bad || (all.len && message[0] != CLIENT_HELLO))
		return HELLO_BAD;
	if (all.len < 4 ||
		all.len < 4 + ((size_t)message[1] << 16 | (size_t)message[2] << 8 | message[3]))
		return len >= HELLO_MAX_BYTES ? HELLO_BAD : HELLO_MORE;
	take_number(&all, 1);
	body = take_piece(&all, 3);
	take(&body, 2 + 32); // version, random
	take_piece(&body, 1); // session id
	take_piece(&body, 2); // cipher suites
	take_piece(&body, 1); // compression methods
	if (body.bad)
		return HELLO_BAD;
	if (body.len == 0)
		return HELLO_NAMELESS;
	exts = take_piece(&body, 2);
	if (body.bad || body.len)
		return HELLO_BAD;
	while (exts.len && !exts.bad) {
		const size_t type = take_number(&exts, 2);
		const struct piece ext = take_piece(&exts, 2);

		if (exts.bad)
			break;
		if (type != EXT_SERVER_NAME)
			continue;
		if (result != HELLO_NAMELESS)
			return HELLO_BAD; // twice
		result = read_name(ext, ret_name);
		if (result == HELLO_BAD)
			return HELLO_BAD;
	}
	return exts.bad ? HELLO_BAD : result;
}
