// SPDX-License-Identifier: Apache-2.0
// mayfly run: a command in a machine that exists for it alone. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/home.h"
#include "cli/monitor_proc.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"

#define VSOCK_SOCKET "vsock.sock"
// Until the guest is ready. Generous: a host that emulates ring 0 takes ten seconds at best.
#define BOOT_TIMEOUT_NS 180000000000ULL
// For the ready message, once the guest has connected.
#define GREETING_NS 30000000000ULL

struct run {
	struct config config;
	struct agent_exec exec;
	const char **env;
	unsigned int nr_env;
	bool use_stdin;
	uint64_t deadline_ns;
	const char *timeout_text;
	bool show_console;
	bool timings;
	bool json;

	char dir[PATH_MAX];
	char run_dir[PATH_MAX];
	int lock_fd;
	int ready_fd;
	int signal_fd;
	int console_fd; // what the guest prints, our end
	struct monitor_proc monitor;
	struct agent_ready ready;

	// CLOCK_MONOTONIC, 0 while it has not come.
	uint64_t start_ns, ready_ns, answered_ns, ended_ns;
};

static int usage(FILE *out, int status)
{
	fputs("Usage: mayfly run [OPTION]... -- COMMAND [ARG]...\n"
	      "\n"
	      "Boots a throwaway machine, runs COMMAND in it, and leaves nothing behind.\n"
	      "\n"
	      "  -m, --memory SIZE     memory of the machine, like 128M or 2G (default 128M)\n"
	      "  -c, --cpus N          virtual CPUs, 1 to 32 (default 1)\n"
	      "      --timeout TIME    end it all after TIME, like 30s or 5m\n"
	      "  -i, --interactive     pass standard input on\n"
	      "  -t, --tty             give the command a terminal (with -i: this one)\n"
	      "  -w, --workdir DIR     working directory in the machine\n"
	      "  -u, --user USER       user or uid[:gid] in the machine (default root)\n"
	      "  -e, --env NAME=VALUE  set a variable; may be repeated\n"
	      "      --kernel FILE     another guest kernel (vmlinux, PVH or bzImage)\n"
	      "      --initramfs FILE  another root file system (a cpio archive)\n"
	      "      --append WORDS    more words for the kernel's command line\n"
	      "      --console         show what the guest prints on its console, on stderr\n"
	      "      --timings         tell on stderr what took how long (--json: as JSON)\n"
	      "\n"
	      "Exit status: the command's own, 128+n if signal n ended it, 127 if it was not "
	      "found,\n"
	      "126 if it could not be started, 124 after --timeout, 125 if mayfly itself failed, "
	      "2\n"
	      "for wrong usage.\n",
		out);
	return status;
}

// --- Options ---------------------------------------------------------------------------------

enum {
	OPT_TIMEOUT = 256,
	OPT_KERNEL,
	OPT_INITRAMFS,
	OPT_APPEND,
	OPT_CONSOLE,
	OPT_TIMINGS,
	OPT_JSON
};

// A file that the monitor, whose working directory may be another, is to find.
static int set_path(struct run *run, const char *key, const char *path, struct err *err)
{
	CLEANUP_FREE char *absolute = realpath(path, NULL);

	if (!absolute)
		return err_errno(err, -errno, "%s", path);
	return config_set(&run->config, "machine", key, absolute, err);
}

static int take_option(struct run *run, int opt, struct err *err)
{
	uint64_t ns;
	int r;

	switch (opt) {
	case 'm':
		return config_set(&run->config, "machine", "memory", optarg, err);
	case 'c':
		return config_set(&run->config, "machine", "cpus", optarg, err);
	case OPT_TIMEOUT:
		r = parse_duration(optarg, &ns, err);
		if (r < 0)
			return err_wrap(err, r, "timeout");
		run->deadline_ns = run->start_ns + ns;
		run->timeout_text = optarg;
		return 0;
	case 'i':
		run->use_stdin = true;
		return 0;
	case 't':
		run->exec.tty = true;
		return 0;
	case 'w':
		run->exec.cwd = optarg;
		return 0;
	case 'u':
		run->exec.user = optarg;
		return 0;
	case 'e':
		if (!strchr(optarg, '=') || optarg[0] == '=')
			return err_set(err, -EINVAL, "env: '%s' is not NAME=VALUE", optarg);
		run->env[run->nr_env++] = optarg;
		return 0;
	case OPT_KERNEL:
		return set_path(run, "kernel", optarg, err);
	case OPT_INITRAMFS:
		return set_path(run, "initramfs", optarg, err);
	case OPT_APPEND:
		return config_set(&run->config, "machine", "append", optarg, err);
	case OPT_CONSOLE:
		run->show_console = true;
		return 0;
	case OPT_TIMINGS:
		run->timings = true;
		return 0;
	case OPT_JSON:
		run->json = run->timings = true;
		return 0;
	default:
		return -EINVAL;
	}
}

// Returns 0 to go on, or the exit status plus one.
static int parse(struct run *run, int argc, char **argv)
{
	static const struct option options[] = {
		{"memory", required_argument, NULL, 'm'},
		{"cpus", required_argument, NULL, 'c'},
		{"timeout", required_argument, NULL, OPT_TIMEOUT},
		{"interactive", no_argument, NULL, 'i'},
		{"tty", no_argument, NULL, 't'},
		{"workdir", required_argument, NULL, 'w'},
		{"user", required_argument, NULL, 'u'},
		{"env", required_argument, NULL, 'e'},
		{"kernel", required_argument, NULL, OPT_KERNEL},
		{"initramfs", required_argument, NULL, OPT_INITRAMFS},
		{"append", required_argument, NULL, OPT_APPEND},
		{"console", no_argument, NULL, OPT_CONSOLE},
		{"timings", no_argument, NULL, OPT_TIMINGS},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "+m:c:itw:u:e:h", options, NULL)) != -1) {
		if (opt == 'h')
			return 1 + usage(stdout, 0);
		if (opt == '?') {
			fputs("mayfly run --help lists the options\n", stderr);
			return 1 + EXIT_USAGE;
		}
		if (take_option(run, opt, &err) < 0) {
			cli_fail("run", &err);
			// A file that is not there is no wrong usage; a bad number is.
			return 1 + (err.code == -EINVAL || err.code == -ERANGE ? EXIT_USAGE
									       : EXIT_FAILED);
		}
	}
	if (optind == argc) {
		fputs("mayfly run: which command? (mayfly run -- uname -a)\n", stderr);
		return 1 + EXIT_USAGE;
	}
	run->exec.argv = (const char *const *)argv + optind;
	return 0;
}

// --- The machine -----------------------------------------------------------------------------

static int prepare(struct run *run, struct err *err)
{
	char ini[PATH_MAX];
	sigset_t set;
	int r = 0;

	if (!run->config.kernel[0])
		r = home_find_kernel(run->config.kernel, err);
	if (r < 0)
		return r;
	// From here on a signal is an event like others, so that everything is taken down again.
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	run->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (run->signal_fd < 0)
		return err_errno(err, -errno, "signalfd");
	r = home_make_throwaway(run->dir, &run->lock_fd, err);
	if (r < 0)
		return r;
	if (snprintf(run->run_dir, sizeof(run->run_dir), "%s/run", run->dir) >=
			(int)sizeof(run->run_dir) ||
		snprintf(ini, sizeof(ini), "%s/vm.ini", run->dir) >= (int)sizeof(ini))
		return err_errno(err, -ENAMETOOLONG, "%s", run->dir);
	r = config_write(ini, &run->config, err);
	if (r < 0)
		return r;
	run->ready_fd = agent_ready_listen(run->run_dir, VSOCK_SOCKET, err);
	return run->ready_fd < 0 ? run->ready_fd : 0;
}

static int start(struct run *run, struct err *err)
{
	CLEANUP_FD int write_end = -1;
	int p[2];

	if (run->show_console) {
		if (pipe2(p, O_CLOEXEC) < 0)
			return err_errno(err, -errno, "pipe");
		run->console_fd = p[0];
		write_end = p[1];
		fcntl(run->console_fd, F_SETFL, O_NONBLOCK);
		// While the command runs nobody empties it: room for what the guest prints then.
		fcntl(run->console_fd, F_SETPIPE_SZ, 1 << 20);
	}
	return monitor_proc_start(&run->monitor, run->dir, write_end, err);
}

static void show_console(struct run *run)
{
	char buf[4096];
	ssize_t n;

	if (run->console_fd < 0)
		return;
	while ((n = read(run->console_fd, buf, sizeof(buf))) > 0)
		if (fd_write_all(STDERR_FILENO, buf, (size_t)n) < 0)
			break;
	if (n == 0)
		fd_close(&run->console_fd);
}

// Whether the monitor has ended, or does within the moment that its last words take.
static bool monitor_gone(struct run *run)
{
	struct pollfd ended = {.fd = run->monitor.pid_fd, .events = POLLIN};

	return poll(&ended, 1, 500) > 0;
}

// What the monitor said of its failure, or that it ended without a word.
static int monitor_failure(struct run *run, struct err *err)
{
	int status = monitor_proc_end(&run->monitor);

	if (run->monitor.failed)
		return err_set(err, -EIO, "%s", run->monitor.err.msg);
	if (run->monitor.ended)
		return err_set(err, -EIO,
			"the guest reset itself before it was ready (--console shows what it "
			"printed)");
	return err_set(err, -EIO, "the monitor ended unexpectedly, with status %d", status);
}

#define WAIT_TIMED_OUT 1 // and -EINTR with *ret_signal when a signal came

// Waits until the agent has said that it is ready.
static int wait_ready(struct run *run, int *ret_signal, struct err *err)
{
	uint64_t deadline = MIN(run->deadline_ns, run->start_ns + BOOT_TIMEOUT_NS);

	for (;;) {
		struct pollfd fds[] = {
			{.fd = run->ready_fd, .events = POLLIN},
			{.fd = run->monitor.status_fd, .events = POLLIN},
			{.fd = run->signal_fd, .events = POLLIN},
			{.fd = run->console_fd, .events = POLLIN},
		};
		uint64_t now = now_ns();
		struct signalfd_siginfo info;

		if (now >= deadline)
			return WAIT_TIMED_OUT;
		if (poll(fds, ARRAY_SIZE(fds), (int)MIN((deadline - now) / 1000000 + 1, 60000ULL)) <
				0 &&
			errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (fds[3].revents)
			show_console(run);
		if (fds[2].revents && read(run->signal_fd, &info, sizeof(info)) == sizeof(info)) {
			*ret_signal = (int)info.ssi_signo;
			return -EINTR;
		}
		if (fds[1].revents && monitor_proc_hear(&run->monitor) == 1)
			return monitor_failure(run, err);
		if (fds[0].revents)
			return agent_ready_wait(run->ready_fd, run->monitor.pid_fd,
				now_ns() + GREETING_NS, &run->ready, err);
	}
}

// A guest that is silent past its time: says where it was, which is what one wants to know first.
static void report_timeout(struct run *run)
{
	fprintf(stderr, "mayfly run: timed out after %s%s\n",
		run->timeout_text ? run->timeout_text : "3m",
		run->ready_ns ? "" : ", before the guest was ready");
	if (run->ready_ns)
		return;
	// The monitor answers on our stderr, which it shares.
	kill(run->monitor.pid, SIGUSR1);
	struct pollfd wait = {.fd = run->monitor.pid_fd, .events = POLLIN};
	poll(&wait, 1, 200);
}

static void print_timings(struct run *run)
{
	json_t *ended = run->monitor.ended ? json_loads(run->monitor.ended, 0, NULL) : NULL;
	uint64_t first_run = (uint64_t)json_integer_value(json_object_get(ended, "first_run_ns"));
	const struct {
		const char *key, *text;
		uint64_t from, to;
	} stages[] = {
		{"start_to_first_run_us", "start to first KVM_RUN", run->start_ns, first_run},
		{"first_run_to_ready_us", "first KVM_RUN to agent ready", first_run, run->ready_ns},
		{"ready_to_answer_us", "agent ready to command's end", run->ready_ns,
			run->answered_ns},
		{"answer_to_end_us", "command's end to all gone", run->answered_ns, run->ended_ns},
		{"total_us", "in all", run->start_ns, run->ended_ns},
	};
	json_t *all = json_object();

	for (size_t i = 0; i < ARRAY_SIZE(stages); i++) {
		if (!stages[i].from || stages[i].to < stages[i].from)
			continue;
		uint64_t us = (stages[i].to - stages[i].from) / 1000;

		json_object_set_new(all, stages[i].key, json_integer((json_int_t)us));
		if (!run->json)
			fprintf(stderr, "%-30s %10.3f ms\n", stages[i].text, (double)us / 1000);
	}
	if (ended)
		json_object_set(all, "monitor", ended);
	if (run->json) {
		json_dumpf(all, stderr, JSON_COMPACT);
		fputc('\n', stderr);
	} else if (ended) {
		const char *kind;
		json_t *n, *exits = json_object_get(ended, "exits");

		fprintf(stderr,
			"host: %s; exits:", json_string_value(json_object_get(ended, "host")));
		json_object_foreach(exits, kind, n)
			fprintf(stderr, " %s %lld", kind, json_integer_value(n));
		fprintf(stderr, "; monitor: %lld KiB resident\n",
			json_integer_value(json_object_get(ended, "monitor_rss_kib")));
	}
	json_decref(all);
	json_decref(ended);
}

// Runs the command in the guest that is ready. Returns the exit status.
static int exec_in_guest(struct run *run, struct err *err)
{
	CLEANUP_FD int conn_fd = -1;
	struct agent_result result = {0};
	uint64_t now = now_ns();
	int r;

	run->exec.env = run->env;
	run->exec.in_fd = run->use_stdin ? STDIN_FILENO : -1;
	run->exec.out_fd = STDOUT_FILENO;
	run->exec.err_fd = STDERR_FILENO;
	run->exec.signal_fd = run->signal_fd;
	run->exec.cancel_fd = run->monitor.pid_fd;
	if (run->deadline_ns != UINT64_MAX)
		run->exec.timeout_ms = MAX((MAX(run->deadline_ns, now) - now) / 1000000, 1ULL);
	conn_fd = agent_connect(
		run->run_dir, VSOCK_SOCKET, AGENT_PORT, run->monitor.pid_fd, run->deadline_ns, err);
	if (conn_fd < 0)
		return conn_fd;
	r = agent_exec(conn_fd, &run->exec, &result, err);
	run->answered_ns = now_ns();
	if (result.timed_out || r == -ETIMEDOUT) {
		report_timeout(run);
		return EXIT_TIMEOUT;
	}
	// The command was not started, or its status says it all.
	if (r < 0 && result.exit_code >= 126 && result.exit_code <= 127) {
		cli_fail("run", err);
		return result.exit_code;
	}
	return r < 0 ? r : result.exit_code;
}

static int execute(struct run *run, struct err *err)
{
	int sig = 0, r;

	r = prepare(run, err);
	if (r == 0)
		r = start(run, err);
	if (r < 0)
		return r;
	r = wait_ready(run, &sig, err);
	if (r == -EINTR && sig)
		return 128 + sig;
	if (r == WAIT_TIMED_OUT) {
		report_timeout(run);
		return EXIT_TIMEOUT;
	}
	if (r < 0)
		return r;
	run->ready_ns = now_ns();
	r = exec_in_guest(run, err);
	// The connection breaks when the machine does: then that is the reason to tell.
	if (r < 0 && monitor_gone(run))
		return monitor_failure(run, err);
	return r;
}

int run_main(int argc, char **argv)
{
	struct run run = {
		.start_ns = now_ns(),
		.deadline_ns = UINT64_MAX,
		.lock_fd = -1,
		.ready_fd = -1,
		.signal_fd = -1,
		.console_fd = -1,
		.monitor = {.pid_fd = -1, .status_fd = -1},
	};
	struct err err = {0};
	int r;

	config_defaults(&run.config);
	run.env = calloc((size_t)argc + 1, sizeof(*run.env));
	if (!run.env)
		return EXIT_FAILED;
	r = parse(&run, argc, argv);
	if (r > 0) {
		free(run.env);
		return r - 1;
	}
	r = execute(&run, &err);
	if (r < 0)
		r = cli_fail("run", &err);
	monitor_proc_end(&run.monitor);
	show_console(&run);
	fd_close(&run.ready_fd);
	if (run.dir[0] && home_remove(run.dir, &err) < 0)
		cli_fail("run", &err);
	run.ended_ns = now_ns();
	if (run.timings)
		print_timings(&run);
	fd_close(&run.lock_fd);
	fd_close(&run.signal_fd);
	fd_close(&run.console_fd);
	free(run.monitor.ended);
	free(run.env);
	return r;
}
