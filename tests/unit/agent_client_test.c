// SPDX-License-Identifier: Apache-2.0
// The host's end of the agent protocol against a real agent behind a stand-in for the monitor, and
// against guests that lie, stall and vanish.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "guest/proto/frame.h"
#include "tests/support/fake_guest.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

#define PATIENCE_NS 60000000000ULL

static char dir[] = "/tmp/mayfly-client-test-XXXXXX";

static uint64_t soon(void)
{
	return now_ns() + PATIENCE_NS;
}

static int connect_guest(void)
{
	return fake_guest_connect(dir);
}

static struct agent_exec exec_of(const char *const *argv)
{
	return (struct agent_exec){.argv = argv,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = -1};
}

static int temp_file(void)
{
	int fd = open(dir, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	return fd;
}

static char *content_of(int fd)
{
	static char text[2][1 << 20];
	static int which;
	ssize_t n;

	which = !which;
	n = fd_pread_full(fd, text[which], sizeof(text[0]) - 1, 0);
	assert_true(n >= 0);
	text[which][n] = '\0';
	return text[which];
}

static void run(struct agent_exec *x, struct agent_result *result)
{
	struct err err = {0};
	CLEANUP_FD int fd = connect_guest();

	if (agent_exec(fd, x, result, &err) < 0)
		fail_msg("%s", err.msg);
}

static void output_status_and_usage(void **state)
{
	static const char *const argv[] = {
		"sh", "-c", "echo out; echo err >&2; echo \"$A\"; exit 3", NULL};
	static const char *const env[] = {"A=\"\\\x01\n", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	(void)state;

	x.env = env;
	x.out_fd = temp_file();
	x.err_fd = temp_file();
	run(&x, &r);
	assert_int_equal(r.exit_code, 3);
	assert_int_equal(r.signal, 0);
	assert_true(r.max_rss_bytes > 0);
	assert_string_equal(content_of(x.out_fd), "out\n\"\\\x01\n\n");
	assert_string_equal(content_of(x.err_fd), "err\n");
	fd_close(&x.out_fd);
	fd_close(&x.err_fd);
}

static void ends_other_than_exit(void **state)
{
	static const char *const killed[] = {"sh", "-c", "kill -9 $$", NULL};
	static const char *const late[] = {"sleep", "300", NULL};
	static const char *const missing[] = {"no-such-command", NULL};
	static const char *const folder[] = {"/", NULL};
	struct agent_exec x = exec_of(killed);
	struct agent_result r;
	struct err err = {0};
	int fd;
	(void)state;

	run(&x, &r);
	assert_int_equal(r.exit_code, 137);
	assert_int_equal(r.signal, 9);
	assert_false(r.timed_out);

	x = exec_of(late);
	x.timeout_ms = 100;
	run(&x, &r);
	assert_int_equal(r.exit_code, 137);
	assert_true(r.timed_out);

	x = exec_of(missing);
	fd = connect_guest();
	assert_int_equal(agent_exec(fd, &x, &r, &err), -ENOENT);
	assert_int_equal(r.exit_code, 127);
	assert_string_equal(err.msg, "no-such-command: command not found");
	fd_close(&fd);

	x = exec_of(folder);
	fd = connect_guest();
	assert_int_equal(agent_exec(fd, &x, &r, &err), -EISDIR);
	assert_int_equal(r.exit_code, 126);
	fd_close(&fd);
}

static void too_large_a_command_is_told(void **state)
{
	static char big[FRAME_PAYLOAD_MAX];
	const char *const argv[] = {"true", big, NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct err err = {0};
	int fd = connect_guest();
	(void)state;

	memset(big, 'a', sizeof(big) - 1);
	assert_int_equal(agent_exec(fd, &x, &r, &err), -E2BIG);
	assert_int_equal(r.exit_code, 125);
	fd_close(&fd);
}

static void stdin_goes_through_whole(void **state)
{
	static const char *const argv[] = {"cat", NULL};
	static char data[900000];
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	(void)state;

	for (size_t i = 0; i < sizeof(data) - 1; i++)
		data[i] = (char)(1 + i * 31 % 255);
	x.in_fd = temp_file();
	x.out_fd = temp_file();
	assert_int_equal(fd_write_all(x.in_fd, data, sizeof(data) - 1), 0);
	assert_int_equal(lseek(x.in_fd, 0, SEEK_SET), 0);
	run(&x, &r);
	assert_int_equal(r.exit_code, 0);
	assert_memory_equal(content_of(x.out_fd), data, sizeof(data));
	fd_close(&x.in_fd);
	fd_close(&x.out_fd);
}

static void stdin_that_cannot_be_read_is_not_its_end(void **state)
{
	static const char *const argv[] = {"cat", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r = {0};
	struct err err = {0};
	CLEANUP_FD int fd = connect_guest();
	(void)state;

	x.in_fd = open("/", O_RDONLY | O_CLOEXEC);
	assert_int_equal(agent_exec(fd, &x, &r, &err), -EISDIR);
	assert_string_equal(err.msg, "input: Is a directory");
	fd_close(&x.in_fd);
}

static void stdin_that_never_ends_does_not_hold_us(void **state)
{
	static const char *const argv[] = {"head", "-c", "10", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	int p[2];
	(void)state;

	// First a source without end, then one that says nothing.
	x.in_fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	x.out_fd = temp_file();
	run(&x, &r);
	assert_int_equal(r.exit_code, 0);
	assert_int_equal(lseek(x.out_fd, 0, SEEK_END), 10);
	fd_close(&x.in_fd);
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	x.in_fd = p[0];
	x.argv = (const char *const[]){"echo", "x", NULL};
	run(&x, &r);
	assert_int_equal(r.exit_code, 0);
	fd_close(&p[0]);
	fd_close(&p[1]);
	fd_close(&x.out_fd);
}

struct slow_reader {
	int fd;
	size_t bytes;
};

static void *read_slowly(void *arg)
{
	struct slow_reader *s = arg;
	char buf[1000];
	ssize_t n;

	while ((n = read(s->fd, buf, sizeof(buf))) > 0) {
		s->bytes += (size_t)n;
		if (s->bytes < 20000)
			poll(NULL, 0, 1);
	}
	return NULL;
}

static void slow_output_loses_nothing(void **state)
{
	static const char *const argv[] = {"head", "-c", "3000000", "/dev/zero", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct slow_reader s = {0};
	pthread_t thread;
	int p[2];
	(void)state;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	s.fd = p[0];
	x.out_fd = p[1];
	assert_int_equal(pthread_create(&thread, NULL, read_slowly, &s), 0);
	run(&x, &r);
	fd_close(&p[1]);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(r.exit_code, 0);
	assert_int_equal(s.bytes, 3000000);
	fd_close(&p[0]);
}

static void closed_output_ends_the_call(void **state)
{
	static const char *const argv[] = {"yes", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct err err = {0};
	int p[2], fd = connect_guest();
	(void)state;

	signal(SIGPIPE, SIG_IGN);
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	fd_close(&p[0]);
	x.out_fd = p[1];
	assert_int_equal(agent_exec(fd, &x, &r, &err), -EPIPE);
	assert_int_equal(r.exit_code, 125);
	fd_close(&p[1]);
	fd_close(&fd);
	signal(SIGPIPE, SIG_DFL);
}

static int signal_fd_for_tests(void)
{
	sigset_t set;
	int fd;

	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGWINCH);
	assert_int_equal(sigprocmask(SIG_BLOCK, &set, NULL), 0);
	fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	assert_true(fd >= 0);
	return fd;
}

struct signaller {
	int fd; // readable when the command is there
	int signals[3];
};

static void *signal_when_ready(void *arg)
{
	struct signaller *s = arg;
	char byte;

	for (int i = 0; i < 3 && s->signals[i]; i++) {
		if (read(s->fd, &byte, 1) != 1)
			return NULL;
		kill(getpid(), s->signals[i]);
	}
	return NULL;
}

static void signalled(const char *script, const int signals[3], int want_rc, int want_exit)
{
	const char *const argv[] = {"sh", "-c", script, NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct err err = {0};
	struct signaller s = {.signals = {signals[0], signals[1], signals[2]}};
	pthread_t thread;
	int p[2], fd = connect_guest(), rc;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	x.signal_fd = signal_fd_for_tests();
	s.fd = p[0];
	x.out_fd = p[1];
	assert_int_equal(pthread_create(&thread, NULL, signal_when_ready, &s), 0);
	rc = agent_exec(fd, &x, &r, &err);
	fd_close(&p[1]);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(rc, want_rc);
	assert_int_equal(r.exit_code, want_exit);
	fd_close(&p[0]);
	fd_close(&x.signal_fd);
	fd_close(&fd);
}

static void signals_are_passed_on(void **state)
{
	(void)state;
	signalled("printf x; exec sleep 300", (const int[3]){SIGINT}, 0, 130);
	signalled("trap 'exit 5' USR1; printf x; while :; do sleep 0.05; done",
		(const int[3]){SIGUSR1}, 0, 5);
	// One that ignores them is left at the third.
	signalled("trap 'printf x' INT; printf x; while :; do sleep 0.05; done",
		(const int[3]){SIGINT, SIGINT, SIGINT}, -EINTR, 130);
}

// A terminal of our own: what we write to *ret_master is typed.
static int open_terminal(int *ret_master, struct winsize size)
{
	int unlocked = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), slave;

	assert_true(master >= 0);
	assert_int_equal(ioctl(master, TIOCSPTLCK, &unlocked), 0);
	assert_int_equal(ioctl(master, TIOCSWINSZ, &size), 0);
	slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	assert_true(slave >= 0);
	*ret_master = master;
	return slave;
}

struct typist {
	int fd; // output of the command
	int master, slave;
	bool was_raw;
	char seen[4096];
	size_t len;
};

static bool typist_until(struct typist *t, const char *what)
{
	while (!strstr(t->seen, what)) {
		ssize_t n = read(t->fd, t->seen + t->len, sizeof(t->seen) - 1 - t->len);

		if (n <= 0)
			return false;
		t->len += (size_t)n;
		t->seen[t->len] = '\0';
	}
	return true;
}

static void type_all(struct typist *t)
{
	struct winsize size = {.ws_row = 50, .ws_col = 101};
	struct termios now;

	if (!typist_until(t, "31 71"))
		return;
	t->was_raw = tcgetattr(t->slave, &now) == 0 && !(now.c_lflag & (ICANON | ECHO | ISIG));
	if (ioctl(t->master, TIOCSWINSZ, &size) < 0)
		return;
	kill(getpid(), SIGWINCH);
	// Until the new size has arrived on the other side.
	for (int i = 0; !strstr(t->seen, "50 101"); i++) {
		char mark[32], command[64];

		snprintf(mark, sizeof(mark), "<%d>", i);
		snprintf(command, sizeof(command), "stty size; echo '<'%d'>'\n", i);
		fd_write_all(t->master, command, strlen(command));
		if (!typist_until(t, mark) || t->len > sizeof(t->seen) / 2)
			return;
	}
	fd_write_all(t->master, "\x03", 1);
	if (typist_until(t, "interrupted"))
		fd_write_all(t->master, "exit 8\n", 7);
}

static void *type(void *arg)
{
	struct typist *t = arg;

	type_all(t);
	fd_write_all(t->master, "exit 9\n", 7); // or it would wait for ever
	return NULL;
}

static void terminal_is_raw_meanwhile_and_follows_ours(void **state)
{
	static const char *const argv[] = {"sh", "-c",
		"trap 'echo interrupted' INT; stty size; "
		"while :; do read line && eval \"$line\"; done",
		NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct typist t = {0};
	struct termios before, after;
	pthread_t thread;
	int p[2];
	(void)state;

	x.tty = true;
	x.in_fd = open_terminal(&t.master, (struct winsize){.ws_row = 31, .ws_col = 71});
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	x.out_fd = p[1];
	x.signal_fd = signal_fd_for_tests();
	t.fd = p[0];
	t.slave = x.in_fd;
	assert_int_equal(tcgetattr(x.in_fd, &before), 0);
	assert_int_equal(pthread_create(&thread, NULL, type, &t), 0);
	run(&x, &r);
	fd_close(&p[1]);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(r.exit_code, 8);
	assert_true(t.was_raw);
	assert_int_equal(tcgetattr(x.in_fd, &after), 0);
	assert_int_equal(after.c_lflag, before.c_lflag);
	assert_int_equal(after.c_oflag, before.c_oflag);
	fd_close(&t.master);
	fd_close(&p[0]);
	fd_close(&x.in_fd);
	fd_close(&x.signal_fd);
}

static void many_in_a_row_and_no_fd_lost(void **state)
{
	static const char *const argv[] = {"true", NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	int before, after;
	(void)state;

	before = dup(0);
	fd_close(&(int){before});
	for (int i = 0; i < 200; i++) {
		run(&x, &r);
		assert_int_equal(r.exit_code, 0);
	}
	after = dup(0); // the lowest that is free
	fd_close(&(int){after});
	assert_int_equal(after, before);
}

static void shutdown_is_agreed(void **state)
{
	struct err err = {0};
	int fd = connect_guest(), status;
	(void)state;

	assert_int_equal(agent_shutdown(fd, -1, soon(), &err), 0);
	fd_close(&fd);
	assert_int_equal(waitpid(fake_guest_pid(), &status, 0), fake_guest_pid());
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	fake_guest_start(dir);
}

static struct agent_attach attach_to(const char *job)
{
	return (struct agent_attach){.job = job,
		.follow = true,
		.tail_bytes = UINT64_MAX,
		.stdout_offset = UINT64_MAX,
		.stderr_offset = UINT64_MAX,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = -1};
}

static int attach(const struct agent_attach *x, struct agent_result *r)
{
	struct err err = {0};
	CLEANUP_FD int fd = connect_guest();

	return agent_attach(fd, x, r, &err);
}

static void start_job(const char *name, const char *script, bool tty)
{
	const char *const argv[] = {"sh", "-c", script, NULL};
	struct agent_exec x = exec_of(argv);
	struct agent_result r;
	struct err err = {0};
	char job[AGENT_JOB_NAME_MAX + 1];
	CLEANUP_FD int fd = connect_guest();

	x.in_fd = STDIN_FILENO; // it is not read here
	x.tty = tty;
	if (agent_job_start(fd, &x, name, soon(), job, &r, &err) < 0)
		fail_msg("%s", err.msg);
	assert_string_equal(job, name);
	assert_true(r.running);
}

static void see_offset(void *ctx, bool is_err, uint64_t offset)
{
	((uint64_t *)ctx)[is_err] = offset;
}

static void jobs_are_started_and_looked_at(void **state)
{
	static const char *const missing[] = {"no-such-command", NULL};
	struct agent_exec bad = exec_of(missing);
	struct agent_attach x = attach_to("j");
	struct agent_result r;
	struct err err = {0};
	CLEANUP_FREE char *json = NULL;
	char name[AGENT_JOB_NAME_MAX + 1];
	uint64_t offsets[2] = {9, 9};
	int fd;
	(void)state;

	start_job("j", "echo one; echo two >&2; read line; echo $line; exit 5", false);
	x.follow = false;
	x.out_fd = temp_file();
	do { // until it has said something
		assert_int_equal(ftruncate(x.out_fd, 0), 0);
		assert_int_equal(lseek(x.out_fd, 0, SEEK_SET), 0);
		assert_int_equal(attach(&x, &r), 0);
		assert_true(r.running);
	} while (!content_of(x.out_fd)[0]);
	assert_string_equal(content_of(x.out_fd), "one\n");
	fd_close(&x.out_fd);

	fd = connect_guest();
	assert_int_equal(agent_jobs(fd, -1, soon(), &json, &err), 0);
	assert_non_null(strstr(json, "\"job\":\"j\""));
	fd_close(&fd);
	fd = connect_guest();
	assert_int_equal(agent_job_forget(fd, "j", -1, soon(), &err), -EBUSY);
	fd_close(&fd);

	// Typing to it; the end of our stdin is not the end of its.
	x = attach_to("j");
	x.in_fd = temp_file();
	x.out_fd = temp_file();
	x.err_fd = temp_file();
	x.stdout_offset = 4;
	x.offset = see_offset;
	x.ctx = offsets;
	assert_int_equal(fd_write_all(x.in_fd, "typed\n", 6), 0);
	assert_int_equal(lseek(x.in_fd, 0, SEEK_SET), 0);
	assert_int_equal(attach(&x, &r), 0);
	assert_int_equal(r.exit_code, 5);
	assert_false(r.running);
	assert_string_equal(content_of(x.out_fd), "typed\n");
	assert_string_equal(content_of(x.err_fd), "two\n");
	assert_int_equal(offsets[0], 4);
	assert_int_equal(offsets[1], 0);
	fd_close(&x.in_fd);
	fd_close(&x.out_fd);
	fd_close(&x.err_fd);
	fd = connect_guest();
	assert_int_equal(agent_job_forget(fd, "j", -1, soon(), &err), 0);
	fd_close(&fd);
	x = attach_to("j");
	assert_int_equal(attach(&x, &r), -ESRCH);

	fd = connect_guest();
	assert_int_equal(agent_job_start(fd, &bad, "", soon(), name, &r, &err), -ENOENT);
	assert_int_equal(r.exit_code, 127);
	fd_close(&fd);
}

static void signals_leave_a_job_alone_unless_typing(void **state)
{
	struct agent_attach x = attach_to("s");
	struct agent_result r;
	struct signaller s = {.signals = {SIGINT}};
	struct err err = {0};
	pthread_t thread;
	int p[2], fd;
	(void)state;

	start_job("s", "printf x; exec sleep 300", false);
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	x.signal_fd = signal_fd_for_tests();
	s.fd = p[0];
	x.out_fd = p[1];
	assert_int_equal(pthread_create(&thread, NULL, signal_when_ready, &s), 0);
	assert_int_equal(attach(&x, &r), -EINTR);
	fd_close(&p[1]);
	assert_int_equal(pthread_join(thread, NULL), 0);
	fd_close(&p[0]);
	fd_close(&x.signal_fd);
	x = attach_to("s");
	x.follow = false;
	assert_int_equal(attach(&x, &r), 0);
	assert_true(r.running);
	fd = connect_guest();
	assert_int_equal(agent_job_signal(fd, "s", SIGTERM, false, -1, soon(), &err), 0);
	fd_close(&fd);
	x.follow = true;
	assert_int_equal(attach(&x, &r), 0);
	assert_int_equal(r.exit_code, 143);
	fd = connect_guest();
	assert_int_equal(agent_job_signal(fd, "s", 0, true, -1, soon(), &err), -ESRCH);
	fd_close(&fd);
}

static void *type_and_leave(void *arg)
{
	struct typist *t = arg;

	if (typist_until(t, ">"))
		fd_write_all(t->master, "echo 'st'art\n", 13);
	if (typist_until(t, "start"))
		fd_write_all(t->master, "\x1d", 1);
	return NULL;
}

static void a_key_leaves_a_terminal(void **state)
{
	struct agent_attach x = attach_to("t");
	struct agent_result r;
	struct typist t = {0};
	struct termios before, after;
	pthread_t thread;
	int p[2];
	(void)state;

	start_job("t", "printf '>'; while read line; do eval \"$line\"; done", true);
	x.tty = true;
	x.in_fd = open_terminal(&t.master, (struct winsize){.ws_row = 31, .ws_col = 71});
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	x.out_fd = p[1];
	t.fd = p[0];
	assert_int_equal(tcgetattr(x.in_fd, &before), 0);
	assert_int_equal(pthread_create(&thread, NULL, type_and_leave, &t), 0);
	assert_int_equal(attach(&x, &r), 0);
	assert_true(r.running);
	fd_close(&p[1]);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(tcgetattr(x.in_fd, &after), 0);
	assert_int_equal(after.c_lflag, before.c_lflag);
	fd_close(&t.master);
	fd_close(&p[0]);
	fd_close(&x.in_fd);
	// Back, with what was there, and out by the door.
	x = attach_to("t");
	x.in_fd = temp_file();
	x.out_fd = temp_file();
	assert_int_equal(fd_write_all(x.in_fd, "exit 9\n", 7), 0);
	assert_int_equal(lseek(x.in_fd, 0, SEEK_SET), 0);
	assert_int_equal(attach(&x, &r), 0);
	assert_int_equal(r.exit_code, 9);
	assert_non_null(strstr(content_of(x.out_fd), "start"));
	fd_close(&x.in_fd);
	fd_close(&x.out_fd);
}

struct greeter {
	int listener;
};

// Speaks first, then returns what it gets.
static void *greet(void *arg)
{
	struct greeter *g = arg;
	char buf[100];
	ssize_t n;
	int fd = accept4(g->listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return NULL;
	(void)!write(fd, "hello ", 6);
	while ((n = read(fd, buf, sizeof(buf))) > 0)
		(void)!write(fd, buf, (size_t)n);
	fd_close(&fd);
	return NULL;
}

static void ports_are_connected(void **state)
{
	struct sockaddr_in addr = {
		.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(addr);
	struct greeter g = {.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
	struct err err = {0};
	pthread_t thread;
	char text[32] = "";
	int fd;
	(void)state;

	assert_int_equal(bind(g.listener, (struct sockaddr *)&addr, len), 0);
	assert_int_equal(listen(g.listener, 1), 0);
	assert_int_equal(getsockname(g.listener, (struct sockaddr *)&addr, &len), 0);
	assert_int_equal(pthread_create(&thread, NULL, greet, &g), 0);
	fd = connect_guest();
	assert_int_equal(agent_port_connect(fd, ntohs(addr.sin_port), -1, soon(), &err), 0);
	// Not a byte of what the server says first is lost.
	assert_int_equal(fd_write_all(fd, "world", 5), 0);
	assert_int_equal(shutdown(fd, SHUT_WR), 0);
	assert_int_equal(fd_read_full(fd, text, sizeof(text)), 11);
	assert_string_equal(text, "hello world");
	fd_close(&fd);
	assert_int_equal(pthread_join(thread, NULL), 0);
	fd_close(&g.listener);
	fd = connect_guest();
	assert_int_equal(
		agent_port_connect(fd, ntohs(addr.sin_port), -1, soon(), &err), -ECONNREFUSED);
	fd_close(&fd);
	fd = connect_guest(); // this guest has no way to the host
	assert_int_equal(agent_port_listen(fd, 1, 1, false, -1, soon(), &err), -EOPNOTSUPP);
	fd_close(&fd);
}

static void questions_are_answered(void **state)
{
	struct agent_identity bad = {.boot_id = "nonsense"};
	struct err err = {0};
	CLEANUP_FREE char *json = NULL;
	CLEANUP_FREE char *none = NULL;
	int fd = connect_guest();
	(void)state;

	assert_int_equal(agent_facts(fd, -1, soon(), &json, &err), 0);
	assert_int_equal(json[0], '{');
	assert_non_null(strstr(json, "\"uptime_ns\":"));
	fd_close(&fd);
	fd = connect_guest();
	assert_int_equal(agent_wake(fd, &bad, -1, soon(), &err), -EINVAL);
	assert_string_equal(err.msg, "\"boot_id\" is not a UUID");
	fd_close(&fd);
	fd = connect_guest();
	assert_int_equal(agent_request(fd, "{\"v\":1}", 7, -1, soon(), &none, &err), -EOPNOTSUPP);
	assert_null(none);
	fd_close(&fd);
	fd = connect_guest();
	assert_int_equal(
		agent_request(fd, "", FRAME_PAYLOAD_MAX + 1, -1, soon(), &none, &err), -E2BIG);
	fd_close(&fd);
}

// --- Guests that are wrong -------------------------------------------------------------------

// Runs agent_exec() against a guest that says exactly these bytes, and then closes or is silent.
static int exec_against(const void *bytes, size_t len, bool closes, int cancel_fd,
	struct agent_result *r, struct err *err)
{
	static const char *const argv[] = {"x", NULL};
	struct agent_exec x = exec_of(argv);
	int pair[2], rc;

	x.cancel_fd = cancel_fd;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(fd_write_all(pair[0], bytes, len), 0);
	if (closes)
		assert_int_equal(shutdown(pair[0], SHUT_WR), 0);
	rc = agent_exec(pair[1], &x, r, err);
	fd_close(&pair[0]);
	fd_close(&pair[1]);
	return rc;
}

static size_t frame(uint8_t *to, enum frame_type type, const void *payload, uint32_t len)
{
	frame_header_put(to, type, len);
	memcpy(to + FRAME_HEADER_BYTES, payload, len);
	return FRAME_HEADER_BYTES + len;
}

static void wrong_answers_are_errors(void **state)
{
	uint8_t bytes[1024], payload[64] = {0};
	struct agent_result r;
	struct err err = {0};
	size_t len;
	(void)state;

	assert_int_equal(exec_against("", 0, true, -1, &r, &err), -ECONNRESET);
	assert_int_equal(r.exit_code, 125);
	assert_int_equal(exec_against("garbage!", 8, false, -1, &r, &err), -EPROTO);
	len = frame(bytes, FRAME_READY, "{}", 2);
	assert_int_equal(exec_against(bytes, len, false, -1, &r, &err), -EPROTO);
	len = frame(bytes, FRAME_REPLY, "{}", 2);
	assert_int_equal(exec_against(bytes, len, false, -1, &r, &err), -EPROTO);
	put_le32(payload, 1); // more window than the whole
	len = frame(bytes, FRAME_WINDOW, payload, 4);
	assert_int_equal(exec_against(bytes, len, false, -1, &r, &err), -EPROTO);
	put_le32(payload, 0); // exit code 0 and signal 200
	put_le32(payload + 4, 200);
	len = frame(bytes, FRAME_EXIT, payload, FRAME_EXIT_BYTES);
	assert_int_equal(exec_against(bytes, len, false, -1, &r, &err), -EPROTO);
	assert_int_equal(r.exit_code, 125);
	len = frame(bytes, FRAME_STDOUT, "abc", 3);
	assert_int_equal(exec_against(bytes, len - 1, true, -1, &r, &err), -ECONNRESET);
	// An error's text is data: it does not reach a terminal as it is.
	frame_error_put(payload, &(struct frame_error){.errno_value = 5, .exit_code = 126});
	memcpy(payload + FRAME_ERROR_BYTES, "\x1b[2Jevil%s\n", 11);
	len = frame(bytes, FRAME_ERROR, payload, FRAME_ERROR_BYTES + 11);
	assert_int_equal(exec_against(bytes, len, false, -1, &r, &err), -EIO);
	assert_int_equal(r.exit_code, 126);
	assert_string_equal(err.msg, "?[2Jevil%s?");
	// What comes after the end does not count.
	memset(payload, 0, sizeof(payload));
	len = frame(bytes, FRAME_EXIT, payload, FRAME_EXIT_BYTES);
	memcpy(bytes + len, "garbage!", 8);
	assert_int_equal(exec_against(bytes, len + 8, false, -1, &r, &err), 0);
	assert_int_equal(r.exit_code, 0);
}

static void a_silent_guest_ends_with_its_machine(void **state)
{
	int cancel = eventfd(1, EFD_CLOEXEC);
	struct agent_result r;
	struct err err = {0};
	uint8_t bytes[64];
	size_t len;
	(void)state;

	assert_int_equal(exec_against("", 0, false, cancel, &r, &err), -ECANCELED);
	// But what it had said before counts.
	memset(bytes, 0, sizeof(bytes));
	len = frame(bytes, FRAME_EXIT, (const uint8_t[FRAME_EXIT_BYTES]){4}, FRAME_EXIT_BYTES);
	assert_int_equal(exec_against(bytes, len, false, cancel, &r, &err), 0);
	assert_int_equal(r.exit_code, 4);
	fd_close(&cancel);
}

static int ready_against(const void *bytes, size_t len, struct agent_ready *ret, struct err *err)
{
	int listener = agent_ready_listen(dir, "other.sock", err), fd, rc;

	assert_true(listener >= 0);
	fd = unix_connect(dir, "other.sock_1025", err);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, bytes, len), 0);
	rc = agent_ready_wait(listener, -1, now_ns() + (len ? PATIENCE_NS : 50000000), ret, err);
	fd_close(&fd);
	fd_close(&listener);
	return rc;
}

static void readiness_is_checked(void **state)
{
	static const char good[] =
		"{\"v\":1,\"agent\":\"0.1\\u001b0\",\"started_ns\":5,\"ready_ns\":6,\"new\":[1]}";
	uint8_t bytes[8192];
	struct agent_ready ready;
	struct err err = {0};
	int listener;
	size_t len;
	(void)state;

	len = frame(bytes, FRAME_READY, good, sizeof(good) - 1);
	assert_int_equal(ready_against(bytes, len, &ready, &err), 0);
	assert_string_equal(ready.version, "0.1?0");
	assert_int_equal(ready.started_ns, 5);
	assert_int_equal(ready.ready_ns, 6);
	assert_int_equal(ready.clock_ahead_ns, 0);
	len = frame(bytes, FRAME_READY, "{\"v\":1,\"clock_ns\":1}", 20);
	assert_int_equal(ready_against(bytes, len, &ready, &err), 0);
	assert_true(ready.clock_ahead_ns < -1000000000LL * 86400 * 365 * 50);
	len = frame(bytes, FRAME_READY, "{\"v\":2}", 7);
	assert_int_equal(ready_against(bytes, len, &ready, &err), -EPROTONOSUPPORT);
	len = frame(bytes, FRAME_READY, "{\"v\":\"1\"}", 9);
	assert_int_equal(ready_against(bytes, len, &ready, &err), -EPROTO);
	len = frame(bytes, FRAME_READY, "nonsense", 8);
	assert_int_equal(ready_against(bytes, len, &ready, &err), -EPROTO);
	len = frame(bytes, FRAME_REPLY, "{\"v\":1}", 7);
	assert_int_equal(ready_against(bytes, len, &ready, &err), -EPROTO);
	assert_int_equal(ready_against("GET / HTTP/1.1\r\n", 16, &ready, &err), -EPROTO);
	assert_int_equal(ready_against("", 0, &ready, &err), -ETIMEDOUT);

	listener = agent_ready_listen(dir, "other.sock", &err);
	assert_int_equal(
		agent_ready_wait(listener, -1, now_ns() + 20000000, &ready, &err), -ETIMEDOUT);
	fd_close(&listener);
}

// A monitor that answers CONNECT with these bytes, and then closes or is silent.
struct fake_monitor {
	int listener;
	const char *answer;
	bool closes;
	int held;
};

static void *answer_connect(void *arg)
{
	struct fake_monitor *m = arg;
	struct pollfd p = {.fd = m->listener, .events = POLLIN};
	char line[32];

	if (poll(&p, 1, -1) != 1)
		return NULL;
	m->held = accept4(m->listener, NULL, NULL, SOCK_CLOEXEC);
	if (m->held < 0 || read(m->held, line, sizeof(line)) <= 0 ||
		fd_write_all(m->held, m->answer, strlen(m->answer)) < 0)
		return NULL;
	if (m->closes)
		fd_close(&m->held);
	return NULL;
}

static int connect_against(const char *answer, bool closes, uint64_t patience_ns)
{
	struct err err = {0};
	struct fake_monitor m = {.answer = answer, .closes = closes, .held = -1};
	pthread_t thread;
	int fd;

	m.listener = unix_listen(dir, "fake.sock", 1, &err);
	assert_true(m.listener >= 0);
	assert_int_equal(pthread_create(&thread, NULL, answer_connect, &m), 0);
	fd = agent_connect(dir, "fake.sock", 7, -1, now_ns() + patience_ns, &err);
	assert_int_equal(pthread_join(thread, NULL), 0);
	fd_close(&m.held);
	fd_close(&m.listener);
	if (fd >= 0)
		fd_close(&(int){fd});
	return fd < 0 ? fd : 0;
}

static void monitors_answer_is_checked(void **state)
{
	struct err err = {0};
	(void)state;

	assert_int_equal(connect_against("OK 1073741824\n", false, PATIENCE_NS), 0);
	assert_int_equal(connect_against("", true, PATIENCE_NS), -ECONNREFUSED);
	assert_int_equal(connect_against("OK 10", true, PATIENCE_NS), -ECONNREFUSED);
	assert_int_equal(connect_against("NO\n", false, PATIENCE_NS), -EPROTO);
	assert_int_equal(connect_against("\n", false, PATIENCE_NS), -EPROTO);
	assert_int_equal(
		connect_against("OK 11111111111111111111111111111111111", false, PATIENCE_NS),
		-EPROTO);
	assert_int_equal(connect_against("", false, 50000000), -ETIMEDOUT);
	assert_int_equal(agent_connect(dir, "nobody.sock", 7, -1, soon(), &err), -ENOENT);
}

static int group_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(dir));
	fake_guest_start(dir);
	return 0;
}

static int group_teardown(void **state)
{
	char command[128];

	(void)state;
	fake_guest_stop();
	snprintf(command, sizeof(command), "rm -rf %s", dir);
	return system(command);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(output_status_and_usage),
		cmocka_unit_test(ends_other_than_exit),
		cmocka_unit_test(too_large_a_command_is_told),
		cmocka_unit_test(stdin_goes_through_whole),
		cmocka_unit_test(stdin_that_cannot_be_read_is_not_its_end),
		cmocka_unit_test(stdin_that_never_ends_does_not_hold_us),
		cmocka_unit_test(slow_output_loses_nothing),
		cmocka_unit_test(closed_output_ends_the_call),
		cmocka_unit_test(signals_are_passed_on),
		cmocka_unit_test(terminal_is_raw_meanwhile_and_follows_ours),
		cmocka_unit_test(many_in_a_row_and_no_fd_lost),
		cmocka_unit_test(shutdown_is_agreed),
		cmocka_unit_test(jobs_are_started_and_looked_at),
		cmocka_unit_test(signals_leave_a_job_alone_unless_typing),
		cmocka_unit_test(a_key_leaves_a_terminal),
		cmocka_unit_test(ports_are_connected),
		cmocka_unit_test(questions_are_answered),
		cmocka_unit_test(wrong_answers_are_errors),
		cmocka_unit_test(a_silent_guest_ends_with_its_machine),
		cmocka_unit_test(readiness_is_checked),
		cmocka_unit_test(monitors_answer_is_checked),
	};

	cmocka_set_test_filter(getenv("TEST_FILTER")); // to run one
	return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
