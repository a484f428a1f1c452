// SPDX-License-Identifier: Apache-2.0
// The tables of x86 state; see the header. Pure; any thread.
#include "vmm/x86_64/state_x86.h"

#define PADDING "padding"

STATE_TABLE(static, regs_state, struct kvm_regs, "regs", NULL, STATE_U64(struct kvm_regs, rax),
	STATE_U64(struct kvm_regs, rbx), STATE_U64(struct kvm_regs, rcx),
	STATE_U64(struct kvm_regs, rdx), STATE_U64(struct kvm_regs, rsi),
	STATE_U64(struct kvm_regs, rdi), STATE_U64(struct kvm_regs, rsp),
	STATE_U64(struct kvm_regs, rbp), STATE_U64(struct kvm_regs, r8),
	STATE_U64(struct kvm_regs, r9), STATE_U64(struct kvm_regs, r10),
	STATE_U64(struct kvm_regs, r11), STATE_U64(struct kvm_regs, r12),
	STATE_U64(struct kvm_regs, r13), STATE_U64(struct kvm_regs, r14),
	STATE_U64(struct kvm_regs, r15), STATE_U64(struct kvm_regs, rip),
	STATE_U64(struct kvm_regs, rflags));

STATE_TABLE(static, segment_state, struct kvm_segment, "segment", NULL,
	STATE_U64(struct kvm_segment, base), STATE_U32(struct kvm_segment, limit),
	STATE_U16(struct kvm_segment, selector), STATE_U8(struct kvm_segment, type),
	STATE_U8(struct kvm_segment, present), STATE_U8(struct kvm_segment, dpl),
	STATE_U8(struct kvm_segment, db), STATE_U8(struct kvm_segment, s),
	STATE_U8(struct kvm_segment, l), STATE_U8(struct kvm_segment, g),
	STATE_U8(struct kvm_segment, avl), STATE_U8(struct kvm_segment, unusable),
	STATE_TRANSIENT(struct kvm_segment, padding, PADDING));

STATE_TABLE(static, dtable_state, struct kvm_dtable, "dtable", NULL,
	STATE_U64(struct kvm_dtable, base), STATE_U16(struct kvm_dtable, limit),
	STATE_TRANSIENT(struct kvm_dtable, padding, PADDING));

STATE_TABLE(static, sregs_state, struct kvm_sregs, "sregs", NULL,
	STATE_NESTED(struct kvm_sregs, cs, &segment_state),
	STATE_NESTED(struct kvm_sregs, ds, &segment_state),
	STATE_NESTED(struct kvm_sregs, es, &segment_state),
	STATE_NESTED(struct kvm_sregs, fs, &segment_state),
	STATE_NESTED(struct kvm_sregs, gs, &segment_state),
	STATE_NESTED(struct kvm_sregs, ss, &segment_state),
	STATE_NESTED(struct kvm_sregs, tr, &segment_state),
	STATE_NESTED(struct kvm_sregs, ldt, &segment_state),
	STATE_NESTED(struct kvm_sregs, gdt, &dtable_state),
	STATE_NESTED(struct kvm_sregs, idt, &dtable_state), STATE_U64(struct kvm_sregs, cr0),
	STATE_U64(struct kvm_sregs, cr2), STATE_U64(struct kvm_sregs, cr3),
	STATE_U64(struct kvm_sregs, cr4), STATE_U64(struct kvm_sregs, cr8),
	STATE_U64(struct kvm_sregs, efer), STATE_U64(struct kvm_sregs, apic_base),
	STATE_U64S(struct kvm_sregs, interrupt_bitmap));

STATE_TABLE(static, debugregs_state, struct kvm_debugregs, "debugregs", NULL,
	STATE_U64S(struct kvm_debugregs, db), STATE_U64(struct kvm_debugregs, dr6),
	STATE_U64(struct kvm_debugregs, dr7),
	STATE_TRANSIENT(struct kvm_debugregs, flags, "none is defined"),
	STATE_TRANSIENT(struct kvm_debugregs, reserved, PADDING));

STATE_TABLE(static, xcr_state, struct kvm_xcr, "xcr", NULL, STATE_U32(struct kvm_xcr, xcr),
	STATE_U64(struct kvm_xcr, value), STATE_TRANSIENT(struct kvm_xcr, reserved, PADDING));

STATE_TABLE(static, xcrs_state, struct kvm_xcrs, "xcrs", NULL,
	STATE_NESTEDS_COUNTED(struct kvm_xcrs, xcrs, nr_xcrs, &xcr_state),
	STATE_TRANSIENT(struct kvm_xcrs, flags, "none is defined"),
	STATE_TRANSIENT(struct kvm_xcrs, padding, PADDING));

STATE_TABLE(static, events_state, struct kvm_vcpu_events, "events", NULL,
	STATE_U8(struct kvm_vcpu_events, exception.injected),
	STATE_U8(struct kvm_vcpu_events, exception.nr),
	STATE_U8(struct kvm_vcpu_events, exception.has_error_code),
	STATE_U8(struct kvm_vcpu_events, exception.pending),
	STATE_U32(struct kvm_vcpu_events, exception.error_code),
	STATE_U8(struct kvm_vcpu_events, interrupt.injected),
	STATE_U8(struct kvm_vcpu_events, interrupt.nr),
	STATE_U8(struct kvm_vcpu_events, interrupt.soft),
	STATE_U8(struct kvm_vcpu_events, interrupt.shadow),
	STATE_U8(struct kvm_vcpu_events, nmi.injected),
	STATE_U8(struct kvm_vcpu_events, nmi.pending), STATE_U8(struct kvm_vcpu_events, nmi.masked),
	STATE_TRANSIENT(struct kvm_vcpu_events, nmi.pad, PADDING),
	STATE_U32(struct kvm_vcpu_events, sipi_vector), STATE_U32(struct kvm_vcpu_events, flags),
	STATE_U8(struct kvm_vcpu_events, smi.smm), STATE_U8(struct kvm_vcpu_events, smi.pending),
	STATE_U8(struct kvm_vcpu_events, smi.smm_inside_nmi),
	STATE_U8(struct kvm_vcpu_events, smi.latched_init),
	STATE_U8(struct kvm_vcpu_events, triple_fault.pending),
	STATE_TRANSIENT(struct kvm_vcpu_events, reserved, PADDING),
	STATE_U8(struct kvm_vcpu_events, exception_has_payload),
	STATE_U64(struct kvm_vcpu_events, exception_payload));

STATE_TABLE(static, msr_state, struct x86_msr, "msr", NULL, STATE_U32(struct x86_msr, index),
	STATE_U64(struct x86_msr, value), STATE_TRANSIENT(struct x86_msr, unused, PADDING));

STATE_TABLE(static, cpuid_entry_state, struct kvm_cpuid_entry2, "cpuid", NULL,
	STATE_U32(struct kvm_cpuid_entry2, function), STATE_U32(struct kvm_cpuid_entry2, index),
	STATE_U32(struct kvm_cpuid_entry2, flags), STATE_U32(struct kvm_cpuid_entry2, eax),
	STATE_U32(struct kvm_cpuid_entry2, ebx), STATE_U32(struct kvm_cpuid_entry2, ecx),
	STATE_U32(struct kvm_cpuid_entry2, edx),
	STATE_TRANSIENT(struct kvm_cpuid_entry2, padding, PADDING));

STATE_TABLE(static, cpuid_state, struct cpuid_table, "cpuids", NULL,
	STATE_NESTEDS_COUNTED(struct cpuid_table, entries, nent, &cpuid_entry_state),
	STATE_TRANSIENT(struct cpuid_table, padding, PADDING));

STATE_TABLE(, x86_vcpu_state_table, struct x86_vcpu_state, "vcpu", NULL,
	STATE_NESTED(struct x86_vcpu_state, cpuid, &cpuid_state),
	STATE_U32(struct x86_vcpu_state, vcpu_id), STATE_U32(struct x86_vcpu_state, tsc_khz),
	STATE_U32(struct x86_vcpu_state, mp_state),
	STATE_NESTED(struct x86_vcpu_state, regs, &regs_state),
	STATE_NESTED(struct x86_vcpu_state, sregs, &sregs_state),
	STATE_NESTED(struct x86_vcpu_state, debugregs, &debugregs_state),
	STATE_NESTED(struct x86_vcpu_state, xcrs, &xcrs_state),
	STATE_BYTES(struct x86_vcpu_state, xsave),
	STATE_NESTEDS_COUNTED(struct x86_vcpu_state, msrs, nr_msrs, &msr_state),
	STATE_BYTES(struct x86_vcpu_state, lapic),
	STATE_NESTED(struct x86_vcpu_state, events, &events_state));

STATE_TABLE(static, pit_channel_state, struct kvm_pit_channel_state, "pit-channel", NULL,
	STATE_U32(struct kvm_pit_channel_state, count),
	STATE_U16(struct kvm_pit_channel_state, latched_count),
	STATE_U8(struct kvm_pit_channel_state, count_latched),
	STATE_U8(struct kvm_pit_channel_state, status_latched),
	STATE_U8(struct kvm_pit_channel_state, status),
	STATE_U8(struct kvm_pit_channel_state, read_state),
	STATE_U8(struct kvm_pit_channel_state, write_state),
	STATE_U8(struct kvm_pit_channel_state, write_latch),
	STATE_U8(struct kvm_pit_channel_state, rw_mode),
	STATE_U8(struct kvm_pit_channel_state, mode), STATE_U8(struct kvm_pit_channel_state, bcd),
	STATE_U8(struct kvm_pit_channel_state, gate),
	STATE_U64(struct kvm_pit_channel_state, count_load_time));

STATE_TABLE(static, pit_state, struct kvm_pit_state2, "pit", NULL,
	STATE_NESTEDS(struct kvm_pit_state2, channels, &pit_channel_state),
	STATE_U32(struct kvm_pit_state2, flags),
	STATE_TRANSIENT(struct kvm_pit_state2, reserved, PADDING));

STATE_TABLE(, x86_vm_state_table, struct x86_vm_state, "vm", NULL,
	STATE_BYTES(struct x86_vm_state, pic_master), STATE_BYTES(struct x86_vm_state, pic_slave),
	STATE_BYTES(struct x86_vm_state, ioapic),
	STATE_NESTED(struct x86_vm_state, pit, &pit_state),
	STATE_U64(struct x86_vm_state, clock_ns));
