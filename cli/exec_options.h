// SPDX-License-Identifier: Apache-2.0
// A command in a guest as the options of run and exec describe it, and its execution on a machine
// that answers. One thread.
#ifndef MAYFLY_CLI_EXEC_OPTIONS_H
#define MAYFLY_CLI_EXEC_OPTIONS_H

#include "cli/agent_client.h"
#include "cli/rootfs_store.h"

#define EXEC_SHORT_OPTIONS "itw:u:e:"

// clang-format off
#define EXEC_LONG_OPTIONS \
	{"interactive", no_argument, NULL, 'i'}, \
	{"tty", no_argument, NULL, 't'}, \
	{"workdir", required_argument, NULL, 'w'}, \
	{"user", required_argument, NULL, 'u'}, \
	{"env", required_argument, NULL, 'e'}, \
	{"timeout", required_argument, NULL, EXEC_OPT_TIMEOUT}, \
	{"max-memory", required_argument, NULL, EXEC_OPT_MEMORY}, \
	{"max-processes", required_argument, NULL, EXEC_OPT_PROCESSES}, \
	{"max-cpu-time", required_argument, NULL, EXEC_OPT_CPU_TIME}

#define EXEC_OPTIONS_HELP \
	"  -i, --interactive     pass standard input on\n" \
	"  -t, --tty             give the command a terminal (with -i: this one)\n" \
	"  -w, --workdir DIR     working directory in the machine\n" \
	"  -u, --user USER       user or uid[:gid] in the machine (default root)\n" \
	"  -e, --env NAME=VALUE  set a variable; may be repeated\n" \
	"      --max-memory SIZE, --max-processes N, --max-cpu-time TIME\n" \
	"                        what the command and all that it starts may have together\n"

#define EXEC_STATUS_HELP \
	"Exit status: the command's own, 128+n if signal n ended it, 127 if it was not found,\n" \
	"126 if it could not be started, 124 after --timeout, 125 if mayfly itself failed, 2\n" \
	"for wrong usage. Signals go to the command; the third one ends mayfly.\n"
// clang-format on

// Apart from the letters that verbs use for options of their own.
enum { EXEC_OPT_TIMEOUT = 512, EXEC_OPT_MEMORY, EXEC_OPT_PROCESSES, EXEC_OPT_CPU_TIME };

struct exec_command {
	const char *verb; // for messages
	const char *const *argv;
	struct rootfs image; // what it said about commands lives here
	const char **image_argv; // owned; argv, if it is the image's
	const char **env; // owned; NULL-terminated
	unsigned int nr_env;
	const char *cwd, *user;
	bool use_stdin, tty;
	bool stdout_to_stderr;
	uint64_t start_ns; // when the time limit began
	uint64_t deadline_ns; // AGENT_DEADLINE_NONE without one
	const char *timeout_text;
	uint64_t memory_max_bytes, processes_max, cpu_time_ns; // 0: no limit
};

// How long an agent may take to answer what takes it no time.
#define EXEC_ANSWER_NS 60000000000ULL

// max_env bounds how many --env there can be: argc does. -ENOMEM.
int exec_command_init(struct exec_command *cmd, const char *verb, int max_env, struct err *err);
void exec_command_fini(struct exec_command *cmd);

// Takes an option if it is one of these. Returns 1 if so, 0 if it is another, or a negative errno.
int exec_option(struct exec_command *cmd, int opt, const char *value, struct err *err);

// What the image of the machine with this configuration says and the options do not: environment,
// user, working directory, and the command if argv is empty, which then has to be there (-EINVAL).
int exec_command_image(struct exec_command *cmd, const struct config *config, struct err *err);

// Says that time ran out, after where, and returns EXIT_TIMEOUT.
int exec_timed_out(const struct exec_command *cmd, const char *where);

// Starts the command over conn_fd, a fresh connection to the agent, as a job of that name ("": the
// agent chooses). ret_job may be NULL. See agent_job_start().
int exec_command_start(const struct exec_command *cmd, int conn_fd, const char *job, int cancel_fd,
	char ret_job[AGENT_JOB_NAME_MAX + 1], struct agent_result *ret, struct err *err);

// So, and prints its name. Returns as exec_command_run().
int exec_command_detach(const struct exec_command *cmd, int conn_fd, const char *job, int cancel_fd,
	struct err *err);

// Runs the command over conn_fd, a fresh connection to the agent, with our own stdin, stdout and
// stderr. signal_fd and cancel_fd as in struct agent_exec. Returns the exit status for this
// process, or a negative errno if the machine did not answer.
int exec_command_run(
	const struct exec_command *cmd, int conn_fd, int signal_fd, int cancel_fd, struct err *err);

#endif
