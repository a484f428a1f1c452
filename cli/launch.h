// SPDX-License-Identifier: Apache-2.0
// From a machine's folder to a guest that answers: writes nothing but what is in run/, starts the
// monitor, waits for the agent. For throwaway machines and for those that stay. One thread.
#ifndef MAYFLY_CLI_LAUNCH_H
#define MAYFLY_CLI_LAUNCH_H

#include "cli/agent_client.h"
#include "cli/home.h"
#include "cli/monitor_proc.h"

#define LAUNCH_VSOCK "vsock.sock" // in the machine's run folder

struct launch {
	const char *verb; // for messages
	const char *dir; // the machine's; borrowed
	char run_dir[PATH_MAX];
	int ready_fd;
	int signal_fd; // owned; SIGINT, SIGTERM, SIGHUP and SIGWINCH are blocked and come here
	int console_fd; // what the guest prints, if it is to be shown; non-blocking
	struct monitor_proc monitor;
	// A snapshot to go on from instead of booting (borrowed; NULL: none), whether the guest
	// gets ids of its own, and a hostname (NULL: the one it has). Set before launch_start().
	const char *snapshot;
	const char *memory_way; // as --memory-restore; NULL: automatic
	bool new_identity;
	const char *hostname;
	struct agent_ready ready;
	uint64_t start_ns, ready_ns; // CLOCK_MONOTONIC
	uint64_t restored_ns; // of one from a snapshot: the monitor runs it
};

#define LAUNCH_INIT                                                \
	{                                                          \
		.ready_fd = -1, .signal_fd = -1, .console_fd = -1, \
		.monitor = {.pid_fd = -1, .status_fd = -1},        \
	}

// Turns signals into events, so that what is started is also taken down. Once, before the rest.
int launch_take_signals(struct launch *launch, struct err *err);

// Waits until the agent of a machine that is ready has done what it does at boot.
int launch_settle(struct launch *launch, struct err *err);

// A descriptor, the caller's, that is readable while a signal waits that is to end us; -1 if none
// is to be had. launch_signal() then takes it.
int launch_stop_fd(void);
int launch_signal(struct launch *launch);

// Starts the machine in dir, whose vm.ini and run/ are there. tied: it dies with this process.
int launch_start(
	struct launch *launch, const char *dir, bool tied, bool show_console, struct err *err);

#define LAUNCH_TIMED_OUT 1
#define LAUNCH_SIGNAL    2

// Waits for the agent, until deadline_ns; of a machine from a snapshot gives it the time, fresh
// randomness and its identity, before anybody else can speak to it. Returns 0; LAUNCH_TIMED_OUT,
// after it has said on stderr where the vCPUs were; LAUNCH_SIGNAL with the signal in *ret_signal;
// or a failure.
int launch_wait(struct launch *launch, uint64_t deadline_ns, int *ret_signal, struct err *err);

// Why the monitor ended, if it has or is about to; else 0 and *err is as it was.
int launch_failure(struct launch *launch, struct err *err);

// Copies what the guest has printed to stderr, if asked for.
void launch_show_console(struct launch *launch);

// Ends the machine, if this process started it and has not let go, and frees what there is.
void launch_end(struct launch *launch);

// Lets the machine live on its own.
void launch_let_go(struct launch *launch);

#endif
