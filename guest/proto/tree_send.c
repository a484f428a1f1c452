// SPDX-License-Identifier: Apache-2.0
// Files and folders from a disk to a stream; see tree.h. One thread a tree.
#include <dirent.h>
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

// Names of files that have several and may be met again; what does not fit is sent twice.
#define LINKS_MAX 65536

struct seen {
	dev_t dev;
	ino_t ino;
	char *path;
};

struct sender {
	const struct tree_send *how;
	char path[PATH_MAX]; // from the top
	size_t path_len;
	struct seen *seen;
	size_t nseen;
	bool named; // single files: each is whole
	uint8_t frame[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX];
};

static int emit(struct sender *s, enum frame_type type, size_t len, struct err *err)
{
	frame_header_put(s->frame, type, (uint32_t)len);
	return s->how->write(s->how->ctx, s->frame, FRAME_HEADER_BYTES + len, err);
}

static int emit_problem(struct sender *s, int errno_value, struct err *err)
{
	uint8_t *payload = s->frame + FRAME_HEADER_BYTES;

	put_le32(payload, (uint32_t)errno_value);
	memcpy(payload + FRAME_PROBLEM_BYTES, s->path, s->path_len);
	return emit(s, FRAME_PROBLEM, FRAME_PROBLEM_BYTES + s->path_len, err);
}

static char type_of(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFDIR:
		return 'd';
	case S_IFREG:
		return 'f';
	case S_IFLNK:
		return 'l';
	case S_IFIFO:
		return 'p';
	case S_IFSOCK:
		return 's';
	case S_IFCHR:
		return 'c';
	default:
		return 'b';
	}
}

static int emit_entry(
	struct sender *s, const struct stat *st, char type, const char *link, struct err *err)
{
	struct json_out json = {
		.buf = (char *)s->frame + FRAME_HEADER_BYTES, .cap = FRAME_ENTRY_MAX};

	json_open(&json, '{');
	json_key(&json, "path");
	json_str(&json, s->path);
	json_key(&json, "type");
	json_str(&json, (const char[]){type, '\0'});
	json_key(&json, "mode");
	json_int(&json, st->st_mode & 07777);
	if (s->how->owner) {
		json_key(&json, "uid");
		json_int(&json, st->st_uid);
		json_key(&json, "gid");
		json_int(&json, st->st_gid);
	}
	json_key(&json, "mtime_ns");
	json_int(&json, (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec);
	if (s->how->stamp) {
		json_key(&json, "ctime_ns");
		json_int(&json, (int64_t)st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec);
		json_key(&json, "ino");
		json_int(&json, (int64_t)(st->st_ino & INT64_MAX));
	}
	if (type == 'f') {
		json_key(&json, "size");
		json_int(&json, st->st_size);
	}
	if (link) {
		json_key(&json, "link");
		json_str(&json, link);
	}
	json_close(&json, '}');
	if (json.full) // control characters take six bytes each
		return emit_problem(s, ENAMETOOLONG, err);
	return emit(s, FRAME_ENTRY, json.len, err);
}

// The path under which this very file has been sent before, or NULL, and then it is remembered.
static const char *seen_before(struct sender *s, const struct stat *st)
{
	struct seen *bigger;

	for (size_t i = 0; i < s->nseen; i++)
		if (s->seen[i].dev == st->st_dev && s->seen[i].ino == st->st_ino)
			return s->seen[i].path;
	if (s->nseen == LINKS_MAX)
		return NULL;
	if ((s->nseen & (s->nseen - 1)) == 0) { // full at each power of two
		bigger = realloc(s->seen, sizeof(*bigger) * MAX(s->nseen * 2, (size_t)1));
		if (!bigger)
			return NULL;
		s->seen = bigger;
	}
	s->seen[s->nseen].path = strdup(s->path);
	if (!s->seen[s->nseen].path)
		return NULL;
	s->seen[s->nseen].dev = st->st_dev;
	s->seen[s->nseen].ino = st->st_ino;
	s->nseen++;
	return NULL;
}

// Sends [off, end) of the file. Returns 1 if that was the last of it: it has ended before, or
// cannot be read to there.
static int send_range(struct sender *s, int fd, uint64_t off, uint64_t end, struct err *err)
{
	uint8_t *payload = s->frame + FRAME_HEADER_BYTES;

	while (off < end) {
		size_t want = (size_t)MIN(end - off, (uint64_t)FRAME_DATA_MAX);
		ssize_t n = pread(fd, payload + FRAME_DATA_HEAD_BYTES, want, (off_t)off);
		int rc;

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			rc = emit_problem(s, errno, err);
			return rc < 0 ? rc : 1;
		}
		if (n == 0)
			return 1;
		put_le64(payload, off);
		rc = emit(s, FRAME_DATA, FRAME_DATA_HEAD_BYTES + (size_t)n, err);
		if (rc < 0)
			return rc;
		off += (uint64_t)n;
	}
	return 0;
}

static int send_content(struct sender *s, int fd, const struct stat *st, struct err *err)
{
	uint64_t size = (uint64_t)st->st_size, off = 0, end = size;

	// Files of the kernel say 0 and have something to say all the same.
	if (size == 0)
		end = UINT64_MAX;
	if (s->path_len == 0) {
		off = s->how->offset;
		if (s->how->length < end - MIN(off, end))
			end = off + s->how->length;
	}
	while (off < end) {
		off_t data = size ? lseek(fd, (off_t)off, SEEK_DATA) : -1, hole = -1;
		int rc;

		if (data < 0 && size && errno == ENXIO)
			return 0; // a hole to the end
		if (data >= 0)
			hole = lseek(fd, data, SEEK_HOLE);
		if (data < 0 || hole <= data) { // a file system without holes
			data = (off_t)off;
			hole = (off_t)MIN(end, (uint64_t)INT64_MAX);
		}
		if ((uint64_t)data >= end)
			return 0;
		rc = send_range(s, fd, (uint64_t)data, MIN((uint64_t)hole, end), err);
		if (rc != 0)
			return rc < 0 ? rc : 0;
		off = (uint64_t)hole;
	}
	return 0;
}

static int send_at(struct sender *s, int dir_fd, const char *name, unsigned depth, bool follow,
	struct err *err);

static int send_folder(struct sender *s, int fd, unsigned depth, struct err *err)
{
	DIR *dir = fdopendir(fd);
	size_t len = s->path_len;
	int rc = 0;

	if (!dir) {
		rc = emit_problem(s, errno, err);
		fd_close(&fd);
		return rc;
	}
	for (;;) {
		struct dirent *entry;
		size_t name_len;

		errno = 0;
		entry = readdir(dir);
		if (!entry) {
			if (errno)
				rc = emit_problem(s, errno, err);
			break;
		}
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		name_len = strlen(entry->d_name);
		if (len + 1 + name_len >= sizeof(s->path)) {
			rc = emit_problem(s, ENAMETOOLONG, err);
		} else {
			if (len)
				s->path[s->path_len++] = '/';
			memcpy(s->path + s->path_len, entry->d_name, name_len + 1);
			s->path_len += name_len;
			rc = send_at(s, dirfd(dir), entry->d_name, depth, false, err);
			s->path_len = len;
			s->path[len] = '\0';
		}
		if (rc < 0)
			break;
	}
	closedir(dir);
	return rc;
}

// Sends what name in dir_fd is, at s->path.
static int send_at(struct sender *s, int dir_fd, const char *name, unsigned depth, bool follow,
	struct err *err)
{
	char target[PATH_MAX];
	CLEANUP_FD int fd = -1;
	struct stat st;
	const char *other;
	ssize_t n;
	int rc;

	if (fstatat(dir_fd, name, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0)
		return s->path_len ? emit_problem(s, errno, err) : -errno;
	if (s->how->skip && s->path_len &&
		s->how->skip(s->how->skip_ctx, s->path, type_of(st.st_mode)))
		return 0;
	switch (st.st_mode & S_IFMT) {
	case S_IFLNK:
		n = readlinkat(dir_fd, name, target, sizeof(target) - 1);
		if (n < 0)
			return emit_problem(s, errno, err);
		target[n] = '\0';
		return emit_entry(s, &st, 'l', target, err);
	case S_IFREG:
	case S_IFDIR:
		break;
	default:
		return emit_entry(s, &st, type_of(st.st_mode), NULL, err);
	}
	if (S_ISDIR(st.st_mode) ? depth == 0 : !s->how->content)
		return emit_entry(s, &st, type_of(st.st_mode), NULL, err);
	if (S_ISREG(st.st_mode) && st.st_nlink > 1 && !s->named) {
		other = seen_before(s, &st);
		if (other)
			return emit_entry(s, &st, 'h', other, err);
	}
	fd = openat(dir_fd, name,
		O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (follow ? 0 : O_NOFOLLOW));
	// What it was a moment ago need not be what it is now.
	if (fd < 0 || fstat(fd, &st) < 0)
		return s->path_len ? emit_problem(s, errno, err) : -errno;
	if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
		return emit_problem(s, ESTALE, err);
	rc = emit_entry(s, &st, type_of(st.st_mode), NULL, err);
	if (rc < 0)
		return rc;
	if (S_ISREG(st.st_mode))
		return s->how->content ? send_content(s, fd, &st, err) : 0;
	if (depth == 0)
		return 0;
	return send_folder(s, TAKE_FD(fd), depth - 1, err);
}

int tree_send(const struct tree_send *how, const char *path, struct err *err)
{
	CLEANUP_FREE struct sender *s = calloc(1, sizeof(*s));
	int rc;

	if (!s)
		return err_errno(err, -ENOMEM, "%s", path);
	if (err)
		err->code = 0;
	s->how = how;
	rc = send_at(
		s, AT_FDCWD, path, MIN(how->depth, (unsigned)TREE_DEPTH_MAX), how->follow, err);
	if (rc == 0)
		rc = emit(s, FRAME_END, 0, err);
	else if (!err || err->code == 0)
		rc = err_errno(err, rc, "%s", path);
	for (size_t i = 0; i < s->nseen; i++)
		free(s->seen[i].path);
	free(s->seen);
	return rc;
}

int tree_send_named(const struct tree_send *how, const char *top, const char *(*next)(void *ctx),
	void *next_ctx, struct err *err)
{
	CLEANUP_FREE struct sender *s = calloc(1, sizeof(*s));
	CLEANUP_FD int top_fd = open(top, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const char *path;
	int rc = 0;

	if (!s || top_fd < 0)
		return err_errno(err, s ? -errno : -ENOMEM, "%s", top);
	s->how = how;
	s->named = true;
	while (rc == 0 && (path = next(next_ctx))) {
		s->path_len = MIN(strlen(path), sizeof(s->path) - 1);
		memcpy(s->path, path, s->path_len);
		s->path[s->path_len] = '\0';
		// The top itself has no name that a file could have.
		rc = s->path_len ? send_at(s, top_fd, s->path, 0, false, err) : 0;
	}
	return rc == 0 ? emit(s, FRAME_END, 0, err) : rc;
}
