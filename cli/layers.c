// SPDX-License-Identifier: Apache-2.0
// The disks of snapshots; see the header. One thread.
#include "cli/layers.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "snapshot/image.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"
#include "vmm/vm.h"

#define LAYERS     "layers"
#define TOP        "%s.overlay"
#define TOP_BEFORE "%s.overlay.before" // until it is known that the new one serves
#define NAME_BYTES 64

// For each disk the layer that it stands on; "": none.
struct disks {
	char layer[CONFIG_DISKS_MAX][OVERLAY_NAME_BYTES];
};

static int open_dir(const char *dir, struct err *err)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return fd < 0 ? err_errno(err, -errno, "%s", dir) : fd;
}

static int open_layers(int dir_fd, bool make, struct err *err)
{
	int fd;

	if (make && mkdirat(dir_fd, LAYERS, 0700) < 0 && errno != EEXIST)
		return err_errno(err, -errno, LAYERS);
	fd = openat(dir_fd, LAYERS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	return fd < 0 ? err_errno(err, -errno, LAYERS) : fd;
}

static int read_disks(int snapshot_fd, struct disks *ret_disks, struct err *err)
{
	CLEANUP_FREE struct image *image = malloc(sizeof(*image));
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX], name[NAME_BYTES];
	size_t len;
	int r;

	*ret_disks = (struct disks){0};
	if (!image)
		return err_errno(err, -ENOMEM, "snapshot");
	snprintf(path, sizeof(path), "/proc/self/fd/%d/state", snapshot_fd);
	r = fd_read_file(path, IMAGE_FILE_BYTES_MAX, &text, &len, err);
	if (r == 0)
		r = image_parse(image, text, len, err);
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX && r == 0; i++) {
		const void *data;

		snprintf(name, sizeof(name), VM_DISK_SECTION, i);
		if (image_section(image, name, &data, &len, NULL) < 0)
			continue;
		if (len != OVERLAY_NAME_BYTES || memchr(data, '\0', len) == NULL)
			return err_set(err, -EBADMSG, "%s: damaged", name);
		memcpy(ret_disks->layer[i], data, len);
	}
	return r;
}

// A link in to_fd for each layer of from_fd that the disks stand on.
static int link_layers(const struct disks *disks, int from_fd, int to_fd, struct err *err)
{
	char chain[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];
	CLEANUP_FD int from = -1;
	CLEANUP_FD int to = -1;

	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		int nr;

		if (!disks->layer[i][0])
			continue;
		nr = overlay_chain(from_fd, disks->layer[i], chain, err);
		if (nr < 0)
			return nr;
		if (from < 0)
			from = open_layers(from_fd, false, err);
		if (to < 0)
			to = open_layers(to_fd, true, err);
		if (from < 0 || to < 0)
			return MIN(from, to);
		for (int k = 0; k < nr; k++)
			if (linkat(from, chain[k], to, chain[k], 0) < 0 && errno != EEXIST)
				return err_errno(err, -errno, LAYERS "/%s", chain[k]);
	}
	return 0;
}

int layers_keep(int snapshot_fd, const char *machine_dir, struct err *err)
{
	CLEANUP_FD int machine_fd = open_dir(machine_dir, err);
	struct disks disks;
	int r = MIN(machine_fd, 0);

	if (r == 0)
		r = read_disks(snapshot_fd, &disks, err);
	return r < 0 ? r : link_layers(&disks, machine_fd, snapshot_fd, err);
}

int layers_sync(int snapshot_fd, struct err *err)
{
	const struct dirent *e;
	DIR *dir;
	int fd, r = 0;

	fd = openat(snapshot_fd, LAYERS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? 0 : err_errno(err, -errno, LAYERS);
	dir = fdopendir(fd);
	if (!dir) {
		fd_close(&fd);
		return err_errno(err, -ENOMEM, LAYERS);
	}
	while (r == 0 && (e = readdir(dir))) {
		CLEANUP_FD int layer = -1;

		if (e->d_name[0] == '.')
			continue;
		layer = openat(fd, e->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (layer < 0 || fsync(layer) < 0)
			r = err_errno(err, -errno, LAYERS "/%s", e->d_name);
	}
	if (r == 0 && fsync(fd) < 0)
		r = err_errno(err, -errno, LAYERS);
	closedir(dir);
	return r;
}

// --- A machine's -----------------------------------------------------------------------------

struct tops {
	char top[NAME_BYTES], before[NAME_BYTES];
};

static struct tops tops_of(unsigned int disk)
{
	struct tops tops;

	snprintf(tops.top, sizeof(tops.top), TOP, config_disk_name(disk));
	snprintf(tops.before, sizeof(tops.before), TOP_BEFORE, config_disk_name(disk));
	return tops;
}

// By another name, beside the one it has: at no moment is there no disk. What a command that was
// killed has left under that name is out of date.
static int set_aside(int machine_fd, struct err *err)
{
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		struct tops tops = tops_of(i);

		if (unlinkat(machine_fd, tops.before, 0) < 0 && errno != ENOENT)
			return err_errno(err, -errno, "%s", tops.before);
		if (linkat(machine_fd, tops.top, machine_fd, tops.before, 0) < 0 && errno != ENOENT)
			return err_errno(err, -errno, "%s", tops.top);
	}
	return 0;
}

int layers_give(const char *snapshot_dir, const char *machine_dir, bool throwaway, struct err *err)
{
	CLEANUP_FD int snapshot_fd = open_dir(snapshot_dir, err);
	CLEANUP_FD int machine_fd = -1;
	struct disks disks;
	bool aside;
	int r = MIN(snapshot_fd, 0);

	if (r == 0)
		r = machine_fd = open_dir(machine_dir, err);
	if (r >= 0)
		r = read_disks(snapshot_fd, &disks, err);
	if (r == 0)
		r = link_layers(&disks, snapshot_fd, machine_fd, err);
	if (r == 0)
		r = set_aside(machine_fd, err);
	aside = r == 0;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX && r == 0; i++)
		if (disks.layer[i][0])
			r = overlay_create_on(
				machine_fd, config_disk_name(i), disks.layer[i], throwaway, err);
	if (r == 0 && !throwaway)
		r = layers_sync(machine_fd, err);
	if (r < 0) {
		if (aside)
			layers_undo(machine_dir);
		return err_wrap(err, r, "the disks of snapshot %s", snapshot_dir);
	}
	return 0;
}

static bool in_use(const struct disks *disks, int machine_fd, const char *layer)
{
	char chain[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES];

	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		int nr = disks->layer[i][0]
				 ? overlay_chain(machine_fd, disks->layer[i], chain, NULL)
				 : 0;

		// What cannot be told is kept.
		if (nr < 0)
			return true;
		for (int k = 0; k < nr; k++)
			if (!strcmp(chain[k], layer))
				return true;
	}
	return false;
}

void layers_settle(const char *snapshot_dir, const char *machine_dir)
{
	CLEANUP_FD int snapshot_fd = open_dir(snapshot_dir, NULL);
	CLEANUP_FD int machine_fd = open_dir(machine_dir, NULL);
	const struct dirent *e;
	struct disks disks;
	DIR *dir;
	int fd;

	if (snapshot_fd < 0 || machine_fd < 0 || read_disks(snapshot_fd, &disks, NULL) < 0)
		return;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		unlinkat(machine_fd, tops_of(i).before, 0);
	fd = open_layers(machine_fd, false, NULL);
	dir = fd < 0 ? NULL : fdopendir(fd);
	while (dir && (e = readdir(dir)))
		if (e->d_name[0] != '.' && !in_use(&disks, machine_fd, e->d_name))
			unlinkat(fd, e->d_name, 0);
	if (dir)
		closedir(dir);
	else
		fd_close(&fd);
}

void layers_undo(const char *machine_dir)
{
	CLEANUP_FD int machine_fd = open_dir(machine_dir, NULL);

	for (unsigned int i = 0; i < CONFIG_DISKS_MAX && machine_fd >= 0; i++) {
		struct tops tops = tops_of(i);

		(void)!renameat(machine_fd, tops.before, machine_fd, tops.top);
		// Two names of one file are left as they are.
		unlinkat(machine_fd, tops.before, 0);
	}
}

int layers_clear(const char *machine_dir, struct err *err)
{
	CLEANUP_FD int machine_fd = open_dir(machine_dir, err);

	if (machine_fd < 0)
		return machine_fd;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		struct tops tops = tops_of(i);

		if ((unlinkat(machine_fd, tops.top, 0) < 0 && errno != ENOENT) ||
			(unlinkat(machine_fd, tops.before, 0) < 0 && errno != ENOENT))
			return err_errno(err, -errno, "%s/%s", machine_dir, tops.top);
	}
	return 0;
}

int layers_merge(const char *machine_dir, unsigned int at_least, struct err *err)
{
	CLEANUP_FD int machine_fd = open_dir(machine_dir, err);
	int fewer = 0;

	if (machine_fd < 0)
		return machine_fd;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		int r = overlay_merge(machine_fd, config_disk_name(i), at_least, err);

		if (r < 0)
			return err_wrap(err, r, "merging the layers of %s", machine_dir);
		fewer += r;
	}
	return fewer;
}
