// SPDX-License-Identifier: Apache-2.0
// virtio network device; see the header. Loop thread.
#include "devices/virtio_net.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/loop.h"

enum { RX_QUEUE, TX_QUEUE, NR_QUEUES };

#define QUEUE_SIZE       256U
#define HDR_BYTES        sizeof(struct virtio_net_hdr_v1)
#define ETH_BYTES        18U // with a VLAN tag
#define GSO_BYTES        65536U // the largest packet that segmentation leaves whole
#define PACKETS_PER_TURN 64U // of each direction
#define WINDOW_CHAINS    64U
#define WINDOW_IOV       (VIRTQ_CHAIN_MAX + WINDOW_CHAINS)

#define FEATURES                                                                             \
	(1ULL << VIRTIO_NET_F_MAC | 1ULL << VIRTIO_NET_F_MTU | 1ULL << VIRTIO_NET_F_STATUS | \
		1ULL << VIRTIO_NET_F_MRG_RXBUF | 1ULL << VIRTIO_NET_F_CSUM |                 \
		1ULL << VIRTIO_NET_F_HOST_TSO4 | 1ULL << VIRTIO_NET_F_HOST_TSO6 |            \
		1ULL << VIRTIO_NET_F_HOST_ECN)
// What the guest takes, and the tap is to be told.
#define FEATURES_OFFLOAD                                                     \
	(1ULL << VIRTIO_NET_F_GUEST_CSUM | 1ULL << VIRTIO_NET_F_GUEST_TSO4 | \
		1ULL << VIRTIO_NET_F_GUEST_TSO6 | 1ULL << VIRTIO_NET_F_GUEST_ECN)

struct net {
	struct virtio_dev dev;
	int fd;
	int watch;
	bool tap;
	bool rx_starved; // the guest has to give buffers before anything is read
	bool tx_blocked; // the tap takes no more
	uint32_t rx_need_bytes; // for the largest packet that may come
	uint16_t mtu;

	// Chains that are popped and empty, in order, and their buffers: a packet is read into
	// them before anybody knows how many it takes.
	struct {
		struct {
			uint16_t head;
			uint16_t nr_iov;
			uint32_t bytes;
		} chains[WINDOW_CHAINS];
		struct iovec iov[WINDOW_IOV + 1]; // and the spill
		unsigned int nr_chains, nr_iov;
		uint32_t bytes;
	} window;

	// What of a packet the window has no room for, until the guest gives more buffers. Only
	// with MRG_RXBUF: without it a packet that is too large is dropped.
	uint32_t spill_at, spill_bytes;
	uint8_t spill[GSO_BYTES + ETH_BYTES];

	struct virtio_net_stats stats;
	struct guest_view segs[VIRTQ_CHAIN_MAX];
};

static struct net *net_of(struct virtio_dev *dev)
{
	return container_of(dev, struct net, dev);
}

static bool has(const struct net *net, unsigned int feature)
{
	return net->dev.features & 1ULL << feature;
}

static void update_watch(struct net *net)
{
	uint32_t events = 0;

	if (virtio_dev_running(&net->dev) && net->stats.link_up)
		events = (net->rx_starved ? 0U : POLLIN) | (net->tx_blocked ? POLLOUT : 0U);
	loop_watch_set(net->dev.env.loop, net->watch, events);
}

// --- To the guest ----------------------------------------------------------------------------

static void window_append(struct net *net, const struct virtq_chain *chain)
{
	size_t bytes;
	unsigned int nr = virtq_chain_iov(chain, true, 0, chain->writable_bytes,
		net->window.iov + net->window.nr_iov, WINDOW_IOV - net->window.nr_iov, &bytes);

	ASSERT(bytes == chain->writable_bytes);
	net->window.chains[net->window.nr_chains].head = chain->head;
	net->window.chains[net->window.nr_chains].nr_iov = (uint16_t)nr;
	net->window.chains[net->window.nr_chains].bytes = chain->writable_bytes;
	net->window.nr_chains++;
	net->window.nr_iov += nr;
	net->window.bytes += chain->writable_bytes;
}

static unsigned int window_chains_max(const struct net *net)
{
	return has(net, VIRTIO_NET_F_MRG_RXBUF) ? WINDOW_CHAINS : 1;
}

static bool window_full(const struct net *net)
{
	return net->window.nr_chains == window_chains_max(net) ||
	       WINDOW_IOV - net->window.nr_iov < VIRTQ_CHAIN_MAX;
}

// Pops until there is room for so many bytes, or the guest has no more, or the window is full.
// -EPROTO, or 0.
static int window_fill(struct net *net, uint32_t need_bytes)
{
	struct virtq *q = &net->dev.queues[RX_QUEUE];

	while (net->window.bytes < need_bytes && !window_full(net)) {
		struct virtq_chain chain = {.segs = net->segs};
		int r = virtq_pop(q, &chain);

		if (r == 0 && virtq_wait(q))
			continue;
		if (r == 0)
			return 0;
		if (r < 0 || chain.writable_bytes <= HDR_BYTES)
			return -EPROTO;
		window_append(net, &chain);
	}
	return 0;
}

static void window_shift(struct net *net, unsigned int nr_chains, unsigned int nr_iov)
{
	net->window.nr_chains -= nr_chains;
	net->window.nr_iov -= nr_iov;
	memmove(net->window.chains, net->window.chains + nr_chains,
		net->window.nr_chains * sizeof(net->window.chains[0]));
	memmove(net->window.iov, net->window.iov + nr_iov,
		net->window.nr_iov * sizeof(net->window.iov[0]));
}

static void window_give_back(struct net *net)
{
	while (net->window.nr_chains)
		virtq_unpop(&net->dev.queues[RX_QUEUE],
			net->window.chains[--net->window.nr_chains].head);
	net->window.nr_iov = net->window.bytes = 0;
	net->stats.rx_dropped += net->spill_bytes > 0;
	net->spill_bytes = 0;
}

// The tap leaves num_buffers to us. The header may lie in several buffers.
static void put_num_buffers(struct net *net, uint16_t nr)
{
	const size_t at = offsetof(struct virtio_net_hdr_v1, num_buffers);
	uint8_t raw[2];
	size_t off = 0;

	put_le16(raw, nr);
	for (unsigned int i = 0; off < at + sizeof(raw); i++) {
		const struct iovec *iov = &net->window.iov[i];

		for (unsigned int k = 0; k < sizeof(raw); k++)
			if (at + k >= off && at + k < off + iov->iov_len)
				((uint8_t *)iov->iov_base)[at + k - off] = raw[k];
		off += iov->iov_len;
	}
}

static void rx_done(struct net *net, uint32_t bytes)
{
	uint32_t left = bytes;
	unsigned int nr = 0, nr_iov = 0;

	for (uint32_t room = 0; room < bytes; nr++)
		room += net->window.chains[nr].bytes;
	put_num_buffers(net, (uint16_t)nr);
	for (unsigned int i = 0; i < nr; i++)
		nr_iov += net->window.chains[i].nr_iov;
	guest_mem_mark_iov_dirty(net->dev.env.mem, net->window.iov, nr_iov, bytes);
	for (unsigned int i = 0; i < nr; i++) {
		const uint32_t part = MIN(left, net->window.chains[i].bytes);

		virtq_push(&net->dev.queues[RX_QUEUE], net->window.chains[i].head, part);
		net->window.bytes -= net->window.chains[i].bytes;
		left -= part;
	}
	window_shift(net, nr, nr_iov);
	net->stats.rx_packets++;
	net->stats.rx_bytes += bytes - HDR_BYTES;
}

static void link_down(struct net *net, int error)
{
	le16_t status = le16_of(0);

	log_line(LOG_WARN, "net", "the host's side of the network is gone: %s", strerror(error));
	net->stats.link_up = false;
	virtio_dev_set_config(
		&net->dev, offsetof(struct virtio_net_config, status), &status, sizeof(status));
}

// The rest of a packet that was larger than the window was.
static void finish_spill(struct net *net)
{
	const uint32_t total = net->spill_at + net->spill_bytes;
	uint32_t done = 0, off = 0;

	// Of buffers so small no window is large enough.
	if (net->window.bytes < total) {
		net->stats.rx_dropped++;
		net->spill_bytes = 0;
		return;
	}
	for (unsigned int i = 0; done < net->spill_bytes; i++) {
		const struct iovec *iov = &net->window.iov[i];
		const uint32_t end = off + (uint32_t)iov->iov_len;
		const uint32_t at = net->spill_at + done;
		uint32_t part;

		if (end > at) {
			part = MIN(end - at, net->spill_bytes - done);
			memcpy((uint8_t *)iov->iov_base + (at - off), net->spill + done, part);
			done += part;
		}
		off = end;
	}
	net->spill_bytes = 0;
	rx_done(net, total);
}

// Takes a packet from the tap. False if there is none, or nowhere to put it.
static bool receive(struct net *net)
{
	const bool mergeable = has(net, VIRTIO_NET_F_MRG_RXBUF);
	ssize_t n;

	net->window.iov[net->window.nr_iov] = (struct iovec){
		.iov_base = net->spill, .iov_len = sizeof(net->spill)};
	n = readv(net->fd, net->window.iov, (int)net->window.nr_iov + mergeable);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	// A tap drops what does not fit, and says EFAULT.
	if (n < 0 && errno == EFAULT) {
		net->stats.rx_dropped++;
		return true;
	}
	if (n <= 0) {
		link_down(net, n < 0 ? errno : EPIPE);
		return false;
	}
	if ((size_t)n < HDR_BYTES || (size_t)n > net->window.bytes + sizeof(net->spill)) {
		net->stats.rx_dropped++;
	} else if ((size_t)n > net->window.bytes) {
		net->spill_at = net->window.bytes;
		net->spill_bytes = (uint32_t)n - net->window.bytes;
	} else {
		rx_done(net, (uint32_t)n);
	}
	return true;
}

static void run_rx(struct net *net)
{
	net->rx_starved = false;
	// A packet that has begun is brought to its end, or waits for buffers.
	for (unsigned int i = 0; (i < PACKETS_PER_TURN && net->stats.link_up) || net->spill_bytes;
		i++) {
		const uint32_t need = net->spill_bytes ? net->spill_at + net->spill_bytes
						       : net->rx_need_bytes;

		if (window_fill(net, need) < 0) {
			virtio_dev_set_needs_reset(&net->dev, "bad chain in the rx queue");
			break;
		}
		net->rx_starved = net->spill_bytes ? net->window.bytes < need && !window_full(net)
						   : !net->window.nr_chains;
		if (net->rx_starved)
			break;
		if (net->spill_bytes)
			finish_spill(net);
		else if (!receive(net))
			break;
	}
	virtio_dev_publish(&net->dev, 1U << RX_QUEUE);
}

// --- From the guest --------------------------------------------------------------------------

// False if the tap takes no more now.
static bool send_packet(struct net *net, const struct virtq_chain *chain)
{
	struct iovec iov[VIRTQ_CHAIN_MAX];
	size_t bytes;
	unsigned int nr;
	ssize_t n = -1;

	if (chain->readable_bytes > HDR_BYTES &&
		chain->readable_bytes <= HDR_BYTES + ETH_BYTES + GSO_BYTES) {
		nr = virtq_chain_iov(
			chain, false, 0, chain->readable_bytes, iov, VIRTQ_CHAIN_MAX, &bytes);
		n = writev(net->fd, iov, (int)nr);
		if (n < 0 && errno == EAGAIN)
			return false;
	}
	if (n < 0) {
		net->stats.tx_dropped++;
	} else {
		net->stats.tx_packets++;
		net->stats.tx_bytes += chain->readable_bytes - HDR_BYTES;
	}
	return true;
}

static void run_tx(struct net *net)
{
	struct virtq *q = &net->dev.queues[TX_QUEUE];
	struct virtq_chain chain = {.segs = net->segs};
	unsigned int nr;
	int r = 0;

	net->tx_blocked = false;
	for (nr = 0; nr < PACKETS_PER_TURN; nr++) {
		r = virtq_pop(q, &chain);
		if (r == 0 && virtq_wait(q))
			continue;
		if (r <= 0)
			break;
		if (!send_packet(net, &chain)) {
			virtq_unpop(q, chain.head);
			net->tx_blocked = true;
			break;
		}
		virtq_push(q, chain.head, 0);
	}
	virtio_dev_publish(&net->dev, 1U << TX_QUEUE);
	if (r < 0)
		virtio_dev_set_needs_reset(&net->dev, "bad chain in the tx queue");
	else if (nr == PACKETS_PER_TURN)
		virtio_dev_notify_again(&net->dev, TX_QUEUE);
}

static void on_ready(void *opaque, uint32_t revents)
{
	struct net *net = opaque;

	if (!virtio_dev_running(&net->dev))
		return;
	if (revents & (POLLIN | POLLERR | POLLHUP))
		run_rx(net);
	if (revents & POLLOUT && virtio_dev_running(&net->dev))
		run_tx(net);
	update_watch(net);
}

// --- The device ------------------------------------------------------------------------------

static void set_offloads(struct net *net)
{
	unsigned int offloads = (has(net, VIRTIO_NET_F_GUEST_CSUM) ? TUN_F_CSUM : 0U) |
				(has(net, VIRTIO_NET_F_GUEST_TSO4) ? TUN_F_TSO4 : 0U) |
				(has(net, VIRTIO_NET_F_GUEST_TSO6) ? TUN_F_TSO6 : 0U) |
				(has(net, VIRTIO_NET_F_GUEST_ECN) ? TUN_F_TSO_ECN : 0U);

	if (net->tap && ioctl(net->fd, TUNSETOFFLOAD, offloads) < 0)
		log_line(LOG_WARN, "net", "TUNSETOFFLOAD 0x%x: %s", offloads, strerror(errno));
}

static void net_activate(struct virtio_dev *dev)
{
	struct net *net = net_of(dev);
	const bool gso = has(net, VIRTIO_NET_F_GUEST_TSO4) || has(net, VIRTIO_NET_F_GUEST_TSO6);

	set_offloads(net);
	net->rx_need_bytes = (uint32_t)HDR_BYTES + ETH_BYTES +
			     (gso ? GSO_BYTES : (uint32_t)net->mtu);
	net->rx_starved = net->tx_blocked = false;
	update_watch(net);
}

static void net_queue_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct net *net = net_of(dev);

	if (queue_idx == TX_QUEUE)
		run_tx(net);
	else
		run_rx(net);
	update_watch(net);
}

static bool net_drain(struct virtio_dev *dev)
{
	struct net *net = net_of(dev);

	window_give_back(net);
	update_watch(net);
	return true;
}

static void net_resume(struct virtio_dev *dev)
{
	set_offloads(net_of(dev));
	update_watch(net_of(dev));
}

static void net_reset(struct virtio_dev *dev)
{
	update_watch(net_of(dev)); // drain() has given the buffers back
}

static void net_destroy(struct virtio_dev *dev)
{
	struct net *net = net_of(dev);

	loop_watch_del(dev->env.loop, &net->watch);
	virtio_dev_fini(dev);
	fd_close(&net->fd);
	free(net);
}

static const struct virtio_ops net_ops = {
	.name = "net",
	.device_id = VIRTIO_ID_NET,
	.activate = net_activate,
	.queue_notify = net_queue_notify,
	.drain = net_drain,
	.resume = net_resume,
	.reset = net_reset,
	.destroy = net_destroy,
};

void virtio_net_get_stats(struct virtio_dev *dev, struct virtio_net_stats *ret_stats)
{
	*ret_stats = net_of(dev)->stats;
}

int virtio_net_create(struct virtio_dev **ret_dev, const struct virtio_net_params *params,
	const struct virtio_env *env, struct err *err)
{
	struct virtio_net_config config = {
		.status = htole16(VIRTIO_NET_S_LINK_UP),
		.mtu = htole16(params->mtu),
	};
	const struct virtio_dev_params dev_params = {
		.features = FEATURES | FEATURES_OFFLOAD,
		.nr_queues = NR_QUEUES,
		.queue_size_max = QUEUE_SIZE,
		.config = &config,
		.config_bytes = sizeof(config),
	};
	struct net *net;
	int r;

	if (params->mtu < VIRTIO_NET_MTU_MIN || params->mtu > VIRTIO_NET_MTU_MAX)
		return err_set(err, -EINVAL, "net: MTU %u", params->mtu);
	net = calloc(1, sizeof(*net));
	if (!net)
		return err_errno(err, -ENOMEM, "net");
	memcpy(config.mac, params->mac, sizeof(config.mac));
	net->tap = params->tap;
	net->mtu = params->mtu;
	net->stats.link_up = true;
	net->fd = -1;
	r = virtio_dev_init(&net->dev, &net_ops, env, &dev_params, err);
	if (r < 0) {
		free(net);
		return r;
	}
	r = loop_watch_add(env->loop, params->fd, 0, on_ready, net, err);
	if (r < 0) {
		virtio_dev_fini(&net->dev);
		free(net);
		return r;
	}
	net->watch = r;
	net->fd = params->fd;
	*ret_dev = &net->dev;
	return 0;
}

int virtio_net_open_tap(const char *ifname, int *ret_fd, struct err *err)
{
	struct ifreq ifr = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
	CLEANUP_FD int fd = -1;
	int hdr_bytes = HDR_BYTES, back = 0;

	if (!ifname[0] || strlen(ifname) >= sizeof(ifr.ifr_name))
		return err_set(err, -EINVAL, "%s: not a name for a network interface", ifname);
	fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return err_errno(err, -errno, "/dev/net/tun");
	memcpy(ifr.ifr_name, ifname, strlen(ifname));
	if (ioctl(fd, TUNSETIFF, &ifr) < 0)
		return err_errno(err, -errno, "tap %s", ifname);
	// Read back: with another size every packet would be garbled.
	if (ioctl(fd, TUNSETVNETHDRSZ, &hdr_bytes) < 0 || ioctl(fd, TUNGETVNETHDRSZ, &back) < 0)
		return err_errno(err, -errno, "tap %s: header size", ifname);
	if (back != hdr_bytes)
		return err_set(err, -EPROTO, "tap %s: header of %d bytes", ifname, back);
	*ret_fd = TAKE_FD(fd);
	return 0;
}
