// SPDX-License-Identifier: Apache-2.0
// Pools on disk; see the header. One thread.
#include "cli/pool_store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/home.h"
#include "vmm/base/fd.h"
#include "vmm/base/lock.h"

#define MAKING_PREFIX ".making-"
#define MARK          "pool" // in a machine's folder
#define LOCK          "lock"
#define DEFINITION    "pool.json"
#define STATS         "stats"
#define STATS_MAGIC   0x316c6f6f7079616dULL // "maypool1"
#define JSON_MAX      16384U

static const char *base_name(const char *dir)
{
	const char *slash = strrchr(dir, '/');

	return slash ? slash + 1 : dir;
}

// --- The pool --------------------------------------------------------------------------------

static int check_name(const char *name, struct err *err)
{
	struct err inner = {0};

	if (home_check_name(name, &inner) == 0)
		return 0;
	return err_set(err, -EINVAL, "'%.70s': a pool is named as machines are: %s", name,
		strstr(inner.msg, "must be"));
}

static int read_definition(struct pool *pool, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	const char *setup;
	json_t *json, *size;
	size_t len = 0;
	int r = home_format(path, err, "%s/" DEFINITION, pool->dir);

	if (r == 0)
		r = fd_read_file(path, JSON_MAX, &text, &len, err);
	if (r < 0)
		return r;
	json = json_loadb(text, len, 0, NULL);
	size = json_object_get(json, "size");
	setup = json_string_value(json_object_get(json, "setup"));
	if (!json_is_integer(size) || json_integer_value(size) < 1 ||
		json_integer_value(size) > POOL_SIZE_MAX || !setup ||
		strlen(setup) >= sizeof(pool->setup)) {
		r = err_set(err, -EBADMSG,
			"%s: not {\"size\": 1 to %d, \"setup\": \"…\"} (mayfly pool rm %s, and "
			"create it again)",
			path, POOL_SIZE_MAX, pool->name);
	} else {
		pool->size = (unsigned int)json_integer_value(size);
		strcpy(pool->setup, setup);
	}
	json_decref(json);
	return r;
}

int pool_open(const char *name, struct pool *ret, struct err *err)
{
	char pools[PATH_MAX], path[PATH_MAX];
	struct pool pool = {0};
	int r = check_name(name, err);

	if (r == 0)
		r = home_pools(pools, err);
	if (r == 0)
		r = home_format(pool.dir, err, "%s/%s", pools, name);
	if (r == 0)
		r = home_format(pool.snapshot, err, "%s/" POOL_SNAPSHOT, pool.dir);
	if (r == 0)
		r = home_format(path, err, "%s/vm.ini", pool.dir);
	if (r < 0)
		return r;
	if (access(pool.dir, F_OK) < 0 && errno == ENOENT)
		return err_set(
			err, -ENOENT, "there is no pool '%s' (mayfly pool ls lists them)", name);
	snprintf(pool.name, sizeof(pool.name), "%.63s", name);
	r = read_definition(&pool, err);
	if (r == 0)
		r = config_read(path, &pool.config, err);
	if (r < 0)
		return r;
	*ret = pool;
	return 0;
}

int pool_begin(struct pool *pool, int *ret_lock_fd, struct err *err)
{
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int lock_fd = -1;
	char pools[PATH_MAX], path[PATH_MAX];
	int r = check_name(pool->name, err);

	pool->dir[0] = '\0';
	if (r == 0)
		r = home_pools(pools, err);
	if (r == 0)
		r = home_format(path, err, "%s/%s", pools, pool->name);
	if (r < 0)
		return r;
	if (access(path, F_OK) == 0)
		return err_set(err, -EEXIST, "there is a pool '%s' already", pool->name);
	r = home_format(path, err, "%s/" MAKING_PREFIX "XXXXXX", pools);
	if (r < 0)
		return r;
	if (!mkdtemp(path))
		return err_errno(err, -errno, "making a folder in %s", pools);
	strcpy(pool->dir, path);
	dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	r = home_format(pool->snapshot, err, "%s/" POOL_SNAPSHOT, path);
	if (r == 0 && (dir_fd < 0 || mkdirat(dir_fd, "ready", 0700) < 0 ||
			      mkdirat(dir_fd, "golden", 0700) < 0))
		r = err_errno(err, -errno, "%s", path);
	if (r == 0)
		r = lock_fd = lock_take(dir_fd, LOCK, err);
	if (r < 0) {
		pool_abort(pool);
		return r;
	}
	*ret_lock_fd = TAKE_FD(lock_fd);
	return 0;
}

int pool_commit(struct pool *pool, struct err *err)
{
	char path[PATH_MAX], dir[PATH_MAX];
	json_t *json = json_pack("{s:i, s:s}", "size", (int)pool->size, "setup", pool->setup);
	int r = home_format(path, err, "%s/vm.ini", pool->dir);

	if (r == 0)
		r = config_write(path, &pool->config, err);
	if (r == 0)
		r = home_format(path, err, "%s/" DEFINITION, pool->dir);
	if (r == 0 && json_dump_file(json, path, JSON_INDENT(2)) < 0)
		r = err_set(err, -EIO, "%s cannot be written", path);
	json_decref(json);
	if (r == 0)
		r = home_format(dir, err, "%.*s/%s", (int)(base_name(pool->dir) - 1 - pool->dir),
			pool->dir, pool->name);
	if (r < 0)
		return r;
	if (renameat2(AT_FDCWD, pool->dir, AT_FDCWD, dir, RENAME_NOREPLACE) < 0)
		return errno == EEXIST
			       ? err_set(err, -EEXIST, "there is a pool '%s' already", pool->name)
			       : err_errno(err, -errno, "%s", dir);
	strcpy(pool->dir, dir);
	return home_format(pool->snapshot, err, "%s/" POOL_SNAPSHOT, dir);
}

void pool_abort(struct pool *pool)
{
	if (!strncmp(base_name(pool->dir), MAKING_PREFIX, strlen(MAKING_PREFIX)))
		(void)home_remove(pool->dir, NULL);
	pool->dir[0] = '\0';
}

int pool_sweep(struct err *err)
{
	char pools[PATH_MAX], path[PATH_MAX];
	const struct dirent *e;
	int removed = 0, r = home_pools(pools, err);
	DIR *dir = r < 0 ? NULL : opendir(pools);

	while (dir && (e = readdir(dir))) {
		struct stat st;

		// A lock that is not there yet: its maker gets a minute.
		if (strncmp(e->d_name, MAKING_PREFIX, strlen(MAKING_PREFIX)) != 0 ||
			home_format(path, NULL, "%s/%s/" LOCK, pools, e->d_name) < 0 ||
			lock_held(path, NULL) != 0 ||
			home_format(path, NULL, "%s/%s", pools, e->d_name) < 0 ||
			stat(path, &st) < 0 || st.st_mtim.tv_sec + 60 > time(NULL))
			continue;
		removed += home_remove(path, NULL) == 0;
	}
	if (dir)
		closedir(dir);
	return r < 0 ? r : removed;
}

int pool_served(const struct pool *pool, pid_t *ret_pid, struct err *err)
{
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/" LOCK, pool->dir);

	if (r < 0)
		return r;
	r = lock_held(path, ret_pid);
	return r < 0 ? err_errno(err, r, "%s", path) : r;
}

// --- Its machines ----------------------------------------------------------------------------

static int make_file(const char *path, const char *text, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	int r = fd < 0 ? -errno : fd_write_all(fd, text, strlen(text));

	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

int pool_claim(const struct pool *pool, const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/" MARK, dir);

	return r < 0 ? r : make_file(path, pool->name, err);
}

int pool_publish(const struct pool *pool, const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/ready/%s", pool->dir, base_name(dir));

	return r < 0 ? r : make_file(path, "", err);
}

bool pool_of(const char *dir, char ret_name[POOL_NAME_BYTES])
{
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX];
	ssize_t len;

	if (home_format(path, NULL, "%s/" MARK, dir) < 0)
		return false;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	len = fd < 0 ? -1 : fd_read_full(fd, ret_name, POOL_NAME_BYTES - 1);
	if (len <= 0)
		return false;
	ret_name[len] = '\0';
	return true;
}

static int take_owner(const char *dir, struct err *err)
{
	CLEANUP_FD int dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return dir_fd < 0 ? err_errno(err, -errno, "%s", dir)
			  : lock_take(dir_fd, HOME_OWNER_LOCK, err);
}

// One of those that wait, if it is to be had. Returns 1, or 0.
static int lease_one(
	const struct pool *pool, const char *name, char ret_dir[PATH_MAX], int *ret_lock_fd)
{
	CLEANUP_FD int lock_fd = -1;
	char path[PATH_MAX], dir[PATH_MAX];

	if (home_format(path, NULL, "%s/ready/%s", pool->dir, name) < 0 ||
		home_format(dir, NULL, "%.*s/vms/%s",
			(int)(strlen(pool->dir) - strlen("/pools/") - strlen(pool->name)),
			pool->dir, name) < 0)
		return 0;
	lock_fd = take_owner(dir, NULL);
	if (lock_fd < 0) {
		// There is no such machine any more.
		if (lock_fd == -ENOENT)
			unlink(path);
		return 0;
	}
	if (unlink(path) < 0) // another one had it, and has left it
		return 0;
	if (home_running(dir, NULL, NULL) != 1)
		return 0; // it has died while it waited: whoever looks next removes it
	strcpy(ret_dir, dir);
	*ret_lock_fd = TAKE_FD(lock_fd);
	return 1;
}

int pool_lease(const struct pool *pool, char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err)
{
	char path[PATH_MAX];
	const struct dirent *e;
	DIR *ready;
	int r = home_format(path, err, "%s/ready", pool->dir);

	if (r < 0)
		return r;
	ready = opendir(path);
	if (!ready)
		return err_errno(err, -errno, "%s", path);
	while (r == 0 && (e = readdir(ready)))
		if (e->d_name[0] != '.')
			r = lease_one(pool, e->d_name, ret_dir, ret_lock_fd);
	closedir(ready);
	return r;
}

struct tidy {
	const char *name; // NULL: all pools
	bool all;
	int (*end)(void *opaque, const char *dir, struct err *err);
	void *opaque;
	char pools[PATH_MAX];
	pid_t maker; // the process of the pool `name`; 0: none
	struct pool_count count;
	struct err *err;
};

static int remove_machine(struct tidy *t, const char *dir, const char *ready)
{
	int r = t->end(t->opaque, dir, t->err);

	if (r < 0)
		return r;
	if (home_remove(dir, t->err) < 0)
		return t->err ? t->err->code : -EIO;
	unlink(ready);
	t->count.removed++;
	return 0;
}

static int tidy_one(void *opaque, const char *name, const char *dir)
{
	CLEANUP_FD int lock_fd = -1;
	char pool[POOL_NAME_BYTES], ready[PATH_MAX], owner[PATH_MAX];
	struct tidy *t = opaque;
	pid_t owner_pid = 0;
	bool waits, ours;

	if (!pool_of(dir, pool) ||
		home_format(ready, NULL, "%s/%s/ready/%s", t->pools, pool, name) < 0 ||
		home_format(owner, NULL, "%s/" HOME_OWNER_LOCK, dir) < 0)
		return 0;
	ours = !t->name || !strcmp(t->name, pool);
	// Before the lock: one that does not wait now never will, unless its maker holds that.
	waits = access(ready, F_OK) == 0;
	if (lock_held(owner, &owner_pid) == 1) {
		t->count.leased_all += !waits;
		t->count.leased += ours && !waits && owner_pid != t->maker;
		return 0;
	}
	if (!ours)
		return 0;
	if (waits && !t->all && home_running(dir, NULL, NULL) == 1) {
		t->count.ready++;
		return 0;
	}
	lock_fd = t->end ? take_owner(dir, NULL) : -1;
	if (lock_fd < 0)
		return 0; // somebody has just taken it, or it is gone
	return remove_machine(t, dir, ready);
}

int pool_tidy(const char *name, bool all,
	int (*end)(void *opaque, const char *dir, struct err *err), void *opaque,
	struct pool_count *ret, struct err *err)
{
	struct tidy tidy = {.name = name, .all = all, .end = end, .opaque = opaque, .err = err};
	char lock[PATH_MAX];
	int r = home_pools(tidy.pools, err);

	if (r == 0 && name)
		r = home_format(lock, err, "%s/%s/" LOCK, tidy.pools, name);
	if (r == 0 && name)
		(void)lock_held(lock, &tidy.maker);
	if (r == 0)
		r = home_each(tidy_one, &tidy, err);
	if (r < 0)
		return r;
	*ret = tidy.count;
	return 0;
}

// --- What was counted ------------------------------------------------------------------------

struct stats_file {
	uint64_t magic;
	struct pool_stats stats;
};

static int open_stats(const struct pool *pool, struct stats_file *ret, struct err *err)
{
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX];
	int r = home_format(path, err, "%s/" STATS, pool->dir);

	if (r < 0)
		return r;
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0 || flock(fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", path);
	// One that is new, or of another version, begins anew.
	if (fd_pread_full(fd, ret, sizeof(*ret), 0) != sizeof(*ret) || ret->magic != STATS_MAGIC)
		*ret = (struct stats_file){.magic = STATS_MAGIC};
	return TAKE_FD(fd);
}

void pool_note(const struct pool *pool, enum pool_event event, uint64_t took_ns)
{
	struct stats_file file = {0};
	CLEANUP_FD int fd = open_stats(pool, &file, NULL);
	struct pool_stats *s = &file.stats;

	if (fd < 0)
		return;
	switch (event) {
	case POOL_HIT:
		s->lease_sample_us[s->hits++ % POOL_SAMPLES] = took_ns / 1000;
		break;
	case POOL_MISS:
		s->misses++;
		break;
	case POOL_REFILL:
		s->refill_sample_us[s->refills++ % POOL_SAMPLES] = took_ns / 1000;
		s->refill_us += took_ns / 1000;
		break;
	case POOL_FAILURE:
		s->failures++;
	}
	if (pwrite(fd, &file, sizeof(file), 0) != (ssize_t)sizeof(file) &&
		ftruncate(fd, 0) < 0) // begins anew
		return;
}

int pool_stats(const struct pool *pool, struct pool_stats *ret, struct err *err)
{
	struct stats_file file = {0};
	CLEANUP_FD int fd = open_stats(pool, &file, err);

	if (fd < 0)
		return fd;
	*ret = file.stats;
	return 0;
}

static int by_size(const void *a, const void *b)
{
	uint64_t x, y;

	memcpy(&x, a, sizeof(x));
	memcpy(&y, b, sizeof(y));
	return x < y ? -1 : x > y;
}

uint64_t pool_percentile(const uint64_t samples[POOL_SAMPLES], uint64_t nr, unsigned int percent)
{
	uint64_t sorted[POOL_SAMPLES];

	nr = MIN(nr, (uint64_t)POOL_SAMPLES);
	if (nr == 0)
		return 0;
	memcpy(sorted, samples, sizeof(sorted));
	qsort(sorted, (size_t)nr, sizeof(sorted[0]), by_size);
	return sorted[(nr * percent + 99) / 100 - 1];
}
