// SPDX-License-Identifier: Apache-2.0
// What the agent does where another program is init: it finds a place for its commands in the
// cgroups that it was given, and ends the machine by that init. The agent's only thread.
#ifndef MAYFLY_GUEST_SERVICE_H
#define MAYFLY_GUEST_SERVICE_H

// What init does for itself: limits and signals as commands want to find them.
void service_start(void);

// Makes a cgroup below our own for the trees of commands, and moves us into another beside them,
// since a cgroup with controllers holds no processes itself. Returns its path, or NULL where there
// is none: no cgroups of version 2, or no right to make any.
const char *service_cgroup(void);

// Goes back to where we were and removes what service_cgroup() has made. The pool of trees is gone.
void service_leave(void);

// Asks init to end the machine. Returns only if it cannot.
void service_reboot(void);

#endif
