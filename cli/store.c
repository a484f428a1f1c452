// SPDX-License-Identifier: Apache-2.0
// Folders of snapshots; see the header. One thread.
#include "cli/store.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/home.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

#define MAKING_PREFIX  "making-"
#define MANIFEST       "manifest.json"
#define MANIFEST_BYTES 65536
#define ID_PREFIX_MIN  6

int store_check_tag(const char *tag, struct err *err)
{
	size_t len = strlen(tag);

	for (size_t i = 0; i < len; i++)
		if (!isalnum((unsigned char)tag[i]) && (i == 0 || !strchr("._-", tag[i])))
			return err_set(err, -EINVAL,
				"'%.80s' is no tag: letters, digits, '.', '_' and '-', not at the "
				"start",
				tag);
	if (len == 0 || len > STORE_TAG_MAX)
		return err_set(err, -EINVAL, "a tag has 1 to %d letters", STORE_TAG_MAX);
	return 0;
}

static int joined(char ret[PATH_MAX], const char *dir, const char *name, struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

// --- Writing ---------------------------------------------------------------------------------

// Who writes one holds a lock on its folder: without it, nobody is there to finish it.
static int sweep(const char *store)
{
	DIR *dir = opendir(store);
	const struct dirent *e;
	int swept = 0;

	if (!dir)
		return 0;
	while ((e = readdir(dir))) {
		char path[PATH_MAX];
		CLEANUP_FD int fd = -1;

		if (strncmp(e->d_name, MAKING_PREFIX, strlen(MAKING_PREFIX)) != 0 ||
			joined(path, store, e->d_name, NULL) < 0)
			continue;
		fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
		if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
			swept += home_remove(path, NULL) == 0;
	}
	closedir(dir);
	return swept;
}

int store_sweep(struct err *err)
{
	char store[PATH_MAX];
	int r = home_snapshots(store, err);

	return r < 0 ? r : sweep(store);
}

int store_begin(struct store_writer *ret_writer, struct err *err)
{
	struct store_writer writer = {.dir_fd = -1};
	char name[sizeof(MAKING_PREFIX) + SNAPSHOT_ID_TEXT_LEN];
	CLEANUP_FD int store_fd = -1;
	struct snapshot_id id;
	int r = home_snapshots(writer.store, err);

	if (r < 0)
		return r;
	// Until the new folder has its own lock, another who sweeps would take it for nobody's.
	store_fd = open(writer.store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (store_fd < 0 || flock(store_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", writer.store);
	sweep(writer.store);
	if (getrandom(&id, sizeof(id), 0) != sizeof(id))
		return err_errno(err, -EIO, "getrandom");
	snapshot_id_text(&id, writer.id);
	snprintf(name, sizeof(name), MAKING_PREFIX "%s", writer.id);
	r = joined(writer.dir, writer.store, name, err);
	if (r < 0)
		return r;
	if (mkdir(writer.dir, 0700) < 0)
		return err_errno(err, -errno, "%s", writer.dir);
	writer.dir_fd = open(writer.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	// The lock is the command's alone: whoever else has the folder open got it by another
	// open().
	if (writer.dir_fd < 0 || flock(writer.dir_fd, LOCK_EX) < 0) {
		r = err_errno(err, -errno, "%s", writer.dir);
		rmdir(writer.dir);
		fd_close(&writer.dir_fd);
		return r;
	}
	*ret_writer = writer;
	return 0;
}

static int write_manifest(
	int dir_fd, const char *name, const struct store_snapshot *info, struct err *err)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	json_t *manifest = json_pack("{s:i, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "format",
		(int)IMAGE_FORMAT, "id", info->id, "parent", info->parent, "machine", info->machine,
		"tag", info->tag, "created_s", (json_int_t)info->created_s, "memory_bytes",
		(json_int_t)info->memory_bytes, "held_bytes", (json_int_t)info->held_bytes,
		"written_bytes", (json_int_t)info->written_bytes, "blackout_ns",
		(json_int_t)info->blackout_ns);
	int r = 0;

	if (fd < 0)
		r = err_errno(err, -errno, "%s", name);
	else if (!manifest || json_dumpfd(manifest, fd, JSON_INDENT(2)) < 0 || fsync(fd) < 0)
		r = err_errno(err, -EIO, "%s", name);
	json_decref(manifest);
	return r;
}

struct same_tag {
	const struct store_snapshot *info;
	struct err *err;
};

static int refuse_same_tag(void *opaque, const struct store_snapshot *snapshot)
{
	const struct same_tag *same = opaque;

	if (strcmp(snapshot->machine, same->info->machine) != 0 ||
		strcmp(snapshot->tag, same->info->tag) != 0)
		return 0;
	return err_set(same->err, -EEXIST, "'%s' has a snapshot '%s' already", snapshot->machine,
		snapshot->tag);
}

int store_check_free(const char *machine, const char *tag, struct err *err)
{
	struct store_snapshot want = {0};
	struct same_tag same = {&want, err};

	if (!tag[0])
		return 0;
	snprintf(want.machine, sizeof(want.machine), "%s", machine);
	snprintf(want.tag, sizeof(want.tag), "%s", tag);
	return store_each(refuse_same_tag, NULL, &same, err);
}

int store_commit(struct store_writer *writer, struct store_snapshot *info,
	const struct config *config, struct err *err)
{
	struct store_snapshot parent;
	CLEANUP_FD int store_fd = -1;
	char path[PATH_MAX] = "", final[PATH_MAX] = "";
	int r;

	store_fd = open(writer->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (store_fd < 0 || flock(store_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", writer->store);
	info->created_s = (int64_t)time(NULL);
	memcpy(info->id, writer->id, sizeof(info->id));
	r = store_check_free(info->machine, info->tag, err);
	// It may have been removed while this one was written.
	if (r == 0 && info->parent[0])
		r = store_find(info->parent, &parent, err);
	if (r == 0)
		r = write_manifest(writer->dir_fd, MANIFEST, info, err);
	if (r == 0)
		r = joined(path, writer->dir, "vm.ini", err);
	if (r == 0)
		r = config_write(path, config, err);
	if (r == 0)
		r = joined(final, writer->store, writer->id, err);
	if (r < 0)
		return r;
	if (fsync(writer->dir_fd) < 0)
		return err_errno(err, -errno, "%s", writer->dir);
	if (rename(writer->dir, final) < 0)
		return err_errno(err, -errno, "%s", final);
	fsync(store_fd);
	memcpy(info->dir, final, sizeof(info->dir));
	writer->dir[0] = '\0';
	return 0;
}

int store_replace(struct store_writer *writer, const struct store_snapshot *info, struct err *err)
{
	CLEANUP_FD int store_fd = open(writer->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int r;

	if (store_fd < 0 || flock(store_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", writer->store);
	r = write_manifest(writer->dir_fd, MANIFEST, info, err);
	if (r < 0)
		return r;
	if (fsync(writer->dir_fd) < 0)
		return err_errno(err, -errno, "%s", writer->dir);
	// What was there has the writer's name then, and goes with it.
	if (renameat2(AT_FDCWD, writer->dir, AT_FDCWD, info->dir, RENAME_EXCHANGE) < 0)
		return err_errno(err, -errno, "%s", info->dir);
	fsync(store_fd);
	return 0;
}

void store_end(struct store_writer *writer)
{
	if (writer->dir[0])
		(void)home_remove(writer->dir, NULL);
	if (writer->dir_fd > 0)
		fd_close(&writer->dir_fd);
	*writer = (struct store_writer){.dir_fd = -1};
}

// --- Reading ---------------------------------------------------------------------------------

static int take_text(json_t *manifest, const char *key, char *ret, size_t size)
{
	const char *text = json_string_value(json_object_get(manifest, key));

	if (!text || strlen(text) >= size)
		return -EBADMSG;
	memcpy(ret, text, strlen(text) + 1);
	return 0;
}

static int take_number(json_t *manifest, const char *key, uint64_t *ret)
{
	json_int_t number = json_integer_value(json_object_get(manifest, key));

	*ret = (uint64_t)number;
	return number < 0 ? -EBADMSG : 0;
}

// They are printed: a manifest may come from a stranger.
static bool good_name(const char *name)
{
	for (const char *at = name; *at; at++)
		if (!isalnum((unsigned char)*at) && !strchr("._-", *at))
			return false;
	return name[0] != '\0';
}

static int read_manifest(const char *dir, struct store_snapshot *ret, struct err *err)
{
	struct store_snapshot info = {0};
	CLEANUP_FREE char *text = NULL;
	struct snapshot_id id;
	uint64_t created_s;
	json_t *manifest;
	char path[PATH_MAX];
	size_t len = 0;
	int r = joined(path, dir, MANIFEST, err);

	if (r == 0)
		r = fd_read_file(path, MANIFEST_BYTES, &text, &len, err);
	if (r < 0)
		return r;
	manifest = json_loadb(text, len, 0, NULL);
	if (take_text(manifest, "id", info.id, sizeof(info.id)) < 0 ||
		take_text(manifest, "parent", info.parent, sizeof(info.parent)) < 0 ||
		take_text(manifest, "machine", info.machine, sizeof(info.machine)) < 0 ||
		take_text(manifest, "tag", info.tag, sizeof(info.tag)) < 0 ||
		snapshot_id_parse(info.id, &id) < 0 ||
		(info.parent[0] && snapshot_id_parse(info.parent, &id) < 0) ||
		!good_name(info.machine) || (info.tag[0] && !good_name(info.tag)) ||
		strcmp(strrchr(dir, '/') + 1, info.id) != 0 || !strcmp(info.parent, info.id) ||
		take_number(manifest, "created_s", &created_s) < 0 ||
		take_number(manifest, "memory_bytes", &info.memory_bytes) < 0 ||
		take_number(manifest, "held_bytes", &info.held_bytes) < 0 ||
		take_number(manifest, "written_bytes", &info.written_bytes) < 0 ||
		take_number(manifest, "blackout_ns", &info.blackout_ns) < 0) {
		json_decref(manifest);
		return err_set(err, -EBADMSG, "%s: damaged", path);
	}
	info.created_s = (int64_t)created_s;
	json_decref(manifest);
	memcpy(info.dir, dir, strlen(dir) + 1);
	*ret = info;
	return 0;
}

struct list {
	struct store_snapshot *all;
	size_t nr;
};

static int by_age(const void *a, const void *b)
{
	const struct store_snapshot *x = a, *y = b;

	if (x->created_s != y->created_s)
		return x->created_s < y->created_s ? -1 : 1;
	// Of one second: a child after its parent.
	if (!strcmp(x->parent, y->id))
		return 1;
	return !strcmp(y->parent, x->id) ? -1 : strcmp(x->id, y->id);
}

int store_each(int (*each)(void *opaque, const struct store_snapshot *snapshot),
	void (*broken)(void *opaque, const char *dir, const struct err *err), void *opaque,
	struct err *err)
{
	struct store_snapshot *all = NULL;
	const struct dirent *e;
	char store[PATH_MAX];
	size_t nr = 0;
	DIR *dir;
	int r = home_snapshots(store, err);

	if (r < 0)
		return r;
	dir = opendir(store);
	if (!dir)
		return err_errno(err, -errno, "%s", store);
	while ((e = readdir(dir))) {
		struct store_snapshot info, *more;
		struct snapshot_id id;
		struct err bad = {0};
		char path[PATH_MAX];

		if (snapshot_id_parse(e->d_name, &id) < 0 ||
			joined(path, store, e->d_name, NULL) < 0)
			continue;
		if (read_manifest(path, &info, &bad) < 0) {
			if (broken)
				broken(opaque, path, &bad);
			continue;
		}
		more = reallocarray(all, nr + 1, sizeof(*all));
		if (!more) {
			r = err_errno(err, -ENOMEM, "%s", store);
			break;
		}
		all = more;
		all[nr++] = info;
	}
	closedir(dir);
	if (nr > 0)
		qsort(all, nr, sizeof(*all), by_age);
	for (size_t i = 0; i < nr && r == 0; i++)
		r = each(opaque, &all[i]);
	free(all);
	return r;
}

struct find {
	const char *name;
	size_t machine_len; // MACHINE@TAG; 0: an id
	const char *tag;
	struct store_snapshot *ret;
	unsigned int found;
};

static int match(void *opaque, const struct store_snapshot *s)
{
	struct find *find = opaque;

	if (find->tag) {
		if (strlen(s->machine) != find->machine_len ||
			strncmp(s->machine, find->name, find->machine_len) != 0 ||
			(find->tag[0] && strcmp(s->tag, find->tag) != 0))
			return 0;
		find->found = 1; // the latest, since the oldest come first
	} else {
		if (strncmp(s->id, find->name, strlen(find->name)) != 0)
			return 0;
		find->found++;
	}
	*find->ret = *s;
	return 0;
}

int store_find(const char *name, struct store_snapshot *ret, struct err *err)
{
	const char *at = strchr(name, '@');
	struct find find = {
		.name = name,
		.machine_len = at ? (size_t)(at - name) : 0,
		.tag = at ? at + 1 : NULL,
		.ret = ret,
	};
	int r;

	if (!at && strlen(name) < ID_PREFIX_MIN)
		return err_set(err, -EINVAL,
			"'%s' is no snapshot: MACHINE@TAG, MACHINE@ for its latest, or %d digits "
			"of "
			"an id",
			name, ID_PREFIX_MIN);
	r = store_each(match, NULL, &find, err);
	if (r < 0)
		return r;
	if (find.found == 0)
		return err_set(err, -ENOENT,
			"there is no snapshot '%s' (mayfly snapshots lists them)", name);
	if (find.found > 1)
		return err_set(err, -EINVAL, "'%s' is how several snapshots begin", name);
	return 0;
}

struct child {
	const char *id;
	char of[64], tag[STORE_TAG_MAX + 1], child_id[SNAPSHOT_ID_TEXT_LEN + 1];
	bool found;
};

static int is_child(void *opaque, const struct store_snapshot *s)
{
	struct child *child = opaque;

	if (strcmp(s->parent, child->id) != 0)
		return 0;
	child->found = true;
	memcpy(child->of, s->machine, sizeof(child->of));
	memcpy(child->tag, s->tag, sizeof(child->tag));
	memcpy(child->child_id, s->id, sizeof(child->child_id));
	return 0;
}

int store_remove(const struct store_snapshot *snapshot, struct err *err)
{
	struct child child = {.id = snapshot->id};
	CLEANUP_FD int store_fd = -1;
	char store[PATH_MAX], dying[PATH_MAX];
	int r = home_snapshots(store, err);

	if (r < 0)
		return r;
	store_fd = open(store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (store_fd < 0 || flock(store_fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", store);
	r = store_each(is_child, NULL, &child, err);
	if (r < 0)
		return r;
	if (child.found)
		return err_set(err, -EBUSY,
			"snapshot %.12s is the parent of %.12s (%s%s%s): remove or merge that "
			"first",
			snapshot->id, child.child_id, child.of, child.tag[0] ? "@" : "", child.tag);
	// Out of sight at once, and swept if we do not come to the end.
	if (snprintf(dying, sizeof(dying), "%s/" MAKING_PREFIX "%s", store, snapshot->id) >=
		(int)sizeof(dying))
		return err_errno(err, -ENAMETOOLONG, "%s", store);
	if (rename(snapshot->dir, dying) < 0)
		return err_errno(err, -errno, "%s", snapshot->dir);
	return home_remove(dying, err);
}

static int untag(const struct store_snapshot *snapshot, struct err *err)
{
	struct store_snapshot info = *snapshot;
	CLEANUP_FD int dir_fd = open(snapshot->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int r;

	if (dir_fd < 0)
		return err_errno(err, -errno, "%s", snapshot->dir);
	info.tag[0] = '\0';
	unlinkat(dir_fd, MANIFEST ".new", 0);
	r = write_manifest(dir_fd, MANIFEST ".new", &info, err);
	if (r == 0 && renameat(dir_fd, MANIFEST ".new", dir_fd, MANIFEST) < 0)
		r = err_errno(err, -errno, "%s", snapshot->dir);
	if (r == 0)
		fsync(dir_fd);
	return r;
}

int store_release(const struct store_snapshot *snapshot, struct err *err)
{
	int r = store_remove(snapshot, err);

	return r == -EBUSY ? untag(snapshot, err) : r;
}

struct forget {
	const char *machine;
	bool removed;
};

static int forget_one(void *opaque, const struct store_snapshot *snapshot)
{
	struct forget *forget = opaque;

	if (!strcmp(snapshot->machine, forget->machine) && store_remove(snapshot, NULL) == 0)
		forget->removed = true;
	return 0;
}

int store_forget(const char *machine, struct err *err)
{
	struct forget forget = {.machine = machine};
	int r;

	// Children are younger than their parents: a round for each generation.
	do {
		forget.removed = false;
		r = store_each(forget_one, NULL, &forget, err);
	} while (r == 0 && forget.removed);
	return r;
}
