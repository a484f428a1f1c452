// SPDX-License-Identifier: Apache-2.0
// A network in user space, without any right on the host: the program passt, at the other end of a
// stream socket. It ends by itself when that is closed, however the monitor ends. Main thread.
#ifndef MAYFLY_PASST_H
#define MAYFLY_PASST_H

#include "vmm/base/err.h"

// What the guest has and sees; the host's services on loopback are out of its reach, and so is the
// guest from the host.
struct passt_config {
	const char *address; // A.B.C.D/BITS
	const char *gateway;
	const char *dns; // queries to it go to the host's own resolver; empty: none
	unsigned int mtu;
	// A machine's folder: behind the rules of its vm.ini (cli/nat.c); NULL: without.
	const char *rules_of;
};

// Starts it and waits until it serves. *ret_fd is our end, non-blocking, the caller's. -ENOENT if
// there is no such program, or what it said of its failure.
int passt_start(const struct passt_config *config, int *ret_fd, struct err *err);

#endif
