// SPDX-License-Identifier: Apache-2.0
// The guest's network interface, set as the monitor says. The agent's only thread.
#ifndef MAYFLY_GUEST_NET_H
#define MAYFLY_GUEST_NET_H

// words: ADDRESS/BITS,GATEWAY,DNS, each maybe empty; NULL: there is no network. Failures are
// logged.
void net_up(const char *words);

#endif
