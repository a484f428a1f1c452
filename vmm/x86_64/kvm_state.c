// SPDX-License-Identifier: Apache-2.0
// Saving and restoring what of an x86 VM is not in its vCPUs: the PICs, the I/O APIC, the PIT, the
// clock. Loop thread, while the vCPUs are parked or not there yet.
//
// An interrupt on its way from a pin of the I/O APIC to a local APIC must be in at least one of the
// two states, so the source of the flow is saved first and restored last: kvm_save() before
// vcpu_save(), kvm_restore() after vcpu_restore(). Besides, KVM_SET_IRQCHIP delivers at once what
// is pending at a pin, for which the local APICs have to be there.
//
// KVM_SET_CLOCK sets the clock to what was saved, without the time that has passed since, so that
// the guest's monotonic time goes on from where it stood. It comes last: the clock runs from then
// on.
#include <errno.h>
#include <linux/kvm.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/kvm.h"
#include "vmm/x86_64/state_x86.h"

static int get_irqchip(struct kvm *kvm, uint32_t id, uint8_t *bytes, size_t len, struct err *err)
{
	struct kvm_irqchip chip = {.chip_id = id};

	if (ioctl(kvm->vm_fd, KVM_GET_IRQCHIP, &chip) < 0)
		return err_errno(err, -errno, "KVM_GET_IRQCHIP %u", id);
	memcpy(bytes, chip.chip.dummy, len);
	return 0;
}

static int set_irqchip(
	struct kvm *kvm, uint32_t id, const uint8_t *bytes, size_t len, struct err *err)
{
	struct kvm_irqchip chip = {.chip_id = id};

	memcpy(chip.chip.dummy, bytes, len);
	if (ioctl(kvm->vm_fd, KVM_SET_IRQCHIP, &chip) < 0)
		return err_errno(err, -errno, "KVM_SET_IRQCHIP %u", id);
	return 0;
}

int kvm_save(struct kvm *kvm, struct buf *out, struct err *err)
{
	CLEANUP_FREE struct x86_vm_state *state = calloc(1, sizeof(*state));
	struct kvm_clock_data clock = {0};
	int r;

	if (!state)
		return err_errno(err, -ENOMEM, "state of the VM");
	r = get_irqchip(
		kvm, KVM_IRQCHIP_PIC_MASTER, state->pic_master, sizeof(state->pic_master), err);
	if (r == 0)
		r = get_irqchip(kvm, KVM_IRQCHIP_PIC_SLAVE, state->pic_slave,
			sizeof(state->pic_slave), err);
	if (r == 0)
		r = get_irqchip(kvm, KVM_IRQCHIP_IOAPIC, state->ioapic, sizeof(state->ioapic), err);
	if (r < 0)
		return r;
	if (ioctl(kvm->vm_fd, KVM_GET_PIT2, &state->pit) < 0)
		return err_errno(err, -errno, "KVM_GET_PIT2");
	if (ioctl(kvm->vm_fd, KVM_GET_CLOCK, &clock) < 0)
		return err_errno(err, -errno, "KVM_GET_CLOCK");
	state->clock_ns = clock.clock;
	r = state_encode(&x86_vm_state_table, state, out);
	return r < 0 ? err_errno(err, r, "state of the VM") : 0;
}

static int restore_state(struct kvm *kvm, struct x86_vm_state *state, struct err *err)
{
	struct kvm_clock_data clock = {.clock = state->clock_ns};
	int r = set_irqchip(
		kvm, KVM_IRQCHIP_PIC_MASTER, state->pic_master, sizeof(state->pic_master), err);

	if (r == 0)
		r = set_irqchip(kvm, KVM_IRQCHIP_PIC_SLAVE, state->pic_slave,
			sizeof(state->pic_slave), err);
	if (r == 0)
		r = set_irqchip(kvm, KVM_IRQCHIP_IOAPIC, state->ioapic, sizeof(state->ioapic), err);
	if (r < 0)
		return r;
	if (ioctl(kvm->vm_fd, KVM_SET_PIT2, &state->pit) < 0)
		return err_errno(err, -errno, "KVM_SET_PIT2");
	if (ioctl(kvm->vm_fd, KVM_SET_CLOCK, &clock) < 0)
		return err_errno(err, -errno, "KVM_SET_CLOCK");
	return 0;
}

int kvm_restore(struct kvm *kvm, const void *data, size_t len, struct err *err)
{
	CLEANUP_FREE struct x86_vm_state *state = calloc(1, sizeof(*state));
	int r;

	if (!state)
		return err_errno(err, -ENOMEM, "state of the VM");
	r = state_decode(&x86_vm_state_table, data, len, state, err);
	if (r == 0)
		r = restore_state(kvm, state, err);
	return r < 0 ? err_wrap(err, r, "restoring the VM") : 0;
}
