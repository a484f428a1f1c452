// SPDX-License-Identifier: Apache-2.0
// The host's end of the agent protocol against a hostile guest: whatever arrives, the call ends,
// tells a code that a command can have, and prints no more than came as output.
//
// Input: byte 0 says what is asked. Then frames: a type, two bytes of length, the payload; type 255
// stands for raw bytes.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "guest/proto/frame.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RAW         255
#define STREAM_MAX  (128U * 1024)
#define DEADLINE_NS 20000000000ULL

static uint8_t stream[STREAM_MAX];
static size_t stream_len;

static void make_stream(const uint8_t *data, size_t size)
{
	stream_len = 0;
	while (size >= 3) {
		uint8_t type = data[0];
		size_t len = MIN((size_t)get_le16(data + 1) % 4096, size - 3);

		if (stream_len + FRAME_HEADER_BYTES + len > STREAM_MAX)
			return;
		if (type != RAW) {
			put_le32(stream + stream_len, (uint32_t)len);
			put_le32(stream + stream_len + 4, type);
			stream_len += FRAME_HEADER_BYTES;
		}
		memcpy(stream + stream_len, data + 3, len);
		stream_len += len;
		data += 3 + len;
		size -= 3 + len;
	}
}

// The output that a naive reader finds in the stream, up to the first frame that is something else.
static size_t output_bytes(void)
{
	size_t total = 0;

	for (size_t off = 0; off + FRAME_HEADER_BYTES <= stream_len;) {
		uint32_t len = get_le32(stream + off), type = get_le32(stream + off + 4);
		size_t there = MIN((size_t)len, stream_len - off - FRAME_HEADER_BYTES);

		if ((type != FRAME_STDOUT && type != FRAME_STDERR) || len == 0 ||
			len > FRAME_PAYLOAD_MAX)
			break;
		total += there;
		off += FRAME_HEADER_BYTES + there;
	}
	return total;
}

static bool only_output_and_end(void)
{
	for (size_t off = 0; off + 5 <= stream_len;) {
		if (stream[off + 4] != FRAME_STDOUT && stream[off + 4] != FRAME_STDERR)
			return stream[off + 4] != FRAME_WINDOW && stream[off + 4] != FRAME_OFFSET;
		off += FRAME_HEADER_BYTES + (size_t)get_le32(stream + off);
	}
	return true;
}

static void check_text(const struct err *err)
{
	for (const char *c = err->msg; *c; c++)
		ASSERT((unsigned char)*c >= ' ' && *c != 0x7f);
}

static void fuzz_exec(int fd, bool with_stdin)
{
	static const char *const argv[] = {"x", NULL};
	CLEANUP_FD int out = memfd_create("out", MFD_CLOEXEC);
	CLEANUP_FD int in = with_stdin ? open("/dev/zero", O_RDONLY | O_CLOEXEC) : -1;
	struct agent_exec x = {.argv = argv,
		.in_fd = in,
		.out_fd = out,
		.err_fd = out,
		.signal_fd = -1,
		.cancel_fd = -1};
	struct agent_result result;
	struct err err = {0};
	int rc = agent_exec(fd, &x, &result, &err);

	ASSERT(rc <= 0 && rc == (rc ? err.code : 0));
	ASSERT(result.exit_code >= 0 && result.exit_code <= 255);
	ASSERT(rc == 0 || (result.exit_code >= 125 && result.exit_code <= 127));
	if (only_output_and_end())
		ASSERT((size_t)lseek(out, 0, SEEK_END) == output_bytes());
	check_text(&err);
}

static char dir[] = "/tmp/mayfly-client-fuzz-XXXXXX";

static void clean_up(void)
{
	char path[64];

	snprintf(path, sizeof(path), "%s/s_1025", dir);
	unlink(path);
	rmdir(dir);
}

static void fuzz_ready(int fd)
{
	static bool made;
	static int listener;
	struct agent_ready ready;
	struct err err = {0};
	CLEANUP_FD int guest = -1;

	if (!made) {
		ASSERT(mkdtemp(dir));
		atexit(clean_up);
		listener = agent_ready_listen(dir, "s", &err);
		ASSERT(listener >= 0);
		made = true;
	}
	(void)fd;
	guest = unix_connect(dir, "s_1025", &err);
	ASSERT(guest >= 0);
	// What does not fit is not sent: the socket's buffer holds more than a message can have.
	(void)!send(guest, stream, MIN(stream_len, (size_t)65536), MSG_DONTWAIT | MSG_NOSIGNAL);
	shutdown(guest, SHUT_WR);
	if (agent_ready_wait(listener, -1, now_ns() + DEADLINE_NS, &ready, &err) == 0)
		for (const char *c = ready.version; *c; c++)
			ASSERT(*c > ' ' && *c < 0x7f);
	ASSERT(err.code != -ETIMEDOUT);
}

static void fuzz_jobs(int fd, bool start)
{
	static const char *const argv[] = {"x", NULL};
	const struct agent_exec x = {.argv = argv, .in_fd = -1, .signal_fd = -1, .cancel_fd = -1};
	const struct agent_attach attach = {.job = "j",
		.follow = true,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = -1};
	char name[AGENT_JOB_NAME_MAX + 1];
	struct agent_result result;
	struct err err = {0};
	int rc = start ? agent_job_start(fd, &x, "j", now_ns() + DEADLINE_NS, name, &result, &err)
		       : agent_attach(fd, &attach, &result, &err);

	ASSERT(rc <= 0 && rc != -ETIMEDOUT);
	ASSERT(result.exit_code >= 0 && result.exit_code <= 255);
	for (const char *c = name; start && rc == 0 && *c; c++)
		ASSERT(*c > ' ' && *c < 0x7f);
	check_text(&err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct err err = {0};
	int pair[2], room = 4 * (int)STREAM_MAX;

	if (size < 1)
		return 0;
	make_stream(data + 1, size - 1);
	ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
	ASSERT(stream_len == 0 || send(pair[0], stream, stream_len, MSG_DONTWAIT | MSG_NOSIGNAL) ==
					  (ssize_t)stream_len);
	shutdown(pair[0], SHUT_WR);
	switch (data[0] % 5) {
	case 0:
	case 1:
		fuzz_exec(pair[1], data[0] % 5 == 1);
		break;
	case 2:
		fuzz_ready(pair[1]);
		break;
	case 4:
		fuzz_jobs(pair[1], data[0] & 0x80);
		break;
	default:
		if (agent_shutdown(pair[1], -1, now_ns() + DEADLINE_NS, &err) < 0)
			ASSERT(err.code != -ETIMEDOUT);
		check_text(&err);
	}
	fd_close(&pair[0]);
	fd_close(&pair[1]);
	return 0;
}
