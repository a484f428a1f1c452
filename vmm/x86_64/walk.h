// SPDX-License-Identifier: Apache-2.0
// The guest's page tables, read in user space. Pure: guest RAM and the registers given are all it
// knows. Any thread.
#ifndef MAYFLY_X86_64_WALK_H
#define MAYFLY_X86_64_WALK_H

#include <linux/kvm.h>

#include "vmm/guest_mem.h"

// Bits of a page fault's error code (SDM vol. 3, 4.7).
#define PF_PRESENT  (1U << 0)
#define PF_WRITE    (1U << 1)
#define PF_USER     (1U << 2)
#define PF_RESERVED (1U << 3)
#define PF_FETCH    (1U << 4)

// What an access is: PF_WRITE, PF_USER (at CPL 3) and PF_FETCH as above, and
#define WALK_SMAP (1U << 16) // a supervisor access that SMAP keeps out of user pages
#define WALK_PEEK (1U << 17) // sets no accessed or dirty bit: for looking, not for the guest

// Translates a linear address as the processor would (4-level and 5-level paging; 4K, 2M and 1G
// pages; without CR0.PG it is the physical one) and sets accessed and dirty bits. Protection keys
// and SMEP are not looked at.
//  0            *ret is the physical address; it need not be RAM
//  -EACCES      the processor would raise #PF; *ret_pf_code is its error code
//  -EFAULT      a table lies outside of RAM
//  -EAGAIN      the guest kept rewriting the entries, a thousand times
//  -EOPNOTSUPP  a 32-bit paging mode
int x86_walk(const struct guest_mem *mem, const struct kvm_sregs *sregs, uint64_t lin,
	uint32_t access, gpa_t *ret, uint32_t *ret_pf_code);

// Whether the paging mode has this linear address at all.
bool x86_canonical(const struct kvm_sregs *sregs, uint64_t lin);

#endif
