// SPDX-License-Identifier: Apache-2.0
// A growing byte buffer for output. Its owner's thread.
//
// Running out of memory sticks: what is appended afterwards is dropped, so that a writer of many
// pieces may look once, at the end, with buf_error().
#ifndef MAYFLY_BASE_BUF_H
#define MAYFLY_BASE_BUF_H

#include "vmm/base/util.h"

struct buf {
	uint8_t *data; // owned
	size_t len;
	size_t cap;
	bool failed;
};

// Frees what it holds and leaves an empty buffer. Accepts a zeroed one.
void buf_fini(struct buf *buf);

#define CLEANUP_BUF CLEANUP(buf_fini)

// 0 or -ENOMEM.
int buf_append(struct buf *buf, const void *data, size_t len);
int buf_append_le32(struct buf *buf, uint32_t val);

// -ENOMEM if anything could not be appended, else 0.
int buf_error(const struct buf *buf);

#endif
