// SPDX-License-Identifier: Apache-2.0
// A struct with a field of each kind, and its table, for the tests of saved state. Pure.
#ifndef MAYFLY_TESTS_STATE_SAMPLE_H
#define MAYFLY_TESTS_STATE_SAMPLE_H

#include <errno.h>

#include "vmm/base/state.h"

#define SAMPLE_TAGS_MAX 4

struct sample_tag {
	uint16_t id;
	char text[6];
	int watch; // not saved
};

struct sample {
	unsigned long long u64;
	uint32_t u32;
	_Atomic uint32_t atomic_u32;
	uint8_t u8;
	bool flag;
	uint16_t u16;
	uint32_t nr_tags;
	uint16_t u16s[3];
	char bytes[5];
	uint8_t unused[1];
	uint32_t fixed_u32;
	char fixed_bytes[8];
	struct {
		uint32_t size;
	} saved;
	struct sample_tag one;
	struct sample_tag two[2];
	struct sample_tag tags[SAMPLE_TAGS_MAX];
	void *opaque; // not saved
};

static inline int sample_validate(const void *decoded, struct err *err)
{
	const struct sample *s = decoded;

	return s->u32 == 13 ? err_set(err, -ERANGE, "u32 is 13") : 0;
}

STATE_TABLE(static, sample_tag_state, struct sample_tag, "tag", NULL,
	STATE_U16(struct sample_tag, id), STATE_BYTES(struct sample_tag, text),
	STATE_TRANSIENT(struct sample_tag, watch, "of this process"));

STATE_TABLE(static, sample_state, struct sample, "sample", sample_validate,
	STATE_U8(struct sample, u8), STATE_U16(struct sample, u16), STATE_U32(struct sample, u32),
	STATE_U32(struct sample, atomic_u32), STATE_U64(struct sample, u64),
	STATE_BOOL(struct sample, flag), STATE_BYTES(struct sample, bytes),
	STATE_U16S(struct sample, u16s), STATE_U32(struct sample, saved.size),
	STATE_FIXED_U32(struct sample, fixed_u32), STATE_FIXED_BYTES(struct sample, fixed_bytes),
	STATE_NESTED(struct sample, one, &sample_tag_state),
	STATE_NESTEDS(struct sample, two, &sample_tag_state),
	STATE_NESTEDS_COUNTED(struct sample, tags, nr_tags, &sample_tag_state),
	STATE_TRANSIENT(struct sample, unused, "padding"),
	STATE_TRANSIENT(struct sample, opaque, "of this process"));

#endif
