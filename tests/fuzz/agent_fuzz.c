// SPDX-License-Identifier: Apache-2.0
// The agent's sessions against a wrong host and a command that does anything: the command is played
// by the fuzzer, which takes the place of spawn.c, tree.c, wake.c
// and port.c, so this machine is not
// touched. The agent must answer in frames that can be parsed, pass output on whole and in order,
// say nothing after the last frame, and keep nothing when both sides are gone.
//
// Input: byte 0 is the size of the socket's buffer, then steps of two bytes, what and how much,
// some with bytes of their own.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest/port.h"
#include "guest/session.h"
#include "guest/spawn.h"
#include "guest/wake.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Beyond what a pid can be, so that no signal of the agent reaches anybody.
#define FAKE_PID  0x40000000
#define TURNS_MAX 10000

// The names and the clock of this machine stay as they are.
int wake_up(const struct wake *w, const char *root, struct err *err)
{
	ASSERT(w->entropy_len <= WAKE_ENTROPY_MAX && root);
	return w->clock_ns == 1 ? err_set(err, -EPERM, "no") : 0;
}

// Nor does a fuzzed port reach a server of this machine.
int port_connect(struct agent *a, struct session *s, uint16_t port, struct err *err)
{
	(void)a;
	ASSERT(port && s->state == SESSION_REQUEST);
	return err_set(err, -ECONNREFUSED, "no");
}

int port_listen(struct session *s, uint16_t port, uint32_t host_port, struct err *err)
{
	ASSERT(port && host_port && s->state == SESSION_REQUEST);
	return err_set(err, -EADDRINUSE, "no");
}

bool port_step(struct agent *a, struct session *s)
{
	(void)a;
	(void)s;
	return false;
}

void port_want(struct session *s, uint32_t want[])
{
	(void)s;
	(void)want;
}

// --- The command -----------------------------------------------------------------------------

static struct {
	pid_t pid; // 0: none
	int fds[3];
	bool killed, tty;
	uint64_t wrote[3], read; // bytes
} command = {.fds = {-1, -1, -1}};

pid_t spawn(const struct spawn *s, int *ret_exit_code, struct err *err)
{
	ASSERT(s->argv[0] && s->path && s->ngroups <= SPAWN_GROUPS_MAX);
	for (size_t i = 0; s->envp[i]; i++)
		ASSERT(strchr(s->envp[i], '='));
	if (strcmp(s->argv[0], "missing") == 0) {
		*ret_exit_code = 127;
		return err_set(err, -ENOENT, "%s", s->argv[0]);
	}
	if (command.pid) { // one is all that can be played
		*ret_exit_code = 125;
		return err_set(err, -EAGAIN, "busy");
	}
	command.pid = FAKE_PID;
	command.killed = false;
	memset(command.wrote, 0, sizeof(command.wrote));
	command.tty |= s->tty; // one terminal and the bytes are not ours any more
	for (int i = 0; i < 3; i++) {
		ASSERT(s->fds[i] > 2);
		command.fds[i] = fcntl(s->fds[i], F_DUPFD_CLOEXEC, 3);
		fcntl(command.fds[i], F_SETFL, O_NONBLOCK);
	}
	return command.pid;
}

struct tree tree_take(void)
{
	return TREE_NONE;
}

int tree_take_limited(const struct tree_limits *limits, struct tree *ret, struct err *err)
{
	ASSERT(limits->memory_bytes || limits->processes);
	*ret = TREE_NONE;
	return limits->processes == 1 ? err_set(err, -EOPNOTSUPP, "no") : 0;
}

bool tree_cpu_us(struct tree t, uint64_t *ret_us)
{
	(void)t;
	*ret_us = 1000;
	return true;
}

bool tree_out_of_memory(struct tree t)
{
	(void)t;
	return false;
}

int tree_cgroup_fd(struct tree t)
{
	return t.slot;
}

void tree_kill(struct tree t, pid_t leader)
{
	(void)t;
	ASSERT(leader == command.pid && !command.killed);
	command.killed = true;
}

void tree_release(struct tree *t)
{
	ASSERT(t->slot == -1);
}

static void command_writes(int i, size_t len)
{
	uint8_t bytes[255 * 64];
	ssize_t n;

	if (command.fds[i] < 0)
		return;
	for (size_t k = 0; k < len; k++)
		bytes[k] = (uint8_t)(command.wrote[i] + k);
	n = write(command.fds[i], bytes, len);
	if (n > 0)
		command.wrote[i] += (uint64_t)n;
}

static void command_reads(size_t len)
{
	uint8_t bytes[255 * 256];
	ssize_t n = command.fds[0] < 0 ? -1 : read(command.fds[0], bytes, len);

	if (n > 0)
		command.read += (uint64_t)n;
}

static void command_ends(struct agent *a, int status)
{
	const struct rusage usage = {0};

	for (int i = 0; i < 3; i++)
		fd_close(&command.fds[i]);
	for (int i = 0; i < SESSIONS_MAX && command.pid; i++) {
		struct session *s = &a->sessions[i];

		if (s->used && s->task.pid == command.pid) {
			command.pid = 0;
			session_reaped(a, s, status, &usage);
		}
	}
	for (int i = 0; i < JOBS_MAX && command.pid; i++) {
		struct job *j = &a->jobs[i];

		if (j->used && j->task.pid == command.pid) {
			command.pid = 0;
			job_reaped(a, j, status, &usage);
		}
	}
	ASSERT(!command.pid);
}

// --- The host --------------------------------------------------------------------------------

static struct {
	int fd;
	struct frame_parser parser;
	bool ended, exited;
	uint64_t got[3]; // bytes of output
	unsigned pieces;
	bool views; // a job
	uint8_t offset[FRAME_OFFSET_BYTES];
} host;

static void host_takes(const struct frame_piece *piece)
{
	ASSERT(!host.ended);
	switch (piece->type) {
	case FRAME_STDOUT:
	case FRAME_STDERR: {
		int i = piece->type == FRAME_STDOUT ? 1 : 2;

		if (piece->off == 0)
			host.pieces++;
		// A job's output may be that of one before the command of now.
		for (uint32_t k = 0; !command.tty && k < piece->len; k++)
			ASSERT(piece->data[k] == (uint8_t)(host.got[i] + k));
		host.got[i] += piece->len;
		break;
	}
	case FRAME_OFFSET: {
		uint8_t *to = host.offset + piece->off;
		int i;

		memcpy(to, piece->data, piece->len);
		if (!piece->last)
			break;
		i = get_le32(host.offset) == FRAME_STDOUT ? 1 : 2;
		ASSERT(i == 1 || get_le32(host.offset) == FRAME_STDERR);
		ASSERT(get_le64(host.offset + 4) >= host.got[i]);
		host.got[i] = get_le64(host.offset + 4);
		host.views = true;
		break;
	}
	case FRAME_ERROR:
		host.ended = piece->last;
		break;
	case FRAME_EXIT:
		host.exited = true;
		host.ended = piece->last;
		break;
	case FRAME_REPLY:
		host.ended = piece->last;
		break;
	case FRAME_WINDOW:
		break;
	default:
		ASSERT(false); // a frame that no host expects
	}
}

static size_t host_reads(size_t max)
{
	static uint8_t bytes[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX];
	const uint8_t *from = bytes;
	ssize_t n = host.fd < 0 ? 0 : recv(host.fd, bytes, MIN(max, sizeof(bytes)), MSG_DONTWAIT);
	size_t left = n > 0 ? (size_t)n : 0;
	struct frame_piece piece;
	int rc;

	while ((rc = frame_parse(&host.parser, &from, &left, &piece)) == 1)
		host_takes(&piece);
	ASSERT(rc == 0);
	return n > 0 ? (size_t)n : 0;
}

static void host_sends(const void *bytes, size_t len)
{
	if (host.fd >= 0 && len)
		(void)!send(host.fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void host_sends_frame(uint8_t type, const void *payload, uint32_t len)
{
	uint8_t frame[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX] = {
		(uint8_t)len, (uint8_t)(len >> 8), (uint8_t)(len >> 16), 0, type};

	ASSERT(len <= FRAME_PAYLOAD_MAX);
	if (len)
		memcpy(frame + FRAME_HEADER_BYTES, payload, len);
	host_sends(frame, FRAME_HEADER_BYTES + len);
}

static void host_requests(unsigned which)
{
	static const char *const requests[] = {
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"]}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\",\"y\"],\"stdin\":true}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"stdin\":true,\"tty\":true,\"rows\":5}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"missing\"]}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"timeout_ms\":1}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"env\":[\"A=b\"],\"cwd\":\"/\"}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"user\":\"1:2\"}",
		"{\"v\":1,\"op\":\"shutdown\"}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"job\":\"\"}",
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"job\":\"j\",\"stdin\":true}",
		"{\"v\":1,\"op\":\"attach\",\"job\":\"j\"}",
		"{\"v\":1,\"op\":\"attach\",\"job\":\"job-1\",\"follow\":false}",
		"{\"v\":1,\"op\":\"attach\",\"job\":\"j\",\"tail_bytes\":10}",
		"{\"v\":1,\"op\":\"jobs\"}",
		"{\"v\":1,\"op\":\"signal\",\"job\":\"j\",\"signal\":9,\"tree\":true}",
		"{\"v\":1,\"op\":\"forget\",\"job\":\"j\"}",
		"{\"v\":1,\"op\":\"files\",\"argv\":[\"get\",\"/\"]}",
		"{\"v\":1,\"op\":\"files\",\"argv\":[\"put\",\"/\"],\"stdin\":true}",
		"{\"v\":1,\"op\":\"files\",\"argv\":[\"get\",\"/\"],\"tty\":true}",
		"{\"v\":1,\"op\":\"connect\",\"port\":80}",
		"{\"v\":1,\"op\":\"listen\",\"port\":80,\"host_port\":2000}",
		"{\"v\":1,\"op\":\"facts\",\"processes_max\":3}",
	};
	const char *r = requests[which % ARRAY_SIZE(requests)];

	host_sends_frame(FRAME_REQUEST, r, (uint32_t)strlen(r));
}

// --- Both ------------------------------------------------------------------------------------

static void turn(struct agent *a)
{
	struct err err = {0};
	int rc = agent_turn(a, 0, &err);

	ASSERT(rc >= 0);
	// Whoever is killed dies.
	if (command.pid && command.killed)
		command_ends(a, 9);
}

static const uint8_t zeros[FRAME_PAYLOAD_MAX];
static int buffer_bytes;

static void host_connects(struct agent *a)
{
	int pair[2];

	fd_close(&host.fd);
	memset(&host, 0, sizeof(host));
	host.parser.dir = FRAME_TO_HOST;
	ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
	host.fd = pair[1];
	ASSERT(agent_adopt(a, pair[0]) == 0);
}

static void step(struct agent *a, uint8_t what, uint8_t arg, const uint8_t **data, size_t *size)
{
	size_t own = MIN(*size, (size_t)arg % 64);

	switch (what % 14) {
	case 0:
		host_sends(*data, own);
		*data += own;
		*size -= own;
		break;
	case 1:
		host_sends_frame(what >> 4 ? what >> 4 : FRAME_REQUEST, *data, (uint32_t)own);
		*data += own;
		*size -= own;
		break;
	case 2:
		host_sends_frame(FRAME_STDIN, zeros, (uint32_t)arg * 256 + 1);
		break;
	case 3:
		host_requests(arg);
		break;
	case 4:
		host_reads((size_t)arg * 64 + 1);
		break;
	case 5:
		command_writes(1, (size_t)arg * 64);
		break;
	case 6:
		command_writes(2, (size_t)arg * 64);
		break;
	case 7:
		command_reads((size_t)arg * 256);
		break;
	case 8:
		fd_close(&command.fds[arg % 3]);
		break;
	case 9:
		if (command.pid)
			command_ends(a, arg & 1 ? (arg >> 1) % 65 : arg << 7);
		break;
	case 10:
		if (arg & 1)
			host_sends_frame(FRAME_STDIN_EOF, NULL, 0);
		else if (host.fd >= 0 && arg & 2)
			shutdown(host.fd, SHUT_WR);
		else if (arg & 4)
			fd_close(&host.fd);
		break;
	case 12:
		if (a->used < SESSIONS_MAX)
			host_connects(a);
		break;
	default:
		turn(a);
	}
}

// When nobody interferes any more, all of the output arrives, then the status.
static void finish(struct agent *a)
{
	bool was_killed, had_host = host.fd >= 0;

	for (int i = 0; i < TURNS_MAX && host_reads(SIZE_MAX); i++)
		;
	turn(a);
	was_killed = command.killed;
	if (command.pid)
		command_ends(a, 0);
	for (int i = 0; i < TURNS_MAX && !host.ended && a->used && had_host; i++) {
		turn(a);
		host_reads(SIZE_MAX);
		// It waits for a request that does not come.
		if (!command.wrote[1] && !command.wrote[2] && i > 100)
			break;
	}
	host_reads(SIZE_MAX);
	if (host.ended && host.exited && !host.views && !was_killed && !command.tty) {
		ASSERT(host.got[1] == command.wrote[1]);
		ASSERT(host.got[2] == command.wrote[2]);
	}
	fd_close(&host.fd);
	for (int i = 0; i < TURNS_MAX && (a->used || command.pid); i++) {
		turn(a);
		if (command.pid) // the last request has just been read
			command_ends(a, 0);
	}
	ASSERT(a->used == 0);
	for (int i = 0; i < JOBS_MAX; i++)
		ASSERT(!a->jobs[i].used || !a->jobs[i].task.pid);
}

static int count_fds(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");

	ASSERT(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct agent_config config = {.listen_fd = -1, .etc_dir = "/nowhere"};
	struct agent *a;
	struct err err = {0};
	int before;

	if (size < 1 || size > 4096)
		return 0;
	before = count_fds();
	memset(&command, 0, sizeof(command));
	memset(&host, 0, sizeof(host));
	for (int i = 0; i < 3; i++)
		command.fds[i] = -1;
	ASSERT(agent_create(&config, &a, &err) == 0);
	buffer_bytes = data[0] * 512;
	host.fd = -1;
	host_connects(a);
	data++;
	size--;
	while (size >= 2) {
		uint8_t what = data[0], arg = data[1];

		data += 2;
		size -= 2;
		step(a, what, arg, &data, &size);
	}
	finish(a);
	agent_destroy(a);
	for (int i = 0; i < 3; i++)
		fd_close(&command.fds[i]);
	ASSERT(count_fds() == before);
	return 0;
}
