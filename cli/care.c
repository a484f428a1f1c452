// SPDX-License-Identifier: Apache-2.0
// mayfly restart, wait, rename, edit: what else there is in the life of a machine. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/life.h"
#include "cli/running.h"
#include "cli/secret.h"
#include "cli/store.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"

#define INI_MAX      65536U
#define POLL_MS      3600000U // that one poll() takes at most
#define LOOK_MS      1000U // how often to see whether a machine is idle
#define IDLE_PERCENT 5 // of a processor, in such a time

struct care {
	bool force;
	uint64_t timeout_ns, idle_ns; // 0: none was given
	uint64_t start_ns;
};

enum flag { FLAG_FORCE, FLAG_IDLE };

// The verbs that take names, --timeout and one option more. what: done to each.
static int each_name(const char *verb, int argc, char **argv, const char *help, enum flag flag,
	int (*what)(const char *name, const struct care *care, struct err *err))
{
	const struct option options[] = {
		{"timeout", required_argument, NULL, 'T'},
		{"help", no_argument, NULL, 'h'},
		{flag == FLAG_FORCE ? "force" : "idle",
			flag == FLAG_FORCE ? no_argument : required_argument, NULL,
			flag == FLAG_FORCE ? 'f' : 'I'},
		{0},
	};
	struct care care = {.start_ns = now_ns()};
	struct err err = {0};
	int opt, status = 0;

	optind = 1;
	while ((opt = getopt_long(argc, argv, flag == FLAG_FORCE ? "fh" : "h", options, NULL)) !=
		-1) {
		switch (opt) {
		case 'T':
			if (parse_duration(optarg, &care.timeout_ns, &err) < 0)
				return cli_bad_option(verb, &err);
			break;
		case 'I':
			if (parse_duration(optarg, &care.idle_ns, &err) < 0)
				return cli_bad_option(verb, &err);
			break;
		case 'f':
			care.force = true;
			break;
		default:
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (optind == argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	for (; optind < argc; optind++) {
		int r = what(argv[optind], &care, &err);

		if (r < 0)
			cli_fail(verb, &err);
		if (r < 0)
			status = r == -ETIMEDOUT ? EXIT_TIMEOUT : EXIT_FAILED;
	}
	return status;
}

// --- restart ---------------------------------------------------------------------------------

static int restart(const char *name, const struct care *care, struct err *err)
{
	char dir[PATH_MAX];
	int r = home_find(name, dir, err);

	if (r == 0)
		r = life_down(dir, care->force, err);
	return r < 0 ? r
		     : life_start(dir, care->timeout_ns ? care->timeout_ns : LIFE_BOOT_TIMEOUT_NS,
			       false, err);
}

int restart_main(int argc, char **argv)
{
	return each_name("restart", argc, argv,
		"Usage: mayfly restart [--force] [--timeout TIME] NAME...\n"
		"\n"
		"Ends machines, as mayfly down does, and starts them again, as mayfly up does; one "
		"that\n"
		"is not running is started. What vm.ini says now is in force then.\n"
		"\n"
		"  -f, --force           end them at once\n"
		"      --timeout TIME    for each to answer (default 3m)\n",
		FLAG_FORCE, restart);
}

// --- wait ------------------------------------------------------------------------------------

// Whether the process had more than a little of a processor in the last took_ns. *used_ns: what it
// has had in all.
static bool was_busy(pid_t pid, uint64_t took_ns, uint64_t *used_ns)
{
	const uint64_t before_ns = *used_ns;
	unsigned long long user = 0, system = 0;
	CLEANUP_FREE char *text = NULL;
	char path[32];
	const char *at;
	size_t len;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	if (fd_read_file(path, 4096, &text, &len, NULL) < 0 || !(at = strrchr(text, ')')) ||
		sscanf(at, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
			&system) != 2)
		return false; // it has just ended
	*used_ns = (user + system) * (1000000000ULL / (uint64_t)sysconf(_SC_CLK_TCK));
	return (*used_ns - before_ns) * 100 > took_ns * IDLE_PERCENT;
}

static int wait_end(const char *name, const struct care *care, struct err *err)
{
	struct pollfd ended = {.events = POLLIN};
	uint64_t looked_ns = now_ns(), busy_ns = looked_ns, used_ns = 0;
	CLEANUP_FD int pid_fd = -1;
	char dir[PATH_MAX];
	pid_t pid = 0;
	int r = home_find(name, dir, err);

	if (r < 0)
		return r;
	pid_fd = running_pidfd(dir, err);
	if (pid_fd < 0)
		return pid_fd == -ESRCH ? 0 : pid_fd;
	home_running(dir, &pid, NULL);
	ended.fd = pid_fd;
	for (;;) {
		const uint64_t now = now_ns(), passed = now - care->start_ns;
		uint64_t left_ms = care->idle_ns ? LOOK_MS : POLL_MS;

		if (care->idle_ns && was_busy(pid, now - looked_ns, &used_ns))
			busy_ns = now;
		looked_ns = now;
		if (care->idle_ns && now - busy_ns >= care->idle_ns)
			return 0;

		if (care->timeout_ns && passed >= care->timeout_ns)
			left_ms = 0;
		else if (care->timeout_ns)
			left_ms = MIN((care->timeout_ns - passed) / 1000000 + 1, left_ms);
		r = poll(&ended, 1, (int)left_ms);
		if (r > 0)
			return 0;
		if (r < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (left_ms == 0)
			return err_set(err, -ETIMEDOUT, "'%s' is still running", name);
	}
}

int wait_main(int argc, char **argv)
{
	return each_name("wait", argc, argv,
		"Usage: mayfly wait [--timeout TIME] [--idle TIME] NAME...\n"
		"\n"
		"Returns when none of the machines is running any more.\n"
		"\n"
		"      --timeout TIME    exit status 124 if some are after TIME\n"
		"      --idle TIME       not for one that has had less than 5 % of a processor for "
		"so\n"
		"                        long: mayfly wait --idle 30m dev && mayfly down dev\n",
		FLAG_IDLE, wait_end);
}

// --- rename ----------------------------------------------------------------------------------

struct named {
	const char *machine;
	bool found;
};

static int find_snapshot(void *opaque, const struct store_snapshot *snapshot)
{
	struct named *named = opaque;

	named->found |= !strcmp(snapshot->machine, named->machine);
	return 0;
}

// What others know by the machine's name.
static int check_unbound(const char *name, const char *dir, struct err *err)
{
	struct named named = {.machine = name};
	char path[PATH_MAX];
	int r = home_running(dir, NULL, err);

	if (r == 1)
		return err_set(err, -EBUSY, "'%s' is running (mayfly down %s)", name, name);
	if (r == 0)
		r = store_each(find_snapshot, NULL, &named, err);
	if (r == 0 && named.found)
		return err_set(err, -EBUSY,
			"'%s' has snapshots, which are of that name (mayfly fork makes machines of "
			"other names from them)",
			name);
	if (r == 0)
		r = home_format(path, err, "%s/work", dir);
	if (r == 0 && access(path, F_OK) == 0)
		return err_set(err, -EBUSY, "'%s' is the machine of a folder (mayfly work)", name);
	return r;
}

static int rename_machine(const char *name, const char *new_name, struct err *err)
{
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX], new_dir[PATH_MAX];
	int r = home_check_name(new_name, err);

	if (r == 0)
		r = home_find(name, dir, err);
	if (r < 0)
		return r;
	if (home_find(new_name, new_dir, err) != -ENOENT)
		return err_set(err, -EEXIST, "there is a machine '%s' already", new_name);
	lock_fd = life_lock(dir, err);
	if (lock_fd < 0)
		return lock_fd;
	r = check_unbound(name, dir, err);
	if (r == 0)
		r = secrets_rename(name, new_name, err);
	if (r < 0)
		return r;
	if (renameat2(AT_FDCWD, dir, AT_FDCWD, new_dir, RENAME_NOREPLACE) == 0)
		return 0;
	r = err_errno(err, -errno, "%s", new_dir);
	(void)secrets_rename(new_name, name, NULL);
	return r;
}

int rename_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly rename NAME NEW-NAME\n"
		"\n"
		"Gives a machine that is not running another name. Its disks, vm.ini and secrets\n"
		"stay its own; a MAC address that vm.ini does not set changes with the name.\n";
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	struct err err = {0};
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (argc - optind != 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	if (rename_machine(argv[optind], argv[optind + 1], &err) < 0)
		return cli_bad_option("rename", &err);
	return 0;
}

// --- edit ------------------------------------------------------------------------------------

// Runs the editor on path as a shell would, since people put options into EDITOR.
static int run_editor(const char *path, struct err *err)
{
	const char *editor = getenv("VISUAL");
	int status;
	pid_t pid;

	if (!editor || !editor[0])
		editor = getenv("EDITOR");
	if (!editor || !editor[0])
		editor = "vi";
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return err_errno(err, -errno, "fork");
	if (pid == 0) {
		if (setenv("MAYFLY_EDIT", path, 1) == 0 && setenv("MAYFLY_EDITOR", editor, 1) == 0)
			execl("/bin/sh", "sh", "-c", "eval \"$MAYFLY_EDITOR\" '\"$MAYFLY_EDIT\"'",
				(char *)NULL);
		_exit(127);
	}
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return err_errno(err, -errno, "waitpid");
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		return err_set(
			err, -ECHILD, "the editor '%.60s' failed: nothing was changed", editor);
	return 0;
}

static int write_copy(const char *path, const char *text, size_t len, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	int r = fd < 0 ? -errno : fd_write_all(fd, text, len);

	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

// copy holds what vm.ini, whose text was before, is to be from now on.
static int take_edited(const char *dir, const char *ini, const char *copy, const char *before,
	size_t before_len, struct err *err)
{
	CLEANUP_FREE char *now = NULL;
	CLEANUP_FD int lock_fd = -1;
	struct config config;
	size_t len;
	int r = config_read(copy, &config, err);

	if (r < 0)
		return r;
	lock_fd = life_lock(dir, err);
	if (lock_fd < 0)
		return lock_fd;
	r = fd_read_file(ini, INI_MAX, &now, &len, err);
	if (r < 0)
		return r;
	ASSERT(now);
	if (len != before_len || memcmp(now, before, len) != 0)
		return err_set(err, -EBUSY, "%s was changed by another meanwhile", ini);
	return rename(copy, ini) < 0 ? err_errno(err, -errno, "%s", ini) : 0;
}

static int edit(const char *name, struct err *err)
{
	CLEANUP_FREE char *before = NULL;
	char dir[PATH_MAX], ini[PATH_MAX], copy[PATH_MAX], says[sizeof(err->msg)];
	size_t len = 0;
	int r = home_find(name, dir, err);

	if (r == 0)
		r = home_format(ini, err, "%s/vm.ini", dir);
	if (r == 0)
		r = home_format(copy, err, "%s/vm.ini.edited-%d", dir, (int)getpid());
	if (r == 0)
		r = fd_read_file(ini, INI_MAX, &before, &len, err);
	if (r == 0)
		r = write_copy(copy, before, len, err);
	if (r < 0)
		return r;
	ASSERT(before);
	r = run_editor(copy, err);
	if (r < 0) {
		unlink(copy);
		return r;
	}
	r = take_edited(dir, ini, copy, before, len, err);
	if (r < 0) { // what was typed is not lost
		snprintf(says, sizeof(says), "%s", err->msg);
		return err_set(err, -EBADMSG, "%s: nothing was changed; what you wrote is in %s",
			says, copy);
	}
	if (home_running(dir, NULL, NULL) == 1)
		fprintf(stderr, "mayfly edit: in force from its next start (mayfly restart %s)\n",
			name);
	return 0;
}

int edit_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly edit NAME\n"
		"\n"
		"Opens a machine's vm.ini in $VISUAL, $EDITOR or vi, and puts it in force if it\n"
		"makes sense: else the line that does not is named and nothing changes. A machine\n"
		"that is running has it from its next start.\n";
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	struct err err = {0};
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (argc - optind != 1) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	return edit(argv[optind], &err) < 0 ? cli_fail("edit", &err) : 0;
}
