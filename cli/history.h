// SPDX-License-Identifier: Apache-2.0
// Points of a machine that works on a folder, for those who change what is in it. One thread.
#ifndef MAYFLY_CLI_HISTORY_H
#define MAYFLY_CLI_HISTORY_H

// A command has ended in the machine of that name, whose work/ is open as state_fd: if it has
// changed anything that becomes a point, by a process of its own, for which nobody waits.
void history_later(const char *name, int state_fd);

#endif
