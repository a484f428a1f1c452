// SPDX-License-Identifier: Apache-2.0
// The log of what agents did; see the header. Any thread: what is shared is on the disk, under a
// lock.
#include "mcp/audit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mcp/redact.h"
#include "vmm/base/fd.h"
#include "vmm/base/memory_lack.h"

#define NAME "audit.jsonl"
#define LOCK "audit.lock"

// A line ends so; the hash is that of all that is before the comma.
#define HASH_KEY ",\"hash\":\""
#define HASH_END "\"}"
#define TAIL_LEN (strlen(HASH_KEY) + 64 + strlen(HASH_END))

static const char no_hash[AUDIT_HASH_BYTES] =
	"0000000000000000000000000000000000000000000000000000000000000000";

// --- Lines -----------------------------------------------------------------------------------

// The record of a line, the caller's, and its hash, which has been checked.
static json_t *parse_line(const char *line, size_t len, char ret_hash[AUDIT_HASH_BYTES])
{
	const char *tail = line + len - TAIL_LEN;
	char hash[AUDIT_HASH_BYTES];

	if (len <= TAIL_LEN || memcmp(tail, HASH_KEY, strlen(HASH_KEY)) != 0)
		return NULL;
	redact_digest(line, len - TAIL_LEN, hash);
	if (memcmp(tail + strlen(HASH_KEY), hash, 64) != 0)
		return NULL;
	memcpy(ret_hash, hash, sizeof(hash));
	return json_loadb(line, len, JSON_REJECT_DUPLICATES, NULL);
}

// The last line of fd that is whole: its hash and number. 1, or 0 if there is none, or a negative
// errno. *ret_end is where the next line belongs.
static int last_line(int fd, char ret_hash[AUDIT_HASH_BYTES], uint64_t *ret_seq, off_t *ret_end)
{
	CLEANUP_FREE char *text = malloc(2 * AUDIT_LINE_BYTES);
	struct stat st;
	json_t *record;
	char *end, *start;
	off_t from;
	ssize_t n;

	if (!text)
		return -ENOMEM;
	if (fstat(fd, &st) < 0)
		return -errno;
	from = MAX(st.st_size - (off_t)(2 * AUDIT_LINE_BYTES), (off_t)0);
	n = fd_pread_full(fd, text, 2 * AUDIT_LINE_BYTES, from);
	if (n < 0)
		return (int)n;
	// What has no end was being written when the host died.
	end = n ? memrchr(text, '\n', (size_t)n) : NULL;
	*ret_end = end ? from + (end + 1 - text) : from;
	if (!end)
		return from ? -EBADMSG : 0;
	start = memrchr(text, '\n', (size_t)(end - text));
	start = start ? start + 1 : text;
	record = parse_line(start, (size_t)(end - start), ret_hash);
	if (!record)
		return -EBADMSG;
	*ret_seq = (uint64_t)json_integer_value(json_object_get(record, "seq"));
	json_decref(record);
	return 1;
}

static int number_record(json_t *record, uint64_t seq, const char *prev)
{
	struct timespec now;
	char when[64];
	struct tm tm;
	size_t len;

	clock_gettime(CLOCK_REALTIME, &now);
	gmtime_r(&now.tv_sec, &tm);
	len = strftime(when, sizeof(when), "%FT%T", &tm);
	snprintf(when + len, sizeof(when) - len, ".%03ldZ", now.tv_nsec / 1000000);
	json_object_set_new(record, "seq", json_integer((json_int_t)seq));
	json_object_set_new(record, "time", json_string(when));
	return json_object_set_new(record, "prev", json_string(prev));
}

// --- Appending -------------------------------------------------------------------------------

static int open_in(int dir_fd, const char *name, int flags)
{
	int fd = openat(dir_fd, name, flags | O_CLOEXEC | O_NOFOLLOW, 0600);

	return fd < 0 ? -errno : fd;
}

static int open_dir(const char *dir, struct err *err)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return fd < 0 ? err_errno(err, -errno, "%s", dir) : fd;
}

static int open_locked(int dir_fd, struct err *err)
{
	CLEANUP_FD int fd = open_in(dir_fd, LOCK, O_RDWR | O_CREAT);

	if (fd < 0)
		return err_errno(err, fd, LOCK);
	while (flock(fd, LOCK_EX) < 0)
		if (errno != EINTR)
			return err_errno(err, -errno, LOCK);
	return TAKE_FD(fd);
}

static void name_of(unsigned int age, char ret[32])
{
	if (age)
		snprintf(ret, 32, NAME ".%u", age);
	else
		snprintf(ret, 32, NAME);
}

// Each file grows older by one; the oldest goes.
static int rotate(int dir_fd, int *fd)
{
	char from[32], to[32];

	fdatasync(*fd);
	for (unsigned int age = AUDIT_OLD_FILES; age-- > 0;) {
		name_of(age, from);
		name_of(age + 1, to);
		if (renameat(dir_fd, from, dir_fd, to) < 0 && errno != ENOENT)
			return -errno;
	}
	fd_close(fd);
	*fd = open_in(dir_fd, NAME, O_RDWR | O_CREAT | O_APPEND);
	return MIN(*fd, 0);
}

static int write_line(int fd, json_t *record, off_t end)
{
	const unsigned int lacks = memory_lacks();
	CLEANUP_FREE char *text = json_dumps(record, JSON_COMPACT);
	size_t len = text ? strlen(text) : 0;
	CLEANUP_FREE char *line = malloc(len + TAIL_LEN + 2);
	char hash[AUDIT_HASH_BYTES];
	int r;

	if (!text || !line || memory_lacks() != lacks)
		return -ENOMEM;
	if (len + TAIL_LEN + 1 > AUDIT_LINE_BYTES)
		return -EFBIG;
	len--; // the brace
	redact_digest(text, len, hash);
	memcpy(line, text, len);
	len += (size_t)sprintf(line + len, HASH_KEY "%s" HASH_END "\n", hash);
	r = fd_write_all(fd, line, len);
	// Half a line is none.
	if (r < 0 && ftruncate(fd, end) < 0)
		return -errno;
	return r;
}

// A machine that works on a folder has an id, under which all that is done in it belongs together.
static void add_run(int dir_fd, json_t *record)
{
	char run[65];
	ssize_t n = readlinkat(dir_fd, "work/run", run, sizeof(run) - 1);

	// The log of requests is in a folder of the machine's.
	if (n < 0)
		n = readlinkat(dir_fd, "../work/run", run, sizeof(run) - 1);
	if (n <= 0)
		return;
	run[n] = '\0';
	json_object_set_new(record, "run", json_string(run));
}

int audit_append(const char *dir, json_t *record, uint64_t file_bytes, struct err *err)
{
	char prev[AUDIT_HASH_BYTES];
	CLEANUP_FD int dir_fd = -1, lock_fd = -1, fd = -1, old_fd = -1;
	uint64_t seq = 0;
	off_t end = 0, old_end;
	int r;

	memcpy(prev, no_hash, sizeof(prev));
	r = dir_fd = open_dir(dir, err);
	if (r >= 0) {
		lock_fd = open_locked(dir_fd, err);
		r = MIN(lock_fd, 0);
	}
	if (r < 0) {
		json_decref(record);
		return r;
	}
	r = fd = open_in(dir_fd, NAME, O_RDWR | O_CREAT | O_APPEND);
	if (r >= 0)
		r = last_line(fd, prev, &seq, &end);
	if (r == 0) {
		old_fd = open_in(dir_fd, NAME ".1", O_RDONLY);
		r = old_fd == -ENOENT ? 0 : old_fd;
		if (r > 0)
			r = last_line(old_fd, prev, &seq, &old_end);
	}
	if (r >= 0 && ftruncate(fd, end) < 0)
		r = -errno;
	if (r >= 0 && (uint64_t)end >= (file_bytes ? file_bytes : AUDIT_FILE_BYTES)) {
		r = rotate(dir_fd, &fd);
		end = 0;
	}
	if (r >= 0) {
		add_run(dir_fd, record);
		r = number_record(record, seq + 1, prev);
	}
	if (r >= 0)
		r = write_line(fd, record, end);
	json_decref(record);
	if (r == -EBADMSG)
		return err_set(err, r,
			"%s/" NAME
			": its end is damaged, and nothing is done that cannot be written "
			"down (mayfly audit verify; or move it away)",
			dir);
	return r < 0 ? err_errno(err, r, "%s/" NAME, dir) : 0;
}

int audit_sync(const char *dir, struct err *err)
{
	CLEANUP_FD int dir_fd = open_dir(dir, err);
	CLEANUP_FD int fd = -1;

	if (dir_fd < 0)
		return dir_fd;
	fd = open_in(dir_fd, NAME, O_RDWR);
	if (fd == -ENOENT)
		return 0;
	if (fd < 0 || fdatasync(fd) < 0)
		return err_errno(err, fd < 0 ? fd : -errno, "%s/" NAME, dir);
	return 0;
}

int audit_last(const char *dir, uint64_t *ret_seq)
{
	CLEANUP_FD int dir_fd = open_dir(dir, NULL);
	CLEANUP_FD int lock_fd = dir_fd < 0 ? -1 : open_locked(dir_fd, NULL);
	int r = MIN(dir_fd, 0);

	if (r == 0)
		r = MIN(lock_fd, 0);
	*ret_seq = 0;
	for (unsigned int age = 0; age <= 1 && r == 0; age++) {
		char name[32], hash[AUDIT_HASH_BYTES];
		off_t end;
		int fd;

		name_of(age, name);
		fd = open_in(dir_fd, name, O_RDONLY);
		r = fd == -ENOENT ? 0 : fd < 0 ? fd : last_line(fd, hash, ret_seq, &end);
		fd_close(&fd);
	}
	return MIN(r, 0);
}

// --- Reading ---------------------------------------------------------------------------------

struct walk {
	int (*each)(void *opaque, const json_t *record);
	void *opaque;
	struct audit_summary sum;
};

static int check_record(struct walk *w, const json_t *record, const char *hash)
{
	uint64_t seq = (uint64_t)json_integer_value(json_object_get(record, "seq"));
	const char *prev = json_string_value(json_object_get(record, "prev"));

	if (!prev || seq == 0)
		return -EBADMSG;
	// The oldest that is kept names one that is not, unless it is the first of all.
	if (w->sum.records ? seq != w->sum.last + 1 || strcmp(prev, w->sum.hash) != 0
			   : seq == 1 && strcmp(prev, no_hash) != 0)
		return -EBADMSG;
	if (w->sum.records++ == 0)
		w->sum.first = seq;
	w->sum.last = seq;
	memcpy(w->sum.hash, hash, sizeof(w->sum.hash));
	return 0;
}

static int walk_file(struct walk *w, int dir_fd, const char *dir, unsigned int age, struct err *err)
{
	CLEANUP_FREE char *line = NULL;
	FILE *file;
	char name[32];
	size_t size = 0, number = 0;
	ssize_t len;
	int fd, r = 0;

	name_of(age, name);
	fd = open_in(dir_fd, name, O_RDONLY);
	if (fd == -ENOENT)
		return 0;
	file = fd < 0 ? NULL : fdopen(fd, "r");
	if (!file) {
		r = err_errno(err, fd < 0 ? fd : -ENOMEM, "%s/%s", dir, name);
		fd_close(&fd);
		return r;
	}
	while (r == 0 && (len = getline(&line, &size, file)) > 0) {
		char hash[AUDIT_HASH_BYTES];
		json_t *record;

		number++;
		if (line[len - 1] != '\n' && age == 0)
			break; // being written, or cut by the host's death: the next one takes it
			       // away
		record = (size_t)len > AUDIT_LINE_BYTES ? NULL
							: parse_line(line, (size_t)len - 1, hash);
		r = record ? check_record(w, record, hash) : -EBADMSG;
		if (r < 0)
			err_set(err, r,
				"%s/%s:%zu: not the line that was written here: it, or one before "
				"it, "
				"was changed, removed or added",
				dir, name, number);
		else if (w->each)
			r = w->each(w->opaque, record);
		json_decref(record);
	}
	fclose(file);
	return r;
}

static int walk(struct walk *w, const char *dir, struct err *err)
{
	CLEANUP_FD int dir_fd = open_dir(dir, err);
	CLEANUP_FD int lock_fd = -1;
	int r = MIN(dir_fd, 0);

	if (r == 0) {
		lock_fd = open_locked(dir_fd, err);
		r = MIN(lock_fd, 0);
	}
	for (unsigned int age = AUDIT_OLD_FILES + 1; age-- > 0 && r == 0;)
		r = walk_file(w, dir_fd, dir, age, err);
	return r;
}

int audit_each(const char *dir, int (*each)(void *opaque, const json_t *record), void *opaque,
	struct err *err)
{
	struct walk w = {.each = each, .opaque = opaque};

	return walk(&w, dir, err);
}

int audit_verify(const char *dir, struct audit_summary *ret, struct err *err)
{
	struct walk w = {0};
	int r = walk(&w, dir, err);

	if (r < 0)
		return r;
	if (!w.sum.records)
		memcpy(w.sum.hash, no_hash, sizeof(no_hash));
	*ret = w.sum;
	return 0;
}
