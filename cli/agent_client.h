// SPDX-License-Identifier: Apache-2.0
// The host's end of the agent protocol (docs/agent-protocol.md): from the monitor's vsock socket to
// a command's exit status. The guest is hostile: whatever it says or does not say, a call ends by
// its deadline or its cancel_fd, holds a bounded amount of memory, and prints nothing that was not
// the command's output. One thread a connection.
//
// Deadlines are now_ns() values. cancel_fd ends a call with -ECANCELED as soon as it is readable (a
// pidfd of the monitor, an eventfd); -1 for none.
#ifndef MAYFLY_CLI_AGENT_CLIENT_H
#define MAYFLY_CLI_AGENT_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "vmm/base/err.h"

#define AGENT_DEADLINE_NONE UINT64_MAX

// --- The guest says that it is ready ---------------------------------------------------------

struct agent_ready {
	char version[32]; // of the agent; printable ASCII
	uint64_t started_ns; // guest's time since its kernel began, when the agent began
	uint64_t ready_ns; // and when commands could be executed
	int64_t clock_ahead_ns; // of its wall clock before the host's; 0 of an agent that does not
				// say
};

// Listens where a guest's connection to the ready port arrives: beside the monitor's socket
// dir/name. To be called before the guest starts. Returns the fd, the caller's.
int agent_ready_listen(const char *dir, const char *name, struct err *err);

// Waits for the guest to connect there and for its message. -EPROTO when it is none.
int agent_ready_wait(int listen_fd, int cancel_fd, uint64_t deadline_ns, struct agent_ready *ret,
	struct err *err);

// --- A stream to the agent -------------------------------------------------------------------

// Connects to a port of the guest through the monitor's socket dir/name. Returns the fd, the
// caller's. -ECONNREFUSED when nothing listens there in the guest.
int agent_connect(const char *dir, const char *name, uint32_t port, int cancel_fd,
	uint64_t deadline_ns, struct err *err);

struct agent_exec {
	const char *const *argv; // NULL-terminated
	const char *const
		*env; // NULL-terminated NAME=VALUE, added to the guest's defaults; or NULL
	const char *cwd; // NULL: /
	const char *user; // NAME or UID, then :GROUP or :GID; NULL: root
	uint64_t timeout_ms; // enforced by the guest, and by us some time later; 0: none
	bool tty; // in a terminal of the guest, of the size of ours, or of rows and columns if set
	uint16_t rows, columns;
	int in_fd; // -1: the command reads /dev/null
	int out_fd, err_fd; // -1: dropped. With tty everything comes out of out_fd
	// If set, takes all output instead; what it returns below 0 ends the call.
	int (*output)(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err);
	void *output_ctx;
	// A signalfd, or -1. SIGWINCH becomes the size of the guest's terminal. Others are sent to
	// the command, but SIGINT, SIGTERM, SIGHUP and SIGQUIT end the call with -EINTR if tty, and
	// else when it is the third of them.
	int signal_fd;
	int cancel_fd;
	uint64_t deadline_ns; // ends the call with -ETIMEDOUT; 0: none
	// The guest owes us something, and nothing has passed for so long: so, too; 0: never.
	uint64_t idle_ns;
	// What the command and all that it starts may have together; 0: no limit. A guest that
	// cannot enforce one refuses with -EOPNOTSUPP.
	uint64_t memory_max_bytes, processes_max, cpu_time_ms;
	bool files; // argv is not a command but a request for files: see agent_files.h
};

struct agent_result {
	int exit_code; // for our own exit(): the command's, 128 + its signal, 125 to 127 for errors
	uint32_t signal; // that ended the command, 0: it exited
	bool timed_out, core_dumped;
	bool over_limit; // of memory or CPU time: that ended it
	uint64_t user_us, system_us, max_rss_bytes; // as the guest tells it
	bool running; // of a job: it was only looked at, or left
};

// Executes a command on a fresh connection, which cannot be used again, and moves its input and
// output until it ends. Returns 0 when it ended, however; a negative errno when it did not start or
// we had to leave it, in which case the guest kills it. ret->exit_code is set in every case.
// A terminal at in_fd is in raw mode meanwhile, if tty.
int agent_exec(int conn_fd, const struct agent_exec *x, struct agent_result *ret, struct err *err);

// Puts a terminal into raw mode. Returns whether *ret_saved has to be put back, with tcsetattr().
struct termios;
bool agent_raw_mode(int fd, struct termios *ret_saved);

// --- Jobs: commands that outlive their connection --------------------------------------------

#define AGENT_JOB_NAME_MAX 63

// Starts x's command as a job: its fds are not used but for in_fd, which says whether it will have
// any stdin. An empty name becomes one of the guest's choice. ret->exit_code as in agent_exec().
int agent_job_start(int conn_fd, const struct agent_exec *x, const char *job, uint64_t deadline_ns,
	char ret_job[AGENT_JOB_NAME_MAX + 1], struct agent_result *ret, struct err *err);

struct agent_attach {
	const char *job;
	bool follow; // until it ends; else what there is
	uint64_t tail_bytes; // of each stream, before what is to come; UINT64_MAX: all that is kept
	uint64_t stdout_offset, stderr_offset; // where to begin instead; UINT64_MAX: as tail says
	bool tty; // it has a terminal: ours is raw and its size is told, or rows and columns if set
	uint16_t rows, columns;
	bool redraw; // make what fills that terminal draw anew
	int in_fd; // -1: only to look. With tty, Ctrl-] leaves
	int out_fd, err_fd; // -1: dropped
	int (*output)(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err);
	// Where in its stream the output that follows begins: at first, and after a gap. May be
	// NULL.
	void (*offset)(void *ctx, bool is_err, uint64_t offset);
	void *ctx;
	// As in struct agent_exec, but with in_fd -1 SIGINT and its like leave the job alone and
	// end the call with -EINTR.
	int signal_fd, cancel_fd;
	uint64_t deadline_ns;
};

// Looks at a job, and types. Returns 0 when it has ended, or when that is not waited for
// (ret->running).
int agent_attach(
	int conn_fd, const struct agent_attach *attach, struct agent_result *ret, struct err *err);

// SIGNAL to the job's process group; and with tree SIGKILL to all that it started. signal 0: none.
int agent_job_signal(int conn_fd, const char *job, int signal, bool tree, int cancel_fd,
	uint64_t deadline_ns, struct err *err);

// Its log and status go.
int agent_job_forget(
	int conn_fd, const char *job, int cancel_fd, uint64_t deadline_ns, struct err *err);

// {"jobs":[…]}: see docs/agent-protocol.md. The caller's.
int agent_jobs(int conn_fd, int cancel_fd, uint64_t deadline_ns, char **ret_json, struct err *err);

// --- Ports -----------------------------------------------------------------------------------

// Connects to a TCP port of the guest's loopback interface: when this returns 0, conn_fd is that
// connection, in both directions and with an end for each.
int agent_port_connect(
	int conn_fd, uint16_t port, int cancel_fd, uint64_t deadline_ns, struct err *err);

// As long as conn_fd is open, each connection to the TCP port of the guest's loopback interface
// becomes one to a port of the host, that is to the socket NAME_<host_port> beside the monitor's.
// proxy: programs that start meanwhile are told, in their environment, that it is their proxy.
int agent_port_listen(int conn_fd, uint16_t port, uint32_t host_port, bool proxy, int cancel_fd,
	uint64_t deadline_ns, struct err *err);

// --- Questions, each on a fresh connection ---------------------------------------------------

// Sends a request and receives its reply, a NUL-terminated JSON text of the guest's making, the
// caller's. A request that the agent refuses is an error with its errno.
int agent_request(int conn_fd, const char *json, size_t len, int cancel_fd, uint64_t deadline_ns,
	char **ret_reply, struct err *err);

// What tells a machine from its clones; NULL: as it is. The clock is set to ours in any case.
struct agent_identity {
	uint8_t entropy[32];
	const char *hostname; // up to 64 bytes
	const char *boot_id; // a UUID in lower case
	const char *machine_id; // 32 hexadecimal digits in lower case
	const char *mac; // 12 of them
};

// To be called after a restore, before anything else may run in the guest.
int agent_wake(int conn_fd, const struct agent_identity *identity, int cancel_fd,
	uint64_t deadline_ns, struct err *err);

// Load, memory, disk, listening ports: see docs/agent-protocol.md. The caller's.
int agent_facts(int conn_fd, int cancel_fd, uint64_t deadline_ns, char **ret_json, struct err *err);

// Kills every process but the agent. -EOPNOTSUPP where the agent is not PID 1.
int agent_kill_all(int conn_fd, int cancel_fd, uint64_t deadline_ns, struct err *err);

// Asks the agent to end the machine. Returns when it has agreed.
int agent_shutdown(int conn_fd, int cancel_fd, uint64_t deadline_ns, struct err *err);

#endif
