// SPDX-License-Identifier: Apache-2.0
// Little-endian fields and guest physical addresses as types of their own, so that the compiler
// refuses to mix them with plain integers. Any thread.
#ifndef MAYFLY_BASE_BYTES_H
#define MAYFLY_BASE_BYTES_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

typedef struct {
	uint16_t v;
} le16_t;
typedef struct {
	uint32_t v;
} le32_t;
typedef struct {
	uint64_t v;
} le64_t;

static inline uint16_t le16_get(le16_t x)
{
	return le16toh(x.v);
}
static inline uint32_t le32_get(le32_t x)
{
	return le32toh(x.v);
}
static inline uint64_t le64_get(le64_t x)
{
	return le64toh(x.v);
}
static inline le16_t le16_of(uint16_t x)
{
	return (le16_t){htole16(x)};
}
static inline le32_t le32_of(uint32_t x)
{
	return (le32_t){htole32(x)};
}
static inline le64_t le64_of(uint64_t x)
{
	return (le64_t){htole64(x)};
}

// The same at any alignment in a byte buffer; the caller has checked that the bytes are there.
static inline uint16_t get_le16(const void *p)
{
	le16_t x;

	memcpy(&x, p, sizeof(x));
	return le16_get(x);
}
static inline uint32_t get_le32(const void *p)
{
	le32_t x;

	memcpy(&x, p, sizeof(x));
	return le32_get(x);
}
static inline uint64_t get_le64(const void *p)
{
	le64_t x;

	memcpy(&x, p, sizeof(x));
	return le64_get(x);
}
static inline void put_le16(void *p, uint16_t v)
{
	le16_t x = le16_of(v);

	memcpy(p, &x, sizeof(x));
}
static inline void put_le32(void *p, uint32_t v)
{
	le32_t x = le32_of(v);

	memcpy(p, &x, sizeof(x));
}
static inline void put_le64(void *p, uint64_t v)
{
	le64_t x = le64_of(v);

	memcpy(p, &x, sizeof(x));
}

// A guest physical address.
typedef struct {
	uint64_t v;
} gpa_t;

#define GPA(x) ((gpa_t){(x)})

#endif
