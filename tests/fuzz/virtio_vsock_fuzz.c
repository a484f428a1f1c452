// SPDX-License-Identifier: Apache-2.0
// Fuzzes the socket device from both sides: a guest that mostly plays by the rules and sometimes
// lies, and a host that opens, writes, reads, shuts and closes as it likes. A model of what the
// guest may see checks each packet that it gets: credit to the byte, data in order, nothing after
// an end, nothing for a connection that it does not know.
//
// Input: operations of a byte each, with their arguments.
#include <errno.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_vsock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "devices/virtio_vsock.h"
#include "tests/support/fake_driver.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CID          3U
#define HDR          44U
#define OPS_MAX      300U
#define LISTENERS    2U // on ports 1 and 2
#define GUEST_PORTS  4U
#define STREAMS_MAX  32U
#define RX_BYTES     4096U
#define RX_SLOTS     64U
#define TX_BYTES     65536U
#define HOST_PORT_LO 0x40000000U

enum { RX, TX, EVENT };

// A connection as the guest knows it.
struct stream {
	bool used;
	bool open; // answered
	bool lied; // about its credit, or sent what it may not: then the device may end it
	bool host_sent_shut;
	uint32_t host_port, guest_port;
	uint32_t buf_alloc, fwd_cnt; // ours
	uint32_t got; // bytes from the host
	uint32_t credit_from; // the most that the device may have sent: got <= it
	uint32_t sent;
	uint32_t peer_alloc, peer_fwd;
};

// A socket of the host's.
struct peer {
	int fd;
	bool hello; // it has still to read its OK
	uint32_t host_port; // 0: not known yet
	uint32_t wrote, read;
};

static struct {
	struct fake_driver fake;
	char dir[32];
	char path[64];
	int listeners[LISTENERS];
	struct stream streams[STREAMS_MAX];
	struct peer peers[STREAMS_MAX];
	gpa_t rx_mem, tx_mem;
	uint16_t slot_of_head[VIRTQ_SIZE_MAX];
	uint64_t rx_free; // slots that are not offered
	bool up;
} t;

// Data is the same for all streams: a byte tells its place.
static uint8_t pattern(uint32_t at)
{
	return (uint8_t)(at * 37 >> 4);
}

static struct stream *find(uint32_t host_port, uint32_t guest_port)
{
	for (unsigned int i = 0; i < STREAMS_MAX; i++)
		if (t.streams[i].used && t.streams[i].host_port == host_port &&
			t.streams[i].guest_port == guest_port)
			return &t.streams[i];
	return NULL;
}

static struct stream *new_stream(uint32_t host_port, uint32_t guest_port)
{
	for (unsigned int i = 0; i < STREAMS_MAX; i++) {
		if (t.streams[i].used)
			continue;
		t.streams[i] = (struct stream){.used = true,
			.host_port = host_port,
			.guest_port = guest_port,
			.buf_alloc = 20000,
			.credit_from = 20000};
		return &t.streams[i];
	}
	return NULL;
}

static void close_peers(void)
{
	for (unsigned int i = 0; i < STREAMS_MAX; i++)
		fd_close(&t.peers[i].fd);
}

static struct peer *new_peer(int fd)
{
	for (unsigned int i = 0; i < STREAMS_MAX; i++) {
		if (t.peers[i].fd >= 0)
			continue;
		t.peers[i] = (struct peer){.fd = fd};
		return &t.peers[i];
	}
	fd_close(&fd);
	return NULL;
}

static void start(uint64_t features)
{
	fake_start_with(&t.fake, features, 128);
	t.rx_mem = fake_alloc(&t.fake, RX_SLOTS * 2 * RX_BYTES);
	t.tx_mem = fake_alloc(&t.fake, TX_BYTES + PAGE_BYTES);
	t.rx_free = UINT64_MAX;
	memset(t.streams, 0, sizeof(t.streams));
}

static void clean_up(void)
{
	char path[80];

	fake_fini(&t.fake);
	for (unsigned int i = 0; i < LISTENERS; i++) {
		fd_close(&t.listeners[i]);
		snprintf(path, sizeof(path), "%s_%u", t.path, i + 1);
		unlink(path);
	}
	rmdir(t.dir);
}

static void setup(void)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct vsock_config config = {.guest_cid = CID, .socket_path = t.path};
	struct virtio_env env;
	struct virtio_dev *dev;

	snprintf(t.dir, sizeof(t.dir), "/tmp/mayfly-fuzz-XXXXXX");
	if (!mkdtemp(t.dir) || atexit(clean_up) != 0)
		abort();
	snprintf(t.path, sizeof(t.path), "%s/v", t.dir);
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (virtio_vsock_create(&dev, &config, &env, NULL) < 0)
		abort();
	fake_attach(&t.fake, dev);
	for (unsigned int i = 0; i < LISTENERS; i++) {
		t.listeners[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		snprintf(addr.sun_path, sizeof(addr.sun_path), "%s_%u", t.path, i + 1);
		if (bind(t.listeners[i], (struct sockaddr *)&addr, sizeof(addr)) < 0 ||
			listen(t.listeners[i], 64) < 0)
			abort();
	}
	for (unsigned int i = 0; i < STREAMS_MAX; i++)
		t.peers[i].fd = -1;
	t.up = true;
}

static void offer_rx(unsigned int nr)
{
	while (nr-- && t.rx_free) {
		const unsigned int slot = (unsigned int)__builtin_ctzll(t.rx_free);
		const uint64_t at = t.rx_mem.v + (uint64_t)slot * 2 * RX_BYTES;
		const struct fake_buf bufs[] = {
			{GPA(at), HDR, true}, {GPA(at + RX_BYTES), RX_BYTES, true}};
		int head = fake_add(&t.fake, RX, bufs, 2);

		if (head < 0)
			break;
		t.slot_of_head[head] = (uint16_t)slot;
		t.rx_free &= t.rx_free - 1;
	}
	fake_kick(&t.fake, RX);
}

static void send_packet(const struct virtio_vsock_hdr *hdr, uint32_t data_from, uint32_t len)
{
	static uint8_t data[TX_BYTES];
	struct fake_buf bufs[] = {
		{t.tx_mem, HDR, false}, {GPA(t.tx_mem.v + PAGE_BYTES), len, false}};

	for (uint32_t i = 0; i < len; i++)
		data[i] = pattern(data_from + i);
	guest_mem_write(&t.fake.mem, t.tx_mem, hdr, HDR);
	guest_mem_write(&t.fake.mem, bufs[1].gpa, data, len);
	if (fake_add(&t.fake, TX, bufs, len ? 2 : 1) < 0)
		return;
	fake_kick(&t.fake, TX);
	fake_run(&t.fake);
	while (fake_get_used(&t.fake, TX, NULL, NULL))
		;
}

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

static void take_rw(struct stream *s, const uint8_t *data, uint32_t len)
{
	FUZZ_CHECK((s->open || s->lied) && len > 0);
	FUZZ_CHECK(!s->host_sent_shut);
	for (uint32_t i = 0; i < len; i++)
		FUZZ_CHECK(data[i] == pattern(s->got + i));
	s->got += len;
	FUZZ_CHECK(s->lied || s->got <= s->credit_from);
}

// Takes what the device has sent.
static void receive(void)
{
	static uint8_t data[RX_BYTES];
	uint32_t written;
	int head;

	while (fake_get_used(&t.fake, RX, &head, &written)) {
		const unsigned int slot = t.slot_of_head[head];
		const uint64_t at = t.rx_mem.v + (uint64_t)slot * 2 * RX_BYTES;
		struct virtio_vsock_hdr hdr;
		struct stream *s;
		uint32_t len;

		t.rx_free |= 1ULL << slot;
		guest_mem_read(&t.fake.mem, GPA(at), &hdr, HDR);
		guest_mem_read(&t.fake.mem, GPA(at + RX_BYTES), data, sizeof(data));
		len = le32toh(hdr.len);
		FUZZ_CHECK(written == HDR + len && len <= RX_BYTES);
		FUZZ_CHECK(le64toh(hdr.src_cid) == 2 && le64toh(hdr.dst_cid) == CID);
		FUZZ_CHECK(le16toh(hdr.type) == VIRTIO_VSOCK_TYPE_STREAM);
		s = find(le32toh(hdr.src_port), le32toh(hdr.dst_port));
		if (s && le16toh(hdr.op) != VIRTIO_VSOCK_OP_RST) {
			FUZZ_CHECK(le32toh(hdr.buf_alloc) == 262144 ||
				   le32toh(hdr.buf_alloc) == 16384);
			FUZZ_CHECK(
				s->lied || s->sent - le32toh(hdr.fwd_cnt) <= s->sent - s->peer_fwd);
			s->peer_alloc = le32toh(hdr.buf_alloc);
			s->peer_fwd = le32toh(hdr.fwd_cnt);
		}
		FUZZ_CHECK(le16toh(hdr.op) == VIRTIO_VSOCK_OP_RW || len == 0);
		// Sent before the device heard that the guest has ended it.
		if (!s && le16toh(hdr.op) != VIRTIO_VSOCK_OP_REQUEST)
			continue;
		switch (le16toh(hdr.op)) {
		case VIRTIO_VSOCK_OP_REQUEST:
			FUZZ_CHECK(!s && le32toh(hdr.src_port) >= HOST_PORT_LO);
			s = new_stream(le32toh(hdr.src_port), le32toh(hdr.dst_port));
			if (s)
				s->peer_alloc = le32toh(hdr.buf_alloc);
			break;
		case VIRTIO_VSOCK_OP_RESPONSE:
			FUZZ_CHECK(!s->open && s->host_port < HOST_PORT_LO);
			s->open = true;
			break;
		case VIRTIO_VSOCK_OP_RST:
			s->used = false;
			break;
		case VIRTIO_VSOCK_OP_SHUTDOWN:
			FUZZ_CHECK(s->open || s->lied);
			FUZZ_CHECK(le32toh(hdr.flags) >= 1 && le32toh(hdr.flags) <= 3);
			if (le32toh(hdr.flags) & VIRTIO_VSOCK_SHUTDOWN_SEND)
				s->host_sent_shut = true;
			break;
		case VIRTIO_VSOCK_OP_RW:
			take_rw(s, data, len);
			break;
		case VIRTIO_VSOCK_OP_CREDIT_UPDATE:
			FUZZ_CHECK(s->open || s->lied);
			break;
		default:
			FUZZ_CHECK(le16toh(hdr.op) <= VIRTIO_VSOCK_OP_CREDIT_UPDATE);
		}
	}
}

// The guest does something to a stream that it has.
static void guest_acts(struct fuzz_input *in)
{
	uint8_t what = fuzz_u8(in), arg = fuzz_u8(in);
	struct stream *s = &t.streams[arg % STREAMS_MAX];
	struct virtio_vsock_hdr hdr;
	uint32_t room, len;

	for (unsigned int i = 0; i < STREAMS_MAX && !s->used; i++)
		s = &t.streams[(arg + i) % STREAMS_MAX];
	if (!s->used)
		return;
	room = s->peer_alloc - (s->sent - s->peer_fwd);
	switch (what % 8) {
	case 0:
		if (!s->open && s->host_port >= HOST_PORT_LO) {
			s->open = true;
			hdr = header(s, VIRTIO_VSOCK_OP_RESPONSE, 0);
			send_packet(&hdr, 0, 0);
		}
		break;
	case 1:
	case 2:
		len = MIN((uint32_t)fuzz_u16(in), room);
		if (!s->open || !len)
			break;
		hdr = header(s, VIRTIO_VSOCK_OP_RW, len);
		s->sent += len;
		send_packet(&hdr, s->sent - len, len);
		break;
	case 3: // it has consumed what it got, or a part of it
		s->fwd_cnt = what & 8 ? s->got : s->fwd_cnt + (s->got - s->fwd_cnt) / 2;
		if (what & 16) {
			s->buf_alloc = fuzz_u16(in);
			// What has been granted stays so: it may be under way.
		}
		s->credit_from = MAX(s->credit_from, s->fwd_cnt + s->buf_alloc);
		hdr = header(s, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0);
		send_packet(&hdr, 0, 0);
		break;
	case 4:
		hdr = header(s, VIRTIO_VSOCK_OP_SHUTDOWN, 0);
		hdr.flags = htole32(what >> 4);
		send_packet(&hdr, 0, 0);
		break;
	case 5:
		hdr = header(s, VIRTIO_VSOCK_OP_RST, 0);
		s->used = false;
		send_packet(&hdr, 0, 0);
		break;
	case 6:
		s->lied |= !s->open; // too early, but it gets its answer
		hdr = header(s, VIRTIO_VSOCK_OP_CREDIT_REQUEST, 0);
		send_packet(&hdr, 0, 0);
		break;
	default: // anything, anyhow
		s->lied = true;
		hdr = header(s, what & 8 ? VIRTIO_VSOCK_OP_RW : arg % 10, fuzz_u16(in));
		if (what & 16)
			hdr.buf_alloc = htole32(fuzz_u32(in));
		if (what & 32)
			hdr.fwd_cnt = htole32(fuzz_u32(in));
		if (what & 64)
			hdr.type = htole16(fuzz_u16(in));
		if (what & 128)
			hdr.flags = htole32(fuzz_u32(in));
		len = MIN(le32toh(hdr.len), TX_BYTES);
		send_packet(&hdr, s->sent, arg & 128 ? len : len / 2);
		// Whether that ended the stream is not for us to tell; a reset says so.
		if (le16toh(hdr.op) == VIRTIO_VSOCK_OP_RW &&
			le16toh(hdr.type) == VIRTIO_VSOCK_TYPE_STREAM)
			s->sent += len;
		break;
	}
}

static void guest_connects(struct fuzz_input *in)
{
	uint8_t arg = fuzz_u8(in);
	struct stream *s;
	uint32_t host_port = arg % (LISTENERS + 2), guest_port = 100 + arg / 16 % GUEST_PORTS;
	struct virtio_vsock_hdr hdr;

	// Whatever there was between these two before is over.
	fake_run(&t.fake);
	receive();
	if (find(host_port, guest_port))
		return;
	s = new_stream(host_port, guest_port);
	if (!s)
		return;
	hdr = header(s, VIRTIO_VSOCK_OP_REQUEST, 0);
	send_packet(&hdr, 0, 0);
}

static void host_connects(struct fuzz_input *in)
{
	static const char *const hellos[] = {"CONNECT 100\n", "CONNECT 101\n", "connect 102\n",
		"CONNECT 103", "\n", "CONNECT 4294967295\n", "CONNECT 100\nCONNECT", "nonsense\n"};
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	const char *hello = hellos[fuzz_u8(in) % ARRAY_SIZE(hellos)];
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct peer *peer;

	if (fd < 0)
		abort();
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", t.path);
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		fd_close(&fd);
		return;
	}
	peer = new_peer(fd);
	if (!peer)
		return;
	peer->hello = true;
	// What follows the line is data, and as such not of our pattern: then it is not checked by
	// being written at all. So only whole lines and fragments.
	if (send(fd, hello,
		    strchr(hello, '\n') ? (size_t)(strchr(hello, '\n') - hello) + 1 : strlen(hello),
		    MSG_NOSIGNAL) < 0)
		fd_close(&peer->fd);
}

static void host_accepts(uint8_t which)
{
	int fd = accept4(t.listeners[which % LISTENERS], NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd >= 0)
		new_peer(fd);
}

static void host_acts(struct fuzz_input *in)
{
	static uint8_t data[65536];
	uint8_t what = fuzz_u8(in), arg = fuzz_u8(in);
	struct peer *peer = &t.peers[arg % STREAMS_MAX];
	uint32_t len;
	ssize_t n;

	for (unsigned int i = 0; i < STREAMS_MAX && peer->fd < 0; i++)
		peer = &t.peers[(arg + i) % STREAMS_MAX];
	if (peer->fd < 0)
		return;
	if (peer->hello) {
		char ok[64] = {0};

		n = read(peer->fd, ok, sizeof(ok) - 1);
		if (n == 0) {
			fd_close(&peer->fd);
		} else if (n > 0) {
			const char *line_end = memchr(ok, '\n', (size_t)n);

			FUZZ_CHECK(line_end && memcmp(ok, "OK ", 3) == 0);
			for (const char *p = line_end + 1; p < ok + n; p++)
				FUZZ_CHECK((uint8_t)*p == pattern(peer->read++));
			peer->hello = false;
		} else if (what % 8 == 4) {
			fd_close(&peer->fd);
		}
		return;
	}
	switch (what % 8) {
	case 0:
	case 1:
		len = fuzz_u16(in);
		for (uint32_t i = 0; i < len; i++)
			data[i] = pattern(peer->wrote + i);
		n = send(peer->fd, data, len, MSG_NOSIGNAL);
		if (n > 0)
			peer->wrote += (uint32_t)n;
		break;
	case 2:
	case 3:
		n = read(peer->fd, data, what & 8 ? sizeof(data) : 100);
		for (ssize_t i = 0; i < n; i++)
			FUZZ_CHECK(data[i] == pattern(peer->read + (uint32_t)i));
		if (n > 0)
			peer->read += (uint32_t)n;
		break;
	case 4:
		fd_close(&peer->fd);
		break;
	case 5:
		shutdown(peer->fd, SHUT_WR);
		break;
	case 6:
		shutdown(peer->fd, SHUT_RD);
		break;
	default:
		break;
	}
}

static void ignore(void *opaque)
{
	(void)opaque;
}

static void check(void)
{
	struct virtio_vsock_stats stats;

	virtio_vsock_get_stats(t.fake.dev, &stats);
	FUZZ_CHECK(stats.nr_conns <= VIRTIO_VSOCK_CONNS_MAX);
	FUZZ_CHECK(stats.nr_pending <= VIRTIO_VSOCK_PENDING_MAX);
	FUZZ_CHECK(stats.buffered_bytes <= stats.nr_conns * 262144ULL);
	FUZZ_CHECK(fake_status(&t.fake) == 15);
}

static bool nothing_left(void *opaque)
{
	struct virtio_vsock_stats stats;

	(void)opaque;
	virtio_vsock_get_stats(t.fake.dev, &stats);
	return !stats.nr_conns && !stats.nr_pending && !stats.buffered_bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fuzz_input in = {data, size};
	uint64_t features;

	if (!t.up)
		setup();
	features = fake_device_features(&t.fake);
	if (fuzz_u8(&in) & 1)
		features &= ~(1ULL << 29); // without EVENT_IDX
	start(features);
	offer_rx(16);
	for (unsigned int i = 0; i < OPS_MAX && in.left; i++) {
		uint8_t op = fuzz_u8(&in);

		switch (op % 16) {
		case 0:
			guest_connects(&in);
			break;
		case 1:
			host_connects(&in);
			break;
		case 2:
			host_accepts(op / 16);
			break;
		case 3:
		case 4:
		case 5:
		case 6:
			guest_acts(&in);
			break;
		case 7:
		case 8:
		case 9:
		case 10:
			host_acts(&in);
			break;
		case 11:
			offer_rx(op / 16);
			break;
		case 12:
			fake_run(&t.fake);
			receive();
			break;
		case 13:
			if (op > 240) {
				start(features);
			} else if (op > 200) {
				virtio_vsock_transport_reset(t.fake.dev);
				memset(t.streams, 0, sizeof(t.streams));
				// What it had sent before is void.
				fake_run(&t.fake);
				while (t.rx_free != UINT64_MAX &&
					fake_get_used(&t.fake, RX, NULL, NULL))
					;
				start(features);
			} else {
				virtio_dev_drain(t.fake.dev, ignore, NULL);
				if (op & 16)
					fake_run(&t.fake);
				virtio_dev_resume(t.fake.dev);
			}
			break;
		default:
			offer_rx(64);
			fake_run(&t.fake);
			receive();
			break;
		}
		check();
	}
	// The host and then the guest go: nothing is left over.
	close_peers();
	for (unsigned int i = 0; i < LISTENERS; i++) {
		int fd;

		while ((fd = accept4(t.listeners[i], NULL, NULL, SOCK_CLOEXEC)) >= 0)
			fd_close(&fd);
	}
	fake_write(&t.fake, VIRTIO_MMIO_STATUS, 0);
	FUZZ_CHECK(fake_run_until(&t.fake, nothing_left, NULL));
	fake_irqs(&t.fake);
	return 0;
}
