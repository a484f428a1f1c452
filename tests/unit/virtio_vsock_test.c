// SPDX-License-Identifier: Apache-2.0
// devices/virtio_vsock: the life of a connection from both sides, credit to the byte, and bounds
// on all that a guest or a host can make it hold.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_vsock.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "devices/virtio_vsock.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"
#include "vmm/base/fd.h"

#define CID        7U
#define RX         0U
#define TX         1U
#define EVENT      2U
#define HDR        44U
#define WINDOW     262144U // of the first connections
#define RX_BUFS    32U
#define RX_BYTES   4096U
#define TX_BYTES   65536U
#define GUEST_PORT 1000U
#define BUF_ALLOC  131072U // the guest's, unless a test says otherwise

static struct {
	struct fake_driver fake;
	char dir[32];
	char path[64];
	uint32_t first_cnt;
	unsigned int ended; // connections, as was told
	gpa_t rx_mem;
	uint16_t rx_slot_of_head[VIRTQ_SIZE_MAX];
	gpa_t tx_mem;
} t;

struct packet {
	struct virtio_vsock_hdr hdr;
	uint8_t data[RX_BYTES];
	uint32_t written;
};

static void on_conn_ended(void *opaque)
{
	(*(unsigned int *)opaque)++;
}

static int create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	const struct vsock_config config = {
		.guest_cid = CID,
		.socket_path = t.path,
		.conn_ended = on_conn_ended,
		.opaque = &t.ended,
		.first_cnt = t.first_cnt,
	};

	t.ended = 0;
	return virtio_vsock_create(ret_dev, &config, env, err);
}

static void offer_rx(unsigned int slot)
{
	// As Linux 6.1 does: a buffer for the header and one for the data.
	const gpa_t at = GPA(t.rx_mem.v + (uint64_t)slot * 2 * RX_BYTES);
	const struct fake_buf bufs[] = {{at, HDR, true}, {GPA(at.v + RX_BYTES), RX_BYTES, true}};
	int head = fake_add(&t.fake, RX, bufs, 2);

	assert_true(head >= 0);
	t.rx_slot_of_head[head] = (uint16_t)slot;
}

static void start(unsigned int nr_rx)
{
	fake_start(&t.fake);
	t.rx_mem = fake_alloc(&t.fake, RX_BUFS * 2 * RX_BYTES);
	t.tx_mem = fake_alloc(&t.fake, TX_BYTES + PAGE_BYTES);
	for (unsigned int i = 0; i < nr_rx; i++)
		offer_rx(i);
	fake_kick(&t.fake, RX);
	for (unsigned int i = 0; i < 3; i++)
		fake_want_irq(&t.fake, i);
}

static int make_dir(void **state)
{
	(void)state;
	snprintf(t.dir, sizeof(t.dir), "/tmp/mayfly-vsock-XXXXXX");
	if (!mkdtemp(t.dir))
		return -1;
	snprintf(t.path, sizeof(t.path), "%s/vsock.sock", t.dir);
	return 0;
}

static int remove_dir(void **state)
{
	(void)state;
	return rmdir(t.dir); // fails if the device has left a socket behind
}

static int setup_idle(void **state)
{
	struct virtio_env env;
	struct virtio_dev *dev;
	struct err err = {0};

	if (make_dir(state) < 0)
		return -1;
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (create(&dev, &env, &err) < 0)
		return -1;
	fake_attach(&t.fake, dev);
	return 0;
}

static int setup(void **state)
{
	t.first_cnt = 0;
	if (setup_idle(state) < 0)
		return -1;
	start(RX_BUFS);
	return 0;
}

static int setup_wrapping(void **state)
{
	t.first_cnt = UINT32_MAX - 9;
	if (setup_idle(state) < 0)
		return -1;
	start(RX_BUFS);
	return 0;
}

static int teardown(void **state)
{
	fake_fini(&t.fake);
	return remove_dir(state);
}

static struct virtio_vsock_stats stats(void)
{
	struct virtio_vsock_stats s;

	virtio_vsock_get_stats(t.fake.dev, &s);
	return s;
}

// --- The guest -------------------------------------------------------------------------------

// One stream of the guest, which keeps its credit as the specification says.
struct stream {
	uint32_t host_port, guest_port;
	uint32_t buf_alloc, fwd_cnt;
	uint32_t sent, peer_buf_alloc, peer_fwd_cnt;
};

static struct virtio_vsock_hdr header(const struct stream *s, uint16_t op, uint32_t len)
{
	return (struct virtio_vsock_hdr){
		.src_cid = htole64(CID),
		.dst_cid = htole64(2),
		.src_port = htole32(s->guest_port),
		.dst_port = htole32(s->host_port),
		.len = htole32(len),
		.type = htole16(VIRTIO_VSOCK_TYPE_STREAM),
		.op = htole16(op),
		.buf_alloc = htole32(s->buf_alloc),
		.fwd_cnt = htole32(s->fwd_cnt),
	};
}

static void send_raw(const struct virtio_vsock_hdr *hdr, const void *data, uint32_t len)
{
	struct fake_buf bufs[] = {
		{t.tx_mem, HDR, false}, {GPA(t.tx_mem.v + PAGE_BYTES), len, false}};

	assert_true(len <= TX_BYTES);
	assert_int_equal(guest_mem_write(&t.fake.mem, t.tx_mem, hdr, HDR), 0);
	if (len)
		assert_int_equal(guest_mem_write(&t.fake.mem, bufs[1].gpa, data, len), 0);
	assert_true(fake_add(&t.fake, TX, bufs, len ? 2 : 1) >= 0);
	fake_kick(&t.fake, TX);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
}

static void send_op(const struct stream *s, uint16_t op, uint32_t flags)
{
	struct virtio_vsock_hdr hdr = header(s, op, 0);

	hdr.flags = htole32(flags);
	send_raw(&hdr, NULL, 0);
}

static void send_data(struct stream *s, const void *data, uint32_t len)
{
	struct virtio_vsock_hdr hdr = header(s, VIRTIO_VSOCK_OP_RW, len);

	s->sent += len;
	send_raw(&hdr, data, len);
}

static uint32_t credit(const struct stream *s)
{
	return s->peer_buf_alloc - (s->sent - s->peer_fwd_cnt);
}

// The next packet from the device, if there is one; its buffer is offered anew.
static bool receive(struct packet *ret_packet)
{
	unsigned int slot;
	gpa_t at;
	int head;

	if (!fake_get_used(&t.fake, RX, &head, &ret_packet->written))
		return false;
	slot = t.rx_slot_of_head[head];
	at = GPA(t.rx_mem.v + (uint64_t)slot * 2 * RX_BYTES);
	guest_mem_read(&t.fake.mem, at, &ret_packet->hdr, HDR);
	guest_mem_read(&t.fake.mem, GPA(at.v + RX_BYTES), ret_packet->data, RX_BYTES);
	offer_rx(slot);
	fake_kick(&t.fake, RX);
	assert_int_equal(le64toh(ret_packet->hdr.src_cid), 2);
	assert_int_equal(le64toh(ret_packet->hdr.dst_cid), CID);
	assert_int_equal(le16toh(ret_packet->hdr.type), VIRTIO_VSOCK_TYPE_STREAM);
	assert_int_equal(ret_packet->written, HDR + le32toh(ret_packet->hdr.len));
	return true;
}

static bool have_packet(void *opaque)
{
	(void)opaque;
	uint8_t idx[2];

	guest_mem_read(&t.fake.mem, GPA(t.fake.queues[RX].used.v + 2), idx, 2);
	return get_le16(idx) != t.fake.queues[RX].used_idx;
}

static struct packet expect(uint16_t op, const struct stream *s)
{
	struct packet packet;

	if (!fake_run_until(&t.fake, have_packet, NULL))
		fail_msg("no packet; expected op %u", op);
	assert_true(receive(&packet));
	assert_int_equal(le16toh(packet.hdr.op), op);
	if (s) {
		assert_int_equal(le32toh(packet.hdr.src_port), s->host_port);
		assert_int_equal(le32toh(packet.hdr.dst_port), s->guest_port);
	}
	return packet;
}

static void expect_credit(struct stream *s, const struct packet *packet)
{
	s->peer_buf_alloc = le32toh(packet->hdr.buf_alloc);
	s->peer_fwd_cnt = le32toh(packet->hdr.fwd_cnt);
}

static void expect_nothing(void)
{
	fake_run(&t.fake);
	assert_false(have_packet(NULL));
}

// --- The host --------------------------------------------------------------------------------

static int host_connect(void)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	assert_true(fd >= 0);
	memcpy(addr.sun_path, t.path, strlen(t.path));
	assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	return fd;
}

static int host_listen(uint32_t port, int backlog)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	assert_true(fd >= 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s_%u", t.path, port);
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(fd, backlog), 0);
	return fd;
}

static void host_unlisten(int *fd, uint32_t port)
{
	char path[96];

	snprintf(path, sizeof(path), "%s_%u", t.path, port);
	unlink(path);
	fd_close(fd);
}

static bool readable(void *opaque)
{
	struct pollfd pfd = {.fd = *(int *)opaque, .events = POLLIN};

	return poll(&pfd, 1, 0) > 0;
}

// Waits for something to read; returns what read() does.
static ssize_t host_read(int fd, void *buf, size_t len)
{
	if (!fake_run_until(&t.fake, readable, &fd))
		fail_msg("nothing to read");
	return read(fd, buf, len);
}

static void host_write(int fd, const void *buf, size_t len)
{
	assert_int_equal(write(fd, buf, len), len);
}

static void assert_closed(int *fd)
{
	char byte;

	assert_int_equal(host_read(*fd, &byte, 1), 0);
	fd_close(fd);
}

// A connection from the host that the guest accepts.
static struct stream open_from_host(int *ret_fd)
{
	struct stream s = {.guest_port = GUEST_PORT,
		.buf_alloc = BUF_ALLOC,
		.fwd_cnt = t.first_cnt,
		.sent = t.first_cnt};
	struct packet packet;
	char line[64] = {0}, want[64];

	*ret_fd = host_connect();
	host_write(*ret_fd, "CONNECT 1000\n", 13);
	packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	assert_int_equal(le32toh(packet.hdr.dst_port), GUEST_PORT);
	s.host_port = le32toh(packet.hdr.src_port);
	expect_credit(&s, &packet);
	send_op(&s, VIRTIO_VSOCK_OP_RESPONSE, 0);
	assert_true(host_read(*ret_fd, line, sizeof(line) - 1) > 0);
	snprintf(want, sizeof(want), "OK %u\n", s.host_port);
	assert_string_equal(line, want);
	return s;
}

// A connection from the guest that the host accepts.
static struct stream open_from_guest(int listen_fd, uint32_t host_port, int *ret_fd)
{
	static uint32_t guest_port = 50000;
	struct stream s = {.host_port = host_port,
		.guest_port = guest_port++,
		.buf_alloc = BUF_ALLOC,
		.fwd_cnt = t.first_cnt,
		.sent = t.first_cnt};
	struct packet packet;

	send_op(&s, VIRTIO_VSOCK_OP_REQUEST, 0);
	packet = expect(VIRTIO_VSOCK_OP_RESPONSE, &s);
	expect_credit(&s, &packet);
	*ret_fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	assert_true(*ret_fd >= 0);
	return s;
}

// --- Tests -----------------------------------------------------------------------------------

static void the_host_connects(void **state)
{
	struct stream s;
	struct packet packet;
	char buf[16] = {0};
	int fd;

	(void)state;
	s = open_from_host(&fd);
	assert_int_equal(s.peer_buf_alloc, WINDOW);
	host_write(fd, "ping", 4);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_int_equal(le32toh(packet.hdr.len), 4);
	assert_memory_equal(packet.data, "ping", 4);
	send_data(&s, "pong", 4);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 4);
	assert_string_equal(buf, "pong");
	expect_nothing(); // no credit update for so little
	assert_int_equal(t.ended, 0);
	fd_close(&fd);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), 3);
	assert_int_equal(le32toh(packet.hdr.fwd_cnt), t.first_cnt + 4);
	send_op(&s, VIRTIO_VSOCK_OP_RST, 0);
	expect_nothing();
	assert_int_equal(stats().nr_conns, 0);
	assert_int_equal(t.ended, 1);
}

static void the_guest_connects(void **state)
{
	int listen_fd = host_listen(52, 8), fd;
	struct stream s = open_from_guest(listen_fd, 52, &fd);
	struct packet packet;
	char buf[16] = {0};

	(void)state;
	send_data(&s, "hello", 5);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 5);
	assert_string_equal(buf, "hello");
	host_write(fd, "world", 5);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_memory_equal(packet.data, "world", 5);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_closed(&fd);
	assert_int_equal(stats().nr_conns, 0);
	host_unlisten(&listen_fd, 52);
}

static void refusals(void **state)
{
	static const struct stream unknown = {.host_port = 77, .guest_port = 4000};
	struct packet packet;
	int fd = host_connect();

	(void)state;
	// Nobody listens in the guest: closed without a word.
	host_write(fd, "CONNECT 1000\n", 13);
	packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	const struct stream s = {
		.host_port = le32toh(packet.hdr.src_port), .guest_port = GUEST_PORT};
	send_op(&s, VIRTIO_VSOCK_OP_RST, 0);
	assert_closed(&fd);
	expect_nothing();
	// Nobody listens on the host.
	send_op(&unknown, VIRTIO_VSOCK_OP_REQUEST, 0);
	expect(VIRTIO_VSOCK_OP_RST, &unknown);
	// Whatever belongs to no connection; a reset is not answered.
	for (uint16_t op = 0; op < 20; op++) {
		send_op(&unknown, op, 3);
		if (op != VIRTIO_VSOCK_OP_RST)
			expect(VIRTIO_VSOCK_OP_RST, &unknown);
	}
	expect_nothing();
	assert_int_equal(stats().nr_conns, 0);
}

static void the_hello_is_taken_as_firecracker_does(void **state)
{
	static const char *const good[] = {"CONNECT 1000\n", "connect 1000\n", "Connect\t1000\r\n",
		"  CONNECT  1000  \n", "CONNECT 4294967295\n", "CONNECT 0\n"};
	static const char *const bad[] = {"\n", "CONNECT\n", "CONNECT \n", "CONNECT1000\n",
		"CONNECT -1\n", "CONNECT 4294967296\n", "CONNECT 99999999999\n", "CONNECT 12a\n",
		"CONNECT 0x10\n", "HELLO 1000\n", "CONNECT 1000 more\n", "GET / HTTP/1.1\r\n",
		"CONNECT                                   1\n",
		"CONNECT 1000000000000000000000000000000000000000000000000000000"};
	int fd;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(good); i++) {
		fd = host_connect();
		host_write(fd, good[i], strlen(good[i]));
		expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
		fd_close(&fd);
		expect(VIRTIO_VSOCK_OP_RST, NULL);
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		char byte;

		fd = host_connect();
		host_write(fd, bad[i], strlen(bad[i]));
		// With bytes left unread the kernel says so by ECONNRESET; it is closed either way.
		assert_true(host_read(fd, &byte, 1) <= 0);
		fd_close(&fd);
	}
	// A NUL is no blank.
	fd = host_connect();
	host_write(fd, "CONNECT 1000\0\n", 14);
	assert_closed(&fd);
	// Closed before the line is complete.
	fd = host_connect();
	host_write(fd, "CONNECT", 7);
	fake_run(&t.fake);
	fd_close(&fd);
	expect_nothing();
	assert_int_equal(stats().nr_conns, 0);
	assert_int_equal(stats().nr_pending, 0);
}

// Byte by byte, and with the data right behind it.
static void what_follows_the_hello_is_the_guests(void **state)
{
	static const char line[] = "CONNECT 1000\n";
	struct packet packet;
	struct stream s = {.guest_port = GUEST_PORT, .buf_alloc = BUF_ALLOC};
	int fd = host_connect();

	(void)state;
	for (unsigned int i = 0; i + 2 < sizeof(line); i++) {
		host_write(fd, line + i, 1);
		expect_nothing();
	}
	host_write(fd, "\nabc", 4);
	packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	s.host_port = le32toh(packet.hdr.src_port);
	expect_nothing();
	shutdown(fd, SHUT_WR); // it need not wait for the answer
	expect_nothing();
	send_op(&s, VIRTIO_VSOCK_OP_RESPONSE, 0);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_int_equal(le32toh(packet.hdr.len), 3);
	assert_memory_equal(packet.data, "abc", 3);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), VIRTIO_VSOCK_SHUTDOWN_SEND);
	fd_close(&fd);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), 3);
}

static void the_host_shuts_one_way(void **state)
{
	struct packet packet;
	struct stream s;
	char buf[16] = {0};
	int fd;

	(void)state;
	s = open_from_host(&fd);
	host_write(fd, "last", 4);
	shutdown(fd, SHUT_WR);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_memory_equal(packet.data, "last", 4);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), VIRTIO_VSOCK_SHUTDOWN_SEND);
	// The other way is still open.
	send_data(&s, "answer", 6);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 6);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_SEND);
	assert_int_equal(host_read(fd, buf, 1), 0);
	// Both ways are at their ends, and so is the connection.
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), 3);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_int_equal(stats().nr_conns, 0);
	fd_close(&fd);

	// It stops reading: the guest hears of it at its next data, and goes on reading.
	s = open_from_host(&fd);
	shutdown(fd, SHUT_RD);
	send_data(&s, "void", 4);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), VIRTIO_VSOCK_SHUTDOWN_RCV);
	send_data(&s, "late", 4); // sent before it could know
	expect_nothing();
	host_write(fd, "still", 5);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_memory_equal(packet.data, "still", 5);
	assert_int_equal(le32toh(packet.hdr.fwd_cnt), t.first_cnt + 8);
	fd_close(&fd);
	packet = expect(VIRTIO_VSOCK_OP_SHUTDOWN, &s);
	assert_int_equal(le32toh(packet.hdr.flags), 3);
}

static void the_guest_shuts_one_way(void **state)
{
	struct packet packet;
	struct stream s;
	char buf[16] = {0};
	int fd;

	(void)state;
	s = open_from_host(&fd);
	send_data(&s, "last", 4);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_SEND);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 4);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 0);
	host_write(fd, "answer", 6);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_memory_equal(packet.data, "answer", 6);
	// Data after it has said that there would be none.
	send_data(&s, "lie", 3);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	fd_close(&fd);

	// It stops reading: the host cannot write any more.
	s = open_from_host(&fd);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, VIRTIO_VSOCK_SHUTDOWN_RCV);
	assert_int_equal(send(fd, "x", 1, MSG_NOSIGNAL), -1);
	assert_int_equal(errno, EPIPE);
	expect_nothing();
	send_data(&s, "data", 4);
	assert_int_equal(host_read(fd, buf, sizeof(buf)), 4);
	fd_close(&fd);
}

// All that the guest has sent before it closed arrives, however late it is read.
static void a_slow_reader_gets_all_after_the_guest_has_closed(void **state)
{
	static uint8_t sent[WINDOW], got[WINDOW + 1];
	struct stream s;
	size_t done = 0;
	ssize_t n;
	int fd;

	(void)state;
	for (size_t i = 0; i < sizeof(sent); i++)
		sent[i] = (uint8_t)(i * 31 >> 3);
	s = open_from_host(&fd);
	// The socket takes some 200 KiB; so twice the window is what it takes and what we hold.
	while (stats().buffered_bytes < WINDOW) {
		uint32_t len = MIN(credit(&s), TX_BYTES);
		struct packet packet;

		assert_true(len > 0);
		send_data(&s, sent, len);
		fake_run(&t.fake);
		while (receive(&packet))
			expect_credit(&s, &packet);
		if (!credit(&s))
			break;
	}
	assert_true(stats().buffered_bytes > 0 && stats().buffered_bytes <= WINDOW);
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_int_equal(stats().nr_conns, 1);
	while ((n = host_read(fd, got, sizeof(got))) > 0)
		done += (size_t)n;
	assert_int_equal(n, 0);
	assert_int_equal(done, s.sent - t.first_cnt);
	assert_int_equal(stats().nr_conns, 0);
	assert_int_equal(stats().buffered_bytes, 0);
	fd_close(&fd);
}

// A lingering connection whose host never reads ends with that host.
static void a_lingering_connection_ends_with_its_host(void **state)
{
	static uint8_t zeros[TX_BYTES];
	struct packet packet;
	struct stream s;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	while (credit(&s)) {
		send_data(&s, zeros, MIN(credit(&s), TX_BYTES));
		while (receive(&packet))
			expect_credit(&s, &packet);
	}
	send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_int_equal(stats().nr_conns, 1);
	fd_close(&fd);
	fake_run(&t.fake);
	assert_int_equal(stats().nr_conns, 0);
	assert_int_equal(stats().buffered_bytes, 0);
}

// The guest never gets more credit than there is room, and a byte more is a reset.
static void the_window_is_exact(void **state)
{
	static uint8_t zeros[TX_BYTES];
	struct packet packet;
	struct stream s;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	while (credit(&s)) {
		send_data(&s, zeros, MIN(credit(&s), 40000U));
		while (receive(&packet)) {
			assert_int_equal(le16toh(packet.hdr.op), VIRTIO_VSOCK_OP_CREDIT_UPDATE);
			expect_credit(&s, &packet);
			assert_true(credit(&s) <= WINDOW - stats().buffered_bytes);
		}
	}
	assert_true(stats().buffered_bytes <= WINDOW);
	// What the socket has taken since we last heard of it is not credit yet: so the true limit
	// may be above ours, but never above the window.
	send_data(&s, zeros,
		WINDOW - stats().buffered_bytes + 1 > TX_BYTES
			? TX_BYTES
			: WINDOW - stats().buffered_bytes + 1);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_int_equal(stats().nr_conns, 0);
	assert_int_equal(stats().buffered_bytes, 0);
	fd_close(&fd);
}

// No more than the guest has room for is sent, also when it shrinks its buffer below what is
// under way; and it goes on as soon as there is room.
static void the_guests_credit_is_exact(void **state)
{
	static uint8_t zeros[32768];
	struct packet packet;
	struct stream s;
	uint32_t got = 0;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	s.buf_alloc = 10000;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	host_write(fd, zeros, sizeof(zeros));
	fake_run(&t.fake);
	while (receive(&packet))
		got += le32toh(packet.hdr.len);
	assert_int_equal(got, 10000);
	s.buf_alloc = 5000; // below what is under way: there is none, not 2^32 less a few
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	expect_nothing();
	s.fwd_cnt += 5000; // exactly at it
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	expect_nothing();
	s.fwd_cnt += 1;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	packet = expect(VIRTIO_VSOCK_OP_RW, &s);
	assert_int_equal(le32toh(packet.hdr.len), 1);
	expect_nothing();
	got += 1;
	// It claims to have consumed what was never sent, or less than it has: no credit of that.
	s.fwd_cnt += 5001;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	expect_nothing();
	s.fwd_cnt -= 6000;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	expect_nothing();
	s.buf_alloc = UINT32_MAX;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	fake_run(&t.fake);
	while (receive(&packet))
		got += le32toh(packet.hdr.len);
	assert_int_equal(got, sizeof(zeros));
	// A packet that was numbered before an earlier one: nothing is taken back.
	s.buf_alloc = 10000;
	s.fwd_cnt = t.first_cnt + got;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	s.fwd_cnt -= 3000;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	host_write(fd, zeros, 10000);
	fake_run(&t.fake);
	while (receive(&packet))
		got += le32toh(packet.hdr.len);
	assert_int_equal(got, sizeof(zeros) + 10000);
	s.buf_alloc = 0;
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	host_write(fd, "x", 1);
	expect_nothing();
	fd_close(&fd);
}

static void credit_is_told_when_asked_and_when_half_is_gone(void **state)
{
	static uint8_t zeros[TX_BYTES];
	static uint8_t sink[WINDOW];
	struct packet packet;
	struct stream s;
	uint32_t sent = 0;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	send_op(&s, VIRTIO_VSOCK_OP_CREDIT_REQUEST, 0);
	packet = expect(VIRTIO_VSOCK_OP_CREDIT_UPDATE, &s);
	assert_int_equal(le32toh(packet.hdr.buf_alloc), WINDOW);
	assert_int_equal(le32toh(packet.hdr.fwd_cnt), t.first_cnt);
	while (sent < 64 * WINDOW) {
		send_data(&s, zeros, 32768);
		sent += 32768;
		assert_int_equal(host_read(fd, sink, sizeof(sink)), 32768);
		while (receive(&packet))
			expect_credit(&s, &packet);
		assert_true(credit(&s) > 0);
	}
	// Rather less than one in four packets, in fact one in five.
	assert_in_range(stats().credit_updates, 64, 64 * 2 - 1 + 2);
	fd_close(&fd);
}

// A guest with tiny buffers and a host that reads in odd pieces, both ways at once, checked to the
// byte across the wrap of all counters.
static void data_survives_both_ways(void **state)
{
	static const uint32_t total = 3 * MIB;
	static uint8_t chunk[TX_BYTES];
	uint32_t to_guest = 0, from_guest = 0, host_sent = 0, host_got = 0;
	struct stream s;
	uint32_t seed = 1;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	s.buf_alloc = 7000;
	while (to_guest < total || host_got < total) {
		struct packet packet;
		uint32_t len;
		ssize_t n;

		seed = seed * 1664525 + 1013904223;
		len = MIN(total - host_sent, 1 + seed % 9000);
		for (uint32_t i = 0; i < len; i++)
			chunk[i] = (uint8_t)((host_sent + i) * 7 >> 2);
		n = len ? write(fd, chunk, len) : 0;
		if (n > 0)
			host_sent += (uint32_t)n;
		len = MIN(total - from_guest, 1 + (seed >> 8) % 30000);
		len = MIN(len, credit(&s));
		for (uint32_t i = 0; i < len; i++)
			chunk[i] = (uint8_t)((from_guest + i) * 5 >> 1);
		if (len)
			send_data(&s, chunk, len);
		else
			fake_run(&t.fake);
		from_guest += len;
		while (receive(&packet)) {
			expect_credit(&s, &packet);
			for (uint32_t i = 0; i < le32toh(packet.hdr.len); i++)
				assert_int_equal(
					packet.data[i], (uint8_t)((to_guest + i) * 7 >> 2));
			to_guest += le32toh(packet.hdr.len);
			assert_true(to_guest + t.first_cnt - s.fwd_cnt <= s.buf_alloc);
		}
		if (seed % 3 == 0 && s.fwd_cnt != to_guest + t.first_cnt) {
			s.fwd_cnt = to_guest + t.first_cnt;
			send_op(&s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
		}
		n = read(fd, chunk, 1 + (seed >> 4) % 20000);
		for (ssize_t i = 0; i < n; i++)
			assert_int_equal(chunk[i], (uint8_t)((host_got + (uint32_t)i) * 5 >> 1));
		if (n > 0)
			host_got += (uint32_t)n;
	}
	assert_int_equal(to_guest, total);
	assert_int_equal(host_got, total);
	assert_int_equal(stats().buffered_bytes, 0);
	fd_close(&fd);
}

// One interrupt and one batch for what came in one turn.
static void a_turn_ends_in_one_interrupt(void **state)
{
	static uint8_t zeros[RX_BYTES * 16];
	struct packet packet;
	struct stream s[4];
	int fd[4];
	unsigned int nr = 0;

	(void)state;
	for (unsigned int i = 0; i < 4; i++)
		s[i] = open_from_host(&fd[i]);
	for (unsigned int i = 0; i < 4; i++)
		host_write(fd[i], zeros, 4 * RX_BYTES);
	fake_want_irq(&t.fake, RX);
	fake_irqs(&t.fake);
	fake_run(&t.fake);
	assert_int_equal(fake_irqs(&t.fake), 1);
	while (receive(&packet))
		nr++;
	assert_int_equal(nr, 16);
	for (unsigned int i = 0; i < 4; i++)
		fd_close(&fd[i]);
	(void)s;
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static bool irq_sent(void *opaque)
{
	(void)opaque;
	return fake_irqs(&t.fake) > 0;
}

// That its packets have been taken is no news worth an interrupt: it comes with the next that is.
static void the_guest_is_not_interrupted_for_its_own_packets(void **state)
{
	static uint8_t zeros[TX_BYTES], sink[TX_BYTES];
	struct stream s;
	uint64_t before;
	bool drained = false;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	// Of a hundred, each of which asks for an interrupt, most go by without.
	before = t.fake.dev->nr_interrupts;
	for (unsigned int i = 0; i < 100; i++) {
		fake_want_irq(&t.fake, TX);
		send_data(&s, "a", 1);
	}
	assert_true(t.fake.dev->nr_interrupts - before < 50);
	// Where there is no other it is late, but it comes.
	fake_irqs(&t.fake);
	fake_want_irq(&t.fake, TX);
	send_data(&s, "b", 1);
	assert_true(fake_run_until(&t.fake, irq_sent, NULL));
	while (read(fd, sink, sizeof(sink)) > 0)
		;
	// At once for much data, many packets, and before a pause.
	fake_want_irq(&t.fake, TX);
	send_data(&s, zeros, TX_BYTES);
	send_data(&s, zeros, TX_BYTES);
	assert_true(fake_irqs(&t.fake) > 0);
	while (read(fd, sink, sizeof(sink)) > 0)
		;
	expect(VIRTIO_VSOCK_OP_CREDIT_UPDATE, &s);
	fake_irqs(&t.fake);
	before = t.fake.dev->nr_interrupts;
	for (unsigned int i = 0; i < 640; i++) {
		fake_want_irq(&t.fake, TX);
		send_data(&s, "e", 1);
	}
	assert_true(t.fake.dev->nr_interrupts - before >= 10);
	fake_irqs(&t.fake);
	fake_want_irq(&t.fake, TX);
	send_data(&s, "f", 1);
	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	assert_int_equal(fake_irqs(&t.fake), 1);
	virtio_dev_resume(t.fake.dev);
	fd_close(&fd);
}

// A stream that always has data does not starve the others, and one that is stuck stops nobody.
static void streams_take_turns(void **state)
{
	static uint8_t zeros[RX_BYTES * 64];
	struct packet packet;
	struct stream busy, stuck, other;
	unsigned int before = 0;
	int busy_fd, stuck_fd, other_fd;

	(void)state;
	busy = open_from_host(&busy_fd);
	stuck = open_from_host(&stuck_fd);
	other = open_from_host(&other_fd);
	busy.buf_alloc = stuck.buf_alloc = UINT32_MAX;
	send_op(&busy, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	stuck.buf_alloc = 0;
	send_op(&stuck, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
	assert_true(write(busy_fd, zeros, sizeof(zeros)) > (ssize_t)(RX_BYTES * 40));
	host_write(stuck_fd, zeros, 1000);
	fake_run(&t.fake); // all of the guest's buffers are full now
	host_write(other_fd, "me", 2);
	fake_run(&t.fake);
	for (;;) {
		fake_run(&t.fake);
		assert_true(receive(&packet));
		if (le32toh(packet.hdr.src_port) == other.host_port)
			break;
		assert_int_equal(le32toh(packet.hdr.src_port), busy.host_port);
		before++;
	}
	// What was full already, and one turn of the busy one.
	assert_true(before <= RX_BUFS + 32);
	fd_close(&busy_fd);
	fd_close(&stuck_fd);
	fd_close(&other_fd);
}

// The guest has given no buffers: nothing is read, nothing is lost, and it does not spin.
static void without_rx_buffers_it_waits(void **state)
{
	struct packet packet;
	struct stream s = {.guest_port = GUEST_PORT, .buf_alloc = BUF_ALLOC};
	int fd = host_connect();
	uint64_t before;

	(void)state;
	start(0);
	host_write(fd, "CONNECT 1000\n", 13);
	fake_run(&t.fake);
	assert_false(have_packet(NULL));
	before = t.fake.dev->nr_notifies;
	for (int i = 0; i < 20; i++)
		fake_run(&t.fake);
	assert_int_equal(t.fake.dev->nr_notifies, before);
	offer_rx(0);
	offer_rx(1);
	fake_kick(&t.fake, RX);
	packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	s.host_port = le32toh(packet.hdr.src_port);
	send_op(&s, VIRTIO_VSOCK_OP_RESPONSE, 0);
	host_write(fd, "x", 1);
	expect(VIRTIO_VSOCK_OP_RW, &s);
	fd_close(&fd);
}

static void headers_are_checked(void **state)
{
	struct virtio_vsock_hdr hdr;
	struct stream s;
	struct fake_buf tiny = {t.tx_mem, HDR - 1, false};
	uint64_t dropped;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	dropped = stats().dropped_packets;
	// From another CID, to another CID, a header cut short.
	hdr = header(&s, VIRTIO_VSOCK_OP_RST, 0);
	hdr.src_cid = htole64(CID + 1);
	send_raw(&hdr, NULL, 0);
	hdr = header(&s, VIRTIO_VSOCK_OP_RST, 0);
	hdr.src_cid = htole64(CID | 1ULL << 32);
	send_raw(&hdr, NULL, 0);
	hdr = header(&s, VIRTIO_VSOCK_OP_RST, 0);
	hdr.dst_cid = htole64(1);
	send_raw(&hdr, NULL, 0);
	fake_add(&t.fake, TX, &tiny, 1);
	fake_kick(&t.fake, TX);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, TX, NULL, NULL));
	assert_int_equal(stats().dropped_packets, dropped + 4);
	expect_nothing();
	assert_int_equal(stats().nr_conns, 1);
	// Of another type: there is no such connection.
	hdr = header(&s, VIRTIO_VSOCK_OP_RW, 0);
	hdr.type = htole16(VIRTIO_VSOCK_TYPE_SEQPACKET);
	send_raw(&hdr, NULL, 0);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_int_equal(stats().nr_conns, 1);
	// Longer than its chain.
	hdr = header(&s, VIRTIO_VSOCK_OP_RW, 5);
	send_raw(&hdr, "abcd", 4);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	assert_closed(&fd);
	// Ops that do not fit the state.
	static const uint16_t ops[] = {0, VIRTIO_VSOCK_OP_REQUEST, VIRTIO_VSOCK_OP_RESPONSE, 8, 99};

	for (unsigned int i = 0; i < ARRAY_SIZE(ops); i++) {
		s = open_from_host(&fd);
		send_op(&s, ops[i], 0);
		expect(VIRTIO_VSOCK_OP_RST, &s);
		assert_closed(&fd);
	}
	// Before it has accepted.
	static const uint16_t early[] = {VIRTIO_VSOCK_OP_RW, VIRTIO_VSOCK_OP_SHUTDOWN};

	for (unsigned int i = 0; i < ARRAY_SIZE(early); i++) {
		struct packet packet;

		fd = host_connect();
		host_write(fd, "CONNECT 1000\n", 13);
		packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
		s.host_port = le32toh(packet.hdr.src_port);
		send_op(&s, early[i], 3);
		expect(VIRTIO_VSOCK_OP_RST, &s);
		assert_closed(&fd);
	}
	assert_int_equal(stats().nr_conns, 0);
}

// Headers and data may be cut into descriptors as the driver likes.
static void any_layout_of_descriptors(void **state)
{
	struct virtio_vsock_hdr hdr;
	struct fake_buf bufs[60];
	gpa_t mem = fake_alloc(&t.fake, PAGE_BYTES);
	uint8_t raw[HDR + 6], back[HDR + 6];
	struct stream s;
	char text[8] = {0};
	uint32_t written;
	int fd;

	(void)state;
	s = open_from_host(&fd);
	hdr = header(&s, VIRTIO_VSOCK_OP_RW, 6);
	memcpy(raw, &hdr, HDR);
	memcpy(raw + HDR, "pieces", 6);
	for (unsigned int i = 0; i < sizeof(raw); i++) {
		bufs[i] = (struct fake_buf){GPA(mem.v + i * 3), 1, false};
		guest_mem_write(&t.fake.mem, bufs[i].gpa, raw + i, 1);
	}
	fake_add_indirect(&t.fake, TX, bufs, sizeof(raw), GPA(0));
	fake_kick(&t.fake, TX);
	fake_run(&t.fake);
	assert_int_equal(host_read(fd, text, 8), 6);
	assert_string_equal(text, "pieces");

	// The same for what it receives, behind the buffers that are there.
	for (unsigned int i = 0; i < sizeof(raw); i++)
		bufs[i].writable = true;
	start(0);
	host_write(fd, "x", 1); // of the old connection: gone with the reset
	fd_close(&fd);
	fake_add_indirect(&t.fake, RX, bufs, sizeof(raw), GPA(0));
	fake_kick(&t.fake, RX);
	send_op(&s, VIRTIO_VSOCK_OP_RW, 0);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, RX, NULL, &written));
	assert_int_equal(written, HDR);
	for (unsigned int i = 0; i < sizeof(raw); i++)
		guest_mem_read(&t.fake.mem, bufs[i].gpa, back + i, 1);
	memcpy(&hdr, back, HDR);
	assert_int_equal(le16toh(hdr.op), VIRTIO_VSOCK_OP_RST);
	assert_int_equal(le32toh(hdr.src_port), s.host_port);
}

static void rx_buffers_without_room_are_a_lie(void **state)
{
	const struct fake_buf small = {t.tx_mem, HDR, true};
	const struct stream unknown = {.host_port = 1, .guest_port = 2};

	(void)state;
	start(0);
	fake_add(&t.fake, RX, &small, 1);
	fake_kick(&t.fake, RX);
	fake_run(&t.fake);
	assert_int_equal(fake_status(&t.fake), 15);
	send_op(&unknown, VIRTIO_VSOCK_OP_RW, 0);
	assert_int_equal(fake_status(&t.fake), 15 | 64);
	start(RX_BUFS);
	send_op(&unknown, VIRTIO_VSOCK_OP_RW, 0);
	expect(VIRTIO_VSOCK_OP_RST, &unknown);
}

// A host that is early waits for the driver, and only so many do.
static void early_connections_wait_for_the_driver(void **state)
{
	static int fds[VIRTIO_VSOCK_PENDING_MAX + 20];
	struct packet packet;
	unsigned int nr = 0;
	char byte;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = host_connect();
		host_write(fds[i], "CONNECT 1000\n", 13);
		fake_run(&t.fake);
	}
	assert_int_equal(stats().nr_pending, VIRTIO_VSOCK_PENDING_MAX);
	// One gives up: its place goes to the next.
	fd_close(&fds[0]);
	fake_run(&t.fake);
	assert_int_equal(stats().nr_pending, VIRTIO_VSOCK_PENDING_MAX);
	start(RX_BUFS);
	fake_run(&t.fake);
	while (receive(&packet)) {
		assert_int_equal(le16toh(packet.hdr.op), VIRTIO_VSOCK_OP_REQUEST);
		nr++;
		fake_run(&t.fake);
	}
	assert_int_equal(nr, ARRAY_SIZE(fds) - 1);
	assert_int_equal(stats().nr_pending, 0);
	// A reset of the device ends them; those that come now wait again.
	fake_write(&t.fake, VIRTIO_MMIO_STATUS, 0);
	for (unsigned int i = 1; i < ARRAY_SIZE(fds); i++) {
		assert_int_equal(host_read(fds[i], &byte, 1), 0);
		fd_close(&fds[i]);
	}
	assert_int_equal(stats().nr_conns, 0);
	fds[0] = host_connect();
	host_write(fds[0], "CONNECT 1000\n", 13);
	fake_run(&t.fake);
	start(RX_BUFS);
	expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	fd_close(&fds[0]);
}

static void reset_closes_all(void **state)
{
	int listen_fd = host_listen(9, 8), a, b;
	struct stream s;

	(void)state;
	s = open_from_host(&a);
	open_from_guest(listen_fd, 9, &b);
	fake_write(&t.fake, VIRTIO_MMIO_STATUS, 0);
	assert_closed(&a);
	assert_closed(&b);
	assert_int_equal(t.ended, 2);
	start(RX_BUFS);
	// The guest has forgotten, and so have we.
	send_op(&s, VIRTIO_VSOCK_OP_RW, 0);
	expect(VIRTIO_VSOCK_OP_RST, &s);
	// So does a driver that lies.
	open_from_host(&a);
	fake_put_avail(&t.fake, TX, 5000);
	fake_write(&t.fake, VIRTIO_MMIO_QUEUE_NOTIFY, TX);
	assert_closed(&a);
	assert_int_equal(stats().nr_conns, 0);
	host_unlisten(&listen_fd, 9);
}

static void a_transport_reset_is_an_event(void **state)
{
	const struct fake_buf buf = {fake_alloc(&t.fake, PAGE_BYTES), 4, true};
	uint32_t written, id = 99;
	int fd;

	(void)state;
	open_from_host(&fd);
	// Before there is a buffer for it: it waits.
	virtio_vsock_transport_reset(t.fake.dev);
	assert_closed(&fd);
	fake_run(&t.fake);
	assert_false(fake_get_used(&t.fake, EVENT, NULL, NULL));
	fake_irqs(&t.fake);
	fake_add(&t.fake, EVENT, &buf, 1);
	fake_kick(&t.fake, EVENT);
	fake_run(&t.fake);
	assert_true(fake_get_used(&t.fake, EVENT, NULL, &written));
	assert_int_equal(fake_irqs(&t.fake), 1);
	assert_int_equal(written, 4);
	guest_mem_read(&t.fake.mem, buf.gpa, &id, sizeof(id));
	assert_int_equal(id, VIRTIO_VSOCK_EVENT_TRANSPORT_RESET);
	// A new connection waits until the guest has seen the event, which closes all that it has;
	fd = host_connect();
	host_write(fd, "CONNECT 1000\n", 13);
	expect_nothing();
	fd_close(&fd);
	fake_run(&t.fake);
	fake_add(&t.fake, EVENT, &buf, 1);
	fake_kick(&t.fake, EVENT);
	fake_run(&t.fake);
	open_from_host(&fd); // and the first one after it succeeds
	fd_close(&fd);
}

#define GENERATIONS 4

// A machine that is restored, and the restored one again: what was open is closed, with the guest
// told, and a host that came early enough to find the guest with its old connections waits.
static void a_restore_closes_what_was_open_and_new_connections_work(void **state)
{
	const struct fake_buf buf = {fake_alloc(&t.fake, PAGE_BYTES), 4, true};

	(void)state;
	fake_add(&t.fake, EVENT, &buf, 1);
	fake_kick(&t.fake, EVENT);
	for (unsigned int i = 0; i < GENERATIONS; i++) {
		const struct virtio_env env = fake_env(&t.fake);
		struct stream old, new = {.guest_port = GUEST_PORT, .buf_alloc = BUF_ALLOC};
		struct virtio_dev *dev;
		struct buf saved = {0};
		struct err err = {0};
		bool drained = false;
		uint32_t id = 99;
		char line[64] = {0};
		int fd, early;

		old = open_from_host(&fd);
		host_write(fd, "half", 4);
		virtio_dev_drain(t.fake.dev, set_flag, &drained);
		assert_true(drained);
		assert_int_equal(virtio_dev_save(t.fake.dev, &saved), 0);
		virtio_dev_destroy(TAKE_PTR(t.fake.dev));
		fd_close(&fd);
		assert_int_equal(create(&dev, &env, &err), 0);
		fake_attach(&t.fake, dev);
		if (virtio_dev_restore(dev, saved.data, saved.len, &err) < 0)
			fail_msg("%s", err.msg);
		buf_fini(&saved);
		early = host_connect();
		host_write(early, "CONNECT 1000\n", 13);
		fake_run(&t.fake);
		assert_false(fake_get_used(&t.fake, EVENT, NULL, NULL));
		virtio_dev_resume(dev);
		fake_run(&t.fake);
		assert_true(fake_get_used(&t.fake, EVENT, NULL, NULL));
		guest_mem_read(&t.fake.mem, buf.gpa, &id, sizeof(id));
		assert_int_equal(id, VIRTIO_VSOCK_EVENT_TRANSPORT_RESET);
		expect_nothing();
		send_data(&old, "old", 3);
		expect(VIRTIO_VSOCK_OP_RST, &old);
		// The guest is done with the event.
		fake_add(&t.fake, EVENT, &buf, 1);
		fake_kick(&t.fake, EVENT);
		new.host_port = le32toh(expect(VIRTIO_VSOCK_OP_REQUEST, NULL).hdr.src_port);
		assert_int_not_equal(new.host_port, old.host_port);
		send_op(&new, VIRTIO_VSOCK_OP_RESPONSE, 0);
		assert_true(host_read(early, line, sizeof(line) - 1) > 3);
		assert_memory_equal(line, "OK ", 3);
		fd_close(&early);
		expect(VIRTIO_VSOCK_OP_SHUTDOWN, NULL);
		send_op(&new, VIRTIO_VSOCK_OP_RST, 0);
		fake_run(&t.fake);
		assert_int_equal(stats().nr_conns, 0);
	}
}

static void pause_and_resume_lose_nothing(void **state)
{
	static uint8_t zeros[TX_BYTES];
	bool drained = false;
	struct packet packet;
	struct stream s;
	uint32_t got = 0;
	char buf[8] = {0};
	int fd, late;

	(void)state;
	s = open_from_host(&fd);
	virtio_dev_drain(t.fake.dev, set_flag, &drained);
	assert_true(drained);
	host_write(fd, zeros, 10000);
	late = host_connect();
	host_write(late, "CONNECT 1000\n", 13);
	expect_nothing();
	virtio_dev_resume(t.fake.dev);
	fake_run(&t.fake);
	while (receive(&packet)) {
		got += le32toh(packet.hdr.len);
		fake_run(&t.fake);
	}
	assert_int_equal(got, 10000);
	send_data(&s, "after", 5);
	assert_int_equal(host_read(fd, buf, 8), 5);
	fd_close(&late);
	fd_close(&fd);
}

// A listener whose backlog is full is tried again, rather than the guest refused.
static void a_full_backlog_is_tried_again(void **state)
{
	int listen_fd = host_listen(33, 0), fds[8];
	struct stream s[8];
	unsigned int nr = 0;

	(void)state;
	for (unsigned int i = 0; i < 8; i++) {
		s[i] = (struct stream){
			.host_port = 33, .guest_port = 100 + i, .buf_alloc = BUF_ALLOC};
		send_op(&s[i], VIRTIO_VSOCK_OP_REQUEST, 0);
	}
	while (nr < 8) {
		assert_true(fake_run_until(&t.fake, readable, &listen_fd));
		fds[nr] = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		assert_true(fds[nr] >= 0);
		nr++;
	}
	for (unsigned int i = 0; i < 8; i++) {
		expect(VIRTIO_VSOCK_OP_RESPONSE, NULL);
		fd_close(&fds[i]);
	}
	host_unlisten(&listen_fd, 33);
}

// Thousands at once, found by their ports, bounded, and none left over.
static void thousands_of_connections(void **state)
{
	static int fds[VIRTIO_VSOCK_CONNS_MAX];
	static uint32_t host_ports[VIRTIO_VSOCK_CONNS_MAX];
	struct rlimit old, more;
	struct stream s = {.guest_port = GUEST_PORT, .buf_alloc = BUF_ALLOC};
	struct packet packet;
	int extra, listen_fd = host_listen(1, 8);

	(void)state;
	getrlimit(RLIMIT_NOFILE, &old);
	more = (struct rlimit){MAX(old.rlim_cur, 2 * VIRTIO_VSOCK_CONNS_MAX + 64),
		MAX(old.rlim_max, 2 * VIRTIO_VSOCK_CONNS_MAX + 64)};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &more), 0);
	for (unsigned int i = 0; i < VIRTIO_VSOCK_CONNS_MAX; i++) {
		fds[i] = host_connect();
		host_write(fds[i], "CONNECT 1000\n", 13);
		packet = expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
		s.host_port = host_ports[i] = le32toh(packet.hdr.src_port);
		assert_int_equal(le32toh(packet.hdr.buf_alloc), i < 64 ? WINDOW : 16384);
		send_op(&s, VIRTIO_VSOCK_OP_RESPONSE, 0);
	}
	assert_int_equal(stats().nr_conns, VIRTIO_VSOCK_CONNS_MAX);
	// One more waits in the backlog; one from the guest is refused.
	extra = host_connect();
	host_write(extra, "CONNECT 1000\n", 13);
	expect_nothing();
	const struct stream refused = {.host_port = 1, .guest_port = 5};

	send_op(&refused, VIRTIO_VSOCK_OP_REQUEST, 0);
	expect(VIRTIO_VSOCK_OP_RST, &refused);
	for (unsigned int i = 0; i < VIRTIO_VSOCK_CONNS_MAX; i += 97) {
		host_write(fds[i], &i, sizeof(i));
		packet = expect(VIRTIO_VSOCK_OP_RW, NULL);
		assert_int_equal(le32toh(packet.hdr.src_port), host_ports[i]);
		assert_memory_equal(packet.data, &i, sizeof(i));
	}
	fd_close(&fds[0]);
	s.host_port = host_ports[0];
	expect(VIRTIO_VSOCK_OP_RST, &s); // it has not even read its OK
	expect(VIRTIO_VSOCK_OP_REQUEST, NULL); // the one that has waited
	for (unsigned int i = 1; i < VIRTIO_VSOCK_CONNS_MAX; i++) {
		s.host_port = host_ports[i];
		send_op(&s, VIRTIO_VSOCK_OP_SHUTDOWN, 3);
		expect(VIRTIO_VSOCK_OP_RST, &s);
		fd_close(&fds[i]);
	}
	fd_close(&extra);
	expect(VIRTIO_VSOCK_OP_RST, NULL);
	assert_int_equal(stats().nr_conns, 0);
	host_unlisten(&listen_fd, 1);
	setrlimit(RLIMIT_NOFILE, &old);
}

// The guest refuses to take its resets: what we keep for it is bounded.
static void resets_are_bounded(void **state)
{
	struct stream s = {.host_port = 1};
	struct packet packet;
	unsigned int nr = 0;

	(void)state;
	start(0);
	for (unsigned int i = 0; i < 1000; i++) {
		s.guest_port = i;
		send_op(&s, VIRTIO_VSOCK_OP_RW, 0);
	}
	assert_int_equal(stats().dropped_resets, 1000 - 256);
	for (unsigned int i = 0; i < RX_BUFS; i++)
		offer_rx(i);
	fake_kick(&t.fake, RX);
	fake_run(&t.fake);
	while (receive(&packet)) {
		assert_int_equal(le32toh(packet.hdr.dst_port), nr);
		nr++;
		fake_run(&t.fake);
	}
	assert_int_equal(nr, 256);
}

// Out of descriptors: no spinning, and it goes on when there are some.
static void out_of_descriptors(void **state)
{
	struct rlimit old, low;
	int fd = host_connect(), probe;

	(void)state;
	host_write(fd, "CONNECT 1000\n", 13);
	getrlimit(RLIMIT_NOFILE, &old);
	probe = dup(fd);
	low = (struct rlimit){(rlim_t)probe, old.rlim_max};
	fd_close(&probe);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	expect_nothing();
	// Nothing is pending at once: the loop waits for the retry.
	uint64_t began = now_ns();

	assert_int_equal(loop_turn(&t.fake.loop, 20000000, NULL), 0);
	assert_true(now_ns() - began >= 15000000);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	expect(VIRTIO_VSOCK_OP_REQUEST, NULL);
	fd_close(&fd);
}

static void bad_configurations_are_refused(void **state)
{
	static const uint64_t bad_cids[] = {0, 1, 2, UINT32_MAX, 1ULL << 32};
	struct virtio_env env = fake_env(&t.fake);
	struct virtio_dev *dev = NULL;
	struct err err = {0};
	char path[96], longest[120];
	struct stat st;

	(void)state;
	snprintf(path, sizeof(path), "%s/other.sock", t.dir);
	for (unsigned int i = 0; i < ARRAY_SIZE(bad_cids); i++) {
		const struct vsock_config config = {.guest_cid = bad_cids[i], .socket_path = path};

		assert_int_equal(virtio_vsock_create(&dev, &config, &env, &err), -EINVAL);
	}
	memset(longest, 'x', sizeof(longest));
	memcpy(longest, t.dir, strlen(t.dir));
	longest[strlen(t.dir)] = '/';
	longest[97] = '\0';
	assert_int_equal(
		virtio_vsock_create(&dev,
			&(struct vsock_config){.guest_cid = 3, .socket_path = longest}, &env, &err),
		-ENAMETOOLONG);
	longest[96] = '\0';
	assert_int_equal(
		virtio_vsock_create(&dev,
			&(struct vsock_config){.guest_cid = 3, .socket_path = longest}, &env, &err),
		0);
	virtio_dev_destroy(dev);
	assert_int_equal(virtio_vsock_create(&dev,
				 &(struct vsock_config){
					 .guest_cid = 3, .socket_path = "/nonexistent/vsock.sock"},
				 &env, &err),
		-ENOENT);
	assert_non_null(strstr(err.msg, "/nonexistent/vsock.sock"));
	// Only a socket is replaced.
	int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

	fd_close(&fd);
	assert_int_equal(
		virtio_vsock_create(&dev,
			&(struct vsock_config){.guest_cid = 3, .socket_path = path}, &env, &err),
		-EADDRINUSE);
	assert_int_equal(lstat(path, &st), 0);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(lstat(t.path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
}

#define WITH(fn)     cmocka_unit_test_setup_teardown(fn, setup, teardown)
#define WRAPPING(fn) cmocka_unit_test_setup_teardown(fn, setup_wrapping, teardown)

int main(void)
{
	static const struct device_case device = {.name = "vsock",
		.device_id = VIRTIO_ID_VSOCK,
		.eager_queues = 1U << TX,
		.create = create};
	const struct CMUnitTest tests[] = {
		WITH(the_host_connects),
		WITH(the_guest_connects),
		WITH(refusals),
		WITH(the_hello_is_taken_as_firecracker_does),
		WITH(what_follows_the_hello_is_the_guests),
		WITH(the_host_shuts_one_way),
		WITH(the_guest_shuts_one_way),
		WITH(a_slow_reader_gets_all_after_the_guest_has_closed),
		WITH(a_lingering_connection_ends_with_its_host),
		WITH(the_window_is_exact),
		WRAPPING(the_window_is_exact),
		WITH(the_guests_credit_is_exact),
		WRAPPING(the_guests_credit_is_exact),
		WITH(credit_is_told_when_asked_and_when_half_is_gone),
		WRAPPING(credit_is_told_when_asked_and_when_half_is_gone),
		WITH(data_survives_both_ways),
		WRAPPING(data_survives_both_ways),
		WITH(a_turn_ends_in_one_interrupt),
		WITH(the_guest_is_not_interrupted_for_its_own_packets),
		WITH(streams_take_turns),
		WITH(without_rx_buffers_it_waits),
		WITH(headers_are_checked),
		WITH(any_layout_of_descriptors),
		WITH(rx_buffers_without_room_are_a_lie),
		cmocka_unit_test_setup_teardown(
			early_connections_wait_for_the_driver, setup_idle, teardown),
		WITH(reset_closes_all),
		WITH(a_transport_reset_is_an_event),
		WITH(a_restore_closes_what_was_open_and_new_connections_work),
		WITH(pause_and_resume_lose_nothing),
		WITH(a_full_backlog_is_tried_again),
		WITH(thousands_of_connections),
		WITH(resets_are_bounded),
		WITH(out_of_descriptors),
		WITH(bad_configurations_are_refused),
	};
	int failed;

	if (make_dir(NULL) < 0)
		return 1;
	failed = device_suite(&device);
	if (remove_dir(NULL) < 0)
		failed++;
	return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
