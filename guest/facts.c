// SPDX-License-Identifier: Apache-2.0
// What a machine says about itself. The agent's only thread.
#include "guest/facts.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define FILE_MAX_BYTES (1U << 20)
#define PORTS_MAX      256
#define TCP_LISTEN     10
#define SCAN_MAX       4096

static void put_int(struct json_out *out, const char *key, int64_t value)
{
	json_key(out, key);
	json_int(out, value);
}

static int64_t nanoseconds(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static char *read_proc(const char *proc, const char *name)
{
	char path[256], *text;
	size_t len;

	snprintf(path, sizeof(path), "%s/%s", proc, name);
	return fd_read_file(path, FILE_MAX_BYTES, &text, &len, NULL) < 0 ? NULL : text;
}

static void put_memory(struct json_out *out, const char *proc)
{
	static const struct {
		const char *line, *key;
	} wanted[] = {
		{"MemTotal:", "memory_total_bytes"},
		{"MemAvailable:", "memory_available_bytes"},
		{"Dirty:", "memory_dirty_bytes"},
	};
	CLEANUP_FREE char *text = read_proc(proc, "meminfo");

	for (size_t i = 0; text && i < ARRAY_SIZE(wanted); i++) {
		const char *line = strstr(text, wanted[i].line);

		if (line)
			put_int(out, wanted[i].key,
				(int64_t)strtoul(line + strlen(wanted[i].line), NULL, 10) * 1024);
	}
}

// A line of /proc/net/tcp: "  0: 0100007F:0016 00000000:0000 0A …", the state in the fourth column.
static bool parse_listener(char *line, const char **ret_address, unsigned long *ret_port)
{
	char *address, *port, *remote, *state;

	if (!strsep(&line, ":") || !line || *line != ' ')
		return false;
	line++;
	address = strsep(&line, ":");
	port = strsep(&line, " ");
	remote = strsep(&line, " ");
	state = strsep(&line, " ");
	if (!state || !remote || strtoul(state, NULL, 16) != TCP_LISTEN)
		return false;
	*ret_address = address;
	*ret_port = strtoul(port, NULL, 16);
	return true;
}

static void put_listeners(struct json_out *out, const char *proc, const char *name, int *left)
{
	CLEANUP_FREE char *text = read_proc(proc, name);
	char *rest = text, *line;

	while (*left && (line = strsep(&rest, "\n"))) {
		const char *address;
		unsigned long port;

		if (!parse_listener(line, &address, &port))
			continue;
		(*left)--;
		json_open(out, '{');
		put_int(out, "port", (int64_t)port);
		json_key(out, "loopback");
		json_bool(out, strcmp(address, "0100007F") == 0 ||
				       strcmp(address, "00000000000000000000000001000000") == 0);
		json_close(out, '}');
	}
}

struct process {
	int64_t pid, parent, ticks, pages;
	uid_t uid;
	char name[64], state[2];
};

// /proc/PID/stat: "1 (name) S 0 …", where the name may hold anything.
static bool read_process(int proc_fd, const char *pid, struct process *ret)
{
	char path[32], text[1024], *open, *close, *word;
	CLEANUP_FD int fd = -1;
	struct stat st;
	ssize_t n;

	snprintf(path, sizeof(path), "%.16s/stat", pid);
	fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 || fstat(fd, &st) < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return false;
	text[n] = '\0';
	open = strchr(text, '(');
	close = strrchr(text, ')');
	if (!open || !close || close < open || strlen(close) < 4)
		return false;
	*close = '\0';
	*ret = (struct process){.pid = strtoll(text, NULL, 10), .uid = st.st_uid};
	snprintf(ret->name, sizeof(ret->name), "%s", open + 1);
	ret->state[0] = close[2];
	// The third word is the state; see proc(5).
	word = close + 3;
	for (int i = 4; i <= 24 && word; i++) {
		int64_t value = strtoll(word, &word, 10);

		if (i == 4)
			ret->parent = value;
		else if (i == 14 || i == 15)
			ret->ticks += value;
		else if (i == 24)
			ret->pages = value;
	}
	return true;
}

static int by_cpu_time(const void *a, const void *b)
{
	const struct process *p = a, *q = b;

	if (p->ticks != q->ticks)
		return p->ticks < q->ticks ? 1 : -1;
	return p->pid < q->pid ? -1 : 1;
}

static void put_processes(struct json_out *out, const char *proc, unsigned max)
{
	static struct process all[SCAN_MAX];
	const int64_t hz = sysconf(_SC_CLK_TCK), page = sysconf(_SC_PAGESIZE);
	DIR *dir = opendir(proc);
	const struct dirent *entry;
	unsigned n = 0;

	while (dir && n < SCAN_MAX && (entry = readdir(dir)))
		if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' &&
			read_process(dirfd(dir), entry->d_name, &all[n]))
			n++;
	if (dir)
		closedir(dir);
	qsort(all, n, sizeof(all[0]), by_cpu_time);
	json_key(out, "process_list");
	json_open(out, '[');
	for (unsigned i = 0; i < MIN(n, max); i++) {
		json_open(out, '{');
		put_int(out, "pid", all[i].pid);
		put_int(out, "parent", all[i].parent);
		put_int(out, "uid", (int64_t)all[i].uid);
		json_key(out, "state");
		json_str(out, all[i].state);
		put_int(out, "cpu_ms", all[i].ticks * 1000 / hz);
		put_int(out, "resident_bytes", all[i].pages * page);
		json_key(out, "name");
		json_str(out, all[i].name);
		json_close(out, '}');
	}
	json_close(out, ']');
}

static void put_init(struct json_out *out, const char *proc)
{
	CLEANUP_FREE char *name = read_proc(proc, "1/comm");

	if (!name)
		return;
	name[strcspn(name, "\n")] = '\0';
	json_key(out, "init");
	json_str(out, name);
}

void facts_write(struct json_out *out, const char *proc, unsigned processes_max)
{
	struct utsname names;
	struct sysinfo info;
	struct statvfs root;
	int left = PORTS_MAX;

	json_open(out, '{');
	put_int(out, "clock_ns", nanoseconds(CLOCK_REALTIME));
	put_int(out, "uptime_ns", nanoseconds(CLOCK_BOOTTIME));
	if (uname(&names) == 0) {
		json_key(out, "hostname");
		json_str(out, names.nodename);
		json_key(out, "kernel");
		json_str(out, names.release);
	}
	put_init(out, proc);
	if (sysinfo(&info) == 0) {
		put_int(out, "processes", info.procs);
		// Thousandths: there are no fractions in this JSON.
		put_int(out, "load_1m_milli", (int64_t)info.loads[0] * 1000 >> SI_LOAD_SHIFT);
		put_int(out, "load_5m_milli", (int64_t)info.loads[1] * 1000 >> SI_LOAD_SHIFT);
		put_int(out, "load_15m_milli", (int64_t)info.loads[2] * 1000 >> SI_LOAD_SHIFT);
	}
	put_memory(out, proc);
	if (statvfs("/", &root) == 0) {
		put_int(out, "disk_total_bytes", (int64_t)(root.f_blocks * root.f_frsize));
		put_int(out, "disk_available_bytes", (int64_t)(root.f_bavail * root.f_frsize));
	}
	if (processes_max)
		put_processes(out, proc, processes_max);
	json_key(out, "listening");
	json_open(out, '[');
	put_listeners(out, proc, "net/tcp", &left);
	put_listeners(out, proc, "net/tcp6", &left);
	json_close(out, ']');
	json_close(out, '}');
}
