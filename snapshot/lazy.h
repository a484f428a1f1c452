// SPDX-License-Identifier: Apache-2.0
// Guest RAM that is read from a snapshot as it is wanted: a userfaultfd, and the thread that
// answers it. The thread takes no lock and does not look at guest memory, so whoever waits for a
// page, a vCPU, the loop or the kernel on behalf of either, waits for the file alone.
//
// A page that cannot be had ends the machine: what waits for it cannot be told otherwise.
#ifndef MAYFLY_SNAPSHOT_LAZY_H
#define MAYFLY_SNAPSHOT_LAZY_H

#include "snapshot/chain.h"
#include "snapshot/working_set.h"

struct lazy;

struct lazy_config {
	struct chain *chain; // borrowed until lazy_destroy(), and this thread's alone until then
	struct guest_mem *mem; // untouched; borrowed likewise
	// Frames to fetch in this order as long as nobody waits for another; borrowed likewise.
	// NULL: none.
	const struct working_set *prefetch;
	// A page cannot be had. The handler's thread; must end the process.
	void (*failed)(void *opaque, const struct err *err);
	int (*confine)(void *opaque, struct err *err); // the handler's thread, first; may be NULL
	void *opaque;
};

// A userfaultfd, the caller's. -EPERM or -ENOSYS where this user may not have one that answers for
// the kernel, too.
int lazy_open(struct err *err);

// uffd, as lazy_open() gave it, is taken over in any case; of a negative one *err says why already.
int lazy_create(
	struct lazy **ret_lazy, const struct lazy_config *config, int uffd, struct err *err);

// Nobody touches RAM any more. Accepts NULL.
void lazy_destroy(struct lazy *lazy);

uint64_t lazy_faults(const struct lazy *lazy); // that were answered
uint64_t lazy_prefetched(const struct lazy *lazy); // frames that came before anybody wanted them

// The frames that were wanted so far, the first of them, in their order. Any thread.
void lazy_wanted(const struct lazy *lazy, struct working_set *ret_set);

#endif
