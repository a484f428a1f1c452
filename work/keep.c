// SPDX-License-Identifier: Apache-2.0
// All or nothing, on a tree of this host; see the header. One thread.
#include "work/keep.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/fs.h>

#include "vmm/base/buf.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "work/scan.h"

#define JOURNAL     "journal"
#define JOURNAL_NEW "journal.new" // of work_file_write()
#define OVER        "over"
#define MAGIC       "MAYFLYJ1"
#define MAGIC_BYTES 8U

// Of a step on the disk, before its path.
struct record {
	uint8_t kind, old_type, new_type, zero;
	le16_t old_mode, new_mode;
	le32_t path_bytes; // with a NUL
	le32_t zeros;
	le64_t old_ino, new_ino;
};
_Static_assert(sizeof(struct record) == 32, "on the disk");

static int fail(int code, const char *path, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	return err_errno(err, code, "%s", work_quote(quoted, path));
}

static int changed_meanwhile(const char *path, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	return err_set(err, -ESTALE, "%s: changed on this host in this moment; try again",
		work_quote(quoted, path));
}

// --- The journal -----------------------------------------------------------------------------

static int write_journal(int dir_fd, const struct work_step *steps, size_t nr, struct err *err)
{
	CLEANUP_BUF struct buf out = {0};

	buf_append(&out, MAGIC, MAGIC_BYTES);
	buf_append_le32(&out, (uint32_t)nr);
	for (size_t i = 0; i < nr; i++) {
		const struct work_step *s = &steps[i];
		struct record r = {
			.kind = (uint8_t)s->kind,
			.old_type = (uint8_t)s->old_type,
			.new_type = (uint8_t)s->new_type,
			.old_mode = le16_of((uint16_t)s->old_mode),
			.new_mode = le16_of((uint16_t)s->new_mode),
			.path_bytes = le32_of((uint32_t)strlen(s->path) + 1),
			.old_ino = le64_of(s->old_ino),
			.new_ino = le64_of(s->new_ino),
		};

		buf_append(&out, &r, sizeof(r));
		buf_append(&out, s->path, strlen(s->path) + 1);
	}
	return work_file_write(dir_fd, JOURNAL, &out, err);
}

static bool type_ok(uint8_t type)
{
	return type == 0 || type == 'd' || type == 'f' || type == 'l';
}

static bool parse_step(const uint8_t **data, size_t *len, struct work_step *ret)
{
	struct record r;
	size_t bytes;

	if (*len < sizeof(r))
		return false;
	memcpy(&r, *data, sizeof(r));
	*data += sizeof(r);
	*len -= sizeof(r);
	bytes = le32_get(r.path_bytes);
	if (bytes == 0 || bytes > *len || strnlen((const char *)*data, bytes) != bytes - 1)
		return false;
	*ret = (struct work_step){
		.kind = (char)r.kind,
		.path = (const char *)*data,
		.old_type = (char)r.old_type,
		.new_type = (char)r.new_type,
		.old_mode = le16_get(r.old_mode),
		.new_mode = le16_get(r.new_mode),
		.old_ino = le64_get(r.old_ino),
		.new_ino = le64_get(r.new_ino),
	};
	*data += bytes;
	*len -= bytes;
	return (r.kind == 'm' || r.kind == 'r') && type_ok(r.old_type) && type_ok(r.new_type) &&
	       ret->old_mode <= 0777 && ret->new_mode <= 0777 && work_path_ok(ret->path);
}

int work_journal_parse(const uint8_t *data, size_t len, struct work_step **ret_steps,
	size_t *ret_nr, struct err *err)
{
	CLEANUP_FREE struct work_step *steps = NULL;
	uint32_t nr;

	if (len < MAGIC_BYTES + 4 || memcmp(data, MAGIC, MAGIC_BYTES) != 0)
		return err_set(err, -EBADMSG, "journal: of another kind");
	nr = get_le32(data + MAGIC_BYTES);
	data += MAGIC_BYTES + 4;
	len -= MAGIC_BYTES + 4;
	if (nr > len / sizeof(struct record))
		return err_set(err, -EBADMSG, "journal: cut");
	steps = calloc((size_t)nr + 1, sizeof(*steps));
	if (!steps)
		return err_errno(err, -ENOMEM, "journal");
	for (uint32_t i = 0; i < nr; i++)
		if (!parse_step(&data, &len, &steps[i]))
			return err_set(err, -EBADMSG, "journal: step %u is none", i);
	if (len)
		return err_set(err, -EBADMSG, "journal: something behind its end");
	*ret_steps = TAKE_PTR(steps);
	*ret_nr = nr;
	return 0;
}

// --- One step --------------------------------------------------------------------------------

struct places {
	int home_fd, new_fd, old_fd;
};

static void places_fini(struct places *p)
{
	fd_close(&p->new_fd);
	fd_close(&p->old_fd);
}

static int places_open(struct places *ret, int home_fd, int dir_fd)
{
	struct places p = {
		.home_fd = home_fd,
		.new_fd = openat(dir_fd, "new", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
		.old_fd = openat(dir_fd, "old", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
	};

	if (p.new_fd < 0 || p.old_fd < 0) {
		int r = -errno;

		places_fini(&p);
		return r;
	}
	*ret = p;
	return 0;
}

// Never over what is there.
static int move(int from_fd, const char *from, int to_fd, const char *to)
{
	struct stat st;

	if (syscall(SYS_renameat2, from_fd, from, to_fd, to, RENAME_NOREPLACE) == 0)
		return 0;
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	// A file system that does not know the flag.
	if (fstatat(to_fd, to, &st, AT_SYMLINK_NOFOLLOW) == 0)
		return -EEXIST;
	return renameat(from_fd, from, to_fd, to) < 0 ? -errno : 0;
}

static bool there(int dir_fd, const char *name)
{
	struct stat st;

	return fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

static bool is(int dir_fd, const char *name, char type, uint64_t ino)
{
	struct work_entry e;
	struct stat st;

	if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return false;
	e = work_entry_of(&st);
	return e.type == type && e.ino == ino;
}

// 1 if the folder is empty, 0 if it is not.
static int is_empty(int dir_fd, const char *name)
{
	int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	const struct dirent *d;
	int r = 1;

	if (!dir) {
		r = -errno;
		fd_close(&fd);
		return r;
	}
	while (r == 1 && (d = readdir(dir)))
		r = !strcmp(d->d_name, ".") || !strcmp(d->d_name, "..");
	closedir(dir);
	return r;
}

// Of a folder that has the mode only_if; also when that keeps us out.
static int set_mode(int parent_fd, const char *name, uint32_t mode, uint32_t only_if)
{
	CLEANUP_FD int fd = openat(parent_fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	char proc[40];
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	if ((st.st_mode & 0777) != only_if)
		return mode == (st.st_mode & 0777) ? 0 : -ESTALE;
	snprintf(proc, sizeof(proc), "/proc/self/fd/%d", fd);
	return chmod(proc, mode | (st.st_mode & 07000)) < 0 ? -errno : 0;
}

static int take_step(const struct places *p, const struct work_step *s, const char *nr,
	const struct work_entry *old, struct err *err)
{
	const char *name;
	CLEANUP_FD int parent_fd = work_open_parent(p->home_fd, s->path, &name);
	struct work_entry moved;
	struct stat st;
	int r = MIN(parent_fd, 0);

	if (r == 0 && s->kind == 'm')
		r = set_mode(parent_fd, name, s->new_mode, s->old_mode);
	if (r < 0 || s->kind == 'm')
		return r == -ESTALE ? changed_meanwhile(s->path, err)
		       : r < 0      ? fail(r, s->path, err)
				    : 0;
	if (s->old_type) {
		r = move(parent_fd, name, p->old_fd, nr);
		if (r < 0)
			return fail(r, s->path, err);
		// Looked at where nobody else finds it any more.
		if (fstatat(p->old_fd, nr, &st, AT_SYMLINK_NOFOLLOW) < 0)
			return fail(-errno, s->path, err);
		moved = work_entry_of(&st);
		if (moved.type != s->old_type || moved.ino != s->old_ino ||
			(s->old_type == 'f' &&
				(moved.size != old->size || moved.mtime_ns != old->mtime_ns)))
			return changed_meanwhile(s->path, err);
		if (s->old_type == 'd') {
			r = is_empty(p->old_fd, nr);
			if (r != 1)
				return r < 0 ? fail(r, s->path, err)
					     : changed_meanwhile(s->path, err);
		}
	}
	r = s->new_type ? move(p->new_fd, nr, parent_fd, name) : 0;
	return r == -EEXIST ? changed_meanwhile(s->path, err) : r < 0 ? fail(r, s->path, err) : 0;
}

// Takes back what there is of a step.
static int untake_step(const struct places *p, const struct work_step *s, const char *nr)
{
	const char *name;
	CLEANUP_FD int parent_fd = work_open_parent(p->home_fd, s->path, &name);
	bool new_out = s->kind == 'r' && s->new_type && !there(p->new_fd, nr);
	bool old_out = s->kind == 'r' && s->old_type && there(p->old_fd, nr);
	int r;

	if (s->kind == 'r' && !new_out && !old_out)
		return 0;
	if (parent_fd < 0)
		return old_out ? parent_fd : 0;
	if (s->kind == 'm') {
		r = set_mode(parent_fd, name, s->old_mode, s->new_mode);
		return r == -EACCES || r == -EPERM ? r : 0; // else it is not there, or not ours
	}
	if (new_out && there(parent_fd, name)) {
		// What is not ours any more, or has got more in it, is not taken away.
		if (!is(parent_fd, name, s->new_type, s->new_ino) ||
			(s->new_type == 'd' && is_empty(parent_fd, name) != 1))
			return old_out ? -EEXIST : 0;
		r = move(parent_fd, name, p->new_fd, nr);
		if (r < 0)
			return r;
	}
	return old_out ? move(p->old_fd, nr, parent_fd, name) : 0;
}

static int untake_all(
	const struct places *p, const struct work_step *steps, size_t nr, struct err *err)
{
	char quoted[WORK_QUOTED_MAX], name[24];

	for (size_t i = nr; i-- > 0;) {
		int r;

		snprintf(name, sizeof(name), "%zu", i);
		r = untake_step(p, &steps[i], name);
		if (r < 0)
			return err_set(err, -EUCLEAN,
				"%s cannot be put back (%s): what was there is %s/old/%s of the "
				"folder; move away what is in its place, and try again",
				work_quote(quoted, steps[i].path), strerror(-r), WORK_STAGE_NAME,
				name);
	}
	return 0;
}

// The tree is the old or the new one, on the disk as well.
static int end_journal(int home_fd, int dir_fd, struct err *err)
{
	if (syncfs(home_fd) < 0 || renameat(dir_fd, JOURNAL, dir_fd, OVER) < 0 || fsync(dir_fd) < 0)
		return err_errno(err, -errno, "%s", WORK_STAGE_NAME);
	return 0;
}

// --- A stage ---------------------------------------------------------------------------------

static int clear_away(int home_fd, int dir_fd)
{
	static const char *const names[] = {
		"tree", "diff", "new", "old", JOURNAL_NEW, OVER}; // the last one last
	int r = 0;

	for (size_t i = 0; i < ARRAY_SIZE(names) && r == 0; i++)
		r = work_remove(dir_fd, names[i]);
	if (r == 0 && unlinkat(home_fd, WORK_STAGE_NAME, AT_REMOVEDIR) < 0 && errno != ENOENT)
		r = -errno;
	return r;
}

static int recover(int home_fd, struct err *err)
{
	CLEANUP_FD int dir_fd = openat(
		home_fd, WORK_STAGE_NAME, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	CLEANUP_FREE struct work_step *steps = NULL;
	CLEANUP_FREE uint8_t *data = NULL;
	CLEANUP(places_fini) struct places p = {-1, -1, -1};
	int result = WORK_CLEAR, r;
	size_t len = 0, nr = 0;

	if (dir_fd < 0)
		return errno == ENOENT ? WORK_CLEAR : fail(-errno, WORK_STAGE_NAME, err);
	if (there(dir_fd, JOURNAL)) {
		r = work_file_read(dir_fd, JOURNAL, WORK_JOURNAL_MAX, &data, &len, err);
		if (r == 0)
			r = work_journal_parse(data, len, &steps, &nr, err);
		if (r < 0) {
			if (err)
				err->code = -EUCLEAN;
			return err_wrap(err, -EUCLEAN, "%s", WORK_STAGE_NAME);
		}
		r = places_open(&p, home_fd, dir_fd);
		if (r < 0)
			return fail(r, WORK_STAGE_NAME, err);
		r = untake_all(&p, steps, nr, err);
		if (r == 0)
			r = end_journal(home_fd, dir_fd, err);
		if (r < 0)
			return r;
		result = WORK_TAKEN_BACK;
	} else if (there(dir_fd, OVER)) {
		result = WORK_FINISHED;
	}
	r = clear_away(home_fd, dir_fd);
	return r < 0 ? fail(r, WORK_STAGE_NAME, err) : result;
}

static int lock_home(int home_fd, struct err *err)
{
	CLEANUP_FD int fd = openat(home_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return err_errno(err, -errno, "the folder");
	if (flock(fd, LOCK_EX | LOCK_NB) < 0)
		return errno == EWOULDBLOCK
			       ? err_set(err, -EBUSY,
					 "another command is keeping changes in this folder")
			       : err_errno(err, -errno, "the folder");
	return TAKE_FD(fd);
}

int work_recover(int home_fd, struct err *err)
{
	CLEANUP_FD int fd = -1;

	if (!there(home_fd, WORK_STAGE_NAME))
		return WORK_CLEAR;
	fd = lock_home(home_fd, err);
	return fd < 0 ? fd : recover(fd, err);
}

int work_stage_open(struct work_stage *ret, int home_fd, struct err *err)
{
	static const char *const names[] = {"tree", "new", "old"};
	struct work_stage s = WORK_STAGE_NONE;
	int r = s.home_fd = lock_home(home_fd, err);

	if (r >= 0)
		r = recover(s.home_fd, err);
	if (r >= 0 && mkdirat(s.home_fd, WORK_STAGE_NAME, 0700) < 0)
		r = fail(-errno, WORK_STAGE_NAME, err);
	if (r >= 0) {
		s.dir_fd = openat(s.home_fd, WORK_STAGE_NAME,
			O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		for (size_t i = 0; i < ARRAY_SIZE(names) && r >= 0; i++)
			if (s.dir_fd < 0 || mkdirat(s.dir_fd, names[i], 0700) < 0)
				r = fail(-errno, WORK_STAGE_NAME, err);
	}
	if (r >= 0) {
		s.tree_fd = openat(s.dir_fd, "tree", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (s.tree_fd < 0)
			r = fail(-errno, WORK_STAGE_NAME, err);
	}
	if (r < 0) {
		work_stage_close(&s);
		return r;
	}
	*ret = s;
	return 0;
}

void work_stage_close(struct work_stage *stage)
{
	if (stage->dir_fd >= 0 && !there(stage->dir_fd, JOURNAL))
		(void)clear_away(stage->home_fd, stage->dir_fd);
	fd_close(&stage->tree_fd);
	fd_close(&stage->dir_fd);
	fd_close(&stage->home_fd);
}

static int hash_staged(const struct work_stage *stage, struct work_entry *e, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];
	const char *name;
	CLEANUP_FD int parent_fd = work_open_parent(stage->tree_fd, e->path, &name);
	CLEANUP_FD int fd = -1;
	struct stat st;
	int r;

	if (parent_fd >= 0)
		fd = openat(
			parent_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	// What is given other names may be another file too.
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_nlink != 1)
		return err_set(err, -ESTALE,
			"%s: the machine lists it and does not hand it out; if something in it is "
			"changing files, try again afterwards",
			work_quote(quoted, e->path));
	r = work_hash_fd(fd, e->hash);
	if (r < 0)
		return fail(r, e->path, err);
	e->hashed = true;
	e->size = (uint64_t)st.st_size;
	return 0;
}

int work_stage_hash(const struct work_stage *stage, const struct work_trees *trees,
	struct work_manifest *guest, bool all, struct err *err)
{
	int r = 0;

	for (size_t i = 0; i < guest->nr && (r == 0 || !all); i++)
		if (work_must_hash(trees, &guest->entries[i]))
			r = hash_staged(stage, &guest->entries[i], err);
	return all ? r : 0;
}

// --- Keeping ---------------------------------------------------------------------------------

struct keeping {
	const struct work_stage *stage;
	const struct work_plan *plan;
	struct places p;
	struct work_step *steps;
	const struct work_entry **olds; // of each step
	size_t nr;
	uid_t uid; // of the tree
	gid_t gid;
};

static struct work_step *new_step(
	struct keeping *k, char kind, const char *path, const struct work_entry *old)
{
	struct work_step *s = &k->steps[k->nr];

	*s = (struct work_step){.kind = kind, .path = path};
	if (kind == 'r' && old) {
		s->old_type = old->type;
		s->old_ino = old->ino;
	}
	k->olds[k->nr++] = old;
	return s;
}

// What root brings out belongs to whose what was there is, or the tree.
static int give_owner(const struct keeping *k, const struct work_change *c, const char *name)
{
	const char *old;
	CLEANUP_FD int parent_fd = c->host ? work_open_parent(k->p.home_fd, c->path, &old) : -1;
	struct stat st = {0};

	if (parent_fd < 0 || fstatat(parent_fd, old, &st, AT_SYMLINK_NOFOLLOW) < 0) {
		st.st_uid = k->uid;
		st.st_gid = k->gid;
	}
	return fchownat(k->p.new_fd, name, st.st_uid, st.st_gid, AT_SYMLINK_NOFOLLOW) < 0 ? -errno
											  : 0;
}

// Of the step that comes next: new/N.
static int make_new(
	struct keeping *k, const struct work_change *c, uint64_t *ret_ino, struct err *err)
{
	const struct work_entry *guest = c->guest;
	CLEANUP_FD int from_fd = -1;
	CLEANUP_FD int fd = -1;
	const char *from;
	struct stat st = {0};
	char name[24];
	int r = 0;

	snprintf(name, sizeof(name), "%zu", k->nr);
	switch (guest->type) {
	case 'd':
		// Until what is in it is there; then the rights that it is to have.
		if (mkdirat(k->p.new_fd, name, 0700) < 0)
			r = -errno;
		break;
	case 'l':
		if (symlinkat(guest->link, k->p.new_fd, name) < 0)
			r = -errno;
		break;
	default:
		from_fd = work_open_parent(k->stage->tree_fd, c->path, &from);
		r = from_fd < 0 ? from_fd : move(from_fd, from, k->p.new_fd, name);
	}
	if (r == 0 && geteuid() == 0)
		r = give_owner(k, c, name);
	if (r == 0 && guest->type != 'l') {
		fd = openat(k->p.new_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (fd < 0 || fchmod(fd, guest->type == 'd' ? 0700 | guest->mode : guest->mode) < 0)
			r = -errno;
	}
	if (r == 0 && fstatat(k->p.new_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		r = -errno;
	if (r < 0)
		return fail(r, c->path, err);
	*ret_ino = st.st_ino;
	return 0;
}

static bool folder_goes(const struct work_change *c)
{
	return c->host && (!c->guest || (c->host->type == 'd') != (c->guest->type == 'd'));
}

// First what goes, the inner before the outer; then what comes, the outer before the inner; then
// the rights of folders, the inner first again, since they may shut us out.
static int make_steps(struct keeping *k, struct err *err)
{
	const struct work_plan *plan = k->plan;
	struct work_step *s;
	int r = 0;

	for (size_t i = plan->nr; i-- > 0;)
		if (folder_goes(&plan->changes[i]))
			new_step(k, 'r', plan->changes[i].path, plan->changes[i].host);
	for (size_t i = 0; i < plan->nr && r == 0; i++) {
		const struct work_change *c = &plan->changes[i];
		const struct work_entry *old = folder_goes(c) ? NULL : c->host;
		uint64_t ino = 0;

		if (!c->guest || (old && old->type == 'd'))
			continue;
		r = make_new(k, c, &ino, err);
		if (r < 0)
			return r;
		s = new_step(k, 'r', c->path, old);
		s->new_type = c->guest->type;
		s->new_ino = ino;
	}
	for (size_t i = plan->nr; i-- > 0;) {
		const struct work_change *c = &plan->changes[i];
		bool was = c->host && c->host->type == 'd';
		uint32_t mode;

		if (!c->guest || c->guest->type != 'd')
			continue;
		mode = was ? c->host->mode : 0700 | c->guest->mode;
		if (mode == c->guest->mode)
			continue;
		s = new_step(k, 'm', c->path, NULL);
		s->old_mode = mode;
		s->new_mode = c->guest->mode;
	}
	return r;
}

static int take_all(struct keeping *k, struct err *err)
{
	char name[24];
	struct err why = {0};
	size_t done;
	int r = 0;

	for (done = 0; done < k->nr && r == 0; done++) {
		snprintf(name, sizeof(name), "%zu", done);
		r = take_step(&k->p, &k->steps[done], name, k->olds[done], err);
	}
	if (r == 0)
		return 0;
	if (untake_all(&k->p, k->steps, done, &why) < 0) {
		if (err)
			*err = why;
		return -EUCLEAN;
	}
	return r;
}

int work_keep(struct work_stage *stage, const struct work_plan *plan, struct err *err)
{
	CLEANUP_FREE struct work_step *steps = calloc(2 * plan->nr + 1, sizeof(*steps));
	CLEANUP_FREE const struct work_entry **olds = calloc(
		2 * plan->nr + 1, sizeof(const struct work_entry *));
	CLEANUP(places_fini) struct places p = {-1, -1, -1};
	struct keeping k = {.stage = stage, .plan = plan, .steps = steps, .olds = olds};
	struct err why = {0};
	struct stat st = {0};
	int r;

	ASSERT(plan->conflicts == 0);
	if (!steps || !olds)
		return err_errno(err, -ENOMEM, "keeping");
	r = places_open(&p, stage->home_fd, stage->dir_fd);
	if (r == 0 && fstat(stage->home_fd, &st) < 0)
		r = -errno;
	if (r < 0)
		return fail(r, WORK_STAGE_NAME, err);
	k.p = p;
	k.uid = st.st_uid;
	k.gid = st.st_gid;
	r = make_steps(&k, err);
	if (r < 0)
		return r;
	// All that is new is on the disk before anything says that it is.
	if (syncfs(stage->dir_fd) < 0)
		return fail(-errno, WORK_STAGE_NAME, err);
	r = write_journal(stage->dir_fd, steps, k.nr, err);
	if (r == 0)
		r = take_all(&k, err);
	if (r == -EUCLEAN)
		return r;
	if (r < 0) {
		// Nothing is lost if this fails: it is done again.
		(void)end_journal(stage->home_fd, stage->dir_fd, NULL);
		return r;
	}
	r = end_journal(stage->home_fd, stage->dir_fd, err);
	if (r == 0)
		return 0;
	if (untake_all(&p, steps, k.nr, &why) < 0) {
		if (err)
			*err = why;
		return -EUCLEAN;
	}
	return r;
}
