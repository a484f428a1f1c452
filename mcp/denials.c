// SPDX-License-Identifier: Apache-2.0
// Refused requests; see the header. Any thread.
#include "mcp/denials.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/text.h"
#include "vmm/base/fd.h"

#define READ_BYTES  (256 * KIB) // of the log, the first since the mark
#define DENIALS_MAX 16U

static int open_log(const char *dir, struct stat *ret)
{
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/egress/audit.jsonl", dir) >= (int)sizeof(path))
		return -1;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	return fd < 0 || fstat(fd, ret) < 0 ? -1 : TAKE_FD(fd);
}

struct denials_mark denials_now(const char *dir)
{
	struct stat st;
	CLEANUP_FD int fd = open_log(dir, &st);

	return fd < 0 ? (struct denials_mark){0} : (struct denials_mark){st.st_ino, st.st_size};
}

// Those of the same kind are told together.
static void add(json_t *list, const json_t *record)
{
	static const char *const keys[] = {"host", "port", "reason"};
	const char *host = json_string_value(json_object_get(record, "host"));
	const char *reason = json_string_value(json_object_get(record, "reason"));
	json_t *told, *other;
	size_t i;

	told = json_pack("{s:o, s:I, s:o, s:i}", "host",
		text_printable(host ? host : "", host ? strlen(host) : 0), "port",
		json_integer_value(json_object_get(record, "port")), "reason",
		text_printable(reason ? reason : "", reason ? strlen(reason) : 0), "times", 1);
	json_array_foreach(list, i, other)
	{
		bool same = true;

		for (size_t k = 0; k < ARRAY_SIZE(keys); k++)
			same &= json_equal(json_object_get(told, keys[k]),
					json_object_get(other, keys[k])) != 0;
		if (!same)
			continue;
		json_object_set_new(other, "times",
			json_integer(json_integer_value(json_object_get(other, "times")) + 1));
		json_decref(told);
		return;
	}
	if (json_array_size(list) < DENIALS_MAX)
		json_array_append(list, told);
	json_decref(told);
}

json_t *denials_since(const char *dir, struct denials_mark *mark)
{
	CLEANUP_FREE char *text = NULL;
	struct stat st;
	CLEANUP_FD int fd = open_log(dir, &st);
	json_t *list;
	// A log that was begun anew meanwhile is new to its beginning.
	const off_t start = fd >= 0 && mark->ino == st.st_ino ? mark->end : 0;
	ssize_t len;

	if (fd < 0 || st.st_size <= start || !(text = malloc(READ_BYTES)))
		return NULL;
	len = fd_pread_full(fd, text, READ_BYTES, start);
	list = json_array();
	*mark = (struct denials_mark){st.st_ino, start};
	for (ssize_t at = 0, n; at < len; at += n + 1) {
		const char *end = memchr(text + at, '\n', (size_t)(len - at));
		const char *decision;
		json_t *record;

		if (!end)
			break;
		n = end - (text + at);
		mark->end += n + 1;
		record = json_loadb(text + at, (size_t)n, JSON_REJECT_DUPLICATES, NULL);
		decision = json_string_value(json_object_get(record, "decision"));
		if (decision && !strcmp(decision, "denied"))
			add(list, record);
		json_decref(record);
	}
	if (json_array_size(list))
		return list;
	json_decref(list);
	return NULL;
}
