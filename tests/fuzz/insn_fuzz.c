// SPDX-License-Identifier: Apache-2.0
// Fuzzes the instruction decoder: bounded reads, and a length that neither the bytes after the
// instruction nor the size of the buffer change.
#include <errno.h>
#include <stdlib.h>

#include "vmm/base/util.h"
#include "vmm/x86_64/insn.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint64_t gpr[GPR_COUNT];
	struct insn insn, again;
	uint8_t *exact, other[INSN_LEN_MAX];
	int r = insn_decode(data, size, &insn);

	if (r < 0) {
		ASSERT(r == -EINVAL || r == -EOPNOTSUPP || (r == -ENODATA && size < INSN_LEN_MAX));
		return 0;
	}
	ASSERT(insn.len >= 1 && insn.len <= INSN_LEN_MAX && insn.len <= size);
	ASSERT(insn.reg < GPR_COUNT && insn.rm < GPR_COUNT);
	ASSERT(insn.base >= -1 && insn.base < GPR_COUNT);
	ASSERT(insn.index >= -1 && insn.index < GPR_COUNT && insn.index != GPR_RSP);
	if (insn.is_mem)
		insn_offset(&insn, gpr, 0);

	exact = malloc(insn.len);
	ASSERT(exact);
	for (size_t i = 0; i < insn.len; i++)
		exact[i] = data[i];
	ASSERT(insn_decode(exact, insn.len, &again) == 0 && again.len == insn.len);
	ASSERT(insn_decode(exact, insn.len - 1U, &again) == -ENODATA);
	free(exact);

	for (size_t i = 0; i < sizeof(other); i++)
		other[i] = i < insn.len ? data[i] : (uint8_t) ~(i < size ? data[i] : 0);
	ASSERT(insn_decode(other, sizeof(other), &again) == 0 && again.len == insn.len);
	ASSERT(again.imm == insn.imm && again.disp == insn.disp && again.modrm == insn.modrm);
	return 0;
}
