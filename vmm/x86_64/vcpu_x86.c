// SPDX-License-Identifier: Apache-2.0
// An x86 vCPU: its CPUID, MSRs, FPU and local APIC when it is made, then the exits that only x86
// has, among them the assist of hosts that emulate ring 0. init, boot, fini: main thread; exit and
// where: the vCPU's thread.
#include "vmm/x86_64/vcpu_x86.h"

#include <asm/mtrr.h>
#include <errno.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/base/log.h"
#include "vmm/x86_64/assist.h"
#include "vmm/x86_64/cpuid.h"

// SDM vol. 4, table 2-2.
#define MSR_IA32_MISC_ENABLE    0x1a0U
#define MISC_ENABLE_FAST_STRING (1U << 0)
#define MSR_MTRR_DEF_TYPE       0x2ffU
#define MTRR_DEF_TYPE_ENABLE    (1U << 11)
#define MTRR_TYPE_WB            6U
// SDM vol. 3, 11.5.1: local vector table; the delivery modes of the two pins of a PC.
#define APIC_LVT0        0x350U
#define APIC_LVT1        0x360U
#define APIC_MODE_EXTINT (7U << 8)
#define APIC_MODE_NMI    (4U << 8)
#define APIC_MODE_MASK   (7U << 8)

#define X86_VECTOR_UD  6
#define INSN_BYTES_MAX 15

// Only for the assist; allocated when vCPU 0 finds that it will be needed.
struct vcpu_x86 {
	struct assist_xstate xstate;
};

static int get_cpuid(
	int fd, unsigned long request, const char *name, struct cpuid_table *table, struct err *err)
{
	table->nent = CPUID_ENTRIES_MAX;
	table->padding = 0;
	if (ioctl(fd, request, table) < 0)
		return err_errno(err, -errno, "%s", name);
	return 0;
}

static int set_cpuid(struct vcpu *vcpu, const struct cpuid_table *table, struct err *err)
{
	if (ioctl(vcpu_fd(vcpu), KVM_SET_CPUID2, table) < 0)
		return err_errno(err, -errno, "KVM_SET_CPUID2");
	return 0;
}

// Sets *ret to whether this host emulates ring 0, by what it does to a table that lacks POPCNT.
static int probe_emulated_ring0(
	struct vcpu *vcpu, const struct cpuid_table *table, bool *ret, struct err *err)
{
	struct cpuid_table probe = *table;
	int r;

	cpuid_probe_prepare(&probe);
	r = set_cpuid(vcpu, &probe, err);
	if (r == 0)
		r = get_cpuid(vcpu_fd(vcpu), KVM_GET_CPUID2, "KVM_GET_CPUID2", &probe, err);
	if (r == 0)
		*ret = cpuid_probe_says_emulated(&probe);
	return r;
}

static int init_cpuid(struct vcpu *vcpu, struct err *err)
{
	struct vcpu_env *env = vcpu_env(vcpu);
	struct cpuid_table table;
	struct cpuid_options opts = {
		.vcpu_id = vcpu_id(vcpu),
		.nr_vcpus = env->nr_vcpus,
		.tsc_deadline = kvm_check(env->kvm, KVM_CAP_TSC_DEADLINE_TIMER) > 0,
	};
	int r;

	r = get_cpuid(
		env->kvm->fd, KVM_GET_SUPPORTED_CPUID, "KVM_GET_SUPPORTED_CPUID", &table, err);
	if (r < 0)
		return r;
	if (vcpu_id(vcpu) == 0) {
		r = probe_emulated_ring0(vcpu, &table, &env->emulated_ring0, err);
		if (r < 0)
			return r;
	}
	opts.emulated_ring0 = env->emulated_ring0;
	cpuid_filter(&table, &opts);
	return set_cpuid(vcpu, &table, err);
}

static int init_msrs(struct vcpu *vcpu, struct err *err)
{
	struct {
		uint32_t nmsrs, pad; // laid out as struct kvm_msrs
		struct kvm_msr_entry entries[2];
	} msrs = {
		.nmsrs = 2,
		.entries =
			{
				{.index = MSR_IA32_MISC_ENABLE, .data = MISC_ENABLE_FAST_STRING},
				{.index = MSR_MTRR_DEF_TYPE,
					.data = MTRR_DEF_TYPE_ENABLE | MTRR_TYPE_WB},
			},
	};
	int r = ioctl(vcpu_fd(vcpu), KVM_SET_MSRS, &msrs);

	if (r < 0)
		return err_errno(err, -errno, "KVM_SET_MSRS");
	if (r < (int)msrs.nmsrs)
		return err_set(err, -EIO, "KVM refuses to set MSR 0x%x", msrs.entries[r].index);
	return 0;
}

// As the firmware of a PC leaves the pins: LINT0 takes the PIC's interrupt, LINT1 is the NMI.
static int init_lapic(struct vcpu *vcpu, struct err *err)
{
	struct kvm_lapic_state lapic;
	uint32_t lvt;

	if (ioctl(vcpu_fd(vcpu), KVM_GET_LAPIC, &lapic) < 0)
		return err_errno(err, -errno, "KVM_GET_LAPIC");
	memcpy(&lvt, lapic.regs + APIC_LVT0, sizeof(lvt));
	lvt = (lvt & ~APIC_MODE_MASK) | APIC_MODE_EXTINT;
	memcpy(lapic.regs + APIC_LVT0, &lvt, sizeof(lvt));
	memcpy(&lvt, lapic.regs + APIC_LVT1, sizeof(lvt));
	lvt = (lvt & ~APIC_MODE_MASK) | APIC_MODE_NMI;
	memcpy(lapic.regs + APIC_LVT1, &lvt, sizeof(lvt));
	if (ioctl(vcpu_fd(vcpu), KVM_SET_LAPIC, &lapic) < 0)
		return err_errno(err, -errno, "KVM_SET_LAPIC");
	return 0;
}

int vcpu_arch_init(struct vcpu *vcpu, struct err *err)
{
	struct kvm_fpu fpu = {.fcw = 0x37f, .mxcsr = 0x1f80}; // as after FNINIT and reset
	int r;

	r = init_cpuid(vcpu, err);
	if (r == 0)
		r = init_msrs(vcpu, err);
	if (r == 0 && ioctl(vcpu_fd(vcpu), KVM_SET_FPU, &fpu) < 0)
		r = err_errno(err, -errno, "KVM_SET_FPU");
	if (r == 0)
		r = init_lapic(vcpu, err);
	if (r < 0)
		return r;
	if (vcpu_env(vcpu)->emulated_ring0) {
		struct vcpu_x86 *arch = calloc(1, sizeof(*arch));

		if (!arch)
			return err_errno(err, -ENOMEM, "state of the assist");
		assist_xstate_host(&arch->xstate);
		*vcpu_arch(vcpu) = arch;
		// The registers come and go with the exit, instead of by four more ioctls.
		if (kvm_check(vcpu_env(vcpu)->kvm, KVM_CAP_SYNC_REGS) & KVM_SYNC_X86_REGS)
			vcpu_run(vcpu)->kvm_valid_regs = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;
	}
	return 0;
}

void vcpu_arch_fini(struct vcpu *vcpu)
{
	free(*vcpu_arch(vcpu));
	*vcpu_arch(vcpu) = NULL;
}

int vcpu_x86_boot(struct vcpu *vcpu, const struct boot_entry *entry, struct err *err)
{
	struct kvm_sregs sregs;
	struct kvm_regs regs;

	if (ioctl(vcpu_fd(vcpu), KVM_GET_SREGS, &sregs) < 0)
		return err_errno(err, -errno, "KVM_GET_SREGS");
	boot_sregs(entry, &sregs);
	boot_regs(entry, &regs);
	if (ioctl(vcpu_fd(vcpu), KVM_SET_SREGS, &sregs) < 0)
		return err_errno(err, -errno, "KVM_SET_SREGS");
	if (ioctl(vcpu_fd(vcpu), KVM_SET_REGS, &regs) < 0)
		return err_errno(err, -errno, "KVM_SET_REGS");
	return 0;
}

// --- Exits -----------------------------------------------------------------------------------

static void io_exit(struct vcpu *vcpu)
{
	struct kvm_run *run = vcpu_run(vcpu);
	struct bus *bus = vcpu_env(vcpu)->pio;
	uint8_t *data = (uint8_t *)run + run->io.data_offset;
	unsigned int size = run->io.size;

	// KVM's own bounds: count * size fits into the page at data_offset.
	for (uint32_t i = 0; i < run->io.count; i++, data += size) {
		if (run->io.direction == KVM_EXIT_IO_OUT)
			bus_write(bus, run->io.port, data, size);
		else
			bus_read(bus, run->io.port, data, size);
	}
}

static int op_get_xsave(void *ctx, void *area, struct err *err)
{
	if (ioctl(vcpu_fd(ctx), KVM_GET_XSAVE, area) < 0)
		return err_errno(err, -errno, "KVM_GET_XSAVE");
	return 0;
}

static int op_set_xsave(void *ctx, const void *area, struct err *err)
{
	if (ioctl(vcpu_fd(ctx), KVM_SET_XSAVE, area) < 0)
		return err_errno(err, -errno, "KVM_SET_XSAVE");
	return 0;
}

static int op_get_xcr0(void *ctx, uint64_t *ret_xcr0, struct err *err)
{
	struct kvm_xcrs xcrs;

	if (ioctl(vcpu_fd(ctx), KVM_GET_XCRS, &xcrs) < 0)
		return err_errno(err, -errno, "KVM_GET_XCRS");
	for (uint32_t i = 0; i < xcrs.nr_xcrs && i < ARRAY_SIZE(xcrs.xcrs); i++) {
		if (xcrs.xcrs[i].xcr == 0) {
			*ret_xcr0 = xcrs.xcrs[i].value;
			return 0;
		}
	}
	return err_set(err, -EIO, "KVM_GET_XCRS: no XCR0");
}

static const struct assist_ops assist_ops = {
	.get_xsave = op_get_xsave,
	.set_xsave = op_set_xsave,
	.get_xcr0 = op_get_xcr0,
};

static int inject(struct vcpu *vcpu, const struct assist_cpu *cpu, struct err *err)
{
	struct kvm_vcpu_events events;

	if (ioctl(vcpu_fd(vcpu), KVM_GET_VCPU_EVENTS, &events) < 0)
		return err_errno(err, -errno, "KVM_GET_VCPU_EVENTS");
	events.exception.injected = 1;
	events.exception.nr = cpu->vector;
	events.exception.has_error_code = cpu->has_error_code;
	events.exception.error_code = cpu->error_code;
	if (ioctl(vcpu_fd(vcpu), KVM_SET_VCPU_EVENTS, &events) < 0)
		return err_errno(err, -errno, "KVM_SET_VCPU_EVENTS");
	return 0;
}

static int cannot_emulate(uint64_t rip, const uint8_t *bytes, size_t len, struct err *err)
{
	char text[3 * INSN_BYTES_MAX + 1] = "";

	for (size_t i = 0; i < len; i++)
		snprintf(text + 3 * i, 4, "%02x ", bytes[i]);
	return err_set(err, -ENOSYS, "KVM could not emulate an instruction: %sat rip 0x%llx",
		text[0] ? text : "(bytes unknown) ", (unsigned long long)rip);
}

// KVM could not emulate an instruction: where the host emulates ring 0, complete it.
static int emulation_exit(struct vcpu *vcpu, enum vcpu_exit_kind *ret_kind, struct err *err)
{
	struct kvm_run *run = vcpu_run(vcpu);
	struct vcpu_x86 *arch = *vcpu_arch(vcpu);
	bool synced = run->kvm_valid_regs != 0;
	struct kvm_regs regs;
	struct kvm_sregs sregs;
	uint8_t bytes[INSN_BYTES_MAX];
	size_t len = 0;
	struct assist_cpu cpu = {
		.regs = &regs,
		.sregs = &sregs,
		.mem = vcpu_env(vcpu)->mem,
		.xstate = arch ? &arch->xstate : NULL,
		.ops = &assist_ops,
		.ctx = vcpu,
	};
	int r;

	if (run->emulation_failure.ndata >= 3 &&
		(run->emulation_failure.flags &
			KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES)) {
		len = MIN((size_t)run->emulation_failure.insn_size, sizeof(bytes));
		memcpy(bytes, run->emulation_failure.insn_bytes, len);
	}
	if (synced) {
		regs = run->s.regs.regs;
		sregs = run->s.regs.sregs;
	} else if (ioctl(vcpu_fd(vcpu), KVM_GET_REGS, &regs) < 0 ||
		   ioctl(vcpu_fd(vcpu), KVM_GET_SREGS, &sregs) < 0) {
		return err_errno(err, -errno, "reading the registers");
	}
	if (arch) {
		*ret_kind = VCPU_EXIT_ASSIST;
		r = assist_run(&cpu, bytes, len, err);
	} else {
		r = cannot_emulate(regs.rip, bytes, len, err);
	}
	if (r < 0 && sregs.ss.dpl == 3) {
		// A program of the guest did it, by pointing such an instruction at a device. That
		// costs the guest the program, not the machine.
		log_guest("vcpu", "%s; the program gets #UD", err->msg);
		cpu.sregs_changed = cpu.has_error_code = false;
		cpu.has_exception = true;
		cpu.vector = X86_VECTOR_UD;
		r = 0;
	}
	if (r < 0)
		return r;
	if (synced) {
		run->s.regs.regs = regs;
		run->kvm_dirty_regs |= KVM_SYNC_X86_REGS;
		if (cpu.sregs_changed) {
			run->s.regs.sregs = sregs;
			run->kvm_dirty_regs |= KVM_SYNC_X86_SREGS;
		}
	} else if (ioctl(vcpu_fd(vcpu), KVM_SET_REGS, &regs) < 0 ||
		   (cpu.sregs_changed && ioctl(vcpu_fd(vcpu), KVM_SET_SREGS, &sregs) < 0)) {
		return err_errno(err, -errno, "writing the registers");
	}
	if (cpu.has_exception) {
		r = inject(vcpu, &cpu, err);
		if (r < 0)
			return r;
	}
	return 1;
}

int vcpu_arch_exit(struct vcpu *vcpu, enum vcpu_exit_kind *ret_kind, struct err *err)
{
	struct kvm_run *run = vcpu_run(vcpu);

	switch (run->exit_reason) {
	case KVM_EXIT_IO:
		*ret_kind = VCPU_EXIT_IO;
		io_exit(vcpu);
		return 1;
	case KVM_EXIT_HLT: // only without an in-kernel local APIC
		return 1;
	case KVM_EXIT_INTERNAL_ERROR:
		if (run->internal.suberror == KVM_INTERNAL_ERROR_EMULATION)
			return emulation_exit(vcpu, ret_kind, err);
		return err_set(err, -EIO, "KVM internal error %u (data 0x%llx 0x%llx)",
			run->internal.suberror,
			(unsigned long long)(run->internal.ndata > 0 ? run->internal.data[0] : 0),
			(unsigned long long)(run->internal.ndata > 1 ? run->internal.data[1] : 0));
	default:
		return err_set(err, -EIO, "unexpected KVM exit %u", run->exit_reason);
	}
}

int vcpu_arch_where(struct vcpu *vcpu, struct vcpu_where *ret_where, struct err *err)
{
	struct kvm_regs regs;
	struct kvm_sregs sregs;

	if (ioctl(vcpu_fd(vcpu), KVM_GET_REGS, &regs) < 0 ||
		ioctl(vcpu_fd(vcpu), KVM_GET_SREGS, &sregs) < 0)
		return err_errno(err, -errno, "reading the registers");
	ret_where->ip = regs.rip;
	ret_where->sp = regs.rsp;
	ret_where->table_root = sregs.cr3;
	ret_where->privilege = sregs.cs.selector & 3;
	return 0;
}
