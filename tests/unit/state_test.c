// SPDX-License-Identifier: Apache-2.0
// vmm/base/state: what is encoded is decoded; older data leaves the rest alone; bad data is refused
// by name and changes nothing; a table with a forgotten byte is found out.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>

#include "tests/support/state_sample.h"
#include "vmm/base/bytes.h"

static const struct sample full = {
	.u8 = 0x12,
	.u16 = 0x3456,
	.u32 = 0x789abcde,
	.atomic_u32 = 0xf0123456,
	.u64 = 0x123456789abcdef0,
	.flag = true,
	.bytes = {'a', 0, 'b', '\n', (char)0xff},
	.u16s = {1, 0x8000, 0xffff},
	.fixed_u32 = 7,
	.fixed_bytes = "abc",
	.saved.size = 64,
	.one = {1, "one", 11},
	.two = {{2, "two", 12}, {3, "three", 13}},
	.nr_tags = 2,
	.tags = {{4, "four", 14}, {5, "five", 15}, {6, "six", 16}},
	.opaque = (void *)1,
};

static struct buf encode(const struct sample *s)
{
	struct buf out = {0};

	assert_int_equal(state_encode(&sample_state, s, &out), 0);
	return out;
}

static void what_is_encoded_is_decoded(void **state)
{
	struct buf out = encode(&full), again;
	struct sample got = {.fixed_u32 = 7,
		.fixed_bytes = "abc",
		.one.watch = 7,
		.two[1].watch = 8,
		.tags[1].watch = 9};
	struct err err = {0};

	(void)state;
	if (state_decode(&sample_state, out.data, out.len, &got, &err) < 0)
		fail_msg("%s", err.msg);
	again = encode(&got);
	assert_int_equal(out.len, again.len);
	assert_memory_equal(out.data, again.data, out.len);
	assert_int_equal(got.u64, full.u64);
	assert_int_equal(got.nr_tags, 2);
	assert_string_equal(got.tags[1].text, "five");
	// What is not saved stays, and so does what the count leaves out.
	assert_int_equal(got.one.watch, 7);
	assert_int_equal(got.two[1].watch, 8);
	assert_int_equal(got.tags[1].watch, 9);
	assert_int_equal(got.tags[2].id, 0);
	assert_null(got.opaque);
	buf_fini(&again);
	buf_fini(&out);
}

// The bytes are what the header says, whatever the machine: a format that lasts.
static void the_encoding_is_as_documented(void **state)
{
	static const uint8_t want[] = "\3tag"
				      "\2id\2\0\0\0\x34\x12"
				      "\4text\6\0\0\0hello\0";
	const struct sample_tag tag = {0x1234, "hello", 5};
	struct buf out = {0};

	(void)state;
	assert_int_equal(state_encode(&sample_tag_state, &tag, &out), 0);
	assert_int_equal(out.len, sizeof(want) - 1);
	assert_memory_equal(out.data, want, out.len);
	buf_fini(&out);
}

static void put_field(struct buf *out, const char *name, const void *value, uint32_t len)
{
	const uint8_t name_len = (uint8_t)strlen(name);

	buf_append(out, &name_len, 1);
	buf_append(out, name, name_len);
	buf_append_le32(out, len);
	buf_append(out, value, len);
}

static void what_older_versions_did_not_write_stays(void **state)
{
	struct sample got = full;
	struct buf out = {0};
	struct err err = {0};

	(void)state;
	buf_append(&out, "\6sample", 7);
	put_field(&out, "u16", "\1\2", 2);
	put_field(&out, "one", "\x0d\0\0\0\3tag\2id\2\0\0\0\7\0", 17); // its text is missing
	if (state_decode(&sample_state, out.data, out.len, &got, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(got.u16, 0x201);
	assert_int_equal(got.u8, full.u8);
	assert_int_equal(got.one.id, 7);
	assert_string_equal(got.one.text, "one");
	assert_int_equal(got.nr_tags, 2);
	buf_fini(&out);
}

static void expect_refusal(const struct buf *data, int code, const char *word)
{
	struct sample got = full;
	struct err err = {0};
	struct buf before = encode(&full), after;
	// Of exactly its size, so that ASan sees a step beyond it.
	uint8_t *exact = malloc(MAX(data->len, 1U));

	assert_non_null(exact);
	if (data->len)
		memcpy(exact, data->data, data->len);
	assert_int_equal(state_decode(&sample_state, exact, data->len, &got, &err), code);
	free(exact);
	if (!strstr(err.msg, word))
		fail_msg("'%s' does not say '%s'", err.msg, word);
	after = encode(&got);
	assert_int_equal(before.len, after.len);
	assert_memory_equal(before.data, after.data, before.len);
	buf_fini(&before);
	buf_fini(&after);
}

static void bad_data_is_refused_by_name_and_changes_nothing(void **state)
{
	static const char five_tags[] = "\x05\0\0\0\4tagx"
					"\4\0\0\0\3tag\4\0\0\0\3tag\4\0\0\0\3tag\4\0\0\0\3tag"
					"\4\0\0\0\3tag";
	const struct {
		const char *name;
		const char *value;
		uint32_t len;
		const char *word;
	} bad[] = {
		{"u9", "\0", 1, "sample.u9: not known"},
		{"opaque", "\0\0\0\0\0\0\0\0", 8, "sample.opaque: not known"},
		{"nr_tags", "\4\0\0\0", 4, "sample.nr_tags: not known"},
		{"\x1b[1m", "", 0, "sample.?[1m: not known"},
		{"u16", "\0", 1, "sample: u16: 1 bytes instead of 2"},
		{"u16", "\0\0\0", 3, "sample: u16: 3 bytes instead of 2"},
		{"u16", "", 0, "sample: u16: 0 bytes instead of 2"},
		{"bytes", "abcdef", 6, "sample: bytes: 6 bytes instead of 5"},
		{"u16s", "\0\0\0\0\0", 5, "sample: u16s: 5 bytes instead of 6"},
		{"flag", "\2", 1, "sample: flag: 2 is not a bool"},
		{"two", "\4\0\0\0\3tag", 8, "sample: two: 1 elements instead of 2"},
		{"two", "\4\0\0\0\3tag\0", 9, "sample: two: cut short"},
		{"one", "\4\0\0\0\3gat", 8, "sample: one 0: state of gat where tag is expected"},
		{"one", "\5\0\0\0\3tag", 8, "sample: one: cut short"},
		{"one", "\7\0\0\0\3tag\2id", 11, "sample: one 0: tag: cut short"},
		{"one", "\x0d\0\0\0\3tag\2id\1\0\0\0\0\0", 17, "tag: id: 1 bytes"},
		{"tags", five_tags + 9, 40, "sample: tags: more than 4 elements"},
		{"fixed_u32", "\6\0\0\0", 4, "sample: fixed_u32: not what this one was made with"},
		{"fixed_bytes", "abd\0\0\0\0", 8, "sample: fixed_bytes: not what"},
		{"u32", "\x0d\0\0\0", 4, "u32 is 13"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct buf out = {0};

		buf_append(&out, "\6sample", 7);
		put_field(&out, "u8", "\x77", 1);
		put_field(&out, bad[i].name, bad[i].value, bad[i].len);
		expect_refusal(
			&out, strcmp(bad[i].word, "u32 is 13") ? -EINVAL : -ERANGE, bad[i].word);
		buf_fini(&out);
	}
}

static void a_field_may_come_once(void **state)
{
	struct buf out = {0};

	(void)state;
	buf_append(&out, "\6sample", 7);
	put_field(&out, "u8", "\1", 1);
	put_field(&out, "u8", "\1", 1);
	expect_refusal(&out, -EINVAL, "sample.u8: twice");
	buf_fini(&out);
}

// Cut anywhere but between two fields it is refused; between two it is an older version's.
static void data_that_is_cut_short_is_refused(void **state)
{
	struct buf out = encode(&full);
	unsigned int whole = 0;

	(void)state;
	for (size_t len = 0; len < out.len; len++) {
		const struct buf cut = {.data = out.data, .len = len};
		struct sample got = full;
		struct err err = {0};

		if (state_decode(&sample_state, out.data, len, &got, &err) == 0)
			whole++;
		else
			expect_refusal(&cut, -EINVAL, "");
	}
	assert_int_equal(whole, 14); // as many as there are saved fields
	buf_fini(&out);
}

struct holed {
	uint32_t a;
	uint8_t b;
	uint8_t unused[3];
	uint64_t c;
};

STATE_TABLE(static, holed_good, struct holed, "holed", NULL, STATE_U32(struct holed, a),
	STATE_U8(struct holed, b), STATE_TRANSIENT(struct holed, unused, "padding"),
	STATE_U64(struct holed, c));
STATE_TABLE(static, holed_forgotten, struct holed, "holed", NULL, STATE_U32(struct holed, a),
	STATE_U64(struct holed, c));
STATE_TABLE(static, holed_twice, struct holed, "holed", NULL, STATE_U32(struct holed, a),
	STATE_U8(struct holed, b), STATE_U64(struct holed, c),
	STATE_TRANSIENT(struct holed, c, "a mistake"));
STATE_TABLE(static, holed_no_reason, struct holed, "holed", NULL, STATE_U32(struct holed, a),
	STATE_U8(struct holed, b), STATE_TRANSIENT(struct holed, c, ""));

struct outer {
	struct holed inner[2];
};

STATE_TABLE(static, outer_good, struct outer, "outer", NULL,
	STATE_NESTEDS(struct outer, inner, &holed_good));
STATE_TABLE(static, outer_bad, struct outer, "outer", NULL,
	STATE_NESTEDS(struct outer, inner, &holed_forgotten));
STATE_TABLE(static, outer_other, struct outer, "outer", NULL,
	STATE_NESTEDS(struct outer, inner, &sample_tag_state));

static void forgotten_and_doubled_bytes_are_found(void **state)
{
	static const struct {
		const struct state_table *table;
		const char *word; // NULL: it is good
	} cases[] = {
		{&holed_good, NULL},
		{&outer_good, NULL},
		{&sample_tag_state, NULL},
		{&sample_state, NULL},
		{&holed_twice, "byte 8 is another field's"},
		{&holed_no_reason, "why is it not saved"},
		{&outer_other, "another struct's table"},
		{&holed_forgotten, "byte 4 of 16, behind a, is neither"},
		{&outer_bad, "byte 4 of 16, behind a, is neither"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct err err = {0};
		int r = state_check(cases[i].table, &err);

		if (!cases[i].word && r < 0)
			fail_msg("%s", err.msg);
		if (cases[i].word && (r != -EINVAL || !strstr(err.msg, cases[i].word)))
			fail_msg("%d '%s' does not say '%s'", r, err.msg, cases[i].word);
	}
}

static void a_buffer_grows_and_remembers_that_it_could_not(void **state)
{
	struct buf out = {0};

	(void)state;
	for (uint32_t i = 0; i < 10000; i++)
		assert_int_equal(buf_append_le32(&out, i), 0);
	assert_int_equal(out.len, 40000);
	for (uint32_t i = 0; i < 10000; i++)
		assert_int_equal(get_le32(out.data + 4UL * i), i);
	assert_int_equal(buf_append(&out, NULL, 0), 0);
	assert_int_equal(buf_append(&out, out.data, SIZE_MAX / 2), -ENOMEM);
	assert_int_equal(buf_append_le32(&out, 1), -ENOMEM);
	assert_int_equal(buf_error(&out), -ENOMEM);
	assert_int_equal(state_encode(&sample_state, &full, &out), -ENOMEM);
	assert_int_equal(out.len, 40000);
	buf_fini(&out);
	assert_int_equal(buf_error(&out), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_encoded_is_decoded),
		cmocka_unit_test(the_encoding_is_as_documented),
		cmocka_unit_test(what_older_versions_did_not_write_stays),
		cmocka_unit_test(bad_data_is_refused_by_name_and_changes_nothing),
		cmocka_unit_test(a_field_may_come_once),
		cmocka_unit_test(data_that_is_cut_short_is_refused),
		cmocka_unit_test(forgotten_and_doubled_bytes_are_found),
		cmocka_unit_test(a_buffer_grows_and_remembers_that_it_could_not),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
