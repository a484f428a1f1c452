// SPDX-License-Identifier: Apache-2.0
// Runs one instruction on the real processor with all general registers and the flags given, so
// that a test can compare an interpreter of ours with it. One thread; x86-64.
#ifndef MAYFLY_TESTS_NATIVE_H
#define MAYFLY_TESTS_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct native {
	uint64_t gpr[16]; // in the order of their encoding
	uint64_t rflags; // only the arithmetic flags are loaded
	int signo; // of the fault, or 0
};

#define NATIVE_FLAGS 0x8d5ULL // OF SF ZF AF PF CF

// The code lies within 1 GiB below near. Asserts on failure.
void native_init(const void *near);
void native_fini(void);

// Where the instruction lies while it runs.
uint64_t native_rip(void);

// Runs it. If it faults (SIGSEGV, SIGBUS or SIGILL), state->signo is set and nothing else changed.
void native_run(const uint8_t *insn, size_t len, struct native *state);

// A deterministic generator for tests (splitmix64).
uint64_t test_random(uint64_t *state);

#endif
