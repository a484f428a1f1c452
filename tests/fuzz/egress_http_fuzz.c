// SPDX-License-Identifier: Apache-2.0
// egress/http: a head that is accepted, as a server gets it, is one request with one host, and read
// again it says the same; a head that is cut is never accepted.
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "egress/http.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Lines that begin with the name.
static unsigned int count(const char *text, size_t len, const char *name)
{
	const char *end = text + len;
	unsigned int nr = 0;

	for (const char *line = text; line < end;) {
		const char *next = memchr(line, '\n', (size_t)(end - line));

		if ((size_t)(end - line) > strlen(name) && !strncasecmp(line, name, strlen(name)))
			nr++;
		line = next ? next + 1 : end;
	}
	return nr;
}

static void check_forward(const char *text, const struct http_request *r)
{
	CLEANUP_BUF struct buf out = {0};
	const char *head;

	ASSERT(http_forward(text, r, NULL, 0, &out) == 0);
	head = (const char *)out.data;
	ASSERT(memmem(head, out.len, "\r\n\r\n", 4) == head + out.len - 4);
	ASSERT(!memchr(head, '\0', out.len));
	ASSERT(count(head, out.len, "host:") == 1);
	ASSERT(count(head, out.len, "content-length:") <= 1);
	ASSERT(count(head, out.len, "transfer-encoding:") == 0);
	ASSERT(count(head, out.len, "connection:") == 1);
	ASSERT(count(head, out.len, " ") == 0 && count(head, out.len, "\t") == 0);
	for (size_t i = 0; i < out.len; i++)
		ASSERT(head[i] == '\r' ? head[i + 1] == '\n'
				       : head[i] != '\n' || head[i - 1] == '\r');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct http_request r = {0}, cut;
	struct err err = {0};
	char *text = malloc(size + 1); // its end is where it ends
	int rc;

	ASSERT(text);
	if (size)
		memcpy(text, data, size);
	rc = http_read(text, size, &r, &err);
	ASSERT(rc <= 1 && (rc >= 0 || err.msg[0]));
	if (rc == 1) {
		ASSERT(r.head_bytes <= size && r.port && r.host.name[0]);
		ASSERT(r.path_off + r.path_len <= r.head_bytes);
		ASSERT(!r.connect || !r.body_bytes);
		ASSERT(http_read(text, r.head_bytes - 1, &cut, NULL) == 0);
		check_forward(text, &r);
	}
	free(text);
	return 0;
}
