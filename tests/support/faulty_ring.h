// SPDX-License-Identifier: Apache-2.0
// Operations in the loop's ring that the host does in part, late or not at all, as the test says;
// and a view of each as it goes in and comes out. Linked with --wrap=loop_sqe,--wrap=loop_turn.
#ifndef MAYFLY_TESTS_FAULTY_RING_H
#define MAYFLY_TESTS_FAULTY_RING_H

#include "vmm/loop.h"

enum fault {
	FAULT_NONE,
	FAULT_HALF, // the first buffer's first half alone
	FAULT_FIRST, // the first buffer alone
	FAULT_RESULT, // nothing, and .result
	FAULT_HOLD, // done, but told only when released
};

struct proxy {
	struct loop_op op;
	struct loop_op *real;
	struct io_uring_sqe *sqe; // while it can be changed
	enum fault fault;
	int result;
	bool used, held;
	void *seen; // what the test made of it when it went in
};

#define PROXIES 1024U

struct faulty_ring {
	struct proxy proxies[PROXIES];
	enum fault next_fault;
	unsigned int times; // how many operations it is for
	unsigned int skip; // after so many that are not spoiled
	int result;
	unsigned int nr_faults, nr_ops;
	// For a test that wants to see them; what the first returns, the second is given.
	void *(*submitted)(const struct io_uring_sqe *sqe);
	void (*completed)(void *seen, int res);
};

extern struct faulty_ring ring;

// What becomes of the next operations.
void fault(enum fault fault, unsigned int times, int result);

void release_held(void);

#endif
