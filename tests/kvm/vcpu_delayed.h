// SPDX-License-Identifier: Apache-2.0
// The delay that vcpu_delayed.c gives the vCPUs.
#ifndef MAYFLY_TESTS_KVM_VCPU_DELAYED_H
#define MAYFLY_TESTS_KVM_VCPU_DELAYED_H

// Called, if set, by a vCPU's thread between its look at what is wanted and its KVM_RUN, and in the
// like places. Set it while no vCPU runs.
extern void (*after_look)(void);

#endif
