// SPDX-License-Identifier: Apache-2.0
// The page walk (SDM vol. 3, chapter 4). Any thread, while the guest runs and may rewrite its
// tables: an entry is read once, and its accessed and dirty bits are set only if it is unchanged.
#include "vmm/x86_64/walk.h"

#include <errno.h>

#define CR0_WP     (1ULL << 16)
#define CR0_PG     (1ULL << 31)
#define CR4_PAE    (1ULL << 5)
#define CR4_LA57   (1ULL << 12)
#define CR4_SMEP   (1ULL << 20)
#define EFER_LMA   (1ULL << 10)
#define EFER_NXE   (1ULL << 11)
#define PTE_P      (1ULL << 0)
#define PTE_RW     (1ULL << 1)
#define PTE_US     (1ULL << 2)
#define PTE_A      (1ULL << 5)
#define PTE_D      (1ULL << 6)
#define PTE_PS     (1ULL << 7)
#define PTE_NX     (1ULL << 63)
#define PTE_ADDR   0x000ffffffffff000ULL
#define LEVELS_MAX 5

// How often the guest may change an entry between our read of it and our setting of its bits.
#define WALK_TRIES_MAX 1000

struct step {
	struct guest_view view;
	uint64_t pte;
};

static unsigned int levels_of(const struct kvm_sregs *sregs)
{
	return sregs->cr4 & CR4_LA57 ? 5 : 4;
}

bool x86_canonical(const struct kvm_sregs *sregs, uint64_t lin)
{
	unsigned int unused = 64 - (12 + 9 * levels_of(sregs));

	return (uint64_t)((int64_t)(lin << unused) >> unused) == lin;
}

static _Atomic uint64_t *entry(const struct step *step)
{
	return (_Atomic uint64_t *)(void *)step->view.hva;
}

// Bits that must be zero, but for those above the processor's physical address width: an address
// that has them is not RAM either.
static bool reserved(const struct kvm_sregs *sregs, uint64_t pte, unsigned int level, bool leaf)
{
	uint64_t mask = sregs->efer & EFER_NXE ? 0 : PTE_NX;

	if (level > 3)
		mask |= PTE_PS;
	else if (leaf && level > 1)
		mask |= (1ULL << (12 + 9 * (level - 1))) - (1ULL << 13);
	return pte & mask;
}

static bool permitted(const struct kvm_sregs *sregs, uint64_t all, uint64_t any, uint32_t access)
{
	if (access & (PF_USER | WALK_SMAP)) {
		bool user = access & PF_USER;

		if (user != !!(all & PTE_US))
			return false;
	}
	if ((access & PF_WRITE) && !(all & PTE_RW) && ((access & PF_USER) || (sregs->cr0 & CR0_WP)))
		return false;
	return !(access & PF_FETCH) || !(any & PTE_NX);
}

// One walk. -EAGAIN if the guest changed an entry meanwhile.
static int walk_once(const struct guest_mem *mem, const struct kvm_sregs *sregs, uint64_t lin,
	uint32_t access, gpa_t *ret, uint32_t *ret_pf_code)
{
	unsigned int level = levels_of(sregs), nr = 0;
	uint32_t code = access & (PF_WRITE | PF_USER);
	uint64_t table = sregs->cr3 & PTE_ADDR, all = PTE_RW | PTE_US, any = 0, page_mask;
	struct step steps[LEVELS_MAX];
	bool leaf;

	if ((access & PF_FETCH) && ((sregs->efer & EFER_NXE) || (sregs->cr4 & CR4_SMEP)))
		code |= PF_FETCH;
	for (;; level--) {
		struct step *step = &steps[nr++];
		uint64_t idx = lin >> (12 + 9 * (level - 1)) & 511;
		int r = guest_mem_view(mem, GPA(table + idx * 8), 8, &step->view);

		if (r < 0)
			return r;
		step->pte = atomic_load_explicit(entry(step), memory_order_acquire);
		if (!(step->pte & PTE_P)) {
			*ret_pf_code = code;
			return -EACCES;
		}
		leaf = level == 1 || (step->pte & PTE_PS); // reserved above 1G pages
		if (reserved(sregs, step->pte, level, leaf)) {
			*ret_pf_code = code | PF_PRESENT | PF_RESERVED;
			return -EACCES;
		}
		all &= step->pte;
		any |= step->pte;
		if (leaf)
			break;
		table = step->pte & PTE_ADDR;
	}
	if (!permitted(sregs, all, any, access)) {
		*ret_pf_code = code | PF_PRESENT;
		return -EACCES;
	}
	for (unsigned int i = 0; i < nr && !(access & WALK_PEEK); i++) {
		struct step *step = &steps[i];
		uint64_t want = step->pte | PTE_A;

		if (i == nr - 1 && (access & PF_WRITE))
			want |= PTE_D;
		if (want == step->pte)
			continue;
		if (!atomic_compare_exchange_strong(entry(step), &step->pte, want))
			return -EAGAIN;
		guest_view_mark_dirty(&step->view, 0, 8);
	}
	page_mask = (1ULL << (12 + 9 * (level - 1))) - 1;
	*ret = GPA((steps[nr - 1].pte & PTE_ADDR & ~page_mask) | (lin & page_mask));
	return 0;
}

int x86_walk(const struct guest_mem *mem, const struct kvm_sregs *sregs, uint64_t lin,
	uint32_t access, gpa_t *ret, uint32_t *ret_pf_code)
{
	int r = -EAGAIN;

	if (!(sregs->cr0 & CR0_PG)) {
		*ret = GPA(lin);
		return 0;
	}
	if (!(sregs->cr4 & CR4_PAE) || !(sregs->efer & EFER_LMA))
		return -EOPNOTSUPP;
	for (unsigned int i = 0; i < WALK_TRIES_MAX && r == -EAGAIN; i++)
		r = walk_once(mem, sregs, lin, access, ret, ret_pf_code);
	return r;
}
