// SPDX-License-Identifier: Apache-2.0
// mayfly exec and mayfly shell: a command in a machine that runs. One thread.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/history.h"
#include "cli/launch.h"
#include "cli/running.h"
#include "cli/session.h"
#include "cli/work_log.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static const char exec_help[] =
	"Usage: mayfly exec [OPTION]... NAME -- COMMAND [ARG]...\n"
	"\n"
	"Runs COMMAND in a machine that is up.\n"
	"\n" EXEC_OPTIONS_HELP
	"      --timeout TIME    end the command after TIME, like 30s or 5m\n"
	"  -d, --detach          leave it running as a job and print the job's name; see\n"
	"                        mayfly jobs and mayfly logs\n"
	"      --job JOB         the job's name (default job-N)\n"
	"\n" EXEC_STATUS_HELP;

static const char shell_help[] =
	"Usage: mayfly shell [OPTION]... NAME [COMMAND [ARG]...]\n"
	"\n"
	"An interactive shell, or COMMAND, on a terminal of a machine that is up.\n"
	"\n"
	"  -s, --session NAME    one that stays when this terminal goes, and to come back to:\n"
	"                        starts it, or shows what it has shown and goes on with it.\n"
	"                        Ctrl-] leaves it. Several may look and type at a "
	"time.\n" EXEC_OPTIONS_HELP "\n" EXEC_STATUS_HELP;

struct exec_verb {
	bool shell, detach;
	const char *job; // or session; NULL: none
	const char *name; // of the machine
	struct exec_command cmd;
};

static int run(const struct exec_verb *v, const struct running *m, int conn_fd, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	int r = launch_take_signals(&launch, err);

	if (r == 0)
		r = exec_command_run(&v->cmd, conn_fd, launch.signal_fd, -1, err);
	// A machine that ended meanwhile is the reason, whatever the connection says.
	if (r < 0)
		running_explain(m, r, err);
	launch_end(&launch);
	return r;
}

// In a machine that works on a folder a command is on record, and what it has changed a point of
// the history.
static int run_recorded(
	const struct exec_verb *v, const struct running *m, int conn_fd, struct err *err)
{
	CLEANUP_FD int state_fd = work_state_open(m->dir, NULL);
	struct work_log log;
	int r = 0;

	if (state_fd >= 0)
		r = work_log_call(&log, m->dir, v->cmd.verb, v->cmd.argv, err);
	if (r < 0)
		return r;
	r = v->detach ? exec_command_detach(&v->cmd, conn_fd, v->job ? v->job : "", -1, err)
		      : run(v, m, conn_fd, err);
	if (state_fd >= 0) {
		work_log_result(&log, r, err, r, NULL);
		history_later(v->name, state_fd);
	}
	return r;
}

// What the image of the machine says about commands. A vm.ini that cannot be read any more is no
// reason not to run one: the machine runs.
static int image_says(struct exec_verb *v, const struct running *m, struct err *err)
{
	struct config config;
	char ini[PATH_MAX];

	if (snprintf(ini, sizeof(ini), "%s/vm.ini", m->dir) >= (int)sizeof(ini) ||
		config_read(ini, &config, NULL) < 0)
		return 0;
	return exec_command_image(&v->cmd, &config, err);
}

// Returns the exit status.
static int exec_in(struct exec_verb *v)
{
	CLEANUP_FD int conn_fd = -1;
	struct running m;
	struct err err = {0};
	int r = running_find(v->name, &m, &err);

	if (r == 0)
		r = image_says(v, &m, &err);
	if (r == 0 && v->shell && v->job) {
		r = session_main(&m, &v->cmd, v->job, &err);
		return r < 0 ? cli_fail("shell", &err) : r;
	}
	// Until the agent has answered a signal just ends us: nothing is to be taken down.
	if (r == 0)
		r = conn_fd = running_connect_by(&m, v->cmd.deadline_ns, &err);
	if (conn_fd == -ETIMEDOUT && v->cmd.timeout_text)
		return exec_timed_out(&v->cmd, "");
	if (r >= 0)
		r = run_recorded(v, &m, conn_fd, &err);
	return r < 0 ? cli_fail(v->cmd.verb, &err) : r;
}

// As the agent has it.
static bool is_job_name(const char *name)
{
	size_t len = strspn(
		name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");

	return name[len] == '\0' && len >= 1 && len <= AGENT_JOB_NAME_MAX;
}

enum { OPT_JOB = 'J' };

// Returns 0 to go on, or the exit status plus one.
static int parse(struct exec_verb *v, int argc, char **argv)
{
	static const char *const login_shell[] = {"/bin/sh", "-l", NULL};
	static const struct option exec_options[] = {
		EXEC_LONG_OPTIONS,
		{"detach", no_argument, NULL, 'd'},
		{"job", required_argument, NULL, OPT_JOB},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	static const struct option shell_options[] = {
		EXEC_LONG_OPTIONS,
		{"session", required_argument, NULL, 's'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	const char *help = v->shell ? shell_help : exec_help;
	struct err err = {0};
	int opt, r;

	optind = 1;
	for (;;) {
		opt = getopt_long(argc, argv,
			v->shell ? "+" EXEC_SHORT_OPTIONS "hs:" : "+" EXEC_SHORT_OPTIONS "hd",
			v->shell ? shell_options : exec_options, NULL);
		// Options may stand before the name and behind it.
		if (opt == -1 && !v->name && optind < argc) {
			v->name = argv[optind++];
			continue;
		}
		if (opt == -1)
			break;
		r = exec_option(&v->cmd, opt, optarg, &err);
		if (r < 0)
			return 1 + cli_bad_option(v->cmd.verb, &err);
		if (r == 1)
			continue;
		switch (opt) {
		case 'd':
			v->detach = true;
			break;
		case 's':
		case OPT_JOB:
			if (!is_job_name(optarg)) {
				fprintf(stderr,
					"mayfly %s: '%s' is no name: up to %d letters, digits, "
					"'.', '_' and '-'\n",
					v->cmd.verb, optarg, AGENT_JOB_NAME_MAX);
				return 1 + EXIT_USAGE;
			}
			v->job = optarg;
			break;
		case 'h':
			fputs(help, stdout);
			return 1;
		default:
			fputs(help, stderr);
			return 1 + EXIT_USAGE;
		}
	}
	if (!v->name || (optind == argc && !v->shell)) {
		fputs(help, stderr);
		return 1 + EXIT_USAGE;
	}
	if (v->job && !v->shell && !v->detach) {
		fputs("mayfly exec: --job is for --detach\n", stderr);
		return 1 + EXIT_USAGE;
	}
	v->cmd.argv = optind < argc ? (const char *const *)argv + optind : login_shell;
	if (v->shell) {
		v->cmd.use_stdin = true;
		v->cmd.tty = v->job || isatty(STDIN_FILENO);
	}
	return 0;
}

static int exec_or_shell(int argc, char **argv, bool shell)
{
	struct exec_verb v = {.shell = shell};
	struct err err = {0};
	int r;

	if (exec_command_init(&v.cmd, shell ? "shell" : "exec", argc, &err) < 0)
		return cli_fail(shell ? "shell" : "exec", &err);
	r = parse(&v, argc, argv);
	r = r > 0 ? r - 1 : exec_in(&v);
	exec_command_fini(&v.cmd);
	return r;
}

int exec_main(int argc, char **argv)
{
	return exec_or_shell(argc, argv, false);
}

int shell_main(int argc, char **argv)
{
	return exec_or_shell(argc, argv, true);
}
