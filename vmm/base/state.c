// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding by tables; see the header. Pure; the thread that owns the object.
#include "vmm/base/state.h"

#include <errno.h>
#include <stdlib.h>

#include "vmm/base/bytes.h"

static uint32_t elements(const struct state_field *field, const void *obj)
{
	uint32_t nr = field->nr;

	if (field->counted) {
		memcpy(&nr, (const uint8_t *)obj + field->count_off, sizeof(nr));
		ASSERT(nr <= field->nr);
	}
	return nr;
}

// --- Encoding --------------------------------------------------------------------------------

static void append_name(struct buf *out, const char *name)
{
	const size_t len = strlen(name);
	const uint8_t len8 = (uint8_t)len;

	ASSERT(len > 0 && len <= UINT8_MAX);
	buf_append(out, &len8, sizeof(len8));
	buf_append(out, name, len);
}

// Room for a length that is known later.
static size_t begin_length(struct buf *out)
{
	buf_append_le32(out, 0);
	return out->len;
}

static void end_length(struct buf *out, size_t at)
{
	if (buf_error(out))
		return;
	ASSERT(out->len - at <= UINT32_MAX);
	put_le32(out->data + at - sizeof(uint32_t), (uint32_t)(out->len - at));
}

static void put_uint(uint8_t *le, const uint8_t *native, size_t bytes)
{
	uint16_t v16;
	uint32_t v32;
	uint64_t v64;

	switch (bytes) {
	case 1:
		*le = *native;
		return;
	case 2:
		memcpy(&v16, native, sizeof(v16));
		put_le16(le, v16);
		return;
	case 4:
		memcpy(&v32, native, sizeof(v32));
		put_le32(le, v32);
		return;
	default:
		ASSERT(bytes == 8);
		memcpy(&v64, native, sizeof(v64));
		put_le64(le, v64);
		return;
	}
}

static void encode_object(const struct state_table *table, const uint8_t *obj, struct buf *out);

static void encode_field(const struct state_field *field, const uint8_t *obj, struct buf *out)
{
	const uint8_t *at = obj + field->off;
	const uint32_t nr = elements(field, obj);
	size_t begin, nested;
	uint8_t le[8];

	append_name(out, field->name);
	begin = begin_length(out);
	if (field->kind == STATE_KIND_BYTES)
		buf_append(out, at, nr);
	for (uint32_t i = 0; i < nr && field->kind != STATE_KIND_BYTES; i++) {
		if (field->kind == STATE_KIND_NESTED) {
			ASSERT(field->table->size_bytes == field->elem_bytes);
			nested = begin_length(out);
			encode_object(field->table, at, out);
			end_length(out, nested);
		} else {
			put_uint(le, at, field->elem_bytes);
			buf_append(out, le, field->elem_bytes);
		}
		at += field->elem_bytes;
	}
	end_length(out, begin);
}

static void encode_object(const struct state_table *table, const uint8_t *obj, struct buf *out)
{
	append_name(out, table->name);
	for (uint32_t i = 0; i < table->nr_fields; i++)
		if (table->fields[i].kind != STATE_KIND_TRANSIENT)
			encode_field(&table->fields[i], obj, out);
}

int state_encode(const struct state_table *table, const void *obj, struct buf *out)
{
	const size_t before = out->len;

	encode_object(table, obj, out);
	if (buf_error(out))
		out->len = before;
	return buf_error(out);
}

// --- Decoding --------------------------------------------------------------------------------

struct input {
	const uint8_t *at;
	size_t left;
};

// The next len bytes; NULL if there are fewer.
static const uint8_t *take(struct input *in, size_t len)
{
	const uint8_t *at = in->at;

	if (len > in->left)
		return NULL;
	in->at += len;
	in->left -= len;
	return at;
}

static bool take_length(struct input *in, uint32_t *ret_len)
{
	const uint8_t *raw = take(in, sizeof(uint32_t));

	if (raw)
		*ret_len = get_le32(raw);
	return raw != NULL;
}

// Neither empty nor longer than the data. What it points to is not a string.
static bool take_name(struct input *in, const char **ret_name, uint8_t *ret_len)
{
	const uint8_t *len = take(in, 1);
	const uint8_t *name = len && *len ? take(in, *len) : NULL;

	if (!name)
		return false;
	*ret_name = (const char *)name;
	*ret_len = *len;
	return true;
}

static bool is_name(const char *name, uint8_t len, const char *of)
{
	return strlen(of) == len && memcmp(name, of, len) == 0;
}

// A name that somebody else has chosen, for a message.
static const char *printable(const char *name, uint8_t len, char text[UINT8_MAX + 1])
{
	for (uint8_t i = 0; i < len; i++)
		text[i] = name[i] >= ' ' && name[i] <= '~' ? name[i] : '?';
	text[len] = '\0';
	return text;
}

static void get_uint(uint8_t *native, const uint8_t *le, size_t bytes)
{
	uint16_t v16;
	uint32_t v32;
	uint64_t v64;

	switch (bytes) {
	case 1:
		*native = *le;
		return;
	case 2:
		v16 = get_le16(le);
		memcpy(native, &v16, sizeof(v16));
		return;
	case 4:
		v32 = get_le32(le);
		memcpy(native, &v32, sizeof(v32));
		return;
	default:
		ASSERT(bytes == 8);
		v64 = get_le64(le);
		memcpy(native, &v64, sizeof(v64));
		return;
	}
}

static int decode_object(
	const struct state_table *table, struct input in, uint8_t *obj, struct err *err);

static int decode_nested(
	const struct state_field *field, struct input in, uint8_t *obj, struct err *err)
{
	uint32_t nr = 0;

	ASSERT(field->table->size_bytes == field->elem_bytes);
	for (; in.left; nr++) {
		struct input one;
		uint32_t len = 0;
		int r;

		if (nr == field->nr)
			return err_set(err, -EINVAL, "%s: more than %u elements", field->name, nr);
		if (!take_length(&in, &len) || !(one.at = take(&in, len)))
			return err_set(err, -EINVAL, "%s: cut short", field->name);
		one.left = len;
		r = decode_object(
			field->table, one, obj + field->off + (size_t)nr * field->elem_bytes, err);
		if (r < 0)
			return err_wrap(err, r, "%s %u", field->name, nr);
	}
	if (field->counted)
		memcpy(obj + field->count_off, &nr, sizeof(nr));
	else if (nr != field->nr)
		return err_set(
			err, -EINVAL, "%s: %u elements instead of %u", field->name, nr, field->nr);
	return 0;
}

static int decode_field(
	const struct state_field *field, struct input in, uint8_t *obj, struct err *err)
{
	uint8_t *at = obj + field->off;

	if (field->kind == STATE_KIND_NESTED)
		return decode_nested(field, in, obj, err);
	if (in.left != field->nr * field->elem_bytes)
		return err_set(err, -EINVAL, "%s: %zu bytes instead of %zu", field->name, in.left,
			field->nr * field->elem_bytes);
	while (in.left) {
		const size_t part = field->kind == STATE_KIND_BYTES ? in.left : field->elem_bytes;
		const uint8_t *le = take(&in, part);
		uint8_t native[8];

		if (field->kind == STATE_KIND_BOOL && *le > 1)
			return err_set(err, -EINVAL, "%s: %u is not a bool", field->name, *le);
		if (field->kind != STATE_KIND_BYTES) {
			get_uint(native, le, part);
			le = native;
		}
		if (field->fixed && memcmp(at, le, part) != 0)
			return err_set(
				err, -EINVAL, "%s: not what this one was made with", field->name);
		memcpy(at, le, part);
		at += part;
	}
	return 0;
}

static int decode_object(
	const struct state_table *table, struct input in, uint8_t *obj, struct err *err)
{
	bool seen[STATE_FIELDS_MAX] = {false};
	char text[UINT8_MAX + 1];
	const char *name;
	uint8_t name_len;

	ASSERT(table->nr_fields <= STATE_FIELDS_MAX);
	if (!take_name(&in, &name, &name_len))
		return err_set(err, -EINVAL, "%s: cut short", table->name);
	if (!is_name(name, name_len, table->name))
		return err_set(err, -EINVAL, "state of %s where %s is expected",
			printable(name, name_len, text), table->name);
	while (in.left) {
		struct input value;
		uint32_t len, i = 0;
		int r;

		if (!take_name(&in, &name, &name_len) || !take_length(&in, &len) ||
			!(value.at = take(&in, len)))
			return err_set(err, -EINVAL, "%s: cut short", table->name);
		value.left = len;
		while (i < table->nr_fields &&
			(table->fields[i].kind == STATE_KIND_TRANSIENT ||
				!is_name(name, name_len, table->fields[i].name)))
			i++;
		if (i == table->nr_fields)
			return err_set(err, -EINVAL,
				"%s.%s: not known to this version (is it from a newer one?)",
				table->name, printable(name, name_len, text));
		if (seen[i])
			return err_set(
				err, -EINVAL, "%s.%s: twice", table->name, table->fields[i].name);
		seen[i] = true;
		r = decode_field(&table->fields[i], value, obj, err);
		if (r < 0)
			return err_wrap(err, r, "%s", table->name);
	}
	if (table->validate) {
		int r = table->validate(obj, err);

		if (r < 0)
			return err_wrap(err, r, "%s", table->name);
	}
	return 0;
}

// Copies what is saved and nothing else.
static void commit(const struct state_table *table, const uint8_t *from, uint8_t *to)
{
	for (uint32_t i = 0; i < table->nr_fields; i++) {
		const struct state_field *field = &table->fields[i];
		size_t off = field->off;

		if (field->kind == STATE_KIND_TRANSIENT)
			continue;
		if (field->counted)
			memcpy(to + field->count_off, from + field->count_off, sizeof(uint32_t));
		if (field->kind != STATE_KIND_NESTED) {
			memcpy(to + off, from + off, field->nr * field->elem_bytes);
			continue;
		}
		for (uint32_t k = 0; k < field->nr; k++, off += field->elem_bytes)
			commit(field->table, from + off, to + off);
	}
}

int state_decode(
	const struct state_table *table, const void *data, size_t len, void *obj, struct err *err)
{
	CLEANUP_FREE uint8_t *temp = malloc(table->size_bytes);
	int r;

	if (!temp)
		return err_errno(err, -ENOMEM, "%s", table->name);
	memcpy(temp, obj, table->size_bytes);
	r = decode_object(table, (struct input){data, len}, temp, err);
	if (r == 0)
		commit(table, temp, obj);
	return r;
}

// --- The check of a table --------------------------------------------------------------------

static int cover(const struct state_table *table, uint8_t *times, const char *name, size_t off,
	size_t len, struct err *err)
{
	if (off > table->size_bytes || len > table->size_bytes - off)
		return err_set(err, -EINVAL, "%s.%s: beyond the end", table->name, name);
	for (size_t i = off; i < off + len; i++)
		if (times[i]++)
			return err_set(err, -EINVAL, "%s.%s: byte %zu is another field's, too",
				table->name, name, i);
	return 0;
}

static int check_field(const struct state_table *table, const struct state_field *field,
	uint8_t *times, struct err *err)
{
	int r = cover(table, times, field->name, field->off, field->nr * field->elem_bytes, err);

	if (r == 0 && field->counted)
		r = cover(table, times, field->name, field->count_off, sizeof(uint32_t), err);
	if (r == 0 && field->kind == STATE_KIND_TRANSIENT && (!field->reason || !*field->reason))
		r = err_set(err, -EINVAL, "%s.%s: why is it not saved?", table->name, field->name);
	if (r < 0 || field->kind != STATE_KIND_NESTED)
		return r;
	if (field->table->size_bytes != field->elem_bytes)
		return err_set(
			err, -EINVAL, "%s.%s: another struct's table", table->name, field->name);
	return state_check(field->table, err);
}

static const char *field_before(const struct state_table *table, size_t at)
{
	const struct state_field *best = NULL;

	for (uint32_t i = 0; i < table->nr_fields; i++)
		if (table->fields[i].off < at && (!best || table->fields[i].off > best->off))
			best = &table->fields[i];
	return best ? best->name : "nothing";
}

int state_check(const struct state_table *table, struct err *err)
{
	CLEANUP_FREE uint8_t *times = calloc(1, table->size_bytes);

	if (!times)
		return err_errno(err, -ENOMEM, "%s", table->name);
	if (table->nr_fields > STATE_FIELDS_MAX)
		return err_set(err, -EINVAL, "%s: too many fields", table->name);
	for (uint32_t i = 0; i < table->nr_fields; i++) {
		int r = check_field(table, &table->fields[i], times, err);

		if (r < 0)
			return r;
		for (uint32_t k = 0; k < i; k++)
			if (strcmp(table->fields[i].name, table->fields[k].name) == 0)
				return err_set(err, -EINVAL, "%s.%s: declared twice", table->name,
					table->fields[i].name);
	}
	for (size_t i = 0; i < table->size_bytes; i++)
		if (!times[i])
			return err_set(err, -EINVAL,
				"%s: byte %zu of %zu, behind %s, is neither saved nor transient",
				table->name, i, table->size_bytes, field_before(table, i));
	return 0;
}
