// SPDX-License-Identifier: Apache-2.0
// Unit tests of the rules of a network card.
#include "egress/nat_rules.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "egress/address.h"
#include "tests/support/test.h"

static char text[NAT_RULES_BYTES];

static void print(const struct nat_rules *rules)
{
	struct err err = {0};

	assert_int_equal(nat_rules_print(rules, text, &err), 0);
}

static size_t count(const char *what)
{
	size_t n = 0;

	for (const char *at = text; (at = strstr(at, what)); at++)
		n++;
	return n;
}

static void closed(void **state)
{
	struct allow_list named;
	struct nat_rules rules = {.named = &named};
	(void)state;

	assert_int_equal(allow_parse("10.0.0.1:22", &named, NULL), 0);
	print(&rules);
	// The loopback of its own namespace, and nothing else goes out, and of TCP
	// what comes in is answered with nothing but an end.
	assert_int_equal(count("accept"), 3);
	assert_int_equal(count("lo accept"), 2);
	assert_int_equal(count("policy drop"), 2);
	assert_int_equal(count("goto no\n}"), 2);
}

static void opened(void **state)
{
	struct allow_list named;
	struct nat_rules rules = {.open = true, .named = &named, .nr_hosts = 1};
	const char *host, *ranges;
	(void)state;

	assert_int_equal(
		allow_parse("10.0.0.1:22 [fd00::1]:22 example.com 10.0.0.2", &named, NULL), 0);
	inet_pton(AF_INET, "10.0.2.3", &rules.dns);
	inet_pton(AF_INET, "8.8.4.4", &rules.hosts[0]);
	print(&rules);
	assert_non_null(
		strstr(text, "ip daddr 10.0.0.1 meta l4proto { tcp, udp } th dport 22 accept"));
	assert_non_null(
		strstr(text, "ip saddr 10.0.0.1 meta l4proto { tcp, udp } th sport 22 accept"));
	assert_non_null(strstr(
		text, "ip daddr 10.0.0.2 meta l4proto { tcp, udp } th dport { 80, 443 } accept"));
	assert_non_null(
		strstr(text, "ip daddr 10.0.2.3 meta l4proto { tcp, udp } th dport 53 accept"));
	assert_null(strstr(text, "fd00"));
	assert_null(strstr(text, "example"));
	// What is refused stands before what is let through.
	host = strstr(text, "ip daddr 8.8.4.4 goto no");
	ranges = strstr(text, "169.254.0.0/16");
	assert_non_null(host);
	assert_non_null(ranges);
	assert_true(host < strstr(text, "meta nfproto ipv4 accept"));
	assert_true(ranges < strstr(text, "meta nfproto ipv4 accept"));
}

// The ranges are those that the proxy refuses, to their first and last address.
static void ranges(void **state)
{
	char list[1024], *rest = list, *one;
	size_t n = 0;
	(void)state;

	address_v4_ranges(list, sizeof(list));
	while ((one = strsep(&rest, ","))) {
		struct address address;
		char *slash = strchr(one, '/');
		uint32_t first, size;

		assert_non_null(slash);
		*slash = '\0';
		size = (uint32_t)(1ULL << (32 - strtoul(slash + 1, NULL, 10)));
		assert_true(address_parse(one + strspn(one, " "), &address));
		first = ntohl(address.v4.s_addr);
		assert_non_null(address_not_public(&address));
		address.v4.s_addr = htonl(first + size - 1);
		assert_non_null(address_not_public(&address));
		n++;
	}
	assert_true(n > 10);
}

static void too_many(void **state)
{
	static struct allow_list named;
	struct nat_rules rules = {.open = true, .named = &named, .nr_hosts = NAT_HOSTS_MAX};
	(void)state;

	// As many as there can be have room.
	for (unsigned int i = 0; i < ALLOW_RULES_MAX; i++) {
		struct allow_rule rule = {.host.literal = true, .port = 65535};

		snprintf(rule.host.name, sizeof(rule.host.name), "255.255.255.%u", 100 + i);
		assert_int_equal(allow_add(&named, &rule, NULL), 0);
	}
	memset(rules.hosts, 0xff, sizeof(rules.hosts));
	print(&rules);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(closed),
		cmocka_unit_test(opened),
		cmocka_unit_test(ranges),
		cmocka_unit_test(too_many),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
