// SPDX-License-Identifier: Apache-2.0
// vmm/cmdline: exact bounds, no control characters, the user's words last.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "vmm/cmdline.h"

static void words_are_joined_in_order(void **state)
{
	struct cmdline cmdline = {0};
	struct err err = {0};
	(void)state;

	assert_int_equal(cmdline_add(&cmdline, &err, "%s", ""), 0);
	assert_string_equal(cmdline.text, "");
	assert_int_equal(cmdline_add(&cmdline, &err, "console=ttyS%d", 0), 0);
	assert_int_equal(cmdline_add(&cmdline, &err, "%s", ""), 0);
	assert_int_equal(cmdline_add(&cmdline, &err, "panic=-1 quiet"), 0);
	assert_int_equal(cmdline_add_virtio_mmio(&cmdline, GPA(0xd0000000), 4 * KIB, 5, &err), 0);
	assert_int_equal(cmdline_add_user(&cmdline, "quiet=0 -- \xc3\xa9", 13, &err), 0);
	assert_string_equal(cmdline.text,
		"console=ttyS0 panic=-1 quiet virtio_mmio.device=4K@0xd0000000:5 "
		"quiet=0 -- \xc3\xa9");
	assert_int_equal(cmdline.len_bytes, strlen(cmdline.text));
	assert_true(cmdline.closed);
}

static void the_bound_is_exact(void **state)
{
	static char text[CMDLINE_MAX_BYTES + 1];
	struct cmdline cmdline = {0};
	struct err err = {0};
	(void)state;

	memset(text, 'x', CMDLINE_MAX_BYTES);
	assert_int_equal(cmdline_add_user(&cmdline, text, CMDLINE_MAX_BYTES, &err), -E2BIG);
	assert_int_equal(cmdline_add(&cmdline, &err, "%s", text), -E2BIG);
	assert_int_equal(cmdline.len_bytes, 0);
	// All but two bytes and the NUL: a space and one more fit, two do not.
	text[CMDLINE_MAX_BYTES - 3] = '\0';
	assert_int_equal(cmdline_add(&cmdline, &err, "%s", text), 0);
	assert_int_equal(cmdline_add(&cmdline, &err, "ab"), -E2BIG);
	assert_non_null(strstr(err.msg, "2047"));
	assert_string_equal(cmdline.text, text);
	assert_int_equal(cmdline_add(&cmdline, &err, "a"), 0);
	assert_int_equal(strlen(cmdline.text), CMDLINE_MAX_BYTES - 1);
	assert_int_equal(cmdline_add_user(&cmdline, "b", 1, &err), -E2BIG);
	assert_int_equal(cmdline_add_user(&cmdline, "b", SIZE_MAX, &err), -E2BIG);
	assert_false(cmdline.closed);
	assert_int_equal(cmdline_add_user(&cmdline, "", 0, &err), 0);
	assert_true(cmdline.closed);
}

static void control_characters_are_refused(void **state)
{
	struct cmdline cmdline = {0};
	struct err err = {0};
	(void)state;

	assert_int_equal(cmdline_add(&cmdline, &err, "quiet"), 0);
	for (unsigned int c = 0; c < 256; c++) {
		char text[3] = {'a', (char)c, 'b'};
		struct cmdline copy = cmdline;
		int r = cmdline_add_user(&copy, text, sizeof(text), &err);

		if (c < 0x20 || c == 0x7f) {
			assert_int_equal(r, -EINVAL);
			assert_non_null(strstr(err.msg, "control character"));
			assert_memory_equal(&copy, &cmdline, sizeof(copy));
		} else {
			assert_int_equal(r, 0);
			assert_int_equal(copy.len_bytes, cmdline.len_bytes + 4);
		}
	}
	assert_int_equal(cmdline_add(&cmdline, &err, "root=/dev/%s", "vda\ninit=/x"), -EINVAL);
	assert_string_equal(cmdline.text, "quiet");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(words_are_joined_in_order),
		cmocka_unit_test(the_bound_is_exact),
		cmocka_unit_test(control_characters_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
