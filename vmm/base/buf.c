// SPDX-License-Identifier: Apache-2.0
// A growing byte buffer; see the header. Its owner's thread.
#include "vmm/base/buf.h"

#include <errno.h>
#include <stdlib.h>

#include "vmm/base/bytes.h"

#define FIRST_BYTES 1024U

void buf_fini(struct buf *buf)
{
	free(buf->data);
	*buf = (struct buf){0};
}

static bool reserve(struct buf *buf, size_t more)
{
	size_t need, cap = MAX(buf->cap, FIRST_BYTES);
	uint8_t *grown;

	if (__builtin_add_overflow(buf->len, more, &need) || need > SIZE_MAX / 2)
		return false;
	if (need <= buf->cap)
		return true;
	while (cap < need)
		cap *= 2;
	grown = realloc(buf->data, cap);
	if (!grown)
		return false;
	buf->data = grown;
	buf->cap = cap;
	return true;
}

int buf_append(struct buf *buf, const void *data, size_t len)
{
	if (buf->failed || !reserve(buf, len)) {
		buf->failed = true;
		return -ENOMEM;
	}
	if (len)
		memcpy(buf->data + buf->len, data, len);
	buf->len += len;
	return 0;
}

int buf_append_le32(struct buf *buf, uint32_t val)
{
	uint8_t raw[4];

	put_le32(raw, val);
	return buf_append(buf, raw, sizeof(raw));
}

int buf_error(const struct buf *buf)
{
	return buf->failed ? -ENOMEM : 0;
}
