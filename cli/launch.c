// SPDX-License-Identifier: Apache-2.0
// Starting a machine; see the header. One thread.
#include "cli/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "vmm/base/fd.h"

// For the ready message, once the guest has connected.
#define GREETING_NS 30000000000ULL
// For the monitor's last words, and for its word on where the vCPUs are.
#define LAST_WORDS_MS 3000
#define WHERE_NS      2000000000ULL
#define CONSOLE_BYTES (1 << 20)

int launch_take_signals(struct launch *launch, struct err *err)
{
	static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH};
	struct sigaction was;
	sigset_t set;

	sigemptyset(&set);
	// What is ignored already stays so: nohup has its reason.
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		if (sigaction(signals[i], NULL, &was) == 0 && was.sa_handler != SIG_IGN)
			sigaddset(&set, signals[i]);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	launch->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return launch->signal_fd < 0 ? err_errno(err, -errno, "signalfd") : 0;
}

int launch_start(
	struct launch *launch, const char *dir, bool tied, bool show_console, struct err *err)
{
	CLEANUP_FD int write_end = -1;
	int p[2];

	launch->dir = dir;
	if (snprintf(launch->run_dir, sizeof(launch->run_dir), "%s/run", dir) >=
		(int)sizeof(launch->run_dir))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	launch->ready_fd = agent_ready_listen(launch->run_dir, LAUNCH_VSOCK, err);
	if (launch->ready_fd < 0)
		return launch->ready_fd;
	if (show_console) {
		if (pipe2(p, O_CLOEXEC) < 0)
			return err_errno(err, -errno, "pipe");
		launch->console_fd = p[0];
		write_end = p[1];
		fcntl(launch->console_fd, F_SETFL, O_NONBLOCK);
		// While a command runs nobody empties it: room for what the guest prints then.
		fcntl(launch->console_fd, F_SETPIPE_SZ, CONSOLE_BYTES);
	}
	return monitor_proc_start(&launch->monitor, dir, tied, write_end, err);
}

void launch_show_console(struct launch *launch)
{
	char buf[4096];
	ssize_t n;

	if (launch->console_fd < 0)
		return;
	while ((n = read(launch->console_fd, buf, sizeof(buf))) > 0)
		if (fd_write_all(STDERR_FILENO, buf, (size_t)n) < 0)
			break;
	if (n == 0)
		fd_close(&launch->console_fd);
}

int launch_failure(struct launch *launch, struct err *err)
{
	struct pollfd ended = {.fd = launch->monitor.pid_fd, .events = POLLIN};
	int status;

	// Its connections break a moment before it has said why and is gone.
	if (launch->monitor.pid > 0 && poll(&ended, 1, LAST_WORDS_MS) <= 0)
		return 0;
	status = monitor_proc_end(&launch->monitor);
	if (launch->monitor.failed)
		return err_set(err, -EIO, "%s", launch->monitor.err.msg);
	if (launch->monitor.ended && strstr(launch->monitor.ended, "\"stopped\""))
		return err_set(err, -EIO, "the machine was ended by somebody else");
	if (launch->monitor.ended)
		return err_set(err, -EIO,
			launch->ready_ns
				? "the guest reset itself, and so ended the machine"
				: "the guest reset itself before it was ready (--console shows "
				  "what it printed)");
	return err_set(err, -EIO, "the monitor ended unexpectedly, with status %d", status);
}

// A guest that is silent past its time: where it was is what one wants to know first. The monitor
// answers on the stderr that it shares with us, and says on the status pipe that it has.
static void tell_where(struct launch *launch)
{
	uint64_t deadline = now_ns() + WHERE_NS;
	struct pollfd status = {.fd = launch->monitor.status_fd, .events = POLLIN};

	if (launch->monitor.pid <= 0)
		return;
	kill(launch->monitor.pid, SIGUSR1);
	while (!launch->monitor.told_where) {
		uint64_t now = now_ns();

		if (now >= deadline || poll(&status, 1, (int)((deadline - now) / 1000000 + 1)) <= 0)
			return;
		if (monitor_proc_hear(&launch->monitor) == 1)
			return;
	}
}

int launch_wait(struct launch *launch, uint64_t deadline_ns, int *ret_signal, struct err *err)
{
	for (;;) {
		struct pollfd fds[] = {
			{.fd = launch->ready_fd, .events = POLLIN},
			{.fd = launch->monitor.status_fd, .events = POLLIN},
			{.fd = launch->signal_fd, .events = POLLIN},
			{.fd = launch->console_fd, .events = POLLIN},
		};
		uint64_t now = now_ns();
		struct signalfd_siginfo info;
		int r;

		if (now >= deadline_ns) {
			tell_where(launch);
			return LAUNCH_TIMED_OUT;
		}
		if (poll(fds, ARRAY_SIZE(fds),
			    (int)MIN((deadline_ns - now) / 1000000 + 1, 60000ULL)) < 0 &&
			errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (fds[3].revents)
			launch_show_console(launch);
		if (fds[2].revents &&
			read(launch->signal_fd, &info, sizeof(info)) == sizeof(info) &&
			info.ssi_signo != SIGWINCH) {
			*ret_signal = (int)info.ssi_signo;
			return LAUNCH_SIGNAL;
		}
		if (fds[1].revents && monitor_proc_hear(&launch->monitor) == 1) {
			r = launch_failure(launch, err);
			return r < 0 ? r : err_set(err, -EIO, "the monitor does not answer");
		}
		if (!fds[0].revents)
			continue;
		r = agent_ready_wait(launch->ready_fd, launch->monitor.pid_fd,
			MIN(now_ns() + GREETING_NS, deadline_ns), &launch->ready, err);
		launch->ready_ns = r < 0 ? 0 : now_ns();
		return r;
	}
}

void launch_let_go(struct launch *launch)
{
	monitor_proc_let_go(&launch->monitor);
}

void launch_end(struct launch *launch)
{
	monitor_proc_end(&launch->monitor);
	launch_show_console(launch);
	fd_close(&launch->ready_fd);
	fd_close(&launch->signal_fd);
	fd_close(&launch->console_fd);
	free(launch->monitor.ended);
	launch->monitor.ended = NULL;
}
