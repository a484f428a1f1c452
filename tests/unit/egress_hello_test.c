// SPDX-License-Identifier: Apache-2.0
// egress/hello: the name in a ClientHello, wherever it stands and however it is cut.
#include "tests/support/test.h"

#include "egress/hello.h"
#include "tests/support/hello_make.h"

static uint8_t bytes[65536];
static char name[HELLO_NAME_BYTES];

static void plain(void **state)
{
	size_t len = hello_make(bytes, "a.example", 0, 16384);
	(void)state;

	for (size_t n = 0; n < len; n++)
		assert_int_equal(hello_read(bytes, n, name), HELLO_MORE);
	assert_int_equal(hello_read(bytes, len, name), HELLO_NAME);
	assert_string_equal(name, "a.example");
	// What follows it is not ours to read.
	memcpy(bytes + len, "\x17\x03\x03\xff\xff", 5);
	assert_int_equal(hello_read(bytes, len + 5, name), HELLO_NAME);
	len = hello_make(bytes, NULL, 0, 16384);
	assert_int_equal(hello_read(bytes, len, name), HELLO_NAMELESS);
}

static void name_far_behind(void **state)
{
	size_t len = hello_make(bytes, "late.example", 3000, 16384);
	(void)state;

	assert_int_equal(hello_read(bytes, 2000, name), HELLO_MORE);
	assert_int_equal(hello_read(bytes, len, name), HELLO_NAME);
	assert_string_equal(name, "late.example");
}

static void cut_into_records(void **state)
{
	(void)state;
	for (size_t n = 1; n < 200; n += 7) {
		size_t len = hello_make(bytes, "cut.example", 900, n);

		assert_int_equal(hello_read(bytes, len, name), HELLO_NAME);
		assert_string_equal(name, "cut.example");
	}
}

static void bounded(void **state)
{
	size_t len = hello_make(bytes, "a.example", 16400, 16384);
	(void)state;

	assert_int_equal(hello_read(bytes, 100, name), HELLO_BAD);
	assert_int_equal(hello_read(bytes, MIN(len, (size_t)HELLO_MAX_BYTES), name), HELLO_BAD);
	// Five bytes of header for each of the message.
	len = hello_make(bytes, "a.example", 6000, 1);
	assert_true(len > HELLO_MAX_BYTES);
	assert_int_equal(hello_read(bytes, HELLO_MAX_BYTES - 1, name), HELLO_MORE);
	assert_int_equal(hello_read(bytes, HELLO_MAX_BYTES, name), HELLO_BAD);
}

static void refused(void **state)
{
	size_t len = hello_make(bytes, "a.example", 0, 16384);
	const size_t at_name = len - strlen("a.example"), at_list = at_name - 5;
	uint8_t good[512];
	(void)state;

	memcpy(good, bytes, len);
	assert_int_equal(hello_read((const uint8_t *)"GET / HTTP/1.1", 14, name), HELLO_BAD);
	assert_int_equal(hello_read((const uint8_t *)"\x16\x02", 2, name), HELLO_BAD);
	assert_int_equal(hello_read((const uint8_t *)"\x16\x03\x01\x00\x00", 5, name), HELLO_BAD);
	assert_int_equal(
		hello_read((const uint8_t *)"\x16\x03\x01\x00\x04\x02", 6, name), HELLO_BAD);
	bytes[at_name] = '\0';
	assert_int_equal(hello_read(bytes, len, name), HELLO_BAD);
	memcpy(bytes, good, len);
	bytes[at_list + 2] = 1; // another kind of name
	assert_int_equal(hello_read(bytes, len, name), HELLO_BAD);
	memcpy(bytes, good, len);
	bytes[at_name - 1]--; // the list has more than a name
	assert_int_equal(hello_read(bytes, len, name), HELLO_BAD);
	// Every length wrong, one after another: never another name.
	for (size_t i = 0; i < len; i++) {
		memcpy(bytes, good, len);
		bytes[i] ^= 0x11;
		name[0] = '\0';
		if (hello_read(bytes, len, name) == HELLO_NAME && i < at_name)
			assert_string_equal(name, "a.example");
	}
}

static void two_names(void **state)
{
	size_t len = hello_make(bytes, "a.example", 0, 16384);
	const size_t ext = 9 + strlen("a.example"), ext_at = len - ext;
	(void)state;

	memcpy(bytes + len, bytes + ext_at, ext);
	bytes[ext_at - 1] = (uint8_t)(2 * ext);
	bytes[4] = (uint8_t)(bytes[4] + ext);
	bytes[8] = (uint8_t)(bytes[8] + ext);
	assert_int_equal(hello_read(bytes, len + ext, name), HELLO_BAD);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plain),
		cmocka_unit_test(name_far_behind),
		cmocka_unit_test(cut_into_records),
		cmocka_unit_test(bounded),
		cmocka_unit_test(refused),
		cmocka_unit_test(two_names),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
