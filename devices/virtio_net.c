// SPDX-License-Identifier: Apache-2.0
// virtio network device; see the header. Loop thread.
#include "devices/virtio_net.h"

#include <endian.h>
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
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/loop.h"

enum { RX_QUEUE, TX_QUEUE, NR_QUEUES };

#define QUEUE_SIZE         256U
#define HDR_BYTES          sizeof(struct virtio_net_hdr_v1)
#define ETH_BYTES          18U // with a VLAN tag
#define ETH_MIN_BYTES      14U
#define GSO_BYTES          65536U // the largest packet that segmentation leaves whole
#define FRAME_BYTES        (GSO_BYTES + ETH_BYTES)
#define STREAM_LEN_BYTES   4U // before each packet of a stream
#define STREAM_FRAME_BYTES 65535U
#define STREAM_BYTES       (2 * FRAME_BYTES) // read at once
#define PACKETS_PER_TURN   64U // of each direction
#define WINDOW_CHAINS      64U
#define WINDOW_IOV         (VIRTQ_CHAIN_MAX + WINDOW_CHAINS)

#define FEATURES                                                                             \
	(1ULL << VIRTIO_NET_F_MAC | 1ULL << VIRTIO_NET_F_MTU | 1ULL << VIRTIO_NET_F_STATUS | \
		1ULL << VIRTIO_NET_F_MRG_RXBUF | 1ULL << VIRTIO_NET_F_GUEST_CSUM)
// What the guest leaves to the host, and what it takes unfinished, which a tap is to be told. A
// stream's packets are whole; that their checksums are right the guest is told (DATA_VALID).
#define FEATURES_OFFLOAD                                                            \
	(1ULL << VIRTIO_NET_F_CSUM | 1ULL << VIRTIO_NET_F_HOST_TSO4 |               \
		1ULL << VIRTIO_NET_F_HOST_TSO6 | 1ULL << VIRTIO_NET_F_HOST_ECN |    \
		1ULL << VIRTIO_NET_F_GUEST_TSO4 | 1ULL << VIRTIO_NET_F_GUEST_TSO6 | \
		1ULL << VIRTIO_NET_F_GUEST_ECN)

struct direction {
	struct rate_limit rate;
	struct loop_timer timer;
	bool limited; // until the timer fires
};

struct net {
	struct virtio_dev dev;
	int fd;
	int watch;
	enum virtio_net_kind kind;
	bool rx_starved; // the guest has to give buffers before anything is read
	bool tx_blocked; // the host takes no more
	uint8_t unused1[2]; // padding
	struct direction rx, tx;
	uint32_t rx_need_bytes; // for the largest packet that may come
	uint16_t mtu;
	uint8_t unused2[2]; // padding

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
	uint8_t spill[FRAME_BYTES];
	uint8_t unused3[2]; // padding

	// Of a stream: what was read and is not yet the guest's, and the rest of a packet of which
	// the socket took a part.
	struct {
		uint32_t in_from, in_to, out_from, out_to;
		uint8_t in[STREAM_BYTES];
		uint8_t out[STREAM_LEN_BYTES + FRAME_BYTES];
	} stream;
	uint8_t unused4[8]; // padding

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
		events = (net->rx_starved || net->rx.limited ? 0U : POLLIN) |
			 (net->tx_blocked ? POLLOUT : 0U);
	loop_watch_set(net->dev.env.loop, net->watch, events);
}

// Whether a packet may go in this direction now; else the timer is set.
static bool may_go(struct net *net, struct direction *dir)
{
	const uint64_t wait_ns = rate_limit_any(&dir->rate)
					 ? rate_limit_wait_ns(&dir->rate, now_ns())
					 : 0;

	dir->limited = wait_ns != 0;
	if (wait_ns)
		loop_timer_set(net->dev.env.loop, &dir->timer, wait_ns);
	return !wait_ns;
}

static void gone(struct direction *dir, uint64_t bytes)
{
	if (rate_limit_any(&dir->rate))
		rate_limit_take(&dir->rate, bytes, now_ns());
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

static void window_write(struct net *net, uint32_t at, const uint8_t *src, uint32_t bytes)
{
	uint32_t done = 0, off = 0;

	ASSERT(at <= net->window.bytes && bytes <= net->window.bytes - at);
	for (unsigned int i = 0; done < bytes; i++) {
		const struct iovec *iov = &net->window.iov[i];
		const uint32_t end = off + (uint32_t)iov->iov_len;

		if (end > at + done) {
			const uint32_t part = MIN(end - (at + done), bytes - done);

			memcpy((uint8_t *)iov->iov_base + (at + done - off), src + done, part);
			done += part;
		}
		off = end;
	}
}

static void rx_done(struct net *net, uint32_t bytes)
{
	uint32_t left = bytes;
	unsigned int nr = 0, nr_iov = 0;
	uint8_t num_buffers[2];

	for (uint32_t room = 0; room < bytes; nr++)
		room += net->window.chains[nr].bytes;
	put_le16(num_buffers, (uint16_t)nr); // a tap leaves it to us
	window_write(net, offsetof(struct virtio_net_hdr_v1, num_buffers), num_buffers,
		sizeof(num_buffers));
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
	gone(&net->rx, bytes - HDR_BYTES);
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
	const uint32_t bytes = net->spill_bytes;

	net->spill_bytes = 0;
	// Of buffers so small no window is large enough.
	if (net->window.bytes < net->spill_at + bytes) {
		net->stats.rx_dropped++;
		return;
	}
	window_write(net, net->spill_at, net->spill, bytes);
	rx_done(net, net->spill_at + bytes);
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

static uint32_t stream_len(const struct net *net)
{
	return be32toh(get_le32(net->stream.in + net->stream.in_from));
}

// Whether there is a whole packet in what was read of a stream; reads more if need be. False if
// there is none yet, or never will be.
static bool stream_ready(struct net *net)
{
	for (;;) {
		const uint32_t have = net->stream.in_to - net->stream.in_from;
		ssize_t n;

		if (have >= STREAM_LEN_BYTES) {
			const uint32_t len = stream_len(net);

			if (len < ETH_MIN_BYTES || len > FRAME_BYTES) {
				link_down(net, EPROTO);
				return false;
			}
			if (have >= STREAM_LEN_BYTES + len)
				return true;
		}
		memmove(net->stream.in, net->stream.in + net->stream.in_from, have);
		net->stream.in_from = 0;
		net->stream.in_to = have;
		n = read(net->fd, net->stream.in + have, sizeof(net->stream.in) - have);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return false;
		if (n <= 0) {
			link_down(net, n < 0 ? errno : EPIPE);
			return false;
		}
		net->stream.in_to += (uint32_t)n;
	}
}

// Gives the guest the packet that is ready, or drops it where no window is large enough.
static void stream_deliver(struct net *net)
{
	const uint32_t len = stream_len(net);
	// Nothing on the way between two programs of this host breaks a packet.
	const struct virtio_net_hdr_v1 hdr = {
		.flags = has(net, VIRTIO_NET_F_GUEST_CSUM) ? VIRTIO_NET_HDR_F_DATA_VALID : 0};

	if (net->window.bytes < HDR_BYTES + len) {
		net->stats.rx_dropped++;
	} else {
		window_write(net, 0, (const uint8_t *)&hdr, HDR_BYTES);
		window_write(net, HDR_BYTES,
			net->stream.in + net->stream.in_from + STREAM_LEN_BYTES, len);
		rx_done(net, (uint32_t)HDR_BYTES + len);
	}
	net->stream.in_from += STREAM_LEN_BYTES + len;
}

// A turn's packets. False when there is nothing more to do for now.
static bool receive_one(struct net *net)
{
	// A packet that has begun is brought to its end, or waits for buffers.
	const bool stream = net->kind == VIRTIO_NET_STREAM;
	const bool begun = stream || net->spill_bytes;
	uint32_t need = net->rx_need_bytes;

	if (!net->spill_bytes && !may_go(net, &net->rx))
		return false;
	if (stream && !stream_ready(net))
		return false;
	if (begun)
		need = stream ? (uint32_t)HDR_BYTES + stream_len(net)
			      : net->spill_at + net->spill_bytes;
	if (window_fill(net, need) < 0) {
		virtio_dev_set_needs_reset(&net->dev, "bad chain in the rx queue");
		return false;
	}
	net->rx_starved = begun ? net->window.bytes < need && !window_full(net)
				: !net->window.nr_chains;
	if (net->rx_starved)
		return false;
	if (stream)
		stream_deliver(net);
	else if (begun)
		finish_spill(net);
	else
		return receive(net);
	return true;
}

static void run_rx(struct net *net)
{
	unsigned int i;

	net->rx_starved = false;
	for (i = 0; (i < PACKETS_PER_TURN && net->stats.link_up) || net->spill_bytes; i++)
		if (!receive_one(net))
			break;
	virtio_dev_publish(&net->dev, 1U << RX_QUEUE);
	// What of a stream has been read already makes the socket no more readable.
	if (i == PACKETS_PER_TURN && net->kind == VIRTIO_NET_STREAM)
		virtio_dev_notify_again(&net->dev, RX_QUEUE);
}

// --- From the guest --------------------------------------------------------------------------

// Of a stream: the packet after its length. What the socket does not take of it is kept.
static ssize_t stream_send(struct net *net, const struct virtq_chain *chain)
{
	const uint32_t len = chain->readable_bytes - (uint32_t)HDR_BYTES;
	const uint32_t be_len = htobe32(len);
	struct iovec iov[1 + VIRTQ_CHAIN_MAX] = {{(void *)(uintptr_t)&be_len, sizeof(be_len)}};
	struct msghdr msg = {.msg_iov = iov};
	size_t bytes;
	ssize_t n;

	msg.msg_iovlen = 1 + virtq_chain_iov(chain, false, HDR_BYTES, len, iov + 1, VIRTQ_CHAIN_MAX,
				     &bytes);
	n = sendmsg(net->fd, &msg, MSG_NOSIGNAL);
	if (n < 0 || (size_t)n == STREAM_LEN_BYTES + len)
		return n;
	// The guest may change it meanwhile, never its length.
	memcpy(net->stream.out, &be_len, STREAM_LEN_BYTES);
	virtq_chain_read(chain, HDR_BYTES, net->stream.out + STREAM_LEN_BYTES, len);
	net->stream.out_from = (uint32_t)n;
	net->stream.out_to = STREAM_LEN_BYTES + len;
	return n;
}

// Whether nothing is left of a packet of which a part was sent.
static bool stream_flush(struct net *net)
{
	const uint32_t left = net->stream.out_to - net->stream.out_from;
	ssize_t n;

	if (!left)
		return true;
	n = send(net->fd, net->stream.out + net->stream.out_from, left, MSG_NOSIGNAL);
	if (n < 0 && errno != EAGAIN && errno != EINTR)
		n = left; // nobody is there any more
	net->stream.out_from += n > 0 ? (uint32_t)n : 0;
	return net->stream.out_from == net->stream.out_to;
}

// False if the host takes no more now.
static bool send_packet(struct net *net, const struct virtq_chain *chain)
{
	struct iovec iov[VIRTQ_CHAIN_MAX];
	size_t bytes;
	unsigned int nr;
	ssize_t n = -1;

	const size_t len = chain->readable_bytes - MIN(chain->readable_bytes, HDR_BYTES);

	const bool stream = net->kind == VIRTIO_NET_STREAM;

	// Who is at the other end of a stream may hang up on what is no frame; a tap refuses it.
	if (len >= (stream ? ETH_MIN_BYTES : 1U) &&
		len <= (stream ? STREAM_FRAME_BYTES : FRAME_BYTES)) {
		if (net->kind == VIRTIO_NET_STREAM) {
			n = stream_send(net, chain);
		} else {
			nr = virtq_chain_iov(chain, false, 0, chain->readable_bytes, iov,
				VIRTQ_CHAIN_MAX, &bytes);
			n = writev(net->fd, iov, (int)nr);
		}
		if (n < 0 && errno == EAGAIN)
			return false;
	}
	if (n < 0) {
		net->stats.tx_dropped++;
	} else {
		net->stats.tx_packets++;
		net->stats.tx_bytes += chain->readable_bytes - HDR_BYTES;
		gone(&net->tx, chain->readable_bytes - HDR_BYTES);
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
		if (!stream_flush(net)) {
			net->tx_blocked = true;
			break;
		}
		if (!may_go(net, &net->tx))
			break;
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

static void rx_may_go(struct loop_timer *timer)
{
	struct net *net = container_of(timer, struct net, rx.timer);

	net->rx.limited = false;
	if (virtio_dev_running(&net->dev))
		run_rx(net);
	update_watch(net);
}

static void tx_may_go(struct loop_timer *timer)
{
	struct net *net = container_of(timer, struct net, tx.timer);

	net->tx.limited = false;
	if (virtio_dev_running(&net->dev))
		run_tx(net);
	update_watch(net);
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

	if (net->kind == VIRTIO_NET_TAP && ioctl(net->fd, TUNSETOFFLOAD, offloads) < 0)
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
	loop_timer_cancel(dev->env.loop, &net->rx.timer);
	loop_timer_cancel(dev->env.loop, &net->tx.timer);
	net->rx.limited = net->tx.limited = false;
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
	loop_timer_cancel(dev->env.loop, &net->rx.timer);
	loop_timer_cancel(dev->env.loop, &net->tx.timer);
	virtio_dev_fini(dev);
	fd_close(&net->fd);
	free(net);
}

#define GIVEN_BACK "given back, or dropped, when it is drained"

STATE_TABLE(static, net_state, struct net, "net", NULL,
	STATE_NESTED(struct net, dev, &virtio_dev_state), STATE_FIXED_U16(struct net, mtu),
	STATE_TRANSIENT(struct net, fd, "opened anew, and given its offloads"),
	STATE_TRANSIENT(struct net, watch, "of this monitor"),
	STATE_TRANSIENT(struct net, kind, "as the machine's network is now"),
	STATE_TRANSIENT(
		struct net, rx, "limits are the machine's; nothing waits when it is drained"),
	STATE_TRANSIENT(
		struct net, tx, "limits are the machine's; nothing waits when it is drained"),
	STATE_TRANSIENT(struct net, stream, "a packet half received or half sent is lost"),
	STATE_TRANSIENT(struct net, unused4, "padding"),
	STATE_TRANSIENT(struct net, rx_starved, "found out again"),
	STATE_TRANSIENT(struct net, tx_blocked, "found out again"),
	STATE_TRANSIENT(struct net, rx_need_bytes, "made at activation"),
	STATE_TRANSIENT(struct net, window, GIVEN_BACK),
	STATE_TRANSIENT(struct net, spill_at, GIVEN_BACK),
	STATE_TRANSIENT(struct net, spill_bytes, GIVEN_BACK),
	STATE_TRANSIENT(struct net, spill, GIVEN_BACK),
	STATE_TRANSIENT(struct net, unused1, "padding"),
	STATE_TRANSIENT(struct net, unused2, "padding"),
	STATE_TRANSIENT(struct net, unused3, "padding"),
	STATE_TRANSIENT(struct net, stats, "counted anew"),
	STATE_TRANSIENT(struct net, segs, "of the chain at hand"));

static const struct virtio_ops net_ops = {
	.name = "net",
	.device_id = VIRTIO_ID_NET,
	.activate = net_activate,
	.queue_notify = net_queue_notify,
	.drain = net_drain,
	.resume = net_resume,
	.state = &net_state,
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
		.features = FEATURES | (params->kind == VIRTIO_NET_STREAM ? 0 : FEATURES_OFFLOAD),
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
	net->kind = params->kind;
	net->rx = (struct direction){.rate = params->rate, .timer.fire = rx_may_go};
	net->tx = (struct direction){.rate = params->rate, .timer.fire = tx_may_go};
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

static uint16_t mtu_of(const char *ifname)
{
	struct ifreq ifr = {0};
	CLEANUP_FD int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	memcpy(ifr.ifr_name, ifname, strlen(ifname));
	if (fd < 0 || ioctl(fd, SIOCGIFMTU, &ifr) < 0)
		return VIRTIO_NET_MTU_DEFAULT;
	return (uint16_t)MAX(
		MIN((unsigned int)ifr.ifr_mtu, VIRTIO_NET_MTU_MAX), VIRTIO_NET_MTU_MIN);
}

static int tap_error(const char *ifname, struct err *err)
{
	const int r = -errno;

	if (r == -EBUSY)
		return err_set(err, r, "tap %s: in use, by another machine perhaps", ifname);
	if (r == -EPERM)
		return err_set(err, r,
			"tap %s: not yours; as root: ip tuntap add %s mode tap user YOU", ifname,
			ifname);
	return err_errno(err, r, "tap %s", ifname);
}

int virtio_net_open_tap(const char *ifname, int *ret_fd, uint16_t *ret_mtu, struct err *err)
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
		return tap_error(ifname, err);
	// Read back: with another size every packet would be garbled.
	if (ioctl(fd, TUNSETVNETHDRSZ, &hdr_bytes) < 0 || ioctl(fd, TUNGETVNETHDRSZ, &back) < 0)
		return err_errno(err, -errno, "tap %s: header size", ifname);
	if (back != hdr_bytes)
		return err_set(err, -EPROTO, "tap %s: header of %d bytes", ifname, back);
	*ret_mtu = mtu_of(ifname);
	*ret_fd = TAKE_FD(fd);
	return 0;
}
