// SPDX-License-Identifier: Apache-2.0
// Files through the agent, there and back, with a real agent; and with one that lies.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_files.h"
#include "tests/support/fake_guest.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

static char dir[] = "/tmp/mayfly-files-test-XXXXXX";

static int sh(const char *script)
{
	char command[4096];

	snprintf(command, sizeof(command), "cd %s && { %s\n}", dir, script);
	return system(command);
}

// A path in the folder of this test, which guest and host share here.
static const char *at(const char *name)
{
	static char paths[16][256];
	static int which;

	which = (which + 1) % 16;
	snprintf(paths[which], sizeof(paths[0]), "%s/%s", dir, name);
	return paths[which];
}

static struct agent_files *fresh(void)
{
	static struct agent_files files;

	if (files.conn_fd > 0)
		fd_close(&files.conn_fd);
	files = (struct agent_files){
		.conn_fd = fake_guest_connect(dir), .signal_fd = -1, .cancel_fd = -1};
	return &files;
}

static void files_are_written_and_read(void **state)
{
	static char data[500000];
	struct agent_put to = {.folder = at("made/on/the/way"), .name = "f", .parents = true};
	struct err err = {0};
	CLEANUP_FREE char *back = NULL;
	CLEANUP_FREE char *part = NULL;
	CLEANUP_FREE char *none = NULL;
	struct tree_entry e;
	size_t len;
	(void)state;

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (char)(i * 31 >> 3);
	assert_int_equal(agent_write(fresh(), &to, 0640, data, sizeof(data), &err), 0);
	assert_int_equal(agent_stat(fresh(), at("made/on/the/way/f"), false, &e, &err), 0);
	assert_int_equal(e.type, 'f');
	assert_int_equal(e.mode, 0640);
	assert_int_equal(e.size, sizeof(data));
	assert_true(e.has_owner && e.uid == geteuid());
	assert_int_equal(
		agent_read(fresh(), at("made/on/the/way/f"), 0, 1 << 20, &back, &len, NULL, &err),
		0);
	assert_int_equal(len, sizeof(data));
	assert_memory_equal(back, data, len);
	assert_int_equal(
		agent_read(fresh(), at("made/on/the/way/f"), 70000, 10, &part, &len, NULL, &err),
		0);
	assert_int_equal(len, 10);
	assert_memory_equal(part, data + 70000, 10);
	// Again, over what is there, which keeps its mode.
	to.keep = true;
	assert_int_equal(agent_write(fresh(), &to, 0600, "short", 5, &err), 0);
	assert_int_equal(sh("[ $(cat made/on/the/way/f) = short ] && [ $(stat -c %a "
			    "made/on/the/way/f) = 640 ]"),
		0);

	assert_int_equal(
		agent_read(fresh(), at("nothing"), 0, 10, &none, &len, NULL, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "nothing: No such file or directory"));
	assert_int_equal(agent_read(fresh(), at("made"), 0, 10, &none, &len, NULL, &err), -EISDIR);
	assert_int_equal(agent_read(fresh(), "/dev/zero", 0, 10, &none, &len, NULL, &err), -EINVAL);
	assert_null(none);
	to.folder = at("no/such");
	to.parents = false;
	assert_int_equal(agent_write(fresh(), &to, 0600, "x", 1, &err), -ENOENT);
	to.folder = at("made/on");
	to.name = "the";
	assert_int_equal(agent_write(fresh(), &to, 0600, data, sizeof(data), &err), -EISDIR);
}

static void folders_and_names(void **state)
{
	struct err err = {0};
	struct tree_entry e;
	(void)state;

	assert_int_equal(agent_mkdir(fresh(), at("x/y/z"), &err), 0);
	assert_int_equal(agent_mkdir(fresh(), at("x/y/z"), &err), 0);
	assert_int_equal(sh("echo 1 >x/f && echo 2 >x/g && ln -s /nowhere x/l"), 0);
	assert_int_equal(agent_mkdir(fresh(), at("x/f"), &err), -ENOTDIR);
	assert_int_equal(agent_stat(fresh(), at("x/l"), false, &e, &err), 0);
	assert_int_equal(e.type, 'l');
	assert_int_equal(agent_stat(fresh(), at("x/l"), true, &e, &err), -ENOENT);
	assert_int_equal(agent_rename(fresh(), at("x/f"), at("x/g"), false, &err), -EEXIST);
	assert_int_equal(agent_rename(fresh(), at("x/f"), at("x/g"), true, &err), 0);
	assert_int_equal(sh("[ $(cat x/g) = 1 ] && [ ! -e x/f ]"), 0);
	assert_int_equal(agent_remove(fresh(), at("x"), false, &err), -ENOTEMPTY);
	assert_int_equal(agent_remove(fresh(), at("x/l"), false, &err), 0);
	assert_int_equal(sh("ln -s ../made x/y/m; mkdir made; touch made/stays"), 0);
	assert_int_equal(agent_remove(fresh(), at("x"), true, &err), 0);
	assert_int_equal(sh("[ ! -e x ] && [ -e made/stays ]"), 0);
	assert_int_equal(agent_remove(fresh(), at("x"), true, &err), -ENOENT);
}

struct listing {
	char text[4096];
	unsigned problems;
};

static int list_entry(void *ctx, const struct tree_entry *e, struct err *err)
{
	struct listing *l = ctx;
	size_t used = strlen(l->text);

	(void)err;
	snprintf(l->text + used, sizeof(l->text) - used, "%c:%s;", e->type, e->path);
	return 0;
}

static void list_problem(void *ctx, const char *path, int errno_value)
{
	(void)path;
	(void)errno_value;
	((struct listing *)ctx)->problems++;
}

static void trees_are_listed(void **state)
{
	const struct agent_get what = {.depth = 1};
	struct listing l = {0};
	const struct agent_list to = {.entry = list_entry, .problem = list_problem, .ctx = &l};
	struct err err = {0};
	(void)state;

	assert_int_equal(sh("mkdir -p t/d/deep && touch t/f && ln -s f t/l && mkfifo t/p"), 0);
	assert_int_equal(agent_list(fresh(), at("t"), &what, &to, &err), 0);
	assert_non_null(strstr(l.text, "d:;"));
	assert_non_null(strstr(l.text, "d:d;"));
	assert_non_null(strstr(l.text, "f:f;"));
	assert_non_null(strstr(l.text, "l:l;"));
	assert_non_null(strstr(l.text, "p:p;"));
	assert_null(strstr(l.text, "deep"));
	l = (struct listing){0};
	assert_int_equal(agent_list(fresh(), "/dev/null", &what, &to, &err), 0);
	assert_string_equal(l.text, "c:;");
	assert_int_equal(agent_list(fresh(), at("none"), &what, &to, &err), -ENOENT);
	assert_int_equal(l.problems, 0); // that is the answer
}

static void trees_go_there_and_back(void **state)
{
	struct agent_put to = {
		.folder = at("guest"), .name = "tree", .owner = geteuid() == 0, .parents = true};
	const struct agent_get what = {
		.depth = TREE_DEPTH_MAX, .content = true, .owner = geteuid() == 0};
	struct tree_receive back = {.rename = "back", .owner = geteuid() == 0};
	struct err err = {0};
	(void)state;

	assert_int_equal(sh("mkdir -p src/a/b && head -c 3000000 /dev/urandom >src/a/big && echo x "
			    ">src/a/b/x && "
			    "ln src/a/b/x src/hard && ln -s a/b src/link && truncate -s 30M "
			    "src/hole && chmod 705 src/a"),
		0);
	assert_int_equal(agent_put(fresh(), at("src"), &to, TREE_DEPTH_MAX, &err), 0);
	back.dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_int_equal(agent_get(fresh(), at("guest/tree"), &what, &back, &err), 0);
	fd_close(&back.dir_fd);
	assert_int_equal(sh("diff -r --no-dereference src guest/tree && diff -r --no-dereference "
			    "src back && "
			    "[ back/hard -ef back/a/b/x ] && [ $(stat -c %a back/a) = 705 ] && "
			    "[ $(stat -c %b back/hole) -lt 100 ]"),
		0);
	// Not all of it can be made: the rest is.
	assert_int_equal(sh("rm -r guest/tree/a/b && echo in-the-way >guest/tree/a/b"), 0);
	assert_int_equal(agent_put(fresh(), at("src"), &to, TREE_DEPTH_MAX, &err), -EIO);
	assert_non_null(strstr(err.msg, "problems, the first with a/b"));
	assert_int_equal(sh("cmp src/a/big guest/tree/a/big"), 0);
	assert_int_equal(agent_put(fresh(), at("none"), &to, TREE_DEPTH_MAX, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "none: No such file"));
}

static void users_have_their_rights(void **state)
{
	struct agent_files *files;
	struct agent_put to = {.folder = at("theirs"), .name = "f"};
	struct err err = {0};
	CLEANUP_FREE char *none = NULL;
	size_t len;
	(void)state;

	if (geteuid() != 0)
		skip(); // needs to become somebody else
	assert_int_equal(sh("chmod 755 . && mkdir theirs && chown 77 theirs && echo x >secret && "
			    "chmod 600 secret"),
		0);
	files = fresh();
	files->user = "77";
	assert_int_equal(agent_read(files, at("secret"), 0, 10, &none, &len, NULL, &err), -EACCES);
	files = fresh();
	files->user = "77";
	assert_int_equal(agent_write(files, &to, 0644, "mine", 4, &err), 0);
	assert_int_equal(sh("[ $(stat -c %u theirs/f) = 77 ]"), 0);
	files = fresh();
	files->user = "78";
	assert_int_equal(agent_write(files, &to, 0644, "mine", 4, &err), -EACCES);
	fresh();
}

// --- Watching --------------------------------------------------------------------------------

struct watching {
	// "change path", or "change from>path", in this order, where others may lie between; and
	// "$ script", for when what stands before has been seen. Ends with NULL.
	const char *const *wanted;
	size_t seen;
};

static int see_change(void *ctx, const struct agent_change *c, struct err *err)
{
	struct watching *w = ctx;
	char line[512];

	snprintf(line, sizeof(line), "%s %s%s%s", c->change, c->from ? c->from : "",
		c->from ? ">" : "", c->path);
	if (strcmp(line, w->wanted[w->seen]) != 0)
		return 0;
	w->seen++;
	if (w->wanted[w->seen] && w->wanted[w->seen][0] == '$')
		assert_int_equal(sh(w->wanted[w->seen++] + 1), 0);
	return w->wanted[w->seen] ? 0 : err_set(err, -ECANCELED, "all seen");
}

static int watch(const char *path, const char *const *wanted)
{
	struct watching w = {.wanted = wanted};
	struct agent_files *files = fresh();
	struct err err = {0};
	int rc;

	files->deadline_ns = now_ns() + 10000000000ULL;
	rc = agent_watch(files, path, see_change, &w, &err);
	if (wanted[w.seen])
		print_error("'%s' has not come: %s\n", wanted[w.seen], err.msg);
	assert_null(wanted[w.seen]);
	return rc;
}

static void changes_are_told(void **state)
{
	static const char *const tree[] = {"watching ",
		"$ echo x >w/new; echo y >>w/new; chmod 600 w/new; mv w/new w/sub/old",
		"created new", "modified new", "attributes new", "moved new>sub/old",
		"$ mkdir -p w/deep/er; echo >w/deep/er/file", "created deep", "created deep/er",
		"created deep/er/file", "$ mv w/deep w/shallow", "moved deep>shallow",
		"$ echo >w/shallow/er/more; rm w/shallow/er/more w/sub/old",
		"created shallow/er/more", "deleted shallow/er/more", "deleted sub/old",
		"$ ln -s ../elsewhere w/link; echo >elsewhere/x/y; mv w/sub sub; echo >sub/z",
		"created link", "deleted sub",
		// One that moves before anybody can have looked into it.
		"$ mkdir -p w/q/er; mv w/q w/r", "moved q>r", "$ echo >w/r/er/late",
		"created r/er/late", NULL};
	static const char *const file[] = {"watching ",
		"$ echo >w2/other; echo two >>w2/f; rm w2/f; echo >w2/f; echo >w2/g; mv w2/g w2/f",
		"modified ", "deleted ", "created ", "modified ", "created ", NULL};
	static const char *const end[] = {"watching ", "$ rm -r w2", "deleted ", NULL};
	struct watching none = {.wanted = end};
	struct err err = {0};
	(void)state;

	assert_int_equal(sh("mkdir -p w/sub w2 elsewhere/x"), 0);
	assert_int_equal(watch(at("w"), tree), -ECANCELED);
	// A file, also one that is replaced; nothing else of its folder.
	assert_int_equal(sh("echo one >w2/f"), 0);
	assert_int_equal(watch(at("w2/f"), file), -ECANCELED);
	assert_int_equal(watch(at("w2"), end), -ECANCELED);
	assert_int_equal(agent_watch(fresh(), at("w2"), see_change, &none, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "w2"));
}

// --- An agent that lies ----------------------------------------------------------------------

// Everything that it says is in the socket before it is asked.
static int with_liar(const uint8_t *stream, size_t len, bool read_file, struct err *err)
{
	struct agent_files files = {.signal_fd = -1, .cancel_fd = -1};
	struct tree_receive to = {.rename = "got"};
	const struct agent_get what = {.depth = 5, .content = true};
	uint8_t frames[4096], exit_payload[FRAME_EXIT_BYTES];
	CLEANUP_FREE char *bytes = NULL;
	size_t n = 0, got;
	int pair[2], rc;

	frame_header_put(frames, FRAME_STDOUT, (uint32_t)len);
	memcpy(frames + FRAME_HEADER_BYTES, stream, len);
	n = FRAME_HEADER_BYTES + len;
	frame_exit_put(exit_payload, &(struct frame_exit){0});
	frame_header_put(frames + n, FRAME_EXIT, FRAME_EXIT_BYTES);
	memcpy(frames + n + FRAME_HEADER_BYTES, exit_payload, FRAME_EXIT_BYTES);
	n += FRAME_HEADER_BYTES + FRAME_EXIT_BYTES;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(fd_write_all(pair[0], frames, n), 0);
	files.conn_fd = pair[1];
	to.dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	*err = (struct err){0};
	rc = read_file ? agent_read(&files, "f", 3, 5, &bytes, &got, NULL, err)
		       : agent_get(&files, "f", &what, &to, err);
	fd_close(&to.dir_fd);
	fd_close(&pair[0]);
	fd_close(&pair[1]);
	return rc;
}

// It takes the request, begins to answer, and says nothing more.
static void a_guest_that_stops_is_left(void **state)
{
	struct agent_files files = {.signal_fd = -1, .cancel_fd = -1, .idle_ns = 20000000};
	const struct agent_get what = {.content = true};
	struct tree_receive to = {.dir_fd = -1, .rename = "got"};
	struct err err = {0};
	uint8_t header[FRAME_HEADER_BYTES];
	int pair[2];
	(void)state;

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	frame_header_put(header, FRAME_STDOUT, 100);
	assert_int_equal(fd_write_all(pair[0], header, sizeof(header)), 0);
	files.conn_fd = pair[1];
	assert_int_equal(agent_get(&files, "f", &what, &to, &err), -ETIMEDOUT);
	assert_non_null(strstr(err.msg, "does not go on"));
	close(pair[0]);
	close(pair[1]);
}

static int no_change(void *ctx, const struct agent_change *change, struct err *err)
{
	(void)ctx;
	(void)err;
	assert_true(change->path && change->change[0]);
	return 0;
}

static int watch_liar(const char *change, struct err *err)
{
	struct agent_files files = {.signal_fd = -1, .cancel_fd = -1};
	uint8_t frames[4096];
	size_t len = strlen(change), n = 3 * FRAME_HEADER_BYTES + len + FRAME_EXIT_BYTES;
	int pair[2], rc;

	memset(frames, 0, sizeof(frames));
	frame_header_put(frames, FRAME_STDOUT, (uint32_t)(2 * FRAME_HEADER_BYTES + len));
	frame_header_put(frames + 8, FRAME_CHANGE, (uint32_t)len);
	memcpy(frames + 16, change, len);
	frame_header_put(frames + 16 + len, FRAME_END, 0);
	frame_header_put(frames + 24 + len, FRAME_EXIT, FRAME_EXIT_BYTES);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(fd_write_all(pair[0], frames, n + FRAME_HEADER_BYTES), 0);
	files.conn_fd = pair[1];
	*err = (struct err){0};
	rc = agent_watch(&files, "f", no_change, NULL, err);
	fd_close(&pair[0]);
	fd_close(&pair[1]);
	return rc;
}

static void lies_of_a_watch_are_found_out(void **state)
{
	struct err err;
	(void)state;

	assert_int_equal(watch_liar("{\"change\":\"lost\",\"path\":\"\",\"new\":1}", &err), 0);
	assert_int_equal(watch_liar("{\"change\":\"lost\"}", &err), -EPROTO);
	assert_int_equal(watch_liar("{\"change\":\"lo\",\"path\":\"\"}", &err), -EPROTO);
	assert_int_equal(watch_liar("{\"path\":\"\"}", &err), -EPROTO);
	assert_int_equal(watch_liar("{\"change\":1,\"path\":\"\"}", &err), -EPROTO);
	assert_int_equal(watch_liar("[]", &err), -EPROTO);
	assert_int_equal(watch_liar("nonsense", &err), -EPROTO);
}

static size_t put_frame(uint8_t *to, enum frame_type type, const void *payload, size_t len)
{
	frame_header_put(to, type, (uint32_t)len);
	if (len)
		memcpy(to + FRAME_HEADER_BYTES, payload, len);
	return FRAME_HEADER_BYTES + len;
}

static void lies_are_found_out(void **state)
{
	static const char file[] = "{\"path\":\"\",\"type\":\"f\",\"mode\":420,\"size\":9}";
	static const char escape[] = "{\"path\":\"../../x\",\"type\":\"f\",\"mode\":420}";
	static const struct {
		uint64_t offset;
		size_t len;
	} outside[] = {{0, 1}, {2, 3}, {3, 6}, {8, 1}, {UINT64_MAX, 1}, {UINT64_MAX - 2, 5}};
	uint8_t s[1024], data[64];
	struct err err;
	size_t n;
	(void)state;

	n = put_frame(s, FRAME_ENTRY, escape, sizeof(escape) - 1);
	n += put_frame(s + n, FRAME_END, NULL, 0);
	assert_int_equal(with_liar(s, n, false, &err), -EPROTO);
	assert_int_equal(with_liar(s, n, true, &err), -EPROTO);
	assert_int_equal(with_liar((const uint8_t *)"nonsense", 8, false, &err), -EPROTO);
	n = put_frame(s, FRAME_ENTRY, file, sizeof(file) - 1);
	assert_int_equal(with_liar(s, n, false, &err), -EPIPE); // cut
	assert_int_equal(with_liar(s, n, true, &err), -EPIPE);
	n += put_frame(s + n, FRAME_PROBLEM, "\15\0\0\0\x1b[2J", 8);
	n += put_frame(s + n, FRAME_END, NULL, 0);
	assert_int_equal(with_liar(s, n, false, &err), -EIO);
	assert_null(strchr(err.msg, '\x1b'));
	assert_int_equal(with_liar(s, n, true, &err), -EIO);
	assert_null(strchr(err.msg, '\x1b'));
	// More of a file than was asked for, in every direction.
	for (size_t i = 0; i < ARRAY_SIZE(outside); i++) {
		put_le64(data, outside[i].offset);
		n = put_frame(s, FRAME_ENTRY, file, sizeof(file) - 1);
		n += put_frame(s + n, FRAME_DATA, data, FRAME_DATA_HEAD_BYTES + outside[i].len);
		n += put_frame(s + n, FRAME_END, NULL, 0);
		assert_int_equal(with_liar(s, n, true, &err), -EPROTO);
	}
	put_le64(data, 3);
	n = put_frame(s, FRAME_DATA, data, FRAME_DATA_HEAD_BYTES + 5); // before its entry
	n += put_frame(s + n, FRAME_END, NULL, 0);
	assert_int_equal(with_liar(s, n, true, &err), -EPROTO);
}

static void files_are_fetched_by_their_names(void **state)
{
	static const char names[] = "a\0d/e/c\0b\0d\0none\0l";
	struct tree_receive to = {0};
	struct err err = {0};
	FILE *list = tmpfile();

	(void)state;
	assert_int_equal(sh("mkdir -p fetch/d/e && echo 1 >fetch/a && ln fetch/a fetch/b && echo 3 "
			    ">fetch/d/e/c && echo 4 >fetch/other && ln -s a fetch/l && mkdir "
			    "fetched"),
		0);
	to.dir_fd = open(at("fetched"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	// The last one has no NUL behind it: it was cut, and is not one.
	assert_int_equal(fwrite(names, 1, sizeof(names) - 1, list), sizeof(names) - 1);
	rewind(list);
	assert_int_equal(agent_fetch(fresh(), at("fetch"), fileno(list), &to, &err), -EIO);
	assert_non_null(strstr(err.msg, "none"));
	assert_int_equal(sh("cmp fetch/a fetched/a && cmp fetch/d/e/c fetched/d/e/c && "
			    "[ $(stat -c %h fetched/b) = 1 ] && [ ! -e fetched/other ] && "
			    "[ ! -e fetched/l ]"),
		0);
	rewind(list);
	assert_int_equal(agent_fetch(fresh(), at("no-such-folder"), fileno(list), &to, &err), -EIO);
	fclose(list);
	fd_close(&to.dir_fd);
}

static void send_frame(int fd, enum frame_type type, const void *payload, size_t len)
{
	uint8_t header[FRAME_HEADER_BYTES];

	frame_header_put(header, type, (uint32_t)len);
	assert_int_equal(fd_write_all(fd, header, sizeof(header)), 0);
	assert_int_equal(fd_write_all(fd, payload, len), 0);
}

// Ctrl-C in the middle of a file: its half does not stay under the name that it had meanwhile.
static void an_interrupted_copy_leaves_nothing(void **state)
{
	static const char entry[] = "{\"path\":\"\",\"type\":\"f\",\"mode\":420}";
	uint8_t half[256], answer[256], *data = half + FRAME_HEADER_BYTES + sizeof(entry) - 1;
	const uint8_t number[4] = {SIGINT};
	CLEANUP_FD int fd = fake_guest_connect(dir);
	char request[256];
	size_t len = 0;
	ssize_t n;
	(void)state;

	assert_int_equal(sh("mkdir half"), 0);
	snprintf(request, sizeof(request),
		"{\"v\":1,\"op\":\"files\",\"argv\":[\"put\",\"%s\",\"name=f\"],\"stdin\":true}",
		at("half"));
	send_frame(fd, FRAME_REQUEST, request, strlen(request));
	frame_header_put(half, FRAME_ENTRY, sizeof(entry) - 1);
	memcpy(half + FRAME_HEADER_BYTES, entry, sizeof(entry) - 1);
	frame_header_put(data, FRAME_DATA, FRAME_DATA_HEAD_BYTES + 1);
	memset(data + FRAME_HEADER_BYTES, 0, FRAME_DATA_HEAD_BYTES + 1);
	send_frame(fd, FRAME_STDIN, half,
		(size_t)(data - half) + FRAME_HEADER_BYTES + FRAME_DATA_HEAD_BYTES + 1);
	assert_int_equal(
		sh("timeout 60 sh -c 'until [ -s half/.mayfly-* ]; do sleep 0.01; done'"), 0);
	send_frame(fd, FRAME_SIGNAL, number, sizeof(number));
	while ((n = read(fd, answer + len, sizeof(answer) - len)) > 0)
		len += (size_t)n;
	assert_int_equal(n, 0);
	// It may say so of the file, and then how it ended.
	assert_true(len >= FRAME_HEADER_BYTES + FRAME_EXIT_BYTES);
	assert_int_equal(answer[len - FRAME_EXIT_BYTES - 4], FRAME_EXIT);
	assert_int_equal(get_le32(answer + len - FRAME_EXIT_BYTES + 4), SIGINT);
	assert_int_equal(sh("[ -z \"$(ls -A half)\" ]"), 0);
}

static int count_stamps(void *ctx, const struct tree_entry *e, struct err *err)
{
	struct stat st;
	char path[128];

	(void)err;
	snprintf(path, sizeof(path), "stamps/%s", e->path);
	assert_int_equal(lstat(at(path), &st), 0);
	assert_true(e->has_stamp);
	assert_int_equal(e->ino, st.st_ino);
	assert_int_equal(e->ctime_ns, (int64_t)st.st_ctim.tv_sec * 1000000000 + st.st_ctim.tv_nsec);
	++*(int *)ctx;
	return 0;
}

static bool skip_some(void *ctx, const char *path, char type)
{
	(void)ctx;
	return strcmp(path, "d") == 0 ? type == 'd' : strcmp(path, "x") == 0;
}

static void stamps_are_told_and_parts_left_out(void **state)
{
	const struct agent_get what = {.depth = 9, .stamp = true};
	const struct agent_put to = {.folder = at("."), .name = "parts", .skip = skip_some};
	int nr = 0;
	const struct agent_list list = {.entry = count_stamps, .ctx = &nr};
	struct err err = {0};

	(void)state;
	assert_int_equal(sh("mkdir -p stamps/d && touch stamps/x stamps/y stamps/d/z"), 0);
	assert_int_equal(agent_list(fresh(), at("stamps"), &what, &list, &err), 0);
	assert_int_equal(nr, 5);
	assert_int_equal(agent_put(fresh(), at("stamps"), &to, TREE_DEPTH_MAX, &err), 0);
	assert_int_equal(sh("[ \"$(ls parts)\" = y ]"), 0);
}

static int group_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(dir));
	fake_guest_start(dir);
	return 0;
}

static int group_teardown(void **state)
{
	(void)state;
	fake_guest_stop();
	return sh("rm -rf \"$PWD\"");
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(files_are_written_and_read),
		cmocka_unit_test(folders_and_names),
		cmocka_unit_test(trees_are_listed),
		cmocka_unit_test(trees_go_there_and_back),
		cmocka_unit_test(users_have_their_rights),
		cmocka_unit_test(files_are_fetched_by_their_names),
		cmocka_unit_test(an_interrupted_copy_leaves_nothing),
		cmocka_unit_test(stamps_are_told_and_parts_left_out),
		cmocka_unit_test(changes_are_told),
		cmocka_unit_test(lies_are_found_out),
		cmocka_unit_test(a_guest_that_stops_is_left),
		cmocka_unit_test(lies_of_a_watch_are_found_out),
	};
	int status = fake_guest_main(argc, argv);

	if (status >= 0)
		return status;
	cmocka_set_test_filter(getenv("TEST_FILTER")); // to run one
	return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
