// SPDX-License-Identifier: Apache-2.0
// Manifests of trees; see the header. Any thread.
#include "work/manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vmm/base/buf.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define CHUNK_BYTES (64 * KIB)
#define MAGIC       "MAYFLYM1"
#define MAGIC_BYTES 8U

enum { FLAG_HASHED = 1, FLAG_HOLDS_MORE = 2 };

// What stands before the strings of an entry on the disk.
struct record {
	uint8_t type, flags;
	le16_t mode, path_bytes, link_bytes; // with a NUL each; of no link 0
	le64_t size, ino, mtime_ns, ctime_ns;
	uint8_t hash[WORK_HASH_BYTES];
};
_Static_assert(sizeof(struct record) == 72, "on the disk");

struct work_chunk {
	struct work_chunk *next;
	size_t used, size;
	char bytes[];
};

void work_manifest_fini(struct work_manifest *m)
{
	while (m->chunks) {
		struct work_chunk *next = m->chunks->next;

		free(m->chunks);
		m->chunks = next;
	}
	free(m->entries);
	*m = (struct work_manifest){0};
}

static const char *keep_string(struct work_manifest *m, const char *text)
{
	size_t len = strlen(text) + 1;
	struct work_chunk *c = m->chunks;

	if (!c || c->size - c->used < len) {
		size_t size = MAX(len, (size_t)CHUNK_BYTES);

		c = malloc(sizeof(*c) + size);
		if (!c)
			return NULL;
		*c = (struct work_chunk){.next = m->chunks, .size = size};
		m->chunks = c;
	}
	memcpy(c->bytes + c->used, text, len);
	c->used += len;
	m->string_bytes += len;
	return c->bytes + c->used - len;
}

bool work_path_ok(const char *path)
{
	unsigned int parts = 1;

	if (!*path || strlen(path) >= PATH_MAX)
		return false;
	while (*path) {
		size_t len = strcspn(path, "/");

		if (len == 0 || len > NAME_MAX || (len == 1 && path[0] == '.') ||
			(len == 2 && path[0] == '.' && path[1] == '.'))
			return false;
		path += len;
		if (*path == '/' && (*++path == '\0' || ++parts > WORK_DEPTH_MAX))
			return false;
	}
	return true;
}

static int check_entry(const struct work_entry *e, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	if (!work_path_ok(e->path))
		return err_set(err, -EINVAL, "%s: no path in a tree", work_quote(quoted, e->path));
	if ((e->type != 'd' && e->type != 'f' && e->type != 'l') || e->mode > 0777 ||
		(e->type == 'l') != (e->link != NULL) || (e->hashed && e->type != 'f') ||
		(e->link && (!e->link[0] || strlen(e->link) >= PATH_MAX)))
		return err_set(err, -EINVAL, "%s: neither file, folder nor link",
			work_quote(quoted, e->path));
	return 0;
}

int work_manifest_add(struct work_manifest *m, const struct work_entry *entry, struct err *err)
{
	struct work_entry e = *entry;
	int r = check_entry(&e, err);

	if (r < 0)
		return r;
	if (m->nr == WORK_ENTRIES_MAX || m->string_bytes > WORK_STRINGS_MAX)
		return err_set(err, -E2BIG,
			"more than %u files and folders, or too long paths: leave some out with "
			".mayflyignore",
			WORK_ENTRIES_MAX);
	if (m->nr == m->cap) {
		size_t cap = m->cap ? 2 * m->cap : 64;
		struct work_entry *more = reallocarray(m->entries, cap, sizeof(*more));

		if (!more)
			return err_errno(err, -ENOMEM, "manifest");
		m->entries = more;
		m->cap = cap;
	}
	e.path = keep_string(m, e.path);
	e.link = e.link && e.path ? keep_string(m, e.link) : NULL;
	if (!e.path || (e.type == 'l' && !e.link))
		return err_errno(err, -ENOMEM, "manifest");
	m->entries[m->nr++] = e;
	return 0;
}

static int by_path(const void *a, const void *b)
{
	const struct work_entry *x = a, *y = b;

	return strcmp(x->path, y->path);
}

struct work_entry *work_manifest_find(const struct work_manifest *m, const char *path)
{
	const struct work_entry key = {.path = path};

	return m->nr ? bsearch(&key, m->entries, m->nr, sizeof(key), by_path) : NULL;
}

static bool has_parent(const struct work_manifest *m, const char *path)
{
	const char *slash = strrchr(path, '/');
	const struct work_entry *parent;
	char folder[PATH_MAX];

	if (!slash)
		return true;
	memcpy(folder, path, (size_t)(slash - path));
	folder[slash - path] = '\0';
	parent = work_manifest_find(m, folder);
	return parent && parent->type == 'd';
}

int work_manifest_finish(struct work_manifest *m, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	if (m->nr)
		qsort(m->entries, m->nr, sizeof(*m->entries), by_path);
	for (size_t i = 0; i < m->nr; i++) {
		const char *path = m->entries[i].path;

		if (i > 0 && !strcmp(path, m->entries[i - 1].path))
			return err_set(err, -EINVAL, "%s: there twice", work_quote(quoted, path));
		if (!has_parent(m, path))
			return err_set(err, -EINVAL, "%s: in no folder", work_quote(quoted, path));
	}
	return 0;
}

bool work_entry_same(const struct work_entry *a, const struct work_entry *b)
{
	if (!a || !b || a->type != b->type)
		return a == b;
	if (a->type == 'l')
		return !strcmp(a->link, b->link);
	if (a->mode != b->mode || a->type == 'd')
		return a->mode == b->mode;
	ASSERT(a->hashed && b->hashed);
	return a->size == b->size && !memcmp(a->hash, b->hash, sizeof(a->hash));
}

bool work_entry_untouched(const struct work_entry *before, const struct work_entry *now)
{
	if (!before || !now || before->type != now->type)
		return before == now;
	if (now->type != 'f')
		return work_entry_same(before, now);
	return before->mode == now->mode && before->size == now->size && before->ino == now->ino &&
	       before->mtime_ns == now->mtime_ns && before->ctime_ns == now->ctime_ns;
}

int work_hash_fd(int fd, uint8_t ret_hash[WORK_HASH_BYTES])
{
	uint8_t bytes[32 * KIB];
	struct sha256_ctx sha;
	ssize_t n;

	sha256_init(&sha);
	do {
		n = fd_read_full(fd, bytes, sizeof(bytes));
		if (n < 0)
			return (int)n;
		sha256_update(&sha, (size_t)n, bytes);
	} while (n == (ssize_t)sizeof(bytes));
	sha256_digest(&sha, WORK_HASH_BYTES, ret_hash);
	return 0;
}

static int64_t to_ns(const struct timespec *t)
{
	return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

struct work_entry work_entry_of(const struct stat *st)
{
	return (struct work_entry){
		.type = S_ISDIR(st->st_mode)   ? 'd'
			: S_ISREG(st->st_mode) ? 'f'
			: S_ISLNK(st->st_mode) ? 'l'
					       : '\0',
		.mode = S_ISLNK(st->st_mode) ? 0777 : st->st_mode & 0777,
		.size = S_ISREG(st->st_mode) ? (uint64_t)st->st_size : 0,
		.ino = st->st_ino,
		.mtime_ns = to_ns(&st->st_mtim),
		.ctime_ns = to_ns(&st->st_ctim),
	};
}

// --- On the disk -----------------------------------------------------------------------------

int work_file_write(int dir_fd, const char *name, struct buf *content, struct err *err)
{
	uint8_t hash[WORK_HASH_BYTES];
	CLEANUP_FD int fd = -1;
	struct sha256_ctx sha;
	char temp[64];
	int r;

	sha256_init(&sha);
	if (buf_error(content) < 0)
		return err_errno(err, -ENOMEM, "%s", name);
	sha256_update(&sha, content->len, content->data);
	sha256_digest(&sha, sizeof(hash), hash);
	snprintf(temp, sizeof(temp), "%.40s.new", name);
	fd = openat(dir_fd, temp, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	r = fd < 0 ? -errno : fd_write_all(fd, content->data, content->len);
	if (r == 0)
		r = fd_write_all(fd, hash, sizeof(hash));
	if (r == 0 && (fsync(fd) < 0 || renameat(dir_fd, temp, dir_fd, name) < 0))
		r = -errno;
	if (r == 0 && fsync(dir_fd) < 0)
		r = -errno;
	return r < 0 ? err_errno(err, r, "%s", name) : 0;
}

bool work_file_whole(const uint8_t *data, size_t len)
{
	uint8_t hash[WORK_HASH_BYTES];
	struct sha256_ctx sha;

	if (len < sizeof(hash))
		return false;
	sha256_init(&sha);
	sha256_update(&sha, len - sizeof(hash), data);
	sha256_digest(&sha, sizeof(hash), hash);
	return !memcmp(hash, data + len - sizeof(hash), sizeof(hash));
}

int work_file_read(int dir_fd, const char *name, size_t max_bytes, uint8_t **ret, size_t *ret_len,
	struct err *err)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	CLEANUP_FREE uint8_t *data = NULL;
	struct stat st;
	ssize_t n;

	if (fd < 0 || fstat(fd, &st) < 0)
		return err_errno(err, -errno, "%s", name);
	if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > max_bytes)
		return err_set(err, -EBADMSG, "%s: not of mayfly's making", name);
	data = malloc((size_t)st.st_size + 1);
	if (!data)
		return err_errno(err, -ENOMEM, "%s", name);
	n = fd_read_full(fd, data, (size_t)st.st_size);
	if (n < 0)
		return err_errno(err, (int)n, "%s", name);
	if (!work_file_whole(data, (size_t)n))
		return err_set(err, -EBADMSG, "%s: damaged", name);
	*ret = TAKE_PTR(data);
	*ret_len = (size_t)n - WORK_HASH_BYTES;
	return 0;
}

void work_entry_append(struct buf *out, const struct work_entry *e)
{
	struct record r = {
		.type = (uint8_t)e->type,
		.flags = (uint8_t)((e->hashed ? FLAG_HASHED : 0) |
				   (e->holds_more ? FLAG_HOLDS_MORE : 0)),
		.mode = le16_of((uint16_t)e->mode),
		.path_bytes = le16_of((uint16_t)(strlen(e->path) + 1)),
		.link_bytes = le16_of((uint16_t)(e->link ? strlen(e->link) + 1 : 0)),
		.size = le64_of(e->size),
		.ino = le64_of(e->ino),
		.mtime_ns = le64_of((uint64_t)e->mtime_ns),
		.ctime_ns = le64_of((uint64_t)e->ctime_ns),
	};

	if (e->hashed)
		memcpy(r.hash, e->hash, sizeof(r.hash));
	buf_append(out, &r, sizeof(r));
	buf_append(out, e->path, le16_get(r.path_bytes));
	if (e->link)
		buf_append(out, e->link, le16_get(r.link_bytes));
}

int work_manifest_write(
	const struct work_manifest *m, int dir_fd, const char *name, struct err *err)
{
	CLEANUP_BUF struct buf out = {0};
	le64_t taken = le64_of((uint64_t)m->taken_ns);

	buf_append(&out, MAGIC, MAGIC_BYTES);
	buf_append(&out, &taken, sizeof(taken));
	buf_append_le32(&out, (uint32_t)m->nr);
	for (size_t i = 0; i < m->nr; i++)
		work_entry_append(&out, &m->entries[i]);
	return work_file_write(dir_fd, name, &out, err);
}

// A string of that many bytes with its NUL, taken off the data; NULL if it is none.
static const char *take_string(const uint8_t **data, size_t *len, size_t bytes)
{
	const char *text = (const char *)*data;

	if (bytes == 0 || bytes > *len || strnlen(text, bytes) != bytes - 1)
		return NULL;
	*data += bytes;
	*len -= bytes;
	return text;
}

int work_entry_take(const uint8_t **data, size_t *len, struct work_entry *ret, struct err *err)
{
	struct work_entry e = {0};
	struct record r;

	if (*len < sizeof(r))
		return err_set(err, -EBADMSG, "cut");
	memcpy(&r, *data, sizeof(r));
	*data += sizeof(r);
	*len -= sizeof(r);
	e.path = take_string(data, len, le16_get(r.path_bytes));
	if (e.path && le16_get(r.link_bytes)) {
		e.link = take_string(data, len, le16_get(r.link_bytes));
		if (!e.link)
			e.path = NULL;
	}
	if (!e.path)
		return err_set(err, -EBADMSG, "no string");
	e.type = (char)r.type;
	e.hashed = r.flags & FLAG_HASHED;
	e.holds_more = r.flags & FLAG_HOLDS_MORE;
	e.mode = le16_get(r.mode);
	e.size = le64_get(r.size);
	e.ino = le64_get(r.ino);
	e.mtime_ns = (int64_t)le64_get(r.mtime_ns);
	e.ctime_ns = (int64_t)le64_get(r.ctime_ns);
	memcpy(e.hash, r.hash, sizeof(e.hash));
	*ret = e;
	return check_entry(&e, err);
}

static int take_entry(struct work_manifest *m, const uint8_t **data, size_t *len, struct err *err)
{
	struct work_entry e = {.path = ""};
	int r = work_entry_take(data, len, &e, err);

	if (r < 0)
		return r;
	if (m->nr && strcmp(m->entries[m->nr - 1].path, e.path) >= 0)
		return err_set(err, -EBADMSG, "not in order");
	return work_manifest_add(m, &e, err);
}

int work_manifest_parse(const uint8_t *data, size_t len, struct work_manifest *ret, struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest m = {0};
	uint32_t nr;
	int r = 0;

	if (len < MAGIC_BYTES + 12 || memcmp(data, MAGIC, MAGIC_BYTES) != 0)
		return err_set(err, -EBADMSG, "manifest: of another kind");
	m.taken_ns = (int64_t)get_le64(data + MAGIC_BYTES);
	nr = get_le32(data + MAGIC_BYTES + 8);
	data += MAGIC_BYTES + 12;
	len -= MAGIC_BYTES + 12;
	for (uint32_t i = 0; i < nr && r == 0; i++)
		r = take_entry(&m, &data, &len, err);
	if (r == 0 && len)
		r = err_set(err, -EBADMSG, "manifest: something behind its end");
	if (r == 0)
		r = work_manifest_finish(&m, err);
	if (r < 0 && err && r != -ENOMEM)
		err->code = -EBADMSG;
	if (r < 0)
		return err_wrap(err, r == -ENOMEM ? r : -EBADMSG, "manifest");
	*ret = m;
	m = (struct work_manifest){0};
	return 0;
}

int work_manifest_read(int dir_fd, const char *name, struct work_manifest *ret, struct err *err)
{
	CLEANUP_FREE uint8_t *data = NULL;
	size_t len = 0;
	int r = work_file_read(dir_fd, name, WORK_FILE_MAX, &data, &len, err);

	return r < 0 ? r : work_manifest_parse(data, len, ret, err);
}

// --- For people ------------------------------------------------------------------------------

// The bytes of a character of UTF-8 that may stand as it is, or 0.
static size_t plain_bytes(const unsigned char *s)
{
	static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
	size_t n = s[0] < 0x80             ? 1
		   : (s[0] & 0xe0) == 0xc0 ? 2
		   : (s[0] & 0xf0) == 0xe0 ? 3
		   : (s[0] & 0xf8) == 0xf0 ? 4
					   : 0;
	uint32_t c = n == 1 ? s[0] : s[0] & (0x7fU >> n);

	if (n == 1)
		return c >= ' ' && c != 0x7f && c != '"' && c != '\\';
	for (size_t i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80) // the NUL is none either
			return 0;
		c = c << 6 | (s[i] & 0x3f);
	}
	if (n == 0 || c < smallest[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
		return 0;
	// The other control characters, and those that hide or turn what is around them.
	if (c < 0xa0 || (c >= 0x200b && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) ||
		(c >= 0x2060 && c <= 0x206f) || c == 0xfeff || c == 0xad || c == 0x61c)
		return 0;
	return n;
}

const char *work_quote(char ret[WORK_QUOTED_MAX], const char *path)
{
	const unsigned char *s = (const unsigned char *)path;
	size_t n = 0, step;
	bool quoted = false;

	for (const unsigned char *p = s; *p && !quoted; p += step) {
		step = plain_bytes(p);
		quoted = step == 0;
	}
	if (quoted)
		ret[n++] = '"';
	for (; *s && n + 12 < WORK_QUOTED_MAX; s += step) {
		step = plain_bytes(s);
		if (step) {
			memcpy(ret + n, s, step);
			n += step;
			continue;
		}
		step = 1;
		if (*s == '\n' || *s == '"' || *s == '\\')
			n += (size_t)snprintf(ret + n, 5, "\\%c", *s == '\n' ? 'n' : *s);
		else
			n += (size_t)snprintf(ret + n, 5, "\\%03o", *s);
	}
	if (*s) {
		memcpy(ret + n, "…", strlen("…"));
		n += strlen("…");
	}
	if (quoted)
		ret[n++] = '"';
	ret[n] = '\0';
	return ret;
}
