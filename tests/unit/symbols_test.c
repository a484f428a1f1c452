// SPDX-License-Identifier: Apache-2.0
// vmm/symbols: the nearest symbol at or below an address, from the System.map beside a kernel, and
// silence about anything else.
#include "tests/support/test.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "vmm/symbols.h"

struct fixture {
	char dir[64];
	char map[PATH_MAX];
	char kernel[PATH_MAX];
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	if (!f)
		return -1;
	*state = f;
	strcpy(f->dir, "/tmp/mayfly-symbols-XXXXXX");
	if (!mkdtemp(f->dir))
		return -1;
	snprintf(f->map, sizeof(f->map), "%s/System.map", f->dir);
	snprintf(f->kernel, sizeof(f->kernel), "%s/vmlinux", f->dir);
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	unlink(f->map);
	rmdir(f->dir);
	free(f);
	return 0;
}

static void write_map(const struct fixture *f, const char *text)
{
	FILE *file = fopen(f->map, "w");

	assert_non_null(file);
	assert_true(fputs(text, file) >= 0);
	assert_int_equal(fclose(file), 0);
}

static void expect(const char *kernel, uint64_t addr, const char *want)
{
	char got[SYMBOL_BYTES] = "untouched";
	int fd = symbols_open(kernel);

	symbols_lookup(fd, addr, got);
	if (fd >= 0)
		close(fd);
	assert_string_equal(got, want);
}

static void the_nearest_below_is_found(void **state)
{
	struct fixture *f = *state;

	// Not in order, as a hand-made map may be; with what is not a symbol in between.
	write_map(f, "ffffffff81002000 T second\n"
		     "0000000000000000 D __per_cpu_start\n"
		     "\n"
		     "not a symbol at all\n"
		     "ffffffff81001000 t first\n"
		     "ffffffff81003000 T third\n");
	expect(f->kernel, 0xffffffff81001000, "first+0x0");
	expect(f->kernel, 0xffffffff81001fff, "first+0xfff");
	expect(f->kernel, 0xffffffff81002000, "second+0x0");
	expect(f->kernel, 0xffffffff81003010, "third+0x10");
	expect(f->kernel, 0x10, "__per_cpu_start+0x10");
}

static void what_is_out_of_reach_has_no_name(void **state)
{
	struct fixture *f = *state;

	write_map(f, "0000000000200000 T only\n");
	expect(f->kernel, 0x1fffff, "");
	expect(f->kernel, 0x200000 + MIB - 1, "only+0xfffff");
	expect(f->kernel, 0x200000 + MIB, "");
	expect(f->kernel, UINT64_MAX, "");
}

static void no_map_no_name(void **state)
{
	struct fixture *f = *state;
	char long_path[PATH_MAX + 64];

	expect(f->kernel, 0x1000, "");
	write_map(f, "");
	expect(f->kernel, 0x1000, "");
	memset(long_path, 'a', sizeof(long_path) - 1);
	long_path[sizeof(long_path) - 1] = '\0';
	long_path[sizeof(long_path) - 10] = '/';
	expect(long_path, 0x1000, "");
}

static void a_kernel_without_a_folder_is_in_this_one(void **state)
{
	struct fixture *f = *state;
	char before[PATH_MAX];

	write_map(f, "0000000000001000 T here\n");
	assert_non_null(getcwd(before, sizeof(before)));
	assert_int_equal(chdir(f->dir), 0);
	expect("vmlinux", 0x1001, "here+0x1");
	assert_int_equal(chdir(before), 0);
}

static void a_monstrous_name_is_cut(void **state)
{
	struct fixture *f = *state;
	char text[4096], got[SYMBOL_BYTES];
	int fd;
	size_t len = (size_t)snprintf(text, sizeof(text), "0000000000001000 T ");

	memset(text + len, 'x', 200);
	strcpy(text + len + 200, "\n");
	// A line that is longer than any buffer must not come back as two.
	len = strlen(text);
	len += (size_t)snprintf(text + len, sizeof(text) - len, "0000000000002000 T ");
	memset(text + len, 'y', 1000);
	strcpy(text + len + 1000, "\n0000000000003000 T good\n");
	write_map(f, text);
	fd = symbols_open(f->kernel);
	assert_true(fd >= 0);
	symbols_lookup(fd, 0x1005, got);
	close(fd);
	assert_true(strlen(got) < SYMBOL_BYTES);
	assert_int_equal(strspn(got, "x"), strcspn(got, "+"));
	assert_string_equal(strchr(got, '+'), "+0x5");
	expect(f->kernel, 0x3004, "good+0x4");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(the_nearest_below_is_found, setup, teardown),
		cmocka_unit_test_setup_teardown(what_is_out_of_reach_has_no_name, setup, teardown),
		cmocka_unit_test_setup_teardown(no_map_no_name, setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_kernel_without_a_folder_is_in_this_one, setup, teardown),
		cmocka_unit_test_setup_teardown(a_monstrous_name_is_cut, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
