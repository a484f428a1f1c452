// SPDX-License-Identifier: Apache-2.0
// The tools together, and what they share; see the header. Any thread.
#include "mcp/tool.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "guest/proto/frame.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"

#define TOOLS_MAX        64U
#define OWN_OUTPUT_BYTES MIB
#define ASK_MS           500

// --- The tables ------------------------------------------------------------------------------

static pthread_once_t parsed = PTHREAD_ONCE_INIT;
static json_t *inputs[TOOLS_MAX], *listed[TOOLS_MAX];

size_t tools_nr(void)
{
	return nr_exec_tools + nr_pty_tools + nr_file_tools + nr_service_tools + nr_machine_tools +
	       nr_owner_tools;
}

const struct tool *tools_at(size_t i)
{
	const struct {
		const struct tool *tools;
		size_t nr;
	} tables[] = {{exec_tools, nr_exec_tools}, {pty_tools, nr_pty_tools},
		{file_tools, nr_file_tools}, {service_tools, nr_service_tools},
		{machine_tools, nr_machine_tools}, {owner_tools, nr_owner_tools}};

	ASSERT(i < tools_nr());
	for (size_t t = 0; t < ARRAY_SIZE(tables); t++) {
		if (i < tables[t].nr)
			return &tables[t].tools[i];
		i -= tables[t].nr;
	}
	return NULL;
}

// The tables are our own text: what does not parse is a mistake of ours.
static void parse(void)
{
	ASSERT(tools_nr() <= TOOLS_MAX);
	for (size_t i = 0; i < tools_nr(); i++) {
		const struct tool *t = tools_at(i);
		json_t *output = json_loads(t->output, JSON_REJECT_DUPLICATES, NULL);

		inputs[i] = json_loads(t->input, JSON_REJECT_DUPLICATES, NULL);
		listed[i] = json_pack("{s:s, s:s, s:s, s:O, s:o, s:{s:b, s:b, s:b, s:b}}", "name",
			t->name, "title", t->title, "description", t->description, "inputSchema",
			inputs[i], "outputSchema", output, "annotations", "readOnlyHint",
			t->read_only, "destructiveHint", t->destructive, "idempotentHint",
			t->idempotent, "openWorldHint", 0);
		ASSERT(inputs[i] && listed[i]);
	}
}

const struct tool *tools_find(const char *name, enum config_access level, const json_t **ret_input)
{
	pthread_once(&parsed, parse);
	for (size_t i = 0; i < tools_nr(); i++) {
		const struct tool *t = tools_at(i);

		if (strcmp(t->name, name) != 0 || t->level > level || level == CONFIG_ACCESS_NONE)
			continue;
		if (ret_input)
			*ret_input = inputs[i];
		return t;
	}
	return NULL;
}

json_t *tools_list(enum config_access level)
{
	json_t *list = json_array();

	pthread_once(&parsed, parse);
	for (size_t i = 0; i < tools_nr(); i++)
		if (tools_at(i)->level <= level && level != CONFIG_ACCESS_NONE)
			json_array_append(list, listed[i]);
	return list;
}

// --- Arguments -------------------------------------------------------------------------------

const char *arg_text(const struct tool_call *call, const char *key, const char *fallback)
{
	const char *text = json_string_value(json_object_get(call->arguments, key));

	return text ? text : fallback;
}

bool arg_flag(const struct tool_call *call, const char *key, bool fallback)
{
	const json_t *value = json_object_get(call->arguments, key);

	return value ? json_is_true(value) : fallback;
}

uint64_t arg_number(const struct tool_call *call, const char *key, uint64_t fallback)
{
	const json_t *value = json_object_get(call->arguments, key);

	return value ? (uint64_t)json_integer_value(value) : fallback;
}

int arg_path(const struct tool_call *call, const char *key, const char **ret, struct err *err)
{
	const char *path = arg_text(call, key, "");

	if (path[0] != '/')
		return err_set(err, -EINVAL,
			"%s: '%.80s' is not a whole path: begin it with / (there is no current "
			"folder)",
			key, path);
	*ret = path;
	return 0;
}

// --- The guest -------------------------------------------------------------------------------

int call_connect(const struct tool_call *call, struct err *err)
{
	const struct mcp_machine *m = call->machine;
	int fd = agent_connect(
		m->run_dir, m->vsock, AGENT_PORT, call->cancel_fd, now_ns() + CALL_ANSWER_NS, err);

	if (fd == -ENOENT || fd == -ECONNREFUSED)
		return err_set(err, -ESRCH,
			"the machine '%s' is not running: ask its owner for `mayfly up %s`",
			m->name, m->name);
	return fd;
}

int call_files(const struct tool_call *call, struct agent_files *ret, struct err *err)
{
	int fd = call_connect(call, err);

	if (fd < 0)
		return fd;
	*ret = (struct agent_files){.conn_fd = fd,
		.user = arg_text(call, "user", NULL),
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd};
	return 0;
}

struct answer {
	struct buf *out;
	size_t left;
	bool cut;
	struct buf words; // on stderr
	atomic_uint_fast64_t *moved_bytes;
};

static int take_answer(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct answer *a = ctx;
	size_t n = MIN(len, a->left);

	atomic_fetch_add(a->moved_bytes, len);
	if (is_err) {
		buf_append(&a->words, bytes, MIN(len, 400 - MIN(a->words.len, (size_t)400)));
		return 0;
	}
	a->left -= n;
	a->cut |= n < len;
	return buf_append(a->out, bytes, n) < 0 ? err_errno(err, -ENOMEM, "output") : 0;
}

int call_ask(struct tool_call *call, const char *const *argv, size_t max_bytes, struct buf *out,
	bool *ret_cut, struct err *err)
{
	struct answer a = {.out = out, .left = max_bytes, .moved_bytes = &call->moved_bytes};
	struct agent_result result = {0};
	const struct agent_exec x = {
		.argv = argv,
		.timeout_ms = CALL_ANSWER_NS / 1000000,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.output = take_answer,
		.output_ctx = &a,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
	};
	CLEANUP_FD int fd = call_connect(call, err);
	int r = fd < 0 ? fd : agent_exec(fd, &x, &result, err);

	if (r == 0 && result.timed_out)
		r = err_set(
			err, -ETIMEDOUT, "%s in the machine did not end within a minute", argv[0]);
	else if (r == 0 && result.exit_code > 1 && out->len == 0 && a.words.len)
		r = err_set(err, -EIO, "%.*s", (int)a.words.len, (char *)a.words.data);
	buf_fini(&a.words);
	if (r < 0)
		return r;
	*ret_cut = a.cut;
	return result.exit_code;
}

// --- The host --------------------------------------------------------------------------------

static int start_own(const struct tool_call *call, const char *const *argv, int out_fd,
	pid_t *ret_pid, struct err *err)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none, pipe_signal;
	int r;

	sigemptyset(&none);
	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, out_fd, STDOUT_FILENO);
	posix_spawn_file_actions_adddup2(&actions, out_fd, STDERR_FILENO);
	// Its own group: Ctrl-C at the client's terminal is not meant for it.
	posix_spawnattr_setflags(
		&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setsigdefault(&attr, &pipe_signal);
	r = posix_spawn(ret_pid, call->machine->program, &actions, &attr,
		(char *const *)(uintptr_t)argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return r ? err_errno(err, -r, "%s", call->machine->program) : 0;
}

// Until it has closed its output: 0, or why it was told to end.
static int hear_out(const struct tool_call *call, int fd, int pid_fd, bool no_cancel,
	struct buf *out, struct err *err)
{
	uint8_t bytes[4096];
	int r = 0;

	for (;;) {
		struct pollfd p[2] = {{.fd = fd, .events = POLLIN},
			{.fd = no_cancel || r ? -1 : call->cancel_fd, .events = POLLIN}};
		ssize_t n;

		if (poll(p, 2, -1) < 0)
			continue;
		if (p[1].revents) {
			r = err_set(err, -ECANCELED, "cancelled");
			pidfd_send_signal(pid_fd, SIGTERM, NULL, 0);
		}
		if (!p[0].revents)
			continue;
		n = read(fd, bytes, sizeof(bytes));
		if (n == 0 || (n < 0 && errno != EINTR))
			return r;
		if (n > 0 && out->len + (size_t)n <= OWN_OUTPUT_BYTES) {
			buf_append(out, bytes, (size_t)n);
		} else if (n > 0 && r == 0) {
			r = err_set(err, -EMSGSIZE, "mayfly said too much");
			pidfd_send_signal(pid_fd, SIGKILL, NULL, 0);
		}
	}
}

int call_own(struct tool_call *call, const char *const *argv, bool no_cancel, struct buf *out,
	struct err *err)
{
	CLEANUP_FD int pid_fd = -1;
	int p[2], status = 0, r;
	pid_t pid = -1;

	if (pipe2(p, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "pipe");
	r = start_own(call, argv, p[1], &pid, err);
	fd_close(&p[1]);
	if (r == 0) {
		pid_fd = pidfd_open(pid, 0);
		r = hear_out(call, p[0], pid_fd, no_cancel, out, err);
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
	}
	if (r == 0 && status) {
		size_t n = MIN(out->len, (size_t)400);

		while (n && out->data[n - 1] == '\n')
			n--;
		r = err_set(err, -EIO, "%.*s", (int)n, n ? (char *)out->data : "");
	}
	fd_close(&p[0]);
	return r;
}

// --- The owner ---------------------------------------------------------------------------------

int call_ask_owner(struct tool_call *call, const char *action, const json_t *arguments,
	char ret_id[APPROVAL_ID_BYTES], enum approval_state *ret, struct err *err)
{
	const struct approvals a = {.dir = call->machine->approvals_dir,
		.machine = call->machine->name,
		.machine_dir = call->machine->dir};
	const uint64_t until_ns = now_ns() + arg_number(call, "wait_seconds", 0) * 1000000000;

	for (;;) {
		struct pollfd p = {.fd = call->cancel_fd, .events = POLLIN};
		int r = approvals_ask(&a, action, arguments, ret_id, ret, err);

		call->asked_owner = r == 0 && *ret == APPROVAL_PENDING;
		if (r < 0 || *ret != APPROVAL_PENDING || now_ns() >= until_ns)
			return r;
		if (poll(&p, 1, ASK_MS) > 0)
			return err_set(err, -ECANCELED, "cancelled");
	}
}

// Its own process takes the point: the session's end waits for no guest.
void call_take_point(struct tool_call *call)
{
	const char *argv[] = {"mayfly", "history", "--take", "--", call->machine->name, NULL};
	CLEANUP_BUF struct buf out = {0};
	char path[PATH_MAX];
	struct err ignored;

	if (snprintf(path, sizeof(path), "%s/work/history", call->machine->dir) <
			(int)sizeof(path) &&
		access(path, F_OK) == 0)
		(void)call_own(call, argv, true, &out, &ignored);
}
