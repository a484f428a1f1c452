// SPDX-License-Identifier: Apache-2.0
// vmm/vm on a real /dev/kvm: a whole machine is made out of a kernel of a few instructions, runs,
// ends in each of its ways, and is taken apart; nothing is left of it, wherever its making or its
// running fails.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snapshot/memory.h"
#include "snapshot/working_set.h"
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
	// A snapshot to take then, and one to go on from.
	const char *save_to, *from;
	bool compress, live;
	struct vm_snapshot_result saved;
	enum vm_memory_way way;
};

static void on_saved(
	void *opaque, int r, const struct vm_snapshot_result *result, const struct err *err)
{
	struct run *run = opaque;

	if (r < 0)
		fail_msg("%s", err->msg);
	assert_true(result->state_bytes > 0);
	run->saved = *result;
	vm_snapshot_settle(run->vm, false);
	vm_stop(run->vm);
}

static int new_file(const char *dir, const char *name)
{
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	return fd;
}

static void save(struct run *run)
{
	struct vm_snapshot_request request = {
		.id = {{7}},
		.state_fd = new_file(run->save_to, "state"),
		.memory_fd = new_file(run->save_to, "memory"),
		.compress = run->compress,
		.live = run->live,
		.downtime_ns = 1000000000,
		.unsynced = true,
		.done = on_saved,
		.opaque = run,
	};

	run->save_to = NULL;
	assert_int_equal(vm_snapshot(run->vm, &request, &run->err), 0);
}

static void on_memory_failed(void *opaque, const struct err *err)
{
	(void)opaque;
	fprintf(stderr, "lazy memory: %s\n", err->msg);
	abort();
}

static void on_console(void *opaque, const uint8_t *data, size_t len)
{
	struct run *run = opaque;

	len = MIN(len, sizeof(run->console) - 1 - run->console_len);
	memcpy(run->console + run->console_len, data, len);
	run->console_len += len;
	if (!memchr(run->console, 'i', run->console_len))
		return; // it may come in two pieces
	if (run->save_to)
		save(run);
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
		.config = &run->config,
		.dir = run->dir,
		.console = on_console,
		.snapshot = run->from,
		.memory_way = run->way,
		.fatal = on_memory_failed,
		.opaque = run,
	};
	int r;

	run->err = (struct err){0};
	run->console_len = 0;
	memset(run->console, 0, sizeof(run->console));
	r = vm_create(&run->vm, &params, &run->err);
	if (r == 0 && run->from)
		vm_stop(run->vm); // it is seen to run, and no more
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

	// A thread that was joined is still listed until the kernel is through with it.
	for (unsigned int i = 0; i < 1000 && got.tasks > want.tasks; i++) {
		usleep(10000);
		got = count_left();
	}
	// Nor are there more of them than the one that may still have been so when it was counted
	// before.
	if (got.fds != want.fds || got.tasks > want.tasks || got.maps != 0)
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

static uint64_t resident_kib(void)
{
	FILE *f = fopen("/proc/self/status", "r");
	unsigned long long kib = 0;
	char line[256];

	assert_non_null(f);
	while (fgets(line, sizeof(line), f) && sscanf(line, "VmRSS: %llu", &kib) != 1)
		;
	fclose(f);
	return kib;
}

// A snapshot of a machine that has printed, in a folder of its own.
static const char *take_snapshot(struct run *run, bool compress)
{
	const char *dir = compress ? "small" : "snapshot";

	write_kernel(run, guest_spin, guest_spin_end);
	assert_int_equal(mkdir(dir, 0700), 0);
	run->save_to = dir;
	run->compress = compress;
	run->from = NULL;
	expect_end(run, VM_END_STOPPED);
	return dir;
}

static int index_of_memory(const char *dir)
{
	struct memory_stats stats;
	CLEANUP_BUF struct buf index = {0};
	CLEANUP_FD int fd = -1;
	char path[64];
	struct err err = {0};
	int r;

	snprintf(path, sizeof(path), "%s/memory", dir);
	fd = open(path, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	r = memory_index(fd, &(struct snapshot_id){{7}}, &index, &stats, &err);
	return r < 0 ? r : (int)(stats.held_pages * PAGE_BYTES / MIB);
}

static void drop_snapshot(const char *dir)
{
	char path[64];

	snprintf(path, sizeof(path), "%s/state", dir);
	assert_int_equal(unlink(path), 0);
	snprintf(path, sizeof(path), "%s/memory", dir);
	assert_int_equal(unlink(path), 0);
	// Of memory that was read lazily, once.
	snprintf(path, sizeof(path), "%s/" WORKING_SET_FILE_NAME, dir);
	assert_true(unlink(path) == 0 || errno == ENOENT);
	assert_int_equal(rmdir(dir), 0);
}

static void expect_restored(struct run *run)
{
	if (whole_life(run) < 0)
		fail_msg("%s", run->err.msg);
	assert_int_equal(run->end, VM_END_STOPPED);
}

static void a_live_save_copies_while_it_runs(void **state)
{
	struct run *run = *state;
	const char *dir;

	run->live = true;
	dir = take_snapshot(run, false);
	assert_in_range(run->saved.nr_rounds, 1, VM_LIVE_ROUNDS_MAX);
	assert_true(run->saved.rounds[0].bytes >= 2 * PAGE_BYTES);
	assert_true(run->saved.begin_ns > 0 && run->saved.blackout_ns > 0);
	assert_false(run->saved.forked);
	assert_int_equal(index_of_memory(dir), 32);
	drop_snapshot(dir);
}

// A thousand with FULL=1 in the environment.
static void many_restores_leave_nothing(void **state)
{
	const unsigned int restores = getenv("FULL") ? 1000 : 200;
	static const enum vm_memory_way ways[] = {
		VM_MEMORY_MAPPED, VM_MEMORY_LAZY, VM_MEMORY_EAGER, VM_MEMORY_AUTO};
	struct run *run = *state;
	const char *whole = take_snapshot(run, false), *small = take_snapshot(run, true);
	struct left before = {0};
	uint64_t kib = 0;

	for (unsigned int i = 0; i < restores; i++) {
		run->way = ways[i % ARRAY_SIZE(ways)];
		run->from = run->way != VM_MEMORY_MAPPED && i / 4 % 2 ? small : whole;
		expect_restored(run);
		if (i == 50) {
			before = count_left();
			kib = resident_kib();
		}
	}
	expect_left(before, "many restores");
	if (resident_kib() > kib + 512)
		fail_msg("%llu KiB resident, %llu before", (unsigned long long)resident_kib(),
			(unsigned long long)kib);
	drop_snapshot(whole);
	drop_snapshot(small);
}

// As below, of a machine that goes on from a snapshot. Only calls of the loop's thread fail: one
// that brings memory in while a vCPU waits for it is the end of the process, by contract.
static void a_restore_that_fails_leaves_nothing(void **state)
{
	struct run *run = *state;
	const char *whole = take_snapshot(run, false), *small = take_snapshot(run, true);

	for (unsigned int i = 0; i < 2; i++) {
		unsigned int failures = 0;
		struct left before;
		struct fault fault;
		long nth = 0;

		run->from = i ? small : whole;
		run->way = VM_MEMORY_AUTO;
		expect_restored(run);
		before = count_left();
		do {
			int r;

			fault_arm_own(++nth);
			r = whole_life(run);
			fault = fault_disarm();
			if (r < 0) {
				failures++;
				if (!fault.hit || run->err.code != r || strlen(run->err.msg) < 10)
					fail_msg("call %ld, %s: %d, but error %d: %s", nth,
						fault.call, r, run->err.code, run->err.msg);
			} else {
				assert_int_equal(run->end, VM_END_STOPPED);
			}
			expect_left(before, fault.call);
		} while (fault.hit);
		assert_true(failures > 40);
	}
	drop_snapshot(whole);
	drop_snapshot(small);
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
		TEST(a_live_save_copies_while_it_runs),
		TEST(many_restores_leave_nothing),
		TEST(a_restore_that_fails_leaves_nothing),
		TEST(a_failure_anywhere_leaves_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
