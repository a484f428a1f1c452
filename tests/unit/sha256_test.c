// SPDX-License-Identifier: Apache-2.0
// cli/sha256: the examples of the standard, and that the pieces do not matter.
#include "tests/support/test.h"

#include <stdlib.h>

#include "cli/sha256.h"
#include "vmm/base/util.h"

static const char *sum(const char *data, size_t len, size_t piece)
{
	static char text[SHA256_TEXT_LEN + 1];
	struct sha256 sha;

	sha256_init(&sha);
	for (size_t at = 0; at < len; at += piece)
		sha256_add(&sha, data + at, MIN(piece, len - at));
	sha256_text(&sha, text);
	return text;
}

static void examples(void **state)
{
	const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
	char *million = malloc(1000000);
	(void)state;

	assert_string_equal(
		sum("", 0, 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
	assert_string_equal(sum("abc", 3, 3),
		"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
	assert_string_equal(sum(two, strlen(two), 64),
		"248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
	assert_non_null(million);
	memset(million, 'a', 1000000);
	assert_string_equal(sum(million, 1000000, 65536),
		"cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
	free(million);
}

static void pieces(void **state)
{
	char data[200], whole[SHA256_TEXT_LEN + 1];
	(void)state;

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (char)(i * 7);
	// Every length around the ends of blocks, where the padding takes another one.
	for (size_t len = 0; len <= sizeof(data); len++) {
		strcpy(whole, sum(data, len, sizeof(data)));
		for (size_t piece = 1; piece < 130; piece += 9)
			assert_string_equal(sum(data, len, piece), whole);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(examples),
		cmocka_unit_test(pieces),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
