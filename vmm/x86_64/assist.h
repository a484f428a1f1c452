// SPDX-License-Identifier: Apache-2.0
// Completes in user space the instructions that KVM's emulator lacks.
//
// Where guest kernel mode is interpreted (an "emulated ring 0" host), KVM_RUN returns with
// KVM_EXIT_INTERNAL_ERROR and KVM_INTERNAL_ERROR_EMULATION for an instruction that the emulator
// does not know. assist_run() performs it on the registers and guest RAM given. It issues no ioctl:
// the vCPU lends it the XSAVE area and XCR0 through `struct assist_ops` and applies the outcome.
// A cold path: nothing here runs unless that exit occurs. Runs on the vCPU's own thread while the
// other vCPUs and the devices run.
#ifndef MAYFLY_X86_64_ASSIST_H
#define MAYFLY_X86_64_ASSIST_H

#include <linux/kvm.h>

#include "vmm/base/err.h"
#include "vmm/guest_mem.h"

#define ASSIST_XSAVE_BYTES 4096 // struct kvm_xsave, as KVM_GET_XSAVE fills it

// The standard format of the XSAVE area on this processor (CPUID leaf 0xD), which is also the
// layout of KVM's area. Gathered once.
struct assist_xstate {
	uint64_t supported; // XCR0 bits whose components fit in ASSIST_XSAVE_BYTES
	uint32_t mxcsr_mask;
	struct {
		uint32_t off;
		uint32_t size_bytes; // 0 if not supported
	} comp[64];
};

void assist_xstate_host(struct assist_xstate *ret);

// Supplied by the vCPU; all return 0 or a negative errno with *err filled. area has
// ASSIST_XSAVE_BYTES bytes and is aligned to 64.
struct assist_ops {
	int (*get_xsave)(void *ctx, void *area, struct err *err);
	int (*set_xsave)(void *ctx, const void *area, struct err *err);
	int (*get_xcr0)(void *ctx, uint64_t *ret_xcr0, struct err *err);
};

struct assist_cpu {
	// The vCPU's; read, and written when assist_run() returns 0.
	struct kvm_regs *regs;
	struct kvm_sregs *sregs;
	const struct guest_mem *mem;
	const struct assist_xstate *xstate;
	const struct assist_ops *ops;
	void *ctx; // for ops

	// The outcome, set by assist_run().
	const char *name; // of the instruction, for counters and traces; NULL if unknown
	bool sregs_changed; // *sregs must be given back to KVM (with CR2 for #PF)
	bool has_exception; // to be injected, through KVM_SET_VCPU_EVENTS
	bool has_error_code;
	uint8_t vector;
	uint32_t error_code;
};

// Performs the instruction at regs->rip. bytes are those that KVM reported, perhaps too few or
// none: the rest is fetched from guest RAM.
//  0        completed, or raised an exception: *regs, *sregs and the outcome are to be applied
//  -ENOSYS  not one that is completed here; err names its bytes and place. Nothing was changed.
//  other    a failure of an op, or an operand outside of RAM; err is filled. Nothing was changed.
int assist_run(struct assist_cpu *cpu, const uint8_t *bytes, size_t len, struct err *err);

#endif
