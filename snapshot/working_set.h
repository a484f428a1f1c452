// SPDX-License-Identifier: Apache-2.0
// The working set of a snapshot: which frames of memory a guest wanted between its restore and the
// end of its first command, in that order, in a small file beside it, so that the next restore
// fetches them before they are wanted. Only advice: without the file, or with a wrong one, pages
// come when they are wanted. See docs/snapshot-format.md. Any thread.
#ifndef MAYFLY_SNAPSHOT_WORKING_SET_H
#define MAYFLY_SNAPSHOT_WORKING_SET_H

#include "snapshot/image.h"

#define WORKING_SET_FILE_NAME  "working-set"
#define WORKING_SET_FRAMES_MAX 4096U // 256 MiB; what comes later is not waited for by anybody

struct working_set {
	uint32_t nr;
	uint32_t frames[WORKING_SET_FRAMES_MAX];
};

// The file's content is len bytes. -EBADMSG, and *ret_set is left as it was, if it is damaged or
// not of this snapshot; each frame is one of RAM.
int working_set_parse(struct working_set *ret_set, const void *data, size_t len,
	const struct snapshot_id *id, uint64_t ram_bytes);

// Appends the file's content.
void working_set_encode(const struct working_set *set, const struct snapshot_id *id,
	uint64_t ram_bytes, struct buf *out);

// Into a file that is open for writing, and empty or of no use. Not synced: a torn one is no harm.
int working_set_write(
	int fd, const struct working_set *set, const struct snapshot_id *id, uint64_t ram_bytes);

// The reverse. -EBADMSG as above, or the errno of a read.
int working_set_read(
	struct working_set *ret_set, int fd, const struct snapshot_id *id, uint64_t ram_bytes);

#endif
