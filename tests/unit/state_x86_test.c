// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/state_x86: no byte of what KVM gives is forgotten, and what is saved comes back.
#include "tests/support/test.h"

#include <stdlib.h>

#include "vmm/x86_64/state_x86.h"

static void every_byte_is_saved_or_said_not_to_be(void **state)
{
	struct err err = {0};

	(void)state;
	if (state_check(&x86_vcpu_state_table, &err) < 0 ||
		state_check(&x86_vm_state_table, &err) < 0)
		fail_msg("%s", err.msg);
}

static void comes_back(const struct state_table *table, void *obj)
{
	struct buf out = {0}, again = {0};
	void *got = calloc(1, table->size_bytes);
	struct err err = {0};

	assert_non_null(got);
	assert_int_equal(state_encode(table, obj, &out), 0);
	if (state_decode(table, out.data, out.len, got, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(state_encode(table, got, &again), 0);
	assert_int_equal(out.len, again.len);
	assert_memory_equal(out.data, again.data, out.len);
	free(got);
	buf_fini(&out);
	buf_fini(&again);
}

static void what_is_saved_comes_back(void **state)
{
	struct x86_vcpu_state *vcpu = malloc(sizeof(*vcpu));
	struct x86_vm_state vm;

	(void)state;
	assert_non_null(vcpu);
	for (size_t i = 0; i < sizeof(*vcpu); i++)
		((uint8_t *)vcpu)[i] = (uint8_t)(i * 13 + i / 256);
	for (size_t i = 0; i < sizeof(vm); i++)
		((uint8_t *)&vm)[i] = (uint8_t)(i * 7);
	vcpu->nr_msrs = X86_MSRS_MAX;
	vcpu->cpuid.nent = CPUID_ENTRIES_MAX;
	vcpu->xcrs.nr_xcrs = KVM_MAX_XCRS;
	comes_back(&x86_vcpu_state_table, vcpu);
	vcpu->nr_msrs = vcpu->cpuid.nent = vcpu->xcrs.nr_xcrs = 0;
	comes_back(&x86_vcpu_state_table, vcpu);
	comes_back(&x86_vm_state_table, &vm);
	free(vcpu);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_byte_is_saved_or_said_not_to_be),
		cmocka_unit_test(what_is_saved_comes_back),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
