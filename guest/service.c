// SPDX-License-Identifier: Apache-2.0
// The agent as a service; see the header. The agent's only thread.
#include "guest/service.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define CGROUPS "/sys/fs/cgroup"

#define FILES_SOFT 4096 // a session takes several

static struct {
	char own[PATH_MAX]; // where we were started
	char pool[PATH_MAX]; // below it; "": none
	char self[PATH_MAX]; // below that: where we are
} place;

static int write_text(const char *dir, const char *name, const char *text)
{
	char path[PATH_MAX];
	CLEANUP_FD int fd = -1;

	if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	fd = openat(AT_FDCWD, path, O_WRONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd_write_all(fd, text, strlen(text));
}

// The line "0::/path" of /proc/self/cgroup is that of version 2.
static bool find_own(void)
{
	CLEANUP_FREE char *text = NULL;
	char *line;
	size_t len;

	if (fd_read_file("/proc/self/cgroup", 65536, &text, &len, NULL) < 0)
		return false;
	line = strncmp(text, "0::", 3) == 0 ? text : strstr(text, "\n0::");
	if (!line)
		return false;
	line += line[0] == '\n' ? 4 : 3;
	line[strcspn(line, "\n")] = '\0';
	if (strcmp(line, "/") == 0)
		line++;
	return snprintf(place.own, sizeof(place.own), CGROUPS "%s", line) < (int)sizeof(place.own);
}

void service_start(void)
{
	struct rlimit files;

	signal(SIGPIPE, SIG_DFL); // or our commands would inherit that it is ignored
	if (getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur >= FILES_SOFT)
		return;
	files.rlim_cur = MIN((rlim_t)FILES_SOFT, files.rlim_max);
	setrlimit(RLIMIT_NOFILE, &files);
}

const char *service_cgroup(void)
{
	int rc;

	if (!find_own() || snprintf(place.pool, sizeof(place.pool), "%s/mayfly-%d", place.own,
				   (int)getpid()) >= (int)sizeof(place.pool) - 8)
		return NULL;
	snprintf(place.self, sizeof(place.self), "%.*s/agent", (int)sizeof(place.self) - 8,
		place.pool);
	if (mkdir(place.pool, 0755) < 0 && errno != EEXIST) {
		place.pool[0] = '\0';
		return NULL;
	}
	rc = mkdir(place.self, 0755) < 0 && errno != EEXIST
		     ? -errno
		     : write_text(place.self, "cgroup.procs", "0");
	if (rc < 0) {
		log_line(LOG_WARN, "agent", "%s: %s: commands have no cgroups", place.self,
			strerror(-rc));
		service_leave();
		return NULL;
	}
	// For limits; where that does not work they are refused, and all else does.
	write_text(place.own, "cgroup.subtree_control", "+memory +pids");
	return place.pool;
}

void service_leave(void)
{
	if (!place.pool[0])
		return;
	// The root holds processes in any case, and others may want its controllers.
	if (strcmp(place.own, CGROUPS) != 0)
		write_text(place.own, "cgroup.subtree_control", "-memory -pids");
	write_text(place.own, "cgroup.procs", "0");
	rmdir(place.self);
	rmdir(place.pool);
	place.pool[0] = '\0';
}

void service_reboot(void)
{
	sigset_t none;

	// What we have blocked and ignored is not for it.
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execlp("reboot", "reboot", (char *)NULL);
	log_line(LOG_ERROR, "agent", "reboot: %s", strerror(errno));
}
