// SPDX-License-Identifier: Apache-2.0
// Terminals in the machine for an agent: jobs (docs/agent-protocol.md) that have one, under a name
// that nobody guesses. They live until they are closed, their program ends, or the machine does. A
// thread a call.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "mcp/command.h"
#include "mcp/text.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"

#define PREFIX      "pty-"
#define ROWS        24U
#define COLUMNS     100U
#define QUIET_MS    500U // the defaults; the schemas say so
#define TIMEOUT_S   10U
#define SHOWN_BYTES 16384U

// The terminal that the arguments name.
static int pty_of(const struct tool_call *call, const char **ret, struct err *err)
{
	const char *name = arg_text(call, "pty", "");

	if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
		return err_set(err, -EINVAL, "'%.80s' is no terminal: pty_open makes one", name);
	*ret = name;
	return 0;
}

static int explain(const struct tool_call *call, int r, struct err *err)
{
	if (r == -ESRCH && err->msg[0])
		err_wrap(err, r, "'%.80s' is gone: pty_open makes a new one",
			arg_text(call, "pty", ""));
	return r;
}

// --- Opening ---------------------------------------------------------------------------------

static int make_name(char ret[AGENT_JOB_NAME_MAX + 1], struct err *err)
{
	uint64_t random[2];

	if (getrandom(random, sizeof(random), 0) != sizeof(random))
		return err_set(err, -EIO, "getrandom");
	snprintf(ret, AGENT_JOB_NAME_MAX + 1, PREFIX "%016llx%016llx",
		(unsigned long long)random[0], (unsigned long long)random[1]);
	return 0;
}

static int pty_open(struct tool_call *call, struct err *err)
{
	static const char *const shell[] = {
		"sh", "-c", "command -v bash >/dev/null && exec bash || exec sh", NULL};
	struct command c = {.in_fd = -1};
	struct agent_result result = {0};
	char name[AGENT_JOB_NAME_MAX + 1], job[AGENT_JOB_NAME_MAX + 1];
	struct agent_exec x;
	CLEANUP_FD int fd = -1;
	int r = command_of(call, &c, &x, err);

	if (r == 0)
		r = make_name(name, err);
	if (!json_object_get(call->arguments, "argv"))
		x.argv = shell;
	x.tty = true;
	x.rows = (uint16_t)arg_number(call, "rows", ROWS);
	x.columns = (uint16_t)arg_number(call, "columns", COLUMNS);
	x.in_fd = STDIN_FILENO; // only says that there is something to type into
	if (r == 0)
		r = fd = call_connect(call, err);
	if (r >= 0)
		r = agent_job_start(fd, &x, name, now_ns() + CALL_ANSWER_NS, job, &result, err);
	if (r == 0)
		call->result = json_pack("{s:s}", "pty", name);
	else if (result.exit_code == 126 || result.exit_code == 127)
		err_wrap(err, r, "it could not be started");
	command_fini(&c);
	return r;
}

// --- What it shows ---------------------------------------------------------------------------

struct talk {
	struct tool_call *call;
	struct buf shown;
	size_t max_bytes;
	uint64_t offset; // of what is shown, in all that the terminal ever has
	const char *until; // NULL: until it is quiet
	uint64_t quiet_ms;
	int quiet_fd; // a timer
	bool found;
};

static void arm(const struct talk *t, uint64_t ms)
{
	const struct itimerspec when = {.it_value = {.tv_sec = (time_t)(ms / 1000),
						.tv_nsec = (long)(ms % 1000) * 1000000}};

	timerfd_settime(t->quiet_fd, 0, &when, NULL);
}

static int take(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct talk *t = ctx;
	size_t until_len = t->until ? strlen(t->until) : 0, before = t->shown.len, from;

	if (is_err)
		return 0;
	atomic_fetch_add(&t->call->moved_bytes, len);
	if (buf_append(&t->shown, bytes, MIN(len, t->max_bytes - t->shown.len)) < 0)
		return err_errno(err, -ENOMEM, "output");
	from = before - MIN(before, until_len); // it may have begun before these bytes
	t->found = until_len &&
		   memmem(t->shown.data + from, t->shown.len - from, t->until, until_len);
	if (t->found || t->shown.len == t->max_bytes)
		return err_set(err, -ENOBUFS, "enough");
	if (!t->until)
		arm(t, t->quiet_ms);
	return 0;
}

static void take_offset(void *ctx, bool is_err, uint64_t offset)
{
	struct talk *t = ctx;

	if (is_err || t->shown.len)
		return;
	t->offset = offset;
	if (!t->until)
		arm(t, t->quiet_ms); // the guest has heard us
}

// Readable when the call is cancelled, or the terminal is quiet.
static int end_fd(const struct talk *t, struct err *err)
{
	CLEANUP_FD int fd = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN};

	if (fd < 0 || epoll_ctl(fd, EPOLL_CTL_ADD, t->call->cancel_fd, &event) < 0 ||
		epoll_ctl(fd, EPOLL_CTL_ADD, t->quiet_fd, &event) < 0)
		return err_errno(err, -errno, "epoll");
	return TAKE_FD(fd);
}

// Types what is at in_fd (-1: nothing) and looks, from t->offset on, until there is enough.
static int talk(struct talk *t, const char *pty, int in_fd, bool *ret_running, struct err *err)
{
	const uint64_t timeout_s = arg_number(t->call, "timeout_seconds", TIMEOUT_S);
	CLEANUP_FD int conn_fd = call_connect(t->call, err);
	CLEANUP_FD int cancel_fd = conn_fd < 0 ? -1 : end_fd(t, err);
	struct agent_result result = {0};
	const struct agent_attach a = {
		.job = pty,
		.follow = true,
		.tail_bytes = t->max_bytes,
		.stdout_offset = t->offset,
		.stderr_offset = INT64_MAX,
		.in_fd = in_fd,
		.out_fd = -1,
		.err_fd = -1,
		.output = take,
		.offset = take_offset,
		.ctx = t,
		.signal_fd = -1,
		.cancel_fd = cancel_fd,
		.deadline_ns = now_ns() + timeout_s * 1000000000,
	};
	uint64_t times;
	int r;

	if (conn_fd < 0)
		return conn_fd;
	if (cancel_fd < 0)
		return cancel_fd;
	r = agent_attach(conn_fd, &a, &result, err);
	*ret_running = r != 0;
	if (r == -ECANCELED && read(t->quiet_fd, &times, sizeof(times)) == sizeof(times))
		return 0;
	return r == -ENOBUFS || r == -ETIMEDOUT ? 0 : r;
}

// Without what moves the cursor and sets colours: ESC and what it begins, and control characters
// but for newlines and tabs.
static size_t strip(uint8_t *bytes, size_t len)
{
	enum { TEXT, ESCAPE, CSI, STRING, STRING_ESCAPE } state = TEXT;
	size_t n = 0;

	for (size_t i = 0; i < len; i++) {
		uint8_t c = bytes[i];

		switch (state) {
		case TEXT:
			if (c == 0x1b)
				state = ESCAPE;
			else if (c >= ' ' ? c != 0x7f : c == '\n' || c == '\t')
				bytes[n++] = c;
			break;
		case ESCAPE:
			if (c == '[')
				state = CSI;
			else if (c == ']' || c == 'P' || c == '_' || c == '^' || c == 'X')
				state = STRING;
			else if (c < ' ' || c > '/') // those are in the middle of one
				state = TEXT;
			break;
		case CSI:
			if (c >= '@' && c <= '~')
				state = TEXT;
			break;
		case STRING:
			if (c == 0x07)
				state = TEXT;
			else if (c == 0x1b)
				state = STRING_ESCAPE;
			break;
		case STRING_ESCAPE:
			state = TEXT;
			break;
		}
	}
	return n;
}

static void tell(struct talk *t, bool running)
{
	struct buf *shown = &t->shown;
	const uint64_t next = t->offset + shown->len;
	size_t len = shown->len;

	if (len && !arg_flag(t->call, "raw", false))
		len = strip(shown->data, len);
	t->call->result = json_object();
	text_put(t->call->result, "output", "encoding", shown->data, len, false, false);
	json_object_set_new(t->call->result, "next_offset", json_integer((json_int_t)next));
	json_object_set_new(t->call->result, "running", json_boolean(running));
	if (t->until)
		json_object_set_new(t->call->result, "found", json_boolean(t->found));
}

static int look(struct tool_call *call, uint64_t offset, int in_fd, struct err *err)
{
	struct talk t = {
		.call = call,
		.max_bytes = arg_number(call, "max_bytes", SHOWN_BYTES),
		.offset = offset,
		.until = arg_text(call, "until", NULL),
		.quiet_ms = arg_number(call, "quiet_ms", QUIET_MS),
		.quiet_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK),
	};
	const char *pty = NULL;
	bool running = false;
	int r = t.quiet_fd < 0 ? err_errno(err, -errno, "a timer") : pty_of(call, &pty, err);

	if (r == 0)
		r = talk(&t, pty, in_fd, &running, err);
	if (r == 0)
		tell(&t, running);
	buf_fini(&t.shown);
	fd_close(&t.quiet_fd);
	return explain(call, r, err);
}

static int pty_read(struct tool_call *call, struct err *err)
{
	return look(call, arg_number(call, "offset", UINT64_MAX), -1, err);
}

static int pty_write(struct tool_call *call, struct err *err)
{
	const char *data = arg_text(call, "data", "");
	CLEANUP_FD int fd = memfd_create("typed", MFD_CLOEXEC);
	int r = fd < 0 ? -errno : fd_write_all(fd, data, strlen(data));

	if (r == 0 && arg_flag(call, "enter", false))
		r = fd_write_all(fd, "\r", 1);
	if (r == 0 && lseek(fd, 0, SEEK_SET) < 0)
		r = -errno;
	if (r < 0)
		return err_errno(err, r, "data");
	return look(call, INT64_MAX, fd, err);
}

// --- Its size, and its end -------------------------------------------------------------------

static int pty_resize(struct tool_call *call, struct err *err)
{
	struct agent_result result = {0};
	struct agent_attach a = {
		.stdout_offset = INT64_MAX,
		.stderr_offset = INT64_MAX,
		.tty = true,
		.rows = (uint16_t)arg_number(call, "rows", ROWS),
		.columns = (uint16_t)arg_number(call, "columns", COLUMNS),
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
		.deadline_ns = now_ns() + CALL_ANSWER_NS,
	};
	CLEANUP_FD int fd = -1;
	int r = pty_of(call, &a.job, err);

	if (r == 0)
		r = fd = call_connect(call, err);
	if (r >= 0)
		r = agent_attach(fd, &a, &result, err);
	if (r == 0)
		call->result = json_pack("{s:b}", "running", result.running);
	return explain(call, r, err);
}

static int pty_close(struct tool_call *call, struct err *err)
{
	const char *pty = NULL;
	CLEANUP_FD int fd = -1;
	int r = pty_of(call, &pty, err);

	if (r == 0)
		r = fd = call_connect(call, err);
	if (r < 0)
		return r;
	r = agent_job_signal(
		fd, pty, SIGKILL, true, call->cancel_fd, now_ns() + CALL_ANSWER_NS, err);
	if (r == -ESRCH) // it has ended already
		r = 0;
	if (r == 0)
		call->result = json_pack("{s:b}", "closed", 1);
	return r;
}

// --- The table -------------------------------------------------------------------------------

// clang-format off
#define PTY_ARGUMENT "\"pty\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":63,\"description\":\"as pty_open returned it\"}"
#define SIZE_PROPERTIES \
	"\"rows\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":1000,\"default\":24}," \
	"\"columns\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":1000,\"default\":100}"
#define LOOK_PROPERTIES \
	"\"until\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":1024,\"description\":\"return as soon as this text has been shown, and not when it is quiet; what is typed is shown, too\"}," \
	"\"quiet_ms\":{\"type\":\"integer\",\"minimum\":100,\"maximum\":600000,\"default\":500,\"description\":\"return when nothing more was shown for so long\"}," \
	"\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":3600,\"default\":10,\"description\":\"return then in any case\"}," \
	"\"max_bytes\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":262144,\"default\":16384}," \
	"\"raw\":{\"type\":\"boolean\",\"default\":false,\"description\":\"with escape sequences\"}"
#define LOOK_RESULT \
	"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" \
	"\"output\":{\"type\":\"string\"},\"encoding\":{\"type\":\"string\",\"enum\":[\"utf-8\",\"base64\"]}," \
	"\"next_offset\":{\"type\":\"integer\",\"minimum\":0}," \
	"\"running\":{\"type\":\"boolean\",\"description\":\"false: the program in it has ended\"}," \
	"\"found\":{\"type\":\"boolean\",\"description\":\"whether until was shown\"}}," \
	"\"required\":[\"output\",\"encoding\",\"next_offset\",\"running\"]}"

const struct tool pty_tools[] = {
	{
		.name = "pty_open", .title = "Open a terminal", .level = CONFIG_ACCESS_EXEC,
		.description = "Starts a program in a terminal, for what wants one: shells that keep their state, REPLs, "
			"debuggers, prompts. It lives until pty_close, or its own end. For plain commands exec is better.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" COMMAND_PROPERTIES "," SIZE_PROPERTIES "}}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"pty\":{\"type\":\"string\"}},\"required\":[\"pty\"]}",
		.destructive = true, .run = pty_open,
	},
	{
		.name = "pty_write", .title = "Type into a terminal", .level = CONFIG_ACCESS_EXEC,
		.description = "Types data, and returns what the terminal shows from then on: until the text until has come, "
			"or nothing more comes. Enter is enter=true or \\\\r in data, Ctrl-C is \\\\u0003.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" PTY_ARGUMENT ","
			"\"data\":{\"type\":\"string\",\"maxLength\":4095},"
			"\"enter\":{\"type\":\"boolean\",\"default\":false,\"description\":\"press Enter after it\"},"
			LOOK_PROPERTIES "},\"required\":[\"pty\",\"data\"]}",
		.output = LOOK_RESULT, .destructive = true, .run = pty_write,
	},
	{
		.name = "pty_read", .title = "Look at a terminal", .level = CONFIG_ACCESS_EXEC,
		.description = "Returns what a terminal has shown from offset on, and what it shows until the text until has "
			"come, or nothing more comes.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" PTY_ARGUMENT ","
			"\"offset\":{\"type\":\"integer\",\"minimum\":0,\"description\":\"next_offset of the last result (default: the end of what was shown)\"},"
			LOOK_PROPERTIES "},\"required\":[\"pty\"]}",
		.output = LOOK_RESULT, .read_only = true, .run = pty_read,
	},
	{
		.name = "pty_resize", .title = "Resize a terminal", .level = CONFIG_ACCESS_EXEC,
		.description = "Sets a terminal's size.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" PTY_ARGUMENT "," SIZE_PROPERTIES "},\"required\":[\"pty\",\"rows\",\"columns\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"running\":{\"type\":\"boolean\"}},\"required\":[\"running\"]}",
		.idempotent = true, .run = pty_resize,
	},
	{
		.name = "pty_close", .title = "Close a terminal", .level = CONFIG_ACCESS_EXEC,
		.description = "Ends a terminal and all that runs in it.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" PTY_ARGUMENT "},\"required\":[\"pty\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"closed\":{\"type\":\"boolean\"}},\"required\":[\"closed\"]}",
		.destructive = true, .idempotent = true, .run = pty_close,
	},
};
// clang-format on

const size_t nr_pty_tools = ARRAY_SIZE(pty_tools);
