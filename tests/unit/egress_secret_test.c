// SPDX-License-Identifier: Apache-2.0
// egress/secret: which credentials there may be, that they are kept as they are, and that none
// comes back, however the answer is cut.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "egress/secret.h"

static void set_and_kept(void **state)
{
	struct secrets secrets = {.nr = 2}, again;
	CLEANUP_FREE char *text = NULL;
	struct err err = {0};
	unsigned int next = 0;
	(void)state;

	assert_int_equal(secret_set(&secrets.all[0], "one", "API.example", "Authorization",
				 "Bearer sk-12345678 \"x\\", &err),
		0);
	assert_int_equal(
		secret_set(&secrets.all[1], "two", "b.example", "x-api-key", "12345678", &err), 0);
	text = secrets_print(&secrets);
	assert_non_null(text);
	assert_int_equal(secrets_parse(text, strlen(text), &again, &err), 0);
	assert_int_equal(again.nr, 2);
	assert_string_equal(again.all[0].value, secrets.all[0].value);
	assert_string_equal(again.all[0].host.name, "api.example");
	assert_ptr_equal(secrets_of(&again, &secrets.all[1].host, 0, &next), &again.all[1]);
	assert_int_equal(next, 2);
	assert_null(secrets_of(&again, &secrets.all[1].host, next, &next));
	assert_int_equal(secrets_parse("", 0, &again, &err), 0);
	assert_int_equal(again.nr, 0);
	assert_int_equal(secrets_parse("{}", 2, &again, &err), -EBADMSG);
	assert_int_equal(secrets_parse("[{}]", 4, &again, &err), -EINVAL);
}

static void refused(void **state)
{
	static const char *const bad[][4] = {
		{"", "a.example", "X", "12345678"},
		{"a b", "a.example", "X", "12345678"},
		{"n", "1.2.3.4", "X", "12345678"},
		{"n", "*.example", "X", "12345678"},
		{"n", "a.example", "", "12345678"},
		{"n", "a.example", "X:", "12345678"},
		{"n", "a.example", "X\r\nY", "12345678"},
		{"n", "a.example", "Host", "12345678"},
		{"n", "a.example", "content-length", "12345678"},
		{"n", "a.example", "Transfer-Encoding", "12345678"},
		{"n", "a.example", "X", "short"},
		{"n", "a.example", "X", "with\r\nanother: line"},
		{"n", "a.example", "X", "12345678\x80"},
		{"n", "a.example", "X", " 12345678"},
	};
	struct secret s;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = {0};

		assert_int_equal(
			secret_set(&s, bad[i][0], bad[i][1], bad[i][2], bad[i][3], &err), -EINVAL);
		if (strlen(bad[i][3]) > 5)
			assert_null(strstr(err.msg, bad[i][3]));
	}
}

static void check_redacted(const char *text, const char *wanted)
{
	struct secrets secrets = {.nr = 2};
	struct err err = {0};

	assert_int_equal(secret_set(&secrets.all[0], "one", "a.example", "Authorization",
				 "Bearer abcabcabd", &err),
		0);
	assert_int_equal(
		secret_set(&secrets.all[1], "two", "b.example", "X", "othersecret", &err), 0);
	// In one piece, and in pieces of every size.
	for (size_t piece = 1; piece <= strlen(text); piece++) {
		CLEANUP_BUF struct buf out = {0};
		struct redactor r;

		assert_int_equal(redactor_init(&r, &secrets, &secrets.all[0].host), 0);
		for (size_t off = 0; off < strlen(text); off += piece)
			assert_int_equal(
				redactor_feed(&r, text + off, MIN(piece, strlen(text) - off), &out),
				0);
		assert_int_equal(redactor_end(&r, &out), 0);
		redactor_fini(&r);
		buf_append(&out, "", 1);
		assert_string_equal((char *)out.data, wanted);
	}
}

static void nothing_comes_back(void **state)
{
	(void)state;
	check_redacted("nothing of it", "nothing of it");
	check_redacted("you sent Bearer abcabcabd, thanks", "you sent ****************, thanks");
	check_redacted("token=abcabcabd", "token=*********");
	check_redacted("abcabcabcabd", "abc*********"); // begins again within itself
	check_redacted("abcabcabdabcabcabd", "******************");
	check_redacted("abcabcab", "abcabcab");
	check_redacted("othersecret", "othersecret"); // another host's
	// base64 of "Bearer abcabcabd", but for what depends on what follows, and of "abcabcabd".
	check_redacted("QmVhcmVyIGFiY2FiY2FiZA==", "********************ZA==");
	check_redacted("<YWJjYWJjYWJk>", "<************>");
}

// What comes is passed on at once, unless it may be the beginning of one.
static void nothing_waits(void **state)
{
	struct secrets secrets = {.nr = 1};
	CLEANUP_BUF struct buf out = {0};
	struct redactor r;
	(void)state;

	assert_int_equal(secret_set(&secrets.all[0], "n", "a.example", "X", "12345678", NULL), 0);
	assert_int_equal(redactor_init(&r, &secrets, &secrets.all[0].host), 0);
	assert_int_equal(redactor_feed(&r, "data: x\n\n", 9, &out), 0);
	assert_int_equal(out.len, 9);
	assert_int_equal(redactor_feed(&r, "a123", 4, &out), 0);
	assert_int_equal(out.len, 10);
	assert_int_equal(redactor_feed(&r, "x", 1, &out), 0);
	assert_int_equal(out.len, 14);
	redactor_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(set_and_kept),
		cmocka_unit_test(refused),
		cmocka_unit_test(nothing_comes_back),
		cmocka_unit_test(nothing_waits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
