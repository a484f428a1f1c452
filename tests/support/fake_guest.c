// SPDX-License-Identifier: Apache-2.0
// A guest behind its monitor; see the header. A process of one thread.
#include "tests/support/test.h"

#include "tests/support/fake_guest.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "guest/agent.h"
#include "guest/files.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

#define PATIENCE_NS 60000000000ULL

static pid_t guest;

// False when the client has left meanwhile.
static bool read_connect_line(int fd)
{
	char c = 0, line[32];
	size_t n = 0;

	while (c != '\n' && n < sizeof(line) && read(fd, &c, 1) == 1)
		line[n++] = c;
	if (c == '\n' && (n != 13 || memcmp(line, "CONNECT 1024\n", 13) != 0))
		_exit(3);
	return c == '\n' && send(fd, "OK 1234\n", 8, MSG_NOSIGNAL) == 8;
}

static _Noreturn void guest_main(int listener, int ready_to)
{
	const struct agent_config config = {.listen_fd = -1, .etc_dir = "/etc"};
	struct agent *agent;
	struct err err = {0};

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (agent_create(&config, &agent, &err) < 0)
		_exit(2);
	if (fd_write_all(ready_to, "", 1) < 0)
		_exit(2);
	for (;;) {
		struct pollfd p = {.fd = listener, .events = POLLIN};

		if (poll(&p, 1, 0) == 1) {
			int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

			if (fd >= 0 && !read_connect_line(fd))
				fd_close(&fd);
			else if (fd >= 0 && agent_adopt(agent, fd) < 0)
				_exit(4);
		}
		if (agent_turn(agent, 5, &err) != 0)
			_exit(0);
	}
}

void fake_guest_start(const char *dir)
{
	struct err err = {0};
	int listener, p[2];
	char byte;

	listener = unix_listen(dir, "vsock.sock", 8, &err);
	assert_true(listener >= 0);
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	guest = fork();
	assert_true(guest >= 0);
	if (guest == 0)
		guest_main(listener, p[1]);
	fd_close(&listener);
	fd_close(&p[1]);
	assert_int_equal(read(p[0], &byte, 1), 1);
	fd_close(&p[0]);
}

void fake_guest_stop(void)
{
	kill(guest, SIGKILL);
	assert_int_equal(waitpid(guest, NULL, 0), guest);
}

pid_t fake_guest_pid(void)
{
	return guest;
}

int fake_guest_main(int argc, char **argv)
{
	return argc > 0 && strcmp(argv[0], FILES_NAME) == 0 ? files_main(argc, argv) : -1;
}

int fake_guest_connect(const char *dir)
{
	struct err err = {0};
	int fd = agent_connect(dir, "vsock.sock", AGENT_PORT, -1, now_ns() + PATIENCE_NS, &err);

	if (fd < 0)
		fail_msg("%s", err.msg);
	return fd;
}
