// SPDX-License-Identifier: Apache-2.0
// Points and contents on the disk; see the header. One thread.
#include "work/history.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "vmm/base/buf.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "work/scan.h"

#define MAGIC        "MAYFLYP1"
#define MAGIC_BYTES  8U
#define HEAD_BYTES   (MAGIC_BYTES + 16U) // time, deltas, bytes of by
#define OBJECTS      "objects"
#define NOW          "now"
#define SEEN         "seen"
#define OBJECT_NEW   "new"
#define NAME_BYTES   (2 * WORK_HASH_BYTES + 1)
#define OBJECTS_MAX  (WORK_HISTORY_BYTES_MAX / 2) // that one point may bring
#define POINT_DIGITS 8U
#define SAVE_WAIT_NS 2000000000ULL
#define SAVE_TRY_NS  20000000L

enum { DELTA_OLD = 1, DELTA_NEW = 2 };

// --- A point ---------------------------------------------------------------------------------

void work_point_fini(struct work_point *p)
{
	free(p->deltas);
	free(p->data);
	*p = (struct work_point){0};
}

const char *work_delta_path(const struct work_delta *d)
{
	return d->old.type ? d->old.path : d->new.path;
}

static int parse_delta(const uint8_t **data, size_t *len, struct work_delta *ret, const char *after,
	struct err *err)
{
	struct work_delta d = {0};
	uint8_t flags = 0;
	int r = 0;

	if (*len) {
		flags = *(*data)++;
		--*len;
	}
	if (!flags || flags > (DELTA_OLD | DELTA_NEW))
		return err_set(err, -EBADMSG, "cut");
	if (flags & DELTA_OLD)
		r = work_entry_take(data, len, &d.old, err);
	if (r == 0 && flags & DELTA_NEW)
		r = work_entry_take(data, len, &d.new, err);
	if (r == 0 && flags == (DELTA_OLD | DELTA_NEW) && strcmp(d.old.path, d.new.path) != 0)
		r = err_set(err, -EBADMSG, "two paths");
	if (r == 0 && strcmp(work_delta_path(&d), after) <= 0)
		r = err_set(err, -EBADMSG, "not in order");
	*ret = d;
	return r;
}

int work_point_parse(const uint8_t *data, size_t len, struct work_point *ret, struct err *err)
{
	struct work_point p = {0};
	const char *after = "";
	uint32_t nr, by_bytes;
	int r = 0;

	if (len < HEAD_BYTES || memcmp(data, MAGIC, MAGIC_BYTES) != 0)
		return err_set(err, -EBADMSG, "point: of another kind");
	p.time_ns = (int64_t)get_le64(data + MAGIC_BYTES);
	nr = get_le32(data + MAGIC_BYTES + 8);
	by_bytes = get_le32(data + MAGIC_BYTES + 12);
	data += HEAD_BYTES;
	len -= HEAD_BYTES;
	p.by = (const char *)data;
	if (by_bytes == 0 || by_bytes > WORK_HISTORY_BY_MAX || by_bytes > len ||
		strnlen(p.by, by_bytes) != by_bytes - 1 || nr > (len - by_bytes) / 2)
		return err_set(err, -EBADMSG, "point: cut");
	data += by_bytes;
	len -= by_bytes;
	for (uint32_t i = 0; i < nr && r == 0; i++) {
		if ((i & (i - 1)) == 0) { // full at each power of two: the number is only a claim
			struct work_delta *more = reallocarray(
				p.deltas, i ? 2 * (size_t)i : 1, sizeof(*more));

			if (!more) {
				r = err_errno(err, -ENOMEM, "point");
				break;
			}
			p.deltas = more;
		}
		r = parse_delta(&data, &len, &p.deltas[i], after, err);
		if (r == 0)
			after = work_delta_path(&p.deltas[p.nr_deltas++]);
	}
	if (r == 0 && len)
		r = err_set(err, -EBADMSG, "something behind its end");
	if (r < 0) {
		work_point_fini(&p);
		if (err && r != -ENOMEM)
			err->code = -EBADMSG;
		return err_wrap(err, r == -ENOMEM ? r : -EBADMSG, "point");
	}
	*ret = p;
	return 0;
}

static void name_of(uint32_t nr, char ret[POINT_DIGITS + 3])
{
	snprintf(ret, POINT_DIGITS + 3, "%08u", nr);
}

static int write_point(const struct work_history *h, const struct work_point *p, struct err *err)
{
	CLEANUP_BUF struct buf out = {0};
	le64_t time = le64_of((uint64_t)p->time_ns);
	char name[POINT_DIGITS + 3];

	buf_append(&out, MAGIC, MAGIC_BYTES);
	buf_append(&out, &time, sizeof(time));
	buf_append_le32(&out, (uint32_t)p->nr_deltas);
	buf_append_le32(&out, (uint32_t)strlen(p->by) + 1);
	buf_append(&out, p->by, strlen(p->by) + 1);
	for (size_t i = 0; i < p->nr_deltas; i++) {
		const struct work_delta *d = &p->deltas[i];
		uint8_t flags = (uint8_t)((d->old.type ? DELTA_OLD : 0) |
					  (d->new.type ? DELTA_NEW : 0));

		if (out.len > WORK_JOURNAL_MAX)
			break;
		buf_append(&out, &flags, 1);
		if (d->old.type)
			work_entry_append(&out, &d->old);
		if (d->new.type)
			work_entry_append(&out, &d->new);
	}
	if (out.len > WORK_JOURNAL_MAX - WORK_HASH_BYTES)
		return err_set(err, -E2BIG, "too many changes for a point");
	name_of(p->nr, name);
	return work_file_write(h->dir_fd, name, &out, err);
}

int work_history_read(
	const struct work_history *h, uint32_t nr, struct work_point *ret, struct err *err)
{
	char name[POINT_DIGITS + 3];
	uint8_t *data = NULL;
	size_t len = 0;
	int r;

	name_of(nr, name);
	r = work_file_read(h->dir_fd, name, WORK_JOURNAL_MAX, &data, &len, err);
	if (r == 0)
		r = work_point_parse(data, len, ret, err);
	if (r < 0) {
		free(data);
		return r;
	}
	ret->nr = nr;
	ret->data = data;
	for (size_t i = 0; i < ret->nr_deltas; i++)
		ret->deltas[i].point = nr;
	return 0;
}

// --- Opening ---------------------------------------------------------------------------------

static int lock_file(int dir_fd, const char *name, int how)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);

	if (fd < 0)
		return -errno;
	while (flock(fd, how) < 0)
		if (errno != EINTR)
			return errno == EWOULDBLOCK ? -EAGAIN : -errno;
	return TAKE_FD(fd);
}

static int open_dir(int state_fd)
{
	int fd = openat(state_fd, WORK_HISTORY, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

int work_history_wait(int state_fd)
{
	CLEANUP_FD int dir_fd = open_dir(state_fd);

	return dir_fd < 0 ? dir_fd : lock_file(dir_fd, "wait", LOCK_EX | LOCK_NB);
}

int work_history_settle(int state_fd)
{
	CLEANUP_FD int dir_fd = open_dir(state_fd);
	// Whoever waits comes first, too.
	CLEANUP_FD int wait_fd = dir_fd < 0 ? dir_fd : lock_file(dir_fd, "wait", LOCK_EX);

	return wait_fd < 0 ? wait_fd : lock_file(dir_fd, "lock", LOCK_EX);
}

static uint32_t number_of(const char *name)
{
	return strlen(name) == POINT_DIGITS && strspn(name, "0123456789") == POINT_DIGITS
		       ? (uint32_t)strtoul(name, NULL, 10)
		       : 0;
}

static DIR *open_list(int dir_fd)
{
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	if (!dir)
		fd_close(&fd);
	return dir;
}

struct seen {
	le64_t seq; // of the audit log
	le64_t last; // number of a point
};

static void read_seen(const struct work_history *h, struct seen *ret)
{
	CLEANUP_FD int fd = openat(h->dir_fd, SEEN, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

	*ret = (struct seen){0};
	if (fd >= 0)
		(void)fd_read_full(fd, ret, sizeof(*ret));
}

static int write_seen(const struct work_history *h, uint64_t seq)
{
	CLEANUP_FD int fd = openat(
		h->dir_fd, SEEN, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	const struct seen seen = {.seq = le64_of(seq), .last = le64_of(h->last)};

	return fd < 0 ? -errno : fd_write_all(fd, &seen, sizeof(seen));
}

// A number that a point once had is never another's.
static int find_points(struct work_history *h)
{
	DIR *dir = open_list(h->dir_fd);
	const struct dirent *d;
	struct seen seen;

	if (!dir)
		return -errno;
	read_seen(h, &seen);
	h->first = UINT32_MAX;
	h->last = (uint32_t)le64_get(seen.last);
	while ((d = readdir(dir))) {
		uint32_t nr = number_of(d->d_name);

		if (nr == 0)
			continue;
		h->first = MIN(h->first, nr);
		h->last = MAX(h->last, nr);
	}
	closedir(dir);
	if (h->first == UINT32_MAX)
		h->first = h->last + 1;
	return 0;
}

// how: of flock(). -EAGAIN with LOCK_NB.
static int open_history(
	struct work_history *ret, int state_fd, int wait_fd, int how, struct err *err)
{
	struct work_history h = WORK_HISTORY_NONE;
	struct stat st;
	int r = h.dir_fd = open_dir(state_fd);

	if (r >= 0)
		r = h.lock_fd = lock_file(h.dir_fd, "lock", how);
	fd_close(&wait_fd);
	// The machine may have gone meanwhile.
	if (r >= 0 && (fstat(h.dir_fd, &st) < 0 || st.st_nlink == 0))
		r = -ENOENT;
	if (r >= 0 && mkdirat(h.dir_fd, OBJECTS, 0700) < 0 && errno != EEXIST)
		r = -errno;
	if (r >= 0) {
		h.objects_fd = openat(
			h.dir_fd, OBJECTS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		r = h.objects_fd < 0 ? -errno : find_points(&h);
	}
	if (r < 0) {
		work_history_close(&h);
		return err_errno(err, r, WORK_HISTORY);
	}
	*ret = h;
	return 0;
}

int work_history_open(struct work_history *ret, int state_fd, int wait_fd, struct err *err)
{
	return open_history(ret, state_fd, wait_fd, LOCK_EX, err);
}

void work_history_close(struct work_history *h)
{
	fd_close(&h->objects_fd);
	fd_close(&h->dir_fd);
	fd_close(&h->lock_fd);
}

int work_history_now(const struct work_history *h, const struct work_manifest *base,
	const struct work_manifest *before, struct work_manifest *ret, struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest m = {.taken_ns = before->taken_ns};
	int r = work_manifest_read(h->dir_fd, NOW, ret, err);

	if (r != -ENOENT)
		return r;
	r = 0;
	for (size_t i = 0; i < before->nr && r == 0; i++) {
		struct work_entry e = before->entries[i];
		const struct work_entry *sent = work_manifest_find(base, e.path);

		// It has the time and size of what was sent: nobody has changed it before the
		// machine was handed over. If it lies, it gets back what was sent.
		if (!e.hashed && e.type == 'f' && sent && sent->hashed && sent->size == e.size &&
			sent->mtime_ns == e.mtime_ns) {
			e.hashed = true;
			memcpy(e.hash, sent->hash, sizeof(e.hash));
		}
		r = work_manifest_add(&m, &e, err);
	}
	if (r == 0)
		r = work_manifest_finish(&m, err);
	if (r < 0)
		return r;
	*ret = m;
	m = (struct work_manifest){0};
	return 0;
}

// --- Contents --------------------------------------------------------------------------------

static void object_name(const uint8_t hash[WORK_HASH_BYTES], char ret[NAME_BYTES])
{
	for (size_t i = 0; i < WORK_HASH_BYTES; i++)
		snprintf(ret + 2 * i, 3, "%02x", hash[i]);
}

static bool has_object(const struct work_history *h, const struct work_entry *e)
{
	char name[NAME_BYTES];
	struct stat st;

	if (!e->hashed)
		return false;
	object_name(e->hash, name);
	return fstatat(h->objects_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
	       (uint64_t)st.st_size == e->size;
}

// Whether the file of that name is e's content.
static bool is_content(int dir_fd, const char *name, const struct work_entry *e)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	uint8_t hash[WORK_HASH_BYTES];
	struct stat st;

	return fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
	       (uint64_t)st.st_size == e->size && work_hash_fd(fd, hash) == 0 &&
	       !memcmp(hash, e->hash, sizeof(hash));
}

// What has come out of the guest becomes an object; it has been hashed where it is.
static int keep_new(
	const struct work_history *h, const struct work_take *t, const struct work_entry *e)
{
	const char *name;
	CLEANUP_FD int parent_fd = work_open_parent(t->stage->tree_fd, e->path, &name);
	char object[NAME_BYTES];

	object_name(e->hash, object);
	return parent_fd < 0                                          ? parent_fd
	       : renameat(parent_fd, name, h->objects_fd, object) < 0 ? -errno
								      : 0;
}

// What the guest has no more, the host's folder has if nobody has changed it there since it was
// sent.
static int keep_old(const struct work_history *h, int host_fd, const struct work_entry *e)
{
	const char *name;
	CLEANUP_FD int parent_fd = work_open_parent(host_fd, e->path, &name);
	char object[NAME_BYTES];
	struct stat st;
	int r;

	if (parent_fd < 0 || fstatat(parent_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
		!S_ISREG(st.st_mode) || (uint64_t)st.st_size != e->size)
		return 0;
	unlinkat(h->objects_fd, OBJECT_NEW, 0);
	r = work_copy(parent_fd, name, h->objects_fd, OBJECT_NEW, 0600);
	object_name(e->hash, object);
	// Without it there is less to take back, and no more.
	if (r == 0 && is_content(h->objects_fd, OBJECT_NEW, e) &&
		renameat(h->objects_fd, OBJECT_NEW, h->objects_fd, object) < 0)
		r = -errno;
	unlinkat(h->objects_fd, OBJECT_NEW, 0);
	return r == -ENOSPC || r == -EDQUOT ? r : 0;
}

static int keep_contents(const struct work_history *h, const struct work_take *t,
	const struct work_point *p, struct err *err)
{
	uint64_t left = OBJECTS_MAX;

	for (size_t i = 0; i < p->nr_deltas; i++) {
		const struct work_entry *both[] = {&p->deltas[i].old, &p->deltas[i].new};

		for (size_t k = 0; k < ARRAY_SIZE(both); k++) {
			const struct work_entry *e = both[k];
			int r;

			if (e->type != 'f' || !e->hashed || e->size > left || has_object(h, e))
				continue;
			r = k == 0 ? keep_old(h, t->host_fd, e) : keep_new(h, t, e);
			if (r < 0)
				return err_errno(err, r, WORK_HISTORY "/" OBJECTS);
			left -= e->size;
		}
	}
	// On the disk before the point that names them; those of before, too, which somebody who
	// was killed may have left.
	return syncfs(h->objects_fd) < 0 ? err_errno(err, -errno, WORK_HISTORY "/" OBJECTS) : 0;
}

void work_history_save(int state_fd, int host_fd, const struct work_plan *plan)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	const struct timespec pause = {.tv_nsec = SAVE_TRY_NS};
	const uint64_t until_ns = now_ns() + SAVE_WAIT_NS;
	uint64_t left = OBJECTS_MAX;
	int r;

	// A guest may keep whoever takes a point, who has the lock, for minutes; flock() has no
	// time of its own.
	while ((r = open_history(&h, state_fd, -1, LOCK_EX | LOCK_NB, NULL)) == -EAGAIN &&
		now_ns() < until_ns)
		nanosleep(&pause, NULL);
	if (r < 0)
		return;
	for (size_t i = 0; i < plan->nr; i++) {
		const struct work_entry *e = plan->changes[i].host;

		if (!e || e->type != 'f' || !e->hashed || e->size > left || has_object(&h, e))
			continue;
		(void)keep_old(&h, host_fd, e);
		left -= e->size;
	}
}

// --- Making room -----------------------------------------------------------------------------

static int by_hash(const void *a, const void *b)
{
	return memcmp(a, b, WORK_HASH_BYTES);
}

static void note_hash(struct buf *used, const struct work_entry *e)
{
	if (e->type == 'f' && e->hashed)
		buf_append(used, e->hash, sizeof(e->hash));
}

// Of points and objects together.
static int count_bytes(const struct work_history *h, uint64_t *ret)
{
	const int fds[] = {h->dir_fd, h->objects_fd};
	uint64_t bytes = 0;

	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		DIR *dir = open_list(fds[i]);
		const struct dirent *d;
		struct stat st;

		if (!dir)
			return -errno;
		while ((d = readdir(dir)))
			if (fstatat(fds[i], d->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
				S_ISREG(st.st_mode))
				bytes += (uint64_t)st.st_size;
		closedir(dir);
	}
	*ret = bytes;
	return 0;
}

static uint32_t count_points(const struct work_history *h)
{
	return h->first <= h->last ? h->last - h->first + 1 : 0;
}

static int drop_oldest(struct work_history *h, uint32_t nr, struct err *err)
{
	char name[POINT_DIGITS + 3];

	for (; nr; nr--) {
		name_of(h->first, name);
		if (unlinkat(h->dir_fd, name, 0) < 0 && errno != ENOENT)
			return err_errno(err, -errno, WORK_HISTORY "/%s", name);
		h->first++;
	}
	return 0;
}

// Removes the objects that no point and, if now is not NULL, not the tree of now speaks of.
// A point that cannot be read ends the way back: it goes, with those before it.
static int sweep(struct work_history *h, const struct work_manifest *now, struct err *err)
{
	CLEANUP_BUF struct buf used = {0};
	const struct dirent *d;
	DIR *dir;
	int r = 0;

	for (uint32_t nr = h->first; nr <= h->last && r == 0; nr++) {
		CLEANUP(work_point_fini) struct work_point p = {0};

		r = work_history_read(h, nr, &p, err);
		if (r == -EBADMSG || r == -ENOENT) {
			r = drop_oldest(h, nr - h->first + 1, err);
			used.len = 0;
		}
		for (size_t i = 0; r == 0 && i < p.nr_deltas; i++) {
			note_hash(&used, &p.deltas[i].old);
			note_hash(&used, &p.deltas[i].new);
		}
	}
	for (size_t i = 0; now && i < now->nr; i++)
		note_hash(&used, &now->entries[i]);
	if (r < 0 || buf_error(&used) < 0)
		return r < 0 ? r : err_errno(err, -ENOMEM, WORK_HISTORY);
	if (used.len)
		qsort(used.data, used.len / WORK_HASH_BYTES, WORK_HASH_BYTES, by_hash);
	dir = open_list(h->objects_fd);
	if (!dir)
		return err_errno(err, -errno, WORK_HISTORY "/" OBJECTS);
	while ((d = readdir(dir))) {
		uint8_t hash[WORK_HASH_BYTES] = {0};

		if (strlen(d->d_name) != NAME_BYTES - 1)
			continue;
		for (size_t i = 0; i < sizeof(hash); i++) {
			unsigned int byte = 0;

			sscanf(d->d_name + 2 * i, "%2x", &byte);
			hash[i] = (uint8_t)byte;
		}
		if (!used.len || !bsearch(hash, used.data, used.len / WORK_HASH_BYTES,
					 WORK_HASH_BYTES, by_hash))
			unlinkat(h->objects_fd, d->d_name, 0);
	}
	closedir(dir);
	return 0;
}

static int sweep_and_count(struct work_history *h, const struct work_manifest *now,
	uint64_t *ret_bytes, struct err *err)
{
	int r = sweep(h, now, err);

	if (r < 0)
		return r;
	r = count_bytes(h, ret_bytes);
	return r < 0 ? err_errno(err, r, WORK_HISTORY) : 0;
}

static int make_room(struct work_history *h, const struct work_manifest *now, struct err *err)
{
	uint32_t nr = count_points(h);
	uint32_t go = nr > WORK_HISTORY_POINTS_MAX ? nr - WORK_HISTORY_POINTS_MAX : 0;
	uint64_t bytes = 0;
	int r = count_bytes(h, &bytes);

	if (r < 0)
		return err_errno(err, r, WORK_HISTORY);
	if (!go && bytes <= WORK_HISTORY_BYTES_MAX)
		return 0;
	for (;; go = (nr + 7) / 8) {
		r = drop_oldest(h, go, err);
		if (r == 0)
			r = sweep_and_count(h, now, &bytes, err);
		// What no point speaks of goes before the next point does.
		if (r == 0 && bytes > WORK_HISTORY_BYTES_MAX)
			r = sweep_and_count(h, NULL, &bytes, err);
		nr = count_points(h);
		if (r < 0 || bytes <= WORK_HISTORY_BYTES_MAX || !nr)
			return r;
	}
}

// --- Taking a point --------------------------------------------------------------------------

// NULL is nothing. What has been touched and is not known has changed.
static bool same(const struct work_entry *a, const struct work_entry *b)
{
	if (work_entry_untouched(a, b))
		return true;
	if (a && b && a->type == 'f' && b->type == 'f' && !(a->hashed && b->hashed))
		return false;
	return work_entry_same(a, b);
}

// Whether b, a file, still holds what a does.
static bool same_content(const struct work_entry *a, const struct work_entry *b)
{
	return b && b->type == 'f' && a->hashed && b->hashed && a->size == b->size &&
	       !memcmp(a->hash, b->hash, sizeof(a->hash));
}

static int find_deltas(const struct work_take *t, struct work_point *p, struct err *err)
{
	size_t n = 0, g = 0, cap = 0;

	while (n < t->now->nr || g < t->guest->nr) {
		int order = n == t->now->nr ? 1
			    : g == t->guest->nr
				    ? -1
				    : strcmp(t->now->entries[n].path, t->guest->entries[g].path);
		const struct work_entry *old = order <= 0 ? &t->now->entries[n++] : NULL;
		struct work_entry *new = order >= 0 ? &t->guest->entries[g++] : NULL;
		const char *path;

		ASSERT(old || new);
		path = (old ? old : new)->path;
		if (old && new &&new->type == 'f' && work_entry_untouched(old, new)) {
			new->hashed = old->hashed;
			memcpy(new->hash, old->hash, sizeof(new->hash));
		}
		if (same(old, new) ||
			work_ignored_within(t->ignore, path, (new ? new->type : old->type) == 'd'))
			continue;
		if (p->nr_deltas == cap) {
			struct work_delta *more;

			cap = cap ? 2 * cap : 64;
			more = reallocarray(p->deltas, cap, sizeof(*more));
			if (!more)
				return err_errno(err, -ENOMEM, "point");
			p->deltas = more;
		}
		p->deltas[p->nr_deltas] = (struct work_delta){0};
		if (old)
			p->deltas[p->nr_deltas].old = *old;
		if (new)
			p->deltas[p->nr_deltas].new = *new;
		p->nr_deltas++;
	}
	return 0;
}

int work_history_take(struct work_history *h, const struct work_take *t, struct err *err)
{
	CLEANUP(work_point_fini) struct work_point p = {.nr = h->last + 1};
	char by[WORK_HISTORY_BY_MAX] = "[]", name[POINT_DIGITS + 3];
	struct timespec now;
	struct seen seen;
	int taken = 0, r = find_deltas(t, &p, err);

	if (r == 0 && p.nr_deltas) {
		read_seen(h, &seen);
		r = t->who(t->ctx, le64_get(seen.seq), by, err);
		if (r == 0)
			r = keep_contents(h, t, &p, err);
		clock_gettime(CLOCK_REALTIME, &now);
		p.time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
		p.by = by;
		if (r == 0)
			r = write_point(h, &p, err);
		taken = r == 0;
		if (r == 0 || r == -E2BIG)
			h->last = p.nr;
		// It ends the way back: the history begins anew behind it.
		if (r == -E2BIG)
			r = drop_oldest(h, count_points(h), err);
	}
	// In this order: what is between them would be told twice, which harms nobody.
	if (r == 0)
		r = work_manifest_write(t->guest, h->dir_fd, NOW, err);
	// Or the same would be told once more, with another number.
	if (r < 0 && h->last == p.nr) {
		name_of(p.nr, name);
		unlinkat(h->dir_fd, name, 0);
		h->last--;
	}
	if (r == 0) {
		r = write_seen(h, t->seq);
		r = r < 0 ? err_errno(err, r, WORK_HISTORY "/" SEEN) : make_room(h, t->guest, err);
	}
	return r < 0 ? r : taken;
}

// --- Going back ------------------------------------------------------------------------------

void work_back_fini(struct work_back *back)
{
	for (size_t i = 0; i < back->nr_points; i++)
		work_point_fini(&back->points[i]);
	free(back->points);
	free(back->steps);
	free(back->all);
	*back = (struct work_back){0};
}

static int by_path(const void *a, const void *b)
{
	const struct work_delta *x = *(const struct work_delta *const *)a;
	const struct work_delta *y = *(const struct work_delta *const *)b;

	return strcmp(work_delta_path(x), work_delta_path(y));
}

static int by_path_and_point(const void *a, const void *b)
{
	const struct work_delta *x = *(const struct work_delta *const *)a;
	const struct work_delta *y = *(const struct work_delta *const *)b;
	int r = by_path(a, b);

	return r ? r : (x->point > y->point) - (x->point < y->point);
}

static int by_step(const void *a, const void *b)
{
	const struct work_back_step *x = a, *y = b;

	return strcmp(x->path, y->path);
}

static int load_points(
	const struct work_history *h, uint32_t nr, struct work_back *b, struct err *err)
{
	size_t deltas = 0, kept = 0;

	b->points = calloc((size_t)(h->last - nr) + 1, sizeof(*b->points));
	if (!b->points)
		return err_errno(err, -ENOMEM, WORK_HISTORY);
	for (uint32_t i = nr + 1; i <= h->last; i++) {
		int r = work_history_read(h, i, &b->points[b->nr_points], err);

		if (r < 0)
			return r;
		deltas += b->points[b->nr_points++].nr_deltas;
	}
	b->all = calloc(deltas + 1, sizeof(b->all[0]));
	if (!b->all)
		return err_errno(err, -ENOMEM, WORK_HISTORY);
	for (size_t i = 0; i < b->nr_points; i++)
		for (size_t k = 0; k < b->points[i].nr_deltas; k++)
			b->all[b->nr_all++] = &b->points[i].deltas[k];
	if (b->nr_all)
		qsort(b->all, b->nr_all, sizeof(b->all[0]), by_path_and_point);
	for (size_t i = 0; i < b->nr_all; i++)
		if (i == 0 || by_path(&b->all[i], &b->all[kept - 1]) != 0)
			b->all[kept++] = b->all[i];
	b->nr_all = kept;
	return 0;
}

static bool is_wanted(const char *path, const char *const *paths, size_t nr)
{
	for (size_t i = 0; i < nr; i++) {
		const char *top = paths[i];
		size_t len;

		while (!strncmp(top, "./", 2))
			top += 2;
		len = strlen(top);
		while (len && top[len - 1] == '/')
			len--;
		if (!strncmp(path, top, len) && (path[len] == '/' || !path[len]))
			return true;
	}
	return nr == 0;
}

int work_history_back(const struct work_history *h, uint32_t nr, const struct work_manifest *now,
	const char *const *paths, size_t nr_paths, struct work_back *ret, struct err *err)
{
	CLEANUP(work_back_fini) struct work_back b = {.now = now};
	char quoted[WORK_QUOTED_MAX];
	const char *missing = NULL, *lost = NULL;
	size_t nr_missing = 0, nr_lost = 0;
	int r;

	if (nr > h->last || nr + 1 < h->first)
		return err_set(err, -ENOENT, "there is no point %u: %u to %u are kept", nr,
			h->first - 1, h->last);
	r = load_points(h, nr, &b, err);
	if (r < 0)
		return r;
	b.steps = calloc(b.nr_all + 1, sizeof(*b.steps));
	if (!b.steps)
		return err_errno(err, -ENOMEM, WORK_HISTORY);
	for (size_t i = 0; i < b.nr_all; i++) {
		const struct work_entry *to = b.all[i]->old.type ? &b.all[i]->old : NULL;
		const char *path = work_delta_path(b.all[i]);
		const struct work_entry *at = work_manifest_find(now, path);

		if (same(at, to) || !is_wanted(path, paths, nr_paths))
			continue;
		if (to && to->type == 'f' && !has_object(h, to)) {
			missing = missing ? missing : path;
			nr_missing++;
		}
		if (at && at->type == 'f' && !has_object(h, at) && !same_content(at, to)) {
			lost = lost ? lost : path;
			nr_lost++;
		}
		b.steps[b.nr++] = (struct work_back_step){path, at, to};
	}
	if (nr_missing)
		return err_set(err, -ENODATA,
			"%s, and %zu more: what was in it at that point is not kept (too large, or "
			"made by the set-up, or changed on this host before it was in the "
			"machine); name the paths to be taken back without it",
			work_quote(quoted, missing), nr_missing - 1);
	if (nr_lost)
		return err_set(err, -ENODATA,
			"%s, and %zu more: what is in it now is not kept (too large, or made by "
			"the "
			"set-up), so that would be lost for good; name the paths to be taken back "
			"without it",
			work_quote(quoted, lost), nr_lost - 1);
	*ret = b;
	b = (struct work_back){0};
	return 0;
}

// The folder as it will be: as a step says, else as it is, else as it was.
static const struct work_entry *folder_at(const struct work_back *b, const char *path)
{
	const struct work_delta key = {.new = {.path = path}}, *wanted = &key;
	const struct work_back_step step_key = {.path = path};
	const struct work_back_step *step = bsearch(
		&step_key, b->steps, b->nr, sizeof(*b->steps), by_step);
	const struct work_delta *const *was = bsearch(
		&wanted, b->all, b->nr_all, sizeof(b->all[0]), by_path);
	const struct work_entry *e = work_manifest_find(b->now, path);

	if (step)
		return step->to;
	if (e && e->type == 'd')
		return e;
	return was && (*was)->old.type == 'd' ? &(*was)->old : NULL;
}

// The rights of the folders on the way to path, and of it; the owner can always work in them.
static int set_folders(const struct work_back *b, int dir_fd, const char *path, bool itself)
{
	char folder[PATH_MAX];
	char *slash;

	snprintf(folder, sizeof(folder), "%s", path);
	while (itself || (slash = strrchr(folder, '/'))) {
		const struct work_entry *e;

		if (!itself)
			*slash = '\0';
		itself = false;
		e = folder_at(b, folder);
		if (fchmodat(dir_fd, folder, 0700 | (e ? e->mode : 0755), 0) < 0)
			return -errno;
	}
	return 0;
}

int work_back_lay_out(
	const struct work_history *h, const struct work_back *back, int dir_fd, struct err *err)
{
	char quoted[WORK_QUOTED_MAX], object[NAME_BYTES];
	int r = 0;

	for (size_t i = 0; i < back->nr && r == 0; i++) {
		const struct work_entry *to = back->steps[i].to;

		if (!to)
			continue;
		r = work_make_parents(dir_fd, to->path);
		if (r == 0 && to->type == 'd' && mkdirat(dir_fd, to->path, 0700) < 0 &&
			errno != EEXIST)
			r = -errno;
		if (r == 0 && to->type == 'l' && symlinkat(to->link, dir_fd, to->path) < 0)
			r = -errno;
		if (r == 0 && to->type == 'f') {
			object_name(to->hash, object);
			r = is_content(h->objects_fd, object, to)
				    ? work_copy(h->objects_fd, object, dir_fd, to->path, to->mode)
				    : -EUCLEAN;
		}
		if (r < 0)
			err_errno(err, r, "%s", work_quote(quoted, to->path));
	}
	for (size_t i = back->nr; i-- > 0 && r == 0;) {
		const struct work_entry *to = back->steps[i].to;

		if (to)
			r = set_folders(back, dir_fd, to->path, to->type == 'd');
		if (r < 0)
			err_errno(err, r, "%s", work_quote(quoted, to->path));
	}
	return r;
}
