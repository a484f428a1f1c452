// SPDX-License-Identifier: Apache-2.0
// Machines that are up, by name. One thread.
#include "cli/running.h"

#include <errno.h>
#include <stdio.h>
#include <sys/pidfd.h>

#include "cli/agent_client.h"
#include "cli/home.h"
#include "cli/launch.h"
#include "cli/patience.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"

#define CONNECT_TIMEOUT_NS 60000000000ULL

int running_find(const char *name, struct running *ret, struct err *err)
{
	int r = home_find(name, ret->dir, err);

	if (r < 0)
		return r;
	r = home_running(ret->dir, NULL, err);
	if (r < 0)
		return r;
	if (r == 0)
		return err_set(err, -ESRCH, "'%s' is not running (mayfly up %s)", name, name);
	if (snprintf(ret->run_dir, PATH_MAX, "%s/run", ret->dir) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", ret->dir);
	ret->name = name;
	return 0;
}

int running_connect_by(const struct running *m, uint64_t deadline_ns, struct err *err)
{
	return agent_connect(m->run_dir, LAUNCH_VSOCK, AGENT_PORT, -1, deadline_ns, err);
}

int running_connect(const struct running *m, struct err *err)
{
	return running_connect_by(m, now_ns() + patience_ns(CONNECT_TIMEOUT_NS), err);
}

int running_pidfd(const char *dir, struct err *err)
{
	CLEANUP_FD int fd = -1;
	pid_t pid = 0, again = 0;
	int r = home_running(dir, &pid, err);

	if (r < 0)
		return r;
	if (r == 0 || pid <= 0)
		return -ESRCH;
	fd = pidfd_open(pid, 0);
	if (fd < 0)
		return errno == ESRCH ? -ESRCH : err_errno(err, -errno, "pidfd_open");
	// Again, so that it is not that of a later process with the same id.
	r = home_running(dir, &again, err);
	if (r < 0)
		return r;
	return r == 0 || again != pid ? -ESRCH : TAKE_FD(fd);
}

void running_explain(const struct running *m, int code, struct err *err)
{
	if (home_running(m->dir, NULL, NULL) == 0)
		err_set(err, code, "the machine '%s' has ended", m->name);
}
