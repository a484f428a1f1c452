// SPDX-License-Identifier: Apache-2.0
// Running a program; see the header. One thread.
#include "cli/tool.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define TICK_MS    200
#define WORDS_MAX  360 // of its complaints, the last ones
#define TERM_TICKS 50 // until one that does not heed SIGTERM is killed

struct words {
	char text[WORDS_MAX + 1];
	size_t len;
};

static void hear(struct words *words, int fd)
{
	char buf[4096];
	ssize_t n;

	while ((n = read(fd, buf, sizeof(buf))) > 0) {
		size_t take = MIN((size_t)n, (size_t)WORDS_MAX);
		size_t keep = MIN(words->len, WORDS_MAX - take);

		memmove(words->text, words->text + words->len - keep, keep);
		memcpy(words->text + keep, buf + n - take, take);
		words->len = keep + take;
	}
}

// In one line, and harmless to a terminal: they may quote an archive.
static const char *last_words(struct words *words)
{
	size_t out = 0;

	for (size_t i = 0; i < words->len; i++) {
		char c = words->text[i];

		if (c == '\n' || c == '\r')
			c = ' ';
		if ((unsigned char)c < ' ' || (unsigned char)c >= 0x7f)
			c = '?';
		if (c != ' ' || (out > 0 && words->text[out - 1] != ' '))
			words->text[out++] = c;
	}
	while (out > 0 && words->text[out - 1] == ' ')
		out--;
	words->text[out] = '\0';
	return words->text;
}

static int start(const struct tool *tool, int err_fd, pid_t *ret_pid)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none;
	int r;

	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	if (tool->stdin_fd >= 0)
		posix_spawn_file_actions_adddup2(&actions, tool->stdin_fd, STDIN_FILENO);
	else
		posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	if (tool->stdout_fd >= 0)
		posix_spawn_file_actions_adddup2(&actions, tool->stdout_fd, STDOUT_FILENO);
	else
		posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, err_fd, STDERR_FILENO);
	posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
	sigemptyset(&none);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
	r = posix_spawnp(
		ret_pid, tool->argv[0], &actions, &attr, (char *const *)tool->argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return -r;
}

int tool_run(const struct tool *tool, struct err *err)
{
	CLEANUP_FD int read_fd = -1;
	CLEANUP_FD int write_fd = -1;
	CLEANUP_FD int pid_fd = -1;
	struct words words = {0};
	int p[2], status = 0, ticks = 0, r;
	bool interrupted = false;
	pid_t pid;

	if (pipe2(p, O_CLOEXEC | O_NONBLOCK) < 0)
		return err_errno(err, -errno, "pipe");
	read_fd = p[0];
	// Above what it is to become, and blocking for the one who writes.
	write_fd = fcntl(p[1], F_DUPFD_CLOEXEC, 10);
	fd_close(&p[1]);
	if (write_fd < 0 || fcntl(write_fd, F_SETFL, 0) < 0)
		return err_errno(err, -errno, "pipe");
	r = start(tool, write_fd, &pid);
	fd_close(&write_fd);
	if (r == -ENOENT)
		return err_set(err, r, "%s is not installed (Debian's package %s has it)",
			tool->argv[0], tool->package);
	if (r < 0)
		return err_errno(err, r, "%s", tool->argv[0]);
	pid_fd = pidfd_open(pid, 0);
	for (;;) {
		struct pollfd fds[] = {
			{.fd = pid_fd, .events = POLLIN},
			{.fd = read_fd, .events = POLLIN},
			{.fd = interrupted ? -1 : tool->signal_fd, .events = POLLIN},
		};

		poll(fds, ARRAY_SIZE(fds), TICK_MS);
		if (fds[2].revents) {
			interrupted = true;
			kill(pid, SIGTERM);
		}
		if (interrupted && ++ticks == TERM_TICKS)
			kill(pid, SIGKILL);
		if (fds[1].revents & POLLIN)
			hear(&words, read_fd);
		else if (fds[1].revents)
			fd_close(&read_fd); // it has closed its own
		if (fds[0].revents || pid_fd < 0)
			break;
		if (tool->progress)
			tool->progress(tool->opaque);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (read_fd >= 0)
		hear(&words, read_fd);
	if (interrupted)
		return err_set(err, -EINTR, "interrupted");
	if (status == 0)
		return 0;
	if (words.len == 0)
		return err_set(err, -EIO, "%s ended with status %d", tool->argv[0],
			WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
	return err_set(err, -EIO, "%s: %s", tool->argv[0], last_words(&words));
}
