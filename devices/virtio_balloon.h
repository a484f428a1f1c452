// SPDX-License-Identifier: Apache-2.0
// virtio memory balloon (virtio 1.2, 5.5). Loop thread.
//
// Memory that the guest has freed returns to the host by itself: the guest reports free blocks, and
// they are dropped. A target makes it give up more, page by page; under memory pressure the guest
// takes that back without asking (DEFLATE_ON_OOM). Its figures are fetched when somebody asks.
#ifndef MAYFLY_DEVICES_VIRTIO_BALLOON_H
#define MAYFLY_DEVICES_VIRTIO_BALLOON_H

#include "devices/virtio_mmio.h"

// Owned by the caller, who ends it with virtio_dev_destroy(). -ENOMEM, or the errno of eventfd().
int virtio_balloon_create(
	struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err);

// How much the guest is to give up; in whole pages. It does so in its own time.
void virtio_balloon_set_target(struct virtio_dev *dev, uint64_t bytes);

#define VIRTIO_BALLOON_UNKNOWN UINT64_MAX

struct virtio_balloon_stats {
	uint64_t target_bytes, actual_bytes;
	uint64_t inflated_bytes, reported_bytes; // dropped so far, also more than once
	uint64_t bad_pages; // named by the guest, and not in RAM
	// The guest's own figures, as of updated_ns (CLOCK_MONOTONIC; 0: never). UNKNOWN where it
	// does not tell.
	uint64_t updated_ns;
	uint64_t free_bytes, available_bytes, total_bytes, caches_bytes;
	uint64_t major_faults, minor_faults, swap_in_bytes, swap_out_bytes;
};

void virtio_balloon_get_stats(struct virtio_dev *dev, struct virtio_balloon_stats *ret_stats);

// Asks the guest for its figures; updated_ns tells when they have come.
void virtio_balloon_ask_stats(struct virtio_dev *dev);

#endif
