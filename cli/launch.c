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
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/control_client.h"
#include "cli/patience.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"
#include "vmm/vm.h"

// For the ready message, once the guest has connected.
#define GREETING_NS 30000000000ULL
// A clock that is further off is set.
#define CLOCK_OFF_NS 250000000LL
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

int launch_stop_fd(void)
{
	static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
	sigset_t set;

	sigemptyset(&set);
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		sigaddset(&set, signals[i]);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

int launch_signal(struct launch *launch)
{
	struct signalfd_siginfo info;

	while (read(launch->signal_fd, &info, sizeof(info)) == sizeof(info))
		if (info.ssi_signo != SIGWINCH)
			return (int)info.ssi_signo;
	return 0;
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
	return monitor_proc_start(
		&launch->monitor, dir, launch->snapshot, launch->memory_way, tied, write_end, err);
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
	bool adopted = launch->monitor.adopted;
	int status;

	// Its connections break a moment before it has said why and is gone.
	if ((adopted || launch->monitor.pid > 0) && poll(&ended, 1, LAST_WORDS_MS) <= 0)
		return 0;
	status = monitor_proc_end(&launch->monitor);
	// It reports to whom it was started by.
	if (adopted)
		return err_set(err, -EIO, "the machine has ended: by its guest, or by somebody");
	if (launch->monitor.failed)
		return err_set(err, launch->monitor.err.code, "%s", launch->monitor.err.msg);
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

static void hex(char *ret, size_t digits)
{
	uint8_t bytes[16];

	ASSERT(digits <= 2 * sizeof(bytes));
	if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes))
		abort();
	for (size_t i = 0; i < digits; i++)
		ret[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 ? 0 : 4) & 15];
	ret[digits] = '\0';
}

int launch_settle(struct launch *launch, struct err *err)
{
	uint64_t deadline_ns = now_ns() + patience_ns(GREETING_NS);
	struct agent_identity identity = {0};
	CLEANUP_FD int fd = agent_connect(launch->run_dir, LAUNCH_VSOCK, AGENT_PORT,
		launch->monitor.pid_fd, deadline_ns, err);

	if (fd < 0)
		return fd;
	if (getrandom(identity.entropy, sizeof(identity.entropy), 0) != sizeof(identity.entropy))
		return err_errno(err, -EIO, "getrandom");
	return agent_wake(fd, &identity, launch->monitor.pid_fd, deadline_ns, err);
}

// The MAC address of the machine in dir as text, if it has a network.
static int own_mac(const char *dir, char ret[13], struct err *err)
{
	char ini[PATH_MAX];
	struct config config;
	uint8_t mac[6];
	int r;

	ret[0] = '\0';
	if (snprintf(ini, sizeof(ini), "%s/vm.ini", dir) >= (int)sizeof(ini))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	r = config_read(ini, &config, err);
	if (r < 0 || !config_net_has_device(&config.net))
		return r;
	config_net_mac(&config.net, dir, mac);
	for (size_t i = 0; i < sizeof(mac); i++)
		snprintf(ret + 2 * i, 3, "%02x", mac[i]);
	return 0;
}

// Readable when the monitor has ended, or a signal is to end us.
static int cancel_fd(const struct launch *launch, int stop_fd, struct err *err)
{
	struct epoll_event in = {.events = EPOLLIN};
	CLEANUP_FD int fd = epoll_create1(EPOLL_CLOEXEC);

	if (fd < 0 || epoll_ctl(fd, EPOLL_CTL_ADD, launch->monitor.pid_fd, &in) < 0 ||
		epoll_ctl(fd, EPOLL_CTL_ADD, stop_fd, &in) < 0)
		return err_errno(err, -errno, "epoll");
	return TAKE_FD(fd);
}

// What a machine that was restored needs before it is anybody's.
static int wake(struct launch *launch, uint64_t deadline_ns, struct err *err)
{
	char machine_id[33], random[33], boot_id[37], mac[13];
	struct agent_identity identity = {.hostname = launch->hostname};
	CLEANUP_FD int stop_fd = launch_stop_fd();
	CLEANUP_FD int cancel = cancel_fd(launch, stop_fd, err);
	CLEANUP_FD int fd = -1;
	int r;

	if (cancel < 0)
		return cancel;
	if (getrandom(identity.entropy, sizeof(identity.entropy), 0) != sizeof(identity.entropy))
		return err_errno(err, -EIO, "getrandom");
	if (launch->new_identity) {
		hex(machine_id, 32);
		hex(random, 32);
		// RFC 9562: version 4, variant 10.
		random[12] = '4';
		random[16] = "89ab"[random[16] & 3];
		snprintf(boot_id, sizeof(boot_id), "%.8s-%.4s-%.4s-%.4s-%.12s", random, random + 8,
			random + 12, random + 16, random + 20);
		identity.machine_id = machine_id;
		identity.boot_id = boot_id;
		r = own_mac(launch->dir, mac, err);
		if (r < 0)
			return r;
		identity.mac = mac[0] ? mac : NULL;
	}
	fd = agent_connect(launch->run_dir, VM_WAKING_SOCKET, AGENT_PORT, cancel, deadline_ns, err);
	if (fd < 0)
		return fd;
	r = agent_wake(fd, &identity, cancel, deadline_ns, err);
	if (r < 0)
		return err_wrap(err, r, "waking the machine");
	fd_close(&fd);
	fd = control_connect(launch->run_dir, err);
	if (fd < 0)
		return fd;
	r = control_call_until(fd, "awake", NULL, cancel, deadline_ns, NULL, err);
	if (r == 0)
		launch->ready_ns = now_ns();
	return r;
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
		if (fds[2].revents) {
			*ret_signal = launch_signal(launch);
			if (*ret_signal)
				return LAUNCH_SIGNAL;
		}
		if (fds[1].revents && monitor_proc_hear(&launch->monitor) == 1) {
			r = launch_failure(launch, err);
			return r < 0 ? r : err_set(err, -EIO, "the monitor does not answer");
		}
		if (launch->snapshot && launch->monitor.running) {
			launch->restored_ns = now_ns();
			r = wake(
				launch, MIN(now_ns() + patience_ns(GREETING_NS), deadline_ns), err);
			if (r < 0 && (*ret_signal = launch_signal(launch)) != 0)
				return LAUNCH_SIGNAL;
			if (r < 0)
				launch_failure(launch, err);
			return r;
		}
		if (!fds[0].revents)
			continue;
		r = agent_ready_wait(launch->ready_fd, launch->monitor.pid_fd,
			MIN(now_ns() + patience_ns(GREETING_NS), deadline_ns), &launch->ready, err);
		// What a host's KVM tells a guest of the time of day may be seconds off.
		if (r == 0 && llabs(launch->ready.clock_ahead_ns) > CLOCK_OFF_NS)
			r = launch_settle(launch, err);
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
