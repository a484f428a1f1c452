// SPDX-License-Identifier: Apache-2.0
// Starts passt; see the header. Main thread.
#include "vmm/passt.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/util.h"

#define START_NS     60000000000ULL
#define SOCKET_BYTES (1 << 20)
#define CHILD_FD     3

// It goes to the background when it is ready, and then its parent ends.
static int spawn(const struct passt_config *config, int sock_fd, int words_fd, pid_t *ret_pid)
{
	const char *slash = strchr(config->address, '/');
	char address[32], mtu[16];
	char *rules_argv[] = {"mayfly", "nat", "--", (char *)(uintptr_t)config->rules_of,
		(char *)(uintptr_t)config->address, (char *)(uintptr_t)config->gateway,
		(char *)(uintptr_t)config->dns, mtu, NULL};
	char *argv[24] = {"passt", "-q", "-F", "3", "-t", "none", "-u", "none", "--no-map-gw", "-a",
		address, "-n", (char *)(uintptr_t)(slash + 1), "-g",
		(char *)(uintptr_t)config->gateway, "-m", mtu};
	int argc = 17, r;
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none, pipe;

	snprintf(address, sizeof(address), "%.*s", (int)(slash - config->address), config->address);
	snprintf(mtu, sizeof(mtu), "%u", config->mtu);
	if (config->dns[0]) {
		argv[argc++] = "--dns-forward";
		argv[argc++] = (char *)(uintptr_t)config->dns;
	}
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, words_fd, STDERR_FILENO);
	posix_spawn_file_actions_adddup2(&actions, sock_fd, CHILD_FD);
	posix_spawn_file_actions_addclosefrom_np(&actions, CHILD_FD + 1);
	sigemptyset(&none);
	sigemptyset(&pipe);
	sigaddset(&pipe, SIGPIPE);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setsigdefault(&attr, &pipe);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	r = config->rules_of
		    ? posix_spawn(ret_pid, "/proc/self/exe", &actions, &attr, rules_argv, environ)
		    : posix_spawnp(ret_pid, "passt", &actions, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return -r;
}

// Waits for the end of its words, or of its time. Returns the last line that says something.
static void hear_out(int words_fd, char *ret_line, size_t size)
{
	const uint64_t deadline_ns = now_ns() + START_NS;
	char text[4096], *rest = text, *line;
	size_t len = 0;
	ssize_t n = 1;

	while (n > 0 && len < sizeof(text) - 1) {
		struct pollfd words = {.fd = words_fd, .events = POLLIN};
		const uint64_t now = now_ns();

		if (now >= deadline_ns ||
			poll(&words, 1, (int)((deadline_ns - now) / 1000000)) == 0)
			break;
		n = read(words_fd, text + len, sizeof(text) - 1 - len);
		if (n < 0 && errno == EINTR)
			n = 1;
		else if (n > 0)
			len += (size_t)n;
	}
	text[len] = '\0';
	snprintf(ret_line, size, "it says nothing");
	// Where there is no syslog it complains of that for each line.
	while ((line = strsep(&rest, "\n")))
		if (line[0] && !strstr(line, "syslog"))
			snprintf(ret_line, size, "%s", line);
}

int passt_start(const struct passt_config *config, int *ret_fd, struct err *err)
{
	CLEANUP_FD int ours = -1;
	CLEANUP_FD int theirs = -1;
	CLEANUP_FD int words_in = -1;
	CLEANUP_FD int words_out = -1;
	int fds[2], size = SOCKET_BYTES, status = 0, r;
	uint64_t deadline_ns;
	char line[160];
	pid_t pid;

	if (!strchr(config->address, '/') || !config->gateway[0])
		return err_set(err, -EINVAL, "passt needs an address and a gateway");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
		return err_errno(err, -errno, "passt: socketpair");
	ours = fds[0];
	// Above what the child finds its own as, so that neither dup2() destroys the other's
	// source.
	theirs = fcntl(fds[1], F_DUPFD_CLOEXEC, 10);
	fd_close(&fds[1]);
	if (theirs < 0 || fcntl(ours, F_SETFL, O_NONBLOCK) < 0)
		return err_errno(err, -errno, "passt: socket");
	setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	if (pipe2(fds, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "passt: pipe");
	words_in = fds[0];
	words_out = fcntl(fds[1], F_DUPFD_CLOEXEC, 10);
	fd_close(&fds[1]);
	if (words_out < 0)
		return err_errno(err, -errno, "passt: pipe");
	r = spawn(config, theirs, words_out, &pid);
	if (r == -ENOENT)
		return err_set(err, r, "passt is not installed: apt-get install passt");
	if (r < 0)
		return err_errno(err, r, "passt");
	fd_close(&words_out);
	fd_close(&theirs);
	hear_out(words_in, line, sizeof(line));
	// Now it has failed, or its child serves: either way it is about to end.
	for (deadline_ns = now_ns() + START_NS; waitpid(pid, &status, WNOHANG) == 0;) {
		if (now_ns() >= deadline_ns) {
			kill(pid, SIGKILL);
			waitpid(pid, &status, 0);
			break;
		}
		poll(NULL, 0, 1);
	}
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		return err_set(err, -EIO, "passt does not start: %s", line);
	*ret_fd = TAKE_FD(ours);
	return 0;
}
