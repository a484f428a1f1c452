// SPDX-License-Identifier: Apache-2.0
// A command and the files that connect us with it: what an exec session and a job have in common.
// Inside the agent only. The agent's only thread.
#ifndef MAYFLY_GUEST_TASK_H
#define MAYFLY_GUEST_TASK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "guest/proto/frame.h"
#include "guest/tree.h"
#include "vmm/base/err.h"

struct agent;

// What is waited on; the index of the fds and of their events. A job has no connection.
enum task_fd { FD_CONN, FD_STDIN, FD_STDOUT, FD_STDERR, FD_COUNT };

struct task {
	uint32_t slot; // of the owner, for events: sessions first, then jobs
	uint32_t generation; // so that an event for an earlier user of the slot is recognised
	int fds[FD_COUNT];
	uint32_t watched[FD_COUNT]; // events that epoll has been asked for
	bool ready[FD_COUNT]; // epoll said so in this turn

	pid_t pid; // 0: none, or reaped
	struct tree tree;
	bool tty;
	bool exited;
	bool timed_out;
	bool killed;
	int status; // of waitpid()
	struct rusage usage;
	uint32_t drain_bytes[FD_COUNT]; // after the end: what was in the pipe at that moment
	bool over_limit;
	uint64_t deadline_ns; // when to look at the following; 0: never
	uint64_t timeout_ns; // when it will be killed; 0: never
	uint64_t cpu_limit_us; // the tree's count at which it will be killed; 0: none
};

void task_init(struct agent *a, struct task *t, uint32_t slot);

// Closes what is open and gives the cgroup back. The process must be gone.
void task_fini(struct agent *a, struct task *t);

void task_close_fd(struct task *t, enum task_fd i);

// SIGKILL to the command and all that it started; once.
void task_kill(struct task *t);

void task_set_deadline(struct agent *a, struct task *t, uint64_t deadline_ns);

// Sets it from what the task may have, after a look at what it has had.
void task_schedule(struct agent *a, struct task *t);

// The command has been reaped: what it has written is in the pipes now, and so much of it will be
// read; what comes later is of its children, who may never end.
void task_reaped(struct task *t, int status, const struct rusage *usage);

// It is time to look at its limits.
void task_deadline(struct agent *a, struct task *t);

// Reads at most want bytes of output of a file that is ready. Returns how many there were, 0 for
// none; closes the file at its end.
uint32_t task_read(struct task *t, enum task_fd i, void *buf, uint32_t want);

// All of the output of a command that has ended is read.
bool task_is_drained(const struct task *t);

void task_resize(struct task *t, uint16_t rows, uint16_t columns);

// How it ended.
struct frame_exit task_exit(const struct task *t);

// Asks epoll for these events, and no more. Returns 0 or a negative errno.
int task_watch(struct agent *a, struct task *t, const uint32_t want[FD_COUNT]);

#endif
