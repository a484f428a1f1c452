// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/assist against the processor: each instruction that user mode may execute runs
// natively on a page of the fake guest's RAM and then in the assist on the same linear address,
// with random values, registers and addressing forms; registers, flags and memory must agree. What
// user mode may not execute, and what only a kernel sees (page faults, SMAP, CR0.TS), by hand.
#include "tests/support/test.h"

#include <asm/ldt.h>
#include <asm/prctl.h>
#include <cpuid.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/support/native.h"
#include "vmm/x86_64/assist.h"
#include "vmm/x86_64/insn.h"
#include "vmm/x86_64/walk.h"

#define RAM_BYTES  (4 * MIB)
#define TABLES     0x1000ULL
#define TABLES_END 0x80000ULL
#define DATA       0x100000ULL // scratch pages of the instructions under test
#define DATA_BYTES (4 * PAGE_BYTES)
#define GS_BASE    0x1234567ULL

#define P        (1ULL << 0)
#define RW       (1ULL << 1)
#define US       (1ULL << 2)
#define FLAG_1   (1ULL << 1)
#define FLAG_ZF  (1ULL << 6)
#define FLAG_IF  (1ULL << 9)
#define FLAG_RF  (1ULL << 16)
#define FLAG_AC  (1ULL << 18)
#define CR0_MP   (1ULL << 1)
#define CR0_TS   (1ULL << 3)
#define CR0_WP   (1ULL << 16)
#define CR0_PG   (1ULL << 31)
#define CR4_PAE  (1ULL << 5)
#define OSXSAVE  (1ULL << 18)
#define CR4_SMAP (1ULL << 21)
#define LMA      (1ULL << 10)
#define NXE      (1ULL << 11)

enum { BP = 3, UD = 6, NM = 7, SS = 12, GP = 13, PF = 14, MF = 16 };

struct world {
	_Alignas(64) uint8_t area[ASSIST_XSAVE_BYTES]; // what KVM holds
	struct guest_mem mem;
	uint8_t *hva; // of guest physical 0, and the linear address that maps it
	uint64_t next_table;
	struct assist_xstate xstate;
	uint64_t xcr0;
	unsigned int nr_sets;
	int fail_get, fail_set;
	struct kvm_regs regs;
	struct kvm_sregs sregs;
	struct assist_cpu cpu;
	struct err err;
	uint64_t rng;
};

// --- The fake vCPU ---------------------------------------------------------------------------

static int get_xsave(void *ctx, void *area, struct err *err)
{
	struct world *w = ctx;

	if (w->fail_get)
		return err_set(err, w->fail_get, "get");
	memcpy(area, w->area, sizeof(w->area));
	return 0;
}

static int set_xsave(void *ctx, const void *area, struct err *err)
{
	struct world *w = ctx;

	if (w->fail_set)
		return err_set(err, w->fail_set, "set");
	memcpy(w->area, area, sizeof(w->area));
	w->nr_sets++;
	return 0;
}

static int get_xcr0(void *ctx, uint64_t *ret_xcr0, struct err *err)
{
	struct world *w = ctx;

	(void)err;
	*ret_xcr0 = w->xcr0;
	return 0;
}

static const struct assist_ops ops = {get_xsave, set_xsave, get_xcr0};

static uint64_t *pte_slot(struct world *w, uint64_t lin)
{
	uint64_t table = TABLES;

	for (unsigned int level = 4;; level--) {
		uint64_t *pte = (uint64_t *)(void *)(w->hva + table) +
				(lin >> (12 + 9 * (level - 1)) & 511);

		if (level == 1)
			return pte;
		if (!*pte) {
			*pte = w->next_table | P | RW | US;
			w->next_table += PAGE_BYTES;
			assert_true(w->next_table <= TABLES_END);
		}
		table = *pte & 0x000ffffffffff000;
	}
}

static uint64_t lin_of(const struct world *w, uint64_t gpa)
{
	return (uint64_t)(uintptr_t)w->hva + gpa;
}

static uint64_t random_of(struct world *w, uint64_t bound)
{
	return test_random(&w->rng) % bound;
}

static void random_fill(struct world *w, void *p, size_t len)
{
	for (size_t i = 0; i < len; i++)
		((uint8_t *)p)[i] = (uint8_t)test_random(&w->rng);
}

static int setup(void **state)
{
	const struct guest_mem_range ranges[] = {{GPA(0), RAM_BYTES}};
	struct world *w = aligned_alloc(64, ALIGN_UP(sizeof(*w), 64UL));

	if (!w)
		return -1;
	*w = (struct world){.next_table = TABLES + PAGE_BYTES, .rng = 42};
	if (guest_mem_init(&w->mem, ranges, 1, &w->err) < 0)
		return -1;
	w->hva = w->mem.regions[0].hva;
	for (uint64_t gpa = 0; gpa < RAM_BYTES; gpa += PAGE_BYTES)
		*pte_slot(w, lin_of(w, gpa)) = gpa | P | RW | US;
	w->sregs.cr0 = CR0_PG | CR0_WP;
	w->sregs.cr3 = TABLES;
	w->sregs.cr4 = CR4_PAE | OSXSAVE;
	w->sregs.efer = LMA | NXE;
	w->sregs.cs.l = 1;
	w->sregs.gs.base = GS_BASE;
	assist_xstate_host(&w->xstate);
	w->cpu = (struct assist_cpu){.regs = &w->regs,
		.sregs = &w->sregs,
		.mem = &w->mem,
		.xstate = &w->xstate,
		.ops = &ops,
		.ctx = w};
	native_init(w->hva);
	if (syscall(SYS_arch_prctl, ARCH_SET_GS, GS_BASE) < 0)
		return -1;
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	syscall(SYS_arch_prctl, ARCH_SET_GS, 0);
	native_fini();
	guest_mem_fini(&w->mem);
	free(w);
	return 0;
}

#define GPR_FIELDS(r)                                                                              \
	{                                                                                          \
		&(r)->rax, &(r)->rcx, &(r)->rdx, &(r)->rbx, &(r)->rsp, &(r)->rbp, &(r)->rsi,       \
			&(r)->rdi, &(r)->r8, &(r)->r9, &(r)->r10, &(r)->r11, &(r)->r12, &(r)->r13, \
			&(r)->r14, &(r)->r15                                                       \
	}

// --- Comparing with the processor ------------------------------------------------------------

// Runs the instruction natively and in the assist, from the same registers, flags and memory.
static void compare(struct world *w, const uint8_t *bytes, size_t len, struct native *nat)
{
	static uint8_t before[DATA_BYTES], after[DATA_BYTES];
	__u64 *const gpr[16] = GPR_FIELDS(&w->regs);
	const uint64_t other_flags = FLAG_1 | FLAG_IF | FLAG_AC;
	struct kvm_regs old;
	int r;

	for (unsigned int i = 0; i < 16; i++)
		*gpr[i] = nat->gpr[i];
	w->regs.rip = native_rip();
	w->regs.rflags = (nat->rflags & NATIVE_FLAGS) | other_flags | FLAG_RF;
	w->sregs.ss.dpl = 3; // as here
	old = w->regs;
	memcpy(before, w->hva + DATA, DATA_BYTES);
	native_run(bytes, len, nat);
	memcpy(after, w->hva + DATA, DATA_BYTES);
	memcpy(w->hva + DATA, before, DATA_BYTES);
	r = assist_run(&w->cpu, bytes, len, &w->err);
	if (r < 0)
		fail_msg("%s", w->err.msg);
	assert_memory_equal(w->hva + DATA, after, DATA_BYTES);
	if (nat->signo) {
		assert_true(w->cpu.has_exception);
		assert_int_equal(w->cpu.vector, nat->signo == SIGILL ? UD : GP);
		assert_int_equal(w->cpu.has_error_code, nat->signo != SIGILL);
		assert_memory_equal(&w->regs, &old, sizeof(old));
		return;
	}
	assert_false(w->cpu.has_exception);
	for (unsigned int i = 0; i < 16; i++)
		if (*gpr[i] != nat->gpr[i])
			fail_msg("%s: register %u is 0x%llx, the processor has 0x%llx", w->cpu.name,
				i, (unsigned long long)*gpr[i], (unsigned long long)nat->gpr[i]);
	assert_int_equal(w->regs.rflags, nat->rflags | other_flags);
	assert_int_equal(w->regs.rip, native_rip() + len);
}

struct form {
	const uint8_t *prefixes; // legacy ones, before REX
	size_t nr_prefixes;
	const uint8_t *opcode;
	size_t nr_opcode;
	bool wide;
	unsigned int reg;
};

#define BYTES(...) (const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__})

static size_t put_head(
	const struct form *form, bool gs, unsigned int index, unsigned int rm, uint8_t *out)
{
	uint8_t rex = (uint8_t)((form->wide ? 8 : 0) | (form->reg >= 8 ? 4 : 0) |
				(index >= 8 ? 2 : 0) | (rm >= 8 ? 1 : 0));
	size_t len = 0;

	if (gs)
		out[len++] = 0x65;
	for (size_t i = 0; i < form->nr_prefixes; i++)
		out[len++] = form->prefixes[i];
	if (rex)
		out[len++] = 0x40 | rex;
	memcpy(out + len, form->opcode, form->nr_opcode);
	return len + form->nr_opcode;
}

static size_t assemble_reg(const struct form *form, unsigned int rm, uint8_t *out)
{
	size_t len = put_head(form, false, 0, rm, out);

	out[len++] = (uint8_t)(0xc0 | (form->reg & 7) << 3 | (rm & 7));
	return len;
}

// One of the encodings of an operand at a linear address, for which registers are set.
static size_t assemble_mem(
	struct world *w, const struct form *form, uint64_t lin, struct native *nat, uint8_t *out)
{
	bool gs = random_of(w, 4) == 0, sib = random_of(w, 2);
	unsigned int kind = (unsigned int)random_of(w, 4); // mod 0 to 2, or without a base
	unsigned int base = (unsigned int)random_of(w, 16), index = 4, scale = 0;
	uint64_t off = lin - (gs ? GS_BASE : 0);
	uint8_t reg = (uint8_t)((form->reg & 7) << 3);
	int32_t disp = 0;
	size_t len;

	if (kind == 3 && !sib) { // RIP-relative
		len = put_head(form, gs, 0, 0, out);
		out[len++] = reg | 5;
		disp = (int32_t)(off - (native_rip() + len + 4));
		memcpy(out + len, &disp, 4);
		return len + 4;
	}
	if (sib || (base & 7) == 4) {
		sib = true;
		do
			index = (unsigned int)random_of(w, 16);
		while (index == base);
		if (kind == 3 && index == 4)
			index = 9;
		scale = kind == 3 ? 0 : (unsigned int)random_of(w, 4);
	}
	if (kind == 0 && (base & 7) == 5)
		kind = 1;
	disp = kind == 1 ? (int8_t)test_random(&w->rng) : (int32_t)test_random(&w->rng);
	if (kind == 0)
		disp = 0;
	off -= (uint64_t)(int64_t)disp;
	if (kind == 3)
		nat->gpr[index] = off;
	else
		nat->gpr[base] = off - (index == 4 ? 0 : nat->gpr[index] << scale);
	len = put_head(form, gs, index, kind == 3 ? 0 : base, out);
	out[len++] = (uint8_t)((kind == 3 ? 0 : kind) << 6 | reg | (sib ? 4 : (base & 7)));
	if (sib)
		out[len++] = (uint8_t)(scale << 6 | (index & 7) << 3 |
				       (kind == 3 ? 5 : (base & 7)));
	memcpy(out + len, &disp, 4);
	return len + (kind == 0 ? 0 : kind == 1 ? 1 : 4);
}

static void random_regs(struct world *w, struct native *nat)
{
	random_fill(w, nat->gpr, sizeof(nat->gpr));
	nat->rflags = test_random(&w->rng);
}

static void popcnt_like_cpu(void **state)
{
	struct world *w = *state;
	unsigned int eax, ebx, ecx = 0, edx;

	__get_cpuid(1, &eax, &ebx, &ecx, &edx);
	if (!(ecx & bit_POPCNT)) {
		print_message("this processor has no POPCNT\n");
		skip();
	}
	for (unsigned int i = 0; i < 20000; i++) {
		static const uint8_t prefixes[] = {0x66, 0xf3};
		unsigned int bytes = 2U << i % 3;
		struct form form = {
			.prefixes = prefixes + (bytes == 2 ? 0 : 1),
			.nr_prefixes = bytes == 2 ? 2 : 1,
			.opcode = (const uint8_t[]){0x0f, 0xb8},
			.nr_opcode = 2,
			.wide = bytes == 8,
			.reg = (unsigned int)random_of(w, 16),
		};
		struct native nat;
		uint8_t insn[INSN_LEN_MAX];
		size_t len;

		random_regs(w, &nat);
		if (random_of(w, 2)) {
			unsigned int rm = (unsigned int)random_of(w, 16);

			if (random_of(w, 8) == 0)
				nat.gpr[rm] &= ~0ULL << random_of(w, 64);
			if (random_of(w, 8) == 0)
				nat.gpr[rm] = 0;
			len = assemble_reg(&form, rm, insn);
		} else {
			// Unaligned, across pages too.
			uint64_t gpa = DATA + PAGE_BYTES - 8 + random_of(w, 16);

			random_fill(w, w->hva + gpa, 8);
			if (random_of(w, 8) == 0)
				memset(w->hva + gpa, 0, 8);
			len = assemble_mem(w, &form, lin_of(w, gpa), &nat, insn);
		}
		compare(w, insn, len, &nat);
		assert_string_equal(w->cpu.name, "popcnt");
	}
}

static void cmpxchg16b_like_cpu(void **state)
{
	struct world *w = *state;
	unsigned int equal = 0, unequal = 0, faults = 0;

	for (unsigned int i = 0; i < 20000; i++) {
		struct form form = {
			.prefixes = (const uint8_t[]){0xf0},
			.nr_prefixes = i & 1,
			.opcode = (const uint8_t[]){0x0f, 0xc7},
			.nr_opcode = 2,
			.wide = true,
			.reg = 1,
		};
		uint64_t gpa = DATA + 16 * random_of(w, DATA_BYTES / 16 - 1);
		struct native nat;
		uint8_t insn[INSN_LEN_MAX];
		size_t len;

		if (random_of(w, 8) == 0)
			gpa += random_of(w, 16);
		random_regs(w, &nat);
		len = assemble_mem(w, &form, lin_of(w, gpa), &nat, insn);
		random_fill(w, w->hva + gpa, 16);
		switch (random_of(w, 4)) { // also halves that agree
		case 0:
		case 1:
			memcpy(w->hva + gpa + 8, &nat.gpr[GPR_RDX], 8);
			memcpy(w->hva + gpa, &nat.gpr[GPR_RAX], 8);
			break;
		case 2:
			memcpy(w->hva + gpa, &nat.gpr[GPR_RAX], 8);
			break;
		default:
			break;
		}
		compare(w, insn, len, &nat);
		assert_string_equal(w->cpu.name, "cmpxchg16b");
		faults += nat.signo != 0;
		equal += !nat.signo && (nat.rflags & FLAG_ZF);
		unequal += !nat.signo && !(nat.rflags & FLAG_ZF);
	}
	assert_true(equal > 1000 && unequal > 1000 && faults > 1000);
}

// LOCK where it may not be: the processor raises #UD, and so does the assist.
static void lock_like_cpu(void **state)
{
	static const struct {
		uint8_t bytes[8];
		size_t len;
	} insns[] = {
		{{0xf0, 0xf3, 0x48, 0x0f, 0xb8, 0xc1}, 6}, // popcnt
		{{0xf0, 0x0f, 0x01, 0xd0}, 4}, // xgetbv
		{{0xf0, 0x48, 0x0f, 0xae, 0x23}, 5}, // xsave
		{{0xf0, 0x48, 0x0f, 0xae, 0x2b}, 5}, // xrstor
		{{0xf0, 0x0f, 0x03, 0xc1}, 4}, // lsl
		{{0xf0, 0x0f, 0x00, 0xe8}, 4}, // verw
		{{0xf0, 0x9b}, 2}, // fwait
		{{0xf0, 0x0f, 0x01, 0xcb}, 4}, // stac: #UD in user mode anyhow
	};
	struct world *w = *state;

	for (size_t i = 0; i < ARRAY_SIZE(insns); i++) {
		struct native nat = {.gpr = {[GPR_RBX] = lin_of(w, DATA)}};

		compare(w, insns[i].bytes, insns[i].len, &nat);
		assert_int_equal(nat.signo, SIGILL);
	}
}

static bool have_xsave(void)
{
	unsigned int eax, ebx, ecx = 0, edx;

	__get_cpuid(1, &eax, &ebx, &ecx, &edx);
	return ecx & bit_OSXSAVE;
}

static uint64_t native_xcr0(void)
{
	uint32_t lo, hi;

	__asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
	return (uint64_t)hi << 32 | lo;
}

static void xgetbv_like_cpu(void **state)
{
	struct world *w = *state;
	struct native nat;

	if (!have_xsave()) {
		print_message("this processor has no XSAVE\n");
		skip();
	}
	w->xcr0 = native_xcr0();
	for (unsigned int i = 0; i < 100; i++) {
		random_regs(w, &nat);
		nat.gpr[GPR_RCX] &= ~0ULL << 32; // only ECX counts
		if (i & 1)
			nat.gpr[GPR_RCX] += 2 + random_of(w, 1000);
		compare(w, BYTES(0x0f, 0x01, 0xd0), &nat);
		assert_int_equal(nat.signo, i & 1 ? SIGSEGV : 0);
	}
}

// --- Segments --------------------------------------------------------------------------------

// Descriptors of all kinds that modify_ldt() lets user mode have.
static unsigned int fill_ldt(void)
{
	unsigned int nr = 0;

	for (unsigned int i = 0; i < 64; i++) {
		struct user_desc desc = {
			.entry_number = nr,
			.base_addr = 0x1000 * i,
			.limit = 0xfffff & (0x12345 * (i + 1)),
			.seg_32bit = i & 1,
			.contents = i >> 1 & 3,
			.read_exec_only = i >> 3 & 1,
			.limit_in_pages = i >> 4 & 1,
			.seg_not_present = i >> 5 & 1,
		};

		if (syscall(SYS_modify_ldt, 1, &desc, sizeof(desc)) == 0)
			nr++;
	}
	return nr;
}

static void segments_like_cpu(void **state)
{
	static const uint8_t prefixes[] = {0x66};
	struct world *w = *state;
	unsigned int nr = fill_ldt(), visible = 0, hidden = 0;
	long bytes;

	if (nr == 0) {
		print_message("modify_ldt() is not to be had here: %s\n", strerror(errno));
		skip();
	}
	bytes = syscall(SYS_modify_ldt, 0, w->hva + DATA + 2 * PAGE_BYTES, PAGE_BYTES);
	assert_true(bytes >= (long)nr * 8);
	w->sregs.ldt.base = lin_of(w, DATA + 2 * PAGE_BYTES);
	w->sregs.ldt.limit = 8 * nr - 1;
	// The fake GDT is not the host's, but neither has anything behind selectors 0 to 3.
	for (unsigned int i = 0; i < 20000; i++) {
		bool lsl = i & 1;
		struct form form = {
			.prefixes = prefixes,
			.nr_prefixes = random_of(w, 2),
			.opcode = lsl ? (const uint8_t[]){0x0f, 0x03}
				      : (const uint8_t[]){0x0f, 0x00},
			.nr_opcode = 2,
			.wide = random_of(w, 2),
			.reg = lsl ? (unsigned int)random_of(w, 16) : 5,
		};
		uint16_t sel = (uint16_t)(random_of(w, nr + 4) << 3 | 4 | random_of(w, 4));
		struct native nat;
		uint8_t insn[INSN_LEN_MAX];
		size_t len;

		if (random_of(w, 16) == 0)
			sel = (uint16_t)random_of(w, 4);
		random_regs(w, &nat);
		if (random_of(w, 2)) {
			unsigned int rm = (unsigned int)random_of(w, 16);

			nat.gpr[rm] = (nat.gpr[rm] & ~0xffffULL) | sel;
			len = assemble_reg(&form, rm, insn);
		} else {
			uint64_t gpa = DATA + PAGE_BYTES - 2 + random_of(w, 4);

			memcpy(w->hva + gpa, &sel, 2);
			len = assemble_mem(w, &form, lin_of(w, gpa), &nat, insn);
		}
		compare(w, insn, len, &nat);
		assert_string_equal(w->cpu.name, lsl ? "lsl" : "verw");
		visible += !!(nat.rflags & FLAG_ZF);
		hidden += !(nat.rflags & FLAG_ZF);
	}
	assert_true(visible > 1000 && hidden > 1000);
}

// --- XSAVE and XRSTOR ------------------------------------------------------------------------

#define BASE_STATE   0x07ULL // x87, SSE, AVX
#define AVX512_STATE 0xe0ULL
#define OFF_MXCSR    24
#define OFF_BV       512

struct image {
	_Alignas(64) uint8_t b[ASSIST_XSAVE_BYTES];
};

// Loads the state `first`, does what middle says to `second` with the components in mask, and puts
// our own state back. all are the components that any of it touches.
#define AROUND(middle)                                                                \
	__asm__ volatile("xor %%edx, %%edx\n\t"                                       \
			 "mov %k[all], %%eax\n\t"                                     \
			 "xsave64 (%[own])\n\t"                                       \
			 "xrstor64 (%[first])\n\t"                                    \
			 "mov %k[mask], %%eax\n\t" middle "mov %k[all], %%eax\n\t"    \
			 "xsave64 (%[last])\n\t"                                      \
			 "xrstor64 (%[own])\n\t"                                      \
			 :                                                            \
			 : [own] "r"(&own), [first] "r"(first), [second] "r"(second), \
			 [last] "r"(last), [mask] "r"(mask), [all] "r"(all)           \
			 : "rax", "rdx", "memory")

enum middle { XSAVE, XSAVE64, XRSTOR, XRSTOR64 };

// *last receives the state at the end.
static void native_xstate(enum middle middle, uint64_t all, const struct image *first, void *second,
	uint64_t mask, struct image *last)
{
	struct image own = {0};

	*last = (struct image){0};
	switch (middle) {
	case XSAVE:
		AROUND("xsave (%[second])\n\t");
		break;
	case XSAVE64:
		AROUND("xsave64 (%[second])\n\t");
		break;
	case XRSTOR:
		AROUND("xrstor (%[second])\n\t");
		break;
	case XRSTOR64:
		AROUND("xrstor64 (%[second])\n\t");
		break;
	}
}

// Makes two areas comparable: initial state where a component is not in use.
static void fill_unused(const struct world *w, struct image *image)
{
	uint64_t bv = get_le64(image->b + OFF_BV);

	if (!(bv & 1)) {
		memset(image->b, 0, OFF_MXCSR);
		memset(image->b + 32, 0, 128);
		put_le16(image->b, 0x37f);
	}
	if (!(bv & 2))
		memset(image->b + 160, 0, 256);
	for (unsigned int i = 2; i < 64; i++)
		if (!(bv >> i & 1))
			memset(image->b + w->xstate.comp[i].off, 0, w->xstate.comp[i].size_bytes);
	put_le64(image->b + OFF_BV, 0);
}

// A state that the processor itself has written down, with a random set of components in use.
static void random_image(struct world *w, uint64_t all, struct image *ret)
{
	struct image raw, again, same;

	random_fill(w, &raw, sizeof(raw));
	memset(raw.b + OFF_BV, 0, 64);
	put_le64(raw.b + OFF_BV, test_random(&w->rng) & all);
	put_le32(raw.b + OFF_MXCSR,
		random_of(w, 4) ? 0x1f80 : (uint32_t)test_random(&w->rng) & w->xstate.mxcsr_mask);
	native_xstate(XRSTOR64, all, &raw, &raw, all, ret);
	native_xstate(XRSTOR64, all, ret, ret, all, &again);
	// What is saved of a state does not change by loading it.
	same = *ret;
	fill_unused(w, &same);
	fill_unused(w, &again);
	assert_memory_equal(&same, &again, sizeof(again));
}

// The components that a test varies; never PKRU, which would take our own memory away.
static void require_state(struct world *w, uint64_t want)
{
	if (!have_xsave() || (native_xcr0() & w->xstate.supported & want) != want) {
		print_message("this processor or its kernel lacks XCR0 bits of 0x%llx\n",
			(unsigned long long)want);
		skip();
	}
	w->xcr0 = want;
}

// Where an area under test lies: aligned, also across the end of a page.
static uint64_t area_gpa(struct world *w)
{
	return DATA + 64 * random_of(w, (DATA_BYTES - ASSIST_XSAVE_BYTES) / 64);
}

static size_t assemble_area(struct world *w, bool wide, unsigned int digit, uint64_t gpa,
	uint64_t mask, struct native *nat, uint8_t *insn)
{
	struct form form = {
		.opcode = (const uint8_t[]){0x0f, 0xae},
		.nr_opcode = 2,
		.wide = wide,
		.reg = digit,
	};
	size_t len;

	// RAX and RDX hold the mask, so forms that want them for the address are passed over.
	do {
		random_regs(w, nat);
		nat->gpr[GPR_RAX] = mask | test_random(&w->rng) << 32;
		nat->gpr[GPR_RDX] = test_random(&w->rng) << 32;
		struct native was = *nat;
		len = assemble_mem(w, &form, lin_of(w, gpa), nat, insn);
		if (was.gpr[GPR_RAX] == nat->gpr[GPR_RAX] && was.gpr[GPR_RDX] == nat->gpr[GPR_RDX])
			return len;
	} while (true);
}

static void run_with(struct world *w, const struct native *nat, const uint8_t *insn, size_t len)
{
	__u64 *const gpr[16] = GPR_FIELDS(&w->regs);

	for (unsigned int i = 0; i < 16; i++)
		*gpr[i] = nat->gpr[i];
	w->regs.rip = native_rip();
	w->regs.rflags = FLAG_1;
	if (assist_run(&w->cpu, insn, len, &w->err) < 0)
		fail_msg("%s", w->err.msg);
}

static void xsave_all_subsets(struct world *w, uint64_t all)
{
	static uint8_t before[DATA_BYTES], after[DATA_BYTES];
	unsigned int moved = 0;

	require_state(w, all);
	for (unsigned int i = 0; i < 8192; i++) {
		bool wide = random_of(w, 2);
		uint64_t mask = i & 0xff, gpa = area_gpa(w); // with components that are not there
		struct image first, last;
		struct native nat;
		uint8_t insn[INSN_LEN_MAX];
		size_t len = assemble_area(w, wide, 4, gpa, mask, &nat, insn);

		random_image(w, all, &first);
		random_fill(w, w->hva + DATA, DATA_BYTES);
		memcpy(before, w->hva + DATA, DATA_BYTES);
		native_xstate(wide ? XSAVE64 : XSAVE, all, &first, w->hva + gpa, mask & all, &last);
		// When it is preempted in between, the host may find that a component in use is in
		// its initial state after all.
		if ((get_le64(w->hva + gpa + OFF_BV) ^ get_le64(last.b + OFF_BV)) & mask & all) {
			moved++;
			continue;
		}
		memcpy(after, w->hva + DATA, DATA_BYTES);
		memcpy(w->hva + DATA, before, DATA_BYTES);
		memcpy(w->area, &last, sizeof(last));
		// What lies in KVM's area for a component that is not in use must not matter.
		for (unsigned int k = 2; k < 64; k++)
			if (!(get_le64(last.b + OFF_BV) >> k & 1))
				random_fill(w, w->area + w->xstate.comp[k].off,
					w->xstate.comp[k].size_bytes);
		run_with(w, &nat, insn, len);
		assert_string_equal(w->cpu.name, "xsave");
		assert_false(w->cpu.has_exception);
		assert_int_equal(w->regs.rip, native_rip() + len);
		if (memcmp(w->hva + DATA, after, DATA_BYTES) != 0)
			for (size_t k = 0; k < DATA_BYTES; k++)
				if (w->hva[DATA + k] != after[k])
					fail_msg("mask 0x%llx wide %d: offset %ld is %02x, the "
						 "processor wrote %02x (before: %02x)",
						(unsigned long long)mask, wide,
						(long)(DATA + k - gpa), w->hva[DATA + k], after[k],
						before[k]);
		assert_int_equal(w->nr_sets, 0);
	}
	assert_true(moved < 100);
}

static void xsave_like_cpu(void **state)
{
	xsave_all_subsets(*state, BASE_STATE);
}

static void xsave_avx512_like_cpu(void **state)
{
	xsave_all_subsets(*state, BASE_STATE | AVX512_STATE);
}

static void xrstor_all_subsets(struct world *w, uint64_t all)
{
	require_state(w, all);
	for (unsigned int i = 0; i < 8192; i++) {
		bool wide = random_of(w, 2);
		uint64_t mask = i & 0xff, gpa = area_gpa(w), bv, in_use;
		struct image first, second, last, ours, theirs;
		struct native nat;
		uint8_t insn[INSN_LEN_MAX];
		size_t len = assemble_area(w, wide, 5, gpa, mask, &nat, insn);

		random_image(w, all, &first);
		random_image(w, all, &second);
		bv = test_random(&w->rng) & all;
		put_le64(second.b + OFF_BV, bv);
		random_fill(w, second.b + 464, 48); // for software's use
		random_fill(w, second.b + 512 + 24, 40); // reserved, but not looked at
		memcpy(w->hva + gpa, &second, sizeof(second));
		native_xstate(XSAVE64, all, &first, w->area, all, &last);
		native_xstate(
			wide ? XRSTOR64 : XRSTOR, all, &first, w->hva + gpa, mask & all, &theirs);

		in_use = get_le64(w->area + OFF_BV);
		w->nr_sets = 0;
		run_with(w, &nat, insn, len);
		assert_string_equal(w->cpu.name, "xrstor");
		assert_false(w->cpu.has_exception);
		assert_int_equal(w->regs.rip, native_rip() + len);
		assert_int_equal(w->nr_sets, 1);
		assert_memory_equal(w->hva + gpa, &second, sizeof(second));
		memcpy(&ours, w->area, sizeof(ours));
		// KVM drops MXCSR if neither SSE nor AVX is in use.
		if (get_le32(ours.b + OFF_MXCSR) != 0x1f80)
			assert_true(get_le64(ours.b + OFF_BV) & 2);
		// Only what was asked for may have come into use.
		assert_int_equal(get_le64(ours.b + OFF_BV) & ~2ULL,
			((in_use & ~mask) | (bv & mask)) & ~2ULL);
		fill_unused(w, &ours);
		fill_unused(w, &theirs);
		for (size_t k = 0; k < sizeof(ours); k++)
			if (ours.b[k] != theirs.b[k])
				fail_msg("mask 0x%llx wide %d XSTATE_BV 0x%llx: offset %zu is %02x,"
					 " the processor has %02x",
					(unsigned long long)mask, wide, (unsigned long long)bv, k,
					ours.b[k], theirs.b[k]);
	}
}

static void xrstor_like_cpu(void **state)
{
	xrstor_all_subsets(*state, BASE_STATE);
}

static void xrstor_avx512_like_cpu(void **state)
{
	xrstor_all_subsets(*state, BASE_STATE | AVX512_STATE);
}

// Whether the processor takes an image, without staying in its state.
static int native_xrstor_signo(uint64_t all, const uint8_t *insn, size_t len, struct native *nat)
{
	static struct image own;

	__asm__ volatile("xsave64 %0" : "+m"(own) : "a"(all), "d"(0));
	native_run(insn, len, nat);
	__asm__ volatile("xrstor64 %0" ::"m"(own), "a"(all), "d"(0) : "memory");
	return nat->signo;
}

// Each byte of the header and of MXCSR, changed one bit at a time, and misalignment.
static void xrstor_faults_like_cpu(void **state)
{
	struct world *w = *state;
	const uint64_t all = BASE_STATE;
	unsigned int taken = 0, refused = 0;

	require_state(w, all);
	w->xcr0 = native_xcr0() & w->xstate.supported;
	for (unsigned int bit = 0; bit < 8 * (64 + 4 + 1); bit++) {
		if (bit < 64 && (native_xcr0() & ~w->xcr0) >> bit & 1)
			continue; // AMX, for which KVM's area has no room
		for (unsigned int k = 0; k < 16; k++) {
			uint64_t gpa = area_gpa(w), mask = random_of(w, 8);
			struct image image, was;
			struct native nat;
			uint8_t insn[INSN_LEN_MAX];
			size_t len, at = bit / 8;

			random_image(w, all, &image);
			if (at < 64)
				image.b[OFF_BV + at] ^= (uint8_t)(1U << bit % 8);
			else if (at < 68)
				image.b[OFF_MXCSR + at - 64] ^= (uint8_t)(1U << bit % 8);
			else
				gpa += 1ULL << bit % 8; // 1 to 32 are wrong, 64 and 128 right
			memcpy(w->hva + gpa, &image, sizeof(image));
			len = assemble_area(w, true, 5, gpa, mask, &nat, insn);
			memcpy(&was, w->area, sizeof(was));
			w->nr_sets = 0;
			run_with(w, &nat, insn, len);
			// The processor knows the compacted format; the assist does not offer it.
			if (bit == 8 * 8 + 63) {
				assert_true(w->cpu.has_exception);
				continue;
			}
			if (native_xrstor_signo(all, insn, len, &nat)) {
				refused++;
				assert_int_equal(nat.signo, SIGSEGV);
				if (!w->cpu.has_exception)
					fail_msg("bit %u mask 0x%llx: the processor refuses it",
						bit, (unsigned long long)mask);
				assert_int_equal(w->cpu.vector, GP);
				assert_true(w->cpu.has_error_code && w->cpu.error_code == 0);
				assert_int_equal(w->regs.rip, native_rip());
				assert_int_equal(w->nr_sets, 0);
				assert_memory_equal(&was, w->area, sizeof(was));
			} else {
				taken++;
				if (w->cpu.has_exception)
					fail_msg("bit %u mask 0x%llx: the processor takes it", bit,
						(unsigned long long)mask);
			}
		}
	}
	assert_true(taken > 1000 && refused > 1000);
}

// --- What only a kernel sees -----------------------------------------------------------------

// Starts over at CPL 0 with RIP in the RAM of the fake guest, and gives the code page its bytes.
static void kernel_at(struct world *w, uint64_t gpa, const uint8_t *bytes, size_t len)
{
	w->regs = (struct kvm_regs){.rip = lin_of(w, gpa), .rflags = FLAG_1 | FLAG_IF | FLAG_RF};
	w->sregs.ss.dpl = 0;
	memcpy(w->hva + gpa, bytes, len);
}

static void expect_exception(
	struct world *w, const uint8_t *bytes, size_t len, uint8_t vector, int64_t code)
{
	struct kvm_regs old = w->regs;

	if (assist_run(&w->cpu, bytes, len, &w->err) < 0)
		fail_msg("%s", w->err.msg);
	assert_true(w->cpu.has_exception);
	assert_int_equal(w->cpu.vector, vector);
	assert_int_equal(w->cpu.has_error_code, code >= 0);
	if (code >= 0)
		assert_int_equal(w->cpu.error_code, code);
	assert_memory_equal(&w->regs, &old, sizeof(old));
}

static void expect_done(struct world *w, const uint8_t *bytes, size_t len)
{
	uint64_t rip = w->regs.rip;

	if (assist_run(&w->cpu, bytes, len, &w->err) < 0)
		fail_msg("%s", w->err.msg);
	assert_false(w->cpu.has_exception);
	assert_int_equal(w->regs.rip, rip + len);
	assert_int_equal(w->regs.rflags & FLAG_RF, 0);
}

static void stac_and_clac(void **state)
{
	struct world *w = *state;

	kernel_at(w, DATA, BYTES(0x90));
	expect_done(w, BYTES(0x0f, 0x01, 0xcb));
	assert_string_equal(w->cpu.name, "stac");
	assert_int_equal(w->regs.rflags, FLAG_1 | FLAG_IF | FLAG_AC);
	expect_done(w, BYTES(0x0f, 0x01, 0xca));
	assert_string_equal(w->cpu.name, "clac");
	assert_int_equal(w->regs.rflags, FLAG_1 | FLAG_IF);
	w->sregs.ss.dpl = 3;
	expect_exception(w, BYTES(0x0f, 0x01, 0xcb), UD, -1);
	expect_exception(w, BYTES(0x0f, 0x01, 0xca), UD, -1);
}

static void int3_is_a_trap(void **state)
{
	struct world *w = *state;
	struct kvm_regs want;

	kernel_at(w, DATA, BYTES(0x90));
	want = w->regs;
	want.rip++;
	assert_int_equal(assist_run(&w->cpu, BYTES(0xcc, 0x90), &w->err), 0);
	assert_string_equal(w->cpu.name, "int3");
	assert_true(w->cpu.has_exception && !w->cpu.has_error_code && !w->cpu.sregs_changed);
	assert_int_equal(w->cpu.vector, BP);
	assert_memory_equal(&w->regs, &want, sizeof(want));
}

static void fwait(void **state)
{
	struct world *w = *state;
	const uint16_t fsw_es = 1 << 7;

	kernel_at(w, DATA, BYTES(0x90));
	expect_done(w, BYTES(0x9b));
	assert_string_equal(w->cpu.name, "fwait");
	w->sregs.cr0 |= CR0_TS;
	expect_done(w, BYTES(0x9b));
	w->sregs.cr0 |= CR0_MP;
	expect_exception(w, BYTES(0x9b), NM, -1);
	w->sregs.cr0 &= ~CR0_TS;
	expect_done(w, BYTES(0x9b));
	put_le16(w->area + 2, fsw_es);
	expect_done(w, BYTES(0x9b)); // x87 is not in use: the word means nothing
	put_le64(w->area + OFF_BV, 1);
	expect_exception(w, BYTES(0x9b), MF, -1);
}

// A system segment has a limit for LSL if it is an LDT or a TSS; CPL 0 sees what CPL 3 does not.
static void lsl_and_verw_in_the_gdt(void **state)
{
	struct world *w = *state;
	uint64_t gdt = DATA + PAGE_BYTES - 32; // its entries lie on two pages

	w->sregs.gdt.base = lin_of(w, gdt);
	w->sregs.gdt.limit = 8 * 20 - 1;
	put_le64(w->hva + gdt, 0x00cff3000000ffff); // would be fine, were it not the null selector
	for (uint64_t type = 1; type < 16; type++)
		put_le64(w->hva + gdt + 8 * type,
			0x000f00000000ffff | type << 40 | 1ULL << 47); // system, DPL 0
	put_le64(w->hva + gdt + 8 * 16, 0x00cf93000000ffff); // kernel data, all of it
	put_le64(w->hva + gdt + 8 * 17, 0x0040f50000000077); // user data, read-only: as CPU node
	put_le64(w->hva + gdt + 8 * 18, 0x00af9b000000ffff); // kernel code
	put_le64(w->hva + gdt + 8 * 19, 0x00af9f000000ffff); // conforming
	for (unsigned int sel = 0; sel < 22 * 8; sel++) {
		unsigned int idx = sel >> 3, rpl = sel & 3;
		uint64_t limit = ~0ULL;

		if (sel & 4)
			continue; // there is no LDT
		if (idx == 2 || idx == 9 || idx == 11)
			limit = rpl == 0 ? 0xfffff : ~0ULL;
		if (idx == 16 || idx == 18)
			limit = rpl == 0 ? 0xffffffff : ~0ULL;
		if (idx == 17)
			limit = 0x77;
		if (idx == 19)
			limit = 0xffffffff;
		for (unsigned int cpl = 0; cpl <= 3; cpl += 3) {
			bool hidden = cpl == 3 && idx != 17 && idx != 19;
			uint64_t want = hidden ? ~0ULL : limit;

			kernel_at(w, DATA, BYTES(0x90));
			w->sregs.ss.dpl = (uint8_t)cpl;
			w->regs.rcx = 0xabcd0000 | sel;
			w->regs.rax = ~0ULL;
			w->regs.rflags ^= sel & 1 ? FLAG_ZF : 0;
			expect_done(w, BYTES(0x48, 0x0f, 0x03, 0xc1)); // lsl rax, rcx
			assert_int_equal(w->regs.rax, want);
			assert_int_equal(!!(w->regs.rflags & FLAG_ZF), want != ~0ULL);
			expect_done(w, BYTES(0x0f, 0x00, 0xe9)); // verw cx
			assert_int_equal(
				!!(w->regs.rflags & FLAG_ZF), idx == 16 && cpl == 0 && rpl == 0);
		}
	}
	// Half a descriptor is none.
	w->sregs.gdt.limit--;
	w->sregs.ss.dpl = 0;
	w->regs.rcx = 8 * 19;
	expect_done(w, BYTES(0x0f, 0x03, 0xc1));
	assert_int_equal(w->regs.rflags & FLAG_ZF, 0);
	// Without an LDT, no selector of it names anything; and a table that is not mapped faults.
	w->regs.rcx = 4;
	w->sregs.ldt.unusable = 1;
	w->sregs.ldt.limit = 0xffff;
	w->sregs.ldt.base = w->sregs.gdt.base;
	expect_done(w, BYTES(0x0f, 0x03, 0xc1));
	assert_int_equal(w->regs.rflags & FLAG_ZF, 0);
	w->regs.rcx = 8 * 16;
	*pte_slot(w, lin_of(w, DATA + PAGE_BYTES)) = 0;
	w->sregs.ss.dpl = 3;
	expect_exception(w, BYTES(0x0f, 0x03, 0xc1), PF, 0);
	assert_int_equal(w->sregs.cr2, w->sregs.gdt.base + 8 * 16);
}

// xsave in a signal frame: the first page is there, the second is not.
static void page_faults(void **state)
{
	static uint8_t before[DATA_BYTES];
	struct world *w = *state;
	uint64_t lin = lin_of(w, DATA + PAGE_BYTES - 512), second = lin_of(w, DATA + PAGE_BYTES);

	w->xcr0 = 3;
	kernel_at(w, DATA + 2 * PAGE_BYTES, BYTES(0x90));
	memset(w->hva + DATA, 0x5a, 2 * PAGE_BYTES);
	memcpy(before, w->hva + DATA, DATA_BYTES);
	w->regs.rbx = lin;
	w->regs.rax = 3;

	*pte_slot(w, second) = 0;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), PF, PF_WRITE); // xsave64 (%rbx)
	assert_true(w->cpu.sregs_changed);
	assert_int_equal(w->sregs.cr2, second);
	w->sregs.ss.dpl = 3;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), PF, PF_WRITE | PF_USER);
	*pte_slot(w, second) = (DATA + PAGE_BYTES) | P | US;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), PF, PF_WRITE | PF_USER | PF_PRESENT);
	*pte_slot(w, second) = (DATA + PAGE_BYTES) | P | RW;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), PF, PF_WRITE | PF_USER | PF_PRESENT);
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x2b), PF, PF_USER | PF_PRESENT); // xrstor64
	assert_memory_equal(w->hva + DATA, before, DATA_BYTES); // nothing of it was written
	assert_int_equal(w->nr_sets, 0);
	w->sregs.ss.dpl = 0;
	expect_done(w, BYTES(0x48, 0x0f, 0xae, 0x23));
	assert_false(w->cpu.sregs_changed);
	assert_memory_not_equal(w->hva + DATA, before, DATA_BYTES);

	// The address is that of the first byte that is missing.
	*pte_slot(w, lin_of(w, DATA)) = 0;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), PF, PF_WRITE);
	assert_int_equal(w->sregs.cr2, lin);
}

static void smap(void **state)
{
	struct world *w = *state;

	kernel_at(w, DATA, BYTES(0x90));
	w->sregs.cr4 |= CR4_SMAP;
	w->regs.rbx = lin_of(w, DATA);
	expect_exception(w, BYTES(0x48, 0x0f, 0xc7, 0x0b), PF, PF_WRITE | PF_PRESENT);
	w->regs.rflags |= FLAG_AC;
	expect_done(w, BYTES(0x48, 0x0f, 0xc7, 0x0b)); // cmpxchg16b (%rbx)
	w->regs.rflags &= ~FLAG_AC;
	*pte_slot(w, lin_of(w, DATA)) &= ~US;
	expect_done(w, BYTES(0x48, 0x0f, 0xc7, 0x0b));
}

static void bad_addresses(void **state)
{
	struct world *w = *state;

	w->xcr0 = 3;
	kernel_at(w, DATA, BYTES(0x90));
	w->regs.rbx = w->regs.rsp = w->regs.rbp = w->regs.r12 = w->regs.r13 = 1ULL << 47;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), GP, 0); // (%rbx)
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x24, 0x24), SS, 0); // (%rsp)
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x65, 0x00), SS, 0); // (%rbp)
	expect_exception(w, BYTES(0x49, 0x0f, 0xae, 0x24, 0x24), GP, 0); // (%r12)
	expect_exception(w, BYTES(0x49, 0x0f, 0xae, 0x65, 0x00), GP, 0); // (%r13)
	expect_exception(w, BYTES(0x65, 0x48, 0x0f, 0xae, 0x24, 0x24), GP, 0); // %gs:(%rsp)
	// The last byte counts too.
	w->regs.rbx -= 512;
	expect_exception(w, BYTES(0x48, 0x0f, 0xae, 0x23), GP, 0);
	// FS has a base of its own.
	w->regs.rbx = 64;
	w->sregs.fs.base = lin_of(w, DATA);
	memset(w->hva + DATA, 0xff, 4096);
	expect_done(w, BYTES(0x64, 0x48, 0x0f, 0xae, 0x23)); // EDX:EAX = 0: the header alone
	assert_int_equal(get_le64(w->hva + DATA + 64 + OFF_BV), ~0ULL);
	w->regs.rax = 1;
	expect_done(w, BYTES(0x64, 0x48, 0x0f, 0xae, 0x23));
	assert_int_equal(get_le64(w->hva + DATA + 64 + OFF_BV), ~1ULL);
	assert_int_equal(get_le16(w->hva + DATA + 64), 0x37f);
	w->regs.rax = 2;
	expect_done(w, BYTES(0x64, 0x48, 0x0f, 0xae, 0x23));
	assert_int_equal(get_le32(w->hva + DATA + 64 + OFF_MXCSR + 4), w->xstate.mxcsr_mask);
}

// A component of the upper half, which EDX selects, at the very end of KVM's area.
static void xsave_upper_half(void **state)
{
	const uint64_t comp = 1ULL << 40;
	const size_t off = ASSIST_XSAVE_BYTES - 24;
	struct world *w = *state;
	uint8_t *buf = w->hva + DATA + 64;

	w->xcr0 = 3 | comp;
	w->xstate.supported |= comp;
	w->xstate.comp[40].off = (uint32_t)off;
	w->xstate.comp[40].size_bytes = 24;
	kernel_at(w, DATA + 3 * PAGE_BYTES, BYTES(0x90));
	w->regs.rbx = lin_of(w, DATA + 64);
	w->regs.rdx = 1U << 8;
	memset(w->area + off, 0x77, 24);
	put_le64(w->area + OFF_BV, comp);
	expect_done(w, BYTES(0x48, 0x0f, 0xae, 0x23));
	assert_memory_equal(buf + off, w->area + off, 24);
	assert_int_equal(get_le64(buf + OFF_BV), comp);
	assert_int_equal(buf[off - 1], 0);
	assert_int_equal(buf[off + 24], 0);
	memset(buf + off, 0x88, 24);
	put_le32(w->area + OFF_MXCSR, 0x1f80);
	expect_done(w, BYTES(0x48, 0x0f, 0xae, 0x2b));
	assert_memory_equal(buf + off, w->area + off, 24);
	assert_int_equal(get_le64(w->area + OFF_BV), comp);
	w->regs.rdx = 0;
	memset(buf + off, 0x99, 24);
	expect_done(w, BYTES(0x48, 0x0f, 0xae, 0x2b));
	assert_int_equal(w->area[off], 0x88);
}

static struct world *trap_world;
static unsigned int trap_hits;

static void on_write(int signo)
{
	(void)signo;
	trap_hits++;
	if (mprotect(trap_world->hva + DATA, PAGE_BYTES, PROT_READ | PROT_WRITE) < 0)
		abort();
	put_le64(trap_world->hva + DATA, 5);
}

// Another vCPU writes at the last moment: the page is read-only, so that the write of the assist
// stops, whatever it has read by then, and the other one comes first.
static void cmpxchg16b_is_atomic(void **state)
{
	struct sigaction act = {.sa_handler = on_write}, old;
	struct world *w = *state;

	kernel_at(w, DATA + 3 * PAGE_BYTES, BYTES(0x90));
	w->regs.rdi = lin_of(w, DATA);
	w->regs.rbx = 1;
	trap_world = w;
	trap_hits = 0;
	assert_int_equal(sigaction(SIGSEGV, &act, &old), 0);
	assert_int_equal(mprotect(w->hva + DATA, PAGE_BYTES, PROT_READ), 0);
	expect_done(w, BYTES(0xf0, 0x48, 0x0f, 0xc7, 0x0f)); // lock cmpxchg16b (%rdi)
	sigaction(SIGSEGV, &old, NULL);
	assert_int_equal(trap_hits, 1);
	assert_int_equal(w->regs.rflags & FLAG_ZF, 0);
	assert_int_equal(w->regs.rax, 5);
	assert_int_equal(get_le64(w->hva + DATA), 5);
}

static void xsave_needs_the_kernels_leave(void **state)
{
	static const uint8_t insns[3][4] = {
		{0x48, 0x0f, 0xae, 0x23}, {0x48, 0x0f, 0xae, 0x2b}, {0x48, 0x0f, 0x01, 0xd0}};
	struct world *w = *state;

	w->xcr0 = 3;
	kernel_at(w, DATA, BYTES(0x90));
	w->regs.rbx = lin_of(w, DATA + PAGE_BYTES);
	w->sregs.cr4 &= ~OSXSAVE;
	for (size_t i = 0; i < 3; i++)
		expect_exception(w, insns[i], 4, UD, -1);
	w->sregs.cr4 |= OSXSAVE;
	w->sregs.cr0 |= CR0_TS;
	for (size_t i = 0; i < 2; i++)
		expect_exception(w, insns[i], 4, NM, -1);
	expect_done(w, insns[2], 4);
	w->sregs.cr0 &= ~CR0_TS;
	for (size_t i = 0; i < 2; i++)
		expect_done(w, insns[i], 4);
	w->regs.rcx = 1;
	expect_exception(w, insns[2], 4, GP, 0);
	// The compacted format is not offered.
	put_le64(w->hva + DATA + PAGE_BYTES + OFF_BV + 8, 1ULL << 63);
	expect_exception(w, insns[1], 4, GP, 0);
}

// --- Failures of the host, and what is not completed -----------------------------------------

static void expect_error(struct world *w, const uint8_t *bytes, size_t len, int want)
{
	struct kvm_regs old_regs = w->regs;
	struct kvm_sregs old_sregs = w->sregs;
	unsigned int nr_sets = w->nr_sets;

	w->err = (struct err){0};
	assert_int_equal(assist_run(&w->cpu, bytes, len, &w->err), want);
	assert_int_equal(w->err.code, want);
	assert_memory_equal(&w->regs, &old_regs, sizeof(old_regs));
	assert_memory_equal(&w->sregs, &old_sregs, sizeof(old_sregs));
	assert_int_equal(w->nr_sets, nr_sets);
}

static void unknown_is_named(void **state)
{
	static const struct {
		uint8_t bytes[6];
		size_t len;
	} insns[] = {
		{{0x90}, 1}, {{0x06}, 1}, // not an instruction
		{{0xc5, 0xfe, 0x6f, 0x03}, 4}, // vmovdqu
		{{0x66, 0x0f, 0x01, 0xcb}, 4}, // stac with a prefix it may not have
		{{0xf3, 0x0f, 0x01, 0xca}, 4}, // clac so
		{{0x0f, 0x01, 0xf9}, 3}, // rdtscp
		{{0x66, 0x0f, 0xae, 0x33}, 4}, // clwb
		{{0xf3, 0x0f, 0xae, 0x23}, 4}, // ptwrite
		{{0x48, 0x0f, 0xae, 0x33}, 4}, // xsaveopt
		{{0x48, 0x0f, 0xc7, 0x23}, 4}, // xsavec
		{{0x0f, 0xae, 0xe3}, 3}, // xsave of a register
		{{0x0f, 0xae, 0xe8}, 3}, // lfence
		{{0x48, 0x0f, 0xb8, 0xc1}, 4}, // popcnt without F3
		{{0xf2, 0x0f, 0xb8, 0xc1}, 4}, // with F2
		{{0x0f, 0xc7, 0x0b}, 3}, // cmpxchg8b
		{{0x66, 0x48, 0x0f, 0xc7, 0x0b}, 5}, // cmpxchg16b with 66
		{{0x48, 0x0f, 0xc7, 0xf0}, 4}, // rdrand
		{{0x66, 0x0f, 0x38, 0x82, 0x03}, 5}, // invpcid
		{{0x0f, 0x00, 0xe1}, 3}, // verr
		{{0x0f, 0x02, 0xc1}, 3}, // lar
	};
	struct world *w = *state;
	char text[64];

	kernel_at(w, DATA, BYTES(0x90));
	w->regs.rbx = lin_of(w, DATA);
	for (size_t i = 0; i < ARRAY_SIZE(insns); i++) {
		expect_error(w, insns[i].bytes, insns[i].len, -ENOSYS);
		assert_null(w->cpu.name);
		snprintf(text, sizeof(text), "%02x ", insns[i].bytes[0]);
		assert_non_null(strstr(w->err.msg, text));
		snprintf(text, sizeof(text), "rip 0x%llx", (unsigned long long)w->regs.rip);
		assert_non_null(strstr(w->err.msg, text));
	}
	// Outside of 64-bit mode nothing is looked at.
	w->sregs.cs.l = 0;
	expect_error(w, BYTES(0x0f, 0x01, 0xcb), -ENOSYS);
	w->sregs.cs.l = 1;
	w->sregs.efer = 0;
	expect_error(w, BYTES(0x0f, 0x01, 0xcb), -ENOSYS);
}

static void host_failures(void **state)
{
	struct world *w = *state;

	w->xcr0 = 3;
	kernel_at(w, DATA, BYTES(0x90));
	w->regs.rbx = lin_of(w, DATA + PAGE_BYTES);
	w->fail_get = -EIO;
	expect_error(w, BYTES(0x9b), -EIO);
	expect_error(w, BYTES(0x48, 0x0f, 0xae, 0x23), -EIO);
	w->fail_get = 0;
	w->fail_set = -EINVAL;
	expect_error(w, BYTES(0x48, 0x0f, 0xae, 0x2b), -EINVAL);
	w->fail_set = 0;
	// Components that KVM's area has no place for.
	w->xcr0 = 3 | 1ULL << 62;
	expect_error(w, BYTES(0x48, 0x0f, 0xae, 0x23), -EOPNOTSUPP);
	w->xcr0 = 3;
	// An operand in no RAM, as a whole or with its second page, and a page table there.
	*pte_slot(w, w->regs.rbx) = RAM_BYTES | P | RW;
	expect_error(w, BYTES(0x48, 0x0f, 0xae, 0x23), -EFAULT);
	assert_non_null(strstr(w->err.msg, "xsave"));
	w->regs.rbx -= 512;
	expect_error(w, BYTES(0x48, 0x0f, 0xae, 0x23), -EFAULT);
	assert_int_equal(get_le64(w->hva + DATA + PAGE_BYTES - 512), 0);
	w->sregs.cr3 = RAM_BYTES;
	expect_error(w, BYTES(0x48, 0x0f, 0xc7, 0x0b), -EFAULT);
}

// KVM reports what it had fetched when it gave up; the rest comes from guest RAM.
static void bytes_fetched(void **state)
{
	static const uint8_t popcnt[] = {0xf3, 0x48, 0x0f, 0xb8, 0xc1};
	struct world *w = *state;
	uint64_t gpa = DATA + PAGE_BYTES - 3; // the instruction lies on two pages

	for (size_t given = 0; given <= sizeof(popcnt); given++) {
		kernel_at(w, gpa, popcnt, sizeof(popcnt));
		w->regs.rcx = 0xff;
		assert_int_equal(assist_run(&w->cpu, given ? popcnt : NULL, given, &w->err), 0);
		assert_string_equal(w->cpu.name, "popcnt");
		assert_int_equal(w->regs.rax, 8);
		assert_int_equal(w->regs.rip, lin_of(w, gpa) + sizeof(popcnt));
	}
	// The second page is not there, or not for executing, or not RAM.
	kernel_at(w, gpa, popcnt, sizeof(popcnt));
	*pte_slot(w, lin_of(w, DATA + PAGE_BYTES)) = 0;
	expect_exception(w, popcnt, 3, PF, PF_FETCH);
	assert_int_equal(w->sregs.cr2, lin_of(w, DATA + PAGE_BYTES));
	*pte_slot(w, lin_of(w, DATA + PAGE_BYTES)) = (DATA + PAGE_BYTES) | P | 1ULL << 63;
	expect_exception(w, popcnt, 0, PF, PF_FETCH | PF_PRESENT);
	*pte_slot(w, lin_of(w, DATA + PAGE_BYTES)) = RAM_BYTES | P;
	expect_error(w, popcnt, 3, -EFAULT);
	// Fifteen bytes without an end are no instruction.
	memset(w->hva + DATA, 0x66, 32);
	w->regs.rip = lin_of(w, DATA);
	expect_error(w, NULL, 0, -ENOSYS);
}

// What the assist writes to guest memory is in the dirty map.
static void writes_are_tracked(void **state)
{
	struct world *w = *state;
	uint64_t dirty[RAM_BYTES / PAGE_BYTES / 64] = {0};
	const uint64_t page = DATA / PAGE_BYTES;

	w->xcr0 = 3;
	kernel_at(w, DATA + 3 * PAGE_BYTES, BYTES(0x90));
	w->regs.rax = 3;
	assert_int_equal(guest_mem_track_start(&w->mem, &w->err), 0);
	w->regs.rbx = lin_of(w, DATA + PAGE_BYTES - 512);
	expect_done(w, BYTES(0x48, 0x0f, 0xae, 0x23));
	w->regs.rbx = lin_of(w, DATA + 2 * PAGE_BYTES);
	expect_done(w, BYTES(0x48, 0x0f, 0xc7, 0x0b));
	guest_mem_track_collect(&w->mem, dirty);
	guest_mem_track_stop(&w->mem);
	assert_int_equal(dirty[page / 64] >> page % 64 & 0xf, 0x7);
}

static void layout_of_the_host(void **state)
{
	struct world *w = *state;
	unsigned int eax, ebx, ecx, edx;

	assert_int_equal(w->xstate.mxcsr_mask & 0xffbf, 0xffbf);
	if (!have_xsave()) {
		print_message("this processor has no XSAVE\n");
		skip();
	}
	assert_int_equal(w->xstate.supported & 3, 3);
	__get_cpuid_count(0xd, 0, &eax, &ebx, &ecx, &edx);
	for (unsigned int i = 2; i < 64; i++) {
		if (!(w->xstate.supported >> i & 1)) {
			assert_int_equal(w->xstate.comp[i].size_bytes, 0);
			continue;
		}
		assert_true(w->xstate.comp[i].off >= 576);
		assert_true(w->xstate.comp[i].off + w->xstate.comp[i].size_bytes <= ecx);
	}
	if (w->xstate.supported & 4) {
		assert_int_equal(w->xstate.comp[2].off, 576);
		assert_int_equal(w->xstate.comp[2].size_bytes, 256);
	}
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(popcnt_like_cpu),
		TEST(cmpxchg16b_like_cpu),
		TEST(lock_like_cpu),
		TEST(xgetbv_like_cpu),
		TEST(segments_like_cpu),
		TEST(xsave_like_cpu),
		TEST(xsave_avx512_like_cpu),
		TEST(xrstor_like_cpu),
		TEST(xrstor_avx512_like_cpu),
		TEST(xrstor_faults_like_cpu),
		TEST(stac_and_clac),
		TEST(int3_is_a_trap),
		TEST(fwait),
		TEST(lsl_and_verw_in_the_gdt),
		TEST(page_faults),
		TEST(smap),
		TEST(bad_addresses),
		TEST(xsave_upper_half),
		TEST(cmpxchg16b_is_atomic),
		TEST(xsave_needs_the_kernels_leave),
		TEST(unknown_is_named),
		TEST(host_failures),
		TEST(bytes_fetched),
		TEST(writes_are_tracked),
		TEST(layout_of_the_host),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
