// SPDX-License-Identifier: Apache-2.0
// The monitor as a child process; see the header. One thread.
#include "cli/monitor_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define END_GRACE_MS 1000

// What the child finds its inherited descriptors as.
#define CHILD_STATUS_FD  3
#define CHILD_CONSOLE_FD 4

static int spawn(const char *dir, const char *snapshot, const char *memory_way, bool tied,
	int status_fd, int console_fd, pid_t *ret_pid)
{
	char *argv[14] = {"mayfly", "vmm", "--status-fd", "3"};
	char log[PATH_MAX];
	int argc = 4, r;
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t set;

	if (snprintf(log, sizeof(log), "%s/monitor.log", dir) >= (int)sizeof(log))
		return -ENAMETOOLONG;
	if (tied)
		argv[argc++] = "--tied";
	if (snapshot) {
		argv[argc++] = "--snapshot";
		argv[argc++] = (char *)snapshot;
	}
	if (snapshot && memory_way) {
		argv[argc++] = "--memory-restore";
		argv[argc++] = (char *)memory_way;
	}
	if (console_fd >= 0) {
		argv[argc++] = "--console-fd";
		argv[argc++] = "4";
	}
	argv[argc++] = "--";
	argv[argc++] = (char *)dir;
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	// Both are above the targets, so that neither dup2() destroys the other's source.
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, status_fd, CHILD_STATUS_FD);
	if (console_fd >= 0)
		posix_spawn_file_actions_adddup2(&actions, console_fd, CHILD_CONSOLE_FD);
	if (!tied)
		posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log,
			O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
	// Nothing else of what we or our parent have open is a monitor's business.
	posix_spawn_file_actions_addclosefrom_np(
		&actions, console_fd >= 0 ? CHILD_CONSOLE_FD + 1 : CHILD_STATUS_FD + 1);
	// Its own process group: a Ctrl-C at the terminal is for the command to act upon.
	sigemptyset(&set);
	posix_spawnattr_setsigmask(&attr, &set);
	posix_spawnattr_setpgroup(&attr, 0);
	posix_spawnattr_setflags(
		&attr, (short)(POSIX_SPAWN_SETSIGMASK |
			       (tied ? POSIX_SPAWN_SETPGROUP : POSIX_SPAWN_SETSID)));
	r = posix_spawn(ret_pid, "/proc/self/exe", &actions, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return -r;
}

int monitor_proc_start(struct monitor_proc *proc, const char *dir, const char *snapshot,
	const char *memory_way, bool tied, int console_fd, struct err *err)
{
	CLEANUP_FD int read_fd = -1;
	CLEANUP_FD int write_fd = -1;
	CLEANUP_FD int console = -1;
	int p[2], r;

	*proc = (struct monitor_proc){.pid_fd = -1, .status_fd = -1};
	if (pipe2(p, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "pipe");
	read_fd = p[0];
	write_fd = fcntl(p[1], F_DUPFD_CLOEXEC, 10);
	fd_close(&p[1]);
	if (write_fd < 0 || fcntl(read_fd, F_SETFL, O_NONBLOCK) < 0)
		return err_errno(err, -errno, "status pipe");
	if (console_fd >= 0) {
		console = fcntl(console_fd, F_DUPFD_CLOEXEC, 10);
		if (console < 0)
			return err_errno(err, -errno, "console pipe");
	}
	r = spawn(dir, snapshot, memory_way, tied, write_fd, console, &proc->pid);
	if (r < 0) {
		proc->pid = 0;
		return err_errno(err, r, "starting the monitor");
	}
	proc->pid_fd = pidfd_open(proc->pid, 0);
	proc->status_fd = TAKE_FD(read_fd);
	if (proc->pid_fd < 0) {
		r = err_errno(err, -errno, "pidfd_open");
		monitor_proc_end(proc);
		return r;
	}
	return 0;
}

static void take_report(struct monitor_proc *proc, const char *line)
{
	json_t *report = json_loads(line, 0, NULL);
	const char *event = json_string_value(json_object_get(report, "event"));
	const char *message = json_string_value(json_object_get(report, "message"));
	json_int_t code = json_integer_value(json_object_get(report, "errno"));

	if (event && !strcmp(event, "running")) {
		proc->running = true;
	} else if (event && !strcmp(event, "where")) {
		proc->told_where = true;
	} else if (event && !strcmp(event, "error")) {
		proc->failed = true;
		err_set(&proc->err, code > 0 && code < 4096 ? -(int)code : -EIO, "%s",
			message ? message : "no reason given");
	} else if (event && !strcmp(event, "ended")) {
		free(proc->ended);
		proc->ended = strdup(line);
	}
	json_decref(report);
}

int monitor_proc_hear(struct monitor_proc *proc)
{
	for (;;) {
		size_t room = sizeof(proc->line) - 1 - proc->line_len;
		ssize_t n = read(proc->status_fd, proc->line + proc->line_len, room);
		char *start = proc->line, *nl;

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN ? 0 : 1;
		if (n == 0)
			return 1;
		proc->line_len += (size_t)n;
		proc->line[proc->line_len] = '\0';
		while ((nl = strchr(start, '\n'))) {
			*nl = '\0';
			take_report(proc, start);
			start = nl + 1;
		}
		proc->line_len -= (size_t)(start - proc->line);
		// A line that fills the buffer is none of ours.
		if (proc->line_len == sizeof(proc->line) - 1)
			proc->line_len = 0;
		memmove(proc->line, start, proc->line_len);
	}
}

static void send_signal(const struct monitor_proc *proc, int sig)
{
	if (proc->adopted)
		pidfd_send_signal(proc->pid_fd, sig, NULL, 0);
	else
		kill(proc->pid, sig);
}

int monitor_proc_end(struct monitor_proc *proc)
{
	struct pollfd ended = {.fd = proc->pid_fd, .events = POLLIN};
	uint64_t deadline = now_ns() + END_GRACE_MS * 1000000ULL, now;
	int status = 0, r = -1;

	if (proc->pid <= 0 && !proc->adopted)
		return 0;
	send_signal(proc, SIGTERM);
	while (proc->pid_fd >= 0 && (now = now_ns()) < deadline) {
		r = poll(&ended, 1, (int)((deadline - now) / 1000000) + 1);
		if (r >= 0 || errno != EINTR)
			break;
	}
	if (r <= 0)
		send_signal(proc, SIGKILL);
	if (proc->adopted && r <= 0)
		poll(&ended, 1, END_GRACE_MS);
	while (!proc->adopted && waitpid(proc->pid, &status, 0) < 0 && errno == EINTR)
		;
	proc->pid = 0;
	proc->adopted = false;
	fd_close(&proc->pid_fd);
	if (proc->status_fd >= 0)
		monitor_proc_hear(proc);
	fd_close(&proc->status_fd);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void monitor_proc_adopt(struct monitor_proc *proc, int pid_fd)
{
	*proc = (struct monitor_proc){.adopted = true, .pid_fd = pid_fd, .status_fd = -1};
}

void monitor_proc_let_go(struct monitor_proc *proc)
{
	proc->pid = 0;
	fd_close(&proc->pid_fd);
	fd_close(&proc->status_fd);
}
