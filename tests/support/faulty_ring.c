// SPDX-License-Identifier: Apache-2.0
// A ring that fails on demand; see the header. One thread.
#include "tests/support/faulty_ring.h"

#include <sys/uio.h>

struct faulty_ring ring;

struct io_uring_sqe *__real_loop_sqe(struct loop *loop, struct loop_op *op);
struct io_uring_sqe *__wrap_loop_sqe(struct loop *loop, struct loop_op *op);
int __real_loop_turn(struct loop *loop, uint64_t timeout_ns, struct err *err);
int __wrap_loop_turn(struct loop *loop, uint64_t timeout_ns, struct err *err);

static void finish_proxy(struct proxy *proxy, int res)
{
	struct loop_op *real = proxy->real;

	proxy->used = false;
	if (ring.completed)
		ring.completed(proxy->seen, res);
	real->done(real, res);
}

static void proxy_done(struct loop_op *op, int res)
{
	struct proxy *proxy = container_of(op, struct proxy, op);

	if (proxy->fault == FAULT_RESULT)
		res = proxy->result;
	if (proxy->fault == FAULT_HOLD) {
		proxy->held = true;
		proxy->result = res;
		return;
	}
	finish_proxy(proxy, res);
}

void release_held(void)
{
	for (unsigned int i = 0; i < PROXIES; i++) {
		struct proxy *proxy = &ring.proxies[i];

		if (!proxy->used || !proxy->held)
			continue;
		proxy->held = false;
		finish_proxy(proxy, proxy->result);
	}
}

struct io_uring_sqe *__wrap_loop_sqe(struct loop *loop, struct loop_op *op)
{
	struct proxy *proxy = ring.proxies;

	while (proxy->used)
		ASSERT(++proxy < ring.proxies + PROXIES);
	*proxy = (struct proxy){.op.done = proxy_done, .real = op, .used = true};
	ring.nr_ops++;
	if (ring.skip) {
		ring.skip--;
	} else if (ring.times) {
		ring.times--;
		proxy->fault = ring.next_fault;
		proxy->result = ring.result;
	}
	return proxy->sqe = __real_loop_sqe(loop, &proxy->op);
}

static void change(struct proxy *proxy)
{
	struct io_uring_sqe *sqe = proxy->sqe;
	const struct iovec *iov = (const struct iovec *)(uintptr_t)sqe->addr;

	if (proxy->fault == FAULT_NONE)
		return;
	ring.nr_faults++;
	if (proxy->fault == FAULT_RESULT) {
		sqe->opcode = IORING_OP_NOP;
		sqe->fd = -1;
	}
	if (proxy->fault == FAULT_HALF &&
		(sqe->opcode == IORING_OP_READ || sqe->opcode == IORING_OP_WRITE))
		sqe->len = (sqe->len + 1) / 2;
	if (sqe->opcode != IORING_OP_READV && sqe->opcode != IORING_OP_WRITEV)
		return;
	if (proxy->fault == FAULT_FIRST)
		sqe->len = 1;
	if (proxy->fault == FAULT_HALF) {
		sqe->opcode = sqe->opcode == IORING_OP_READV ? IORING_OP_READ : IORING_OP_WRITE;
		sqe->addr = (uint64_t)(uintptr_t)iov->iov_base;
		sqe->len = (uint32_t)(iov->iov_len + 1) / 2;
	}
}

static void spoil(struct proxy *proxy)
{
	change(proxy);
	proxy->seen = ring.submitted ? ring.submitted(proxy->sqe) : NULL;
	proxy->sqe = NULL;
}

int __wrap_loop_turn(struct loop *loop, uint64_t timeout_ns, struct err *err)
{
	for (unsigned int i = 0; i < PROXIES; i++)
		if (ring.proxies[i].used && ring.proxies[i].sqe)
			spoil(&ring.proxies[i]);
	return __real_loop_turn(loop, timeout_ns, err);
}

void fault(enum fault how, unsigned int times, int result)
{
	ring.next_fault = how;
	ring.skip = 0;
	ring.times = times;
	ring.result = result;
}
