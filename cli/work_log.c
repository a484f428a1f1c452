// SPDX-License-Identifier: Apache-2.0
// The audit log of work on a folder; see the header. One thread.
#include "cli/work_log.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "mcp/audit.h"
#include "mcp/redact.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"
#include "work/history.h"

#define RUN_BYTES 16
#define FILES_MAX 200 // of a record, which is a line of the log

int work_log_start(const struct work_machine *w, struct err *err)
{
	char text[2 * RUN_BYTES + 1];
	uint8_t id[RUN_BYTES];

	if (getrandom(id, sizeof(id), 0) != sizeof(id))
		return err_errno(err, -EIO, "getrandom");
	for (size_t i = 0; i < sizeof(id); i++)
		snprintf(text + 2 * i, 3, "%02x", id[i]);
	return symlinkat(text, w->state_fd, "run") < 0 ? err_errno(err, -errno, "work/run") : 0;
}

static json_t *record_of(const struct work_log *log, const char *event)
{
	CLEANUP_FD int state_fd = work_state_open(log->dir, NULL);
	char run[64] = "";
	ssize_t n = readlinkat(state_fd, "run", run, sizeof(run) - 1);

	run[MAX(n, (ssize_t)0)] = '\0';
	return json_pack("{s:s, s:s, s:I, s:s}", "event", event, "session", run, "call",
		(json_int_t)getpid(), "tool", log->tool);
}

int work_log_call(struct work_log *ret, const char *dir, const char *tool, const char *const *words,
	struct err *err)
{
	struct work_log log = {.dir = dir, .tool = tool, .start_ns = now_ns()};
	json_t *record = record_of(&log, "call"), *list = json_array();
	json_t *arguments = json_pack("{s:o}", "argv", list);

	for (; *words; words++) {
		char quoted[WORK_QUOTED_MAX];
		json_t *word = json_string(*words);

		json_array_append_new(list, word ? word : json_string(work_quote(quoted, *words)));
	}
	json_object_set_new(record, "arguments", redact_arguments(arguments));
	json_decref(arguments);
	*ret = log;
	return audit_append(dir, record, 0, err);
}

static void add_files(json_t *record, size_t nr, json_t *files)
{
	json_object_set_new(record, "files", files);
	json_object_set_new(record, "changes", json_integer((json_int_t)nr));
}

static void add_file(json_t *files, char letter, const char *path)
{
	char quoted[WORK_QUOTED_MAX];

	json_array_append_new(files, json_sprintf("%c %.160s", letter, work_quote(quoted, path)));
}

void work_log_result(const struct work_log *log, int rc, const struct err *err, int status,
	const struct work_plan *kept)
{
	static const char letters[] = "AMD";
	json_t *record = record_of(log, "result"), *files = json_array();

	json_object_set_new(record, "outcome", json_string(rc < 0 ? "error" : "ok"));
	if (rc < 0)
		json_object_set_new(record, "error", redact_text(err->msg, strlen(err->msg)));
	if (status >= 0)
		json_object_set_new(record, "exit_code", json_integer(status));
	json_object_set_new(record, "result_bytes", json_integer(0));
	json_object_set_new(record, "duration_ms",
		json_integer((json_int_t)((now_ns() - log->start_ns) / 1000000)));
	for (size_t i = 0; kept && i < MIN(kept->nr, (size_t)FILES_MAX); i++)
		add_file(files, letters[kept->changes[i].kind], kept->changes[i].path);
	if (kept)
		add_files(record, kept->nr, json_incref(files));
	json_decref(files);
	// What is done is done.
	(void)audit_append(log->dir, record, 0, NULL);
}

void work_log_point(const char *dir, const struct work_point *p)
{
	const struct work_log log = {.dir = dir, .tool = "history"};
	json_t *record = record_of(&log, "change"), *files = json_array();

	for (size_t i = 0; i < MIN(p->nr_deltas, (size_t)FILES_MAX); i++) {
		const struct work_delta *d = &p->deltas[i];

		add_file(files, !d->old.type ? 'A' : !d->new.type ? 'D' : 'M', work_delta_path(d));
	}
	add_files(record, p->nr_deltas, files);
	json_object_set_new(record, "outcome", json_string("ok"));
	json_object_set_new(record, "duration_ms", json_integer(0));
	json_object_set_new(record, "result_bytes", json_integer(0));
	json_object_set_new(record, "point", json_integer((json_int_t)p->nr));
	(void)audit_append(dir, record, 0, NULL);
}

// --- Who it was ------------------------------------------------------------------------------

#define WHO_MAX  16
#define WHAT_MAX 200

struct who {
	uint64_t since;
	json_t *calls; // by session and number: those that may have been at work since then
};

static const char *text_of(const json_t *record, const char *key)
{
	const char *text = json_string_value(json_object_get(record, key));

	return text ? text : "";
}

static bool changes_files(const char *name)
{
	const struct tool *tool = tools_find(name, CONFIG_ACCESS_MANAGE, NULL);

	return strcmp(name, "keep") != 0 && !(tool && tool->read_only);
}

// Of this host's commands the number is their process id.
static bool still_runs(const json_t *call)
{
	return json_is_true(json_object_get(call, "ours")) &&
	       kill((pid_t)json_integer_value(json_object_get(call, "call")), 0) == 0;
}

static json_t *words_of(const json_t *record)
{
	const json_t *arguments = json_object_get(record, "arguments"), *word;
	const json_t *argv = json_object_get(arguments, "argv");
	CLEANUP_FREE char *dump = NULL;
	char text[WHAT_MAX + 4] = "";
	size_t i, n = 0;

	if (!json_is_array(argv)) {
		dump = json_dumps(arguments, JSON_COMPACT | JSON_ENSURE_ASCII);
		snprintf(text, sizeof(text), "%.*s", WHAT_MAX, dump ? dump : "");
		return json_string(text);
	}
	json_array_foreach(argv, i, word)
	{
		const char *s = json_string_value(word);

		if (n && n < WHAT_MAX)
			text[n++] = ' ';
		for (; s && *s && n < WHAT_MAX; s++)
			text[n++] = *s >= ' ' && *s < 0x7f ? *s : '?';
	}
	text[n] = '\0';
	return json_string(text);
}

static int look_at_record(void *opaque, const json_t *record)
{
	struct who *who = opaque;
	uint64_t seq = (uint64_t)json_integer_value(json_object_get(record, "seq"));
	json_t *call;
	char key[64];

	snprintf(key, sizeof(key), "%.40s %lld", text_of(record, "session"),
		(long long)json_integer_value(json_object_get(record, "call")));
	if (!strcmp(text_of(record, "event"), "call") && changes_files(text_of(record, "tool"))) {
		call = json_pack("{s:s, s:s, s:I, s:o, s:b, s:I}", "tool", text_of(record, "tool"),
			"session", text_of(record, "session"), "call",
			json_integer_value(json_object_get(record, "call")), "what",
			words_of(record), "ours", !json_object_get(record, "client"), "seq",
			(json_int_t)seq);
		if (json_object_get(record, "client"))
			json_object_set_new(call, "client", json_string(text_of(record, "client")));
		return json_object_set_new(who->calls, key, call) < 0 ? -ENOMEM : 0;
	}
	// It had ended by then.
	if (!strcmp(text_of(record, "event"), "result") && seq <= who->since)
		json_object_del(who->calls, key);
	else if (!strcmp(text_of(record, "event"), "result"))
		json_object_set_new(
			json_object_get(who->calls, key), "seq", json_integer((json_int_t)seq));
	return 0;
}

uint64_t work_log_last(const char *dir)
{
	uint64_t seq = 0;

	return audit_last(dir, &seq) < 0 ? 0 : seq;
}

int work_log_who(const char *dir, uint64_t seq, char *ret, size_t size, struct err *err)
{
	struct who who = {.since = seq, .calls = json_object()};
	json_t *list = json_array(), *call;
	CLEANUP_FREE char *text = NULL;
	const char *key;
	int r = audit_each(dir, look_at_record, &who, err);

	if (r == -ENOENT)
		r = 0;
	json_object_foreach(who.calls, key, call)
	{
		// One that nobody has ended, and that is older: its process may be dead.
		if ((uint64_t)json_integer_value(json_object_get(call, "seq")) <= seq &&
			!still_runs(call))
			continue;
		json_object_del(call, "ours");
		json_object_del(call, "seq");
		json_array_append(list, call);
		if (json_array_size(list) > WHO_MAX)
			json_array_remove(list, 0);
	}
	text = json_dumps(list, JSON_COMPACT | JSON_ENSURE_ASCII);
	if (r == 0 && (!text || strlen(text) >= size))
		r = err_errno(err, -ENOMEM, "audit");
	if (r == 0 && text)
		strcpy(ret, text);
	json_decref(list);
	json_decref(who.calls);
	return r;
}
