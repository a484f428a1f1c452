// SPDX-License-Identifier: Apache-2.0
// The event loop; see the header. Run by the loop thread.
#include "vmm/loop.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define RING_ENTRIES 128

// The user data of a completion: a pointer to a loop_op, or a watch's slot and generation, or
// nothing of interest. Pointers are aligned, so the low bits tell.
#define TAG_MASK   3ULL
#define TAG_OP     0ULL
#define TAG_WATCH  1ULL
#define TAG_IGNORE 2ULL

#define SLOT_BITS 20
#define SLOTS_MAX (1U << SLOT_BITS)
#define GEN_MASK  0x7ffU // slot and generation fit into a non-negative int

struct loop_watch {
	void (*ready)(void *opaque, uint32_t revents);
	void *opaque;
	int fd;
	uint32_t events;
	uint32_t gen;
	uint32_t poll_seq; // which of this slot's polls is the one that counts
	bool used;
	bool polling; // a poll with poll_seq is in the ring
	int next_free;
};

static uint64_t watch_data(const struct loop *loop, const struct loop_watch *watch)
{
	return (uint64_t)watch->poll_seq << 32 | (uint64_t)(watch - loop->watches) << 2 | TAG_WATCH;
}

static struct io_uring_sqe *get_sqe(struct loop *loop)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&loop->ring);

	while (!sqe) {
		// The queue is full: hand it over. Only a broken ring could refuse for ever, and
		// then there is nothing left to run.
		int r = io_uring_submit(&loop->ring);

		ASSERT(r >= 0 || r == -EBUSY || r == -EAGAIN || r == -EINTR);
		sqe = io_uring_get_sqe(&loop->ring);
	}
	return sqe;
}

struct io_uring_sqe *loop_sqe(struct loop *loop, struct loop_op *op)
{
	struct io_uring_sqe *sqe = get_sqe(loop);

	// The io_uring_prep_* helpers of liburing keep the user data that is set.
	io_uring_sqe_set_data64(sqe, (uint64_t)(uintptr_t)op);
	return sqe;
}

void loop_cancel(struct loop *loop, struct loop_op *op)
{
	struct io_uring_sqe *sqe = get_sqe(loop);

	io_uring_prep_cancel64(sqe, (uint64_t)(uintptr_t)op, 0);
	io_uring_sqe_set_data64(sqe, TAG_IGNORE);
}

static void watch_arm(struct loop *loop, struct loop_watch *watch)
{
	struct io_uring_sqe *sqe = get_sqe(loop);

	watch->poll_seq++;
	watch->polling = true;
	io_uring_prep_poll_add(sqe, watch->fd, watch->events);
	io_uring_sqe_set_data64(sqe, watch_data(loop, watch));
}

static void watch_disarm(struct loop *loop, struct loop_watch *watch)
{
	struct io_uring_sqe *sqe;

	if (!watch->polling)
		return;
	sqe = get_sqe(loop);
	io_uring_prep_poll_remove(sqe, watch_data(loop, watch));
	io_uring_sqe_set_data64(sqe, TAG_IGNORE);
	// Whatever the removed poll still reports carries a stale number.
	watch->poll_seq++;
	watch->polling = false;
}

static struct loop_watch *watch_of(struct loop *loop, int handle)
{
	unsigned int slot = (unsigned int)handle & (SLOTS_MAX - 1);

	ASSERT(handle >= 0 && slot < loop->nr_watches);
	ASSERT(loop->watches[slot].used &&
		loop->watches[slot].gen == (unsigned int)handle >> SLOT_BITS);
	return &loop->watches[slot];
}

static int grow_watches(struct loop *loop)
{
	unsigned int more = loop->nr_watches ? loop->nr_watches * 2 : 16;
	struct loop_watch *grown;

	if (more > SLOTS_MAX)
		return -ENOMEM;
	grown = realloc(loop->watches, more * sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	loop->watches = grown;
	for (unsigned int i = more; i-- > loop->nr_watches;) {
		grown[i] = (struct loop_watch){.fd = -1, .next_free = loop->free_watch};
		loop->free_watch = (int)i;
	}
	loop->nr_watches = more;
	return 0;
}

int loop_watch_add(struct loop *loop, int fd, uint32_t events,
	void (*ready)(void *opaque, uint32_t revents), void *opaque, struct err *err)
{
	struct loop_watch *watch;
	int slot;

	if (loop->free_watch < 0 && grow_watches(loop) < 0)
		return err_errno(err, -ENOMEM, "event loop: another watch");
	slot = loop->free_watch;
	watch = &loop->watches[slot];
	loop->free_watch = watch->next_free;
	watch->ready = ready;
	watch->opaque = opaque;
	watch->fd = fd;
	watch->events = events;
	watch->used = true;
	watch->polling = false;
	if (events)
		watch_arm(loop, watch);
	return (int)(watch->gen << SLOT_BITS | (unsigned int)slot);
}

void loop_watch_set(struct loop *loop, int handle, uint32_t events)
{
	struct loop_watch *watch = watch_of(loop, handle);

	if (watch->events == events)
		return;
	watch_disarm(loop, watch);
	watch->events = events;
	if (events)
		watch_arm(loop, watch);
}

void loop_watch_del(struct loop *loop, int *handle)
{
	struct loop_watch *watch;

	if (*handle < 0)
		return;
	watch = watch_of(loop, *handle);
	watch_disarm(loop, watch);
	watch->used = false;
	watch->gen = (watch->gen + 1) & GEN_MASK;
	watch->next_free = loop->free_watch;
	loop->free_watch = *handle & (int)(SLOTS_MAX - 1);
	*handle = -1;
}

static void watch_complete(struct loop *loop, uint64_t data, int res)
{
	unsigned int slot = (unsigned int)(data >> 2) & (SLOTS_MAX - 1);
	uint32_t seq = (uint32_t)(data >> 32);
	struct loop_watch *watch = &loop->watches[slot];
	uint32_t gen = watch->gen;

	if (!watch->used || !watch->polling || watch->poll_seq != seq)
		return;
	watch->polling = false;
	if (res == -ECANCELED)
		res = 0;
	// A poll that fails (a bad fd) is reported as the error it is, to the watch's owner.
	if (res != 0)
		watch->ready(watch->opaque, res < 0 ? POLLERR : (uint32_t)res);
	// The callback may have deleted the watch, changed it, or made the table move.
	watch = &loop->watches[slot];
	if (watch->used && watch->gen == gen && !watch->polling && watch->events)
		watch_arm(loop, watch);
}

void loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t deadline_ns)
{
	struct loop_timer **at = &loop->timers;

	loop_timer_cancel(loop, timer);
	timer->deadline_ns = deadline_ns;
	while (*at && (*at)->deadline_ns <= deadline_ns)
		at = &(*at)->next;
	timer->next = *at;
	timer->armed = true;
	*at = timer;
}

void loop_timer_cancel(struct loop *loop, struct loop_timer *timer)
{
	if (!timer->armed)
		return;
	for (struct loop_timer **at = &loop->timers; *at; at = &(*at)->next) {
		if (*at != timer)
			continue;
		*at = timer->next;
		break;
	}
	timer->armed = false;
	timer->next = NULL;
}

static void run_timers(struct loop *loop)
{
	// Those that are due now; what a callback arms for now waits for the next turn.
	uint64_t now = loop->timers ? now_ns() : 0;

	while (loop->timers && loop->timers->deadline_ns <= now) {
		struct loop_timer *timer = loop->timers;

		loop_timer_cancel(loop, timer);
		timer->fire(timer);
	}
}

int loop_turn(struct loop *loop, uint64_t timeout_ns, struct err *err)
{
	struct io_uring_cqe *cqe = NULL;
	struct __kernel_timespec ts, *tsp = NULL;
	unsigned int seen = 0;
	int r;

	if (loop->timers) {
		uint64_t now = now_ns(), at = loop->timers->deadline_ns;

		timeout_ns = MIN(timeout_ns, at > now ? at - now : 0);
	}
	if (timeout_ns != UINT64_MAX) {
		ts.tv_sec = (long long)(timeout_ns / 1000000000ULL);
		ts.tv_nsec = (long long)(timeout_ns % 1000000000ULL);
		tsp = &ts;
	}
	r = io_uring_submit_and_wait_timeout(&loop->ring, &cqe, 1, tsp, NULL);
	if (r < 0 && r != -ETIME && r != -EINTR && r != -EBUSY && r != -EAGAIN)
		return err_errno(err, r, "event loop: io_uring_enter");
	// Each completion is given back before its callback, which may submit more or fail.
	while (seen < RING_ENTRIES * 2) {
		uint64_t data;
		int res;

		if (io_uring_peek_cqe(&loop->ring, &cqe) != 0)
			break;
		data = cqe->user_data;
		res = cqe->res;
		io_uring_cqe_seen(&loop->ring, cqe);
		seen++;
		if ((data & TAG_MASK) == TAG_WATCH) {
			watch_complete(loop, data, res);
		} else if ((data & TAG_MASK) == TAG_OP && data) {
			struct loop_op *op = (struct loop_op *)(uintptr_t)data;

			op->done(op, res);
		}
	}
	run_timers(loop);
	return 0;
}

static void on_stop(void *opaque, uint32_t revents)
{
	struct loop *loop = opaque;
	uint64_t count;

	(void)revents;
	if (read(loop->stop_fd, &count, sizeof(count)) == sizeof(count))
		loop->stopping = true;
}

int loop_run(struct loop *loop, struct err *err)
{
	int r = 0;

	while (!loop->stopping && r == 0)
		r = loop_turn(loop, UINT64_MAX, err);
	loop->stopping = false;
	return r;
}

void loop_stop(struct loop *loop)
{
	int saved = errno;
	uint64_t one = 1;
	// Only a counter that is about to overflow refuses, and then the loop has been told.
	ssize_t ignored = write(loop->stop_fd, &one, sizeof(one));

	(void)ignored;
	errno = saved;
}

// What a ring does is no system call that a filter of those would see: so it is told, once and for
// all, what it may do. No file is opened, no socket made by way of it.
static int restrict_ring(struct io_uring *ring)
{
	static const uint8_t ops[] = {
		IORING_OP_POLL_ADD, IORING_OP_POLL_REMOVE, IORING_OP_ASYNC_CANCEL, // this file
		IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READV, IORING_OP_WRITEV, // disks
		IORING_OP_FSYNC, IORING_OP_FALLOCATE,
		IORING_OP_TIMEOUT, // liburing's waiting, before Linux 5.11
	};
	struct io_uring_restriction allowed[ARRAY_SIZE(ops)] = {0};
	unsigned int nr = ARRAY_SIZE(ops) - ((ring->features & IORING_FEAT_EXT_ARG) ? 1 : 0);

	for (unsigned int i = 0; i < nr; i++) {
		allowed[i].opcode = IORING_RESTRICTION_SQE_OP;
		allowed[i].sqe_op = ops[i];
	}
	// liburing's own functions are not in the shared library of its version 2.3.
	if (syscall(SYS_io_uring_register, ring->ring_fd, IORING_REGISTER_RESTRICTIONS, allowed,
		    nr) < 0 ||
		syscall(SYS_io_uring_register, ring->ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL,
			0) < 0)
		return -errno;
	return 0;
}

int loop_init(struct loop *loop, struct err *err)
{
	int r;

	*loop = (struct loop){.stop_fd = -1, .stop_watch = -1, .free_watch = -1};
	r = io_uring_queue_init(RING_ENTRIES, &loop->ring,
		IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
	if (r == -EINVAL) // before Linux 6.1
		r = io_uring_queue_init(RING_ENTRIES, &loop->ring, IORING_SETUP_R_DISABLED);
	if (r == -EPERM || r == -ENOSYS)
		return err_errno(err, r,
			"io_uring is not available (see sysctl kernel.io_uring_disabled, or the "
			"seccomp profile of a container)");
	if (r < 0)
		return err_errno(err, r, "io_uring_setup");
	loop->up = true;
	r = restrict_ring(&loop->ring);
	if (r < 0) {
		loop_fini(loop);
		return err_errno(err, r, "io_uring_register");
	}
	loop->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (loop->stop_fd < 0) {
		r = err_errno(err, -errno, "eventfd");
		loop_fini(loop);
		return r;
	}
	r = loop_watch_add(loop, loop->stop_fd, POLLIN, on_stop, loop, err);
	if (r < 0) {
		loop_fini(loop);
		return r;
	}
	loop->stop_watch = r;
	return 0;
}

void loop_fini(struct loop *loop)
{
	if (!loop->up)
		return;
	io_uring_queue_exit(&loop->ring);
	fd_close(&loop->stop_fd);
	free(loop->watches);
	*loop = (struct loop){.stop_fd = -1, .stop_watch = -1, .free_watch = -1};
}
