// SPDX-License-Identifier: Apache-2.0
// Paths of the host that an agent names. Inside of the folders that the machine's owner has allowed
// ([mcp] folders of vm.ini) they are opened so that nothing leads out again: no "..", and no link,
// whoever may put one there meanwhile. Any thread.
#ifndef MAYFLY_MCP_FOLDERS_H
#define MAYFLY_MCP_FOLDERS_H

#include "vmm/base/err.h"
#include "vmm/config.h"

// -EINVAL for what is not a whole path without "." and "..".
int folders_check(const char *path, struct err *err);

// Opens a path that folders_check() has passed, with these flags, in one of the folders; to write
// in it, in one that is ":rw". -EACCES if it is in none, without a look at whether it is there.
int folders_open(
	const struct config *config, const char *path, bool write, int flags, struct err *err);

// Opens (O_PATH) one that is in none, and that no link is a part of. A negative errno.
int folders_open_elsewhere(const char *path);

#endif
