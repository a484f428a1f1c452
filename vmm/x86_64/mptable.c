// SPDX-License-Identifier: Apache-2.0
// The MultiProcessor Specification 1.4 table. Main thread, before the vCPUs start.
#include "vmm/x86_64/mptable.h"

#include <errno.h>
#include <string.h>

#include "vmm/x86_64/layout.h"

// Section numbers are those of the specification, version 1.4.
#define MP_REVISION 4

enum mp_entry_type { // 4.3
	MP_PROCESSOR = 0,
	MP_BUS = 1,
	MP_IOAPIC = 2,
	MP_IO_INTERRUPT = 3,
	MP_LOCAL_INTERRUPT = 4,
};

enum mp_interrupt_type { MP_INT = 0, MP_NMI = 1, MP_EXTINT = 3 }; // 4.3.4

#define MP_CPU_ENABLED   1
#define MP_CPU_BOOT      2
#define MP_IOAPIC_USABLE 1
#define MP_ISA_BUS_ID    0
#define MP_ALL_LAPICS    0xff

// What KVM's models report. Linux takes the processor's own CPUID for everything but the version.
#define LAPIC_VERSION  0x14
#define IOAPIC_VERSION 0x11
#define CPU_FAMILY_6   0x600
#define CPU_HAS_FPU    0x001
#define CPU_HAS_APIC   0x200

struct mp_floating { // 4.1
	char signature[4];
	le32_t table_gpa;
	uint8_t length_paragraphs;
	uint8_t revision;
	uint8_t checksum;
	uint8_t features[5]; // 0: there is a configuration table, and no IMCR
};

struct mp_header { // 4.2
	char signature[4];
	le16_t length_bytes;
	uint8_t revision;
	uint8_t checksum;
	char oem[8];
	char product[12];
	le32_t oem_table_gpa;
	le16_t oem_table_bytes;
	le16_t nr_entries;
	le32_t lapic_gpa;
	le16_t extended_bytes;
	uint8_t extended_checksum;
	uint8_t reserved;
};

struct mp_processor { // 4.3.1
	uint8_t type;
	uint8_t apic_id;
	uint8_t apic_version;
	uint8_t flags;
	le32_t signature;
	le32_t features;
	le32_t reserved[2];
};

struct mp_bus { // 4.3.2
	uint8_t type;
	uint8_t id;
	char name[6];
};

struct mp_ioapic { // 4.3.3
	uint8_t type;
	uint8_t apic_id;
	uint8_t version;
	uint8_t flags;
	le32_t gpa;
};

struct mp_interrupt { // 4.3.4 and 4.3.5
	uint8_t type;
	uint8_t kind;
	le16_t flags; // 0: as the bus does, which for ISA is active high and edge-triggered
	uint8_t src_bus;
	uint8_t src_irq;
	uint8_t dst_apic;
	uint8_t dst_pin;
};

struct mp_rest {
	struct mp_bus bus;
	struct mp_ioapic ioapic;
	struct mp_interrupt pins[LAYOUT_IOAPIC_PINS];
	struct mp_interrupt lints[2];
};

#define TABLE_BYTES_MAX                                                              \
	(sizeof(struct mp_header) + MPTABLE_CPUS_MAX * sizeof(struct mp_processor) + \
		sizeof(struct mp_rest))

_Static_assert(sizeof(struct mp_floating) == 16 && sizeof(struct mp_header) == 44 &&
		       sizeof(struct mp_processor) == 20 && sizeof(struct mp_bus) == 8 &&
		       sizeof(struct mp_ioapic) == 8 && sizeof(struct mp_interrupt) == 8,
	"as the specification lays them out");
_Static_assert(LAYOUT_MP_TABLE_GPA + TABLE_BYTES_MAX <= LAYOUT_MP_FLOATING_GPA,
	"the table ends before the floating pointer");

// The byte that makes all of them sum up to 0.
static uint8_t checksum(const void *p, size_t len)
{
	const uint8_t *bytes = p;
	uint8_t sum = 0;

	for (size_t i = 0; i < len; i++)
		sum = (uint8_t)(sum + bytes[i]);
	return (uint8_t)-sum;
}

int mptable_write(const struct guest_mem *mem, unsigned int nr_cpus, struct err *err)
{
	uint8_t buf[TABLE_BYTES_MAX];
	struct mp_floating floating = {
		.signature = {'_', 'M', 'P', '_'},
		.table_gpa = le32_of(LAYOUT_MP_TABLE_GPA),
		.length_paragraphs = sizeof(floating) / 16,
		.revision = MP_REVISION,
	};
	struct mp_header header = {
		.signature = {'P', 'C', 'M', 'P'},
		.revision = MP_REVISION,
		.oem = "MAYFLY ",
		.product = "MICROVM    ",
		.lapic_gpa = le32_of((uint32_t)LAYOUT_LAPIC_GPA),
	};
	struct mp_rest rest = {
		.bus = {MP_BUS, MP_ISA_BUS_ID, {'I', 'S', 'A', ' ', ' ', ' '}},
		.ioapic = {MP_IOAPIC, (uint8_t)nr_cpus, IOAPIC_VERSION, MP_IOAPIC_USABLE,
			le32_of((uint32_t)LAYOUT_IOAPIC_GPA)},
		.lints = {{.type = MP_LOCAL_INTERRUPT, .kind = MP_EXTINT, .dst_pin = 0},
			{.type = MP_LOCAL_INTERRUPT,
				.kind = MP_NMI,
				.dst_apic = MP_ALL_LAPICS,
				.dst_pin = 1}},
	};
	size_t len = sizeof(header);

	if (nr_cpus < 1 || nr_cpus > MPTABLE_CPUS_MAX)
		return err_set(
			err, -EINVAL, "%u CPUs; 1 to %d are possible", nr_cpus, MPTABLE_CPUS_MAX);
	for (unsigned int i = 0; i < nr_cpus; i++) {
		struct mp_processor cpu = {
			.type = MP_PROCESSOR,
			.apic_id = (uint8_t)i,
			.apic_version = LAPIC_VERSION,
			.flags = MP_CPU_ENABLED | (i == 0 ? MP_CPU_BOOT : 0),
			.signature = le32_of(CPU_FAMILY_6),
			.features = le32_of(CPU_HAS_FPU | CPU_HAS_APIC),
		};

		memcpy(buf + len, &cpu, sizeof(cpu));
		len += sizeof(cpu);
	}
	for (unsigned int i = 0; i < LAYOUT_IOAPIC_PINS; i++)
		rest.pins[i] = (struct mp_interrupt){.type = MP_IO_INTERRUPT,
			.kind = MP_INT,
			.src_bus = MP_ISA_BUS_ID,
			.src_irq = (uint8_t)i,
			.dst_apic = (uint8_t)nr_cpus,
			.dst_pin = (uint8_t)i};
	memcpy(buf + len, &rest, sizeof(rest));
	len += sizeof(rest);
	ASSERT(len <= sizeof(buf));

	header.length_bytes = le16_of((uint16_t)len);
	header.nr_entries = le16_of((uint16_t)(nr_cpus + 2 + LAYOUT_IOAPIC_PINS + 2));
	memcpy(buf, &header, sizeof(header));
	buf[offsetof(struct mp_header, checksum)] = checksum(buf, len);
	floating.checksum = checksum(&floating, sizeof(floating));
	if (guest_mem_write(mem, GPA(LAYOUT_MP_TABLE_GPA), buf, len) < 0 ||
		guest_mem_write(mem, GPA(LAYOUT_MP_FLOATING_GPA), &floating, sizeof(floating)) < 0)
		return err_set(err, -EFAULT, "MP table: no memory at 0x%llx", LAYOUT_MP_TABLE_GPA);
	return 0;
}
