// SPDX-License-Identifier: Apache-2.0
// Numbers with units; see the header. Any thread.
#include "vmm/base/parse.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

// Digits at the start of text; *ret_end is what follows them.
static int digits(const char *text, uint64_t *ret, const char **ret_end, struct err *err)
{
	uint64_t value = 0;
	const char *p = text;

	if (!isdigit((unsigned char)*p))
		return err_set(err, -EINVAL, "'%.40s' is not a number", text);
	for (; isdigit((unsigned char)*p); p++)
		if (__builtin_mul_overflow(value, 10, &value) ||
			__builtin_add_overflow(value, (uint64_t)(*p - '0'), &value))
			return err_set(err, -ERANGE, "'%.40s' is too large", text);
	*ret = value;
	*ret_end = p;
	return 0;
}

int parse_uint(const char *text, uint64_t min, uint64_t max, uint64_t *ret, struct err *err)
{
	const char *end;
	uint64_t value = 0;
	int r = digits(text, &value, &end, err);

	if (r < 0)
		return r;
	if (*end)
		return err_set(err, -EINVAL, "'%.40s' is not a whole number", text);
	if (value < min || value > max)
		return err_set(err, -ERANGE, "%s is not between %llu and %llu", text,
			(unsigned long long)min, (unsigned long long)max);
	*ret = value;
	return 0;
}

int parse_size(const char *text, uint64_t *ret_bytes, struct err *err)
{
	static const char units[] = "KMGT";
	const char *end = text, *unit;
	uint64_t value = 0;
	int r = digits(text, &value, &end, err);

	if (r == -ERANGE)
		return r;
	unit = r == 0 && *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
	if (!unit || (strcmp(end + 1, "") && strcmp(end + 1, "iB") && strcmp(end + 1, "B")))
		return err_set(
			err, -EINVAL, "'%.40s' is not a size (write it like 512M or 2G)", text);
	if (__builtin_mul_overflow(value, KIB << 10 * (unit - units), &value))
		return err_set(err, -ERANGE, "'%.40s' is too large", text);
	*ret_bytes = value;
	return 0;
}

int parse_duration(const char *text, uint64_t *ret_ns, struct err *err)
{
	static const struct {
		const char *unit;
		uint64_t ns;
	} units[] = {
		{"", 1000000000ULL},
		{"ms", 1000000ULL},
		{"s", 1000000000ULL},
		{"m", 60 * 1000000000ULL},
		{"h", 3600 * 1000000000ULL},
		{"d", 86400 * 1000000000ULL},
	};
	const char *end = text;
	uint64_t value = 0;
	int r = digits(text, &value, &end, err);

	if (r == -ERANGE)
		return r;
	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(units); i++) {
		if (strcmp(end, units[i].unit))
			continue;
		if (__builtin_mul_overflow(value, units[i].ns, &value) || value > INT64_MAX)
			return err_set(err, -ERANGE, "'%.40s' is too long", text);
		*ret_ns = value;
		return 0;
	}
	return err_set(
		err, -EINVAL, "'%.40s' is not a duration (write it like 30s, 500ms or 5m)", text);
}
