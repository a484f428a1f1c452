// SPDX-License-Identifier: Apache-2.0
// The agent's sessions on socket pairs, with real processes of this host: every way for a command
// to start, to end and to be left, whatever the other side does, and nothing remains of it.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest/agent.h"
#include "guest/facts.h"
#include "guest/proto/frame.h"
#include "guest/proto/json.h"
#include "guest/spawn.h"
#include "guest/user.h"
#include "guest/wake.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

// Nothing here should take this long, on any machine; what does has failed.
#define PATIENCE_NS 60000000000ULL

static struct agent *agent;
static char dir[] = "/tmp/mayfly-agent-test-XXXXXX";
static char etc[64];

// --- The host's side -------------------------------------------------------------------------

struct host {
	int fd;
	struct frame_parser parser;
	size_t out_len, err_len, dropped;
	size_t asked; // WINDOW
	uint32_t frame_len;
	uint64_t offsets[2];
	unsigned noffsets;
	size_t pieces;
	bool ended; // the last frame, or the end of the stream
	bool closed;
	struct frame_exit exit;
	bool has_exit;
	struct frame_error error;
	char error_text[FRAME_ERROR_TEXT_MAX + 1];
	bool has_error;
	bool has_reply;
	// Not cleared for the next one: hundreds of them would be.
	uint8_t frame[FRAME_PAYLOAD_MAX];
	char out[1 << 20], err[1 << 16]; // what came, NUL-terminated
};

static struct host hosts[224];

static struct host *host_of(int fd)
{
	struct host *h = NULL;

	for (size_t i = 0; !h && i < ARRAY_SIZE(hosts); i++)
		if (hosts[i].fd < 0)
			h = &hosts[i];
	assert_non_null(h);
	memset(h, 0, offsetof(struct host, frame));
	h->out[0] = h->err[0] = '\0';
	h->parser.dir = FRAME_TO_HOST;
	h->fd = fd;
	return h;
}

static struct host *host_connect(void)
{
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(agent_adopt(agent, pair[0]), 0);
	return host_of(pair[1]);
}

static void turn(int timeout_ms)
{
	struct err err = {0};

	if (agent_turn(agent, timeout_ms, &err) < 0)
		fail_msg("%s", err.msg);
}

static void host_frame(struct host *h, const struct frame_piece *piece)
{
	const uint8_t *f = h->frame;
	uint32_t len = piece->frame_len;

	assert_false(h->ended); // nothing after the last frame
	h->pieces++;
	memcpy(h->frame + piece->off, piece->data, piece->len);
	if (!piece->last)
		return;
	h->frame_len = len;
	switch (piece->type) {
	case FRAME_STDOUT:
		if (h->out_len + len < sizeof(h->out)) {
			memcpy(h->out + h->out_len, f, len);
			h->out_len += len;
			h->out[h->out_len] = '\0';
		} else {
			h->dropped += len;
		}
		break;
	case FRAME_STDERR:
		assert_true(h->err_len + len < sizeof(h->err));
		memcpy(h->err + h->err_len, f, len);
		h->err_len += len;
		h->err[h->err_len] = '\0';
		break;
	case FRAME_WINDOW:
		h->asked += get_le32(f);
		break;
	case FRAME_EXIT:
		assert_true(frame_exit_get(f, len, &h->exit));
		h->has_exit = h->ended = true;
		break;
	case FRAME_ERROR:
		assert_true(frame_error_get(f, len, &h->error));
		memcpy(h->error_text, f + FRAME_ERROR_BYTES, len - FRAME_ERROR_BYTES);
		h->has_error = h->ended = true;
		break;
	case FRAME_REPLY:
		h->has_reply = h->ended = true;
		break;
	case FRAME_OFFSET:
		assert_true(get_le32(f) == FRAME_STDOUT || get_le32(f) == FRAME_STDERR);
		h->offsets[get_le32(f) == FRAME_STDERR] = get_le64(f + 4);
		h->noffsets++;
		break;
	default:
		fail_msg("frame %d", piece->type);
	}
}

// Takes at most max bytes of what is there. Returns how many there were.
static size_t host_read(struct host *h, size_t max)
{
	static uint8_t bytes[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX];
	const uint8_t *data = bytes;
	ssize_t n = h->fd < 0 ? 0 : recv(h->fd, bytes, MIN(max, sizeof(bytes)), MSG_DONTWAIT);
	size_t left = n > 0 ? (size_t)n : 0;
	struct frame_piece piece;
	int rc;

	// Closing a Unix socket with unread bytes in it looks like a reset on the other side.
	if (n == 0 || (n < 0 && errno == ECONNRESET))
		h->ended = h->closed = true;
	else if (n < 0)
		assert_int_equal(errno, EAGAIN);
	while ((rc = frame_parse(&h->parser, &data, &left, &piece)) == 1)
		host_frame(h, &piece);
	assert_int_equal(rc, 0);
	return n > 0 ? (size_t)n : 0;
}

static void host_close(struct host *h)
{
	fd_close(&h->fd);
}

static void until(bool (*done)(struct host *), struct host *h, const char *what)
{
	uint64_t deadline = now_ns() + PATIENCE_NS;

	for (;;) {
		host_read(h, SIZE_MAX);
		if (done(h))
			return;
		if (now_ns() > deadline)
			fail_msg("waited for %s; out \"%s\" err \"%s\"", what, h->out, h->err);
		turn(10);
	}
}

static bool is_ended(struct host *h)
{
	return h->ended;
}

static bool is_closed(struct host *h)
{
	return h->closed;
}

static bool has_output(struct host *h)
{
	return h->out_len > 0;
}

static bool has_error_output(struct host *h)
{
	return h->err_len > 0;
}

static bool nothing_left(struct host *h)
{
	(void)h;
	return agent_sessions(agent) == 0;
}

static void until_end(struct host *h)
{
	until(is_ended, h, "the end");
	if (h->out_len < sizeof(h->out))
		h->out[h->out_len] = '\0';
	h->err[h->err_len] = '\0';
}

// All of it arrives, however little the agent takes at a time.
static void host_send(struct host *h, const void *bytes, size_t len)
{
	uint64_t deadline = now_ns() + PATIENCE_NS;

	while (len) {
		ssize_t n = send(h->fd, bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno != EAGAIN)
			return; // it has been closed, which the test will see
		if (n > 0) {
			bytes = (const char *)bytes + n;
			len -= (size_t)n;
		}
		assert_true(now_ns() < deadline);
		if (len)
			turn(0);
	}
}

static void host_frame_send(struct host *h, enum frame_type type, const void *payload, size_t len)
{
	uint8_t header[FRAME_HEADER_BYTES];

	frame_header_put(header, type, (uint32_t)len);
	host_send(h, header, sizeof(header));
	host_send(h, payload, len);
}

// members go between the braces, after version and op.
static void host_request(struct host *h, const char *members)
{
	char json[8192];
	int len = snprintf(json, sizeof(json), "{\"v\":1,%s}", members);

	assert_true(len < (int)sizeof(json));
	host_frame_send(h, FRAME_REQUEST, json, (size_t)len);
}

static struct host *run_members(const char *members)
{
	struct host *h = host_connect();

	host_request(h, members);
	return h;
}

// sh -c script, with more members of the request.
static struct host *start_sh(const char *script, const char *more)
{
	char members[4096];
	struct json_out json = {.buf = members, .cap = sizeof(members) - 1};

	json_key(&json, "op");
	json_str(&json, "exec");
	json_key(&json, "argv");
	json_open(&json, '[');
	json_str(&json, "sh");
	json_str(&json, "-c");
	json_str(&json, script);
	json_close(&json, ']');
	assert_false(json.full);
	members[json.len] = '\0';
	strncat(members, more, sizeof(members) - json.len - 1);
	return run_members(members);
}

static struct host *sh(const char *script, const char *more)
{
	struct host *h = start_sh(script, more);

	until_end(h);
	return h;
}

static void assert_exit(const struct host *h, uint32_t code)
{
	if (!h->has_exit)
		fail_msg("no exit status; error \"%s\"", h->error_text);
	assert_int_equal(h->exit.signal, 0);
	assert_int_equal(h->exit.code, code);
}

static void assert_signal(const struct host *h, uint32_t number)
{
	if (!h->has_exit)
		fail_msg("no exit status; error \"%s\"", h->error_text);
	assert_int_equal(h->exit.signal, number);
	assert_int_equal(h->exit.code, 0);
}

static void assert_error(const struct host *h, int errno_value, uint32_t exit_code)
{
	if (!h->has_error)
		fail_msg("no error; exit code %u, out \"%s\"", h->exit.code, h->out);
	if (h->error.errno_value != (uint32_t)errno_value || h->error.exit_code != exit_code)
		fail_msg("errno %u, exit code %u: \"%s\"", h->error.errno_value, h->error.exit_code,
			h->error_text);
	assert_true(h->error_text[0] != '\0');
}

// --- What is left over -----------------------------------------------------------------------

static int count_fds(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static int fds_before;

static int setup(void **state)
{
	const struct agent_config config = {.listen_fd = -1, .etc_dir = etc};
	struct err err = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(hosts); i++)
		hosts[i].fd = -1;
	fds_before = count_fds();
	if (agent_create(&config, &agent, &err) < 0)
		fail_msg("%s", err.msg);
	return 0;
}

static bool process_gone(pid_t pid)
{
	return kill(pid, 0) < 0 && errno == ESRCH;
}

// We are the subreaper of all that commands leave behind, as PID 1 is.
static int teardown(void **state)
{
	uint64_t deadline = now_ns() + PATIENCE_NS;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(hosts); i++)
		host_close(&hosts[i]);
	until(nothing_left, &(struct host){.fd = -1}, "all sessions to end");
	agent_destroy(agent);
	agent = NULL;
	// What a test has left on purpose has been killed by it: no process may be left.
	while (waitpid(-1, NULL, WNOHANG) >= 0) {
		if (now_ns() > deadline)
			fail_msg("a process is left");
		poll(NULL, 0, 1);
	}
	assert_int_equal(errno, ECHILD);
	assert_int_equal(count_fds(), fds_before);
	return 0;
}

static void make_file(const char *name, mode_t mode, const char *content)
{
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, content, strlen(content)), 0);
	fd_close(&fd);
	assert_int_equal(chmod(path, mode), 0);
}

static int group_setup(void **state)
{
	struct rlimit files;
	(void)state;
	assert_non_null(mkdtemp(dir));
	assert_int_equal(chmod(dir, 0755), 0);
	// Five files a command.
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
	files.rlim_cur = MIN(files.rlim_max, (rlim_t)4096);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
	snprintf(etc, sizeof(etc), "%s", dir);
	make_file("passwd", 0644,
		"root:x:0:0:root:/root:/bin/sh\nbroken\nbad:x:y:z:::\n"
		"ann:x:12345:12346:Ann:/home/ann:/bin/sh\nbob:x:12347:12346::/:/bin/false\n");
	make_file("group", 0644,
		"root:x:0:\nstaff:x:12346:\nextra:x:12350:bob,ann\nmore:x:12351:ann\nx:x:12352:"
		"anna\n");
	make_file("no-exec", 0644, "#!/bin/sh\n");
	make_file("not-a-program", 0755, "just text");
	make_file("no-interpreter", 0755, "#!/nowhere/at/all\n");
	// Whatever who started us left open is not for our commands to see.
	assert_int_equal(close_range(3, ~0U, CLOSE_RANGE_CLOEXEC), 0);
	assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
	return 0;
}

static int group_teardown(void **state)
{
	char command[128];
	(void)state;

	snprintf(command, sizeof(command), "rm -rf %s", dir);
	return system(command);
}

// --- Starting and ending ---------------------------------------------------------------------

static void output_and_status_come_apart(void **state)
{
	struct host *h = sh("echo out; echo err >&2; exit 3", "");
	(void)state;

	assert_string_equal(h->out, "out\n");
	assert_string_equal(h->err, "err\n");
	assert_exit(h, 3);
	until(is_closed, h, "the connection to be closed");
}

static void signal_death_is_no_exit_code(void **state)
{
	struct host *h = sh("kill -9 $$", "");
	(void)state;

	assert_signal(h, 9);
	assert_int_equal(h->exit.flags, 0);
	host_close(h);
	assert_signal(sh("kill -TERM $$", ""), 15);
}

static void exec_path(const char *path, int errno_value, uint32_t exit_code)
{
	char members[512];
	struct host *h;

	snprintf(members, sizeof(members), "\"op\":\"exec\",\"argv\":[\"%s%s\"]",
		path[0] == '/' ? dir : "", path);
	h = run_members(members);
	until_end(h);
	assert_error(h, errno_value, exit_code);
	host_close(h);
}

static void failures_to_start_are_told_apart(void **state)
{
	struct host *h;
	(void)state;

	exec_path("no-such-command", ENOENT, 127);
	exec_path("/no-such-file", ENOENT, 127);
	exec_path("/no-exec/x", ENOTDIR, 127);
	exec_path("/no-interpreter", ENOENT, 127);
	exec_path("/", EISDIR, 126);
	exec_path("/not-a-program", ENOEXEC, 126);
	exec_path("", ENOENT, 127);
	if (geteuid() == 0) // root may search anything, but not execute what nobody may
		exec_path("/no-exec", EACCES, 126);

	h = run_members("\"op\":\"exec\",\"argv\":[\"true\"],\"cwd\":\"/no/such/dir\"");
	until_end(h);
	assert_error(h, ENOENT, 125);
	host_close(h);
	h = run_members("\"op\":\"exec\",\"argv\":[\"true\"],\"user\":\"nosuchuser\"");
	until_end(h);
	assert_error(h, ENOENT, 125);
	assert_string_equal(h->error_text, "there is no user \"nosuchuser\" in the guest");
}

static void path_is_searched_like_a_shell_does(void **state)
{
	char more[512];
	struct host *h;
	(void)state;

	// A folder and a file without permission on the way are no reason to stop.
	snprintf(more, sizeof(more), "%s/sub", dir);
	assert_int_equal(mkdir(more, 0755), 0);
	make_file("sub/tool", 0755, "#!/bin/sh\necho found $0\n");
	make_file("tool", 0644, "");
	snprintf(more, sizeof(more),
		"\"op\":\"exec\",\"argv\":[\"tool\"],\"env\":[\"PATH=/nowhere::%s:%s/sub\"]", dir,
		dir);
	h = run_members(more);
	until_end(h);
	assert_exit(h, 0);
	assert_non_null(strstr(h->out, "sub/tool"));
	host_close(h);

	snprintf(more, sizeof(more),
		"\"op\":\"exec\",\"argv\":[\"tool\"],\"env\":[\"PATH=%s:/nowhere\"]", dir);
	h = run_members(more);
	until_end(h);
	assert_error(h, EACCES, 126);
	host_close(h);

	h = run_members("\"op\":\"exec\",\"argv\":[\"tool\"],\"env\":[\"PATH=\"]");
	until_end(h);
	assert_error(h, ENOENT, 127);
}

static void environment_and_folder(void **state)
{
	struct host *h = sh("echo \"$A|$B|$HOME|$USER|$PATH|${TERM-none}\"; pwd",
		",\"env\":[\"A=1 2\",\"B=\",\"USER=me\"],\"cwd\":\"/usr\"");
	(void)state;

	assert_exit(h, 0);
	assert_string_equal(h->out,
		"1 2||/root|me|/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin|none\n"
		"/usr\n");
	host_close(h);
	// Arguments are bytes.
	h = run_members("\"op\":\"exec\",\"argv\":[\"printf\",\"%s.\",\"\",\"\xff\",\"a\\nb\"]");
	until_end(h);
	assert_string_equal(h->out, ".\xff.a\nb.");
	host_close(h);
	h = run_members("\"op\":\"exec\",\"argv\":[\"true\"],\"env\":[\"=x\"]");
	until_end(h);
	assert_error(h, EINVAL, 125);
}

static void command_starts_clean(void **state)
{
	// Nothing of ours is open in it, no signal is blocked or ignored, it leads its session.
	struct host *h = sh(
		"ls /proc/self/fd | tr '\\n' ' '; grep -E 'Sig(Blk|Ign)' /proc/self/status | "
		"tr -d '\\n\\t '; set -- $(cat /proc/$$/stat); [ $6 = $$ ] && echo leader",
		"");
	char *libc_own;
	(void)state;

	// 32 and 33 belong to the C library, which lets nobody reset them: as they were inherited.
	libc_own = strstr(h->out, "SigIgn:0000000180000000");
	if (libc_own)
		memcpy(libc_own, "SigIgn:0000000000000000", strlen("SigIgn:0000000000000000"));
	assert_exit(h, 0);
	assert_string_equal(
		h->out, "0 1 2 3 SigBlk:0000000000000000SigIgn:0000000000000000leader\n");
}

static void users(void **state)
{
	struct user u;
	struct err err = {0};
	struct host *h;
	(void)state;

	assert_int_equal(user_lookup(etc, "ann", &u, &err), 0);
	assert_int_equal(u.uid, 12345);
	assert_int_equal(u.gid, 12346);
	assert_string_equal(u.home, "/home/ann");
	assert_int_equal(u.ngroups, 2);
	assert_int_equal(u.groups[0], 12350);
	assert_int_equal(u.groups[1], 12351);
	assert_int_equal(user_lookup(etc, "12347", &u, &err), 0);
	assert_string_equal(u.name, "bob");
	assert_int_equal(user_lookup(etc, "77", &u, &err), 0);
	assert_int_equal(u.gid, 77);
	assert_int_equal(u.ngroups, 0);
	assert_string_equal(u.name, "77");
	assert_string_equal(u.home, "/");
	assert_int_equal(user_lookup(etc, "ann:extra", &u, &err), 0);
	assert_int_equal(u.gid, 12350);
	assert_int_equal(u.ngroups, 0);
	assert_int_equal(user_lookup(etc, "77:88", &u, &err), 0);
	assert_int_equal(u.uid, 77);
	assert_int_equal(u.gid, 88);
	assert_int_equal(user_lookup(etc, "ann:nosuch", &u, &err), -ENOENT);
	assert_int_equal(user_lookup(etc, "an", &u, &err), -ENOENT);
	assert_int_equal(user_lookup(etc, "bad", &u, &err), -ENOENT);
	assert_int_equal(user_lookup(etc, "4294967295", &u, &err), -ENOENT);
	assert_int_equal(user_lookup(etc, "", &u, &err), -EINVAL);
	assert_int_equal(user_lookup(etc, "ann:", &u, &err), -EINVAL);
	assert_int_equal(user_lookup(etc, ":extra", &u, &err), -EINVAL);
	assert_int_equal(user_lookup("/nowhere", "0", &u, &err), 0);
	assert_int_equal(user_lookup("/nowhere", "root", &u, &err), -ENOENT);

	if (geteuid() != 0)
		skip(); // the rest changes user
	h = sh("id -u; id -g; id -G; echo $HOME $USER", ",\"user\":\"ann\"");
	assert_exit(h, 0);
	assert_string_equal(h->out, "12345\n12346\n12346 12350 12351\n/home/ann ann\n");
	host_close(h);
	h = sh("id -u; id -G", ",\"user\":\"5:6\"");
	assert_string_equal(h->out, "5\n6\n");
}

// --- Output ----------------------------------------------------------------------------------

static void children_with_open_pipes_hold_nobody_up(void **state)
{
	// The background process keeps both pipes open; its pid tells us whom to kill.
	struct host *h = sh("echo x; echo y >&2; sleep 300 & echo $!", "");
	pid_t left;
	(void)state;

	assert_exit(h, 0);
	assert_memory_equal(h->out, "x\n", 2);
	assert_string_equal(h->err, "y\n");
	left = (pid_t)strtol(h->out + 2, NULL, 10);
	assert_true(left > 1);
	until(nothing_left, h, "the session to end");
	assert_int_equal(kill(left, 0), 0); // it lives on
	kill(left, SIGKILL);
}

static void output_of_the_last_moment_is_whole(void **state)
{
	(void)state;
	// As much as a pipe holds, written and left, while a child keeps the pipe open.
	for (int i = 0; i < 20; i++) {
		struct host *h = sh("sleep 300 & echo $! >&2; head -c 65536 /dev/zero; exit 5", "");

		assert_exit(h, 5);
		assert_int_equal(h->out_len, 65536);
		kill((pid_t)strtol(h->err, NULL, 10), SIGKILL);
		host_close(h);
	}
}

static void a_flood_from_children_does_not_keep_the_session(void **state)
{
	struct host *h = sh("yes & echo $! >&2", "");
	(void)state;

	assert_exit(h, 0);
	until(nothing_left, h, "the session to end");
	kill((pid_t)strtol(h->err, NULL, 10), SIGKILL); // or it has died of its closed pipe
}

static void output_is_binary_and_complete(void **state)
{
	struct host *h = sh(
		"i=0; while [ $i -lt 40 ]; do printf '\\000\\377\\n%020000d' 7; i=$((i+1)); done",
		"");
	(void)state;

	assert_exit(h, 0);
	assert_int_equal(h->out_len, 40 * 20003);
	for (int i = 0; i < 40; i++) {
		assert_memory_equal(h->out + i * 20003, "\0\377\n000", 6);
		assert_int_equal(h->out[i * 20003 + 20002], '7');
	}
}

static bool reader_done(struct host *h)
{
	return h->ended || h->out_len + h->dropped > 40U << 20;
}

static void a_slow_reader_stalls_only_itself(void **state)
{
	struct host *slow = start_sh("echo $$ >&2; exec yes", "");
	uint64_t deadline = now_ns() + PATIENCE_NS;
	size_t had;
	pid_t pid;
	(void)state;

	// Never read: the socket fills, then the agent's buffer, then the pipe. When turns bring
	// nothing new, all of them are full.
	for (int quiet = 0; quiet < 10;) {
		struct err err = {0};
		uint64_t before = now_ns();

		assert_true(agent_turn(agent, 20, &err) >= 0);
		quiet = now_ns() - before >= 20000000 ? quiet + 1 : 0;
		assert_true(now_ns() < deadline);
	}
	for (int i = 0; i < 5; i++) {
		struct host *other = sh("echo hello", "");

		assert_exit(other, 0);
		assert_string_equal(other->out, "hello\n");
		host_close(other);
	}
	// What was held is bounded by the buffers between: a few hundred KiB.
	for (had = 0; host_read(slow, SIZE_MAX); had = slow->out_len + slow->dropped)
		;
	assert_true(had > 4096 && had < 2U << 20);
	// And it goes on when it is read.
	until(reader_done, slow, "40 MiB");
	assert_false(slow->ended);
	slow->err[slow->err_len] = '\0';
	pid = (pid_t)strtol(slow->err, NULL, 10);
	host_close(slow);
	until(nothing_left, slow, "the session to end");
	assert_true(process_gone(pid));
}

static void exit_waits_for_a_slow_reader(void **state)
{
	// Everything before the exit status arrives, byte by byte at last.
	struct host *h = start_sh("head -c 300000 /dev/zero; echo end; exit 9", "");
	uint64_t deadline = now_ns() + PATIENCE_NS;
	(void)state;

	while (!h->ended) {
		turn(0);
		host_read(h, h->out_len < 290000 ? 5000 : 1);
		assert_true(now_ns() < deadline);
	}
	assert_exit(h, 9);
	assert_int_equal(h->out_len, 300004);
	assert_memory_equal(h->out + 300000, "end\n", 4);
}

// --- stdin -----------------------------------------------------------------------------------

static void without_stdin_there_is_nothing_to_read(void **state)
{
	struct host *h = sh("cat; echo end; readlink /proc/self/fd/0", "");
	(void)state;

	assert_exit(h, 0);
	assert_string_equal(h->out, "end\n/dev/null\n");
}

static void stdin_flows_within_its_window(void **state)
{
	static uint8_t data[700000];
	struct host *h = start_sh("cat", ",\"stdin\":true");
	size_t sent = 0, window = STDIN_WINDOW_BYTES, seen = 0;
	uint64_t deadline = now_ns() + PATIENCE_NS;
	unsigned seed = 1;
	(void)state;

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 7 + (i >> 8) * 13);
	while (sent < sizeof(data)) {
		size_t n = MIN(MIN(window, sizeof(data) - sent),
			(size_t)((seed = seed * 1103515245 + 12345) >> 16) + 1);

		if (n) {
			host_frame_send(h, FRAME_STDIN, data + sent, n);
			sent += n;
			window -= n;
		}
		turn(n ? 0 : 10);
		host_read(h, SIZE_MAX);
		window += h->asked - seen;
		seen = h->asked;
		assert_false(h->ended);
		assert_true(now_ns() < deadline);
	}
	host_frame_send(h, FRAME_STDIN_EOF, NULL, 0);
	until_end(h);
	assert_exit(h, 0);
	assert_int_equal(h->out_len, sizeof(data));
	assert_memory_equal(h->out, data, sizeof(data));
	// Credit is given for what the command took, no more.
	assert_true(h->asked <= sizeof(data));
}

static void stdin_beyond_the_window_is_an_error(void **state)
{
	static uint8_t data[FRAME_PAYLOAD_MAX];
	struct host *h = start_sh("echo $$; exec sleep 300", ",\"stdin\":true");
	pid_t pid;
	(void)state;

	until(has_output, h, "the pid");
	pid = (pid_t)strtol(h->out, NULL, 10);
	// The pipe takes one window and gives credit for it, the ring holds another: the command
	// reads neither. Then it is more than anybody asked for.
	for (int i = 0; i < 5 && !h->ended; i++) {
		host_frame_send(h, FRAME_STDIN, data, sizeof(data));
		turn(0);
		host_read(h, SIZE_MAX);
	}
	until_end(h);
	assert_error(h, EPROTO, 125);
	until(nothing_left, h, "the session to end");
	assert_true(process_gone(pid));
}

static void stdin_that_nobody_reads_is_dropped(void **state)
{
	static uint8_t data[FRAME_PAYLOAD_MAX];
	struct host *h = start_sh("exec <&-; echo closed; sleep 0.3; exit 4", ",\"stdin\":true");
	(void)state;

	until(has_output, h, "the command to close its stdin");
	host_frame_send(h, FRAME_STDIN, data, sizeof(data));
	host_frame_send(h, FRAME_STDIN_EOF, NULL, 0);
	until_end(h);
	assert_exit(h, 4);
}

static void control_passes_stdin_that_is_not_read(void **state)
{
	static uint8_t data[FRAME_PAYLOAD_MAX];
	uint8_t term[4];
	struct host *h = start_sh("echo ready; exec sleep 300", ",\"stdin\":true");
	(void)state;

	until(has_output, h, "the command");
	host_frame_send(h, FRAME_STDIN, data, sizeof(data));
	put_le32(term, SIGTERM);
	host_frame_send(h, FRAME_SIGNAL, term, sizeof(term));
	until_end(h);
	assert_signal(h, SIGTERM);
}

// --- Signals, time, trees --------------------------------------------------------------------

static void signals_reach_the_group(void **state)
{
	uint8_t payload[4];
	struct host *h = start_sh(
		"trap 'echo got; exit 7' INT; echo ready; while :; do sleep 0.05; done", "");
	(void)state;

	until(has_output, h, "the trap");
	put_le32(payload, SIGINT);
	host_frame_send(h, FRAME_SIGNAL, payload, sizeof(payload));
	until_end(h);
	assert_exit(h, 7);
	assert_string_equal(h->out, "ready\ngot\n");
	host_close(h);

	h = start_sh("echo ready; exec sleep 300", "");
	until(has_output, h, "the command");
	put_le32(payload, 65);
	host_frame_send(h, FRAME_SIGNAL, payload, sizeof(payload));
	until_end(h);
	assert_error(h, EPROTO, 125);
}

// A command with a child, a child in a session of its own, and its child; prints their pids.
#define TREE_SCRIPT                                \
	"trap '' TERM HUP INT; sleep 300 & a=$!; " \
	"setsid sh -c 'sleep 300 & echo $! $$; wait' & wait_for=$!; echo $a $$; wait"

static void assert_tree_gone(struct host *h)
{
	char *p = h->out;
	int n = 0;

	h->out[h->out_len] = '\0';
	while (*p >= '0' && *p <= '9') {
		pid_t pid = (pid_t)strtol(p, &p, 10);

		assert_true(process_gone(pid));
		while (*p == ' ' || *p == '\n')
			p++;
		n++;
	}
	assert_int_equal(n, 4);
}

static bool four_pids(struct host *h)
{
	int lines = 0;

	for (size_t i = 0; i < h->out_len; i++)
		lines += h->out[i] == '\n';
	return lines == 2;
}

static void a_deadline_kills_the_tree(void **state)
{
	struct host *h = start_sh(TREE_SCRIPT, ",\"timeout_ms\":1500");
	uint64_t started = now_ns();
	(void)state;

	until_end(h);
	assert_signal(h, SIGKILL);
	assert_int_equal(h->exit.flags, EXIT_TIMED_OUT);
	assert_true(now_ns() - started >= 1500000000ULL);
	assert_true(four_pids(h));
	until(nothing_left, h, "the session to end");
	for (uint64_t t = now_ns() + PATIENCE_NS; waitpid(-1, NULL, WNOHANG) >= 0;)
		assert_true(now_ns() < t);
	assert_tree_gone(h);
	host_close(h);
	// One that is not reached does nothing.
	assert_exit(sh("exit 2", ",\"timeout_ms\":3600000"), 2);
}

static void limits_that_cannot_be_kept_are_refused(void **state)
{
	static const char *const limits[] = {
		"\"memory_max_bytes\":1000000", "\"processes_max\":5", "\"cpu_time_ms\":1000"};
	(void)state;

	// Without cgroups, which these tests do not give the agent.
	for (size_t i = 0; i < ARRAY_SIZE(limits); i++) {
		char members[128];
		struct host *h;

		snprintf(members, sizeof(members), "\"op\":\"exec\",\"argv\":[\"true\"],%s",
			limits[i]);
		h = run_members(members);
		until_end(h);
		assert_error(h, EOPNOTSUPP, 125);
		host_close(h);
	}
}

static void a_host_that_leaves_takes_the_tree_along(void **state)
{
	struct host *h = start_sh(TREE_SCRIPT, "");
	(void)state;

	until(four_pids, h, "the pids");
	host_close(h);
	until(nothing_left, &(struct host){.fd = -1}, "the session to end");
	for (uint64_t t = now_ns() + PATIENCE_NS; waitpid(-1, NULL, WNOHANG) >= 0;)
		assert_true(now_ns() < t);
	assert_tree_gone(h);
}

static void a_host_that_stops_sending_is_gone(void **state)
{
	struct host *h = start_sh("echo ready; exec sleep 300", "");
	(void)state;

	until(has_output, h, "the command");
	assert_int_equal(shutdown(h->fd, SHUT_WR), 0);
	until(is_closed, h, "the agent to give up");
	until(nothing_left, h, "the session to end");
}

// The connection breaks after every possible number of bytes of the conversation's first part and
// after every number of turns.
static void a_host_may_vanish_at_any_moment(void **state)
{
	static const char json[] = "{\"v\":1,\"op\":\"exec\",\"stdin\":true,\"argv\":[\"cat\"]}";
	uint8_t talk[256];
	size_t len;
	int before = count_fds();
	(void)state;

	frame_header_put(talk, FRAME_REQUEST, sizeof(json) - 1);
	memcpy(talk + FRAME_HEADER_BYTES, json, sizeof(json) - 1);
	len = FRAME_HEADER_BYTES + sizeof(json) - 1;
	frame_header_put(talk + len, FRAME_STDIN, 2);
	memcpy(talk + len + FRAME_HEADER_BYTES, "x\n", 2);
	len += FRAME_HEADER_BYTES + 2;
	frame_header_put(talk + len, FRAME_STDIN_EOF, 0);
	len += FRAME_HEADER_BYTES;
	for (size_t cut = 0; cut <= len; cut++) {
		for (int turns = 0; turns < 6; turns++) {
			struct host *h = host_connect();

			host_send(h, talk, cut);
			for (int i = 0; i < turns; i++)
				turn(0);
			host_close(h);
			until(nothing_left, &(struct host){.fd = -1}, "the session to end");
		}
	}
	assert_int_equal(count_fds(), before);
}

// --- Many ------------------------------------------------------------------------------------

#define AT_ONCE 200

static void hundreds_at_once(void **state)
{
	static struct host *h[AT_ONCE];
	(void)state;

	for (int i = 0; i < AT_ONCE; i++) {
		char script[64];

		snprintf(script, sizeof(script), "read x; echo %d$x; exit %d", i, i % 100);
		h[i] = start_sh(script, ",\"stdin\":true");
	}
	// All live now, since none has had what it reads. In another order than they began.
	for (int i = AT_ONCE - 1; i >= 0; i--)
		host_frame_send(h[i], FRAME_STDIN, "!\n", 2);
	for (int i = 0; i < AT_ONCE; i++) {
		char want[16];

		until_end(h[i]);
		snprintf(want, sizeof(want), "%d!\n", i);
		assert_exit(h[i], (uint32_t)i % 100);
		assert_string_equal(h[i]->out, want);
	}
}

static void a_thousand_in_a_row(void **state)
{
	int before = count_fds();
	(void)state;

	for (int i = 0; i < 1000; i++) {
		struct host *h = run_members("\"op\":\"exec\",\"argv\":[\"true\"]");

		until_end(h);
		assert_exit(h, 0);
		host_close(h);
	}
	until(nothing_left, &(struct host){.fd = -1}, "the last session to end");
	assert_int_equal(count_fds(), before);
}

static void too_many_wait_in_the_queue(void **state)
{
	struct agent_config config = {.etc_dir = etc};
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct err err = {0};
	int fds[300];
	struct host *h;
	(void)state;

	agent_destroy(agent);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/sock", dir);
	config.listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	assert_true(config.listen_fd >= 0);
	assert_int_equal(bind(config.listen_fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(config.listen_fd, 128), 0);
	assert_int_equal(agent_create(&config, &agent, &err), 0);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		assert_int_equal(connect(fds[i], (struct sockaddr *)&addr, sizeof(addr)), 0);
		turn(0);
	}
	for (int i = 0; i < 300; i++)
		turn(0);
	assert_int_equal(agent_sessions(agent), 256);
	// The last in the queue is served as soon as somebody goes.
	h = host_of(fds[299]);
	host_request(h, "\"op\":\"exec\",\"argv\":[\"true\"]");
	for (int i = 0; i < 299; i++)
		fd_close(&fds[i]);
	until_end(h);
	assert_exit(h, 0);
}

// --- Terminals -------------------------------------------------------------------------------

static bool has_prompt(struct host *h)
{
	return h->out_len > 0 && h->out[h->out_len - 1] == '>';
}

// The terminal's echo, and cat's.
static bool has_twice(struct host *h)
{
	const char *first;

	h->out[h->out_len] = '\0';
	first = strstr(h->out, "again\r\n");
	return first && strstr(first + 1, "again\r\n");
}

static void terminal_has_a_size_and_control_keys(void **state)
{
	uint8_t size[4];
	struct host *h = start_sh(
		"tty -s && stty size; printf '>'; read x; echo \"got $x\"; stty size; "
		"printf '>'; cat; echo end; exec cat",
		",\"tty\":true,\"rows\":33,\"columns\":77");
	(void)state;

	until(has_prompt, h, "the prompt");
	assert_memory_equal(h->out, "33 77\r\n>", 8);
	put_le16(size, 44);
	put_le16(size + 2, 99);
	h->out_len = 0;
	host_frame_send(h, FRAME_RESIZE, size, sizeof(size));
	host_frame_send(h, FRAME_STDIN, "a\xc3\xa4\x7f\n", 5); // typed, one byte taken back
	until(has_prompt, h, "the second prompt");
	h->out[h->out_len] = '\0';
	assert_non_null(strstr(h->out, "got a"));
	assert_non_null(strstr(h->out, "44 99\r\n"));
	h->out_len = 0;
	host_frame_send(h, FRAME_STDIN,
		"line\n\x04"
		"again\n",
		12); // Ctrl-D ends the first cat
	until(has_twice, h, "the second cat");
	assert_non_null(strstr(h->out, "line\r\n"));
	assert_non_null(strstr(h->out, "end\r\n"));
	host_frame_send(h, FRAME_STDIN, "\x03", 1); // Ctrl-C
	until_end(h);
	assert_signal(h, SIGINT);
}

static void terminal_output_is_whole(void **state)
{
	(void)state;
	for (int i = 0; i < 50; i++) {
		struct host *h = sh(
			"i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); done; exit 6",
			",\"tty\":true");

		assert_exit(h, 6);
		assert_non_null(strstr(h->out, "line 299\r\n"));
		assert_int_equal(h->err_len, 0);
		host_close(h);
	}
}

static void terminal_left_to_children_ends_with_the_command(void **state)
{
	struct host *h = sh("trap '' HUP; sleep 300 & echo $!", ",\"tty\":true");
	pid_t left = (pid_t)strtol(h->out, NULL, 10);
	(void)state;

	assert_exit(h, 0);
	assert_true(left > 1);
	kill(left, SIGKILL);
}

static void terminal_stdin_ends(void **state)
{
	struct host *h = start_sh("cat; echo over", ",\"tty\":true");
	(void)state;

	host_frame_send(h, FRAME_STDIN_EOF, NULL, 0);
	until_end(h);
	assert_exit(h, 0);
	assert_string_equal(h->out, "over\r\n");
}

// --- Hosts that are wrong --------------------------------------------------------------------

static void wrong_frames_end_the_session(void **state)
{
	static const struct {
		uint32_t len;
		uint32_t word;
		int follows; // bytes of zero
	} bad[] = {{UINT32_MAX, FRAME_REQUEST, 0}, {0, FRAME_REQUEST, 0}, {5, FRAME_STDOUT, 5},
		{4, FRAME_SIGNAL, 4}, {1, FRAME_STDIN, 1}, {0, 0, 0}, {2, 99, 2},
		{2, FRAME_REQUEST | 1U << 16, 2}, {0, FRAME_STDIN_EOF, 0}};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct host *h = host_connect();
		uint8_t bytes[64] = {0};

		put_le32(bytes, bad[i].len);
		put_le32(bytes + 4, bad[i].word);
		host_send(h, bytes, FRAME_HEADER_BYTES + (size_t)bad[i].follows);
		until_end(h);
		assert_error(h, EPROTO, 125);
		until(is_closed, h, "the connection to be closed");
		host_close(h);
	}
}

static void wrong_requests_are_answered(void **state)
{
	static const struct {
		const char *json;
		int errno_value;
	} bad[] = {
		{"xx", EINVAL}, {"[]", EINVAL}, {"{}", EPROTONOSUPPORT},
		{"{\"v\":2,\"op\":\"exec\"}", EPROTONOSUPPORT}, {"{\"v\":1}", EOPNOTSUPP},
		{"{\"v\":1,\"op\":\"reboot\"}", EOPNOTSUPP}, {"{\"v\":1,\"op\":7}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\"}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[]}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[1]}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[[\"x\"]]}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"memory_max\":1}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"timeout_ms\":-1}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"rows\":65536}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[\"x\"],\"argv\":[\"x\"]}", EINVAL},
		{"{\"v\":1,\"op\":\"exec\",\"argv\":[\"a\\u0000b\"]}", EINVAL},
		{"{\"v\":1,\"op\":\"shutdown\",\"x\":1}", EINVAL},
		{"{\"v\":1,\"op\":\"kill-all\",\"x\":1}", EINVAL},
		{"{\"v\":1,\"op\":\"kill-all\"}", EOPNOTSUPP}, // not PID 1
	};
	struct host *h;
	char *big = malloc(FRAME_PAYLOAD_MAX);
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		h = host_connect();
		host_frame_send(h, FRAME_REQUEST, bad[i].json, strlen(bad[i].json));
		until_end(h);
		if (!h->has_error)
			fail_msg("%s", bad[i].json);
		assert_error(h, bad[i].errno_value, 125);
		host_close(h);
	}
	assert_non_null(big);
	memset(big, ' ', FRAME_PAYLOAD_MAX);
	memcpy(big, "{\"v\":1,\"op\":\"exec\",\"argv\":[", 27);
	for (size_t i = 27; i + 2 <= FRAME_PAYLOAD_MAX; i += 2)
		memcpy(big + i, "1,", 2);
	h = host_connect();
	host_frame_send(h, FRAME_REQUEST, big, FRAME_PAYLOAD_MAX);
	until_end(h);
	assert_error(h, E2BIG, 125);
	free(big);
}

static void a_second_request_is_an_error(void **state)
{
	struct host *h = start_sh("echo $$; exec sleep 300", "");
	pid_t pid;
	(void)state;

	until(has_output, h, "the command");
	pid = (pid_t)strtol(h->out, NULL, 10);
	host_request(h, "\"op\":\"exec\",\"argv\":[\"true\"]");
	until_end(h);
	assert_error(h, EPROTO, 125);
	until(nothing_left, h, "the session to end");
	assert_true(process_gone(pid));
}

static void a_large_request_comes_in_pieces(void **state)
{
	char *members = malloc(FRAME_PAYLOAD_MAX);
	uint8_t *frame = malloc(FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX);
	size_t len;
	struct host *h = host_connect();
	(void)state;

	assert_non_null(members);
	assert_non_null(frame);
	// The largest that there can be.
	len = (size_t)snprintf((char *)frame + FRAME_HEADER_BYTES, FRAME_PAYLOAD_MAX,
		"{\"v\":1,\"op\":\"exec\",\"argv\":[\"printf\",\"%%s\",\"");
	memset(frame + FRAME_HEADER_BYTES + len, 'a', FRAME_PAYLOAD_MAX - len);
	memcpy(frame + FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX - 3, "\"]}", 3);
	frame_header_put(frame, FRAME_REQUEST, FRAME_PAYLOAD_MAX);
	for (size_t off = 0; off < FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX;) {
		size_t n = MIN(off < 300 ? 1U : 777U, FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX - off);

		host_send(h, frame + off, n);
		turn(0);
		off += n;
	}
	until_end(h);
	assert_exit(h, 0);
	assert_int_equal(h->out_len, FRAME_PAYLOAD_MAX - len - 3);
	assert_int_equal(h->out[h->out_len - 1], 'a');
	free(members);
	free(frame);
}

// --- Jobs ------------------------------------------------------------------------------------

static struct json_node nodes[4096];

static void host_reply_parse(struct host *h)
{
	until_end(h);
	if (!h->has_reply)
		fail_msg("no reply; error \"%s\"", h->error_text);
	assert_true(json_parse((char *)h->frame, h->frame_len, nodes, ARRAY_SIZE(nodes)) > 0);
}

static void start_job(const char *name, const char *script, const char *more)
{
	char members[1024];
	struct host *h;

	snprintf(members, sizeof(members), ",\"job\":\"%s\"%s", name, more);
	h = start_sh(script, members);
	host_reply_parse(h);
	host_close(h);
}

static struct host *attach(const char *name, const char *more)
{
	char members[512];

	snprintf(members, sizeof(members), "\"op\":\"attach\",\"job\":\"%s\"%s", name, more);
	return run_members(members);
}

static struct host *ask(const char *op, const char *name, const char *more)
{
	char members[512];
	struct host *h;

	snprintf(members, sizeof(members), "\"op\":\"%s\",\"job\":\"%s\"%s", op, name, more);
	h = run_members(members);
	until_end(h);
	return h;
}

static void a_job_outlives_its_client(void **state)
{
	struct host *h;
	char path[128];
	(void)state;

	start_job("work",
		"echo one; echo uno >&2; while [ ! -e go ]; do sleep 0.02; done; echo two; exit 3",
		"");
	h = attach("work", "");
	until(has_error_output, h, "what it has to say");
	host_close(h);
	h = ask("signal", "work", ",\"signal\":9");
	assert_true(h->has_reply);
	host_close(h);
	h = attach("work", "");
	until_end(h);
	assert_signal(h, 9);
	assert_string_equal(h->out, "one\n");
	assert_string_equal(h->err, "uno\n");
	host_close(h);

	snprintf(path, sizeof(path), ",\"cwd\":\"%s\"", dir);
	start_job(
		"more", "echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; exit 3", path);
	h = attach("more", "");
	until(has_output, h, "the first word");
	host_close(h); // leaves again
	h = attach("more", ",\"stdout_offset\":4");
	make_file("go", 0644, "");
	until_end(h);
	assert_exit(h, 3);
	assert_string_equal(h->out, "two\n");
	assert_int_equal(h->offsets[0], 4);
	host_close(h);
	// It stays until it is forgotten, and can be read from anywhere.
	h = attach("more", ",\"tail_bytes\":3");
	until_end(h);
	assert_exit(h, 3);
	assert_string_equal(h->out, "wo\n");
	host_close(h);
	h = attach("more", ",\"stdout_offset\":1000,\"follow\":false");
	until_end(h);
	assert_exit(h, 3);
	assert_string_equal(h->out, "");
	assert_int_equal(h->offsets[0], 8);
	host_close(h);
	h = ask("forget", "more", "");
	assert_true(h->has_reply);
	host_close(h);
	h = ask("forget", "more", "");
	assert_error(h, ESRCH, 125);
	host_close(h);
	h = attach("more", "");
	until_end(h);
	assert_error(h, ESRCH, 125);
}

static int64_t number_of(const struct json_node *job, const char *member)
{
	int64_t v = -1;
	bool b = false;
	const struct json_field num[] = {{member, JSON_INT, &v, INT64_MIN, INT64_MAX}};
	const struct json_field flag[] = {{member, JSON_BOOL, &b, 0, 0}};

	if (json_decode(nodes, job, num, 1, JSON_SKIP_UNKNOWN, NULL) == 0)
		return v;
	assert_int_equal(json_decode(nodes, job, flag, 1, JSON_SKIP_UNKNOWN, NULL), 0);
	return b;
}

static void jobs_are_listed(void **state)
{
	const struct json_node *list = NULL, *log = NULL;
	const struct json_field fields[] = {{"jobs", JSON_ARRAY, &list, 0, 0}};
	const struct json_field logs[] = {{"stdout", JSON_OBJECT, &log, 0, 0}};
	struct host *h;
	(void)state;

	start_job("", "echo hello; exit 4", "");
	start_job("named", "exec sleep 300", ",\"timeout_ms\":3600000");
	host_close(attach("job-1", "")); // whoever leaves at once
	h = attach("job-1", "");
	until_end(h);
	assert_exit(h, 4);
	host_close(h);
	h = run_members("\"op\":\"jobs\"");
	host_reply_parse(h);
	assert_int_equal(json_decode(nodes, nodes, fields, 1, JSON_REFUSE_UNKNOWN, NULL), 0);
	assert_int_equal(list->count, 2);
	assert_int_equal(number_of(list + 1, "running"), false);
	assert_int_equal(number_of(list + 1, "code"), 4);
	assert_true(number_of(list + 1, "pid") > 1);
	assert_true(number_of(list + 1, "ended_ns") >= number_of(list + 1, "started_ns"));
	assert_int_equal(json_decode(nodes, list + 1, logs, 1, JSON_SKIP_UNKNOWN, NULL), 0);
	assert_int_equal(number_of(log, "end"), 6);
	assert_int_equal(number_of(nodes + list[1].end, "running"), true);
	host_close(h);

	h = start_sh("true", ",\"job\":\"named\"");
	until_end(h);
	assert_error(h, EEXIST, 125);
	host_close(h);
	h = start_sh("true", ",\"job\":\"a/b\"");
	until_end(h);
	assert_error(h, EINVAL, 125);
	host_close(h);
	h = run_members("\"op\":\"exec\",\"argv\":[\"no-such-command\"],\"job\":\"x\"");
	until_end(h);
	assert_error(h, ENOENT, 127);
	host_close(h);
	h = ask("forget", "x", "");
	assert_error(h, ESRCH, 125); // nothing of it is left
	host_close(h);
	h = ask("forget", "named", "");
	assert_error(h, EBUSY, 125);
	host_close(h);
	h = ask("signal", "named", ",\"tree\":true");
	assert_true(h->has_reply);
	host_close(h);
	h = attach("named", "");
	until_end(h);
	assert_signal(h, SIGKILL);
	host_close(h);
	h = ask("signal", "named", ",\"signal\":15");
	assert_error(h, ESRCH, 125);
	host_close(h);
	h = ask("signal", "named", "");
	assert_error(h, EINVAL, 125);
}

static void a_log_is_bounded_and_tells_its_gap(void **state)
{
	struct host *h;
	(void)state;

	start_job("flood",
		"i=0; while [ $i -lt 200 ]; do printf '%05000d' $i; i=$((i+1)); done; exit 1", "");
	h = attach("flood", ",\"stdout_offset\":0");
	until_end(h);
	assert_exit(h, 1);
	host_close(h);
	h = attach("flood", ",\"stdout_offset\":0");
	until_end(h);
	assert_exit(h, 1);
	assert_int_equal(h->offsets[0], 1000000 - 256 * 1024);
	assert_int_equal(h->out_len, 256 * 1024);
	for (int i = 199; i > 150; i--) { // the newest, in order
		char number[16];

		snprintf(number, sizeof(number), "%05d", i);
		assert_memory_equal(h->out + 256 * 1024 - (200 - i) * 5000 + 4995, number, 5);
	}
}

static void a_slow_viewer_holds_no_job_up(void **state)
{
	struct host *slow, *h;
	(void)state;

	start_job("flood", "head -c 5000000 /dev/zero; echo end; exit 2", "");
	slow = attach("flood", "");
	for (int i = 0; i < 3; i++)
		turn(0);
	h = attach("flood", ",\"tail_bytes\":4"); // ends although the other does not read
	until_end(h);
	assert_exit(h, 2);
	host_close(h);
	until_end(slow); // and that one sees the end, after a gap of which it is told
	assert_exit(slow, 2);
	assert_memory_equal(slow->out + slow->out_len - 4, "end\n", 4);
	assert_true(slow->noffsets >= 3 && slow->offsets[0] > 0);
	assert_true(slow->out_len < 4000000);
}

static void what_is_there_is_told_without_waiting(void **state)
{
	struct host *h, *first;
	(void)state;

	start_job("sleeper", "echo ready; exec sleep 300", "");
	first = attach("sleeper", "");
	until(has_output, first, "the word");
	h = attach("sleeper", ",\"follow\":false");
	host_reply_parse(h);
	assert_int_equal(number_of(nodes, "running"), true);
	assert_int_equal(h->out_len, 6);
	host_close(h);
	// A viewer that breaks the protocol is gone; the job is not.
	h = attach("sleeper", "");
	host_frame_send(h, FRAME_RESIZE, "\1\0\1\0", 4);
	until_end(h);
	assert_error(h, EPROTO, 125);
	host_close(h);
	host_frame_send(first, FRAME_SIGNAL, "\x0f\0\0\0", 4);
	until_end(first);
	assert_signal(first, SIGTERM);
}

static bool has_done(struct host *h)
{
	h->out[h->out_len] = '\0';
	return strstr(h->out, "<done>") != NULL;
}

static void a_terminal_is_left_and_come_back_to(void **state)
{
	uint8_t size[4];
	struct host *a, *b;
	(void)state;

	start_job("shell", "while read line; do eval \"$line\"; done",
		",\"stdin\":true,\"tty\":true");
	a = attach("shell", ",\"rows\":40,\"columns\":111");
	host_frame_send(a, FRAME_STDIN, "stty size; x=5; echo '<'done'>'\n", 32);
	until(has_done, a, "the shell");
	assert_non_null(strstr(a->out, "40 111\r\n"));
	host_close(a);
	// Another time, by two: both see what was, and what the other types.
	a = attach("shell", ",\"tail_bytes\":8");
	b = attach("shell", "");
	until(has_done, b, "what was there before");
	b->out_len = 0;
	put_le16(size, 50);
	put_le16(size + 2, 122);
	host_frame_send(a, FRAME_RESIZE, size, 4);
	host_frame_send(a, FRAME_STDIN, "stty size; echo x$x; echo '<'done'>'\n", 37);
	a->out_len = 0;
	until(has_done, b, "what the other typed");
	assert_non_null(strstr(b->out, "x5\r\n"));
	assert_non_null(strstr(b->out, "50 122\r\n"));
	until(has_done, a, "the same");
	host_frame_send(b, FRAME_STDIN, "exit 6\n", 7);
	until_end(a);
	until_end(b);
	assert_exit(a, 6);
	assert_exit(b, 6);
}

static void stdin_of_a_job_flows_and_ends(void **state)
{
	static char data[200000];
	struct host *h;
	size_t sent = 0, window = STDIN_WINDOW_BYTES, seen = 0;
	uint64_t deadline = now_ns() + PATIENCE_NS;
	(void)state;

	memset(data, 'x', sizeof(data));
	start_job("count", "sleep 0.2; wc -c", ",\"stdin\":true");
	h = attach("count", "");
	while (sent < sizeof(data)) {
		size_t n = MIN(window, sizeof(data) - sent);

		n = MIN(n, (size_t)FRAME_PAYLOAD_MAX);
		if (n)
			host_frame_send(h, FRAME_STDIN, data + sent, n);
		sent += n;
		window -= n;
		turn(n ? 0 : 10);
		host_read(h, SIZE_MAX);
		window += h->asked - seen;
		seen = h->asked;
		assert_true(now_ns() < deadline);
	}
	host_frame_send(h, FRAME_STDIN_EOF, NULL, 0);
	until_end(h);
	assert_exit(h, 0);
	assert_string_equal(h->out, "200000\n");
}

static void the_table_of_jobs_makes_room(void **state)
{
	struct host *h;
	(void)state;

	for (int i = 0; i < 70; i++) { // more than there is room for
		char name[32];

		snprintf(name, sizeof(name), "j%d", i);
		start_job(name, "exit 0", "");
		h = attach(name, "");
		until_end(h);
		assert_exit(h, 0);
		host_close(h);
	}
	h = ask("forget", "j0", "");
	assert_error(h, ESRCH, 125);
	host_close(h);
	h = ask("forget", "j69", "");
	assert_true(h->has_reply);
	host_close(h);
	// A viewer of one that has to go is told. It reads nothing, so it is still there.
	start_job("big", "head -c 300000 /dev/zero", "");
	h = attach("big", "");
	until_end(h);
	host_close(h);
	h = attach("big", "");
	for (int i = 0; i < 3; i++)
		turn(0);
	host_close(ask("forget", "big", ""));
	until_end(h);
	assert_error(h, ESTALE, 125);
	host_close(h);
	for (int i = 0; i < 64; i++) {
		char name[32];

		snprintf(name, sizeof(name), "s%d", i);
		start_job(name, "exec sleep 300", "");
	}
	h = start_sh("true", ",\"job\":\"one-more\"");
	until_end(h);
	assert_error(h, EAGAIN, 125);
}

// --- Ports -----------------------------------------------------------------------------------

// A server of the guest on a port of the loopback interface.
struct server {
	int listener;
	uint16_t port;
	bool echoes; // what it gets, until the end, which it returns; else it is silent
	pthread_t thread;
};

static void *serve(void *arg)
{
	struct server *s = arg;
	char buf[30000];
	ssize_t n;
	int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);

	while (s->echoes && fd >= 0 && (n = read(fd, buf, sizeof(buf))) > 0)
		if (fd_write_all(fd, buf, (size_t)n) < 0)
			break;
	if (fd >= 0)
		fd_close(&(int){fd});
	return NULL;
}

static void server_start(struct server *s, int family, bool echoes)
{
	struct sockaddr_in6 addr6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	struct sockaddr_in addr4 = {
		.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr *addr = family == AF_INET ? (struct sockaddr *)&addr4
						  : (struct sockaddr *)&addr6;
	socklen_t len = family == AF_INET ? sizeof(addr4) : sizeof(addr6);
	int on = 1;

	s->echoes = echoes;
	s->listener = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(s->listener >= 0);
	if (family == AF_INET6)
		setsockopt(s->listener, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
	assert_int_equal(bind(s->listener, addr, len), 0);
	assert_int_equal(listen(s->listener, 1), 0);
	assert_int_equal(getsockname(s->listener, addr, &len), 0);
	s->port = ntohs(family == AF_INET ? addr4.sin_port : addr6.sin6_port);
	if (echoes)
		assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
}

static void server_stop(struct server *s)
{
	if (s->echoes)
		assert_int_equal(pthread_join(s->thread, NULL), 0);
	fd_close(&s->listener);
}

static struct host *connect_port(uint16_t port)
{
	char members[64];

	snprintf(members, sizeof(members), "\"op\":\"connect\",\"port\":%u", port);
	return run_members(members);
}

// Sends all of it on a raw stream and the end, and receives the same.
static void echo_through(int fd)
{
	static uint8_t out[3000000], back[sizeof(out)];
	uint64_t deadline = now_ns() + PATIENCE_NS;
	size_t sent = 0, got = 0;
	bool ended = false;

	for (size_t i = 0; i < sizeof(out); i++)
		out[i] = (uint8_t)(i * 7 + (i >> 9));
	while (!ended) {
		ssize_t n = sent < sizeof(out)
				    ? send(fd, out + sent, MIN(sizeof(out) - sent, (size_t)70000),
					      MSG_DONTWAIT | MSG_NOSIGNAL)
				    : -1;

		if (n > 0 && (sent += (size_t)n) == sizeof(out))
			assert_int_equal(shutdown(fd, SHUT_WR), 0);
		n = recv(fd, back + got, sizeof(back) - got + 0, MSG_DONTWAIT);
		if (n > 0)
			got += (size_t)n;
		else if (n == 0)
			ended = true;
		turn(1);
		assert_true(now_ns() < deadline);
		if (got == sizeof(back) && !ended) // nothing but the end is to come
			ended = recv(fd, &(char){0}, 1, MSG_DONTWAIT) == 0;
	}
	assert_int_equal(got, sizeof(out));
	assert_memory_equal(back, out, sizeof(out));
}

static void a_port_of_the_guest_is_reached(void **state)
{
	static const int families[] = {AF_INET, AF_INET6};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
		struct server s;
		struct host *h;

		server_start(&s, families[i], true);
		h = connect_port(s.port);
		until_end(h);
		if (!h->has_reply)
			fail_msg("%s", h->error_text);
		echo_through(h->fd);
		until(nothing_left, h, "the session to end");
		host_close(h);
		server_stop(&s);
	}
}

static void ports_that_answer_not(void **state)
{
	struct server s;
	struct host *h;
	uint16_t closed;
	(void)state;

	server_start(&s, AF_INET, false);
	closed = s.port;
	server_stop(&s);
	h = connect_port(closed);
	until_end(h);
	assert_error(h, ECONNREFUSED, 125);
	host_close(h);
	h = run_members("\"op\":\"connect\"");
	until_end(h);
	assert_error(h, EINVAL, 125);
	host_close(h);
	h = run_members("\"op\":\"connect\",\"port\":65536");
	until_end(h);
	assert_error(h, EINVAL, 125);
	host_close(h);
	// One that never reads: the host is stopped, and may leave.
	server_start(&s, AF_INET, false);
	h = connect_port(s.port);
	until_end(h);
	assert_true(h->has_reply);
	for (int quiet = 0; quiet < 50; quiet++) {
		static const char junk[60000];

		if (send(h->fd, junk, sizeof(junk), MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
			quiet = 0;
		turn(1);
	}
	host_close(h);
	until(nothing_left, &(struct host){.fd = -1}, "the session to end");
	server_stop(&s);
}

static uint32_t dialled;

// The host: a socket in the folder of this test.
static int dial(uint32_t port)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	dialled = port;
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/host", dir);
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		fd_close(&fd);
		return -ECONNREFUSED;
	}
	return fd;
}

// A program of the guest.
static int tcp_client(uint16_t port)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		fd_close(&fd);
	return fd;
}

static void a_port_of_the_host_is_reached(void **state)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct server taken, free_one, s = {.echoes = true};
	struct agent_config config = {.listen_fd = -1, .etc_dir = etc, .dial = dial};
	struct err err = {0};
	struct host *h;
	char members[128];
	int client;
	(void)state;

	agent_destroy(agent);
	assert_int_equal(agent_create(&config, &agent, &err), 0);
	server_start(&free_one, AF_INET, false);
	server_stop(&free_one);
	server_start(&taken, AF_INET, false);
	snprintf(members, sizeof(members), "\"op\":\"listen\",\"port\":%u,\"host_port\":5",
		taken.port);
	h = run_members(members);
	until_end(h);
	assert_error(h, EADDRINUSE, 125);
	host_close(h);
	server_stop(&taken);

	snprintf(members, sizeof(members), "\"op\":\"listen\",\"port\":%u,\"host_port\":4711",
		free_one.port);
	h = run_members(members);
	until_end(h);
	assert_true(h->has_reply);
	// Nobody there yet: the program sees the end at once.
	client = tcp_client(free_one.port);
	assert_true(client >= 0);
	for (int i = 0; i < 10; i++)
		turn(1);
	assert_true(recv(client, members, 1, 0) <= 0);
	assert_int_equal(dialled, 4711);
	fd_close(&client);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/host", dir);
	s.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(s.listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(s.listener, 1), 0);
	assert_int_equal(pthread_create(&s.thread, NULL, serve, &s), 0);
	client = tcp_client(free_one.port);
	assert_true(client >= 0);
	echo_through(client);
	fd_close(&client);
	server_stop(&s);
	// It listens as long as its session lasts.
	host_close(h);
	until(nothing_left, &(struct host){.fd = -1}, "the session to end");
	assert_int_equal(tcp_client(free_one.port), -1);
}

// What starts while it listens is told, unless it knows better.
static void proxies(void **state)
{
	struct agent_config config = {.listen_fd = -1, .etc_dir = etc, .dial = dial};
	static const char show[] = "echo $http_proxy $HTTPS_PROXY $no_proxy",
			  more[] = ",\"env\":[\"HTTPS_PROXY=mine\"]";
	struct server free_one;
	struct err err = {0};
	struct host *h, *x;
	char members[128], wanted[128];
	(void)state;

	agent_destroy(agent);
	assert_int_equal(agent_create(&config, &agent, &err), 0);
	server_start(&free_one, AF_INET, false);
	server_stop(&free_one);
	snprintf(members, sizeof(members),
		"\"op\":\"listen\",\"port\":%u,\"host_port\":3128,\"proxy\":true", free_one.port);
	h = run_members(members);
	until_end(h);
	assert_true(h->has_reply);
	x = sh(show, more);
	snprintf(wanted, sizeof(wanted), "http://127.0.0.1:%u mine localhost,127.0.0.1,::1\n",
		free_one.port);
	assert_string_equal(x->out, wanted);
	host_close(x);
	host_close(h);
	until(nothing_left, &(struct host){.fd = -1}, "the sessions to end");
	x = sh(show, more);
	assert_string_equal(x->out, "mine\n");
	host_close(x);
}

// --- Facts and identity ----------------------------------------------------------------------

static void facts_are_told(void **state)
{
	struct host *h = run_members("\"op\":\"facts\",\"processes_max\":128");
	int64_t clock = 0, uptime = 0, total = 0, available = 0, processes = 0;
	const char *kernel = "";
	const struct json_node *listening = NULL;
	const struct json_field fields[] = {{"clock_ns", JSON_INT, &clock, 1, INT64_MAX},
		{"uptime_ns", JSON_INT, &uptime, 1, INT64_MAX},
		{"kernel", JSON_STRING, &kernel, 0, 0},
		{"processes", JSON_INT, &processes, 1, INT64_MAX},
		{"memory_total_bytes", JSON_INT, &total, 1, INT64_MAX},
		{"memory_available_bytes", JSON_INT, &available, 1, INT64_MAX},
		{"listening", JSON_ARRAY, &listening, 0, 0}};
	struct timespec now;
	struct err err = {0};
	(void)state;

	until_end(h);
	assert_true(h->has_reply);
	assert_true(json_parse((char *)h->frame, h->frame_len, nodes, ARRAY_SIZE(nodes)) > 0);
	assert_int_equal(
		json_decode(nodes, nodes, fields, ARRAY_SIZE(fields), JSON_SKIP_UNKNOWN, &err), 0);
	clock_gettime(CLOCK_REALTIME, &now);
	assert_true(clock / 1000000000 <= now.tv_sec && clock / 1000000000 > now.tv_sec - 60);
	assert_true(uptime > 0 && processes > 0);
	assert_true(available > 0 && total > available);
	assert_true(kernel[0]);
	assert_non_null(listening);
}

static const char *at_dir(const char *name)
{
	static char path[512];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static void listeners_are_found(void **state)
{
	char buf[4096], wanted[512];
	struct json_out out = {.buf = buf, .cap = sizeof(buf)};
	(void)state;

	snprintf(buf, sizeof(buf), "%s/net", dir);
	assert_int_equal(mkdir(buf, 0755), 0);
	make_file("net/tcp", 0644,
		"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   "
		"uid\n"
		"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     "
		"0\n"
		"   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     "
		"0\n"
		"   2: 0100007F:1F91 0100007F:8000 01 00000000:00000000 00:00000000 00000000     "
		"0\n"
		"   3: 0100007F\n   4: \n:\n   5: x:y z\n");
	make_file("net/tcp6", 0644,
		"  sl  local_address\n"
		"   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 "
		"0A x\n");
	make_file("meminfo", 0644, "MemTotal:  100 kB\nMemAvailable:\n");
	assert_int_equal(mkdir(at_dir("1"), 0755), 0);
	make_file("1/comm", 0644, "some-init\n");
	make_file("1/stat", 0644,
		"1 (some) (init)) S 0 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 1 4096 3 0\n");
	assert_int_equal(mkdir(at_dir("7"), 0755), 0);
	make_file(
		"7/stat", 0644, "7 (busy) R 1 1 1 0 -1 0 0 0 0 0 1000 0 0 0 20 0 1 0 1 4096 5 0\n");
	assert_int_equal(mkdir(at_dir("8"), 0755), 0);
	make_file("8/stat", 0644, "8 ) no ( R");
	assert_int_equal(mkdir(at_dir("9"), 0755), 0);
	make_file("9/stat", 0644, "9 (cut) R");
	facts_write(&out, dir, 2);
	assert_false(out.full);
	buf[out.len] = '\0';
	assert_non_null(strstr(buf,
		"\"listening\":[{\"port\":8080,\"loopback\":true},{\"port\":22,\"loopback\":false},"
		"{\"port\":80,\"loopback\":true}]}"));
	assert_non_null(strstr(buf, "\"memory_total_bytes\":102400,"));
	assert_non_null(strstr(buf, "\"init\":\"some-init\","));
	// The busiest first, and no more than asked for.
	snprintf(wanted, sizeof(wanted),
		"\"process_list\":[{\"pid\":7,\"parent\":1,\"uid\":%u,\"state\":\"R\",\"cpu_ms\":"
		"10000,"
		"\"resident_bytes\":20480,\"name\":\"busy\"},{\"pid\":1,\"parent\":0,\"uid\":%u,"
		"\"state\":\"S\",\"cpu_ms\":2000,\"resident_bytes\":12288,"
		"\"name\":\"some) (init)\"}]",
		geteuid(), geteuid());
	assert_non_null(strstr(buf, wanted));
	// Without a /proc there is less to tell, and no harm.
	out.len = 0;
	facts_write(&out, "/nowhere", 2);
	buf[out.len] = '\0';
	assert_non_null(strstr(buf, "\"listening\":[]}"));
}

static void identity_is_checked_first(void **state)
{
	static const char *const bad[] = {"\"entropy\":\"\"",
		"\"entropy\":"
		"\"00000000000000000000000000000000000000000000000000000000000000000000000000000000"
		"00000000000000000000000000000000000000000000000000\"",
		"\"entropy\":\"abc\"", "\"entropy\":\"0g\"", "\"clock_ns\":0", "\"clock_ns\":-5",
		"\"boot_id\":\"x\"", "\"boot_id\":\"01234567-89ab-cdef-0123-456789abcdef0\"",
		"\"boot_id\":\"01234567-89ab-cdef-0123-456789abcdeF\"",
		"\"machine_id\":\"0123456789abcdef0123456789abcde\"",
		"\"machine_id\":\"0123456789abcdef0123456789abcdef0\"", "\"mac\":\"02\"",
		"\"mac\":\"02000000000g\"", "\"mac\":\"02000000000102\"", "\"other\":1"};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		char members[256];
		struct host *h;

		snprintf(members, sizeof(members), "\"op\":\"wake\",%s", bad[i]);
		h = run_members(members);
		until_end(h);
		if (!h->has_error)
			fail_msg("%s", bad[i]);
		assert_error(h, EINVAL, 125);
		host_close(h);
	}
}

static void identity_is_taken_on(void **state)
{
	static const char id[] = "0123456789abcdef0123456789abcdef";
	struct wake w = {.entropy = {1, 2, 3},
		.entropy_len = 3,
		.hostname = "clone-7",
		.machine_id = id,
		.boot_id = "01234567-89ab-cdef-0123-456789abcdef"};
	char path[512];
	int status;
	pid_t pid;
	(void)state;

	if (geteuid() != 0)
		skip(); // sets names in a namespace of its own
	snprintf(path, sizeof(path),
		"mkdir -p %s/root/etc %s/root/run %s/root/proc/sys/kernel/random && "
		"echo 76543210-89ab-cdef-0123-456789abcdef "
		">%s/root/proc/sys/kernel/random/boot_id",
		dir, dir, dir, dir);
	assert_int_equal(system(path), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		char root[64], name[65];
		struct err err = {0};
		CLEANUP_FREE char *text = NULL;
		size_t len;

		snprintf(root, sizeof(root), "%s/root", dir);
		if (unshare(CLONE_NEWUTS | CLONE_NEWNS) < 0 ||
			mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
			_exit(1);
		wake_prepare(root);
		for (int i = 0; i < 2; i++) // a clone of a clone
			if (wake_up(&w, root, &err) < 0)
				_exit(2);
		if (system("[ $(grep -c /random/boot_id /proc/self/mountinfo) = 1 ]") != 0)
			_exit(6);
		if (gethostname(name, sizeof(name)) < 0 || strcmp(name, "clone-7") != 0)
			_exit(3);
		snprintf(path, sizeof(path), "%s/proc/sys/kernel/random/boot_id", root);
		if (fd_read_file(path, 100, &text, &len, &err) < 0 || len != 37 ||
			strncmp(text, w.boot_id, 36) != 0)
			_exit(4);
		// What fails does not keep the rest from being done.
		w.boot_id = NULL;
		w.hostname =
			"a-name-that-is-longer-than-the-sixty-four-bytes-that-linux-has-for-one";
		w.machine_id = "ffffffffffffffffffffffffffffffff";
		_exit(wake_up(&w, root, &err) == -EINVAL ? 0 : 5);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	snprintf(path, sizeof(path),
		"grep -qx ffffffffffffffffffffffffffffffff %s/root/etc/machine-id", dir);
	assert_int_equal(system(path), 0);
}

// --- Beginning and end -----------------------------------------------------------------------

static void readiness_is_announced(void **state)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct err err = {0};
	uint8_t bytes[512];
	ssize_t n = -1;
	int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fd;
	int64_t v = 0, pid = 0, started = 0, ready = 0, clock = 0;
	const char *version = "";
	const struct json_field fields[] = {{"v", JSON_INT, &v, 0, 9},
		{"agent", JSON_STRING, &version, 0, 0}, {"pid", JSON_INT, &pid, 0, INT64_MAX},
		{"started_ns", JSON_INT, &started, 0, INT64_MAX},
		{"ready_ns", JSON_INT, &ready, 0, INT64_MAX},
		{"clock_ns", JSON_INT, &clock, 0, INT64_MAX}};
	(void)state;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/ready", dir);
	assert_int_equal(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(listener, 1), 0);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	assert_int_equal(agent_announce(agent, fd, &addr, sizeof(addr), 5, &err), 0);
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	assert_true(fd >= 0);
	for (uint64_t deadline = now_ns() + PATIENCE_NS; n < 0;) {
		turn(10);
		n = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
		assert_true(now_ns() < deadline);
	}
	assert_int_equal(bytes[4], FRAME_READY);
	assert_int_equal(get_le32(bytes), n - (ssize_t)FRAME_HEADER_BYTES);
	assert_true(json_parse((char *)bytes + FRAME_HEADER_BYTES, get_le32(bytes), nodes,
			    ARRAY_SIZE(nodes)) > 0);
	assert_int_equal(json_decode(nodes, nodes, fields, 6, JSON_REFUSE_UNKNOWN, &err), 0);
	assert_int_equal(v, PROTO_VERSION);
	assert_string_equal(version, MAYFLY_VERSION);
	assert_int_equal(pid, getpid());
	assert_int_equal(started, 5);
	assert_true(ready > started);
	assert_in_range(clock / 1000000000, time(NULL) - 60, time(NULL) + 1);
	fd_close(&fd);
	fd_close(&listener);

	// Nobody listens: that is no error of ours, and the agent serves.
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	assert_int_equal(agent_announce(agent, fd, &addr, sizeof(addr), 5, &err), -ECONNREFUSED);
	assert_exit(sh("exit 1", ""), 1);
}

static void shutdown_is_answered_first(void **state)
{
	struct host *h = run_members("\"op\":\"shutdown\"");
	uint64_t deadline = now_ns() + PATIENCE_NS;
	struct err err = {0};
	int end = 0;
	(void)state;

	while (!end) {
		end = agent_turn(agent, 10, &err);
		assert_true(now_ns() < deadline);
	}
	assert_int_equal(end, AGENT_SHUTDOWN);
	host_read(h, SIZE_MAX);
	assert_true(h->has_reply);
}

static void a_signal_ends_the_agent(void **state)
{
	struct err err = {0};
	(void)state;

	kill(getpid(), SIGTERM);
	assert_int_equal(agent_run(agent, &err), AGENT_SIGNAL);
}

static void the_end_kills_what_runs(void **state)
{
	const struct agent_config config = {.listen_fd = -1, .etc_dir = etc};
	struct host *h = start_sh("echo $$; exec sleep 300", "");
	struct err err = {0};
	pid_t pid;
	(void)state;

	until(has_output, h, "the command");
	pid = (pid_t)strtol(h->out, NULL, 10);
	agent_destroy(agent);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	assert_int_equal(agent_create(&config, &agent, &err), 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(output_and_status_come_apart),
		T(signal_death_is_no_exit_code),
		T(failures_to_start_are_told_apart),
		T(path_is_searched_like_a_shell_does),
		T(environment_and_folder),
		T(command_starts_clean),
		T(users),
		T(children_with_open_pipes_hold_nobody_up),
		T(output_of_the_last_moment_is_whole),
		T(a_flood_from_children_does_not_keep_the_session),
		T(output_is_binary_and_complete),
		T(a_slow_reader_stalls_only_itself),
		T(exit_waits_for_a_slow_reader),
		T(without_stdin_there_is_nothing_to_read),
		T(stdin_flows_within_its_window),
		T(stdin_beyond_the_window_is_an_error),
		T(stdin_that_nobody_reads_is_dropped),
		T(control_passes_stdin_that_is_not_read),
		T(signals_reach_the_group),
		T(a_deadline_kills_the_tree),
		T(limits_that_cannot_be_kept_are_refused),
		T(a_host_that_leaves_takes_the_tree_along),
		T(a_host_that_stops_sending_is_gone),
		T(a_host_may_vanish_at_any_moment),
		T(hundreds_at_once),
		T(a_thousand_in_a_row),
		T(too_many_wait_in_the_queue),
		T(terminal_has_a_size_and_control_keys),
		T(terminal_output_is_whole),
		T(terminal_left_to_children_ends_with_the_command),
		T(terminal_stdin_ends),
		T(wrong_frames_end_the_session),
		T(wrong_requests_are_answered),
		T(a_second_request_is_an_error),
		T(a_large_request_comes_in_pieces),
		T(a_job_outlives_its_client),
		T(jobs_are_listed),
		T(a_log_is_bounded_and_tells_its_gap),
		T(a_slow_viewer_holds_no_job_up),
		T(what_is_there_is_told_without_waiting),
		T(a_terminal_is_left_and_come_back_to),
		T(stdin_of_a_job_flows_and_ends),
		T(the_table_of_jobs_makes_room),
		T(a_port_of_the_guest_is_reached),
		T(ports_that_answer_not),
		T(a_port_of_the_host_is_reached),
		T(proxies),
		T(facts_are_told),
		T(listeners_are_found),
		T(identity_is_checked_first),
		T(identity_is_taken_on),
		T(readiness_is_announced),
		T(shutdown_is_answered_first),
		T(a_signal_ends_the_agent),
		T(the_end_kills_what_runs),
	};

	cmocka_set_test_filter(getenv("TEST_FILTER")); // to run one
	return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
