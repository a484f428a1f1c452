// SPDX-License-Identifier: Apache-2.0
// Commands that outlive the connection that started them. The agent's only thread.
#include "guest/job.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <time.h>

#include "guest/session.h"

static int64_t real_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

bool job_name_is_valid(const char *name)
{
	size_t len = strspn(
		name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");

	return name[len] == '\0' && len >= 1 && len <= JOB_NAME_MAX;
}

struct job *job_find(struct agent *a, const char *name)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (a->jobs[i].used && strcmp(a->jobs[i].name, name) == 0)
			return &a->jobs[i];
	return NULL;
}

static struct job *find_room(struct agent *a)
{
	struct job *oldest = NULL;

	for (int i = 0; i < JOBS_MAX; i++) {
		struct job *j = &a->jobs[i];

		if (!j->used)
			return j;
		if (j->finished && (!oldest || j->ended_ns < oldest->ended_ns))
			oldest = j;
	}
	if (oldest)
		job_destroy(a, oldest);
	return oldest;
}

int job_create(struct agent *a, const char *name, struct job **ret, struct err *err)
{
	struct job *j;
	char own[JOB_NAME_MAX + 1];
	bool dirty;

	while (!name[0]) {
		snprintf(own, sizeof(own), "job-%u", ++a->job_counter);
		if (!job_find(a, own))
			name = own;
	}
	if (job_find(a, name))
		return err_set(err, -EEXIST, "there is a job \"%s\" already", name);
	j = find_room(a);
	if (!j)
		return err_set(err, -EAGAIN, "%d jobs are running, and there is room for no more",
			JOBS_MAX);
	dirty = j->dirty; // of its former user, in this very turn
	memset(j, 0, sizeof(*j));
	j->dirty = dirty;
	j->used = true;
	snprintf(j->name, sizeof(j->name), "%s", name);
	j->started_ns = real_ns();
	task_init(a, &j->task, SESSIONS_MAX + (uint32_t)(j - a->jobs));
	*ret = j;
	return 0;
}

// Those who look at it.
static void mark_viewers(struct agent *a, const struct job *j)
{
	for (int i = 0; i < SESSIONS_MAX; i++)
		if (a->sessions[i].used && a->sessions[i].job == j)
			agent_mark(a, &a->sessions[i]);
}

void job_destroy(struct agent *a, struct job *j)
{
	for (int i = 0; i < SESSIONS_MAX; i++)
		if (a->sessions[i].used && a->sessions[i].job == j)
			session_job_gone(a, &a->sessions[i]);
	task_fini(a, &j->task);
	for (int i = 0; i < 2; i++)
		if (j->logs[i].bytes)
			munmap(j->logs[i].bytes, JOB_LOG_BYTES);
	j->used = false;
}

void job_kill(struct agent *a, struct job *j)
{
	task_kill(&j->task);
	j->task.pid = 0; // whoever follows us reaps it
	job_destroy(a, j);
}

// --- Logs ------------------------------------------------------------------------------------

uint64_t job_log_start(const struct job_log *log)
{
	return log->end > JOB_LOG_BYTES ? log->end - JOB_LOG_BYTES : 0;
}

uint32_t job_log_at(const struct job_log *log, uint64_t offset, uint32_t max, const uint8_t **ret)
{
	uint32_t at = (uint32_t)(offset % JOB_LOG_BYTES);
	uint64_t left = log->end - offset;

	ASSERT(offset >= job_log_start(log) && offset <= log->end);
	max = MIN(max, JOB_LOG_BYTES - at);
	if (left < max)
		max = (uint32_t)left;
	if (max)
		*ret = log->bytes + at;
	return max;
}

// Takes a piece of the output. Returns false when nothing was there.
static bool fill_log(struct job *j, enum task_fd i)
{
	struct job_log *log = &j->logs[i - FD_STDOUT];
	uint32_t at = (uint32_t)(log->end % JOB_LOG_BYTES), n;
	void *bytes;

	if (!j->task.ready[i] || j->task.fds[i] < 0)
		return false;
	if (!log->bytes) {
		bytes = mmap(NULL, JOB_LOG_BYTES, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (bytes == MAP_FAILED) {
			task_close_fd(&j->task, i); // it learns that nobody can listen
			return false;
		}
		log->bytes = bytes;
	}
	n = task_read(&j->task, i, log->bytes + at, JOB_LOG_BYTES - at);
	log->end += n;
	return n > 0;
}

void job_step(struct agent *a, struct job *j)
{
	struct task *t = &j->task;
	uint32_t want[FD_COUNT] = {0};
	bool news = false, more = true;

	if (j->finished)
		return;
	while (more) {
		more = fill_log(j, FD_STDOUT);
		more |= fill_log(j, FD_STDERR);
		news |= more;
		// A living command's output is fetched once a turn, so that all have theirs.
		more = more && t->exited;
	}
	if (task_is_drained(t)) {
		j->finished = true;
		j->ended_ns = real_ns();
		task_close_fd(t, FD_STDOUT);
		task_close_fd(t, FD_STDERR);
		news = true;
	}
	// Somebody has typed more than the command takes.
	if (t->ready[FD_STDIN]) {
		t->ready[FD_STDIN] = false;
		news = true;
	}
	for (int i = 0; i < SESSIONS_MAX && t->fds[FD_STDIN] >= 0 && !want[FD_STDIN]; i++)
		if (a->sessions[i].used && a->sessions[i].job == j && a->sessions[i].in_len)
			want[FD_STDIN] = EPOLLOUT;
	if (!t->exited) {
		want[FD_STDOUT] = t->fds[FD_STDOUT] >= 0 ? EPOLLIN : 0U;
		want[FD_STDERR] = t->fds[FD_STDERR] >= 0 ? EPOLLIN : 0U;
	}
	if (task_watch(a, t, want) < 0)
		task_kill(t); // we would never hear of it again
	if (news)
		mark_viewers(a, j);
}

void job_reaped(struct agent *a, struct job *j, int status, const struct rusage *usage)
{
	task_reaped(&j->task, status, usage);
	agent_mark_job(a, j);
}

// --- Telling ---------------------------------------------------------------------------------

static void put_log(struct json_out *out, const char *key, const struct job_log *log)
{
	json_key(out, key);
	json_open(out, '{');
	json_key(out, "start");
	json_int(out, (int64_t)job_log_start(log));
	json_key(out, "end");
	json_int(out, (int64_t)log->end);
	json_close(out, '}');
}

void job_write(struct json_out *out, const struct job *j)
{
	const struct frame_exit e = task_exit(&j->task);

	json_open(out, '{');
	json_key(out, "job");
	json_str(out, j->name);
	json_key(out, "pid");
	json_int(out, j->first_pid);
	json_key(out, "tty");
	json_bool(out, j->task.tty);
	json_key(out, "running");
	json_bool(out, !j->finished);
	json_key(out, "started_ns");
	json_int(out, j->started_ns);
	if (j->finished) {
		json_key(out, "ended_ns");
		json_int(out, j->ended_ns);
		json_key(out, "code");
		json_int(out, e.code);
		json_key(out, "signal");
		json_int(out, e.signal);
		json_key(out, "timed_out");
		json_bool(out, j->task.timed_out);
	}
	put_log(out, "stdout", &j->logs[0]);
	put_log(out, "stderr", &j->logs[1]);
	json_close(out, '}');
}
