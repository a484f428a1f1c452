// SPDX-License-Identifier: Apache-2.0
// .mayfly.ini: what a project says about the machine that works on it. One thread.
//
//   [work]
//   image = debian-12      memory, cpus, net: as the options of those names
//   setup = npm ci         a line for sh; may be repeated
//   cache = package-lock.json   a file that the set-up depends on; may be repeated
//   persist = ~/.cache/pip ~/.claude   paths of the guest that the project's machines hand on
//   env = NAME=VALUE       may be repeated
#ifndef MAYFLY_CLI_WORK_INI_H
#define MAYFLY_CLI_WORK_INI_H

#include "vmm/base/buf.h"
#include "vmm/base/err.h"

#define WORK_INI_NAME ".mayfly.ini"
#define WORK_INI_MAX  64 // files, and variables

struct config;

struct work_ini {
	struct buf setup; // its lines, each with a newline; without a NUL
	char *cache[WORK_INI_MAX], *env[WORK_INI_MAX + 1], *persist[WORK_INI_MAX]; // owned
	unsigned int nr_cache, nr_env, nr_persist;
};

void work_ini_fini(struct work_ini *ini);

// Reads it in the folder target, if there is one, and sets in config what it says about the
// machine. -EINVAL with file and line.
int work_ini_read(const char *target, struct work_ini *ret, struct config *config, struct err *err);

// What the set-up depends on, as a text: itself, the files' content, and where it is done. -ENOENT
// if a file that it names is not there.
int work_ini_key(const struct work_ini *ini, int target_fd, const char *target, const char *inside,
	struct buf *ret, struct err *err);

#endif
