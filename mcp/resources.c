// SPDX-License-Identifier: Apache-2.0
// Resources; see the header. A thread a call.
#include "mcp/resources.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mcp/text.h"
#include "vmm/base/parse.h"

#define SCHEME     "mayfly://"
#define PAGE_ITEMS 50U
#define READ_BYTES MIB
#define TAIL_BYTES (256 * KIB)

// --- URIs ------------------------------------------------------------------------------------

static int hex_of(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// Whether all of it could be decoded, fits, and holds no NUL.
static bool decode(const char *text, size_t len, char *ret, size_t size)
{
	size_t n = 0;

	for (size_t i = 0; i < len; i++) {
		int high, low;

		if (n + 1 >= size)
			return false;
		if (text[i] != '%') {
			ret[n++] = text[i];
			continue;
		}
		high = len - i > 2 ? hex_of(text[i + 1]) : -1;
		low = len - i > 2 ? hex_of(text[i + 2]) : -1;
		if (high < 0 || low < 0 || (high | low) == 0)
			return false;
		ret[n++] = (char)(16 * high + low);
		i += 2;
	}
	ret[n] = '\0';
	return true;
}

static bool parse_job(const char *text, struct resource *ret)
{
	const char *slash = strchr(text, '/');

	ret->kind = RESOURCE_JOB;
	ret->is_err = slash && !strcmp(slash, "/stderr");
	return slash && slash > text && (ret->is_err || !strcmp(slash, "/stdout")) &&
	       decode(text, (size_t)(slash - text), ret->name, sizeof(ret->name));
}

int resource_parse(const char *uri, struct resource *ret, struct err *err)
{
	const char *rest = uri + strlen(SCHEME);
	struct resource r = {.kind = RESOURCE_CONSOLE};
	bool good = false;

	if (!strncmp(uri, SCHEME, strlen(SCHEME))) {
		if (!strcmp(rest, "console")) {
			good = true;
		} else if (!strncmp(rest, "jobs/", 5)) {
			good = parse_job(rest + 5, &r);
		} else if (!strncmp(rest, "files/", 6)) {
			r.kind = RESOURCE_FILE;
			good = decode(rest + 5, strlen(rest + 5), r.name, sizeof(r.name));
		}
	}
	if (!good)
		return err_set(err, -ENOENT,
			"there is no resource '%.200s': resources/list and "
			"resources/templates/list tell what there is",
			uri);
	*ret = r;
	return 0;
}

// --- What tools tell -------------------------------------------------------------------------

// Runs a tool with other arguments (taken over) in this call's place. Its result, the caller's.
static int ask(
	struct tool_call *call, const char *name, json_t *arguments, json_t **ret, struct err *err)
{
	const struct tool *tool = tools_find(name, CONFIG_ACCESS_OBSERVE, NULL);
	struct tool_call inner = {
		.machine = call->machine,
		.outputs = call->outputs,
		.client = call->client,
		.arguments = arguments,
		.cancel_fd = call->cancel_fd,
		.exit_code = -1,
	};
	int r;

	ASSERT(tool);
	r = arguments ? tool->run(&inner, err) : err_errno(err, -ENOMEM, "%s", name);
	json_decref(arguments);
	if (r == 0)
		*ret = inner.result;
	else
		json_decref(inner.result);
	return r;
}

static json_t *content_of(const char *uri, const json_t *text, const json_t *encoding)
{
	const char *word = json_string_value(encoding);
	bool binary = word && !strcmp(word, "base64");

	return json_pack("{s:[{s:s, s:s, s:O}]}", "contents", "uri", uri, "mimeType",
		binary ? "application/octet-stream" : "text/plain", binary ? "blob" : "text", text);
}

static int read_file(
	struct tool_call *call, const struct resource *r, json_t **ret, struct err *err)
{
	int rc = ask(call, "read_file",
		json_pack("{s:o, s:I}", "path", text_printable(r->name, strlen(r->name)), "limit",
			(json_int_t)READ_BYTES),
		ret, err);

	if (rc < 0 || !json_object_get(*ret, "next_offset"))
		return rc;
	json_decref(*ret);
	return err_set(err, -EFBIG,
		"'%.200s' is larger than 1 MiB: the tool read_file reads it in pieces", r->name);
}

static int run_read(struct tool_call *call, struct err *err)
{
	const char *uri = arg_text(call, "uri", ""), *key = "console";
	CLEANUP_FREE struct resource *what = malloc(sizeof(*what));
	json_t *told = NULL;
	int r;

	if (!what)
		return err_errno(err, -ENOMEM, "resource");
	r = resource_parse(uri, what, err);
	if (r < 0)
		return r;
	switch (what->kind) {
	case RESOURCE_CONSOLE:
		r = ask(call, "logs", json_pack("{s:I}", "max_bytes", (json_int_t)TAIL_BYTES),
			&told, err);
		break;
	case RESOURCE_JOB:
		key = "output";
		r = ask(call, "job_output",
			json_pack("{s:o, s:s, s:I}", "job",
				text_printable(what->name, strlen(what->name)), "stream",
				what->is_err ? "stderr" : "stdout", "max_bytes",
				(json_int_t)TAIL_BYTES),
			&told, err);
		break;
	case RESOURCE_FILE:
		key = "content";
		r = read_file(call, what, &told, err);
		break;
	}
	if (r < 0)
		return r;
	call->result = content_of(
		uri, json_object_get(told, key), json_object_get(told, "encoding"));
	json_decref(told);
	return 0;
}

// --- Lists -----------------------------------------------------------------------------------

static void add(json_t *list, const char *uri, const char *name, const char *description)
{
	json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "uri", uri, "name", name,
					    "description", description, "mimeType", "text/plain"));
}

static void add_jobs(json_t *list, const json_t *jobs)
{
	const json_t *job;
	size_t i;

	json_array_foreach(jobs, i, job)
	{
		const char *name = json_string_value(json_object_get(job, "job"));
		char uri[256], title[128];

		// What names of jobs are made of needs no escaping; a guest that lies is left out.
		if (!name || !*name || strlen(name) > 63 ||
			name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
					  "0123456789._-")])
			continue;
		for (int is_err = 0; is_err < 2; is_err++) {
			const char *stream = is_err ? "stderr" : "stdout";

			snprintf(uri, sizeof(uri), SCHEME "jobs/%s/%s", name, stream);
			snprintf(title, sizeof(title), "%s of %s", stream, name);
			add(list, uri, title, "the end of what the job has written");
		}
	}
}

static int run_list(struct tool_call *call, struct err *err)
{
	const char *cursor = arg_text(call, "cursor", "0");
	json_t *all = json_array(), *page = json_array(), *jobs = NULL;
	struct err ignored = {0};
	uint64_t from;
	char next[24];
	int r;

	add(all, SCHEME "console", "console", "the end of what the kernel and init have printed");
	// A machine that is down has no jobs.
	r = ask(call, "jobs", json_object(), &jobs, &ignored);
	if (r == 0)
		add_jobs(all, json_object_get(jobs, "jobs"));
	json_decref(jobs);
	r = parse_uint(cursor, 0, json_array_size(all), &from, err);
	if (r < 0)
		err_wrap(err, r, "cursor");
	for (size_t i = from; r == 0 && i < MIN(from + PAGE_ITEMS, json_array_size(all)); i++)
		json_array_append(page, json_array_get(all, i));
	if (r == 0)
		call->result = json_pack("{s:O}", "resources", page);
	if (r == 0 && from + PAGE_ITEMS < json_array_size(all)) {
		snprintf(next, sizeof(next), "%llu", (unsigned long long)from + PAGE_ITEMS);
		json_object_set_new(call->result, "nextCursor", json_string(next));
	}
	json_decref(all);
	json_decref(page);
	return MIN(r, 0);
}

json_t *resources_templates(void)
{
	return json_pack("{s:[{s:s, s:s, s:s}, {s:s, s:s, s:s, s:s}]}", "resourceTemplates",
		"uriTemplate", SCHEME "files{+path}", "name", "file", "description",
		"a file of the machine, up to 1 MiB; path is whole, as /etc/hostname",
		"uriTemplate", SCHEME "jobs/{job}/{stream}", "name", "job output", "description",
		"the end of what a job has written; stream is stdout or stderr", "mimeType",
		"text/plain");
}

const struct tool resources_list = {
	.name = "resources/list",
	.level = CONFIG_ACCESS_OBSERVE,
	.is_method = true,
	.read_only = true,
	.run = run_list,
};
const struct tool resources_read = {
	.name = "resources/read",
	.level = CONFIG_ACCESS_OBSERVE,
	.is_method = true,
	.read_only = true,
	.run = run_read,
};
