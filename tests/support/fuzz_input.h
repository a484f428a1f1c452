// SPDX-License-Identifier: Apache-2.0
// A fuzzer's input as a stream of values; zeros once it is used up.
#ifndef MAYFLY_TESTS_FUZZ_INPUT_H
#define MAYFLY_TESTS_FUZZ_INPUT_H

#include <stdio.h>
#include <stdlib.h>

#include "vmm/base/bytes.h"
#include "vmm/base/util.h"

struct fuzz_input {
	const uint8_t *data;
	size_t left;
};

static inline uint64_t fuzz_take(struct fuzz_input *in, unsigned int bytes)
{
	uint8_t raw[8] = {0};
	size_t n = MIN(in->left, (size_t)bytes);

	if (!n)
		return 0;
	memcpy(raw, in->data, n);
	in->data += n;
	in->left -= n;
	return get_le64(raw);
}

static inline uint8_t fuzz_u8(struct fuzz_input *in)
{
	return (uint8_t)fuzz_take(in, 1);
}
static inline uint16_t fuzz_u16(struct fuzz_input *in)
{
	return (uint16_t)fuzz_take(in, 2);
}
static inline uint32_t fuzz_u32(struct fuzz_input *in)
{
	return (uint32_t)fuzz_take(in, 4);
}

#define FUZZ_CHECK(cond)                                                                         \
	do {                                                                                     \
		if (!(cond)) {                                                                   \
			fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #cond); \
			abort();                                                                 \
		}                                                                                \
	} while (0)

#endif
