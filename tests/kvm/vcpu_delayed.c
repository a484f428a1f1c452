// SPDX-License-Identifier: Apache-2.0
// vmm/vcpu.c with a place for a delay wherever it has just looked at what is wanted of it: the
// window in which a kick could be lost is a few instructions there, and as long as one likes here.
#include "tests/kvm/vcpu_delayed.h"

#include <stdatomic.h>
#include <stddef.h>

void (*after_look)(void);

#undef atomic_load
#define atomic_load(object)                                                               \
	({                                                                                \
		__auto_type seen_ = atomic_load_explicit((object), memory_order_seq_cst); \
		if (after_look)                                                           \
			after_look();                                                     \
		seen_;                                                                    \
	})

#include "vmm/vcpu.c"
