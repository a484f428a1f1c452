// SPDX-License-Identifier: Apache-2.0
// The process tree of one command: a cgroup where the guest has version 2 of them, so that nothing
// gets away; else what the session and the parents tell. The agent's only thread.
#ifndef MAYFLY_GUEST_TREE_H
#define MAYFLY_GUEST_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "vmm/base/err.h"

struct tree {
	int slot; // into the pool of cgroups, -1: none
};

#define TREE_NONE ((struct tree){.slot = -1})

// root is a directory of a cgroup2 file system in which we may make children, or NULL. Without
// one, or without cgroup.kill in it (Linux before 5.14), trees are found by searching /proc.
void tree_pool_init(const char *root);
void tree_pool_fini(void);

// Takes an empty cgroup for the next command. Never fails: without one the search remains.
struct tree tree_take(void);

// What the processes of a tree may have together; 0: no limit.
struct tree_limits {
	uint64_t memory_bytes;
	uint64_t processes;
};

// A cgroup of its own with these limits. -EOPNOTSUPP where there are no such cgroups.
int tree_take_limited(const struct tree_limits *limits, struct tree *ret, struct err *err);

// The CPU time of the tree so far, children that have ended included. False when nobody counts it.
bool tree_cpu_us(struct tree t, uint64_t *ret_us);

// Whether the kernel has killed something in the tree for want of memory within the limit.
bool tree_out_of_memory(struct tree t);

// To start a process in; -1 when the tree has no cgroup.
int tree_cgroup_fd(struct tree t);

// SIGKILL to every process of the tree whose first process is leader, which has not been reaped.
void tree_kill(struct tree t, pid_t leader);

// The first process is gone and the tree is ours no more; what still runs in it goes on.
void tree_release(struct tree *t);

#endif
