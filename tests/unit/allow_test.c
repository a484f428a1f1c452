// SPDX-License-Identifier: Apache-2.0
// vmm/allow: which rules there are, whom they admit, and that narrowing never widens.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "vmm/allow.h"

static bool admits_method(const char *list, const char *host, uint16_t port, const char *method)
{
	struct allow_list rules;
	struct allow_host parsed;
	struct err err = {0};

	assert_int_equal(allow_parse(list, &rules, &err), 0);
	assert_int_equal(allow_host_parse(host, strlen(host), &parsed, &err), 0);
	return allow_admits(&rules, &parsed, port, method);
}

static bool admits(const char *list, const char *host, uint16_t port)
{
	return admits_method(list, host, port, NULL);
}

static void methods(void **state)
{
	static const char list[] = "GET@a.example HEAD@a.example POST@*.b.example:8080 c.example";
	(void)state;

	assert_true(admits_method(list, "a.example", 80, "GET"));
	assert_true(admits_method(list, "a.example", 443, "HEAD"));
	assert_false(admits_method(list, "a.example", 80, "POST"));
	assert_false(admits_method(list, "a.example", 80, "get"));
	// What has no method that is seen: a tunnel.
	assert_false(admits(list, "a.example", 443));
	assert_true(admits_method(list, "x.b.example", 8080, "POST"));
	assert_false(admits_method(list, "x.b.example", 80, "POST"));
	assert_true(admits_method(list, "c.example", 80, "DELETE"));
	assert_true(admits(list, "c.example", 443));
}

static void names_suffixes_and_ports(void **state)
{
	(void)state;
	assert_true(admits("pypi.org", "pypi.org", 443));
	assert_true(admits("pypi.org", "PyPI.org", 80));
	assert_false(admits("pypi.org", "pypi.org", 22));
	assert_false(admits("pypi.org", "a.pypi.org", 443));
	assert_false(admits("pypi.org", "pypi.org.evil.example", 443));
	assert_false(admits("pypi.org", "xpypi.org", 443));
	assert_true(admits("*.debian.org:80", "deb.debian.org", 80));
	assert_true(admits(".debian.org:80", "a.b.debian.org", 80));
	assert_false(admits("*.debian.org:80", "deb.debian.org", 443));
	assert_false(admits("*.debian.org", "debian.org", 80));
	assert_false(admits("*.debian.org", "xdebian.org", 80));
	assert_true(admits("a.example, b.example:8080", "b.example", 8080));
	assert_false(admits("a.example, b.example:8080", "b.example", 80));
	assert_false(admits("", "b.example", 80));
}

static void addresses_are_themselves(void **state)
{
	(void)state;
	assert_true(admits("127.0.0.1:8080", "127.0.0.1", 8080));
	assert_false(admits("127.0.0.1:8080", "127.0.0.2", 8080));
	assert_true(admits("[::1]:8080", "[0:0:0:0:0:0:0:1]", 8080));
	assert_false(admits("*.0.0.example", "1.0.0.1", 443));
}

static void refused(void **state)
{
	static const char *const bad[] = {"*", "*.", ".", "a..b", ".a.", "a.", "a b:x", "a:0",
		"a:65536", "a:", "a:1x", ":80", "127.1", "0x7f.0.0.1", "2130706433", "1.2.3.4.5",
		"[::1", "::1", "[1.2.3.4]", "[fe80::1%eth0]", "*.1.2.3.4", "*.[::1]", "a/b", "a@b",
		"@a.example", "CONNECT@a.example", "LONGMETHOD@a.example", "GET@",
		"GET@GET@a.example", "\xc3\xa4.example", "a*b.example", "*.*.example",
		"a.example.0"};
	char text[ALLOW_TEXT_BYTES * 2] = "";
	struct allow_list list;
	struct allow_rule rule;
	struct err err = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		if (allow_rule_parse(bad[i], strlen(bad[i]), &rule, &err) == 0)
			fail_msg("'%s' is a rule", bad[i]);
	memset(text, 'a', 64);
	assert_int_equal(allow_rule_parse(text, 63, &rule, &err), 0);
	assert_int_equal(allow_rule_parse(text, 64, &rule, &err), -EINVAL);
	text[0] = '\0';
	for (int i = 0; i <= ALLOW_RULES_MAX; i++)
		sprintf(text + strlen(text), "h%d.example ", i);
	assert_int_equal(allow_parse(text, &list, &err), -E2BIG);
	assert_int_equal(allow_parse("good.example bad..example", &list, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "bad..example"));
}

static void printed_as_read(void **state)
{
	static const char text[] =
		"a.example *.b.example:8080 10.0.0.1:22 [2001:db8::1]:443 GET@*.c.example:80";
	char again[ALLOW_TEXT_BYTES];
	struct allow_list list;
	struct err err = {0};
	(void)state;

	assert_int_equal(allow_parse(text, &list, &err), 0);
	assert_int_equal(allow_print(&list, again, sizeof(again), &err), 0);
	assert_string_equal(text, again);
	assert_int_equal(allow_print(&list, again, 20, &err), -E2BIG);
}

static void check_narrow(const char *list, const char *other, const char *wanted)
{
	struct allow_list a, b;
	struct err err = {0};
	char text[ALLOW_TEXT_BYTES];

	assert_int_equal(allow_parse(list, &a, &err), 0);
	assert_int_equal(allow_parse(other, &b, &err), 0);
	allow_narrow(&a, &b);
	assert_int_equal(allow_print(&a, text, sizeof(text), &err), 0);
	assert_string_equal(text, wanted);
}

static void narrowed(void **state)
{
	(void)state;
	check_narrow("a.example b.example", "b.example c.example", "b.example");
	check_narrow("a.example:443 a.example:22", "a.example", "a.example:443");
	check_narrow("a.example", "a.example:443", "");
	check_narrow("x.b.example *.b.example", "*.b.example", "x.b.example *.b.example");
	check_narrow("*.b.example", "x.b.example", "");
	check_narrow("*.x.b.example", "*.b.example", "*.x.b.example");
	check_narrow("a.example", "", "");
	check_narrow("", "a.example", "");
	check_narrow("GET@a.example", "a.example", "GET@a.example");
	check_narrow("a.example", "GET@a.example", "");
	check_narrow("GET@a.example POST@a.example", "GET@a.example", "GET@a.example");
}

static void added_and_removed(void **state)
{
	struct allow_list list = {0};
	struct allow_rule rule, any;
	struct err err = {0};
	(void)state;

	assert_int_equal(allow_rule_parse("a.example:80", 12, &rule, &err), 0);
	assert_int_equal(allow_add(&list, &rule, &err), 0);
	assert_int_equal(allow_add(&list, &rule, &err), 0);
	assert_int_equal(list.nr, 1);
	rule.port = 81;
	assert_int_equal(allow_add(&list, &rule, &err), 0);
	assert_int_equal(list.nr, 2);
	rule.port = 82;
	assert_int_equal(allow_remove(&list, &rule), 0);
	assert_int_equal(allow_rule_parse("A.example", 9, &any, &err), 0);
	assert_int_equal(allow_remove(&list, &any), 2);
	assert_int_equal(list.nr, 0);
	// Each method is a rule, and a rule without one stands for all when it goes.
	assert_int_equal(allow_parse("GET@a.example POST@a.example a.example", &list, &err), 0);
	assert_int_equal(list.nr, 3);
	assert_int_equal(allow_rule_parse("GET@a.example", 13, &rule, &err), 0);
	assert_int_equal(allow_remove(&list, &rule), 1);
	assert_int_equal(allow_remove(&list, &any), 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(methods),
		cmocka_unit_test(names_suffixes_and_ports),
		cmocka_unit_test(addresses_are_themselves),
		cmocka_unit_test(refused),
		cmocka_unit_test(printed_as_read),
		cmocka_unit_test(narrowed),
		cmocka_unit_test(added_and_removed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
