// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/cpuid: what is cleared, kept and renumbered for a vCPU, on a table as an Intel and as
// an AMD host would give it, and the probe for hosts that emulate ring 0.
#include "tests/support/test.h"

#include <asm/kvm_para.h>
#include <errno.h>
#include <stdio.h>

#include "vmm/x86_64/cpuid.h"

#define BIT(n) (1U << (n))
#define INDEX  KVM_CPUID_FLAG_SIGNIFCANT_INDEX

static void add(struct cpuid_table *table, struct kvm_cpuid_entry2 e)
{
	table->entries[table->nent++] = e;
}

// Every bit is set, so that whatever is not cleared on purpose shows.
static void add_full(struct cpuid_table *table, uint32_t function, uint32_t index, uint32_t flags)
{
	add(table, (struct kvm_cpuid_entry2){.function = function,
			   .index = index,
			   .flags = flags,
			   .eax = UINT32_MAX,
			   .ebx = UINT32_MAX,
			   .ecx = UINT32_MAX,
			   .edx = UINT32_MAX});
}

// What KVM could report at most, of either vendor. Leaf 4 and the topology are as KVM gives them.
static struct cpuid_table host_table(void)
{
	static const uint32_t plain[] = {0, 1, 5, 6, 0xa, 0x40000000, 0x40000001, 0x80000000,
		0x80000001, 0x80000008, 0x8000000a, 0x8000001e, 0x8000001f, 0x80000021, 0x80000022};
	static const uint32_t indexed[][2] = {{7, 0}, {7, 1}, {0xd, 0}, {0xd, 1}, {0xd, 2},
		{0x14, 0}, {0x14, 1}, {0x1f, 0}, {0x1f, 1}, {0x8000001d, 0}, {0x8000001d, 1},
		{0x80000026, 0}};
	struct cpuid_table table = {0};

	for (size_t i = 0; i < ARRAY_SIZE(plain); i++)
		add_full(&table, plain[i], 0, 0);
	for (size_t i = 0; i < ARRAY_SIZE(indexed); i++)
		add_full(&table, indexed[i][0], indexed[i][1], INDEX);
	add(&table, (struct kvm_cpuid_entry2){
			    .function = 4, .index = 0, .flags = INDEX, .eax = 0xfc004121});
	add(&table, (struct kvm_cpuid_entry2){
			    .function = 4, .index = 1, .flags = INDEX, .eax = 0xffffc163});
	add(&table, (struct kvm_cpuid_entry2){.function = 4, .index = 2, .flags = INDEX});
	add(&table, (struct kvm_cpuid_entry2){.function = 0xb, .flags = INDEX, .edx = 99});
	return table;
}

static struct cpuid_table filtered(const struct cpuid_options *opts)
{
	struct cpuid_table table = host_table();

	cpuid_filter(&table, opts);
	return table;
}

static struct kvm_cpuid_entry2 entry(struct cpuid_table *table, uint32_t function, uint32_t index)
{
	struct kvm_cpuid_entry2 *e = cpuid_find(table, function, index);

	if (!e)
		fail_msg("leaf 0x%x.%x is gone", function, index);
	return *e;
}

static void find_knows_which_leaves_have_an_index(void **state)
{
	struct cpuid_table table = host_table();
	(void)state;

	assert_int_equal(cpuid_find(&table, 0xd, 2)->index, 2);
	assert_null(cpuid_find(&table, 0xd, 9));
	assert_null(cpuid_find(&table, 0x99, 0));
	// Without the flag the index does not count.
	assert_non_null(cpuid_find(&table, 1, 77));
}

static void nothing_of_the_hosts_business_is_left(void **state)
{
	static const uint32_t gone[] = {
		0x14, 0x1f, 0x8000000a, 0x8000001d, 0x8000001e, 0x8000001f, 0x80000022, 0x80000026};
	struct cpuid_table table = filtered(&(struct cpuid_options){.nr_vcpus = 2});
	struct kvm_cpuid_entry2 e;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(gone); i++)
		for (uint32_t index = 0; index < 3; index++)
			assert_null(cpuid_find(&table, gone[i], index));
	e = entry(&table, 1, 0);
	// DTES64, MONITOR, VMX, PDCM, TSC deadline (not offered here); DS.
	assert_int_equal(e.ecx, ~(BIT(2) | BIT(3) | BIT(5) | BIT(15) | BIT(24)));
	assert_int_equal(e.edx, ~BIT(21));
	e = entry(&table, 0x80000001, 0);
	// SVM, TOPOEXT, the three kinds of performance counters.
	assert_int_equal(e.ecx, ~(BIT(2) | BIT(22) | BIT(23) | BIT(24) | BIT(28)));
	for (size_t i = 0; i < 2; i++) { // MWAIT and the PMU
		e = entry(&table, i ? 0xa : 5, 0);
		assert_int_equal(e.eax | e.ebx | e.ecx | e.edx, 0);
	}
	// What is nobody's business to change.
	e = entry(&table, 7, 0);
	assert_int_equal(e.ebx & e.ecx & e.edx, UINT32_MAX);
	e = entry(&table, 0x40000001, 0);
	assert_int_equal(e.eax, UINT32_MAX);
	entry(&table, 0xd, 0);
	entry(&table, 0xd, 1);
}

static void the_hypervisor_bit_is_set_and_tsc_deadline_if_kvm_has_it(void **state)
{
	struct cpuid_table table = host_table();
	(void)state;

	cpuid_find(&table, 1, 0)->ecx = 0;
	cpuid_filter(&table, &(struct cpuid_options){.nr_vcpus = 1});
	assert_int_equal(entry(&table, 1, 0).ecx, BIT(31));
	cpuid_filter(&table, &(struct cpuid_options){.nr_vcpus = 1, .tsc_deadline = true});
	assert_int_equal(entry(&table, 1, 0).ecx, BIT(31) | BIT(24));
}

static void each_vcpu_has_its_own_id_in_one_package(void **state)
{
	static const struct {
		unsigned int nr, bits;
	} cases[] = {{1, 0}, {2, 1}, {3, 2}, {4, 2}, {32, 5}};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		unsigned int nr = cases[i].nr, bits = cases[i].bits, room = 1U << bits;

		for (unsigned int id = 0; id < nr; id++) {
			struct cpuid_table table = filtered(
				&(struct cpuid_options){.vcpu_id = id, .nr_vcpus = nr});
			struct kvm_cpuid_entry2 e = entry(&table, 1, 0);

			// APIC id; ids of the package; CLFLUSH size as it was; no brand.
			assert_int_equal(e.ebx, id << 24 | room << 16 | 0xff00);
			assert_int_equal(!!(e.edx & BIT(28)), nr > 1);
			// Level 0: one thread a core, which takes no bit of the id.
			e = entry(&table, 0xb, 0);
			assert_int_equal(e.eax, 0);
			assert_int_equal(e.ebx, 1);
			assert_int_equal(e.ecx, 1 << 8);
			assert_int_equal(e.edx, id);
			// Level 1: the cores.
			e = entry(&table, 0xb, 1);
			assert_int_equal(e.flags, INDEX);
			assert_int_equal(e.eax, bits);
			assert_int_equal(e.ebx, nr);
			assert_int_equal(e.ecx, 2 << 8 | 1);
			assert_int_equal(e.edx, id);
			// Intel's older way: ids of cores a package; a first-level cache is a
			// core's own, the last is everybody's.
			e = entry(&table, 4, 0);
			assert_int_equal(e.eax, (room - 1) << 26 | 0x121);
			e = entry(&table, 4, 1);
			assert_int_equal(e.eax, (room - 1) << 26 | (room - 1) << 14 | 0x163);
			assert_int_equal(entry(&table, 4, 2).eax, 0);
			// AMD's older way.
			e = entry(&table, 0x80000008, 0);
			assert_int_equal(e.ecx & 0xf0ff, bits << 12 | (nr - 1));
			assert_int_equal(e.ecx & ~0xf0ffU, ~0xf0ffU);
			assert_int_equal(e.eax, UINT32_MAX);
		}
	}
}

static void a_host_with_more_levels_of_topology_leaks_none(void **state)
{
	struct cpuid_table table = host_table();
	unsigned int levels = 0;
	(void)state;

	add_full(&table, 0xb, 1, INDEX);
	add_full(&table, 0xb, 2, INDEX);
	cpuid_filter(&table, &(struct cpuid_options){.vcpu_id = 2, .nr_vcpus = 3});
	for (uint32_t i = 0; i < table.nent; i++)
		levels += table.entries[i].function == 0xb;
	assert_int_equal(levels, 3); // no second level 1
	assert_int_equal(entry(&table, 0xb, 1).ebx, 3);
	assert_int_equal(entry(&table, 0xb, 2).eax, 0);
	assert_int_equal(entry(&table, 0xb, 2).ebx, 0);
	assert_int_equal(entry(&table, 0xb, 2).ecx, 2); // type 0: invalid, the end
}

static void a_host_without_topology_gets_none(void **state)
{
	struct cpuid_table table = {0};
	(void)state;

	add_full(&table, 1, 0, 0);
	cpuid_filter(&table, &(struct cpuid_options){.nr_vcpus = 2});
	assert_int_equal(table.nent, 1);
}

static void a_full_table_stays_within_its_bounds(void **state)
{
	struct cpuid_table table = {0};
	(void)state;

	add(&table, (struct kvm_cpuid_entry2){.function = 0xb, .flags = INDEX});
	while (table.nent < CPUID_ENTRIES_MAX)
		add_full(&table, 7, table.nent, INDEX);
	cpuid_filter(&table, &(struct cpuid_options){.nr_vcpus = 2});
	assert_int_equal(table.nent, CPUID_ENTRIES_MAX);
	assert_null(cpuid_find(&table, 0xb, 1));
}

static void emulated_ring0_loses_what_the_emulator_lacks(void **state)
{
	static const int hypercalls[] = {KVM_FEATURE_ASYNC_PF, KVM_FEATURE_PV_UNHALT,
		KVM_FEATURE_PV_SEND_IPI, KVM_FEATURE_PV_SCHED_YIELD, KVM_FEATURE_ASYNC_PF_INT,
		KVM_FEATURE_MSI_EXT_DEST_ID};
	struct cpuid_options opts = {.nr_vcpus = 1, .emulated_ring0 = true};
	struct cpuid_table plain = filtered(&(struct cpuid_options){.nr_vcpus = 1});
	struct cpuid_table table = filtered(&opts);
	uint32_t features;
	(void)state;

	assert_null(cpuid_find(&table, 0xd, 1));
	entry(&table, 0xd, 0);
	entry(&table, 0xd, 2);
	assert_int_equal(entry(&plain, 1, 0).ecx & ~entry(&table, 1, 0).ecx, BIT(13)); // CX16
	features = entry(&table, 0x40000001, 0).eax;
	for (size_t i = 0; i < ARRAY_SIZE(hypercalls); i++)
		assert_false(features & BIT(hypercalls[i]));
	assert_true(features & BIT(KVM_FEATURE_CLOCKSOURCE2));
	assert_true(features & BIT(KVM_FEATURE_CLOCKSOURCE_STABLE_BIT));
	assert_int_equal(table.nent, plain.nent - 1);
}

static void filtering_twice_changes_nothing(void **state)
{
	(void)state;

	for (int emulated = 0; emulated < 2; emulated++) {
		struct cpuid_options opts = {.vcpu_id = 1,
			.nr_vcpus = 3,
			.tsc_deadline = true,
			.emulated_ring0 = emulated};
		struct cpuid_table once = filtered(&opts), twice = once;

		cpuid_filter(&twice, &opts);
		assert_int_equal(once.nent, twice.nent);
		assert_memory_equal(
			once.entries, twice.entries, once.nent * sizeof(once.entries[0]));
	}
}

static void the_probe_tells_who_honours_a_removal(void **state)
{
	struct cpuid_table asked = host_table(), empty = {0};
	(void)state;

	cpuid_probe_prepare(&asked);
	assert_int_equal(entry(&asked, 1, 0).ecx, ~BIT(23));
	assert_false(cpuid_probe_says_emulated(&asked)); // read back as it was set
	cpuid_find(&asked, 1, 0)->ecx |= BIT(23);
	assert_true(cpuid_probe_says_emulated(&asked)); // forced on again
	cpuid_probe_prepare(&empty);
	assert_false(cpuid_probe_says_emulated(&empty));
}

// --- A saved table and this host's ---------------------------------------------------------------

static const struct cpuid_options two_vcpus = {.nr_vcpus = 2, .tsc_deadline = true};

static void a_guest_goes_on_where_all_is_there(void **state)
{
	struct cpuid_table saved = filtered(&two_vcpus), host = saved;
	struct err err = {0};

	(void)state;
	assert_int_equal(cpuid_compare(&saved, &host, &err), 0);
	assert_true(cpuid_same(&saved, &host));
	// What the guest turns on as it runs is no difference.
	cpuid_find(&saved, 1, 0)->ecx ^= BIT(27) | BIT(3);
	cpuid_find(&saved, 1, 0)->edx ^= BIT(9);
	cpuid_find(&saved, 7, 0)->ecx ^= BIT(4);
	cpuid_find(&saved, 0xd, 0)->ebx = 576;
	cpuid_find(&saved, 0xd, 1)->ebx = 576;
	assert_int_equal(cpuid_compare(&saved, &host, &err), 0);
	assert_true(cpuid_same(&saved, &host));
	// A host with more will do, but is another.
	cpuid_find(&saved, 7, 0)->ebx &= ~BIT(16);
	assert_int_equal(cpuid_compare(&saved, &host, &err), 0);
	assert_false(cpuid_same(&saved, &host));
	saved = host;
	saved.nent--;
	assert_int_equal(cpuid_compare(&saved, &host, &err), 0);
	assert_false(cpuid_same(&saved, &host));
}

static void what_a_host_lacks_is_named(void **state)
{
	static const struct {
		uint32_t function, index;
		unsigned int reg, bit;
		const char *word; // NULL: no matter
	} cases[] = {
		{1, 0, 2, 28, "bits 0x10000000 of CPUID leaf 0x1.0 ECX"},
		{1, 0, 3, 26, "bits 0x4000000 of CPUID leaf 0x1.0 EDX"},
		{7, 0, 1, 16, "bits 0x10000 of CPUID leaf 0x7.0 EBX"},
		{7, 0, 2, 31, "bits 0x80000000 of CPUID leaf 0x7.0 ECX"},
		{7, 1, 0, 5, "bits 0x20 of CPUID leaf 0x7.1 EAX"},
		{0xd, 0, 0, 7, "bits 0x80 of CPUID leaf 0xd.0 EAX"},
		{0xd, 1, 0, 3, "bits 0x8 of CPUID leaf 0xd.1 EAX"},
		{0xd, 2, 1, 3, "XSAVE component 2 lies elsewhere"},
		{0x40000001, 0, 0, 3, "bits 0x8 of CPUID leaf 0x40000001.0 EAX"},
		{0x80000001, 0, 3, 20, "bits 0x100000 of CPUID leaf 0x80000001.0 EDX"},
		{0x80000008, 0, 1, 9, "bits 0x200 of CPUID leaf 0x80000008.0 EBX"},
		{0, 0, 2, 1, "another vendor"},
		{1, 0, 2, 27, NULL},
		{1, 0, 0, 4, NULL}, // the model
		{7, 0, 1, 13, NULL},
		{0x80000000, 0, 0, 0, NULL},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct cpuid_table saved = filtered(&two_vcpus), host = saved;
		struct kvm_cpuid_entry2 *e = cpuid_find(&host, cases[i].function, cases[i].index);
		uint32_t *const regs[] = {&e->eax, &e->ebx, &e->ecx, &e->edx};
		struct err err = {0};
		int r;

		assert_true(*regs[cases[i].reg] & BIT(cases[i].bit));
		*regs[cases[i].reg] &= ~BIT(cases[i].bit);
		r = cpuid_compare(&saved, &host, &err);
		if (r != (cases[i].word ? -ENOTSUP : 0) ||
			(cases[i].word && !strstr(err.msg, cases[i].word)))
			fail_msg("case %zu: %d '%s'", i, r, err.msg);
		// The other way round all is there, but for what has to be the same.
		if (cases[i].function != 0 && (cases[i].function != 0xd || cases[i].index < 2))
			assert_int_equal(cpuid_compare(&host, &saved, NULL), 0);
	}
}

static void a_table_of_no_processor_is_refused(void **state)
{
	struct cpuid_table host = filtered(&two_vcpus), none = {0}, leaf0 = {0};
	struct err err = {0};

	(void)state;
	assert_int_equal(cpuid_compare(&none, &host, &err), -EINVAL);
	add(&leaf0, *cpuid_find(&host, 0, 0));
	assert_int_equal(cpuid_compare(&leaf0, &host, &err), -EINVAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(find_knows_which_leaves_have_an_index),
		cmocka_unit_test(nothing_of_the_hosts_business_is_left),
		cmocka_unit_test(the_hypervisor_bit_is_set_and_tsc_deadline_if_kvm_has_it),
		cmocka_unit_test(each_vcpu_has_its_own_id_in_one_package),
		cmocka_unit_test(a_host_with_more_levels_of_topology_leaks_none),
		cmocka_unit_test(a_host_without_topology_gets_none),
		cmocka_unit_test(a_full_table_stays_within_its_bounds),
		cmocka_unit_test(emulated_ring0_loses_what_the_emulator_lacks),
		cmocka_unit_test(filtering_twice_changes_nothing),
		cmocka_unit_test(the_probe_tells_who_honours_a_removal),
		cmocka_unit_test(a_guest_goes_on_where_all_is_there),
		cmocka_unit_test(what_a_host_lacks_is_named),
		cmocka_unit_test(a_table_of_no_processor_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
