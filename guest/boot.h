// SPDX-License-Identifier: Apache-2.0
// What PID 1 does before and after it serves: file systems, the loopback interface, the end of the
// machine. Failures are logged and survived: a machine that answers can be looked into. The agent's
// only thread.
#ifndef MAYFLY_GUEST_BOOT_H
#define MAYFLY_GUEST_BOOT_H

// The file systems without which no command can run.
void boot_early(void);

// Everything else that programs expect.
void boot_late(void);

// Ends all processes, writes everything back and resets the machine.
_Noreturn void boot_end(void);

#endif
