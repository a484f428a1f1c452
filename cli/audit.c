// SPDX-License-Identifier: Apache-2.0
// mayfly audit and replay: what agents did with a machine. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/replay_page.h"
#include "mcp/audit.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

static const char audit_help[] =
	"Usage: mayfly audit [OPTION]... NAME\n"
	"       mayfly audit [--json] verify NAME\n"
	"\n"
	"Lists what agents did with a machine through MCP, and what mayfly work and keep did on\n"
	"its folder: each call, and how it ended. verify checks that nothing in the log was\n"
	"changed, removed or added, and prints the hash of the last record: kept elsewhere, it\n"
	"shows a log that was cut short. Requests to the outside (mayfly net NAME log) have a log\n"
	"of their own, which it checks, too.\n"
	"\n"
	"      --since TIME  from then on: 10m or 2h ago, or 2026-11-30 or 2026-11-30T08:00:00 "
	"(UTC)\n"
	"      --json        records as they are, one a line\n"
	"\n"
	"Exit status: 0, 125 if it failed or the log is damaged, 2 for wrong usage.\n";

static const char replay_help[] =
	"Usage: mayfly replay [--since TIME] [--session ID] [--html FILE] NAME\n"
	"\n"
	"Tells the story of what agents did with a machine, in order and in time: what was asked,\n"
	"what it printed (its beginning), how it ended, what it changed in a folder that the "
	"machine\n"
	"works on, and the requests to the outside in between, also those that were denied. From\n"
	"the logs that mayfly audit and mayfly net NAME log list.\n"
	"\n"
	"      --since TIME  from then on: 10m or 2h ago, or 2026-11-30 or 2026-11-30T08:00:00 "
	"(UTC)\n"
	"      --session ID  of that session alone, as mayfly audit shows it\n"
	"      --html FILE   as a page that stands alone, with a bar to move through time; FILE "
	"is\n"
	"                    replaced, and readable to you alone\n";

struct listing {
	char since[32]; // as records have it; "": all
	const char *session; // NULL: all
	bool json;
	const char *html_path; // NULL: as text
	int (*tell)(struct listing *l, const json_t *record); // of replay
	json_t *requests; // to the outside that are still to be told; owned
	size_t nr_told; // of these
	struct replay_page page;
};

static const char *text_of(const json_t *record, const char *key)
{
	const char *text = json_string_value(json_object_get(record, key));

	return text ? text : "";
}

static bool is_wanted(const struct listing *l, const json_t *record)
{
	return strcmp(text_of(record, "time"), l->since) >= 0 &&
	       (!l->session || !strcmp(text_of(record, "session"), l->session));
}

// Its text is ASCII: what is not is escaped, so nothing in it drives a terminal.
static void print_json(const json_t *json, size_t max_bytes)
{
	char *text = json_dumps(json, JSON_COMPACT | JSON_ENSURE_ASCII | JSON_ENCODE_ANY);
	size_t len = text ? strlen(text) : 0;

	printf("%.*s%s", (int)MIN(len, max_bytes), text ? text : "", len > max_bytes ? "..." : "");
	free(text);
}

// --- audit -----------------------------------------------------------------------------------

// How a call ended, in a few words.
static void print_end(const json_t *record)
{
	const json_t *code = json_object_get(record, "exit_code");

	printf("%s", text_of(record, "outcome"));
	if (code)
		printf(", exit %lld", (long long)json_integer_value(code));
	printf(", %lld ms, %lld bytes",
		(long long)json_integer_value(json_object_get(record, "duration_ms")),
		(long long)json_integer_value(json_object_get(record, "result_bytes")));
	if (json_object_get(record, "error")) {
		printf(": ");
		print_json(json_object_get(record, "error"), 200);
	}
	putchar('\n');
}

static int list_record(void *opaque, const json_t *record)
{
	const struct listing *l = opaque;

	if (!is_wanted(l, record))
		return 0;
	if (l->json) {
		print_json(record, SIZE_MAX / 2);
		putchar('\n');
		return 0;
	}
	printf("%-24s %.8s %4lld %-16s ", text_of(record, "time"), text_of(record, "session"),
		(long long)json_integer_value(json_object_get(record, "call")),
		text_of(record, "tool"));
	if (!strcmp(text_of(record, "event"), "call")) {
		print_json(json_object_get(record, "arguments"), 200);
		putchar('\n');
	} else {
		print_end(record);
	}
	return 0;
}

static void print_summary(const char *which, const struct audit_summary *sum)
{
	if (sum->records == 0)
		printf("the %s is empty\n", which);
	else
		printf("the %s is whole: records %llu to %llu%s\n%s\n", which,
			(unsigned long long)sum->first, (unsigned long long)sum->last,
			sum->first > 1 ? " (older ones have made room)" : "", sum->hash);
}

static void print_summary_json(const struct audit_summary *sum)
{
	printf("{\"records\": %llu, \"first\": %llu, \"last\": %llu, \"hash\": \"%s\"",
		(unsigned long long)sum->records, (unsigned long long)sum->first,
		(unsigned long long)sum->last, sum->hash);
}

// That of the agents' calls, and that of the requests through the proxy, if there were any.
static int verify(const char *dir, bool json, struct err *err)
{
	struct audit_summary sum, egress = {0};
	char egress_path[PATH_MAX];
	int r = audit_verify(dir, &sum, err);

	if (r == 0)
		r = egress_dir(dir, egress_path, err);
	if (r == 0) {
		r = audit_verify(egress_path, &egress, err);
		r = r == -ENOENT ? 0 : r;
	}
	if (r < 0)
		return r;
	if (json) {
		print_summary_json(&sum);
		printf(", \"egress\": ");
		print_summary_json(&egress);
		puts("}}");
		return 0;
	}
	print_summary("log", &sum);
	if (egress.records)
		print_summary("log of requests", &egress);
	return 0;
}

// --- replay ----------------------------------------------------------------------------------

// A guest's words line by line behind a margin, so that they cannot look like ours.
static void print_lines(const json_t *record, const char *key, char mark)
{
	const char *text = text_of(record, key);

	while (*text) {
		const char *end = strchrnul(text, '\n');

		printf("    %c ", mark);
		for (; text < end; text++)
			putchar((unsigned char)*text >= ' ' && *text != 0x7f ? *text : ' ');
		putchar('\n');
		if (*text)
			text++;
	}
}

static void print_command(const json_t *arguments)
{
	const json_t *argv = json_object_get(arguments, "argv"), *word;
	size_t i;

	if (!argv) {
		print_json(arguments, 400);
		return;
	}
	json_array_foreach(argv, i, word)
	{
		if (i)
			putchar(' ');
		print_json(word, 1000);
	}
}

static void print_files(const json_t *record)
{
	const json_t *file;
	size_t i;

	json_array_foreach(json_object_get(record, "files"), i, file)
	{
		printf("    = ");
		print_json(file, 1000);
		putchar('\n');
	}
}

static int tell_record(struct listing *l, const json_t *record)
{
	const char *when = text_of(record, "time");

	(void)l;
	printf("%.10s %.12s  %.8s #%lld  ", when, strlen(when) > 11 ? when + 11 : "",
		text_of(record, "session"),
		(long long)json_integer_value(json_object_get(record, "call")));
	if (!strcmp(text_of(record, "event"), "call")) {
		printf("%s ", text_of(record, "tool"));
		print_command(json_object_get(record, "arguments"));
		putchar('\n');
		return 0;
	}
	if (!strcmp(text_of(record, "event"), "request")) {
		printf("%s %s: ", text_of(record, "tool"), text_of(record, "outcome"));
		print_json(json_object_get(record, "arguments"), 1000);
		putchar('\n');
		return 0;
	}
	if (!strcmp(text_of(record, "event"), "change")) {
		printf("has changed: %lld\n",
			(long long)json_integer_value(json_object_get(record, "changes")));
		print_files(record);
		return 0;
	}
	printf("%s: ", text_of(record, "tool"));
	print_end(record);
	print_files(record);
	print_lines(record, "stdout", '|');
	print_lines(record, "stderr", '!');
	return 0;
}

static int add_to_page(struct listing *l, const json_t *record)
{
	replay_page_add(&l->page, record);
	return 0;
}

// A record of the proxy's log as one of a story: what was asked for, and what became of it.
static int keep_request(void *opaque, const json_t *record)
{
	static const char *const keys[] = {"method", "host", "port", "address", "credential",
		"reason", "bytes_out", "bytes_in"};
	struct listing *l = opaque;
	json_t *arguments = json_object();
	const char *decision = text_of(record, "decision");

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		json_object_set(arguments, keys[i], json_object_get(record, keys[i]));
	return json_array_append_new(l->requests,
		json_pack("{s:s, s:s, s:s, s:s, s:O, s:s, s:s, s:o, s:I}", "event", "request",
			"time", text_of(record, "time"), "session", "network", "run",
			text_of(record, "run"), "call", json_object_get(record, "seq"), "tool",
			"network", "outcome", decision, "arguments", arguments, "duration_ms",
			json_integer_value(json_object_get(record, "duration_ms"))));
}

// Those that were before that time.
static int tell_requests(struct listing *l, const char *before)
{
	const json_t *request;
	int r = 0;

	while (r == 0 && (request = json_array_get(l->requests, l->nr_told)) &&
		(!before || strcmp(text_of(request, "time"), before) < 0)) {
		l->nr_told++;
		r = is_wanted(l, request) ? l->tell(l, request) : 0;
	}
	return r;
}

static int tell_next(void *opaque, const json_t *record)
{
	struct listing *l = opaque;
	int r = tell_requests(l, text_of(record, "time"));

	return r == 0 && is_wanted(l, record) ? l->tell(l, record) : r;
}

// What was done, with the requests to the outside in between.
static int tell_all(struct listing *l, const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int r = egress_dir(dir, path, err);

	l->requests = json_array();
	if (r == 0)
		r = audit_each(path, keep_request, l, err);
	if (r == 0 || r == -ENOENT)
		r = audit_each(dir, tell_next, l, err);
	if (r == 0)
		r = tell_requests(l, NULL);
	json_decref(l->requests);
	return r;
}

// Under a temporary name first: a page that is there is whole.
static int write_page(struct listing *l, const char *machine, const char *dir, struct err *err)
{
	CLEANUP_FREE char *temporary = NULL;
	CLEANUP_FD int fd = -1;
	int r;

	if (asprintf(&temporary, "%s.XXXXXX", l->html_path) < 0)
		return err_errno(err, -ENOMEM, "%s", l->html_path);
	fd = mkostemp(temporary, O_CLOEXEC); // of mode 0600
	l->page.file = fd < 0 ? NULL : fdopen(fd, "w");
	if (!l->page.file)
		return err_errno(err, -errno, "%s", l->html_path);
	(void)TAKE_FD(fd);
	replay_page_begin(&l->page, machine);
	l->tell = add_to_page;
	r = tell_all(l, dir, err);
	replay_page_end(&l->page);
	if (fflush(l->page.file) != 0 && r == 0)
		r = err_errno(err, -errno, "%s", l->html_path);
	if (ferror(l->page.file) && r == 0)
		r = err_errno(err, -EIO, "%s", l->html_path);
	fclose(l->page.file);
	if (r == 0 && rename(temporary, l->html_path) < 0)
		r = err_errno(err, -errno, "%s", l->html_path);
	if (r < 0)
		unlink(temporary);
	return r;
}

// --- The command line ------------------------------------------------------------------------

static int take_since(const char *text, char ret[32], struct err *err)
{
	static const char *const formats[] = {
		"%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"};
	uint64_t ago_ns;
	time_t when;
	struct tm tm;

	for (size_t i = 0; i < ARRAY_SIZE(formats); i++) {
		const char *end;

		tm = (struct tm){0};
		end = strptime(text, formats[i], &tm);
		if (end && !*end) {
			strftime(ret, 32, "%Y-%m-%dT%H:%M:%S", &tm);
			return 0;
		}
	}
	if (parse_duration(text, &ago_ns, NULL) < 0)
		return err_set(err, -EINVAL,
			"since: '%.40s' is neither like 10m or 2h nor like 2026-11-30 or "
			"2026-11-30T08:00:00",
			text);
	when = time(NULL) - (time_t)(ago_ns / 1000000000);
	gmtime_r(&when, &tm);
	strftime(ret, 32, "%Y-%m-%dT%H:%M:%S", &tm);
	return 0;
}

static int audit_or_replay(int argc, char **argv, bool replay)
{
	static const struct option options[] = {
		{"since", required_argument, NULL, 's'},
		{"session", required_argument, NULL, 'S'},
		{"html", required_argument, NULL, 'H'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	const char *verb = replay ? "replay" : "audit", *help = replay ? replay_help : audit_help;
	struct listing l = {.since = "", .tell = tell_record};
	char dir[PATH_MAX];
	struct err err = {0};
	bool check = false;
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 's') {
			if (take_since(optarg, l.since, &err) < 0)
				return cli_bad_option(verb, &err);
		} else if (opt == 'S' && replay) {
			l.session = optarg;
		} else if (opt == 'H' && replay) {
			l.html_path = optarg;
		} else if (opt == 'j' && !replay) {
			l.json = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (!replay && argc - optind == 2 && !strcmp(argv[optind], "verify")) {
		check = true;
		optind++;
	}
	if (argc - optind != 1) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = home_find(argv[optind], dir, &err);
	if (r == 0 && check)
		r = verify(dir, l.json, &err);
	else if (r == 0 && l.html_path)
		r = write_page(&l, argv[optind], dir, &err);
	else if (r == 0)
		r = replay ? tell_all(&l, dir, &err) : audit_each(dir, list_record, &l, &err);
	return r < 0 ? cli_fail(verb, &err) : 0;
}

int audit_main(int argc, char **argv)
{
	return audit_or_replay(argc, argv, false);
}

int replay_main(int argc, char **argv)
{
	return audit_or_replay(argc, argv, true);
}
