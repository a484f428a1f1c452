// SPDX-License-Identifier: Apache-2.0
// A control group of its own (cgroup v2) for a machine that has limits: its monitor with the guest,
// and what that starts. The monitor enters it before it has other threads, main thread; what is
// counted there is read by the loop thread. Commands take away the groups of machines that have
// ended: nobody can remove the one that he is in.
#ifndef MAYFLY_CGROUP_H
#define MAYFLY_CGROUP_H

#include <jansson.h>

#include "vmm/config.h"

static inline bool cgroup_wanted(const struct config_limits *limits)
{
	return limits->cpu_milli || limits->cpu_weight || limits->memory_bytes ||
	       limits->processes || limits->io_weight;
}

struct cgroup {
	bool entered;
	int cpu_fd, memory_fd, events_fd, processes_fd, io_fd; // of what it counts; -1: it does not
};

#define CGROUP_INIT                                                                             \
	{                                                                                       \
		.cpu_fd = -1, .memory_fd = -1, .events_fd = -1, .processes_fd = -1, .io_fd = -1 \
	}

// Where groups of machines are: for root mayfly/ of the hierarchy, else beside the group of this
// process, where systemd lets the user make some. -ENOTSUP, and the cure, where the host has no
// hierarchy of version 2.
int cgroup_base(char ret_path[PATH_MAX], struct err *err);

// Moves this process into a group "machine-NAME-PID" below base, with those limits, all or nothing.
// The error names the file and the cure.
int cgroup_enter(struct cgroup *cgroup, const char *base, const char *name,
	const struct config_limits *limits, struct err *err);

// What the group has used, and its limits; NULL if there is none.
json_t *cgroup_stats(const struct cgroup *cgroup, const struct config_limits *limits);

void cgroup_fini(struct cgroup *cgroup);

// Removes the groups below base of machines that have ended.
void cgroup_sweep(const char *base);

// The same where this user's are, for commands that have seen one end.
void cgroup_sweep_ended(void);

#endif
