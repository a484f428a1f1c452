// SPDX-License-Identifier: Apache-2.0
// The frames of the agent protocol (docs/agent-protocol.md): what may follow what is the business
// of the two ends, the shape of the bytes is decided here, for both. No I/O, no allocation, no
// state but the caller's. Any thread.
#ifndef MAYFLY_PROTO_FRAME_H
#define MAYFLY_PROTO_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROTO_VERSION    1
#define AGENT_PORT       1024U // the agent listens here
#define AGENT_READY_PORT 1025U // the host listens here for one `ready` frame

// A frame: le32 payload bytes, u8 type, three bytes of zero, payload.
#define FRAME_HEADER_BYTES 8U
#define FRAME_PAYLOAD_MAX  65536U

// stdin that the host may send before the guest has asked for more.
#define STDIN_WINDOW_BYTES 65536U

enum frame_dir { FRAME_TO_GUEST, FRAME_TO_HOST, FRAME_OF_TREE };

enum frame_type {
	// Host to guest.
	FRAME_REQUEST = 1, // JSON; the first frame, and the only one of its kind
	FRAME_STDIN = 2, // bytes
	FRAME_STDIN_EOF = 3, // nothing
	FRAME_RESIZE = 4, // le16 rows, le16 columns
	FRAME_SIGNAL = 5, // le32 signal number
	// Guest to host.
	FRAME_READY = 16, // JSON; only on the ready port
	FRAME_REPLY = 17, // JSON; ends the stream
	FRAME_STDOUT = 18, // bytes
	FRAME_STDERR = 19, // bytes
	FRAME_WINDOW = 20, // le32 bytes of stdin that may be sent in addition
	FRAME_EXIT = 21, // struct frame_exit; ends the stream
	FRAME_ERROR = 22, // struct frame_error and text; ends the stream
	FRAME_OFFSET =
		23, // le32 type, le64: where in its stream the next frame of that type begins
	// In a stream of files, which travels as stdin or stdout: see tree.h.
	FRAME_ENTRY = 32, // JSON
	FRAME_DATA = 33, // le64 offset, bytes
	FRAME_PROBLEM = 34, // le32 errno, the path that it is about
	FRAME_END = 35, // nothing; without it the stream was cut
	FRAME_CHANGE = 36, // JSON, of a watch
};

// How a command ended. Exactly one of code and signal tells: signal 0 means that it exited.
struct frame_exit {
	uint32_t code;
	uint32_t signal;
	uint32_t flags; // EXIT_*
	uint64_t user_us;
	uint64_t system_us;
	uint64_t max_rss_bytes;
};

#define EXIT_TIMED_OUT 1U // the guest killed it at the deadline of its request
#define EXIT_CORE      2U
#define EXIT_LIMIT     4U // a limit of memory or CPU time ended it

#define FRAME_EXIT_BYTES 36U

// Why there is no answer. The text follows, without a NUL.
struct frame_error {
	uint32_t errno_value; // Linux numbering, 0 when no errno fits
	uint32_t exit_code; // 127 no such command, 126 not executable, 125 everything else
};

#define FRAME_ERROR_BYTES    8U
#define FRAME_ERROR_TEXT_MAX 480U

#define FRAME_OFFSET_BYTES    12U
#define FRAME_DATA_HEAD_BYTES 8U
#define FRAME_DATA_MAX        (FRAME_PAYLOAD_MAX - FRAME_DATA_HEAD_BYTES)
#define FRAME_ENTRY_MAX       16384U
#define FRAME_PROBLEM_BYTES   4U
#define FRAME_CHANGE_MAX      16384U

// Writes a header. len must be within what the type allows.
void frame_header_put(uint8_t ret[FRAME_HEADER_BYTES], enum frame_type type, uint32_t len);

// Fixed payloads. The get functions want the payload's length and return false when it is wrong.
void frame_exit_put(uint8_t ret[FRAME_EXIT_BYTES], const struct frame_exit *exit);
bool frame_exit_get(const uint8_t *payload, size_t len, struct frame_exit *ret);
void frame_error_put(uint8_t ret[FRAME_ERROR_BYTES], const struct frame_error *error);
bool frame_error_get(const uint8_t *payload, size_t len, struct frame_error *ret);

// Cuts a byte stream into frames without holding any payload: large frames come in pieces as they
// arrive. Zero-initialised but for dir.
struct frame_parser {
	enum frame_dir dir; // the frames of the other direction are refused
	uint8_t header[FRAME_HEADER_BYTES];
	uint32_t header_have;
	uint32_t payload_len;
	uint32_t payload_off;
};

struct frame_piece {
	enum frame_type type;
	uint32_t frame_len; // of the whole payload
	uint32_t off; // of this piece in it
	const uint8_t *data;
	uint32_t len; // 0 only for an empty frame
	bool last;
};

// Takes the next piece off *data and *len. Returns 1 with a piece that points into the data, 0 when
// all was taken and more is needed, -EPROTO for bytes that no correct peer sends, after which the
// stream is lost.
int frame_parse(struct frame_parser *p, const uint8_t **data, size_t *len, struct frame_piece *ret);

#endif
