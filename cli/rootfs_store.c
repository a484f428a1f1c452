// SPDX-License-Identifier: Apache-2.0
// The images; see the header. One thread.
#include "cli/rootfs_store.h"

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

#include "cli/home.h"
#include "cli/store.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

#define FORMAT         1
#define MANIFEST       "manifest.json"
#define MANIFEST_BYTES (1U << 20)
#define MAKING_PREFIX  "making-"
#define NAMES          "names"
#define ID_PREFIX_MIN  6
#define BLOCK_BYTES    4096U
#define NAMES_MAX      1024 // bytes of all names of an image, for show

void rootfs_fini(struct rootfs *image)
{
	json_decref(image->config);
	image->config = NULL;
}

int rootfs_check_name(const char *name, struct err *err)
{
	struct err inner = {0};

	if (home_check_name(name, &inner) == 0)
		return 0;
	return err_set(err, -EINVAL,
		"'%.70s' is no name of an image: letters, digits, '.', '_' and '-', at most %d",
		name, HOME_NAME_MAX);
}

static bool is_id(const char *text)
{
	return strlen(text) == SHA256_TEXT_LEN &&
	       strspn(text, "0123456789abcdef") == SHA256_TEXT_LEN;
}

static int joined(char ret[PATH_MAX], const char *dir, const char *name, struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

// --- Checksums -------------------------------------------------------------------------------

static bool is_zero(const uint8_t *block, size_t len)
{
	return block[0] == 0 && memcmp(block, block + 1, len - 1) == 0;
}

static int add_data(
	struct sha256_ctx *sha, int fd, off_t from, off_t to, uint64_t *data_bytes, struct err *err)
{
	static uint8_t buf[256 * BLOCK_BYTES];

	while (from < to) {
		size_t want = (size_t)MIN((uint64_t)(to - from), (uint64_t)sizeof(buf));
		ssize_t n = fd_pread_full(fd, buf, want, from);

		if (n < 0 || (size_t)n < want)
			return err_errno(err, n < 0 ? (int)n : -EIO, "reading " ROOTFS_DISK);
		for (size_t at = 0; at < want; at += BLOCK_BYTES) {
			size_t len = MIN(want - at, (size_t)BLOCK_BYTES);
			uint8_t number[8];

			if (is_zero(buf + at, len))
				continue;
			put_le64(number, ((uint64_t)from + at) / BLOCK_BYTES);
			sha256_update(sha, sizeof(number), number);
			sha256_update(sha, len, buf + at);
			*data_bytes += len;
		}
		from += n;
	}
	return 0;
}

int rootfs_checksum(int fd, bool punch, char ret[SHA256_TEXT_LEN + 1], uint64_t *ret_data_bytes,
	struct err *err)
{
	uint64_t data_bytes = 0;
	struct sha256_ctx sha;
	uint8_t length[8];
	off_t data = 0, hole = 0, end;
	struct stat st;
	int r = 0;

	if (fstat(fd, &st) < 0)
		return err_errno(err, -errno, ROOTFS_DISK);
	end = st.st_size;
	sha256_init(&sha);
	put_le64(length, (uint64_t)end);
	sha256_update(&sha, sizeof(length), length);
	while (r == 0 && hole < end) {
		data = lseek(fd, hole, SEEK_DATA);
		if (data < 0 && errno != ENXIO)
			return err_errno(err, -errno, ROOTFS_DISK);
		if (data < 0)
			data = end;
		data -= data % BLOCK_BYTES;
		// What is set aside and was never written looks like a hole, too.
		if (punch && data > hole)
			fallocate(
				fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, hole, data - hole);
		if (data >= end)
			break;
		hole = lseek(fd, data, SEEK_HOLE);
		if (hole < 0)
			return err_errno(err, -errno, ROOTFS_DISK);
		hole = MIN(hole + (BLOCK_BYTES - hole % BLOCK_BYTES) % BLOCK_BYTES, end);
		r = add_data(&sha, fd, data, hole, &data_bytes, err);
	}
	if (r < 0)
		return r;
	sha256_text(&sha, ret);
	*ret_data_bytes = data_bytes;
	return 0;
}

// --- Manifests -------------------------------------------------------------------------------

// What the id stands for.
static int make_id(const struct rootfs *image, char ret[SHA256_TEXT_LEN + 1])
{
	char *text = json_dumps(image->config, JSON_COMPACT | JSON_SORT_KEYS);
	struct sha256_ctx sha;

	if (!text)
		return -ENOMEM;
	sha256_init(&sha);
	sha256_update(&sha, SHA256_TEXT_LEN, (const uint8_t *)image->root_sha256);
	sha256_update(&sha, strlen(text), (const uint8_t *)text);
	sha256_text(&sha, ret);
	free(text);
	return 0;
}

static bool is_strings(const json_t *array)
{
	json_t *item;
	size_t i;

	if (!json_is_array(array))
		return false;
	json_array_foreach(array, i, item) if (!json_is_string(item)) return false;
	return true;
}

static bool good_config(json_t *config)
{
	const char *key;
	json_t *value, *item;
	size_t i;

	if (!json_is_object(config))
		return false;
	json_object_foreach(config, key, value)
	{
		if (!strcmp(key, "user") || !strcmp(key, "workdir")) {
			if (!json_is_string(value))
				return false;
			continue;
		}
		if ((strcmp(key, "env") != 0 && strcmp(key, "entrypoint") != 0 &&
			    strcmp(key, "cmd") != 0) ||
			!is_strings(value))
			return false;
		if (strcmp(key, "env") != 0)
			continue;
		json_array_foreach(value, i, item)
		{
			const char *equals = strchr(json_string_value(item), '=');

			if (!equals || equals == json_string_value(item))
				return false;
		}
	}
	return true;
}

static int take_text(json_t *manifest, const char *key, char *ret, size_t size)
{
	const char *text = json_string_value(json_object_get(manifest, key));

	if (!text || strlen(text) >= size)
		return -EBADMSG;
	// They are printed.
	for (const char *at = text; *at; at++)
		if ((unsigned char)*at < ' ' || *at == 0x7f)
			return -EBADMSG;
	memcpy(ret, text, strlen(text) + 1);
	return 0;
}

int rootfs_parse_manifest(const char *text, size_t len, struct rootfs *ret_image, struct err *err)
{
	struct rootfs image = {0};
	char id[SHA256_TEXT_LEN + 1];
	json_t *manifest = json_loadb(text, len, 0, NULL);
	json_t *config = json_object_get(manifest, "config");
	int r = 0;

	if (json_integer_value(json_object_get(manifest, "format")) != FORMAT)
		r = err_set(err, -EBADMSG, "not a manifest of format %d", FORMAT);
	else if (take_text(manifest, "id", image.id, sizeof(image.id)) < 0 ||
		 take_text(manifest, "root_sha256", image.root_sha256, sizeof(image.root_sha256)) <
			 0 ||
		 take_text(manifest, "source", image.source, sizeof(image.source)) < 0 ||
		 !is_id(image.id) || !is_id(image.root_sha256) || !good_config(config))
		r = err_set(err, -EBADMSG, "damaged");
	if (r == 0) {
		image.created_s = json_integer_value(json_object_get(manifest, "created_s"));
		image.size_bytes = (uint64_t)json_integer_value(
			json_object_get(manifest, "size_bytes"));
		image.data_bytes = (uint64_t)json_integer_value(
			json_object_get(manifest, "data_bytes"));
		image.config = json_incref(config);
		r = make_id(&image, id);
		if (r < 0)
			r = err_errno(err, r, "manifest");
		else if (strcmp(id, image.id) != 0)
			r = err_set(err, -EBADMSG, "its id is not that of what it says");
	}
	json_decref(manifest);
	if (r < 0) {
		rootfs_fini(&image);
		return r;
	}
	*ret_image = image;
	return 0;
}

static int write_manifest(int dir_fd, const struct rootfs *image, struct err *err)
{
	CLEANUP_FD int fd = openat(dir_fd, MANIFEST, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	json_t *manifest = json_pack("{s:i, s:s, s:s, s:s, s:I, s:I, s:I, s:O}", "format", FORMAT,
		"id", image->id, "root_sha256", image->root_sha256, "source", image->source,
		"created_s", (json_int_t)image->created_s, "size_bytes",
		(json_int_t)image->size_bytes, "data_bytes", (json_int_t)image->data_bytes,
		"config", image->config);
	int r = 0;

	if (fd < 0)
		r = err_errno(err, -errno, MANIFEST);
	else if (!manifest || json_dumpfd(manifest, fd, JSON_INDENT(2)) < 0 || fsync(fd) < 0)
		r = err_errno(err, -EIO, MANIFEST);
	json_decref(manifest);
	return r;
}

// --- Reading ---------------------------------------------------------------------------------

static int read_image(const char *store, const char *id, struct rootfs *ret_image, struct err *err)
{
	CLEANUP_ROOTFS struct rootfs image = {0};
	CLEANUP_FREE char *text = NULL;
	char dir[PATH_MAX], path[PATH_MAX];
	size_t len = 0;
	int r = joined(dir, store, id, err);

	if (r == 0)
		r = joined(path, dir, MANIFEST, err);
	if (r == 0)
		r = fd_read_file(path, MANIFEST_BYTES, &text, &len, err);
	if (r < 0)
		return r;
	r = rootfs_parse_manifest(text, len, &image, err);
	if (r == 0 && strcmp(image.id, id) != 0)
		r = err_set(err, -EBADMSG, "it is another image's");
	if (r < 0)
		return err_wrap(err, r, "%s", path);
	memcpy(image.dir, dir, sizeof(dir));
	*ret_image = image;
	image.config = NULL;
	return 0;
}

// The id that a name stands for. -ENOENT.
static int read_name(const char *store, const char *name, char ret_id[SHA256_TEXT_LEN + 1])
{
	char path[PATH_MAX], target[SHA256_TEXT_LEN + 8];
	ssize_t n;

	if (snprintf(path, sizeof(path), "%s/" NAMES "/%s", store, name) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	n = readlink(path, target, sizeof(target));
	if (n != 3 + SHA256_TEXT_LEN || strncmp(target, "../", 3) != 0)
		return n < 0 ? -errno : -EBADMSG;
	target[n] = '\0';
	if (!is_id(target + 3))
		return -EBADMSG;
	memcpy(ret_id, target + 3, SHA256_TEXT_LEN + 1);
	return 0;
}

static int visible(const struct dirent *e)
{
	return e->d_name[0] != '.';
}

static int find_id(
	const char *store, const char *digits, char ret_id[SHA256_TEXT_LEN + 1], struct err *err)
{
	size_t len = strlen(digits);
	unsigned int found = 0;
	struct dirent **list;
	int n;

	if (len < ID_PREFIX_MIN || strspn(digits, "0123456789abcdef") != len)
		return err_set(err, -ENOENT,
			"there is no image '%.64s' (mayfly image ls lists them)", digits);
	n = scandir(store, &list, visible, alphasort);
	for (int i = 0; i < n; i++) {
		if (is_id(list[i]->d_name) && !strncmp(list[i]->d_name, digits, len)) {
			memcpy(ret_id, list[i]->d_name, SHA256_TEXT_LEN + 1);
			found++;
		}
		free(list[i]);
	}
	if (n >= 0)
		free(list);
	if (found == 1)
		return 0;
	return found ? err_set(err, -EINVAL, "'%.64s' is how several images begin", digits)
		     : err_set(err, -ENOENT,
			       "there is no image '%.64s' (mayfly image ls lists them)", digits);
}

int rootfs_find(const char *name, struct rootfs *ret_image, struct err *err)
{
	char store[PATH_MAX], id[SHA256_TEXT_LEN + 1];
	int r = home_images(store, err);

	if (r == 0 && !is_id(name))
		r = rootfs_check_name(name, err);
	if (r < 0)
		return r;
	if (read_name(store, name, id) < 0)
		r = find_id(store, name, id, err);
	return r < 0 ? r : read_image(store, id, ret_image, err);
}

int rootfs_of_machine(const struct config *config, struct rootfs *ret_image, struct err *err)
{
	char store[PATH_MAX], id[SHA256_TEXT_LEN + 1];
	const char *file = config->disks[0].file;
	size_t len;
	int r;

	if (config->root != CONFIG_ROOT_DISK)
		return 0;
	r = home_images(store, err);
	if (r < 0)
		return r;
	len = strlen(store);
	if (strncmp(file, store, len) != 0 || file[len] != '/' ||
		strlen(file + len) != 1 + SHA256_TEXT_LEN + sizeof("/" ROOTFS_DISK) - 1)
		return 0;
	memcpy(id, file + len + 1, SHA256_TEXT_LEN);
	id[SHA256_TEXT_LEN] = '\0';
	if (!is_id(id) || strcmp(file + len + 1 + SHA256_TEXT_LEN, "/" ROOTFS_DISK) != 0)
		return 0;
	r = read_image(store, id, ret_image, err);
	return r < 0 ? r : 1;
}

// The names of an image, with ", " between them. One that cannot be read might be its own.
static int names_of(const char *store, const char *id, char ret[NAMES_MAX], struct err *err)
{
	char path[PATH_MAX], its[SHA256_TEXT_LEN + 1];
	struct dirent **list;
	size_t len = 0;
	int n, r = joined(path, store, NAMES, err);

	ret[0] = '\0';
	if (r < 0)
		return r;
	n = scandir(path, &list, visible, alphasort);
	if (n < 0)
		return errno == ENOENT ? 0 : err_errno(err, -errno, "%s", path);
	for (int i = 0; i < n; i++) {
		const char *name = list[i]->d_name;
		const int bad = read_name(store, name, its);

		if (bad < 0 && bad != -EBADMSG && bad != -ENOENT && bad != -EINVAL && r == 0)
			r = err_errno(err, bad, "%s/%s", path, name);
		if (bad == 0 && !strcmp(its, id) && len + strlen(name) + 3 < NAMES_MAX)
			len += (size_t)snprintf(
				ret + len, NAMES_MAX - len, "%s%s", len ? ", " : "", name);
		free(list[i]);
	}
	free(list);
	return r;
}

static int by_age(const void *a, const void *b)
{
	const struct rootfs *x = a, *y = b;

	if (x->created_s != y->created_s)
		return x->created_s < y->created_s ? -1 : 1;
	return strcmp(x->id, y->id);
}

int rootfs_each(int (*each)(void *opaque, const struct rootfs *image, const char *names),
	void (*broken)(void *opaque, const char *dir, const struct err *err), void *opaque,
	struct err *err)
{
	char store[PATH_MAX], path[PATH_MAX], names[NAMES_MAX];
	struct dirent **list;
	struct rootfs *all;
	size_t nr = 0;
	int n, r = home_images(store, err);

	if (r < 0)
		return r;
	n = scandir(store, &list, visible, alphasort);
	if (n < 0)
		return err_errno(err, -errno, "%s", store);
	all = calloc((size_t)n + 1, sizeof(*all));
	for (int i = 0; i < n; i++) {
		struct err bad = {0};

		if (all && is_id(list[i]->d_name)) {
			if (read_image(store, list[i]->d_name, &all[nr], &bad) == 0)
				nr++;
			else if (joined(path, store, list[i]->d_name, NULL) == 0)
				broken(opaque, path, &bad);
		}
		free(list[i]);
	}
	free(list);
	if (!all)
		return err_errno(err, -ENOMEM, "%s", store);
	qsort(all, nr, sizeof(*all), by_age);
	for (size_t i = 0; i < nr; i++) {
		if (r >= 0) {
			r = names_of(store, all[i].id, names, err);
			if (r == 0)
				r = each(opaque, &all[i], names);
		}
		rootfs_fini(&all[i]);
	}
	free(all);
	return MIN(r, 0);
}

// --- Writing ---------------------------------------------------------------------------------

// Who makes one holds a lock on its folder: without it, nobody is there to finish it.
static int sweep(const char *store)
{
	DIR *dir = opendir(store);
	const struct dirent *e;
	int swept = 0;

	while (dir && (e = readdir(dir))) {
		char path[PATH_MAX];
		CLEANUP_FD int fd = -1;

		if (strncmp(e->d_name, MAKING_PREFIX, strlen(MAKING_PREFIX)) != 0 ||
			joined(path, store, e->d_name, NULL) < 0)
			continue;
		fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
		if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
			swept += home_remove(path, NULL) == 0;
	}
	if (dir)
		closedir(dir);
	return swept;
}

// Locks out others who make or remove images, until *ret_fd, the caller's, is closed.
static int lock_store(const char *store, int *ret_fd, struct err *err)
{
	CLEANUP_FD int fd = open(store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0 || flock(fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", store);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

int rootfs_begin(struct rootfs_writer *ret_writer, struct err *err)
{
	struct rootfs_writer writer = {.dir_fd = -1};
	CLEANUP_FD int store_fd = -1;
	int r = home_images(writer.store, err);

	if (r == 0)
		r = lock_store(writer.store, &store_fd, err);
	if (r < 0)
		return r;
	sweep(writer.store);
	r = joined(writer.dir, writer.store, MAKING_PREFIX "XXXXXX", err);
	if (r < 0)
		return r;
	if (!mkdtemp(writer.dir))
		return err_errno(err, -errno, "%s", writer.store);
	writer.dir_fd = open(writer.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (writer.dir_fd < 0 || flock(writer.dir_fd, LOCK_EX) < 0) {
		r = err_errno(err, -errno, "%s", writer.dir);
		rmdir(writer.dir);
		fd_close(&writer.dir_fd);
		return r;
	}
	*ret_writer = writer;
	return 0;
}

static int set_name(const char *store, const char *name, const char *id, struct err *err)
{
	char path[PATH_MAX], temp[PATH_MAX], target[SHA256_TEXT_LEN + 4];
	int r = joined(path, store, NAMES, err);

	if (r < 0)
		return r;
	if (mkdir(path, 0700) < 0 && errno != EEXIST)
		return err_errno(err, -errno, "%s", path);
	if (snprintf(path, sizeof(path), "%s/" NAMES "/%s", store, name) >= (int)sizeof(path) ||
		snprintf(temp, sizeof(temp), "%s/" NAMES "/.new", store) >= (int)sizeof(temp))
		return err_errno(err, -ENAMETOOLONG, "%s", store);
	snprintf(target, sizeof(target), "../%s", id);
	unlink(temp); // of one that was killed
	if (symlink(target, temp) < 0 || rename(temp, path) < 0)
		return err_errno(err, -errno, "%s", path);
	return 0;
}

int rootfs_commit(
	struct rootfs_writer *writer, struct rootfs *image, const char *name, struct err *err)
{
	CLEANUP_FD int root_fd = openat(writer->dir_fd, ROOTFS_DISK, O_RDONLY | O_CLOEXEC);
	CLEANUP_FD int store_fd = -1;
	char final[PATH_MAX];
	int r;

	if (root_fd < 0 || fchmod(root_fd, 0400) < 0 || fsync(root_fd) < 0)
		return err_errno(err, -errno, "%s/" ROOTFS_DISK, writer->dir);
	if (!good_config(image->config))
		return err_set(err, -EBADMSG,
			"the image's configuration (env, user, workdir, entrypoint, cmd) makes no "
			"sense");
	image->created_s = (int64_t)time(NULL);
	r = make_id(image, image->id);
	if (r < 0)
		return err_errno(err, r, "manifest");
	r = write_manifest(writer->dir_fd, image, err);
	if (r == 0)
		r = joined(final, writer->store, image->id, err);
	if (r == 0)
		r = lock_store(writer->store, &store_fd, err);
	if (r < 0)
		return r;
	if (fsync(writer->dir_fd) < 0)
		return err_errno(err, -errno, "%s", writer->dir);
	if (rename(writer->dir, final) == 0)
		writer->dir[0] = '\0';
	else if (errno != EEXIST && errno != ENOTEMPTY)
		return err_errno(err, -errno, "%s", final);
	memcpy(image->dir, final, sizeof(final));
	r = set_name(writer->store, name, image->id, err);
	fsync(store_fd);
	return r;
}

void rootfs_end(struct rootfs_writer *writer)
{
	if (writer->dir[0])
		(void)home_remove(writer->dir, NULL);
	if (writer->dir_fd > 0)
		fd_close(&writer->dir_fd);
	*writer = (struct rootfs_writer){.dir_fd = -1};
}

// --- Who needs it ----------------------------------------------------------------------------

struct need {
	const char *prefix; // of the paths of the image's files
	char by[HOME_NAME_MAX + 32];
};

static bool config_needs(const char *dir, struct need *need)
{
	struct config config;
	char ini[PATH_MAX];
	int r;

	if (joined(ini, dir, "vm.ini", NULL) < 0)
		return false;
	// What cannot be read may need it.
	r = config_read(ini, &config, NULL);
	if (r < 0)
		return r != -ENOENT;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		if (!strncmp(config.disks[i].file, need->prefix, strlen(need->prefix)))
			return true;
	return false;
}

static int machine_needs(void *opaque, const char *name, const char *dir)
{
	struct need *need = opaque;

	if (!need->by[0] && config_needs(dir, need))
		snprintf(need->by, sizeof(need->by), "machine '%.*s'", HOME_NAME_MAX, name);
	return 0;
}

static int pool_needs(void *opaque, const char *name, const char *dir)
{
	struct need *need = opaque;

	if (!need->by[0] && config_needs(dir, need))
		snprintf(need->by, sizeof(need->by), "pool '%.*s'", HOME_NAME_MAX, name);
	return 0;
}

static int snapshot_needs(void *opaque, const struct store_snapshot *snapshot)
{
	struct need *need = opaque;

	if (!need->by[0] && config_needs(snapshot->dir, need))
		snprintf(need->by, sizeof(need->by), "snapshot %.12s", snapshot->id);
	return 0;
}

// Removes an image that has no name any more. The store is locked.
static int remove_unneeded(const char *store, const char *id, struct err *err)
{
	char dir[PATH_MAX], prefix[PATH_MAX], dying[PATH_MAX];
	struct need need = {.prefix = prefix, .by = ""};
	int r = joined(dir, store, id, err);

	if (r == 0)
		r = joined(prefix, dir, "", err);
	if (r == 0)
		r = home_each(machine_needs, &need, err);
	if (r == 0)
		r = home_each_pool(pool_needs, &need, err);
	if (r == 0)
		r = store_each(snapshot_needs, NULL, &need, err);
	if (r < 0)
		return r;
	if (need.by[0])
		return err_set(err, -EBUSY, "image %.12s is needed by %s", id, need.by);
	// Out of sight at once, and swept if we do not come to the end.
	if (snprintf(dying, sizeof(dying), "%s/" MAKING_PREFIX "%s", store, id) >=
		(int)sizeof(dying))
		return err_errno(err, -ENAMETOOLONG, "%s", store);
	if (rename(dir, dying) < 0)
		return errno == ENOENT ? 0 : err_errno(err, -errno, "%s", dir);
	return home_remove(dying, err);
}

// Takes away each of the names, with ", " between them.
static int remove_names(const char *store, char *names, struct err *err)
{
	char path[PATH_MAX];
	char *name;

	while (names && names[0]) {
		name = strsep(&names, ",");
		name += strspn(name, " ");
		if (snprintf(path, sizeof(path), "%s/" NAMES "/%s", store, name) >=
			(int)sizeof(path))
			return err_errno(err, -ENAMETOOLONG, "%s", store);
		if (unlink(path) < 0)
			return err_errno(err, -errno, "%s", path);
	}
	return 0;
}

int rootfs_remove(const char *name, struct err *err)
{
	char store[PATH_MAX], id[SHA256_TEXT_LEN + 1], names[NAMES_MAX] = "";
	CLEANUP_FD int store_fd = -1;
	int r = home_images(store, err);

	if (r == 0 && !is_id(name))
		r = rootfs_check_name(name, err);
	if (r == 0)
		r = lock_store(store, &store_fd, err);
	if (r < 0)
		return r;
	r = read_name(store, name, id);
	if (r == 0) {
		r = names_of(store, id, names, err);
		if (r < 0)
			return r;
		if (strcmp(names, name) != 0) { // another one keeps it
			snprintf(names, sizeof(names), "%s", name);
			return remove_names(store, names, err);
		}
	} else {
		r = find_id(store, name, id, err);
		if (r == 0)
			r = names_of(store, id, names, err);
		if (r < 0)
			return r;
	}
	r = remove_unneeded(store, id, err);
	return r < 0 ? r : remove_names(store, names, err);
}

struct unnamed {
	char (*ids)[SHA256_TEXT_LEN + 1];
	size_t nr;
};

static int note_unnamed(void *opaque, const struct rootfs *image, const char *names)
{
	struct unnamed *unnamed = opaque;
	void *more;

	if (names[0])
		return 0;
	more = reallocarray(unnamed->ids, unnamed->nr + 1, sizeof(*unnamed->ids));
	if (!more)
		return -ENOMEM;
	unnamed->ids = more;
	memcpy(unnamed->ids[unnamed->nr++], image->id, sizeof(image->id));
	return 0;
}

static void ignore_broken(void *opaque, const char *dir, const struct err *err)
{
	(void)opaque;
	(void)dir;
	(void)err;
}

int rootfs_gc(int *ret_leftovers, struct err *err)
{
	struct unnamed unnamed = {0};
	CLEANUP_FD int store_fd = -1;
	char store[PATH_MAX];
	int removed = 0, r = home_images(store, err);

	if (r == 0)
		r = lock_store(store, &store_fd, err);
	if (r < 0)
		return r;
	*ret_leftovers = sweep(store);
	r = rootfs_each(note_unnamed, ignore_broken, &unnamed, err);
	for (size_t i = 0; r == 0 && i < unnamed.nr; i++) {
		r = remove_unneeded(store, unnamed.ids[i], err);
		removed += r == 0;
		if (r == -EBUSY)
			r = 0;
	}
	free(unnamed.ids);
	return r < 0 ? r : removed;
}
