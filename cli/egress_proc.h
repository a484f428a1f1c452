// SPDX-License-Identifier: Apache-2.0
// The keeper of a machine's way out (cli/egress.c) as the verbs see it. One thread.
#ifndef MAYFLY_CLI_EGRESS_PROC_H
#define MAYFLY_CLI_EGRESS_PROC_H

#include <limits.h>

#include "vmm/base/err.h"

#define EGRESS_PORT   3128 // of the guest's loopback interface, and of vsock
#define EGRESS_DIR    "egress" // in the machine's folder: lock, socket, log of requests
#define EGRESS_LOCK   "lock"
#define EGRESS_SOCKET "proxy.sock"
#define NAT_SOCKET    "nat.sock"
#define EGRESS_READY  "ready" // what it says on its status fd when it is
#define EGRESS_END_NS 30000000000ULL

// DIR/egress.
int egress_dir(const char *dir, char ret[PATH_MAX], struct err *err);

// Starts it for a machine that is up and answers, if its mode is the allow-list's; returns when
// programs of the guest can use it.
int egress_start(const char *dir, struct err *err);

// 1 if it runs, 0 if not.
int egress_running(const char *dir, struct err *err);

// Has it read vm.ini again: what that says is in force when this returns. *ret_cut: how many
// connections it ended. -ESRCH if it does not run.
int egress_reload(const char *dir, unsigned int *ret_cut, struct err *err);

// The same for the keeper of a network card's rules (cli/nat.c), which ends with the machine alone.
int nat_reload(const char *dir, struct err *err);

// Ends it, and with it all connections. Nothing to do is no error.
int egress_end(const char *dir, struct err *err);

#endif
