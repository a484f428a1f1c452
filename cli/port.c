// SPDX-License-Identifier: Apache-2.0
// mayfly port: ports of a machine on this host, and of this host in a machine, without any network:
// each connection goes through the machine's agent. One thread that listens, and one a connection.
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/forward.h"
#include "cli/launch.h"
#include "cli/running.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/base/unix_sock.h"

#define FORWARDS_MAX    32
#define CONNECTIONS_MAX 256
#define ANSWER_NS       60000000000ULL

// Ports of the host's side of vsock that we use, one for each forward into the machine.
#define HOST_PORT_FIRST 0x6d660000U

static const char help[] =
	"Usage: mayfly port NAME\n"
	"       mayfly port [OPTION]... NAME [[ADDRESS:]PORT:]MACHINE_PORT...\n"
	"\n"
	"Without ports: lists what listens in the machine. With ports: takes connections to PORT\n"
	"of this host (by default the same number on 127.0.0.1) to the machine's, until it is\n"
	"interrupted. The machine needs no network for that.\n"
	"\n"
	"  -R, --reverse MACHINE_PORT:ADDRESS:PORT\n"
	"                        take connections to 127.0.0.1:MACHINE_PORT in the machine to\n"
	"                        ADDRESS:PORT, as seen from this host; may be repeated\n"
	"      --json            the list as JSON\n"
	"\n"
	"Exit status: 0, 125 if it failed, 2 for wrong usage.\n";

struct forwarded {
	bool reverse;
	int listener; // TCP, or with reverse the socket beside the monitor's
	int control_fd; // with reverse: the agent listens as long as it is open
	uint16_t machine_port;
	char address[256], port[8]; // of this host
};

struct ports {
	struct running machine;
	struct forwarded forwards[FORWARDS_MAX];
	unsigned n;
	int stop_fd; // ends all connections
	int done_fd; // counts connections that have ended
	_Atomic unsigned connections;
};

struct connection {
	struct ports *ports;
	const struct forwarded *forward;
	int fd;
};

// --- Connections -----------------------------------------------------------------------------

// A numeric address, or "localhost": a static program cannot ask a name service.
static int to_sockaddr(const char *address, const char *port, struct sockaddr_storage *ret,
	socklen_t *ret_len, struct err *err)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)ret;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)ret;
	uint16_t number = (uint16_t)strtoul(port, NULL, 10);

	memset(ret, 0, sizeof(*ret));
	if (strcmp(address, "localhost") == 0)
		address = "127.0.0.1";
	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(number);
		*ret_len = sizeof(*v4);
		return 0;
	}
	if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(number);
		*ret_len = sizeof(*v6);
		return 0;
	}
	return err_set(err, -EINVAL, "'%s' is not a numeric address", address);
}

static int dial_host(const struct forwarded *f, struct err *err)
{
	struct sockaddr_storage addr;
	CLEANUP_FD int fd = -1;
	socklen_t len = 0;
	int rc = to_sockaddr(f->address, f->port, &addr, &len, err), on = 1;

	if (rc < 0)
		return rc;
	fd = socket(addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (const struct sockaddr *)&addr, len) < 0)
		return err_errno(err, -errno, "%s:%s", f->address, f->port);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return TAKE_FD(fd);
}

static int dial_machine(struct ports *p, const struct forwarded *f, struct err *err)
{
	CLEANUP_FD int fd = running_connect(&p->machine, err);
	int rc;

	if (fd < 0)
		return fd;
	rc = agent_port_connect(fd, f->machine_port, p->stop_fd, now_ns() + ANSWER_NS, err);
	return rc < 0 ? rc : TAKE_FD(fd);
}

static void *connection_main(void *arg)
{
	struct connection *c = arg;
	struct ports *p = c->ports;
	struct err err = {0};
	int other = c->forward->reverse ? dial_host(c->forward, &err)
					: dial_machine(p, c->forward, &err);

	if (other >= 0)
		forward(c->fd, other, p->stop_fd);
	else
		fprintf(stderr, "mayfly port: %s\n", err.msg);
	fd_close(&other);
	fd_close(&c->fd);
	free(c);
	atomic_fetch_sub(&p->connections, 1);
	// The last of what we touch: when all have counted, the caller goes.
	(void)!write(p->done_fd, &(uint64_t){1}, sizeof(uint64_t));
	return NULL;
}

static void take_connection(struct ports *p, const struct forwarded *f)
{
	struct connection *c;
	pthread_attr_t attr;
	pthread_t thread;
	int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC), on = 1;

	if (fd < 0)
		return;
	if (!f->reverse)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	c = malloc(sizeof(*c));
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	atomic_fetch_add(&p->connections, 1);
	if (c)
		*c = (struct connection){.ports = p, .forward = f, .fd = fd};
	if (!c || pthread_create(&thread, &attr, connection_main, c) != 0) {
		atomic_fetch_sub(&p->connections, 1);
		free(c);
		fd_close(&fd);
	}
	pthread_attr_destroy(&attr);
}

// --- Listening -------------------------------------------------------------------------------

static int listen_tcp(const char *address, const char *port, struct err *err)
{
	struct sockaddr_storage addr;
	CLEANUP_FD int fd = -1;
	socklen_t len = 0;
	int rc = to_sockaddr(address, port, &addr, &len, err), on = 1;

	if (rc < 0)
		return rc;
	fd = socket(addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0 ||
		bind(fd, (const struct sockaddr *)&addr, len) < 0 || listen(fd, SOMAXCONN) < 0)
		return err_errno(err, -errno, "%s:%s", address, port);
	return TAKE_FD(fd);
}

static int open_forward(struct ports *p, unsigned i, struct err *err)
{
	struct forwarded *f = &p->forwards[i];
	uint32_t host_port = HOST_PORT_FIRST + (uint32_t)getpid() % 4096 * FORWARDS_MAX + i;
	char name[64];

	if (!f->reverse) {
		f->listener = listen_tcp(f->address, f->port, err);
		return f->listener < 0 ? f->listener : 0;
	}
	snprintf(name, sizeof(name), "%s_%u", LAUNCH_VSOCK, host_port);
	f->listener = unix_listen(p->machine.run_dir, name, SOMAXCONN, err);
	if (f->listener < 0)
		return f->listener;
	f->control_fd = running_connect(&p->machine, err);
	if (f->control_fd < 0)
		return f->control_fd;
	return agent_port_listen(
		f->control_fd, f->machine_port, host_port, false, -1, now_ns() + ANSWER_NS, err);
}

static void close_forward(struct ports *p, unsigned i)
{
	struct forwarded *f = &p->forwards[i];
	char path[PATH_MAX + 64];

	if (f->reverse && f->listener >= 0) {
		snprintf(path, sizeof(path), "%s/%s_%u", p->machine.run_dir, LAUNCH_VSOCK,
			HOST_PORT_FIRST + (uint32_t)getpid() % 4096 * FORWARDS_MAX + i);
		unlink(path);
	}
	fd_close(&f->listener);
	fd_close(&f->control_fd);
}

// Until a signal, or until the machine is gone.
static int serve(struct ports *p, int signal_fd, struct err *err)
{
	for (;;) {
		struct pollfd fds[2 * FORWARDS_MAX + 2] = {
			{.fd = signal_fd, .events = POLLIN}, {.fd = p->done_fd, .events = POLLIN}};
		bool full = atomic_load(&p->connections) >= CONNECTIONS_MAX;
		uint64_t done;

		for (unsigned i = 0; i < p->n; i++) {
			fds[2 + 2 * i] = (struct pollfd){
				.fd = full ? -1 : p->forwards[i].listener, .events = POLLIN};
			fds[3 + 2 * i] = (struct pollfd){
				.fd = p->forwards[i].control_fd, .events = POLLIN};
		}
		if (poll(fds, 2 + 2 * p->n, -1) < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		if (fds[0].revents)
			return 0;
		if (fds[1].revents)
			(void)!read(p->done_fd, &done, sizeof(done));
		for (unsigned i = 0; i < p->n; i++) {
			if (fds[2 + 2 * i].revents)
				take_connection(p, &p->forwards[i]);
			if (fds[3 + 2 * i].revents)
				return err_set(err, -ECONNRESET, "the machine's agent has gone");
		}
	}
}

static int run(struct ports *p, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	uint64_t one = 1, done;
	int rc = 0;

	for (unsigned i = 0; i < p->n; i++)
		p->forwards[i].listener = p->forwards[i].control_fd = -1;
	p->stop_fd = eventfd(0, EFD_CLOEXEC);
	p->done_fd = eventfd(0, EFD_CLOEXEC);
	if (p->stop_fd < 0 || p->done_fd < 0)
		rc = err_errno(err, -errno, "eventfd");
	for (unsigned i = 0; rc == 0 && i < p->n; i++)
		rc = open_forward(p, i, err);
	if (rc == 0)
		rc = launch_take_signals(&launch, err);
	if (rc == 0) {
		for (unsigned i = 0; i < p->n; i++)
			fprintf(stderr,
				p->forwards[i].reverse ? "machine's 127.0.0.1:%1$u -> %2$s:%3$s\n"
						       : "%2$s:%3$s -> machine's port %1$u\n",
				p->forwards[i].machine_port, p->forwards[i].address,
				p->forwards[i].port);
		rc = serve(p, launch.signal_fd, err);
		if (rc < 0)
			running_explain(&p->machine, rc, err);
	}
	// Connections that are open end with us.
	(void)!write(p->stop_fd, &one, sizeof(one));
	while (atomic_load(&p->connections))
		(void)!read(p->done_fd, &done, sizeof(done));
	for (unsigned i = 0; i < p->n; i++)
		close_forward(p, i);
	fd_close(&p->stop_fd);
	fd_close(&p->done_fd);
	launch_end(&launch);
	return rc;
}

// --- What listens ----------------------------------------------------------------------------

static int by_port(const void *a, const void *b)
{
	const json_int_t x = json_integer_value(json_object_get(*(json_t *const *)a, "port"));
	const json_int_t y = json_integer_value(json_object_get(*(json_t *const *)b, "port"));

	return (x > y) - (x < y);
}

static int list(const struct running *m, bool as_json, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FREE json_t **sorted = NULL;
	CLEANUP_FD int fd = running_connect(m, err);
	json_t *facts, *listening, *entry;
	size_t i, n;
	int rc = fd < 0 ? fd : agent_facts(fd, -1, now_ns() + ANSWER_NS, &text, err);

	if (rc < 0)
		return rc;
	facts = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	listening = json_object_get(facts, "listening");
	n = json_array_size(listening);
	sorted = calloc(n + 1, sizeof(json_t *));
	if (!json_is_array(listening) || !sorted) {
		json_decref(facts);
		return err_set(err, -EPROTO, "the guest's answer makes no sense");
	}
	json_array_foreach(listening, i, entry) sorted[i] = entry;
	qsort(sorted, n, sizeof(json_t *), by_port);
	if (as_json) {
		json_dumpf(listening, stdout, JSON_COMPACT | JSON_ENSURE_ASCII);
		putchar('\n');
	} else {
		printf("%-6s %s\n", "PORT", "ADDRESS");
		for (i = 0; i < n; i++)
			printf("%-6lld %s\n",
				(long long)json_integer_value(json_object_get(sorted[i], "port")),
				json_is_true(json_object_get(sorted[i], "loopback")) ? "loopback"
										     : "any");
	}
	json_decref(facts);
	return 0;
}

// --- The command line ------------------------------------------------------------------------

static int take_port(const char *text, size_t len, uint64_t *ret, struct err *err)
{
	char number[8];

	if (len >= sizeof(number))
		return err_set(err, -EINVAL, "'%.*s' is not a port", (int)len, text);
	memcpy(number, text, len);
	number[len] = '\0';
	if (parse_uint(number, 1, 65535, ret, err) < 0)
		return err_set(err, -EINVAL, "'%s' is not a port", number);
	return 0;
}

// [[ADDRESS:]PORT:]MACHINE_PORT; an IPv6 address in brackets.
static int parse_publish(const char *text, struct forwarded *f, struct err *err)
{
	const char *last = strrchr(text, ':'), *middle;
	uint64_t machine_port = 0, port = 0;
	size_t len;
	int rc = take_port(
		last ? last + 1 : text, strlen(last ? last + 1 : text), &machine_port, err);

	if (rc < 0)
		return rc;
	f->machine_port = (uint16_t)machine_port;
	port = machine_port;
	snprintf(f->address, sizeof(f->address), "127.0.0.1");
	if (last) {
		for (middle = last; middle > text && middle[-1] != ':';)
			middle--;
		rc = take_port(middle, (size_t)(last - middle), &port, err);
		if (rc < 0)
			return rc;
		if (middle > text) {
			len = (size_t)(middle - 1 - text);
			if (len >= 2 && text[0] == '[' && text[len - 1] == ']') {
				text++;
				len -= 2;
			}
			if (len == 0 || len >= sizeof(f->address))
				return err_set(err, -EINVAL, "'%s': no address", text);
			memcpy(f->address, text, len);
			f->address[len] = '\0';
		}
	}
	snprintf(f->port, sizeof(f->port), "%u", (unsigned)port);
	return 0;
}

// MACHINE_PORT:ADDRESS:PORT
static int parse_reverse(const char *text, struct forwarded *f, struct err *err)
{
	const char *first = strchr(text, ':'), *last = strrchr(text, ':');
	uint64_t machine_port = 0, port = 0;
	size_t len;
	int rc;

	if (!first || first == last || last - first - 1 >= (ptrdiff_t)sizeof(f->address))
		return err_set(err, -EINVAL, "'%s' is not MACHINE_PORT:ADDRESS:PORT", text);
	rc = take_port(text, (size_t)(first - text), &machine_port, err);
	if (rc == 0)
		rc = take_port(last + 1, strlen(last + 1), &port, err);
	if (rc < 0)
		return rc;
	first++;
	len = (size_t)(last - first);
	if (len >= 2 && first[0] == '[' && first[len - 1] == ']') {
		first++;
		len -= 2;
	}
	f->reverse = true;
	f->machine_port = (uint16_t)machine_port;
	memcpy(f->address, first, len);
	f->address[len] = '\0';
	snprintf(f->port, sizeof(f->port), "%u", (unsigned)port);
	return 0;
}

static int add(struct ports *p, const char *text,
	int (*parse)(const char *text, struct forwarded *f, struct err *err), struct err *err)
{
	struct sockaddr_storage addr;
	struct forwarded *f = &p->forwards[p->n];
	socklen_t len;
	int rc;

	if (p->n == FORWARDS_MAX)
		return err_set(err, -EINVAL, "more than %d ports", FORWARDS_MAX);
	rc = parse(text, f, err);
	if (rc == 0)
		rc = to_sockaddr(f->address, f->port, &addr, &len, err);
	if (rc == 0)
		p->n++;
	return rc;
}

int port_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"reverse", required_argument, NULL, 'R'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	static struct ports p;
	struct err err = {0};
	bool as_json = false;
	const char *name;
	int opt, r = 0;

	optind = 1;
	while (r == 0 && (opt = getopt_long(argc, argv, "R:h", options, NULL)) != -1) {
		switch (opt) {
		case 'R':
			r = add(&p, optarg, parse_reverse, &err);
			break;
		case 'j':
			as_json = true;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (r == 0 && optind == argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	name = r == 0 ? argv[optind++] : NULL;
	for (; r == 0 && optind < argc; optind++)
		r = add(&p, argv[optind], parse_publish, &err);
	if (r < 0) {
		fprintf(stderr, "mayfly port: %s\n", err.msg);
		return EXIT_USAGE;
	}
	r = running_find(name, &p.machine, &err);
	if (r == 0)
		r = p.n ? run(&p, &err) : list(&p.machine, as_json, &err);
	return r < 0 ? cli_fail("port", &err) : 0;
}
