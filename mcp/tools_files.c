// SPDX-License-Identifier: Apache-2.0
// Tools for the machine's files. A thread a call.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mcp/text.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"

#define READ_DEFAULT_BYTES 65536U
#define EDIT_MAX_BYTES     (8 * MIB)
#define LIST_DEFAULT       500U
#define SEARCH_BYTES       (256 * KIB)
#define MATCH_LINE_BYTES   400U

// A path as folder and name; the strings are the caller's to free. -EINVAL for what has no name.
static int split(const char *path, char **ret_folder, const char **ret_name, struct err *err)
{
	const char *slash = strrchr(path, '/');
	const char *name = slash + 1;

	if (!name[0] || !strcmp(name, ".") || !strcmp(name, ".."))
		return err_set(err, -EINVAL, "path: '%.80s' names no file", path);
	*ret_folder = slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
	*ret_name = name;
	return *ret_folder ? 0 : err_errno(err, -ENOMEM, "path");
}

// --- Reading ---------------------------------------------------------------------------------

static const char *type_name(char type)
{
	switch (type) {
	case 'd':
		return "directory";
	case 'f':
	case 'h':
		return "file";
	case 'l':
		return "symlink";
	case 'p':
		return "fifo";
	case 's':
		return "socket";
	default:
		return "device";
	}
}

static json_t *tell_entry(const struct tree_entry *e, const char *name)
{
	char mode[8], when[40] = "";
	time_t t = (time_t)(e->mtime_ns / 1000000000);
	json_t *told;
	struct tm tm;

	snprintf(mode, sizeof(mode), "%04o", e->mode & 07777);
	told = json_pack("{s:o, s:s, s:s}", "name", text_printable(name, strlen(name)), "type",
		type_name(e->type), "mode", mode);
	if (e->type == 'f')
		json_object_set_new(told, "size", json_integer((json_int_t)e->size));
	if (e->has_owner) {
		json_object_set_new(told, "uid", json_integer(e->uid));
		json_object_set_new(told, "gid", json_integer(e->gid));
	}
	if (e->has_mtime && gmtime_r(&t, &tm) && strftime(when, sizeof(when), "%FT%TZ", &tm))
		json_object_set_new(told, "modified", json_string(when));
	if (e->type == 'l' && e->link)
		json_object_set_new(told, "target", text_printable(e->link, strlen(e->link)));
	return told;
}

static int stat_run(struct tool_call *call, struct err *err)
{
	const struct agent_get what = {.follow = arg_flag(call, "follow", true)};
	struct agent_files files = {.conn_fd = -1};
	struct tree_entry e = {0};
	const char *path;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_stat(&files, path, what.follow, &e, err);
	fd_close(&files.conn_fd);
	if (r < 0)
		return r;
	e.link = NULL;
	call->result = tell_entry(&e, path);
	return 0;
}

static int read_file(struct tool_call *call, struct err *err)
{
	const bool base64 = !strcmp(arg_text(call, "encoding", "utf-8"), "base64");
	uint64_t offset = arg_number(call, "offset", 0), size = 0;
	size_t limit = arg_number(call, "limit", READ_DEFAULT_BYTES), len = 0;
	struct agent_files files = {.conn_fd = -1};
	CLEANUP_FREE char *bytes = NULL;
	json_int_t next = (json_int_t)offset;
	const char *path;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_read(&files, path, offset, limit, &bytes, &len, &size, err);
	fd_close(&files.conn_fd);
	if (r == -EISDIR)
		err_wrap(err, r, "list_dir shows folders");
	if (r < 0)
		return r;
	atomic_fetch_add(&call->moved_bytes, len);
	call->result = json_object();
	next += (json_int_t)text_put(
		call->result, "content", "encoding", bytes, len, len == limit, base64);
	// Files of /proc are larger than they say.
	size = MAX(size, offset + len);
	json_object_set_new(call->result, "size", json_integer((json_int_t)size));
	json_object_set_new(call->result, "offset", json_integer((json_int_t)offset));
	if ((uint64_t)next < size || len == limit)
		json_object_set_new(call->result, "next_offset", json_integer(next));
	return 0;
}

struct listing {
	json_t *entries;
	size_t max, seen;
};

static int list_entry(void *ctx, const struct tree_entry *e, struct err *err)
{
	struct listing *l = ctx;

	if (!e->path[0]) // the top itself
		return e->type == 'd' ? 0 : err_set(err, -ENOTDIR, "it is no folder: see stat");
	if (l->seen++ < l->max && json_array_append_new(l->entries, tell_entry(e, e->path)) < 0)
		return err_errno(err, -ENOMEM, "list");
	return 0;
}

static int by_name(const void *a, const void *b)
{
	json_t *const *x = a, *const *y = b;

	return strcmp(json_string_value(json_object_get(*x, "name")),
		json_string_value(json_object_get(*y, "name")));
}

// The same list for the same folder, whatever order its disk has.
static json_t *sorted(json_t *array)
{
	size_t nr = json_array_size(array), i;
	json_t **all = calloc(nr + 1, sizeof(json_t *)), *out = json_array(), *item;

	if (!all)
		return out;
	json_array_foreach(array, i, item) all[i] = item;
	qsort(all, nr, sizeof(json_t *), by_name);
	for (i = 0; i < nr; i++)
		json_array_append(out, all[i]);
	free(all);
	return out;
}

static int list_dir(struct tool_call *call, struct err *err)
{
	struct listing l = {
		.entries = json_array(), .max = arg_number(call, "limit", LIST_DEFAULT)};
	const struct agent_get what = {.depth = 1, .owner = true, .follow = true};
	const struct agent_list to = {.entry = list_entry, .ctx = &l};
	struct agent_files files = {.conn_fd = -1};
	const char *path;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_list(&files, path, &what, &to, err);
	// What could not be read is missing from the list, and no reason not to show the rest.
	if (r == -EIO)
		r = 0;
	fd_close(&files.conn_fd);
	if (r == 0)
		call->result = json_pack(
			"{s:o, s:I}", "entries", sorted(l.entries), "total", (json_int_t)l.seen);
	json_decref(l.entries);
	return r;
}

// --- Searching -------------------------------------------------------------------------------

// "PATH:LINE:TEXT" as grep prints it.
static void tell_match(json_t *matches, const char *line, size_t len)
{
	for (const char *colon = memchr(line, ':', len); colon;
		colon = memchr(colon + 1, ':', len - (size_t)(colon + 1 - line))) {
		char *end;
		long number = strtol(colon + 1, &end, 10);
		size_t rest;

		if (end == colon + 1 || *end != ':' || number <= 0)
			continue;
		rest = len - (size_t)(end + 1 - line);
		json_array_append_new(matches,
			json_pack("{s:o, s:I, s:o}", "path",
				text_printable(line, (size_t)(colon - line)), "line",
				(json_int_t)number, "text",
				text_printable(end + 1, MIN(rest, (size_t)MATCH_LINE_BYTES))));
		return;
	}
}

static int search_files(struct tool_call *call, struct err *err)
{
	const char *pattern = arg_text(call, "pattern", NULL), *name = arg_text(call, "name", NULL);
	const char *argv[24] = {"find"}, *path;
	const size_t max = arg_number(call, "limit", 200);
	json_t *matches = json_array();
	struct buf out = {0};
	bool cut = false;
	size_t n = 1;
	int r = arg_path(call, "path", &path, err);

	argv[n++] = path;
	if (pattern) {
		argv[n++] = "-type";
		argv[n++] = "f";
	}
	if (name) {
		argv[n++] = "-name";
		argv[n++] = name;
	}
	if (pattern) {
		argv[n++] = "-exec";
		argv[n++] = "grep";
		argv[n++] = arg_flag(call, "ignore_case", false) ? "-HnEi" : "-HnE";
		argv[n++] = "-e";
		argv[n++] = pattern;
		argv[n++] = "{}";
		argv[n++] = "+";
	}
	if (r == 0 && !pattern && !name)
		r = err_set(err, -EINVAL, "give a pattern (in the files), a name, or both");
	if (r == 0)
		r = call_ask(call, argv, SEARCH_BYTES, &out, &cut, err);
	buf_append(&out, "", 1); // an end for strtol()
	for (size_t at = 0, len; r >= 0 && at + 1 < out.len; at += len + 1) {
		const char *line = (char *)out.data + at;
		const char *end = memchr(line, '\n', out.len - at);

		len = end ? (size_t)(end - line) : out.len - at - 1;
		cut |= json_array_size(matches) == max;
		if (!end || json_array_size(matches) == max)
			break; // a line that was cut is none
		if (pattern)
			tell_match(matches, line, len);
		else
			json_array_append_new(
				matches, json_pack("{s:o}", "path", text_printable(line, len)));
	}
	buf_fini(&out);
	if (r >= 0)
		call->result = json_pack("{s:O, s:b}", "matches", matches, "truncated", cut);
	json_decref(matches);
	return MIN(r, 0);
}

// --- Changing --------------------------------------------------------------------------------

static int write_bytes(struct tool_call *call, const char *path, uint32_t mode, bool parents,
	const void *bytes, size_t len, struct err *err)
{
	struct agent_files files = {.conn_fd = -1};
	CLEANUP_FREE char *folder = NULL;
	struct agent_put to = {.keep = true, .parents = parents};
	int r = split(path, &folder, &to.name, err);

	to.folder = folder;
	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_write(&files, &to, mode, bytes, len, err);
	fd_close(&files.conn_fd);
	if (r == 0)
		atomic_fetch_add(&call->moved_bytes, len);
	return r;
}

static int write_file(struct tool_call *call, struct err *err)
{
	const bool base64 = !strcmp(arg_text(call, "encoding", "utf-8"), "base64");
	const char *path, *mode = arg_text(call, "mode", "0644");
	struct buf bytes = {0};
	char *end;
	unsigned long bits = strtoul(mode, &end, 8);
	int r = arg_path(call, "path", &path, err);

	if (r == 0 && (*end || bits > 07777))
		r = err_set(err, -EINVAL, "mode: '%.20s' is not octal like 0755", mode);
	if (r == 0)
		r = text_get(json_object_get(call->arguments, "content"), base64, &bytes, err);
	if (r == 0)
		r = write_bytes(call, path, (uint32_t)bits, true, bytes.data, bytes.len, err);
	if (r == 0)
		call->result = json_pack("{s:I}", "size", (json_int_t)bytes.len);
	buf_fini(&bytes);
	return r;
}

// Replaces old by new in text. Returns how often.
static size_t replace(
	const char *text, size_t len, const char *old, const char *new, struct buf *out)
{
	size_t old_len = strlen(old), at = 0, n = 0;

	for (const char *hit; (hit = memmem(text + at, len - at, old, old_len)); n++) {
		buf_append(out, text + at, (size_t)(hit - text) - at);
		buf_append(out, new, strlen(new));
		at = (size_t)(hit - text) + old_len;
	}
	buf_append(out, text + at, len - at);
	return n;
}

static int edit_file(struct tool_call *call, struct err *err)
{
	const char *old = arg_text(call, "old_text", ""), *path;
	struct agent_files files = {.conn_fd = -1};
	CLEANUP_FREE char *text = NULL;
	struct buf out = {0};
	size_t len = 0, n = 0;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_read(&files, path, 0, EDIT_MAX_BYTES, &text, &len, NULL, err);
	fd_close(&files.conn_fd);
	if (r == 0 && len == EDIT_MAX_BYTES)
		r = err_set(err, -EFBIG, "%s is too large to edit: use sed through exec", path);
	if (r == 0) {
		n = replace(text, len, old, arg_text(call, "new_text", ""), &out);
		if (buf_error(&out) < 0)
			r = err_errno(err, -ENOMEM, "%s", path);
		else if (n == 0)
			r = err_set(err, -ENOENT,
				"old_text is not in %s: read_file shows what is, and it has to "
				"match in "
				"every blank",
				path);
		else if (n > 1 && !arg_flag(call, "replace_all", false))
			r = err_set(err, -EEXIST,
				"old_text is in %s %zu times: give more of what is around it, or "
				"replace_all",
				path, n);
	}
	if (r == 0)
		r = write_bytes(call, path, 0644, false, out.data, out.len, err);
	buf_fini(&out);
	if (r == 0)
		call->result = json_pack("{s:I}", "replacements", (json_int_t)n);
	return r;
}

static int mkdir_run(struct tool_call *call, struct err *err)
{
	struct agent_files files = {.conn_fd = -1};
	const char *path;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_mkdir(&files, path, err);
	fd_close(&files.conn_fd);
	if (r == 0)
		call->result = json_object();
	return r;
}

static int remove_run(struct tool_call *call, struct err *err)
{
	struct agent_files files = {.conn_fd = -1};
	const char *path;
	int r = arg_path(call, "path", &path, err);

	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_remove(&files, path, arg_flag(call, "recursive", false), err);
	fd_close(&files.conn_fd);
	if (r == -ENOTEMPTY || r == -EISDIR)
		err_wrap(err, r, "give recursive to remove what is in it, too");
	if (r == 0)
		call->result = json_object();
	return r;
}

static int move_run(struct tool_call *call, struct err *err)
{
	struct agent_files files = {.conn_fd = -1};
	const char *from, *to;
	int r = arg_path(call, "from", &from, err);

	if (r == 0)
		r = arg_path(call, "to", &to, err);
	if (r == 0)
		r = call_files(call, &files, err);
	if (r == 0)
		r = agent_rename(&files, from, to, arg_flag(call, "replace", false), err);
	fd_close(&files.conn_fd);
	if (r == -EEXIST)
		err_wrap(err, r, "give replace to move it over what is there");
	if (r == 0)
		call->result = json_object();
	return r;
}

// --- What they are called and take -----------------------------------------------------------

// clang-format off
#define PATH_PROPERTY(name, says) \
	"\"" name "\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":4095,\"description\":\"" says "\"}"
#define ENCODING_PROPERTY(says) \
	"\"encoding\":{\"type\":\"string\",\"enum\":[\"utf-8\",\"base64\"],\"default\":\"utf-8\",\"description\":\"" says "\"}"
#define COUNT "{\"type\":\"integer\",\"minimum\":0}"
#define NOTHING "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{}}"
#define ENTRY \
	"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" \
	"\"name\":{\"type\":\"string\"}," \
	"\"type\":{\"type\":\"string\",\"enum\":[\"directory\",\"file\",\"symlink\",\"fifo\",\"socket\",\"device\"]}," \
	"\"mode\":{\"type\":\"string\"},\"size\":" COUNT ",\"uid\":" COUNT ",\"gid\":" COUNT "," \
	"\"modified\":{\"type\":\"string\"},\"target\":{\"type\":\"string\"}},\"required\":[\"name\",\"type\",\"mode\"]}"

const struct tool file_tools[] = {
	{
		.name = "read_file", .title = "Read a file", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Reads a file, or a stretch of it. What is not text comes as base64. If the result has a "
			"next_offset there is more.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the file") ","
			"\"offset\":{\"type\":\"integer\",\"minimum\":0,\"default\":0,\"description\":\"first byte\"},"
			"\"limit\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":1048576,\"default\":65536,\"description\":\"bytes at most\"},"
			ENCODING_PROPERTY("base64: also of text") "},\"required\":[\"path\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"content\":{\"type\":\"string\"},\"encoding\":{\"type\":\"string\",\"enum\":[\"utf-8\",\"base64\"]},"
			"\"size\":" COUNT ",\"offset\":" COUNT ",\"next_offset\":" COUNT "},"
			"\"required\":[\"content\",\"encoding\",\"size\",\"offset\"]}",
		.read_only = true, .idempotent = true, .run = read_file,
	},
	{
		.name = "list_dir", .title = "List a folder", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists what is in a folder, by name. If total is more than the entries shown, raise limit.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the folder") ","
			"\"limit\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":5000,\"default\":500}},\"required\":[\"path\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"entries\":{\"type\":\"array\",\"items\":" ENTRY "},\"total\":" COUNT "},\"required\":[\"entries\",\"total\"]}",
		.read_only = true, .idempotent = true, .run = list_dir,
	},
	{
		.name = "stat", .title = "Look at a path", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Tells the type, size, mode, owner and time of a path.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path") ","
			"\"follow\":{\"type\":\"boolean\",\"default\":true,\"description\":\"of a symbolic link: what it points to\"}},\"required\":[\"path\"]}",
		.output = ENTRY, .read_only = true, .idempotent = true, .run = stat_run,
	},
	{
		.name = "search_files", .title = "Search in files", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Finds files by name, or lines that match a pattern in the files below a folder, or both.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the folder to begin in") ","
			"\"pattern\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":4000,\"description\":\"extended regular expression (grep -E) for lines\"},"
			"\"name\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":255,\"description\":\"file names like *.c\"},"
			"\"ignore_case\":{\"type\":\"boolean\",\"default\":false},"
			"\"limit\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":2000,\"default\":200}},\"required\":[\"path\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"matches\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"path\":{\"type\":\"string\"},\"line\":" COUNT ",\"text\":{\"type\":\"string\"}},\"required\":[\"path\"]}},"
			"\"truncated\":{\"type\":\"boolean\"}},\"required\":[\"matches\",\"truncated\"]}",
		.read_only = true, .idempotent = true, .run = search_files,
	},
	{
		.name = "write_file", .title = "Write a file", .level = CONFIG_ACCESS_MANAGE,
		.description = "Writes a whole file, all or nothing, over what is there; folders on the way are made. A file "
			"that is there keeps its mode.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the file") ","
			"\"content\":{\"type\":\"string\"},"
			ENCODING_PROPERTY("of content") ","
			"\"mode\":{\"type\":\"string\",\"minLength\":3,\"maxLength\":5,\"default\":\"0644\",\"description\":\"of a new file, like 0755\"}},\"required\":[\"path\",\"content\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"size\":" COUNT "},\"required\":[\"size\"]}",
		.destructive = true, .idempotent = true, .run = write_file, .changes = "Mpath",
	},
	{
		.name = "edit_file", .title = "Edit a file", .level = CONFIG_ACCESS_MANAGE,
		.description = "Replaces text in a file. old_text has to be in it exactly once, or give replace_all.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the file") ","
			"\"old_text\":{\"type\":\"string\",\"minLength\":1,\"description\":\"as it is in the file, blanks and newlines too\"},"
			"\"new_text\":{\"type\":\"string\"},"
			"\"replace_all\":{\"type\":\"boolean\",\"default\":false}},\"required\":[\"path\",\"old_text\",\"new_text\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"replacements\":" COUNT "},\"required\":[\"replacements\"]}",
		.destructive = true, .run = edit_file, .changes = "Mpath",
	},
	{
		.name = "mkdir", .title = "Make a folder", .level = CONFIG_ACCESS_MANAGE,
		.description = "Makes a folder, with those on the way to it. One that is there is no error.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path of the folder") "},\"required\":[\"path\"]}",
		.output = NOTHING, .idempotent = true, .run = mkdir_run, .changes = "Apath",
	},
	{
		.name = "remove", .title = "Remove a path", .level = CONFIG_ACCESS_MANAGE,
		.description = "Removes a file, a link or an empty folder; with recursive a folder and all that is in it.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("path", "whole path") ","
			"\"recursive\":{\"type\":\"boolean\",\"default\":false}},\"required\":[\"path\"]}",
		.output = NOTHING, .destructive = true, .run = remove_run, .changes = "Dpath",
	},
	{
		.name = "move", .title = "Move a path", .level = CONFIG_ACCESS_MANAGE,
		.description = "Renames or moves a file or folder within one file system.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("from", "whole path") ","
			PATH_PROPERTY("to", "whole path of its new name, not of the folder to put it in") ","
			"\"replace\":{\"type\":\"boolean\",\"default\":false,\"description\":\"over what is there\"}},\"required\":[\"from\",\"to\"]}",
		.output = NOTHING, .destructive = true, .run = move_run, .changes = "Dfrom Ato",
	},
};
// clang-format on

const size_t nr_file_tools = ARRAY_SIZE(file_tools);
