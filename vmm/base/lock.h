// SPDX-License-Identifier: Apache-2.0
// A lock on a file that lasts as long as its holder's open file description: it ends with the
// process, however that ends. Who looks does not take it, so looking disturbs nobody. Any thread.
#ifndef MAYFLY_BASE_LOCK_H
#define MAYFLY_BASE_LOCK_H

#include <sys/types.h>

#include "vmm/base/err.h"

// Opens (or makes, mode 0600) name in the folder dir_fd and locks it, with this process's id as its
// content. Returns the fd, the caller's; -EBUSY if somebody holds it.
int lock_take(int dir_fd, const char *name, struct err *err);

// 1 if somebody holds the lock, with the process id that the holder wrote in *ret_pid (0 if it has
// not yet; NULL: not wanted); 0 if nobody does, or there is no such file; or a negative errno.
int lock_held(const char *path, pid_t *ret_pid);

#endif
