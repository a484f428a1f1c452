// SPDX-License-Identifier: Apache-2.0
// What a machine may reach: a list of rules [METHOD@]HOST[:PORT], apart by spaces or commas. METHOD
// is one of HTTP's, in capitals, where what is asked for can be seen; without one all is admitted.
// HOST is a name, a suffix (*.example.com: every name below it, not itself) or an address; without
// a port a rule is for 80 and 443. Pure; any thread.
#ifndef MAYFLY_ALLOW_H
#define MAYFLY_ALLOW_H

#include "vmm/base/err.h"

#define ALLOW_RULES_MAX    64
#define ALLOW_TEXT_BYTES   4096
#define ALLOW_HOST_BYTES   256
#define ALLOW_METHOD_BYTES 9

// A host as it is compared: a name in lower case, or an address as inet_ntop() writes it.
struct allow_host {
	char name[ALLOW_HOST_BYTES];
	bool literal; // an address
};

struct allow_rule {
	struct allow_host host;
	char method[ALLOW_METHOD_BYTES]; // that alone; empty: whatever is said
	bool suffix; // and every name that ends in "." and that
	uint16_t port; // 0: 80 and 443
};

struct allow_list {
	struct allow_rule rules[ALLOW_RULES_MAX];
	unsigned int nr;
};

// The host that text[0..len) names: letters, digits, '-', '_' and '.', IPv4 as A.B.C.D, IPv6 in
// brackets. -EINVAL for all else: an empty label, a dot at the end, a number that only looks like a
// name.
int allow_host_parse(const char *text, size_t len, struct allow_host *ret, struct err *err);

// HOST or HOST:PORT; *ret_port is 0 where none is given.
int allow_authority_parse(
	const char *text, size_t len, struct allow_host *ret, uint16_t *ret_port, struct err *err);

int allow_rule_parse(const char *text, size_t len, struct allow_rule *ret, struct err *err);

// -EINVAL naming the rule, -E2BIG for more than there is room for.
int allow_parse(const char *text, struct allow_list *ret, struct err *err);

// As allow_parse() reads it. -E2BIG.
int allow_print(const struct allow_list *list, char *ret, size_t size, struct err *err);
int allow_rule_print(const struct allow_rule *rule, char *ret, size_t size);

// method: NULL for what it is not known of, such as a tunnel, and which no rule of a method admits.
bool allow_admits(const struct allow_list *list, const struct allow_host *host, uint16_t port,
	const char *method);

// Whether there is a rule of a method for it.
bool allow_has_method(const struct allow_list *list, const struct allow_host *host, uint16_t port);

// Keeps of list what other admits as well, so that it is no wider than either.
void allow_narrow(struct allow_list *list, const struct allow_list *other);

// Adds a rule unless it is there. -E2BIG.
int allow_add(struct allow_list *list, const struct allow_rule *rule, struct err *err);

// Removes that rule; with port 0 all of its host, with no method those of every method. Returns how
// many.
unsigned int allow_remove(struct allow_list *list, const struct allow_rule *rule);

#endif
