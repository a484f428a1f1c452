// SPDX-License-Identifier: Apache-2.0
// mayfly bench: what a start costs on this machine, in its user's hands. It runs `mayfly run` as a
// person would, cold and warm in turn, and tells the stages. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/base/util.h"

#define ROUNDS_MAX       200U
#define STDERR_MAX_BYTES 16384U // of one `mayfly run --json`

static const char help[] =
	"Usage: mayfly bench [OPTION]...\n"
	"\n"
	"Measures starts on this machine: `mayfly run -- true`, cold (a boot) and warm (from the\n"
	"snapshot that is kept), in turn, stage by stage. The first of each is left out: it fills\n"
	"caches, and makes the snapshot.\n"
	"\n"
	"  -n, --rounds N   how many of each (default 5, at most 200)\n"
	"      --json       the samples, in microseconds\n"
	"\n"
	"Exit status: 0, 125 if a start failed, 2 for wrong usage.\n";

enum { COLD, WARM, NR_KINDS };
static const char *const kind_names[NR_KINDS] = {"cold", "warm"};

static const struct stage {
	const char *key[2]; // as `mayfly run --json` tells it, cold and warm
	const char *says;
} stages[] = {
	{{"start_to_first_run_us", "start_to_first_run_us"}, "process start to first KVM_RUN"},
	{{"first_run_to_ready_us", "first_run_to_awake_us"}, "first KVM_RUN to agent ready"},
	{{"ready_to_answer_us", "ready_to_answer_us"}, "agent ready to first exec answered"},
	{{"answer_to_end_us", "answer_to_end_us"}, "first exec answered to all gone"},
	{{"total_us", "total_us"}, "in all"},
};

// Reads what one run says about itself: the last line that it writes to stderr.
static int read_told(int fd, pid_t pid, json_t **ret, struct err *err)
{
	char text[STDERR_MAX_BYTES + 1], *last;
	size_t len = 0;
	ssize_t n;
	int status;

	// What is more than fits is read all the same: the writer is not to wait for us.
	while ((n = read(fd, text + len, STDERR_MAX_BYTES - len)) > 0 || (n < 0 && errno == EINTR))
		if (n > 0 && (len += (size_t)n) == STDERR_MAX_BYTES)
			len = 0;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return err_errno(err, errno, "wait for mayfly run");
	while (len > 0 && text[len - 1] == '\n')
		len--;
	text[len] = '\0';
	last = strrchr(text, '\n');
	last = last ? last + 1 : text;
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		return err_set(err, -EIO, "a start failed: %s", last);
	*ret = json_loads(last, JSON_REJECT_DUPLICATES, NULL);
	if (!json_is_object(*ret)) {
		json_decref(*ret);
		return err_set(err, -EPROTO, "mayfly run --json said '%s'", last);
	}
	return 0;
}

// One start of its kind. *ret: what it told, to be given back with json_decref().
static int start_one(int kind, json_t **ret, struct err *err)
{
	char *const cold[] = {"mayfly", "run", "--json", "--cold", "--", "true", NULL};
	char *const warm[] = {"mayfly", "run", "--json", "--", "true", NULL};
	posix_spawn_file_actions_t actions;
	CLEANUP_FD int reader = -1;
	int pipe_fd[2], rc;
	pid_t pid;

	if (pipe2(pipe_fd, O_CLOEXEC) < 0)
		return err_errno(err, errno, "make a pipe");
	reader = pipe_fd[0];
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, pipe_fd[1], STDERR_FILENO);
	rc = posix_spawn(
		&pid, "/proc/self/exe", &actions, NULL, kind == COLD ? cold : warm, environ);
	posix_spawn_file_actions_destroy(&actions);
	close(pipe_fd[1]);
	if (rc != 0)
		return err_set(err, -rc, "start mayfly run: %s", strerror(rc));
	return read_told(reader, pid, ret, err);
}

static int by_size(const void *a, const void *b)
{
	const json_int_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static double ms(json_int_t us)
{
	return (double)us / 1000;
}

static void tell_stage(const struct stage *stage, int kind, const json_t *samples)
{
	json_int_t us[ROUNDS_MAX];
	size_t n = json_array_size(samples);

	for (size_t i = 0; i < n; i++)
		us[i] = json_integer_value(
			json_object_get(json_array_get(samples, i), stage->key[kind]));
	qsort(us, n, sizeof(us[0]), by_size);
	printf("  %-36s %10.2f %10.2f %10.2f\n", stage->says, ms(us[n / 2]), ms(us[0]),
		ms(us[n - 1]));
}

static void tell(json_t *all, uint64_t rounds)
{
	double load = 0;
	const json_t *monitor = json_object_get(
		json_array_get(json_object_get(all, kind_names[WARM]), 0), "monitor");

	if (getloadavg(&load, 1) != 1)
		load = -1;
	printf("host: %s; %llu rounds; load %.1f on %ld CPUs\n",
		json_string_value(json_object_get(monitor, "host")), (unsigned long long)rounds,
		load, sysconf(_SC_NPROCESSORS_ONLN));
	for (int kind = 0; kind < NR_KINDS; kind++) {
		const json_t *samples = json_object_get(all, kind_names[kind]);
		const json_t *of = json_object_get(
			json_array_get(samples, json_array_size(samples) - 1), "monitor");
		json_t *n, *exits = json_object_get(of, "exits");
		const char *name;

		printf("%-38s %10s %10s %10s\n", kind == COLD ? "cold, ms" : "warm, ms", "median",
			"min", "max");
		for (size_t i = 0; i < ARRAY_SIZE(stages); i++)
			tell_stage(&stages[i], kind, samples);
		fputs("  exits:", stdout);
		json_object_foreach(exits, name, n) printf(" %s %lld", name, json_integer_value(n));
		printf("; monitor without guest memory: %lld KiB\n",
			json_integer_value(json_object_get(of, "monitor_rss_kib")));
	}
}

int bench_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"rounds", required_argument, NULL, 'n'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	uint64_t rounds = 5;
	bool as_json = false;
	json_t *all;
	int opt, r = 0;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "n:h", options, NULL)) != -1) {
		if (opt == 'n') {
			if (parse_uint(optarg, 1, ROUNDS_MAX, &rounds, &err) < 0)
				return cli_bad_option("bench", &err);
		} else if (opt == 'j') {
			as_json = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (optind != argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	all = json_object();
	for (int kind = 0; kind < NR_KINDS; kind++)
		json_object_set_new(all, kind_names[kind], json_array());
	for (uint64_t round = 0; r == 0 && round <= rounds; round++) {
		if (isatty(STDERR_FILENO))
			fprintf(stderr, "\rround %llu of %llu ", (unsigned long long)round,
				(unsigned long long)rounds);
		for (int kind = 0; r == 0 && kind < NR_KINDS; kind++) {
			json_t *told = NULL;

			r = start_one(kind, &told, &err);
			if (r == 0 && round > 0)
				json_array_append_new(json_object_get(all, kind_names[kind]), told);
			else
				json_decref(told);
		}
	}
	if (isatty(STDERR_FILENO))
		fputs("\r\033[K", stderr);
	if (r == 0 && as_json) {
		json_dumpf(all, stdout, JSON_INDENT(1));
		putchar('\n');
	} else if (r == 0) {
		tell(all, rounds);
	}
	json_decref(all);
	return r < 0 ? cli_fail("bench", &err) : 0;
}
