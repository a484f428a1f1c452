// SPDX-License-Identifier: Apache-2.0
// vm.ini: what a machine is. Hand-editable; a key that is unknown, twice there or makes no sense is
// refused with the file, the line and the cure. One thread.
#ifndef MAYFLY_CONFIG_H
#define MAYFLY_CONFIG_H

#include <limits.h>

#include "vmm/base/err.h"

#define CONFIG_CPUS_MAX         32 // as many as the guest kernels are built for
#define CONFIG_MEMORY_MIN_BYTES (16 * MIB)
#define CONFIG_MEMORY_MAX_BYTES (1024 * GIB)
#define CONFIG_CMDLINE_BYTES    1536
#define CONFIG_CID_MIN          3U

struct config {
	char kernel[PATH_MAX]; // [machine] kernel
	char initramfs[PATH_MAX]; // [machine] initramfs: a path, "builtin", or nothing
	char append[CONFIG_CMDLINE_BYTES]; // [machine] append: more words for the kernel
	uint64_t memory_bytes; // [machine] memory
	unsigned int cpus; // [machine] cpus
	uint32_t cid; // [vsock] cid
};

// What is in force where nothing else is said; kernel and initramfs are empty.
void config_defaults(struct config *config);

// Sets one key as if it stood in the file; for command lines too. -EINVAL or -ERANGE, naming it.
int config_set(struct config *config, const char *section, const char *key, const char *value,
	struct err *err);

// Reads path over the defaults. Errors name path and line.
int config_read(const char *path, struct config *ret_config, struct err *err);

// Writes all keys to path, a new file. Values with a newline are refused (-EINVAL).
int config_write(const char *path, const struct config *config, struct err *err);

#endif
