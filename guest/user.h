// SPDX-License-Identifier: Apache-2.0
// Whom a command runs as: the guest's /etc/passwd and /etc/group, read without libc's machinery.
// The agent's only thread.
#ifndef MAYFLY_GUEST_USER_H
#define MAYFLY_GUEST_USER_H

#include <sys/types.h>

#include "vmm/base/err.h"

#define USER_GROUPS_MAX 64

struct user {
	uid_t uid;
	gid_t gid;
	gid_t groups[USER_GROUPS_MAX]; // supplementary; what is beyond is left out
	int ngroups;
	char name[64]; // the number in decimal when there is no such entry
	char home[256];
};

// spec is a name or number, optionally with ":group", a name or number. A number needs no entry in
// etc_dir/passwd; a name does. -ENOENT when there is none.
int user_lookup(const char *etc_dir, const char *spec, struct user *ret, struct err *err);

#endif
