// SPDX-License-Identifier: Apache-2.0
// The audit log of work on a folder; see the header. One thread.
#include "cli/work_log.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "mcp/audit.h"
#include "mcp/redact.h"

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
	char run[64] = "";
	ssize_t n = readlinkat(log->w->state_fd, "run", run, sizeof(run) - 1);

	run[MAX(n, (ssize_t)0)] = '\0';
	return json_pack("{s:s, s:s, s:I, s:s}", "event", event, "session", run, "call",
		(json_int_t)getpid(), "tool", log->tool);
}

int work_log_call(struct work_log *ret, const struct work_machine *w, const char *tool,
	const char *const *words, struct err *err)
{
	struct work_log log = {.w = w, .tool = tool, .start_ns = now_ns()};
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
	return audit_append(w->m.dir, record, 0, err);
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
	for (size_t i = 0; kept && i < MIN(kept->nr, (size_t)FILES_MAX); i++) {
		char quoted[WORK_QUOTED_MAX];

		json_array_append_new(
			files, json_sprintf("%c %.160s", letters[kept->changes[i].kind],
				       work_quote(quoted, kept->changes[i].path)));
	}
	if (kept) {
		json_object_set(record, "files", files);
		json_object_set_new(record, "changes", json_integer((json_int_t)kept->nr));
	}
	json_decref(files);
	// What is done is done.
	(void)audit_append(log->w->m.dir, record, 0, NULL);
}
