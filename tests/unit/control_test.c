// SPDX-License-Identifier: Apache-2.0
// vmm/control: requests in pieces and in heaps, descriptors, clients that leave, do not read, or
// come in numbers; nothing is left of any of them.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"
#include "vmm/control.h"
#include "vmm/loop.h"

#define TURN_NS 10000000000ULL

// Methods: "echo" answers with its params, "later" when the test says so, "fd" with the size of the
// file that came along (-1: none), "refuse" fails with -ENOSYS as a system call might.
struct fixture {
	struct loop loop;
	struct control *control;
	char dir[32];
	struct control_client *later; // has a request in work
	unsigned int calls, gone, fds;
};

static int on_call(void *opaque, struct control_client *client, const char *method,
	const json_t *params, int fd, struct err *err)
{
	struct fixture *f = opaque;
	struct stat st = {.st_size = -1};

	f->calls++;
	if (fd >= 0) {
		f->fds++;
		assert_int_equal(fstat(fd, &st), 0);
		assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
		fd_close(&fd);
	}
	if (!strcmp(method, "later")) {
		assert_null(f->later);
		f->later = client;
		return 0;
	}
	if (!strcmp(method, "refuse"))
		return err_set(err, -ENOSYS, "not on this host");
	if (!strcmp(method, "fd"))
		control_reply(client, json_pack("{s:I}", "size", (json_int_t)st.st_size));
	else if (!strcmp(method, "echo"))
		control_reply(client, json_deep_copy(params));
	else
		return CONTROL_NO_METHOD;
	return 0;
}

static void on_gone(void *opaque, struct control_client *client)
{
	struct fixture *f = opaque;

	f->gone++;
	if (f->later == client)
		f->later = NULL;
}

static void setup(struct fixture *f)
{
	struct err err = {0};
	struct control_config config = {
		.loop = &f->loop, .dir = f->dir, .call = on_call, .gone = on_gone, .opaque = f};

	*f = (struct fixture){0};
	strcpy(f->dir, "/tmp/mayfly-control-XXXXXX");
	assert_non_null(mkdtemp(f->dir));
	assert_int_equal(loop_init(&f->loop, &err), 0);
	assert_int_equal(control_create(&f->control, &config, &err), 0);
}

static void teardown(struct fixture *f)
{
	char path[64];

	control_destroy(f->control);
	loop_fini(&f->loop);
	snprintf(path, sizeof(path), "%s/" CONTROL_SOCKET, f->dir);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(rmdir(f->dir), 0);
}

static int join(struct fixture *f)
{
	struct err err = {0};
	int fd = unix_connect(f->dir, CONTROL_SOCKET, &err);

	assert_true(fd >= 0);
	return fd;
}

static void turn(struct fixture *f, uint64_t wait_ns)
{
	struct err err = {0};

	assert_int_equal(loop_turn(&f->loop, wait_ns, &err), 0);
}

// Turns until there is nothing to do at once.
static void settle(struct fixture *f)
{
	for (int i = 0; i < 50; i++)
		turn(f, 0);
}

static void put(int fd, const char *text)
{
	assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
}

// The next line that comes, without its newline; "" at the end of the connection.
static const char *line(struct fixture *f, int fd)
{
	static char text[CONTROL_LINE_BYTES + 1024];
	size_t len = 0;

	for (;;) {
		ssize_t n = recv(fd, text + len, 1, MSG_DONTWAIT);

		if (n < 0 && errno == EAGAIN) {
			turn(f, TURN_NS);
			continue;
		}
		if (n <= 0 || text[len] == '\n')
			break;
		assert_true(++len < sizeof(text));
	}
	text[len] = '\0';
	return text;
}

static void a_request_in_pieces_is_one(void **state)
{
	static const char request[] =
		"{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"echo\",\"params\":{\"x\":1}}\n";
	struct fixture f;
	int fd;
	(void)state;

	setup(&f);
	fd = join(&f);
	for (size_t i = 0; i < strlen(request); i++) {
		assert_int_equal(f.calls, 0);
		assert_int_equal(send(fd, request + i, 1, MSG_NOSIGNAL), 1);
		settle(&f);
	}
	assert_string_equal(
		line(&f, fd), "{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"result\":{\"x\":1}}");
	fd_close(&fd);
	settle(&f);
	assert_int_equal(f.gone, 1);
	teardown(&f);
}

static void requests_in_a_heap_are_answered_in_order(void **state)
{
	struct fixture f;
	int fd;
	(void)state;

	setup(&f);
	fd = join(&f);
	put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n"
		"{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"later\"}\n"
		"{\"jsonrpc\":\"2.0\",\"method\":\"echo\"}\n" // a notification: no answer
		"{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"echo\"}\n");
	assert_non_null(strstr(line(&f, fd), "\"id\":1"));
	while (!f.later)
		turn(&f, TURN_NS);
	settle(&f);
	assert_int_equal(f.calls, 2); // the rest waits
	control_reply(TAKE_PTR(f.later), NULL);
	assert_non_null(strstr(line(&f, fd), "\"id\":2"));
	assert_non_null(strstr(line(&f, fd), "\"id\":3"));
	assert_int_equal(f.calls, 4);
	fd_close(&fd);
	teardown(&f);
}

static void what_is_no_request_is_told_so(void **state)
{
	static const struct {
		const char *request, *answer;
	} cases[] = {
		{"{", "-32700"},
		{"", "-32700"},
		{"\xff\xfe", "-32700"},
		{"{\"id\":1,\"id\":1}", "-32700"},
		{"[]", "-32600"},
		{"7", "-32700"},
		{"{\"id\":1,\"method\":\"echo\"}", "-32600"},
		{"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"echo\"}", "-32600"},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":7}", "-32600"},
		{"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"echo\"}", "-32600"},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":[]}", "-32600"},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"nothing\"}", "-32601"},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"refuse\"}", "-32000"},
	};
	struct fixture f;
	int fd;
	(void)state;

	setup(&f);
	fd = join(&f);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		const char *answer;

		put(fd, cases[i].request);
		put(fd, "\n");
		answer = line(&f, fd);
		if (!strstr(answer, cases[i].answer))
			fail_msg("%s: %s", cases[i].request, answer);
	}
	fd_close(&fd);
	teardown(&f);
}

static void pass(int sock, const char *text, const int *fds, size_t nr)
{
	char space[CMSG_SPACE(sizeof(int) * 4)] = {0};
	struct iovec iov = {(void *)(uintptr_t)text, strlen(text)};
	struct msghdr msg = {.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = space,
		.msg_controllen = CMSG_SPACE(sizeof(int) * nr)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * nr);
	memcpy(CMSG_DATA(c), fds, sizeof(int) * nr);
	assert_int_equal(sendmsg(sock, &msg, MSG_NOSIGNAL), strlen(text));
}

static unsigned int open_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	unsigned int nr = 0;

	assert_non_null(dir);
	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr;
}

static void descriptors_come_along_and_none_is_left(void **state)
{
	struct fixture f;
	int fd, file = memfd_create("x", MFD_CLOEXEC), other = memfd_create("y", MFD_CLOEXEC),
		both[2];
	unsigned int before;
	(void)state;

	assert_int_equal(ftruncate(file, 42), 0);
	both[0] = file;
	both[1] = other;
	setup(&f);
	fd = join(&f);
	put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"fd\"}\n");
	assert_non_null(strstr(line(&f, fd), ":-1}"));
	before = open_fds();
	// Of several the first, and the next if it is asked for; with the line's first half; with
	// what is no request; to a method that wants none.
	pass(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"fd\"}\n", both, 2);
	assert_non_null(strstr(line(&f, fd), ":42}"));
	pass(fd, "{\"jsonrpc\":\"2.0\",", &file, 1);
	settle(&f);
	put(fd, "\"id\":1,\"method\":\"fd\"}\n");
	assert_non_null(strstr(line(&f, fd), ":42}"));
	pass(fd, "{}\n", both, 2);
	assert_non_null(strstr(line(&f, fd), "-32600"));
	pass(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"nothing\"}\n", both, 2);
	assert_non_null(strstr(line(&f, fd), "-32601"));
	put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"fd\"}\n");
	assert_non_null(strstr(line(&f, fd), ":-1}"));
	assert_int_equal(open_fds(), before);
	pass(fd, "{", both, 2); // and it leaves
	settle(&f);
	fd_close(&fd);
	settle(&f);
	assert_int_equal(f.gone, 1);
	assert_int_equal(open_fds(), before - 2);
	teardown(&f);
	fd_close(&file);
	fd_close(&other);
}

static void clients_may_vanish_at_any_time(void **state)
{
	struct fixture f;
	unsigned int before;
	int fd;
	(void)state;

	setup(&f);
	before = open_fds();
	fd = join(&f); // at once
	fd_close(&fd);
	settle(&f);
	fd = join(&f); // in the middle of a line
	put(fd, "{\"jsonrpc\"");
	settle(&f);
	fd_close(&fd);
	settle(&f);
	fd = join(&f); // before the answer
	put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n");
	fd_close(&fd);
	settle(&f);
	fd = join(&f); // while one is in work, with more behind it
	put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"later\"}\n{\"jsonrpc\":");
	while (!f.later)
		turn(&f, TURN_NS);
	fd_close(&fd);
	while (f.gone < 4)
		turn(&f, TURN_NS);
	assert_null(f.later);
	assert_int_equal(open_fds(), before);
	teardown(&f);
}

static void a_line_that_is_too_long_ends_its_client(void **state)
{
	static char much[CONTROL_LINE_BYTES];
	struct fixture f;
	int fd, other;
	(void)state;

	memset(much, ' ', sizeof(much));
	setup(&f);
	fd = join(&f);
	other = join(&f);
	for (size_t sent = 0; sent < sizeof(much);) {
		ssize_t n = send(fd, much + sent, sizeof(much) - sent, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n > 0)
			sent += (size_t)n;
		else
			turn(&f, TURN_NS);
	}
	assert_string_equal(line(&f, fd), "");
	put(other, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n");
	assert_non_null(strstr(line(&f, other), "result"));
	assert_int_equal(f.gone, 1);
	fd_close(&fd);
	fd_close(&other);
	teardown(&f);
}

static void who_does_not_read_is_let_go(void **state)
{
	struct fixture f;
	int fd;
	(void)state;

	setup(&f);
	fd = join(&f);
	while (f.gone == 0) {
		static const char request[] =
			"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n";

		send(fd, request, strlen(request), MSG_NOSIGNAL | MSG_DONTWAIT);
		turn(&f, TURN_NS);
	}
	assert_true(f.calls > 10);
	fd_close(&fd);
	teardown(&f);
}

static void more_than_there_is_room_for_wait_their_turn(void **state)
{
	struct fixture f;
	int fds[CONTROL_CLIENTS_MAX + 4];
	(void)state;

	setup(&f);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = join(&f);
		put(fds[i], "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n");
		settle(&f);
	}
	assert_int_equal(f.calls, CONTROL_CLIENTS_MAX);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		assert_non_null(strstr(line(&f, fds[i]), "result"));
		fd_close(&fds[i]);
	}
	settle(&f);
	assert_int_equal(f.gone, ARRAY_SIZE(fds));
	teardown(&f);
}

static void a_thousand_come_and_go(void **state)
{
	struct fixture f;
	unsigned int before;
	(void)state;

	setup(&f);
	before = open_fds();
	for (unsigned int i = 1; i <= 1000; i++) {
		int fd = join(&f);

		put(fd, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}\n");
		assert_non_null(strstr(line(&f, fd), "result"));
		fd_close(&fd);
		while (f.gone < i)
			turn(&f, TURN_NS);
	}
	assert_int_equal(open_fds(), before);
	teardown(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_request_in_pieces_is_one),
		cmocka_unit_test(requests_in_a_heap_are_answered_in_order),
		cmocka_unit_test(what_is_no_request_is_told_so),
		cmocka_unit_test(descriptors_come_along_and_none_is_left),
		cmocka_unit_test(clients_may_vanish_at_any_time),
		cmocka_unit_test(a_line_that_is_too_long_ends_its_client),
		cmocka_unit_test(who_does_not_read_is_let_go),
		cmocka_unit_test(more_than_there_is_room_for_wait_their_turn),
		cmocka_unit_test(a_thousand_come_and_go),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
