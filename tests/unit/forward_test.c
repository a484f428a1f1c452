// SPDX-License-Identifier: Apache-2.0
// cli/forward: bytes arrive whole in both directions, with an end for each; a broken side ends it.
#include "tests/support/test.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/forward.h"
#include "vmm/base/fd.h"

struct run {
	int a, b, stop;
	pthread_t thread;
};

static void *run_forward(void *arg)
{
	struct run *r = arg;

	forward(r->a, r->b, r->stop);
	fd_close(&r->a);
	fd_close(&r->b);
	return NULL;
}

// left and right are the outer ends.
static void start(struct run *r, int *left, int *right, int stop)
{
	int l[2], rr[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, l), 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, rr), 0);
	*left = l[0];
	*right = rr[0];
	*r = (struct run){.a = l[1], .b = rr[1], .stop = stop};
	assert_int_equal(pthread_create(&r->thread, NULL, run_forward, r), 0);
}

struct sender {
	int fd;
	size_t len;
	unsigned seed;
};

static void *send_all(void *arg)
{
	struct sender *s = arg;
	uint8_t buf[5000];

	for (size_t off = 0; off < s->len;) {
		size_t n = MIN(sizeof(buf), s->len - off);

		for (size_t i = 0; i < n; i++)
			buf[i] = (uint8_t)((off + i) * s->seed >> 3);
		if (fd_write_all(s->fd, buf, n) < 0)
			break;
		off += n;
	}
	shutdown(s->fd, SHUT_WR);
	return NULL;
}

static void check_all(int fd, size_t len, unsigned seed)
{
	uint8_t buf[3000];
	size_t got = 0;
	ssize_t n;

	while ((n = read(fd, buf, sizeof(buf))) > 0) {
		for (ssize_t i = 0; i < n; i++)
			assert_int_equal(buf[i], (uint8_t)((got + (size_t)i) * seed >> 3));
		got += (size_t)n;
	}
	assert_int_equal(n, 0);
	assert_int_equal(got, len);
}

static void both_ways_at_once(void **state)
{
	struct run r;
	struct sender ls, rs;
	pthread_t lt, rt;
	int left, right;
	(void)state;

	start(&r, &left, &right, -1);
	ls = (struct sender){left, 3000000, 7};
	rs = (struct sender){right, 1000, 11}; // this way ends long before
	assert_int_equal(pthread_create(&lt, NULL, send_all, &ls), 0);
	assert_int_equal(pthread_create(&rt, NULL, send_all, &rs), 0);
	check_all(left, 1000, 11);
	check_all(right, 3000000, 7);
	pthread_join(lt, NULL);
	pthread_join(rt, NULL);
	pthread_join(r.thread, NULL); // it ends by itself
	fd_close(&left);
	fd_close(&right);
}

static void a_side_that_vanishes_ends_it(void **state)
{
	struct run r;
	int left, right;
	char c;
	(void)state;

	start(&r, &left, &right, -1);
	fd_close(&left);
	assert_int_equal(read(right, &c, 1), 0);
	// What is sent there now goes nowhere, and at last that is noticed.
	while (send(right, "x", 1, MSG_NOSIGNAL) == 1)
		poll(NULL, 0, 1);
	fd_close(&right);
	pthread_join(r.thread, NULL);
}

static void it_can_be_stopped(void **state)
{
	struct run r;
	int left, right, stop = eventfd(0, EFD_CLOEXEC);
	char c;
	(void)state;

	start(&r, &left, &right, stop);
	assert_int_equal(fd_write_all(stop, &(uint64_t){1}, sizeof(uint64_t)), 0);
	pthread_join(r.thread, NULL);
	assert_int_equal(read(left, &c, 1), 0);
	fd_close(&left);
	fd_close(&right);
	fd_close(&stop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(both_ways_at_once),
		cmocka_unit_test(a_side_that_vanishes_ends_it),
		cmocka_unit_test(it_can_be_stopped),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
