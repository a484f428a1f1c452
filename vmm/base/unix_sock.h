// SPDX-License-Identifier: Apache-2.0
// Unix stream sockets beneath a folder, whose path may be longer than the 107 bytes that an address
// holds. Any thread.
#ifndef MAYFLY_BASE_UNIX_SOCK_H
#define MAYFLY_BASE_UNIX_SOCK_H

#include "vmm/base/err.h"

// Listens on dir/name, a new file of mode 0600; a socket that a dead process left there is
// replaced. Returns the fd (CLOEXEC, non-blocking), the caller's; -EADDRINUSE if somebody else
// listens there.
int unix_listen(const char *dir, const char *name, int backlog, struct err *err);

// Connects to dir/name. Returns the fd (CLOEXEC, blocking), the caller's. -ENOENT or -ECONNREFUSED
// when nobody listens.
int unix_connect(const char *dir, const char *name, struct err *err);

#endif
