// SPDX-License-Identifier: Apache-2.0
// Headers of HTTP as a hostile page or client may send them: only what names the loopback is taken
// for it, only the token for the token, and an encoded value for nothing but what it encodes.
//
// Input: the header's value, up to the first NUL.
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "mcp/http_check.h"
#include "vmm/base/util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define VALUE_MAX 4096U

// Whether it begins as an address or name of the loopback, with nothing but a port behind.
static void check_host(const char *host)
{
	size_t port = strspn(host, "0123456789.");

	if (!strncasecmp(host, "localhost", 9))
		port = 9;
	else if (!strncmp(host, "[::1]", 5))
		port = 5;
	else
		ASSERT(!strncmp(host, "127.", 4));
	ASSERT(!host[port] || (host[port] == ':' && strspn(host + port + 1, "0123456789") ==
							    strlen(host + port + 1)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char value[VALUE_MAX + 1], again[VALUE_MAX + 16];
	size_t len = strnlen((const char *)data, MIN(size, (size_t)VALUE_MAX));
	const char *end;

	memcpy(value, data, len);
	value[len] = '\0';
	if (http_host_is_loopback(value)) {
		check_host(value);
		snprintf(again, sizeof(again), "https://%s", value);
		ASSERT(http_origin_is_loopback(again));
	}
	if (http_origin_is_loopback(value)) {
		end = strstr(value, "://");
		ASSERT(end && http_host_is_loopback(end + 3));
	}
	if (http_bears(value, "0123456789abcdef"))
		ASSERT(strlen(value) >= 16 && !strcmp(value + len - 16, "0123456789abcdef"));
	if (http_accepts(value, "application/json"))
		ASSERT(strstr(value, "/*") || strcasestr(value, "application/json"));
	if (http_is_type(value, "application/json"))
		ASSERT(http_accepts(value, "application/json"));
	if (http_says(value, "exec"))
		ASSERT(strstr(value, "exec") || strstr(value, "=?base64?"));
	// It says itself, but for white space around it and what looks encoded.
	if (!strpbrk(value, " \t") && !strstr(value, "=?base64?"))
		ASSERT(http_says(value, value));
	return 0;
}
