// SPDX-License-Identifier: Apache-2.0
// The life of a machine that has a name, for other verbs. One thread.
#ifndef MAYFLY_CLI_LIFE_H
#define MAYFLY_CLI_LIFE_H

#include <limits.h>
#include <stdbool.h>

#include "vmm/base/err.h"

struct config;

// Makes a machine; without a kernel in config it gets the one that there is. -EEXIST.
int life_create(const char *name, struct config *config, char ret_dir[PATH_MAX], struct err *err);

// Starts the machine in dir unless it runs, and returns when it answers. -ETIMEDOUT.
int life_start(const char *dir, uint64_t timeout_ns, bool show_console, struct err *err);

// Removes a machine; one that runs is ended first, with force, or refused.
int life_remove(const char *name, bool force, struct err *err);

#endif
