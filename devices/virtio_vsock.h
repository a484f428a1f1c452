// SPDX-License-Identifier: Apache-2.0
// virtio socket device (virtio 1.2, 5.10), in user space: each of the guest's stream sockets is
// joined to a Unix socket of the host. Loop thread.
//
// The host connects to the listening socket PATH, sends "CONNECT PORT\n", and reads "OK HOSTPORT\n"
// once the guest has accepted; then bytes flow. Where the guest refuses, the connection is closed
// without a word. A host that connects before the guest's driver is up waits for it, and like
// every connection that is not established yet it is closed after VIRTIO_VSOCK_HALF_OPEN_NS. A
// guest that connects to port N of the host (CID 2) reaches whoever listens on PATH_N; it is
// refused where nobody does.
//
// Nothing is buffered without a bound. From the host data is read into the guest's own buffers, as
// far as the guest has given credit; from the guest at most the window that we have advertised
// waits for a Unix socket that takes no more, and then the guest gets no more credit.
#ifndef MAYFLY_DEVICES_VIRTIO_VSOCK_H
#define MAYFLY_DEVICES_VIRTIO_VSOCK_H

#include "devices/virtio_mmio.h"

#define VIRTIO_VSOCK_HOST_CID      2U
#define VIRTIO_VSOCK_GUEST_CID_MIN 3U

#define VIRTIO_VSOCK_CONNS_MAX    4096U // of both directions
#define VIRTIO_VSOCK_PENDING_MAX  256U // of those from the host that the guest has not heard of
#define VIRTIO_VSOCK_HALF_OPEN_NS 30000000000ULL

struct vsock_config {
	// 3 to 2^32 - 2.
	uint64_t guest_cid;
	// Of the listening socket, which is made with mode 0600; copied. A socket that is there
	// already is replaced: whoever calls has made sure that no other monitor uses it.
	const char *socket_path;
	// What the listening socket is called until virtio_vsock_publish(); NULL: as above.
	const char *listen_path;
	// A connection has ended; NULL: nobody wants to know. It must not call back.
	void (*conn_ended)(void *opaque);
	void *opaque;
	// Where the credit counters of a connection start: 0, but for tests of their wrap-around.
	uint32_t first_cnt;
};

// Owned by the caller, who ends it with virtio_dev_destroy(), which removes the socket.
// -EINVAL, -ENAMETOOLONG, -ENOMEM, or the errno of a system call.
int virtio_vsock_create(struct virtio_dev **ret_dev, const struct vsock_config *config,
	const struct virtio_env *env, struct err *err);

// Closes all connections and tells the guest that they are gone
// (VIRTIO_VSOCK_EVENT_TRANSPORT_RESET), as virtio_dev_restore() does by itself. New connections of
// the host wait until the guest has seen that, since it closes all that it has then.
void virtio_vsock_transport_reset(struct virtio_dev *dev);

// Gives the listening socket its name. 0 if it has it already; the errno of rename().
int virtio_vsock_publish(struct virtio_dev *dev, struct err *err);

struct virtio_vsock_stats {
	uint64_t from_guest_packets, to_guest_packets;
	uint64_t from_guest_bytes, to_guest_bytes; // payload
	uint64_t credit_updates; // packets that carried nothing else
	uint64_t dropped_packets; // malformed, or from or to another CID
	uint64_t dropped_resets; // that the guest was owed and had left no room for
	uint32_t nr_conns, nr_pending;
	uint32_t buffered_bytes; // from the guest, waiting for their sockets
};

void virtio_vsock_get_stats(struct virtio_dev *dev, struct virtio_vsock_stats *ret_stats);

#endif
