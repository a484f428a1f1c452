// SPDX-License-Identifier: Apache-2.0
// mayfly egress: the keeper of a machine's way out, started with the machine and ended by its end.
// It has the owner's rights and no word with the guest but one: that the agent listens for it. What
// the guest says is read by its child, the proxy (egress/), which has no rights at all and tells it
// in packets what was asked for: that goes into the log. It gives the child the list of vm.ini,
// again whenever somebody connects to egress/proxy.sock.
//
// Whatever ends of keeper, proxy and monitor, nothing goes out any more. One thread; and the child.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/launch.h"
#include "cli/running.h"
#include "cli/secret.h"
#include "egress/confine.h"
#include "egress/proxy.h"
#include "guest/proto/frame.h"
#include "mcp/audit.h"
#include "vmm/base/fd.h"
#include "vmm/base/lock.h"
#include "vmm/base/log.h"
#include "vmm/base/unix_sock.h"
#include "vmm/config.h"

#define BACKLOG    128
#define LOCK_NS    60000000000ULL // for one that is about to end
#define LISTEN_NS  120000000000ULL // for the agent
#define APPLY_NS   60000000000ULL // for the proxy
#define RETRY_MS   50
#define STATUS_FD  3
#define FIRST_FD   4 // of the child, behind its standard ones
#define SOCKET_FMT LAUNCH_VSOCK "_%d"

struct keeper {
	const char *dir; // the machine's
	char egress_dir[PATH_MAX], run_dir[PATH_MAX], ini[PATH_MAX];
	int lock_fd, monitor_fd, signal_fd;
	int listen_fd; // of the guest's connections: the child accepts them
	int control_fd;
	int channel_fd; // to the child
	int agent_fd; // while it is open, the agent listens
	pid_t proxy;
	struct secrets secrets;
	bool unsynced; // there are records that may not be on the disk
};

// --- The child -------------------------------------------------------------------------------

static int enter_jail(void *opaque, struct err *err)
{
	const struct keeper *k = opaque;
	const char *missing;
	int r = confine(k->egress_dir, &missing, err);

	if (r == 0 && missing[0])
		log_line(LOG_WARN, "egress", "this host lets the proxy have no %s", missing);
	return r;
}

static _Noreturn void proxy_main(struct keeper *k, int channel_fd)
{
	const char *authorities = getenv("SSL_CERT_FILE");
	struct proxy_params params = {.hosts_path = "/etc/hosts",
		.secrets = &k->secrets,
		.authorities_path = authorities ? authorities
						: "/etc/ssl/certs/ca-certificates.crt",
		.confine = enter_jail,
		.opaque = k};
	struct err err = {0};
	sigset_t none;

	// They come to lie side by side, and all else goes.
	params.listen_fd = fcntl(k->listen_fd, F_DUPFD_CLOEXEC, 64);
	params.channel_fd = fcntl(channel_fd, F_DUPFD_CLOEXEC, 64);
	if (params.listen_fd < 0 || params.channel_fd < 0 ||
		dup3(params.listen_fd, FIRST_FD, O_CLOEXEC) < 0 ||
		dup3(params.channel_fd, FIRST_FD + 1, O_CLOEXEC) < 0)
		_exit(EXIT_FAILED);
	params.listen_fd = FIRST_FD;
	params.channel_fd = FIRST_FD + 1;
	close_range(STATUS_FD, STATUS_FD, 0);
	close_range(FIRST_FD + 2, ~0U, 0);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	prctl(PR_SET_NAME, "mayfly-proxy");
	if (proxy_run(&params, &err) < 0)
		log_line(LOG_ERROR, "egress", "%s", err.msg);
	_exit(EXIT_FAILED);
}

static int start_proxy(struct keeper *k, struct err *err)
{
	CLEANUP_FD int theirs = -1;
	int fds[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
		return err_errno(err, -errno, "socketpair");
	k->channel_fd = fds[0];
	theirs = fds[1];
	json_object_seed(0); // the child can read no file for it
	k->proxy = fork();
	if (k->proxy < 0)
		return err_errno(err, -errno, "fork");
	if (k->proxy == 0)
		proxy_main(k, theirs);
	return 0;
}

// --- Records ---------------------------------------------------------------------------------

// Takes one packet. 0 for a record, 1 for "applied" with *ret_cut; a negative errno if it could not
// be written down, or the child has ended.
static int take_packet(struct keeper *k, unsigned int *ret_cut, struct err *err)
{
	static char text[PROXY_PACKET_BYTES];
	ssize_t n = recv(k->channel_fd, text, sizeof(text), MSG_DONTWAIT);
	const char *event;
	json_t *record;
	int r;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return err_set(err, -EPIPE, "the proxy has ended");
	record = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, NULL);
	event = json_string_value(json_object_get(record, "event"));
	if (!event)
		r = err_set(err, -EBADMSG, "the proxy says what is no record");
	else if (!strcmp(event, "applied")) {
		*ret_cut = (unsigned int)json_integer_value(json_object_get(record, "cut"));
		r = 1;
	} else {
		k->unsynced = true;
		return audit_append(k->egress_dir, record, 0, err);
	}
	json_decref(record);
	return r;
}

static int give_list(struct keeper *k, const struct config *config, struct err *err)
{
	static char text[ALLOW_TEXT_BYTES + 1] = "L";
	struct allow_list list;
	int r;

	config_reach(config, &list);
	r = allow_print(&list, text + 1, sizeof(text) - 1, err);
	if (r == 0 && send(k->channel_fd, text, strlen(text), MSG_NOSIGNAL) < 0)
		r = err_errno(err, -errno, "the proxy");
	return r;
}

// Gives the child the list and waits until it is in force.
static int apply(
	struct keeper *k, const struct config *config, unsigned int *ret_cut, struct err *err)
{
	const uint64_t deadline_ns = now_ns() + APPLY_NS;
	int r = give_list(k, config, err);

	while (r == 0) {
		struct pollfd p = {.fd = k->channel_fd, .events = POLLIN};
		const uint64_t now = now_ns();

		if (now >= deadline_ns)
			return err_set(err, -ETIMEDOUT, "the proxy does not answer");
		if (poll(&p, 1, (int)((deadline_ns - now) / 1000000) + 1) > 0)
			r = take_packet(k, ret_cut, err);
	}
	return MIN(r, 0);
}

// --- Requests of the verbs -------------------------------------------------------------------

// Reads vm.ini again for whoever connected. What cannot be read admits nothing.
static int reload(struct keeper *k, struct err *err)
{
	CLEANUP_FD int fd = accept4(k->control_fd, NULL, NULL, SOCK_CLOEXEC);
	struct config config = {0};
	struct err bad = {0};
	unsigned int cut = 0;
	json_t *answer;
	char *text;
	int r;

	if (fd < 0)
		return 0;
	if (config_read(k->ini, &config, &bad) < 0)
		config_defaults(&config);
	r = apply(k, &config, &cut, err);
	if (r < 0)
		return r;
	answer = bad.code ? json_pack("{s:s}", "error", bad.msg)
			  : json_pack("{s:i}", "cut", (int)cut);
	text = answer ? json_dumps(answer, JSON_COMPACT) : NULL;
	if (text)
		(void)send(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
	free(text);
	json_decref(answer);
	return 0;
}

// --- Beginning and end -----------------------------------------------------------------------

static int take_lock(struct keeper *k, struct err *err)
{
	const uint64_t deadline_ns = now_ns() + LOCK_NS;
	CLEANUP_FD int fd = -1;

	if (mkdir(k->egress_dir, 0700) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s", k->egress_dir);
	fd = open(k->egress_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return err_errno(err, -errno, "%s", k->egress_dir);
	for (;;) {
		k->lock_fd = lock_take(fd, EGRESS_LOCK, err);
		if (k->lock_fd != -EBUSY || now_ns() >= deadline_ns)
			return MIN(k->lock_fd, 0);
		poll(NULL, 0, RETRY_MS);
	}
}

// A guest that was restored may hold the port still, for the keeper that it had.
static int have_agent_listen(struct keeper *k, struct err *err)
{
	const uint64_t deadline_ns = now_ns() + LISTEN_NS;
	int r;

	for (;;) {
		CLEANUP_FD int fd = agent_connect(
			k->run_dir, LAUNCH_VSOCK, AGENT_PORT, k->monitor_fd, deadline_ns, err);

		r = MIN(fd, 0);
		if (r == 0)
			r = agent_port_listen(fd, EGRESS_PORT, EGRESS_PORT, true, k->monitor_fd,
				deadline_ns, err);
		if (r == 0) {
			k->agent_fd = TAKE_FD(fd);
			return 0;
		}
		if (r != -EADDRINUSE || now_ns() >= deadline_ns)
			return r;
		poll(NULL, 0, RETRY_MS);
	}
}

static int begin(struct keeper *k, struct err *err)
{
	struct config config = {0};
	unsigned int cut;
	char name[64];
	int r = egress_dir(k->dir, k->egress_dir, err);

	snprintf(name, sizeof(name), SOCKET_FMT, EGRESS_PORT);
	if (r == 0 && (snprintf(k->run_dir, sizeof(k->run_dir), "%s/run", k->dir) >=
				      (int)sizeof(k->run_dir) ||
			      snprintf(k->ini, sizeof(k->ini), "%s/vm.ini", k->dir) >=
				      (int)sizeof(k->ini)))
		r = err_errno(err, -ENAMETOOLONG, "%s", k->dir);
	if (r == 0)
		r = take_lock(k, err);
	if (r == 0) {
		k->monitor_fd = running_pidfd(k->dir, err);
		r = MIN(k->monitor_fd, 0);
		if (r == -ESRCH)
			err_set(err, r, "the machine does not run");
	}
	if (r == 0)
		r = config_read(k->ini, &config, err);
	if (r == 0)
		r = secrets_load(strrchr(k->dir, '/') + 1, &k->secrets, err);
	if (r == 0) {
		k->control_fd = unix_listen(k->egress_dir, EGRESS_SOCKET, BACKLOG, err);
		r = MIN(k->control_fd, 0);
	}
	if (r == 0) {
		k->listen_fd = unix_listen(k->run_dir, name, BACKLOG, err);
		r = MIN(k->listen_fd, 0);
	}
	if (r == 0)
		r = start_proxy(k, err);
	fd_close(&k->listen_fd); // the child's alone: it ends with it
	if (r == 0)
		r = apply(k, &config, &cut, err);
	return r < 0 ? r : have_agent_listen(k, err);
}

static void end(struct keeper *k)
{
	char path[PATH_MAX + 64];

	if (k->proxy > 0) {
		kill(k->proxy, SIGKILL);
		waitpid(k->proxy, NULL, 0);
		snprintf(path, sizeof(path), "%s/" SOCKET_FMT, k->run_dir, EGRESS_PORT);
		unlink(path);
	}
	// What it had said before.
	while (k->channel_fd >= 0) {
		unsigned int cut;

		if (take_packet(k, &cut, NULL) < 0)
			break;
	}
	if (k->unsynced)
		(void)audit_sync(k->egress_dir, NULL);
}

// Until the machine ends, or somebody says so.
static int keep(struct keeper *k, struct err *err)
{
	for (;;) {
		struct pollfd p[] = {
			{.fd = k->monitor_fd, .events = POLLIN},
			{.fd = k->signal_fd, .events = POLLIN},
			{.fd = k->channel_fd, .events = POLLIN},
			{.fd = k->control_fd, .events = POLLIN},
			{.fd = k->agent_fd, .events = POLLIN},
		};
		unsigned int cut;
		int r = 0, n = poll(p, ARRAY_SIZE(p), k->unsynced ? 0 : -1);

		if (n < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (n == 0) { // nothing else to do
			k->unsynced = false;
			r = audit_sync(k->egress_dir, err);
		}
		if (n > 0 && (p[0].revents || p[1].revents))
			return 0;
		if (n > 0 && p[2].revents)
			r = take_packet(k, &cut, err);
		if (n > 0 && r >= 0 && p[3].revents)
			r = reload(k, err);
		if (r < 0)
			return r;
		if (n > 0 && p[4].revents) {
			log_line(LOG_WARN, "egress", "the guest's agent listens for us no more");
			fd_close(&k->agent_fd);
		}
	}
}

static int take_signals(struct keeper *k, struct err *err)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	k->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return k->signal_fd < 0 ? err_errno(err, -errno, "signalfd") : 0;
}

int egress_main(int argc, char **argv)
{
	static struct keeper k = {.lock_fd = -1,
		.monitor_fd = -1,
		.signal_fd = -1,
		.listen_fd = -1,
		.control_fd = -1,
		.channel_fd = -1,
		.agent_fd = -1};
	CLEANUP_FD int status_fd = -1;
	struct err err = {0};
	int r;

	if (argc != 3 || strcmp(argv[1], "--") != 0) {
		fputs("mayfly egress: started by mayfly up and mayfly net\n", stderr);
		return EXIT_USAGE;
	}
	if (fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC) < 0)
		return EXIT_FAILED;
	// Nobody's child: who started it may live long, and start many.
	r = fork();
	if (r != 0)
		_exit(r < 0 ? EXIT_FAILED : 0);
	status_fd = STATUS_FD;
	prctl(PR_SET_NAME, "mayfly-egress");
	prctl(PR_SET_DUMPABLE, 0); // it may hold credentials
	k.dir = argv[2];
	r = take_signals(&k, &err);
	if (r == 0)
		r = begin(&k, &err);
	(void)!write(
		status_fd, r < 0 ? err.msg : EGRESS_READY, strlen(r < 0 ? err.msg : EGRESS_READY));
	fd_close(&status_fd);
	if (r == 0)
		r = keep(&k, &err);
	end(&k);
	if (r < 0)
		log_line(LOG_ERROR, "egress", "%s", err.msg);
	return r < 0 ? EXIT_FAILED : 0;
}
