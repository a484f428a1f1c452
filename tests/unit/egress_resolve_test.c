// SPDX-License-Identifier: Apache-2.0
// egress/resolve: the host's own names, and what is an answer of a name server.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "egress/resolve.h"
#include "vmm/base/fd.h"

static void own_names(void **state)
{
	char path[] = "/tmp/mayfly-hosts-XXXXXX", text[ADDRESS_TEXT_BYTES];
	static const char lines[] = "127.0.0.1 localhost # b.example\n"
				    "10.0.0.1\ta.example  A.alias\r\n"
				    "#10.0.0.2 a.example\n"
				    "nonsense a.example\n"
				    "\n"
				    "fd00::1 a.example\n"
				    "10.0.0.3";
	struct address found[RESOLVE_ADDRESSES_MAX];
	CLEANUP_FD int fd = mkstemp(path);
	struct resolve_hosts hosts = {0};
	struct err err = {0};
	(void)state;

	assert_int_equal(fd_write_all(fd, lines, strlen(lines)), 0);
	assert_int_equal(resolve_hosts_read(path, &hosts, &err), 0);
	unlink(path);
	assert_int_equal(resolve_hosts_find(&hosts, "a.EXAMPLE", found), 2);
	address_text(&found[0], text);
	assert_string_equal(text, "10.0.0.1");
	address_text(&found[1], text);
	assert_string_equal(text, "fd00::1");
	assert_int_equal(resolve_hosts_find(&hosts, "a.alias", found), 1);
	assert_int_equal(resolve_hosts_find(&hosts, "b.example", found), 0);
	assert_int_equal(resolve_hosts_find(&hosts, "10.0.0.3", found), 0);
	resolve_hosts_fini(&hosts);
	assert_int_equal(resolve_hosts_read("/nonexistent", &hosts, &err), 0);
	assert_int_equal(resolve_hosts_find(&hosts, "a.example", found), 0);
	resolve_hosts_fini(&hosts);
}

// Of x.example: an alias, then y.example's two addresses.
static const uint8_t answer[] = "\x12\x34\x81\x80\0\1\0\3\0\0\0\0"
				"\1x\7example\0\0\1\0\1"
				"\xc0\x0c\0\5\0\1\0\0\0\x3c\0\4\1y\xc0\x0e"
				"\xc0\x27\0\1\0\1\0\0\0\x3c\0\4\x7f\0\0\1"
				"\xc0\x27\0\1\0\1\0\0\0\x3c\0\4\1\2\3\4";

static void answers(void **state)
{
	struct address found[RESOLVE_ADDRESSES_MAX];
	char text[ADDRESS_TEXT_BYTES];
	const size_t len = sizeof(answer) - 1;
	(void)state;

	assert_int_equal(resolve_answer(answer, len, AF_INET, found, 0), 2);
	address_text(&found[1], text);
	assert_string_equal(text, "1.2.3.4");
	assert_int_equal(resolve_answer(answer, len, AF_INET6, found, 2), 2);
	assert_int_equal(resolve_answer(answer, len, AF_INET, found, RESOLVE_ADDRESSES_MAX - 1),
		RESOLVE_ADDRESSES_MAX);
	// Cut anywhere: refused, and nothing is read behind it.
	for (size_t n = 0; n < len; n++) {
		uint8_t *cut = malloc(n + 1);

		assert_non_null(cut);
		memcpy(cut, answer, n);
		assert_int_equal(resolve_answer(cut, n, AF_INET, found, 0), -EBADMSG);
		free(cut);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(own_names),
		cmocka_unit_test(answers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
