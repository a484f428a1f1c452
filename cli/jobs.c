// SPDX-License-Identifier: Apache-2.0
// mayfly jobs: commands in a machine that outlive whoever started them. One thread.
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/job_list.h"
#include "guest/proto/tree.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

static const char help[] =
	"Usage: mayfly jobs [--json] NAME [JOB]\n"
	"       mayfly jobs --wait [--timeout TIME] NAME JOB\n"
	"       mayfly jobs {--signal SIGNAL | --kill | --forget} NAME JOB\n"
	"\n"
	"Lists what was started in a machine with `mayfly exec --detach`, and the sessions of\n"
	"`mayfly shell`, or sees to one of them. `mayfly logs NAME JOB` shows what it wrote.\n"
	"\n"
	"  -w, --wait            wait until the job ends, and exit with its status\n"
	"      --timeout TIME    but not longer than TIME: then 124, and the job goes on\n"
	"  -s, --signal SIGNAL   send a signal, like TERM or 15, to its process group\n"
	"  -k, --kill            kill it and all that it started\n"
	"      --forget          drop its log and status; it must have ended\n"
	"      --json            the list as JSON\n"
	"\n"
	"Exit status: 0, with --wait the job's; 125 if it failed, 2 for wrong usage.\n";

enum action { LIST, WAIT, SIGNAL, KILL, FORGET };

struct jobs {
	struct running machine;
	const char *job; // NULL: all
	enum action action;
	bool as_json;
	int signal;
	uint64_t timeout_ns; // 0: none
	const char *timeout_text;
};

// --- The list --------------------------------------------------------------------------------

static void print_state(const json_t *job, char *ret, size_t size)
{
	unsigned long long code = job_number(job, "code"), sig = job_number(job, "signal");

	if (json_is_true(json_object_get(job, "running")))
		snprintf(ret, size, "running");
	else if (json_is_true(json_object_get(job, "timed_out")))
		snprintf(ret, size, "timed out");
	else if (sig)
		snprintf(ret, size, "signal %llu", sig);
	else
		snprintf(ret, size, "exit %llu", code);
}

static void print_job(const json_t *job)
{
	uint64_t ended_ns = job_number(job, "ended_ns"), started_ns = job_number(job, "started_ns");
	char name[AGENT_JOB_NAME_MAX + 1], state[40], time[24] = "-";

	tree_printable(name, sizeof(name), json_string_value(json_object_get(job, "job")));
	print_state(job, state, sizeof(state));
	// The clock is the guest's, so only a difference of its own is told.
	if (ended_ns >= started_ns && ended_ns)
		snprintf(time, sizeof(time), "%.1f s", (double)(ended_ns - started_ns) / 1e9);
	printf("%-20s %-12s %7llu %-4s %12s %10llu %10llu\n", name, state,
		(unsigned long long)job_number(job, "pid"),
		json_is_true(json_object_get(job, "tty")) ? "yes" : "no", time,
		(unsigned long long)job_number(json_object_get(job, "stdout"), "end"),
		(unsigned long long)job_number(json_object_get(job, "stderr"), "end"));
}

static int list(const struct jobs *j, struct err *err)
{
	const json_t *job, *one = NULL;
	json_t *jobs = NULL;
	size_t i;
	int rc = job_list_get(&j->machine, &jobs, err);

	if (rc < 0)
		return rc;
	if (j->job) {
		one = job_list_find(jobs, j->job);
		if (!one)
			rc = err_set(err, -ESRCH, "there is no job '%s' in '%s'", j->job,
				j->machine.name);
	}
	if (rc == 0 && j->as_json) {
		json_dumpf(one ? one : jobs, stdout, JSON_INDENT(2) | JSON_ENSURE_ASCII);
		putchar('\n');
	} else if (rc == 0) {
		printf("%-20s %-12s %7s %-4s %12s %10s %10s\n", "JOB", "STATE", "PID", "TTY",
			"TOOK", "STDOUT", "STDERR");
		json_array_foreach(jobs, i, job)
		{
			if (!one || job == one)
				print_job(job);
		}
	}
	json_decref(jobs);
	return rc;
}

// --- One of them -----------------------------------------------------------------------------

// Returns the job's exit status, EXIT_TIMEOUT, or a failure.
static int wait_for_job(const struct jobs *j, int fd, struct err *err)
{
	struct agent_result result = {0};
	const struct agent_attach attach = {
		.job = j->job,
		.follow = true,
		.stdout_offset = INT64_MAX, // nothing of what there is
		.stderr_offset = INT64_MAX,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = -1,
		.deadline_ns = j->timeout_ns ? now_ns() + j->timeout_ns : 0,
	};
	int rc = agent_attach(fd, &attach, &result, err);

	if (rc == -ETIMEDOUT) {
		fprintf(stderr, "mayfly jobs: '%s' still runs after %s\n", j->job, j->timeout_text);
		return EXIT_TIMEOUT;
	}
	if (result.timed_out && rc == 0)
		return EXIT_TIMEOUT;
	return rc < 0 ? rc : result.exit_code;
}

static int act(const struct jobs *j, struct err *err)
{
	const uint64_t deadline_ns = now_ns() + EXEC_ANSWER_NS;
	CLEANUP_FD int fd = -1;

	if (j->action == LIST)
		return list(j, err);
	fd = running_connect(&j->machine, err);
	if (fd < 0)
		return fd;
	switch (j->action) {
	case WAIT:
		return wait_for_job(j, fd, err);
	case FORGET:
		return agent_job_forget(fd, j->job, -1, deadline_ns, err);
	default:
		return agent_job_signal(
			fd, j->job, j->signal, j->action == KILL, -1, deadline_ns, err);
	}
}

// "TERM", "SIGTERM" or "15".
static int parse_signal(const char *text, int *ret, struct err *err)
{
	const char *name = strncmp(text, "SIG", 3) == 0 ? text + 3 : text;
	uint64_t number;

	for (int i = 1; i < SIGRTMAX; i++) {
		const char *known = sigabbrev_np(i);

		if (known && !strcmp(known, name)) {
			*ret = i;
			return 0;
		}
	}
	if (parse_uint(text, 1, 64, &number, NULL) < 0)
		return err_set(err, -EINVAL, "signal: '%s' is none (like TERM or 15)", text);
	*ret = (int)number;
	return 0;
}

enum { OPT_TIMEOUT = 'T', OPT_FORGET = 'F', OPT_JSON = 'J' };

int jobs_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"wait", no_argument, NULL, 'w'},
		{"timeout", required_argument, NULL, OPT_TIMEOUT},
		{"signal", required_argument, NULL, 's'},
		{"kill", no_argument, NULL, 'k'},
		{"forget", no_argument, NULL, OPT_FORGET},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct jobs j = {0};
	struct err err = {0};
	int opt, r = 0, actions = 0;

	optind = 1;
	while (r == 0 && (opt = getopt_long(argc, argv, "ws:kh", options, NULL)) != -1) {
		switch (opt) {
		case 'w':
			j.action = WAIT;
			break;
		case OPT_TIMEOUT:
			j.timeout_text = optarg;
			r = parse_duration(optarg, &j.timeout_ns, &err);
			continue;
		case 's':
			j.action = SIGNAL;
			r = parse_signal(optarg, &j.signal, &err);
			break;
		case 'k':
			j.action = KILL;
			break;
		case OPT_FORGET:
			j.action = FORGET;
			break;
		case OPT_JSON:
			j.as_json = true;
			continue;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
		actions++;
	}
	if (r < 0)
		return cli_bad_option("jobs", &err);
	if (argc - optind < (actions ? 2 : 1) || argc - optind > 2 || actions > 1 ||
		(j.timeout_text && j.action != WAIT) || (j.as_json && actions)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	j.job = argc - optind == 2 ? argv[optind + 1] : NULL;
	r = running_find(argv[optind], &j.machine, &err);
	if (r == 0) {
		r = act(&j, &err);
		if (r < 0)
			running_explain(&j.machine, r, &err);
	}
	return r < 0 ? cli_fail("jobs", &err) : r;
}
