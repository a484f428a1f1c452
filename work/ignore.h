// SPDX-License-Identifier: Apache-2.0
// What of a folder does not travel: .mayflyignore, in the syntax of .gitignore. Any thread.
//
// Lines: a pattern with *, ?, [..] and ** between slashes; "/" at the start or within ties it to
// the top; at the end it means folders alone; "!" takes back; "#" is a comment. The last one that
// fits counts. What is in a folder that does not travel does not either.
#ifndef MAYFLY_WORK_IGNORE_H
#define MAYFLY_WORK_IGNORE_H

#include <stdbool.h>
#include <stddef.h>

#include "vmm/base/err.h"

#define WORK_IGNORE_NAME      ".mayflyignore"
#define WORK_IGNORE_MAX_BYTES 65536U

// Our own folder while changes are brought out: it never travels.
#define WORK_STAGE_NAME ".mayfly-keep"

struct work_rule;

// Zero ignores nothing but our own folder.
struct work_ignore {
	struct work_rule *rules;
	size_t nr;
};

void work_ignore_fini(struct work_ignore *ig);

// -EINVAL with the number of the line.
int work_ignore_parse(const char *text, size_t len, struct work_ignore *ret, struct err *err);

// Whether the entry itself is left out; the folders that it is in are not looked at.
bool work_ignored(const struct work_ignore *ig, const char *path, bool folder);

// Whether it or a folder that it is in is.
bool work_ignored_within(const struct work_ignore *ig, const char *path, bool folder);

#endif
