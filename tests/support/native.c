// SPDX-License-Identifier: Apache-2.0
// The page of code around an instruction under test. All general registers belong to the
// instruction, so everything else is addressed relative to RIP, and a fault handler on a stack of
// its own leads back to the epilogue. One thread.
#include "tests/support/native.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "vmm/base/util.h"

#define PAGE_LEN 4096
#define OFF_RSP  0 // our stack pointer while the instruction runs
#define OFF_GPR  8
#define OFF_FLAG (OFF_GPR + 16 * 8)
#define OFF_CODE 256
#define OFF_INSN 1024
#define OFF_TAIL 2048
#define RFLAGS_1 2 // the bit that is always set

static uint8_t *page; // data, then code
static size_t pos;
static uint64_t fault_exit, code_entry;
static volatile sig_atomic_t fault_signo;
static uint8_t alt_stack[64 * 1024];
static const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
static stack_t old_stack;

static void emit(const void *bytes, size_t len)
{
	ASSERT(pos + len <= PAGE_LEN);
	memcpy(page + pos, bytes, len);
	pos += len;
}

#define EMIT(...) emit((const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__}))

// The last four bytes of an instruction: the distance from its end to target.
static void emit_rel(size_t target)
{
	int32_t rel = (int32_t)((long)target - (long)(pos + 4));

	emit(&rel, 4);
}

static void emit_mov(uint8_t opcode, unsigned int reg, size_t slot)
{
	EMIT((uint8_t)(0x48 | (reg >= 8 ? 4 : 0)), opcode, (uint8_t)(5 | (reg & 7) << 3));
	emit_rel(slot);
}

static void emit_code(void)
{
	size_t leave, fault;

	pos = OFF_CODE;
	code_entry = (uint64_t)(uintptr_t)page + pos;
	EMIT(0x53, 0x55, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57); // push rbx rbp r12-r15
	emit_mov(0x89, 4, OFF_RSP);
	EMIT(0xff, 0x35); // push flags; popfq
	emit_rel(OFF_FLAG);
	EMIT(0x9d);
	for (unsigned int i = 0; i < 16; i++)
		emit_mov(0x8b, i, OFF_GPR + 8 * i);
	EMIT(0xe9); // jmp insn
	emit_rel(OFF_INSN);

	pos = OFF_TAIL;
	for (unsigned int i = 0; i < 16; i++)
		emit_mov(0x89, i, OFF_GPR + 8 * i);
	emit_mov(0x8b, 4, OFF_RSP);
	EMIT(0x9c, 0x8f, 0x05); // pushfq; pop flags
	emit_rel(OFF_FLAG);
	leave = pos;
	EMIT(0x6a, RFLAGS_1, 0x9d); // push 2; popfq
	EMIT(0x41, 0x5f, 0x41, 0x5e, 0x41, 0x5d, 0x41, 0x5c, 0x5d, 0x5b, 0xc3); // pop ...; ret
	fault = pos;
	emit_mov(0x8b, 4, OFF_RSP);
	EMIT(0xe9);
	emit_rel(leave);
	fault_exit = (uint64_t)(uintptr_t)page + fault;
}

static void on_fault(int signo, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;
	uint64_t rip = (uint64_t)uc->uc_mcontext.gregs[REG_RIP];

	(void)info;
	if (rip != native_rip()) { // a fault of the test itself
		signal(signo, SIG_DFL);
		return;
	}
	fault_signo = signo;
	uc->uc_mcontext.gregs[REG_RIP] = (greg_t)fault_exit;
}

void native_init(const void *near)
{
	stack_t stack = {.ss_sp = alt_stack, .ss_size = sizeof(alt_stack)};
	uintptr_t at = (uintptr_t)near & ~(uintptr_t)(PAGE_LEN - 1);
	const uintptr_t reach = 1U << 30, step = 1U << 20;
	int r;

	page = MAP_FAILED;
	for (uintptr_t d = step; d < reach && page == MAP_FAILED; d += step)
		page = mmap((void *)(at - d), PAGE_LEN, PROT_READ | PROT_WRITE | PROT_EXEC,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	ASSERT(page != MAP_FAILED);
	emit_code();
	r = sigaltstack(&stack, &old_stack);
	ASSERT(r == 0);
}

void native_fini(void)
{
	sigaltstack(&old_stack, NULL);
	munmap(page, PAGE_LEN);
}

uint64_t native_rip(void)
{
	return (uint64_t)(uintptr_t)page + OFF_INSN;
}

void native_run(const uint8_t *insn, size_t len, struct native *state)
{
	struct sigaction act = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
	struct sigaction old[ARRAY_SIZE(signals)];
	uint64_t flags = (state->rflags & NATIVE_FLAGS) | RFLAGS_1;
	int r = 0;

	memcpy(page + OFF_GPR, state->gpr, sizeof(state->gpr));
	memcpy(page + OFF_FLAG, &flags, sizeof(flags));
	pos = OFF_INSN;
	emit(insn, len);
	EMIT(0xe9);
	emit_rel(OFF_TAIL);
	fault_signo = 0;
	// Only around the instruction: the test framework has handlers of its own.
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		r |= sigaction(signals[i], &act, &old[i]);
	((void (*)(void))(uintptr_t)code_entry)();
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		r |= sigaction(signals[i], &old[i], NULL);
	ASSERT(r == 0);
	state->signo = fault_signo;
	if (fault_signo)
		return;
	memcpy(state->gpr, page + OFF_GPR, sizeof(state->gpr));
	memcpy(&flags, page + OFF_FLAG, sizeof(flags));
	state->rflags = flags & NATIVE_FLAGS;
}

uint64_t test_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}
