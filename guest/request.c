// SPDX-License-Identifier: Apache-2.0
// What the host may ask for: one function a request. The agent's only thread.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "guest/facts.h"
#include "guest/files.h"
#include "guest/port.h"
#include "guest/session.h"
#include "guest/spawn.h"
#include "guest/user.h"
#include "guest/wake.h"
#include "vmm/base/fd.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Every program that starts without a word about its environment gets these.
#define DEFAULT_VARS 12

// Where there is a proxy, these, too: programs look for one or the other.
static const char *const proxy_vars[] = {
	"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"};

// argv and envp of the command being started. One at a time: the loop has one thread.
static const char *argv_of[REQUEST_NODES_MAX + 1];
static const char *envp_of[REQUEST_NODES_MAX + DEFAULT_VARS];

struct exec {
	const struct json_node *argv, *env;
	const char *cwd, *user;
	const char *job; // NULL: for this session alone
	bool use_stdin, tty;
	bool files; // not a command but ourselves, see files.h
	int64_t rows, columns, timeout_ms;
	int64_t memory_max, processes_max, cpu_time_ms;
};

// An array of strings to a NULL-terminated vector of at most cap pointers.
static int vector_of(struct agent *a, const struct json_node *array, const char *name,
	const char **ret, size_t *ret_len, struct err *err)
{
	size_t n = *ret_len; // what is there already

	if (array) {
		const struct json_node *item = array + 1;

		for (; item < a->nodes + array->end; item = a->nodes + item->end) {
			if (item->type != JSON_STRING)
				return err_set(err, -EINVAL, "\"%s\" has more than strings", name);
			ret[n++] = item->str;
		}
	}
	ret[n] = NULL;
	*ret_len = n;
	return 0;
}

static const char *env_get(const char *const *envp, size_t n, const char *name)
{
	size_t len = strlen(name);

	for (size_t i = 0; i < n; i++)
		if (strncmp(envp[i], name, len) == 0 && envp[i][len] == '=')
			return envp[i] + len + 1;
	return NULL;
}

// Adds name=value unless the request has its own. text lives as long as the call to spawn().
static void env_default(
	size_t *n, size_t given, char *text, size_t size, const char *name, const char *value)
{
	if (env_get(envp_of, given, name))
		return;
	snprintf(text, size, "%s=%s", name, value);
	envp_of[(*n)++] = text;
}

// A pipe whose end at `ours` stays with us. Both ends block; see read_output().
static int make_pipe(struct task *t, enum task_fd i, int *ret_theirs)
{
	int p[2], ours = i == FD_STDIN ? 1 : 0;

	if (pipe2(p, O_CLOEXEC) < 0)
		return -errno;
	t->fds[i] = p[ours];
	*ret_theirs = p[!ours];
	// What the host sends may be more than the command takes.
	if (i == FD_STDIN && fcntl(p[ours], F_SETFL, O_NONBLOCK) < 0)
		return -errno;
	return 0;
}

static int make_terminal(
	struct task *t, const struct exec *x, const struct spawn *how, int *ret_theirs)
{
	struct winsize size = {.ws_row = (uint16_t)x->rows, .ws_col = (uint16_t)x->columns};
	int unlocked = 0, fd;

	fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return -errno;
	t->fds[FD_STDOUT] = fd;
	if (ioctl(fd, TIOCSPTLCK, &unlocked) < 0 || ioctl(fd, TIOCSWINSZ, &size) < 0)
		return -errno;
	*ret_theirs = ioctl(fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (*ret_theirs < 0)
		return -errno;
	if (how->set_user && fchown(*ret_theirs, how->uid, (gid_t)-1) < 0)
		return -errno;
	// A file of its own for the other direction: all sessions are alike from here on.
	t->fds[FD_STDIN] = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	return t->fds[FD_STDIN] < 0 ? -errno : 0;
}

static int make_files(struct agent *a, struct task *t, const struct exec *x, struct spawn *how,
	int theirs[3], struct err *err)
{
	int rc = 0;

	if (x->tty) {
		rc = make_terminal(t, x, how, &theirs[0]);
		if (rc < 0)
			return err_errno(err, rc, "cannot open a terminal");
		how->fds[0] = how->fds[1] = how->fds[2] = theirs[0];
		return 0;
	}
	if (x->use_stdin)
		rc = make_pipe(t, FD_STDIN, &theirs[0]);
	if (rc == 0)
		rc = make_pipe(t, FD_STDOUT, &theirs[1]);
	if (rc == 0)
		rc = make_pipe(t, FD_STDERR, &theirs[2]);
	if (rc < 0)
		return err_errno(err, rc, "cannot open a pipe");
	how->fds[0] = x->use_stdin ? theirs[0] : a->null_fd;
	how->fds[1] = theirs[1];
	how->fds[2] = theirs[2];
	return 0;
}

static int exec_decode(
	struct agent *a, const struct json_field *extra, struct exec *x, struct err *err)
{
	const struct json_field fields[] = {
		extra[0],
		extra[1],
		{"argv", JSON_ARRAY, &x->argv, 0, 0},
		{"env", JSON_ARRAY, &x->env, 0, 0},
		{"cwd", JSON_STRING, &x->cwd, 0, 0},
		{"user", JSON_STRING, &x->user, 0, 0},
		{"stdin", JSON_BOOL, &x->use_stdin, 0, 0},
		{"tty", JSON_BOOL, &x->tty, 0, 0},
		{"rows", JSON_INT, &x->rows, 0, UINT16_MAX},
		{"columns", JSON_INT, &x->columns, 0, UINT16_MAX},
		{"timeout_ms", JSON_INT, &x->timeout_ms, 0, INT64_MAX / 1000000},
		{"memory_max_bytes", JSON_INT, &x->memory_max, 1, INT64_MAX},
		{"processes_max", JSON_INT, &x->processes_max, 1, INT32_MAX},
		{"cpu_time_ms", JSON_INT, &x->cpu_time_ms, 1, INT64_MAX / 1000000},
		{"job", JSON_STRING, &x->job, 0, 0},
	};

	return json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);
}

static int take_tree(struct task *t, const struct exec *x, struct err *err)
{
	const struct tree_limits limits = {
		.memory_bytes = (uint64_t)x->memory_max, .processes = (uint64_t)x->processes_max};
	uint64_t used;
	int rc = 0;

	if (limits.memory_bytes || limits.processes)
		rc = tree_take_limited(&limits, &t->tree, err);
	else
		t->tree = tree_take();
	if (rc < 0 || !x->cpu_time_ms)
		return rc;
	if (!tree_cpu_us(t->tree, &used))
		return err_set(err, -EOPNOTSUPP, "this guest counts no CPU time");
	// The count is that of the cgroup, which has had commands before.
	t->cpu_limit_us = used + (uint64_t)x->cpu_time_ms * 1000;
	return 0;
}

// Starts the command of t. A failure leaves what has been opened to the owner of t.
static int exec_start(
	struct agent *a, struct task *t, const struct exec *x, int *ret_exit_code, struct err *err)
{
	struct user user = {.name = "root", .home = "/root"};
	struct spawn how = {.argv = argv_of, .envp = envp_of, .cwd = x->cwd, .tty = x->tty};
	char path[sizeof("PATH=" DEFAULT_PATH)], term[32];
	char home[sizeof("HOME=") + sizeof(user.home)];
	char name[sizeof("USER=") + sizeof(user.name)],
		login[sizeof("LOGNAME=") + sizeof(user.name)];
	char proxies[ARRAY_SIZE(proxy_vars)][48], url[32];
	int theirs[3] = {-1, -1, -1};
	size_t argc = 0, given = 0, n;
	pid_t pid = 0;
	int rc;

	if (x->files) {
		how.file = "/proc/self/exe"; // of the child, which is the agent until it executes
		argv_of[argc++] = FILES_NAME;
	}
	rc = vector_of(a, x->argv, "argv", argv_of, &argc, err);
	if (rc == 0)
		rc = vector_of(a, x->env, "env", envp_of, &given, err);
	if (rc < 0)
		return rc;
	if (argc == 0)
		return err_set(err, -EINVAL, "no command");
	for (size_t i = 0; i < given; i++)
		if (!strchr(envp_of[i], '=') || envp_of[i][0] == '=')
			return err_set(
				err, -EINVAL, "environment \"%.64s\": want NAME=VALUE", envp_of[i]);
	if (x->user) {
		rc = user_lookup(a->config.etc_dir, x->user, &user, err);
		if (rc < 0)
			return rc;
		how.set_user = true;
		how.uid = user.uid;
		how.gid = user.gid;
		how.ngroups = MIN(user.ngroups, SPAWN_GROUPS_MAX);
		memcpy(how.groups, user.groups, sizeof(gid_t) * (size_t)how.ngroups);
	}
	n = given;
	env_default(&n, given, path, sizeof(path), "PATH", DEFAULT_PATH);
	env_default(&n, given, home, sizeof(home), "HOME", user.home);
	env_default(&n, given, name, sizeof(name), "USER", user.name);
	env_default(&n, given, login, sizeof(login), "LOGNAME", user.name);
	if (x->tty)
		env_default(&n, given, term, sizeof(term), "TERM", "xterm-256color");
	if (a->proxy_port) {
		snprintf(url, sizeof(url), "http://127.0.0.1:%u", a->proxy_port);
		for (size_t i = 0; i < ARRAY_SIZE(proxies); i++)
			env_default(&n, given, proxies[i], sizeof(proxies[i]), proxy_vars[i],
				i < 4 ? url : "localhost,127.0.0.1,::1");
	}
	envp_of[n] = NULL;
	how.path = env_get(envp_of, n, "PATH");

	rc = make_files(a, t, x, &how, theirs, err);
	if (rc == 0) {
		rc = take_tree(t, x, err);
	}
	if (rc == 0) {
		how.cgroup_fd = tree_cgroup_fd(t->tree);
		pid = spawn(&how, ret_exit_code, err);
		rc = pid < 0 ? pid : 0;
	}
	for (int i = 0; i < 3; i++)
		fd_close(&theirs[i]);
	if (rc < 0)
		return rc;
	t->pid = pid;
	t->tty = x->tty;
	if (x->timeout_ms)
		t->timeout_ns = now_ns() + (uint64_t)x->timeout_ms * 1000000;
	if (t->timeout_ns || t->cpu_limit_us)
		task_schedule(a, t);
	return 0;
}

static int start_job(struct agent *a, struct session *s, const struct exec *x, int *ret_exit_code,
	struct err *err)
{
	char text[1024];
	struct json_out out = {.buf = text, .cap = sizeof(text)};
	struct job *j;
	int rc;

	if (x->job[0] && !job_name_is_valid(x->job))
		return err_set(err, -EINVAL,
			"\"job\": want up to %d letters, digits, '.', '_' and '-'", JOB_NAME_MAX);
	rc = job_create(a, x->job, &j, err);
	if (rc < 0)
		return rc;
	rc = exec_start(a, &j->task, x, ret_exit_code, err);
	if (rc < 0) {
		job_destroy(a, j);
		return rc;
	}
	j->first_pid = j->task.pid;
	agent_mark_job(a, j);
	job_write(&out, j);
	ASSERT(!out.full);
	session_reply(s, text, out.len);
	return 0;
}

static int start(struct agent *a, struct session *s, const struct exec *x, int *ret_exit_code,
	struct err *err)
{
	int rc;

	if (x->job)
		return start_job(a, s, x, ret_exit_code, err);
	rc = exec_start(a, &s->task, x, ret_exit_code, err);
	if (rc == 0)
		s->state = SESSION_RUN;
	return rc;
}

static int do_exec(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	struct exec x = {0};
	int rc = exec_decode(a, common, &x, err);

	return rc < 0 ? rc : start(a, s, &x, ret_exit_code, err);
}

static int do_files(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	struct exec x = {.files = true};
	int rc = exec_decode(a, common, &x, err);

	if (rc == 0 && (x.tty || x.job))
		rc = err_set(err, -EINVAL, "files take no terminal and are no job");
	return rc < 0 ? rc : start(a, s, &x, ret_exit_code, err);
}

static int need_job(struct agent *a, const char *name, struct job **ret, struct err *err)
{
	*ret = name ? job_find(a, name) : NULL;
	if (!*ret)
		return err_set(err, -ESRCH, "there is no job \"%.64s\"", name ? name : "");
	return 0;
}

static int do_attach(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	const char *name = NULL;
	bool follow = true;
	int64_t rows = 0, columns = 0, tail = INT64_MAX, offsets[2] = {-1, -1};
	const struct json_field fields[] = {
		common[0],
		common[1],
		{"job", JSON_STRING, &name, 0, 0},
		{"follow", JSON_BOOL, &follow, 0, 0},
		{"tail_bytes", JSON_INT, &tail, 0, INT64_MAX},
		{"stdout_offset", JSON_INT, &offsets[0], 0, INT64_MAX},
		{"stderr_offset", JSON_INT, &offsets[1], 0, INT64_MAX},
		{"rows", JSON_INT, &rows, 0, UINT16_MAX},
		{"columns", JSON_INT, &columns, 0, UINT16_MAX},
	};
	struct job *j;
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc == 0)
		rc = need_job(a, name, &j, err);
	if (rc < 0)
		return rc;
	for (int i = 0; i < 2; i++) {
		const struct job_log *log = &j->logs[i];
		uint64_t back = MIN((uint64_t)tail, log->end);

		s->view_off[i] = MIN(
			offsets[i] >= 0 ? (uint64_t)offsets[i] : log->end - back, log->end);
	}
	s->follow = follow;
	if (rows && columns && j->task.tty)
		task_resize(&j->task, (uint16_t)rows, (uint16_t)columns);
	session_view(s, j);
	return 0;
}

static int do_jobs(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	static char text[FRAME_PAYLOAD_MAX];
	struct json_out out = {.buf = text, .cap = sizeof(text)};
	int rc = json_decode(a->nodes, a->nodes, common, 2, JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc < 0)
		return rc;
	json_open(&out, '{');
	json_key(&out, "jobs");
	json_open(&out, '[');
	for (int i = 0; i < JOBS_MAX; i++)
		if (a->jobs[i].used)
			job_write(&out, &a->jobs[i]);
	json_close(&out, ']');
	json_close(&out, '}');
	ASSERT(!out.full);
	session_reply(s, text, out.len);
	return 0;
}

static int do_signal(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	const char *name = NULL;
	int64_t number = 0;
	bool tree = false;
	const struct json_field fields[] = {
		common[0],
		common[1],
		{"job", JSON_STRING, &name, 0, 0},
		{"signal", JSON_INT, &number, 1, 64},
		{"tree", JSON_BOOL, &tree, 0, 0},
	};
	struct job *j;
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc == 0)
		rc = need_job(a, name, &j, err);
	if (rc < 0)
		return rc;
	if (!number && !tree)
		return err_set(err, -EINVAL, "no \"signal\"");
	if (!j->task.pid)
		return err_set(err, -ESRCH, "the job \"%s\" has ended", j->name);
	if (number && kill(-j->task.pid, (int)number) < 0) // it leads a group of its own
		return err_errno(err, -errno, "job \"%s\"", j->name);
	if (tree)
		task_kill(&j->task);
	session_reply(s, "{}", 2);
	return 0;
}

static int do_forget(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	const char *name = NULL;
	const struct json_field fields[] = {
		common[0], common[1], {"job", JSON_STRING, &name, 0, 0}};
	struct job *j;
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc == 0)
		rc = need_job(a, name, &j, err);
	if (rc < 0)
		return rc;
	if (!j->finished)
		return err_set(err, -EBUSY, "the job \"%s\" is running", j->name);
	job_destroy(a, j);
	session_reply(s, "{}", 2);
	return 0;
}

static int do_connect(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	int64_t port = 0;
	const struct json_field fields[] = {
		common[0], common[1], {"port", JSON_INT, &port, 1, UINT16_MAX}};
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc == 0 && !port)
		rc = err_set(err, -EINVAL, "no \"port\"");
	return rc < 0 ? rc : port_connect(a, s, (uint16_t)port, err);
}

static int do_listen(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	int64_t port = 0, host_port = 0;
	bool proxy = false;
	const struct json_field fields[] = {
		common[0],
		common[1],
		{"port", JSON_INT, &port, 1, UINT16_MAX},
		{"host_port", JSON_INT, &host_port, 1, UINT32_MAX - 1},
		{"proxy", JSON_BOOL, &proxy, 0, 0},
	};
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc == 0 && (!port || !host_port))
		rc = err_set(err, -EINVAL, "want \"port\" and \"host_port\"");
	if (rc == 0 && !a->config.dial)
		rc = err_set(err, -EOPNOTSUPP, "this agent cannot reach the host");
	if (rc == 0)
		rc = port_listen(s, (uint16_t)port, (uint32_t)host_port, err);
	if (rc == 0 && proxy) {
		s->proxy = true;
		a->proxy_port = s->port;
	}
	return rc;
}

static int do_shutdown(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	int rc = json_decode(a->nodes, a->nodes, common, 2, JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc < 0)
		return rc;
	s->shutdown = true;
	session_reply(s, "{}", 2);
	return 0;
}

static int do_kill_all(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	int rc = json_decode(a->nodes, a->nodes, common, 2, JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc < 0)
		return rc;
	// Beside an init of the machine's own it would take that one's services, and not all.
	if (getpid() != 1)
		return err_set(err, -EOPNOTSUPP, "the agent is not PID 1 here");
	// One that forks at this moment has the signal before its child is there.
	(void)kill(-1, SIGKILL);
	session_reply(s, "{}", 2);
	return 0;
}

static int do_facts(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	static char text[FRAME_PAYLOAD_MAX];
	struct json_out out = {.buf = text, .cap = sizeof(text)};
	int64_t processes_max = 0;
	const struct json_field fields[] = {common[0], common[1],
		{"processes_max", JSON_INT, &processes_max, 0, FACTS_PROCESSES_MAX}};
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc < 0)
		return rc;
	facts_write(&out, "/proc", (unsigned)processes_max);
	ASSERT(!out.full);
	session_reply(s, text, out.len);
	return 0;
}

static bool is_hex(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

static int digit(char c)
{
	return c <= '9' ? c - '0' : c - 'a' + 10;
}

// At most cap bytes. Returns how many, or -EINVAL.
static int unhex(const char *text, uint8_t *ret, size_t cap)
{
	size_t n = 0;

	for (; *text; text += 2) {
		if (n == cap || !is_hex(text[0]) || !is_hex(text[1]))
			return -EINVAL;
		ret[n++] = (uint8_t)(digit(text[0]) << 4 | digit(text[1]));
	}
	return (int)n;
}

static bool is_uuid(const char *text)
{
	for (int i = 0; i < 36; i++)
		if (i == 8 || i == 13 || i == 18 || i == 23 ? text[i] != '-' : !is_hex(text[i]))
			return false;
	return text[36] == '\0';
}

static bool is_machine_id(const char *text)
{
	for (int i = 0; i < 32; i++)
		if (!is_hex(text[i]))
			return false;
	return text[32] == '\0';
}

static int do_wake(struct agent *a, struct session *s, const struct json_field *common,
	int *ret_exit_code, struct err *err)
{
	struct wake w = {0};
	const char *entropy = NULL, *mac = NULL;
	const struct json_field fields[] = {
		common[0],
		common[1],
		{"clock_ns", JSON_INT, &w.clock_ns, 1, INT64_MAX},
		{"entropy", JSON_STRING, &entropy, 0, 0},
		{"hostname", JSON_STRING, &w.hostname, 0, 0},
		{"boot_id", JSON_STRING, &w.boot_id, 0, 0},
		{"machine_id", JSON_STRING, &w.machine_id, 0, 0},
		{"mac", JSON_STRING, &mac, 0, 0},
	};
	int rc = json_decode(
		a->nodes, a->nodes, fields, ARRAY_SIZE(fields), JSON_REFUSE_UNKNOWN, err);

	(void)ret_exit_code;
	if (rc < 0)
		return rc;
	if (entropy) {
		rc = unhex(entropy, w.entropy, sizeof(w.entropy));
		if (rc <= 0)
			return err_set(err, -EINVAL,
				"\"entropy\": want 1 to %d bytes in hexadecimal", WAKE_ENTROPY_MAX);
		w.entropy_len = (size_t)rc;
	}
	if (w.boot_id && !is_uuid(w.boot_id))
		return err_set(err, -EINVAL, "\"boot_id\" is not a UUID");
	if (w.machine_id && !is_machine_id(w.machine_id))
		return err_set(err, -EINVAL, "\"machine_id\": want 32 hexadecimal digits");
	if (mac && unhex(mac, w.mac, sizeof(w.mac)) != sizeof(w.mac))
		return err_set(err, -EINVAL, "\"mac\": want 12 hexadecimal digits");
	w.has_mac = mac != NULL;
	rc = wake_up(&w, "", err);
	if (rc < 0)
		return rc;
	session_reply(s, "{}", 2);
	return 0;
}

static const struct request {
	const char *op;
	// Makes the session run or queues its reply; an error is queued by the caller, with
	// *ret_exit_code. common are the fields that every request has.
	int (*run)(struct agent *a, struct session *s, const struct json_field *common,
		int *ret_exit_code, struct err *err);
} requests[] = {
	{"attach", do_attach},
	{"connect", do_connect},
	{"exec", do_exec},
	{"facts", do_facts},
	{"files", do_files},
	{"forget", do_forget},
	{"jobs", do_jobs},
	{"kill-all", do_kill_all},
	{"listen", do_listen},
	{"shutdown", do_shutdown},
	{"signal", do_signal},
	{"wake", do_wake},
};

static int dispatch(
	struct agent *a, struct session *s, size_t len, int *ret_exit_code, struct err *err)
{
	const char *op = NULL;
	int64_t version = 0;
	const struct json_field common[] = {
		{"v", JSON_INT, &version, 0, INT64_MAX},
		{"op", JSON_STRING, &op, 0, 0},
	};
	int rc = json_parse((char *)s->in, len, a->nodes, REQUEST_NODES_MAX);

	if (rc == -E2BIG)
		return err_set(err, rc, "the request has more than %d parts", REQUEST_NODES_MAX);
	if (rc < 0)
		return err_set(err, rc, "the request is not valid JSON");
	rc = json_decode(a->nodes, a->nodes, common, ARRAY_SIZE(common), JSON_SKIP_UNKNOWN, err);
	if (rc < 0)
		return rc;
	if (version != PROTO_VERSION)
		return err_set(err, -EPROTONOSUPPORT,
			"this agent speaks version %d of the protocol", PROTO_VERSION);
	for (size_t i = 0; op && i < ARRAY_SIZE(requests); i++)
		if (strcmp(op, requests[i].op) == 0)
			return requests[i].run(a, s, common, ret_exit_code, err);
	return err_set(err, -EOPNOTSUPP, "no such request: \"%.64s\"", op ? op : "");
}

void request_dispatch(struct agent *a, struct session *s, size_t len)
{
	struct err err = {0};
	int exit_code = 125;

	if (dispatch(a, s, len, &exit_code, &err) < 0)
		session_error(s, exit_code, &err);
}
