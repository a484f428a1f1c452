// SPDX-License-Identifier: Apache-2.0
// Headers of HTTP; see the header. Pure; any thread.
#include "mcp/http_check.h"

#include <arpa/inet.h>
#include <nettle/base64.h>
#include <nettle/memops.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "vmm/base/util.h"

#define HOST_BYTES 64U
#define SPACE      " \t"

// "" or ":PORT".
static bool is_port(const char *text)
{
	size_t digits;

	if (!*text)
		return true;
	if (*text != ':')
		return false;
	digits = strspn(text + 1, "0123456789");
	return digits >= 1 && digits <= 5 && !text[1 + digits];
}

bool http_host_is_loopback(const char *host)
{
	char name[HOST_BYTES];
	struct in_addr addr;
	size_t len;

	if (!host)
		return false;
	if (host[0] == '[')
		return !strncmp(host, "[::1]", 5) && is_port(host + 5);
	len = strcspn(host, ":");
	if (len >= sizeof(name) || !is_port(host + len))
		return false;
	memcpy(name, host, len);
	name[len] = '\0';
	if (!strcasecmp(name, "localhost"))
		return true;
	return inet_pton(AF_INET, name, &addr) == 1 && ntohl(addr.s_addr) >> 24 == 127;
}

bool http_origin_is_loopback(const char *origin)
{
	if (!origin)
		return false;
	if (!strncasecmp(origin, "http://", 7))
		return http_host_is_loopback(origin + 7);
	return !strncasecmp(origin, "https://", 8) && http_host_is_loopback(origin + 8);
}

bool http_origin_is(const char *origin, const char *host)
{
	return host && !strncasecmp(origin, "https://", 8) && !strcasecmp(origin + 8, host);
}

bool http_bears(const char *authorization, const char *token)
{
	size_t len = strlen(token);

	if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0)
		return false;
	authorization += 7 + strspn(authorization + 7, SPACE);
	return strlen(authorization) == len && memeql_sec(authorization, token, len);
}

// Whether the first of a list's entries, up to a comma, is of that type; parameters are ignored.
static bool entry_is(const char *entry, size_t len, const char *type)
{
	size_t n = strcspn(entry, ";" SPACE);

	return MIN(n, len) == strlen(type) && !strncasecmp(entry, type, strlen(type));
}

bool http_is_type(const char *content_type, const char *type)
{
	return content_type && entry_is(content_type, strlen(content_type), type);
}

bool http_accepts(const char *accept, const char *type)
{
	char family[32];

	if (!accept)
		return false;
	snprintf(family, sizeof(family), "%.*s/*", (int)strcspn(type, "/"), type);
	for (;;) {
		size_t len;

		accept += strspn(accept, "," SPACE);
		if (!*accept)
			return false;
		len = strcspn(accept, ",");
		if (entry_is(accept, len, type) || entry_is(accept, len, family) ||
			entry_is(accept, len, "*/*"))
			return true;
		accept += len;
	}
}

static bool says_encoded(const char *code, size_t len, const char *text)
{
	struct base64_decode_ctx ctx;
	size_t size = BASE64_DECODE_LENGTH(len);
	CLEANUP_FREE uint8_t *bytes = malloc(size + 1);

	if (!bytes)
		return false;
	base64_decode_init(&ctx);
	return base64_decode_update(&ctx, &size, bytes, len, code) && base64_decode_final(&ctx) &&
	       size == strlen(text) && !memcmp(bytes, text, size);
}

bool http_says(const char *header, const char *text)
{
	static const char head[] = "=?base64?", tail[] = "?=";
	const size_t head_len = sizeof(head) - 1, tail_len = sizeof(tail) - 1;
	size_t len;

	if (!header)
		return false;
	header += strspn(header, SPACE);
	len = strlen(header);
	while (len && strchr(SPACE, header[len - 1]))
		len--;
	if (len >= head_len + tail_len && !strncmp(header, head, head_len) &&
		!strncmp(header + len - tail_len, tail, tail_len))
		return says_encoded(header + head_len, len - head_len - tail_len, text);
	return len == strlen(text) && !memcmp(header, text, len);
}
