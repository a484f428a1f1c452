// SPDX-License-Identifier: Apache-2.0
// A machine and its folder; see the header. One thread, and one more that sends.
#include "cli/work_machine.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_files.h"
#include "cli/sha256.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"
#include "work/history.h"
#include "work/scan.h"

#define STATE       "work"
#define NAME_BYTES  40
#define PROGRESS_NS 200000000ULL
// Nothing has come of a guest that should be at work: it hangs. A slow one says something far
// sooner.
#define IDLE_NS 120000000000ULL

void work_name_for(const char *target, char ret[HOME_NAME_MAX + 1])
{
	const char *slash = strrchr(target, '/');
	char text[SHA256_TEXT_LEN + 1];
	struct sha256_ctx sha;
	size_t n = 0;

	sha256_init(&sha);
	sha256_update(&sha, strlen(target), (const uint8_t *)target);
	sha256_text(&sha, text);
	for (const char *s = slash ? slash + 1 : target; *s && n < NAME_BYTES; s++) {
		bool fits = isalnum((unsigned char)*s) || (n && strchr("._-", *s));

		// "run-…" is not ours to give.
		ret[n] = fits ? *s : 'x';
		n++;
	}
	snprintf(ret + n, HOME_NAME_MAX + 1 - n, "-%.6s", text);
	if (!strncmp(ret, "run-", 4))
		ret[3] = '_';
}

int work_state_open(const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int fd;

	if (snprintf(path, sizeof(path), "%s/" STATE, dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT)
		return err_set(err, -ENOENT,
			"it works on no folder of this host (mayfly work makes one that does)");
	return fd < 0 ? err_errno(err, -errno, "%s", path) : fd;
}

int work_name_here(char ret[HOME_NAME_MAX + 1], struct err *err)
{
	char target[PATH_MAX];

	if (!getcwd(target, sizeof(target)))
		return err_errno(err, -errno, "this folder");
	work_name_for(target, ret);
	return 0;
}

static int read_target(int state_fd, const char *name, char ret[PATH_MAX], struct err *err)
{
	ssize_t n = readlinkat(state_fd, name, ret, PATH_MAX - 1);

	if (n < 0 && errno == ENOENT)
		return err_set(
			err, -ENOENT, "its folder has not gone in to its end (mayfly discard it)");
	if (n < 0)
		return err_errno(err, -errno, STATE "/%s", name);
	ret[n] = '\0';
	return 0;
}

int work_target_of(const char *dir, char ret[PATH_MAX], struct err *err)
{
	CLEANUP_FD int fd = work_state_open(dir, err);

	return fd < 0 ? fd : read_target(fd, "target", ret, err);
}

bool work_begun(const char *dir)
{
	CLEANUP_FD int fd = work_state_open(dir, NULL);

	return fd >= 0;
}

static int parse_ignore(struct work_machine *w, const char *text, size_t len, struct err *err)
{
	int r = work_ignore_parse(text, len, &w->ignore, err);

	return r < 0 ? err_wrap(err, r, "%s/" WORK_IGNORE_NAME, w->target) : 0;
}

static int write_file(int dir_fd, const char *name, const char *text, size_t len, struct err *err)
{
	CLEANUP_FD int fd = openat(
		dir_fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	int r = fd < 0 ? -errno : fd_write_all(fd, text, len);

	return r < 0 ? err_errno(err, r, STATE "/%s", name) : 0;
}

int work_machine_new(struct work_machine *w, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	size_t len = 0;
	int r;

	if (snprintf(path, sizeof(path), "%s/" WORK_IGNORE_NAME, w->target) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", w->target);
	r = fd_read_file(path, WORK_IGNORE_MAX_BYTES, &text, &len, err);
	if (r < 0 && r != -ENOENT)
		return r;
	r = parse_ignore(w, text ? text : "", r == 0 ? len : 0, err);
	if (r < 0)
		return r;
	if (snprintf(path, sizeof(path), "%s/" STATE, w->m.dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", w->m.dir);
	if (mkdir(path, 0700) < 0)
		return err_errno(err, -errno, "%s", path);
	w->state_fd = work_state_open(w->m.dir, err);
	if (w->state_fd < 0)
		return w->state_fd;
	return write_file(w->state_fd, "ignore", text ? text : "", text ? len : 0, err);
}

int work_machine_open(struct work_machine *ret, const char *name, struct err *err)
{
	struct work_machine w = WORK_MACHINE_NONE;
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	size_t len;
	int r = running_find(name, &w.m, err);

	if (r == 0) {
		snprintf(w.name, sizeof(w.name), "%s", name);
		w.state_fd = work_state_open(w.m.dir, err);
		r = MIN(w.state_fd, 0);
	}
	if (r == 0)
		r = read_target(w.state_fd, "target", w.target, err);
	if (r == 0)
		r = read_target(w.state_fd, "inside", w.inside, err);
	if (r == 0) {
		w.target_fd = open(w.target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (w.target_fd < 0)
			r = err_errno(err, -errno, "%s", w.target);
	}
	if (r == 0 &&
		snprintf(path, sizeof(path), "%s/" STATE "/ignore", w.m.dir) >= (int)sizeof(path))
		r = err_errno(err, -ENAMETOOLONG, "%s", w.m.dir);
	if (r == 0)
		r = fd_read_file(path, WORK_IGNORE_MAX_BYTES, &text, &len, err);
	if (r == 0)
		r = parse_ignore(&w, text, len, err);
	if (r == 0)
		r = work_manifest_read(w.state_fd, "base", &w.base, err);
	if (r == 0)
		r = work_manifest_read(w.state_fd, "before", &w.before, err);
	if (r < 0) {
		err_wrap(err, r, "%s", name);
		work_machine_fini(&w);
		return r;
	}
	*ret = w;
	ret->m.name = ret->name;
	return 0;
}

void work_machine_fini(struct work_machine *w)
{
	fd_close(&w->target_fd);
	fd_close(&w->state_fd);
	work_ignore_fini(&w->ignore);
	work_manifest_fini(&w->base);
	work_manifest_fini(&w->before);
}

// --- The agent -------------------------------------------------------------------------------

struct show {
	const char *what;
	_Atomic uint64_t last_ns;
};

static void show_bytes(void *ctx, uint64_t bytes)
{
	struct show *show = ctx;
	uint64_t now = now_ns();

	if (!show || now - atomic_load(&show->last_ns) < PROGRESS_NS)
		return;
	atomic_store(&show->last_ns, now);
	fprintf(stderr, "\r\033[K%s %.1f MiB", show->what, (double)bytes / (double)MIB);
}

static void clear_line(const struct work_machine *w)
{
	if (w->progress)
		fputs("\r\033[K", stderr);
}

static int connect_shown(
	struct work_machine *w, struct show *show, struct agent_files *ret, struct err *err)
{
	int fd = running_connect(&w->m, err);

	if (fd < 0)
		return fd;
	*ret = (struct agent_files){.conn_fd = fd,
		.signal_fd = w->signal_fd,
		.cancel_fd = -1,
		.deadline_ns = w->deadline_ns,
		.idle_ns = IDLE_NS,
		.progress = w->progress ? show_bytes : NULL,
		.ctx = show};
	return 0;
}

int work_files(struct work_machine *w, struct agent_files *ret, struct err *err)
{
	return connect_shown(w, NULL, ret, err);
}

static int list_entry(void *ctx, const struct tree_entry *t, struct err *err)
{
	struct work_entry e = {.path = t->path,
		.type = t->type,
		.mode = t->type == 'l' ? 0777 : t->mode & 0777,
		.size = t->type == 'f' ? t->size : 0,
		.link = t->link,
		.ino = t->ino,
		.mtime_ns = t->mtime_ns,
		.ctime_ns = t->ctime_ns};
	struct work_manifest *m = ctx;

	if (!t->path[0])
		return t->type == 'd' ? 0 : err_set(err, -ENOTDIR, "it is no folder any more");
	if (t->type != 'd' && t->type != 'f' && t->type != 'l')
		return 0; // devices, sockets and the like are the guest's own
	return work_manifest_add(m, &e, err);
}

// The tree of the guest. All of it, or it fails: what is not told would be taken for gone.
static int list(struct work_machine *w, struct work_manifest *ret, struct err *err)
{
	const struct agent_get what = {.depth = TREE_DEPTH_MAX, .stamp = true};
	CLEANUP_MANIFEST struct work_manifest m = {0};
	const struct agent_list to = {.entry = list_entry, .ctx = &m};
	struct agent_files files;
	int r = work_files(w, &files, err);

	if (r < 0)
		return r;
	r = agent_list(&files, w->inside, &what, &to, err);
	fd_close(&files.conn_fd);
	if (r == -ENOENT)
		return err_set(err, r,
			"the machine has no %s any more, so nothing of it can be brought out",
			w->inside);
	if (r == 0)
		r = work_manifest_finish(&m, err);
	if (r < 0)
		return err_wrap(err, r, "the machine's %s", w->inside);
	*ret = m;
	m = (struct work_manifest){0};
	return 0;
}

// --- In --------------------------------------------------------------------------------------

struct sending {
	const struct work_machine *w;
	const struct work_manifest *known;
};

static bool skip(void *ctx, const char *path, char type)
{
	const struct sending *s = ctx;
	const struct work_entry *e;

	// Sockets and the like stay here; the scan has told of them.
	if (!strchr("dfl", type) || work_ignored(&s->w->ignore, path, type == 'd'))
		return true;
	if (type == 'd' || !s->known)
		return false;
	e = work_manifest_find(&s->w->base, path);
	return e && work_entry_same(e, work_manifest_find(s->known, path));
}

static void left_out(void *ctx, const char *path)
{
	char quoted[WORK_QUOTED_MAX];

	(void)ctx;
	fprintf(stderr, "mayfly work: %s: left out (neither file, folder nor link)\n",
		work_quote(quoted, path));
}

static void put_problem(void *ctx, const char *path, int errno_value)
{
	char quoted[WORK_QUOTED_MAX];

	(void)ctx;
	fprintf(stderr, "mayfly work: %s: %s\n", work_quote(quoted, path), strerror(errno_value));
}

// What is in the guest and not in the host's folder any more, or was of another type.
static int remove_gone(struct work_machine *w, const struct work_manifest *known, struct err *err)
{
	char path[2 * PATH_MAX], gone[PATH_MAX] = "";
	int r = 0;

	for (size_t i = 0; i < known->nr && r == 0; i++) {
		const struct work_entry *was = &known->entries[i];
		const struct work_entry *e = work_manifest_find(&w->base, was->path);
		size_t len = strlen(gone);
		struct agent_files files;

		if ((e && e->type == was->type) ||
			(len && !strncmp(was->path, gone, len) && was->path[len] == '/'))
			continue;
		snprintf(gone, sizeof(gone), "%s", was->path);
		snprintf(path, sizeof(path), "%s/%s", w->inside, was->path);
		r = work_files(w, &files, err);
		if (r < 0)
			return r;
		r = agent_remove(&files, path, true, err);
		fd_close(&files.conn_fd);
		if (r == -ENOENT)
			r = 0;
	}
	return r;
}

int work_send(struct work_machine *w, const struct work_manifest *known, struct err *err)
{
	struct sending s = {.w = w, .known = known};
	struct work_scan how = {.ignore = &w->ignore, .before = known, .left_out = left_out};
	struct show show = {.what = "sending"};
	struct agent_put put = {.parents = true, .skip = skip, .skip_ctx = &s};
	char folder[PATH_MAX];
	struct agent_files files;
	int r = work_scan(&how, w->target_fd, &w->base, err);

	if (r < 0)
		return err_wrap(err, r, "%s", w->target);
	if (known)
		r = remove_gone(w, known, err);
	if (r == 0)
		r = connect_shown(w, &show, &files, err);
	if (r < 0)
		return r;
	snprintf(folder, sizeof(folder), "%s", w->inside);
	put.name = strrchr(w->inside, '/') + 1;
	*strrchr(folder, '/') = '\0';
	put.folder = folder;
	put.problem = put_problem;
	r = agent_put(&files, w->target, &put, TREE_DEPTH_MAX, err);
	fd_close(&files.conn_fd);
	clear_line(w);
	return r < 0 ? err_wrap(err, r, "sending %s", w->target) : 0;
}

int work_settle_in(struct work_machine *w, struct err *err)
{
	int r = list(w, &w->before, err);

	if (r == 0)
		r = work_manifest_write(&w->base, w->state_fd, "base", err);
	if (r == 0)
		r = work_manifest_write(&w->before, w->state_fd, "before", err);
	if (r == 0 && mkdirat(w->state_fd, WORK_HISTORY, 0700) < 0)
		r = err_errno(err, -errno, STATE "/" WORK_HISTORY);
	if (r == 0 && (symlinkat(w->inside, w->state_fd, "inside") < 0 ||
			      symlinkat(w->target, w->state_fd, "target") < 0))
		r = err_errno(err, -errno, STATE);
	return r;
}

// --- Out -------------------------------------------------------------------------------------

// The paths of the files that must come out, in memory; if not all must: those that have room.
static int wanted(const struct work_look *look, bool all, uint64_t max_bytes, int *ret_fd,
	size_t *ret_nr, struct err *err)
{
	CLEANUP_FD int fd = memfd_create("paths", MFD_CLOEXEC);
	CLEANUP_BUF struct buf paths = {0};
	const uint64_t blocks = 2ULL * TREE_BLOCK_BYTES;
	uint64_t left = max_bytes;
	size_t nr = 0;
	int r;

	for (size_t i = 0; i < look->guest.nr; i++) {
		const struct work_entry *e = &look->guest.entries[i];

		if (!work_must_hash(&look->trees, e))
			continue;
		// A large one does not keep the small ones behind it in there. As the receiver
		// counts: a block for itself, and a last one that is not full.
		if (!all) {
			if (e->size > left || left - e->size < blocks)
				continue;
			left -= e->size + blocks;
		}
		buf_append(&paths, e->path, strlen(e->path) + 1);
		nr++;
	}
	r = fd < 0 ? -errno : buf_error(&paths);
	if (r == 0)
		r = fd_write_all(fd, paths.data, paths.len);
	if (r == 0 && lseek(fd, 0, SEEK_SET) < 0)
		r = -errno;
	if (r < 0)
		return err_errno(err, r, "paths");
	*ret_fd = TAKE_FD(fd);
	*ret_nr = nr;
	return 0;
}

static int fetch(struct work_machine *w, struct work_look *look, bool all, uint64_t max_bytes,
	struct err *err)
{
	const struct tree_receive to = {.dir_fd = look->stage.tree_fd, .max_bytes = max_bytes};
	struct show show = {.what = "bringing out"};
	CLEANUP_FD int paths_fd = -1;
	struct agent_files files;
	size_t nr = 0;
	int r = wanted(look, all, max_bytes, &paths_fd, &nr, err);

	if (r < 0 || nr == 0)
		return r;
	r = connect_shown(w, &show, &files, err);
	if (r < 0)
		return r;
	r = agent_fetch(&files, w->inside, paths_fd, &to, err);
	fd_close(&files.conn_fd);
	clear_line(w);
	// What has come is there, and whole.
	if (!all && (r == -EFBIG || r == -EIO))
		return 0;
	if (r == -EFBIG)
		return err_set(err, r,
			"the changed files are more than the %llu MiB that they may take of the "
			"disk (--max)",
			(unsigned long long)(max_bytes / MIB));
	return r < 0 ? err_wrap(err, r, "bringing files out") : 0;
}

static int look_at(struct work_machine *w, int home_fd, const struct work_manifest *before,
	bool all, uint64_t max_bytes, struct work_look *look, struct err *err)
{
	int r = work_stage_open(&look->stage, home_fd, err);

	look->trees = (struct work_trees){.base = &w->base,
		.before = before,
		.host = &look->host,
		.guest = &look->guest,
		.ignore = &w->ignore};
	if (r == 0)
		r = list(w, &look->guest, err);
	if (r == 0)
		r = fetch(w, look, all, max_bytes, err);
	return r == 0 ? work_stage_hash(&look->stage, &look->trees, &look->guest, all, err) : r;
}

int work_look_since(struct work_machine *w, int home_fd, const struct work_manifest *since,
	uint64_t max_bytes, struct work_look *ret, struct err *err)
{
	return look_at(w, home_fd, since, false, max_bytes, ret, err);
}

int work_look(struct work_machine *w, int home_fd, uint64_t max_bytes, struct work_look *ret,
	struct err *err)
{
	struct work_look *look = ret; // filled in as far as it goes, for work_look_fini()
	const struct work_scan how = {.ignore = &w->ignore, .before = &w->base};
	int r = look_at(w, home_fd, &w->before, true, max_bytes, look, err);

	// As late as possible: what changes after it is found out by each step.
	if (r == 0) {
		r = work_scan(&how, w->target_fd, &look->host, err);
		if (r < 0)
			err_wrap(err, r, "%s", w->target);
	}
	return r == 0 ? work_compare(&look->trees, &look->plan, err) : r;
}

void work_look_fini(struct work_look *look)
{
	work_stage_close(&look->stage);
	work_plan_fini(&look->plan);
	work_manifest_fini(&look->host);
	work_manifest_fini(&look->guest);
}

int work_kept(struct work_machine *w, const struct work_look *look, struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest base = {0}, before = {0};
	int r = work_rebase(&w->base, &look->plan, &look->guest, false, &base, err);

	if (r == 0)
		r = work_rebase(&w->before, &look->plan, &look->guest, true, &before, err);
	// In this order: in between what was kept is what both sides have.
	if (r == 0)
		r = work_manifest_write(&base, w->state_fd, "base", err);
	if (r == 0)
		r = work_manifest_write(&before, w->state_fd, "before", err);
	return r;
}
