// SPDX-License-Identifier: Apache-2.0
// vmm/x86_64/insn: lengths and parts of known encodings, truncation at every byte, and addresses
// against the processor's own LEA.
#include "tests/support/test.h"

#include <errno.h>
#include <stdlib.h>

#include "tests/support/native.h"
#include "vmm/base/util.h"
#include "vmm/x86_64/insn.h"

struct vector {
	const char *hex;
	int result; // the length, or an error
	enum insn_map map;
	uint8_t opcode;
};

static size_t from_hex(const char *hex, uint8_t *bytes)
{
	size_t len = 0;

	for (; *hex; hex += 2) {
		char pair[3] = {hex[0], hex[1], 0};

		bytes[len++] = (uint8_t)strtoul(pair, NULL, 16);
	}
	return len;
}

static void known_encodings(void **state)
{
	static const struct vector vectors[] = {
		{"90", 1, INSN_MAP_ONE, 0x90},
		{"cc", 1, INSN_MAP_ONE, 0xcc},
		{"9b", 1, INSN_MAP_ONE, 0x9b},
		{"0fa2", 2, INSN_MAP_0F, 0xa2},
		{"0f01cb", 3, INSN_MAP_0F, 0x01},
		{"48c7c001000000", 7, INSN_MAP_ONE, 0xc7},
		{"66c7000100", 5, INSN_MAP_ONE, 0xc7},
		{"6648c7c001000000", 8, INSN_MAP_ONE, 0xc7}, // REX.W wins
		{"48b80102030405060708", 10, INSN_MAP_ONE, 0xb8},
		{"66b80102", 4, INSN_MAP_ONE, 0xb8},
		{"6648b80102030405060708", 11, INSN_MAP_ONE, 0xb8},
		{"a10102030405060708", 9, INSN_MAP_ONE, 0xa1},
		{"67a101020304", 6, INSN_MAP_ONE, 0xa1},
		{"c8100000", 4, INSN_MAP_ONE, 0xc8},
		{"f6c001", 3, INSN_MAP_ONE, 0xf6},
		{"f6d0", 2, INSN_MAP_ONE, 0xf6},
		{"f7c001000000", 6, INSN_MAP_ONE, 0xf7},
		{"66f7c00100", 5, INSN_MAP_ONE, 0xf7},
		{"f7d8", 2, INSN_MAP_ONE, 0xf7},
		{"e801020304", 5, INSN_MAP_ONE, 0xe8},
		{"0f8501020304", 6, INSN_MAP_0F, 0x85},
		{"480fc74c2410", 6, INSN_MAP_0F, 0xc7},
		{"f0480fc74c2410", 7, INSN_MAP_0F, 0xc7},
		{"65480fc70d01020304", 9, INSN_MAP_0F, 0xc7},
		{"f3480fb8c7", 5, INSN_MAP_0F, 0xb8},
		{"480fae6740", 5, INSN_MAP_0F, 0xae},
		{"0f38f084c801020304", 9, INSN_MAP_0F38, 0xf0},
		{"660f3a0fc108", 6, INSN_MAP_0F3A, 0x0f},
		{"0f20d8", 3, INSN_MAP_0F, 0x20},
		{"0f2005", 3, INSN_MAP_0F, 0x20}, // mod is ignored: a register
		{"8f00", 2, INSN_MAP_ONE, 0x8f},
		// The longest: 15 bytes, and one prefix too many.
		{"2e2e2e2e2e2e2e2e2e2e2e2e2e2e90", 15, INSN_MAP_ONE, 0x90},
		{"2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e90", -EINVAL, 0, 0},
		{"2e2e2e2e2e2e2e2e2e2e2e2e48c7c001000000", -EINVAL, 0, 0},
		// Not in 64-bit mode.
		{"06", -EINVAL, 0, 0},
		{"60", -EINVAL, 0, 0},
		{"82c001", -EINVAL, 0, 0},
		{"9a", -EINVAL, 0, 0},
		{"ce", -EINVAL, 0, 0},
		{"d6", -EINVAL, 0, 0},
		{"ea", -EINVAL, 0, 0},
		{"0f04", -EINVAL, 0, 0},
		{"0f24c0", -EINVAL, 0, 0},
		// VEX, EVEX, XOP, 3DNow!, SSE4a, UD0 and near branches with 66.
		{"c5f877", -EOPNOTSUPP, 0, 0},
		{"c4e2f0f2c3", -EOPNOTSUPP, 0, 0},
		{"62f17c481000", -EOPNOTSUPP, 0, 0},
		{"8fe878c2c001", -EOPNOTSUPP, 0, 0},
		{"0f0fc19e", -EOPNOTSUPP, 0, 0},
		{"660f78c00102", -EOPNOTSUPP, 0, 0},
		{"0fffc0", -EOPNOTSUPP, 0, 0},
		{"66e801020304", -EOPNOTSUPP, 0, 0},
		{"660f8501020304", -EOPNOTSUPP, 0, 0},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(vectors); i++) {
		const struct vector *v = &vectors[i];
		struct insn insn = {.len = 99};
		uint8_t bytes[32];
		size_t len = from_hex(v->hex, bytes);
		int r = insn_decode(bytes, len, &insn);

		if (r != MIN(v->result, 0) || (r == 0 && insn.len != v->result))
			fail_msg("%s: %d, length %u", v->hex, r, insn.len);
		if (r < 0) {
			assert_int_equal(insn.len, 99); // the output is untouched
			continue;
		}
		assert_int_equal(insn.map, v->map);
		assert_int_equal(insn.opcode, v->opcode);
		for (size_t cut = 0; cut < insn.len; cut++)
			assert_int_equal(insn_decode(bytes, cut, &insn), -ENODATA);
	}
}

static void parts(void **state)
{
	struct insn insn;
	uint8_t bytes[16];

	(void)state;
	// lock cmpxchg16b %gs:0x12345678(%r13,%r14,8)
	assert_int_equal(insn_decode(bytes, from_hex("65f04b0fc78cf578563412", bytes), &insn), 0);
	assert_true(insn.lock && insn.is_mem && !insn.rip_rel && !insn.opsize && !insn.addr32);
	assert_int_equal(insn.seg, INSN_SEG_GS);
	assert_int_equal(insn.rep, 0);
	assert_int_equal(insn.reg, 1);
	assert_int_equal(insn.base, 13);
	assert_int_equal(insn.index, 14);
	assert_int_equal(insn.scale, 3);
	assert_int_equal(insn.disp, 0x12345678);
	assert_int_equal(insn_opsize_bytes(&insn), 8);

	// A prefix after REX takes its effect away; F2 and F3: the later one counts.
	assert_int_equal(insn_decode(bytes, from_hex("f248f3660fb8c1", bytes), &insn), 0);
	assert_int_equal(insn.rex, 0);
	assert_int_equal(insn.rep, 0xf3);
	assert_int_equal(insn_opsize_bytes(&insn), 2);

	// imm with sign and disp8 with sign.
	assert_int_equal(insn_decode(bytes, from_hex("69417f0102ff80", bytes), &insn), 0);
	assert_int_equal(insn.disp, 127);
	assert_int_equal(insn.imm_bytes, 4);
	assert_int_equal(insn.imm, 0x80ff0201);
	assert_int_equal(insn_decode(bytes, from_hex("8b4180", bytes), &insn), 0);
	assert_int_equal(insn.disp, -128);
}

// LEA with random ModRM, SIB, displacement, REX and 67: base, index, scale and displacement in all
// their combinations, computed by the processor.
static void addresses_as_lea(void **state)
{
	uint64_t rng = 1;
	unsigned int rip_relative = 0, short_addresses = 0;

	(void)state;
	for (unsigned int i = 0; i < 100000; i++) {
		struct native nat = {0};
		struct insn insn;
		uint8_t bytes[INSN_LEN_MAX];
		size_t len = 0;
		uint64_t r = test_random(&rng);
		uint64_t gpr[GPR_COUNT];

		if (r & 1)
			bytes[len++] = 0x67;
		bytes[len++] = (uint8_t)(0x48 | (r >> 8 & 7));
		bytes[len++] = 0x8d;
		bytes[len++] = (uint8_t)(r >> 16);
		if (bytes[len - 1] >> 6 == 3)
			bytes[len - 1] &= 0x7f;
		for (; len < sizeof(bytes); len++)
			bytes[len] = (uint8_t)test_random(&rng);
		for (unsigned int k = 0; k < 16; k++)
			nat.gpr[k] = gpr[k] = test_random(&rng);
		assert_int_equal(insn_decode(bytes, len, &insn), 0);
		native_run(bytes, insn.len, &nat);
		assert_int_equal(nat.signo, 0);
		gpr[insn.reg] = insn_offset(&insn, gpr, native_rip() + insn.len);
		assert_memory_equal(gpr, nat.gpr, sizeof(gpr));
		rip_relative += insn.rip_rel;
		short_addresses += insn.addr32;
	}
	assert_true(rip_relative > 1000 && short_addresses > 10000);
}

static int setup(void **state)
{
	(void)state;
	native_init((void *)&setup);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	native_fini();
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(known_encodings),
		cmocka_unit_test(parts),
		cmocka_unit_test_setup_teardown(addresses_as_lea, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
