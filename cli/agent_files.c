// SPDX-License-Identifier: Apache-2.0
// Files of the guest, through the agent; see the header. One thread a connection, and one more for
// what is sent: the stream is made by a thread that writes it to a pipe, which is the stdin of the
// agent's process.
#include "cli/agent_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "guest/proto/json.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define ARGS_MAX 12

// --- What the agent's process says -----------------------------------------------------------

// A stream of files that is looked at, not unpacked. The guest is hostile here too:
// tree_entry_get() checks every entry.
struct reader {
	struct frame_parser parser;
	const struct agent_list *to;
	const char *fatal_path; // what the request is about: a problem with it is the answer
	int fatal_errno;
	bool ended;
	unsigned problems;
	int first_errno;
	char first_path[256];
	uint32_t have;
	uint8_t payload[FRAME_PAYLOAD_MAX];
};

static int read_problem(struct reader *r)
{
	char path[PATH_MAX];
	size_t len = MIN((size_t)(r->have - FRAME_PROBLEM_BYTES), sizeof(path) - 1);
	int errno_value = (int)(get_le32(r->payload) & 0xfff);

	memcpy(path, r->payload + FRAME_PROBLEM_BYTES, len);
	path[len] = '\0';
	if (!errno_value)
		errno_value = EIO;
	if (strcmp(path, r->fatal_path) == 0) {
		r->fatal_errno = errno_value;
		return 0;
	}
	if (errno_value != TREE_LEFT_OUT && r->problems++ == 0) {
		r->first_errno = errno_value;
		tree_printable(r->first_path, sizeof(r->first_path), path);
	}
	if (r->to->problem)
		r->to->problem(r->to->ctx, path, errno_value);
	return 0;
}

static bool is_change(const char *text)
{
	static const char *const known[] = {
		"watching", "created", "modified", "attributes", "deleted", "moved", "lost"};

	for (size_t i = 0; i < ARRAY_SIZE(known); i++)
		if (strcmp(known[i], text) == 0)
			return true;
	return false;
}

static int read_change(struct reader *r, struct err *err)
{
	struct agent_change c = {.change = ""};
	struct json_node nodes[16];
	struct err why = {0};
	const struct json_field fields[] = {
		{"change", JSON_STRING, &c.change, 0, 0},
		{"path", JSON_STRING, &c.path, 0, 0},
		{"from", JSON_STRING, &c.from, 0, 0},
		{"folder", JSON_BOOL, &c.folder, 0, 0},
	};

	if (json_parse((char *)r->payload, r->have, nodes, ARRAY_SIZE(nodes)) < 0)
		return err_set(err, -EPROTO, "a change is not valid JSON");
	if (json_decode(nodes, nodes, fields, ARRAY_SIZE(fields), JSON_SKIP_UNKNOWN, &why) < 0)
		return err_set(err, -EPROTO, "a change: %s", why.msg);
	if (!is_change(c.change) || !c.path)
		return err_set(err, -EPROTO, "a change of no known kind");
	return r->to->change(r->to->ctx, &c, err);
}

static int read_frame(struct reader *r, enum frame_type type, struct err *err)
{
	struct tree_entry entry;
	int rc;

	if (r->ended)
		return err_set(err, -EPROTO, "something after the end");
	switch (type) {
	case FRAME_ENTRY:
		rc = tree_entry_get((char *)r->payload, r->have, &entry, err);
		if (rc < 0 || !r->to->entry)
			return rc;
		return r->to->entry(r->to->ctx, &entry, err);
	case FRAME_DATA:
		if (!r->to->data)
			return 0;
		return r->to->data(r->to->ctx, get_le64(r->payload),
			r->payload + FRAME_DATA_HEAD_BYTES, r->have - FRAME_DATA_HEAD_BYTES, err);
	case FRAME_PROBLEM:
		return read_problem(r);
	case FRAME_CHANGE:
		return r->to->change ? read_change(r, err)
				     : err_set(err, -EPROTO, "a change that nobody watches");
	default:
		r->ended = true;
		return 0;
	}
}

static int read_stream(void *ctx, const uint8_t *bytes, size_t len, struct err *err)
{
	struct reader *r = ctx;
	struct frame_piece piece;
	int rc;

	while ((rc = frame_parse(&r->parser, &bytes, &len, &piece)) == 1) {
		memcpy(r->payload + piece.off, piece.data, piece.len);
		r->have = piece.off + piece.len;
		if (!piece.last)
			continue;
		rc = read_frame(r, piece.type, err);
		if (rc < 0)
			return rc;
	}
	return rc < 0 ? err_set(err, rc, "the guest's stream of files is broken") : 0;
}

static int read_finish(const struct reader *r, struct err *err)
{
	if (!r->ended)
		return err_set(err, -EPIPE, "the guest's stream of files was cut");
	if (r->fatal_errno)
		return err_errno(err, -r->fatal_errno, "%s", r->fatal_path);
	if (r->problems == 1)
		return err_set(err, -EIO, "%s: %s", r->first_path, strerror(r->first_errno));
	if (r->problems)
		return err_set(err, -EIO, "%u problems, the first with %s: %s", r->problems,
			r->first_path, strerror(r->first_errno));
	return 0;
}

static struct reader *reader_create(const struct agent_list *to, const char *fatal_path)
{
	struct reader *r = calloc(1, sizeof(*r));

	if (r) {
		r->parser.dir = FRAME_OF_TREE;
		r->to = to;
		r->fatal_path = fatal_path;
	}
	return r;
}

// --- Running it ------------------------------------------------------------------------------

struct call {
	int (*take)(void *ctx, const uint8_t *bytes, size_t len, struct err *err);
	void *ctx;
	char complaint[256]; // what came on stderr: its last words
	size_t complaint_len;
};

static int take_output(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct call *c = ctx;

	if (!is_err)
		return c->take(c->ctx, bytes, len, err);
	for (size_t i = 0; i < len && c->complaint_len < sizeof(c->complaint) - 1; i++) {
		char byte = (char)bytes[i];

		c->complaint[c->complaint_len++] = byte < ' ' || byte == 0x7f ? ' ' : byte;
	}
	return 0;
}

// Returns 0 when it has ended by itself; its stream tells the rest.
static int run(const struct agent_files *files, const char *const *argv, int in_fd,
	int (*take)(void *ctx, const uint8_t *bytes, size_t len, struct err *err), void *ctx,
	struct err *err)
{
	struct call call = {.take = take, .ctx = ctx};
	struct agent_exec x = {
		.argv = argv,
		.user = files->user,
		.in_fd = in_fd,
		.out_fd = -1,
		.err_fd = -1,
		.output = take_output,
		.output_ctx = &call,
		.signal_fd = files->signal_fd,
		.cancel_fd = files->cancel_fd,
		.deadline_ns = files->deadline_ns,
		.idle_ns = files->idle_ns,
		.files = true,
	};
	struct agent_result result;
	int rc = agent_exec(files->conn_fd, &x, &result, err);

	if (rc < 0)
		return rc;
	if (result.signal)
		return err_set(err, -EINTR, "interrupted by signal %u", result.signal);
	if (result.exit_code > 1)
		return err_set(err, -EPIPE, "the agent's process for files ended with %d: %s",
			result.exit_code, call.complaint);
	return 0;
}

// Runs it and takes its answer of one problem or none.
static int run_simple(
	const struct agent_files *files, const char *const *argv, int in_fd, struct err *err)
{
	const struct agent_list none = {0};
	CLEANUP_FREE struct reader *r = reader_create(&none, argv[1]);
	int rc;

	if (!r)
		return err_errno(err, -ENOMEM, "files");
	rc = run(files, argv, in_fd, read_stream, r, err);
	return rc < 0 ? rc : read_finish(r, err);
}

// --- From the guest --------------------------------------------------------------------------

struct get_args {
	char depth[24], content[16], owner[16], follow[16], offset[40], length[40], stamp[16];
	const char *argv[ARGS_MAX];
};

static void get_args(struct get_args *a, const char *path, const struct agent_get *what)
{
	snprintf(a->depth, sizeof(a->depth), "depth=%u", what->depth);
	snprintf(a->content, sizeof(a->content), "content=%d", what->content);
	snprintf(a->owner, sizeof(a->owner), "owner=%d", what->owner);
	snprintf(a->follow, sizeof(a->follow), "follow=%d", what->follow);
	snprintf(a->offset, sizeof(a->offset), "offset=%" PRIu64, what->offset);
	snprintf(a->length, sizeof(a->length), "length=%" PRIu64,
		what->length ? what->length : UINT64_MAX);
	snprintf(a->stamp, sizeof(a->stamp), "stamp=%d", what->stamp);
	memcpy(a->argv,
		(const char *[]){"get", path, a->depth, a->content, a->owner, a->follow, a->offset,
			a->length, a->stamp, NULL},
		10 * sizeof(a->argv[0]));
}

int agent_list(const struct agent_files *files, const char *path, const struct agent_get *what,
	const struct agent_list *to, struct err *err)
{
	CLEANUP_FREE struct reader *r = reader_create(to, path);
	struct get_args args;
	int rc;

	if (!r)
		return err_errno(err, -ENOMEM, "%s", path);
	get_args(&args, path, what);
	rc = run(files, args.argv, -1, read_stream, r, err);
	return rc < 0 ? rc : read_finish(r, err);
}

static int keep_entry(void *ctx, const struct tree_entry *entry, struct err *err)
{
	struct tree_entry *ret = ctx;

	if (ret->type)
		return err_set(err, -EPROTO, "more than one entry");
	*ret = *entry;
	ret->path = ret->link = NULL;
	return 0;
}

int agent_stat(const struct agent_files *files, const char *path, bool follow,
	struct tree_entry *ret, struct err *err)
{
	const struct agent_get what = {.owner = true, .follow = follow};
	struct tree_entry entry = {0};
	const struct agent_list to = {.entry = keep_entry, .ctx = &entry};
	int rc = agent_list(files, path, &what, &to, err);

	if (rc == 0 && !entry.type)
		rc = err_set(err, -EPROTO, "no entry for %s", path);
	if (rc < 0)
		return rc;
	*ret = entry;
	return 0;
}

struct buffer {
	char *bytes;
	size_t len, max;
	uint64_t offset; // of its first byte in the file
	uint64_t size; // of the file
	char type;
};

static int buffer_entry(void *ctx, const struct tree_entry *entry, struct err *err)
{
	struct buffer *b = ctx;

	if (b->type)
		return err_set(err, -EPROTO, "more than one entry");
	b->type = entry->type;
	if (entry->type == 'd')
		return err_set(err, -EISDIR, "it is a folder");
	if (entry->type != 'f')
		return err_set(err, -EINVAL, "it is not a file");
	b->size = entry->size;
	// What lies in holes is zero.
	b->len = entry->size > b->offset ? (size_t)MIN(entry->size - b->offset, (uint64_t)b->max)
					 : 0;
	return 0;
}

static int buffer_data(
	void *ctx, uint64_t offset, const uint8_t *bytes, size_t len, struct err *err)
{
	struct buffer *b = ctx;

	if (b->type != 'f' || offset < b->offset || offset - b->offset > b->max ||
		len > b->max - (offset - b->offset))
		return err_set(err, -EPROTO, "more of the file than was asked for");
	memcpy(b->bytes + (offset - b->offset), bytes, len);
	b->len = MAX(b->len, (size_t)(offset - b->offset) + len);
	return 0;
}

int agent_read(const struct agent_files *files, const char *path, uint64_t offset, size_t max_bytes,
	char **ret, size_t *ret_len, uint64_t *ret_size, struct err *err)
{
	const struct agent_get what = {
		.content = true, .follow = true, .offset = offset, .length = max_bytes};
	CLEANUP_FREE char *bytes = calloc(1, max_bytes + 1);
	struct buffer b = {.bytes = bytes, .max = max_bytes, .offset = offset};
	const struct agent_list to = {.entry = buffer_entry, .data = buffer_data, .ctx = &b};
	int rc;

	if (!bytes)
		return err_errno(err, -ENOMEM, "%s", path);
	rc = max_bytes ? agent_list(files, path, &what, &to, err) : 0;
	if (rc < 0)
		return b.type ? err_wrap(err, rc, "%s", path) : rc;
	bytes[b.len] = '\0';
	*ret = TAKE_PTR(bytes);
	*ret_len = b.len;
	if (ret_size)
		*ret_size = b.size;
	return 0;
}

struct unpacking {
	struct tree_receiver *receiver;
	const struct agent_files *files;
	uint64_t bytes;
};

static int unpack(void *ctx, const uint8_t *bytes, size_t len, struct err *err)
{
	struct unpacking *u = ctx;

	u->bytes += len;
	if (u->files->progress)
		u->files->progress(u->files->ctx, u->bytes);
	return tree_receive(u->receiver, bytes, len, err);
}

static int receive(const struct agent_files *files, const char *const *argv, int in_fd,
	const struct tree_receive *to, struct err *err)
{
	struct unpacking u = {.receiver = tree_receiver_create(to), .files = files};
	int rc;

	if (!u.receiver)
		return err_errno(err, -ENOMEM, "%s", argv[1]);
	rc = run(files, argv, in_fd, unpack, &u, err);
	if (rc == 0)
		rc = tree_receiver_finish(u.receiver, err);
	tree_receiver_destroy(u.receiver);
	return rc;
}

int agent_get(const struct agent_files *files, const char *path, const struct agent_get *what,
	const struct tree_receive *to, struct err *err)
{
	struct get_args args;

	get_args(&args, path, what);
	return receive(files, args.argv, -1, to, err);
}

int agent_fetch(const struct agent_files *files, const char *folder, int fd,
	const struct tree_receive *to, struct err *err)
{
	const char *argv[] = {"fetch", folder, NULL};

	return receive(files, argv, fd, to, err);
}

// --- To the guest ----------------------------------------------------------------------------

struct source {
	const struct agent_files *files;
	uint64_t passed;
	int fd; // our end of the pipe
	struct tree_send how;
	const char *path; // a tree of the disk, or NULL
	uint32_t mode; // else this, a file
	const void *bytes;
	size_t len;
	bool folder; // or this
	int rc;
	struct err err;
};

static int write_pipe(void *ctx, const void *bytes, size_t len, struct err *err)
{
	struct source *s = ctx;
	int rc = fd_write_all(s->fd, bytes, len);

	s->passed += len;
	if (s->files->progress)
		s->files->progress(s->files->ctx, s->passed);
	return rc < 0 ? err_errno(err, rc, "to the guest") : 0;
}

static int write_frame(struct source *s, enum frame_type type, const void *head, size_t head_len,
	const void *bytes, size_t len)
{
	uint8_t header[FRAME_HEADER_BYTES];
	int rc;

	frame_header_put(header, type, (uint32_t)(head_len + len));
	rc = write_pipe(s, header, sizeof(header), &s->err);
	if (rc == 0 && head_len)
		rc = write_pipe(s, head, head_len, &s->err);
	if (rc == 0 && len)
		rc = write_pipe(s, bytes, len, &s->err);
	return rc;
}

static int send_one(struct source *s)
{
	char text[256];
	struct json_out json = {.buf = text, .cap = sizeof(text)};
	uint8_t head[FRAME_DATA_HEAD_BYTES];
	int rc;

	json_open(&json, '{');
	json_key(&json, "path");
	json_str(&json, "");
	json_key(&json, "type");
	json_str(&json, s->folder ? "d" : "f");
	json_key(&json, "mode");
	json_int(&json, s->mode);
	json_key(&json, "size");
	json_int(&json, (int64_t)s->len);
	json_close(&json, '}');
	ASSERT(!json.full);
	rc = write_frame(s, FRAME_ENTRY, NULL, 0, text, json.len);
	for (size_t off = 0; rc == 0 && off < s->len;) {
		size_t n = MIN(s->len - off, (size_t)FRAME_DATA_MAX);

		put_le64(head, off);
		rc = write_frame(
			s, FRAME_DATA, head, sizeof(head), (const uint8_t *)s->bytes + off, n);
		off += n;
	}
	return rc == 0 ? write_frame(s, FRAME_END, NULL, 0, NULL, 0) : rc;
}

static void *send_source(void *arg)
{
	struct source *s = arg;
	sigset_t set;

	// A guest that stops reading is an error, not our end; other signals are the main thread's.
	sigfillset(&set);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	s->rc = s->path ? tree_send(&s->how, s->path, &s->err) : send_one(s);
	fd_close(&s->fd);
	return NULL;
}

static int put(const struct agent_files *files, const struct agent_put *to, struct source *s,
	struct err *err)
{
	char owner[16], parents[16], keep[16], name[NAME_MAX + 8];
	const char *argv[ARGS_MAX] = {"put", to->folder, owner, parents, keep};
	const struct agent_list problems = {.problem = to->problem, .ctx = to->ctx};
	CLEANUP_FREE struct reader *r = reader_create(&problems, to->folder);
	CLEANUP_FD int in_fd = -1;
	pthread_t thread;
	sigset_t old, all;
	int p[2], rc;

	if (!r)
		return err_errno(err, -ENOMEM, "%s", to->folder);
	if (to->name && strlen(to->name) > NAME_MAX)
		return err_errno(err, -ENAMETOOLONG, "%.40s…", to->name);
	snprintf(owner, sizeof(owner), "owner=%d", to->owner);
	snprintf(parents, sizeof(parents), "parents=%d", to->parents);
	snprintf(keep, sizeof(keep), "keep=%d", to->keep);
	if (to->name) {
		snprintf(name, sizeof(name), "name=%s", to->name);
		argv[5] = name;
	}
	if (pipe2(p, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "pipe");
	in_fd = p[0];
	s->fd = p[1];
	s->files = files;
	s->how.write = write_pipe;
	s->how.ctx = s;
	// The thread is born with everything blocked, so that none of our signals gets lost in it.
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	rc = -pthread_create(&thread, NULL, send_source, s);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (rc < 0) {
		fd_close(&s->fd);
		return err_errno(err, rc, "thread");
	}
	rc = run(files, argv, in_fd, read_stream, r, err);
	fd_close(&in_fd); // whatever it still wants to say goes nowhere
	pthread_join(thread, NULL);
	// Our own trouble with the source says more than that the guest missed the rest of it.
	if (s->rc < 0 && s->rc != -EPIPE) {
		if (err)
			*err = s->err;
		return s->rc;
	}
	if (rc < 0)
		return rc;
	if (!s->path && r->problems == 1) // it was about one file alone
		return err_errno(
			err, -r->first_errno, "%s/%s", to->folder, to->name ? to->name : "");
	return read_finish(r, err);
}

int agent_put(const struct agent_files *files, const char *path, const struct agent_put *to,
	unsigned depth, struct err *err)
{
	struct source s = {
		.path = path,
		.how = {.depth = depth,
			.content = true,
			.owner = to->owner,
			.follow = to->follow,
			.skip = to->skip,
			.skip_ctx = to->skip_ctx,
			.length = UINT64_MAX},
	};

	return put(files, to, &s, err);
}

int agent_write(const struct agent_files *files, const struct agent_put *to, uint32_t mode,
	const void *bytes, size_t len, struct err *err)
{
	struct source s = {.mode = mode, .bytes = bytes, .len = len};

	ASSERT(to->name);
	return put(files, to, &s, err);
}

int agent_mkdir(const struct agent_files *files, const char *path, struct err *err)
{
	const struct agent_put to = {.folder = path, .parents = true};
	struct source s = {.mode = 0755, .folder = true};

	return put(files, &to, &s, err);
}

int agent_watch(const struct agent_files *files, const char *path,
	int (*change)(void *ctx, const struct agent_change *change, struct err *err), void *ctx,
	struct err *err)
{
	const char *argv[] = {"watch", path, NULL};
	const struct agent_list to = {.change = change, .ctx = ctx};
	CLEANUP_FREE struct reader *r = reader_create(&to, path);
	int rc;

	if (!r)
		return err_errno(err, -ENOMEM, "%s", path);
	rc = run(files, argv, -1, read_stream, r, err);
	return rc < 0 ? rc : read_finish(r, err);
}

int agent_remove(const struct agent_files *files, const char *path, bool recursive, struct err *err)
{
	const char *argv[] = {"remove", path, recursive ? "recursive=1" : "recursive=0", NULL};

	return run_simple(files, argv, -1, err);
}

int agent_rename(const struct agent_files *files, const char *from, const char *to, bool replace,
	struct err *err)
{
	const char *argv[] = {"rename", from, to, replace ? "replace=1" : "replace=0", NULL};

	return run_simple(files, argv, -1, err);
}

int agent_clear(const struct agent_files *files, const char *folder, int fd, struct err *err)
{
	const char *argv[] = {"clear", folder, NULL};

	return run_simple(files, argv, fd, err);
}
