// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/mptable, read back by a parser that shares nothing with it: found as Linux finds it,
// and interpreted from the offsets in the MultiProcessor Specification 1.4.
#include "tests/support/test.h"

#include <errno.h>

#include "vmm/x86_64/layout.h"
#include "vmm/x86_64/mptable.h"

#define LOW_BYTES 0x100000

// All of low memory, so that a pointer to anywhere in it can be followed.
static uint8_t low[LOW_BYTES];

struct parsed {
	unsigned int nr_cpus, nr_boot_cpus, nr_buses, nr_ioapics, nr_ints, nr_lints;
	uint8_t ioapic_id;
	uint8_t cpu_seen[256];
	uint8_t pin_of_irq[256];
	uint32_t table_gpa, table_end, floating_gpa;
};

static uint8_t sum(const uint8_t *p, size_t len)
{
	uint8_t s = 0;

	while (len--)
		s = (uint8_t)(s + *p++);
	return s;
}

// Linux scans the first KiB, the last KiB of 640, and the BIOS area, in this order.
static uint32_t find_floating(void)
{
	static const uint32_t areas[][2] = {{0, 0x400}, {639 * 0x400, 0x400}, {0xf0000, 0x10000}};

	for (size_t i = 0; i < ARRAY_SIZE(areas); i++)
		for (uint32_t p = areas[i][0]; p < areas[i][0] + areas[i][1]; p += 16)
			if (memcmp(low + p, "_MP_", 4) == 0 && low[p + 8] == 1 &&
				sum(low + p, 16) == 0 && (low[p + 9] == 1 || low[p + 9] == 4))
				return p;
	fail_msg("no MP floating pointer");
	return 0;
}

static void parse(struct parsed *out)
{
	uint32_t floating = find_floating(), table = get_le32(low + floating + 4), p;
	uint16_t len, count;

	memset(out, 0, sizeof(*out));
	assert_true(table % 16 == 0 && table < LOW_BYTES - 44);
	assert_int_equal(low[floating + 11], 0); // a configuration table, not a default type
	assert_int_equal(low[floating + 12] & 0x80, 0); // no IMCR
	assert_memory_equal(low + table, "PCMP", 4);
	len = get_le16(low + table + 4);
	count = get_le16(low + table + 34);
	assert_true(len >= 44 && table + len <= LOW_BYTES);
	assert_int_equal(sum(low + table, len), 0);
	assert_int_equal(low[table + 6], 4);
	assert_int_equal(get_le32(low + table + 36), 0xfee00000);
	assert_int_equal(get_le16(low + table + 40), 0);
	out->floating_gpa = floating;
	out->table_gpa = table;
	out->table_end = table + len;
	for (p = table + 44; count > 0; count--) {
		const uint8_t *e = low + p;

		assert_true(p + 8 <= out->table_end);
		switch (e[0]) {
		case 0:
			assert_false(out->cpu_seen[e[1]]);
			out->cpu_seen[e[1]] = 1;
			assert_true(e[3] & 1);
			if (e[3] & 2) {
				out->nr_boot_cpus++;
				assert_int_equal(e[1], 0);
			}
			out->nr_cpus++;
			p += 20;
			continue;
		case 1:
			assert_int_equal(e[1], 0);
			assert_memory_equal(e + 2, "ISA   ", 6);
			out->nr_buses++;
			break;
		case 2:
			out->ioapic_id = e[1];
			assert_true(e[3] & 1);
			assert_int_equal(get_le32(e + 4), 0xfec00000);
			out->nr_ioapics++;
			break;
		case 3:
			assert_int_equal(e[1], 0); // INT
			assert_int_equal(get_le16(e + 2), 0); // as the bus: edge, high
			assert_int_equal(e[4], 0);
			assert_int_equal(e[6], out->ioapic_id);
			out->pin_of_irq[e[5]] = e[7];
			out->nr_ints++;
			break;
		case 4:
			assert_int_equal(e[1], e[7] == 0 ? 3 : 1); // LINT0 ExtINT, LINT1 NMI
			out->nr_lints++;
			break;
		default:
			fail_msg("entry type %u", e[0]);
		}
		p += 8;
	}
	assert_int_equal(p, out->table_end);
}

static void write_and_read_back(unsigned int nr_cpus)
{
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	struct guest_mem mem;
	struct err err = {0};

	assert_int_equal(layout_ram_ranges(MIB, ranges, &err), 1);
	assert_int_equal(guest_mem_init(&mem, ranges, 1, &err), 0);
	assert_int_equal(mptable_write(&mem, nr_cpus, &err), 0);
	assert_int_equal(guest_mem_read(&mem, GPA(0), low, LOW_BYTES), 0);
	guest_mem_fini(&mem);
}

static void every_size_reads_back(void **state)
{
	(void)state;

	for (unsigned int nr = 1; nr <= MPTABLE_CPUS_MAX; nr++) {
		struct parsed parsed;

		write_and_read_back(nr);
		parse(&parsed);
		assert_int_equal(parsed.nr_cpus, nr);
		assert_int_equal(parsed.nr_boot_cpus, 1);
		for (unsigned int i = 0; i < nr; i++)
			assert_true(parsed.cpu_seen[i]);
		assert_int_equal(parsed.nr_buses, 1);
		assert_int_equal(parsed.nr_ioapics, 1);
		assert_false(parsed.cpu_seen[parsed.ioapic_id]);
		assert_int_not_equal(parsed.ioapic_id, 0xff);
		assert_int_equal(parsed.nr_ints, 24);
		for (unsigned int irq = 0; irq < 24; irq++)
			assert_int_equal(parsed.pin_of_irq[irq], irq);
		assert_int_equal(parsed.nr_lints, 2);
		// In the range that e820 says is reserved, and clear of each other.
		assert_true(parsed.table_gpa >= LAYOUT_LOW_RAM_END);
		assert_true(parsed.table_end <= parsed.floating_gpa);
	}
}

// The parser must be able to fail: each flipped byte is noticed by a checksum.
static void a_flipped_byte_is_noticed(void **state)
{
	struct parsed parsed;
	(void)state;

	write_and_read_back(2);
	parse(&parsed);
	for (uint32_t p = parsed.table_gpa; p < parsed.table_end; p++) {
		low[p] ^= 0x10;
		assert_int_not_equal(
			sum(low + parsed.table_gpa, parsed.table_end - parsed.table_gpa), 0);
		low[p] ^= 0x10;
	}
}

static void impossible_numbers_are_refused(void **state)
{
	static const unsigned int bad[] = {0, MPTABLE_CPUS_MAX + 1, 10000, UINT32_MAX};
	struct guest_mem_range ranges[GUEST_MEM_REGIONS_MAX];
	struct guest_mem mem;
	struct err err = {0};
	(void)state;

	assert_int_equal(layout_ram_ranges(MIB, ranges, &err), 1);
	assert_int_equal(guest_mem_init(&mem, ranges, 1, &err), 0);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		err = (struct err){0};
		assert_int_equal(mptable_write(&mem, bad[i], &err), -EINVAL);
		assert_non_null(strstr(err.msg, "254"));
	}
	guest_mem_fini(&mem);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_size_reads_back),
		cmocka_unit_test(a_flipped_byte_is_noticed),
		cmocka_unit_test(impossible_numbers_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
