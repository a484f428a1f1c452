// SPDX-License-Identifier: Apache-2.0
// virtio socket device; see the header. Loop thread.
//
// Whatever happens (a notification, a socket that is ready, a deadline) is only noted at its
// connection; run() does the work once at the end of the loop's turn. So the packets and the one
// interrupt of a turn are for all that has happened in it.
#include "devices/virtio_vsock.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_vsock.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/loop.h"

enum { RX_QUEUE, TX_QUEUE, EVENT_QUEUE, NR_QUEUES }; // 5.10.2; named from the driver's side

#define QUEUE_SIZE      256U
#define HDR_BYTES       sizeof(struct virtio_vsock_hdr)
#define CHAINS_PER_RUN  512U // of each queue; then the rest of the loop has its turn
#define RX_BATCH_CHAINS 32U // filled by one readv()
#define RX_BATCH_BYTES  65536U // a connection's share before the next one's
#define IOV_NR          64U
#define ACCEPTS_PER_RUN 64U
#define LISTEN_BACKLOG  128
#define LISTEN_RETRY_NS 100000000ULL // when the process is out of descriptors

// The window that a connection advertises is what it may cost us in memory. The first few get a
// large one, thousands still get along: at most 16 + 64 MiB.
#define WINDOW_BYTES       262144U
#define WINDOW_SMALL_BYTES 16384U
#define LARGE_WINDOWS_MAX  64U

// A host socket whose backlog is full is tried again for as long as Linux's connect() waits.
#define CONNECT_RETRY_NS  50000000ULL
#define CONNECT_TRIES_MAX 40U

// All that an interrupt for packets that we have taken does in the guest is to free them. So it
// waits for the next one that has packets for the guest, unless none comes, or much would be freed.
#define TX_IRQ_DELAY_NS   100000000ULL
#define TX_IRQ_CHAINS_MAX (QUEUE_SIZE / 4)
#define TX_IRQ_BYTES_MAX  (2 * RX_BATCH_BYTES)

#define HOST_PORT_FIRST 0x40000000U // of connections from the host
#define HOST_PORT_LAST  0x7fffffffU
#define HASH_BITS       10
#define RESETS_MAX      256U
#define HELLO_MAX_BYTES 32U // "CONNECT 4294967295\r\n" and some blanks

#define SHUT_BOTH (VIRTIO_VSOCK_SHUTDOWN_RCV | VIRTIO_VSOCK_SHUTDOWN_SEND)

// What is owed to the guest besides data, in the order in which it is sent.
#define OWE_REQUEST  0x1U
#define OWE_RESPONSE 0x2U
#define OWE_SHUTDOWN 0x4U
#define OWE_CREDIT   0x8U

struct link {
	struct link *prev, *next;
};

enum conn_state {
	CONN_HELLO, // from the host; "CONNECT PORT\n" has not come yet
	CONN_PENDING, // from the host; the guest's driver is not up, or to hear of a reset first
	CONN_REQUESTED, // from the host; the guest has not answered
	CONN_CONNECTING, // from the guest; the host's backlog is full
	CONN_OPEN,
	CONN_LINGER, // over for the guest; the host has yet to take what the guest sent
};

struct conn {
	struct vsock *vsock;
	struct link all;
	struct link ready; // in vsock->ready, else self-linked
	struct conn *hash_next; // of those that the guest knows: REQUESTED, CONNECTING, OPEN
	enum conn_state state;
	uint32_t host_port, guest_port;
	int fd;
	int watch;
	uint64_t deadline_ns; // 0: none
	uint32_t tries; // CONNECTING
	bool readable; // the socket has data, or its end
	bool hung_up; // the host has closed its socket
	bool large_window;
	uint8_t owed; // OWE_*
	uint8_t guest_shut; // VIRTIO_VSOCK_SHUTDOWN_*, as the guest said
	uint8_t host_shut; // as we said or owe to the guest
	uint32_t burst; // chains to fill at once: 1, and more while the socket fills them

	// Credit (5.10.6.3). The counters are free-running and wrap.
	uint32_t sent_cnt; // to the guest
	uint32_t peer_fwd_cnt; // of which the guest says that it has consumed them; never ahead
	uint32_t peer_buf_alloc;
	uint32_t recv_cnt; // from the guest
	uint32_t fwd_cnt; // of which the socket has taken
	uint32_t told_fwd_cnt; // of which the guest knows
	uint32_t buf_alloc; // our window

	// From the guest, for the socket: a ring. Made when the socket takes no more, which is
	// rare, and gone when it is empty. buf_len == recv_cnt - fwd_cnt, unless the host has shut.
	uint8_t *buf;
	uint32_t buf_cap, buf_head, buf_len;

	char hello[HELLO_MAX_BYTES];
	uint32_t hello_len;
};

struct vsock {
	struct virtio_dev dev;
	uint64_t guest_cid;
	char *socket_path;
	char *listen_path; // the same, but for a socket that is not published yet
	int listen_fd;
	int listen_watch;
	uint64_t listen_retry_ns; // 0: not out of descriptors

	struct link all;
	struct link ready; // those with something for the guest, in turn
	struct conn *hash[1U << HASH_BITS];
	void (*conn_ended)(void *opaque);
	void *opaque;
	uint32_t nr_large_windows;
	uint32_t next_host_port;
	uint32_t first_cnt;

	// Connections that are no more, or never were, and of which the guest has to hear.
	struct {
		uint32_t host_port, guest_port;
	} resets[RESETS_MAX];
	uint32_t resets_head, nr_resets;

	bool bound; // the path is ours to remove
	bool tx_kicked;
	bool tx_irq_owed;
	bool event_owed;
	// The guest has not seen the event yet. Until then it hears of no new connection, which it
	// would close with the old ones.
	bool event_unread;
	uint8_t unused1[1]; // padding
	uint16_t event_idx; // of its available ring, which moves on when it has
	uint32_t tx_chains, tx_bytes; // taken since the last interrupt
	uint32_t unused2; // padding
	struct loop_timer tx_irq_timer;
	struct loop_timer run_timer; // the end of this turn
	struct loop_timer deadline_timer; // the soonest deadline
	struct virtio_vsock_stats stats;

	// The chains of one batch.
	struct guest_view segs[2 * VIRTQ_CHAIN_MAX];
};

// --- Lists -----------------------------------------------------------------------------------

static void link_init(struct link *link)
{
	link->prev = link->next = link;
}

static bool link_alone(const struct link *link)
{
	return link->next == link;
}

static void link_remove(struct link *link)
{
	link->prev->next = link->next;
	link->next->prev = link->prev;
	link_init(link);
}

static void link_append(struct link *list, struct link *link)
{
	link->prev = list->prev;
	link->next = list;
	list->prev->next = link;
	list->prev = link;
}

// --- The table -------------------------------------------------------------------------------

static struct vsock *vsock_of(struct virtio_dev *dev)
{
	return container_of(dev, struct vsock, dev);
}

static struct conn **bucket(struct vsock *v, uint32_t host_port, uint32_t guest_port)
{
	uint32_t mixed = (host_port * 0x9e3779b1U) ^ (guest_port * 0x85ebca6bU);

	return &v->hash[mixed >> (32 - HASH_BITS)];
}

static struct conn *find(struct vsock *v, uint32_t host_port, uint32_t guest_port)
{
	struct conn *conn = *bucket(v, host_port, guest_port);

	while (conn && (conn->host_port != host_port || conn->guest_port != guest_port))
		conn = conn->hash_next;
	return conn;
}

static bool known_to_guest(const struct conn *conn)
{
	return conn->state == CONN_REQUESTED || conn->state == CONN_CONNECTING ||
	       conn->state == CONN_OPEN;
}

static bool is_pending(const struct conn *conn)
{
	return conn->state == CONN_HELLO || conn->state == CONN_PENDING;
}

static void schedule_run(struct vsock *v)
{
	// Timers run after the turn's events: one that is overdue runs at the end of this turn.
	if (!v->run_timer.armed)
		loop_timer_set(v->dev.env.loop, &v->run_timer, 0);
}

static void deadline_at(struct vsock *v, uint64_t deadline_ns)
{
	if (!v->deadline_timer.armed || deadline_ns < v->deadline_timer.deadline_ns)
		loop_timer_set(v->dev.env.loop, &v->deadline_timer, deadline_ns);
}

static void set_deadline(struct conn *conn, uint64_t after_ns)
{
	conn->deadline_ns = now_ns() + after_ns;
	deadline_at(conn->vsock, conn->deadline_ns);
}

static void update_listen(struct vsock *v)
{
	bool room = v->stats.nr_conns < VIRTIO_VSOCK_CONNS_MAX &&
		    v->stats.nr_pending < VIRTIO_VSOCK_PENDING_MAX;

	if (v->listen_watch >= 0)
		loop_watch_set(v->dev.env.loop, v->listen_watch,
			room && !v->dev.paused && !v->listen_retry_ns ? POLLIN : 0);
}

// The state, with what hangs on it: the hash table and the count of pending ones.
static void set_state(struct conn *conn, enum conn_state state)
{
	struct vsock *v = conn->vsock;
	bool was_known = known_to_guest(conn), was_pending = is_pending(conn);
	struct conn **at = bucket(v, conn->host_port, conn->guest_port);

	conn->state = state;
	if (!was_known && known_to_guest(conn)) {
		conn->hash_next = *at;
		*at = conn;
	} else if (was_known && !known_to_guest(conn)) {
		while (*at != conn)
			at = &(*at)->hash_next;
		*at = conn->hash_next;
	}
	if (was_pending != is_pending(conn)) {
		v->stats.nr_pending += is_pending(conn) ? 1U : (uint32_t)-1;
		update_listen(v);
	}
}

static void conn_buf_drop(struct conn *conn)
{
	conn->vsock->stats.buffered_bytes -= conn->buf_len;
	free(conn->buf);
	conn->buf = NULL;
	conn->buf_cap = conn->buf_head = conn->buf_len = 0;
}

static void conn_close(struct conn *conn)
{
	struct vsock *v = conn->vsock;

	// LINGER is the state that neither table nor count knows.
	set_state(conn, CONN_LINGER);
	link_remove(&conn->ready);
	link_remove(&conn->all);
	loop_watch_del(v->dev.env.loop, &conn->watch);
	fd_close(&conn->fd);
	conn_buf_drop(conn);
	if (conn->large_window)
		v->nr_large_windows--;
	free(conn);
	v->stats.nr_conns--;
	update_listen(v);
	if (v->conn_ended)
		v->conn_ended(v->opaque);
}

// fd is taken, also on failure (NULL).
static struct conn *conn_new(
	struct vsock *v, int fd, enum conn_state state, uint32_t host_port, uint32_t guest_port)
{
	struct conn *conn = calloc(1, sizeof(*conn));

	if (!conn) {
		fd_close(&fd);
		return NULL;
	}
	conn->vsock = v;
	conn->fd = fd;
	conn->watch = -1;
	conn->host_port = host_port;
	conn->guest_port = guest_port;
	conn->burst = 1;
	conn->large_window = v->nr_large_windows < LARGE_WINDOWS_MAX;
	conn->buf_alloc = conn->large_window ? WINDOW_BYTES : WINDOW_SMALL_BYTES;
	if (conn->large_window)
		v->nr_large_windows++;
	link_init(&conn->ready);
	link_append(&v->all, &conn->all);
	conn->sent_cnt = conn->peer_fwd_cnt = v->first_cnt;
	conn->recv_cnt = conn->fwd_cnt = conn->told_fwd_cnt = v->first_cnt;
	v->stats.nr_conns++;
	conn->state = CONN_LINGER;
	set_state(conn, state);
	update_listen(v);
	return conn;
}

static void owe_reset(struct vsock *v, uint32_t host_port, uint32_t guest_port)
{
	if (v->nr_resets == RESETS_MAX) {
		// To wait for room would make the guest's two queues wait for each other. It finds
		// out by its own time-out, or by the reset of its next packet.
		v->stats.dropped_resets++;
		return;
	}
	v->resets[(v->resets_head + v->nr_resets) % RESETS_MAX].host_port = host_port;
	v->resets[(v->resets_head + v->nr_resets) % RESETS_MAX].guest_port = guest_port;
	v->nr_resets++;
	schedule_run(v);
}

static void conn_reset(struct conn *conn)
{
	if (known_to_guest(conn))
		owe_reset(conn->vsock, conn->host_port, conn->guest_port);
	conn_close(conn);
}

// --- Credit and readiness --------------------------------------------------------------------

// What the guest has room for. It may shrink its buffer below what is under way.
static uint32_t peer_free(const struct conn *conn)
{
	uint32_t in_flight = conn->sent_cnt - conn->peer_fwd_cnt;

	return conn->peer_buf_alloc > in_flight ? conn->peer_buf_alloc - in_flight : 0;
}

static void take_peer_credit(struct conn *conn, uint32_t buf_alloc, uint32_t fwd_cnt)
{
	conn->peer_buf_alloc = buf_alloc;
	// Only what is under way can have been consumed. It may come out of order, since a guest
	// with several CPUs numbers its packets before it queues them; and it may be a lie.
	if (conn->sent_cnt - fwd_cnt < conn->sent_cnt - conn->peer_fwd_cnt)
		conn->peer_fwd_cnt = fwd_cnt;
}

static bool may_read(const struct conn *conn)
{
	return conn->state == CONN_OPEN && !(conn->guest_shut & VIRTIO_VSOCK_SHUTDOWN_RCV) &&
	       !(conn->host_shut & VIRTIO_VSOCK_SHUTDOWN_SEND) && peer_free(conn) > 0;
}

// Brings the connection's place in the ready list and its watch in line with its state.
static void conn_update(struct conn *conn)
{
	struct vsock *v = conn->vsock;
	uint32_t events = 0;

	if (known_to_guest(conn) && link_alone(&conn->ready) &&
		(conn->owed || (conn->readable && may_read(conn)))) {
		link_append(&v->ready, &conn->ready);
		schedule_run(v);
	}
	if (conn->watch < 0)
		return;
	switch (conn->state) {
	case CONN_HELLO:
		events = POLLIN;
		break;
	case CONN_PENDING:
	case CONN_REQUESTED:
		events = POLLERR; // and POLLHUP, which is implied
		break;
	case CONN_CONNECTING:
		break;
	case CONN_OPEN:
	case CONN_LINGER:
		if (conn->buf_len)
			events |= POLLOUT;
		if (!conn->readable && may_read(conn))
			events |= POLLIN;
		// An error shows when we read; only where we do not, it has to be asked for.
		if (!conn->hung_up && !conn->readable)
			events |= POLLERR;
		break;
	}
	loop_watch_set(v->dev.env.loop, conn->watch, v->dev.paused ? 0 : events);
}

static void owe(struct conn *conn, uint8_t what)
{
	conn->owed |= what;
	conn_update(conn);
}

// The guest hears of its credit with each packet. One of its own is due only when the guest
// believes that less than half of our window is free, and it gains by it.
static void check_credit(struct conn *conn)
{
	uint32_t guest_sees_used = conn->recv_cnt - conn->told_fwd_cnt;
	uint32_t gain = conn->fwd_cnt - conn->told_fwd_cnt;

	if (conn->state == CONN_OPEN && guest_sees_used > conn->buf_alloc / 2 &&
		gain >= conn->buf_alloc / 4)
		owe(conn, OWE_CREDIT);
}

static void host_shut(struct conn *conn, uint8_t how)
{
	if (conn->state != CONN_OPEN || (conn->host_shut | how) == conn->host_shut)
		return;
	conn->host_shut |= how;
	owe(conn, OWE_SHUTDOWN);
}

// --- From the guest to the socket ------------------------------------------------------------

// The host reads no more: what waits for it is void, and the guest should stop.
static void host_stopped_reading(struct conn *conn)
{
	conn->fwd_cnt += conn->buf_len;
	conn_buf_drop(conn);
	host_shut(conn, VIRTIO_VSOCK_SHUTDOWN_RCV);
}

static bool conn_buf_reserve(struct conn *conn, uint32_t more)
{
	uint32_t need = conn->buf_len + more, cap = MAX(conn->buf_cap, 4096U), tail;
	uint8_t *grown;

	ASSERT(need <= conn->buf_alloc);
	if (need <= conn->buf_cap)
		return true;
	while (cap < need)
		cap *= 2;
	grown = malloc(cap);
	if (!grown)
		return false;
	if (conn->buf) {
		tail = MIN(conn->buf_len, conn->buf_cap - conn->buf_head);
		memcpy(grown, conn->buf + conn->buf_head, tail);
		memcpy(grown + tail, conn->buf, conn->buf_len - tail);
		free(conn->buf);
	}
	conn->buf = grown;
	conn->buf_cap = cap;
	conn->buf_head = 0;
	return true;
}

// Appends [off, off + len) of the chain's readable part.
static bool conn_buf_append(
	struct conn *conn, const struct virtq_chain *chain, size_t off, uint32_t len)
{
	if (!conn_buf_reserve(conn, len))
		return false;
	conn->vsock->stats.buffered_bytes += len;
	while (len) {
		uint32_t at = (conn->buf_head + conn->buf_len) % conn->buf_cap;
		uint32_t part = MIN(len, conn->buf_cap - at);
		size_t n = virtq_chain_read(chain, off, conn->buf + at, part);

		ASSERT(n == part);
		conn->buf_len += part;
		off += part;
		len -= part;
	}
	return true;
}

static ssize_t send_iov(int fd, struct iovec *iov, unsigned int nr)
{
	const struct msghdr msg = {.msg_iov = iov, .msg_iovlen = nr};
	ssize_t n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (n < 0)
		return errno == EINTR ? -EAGAIN : -errno;
	return n;
}

// Closes the connection when all is done that it lingered for; then it is gone.
static bool flush(struct conn *conn)
{
	while (conn->buf_len) {
		uint32_t tail = MIN(conn->buf_len, conn->buf_cap - conn->buf_head);
		struct iovec iov[2] = {
			{.iov_base = conn->buf + conn->buf_head, .iov_len = tail},
			{.iov_base = conn->buf, .iov_len = conn->buf_len - tail},
		};
		ssize_t n = send_iov(conn->fd, iov, iov[1].iov_len ? 2 : 1);

		if (n == -EAGAIN)
			break;
		if (n < 0) {
			host_stopped_reading(conn);
			break;
		}
		conn->buf_head = (conn->buf_head + (uint32_t)n) % conn->buf_cap;
		conn->buf_len -= (uint32_t)n;
		conn->fwd_cnt += (uint32_t)n;
		conn->vsock->stats.buffered_bytes -= (uint32_t)n;
	}
	if (!conn->buf_len) {
		conn_buf_drop(conn);
		if (conn->state == CONN_LINGER) {
			conn_close(conn);
			return false;
		}
		if (conn->guest_shut & VIRTIO_VSOCK_SHUTDOWN_SEND)
			shutdown(conn->fd, SHUT_WR);
	}
	check_credit(conn);
	return true;
}

static void take_data(struct conn *conn, const struct virtq_chain *chain, uint32_t len)
{
	uint32_t done = 0;

	if (conn->state != CONN_OPEN || conn->guest_shut & VIRTIO_VSOCK_SHUTDOWN_SEND ||
		len > conn->buf_alloc - (conn->recv_cnt - conn->fwd_cnt)) {
		conn_reset(conn);
		return;
	}
	conn->recv_cnt += len;
	conn->vsock->stats.from_guest_bytes += len;
	while (done < len && !conn->buf_len && !(conn->host_shut & VIRTIO_VSOCK_SHUTDOWN_RCV)) {
		struct iovec iov[IOV_NR];
		size_t bytes;
		unsigned int nr = virtq_chain_iov(
			chain, false, HDR_BYTES + done, len - done, iov, IOV_NR, &bytes);
		ssize_t n = send_iov(conn->fd, iov, nr);

		if (n == -EAGAIN)
			break;
		if (n < 0) {
			host_stopped_reading(conn);
			break;
		}
		done += (uint32_t)n;
	}
	if (conn->host_shut & VIRTIO_VSOCK_SHUTDOWN_RCV)
		done = len; // sent before the guest could know
	conn->fwd_cnt += done;
	if (done < len && !conn_buf_append(conn, chain, HDR_BYTES + done, len - done)) {
		conn_reset(conn);
		return;
	}
	check_credit(conn);
	conn_update(conn);
}

static void on_conn_event(void *opaque, uint32_t revents);

static bool watch_conn(struct conn *conn)
{
	int r = loop_watch_add(conn->vsock->dev.env.loop, conn->fd, 0, on_conn_event, conn, NULL);

	if (r < 0)
		return false;
	conn->watch = r;
	return true;
}

// Connects to the host's listener. Tries again later if that is busy.
static void connect_host(struct conn *conn)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int len = snprintf(addr.sun_path, sizeof(addr.sun_path), "%s_%u", conn->vsock->socket_path,
		conn->host_port);

	ASSERT(len > 0 && (size_t)len < sizeof(addr.sun_path));
	if (connect(conn->fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		if (errno == EAGAIN && conn->tries++ < CONNECT_TRIES_MAX)
			set_deadline(conn, CONNECT_RETRY_NS);
		else
			conn_reset(conn);
		return;
	}
	if (!watch_conn(conn)) {
		conn_reset(conn);
		return;
	}
	conn->deadline_ns = 0;
	set_state(conn, CONN_OPEN);
	owe(conn, OWE_RESPONSE);
}

static void take_request(struct vsock *v, uint32_t host_port, uint32_t guest_port,
	const struct virtio_vsock_hdr *hdr)
{
	struct conn *conn;
	int fd = -1;

	if (v->stats.nr_conns < VIRTIO_VSOCK_CONNS_MAX)
		fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	conn = fd >= 0 ? conn_new(v, fd, CONN_CONNECTING, host_port, guest_port) : NULL;
	if (!conn) {
		owe_reset(v, host_port, guest_port);
		return;
	}
	take_peer_credit(conn, le32toh(hdr->buf_alloc), le32toh(hdr->fwd_cnt));
	connect_host(conn);
}

static void take_response(struct conn *conn)
{
	char ok[32];
	int len = snprintf(ok, sizeof(ok), "OK %u\n", conn->host_port);

	if (conn->state != CONN_REQUESTED ||
		send(conn->fd, ok, (size_t)len, MSG_DONTWAIT | MSG_NOSIGNAL) != len) {
		conn_reset(conn);
		return;
	}
	conn->deadline_ns = 0;
	set_state(conn, CONN_OPEN);
	conn_update(conn);
}

static void take_shutdown(struct conn *conn, uint32_t flags)
{
	if (conn->state != CONN_OPEN) {
		conn_reset(conn);
		return;
	}
	conn->guest_shut |= flags & SHUT_BOTH;
	if (conn->guest_shut == SHUT_BOTH) {
		// All that the guest had to say has been received; its half is done, and told so.
		owe_reset(conn->vsock, conn->host_port, conn->guest_port);
		set_state(conn, CONN_LINGER);
		link_remove(&conn->ready);
		if (!conn->buf_len)
			conn_close(conn);
		else
			conn_update(conn);
		return;
	}
	if (conn->guest_shut & VIRTIO_VSOCK_SHUTDOWN_RCV)
		shutdown(conn->fd, SHUT_RD);
	if (conn->guest_shut & VIRTIO_VSOCK_SHUTDOWN_SEND && !conn->buf_len)
		shutdown(conn->fd, SHUT_WR);
	conn_update(conn);
}

static void take_packet(struct vsock *v, const struct virtq_chain *chain)
{
	struct virtio_vsock_hdr hdr;
	uint32_t host_port, guest_port, len;
	struct conn *conn;
	uint16_t op;

	v->stats.from_guest_packets++;
	if (virtq_chain_read(chain, 0, &hdr, HDR_BYTES) < HDR_BYTES ||
		le64toh(hdr.src_cid) != v->guest_cid ||
		le64toh(hdr.dst_cid) != VIRTIO_VSOCK_HOST_CID) {
		v->stats.dropped_packets++;
		return;
	}
	host_port = le32toh(hdr.dst_port);
	guest_port = le32toh(hdr.src_port);
	len = le32toh(hdr.len);
	op = le16toh(hdr.op);
	// Of other types there are no connections.
	conn = le16toh(hdr.type) == VIRTIO_VSOCK_TYPE_STREAM ? find(v, host_port, guest_port)
							     : NULL;
	if (!conn) {
		if (op == VIRTIO_VSOCK_OP_REQUEST && le16toh(hdr.type) == VIRTIO_VSOCK_TYPE_STREAM)
			take_request(v, host_port, guest_port, &hdr);
		else if (op != VIRTIO_VSOCK_OP_RST)
			owe_reset(v, host_port, guest_port);
		return;
	}
	take_peer_credit(conn, le32toh(hdr.buf_alloc), le32toh(hdr.fwd_cnt));
	switch (op) {
	case VIRTIO_VSOCK_OP_RESPONSE:
		take_response(conn);
		break;
	case VIRTIO_VSOCK_OP_RST:
		conn_close(conn);
		break;
	case VIRTIO_VSOCK_OP_SHUTDOWN:
		take_shutdown(conn, le32toh(hdr.flags));
		break;
	case VIRTIO_VSOCK_OP_RW:
		if (len > chain->readable_bytes - HDR_BYTES)
			conn_reset(conn);
		else
			take_data(conn, chain, len);
		break;
	case VIRTIO_VSOCK_OP_CREDIT_UPDATE:
		conn_update(conn);
		break;
	case VIRTIO_VSOCK_OP_CREDIT_REQUEST:
		owe(conn, OWE_CREDIT);
		break;
	default: // also a second REQUEST
		conn_reset(conn);
		break;
	}
}

// --- From the socket to the guest ------------------------------------------------------------

static void put_header(struct vsock *v, const struct virtq_chain *chain, uint32_t host_port,
	uint32_t guest_port, uint16_t op, const struct conn *conn, uint32_t flags, uint32_t len)
{
	const struct virtio_vsock_hdr hdr = {
		.src_cid = htole64(VIRTIO_VSOCK_HOST_CID),
		.dst_cid = htole64(v->guest_cid),
		.src_port = htole32(host_port),
		.dst_port = htole32(guest_port),
		.len = htole32(len),
		.type = htole16(VIRTIO_VSOCK_TYPE_STREAM),
		.op = htole16(op),
		.flags = htole32(flags),
		.buf_alloc = htole32(conn ? conn->buf_alloc : 0),
		.fwd_cnt = htole32(conn ? conn->fwd_cnt : 0),
	};
	size_t n = virtq_chain_write(chain, 0, &hdr, HDR_BYTES);

	ASSERT(n == HDR_BYTES);
	virtq_push(&v->dev.queues[RX_QUEUE], chain->head, (uint32_t)HDR_BYTES + len);
	v->stats.to_guest_packets++;
	v->stats.to_guest_bytes += len;
}

static void put_packet(struct conn *conn, const struct virtq_chain *chain, uint16_t op,
	uint32_t flags, uint32_t len)
{
	put_header(conn->vsock, chain, conn->host_port, conn->guest_port, op, conn, flags, len);
	conn->told_fwd_cnt = conn->fwd_cnt;
	conn->owed &= (uint8_t)~OWE_CREDIT;
}

static void put_owed(struct conn *conn, const struct virtq_chain *chain)
{
	if (conn->owed & OWE_REQUEST) {
		conn->owed &= (uint8_t)~OWE_REQUEST;
		put_packet(conn, chain, VIRTIO_VSOCK_OP_REQUEST, 0, 0);
	} else if (conn->owed & OWE_RESPONSE) {
		conn->owed &= (uint8_t)~OWE_RESPONSE;
		put_packet(conn, chain, VIRTIO_VSOCK_OP_RESPONSE, 0, 0);
	} else if (conn->owed & OWE_SHUTDOWN) {
		conn->owed &= (uint8_t)~OWE_SHUTDOWN;
		put_packet(conn, chain, VIRTIO_VSOCK_OP_SHUTDOWN, conn->host_shut, 0);
	} else {
		conn->vsock->stats.credit_updates++;
		put_packet(conn, chain, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0, 0);
	}
}

static void read_failed(struct conn *conn, ssize_t n, int error)
{
	if (n < 0 && (error == EAGAIN || error == EINTR)) {
		conn->readable = error == EINTR;
		return;
	}
	if (n < 0) {
		conn_reset(conn);
		return;
	}
	conn->readable = false;
	host_shut(conn, conn->hung_up ? SHUT_BOTH : (uint8_t)VIRTIO_VSOCK_SHUTDOWN_SEND);
}

// Reads from the socket into the given chain and, while the socket keeps up, into the next ones:
// as far as credit goes, with one system call. Returns the bytes read. conn may be gone after it.
static uint32_t put_data(struct conn *conn, const struct virtq_chain *first)
{
	struct vsock *v = conn->vsock;
	struct virtq *q = &v->dev.queues[RX_QUEUE];
	struct virtq_chain chains[RX_BATCH_CHAINS];
	size_t room[RX_BATCH_CHAINS], total = 0, left;
	const size_t want = MIN(peer_free(conn), RX_BATCH_BYTES);
	struct iovec iov[IOV_NR];
	unsigned int nr = 0, used = 0, nr_iov = 0;
	size_t nr_segs = 0;
	ssize_t n;
	int error;

	chains[0] = *first;
	for (;;) {
		struct virtq_chain *chain = &chains[nr];

		nr_iov += virtq_chain_iov(chain, true, HDR_BYTES, want - total, iov + nr_iov,
			IOV_NR - nr_iov, &room[nr]);
		total += room[nr];
		nr_segs += chain->nr_readable + chain->nr_writable;
		nr++;
		if (nr == conn->burst || total == want || nr_iov == IOV_NR ||
			nr_segs > VIRTQ_CHAIN_MAX)
			break;
		chains[nr].segs = v->segs + nr_segs;
		// What is wrong with the next one, if anything, comes out when it is the first.
		if (virtq_pop(q, &chains[nr]) <= 0)
			break;
		if (chains[nr].writable_bytes <= HDR_BYTES) {
			virtq_unpop(q, chains[nr].head);
			break;
		}
	}
	n = readv(conn->fd, iov, (int)nr_iov);
	error = errno;
	left = n > 0 ? (size_t)n : 0;
	for (size_t rest = left; used < nr && rest; used++)
		rest -= MIN(rest, room[used]);
	while (nr > used)
		virtq_unpop(q, chains[--nr].head);
	if (n <= 0) {
		read_failed(conn, n, error);
		return 0;
	}
	conn->sent_cnt += (uint32_t)n;
	for (unsigned int i = 0; i < used; i++) {
		uint32_t len = (uint32_t)MIN(left, room[i]);

		virtq_chain_mark_dirty(&chains[i], HDR_BYTES, len);
		put_packet(conn, &chains[i], VIRTIO_VSOCK_OP_RW, 0, len);
		left -= len;
	}
	// A short read has emptied the socket, for now.
	conn->readable = (size_t)n == total;
	conn->burst = conn->readable ? MIN(conn->burst * 2, RX_BATCH_CHAINS) : 1;
	return (uint32_t)n;
}

// One packet, or one batch of data, of the connection whose turn it is. It then goes to the end of
// the list if there is more.
static void put_next(struct vsock *v, const struct virtq_chain *chain)
{
	struct conn *conn = container_of(v->ready.next, struct conn, ready);
	const uint32_t host_port = conn->host_port, guest_port = conn->guest_port;

	link_remove(&conn->ready);
	// Data carries the credit; what the host said before it shut down comes before that.
	if (conn->readable && may_read(conn) && !(conn->owed & (OWE_REQUEST | OWE_RESPONSE))) {
		put_data(conn, chain);
		conn = find(v, host_port, guest_port);
	} else if (conn->owed) {
		put_owed(conn, chain);
	} else {
		virtq_unpop(&v->dev.queues[RX_QUEUE], chain->head);
	}
	if (conn)
		conn_update(conn);
}

// --- A run -----------------------------------------------------------------------------------

// False if it has stopped for the others' sake.
static bool run_tx(struct vsock *v)
{
	struct virtq *q = &v->dev.queues[TX_QUEUE];
	struct virtq_chain chain = {.segs = v->segs};

	for (unsigned int i = 0; i < CHAINS_PER_RUN; i++) {
		int r = virtq_pop(q, &chain);

		if (r < 0) {
			virtio_dev_set_needs_reset(&v->dev, "bad chain in the tx queue");
			return true;
		}
		if (r == 0) {
			if (virtq_wait(q))
				continue;
			v->tx_kicked = false;
			return true;
		}
		take_packet(v, &chain);
		v->tx_chains++;
		v->tx_bytes += MIN(chain.readable_bytes, TX_IRQ_BYTES_MAX);
		virtq_push(q, chain.head, 0);
	}
	return false;
}

static bool run_rx(struct vsock *v)
{
	struct virtq *q = &v->dev.queues[RX_QUEUE];
	struct virtq_chain chain = {.segs = v->segs};

	for (unsigned int i = 0; v->nr_resets || !link_alone(&v->ready); i++) {
		int r;

		if (i == CHAINS_PER_RUN)
			return false;
		r = virtq_pop(q, &chain);
		if (r == 0 && virtq_wait(q))
			continue;
		if (r == 0)
			return true;
		// Room for one byte besides the header, so that each can carry data.
		if (r < 0 || chain.writable_bytes <= HDR_BYTES) {
			virtio_dev_set_needs_reset(&v->dev, "bad chain in the rx queue");
			return true;
		}
		if (v->nr_resets) {
			put_header(v, &chain, v->resets[v->resets_head].host_port,
				v->resets[v->resets_head].guest_port, VIRTIO_VSOCK_OP_RST, NULL, 0,
				0);
			v->resets_head = (v->resets_head + 1) % RESETS_MAX;
			v->nr_resets--;
		} else {
			put_next(v, &chain);
		}
	}
	return true;
}

static void run_event(struct vsock *v)
{
	struct virtq *q = &v->dev.queues[EVENT_QUEUE];
	struct virtq_chain chain = {.segs = v->segs};
	const struct virtio_vsock_event event = {.id = htole32(VIRTIO_VSOCK_EVENT_TRANSPORT_RESET)};
	int r;

	if (!v->event_owed)
		return;
	do
		r = virtq_pop(q, &chain);
	while (r == 0 && virtq_wait(q));
	if (r == 0)
		return;
	if (r < 0 || chain.writable_bytes < sizeof(event)) {
		virtio_dev_set_needs_reset(&v->dev, "bad chain in the event queue");
		return;
	}
	virtq_chain_write(&chain, 0, &event, sizeof(event));
	virtq_push(q, chain.head, sizeof(event));
	v->event_owed = false;
	// It gives the buffer back when it is done with the event.
	v->event_unread = true;
	v->event_idx = virtq_wait_for_more(q);
}

static void close_all(struct vsock *v, bool only_known)
{
	struct link *next;

	for (struct link *at = v->all.next; at != &v->all; at = next) {
		struct conn *conn = container_of(at, struct conn, all);

		next = at->next;
		if (!only_known || known_to_guest(conn))
			conn_close(conn);
	}
}

// Ends all that the guest knew of.
static void close_known(struct vsock *v)
{
	close_all(v, true);
	v->nr_resets = 0;
	v->event_owed = v->event_unread = false;
}

static void send_irq(struct vsock *v)
{
	v->tx_irq_owed = false;
	v->tx_chains = v->tx_bytes = 0;
	loop_timer_cancel(v->dev.env.loop, &v->tx_irq_timer);
	virtio_dev_interrupt(&v->dev);
}

static void on_tx_irq(struct loop_timer *timer)
{
	send_irq(container_of(timer, struct vsock, tx_irq_timer));
}

static void publish(struct vsock *v)
{
	// Both are to be shown: no short cut.
	const bool now = virtio_dev_show(&v->dev, 1U << RX_QUEUE | 1U << EVENT_QUEUE);

	v->tx_irq_owed |= virtio_dev_show(&v->dev, 1U << TX_QUEUE);
	if (now || (v->tx_irq_owed &&
			   (v->tx_chains >= TX_IRQ_CHAINS_MAX || v->tx_bytes >= TX_IRQ_BYTES_MAX)))
		send_irq(v);
	else if (v->tx_irq_owed && !v->tx_irq_timer.armed)
		loop_timer_set(v->dev.env.loop, &v->tx_irq_timer, now_ns() + TX_IRQ_DELAY_NS);
}

static void request_pending(struct vsock *v);

static void on_run(struct loop_timer *timer)
{
	struct vsock *v = container_of(timer, struct vsock, run_timer);
	bool done = true;

	if (!virtio_dev_running(&v->dev))
		return;
	if (v->event_unread && virtq_avail_idx(&v->dev.queues[EVENT_QUEUE]) != v->event_idx) {
		v->event_unread = false;
		request_pending(v);
	}
	if (v->tx_kicked)
		done = run_tx(v);
	if (virtio_dev_running(&v->dev))
		done &= run_rx(v);
	if (virtio_dev_running(&v->dev))
		run_event(v);
	publish(v);
	if (v->dev.needs_reset)
		close_known(v);
	else if (!done) // not before the next turn's events
		loop_timer_set(v->dev.env.loop, &v->run_timer, now_ns());
}

// --- Sockets ---------------------------------------------------------------------------------

// Tells the guest of a connection from the host.
static void request(struct conn *conn)
{
	struct vsock *v = conn->vsock;

	if (!v->dev.active || v->dev.needs_reset || v->event_owed || v->event_unread) {
		set_state(conn, CONN_PENDING);
		conn_update(conn);
		return;
	}
	do {
		conn->host_port = v->next_host_port;
		v->next_host_port = v->next_host_port == HOST_PORT_LAST ? HOST_PORT_FIRST
									: v->next_host_port + 1;
	} while (find(v, conn->host_port, conn->guest_port));
	set_deadline(conn, VIRTIO_VSOCK_HALF_OPEN_NS);
	set_state(conn, CONN_REQUESTED);
	owe(conn, OWE_REQUEST);
}

static void request_pending(struct vsock *v)
{
	for (struct link *at = v->all.next; at != &v->all; at = at->next) {
		struct conn *conn = container_of(at, struct conn, all);

		if (conn->state == CONN_PENDING)
			request(conn);
	}
}

// "CONNECT PORT", in any case and with any blanks, as Firecracker takes it.
static bool parse_hello(const char *line, uint32_t *ret_port)
{
	static const char blanks[] = " \t\r\n";
	uint64_t port = 0;
	size_t digits;

	line += strspn(line, blanks);
	if (strncasecmp(line, "connect", 7) != 0)
		return false;
	line += 7;
	if (!strspn(line, blanks))
		return false;
	line += strspn(line, blanks);
	digits = strspn(line, "0123456789");
	if (digits < 1 || digits > 10 || line[digits + strspn(line + digits, blanks)] != '\0')
		return false;
	for (size_t i = 0; i < digits; i++)
		port = port * 10 + (uint64_t)(line[i] - '0');
	if (port > UINT32_MAX)
		return false;
	*ret_port = (uint32_t)port;
	return true;
}

// Takes the line and not a byte more: what follows is for the guest.
static void read_hello(struct conn *conn)
{
	char *at = conn->hello + conn->hello_len, *newline;
	const size_t room = HELLO_MAX_BYTES - 1 - conn->hello_len;
	ssize_t n = recv(conn->fd, at, room, MSG_PEEK | MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		conn_close(conn);
		return;
	}
	newline = memchr(at, '\n', (size_t)n);
	if (newline)
		n = newline - at + 1;
	if (recv(conn->fd, at, (size_t)n, MSG_DONTWAIT) != n) {
		conn_close(conn);
		return;
	}
	conn->hello_len += (uint32_t)n;
	conn->hello[conn->hello_len] = '\0';
	if (!newline && conn->hello_len < HELLO_MAX_BYTES - 1)
		return;
	if (!newline || strlen(conn->hello) != conn->hello_len ||
		!parse_hello(conn->hello, &conn->guest_port)) {
		conn_close(conn);
		return;
	}
	request(conn);
}

static void on_conn_event(void *opaque, uint32_t revents)
{
	struct conn *conn = opaque;
	const bool gone = revents & (POLLHUP | POLLERR);

	switch (conn->state) {
	case CONN_HELLO:
		read_hello(conn); // may be the end of it
		return;
	case CONN_PENDING:
	case CONN_REQUESTED:
		if (gone)
			conn_reset(conn);
		return;
	case CONN_CONNECTING:
		return;
	case CONN_LINGER:
		if (gone)
			conn_close(conn);
		else
			flush(conn);
		return;
	case CONN_OPEN:
		break;
	}
	if (gone)
		conn->hung_up = true;
	if (revents & POLLOUT && !flush(conn))
		return;
	if (revents & (POLLIN | POLLHUP | POLLERR))
		conn->readable = true;
	// Its end has been read already: now there is nobody to write to either.
	if (gone && conn->host_shut & VIRTIO_VSOCK_SHUTDOWN_SEND)
		host_shut(conn, SHUT_BOTH);
	conn_update(conn);
}

static void on_listen(void *opaque, uint32_t revents)
{
	struct vsock *v = opaque;

	(void)revents;
	for (unsigned int i = 0; i < ACCEPTS_PER_RUN; i++) {
		struct conn *conn;
		int fd;

		if (v->stats.nr_conns >= VIRTIO_VSOCK_CONNS_MAX ||
			v->stats.nr_pending >= VIRTIO_VSOCK_PENDING_MAX)
			break; // the listener is paused; the backlog waits
		fd = accept4(v->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM ||
				      errno == ENOBUFS)) {
			v->listen_retry_ns = now_ns() + LISTEN_RETRY_NS;
			deadline_at(v, v->listen_retry_ns);
			update_listen(v);
			return;
		}
		if (fd < 0)
			return;
		conn = conn_new(v, fd, CONN_HELLO, 0, 0);
		if (!conn)
			continue;
		if (!watch_conn(conn)) {
			conn_close(conn);
			continue;
		}
		set_deadline(conn, VIRTIO_VSOCK_HALF_OPEN_NS);
		conn_update(conn);
	}
}

static void on_deadline(struct loop_timer *timer)
{
	struct vsock *v = container_of(timer, struct vsock, deadline_timer);
	const uint64_t now = now_ns();
	struct link *next;

	// While paused no time passes for the guest; resume() starts the clocks anew.
	if (v->dev.paused)
		return;
	if (v->listen_retry_ns && v->listen_retry_ns <= now) {
		v->listen_retry_ns = 0;
		update_listen(v);
	} else if (v->listen_retry_ns) {
		deadline_at(v, v->listen_retry_ns);
	}
	for (struct link *at = v->all.next; at != &v->all; at = next) {
		struct conn *conn = container_of(at, struct conn, all);

		next = at->next;
		if (!conn->deadline_ns)
			continue;
		if (conn->deadline_ns > now)
			deadline_at(v, conn->deadline_ns);
		else if (conn->state == CONN_CONNECTING)
			connect_host(conn);
		else
			conn_reset(conn);
	}
}

// --- The device ------------------------------------------------------------------------------

static void vsock_activate(struct virtio_dev *dev)
{
	request_pending(vsock_of(dev));
}

static void vsock_queue_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct vsock *v = vsock_of(dev);

	if (queue_idx == TX_QUEUE)
		v->tx_kicked = true;
	schedule_run(v);
}

static void update_all(struct vsock *v)
{
	update_listen(v);
	for (struct link *at = v->all.next; at != &v->all; at = at->next)
		conn_update(container_of(at, struct conn, all));
}

static bool vsock_drain(struct virtio_dev *dev)
{
	struct vsock *v = vsock_of(dev);

	update_all(v);
	if (v->tx_irq_owed)
		send_irq(v);
	return true;
}

static void vsock_resume(struct virtio_dev *dev)
{
	struct vsock *v = vsock_of(dev);

	for (struct link *at = v->all.next; at != &v->all; at = at->next) {
		struct conn *conn = container_of(at, struct conn, all);

		if (conn->deadline_ns)
			set_deadline(conn, conn->state == CONN_CONNECTING
						   ? CONNECT_RETRY_NS
						   : VIRTIO_VSOCK_HALF_OPEN_NS);
	}
	if (v->listen_retry_ns)
		deadline_at(v, v->listen_retry_ns);
	update_all(v);
}

static void vsock_reset(struct virtio_dev *dev)
{
	struct vsock *v = vsock_of(dev);

	close_known(v);
	v->tx_kicked = v->tx_irq_owed = false;
	v->tx_chains = v->tx_bytes = 0;
	loop_timer_cancel(dev->env.loop, &v->run_timer);
	loop_timer_cancel(dev->env.loop, &v->tx_irq_timer);
	update_all(v); // what the guest does not know of goes on
}

void virtio_vsock_transport_reset(struct virtio_dev *dev)
{
	struct vsock *v = vsock_of(dev);

	close_known(v);
	v->event_owed = true;
	schedule_run(v);
}

int virtio_vsock_publish(struct virtio_dev *dev, struct err *err)
{
	struct vsock *v = vsock_of(dev);
	char *path;

	if (!strcmp(v->listen_path, v->socket_path))
		return 0;
	path = strdup(v->socket_path);
	if (!path)
		return err_errno(err, -ENOMEM, "vsock");
	if (rename(v->listen_path, v->socket_path) < 0) {
		int r = err_errno(err, -errno, "%s", v->socket_path);

		free(path);
		return r;
	}
	free(v->listen_path);
	v->listen_path = path;
	return 0;
}

void virtio_vsock_get_stats(struct virtio_dev *dev, struct virtio_vsock_stats *ret_stats)
{
	*ret_stats = vsock_of(dev)->stats;
}

static void vsock_free(struct vsock *v)
{
	fd_close(&v->listen_fd);
	if (v->bound)
		unlink(v->listen_path);
	free(v->listen_path);
	free(v->socket_path);
	free(v);
}

static void vsock_destroy(struct virtio_dev *dev)
{
	struct vsock *v = vsock_of(dev);

	close_all(v, false);
	loop_timer_cancel(dev->env.loop, &v->run_timer);
	loop_timer_cancel(dev->env.loop, &v->tx_irq_timer);
	loop_timer_cancel(dev->env.loop, &v->deadline_timer);
	loop_watch_del(dev->env.loop, &v->listen_watch);
	virtio_dev_fini(dev);
	vsock_free(v);
}

// The connections have stayed with the machine that was saved.
static int vsock_restored(struct virtio_dev *dev, struct err *err)
{
	(void)err;
	virtio_vsock_transport_reset(dev);
	return 0;
}

static int validate(const void *decoded, struct err *err)
{
	const struct vsock *v = decoded;

	if (v->next_host_port < HOST_PORT_FIRST || v->next_host_port > HOST_PORT_LAST)
		return err_set(err, -EINVAL, "host port %u", v->next_host_port);
	return 0;
}

#define OF_THIS_MONITOR   "of this monitor"
#define CONNECTIONS_END   "connections end with a restore"
#define SENT_WHEN_DRAINED "sent when it is drained"

STATE_TABLE(static, vsock_state, struct vsock, "vsock", validate,
	STATE_NESTED(struct vsock, dev, &virtio_dev_state),
	STATE_U32(struct vsock, next_host_port), // so that none is used again too soon
	STATE_TRANSIENT(struct vsock, guest_cid, "the driver reads it again after the event"),
	STATE_TRANSIENT(struct vsock, socket_path, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, listen_path, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, listen_fd, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, listen_watch, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, bound, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, listen_retry_ns, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, all, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, ready, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, hash, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, nr_large_windows, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, first_cnt, "for tests"),
	STATE_TRANSIENT(struct vsock, conn_ended, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, opaque, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, resets, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, resets_head, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, nr_resets, CONNECTIONS_END),
	STATE_TRANSIENT(struct vsock, tx_kicked, "every queue is notified after a restore"),
	STATE_TRANSIENT(struct vsock, event_owed, "a restore owes one of its own"),
	STATE_TRANSIENT(struct vsock, event_unread, "a restore owes one of its own"),
	STATE_TRANSIENT(struct vsock, event_idx, "a restore owes one of its own"),
	STATE_TRANSIENT(struct vsock, tx_irq_owed, SENT_WHEN_DRAINED),
	STATE_TRANSIENT(struct vsock, tx_chains, SENT_WHEN_DRAINED),
	STATE_TRANSIENT(struct vsock, tx_bytes, SENT_WHEN_DRAINED),
	STATE_TRANSIENT(struct vsock, tx_irq_timer, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, run_timer, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, deadline_timer, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct vsock, unused1, "padding"),
	STATE_TRANSIENT(struct vsock, unused2, "padding"),
	STATE_TRANSIENT(struct vsock, stats, "counted anew"),
	STATE_TRANSIENT(struct vsock, segs, "of the chain at hand"));

static const struct virtio_ops vsock_ops = {
	.name = "vsock",
	.device_id = VIRTIO_ID_VSOCK,
	.activate = vsock_activate,
	.queue_notify = vsock_queue_notify,
	.drain = vsock_drain,
	.resume = vsock_resume,
	.restored = vsock_restored,
	.state = &vsock_state,
	.reset = vsock_reset,
	.destroy = vsock_destroy,
};

static int open_listener(struct vsock *v, struct err *err)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct stat st;
	// The sockets of the ports have the longest names.
	int len = snprintf(
		addr.sun_path, sizeof(addr.sun_path), "%s_%u", v->socket_path, UINT32_MAX);

	if (len < 0 || (size_t)len >= sizeof(addr.sun_path))
		return err_set(err, -ENAMETOOLONG, "%s: too long for a socket (%zu bytes at most)",
			v->socket_path, sizeof(addr.sun_path) - sizeof("_4294967295"));
	len = snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", v->listen_path);
	if (len < 0 || (size_t)len >= sizeof(addr.sun_path))
		return err_set(err, -ENAMETOOLONG, "%s: too long for a socket", v->listen_path);
	v->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (v->listen_fd < 0)
		return err_errno(err, -errno, "vsock: socket");
	if (lstat(v->listen_path, &st) == 0 && S_ISSOCK(st.st_mode))
		unlink(v->listen_path);
	// Before bind(), so that it is never open to others.
	if (fchmod(v->listen_fd, 0600) < 0)
		return err_errno(err, -errno, "%s: fchmod", v->listen_path);
	if (bind(v->listen_fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		return err_errno(err, -errno, "%s", v->listen_path);
	v->bound = true;
	if (listen(v->listen_fd, LISTEN_BACKLOG) < 0)
		return err_errno(err, -errno, "%s: listen", v->listen_path);
	return 0;
}

int virtio_vsock_create(struct virtio_dev **ret_dev, const struct vsock_config *config,
	const struct virtio_env *env, struct err *err)
{
	const struct virtio_vsock_config space = {.guest_cid = htole64(config->guest_cid)};
	const struct virtio_dev_params params = {
		.nr_queues = NR_QUEUES,
		.queue_size_max = QUEUE_SIZE,
		.config = &space,
		.config_bytes = sizeof(space),
	};
	struct vsock *v;
	int r;

	if (config->guest_cid < VIRTIO_VSOCK_GUEST_CID_MIN || config->guest_cid >= UINT32_MAX)
		return err_set(err, -EINVAL, "vsock: CID %llu is not one for a guest",
			(unsigned long long)config->guest_cid);
	v = calloc(1, sizeof(*v));
	if (!v)
		return err_errno(err, -ENOMEM, "vsock");
	v->listen_fd = v->listen_watch = -1;
	link_init(&v->all);
	link_init(&v->ready);
	v->guest_cid = config->guest_cid;
	v->first_cnt = config->first_cnt;
	v->conn_ended = config->conn_ended;
	v->opaque = config->opaque;
	v->next_host_port = HOST_PORT_FIRST;
	v->run_timer.fire = on_run;
	v->tx_irq_timer.fire = on_tx_irq;
	v->deadline_timer.fire = on_deadline;
	v->socket_path = strdup(config->socket_path);
	v->listen_path = strdup(config->listen_path ? config->listen_path : config->socket_path);
	if (!v->socket_path || !v->listen_path) {
		r = err_errno(err, -ENOMEM, "vsock");
		goto fail;
	}
	r = open_listener(v, err);
	if (r < 0)
		goto fail;
	r = virtio_dev_init(&v->dev, &vsock_ops, env, &params, err);
	if (r < 0)
		goto fail;
	r = loop_watch_add(env->loop, v->listen_fd, POLLIN, on_listen, v, err);
	if (r < 0) {
		virtio_dev_fini(&v->dev);
		goto fail;
	}
	v->listen_watch = r;
	*ret_dev = &v->dev;
	return 0;
fail:
	vsock_free(v);
	return r;
}
