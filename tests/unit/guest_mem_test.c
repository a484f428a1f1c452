// SPDX-License-Identifier: Apache-2.0
// vmm/guest_mem: every range is checked to its last byte; writes are tracked by page.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/guest_mem.h"

#define LOW_BYTES  (16 * PAGE_BYTES)
#define HIGH_BASE  (4 * GIB)
#define HIGH_BYTES (70 * PAGE_BYTES)

static int setup(void **state)
{
	const struct guest_mem_range ranges[] = {{GPA(0), LOW_BYTES}, {GPA(HIGH_BASE), HIGH_BYTES}};
	struct guest_mem *mem = calloc(1, sizeof(*mem));
	struct err err = {0};

	if (!mem || guest_mem_init(mem, ranges, ARRAY_SIZE(ranges), &err) < 0)
		return -1;
	*state = mem;
	return 0;
}

static int teardown(void **state)
{
	guest_mem_fini(*state);
	guest_mem_fini(*state);
	free(*state);
	return 0;
}

// The property of CVE-2019-18960: not only the start of a range counts.
static void range_ends_are_exact(void **state)
{
	struct guest_mem *mem = *state;
	static const uint64_t bases[] = {0, HIGH_BASE}, sizes[] = {LOW_BYTES, HIGH_BYTES};
	uint8_t buf[64] = {0};

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t end = bases[i] + sizes[i];

		for (size_t len = 1; len <= sizeof(buf); len++) {
			assert_int_equal(guest_mem_read(mem, GPA(end - len), buf, len), 0);
			assert_int_equal(
				guest_mem_read(mem, GPA(end - len + 1), buf, len), -EFAULT);
			assert_int_equal(guest_mem_write(mem, GPA(end - len), buf, len), 0);
			assert_int_equal(
				guest_mem_write(mem, GPA(end - len + 1), buf, len), -EFAULT);
		}
	}
	assert_int_equal(guest_mem_read(mem, GPA(HIGH_BASE - 1), buf, 2), -EFAULT);
	assert_int_equal(guest_mem_read(mem, GPA(UINT64_MAX), buf, 2), -EFAULT);
	assert_int_equal(guest_mem_read(mem, GPA(UINT64_MAX), buf, 0), 0);
	assert_int_equal(guest_mem_read(mem, GPA(8), buf, SIZE_MAX), -EFAULT);
}

static void data_round_trips(void **state)
{
	struct guest_mem *mem = *state;
	struct guest_view view;
	char out[6] = {0};

	assert_int_equal(guest_mem_write(mem, GPA(HIGH_BASE + 5), "hello", 6), 0);
	assert_int_equal(guest_mem_read(mem, GPA(HIGH_BASE + 5), out, 6), 0);
	assert_string_equal(out, "hello");
	assert_int_equal(guest_mem_view(mem, GPA(0x100), 16, &view), 0);
	guest_view_store16(&view, 2, 0x1234);
	assert_int_equal(guest_view_load16(&view, 2), 0x1234);
	assert_int_equal(guest_mem_read(mem, GPA(0x102), out, 2), 0);
	assert_int_equal(out[0], 0x34);
	assert_int_equal(guest_mem_view(mem, GPA(0x100), 0, &view), -EFAULT);
}

static void tracking_marks_each_page_once_collected(void **state)
{
	struct guest_mem *mem = *state;
	uint64_t map[2] = {0};
	uint8_t buf[PAGE_BYTES + 2] = {0};
	struct err err = {0};

	assert_int_equal(guest_mem_track_start(mem, &err), 0);
	assert_int_equal(
		guest_mem_write(mem, GPA(HIGH_BASE + 64 * PAGE_BYTES - 1), buf, sizeof(buf)), 0);
	// The 16 pages of the region below come first.
	guest_mem_track_collect(mem, map);
	assert_true(map[0] == 0);
	assert_true(map[1] == 7ULL << 15);
	map[0] = map[1] = 0;
	guest_mem_track_collect(mem, map);
	assert_true(map[0] == 0 && map[1] == 0);
}

static void files_load_whole_or_not(void **state)
{
	struct guest_mem *mem = *state;
	char path[] = "/tmp/mayfly-test-XXXXXX", out[4] = {0};
	int fd = mkstemp(path);

	assert_true(fd >= 0);
	unlink(path);
	assert_int_equal(fd_write_all(fd, "abcdef", 6), 0);
	assert_int_equal(guest_mem_load_file(mem, GPA(LOW_BYTES - 4), fd, 2, 4), 0);
	assert_int_equal(guest_mem_read(mem, GPA(LOW_BYTES - 4), out, 4), 0);
	assert_memory_equal(out, "cdef", 4);
	assert_int_equal(guest_mem_load_file(mem, GPA(LOW_BYTES - 4), fd, 3, 4), -ENODATA);
	assert_int_equal(guest_mem_load_file(mem, GPA(LOW_BYTES - 3), fd, 2, 4), -EFAULT);
	fd_close(&fd);
}

static void files_are_placed_copy_on_write(void **state)
{
	struct guest_mem *mem = *state;
	char path[] = "/tmp/mayfly-test-XXXXXX";
	static uint8_t data[2 * PAGE_BYTES + 100], out[3 * PAGE_BYTES];
	int fd = mkstemp(path);

	assert_true(fd >= 0);
	unlink(path);
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 7 + i / 256);
	assert_int_equal(fd_write_all(fd, data, sizeof(data)), 0);
	// Aligned: the tail of the last page is zero although the file might go on.
	assert_int_equal(
		guest_mem_place_file(mem, GPA(HIGH_BASE + PAGE_BYTES), fd, 0, 2 * PAGE_BYTES + 50),
		0);
	assert_int_equal(guest_mem_read(mem, GPA(HIGH_BASE + PAGE_BYTES), out, sizeof(out)), 0);
	assert_memory_equal(out, data, 2 * PAGE_BYTES + 50);
	for (size_t i = 2 * PAGE_BYTES + 50; i < sizeof(out); i++)
		assert_int_equal(out[i], 0);
	// What the guest writes stays the guest's.
	assert_int_equal(guest_mem_write(mem, GPA(HIGH_BASE + PAGE_BYTES), "guest", 5), 0);
	assert_int_equal(fd_pread_full(fd, out, 5, 0), 5);
	assert_memory_equal(out, data, 5);
	// Unaligned: the same bytes by the other way.
	assert_int_equal(guest_mem_place_file(mem, GPA(100), fd, 3, 5000), 0);
	assert_int_equal(guest_mem_read(mem, GPA(100), out, 5000), 0);
	assert_memory_equal(out, data + 3, 5000);
	// Not beyond the end of RAM, nor of the file.
	assert_int_equal(
		guest_mem_place_file(mem, GPA(LOW_BYTES - PAGE_BYTES), fd, 0, 2 * PAGE_BYTES),
		-EFAULT);
	assert_int_equal(
		guest_mem_place_file(mem, GPA(0), fd, PAGE_BYTES, PAGE_BYTES + 101), -ENODATA);
	assert_int_equal(
		guest_mem_place_file(mem, GPA(0), fd, PAGE_BYTES, 2 * PAGE_BYTES), -ENODATA);
	assert_int_equal(
		guest_mem_place_file(mem, GPA(0), fd, 8 * PAGE_BYTES, PAGE_BYTES), -ENODATA);
	fd_close(&fd);
}

static uint64_t host_pages(const struct guest_mem *mem)
{
	uint64_t bitmap[2] = {0}, pages = 0;

	assert_true(guest_mem_bitmap_words(mem) <= ARRAY_SIZE(bitmap));
	assert_int_equal(guest_mem_touched(mem, false, bitmap, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(bitmap); i++)
		pages += (uint64_t)__builtin_popcountll(bitmap[i]);
	return pages;
}

static void discard_gives_whole_pages_back(void **state)
{
	static uint8_t data[4 * PAGE_BYTES], out[4 * PAGE_BYTES];
	CLEANUP_FD int fd = memfd_create("file", MFD_CLOEXEC);
	struct guest_mem *mem = *state;
	uint64_t before;

	memset(data, 'd', sizeof(data));
	assert_int_equal(guest_mem_write(mem, GPA(HIGH_BASE), data, sizeof(data)), 0);
	before = host_pages(mem);
	assert_int_equal(guest_mem_discard(mem, GPA(HIGH_BASE + 1), 3 * PAGE_BYTES), 0);
	assert_int_equal(host_pages(mem), before - 2);
	assert_int_equal(guest_mem_read(mem, GPA(HIGH_BASE), out, sizeof(out)), 0);
	for (size_t i = 0; i < sizeof(out); i++)
		assert_int_equal(out[i], i >= PAGE_BYTES && i < 3 * PAGE_BYTES ? 0 : 'd');
	assert_int_equal(guest_mem_discard(mem, GPA(HIGH_BASE + 5), PAGE_BYTES), 0); // no whole one
	assert_int_equal(guest_mem_discard(mem, GPA(LOW_BYTES - 4), 8), -EFAULT);
	assert_int_equal(guest_mem_discard(mem, GPA(HIGH_BASE + HIGH_BYTES), PAGE_BYTES), -EFAULT);
	assert_int_equal(guest_mem_discard(mem, GPA(UINT64_MAX - 5), PAGE_BYTES), -EFAULT);
	// Of a placed file the guest's own copy is dropped.
	assert_int_equal(fd_write_all(fd, data, sizeof(data)), 0);
	assert_int_equal(guest_mem_place_file(mem, GPA(0), fd, 0, sizeof(data)), 0);
	assert_int_equal(guest_mem_write(mem, GPA(10), "guest", 5), 0);
	assert_int_equal(guest_mem_discard(mem, GPA(0), PAGE_BYTES), 0);
	assert_int_equal(guest_mem_read(mem, GPA(10), out, 5), 0);
	assert_memory_equal(out, data, 5);
}

static void io_into_several_buffers_is_marked(void **state)
{
	struct guest_mem *mem = *state;
	uint64_t map[2] = {0};
	struct iovec iov[] = {{mem->regions[0].hva + PAGE_BYTES - 1, 2},
		{mem->regions[1].hva, PAGE_BYTES}, {mem->regions[1].hva + 5 * PAGE_BYTES, 100},
		{mem->regions[0].hva + 9 * PAGE_BYTES, 100}};

	assert_int_equal(guest_mem_track_start(mem, NULL), 0);
	guest_mem_mark_iov_dirty(mem, iov, ARRAY_SIZE(iov), 2 + PAGE_BYTES + 1);
	guest_mem_track_collect(mem, map);
	assert_int_equal(map[0], 3 | 1 << 16 | 1 << 21);
	assert_int_equal(map[1], 0);
}

static void what_was_touched_is_known(void **state)
{
	static uint8_t data[2 * PAGE_BYTES];
	CLEANUP_FD int fd = memfd_create("file", MFD_CLOEXEC);
	struct guest_mem *mem = *state;
	uint64_t map[2] = {0}, changed[2] = {0};
	struct err err = {0};

	memset(data, 'd', sizeof(data));
	assert_int_equal(fd_write_all(fd, data, sizeof(data)), 0);
	assert_int_equal(guest_mem_write(mem, GPA(3 * PAGE_BYTES), "x", 1), 0);
	assert_int_equal(guest_mem_write(mem, GPA(HIGH_BASE + 50 * PAGE_BYTES), "x", 1), 0);
	assert_int_equal(guest_mem_place_file(mem, GPA(8 * PAGE_BYTES), fd, 0, sizeof(data)), 0);
	assert_int_equal(guest_mem_touched(mem, false, map, &err), 0);
	// A file that lies beneath counts although nobody has looked at it.
	assert_int_equal(map[0], 1 << 3 | 3 << 8);
	assert_int_equal(map[1], 1 << 2);
	assert_int_equal(guest_mem_write(mem, GPA(9 * PAGE_BYTES), "x", 1), 0);
	assert_int_equal(guest_mem_read(mem, GPA(8 * PAGE_BYTES), data, 1), 0);
	assert_int_equal(guest_mem_touched(mem, true, changed, &err), 0);
	assert_int_equal(changed[0], 1 << 3 | 1 << 9);
	assert_int_equal(changed[1], 1 << 2);
}

static void an_image_is_mapped_across_regions(void **state)
{
	static uint8_t data[8 * PAGE_BYTES];
	CLEANUP_FD int fd = memfd_create("image", MFD_CLOEXEC);
	struct guest_mem *mem = *state;
	uint64_t map[2] = {0};
	struct err err = {0};
	char out[2];

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)('a' + i / PAGE_BYTES);
	assert_int_equal(fd_write_all(fd, data, sizeof(data)), 0);
	assert_int_equal(guest_mem_map_file(mem, LOW_BYTES - 3 * PAGE_BYTES, 7 * PAGE_BYTES, fd,
				 PAGE_BYTES, &err),
		0);
	guest_mem_read(mem, GPA(LOW_BYTES - 1), out, 1);
	guest_mem_read(mem, GPA(HIGH_BASE), out + 1, 1);
	assert_memory_equal(out, "de", 2);
	assert_ptr_equal(guest_mem_at(mem, LOW_BYTES + 5), mem->regions[1].hva + 5);
	assert_int_equal(guest_mem_write(mem, GPA(HIGH_BASE + 3 * PAGE_BYTES), "x", 1), 0);
	assert_int_equal(guest_mem_touched(mem, true, map, &err), 0);
	assert_int_equal(map[0], 1 << 19);
	assert_int_equal(fd_pread_full(fd, out, 1, 7 * PAGE_BYTES), 1);
	assert_int_equal(out[0], 'h');
}

static void bitmaps_of_regions_are_joined(void **state)
{
	struct guest_mem *mem = *state;
	uint64_t low[1] = {1ULL << 15}, high[2] = {1ULL << 63 | 1, 1 << 5}, map[2] = {0};

	guest_mem_bitmap_add(mem, 0, low, map);
	guest_mem_bitmap_add(mem, 1, high, map);
	assert_true(map[0] == (1ULL << 15 | 1ULL << 16));
	assert_true(map[1] == (1ULL << 15 | 1ULL << 21));
}

static void bad_ranges_are_refused(void **state)
{
	static const struct guest_mem_range bad[][2] = {
		{{GPA(0), 0}, {GPA(PAGE_BYTES), PAGE_BYTES}},
		{{GPA(0), PAGE_BYTES + 1}, {GPA(3 * PAGE_BYTES), PAGE_BYTES}},
		{{GPA(1), PAGE_BYTES}, {GPA(3 * PAGE_BYTES), PAGE_BYTES}},
		{{GPA(0), 2 * PAGE_BYTES}, {GPA(PAGE_BYTES), PAGE_BYTES}},
		{{GPA(PAGE_BYTES), PAGE_BYTES}, {GPA(0), PAGE_BYTES}},
		{{GPA(0), PAGE_BYTES}, {GPA(UINT64_MAX - PAGE_BYTES + 1), 2 * PAGE_BYTES}},
		{{GPA(0), 1ULL << 63}, {GPA(1ULL << 63), 1ULL << 62}},
	};
	struct guest_mem mem;
	struct err err = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		assert_int_equal(guest_mem_init(&mem, bad[i], 2, &err), -EINVAL);
		guest_mem_fini(&mem);
	}
	assert_int_equal(guest_mem_init(&mem, bad[0], 0, &err), -EINVAL);
	assert_int_equal(guest_mem_init(&mem, bad[0], 3, &err), -EINVAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(range_ends_are_exact, setup, teardown),
		cmocka_unit_test_setup_teardown(data_round_trips, setup, teardown),
		cmocka_unit_test_setup_teardown(
			tracking_marks_each_page_once_collected, setup, teardown),
		cmocka_unit_test_setup_teardown(files_load_whole_or_not, setup, teardown),
		cmocka_unit_test_setup_teardown(files_are_placed_copy_on_write, setup, teardown),
		cmocka_unit_test_setup_teardown(discard_gives_whole_pages_back, setup, teardown),
		cmocka_unit_test_setup_teardown(io_into_several_buffers_is_marked, setup, teardown),
		cmocka_unit_test_setup_teardown(what_was_touched_is_known, setup, teardown),
		cmocka_unit_test_setup_teardown(an_image_is_mapped_across_regions, setup, teardown),
		cmocka_unit_test_setup_teardown(bitmaps_of_regions_are_joined, setup, teardown),
		cmocka_unit_test(bad_ranges_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
