// SPDX-License-Identifier: Apache-2.0
// Which addresses are the public Internet's, and which are the host's own, its network's or
// nobody's. Pure; any thread.
#ifndef MAYFLY_EGRESS_ADDRESS_H
#define MAYFLY_EGRESS_ADDRESS_H

#include <netinet/in.h>

#include "vmm/base/util.h"

struct address {
	int family; // AF_INET or AF_INET6
	union {
		struct in_addr v4;
		struct in6_addr v6;
	};
};

#define ADDRESS_TEXT_BYTES INET6_ADDRSTRLEN

// NULL for one of the public Internet, else what it is: "private", "loopback", ... IPv6 addresses
// that stand for an IPv4 one are judged as that, or refused.
const char *address_not_public(const struct address *address);

// As inet_ntop() writes it; what stands for IPv4 stays IPv6.
void address_text(const struct address *address, char ret[ADDRESS_TEXT_BYTES]);

bool address_parse(const char *text, struct address *ret);

// The ranges of IPv4 that are refused, as A.B.C.D/BITS with ", " between them. size has to be
// enough.
void address_v4_ranges(char *ret, size_t size);

#endif
