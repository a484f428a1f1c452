// SPDX-License-Identifier: Apache-2.0
// What machines of one project hand on to each other: paths of the guest that .mayfly.ini names
// (persist), kept in a folder of the project's, and never read as anything but files to send back.
// One thread, and one more that sends.
//
//   $MAYFLY_HOME/persist/KEY/     KEY: of the project's folder
//     folder                      symbolic link: that folder
//     PATH-KEY/tree               what was at a path of the guest
//   work/persist                  the paths of a machine, each with a NUL behind it
#ifndef MAYFLY_CLI_WORK_PERSIST_H
#define MAYFLY_CLI_WORK_PERSIST_H

#include "cli/work_machine.h"

#define WORK_PERSIST_MAX_BYTES GIB // of the disk, each

// Into a new machine, and notes that these are its paths: whole ones. -EBUSY if another machine of
// the folder is at it for longer than a minute.
int work_persist_in(struct work_machine *w, char *const *paths, unsigned int nr, struct err *err);

// Out of it again; what there was before stays if that fails, and where the guest has nothing. The
// machine of that name; one that does not run has nothing to hand on. signal_fd: as in struct
// work_machine.
int work_persist_out(const char *name, int signal_fd, struct err *err);

// Removes what projects have left whose folders are gone. Returns how many, or a negative errno.
int work_persist_gc(struct err *err);

#endif
