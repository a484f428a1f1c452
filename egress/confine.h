// SPDX-License-Identifier: Apache-2.0
// What a proxy may still do once it has read its files: speak to the Internet and to those who have
// its sockets already. The only thread that there is.
#ifndef MAYFLY_EGRESS_CONFINE_H
#define MAYFLY_EGRESS_CONFINE_H

#include "vmm/base/err.h"

// Takes the process's files, its user (root's), its capabilities, and all system calls but those
// that it needs, for good. empty_dir is a folder, by its whole path, that an empty one may be laid
// over. It dies with its parent. What the host lacks is left out, and named in *ret_missing ("" for
// nothing).
int confine(const char *empty_dir, const char **ret_missing, struct err *err);

#endif
