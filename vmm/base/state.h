// SPDX-License-Identifier: Apache-2.0
// Saved state, declared: a table a struct, a line a field. Each field is either saved, with its
// type checked by the compiler, or transient, with the reason why. Pure; the thread that owns the
// object.
//
//   STATE_TABLE(static, clock_state, struct clock, "clock", clock_validate,
//           STATE_U64(struct clock, now_ns),
//           STATE_TRANSIENT(struct clock, fd, "opened anew"));
//
// The encoding is self-describing and little-endian:
//
//   object: u8 length and bytes of the table's name, then fields until its end
//   field:  u8 length and bytes of the field's name, u32 length of the value, the value
//   value:  integers as wide as declared, one after another; bool as one byte, 0 or 1; bytes as
//   they
//           are; for each nested object a u32 length and the object
//
// The rule across versions: a version reads what older ones have written. A field that is not in
// the data keeps what the object has, so a new field's value in a freshly made object must stand
// for what older versions did. A field is never renamed or given another type or length, nor
// removed while it matters. What is not in the table (from a newer version) is refused by name.
//
// The data may come from anybody. state_decode() reads into a temporary, has the tables' validate()
// look at it, and only then commits; on failure the object is as it was.
#ifndef MAYFLY_BASE_STATE_H
#define MAYFLY_BASE_STATE_H

#include "vmm/base/buf.h"
#include "vmm/base/err.h"

#define STATE_FIELDS_MAX 128

enum state_kind {
	STATE_KIND_UINT,
	STATE_KIND_BOOL,
	STATE_KIND_BYTES,
	STATE_KIND_NESTED,
	STATE_KIND_TRANSIENT,
};

struct state_field {
	const char *name; // as in the struct
	enum state_kind kind;
	size_t off;
	size_t elem_bytes;
	uint32_t nr; // elements; of a counted array, room for them
	bool fixed; // compared, not overwritten
	bool counted; // only the first ones are in use: as many as the uint32_t at count_off says
	size_t count_off;
	const struct state_table *table; // nested
	const char *reason; // transient
};

struct state_table {
	const char *name;
	size_t size_bytes;
	const struct state_field *fields;
	uint32_t nr_fields; // at most STATE_FIELDS_MAX
	// Whether the decoded struct may be used: 0, or a negative errno with *err filled. The
	// fields that are not saved are as in the object. May be NULL.
	int (*validate)(const void *decoded, struct err *err);
};

// Appends the object. 0 or -ENOMEM; then out is as it was, but failed.
int state_encode(const struct state_table *table, const void *obj, struct buf *out);

// -EINVAL for data that is not such an object, with the field named; -ENOMEM; or what validate()
// says.
int state_decode(
	const struct state_table *table, const void *data, size_t len, void *obj, struct err *err);

// Whether every byte of the struct is declared once, and of what is nested as well. A struct with a
// table has no holes, in which a forgotten field could hide: where its fields leave one, it has a
// member of that size, which is transient. 0, or -EINVAL with the byte and what is before it. For
// tests.
int state_check(const struct state_table *table, struct err *err);

// --- Tables ----------------------------------------------------------------------------------

// storage: static, or nothing where a header declares the table. validate_: a function or NULL.
// Then the fields.
#define STATE_TABLE(storage, var, type, name_, validate_, ...)                   \
	storage const struct state_table var = {                                 \
		.name = (name_),                                                 \
		.size_bytes = sizeof(type),                                      \
		.fields = (const struct state_field[]){__VA_ARGS__},             \
		.nr_fields = sizeof((const struct state_field[]){__VA_ARGS__}) / \
			     sizeof(struct state_field),                         \
		.validate = (validate_),                                         \
	}

#define STATE_MEMBER_(type, field) (((type *)0)->field)

// Zero, if the compiler finds the pointer's type among those named.
#define STATE_IS_U8_(p)  (0 * sizeof(_Generic((p), uint8_t * : 0)))
#define STATE_IS_U16_(p) (0 * sizeof(_Generic((p), uint16_t * : 0)))
#define STATE_IS_U32_(p) (0 * sizeof(_Generic((p), uint32_t * : 0, _Atomic(uint32_t) * : 0)))
#define STATE_IS_U64_(p)                                                                     \
	(0 * sizeof(_Generic((p), unsigned long * : 0, unsigned long long * : 0, long * : 0, \
		     long long * : 0)))
#define STATE_IS_BOOL_(p)  (0 * sizeof(_Generic((p), bool * : 0)))
#define STATE_IS_BYTES_(p) (0 * sizeof(_Generic((p), uint8_t * : 0, char * : 0)))

#define STATE_FIELD_(type, field, kind_, bytes, nr_)                                          \
	.name = #field, .kind = (kind_), .off = offsetof(type, field), .elem_bytes = (bytes), \
	.nr = (uint32_t)(nr_)

#define STATE_ONE_(type, field, kind_, is, fixed_)                                                \
	{                                                                                         \
		STATE_FIELD_(type, field, kind_,                                                  \
			sizeof(STATE_MEMBER_(type, field)) + is(&STATE_MEMBER_(type, field)), 1), \
			.fixed = (fixed_),                                                        \
	}
#define STATE_ARRAY_(type, field, kind_, is, fixed_)                    \
	{                                                               \
		STATE_FIELD_(type, field, kind_,                        \
			sizeof(STATE_MEMBER_(type, field)[0]) +         \
				is(&STATE_MEMBER_(type, field)[0]),     \
			sizeof(STATE_MEMBER_(type, field)) /            \
				sizeof(STATE_MEMBER_(type, field)[0])), \
			.fixed = (fixed_),                              \
	}

#define STATE_U8(type, field)   STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U8_, false)
#define STATE_U16(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U16_, false)
#define STATE_U32(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U32_, false)
#define STATE_U64(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U64_, false)
#define STATE_BOOL(type, field) STATE_ONE_(type, field, STATE_KIND_BOOL, STATE_IS_BOOL_, false)

// Arrays of them, whole.
#define STATE_U16S(type, field)  STATE_ARRAY_(type, field, STATE_KIND_UINT, STATE_IS_U16_, false)
#define STATE_U32S(type, field)  STATE_ARRAY_(type, field, STATE_KIND_UINT, STATE_IS_U32_, false)
#define STATE_U64S(type, field)  STATE_ARRAY_(type, field, STATE_KIND_UINT, STATE_IS_U64_, false)
#define STATE_BYTES(type, field) STATE_ARRAY_(type, field, STATE_KIND_BYTES, STATE_IS_BYTES_, false)

// What the object was made with: the data has to say the same, or is refused.
#define STATE_FIXED_U16(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U16_, true)
#define STATE_FIXED_U32(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U32_, true)
#define STATE_FIXED_U64(type, field)  STATE_ONE_(type, field, STATE_KIND_UINT, STATE_IS_U64_, true)
#define STATE_FIXED_BOOL(type, field) STATE_ONE_(type, field, STATE_KIND_BOOL, STATE_IS_BOOL_, true)
#define STATE_FIXED_BYTES(type, field) \
	STATE_ARRAY_(type, field, STATE_KIND_BYTES, STATE_IS_BYTES_, true)

// A struct with a table of its own; an array of them; an array of which the first count are in use,
// a uint32_t that is saved along with it.
#define STATE_NESTED(type, field, table_)                                                       \
	{                                                                                       \
		STATE_FIELD_(                                                                   \
			type, field, STATE_KIND_NESTED, sizeof(STATE_MEMBER_(type, field)), 1), \
			.table = (table_),                                                      \
	}
#define STATE_NESTEDS_(type, field)                                                         \
	STATE_FIELD_(type, field, STATE_KIND_NESTED, sizeof(STATE_MEMBER_(type, field)[0]), \
		sizeof(STATE_MEMBER_(type, field)) / sizeof(STATE_MEMBER_(type, field)[0]))
#define STATE_NESTEDS(type, field, table_)                      \
	{                                                       \
		STATE_NESTEDS_(type, field), .table = (table_), \
	}
#define STATE_NESTEDS_COUNTED(type, field, count, table_)                        \
	{                                                                        \
		STATE_NESTEDS_(type, field),                                     \
			.table = (table_), .counted = true,                      \
			.count_off = offsetof(type, count) +                     \
				     STATE_IS_U32_(&STATE_MEMBER_(type, count)), \
	}

#define STATE_TRANSIENT(type, field, why)                                                          \
	{                                                                                          \
		STATE_FIELD_(                                                                      \
			type, field, STATE_KIND_TRANSIENT, sizeof(STATE_MEMBER_(type, field)), 1), \
			.reason = (why),                                                           \
	}

#endif
