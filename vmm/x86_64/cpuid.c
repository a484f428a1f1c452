// SPDX-License-Identifier: Apache-2.0
// CPUID filtering; see the header. Pure; any thread.
#include "vmm/x86_64/cpuid.h"

#include <asm/kvm_para.h>
#include <errno.h>
#include <string.h>

#define LEAF_VENDOR       0x0U
#define LEAF_FEATURES     0x1U
#define LEAF_CACHE        0x4U
#define LEAF_MWAIT        0x5U
#define LEAF_FEATURES_7   0x7U
#define LEAF_PERF         0xaU
#define LEAF_TOPOLOGY     0xbU
#define LEAF_XSTATE       0xdU
#define LEAF_PT           0x14U
#define LEAF_TOPOLOGY_V2  0x1fU
#define LEAF_KVM_FEATURES 0x40000001U
#define LEAF_EXT_FEATURES 0x80000001U
#define LEAF_EXT_SIZES    0x80000008U
#define LEAF_SVM          0x8000000aU
#define LEAF_AMD_CACHE    0x8000001dU
#define LEAF_AMD_TOPOLOGY 0x8000001eU
#define LEAF_SEV          0x8000001fU
#define LEAF_AMD_PERF_V2  0x80000022U
#define LEAF_AMD_TOPO_V2  0x80000026U

#define BIT32(n) (1U << (n))

// Leaf 1 ECX.
#define F1C_DTES64       BIT32(2)
#define F1C_MONITOR      BIT32(3)
#define F1C_VMX          BIT32(5)
#define F1C_CX16         BIT32(13)
#define F1C_PDCM         BIT32(15)
#define F1C_TSC_DEADLINE BIT32(24)
#define F1C_POPCNT       BIT32(23)
#define F1C_OSXSAVE      BIT32(27)
#define F1C_HYPERVISOR   BIT32(31)
// Leaf 1 EDX.
#define F1D_APIC BIT32(9)
#define F1D_DS   BIT32(21)
#define F1D_HTT  BIT32(28)
// Leaf 7, sub-leaf 0: those in EBX say that something is no longer there.
#define F7B_FDP_EXCPTN_ONLY BIT32(6)
#define F7B_NO_FCS_FDS      BIT32(13)
#define F7C_OSPKE           BIT32(4)
// Leaf 0x80000001 ECX.
#define FXC_SVM         BIT32(2)
#define FXC_TOPOEXT     BIT32(22)
#define FXC_PERFCTR     BIT32(23)
#define FXC_PERFCTR_NB  BIT32(24)
#define FXC_PERFCTR_LLC BIT32(28)

// The KVM features that make a guest issue hypercalls, which never return on such a host.
#define HYPERCALL_FEATURES                                                             \
	(BIT32(KVM_FEATURE_ASYNC_PF) | BIT32(KVM_FEATURE_PV_UNHALT) |                  \
		BIT32(KVM_FEATURE_PV_SEND_IPI) | BIT32(KVM_FEATURE_PV_SCHED_YIELD) |   \
		BIT32(KVM_FEATURE_ASYNC_PF_INT) | BIT32(KVM_FEATURE_MSI_EXT_DEST_ID) | \
		BIT32(KVM_FEATURE_HC_MAP_GPA_RANGE) | BIT32(KVM_FEATURE_MIGRATION_CONTROL))

struct kvm_cpuid_entry2 *cpuid_find(struct cpuid_table *table, uint32_t function, uint32_t index)
{
	for (uint32_t i = 0; i < table->nent; i++) {
		struct kvm_cpuid_entry2 *e = &table->entries[i];

		if (e->function == function &&
			(!(e->flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX) || e->index == index))
			return e;
	}
	return NULL;
}

// Whether the leaf is not for the guest at all.
static bool dropped(const struct kvm_cpuid_entry2 *e, const struct cpuid_options *opts)
{
	switch (e->function) {
	case LEAF_TOPOLOGY_V2: // the older leaf 0xb says it all
	case LEAF_PT:
	case LEAF_SVM:
	case LEAF_AMD_CACHE:
	case LEAF_AMD_TOPOLOGY:
	case LEAF_SEV:
	case LEAF_AMD_PERF_V2:
	case LEAF_AMD_TOPO_V2:
		return true;
	case LEAF_XSTATE:
		// Without sub-leaf 1 there is no XSAVEC or XSAVES, which the assist would have to
		// know. Clearing its bits has no effect on such a host, removing it has.
		return opts->emulated_ring0 && e->index == 1;
	default:
		return false;
	}
}

static unsigned int id_bits(unsigned int nr_vcpus)
{
	unsigned int bits = 0;

	while (1U << bits < nr_vcpus)
		bits++;
	return bits;
}

static void filter_entry(struct kvm_cpuid_entry2 *e, const struct cpuid_options *opts)
{
	unsigned int cores = opts->nr_vcpus, core_bits = id_bits(cores);

	switch (e->function) {
	case LEAF_FEATURES:
		e->ebx = (e->ebx & 0xff00U) | MIN(1U << core_bits, 255U) << 16 |
			 (opts->vcpu_id & 0xffU) << 24;
		e->ecx &= ~(F1C_DTES64 | F1C_MONITOR | F1C_VMX | F1C_PDCM | F1C_TSC_DEADLINE);
		e->ecx |= F1C_HYPERVISOR;
		if (opts->tsc_deadline)
			e->ecx |= F1C_TSC_DEADLINE;
		if (opts->emulated_ring0)
			e->ecx &= ~F1C_CX16;
		e->edx &= ~(F1D_DS | F1D_HTT);
		if (cores > 1)
			e->edx |= F1D_HTT;
		break;
	case LEAF_CACHE:
		// EAX 31:26 cores a package, 25:14 threads that share the cache: all for the last
		// level, one for the others.
		if (e->eax & 0x1f) {
			uint32_t level = e->eax >> 5 & 7;
			uint32_t sharing = level >= 3 ? (1U << core_bits) - 1 : 0;

			e->eax = (e->eax & 0x3fff) | (sharing & 0xfff) << 14 |
				 (((1U << core_bits) - 1) & 0x3f) << 26;
		}
		break;
	case LEAF_MWAIT:
	case LEAF_PERF:
		e->eax = e->ebx = e->ecx = e->edx = 0;
		break;
	case LEAF_TOPOLOGY:
		// Level 0: threads of a core; level 1: cores of the package; then the end.
		e->eax = e->index == 1 ? core_bits : 0;
		e->ebx = e->index == 0 ? 1 : e->index == 1 ? cores : 0;
		e->ecx = e->index | (e->index == 0 ? 1U : e->index == 1 ? 2U : 0U) << 8;
		e->edx = opts->vcpu_id;
		break;
	case LEAF_KVM_FEATURES:
		if (opts->emulated_ring0)
			e->eax &= ~HYPERCALL_FEATURES;
		break;
	case LEAF_EXT_FEATURES:
		e->ecx &= ~(FXC_SVM | FXC_TOPOEXT | FXC_PERFCTR | FXC_PERFCTR_NB | FXC_PERFCTR_LLC);
		break;
	case LEAF_EXT_SIZES:
		// ECX 7:0 cores less one, 15:12 bits of the APIC id that count them.
		e->ecx = (e->ecx & ~0xf0ffU) | ((cores - 1) & 0xff) | (core_bits & 0xf) << 12;
		break;
	default:
		break;
	}
}

void cpuid_filter(struct cpuid_table *table, const struct cpuid_options *opts)
{
	uint32_t kept = 0;
	bool level1 = cpuid_find(table, LEAF_TOPOLOGY, 1) != NULL;

	ASSERT(table->nent <= CPUID_ENTRIES_MAX && opts->nr_vcpus >= 1);
	for (uint32_t i = 0; i < table->nent; i++) {
		struct kvm_cpuid_entry2 e = table->entries[i];

		if (dropped(&e, opts))
			continue;
		filter_entry(&e, opts);
		table->entries[kept++] = e;
	}
	// KVM lists only sub-leaf 0 of the topology: the level of cores is ours to add.
	if (!level1 && cpuid_find(table, LEAF_TOPOLOGY, 0) && kept < CPUID_ENTRIES_MAX) {
		struct kvm_cpuid_entry2 e = {
			.function = LEAF_TOPOLOGY,
			.index = 1,
			.flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
		};

		filter_entry(&e, opts);
		table->entries[kept++] = e;
	}
	table->nent = kept;
}

void cpuid_probe_prepare(struct cpuid_table *table)
{
	struct kvm_cpuid_entry2 *e = cpuid_find(table, LEAF_FEATURES, 0);

	if (e)
		e->ecx &= ~F1C_POPCNT;
}

bool cpuid_probe_says_emulated(struct cpuid_table *read_back)
{
	struct kvm_cpuid_entry2 *e = cpuid_find(read_back, LEAF_FEATURES, 0);

	return e && (e->ecx & F1C_POPCNT);
}

// --- A saved table and this host's -------------------------------------------------------------

enum { EAX, EBX, ECX, EDX, NR_REGS };

static const char *const reg_names[NR_REGS] = {"EAX", "EBX", "ECX", "EDX"};

static uint32_t reg_of(const struct kvm_cpuid_entry2 *e, unsigned int reg)
{
	return reg == EAX ? e->eax : reg == EBX ? e->ebx : reg == ECX ? e->ecx : e->edx;
}

// The registers whose bits each stand for something that a guest may use. What is not in the mask
// changes as the guest runs (OSXSAVE follows CR4), or means less the more of it there is.
static const struct {
	uint32_t function, index;
	unsigned int reg;
	uint32_t mask;
} features[] = {
	{LEAF_FEATURES, 0, ECX, ~(F1C_OSXSAVE | F1C_MONITOR)},
	{LEAF_FEATURES, 0, EDX, ~F1D_APIC},
	{LEAF_FEATURES_7, 0, EBX, ~(F7B_FDP_EXCPTN_ONLY | F7B_NO_FCS_FDS)},
	{LEAF_FEATURES_7, 0, ECX, ~F7C_OSPKE},
	{LEAF_FEATURES_7, 0, EDX, UINT32_MAX},
	{LEAF_FEATURES_7, 1, EAX, UINT32_MAX},
	{LEAF_FEATURES_7, 1, EBX, UINT32_MAX},
	{LEAF_FEATURES_7, 1, ECX, UINT32_MAX},
	{LEAF_FEATURES_7, 1, EDX, UINT32_MAX},
	{LEAF_FEATURES_7, 2, EDX, UINT32_MAX},
	{LEAF_XSTATE, 0, EAX, UINT32_MAX},
	{LEAF_XSTATE, 0, EDX, UINT32_MAX},
	{LEAF_XSTATE, 1, EAX, UINT32_MAX},
	{LEAF_XSTATE, 1, ECX, UINT32_MAX},
	{LEAF_XSTATE, 1, EDX, UINT32_MAX},
	{LEAF_KVM_FEATURES, 0, EAX, UINT32_MAX},
	{LEAF_EXT_FEATURES, 0, ECX, UINT32_MAX},
	{LEAF_EXT_FEATURES, 0, EDX, UINT32_MAX},
	{LEAF_EXT_SIZES, 0, EBX, UINT32_MAX},
};

static int compare_vendor(struct cpuid_table *saved, struct cpuid_table *host, struct err *err)
{
	const struct kvm_cpuid_entry2 *a = cpuid_find(saved, LEAF_VENDOR, 0);
	const struct kvm_cpuid_entry2 *b = cpuid_find(host, LEAF_VENDOR, 0);

	if (!a || !b || !cpuid_find(saved, LEAF_FEATURES, 0))
		return err_set(err, -EINVAL, "a processor without CPUID leaf %u", a && b ? 1 : 0);
	if (a->ebx != b->ebx || a->ecx != b->ecx || a->edx != b->edx)
		return err_set(err, -ENOTSUP,
			"saved on a processor of another vendor than this host's (CPUID leaf 0)");
	return 0;
}

// What XSAVE stores where: a guest has areas of that layout in its memory.
static int compare_layout(struct cpuid_table *saved, struct cpuid_table *host, struct err *err)
{
	for (uint32_t i = 0; i < saved->nent; i++) {
		const struct kvm_cpuid_entry2 *e = &saved->entries[i];
		const struct kvm_cpuid_entry2 *h;

		if (e->function != LEAF_XSTATE || e->index < 2 || !e->eax)
			continue;
		h = cpuid_find(host, LEAF_XSTATE, e->index);
		if (!h || h->eax != e->eax || h->ebx != e->ebx)
			return err_set(err, -ENOTSUP,
				"XSAVE component %u lies elsewhere on this host (CPUID leaf 0xd)",
				e->index);
	}
	return 0;
}

int cpuid_compare(struct cpuid_table *saved, struct cpuid_table *host, struct err *err)
{
	int r = compare_vendor(saved, host, err);

	for (unsigned int i = 0; r == 0 && i < ARRAY_SIZE(features); i++) {
		const struct kvm_cpuid_entry2 *a = cpuid_find(
			saved, features[i].function, features[i].index);
		const struct kvm_cpuid_entry2 *b = cpuid_find(
			host, features[i].function, features[i].index);
		const uint32_t lacks = (a ? reg_of(a, features[i].reg) : 0) &
				       ~(b ? reg_of(b, features[i].reg) : 0) & features[i].mask;

		if (lacks)
			return err_set(err, -ENOTSUP,
				"this host lacks features of the processor that it was saved on: "
				"bits 0x%x of CPUID leaf 0x%x.%u %s",
				lacks, features[i].function, features[i].index,
				reg_names[features[i].reg]);
	}
	return r < 0 ? r : compare_layout(saved, host, err);
}

bool cpuid_same(const struct cpuid_table *a, const struct cpuid_table *b)
{
	if (a->nent != b->nent)
		return false;
	for (uint32_t i = 0; i < a->nent; i++) {
		struct kvm_cpuid_entry2 x = a->entries[i], y = b->entries[i];

		if (x.function == LEAF_FEATURES) {
			x.ecx = (x.ecx ^ y.ecx) & ~(F1C_OSXSAVE | F1C_MONITOR) ? ~y.ecx : y.ecx;
			x.edx = (x.edx ^ y.edx) & ~F1D_APIC ? ~y.edx : y.edx;
		} else if (x.function == LEAF_FEATURES_7 && x.index == 0) {
			x.ecx = (x.ecx ^ y.ecx) & ~F7C_OSPKE ? ~y.ecx : y.ecx;
		} else if (x.function == LEAF_XSTATE && x.index < 2) {
			x.ebx = y.ebx; // the size by what XCR0 enables now
		}
		if (memcmp(&x, &y, offsetof(struct kvm_cpuid_entry2, padding)) != 0)
			return false;
	}
	return true;
}
