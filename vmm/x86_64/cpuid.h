// SPDX-License-Identifier: Apache-2.0
// What CPUID tells the guest: KVM's supported table, filtered. Pure; any thread.
// Specification: Intel SDM vol. 2A, CPUID; AMD APM vol. 3, appendix E; Linux cpuid.rst for KVM.
#ifndef MAYFLY_X86_64_CPUID_H
#define MAYFLY_X86_64_CPUID_H

#include <linux/kvm.h>

#include "vmm/base/err.h"

#define CPUID_ENTRIES_MAX 256

struct cpuid_table {
	// Laid out as struct kvm_cpuid2 with room for its entries.
	uint32_t nent;
	uint32_t padding;
	struct kvm_cpuid_entry2 entries[CPUID_ENTRIES_MAX];
};

_Static_assert(offsetof(struct cpuid_table, entries) == sizeof(struct kvm_cpuid2),
	"cpuid_table must look like kvm_cpuid2");

struct cpuid_options {
	unsigned int vcpu_id; // also the APIC id
	unsigned int nr_vcpus; // one socket, one thread a core
	bool tsc_deadline; // KVM_CAP_TSC_DEADLINE_TIMER
	bool emulated_ring0; // see docs/hosts.md
};

// Turns the table that KVM_GET_SUPPORTED_CPUID gave into the one for a vCPU: its APIC id and
// topology, no nested virtualization, no performance counters, nothing that is the host's business.
void cpuid_filter(struct cpuid_table *table, const struct cpuid_options *opts);

// The entry for a leaf and sub-leaf, or NULL.
struct kvm_cpuid_entry2 *cpuid_find(struct cpuid_table *table, uint32_t function, uint32_t index);

// The probe by which a host that emulates ring 0 gives itself away: it does not honour the removal
// of POPCNT. cpuid_probe_prepare() removes it from a table that is then set and read back.
void cpuid_probe_prepare(struct cpuid_table *table);
bool cpuid_probe_says_emulated(struct cpuid_table *read_back);

// Whether a guest that was given the table saved can go on on a vCPU that is given the table host:
// the same vendor, and every feature is there. -ENOTSUP, with the leaf, the register and the bits
// that the host lacks; -EINVAL for a table that no vCPU has.
int cpuid_compare(struct cpuid_table *saved, struct cpuid_table *host, struct err *err);

// Whether both say the same, apart from what changes as a guest runs.
bool cpuid_same(const struct cpuid_table *a, const struct cpuid_table *b);

#endif
