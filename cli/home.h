// SPDX-License-Identifier: Apache-2.0
// Where machines and shipped files live. One thread.
//
//   $MAYFLY_HOME/vms/NAME   (else /var/lib/mayfly for root, $XDG_STATE_HOME/mayfly or
//                           ~/.local/state/mayfly for others)
#ifndef MAYFLY_CLI_HOME_H
#define MAYFLY_CLI_HOME_H

#include <limits.h>
#include <sys/types.h>

#include "vmm/base/err.h"

// Makes a path. -ENAMETOOLONG, with its beginning.
int home_format(char ret[PATH_MAX], struct err *err, const char *fmt, ...) PRINTF_LIKE(3, 4);

// Makes a fresh folder for a throwaway machine, named "run-XXXXXX", with an empty run/ in it, and
// takes away those whose monitor and command are both gone. The folder is locked for as long as
// *ret_lock_fd is open, which is the caller's.
int home_make_throwaway(char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err);

// In a throwaway's folder: held by the command for as long as the machine is its own. The monitor
// holds run/lock.
#define HOME_OWNER_LOCK "owner.lock"

// Takes away what dead throwaways have left. Returns how many folders, or a negative errno.
int home_sweep(struct err *err);

// --- Machines that stay ----------------------------------------------------------------------

struct config;

#define HOME_NAME_MAX 63

// Whether name may be a machine's: letters, digits, '.', '_' and '-', not at the start, and not
// "run-…", which throwaways are called. -EINVAL with what is wrong.
int home_check_name(const char *name, struct err *err);

// The folder of the machine of that name. -EINVAL for what is no name, -ENOENT if there is none.
int home_find(const char *name, char ret_dir[PATH_MAX], struct err *err);

// Makes the machine's folder with its vm.ini, all or nothing. -EEXIST if there is one.
int home_create(
	const char *name, const struct config *config, char ret_dir[PATH_MAX], struct err *err);

// 1 if a monitor runs the machine in dir, its process id in *ret_pid (may be NULL); 0 if none.
int home_running(const char *dir, pid_t *ret_pid, struct err *err);

// Calls each(opaque, name, dir) for every machine, throwaways included, by name.
int home_each(int (*each)(void *opaque, const char *name, const char *dir), void *opaque,
	struct err *err);

// The same for every pool (cli/pool_store.h).
int home_each_pool(int (*each)(void *opaque, const char *name, const char *dir), void *opaque,
	struct err *err);

// Removes a machine's folder and all that is in it; follows no symlink.
int home_remove(const char *dir, struct err *err);

// The folder of what machines of a project hand on (cli/work_persist.h), made so.
int home_persist(char ret_path[PATH_MAX], struct err *err);

// The same for a machine with a name: what cannot be removed is swept later, and is no machine of
// that name.
int home_remove_machine(const char *dir, struct err *err);

// The folder of the snapshots, which is made if it is not there.
int home_snapshots(char ret_path[PATH_MAX], struct err *err);

// The folder of what warm starts go on from, which is made likewise.
int home_golden(char ret_path[PATH_MAX], struct err *err);

// The folder of what agents have asked owners for, likewise.
int home_approvals(char ret_path[PATH_MAX], struct err *err);

// The folder of the images, likewise.
int home_images(char ret_path[PATH_MAX], struct err *err);

// The folder of the pools, likewise.
int home_pools(char ret_path[PATH_MAX], struct err *err);

// The folder of the credentials, likewise; for the owner alone.
int home_secrets(char ret_path[PATH_MAX], struct err *err);

// The guest kernel: $MAYFLY_KERNEL, or "vmlinux" beside this program or in ../lib/mayfly.
// -ENOENT with the places that were looked at and the cure.
int home_find_kernel(char ret_path[PATH_MAX], struct err *err);

// The same of the standard one: "standard/vmlinux".
int home_find_standard_kernel(char ret_path[PATH_MAX], struct err *err);

#endif
