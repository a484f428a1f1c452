// SPDX-License-Identifier: Apache-2.0
// A disk of a machine; see the header. Loop thread.
#include "vmm/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "devices/overlay.h"
#include "devices/virtio_blk.h"
#include "vmm/base/fd.h"

static int open_image(const char *path, bool writable, int *ret_fd, struct err *err)
{
	CLEANUP_FD int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", path);
	if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
		return err_set(err, -EINVAL, "%s: neither a file nor a block device", path);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

static int open_overlay(
	struct overlay **ret_ov, const struct disk_params *params, int *base_fd, struct err *err)
{
	struct overlay_params overlay = {
		.dir_fd = params->dir_fd,
		.disk = params->name,
		.base_fd = *base_fd,
		.base_name = params->config->file,
		.size_bytes = params->config->size_bytes,
		.quota_bytes = params->config->quota_bytes,
		.throwaway = params->throwaway,
	};
	int r = overlay_open(ret_ov, &overlay, err);

	if (r < 0)
		return err_wrap(err, r, "%s", params->dir);
	*base_fd = -1;
	return 0;
}

int disk_create(struct virtio_dev **ret_dev, const struct disk_params *params,
	const struct virtio_env *env, struct err *err)
{
	const struct config_disk *config = params->config;
	const bool layers = config->mode == CONFIG_DISK_OVERLAY;
	struct virtio_blk_params blk = {
		.read_only = config->mode == CONFIG_DISK_RO,
		.throwaway = params->throwaway,
		// Of this machine alone, whose kernel has a cache of its own.
		.direct = config->mode == CONFIG_DISK_RAW,
		.nr_queues = MIN(params->cpus, VIRTIO_QUEUES_MAX),
		.serial = params->name,
		.limit = {.bytes.per_s = config->bytes_per_s, .ops.per_s = config->ops_per_s},
		.name = config->file[0] ? config->file : params->name,
	};
	CLEANUP_FD int fd = -1;
	int r = 0;

	if (!layers && (config->size_bytes || config->quota_bytes))
		return err_set(
			err, -EINVAL, "%s: size and quota are for mode = overlay", params->name);
	if (config->file[0])
		r = open_image(config->file, config->mode == CONFIG_DISK_RAW, &fd, err);
	if (r == 0 && layers)
		r = open_overlay(&blk.overlay, params, &fd, err);
	blk.fd = fd;
	if (r == 0)
		r = virtio_blk_create(ret_dev, &blk, env, err);
	if (r < 0) {
		overlay_close(blk.overlay);
		return err_wrap(err, r, "%s", params->name);
	}
	TAKE_FD(fd);
	return 0;
}
