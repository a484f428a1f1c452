// SPDX-License-Identifier: Apache-2.0
// How a running monitor is confined, as the kernel says it is; and what this host has for that.
// One thread.
#ifndef MAYFLY_CLI_CONFINEMENT_H
#define MAYFLY_CLI_CONFINEMENT_H

#include <sys/types.h>

#include "vmm/base/err.h"

struct report;

// A finding for each piece of the confinement of process pid, which runs the machine in dir, all
// out of /proc/PID. Negative if the process cannot be looked at.
int confinement_look(struct report *report, pid_t pid, const char *dir, struct err *err);

// Confines a process for trial: what this host lacks.
void confinement_try(struct report *report);

// The table of system calls, as text or JSON, on stdout.
void confinement_calls(bool json);

#endif
