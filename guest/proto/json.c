// SPDX-License-Identifier: Apache-2.0
// A small JSON for the agent protocol. Any thread.
#include "guest/proto/json.h"

#include <errno.h>
#include <string.h>

#include "vmm/base/util.h"

struct reader {
	char *p, *end;
	struct json_node *nodes;
	size_t used, cap;
};

static int parse_value(struct reader *r, int depth);

static void skip_space(struct reader *r)
{
	while (r->p < r->end && (*r->p == ' ' || *r->p == '\t' || *r->p == '\n' || *r->p == '\r'))
		r->p++;
}

static bool take(struct reader *r, char c)
{
	if (r->p >= r->end || *r->p != c)
		return false;
	r->p++;
	return true;
}

static bool take_word(struct reader *r, const char *word)
{
	size_t len = strlen(word);

	if ((size_t)(r->end - r->p) < len || memcmp(r->p, word, len) != 0)
		return false;
	r->p += len;
	return true;
}

static int hex4(struct reader *r)
{
	int v = 0;

	if (r->end - r->p < 4)
		return -EINVAL;
	for (int i = 0; i < 4; i++) {
		char c = *r->p++;
		int digit;

		if (c >= '0' && c <= '9')
			digit = c - '0';
		else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
			digit = (c | 0x20) - 'a' + 10;
		else
			return -EINVAL;
		v = v * 16 + digit;
	}
	return v;
}

// After "\u": one code point, of one or two escapes, written to *w as UTF-8. That is never longer
// than the escapes were, so the text can be rewritten in place.
static int parse_unicode(struct reader *r, char **w)
{
	int cp = hex4(r);

	if (cp <= 0) // NUL would end the string early for everybody behind us
		return -EINVAL;
	if (cp >= 0xd800 && cp <= 0xdbff) {
		int low;

		if (!take_word(r, "\\u"))
			return -EINVAL;
		low = hex4(r);
		if (low < 0xdc00 || low > 0xdfff)
			return -EINVAL;
		cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
	} else if (cp >= 0xdc00 && cp <= 0xdfff) {
		return -EINVAL;
	}
	if (cp < 0x80) {
		*(*w)++ = (char)cp;
	} else if (cp < 0x800) {
		*(*w)++ = (char)(0xc0 | cp >> 6);
		*(*w)++ = (char)(0x80 | (cp & 0x3f));
	} else if (cp < 0x10000) {
		*(*w)++ = (char)(0xe0 | cp >> 12);
		*(*w)++ = (char)(0x80 | (cp >> 6 & 0x3f));
		*(*w)++ = (char)(0x80 | (cp & 0x3f));
	} else {
		*(*w)++ = (char)(0xf0 | cp >> 18);
		*(*w)++ = (char)(0x80 | (cp >> 12 & 0x3f));
		*(*w)++ = (char)(0x80 | (cp >> 6 & 0x3f));
		*(*w)++ = (char)(0x80 | (cp & 0x3f));
	}
	return 0;
}

// After the opening quote.
static int parse_string(struct reader *r, struct json_node *node)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	char *w = r->p;

	node->type = JSON_STRING;
	node->str = w;
	while (r->p < r->end) {
		char c = *r->p++;
		const char *esc;
		int rc;

		if (c == '"') {
			node->count = (uint32_t)(w - node->str);
			*w = '\0';
			return 0;
		}
		if ((unsigned char)c < ' ')
			return -EINVAL;
		if (c != '\\') {
			*w++ = c;
			continue;
		}
		if (take(r, 'u')) {
			rc = parse_unicode(r, &w);
			if (rc < 0)
				return rc;
			continue;
		}
		esc = r->p < r->end && *r->p ? strchr(from, *r->p) : NULL;
		if (!esc)
			return -EINVAL;
		r->p++;
		*w++ = to[esc - from];
	}
	return -EINVAL;
}

static int parse_int(struct reader *r, struct json_node *node)
{
	bool minus = take(r, '-');
	char *first = r->p;
	int64_t v = 0;

	while (r->p < r->end && *r->p >= '0' && *r->p <= '9') {
		int64_t digit = *r->p++ - '0';

		// Built up downwards: the range of negative numbers is the larger one.
		if (__builtin_mul_overflow(v, 10, &v) || __builtin_sub_overflow(v, digit, &v))
			return -EINVAL;
	}
	if (r->p == first || (*first == '0' && r->p - first > 1))
		return -EINVAL;
	if (r->p < r->end && (*r->p == '.' || *r->p == 'e' || *r->p == 'E'))
		return -EINVAL;
	if (!minus && __builtin_sub_overflow(0, v, &v))
		return -EINVAL;
	node->type = JSON_INT;
	node->num = v;
	return 0;
}

// After the opening bracket.
static int parse_children(struct reader *r, struct json_node *node, int depth)
{
	bool object = node->type == JSON_OBJECT;
	char bracket = object ? '}' : ']';

	if (depth >= JSON_DEPTH_MAX)
		return -EINVAL;
	skip_space(r);
	if (take(r, bracket))
		return 0;
	for (;;) {
		int rc;

		skip_space(r);
		if (object) {
			if (r->p >= r->end || *r->p != '"')
				return -EINVAL;
			rc = parse_value(r, depth + 1);
			if (rc < 0)
				return rc;
			skip_space(r);
			if (!take(r, ':'))
				return -EINVAL;
		}
		rc = parse_value(r, depth + 1);
		if (rc < 0)
			return rc;
		node->count++;
		skip_space(r);
		if (take(r, bracket))
			return 0;
		if (!take(r, ','))
			return -EINVAL;
	}
}

static int parse_value(struct reader *r, int depth)
{
	struct json_node *node;
	int rc = 0;

	skip_space(r);
	if (r->used == r->cap)
		return -E2BIG;
	node = &r->nodes[r->used++];
	*node = (struct json_node){.type = JSON_NULL};
	if (take(r, '"')) {
		rc = parse_string(r, node);
	} else if (take(r, '{')) {
		node->type = JSON_OBJECT;
		rc = parse_children(r, node, depth);
	} else if (take(r, '[')) {
		node->type = JSON_ARRAY;
		rc = parse_children(r, node, depth);
	} else if (take_word(r, "true")) {
		node->type = JSON_BOOL;
		node->num = 1;
	} else if (take_word(r, "false")) {
		node->type = JSON_BOOL;
	} else if (!take_word(r, "null")) {
		rc = parse_int(r, node);
	}
	node->end = (uint32_t)r->used;
	return rc;
}

int json_parse(char *text, size_t len, struct json_node *nodes, size_t cap)
{
	struct reader r = {.p = text, .end = text + len, .nodes = nodes, .cap = cap};
	int rc = parse_value(&r, 0);

	if (rc < 0)
		return rc;
	skip_space(&r);
	return r.p == r.end ? (int)r.used : -EINVAL;
}

static int decode_field(const struct json_field *f, const struct json_node *value, struct err *err)
{
	if (value->type != f->type)
		return err_set(err, -EINVAL, "\"%s\" has the wrong type", f->name);
	switch (f->type) {
	case JSON_BOOL:
		*(bool *)f->ret = value->num != 0;
		break;
	case JSON_INT:
		if (value->num < f->min || value->num > f->max)
			return err_set(err, -EINVAL, "\"%s\" is out of range", f->name);
		*(int64_t *)f->ret = value->num;
		break;
	case JSON_STRING:
		*(const char **)f->ret = value->str;
		break;
	default:
		*(const struct json_node **)f->ret = value;
	}
	return 0;
}

int json_decode(const struct json_node *nodes, const struct json_node *obj,
	const struct json_field *fields, size_t nfields, enum json_unknown unknown, struct err *err)
{
	uint32_t seen = 0;
	const struct json_node *key = obj + 1;

	ASSERT(nfields <= 32);
	if (obj->type != JSON_OBJECT)
		return err_set(err, -EINVAL, "not a JSON object");
	while (key < nodes + obj->end) {
		const struct json_node *value = key + 1;
		size_t i = 0;
		int rc;

		while (i < nfields && strcmp(fields[i].name, key->str) != 0)
			i++;
		if (i == nfields) {
			if (unknown == JSON_REFUSE_UNKNOWN)
				return err_set(err, -EINVAL, "unknown member \"%.64s\"", key->str);
		} else {
			if (seen & 1U << i)
				return err_set(
					err, -EINVAL, "\"%s\" is there twice", fields[i].name);
			seen |= 1U << i;
			rc = decode_field(&fields[i], value, err);
			if (rc < 0)
				return rc;
		}
		key = nodes + value->end;
	}
	return 0;
}

static void put(struct json_out *out, const char *bytes, size_t len)
{
	if (out->full || out->cap - out->len < len) {
		out->full = true;
		return;
	}
	memcpy(out->buf + out->len, bytes, len);
	out->len += len;
}

// A value needs a comma unless it is the first of its container or follows its key. Strings end in
// a quote, so the last byte tells.
static void separate(struct json_out *out)
{
	if (out->len && !strchr("{[:", out->buf[out->len - 1]))
		put(out, ",", 1);
}

void json_open(struct json_out *out, char bracket)
{
	separate(out);
	put(out, &bracket, 1);
}

void json_close(struct json_out *out, char bracket)
{
	put(out, &bracket, 1);
}

static void put_string(struct json_out *out, const char *str)
{
	static const char hex[] = "0123456789abcdef";
	const char *from = str;

	put(out, "\"", 1);
	for (; *str; str++) {
		unsigned char c = (unsigned char)*str;
		char esc[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};

		if (c >= ' ' && c != '"' && c != '\\')
			continue;
		put(out, from, (size_t)(str - from));
		put(out, esc, sizeof(esc));
		from = str + 1;
	}
	put(out, from, (size_t)(str - from));
	put(out, "\"", 1);
}

void json_key(struct json_out *out, const char *key)
{
	separate(out);
	put_string(out, key);
	put(out, ":", 1);
}

void json_str(struct json_out *out, const char *str)
{
	separate(out);
	put_string(out, str);
}

void json_int(struct json_out *out, int64_t num)
{
	char digits[20];
	size_t at = sizeof(digits);
	uint64_t left = num < 0 ? 0 - (uint64_t)num : (uint64_t)num;

	do {
		digits[--at] = (char)('0' + left % 10);
		left /= 10;
	} while (left);
	separate(out);
	if (num < 0)
		put(out, "-", 1);
	put(out, digits + at, sizeof(digits) - at);
}

void json_bool(struct json_out *out, bool value)
{
	separate(out);
	put(out, value ? "true" : "false", value ? 4 : 5);
}
