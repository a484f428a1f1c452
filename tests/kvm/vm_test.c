// SPDX-License-Identifier: Apache-2.0
// vmm/vm on a real /dev/kvm: a whole machine is made out of a kernel of a few instructions, runs,
// ends in each of its ways, and is taken apart; nothing is left of it, wherever its making or its
// running fails.
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/kvm/box.h"
#include "tests/kvm/wrap.h"
#include "tests/support/kernel_image.h"
#include "vmm/base/fd.h"
#include "vmm/builtin.h"
#include "vmm/vm.h"

#define ENTRY_OFF      (IMAGE_TEXT_OFF + IMAGE_ENTRY64 - IMAGE_TEXT_GPA)
#define CODE_BYTES_MAX (IMAGE_TEXT_BYTES - (ENTRY_OFF - IMAGE_TEXT_OFF))

// The image that the program would bring along.
__asm__(".pushsection .rodata\n"
	".balign 4096\n"
	".globl builtin_initramfs, builtin_initramfs_end\n"
	".hidden builtin_initramfs, builtin_initramfs_end\n"
	"builtin_initramfs:\n"
	".fill 5000, 1, 0x42\n"
	"builtin_initramfs_end:\n"
	".balign 4096\n"
	".popsection\n");

// clang-format off
#define PRINT_HI                                                                          \
	"mov $0x3f8, %edx\n"                                                              \
	"mov $'h', %al\n"                                                                 \
	"out %al, (%dx)\n"                                                                \
	"mov $'i', %al\n"                                                                 \
	"out %al, (%dx)\n"
GUEST(guest_reset, 64, PRINT_HI "mov $0xfe, %al\nout %al, $0x64\n1: jmp 1b");
GUEST(guest_fault, 64, PRINT_HI "movabs $0x123456789000, %rax\nmov (%rax), %rax");
GUEST(guest_spin, 64, PRINT_HI "cli\n1: jmp 1b");
GUEST(guest_unknown, 64, PRINT_HI "mov $0xc0000000, %edi\nfadds (%rdi)");
// clang-format on

struct run {
	char dir[64];
	struct config config;
	struct vm *vm;
	enum vm_end_reason end;
	struct err err;
	char console[64];
	size_t console_len;
	bool stop_when_it_prints;
};

static void on_console(void *opaque, const uint8_t *data, size_t len)
{
	struct run *run = opaque;

	len = MIN(len, sizeof(run->console) - 1 - run->console_len);
	memcpy(run->console + run->console_len, data, len);
	run->console_len += len;
	if (run->stop_when_it_prints)
		vm_stop(run->vm);
}

static int setup(void **state)
{
	struct run *run = calloc(1, sizeof(*run));

	if (!run || box_setup(state) < 0)
		return -1;
	*state = run;
	strcpy(run->dir, "/tmp/mayfly-vm-XXXXXX");
	if (!mkdtemp(run->dir) || chdir(run->dir) < 0)
		return -1;
	config_defaults(&run->config);
	snprintf(run->config.kernel, sizeof(run->config.kernel), "%s/vmlinux", run->dir);
	strcpy(run->config.initramfs, BUILTIN_NAME);
	run->config.memory_bytes = 32 * MIB;
	run->config.cpus = 2;
	return 0;
}

static int teardown(void **state)
{
	struct run *run = *state;
	int r;

	fault_arm(0);
	vm_destroy(run->vm);
	unlink(run->config.kernel);
	// Fails if anything else is left, a socket for example.
	r = chdir("/") < 0 || rmdir(run->dir) < 0 ? -1 : 0;
	if (r < 0)
		fprintf(stderr, "%s: %s\n", run->dir, strerror(errno));
	free(run);
	return MIN(r, box_teardown(state));
}

static void write_kernel(struct run *run, const uint8_t *code, const uint8_t *code_end)
{
	uint8_t image[IMAGE_BYTES_MAX];
	size_t len = image_make_elf(image), code_len = (size_t)(code_end - code);
	FILE *f = fopen(run->config.kernel, "w");

	require_kvm();
	assert_non_null(f);
	assert_true(code_len <= CODE_BYTES_MAX);
	memcpy(image + ENTRY_OFF, code, code_len);
	assert_int_equal(fwrite(image, 1, len, f), len);
	assert_int_equal(fclose(f), 0);
}

// Makes it, runs it and takes it apart. As vm_create() or vm_run().
static int whole_life(struct run *run)
{
	struct vm_params params = {
		.config = &run->config, .dir = run->dir, .console = on_console, .opaque = run};
	int r;

	run->err = (struct err){0};
	run->console_len = 0;
	memset(run->console, 0, sizeof(run->console));
	r = vm_create(&run->vm, &params, &run->err);
	if (r == 0)
		r = vm_run(run->vm, &run->end, &run->err);
	vm_destroy(TAKE_PTR(run->vm));
	return r;
}

static void expect_end(struct run *run, enum vm_end_reason end)
{
	int r = whole_life(run);

	if (r < 0)
		fail_msg("%s", run->err.msg);
	assert_int_equal(run->end, end);
	assert_string_equal(run->console, "hi");
}

static void the_guest_asks_for_a_reset(void **state)
{
	write_kernel(*state, guest_reset, guest_reset_end);
	expect_end(*state, VM_END_RESET);
}

static void a_triple_fault_is_a_reset(void **state)
{
	write_kernel(*state, guest_fault, guest_fault_end);
	expect_end(*state, VM_END_RESET);
}

static void it_can_be_stopped(void **state)
{
	struct run *run = *state;

	write_kernel(run, guest_spin, guest_spin_end);
	run->stop_when_it_prints = true;
	expect_end(run, VM_END_STOPPED);
}

static void an_error_ends_it_with_its_reason(void **state)
{
	struct run *run = *state;

	write_kernel(run, guest_unknown, guest_unknown_end);
	assert_true(whole_life(run) < 0);
	assert_int_equal(run->end, VM_END_ERROR);
	assert_string_equal(run->console, "hi");
	assert_int_equal(strncmp(run->err.msg, "vCPU 0: ", 8), 0);
	assert_non_null(strstr(run->err.msg, "d8 07 "));
}

// --- What is left --------------------------------------------------------------------------------

static unsigned int count_entries(const char *path)
{
	DIR *dir = opendir(path);
	unsigned int nr = 0;

	assert_non_null(dir);
	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr;
}

struct left {
	unsigned int fds, tasks, maps;
};

// Descriptors, threads, and mappings that only a machine has.
static struct left count_left(void)
{
	static const char *const names[] = {"mayfly-guest-ram", "kvm-vcpu", "io_uring", "vmlinux"};
	struct left left = {
		.fds = count_entries("/proc/self/fd"), .tasks = count_entries("/proc/self/task")};
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];

	assert_non_null(f);
	while (fgets(line, sizeof(line), f))
		for (size_t i = 0; i < ARRAY_SIZE(names); i++)
			left.maps += strstr(line, names[i]) != NULL;
	fclose(f);
	return left;
}

static void expect_left(struct left want, const char *after)
{
	struct left got = count_left();

	if (got.fds != want.fds || got.tasks != want.tasks || got.maps != 0)
		fail_msg("after %s: %u descriptors (%u before), %u threads (%u), %u mappings (0)",
			after, got.fds, want.fds, got.tasks, want.tasks, got.maps);
	assert_int_equal(access(VM_VSOCK_SOCKET, F_OK), -1);
}

#define LIVES 200

static void many_lives_leave_nothing(void **state)
{
	struct left before = {0};

	write_kernel(*state, guest_reset, guest_reset_end);
	for (unsigned int i = 0; i < LIVES; i++) {
		expect_end(*state, VM_END_RESET);
		if (i == 0)
			before = count_left(); // what libraries open once is open now
	}
	expect_left(before, "200 lives");
}

// The nth call fails, for each n, until none does. Each failure is reported with its reason, or the
// machine does without.
static void a_failure_anywhere_leaves_nothing(void **state)
{
	struct run *run = *state;
	struct left before;
	unsigned int failures = 0, harmless = 0;
	struct fault fault;
	char name[64];
	long nth = 0;
	int r;

	write_kernel(run, guest_reset, guest_reset_end);
	expect_end(run, VM_END_RESET);
	before = count_left();
	do {
		fault_arm(++nth);
		r = whole_life(run);
		fault = fault_disarm();
		snprintf(name, sizeof(name), "call %ld, %s 0x%lx", nth, fault.call, fault.request);
		if (r < 0) {
			failures++;
			if (!fault.hit)
				fail_msg("failed without a failure: %s", run->err.msg);
			if (run->err.code != r || strlen(run->err.msg) < 10)
				fail_msg("%s: %d, but error %d: %s", name, r, run->err.code,
					run->err.msg);
			if (r != -fault.error && r != -ENOTSUP)
				fail_msg("%s: not its own error: %s", name, run->err.msg);
		} else {
			harmless += fault.hit;
			assert_int_equal(run->end, VM_END_RESET);
			assert_string_equal(run->console, "hi");
		}
		expect_left(before, name);
	} while (fault.hit);
	print_message("%u failures of %ld calls, %u harmless\n", failures, nth - 1, harmless);
	assert_true(failures > 40);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
		TEST(the_guest_asks_for_a_reset),
		TEST(a_triple_fault_is_a_reset),
		TEST(it_can_be_stopped),
		TEST(an_error_ends_it_with_its_reason),
		TEST(many_lives_leave_nothing),
		TEST(a_failure_anywhere_leaves_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
