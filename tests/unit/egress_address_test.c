// SPDX-License-Identifier: Apache-2.0
// egress/address: which addresses are the public Internet's; at the edges of every range.
#include "tests/support/test.h"

#include "egress/address.h"

static void public_ones(void **state)
{
	static const char *const good[] = {"1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255",
		"100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0",
		"172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0", "198.17.255.255",
		"198.20.0.0", "223.255.255.255", "168.63.129.15", "168.63.129.17",
		"2606:4700::1111", "2a00::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2001:200::1",
		"3ffe:ffff::1"};
	struct address address;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
		assert_true(address_parse(good[i], &address));
		if (address_not_public(&address))
			fail_msg("%s is %s", good[i], address_not_public(&address));
	}
}

static void others(void **state)
{
	static const char *const bad[] = {"0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255",
		"100.64.0.0", "100.100.100.200", "100.127.255.255", "127.0.0.1", "127.255.255.255",
		"169.254.0.0", "169.254.169.254", "168.63.129.16", "172.16.0.0", "172.31.255.255",
		"192.0.0.1", "192.0.2.1", "192.168.0.1", "198.18.0.1", "198.19.255.255",
		"198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1",
		"255.255.255.255", "::", "::1", "::2", "::127.0.0.1", "::ffff:127.0.0.1",
		"::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
		"64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1", "2001:1ff:ffff::1",
		"2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "fc00::1",
		"fd00:ec2::254", "fe80::1", "febf::1", "fec0::1", "ff02::1", "4000::1", "8000::1"};
	struct address address;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		assert_true(address_parse(bad[i], &address));
		if (!address_not_public(&address))
			fail_msg("%s is public", bad[i]);
	}
}

static void text(void **state)
{
	char out[ADDRESS_TEXT_BYTES];
	struct address address = {0};
	(void)state;

	assert_false(address_parse("127.1", &address));
	assert_false(address_parse("", &address));
	assert_true(address_parse("0:0::1", &address));
	address_text(&address, out);
	assert_string_equal(out, "::1");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(public_ones),
		cmocka_unit_test(others),
		cmocka_unit_test(text),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
