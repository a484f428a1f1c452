// SPDX-License-Identifier: Apache-2.0
// Chains in the store; see the header. One thread.
#include "cli/chains.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snapshot/chain.h"
#include "vmm/base/fd.h"

#define STATE_FILE "state"

// What is opened of a snapshot.
struct opened {
	char *text; // the state file, which image points into
	struct image image;
	struct memory_layer layer;
};

static void close_one(struct opened *one)
{
	free(one->text);
	one->text = NULL;
	memory_close(&one->layer);
}

static int open_one(const struct store_snapshot *s, struct opened *ret, struct err *err)
{
	struct opened one = {.layer = {.fd = -1}};
	char path[PATH_MAX], id[SNAPSHOT_ID_TEXT_LEN + 1];
	CLEANUP_FD int dir_fd = -1;
	size_t len;
	int r;

	if (snprintf(path, sizeof(path), "%s/" STATE_FILE, s->dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", s->dir);
	dir_fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd < 0)
		return err_errno(err, -errno, "%s", s->dir);
	r = fd_read_file(path, IMAGE_FILE_BYTES_MAX, &one.text, &len, err);
	if (r == 0)
		r = image_parse(&one.image, one.text, len, err);
	if (r == 0) {
		snapshot_id_text(&one.image.id, id);
		if (strcmp(id, s->id) != 0)
			r = err_set(err, -EBADMSG, "damaged: its state is that of %.12s", id);
	}
	if (r == 0)
		r = memory_open(&one.layer, dir_fd, &one.image, err);
	if (r < 0) {
		close_one(&one);
		return err_wrap(err, r, "snapshot %.12s", s->id);
	}
	*ret = one;
	return 0;
}

// Calls each() for the snapshot, then for what it builds upon, until it is negative; each() may
// take the layer.
static int walk(const struct store_snapshot *s,
	int (*each)(
		void *opaque, const struct store_snapshot *s, struct opened *one, struct err *err),
	void *opaque, struct err *err)
{
	struct store_snapshot at = *s;

	for (unsigned int depth = 0; depth < MEMORY_LAYERS_MAX; depth++) {
		char parent[SNAPSHOT_ID_TEXT_LEN + 1];
		struct opened one;
		bool last;
		int r = open_one(&at, &one, err);

		if (r < 0)
			return r;
		last = snapshot_id_none(&one.image.parent);
		snapshot_id_text(&one.image.parent, parent);
		r = each(opaque, &at, &one, err);
		close_one(&one);
		if (r < 0 || last)
			return r;
		r = store_find(parent, &at, err);
		if (r < 0)
			return r;
	}
	return err_set(err, -EBADMSG, "snapshot %.12s: more than %u ancestors", s->id,
		MEMORY_LAYERS_MAX - 1);
}

static int check_one(
	void *opaque, const struct store_snapshot *s, struct opened *one, struct err *err)
{
	const bool *read_memory = opaque;
	int r = *read_memory ? chain_verify_layer(&one->layer, err) : 0;

	return r < 0 ? err_wrap(err, r, "snapshot %.12s", s->id) : 0;
}

int chains_check(const struct store_snapshot *snapshot, bool read_memory, struct err *err)
{
	// It is as good as what it builds upon.
	return walk(snapshot, check_one, &read_memory, err);
}

// --- Merging ---------------------------------------------------------------------------------

struct layers {
	struct memory_layer all[MEMORY_LAYERS_MAX]; // the newest first
	unsigned int nr;
};

static int take_layer(
	void *opaque, const struct store_snapshot *s, struct opened *one, struct err *err)
{
	struct layers *layers = opaque;

	(void)s;
	(void)err;
	layers->all[layers->nr++] = one->layer;
	one->layer = (struct memory_layer){.fd = -1};
	return 0;
}

static int open_chain(const struct store_snapshot *s, struct chain **ret_chain,
	uint64_t *ret_ram_bytes, bool *ret_compressed, struct err *err)
{
	struct layers *layers = calloc(1, sizeof(*layers));
	int r;

	if (!layers)
		return err_errno(err, -ENOMEM, "snapshot %.12s", s->id);
	r = walk(s, take_layer, layers, err);
	if (r == 0) {
		*ret_ram_bytes = layers->all[0].ram_bytes;
		*ret_compressed = layers->all[0].frame_ends;
		for (unsigned int i = 0; i < layers->nr / 2; i++) {
			struct memory_layer swap = layers->all[i];

			layers->all[i] = layers->all[layers->nr - 1 - i];
			layers->all[layers->nr - 1 - i] = swap;
		}
		r = chain_create(ret_chain, layers->all, layers->nr, *ret_ram_bytes, err);
	}
	for (unsigned int i = 0; i < layers->nr; i++)
		memory_close(&layers->all[i]);
	free(layers);
	return r;
}

static int write_synced(int dir_fd, const char *name, const struct buf *content, struct err *err)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	int r = fd < 0 ? -errno : fd_write_all(fd, content->data, content->len);

	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r < 0 ? err_errno(err, r, "%s", name) : 0;
}

// A state file with the sections of image, but for that of the memory, which is index.
static int write_state(int dir_fd, const struct image *image, const struct snapshot_id *parent,
	const struct buf *index, struct err *err)
{
	struct image_section sections[IMAGE_SECTIONS_MAX + 1];
	CLEANUP_BUF struct buf file = {0};
	unsigned int nr = 0;
	int r;

	for (unsigned int i = 0; i < image->nr; i++)
		if (strcmp(image->sections[i].name, MEMORY_SECTION) != 0)
			sections[nr++] = (struct image_section){image->sections[i].name,
				image->sections[i].data, image->sections[i].len};
	sections[nr++] = (struct image_section){MEMORY_SECTION, index->data, index->len};
	if (nr > IMAGE_SECTIONS_MAX)
		return err_set(err, -EBADMSG, "damaged: too many sections");
	r = image_write(&file, &image->id, parent, sections, nr, err);
	return r < 0 ? r : write_synced(dir_fd, STATE_FILE, &file, err);
}

int chains_index(int dir_fd, struct memory_stats *ret_stats, struct err *err)
{
	CLEANUP_FREE struct image *image = malloc(sizeof(*image));
	CLEANUP_FD int fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
	CLEANUP_BUF struct buf index = {0};
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	size_t len;
	int r;

	if (fd < 0 || !image)
		return err_errno(err, fd < 0 ? -errno : -ENOMEM, MEMORY_FILE_NAME);
	snprintf(path, sizeof(path), "/proc/self/fd/%d/" STATE_FILE, dir_fd);
	r = fd_read_file(path, IMAGE_FILE_BYTES_MAX, &text, &len, err);
	if (r == 0)
		r = image_parse(image, text, len, err);
	if (r == 0)
		r = memory_index(fd, &image->id, &index, ret_stats, err);
	if (r == 0 && fsync(fd) < 0)
		r = err_errno(err, -errno, MEMORY_FILE_NAME);
	if (r == 0 && unlinkat(dir_fd, STATE_FILE, 0) < 0)
		r = err_errno(err, -errno, STATE_FILE);
	return r < 0 ? r : write_state(dir_fd, image, &image->parent, &index, err);
}

// The memory file of what stands alone, and its state with the same sections but for that.
static int write_whole(int dir_fd, const struct memory_save *what, const struct image *image,
	struct memory_stats *ret_stats, struct err *err)
{
	CLEANUP_FD int fd = openat(
		dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	struct memory_save save = *what;
	CLEANUP_BUF struct buf index = {0};
	int r;

	if (fd < 0)
		return err_errno(err, -errno, MEMORY_FILE_NAME);
	save.fd = fd;
	r = memory_write(&save, &index, ret_stats, err);
	if (r == 0 && fsync(fd) < 0)
		r = err_errno(err, -errno, MEMORY_FILE_NAME);
	return r < 0 ? r : write_state(dir_fd, image, save.parent, &index, err);
}

static int write_merged(
	const struct store_snapshot *s, int dir_fd, struct memory_stats *ret_stats, struct err *err)
{
	static const struct snapshot_id none;
	struct memory_save save = {.fd = -1, .parent = &none};
	struct guest_mem mem = {0};
	struct guest_mem_range all = {GPA(0), 0};
	CLEANUP(close_one) struct opened newest = {.layer = {.fd = -1}};
	struct chain *chain = NULL;
	uint64_t *pages = NULL;
	int r = open_one(s, &newest, err);

	if (r == 0)
		r = open_chain(s, &chain, &all.size_bytes, &save.compress, err);
	if (r == 0)
		r = guest_mem_init(&mem, &all, 1, err);
	if (r == 0)
		r = chain_compressed(chain) ? chain_read(chain, &mem, err)
					    : chain_map(chain, &mem, err);
	if (r == 0) {
		chain_set_backed(chain, &mem);
		pages = mem.backed;
		save.mem = &mem;
		save.pages = pages;
		save.id = &newest.image.id;
		r = write_whole(dir_fd, &save, &newest.image, ret_stats, err);
	}
	chain_destroy(chain);
	guest_mem_fini(&mem);
	return r;
}

// All but what is written anew is the same file, under a second name.
static int link_rest(int from_fd, int to_fd, bool top, struct err *err)
{
	int list_fd = openat(from_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
	DIR *dir = list_fd < 0 ? NULL : fdopendir(list_fd);
	const struct dirent *e;

	if (!dir)
		return err_errno(err, -errno, "snapshot");
	while (r == 0 && (e = readdir(dir))) {
		CLEANUP_FD int from = -1;
		CLEANUP_FD int to = -1;
		struct stat st;

		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
			(top && (!strcmp(e->d_name, STATE_FILE) ||
					!strcmp(e->d_name, MEMORY_FILE_NAME) ||
					!strncmp(e->d_name, "manifest", 8))))
			continue;
		if (fstatat(from_fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
			r = err_errno(err, -errno, "%s", e->d_name);
		} else if (!top || !S_ISDIR(st.st_mode)) {
			if (linkat(from_fd, e->d_name, to_fd, e->d_name, 0) < 0)
				r = err_errno(err, -errno, "%s", e->d_name);
		} else {
			from = openat(from_fd, e->d_name,
				O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
			if (from < 0 || mkdirat(to_fd, e->d_name, 0700) < 0 ||
				(to = openat(
					 to_fd, e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
				r = err_errno(err, -errno, "%s", e->d_name);
			else
				r = link_rest(from, to, false, err);
			if (r == 0)
				fsync(to);
		}
	}
	closedir(dir);
	return r;
}

int chains_merge(const struct store_snapshot *snapshot, struct err *err)
{
	struct store_writer writer = {.dir_fd = -1};
	struct store_snapshot info = *snapshot;
	struct memory_stats stats = {0};
	CLEANUP_FD int old_fd = -1;
	int r;

	if (!snapshot->parent[0])
		return 0;
	r = store_begin(&writer, err);
	if (r < 0)
		return r;
	r = write_merged(snapshot, writer.dir_fd, &stats, err);
	if (r == 0) {
		old_fd = open(snapshot->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		r = old_fd < 0 ? err_errno(err, -errno, "%s", snapshot->dir)
			       : link_rest(old_fd, writer.dir_fd, true, err);
	}
	if (r == 0) {
		info.parent[0] = '\0';
		info.held_bytes = stats.held_pages * PAGE_BYTES;
		info.written_bytes = stats.written_bytes;
		r = store_replace(&writer, &info, err);
	}
	store_end(&writer);
	return r;
}

// --- Pruning ---------------------------------------------------------------------------------

struct prune {
	const char *machine;
	struct store_snapshot *all; // of the machine, the oldest first
	bool *stays;
	size_t nr;
};

static int collect(void *opaque, const struct store_snapshot *s)
{
	struct prune *prune = opaque;
	struct store_snapshot *more;

	if (strcmp(s->machine, prune->machine) != 0)
		return 0;
	more = reallocarray(prune->all, prune->nr + 1, sizeof(*more));
	if (!more)
		return -ENOMEM;
	prune->all = more;
	prune->all[prune->nr++] = *s;
	return 0;
}

static bool goes(const struct prune *prune, const char *id)
{
	ASSERT(prune->stays || prune->nr == 0);
	for (size_t i = 0; i < prune->nr; i++)
		if (!strcmp(prune->all[i].id, id))
			return !prune->stays[i];
	return false;
}

int chains_prune(const char *machine, unsigned int keep, struct err *err)
{
	struct prune prune = {.machine = machine};
	int r = store_each(collect, NULL, &prune, err);

	if (r == -ENOMEM)
		err_errno(err, r, "snapshots");
	if (r == 0 && prune.nr > 0) {
		prune.stays = calloc(prune.nr, sizeof(*prune.stays));
		if (!prune.stays)
			r = err_errno(err, -ENOMEM, "snapshots");
	}
	ASSERT(r < 0 || prune.stays || prune.nr == 0);
	for (size_t i = prune.nr; i-- > 0 && r == 0;) {
		prune.stays[i] = prune.all[i].tag[0] || keep > 0;
		keep -= !prune.all[i].tag[0] && keep > 0;
	}
	for (size_t i = 0; i < prune.nr && r == 0; i++)
		if (prune.stays[i] && goes(&prune, prune.all[i].parent))
			r = chains_merge(&prune.all[i], err);
	// The youngest first: children before their parents. What another machine's builds upon
	// stays.
	for (size_t i = prune.nr; i-- > 0 && r == 0;)
		if (!prune.stays[i]) {
			r = store_remove(&prune.all[i], err);
			r = r == -EBUSY || r == -ENOENT ? 0 : r;
		}
	free(prune.all);
	free(prune.stays);
	return r;
}
