// SPDX-License-Identifier: Apache-2.0
// A guest behind its monitor, in a process of its own: the real agent on a Unix socket that speaks
// as the monitor's vsock socket does. For tests of the host's end. One at a time.
#ifndef MAYFLY_TESTS_FAKE_GUEST_H
#define MAYFLY_TESTS_FAKE_GUEST_H

#include <sys/types.h>

// Fails the test if it does not start. Its socket is dir/vsock.sock.
void fake_guest_start(const char *dir);
void fake_guest_stop(void);
pid_t fake_guest_pid(void);

// A connection to its agent; fails the test if there is none.
int fake_guest_connect(const char *dir);

// main() of such a test begins with this: the agent executes its own program for files. Returns the
// exit status if it is that, else -1.
int fake_guest_main(int argc, char **argv);

#endif
