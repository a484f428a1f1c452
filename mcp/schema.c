// SPDX-License-Identifier: Apache-2.0
// Values against schemas; see the header. Pure; any thread.
#include "mcp/schema.h"

#include <errno.h>
#include <string.h>

#define DEPTH_MAX  8
#define PATH_BYTES 160

static const char *const types[] = {
	"object", "array", "string", "integer", "number", "boolean", "null"};

static bool is_type(const char *type, const json_t *value)
{
	switch (json_typeof(value)) {
	case JSON_OBJECT:
		return !strcmp(type, "object");
	case JSON_ARRAY:
		return !strcmp(type, "array");
	case JSON_STRING:
		return !strcmp(type, "string");
	case JSON_INTEGER:
		return !strcmp(type, "integer") || !strcmp(type, "number");
	case JSON_REAL:
		return !strcmp(type, "number");
	case JSON_TRUE:
	case JSON_FALSE:
		return !strcmp(type, "boolean");
	default:
		return !strcmp(type, "null");
	}
}

// UTF-8, which jansson has checked.
static size_t letters(const json_t *string)
{
	const char *text = json_string_value(string);
	size_t n = 0;

	for (size_t i = 0; i < json_string_length(string); i++)
		n += ((unsigned char)text[i] & 0xc0) != 0x80;
	return n;
}

static bool limit(const json_t *schema, const char *key, json_int_t *ret)
{
	const json_t *value = json_object_get(schema, key);

	if (!json_is_integer(value))
		return false;
	*ret = json_integer_value(value);
	return true;
}

static int check_range(const json_t *schema, const char *min, const char *max, double n,
	const char *path, const char *unit, struct err *err)
{
	json_int_t bound;

	if (limit(schema, min, &bound) && n < (double)bound)
		return err_set(err, -EINVAL, "%s: at least %lld%s", path, (long long)bound, unit);
	if (limit(schema, max, &bound) && n > (double)bound)
		return err_set(err, -EINVAL, "%s: at most %lld%s", path, (long long)bound, unit);
	return 0;
}

static void join(char ret[PATH_BYTES], const char *path, const char *name)
{
	snprintf(ret, PATH_BYTES, "%.100s%s%.50s", path, path[0] ? "." : "", name);
}

static int check(const json_t *schema, const json_t *value, const char *path, unsigned int depth,
	struct err *err);

static int check_object(const json_t *schema, const json_t *value, const char *path,
	unsigned int depth, struct err *err)
{
	const json_t *properties = json_object_get(schema, "properties");
	const json_t *more = json_object_get(schema, "additionalProperties");
	const json_t *required = json_object_get(schema, "required"), *name, *member;
	char below[PATH_BYTES];
	const char *key;
	size_t i;
	int r = 0;

	json_array_foreach(required, i, name)
	{
		if (json_object_get(value, json_string_value(name)))
			continue;
		join(below, path, json_string_value(name));
		return err_set(err, -EINVAL, "%s: missing", below);
	}
	json_object_foreach((json_t *)value, key, member)
	{
		const json_t *known = json_object_get(properties, key);

		join(below, path, key);
		if (!known && json_is_false(more))
			return err_set(err, -EINVAL, "%s: there is no such argument", below);
		if (known || json_is_object(more))
			r = check(known ? known : more, member, below, depth + 1, err);
		if (r < 0)
			return r;
	}
	return check_range(schema, "minProperties", "maxProperties",
		(double)json_object_size(value), path[0] ? path : "arguments", " members", err);
}

static int check_array(const json_t *schema, const json_t *value, const char *path,
	unsigned int depth, struct err *err)
{
	const json_t *items = json_object_get(schema, "items"), *item;
	char below[PATH_BYTES];
	size_t i;
	int r = check_range(schema, "minItems", "maxItems", (double)json_array_size(value), path,
		" items", err);

	json_array_foreach(value, i, item)
	{
		if (r < 0 || !items)
			break;
		snprintf(below, sizeof(below), "%.100s[%zu]", path, i);
		r = check(items, item, below, depth + 1, err);
	}
	return r;
}

static int check_enum(const json_t *schema, const json_t *value, const char *path, struct err *err)
{
	const json_t *all = json_object_get(schema, "enum"), *one;
	char list[200] = "";
	size_t i;

	if (!all)
		return 0;
	json_array_foreach(all, i, one)
	{
		size_t len = strlen(list);

		if (json_equal(one, value))
			return 0;
		snprintf(list + len, sizeof(list) - len, "%s%s", i ? ", " : "",
			json_string_value(one));
	}
	return err_set(err, -EINVAL, "%s: one of %s", path, list);
}

static int check(const json_t *schema, const json_t *value, const char *path, unsigned int depth,
	struct err *err)
{
	const char *type = json_string_value(json_object_get(schema, "type"));
	const char *name = path[0] ? path : "arguments";
	int r;

	if (depth > DEPTH_MAX)
		return err_set(err, -EINVAL, "%s: too deep", name);
	if (type && !is_type(type, value))
		return err_set(err, -EINVAL, "%s: not of type %s", name, type);
	r = check_enum(schema, value, name, err);
	if (r < 0)
		return r;
	if (json_is_object(value))
		return check_object(schema, value, path, depth, err);
	if (json_is_array(value))
		return check_array(schema, value, name, depth, err);
	if (json_is_string(value))
		return check_range(schema, "minLength", "maxLength", (double)letters(value), name,
			" characters", err);
	if (json_is_number(value))
		return check_range(
			schema, "minimum", "maximum", json_number_value(value), name, "", err);
	return 0;
}

int schema_check(const json_t *schema, const json_t *value, struct err *err)
{
	return check(schema, value, "", 0, err);
}

// --- Whether it is one of ours ---------------------------------------------------------------

static bool is_word(const char *word, const char *const *words, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		if (!strcmp(word, words[i]))
			return true;
	return false;
}

static int known(const json_t *schema, unsigned int depth, struct err *err)
{
	static const char *const words[] = {"type", "enum", "properties", "required",
		"additionalProperties", "items", "minItems", "maxItems", "minLength", "maxLength",
		"minimum", "maximum", "minProperties", "maxProperties", "description", "default"};
	const char *type = json_string_value(json_object_get(schema, "type"));
	const json_t *more = json_object_get(schema, "additionalProperties");
	const json_t *items = json_object_get(schema, "items");
	const json_t *properties = json_object_get(schema, "properties"), *value;
	const json_t *required = json_object_get(schema, "required");
	const char *key;
	size_t i;
	int r = 0;

	if (!json_is_object(schema) || depth > DEPTH_MAX || !type ||
		!is_word(type, types, ARRAY_SIZE(types)))
		return err_set(err, -EINVAL, "a schema without a type, or too deep");
	json_object_foreach((json_t *)schema, key,
		value) if (!is_word(key, words, ARRAY_SIZE(words))) return err_set(err, -EINVAL,
		"%s is not known", key);
	if (!strcmp(type, "object") && !json_is_false(more) && !json_is_object(more))
		return err_set(err, -EINVAL, "an object that may have any member");
	if (!strcmp(type, "array") && !items)
		return err_set(err, -EINVAL, "an array of anything");
	json_array_foreach(
		required, i, value) if (!json_object_get(properties,
						json_string_value(value))) return err_set(err,
		-EINVAL, "%s is required and not described", json_string_value(value));
	json_object_foreach((json_t *)properties, key, value)
	{
		r = known(value, depth + 1, err);
		if (r < 0)
			return err_wrap(err, r, "%s", key);
	}
	if (items)
		r = known(items, depth + 1, err);
	if (r == 0 && json_is_object(more))
		r = known(more, depth + 1, err);
	return r;
}

int schema_known(const json_t *schema, struct err *err)
{
	return known(schema, 0, err);
}
