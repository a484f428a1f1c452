// SPDX-License-Identifier: Apache-2.0
// What makes a machine itself: the time, randomness and names, set from the host after a restore so
// that no two clones are alike. The agent's only thread.
#ifndef MAYFLY_GUEST_WAKE_H
#define MAYFLY_GUEST_WAKE_H

#include "vmm/base/err.h"

#define WAKE_ENTROPY_MAX 64

struct wake {
	int64_t clock_ns; // CLOCK_REALTIME; 0: leave it
	uint8_t entropy[WAKE_ENTROPY_MAX];
	size_t entropy_len; // 0: none
	const char *hostname, *boot_id, *machine_id; // NULL: leave it
	uint8_t mac[6]; // of the network interface
	bool has_mac; // else leave it
};

// Does at boot what of it takes long: a wake then has to write files alone.
void wake_prepare(const char *root);

// Carries out all of it, in an order in which nothing is generated from old randomness, and goes on
// after a failure: a clone with the right clock is better than one without. The first error is
// returned. root is "" but in tests.
int wake_up(const struct wake *w, const char *root, struct err *err);

#endif
