// SPDX-License-Identifier: Apache-2.0
// mayfly run: a command in a machine that exists for it alone. One thread.
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/copy.h"
#include "cli/exec_options.h"
#include "cli/home.h"
#include "cli/life.h"
#include "cli/machine_options.h"
#include "cli/running.h"
#include "cli/throwaway.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"

#define MAX_OUT_BYTES (1024 * MIB)

// For what a command has left, when its own time is over.
#define FETCH_GRACE_NS 60000000000ULL

struct run {
	struct throwaway machine;
	struct exec_command cmd;
	bool timings;
	bool json;
	const char *in_dir, *out_dir; // of this host; NULL: none
	uint64_t max_out_bytes;
	bool detach;
	const char *name; // of a machine that stays; NULL: one is made up
	bool configured; // by an option of the machine's
	const char *pool_name; // NULL: none
	struct pool pool;

	uint64_t answered_ns, ended_ns; // CLOCK_MONOTONIC, 0 while it has not come
};

static int usage(FILE *out, int status)
{
	fputs("Usage: mayfly run [OPTION]... -- COMMAND [ARG]...\n"
	      "\n"
	      "Runs COMMAND in a throwaway machine, and leaves nothing of it behind. The first one "
	      "of\n"
	      "its kind boots; those after it go on from a snapshot of that boot.\n"
	      "\n" MACHINE_OPTIONS_HELP
	      "      --in DIR          what is in DIR is copied to /in of the machine first; DIR "
	      "itself\n"
	      "                        is out of its reach\n"
	      "      --out DIR         what the command leaves in /out is copied to DIR, however "
	      "it\n"
	      "                        ends; nothing can be written outside of DIR\n"
	      "      --max-out SIZE    what may be written there (default 1G; each file counts 4K "
	      "at\n"
	      "                        least): the machine's wish must not fill this host's disk\n"
	      "                        (a copy that failed is status 125, unless the command "
	      "failed "
	      "too)\n"
	      "  -d, --detach          make a machine that stays, start COMMAND in it as the job\n"
	      "                        'main', and print the machine's name; mayfly rm -f ends it\n"
	      "      --name NAME       its name\n"
	      "      --timeout TIME    end it all after TIME, like 30s or 5m\n" EXEC_OPTIONS_HELP
	      "      --pool POOL       in a machine that waits in that pool (see mayfly pool), "
	      "which\n"
	      "                        says what it is; if none does, one is made as the pool "
	      "does\n"
	      "      --cold            boot it in any case\n"
	      "      --console         show what the guest prints on its console, on stderr\n"
	      "      --timings         tell on stderr what took how long (--json: as JSON)\n"
	      "\n" EXEC_STATUS_HELP,
		out);
	return status;
}

// --- Options ---------------------------------------------------------------------------------

enum {
	OPT_COLD = 'L',
	OPT_CONSOLE = 'C',
	OPT_TIMINGS = 'M',
	OPT_JSON = 'J',
	OPT_IN = 'I',
	OPT_OUT = 'O',
	OPT_MAX_OUT = 'X',
	OPT_NAME = 'N',
	OPT_POOL = 'P'
};

static int take_option(struct run *run, int opt, struct err *err)
{
	int r = machine_option(&run->machine.config, opt, optarg, err);

	run->configured |= r == 1;
	if (r == 0)
		r = exec_option(&run->cmd, opt, optarg, err);
	if (r != 0)
		return r;
	switch (opt) {
	case OPT_IN:
		run->in_dir = optarg;
		return 0;
	case OPT_OUT:
		run->out_dir = optarg;
		return 0;
	case OPT_MAX_OUT:
		r = parse_size(optarg, &run->max_out_bytes, err);
		return r < 0 ? err_wrap(err, r, "max-out") : 0;
	case 'd':
		run->detach = true;
		return 0;
	case OPT_NAME:
		run->name = optarg;
		return home_check_name(optarg, err);
	case OPT_POOL:
		run->pool_name = optarg;
		return 0;
	case OPT_COLD:
		run->machine.cold = true;
		return 0;
	case OPT_CONSOLE:
		run->machine.show_console = true;
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
		MACHINE_LONG_OPTIONS,
		EXEC_LONG_OPTIONS,
		{"in", required_argument, NULL, OPT_IN},
		{"out", required_argument, NULL, OPT_OUT},
		{"max-out", required_argument, NULL, OPT_MAX_OUT},
		{"detach", no_argument, NULL, 'd'},
		{"name", required_argument, NULL, OPT_NAME},
		{"pool", required_argument, NULL, OPT_POOL},
		{"cold", no_argument, NULL, OPT_COLD},
		{"console", no_argument, NULL, OPT_CONSOLE},
		{"timings", no_argument, NULL, OPT_TIMINGS},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "+" MACHINE_SHORT_OPTIONS EXEC_SHORT_OPTIONS "hd",
			options, NULL)) != -1) {
		if (opt == 'h')
			return 1 + usage(stdout, 0);
		if (opt == '?') {
			fputs("mayfly run --help lists the options\n", stderr);
			return 1 + EXIT_USAGE;
		}
		if (take_option(run, opt, &err) < 0)
			return 1 + cli_bad_option("run", &err);
	}
	if (run->detach ? run->out_dir || run->timings : run->name != NULL) {
		fputs(run->detach ? "mayfly run: --out and --timings are for a command that is "
				    "waited "
				    "for\n"
				  : "mayfly run: --name is for --detach\n",
			stderr);
		return 1 + EXIT_USAGE;
	}
	if (run->pool_name && (run->configured || run->detach || run->machine.cold ||
				      run->machine.show_console)) {
		fputs("mayfly run: with --pool it is the pool that says what the machine is; nor "
		      "are\n--detach, --cold and --console for it\n",
			stderr);
		return 1 + EXIT_USAGE;
	}
	if (run->pool_name) {
		if (pool_open(run->pool_name, &run->pool, &err) < 0)
			return 1 + cli_bad_option("run", &err);
		run->machine.pool = &run->pool;
		run->machine.config = run->pool.config;
	}
	run->cmd.argv = (const char *const *)argv + optind;
	return exec_command_image(&run->cmd, &run->machine.config, &err) < 0
		       ? 1 + cli_bad_option("run", &err)
		       : 0;
}

// --- The machine -----------------------------------------------------------------------------

static void print_timings(struct run *run)
{
	const struct launch *launch = &run->machine.launch;
	json_t *ended = launch->monitor.ended ? json_loads(launch->monitor.ended, 0, NULL) : NULL;
	uint64_t first_run = (uint64_t)json_integer_value(json_object_get(ended, "first_run_ns"));
	bool leased = run->machine.leased;
	const struct {
		const char *key, *text;
		uint64_t from, to;
	} stages[] = {
		{"start_to_lease_us", "start to a machine of the pool",
			leased ? launch->start_ns : 0, launch->ready_ns},
		{"start_to_first_run_us", "start to first KVM_RUN", launch->start_ns, first_run},
		{"first_run_to_ready_us", "first KVM_RUN to agent ready",
			launch->restored_ns ? 0 : first_run, launch->ready_ns},
		{"first_run_to_awake_us", "first KVM_RUN to guest awake",
			launch->restored_ns ? first_run : 0, launch->ready_ns},
		{"ready_to_answer_us", "agent ready to command's end", launch->ready_ns,
			run->answered_ns},
		{"answer_to_end_us", "command's end to all gone", run->answered_ns, run->ended_ns},
		{"total_us", "in all", launch->start_ns, run->ended_ns},
	};
	json_t *all = json_object();

	if (run->pool_name)
		json_object_set_new(all, "pool", json_string(leased ? "hit" : "miss"));
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

// --- Files in and out ------------------------------------------------------------------------

static void show_problem(void *ctx, const char *path, int errno_value)
{
	char text[PATH_MAX];

	tree_printable(text, sizeof(text), path);
	fprintf(stderr, "mayfly run: %s: %s\n", text, copy_problem_text(errno_value));
	(void)ctx;
}

// What can be known to fail before a machine is there.
static int check_folders(const struct run *run, struct err *err)
{
	struct stat st;

	if (run->in_dir && stat(run->in_dir, &st) < 0)
		return err_errno(err, -errno, "--in %s", run->in_dir);
	if (run->in_dir && !S_ISDIR(st.st_mode))
		return err_errno(err, -ENOTDIR, "--in %s", run->in_dir);
	if (run->out_dir && mkdir(run->out_dir, 0777) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "--out %s", run->out_dir);
	if (run->out_dir && access(run->out_dir, W_OK | X_OK) < 0)
		return err_errno(err, -errno, "--out %s", run->out_dir);
	return 0;
}

static int bring_in(const struct run *run, const struct copy *copy, struct err *err)
{
	char from[PATH_MAX];

	if (!run->in_dir)
		return 0;
	if (snprintf(from, sizeof(from), "%s/.", run->in_dir) >= (int)sizeof(from))
		return err_errno(err, -ENAMETOOLONG, "--in");
	return copy_in(copy, from, "/in", err);
}

static int make_out(const struct run *run, const struct copy *copy, struct err *err)
{
	struct agent_files files = {.signal_fd = copy->signal_fd, .cancel_fd = copy->cancel_fd};
	int rc;

	if (!run->out_dir)
		return 0;
	files.conn_fd = agent_connect(copy->run_dir, copy->vsock, AGENT_PORT, copy->cancel_fd,
		copy->deadline_ns ? copy->deadline_ns : AGENT_DEADLINE_NONE, err);
	if (files.conn_fd < 0)
		return files.conn_fd;
	files.deadline_ns = copy->deadline_ns;
	rc = agent_mkdir(&files, "/out", err);
	fd_close(&files.conn_fd);
	return rc;
}

// --- All of it -------------------------------------------------------------------------------

// The command, with its files, in the machine that answers. Returns its exit status.
static int run_command(struct run *run, struct err *err)
{
	struct launch *launch = &run->machine.launch;
	struct copy copy = {
		.run_dir = launch->run_dir,
		.vsock = LAUNCH_VSOCK,
		.signal_fd = launch->signal_fd,
		.cancel_fd = launch->monitor.pid_fd,
		.problem = show_problem,
		.max_bytes = run->max_out_bytes,
	};
	CLEANUP_FD int conn_fd = -1;
	int r, status;

	if (run->cmd.deadline_ns != AGENT_DEADLINE_NONE)
		copy.deadline_ns = run->cmd.deadline_ns;
	r = bring_in(run, &copy, err);
	if (r == 0)
		r = make_out(run, &copy, err);
	if (r == 0)
		r = conn_fd = agent_connect(launch->run_dir, LAUNCH_VSOCK, AGENT_PORT,
			launch->monitor.pid_fd, run->cmd.deadline_ns, err);
	if (r == -ETIMEDOUT && run->cmd.deadline_ns != AGENT_DEADLINE_NONE)
		return exec_timed_out(&run->cmd, "");
	if (r < 0)
		return r;
	status = exec_command_run(
		&run->cmd, conn_fd, launch->signal_fd, launch->monitor.pid_fd, err);
	run->answered_ns = now_ns();
	if (status < 0 || !run->out_dir)
		return status;
	// Also what it has left when time ran out.
	if (copy.deadline_ns)
		copy.deadline_ns = MAX(copy.deadline_ns, now_ns() + FETCH_GRACE_NS);
	r = copy_out(&copy, "/out/.", run->out_dir, err);
	if (r == -EFBIG)
		err_set(err, r, "more than what --max-out allows; what came before that is in '%s'",
			run->out_dir);
	if (r < 0)
		err_wrap(err, r, "/out");
	// A command that failed has the word: why it did tells more than what could not be fetched.
	if (r < 0 && status != 0) {
		launch_failure(launch, err);
		cli_fail("run", err);
		r = 0;
	}
	return r < 0 ? r : status;
}

static int execute(struct run *run, struct err *err)
{
	struct launch *launch = &run->machine.launch;
	uint64_t boot_deadline = launch->start_ns + THROWAWAY_BOOT_NS;
	int sig = 0, failure, r;

	if (run->cmd.deadline_ns <= boot_deadline)
		boot_deadline = run->cmd.deadline_ns;
	else
		run->cmd.timeout_text = THROWAWAY_BOOT_TEXT;
	r = throwaway_start(&run->machine, boot_deadline, &sig, err);
	if (r == LAUNCH_SIGNAL)
		return 128 + sig;
	if (r == LAUNCH_TIMED_OUT)
		return exec_timed_out(&run->cmd, ", before the guest was ready");
	if (r < 0)
		return r;
	r = run_command(run, err);
	if (r >= 0)
		return r;
	// The connection breaks when the machine does: then that is the reason to tell.
	failure = launch_failure(launch, err);
	return failure < 0 ? failure : r;
}

// Runs the throwaway machine to its end. Returns the exit status.
static int run_here(struct run *run)
{
	struct err err = {0};
	int r = execute(run, &err);

	if (r < 0)
		r = cli_fail("run", &err);
	if (throwaway_end(&run->machine, &err) < 0)
		cli_fail("run", &err);
	run->ended_ns = now_ns();
	if (run->timings)
		print_timings(run);
	throwaway_fini(&run->machine);
	return r;
}

// Makes a machine that stays and starts the command in it.
static int start_job(struct run *run, const char *name, struct err *err)
{
	struct copy copy = {
		.vsock = LAUNCH_VSOCK, .signal_fd = -1, .cancel_fd = -1, .problem = show_problem};
	CLEANUP_FD int conn_fd = -1;
	char job[AGENT_JOB_NAME_MAX + 1];
	struct agent_result result = {0};
	struct running m;
	int r = life_start(run->machine.dir, THROWAWAY_BOOT_NS, run->machine.show_console, err);

	if (r == 0)
		r = running_find(name, &m, err);
	if (r < 0)
		return r;
	copy.run_dir = m.run_dir;
	r = bring_in(run, &copy, err);
	if (r == 0)
		r = conn_fd = running_connect(&m, err);
	if (r >= 0)
		r = exec_command_start(&run->cmd, conn_fd, "main", -1, job, &result, err);
	if (r < 0)
		return result.exit_code > 125 ? cli_fail("run", err), result.exit_code : r;
	puts(name);
	return 0;
}

static int run_detached(struct run *run)
{
	char own[HOME_NAME_MAX + 1];
	const char *name = run->name ? run->name : own;
	struct err err = {0}, ignored = {0};
	uint32_t number;
	int r;

	do {
		if (getrandom(&number, sizeof(number), 0) != sizeof(number))
			return EXIT_FAILED;
		snprintf(own, sizeof(own), "vm-%06x", number & 0xffffff);
		r = life_create(name, &run->machine.config, run->machine.dir, &err);
	} while (r == -EEXIST && !run->name);
	if (r < 0)
		return cli_fail("run", &err);
	r = start_job(run, name, &err);
	if (r < 0)
		r = cli_fail("run", &err);
	if (r != 0) // nobody has been told of it
		life_remove(name, true, &ignored);
	return r;
}

int run_main(int argc, char **argv)
{
	struct run run = {.max_out_bytes = MAX_OUT_BYTES, .machine = THROWAWAY_INIT};
	struct err err = {0};
	int r;

	if (exec_command_init(&run.cmd, "run", argc, &err) < 0)
		return cli_fail("run", &err);
	run.machine.verb = "run";
	run.machine.launch.start_ns = run.cmd.start_ns;
	config_defaults(&run.machine.config);
	r = parse(&run, argc, argv);
	if (r == 0 && check_folders(&run, &err) < 0)
		r = 1 + cli_fail("run", &err);
	if (r > 0)
		r = r - 1;
	else
		r = run.detach ? run_detached(&run) : run_here(&run);
	exec_command_fini(&run.cmd);
	return r;
}
