// SPDX-License-Identifier: Apache-2.0
// What is saved of an x86 VM and of each vCPU: the structs that the ioctls fill, and their tables.
// What is an opaque block for the processor (the XSAVE area, the local APIC's page) or has a layout
// that the kernel's interface guarantees (PIC, I/O APIC) is saved as bytes. Pure; any thread.
#ifndef MAYFLY_X86_64_STATE_X86_H
#define MAYFLY_X86_64_STATE_X86_H

#include "vmm/base/state.h"
#include "vmm/x86_64/cpuid.h"

#define X86_MSRS_MAX    512U
#define X86_XSAVE_BYTES 4096U // struct kvm_xsave; more only with features we never ask for (AMX)

// Zero stands for what an older version did not save: whoever adds a field sees to that.
struct x86_vcpu_state {
	uint32_t vcpu_id;
	uint32_t tsc_khz; // 0: not known
	uint32_t mp_state;
	uint32_t nr_msrs;
	struct cpuid_table cpuid;
	struct kvm_regs regs;
	struct kvm_sregs sregs;
	struct kvm_debugregs debugregs;
	struct kvm_xcrs xcrs; // none: the host has no XSAVE
	uint8_t xsave[X86_XSAVE_BYTES];
	struct x86_msr {
		uint32_t index;
		uint32_t unused; // padding
		uint64_t value;
	} msrs[X86_MSRS_MAX];
	uint8_t lapic[KVM_APIC_REG_SIZE];
	struct kvm_vcpu_events events;
};

struct x86_vm_state {
	uint8_t pic_master[sizeof(struct kvm_pic_state)];
	uint8_t pic_slave[sizeof(struct kvm_pic_state)];
	uint8_t ioapic[sizeof(struct kvm_ioapic_state)];
	struct kvm_pit_state2 pit;
	uint64_t clock_ns; // of kvm-clock
};

extern const struct state_table x86_vcpu_state_table;
extern const struct state_table x86_vm_state_table;

#endif
