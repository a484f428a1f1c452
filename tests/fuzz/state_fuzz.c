// SPDX-License-Identifier: Apache-2.0
// Fuzzes the decoder of saved state. What it accepts, encoded and decoded again, is the same; what
// it refuses has changed nothing.
//
// Input: the encoded object itself.
#include "tests/support/fuzz_input.h"
#include "tests/support/state_sample.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct sample before = {.u8 = 1, .nr_tags = 1, .tags = {{2, "abc", 3}}};

static struct buf encode(const struct sample *s)
{
	struct buf out = {0};

	FUZZ_CHECK(state_encode(&sample_state, s, &out) == 0);
	return out;
}

static void same(const struct sample *a, const struct sample *b)
{
	struct buf x = encode(a), y = encode(b);

	FUZZ_CHECK(x.len == y.len && memcmp(x.data, y.data, x.len) == 0);
	buf_fini(&x);
	buf_fini(&y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct sample got = before, again = before;
	struct err err = {0};
	struct buf out;

	if (state_decode(&sample_state, data, size, &got, &err) < 0) {
		FUZZ_CHECK(err.code < 0 && err.msg[0]);
		same(&got, &before);
		return 0;
	}
	FUZZ_CHECK(got.u32 != 13 && got.nr_tags <= SAMPLE_TAGS_MAX && !got.opaque);
	FUZZ_CHECK(got.tags[0].watch == 3);
	out = encode(&got);
	FUZZ_CHECK(state_decode(&sample_state, out.data, out.len, &again, &err) == 0);
	same(&got, &again);
	buf_fini(&out);
	return 0;
}
