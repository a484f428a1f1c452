// SPDX-License-Identifier: Apache-2.0
// A command in a guest; see the header. One thread.
#include "cli/exec_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "vmm/base/parse.h"

int exec_command_init(struct exec_command *cmd, const char *verb, int max_env, struct err *err)
{
	*cmd = (struct exec_command){
		.verb = verb,
		.env = calloc((size_t)max_env + 1, sizeof(*cmd->env)),
		.start_ns = now_ns(),
		.deadline_ns = AGENT_DEADLINE_NONE,
	};
	return cmd->env ? 0 : err_errno(err, -ENOMEM, "%s", verb);
}

void exec_command_fini(struct exec_command *cmd)
{
	free(cmd->env);
	free(cmd->image_argv);
	rootfs_fini(&cmd->image);
	cmd->env = cmd->image_argv = NULL;
}

static bool names_same(const char *a, const char *b)
{
	size_t len = strcspn(a, "=");

	return strncmp(a, b, len + 1) == 0;
}

// The image's variables first, without those that the options set.
static int image_env(struct exec_command *cmd, const json_t *env)
{
	const char **all = calloc(cmd->nr_env + json_array_size(env) + 1, sizeof(*all));
	unsigned int nr = 0;
	json_t *item;
	size_t i;

	if (!all)
		return -ENOMEM;
	json_array_foreach(env, i, item)
	{
		bool given = false;

		for (unsigned int k = 0; k < cmd->nr_env; k++)
			given |= names_same(json_string_value(item), cmd->env[k]);
		if (!given)
			all[nr++] = json_string_value(item);
	}
	for (unsigned int k = 0; k < cmd->nr_env; k++)
		all[nr++] = cmd->env[k];
	free(cmd->env);
	cmd->env = all;
	cmd->nr_env = nr;
	return 0;
}

static int image_argv(struct exec_command *cmd, const json_t *entrypoint, const json_t *words)
{
	unsigned int nr = 0;
	json_t *item;
	size_t i;

	cmd->image_argv = calloc(
		json_array_size(entrypoint) + json_array_size(words) + 1, sizeof(*cmd->image_argv));
	if (!cmd->image_argv)
		return -ENOMEM;
	json_array_foreach(entrypoint, i, item) cmd->image_argv[nr++] = json_string_value(item);
	json_array_foreach(words, i, item) cmd->image_argv[nr++] = json_string_value(item);
	cmd->argv = cmd->image_argv;
	return 0;
}

int exec_command_image(struct exec_command *cmd, const struct config *config, struct err *err)
{
	int r = rootfs_of_machine(config, &cmd->image, err);
	const json_t *says = cmd->image.config;

	if (r == 1) {
		r = image_env(cmd, json_object_get(says, "env"));
		if (r == 0 && !cmd->argv[0])
			r = image_argv(cmd, json_object_get(says, "entrypoint"),
				json_object_get(says, "cmd"));
		if (r < 0)
			return err_errno(err, r, "image");
		if (!cmd->user)
			cmd->user = json_string_value(json_object_get(says, "user"));
		if (!cmd->cwd)
			cmd->cwd = json_string_value(json_object_get(says, "workdir"));
	}
	if (r < 0)
		return r;
	return cmd->argv[0] ? 0
			    : err_set(err, -EINVAL, "which command? (mayfly %s … -- uname -a)",
				      cmd->verb);
}

int exec_option(struct exec_command *cmd, int opt, const char *value, struct err *err)
{
	uint64_t ns;
	int r;

	switch (opt) {
	case 'i':
		cmd->use_stdin = true;
		return 1;
	case 't':
		cmd->tty = true;
		return 1;
	case 'w':
		cmd->cwd = value;
		return 1;
	case 'u':
		cmd->user = value;
		return 1;
	case 'e':
		if (!strchr(value, '=') || value[0] == '=')
			return err_set(err, -EINVAL, "env: '%s' is not NAME=VALUE", value);
		cmd->env[cmd->nr_env++] = value;
		return 1;
	case EXEC_OPT_MEMORY:
		r = parse_size(value, &cmd->memory_max_bytes, err);
		return r < 0 ? err_wrap(err, r, "max-memory") : 1;
	case EXEC_OPT_PROCESSES:
		r = parse_uint(value, 1, INT32_MAX, &cmd->processes_max, err);
		return r < 0 ? err_wrap(err, r, "max-processes") : 1;
	case EXEC_OPT_CPU_TIME:
		r = parse_duration(value, &cmd->cpu_time_ns, err);
		return r < 0 ? err_wrap(err, r, "max-cpu-time") : 1;
	case EXEC_OPT_TIMEOUT:
		r = parse_duration(value, &ns, err);
		if (r < 0)
			return err_wrap(err, r, "timeout");
		cmd->deadline_ns = cmd->start_ns + ns;
		cmd->timeout_text = value;
		return 1;
	default:
		return 0;
	}
}

int exec_timed_out(const struct exec_command *cmd, const char *where)
{
	fprintf(stderr, "mayfly %s: timed out after %s%s\n", cmd->verb, cmd->timeout_text, where);
	return EXIT_TIMEOUT;
}

// The request, as far as it is the same with and without waiting.
static void fill(const struct exec_command *cmd, struct agent_exec *x)
{
	*x = (struct agent_exec){
		.argv = cmd->argv,
		.env = cmd->env,
		.cwd = cmd->cwd,
		.user = cmd->user,
		.tty = cmd->tty,
		.in_fd = cmd->use_stdin ? STDIN_FILENO : -1,
		.out_fd = cmd->stdout_to_stderr ? STDERR_FILENO : STDOUT_FILENO,
		.err_fd = STDERR_FILENO,
		.signal_fd = -1,
		.memory_max_bytes = cmd->memory_max_bytes,
		.processes_max = cmd->processes_max,
		.cpu_time_ms = (cmd->cpu_time_ns + 999999) / 1000000,
	};
	if (cmd->deadline_ns != AGENT_DEADLINE_NONE) {
		uint64_t now = now_ns();
		uint64_t left_ns = cmd->deadline_ns > now ? cmd->deadline_ns - now : 0;

		x->timeout_ms = MAX(left_ns / 1000000, 1ULL);
	}
}

// The command was not started, or its status says it all: then that is the result.
static int failure(const struct exec_command *cmd, int rc, int exit_code, const struct err *err)
{
	if (rc < 0 && (exit_code == 126 || exit_code == 127)) {
		cli_fail(cmd->verb, err);
		return exit_code;
	}
	return rc < 0 ? rc : exit_code;
}

int exec_command_start(const struct exec_command *cmd, int conn_fd, const char *job, int cancel_fd,
	char ret_job[AGENT_JOB_NAME_MAX + 1], struct agent_result *ret, struct err *err)
{
	char name[AGENT_JOB_NAME_MAX + 1];
	struct agent_exec x;

	fill(cmd, &x);
	x.cancel_fd = cancel_fd;
	return agent_job_start(
		conn_fd, &x, job, now_ns() + EXEC_ANSWER_NS, ret_job ? ret_job : name, ret, err);
}

int exec_command_detach(const struct exec_command *cmd, int conn_fd, const char *job, int cancel_fd,
	struct err *err)
{
	char name[AGENT_JOB_NAME_MAX + 1];
	struct agent_result result;
	int r = exec_command_start(cmd, conn_fd, job, cancel_fd, name, &result, err);

	if (r < 0)
		return failure(cmd, r, result.exit_code, err);
	puts(name);
	return 0;
}

int exec_command_run(
	const struct exec_command *cmd, int conn_fd, int signal_fd, int cancel_fd, struct err *err)
{
	struct agent_result result = {0};
	struct agent_exec x;
	int r;

	fill(cmd, &x);
	x.signal_fd = signal_fd;
	x.cancel_fd = cancel_fd;
	r = agent_exec(conn_fd, &x, &result, err);
	if (result.over_limit)
		fprintf(stderr, "mayfly %s: killed: more memory or CPU time than it may have\n",
			cmd->verb);
	if (result.timed_out || r == -ETIMEDOUT)
		return exec_timed_out(cmd, "");
	// Whoever read our output has heard enough; a pipeline is used to that.
	if (r == -EPIPE)
		return EXIT_SIGPIPE;
	// Interrupted by the person, who knows.
	if (r == -EINTR)
		return result.exit_code;
	return failure(cmd, r, result.exit_code, err);
}
