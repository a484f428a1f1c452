// SPDX-License-Identifier: Apache-2.0
// Files and folders from a stream to a disk; see tree.h. One thread a tree.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest/proto/json.h"
#include "guest/proto/tree.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define TEMP_TRIES 100

// A folder that is open because the stream is in it. What an entry said about it is applied when it
// is left: until then things are made in it.
struct level {
	int fd;
	char *name;
	bool said; // there was an entry
	struct tree_entry entry;
};

struct tree_receiver {
	struct tree_receive how;
	struct frame_parser parser;
	bool ended, failed;
	unsigned problems;
	int first_errno;
	char first_path[256];
	uint64_t blocks; // that the disk has had to give, see TREE_BLOCK_BYTES

	struct level levels[TREE_DEPTH_MAX + 1]; // 0: the folder that we unpack in, or the top
	unsigned depth; // of levels that are open

	// The file at hand.
	int fd; // -1: none; its data is dropped then
	int parent_fd;
	char temp[64], name[NAME_MAX + 1], path[PATH_MAX];
	bool replaces; // a file, whose mode and owner it takes
	struct stat replaced;
	struct tree_entry entry;
	uint64_t end; // of the data so far

	uint32_t have; // bytes of the payload at hand
	uint8_t payload[FRAME_PAYLOAD_MAX];
};

// --- Entries ---------------------------------------------------------------------------------

// Each part of a path is a name, and there are not too many of them.
static bool path_is_safe(const char *path)
{
	unsigned parts = 1;

	if (strlen(path) >= PATH_MAX)
		return false;
	while (*path) {
		size_t len = strcspn(path, "/");

		if (len == 0 || len > NAME_MAX || (len == 1 && path[0] == '.') ||
			(len == 2 && path[0] == '.' && path[1] == '.'))
			return false;
		path += len;
		if (*path == '/' && (*++path == '\0' || ++parts > TREE_DEPTH_MAX))
			return false;
	}
	return true;
}

int tree_entry_get(char *json, size_t len, struct tree_entry *ret, struct err *err)
{
	struct json_node nodes[32];
	struct err why = {0};
	const char *type = "";
	int64_t mode = 0, uid = -1, gid = -1, mtime_ns = INT64_MIN, size = 0, ino = -1,
		ctime_ns = 0;
	struct tree_entry e = {0};
	const struct json_field fields[] = {
		{"path", JSON_STRING, &e.path, 0, 0},
		{"type", JSON_STRING, &type, 0, 0},
		{"mode", JSON_INT, &mode, 0, 07777},
		{"uid", JSON_INT, &uid, 0, UINT32_MAX - 1},
		{"gid", JSON_INT, &gid, 0, UINT32_MAX - 1},
		{"mtime_ns", JSON_INT, &mtime_ns, INT64_MIN + 1, INT64_MAX},
		{"ctime_ns", JSON_INT, &ctime_ns, INT64_MIN, INT64_MAX},
		{"ino", JSON_INT, &ino, 0, INT64_MAX},
		{"size", JSON_INT, &size, 0, INT64_MAX},
		{"link", JSON_STRING, &e.link, 0, 0},
	};

	if (json_parse(json, len, nodes, ARRAY_SIZE(nodes)) < 0)
		return err_set(err, -EPROTO, "an entry is not valid JSON");
	if (json_decode(nodes, nodes, fields, ARRAY_SIZE(fields), JSON_SKIP_UNKNOWN, &why) < 0)
		return err_set(err, -EPROTO, "an entry: %s", why.msg);
	if (strlen(type) != 1 || !strchr("dflhpscb", type[0]))
		return err_set(err, -EPROTO, "an entry of no known type");
	if (!e.path || !path_is_safe(e.path))
		return err_set(err, -EPROTO, "an entry's path leads elsewhere");
	if (type[0] == 'l' || type[0] == 'h') {
		if (!e.link || !e.link[0] || strlen(e.link) >= PATH_MAX)
			return err_set(err, -EPROTO, "a link to nothing");
		if (type[0] == 'h' && !path_is_safe(e.link))
			return err_set(err, -EPROTO, "a hard link leads elsewhere");
	}
	e.type = type[0];
	e.mode = (uint32_t)mode;
	e.has_owner = uid >= 0 && gid >= 0;
	e.uid = (uint32_t)uid;
	e.gid = (uint32_t)gid;
	e.has_mtime = mtime_ns != INT64_MIN;
	e.mtime_ns = mtime_ns;
	e.has_stamp = ino >= 0;
	e.ino = e.has_stamp ? (uint64_t)ino : 0;
	e.ctime_ns = ctime_ns;
	e.size = (uint64_t)size;
	*ret = e;
	return 0;
}

// --- Making ----------------------------------------------------------------------------------

void tree_printable(char *ret, size_t size, const char *path)
{
	size_t n = 0;

	for (; *path && n + 1 < size; path++)
		ret[n++] = (unsigned char)*path < ' ' || *path == 0x7f ? '?' : *path;
	ret[n] = '\0';
}

static void report(struct tree_receiver *r, const char *path, int errno_value)
{
	if (errno_value && errno_value != TREE_LEFT_OUT && r->problems++ == 0) {
		r->first_errno = errno_value;
		tree_printable(r->first_path, sizeof(r->first_path), path);
	}
	if (r->how.done)
		r->how.done(r->how.ctx, path, errno_value);
}

// Owner, mode and time of what is open at fd, or of name in fd if name is not NULL (a link).
// Returns 0 or an errno.
static int apply(struct tree_receiver *r, int fd, const char *name, const struct tree_entry *e)
{
	// Floored, so that the nanoseconds are never negative.
	int64_t ns = e->mtime_ns % 1000000000, s = e->mtime_ns / 1000000000 - (ns < 0);
	struct timespec times[2] = {
		{.tv_nsec = UTIME_OMIT}, {.tv_sec = s, .tv_nsec = ns < 0 ? ns + 1000000000 : ns}};
	int flags = name ? AT_SYMLINK_NOFOLLOW : AT_EMPTY_PATH;
	mode_t mode = e->mode & (r->how.owner && e->has_owner ? 07777U : 01777U);

	if (r->how.readable)
		mode |= e->type == 'd' ? S_IRWXU : S_IRUSR;
	if (r->how.owner && e->has_owner &&
		fchownat(fd, name ? name : "", e->uid, e->gid, flags) < 0)
		return errno;
	if (!name && fchmod(fd, mode) < 0)
		return errno;
	if (e->has_mtime &&
		(name ? utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW) : futimens(fd, times)) < 0)
		return errno;
	return 0;
}

// Leaves the innermost folder.
static void pop(struct tree_receiver *r)
{
	struct level *l = &r->levels[--r->depth];
	int rc;

	if (l->said) {
		rc = apply(r, l->fd, NULL, &l->entry);
		if (rc)
			report(r, l->name, rc);
	}
	if (l->fd != r->how.dir_fd)
		fd_close(&l->fd);
	free(l->name);
	*l = (struct level){.fd = -1};
}

// Enters the folder name, making it if it is not there. Never through a symbolic link. Returns 0 or
// an errno.
static int push(struct tree_receiver *r, const char *name)
{
	struct level *l = &r->levels[r->depth];
	int parent = r->levels[r->depth - 1].fd;

	if (r->depth == ARRAY_SIZE(r->levels))
		return ENAMETOOLONG;
	l->fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (l->fd < 0 && errno == ENOENT && mkdirat(parent, name, 0700) == 0) {
		r->blocks++;
		l->fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		// One that no entry speaks of is as any other new folder.
		if (l->fd >= 0)
			fchmod(l->fd, 0755);
	}
	if (l->fd < 0)
		return errno;
	l->name = strdup(name);
	if (!l->name) {
		fd_close(&l->fd);
		return ENOMEM;
	}
	r->depth++;
	return 0;
}

// Goes to the folder in which path is, and copies the last name. The top's own place is in dir_fd.
// Returns 0 or an errno.
static int go_to(struct tree_receiver *r, const char *path, char ret_name[NAME_MAX + 1])
{
	unsigned base = 1, level = 1;
	const char *parts[TREE_DEPTH_MAX + 2];
	size_t lens[TREE_DEPTH_MAX + 2];
	unsigned n = 0;

	if (r->how.rename) {
		parts[n] = r->how.rename;
		lens[n++] = strlen(r->how.rename);
	}
	while (*path) {
		parts[n] = path;
		lens[n] = strcspn(path, "/");
		path += lens[n++];
		path += *path == '/';
	}
	// Those of a path have been looked at; that of the top is the caller's.
	for (unsigned i = 0; i < n; i++)
		if (lens[i] > NAME_MAX)
			return ENAMETOOLONG;
	if (n == 0) {
		ret_name[0] = '\0'; // dir_fd itself
		n = 1;
	} else {
		memcpy(ret_name, parts[n - 1], lens[n - 1]);
		ret_name[lens[n - 1]] = '\0';
	}
	while (level < r->depth && level - base < n - 1 &&
		strlen(r->levels[level].name) == lens[level - base] &&
		memcmp(r->levels[level].name, parts[level - base], lens[level - base]) == 0)
		level++;
	while (r->depth > level)
		pop(r);
	for (; level - base < n - 1; level++) {
		char name[NAME_MAX + 1];
		int rc;

		memcpy(name, parts[level - base], lens[level - base]);
		name[lens[level - base]] = '\0';
		rc = push(r, name);
		if (rc)
			return rc;
	}
	return 0;
}

// A name that nobody has in the folder, tried by make(), which returns -1 with errno as usual.
static int make_temp(struct tree_receiver *r, int parent,
	int (*make)(int parent, const char *name, const struct tree_entry *e))
{
	static unsigned counter;

	for (int i = 0; i < TEMP_TRIES; i++) {
		int fd;

		snprintf(r->temp, sizeof(r->temp), ".mayfly-%d-%u", (int)getpid(),
			__atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED));
		fd = make(parent, r->temp, &r->entry);
		if (fd >= 0 || errno != EEXIST)
			return fd;
	}
	return -1;
}

static int make_file(int parent, const char *name, const struct tree_entry *e)
{
	(void)e;
	return openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

static int make_symlink(int parent, const char *name, const struct tree_entry *e)
{
	return symlinkat(e->link, parent, name);
}

static int make_fifo(int parent, const char *name, const struct tree_entry *e)
{
	return mkfifoat(parent, name, e->mode & 0777);
}

static int rename_temp(struct tree_receiver *r, int parent, const char *name)
{
	int rc;

	if (renameat(parent, r->temp, parent, name) == 0)
		return 0;
	rc = errno;
	unlinkat(parent, r->temp, 0);
	return rc;
}

// The file at hand is whole, or given up.
static void close_file(struct tree_receiver *r, int errno_value)
{
	if (r->fd < 0)
		return;
	if (!errno_value && ftruncate(r->fd, (off_t)MAX(r->end, r->entry.size)) < 0)
		errno_value = errno;
	if (!errno_value)
		errno_value = apply(r, r->fd, NULL, &r->entry);
	if (!errno_value && r->replaces &&
		(fchown(r->fd, r->replaced.st_uid, r->replaced.st_gid) < 0 ||
			fchmod(r->fd, r->replaced.st_mode & 07777) < 0))
		errno_value = errno;
	fd_close(&r->fd);
	if (errno_value)
		unlinkat(r->parent_fd, r->temp, 0);
	else
		errno_value = rename_temp(r, r->parent_fd, r->name);
	report(r, r->path, errno_value);
}

static int open_file(struct tree_receiver *r, int parent, const char *name)
{
	bool there = name[0] && fstatat(parent, name, &r->replaced, AT_SYMLINK_NOFOLLOW) == 0;

	// Found out now rather than after all of its data.
	if (!name[0] || (there && S_ISDIR(r->replaced.st_mode)))
		return EISDIR;
	r->replaces = there && r->how.keep && S_ISREG(r->replaced.st_mode);
	r->fd = make_temp(r, parent, make_file);
	if (r->fd < 0)
		return errno;
	r->parent_fd = parent;
	snprintf(r->name, sizeof(r->name), "%s", name);
	r->end = 0;
	return 0;
}

static int make_folder(struct tree_receiver *r, const char *name)
{
	struct level *l;
	int rc;

	if (!name[0])
		return 0; // the folder that we unpack in stays as it is
	rc = push(r, name);
	if (rc)
		return rc;
	l = &r->levels[r->depth - 1];
	l->said = true;
	l->entry = r->entry;
	l->entry.path = l->entry.link = NULL; // they are in a buffer that goes
	return 0;
}

static int make_other(struct tree_receiver *r, int parent, const char *name)
{
	int rc = make_temp(r, parent, r->entry.type == 'l' ? make_symlink : make_fifo);

	if (rc < 0)
		return errno;
	rc = apply(r, parent, r->temp, &r->entry);
	if (rc) {
		unlinkat(parent, r->temp, 0);
		return rc;
	}
	return rename_temp(r, parent, name);
}

// Another name of a file that this stream, or somebody before it, has made below the top.
static int make_hard_link(struct tree_receiver *r, int parent, const char *name)
{
	CLEANUP_FD int dir = fcntl(r->levels[0].fd, F_DUPFD_CLOEXEC, 3);
	const char *path = r->entry.link;
	char part[NAME_MAX + 1];
	bool renamed = r->how.rename != NULL;

	for (;;) {
		size_t len = strcspn(path, "/");
		int next;

		if (dir < 0)
			return errno;
		if (renamed) {
			snprintf(part, sizeof(part), "%s", r->how.rename);
		} else {
			memcpy(part, path, len);
			part[len] = '\0';
			if (!path[len])
				break;
			path += len + 1;
		}
		renamed = false;
		next = openat(dir, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (next < 0)
			return errno;
		fd_close(&dir);
		dir = next;
	}
	for (int i = 0; i < TEMP_TRIES; i++) {
		snprintf(r->temp, sizeof(r->temp), ".mayfly-%d-h%d", (int)getpid(), i);
		if (linkat(dir, part, parent, r->temp, 0) == 0) {
			int rc = rename_temp(r, parent, name);

			unlinkat(parent, r->temp, 0); // both were the same file already
			return rc;
		}
		if (errno != EEXIST)
			return errno;
	}
	return EEXIST;
}

static int check_amount(const struct tree_receiver *r, struct err *err)
{
	uint64_t max = r->how.max_bytes;

	if (!max || r->blocks <= max / TREE_BLOCK_BYTES)
		return 0;
	return err_set(err, -EFBIG, "more than the %llu bytes that it may take on the disk",
		(unsigned long long)max);
}

static int on_entry(struct tree_receiver *r, struct err *err)
{
	char name[NAME_MAX + 1];
	int rc, parent;

	close_file(r, 0);
	rc = tree_entry_get((char *)r->payload, r->have, &r->entry, err);
	if (rc < 0)
		return rc;
	snprintf(r->path, sizeof(r->path), "%s", r->entry.path);
	r->blocks += r->entry.type != 'd'; // folders count when they are made
	rc = check_amount(r, err);
	if (rc < 0)
		return rc;
	rc = go_to(r, r->path, name);
	parent = r->levels[r->depth - 1].fd;
	if (rc == 0 && r->how.plain && strchr("lhp", r->entry.type))
		rc = EPERM;
	if (rc == 0) {
		switch (r->entry.type) {
		case 'd':
			rc = make_folder(r, name);
			break;
		case 'f':
			rc = open_file(r, parent, name);
			if (rc == 0)
				return 0; // reported when it is whole
			break;
		case 'l':
		case 'p':
			rc = name[0] ? make_other(r, parent, name) : EEXIST;
			break;
		case 'h':
			rc = name[0] ? make_hard_link(r, parent, name) : EEXIST;
			break;
		default:
			rc = TREE_LEFT_OUT;
		}
	}
	report(r, r->path, rc);
	return check_amount(r, err);
}

// Those that a piece of the file at hand takes beside what it has already.
static uint64_t blocks_of(const struct tree_receiver *r, uint64_t off, size_t len)
{
	uint64_t first = off / TREE_BLOCK_BYTES;
	uint64_t after = (off + len + TREE_BLOCK_BYTES - 1) / TREE_BLOCK_BYTES;
	uint64_t had = (r->end + TREE_BLOCK_BYTES - 1) / TREE_BLOCK_BYTES;

	// What goes back may fall into a hole.
	if (off >= r->end)
		first = MAX(first, had);
	return after > first ? after - first : 0;
}

static int on_data(struct tree_receiver *r, struct err *err)
{
	uint64_t off = get_le64(r->payload);
	size_t len = r->have - FRAME_DATA_HEAD_BYTES, done = 0;
	int rc;

	if (off > (uint64_t)INT64_MAX - FRAME_PAYLOAD_MAX)
		return err_set(err, -EPROTO, "data beyond all files");
	r->blocks += blocks_of(r, off, len);
	rc = check_amount(r, err);
	if (rc < 0)
		return rc;
	while (r->fd >= 0 && done < len) {
		ssize_t n = pwrite(r->fd, r->payload + FRAME_DATA_HEAD_BYTES + done, len - done,
			(off_t)(off + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			close_file(r, errno);
		else
			done += (size_t)n;
	}
	r->end = MAX(r->end, off + len);
	return 0;
}

// The sender could not read something: the file at hand, if it is that.
static void on_problem(struct tree_receiver *r)
{
	char path[PATH_MAX];
	size_t len = MIN((size_t)(r->have - FRAME_PROBLEM_BYTES), sizeof(path) - 1);
	int errno_value = (int)(get_le32(r->payload) & 0xfff);

	memcpy(path, r->payload + FRAME_PROBLEM_BYTES, len);
	path[len] = '\0';
	if (!errno_value)
		errno_value = EIO;
	if (r->fd >= 0 && strcmp(path, r->path) == 0)
		close_file(r, errno_value);
	else
		report(r, path, errno_value);
}

static int on_frame(struct tree_receiver *r, enum frame_type type, struct err *err)
{
	if (r->ended)
		return err_set(err, -EPROTO, "something after the end");
	switch (type) {
	case FRAME_ENTRY:
		return on_entry(r, err);
	case FRAME_DATA:
		return on_data(r, err);
	case FRAME_PROBLEM:
		on_problem(r);
		r->blocks++; // it is told, which takes room as well
		return check_amount(r, err);
	case FRAME_CHANGE:
		return err_set(err, -EPROTO, "a change in a tree");
	default:
		close_file(r, 0);
		while (r->depth > 1)
			pop(r);
		r->ended = true;
		return 0;
	}
}

struct tree_receiver *tree_receiver_create(const struct tree_receive *how)
{
	struct tree_receiver *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->how = *how;
	r->parser.dir = FRAME_OF_TREE;
	r->fd = -1;
	for (size_t i = 0; i < ARRAY_SIZE(r->levels); i++)
		r->levels[i].fd = -1;
	r->levels[0].fd = how->dir_fd;
	r->depth = 1;
	return r;
}

void tree_receiver_destroy(struct tree_receiver *r)
{
	if (!r)
		return;
	if (r->fd >= 0)
		close_file(r, ECANCELED);
	while (r->depth > 1)
		pop(r);
	free(r);
}

int tree_receive(struct tree_receiver *r, const uint8_t *bytes, size_t len, struct err *err)
{
	struct frame_piece piece;
	int rc;

	if (r->failed)
		return err_set(err, -EPROTO, "the stream has failed before");
	while ((rc = frame_parse(&r->parser, &bytes, &len, &piece)) == 1) {
		memcpy(r->payload + piece.off, piece.data, piece.len);
		r->have = piece.off + piece.len;
		if (!piece.last)
			continue;
		rc = on_frame(r, piece.type, err);
		if (rc < 0)
			break;
	}
	if (rc == -EPROTO && err && err->code == 0)
		err_set(err, rc, "the stream of files is broken");
	r->failed = rc < 0;
	return rc;
}

int tree_receiver_finish(struct tree_receiver *r, struct err *err)
{
	if (!r->ended)
		return err_set(err, -EPIPE, "the stream of files was cut");
	if (r->problems == 1)
		return err_set(err, -EIO, "%s: %s", r->first_path, strerror(r->first_errno));
	if (r->problems)
		return err_set(err, -EIO, "%u problems, the first with %s: %s", r->problems,
			r->first_path, strerror(r->first_errno));
	return 0;
}
