// SPDX-License-Identifier: Apache-2.0
// snapshot/working_set: what was written is read again; nothing else is, whatever is damaged.
#include "tests/support/test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "snapshot/memory.h"
#include "snapshot/working_set.h"
#include "vmm/base/fd.h"

#define RAM_BYTES (96 * MIB)

static const struct snapshot_id id = {{1, 2, 3}}, other = {{1, 2, 4}};

static struct working_set sample(uint32_t nr)
{
	struct working_set set = {.nr = nr};

	for (uint32_t i = 0; i < nr; i++)
		set.frames[i] = (i * 37 + 5) % (uint32_t)memory_frames(RAM_BYTES);
	return set;
}

static void what_is_written_is_read(void **state)
{
	static const uint32_t sizes[] = {0, 1, 300, WORKING_SET_FRAMES_MAX};
	FILE *file = tmpfile();
	(void)state;

	assert_non_null(file);
	// A longer one first: what it leaves is gone.
	for (size_t i = ARRAY_SIZE(sizes); i-- > 0;) {
		struct working_set set = sample(sizes[i]), got = {.nr = 77};

		assert_int_equal(working_set_write(fileno(file), &set, &id, RAM_BYTES), 0);
		assert_int_equal(working_set_read(&got, fileno(file), &id, RAM_BYTES), 0);
		assert_int_equal(got.nr, set.nr);
		assert_memory_equal(got.frames, set.frames, set.nr * sizeof(set.frames[0]));
	}
	fclose(file);
}

static int parse(const struct buf *file, size_t len)
{
	struct working_set got = {.nr = 77};
	int r = working_set_parse(&got, file->data, len, &id, RAM_BYTES);

	assert_true(r == 0 || got.nr == 77);
	return r;
}

static void what_is_damaged_is_refused(void **state)
{
	struct working_set set = sample(20);
	CLEANUP_BUF struct buf file = {0};
	struct working_set got;
	(void)state;

	working_set_encode(&set, &id, RAM_BYTES, &file);
	assert_int_equal(parse(&file, file.len), 0);
	for (size_t len = 0; len < file.len; len++)
		assert_int_equal(parse(&file, len), -EBADMSG);
	for (size_t i = 0; i < file.len * 8; i++) {
		file.data[i / 8] ^= (uint8_t)(1U << i % 8);
		assert_int_equal(parse(&file, file.len), -EBADMSG);
		file.data[i / 8] ^= (uint8_t)(1U << i % 8);
	}
	assert_int_equal(working_set_parse(&got, file.data, file.len, &other, RAM_BYTES), -EBADMSG);
	assert_int_equal(
		working_set_parse(&got, file.data, file.len, &id, 2 * RAM_BYTES), -EBADMSG);
	buf_append(&file, "", 1);
	assert_int_equal(parse(&file, file.len), -EBADMSG);
}

// With a checksum that is right: a stranger's.
static void a_frame_beyond_ram_is_refused(void **state)
{
	struct working_set set = sample(3);
	CLEANUP_BUF struct buf file = {0};
	(void)state;

	set.frames[2] = (uint32_t)memory_frames(RAM_BYTES) - 1;
	working_set_encode(&set, &id, RAM_BYTES, &file);
	assert_int_equal(parse(&file, file.len), 0);
	set.frames[2]++;
	file.len = 0;
	working_set_encode(&set, &id, RAM_BYTES, &file);
	assert_int_equal(parse(&file, file.len), -EBADMSG);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_written_is_read),
		cmocka_unit_test(what_is_damaged_is_refused),
		cmocka_unit_test(a_frame_beyond_ram_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
