// SPDX-License-Identifier: Apache-2.0
// The instruction decoder: one table a map says what follows each opcode. Any thread; see the
// header.
#include "vmm/x86_64/insn.h"

#include <errno.h>

#include "vmm/base/util.h"

#define REX_W 8
#define REX_R 4
#define REX_X 2
#define REX_B 1

// What follows the opcode:
//   .  nothing                    m  ModRM                    c  ModRM that always means registers
//   b  imm8                       M  ModRM, imm8              g  ModRM, imm8 for /0 and /1 only
//   w  imm16                      Z  ModRM, imm16/32          G  ModRM, imm16/32 for /0 and /1 only
//   z  imm16/32                   v  imm16/32/64              e  imm16, imm8
//   o  an address                 r  rel32                    p  ModRM of POP, else XOP
//   -  not in 64-bit mode         ?  of a kind or length that is not known here
// Prefixes and escapes are '-': they are taken before the table is asked.
// clang-format off
static const char map_one[] = {
	/*      0123456789abcdef */
	/* 0 */ "mmmmbz--mmmmbz--"
	/* 1 */ "mmmmbz--mmmmbz--"
	/* 2 */ "mmmmbz--mmmmbz--"
	/* 3 */ "mmmmbz--mmmmbz--"
	/* 4 */ "----------------"
	/* 5 */ "................"
	/* 6 */ "--?m----zZbM...."
	/* 7 */ "bbbbbbbbbbbbbbbb"
	/* 8 */ "MZ-Mmmmmmmmmmmmp"
	/* 9 */ "..........-....."
	/* a */ "oooo....bz......"
	/* b */ "bbbbbbbbvvvvvvvv"
	/* c */ "MMw.??MZe.w..b-."
	/* d */ "mmmm---.mmmmmmmm"
	/* e */ "bbbbbbbbrr-b...."
	/* f */ "-.--..gG......mm"};

static const char map_0f[] = {
	/*      0123456789abcdef */
	/* 0 */ "mmmm-.....-.-m.?"
	/* 1 */ "mmmmmmmmmmmmmmmm"
	/* 2 */ "cccc----mmmmmmmm"
	/* 3 */ "......-.--------"
	/* 4 */ "mmmmmmmmmmmmmmmm"
	/* 5 */ "mmmmmmmmmmmmmmmm"
	/* 6 */ "mmmmmmmmmmmmmmmm"
	/* 7 */ "MMMMmmm.mm--mmmm"
	/* 8 */ "rrrrrrrrrrrrrrrr"
	/* 9 */ "mmmmmmmmmmmmmmmm"
	/* a */ "...mMm--...mMmmm"
	/* b */ "mmmmmmmmmmMmmmmm"
	/* c */ "mmMmMMMm........"
	/* d */ "mmmmmmmmmmmmmmmm"
	/* e */ "mmmmmmmmmmmmmmmm"
	/* f */ "mmmmmmmmmmmmmmm?"};
// clang-format on

_Static_assert(sizeof(map_one) == 257 && sizeof(map_0f) == 257, "an entry for each opcode");

struct cursor {
	const uint8_t *bytes;
	size_t len;
	size_t pos;
	int error; // the first; from then on the reads give 0
};

static uint64_t take(struct cursor *cur, unsigned int nr)
{
	uint64_t val = 0;

	if (cur->error)
		return 0;
	if (nr > INSN_LEN_MAX - cur->pos) {
		cur->error = -EINVAL;
		return 0;
	}
	if (nr > cur->len - cur->pos) {
		cur->error = -ENODATA;
		return 0;
	}
	for (unsigned int i = 0; i < nr; i++)
		val |= (uint64_t)cur->bytes[cur->pos++] << (8 * i);
	return val;
}

// Reads prefixes and returns the byte after them. REX counts only right before the opcode.
static uint8_t take_prefixes(struct cursor *cur, struct insn *insn)
{
	for (;;) {
		uint8_t byte = (uint8_t)take(cur, 1);

		if (cur->error)
			return 0;
		if (byte >= 0x40 && byte <= 0x4f) {
			insn->rex = byte;
			continue;
		}
		switch (byte) {
		case 0x26:
		case 0x2e:
		case 0x36:
		case 0x3e: // ES, CS, SS, DS: without effect
			break;
		case 0x64:
			insn->seg = INSN_SEG_FS;
			break;
		case 0x65:
			insn->seg = INSN_SEG_GS;
			break;
		case 0x66:
			insn->opsize = true;
			break;
		case 0x67:
			insn->addr32 = true;
			break;
		case 0xf0:
			insn->lock = true;
			break;
		case 0xf2:
		case 0xf3:
			insn->rep = byte;
			break;
		default:
			return byte;
		}
		insn->rex = 0;
	}
}

static char take_opcode(struct cursor *cur, struct insn *insn)
{
	insn->opcode = take_prefixes(cur, insn);
	if (insn->opcode != 0x0f) {
		insn->map = INSN_MAP_ONE;
		return map_one[insn->opcode];
	}
	insn->opcode = (uint8_t)take(cur, 1);
	if (insn->opcode == 0x38) {
		insn->map = INSN_MAP_0F38;
		insn->opcode = (uint8_t)take(cur, 1);
		return 'm';
	}
	if (insn->opcode == 0x3a) {
		insn->map = INSN_MAP_0F3A;
		insn->opcode = (uint8_t)take(cur, 1);
		return 'M';
	}
	insn->map = INSN_MAP_0F;
	// EXTRQ and INSERTQ of SSE4a have two immediates more than VMREAD.
	if (insn->opcode == 0x78 && (insn->opsize || insn->rep))
		return '?';
	return map_0f[insn->opcode];
}

static void take_modrm(struct cursor *cur, struct insn *insn, bool regs_only)
{
	uint8_t mod, rm, sib;

	insn->has_modrm = true;
	insn->modrm = (uint8_t)take(cur, 1);
	mod = insn->modrm >> 6;
	rm = insn->modrm & 7;
	insn->reg = (uint8_t)((insn->modrm >> 3 & 7) | (insn->rex & REX_R ? 8 : 0));
	insn->rm = (uint8_t)(rm | (insn->rex & REX_B ? 8 : 0));
	if (mod == 3 || regs_only)
		return;
	insn->is_mem = true;
	insn->base = (int8_t)insn->rm;
	if (rm == 4) {
		sib = (uint8_t)take(cur, 1);
		insn->scale = sib >> 6;
		insn->index = (int8_t)((sib >> 3 & 7) | (insn->rex & REX_X ? 8 : 0));
		if (insn->index == GPR_RSP)
			insn->index = -1;
		insn->base = (int8_t)((sib & 7) | (insn->rex & REX_B ? 8 : 0));
		rm = sib & 7;
		if (mod == 0 && rm == 5)
			insn->base = -1;
	} else if (mod == 0 && rm == 5) {
		insn->base = -1;
		insn->rip_rel = true;
	}
	if (mod == 1)
		insn->disp = (int32_t)((uint32_t)take(cur, 1) ^ 0x80) - 0x80; // its sign
	else if (mod == 2 || insn->base < 0)
		insn->disp = (int32_t)take(cur, 4);
}

static unsigned int imm_bytes(const struct insn *insn, char kind)
{
	unsigned int z = insn->opsize && !(insn->rex & REX_W) ? 2 : 4;
	bool test = (insn->modrm >> 3 & 7) < 2;

	switch (kind) {
	case 'b':
	case 'M':
		return 1;
	case 'w':
		return 2;
	case 'e':
		return 3;
	case 'r':
		return 4;
	case 'z':
	case 'Z':
		return z;
	case 'v':
		return insn->rex & REX_W ? 8 : z;
	case 'o':
		return insn->addr32 ? 4 : 8;
	case 'g':
		return test ? 1 : 0;
	case 'G':
		return test ? z : 0;
	default:
		return 0;
	}
}

int insn_decode(const uint8_t *bytes, size_t len, struct insn *ret)
{
	struct cursor cur = {.bytes = bytes, .len = MIN(len, (size_t)INSN_LEN_MAX)};
	struct insn insn = {.base = -1, .index = -1};
	char kind = take_opcode(&cur, &insn);

	if (cur.error)
		return cur.error;
	if (kind == '-')
		return -EINVAL;
	// Vendors disagree on the length of a near branch with 66.
	if (kind == '?' || (kind == 'r' && insn.opsize))
		return -EOPNOTSUPP;
	switch (kind) {
	case 'm':
	case 'M':
	case 'Z':
	case 'g':
	case 'G':
		take_modrm(&cur, &insn, false);
		break;
	case 'p':
		take_modrm(&cur, &insn, false);
		if (!cur.error && (insn.modrm & 0x38))
			return -EOPNOTSUPP;
		break;
	case 'c':
		take_modrm(&cur, &insn, true);
		break;
	default:
		break;
	}
	insn.imm_bytes = (uint8_t)imm_bytes(&insn, kind);
	insn.imm = take(&cur, insn.imm_bytes);
	if (cur.error)
		return cur.error;
	insn.len = (uint8_t)cur.pos;
	*ret = insn;
	return 0;
}

uint64_t insn_offset(const struct insn *insn, const uint64_t gpr[GPR_COUNT], uint64_t next_rip)
{
	uint64_t off = (uint64_t)(int64_t)insn->disp;

	ASSERT(insn->is_mem);
	if (insn->rip_rel)
		off += next_rip;
	if (insn->base >= 0)
		off += gpr[insn->base];
	if (insn->index >= 0)
		off += gpr[insn->index] << insn->scale;
	return insn->addr32 ? (uint32_t)off : off;
}

unsigned int insn_opsize_bytes(const struct insn *insn)
{
	if (insn->rex & REX_W)
		return 8;
	return insn->opsize ? 2 : 4;
}
