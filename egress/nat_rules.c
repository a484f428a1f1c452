// SPDX-License-Identifier: Apache-2.0
// Rules of a network card; see the header. Pure; any thread.
#include "egress/nat_rules.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "egress/address.h"

#define TABLE "table inet mayfly"

struct out {
	char *text;
	size_t len;
};

static void add(struct out *out, const char *fmt, ...) PRINTF_LIKE(2, 3);

static void add(struct out *out, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	out->len += (size_t)vsnprintf(out->text + MIN(out->len, (size_t)NAT_RULES_BYTES),
		NAT_RULES_BYTES - MIN(out->len, (size_t)NAT_RULES_BYTES), fmt, ap);
	va_end(ap);
}

static const char *text_of(struct in_addr address, char ret[INET_ADDRSTRLEN])
{
	return inet_ntop(AF_INET, &address, ret, INET_ADDRSTRLEN);
}

// One direction: peer is the end that is not the guest's, port its port.
static void add_chain(struct out *out, const struct nat_rules *rules, const char *name,
	const char *hook, const char *loopback, const char *peer, const char *port)
{
	char ip[INET_ADDRSTRLEN], ranges[1024];

	add(out, "chain %s {\ntype filter hook %s priority 0; policy drop;\n%s lo accept\n", name,
		hook, loopback);
	for (unsigned int i = 0; rules->open && i < rules->named->nr; i++) {
		const struct allow_rule *rule = &rules->named->rules[i];

		// Nobody sees a method here.
		if (!rule->host.literal || rule->method[0] || strchr(rule->host.name, ':'))
			continue;
		add(out, "ip %s %s meta l4proto { tcp, udp } th %s ", peer, rule->host.name, port);
		if (rule->port)
			add(out, "%u accept\n", rule->port);
		else
			add(out, "{ 80, 443 } accept\n");
	}
	if (rules->open) {
		add(out, "ip %s %s meta l4proto { tcp, udp } th %s 53 accept\n", peer,
			text_of(rules->dns, ip), port);
		for (unsigned int i = 0; i < rules->nr_hosts; i++)
			add(out, "ip %s %s goto no\n", peer, text_of(rules->hosts[i], ip));
		address_v4_ranges(ranges, sizeof(ranges));
		add(out, "ip %s { %s } goto no\nmeta nfproto ipv4 accept\n", peer, ranges);
	}
	add(out, "goto no\n}\n");
}

// TCP gets in, so that what it answers is refused, which ends the connection; in silence it would
// wait.
#define IN_LOOPBACK "meta l4proto tcp accept\niifname"

int nat_rules_print(const struct nat_rules *rules, char ret[NAT_RULES_BYTES], struct err *err)
{
	struct out out = {.text = ret};

	// One transaction: there is no moment without rules.
	add(&out, TABLE "\ndelete " TABLE "\n" TABLE " {\n");
	add(&out, "chain no {\nmeta l4proto tcp reject with tcp reset\nreject\n}\n");
	add_chain(&out, rules, "out", "output", "oifname", "daddr", "dport");
	add_chain(&out, rules, "in", "input", IN_LOOPBACK, "saddr", "sport");
	add(&out, "}\n");
	return out.len < NAT_RULES_BYTES ? 0 : err_errno(err, -E2BIG, "the rules of the network");
}
