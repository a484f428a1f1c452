// SPDX-License-Identifier: Apache-2.0
// devices/virtio_net: packets arrive whole and in order in whatever buffers the guest gives, and
// neither side can make it hold more than one.
#include "tests/support/test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_net.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "devices/virtio_net.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"
#include "vmm/base/fd.h"

#define RX        0U
#define TX        1U
#define HDR       12U
#define GSO       65536U
#define VERSION_1 (1ULL << VIRTIO_F_VERSION_1)
#define F(name)   (1ULL << VIRTIO_NET_F_##name)

static struct {
	struct fake_driver fake;
	int host; // the other end of the socket that stands for the tap
	gpa_t mem; // 1 MiB of buffers
} t;

static int create_on(int fd, enum virtio_net_kind kind, struct virtio_dev **ret_dev,
	const struct virtio_env *env, struct err *err)
{
	const struct virtio_net_params params = {
		.fd = fd, .kind = kind, .mac = {2, 0, 0, 1, 2, 3}, .mtu = 1500};

	return virtio_net_create(ret_dev, &params, env, err);
}

static int create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	int fds[2], size = 1 << 20, r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) < 0)
		return -errno;
	setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	r = create_on(fds[0], VIRTIO_NET_PACKETS, ret_dev, env, err);
	if (r < 0)
		fd_close(&fds[0]);
	fd_close(&t.host);
	t.host = fds[1];
	return r;
}

static void start(uint64_t features)
{
	fake_start_with(&t.fake, features, 256);
	t.mem = fake_alloc(&t.fake, 2 * MIB);
	fake_irqs(&t.fake);
}

static int setup(void **state)
{
	struct virtio_env env;
	struct virtio_dev *dev;

	(void)state;
	t.host = -1;
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (create(&dev, &env, NULL) < 0)
		return -1;
	fake_attach(&t.fake, dev);
	start(fake_device_features(&t.fake));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&t.fake);
	fd_close(&t.host);
	return 0;
}

static struct virtio_net_stats stats(void)
{
	struct virtio_net_stats s;

	virtio_net_get_stats(t.fake.dev, &s);
	return s;
}

static uint8_t pattern(uint32_t at, uint32_t seed)
{
	return (uint8_t)(at * 29 >> 3 ^ seed);
}

// A packet of so many bytes after its header, on its way to the guest.
static void host_send(uint32_t bytes, uint32_t seed)
{
	uint8_t *packet = malloc(HDR + bytes);

	assert_non_null(packet);
	memset(packet, 0xcc, HDR);
	for (uint32_t i = 0; i < bytes; i++)
		packet[HDR + i] = pattern(i, seed);
	assert_int_equal(write(t.host, packet, HDR + bytes), HDR + bytes);
	free(packet);
}

// nr buffers of so many bytes each, in pieces.
static void offer(unsigned int nr, uint32_t bytes, unsigned int pieces, uint64_t from)
{
	struct fake_buf bufs[32];

	for (unsigned int i = 0; i < nr; i++) {
		for (unsigned int k = 0; k < pieces; k++)
			bufs[k] = (struct fake_buf){
				GPA(t.mem.v + from + (uint64_t)i * bytes + k * (bytes / pieces)),
				bytes / pieces, true};
		assert_true(fake_add(&t.fake, RX, bufs, pieces) >= 0);
	}
	fake_kick(&t.fake, RX);
}

static bool has_used(void *opaque)
{
	uint8_t idx[2];
	const unsigned int queue = *(unsigned int *)opaque;

	guest_mem_read(&t.fake.mem, GPA(t.fake.queues[queue].used.v + 2), idx, 2);
	return get_le16(idx) != t.fake.queues[queue].used_idx;
}

// Takes a packet whose buffers lie one behind the other, the first at `from`.
static uint16_t guest_receive(uint64_t from, uint32_t buf_bytes, uint32_t bytes, uint32_t seed)
{
	unsigned int queue = RX;
	uint32_t written, total = 0;
	uint8_t hdr[HDR], *data = malloc(HDR + bytes);
	uint16_t nr;

	assert_non_null(data);
	if (!fake_run_until(&t.fake, has_used, &queue))
		fail_msg("no packet of %u bytes", bytes);
	guest_mem_read(&t.fake.mem, GPA(t.mem.v + from), hdr, HDR);
	nr = get_le16(hdr + 10);
	for (unsigned int i = 0; i < 10; i++)
		assert_int_equal(hdr[i], 0xcc); // the tap's
	for (uint16_t i = 0; i < nr; i++) {
		assert_true(fake_get_used(&t.fake, RX, NULL, &written));
		assert_int_equal(written,
			i + 1 < nr ? buf_bytes : HDR + bytes - (uint32_t)(nr - 1) * buf_bytes);
		total += written;
	}
	assert_int_equal(total, HDR + bytes);
	guest_mem_read(&t.fake.mem, GPA(t.mem.v + from), data, HDR + bytes);
	for (uint32_t i = 0; i < bytes; i++)
		assert_int_equal(data[HDR + i], pattern(i, seed));
	free(data);
	return nr;
}

static void packets_arrive_in_one_buffer_or_many(void **state)
{
	static const uint32_t sizes[] = {60, 1500, 1524, 1525, 4000, 20000, GSO};
	uint64_t at = 0;

	(void)state;
	offer(200, 1536, 1, 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(sizes); i++) {
		uint16_t nr;

		host_send(sizes[i], i);
		nr = guest_receive(at, 1536, sizes[i], i);
		assert_int_equal(nr, (HDR + sizes[i] + 1535) / 1536);
		at += nr * 1536U;
	}
	assert_int_equal(stats().rx_packets, ARRAY_SIZE(sizes));
	assert_int_equal(stats().rx_dropped, 0);
}

static void any_layout_of_descriptors(void **state)
{
	(void)state;
	offer(8, 200, 25, 0); // eight bytes each: the header lies in two
	host_send(60, 1);
	assert_int_equal(guest_receive(0, 200, 60, 1), 1);
	host_send(300, 2);
	assert_int_equal(guest_receive(200, 200, 300, 2), 2);
}

// A large packet comes when the guest has few buffers: its rest waits, and nothing is lost.
static void a_packet_larger_than_what_is_offered_waits(void **state)
{
	(void)state;
	offer(2, 1536, 1, 0);
	host_send(20000, 5);
	host_send(100, 6);
	fake_run(&t.fake);
	assert_int_equal(stats().rx_packets, 0);
	offer(3, 1536, 1, 2 * 1536);
	fake_run(&t.fake);
	assert_int_equal(stats().rx_packets, 0);
	offer(20, 1536, 1, 5 * 1536);
	assert_int_equal(guest_receive(0, 1536, 20000, 5), 14);
	assert_int_equal(guest_receive(14 * 1536, 1536, 100, 6), 1);
	assert_int_equal(stats().rx_dropped, 0);
	// Many small ones of no matter which number do not hold it either.
	start(fake_device_features(&t.fake));
	offer(120, 512, 1, 0);
	host_send(GSO, 7); // 64 times 512 bytes are not enough for it
	host_send(600, 8);
	assert_int_equal(guest_receive(0, 512, 600, 8), 2);
	assert_int_equal(stats().rx_dropped, 1);
}

static void without_buffers_nothing_is_read_and_nothing_spins(void **state)
{
	uint64_t notifies;

	(void)state;
	host_send(100, 1);
	fake_run(&t.fake);
	notifies = t.fake.dev->nr_notifies;
	for (int i = 0; i < 20; i++)
		fake_run(&t.fake);
	assert_int_equal(t.fake.dev->nr_notifies, notifies);
	assert_int_equal(stats().rx_packets, 0);
	offer(1, 2048, 1, 0);
	assert_int_equal(guest_receive(0, 2048, 100, 1), 1);
}

static void a_turn_is_one_interrupt(void **state)
{
	unsigned int queue = RX, nr = 0;

	(void)state;
	offer(100, 1536, 1, 0);
	fake_run(&t.fake);
	fake_want_irq(&t.fake, RX);
	fake_irqs(&t.fake);
	for (unsigned int i = 0; i < 40; i++)
		host_send(100, i);
	assert_true(fake_run_until(&t.fake, has_used, &queue));
	assert_int_equal(fake_irqs(&t.fake), 1);
	while (fake_get_used(&t.fake, RX, NULL, NULL))
		nr++;
	assert_int_equal(nr, 40);
}

static void guest_send(uint32_t bytes, unsigned int pieces, uint32_t seed)
{
	struct fake_buf bufs[32];
	uint8_t *packet = calloc(1, HDR + bytes);
	const uint32_t total = HDR + bytes;

	assert_non_null(packet);
	for (uint32_t i = 0; i < bytes; i++)
		packet[HDR + i] = pattern(i, seed);
	guest_mem_write(&t.fake.mem, GPA(t.mem.v + MIB), packet, total);
	for (unsigned int i = 0; i < pieces; i++)
		bufs[i] = (struct fake_buf){GPA(t.mem.v + MIB + i * (total / pieces)),
			i + 1 < pieces ? total / pieces : total - (pieces - 1) * (total / pieces),
			false};
	assert_true(fake_add(&t.fake, TX, bufs, pieces) >= 0);
	fake_kick(&t.fake, TX);
	free(packet);
}

static ssize_t host_receive(uint8_t *buf, size_t bytes)
{
	fake_run(&t.fake);
	return read(t.host, buf, bytes);
}

static void the_guests_packets_leave(void **state)
{
	static const uint32_t sizes[] = {1, 60, 1514, 9000, GSO};
	static uint8_t buf[HDR + GSO];

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(sizes); i++) {
		guest_send(sizes[i], 1 + i * 4, i);
		assert_int_equal(host_receive(buf, sizeof(buf)), HDR + sizes[i]);
		for (uint32_t k = 0; k < sizes[i]; k++)
			assert_int_equal(buf[HDR + k], pattern(k, i));
		assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	}
	assert_int_equal(stats().tx_packets, ARRAY_SIZE(sizes));
	// No packet, and one that no wire could carry.
	const struct fake_buf none = {t.mem, HDR, false};
	const struct fake_buf huge = {t.mem, HDR + GSO + 19, false};

	fake_add(&t.fake, TX, &none, 1);
	fake_add(&t.fake, TX, &huge, 1);
	fake_kick(&t.fake, TX);
	assert_int_equal(host_receive(buf, sizeof(buf)), -1);
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	assert_int_equal(stats().tx_dropped, 2);
}

// The host takes no more: the guest's packets wait in its own queue, and leave in order.
static void a_full_host_stops_the_guest(void **state)
{
	static uint8_t buf[HDR + 60000];
	unsigned int sent = 0, got = 0;

	(void)state;
	while (sent < 200) {
		guest_send(60000, 1, 3);
		fake_run(&t.fake);
		sent++;
		if (!fake_get_used(&t.fake, TX, NULL, NULL))
			break;
	}
	assert_true(sent < 200);
	for (int i = 0; i < 10; i++)
		fake_run(&t.fake);
	assert_false(fake_get_used(&t.fake, TX, NULL, NULL));
	while (got < sent) {
		fake_run(&t.fake);
		if (read(t.host, buf, sizeof(buf)) > 0)
			got++;
	}
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	assert_int_equal(stats().tx_packets, sent);
	assert_int_equal(stats().tx_dropped, 0);
}

static void read_pages_are_marked(void **state)
{
	uint64_t bitmap[FAKE_RAM_BYTES / PAGE_BYTES / 64] = {0}, pages = 0;
	const uint64_t first = t.mem.v / PAGE_BYTES;

	(void)state;
	offer(20, PAGE_BYTES, 1, 0);
	fake_run(&t.fake);
	assert_int_equal(guest_mem_track_start(&t.fake.mem, NULL), 0);
	host_send(2 * PAGE_BYTES, 1);
	guest_receive(0, PAGE_BYTES, 2 * PAGE_BYTES, 1);
	guest_mem_track_collect(&t.fake.mem, bitmap);
	for (uint64_t i = 0; i < 20; i++)
		pages |= (bitmap[(first + i) / 64] >> (first + i) % 64 & 1) << i;
	assert_int_equal(pages, 7);
}

static void without_mergeable_buffers(void **state)
{
	(void)state;
	start(VERSION_1 | F(MAC));
	offer(3, 2048, 2, 0);
	host_send(1514, 1);
	assert_int_equal(guest_receive(0, 2048, 1514, 1), 1);
	host_send(1514, 2);
	assert_int_equal(guest_receive(2048, 2048, 1514, 2), 1);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

// What is popped in advance goes back, in order.
static void pause_and_reset_give_the_buffers_back(void **state)
{
	bool drained = false;

	(void)state;
	offer(10, 1536, 1, 0);
	fake_run(&t.fake);
	assert_int_equal(t.fake.dev->queues[RX].nr_in_flight, 10);
	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	assert_true(drained);
	assert_int_equal(t.fake.dev->queues[RX].nr_in_flight, 0);
	assert_int_equal(t.fake.dev->queues[RX].saved.next_avail, 0);
	host_send(100, 1);
	fake_run(&t.fake);
	assert_int_equal(stats().rx_packets, 0);
	virtio_dev_resume(t.fake.dev);
	assert_int_equal(guest_receive(0, 1536, 100, 1), 1);
	start(fake_device_features(&t.fake));
	fake_run(&t.fake);
	offer(1, 1536, 1, 0);
	host_send(100, 2);
	assert_int_equal(guest_receive(0, 1536, 100, 2), 1);
}

static void a_lost_host_is_a_lost_link(void **state)
{
	uint8_t status[2];

	(void)state;
	offer(1, 1536, 1, 0);
	fake_run(&t.fake);
	fd_close(&t.host);
	fake_irqs(&t.fake);
	fake_run(&t.fake);
	assert_false(stats().link_up);
	assert_true(fake_irqs(&t.fake) > 0);
	virtio_mmio_bus_ops.read(t.fake.dev, VIRTIO_MMIO_CONFIG + 6, status, 2);
	assert_int_equal(get_le16(status), 0);
	guest_send(100, 1, 1);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
}

static void configuration(void **state)
{
	static const uint8_t mac[] = {2, 0, 0, 1, 2, 3};
	uint8_t config[12];

	(void)state;
	for (unsigned int i = 0; i < sizeof(config); i++)
		virtio_mmio_bus_ops.read(t.fake.dev, VIRTIO_MMIO_CONFIG + i, config + i, 1);
	assert_memory_equal(config, mac, sizeof(mac));
	assert_int_equal(get_le16(config + 6), VIRTIO_NET_S_LINK_UP);
	assert_int_equal(get_le16(config + 10), 1500);
	const struct virtio_net_params bad = {.fd = t.host, .mtu = 1279};
	struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev;

	assert_int_equal(virtio_net_create(&dev, &bad, &env, NULL), -EINVAL);
}

// --- A stream of packets ---------------------------------------------------------------------

static int stream_with(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err,
	const struct rate_limit *rate)
{
	struct virtio_net_params params = {.kind = VIRTIO_NET_STREAM, .mtu = 65520, .rate = *rate};
	int fds[2], r;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) < 0)
		return -errno;
	params.fd = fds[0];
	r = virtio_net_create(ret_dev, &params, env, err);
	if (r < 0)
		fd_close(&fds[0]);
	fd_close(&t.host);
	t.host = fds[1];
	return r;
}

static int create_stream(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	return stream_with(ret_dev, env, err, &(struct rate_limit){0});
}

static int setup_with(const struct rate_limit *rate)
{
	struct virtio_env env;
	struct virtio_dev *dev;

	t.host = -1;
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (stream_with(&dev, &env, NULL, rate) < 0)
		return -1;
	fake_attach(&t.fake, dev);
	start(fake_device_features(&t.fake));
	return 0;
}

static int setup_stream(void **state)
{
	(void)state;
	return setup_with(&(struct rate_limit){0});
}

static int setup_limited(void **state)
{
	(void)state;
	return setup_with(&(struct rate_limit){.ops.per_s = 200});
}

// A frame as the stream carries it. Returns its length in all.
static uint32_t frame(uint8_t *buf, uint32_t bytes, uint32_t seed)
{
	for (unsigned int i = 0; i < 4; i++)
		buf[i] = (uint8_t)(bytes >> (24 - 8 * i));
	for (uint32_t i = 0; i < bytes; i++)
		buf[4 + i] = pattern(i, seed);
	return 4 + bytes;
}

// As guest_receive(), for what has no header of the host's.
static void guest_receive_bare(uint64_t from, uint32_t bytes, uint32_t seed)
{
	unsigned int queue = RX;
	uint32_t written, total = 0;
	uint8_t hdr[HDR], *data = malloc(bytes);
	uint16_t nr;

	assert_non_null(data);
	if (!fake_run_until(&t.fake, has_used, &queue))
		fail_msg("no packet of %u bytes", bytes);
	guest_mem_read(&t.fake.mem, GPA(t.mem.v + from), hdr, HDR);
	nr = get_le16(hdr + 10);
	assert_int_equal(hdr[0], t.fake.features & F(GUEST_CSUM) ? VIRTIO_NET_HDR_F_DATA_VALID : 0);
	for (unsigned int i = 1; i < 10; i++)
		assert_int_equal(hdr[i], 0);
	for (uint16_t i = 0; i < nr; i++) {
		assert_true(fake_get_used(&t.fake, RX, NULL, &written));
		total += written;
	}
	assert_int_equal(total, HDR + bytes);
	guest_mem_read(&t.fake.mem, GPA(t.mem.v + from + HDR), data, bytes);
	for (uint32_t i = 0; i < bytes; i++)
		assert_int_equal(data[i], pattern(i, seed));
	free(data);
}

static void a_stream_is_cut_into_packets(void **state)
{
	static const uint32_t sizes[] = {14, 60, 1514, 4000, 65534, 65535, 100};
	static uint8_t buf[4 + GSO];
	uint64_t at = 0;

	(void)state;
	assert_int_equal(t.fake.features & (F(CSUM) | F(HOST_TSO4) | F(GUEST_TSO4)), 0);
	offer(200, 1536, 1, 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(sizes); i++) {
		const uint32_t len = frame(buf, sizes[i], i);

		// In pieces that end anywhere.
		for (uint32_t done = 0; done < len;) {
			const uint32_t part = MIN(len - done, 1 + done * 7);

			assert_int_equal(write(t.host, buf + done, part), part);
			fake_run(&t.fake);
			done += part;
		}
		guest_receive_bare(at, sizes[i], i);
		at += (HDR + sizes[i] + 1535) / 1536 * 1536;
	}
	// Many at once, more than a turn takes.
	start(fake_device_features(&t.fake));
	offer(100, 1536, 1, 0);
	for (unsigned int i = 0; i < 100; i++)
		assert_int_equal(write(t.host, buf, frame(buf, 60, i)), 64);
	for (unsigned int i = 0; i < 100; i++)
		guest_receive_bare(i * 1536ULL, 60, i);
	assert_int_equal(stats().rx_dropped, 0);
}

static void a_stream_waits_for_buffers(void **state)
{
	static uint8_t buf[4 + GSO];

	(void)state;
	assert_true(write(t.host, buf, frame(buf, 4000, 1)) > 0);
	assert_true(write(t.host, buf, frame(buf, 100, 2)) > 0);
	offer(2, 1536, 1, 0);
	fake_run(&t.fake);
	assert_int_equal(stats().rx_packets, 0);
	offer(2, 1536, 1, 2ULL * 1536);
	guest_receive_bare(0, 4000, 1);
	guest_receive_bare(3ULL * 1536, 100, 2);
	// Without mergeable buffers what is too large is dropped, and the next comes.
	start(VERSION_1 | F(MAC));
	offer(1, 1536, 1, 0);
	assert_true(write(t.host, buf, frame(buf, 4000, 3)) > 0);
	assert_true(write(t.host, buf, frame(buf, 100, 4)) > 0);
	guest_receive_bare(0, 100, 4);
	assert_int_equal(stats().rx_dropped, 1);
}

static void a_stream_takes_packets_in_parts(void **state)
{
	static uint8_t stream[400 * (4 + 60000)];
	unsigned int sent = 0;
	size_t got = 0;
	ssize_t n;

	(void)state;
	while (sent < 200) {
		guest_send(60000, 3, sent);
		fake_run(&t.fake);
		sent++;
		if (!fake_get_used(&t.fake, TX, NULL, NULL))
			break;
	}
	assert_true(sent > 1 && sent < 200);
	// What waits in the guest's own queue is sent when there is room, a little at a time.
	while (got < sent * (4 + 60000UL)) {
		n = read(t.host, stream + got, 777);
		if (n > 0)
			got += (size_t)n;
		fake_run(&t.fake);
	}
	assert_int_equal(read(t.host, stream, 1), -1);
	for (unsigned int i = 0; i < sent; i++) {
		const uint8_t *at = stream + i * (4 + 60000UL);

		assert_int_equal(
			(uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | at[2] << 8 | at[3], 60000);
		// All were written to the same buffer: of those that waited the last one counts.
		assert_true(at[4] == pattern(0, i) || at[4] == pattern(0, sent - 1));
	}
	assert_int_equal(stats().tx_packets, sent);
	assert_int_equal(stats().tx_dropped, 0);
}

static void what_is_no_frame_is_not_sent_on_a_stream(void **state)
{
	static const uint32_t sizes[] = {1, 13, 65536, GSO + 18};
	uint8_t buf[64];

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(sizes); i++) {
		guest_send(sizes[i], 1, i);
		fake_run(&t.fake);
		assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
		assert_int_equal(stats().tx_dropped, i + 1);
	}
	guest_send(14, 1, 1);
	assert_int_equal(host_receive(buf, sizeof(buf)), 4 + 14);
	assert_int_equal(stats().tx_packets, 1);
}

static void a_stream_that_is_none_is_a_lost_link(void **state)
{
	static const uint32_t bad[] = {0, 13, GSO + 19, UINT32_MAX};

	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		uint8_t len[4] = {(uint8_t)(bad[i] >> 24), (uint8_t)(bad[i] >> 16),
			(uint8_t)(bad[i] >> 8), (uint8_t)bad[i]};

		if (i) {
			fake_fini(&t.fake);
			assert_int_equal(setup_stream(state), 0);
		}
		offer(1, 1536, 1, 0);
		assert_int_equal(write(t.host, len, 4), 4);
		fake_run(&t.fake);
		assert_false(stats().link_up);
		assert_int_equal(stats().rx_packets, 0);
	}
	// Gone altogether: what the guest sends is dropped, nothing waits.
	fd_close(&t.host);
	guest_send(100, 1, 1);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	assert_int_equal(stats().tx_dropped, 1);
}

// By the time that passes, of which a test can only know that it was no less.
static void the_rate_is_kept_both_ways(void **state)
{
	const uint64_t started = now_ns();
	static uint8_t buf[64];
	uint64_t due;
	unsigned int queue = TX;

	(void)state;
	offer(50, 1536, 1, 0);
	for (unsigned int i = 0; i < 50; i++)
		assert_int_equal(write(t.host, buf, frame(buf, 60, i)), 64);
	for (unsigned int i = 0; i < 50; i++)
		guest_send(100, 1, i);
	for (unsigned int i = 0; i < 50; i++) {
		if (!fake_run_until(&t.fake, has_used, &queue))
			fail_msg("packet %u was not sent", i);
		assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	}
	for (unsigned int i = 0; i < 50; i++)
		guest_receive_bare(i * 1536ULL, 60, i);
	// 50 at 200 a second, of which a tenth of a second's worth may go at once.
	due = 50ULL * 1000000000 / 200 - RATE_LIMIT_BURST_NS - 1000000000 / 200;
	assert_true(now_ns() - started >= due);
	// A reset while the limit holds the queues: nothing fires into it.
	for (unsigned int i = 0; i < 50; i++)
		guest_send(100, 1, i);
	fake_run(&t.fake);
	start(fake_device_features(&t.fake));
	fake_run(&t.fake);
	guest_send(100, 1, 1);
	assert_true(fake_run_until(&t.fake, has_used, &queue));
}

// --- A real tap, in a network namespace of its own -------------------------------------------

static void up(const char *ifname, const char *ip)
{
	struct ifreq ifr = {0};
	struct sockaddr_in *in = (struct sockaddr_in *)(void *)&ifr.ifr_addr;
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	ASSERT(fd >= 0);
	memcpy(ifr.ifr_name, ifname, strlen(ifname));
	in->sin_family = AF_INET;
	ASSERT(inet_pton(AF_INET, ip, &in->sin_addr) == 1);
	ASSERT(ioctl(fd, SIOCSIFADDR, &ifr) == 0);
	ifr.ifr_flags = IFF_UP | IFF_RUNNING;
	ASSERT(ioctl(fd, SIOCSIFFLAGS, &ifr) == 0);
	fd_close(&fd);
}

// An ARP request for the host's address, and its answer.
static int arp_over_a_tap(void)
{
	static const uint8_t request[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 1, 2, 3, 8,
		6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 1, 2, 3, 10, 9, 8, 2, 0, 0, 0, 0, 0, 0, 10, 9,
		8, 1};
	const struct fake_buf out = {GPA(0x800000), HDR + sizeof(request), false};
	uint8_t packet[HDR + 60] = {0};
	struct virtio_env env;
	struct virtio_dev *dev;
	struct err err = {0};
	struct ifreq ifr = {0};
	int fd = -1, hdr_bytes = 0;
	uint16_t mtu = 0;

	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (virtio_net_open_tap("mayfly-test", &fd, &mtu, &err) < 0) {
		fprintf(stderr, "%s\n", err.msg);
		return 1;
	}
	up("mayfly-test", "10.9.8.1");
	ASSERT(create_on(fd, VIRTIO_NET_TAP, &dev, &env, &err) == 0);
	fake_attach(&t.fake, dev);
	start(fake_device_features(&t.fake));
	offer(64, 2048, 1, 0);
	memcpy(packet + HDR, request, sizeof(request));
	guest_mem_write(&t.fake.mem, out.gpa, packet, sizeof(packet));
	fake_add(&t.fake, TX, &out, 1);
	fake_kick(&t.fake, TX);
	for (unsigned int i = 0;; i++) {
		unsigned int queue = RX;
		uint8_t reply[HDR + 42];

		// The host may say other things first.
		if (i == 50 || !fake_run_until(&t.fake, has_used, &queue))
			return 2;
		fake_get_used(&t.fake, RX, NULL, NULL);
		guest_mem_read(&t.fake.mem, GPA(t.mem.v + i * 2048), reply, sizeof(reply));
		if (get_le16(reply + 10) != 1)
			return 3;
		if (memcmp(reply + HDR, request + 6, 6) == 0 && reply[HDR + 12] == 8 &&
			reply[HDR + 13] == 6 && reply[HDR + 21] == 2 &&
			memcmp(reply + HDR + 28, request + 38, 4) == 0)
			break;
	}
	// What was negotiated is what the tap does.
	if (mtu != 1500)
		return 6;
	if (ioctl(fd, TUNGETVNETHDRSZ, &hdr_bytes) < 0 || hdr_bytes != (int)HDR)
		return 4;
	if (ioctl(fd, TUNGETIFF, &ifr) < 0 || !(ifr.ifr_flags & IFF_VNET_HDR))
		return 5;
	fake_fini(&t.fake);
	return 0;
}

static void a_real_tap_answers(void **state)
{
	int status;
	pid_t pid;

	(void)state;
	if (access("/dev/net/tun", R_OK | W_OK) < 0) {
		print_message("/dev/net/tun is not to be had: %s\n", strerror(errno));
		skip();
	}
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		if (unshare(CLONE_NEWNET) < 0)
			_exit(errno == EPERM ? 77 : 99);
		_exit(arp_over_a_tap());
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	if (WEXITSTATUS(status) == 77) {
		print_message("may not make a network namespace\n");
		skip();
	}
	assert_int_equal(WEXITSTATUS(status), 0);
}

#define WITH(fn)        cmocka_unit_test_setup_teardown(fn, setup, teardown)
#define WITH_STREAM(fn) cmocka_unit_test_setup_teardown(fn, setup_stream, teardown)

int main(void)
{
	static const struct device_case device = {
		.name = "net", .device_id = VIRTIO_ID_NET, .eager_queues = 3, .create = create};
	static const struct device_case stream = {.name = "net stream",
		.device_id = VIRTIO_ID_NET,
		.eager_queues = 2,
		.create = create_stream};
	const struct CMUnitTest tests[] = {
		WITH(packets_arrive_in_one_buffer_or_many),
		WITH(any_layout_of_descriptors),
		WITH(a_packet_larger_than_what_is_offered_waits),
		WITH(without_buffers_nothing_is_read_and_nothing_spins),
		WITH(a_turn_is_one_interrupt),
		WITH(the_guests_packets_leave),
		WITH(a_full_host_stops_the_guest),
		WITH(read_pages_are_marked),
		WITH(without_mergeable_buffers),
		WITH(pause_and_reset_give_the_buffers_back),
		WITH(a_lost_host_is_a_lost_link),
		WITH(configuration),
		WITH_STREAM(a_stream_is_cut_into_packets),
		WITH_STREAM(a_stream_waits_for_buffers),
		WITH_STREAM(a_stream_takes_packets_in_parts),
		WITH_STREAM(what_is_no_frame_is_not_sent_on_a_stream),
		WITH_STREAM(a_stream_that_is_none_is_a_lost_link),
		cmocka_unit_test_setup_teardown(
			the_rate_is_kept_both_ways, setup_limited, teardown),
		cmocka_unit_test(a_real_tap_answers),
	};
	int failed;

	t.host = -1;
	failed = device_suite(&device) + device_suite(&stream);
	fd_close(&t.host);
	return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
