// SPDX-License-Identifier: Apache-2.0
// virtio entropy device (virtio 1.2, 5.4): the guest's requests are filled by getrandom(). Loop
// thread.
#ifndef MAYFLY_DEVICES_VIRTIO_RNG_H
#define MAYFLY_DEVICES_VIRTIO_RNG_H

#include "devices/virtio_mmio.h"

// At most so many bytes a request and a turn of the loop: a guest cannot keep the monitor busy.
#define VIRTIO_RNG_REQUEST_BYTES 4096U
#define VIRTIO_RNG_TURN_BYTES    65536U

// Owned by the caller, who ends it with virtio_dev_destroy(). -ENOMEM, or the errno of eventfd().
int virtio_rng_create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err);

#endif
