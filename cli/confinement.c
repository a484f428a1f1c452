// SPDX-License-Identifier: Apache-2.0
// Confinement, looked at from outside; see the header. One thread.
#include "cli/confinement.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/report.h"
#include "vmm/base/fd.h"
#include "vmm/jail.h"

#define PROC_BYTES (1U << 20)

static const char newer_mayfly[] = "start the machine anew: an older mayfly may have started it";
static const char host_lacks[] = "mayfly doctor says what this host lacks";

// --- /proc/PID -------------------------------------------------------------------------------

struct process {
	pid_t pid;
	struct stat dir; // the machine's folder
	struct stat run;
};

static char *read_proc(pid_t pid, const char *name, struct err *err)
{
	char path[160], *text = NULL;
	size_t len;

	snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
	return fd_read_file(path, PROC_BYTES, &text, &len, err) < 0 ? NULL : text;
}

// The number behind "NAME:" in a status file, in that base; -1 if there is none.
static long long status_value(const char *status, const char *name, int base)
{
	const char *at = status ? strstr(status, name) : NULL;

	return at ? (long long)strtoull(at + strlen(name), NULL, base) : -1;
}

static void look_at_privileges(struct report *report, const char *status)
{
	static const char *const sets[] = {"CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"};
	const bool no_new = status_value(status, "NoNewPrivs:", 10) == 1;
	char has[64] = "";

	for (size_t i = 0; i < ARRAY_SIZE(sets); i++)
		if (status_value(status, sets[i], 16) != 0)
			snprintf(has + strlen(has), sizeof(has) - strlen(has), " %.6s", sets[i]);
	report_add(report, "capabilities", has[0] ? MISSING : GOOD, newer_mayfly,
		has[0] ? "it has some:%s" : "none, nor any that could be had%s", has);
	report_add(report, "new privileges", no_new ? GOOD : MISSING, newer_mayfly, "%s",
		no_new ? "never (no_new_privs)" : "possible");
}

static void look_at_namespaces(struct report *report, pid_t pid)
{
	static const char *const names[] = {"user", "mnt", "net", "ipc", "uts", "cgroup"};
	char own[64] = "", shared[64] = "", path[64], here[64], there[64];

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		char *list = own;
		ssize_t a, b;

		snprintf(path, sizeof(path), "/proc/%d/ns/%s", (int)pid, names[i]);
		a = readlink(path, there, sizeof(there));
		snprintf(path, sizeof(path), "/proc/self/ns/%s", names[i]);
		b = readlink(path, here, sizeof(here));
		if (a < 0 || (a == b && !memcmp(here, there, (size_t)a)))
			list = shared;
		snprintf(list + strlen(list), 64 - strlen(list), " %s", names[i]);
	}
	report_add(report, "namespaces", shared[0] ? WEAK : GOOD, host_lacks,
		"its own:%s; the host's: pid%s", own[0] ? own : " none", shared);
}

// A line of mountinfo: ID PARENT DEVICE ROOT POINT OPTIONS …
static void look_at_root(struct report *report, const struct process *p)
{
	CLEANUP_FREE char *text = read_proc(p->pid, "mountinfo", NULL);
	char path[64], *rest = text, *line, writable[256] = "";
	unsigned int mounts = 0;
	struct stat root;

	snprintf(path, sizeof(path), "/proc/%d/root/", (int)p->pid);
	if (!text || stat(path, &root) < 0) {
		report_add(report, "root", MISSING, "look as the user who started it, or as root",
			"cannot be seen: %s", strerror(errno));
		return;
	}
	while ((line = strsep(&rest, "\n"))) {
		char point[128], options[128];

		if (sscanf(line, "%*s %*s %*s %*s %127s %127s", point, options) != 2)
			continue;
		mounts++;
		if (!strncmp(options, "rw", 2))
			snprintf(writable + strlen(writable), sizeof(writable) - strlen(writable),
				" %s", point);
	}
	if (root.st_dev != p->dir.st_dev || root.st_ino != p->dir.st_ino)
		report_add(report, "root", WEAK, host_lacks,
			"it sees the host's files, as far as other pieces let it");
	else
		report_add(report, "root", mounts > 2 ? WEAK : GOOD, newer_mayfly,
			"the machine's own folder; %u mounts, writable:%s", mounts, writable);
}

static void look_at_files(struct report *report, const struct process *p)
{
	char path[96], to[PATH_MAX], foreign[256] = "";
	unsigned int nr = 0;
	const struct dirent *e;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)p->pid);
	dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		struct stat st;
		ssize_t len;

		if (e->d_name[0] == '.')
			continue;
		nr++;
		snprintf(path, sizeof(path), "/proc/%d/fd/%.20s", (int)p->pid, e->d_name);
		if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode) || st.st_ino == p->dir.st_ino ||
			st.st_ino == p->run.st_ino)
			continue;
		len = readlink(path, to, sizeof(to) - 1);
		to[MAX(len, 0)] = '\0';
		snprintf(foreign + strlen(foreign), sizeof(foreign) - strlen(foreign), " %.100s",
			to);
	}
	if (dir)
		closedir(dir);
	report_add(report, "descriptors", !dir || foreign[0] ? MISSING : GOOD, newer_mayfly,
		foreign[0] ? "%u, folders outside its root among them:%s"
			   : "%u; no folder but its own among them%s",
		nr, foreign);
}

static void look_at_threads(struct report *report, pid_t pid)
{
	char path[96], unfiltered[128] = "", names[256] = "";
	const struct dirent *e;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		CLEANUP_FREE char *status = NULL;
		char name[32] = "?", *list = names;

		if (e->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "task/%.20s/status", e->d_name);
		status = read_proc(pid, path, NULL);
		if (!status)
			continue; // it has ended
		sscanf(status, "Name: %31s", name);
		// The kernel's own, for the io_uring: they run no program.
		if (!strncmp(name, "iou-", 4))
			continue;
		if (status_value(status, "Seccomp:", 10) != 2)
			list = unfiltered;
		snprintf(list + strlen(list), 128 - strlen(list), " %s", name);
	}
	if (dir)
		closedir(dir);
	report_add(report, "system calls", unfiltered[0] || !names[0] ? MISSING : GOOD,
		"a kernel with CONFIG_SECCOMP_FILTER",
		unfiltered[0] ? "not filtered:%s; filtered:%s" : "filtered, in each thread:%s%s",
		unfiltered[0] ? unfiltered : names, unfiltered[0] ? names : "");
}

static void look_at_limits(struct report *report, pid_t pid)
{
	CLEANUP_FREE char *text = read_proc(pid, "limits", NULL);
	const char *core = text ? strstr(text, "Max core file size") : NULL;
	const char *files = text ? strstr(text, "Max open files") : NULL;
	const char *processes = text ? strstr(text, "Max processes") : NULL;
	char c[32] = "?", f[32] = "?", p[32] = "?";

	if (!core || !files || !processes || sscanf(core, "Max core file size %*s %31s", c) != 1 ||
		sscanf(files, "Max open files %*s %31s", f) != 1 ||
		sscanf(processes, "Max processes %*s %31s", p) != 1) {
		report_add(report, "limits", MISSING, NULL, "cannot be seen");
		return;
	}
	report_add(report, "limits", strcmp(c, "0") ? MISSING : GOOD, newer_mayfly,
		"core dumps %s bytes, %s files, %s processes", c, f, p);
}

int confinement_look(struct report *report, pid_t pid, const char *dir, struct err *err)
{
	struct process p = {.pid = pid};
	CLEANUP_FREE char *status = read_proc(pid, "status", err);
	char run[PATH_MAX];

	if (!status)
		return err ? err->code : -ENOENT;
	if (snprintf(run, sizeof(run), "%s/run", dir) >= (int)sizeof(run) ||
		stat(dir, &p.dir) < 0 || stat(run, &p.run) < 0)
		return err_errno(err, -errno, "%s", dir);
	look_at_privileges(report, status);
	look_at_namespaces(report, pid);
	look_at_root(report, &p);
	look_at_files(report, &p);
	look_at_threads(report, pid);
	look_at_limits(report, pid);
	// The one piece of which the kernel tells nobody.
	report_add(report, "landlock", GOOD, NULL,
		"the kernel does not tell whether a process is under it; mayfly doctor says "
		"whether it is to be had");
	return 0;
}

// --- This host -------------------------------------------------------------------------------

static int try_in(const char *dir, struct err *err)
{
	char run[PATH_MAX];
	struct jail_params params = {.status_fd = -1};

	params.dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (params.dir_fd < 0 || (mkdirat(params.dir_fd, "run", 0700) < 0 && errno != EEXIST))
		return err_errno(err, -errno, "%s", dir);
	if (snprintf(run, sizeof(run), "%s/run", dir) >= (int)sizeof(run))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	params.run_fd = open(run, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (params.run_fd < 0)
		return err_errno(err, -errno, "%s", run);
	return jail_enter(&params, err);
}

void confinement_try(struct report *report)
{
	static const struct {
		int piece;
		const char *what, *cure;
	} pieces[] = {
		{JAIL_USER_NS, "user namespaces",
			"sysctl user.max_user_namespaces=10000, kernel.unprivileged_userns_clone=1 "
			"or kernel.apparmor_restrict_unprivileged_userns=0, whichever there is"},
		{JAIL_NAMESPACES, "the other namespaces", "the same"},
		{JAIL_ROOT, "a root of its own", "the same, and Linux 5.12 or newer"},
		{JAIL_LANDLOCK, "landlock",
			"Linux 5.13 or newer, with lsm=landlock,… on its command line"},
		{JAIL_SECCOMP, "seccomp", "a kernel with CONFIG_SECCOMP_FILTER"},
	};
	char dir[PATH_MAX], lacks[256] = "";
	const char *cure = NULL;
	CLEANUP_FD int lock_fd = -1;
	struct err err = {0};
	int status = 0, missing;
	pid_t child;

	if (home_make_throwaway(dir, &lock_fd, &err) < 0)
		return; // which another finding says
	child = fork();
	if (child == 0) {
		int r = try_in(dir, &err);

		_exit(r < 0 ? 255 : r);
	}
	if (child > 0)
		waitpid(child, &status, 0);
	home_remove(dir, NULL);
	missing = child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 255;
	if (missing == 255) {
		report_add(report, "jail", MISSING, "report this, with your kernel's version",
			"a monitor could not confine itself");
		return;
	}
	for (size_t i = 0; i < ARRAY_SIZE(pieces); i++) {
		if (!(missing & pieces[i].piece))
			continue;
		snprintf(lacks + strlen(lacks), sizeof(lacks) - strlen(lacks), "%s%s",
			lacks[0] ? ", " : "", pieces[i].what);
		cure = cure ? cure : pieces[i].cure;
	}
	if (missing)
		report_add(report, "jail", WEAK, cure, "monitors are confined, but without: %s",
			lacks);
	else
		report_add(report, "jail", GOOD, NULL,
			"monitors are confined: namespaces, root, landlock, seccomp");
}

void confinement_calls(bool json)
{
	static const char *const when[] = {
		[JAIL_ALWAYS] = "always",
		[JAIL_RARE] = "rare",
		[JAIL_EMULATED] = "emulated ring 0",
	};
	json_t *list = json_array();

	for (unsigned int i = 0; i < jail_nr_rules; i++) {
		const struct jail_rule *rule = &jail_rules[i];
		char kinds[64] = "", number[16];

		for (int kind = 0; kind < JAIL_KINDS; kind++)
			if (rule->kinds & JAIL_FOR(kind))
				snprintf(kinds + strlen(kinds), sizeof(kinds) - strlen(kinds),
					"%s%s", kinds[0] ? "," : "", jail_kind_names[kind]);
		json_array_append_new(list,
			json_pack("{s:s, s:s, s:I, s:I, s:s, s:s, s:s}", "row", rule->name, "call",
				jail_call_name(rule->nr, number), "arg",
				(json_int_t)(rule->check == JAIL_EQUALS ? (int)rule->arg : -1),
				"value", (json_int_t)rule->value, "threads", kinds, "when",
				when[rule->when], "why", rule->why));
		if (!json)
			printf("%-34s %-16s %s\n", rule->name, kinds, rule->why);
	}
	if (json) {
		json_dumpf(list, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	json_decref(list);
}
