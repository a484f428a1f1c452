// SPDX-License-Identifier: Apache-2.0
/*
 * PID 1 of the lab machine (L1). It loads the modules of its initramfs, then starts one server
 * process a virtio-serial port ("slot"); each server runs one command at a time for the host.
 * Single-threaded processes only. When a port's host side goes away, the machine reboots, which
 * QEMU (-no-reboot) turns into its own end: no controller, no machine.
 *
 * A command ("job") gets PID and mount namespaces of its own: the host's files, mounted afresh (so
 * that it sees what was built a moment ago), under an overlay that vanishes with it. When the
 * command ends or is killed, the PID namespace takes everything it started along.
 *
 * Frames on the port, both ways: type (1 byte), length (4 bytes, little-endian), payload.
 *   host to L1   R  run: NUL-terminated strings "ARGC", CWD, ARGV..., ENV...
 *                K  kill the running job (ignored when there is none)
 *   L1 to host   h  hello: the server is ready
 *                o  output of the command   e  its error output
 *                x  it exited: code (1 byte)   s  a signal ended it: number (1 byte)
 *                f  the lab could not run it: text
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	SLOTS_MAX = 16,
	RUN_MAX_BYTES = 1 << 20,
	STRINGS_MAX = 16384,
	OUT_CHUNK_BYTES = 32 * 1024, // what the port driver takes at once
	HEADER_BYTES = 5,
	STATUS_TEXT_BYTES = 200,
	PORT_WAIT_MS = 20000,
};

static char run_buf[RUN_MAX_BYTES + 1];
static char *strings[STRINGS_MAX + 2];

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *fmt, ...)
{
	va_list ap;

	// The console is the host's last resort for telling why there is no machine.
	va_start(ap, fmt);
	fprintf(stderr, "lab init: ");
	vfprintf(stderr, fmt, ap);
	fprintf(stderr, ": %s\n", strerror(errno));
	va_end(ap);
	if (getpid() == 1) {
		sync();
		reboot(RB_AUTOBOOT);
	}
	_exit(1);
}

static void mount_or_die(const char *source, const char *target, const char *type,
	unsigned long flags, const char *data)
{
	mkdir(target, 0755);
	if (mount(source, target, type, flags, data))
		die("mount %s on %s", type, target);
}

// --- Start-up (PID 1) ---------------------------------------------------------------------------

static void load_module(const char *path, const char *params)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		die("open %s", path);
	if (syscall(SYS_finit_module, fd, params, 0) && errno != EEXIST)
		die("load %s", path);
	close(fd);
}

// /modules holds a line a module, in order of need: "FILE[ PARAMETERS]".
static void load_modules(void)
{
	FILE *f = fopen("/modules", "re");
	char line[256];

	if (!f)
		die("open /modules");
	while (fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		char *params = strchr(line, ' ');
		if (params)
			*params++ = 0;
		load_module(line, params ? params : "");
	}
	fclose(f);
}

static void loopback_up(void)
{
	struct ifreq ifr = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &ifr))
		die("bring lo up");
	close(fd);
}

// Opens the port that QEMU calls NAME; -1 with errno ENOENT while the driver has not found it yet.
static int open_port(const char *name)
{
	DIR *dir = opendir("/sys/class/virtio-ports");
	struct dirent *de;
	int fd = -1;

	while (dir && fd < 0 && (de = readdir(dir))) {
		char path[300], text[64] = "";
		FILE *f;

		snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", de->d_name);
		f = fopen(path, "re");
		if (!f)
			continue;
		if (fgets(text, sizeof(text), f) && !strcmp(strtok(text, "\n"), name)) {
			snprintf(path, sizeof(path), "/dev/%s", de->d_name);
			fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
		}
		fclose(f);
	}
	if (dir)
		closedir(dir);
	return fd;
}

// The driver learns names and the host's presence by messages of which it tells nobody: ask again.
static int wait_port(int slot)
{
	const struct timespec pause = {.tv_nsec = 5000000};
	char name[16];
	int fd = -1;

	snprintf(name, sizeof(name), "lab.%d", slot);
	for (int waited_ms = 0; waited_ms < PORT_WAIT_MS; waited_ms += 5) {
		struct pollfd p = {.events = POLLIN};

		if (fd < 0)
			fd = open_port(name);
		p.fd = fd;
		if (fd >= 0 && poll(&p, 1, 0) >= 0 && !(p.revents & POLLHUP))
			return fd;
		nanosleep(&pause, NULL);
	}
	errno = ETIMEDOUT;
	die("virtio-serial port %s", name);
}

// --- Frames (a slot's server) -------------------------------------------------------------------

// A port without its host side: leave, so that PID 1 ends the machine.
static void wait_for(int fd, short events)
{
	struct pollfd p = {.fd = fd, .events = events};

	if (poll(&p, 1, -1) < 0 && errno != EINTR)
		_exit(1);
	if (p.revents & POLLHUP)
		_exit(0);
}

static void port_read(int port, void *buf, size_t len)
{
	for (char *at = buf; len;) {
		ssize_t n = read(port, at, len);

		if (n > 0) {
			at += n;
			len -= (size_t)n;
		} else if (n == 0) {
			_exit(0);
		} else if (errno == EAGAIN || errno == EINTR) {
			wait_for(port, POLLIN);
		} else {
			_exit(1);
		}
	}
}

static void port_write(int port, const char *at, size_t len)
{
	while (len) {
		ssize_t n = write(port, at, len);

		if (n > 0) {
			at += n;
			len -= (size_t)n;
		} else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
			wait_for(port, POLLOUT);
		} else {
			_exit(1);
		}
	}
}

// BUF holds HEADER_BYTES of room, then the payload: one write, one buffer on the ring.
static void send_frame(int port, char type, char *buf, size_t payload_bytes)
{
	buf[0] = type;
	for (int i = 0; i < 4; i++)
		buf[1 + i] = (char)(payload_bytes >> (8 * i) & 0xff);
	port_write(port, buf, HEADER_BYTES + payload_bytes);
}

// Reads a frame into run_buf and returns its type; the payload gets a NUL behind it.
static char read_frame(int port, size_t *ret_payload_bytes)
{
	uint8_t header[HEADER_BYTES];
	size_t len = 0;

	port_read(port, header, sizeof(header));
	for (int i = 0; i < 4; i++)
		len |= (size_t)header[1 + i] << (8 * i);
	if (len > RUN_MAX_BYTES)
		_exit(1); // the host checks the bound: this is not our host
	port_read(port, run_buf, len);
	run_buf[len] = 0;
	*ret_payload_bytes = len;
	return (char)header[0];
}

// --- A job --------------------------------------------------------------------------------------

struct job {
	char *cwd;
	char **argv; // both NULL-terminated, within strings[]
	char **env;
};

static bool parse_job(size_t len, struct job *ret)
{
	size_t n = 0, argc;
	char *end;

	for (char *at = run_buf; at < run_buf + len; at += strlen(at) + 1) {
		if (n == STRINGS_MAX)
			return false;
		strings[n++] = at;
	}
	if (n < 3)
		return false;
	argc = strtoul(strings[0], &end, 10);
	if (*end || argc < 1 || argc > n - 2)
		return false;
	// Make room for argv's NULL.
	memmove(&strings[2 + argc + 1], &strings[2 + argc], (n - 2 - argc) * sizeof(*strings));
	strings[2 + argc] = NULL;
	strings[n + 1] = NULL;
	*ret = (struct job){.cwd = strings[1], .argv = &strings[2], .env = &strings[2 + argc + 1]};
	return true;
}

__attribute__((format(printf, 2, 3), noreturn)) static void job_failed(
	int status_fd, const char *fmt, ...)
{
	char text[STATUS_TEXT_BYTES] = "f";
	int error = errno, n;
	va_list ap;

	va_start(ap, fmt);
	n = 1 + vsnprintf(text + 1, sizeof(text) - 1, fmt, ap);
	va_end(ap);
	if (n < (int)sizeof(text))
		snprintf(text + n, sizeof(text) - (size_t)n, ": %s", strerror(error));
	if (write(status_fd, text, strlen(text)) < 0)
		_exit(1);
	_exit(0);
}

static void job_mount(int status_fd, const char *source, const char *target, const char *type,
	unsigned long flags, const char *data)
{
	mkdir(target, 0755);
	if (mount(source, target, type, flags, data))
		job_failed(status_fd, "L1: mount %s on %s", type ? type : source, target);
}

// Makes the host's files, with the kernel's own file systems over them, this process's root.
static void job_root(int slot, int status_fd)
{
	const unsigned long plain = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	char tag[16];

	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		job_failed(status_fd, "L1: make mounts private");
	snprintf(tag, sizeof(tag), "root%d", slot);
	job_mount(status_fd, tag, "/host", "9p", MS_RDONLY,
		"trans=virtio,version=9p2000.L,cache=loose,msize=524288");
	job_mount(status_fd, "layer", "/layer", "tmpfs", 0, "mode=755");
	if (mkdir("/layer/upper", 0755) || mkdir("/layer/work", 0755))
		job_failed(status_fd, "L1: overlay directories");
	job_mount(status_fd, "root", "/root", "overlay", 0,
		"lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work");
	job_mount(status_fd, "proc", "/root/proc", "proc", plain, NULL);
	job_mount(status_fd, "sysfs", "/root/sys", "sysfs", plain, NULL);
	job_mount(status_fd, "debugfs", "/root/sys/kernel/debug", "debugfs", plain, NULL);
	job_mount(status_fd, "cgroup2", "/root/sys/fs/cgroup", "cgroup2", plain, NULL);
	job_mount(status_fd, "devtmpfs", "/root/dev", "devtmpfs", MS_NOSUID, NULL);
	job_mount(status_fd, "devpts", "/root/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
		"mode=620,ptmxmode=666");
	job_mount(status_fd, "shm", "/root/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
	job_mount(status_fd, "run", "/root/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755");
	job_mount(status_fd, "/lab", "/root/lab", NULL, MS_BIND, NULL);
	if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
		job_failed(status_fd, "L1: change root");
}

// The command's own process.
__attribute__((noreturn)) static void job_exec(const struct job *job)
{
	int code = 126;

	setsid();
	if (chdir(job->cwd)) {
		fprintf(stderr, "lab: cannot enter %s in L1: %s\n", job->cwd, strerror(errno));
		_exit(code);
	}
	clearenv();
	for (char **e = job->env; *e; e++)
		putenv(*e);
	execvp(job->argv[0], job->argv);
	if (errno == ENOENT)
		code = 127;
	fprintf(stderr, "lab: cannot run %s in L1: %s\n", job->argv[0], strerror(errno));
	_exit(code);
}

// PID 1 of the job's namespace. Ends when the command does; the kernel then ends all the others.
__attribute__((noreturn)) static void job_init(int slot, const struct job *job, int status_fd)
{
	char status[2];
	pid_t pid, got;
	int wstatus;

	job_root(slot, status_fd);
	pid = fork();
	if (pid < 0)
		job_failed(status_fd, "L1: fork");
	if (pid == 0)
		job_exec(job);
	do
		got = waitpid(-1, &wstatus, 0);
	while (got != pid && (got >= 0 || errno == EINTR));
	if (got != pid)
		job_failed(status_fd, "L1: wait for the command");
	status[0] = WIFEXITED(wstatus) ? 'x' : 's';
	status[1] = (char)(WIFEXITED(wstatus) ? WEXITSTATUS(wstatus) : WTERMSIG(wstatus));
	if (write(status_fd, status, sizeof(status)) < 0)
		_exit(1);
	_exit(0);
}

// Passes on what FD has; false at its end.
static bool forward(int port, char type, int fd)
{
	static char buf[OUT_CHUNK_BYTES];
	ssize_t n = read(fd, buf + HEADER_BYTES, sizeof(buf) - HEADER_BYTES);

	if (n < 0)
		return errno == EINTR;
	if (n > 0)
		send_frame(port, type, buf, (size_t)n);
	return n > 0;
}

static void report(int port, const char *status, size_t len)
{
	char buf[HEADER_BYTES + STATUS_TEXT_BYTES];

	memcpy(buf + HEADER_BYTES, status + 1, len - 1);
	send_frame(port, status[0], buf, len - 1);
}

static void fail(int port, const char *why)
{
	char text[STATUS_TEXT_BYTES];

	report(port, text, (size_t)snprintf(text, sizeof(text), "f%s", why));
}

static void run_job(int port, int slot, const struct job *job)
{
	int out[2], err[2], status[2], null;
	char text[STATUS_TEXT_BYTES];
	ssize_t n;
	pid_t pid;

	if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || pipe2(status, O_CLOEXEC))
		die("pipe");
	pid = (pid_t)syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0);
	if (pid < 0)
		die("clone");
	if (pid == 0) {
		null = open("/dev/null", O_RDONLY);
		if (dup2(null, 0) < 0 || dup2(out[1], 1) < 0 || dup2(err[1], 2) < 0)
			job_failed(status[1], "L1: dup2");
		close(null);
		job_init(slot, job, status[1]);
	}
	close(out[1]);
	close(err[1]);
	close(status[1]);

	struct pollfd p[] = {{.fd = port, .events = POLLIN}, {.fd = out[0], .events = POLLIN},
		{.fd = err[0], .events = POLLIN}};
	while (p[1].fd >= 0 || p[2].fd >= 0) {
		size_t len;

		if (poll(p, 3, -1) < 0)
			continue;
		if (p[0].revents & POLLHUP)
			_exit(0);
		if (p[0].revents & POLLIN && read_frame(port, &len) == 'K')
			kill(pid, SIGKILL);
		if (p[1].revents && !forward(port, 'o', out[0]))
			p[1].fd = -1;
		if (p[2].revents && !forward(port, 'e', err[0]))
			p[2].fd = -1;
	}
	// Only the namespace's end closes the last writers, so this wait is short.
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	n = read(status[0], text, sizeof(text));
	if (n >= 2)
		report(port, text, (size_t)n);
	else
		fail(port, "killed");
	close(out[0]);
	close(err[0]);
	close(status[0]);
}

__attribute__((noreturn)) static void serve(int slot)
{
	int port = wait_port(slot);
	char hello[HEADER_BYTES];
	struct job job;
	size_t len;

	send_frame(port, 'h', hello, 0);
	for (;;) {
		if (read_frame(port, &len) != 'R')
			continue;
		if (parse_job(len, &job)) {
			run_job(port, slot, &job);
		} else {
			fail(port, "L1: cannot parse the command");
		}
	}
}

int main(void)
{
	const struct rlimit files = {.rlim_cur = 1024, .rlim_max = 1 << 20};
	const char *text = getenv("lab_slots"); // from the kernel's command line
	long slots = text ? strtol(text, NULL, 10) : 0;
	pid_t server[SLOTS_MAX];

	if (slots < 1 || slots > SLOTS_MAX) {
		errno = ERANGE;
		die("lab_slots=%ld", slots);
	}
	mount_or_die("proc", "/proc", "proc", 0, NULL);
	mount_or_die("sysfs", "/sys", "sysfs", 0, NULL);
	mount_or_die("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	load_modules();
	loopback_up();
	mount_or_die(
		"lab", "/lab", "9p", 0, "trans=virtio,version=9p2000.L,cache=none,msize=524288");
	setrlimit(RLIMIT_NOFILE, &files);
	for (int i = 0; i < slots; i++) {
		server[i] = fork();
		if (server[i] < 0)
			die("fork");
		if (server[i] == 0)
			serve(i);
	}
	for (;;) {
		pid_t pid = waitpid(-1, NULL, 0);

		for (int i = 0; i < slots; i++)
			if (pid == server[i])
				reboot(RB_AUTOBOOT);
	}
}
