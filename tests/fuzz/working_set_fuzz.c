// SPDX-License-Identifier: Apache-2.0
// Fuzzes the file of a working set: it is refused, or all in it lies within RAM and is encoded to
// the same bytes again.
//
// Input: a flag (1: as it is), then the file, whose magic, id, sizes and checksum are put right
// unless the flag says no.
#include <errno.h>

#include "snapshot/memory.h"
#include "snapshot/working_set.h"
#include "tests/support/fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RAM_BYTES    (64 * MIB)
#define HEADER_BYTES 48U

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct snapshot_id id = {{7}};
	static struct working_set set;
	CLEANUP_BUF struct buf again = {0};
	struct fuzz_input in = {data, size};
	bool raw = fuzz_u8(&in) & 1;
	uint8_t *file = malloc(MAX(in.left, (size_t)1));
	int r;

	FUZZ_CHECK(file);
	memcpy(file, in.data, in.left);
	if (!raw && in.left >= HEADER_BYTES) {
		memcpy(file, "mayflyWS", 8);
		memcpy(file + 8, id.bytes, sizeof(id.bytes));
		put_le64(file + 24, RAM_BYTES);
		put_le64(file + 32, (in.left - HEADER_BYTES) / 4);
		put_le64(file + 40, 0);
		put_le64(file + 40, image_checksum(file, in.left));
	}
	r = working_set_parse(&set, file, in.left, &id, RAM_BYTES);
	FUZZ_CHECK(r == 0 || r == -EBADMSG);
	if (r == 0) {
		FUZZ_CHECK(set.nr <= WORKING_SET_FRAMES_MAX);
		for (uint32_t i = 0; i < set.nr; i++)
			FUZZ_CHECK(set.frames[i] < memory_frames(RAM_BYTES));
		working_set_encode(&set, &id, RAM_BYTES, &again);
		FUZZ_CHECK(again.len == in.left && memcmp(again.data, file, in.left) == 0);
	}
	free(file);
	return 0;
}
