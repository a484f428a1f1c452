// SPDX-License-Identifier: Apache-2.0
// What PID 1 does before and after it serves. The agent's only thread.
#include "guest/boot.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/magic.h>

#include "guest/net.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define FILES_SOFT 4096
#define FILES_HARD 1048576

#define ROOT_DISK "/dev/vda"
#define NEW_ROOT  "/mnt" // in the initramfs

#define END_GRACE_NS 500000000ULL

static void mount_at(
	const char *type, const char *target, mode_t mode, unsigned long flags, const char *options)
{
	int rc = mount(type, target, type, flags, options);

	if (rc < 0 && errno == ENOENT && mkdir(target, mode) == 0)
		rc = mount(type, target, type, flags, options);
	if (rc < 0 && errno != EBUSY) // it is there already
		log_line(LOG_WARN, "agent", "mount %s: %s", target, strerror(errno));
}

void boot_early(void)
{
	mount_at("devtmpfs", "/dev", 0755, MS_NOSUID, "mode=755");
	mount_at("proc", "/proc", 0555, MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

static int move_mount(const char *from, const char *to, struct err *err)
{
	int rc = mount(from, to, NULL, MS_MOVE, NULL);

	if (rc < 0 && errno == ENOENT && mkdir(to, 0755) == 0)
		rc = mount(from, to, NULL, MS_MOVE, NULL);
	return rc < 0 ? err_errno(err, -errno, "%s in the root file system", from) : 0;
}

int boot_root(struct err *err)
{
	// "mayfly_root=..." on the kernel's command line is a variable of init's environment.
	const char *mode = getenv("mayfly_root");
	bool writable;
	int rc;

	if (!mode)
		return 0;
	writable = strcmp(mode, "rw") == 0;
	if (mkdir(NEW_ROOT, 0755) < 0 && errno != EEXIST)
		return err_errno(err, -errno, NEW_ROOT);
	// The kernel is quiet about what it is not: a read-only root may be either.
	rc = mount(ROOT_DISK, NEW_ROOT, "ext4", writable ? 0 : MS_RDONLY | MS_SILENT, NULL);
	if (rc < 0 && errno == EINVAL && !writable)
		rc = mount(ROOT_DISK, NEW_ROOT, "erofs", MS_RDONLY, NULL);
	if (rc < 0)
		return err_errno(err, -errno, "the root disk (%s) as %s", ROOT_DISK,
			writable ? "ext4; is it a file system, without partitions?"
				 : "ext4 or erofs");
	rc = move_mount("/dev", NEW_ROOT "/dev", err);
	if (rc == 0)
		rc = move_mount("/proc", NEW_ROOT "/proc", err);
	if (rc < 0)
		return rc;
	// The initramfs is out of reach from here on. Its memory is nearly all in one file; that of
	// this program stays in use.
	unlink("/bin/busybox");
	if (chdir(NEW_ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 ||
		chdir("/") < 0)
		return err_errno(err, -errno, "the root disk");
	return 0;
}

static void loopback_up(void)
{
	struct ifreq ifr = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	CLEANUP_FD int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &ifr) < 0)
		log_line(LOG_WARN, "agent", "loopback interface: %s", strerror(errno));
}

static void hostname_from_file(void)
{
	CLEANUP_FD int fd = openat(AT_FDCWD, "/etc/hostname", O_RDONLY | O_CLOEXEC);
	char name[65];
	ssize_t n;

	if (fd < 0)
		return; // the kernel has one
	n = read(fd, name, sizeof(name) - 1);
	if (n <= 0)
		return;
	name[n] = '\0';
	name[strcspn(name, " \t\r\n")] = '\0';
	if (name[0] && sethostname(name, strlen(name)) < 0)
		log_line(LOG_WARN, "agent", "hostname %s: %s", name, strerror(errno));
}

void boot_late(void)
{
	const struct rlimit files = {FILES_SOFT, FILES_HARD};
	struct statfs root;

	mount_at("devpts", "/dev/pts", 0755, MS_NOSUID | MS_NOEXEC, "mode=620,gid=5,ptmxmode=666");
	mount_at("sysfs", "/sys", 0555, MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_at("cgroup2", "/sys/fs/cgroup", 0755, MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_at("tmpfs", "/dev/shm", 01777, MS_NOSUID | MS_NODEV, "mode=1777");
	// An initramfs is in memory as it is.
	if (statfs("/", &root) == 0 && root.f_type != TMPFS_MAGIC && root.f_type != RAMFS_MAGIC) {
		mount_at("tmpfs", "/run", 0755, MS_NOSUID | MS_NODEV, "mode=755");
		// Where it can be written to it has more room on the disk.
		if (root.f_flags & ST_RDONLY)
			mount_at("tmpfs", "/tmp", 01777, MS_NOSUID | MS_NODEV, "mode=1777");
	}
	loopback_up();
	// "mayfly_net=..." on the kernel's command line is a variable of init's environment.
	net_up(getenv("mayfly_net"));
	hostname_from_file();
	setrlimit(RLIMIT_NOFILE, &files);
}

bool boot_hand_over(void)
{
	static char *const envp[] = {"HOME=/", "TERM=linux", NULL};
	const char *path = getenv("mayfly_init");
	char *const argv[] = {(char *)(uintptr_t)path, NULL};
	pid_t pid;

	if (!path)
		return false;
	// It finds everything mounted, as it does in a container, and so do we at once.
	boot_late();
	pid = fork();
	if (pid == 0) {
		setsid();
		setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1); // to find `reboot` in
		return true;
	}
	if (pid > 0)
		execve(path, argv, envp);
	log_line(LOG_ERROR, "agent", "%s: %s", path, strerror(errno));
	boot_end();
}

// Returns false when processes are left after the time.
static bool reap_until(uint64_t deadline_ns)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGCHLD); // blocked since the agent began
	for (;;) {
		pid_t pid = waitpid(-1, NULL, WNOHANG);
		uint64_t now = now_ns();
		struct timespec left;

		if (pid < 0)
			return true;
		if (pid > 0)
			continue;
		if (now >= deadline_ns)
			return false;
		left.tv_sec = 0;
		left.tv_nsec = (long)MIN(deadline_ns - now, 999999999ULL);
		sigtimedwait(&set, NULL, &left);
	}
}

// The newest first, since they may lie on older ones. What is still in use goes when its user goes,
// but is written back by sync() all the same.
static void unmount_all(void)
{
	static char text[65536];
	char *line, *end;
	size_t len;
	CLEANUP_FD int fd = open("/proc/self/mounts", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : fd_read_full(fd, text, sizeof(text) - 1);

	if (n < 0)
		return;
	len = (size_t)n;
	text[len] = '\0';
	while (len) {
		char *target;

		end = text + len - 1; // a newline
		*end = '\0';
		line = strrchr(text, '\n');
		line = line ? line + 1 : text;
		len = (size_t)(line - text);
		target = strchr(line, ' ');
		if (!target)
			continue;
		target++;
		target[strcspn(target, " ")] = '\0';
		if (strcmp(target, "/") != 0)
			umount2(target, MNT_DETACH);
	}
}

void boot_end(void)
{
	// -ECHILD at once when nobody is left.
	if (!reap_until(0)) {
		kill(-1, SIGTERM);
		kill(-1, SIGCONT);
		if (!reap_until(now_ns() + END_GRACE_NS)) {
			kill(-1, SIGKILL);
			reap_until(now_ns() + END_GRACE_NS);
		}
	}
	sync();
	unmount_all();
	mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL);
	reboot(RB_AUTOBOOT);
	log_line(LOG_ERROR, "agent", "reboot: %s", strerror(errno));
	for (;;)
		pause();
}
