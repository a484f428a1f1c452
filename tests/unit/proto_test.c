// SPDX-License-Identifier: Apache-2.0
// guest/proto: frames come out whole however the bytes are cut, and nothing that a correct peer
// does not send gets through; the JSON subset is read in place, written back, and refused beyond
// it.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "guest/proto/frame.h"
#include "guest/proto/json.h"
#include "vmm/base/bytes.h"

// --- Frames ----------------------------------------------------------------------------------

static size_t put_frame(uint8_t *to, enum frame_type type, const void *payload, uint32_t len)
{
	frame_header_put(to, type, len);
	if (len)
		memcpy(to + FRAME_HEADER_BYTES, payload, len);
	return FRAME_HEADER_BYTES + len;
}

static void frames_survive_any_cut(void **state)
{
	uint8_t stream[256], exit_payload[FRAME_EXIT_BYTES];
	size_t len = 0;
	(void)state;

	frame_exit_put(exit_payload, &(struct frame_exit){.code = 3, .user_us = 1ULL << 40});
	len += put_frame(stream + len, FRAME_STDOUT, "hello", 5);
	len += put_frame(stream + len, FRAME_WINDOW, "\1\2\3\4", 4);
	len += put_frame(stream + len, FRAME_STDERR, "x", 1);
	len += put_frame(stream + len, FRAME_EXIT, exit_payload, sizeof(exit_payload));

	for (size_t step = 1; step <= len; step++) {
		struct frame_parser parser = {.dir = FRAME_TO_HOST};
		uint8_t payload[64];
		enum frame_type types[8];
		uint32_t lens[8], frames = 0, have = 0;

		for (size_t off = 0; off < len; off += step) {
			const uint8_t *data = stream + off;
			size_t left = MIN(step, len - off);
			struct frame_piece piece;

			while (frame_parse(&parser, &data, &left, &piece) == 1) {
				assert_int_equal(piece.off, have);
				memcpy(payload + have, piece.data, piece.len);
				have += piece.len;
				if (!piece.last)
					continue;
				assert_int_equal(have, piece.frame_len);
				types[frames] = piece.type;
				lens[frames++] = have;
				if (piece.type == FRAME_STDOUT)
					assert_memory_equal(payload, "hello", 5);
				have = 0;
			}
			assert_int_equal(left, 0);
		}
		assert_int_equal(frames, 4);
		assert_int_equal(types[0], FRAME_STDOUT);
		assert_int_equal(types[1], FRAME_WINDOW);
		assert_int_equal(types[2], FRAME_STDERR);
		assert_int_equal(types[3], FRAME_EXIT);
		assert_int_equal(lens[3], FRAME_EXIT_BYTES);
	}
}

static void frame_without_payload_comes_at_once(void **state)
{
	uint8_t stream[FRAME_HEADER_BYTES];
	struct frame_parser parser = {.dir = FRAME_TO_GUEST};
	const uint8_t *data = stream;
	size_t left = sizeof(stream);
	struct frame_piece piece;
	(void)state;

	frame_header_put(stream, FRAME_STDIN_EOF, 0);
	assert_int_equal(frame_parse(&parser, &data, &left, &piece), 1);
	assert_int_equal(piece.type, FRAME_STDIN_EOF);
	assert_int_equal(piece.len, 0);
	assert_true(piece.last);
	assert_int_equal(frame_parse(&parser, &data, &left, &piece), 0);
}

static int parse_header(enum frame_dir dir, uint32_t len, uint32_t word)
{
	uint8_t header[FRAME_HEADER_BYTES];
	struct frame_parser parser = {.dir = dir};
	const uint8_t *data = header;
	size_t left = sizeof(header);
	struct frame_piece piece;

	put_le32(header, len);
	put_le32(header + 4, word);
	return frame_parse(&parser, &data, &left, &piece);
}

static void frames_of_wrong_shape_are_refused(void **state)
{
	(void)state;
	// Every type and length that is not in the protocol, at the edges of those that are.
	assert_int_equal(parse_header(FRAME_TO_GUEST, FRAME_PAYLOAD_MAX, FRAME_STDIN), 0);
	assert_int_equal(parse_header(FRAME_TO_GUEST, FRAME_PAYLOAD_MAX + 1, FRAME_STDIN), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, UINT32_MAX, FRAME_STDIN), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 0, FRAME_STDIN), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 1, FRAME_STDIN_EOF), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 3, FRAME_SIGNAL), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 5, FRAME_SIGNAL), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 4, FRAME_SIGNAL), 0);
	assert_int_equal(parse_header(FRAME_TO_HOST, 4, FRAME_SIGNAL), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 5, FRAME_STDOUT), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_HOST, FRAME_EXIT_BYTES, FRAME_EXIT), 0);
	assert_int_equal(parse_header(FRAME_TO_HOST, FRAME_EXIT_BYTES - 1, FRAME_EXIT), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_HOST, FRAME_ERROR_BYTES + FRAME_ERROR_TEXT_MAX + 1,
				 FRAME_ERROR),
		-EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 4, FRAME_SIGNAL | 1U << 8), -EPROTO);
	assert_int_equal(parse_header(FRAME_TO_GUEST, 4, FRAME_SIGNAL | 1U << 31), -EPROTO);
	for (uint32_t type = 0; type < 256; type++) {
		bool to_guest = type >= FRAME_REQUEST && type <= FRAME_SIGNAL;
		bool to_host = type >= FRAME_READY && type <= FRAME_OFFSET;
		bool some = false;

		// A length that suits it is found exactly for the types that there are.
		for (uint32_t len = 0; len < 64; len++)
			some |= parse_header(FRAME_TO_GUEST, len, type) >= 0;
		assert_int_equal(some, to_guest);
		some = false;
		for (uint32_t len = 0; len < 64; len++)
			some |= parse_header(FRAME_TO_HOST, len, type) >= 0;
		assert_int_equal(some, to_host);
	}
}

static void exit_status_is_one_thing(void **state)
{
	uint8_t payload[FRAME_EXIT_BYTES];
	struct frame_exit out, in = {.signal = 9,
				       .flags = EXIT_TIMED_OUT,
				       .user_us = 1,
				       .system_us = UINT64_MAX,
				       .max_rss_bytes = 4096};
	(void)state;

	frame_exit_put(payload, &in);
	assert_true(frame_exit_get(payload, sizeof(payload), &out));
	assert_int_equal(out.signal, 9);
	assert_int_equal(out.code, 0);
	assert_int_equal(out.flags, EXIT_TIMED_OUT);
	assert_int_equal(out.user_us, 1);
	assert_true(out.system_us == UINT64_MAX);
	assert_int_equal(out.max_rss_bytes, 4096);
	assert_false(frame_exit_get(payload, sizeof(payload) - 1, &out));

	in.code = 1; // both
	frame_exit_put(payload, &in);
	assert_false(frame_exit_get(payload, sizeof(payload), &out));
	frame_exit_put(payload, &(struct frame_exit){.code = 256});
	assert_false(frame_exit_get(payload, sizeof(payload), &out));
	frame_exit_put(payload, &(struct frame_exit){.signal = 128});
	assert_false(frame_exit_get(payload, sizeof(payload), &out));
}

static void error_codes_are_in_range(void **state)
{
	uint8_t payload[FRAME_ERROR_BYTES];
	struct frame_error out;
	(void)state;

	frame_error_put(payload, &(struct frame_error){.errno_value = 2, .exit_code = 127});
	assert_true(frame_error_get(payload, sizeof(payload), &out));
	assert_int_equal(out.errno_value, 2);
	assert_int_equal(out.exit_code, 127);
	assert_false(frame_error_get(payload, sizeof(payload) - 1, &out));
	frame_error_put(payload, &(struct frame_error){.errno_value = 4096, .exit_code = 127});
	assert_false(frame_error_get(payload, sizeof(payload), &out));
	frame_error_put(payload, &(struct frame_error){.errno_value = 2, .exit_code = 0});
	assert_false(frame_error_get(payload, sizeof(payload), &out));
}

// --- JSON ------------------------------------------------------------------------------------

static char text[4096];
static struct json_node nodes[64];

static int parse(const char *json)
{
	strcpy(text, json);
	return json_parse(text, strlen(json), nodes, ARRAY_SIZE(nodes));
}

static void json_reads_what_the_protocol_uses(void **state)
{
	(void)state;
	assert_int_equal(
		parse(" {\"a\" : [1, -2 ,true,null], \"b\":\"x\\n\\u00e9\\ud83d\\ude00\"} "), 9);
	assert_int_equal(nodes[0].type, JSON_OBJECT);
	assert_int_equal(nodes[0].count, 2);
	assert_int_equal(nodes[0].end, 9);
	assert_string_equal(nodes[1].str, "a");
	assert_int_equal(nodes[2].type, JSON_ARRAY);
	assert_int_equal(nodes[2].count, 4);
	assert_int_equal(nodes[2].end, 7);
	assert_int_equal(nodes[3].num, 1);
	assert_int_equal(nodes[4].num, -2);
	assert_int_equal(nodes[5].type, JSON_BOOL);
	assert_int_equal(nodes[6].type, JSON_NULL);
	assert_string_equal(nodes[8].str, "x\n\xc3\xa9\xf0\x9f\x98\x80");
	assert_int_equal(nodes[8].count, 8);
	// Bytes that are no UTF-8 are somebody's file name.
	assert_int_equal(parse("\"\xff\xfe\""), 1);
	assert_string_equal(nodes[0].str, "\xff\xfe");
	assert_int_equal(parse("[]"), 1);
	assert_int_equal(parse("{}"), 1);
	assert_int_equal(parse("9223372036854775807"), 1);
	assert_true(nodes[0].num == INT64_MAX);
	assert_int_equal(parse("-9223372036854775808"), 1);
	assert_true(nodes[0].num == INT64_MIN);
	assert_int_equal(parse("0"), 1);
	assert_int_equal(parse("\"\\\"\\\\\\/\\b\\f\\r\\t\""), 1);
	assert_string_equal(nodes[0].str, "\"\\/\b\f\r\t");
}

static void json_refuses_the_rest(void **state)
{
	static const char *const bad[] = {"", " ", "{", "}", "[", "[1", "[1,", "[1,]", "[,1]",
		"[1 2]", "{1:2}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{\"a\":1 \"b\":2}", "tru",
		"nul", "falsey", "1 1", "{}{}", "01", "-", "-01", "+1", "1.5", "1e3", "1E3", ".5",
		"0x10", "9223372036854775808", "-9223372036854775809", "99999999999999999999999",
		"\"", "\"abc", "\"a\nb\"", "\"\\x\"", "\"\\\"", "\"\\u12\"", "\"\\u12g4\"",
		"\"\\u0000\"", "\"\\ud800\"", "\"\\ud800x\"", "\"\\ud800\\u0041\"", "\"\\udc00\"",
		"'a'", "NaN", "[1]x", "{]", "[}"};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		if (parse(bad[i]) != -EINVAL)
			fail_msg("accepted: %s", bad[i]);
	// A NUL byte anywhere.
	for (size_t i = 0; i < 9; i++) {
		memcpy(text, "{\"ab\":12}", 9);
		text[i] = '\0';
		assert_int_equal(json_parse(text, 9, nodes, ARRAY_SIZE(nodes)), -EINVAL);
	}
}

static void json_depth_and_size_are_bounded(void **state)
{
	char *deep = malloc(100001);
	(void)state;

	assert_int_equal(parse("[[[[[[[[1]]]]]]]]"), JSON_DEPTH_MAX + 1);
	assert_int_equal(parse("[[[[[[[[[1]]]]]]]]]"), -EINVAL);
	assert_non_null(deep);
	memset(deep, '[', 100000);
	deep[100000] = '\0';
	assert_int_equal(json_parse(deep, 100000, nodes, ARRAY_SIZE(nodes)), -EINVAL);
	free(deep);
	strcpy(text, "[0");
	for (size_t i = 1; i < ARRAY_SIZE(nodes) - 1; i++)
		strcat(text, ",0");
	strcat(text, "]");
	assert_int_equal(
		json_parse(text, strlen(text), nodes, ARRAY_SIZE(nodes)), (int)ARRAY_SIZE(nodes));
	memcpy(text + strlen(text) - 1, ",0]", 4);
	assert_int_equal(json_parse(text, strlen(text), nodes, ARRAY_SIZE(nodes)), -E2BIG);
}

struct decoded {
	const char *name;
	int64_t num;
	bool flag;
	const struct json_node *list;
};

static int decode(const char *json, enum json_unknown unknown, struct decoded *d, struct err *err)
{
	const struct json_field fields[] = {
		{"name", JSON_STRING, &d->name, 0, 0},
		{"num", JSON_INT, &d->num, 1, 100},
		{"flag", JSON_BOOL, &d->flag, 0, 0},
		{"list", JSON_ARRAY, &d->list, 0, 0},
	};

	assert_true(parse(json) > 0);
	return json_decode(nodes, nodes, fields, ARRAY_SIZE(fields), unknown, err);
}

static void decode_takes_known_members_once(void **state)
{
	struct decoded d = {.num = 7};
	struct err err = {0};
	(void)state;

	assert_int_equal(decode("{\"list\":[1,[2,3]],\"flag\":true,\"name\":\"n\"}",
				 JSON_REFUSE_UNKNOWN, &d, &err),
		0);
	assert_string_equal(d.name, "n");
	assert_true(d.flag);
	assert_int_equal(d.num, 7); // absent: untouched
	assert_int_equal(d.list->count, 2);

	assert_int_equal(decode("{\"other\":1}", JSON_REFUSE_UNKNOWN, &d, &err), -EINVAL);
	assert_string_equal(err.msg, "unknown member \"other\"");
	assert_int_equal(
		decode("{\"other\":{\"num\":3},\"num\":5}", JSON_SKIP_UNKNOWN, &d, &err), 0);
	assert_int_equal(d.num, 5);
	assert_int_equal(decode("{\"num\":1,\"num\":2}", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_int_equal(decode("{\"num\":0}", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_int_equal(decode("{\"num\":101}", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_int_equal(decode("{\"num\":\"5\"}", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_int_equal(decode("{\"name\":null}", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_int_equal(decode("[]", JSON_SKIP_UNKNOWN, &d, &err), -EINVAL);
	assert_string_equal(err.msg, "not a JSON object");
}

static void writer_is_read_back(void **state)
{
	char nasty[256], buf[2048];
	struct json_out out = {.buf = buf, .cap = sizeof(buf)};
	(void)state;

	for (int i = 1; i < 256; i++)
		nasty[i - 1] = (char)i;
	nasty[255] = '\0';
	json_open(&out, '{');
	json_key(&out, "s");
	json_str(&out, nasty);
	json_key(&out, nasty);
	json_open(&out, '[');
	json_int(&out, INT64_MIN);
	json_int(&out, INT64_MAX);
	json_int(&out, 0);
	json_bool(&out, true);
	json_bool(&out, false);
	json_open(&out, '[');
	json_close(&out, ']');
	json_str(&out, "[");
	json_str(&out, "{:");
	json_close(&out, ']');
	json_close(&out, '}');
	assert_false(out.full);
	assert_int_equal(json_parse(buf, out.len, nodes, ARRAY_SIZE(nodes)), 13);
	assert_string_equal(nodes[2].str, nasty);
	assert_string_equal(nodes[3].str, nasty);
	assert_true(nodes[5].num == INT64_MIN);
	assert_true(nodes[6].num == INT64_MAX);
	assert_int_equal(nodes[8].num, 1);
	assert_string_equal(nodes[11].str, "[");
	assert_string_equal(nodes[12].str, "{:");
}

static void writer_stops_at_its_bound(void **state)
{
	char buf[16];
	(void)state;

	for (size_t cap = 0; cap < 12; cap++) {
		struct json_out out = {.buf = buf, .cap = cap};

		memset(buf, '#', sizeof(buf));
		json_open(&out, '{');
		json_key(&out, "abc");
		json_int(&out, 1234);
		json_close(&out, '}');
		assert_true(out.full); // {"abc":1234} takes 12
		assert_true(out.len <= cap);
		for (size_t i = cap; i < sizeof(buf); i++)
			assert_int_equal(buf[i], '#');
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(frames_survive_any_cut),
		cmocka_unit_test(frame_without_payload_comes_at_once),
		cmocka_unit_test(frames_of_wrong_shape_are_refused),
		cmocka_unit_test(exit_status_is_one_thing),
		cmocka_unit_test(error_codes_are_in_range),
		cmocka_unit_test(json_reads_what_the_protocol_uses),
		cmocka_unit_test(json_refuses_the_rest),
		cmocka_unit_test(json_depth_and_size_are_bounded),
		cmocka_unit_test(decode_takes_known_members_once),
		cmocka_unit_test(writer_is_read_back),
		cmocka_unit_test(writer_stops_at_its_bound),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
