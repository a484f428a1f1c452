// SPDX-License-Identifier: Apache-2.0
// Warm starts: for each kernel, image and configuration a snapshot of a guest that has just become
// ready, made on first use, which throwaway machines go on from instead of booting; and of guests
// in which a project has been set up (cli/work.c). $MAYFLY_HOME/golden/KEY/. One thread.
//
// KEY stands for all that a boot depends on: this program, the files of kernel, initramfs and disks
// (device, inode, size, time of last change: no content changes without these) and the
// configuration. So nothing is ever out of date; what is not used any more is removed.
#ifndef MAYFLY_CLI_GOLDEN_H
#define MAYFLY_CLI_GOLDEN_H

#include <limits.h>

#include "vmm/base/err.h"

struct config;

struct golden {
	char dir[PATH_MAX]; // of the snapshot, whether there is one or not; "": there can be none
	char making[PATH_MAX]; // while one is made
	int making_fd;
};

// Finds out where it is. more: on what else it depends, NULL: nothing but the boot. Returns 1 if
// there is one, 0 if there is none, or a negative errno.
int golden_find(
	struct golden *ret_golden, const struct config *config, const char *more, struct err *err);

// Snapshots the machine in dir, in which nothing has been executed but what more stands for.
// Returns as soon as its memory is written, though not yet to the disk. -EINTR once cancel_fd is
// readable.
int golden_make(struct golden *golden, const char *dir, const char *run_dir, int cancel_fd,
	struct err *err);

// Keeps what was made, for others.
int golden_keep(struct golden *golden, struct err *err);

// A start from it has failed with this errno. If that is its own fault (it is damaged, of another
// processor, or never wakes) it is removed, so that another is made; memory that was short, say,
// passes.
void golden_failed(struct golden *golden, int code);

// Takes away what was made and not kept.
void golden_fini(struct golden *golden);

#endif
