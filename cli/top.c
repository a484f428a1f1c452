// SPDX-License-Identifier: Apache-2.0
// mayfly top: how a machine is, from its agent, and from its init what that alone knows: services
// and the end of the log. All of it is the guest's word. One thread.
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/job_list.h"
#include "guest/proto/tree.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

#define OUTPUT_MAX_BYTES   65536U // of a command that is asked for lines
#define COMMAND_TIMEOUT_NS 20000000000ULL
#define SERVICES_MAX       200U

static const char help[] =
	"Usage: mayfly top [OPTION]... NAME\n"
	"\n"
	"How a machine that is up is doing: load, memory, disk, what listens, the processes that "
	"have\n"
	"had the most CPU time; its services, from systemd where that is its init and else the "
	"jobs\n"
	"of its agent; and the end of its log, from the journal or else the kernel's.\n"
	"\n"
	"  -p, --processes N     how many processes (default 15, at most 128)\n"
	"  -l, --log N           how many lines of the log (default 10)\n"
	"      --json            as one object\n"
	"\n"
	"Exit status: 0, 125 if it failed, 2 for wrong usage.\n";

struct top {
	const struct running *machine;
	uint64_t processes, log_lines;
	bool as_json;
};

// --- What there is to tell -------------------------------------------------------------------

static int get_facts(const struct top *t, json_t **ret, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = running_connect(t->machine, err);
	char request[96];
	int rc = fd,
	    len = snprintf(request, sizeof(request),
		    "{\"v\":1,\"op\":\"facts\",\"processes_max\":%u}", (unsigned)t->processes);

	if (rc >= 0)
		rc = agent_request(
			fd, request, (size_t)len, -1, now_ns() + EXEC_ANSWER_NS, &text, err);
	if (rc < 0)
		return rc;
	*ret = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	if (!json_is_object(*ret)) {
		json_decref(*ret);
		return err_set(err, -EPROTO, "the guest's answer makes no sense");
	}
	return 0;
}

struct output {
	size_t len;
	char text[OUTPUT_MAX_BYTES + 1];
};

// Keeps the end of what comes: what is asked for is bounded, but by the guest's word.
static int keep(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct output *o = ctx;
	size_t drop;

	(void)err;
	if (is_err)
		return 0;
	if (len > OUTPUT_MAX_BYTES) {
		bytes += len - OUTPUT_MAX_BYTES;
		len = OUTPUT_MAX_BYTES;
	}
	drop = o->len + len > OUTPUT_MAX_BYTES ? o->len + len - OUTPUT_MAX_BYTES : 0;
	memmove(o->text, o->text + drop, o->len - drop);
	memcpy(o->text + o->len - drop, bytes, len);
	o->len += len - drop;
	return 0;
}

static json_t *printable(const char *text)
{
	char line[1024];
	json_t *s;

	tree_printable(line, sizeof(line), text);
	s = json_string(line);
	for (char *c = line; !s && *c; c++) // not UTF-8
		*c = (unsigned char)*c < 0x80 ? *c : '?';
	return s ? s : json_string(line);
}

// The last lines that a command prints, at most max; an empty array if it cannot be had.
static json_t *lines_of(const struct top *t, const char *const *argv, uint64_t max)
{
	CLEANUP_FREE struct output *o = calloc(1, sizeof(*o));
	CLEANUP_FD int fd = running_connect(t->machine, NULL);
	const struct agent_exec x = {.argv = argv,
		.timeout_ms = COMMAND_TIMEOUT_NS / 1000000,
		.in_fd = -1,
		.output = keep,
		.output_ctx = o,
		.signal_fd = -1,
		.cancel_fd = -1,
		.deadline_ns = now_ns() + EXEC_ANSWER_NS};
	struct agent_result result;
	json_t *lines = json_array();
	char *rest, *line;

	if (!o || fd < 0 || agent_exec(fd, &x, &result, NULL) < 0 || result.exit_code)
		return lines;
	o->text[o->len] = '\0';
	rest = o->text;
	while ((line = strsep(&rest, "\n"))) {
		if (!line[0])
			continue;
		json_array_append_new(lines, printable(line));
		if (json_array_size(lines) > max)
			json_array_remove(lines, 0);
	}
	return lines;
}

// "ssh.service loaded active running OpenBSD Secure Shell server"
static json_t *services_of_systemd(const struct top *t)
{
	static const char *const argv[] = {"systemctl", "list-units", "--type=service", "--all",
		"--plain", "--no-legend", "--no-pager", "--full", NULL};
	json_t *lines = lines_of(t, argv, SERVICES_MAX), *services = json_array(), *line;
	size_t i;

	json_array_foreach(lines, i, line)
	{
		char name[256], active[32], sub[32];

		if (sscanf(json_string_value(line), "%255s %*s %31s %31s", name, active, sub) != 3)
			continue;
		json_array_append_new(services,
			json_pack("{s:s, s:s, s:s}", "name", name, "state", active, "detail", sub));
	}
	json_decref(lines);
	return services;
}

static json_t *services_of_agent(const struct top *t)
{
	json_t *jobs = NULL, *services = json_array(), *job;
	size_t i;

	if (job_list_get(t->machine, &jobs, NULL) < 0)
		return services;
	json_array_foreach(jobs, i, job)
	{
		bool running = json_is_true(json_object_get(job, "running"));
		json_t *s = json_object();

		json_object_set_new(
			s, "name", printable(json_string_value(json_object_get(job, "job"))));
		json_object_set_new(s, "state", json_string(running ? "active" : "inactive"));
		json_object_set_new(s, "detail", json_string("job"));
		json_array_append_new(services, s);
	}
	json_decref(jobs);
	return services;
}

static void add_what_init_knows(const struct top *t, json_t *all)
{
	const char *init = json_string_value(json_object_get(all, "init"));
	bool systemd = init && strcmp(init, "systemd") == 0;
	char count[24];
	const char *const journal[] = {
		"journalctl", "--no-pager", "-o", "short-iso", "-n", count, NULL};
	const char *const dmesg[] = {"dmesg", NULL};

	snprintf(count, sizeof(count), "%u", (unsigned)t->log_lines);
	json_object_set_new(
		all, "services", systemd ? services_of_systemd(t) : services_of_agent(t));
	json_object_set_new(all, "log", lines_of(t, systemd ? journal : dmesg, t->log_lines));
}

// --- Telling it ------------------------------------------------------------------------------

static void text_of(const json_t *object, const char *key, char *ret, size_t size)
{
	const char *text = json_string_value(json_object_get(object, key));

	tree_printable(ret, size, text ? text : "-");
}

static double mib_of(const json_t *object, const char *key)
{
	return (double)job_number(object, key) / (double)MIB;
}

static double load_of(const json_t *object, const char *key)
{
	return (double)job_number(object, key) / 1000;
}

static void print_listening(const json_t *all)
{
	const json_t *listening = json_object_get(all, "listening"), *one;
	size_t i;

	printf("listening:");
	json_array_foreach(listening, i, one)
	{
		printf(" %llu%s", (unsigned long long)job_number(one, "port"),
			json_is_true(json_object_get(one, "loopback")) ? " (loopback)" : "");
	}
	puts(i ? "" : " nothing");
}

static void print(const json_t *all)
{
	char a[256], b[256], c[256];
	const json_t *one, *list;
	uint64_t up_s = job_number(all, "uptime_ns") / 1000000000;
	size_t i;

	text_of(all, "hostname", a, sizeof(a));
	text_of(all, "kernel", b, sizeof(b));
	text_of(all, "init", c, sizeof(c));
	printf("%s: up %llu:%02u:%02u, Linux %s, init %s\n", a, (unsigned long long)(up_s / 3600),
		(unsigned)(up_s / 60 % 60), (unsigned)(up_s % 60), b, c);
	printf("load %.2f %.2f %.2f, %llu processes\n", load_of(all, "load_1m_milli"),
		load_of(all, "load_5m_milli"), load_of(all, "load_15m_milli"),
		(unsigned long long)job_number(all, "processes"));
	printf("memory: %.1f of %.1f MiB available; disk /: %.1f of %.1f MiB\n",
		mib_of(all, "memory_available_bytes"), mib_of(all, "memory_total_bytes"),
		mib_of(all, "disk_available_bytes"), mib_of(all, "disk_total_bytes"));
	print_listening(all);
	list = json_object_get(all, "process_list");
	if (json_array_size(list))
		printf("\n%7s %7s %6s S %12s %12s NAME\n", "PID", "PARENT", "UID", "CPU", "MEMORY");
	json_array_foreach(list, i, one)
	{
		text_of(one, "state", a, sizeof(a));
		text_of(one, "name", b, sizeof(b));
		printf("%7llu %7llu %6llu %.1s %10.2f s %8.1f MiB %s\n",
			(unsigned long long)job_number(one, "pid"),
			(unsigned long long)job_number(one, "parent"),
			(unsigned long long)job_number(one, "uid"), a,
			(double)job_number(one, "cpu_ms") / 1000, mib_of(one, "resident_bytes"), b);
	}
	list = json_object_get(all, "services");
	if (json_array_size(list))
		printf("\n%-40s %-10s\n", "SERVICE", "STATE");
	json_array_foreach(list, i, one)
	{
		text_of(one, "name", a, sizeof(a));
		text_of(one, "state", b, sizeof(b));
		text_of(one, "detail", c, sizeof(c));
		printf("%-40s %-10s (%s)\n", a, b, c);
	}
	list = json_object_get(all, "log");
	if (json_array_size(list))
		printf("\nLOG\n");
	json_array_foreach(list, i, one) puts(json_string_value(one));
}

static int run(const struct top *t, struct err *err)
{
	json_t *all = NULL;
	int rc = get_facts(t, &all, err);

	if (rc < 0)
		return rc;
	add_what_init_knows(t, all);
	if (t->as_json) {
		json_dumpf(all, stdout, JSON_INDENT(2) | JSON_ENSURE_ASCII);
		putchar('\n');
	} else {
		print(all);
	}
	json_decref(all);
	return 0;
}

enum { OPT_JSON = 'J' };

int top_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"processes", required_argument, NULL, 'p'},
		{"log", required_argument, NULL, 'l'},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct top t = {.processes = 15, .log_lines = 10};
	struct running m;
	struct err err = {0};
	int opt, r = 0;

	optind = 1;
	while (r == 0 && (opt = getopt_long(argc, argv, "p:l:h", options, NULL)) != -1) {
		switch (opt) {
		case 'p':
			r = parse_uint(optarg, 0, 128, &t.processes, &err);
			break;
		case 'l':
			r = parse_uint(optarg, 0, 1000, &t.log_lines, &err);
			break;
		case OPT_JSON:
			t.as_json = true;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (r < 0)
		return cli_bad_option("top", &err);
	if (argc - optind != 1) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = running_find(argv[optind], &m, &err);
	if (r == 0) {
		t.machine = &m;
		r = run(&t, &err);
		if (r < 0)
			running_explain(&m, r, &err);
	}
	return r < 0 ? cli_fail("top", &err) : 0;
}
