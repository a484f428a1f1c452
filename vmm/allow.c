// SPDX-License-Identifier: Apache-2.0
// Rules of what a machine may reach; see the header. Pure; any thread.
#include "vmm/allow.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "vmm/base/parse.h"

#define NAME_MAX_BYTES  253U
#define LABEL_MAX_BYTES 63U
#define SEPARATORS      " \t,"

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool is_name_char(char c)
{
	return (c >= 'a' && c <= 'z') || is_digit(c) || c == '-' || c == '_';
}

// 0x7f.1, 127.1 and 2130706433 are addresses to some: a name's last label begins with a letter.
static bool is_name(const char *name)
{
	const char *last = strrchr(name, '.');
	size_t label = 0;

	for (const char *at = name; *at; at++) {
		if (*at == '.' ? label == 0 : !is_name_char(*at))
			return false;
		label = *at == '.' ? 0 : label + 1;
		if (label > LABEL_MAX_BYTES)
			return false;
	}
	last = last ? last + 1 : name;
	return label > 0 && !is_digit(*last);
}

static bool parse_v6(const char *text, size_t len, char *ret, size_t size)
{
	char inner[INET6_ADDRSTRLEN];
	struct in6_addr v6;

	if (len < 2 || text[0] != '[' || text[len - 1] != ']' || len - 2 >= sizeof(inner))
		return false;
	memcpy(inner, text + 1, len - 2);
	inner[len - 2] = '\0';
	return inet_pton(AF_INET6, inner, &v6) == 1 &&
	       inet_ntop(AF_INET6, &v6, ret, (socklen_t)size);
}

int allow_host_parse(const char *text, size_t len, struct allow_host *ret, struct err *err)
{
	struct allow_host host = {0};
	struct in_addr v4;
	bool good = len > 0 && len <= NAME_MAX_BYTES && !memchr(text, '\0', len);

	if (good && text[0] == '[') {
		host.literal = good = parse_v6(text, len, host.name, sizeof(host.name));
	} else if (good) {
		for (size_t i = 0; i < len; i++)
			host.name[i] = (char)(text[i] >= 'A' && text[i] <= 'Z' ? text[i] + 32
									       : text[i]);
		host.literal = inet_pton(AF_INET, host.name, &v4) == 1;
		good = host.literal || is_name(host.name);
	}
	if (!good)
		return err_set(err, -EINVAL, "'%.*s' is neither a name nor an address",
			(int)MIN(len, (size_t)60), text);
	*ret = host;
	return 0;
}

int allow_authority_parse(
	const char *text, size_t len, struct allow_host *ret, uint16_t *ret_port, struct err *err)
{
	const char *colon = len ? memrchr(text, ':', len) : NULL;
	uint64_t port = 0;
	char digits[6];
	size_t n;
	int r;

	if (colon && text[len - 1] != ']') {
		n = len - (size_t)(colon + 1 - text);
		if (n == 0 || n >= sizeof(digits) || !is_digit(colon[1]))
			return err_set(err, -EINVAL, "'%.*s' has no port behind its colon",
				(int)MIN(len, (size_t)60), text);
		memcpy(digits, colon + 1, n);
		digits[n] = '\0';
		r = parse_uint(digits, 1, UINT16_MAX, &port, err);
		if (r < 0)
			return r;
		len = (size_t)(colon - text);
	}
	r = allow_host_parse(text, len, ret, err);
	if (r == 0)
		*ret_port = (uint16_t)port;
	return r;
}

static bool is_method(const char *text, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (text[i] < 'A' || text[i] > 'Z')
			return false;
	// A tunnel is what carries what has no method.
	return len != 7 || memcmp(text, "CONNECT", 7) != 0;
}

int allow_rule_parse(const char *text, size_t len, struct allow_rule *ret, struct err *err)
{
	struct allow_rule rule = {0};
	const char *at = memchr(text, '@', len);
	int r;

	if (at) {
		const size_t n = (size_t)(at - text);

		if (n == 0 || n >= sizeof(rule.method) || !is_method(text, n))
			return err_set(err, -EINVAL,
				"'%.*s': before the '@' stands a method of HTTP in capitals, like "
				"GET",
				(int)MIN(len, (size_t)60), text);
		memcpy(rule.method, text, n);
		text += n + 1;
		len -= n + 1;
	}
	if (len > 2 && text[0] == '*' && text[1] == '.') {
		text += 2;
		len -= 2;
		rule.suffix = true;
	} else if (len > 1 && text[0] == '.') {
		text++;
		len--;
		rule.suffix = true;
	}
	r = allow_authority_parse(text, len, &rule.host, &rule.port, err);
	if (r == 0 && rule.suffix && rule.host.literal)
		r = err_set(
			err, -EINVAL, "'*.%s': an address has nothing below it", rule.host.name);
	if (r == 0)
		*ret = rule;
	return r;
}

int allow_parse(const char *text, struct allow_list *ret, struct err *err)
{
	struct allow_list list = {0};
	int r;

	for (size_t len; *(text += strspn(text, SEPARATORS)); text += len) {
		struct allow_rule rule = {0};

		len = strcspn(text, SEPARATORS);
		r = allow_rule_parse(text, len, &rule, err);
		if (r == 0)
			r = allow_add(&list, &rule, err);
		if (r < 0)
			return r;
	}
	*ret = list;
	return 0;
}

int allow_rule_print(const struct allow_rule *rule, char *ret, size_t size)
{
	const bool v6 = rule->host.literal && strchr(rule->host.name, ':');
	char port[8] = "";

	if (rule->port)
		snprintf(port, sizeof(port), ":%u", rule->port);
	return snprintf(ret, size, "%s%s%s%s%s%s%s", rule->method, rule->method[0] ? "@" : "",
		rule->suffix ? "*." : "", v6 ? "[" : "", rule->host.name, v6 ? "]" : "", port);
}

int allow_print(const struct allow_list *list, char *ret, size_t size, struct err *err)
{
	size_t len = 0;

	ASSERT(size > 0);
	ret[0] = '\0';
	for (unsigned int i = 0; i < list->nr; i++) {
		char rule[ALLOW_HOST_BYTES + 16];
		const size_t n = (size_t)allow_rule_print(&list->rules[i], rule, sizeof(rule));

		if (len + n + 2 > size)
			return err_set(err, -E2BIG, "the rules are longer than %zu bytes", size);
		len += (size_t)sprintf(ret + len, "%s%s", len ? " " : "", rule);
	}
	return 0;
}

static bool host_matches(const struct allow_rule *rule, const struct allow_host *host)
{
	const size_t len = strlen(host->name), n = strlen(rule->host.name);

	if (rule->host.literal != host->literal)
		return false;
	if (!rule->suffix)
		return !strcmp(host->name, rule->host.name);
	return len > n + 1 && host->name[len - n - 1] == '.' &&
	       !strcmp(host->name + len - n, rule->host.name);
}

static bool reaches(const struct allow_rule *rule, const struct allow_host *host, uint16_t port)
{
	return (rule->port ? rule->port == port : port == 80 || port == 443) &&
	       host_matches(rule, host);
}

bool allow_admits(const struct allow_list *list, const struct allow_host *host, uint16_t port,
	const char *method)
{
	for (unsigned int i = 0; i < list->nr; i++) {
		const struct allow_rule *rule = &list->rules[i];

		if (reaches(rule, host, port) &&
			(!rule->method[0] || (method && !strcmp(rule->method, method))))
			return true;
	}
	return false;
}

bool allow_has_method(const struct allow_list *list, const struct allow_host *host, uint16_t port)
{
	for (unsigned int i = 0; i < list->nr; i++)
		if (list->rules[i].method[0] && reaches(&list->rules[i], host, port))
			return true;
	return false;
}

static bool same_host(const struct allow_rule *a, const struct allow_rule *b)
{
	return a->suffix == b->suffix && a->host.literal == b->host.literal &&
	       !strcmp(a->host.name, b->host.name);
}

// Whether all that rule admits is admitted by wide.
static bool covers(const struct allow_rule *wide, const struct allow_rule *rule)
{
	const bool port = wide->port == rule->port ||
			  (wide->port == 0 && (rule->port == 80 || rule->port == 443));

	if (wide->method[0] && strcmp(wide->method, rule->method) != 0)
		return false;
	return port && (same_host(wide, rule) || (wide->suffix && host_matches(wide, &rule->host)));
}

void allow_narrow(struct allow_list *list, const struct allow_list *other)
{
	unsigned int kept = 0;

	for (unsigned int i = 0; i < list->nr; i++) {
		bool covered = false;

		for (unsigned int k = 0; k < other->nr; k++)
			covered |= covers(&other->rules[k], &list->rules[i]);
		if (covered)
			list->rules[kept++] = list->rules[i];
	}
	list->nr = kept;
}

int allow_add(struct allow_list *list, const struct allow_rule *rule, struct err *err)
{
	for (unsigned int i = 0; i < list->nr; i++)
		if (list->rules[i].port == rule->port && same_host(&list->rules[i], rule) &&
			!strcmp(list->rules[i].method, rule->method))
			return 0;
	if (list->nr == ALLOW_RULES_MAX)
		return err_set(err, -E2BIG, "more than %d rules", ALLOW_RULES_MAX);
	list->rules[list->nr++] = *rule;
	return 0;
}

unsigned int allow_remove(struct allow_list *list, const struct allow_rule *rule)
{
	unsigned int kept = 0, removed;

	for (unsigned int i = 0; i < list->nr; i++) {
		const struct allow_rule *at = &list->rules[i];

		if (!same_host(at, rule) || (rule->port && at->port != rule->port) ||
			(rule->method[0] && strcmp(at->method, rule->method) != 0))
			list->rules[kept++] = *at;
	}
	removed = list->nr - kept;
	list->nr = kept;
	return removed;
}
