// SPDX-License-Identifier: Apache-2.0
// What a hostile guest says about its files, where it is looked at and not unpacked (for that see
// tree_fuzz.c): lists, single files, changes. Whatever arrives, the call ends, what is handed on
// has been checked, and a buffer takes no more than was asked for.
//
// Input: byte 0 says what is asked. Then frames of a tree: a type, two bytes of length, the
// payload; type 255 stands for raw bytes.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/agent_files.h"
#include "guest/proto/frame.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RAW         255
#define STREAM_MAX  (64U * 1024)
#define DEADLINE_NS 20000000000ULL
#define READ_MAX    1000U

// The guest's stdout in one frame, and the end of its process.
static uint8_t stream[FRAME_HEADER_BYTES + STREAM_MAX + FRAME_HEADER_BYTES + FRAME_EXIT_BYTES];
static size_t stream_len;

static void make_stream(const uint8_t *data, size_t size)
{
	uint8_t *inner = stream + FRAME_HEADER_BYTES;
	size_t n = 0;

	while (size >= 3) {
		uint8_t type = data[0];
		size_t len = MIN((size_t)get_le16(data + 1) % 4096, size - 3);

		if (n + FRAME_HEADER_BYTES + len > STREAM_MAX)
			break;
		if (type != RAW) {
			put_le32(inner + n, (uint32_t)len);
			put_le32(inner + n + 4, type);
			n += FRAME_HEADER_BYTES;
		}
		memcpy(inner + n, data + 3, len);
		n += len;
		data += 3 + len;
		size -= 3 + len;
	}
	stream_len = 0;
	if (n) {
		frame_header_put(stream, FRAME_STDOUT, (uint32_t)n);
		stream_len = FRAME_HEADER_BYTES + n;
	}
	frame_header_put(stream + stream_len, FRAME_EXIT, FRAME_EXIT_BYTES);
	memset(stream + stream_len + FRAME_HEADER_BYTES, 0, FRAME_EXIT_BYTES);
	stream_len += FRAME_HEADER_BYTES + FRAME_EXIT_BYTES;
}

static int on_entry(void *ctx, const struct tree_entry *entry, struct err *err)
{
	(void)ctx;
	(void)err;
	ASSERT(strchr("dflhpscb", entry->type) && entry->path[0] != '/');
	ASSERT(!strstr(entry->path, "//") && strncmp(entry->path, "../", 3) != 0);
	ASSERT((entry->type != 'l' && entry->type != 'h') || entry->link);
	return 0;
}

static void on_problem(void *ctx, const char *path, int errno_value)
{
	(void)ctx;
	ASSERT(path && errno_value > 0);
}

static int on_data(void *ctx, uint64_t offset, const uint8_t *bytes, size_t len, struct err *err)
{
	(void)ctx;
	(void)offset;
	(void)err;
	ASSERT(bytes && len >= 1 && len <= FRAME_DATA_MAX);
	return 0;
}

static int on_change(void *ctx, const struct agent_change *change, struct err *err)
{
	(void)ctx;
	(void)err;
	ASSERT(change->change[0] && change->path);
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct agent_list list = {.entry = on_entry, .problem = on_problem, .data = on_data};
	const struct agent_get what = {.depth = 3, .content = true};
	struct agent_files files = {
		.signal_fd = -1, .cancel_fd = -1, .deadline_ns = now_ns() + DEADLINE_NS};
	CLEANUP_FREE char *bytes = NULL;
	struct tree_entry entry;
	struct err err = {0};
	size_t len = 0;
	int pair[2], room = 4 * (int)sizeof(stream), rc;

	if (size < 1)
		return 0;
	make_stream(data + 1, size - 1);
	ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
	ASSERT(send(pair[0], stream, stream_len, MSG_DONTWAIT | MSG_NOSIGNAL) ==
		(ssize_t)stream_len);
	shutdown(pair[0], SHUT_WR);
	files.conn_fd = pair[1];
	switch (data[0] % 5) {
	case 0:
		rc = agent_list(&files, "p", &what, &list, &err);
		break;
	case 1:
		rc = agent_stat(&files, "p", false, &entry, &err);
		ASSERT(rc < 0 || (entry.type && !entry.path && !entry.link));
		break;
	case 2:
		rc = agent_read(&files, "p", data[0], READ_MAX, &bytes, &len, NULL, &err);
		ASSERT(rc < 0 || (len <= READ_MAX && bytes[len] == '\0'));
		break;
	case 3:
		rc = agent_watch(&files, "p", on_change, NULL, &err);
		break;
	default:
		rc = agent_remove(&files, "p", true, &err);
	}
	ASSERT(rc <= 0 && rc != -ETIMEDOUT && rc == (rc ? err.code : 0));
	for (const char *c = err.msg; *c; c++)
		ASSERT((unsigned char)*c >= ' ' && *c != 0x7f);
	fd_close(&pair[0]);
	fd_close(&pair[1]);
	return 0;
}
