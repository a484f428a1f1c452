// SPDX-License-Identifier: Apache-2.0
// vmm/loop: watches are level-triggered and die at once, operations complete, timers keep order,
// nothing leaks.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/loop.h"

static struct loop loop;

static int setup(void **state)
{
	struct err err = {0};

	(void)state;
	return loop_init(&loop, &err) < 0 ? -1 : 0;
}

static int teardown(void **state)
{
	(void)state;
	loop_fini(&loop);
	loop_fini(&loop);
	return 0;
}

static void turn(void)
{
	struct err err = {0};

	assert_int_equal(loop_turn(&loop, 20000000, &err), 0);
}

struct counter {
	int calls;
	uint32_t revents;
	int handle;
	int *delete_too;
};

static void count(void *opaque, uint32_t revents)
{
	struct counter *c = opaque;

	c->calls++;
	c->revents |= revents;
	if (c->delete_too)
		loop_watch_del(&loop, c->delete_too);
}

static void watches_are_level_triggered(void **state)
{
	struct counter c = {0};
	int p[2];
	char byte;
	(void)state;

	assert_int_equal(pipe2(p, O_CLOEXEC | O_NONBLOCK), 0);
	c.handle = loop_watch_add(&loop, p[0], POLLIN, count, &c, NULL);
	assert_true(c.handle >= 0);
	turn();
	assert_int_equal(c.calls, 0);
	assert_int_equal(write(p[1], "x", 1), 1);
	turn();
	turn();
	assert_int_equal(c.calls, 2);
	loop_watch_set(&loop, c.handle, 0);
	turn();
	assert_int_equal(c.calls, 2);
	loop_watch_set(&loop, c.handle, POLLIN);
	turn();
	assert_int_equal(c.calls, 3);
	assert_int_equal(read(p[0], &byte, 1), 1);
	turn();
	assert_int_equal(c.calls, 3);
	fd_close(&p[1]);
	turn();
	assert_true(c.calls > 3 && (c.revents & POLLHUP));
	loop_watch_del(&loop, &c.handle);
	assert_int_equal(c.handle, -1);
	fd_close(&p[0]);
}

static void deleted_watches_are_silent_in_the_same_turn(void **state)
{
	struct counter a = {0}, b = {0};
	int p[2], q[2];
	(void)state;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	assert_int_equal(pipe2(q, O_CLOEXEC), 0);
	a.handle = loop_watch_add(&loop, p[0], POLLIN, count, &a, NULL);
	b.handle = loop_watch_add(&loop, q[0], POLLIN, count, &b, NULL);
	a.delete_too = &b.handle;
	b.delete_too = &a.handle;
	assert_int_equal(write(p[1], "x", 1), 1);
	assert_int_equal(write(q[1], "x", 1), 1);
	turn();
	assert_int_equal(a.calls + b.calls, 1);
	// The slot is used again at once: the old poll's answer must not reach the new owner.
	if (a.handle >= 0)
		loop_watch_del(&loop, &a.handle);
	if (b.handle >= 0)
		loop_watch_del(&loop, &b.handle);
	a = b = (struct counter){0};
	for (int i = 0; i < 100; i++) {
		a.handle = loop_watch_add(&loop, p[0], POLLIN, count, &a, NULL);
		loop_watch_del(&loop, &a.handle);
	}
	b.handle = loop_watch_add(&loop, q[1], POLLIN, count, &b, NULL);
	turn();
	turn();
	assert_int_equal(a.calls, 0);
	assert_int_equal(b.calls, 0);
	loop_watch_del(&loop, &b.handle);
	for (int i = 0; i < 2; i++) {
		fd_close(&p[i]);
		fd_close(&q[i]);
	}
}

static void many_watches_grow_the_table(void **state)
{
	enum { N = 500 };
	static struct counter c[N];
	static int sv[N][2];
	(void)state;

	for (int i = 0; i < N; i++) {
		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv[i]), 0);
		c[i] = (struct counter){.handle = -1};
		c[i].handle = loop_watch_add(&loop, sv[i][0], POLLIN, count, &c[i], NULL);
		assert_true(c[i].handle >= 0);
		assert_int_equal(write(sv[i][1], "x", 1), 1);
	}
	for (int i = 0; i < 10; i++)
		turn();
	for (int i = 0; i < N; i++) {
		assert_true(c[i].calls > 0);
		loop_watch_del(&loop, &c[i].handle);
		fd_close(&sv[i][0]);
		fd_close(&sv[i][1]);
	}
}

struct reader {
	struct loop_op op;
	int res;
	bool called;
};

static void read_done(struct loop_op *op, int res)
{
	struct reader *r = container_of(op, struct reader, op);

	r->res = res;
	r->called = true;
}

static void operations_complete_and_cancel(void **state)
{
	struct reader a = {.op.done = read_done}, b = {.op.done = read_done};
	char buf[4];
	int p[2];
	(void)state;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	io_uring_prep_read(loop_sqe(&loop, &a.op), p[0], buf, sizeof(buf), 0);
	turn();
	assert_false(a.called);
	assert_int_equal(write(p[1], "ab", 2), 2);
	turn();
	assert_true(a.called);
	assert_int_equal(a.res, 2);
	io_uring_prep_read(loop_sqe(&loop, &b.op), p[0], buf, sizeof(buf), 0);
	turn();
	loop_cancel(&loop, &b.op);
	for (int i = 0; i < 10 && !b.called; i++)
		turn();
	assert_true(b.called);
	assert_true(b.res == -ECANCELED || b.res == -EINTR);
	fd_close(&p[0]);
	fd_close(&p[1]);
}

// What a monitor's filter of system calls would not see.
static void a_ring_opens_nothing(void **state)
{
	static const struct {
		const char *name;
		uint8_t op;
	} ops[] = {{"openat", IORING_OP_OPENAT}, {"socket", IORING_OP_SOCKET},
		{"connect", IORING_OP_CONNECT}, {"unlinkat", IORING_OP_UNLINKAT},
		{"splice", IORING_OP_SPLICE}, {"sendmsg", IORING_OP_SENDMSG}};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(ops); i++) {
		struct reader r = {.op.done = read_done};
		struct io_uring_sqe *sqe = loop_sqe(&loop, &r.op);

		io_uring_prep_openat(sqe, AT_FDCWD, "/dev/null", O_RDONLY, 0);
		sqe->opcode = ops[i].op;
		for (int turns = 0; turns < 10 && !r.called; turns++)
			turn();
		assert_true(r.called);
		if (r.res != -EACCES)
			fail_msg("%s: %d", ops[i].name, r.res);
	}
	assert_true(io_uring_register_probe(&loop.ring, NULL, 0) < 0);
}

static int fired[4], nr_fired;

struct numbered_timer {
	struct loop_timer timer;
	int number;
};

static void fire(struct loop_timer *timer)
{
	fired[nr_fired++ & 3] = container_of(timer, struct numbered_timer, timer)->number;
}

static void timers_fire_in_order(void **state)
{
	struct numbered_timer t[3] = {
		{{.fire = fire}, 0},
		{{.fire = fire}, 1},
		{{.fire = fire}, 2},
	};
	uint64_t now = now_ns();
	(void)state;

	nr_fired = 0;
	loop_timer_set(&loop, &t[0].timer, now + 3000000);
	loop_timer_set(&loop, &t[1].timer, now + 1000000);
	loop_timer_set(&loop, &t[2].timer, now + 2000000);
	loop_timer_set(&loop, &t[1].timer, now + 4000000); // re-armed: now the last
	loop_timer_cancel(&loop, &t[2].timer);
	while (nr_fired < 2)
		turn();
	assert_int_equal(fired[0], 0);
	assert_int_equal(fired[1], 1);
	assert_true(now_ns() >= now + 4000000);
	assert_null(loop.timers);
}

static void *stopper(void *arg)
{
	loop_stop(arg);
	return NULL;
}

static void stop_from_another_thread(void **state)
{
	struct err err = {0};
	pthread_t thread;
	(void)state;

	for (int i = 0; i < 100; i++) {
		assert_int_equal(pthread_create(&thread, NULL, stopper, &loop), 0);
		assert_int_equal(loop_run(&loop, &err), 0);
		pthread_join(thread, NULL);
	}
}

static int count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	assert_non_null(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

static void no_fd_leaks(void **state)
{
	int before = count_fds();
	struct err err = {0};
	(void)state;

	for (int i = 0; i < 1000; i++) {
		struct loop l;

		assert_int_equal(loop_init(&l, &err), 0);
		loop_fini(&l);
	}
	assert_int_equal(count_fds(), before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(watches_are_level_triggered, setup, teardown),
		cmocka_unit_test_setup_teardown(
			deleted_watches_are_silent_in_the_same_turn, setup, teardown),
		cmocka_unit_test_setup_teardown(many_watches_grow_the_table, setup, teardown),
		cmocka_unit_test_setup_teardown(operations_complete_and_cancel, setup, teardown),
		cmocka_unit_test_setup_teardown(a_ring_opens_nothing, setup, teardown),
		cmocka_unit_test_setup_teardown(timers_fire_in_order, setup, teardown),
		cmocka_unit_test_setup_teardown(stop_from_another_thread, setup, teardown),
		cmocka_unit_test(no_fd_leaks),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
