// SPDX-License-Identifier: Apache-2.0
// The life of a machine that has a name, for all verbs. One thread.
#ifndef MAYFLY_CLI_LIFE_H
#define MAYFLY_CLI_LIFE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "vmm/base/err.h"

struct config;

#define LIFE_BOOT_TIMEOUT_NS 180000000000ULL

// Makes a machine; without a kernel in config it gets the one that there is. -EEXIST.
int life_create(const char *name, struct config *config, char ret_dir[PATH_MAX], struct err *err);

// Locks out other commands that start or remove the machine in dir, until the fd, the caller's, is
// closed.
int life_lock(const char *dir, struct err *err);

struct life_start {
	const char *dir; // the machine's
	const char *snapshot; // the folder of one to go on from, or NULL: boot
	const char *memory_way; // how its memory is read; NULL: automatic
	const char *hostname; // whom a restored guest is to be from now on; NULL: who it was
	uint64_t timeout_ns;
	bool show_console;
	uint64_t restored_ns, ready_ns; // since the start; set by life_up()
};

// Starts a machine that does not run, with its lock held, and returns when it answers. -ETIMEDOUT.
// The process's signals are blocked from then on.
int life_up(struct life_start *start, struct err *err);

// The same unless it runs; one that is suspended is resumed.
int life_start(const char *dir, uint64_t timeout_ns, bool show_console, struct err *err);

// Ends the machine: by the guest's own shutdown unless force, then by the monitor's, then by force.
int life_down(const char *dir, bool force, struct err *err);

// Removes a machine; one that runs is ended first, with force, or refused.
int life_remove(const char *name, bool force, struct err *err);

// In cli/snapshot.c: 1 if the machine was suspended and has been resumed, 0 if it was not. As
// life_up().
int suspended_resume(struct life_start *start, struct err *err);

// The same file: 1 if the machine in dir, which does not run, has been suspended, else 0.
int suspended_is(const char *dir, struct err *err);

#endif
