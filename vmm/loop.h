// SPDX-License-Identifier: Apache-2.0
// The event loop of a VM: one io_uring, run by one thread, which owns all queues, sockets and
// control. Everything here but loop_stop() is for that thread alone, callbacks included.
//
// Three kinds of events: completions of operations (struct loop_op, for block I/O and the like),
// readiness of a file descriptor (a watch), and timers. Submissions of one turn go to the kernel
// in one system call, which also waits.
#ifndef MAYFLY_LOOP_H
#define MAYFLY_LOOP_H

#include <liburing.h>

#include "vmm/base/err.h"

// An operation in flight. Embedded in its owner's request, which lives until done is called;
// cancelling asks for it to be called soon (with -ECANCELED), it never drops the call.
struct loop_op {
	void (*done)(struct loop_op *op, int res); // res as of the system call: >= 0 or -errno
};

struct loop_watch;

struct loop_timer {
	void (*fire)(struct loop_timer *timer);
	uint64_t deadline_ns; // CLOCK_MONOTONIC
	struct loop_timer *next;
	bool armed;
};

struct loop {
	struct io_uring ring;
	struct loop_watch *watches; // slots; the handle names a slot and its generation
	unsigned int nr_watches;
	int free_watch; // head of the free list, -1 at its end
	struct loop_timer *timers; // armed ones, soonest first
	int stop_fd;
	int stop_watch;
	bool stopping;
	bool up;
};

// Makes the ring. -ENOSYS or -EPERM where io_uring is not to be had (the message tells the cure).
int loop_init(struct loop *loop, struct err *err);

// Accepts a zeroed or half-made object. The owners of operations in flight have waited for them.
void loop_fini(struct loop *loop);

// Runs until loop_stop(), which any thread and a signal handler may call, once loop_init() has
// returned. Returns 0, or a negative errno if the ring itself fails.
int loop_run(struct loop *loop, struct err *err);
void loop_stop(struct loop *loop);

// One turn: submits, waits for at most timeout_ns (UINT64_MAX: as long as it takes), and calls
// back. For tests, and for draining.
int loop_turn(struct loop *loop, uint64_t timeout_ns, struct err *err);

// A submission entry whose completion calls op->done; the caller prepares it with io_uring_prep_*
// before its next call into the loop, and leaves its user data and the CQE flags alone. Never NULL.
struct io_uring_sqe *loop_sqe(struct loop *loop, struct loop_op *op);

// An entry that is prepared already and ends up as a no-op if cancelled in time.
void loop_cancel(struct loop *loop, struct loop_op *op);

// Calls ready(opaque, revents) whenever the fd has one of events (POLLIN, POLLOUT; POLLERR and
// POLLHUP always), level-triggered: again as long as the condition holds. events 0 pauses the
// watch. The fd stays the caller's, who deletes the watch before closing it.
// Returns a handle >= 0, or -ENOMEM.
int loop_watch_add(struct loop *loop, int fd, uint32_t events,
	void (*ready)(void *opaque, uint32_t revents), void *opaque, struct err *err);
void loop_watch_set(struct loop *loop, int handle, uint32_t events);

// Nothing is called for this watch from now on, not even in the turn that is under way.
// Sets *handle to -1; accepts -1.
void loop_watch_del(struct loop *loop, int *handle);

// Arms (or re-arms) a timer that fires once.
void loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t deadline_ns);
void loop_timer_cancel(struct loop *loop, struct loop_timer *timer);

#endif
