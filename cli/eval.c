// SPDX-License-Identifier: Apache-2.0
// mayfly eval: many tasks, each in a process and a machine of its own. One thread.
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
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/eval_run.h"
#include "cli/home.h"
#include "cli/patience.h"
#include "vmm/base/fd.h"
#include "vmm/base/lock.h"
#include "vmm/base/parse.h"

#define RESULTS        EVAL_RESULTS
#define LOCK           ".lock" // no task is called so
#define JOBS_MAX       1024
#define RESULT_MAX     (1U << 20) // of one task
#define RESULTS_MAX    (1U << 30)
#define PROGRESS_MS    1000
#define EXIT_SOME_FAIL 1
#define EXIT_INTERRUPT 130

static const char help[] =
	"Usage: mayfly eval run [OPTION]... TASKS.jsonl\n"
	"\n"
	"Runs tasks, a JSON object a line (docs/pools-and-evals.md), each in a machine of its "
	"own:\n"
	"files go in, set-up and commands run, every process is killed, the verifier's files go\n"
	"in and it runs. Nothing starts before all lines are understood.\n"
	"\n"
	"      --jobs N          how many at a time (default: the processors of this host)\n"
	"      --out DIR         where results.jsonl, and a folder for each task with its logs "
	"and\n"
	"                        files, go (default: TASKS.jsonl without its ending, -out)\n"
	"      --resume          go on in a DIR that is there: tasks that passed or failed are\n"
	"                        done, those that had an error run again\n"
	"      --json            the summary as JSON\n"
	"\n"
	"Exit status: 0 if all passed, 1 if not, 130 after Ctrl-C (--resume goes on), 125 if\n"
	"mayfly itself failed, 2 for wrong usage or tasks.\n";

enum state { WAITING, RUNNING, PASSED, FAILED, ERROR };

struct progress {
	enum state state;
	pid_t pid; // while it runs
};

struct eval {
	struct eval_tasks tasks;
	struct progress *at; // of each task
	uint64_t jobs;
	const char *out;
	char default_out[PATH_MAX];
	bool resume, json, progress;
	int out_fd, lock_fd, results_fd, signal_fd;
	size_t count[ERROR + 1];
	bool stopping;
	uint64_t start_ns;
};

static void set_state(struct eval *e, size_t i, enum state state)
{
	e->count[e->at[i].state]--;
	e->at[i].state = state;
	e->count[state]++;
}

// --- Results ---------------------------------------------------------------------------------

static enum state state_of(const json_t *result)
{
	const char *status = json_string_value(json_object_get(result, "status"));

	if (!status)
		return ERROR;
	return !strcmp(status, "passed") ? PASSED : !strcmp(status, "failed") ? FAILED : ERROR;
}

// Whoever was killed while writing has left at most a part of a line, at the end.
static int cut_last_line(int fd)
{
	off_t len = lseek(fd, 0, SEEK_END), end = len;
	char last;

	for (; end > 0; end--) {
		if (pread(fd, &last, 1, end - 1) != 1)
			return -EIO;
		if (last == '\n')
			break;
	}
	return end < len && ftruncate(fd, end) < 0 ? -errno : 0;
}

// What has been done before.
static int read_results(struct eval *e, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	json_t *ids = json_object();
	char path[PATH_MAX], *rest, *line;
	size_t len;
	int r;

	if (snprintf(path, sizeof(path), "%s/" RESULTS, e->out) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", e->out);
	r = fd_read_file(path, RESULTS_MAX, &text, &len, err);
	for (size_t i = 0; r == 0 && i < e->tasks.nr; i++)
		json_object_set_new(ids, e->tasks.tasks[i].id, json_integer((json_int_t)i));
	rest = text;
	while (r == 0 && (line = strsep(&rest, "\n"))) {
		json_t *result = json_loads(line, 0, NULL);
		const char *id = json_string_value(json_object_get(result, "id"));
		json_t *i = id ? json_object_get(ids, id) : NULL;
		enum state state = state_of(result);

		if (i)
			set_state(
				e, (size_t)json_integer_value(i), state == ERROR ? WAITING : state);
		json_decref(result);
	}
	json_decref(ids);
	return r;
}

static int append(struct eval *e, json_t *result, struct err *err)
{
	CLEANUP_FREE char *line = json_dumps(result, JSON_COMPACT | JSON_REAL_PRECISION(6));
	CLEANUP_FREE char *text = NULL;
	int len = line ? asprintf(&text, "%s\n", line) : -1;
	int r = len < 0 ? -ENOMEM : fd_write_all(e->results_fd, text, (size_t)len);

	if (r == 0 && fdatasync(e->results_fd) < 0)
		r = -errno;
	return r < 0 ? err_errno(err, r, "%s/" RESULTS, e->out) : 0;
}

// --- The folder ------------------------------------------------------------------------------

static int open_out(struct eval *e, struct err *err)
{
	bool made = mkdir(e->out, 0777) == 0;

	if (!made && (errno != EEXIST || !e->resume))
		return errno == EEXIST ? err_set(err, -EEXIST,
						 "%s is there already: --resume goes on in it, "
						 "--out names another",
						 e->out)
				       : err_errno(err, -errno, "%s", e->out);
	e->out_fd = open(e->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (e->out_fd < 0)
		return err_errno(err, -errno, "%s", e->out);
	// Folders of tasks are removed in it.
	if (!made && faccessat(e->out_fd, RESULTS, F_OK, 0) < 0)
		return err_set(err, -EEXIST,
			"%s is there, but not of an evaluation: it has no " RESULTS, e->out);
	e->lock_fd = lock_take(e->out_fd, LOCK, err);
	if (e->lock_fd == -EBUSY)
		return err_set(err, -EBUSY, "%s: another mayfly eval works in it", e->out);
	if (e->lock_fd < 0)
		return e->lock_fd;
	e->results_fd = openat(
		e->out_fd, RESULTS, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
	if (e->results_fd < 0 || cut_last_line(e->results_fd) < 0)
		return err_errno(err, -errno, "%s/" RESULTS, e->out);
	return e->resume ? read_results(e, err) : 0;
}

static int task_dir(const struct eval *e, size_t i, char ret[PATH_MAX], struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/%s", e->out, e->tasks.tasks[i].id) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", e->out);
	return 0;
}

// --- Tasks -----------------------------------------------------------------------------------

// In the child.
static int run_task(const struct eval *e, size_t i, const char *dir, pid_t parent)
{
	int log = openat(e->out_fd, e->tasks.tasks[i].id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);

	if (log >= 0)
		log = openat(log, "mayfly.log", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (log < 0 || null < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0)
		return EXIT_FAILED;
	// A Ctrl-C is for the one who tells us; and if that one dies we go, with the machine.
	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent)
		return EXIT_FAILED;
	return eval_run(&e->tasks.tasks[i], e->tasks.folder, dir);
}

static int start_task(struct eval *e, size_t i, struct err *err)
{
	char dir[PATH_MAX];
	pid_t parent = getpid(), pid;
	int r = task_dir(e, i, dir, err);

	// What is left of one that was interrupted.
	if (r == 0)
		r = home_remove(dir, err);
	if (r < 0)
		return r;
	if (mkdir(dir, 0777) < 0)
		return err_errno(err, -errno, "%s", dir);
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return err_errno(err, -errno, "fork");
	if (pid == 0)
		_exit(run_task(e, i, dir, parent));
	e->at[i].pid = pid;
	set_state(e, i, RUNNING);
	return 0;
}

// Its result, or that there is none.
static json_t *result_of(struct eval *e, size_t i, int status)
{
	char path[PATH_MAX];
	CLEANUP_FREE char *text = NULL;
	struct err err = {0};
	json_t *result = NULL;
	size_t len;

	if (snprintf(path, sizeof(path), "%s/%s/" EVAL_RESULT_FILE, e->out, e->tasks.tasks[i].id) <
			(int)sizeof(path) &&
		fd_read_file(path, RESULT_MAX, &text, &len, &err) == 0)
		result = json_loads(text, 0, NULL);
	if (json_is_object(result))
		return result;
	json_decref(result);
	return json_pack("{s:s, s:s, s:o}", "id", e->tasks.tasks[i].id, "status", "error", "error",
		json_sprintf("its process ended with status %d and no result (mayfly.log)",
			WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status)));
}

static int end_task(struct eval *e, size_t i, int status, struct err *err)
{
	json_t *result;
	enum state state;
	int r;

	e->at[i].pid = 0;
	// It was interrupted: as if it had never been begun.
	if (WIFEXITED(status) && WEXITSTATUS(status) == 1) {
		set_state(e, i, WAITING);
		return 0;
	}
	result = result_of(e, i, status);
	state = state_of(result);
	set_state(e, i, state);
	if (state != PASSED && e->progress)
		fprintf(stderr, "\r\033[K");
	if (state != PASSED)
		fprintf(stderr, "%s: %s%s\n", e->tasks.tasks[i].id,
			state == FAILED ? "failed" : "error: ",
			state == FAILED ? "" : json_string_value(json_object_get(result, "error")));
	r = append(e, result, err);
	json_decref(result);
	return r;
}

static int reap(struct eval *e, struct err *err)
{
	int status, r = 0;
	pid_t pid;

	while (r == 0 && (pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (size_t i = 0; i < e->tasks.nr; i++)
			if (e->at[i].pid == pid) {
				r = end_task(e, i, status, err);
				break;
			}
	return r;
}

static void signal_all(const struct eval *e, int sig)
{
	for (size_t i = 0; i < e->tasks.nr; i++)
		if (e->at[i].pid)
			kill(e->at[i].pid, sig);
}

static void show_progress(const struct eval *e)
{
	if (e->progress)
		fprintf(stderr,
			"\r\033[K%zu of %zu: %zu passed, %zu failed, %zu errors, %zu running, %.0f "
			"s",
			e->count[PASSED] + e->count[FAILED] + e->count[ERROR], e->tasks.nr,
			e->count[PASSED], e->count[FAILED], e->count[ERROR], e->count[RUNNING],
			(double)(now_ns() - e->start_ns) / 1e9);
}

static void on_signals(struct eval *e)
{
	struct signalfd_siginfo info;

	while (read(e->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGCHLD)
			continue;
		if (e->progress)
			fprintf(stderr, "\r\033[K");
		fprintf(stderr, e->stopping
					? "mayfly eval: killing\n"
					: "mayfly eval: ending the machines; once more kills\n");
		signal_all(e, e->stopping ? SIGKILL : SIGTERM);
		e->stopping = true;
	}
}

static int run_all(struct eval *e, struct err *err)
{
	size_t next = 0;
	int r = 0;

	for (;;) {
		struct pollfd signals = {.fd = e->signal_fd, .events = POLLIN};

		while (r == 0 && !e->stopping && e->count[RUNNING] < e->jobs &&
			next < e->tasks.nr) {
			if (e->at[next].state == WAITING)
				r = start_task(e, next, err);
			next++;
		}
		// What runs comes to its end, whatever has happened to us.
		if (r < 0 && !e->stopping) {
			e->stopping = true;
			signal_all(e, SIGTERM);
		}
		if (e->count[RUNNING] == 0)
			return r;
		show_progress(e);
		poll(&signals, 1, PROGRESS_MS);
		on_signals(e);
		if (reap(e, r == 0 ? err : NULL) < 0 && r == 0)
			r = err->code;
	}
}

// --- The verb --------------------------------------------------------------------------------

static int take_signals(struct eval *e, struct err *err)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	e->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return e->signal_fd < 0 ? err_errno(err, -errno, "signalfd") : 0;
}

static void summary(const struct eval *e)
{
	double s = (double)(now_ns() - e->start_ns) / 1e9;

	if (e->progress)
		fprintf(stderr, "\r\033[K");
	if (e->json) {
		json_t *all = json_pack("{s:I, s:I, s:I, s:I, s:I, s:f, s:s}", "tasks",
			(json_int_t)e->tasks.nr, "passed", (json_int_t)e->count[PASSED], "failed",
			(json_int_t)e->count[FAILED], "errors", (json_int_t)e->count[ERROR],
			"not_run", (json_int_t)e->count[WAITING], "seconds", s, "out", e->out);

		json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
		putchar('\n');
		json_decref(all);
		return;
	}
	printf("%zu tasks: %zu passed, %zu failed, %zu errors", e->tasks.nr, e->count[PASSED],
		e->count[FAILED], e->count[ERROR]);
	if (e->count[WAITING])
		printf(", %zu not run", e->count[WAITING]);
	printf("; %.1f s; %s/" RESULTS "\n", s, e->out);
}

static int check_all(const struct eval *e, const char *path, struct err *err)
{
	for (size_t i = 0; i < e->tasks.nr; i++)
		if (eval_check(&e->tasks.tasks[i], err) < 0)
			return err_wrap(err, -EINVAL, "%s: task '%s'", path, e->tasks.tasks[i].id);
	return 0;
}

static int run(struct eval *e, const char *path)
{
	const char *dot = strrchr(path, '.');
	struct err err = {0};
	int r = eval_tasks_read(path, &e->tasks, &err);

	if (!e->out) {
		snprintf(e->default_out, sizeof(e->default_out), "%.*s-out",
			dot && !strchr(dot, '/') ? (int)(dot - path) : (int)strlen(path), path);
		e->out = e->default_out;
	}
	if (r == 0)
		r = check_all(e, path, &err);
	if (r < 0)
		return cli_bad_option("eval", &err);
	e->at = calloc(e->tasks.nr, sizeof(*e->at));
	if (!e->at) {
		err_errno(&err, -ENOMEM, "tasks");
		return cli_fail("eval", &err);
	}
	e->count[WAITING] = e->tasks.nr;
	patience_set_peers(MIN(e->jobs, (uint64_t)e->tasks.nr));
	if (r == 0)
		r = open_out(e, &err);
	if (r == 0)
		r = take_signals(e, &err);
	if (r == 0)
		r = run_all(e, &err);
	if (r == 0)
		summary(e);
	r = r < 0                             ? cli_fail("eval", &err)
	    : e->stopping                     ? EXIT_INTERRUPT
	    : e->count[PASSED] == e->tasks.nr ? 0
					      : EXIT_SOME_FAIL;
	free(e->at);
	return r;
}

enum { OPT_JOBS = 256, OPT_OUT, OPT_RESUME, OPT_JSON };

int eval_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"jobs", required_argument, NULL, OPT_JOBS},
		{"out", required_argument, NULL, OPT_OUT},
		{"resume", no_argument, NULL, OPT_RESUME},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct eval e = {.out_fd = -1, .lock_fd = -1, .results_fd = -1, .signal_fd = -1};
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	struct err err = {0};
	int opt, r;

	e.jobs = cpus > 0 ? (uint64_t)cpus : 1;
	e.progress = isatty(STDERR_FILENO);
	e.start_ns = now_ns();
	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (opt) {
		case OPT_JOBS:
			if (parse_uint(optarg, 1, JOBS_MAX, &e.jobs, &err) < 0) {
				err_wrap(&err, err.code, "jobs");
				return cli_bad_option("eval", &err);
			}
			break;
		case OPT_OUT:
			e.out = optarg;
			break;
		case OPT_RESUME:
			e.resume = true;
			break;
		case OPT_JSON:
			e.json = true;
			break;
		default:
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (argc - optind != 2 || strcmp(argv[optind], "run") != 0) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = run(&e, argv[optind + 1]);
	eval_tasks_fini(&e.tasks);
	fd_close(&e.out_fd);
	fd_close(&e.lock_fd);
	fd_close(&e.results_fd);
	fd_close(&e.signal_fd);
	return r;
}
