// SPDX-License-Identifier: Apache-2.0
// What an x86 VM needs from KVM before its vCPUs: the pages that VMX without unrestricted guest
// uses, the PICs, I/O APIC and local APICs, and the PIT. Main thread.
#include <errno.h>
#include <linux/kvm.h>
#include <sys/ioctl.h>

#include "vmm/kvm.h"
#include "vmm/x86_64/layout.h"

const struct kvm_need kvm_arch_needs[] = {
	{KVM_CAP_SET_TSS_ADDR, "KVM_CAP_SET_TSS_ADDR"},
	{KVM_CAP_EXT_CPUID, "KVM_CAP_EXT_CPUID"},
	{KVM_CAP_PIT2, "KVM_CAP_PIT2"},
	{KVM_CAP_MP_STATE, "KVM_CAP_MP_STATE"},
	{KVM_CAP_XSAVE, "KVM_CAP_XSAVE"},
	{KVM_CAP_XCRS, "KVM_CAP_XCRS"},
	{KVM_CAP_ADJUST_CLOCK, "KVM_CAP_ADJUST_CLOCK"},
	{0, NULL},
};

int kvm_arch_init_vm(struct kvm *kvm, struct err *err)
{
	uint64_t identity_map = LAYOUT_KVM_IDENTITY_MAP_GPA;
	struct kvm_pit_config pit = {.flags = KVM_PIT_SPEAKER_DUMMY};
	struct kvm_enable_cap cap = {.cap = KVM_CAP_EXIT_ON_EMULATION_FAILURE, .args = {1}};

	if (kvm_check(kvm, KVM_CAP_SET_IDENTITY_MAP_ADDR) &&
		ioctl(kvm->vm_fd, KVM_SET_IDENTITY_MAP_ADDR, &identity_map) < 0)
		return err_errno(err, -errno, "KVM_SET_IDENTITY_MAP_ADDR");
	if (ioctl(kvm->vm_fd, KVM_SET_TSS_ADDR, LAYOUT_KVM_TSS_GPA) < 0)
		return err_errno(err, -errno, "KVM_SET_TSS_ADDR");
	if (ioctl(kvm->vm_fd, KVM_CREATE_IRQCHIP, 0) < 0)
		return err_errno(err, -errno, "KVM_CREATE_IRQCHIP");
	if (ioctl(kvm->vm_fd, KVM_CREATE_PIT2, &pit) < 0)
		return err_errno(err, -errno, "KVM_CREATE_PIT2");
	// Without it a failed emulation kills the guest just the same, but says less.
	kvm->emulation_bytes = kvm_check(kvm, KVM_CAP_EXIT_ON_EMULATION_FAILURE) > 0 &&
			       ioctl(kvm->vm_fd, KVM_ENABLE_CAP, &cap) == 0;
	return 0;
}
