// SPDX-License-Identifier: Apache-2.0
// Both ends of streams between guest and host, over vsock or TCP, each byte of them checked: the
// same static program runs on either side. One thread.
//
//   stream serve ADDR               answers until it is ended; says "ready" first
//   stream get ADDR BYTES           BYTES from the server
//   stream put ADDR BYTES           BYTES to it
//   stream many ADDR NR BYTES       NR connections open at once, then BYTES over each, both ways
//   stream beside ADDR NR BYTES     NR connections of which nobody reads what they carry, each way;
//                                   beside them BYTES both ways; then they are read and are whole
//   stream pings ADDR NR            NR times a byte there and back; prints microseconds each
//
// ADDR: tcp:IP:PORT, vsock:CID:PORT, unix:PATH (to serve), unix:PATH:PORT (the monitor's socket for
// connections into its guest).
//
// A connection begins with a request of 16 bytes: what, and how many bytes. The bytes at an offset
// follow from it alone, so whatever is lost, doubled or changed is seen, and where.
#include <arpa/inet.h>
#include <errno.h>
#include <linux/vm_sockets.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PIECE 65536U
#define CONNS 1200U

enum { GET = 1, PUT, HOLD, FREE, PING };

struct request {
	uint64_t what, bytes;
};

static void die(const char *what)
{
	fprintf(stderr, "stream: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void wrong(const char *what, uint64_t at)
{
	fprintf(stderr, "stream: %s at byte %llu\n", what, (unsigned long long)at);
	exit(1);
}

// --- Content -------------------------------------------------------------------------------------

static uint64_t word_at(uint64_t off)
{
	const uint64_t mixed = (off / 8 + 1) * 0x9e3779b97f4a7c15ULL;

	return mixed ^ mixed >> 29;
}

static void fill(uint8_t *to, uint64_t off, size_t len)
{
	for (size_t i = 0; i < len;) {
		const uint64_t word = word_at(off + i);
		const size_t skip = (off + i) % 8, part = len - i < 8 - skip ? len - i : 8 - skip;

		memcpy(to + i, (const uint8_t *)&word + skip, part);
		i += part;
	}
}

static void check(const uint8_t *data, uint64_t off, size_t len)
{
	for (size_t i = 0; i < len;) {
		const uint64_t word = word_at(off + i);
		const size_t skip = (off + i) % 8, part = len - i < 8 - skip ? len - i : 8 - skip;

		if (memcmp(data + i, (const uint8_t *)&word + skip, part) != 0)
			wrong("other content", off + i);
		i += part;
	}
}

// --- Sockets -------------------------------------------------------------------------------------

union addr {
	struct sockaddr any;
	struct sockaddr_in in;
	struct sockaddr_vm vm;
	struct sockaddr_un un;
};

// For unix:PATH:PORT *ret_port is set.
static int open_socket(const char *text, union addr *addr, socklen_t *len, unsigned int *ret_port)
{
	char buf[200], *rest = buf, *kind, *port;
	int fd;

	*ret_port = 0;
	memset(addr, 0, sizeof(*addr));
	snprintf(buf, sizeof(buf), "%s", text);
	kind = strsep(&rest, ":");
	port = rest ? strrchr(rest, ':') : NULL;
	if (rest && !strcmp(kind, "unix")) {
		addr->un.sun_family = AF_UNIX;
		*len = sizeof(addr->un);
		if (port) {
			*port = '\0';
			*ret_port = (unsigned int)strtoul(port + 1, NULL, 10);
		}
		snprintf(addr->un.sun_path, sizeof(addr->un.sun_path), "%s", rest);
	} else if (port && !strcmp(kind, "tcp")) {
		*port = '\0';
		addr->in.sin_family = AF_INET;
		addr->in.sin_port = htons((uint16_t)strtoul(port + 1, NULL, 10));
		*len = sizeof(addr->in);
		if (inet_pton(AF_INET, rest, &addr->in.sin_addr) != 1)
			die(text);
	} else if (port && !strcmp(kind, "vsock")) {
		addr->vm.svm_family = AF_VSOCK;
		addr->vm.svm_cid = (unsigned int)strtoul(rest, NULL, 10);
		addr->vm.svm_port = (unsigned int)strtoul(port + 1, NULL, 10);
		*len = sizeof(addr->vm);
	} else {
		errno = EINVAL;
		die(text);
	}
	fd = socket(addr->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		die(text);
	return fd;
}

static void write_all(int fd, const void *data, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = write(fd, (const uint8_t *)data + done, len - done);

		if (n < 0)
			die("write");
		done += (size_t)n;
	}
}

static void read_all(int fd, void *data, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = read(fd, (uint8_t *)data + done, len - done);

		if (n < 0)
			die("read");
		if (n == 0)
			wrong("the connection ends", done);
		done += (size_t)n;
	}
}

static int dial(const char *text)
{
	union addr addr;
	socklen_t len;
	unsigned int port;
	int fd = open_socket(text, &addr, &len, &port);
	char line[32] = "", c = 0;

	if (connect(fd, &addr.any, len) < 0)
		die(text);
	if (!port)
		return fd;
	dprintf(fd, "CONNECT %u\n", port);
	for (size_t i = 0; c != '\n' && i < sizeof(line) - 1; i++) {
		read_all(fd, &c, 1);
		line[i] = c;
	}
	if (strncmp(line, "OK ", 3) != 0)
		wrong("no OK", 0);
	return fd;
}

static void ask(int fd, uint64_t what, uint64_t bytes)
{
	const struct request request = {what, bytes};

	write_all(fd, &request, sizeof(request));
}

// --- Server --------------------------------------------------------------------------------------

struct conn {
	int fd;
	struct request request;
	size_t have; // of the request
	uint64_t done;
	bool held;
};

static struct conn conns[CONNS];
static unsigned int nr_conns;

static void answer(struct conn *conn)
{
	const uint8_t yes = 1;

	write_all(conn->fd, &yes, 1);
}

// False at the end of the connection.
static bool serve_input(struct conn *conn)
{
	static uint8_t buf[PIECE];
	ssize_t n;

	if (conn->have < sizeof(conn->request)) {
		n = read(conn->fd, (uint8_t *)&conn->request + conn->have,
			sizeof(conn->request) - conn->have);
		if (n <= 0)
			return false;
		conn->have += (size_t)n;
		if (conn->have < sizeof(conn->request))
			return true;
		conn->held = conn->request.what == HOLD;
		if (conn->request.what == FREE) {
			for (unsigned int i = 0; i < nr_conns; i++)
				conns[i].held = false;
			answer(conn);
		}
		return true;
	}
	n = read(conn->fd, buf, sizeof(buf));
	if (n == 0 && conn->request.what == HOLD)
		write_all(conn->fd, &conn->done, sizeof(conn->done));
	if (n <= 0)
		return false;
	if (conn->request.what == PING) {
		write_all(conn->fd, buf, (size_t)n);
		return true;
	}
	check(buf, conn->done, (size_t)n);
	conn->done += (uint64_t)n;
	if (conn->done > conn->request.bytes)
		wrong("too much", conn->done);
	if (conn->done == conn->request.bytes)
		answer(conn);
	return true;
}

static bool serve_output(struct conn *conn)
{
	uint8_t buf[PIECE];
	const uint64_t left = conn->request.bytes - conn->done;
	ssize_t n;

	fill(buf, conn->done, left < sizeof(buf) ? left : sizeof(buf));
	n = send(conn->fd, buf, left < sizeof(buf) ? left : sizeof(buf),
		MSG_DONTWAIT | MSG_NOSIGNAL);
	if (n < 0)
		return errno == EAGAIN;
	conn->done += (uint64_t)n;
	return true;
}

static void serve(const char *text)
{
	static struct pollfd fds[CONNS + 1];
	union addr addr;
	socklen_t len;
	unsigned int port;
	const int one = 1, fd = open_socket(text, &addr, &len, &port);

	if (addr.any.sa_family == AF_UNIX)
		unlink(addr.un.sun_path);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, &addr.any, len) < 0 || listen(fd, 1024) < 0)
		die(text);
	puts("ready");
	fflush(stdout);
	for (;;) {
		fds[0] = (struct pollfd){.fd = fd, .events = nr_conns < CONNS ? POLLIN : 0};
		for (unsigned int i = 0; i < nr_conns; i++) {
			const bool out = conns[i].have == sizeof(struct request) &&
					 conns[i].request.what == GET &&
					 conns[i].done < conns[i].request.bytes;

			fds[1 + i] = (struct pollfd){.fd = conns[i].fd,
				.events = (short)(conns[i].held ? 0
								: POLLIN | (out ? POLLOUT : 0))};
		}
		if (poll(fds, 1 + nr_conns, -1) < 0)
			die("poll");
		for (unsigned int i = nr_conns; i-- > 0;) {
			bool good = true;

			if (fds[1 + i].revents & POLLOUT)
				good = serve_output(&conns[i]);
			else if (fds[1 + i].revents)
				good = serve_input(&conns[i]);
			if (good)
				continue;
			close(conns[i].fd);
			conns[i] = conns[--nr_conns];
		}
		if (fds[0].revents) {
			conns[nr_conns] = (struct conn){.fd = accept(fd, NULL, NULL)};
			if (conns[nr_conns].fd < 0)
				die("accept");
			nr_conns++;
		}
	}
}

// --- Client --------------------------------------------------------------------------------------

static void read_content(int fd, uint64_t bytes)
{
	static uint8_t buf[PIECE];

	for (uint64_t done = 0; done < bytes;) {
		ssize_t n = read(fd, buf, bytes - done < sizeof(buf) ? bytes - done : sizeof(buf));

		if (n < 0)
			die("read");
		if (n == 0)
			wrong("the connection ends", done);
		check(buf, done, (size_t)n);
		done += (uint64_t)n;
	}
}

static void write_content(int fd, uint64_t from, uint64_t bytes)
{
	static uint8_t buf[PIECE];

	for (uint64_t done = from; done < bytes;) {
		const size_t part = bytes - done < sizeof(buf) ? bytes - done : sizeof(buf);

		fill(buf, done, part);
		write_all(fd, buf, part);
		done += part;
	}
}

static void hear_yes(int fd)
{
	uint8_t yes = 0;

	read_all(fd, &yes, 1);
	if (yes != 1)
		wrong("no yes", 0);
}

static void transfer(const char *addr, bool get, uint64_t bytes)
{
	const int fd = dial(addr);

	ask(fd, get ? GET : PUT, bytes);
	if (get) {
		read_content(fd, bytes);
	} else {
		write_content(fd, 0, bytes);
		hear_yes(fd);
	}
	close(fd);
}

static void many(const char *addr, unsigned int nr, uint64_t bytes)
{
	static int fds[CONNS];

	if (nr > CONNS)
		wrong("more connections than", CONNS);
	for (unsigned int i = 0; i < nr; i++)
		fds[i] = dial(addr);
	for (unsigned int i = 0; i < nr; i++) {
		ask(fds[i], i % 2 ? GET : PUT, bytes);
		if (i % 2 == 0)
			write_content(fds[i], 0, bytes);
	}
	for (unsigned int i = nr; i-- > 0;) {
		if (i % 2)
			read_content(fds[i], bytes);
		else
			hear_yes(fds[i]);
		close(fds[i]);
	}
}

// Writes until nobody takes any more. Returns how much.
static uint64_t stuff(int fd, uint64_t bytes)
{
	uint8_t buf[PIECE];
	uint64_t done = 0;
	struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};

	// Still for a moment: what is on its way makes room once more.
	while (done < bytes && poll(&poll_fd, 1, 500) > 0) {
		const size_t part = bytes - done < sizeof(buf) ? bytes - done : sizeof(buf);
		ssize_t n;

		fill(buf, done, part);
		n = send(fd, buf, part, MSG_DONTWAIT);
		if (n < 0 && errno != EAGAIN)
			die("write");
		done += n > 0 ? (uint64_t)n : 0;
	}
	return done;
}

static void beside(const char *addr, unsigned int nr, uint64_t bytes)
{
	static int held[CONNS], unread[CONNS];
	static uint64_t stuffed[CONNS];
	const uint64_t much = 64ULL << 20; // more than all buffers on the way hold
	int fd;

	if (nr > CONNS)
		wrong("more connections than", CONNS);
	for (unsigned int i = 0; i < nr; i++) {
		unread[i] = dial(addr);
		ask(unread[i], GET, bytes * 4);
		held[i] = dial(addr);
		ask(held[i], HOLD, much);
		stuffed[i] = stuff(held[i], much);
		if (stuffed[i] == much)
			wrong("nothing holds it back", much);
		shutdown(held[i], SHUT_WR);
	}
	transfer(addr, true, bytes);
	transfer(addr, false, bytes);
	puts("beside: done");
	fd = dial(addr);
	ask(fd, FREE, 0);
	hear_yes(fd);
	close(fd);
	for (unsigned int i = 0; i < nr; i++) {
		uint64_t arrived;

		read_content(unread[i], bytes * 4);
		close(unread[i]);
		read_all(held[i], &arrived, sizeof(arrived));
		if (arrived != stuffed[i])
			wrong("lost", arrived);
		close(held[i]);
	}
}

static void pings(const char *addr, unsigned int nr)
{
	const int fd = dial(addr);
	struct timespec a, b;
	uint8_t byte = 7;

	ask(fd, PING, 0);
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (unsigned int i = 0; i < nr; i++) {
		write_all(fd, &byte, 1);
		read_all(fd, &byte, 1);
	}
	clock_gettime(CLOCK_MONOTONIC, &b);
	close(fd);
	printf("%.1f\n",
		((double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) / 1e3) / nr);
}

int main(int argc, char **argv)
{
	const struct rlimit files = {4096, 4096};
	const char *verb = argc > 2 ? argv[1] : "";
	const uint64_t first = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;
	const uint64_t second = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;

	signal(SIGPIPE, SIG_IGN);
	setrlimit(RLIMIT_NOFILE, &files);
	if (!strcmp(verb, "serve"))
		serve(argv[2]);
	else if (first && (!strcmp(verb, "get") || !strcmp(verb, "put")))
		transfer(argv[2], verb[0] == 'g', first);
	else if (first && second && !strcmp(verb, "many"))
		many(argv[2], (unsigned int)first, second);
	else if (first && second && !strcmp(verb, "beside"))
		beside(argv[2], (unsigned int)first, second);
	else if (first && !strcmp(verb, "pings"))
		pings(argv[2], (unsigned int)first);
	else
		return 2;
	puts("good");
	return 0;
}
