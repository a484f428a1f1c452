// SPDX-License-Identifier: Apache-2.0
// Tools that run commands in the machine: exec, and jobs, which outlive their call. A thread a
// call.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "mcp/command.h"
#include "mcp/denials.h"
#include "mcp/outputs.h"
#include "mcp/text.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"

#define INLINE_DEFAULT_BYTES 32768U // of each stream in a result; the schemas say so
#define TIMEOUT_DEFAULT_S    600U

// --- exec ------------------------------------------------------------------------------------

struct capture {
	struct tool_call *call;
	struct buf streams[2]; // the beginning of each
	uint64_t total[2];
};

static int capture(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct capture *c = ctx;
	size_t room = OUTPUTS_STREAM_BYTES - c->streams[is_err].len;

	c->total[is_err] += len;
	atomic_fetch_add(&c->call->moved_bytes, len);
	if (buf_append(&c->streams[is_err], bytes, MIN(len, room)) < 0)
		return err_errno(err, -ENOMEM, "output");
	return 0;
}

static int tell_output(struct capture *c, json_t *result, struct err *err)
{
	static const char *const keys[2][3] = {{"stdout", "stdout_encoding", "stdout_bytes"},
		{"stderr", "stderr_encoding", "stderr_bytes"}};
	size_t max = arg_number(c->call, "max_output_bytes", INLINE_DEFAULT_BYTES);
	char handle[OUTPUTS_HANDLE_BYTES];
	bool more = false;
	int r;

	for (int i = 0; i < 2; i++) {
		const struct buf *s = &c->streams[i];

		text_put(result, keys[i][0], keys[i][1], s->data, MIN(s->len, max), s->len > max,
			false);
		json_object_set_new(result, keys[i][2], json_integer((json_int_t)c->total[i]));
		more |= c->total[i] > max;
	}
	json_object_set_new(result, "truncated", json_boolean(more));
	if (!more)
		return 0;
	r = outputs_keep(c->call->outputs, c->streams, handle, err);
	if (r == 0)
		json_object_set_new(result, "output", json_string(handle));
	return r;
}

int command_run(struct tool_call *call, const struct agent_exec *x, struct err *err)
{
	struct capture c = {.call = call};
	struct agent_exec with_capture = *x;
	struct denials_mark mark = outputs_untold(call->outputs, denials_now(call->machine->dir));
	struct agent_result result = {0};
	const uint64_t start_ns = now_ns();
	CLEANUP_FD int fd = call_connect(call, err);
	json_t *denied;
	int r;

	if (fd < 0)
		return fd;
	with_capture.output = capture;
	with_capture.output_ctx = &c;
	r = agent_exec(fd, &with_capture, &result, err);
	if (r < 0 && (result.exit_code == 126 || result.exit_code == 127)) {
		call->exit_code = result.exit_code;
		err_wrap(err, r, "it could not be started");
	} else if (r == 0) {
		call->exit_code = result.exit_code;
		call->result = json_pack("{s:i, s:i, s:b, s:b, s:I}", "exit_code", result.exit_code,
			"signal", (int)result.signal, "timed_out", result.timed_out, "over_limit",
			result.over_limit, "duration_ms",
			(json_int_t)((now_ns() - start_ns) / 1000000));
		denied = denials_since(call->machine->dir, &mark);
		outputs_told(call->outputs, mark);
		if (denied)
			json_object_set_new(call->result, "denied", denied);
		r = tell_output(&c, call->result, err);
	}
	buf_fini(&c.streams[0]);
	buf_fini(&c.streams[1]);
	return r;
}

static int exec_run(struct tool_call *call, struct err *err)
{
	struct command c = {.in_fd = -1};
	struct agent_exec x;
	int r = command_of(call, &c, &x, err);

	x.timeout_ms = 1000 * arg_number(call, "timeout_seconds", TIMEOUT_DEFAULT_S);
	if (r == 0)
		r = command_run(call, &x, err);
	command_fini(&c);
	return r;
}

// --- install_packages ------------------------------------------------------------------------

// The guest's own package manager. "$@" are the names, which have been checked.
static const char install_script[] =
	"manager=$1; shift\n"
	"has() { command -v \"$1\" >/dev/null 2>&1; }\n"
	"if [ \"$manager\" = auto ]; then\n"
	"	for manager in apt apk dnf none; do\n"
	"		case $manager in apt) has apt-get && break ;; *) has $manager && break ;; "
	"esac\n"
	"	done\n"
	"fi\n"
	"case $manager in\n"
	"apt) export DEBIAN_FRONTEND=noninteractive\n"
	"	apt-get install -y --no-install-recommends -- \"$@\" ||\n"
	"	{ apt-get update && apt-get install -y --no-install-recommends -- \"$@\"; } ;;\n"
	"apk) apk add -- \"$@\" ;;\n"
	"dnf) dnf install -y -- \"$@\" ;;\n"
	"pip) python3 -m pip install -- \"$@\" ;;\n"
	"npm) npm install -g -- \"$@\" ;;\n"
	"*) echo 'this machine has none of apt, apk and dnf' >&2; exit 127 ;;\n"
	"esac\n";

static bool good_package(const char *name)
{
	return (name[0] == '@' || strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
					       "YZ0123456789") > 0) &&
	       strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
			    "@._+:/=~<>[],^*!-") == strlen(name);
}

static int install_packages(struct tool_call *call, struct err *err)
{
	const json_t *packages = json_object_get(call->arguments, "packages"), *package;
	const char *argv[5 + 64 + 1] = {
		"sh", "-c", install_script, "install", arg_text(call, "manager", "auto")};
	struct agent_exec x = {
		.argv = argv,
		.timeout_ms = 1000 * arg_number(call, "timeout_seconds", TIMEOUT_DEFAULT_S),
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
	};
	size_t i;

	json_array_foreach(packages, i, package)
	{
		argv[5 + i] = json_string_value(package);
		if (!good_package(argv[5 + i]))
			return err_set(err, -EINVAL, "packages: '%.80s' is no package's name",
				argv[5 + i]);
	}
	return command_run(call, &x, err);
}

// --- Jobs ------------------------------------------------------------------------------------

static int exec_background(struct tool_call *call, struct err *err)
{
	struct command c = {.in_fd = -1};
	struct agent_result result = {0};
	char job[AGENT_JOB_NAME_MAX + 1];
	struct agent_exec x;
	CLEANUP_FD int fd = -1;
	int r = command_of(call, &c, &x, err);

	x.timeout_ms = 1000 * arg_number(call, "timeout_seconds", 0);
	if (r == 0)
		r = fd = call_connect(call, err);
	if (r >= 0)
		r = agent_job_start(fd, &x, arg_text(call, "job", ""), now_ns() + CALL_ANSWER_NS,
			job, &result, err);
	if (r == 0)
		call->result = json_pack("{s:o}", "job", text_printable(job, strlen(job)));
	else if (result.exit_code == 126 || result.exit_code == 127)
		err_wrap(err, r, "it could not be started");
	command_fini(&c);
	return r;
}

static json_int_t number(const json_t *object, const char *key)
{
	return MAX(json_integer_value(json_object_get(object, key)), (json_int_t)0);
}

static json_t *stream_of(const json_t *job, const char *stream, const char *which)
{
	return json_integer(number(json_object_get(job, stream), which));
}

// What the guest tells of a job, as our schema has it: all of it is the guest's word.
static json_t *tell_job(const json_t *job)
{
	const json_t *name = json_object_get(job, "job");
	bool running = json_is_true(json_object_get(job, "running"));
	json_int_t signal = number(job, "signal");
	json_t *told = json_pack("{s:o, s:b, s:I, s:o, s:o}", "job",
		text_printable(json_string_value(name), json_string_length(name)), "running",
		running, "pid", number(job, "pid"), "stdout_bytes", stream_of(job, "stdout", "end"),
		"stderr_bytes", stream_of(job, "stderr", "end"));
	json_int_t took_ns = number(job, "ended_ns") - number(job, "started_ns");

	if (running)
		return told;
	json_object_set_new(
		told, "exit_code", json_integer(signal ? 128 + signal : number(job, "code")));
	json_object_set_new(told, "signal", json_integer(signal));
	json_object_set_new(
		told, "timed_out", json_boolean(json_is_true(json_object_get(job, "timed_out"))));
	json_object_set_new(
		told, "duration_ms", json_integer(MAX(took_ns, (json_int_t)0) / 1000000));
	return told;
}

// The guest's list, the caller's.
static int get_jobs(const struct tool_call *call, json_t **ret, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = call_connect(call, err);
	int r = fd < 0 ? fd
		       : agent_jobs(fd, call->cancel_fd, now_ns() + CALL_ANSWER_NS, &text, err);
	json_t *reply, *jobs, *job;
	size_t i;

	if (r < 0)
		return r;
	reply = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	jobs = json_object_get(reply, "jobs");
	if (!json_is_array(jobs))
		r = err_set(err, -EPROTO, "the guest's answer makes no sense");
	json_array_foreach(jobs, i, job)
	{
		if (r == 0 && !json_is_string(json_object_get(job, "job")))
			r = err_set(err, -EPROTO, "the guest's answer makes no sense");
	}
	if (r == 0)
		*ret = json_incref(jobs);
	json_decref(reply);
	return r;
}

// The job that the arguments name, the caller's.
static int get_job(const struct tool_call *call, json_t **ret, struct err *err)
{
	const char *name = arg_text(call, "job", "");
	json_t *jobs = NULL, *job;
	size_t i;
	int r = get_jobs(call, &jobs, err);

	if (r < 0)
		return r;
	r = -ESRCH;
	json_array_foreach(jobs, i, job)
	{
		if (r < 0 && !strcmp(json_string_value(json_object_get(job, "job")), name)) {
			*ret = json_incref(job);
			r = 0;
		}
	}
	json_decref(jobs);
	return r < 0 ? err_set(err, r, "there is no job '%.80s': the tool jobs lists them", name)
		     : 0;
}

static int jobs_run(struct tool_call *call, struct err *err)
{
	json_t *jobs = NULL, *job, *told = json_array();
	size_t i;
	int r = get_jobs(call, &jobs, err);

	json_array_foreach(jobs, i, job) json_array_append_new(told, tell_job(job));
	json_decref(jobs);
	if (r == 0)
		call->result = json_pack("{s:O}", "jobs", told);
	json_decref(told);
	return r;
}

struct taking {
	struct tool_call *call;
	struct buf out;
	size_t max_bytes;
	bool is_err; // the stream that is wanted
	bool first_is_enough;
	uint64_t offset; // of what was taken
};

static int take(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct taking *t = ctx;

	if (is_err != t->is_err)
		return 0;
	atomic_fetch_add(&t->call->moved_bytes, len);
	if (buf_append(&t->out, bytes, MIN(len, t->max_bytes - t->out.len)) < 0)
		return err_errno(err, -ENOMEM, "output");
	if (t->first_is_enough || t->out.len == t->max_bytes)
		return err_set(err, -ENOBUFS, "enough");
	return 0;
}

static void take_offset(void *ctx, bool is_err, uint64_t offset)
{
	struct taking *t = ctx;

	if (is_err == t->is_err && t->out.len == 0)
		t->offset = offset;
}

// Looks at the job, or waits for more of its output, or with t NULL for its end.
static int attach(struct tool_call *call, struct taking *t, uint64_t wait_s, struct err *err)
{
	struct agent_result result = {0};
	struct agent_attach a = {
		.job = arg_text(call, "job", ""),
		.follow = wait_s > 0,
		.stdout_offset = INT64_MAX,
		.stderr_offset = INT64_MAX,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
		.deadline_ns = now_ns() + (wait_s ? wait_s * 1000000000 : CALL_ANSWER_NS),
	};
	CLEANUP_FD int fd = call_connect(call, err);
	int r;

	if (fd < 0)
		return fd;
	if (t) {
		*(t->is_err ? &a.stderr_offset : &a.stdout_offset) = t->offset;
		a.output = take;
		a.offset = take_offset;
		a.ctx = t;
	}
	r = agent_attach(fd, &a, &result, err);
	return r == -ENOBUFS || (r == -ETIMEDOUT && wait_s) ? 0 : r;
}

static int job_status(struct tool_call *call, struct err *err)
{
	uint64_t wait_s = arg_number(call, "wait_seconds", 0);
	json_t *job = NULL;
	int r = get_job(call, &job, err);

	if (r == 0 && wait_s && json_is_true(json_object_get(job, "running"))) {
		json_decref(job);
		job = NULL;
		r = attach(call, NULL, wait_s, err);
		if (r == 0)
			r = get_job(call, &job, err);
	}
	if (r == 0)
		call->result = tell_job(job);
	json_decref(job);
	return r;
}

static void tell_stretch(struct tool_call *call, const struct buf *bytes, uint64_t offset,
	uint64_t total, bool running)
{
	json_int_t next = (json_int_t)offset;

	call->result = json_object();
	next += (json_int_t)text_put(call->result, "output", "encoding", bytes->data, bytes->len,
		offset + bytes->len < total || running, false);
	json_object_set_new(call->result, "offset", json_integer((json_int_t)offset));
	json_object_set_new(call->result, "next_offset", json_integer(next));
	json_object_set_new(call->result, "total_bytes", json_integer((json_int_t)total));
	json_object_set_new(call->result, "running", json_boolean(running));
}

static int kept_output(
	struct tool_call *call, uint64_t offset, size_t max_bytes, bool is_err, struct err *err)
{
	struct buf out = {0};
	uint64_t total = 0;
	int r = outputs_read(call->outputs, arg_text(call, "job", ""), is_err, &offset, max_bytes,
		&out, &total, err);

	if (r == 0)
		tell_stretch(call, &out, offset, total, false);
	buf_fini(&out);
	return r;
}

static int job_output(struct tool_call *call, struct err *err)
{
	uint64_t wait_s = arg_number(call, "wait_seconds", 0);
	uint64_t offset = arg_number(call, "offset", UINT64_MAX), total;
	struct taking t = {
		.call = call,
		.max_bytes = arg_number(call, "max_bytes", INLINE_DEFAULT_BYTES),
		.is_err = !strcmp(arg_text(call, "stream", "stdout"), "stderr"),
	};
	const char *stream = t.is_err ? "stderr" : "stdout";
	json_t *job = NULL;
	bool running;
	int r;

	if (outputs_is_handle(arg_text(call, "job", "")))
		return kept_output(call, offset, t.max_bytes, t.is_err, err);
	r = get_job(call, &job, err);
	if (r < 0)
		return r;
	running = json_is_true(json_object_get(job, "running"));
	total = (uint64_t)number(json_object_get(job, stream), "end");
	if (offset == UINT64_MAX)
		offset = total - MIN(total, t.max_bytes);
	t.offset = MAX(offset, (uint64_t)number(json_object_get(job, stream), "start"));
	if (t.offset < total) {
		r = attach(call, &t, 0, err);
	} else if (wait_s && running) {
		t.first_is_enough = true;
		r = attach(call, &t, wait_s, err);
	}
	if (r == 0) {
		// What came while we waited counts.
		json_decref(job);
		job = NULL;
		r = get_job(call, &job, err);
	}
	if (r == 0)
		tell_stretch(call, &t.out, t.offset,
			(uint64_t)number(json_object_get(job, stream), "end"),
			json_is_true(json_object_get(job, "running")));
	buf_fini(&t.out);
	json_decref(job);
	return r;
}

static int job_kill(struct tool_call *call, struct err *err)
{
	static const struct {
		const char *name;
		int number;
	} signals[] = {{"TERM", SIGTERM}, {"INT", SIGINT}, {"HUP", SIGHUP}, {"QUIT", SIGQUIT},
		{"USR1", SIGUSR1}, {"USR2", SIGUSR2}, {"STOP", SIGSTOP}, {"CONT", SIGCONT}};
	const char *name = arg_text(call, "signal", "KILL");
	CLEANUP_FD int fd = -1;
	json_t *job = NULL;
	int sig = 0, r;

	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		if (!strcmp(name, signals[i].name))
			sig = signals[i].number;
	r = get_job(call, &job, err);
	if (r < 0)
		return r;
	if (json_is_true(json_object_get(job, "running"))) {
		fd = call_connect(call, err);
		r = fd < 0 ? fd
			   : agent_job_signal(fd, arg_text(call, "job", ""), sig, sig == 0,
				     call->cancel_fd, now_ns() + CALL_ANSWER_NS, err);
	}
	if (r == 0)
		call->result = json_pack(
			"{s:b}", "was_running", json_is_true(json_object_get(job, "running")));
	json_decref(job);
	return r;
}

// --- What they are called and take -----------------------------------------------------------

// clang-format off
#define JOB_PROPERTIES \
	"\"job\":{\"type\":\"string\"},\"running\":{\"type\":\"boolean\"},\"pid\":" COMMAND_COUNT "," \
	"\"stdout_bytes\":" COMMAND_COUNT ",\"stderr_bytes\":" COMMAND_COUNT "," \
	"\"exit_code\":" COMMAND_COUNT ",\"signal\":" COMMAND_COUNT ",\"timed_out\":{\"type\":\"boolean\"}," \
	"\"duration_ms\":" COMMAND_COUNT

#define JOB_RESULT \
	"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" JOB_PROPERTIES "}," \
	"\"required\":[\"job\",\"running\",\"pid\",\"stdout_bytes\",\"stderr_bytes\"]}"

#define JOB_ARGUMENT \
	"\"job\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":63,\"description\":\"its name\"}"

const struct tool exec_tools[] = {
	{
		.name = "exec", .title = "Run a command", .level = CONFIG_ACCESS_EXEC,
		.description = "Runs a command in the machine and waits for it. A non-zero exit_code is the command's own "
			"result, not a failure of this tool. For servers and long builds use exec_background.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" COMMAND_PROPERTIES ","
			"\"stdin\":{\"type\":\"string\",\"description\":\"text for its standard input (default: none)\"},"
			"\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":86400,\"default\":600,"
				"\"description\":\"it and all that it started are killed then\"},"
			MAX_OUTPUT_PROPERTY "},\"required\":[\"argv\"]}",
		.output = COMMAND_RESULT, .destructive = true, .run = exec_run,
	},
	{
		.name = "exec_background", .title = "Start a background job", .level = CONFIG_ACCESS_EXEC,
		.description = "Starts a command as a job that goes on when this call, and this session, end. Read it with "
			"job_output, wait for it with job_status, end it with job_kill. The machine keeps the newest 256 KiB of "
			"each of its streams.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" COMMAND_PROPERTIES ","
			"\"job\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":63,\"description\":\"a name for it: letters, digits, '.', '_', '-' (default job-N)\"},"
			"\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":86400,\"description\":\"it is killed then (default: never)\"}"
			"},\"required\":[\"argv\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"job\":{\"type\":\"string\"}},\"required\":[\"job\"]}",
		.destructive = true, .run = exec_background,
	},
	{
		.name = "jobs", .title = "List jobs", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists the machine's background jobs, running and ended.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{}}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"jobs\":{\"type\":\"array\",\"items\":" JOB_RESULT "}},\"required\":[\"jobs\"]}",
		.read_only = true, .idempotent = true, .run = jobs_run,
	},
	{
		.name = "job_status", .title = "State of a job", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Tells whether a job runs, or how it ended. With wait_seconds it returns as soon as the job ends.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" JOB_ARGUMENT ","
			"\"wait_seconds\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":3600,\"default\":0,\"description\":\"wait for its end so long\"}},\"required\":[\"job\"]}",
		.output = JOB_RESULT, .read_only = true, .idempotent = true, .run = job_status,
	},
	{
		.name = "job_output", .title = "Output of a job", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Reads what a job has written, or by its handle (out-...) the output that was too long for a "
			"result of exec. Go on with offset = next_offset.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" JOB_ARGUMENT ","
			"\"stream\":{\"type\":\"string\",\"enum\":[\"stdout\",\"stderr\"],\"default\":\"stdout\"},"
			"\"offset\":{\"type\":\"integer\",\"minimum\":0,\"description\":\"where to begin, in bytes (default: so that the end is shown)\"},"
			"\"max_bytes\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":262144,\"default\":32768},"
			"\"wait_seconds\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":3600,\"default\":0,\"description\":\"if there is nothing behind offset, wait for it so long\"}},\"required\":[\"job\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"output\":{\"type\":\"string\"},\"encoding\":" COMMAND_ENCODING ","
			"\"offset\":{\"type\":\"integer\",\"description\":\"of what is shown: more than was asked for if that is not kept any more\"},"
			"\"next_offset\":" COMMAND_COUNT ",\"total_bytes\":" COMMAND_COUNT ",\"running\":{\"type\":\"boolean\"}},"
			"\"required\":[\"output\",\"encoding\",\"offset\",\"next_offset\",\"total_bytes\",\"running\"]}",
		.read_only = true, .idempotent = true, .run = job_output,
	},
	{
		.name = "job_kill", .title = "End a job", .level = CONFIG_ACCESS_EXEC,
		.description = "Kills a job and all that it started, or sends it a signal. One that has ended is no error.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" JOB_ARGUMENT ","
			"\"signal\":{\"type\":\"string\",\"enum\":[\"KILL\",\"TERM\",\"INT\",\"HUP\",\"QUIT\",\"USR1\",\"USR2\",\"STOP\",\"CONT\"],\"default\":\"KILL\","
				"\"description\":\"KILL ends all that it started; others go to its process group\"}},\"required\":[\"job\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{\"was_running\":{\"type\":\"boolean\"}},\"required\":[\"was_running\"]}",
		.destructive = true, .idempotent = true, .run = job_kill,
	},
	{
		.name = "install_packages", .title = "Install packages", .level = CONFIG_ACCESS_MANAGE,
		.description = "Installs packages with the machine's own package manager, and returns what that printed.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"packages\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":200},\"minItems\":1,\"maxItems\":64},"
			"\"manager\":{\"type\":\"string\",\"enum\":[\"auto\",\"apt\",\"apk\",\"dnf\",\"pip\",\"npm\"],\"default\":\"auto\",\"description\":\"auto: the system's\"},"
			"\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":86400,\"default\":600},"
			MAX_OUTPUT_PROPERTY "},\"required\":[\"packages\"]}",
		.output = COMMAND_RESULT, .idempotent = true, .run = install_packages,
	},
};
// clang-format on

const size_t nr_exec_tools = ARRAY_SIZE(exec_tools);
