// SPDX-License-Identifier: Apache-2.0
// The access level; see the header. Any thread.
#include "mcp/level.h"

#include <errno.h>
#include <stdio.h>

int level_read(const char *dir, enum config_access *ret, struct err *err)
{
	struct config config;
	char path[PATH_MAX];
	int r;

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	r = config_read(path, &config, err);
	if (r == 0)
		*ret = config.access;
	return r;
}
