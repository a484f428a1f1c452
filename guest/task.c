// SPDX-License-Identifier: Apache-2.0
// A command and the files that connect us with it. The agent's only thread.
#include "guest/task.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest/session.h"
#include "vmm/base/fd.h"

// A terminal's output is bounded by the kernel's own buffers; this is more than they hold.
#define TTY_DRAIN_BYTES (256U * 1024)

#define CPU_LOOK_NS 10000000ULL

void task_init(struct agent *a, struct task *t, uint32_t slot)
{
	memset(t, 0, sizeof(*t));
	t->slot = slot;
	t->generation = ++a->generation;
	t->tree = TREE_NONE;
	for (int i = 0; i < FD_COUNT; i++)
		t->fds[i] = -1;
}

void task_fini(struct agent *a, struct task *t)
{
	ASSERT(!t->pid);
	task_set_deadline(a, t, 0);
	for (enum task_fd i = 0; i < FD_COUNT; i++)
		task_close_fd(t, i);
	tree_release(&t->tree);
}

void task_close_fd(struct task *t, enum task_fd i)
{
	fd_close(&t->fds[i]);
	t->watched[i] = 0; // epoll forgets a file that is closed
	t->ready[i] = false;
}

void task_kill(struct task *t)
{
	if (t->pid && !t->killed)
		tree_kill(t->tree, t->pid);
	t->killed = true;
}

void task_set_deadline(struct agent *a, struct task *t, uint64_t deadline_ns)
{
	if (t->deadline_ns && !deadline_ns)
		a->deadlines--;
	if (!t->deadline_ns && deadline_ns)
		a->deadlines++;
	t->deadline_ns = deadline_ns;
}

static unsigned cpu_count(void)
{
	cpu_set_t set;

	return sched_getaffinity(0, sizeof(set), &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1U;
}

void task_schedule(struct agent *a, struct task *t)
{
	uint64_t now = now_ns(), next = t->timeout_ns, used = 0, look;

	if (t->cpu_limit_us && t->pid && !t->killed) {
		tree_cpu_us(t->tree, &used);
		if (used >= t->cpu_limit_us) {
			t->over_limit = true;
			task_kill(t);
		} else {
			// No earlier than with all CPUs at work, and not too often.
			look = (t->cpu_limit_us - used) * 1000 / cpu_count();
			look = now + MAX(look, CPU_LOOK_NS);
			next = next ? MIN(next, look) : look;
		}
	}
	task_set_deadline(a, t, next);
}

void task_deadline(struct agent *a, struct task *t)
{
	task_set_deadline(a, t, 0);
	if (!t->pid)
		return;
	if (t->timeout_ns && now_ns() >= t->timeout_ns) {
		t->timed_out = true;
		task_kill(t);
		return;
	}
	task_schedule(a, t);
}

void task_reaped(struct task *t, int status, const struct rusage *usage)
{
	t->pid = 0;
	t->exited = true;
	t->status = status;
	t->usage = *usage;
	if (WIFSIGNALED(status) && tree_out_of_memory(t->tree))
		t->over_limit = true;
	task_close_fd(t, FD_STDIN);
	for (enum task_fd i = FD_STDOUT; i <= FD_STDERR; i++) {
		int bytes = 0;

		if (t->fds[i] < 0)
			continue;
		if (!t->tty && ioctl(t->fds[i], FIONREAD, &bytes) < 0)
			bytes = 0;
		t->drain_bytes[i] = t->tty ? TTY_DRAIN_BYTES : (uint32_t)bytes;
		t->ready[i] = true;
	}
}

uint32_t task_read(struct task *t, enum task_fd i, void *buf, uint32_t want)
{
	ssize_t n;

	if (t->fds[i] < 0 || !t->ready[i])
		return 0;
	if (t->exited)
		want = MIN(want, t->drain_bytes[i]);
	// The pipes block, to save a system call each: we read one only when epoll or FIONREAD
	// has said that there is something, and nobody else reads it.
	do
		n = want ? read(t->fds[i], buf, want) : 0;
	while (n < 0 && errno == EINTR);
	if (n < 0 && errno == EAGAIN && !t->exited) {
		t->ready[i] = false;
		return 0;
	}
	if (n <= 0) { // the end; EIO is that of a terminal
		task_close_fd(t, i);
		return 0;
	}
	if (t->exited)
		t->drain_bytes[i] -= (uint32_t)n;
	else
		t->ready[i] = false;
	return (uint32_t)n;
}

bool task_is_drained(const struct task *t)
{
	return t->exited && !t->ready[FD_STDOUT] && !t->ready[FD_STDERR];
}

void task_resize(struct task *t, uint16_t rows, uint16_t columns)
{
	struct winsize size = {.ws_row = rows, .ws_col = columns};

	if (t->fds[FD_STDOUT] >= 0)
		ioctl(t->fds[FD_STDOUT], TIOCSWINSZ, &size); // a shell that just went away
}

static uint64_t us_of(struct timeval t)
{
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_usec;
}

struct frame_exit task_exit(const struct task *t)
{
	struct frame_exit e = {
		.flags = (t->timed_out ? EXIT_TIMED_OUT : 0U) | (t->over_limit ? EXIT_LIMIT : 0U),
		.user_us = us_of(t->usage.ru_utime),
		.system_us = us_of(t->usage.ru_stime),
		.max_rss_bytes = (uint64_t)t->usage.ru_maxrss * 1024,
	};

	if (WIFEXITED(t->status)) {
		e.code = (uint32_t)WEXITSTATUS(t->status);
	} else {
		e.signal = (uint32_t)WTERMSIG(t->status);
		if (WCOREDUMP(t->status))
			e.flags |= EXIT_CORE;
	}
	return e;
}

int task_watch(struct agent *a, struct task *t, const uint32_t want[FD_COUNT])
{
	for (enum task_fd i = 0; i < FD_COUNT; i++) {
		struct epoll_event event = {.events = want[i]};
		int op = !t->watched[i] ? EPOLL_CTL_ADD : !want[i] ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;

		if (want[i] == t->watched[i])
			continue;
		event.data.u64 = (uint64_t)t->generation << 32 | (uint64_t)t->slot << 8 | i;
		if (epoll_ctl(a->epoll_fd, op, t->fds[i], &event) < 0)
			return -errno;
		t->watched[i] = want[i];
	}
	return 0;
}
