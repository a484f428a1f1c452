// SPDX-License-Identifier: Apache-2.0
// A decoder of x86 instructions in 64-bit mode: where the parts are and how long the whole is, not
// what it does. Pure, bounded and without trust in its input. Any thread.
#ifndef MAYFLY_X86_64_INSN_H
#define MAYFLY_X86_64_INSN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define INSN_LEN_MAX 15

enum insn_map { INSN_MAP_ONE, INSN_MAP_0F, INSN_MAP_0F38, INSN_MAP_0F3A };

// Numbers of general registers as instructions encode them.
enum { GPR_RAX, GPR_RCX, GPR_RDX, GPR_RBX, GPR_RSP, GPR_RBP, GPR_RSI, GPR_RDI, GPR_COUNT = 16 };

enum insn_seg { INSN_SEG_NONE, INSN_SEG_FS, INSN_SEG_GS }; // the others have no effect

struct insn {
	uint8_t len; // bytes, prefixes included
	enum insn_map map;
	uint8_t opcode;
	bool lock;
	bool opsize; // 66
	bool addr32; // 67
	uint8_t rep; // F2, F3 (the later wins) or 0
	uint8_t rex; // the REX prefix in force, or 0
	enum insn_seg seg;

	bool has_modrm;
	uint8_t modrm; // the byte itself
	uint8_t reg; // its reg and rm fields with REX.R and REX.B
	uint8_t rm;
	bool is_mem; // mod is not 3; then the operand's address is
	int8_t base; // a general register or -1
	int8_t index; // a general register or -1
	uint8_t scale; // as a shift
	bool rip_rel;
	int32_t disp;

	uint8_t imm_bytes; // 0, 1, 2, 3 (enter), 4 or 8
	uint64_t imm;
};

// Decodes the instruction that starts at bytes; what follows it is not looked at.
//  -ENODATA     it goes on beyond len bytes (never for len >= INSN_LEN_MAX)
//  -EINVAL      longer than 15 bytes, or an opcode that 64-bit mode does not have
//  -EOPNOTSUPP  VEX, EVEX, XOP or 3DNow!, whose lengths are not known here
int insn_decode(const uint8_t *bytes, size_t len, struct insn *ret);

// The offset of the memory operand in its segment (SDM vol. 2, 2.1.5 and 2.2.1). next_rip is that
// of the following instruction. Only for is_mem.
uint64_t insn_offset(const struct insn *insn, const uint64_t gpr[GPR_COUNT], uint64_t next_rip);

// Operand size of a general instruction: 2, 4 or 8.
unsigned int insn_opsize_bytes(const struct insn *insn);

#endif
