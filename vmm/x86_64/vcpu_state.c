// SPDX-License-Identifier: Apache-2.0
// Saving and restoring an x86 vCPU. Loop thread, while the vCPU's is parked or not there yet.
//
// The order of the ioctls is not free.
//
// Saving:
//  - KVM_GET_MP_STATE first: it takes in an INIT or SIPI that is pending, which changes the rest.
//  - MSRs before KVM_GET_LAPIC: a TSC deadline that passes in between is then in both, and the
//  worst
//    is an interrupt too many. The other way round it could be in neither.
//  - KVM_GET_VCPU_EVENTS last: what the others take in may be pending there.
//  - KVM_KVMCLOCK_CTRL: the guest learns that it stood still, and its watchdog keeps quiet.
// Restoring:
//  - CPUID first: which registers, bits and MSRs there are depends on it.
//  - The TSC's frequency before the TSC.
//  - KVM_SET_SREGS before KVM_SET_LAPIC: the APIC base says whether there is one, in which mode.
//    And before KVM_SET_MP_STATE, which it changes where the vCPU looks freshly reset.
//  - XCR0 before the XSAVE area, whose components it names.
//  - KVM_SET_LAPIC before the MSRs: a TSC deadline is taken only in the timer mode that the LVT
//  says.
//  - The TSC before the deadline. Where the TSC cannot be set (a host that emulates ring 0, or has
//    been started anew) the deadline moves by as much as the TSC is off.
//  - KVM_SET_REGS before KVM_SET_VCPU_EVENTS: the former drops a pending exception, KVM_SET_SREGS
//    has an idea of the pending interrupt, and the latter has the last word.
// All vCPUs come before kvm_restore(); see there.
#include <errno.h>
#include <linux/kvm.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/vcpu.h"
#include "vmm/x86_64/state_x86.h"

// SDM vol. 4, table 2-2.
#define MSR_TSC          0x10U
#define MSR_TSC_DEADLINE 0x6e0U
// Hyper-V's, which no guest of ours is offered.
#define MSR_HYPERV_FIRST 0x40000000U
#define MSR_HYPERV_LAST  0x400001ffU

// Within this a TSC counts as the same: what KVM takes, too (api.rst, KVM_SET_TSC_KHZ).
#define TSC_TOLERANCE_PPM 250U

_Static_assert(sizeof(struct kvm_xsave) == X86_XSAVE_BYTES, "the fixed part of struct kvm_xsave");

struct msr_list {
	uint32_t nr; // laid out as struct kvm_msr_list
	uint32_t indices[X86_MSRS_MAX];
};

struct msr_batch {
	uint32_t nr, pad; // laid out as struct kvm_msrs
	struct kvm_msr_entry entries[X86_MSRS_MAX];
};

// An ioctl that fills or takes a struct, and says its name when it fails.
#define CALL(vcpu, request, arg, err) call(vcpu, request, #request, arg, err)

static int call(
	struct vcpu *vcpu, unsigned long request, const char *name, void *arg, struct err *err)
{
	return ioctl(vcpu_fd(vcpu), request, arg) < 0 ? err_errno(err, -errno, "%s", name) : 0;
}

// Fails for a guest that does not use kvm-clock, which has no watchdog to be told either.
static void tell_of_stop(struct vcpu *vcpu)
{
	int ignored = ioctl(vcpu_fd(vcpu), KVM_KVMCLOCK_CTRL, 0);

	(void)ignored;
}

static int list_msrs(struct vcpu *vcpu, struct msr_list *list, struct err *err)
{
	uint32_t kept = 0;

	list->nr = X86_MSRS_MAX;
	if (ioctl(vcpu_env(vcpu)->kvm->fd, KVM_GET_MSR_INDEX_LIST, list) < 0)
		return err_errno(err, -errno, "KVM_GET_MSR_INDEX_LIST");
	for (uint32_t i = 0; i < list->nr; i++)
		if (list->indices[i] < MSR_HYPERV_FIRST || list->indices[i] > MSR_HYPERV_LAST)
			list->indices[kept++] = list->indices[i];
	list->nr = kept;
	return 0;
}

// --- Saving ----------------------------------------------------------------------------------

// Those of the list that can be read: KVM lists some that this vCPU's CPUID does not have.
static int save_msrs(struct vcpu *vcpu, struct x86_vcpu_state *state, struct err *err)
{
	CLEANUP_FREE struct msr_batch *batch = calloc(1, sizeof(*batch));
	struct msr_list list;
	uint32_t at = 0;
	int r;

	if (!batch)
		return err_errno(err, -ENOMEM, "MSRs");
	r = list_msrs(vcpu, &list, err);
	if (r < 0)
		return r;
	while (at < list.nr) {
		batch->nr = list.nr - at;
		for (uint32_t i = 0; i < batch->nr; i++)
			batch->entries[i].index = list.indices[at + i];
		// It returns how many it has read, up to the first that cannot be.
		r = ioctl(vcpu_fd(vcpu), KVM_GET_MSRS, batch);
		if (r < 0)
			return err_errno(err, -errno, "KVM_GET_MSRS");
		for (int i = 0; i < r; i++)
			state->msrs[state->nr_msrs++] = (struct x86_msr){
				.index = batch->entries[i].index,
				.value = batch->entries[i].data,
			};
		at += (uint32_t)r + 1;
	}
	return 0;
}

static int save_state(struct vcpu *vcpu, struct x86_vcpu_state *state, struct err *err)
{
	struct kvm_mp_state mp = {0};
	int r;

	state->vcpu_id = vcpu_id(vcpu);
	r = CALL(vcpu, KVM_GET_MP_STATE, &mp, err);
	state->mp_state = mp.mp_state;
	if (r == 0)
		r = CALL(vcpu, KVM_GET_REGS, &state->regs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_SREGS, &state->sregs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_DEBUGREGS, &state->debugregs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_XCRS, &state->xcrs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_XSAVE, state->xsave, err);
	if (r == 0)
		r = save_msrs(vcpu, state, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_LAPIC, state->lapic, err);
	if (r == 0)
		r = CALL(vcpu, KVM_GET_VCPU_EVENTS, &state->events, err);
	if (r < 0)
		return r;
	state->cpuid.nent = CPUID_ENTRIES_MAX;
	r = CALL(vcpu, KVM_GET_CPUID2, &state->cpuid, err);
	if (r < 0)
		return r;
	r = ioctl(vcpu_fd(vcpu), KVM_GET_TSC_KHZ, 0);
	state->tsc_khz = r > 0 ? (uint32_t)r : 0;
	return 0;
}

int vcpu_save(struct vcpu *vcpu, struct buf *out, struct err *err)
{
	CLEANUP_FREE struct x86_vcpu_state *state = calloc(1, sizeof(*state));
	int r;

	if (!state)
		return err_errno(err, -ENOMEM, "vCPU %u", vcpu_id(vcpu));
	r = save_state(vcpu, state, err);
	if (r < 0)
		return err_wrap(err, r, "vCPU %u", vcpu_id(vcpu));
	tell_of_stop(vcpu);
	r = state_encode(&x86_vcpu_state_table, state, out);
	return r < 0 ? err_errno(err, r, "vCPU %u", vcpu_id(vcpu)) : 0;
}

// --- Restoring -------------------------------------------------------------------------------

static int restore_cpuid(struct vcpu *vcpu, struct cpuid_table *saved, struct err *err)
{
	CLEANUP_FREE struct cpuid_table *host = calloc(1, sizeof(*host));
	int r;

	if (!host)
		return err_errno(err, -ENOMEM, "CPUID");
	host->nent = CPUID_ENTRIES_MAX;
	r = CALL(vcpu, KVM_GET_CPUID2, host, err);
	if (r == 0)
		r = cpuid_compare(saved, host, err);
	// A vCPU that has run takes no other table, and needs none.
	if (r < 0 || cpuid_same(saved, host))
		return r;
	return CALL(vcpu, KVM_SET_CPUID2, saved, err);
}

static int restore_tsc_khz(struct vcpu *vcpu, uint32_t saved_khz, struct err *err)
{
	const int r = ioctl(vcpu_fd(vcpu), KVM_GET_TSC_KHZ, 0);
	const uint64_t khz = r > 0 ? (uint64_t)r : 0;
	const uint64_t off_khz = khz > saved_khz ? khz - saved_khz : saved_khz - khz;

	if (!saved_khz || !khz || off_khz * 1000000 <= khz * TSC_TOLERANCE_PPM)
		return 0;
	if (ioctl(vcpu_fd(vcpu), KVM_SET_TSC_KHZ, (unsigned long)saved_khz) < 0)
		return err_errno(err, -ENOTSUP,
			"saved where the TSC runs at %u kHz; here it runs at %llu, and this "
			"host's KVM cannot scale it",
			saved_khz, (unsigned long long)khz);
	return 0;
}

static int get_msr(struct vcpu *vcpu, uint32_t index, uint64_t *ret_value)
{
	struct {
		uint32_t nr, pad; // laid out as struct kvm_msrs
		struct kvm_msr_entry entry;
	} one = {.nr = 1, .entry.index = index};

	if (ioctl(vcpu_fd(vcpu), KVM_GET_MSRS, &one) != 1)
		return -ENOENT;
	*ret_value = one.entry.data;
	return 0;
}

static bool is_listed(const struct msr_list *list, uint32_t index)
{
	for (uint32_t i = 0; i < list->nr; i++)
		if (list->indices[i] == index)
			return true;
	return false;
}

// An MSR that this host does not let us set must not matter: it has the value already, or zero
// stands for its never having been used.
static int could_not_set(struct vcpu *vcpu, uint32_t index, uint64_t value, struct err *err)
{
	uint64_t now = 0;

	if (value == 0 || (get_msr(vcpu, index, &now) == 0 && now == value))
		return 0;
	return err_set(err, -ENOTSUP, "MSR 0x%x cannot be set to 0x%llx on this host", index,
		(unsigned long long)value);
}

static int set_msrs(struct vcpu *vcpu, const struct msr_batch *all, struct err *err)
{
	CLEANUP_FREE struct msr_batch *batch = calloc(1, sizeof(*batch));
	uint32_t at = 0;

	if (!batch)
		return err_errno(err, -ENOMEM, "MSRs");
	while (at < all->nr) {
		int r;

		batch->nr = all->nr - at;
		memcpy(batch->entries, all->entries + at, batch->nr * sizeof(batch->entries[0]));
		// It returns how many it has set, up to the first that cannot be.
		r = ioctl(vcpu_fd(vcpu), KVM_SET_MSRS, batch);
		if (r < 0)
			return err_errno(err, -errno, "KVM_SET_MSRS");
		at += (uint32_t)r;
		if (at == all->nr)
			break;
		r = could_not_set(vcpu, all->entries[at].index, all->entries[at].data, err);
		if (r < 0)
			return r;
		at++;
	}
	return 0;
}

static int restore_msrs(struct vcpu *vcpu, const struct x86_vcpu_state *state, struct err *err)
{
	CLEANUP_FREE struct msr_batch *batch = calloc(1, sizeof(*batch));
	uint64_t deadline = 0, saved_tsc = 0, tsc = 0;
	struct msr_list list;
	int r;

	if (!batch)
		return err_errno(err, -ENOMEM, "MSRs");
	r = list_msrs(vcpu, &list, err);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < state->nr_msrs; i++) {
		const struct x86_msr *msr = &state->msrs[i];

		if (msr->index == MSR_TSC)
			saved_tsc = msr->value;
		if (msr->index == MSR_TSC_DEADLINE) {
			deadline = msr->value;
		} else if (is_listed(&list, msr->index)) {
			batch->entries[batch->nr++] = (struct kvm_msr_entry){
				.index = msr->index, .data = msr->value};
		} else {
			// Not KVM's idea of what a guest has, so not for us to set either.
			r = could_not_set(vcpu, msr->index, msr->value, err);
			if (r < 0)
				return r;
		}
	}
	r = set_msrs(vcpu, batch, err);
	if (r < 0 || !deadline)
		return r;
	if (saved_tsc && get_msr(vcpu, MSR_TSC, &tsc) == 0)
		deadline += tsc - saved_tsc;
	batch->nr = 1;
	batch->entries[0] = (struct kvm_msr_entry){.index = MSR_TSC_DEADLINE, .data = deadline};
	return set_msrs(vcpu, batch, err);
}

static int restore_state(struct vcpu *vcpu, struct x86_vcpu_state *state, struct err *err)
{
	struct kvm_mp_state mp = {.mp_state = state->mp_state};
	int r = 0;

	if (state->vcpu_id != vcpu_id(vcpu))
		r = err_set(err, -EINVAL, "this is the state of vCPU %u", state->vcpu_id);
	if (r == 0)
		r = restore_cpuid(vcpu, &state->cpuid, err);
	if (r == 0)
		r = restore_tsc_khz(vcpu, state->tsc_khz, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_SREGS, &state->sregs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_REGS, &state->regs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_DEBUGREGS, &state->debugregs, err);
	if (r == 0 && state->xcrs.nr_xcrs)
		r = CALL(vcpu, KVM_SET_XCRS, &state->xcrs, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_XSAVE, state->xsave, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_LAPIC, state->lapic, err);
	if (r == 0)
		r = restore_msrs(vcpu, state, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_MP_STATE, &mp, err);
	if (r == 0)
		r = CALL(vcpu, KVM_SET_VCPU_EVENTS, &state->events, err);
	return r;
}

int vcpu_restore(struct vcpu *vcpu, const void *data, size_t len, struct err *err)
{
	CLEANUP_FREE struct x86_vcpu_state *state = calloc(1, sizeof(*state));
	int r;

	if (!state)
		return err_errno(err, -ENOMEM, "vCPU %u", vcpu_id(vcpu));
	r = state_decode(&x86_vcpu_state_table, data, len, state, err);
	if (r == 0)
		r = restore_state(vcpu, state, err);
	if (r < 0)
		return err_wrap(err, r, "restoring vCPU %u", vcpu_id(vcpu));
	tell_of_stop(vcpu);
	return 0;
}
