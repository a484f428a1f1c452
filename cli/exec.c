// SPDX-License-Identifier: Apache-2.0
// mayfly exec and mayfly shell: a command in a machine that runs. One thread.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/home.h"
#include "cli/launch.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"

static const char exec_help[] =
	"Usage: mayfly exec [OPTION]... NAME -- COMMAND [ARG]...\n"
	"\n"
	"Runs COMMAND in a machine that is up.\n"
	"\n" EXEC_OPTIONS_HELP
	"      --timeout TIME    end the command after TIME, like 30s or 5m\n"
	"\n" EXEC_STATUS_HELP;

static const char shell_help[] =
	"Usage: mayfly shell [OPTION]... NAME [COMMAND [ARG]...]\n"
	"\n"
	"An interactive shell, or COMMAND, on a terminal of a machine that is up.\n"
	"\n" EXEC_OPTIONS_HELP "\n" EXEC_STATUS_HELP;

// Runs cmd in the machine called name. Returns the exit status.
static int exec_in(const char *name, struct exec_command *cmd)
{
	struct launch launch = LAUNCH_INIT;
	CLEANUP_FD int conn_fd = -1;
	char dir[PATH_MAX], run_dir[PATH_MAX];
	struct err err = {0};
	int r = home_find(name, dir, &err);

	if (r == 0)
		r = home_running(dir, NULL, &err);
	if (r == 0)
		r = err_set(&err, -ESRCH, "'%s' is not running (mayfly up %s)", name, name);
	if (r > 0 && snprintf(run_dir, sizeof(run_dir), "%s/run", dir) >= (int)sizeof(run_dir))
		r = err_errno(&err, -ENAMETOOLONG, "%s", dir);
	// Until the agent has answered a signal just ends us: nothing is to be taken down.
	if (r > 0)
		r = conn_fd = agent_connect(
			run_dir, LAUNCH_VSOCK, AGENT_PORT, -1, cmd->deadline_ns, &err);
	if (conn_fd == -ETIMEDOUT && cmd->timeout_text)
		return exec_timed_out(cmd, "");
	if (r >= 0)
		r = launch_take_signals(&launch, &err);
	if (r >= 0) {
		r = exec_command_run(cmd, conn_fd, launch.signal_fd, -1, &err);
		// A machine that ended meanwhile is the reason, whatever the connection says.
		if (r < 0 && home_running(dir, NULL, NULL) == 0)
			err_set(&err, r, "the machine '%s' has ended", name);
	}
	launch_end(&launch);
	return r < 0 ? cli_fail(cmd->verb, &err) : r;
}

static int exec_or_shell(int argc, char **argv, bool shell)
{
	static const struct option options[] = {
		EXEC_LONG_OPTIONS,
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	static const char *const login_shell[] = {"/bin/sh", "-l", NULL};
	const char *verb = shell ? "shell" : "exec", *help = shell ? shell_help : exec_help;
	struct exec_command cmd;
	struct err err = {0};
	const char *name;
	int opt, r;

	if (exec_command_init(&cmd, verb, argc, &err) < 0)
		return cli_fail(verb, &err);
	optind = 1;
	while ((opt = getopt_long(argc, argv, "+" EXEC_SHORT_OPTIONS "h", options, NULL)) != -1) {
		r = exec_option(&cmd, opt, optarg, &err);
		if (r == 1)
			continue;
		if (r < 0)
			r = cli_bad_option(verb, &err);
		else if (fputs(help, opt == 'h' ? stdout : stderr) < 0 || opt != 'h')
			r = EXIT_USAGE;
		exec_command_fini(&cmd);
		return r;
	}
	name = optind < argc ? argv[optind++] : NULL;
	// `--` may stand before the command as well as before the name.
	if (optind < argc && argv[optind][0] == '-' && argv[optind][1] == '-' && !argv[optind][2])
		optind++;
	if (!name || (optind == argc && !shell)) {
		fputs(help, stderr);
		exec_command_fini(&cmd);
		return EXIT_USAGE;
	}
	cmd.argv = optind < argc ? (const char *const *)argv + optind : login_shell;
	if (shell) {
		cmd.use_stdin = true;
		cmd.tty = isatty(STDIN_FILENO);
	}
	r = exec_in(name, &cmd);
	exec_command_fini(&cmd);
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
