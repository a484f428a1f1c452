// SPDX-License-Identifier: Apache-2.0
// A manifest: what is in a tree of files, by path; and its form on the disk. Any thread.
//
// Paths are bytes, relative, without "", "." and ".." in them, sorted as bytes, so that a folder
// comes before what is in it. Each folder on the way to an entry is an entry.
#ifndef MAYFLY_WORK_MANIFEST_H
#define MAYFLY_WORK_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "vmm/base/err.h"

#define WORK_ENTRIES_MAX 2000000U
#define WORK_DEPTH_MAX   200U
#define WORK_STRINGS_MAX (256 * MIB) // all paths and links together
#define WORK_HASH_BYTES  32U // SHA-256
#define WORK_FILE_MAX    (1024 * MIB) // of a manifest

struct work_entry {
	const char *path;
	const char *link; // where a symbolic link points to, else NULL
	char type; // d folder, f file, l symbolic link
	bool hashed; // hash is set; of files alone
	bool holds_more; // a folder in which there is something that is not in the manifest
	uint32_t mode; // 0777
	uint64_t size; // of a file
	// When these are all the same, so is the content (see work_entry_untouched()).
	uint64_t ino;
	int64_t mtime_ns, ctime_ns;
	uint8_t hash[WORK_HASH_BYTES];
};

struct work_chunk;

// Zero is an empty one.
struct work_manifest {
	struct work_entry *entries;
	size_t nr, cap;
	int64_t taken_ns; // since 1970, when the first of it was looked at
	struct work_chunk *chunks; // that hold the strings
	size_t string_bytes;
};

void work_manifest_fini(struct work_manifest *m);
#define CLEANUP_MANIFEST CLEANUP(work_manifest_fini)

// Whether it may be the path of an entry.
bool work_path_ok(const char *path);

// Adds a copy of an entry. -EINVAL for what none may be, -E2BIG for too many, -ENOMEM.
int work_manifest_add(struct work_manifest *m, const struct work_entry *entry, struct err *err);

// After the last: sorts. -EINVAL if a path is there twice, or the folder that it is in is not.
int work_manifest_finish(struct work_manifest *m, struct err *err);

// NULL if there is none. The entry belongs to the manifest, and adding moves it.
struct work_entry *work_manifest_find(const struct work_manifest *m, const char *path);

// The same content, type and rights; NULL is nothing. Files must have been hashed.
bool work_entry_same(const struct work_entry *a, const struct work_entry *b);

// Nobody has touched it in between, as its file system tells; NULL is nothing. Of folders and links
// what they are is compared.
bool work_entry_untouched(const struct work_entry *before, const struct work_entry *now);

// Hashes what is left of fd.
int work_hash_fd(int fd, uint8_t ret_hash[WORK_HASH_BYTES]);

// type, mode, size, ino and times of st; type 0 for what cannot be an entry.
struct work_entry work_entry_of(const struct stat *st);

// Writes it to a new name in dir_fd, synced, and gives it its own.
int work_manifest_write(
	const struct work_manifest *m, int dir_fd, const char *name, struct err *err);

// Reads what that has written. -ENOENT; -EBADMSG for what it has not.
int work_manifest_read(int dir_fd, const char *name, struct work_manifest *ret, struct err *err);
int work_manifest_parse(
	const uint8_t *data, size_t len, struct work_manifest *ret, struct err *err);

// One entry, behind what is there; and back, with its strings in the data, which both go on.
// -EBADMSG, or -EINVAL for what no entry may be.
struct buf;
void work_entry_append(struct buf *out, const struct work_entry *e);
int work_entry_take(const uint8_t **data, size_t *len, struct work_entry *ret, struct err *err);

// A file that ends with the SHA-256 of what is before: for manifests and journals.
int work_file_write(int dir_fd, const char *name, struct buf *content, struct err *err);
int work_file_read(int dir_fd, const char *name, size_t max_bytes, uint8_t **ret, size_t *ret_len,
	struct err *err);
bool work_file_whole(const uint8_t *data, size_t len);

// A path for a person, quoted as in C if anything in it would not print as itself (control
// characters, what is no UTF-8, what turns the direction of a text).
#define WORK_QUOTED_MAX 512
const char *work_quote(char ret[WORK_QUOTED_MAX], const char *path);

#endif
