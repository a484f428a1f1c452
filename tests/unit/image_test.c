// SPDX-License-Identifier: Apache-2.0
// snapshot/image: what was written is read; whatever was cut, changed or made up is refused.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>

#include "snapshot/image.h"

static const struct snapshot_id id = {{1, 2, 3}}, parent = {{9, 8, 7}}, none;
static const struct image_section sections[] = {
	{"kvm", "clock", 5}, {"vcpu.0", "registers", 9}, {"memory", "", 0}};

static void make(struct buf *out)
{
	struct err err = {0};

	assert_int_equal(image_write(out, &id, &parent, sections, ARRAY_SIZE(sections), &err), 0);
}

static void what_was_written_is_read(void **state)
{
	CLEANUP_BUF struct buf file = {0};
	struct image image;
	struct err err = {0};
	const void *data;
	size_t len;
	(void)state;

	make(&file);
	assert_int_equal(image_parse(&image, file.data, file.len, &err), 0);
	assert_true(snapshot_id_equal(&image.id, &id));
	assert_true(snapshot_id_equal(&image.parent, &parent));
	assert_int_equal(image.nr, 3);
	for (size_t i = 0; i < ARRAY_SIZE(sections); i++) {
		assert_int_equal(image_section(&image, sections[i].name, &data, &len, &err), 0);
		assert_int_equal(len, sections[i].len);
		assert_memory_equal(data, sections[i].data, len);
	}
	assert_int_equal(image_section(&image, "vcpu.1", &data, &len, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "vcpu.1"));
}

static void cut_at_any_byte_it_is_refused(void **state)
{
	CLEANUP_BUF struct buf file = {0};
	(void)state;

	make(&file);
	for (size_t len = 0; len < file.len; len++) {
		struct image image;
		struct err err = {0};
		// A copy, so that a reader beyond the end is seen by a sanitizer.
		CLEANUP_FREE uint8_t *copy = malloc(len ? len : 1);

		assert_non_null(copy);
		memcpy(copy, file.data, len);
		assert_int_equal(image_parse(&image, copy, len, &err), -EBADMSG);
	}
}

static void changed_at_any_bit_it_is_refused(void **state)
{
	CLEANUP_BUF struct buf file = {0};
	(void)state;

	make(&file);
	for (size_t bit = 0; bit < file.len * 8; bit++) {
		struct image image;
		struct err err = {0};
		int r;

		file.data[bit / 8] ^= (uint8_t)(1U << bit % 8);
		r = image_parse(&image, file.data, file.len, &err);
		if (r != -EBADMSG && r != -ENOTSUP)
			fail_msg("bit %zu: %d", bit, r);
		file.data[bit / 8] ^= (uint8_t)(1U << bit % 8);
	}
}

static void another_format_is_named(void **state)
{
	CLEANUP_BUF struct buf file = {0};
	struct image image;
	struct err err = {0};
	(void)state;

	make(&file);
	file.data[8] = 7;
	assert_int_equal(image_parse(&image, file.data, file.len, &err), -ENOTSUP);
	assert_non_null(strstr(err.msg, "format 7"));
}

static void an_id_is_needed_and_not_its_own_parent(void **state)
{
	const struct snapshot_id *bad[][2] = {{&none, &none}, {&none, &parent}, {&id, &id}};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		CLEANUP_BUF struct buf file = {0};
		struct image image;
		struct err err = {0};

		assert_int_equal(image_write(&file, bad[i][0], bad[i][1], sections, 1, &err), 0);
		assert_int_equal(image_parse(&image, file.data, file.len, &err), -EBADMSG);
	}
}

static void ids_are_text_and_back(void **state)
{
	static const char *const bad[] = {"", "0123", "0123456789abcdef0123456789abcdeg",
		"0123456789ABCDEF0123456789abcdef", "0123456789abcdef0123456789abcdef0"};
	struct snapshot_id back;
	char text[SNAPSHOT_ID_TEXT_LEN + 1];
	(void)state;

	snapshot_id_text(&parent, text);
	assert_string_equal(text, "09080700000000000000000000000000");
	assert_int_equal(snapshot_id_parse(text, &back), 0);
	assert_true(snapshot_id_equal(&back, &parent));
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(snapshot_id_parse(bad[i], &back), -EINVAL);
	assert_true(snapshot_id_none(&none));
	assert_false(snapshot_id_none(&id));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_was_written_is_read),
		cmocka_unit_test(cut_at_any_byte_it_is_refused),
		cmocka_unit_test(changed_at_any_bit_it_is_refused),
		cmocka_unit_test(another_format_is_named),
		cmocka_unit_test(an_id_is_needed_and_not_its_own_parent),
		cmocka_unit_test(ids_are_text_and_back),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
