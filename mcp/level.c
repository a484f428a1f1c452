// SPDX-License-Identifier: Apache-2.0
// The access level; see the header. Any thread.
#include "mcp/level.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>

int level_read(const char *dir, enum config_access *ret, struct err *err)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // inih has globals
	struct config config;
	char path[PATH_MAX];
	int r;

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	pthread_mutex_lock(&lock);
	r = config_read(path, &config, err);
	pthread_mutex_unlock(&lock);
	if (r == 0)
		*ret = config.access;
	return r;
}
