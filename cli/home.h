// SPDX-License-Identifier: Apache-2.0
// Where machines and shipped files live. One thread.
//
//   $MAYFLY_HOME/vms/NAME   (else /var/lib/mayfly for root, $XDG_STATE_HOME/mayfly or
//                           ~/.local/state/mayfly for others)
#ifndef MAYFLY_CLI_HOME_H
#define MAYFLY_CLI_HOME_H

#include <limits.h>

#include "vmm/base/err.h"

// Makes a fresh folder for a throwaway machine, named "run-XXXXXX", with an empty run/ in it, and
// takes away those whose monitor and command are both gone. The folder is locked for as long as
// *ret_lock_fd is open, which is the caller's.
int home_make_throwaway(char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err);

// Removes a machine's folder and all that is in it; follows no symlink.
int home_remove(const char *dir, struct err *err);

// The guest kernel: $MAYFLY_KERNEL, or "vmlinux" beside this program or in ../lib/mayfly.
// -ENOENT with the places that were looked at and the cure.
int home_find_kernel(char ret_path[PATH_MAX], struct err *err);

#endif
