// SPDX-License-Identifier: Apache-2.0
// guest/proto: a stream of frames parsed in pieces of any size gives what it gives in one piece; a
// JSON text that is accepted survives writing and reading.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guest/proto/frame.h"
#include "guest/proto/json.h"
#include "vmm/base/util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define TEXT_MAX_BYTES (64U * 1024)
#define NODES_MAX      4096

// A digest of everything that a parser says about a stream, independent of how it is cut.
struct digest {
	uint64_t sum;
	int end; // 0, or the error
};

static void mix(struct digest *d, uint64_t v)
{
	d->sum = (d->sum ^ v) * 0x100000001b3ULL;
}

static struct digest parse_stream(
	enum frame_dir dir, const uint8_t *data, size_t size, const uint8_t *cuts, size_t ncuts)
{
	struct frame_parser parser = {.dir = dir};
	struct digest d = {0};
	size_t off = 0, cut = 0;
	uint32_t expect = 0;

	while (off < size) {
		size_t left = ncuts ? MIN(size - off, (size_t)cuts[cut++ % ncuts] + 1) : size - off;
		const uint8_t *from = data + off;
		struct frame_piece piece;
		int rc;

		off += left;
		while ((rc = frame_parse(&parser, &from, &left, &piece)) == 1) {
			ASSERT(piece.off == expect && piece.len <= piece.frame_len - piece.off);
			ASSERT(piece.frame_len <= FRAME_PAYLOAD_MAX);
			ASSERT(piece.len || piece.frame_len == 0);
			ASSERT(piece.last == (piece.off + piece.len == piece.frame_len));
			if (piece.off == 0)
				mix(&d, (uint64_t)piece.type << 32 | piece.frame_len);
			for (uint32_t i = 0; i < piece.len; i++)
				mix(&d, piece.data[i]);
			expect = piece.last ? 0 : piece.off + piece.len;
		}
		if (rc < 0) {
			ASSERT(rc == -EPROTO);
			d.end = rc;
			return d;
		}
		ASSERT(left == 0);
	}
	return d;
}

static void fuzz_frames(const uint8_t *data, size_t size)
{
	enum frame_dir dir = data[0] & 1 ? FRAME_TO_HOST : FRAME_TO_GUEST;
	size_t ncuts = MIN((size_t)(data[0] >> 1 & 7) + 1, size - 1);
	const uint8_t *cuts = data + 1;
	struct digest whole, cut;

	data += 1 + ncuts;
	size -= 1 + ncuts;
	whole = parse_stream(dir, data, size, NULL, 0);
	cut = parse_stream(dir, data, size, cuts, ncuts);
	ASSERT(whole.sum == cut.sum && whole.end == cut.end);
}

static void write_node(struct json_out *out, const struct json_node *nodes, uint32_t i)
{
	const struct json_node *n = &nodes[i];

	switch (n->type) {
	case JSON_NULL: // the writer has none
	case JSON_INT:
		json_int(out, n->num);
		return;
	case JSON_BOOL:
		json_bool(out, n->num != 0);
		return;
	case JSON_STRING:
		ASSERT(strlen(n->str) == n->count);
		json_str(out, n->str);
		return;
	default:
		break;
	}
	json_open(out, n->type == JSON_OBJECT ? '{' : '[');
	for (uint32_t k = i + 1; k < n->end; k = nodes[k].end) {
		if (n->type == JSON_OBJECT) {
			json_key(out, nodes[k].str);
			k = nodes[k].end;
		}
		write_node(out, nodes, k);
	}
	json_close(out, n->type == JSON_OBJECT ? '}' : ']');
}

static void fuzz_json(const uint8_t *data, size_t size)
{
	static struct json_node nodes[NODES_MAX], again[NODES_MAX];
	static char written[8 * TEXT_MAX_BYTES];
	struct json_out out = {.buf = written, .cap = sizeof(written)};
	// An allocation of the exact size, so that ASan sees a step too far.
	char *text = malloc(size ? size : 1);
	int n, m;

	ASSERT(text && size <= TEXT_MAX_BYTES);
	memcpy(text, data, size);
	n = json_parse(text, size, nodes, NODES_MAX);
	ASSERT(n > 0 || n == -EINVAL || n == -E2BIG);
	if (n > 0) {
		ASSERT(nodes[0].end == (uint32_t)n);
		write_node(&out, nodes, 0);
		ASSERT(!out.full);
		m = json_parse(written, out.len, again, NODES_MAX);
		ASSERT(m == n);
		for (int i = 0; i < n; i++) {
			bool null = nodes[i].type == JSON_NULL;

			ASSERT(again[i].type == (null ? JSON_INT : nodes[i].type));
			ASSERT(again[i].end == nodes[i].end && again[i].count == nodes[i].count);
			if (nodes[i].type == JSON_STRING)
				ASSERT(strcmp(again[i].str, nodes[i].str) == 0);
			else if (nodes[i].type == JSON_INT || nodes[i].type == JSON_BOOL)
				ASSERT(again[i].num == nodes[i].num);
		}
	}
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 2 || size > TEXT_MAX_BYTES)
		return 0;
	if (data[0] & 0x80)
		fuzz_json(data + 1, size - 1);
	else
		fuzz_frames(data, size);
	return 0;
}
