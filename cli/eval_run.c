// SPDX-License-Identifier: Apache-2.0
// One task of mayfly eval; see the header. One thread.
#include "cli/eval_run.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/copy.h"
#include "cli/exec_options.h"
#include "cli/patience.h"
#include "cli/rootfs_store.h"
#include "cli/throwaway.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"

#define LOG_MAX_BYTES    (4 * MIB) // of each phase
#define CALL_NS          60000000000ULL // what takes the agent no time
#define COPY_NS          600000000000ULL
#define POOL_PATIENCE_NS 3600000000000ULL
#define START_RETRY_MS   50
#define IMAGE_MEMORY     "512M" // as for mayfly run

struct run {
	const struct eval_task *task;
	const char *folder, *dir;
	struct throwaway machine;
	struct pool pool;
	struct exec_command env; // what the image and the task say about commands
	int cancel_fd; // readable when the machine has ended, or a signal came
	json_t *result;
};

// --- Words -----------------------------------------------------------------------------------

static json_t *seconds(uint64_t since_ns)
{
	return json_real((double)(now_ns() - since_ns) / 1e9);
}

// Text of a guest's making, as JSON may have it.
static json_t *guest_text(const char *text, size_t len)
{
	json_t *json = json_stringn(text, len);

	if (json)
		return json;
	CLEANUP_FREE char *ascii = malloc(len + 1);

	if (!ascii)
		return NULL;
	for (size_t i = 0; i < len; i++)
		ascii[i] = (unsigned char)text[i] < 0x80 && text[i] ? text[i] : '?';
	return json_stringn(ascii, len);
}

static int watch(int epoll_fd, int fd)
{
	struct epoll_event in = {.events = EPOLLIN};

	return fd < 0 ? -EBADF : epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &in) < 0 ? -errno : 0;
}

// --- The machine -----------------------------------------------------------------------------

static int configure(struct run *run, struct err *err)
{
	const struct eval_task *task = run->task;
	struct config *config = &run->machine.config;
	char image[PATH_MAX];
	CLEANUP_ROOTFS struct rootfs rootfs = {0};
	char cpus[16];
	int r = 0;

	config_defaults(config);
	if (task->pool) {
		r = pool_open(task->pool, &run->pool, err);
		run->machine.pool = &run->pool;
		if (r == 0)
			*config = run->pool.config;
		return r;
	}
	if (task->image) {
		r = rootfs_find(task->image, &rootfs, err);
		if (r == 0 && snprintf(image, sizeof(image), "%s/" ROOTFS_DISK, rootfs.dir) >=
				      (int)sizeof(image))
			r = err_errno(err, -ENAMETOOLONG, "%s", rootfs.dir);
		config->root = CONFIG_ROOT_DISK;
		if (r == 0)
			r = config_set(config, "disk", "file", image, err);
	}
	if (r == 0 && (task->memory || task->image))
		r = config_set(config, "machine", "memory",
			task->memory ? task->memory : IMAGE_MEMORY, err);
	snprintf(cpus, sizeof(cpus), "%u", MAX(task->cpus, 1U));
	if (r == 0)
		r = config_set(config, "machine", "cpus", cpus, err);
	if (r == 0 && task->net)
		r = config_set(config, "net", "mode", task->net, err);
	if (r == 0 && task->allow)
		r = config_set(config, "net", "allow", task->allow, err);
	return r;
}

int eval_check(const struct eval_task *task, struct err *err)
{
	struct run *run = calloc(1, sizeof(*run));
	int r;

	if (!run)
		return err_errno(err, -ENOMEM, "task");
	run->task = task;
	r = configure(run, err);
	if (r == 0 && run->machine.config.init[0])
		r = err_set(err, -EINVAL,
			"pool '%s' has an init of its own: its processes cannot be ended before "
			"the verifier",
			task->pool);
	free(run);
	return r < 0 ? err_wrap(err, r, "its machine") : 0;
}

// Returns an agent's fresh connection.
static int connect_agent(struct run *run, uint64_t deadline_ns, struct err *err)
{
	return agent_connect(run->machine.launch.run_dir, LAUNCH_VSOCK, AGENT_PORT, run->cancel_fd,
		deadline_ns, err);
}

static void on_problem(void *ctx, const char *path, int errno_value)
{
	char text[PATH_MAX];

	(void)ctx;
	tree_printable(text, sizeof(text), path);
	fprintf(stderr, "%s: %s\n", text, copy_problem_text(errno_value));
}

static struct copy copy_of(struct run *run)
{
	return (struct copy){
		.run_dir = run->machine.launch.run_dir,
		.vsock = LAUNCH_VSOCK,
		.max_bytes = run->task->max_out_bytes,
		.signal_fd = -1,
		.cancel_fd = run->cancel_fd,
		.deadline_ns = now_ns() + COPY_NS,
		.problem = on_problem,
	};
}

static int bring_in(struct run *run, const json_t *list, struct err *err)
{
	char from[PATH_MAX], parent[PATH_MAX];
	json_t *file;
	size_t i;
	int r = 0;

	json_array_foreach(list, i, file)
	{
		const char *to = json_string_value(json_object_get(file, "to"));
		struct copy copy = copy_of(run);
		struct agent_files files = {.signal_fd = -1, .cancel_fd = run->cancel_fd};
		struct stat st;
		char *slash;

		r = eval_source(
			run->folder, json_string_value(json_object_get(file, "from")), from, err);
		// Of a folder the content, so that "to" is what it is called.
		if (r == 0 && stat(from, &st) == 0 && S_ISDIR(st.st_mode) &&
			strlen(from) + 2 < sizeof(from))
			strcat(from, "/.");
		// The folder that it goes into.
		snprintf(parent, sizeof(parent), "%s", to);
		slash = strrchr(parent, '/');
		if (slash)
			slash[slash == parent] = '\0';
		if (r == 0)
			r = files.conn_fd = connect_agent(run, copy.deadline_ns, err);
		if (r >= 0) {
			files.deadline_ns = copy.deadline_ns;
			r = agent_mkdir(&files, parent, err);
			fd_close(&files.conn_fd);
		}
		if (r == 0)
			r = copy_in(&copy, from, to, err);
		if (r < 0)
			return err_wrap(err, r, "%s", to);
	}
	return r;
}

// --- Commands --------------------------------------------------------------------------------

struct log {
	int fd;
	uint64_t left;
};

static int on_output(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	static const char cut[] = "\n[what came after this was left out]\n";
	struct log *log = ctx;
	size_t take = MIN(len, log->left);
	int r = fd_write_all(log->fd, bytes, take);

	(void)is_err;
	if (r == 0 && take < len && log->left > 0)
		r = fd_write_all(log->fd, cut, sizeof(cut) - 1);
	log->left = take < len ? 0 : log->left - take;
	return r < 0 ? err_errno(err, r, "log") : 0;
}

// One command. Its status, or 124 when its time was over, in *ret_status.
static int execute(struct run *run, const json_t *command, struct log *log, uint64_t deadline_ns,
	int *ret_status, struct err *err)
{
	const char *argv[EVAL_ITEMS_MAX + 1] = {"sh", "-c", json_string_value(command)};
	struct agent_result result = {0};
	CLEANUP_FD int conn_fd = -1;
	uint64_t now = now_ns();
	struct agent_exec x = {
		.argv = argv,
		.env = run->env.env,
		.cwd = run->env.cwd,
		.user = run->env.user,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.output = on_output,
		.output_ctx = log,
		.signal_fd = -1,
		.cancel_fd = run->cancel_fd,
	};
	json_t *word;
	size_t i;
	int r;

	*ret_status = 124;
	if (now >= deadline_ns)
		return 0;
	x.timeout_ms = (deadline_ns - now) / 1000000 + 1;
	json_array_foreach(command, i, word) argv[i] = json_string_value(word);
	conn_fd = connect_agent(run, now + patience_ns(CALL_NS), err);
	if (conn_fd < 0)
		return conn_fd;
	r = agent_exec(conn_fd, &x, &result, err);
	if (result.timed_out || r == -ETIMEDOUT)
		return 0;
	*ret_status = result.exit_code;
	// What cannot be started has a status as in a shell.
	if (r < 0 && (result.exit_code == 126 || result.exit_code == 127)) {
		dprintf(log->fd, "%s\n", err ? err->msg : "");
		return 0;
	}
	return r;
}

// Commands until one fails. Returns the last one's status, or a negative errno.
static int phase(struct run *run, const char *name, const json_t *list, json_t *ret_statuses,
	struct err *err)
{
	uint64_t deadline_ns = now_ns() + run->task->timeout_s * 1000000000ULL;
	char path[PATH_MAX];
	struct log log = {.left = LOG_MAX_BYTES};
	CLEANUP_FD int fd = -1;
	json_t *command;
	int status = 0, r = 0;
	size_t i;

	if (json_array_size(list) == 0)
		return 0;
	if (snprintf(path, sizeof(path), "%s/%s.log", run->dir, name) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", run->dir);
	fd = log.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s", path);
	json_array_foreach(list, i, command)
	{
		r = execute(run, command, &log, deadline_ns, &status, err);
		if (r < 0)
			return err_wrap(err, r, "%s", name);
		json_array_append_new(ret_statuses, json_integer(status));
		if (status != 0)
			break;
	}
	return status;
}

// --- What is left ----------------------------------------------------------------------------

// Each to its base name in DIR/files. What is not there is told, and no failure.
static void fetch(struct run *run)
{
	char to[PATH_MAX], from[PATH_MAX];
	json_t *path, *missing;
	size_t i;

	if (json_array_size(run->task->files_out) == 0)
		return;
	missing = json_array();
	snprintf(to, sizeof(to), "%s/files", run->dir);
	mkdir(to, 0700);
	json_array_foreach(run->task->files_out, i, path)
	{
		struct copy copy = copy_of(run);
		struct err err = {0};

		snprintf(from, sizeof(from), "%s", json_string_value(path));
		if (copy_out(&copy, from, to, &err) < 0)
			json_array_append_new(missing, json_sprintf("%s: %s", from, err.msg));
	}
	if (json_array_size(missing) > 0)
		json_object_set(run->result, "files_missing", missing);
	json_decref(missing);
}

// The commands' own processes do not see the verifier's files, nor live to touch its result.
static int end_processes(struct run *run, struct err *err)
{
	uint64_t deadline_ns = now_ns() + patience_ns(CALL_NS);
	CLEANUP_FD int conn_fd = connect_agent(run, deadline_ns, err);

	return conn_fd < 0 ? conn_fd : agent_kill_all(conn_fd, run->cancel_fd, deadline_ns, err);
}

static void read_result(struct run *run, json_t *verifier)
{
	struct agent_files files = {.signal_fd = -1,
		.cancel_fd = run->cancel_fd,
		.deadline_ns = now_ns() + patience_ns(CALL_NS)};
	CLEANUP_FREE char *text = NULL;
	struct err err = {0};
	size_t len = 0;
	int r;

	if (!run->task->result)
		return;
	r = files.conn_fd = connect_agent(run, files.deadline_ns, &err);
	if (r >= 0)
		r = agent_read(
			&files, run->task->result, 0, EVAL_RESULT_BYTES, &text, &len, NULL, &err);
	fd_close(&files.conn_fd);
	json_object_set_new(verifier, r < 0 ? "result_error" : "result",
		r < 0 ? json_string(err.msg) : guest_text(text, len));
}

// Returns the verifier's status.
static int verify(struct run *run, struct err *err)
{
	json_t *list = json_array(), *statuses = json_array(), *verifier = json_object();
	int status;

	json_array_append(list, (json_t *)run->task->verifier);
	status = bring_in(run, run->task->verifier_files, err);
	if (status == 0)
		status = phase(run, "verifier", list, statuses, err);
	if (status >= 0) {
		json_object_set_new(verifier, "exit", json_integer(status));
		read_result(run, verifier);
		json_object_set(run->result, "verifier", verifier);
	}
	json_decref(list);
	json_decref(statuses);
	json_decref(verifier);
	return status;
}

// --- All of it -------------------------------------------------------------------------------

// What the image says, and the task over it.
static int take_env(struct run *run, struct err *err)
{
	static const char *const none[] = {"sh", NULL};
	const char *name;
	json_t *value;
	int r = exec_command_init(&run->env, "eval", (int)json_object_size(run->task->env), err);

	if (r < 0)
		return r;
	json_object_foreach((json_t *)run->task->env, name, value)
	{
		char *text;

		// As long as this process.
		if (asprintf(&text, "%s=%s", name, json_string_value(value)) < 0)
			return err_errno(err, -ENOMEM, "env");
		run->env.env[run->env.nr_env++] = text;
	}
	run->env.argv = none;
	run->env.cwd = run->task->workdir;
	run->env.user = run->task->user;
	return exec_command_image(&run->env, &run->machine.config, err);
}

// Of tasks that boot, or restore, a machine of their own as many as there are processors do so at a
// time: if all did, none would be ready in time. Whoever dies lets go. Returns the lock, the
// caller's. (Those of a pool take turns: see throwaway_start().)
static int take_start(const struct run *run, struct err *err)
{
	CLEANUP_FD int stop_fd = launch_stop_fd();
	struct pollfd stop = {.fd = stop_fd, .events = POLLIN};
	const long cpus = MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L);
	char path[PATH_MAX];

	do {
		for (long i = 0; i < cpus; i++) {
			CLEANUP_FD int fd = -1;

			if (snprintf(path, sizeof(path), "%s/../" EVAL_START_LOCK "%ld", run->dir,
				    i) >= (int)sizeof(path))
				return err_errno(err, -ENAMETOOLONG, "%s", run->dir);
			fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
			if (fd < 0)
				return err_errno(err, -errno, "%s", path);
			if (flock(fd, LOCK_EX | LOCK_NB) == 0)
				return TAKE_FD(fd);
		}
	} while (poll(&stop, 1, START_RETRY_MS) == 0);
	return err_set(err, -EINTR, "a signal");
}

static int start(struct run *run, struct err *err)
{
	struct launch *launch = &run->machine.launch;
	CLEANUP_FD int turn_fd = -1; // until it is ready
	uint64_t start_ns, wait_ns = patience_ns(THROWAWAY_BOOT_NS);
	int sig = 0, r = configure(run, err);

	if (r == 0)
		r = take_env(run, err);
	if (r == 0 && !run->task->pool) {
		turn_fd = take_start(run, err);
		r = MIN(turn_fd, 0);
	}
	// Many that want one of a pool at once wait for each other.
	if (run->task->pool)
		wait_ns = POOL_PATIENCE_NS;
	launch->start_ns = start_ns = now_ns();
	if (r == 0)
		r = throwaway_start(&run->machine, start_ns + wait_ns, &sig, err);
	if (r == LAUNCH_SIGNAL)
		return err_set(err, -EINTR, "signal %d", sig);
	if (r == LAUNCH_TIMED_OUT)
		return err_set(err, -ETIMEDOUT, "the guest did not answer");
	if (r < 0)
		return r;
	json_object_set_new(run->result, "start_seconds", seconds(start_ns));
	if (run->task->pool)
		json_object_set_new(
			run->result, "pool", json_string(run->machine.leased ? "hit" : "miss"));
	run->cancel_fd = epoll_create1(EPOLL_CLOEXEC);
	r = watch(run->cancel_fd, launch->monitor.pid_fd);
	if (r == 0)
		r = watch(run->cancel_fd, launch->signal_fd);
	return r < 0 ? err_errno(err, r, "epoll") : 0;
}

// Returns whether it passed, or a negative errno.
static int do_task(struct run *run, struct err *err)
{
	json_t *statuses = json_array();
	int status, r = start(run, err);

	if (r == 0)
		r = bring_in(run, run->task->files, err);
	if (r == 0)
		r = phase(run, "setup", run->task->setup, statuses, err);
	json_decref(statuses);
	if (r > 0)
		return err_set(err, -ECHILD, "set-up ended with status %d (setup.log)", r);
	if (r < 0)
		return r;
	statuses = json_array();
	status = phase(run, "commands", run->task->commands, statuses, err);
	json_object_set_new(run->result, "commands", statuses);
	if (status < 0)
		return status;
	if (status == 124)
		json_object_set_new(run->result, "timed_out", json_true());
	r = end_processes(run, err);
	if (r < 0)
		return r;
	fetch(run);
	if (run->task->verifier) {
		status = verify(run, err);
		if (status < 0)
			return status;
	}
	return status == 0;
}

// At once, so that what is there is whole.
static int write_result(const struct run *run)
{
	char path[PATH_MAX], fresh[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/" EVAL_RESULT_FILE, run->dir) >= (int)sizeof(path) ||
		snprintf(fresh, sizeof(fresh), "%s/" EVAL_RESULT_FILE ".new", run->dir) >=
			(int)sizeof(fresh))
		return -ENAMETOOLONG;
	if (json_dump_file(run->result, fresh, JSON_COMPACT | JSON_REAL_PRECISION(6)) < 0)
		return -EIO;
	return rename(fresh, path) < 0 ? -errno : 0;
}

int eval_run(const struct eval_task *task, const char *folder, const char *dir)
{
	struct run *run = calloc(1, sizeof(*run));
	uint64_t start_ns = now_ns();
	struct err err = {0}, ended = {0};
	bool interrupted;
	int r;

	if (!run)
		return 0;
	run->task = task;
	run->folder = folder;
	run->dir = dir;
	run->machine = (struct throwaway)THROWAWAY_INIT;
	run->machine.verb = "eval";
	run->machine.hold_turn = true;
	run->cancel_fd = -1;
	run->result = json_pack("{s:s}", "id", task->id);
	json_object_set_new(run->result, "started_s", json_integer(time(NULL)));
	r = do_task(run, &err);
	// The signal waits in the signalfd, or has been seen by the start.
	interrupted = r == -EINTR || (run->machine.launch.signal_fd >= 0 &&
					     launch_signal(&run->machine.launch) != 0);
	if (r == -ECANCELED && !interrupted)
		launch_failure(&run->machine.launch, &err);
	if (throwaway_end(&run->machine, &ended) < 0)
		fprintf(stderr, "%s\n", ended.msg);
	json_object_set_new(run->result, "status",
		json_string(r < 0   ? "error"
			    : r > 0 ? "passed"
				    : "failed"));
	if (r < 0)
		json_object_set_new(run->result, "error", guest_text(err.msg, strlen(err.msg)));
	json_object_set_new(run->result, "seconds", seconds(start_ns));
	if (!interrupted && write_result(run) < 0)
		fprintf(stderr, "the result cannot be written\n");
	throwaway_fini(&run->machine);
	exec_command_fini(&run->env);
	fd_close(&run->cancel_fd);
	json_decref(run->result);
	free(run);
	return interrupted ? 1 : 0;
}
