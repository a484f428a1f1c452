// SPDX-License-Identifier: Apache-2.0
// Commands that outlive the connection that started them: what they write is kept, the newest of
// it, and any number of sessions look at it, from any point, and type. In a terminal that is a
// shell to come back to. Inside the agent only. The agent's only thread.
#ifndef MAYFLY_GUEST_JOB_H
#define MAYFLY_GUEST_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "guest/proto/json.h"
#include "guest/task.h"

#define JOBS_MAX      64
#define JOB_NAME_MAX  63
#define JOB_LOG_BYTES (256U * 1024) // of each stream; older output is gone

struct agent;
struct session;

// What a stream has brought so far: bytes [start, end) of it are still there.
struct job_log {
	uint8_t *bytes; // JOB_LOG_BYTES of address space, NULL as long as there is nothing
	uint64_t end;
};

struct job {
	bool used;
	bool dirty; // has something to do in this turn
	char name[JOB_NAME_MAX + 1];
	struct task task;
	pid_t first_pid;
	bool stdin_eof;
	bool finished; // it has ended and its output is here
	int64_t started_ns, ended_ns; // CLOCK_REALTIME
	struct job_log logs[2]; // stdout, stderr
};

bool job_name_is_valid(const char *name);

// NULL when there is none of that name.
struct job *job_find(struct agent *a, const char *name);

// A fresh one without a command; the one that ended first makes room if need be. An empty name
// becomes one of our own. -EEXIST, -EAGAIN.
int job_create(struct agent *a, const char *name, struct job **ret, struct err *err);

// The command must be gone. Those who look at it are told.
void job_destroy(struct agent *a, struct job *j);

// For the end of the agent: kills the command.
void job_kill(struct agent *a, struct job *j);

// Something happened to its files.
void job_step(struct agent *a, struct job *j);

void job_reaped(struct agent *a, struct job *j, int status, const struct rusage *usage);

uint64_t job_log_start(const struct job_log *log);

// The bytes that follow each other in memory from offset on, at most max of them; offset is in the
// log. Returns how many.
uint32_t job_log_at(const struct job_log *log, uint64_t offset, uint32_t max, const uint8_t **ret);

void job_write(struct json_out *out, const struct job *j);

#endif
