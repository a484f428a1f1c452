// SPDX-License-Identifier: Apache-2.0
// virtio network device (virtio 1.2, 5.1) on a tap, or on the socket of a program that is a network
// by itself. Loop thread.
//
// A tap's packets carry the header of virtio, so that checksums and segmentation are left to
// whoever is last to care. Packets go straight between the tap and the guest's buffers, a system
// call each, and those of a turn cost the guest one interrupt. One pair of queues: the loop is one
// thread, so more would bring nothing.
//
// A stream carries bare packets, each after its length in four bytes, big-endian (the protocol of
// passt and QEMU). What comes is read in large pieces and copied.
#ifndef MAYFLY_DEVICES_VIRTIO_NET_H
#define MAYFLY_DEVICES_VIRTIO_NET_H

#include "devices/rate_limit.h"
#include "devices/virtio_mmio.h"

#define VIRTIO_NET_MAC_BYTES   6U
#define VIRTIO_NET_MTU_MIN     1280U
#define VIRTIO_NET_MTU_MAX     65521U
#define VIRTIO_NET_MTU_DEFAULT 1500U

enum virtio_net_kind {
	VIRTIO_NET_TAP, // from virtio_net_open_tap()
	VIRTIO_NET_PACKETS, // a socket that keeps packets apart and carries the same header
	VIRTIO_NET_STREAM,
};

struct virtio_net_params {
	int fd; // non-blocking; taken over on success
	enum virtio_net_kind kind;
	uint8_t mac[VIRTIO_NET_MAC_BYTES];
	uint16_t mtu;
	struct rate_limit rate; // of each direction: bytes, and packets
};

// Owned by the caller, who ends it with virtio_dev_destroy(). -EINVAL, -ENOMEM, or the errno of a
// system call.
int virtio_net_create(struct virtio_dev **ret_dev, const struct virtio_net_params *params,
	const struct virtio_env *env, struct err *err);

// Opens the tap of that name; one that there is not is made if we may, and vanishes with the
// descriptor, which is the caller's.
int virtio_net_open_tap(const char *ifname, int *ret_fd, uint16_t *ret_mtu, struct err *err);

struct virtio_net_stats {
	uint64_t rx_packets, rx_bytes, tx_packets, tx_bytes;
	uint64_t rx_dropped; // too large for the guest's buffers, or malformed
	uint64_t tx_dropped; // malformed, or refused by the host
	bool link_up;
};

void virtio_net_get_stats(struct virtio_dev *dev, struct virtio_net_stats *ret_stats);

#endif
