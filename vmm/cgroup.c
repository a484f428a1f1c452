// SPDX-License-Identifier: Apache-2.0
// Control groups; see the header. Main thread of a monitor or a command; cgroup_stats(): loop
// thread.
#include "vmm/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define HIERARCHY   "/sys/fs/cgroup"
#define PREFIX      "machine-"
#define PERIOD_US   100000U
#define ENTER_TRIES 10
#define TEXT_BYTES  4096

static int write_file(const char *dir, const char *name, const char *value, struct err *err)
{
	char path[PATH_MAX];
	CLEANUP_FD int fd = -1;
	int r = 0;

	if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, value, strlen(value)) < 0)
		r = -errno;
	if (r == -ENOENT || r == -EACCES || r == -EBUSY)
		return err_set(err, r,
			"limits: %s: %s (start it where its user may make groups: as root outside "
			"of containers, or with systemd-run --user --scope -p Delegate=yes mayfly "
			"…)",
			path, strerror(-r));
	return r < 0 ? err_errno(err, r, "limits: %s: writing '%s'", path, value) : 0;
}

// The group of this process: "0::/PATH". "" if it is the root.
static int own_group(char ret[PATH_MAX], struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	const char *at;
	size_t len;
	int r = fd_read_file("/proc/self/cgroup", 65536, &text, &len, err);

	if (r < 0)
		return r;
	at = !strncmp(text, "0::/", 4) ? text : strstr(text, "\n0::/");
	if (!at)
		return err_set(err, -ENOTSUP, "limits: this process is in no group of cgroup v2");
	at = strchr(at, '/');
	snprintf(ret, PATH_MAX, "%.*s", (int)strcspn(at, "\n"), at);
	if (!strcmp(ret, "/"))
		ret[0] = '\0';
	return 0;
}

int cgroup_base(char ret_path[PATH_MAX], struct err *err)
{
	char own[PATH_MAX], *slash;
	struct statfs fs;
	int r;

	if (statfs(HIERARCHY, &fs) < 0 || fs.f_type != CGROUP2_SUPER_MAGIC)
		return err_set(err, -ENOTSUP,
			"limits need cgroup v2 at " HIERARCHY ", and this host has %s there "
			"(systemd.unified_cgroup_hierarchy=1 on the kernel's command line of the "
			"host)",
			access(HIERARCHY "/memory", F_OK) == 0 ? "version 1" : "none");
	if (geteuid() == 0) {
		strcpy(ret_path, HIERARCHY "/mayfly");
		return 0;
	}
	r = own_group(own, err);
	if (r < 0)
		return r;
	slash = strrchr(own, '/');
	if (slash)
		*slash = '\0';
	if (snprintf(ret_path, PATH_MAX, HIERARCHY "%s", own) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "limits: %s", own);
	return 0;
}

// Hands those controllers down to base's groups, if that is for us to do: where it is not, or
// they are there already, what follows tells.
static void enable(const char *base, const struct config_limits *limits)
{
	const struct {
		const char *name;
		bool wanted;
	} controllers[] = {
		{"+cpu", limits->cpu_milli || limits->cpu_weight},
		{"+memory", limits->memory_bytes != 0},
		{"+pids", limits->processes != 0},
		{"+io", limits->io_weight != 0},
	};

	for (size_t i = 0; i < ARRAY_SIZE(controllers); i++) {
		if (!controllers[i].wanted)
			continue;
		if (!strcmp(base, HIERARCHY "/mayfly"))
			(void)write_file(
				HIERARCHY, "cgroup.subtree_control", controllers[i].name, NULL);
		(void)write_file(base, "cgroup.subtree_control", controllers[i].name, NULL);
	}
}

void cgroup_sweep(const char *base)
{
	DIR *dir = opendir(base);
	const struct dirent *e;

	// A group with a process in it is not removed.
	while (dir && (e = readdir(dir)))
		if (!strncmp(e->d_name, PREFIX, strlen(PREFIX)))
			(void)unlinkat(dirfd(dir), e->d_name, AT_REMOVEDIR);
	if (dir)
		closedir(dir);
}

void cgroup_sweep_ended(void)
{
	char base[PATH_MAX];

	if (cgroup_base(base, NULL) == 0)
		cgroup_sweep(base);
}

// Into the group dir, which is made; again where somebody's sweep has taken the empty one away.
static int enter(const char *dir, struct err *err)
{
	int r = -ENOENT;

	for (int tries = 0; tries < ENTER_TRIES && (r == -ENOENT || r == -ENODEV); tries++) {
		if (mkdir(dir, 0755) < 0 && errno != EEXIST)
			return err_errno(err, -errno, "limits: %s", dir);
		r = write_file(dir, "cgroup.procs", "0", err);
	}
	return r;
}

static int set_number(const char *dir, const char *name, uint64_t value, struct err *err)
{
	char text[24];

	if (!value)
		return 0;
	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	return write_file(dir, name, text, err);
}

static int open_count(const char *dir, const char *name)
{
	char path[PATH_MAX];

	return snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path)
		       ? -1
		       : open(path, O_RDONLY | O_CLOEXEC);
}

int cgroup_enter(struct cgroup *cgroup, const char *base, const char *name,
	const struct config_limits *limits, struct err *err)
{
	char dir[PATH_MAX], text[48];
	int r;

	if (snprintf(dir, sizeof(dir), "%s/" PREFIX "%s-%d", base, name, (int)getpid()) >=
		(int)sizeof(dir))
		return err_errno(err, -ENAMETOOLONG, "limits: %s", base);
	if (mkdir(base, 0755) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "limits: %s", base);
	cgroup_sweep(base);
	enable(base, limits);
	r = enter(dir, err);
	if (r == 0 && limits->cpu_milli) {
		snprintf(text, sizeof(text), "%llu %u",
			(unsigned long long)limits->cpu_milli * PERIOD_US / 1000, PERIOD_US);
		r = write_file(dir, "cpu.max", text, err);
	}
	if (r == 0)
		r = set_number(dir, "cpu.weight", limits->cpu_weight, err);
	if (r == 0)
		r = set_number(dir, "memory.max", limits->memory_bytes, err);
	if (r == 0)
		r = set_number(dir, "pids.max", limits->processes, err);
	if (r == 0)
		r = set_number(dir, "io.weight", limits->io_weight, err);
	if (r < 0)
		return r;
	// In the jail nothing can be opened any more.
	cgroup->entered = true;
	cgroup->cpu_fd = open_count(dir, "cpu.stat");
	cgroup->memory_fd = open_count(dir, "memory.current");
	cgroup->events_fd = open_count(dir, "memory.events");
	cgroup->processes_fd = open_count(dir, "pids.current");
	cgroup->io_fd = open_count(dir, "io.stat");
	return 0;
}

// --- What was used ---------------------------------------------------------------------------

static bool read_count(int fd, char text[TEXT_BYTES])
{
	ssize_t len = fd < 0 ? -1 : pread(fd, text, TEXT_BYTES - 1, 0);

	if (len < 0)
		return false;
	text[len] = '\0';
	return true;
}

static void put(json_t *out, const char *key, uint64_t value)
{
	json_object_set_new(out, key, json_integer((json_int_t)value));
}

// The sum of all "WORD NUMBER" or "WORD=NUMBER" in text, a word with its separator.
static void put_sum(json_t *out, const char *key, const char *text, const char *word)
{
	uint64_t sum = 0;

	for (const char *at = text; (at = strstr(at, word)); at += strlen(word))
		if (at == text || at[-1] == '\n' || at[-1] == ' ')
			sum += strtoull(at + strlen(word), NULL, 10);
	put(out, key, sum);
}

static void put_limit(json_t *out, const char *key, uint64_t value)
{
	if (value)
		put(out, key, value);
}

json_t *cgroup_stats(const struct cgroup *cgroup, const struct config_limits *limits)
{
	char text[TEXT_BYTES];
	json_t *out;

	if (!cgroup->entered)
		return NULL;
	out = json_object();
	if (read_count(cgroup->cpu_fd, text)) {
		put_sum(out, "cpu_used_us", text, "usage_usec ");
		put_sum(out, "cpu_throttled_us", text, "throttled_usec ");
	}
	put_limit(out, "cpu_limit_permille", limits->cpu_milli);
	put_limit(out, "cpu_weight", limits->cpu_weight);
	if (read_count(cgroup->memory_fd, text))
		put(out, "memory_bytes", strtoull(text, NULL, 10));
	put_limit(out, "memory_limit_bytes", limits->memory_bytes);
	if (read_count(cgroup->events_fd, text))
		put_sum(out, "memory_limit_hits", text, "max ");
	if (read_count(cgroup->processes_fd, text))
		put(out, "processes", strtoull(text, NULL, 10));
	put_limit(out, "processes_limit", limits->processes);
	if (read_count(cgroup->io_fd, text)) {
		put_sum(out, "io_read_bytes", text, "rbytes=");
		put_sum(out, "io_written_bytes", text, "wbytes=");
	}
	put_limit(out, "io_weight", limits->io_weight);
	return out;
}

void cgroup_fini(struct cgroup *cgroup)
{
	fd_close(&cgroup->cpu_fd);
	fd_close(&cgroup->memory_fd);
	fd_close(&cgroup->events_fd);
	fd_close(&cgroup->processes_fd);
	fd_close(&cgroup->io_fd);
	cgroup->entered = false;
}
