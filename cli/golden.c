// SPDX-License-Identifier: Apache-2.0
// Snapshots for warm starts; see the header. One thread.
#include "cli/golden.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/control_client.h"
#include "cli/home.h"
#include "cli/layers.h"
#include "snapshot/image.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"
#include "vmm/builtin.h"
#include "vmm/config.h"

#define MAKING_PREFIX "making-"
#define KEEP_MAX      8 // the most recently used
#define MAKE_NS       60000000000ULL

static void add_text(struct buf *key, const char *text)
{
	buf_append(key, text, strlen(text) + 1);
}

static int add_file(struct buf *key, const char *path, struct err *err)
{
	struct stat st;

	add_text(key, path);
	if (stat(path, &st) < 0)
		return err_errno(err, -errno, "%s", path);
	buf_append(key, &st.st_dev, sizeof(st.st_dev));
	buf_append(key, &st.st_ino, sizeof(st.st_ino));
	buf_append(key, &st.st_size, sizeof(st.st_size));
	buf_append(key, &st.st_mtim, sizeof(st.st_mtim));
	buf_append(key, &st.st_ctim, sizeof(st.st_ctim));
	return 0;
}

static int make_key(struct buf *key, const struct config *config, struct err *err)
{
	int r = add_file(key, "/proc/self/exe", err);

	if (r == 0)
		r = add_file(key, config->kernel, err);
	add_text(key, config->initramfs);
	if (r == 0 && config->initramfs[0] && strcmp(config->initramfs, BUILTIN_NAME) != 0)
		r = add_file(key, config->initramfs, err);
	buf_append(key, &config->root, sizeof(config->root));
	add_text(key, config->init);
	add_text(key, config->append);
	buf_append(key, &config->memory_bytes, sizeof(config->memory_bytes));
	buf_append(key, &config->cpus, sizeof(config->cpus));
	buf_append(key, &config->cid, sizeof(config->cid));
	// What goes through the proxy is no part of a boot.
	if (config_net_has_device(&config->net))
		buf_append(key, &config->net, sizeof(config->net));
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX && r == 0; i++) {
		buf_append(key, &config->disks[i], sizeof(config->disks[i]));
		if (config->disks[i].file[0])
			r = add_file(key, config->disks[i].file, err);
	}
	return r;
}

// A guest that writes to a file of the host's boots each time.
static bool can_be_warm(const struct config *config)
{
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		if (config->disks[i].mode == CONFIG_DISK_RAW)
			return false;
	return true;
}

int golden_find(
	struct golden *ret_golden, const struct config *config, const char *more, struct err *err)
{
	struct golden golden = {.making_fd = -1};
	CLEANUP_BUF struct buf key = {0};
	char folder[PATH_MAX], state[PATH_MAX];
	int r;

	*ret_golden = golden;
	if (!can_be_warm(config))
		return 0;
	r = make_key(&key, config, err);
	if (more)
		add_text(&key, more);
	if (r == 0 && buf_error(&key) < 0)
		r = err_errno(err, -ENOMEM, "warm start");
	if (r == 0)
		r = home_golden(folder, err);
	if (r < 0)
		return r;
	if (snprintf(golden.dir, sizeof(golden.dir), "%s/%016llx", folder,
		    (unsigned long long)image_checksum(key.data, key.len)) >=
			(int)sizeof(golden.dir) ||
		snprintf(state, sizeof(state), "%s/state", golden.dir) >= (int)sizeof(state))
		return err_errno(err, -ENAMETOOLONG, "%s", folder);
	*ret_golden = golden;
	if (access(state, R_OK) < 0)
		return 0;
	// That it was used: the least recently used go first.
	utimensat(AT_FDCWD, golden.dir, NULL, 0);
	return 1;
}

static int make_folder(struct golden *golden, struct err *err)
{
	const char *slash = strrchr(golden->dir, '/');

	if (snprintf(golden->making, sizeof(golden->making), "%.*s/" MAKING_PREFIX "XXXXXX",
		    (int)(slash - golden->dir), golden->dir) >= (int)sizeof(golden->making))
		return err_errno(err, -ENAMETOOLONG, "%s", golden->dir);
	if (!mkdtemp(golden->making)) {
		golden->making[0] = '\0';
		return err_errno(err, -errno, "%s", golden->dir);
	}
	golden->making_fd = open(golden->making, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (golden->making_fd < 0 || flock(golden->making_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", golden->making);
	return 0;
}

int golden_make(
	struct golden *golden, const char *dir, const char *run_dir, int cancel_fd, struct err *err)
{
	CLEANUP_FD int control_fd = -1;
	char text[SNAPSHOT_ID_TEXT_LEN + 1];
	struct snapshot_id id;
	int r;

	if (!golden->dir[0])
		return 0;
	if (getrandom(&id, sizeof(id), 0) != sizeof(id))
		return err_errno(err, -EIO, "getrandom");
	snapshot_id_text(&id, text);
	r = make_folder(golden, err);
	if (r < 0)
		return r;
	control_fd = control_connect(run_dir, err);
	if (control_fd < 0)
		return control_fd;
	// Synced by golden_keep(), when nobody waits for it.
	r = control_snapshot(control_fd, json_pack("{s:s, s:b}", "id", text, "unsynced", 1),
		golden->making_fd, cancel_fd, now_ns() + MAKE_NS, NULL, err);
	return r < 0 ? r : layers_keep(golden->making_fd, dir, err);
}

static int sync_file(int dir_fd, const char *name)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

	return fd < 0 || fsync(fd) < 0 ? -errno : 0;
}

struct used {
	char path[PATH_MAX];
	struct timespec when;
};

static int by_use(const void *a, const void *b)
{
	const struct used *x = a, *y = b;

	if (x->when.tv_sec != y->when.tv_sec)
		return x->when.tv_sec > y->when.tv_sec ? -1 : 1;
	return x->when.tv_nsec > y->when.tv_nsec ? -1 : x->when.tv_nsec < y->when.tv_nsec;
}

// Removes what nobody makes any more, and the least recently used. Machines that go on from one
// have its memory open.
static void tidy_up(const char *any_dir)
{
	char folder[PATH_MAX];
	struct used *used = NULL;
	const struct dirent *e;
	size_t nr = 0;
	DIR *dir;

	snprintf(folder, sizeof(folder), "%.*s", (int)(strrchr(any_dir, '/') - any_dir), any_dir);
	dir = opendir(folder);
	while (dir && (e = readdir(dir))) {
		CLEANUP_FD int fd = -1;
		struct used one, *more;
		struct stat st;

		if (e->d_name[0] == '.' || snprintf(one.path, sizeof(one.path), "%s/%s", folder,
						   e->d_name) >= (int)sizeof(one.path))
			continue;
		if (!strncmp(e->d_name, MAKING_PREFIX, strlen(MAKING_PREFIX))) {
			fd = open(one.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
			if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
				(void)home_remove(one.path, NULL);
			continue;
		}
		if (lstat(one.path, &st) < 0)
			continue;
		one.when = st.st_mtim;
		more = reallocarray(used, nr + 1, sizeof(*used));
		if (!more)
			break;
		used = more;
		used[nr++] = one;
	}
	if (dir)
		closedir(dir);
	if (nr > 0)
		qsort(used, nr, sizeof(*used), by_use);
	for (size_t i = KEEP_MAX; i < nr; i++)
		(void)home_remove(used[i].path, NULL);
	free(used);
}

int golden_keep(struct golden *golden, struct err *err)
{
	int r;

	if (!golden->making[0])
		return 0;
	r = sync_file(golden->making_fd, "memory");
	if (r == 0)
		r = sync_file(golden->making_fd, "state");
	if (r == 0)
		r = layers_sync(golden->making_fd, NULL);
	if (r == 0 && fsync(golden->making_fd) < 0)
		r = -errno;
	if (r < 0)
		return err_errno(err, r, "%s", golden->making);
	if (rename(golden->making, golden->dir) == 0)
		golden->making[0] = '\0';
	else if (errno != EEXIST && errno != ENOTEMPTY)
		return err_errno(err, -errno, "%s", golden->dir);
	// Else somebody else was faster, which is as good.
	tidy_up(golden->dir);
	return 0;
}

void golden_failed(struct golden *golden, int code)
{
	static const int its_own[] = {-EBADMSG, -EINVAL, -ENOTSUP, -ENOENT, -ETIMEDOUT};

	for (size_t i = 0; i < ARRAY_SIZE(its_own); i++)
		if (code == its_own[i])
			(void)home_remove(golden->dir, NULL);
}

void golden_fini(struct golden *golden)
{
	if (golden->making[0])
		(void)home_remove(golden->making, NULL);
	golden->making[0] = '\0';
	if (golden->making_fd > 0)
		fd_close(&golden->making_fd);
}
