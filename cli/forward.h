// SPDX-License-Identifier: Apache-2.0
// Moves bytes between two connected stream sockets until both directions have ended. Any thread.
#ifndef MAYFLY_CLI_FORWARD_H
#define MAYFLY_CLI_FORWARD_H

// The end of a direction is passed on by itself; a side that does not read stops the other. Returns
// when both have ended or one is broken. stop_fd ends it when readable; -1 for none. The caller
// closes both.
void forward(int a, int b, int stop_fd);

#endif
