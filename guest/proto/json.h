// SPDX-License-Identifier: Apache-2.0
// A small JSON for the agent protocol: a reader that works inside the buffer it is given and a
// writer into a fixed buffer. Neither allocates. The subset is what the protocol uses: integers of
// 64 bits only, no NUL in a string, nesting up to JSON_DEPTH_MAX. Strings carry bytes: file names
// and arguments of Linux need not be UTF-8, so bytes above 0x7f pass as they are. Any thread.
#ifndef MAYFLY_PROTO_JSON_H
#define MAYFLY_PROTO_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm/base/err.h"

#define JSON_DEPTH_MAX 8

enum json_type { JSON_NULL, JSON_BOOL, JSON_INT, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

// Nodes lie in document order: the children of an array or object follow it, an object's as
// key, value, key, value; `end` is the index of the first node after all of them.
struct json_node {
	enum json_type type;
	uint32_t end;
	uint32_t count; // children of an array, pairs of an object, bytes of a string
	union {
		int64_t num; // also of a bool, 0 or 1
		char *str; // NUL-terminated, inside the text
	};
};

// Parses text[0..len), which is overwritten. Returns the number of nodes, of which the first is the
// document's value, -E2BIG when cap is too few, -EINVAL when the text is not of our subset.
int json_parse(char *text, size_t len, struct json_node *nodes, size_t cap);

// One member that an object may have; ret is untouched when it is absent.
struct json_field {
	const char *name;
	enum json_type type;
	void *ret; // bool *, int64_t *, const char **, or const struct json_node ** for the rest
	int64_t min, max; // of an integer
};

enum json_unknown { JSON_REFUSE_UNKNOWN, JSON_SKIP_UNKNOWN };

// Reads the members of an object. -EINVAL for a member that is unknown (when refused), twice there,
// of another type or out of its range. At most 32 fields.
int json_decode(const struct json_node *nodes, const struct json_node *obj,
	const struct json_field *fields, size_t nfields, enum json_unknown unknown,
	struct err *err);

// The writer puts commas where they belong. What does not fit sets `full` and is dropped.
struct json_out {
	char *buf;
	size_t cap, len;
	bool full;
};

void json_open(struct json_out *out, char bracket); // '{' or '['
void json_close(struct json_out *out, char bracket);
void json_key(struct json_out *out, const char *key);
void json_str(struct json_out *out, const char *str);
void json_int(struct json_out *out, int64_t num);
void json_bool(struct json_out *out, bool value);

#endif
