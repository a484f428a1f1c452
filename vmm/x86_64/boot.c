// SPDX-License-Identifier: Apache-2.0
// Everything that has to be in guest memory and in the boot processor's registers before its first
// instruction. Main thread, before the vCPUs start.
#include "vmm/x86_64/boot.h"

#include <asm/processor-flags.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "vmm/x86_64/boot_params.h"
#include "vmm/x86_64/bzimage.h"
#include "vmm/x86_64/layout.h"
#include "vmm/x86_64/mptable.h"

#define EFER_LME (1ULL << 8)
#define EFER_LMA (1ULL << 10)

// Page table entries, Intel SDM volume 3, 4.5.
#define PTE_PRESENT  (1ULL << 0)
#define PTE_WRITABLE (1ULL << 1)
#define PTE_LARGE    (1ULL << 7)

#define PTES_PER_PAGE    512
#define LARGE_PAGE_BYTES (2 * MIB)
#define IDENTITY_GIB     4 // the kernel, the initramfs and all that is MMIO

// The selectors that Linux calls __BOOT_CS, __BOOT_DS and __BOOT_TSS.
#define SELECTOR_CODE 0x10
#define SELECTOR_DATA 0x18
#define SELECTOR_TSS  0x20
#define GDT_ENTRIES   6 // a 64-bit TSS descriptor takes two

// Segment types, Intel SDM volume 3, 3.4.5.1 and 3.5: accessed, and the TSS busy.
#define TYPE_CODE 0xb
#define TYPE_DATA 0x3
#define TYPE_TSS  0xb

#define TSS_LIMIT 0x67

static struct kvm_segment code_segment(bool is_64bit)
{
	return (struct kvm_segment){.limit = UINT32_MAX,
		.selector = SELECTOR_CODE,
		.type = TYPE_CODE,
		.present = 1,
		.db = !is_64bit,
		.s = 1,
		.l = is_64bit,
		.g = 1};
}

static struct kvm_segment data_segment(void)
{
	return (struct kvm_segment){.limit = UINT32_MAX,
		.selector = SELECTOR_DATA,
		.type = TYPE_DATA,
		.present = 1,
		.db = 1,
		.s = 1,
		.g = 1};
}

static struct kvm_segment tss_segment(void)
{
	return (struct kvm_segment){
		.limit = TSS_LIMIT, .selector = SELECTOR_TSS, .type = TYPE_TSS, .present = 1};
}

// The 8 bytes in a descriptor table that load a segment as above; base must be 0.
static uint64_t descriptor_of(const struct kvm_segment *seg)
{
	uint64_t limit = seg->g ? seg->limit / PAGE_BYTES : seg->limit;

	ASSERT(seg->base == 0 && limit < 1U << 20);
	return (limit & 0xffff) | (uint64_t)seg->type << 40 | (uint64_t)seg->s << 44 |
	       (uint64_t)seg->dpl << 45 | (uint64_t)seg->present << 47 | (limit >> 16) << 48 |
	       (uint64_t)seg->avl << 52 | (uint64_t)seg->l << 53 | (uint64_t)seg->db << 54 |
	       (uint64_t)seg->g << 55;
}

static int write_gdt(const struct guest_mem *mem, bool is_64bit)
{
	struct kvm_segment code = code_segment(is_64bit), data = data_segment(),
			   tss = tss_segment();
	le64_t gdt[GDT_ENTRIES] = {
		[SELECTOR_CODE / 8] = le64_of(descriptor_of(&code)),
		[SELECTOR_DATA / 8] = le64_of(descriptor_of(&data)),
		[SELECTOR_TSS / 8] = le64_of(descriptor_of(&tss)),
	};

	return guest_mem_write(mem, GPA(LAYOUT_GDT_GPA), gdt, sizeof(gdt));
}

// Maps the first IDENTITY_GIB to themselves, with 2 MiB pages: those every CPU has, and the kernel
// replaces the tables at once, so six pages are not worth asking CPUID for 1 GiB ones.
static int write_page_tables(const struct guest_mem *mem)
{
	const uint64_t pdpt = LAYOUT_PAGE_TABLES_GPA + PAGE_BYTES, pds = pdpt + PAGE_BYTES;
	le64_t pml4e = le64_of(pdpt | PTE_PRESENT | PTE_WRITABLE), pdptes[IDENTITY_GIB],
	       pd[PTES_PER_PAGE];
	uint64_t gpa = 0;
	int r;

	for (unsigned int i = 0; i < IDENTITY_GIB; i++) {
		pdptes[i] = le64_of((pds + i * PAGE_BYTES) | PTE_PRESENT | PTE_WRITABLE);
		for (unsigned int k = 0; k < PTES_PER_PAGE; k++, gpa += LARGE_PAGE_BYTES)
			pd[k] = le64_of(gpa | PTE_PRESENT | PTE_WRITABLE | PTE_LARGE);
		r = guest_mem_write(mem, GPA(pds + i * PAGE_BYTES), pd, sizeof(pd));
		if (r < 0)
			return r;
	}
	r = guest_mem_write(mem, GPA(pdpt), pdptes, sizeof(pdptes));
	if (r < 0)
		return r;
	return guest_mem_write(mem, GPA(LAYOUT_PAGE_TABLES_GPA), &pml4e, sizeof(pml4e));
}

int boot_load(struct guest_mem *mem, const struct boot_config *config, struct boot_entry *ret_entry,
	struct err *err)
{
	struct loader_job job = {
		.mem = mem,
		.name = config->kernel_name,
		.fd = config->kernel_fd,
		.want = config->want,
		.min_gpa = LAYOUT_KERNEL_MIN_GPA,
		.end_gpa = mem->regions[0].size_bytes,
		.max_gpa = LAYOUT_MMIO_GAP_START,
	};
	struct loaded_kernel kernel;
	struct boot_info info = {.kernel = &kernel, .cmdline = GPA(LAYOUT_CMDLINE_GPA)};
	size_t cmdline_bytes = strlen(config->cmdline);
	bool is_64bit;
	int r;

	ASSERT(mem->nr_regions >= 1 && mem->regions[0].base.v == 0 &&
		mem->regions[0].size_bytes >= LAYOUT_KERNEL_MIN_GPA);
	r = loader_initramfs_bytes(
		config->initramfs, config->nr_initramfs, &job.initramfs_bytes, err);
	if (r < 0)
		return r;
	r = loader_load_kernel(&loader_arch_x86_64, &job, &kernel, err);
	if (r < 0)
		return r;
	if (cmdline_bytes > kernel.cmdline_max_bytes)
		return err_set(err, -E2BIG, "kernel command line: %zu bytes; %s takes %" PRIu32,
			cmdline_bytes, job.name, kernel.cmdline_max_bytes);
	r = loader_load_initramfs(
		&job, &kernel, config->initramfs, config->nr_initramfs, &info.initramfs, err);
	if (r < 0)
		return r;
	info.initramfs_bytes = job.initramfs_bytes;
	r = mptable_write(mem, config->nr_cpus, err);
	if (r < 0)
		return r;
	is_64bit = kernel.protocol == BOOT_LINUX64;
	r = is_64bit ? boot_params_write(mem, &info, err) : pvh_start_info_write(mem, &info, err);
	if (r < 0)
		return r;
	r = guest_mem_write(mem, info.cmdline, config->cmdline, cmdline_bytes + 1);
	if (r == 0)
		r = write_gdt(mem, is_64bit);
	if (r == 0 && is_64bit)
		r = write_page_tables(mem);
	if (r < 0)
		return err_set(err, r, "boot structures: no memory for them");
	*ret_entry = (struct boot_entry){
		.protocol = kernel.protocol,
		.rip = kernel.entry_gpa,
		.info = GPA(is_64bit ? LAYOUT_BOOT_PARAMS_GPA : LAYOUT_PVH_START_GPA),
	};
	return 0;
}

void boot_regs(const struct boot_entry *entry, struct kvm_regs *ret_regs)
{
	*ret_regs = (struct kvm_regs){.rip = entry->rip, .rflags = X86_EFLAGS_FIXED};
	if (entry->protocol == BOOT_LINUX64)
		ret_regs->rsi = entry->info.v;
	else
		ret_regs->rbx = entry->info.v;
}

void boot_sregs(const struct boot_entry *entry, struct kvm_sregs *sregs)
{
	bool is_64bit = entry->protocol == BOOT_LINUX64;

	ASSERT(is_64bit || entry->protocol == BOOT_PVH);
	sregs->cs = code_segment(is_64bit);
	sregs->ds = sregs->es = sregs->fs = sregs->gs = sregs->ss = data_segment();
	sregs->tr = tss_segment();
	sregs->ldt = (struct kvm_segment){.unusable = 1};
	sregs->gdt = (struct kvm_dtable){
		.base = LAYOUT_GDT_GPA, .limit = GDT_ENTRIES * sizeof(uint64_t) - 1};
	// No interrupt table: an exception before the kernel has its own is a triple fault.
	sregs->idt = (struct kvm_dtable){0};
	sregs->cr2 = 0;
	sregs->cr0 = X86_CR0_PE | X86_CR0_ET | (is_64bit ? X86_CR0_PG : 0);
	sregs->cr3 = is_64bit ? LAYOUT_PAGE_TABLES_GPA : 0;
	sregs->cr4 = is_64bit ? X86_CR4_PAE : 0;
	sregs->efer = is_64bit ? EFER_LME | EFER_LMA : 0;
}
