// SPDX-License-Identifier: Apache-2.0
// UTF-8 and base64; see the header. Pure; any thread.
#include "mcp/text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

// The length of the character at s, 0 if it is cut, -1 if it is none.
static int character(const uint8_t *s, size_t len)
{
	uint8_t first = s[0], low = 0x80, high = 0xbf;
	int n;

	if (first < 0x80)
		return first ? 1 : -1;
	if (first < 0xc2 || first > 0xf4)
		return -1;
	n = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
	// Neither overlong, nor a surrogate, nor beyond U+10FFFF.
	if (first == 0xe0)
		low = 0xa0;
	else if (first == 0xed)
		high = 0x9f;
	else if (first == 0xf0)
		low = 0x90;
	else if (first == 0xf4)
		high = 0x8f;
	for (int i = 1; i < n; i++) {
		if ((size_t)i == len)
			return 0;
		if (s[i] < (i == 1 ? low : 0x80) || s[i] > (i == 1 ? high : 0xbf))
			return -1;
	}
	return n;
}

ssize_t text_len(const void *bytes, size_t len)
{
	const uint8_t *s = bytes;
	size_t i = 0;

	while (i < len) {
		int n = character(s + i, len - i);

		if (n < 0)
			return -1;
		if (n == 0)
			break;
		i += (size_t)n;
	}
	return (ssize_t)i;
}

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static json_t *base64_json(const uint8_t *in, size_t len)
{
	CLEANUP_FREE char *text = malloc((len + 2) / 3 * 4 + 1);
	size_t n = 0;

	if (!text)
		return NULL;
	for (size_t i = 0; i < len; i += 3) {
		size_t have = MIN(len - i, (size_t)3);
		uint32_t v = (uint32_t)in[i] << 16 | (have > 1 ? (uint32_t)in[i + 1] << 8 : 0) |
			     (have > 2 ? in[i + 2] : 0);

		for (size_t j = 0; j < 4; j++)
			text[n++] = j <= have ? digits[v >> (18 - 6 * j) & 63] : '=';
	}
	return json_stringn_nocheck(text, n);
}

size_t text_put(json_t *object, const char *key, const char *encoding_key, const void *bytes,
	size_t len, bool cut, bool base64)
{
	ssize_t n = base64 ? -1 : text_len(bytes, len);

	if (n < 0 || ((size_t)n < len && !cut)) {
		json_object_set_new(object, key, base64_json(bytes, len));
		json_object_set_new(object, encoding_key, json_string("base64"));
		return len;
	}
	json_object_set_new(object, key, json_stringn_nocheck(bytes ? bytes : "", (size_t)n));
	json_object_set_new(object, encoding_key, json_string("utf-8"));
	return (size_t)n;
}

int text_get(const json_t *string, bool base64, struct buf *ret, struct err *err)
{
	const char *text = json_string_value(string);
	size_t len = json_string_length(string), i = 0;
	uint32_t v = 0;
	unsigned int bits = 0;

	if (!base64)
		return buf_append(ret, text, len) < 0 ? err_errno(err, -ENOMEM, "content") : 0;
	while (len && text[len - 1] == '=' && len + 2 > json_string_length(string))
		len--;
	for (; i < len; i++) {
		const char *at = memchr(digits, text[i], 64);
		uint8_t byte;

		if (!at)
			return err_set(err, -EINVAL, "content: not base64 at byte %zu", i);
		v = v << 6 | (uint32_t)(at - digits);
		bits += 6;
		if (bits < 8)
			continue;
		bits -= 8;
		byte = (uint8_t)(v >> bits);
		buf_append(ret, &byte, 1);
	}
	if (bits >= 6 || json_string_length(string) % 4)
		return err_set(err, -EINVAL, "content: base64 that was cut");
	return buf_error(ret) < 0 ? err_errno(err, -ENOMEM, "content") : 0;
}

json_t *text_printable(const void *bytes, size_t len)
{
	const uint8_t *s = bytes;
	struct buf out = {0};
	json_t *json;

	for (size_t i = 0; i < len;) {
		int n = character(s + i, len - i);

		if (n > 0 && (s[i] >= ' ' || s[i] == '\n' || s[i] == '\t') && s[i] != 0x7f)
			buf_append(&out, s + i, (size_t)n);
		else
			buf_append(&out, "?", 1);
		i += n > 0 ? (size_t)n : 1;
	}
	json = buf_error(&out) < 0
		       ? NULL
		       : json_stringn_nocheck(out.data ? (char *)out.data : "", out.len);
	buf_fini(&out);
	return json;
}
