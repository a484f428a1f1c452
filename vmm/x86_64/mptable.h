// SPDX-License-Identifier: Apache-2.0
// The Intel MultiProcessor Specification 1.4 table, by which a kernel without ACPI finds its CPUs
// and the IOAPIC. Main thread, before the vCPUs start.
#ifndef MAYFLY_X86_64_MPTABLE_H
#define MAYFLY_X86_64_MPTABLE_H

#include "vmm/guest_mem.h"

// APIC ids are 8 bits: 0xff is broadcast, and the IOAPIC has one after the CPUs'.
#define MPTABLE_CPUS_MAX 254

// Writes the table for CPUs with APIC ids 0 (the boot processor) to nr_cpus - 1, and IOAPIC pins
// wired one to one to ISA interrupts. -EINVAL for 0 or more than MPTABLE_CPUS_MAX.
int mptable_write(const struct guest_mem *mem, unsigned int nr_cpus, struct err *err);

#endif
