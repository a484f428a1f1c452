// SPDX-License-Identifier: Apache-2.0
// mayfly stats, mayfly balloon: what a machine has counted, and memory that it is to give up. One
// thread.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cli/cli.h"
#include "cli/control_client.h"
#include "cli/running.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

#define CALL_NS     10000000000ULL
#define FRESH_MS    1000
#define FIGURES_NS  2000000000ULL // for the guest to tell its own
#define FIGURES_TRY 20000000L

static int stats_usage(FILE *out, int status)
{
	fputs("Usage: mayfly stats [--json] NAME\n"
	      "\n"
	      "What a running machine has counted since its monitor started: exits of its CPUs, "
	      "and\n"
	      "for each device notifications, interrupts, requests and bytes. The guest's own "
	      "figures\n"
	      "of its memory are under `balloon`; guest_age_ms is how old they are.\n",
		out);
	return status;
}

static int balloon_usage(FILE *out, int status)
{
	fputs("Usage: mayfly balloon NAME SIZE\n"
	      "\n"
	      "Asks a running machine to give up SIZE of its memory, like 64M; 0M gives it back. "
	      "It\n"
	      "does so in its own time, as far as it can, and takes back what it needs when it "
	      "runs\n"
	      "short. `mayfly stats` shows how far it is. (Memory that it frees by itself returns "
	      "to\n"
	      "the host without this.)\n",
		out);
	return status;
}

static json_int_t age_ms(const json_t *stats)
{
	const json_t *age = json_object_get(json_object_get(stats, "balloon"), "guest_age_ms");

	return json_is_integer(age) ? json_integer_value(age) : INT64_MAX;
}

// With figures of the guest that are fresh, if it tells them in time: asking makes it.
static int get_stats(int fd, json_t **ret, struct err *err)
{
	const struct timespec wait = {.tv_nsec = FIGURES_TRY};
	const uint64_t until_ns = now_ns() + FIGURES_NS;

	for (;;) {
		int r = control_call(fd, "stats", NULL, -1, now_ns() + CALL_NS, ret, err);

		if (r < 0 || age_ms(*ret) < FRESH_MS || now_ns() > until_ns)
			return r;
		json_decref(*ret);
		nanosleep(&wait, NULL);
	}
}

static void print(json_t *stats)
{
	const char *name, *key;
	json_t *object, *val;

	json_object_foreach(stats, name, object)
	{
		json_object_foreach(object, key, val)
		{
			printf("%-8s %-22s %lld\n", name, key, (long long)json_integer_value(val));
		}
	}
}

static int connect_to(const char *name, struct err *err)
{
	struct running m;
	int r = running_find(name, &m, err);

	return r < 0 ? r : control_connect(m.run_dir, err);
}

int stats_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"help", no_argument, NULL, 'h'},
		{"json", no_argument, NULL, 'j'},
		{0},
	};
	CLEANUP_FD int fd = -1;
	bool as_json = false;
	struct err err = {0};
	json_t *stats = NULL;
	int opt;

	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'h')
			return stats_usage(stdout, 0);
		if (opt != 'j')
			return stats_usage(stderr, EXIT_USAGE);
		as_json = true;
	}
	if (optind + 1 != argc)
		return stats_usage(stderr, EXIT_USAGE);
	fd = connect_to(argv[optind], &err);
	if (fd < 0 || get_stats(fd, &stats, &err) < 0)
		return cli_fail("stats", &err);
	if (as_json) {
		json_dumpf(stats, stdout, JSON_INDENT(2));
		putchar('\n');
	} else {
		print(stats);
	}
	json_decref(stats);
	return 0;
}

int balloon_main(int argc, char **argv)
{
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	CLEANUP_FD int fd = -1;
	struct err err = {0};
	uint64_t bytes;
	int opt;

	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1)
		return opt == 'h' ? balloon_usage(stdout, 0) : balloon_usage(stderr, EXIT_USAGE);
	if (optind + 2 != argc)
		return balloon_usage(stderr, EXIT_USAGE);
	if (parse_size(argv[optind + 1], &bytes, &err) < 0)
		return cli_bad_option("balloon", &err);
	fd = connect_to(argv[optind], &err);
	if (fd < 0 || control_call(fd, "balloon", json_pack("{s:I}", "bytes", (json_int_t)bytes),
			      -1, now_ns() + CALL_NS, NULL, &err) < 0)
		return cli_fail("balloon", &err);
	return 0;
}
