// SPDX-License-Identifier: Apache-2.0
// The guest's network interface, set as the monitor says. The agent's only thread.
#ifndef MAYFLY_GUEST_NET_H
#define MAYFLY_GUEST_NET_H

#include <stdint.h>

#include "vmm/base/err.h"

// words: ADDRESS/BITS,GATEWAY,DNS, each maybe empty; NULL: there is no network. Failures are
// logged.
void net_up(const char *words);

// Gives it another MAC address, while it is in use.
int net_set_mac(const uint8_t mac[6], struct err *err);

#endif
