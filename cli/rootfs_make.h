// SPDX-License-Identifier: Apache-2.0
// From an archive or a folder to an image in the store. One thread.
#ifndef MAYFLY_CLI_ROOTFS_MAKE_H
#define MAYFLY_CLI_ROOTFS_MAKE_H

#include "cli/rootfs_store.h"

#define ROOTFS_SIZE_DEFAULT_BYTES (8 * GIB)

struct rootfs_make {
	const char *name; // that it is to get
	const char *source; // for people
	// What it is made of: an archive (tar, cpio or zip, compressed or not) or a folder, each a
	// root file system, an OCI layout or what `docker save` writes.
	int fd; // borrowed
	const char *folder; // the path of fd if it is a folder, else NULL
	uint64_t size_bytes; // of the disk
	int signal_fd; // see struct tool
	bool show_progress; // on stderr
};

// Fills in *ret_image, which is the caller's. What was there under the name stays until it is
// whole.
int rootfs_make(const struct rootfs_make *make, struct rootfs *ret_image, struct err *err);

#endif
