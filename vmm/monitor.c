// SPDX-License-Identifier: Apache-2.0
// The monitor process; see the header. Main thread, which becomes the loop thread.
#include "vmm/monitor.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/lock.h"
#include "vmm/base/log.h"
#include "vmm/base/parse.h"
#include "vmm/cgroup.h"
#include "vmm/control.h"
#include "vmm/jail.h"
#include "vmm/loop.h"
#include "vmm/vm.h"
#include "vmm/vm_stats.h"

#define EXIT_FAILED 125
#define EXIT_USAGE  2

// console.log is cut over to console.log.1 at this size: never more than twice as much on disk.
#define CONSOLE_LOG_BYTES (512 * KIB)

struct monitor {
	const char *dir;
	char real_dir[PATH_MAX]; // the same without links: who the machine is
	int status_fd; // -1 if nobody wants to know
	int console_fd; // a non-blocking copy of the console, or -1
	int dir_fd;
	int run_fd; // its run/, the working directory once all paths have been looked up
	int lock_fd;
	int log_fd, old_log_fd; // console.log and console.log.1
	uint64_t log_bytes;
	FILE *smaps; // /proc/self/smaps
	char smaps_buf[4096];
	int signal_fd;
	int signal_watch;
	bool tied; // as a throwaway machine's is
	struct config config;
	struct cgroup cgroup; // of a machine with limits
	struct vm *vm;
	const char *snapshot; // to go on from, or NULL
	enum vm_memory_way memory_way; // of that
	int status_watch; // until the machine is awake
	bool waking;
	uint64_t started_ns, loaded_ns,
		awake_ns; // CLOCK_MONOTONIC; awake: of one that was restored
	struct control *control;
	struct control_client *asking; // for a pause or a snapshot, which take their time
	struct control_client *settling; // has a snapshot to commit
};

// False if nobody hears it: there is no status fd, or whoever started us has let go of it.
static bool report(struct monitor *mon, json_t *event)
{
	char *text = event ? json_dumps(event, JSON_COMPACT) : NULL, *line = NULL;
	bool heard = false;

	if (text && mon->status_fd >= 0 && asprintf(&line, "%s\n", text) > 0)
		heard = fd_write_all(mon->status_fd, line, strlen(line)) == 0;
	free(line);
	free(text);
	json_decref(event);
	return heard;
}

static void report_error(struct monitor *mon, const struct err *err)
{
	json_t *message = json_string(err->msg);

	if (!message) {
		// Not UTF-8: a path may be anything, and a long message may be cut anywhere.
		char ascii[sizeof(err->msg)] = "";

		for (size_t i = 0; err->msg[i]; i++)
			ascii[i] = (char)(err->msg[i] & 0x80 ? '?' : err->msg[i]);
		message = json_string(ascii);
	}
	if (!report(mon, json_pack("{s:s, s:i, s:O}", "event", "error", "errno", -err->code,
				 "message", message)))
		log_line(LOG_ERROR, "monitor", "%s", err->msg);
	json_decref(message);
}

// --- Console ---------------------------------------------------------------------------------

static int open_log(struct monitor *mon, const char *name, int *ret_fd, struct err *err)
{
	*ret_fd = openat(
		mon->dir_fd, name, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
	return *ret_fd < 0 ? err_errno(err, -errno, "%s/%s", mon->dir, name) : 0;
}

static int open_logs(struct monitor *mon, struct err *err)
{
	int r = 0;

	if (renameat(mon->dir_fd, "console.log", mon->dir_fd, "console.log.1") < 0 &&
		errno != ENOENT)
		return err_errno(err, -errno, "%s/console.log", mon->dir);
	r = open_log(mon, "console.log", &mon->log_fd, err);
	return r < 0 ? r : open_log(mon, "console.log.1", &mon->old_log_fd, err);
}

// By copying: a monitor in its jail names no files. Who follows the log finds what is cut off in
// the other file, whole, as soon as this one is shorter than it was.
static void log_rotate(struct monitor *mon)
{
	uint8_t buf[16384];
	ssize_t n;

	mon->log_bytes = 0;
	if (ftruncate(mon->old_log_fd, 0) == 0)
		for (off_t at = 0; (n = pread(mon->log_fd, buf, sizeof(buf), at)) > 0; at += n)
			if (fd_write_all(mon->old_log_fd, buf, (size_t)n) < 0)
				break; // a full disk costs the log, not the machine
	(void)!ftruncate(mon->log_fd, 0);
}

static void on_console(void *opaque, const uint8_t *data, size_t len)
{
	struct monitor *mon = opaque;

	if (mon->console_fd >= 0) {
		// Whoever watches and does not keep up loses output, never stalls the machine.
		ssize_t ignored = write(mon->console_fd, data, len);

		(void)ignored;
	}
	if (mon->log_bytes + len > CONSOLE_LOG_BYTES)
		log_rotate(mon);
	if (fd_write_all(mon->log_fd, data, len) < 0) {
		// A full disk costs the log, not the machine.
		log_guest("monitor", "console.log: cannot write, what the guest prints is lost");
		return;
	}
	mon->log_bytes += len;
}

// --- Life ------------------------------------------------------------------------------------

static void on_signal(void *opaque, uint32_t revents)
{
	struct monitor *mon = opaque;
	struct signalfd_siginfo info;

	(void)revents;
	while (read(mon->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGUSR1)
			vm_log_where(mon->vm);
		else
			vm_stop(mon->vm);
	}
}

// A vCPU thread: one short line, which a pipe takes whole.
static void on_where_told(void *opaque)
{
	report(opaque, json_pack("{s:s}", "event", "where"));
}

// Any thread, while others may wait for what will not come.
_Noreturn static void on_fatal(void *opaque, const struct err *err)
{
	report_error(opaque, err);
	_exit(EXIT_FAILED);
}

static int bus_error_fd = -1;

// The kernel's file is mapped into the guest; if somebody cuts it short the guest cannot go on.
static void on_bus_error(int sig)
{
#define BUS_ERROR \
	"bus error: a file that the machine runs from (its kernel or snapshot) was changed"
	// EBADMSG, as of any other file that is not what it was.
	static const char report_line[] =
		"{\"event\":\"error\",\"errno\":74,\"message\":\"" BUS_ERROR "\"}\n";

	_Static_assert(EBADMSG == 74, "the number above");
	static const char log[] = "mayfly: error: monitor: " BUS_ERROR "\n";

	(void)sig;
	// Whoever started us may have let go: then the log has it.
	if (bus_error_fd < 0 || write(bus_error_fd, report_line, sizeof(report_line) - 1) < 0) {
		ssize_t ignored = write(STDERR_FILENO, log, sizeof(log) - 1);

		(void)ignored;
	}
	_exit(EXIT_FAILED);
}

// Resident memory of this process that is not the guest's RAM, in KiB; 0 if it cannot be told.
static uint64_t rss_without_guest_kib(const struct monitor *mon)
{
	char line[512];
	uint64_t total = 0;
	bool guest = false;

	if (!mon->smaps)
		return 0;
	rewind(mon->smaps);
	while (fgets(line, sizeof(line), mon->smaps)) {
		unsigned long long from, to, kib;

		if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
			guest = vm_is_guest_ram(mon->vm, (const void *)(uintptr_t)from);
		else if (!guest && sscanf(line, "Rss: %llu kB", &kib) == 1)
			total += kib;
	}
	return total;
}

// --- Control ---------------------------------------------------------------------------------

static void on_paused(void *opaque)
{
	struct monitor *mon = opaque;

	if (mon->asking)
		control_reply(TAKE_PTR(mon->asking), NULL);
}

static json_t *live_json(const struct vm_snapshot_result *result)
{
	json_t *rounds = json_array();

	for (unsigned int i = 0; i < result->nr_rounds; i++)
		json_array_append_new(rounds,
			json_pack("{s:I, s:I}", "bytes", (json_int_t)result->rounds[i].bytes, "ns",
				(json_int_t)result->rounds[i].ns));
	return json_pack("{s:o, s:I, s:I, s:b}", "rounds", rounds, "last_bytes",
		(json_int_t)result->last_bytes, "begin_ns", (json_int_t)result->begin_ns, "forked",
		result->forked);
}

static void on_snapshot(
	void *opaque, int r, const struct vm_snapshot_result *result, const struct err *err)
{
	struct monitor *mon = opaque;
	char parent[SNAPSHOT_ID_TEXT_LEN + 1] = "";
	json_t *reply;

	if (!mon->asking) {
		// Whoever wanted it is gone.
		if (r == 0)
			vm_snapshot_settle(mon->vm, false);
		return;
	}
	if (r < 0) {
		control_fail(TAKE_PTR(mon->asking), err);
		return;
	}
	if (!snapshot_id_none(&result->parent))
		snapshot_id_text(&result->parent, parent);
	mon->settling = mon->asking;
	reply = json_pack("{s:s, s:I, s:I, s:I, s:I}", "parent", parent, "blackout_ns",
		(json_int_t)result->blackout_ns, "held_pages", (json_int_t)result->held_pages,
		"written_bytes", (json_int_t)result->written_bytes, "state_bytes",
		(json_int_t)result->state_bytes);
	if (result->nr_rounds > 0)
		json_object_set_new(reply, "live", live_json(result));
	control_reply(TAKE_PTR(mon->asking), reply);
}

// {"id": 32 hexadecimal digits, "diff", "track", "unsynced", "compress", "live", "hold": bools,
// "downtime_ns"}, along with the files "state" and "memory", opened: the monitor may open none
// itself.
static int call_snapshot(struct monitor *mon, struct control_client *client, const json_t *params,
	int state_fd, struct err *err)
{
	struct vm_snapshot_request request = {
		.state_fd = state_fd,
		.memory_fd = control_take_fd(client),
		.diff = json_is_true(json_object_get(params, "diff")),
		.track = json_is_true(json_object_get(params, "track")),
		.unsynced = json_is_true(json_object_get(params, "unsynced")),
		.compress = json_is_true(json_object_get(params, "compress")),
		.live = json_is_true(json_object_get(params, "live")),
		.hold = json_is_true(json_object_get(params, "hold")),
		.downtime_ns = (uint64_t)MAX(
			json_integer_value(json_object_get(params, "downtime_ns")), 0),
		.done = on_snapshot,
		.opaque = mon,
	};
	const char *id = json_string_value(json_object_get(params, "id"));
	int r = 0;

	if (request.memory_fd < 0 || !id || snapshot_id_parse(id, &request.id) < 0 ||
		snapshot_id_none(&request.id))
		r = err_set(err, -EINVAL, "a snapshot needs an id and two files");
	else if (request.live && (request.diff || request.compress || !request.unsynced))
		r = err_set(err, -EINVAL,
			"one that is taken live stands alone, and is compressed and synced later");
	else if (mon->asking || mon->settling)
		r = err_set(err, -EBUSY, "another snapshot of this machine is being taken");
	if (r < 0) {
		fd_close(&request.state_fd);
		fd_close(&request.memory_fd);
		return r;
	}
	// Before, since it may come to its end at once.
	mon->asking = client;
	r = vm_snapshot(mon->vm, &request, err);
	if (r < 0)
		mon->asking = NULL;
	return r;
}

static int call_pause(struct monitor *mon, struct control_client *client, struct err *err)
{
	int r;

	if (mon->asking)
		return err_set(err, -EBUSY, "the machine is being paused for somebody else");
	mon->asking = client;
	r = vm_pause(mon->vm, on_paused, mon, err);
	if (r < 0)
		mon->asking = NULL;
	return r;
}

static int call_settle(
	struct monitor *mon, struct control_client *client, bool committed, struct err *err)
{
	if (mon->settling != client)
		return err_set(err, -EINVAL, "no snapshot of yours waits for that");
	mon->settling = NULL;
	vm_snapshot_settle(mon->vm, committed);
	control_reply(client, NULL);
	return 0;
}

static int call_awake(struct monitor *mon, struct control_client *client, struct err *err)
{
	int r = vm_awake(mon->vm, err);

	if (r < 0)
		return r;
	mon->waking = false;
	mon->awake_ns = now_ns();
	loop_watch_del(vm_loop(mon->vm), &mon->status_watch);
	control_reply(client, NULL);
	return 0;
}

static json_t *status(struct monitor *mon)
{
	char id[SNAPSHOT_ID_TEXT_LEN + 1] = "";
	struct rusage usage = {0};
	struct vm_stats stats;

	vm_stats(mon->vm, &stats);
	getrusage(RUSAGE_SELF, &usage);
	vm_changes_since(mon->vm, id);
	return json_pack("{s:s, s:i, s:s, s:{s:I, s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I}, s:I}",
		"state",
		mon->waking             ? "waking"
		: vm_is_paused(mon->vm) ? "paused"
					: "running",
		"pid", (int)getpid(), "changes_since", id, "times", "started_ns",
		(json_int_t)mon->started_ns, "loaded_ns", (json_int_t)mon->loaded_ns,
		"first_run_ns", (json_int_t)stats.first_run_ns, "awake_ns",
		(json_int_t)mon->awake_ns, "faults", "minor", (json_int_t)usage.ru_minflt, "major",
		(json_int_t)usage.ru_majflt, "lazy", (json_int_t)stats.lazy_faults, "prefetched",
		(json_int_t)stats.prefetched, "monitor_rss_kib",
		(json_int_t)rss_without_guest_kib(mon));
}

static json_t *stats(struct monitor *mon)
{
	json_t *all = vm_stats_json(mon->vm);
	json_t *limits = cgroup_stats(&mon->cgroup, &mon->config.limits);

	if (limits)
		json_object_set_new(all, "limits", limits);
	return all;
}

static int on_call(void *opaque, struct control_client *client, const char *method,
	const json_t *params, int fd, struct err *err)
{
	struct monitor *mon = opaque;
	int r;

	if (!strcmp(method, "snapshot"))
		return call_snapshot(mon, client, params, fd, err);
	fd_close(&fd);
	if (!strcmp(method, "commit"))
		return call_settle(mon, client, true, err);
	if (!strcmp(method, "abort"))
		return call_settle(mon, client, false, err);
	if (!strcmp(method, "pause"))
		return call_pause(mon, client, err);
	if (!strcmp(method, "awake"))
		return call_awake(mon, client, err);
	if (!strcmp(method, "resume")) {
		r = vm_resume(mon->vm, err);
	} else if (!strcmp(method, "balloon")) {
		json_t *bytes = json_object_get(params, "bytes");

		r = json_is_integer(bytes)
			    ? vm_set_balloon(mon->vm, json_integer_value(bytes), err)
			    : err_set(err, -EINVAL, "a balloon needs bytes, a number");
	} else if (!strcmp(method, "stats")) {
		control_reply(client, stats(mon));
		return 0;
	} else if (!strcmp(method, "status")) {
		control_reply(client, status(mon));
		return 0;
	} else {
		r = CONTROL_NO_METHOD;
	}
	if (r == 0)
		control_reply(client, NULL);
	return r;
}

static void on_client_gone(void *opaque, struct control_client *client)
{
	struct monitor *mon = opaque;

	if (mon->asking == client)
		mon->asking = NULL;
	if (mon->settling == client) {
		mon->settling = NULL;
		vm_snapshot_settle(mon->vm, false);
	}
}

// Whoever restored the machine is gone before it was made itself: nobody may have it as it is.
static void on_status_end(void *opaque, uint32_t revents)
{
	struct monitor *mon = opaque;

	(void)revents;
	loop_watch_del(vm_loop(mon->vm), &mon->status_watch);
	log_line(LOG_ERROR, "monitor", "not woken after its restore: it ends");
	vm_stop(mon->vm);
}

static int setup_control(struct monitor *mon, struct err *err)
{
	const struct control_config config = {
		.loop = vm_loop(mon->vm),
		.dir = ".",
		.call = on_call,
		.gone = on_client_gone,
		.opaque = mon,
	};
	int r;

	// The lock is ours, so whatever is there is nobody's; a monitor that is just ending may
	// have let go of the lock, and not of its socket.
	unlinkat(mon->run_fd, CONTROL_SOCKET, 0);
	r = control_create(&mon->control, &config, err);
	if (r < 0 || !mon->snapshot)
		return r;
	mon->waking = true;
	if (mon->status_fd < 0)
		return 0;
	r = loop_watch_add(vm_loop(mon->vm), mon->status_fd, POLLERR, on_status_end, mon, err);
	if (r < 0)
		return r;
	mon->status_watch = r;
	return 0;
}

static int take_signals(struct monitor *mon, struct err *err)
{
	struct sigaction bus = {.sa_handler = on_bus_error};
	sigset_t set;

	bus_error_fd = mon->status_fd;
	sigaction(SIGBUS, &bus, NULL);

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	// A line to a terminal that stops its background jobs for that is not worth a machine.
	signal(SIGTTOU, SIG_IGN);
	mon->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (mon->signal_fd < 0)
		return err_errno(err, -errno, "signalfd");
	return 0;
}

// Opens the folder and takes its lock, which says for as long as it is held that the VM lives.
static int open_dir(struct monitor *mon, struct err *err)
{
	mon->dir_fd = open(mon->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (mon->dir_fd < 0)
		return err_errno(err, -errno, "%s", mon->dir);
	if (mkdirat(mon->dir_fd, "run", 0700) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s/run", mon->dir);
	mon->run_fd = openat(mon->dir_fd, "run", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (mon->run_fd < 0)
		return err_errno(err, -errno, "%s/run", mon->dir);
	mon->lock_fd = lock_take(mon->run_fd, "lock", err);
	if (mon->lock_fd == -EBUSY)
		return err_set(err, -EBUSY, "%s: this machine is running already", mon->dir);
	if (mon->lock_fd < 0)
		return err_wrap(err, mon->lock_fd, "%s/run", mon->dir);
	return open_logs(mon, err);
}

// Each vsock connection takes a descriptor: as many as the hard limit allows.
static void raise_fd_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

// Whether nobody has the other end of a pipe that we write to.
static bool reader_gone(int fd)
{
	struct pollfd pipe = {.fd = fd};

	return fd >= 0 && poll(&pipe, 1, 0) > 0 && (pipe.revents & POLLERR);
}

// All that it needs is open, and it is one thread still.
static int confine(void *opaque, struct err *err)
{
	struct monitor *mon = opaque;
	struct jail_params params = {
		.dir_fd = mon->dir_fd,
		.run_fd = mon->run_fd,
		.status_fd = mon->status_fd,
	};
	int r;

	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		if (config_has_disk(&mon->config.disks[i]) &&
			mon->config.disks[i].mode == CONFIG_DISK_OVERLAY)
			params.writable = true;
	r = jail_enter(&params, err);
	if (r > 0)
		log_line(LOG_INFO, "jail",
			"pieces that this host lacks: 0x%x (mayfly doctor names them)",
			(unsigned)r);
	// It is taken away from a process that changes its rights.
	if (mon->tied)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (r >= 0 && mon->tied && reader_gone(mon->status_fd))
		return err_set(err, -EPIPE, "whoever started this machine is gone");
	return r < 0 ? r : 0;
}

static int limit(struct monitor *mon, struct err *err)
{
	const struct config_limits *limits = &mon->config.limits;
	// Its tables, and the monitor itself.
	const uint64_t least = mon->config.memory_bytes + mon->config.memory_bytes / 128 + 32 * MIB;
	char base[PATH_MAX];
	int r;

	if (!cgroup_wanted(limits))
		return 0;
	if (limits->memory_bytes && limits->memory_bytes < least)
		return err_set(err, -ERANGE,
			"%s/vm.ini: [limits] memory = %lluM is too little for a machine of %lluM: "
			"at least %lluM",
			mon->dir, (unsigned long long)(limits->memory_bytes / MIB),
			(unsigned long long)(mon->config.memory_bytes / MIB),
			(unsigned long long)((least + MIB - 1) / MIB));
	r = cgroup_base(base, err);
	return r < 0 ? r
		     : cgroup_enter(
			       &mon->cgroup, base, strrchr(mon->real_dir, '/') + 1, limits, err);
}

static int setup(struct monitor *mon, struct err *err)
{
	char ini[PATH_MAX];
	struct vm_params params = {
		.config = &mon->config,
		.dir = mon->real_dir,
		.snapshot = mon->snapshot,
		.throwaway = mon->tied,
		.confine = confine,
		.confine_thread = jail_thread,
		.console = on_console,
		.memory_way = mon->memory_way,
		.where_told = on_where_told,
		.fatal = on_fatal,
		.opaque = mon,
	};
	int r;

	raise_fd_limit();
	// Its seed comes from a file that is not in the jail; and the first who makes an object may
	// be any thread, with bad news.
	json_object_seed(0);
	if (snprintf(ini, sizeof(ini), "%s/vm.ini", mon->dir) >= (int)sizeof(ini))
		return err_errno(err, -ENAMETOOLONG, "%s", mon->dir);
	r = open_dir(mon, err);
	params.dir_fd = mon->dir_fd;
	if (r == 0 && !realpath(mon->dir, mon->real_dir))
		r = err_errno(err, -errno, "%s", mon->dir);
	if (r == 0)
		r = config_read(ini, &mon->config, err);
	if (r == 0 && !mon->config.kernel[0] && !mon->snapshot)
		r = err_set(err, -EINVAL, "%s: no kernel is named in [machine]", ini);
	if (r == 0)
		r = limit(mon, err);
	// Sockets are named relative to it: their addresses hold few bytes.
	if (r == 0 && fchdir(mon->run_fd) < 0)
		r = err_errno(err, -errno, "%s/run", mon->dir);
	mon->smaps = fopen("/proc/self/smaps", "re");
	if (mon->smaps) // or stdio would ask for its block size
		setvbuf(mon->smaps, mon->smaps_buf, _IOFBF, sizeof(mon->smaps_buf));
	if (r == 0)
		r = take_signals(mon, err);
	if (r == 0)
		r = vm_create(&mon->vm, &params, err);
	if (r == 0) {
		r = loop_watch_add(vm_loop(mon->vm), mon->signal_fd, POLLIN, on_signal, mon, err);
		mon->signal_watch = r;
	}
	if (r >= 0)
		r = setup_control(mon, err);
	return r < 0 ? r : 0;
}

static json_t *ended_event(struct monitor *mon, enum vm_end_reason how)
{
	struct vm_stats stats;
	json_t *exits = json_object();

	vm_stats(mon->vm, &stats);
	for (int kind = 0; kind < VCPU_EXIT_KINDS; kind++)
		json_object_set_new(
			exits, vcpu_exit_names[kind], json_integer((json_int_t)stats.exits[kind]));
	return json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:o}", "event", "ended",
		"reason", how == VM_END_RESET ? "reset" : "stopped", "host",
		stats.emulated_ring0 ? "emulated ring 0" : "hardware", "first_run_ns",
		(json_int_t)stats.first_run_ns, "start_cpu_ns", (json_int_t)stats.first_run_cpu_ns,
		"monitor_rss_kib", (json_int_t)rss_without_guest_kib(mon), "console_bytes",
		(json_int_t)stats.console_bytes, "unclaimed", (json_int_t)stats.unclaimed, "exits",
		exits);
}

static void teardown(struct monitor *mon)
{
	control_destroy(mon->control);
	vm_destroy(mon->vm);
	cgroup_fini(&mon->cgroup);
	fd_close(&mon->signal_fd);
	fd_close(&mon->log_fd);
	fd_close(&mon->old_log_fd);
	if (mon->smaps)
		fclose(mon->smaps);
	fd_close(&mon->lock_fd);
	fd_close(&mon->run_fd);
	fd_close(&mon->dir_fd);
}

static int usage(FILE *out, int status)
{
	fputs("Usage: mayfly vmm [--snapshot DIR [--memory-restore WAY]] [--status-fd N] "
	      "[--console-fd N] [--tied] [-v] "
	      "DIR\n"
	      "\n"
	      "Runs the machine whose vm.ini is in DIR in the foreground, until it ends. The "
	      "other\n"
	      "verbs start it for you.\n"
	      "\n"
	      "  --snapshot DIR  go on from this snapshot instead of booting; the machine's vsock "
	      "is\n"
	      "                  called waking.sock until its control socket is told 'awake'\n"
	      "  --memory-restore auto|mapped|lazy|eager\n"
	      "                  how its memory is read (default auto: mapped, or, if it is "
	      "compressed,\n"
	      "                  lazily through userfaultfd, or, where that is not allowed, at "
	      "once)\n"
	      "  --status-fd N   report on this file descriptor, as JSON, an object a line\n"
	      "  --console-fd N  copy what the guest prints to this one (made non-blocking)\n"
	      "  --tied          die with the process that started it\n"
	      "  -v, --verbose   log more; twice for debugging\n"
	      "\n"
	      "Signals: TERM, INT, HUP end the machine; USR1 logs where its vCPUs are.\n",
		out);
	return status;
}

static int parse_fd(const char *name, const char *text, int *ret_fd)
{
	struct err err;
	uint64_t fd;

	if (parse_uint(text, 0, 1 << 20, &fd, &err) < 0 || fcntl((int)fd, F_GETFD) < 0) {
		fprintf(stderr, "mayfly vmm: %s: '%s' is not an open file descriptor\n", name,
			text);
		return -EINVAL;
	}
	*ret_fd = (int)fd;
	fcntl(*ret_fd, F_SETFD, FD_CLOEXEC);
	return 0;
}

int monitor_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"snapshot", required_argument, NULL, 'S'},
		{"memory-restore", required_argument, NULL, 'm'},
		{"status-fd", required_argument, NULL, 's'},
		{"console-fd", required_argument, NULL, 'c'},
		{"tied", no_argument, NULL, 't'},
		{"verbose", no_argument, NULL, 'v'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct monitor mon = {
		.started_ns = now_ns(),
		.status_fd = -1,
		.console_fd = -1,
		.dir_fd = -1,
		.run_fd = -1,
		.lock_fd = -1,
		.log_fd = -1,
		.old_log_fd = -1,
		.signal_fd = -1,
		.signal_watch = -1,
		.status_watch = -1,
		.cgroup = CGROUP_INIT,
	};
	enum vm_end_reason how = VM_END_ERROR;
	struct err err = {0};
	int opt, r, verbose = 0;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "+vh", options, NULL)) != -1) {
		switch (opt) {
		case 'S':
			mon.snapshot = optarg;
			break;
		case 'm':
			if (vm_memory_way_parse(optarg, &mon.memory_way, &err) == 0)
				break;
			fprintf(stderr, "mayfly vmm: %s\n", err.msg);
			return EXIT_USAGE;
		case 's':
			if (parse_fd("--status-fd", optarg, &mon.status_fd) < 0)
				return EXIT_USAGE;
			break;
		case 'c':
			if (parse_fd("--console-fd", optarg, &mon.console_fd) < 0)
				return EXIT_USAGE;
			fcntl(mon.console_fd, F_SETFL, fcntl(mon.console_fd, F_GETFL) | O_NONBLOCK);
			break;
		case 't':
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			mon.tied = true;
			break;
		case 'v':
			verbose++;
			break;
		case 'h':
			return usage(stdout, 0);
		default:
			return usage(stderr, EXIT_USAGE);
		}
	}
	if (argc - optind != 1)
		return usage(stderr, EXIT_USAGE);
	if (mon.tied && reader_gone(mon.status_fd))
		return EXIT_FAILED; // it died before we were tied to it
	mon.dir = argv[optind];
	if (verbose)
		log_set_level(verbose > 1 ? LOG_DEBUG : LOG_INFO);
	log_set_vm(strrchr(mon.dir, '/') ? strrchr(mon.dir, '/') + 1 : mon.dir);
	prctl(PR_SET_NAME, "mayfly-vmm");

	r = setup(&mon, &err);
	mon.loaded_ns = now_ns();
	if (r == 0) {
		report(&mon, json_pack("{s:s, s:i}", "event", "running", "pid", (int)getpid()));
		r = vm_run(mon.vm, &how, &err);
	}
	if (r < 0)
		report_error(&mon, &err);
	else
		report(&mon, ended_event(&mon, how));
	teardown(&mon);
	return r < 0 ? EXIT_FAILED : 0;
}
