// SPDX-License-Identifier: Apache-2.0
// Fuzzes what is done with a vCPU's or a VM's saved state before KVM sees it: decoding, and the
// comparison of CPUID tables.
//
// Input: the encoded state; its first byte tells which of the two it is.
#include "tests/support/fuzz_input.h"
#include "vmm/x86_64/state_x86.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct cpuid_table host = {
	.nent = 4,
	.entries =
		{
			{.function = 0, .ebx = 0x756e6547, .ecx = 0x6c65746e, .edx = 0x49656e69},
			{.function = 1, .ecx = 0x7fffffff, .edx = 0x3fffffff},
			{.function = 7, .index = 0, .flags = 1, .ebx = 0xf0f0f0f0},
			{.function = 0xd, .index = 2, .flags = 1, .eax = 256, .ebx = 576},
		},
};

static void fuzz_vcpu(const uint8_t *data, size_t size)
{
	static struct x86_vcpu_state vcpu, again;
	struct err err = {0};
	struct buf out = {0};
	int r;

	memset(&vcpu, 0, sizeof(vcpu));
	if (state_decode(&x86_vcpu_state_table, data, size, &vcpu, &err) < 0) {
		FUZZ_CHECK(err.code == -22 && err.msg[0]);
		return;
	}
	FUZZ_CHECK(vcpu.nr_msrs <= X86_MSRS_MAX && vcpu.xcrs.nr_xcrs <= KVM_MAX_XCRS);
	FUZZ_CHECK(vcpu.cpuid.nent <= CPUID_ENTRIES_MAX);
	r = cpuid_compare(&vcpu.cpuid, &host, &err);
	FUZZ_CHECK(r == 0 || err.msg[0]);
	FUZZ_CHECK(cpuid_same(&vcpu.cpuid, &vcpu.cpuid));
	FUZZ_CHECK(!cpuid_same(&vcpu.cpuid, &host) || r == 0);
	FUZZ_CHECK(state_encode(&x86_vcpu_state_table, &vcpu, &out) == 0);
	memset(&again, 0, sizeof(again));
	FUZZ_CHECK(state_decode(&x86_vcpu_state_table, out.data, out.len, &again, &err) == 0);
	FUZZ_CHECK(memcmp(&vcpu.regs, &again.regs, sizeof(vcpu.regs)) == 0);
	buf_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct x86_vm_state vm = {0};
	struct err err = {0};

	if (size == 0)
		return 0;
	if (data[0] & 1)
		FUZZ_CHECK(state_decode(&x86_vm_state_table, data + 1, size - 1, &vm, &err) == 0 ||
			   err.msg[0]);
	else
		fuzz_vcpu(data + 1, size - 1);
	return 0;
}
