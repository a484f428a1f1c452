// SPDX-License-Identifier: Apache-2.0
// What PID 1 does before and after it serves: file systems, the loopback interface, the end of the
// machine. Failures are logged and survived: a machine that answers can be looked into. The agent's
// only thread.
#ifndef MAYFLY_GUEST_BOOT_H
#define MAYFLY_GUEST_BOOT_H

#include <stdbool.h>

#include "vmm/base/err.h"

// The file systems without which no command can run.
void boot_early(void);

// Makes the first disk the root, if the kernel's command line says so: mayfly_root=rw (ext4) or ro
// (ext4 or erofs). Returns 0, or a negative errno: then there is no machine to be looked into,
// since what is asked of it is on that disk.
int boot_root(struct err *err);

// Lets another program be PID 1, if the kernel's command line says so: mayfly_init=PATH. Returns
// whether that is so: then this is another process, its child. When the program cannot be executed,
// the machine ends.
bool boot_hand_over(void);

// Everything else that programs expect.
void boot_late(void);

// Ends all processes, writes everything back and resets the machine.
_Noreturn void boot_end(void);

#endif
