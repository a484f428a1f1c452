// SPDX-License-Identifier: Apache-2.0
// Kinds of addresses, from IANA's registries of special-purpose ones; see the header. Pure.
#include "egress/address.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

struct range {
	uint8_t prefix[16];
	unsigned int bits;
	const char *what;
};

static const struct range v4_ranges[] = {
	{{0}, 8, "no address of a host"},
	{{10}, 8, "private"},
	{{100, 64}, 10, "shared by a provider's customers"},
	{{127}, 8, "loopback"},
	{{169, 254}, 16, "link-local, where metadata services are"},
	{{168, 63, 129, 16}, 32, "a metadata service"},
	{{172, 16}, 12, "private"},
	{{192, 0, 0}, 24, "reserved"},
	{{192, 0, 2}, 24, "documentation"},
	{{192, 88, 99}, 24, "reserved"},
	{{192, 168}, 16, "private"},
	{{198, 18}, 15, "for benchmarks"},
	{{198, 51, 100}, 24, "documentation"},
	{{203, 0, 113}, 24, "documentation"},
	{{224}, 4, "multicast"},
	{{240}, 4, "reserved"},
};

// Within 2000::/3: all else is refused anyway.
static const struct range v6_ranges[] = {
	{{0x20, 0x01, 0x00}, 23, "a protocol's own"}, // Teredo and others
	{{0x20, 0x01, 0x0d, 0xb8}, 32, "documentation"},
	{{0x20, 0x02}, 16, "an IPv4 address in IPv6 (6to4)"},
	{{0x3f, 0xff, 0x00}, 20, "documentation"},
};

static const struct range v6_others[] = {
	{{0}, 80, "an IPv4 address in IPv6"}, // and ::, ::1
	{{0xfc}, 7, "private"},
	{{0xfe, 0x80}, 10, "link-local, where metadata services are"},
	{{0xff}, 8, "multicast"},
};

static bool within(const uint8_t *bytes, const struct range *range)
{
	const unsigned int whole = range->bits / 8, rest = range->bits % 8;
	const uint8_t mask = (uint8_t)(0xff00U >> rest);

	return !memcmp(bytes, range->prefix, whole) &&
	       (!rest || ((bytes[whole] ^ range->prefix[whole]) & mask) == 0);
}

static const char *find(const uint8_t *bytes, const struct range *ranges, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		if (within(bytes, &ranges[i]))
			return ranges[i].what;
	return NULL;
}

static const char *v4_not_public(const uint8_t bytes[4])
{
	return find(bytes, v4_ranges, ARRAY_SIZE(v4_ranges));
}

static const char *v6_not_public(const uint8_t bytes[16])
{
	static const struct range mapped = {{[10] = 0xff, [11] = 0xff}, 96, ""};
	static const struct range nat64 = {{0x00, 0x64, 0xff, 0x9b}, 96, ""};
	static const uint8_t loopback[16] = {[15] = 1};
	const char *what;

	// The host's network would turn it into that IPv4 address.
	if (within(bytes, &mapped) || within(bytes, &nat64))
		return v4_not_public(bytes + 12);
	if (!memcmp(bytes, loopback, sizeof(loopback)))
		return "loopback";
	if ((bytes[0] & 0xe0) == 0x20)
		return find(bytes, v6_ranges, ARRAY_SIZE(v6_ranges));
	what = find(bytes, v6_others, ARRAY_SIZE(v6_others));
	return what ? what : "reserved";
}

const char *address_not_public(const struct address *address)
{
	if (address->family == AF_INET)
		return v4_not_public((const uint8_t *)&address->v4);
	return v6_not_public(address->v6.s6_addr);
}

void address_text(const struct address *address, char ret[ADDRESS_TEXT_BYTES])
{
	if (!inet_ntop(address->family, &address->v6, ret, ADDRESS_TEXT_BYTES))
		ret[0] = '\0';
}

bool address_parse(const char *text, struct address *ret)
{
	struct address address = {.family = strchr(text, ':') ? AF_INET6 : AF_INET};

	if (inet_pton(address.family, text, &address.v6) != 1)
		return false;
	*ret = address;
	return true;
}

void address_v4_ranges(char *ret, size_t size)
{
	size_t len = 0;

	for (size_t i = 0; i < ARRAY_SIZE(v4_ranges); i++) {
		const uint8_t *at = v4_ranges[i].prefix;

		len += (size_t)snprintf(ret + len, size - len, "%s%u.%u.%u.%u/%u", i ? ", " : "",
			at[0], at[1], at[2], at[3], v4_ranges[i].bits);
		ASSERT(len < size);
	}
}
