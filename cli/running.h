// SPDX-License-Identifier: Apache-2.0
// Machines that are up, by name, as the verbs that speak to their agents want them. One thread.
#ifndef MAYFLY_CLI_RUNNING_H
#define MAYFLY_CLI_RUNNING_H

#include <limits.h>

#include "vmm/base/err.h"

struct running {
	const char *name; // the caller's
	char dir[PATH_MAX], run_dir[PATH_MAX];
};

// -ENOENT when there is no such machine, -ESRCH when it is not up.
int running_find(const char *name, struct running *ret, struct err *err);

// A fresh connection to its agent, the caller's.
int running_connect(const struct running *m, struct err *err);
int running_connect_by(const struct running *m, uint64_t deadline_ns, struct err *err);

// A pidfd of the monitor that runs the machine in dir, the caller's. -ESRCH if none does.
int running_pidfd(const char *dir, struct err *err);

// After a failure: whether it is because the machine has ended meanwhile, and then err says so.
void running_explain(const struct running *m, int code, struct err *err);

#endif
