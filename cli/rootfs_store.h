// SPDX-License-Identifier: Apache-2.0
// The images of this user: $MAYFLY_HOME/images/ID/ with root.img, a raw image of a file system, and
// manifest.json; and images/names/NAME, links to them. What is being made has another name until it
// is whole. One thread.
//
// ID is the SHA-256 of what is in root.img and of how commands run in it: an image never changes,
// and the same one twice is one.
#ifndef MAYFLY_CLI_ROOTFS_STORE_H
#define MAYFLY_CLI_ROOTFS_STORE_H

#include <limits.h>

#include <jansson.h>

#include "cli/sha256.h"
#include "vmm/base/err.h"

struct config;

#define ROOTFS_SOURCE_MAX 255
#define ROOTFS_DISK       "root.img"

struct rootfs {
	char dir[PATH_MAX];
	char id[SHA256_TEXT_LEN + 1];
	char root_sha256[SHA256_TEXT_LEN + 1]; // see rootfs_checksum()
	char source[ROOTFS_SOURCE_MAX + 1]; // where it came from, for people
	int64_t created_s; // since 1970
	uint64_t size_bytes, data_bytes; // of the disk, and of what is not zeros in it
	// How commands run in it: env and entrypoint and cmd (arrays of strings), user, workdir.
	// Owned; each member may be missing, none is of another type.
	json_t *config;
};

// Frees what it holds. Accepts a zeroed one.
void rootfs_fini(struct rootfs *image);

#define CLEANUP_ROOTFS CLEANUP(rootfs_fini)

// Letters, digits, '.', '_' and '-', not at the start. -EINVAL with what is wrong.
int rootfs_check_name(const char *name, struct err *err);

// --- Reading ---------------------------------------------------------------------------------

// name: an image's, or an id or at least 6 digits of one. -ENOENT, or -EINVAL if several begin so.
int rootfs_find(const char *name, struct rootfs *ret_image, struct err *err);

// The image that the machine's root is. 1, 0 if it is none, or a negative errno.
int rootfs_of_machine(const struct config *config, struct rootfs *ret_image, struct err *err);

// Calls each() for every image, the oldest first, with its names in one text ("" if it has none);
// what is damaged is reported by broken() and left out. Ends early with what each() returns below
// 0.
int rootfs_each(int (*each)(void *opaque, const struct rootfs *image, const char *names),
	void (*broken)(void *opaque, const char *dir, const struct err *err), void *opaque,
	struct err *err);

// What a manifest says; also whether its id is that of its content. text comes from anybody.
// -EBADMSG.
int rootfs_parse_manifest(const char *text, size_t len, struct rootfs *ret_image, struct err *err);

// --- Writing ---------------------------------------------------------------------------------

struct rootfs_writer {
	char store[PATH_MAX], dir[PATH_MAX]; // of the store, and of what is being made
	int dir_fd; // owned
};

// Makes a folder for a new image. What commands that died have left is taken away.
int rootfs_begin(struct rootfs_writer *ret_writer, struct err *err);

// Adds the manifest of image (all but dir and id filled in) to root.img, syncs, and gives it its
// name, which another image may have had; image->dir and id are filled in. An image that is there
// already stays as it is.
int rootfs_commit(
	struct rootfs_writer *writer, struct rootfs *image, const char *name, struct err *err);

// Takes it away, unless it was committed. Accepts a zeroed writer.
void rootfs_end(struct rootfs_writer *writer);

// Takes the name away, and the image with its last one; or the image with all its names, by id.
// -EBUSY if the image is to go and a machine or a snapshot needs it.
int rootfs_remove(const char *name, struct err *err);

// Removes images without a name that nothing needs, and what commands that died have left. Returns
// how many of those, or a negative errno.
int rootfs_gc(int *ret_leftovers, struct err *err);

// The SHA-256 of a file's length and of its blocks of 4 KiB that are not zeros, each behind its
// number (8 bytes, little-endian): so holes cost nothing. With punch, what is set aside and was
// never written becomes a hole as well.
int rootfs_checksum(int fd, bool punch, char ret[SHA256_TEXT_LEN + 1], uint64_t *ret_data_bytes,
	struct err *err);

#endif
