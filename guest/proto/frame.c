// SPDX-License-Identifier: Apache-2.0
// The frames of the agent protocol: sizes, fixed payloads and the parser. Any thread.
#include "guest/proto/frame.h"

#include <errno.h>
#include <string.h>

#include "vmm/base/bytes.h"
#include "vmm/base/util.h"

struct shape {
	enum frame_dir dir;
	uint32_t min, max; // payload bytes
};

static const struct shape shapes[] = {
	[FRAME_REQUEST] = {FRAME_TO_GUEST, 2, FRAME_PAYLOAD_MAX},
	[FRAME_STDIN] = {FRAME_TO_GUEST, 1, FRAME_PAYLOAD_MAX},
	[FRAME_STDIN_EOF] = {FRAME_TO_GUEST, 0, 0},
	[FRAME_RESIZE] = {FRAME_TO_GUEST, 4, 4},
	[FRAME_SIGNAL] = {FRAME_TO_GUEST, 4, 4},
	[FRAME_READY] = {FRAME_TO_HOST, 2, 4096},
	[FRAME_REPLY] = {FRAME_TO_HOST, 2, FRAME_PAYLOAD_MAX},
	[FRAME_STDOUT] = {FRAME_TO_HOST, 1, FRAME_PAYLOAD_MAX},
	[FRAME_STDERR] = {FRAME_TO_HOST, 1, FRAME_PAYLOAD_MAX},
	[FRAME_WINDOW] = {FRAME_TO_HOST, 4, 4},
	[FRAME_EXIT] = {FRAME_TO_HOST, FRAME_EXIT_BYTES, FRAME_EXIT_BYTES},
	[FRAME_ERROR] = {FRAME_TO_HOST, FRAME_ERROR_BYTES,
		FRAME_ERROR_BYTES + FRAME_ERROR_TEXT_MAX},
	[FRAME_OFFSET] = {FRAME_TO_HOST, FRAME_OFFSET_BYTES, FRAME_OFFSET_BYTES},
	[FRAME_ENTRY] = {FRAME_OF_TREE, 2, FRAME_ENTRY_MAX},
	[FRAME_DATA] = {FRAME_OF_TREE, FRAME_DATA_HEAD_BYTES + 1, FRAME_PAYLOAD_MAX},
	[FRAME_CHANGE] = {FRAME_OF_TREE, 2, FRAME_CHANGE_MAX},
	[FRAME_PROBLEM] = {FRAME_OF_TREE, FRAME_PROBLEM_BYTES, FRAME_PROBLEM_BYTES + 4096},
	[FRAME_END] = {FRAME_OF_TREE, 0, 0},
};

static const struct shape *shape_of(uint8_t type)
{
	bool known = (type >= FRAME_REQUEST && type <= FRAME_SIGNAL) ||
		     (type >= FRAME_READY && type <= FRAME_OFFSET) ||
		     (type >= FRAME_ENTRY && type <= FRAME_CHANGE);

	return known ? &shapes[type] : NULL;
}

void frame_header_put(uint8_t ret[FRAME_HEADER_BYTES], enum frame_type type, uint32_t len)
{
	const struct shape *shape = shape_of((uint8_t)type);

	ASSERT(shape && len >= shape->min && len <= shape->max);
	put_le32(ret, len);
	put_le32(ret + 4, (uint32_t)type);
}

void frame_exit_put(uint8_t ret[FRAME_EXIT_BYTES], const struct frame_exit *exit)
{
	put_le32(ret, exit->code);
	put_le32(ret + 4, exit->signal);
	put_le32(ret + 8, exit->flags);
	put_le64(ret + 12, exit->user_us);
	put_le64(ret + 20, exit->system_us);
	put_le64(ret + 28, exit->max_rss_bytes);
}

bool frame_exit_get(const uint8_t *payload, size_t len, struct frame_exit *ret)
{
	struct frame_exit e;

	if (len != FRAME_EXIT_BYTES)
		return false;
	e.code = get_le32(payload);
	e.signal = get_le32(payload + 4);
	e.flags = get_le32(payload + 8);
	e.user_us = get_le64(payload + 12);
	e.system_us = get_le64(payload + 20);
	e.max_rss_bytes = get_le64(payload + 28);
	if (e.code > 255 || e.signal > 127 || (e.code && e.signal))
		return false;
	*ret = e;
	return true;
}

void frame_error_put(uint8_t ret[FRAME_ERROR_BYTES], const struct frame_error *error)
{
	put_le32(ret, error->errno_value);
	put_le32(ret + 4, error->exit_code);
}

bool frame_error_get(const uint8_t *payload, size_t len, struct frame_error *ret)
{
	struct frame_error e;

	if (len < FRAME_ERROR_BYTES)
		return false;
	e.errno_value = get_le32(payload);
	e.exit_code = get_le32(payload + 4);
	if (e.errno_value > 4095 || e.exit_code < 125 || e.exit_code > 127)
		return false;
	*ret = e;
	return true;
}

int frame_parse(struct frame_parser *p, const uint8_t **data, size_t *len, struct frame_piece *ret)
{
	uint32_t take;

	if (p->header_have < FRAME_HEADER_BYTES) {
		const struct shape *shape;

		take = (uint32_t)MIN(*len, (size_t)(FRAME_HEADER_BYTES - p->header_have));
		if (take)
			memcpy(p->header + p->header_have, *data, take);
		p->header_have += take;
		*data += take;
		*len -= take;
		if (p->header_have < FRAME_HEADER_BYTES)
			return 0;
		p->payload_len = get_le32(p->header);
		p->payload_off = 0;
		shape = shape_of(p->header[4]);
		if (!shape || shape->dir != p->dir || p->payload_len < shape->min ||
			p->payload_len > shape->max || p->header[5] || p->header[6] ||
			p->header[7]) {
			p->header_have = 0;
			return -EPROTO;
		}
	}
	take = (uint32_t)MIN(*len, (size_t)(p->payload_len - p->payload_off));
	if (take == 0 && p->payload_len)
		return 0;
	*ret = (struct frame_piece){
		.type = (enum frame_type)p->header[4],
		.frame_len = p->payload_len,
		.off = p->payload_off,
		.data = *data,
		.len = take,
		.last = p->payload_off + take == p->payload_len,
	};
	*data += take;
	*len -= take;
	p->payload_off += take;
	if (ret->last)
		p->header_have = 0;
	return 1;
}
