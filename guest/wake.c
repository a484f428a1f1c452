// SPDX-License-Identifier: Apache-2.0
// What makes a machine itself. The agent's only thread.
#include "guest/wake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <linux/random.h>

#include "guest/net.h"
#include "vmm/base/fd.h"

// The pool is credited with it and the generator takes a new key from it at once, not after the
// minutes that it would wait by itself.
static int stir(const uint8_t *bytes, size_t len, struct err *err)
{
	CLEANUP_FD int fd = openat(AT_FDCWD, "/dev/urandom", O_WRONLY | O_CLOEXEC);
	// Laid out as struct rand_pool_info, whose array has no size.
	struct {
		int entropy_count, buf_size;
		uint8_t buf[WAKE_ENTROPY_MAX];
	} pool = {.entropy_count = (int)len * 8, .buf_size = (int)len};

	_Static_assert(offsetof(__typeof__(pool), buf) == sizeof(struct rand_pool_info), "");
	memcpy(pool.buf, bytes, len);
	if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0)
		return err_errno(err, -errno, "entropy");
	return 0;
}

// A file of the guest that nobody can write gets another one mounted over it.
static int cover(
	const char *root, const char *over, const char *name, const char *text, struct err *err)
{
	char from[256], to[256], line[64];
	struct stat ours, there;
	CLEANUP_FD int fd = -1;

	snprintf(from, sizeof(from), "%s/run/mayfly", root);
	if (mkdir(from, 0755) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s", from);
	snprintf(from, sizeof(from), "%s/run/mayfly/%s", root, name);
	snprintf(to, sizeof(to), "%s%s", root, over);
	snprintf(line, sizeof(line), "%s\n", text);
	fd = open(from, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
	if (fd < 0 || fd_write_all(fd, line, strlen(line)) < 0)
		return err_errno(err, -errno, "%s", from);
	// Mounting takes longer than all the rest of a wake, so it is done but once.
	if (fstat(fd, &ours) == 0 && stat(to, &there) == 0 && ours.st_dev == there.st_dev &&
		ours.st_ino == there.st_ino)
		return 0;
	umount2(to, MNT_DETACH);
	if (mount(from, to, NULL, MS_BIND, NULL) < 0)
		return err_errno(err, -errno, "%s", to);
	return 0;
}

#define BOOT_ID "/proc/sys/kernel/random/boot_id"

void wake_prepare(const char *root)
{
	char path[256], id[37] = "";
	CLEANUP_FD int fd = -1;

	snprintf(path, sizeof(path), "%s" BOOT_ID, root);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, id, sizeof(id) - 1) != sizeof(id) - 1)
		return; // then the first wake does it
	(void)cover(root, BOOT_ID, "boot_id", id, NULL);
}

static int set_machine_id(const char *root, const char *id, struct err *err)
{
	char path[256], temp[256], line[64];
	CLEANUP_FD int fd = -1;

	snprintf(path, sizeof(path), "%s/etc/machine-id", root);
	snprintf(temp, sizeof(temp), "%s/etc/.machine-id.new", root);
	snprintf(line, sizeof(line), "%s\n", id);
	fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
	if (fd < 0 || fd_write_all(fd, line, strlen(line)) < 0 || rename(temp, path) < 0)
		return err_errno(err, -errno, "%s", path);
	return 0;
}

int wake_up(const struct wake *w, const char *root, struct err *err)
{
	const struct timespec now = {
		.tv_sec = w->clock_ns / 1000000000, .tv_nsec = w->clock_ns % 1000000000};
	int first = 0, rc;

	if (w->entropy_len) {
		rc = stir(w->entropy, w->entropy_len, err);
		first = rc;
	}
	if (w->clock_ns && clock_settime(CLOCK_REALTIME, &now) < 0) {
		rc = err_errno(first ? NULL : err, -errno, "clock");
		first = first ? first : rc;
	}
	if (w->hostname && sethostname(w->hostname, strlen(w->hostname)) < 0) {
		rc = err_errno(first ? NULL : err, -errno, "hostname %.64s", w->hostname);
		first = first ? first : rc;
	}
	if (w->boot_id) {
		rc = cover(root, BOOT_ID, "boot_id", w->boot_id, first ? NULL : err);
		first = first ? first : rc;
	}
	if (w->machine_id) {
		rc = set_machine_id(root, w->machine_id, first ? NULL : err);
		first = first ? first : rc;
	}
	if (w->has_mac) {
		rc = net_set_mac(w->mac, first ? NULL : err);
		first = first ? first : rc;
	}
	return first;
}
