// SPDX-License-Identifier: Apache-2.0
// .mayflyignore; see the header. Any thread.
#include "work/ignore.h"

#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define RULES_MAX  1024
#define PARTS_MAX  32U
#define STARS_MAX  3U // "**" in a pattern: each may be tried at each folder of a path
#define PATH_PARTS 256U

struct work_rule {
	bool take_back, folders_only;
	unsigned int nr;
	char *text; // owned; cut into the parts
	const char *parts[PARTS_MAX]; // of the pattern, between its slashes
};

void work_ignore_fini(struct work_ignore *ig)
{
	for (size_t i = 0; i < ig->nr; i++)
		free(ig->rules[i].text);
	free(ig->rules);
	*ig = (struct work_ignore){0};
}

static int parse_rule(char *line, struct work_rule *rule, unsigned int nr, struct err *err)
{
	size_t len = strlen(line);
	unsigned int stars = 0;
	bool tied;

	if (line[0] == '!') {
		rule->take_back = true;
		line++;
		len--;
	}
	if (len && line[len - 1] == '/') {
		rule->folders_only = true;
		line[--len] = '\0';
	}
	tied = strchr(line, '/') != NULL;
	if (!tied)
		rule->parts[rule->nr++] = "**";
	for (char *part = line; part;) {
		char *slash = strchr(part, '/');

		if (slash)
			*slash++ = '\0';
		if (*part) {
			if (rule->nr == PARTS_MAX)
				return err_set(err, -EINVAL, "line %u: too long a pattern", nr);
			rule->parts[rule->nr++] = part;
			stars += !strcmp(part, "**");
		} else if (part != line) {
			return err_set(err, -EINVAL, "line %u: two slashes in a row", nr);
		}
		part = slash;
	}
	if (rule->nr == !tied || stars > STARS_MAX)
		return err_set(err, -EINVAL, "line %u: %s", nr,
			stars > STARS_MAX ? "more than three \"**\"" : "no pattern");
	return 0;
}

int work_ignore_parse(const char *text, size_t len, struct work_ignore *ret, struct err *err)
{
	struct work_ignore ig = {.rules = calloc(RULES_MAX, sizeof(*ig.rules))};
	const char *end = text + len, *next;
	int r = 0;

	if (!ig.rules)
		return err_errno(err, -ENOMEM, "ignore");
	for (unsigned int nr = 1; r == 0 && text < end; nr++, text = next) {
		const char *newline = memchr(text, '\n', (size_t)(end - text));
		size_t bytes = (size_t)((newline ? newline : end) - text);
		char *line;

		next = newline ? newline + 1 : end;
		while (bytes && (text[bytes - 1] == ' ' || text[bytes - 1] == '\r'))
			bytes--;
		if (bytes == 0 || text[0] == '#')
			continue;
		if (memchr(text, '\0', bytes) || ig.nr == RULES_MAX) {
			r = err_set(err, -EINVAL, "line %u: %s", nr,
				ig.nr == RULES_MAX ? "too many lines" : "a NUL in it");
			break;
		}
		line = strndup(text, bytes);
		if (!line) {
			r = err_errno(err, -ENOMEM, "ignore");
			break;
		}
		ig.rules[ig.nr].text = line;
		r = parse_rule(line, &ig.rules[ig.nr++], nr, err);
	}
	if (r < 0) {
		work_ignore_fini(&ig);
		return r;
	}
	*ret = ig;
	return 0;
}

static bool match(
	const char *const *pattern, unsigned int np, const char *const *path, unsigned int n)
{
	for (; np; pattern++, np--, path++, n--) {
		if (!strcmp(*pattern, "**")) {
			// At the end it is all that is within.
			if (np == 1)
				return n > 0;
			for (unsigned int skip = 0; skip <= n; skip++)
				if (match(pattern + 1, np - 1, path + skip, n - skip))
					return true;
			return false;
		}
		if (n == 0 || fnmatch(*pattern, *path, 0) != 0)
			return false;
	}
	return n == 0;
}

bool work_ignored(const struct work_ignore *ig, const char *path, bool folder)
{
	const char *parts[PATH_PARTS];
	char copy[PATH_MAX];
	unsigned int n = 0;
	bool ignored = false;

	if (!strncmp(path, WORK_STAGE_NAME, strlen(WORK_STAGE_NAME)) &&
		(path[strlen(WORK_STAGE_NAME)] == '\0' || path[strlen(WORK_STAGE_NAME)] == '/'))
		return true;
	if (ig->nr == 0 || strlen(path) >= sizeof(copy))
		return false;
	strcpy(copy, path);
	for (char *part = copy; part && n < PATH_PARTS;) {
		char *slash = strchr(part, '/');

		if (slash)
			*slash++ = '\0';
		parts[n++] = part;
		part = slash;
	}
	for (size_t i = 0; i < ig->nr; i++) {
		const struct work_rule *rule = &ig->rules[i];

		if (ignored == rule->take_back && (folder || !rule->folders_only) &&
			match(rule->parts, rule->nr, parts, n))
			ignored = !rule->take_back;
	}
	return ignored;
}

bool work_ignored_within(const struct work_ignore *ig, const char *path, bool folder)
{
	char copy[PATH_MAX];

	if (strlen(path) >= sizeof(copy))
		return true;
	strcpy(copy, path);
	for (char *slash = copy; (slash = strchr(slash, '/')); *slash++ = '/') {
		*slash = '\0';
		if (work_ignored(ig, copy, true))
			return true;
	}
	return work_ignored(ig, path, folder);
}
