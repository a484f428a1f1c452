// SPDX-License-Identifier: Apache-2.0
// The process tree of one command. Making a cgroup costs far more than starting a process in one,
// so they are kept and used again once they are empty. The agent's only thread.
#include "guest/tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define POOL_MAX 256

enum slot_state { SLOT_NONE, SLOT_IDLE, SLOT_USED, SLOT_LEFT };

static struct {
	int root_fd; // -1: no cgroups
	struct slot {
		enum slot_state state; // LEFT: released while processes were still in it
		bool limited; // is used once: what it is charged with would be the next one's
		int dir_fd, events_fd;
	} slots[POOL_MAX];
	bool controllers; // have been turned on for our children
} pool = {.root_fd = -1};

static bool slot_make(int i)
{
	struct slot *s = &pool.slots[i];
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int events_fd = -1;
	char name[24];

	snprintf(name, sizeof(name), "exec-%d", i);
	if (mkdirat(pool.root_fd, name, 0755) < 0 && errno != EEXIST)
		return false;
	dir_fd = openat(pool.root_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd < 0 || faccessat(dir_fd, "cgroup.kill", W_OK, 0) < 0)
		return false;
	events_fd = openat(dir_fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
	if (events_fd < 0)
		return false;
	s->dir_fd = TAKE_FD(dir_fd);
	s->events_fd = TAKE_FD(events_fd);
	s->limited = false;
	return true;
}

static void slot_remove(int i)
{
	struct slot *s = &pool.slots[i];
	char name[24];

	fd_close(&s->dir_fd);
	fd_close(&s->events_fd);
	s->state = SLOT_NONE;
	snprintf(name, sizeof(name), "exec-%d", i);
	unlinkat(pool.root_fd, name, AT_REMOVEDIR); // stays while processes are in it
}

static bool slot_is_empty(const struct slot *s)
{
	static const char empty[] = "populated 0";
	char text[sizeof(empty) - 1];

	return pread(s->events_fd, text, sizeof(text), 0) == (ssize_t)sizeof(text) &&
	       memcmp(text, empty, sizeof(text)) == 0;
}

void tree_pool_init(const char *root)
{
	ASSERT(pool.root_fd < 0);
	if (!root)
		return;
	pool.root_fd = openat(AT_FDCWD, root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (pool.root_fd < 0)
		return;
	// The first one now, when nobody waits for it; and it tells whether this works at all.
	if (slot_make(0))
		pool.slots[0].state = SLOT_IDLE;
	else
		tree_pool_fini();
}

void tree_pool_fini(void)
{
	for (int i = 0; i < POOL_MAX; i++)
		if (pool.slots[i].state != SLOT_NONE)
			slot_remove(i);
	pool.controllers = false;
	fd_close(&pool.root_fd);
}

// Those in which processes were left and are no more.
static void collect_left(void)
{
	for (int i = 0; i < POOL_MAX; i++) {
		struct slot *s = &pool.slots[i];

		if (s->state != SLOT_LEFT || !slot_is_empty(s))
			continue;
		if (s->limited)
			slot_remove(i);
		else
			s->state = SLOT_IDLE;
	}
}

static int find_slot(enum slot_state state)
{
	for (int i = 0; i < POOL_MAX; i++)
		if (pool.slots[i].state == state)
			return i;
	return -1;
}

// A new one. -1 when there is no room, or no luck.
static int make_slot(void)
{
	int i = find_slot(SLOT_NONE);

	if (i < 0) {
		collect_left();
		i = find_slot(SLOT_NONE);
	}
	return i >= 0 && slot_make(i) ? i : -1;
}

struct tree tree_take(void)
{
	int i;

	if (pool.root_fd < 0)
		return TREE_NONE;
	i = find_slot(SLOT_IDLE);
	if (i < 0) {
		collect_left();
		i = find_slot(SLOT_IDLE);
	}
	if (i < 0)
		i = make_slot();
	if (i < 0)
		return TREE_NONE;
	pool.slots[i].state = SLOT_USED;
	return (struct tree){.slot = i};
}

static int write_at(int dir_fd, const char *name, const char *text)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_WRONLY | O_CLOEXEC);

	return fd < 0 ? -errno : fd_write_all(fd, text, strlen(text));
}

static int write_limit(int dir_fd, const char *name, uint64_t value)
{
	char text[24];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	return value ? write_at(dir_fd, name, text) : 0;
}

int tree_take_limited(const struct tree_limits *limits, struct tree *ret, struct err *err)
{
	struct slot *s;
	int i, rc;

	if (pool.root_fd < 0)
		return err_set(err, -EOPNOTSUPP, "this guest has no cgroups for limits");
	// Only now: counting costs something on every page that any command takes.
	if (!pool.controllers) {
		rc = write_at(pool.root_fd, "cgroup.subtree_control", "+memory +pids");
		if (rc < 0)
			return err_set(err, -EOPNOTSUPP,
				"this guest has no controllers for limits: %s", strerror(-rc));
		pool.controllers = true;
	}
	i = make_slot();
	if (i < 0)
		return err_set(err, -EAGAIN, "no cgroup is left for limits");
	s = &pool.slots[i];
	s->limited = true;
	s->state = SLOT_USED;
	rc = write_limit(s->dir_fd, "memory.max", limits->memory_bytes);
	if (rc == 0 && limits->memory_bytes) {
		rc = write_at(s->dir_fd, "memory.oom.group", "1");
		write_at(s->dir_fd, "memory.swap.max", "0"); // where there is swap
	}
	if (rc == 0)
		rc = write_limit(s->dir_fd, "pids.max", limits->processes);
	if (rc < 0) {
		slot_remove(i);
		return err_errno(err, rc, "limits");
	}
	*ret = (struct tree){.slot = i};
	return 0;
}

// The number behind a word in a file of the cgroup.
static bool read_number(struct tree t, const char *name, const char *word, uint64_t *ret)
{
	CLEANUP_FD int fd = -1;
	char text[1024], *line;
	ssize_t n;

	if (t.slot < 0)
		return false;
	fd = openat(pool.slots[t.slot].dir_fd, name, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return false;
	text[n] = '\0';
	line = strstr(text, word);
	if (!line)
		return false;
	*ret = strtoull(line + strlen(word), NULL, 10);
	return true;
}

bool tree_cpu_us(struct tree t, uint64_t *ret_us)
{
	return read_number(t, "cpu.stat", "usage_usec ", ret_us);
}

bool tree_out_of_memory(struct tree t)
{
	uint64_t kills = 0;

	return t.slot >= 0 && pool.slots[t.slot].limited &&
	       read_number(t, "memory.events", "oom_kill ", &kills) && kills > 0;
}

int tree_cgroup_fd(struct tree t)
{
	return t.slot < 0 ? -1 : pool.slots[t.slot].dir_fd;
}

void tree_release(struct tree *t)
{
	struct slot *s;

	if (t->slot < 0)
		return;
	s = &pool.slots[t->slot];
	ASSERT(s->state == SLOT_USED);
	s->state = slot_is_empty(s) ? SLOT_IDLE : SLOT_LEFT;
	if (s->limited && s->state == SLOT_IDLE)
		slot_remove(t->slot);
	t->slot = -1;
}

// --- Without cgroups -------------------------------------------------------------------------

#define SCAN_MAX    4096
#define SCAN_PASSES 16

struct proc {
	pid_t pid, parent, group, session;
	bool ours;
};

// /proc/PID/stat: pid (name) state ppid pgrp session … where the name may hold anything.
static bool read_stat(int proc_fd, const char *pid, struct proc *ret)
{
	CLEANUP_FD int fd = -1;
	char path[32], text[512], *p;
	ssize_t n;
	long v[3];

	snprintf(path, sizeof(path), "%.16s/stat", pid);
	fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return false;
	text[n] = '\0';
	p = strrchr(text, ')');
	if (!p || strlen(p) < 4)
		return false;
	p += 4;
	for (int i = 0; i < 3; i++)
		v[i] = strtol(p, &p, 10);
	*ret = (struct proc){
		(pid_t)strtol(pid, NULL, 10), (pid_t)v[0], (pid_t)v[1], (pid_t)v[2], false};
	return true;
}

// One look at all processes: marks those of the tree and kills them. Returns how many there were.
static int scan_and_kill(pid_t leader)
{
	static struct proc procs[SCAN_MAX];
	int n = 0, killed = 0;
	bool more = true;
	DIR *dir = opendir("/proc");
	struct dirent *entry;

	if (!dir)
		return 0;
	while (n < SCAN_MAX && (entry = readdir(dir))) {
		if (entry->d_name[0] < '1' || entry->d_name[0] > '9' ||
			!read_stat(dirfd(dir), entry->d_name, &procs[n]))
			continue;
		procs[n].ours = procs[n].session == leader || procs[n].group == leader;
		n++;
	}
	closedir(dir);
	// Those who left the session are known by their parents, as long as these live, and take
	// the session that they founded with them.
	while (more) {
		more = false;
		for (int i = 0; i < n; i++) {
			for (int k = 0; !procs[i].ours && k < n; k++) {
				if (procs[k].ours &&
					(procs[k].pid == procs[i].parent ||
						procs[k].session == procs[i].session)) {
					procs[i].ours = true;
					more = true;
				}
			}
		}
	}
	for (int i = 0; i < n; i++)
		if (procs[i].ours && kill(procs[i].pid, SIGKILL) == 0)
			killed++;
	return killed;
}

void tree_kill(struct tree t, pid_t leader)
{
	ASSERT(leader > 1);
	if (t.slot >= 0) {
		CLEANUP_FD int fd = openat(
			pool.slots[t.slot].dir_fd, "cgroup.kill", O_WRONLY | O_CLOEXEC);

		if (fd >= 0 && fd_write_all(fd, "1", 1) == 0)
			return;
		log_line(LOG_WARN, "agent", "cgroup.kill: %s", strerror(errno));
	}
	// A dead process stays to be seen until it is reaped, so two equal looks in a row mean that
	// nobody was born in between.
	for (int pass = 0, before = -1; pass < SCAN_PASSES; pass++) {
		int now = scan_and_kill(leader);

		if (now == before)
			return;
		before = now;
	}
}
