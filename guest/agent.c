// SPDX-License-Identifier: Apache-2.0
// The agent's loop: connections, signals, deadlines. System calls are what it is frugal with: on
// some hosts each costs a quarter of a millisecond. The agent's only thread.
#include "guest/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#include "guest/session.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define EVENTS_MAX      64
#define ACCEPT_RETRY_NS 100000000ULL

// What is not a session's has generation 0.
enum own_event { EVENT_LISTEN, EVENT_SIGNAL, EVENT_ANNOUNCE };

void agent_mark(struct agent *a, struct session *s)
{
	if (s->dirty)
		return;
	s->dirty = true;
	a->dirty[a->ndirty++] = s;
}

void agent_mark_job(struct agent *a, struct job *j)
{
	if (j->dirty)
		return;
	j->dirty = true;
	a->dirty_jobs[a->ndirty_jobs++] = j;
}

static int watch_own(struct agent *a, int fd, uint32_t events, enum own_event what)
{
	struct epoll_event event = {.events = events, .data.u64 = what};

	return epoll_ctl(a->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static void listen_off(struct agent *a)
{
	if (a->listening)
		epoll_ctl(a->epoll_fd, EPOLL_CTL_DEL, a->config.listen_fd, NULL);
	a->listening = false;
}

static void listen_on(struct agent *a)
{
	if (!a->listening && a->config.listen_fd >= 0)
		a->listening = watch_own(a, a->config.listen_fd, EPOLLIN, EVENT_LISTEN) == 0;
}

void agent_slot_freed(struct agent *a)
{
	listen_on(a);
}

int agent_create(const struct agent_config *config, struct agent **ret, struct err *err)
{
	static const int signals[] = {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
	struct agent *a;
	sigset_t set;
	int domain = AF_UNIX, rc;
	socklen_t len = sizeof(domain);

	// Untouched pages cost nothing, so all sessions are there from the start.
	a = mmap(NULL, sizeof(*a), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (a == MAP_FAILED)
		return err_errno(err, -errno, "agent");
	a->config = *config;
	a->announce_fd = a->null_fd = a->signal_fd = -1;
	a->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	sigemptyset(&set);
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		sigaddset(&set, signals[i]);
	a->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	sigaddset(&set, SIGPIPE); // a command that closes its stdin
	sigprocmask(SIG_BLOCK, &set, NULL);
	// Not open(): in musl that is followed by an fcntl() for kernels without O_CLOEXEC.
	a->null_fd = openat(AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
	if (a->epoll_fd < 0 || a->signal_fd < 0 || a->null_fd < 0)
		goto fail_errno;
	rc = watch_own(a, a->signal_fd, EPOLLIN, EVENT_SIGNAL);
	if (rc < 0)
		goto fail;
	if (config->listen_fd >= 0) {
		if (getsockopt(config->listen_fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) < 0)
			goto fail_errno;
		a->check_peer = domain == AF_VSOCK;
		rc = watch_own(a, config->listen_fd, EPOLLIN, EVENT_LISTEN);
		if (rc < 0)
			goto fail;
		a->listening = true;
	}
	*ret = a;
	return 0;

fail_errno:
	rc = -errno;
fail:
	a->config.listen_fd = -1; // still the caller's
	agent_destroy(a);
	return err_errno(err, rc, "agent");
}

void agent_destroy(struct agent *a)
{
	if (!a)
		return;
	for (int i = 0; i < SESSIONS_MAX; i++)
		if (a->sessions[i].used)
			session_close(a, &a->sessions[i]);
	for (int i = 0; i < JOBS_MAX; i++)
		if (a->jobs[i].used)
			job_kill(a, &a->jobs[i]);
	fd_close(&a->announce_fd);
	fd_close(&a->config.listen_fd);
	fd_close(&a->null_fd);
	fd_close(&a->signal_fd);
	fd_close(&a->epoll_fd);
	munmap(a, sizeof(*a));
}

unsigned agent_sessions(const struct agent *a)
{
	return a->used;
}

struct session *agent_session(struct agent *a)
{
	for (int i = 0; i < SESSIONS_MAX; i++)
		if (!a->sessions[i].used)
			return &a->sessions[i];
	return NULL;
}

int agent_adopt(struct agent *a, int conn_fd)
{
	struct session *s = agent_session(a);

	if (!s)
		return -EAGAIN;
	session_open(a, s, conn_fd);
	return 0;
}

static void on_listen(struct agent *a)
{
	union {
		struct sockaddr any;
		struct sockaddr_vm vm;
	} peer = {0};
	socklen_t len = sizeof(peer);
	int fd;

	if (a->used == SESSIONS_MAX) {
		listen_off(a); // they wait in the kernel's queue
		return;
	}
	fd = accept4(a->config.listen_fd, &peer.any, &len, SOCK_CLOEXEC);
	if (fd < 0) {
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
			listen_off(a);
			a->retry_accept_ns = now_ns() + ACCEPT_RETRY_NS;
		}
		return; // or the peer is gone again
	}
	// Whoever can speak to us is root here. That is the host's right and nobody else's, so not
	// that of a program in the guest on a loopback of vsock.
	if (a->check_peer && peer.vm.svm_cid != VMADDR_CID_HOST) {
		fd_close(&fd);
		return;
	}
	if (agent_adopt(a, fd) < 0)
		fd_close(&fd);
}

static void reaped(struct agent *a, pid_t pid, int status, const struct rusage *usage)
{
	for (int i = 0; i < SESSIONS_MAX; i++) {
		struct session *s = &a->sessions[i];

		if (s->used && s->task.pid == pid) {
			session_reaped(a, s, status, usage);
			return;
		}
	}
	for (int i = 0; i < JOBS_MAX; i++) {
		struct job *j = &a->jobs[i];

		if (j->used && j->task.pid == pid) {
			job_reaped(a, j, status, usage);
			return;
		}
	}
}

static void reap(struct agent *a)
{
	for (;;) {
		struct rusage usage;
		int status;
		pid_t pid = wait4(-1, &status, WNOHANG, &usage);

		if (pid <= 0)
			return; // none left, or none that has ended
		reaped(a, pid, status, &usage);
	}
}

static void on_signal(struct agent *a)
{
	struct signalfd_siginfo info[8];
	ssize_t n = read(a->signal_fd, info, sizeof(info));
	bool child = false;

	for (ssize_t i = 0; i < n / (ssize_t)sizeof(info[0]); i++) {
		if (info[i].ssi_signo == SIGCHLD)
			child = true;
		else
			a->end = AGENT_SIGNAL;
	}
	if (child)
		reap(a);
}

int agent_announce(struct agent *a, int fd, const void *addr, uint32_t addr_len,
	uint64_t started_ns, struct err *err)
{
	int rc;

	a->announce_fd = fd;
	a->started_ns = started_ns;
	if (connect(fd, addr, addr_len) < 0 && errno != EINPROGRESS) {
		rc = -errno;
		fd_close(&a->announce_fd);
		return err_errno(err, rc, "connect to the host");
	}
	rc = watch_own(a, fd, EPOLLOUT, EVENT_ANNOUNCE);
	return rc < 0 ? err_errno(err, rc, "ready") : 0;
}

static void on_announce(struct agent *a)
{
	uint8_t frame[FRAME_HEADER_BYTES + 256];
	struct json_out json = {.buf = (char *)frame + FRAME_HEADER_BYTES,
		.cap = sizeof(frame) - FRAME_HEADER_BYTES};
	struct timespec now, clock;

	clock_gettime(CLOCK_BOOTTIME, &now);
	json_open(&json, '{');
	json_key(&json, "v");
	json_int(&json, PROTO_VERSION);
	json_key(&json, "agent");
	json_str(&json, MAYFLY_VERSION);
	json_key(&json, "pid");
	json_int(&json, getpid());
	json_key(&json, "started_ns");
	json_int(&json, (int64_t)a->started_ns);
	json_key(&json, "ready_ns");
	json_int(&json, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
	json_key(&json, "clock_ns");
	clock_gettime(CLOCK_REALTIME, &clock);
	json_int(&json, (int64_t)clock.tv_sec * 1000000000 + clock.tv_nsec);
	json_close(&json, '}');
	ASSERT(!json.full);
	frame_header_put(frame, FRAME_READY, (uint32_t)json.len);
	// A fresh connection has room for this; and when nobody listens there is nobody to tell.
	if (send(a->announce_fd, frame, FRAME_HEADER_BYTES + json.len,
		    MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		log_line(LOG_INFO, "agent", "no host heard that we are ready: %s", strerror(errno));
	fd_close(&a->announce_fd);
}

static void on_event(struct agent *a, const struct epoll_event *event)
{
	uint32_t generation = (uint32_t)(event->data.u64 >> 32);
	uint32_t slot = (uint32_t)event->data.u64 >> 8;
	enum task_fd what = event->data.u64 & 0xff;
	struct session *s = NULL;
	struct job *j = NULL;
	struct task *t;

	if (generation == 0) {
		switch ((enum own_event)event->data.u64) {
		case EVENT_LISTEN:
			on_listen(a);
			break;
		case EVENT_SIGNAL:
			on_signal(a);
			break;
		case EVENT_ANNOUNCE:
			on_announce(a);
		}
		return;
	}
	ASSERT(slot < SESSIONS_MAX + JOBS_MAX && what < FD_COUNT);
	if (slot < SESSIONS_MAX) {
		s = &a->sessions[slot];
		t = &s->task;
	} else {
		j = &a->jobs[slot - SESSIONS_MAX];
		t = &j->task;
	}
	if (!(s ? s->used : j->used) || t->generation != generation || t->fds[what] < 0)
		return; // it has ended in this very turn
	if (s)
		agent_mark(a, s);
	else
		agent_mark_job(a, j);
	if (s && s->state == SESSION_RAW && what == FD_CONN && event->events & EPOLLHUP)
		s->hung_up = true;
	if (what != FD_CONN && event->events == EPOLLHUP && (t->pid || t->exited) && !t->tty)
		task_close_fd(t, what); // a pipe without writers, and empty: that needs no read()
	else if (what != FD_CONN || event->events & ~(uint32_t)EPOLLOUT ||
		 (s && s->state == SESSION_DIAL))
		t->ready[what] = true;
}

static struct task *task_at(struct agent *a, int i)
{
	if (i < SESSIONS_MAX)
		return a->sessions[i].used ? &a->sessions[i].task : NULL;
	i -= SESSIONS_MAX;
	return a->jobs[i].used ? &a->jobs[i].task : NULL;
}

static uint64_t next_deadline(struct agent *a)
{
	uint64_t next = a->retry_accept_ns;
	unsigned left = a->deadlines;

	for (int i = 0; left && i < SESSIONS_MAX + JOBS_MAX; i++) {
		const struct task *t = task_at(a, i);

		if (!t || !t->deadline_ns)
			continue;
		left--;
		if (!next || t->deadline_ns < next)
			next = t->deadline_ns;
	}
	return next;
}

static void pass_deadlines(struct agent *a, uint64_t now)
{
	if (a->retry_accept_ns && now >= a->retry_accept_ns) {
		a->retry_accept_ns = 0;
		listen_on(a);
	}
	for (int i = 0; a->deadlines && i < SESSIONS_MAX + JOBS_MAX; i++) {
		struct task *t = task_at(a, i);

		if (!t || !t->deadline_ns || now < t->deadline_ns)
			continue;
		if (i < SESSIONS_MAX && a->sessions[i].state == SESSION_RAW)
			session_close(a, &a->sessions[i]);
		else
			task_deadline(a, t);
	}
}

// Each gets one step a turn; what a step marks again waits for the next turn. Jobs first: what they
// have to say is seen by their sessions in the same turn.
static void step_all(struct agent *a)
{
	struct job *jobs[JOBS_MAX];
	struct session *sessions[SESSIONS_MAX];
	unsigned njobs = a->ndirty_jobs, nsessions;

	memcpy(jobs, a->dirty_jobs, sizeof(jobs[0]) * njobs);
	a->ndirty_jobs = 0;
	for (unsigned i = 0; i < njobs; i++) {
		jobs[i]->dirty = false;
		if (jobs[i]->used)
			job_step(a, jobs[i]);
	}
	nsessions = a->ndirty;
	memcpy(sessions, a->dirty, sizeof(sessions[0]) * nsessions);
	a->ndirty = 0;
	for (unsigned i = 0; i < nsessions; i++) {
		sessions[i]->dirty = false;
		if (sessions[i]->used)
			session_step(a, sessions[i]);
	}
}

int agent_turn(struct agent *a, int timeout_ms, struct err *err)
{
	struct epoll_event events[EVENTS_MAX];
	uint64_t deadline = next_deadline(a);
	int n;

	if (deadline) {
		uint64_t now = now_ns();
		uint64_t left_ms = deadline > now ? (deadline - now + 999999) / 1000000 : 0;

		if (timeout_ms < 0 || left_ms < (uint64_t)timeout_ms)
			timeout_ms = (int)MIN(left_ms, (uint64_t)INT32_MAX);
	}
	n = epoll_wait(
		a->epoll_fd, events, EVENTS_MAX, a->ndirty || a->ndirty_jobs ? 0 : timeout_ms);
	if (n < 0 && errno != EINTR)
		return err_errno(err, -errno, "epoll_wait");
	for (int i = 0; i < n; i++)
		on_event(a, &events[i]);
	if (deadline)
		pass_deadlines(a, now_ns());
	step_all(a);
	return a->end;
}

int agent_run(struct agent *a, struct err *err)
{
	int rc;

	do
		rc = agent_turn(a, -1, err);
	while (rc == 0);
	return rc;
}
