// SPDX-License-Identifier: Apache-2.0
// The options that say what a machine is; see the header. One thread.
#include "cli/machine_options.h"

#include <errno.h>
#include <stdlib.h>

#include "vmm/config.h"

// A file that the monitor, whose working directory is another, is to find.
static int set_path(struct config *config, const char *key, const char *path, struct err *err)
{
	CLEANUP_FREE char *absolute = realpath(path, NULL);

	if (!absolute)
		return err_errno(err, -errno, "%s", path);
	return config_set(config, "machine", key, absolute, err);
}

int machine_option(struct config *config, int opt, const char *value, struct err *err)
{
	int r;

	switch (opt) {
	case 'm':
		r = config_set(config, "machine", "memory", value, err);
		break;
	case 'c':
		r = config_set(config, "machine", "cpus", value, err);
		break;
	case OPT_KERNEL:
		r = set_path(config, "kernel", value, err);
		break;
	case OPT_INITRAMFS:
		r = set_path(config, "initramfs", value, err);
		break;
	case OPT_APPEND:
		r = config_set(config, "machine", "append", value, err);
		break;
	default:
		return 0;
	}
	return r < 0 ? r : 1;
}
