// SPDX-License-Identifier: Apache-2.0
// What is kept from one command to the next. What they printed beyond what their result could hold,
// by unguessable handles: the newest stay, 64 of them, 32 MiB together, until the server ends. And
// which refused requests their results have told. Any thread.
#ifndef MAYFLY_MCP_OUTPUTS_H
#define MAYFLY_MCP_OUTPUTS_H

#include "mcp/denials.h"
#include "vmm/base/buf.h"
#include "vmm/base/err.h"

#define OUTPUTS_HANDLE_BYTES 40 // "out-…" and the NUL
#define OUTPUTS_STREAM_BYTES (4 * MIB) // of each stream of a command

struct outputs;

// NULL when there is no memory.
struct outputs *outputs_create(void);
void outputs_destroy(struct outputs *outputs);

// Whether a name is such a handle, of something that is there or not.
bool outputs_is_handle(const char *name);

// Takes the two streams' bytes over. -ENOMEM, or what getrandom() says; then they are freed.
int outputs_keep(struct outputs *outputs, struct buf streams[2],
	char ret_handle[OUTPUTS_HANDLE_BYTES], struct err *err);

// Appends at most max_bytes from offset on (UINT64_MAX: the last max_bytes). -ENOENT.
int outputs_read(struct outputs *outputs, const char *handle, bool is_err, uint64_t *offset,
	size_t max_bytes, struct buf *ret, uint64_t *ret_total, struct err *err);

// From where on a command that begins now tells refused requests: behind what was told already, so
// that one which is written down when its command has ended is in the next one's result.
struct denials_mark outputs_untold(struct outputs *outputs, struct denials_mark now);
void outputs_told(struct outputs *outputs, struct denials_mark mark);

#endif
