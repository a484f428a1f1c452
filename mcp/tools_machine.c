// SPDX-License-Identifier: Apache-2.0
// Tools that look at the machine as a whole, and take it back to what it was. A thread a call.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/control_client.h"
#include "mcp/audit.h"
#include "mcp/level.h"
#include "mcp/text.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"

#define CONTROL_NS      10000000000ULL
#define PROCESSES_MAX   1000U
#define PROCESSES_BYTES MIB
#define ARGS_BYTES      200U
#define PORTS_MAX       1024U
#define SNAPSHOTS_MAX   32U
#define FORKS_MAX       8U

// --- What it is ------------------------------------------------------------------------------

// Copies members of the guest's word that are whole numbers, or text.
static void copy_facts(json_t *to, const json_t *facts)
{
	static const char *const numbers[] = {"uptime_ns", "processes", "load_1m_milli",
		"memory_total_bytes", "memory_available_bytes", "disk_total_bytes",
		"disk_available_bytes"};
	static const char *const texts[] = {"hostname", "kernel"};

	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
		const json_t *value = json_object_get(facts, numbers[i]);

		if (json_is_integer(value))
			json_object_set_new(
				to, numbers[i], json_integer(json_integer_value(value)));
	}
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		const json_t *value = json_object_get(facts, texts[i]);

		if (json_is_string(value))
			json_object_set_new(to, texts[i],
				text_printable(json_string_value(value),
					MIN(json_string_length(value), (size_t)256)));
	}
}

// The agent's word on the guest, the caller's.
static int get_facts(const struct tool_call *call, json_t **ret, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = call_connect(call, err);
	int r = fd < 0 ? fd
		       : agent_facts(fd, call->cancel_fd, now_ns() + CALL_ANSWER_NS, &text, err);

	if (r < 0)
		return r;
	*ret = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	return json_is_object(*ret) ? 0
				    : err_set(err, -EPROTO, "the guest's answer makes no sense");
}

static int status_run(struct tool_call *call, struct err *err)
{
	const struct mcp_machine *m = call->machine;
	enum config_access level = CONFIG_ACCESS_NONE;
	json_t *status = NULL, *facts = NULL;
	CLEANUP_FD int fd = control_connect(m->run_dir, NULL);
	const char *state;
	int r = level_read(m->dir, &level, err);

	if (r < 0)
		return r;
	// A machine that is down is an answer, not a failure.
	if (fd >= 0 &&
		control_call(fd, "status", NULL, -1, now_ns() + CONTROL_NS, &status, err) < 0)
		fd_close(&fd);
	state = json_string_value(json_object_get(status, "state"));
	call->result = json_pack("{s:s, s:s, s:s}", "machine", m->name, "state",
		fd < 0  ? "stopped"
		: state ? state
			: "running",
		"access", config_access_name(level));
	json_decref(status);
	if (fd >= 0 && get_facts(call, &facts, err) == 0)
		copy_facts(call->result, facts);
	json_decref(facts);
	return 0;
}

static int ports_run(struct tool_call *call, struct err *err)
{
	json_t *facts = NULL, *port, *ports;
	size_t i;
	int r = get_facts(call, &facts, err);

	if (r < 0) {
		json_decref(facts);
		return r;
	}
	ports = json_array();
	json_array_foreach(json_object_get(facts, "listening"), i, port)
	{
		json_int_t number = json_integer_value(json_object_get(port, "port"));

		if (number > 0 && number < 65536 && i < PORTS_MAX)
			json_array_append_new(
				ports, json_pack("{s:I, s:b}", "port", number, "loopback_only",
					       json_is_true(json_object_get(port, "loopback"))));
	}
	json_decref(facts);
	call->result = json_pack("{s:o}", "listening", ports);
	return 0;
}

// --- Processes -------------------------------------------------------------------------------

struct process {
	long pid, ppid, ticks;
	char state;
	long rss_pages;
	char name[64]; // the guest's word
	char args[ARGS_BYTES];
	bool whole;
};

// "PID (NAME) STATE PPID …" of proc(5). The name may hold anything, also ") ".
static void parse_stat(struct process *p, const char *text, size_t len)
{
	const char *open = memchr(text, '(', len), *close = memrchr(text, ')', len);
	char rest[512];
	long utime, stime;

	if (!open || !close || close < open)
		return;
	snprintf(p->name, sizeof(p->name), "%.*s", (int)(close - open - 1), open + 1);
	snprintf(rest, sizeof(rest), "%.*s", (int)(len - (size_t)(close + 1 - text)), close + 1);
	if (sscanf(rest,
		    " %c %ld %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld %*d %*d %*d %*d %*d %*d "
		    "%*u %*u %ld",
		    &p->state, &p->ppid, &utime, &stime, &p->rss_pages) != 5)
		return;
	p->ticks = utime + stime;
	p->whole = true;
}

static void parse_args(struct process *p, const char *text, size_t len)
{
	size_t n = MIN(len, sizeof(p->args) - 1);

	while (n && (text[n - 1] == '\0' || text[n - 1] == '\n'))
		n--;
	for (size_t i = 0; i < n; i++)
		p->args[i] = text[i] ? text[i] : ' ';
	p->args[n] = '\0';
}

static int by_pid(const void *a, const void *b)
{
	const struct process *x = a, *y = b;

	return x->pid < y->pid ? -1 : x->pid > y->pid;
}

static struct process *process_of(struct process *all, size_t *nr, long pid)
{
	for (size_t i = *nr; i-- > 0;)
		if (all[i].pid == pid)
			return &all[i];
	if (*nr == PROCESSES_MAX)
		return NULL;
	all[*nr] = (struct process){.pid = pid};
	return &all[(*nr)++];
}

// The headers that head(1) puts before each file: "==> /proc/PID/FILE <==".
static const char *next_header(
	const char *text, const char *end, long *ret_pid, char *ret_first, const char **ret_body)
{
	static const char mark[] = "==> /proc/";

	while (text < end && (text = memmem(text, (size_t)(end - text), mark, sizeof(mark) - 1))) {
		char *after;
		long pid = strtol(text + sizeof(mark) - 1, &after, 10);

		if (pid > 0 && (!strncmp(after, "/stat <==\n", 10) ||
				       !strncmp(after, "/cmdline <==\n", 13))) {
			*ret_pid = pid;
			*ret_first = after[1];
			*ret_body = strchr(after, '\n') + 1;
			return text;
		}
		text += sizeof(mark) - 1;
	}
	return end;
}

static json_t *tell_processes(const char *text, size_t len)
{
	struct process *all = calloc(PROCESSES_MAX, sizeof(*all));
	json_t *told = json_array();
	const char *end = text + len, *body = NULL;
	size_t nr = 0;
	long pid;
	char first;

	if (!all)
		return told;
	for (const char *at = next_header(text, end, &pid, &first, &body); at < end;) {
		struct process *p = process_of(all, &nr, pid);
		const char *mine = body;
		char kind = first;

		at = next_header(mine, end, &pid, &first, &body);
		if (p && kind == 's')
			parse_stat(p, mine, (size_t)(at - mine));
		else if (p)
			parse_args(p, mine, (size_t)(at - mine));
	}
	qsort(all, nr, sizeof(*all), by_pid);
	for (size_t i = 0; i < nr; i++) {
		const struct process *p = &all[i];
		char state[2] = {p->state};

		if (p->whole)
			json_array_append_new(
				told, json_pack("{s:I, s:I, s:o, s:o, s:o, s:I, s:I}", "pid",
					      (json_int_t)p->pid, "ppid", (json_int_t)p->ppid,
					      "name", text_printable(p->name, strlen(p->name)),
					      "args", text_printable(p->args, strlen(p->args)),
					      "state", text_printable(state, 1), "memory_bytes",
					      (json_int_t)p->rss_pages * (json_int_t)PAGE_BYTES,
					      "cpu_ms", (json_int_t)p->ticks * 10));
	}
	free(all);
	return told;
}

static int processes_run(struct tool_call *call, struct err *err)
{
	static const char *const argv[] = {"sh", "-c",
		"cd /proc && set -- && for p in [0-9]*; do set -- \"$@\" /proc/$p/stat "
		"/proc/$p/cmdline; "
		"done; exec head -c 512 \"$@\" 2>/dev/null",
		NULL};
	struct buf out = {0};
	bool cut = false;
	int r = call_ask(call, argv, PROCESSES_BYTES, &out, &cut, err);

	buf_append(&out, "", 1); // an end for strtol() and its like
	if (r >= 0)
		call->result = json_pack("{s:o, s:b}", "processes",
			tell_processes((char *)out.data, out.len - 1), "truncated", cut);
	buf_fini(&out);
	return MIN(r, 0);
}

// --- The console -----------------------------------------------------------------------------

// Appends the last bytes of a file of the machine's folder.
static int tail(const struct tool_call *call, const char *name, size_t max_bytes, struct buf *out,
	struct err *err)
{
	CLEANUP_FREE char *bytes = NULL;
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX];
	struct stat st;
	ssize_t n;

	if (snprintf(path, sizeof(path), "%s/%s", call->machine->dir, name) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", call->machine->dir);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0)
		return errno == ENOENT ? 0 : err_errno(err, -errno, "%s", path);
	bytes = malloc(max_bytes + 1);
	if (!bytes || fstat(fd, &st) < 0)
		return err_errno(err, -ENOMEM, "%s", path);
	n = fd_pread_full(fd, bytes, max_bytes, MAX(st.st_size - (off_t)max_bytes, (off_t)0));
	if (n < 0)
		return err_errno(err, (int)n, "%s", path);
	return buf_append(out, bytes, (size_t)n) < 0 ? err_errno(err, -ENOMEM, "%s", path) : 0;
}

static int logs_run(struct tool_call *call, struct err *err)
{
	size_t max = arg_number(call, "max_bytes", 16384), skip;
	struct buf out = {0};
	int r = tail(call, "console.log.1", max, &out, err);

	if (r == 0)
		r = tail(call, "console.log", max, &out, err);
	skip = out.len - MIN(out.len, max);
	if (r == 0)
		call->result = json_pack("{s:o}", "console",
			text_printable(out.data ? out.data + skip : NULL, out.len - skip));
	buf_fini(&out);
	return r;
}

// --- Snapshots -------------------------------------------------------------------------------

// A tag of this machine, and no other's snapshot: letters, digits, '.', '_' and '-'.
static int check_tag(const char *tag, struct err *err)
{
	if (tag[0] == '.' || tag[0] == '-' || tag[0] == '_' ||
		strspn(tag, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") !=
			strlen(tag))
		return err_set(err, -EINVAL,
			"'%.64s' is no tag: letters, digits, '.', '_' and '-', not at the start",
			tag);
	return 0;
}

static int full_name(const struct tool_call *call, const char *tag, char ret[192], struct err *err)
{
	int r = check_tag(tag, err);

	snprintf(ret, 192, "%s@%s", call->machine->name, tag);
	return r;
}

static json_t *tell_snapshot(const json_t *s)
{
	return json_pack("{s:O, s:O, s:O, s:O}", "id", json_object_get(s, "id"), "tag",
		json_object_get(s, "tag"), "created_s", json_object_get(s, "created_s"),
		"written_bytes", json_object_get(s, "written_bytes"));
}

// The list of this machine's, the caller's.
static int get_snapshots(struct tool_call *call, json_t **ret, struct err *err)
{
	const char *argv[] = {
		"mayfly", "snapshots", "--json", "--", "list", call->machine->name, NULL};
	struct buf out = {0};
	int r = call_own(call, argv, false, &out, err);

	*ret = r == 0 ? json_loadb((char *)out.data, out.len, 0, NULL) : NULL;
	buf_fini(&out);
	if (r == 0 && !json_is_array(*ret))
		r = err_set(err, -EIO, "mayfly snapshots told nothing");
	return r;
}

// Each may take as much of the host's disk as the machine has memory.
static int check_room(struct tool_call *call, struct err *err)
{
	json_t *list = NULL;
	int r = get_snapshots(call, &list, err);

	if (r == 0 && json_array_size(list) >= SNAPSHOTS_MAX)
		r = err_set(err, -EDQUOT,
			"the machine has %zu snapshots: ask its owner to remove some (mayfly "
			"snapshots "
			"rm %s@TAG)",
			json_array_size(list), call->machine->name);
	json_decref(list);
	return r;
}

static int snapshot_run(struct tool_call *call, struct err *err)
{
	const char *tag = arg_text(call, "tag", "");
	const char *argv[] = {"mayfly", "snapshot", "--json", "--", call->machine->name, tag, NULL};
	struct buf out = {0};
	json_t *info;
	int r = check_tag(tag, err);

	// The name that mayfly suspend gives, and mayfly up goes on from.
	if (r == 0 && !strcmp(tag, "suspended"))
		r = err_set(
			err, -EINVAL, "a snapshot cannot be called '%s': choose another tag", tag);
	if (r == 0)
		r = check_room(call, err);
	if (r == 0)
		r = call_own(call, argv, false, &out, err);
	if (r == 0) {
		info = json_loadb((char *)out.data, out.len, 0, NULL);
		call->result = tell_snapshot(info);
		json_decref(info);
		if (!call->result)
			r = err_set(err, -EIO, "the snapshot was taken, and told nothing");
	}
	buf_fini(&out);
	return r;
}

static int snapshots_run(struct tool_call *call, struct err *err)
{
	json_t *list = NULL, *s, *told = json_array();
	size_t i;
	int r = get_snapshots(call, &list, err);

	json_array_foreach(list, i, s) json_array_append_new(told, tell_snapshot(s));
	json_decref(list);
	if (r == 0)
		call->result = json_pack("{s:O}", "snapshots", told);
	json_decref(told);
	return r;
}

struct unsaved {
	const char *mine; // my client
	bool others;
	char client[96]; // the last other one
};

// Whether a call of that tool leaves work in the machine.
static bool works(const char *name)
{
	static const char *const keep[] = {"snapshot", "restore", "fork", "set_access",
		"publish_port", "set_network", "download"};
	const struct tool *tool = tools_find(name, CONFIG_ACCESS_EXEC, NULL);
	bool works = tool && !tool->read_only;

	for (size_t i = 0; i < ARRAY_SIZE(keep); i++)
		works &= strcmp(name, keep[i]) != 0;
	return works;
}

static const char *member(const json_t *record, const char *key)
{
	const char *text = json_string_value(json_object_get(record, key));

	return text ? text : "";
}

static int look_for_work(void *opaque, const json_t *record)
{
	struct unsaved *u = opaque;
	const char *tool = member(record, "tool"), *event = member(record, "event");

	if (!strcmp(event, "call") && strcmp(member(record, "client"), u->mine) != 0 &&
		works(tool)) {
		u->others = true;
		snprintf(u->client, sizeof(u->client), "%s",
			*member(record, "client") ? member(record, "client") : "its owner");
	}
	if (!strcmp(event, "result") && !strcmp(member(record, "outcome"), "ok") &&
		(!strcmp(tool, "snapshot") || !strcmp(tool, "restore")))
		u->others = false; // it is kept, or gone
	return 0;
}

// What other clients have done since the last snapshot is not this one's to throw away. Against
// accidents: a client is what it calls itself, and some have a session for each call.
static int check_unsaved(struct tool_call *call, const char *tag, struct err *err)
{
	struct unsaved u = {.mine = call->client};
	enum approval_state state = APPROVAL_PENDING;
	char id[APPROVAL_ID_BYTES];
	json_t *arguments;
	int r = audit_each(call->machine->dir, look_for_work, &u, err);

	if (r < 0 || !u.others)
		return r;
	arguments = json_pack("{s:s}", "tag", tag);
	r = arguments ? call_ask_owner(call, APPROVAL_RESTORE, arguments, id, &state, err)
		      : err_errno(err, -ENOMEM, "arguments");
	json_decref(arguments);
	if (r < 0 || state == APPROVAL_ALLOWED)
		return r;
	return err_set(err, -EPERM,
		"another client (%s) has worked in the machine since the last snapshot. %s: "
		"take a snapshot first, which keeps its work%s",
		u.client,
		state == APPROVAL_DENIED ? "The owner has denied to restore over that"
					 : "The owner has been asked whether to restore over that",
		state == APPROVAL_DENIED ? "" : ", or call this again with wait_seconds");
}

static int restore_run(struct tool_call *call, struct err *err)
{
	char name[192];
	const char *argv[] = {"mayfly", "restore", "--", call->machine->name, name, NULL};
	struct buf out = {0};
	int r = full_name(call, arg_text(call, "tag", ""), name, err);

	if (r == 0)
		r = check_unsaved(call, arg_text(call, "tag", ""), err);
	// Half a restore is no machine: what has begun goes on to its end.
	if (r == 0)
		r = call_own(call, argv, true, &out, err);
	if (r == 0)
		call->result = json_pack("{s:s}", "restored", name);
	buf_fini(&out);
	return r;
}

// A fork is a process with memory of its own.
static int check_forks(struct tool_call *call, struct err *err)
{
	const char *argv[] = {"mayfly", "ps", "--json", NULL};
	const size_t len = strlen(call->machine->name);
	struct buf out = {0};
	json_t *list = NULL, *m;
	size_t i, nr = 0;
	int r = call_own(call, argv, false, &out, err);

	if (r == 0)
		list = json_loadb((char *)out.data, out.len, 0, NULL);
	json_array_foreach(list, i, m)
	{
		const char *name = json_string_value(json_object_get(m, "name"));

		nr += name && !strncmp(name, call->machine->name, len) && name[len] == '-';
	}
	if (r == 0 && (!list || nr >= FORKS_MAX))
		r = err_set(err, -EDQUOT,
			"the machine has %zu forks: ask its owner to remove some (mayfly rm)", nr);
	json_decref(list);
	buf_fini(&out);
	return r;
}

static int fork_run(struct tool_call *call, struct err *err)
{
	const char *tag = arg_text(call, "tag", NULL);
	char source[192], name[192];
	const char *argv[] = {"mayfly", "fork", "--", source, name, NULL};
	struct buf out = {0};
	int r = check_tag(arg_text(call, "name", ""), err);

	snprintf(source, sizeof(source), "%s", call->machine->name);
	// Names of other machines are none of this endpoint's business.
	snprintf(name, sizeof(name), "%s-%s", call->machine->name, arg_text(call, "name", ""));
	if (r == 0 && tag)
		r = full_name(call, tag, source, err);
	if (r == 0)
		r = check_forks(call, err);
	if (r == 0)
		r = call_own(call, argv, false, &out, err);
	if (r == 0)
		call->result = json_pack("{s:s}", "machine", name);
	buf_fini(&out);
	return r;
}

// --- Its own level ---------------------------------------------------------------------------

static int set_access(struct tool_call *call, struct err *err)
{
	const char *level = arg_text(call, "level", "");
	const char *argv[] = {
		"mayfly", "access", "--lower", "--", call->machine->name, level, NULL};
	struct buf out = {0};
	int r = call_own(call, argv, true, &out, err);

	buf_fini(&out);
	if (r == 0)
		call->result = json_pack("{s:s}", "access", level);
	return r;
}

// --- What they are called and take -----------------------------------------------------------

// clang-format off
#define COUNT "{\"type\":\"integer\",\"minimum\":0}"
#define TEXT "{\"type\":\"string\"}"
#define NO_ARGUMENTS "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{}}"
#define TAG_PROPERTY(says) "\"tag\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":63,\"description\":\"" says "\"}"
#define SNAPSHOT \
	"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"id\":" TEXT ",\"tag\":" TEXT "," \
	"\"created_s\":" COUNT ",\"written_bytes\":" COUNT "},\"required\":[\"id\",\"tag\",\"created_s\",\"written_bytes\"]}"

const struct tool machine_tools[] = {
	{
		.name = "status", .title = "State of the machine", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Tells the machine's name and state, the access level of this session, memory, disk and load.",
		.input = NO_ARGUMENTS,
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"machine\":" TEXT ",\"state\":" TEXT ",\"access\":" TEXT ",\"hostname\":" TEXT ",\"kernel\":" TEXT ","
			"\"uptime_ns\":" COUNT ",\"processes\":" COUNT ",\"load_1m_milli\":" COUNT ","
			"\"memory_total_bytes\":" COUNT ",\"memory_available_bytes\":" COUNT ","
			"\"disk_total_bytes\":" COUNT ",\"disk_available_bytes\":" COUNT "},\"required\":[\"machine\",\"state\",\"access\"]}",
		.read_only = true, .idempotent = true, .run = status_run,
	},
	{
		.name = "processes", .title = "List processes", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists the machine's processes, by pid.",
		.input = NO_ARGUMENTS,
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"processes\":{\"type\":\"array\",\"items\":"
			"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"pid\":" COUNT ",\"ppid\":" COUNT ","
			"\"name\":" TEXT ",\"args\":" TEXT ",\"state\":{\"type\":\"string\",\"description\":\"as ps: R runs, S sleeps, D waits for a disk, Z is dead\"},"
			"\"memory_bytes\":" COUNT ",\"cpu_ms\":" COUNT "},"
			"\"required\":[\"pid\",\"ppid\",\"name\",\"args\",\"state\",\"memory_bytes\",\"cpu_ms\"]}},"
			"\"truncated\":{\"type\":\"boolean\"}},\"required\":[\"processes\",\"truncated\"]}",
		.read_only = true, .idempotent = true, .run = processes_run,
	},
	{
		.name = "ports", .title = "List listening ports", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists the TCP ports on which something in the machine listens.",
		.input = NO_ARGUMENTS,
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"listening\":{\"type\":\"array\",\"items\":"
			"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"port\":" COUNT ",\"loopback_only\":{\"type\":\"boolean\"}},"
			"\"required\":[\"port\",\"loopback_only\"]}}},\"required\":[\"listening\"]}",
		.read_only = true, .idempotent = true, .run = ports_run,
	},
	{
		.name = "logs", .title = "Read the console", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Shows the end of what the machine's kernel and init have printed on its console.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"max_bytes\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":262144,\"default\":16384}}}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"console\":" TEXT "},\"required\":[\"console\"]}",
		.read_only = true, .idempotent = true, .run = logs_run,
	},
	{
		.name = "snapshots", .title = "List snapshots", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists this machine's snapshots, the oldest first.",
		.input = NO_ARGUMENTS,
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"snapshots\":{\"type\":\"array\",\"items\":" SNAPSHOT "}},\"required\":[\"snapshots\"]}",
		.read_only = true, .idempotent = true, .run = snapshots_run,
	},
	{
		.name = "snapshot", .title = "Take a snapshot", .level = CONFIG_ACCESS_MANAGE,
		.description = "Keeps the machine as it is now, files, memory and running processes. Take one before what may break it.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			TAG_PROPERTY("its name, for restore; a new one each time") "},\"required\":[\"tag\"]}",
		.output = SNAPSHOT, .run = snapshot_run,
	},
	{
		.name = "restore", .title = "Go back to a snapshot", .level = CONFIG_ACCESS_MANAGE,
		.description = "Takes the machine back to a snapshot. All that has happened in it since is lost, and other "
			"calls that are under way fail.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			TAG_PROPERTY("as snapshots tells it") ","
			"\"wait_seconds\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":600,\"default\":0,"
				"\"description\":\"wait so long for the owner, who is asked where another client's work would be lost\"}},\"required\":[\"tag\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"restored\":" TEXT "},\"required\":[\"restored\"]}",
		.destructive = true, .run = restore_run,
	},
	{
		.name = "fork", .title = "Fork the machine", .level = CONFIG_ACCESS_MANAGE,
		.description = "Makes a further machine that goes on from this one as it is, or from a snapshot of it. It is "
			"called as this one, '-' and name, and its owner can give it to an agent; this session stays with this one.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"name\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":32,\"description\":\"the end of its name: letters, digits, '.', '_', '-'\"},"
			TAG_PROPERTY("a snapshot to go on from (default: now)") "},\"required\":[\"name\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"machine\":" TEXT "},\"required\":[\"machine\"]}",
		.run = fork_run,
	},
	{
		.name = "set_access", .title = "Lower the access level", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lowers what agents may do with this machine, from now on and for every session. Only its owner "
			"can raise it again.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"level\":{\"type\":\"string\",\"enum\":[\"none\",\"observe\",\"manage\",\"exec\"]}},\"required\":[\"level\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"access\":" TEXT "},\"required\":[\"access\"]}",
		.destructive = true, .idempotent = true, .run = set_access,
	},
};
// clang-format on

const size_t nr_machine_tools = ARRAY_SIZE(machine_tools);
