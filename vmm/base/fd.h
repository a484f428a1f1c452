// SPDX-License-Identifier: Apache-2.0
// File descriptors: they start at -1, are CLOEXEC, have one owner and are closed once. Any thread.
#ifndef MAYFLY_BASE_FD_H
#define MAYFLY_BASE_FD_H

#include <sys/types.h>

#include "vmm/base/err.h"

// Closes *fd if it is open and sets it to -1. errno is kept; close() is never retried.
void fd_close(int *fd);

#define CLEANUP_FD CLEANUP(fd_close)

// Moves an fd out of a variable with a cleanup attribute, leaving -1 behind.
#define TAKE_FD(fd)               \
	({                        \
		int take_ = (fd); \
		(fd) = -1;        \
		take_;            \
	})

// Reads until len bytes or the end of file; continues after short reads and EINTR.
// Returns the number of bytes read, or a negative errno.
ssize_t fd_read_full(int fd, void *buf, size_t len);
ssize_t fd_pread_full(int fd, void *buf, size_t len, off_t off);

// Writes all of it or fails. Returns 0 or a negative errno.
int fd_write_all(int fd, const void *buf, size_t len);

// Reads a whole file of at most max_bytes into a fresh NUL-terminated buffer owned by the caller.
// -EFBIG if it is larger.
int fd_read_file(
	const char *path, size_t max_bytes, char **ret_buf, size_t *ret_len, struct err *err);

#endif
