// SPDX-License-Identifier: Apache-2.0
// mayfly work: from a folder to a command in a machine that has it. One thread, and one more that
// sends.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_files.h"
#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/golden.h"
#include "cli/history.h"
#include "cli/keep.h"
#include "cli/launch.h"
#include "cli/layers.h"
#include "cli/life.h"
#include "cli/machine_options.h"
#include "cli/work_ini.h"
#include "cli/work_log.h"
#include "cli/work_persist.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"

#define WARM_BASE "work-base" // in the snapshot of a set-up: the tree that it was done in

static const char help[] =
	"Usage: mayfly work [OPTION]... [-- COMMAND [ARG]...]\n"
	"\n"
	"Runs COMMAND, or a shell, in a machine of its own that has this folder at\n"
	"/work/NAME-OF-THE-FOLDER. The machine is made if there is none for this folder, and goes\n"
	"on afterwards. What it changes stays in it: mayfly diff shows it, mayfly keep brings it\n"
	"out as one, mayfly discard removes the machine with it.\n"
	"\n"
	".mayflyignore, in the syntax of .gitignore, says what does not travel. .mayfly.ini says\n"
	"what the machine is:\n"
	"\n"
	"  [work]\n"
	"  image = NAME            memory, cpus, net: as the options\n"
	"  setup = LINE            of sh, in the folder, before anything else; may be repeated\n"
	"  cache = FILE            that the set-up depends on; may be repeated. As long as it and\n"
	"                          the set-up are the same, further machines begin after it\n"
	"  persist = PATH...       in the machine, like ~/.cache/pip: kept on this host when it "
	"is\n"
	"                          discarded, and given to the next machine of this folder\n"
	"  env = NAME=VALUE        may be repeated\n"
	"\n"
	"      --name NAME         of the machine (default: after the folder): for several of one\n"
	"                          folder\n"
	"      --keep-on-success   afterwards keep its changes if COMMAND has succeeded, and "
	"remove\n"
	"                          the machine in any case but a conflict\n"
	"      --max SIZE          what these may take of this host's disk (default 2G)\n"
	"      --mcp               run nothing: say how an agent's program reaches the machine\n"
	"\n" MACHINE_OPTIONS_HELP "\n" EXEC_OPTIONS_HELP "\n" EXEC_STATUS_HELP;

struct work_verb {
	struct config config;
	struct exec_command cmd;
	struct work_ini ini;
	bool configured, keep_on_success, mcp;
	char name[HOME_NAME_MAX + 1];
	uint64_t max_bytes;
	struct work_machine w;
	struct golden plain, warm; // a boot, and a boot with the set-up
	struct launch launch; // for its signals
};

// --- Options ---------------------------------------------------------------------------------

enum { OPT_NAME = 'N', OPT_KEEP = 'K', OPT_MCP = 'P', OPT_MAX = 'M' };

static int take_option(struct work_verb *v, int opt, struct err *err)
{
	int r = machine_option(&v->config, opt, optarg, err);

	if (r == 1)
		v->configured = true;
	if (r == 0)
		r = exec_option(&v->cmd, opt, optarg, err);
	if (r != 0)
		return r;
	switch (opt) {
	case OPT_NAME:
		snprintf(v->name, sizeof(v->name), "%s", optarg);
		return home_check_name(optarg, err);
	case OPT_KEEP:
		v->keep_on_success = true;
		return 0;
	case OPT_MAX:
		return parse_size(optarg, &v->max_bytes, err);
	case OPT_MCP:
		v->mcp = true;
		return 0;
	default:
		return -EINVAL;
	}
}

// Returns 0 to go on, or the exit status plus one.
static int parse(struct work_verb *v, int argc, char **argv)
{
	static const char *const shell[] = {"/bin/sh", "-l", NULL};
	static const struct option options[] = {
		MACHINE_LONG_OPTIONS,
		EXEC_LONG_OPTIONS,
		{"name", required_argument, NULL, OPT_NAME},
		{"keep-on-success", no_argument, NULL, OPT_KEEP},
		{"max", required_argument, NULL, OPT_MAX},
		{"mcp", no_argument, NULL, OPT_MCP},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "+" MACHINE_SHORT_OPTIONS EXEC_SHORT_OPTIONS "h",
			options, NULL)) != -1) {
		if (opt == 'h') {
			fputs(help, stdout);
			return 1;
		}
		if (opt == '?') {
			fputs("mayfly work --help lists the options\n", stderr);
			return 1 + EXIT_USAGE;
		}
		if (take_option(v, opt, &err) < 0)
			return 1 + cli_bad_option("work", &err);
	}
	v->cmd.argv = optind < argc ? (const char *const *)argv + optind : shell;
	if (isatty(STDIN_FILENO) && isatty(STDOUT_FILENO))
		v->cmd.tty = v->cmd.use_stdin = true;
	else if (optind == argc)
		v->cmd.use_stdin = true;
	return 0;
}

// --- A new machine ---------------------------------------------------------------------------

// The lock is held: nobody else starts it.
static int start_from(struct work_verb *v, const char *dir, struct golden *from, struct err *err)
{
	struct life_start start = {.dir = dir, .timeout_ns = LIFE_BOOT_TIMEOUT_NS};
	int r;

	if (from) {
		start.snapshot = from->dir;
		start.hostname = v->name;
	}
	r = life_up(&start, err);
	if (r < 0 && from && r != -EINTR) {
		fprintf(stderr, "mayfly work: no warm start: %s; booting\n", err->msg);
		golden_failed(from, r);
		return 1;
	}
	return r;
}

// Returns 1 if it has gone on from a set-up that was done before, else 0.
static int start_new(struct work_verb *v, struct err *err)
{
	CLEANUP_BUF struct buf key = {0};
	CLEANUP_FD int lock_fd = life_lock(v->w.m.dir, err);
	int plain, warm = 0, r = MIN(lock_fd, 0);

	if (r == 0 && v->ini.setup.len)
		r = work_ini_key(&v->ini, v->w.target_fd, v->w.target, v->w.inside, &key, err);
	if (r == 0 && v->ini.setup.len)
		r = warm = golden_find(&v->warm, &v->config, (const char *)key.data, err);
	if (r >= 0)
		r = plain = golden_find(&v->plain, &v->config, NULL, err);
	if (r < 0)
		return r;
	if (warm == 1) {
		r = start_from(v, v->w.m.dir, &v->warm, err);
		if (r <= 0)
			return r < 0 ? r : 1;
	}
	if (plain == 1) {
		r = start_from(v, v->w.m.dir, &v->plain, err);
		if (r <= 0)
			return r;
	}
	r = start_from(v, v->w.m.dir, NULL, err);
	if (r < 0)
		return r;
	// For the next one, unless it can begin later.
	if (snprintf(v->w.m.run_dir, PATH_MAX, "%s/run", v->w.m.dir) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", v->w.m.dir);
	if (!v->ini.setup.len && golden_make(&v->plain, v->w.m.dir, v->w.m.run_dir, -1, err) < 0)
		cli_fail("work", err);
	return 0;
}

static int set_up(struct work_verb *v, struct err *err)
{
	const char *const argv[] = {"/bin/sh", "-ec", (const char *)v->ini.setup.data, NULL};
	struct exec_command cmd;
	CLEANUP_FD int conn_fd = -1;
	int r = exec_command_init(&cmd, "work", WORK_INI_MAX, err);

	if (r < 0)
		return r;
	for (unsigned int i = 0; i < v->ini.nr_env; i++)
		cmd.env[cmd.nr_env++] = v->ini.env[i];
	cmd.argv = argv;
	cmd.cwd = v->w.inside;
	cmd.stdout_to_stderr = true;
	r = exec_command_image(&cmd, &v->config, err);
	if (r == 0)
		r = conn_fd = running_connect(&v->w.m, err);
	if (r >= 0)
		r = exec_command_run(&cmd, conn_fd, v->launch.signal_fd, -1, err);
	exec_command_fini(&cmd);
	if (r > 0)
		return err_set(
			err, -EIO, "the set-up of " WORK_INI_NAME " ended with status %d", r);
	return r;
}

// What is in the machine now is what further ones begin with.
static void keep_warm(struct work_verb *v)
{
	struct err err = {0};
	int r = golden_make(&v->warm, v->w.m.dir, v->w.m.run_dir, -1, &err);

	if (r == 0 && v->warm.making[0])
		r = work_manifest_write(&v->w.base, v->warm.making_fd, WARM_BASE, &err);
	if (r < 0) {
		cli_fail("work", &err);
		golden_fini(&v->warm);
	}
}

static int fill_new(struct work_verb *v, bool warm, struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest known = {0};
	CLEANUP_FD int golden_fd = -1;
	int r = 0;

	if (warm) {
		golden_fd = open(v->warm.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		r = golden_fd < 0 ? err_errno(err, -errno, "%s", v->warm.dir)
				  : work_manifest_read(golden_fd, WARM_BASE, &known, err);
	}
	if (r == 0)
		r = work_send(&v->w, warm ? &known : NULL, err);
	if (r == 0 && !warm && v->ini.setup.len) {
		r = set_up(v, err);
		if (r == 0)
			keep_warm(v);
	}
	if (r == 0)
		r = work_persist_in(&v->w, v->ini.persist, v->ini.nr_persist, err);
	return r == 0 ? work_settle_in(&v->w, err) : r;
}

static int make_machine(struct work_verb *v, struct err *err)
{
	int r = life_create(v->name, &v->config, v->w.m.dir, err);

	if (r < 0)
		return r;
	r = work_machine_new(&v->w, err);
	if (r == 0)
		r = work_log_start(&v->w, err);
	if (r == 0)
		r = start_new(v, err);
	if (r >= 0) {
		bool warm = r == 1;

		r = running_find(v->name, &v->w.m, err);
		if (r == 0)
			r = fill_new(v, warm, err);
	}
	// Nobody has worked in it.
	if (r < 0)
		(void)life_remove(v->name, true, NULL);
	return r;
}

// --- One that is there -----------------------------------------------------------------------

static int find_machine(struct work_verb *v, const char *dir, struct err *err)
{
	char target[PATH_MAX];
	int r = work_target_of(dir, target, err);

	if (r < 0)
		return err_wrap(err, r, "%s", v->name);
	if (strcmp(target, v->w.target) != 0)
		return err_set(
			err, -EEXIST, "'%s' works on %s: choose another --name", v->name, target);
	if (v->configured)
		return err_set(err, -EINVAL,
			"'%s' exists: its options are in %s/vm.ini and not on this command line "
			"(--name makes another one)",
			v->name, dir);
	if (v->keep_on_success)
		return err_set(err, -EEXIST,
			"'%s' has work of before in it: keep or discard that first, or choose "
			"another --name",
			v->name);
	r = life_start(dir, LIFE_BOOT_TIMEOUT_NS, false, err);
	if (r < 0)
		return r;
	work_machine_fini(&v->w);
	r = work_machine_open(&v->w, v->name, err);
	v->w.signal_fd = v->launch.signal_fd;
	v->w.progress = isatty(STDERR_FILENO);
	return r;
}

// --- All of it -------------------------------------------------------------------------------

static int begin(struct work_verb *v, struct err *err)
{
	const char *base, *home;
	struct stat st, home_st;
	char dir[PATH_MAX];
	int r;

	v->w.target_fd = open(v->w.target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (v->w.target_fd < 0)
		return err_errno(err, -errno, "%s", v->w.target);
	base = strrchr(v->w.target, '/') + 1;
	if (!*base)
		return err_set(err, -EINVAL, "the root of this host is no project: change to one");
	// All that is in it would be the machine's to read.
	home = getenv("HOME");
	if (home && stat(home, &home_st) == 0 && fstat(v->w.target_fd, &st) == 0 &&
		home_st.st_dev == st.st_dev && home_st.st_ino == st.st_ino)
		return err_set(err, -EINVAL,
			"this is your home folder, with all that is private in it: change to a "
			"project's");
	if (snprintf(v->w.inside, sizeof(v->w.inside), "/work/%s", base) >=
		(int)sizeof(v->w.inside))
		return err_errno(err, -ENAMETOOLONG, "%s", base);
	if (!v->name[0])
		work_name_for(v->w.target, v->name);
	snprintf(v->w.name, sizeof(v->w.name), "%s", v->name);
	r = work_recover(v->w.target_fd, err);
	if (r == WORK_TAKEN_BACK)
		fprintf(stderr, "mayfly work: what a killed mayfly keep had begun is taken back\n");
	if (r >= 0)
		r = launch_take_signals(&v->launch, err);
	if (r < 0)
		return r;
	r = home_find(v->name, dir, err);
	v->w.signal_fd = v->launch.signal_fd;
	v->w.progress = isatty(STDERR_FILENO);
	return r == -ENOENT ? make_machine(v, err) : r < 0 ? r : find_machine(v, dir, err);
}

static int say_mcp(const struct work_verb *v)
{
	printf("The machine %s has this folder at %s.\n\n"
	       "  mayfly access %s exec            let an agent do everything in it\n"
	       "  mayfly mcp install claude-code %s  or codex, cursor, vscode, gemini-cli\n"
	       "  mayfly mcp %s                    what another program runs: MCP on stdin and "
	       "stdout\n\n"
	       "Afterwards: mayfly diff %s, mayfly keep %s, mayfly discard %s.\n",
		v->name, v->w.inside, v->name, v->name, v->name, v->name, v->name, v->name);
	return 0;
}

static int run_command(struct work_verb *v, struct err *err)
{
	CLEANUP_FD int conn_fd = -1;
	struct config config;
	struct work_log log;
	char ini[PATH_MAX];
	int r = 0;

	if (!v->cmd.cwd)
		v->cmd.cwd = v->w.inside;
	if (snprintf(ini, sizeof(ini), "%s/vm.ini", v->w.m.dir) < (int)sizeof(ini) &&
		config_read(ini, &config, NULL) == 0)
		r = exec_command_image(&v->cmd, &config, err);
	if (r == 0)
		r = conn_fd = running_connect_by(&v->w.m, v->cmd.deadline_ns, err);
	if (r == -ETIMEDOUT && v->cmd.timeout_text)
		return exec_timed_out(&v->cmd, "");
	if (r >= 0)
		r = work_log_call(&log, v->w.m.dir, "work", v->cmd.argv, err);
	if (r < 0)
		return r;
	r = exec_command_run(&v->cmd, conn_fd, v->launch.signal_fd, -1, err);
	if (r < 0)
		running_explain(&v->w.m, r, err);
	work_log_result(&log, r, err, r, NULL);
	if (!v->keep_on_success)
		history_later(v->name, v->w.state_fd);
	return r;
}

static int end_with(struct work_verb *v, int status, struct err *err)
{
	const struct keep keep = {.verb = "work", .max_bytes = v->max_bytes};
	int r = 0;

	if (status == 0)
		r = keep_changes(&v->w, &keep, err);
	if (r == 0)
		r = work_persist_out(v->name, v->launch.signal_fd, err);
	if (r == 0)
		r = life_remove(v->name, true, err);
	else if (r > 0)
		fprintf(stderr, "mayfly work: %s is still there, with its work\n", v->name);
	return r == 0 ? status : r;
}

static int work(struct work_verb *v, struct err *err)
{
	int status, r = begin(v, err);

	if (r < 0)
		return r;
	if (v->mcp)
		return say_mcp(v);
	status = run_command(v, err);
	if (v->keep_on_success && status >= 0)
		return end_with(v, status, err);
	if (status >= 0 && isatty(STDERR_FILENO))
		fprintf(stderr,
			"mayfly: what has changed is in %s: mayfly diff, keep or discard it\n",
			v->name);
	return status;
}

int work_main(int argc, char **argv)
{
	struct work_verb v = {.max_bytes = KEEP_MAX_BYTES,
		.w = WORK_MACHINE_NONE,
		.plain = {.making_fd = -1},
		.warm = {.making_fd = -1},
		.launch = LAUNCH_INIT};
	struct err err = {0}, bad_ini = {0};
	int r, ini = 0;

	if (exec_command_init(&v.cmd, "work", argc + WORK_INI_MAX, &err) < 0)
		return cli_fail("work", &err);
	config_defaults(&v.config);
	if (!getcwd(v.w.target, sizeof(v.w.target)))
		ini = err_errno(&bad_ini, -errno, "this folder");
	else
		ini = work_ini_read(v.w.target, &v.ini, &v.config, &bad_ini);
	for (unsigned int i = 0; i < v.ini.nr_env; i++)
		v.cmd.env[v.cmd.nr_env++] = v.ini.env[i];
	// A text for sh.
	buf_append(&v.ini.setup, "", 1);
	v.ini.setup.len--;
	r = parse(&v, argc, argv);
	if (r == 0 && ini < 0)
		r = 1 + cli_bad_option("work", &bad_ini);
	if (r > 0) {
		r--;
	} else {
		r = work(&v, &err);
		if (r < 0)
			r = cli_fail("work", &err);
		if (golden_keep(&v.plain, &err) < 0 || golden_keep(&v.warm, &err) < 0)
			cli_fail("work", &err);
	}
	golden_fini(&v.plain);
	golden_fini(&v.warm);
	work_machine_fini(&v.w);
	work_ini_fini(&v.ini);
	exec_command_fini(&v.cmd);
	launch_end(&v.launch);
	return r;
}
