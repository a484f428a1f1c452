// SPDX-License-Identifier: Apache-2.0
// virtio block device (virtio 1.2, 5.2) on a raw file, a block device or an overlay. Loop thread.
//
// Each request is an operation in the loop's ring, on the guest's own buffers; all of a turn go to
// the kernel in one system call, and its completions cost the guest one interrupt. A request that
// the host serves in part is continued, not failed. Errors of the file (ENOSPC, EIO) are the
// guest's to handle, as those of a disk.
#ifndef MAYFLY_DEVICES_VIRTIO_BLK_H
#define MAYFLY_DEVICES_VIRTIO_BLK_H

#include "devices/rate_limit.h"
#include "devices/virtio_mmio.h"

#define VIRTIO_BLK_SECTOR_BYTES 512U
#define VIRTIO_BLK_SERIAL_BYTES 20U // VIRTIO_BLK_ID_BYTES

struct overlay;

struct virtio_blk_params {
	// A disk in layers, instead of fd; taken over on success. Or NULL.
	struct overlay *overlay;
	// The overlay does not outlive the monitor: a FLUSH has nothing to do.
	bool throwaway;
	// Open for reading, and for writing unless read_only. Locked while in use: by one writer,
	// or by any number of readers. Its size must not change; a fraction of a sector at its end
	// is left out. Taken over on success.
	int fd;
	bool read_only;
	// Past the host's page cache, where the file and a request's alignment allow it. For a
	// disk of this machine alone: a shared base is better off in the cache.
	bool direct;
	unsigned int nr_queues; // 1 to VIRTIO_QUEUES_MAX; one a vCPU is best
	const char *serial; // what the guest sees in /sys/block/*/serial; cut to 20 bytes
	struct rate_limit limit; // zeros: none
	const char *name; // of the file, for messages
};

// Owned by the caller, who ends it with virtio_dev_destroy(), which waits for what is in flight.
// -EBUSY if another machine uses the file, -EINVAL if it has no sector, -ENOMEM, or the errno of a
// system call.
int virtio_blk_create(struct virtio_dev **ret_dev, const struct virtio_blk_params *params,
	const struct virtio_env *env, struct err *err);

struct virtio_blk_stats {
	uint64_t reads, writes, flushes, discards; // requests that have reached the file
	uint64_t read_bytes, written_bytes;
	uint64_t copied; // blocks that were copied up for a write to a part of them
	uint64_t buffered; // of those, how many took the page cache although direct was asked for
	uint64_t continued; // operations that did a part
	uint64_t errors;
	uint32_t in_flight;
};

void virtio_blk_get_stats(struct virtio_dev *dev, struct virtio_blk_stats *ret_stats);

// The overlay that it is on, NULL if none; the device's. While drained it may be frozen.
struct overlay *virtio_blk_overlay(struct virtio_dev *dev);

// Somebody else's sync of its file has failed, and the kernel tells of that once: the guest's next
// FLUSH fails.
void virtio_blk_sync_failed(struct virtio_dev *dev);

#endif
