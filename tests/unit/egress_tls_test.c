// SPDX-License-Identifier: Apache-2.0
// egress/tls: a server that proves who it is is spoken to, and no other. Against servers of our
// own, with certificates made for the test.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "egress/tls.h"
#include "tests/support/tls_server.h"
#include "vmm/base/fd.h"

static struct tls_authorities *trust(const char *pem)
{
	char path[] = "/tmp/mayfly-ca-XXXXXX";
	CLEANUP_FD int fd = mkstemp(path);
	struct tls_authorities *a = NULL;
	struct err err = {0};

	assert_int_equal(fd_write_all(fd, pem, strlen(pem)), 0);
	assert_int_equal(tls_authorities_read(path, &a, &err), 0);
	unlink(path);
	return a;
}

static int wait_for(void *opaque, int fd, short events)
{
	struct pollfd p = {.fd = fd, .events = events};
	(void)opaque;

	return poll(&p, 1, 20000) == 1 ? 0 : -ETIMEDOUT;
}

static int open_to(struct tls_server *s, const struct tls_authorities *a, const char *host,
	int *ret_fd, struct tls **ret, struct err *err)
{
	const struct tls_wait wait = {wait_for, NULL};
	int fds[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	*ret_fd = fds[0];
	s->fd = fds[1];
	s->echoed = 0;
	assert_int_equal(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
	assert_int_equal(pthread_create(&s->thread, NULL, tls_serve, s), 0);
	return tls_open(a, fds[0], host, &wait, ret, err);
}

static void close_to(struct tls_server *s, int fd, struct tls *tls)
{
	tls_close(tls);
	fd_close(&fd);
	assert_int_equal(pthread_join(s->thread, NULL), 0);
}

static void refused(struct identity *id, const char *trusted, const char *host, const char *why)
{
	struct tls_authorities *a = trust(trusted);
	struct tls_server s = {.id = id};
	struct tls *tls = NULL;
	struct err err = {0};
	int fd, r = open_to(&s, a, host, &fd, &tls, &err);

	if (r != -EIO || !strstr(err.msg, why))
		fail_msg("%d: '%s' lacks '%s'", r, err.msg, why);
	close_to(&s, fd, tls);
	tls_authorities_free(a);
}

static void who_proves_it(void **state)
{
	static uint8_t out[1000], in[2000];
	struct tls_authorities *a;
	struct identity id;
	struct tls_server s = {.id = &id, .end_after = 100000};
	struct tls *tls = NULL;
	struct err err = {0};
	size_t got = 0;
	ssize_t n = 0;
	int fd;
	(void)state;

	identity_make(&id, "a.test", "20991231000000");
	a = trust(id.pem);
	if (open_to(&s, a, "a.test", &fd, &tls, &err) < 0)
		fail_msg("%s", err.msg);
	for (size_t i = 0; i < sizeof(out); i++)
		out[i] = (uint8_t)(i * 7);
	for (size_t sent = 0; sent < 100000; sent += sizeof(out)) {
		assert_int_equal(tls_write(tls, out, sizeof(out)), 0);
		while ((n = tls_read(tls, in, sizeof(in))) > 0)
			got += (size_t)n;
	}
	while (n != 0 && got < 200000) {
		if (n == -EAGAIN)
			assert_int_equal(wait_for(NULL, fd, POLLIN), 0);
		n = tls_read(tls, in, sizeof(in));
		assert_true(n >= 0 || n == -EAGAIN);
		got += n > 0 ? (size_t)n : 0;
	}
	assert_int_equal(got, 100000);
	assert_int_equal(s.echoed, 100000);
	close_to(&s, fd, tls);
	tls_authorities_free(a);
	identity_free(&id);
}

static void who_does_not(void **state)
{
	struct identity id, other, old;
	struct tls_authorities *none = NULL;
	struct err err = {0};
	(void)state;

	identity_make(&id, "a.test", "20991231000000");
	identity_make(&other, "a.test", "20991231000000");
	identity_make(&old, "a.test", "20200102000000");
	refused(&id, id.pem, "b.test", "is another's");
	refused(&id, other.pem, "a.test", "of nobody whom this host trusts");
	refused(&old, old.pem, "a.test", "not valid today");
	refused(NULL, id.pem, "a.test", "does not speak TLS");
	assert_int_equal(tls_authorities_read("/dev/null", &none, &err), -EBADMSG);
	assert_int_equal(tls_authorities_read("/nonexistent", &none, &err), -EBADMSG);
	identity_free(&id);
	identity_free(&other);
	identity_free(&old);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(who_proves_it),
		cmocka_unit_test(who_does_not),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
