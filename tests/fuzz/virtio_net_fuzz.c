// SPDX-License-Identifier: Apache-2.0
// Fuzzes the network device from both sides: what the guest gives it as headers, packets and
// buffers, and what comes from the host, packet by packet (as from a tap) or as a stream. A model
// tells what has to arrive where. Nothing is written outside of what was offered, nothing arrives
// out of order or changed, what is missing was counted as dropped, and whatever has happened the
// device still carries a sound packet in the end.
//
// Input: a byte for the kind and the features, then steps.
#include <endian.h>
#include <errno.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_net.h>
#include <linux/virtio_ring.h>
#include <sys/socket.h>
#include <unistd.h>

#include "devices/virtio_net.h"
#include "tests/support/fake_driver.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RX, TX };

#define HDR              12U
#define FRAME_MAX        (65536U + 18U)
#define FRAME_MIN        14U // of a stream
#define STREAM_FRAME_MAX 65535U // from the guest
#define STEPS_MAX        60U
#define PACKETS_MAX      (STEPS_MAX + 8U)
#define RX_SLOTS         64U
#define RX_STRIDE        4096U
#define RX_OFF           64U // of the buffer in its slot; around it is what must stay
#define RX_MAX           3900U
#define TX_SLOTS         6U
#define TX_STRIDE        (96U * 1024)
#define TX_MAX           (HDR + FRAME_MAX + 1000U)
#define CANARY           0xa5
#define STATUS_LIED      64U
#define LAST_PACKET      60U
#define LAST_RX_BYTES    2000U

struct packet {
	uint32_t bytes; // without the header
	uint32_t seq;
};

static struct {
	struct fake_driver fake;
	bool up;
	int host;
	bool stream, mergeable, csum;
	uint64_t features;
	gpa_t rx_mem, tx_mem;
	uint32_t rx_bytes[RX_SLOTS]; // 0: free
	int rx_slot_of[VIRTQ_SIZE_MAX];
	bool tx_busy[TX_SLOTS];
	int tx_slot_of[VIRTQ_SIZE_MAX];
	// What the host has sent, and how far the guest is with it; and the reverse.
	struct packet to_guest[PACKETS_MAX], to_host[PACKETS_MAX];
	unsigned int nr_to_guest, at_guest, nr_to_host, at_host;
	uint64_t arrived, skipped;
	bool stuck; // the host's socket has room for a part of what it was to send
	bool poisoned; // the stream has lied: no more comes of it
	uint8_t in[4 + FRAME_MAX + HDR];
	uint32_t in_bytes;
} t;

// What packet seq is made of.
static const uint8_t *content(uint32_t seq)
{
	static uint8_t noise[4 * PACKETS_MAX * 61 + TX_MAX];

	if (!noise[0])
		for (uint32_t i = 0; i < sizeof(noise); i++)
			noise[i] = (uint8_t)(1 + (i * 2654435761U >> 13));
	return noise + seq * 61;
}

static struct virtio_net_stats stats(void)
{
	struct virtio_net_stats s;

	virtio_net_get_stats(t.fake.dev, &s);
	return s;
}

static bool lied(void)
{
	return fake_status(&t.fake) & STATUS_LIED;
}

static uint8_t canary[RX_STRIDE];

// Around the slot's buffer nothing has changed.
static void check_slot(unsigned int slot)
{
	const uint32_t end = RX_OFF + t.rx_bytes[slot];
	uint8_t all[RX_STRIDE];

	guest_mem_read(&t.fake.mem, GPA(t.rx_mem.v + (uint64_t)slot * RX_STRIDE), all, RX_STRIDE);
	FUZZ_CHECK(memcmp(all, canary, RX_OFF) == 0);
	FUZZ_CHECK(memcmp(all + end, canary, RX_STRIDE - end) == 0);
}

// --- The guest's side ----------------------------------------------------------------------------

static unsigned int cut(
	struct fuzz_input *in, struct fake_buf *bufs, gpa_t gpa, uint32_t bytes, bool writable)
{
	const unsigned int max = 1 + fuzz_u8(in) % 6;
	unsigned int nr = 0;

	while (bytes) {
		const uint32_t want = 1 + (nr % 2 ? fuzz_u16(in) : fuzz_u8(in) % 32U);
		const uint32_t len = nr + 1 == max ? bytes : MIN(bytes, want);

		bufs[nr++] = (struct fake_buf){gpa, len, writable};
		gpa.v += len;
		bytes -= len;
	}
	return nr;
}

static void add(unsigned int queue, const struct fake_buf *bufs, unsigned int nr, int *slot_of,
	unsigned int slot)
{
	const int head = fake_add(&t.fake, queue, bufs, nr);

	FUZZ_CHECK(head >= 0); // there are descriptors for all slots
	slot_of[head] = (int)slot;
	fake_kick(&t.fake, queue);
}

static void offer(struct fuzz_input *in, uint32_t bytes)
{
	struct fake_buf bufs[8];
	unsigned int slot = 0;
	gpa_t gpa;

	while (slot < RX_SLOTS && t.rx_bytes[slot])
		slot++;
	if (slot == RX_SLOTS || t.fake.queues[RX].nr_free < ARRAY_SIZE(bufs))
		return;
	gpa = GPA(t.rx_mem.v + (uint64_t)slot * RX_STRIDE);
	guest_mem_write(&t.fake.mem, gpa, canary, sizeof(canary));
	t.rx_bytes[slot] = bytes;
	add(RX, bufs, cut(in, bufs, GPA(gpa.v + RX_OFF), bytes, true), t.rx_slot_of, slot);
}

// What has come of a packet is one of those that were sent, none of them older than the last.
static void match(const uint8_t *packet, uint32_t bytes)
{
	static const uint8_t zeros[9];

	FUZZ_CHECK(bytes >= HDR);
	if (t.stream) {
		FUZZ_CHECK(packet[0] == (t.csum ? VIRTIO_NET_HDR_F_DATA_VALID : 0));
		FUZZ_CHECK(memcmp(packet + 1, zeros, sizeof(zeros)) == 0);
	}
	for (;; t.at_guest++) {
		FUZZ_CHECK(t.at_guest < t.nr_to_guest); // else nobody has sent it
		const struct packet *sent = &t.to_guest[t.at_guest];
		const uint32_t have = bytes - HDR;
		// The socket of the fuzzer cuts off where a tap would drop.
		const bool fits = sent->bytes == have ||
				  (!t.stream && !t.mergeable && have < sent->bytes);

		if (fits && memcmp(packet + HDR, content(sent->seq), have) == 0 &&
			(t.stream || memcmp(packet, content(sent->seq + 1), HDR - 2) == 0)) {
			t.at_guest++;
			t.arrived++;
			return;
		}
		t.skipped++;
	}
}

static void guest_receive(void)
{
	static uint8_t packet[RX_SLOTS * RX_MAX];
	uint32_t bytes = 0, written;
	unsigned int left = 0;
	int head;

	while (fake_get_used(&t.fake, RX, &head, &written)) {
		const unsigned int slot = (unsigned int)t.rx_slot_of[head];

		FUZZ_CHECK(written <= t.rx_bytes[slot]);
		check_slot(slot);
		guest_mem_read(&t.fake.mem, GPA(t.rx_mem.v + (uint64_t)slot * RX_STRIDE + RX_OFF),
			packet + bytes, written);
		if (!left) {
			FUZZ_CHECK(written >= HDR);
			left = get_le16(packet + 10);
			FUZZ_CHECK(left > 0 && left <= RX_SLOTS && (left == 1 || t.mergeable));
		}
		// All but the last one are full.
		FUZZ_CHECK(left == 1 || written == t.rx_bytes[slot]);
		t.rx_bytes[slot] = 0;
		bytes += written;
		if (--left)
			continue;
		match(packet, bytes);
		bytes = 0;
	}
	FUZZ_CHECK(!left);
}

static void guest_sent(void)
{
	int head;

	while (fake_get_used(&t.fake, TX, &head, NULL))
		t.tx_busy[t.tx_slot_of[head]] = false;
}

static bool guest_send(struct fuzz_input *in, uint32_t bytes)
{
	static uint8_t packet[TX_MAX];
	struct fake_buf bufs[8];
	unsigned int slot = 0, nr;
	gpa_t gpa;

	while (slot < TX_SLOTS && t.tx_busy[slot])
		slot++;
	if (slot == TX_SLOTS || t.nr_to_host == PACKETS_MAX)
		return false;
	memcpy(packet, content(t.nr_to_host), bytes);
	for (unsigned int i = 0; i < HDR && in->left; i++)
		packet[i] = fuzz_u8(in);
	gpa = GPA(t.tx_mem.v + slot * TX_STRIDE);
	guest_mem_write(&t.fake.mem, gpa, packet, bytes);
	nr = cut(in, bufs, gpa, bytes, false);
	// A part that is the device's to write to is no harm.
	if (!nr || fuzz_u8(in) > 240)
		bufs[nr++] = (struct fake_buf){GPA(gpa.v + TX_MAX), 100, true};
	if (bytes >= HDR + (t.stream ? FRAME_MIN : 1U) &&
		bytes <= HDR + (t.stream ? STREAM_FRAME_MAX : FRAME_MAX)) {
		t.to_host[t.nr_to_host] = (struct packet){bytes, t.nr_to_host};
		t.nr_to_host++;
	}
	t.tx_busy[slot] = true;
	add(TX, bufs, nr, t.tx_slot_of, slot);
	return true;
}

// Makes the device start anew.
static void start(void)
{
	if (t.rx_mem.v) {
		guest_receive();
		guest_sent();
		// What the device has not taken yet is lost.
		t.nr_to_host = (unsigned int)stats().tx_packets;
	}
	for (unsigned int i = 0; i < RX_SLOTS; i++)
		if (t.rx_bytes[i])
			check_slot(i);
	fake_start_with(&t.fake, t.features, 256);
	t.rx_mem = fake_alloc(&t.fake, RX_SLOTS * RX_STRIDE);
	t.tx_mem = fake_alloc(&t.fake, TX_SLOTS * TX_STRIDE);
	memset(t.rx_bytes, 0, sizeof(t.rx_bytes));
	memset(t.tx_busy, 0, sizeof(t.tx_busy));
}

// What no driver does.
static void guest_lie(struct fuzz_input *in)
{
	const unsigned int queue = fuzz_u8(in) % 2;
	const uint8_t what = fuzz_u8(in);
	const uint16_t idx = t.fake.queues[queue].free_head;

	if (!t.fake.queues[queue].nr_free)
		return;
	switch (what % 5) {
	case 0: // not in RAM
		fake_put_desc(&t.fake, queue, idx, FAKE_RAM_BYTES - what, 4096,
			queue == RX ? VRING_DESC_F_WRITE : 0, 0);
		fake_put_avail(&t.fake, queue, idx);
		break;
	case 1: // for ever
		fake_put_desc(&t.fake, queue, idx, t.rx_mem.v, 1, VRING_DESC_F_NEXT, idx);
		fake_put_avail(&t.fake, queue, idx);
		break;
	case 2: // no such head
		fake_put_avail(&t.fake, queue, (uint16_t)(256 + what));
		break;
	case 3: // more than there are
		fake_put_avail_idx(
			&t.fake, queue, (uint16_t)(t.fake.queues[queue].avail_idx + 257 + what));
		break;
	default: // no room for more than the header
		if (queue == TX)
			return;
		fake_put_desc(
			&t.fake, queue, idx, t.rx_mem.v, 1 + what % HDR, VRING_DESC_F_WRITE, 0);
		fake_put_avail(&t.fake, queue, idx);
	}
	fake_kick(&t.fake, queue);
	fake_run(&t.fake);
	start();
}

// --- The host's side -----------------------------------------------------------------------------

// False unless all of it was sent.
static bool host_write(const uint8_t *data, uint32_t bytes, uint32_t piece)
{
	uint32_t done = 0;

	while (done < bytes) {
		const ssize_t n = send(t.host, data + done, MIN(piece, bytes - done), MSG_NOSIGNAL);

		if (n < 0) {
			FUZZ_CHECK(errno == EAGAIN);
			t.stuck = done > 0;
			return false;
		}
		done += (uint32_t)n;
		if (done < bytes)
			fake_run(&t.fake);
	}
	return true;
}

// bytes: without the header, or as the stream's length says.
static void host_send(uint32_t bytes, uint32_t piece)
{
	static uint8_t packet[HDR + 4 + FRAME_MAX];
	const uint32_t seq = t.nr_to_guest * 2, be_bytes = htobe32(bytes);
	const bool good = bytes >= FRAME_MIN && bytes <= FRAME_MAX;

	if (t.nr_to_guest == PACKETS_MAX || t.stuck || t.poisoned)
		return;
	if (t.stream) {
		memcpy(packet, &be_bytes, 4);
		memcpy(packet + 4, content(seq), MIN(bytes, FRAME_MAX));
		if (!host_write(packet, 4 + MIN(bytes, FRAME_MAX), piece))
			return;
		t.poisoned = !good;
		if (!good)
			return;
	} else {
		bytes = MIN(bytes, FRAME_MAX);
		memcpy(packet, content(seq + 1), HDR);
		memcpy(packet + HDR, content(seq), bytes);
		if (send(t.host, packet, HDR + bytes, MSG_NOSIGNAL) < 0)
			return;
	}
	t.to_guest[t.nr_to_guest++] = (struct packet){bytes, seq};
}

static void host_got(const uint8_t *data, uint32_t bytes)
{
	const struct packet *sent = &t.to_host[t.at_host];
	const uint32_t skip = t.stream ? HDR : 0;

	FUZZ_CHECK(t.at_host < t.nr_to_host);
	FUZZ_CHECK(bytes == sent->bytes - skip);
	// The header is the guest's own affair, and a tap's.
	FUZZ_CHECK(memcmp(data + HDR - skip, content(sent->seq) + HDR, sent->bytes - HDR) == 0);
	t.at_host++;
}

static void host_receive(void)
{
	ssize_t n;

	while ((n = read(t.host, t.in + t.in_bytes, sizeof(t.in) - t.in_bytes)) > 0) {
		uint32_t len = 0;

		if (!t.stream) {
			host_got(t.in, (uint32_t)n);
			continue;
		}
		t.in_bytes += (uint32_t)n;
		while (t.in_bytes >= 4) {
			memcpy(&len, t.in, 4);
			len = be32toh(len);
			FUZZ_CHECK(len >= FRAME_MIN && len <= STREAM_FRAME_MAX);
			if (t.in_bytes < 4 + len)
				break;
			host_got(t.in + 4, len);
			t.in_bytes -= 4 + len;
			memmove(t.in, t.in + 4 + len, t.in_bytes);
		}
	}
}

static void create(uint8_t how)
{
	const uint64_t no_merge = 1ULL << VIRTIO_NET_F_MRG_RXBUF,
		       no_csum = 1ULL << VIRTIO_NET_F_GUEST_CSUM | 1ULL << VIRTIO_NET_F_GUEST_TSO4 |
				 1ULL << VIRTIO_NET_F_GUEST_TSO6,
		       no_event = 1ULL << VIRTIO_RING_F_EVENT_IDX;
	struct virtio_net_params params = {.kind = how & 1 ? VIRTIO_NET_STREAM : VIRTIO_NET_PACKETS,
		.mac = {2, 0, 0, 0, 0, 1},
		.mtu = how & 2 ? VIRTIO_NET_MTU_DEFAULT : 65520};
	struct virtio_env env;
	struct virtio_dev *dev;
	int fds[2], size = 1 << 18;

	if (!t.up)
		fake_init(&t.fake);
	t.up = true;
	memset(canary, CANARY, sizeof(canary));
	if (socketpair(AF_UNIX,
		    (how & 1 ? SOCK_STREAM : SOCK_SEQPACKET) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
		    fds) < 0)
		abort();
	setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	params.fd = fds[0];
	t.host = fds[1];
	env = fake_env(&t.fake);
	if (virtio_net_create(&dev, &params, &env, NULL) < 0)
		abort();
	fake_attach(&t.fake, dev);
	t.stream = how & 1;
	t.mergeable = !(how & 4);
	t.csum = !(how & 8);
	t.features = fake_device_features(&t.fake) & ~(t.mergeable ? 0 : no_merge) &
		     ~(t.csum ? 0 : no_csum) & ~(how & 16 ? no_event : 0);
	t.rx_mem = GPA(0);
	memset(t.rx_bytes, 0, sizeof(t.rx_bytes));
	t.nr_to_guest = t.at_guest = t.nr_to_host = t.at_host = 0;
	t.arrived = t.skipped = 0;
	t.stuck = t.poisoned = false;
	t.in_bytes = 0;
	start();
}

// --- Steps ---------------------------------------------------------------------------------------

static uint32_t pick_bytes(struct fuzz_input *in)
{
	const uint8_t how = fuzz_u8(in);

	if (how < 120)
		return how;
	return how < 200 ? fuzz_u16(in) % 3000U : how < 252 ? fuzz_u16(in) : FRAME_MAX + how - 254U;
}

static void on_drained(void *opaque)
{
	*(bool *)opaque = true;
}

static void step(struct fuzz_input *in)
{
	const uint8_t what = fuzz_u8(in);
	bool drained = false;
	uint32_t bytes;

	if (what < 80) {
		for (unsigned int i = 0; i <= what % 16U; i++)
			offer(in, HDR + 1 + fuzz_u16(in) % (RX_MAX - HDR));
	} else if (what < 130) {
		bytes = pick_bytes(in);
		if (what < 127 || !t.stream)
			bytes = MAX(MIN(bytes, FRAME_MAX), FRAME_MIN);
		else
			bytes = fuzz_u32(in);
		host_send(bytes, what % 2 ? 1 + fuzz_u16(in) % 100 + bytes / 4 : UINT32_MAX);
	} else if (what < 132 && !t.stream) {
		// No packet: too short for a header.
		(void)!send(t.host, &what, 1, MSG_NOSIGNAL);
	} else if (what < 200) {
		bytes = pick_bytes(in);
		guest_send(in, what < 190 ? HDR + 1 + MIN(bytes, FRAME_MAX - 1) : bytes);
	} else if (what < 215) {
		host_receive();
	} else if (what < 225) {
		virtio_dev_drain(t.fake.dev, on_drained, &drained);
		FUZZ_CHECK(drained);
		guest_receive();
		fake_run(&t.fake);
		virtio_dev_resume(t.fake.dev);
	} else if (what < 235) {
		start();
	} else if (what < 245) {
		guest_lie(in);
	}
	if (what % 4)
		fake_run(&t.fake);
	FUZZ_CHECK(!lied());
	guest_receive();
	guest_sent();
}

static bool all_sent(void *opaque)
{
	(void)opaque;
	host_receive();
	guest_sent();
	return t.at_host == t.nr_to_host;
}

static bool last_came(void *opaque)
{
	struct fuzz_input none = {0};

	(void)opaque;
	offer(&none, LAST_RX_BYTES);
	guest_receive();
	return t.at_guest == t.nr_to_guest;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_input in = {data, size}, none = {0};
	struct virtio_net_stats end;

	create(fuzz_u8(&in));
	for (unsigned int i = 0; i < STEPS_MAX && in.left; i++)
		step(&in);
	// It works still, both ways.
	FUZZ_CHECK(fake_run_until(&t.fake, all_sent, NULL));
	FUZZ_CHECK(guest_send(&none, HDR + LAST_PACKET));
	FUZZ_CHECK(fake_run_until(&t.fake, all_sent, NULL));
	// With buffers that a packet fits into.
	start();
	if (!t.poisoned && !t.stuck) {
		const unsigned int before = t.nr_to_guest;

		host_send(LAST_PACKET, UINT32_MAX);
		// What the host's socket had no room for was not sent.
		if (t.nr_to_guest > before && !t.stuck)
			FUZZ_CHECK(fake_run_until(&t.fake, last_came, NULL));
	}
	end = stats();
	FUZZ_CHECK(end.rx_packets == t.arrived);
	FUZZ_CHECK(end.tx_packets == t.nr_to_host);
	FUZZ_CHECK(end.rx_dropped >= t.skipped);
	fake_detach(&t.fake);
	fd_close(&t.host);
	fake_irqs(&t.fake);
	return 0;
}
