// SPDX-License-Identifier: Apache-2.0
// The assist: a table of instructions, and a function for each. Runs on the vCPU's own thread
// while the other vCPUs and the devices run; see the header.
//
// The table holds what a Linux kernel in ring 0 executes and KVM's emulator (6.18) lacks:
//  - xsave and xrstor, in the standard format: context switches and signal frames;
//  - cmpxchg16b: the slab allocator; popcnt: bitmaps; stac and clac: user access; fwait;
//  - int3: text patching and probes; lsl: the paranoid entry (NMI, #DB, #MC) on processors without
//    RDPID; verw: clearing of buffers, where mitigations are on; xgetbv.
// Left out on purpose: XSAVEC, XSAVES and XSAVEOPT (CPUID leaf 0xD.1 is hidden), RDTSCP, INVPCID
// and PKRU (not offered on such hosts), and arithmetic on vector registers.
//
// An instruction runs with what it was given: a trap flag or a debug register does not fire on it.
#include "vmm/x86_64/assist.h"

#include <cpuid.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "vmm/x86_64/insn.h"
#include "vmm/x86_64/walk.h"

#define CR0_MP      (1ULL << 1)
#define CR0_TS      (1ULL << 3)
#define CR4_OSXSAVE (1ULL << 18)
#define CR4_SMAP    (1ULL << 21)
#define EFER_LMA    (1ULL << 10)

#define FLAG_CF (1ULL << 0)
#define FLAG_PF (1ULL << 2)
#define FLAG_AF (1ULL << 4)
#define FLAG_ZF (1ULL << 6)
#define FLAG_SF (1ULL << 7)
#define FLAG_OF (1ULL << 11)
#define FLAG_RF (1ULL << 16)
#define FLAG_AC (1ULL << 18)

enum { VEC_BP = 3, VEC_UD = 6, VEC_NM = 7, VEC_SS = 12, VEC_GP = 13, VEC_PF = 14, VEC_MF = 16 };

// The XSAVE area (SDM vol. 1, 13.4).
#define XSTATE_X87    (1ULL << 0)
#define XSTATE_SSE    (1ULL << 1)
#define XSTATE_AVX    (1ULL << 2)
#define OFF_FSW       2
#define OFF_FCS       12
#define OFF_FDS       20
#define OFF_MXCSR     24
#define OFF_ST        32
#define OFF_XMM       160
#define OFF_XMM_END   416
#define OFF_XSTATE_BV 512
#define XSAVE_FIXED   576 // the legacy region and the header
#define FCW_INIT      0x37f
#define MXCSR_INIT    0x1f80
#define FSW_ES        (1U << 7)

// What a handler returns besides 0 and errors: an exception is in the outcome.
#define RAISED 1

struct run {
	struct assist_cpu *cpu;
	struct insn insn;
	uint64_t gpr[GPR_COUNT];
	uint64_t rflags;
	uint64_t next_rip;
	bool user; // CPL 3
};

// Memory at a linear address: one or two pages of RAM, all of it known to be accessible.
struct span {
	struct guest_view part[2]; // the second is empty if one page holds it all
};

static int raise(struct run *run, uint8_t vector)
{
	run->cpu->vector = vector;
	run->cpu->has_exception = true;
	return RAISED;
}

static int raise_code(struct run *run, uint8_t vector, uint32_t error_code)
{
	run->cpu->has_error_code = true;
	run->cpu->error_code = error_code;
	return raise(run, vector);
}

static int map_part(struct run *run, uint64_t lin, size_t len, uint32_t access,
	struct guest_view *ret, struct err *err)
{
	struct assist_cpu *cpu = run->cpu;
	uint32_t code = 0;
	gpa_t gpa;
	int r = x86_walk(cpu->mem, cpu->sregs, lin, access, &gpa, &code);

	if (r == -EACCES) {
		cpu->sregs->cr2 = lin;
		cpu->sregs_changed = true;
		return raise_code(run, VEC_PF, code);
	}
	if (r == 0)
		r = guest_mem_view(cpu->mem, gpa, len, ret);
	if (r < 0)
		return err_errno(err, r, "%s at rip 0x%llx: operand at 0x%llx", cpu->name,
			(unsigned long long)cpu->regs->rip, (unsigned long long)lin);
	return 0;
}

// Maps [lin, lin + len), len being at most a page, for an access by the kernel itself or by the
// instruction (PF_USER, WALK_SMAP as the case may be).
static int map_linear(struct run *run, uint64_t lin, size_t len, uint32_t access, struct span *ret,
	struct err *err)
{
	size_t room = (size_t)(PAGE_BYTES - lin % PAGE_BYTES), first = MIN(len, room);
	struct span span = {0};
	int r;

	ASSERT(len > 0 && len <= PAGE_BYTES);
	r = map_part(run, lin, first, access, &span.part[0], err);
	if (r == 0 && len > first)
		r = map_part(run, lin + first, len - first, access, &span.part[1], err);
	if (r == 0)
		*ret = span;
	return r;
}

static uint32_t data_access(const struct run *run, uint32_t write)
{
	if (run->user)
		return write | PF_USER;
	if ((run->cpu->sregs->cr4 & CR4_SMAP) && !(run->rflags & FLAG_AC))
		return write | WALK_SMAP;
	return write;
}

static uint64_t operand_linear(const struct run *run)
{
	const struct kvm_sregs *sregs = run->cpu->sregs;
	uint64_t lin = insn_offset(&run->insn, run->gpr, run->next_rip);

	if (run->insn.seg == INSN_SEG_FS)
		return lin + sregs->fs.base;
	if (run->insn.seg == INSN_SEG_GS)
		return lin + sregs->gs.base;
	return lin;
}

// Maps len bytes of the memory operand, which must be a multiple of align; write is 0 or PF_WRITE.
static int map_operand(struct run *run, size_t len, size_t align, uint32_t write, struct span *ret,
	struct err *err)
{
	const struct kvm_sregs *sregs = run->cpu->sregs;
	uint64_t lin = operand_linear(run);

	if (!x86_canonical(sregs, lin) || !x86_canonical(sregs, lin + len - 1)) {
		bool stack = run->insn.seg == INSN_SEG_NONE &&
			     (run->insn.base == GPR_RSP || run->insn.base == GPR_RBP);

		return raise_code(run, stack ? VEC_SS : VEC_GP, 0);
	}
	if (lin % align)
		return raise_code(run, VEC_GP, 0);
	return map_linear(run, lin, len, data_access(run, write), ret, err);
}

// The bytes [off, off + len) of a span, of which each part may hold some.
static void span_read(const struct span *span, size_t off, void *dst, size_t len)
{
	size_t first = span->part[0].len_bytes, nr = off < first ? MIN(len, first - off) : 0;

	if (nr)
		guest_view_read(&span->part[0], off, dst, nr);
	if (len > nr)
		guest_view_read(&span->part[1], off + nr - first, (uint8_t *)dst + nr, len - nr);
}

static void span_write(const struct span *span, size_t off, const void *src, size_t len)
{
	size_t first = span->part[0].len_bytes, nr = off < first ? MIN(len, first - off) : 0;

	if (nr)
		guest_view_write(&span->part[0], off, src, nr);
	if (len > nr)
		guest_view_write(
			&span->part[1], off + nr - first, (const uint8_t *)src + nr, len - nr);
}

// The register or memory operand of a ModRM byte, zero-extended.
static int read_rm(struct run *run, unsigned int bytes, uint64_t *ret, struct err *err)
{
	uint64_t val = run->gpr[run->insn.rm];
	struct span span;
	int r;

	if (run->insn.is_mem) {
		val = 0;
		r = map_operand(run, bytes, 1, 0, &span, err);
		if (r)
			return r;
		span_read(&span, 0, &val, bytes);
	}
	*ret = bytes == 8 ? val : val & ((1ULL << (8 * bytes)) - 1);
	return 0;
}

// Writes the register of a ModRM byte; val has at most 32 bits.
static void write_reg(struct run *run, uint64_t val)
{
	uint64_t *reg = &run->gpr[run->insn.reg];

	if (insn_opsize_bytes(&run->insn) == 2)
		*reg = (*reg & ~0xffffULL) | (val & 0xffff);
	else
		*reg = val;
}

static void set_flag(struct run *run, uint64_t flag, bool on)
{
	run->rflags = on ? run->rflags | flag : run->rflags & ~flag;
}

// --- Flags and traps -------------------------------------------------------------------------

static int op_stac(struct run *run, struct err *err)
{
	(void)err;
	if (run->user)
		return raise(run, VEC_UD);
	set_flag(run, FLAG_AC, run->insn.modrm == 0xcb);
	return 0;
}

static int op_int3(struct run *run, struct err *err)
{
	(void)err;
	run->cpu->regs->rip = run->next_rip; // a trap: the handler sees the next instruction
	return raise(run, VEC_BP);
}

static int op_fwait(struct run *run, struct err *err)
{
	_Alignas(64) uint8_t area[ASSIST_XSAVE_BYTES];
	uint64_t cr0 = run->cpu->sregs->cr0;
	int r;

	if ((cr0 & CR0_MP) && (cr0 & CR0_TS))
		return raise(run, VEC_NM);
	r = run->cpu->ops->get_xsave(run->cpu->ctx, area, err);
	if (r < 0)
		return r;
	if ((get_le64(area + OFF_XSTATE_BV) & XSTATE_X87) && (get_le16(area + OFF_FSW) & FSW_ES))
		return raise(run, VEC_MF);
	return 0;
}

// --- General registers -----------------------------------------------------------------------

static int op_popcnt(struct run *run, struct err *err)
{
	unsigned int bytes = insn_opsize_bytes(&run->insn);
	uint64_t val = 0;
	int r = read_rm(run, bytes, &val, err);

	if (r)
		return r;
	write_reg(run, (uint64_t)__builtin_popcountll(val));
	run->rflags &= ~(FLAG_OF | FLAG_SF | FLAG_AF | FLAG_CF | FLAG_PF);
	set_flag(run, FLAG_ZF, val == 0);
	return 0;
}

// The compiler's own 16-byte compare-exchange wants -mcx16 or libatomic.
static bool cmpxchg16(void *p, uint64_t *lo, uint64_t *hi, uint64_t new_lo, uint64_t new_hi)
{
	bool equal;

	__asm__ volatile("lock cmpxchg16b %1"
			 : "=@ccz"(equal), "+m"(*(__uint128_t *)p), "+a"(*lo), "+d"(*hi)
			 : "b"(new_lo), "c"(new_hi)
			 : "memory");
	return equal;
}

static int op_cmpxchg16b(struct run *run, struct err *err)
{
	uint64_t *gpr = run->gpr;
	struct span span;
	int r = map_operand(run, 16, 16, PF_WRITE, &span, err);

	if (r)
		return r;
	// Atomic with and without LOCK: the other vCPUs run natively.
	set_flag(run, FLAG_ZF,
		cmpxchg16(span.part[0].hva, &gpr[GPR_RAX], &gpr[GPR_RDX], gpr[GPR_RBX],
			gpr[GPR_RCX]));
	guest_view_mark_dirty(&span.part[0], 0, 16);
	return 0;
}

static int op_xgetbv(struct run *run, struct err *err)
{
	uint64_t xcr0 = 0;
	int r;

	if (!(run->cpu->sregs->cr4 & CR4_OSXSAVE))
		return raise(run, VEC_UD);
	if ((uint32_t)run->gpr[GPR_RCX] != 0)
		return raise_code(run, VEC_GP, 0);
	r = run->cpu->ops->get_xcr0(run->cpu->ctx, &xcr0, err);
	if (r < 0)
		return r;
	run->gpr[GPR_RAX] = (uint32_t)xcr0;
	run->gpr[GPR_RDX] = xcr0 >> 32;
	return 0;
}

// --- Segment descriptors ---------------------------------------------------------------------

#define DESC_TYPE(desc) ((desc) >> 40 & 15)
#define DESC_S          (1ULL << 44)
#define DESC_DPL(desc)  ((desc) >> 45 & 3)
#define DESC_G          (1ULL << 55)
#define TYPE_CODE       8
#define TYPE_CONFORMING 4
#define TYPE_WRITABLE   2

// Reads the descriptor that a selector names. *ret_found is false for none or one beyond the table.
static int read_desc(
	struct run *run, uint16_t sel, uint64_t *ret_desc, bool *ret_found, struct err *err)
{
	const struct kvm_sregs *sregs = run->cpu->sregs;
	bool ldt = sel & 4;
	uint64_t base = ldt ? sregs->ldt.base : sregs->gdt.base;
	uint32_t limit = ldt ? sregs->ldt.limit : sregs->gdt.limit;
	struct span span;
	int r;

	*ret_found = false;
	if (!(sel & ~3U) || (ldt && sregs->ldt.unusable) || (sel | 7U) > limit)
		return 0;
	r = map_linear(run, base + (sel & ~7U), 8, 0, &span, err);
	if (r)
		return r;
	span_read(&span, 0, ret_desc, 8);
	*ret_found = true;
	return 0;
}

static bool may_see(const struct run *run, uint16_t sel, uint64_t desc)
{
	return DESC_DPL(desc) >= (run->user ? 3U : 0U) && DESC_DPL(desc) >= (sel & 3U);
}

static int op_lsl(struct run *run, struct err *err)
{
	uint64_t sel = 0, desc = 0, limit;
	bool ok;
	int r = read_rm(run, 2, &sel, err);

	if (r == 0)
		r = read_desc(run, (uint16_t)sel, &desc, &ok, err);
	if (r)
		return r;
	if (ok && (desc & DESC_S)) {
		bool conforming = (DESC_TYPE(desc) & TYPE_CODE) &&
				  (DESC_TYPE(desc) & TYPE_CONFORMING);

		ok = conforming || may_see(run, (uint16_t)sel, desc);
	} else if (ok) {
		// Of the system descriptors of long mode, those of an LDT and of a TSS have a
		// limit.
		ok = (DESC_TYPE(desc) == 2 || (DESC_TYPE(desc) & ~2ULL) == 9) &&
		     may_see(run, (uint16_t)sel, desc);
	}
	if (ok) {
		limit = (desc & 0xffff) | (desc >> 32 & 0xf0000);
		if (desc & DESC_G)
			limit = limit << 12 | 0xfff;
		write_reg(run, limit);
	}
	set_flag(run, FLAG_ZF, ok);
	return 0;
}

static int op_verw(struct run *run, struct err *err)
{
	uint64_t sel = 0, desc = 0;
	bool ok;
	int r = read_rm(run, 2, &sel, err);

	if (r == 0)
		r = read_desc(run, (uint16_t)sel, &desc, &ok, err);
	if (r)
		return r;
	set_flag(run, FLAG_ZF,
		ok && (desc & DESC_S) && !(DESC_TYPE(desc) & TYPE_CODE) &&
			(DESC_TYPE(desc) & TYPE_WRITABLE) && may_see(run, (uint16_t)sel, desc));
	return 0;
}

// --- XSAVE and XRSTOR ------------------------------------------------------------------------
//
// KVM's area is in the standard format and has all components of the guest, in use or not.

void assist_xstate_host(struct assist_xstate *ret)
{
	_Alignas(16) uint8_t fx[512] = {0};
	uint32_t eax, ebx, ecx, edx, lo, hi;

	*ret = (struct assist_xstate){0};
	__asm__ volatile("fxsave %0" : "=m"(fx));
	ret->mxcsr_mask = get_le32(fx + OFF_MXCSR + 4);
	if (ret->mxcsr_mask == 0)
		ret->mxcsr_mask = 0xffbf; // SDM vol. 1, 11.6.6
	if (!__get_cpuid_count(0xd, 0, &lo, &ebx, &ecx, &hi))
		return;
	for (unsigned int i = 0; i < 64; i++) {
		if (!(((uint64_t)hi << 32 | lo) >> i & 1))
			continue;
		if (i < 2) {
			ret->supported |= 1ULL << i;
			continue;
		}
		if (!__get_cpuid_count(0xd, i, &eax, &ebx, &ecx, &edx) || eax == 0 ||
			ebx < XSAVE_FIXED || ebx > ASSIST_XSAVE_BYTES ||
			eax > ASSIST_XSAVE_BYTES - ebx)
			continue;
		ret->supported |= 1ULL << i;
		ret->comp[i].off = ebx;
		ret->comp[i].size_bytes = eax;
	}
}

static void init_component(const struct assist_xstate *xstate, uint8_t *area, unsigned int i)
{
	switch (i) {
	case 0:
		memset(area, 0, OFF_MXCSR);
		memset(area + OFF_ST, 0, OFF_XMM - OFF_ST);
		put_le16(area, FCW_INIT);
		break;
	case 1:
		memset(area + OFF_XMM, 0, OFF_XMM_END - OFF_XMM);
		break;
	default:
		memset(area + xstate->comp[i].off, 0, xstate->comp[i].size_bytes);
		break;
	}
}

// What xsave and xrstor have in common.
struct xregs {
	_Alignas(64) uint8_t area[ASSIST_XSAVE_BYTES]; // KVM's, unused components in initial state
	uint64_t in_use;
	uint64_t xcr0;
	uint64_t rfbm; // the components that the instruction is about
};

static int xregs_begin(struct run *run, struct xregs *x, struct err *err)
{
	struct assist_cpu *cpu = run->cpu;
	int r;

	if (!(cpu->sregs->cr4 & CR4_OSXSAVE))
		return raise(run, VEC_UD);
	if (cpu->sregs->cr0 & CR0_TS)
		return raise(run, VEC_NM);
	r = cpu->ops->get_xcr0(cpu->ctx, &x->xcr0, err);
	if (r == 0)
		r = cpu->ops->get_xsave(cpu->ctx, x->area, err);
	if (r < 0)
		return r;
	if (x->xcr0 & ~cpu->xstate->supported)
		return err_set(err, -EOPNOTSUPP,
			"%s with XCR0 0x%llx: no room in KVM's XSAVE area for 0x%llx", cpu->name,
			(unsigned long long)x->xcr0,
			(unsigned long long)(x->xcr0 & ~cpu->xstate->supported));
	x->rfbm = x->xcr0 & (run->gpr[GPR_RDX] << 32 | (uint32_t)run->gpr[GPR_RAX]);
	x->in_use = get_le64(x->area + OFF_XSTATE_BV);
	for (unsigned int i = 0; i < 64; i++)
		if ((cpu->xstate->supported & ~x->in_use) >> i & 1)
			init_component(cpu->xstate, x->area, i);
	return 0;
}

static size_t extent_bytes(const struct assist_xstate *xstate, uint64_t components)
{
	size_t len = XSAVE_FIXED;

	for (unsigned int i = 2; i < 64; i++)
		if (components >> i & 1)
			len = MAX(len, (size_t)xstate->comp[i].off + xstate->comp[i].size_bytes);
	return len;
}

// Without REX.W the x87 pointers have 32 bits and a selector; the processors that deprecate the
// selectors save 0, and those that do not have nothing to save from the 64-bit form.
static void drop_selectors(uint8_t *area)
{
	put_le32(area + OFF_FCS, 0);
	put_le32(area + OFF_FDS, 0);
}

static int op_xsave(struct run *run, struct err *err)
{
	const struct assist_xstate *xstate = run->cpu->xstate;
	uint8_t header[8];
	struct xregs x;
	struct span span;
	int r = xregs_begin(run, &x, err);

	if (r == 0)
		r = map_operand(run, extent_bytes(xstate, x.rfbm), 64, PF_WRITE, &span, err);
	if (r)
		return r;
	if (insn_opsize_bytes(&run->insn) != 8)
		drop_selectors(x.area);
	if (x.rfbm & XSTATE_X87) {
		span_write(&span, 0, x.area, OFF_MXCSR);
		span_write(&span, OFF_ST, x.area + OFF_ST, OFF_XMM - OFF_ST);
	}
	if (x.rfbm & (XSTATE_SSE | XSTATE_AVX)) {
		put_le32(x.area + OFF_MXCSR + 4, xstate->mxcsr_mask);
		span_write(&span, OFF_MXCSR, x.area + OFF_MXCSR, 8);
	}
	if (x.rfbm & XSTATE_SSE)
		span_write(&span, OFF_XMM, x.area + OFF_XMM, OFF_XMM_END - OFF_XMM);
	for (unsigned int i = 2; i < 64; i++)
		if (x.rfbm >> i & 1)
			span_write(&span, xstate->comp[i].off, x.area + xstate->comp[i].off,
				xstate->comp[i].size_bytes);
	span_read(&span, OFF_XSTATE_BV, header, sizeof(header));
	put_le64(header, (get_le64(header) & ~x.rfbm) | (x.in_use & x.rfbm));
	span_write(&span, OFF_XSTATE_BV, header, sizeof(header));
	return 0;
}

static int op_xrstor(struct run *run, struct err *err)
{
	static const uint8_t zeros[16];
	const struct assist_xstate *xstate = run->cpu->xstate;
	uint8_t image[ASSIST_XSAVE_BYTES];
	struct xregs x;
	struct span span;
	uint64_t bv;
	size_t len;
	int r = xregs_begin(run, &x, err);

	// The header is read once; what it says decides how much is read of the rest.
	if (r == 0)
		r = map_operand(run, XSAVE_FIXED, 64, 0, &span, err);
	if (r)
		return r;
	span_read(&span, 0, image, XSAVE_FIXED);
	bv = get_le64(image + OFF_XSTATE_BV);
	// The compacted format is refused with the rest: XSAVEC is hidden from the guest.
	if ((bv & ~x.xcr0) || memcmp(image + OFF_XSTATE_BV + 8, zeros, sizeof(zeros)) != 0)
		return raise_code(run, VEC_GP, 0);
	// MXCSR counts even where XSTATE_BV says that SSE and AVX are in their initial state.
	if ((x.rfbm & (XSTATE_SSE | XSTATE_AVX)) &&
		(get_le32(image + OFF_MXCSR) & ~xstate->mxcsr_mask))
		return raise_code(run, VEC_GP, 0);
	len = extent_bytes(xstate, x.rfbm & bv);
	r = map_operand(run, len, 64, 0, &span, err);
	if (r)
		return r;
	span_read(&span, XSAVE_FIXED, image + XSAVE_FIXED, len - XSAVE_FIXED);
	if (insn_opsize_bytes(&run->insn) != 8)
		drop_selectors(image);

	for (unsigned int i = 0; i < 64; i++)
		if ((x.rfbm & ~bv) >> i & 1)
			init_component(xstate, x.area, i);
	if (x.rfbm & bv & XSTATE_X87) {
		memcpy(x.area, image, OFF_MXCSR);
		memcpy(x.area + OFF_ST, image + OFF_ST, OFF_XMM - OFF_ST);
	}
	if (x.rfbm & (XSTATE_SSE | XSTATE_AVX))
		memcpy(x.area + OFF_MXCSR, image + OFF_MXCSR, 4);
	if (x.rfbm & bv & XSTATE_SSE)
		memcpy(x.area + OFF_XMM, image + OFF_XMM, OFF_XMM_END - OFF_XMM);
	for (unsigned int i = 2; i < 64; i++)
		if ((x.rfbm & bv) >> i & 1)
			memcpy(x.area + xstate->comp[i].off, image + xstate->comp[i].off,
				xstate->comp[i].size_bytes);
	x.in_use = (x.in_use & ~x.rfbm) | (bv & x.rfbm);
	// KVM takes MXCSR from the area only along with SSE.
	if (get_le32(x.area + OFF_MXCSR) != MXCSR_INIT)
		x.in_use |= XSTATE_SSE;
	memset(x.area + OFF_XSTATE_BV, 0, XSAVE_FIXED - OFF_XSTATE_BV);
	put_le64(x.area + OFF_XSTATE_BV, x.in_use);
	return run->cpu->ops->set_xsave(run->cpu->ctx, x.area, err);
}

// --- The table -------------------------------------------------------------------------------

// What an instruction must have, or may.
#define NP       (1U << 0) // none of 66, F2, F3
#define F3       (1U << 1)
#define MEM      (1U << 2) // a memory operand
#define WIDE     (1U << 3) // REX.W
#define LOCKABLE (1U << 4)

struct op {
	const char *name;
	enum insn_map map;
	uint8_t opcode;
	uint8_t modrm_mask, modrm; // ModRM & mask must be this
	unsigned int traits;
	int (*perform)(struct run *run, struct err *err);
};

#define ANY_MODRM 0, 0
#define MODRM(m)  0xff, (m)
#define DIGIT(n)  0x38, (n) << 3

static const struct op ops[] = {
	{"fwait", INSN_MAP_ONE, 0x9b, ANY_MODRM, 0, op_fwait},
	{"int3", INSN_MAP_ONE, 0xcc, ANY_MODRM, 0, op_int3},
	{"verw", INSN_MAP_0F, 0x00, DIGIT(5), 0, op_verw},
	{"clac", INSN_MAP_0F, 0x01, MODRM(0xca), NP, op_stac},
	{"stac", INSN_MAP_0F, 0x01, MODRM(0xcb), NP, op_stac},
	{"xgetbv", INSN_MAP_0F, 0x01, MODRM(0xd0), NP, op_xgetbv},
	{"lsl", INSN_MAP_0F, 0x03, ANY_MODRM, 0, op_lsl},
	{"xsave", INSN_MAP_0F, 0xae, DIGIT(4), NP | MEM, op_xsave},
	{"xrstor", INSN_MAP_0F, 0xae, DIGIT(5), NP | MEM, op_xrstor},
	{"popcnt", INSN_MAP_0F, 0xb8, ANY_MODRM, F3, op_popcnt},
	{"cmpxchg16b", INSN_MAP_0F, 0xc7, DIGIT(1), NP | MEM | WIDE | LOCKABLE, op_cmpxchg16b},
};

static bool matches(const struct op *op, const struct insn *insn)
{
	if (op->map != insn->map || op->opcode != insn->opcode ||
		(insn->modrm & op->modrm_mask) != op->modrm)
		return false;
	if ((op->traits & NP) && (insn->opsize || insn->rep))
		return false;
	if ((op->traits & F3) && insn->rep != 0xf3)
		return false;
	if ((op->traits & MEM) && !insn->is_mem)
		return false;
	return !(op->traits & WIDE) || insn_opsize_bytes(insn) == 8;
}

static const struct op *find_op(const struct insn *insn)
{
	for (size_t i = 0; i < ARRAY_SIZE(ops); i++)
		if (matches(&ops[i], insn))
			return &ops[i];
	return NULL;
}

// Decodes what KVM reported, or, where that ends too early, what is at rip.
static int fetch(struct run *run, const uint8_t *bytes, size_t len, uint8_t buf[INSN_LEN_MAX],
	size_t *ret_len, struct err *err)
{
	uint64_t rip = run->cpu->regs->rip;
	size_t nr = MIN(len, (size_t)INSN_LEN_MAX);
	struct span span;
	int r;

	if (nr)
		memcpy(buf, bytes, nr);
	*ret_len = nr;
	while ((r = insn_decode(buf, *ret_len, &run->insn)) == -ENODATA) {
		r = map_linear(
			run, rip + *ret_len, 1, PF_FETCH | (run->user ? PF_USER : 0), &span, err);
		if (r)
			return r;
		span_read(&span, 0, &buf[(*ret_len)++], 1);
	}
	return r;
}

static int unknown(const struct run *run, const uint8_t *bytes, size_t len, struct err *err)
{
	char text[3 * INSN_LEN_MAX + 1] = "";

	for (size_t i = 0; i < len; i++)
		snprintf(text + 3 * i, 4, "%02x ", bytes[i]);
	return err_set(err, -ENOSYS,
		"the guest executed an instruction that neither KVM's emulator nor mayfly "
		"completes: "
		"%sat rip 0x%llx (CPL %d)",
		text, (unsigned long long)run->cpu->regs->rip, run->user ? 3 : 0);
}

// The kernel's order of registers is not the encoded one.
// clang-format off
#define GPRS(X)                                                                 \
	X(0, rax) X(1, rcx) X(2, rdx) X(3, rbx) X(4, rsp) X(5, rbp) X(6, rsi)   \
	X(7, rdi) X(8, r8) X(9, r9) X(10, r10) X(11, r11) X(12, r12) X(13, r13) \
	X(14, r14) X(15, r15)
// clang-format on
#define LOAD_GPR(nr, field)  run.gpr[nr] = cpu->regs->field;
#define STORE_GPR(nr, field) cpu->regs->field = run.gpr[nr];

int assist_run(struct assist_cpu *cpu, const uint8_t *bytes, size_t len, struct err *err)
{
	struct run run = {.cpu = cpu, .rflags = cpu->regs->rflags, .user = cpu->sregs->ss.dpl == 3};
	uint8_t buf[INSN_LEN_MAX];
	size_t nr = 0;
	const struct op *op;
	int r;

	cpu->name = "instruction fetch";
	cpu->sregs_changed = cpu->has_exception = cpu->has_error_code = false;
	if (!(cpu->sregs->efer & EFER_LMA) || !cpu->sregs->cs.l)
		return err_set(err, -ENOSYS,
			"KVM's emulator gave up at rip 0x%llx, outside of 64-bit mode",
			(unsigned long long)cpu->regs->rip);
	r = fetch(&run, bytes, len, buf, &nr, err);
	if (r == RAISED)
		return 0;
	if (r < 0 && r != -EINVAL && r != -EOPNOTSUPP)
		return r;
	op = r < 0 ? NULL : find_op(&run.insn);
	cpu->name = op ? op->name : NULL;
	if (!op)
		return unknown(&run, buf, nr, err);

	GPRS(LOAD_GPR)
	run.next_rip = cpu->regs->rip + run.insn.len;
	if (run.insn.lock && !(op->traits & LOCKABLE))
		r = raise(&run, VEC_UD);
	else
		r = op->perform(&run, err);
	if (r == 0) {
		GPRS(STORE_GPR)
		cpu->regs->rflags = run.rflags & ~FLAG_RF;
		cpu->regs->rip = run.next_rip;
	}
	return MIN(r, 0);
}
