// SPDX-License-Identifier: Apache-2.0
// The life of a machine that has a name: create, up, down, rm, ps. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/pidfd.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/launch.h"
#include "cli/layers.h"
#include "cli/life.h"
#include "cli/machine_options.h"
#include "cli/pool_store.h"
#include "cli/running.h"
#include "cli/secret.h"
#include "cli/store.h"
#include "cli/work_machine.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/cgroup.h"
#include "vmm/config.h"
#include "work/history.h"

#define SHUTDOWN_TIMEOUT_NS 30000000000ULL
#define TERM_GRACE_MS       2000
#define ANSWER_RETRY_MS     50

// --- create and up ---------------------------------------------------------------------------

static int create_usage(FILE *out, int status)
{
	fputs("Usage: mayfly create [OPTION]... NAME\n"
	      "\n"
	      "Makes a machine; `mayfly up NAME` starts it. Its vm.ini may be edited by hand.\n"
	      "\n" MACHINE_OPTIONS_HELP,
		out);
	return status;
}

static int up_usage(FILE *out, int status)
{
	fputs("Usage: mayfly up [OPTION]... NAME\n"
	      "\n"
	      "Starts a machine and returns when it answers. One that is running already is left "
	      "as\n"
	      "it is; one that does not exist is created with the options, which are for that "
	      "alone.\n"
	      "\n" MACHINE_OPTIONS_HELP
	      "      --timeout TIME    give up, and end it, after TIME (default 3m)\n"
	      "      --console         show on stderr what the guest prints until it answers\n",
		out);
	return status;
}

enum { OPT_TIMEOUT = 'T', OPT_CONSOLE = 'C' };

#define MANY_LAYERS 16

int life_lock(const char *dir, struct err *err)
{
	CLEANUP_FD int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0 || flock(fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", dir);
	return TAKE_FD(fd);
}

int life_up(struct life_start *start, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	int sig = 0, r;
	bool given;

	launch.start_ns = now_ns();
	launch.snapshot = start->snapshot;
	launch.memory_way = start->memory_way;
	launch.hostname = start->hostname;
	launch.new_identity = start->hostname != NULL;
	r = launch_take_signals(&launch, err);
	if (r == 0 && start->snapshot)
		r = layers_give(start->snapshot, start->dir, false, err);
	given = r == 0 && start->snapshot;
	if (r == 0)
		r = launch_start(&launch, start->dir, false, start->show_console, err);
	if (r == 0)
		r = launch_wait(&launch, launch.start_ns + start->timeout_ns, &sig, err);
	if (r == 0)
		r = egress_start(start->dir, err);
	if (r == 0) {
		start->restored_ns = launch.restored_ns - launch.start_ns;
		start->ready_ns = launch.ready_ns - launch.start_ns;
		launch_let_go(&launch);
	}
	launch_end(&launch);
	if (given && r == 0)
		layers_settle(start->snapshot, start->dir);
	else if (given)
		layers_undo(start->dir);
	if (r == LAUNCH_TIMED_OUT)
		return err_set(err, -ETIMEDOUT,
			"the guest did not answer in time; it was ended (%s/console.log, "
			"%s/monitor.log)",
			start->dir, start->dir);
	if (r == LAUNCH_SIGNAL)
		return err_set(err, -EINTR, "interrupted by signal %d", sig);
	return r;
}

// Waits until the agent of a machine that somebody else has started answers.
static int wait_answer(const char *dir, uint64_t deadline_ns, struct err *err)
{
	char run_dir[PATH_MAX];
	int r;

	if (snprintf(run_dir, sizeof(run_dir), "%s/run", dir) >= (int)sizeof(run_dir))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	for (;;) {
		int fd = agent_connect(run_dir, LAUNCH_VSOCK, AGENT_PORT, -1, deadline_ns, err);

		if (fd >= 0) {
			fd_close(&fd);
			return 0;
		}
		r = home_running(dir, NULL, NULL);
		if (r == 0)
			return err_set(err, -ESRCH, "the machine has ended");
		if (now_ns() >= deadline_ns)
			return fd;
		// Its agent does not listen yet, and there is nothing to be told by.
		poll(NULL, 0, ANSWER_RETRY_MS);
	}
}

int life_create(const char *name, struct config *config, char ret_dir[PATH_MAX], struct err *err)
{
	int r = 0;

	if (!config->kernel[0])
		r = home_find_kernel(config->kernel, err);
	return r < 0 ? r : home_create(name, config, ret_dir, err);
}

int life_start(const char *dir, uint64_t timeout_ns, bool show_console, struct err *err)
{
	struct life_start start = {
		.dir = dir, .timeout_ns = timeout_ns, .show_console = show_console};
	// Another up may be under way: what it leaves, running or not, is what counts.
	CLEANUP_FD int dir_fd = life_lock(dir, err);
	struct err merge_err = {0};
	int r;

	if (dir_fd < 0)
		return dir_fd;
	r = home_running(dir, NULL, err);
	if (r < 0)
		return r;
	if (r == 1)
		return wait_answer(dir, now_ns() + timeout_ns, err);
	r = suspended_resume(&start, err);
	if (r != 0)
		return MIN(r, 0);
	// A disk that was in many snapshots would come to its bound; and each read looks through
	// them.
	if (layers_merge(dir, MANY_LAYERS, &merge_err) < 0)
		fprintf(stderr, "mayfly: %s\n", merge_err.msg);
	return life_up(&start, err);
}

static int up(const char *name, struct config *config, bool configured, uint64_t timeout_ns,
	bool show_console, struct err *err)
{
	char dir[PATH_MAX];
	int r = home_find(name, dir, err);

	if (r == -ENOENT)
		r = life_create(name, config, dir, err);
	else if (r == 0 && configured)
		r = err_set(err, -EINVAL,
			"'%s' exists: its options are in %s/vm.ini and not on this command line",
			name, dir);
	if (r < 0)
		return r;
	r = life_start(dir, timeout_ns, show_console, err);
	// What is wrong in vm.ini is not wrong on the command line.
	return r == -EINVAL ? -EBADMSG : r;
}

static int create_or_up(int argc, char **argv, bool start)
{
	static const struct option options[] = {
		MACHINE_LONG_OPTIONS,
		{"timeout", required_argument, NULL, OPT_TIMEOUT},
		{"console", no_argument, NULL, OPT_CONSOLE},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	const char *verb = start ? "up" : "create";
	int (*usage)(FILE *, int) = start ? up_usage : create_usage;
	uint64_t timeout_ns = LIFE_BOOT_TIMEOUT_NS;
	bool configured = false, show_console = false;
	struct config config;
	char dir[PATH_MAX];
	struct err err = {0};
	int opt, r;

	config_defaults(&config);
	optind = 1;
	while ((opt = getopt_long(argc, argv, MACHINE_SHORT_OPTIONS "h", options, NULL)) != -1) {
		r = machine_option(&config, opt, optarg, &err);
		configured |= r == 1;
		if (r < 0)
			return cli_bad_option(verb, &err);
		if (r == 1)
			continue;
		switch (opt) {
		case OPT_TIMEOUT:
			if (start && parse_duration(optarg, &timeout_ns, &err) == 0)
				break;
			return start ? cli_bad_option(verb, &err) : usage(stderr, EXIT_USAGE);
		case OPT_CONSOLE:
			show_console = true;
			if (start)
				break;
			return usage(stderr, EXIT_USAGE);
		case 'h':
			return usage(stdout, 0);
		default:
			return usage(stderr, EXIT_USAGE);
		}
	}
	if (argc - optind != 1)
		return usage(stderr, EXIT_USAGE);
	if (home_check_name(argv[optind], &err) < 0)
		return cli_bad_option(verb, &err);
	if (start)
		r = up(argv[optind], &config, configured, timeout_ns, show_console, &err);
	else
		r = life_create(argv[optind], &config, dir, &err);
	if (r == -EINVAL)
		return cli_bad_option(verb, &err);
	return r < 0 ? cli_fail(verb, &err) : 0;
}

int create_main(int argc, char **argv)
{
	return create_or_up(argc, argv, false);
}

int up_main(int argc, char **argv)
{
	return create_or_up(argc, argv, true);
}

// --- down and rm -----------------------------------------------------------------------------

static bool ended_within(int pid_fd, int timeout_ms)
{
	struct pollfd ended = {.fd = pid_fd, .events = POLLIN};

	return poll(&ended, 1, timeout_ms) > 0;
}

static int end_monitor(const char *dir, bool force, struct err *err)
{
	CLEANUP_FD int pid_fd = running_pidfd(dir, err);
	CLEANUP_FD int conn_fd = -1;
	uint64_t deadline = now_ns() + SHUTDOWN_TIMEOUT_NS;
	char run_dir[PATH_MAX];

	if (pid_fd == -ESRCH)
		return 0;
	if (pid_fd < 0)
		return pid_fd;
	if (snprintf(run_dir, sizeof(run_dir), "%s/run", dir) >= (int)sizeof(run_dir))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	if (!force) {
		// A guest that does not answer is ended all the same.
		conn_fd = agent_connect(run_dir, LAUNCH_VSOCK, AGENT_PORT, pid_fd, deadline, NULL);
		if (conn_fd >= 0 && agent_shutdown(conn_fd, pid_fd, deadline, NULL) == 0 &&
			ended_within(pid_fd, (int)(SHUTDOWN_TIMEOUT_NS / 1000000)))
			return 0;
	}
	pidfd_send_signal(pid_fd, SIGTERM, NULL, 0);
	if (ended_within(pid_fd, TERM_GRACE_MS))
		return 0;
	pidfd_send_signal(pid_fd, SIGKILL, NULL, 0);
	return ended_within(pid_fd, TERM_GRACE_MS)
		       ? 0
		       : err_set(err, -EBUSY, "%s: the monitor does not end", dir);
}

int life_down(const char *dir, bool force, struct err *err)
{
	int r = end_monitor(dir, force, err);

	cgroup_sweep_ended();
	// Which ends with it; but its last words belong to the machine's folder.
	return r < 0 ? r : egress_end(dir, err);
}

int life_remove(const char *name, bool force, struct err *err)
{
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int state_fd = -1;
	CLEANUP_FD int history_fd = -1;
	char dir[PATH_MAX];
	int r = home_find(name, dir, err);

	if (r < 0)
		return r;
	// Not while somebody brings it up; with --force that is ended first.
	if (force)
		r = life_down(dir, true, err);
	if (r == 0) {
		dir_fd = life_lock(dir, err);
		r = MIN(dir_fd, 0);
	}
	if (r == 0)
		r = home_running(dir, NULL, err);
	if (r < 0)
		return r;
	if (r == 1 && !force)
		return err_set(
			err, -EBUSY, "'%s' is running (mayfly down %s, or --force)", name, name);
	if (r == 1)
		r = life_down(dir, true, err);
	if (r == 0)
		r = store_forget(name, err);
	if (r == 0)
		r = secrets_forget(name, err);
	if (r < 0)
		return r;
	// Nobody writes into its history meanwhile.
	state_fd = work_state_open(dir, NULL);
	if (state_fd >= 0)
		history_fd = work_history_settle(state_fd);
	r = home_remove_machine(dir, err);
	fd_close(&history_fd);
	return r;
}

static int down_machine(const char *name, bool force, struct err *err)
{
	char dir[PATH_MAX];
	int r = home_find(name, dir, err);

	return r < 0 ? r : life_down(dir, force, err);
}

// The verbs that take names and --force.
static int each_name(const char *verb, int argc, char **argv, const char *help,
	int (*act)(const char *name, bool force, struct err *err))
{
	static const struct option options[] = {
		{"force", no_argument, NULL, 'f'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	bool force = false;
	int opt, status = 0;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "fh", options, NULL)) != -1) {
		switch (opt) {
		case 'f':
			force = true;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (optind == argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	for (; optind < argc; optind++) {
		struct err err = {0};

		if (act(argv[optind], force, &err) < 0)
			status = cli_fail(verb, &err);
	}
	return status;
}

int down_main(int argc, char **argv)
{
	return each_name("down", argc, argv,
		"Usage: mayfly down [--force] NAME...\n"
		"\n"
		"Ends machines. What is not on a disk (--disk) is lost with their memory. The "
		"guest shuts "
		"itself down; one that does not "
		"within\n"
		"30 seconds is ended, and with --force at once. One that is not running is no "
		"error.\n",
		down_machine);
}

int rm_main(int argc, char **argv)
{
	return each_name("rm", argc, argv,
		"Usage: mayfly rm [--force] NAME...\n"
		"\n"
		"Removes machines and all that is theirs. One that is running is refused, unless "
		"with\n"
		"--force, which ends it.\n",
		life_remove);
}

// --- ps --------------------------------------------------------------------------------------

static int list_machine(void *opaque, const char *name, const char *dir)
{
	json_t *list = opaque;
	char ini[PATH_MAX], pool[POOL_NAME_BYTES];
	struct config config;
	struct err err = {0};
	pid_t pid = 0;
	int running = home_running(dir, &pid, &err);
	int suspended = running == 0 ? suspended_is(dir, &err) : 0;
	json_t *entry = json_pack("{s:s, s:s, s:s}", "name", name, "state",
		running == 1                   ? "running"
		: running < 0 || suspended < 0 ? "unknown"
		: suspended                    ? "suspended"
					       : "stopped",
		"dir", dir);

	if (running == 1)
		json_object_set_new(entry, "pid", json_integer(pid));
	if (pool_of(dir, pool))
		json_object_set_new(entry, "pool", json_string(pool));
	if (snprintf(ini, sizeof(ini), "%s/vm.ini", dir) < (int)sizeof(ini) &&
		config_read(ini, &config, err.code ? NULL : &err) == 0) {
		json_object_set_new(entry, "cpus", json_integer(config.cpus));
		json_object_set_new(
			entry, "memory_bytes", json_integer((json_int_t)config.memory_bytes));
	}
	if (err.code)
		json_object_set_new(entry, "error", json_string(err.msg));
	return json_array_append_new(list, entry) < 0 ? -ENOMEM : 0;
}

int ps_main(int argc, char **argv)
{
	static const char help[] = "Usage: mayfly ps [--json]\n\nLists all machines, the running "
				   "ones and the others.\n";
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	json_t *list = json_array(), *entry;
	struct err err = {0};
	bool json = false;
	size_t i;
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'j') {
			json = true;
			continue;
		}
		fputs(help, opt == 'h' ? stdout : stderr);
		json_decref(list);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (optind != argc) {
		fputs(help, stderr);
		json_decref(list);
		return EXIT_USAGE;
	}
	if (home_each(list_machine, list, &err) < 0) {
		json_decref(list);
		return cli_fail("ps", &err);
	}
	if (json) {
		json_dumpf(list, stdout, JSON_INDENT(2));
		putchar('\n');
	} else {
		printf("%-24s %-9s %8s %5s %10s\n", "NAME", "STATE", "PID", "CPUS", "MEMORY");
		json_array_foreach(list, i, entry)
		{
			printf("%-24s %-9s %8lld %5lld %9lldM%s%s\n",
				json_string_value(json_object_get(entry, "name")),
				json_string_value(json_object_get(entry, "state")),
				json_integer_value(json_object_get(entry, "pid")),
				json_integer_value(json_object_get(entry, "cpus")),
				json_integer_value(json_object_get(entry, "memory_bytes")) /
					(json_int_t)MIB,
				json_object_get(entry, "error") ? "  " : "",
				json_object_get(entry, "error")
					? json_string_value(json_object_get(entry, "error"))
					: "");
		}
	}
	json_decref(list);
	return 0;
}
