// SPDX-License-Identifier: Apache-2.0
// The rules of a network card (mode nat) for nft(8): all of the public Internet's IPv4 addresses
// but the host's own, no others unless they are named, and the resolver. They hold for each packet,
// both ways: what they no longer let through ends at once. Pure; any thread.
#ifndef MAYFLY_NAT_RULES_H
#define MAYFLY_NAT_RULES_H

#include <netinet/in.h>

#include "vmm/allow.h"

#define NAT_HOSTS_MAX   64U
#define NAT_RULES_BYTES 32768U

struct nat_rules {
	bool open; // else nothing goes through
	struct in_addr dns; // the resolver's address, as the guest has it
	const struct allow_list *named; // of these the addresses count
	struct in_addr hosts[NAT_HOSTS_MAX]; // the host's own
	unsigned int nr_hosts;
};

// The whole of them, in place of those before. -E2BIG.
int nat_rules_print(const struct nat_rules *rules, char ret[NAT_RULES_BYTES], struct err *err);

#endif
