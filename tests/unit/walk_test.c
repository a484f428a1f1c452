// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/walk: permissions against a plain model over all combinations, page sizes, error
// codes, accessed and dirty bits, lying tables, and a guest that rewrites an entry meanwhile.
#include "tests/support/test.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "vmm/x86_64/walk.h"

#define RAM_BYTES (64 * PAGE_BYTES)
#define TABLES    0x1000ULL // one page a level, the root first

#define P    (1ULL << 0)
#define RW   (1ULL << 1)
#define US   (1ULL << 2)
#define A    (1ULL << 5)
#define D    (1ULL << 6)
#define PS   (1ULL << 7)
#define PAT  (1ULL << 12)
#define NX   (1ULL << 63)
#define OPEN (P | RW | US)

#define CR0_PG   (1ULL << 31)
#define CR0_WP   (1ULL << 16)
#define CR4_PAE  (1ULL << 5)
#define CR4_LA57 (1ULL << 12)
#define CR4_SMEP (1ULL << 20)
#define LMA      (1ULL << 10)
#define NXE      (1ULL << 11)

// Distinct indices at each level, the offset 0xabc.
#define LIN5 ((3ULL << 48) | LIN4)
#define LIN4 ((5ULL << 39) | (7ULL << 30) | (9ULL << 21) | (11ULL << 12) | 0xabc)

struct world {
	struct guest_mem mem;
	struct kvm_sregs sregs;
};

static int setup(void **state)
{
	const struct guest_mem_range ranges[] = {{GPA(0), RAM_BYTES}};
	struct world *w = calloc(1, sizeof(*w));
	struct err err = {0};

	if (!w || guest_mem_init(&w->mem, ranges, 1, &err) < 0)
		return -1;
	w->sregs.cr0 = CR0_PG | CR0_WP;
	w->sregs.cr4 = CR4_PAE;
	w->sregs.efer = LMA | NXE;
	w->sregs.cr3 = TABLES | 0x18; // cache bits, to be ignored
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	guest_mem_fini(&w->mem);
	free(w);
	return 0;
}

static uint64_t slot(uint64_t lin, unsigned int levels, unsigned int level)
{
	return TABLES + (levels - level) * PAGE_BYTES + (lin >> (12 + 9 * (level - 1)) & 511) * 8;
}

static void put(struct world *w, uint64_t gpa, uint64_t val)
{
	assert_int_equal(guest_mem_write(&w->mem, GPA(gpa), &val, 8), 0);
}

static uint64_t get(struct world *w, uint64_t gpa)
{
	uint64_t val = 0;

	assert_int_equal(guest_mem_read(&w->mem, GPA(gpa), &val, 8), 0);
	return val;
}

// A chain of open tables down to a leaf.
static void map(struct world *w, uint64_t lin, unsigned int leaf_level, uint64_t leaf)
{
	unsigned int levels = w->sregs.cr4 & CR4_LA57 ? 5 : 4;

	for (unsigned int level = levels; level > leaf_level; level--)
		put(w, slot(lin, levels, level),
			(TABLES + (levels - level + 1) * PAGE_BYTES) | OPEN);
	put(w, slot(lin, levels, leaf_level), leaf);
}

static void expect_gpa(struct world *w, uint64_t lin, uint32_t access, uint64_t want)
{
	gpa_t gpa = GPA(0);
	uint32_t code = 0xdead;

	assert_int_equal(x86_walk(&w->mem, &w->sregs, lin, access, &gpa, &code), 0);
	assert_int_equal(gpa.v, want);
	assert_int_equal(code, 0xdead);
}

static void expect_fault(struct world *w, uint64_t lin, uint32_t access, uint32_t want)
{
	gpa_t gpa = GPA(0xdead);
	uint32_t code = 0;

	assert_int_equal(x86_walk(&w->mem, &w->sregs, lin, access, &gpa, &code), -EACCES);
	assert_int_equal(code, want);
	assert_int_equal(gpa.v, 0xdead);
}

static void page_sizes(void **state)
{
	struct world *w = *state;

	for (unsigned int five = 0; five < 2; five++) {
		uint64_t lin = five ? LIN5 : LIN4;

		w->sregs.cr4 = CR4_PAE | (five ? CR4_LA57 : 0);
		map(w, lin, 1, 0x000fedcba9876000 | OPEN);
		expect_gpa(w, lin, 0, 0x000fedcba9876abc);
		// In a last-level entry bit 7 is PAT.
		map(w, lin, 1, 0x000fedcba9876000 | OPEN | PS | NX);
		expect_gpa(w, lin, 0, 0x000fedcba9876abc);
		map(w, lin, 2, 0x000fedcba9800000 | OPEN | PS | PAT);
		expect_gpa(w, lin, 0, 0x000fedcba9800000 | (lin & 0x1fffff));
		map(w, lin, 3, 0x000fedcb80000000 | OPEN | PS | PAT);
		expect_gpa(w, lin, 0, 0x000fedcb80000000 | (lin & 0x3fffffff));
	}
}

static void modes(void **state)
{
	struct world *w = *state;
	gpa_t gpa;
	uint32_t code;

	w->sregs.cr0 = 0;
	expect_gpa(w, 0x12345, PF_WRITE, 0x12345);
	w->sregs.cr0 = CR0_PG;
	w->sregs.efer = 0;
	assert_int_equal(x86_walk(&w->mem, &w->sregs, 0, 0, &gpa, &code), -EOPNOTSUPP);
	w->sregs.efer = LMA;
	w->sregs.cr4 = 0;
	assert_int_equal(x86_walk(&w->mem, &w->sregs, 0, 0, &gpa, &code), -EOPNOTSUPP);

	w->sregs.cr4 = CR4_PAE;
	assert_true(x86_canonical(&w->sregs, 0x00007fffffffffff));
	assert_false(x86_canonical(&w->sregs, 0x0000800000000000));
	assert_false(x86_canonical(&w->sregs, 0xffff7fffffffffff));
	assert_true(x86_canonical(&w->sregs, 0xffff800000000000));
	w->sregs.cr4 |= CR4_LA57;
	assert_true(x86_canonical(&w->sregs, 0x00ffffffffffffff));
	assert_false(x86_canonical(&w->sregs, 0x0100000000000000));
	assert_true(x86_canonical(&w->sregs, 0xff00000000000000));
}

// RW and US in each of the four entries, NX in one, WP, and each kind of access.
static void permissions(void **state)
{
	static const uint32_t kinds[] = {0, PF_WRITE, PF_USER, PF_USER | PF_WRITE, WALK_SMAP,
		WALK_SMAP | PF_WRITE, PF_FETCH, PF_FETCH | PF_USER};
	struct world *w = *state;

	for (unsigned int bits = 0; bits < 1U << 10; bits++) {
		bool all_rw = true, all_us = true, nx = bits >> 8 & 1, wp = bits >> 9 & 1;

		for (unsigned int i = 0; i < 4; i++) {
			bool rw = bits >> i & 1, us = bits >> (4 + i) & 1;
			uint64_t to = i == 3 ? 0x3f000 : TABLES + (i + 1) * PAGE_BYTES;

			put(w, slot(LIN4, 4, 4 - i),
				to | P | (rw ? RW : 0) | (us ? US : 0) |
					(nx && i == bits % 4 ? NX : 0));
			all_rw &= rw;
			all_us &= us;
		}
		w->sregs.cr0 = CR0_PG | (wp ? CR0_WP : 0);
		for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
			uint32_t kind = kinds[i];
			bool user = kind & PF_USER, ok = true;

			if (user && !all_us)
				ok = false;
			if ((kind & WALK_SMAP) && all_us)
				ok = false;
			if ((kind & PF_WRITE) && !all_rw && (user || wp))
				ok = false;
			if ((kind & PF_FETCH) && nx)
				ok = false;
			if (ok)
				expect_gpa(w, LIN4, kind, 0x3fabc);
			else
				expect_fault(w, LIN4, kind, (kind & 0xffff) | PF_PRESENT);
		}
	}
}

static void fault_codes(void **state)
{
	struct world *w = *state;

	// Not present at each level; the other bits of such an entry mean nothing.
	for (unsigned int level = 1; level <= 4; level++) {
		map(w, LIN4, level, ~P);
		expect_fault(w, LIN4, 0, 0);
		expect_fault(w, LIN4, PF_WRITE | PF_USER, PF_WRITE | PF_USER);
		expect_fault(w, LIN4, PF_FETCH, PF_FETCH);
		assert_int_equal(get(w, slot(LIN4, 4, level)), ~P);
	}
	// The fetch bit is there only with NXE or SMEP.
	w->sregs.efer = LMA;
	expect_fault(w, LIN4, PF_FETCH, 0);
	w->sregs.cr4 |= CR4_SMEP;
	expect_fault(w, LIN4, PF_FETCH, PF_FETCH);
	// Without NXE, NX is reserved.
	map(w, LIN4, 1, 0x3f000 | OPEN | NX);
	expect_fault(w, LIN4, 0, PF_PRESENT | PF_RESERVED);
	w->sregs.efer = LMA | NXE;
	expect_gpa(w, LIN4, 0, 0x3fabc);
	// A page of 512G, and bits below the base of a large page.
	map(w, LIN4, 4, 0x2000 | OPEN | PS);
	expect_fault(w, LIN4, PF_WRITE, PF_WRITE | PF_PRESENT | PF_RESERVED);
	for (unsigned int bit = 13; bit < 21; bit++) {
		map(w, LIN4, 2, OPEN | PS | 1ULL << bit);
		expect_fault(w, LIN4, 0, PF_PRESENT | PF_RESERVED);
	}
	for (unsigned int bit = 13; bit < 30; bit++) {
		map(w, LIN4, 3, OPEN | PS | 1ULL << bit);
		expect_fault(w, LIN4, 0, PF_PRESENT | PF_RESERVED);
	}
}

static void accessed_and_dirty(void **state)
{
	struct world *w = *state;
	uint64_t tracked[1] = {0};
	struct err err;

	assert_int_equal(guest_mem_track_start(&w->mem, &err), 0);
	map(w, LIN4, 1, 0x3f000 | P | US);
	guest_mem_track_collect(&w->mem, tracked);

	// Neither a look nor a fault marks anything.
	tracked[0] = 0;
	expect_gpa(w, LIN4, WALK_PEEK, 0x3fabc);
	expect_fault(w, LIN4, PF_WRITE, PF_WRITE | PF_PRESENT);
	for (unsigned int level = 1; level <= 4; level++)
		assert_int_equal(get(w, slot(LIN4, 4, level)) & (A | D), 0);
	guest_mem_track_collect(&w->mem, tracked);
	assert_int_equal(tracked[0], 0);

	// A read marks all entries as accessed, and our own write of them is tracked.
	expect_gpa(w, LIN4, 0, 0x3fabc);
	for (unsigned int level = 1; level <= 4; level++)
		assert_int_equal(get(w, slot(LIN4, 4, level)) & (A | D), A);
	guest_mem_track_collect(&w->mem, tracked);
	assert_int_equal(tracked[0], 0x1e);

	// Nothing to add, nothing written.
	tracked[0] = 0;
	expect_gpa(w, LIN4, 0, 0x3fabc);
	guest_mem_track_collect(&w->mem, tracked);
	assert_int_equal(tracked[0], 0);

	// A write marks the last entry, and only that, as dirty; even where only WP = 0 allows it.
	w->sregs.cr0 = CR0_PG;
	expect_gpa(w, LIN4, PF_WRITE, 0x3fabc);
	assert_int_equal(get(w, slot(LIN4, 4, 1)), 0x3f000 | P | US | A | D);
	for (unsigned int level = 2; level <= 4; level++)
		assert_int_equal(get(w, slot(LIN4, 4, level)) & (A | D), A);
	map(w, LIN4, 2, OPEN | PS);
	expect_gpa(w, LIN4, PF_WRITE, LIN4 & 0x1fffff);
	assert_int_equal(get(w, slot(LIN4, 4, 2)), OPEN | PS | A | D);
	guest_mem_track_stop(&w->mem);
}

static void tables_outside_ram(void **state)
{
	struct world *w = *state;
	gpa_t gpa;
	uint32_t code;

	for (unsigned int level = 2; level <= 4; level++) {
		map(w, LIN4, level, RAM_BYTES | OPEN);
		assert_int_equal(x86_walk(&w->mem, &w->sregs, LIN4, 0, &gpa, &code), -EFAULT);
		map(w, LIN4, level, 0x000ffffffffff000 | OPEN);
		assert_int_equal(x86_walk(&w->mem, &w->sregs, LIN4, 0, &gpa, &code), -EFAULT);
	}
	w->sregs.cr3 = RAM_BYTES;
	assert_int_equal(x86_walk(&w->mem, &w->sregs, LIN4, 0, &gpa, &code), -EFAULT);
	// The last page of RAM is one; a table that points to itself at each level ends.
	w->sregs.cr3 = RAM_BYTES - PAGE_BYTES;
	put(w, RAM_BYTES - 8, (RAM_BYTES - PAGE_BYTES) | OPEN);
	expect_gpa(w, UINT64_MAX, 0, RAM_BYTES - 1);
}

#define ABSENT 0xa5a5a5a5a5a5a00eULL

static struct {
	uint8_t *root; // the page that traps
	uint64_t *leaf;
	uint64_t val;
	unsigned int hits;
} trap;

static void on_write(int signo)
{
	(void)signo;
	trap.hits++;
	*trap.leaf = trap.val;
	if (mprotect(trap.root, PAGE_BYTES, PROT_READ | PROT_WRITE) < 0)
		abort();
}

// Another vCPU rewrites the last entry after the walk has read it and before it is marked: a
// read-only root table stops the walk right there. The walk must start again, and must never set a
// bit in an entry that it did not read.
static void entry_rewritten_meanwhile(void **state)
{
	struct world *w = *state;
	struct sigaction act = {.sa_handler = on_write}, old;
	struct guest_view root, leaf;

	assert_int_equal(guest_mem_view(&w->mem, GPA(TABLES), PAGE_BYTES, &root), 0);
	assert_int_equal(guest_mem_view(&w->mem, GPA(slot(LIN4, 4, 1)), 8, &leaf), 0);
	trap.root = root.hva;
	trap.leaf = (uint64_t *)(void *)leaf.hva;
	assert_int_equal(sigaction(SIGSEGV, &act, &old), 0);

	for (unsigned int i = 0; i < 2; i++) {
		map(w, LIN4, 1, 0x3f000 | OPEN);
		trap.val = i ? 0x3e000 | OPEN : ABSENT;
		trap.hits = 0;
		assert_int_equal(mprotect(trap.root, PAGE_BYTES, PROT_READ), 0);
		if (i)
			expect_gpa(w, LIN4, PF_WRITE, 0x3eabc);
		else
			expect_fault(w, LIN4, PF_WRITE, PF_WRITE);
		assert_int_equal(trap.hits, 1);
		assert_int_equal(*trap.leaf, i ? trap.val | A | D : trap.val);
	}
	sigaction(SIGSEGV, &old, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(page_sizes, setup, teardown),
		cmocka_unit_test_setup_teardown(modes, setup, teardown),
		cmocka_unit_test_setup_teardown(permissions, setup, teardown),
		cmocka_unit_test_setup_teardown(fault_codes, setup, teardown),
		cmocka_unit_test_setup_teardown(accessed_and_dirty, setup, teardown),
		cmocka_unit_test_setup_teardown(tables_outside_ram, setup, teardown),
		cmocka_unit_test_setup_teardown(entry_rewritten_meanwhile, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
