// SPDX-License-Identifier: Apache-2.0
// guest/proto/tree: a tree comes out as it went in, however the stream is cut; and whatever a
// hostile sender writes, nothing outside of the folder is made, changed or followed, and no half
// file stays.
#include "tests/support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest/proto/json.h"
#include "guest/proto/tree.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

static char base[] = "/tmp/mayfly-tree-test-XXXXXX";
static char in[64], out[64]; // a tree to be sent, a folder to unpack in
static int out_fd = -1;

static int sh(const char *script)
{
	char command[4096];

	snprintf(command, sizeof(command), "cd %s && { %s\n}", base, script);
	return system(command);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	(void)ftw;
	return remove(path);
}

static int setup(void **state)
{
	(void)state;
	strcpy(base + strlen(base) - 6, "XXXXXX");
	assert_non_null(mkdtemp(base));
	snprintf(in, sizeof(in), "%s/in", base);
	snprintf(out, sizeof(out), "%s/out", base);
	assert_int_equal(mkdir(in, 0755), 0);
	assert_int_equal(mkdir(out, 0755), 0);
	// What no stream may touch.
	assert_int_equal(sh("mkdir victim && echo safe >victim/file && echo safe >secret"), 0);
	out_fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_true(out_fd >= 0);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	assert_int_equal(sh("[ \"$(cat victim/file secret)\" = \"safe\nsafe\" ] && [ $(ls victim | "
			    "wc -l) = 1 ]"
			    " && [ $(ls -A | tr '\\n' ,) = in,out,secret,victim, ] && "
			    "! find . -name '.mayfly-*' | grep ."),
		0);
	fd_close(&out_fd);
	return nftw(base, remove_one, 64, FTW_DEPTH | FTW_PHYS);
}

// --- Streams ---------------------------------------------------------------------------------

struct stream {
	uint8_t bytes[4 << 20];
	size_t len;
};

static struct stream stream;

static int collect(void *ctx, const void *bytes, size_t len, struct err *err)
{
	struct stream *s = ctx;

	(void)err;
	assert_true(len <= sizeof(s->bytes) - s->len);
	memcpy(s->bytes + s->len, bytes, len);
	s->len += len;
	return 0;
}

static struct tree_send all(void)
{
	return (struct tree_send){.depth = TREE_DEPTH_MAX,
		.content = true,
		.owner = true,
		.length = UINT64_MAX,
		.write = collect,
		.ctx = &stream};
}

static void add_frame(enum frame_type type, const void *payload, size_t len)
{
	uint8_t *to = stream.bytes + stream.len;

	frame_header_put(to, type, (uint32_t)len);
	memcpy(to + FRAME_HEADER_BYTES, payload, len);
	stream.len += FRAME_HEADER_BYTES + len;
}

static void add_entry(const char *path, char type, unsigned mode, const char *link)
{
	char text[8192];
	struct json_out json = {.buf = text, .cap = sizeof(text)};

	json_open(&json, '{');
	json_key(&json, "path");
	json_str(&json, path);
	json_key(&json, "type");
	json_str(&json, (const char[]){type, '\0'});
	json_key(&json, "mode");
	json_int(&json, mode);
	if (link) {
		json_key(&json, "link");
		json_str(&json, link);
	}
	json_close(&json, '}');
	assert_false(json.full);
	add_frame(FRAME_ENTRY, text, json.len);
}

static void add_data(uint64_t offset, const char *text)
{
	uint8_t payload[4096];

	put_le64(payload, offset);
	memcpy(payload + FRAME_DATA_HEAD_BYTES, text, strlen(text));
	add_frame(FRAME_DATA, payload, FRAME_DATA_HEAD_BYTES + strlen(text));
}

static void add_end(void)
{
	frame_header_put(stream.bytes + stream.len, FRAME_END, 0);
	stream.len += FRAME_HEADER_BYTES;
}

struct seen {
	unsigned good, bad;
	int last_errno;
	char last[256];
};

static void see(void *ctx, const char *path, int errno_value)
{
	struct seen *s = ctx;

	if (errno_value) {
		s->bad++;
		s->last_errno = errno_value;
		snprintf(s->last, sizeof(s->last), "%.255s", path);
	} else {
		s->good++;
	}
}

// Unpacks the stream in pieces of at most cut bytes.
static int unpack(struct tree_receive how, size_t cut, struct seen *seen, struct err *err)
{
	struct tree_receiver *r;
	int rc = 0;

	memset(seen, 0, sizeof(*seen));
	*err = (struct err){0};
	how.dir_fd = out_fd;
	how.done = see;
	how.ctx = seen;
	r = tree_receiver_create(&how);
	assert_non_null(r);
	for (size_t off = 0; rc == 0 && off < stream.len; off += cut)
		rc = tree_receive(r, stream.bytes + off, MIN(cut, stream.len - off), err);
	if (rc == 0)
		rc = tree_receiver_finish(r, err);
	tree_receiver_destroy(r);
	return rc;
}

// --- There and back --------------------------------------------------------------------------

static void make_tree(void)
{
	assert_int_equal(
		sh("cd in && mkdir -p a/b/c d 'with space' empty && echo one >a/one && echo two "
		   ">a/b/two && "
		   "ln a/one a/b/again && ln -s ../one a/b/link && ln -s /nowhere/at/all "
		   "a/dangling && "
		   ": >d/nothing && mkfifo d/pipe && printf '\\377\\001' >d/\"$(printf "
		   "'new\\nline\\001\\377')\" && "
		   "head -c 300000 /dev/urandom >d/large && truncate -s 20M d/sparse && "
		   "printf x | dd of=d/sparse bs=1 seek=7000000 conv=notrunc 2>/dev/null && "
		   "chmod 640 a/one && chmod 711 a && chmod 500 empty && chmod 1777 d && "
		   "touch -h -d '2001-02-03 04:05:06.789' a/b/link d/large a/b 'with space' && "
		   "touch -d '1960-01-01 00:00:00.25' a/b/two"),
		0);
}

#define LIST                                                                                  \
	"find . -printf '%P %y %m %U %G %s %T@ %l %n\\n' | sed 's/^\\([^ ]* d [0-9]* [0-9]* " \
	"[0-9]*\\) [0-9]*/\\1/' | "                                                           \
	"LC_ALL=C sort"

static void a_tree_comes_out_as_it_went_in(void **state)
{
	static const size_t cuts[] = {1 << 20, 65536, 1000, 7};
	struct tree_send how = all();
	struct err err = {0};
	struct seen seen;
	(void)state;

	make_tree();
	stream.len = 0;
	assert_int_equal(tree_send(&how, in, &err), 0);
	assert_true(stream.len < 400000); // without the holes
	for (size_t i = 0; i < ARRAY_SIZE(cuts); i++) {
		assert_int_equal(
			unpack((struct tree_receive){.rename = "copy", .owner = geteuid() == 0},
				cuts[i], &seen, &err),
			0);
		assert_int_equal(seen.bad, 0);
		assert_int_equal(seen.good, 17);
		assert_int_equal(
			sh("diff -r --no-dereference in out/copy 2>/dev/null | grep -v 'fifo'; "
			   "(cd in && " LIST ") >secret.in; (cd out/copy && " LIST ") >secret.out; "
			   "diff secret.in secret.out; r=$?; rm secret.*; [ $r = 0 ]"),
			0);
		// The second name is the same file, the holes are still holes.
		assert_int_equal(sh("[ out/copy/a/one -ef out/copy/a/b/again ] && "
				    "[ $(stat -c %b out/copy/d/sparse) -lt 1000 ]"),
			0);
	}
}

static void content_goes_into_a_folder_that_is_there(void **state)
{
	struct tree_send how = all();
	struct err err = {0};
	struct seen seen;
	(void)state;

	make_tree();
	assert_int_equal(sh("mkdir -p out/a && echo keep >out/a/mine && echo old >out/a/one && "
			    "chmod 750 out"),
		0);
	stream.len = 0;
	assert_int_equal(tree_send(&how, in, &err), 0);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ $(cat out/a/one out/a/mine | tr '\\n' ,) = one,keep, ] && "
			    "[ $(stat -c %a out) = 750 ] && [ $(stat -c %a out/a) = 711 ]"),
		0);
}

static void parts_of_a_tree(void **state)
{
	struct tree_send how = all();
	struct err err = {0};
	struct seen seen;
	char path[128], long_name[3000];
	(void)state;

	memset(long_name, 'x', sizeof(long_name) - 1);
	long_name[sizeof(long_name) - 1] = '\0';
	make_tree();
	// Names alone, of one level.
	how.depth = 1;
	how.content = false;
	stream.len = 0;
	assert_int_equal(tree_send(&how, in, &err), 0);
	assert_int_equal(unpack((struct tree_receive){.rename = "copy"}, 4096, &seen, &err), 0);
	assert_int_equal(seen.good, 5);
	assert_int_equal(sh("[ $(ls -A out/copy/a | wc -l) = 0 ]"), 0);

	// A range of a file, through a link.
	how = all();
	how.follow = true;
	how.offset = 1;
	how.length = 2;
	stream.len = 0;
	snprintf(path, sizeof(path), "%s/a/b/link", in);
	assert_int_equal(tree_send(&how, path, &err), 0);
	assert_int_equal(unpack((struct tree_receive){.rename = "range"}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ \"$(tr -d '\\0' <out/range)\" = ne ] && [ ! -L out/range ]"), 0);

	// Under a name that is none.
	assert_int_equal(
		unpack((struct tree_receive){.rename = long_name}, 4096, &seen, &err), -EIO);
	assert_int_equal(seen.bad, 1);

	// A file of the kernel, which says that it is empty.
	how = all();
	stream.len = 0;
	assert_int_equal(tree_send(&how, "/proc/self/status", &err), 0);
	assert_int_equal(unpack((struct tree_receive){.rename = "status"}, 4096, &seen, &err), 0);
	assert_int_equal(sh("grep -q ^Pid: out/status"), 0);
	// One that cannot be read: a problem, once, and the end.
	stream.len = 0;
	assert_int_equal(tree_send(&how, "/proc/self/mem", &err), 0);
	assert_int_equal(unpack((struct tree_receive){.rename = "mem"}, 4096, &seen, &err), -EIO);
	assert_int_equal(seen.bad, 1);
	assert_int_equal(sh("[ ! -e out/mem ]"), 0);

	assert_int_equal(tree_send(&how, "/no/such/file", &err), -ENOENT);
	assert_string_equal(err.msg, "/no/such/file: No such file or directory");
}

static int refuse(void *ctx, const void *bytes, size_t len, struct err *err)
{
	(void)bytes;
	(void)len;
	return --*(int *)ctx < 0 ? err_set(err, -EPIPE, "nobody listens") : 0;
}

static void a_reader_that_leaves_ends_it(void **state)
{
	struct tree_send how = all();
	struct err err = {0};
	(void)state;

	make_tree();
	for (int after = 0; after < 15; after++) {
		int left = after;

		how.write = refuse;
		how.ctx = &left;
		assert_int_equal(tree_send(&how, in, &err), -EPIPE);
		assert_string_equal(err.msg, "nobody listens");
	}
}

static void unreadable_files_are_problems_and_the_rest_follows(void **state)
{
	struct tree_send how = all();
	struct err err = {0};
	struct seen seen;
	(void)state;

	make_tree();
	assert_int_equal(
		sh("chmod 0 in/a/one; chmod 755 in/d; chmod -R go+rX in/d 'in/with space'"), 0);
	if (geteuid() != 0)
		skip(); // becomes somebody who may not read all of it
	assert_int_equal(sh("chmod 755 ."), 0);
	assert_int_equal(seteuid(65534), 0);
	stream.len = 0;
	assert_int_equal(tree_send(&how, in, &err), 0);
	assert_int_equal(seteuid(0), 0);
	assert_int_equal(unpack((struct tree_receive){.rename = "copy"}, 4096, &seen, &err), -EIO);
	assert_true(seen.bad >= 2); // a cannot be listed, empty neither
	assert_int_equal(seen.last_errno, EACCES);
	assert_int_equal(sh("cmp in/d/large out/copy/d/large"), 0);
}

// --- Hostile senders -------------------------------------------------------------------------

static void paths_that_lead_elsewhere_end_the_stream(void **state)
{
	static const char *const bad[] = {"/", "/etc/passwd", "..", "../victim/file",
		"a/../../victim", "a/..", ".", "a/.", "./a", "a//b", "a/", "//a"};
	char long_name[300], deep[2 * TREE_DEPTH_MAX + 10] = "";
	struct seen seen;
	struct err err;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		static const char types[] = "fdlh";

		for (int t = 0; types[t]; t++) {
			stream.len = 0;
			add_entry(bad[i], types[t], 0644, "x");
			add_data(0, "evil");
			add_end();
			if (unpack((struct tree_receive){0}, 4096, &seen, &err) != -EPROTO)
				fail_msg("%s as %c", bad[i], types[t]);
			stream.len = 0;
			add_entry("ok", 'h', 0644, bad[i]);
			if (unpack((struct tree_receive){0}, 4096, &seen, &err) != -EPROTO)
				fail_msg("hard link to %s", bad[i]);
		}
	}
	memset(long_name, 'a', sizeof(long_name) - 1);
	long_name[256] = '\0';
	stream.len = 0;
	add_entry(long_name, 'f', 0644, NULL);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EPROTO);
	for (int i = 0; i < TREE_DEPTH_MAX; i++)
		strcat(deep, "a/");
	strcat(deep, "a");
	stream.len = 0;
	add_entry(deep, 'd', 0755, NULL);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EPROTO);
	deep[strlen(deep) - 2] = '\0'; // as deep as can be
	stream.len = 0;
	add_entry(deep, 'd', 0755, NULL);
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
}

static void symbolic_links_are_not_followed(void **state)
{
	struct seen seen;
	struct err err;
	char target[128];
	(void)state;

	// The classic: a link out of the folder, then something through it. Relative and absolute.
	for (int i = 0; i < 2; i++) {
		snprintf(target, sizeof(target), "%s", i ? "../victim" : base);
		if (!i)
			strcat(target, "/victim");
		stream.len = 0;
		add_entry("l", 'l', 0777, target);
		add_entry("l/file", 'f', 0644, NULL);
		add_data(0, "evil");
		add_entry("l/new", 'f', 0644, NULL);
		add_entry("l/dir", 'd', 0777, NULL);
		add_entry("l/link", 'l', 0777, "x");
		add_entry("l/hard", 'h', 0777, "l/file");
		add_entry("hard", 'h', 0777, "l/file"); // out of there
		add_entry("l", 'd', 0777, NULL); // the link's own mode and time, or its target's
		add_end();
		assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EIO);
		assert_int_equal(seen.good, 1);
		assert_int_equal(seen.bad, 7);
	}
	// A link where a file goes is replaced, not written through.
	snprintf(target, sizeof(target), "%s/secret", base);
	stream.len = 0;
	add_entry("f", 'l', 0777, target);
	add_entry("f", 'f', 0600, NULL);
	add_data(0, "new");
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ ! -L out/f ] && [ $(cat out/f) = new ]"), 0);
	// Another name of a link is the link, and what is written over it is a new file.
	stream.len = 0;
	add_entry("s", 'l', 0777, target);
	add_entry("t", 'h', 0777, "s");
	add_entry("t", 'f', 0600, NULL);
	add_data(0, "new");
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ -L out/s ] && [ $(cat out/t) = new ]"), 0);
	// A link that was there before the stream is no way out either.
	assert_int_equal(sh("ln -s ../victim out/before"), 0);
	stream.len = 0;
	add_entry("before/file", 'f', 0644, NULL);
	add_data(0, "evil");
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EIO);
}

static void special_files_and_bits_stay_out(void **state)
{
	struct seen seen;
	struct err err;
	(void)state;

	stream.len = 0;
	add_entry("c", 'c', 0666, NULL);
	add_entry("b", 'b', 0666, NULL);
	add_entry("s", 's', 0666, NULL);
	add_entry("suid", 'f', 06755, NULL);
	add_entry("sgid", 'd', 02775, NULL);
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(seen.bad, 3);
	assert_int_equal(
		sh("[ $(ls out | tr '\\n' ,) = sgid,suid, ] && [ $(stat -c %a out/suid) = 755 ] && "
		   "[ $(stat -c %a out/sgid) = 775 ]"),
		0);
}

static void kinds_that_do_not_fit_are_problems(void **state)
{
	struct seen seen;
	struct err err;
	(void)state;

	assert_int_equal(sh("mkdir out/dir && echo x >out/dir/x && echo x >out/file"), 0);
	stream.len = 0;
	add_entry("dir", 'f', 0644, NULL);
	add_data(0, "lost");
	add_entry("file", 'd', 0755, NULL);
	add_entry("file/below", 'f', 0644, NULL);
	add_entry("dir", 'l', 0777, "x");
	add_entry("", 'f', 0644, NULL);
	add_entry("", 'l', 0777, "x");
	add_entry("gone", 'h', 0644, "no/such");
	add_entry("fine", 'f', 0644, NULL);
	add_data(0, "fine");
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EIO);
	assert_int_equal(seen.good, 1);
	assert_int_equal(seen.bad, 7);
	assert_int_equal(sh("[ $(cat out/dir/x out/file out/fine | tr '\\n' ,) = x,x,fine ]"), 0);
}

static void streams_that_are_cut_leave_nothing_half(void **state)
{
	struct seen seen;
	struct err err;
	size_t whole;
	(void)state;

	assert_int_equal(sh("echo old >out/f"), 0);
	stream.len = 0;
	add_entry("d", 'd', 0755, NULL);
	add_entry("f", 'f', 0644, NULL);
	add_data(0, "new content");
	whole = stream.len;
	for (size_t len = 0; len <= whole; len++) {
		stream.len = len;
		assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EPIPE);
		assert_int_equal(sh("[ $(cat out/f) = old ]"), 0);
	}
	stream.len = whole;
	add_frame(FRAME_PROBLEM, "\5\0\0\0f", 5); // the sender could not read the rest
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EIO);
	assert_string_equal(err.msg, "f: Input/output error");
	assert_int_equal(sh("[ $(cat out/f) = old ]"), 0);
	stream.len = whole;
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ \"$(cat out/f)\" = 'new content' ]"), 0);
	add_entry("more", 'f', 0644, NULL);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EPROTO);
}

// Whoever does not trust the sender takes files and folders alone.
static void plain_trees(void **state)
{
	struct seen seen;
	struct err err;
	(void)state;

	stream.len = 0;
	add_entry("d", 'd', 0755, NULL);
	add_entry("d/f", 'f', 0644, NULL);
	add_data(0, "plain");
	add_entry("d/l", 'l', 0777, "f");
	add_entry("d/h", 'h', 0644, "d/f");
	add_entry("d/p", 'p', 0644, NULL);
	add_end();
	assert_int_equal(sh("find out -mindepth 1 -delete"), 0);
	assert_int_equal(unpack((struct tree_receive){.plain = true}, 4096, &seen, &err), -EIO);
	assert_non_null(strstr(err.msg, "d/l"));
	assert_int_equal(sh("[ $(cat out/d/f) = plain ] && [ $(find out | wc -l) = 3 ]"), 0);
	assert_int_equal(sh("find out -mindepth 1 -delete"), 0);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ $(find out | wc -l) = 6 ]"), 0);
	assert_int_equal(sh("find out -mindepth 1 -delete"), 0);
}

// What goes to a store comes out of it again, though its mode says that nobody reads it.
static void readable_trees(void **state)
{
	struct seen seen;
	struct err err;
	(void)state;

	stream.len = 0;
	add_entry("d", 'd', 0, NULL);
	add_entry("d/f", 'f', 0, NULL);
	add_data(0, "text");
	add_entry("d/g", 'f', 0750, NULL);
	add_end();
	assert_int_equal(unpack((struct tree_receive){.readable = true}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ \"$(stat -c %a out/d out/d/f out/d/g | tr '\\n' ,)\" = "
			    "700,400,750, ]"),
		0);
}

// The stream takes so many blocks, and not one less.
static void bounded(uint64_t blocks)
{
	struct seen seen;
	struct err err;

	assert_int_equal(sh("find out -mindepth 1 -delete"), 0);
	assert_int_equal(unpack((struct tree_receive){.max_bytes = blocks * TREE_BLOCK_BYTES}, 4096,
				 &seen, &err),
		0);
	assert_int_equal(sh("find out -mindepth 1 -delete"), 0);
	assert_int_equal(unpack((struct tree_receive){.max_bytes = blocks * TREE_BLOCK_BYTES - 1},
				 4096, &seen, &err),
		-EFBIG);
	assert_int_equal(sh("[ -z \"$(find out -name '.mayfly*')\" ]"), 0);
}

static void amounts_are_bounded(void **state)
{
	static const char huge[] =
		"{\"path\":\"huge\",\"type\":\"f\",\"mode\":420,\"size\":9223372036854775807}";
	struct seen seen;
	struct err err;
	uint8_t payload[9] = {0};
	(void)state;

	stream.len = 0;
	add_data(0, "before any entry"); // harmless
	add_entry("f", 'f', 0644, NULL);
	add_data(0, "0123456789");
	add_end();
	bounded(3); // the dropped data, the file, its data
	// Sparse data takes a block for each byte; what goes on in a block takes no other.
	stream.len = 0;
	add_entry("f", 'f', 0644, NULL);
	for (unsigned i = 0; i < 10; i++)
		add_data(i * 8192, "x");
	add_data(9 * 8192 + 1, "y");
	add_end();
	bounded(1 + 10);
	// Folders that no entry speaks of; names without data; data in a hole.
	stream.len = 0;
	add_entry("a/b/c/d", 'l', 0777, "x");
	add_entry("a/b/c", 'd', 0755, NULL);
	add_entry("a/b/e", 'f', 0644, NULL);
	add_data(65536, "x");
	add_data(0, "x");
	add_end();
	bounded(3 + 1 + 1 + 2);
	memset(payload, 0xff, 8);
	stream.len = 0;
	add_entry("f", 'f', 0644, NULL);
	add_frame(FRAME_DATA, payload, 9);
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EPROTO);
	// A size that the disk does not have is a problem of that file.
	stream.len = 0;
	add_frame(FRAME_ENTRY, huge, strlen(huge));
	add_end();
	assert_int_equal(unpack((struct tree_receive){0}, 4096, &seen, &err), -EIO);
	assert_int_equal(sh("[ ! -e out/huge ]"), 0);
}

static void a_full_disk_is_a_problem_of_the_file(void **state)
{
	struct rlimit old, small = {4096, RLIM_INFINITY};
	struct seen seen;
	struct err err;
	int rc;
	(void)state;

	assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
	small.rlim_max = old.rlim_max;
	signal(SIGXFSZ, SIG_IGN);
	stream.len = 0;
	add_entry("large", 'f', 0644, NULL);
	add_data(4090, "0123456789");
	add_data(5000, "0123456789");
	add_entry("small", 'f', 0644, NULL);
	add_data(0, "ok");
	add_end();
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
	rc = unpack((struct tree_receive){0}, 4096, &seen, &err);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
	signal(SIGXFSZ, SIG_DFL);
	assert_int_equal(rc, -EIO);
	assert_string_equal(err.msg, "large: File too large");
	assert_int_equal(sh("[ $(ls -A out) = small ] && [ $(cat out/small) = ok ]"), 0);
}

static void a_file_may_keep_what_it_was(void **state)
{
	struct seen seen;
	struct err err;
	(void)state;

	assert_int_equal(sh("echo old >out/f && chmod 604 out/f && ln -s f out/l"), 0);
	if (geteuid() == 0)
		assert_int_equal(sh("chown 7:8 out/f"), 0);
	stream.len = 0;
	add_entry("f", 'f', 0644, NULL);
	add_data(0, "new\n");
	add_entry("l", 'f', 0640, NULL);
	add_end();
	assert_int_equal(unpack((struct tree_receive){.keep = true}, 4096, &seen, &err), 0);
	assert_int_equal(sh("[ $(cat out/f) = new ] && [ $(stat -c %a out/f) = 604 ] && [ $(stat "
			    "-c %a out/l) = 640 ]"),
		0);
	if (geteuid() == 0)
		assert_int_equal(sh("[ $(stat -c %u:%g out/f) = 7:8 ]"), 0);
}

static void entries_are_checked(void **state)
{
	static const char *const bad[] = {"[]", "{}", "{\"path\":\"a\"}",
		"{\"path\":\"a\",\"type\":\"x\"}", "{\"path\":\"a\",\"type\":\"\"}",
		"{\"path\":\"a\",\"type\":\"ff\"}", "{\"type\":\"f\"}",
		"{\"path\":\"a\",\"type\":\"f\",\"mode\":4096}",
		"{\"path\":\"a\",\"type\":\"f\",\"mode\":-1}", "{\"path\":\"a\",\"type\":\"l\"}",
		"{\"path\":\"a\",\"type\":\"l\",\"link\":\"\"}",
		"{\"path\":\"a\",\"type\":\"h\",\"link\":\"\"}",
		"{\"path\":\"a\",\"type\":\"f\",\"uid\":4294967295}",
		"{\"path\":\"a\",\"type\":\"f\",\"size\":-1}", "{\"path\":7,\"type\":\"f\"}",
		"{\"path\""};
	char text[256];
	struct tree_entry e;
	struct err err;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		strcpy(text, bad[i]);
		if (tree_entry_get(text, strlen(bad[i]), &e, &err) != -EPROTO)
			fail_msg("%s", bad[i]);
	}
	strcpy(text, "{\"path\":\"a/b\",\"type\":\"f\",\"new\":1,\"uid\":5}");
	assert_int_equal(tree_entry_get(text, strlen(text), &e, &err), 0);
	assert_string_equal(e.path, "a/b");
	assert_false(e.has_owner); // half of one is none
	assert_false(e.has_mtime);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_tree_comes_out_as_it_went_in),
		T(content_goes_into_a_folder_that_is_there),
		T(parts_of_a_tree),
		T(a_reader_that_leaves_ends_it),
		T(unreadable_files_are_problems_and_the_rest_follows),
		T(paths_that_lead_elsewhere_end_the_stream),
		T(symbolic_links_are_not_followed),
		T(special_files_and_bits_stay_out),
		T(kinds_that_do_not_fit_are_problems),
		T(streams_that_are_cut_leave_nothing_half),
		T(plain_trees),
		T(readable_trees),
		T(amounts_are_bounded),
		T(a_full_disk_is_a_problem_of_the_file),
		T(a_file_may_keep_what_it_was),
		T(entries_are_checked),
	};

	cmocka_set_test_filter(getenv("TEST_FILTER")); // to run one
	return cmocka_run_group_tests(tests, NULL, NULL);
}
