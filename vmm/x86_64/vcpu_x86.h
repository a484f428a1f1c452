// SPDX-License-Identifier: Apache-2.0
// Setting up an x86 vCPU beyond what vcpu.h has for all architectures. Main thread.
#ifndef MAYFLY_VCPU_X86_H
#define MAYFLY_VCPU_X86_H

#include "vmm/vcpu.h"
#include "vmm/x86_64/boot.h"

// Registers of the boot processor; the others wait for INIT and SIPI as they are made.
int vcpu_x86_boot(struct vcpu *vcpu, const struct boot_entry *entry, struct err *err);

#endif
