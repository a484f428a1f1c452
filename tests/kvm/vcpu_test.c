// SPDX-License-Identifier: Apache-2.0
// vmm/vcpu and vmm/kvm on a real /dev/kvm, with guests of a few instructions: exits reach the
// buses, stops say why, no kick is lost, and no access is lost or repeated where a vCPU is paused.
#include <errno.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tests/kvm/box.h"
#include "tests/kvm/vcpu_delayed.h"
#include "vmm/x86_64/layout.h"

// --- Exits reach the buses -----------------------------------------------------------------------

static uint64_t answer_with_pattern(struct box *box, const struct access *access)
{
	(void)box;
	(void)access;
	return 0x8877665544332211;
}

static void expect_log(const struct box *box, const struct access *want, unsigned int nr)
{
	for (unsigned int i = 0; i < MIN(nr, box->nr_log); i++) {
		const struct access *a = &box->log[i], *b = &want[i];

		if (a->pio != b->pio || a->write != b->write || a->off != b->off ||
			a->len != b->len || (a->write && a->val != b->val))
			fail_msg("access %u is a %u-byte %s %s at 0x%llx of 0x%llx", i, a->len,
				a->pio ? "port" : "MMIO", a->write ? "write" : "read",
				(unsigned long long)a->off, (unsigned long long)a->val);
	}
	assert_int_equal(box->nr_log, nr);
}

#define R(bus, at, bytes)                           \
	{                                           \
		.pio = bus, .off = at, .len = bytes \
	}
#define W(bus, at, bytes, v)                                                 \
	{                                                                    \
		.pio = bus, .write = true, .off = at, .len = bytes, .val = v \
	}

// clang-format off
GUEST(guest_mmio, 64,
	"movabs $0x1122334455667788, %rax\n"
	"mov %al, (%rdi)\n"
	"mov %ax, 2(%rdi)\n"
	"mov %eax, 4(%rdi)\n"
	"mov %rax, 8(%rdi)\n"
	"mov %eax, 0x11(%rdi)\n" // not aligned
	"movl $-1, %eax\n"
	"mov 0x20(%rdi), %al\n"
	"mov %eax, 0x100(%rdi)\n"
	"mov 0x22(%rdi), %ax\n"
	"mov %eax, 0x104(%rdi)\n"
	"mov 0x24(%rdi), %eax\n"
	"mov %rax, 0x108(%rdi)\n"
	"mov 0x28(%rdi), %rax\n"
	"mov %rax, 0x110(%rdi)\n"
	"movb $1, -1(%rdi)\n" // nobody there
	"mov -8(%rdi), %rax\n"
	"mov %rax, 0x118(%rdi)\n"
	"1: jmp 1b");
// clang-format on

static void mmio_of_all_sizes(void **state)
{
	static const struct access want[] = {
		W(false, 0, 1, 0x88),
		W(false, 2, 2, 0x7788),
		W(false, 4, 4, 0x55667788),
		W(false, 8, 8, 0x1122334455667788),
		W(false, 0x11, 4, 0x55667788),
		R(false, 0x20, 1),
		W(false, 0x100, 4, 0xffffff11),
		R(false, 0x22, 2),
		W(false, 0x104, 4, 0xffff2211),
		R(false, 0x24, 4),
		W(false, 0x108, 8, 0x44332211),
		R(false, 0x28, 8),
		W(false, 0x110, 8, 0x8877665544332211),
		W(false, 0x118, 8, UINT64_MAX),
	};
	struct box *box = box_make(1, guest_mmio, guest_mmio_end);
	(void)state;

	box->answer = answer_with_pattern;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	expect_log(box, want, ARRAY_SIZE(want));
	vcpus_pause(box->vcpus, 1); // the last exit has been counted, too
	assert_int_equal(box->mmio.unclaimed, 2);
	assert_int_equal(vcpu_exits(box->vcpus[0], VCPU_EXIT_MMIO), ARRAY_SIZE(want) + 2);
}

// clang-format off
GUEST(guest_straddle, 64,
	"movabs $0x1122334455667788, %rax\n"
	"mov %rax, 0xffd(%rdi)\n" // across the boundary of the two pages
	"mov 0xffb(%rdi), %rax\n"
	"mov %rax, (%rsi)\n"
	"movl $1, (%rdi)\n"
	"1: jmp 1b");
// clang-format on

// KVM splits what crosses a page, into pieces of any length.
static void mmio_across_a_page(void **state)
{
	static const struct access want[] = {
		W(false, 0xffd, 3, 0x667788),
		W(false, 0x1000, 5, 0x1122334455),
		R(false, 0xffb, 5),
		R(false, 0x1000, 3),
		W(false, 0, 4, 1),
	};
	struct box *box = box_make(1, guest_straddle, guest_straddle_end);
	uint64_t got = 0;
	(void)state;

	box->answer = answer_with_pattern;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	expect_log(box, want, ARRAY_SIZE(want));
	assert_int_equal(guest_mem_read(&box->mem, GPA(BOX_DATA), &got, sizeof(got)), 0);
	assert_int_equal(got, 0x3322115544332211);
}

// clang-format off
GUEST(guest_pio, 16,
	"movl $0x11223344, %eax\n"
	"out %al, (%dx)\n"
	"inc %dx\n"
	"out %ax, (%dx)\n"
	"inc %dx\n"
	"out %eax, (%dx)\n"
	"mov $-1, %eax\n"
	"in (%dx), %al\n"
	"out %eax, (%dx)\n"
	"in (%dx), %ax\n"
	"out %eax, (%dx)\n"
	"in (%dx), %eax\n"
	"out %eax, (%dx)\n"
	"mov $0x600, %dx\n" // nobody there
	"mov $0, %eax\n"
	"in (%dx), %ax\n"
	"out %ax, (%dx)\n"
	"mov $" BOX_STR(BOX_PORT) ", %dx\n"
	"out %eax, (%dx)\n"
	"1: jmp 1b");
// clang-format on

static void port_io_of_all_sizes(void **state)
{
	static const struct access want[] = {
		W(true, 0, 1, 0x44),
		W(true, 1, 2, 0x3344),
		W(true, 2, 4, 0x11223344),
		R(true, 2, 1),
		W(true, 2, 4, 0xffffff11),
		R(true, 2, 2),
		W(true, 2, 4, 0xffff2211),
		R(true, 2, 4),
		W(true, 2, 4, 0x44332211),
		W(true, 0, 4, 0xffff),
	};
	struct box *box = box_make(1, guest_pio, guest_pio_end);
	(void)state;

	box->answer = answer_with_pattern;
	box_enter_real_mode(box);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	expect_log(box, want, ARRAY_SIZE(want));
	vcpus_pause(box->vcpus, 1);
	assert_int_equal(box->pio.unclaimed, 2);
	assert_int_equal(vcpu_exits(box->vcpus[0], VCPU_EXIT_IO), ARRAY_SIZE(want) + 2);
}

// clang-format off
GUEST(guest_strings, 64,
	"cld\n"
	"mov %rsi, %rbx\n"
	"mov %rsi, %rdi\n"
	"mov $5, %ecx\n"
	"rep insb\n" // 5 bytes, then 3 words behind them
	"mov $3, %ecx\n"
	"rep insw\n"
	"mov %rbx, %rsi\n"
	"mov $7, %ecx\n"
	"rep outsb\n" // and out again: 7 bytes, then a long
	"outsl\n"
	"1: jmp 1b");
// clang-format on

static uint64_t answer_with_count(struct box *box, const struct access *access)
{
	uint64_t *count = box->opaque;
	uint64_t val = 0;

	for (unsigned int i = 0; i < access->len; i++)
		val |= ++*count << 8 * i;
	return val;
}

static void port_io_of_strings(void **state)
{
	static const struct access want[] = {
		R(true, 0, 1),
		R(true, 0, 1),
		R(true, 0, 1),
		R(true, 0, 1),
		R(true, 0, 1),
		R(true, 0, 2),
		R(true, 0, 2),
		R(true, 0, 2),
		W(true, 0, 1, 1),
		W(true, 0, 1, 2),
		W(true, 0, 1, 3),
		W(true, 0, 1, 4),
		W(true, 0, 1, 5),
		W(true, 0, 1, 6),
		W(true, 0, 1, 7),
		W(true, 0, 4, 0x0b0a0908),
	};
	struct box *box = box_make(1, guest_strings, guest_strings_end);
	uint64_t count = 0;
	(void)state;

	box->answer = answer_with_count;
	box->opaque = &count;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	expect_log(box, want, ARRAY_SIZE(want));
}

// --- Stops ---------------------------------------------------------------------------------------

// No interrupt table: the page fault becomes a double and then a triple fault.
GUEST(guest_triple_fault, 64, "movabs $0x123456789000, %rax\nmov (%rax), %rax");

static void a_triple_fault_is_a_reset(void **state)
{
	struct box *box = box_make(1, guest_triple_fault, guest_triple_fault_end);
	(void)state;

	box_enter_long_mode(box);
	box_start(box);
	box_wait_stopped(box);
	assert_int_equal(box->stop, VCPU_STOP_RESET);
	vcpus_pause(box->vcpus, 1); // one that has ended does not hold it up
	vcpus_resume(box->vcpus, 1);
}

// Floating point arithmetic with MMIO: KVM's emulator has no such thing on any host.
GUEST(guest_unknown, 64, "nop\nfadds (%rdi)");

static void what_nobody_can_emulate_is_named(void **state)
{
	struct box *box = box_make(1, guest_unknown, guest_unknown_end);
	(void)state;

	box_enter_long_mode(box);
	box_start(box);
	box_wait_stopped(box);
	assert_int_equal(box->stop, VCPU_STOP_ERROR);
	print_message("the reason: %s\n", box->stop_err.msg);
	assert_true(box->stop_err.code < 0);
	assert_non_null(strstr(box->stop_err.msg, "d8 07 "));
	assert_non_null(strstr(box->stop_err.msg, "0x8001"));
}

// The same by a program of the guest costs the guest that program: it gets #UD, as from a processor
// that lacks the instruction.
GUEST(guest_user, 64, "nop\nfadds (%rdi)\n1: jmp 1b");
GUEST(guest_ud_handler, 64, "pop %rax\nout %eax, (%dx)\n1: jmp 1b");

static void a_guest_program_cannot_stop_the_machine(void **state)
{
	static const struct access want[] = {W(true, 0, 4, BOX_CODE + 1)};
	struct box *box = box_make(1, guest_user, guest_user_end);
	(void)state;

	box_enter_user_mode(box, 6, guest_ud_handler, guest_ud_handler_end);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	expect_log(box, want, ARRAY_SIZE(want));
	assert_false(box->stopped);
}

// --- Pause, resume, move -------------------------------------------------------------------------

GUEST(guest_spin, 64, "out %al, (%dx)\ncli\n1: jmp 1b"); // says once that it is there

#define SPIN_RIP (BOX_CODE + 2)

// A wait of 0 to 127 us, different each time: as long as it takes a thread to wake another, so that
// each may find the other anywhere. Any thread.
static void random_delay(void)
{
	static _Atomic uint64_t seed = 0x9e3779b97f4a7c15;
	uint64_t x = atomic_fetch_add(&seed, 0x9e3779b97f4a7c15), start = now_ns();

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	while (now_ns() - start < (x >> 32) % 128000)
		;
}

// A round is a pause and a resume. As many as fit into the time that a test may take: a kick out
// of the guest costs microseconds on one host and milliseconds on another.
#define ROUNDS_MAX     100000
#define ROUNDS_MIN     200
#define ROUNDS_TIME_NS 5000000000ULL

static bool another_round(unsigned int *rounds, uint64_t start_ns)
{
	return (*rounds)++ < ROUNDS_MAX && now_ns() - start_ns < ROUNDS_TIME_NS;
}

// The guest never leaves by itself: a kick that is lost between the vCPU's look at what is wanted
// and its KVM_RUN would leave the pause waiting for ever.
static void no_kick_is_lost(void **state)
{
	struct box *box = box_make(1, guest_spin, guest_spin_end);
	uint64_t start = now_ns();
	unsigned int rounds = 0;
	(void)state;

	after_look = random_delay;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_write(box);
	while (another_round(&rounds, start)) {
		random_delay();
		vcpus_pause(box->vcpus, 1);
		assert_int_equal(box->env.parked, 1);
		vcpus_resume(box->vcpus, 1);
		assert_int_equal(box->env.parked, 0);
	}
	print_message("%u pauses of a spinning guest in %llu ms\n", rounds,
		(unsigned long long)(now_ns() - start) / 1000000);
	assert_true(rounds >= ROUNDS_MIN);
	assert_false(box->stopped);
	box_destroy(box);
	after_look = NULL;
}

// What the guests below do with a device: each reads a value that counts up and writes it back,
// once. Whatever is lost, repeated or torn breaks the sequence.
struct echo {
	uint64_t reads, writes; // bytes for strings, else accesses
	uint64_t bad; // the first that breaks it, 0 if none
	char what[64];
};

static void echo_broken(struct echo *echo, const char *what)
{
	if (!echo->bad) {
		echo->bad = echo->reads + 1;
		snprintf(echo->what, sizeof(echo->what), "%s", what);
	}
}

static uint64_t echo_read(struct box *box, const struct access *access)
{
	struct echo *echo = box->opaque;
	(void)access;

	if (echo->reads != echo->writes)
		echo_broken(echo, "the last value was not written back");
	return ++echo->reads;
}

static void echo_write(struct box *box, const struct access *access)
{
	struct echo *echo = box->opaque;

	echo->writes++;
	if (access->val != echo->reads || echo->writes != echo->reads)
		echo_broken(echo, "something else or too much was written back");
}

#define STRING_BYTES 8

static uint64_t echo_read_byte(struct box *box, const struct access *access)
{
	struct echo *echo = box->opaque;
	(void)access;

	if (echo->reads % STRING_BYTES == 0 && echo->reads != echo->writes)
		echo_broken(echo, "the last string was not written back");
	return echo->reads++ & 0xff;
}

static void echo_write_byte(struct box *box, const struct access *access)
{
	struct echo *echo = box->opaque;

	if (access->val != (echo->writes & 0xff) || echo->reads % STRING_BYTES)
		echo_broken(echo, "another byte was written back");
	echo->writes++;
}

// clang-format off
GUEST(guest_echo_mmio, 64, "1: mov (%rdi), %rax\nmov %rax, 0x10(%rdi)\njmp 1b");
GUEST(guest_echo_straddle, 64, "1: mov (%rdi), %eax\nmov %rax, 0xffe(%rdi)\njmp 1b");
GUEST(guest_echo_port, 64, "1: in (%dx), %eax\nout %eax, (%dx)\njmp 1b");
// By way of memory, with an instruction that a host which emulates ring 0 leaves to the assist. Done
// twice, or half, it fails to find what it compares with.
GUEST(guest_echo_cmpxchg, 64,
	"1: mov (%rdi), %rbx\n"
	"xor %ecx, %ecx\n"
	"xor %edx, %edx\n"
	"mov (%rsi), %rax\n"
	"cmpxchg16b (%rsi)\n"
	"jnz 2f\n"
	"mov (%rsi), %rax\n"
	"mov %rax, 0x10(%rdi)\n"
	"jmp 1b\n"
	"2: movq $0, 0x10(%rdi)\n"
	"jmp 1b");
GUEST(guest_echo_strings, 64,
	"cld\n"
	"mov %rsi, %rbx\n"
	"1: mov %rbx, %rdi\n"
	"mov $" BOX_STR(STRING_BYTES) ", %ecx\n"
	"rep insb\n"
	"mov %rbx, %rsi\n"
	"mov $" BOX_STR(STRING_BYTES) ", %ecx\n"
	"rep outsb\n"
	"jmp 1b");
// clang-format on

static void echo_write_straddling(struct box *box, const struct access *access)
{
	struct echo *echo = box->opaque;

	// 2 bytes in the first page, then 6 in the second, which are 0 up to 65535 rounds and more
	// beyond: both pieces of a value must come, once and in this order.
	if (access->len == 2 && access->off == 0xffe) {
		if (access->val != (echo->reads & 0xffff) || echo->writes + 1 != echo->reads)
			echo_broken(echo, "the first piece is another");
	} else if (access->len == 6 && access->off == 0x1000) {
		echo->writes++;
		if (access->val != echo->reads >> 16 || echo->writes != echo->reads)
			echo_broken(echo, "the second piece is another");
	} else {
		echo_broken(echo, "a piece of another length");
	}
}

static const struct echo_case {
	const char *name;
	const uint8_t *code, *code_end;
	uint64_t (*read)(struct box *box, const struct access *access);
	void (*write)(struct box *box, const struct access *access);
} echo_cases[] = {
	{"MMIO", guest_echo_mmio, guest_echo_mmio_end, echo_read, echo_write},
	{"MMIO across a page", guest_echo_straddle, guest_echo_straddle_end, echo_read,
		echo_write_straddling},
	{"cmpxchg16b", guest_echo_cmpxchg, guest_echo_cmpxchg_end, echo_read, echo_write},
	{"port", guest_echo_port, guest_echo_port_end, echo_read, echo_write},
	{"string", guest_echo_strings, guest_echo_strings_end, echo_read_byte, echo_write_byte},
};

#define MOVES         40 // of a guest, each to a new VM
#define PAUSES_A_MOVE 10 // in place

// Between any two instructions, or half-way through one, all that the guest is lies in its
// registers and memory: it goes on in another VM as if nothing had been.
static void no_access_is_lost_or_repeated(void **state)
{
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(echo_cases); i++) {
		const struct echo_case *c = &echo_cases[i];
		struct box *box = box_make(1, c->code, c->code_end);
		struct echo echo = {0};
		unsigned int pauses = 0;

		box->answer = c->read;
		box->on_write = c->write;
		box->opaque = &echo;
		box_enter_long_mode(box);
		box_start(box);
		vcpus_pause(box->vcpus, 1);
		for (unsigned int moves = 0; moves < MOVES; moves++) {
			uint64_t before = echo.reads;

			for (unsigned int n = 0; n < PAUSES_A_MOVE || echo.reads == before; n++) {
				vcpus_resume(box->vcpus, 1);
				random_delay();
				vcpus_pause(box->vcpus, 1);
				pauses++;
				if (box->stopped)
					fail_msg("%s: the vCPU stopped: %s", c->name,
						box->stop_err.msg);
			}
			box_move(box);
		}
		print_message("%s: %llu values, %u pauses, %d moves\n", c->name,
			(unsigned long long)echo.reads, pauses, MOVES);
		if (echo.bad)
			fail_msg("%s: at value %llu: %s", c->name, (unsigned long long)echo.bad,
				echo.what);
		box_destroy(box);
	}
}

static void what_was_paused_before_its_start_waits(void **state)
{
	struct box *box = box_make(1, guest_echo_port, guest_echo_port_end);
	(void)state;

	box_enter_long_mode(box);
	vcpus_pause(box->vcpus, 1); // nobody is there to be waited for
	box_start(box);
	vcpus_pause(box->vcpus, 1);
	assert_int_equal(box->env.first_run_ns, 0);
	assert_int_equal(box->nr_log, 0);
	vcpus_resume(box->vcpus, 1);
	box_wait_log(box, 2);
	assert_int_not_equal(box->env.first_run_ns, 0);
}

static uint64_t answer_with_signals(struct box *box, const struct access *access)
{
	(void)access;
	pthread_sigmask(SIG_SETMASK, NULL, box->opaque);
	return 0;
}

static void the_thread_takes_kicks_and_its_own_bus_errors_alone(void **state)
{
	struct box *box = box_make(1, guest_echo_port, guest_echo_port_end);
	sigset_t blocked;
	(void)state;

	box->answer = answer_with_signals;
	box->opaque = &blocked;
	box_enter_long_mode(box);
	box_start(box);
	box_wait_log(box, 1);
	vcpus_pause(box->vcpus, 1);
	for (int sig = 1; sig <= SIGRTMAX; sig++)
		if (sigismember(&blocked, sig) == 0 && sig != SIGBUS && sig != SIGSYS &&
			sig != SIGRTMIN && sig != SIGKILL && sig != SIGSTOP &&
			(sig < 32 || sig > SIGRTMIN))
			fail_msg("signal %d is not blocked", sig);
	assert_false(sigismember(&blocked, SIGBUS));
	assert_false(sigismember(&blocked, SIGSYS)); // the jail's
	assert_false(sigismember(&blocked, SIGRTMIN));
}

static void a_spinning_guest_can_be_destroyed(void **state)
{
	(void)state;

	for (unsigned int i = 0; i < 10; i++) {
		struct box *box = box_make(1, guest_spin, guest_spin_end);

		box_enter_long_mode(box);
		box_start(box);
		box_wait_write(box);
		box_destroy(box);
	}
}

static void where_tells_the_spinning_rip(void **state)
{
	struct box *box = box_make(1, guest_spin, guest_spin_end);
	(void)state;

	box_enter_long_mode(box);
	box_start(box);
	box_wait_write(box);
	for (unsigned int n = 1; n <= 20; n++) {
		vcpu_ask_where(box->vcpus[0]);
		box_wait_where(box, n);
	}
	assert_in_range(box->where[0].ip, SPIN_RIP - 1, SPIN_RIP); // at the cli, if it was quick
	assert_int_equal(box->where[0].sp, BOX_STACK);
	assert_int_equal(box->where[0].table_root, LAYOUT_PAGE_TABLES_GPA);
	assert_int_equal(box->where[0].privilege, 0);
	assert_true(box->where[0].exits >= 1); // that it has written
	assert_false(box->stopped);
}

// To be asked and paused at once: both are granted, and the guest goes on.
static void where_and_pause_do_not_hinder_each_other(void **state)
{
	struct box *box = box_make(1, guest_echo_mmio, guest_echo_mmio_end);
	struct echo echo = {0};
	(void)state;

	box->answer = echo_read;
	box->on_write = echo_write;
	box->opaque = &echo;
	box_enter_long_mode(box);
	box_start(box);
	for (unsigned int n = 1; n <= 50; n++) {
		random_delay();
		vcpu_ask_where(box->vcpus[0]);
		vcpus_pause(box->vcpus, 1);
		vcpus_resume(box->vcpus, 1);
		box_wait_where(box, n);
	}
	vcpus_pause(box->vcpus, 1);
	if (echo.bad)
		fail_msg("at value %llu: %s", (unsigned long long)echo.bad, echo.what);
}

// --- Two vCPUs -----------------------------------------------------------------------------------

// The first wakes the second with INIT and SIPI (SDM vol. 3, 8.4.4.1), once the device says so, and
// spins. The second starts in real mode at BOX_CODE plus 0x1000.
// clang-format off
GUEST(guest_two, 64,
	"mov $0xfee00000, %ebx\n"
	"1: in (%dx), %eax\n"
	"test %eax, %eax\n"
	"jz 1b\n"
	"movl $0x01000000, 0x310(%rbx)\n"
	"movl $0x00004500, 0x300(%rbx)\n"
	"movl $0x01000000, 0x310(%rbx)\n"
	"movl $0x00004609, 0x300(%rbx)\n"
	"2: jmp 2b");
GUEST(guest_second, 16,
	"mov $" BOX_STR(BOX_PORT) ", %dx\n"
	"mov $0x2222, %ax\n"
	"out %ax, (%dx)\n"
	"1: jmp 1b");
// clang-format on

static uint64_t answer_with_opaque(struct box *box, const struct access *access)
{
	(void)access;
	return *(_Atomic uint64_t *)box->opaque;
}

static uint32_t mp_state(struct vcpu *vcpu)
{
	struct kvm_mp_state mp;

	assert_int_equal(ioctl(vcpu_fd(vcpu), KVM_GET_MP_STATE, &mp), 0);
	return mp.mp_state;
}

static void the_second_vcpu_waits_for_its_sipi(void **state)
{
	struct box *box = box_make(2, guest_two, guest_two_end);
	_Atomic uint64_t wake = 0;
	(void)state;

	assert_int_equal(guest_mem_write(&box->mem, GPA(BOX_CODE + 0x1000), guest_second,
				 (size_t)(guest_second_end - guest_second)),
		0);
	box->answer = answer_with_opaque;
	box->opaque = &wake;
	box_enter_long_mode(box);
	box_start(box);
	for (unsigned int round = 0; round < 100; round++) {
		vcpus_pause(box->vcpus, 2);
		assert_int_equal(box->env.parked, 2);
		assert_int_equal(mp_state(box->vcpus[1]), KVM_MP_STATE_UNINITIALIZED);
		vcpus_resume(box->vcpus, 2);
		random_delay();
	}
	// It can be asked where it is, too.
	vcpu_ask_where(box->vcpus[1]);
	box_wait_where(box, 1);
	vcpus_pause(box->vcpus, 2);
	vcpus_resume(box->vcpus, 2);
	atomic_store(&wake, 1);
	box_wait_write(box);
	vcpus_pause(box->vcpus, 2);
	assert_int_equal(mp_state(box->vcpus[1]), KVM_MP_STATE_RUNNABLE);
	assert_false(box->stopped);
}

static void two_spinning_vcpus_can_be_paused(void **state)
{
	struct box *box = box_make(2, guest_two, guest_two_end);
	_Atomic uint64_t wake = 1;
	(void)state;

	assert_int_equal(guest_mem_write(&box->mem, GPA(BOX_CODE + 0x1000), guest_second,
				 (size_t)(guest_second_end - guest_second)),
		0);
	box->answer = answer_with_opaque;
	box->opaque = &wake;
	box_enter_long_mode(box);
	after_look = random_delay;
	box_start(box);
	box_wait_write(box);
	for (unsigned int round = 0; round < 100; round++) {
		random_delay();
		vcpus_pause(box->vcpus, 2);
		assert_int_equal(box->env.parked, 2);
		vcpus_resume(box->vcpus, 2);
		assert_int_equal(box->env.parked, 0);
	}
	box_destroy(box);
	after_look = NULL;
}

// --- Interrupts and notifications ----------------------------------------------------------------

// Has the PICs deliver IRQ 4 as vector 0x24, counts what comes, and tells the device.
// clang-format off
GUEST(guest_irq, 16,
	"cli\n"
	"mov $0x11, %al\n" // ICW1 to 4 of the master: edges, vector 0x20, slave on 2, 8086
	"out %al, $0x20\n"
	"mov $0x20, %al\n"
	"out %al, $0x21\n"
	"mov $0x04, %al\n"
	"out %al, $0x21\n"
	"mov $0x01, %al\n"
	"out %al, $0x21\n"
	"mov $0xef, %al\n" // all masked but IRQ 4
	"out %al, $0x21\n"
	"call 1f\n" // vector 0x24 leads to what follows
	"inc %bx\n"
	"mov %bx, %ax\n"
	"out %ax, (%dx)\n"
	"mov $0x20, %al\n" // end of interrupt
	"out %al, $0x20\n"
	"iret\n"
	"1: pop %ax\n"
	"mov %ax, 0x24 * 4\n"
	"movw $0, 0x24 * 4 + 2\n"
	"xor %bx, %bx\n"
	"mov %bx, %ax\n"
	"out %ax, (%dx)\n" // ready: what came before ICW1 is lost
	"sti\n"
	"2: hlt\n"
	"jmp 2b");
// clang-format on

static void an_irqfd_interrupts_a_halted_guest(void **state)
{
	struct box *box = box_make(1, guest_irq, guest_irq_end);
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	const uint64_t one = 1;
	struct err err = {0};
	(void)state;

	assert_true(fd >= 0);
	if (kvm_irqfd(&box->kvm, fd, 4, &err) < 0)
		fail_msg("%s", err.msg);
	// It is an error to say so twice, and one with a name.
	assert_int_equal(kvm_irqfd(&box->kvm, fd, 4, &err), -EBUSY);
	assert_non_null(strstr(err.msg, "KVM_IRQFD"));
	box_enter_real_mode(box);
	box_start(box);
	box_wait_log(box, 1);
	for (unsigned int n = 1; n <= 50; n++) {
		assert_int_equal(write(fd, &one, sizeof(one)), sizeof(one));
		box_wait_log(box, n + 1);
		assert_int_equal(box->log[n].val, n);
	}
	vcpus_pause(box->vcpus, 1);
	assert_int_equal(box->nr_log, 51);
	assert_false(box->stopped);
	close(fd);
}

// clang-format off
GUEST(guest_notify, 64,
	"mov $100, %ecx\n"
	"1: movl $7, 0x50(%rdi)\n" // nobody shall see these
	"dec %ecx\n"
	"jnz 1b\n"
	"movl $8, 0x50(%rdi)\n" // another value, width and address are seen
	"movb $7, 0x50(%rdi)\n"
	"movl $7, 0x54(%rdi)\n"
	"1: jmp 1b");
// clang-format on

static void an_ioeventfd_is_signalled_without_an_exit(void **state)
{
	static const struct access want[] = {
		W(false, 0x50, 4, 8),
		W(false, 0x50, 1, 7),
		W(false, 0x54, 4, 7),
	};
	struct box *box = box_make(1, guest_notify, guest_notify_end);
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct err err = {0};
	uint64_t count = 0;
	(void)state;

	assert_true(fd >= 0);
	if (kvm_ioeventfd(&box->kvm, fd, GPA(BOX_MMIO + 0x50), 7, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(kvm_ioeventfd(&box->kvm, fd, GPA(BOX_MMIO + 0x50), 7, &err), -EEXIST);
	assert_non_null(strstr(err.msg, "0xd0000050"));
	box_enter_long_mode(box);
	box_start(box);
	box_wait_log(box, ARRAY_SIZE(want));
	vcpus_pause(box->vcpus, 1);
	expect_log(box, want, ARRAY_SIZE(want));
	assert_int_equal(read(fd, &count, sizeof(count)), sizeof(count));
	assert_int_equal(count, 100);
	assert_int_equal(vcpu_exits(box->vcpus[0], VCPU_EXIT_MMIO), ARRAY_SIZE(want));
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, box_setup, box_teardown)
		TEST(mmio_of_all_sizes),
		TEST(mmio_across_a_page),
		TEST(port_io_of_all_sizes),
		TEST(port_io_of_strings),
		TEST(a_triple_fault_is_a_reset),
		TEST(what_nobody_can_emulate_is_named),
		TEST(a_guest_program_cannot_stop_the_machine),
		TEST(no_kick_is_lost),
		TEST(no_access_is_lost_or_repeated),
		TEST(what_was_paused_before_its_start_waits),
		TEST(the_thread_takes_kicks_and_its_own_bus_errors_alone),
		TEST(a_spinning_guest_can_be_destroyed),
		TEST(where_tells_the_spinning_rip),
		TEST(where_and_pause_do_not_hinder_each_other),
		TEST(the_second_vcpu_waits_for_its_sipi),
		TEST(two_spinning_vcpus_can_be_paused),
		TEST(an_irqfd_interrupts_a_halted_guest),
		TEST(an_ioeventfd_is_signalled_without_an_exit),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
