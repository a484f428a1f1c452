// SPDX-License-Identifier: Apache-2.0
// A plugin for QEMU (TCG): counts how often each block of guest code runs, from the start to the
// first instruction of user mode, writes the counts and ends QEMU. Built and used by report.py.
// Runs in QEMU's one vCPU thread. Arguments: out=FILE; a line is "address instructions runs".
//
// Debian has no header for the interface, so the few functions of its version 1 are declared here.
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT        __attribute__((visibility("default")))
#define INLINE_ADD    0 // QEMU_PLUGIN_INLINE_ADD_U64
#define BLOCKS_MAX    (1U << 20)
#define USER_LOW      UINT64_C(0x400000) // a program at a fixed address
#define USER_LOW_END  UINT64_C(0x1000000) // where the kernel's own identity mapping begins
#define USER_HIGH     UINT64_C(0x10000000000)
#define USER_HIGH_END UINT64_C(0x800000000000)

struct qemu_plugin_tb;
typedef uint64_t plugin_id;

void qemu_plugin_register_vcpu_tb_trans_cb(
	plugin_id id, void (*cb)(plugin_id id, struct qemu_plugin_tb *tb));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_exec_inline(
	struct qemu_plugin_tb *tb, int op, void *counter, uint64_t value);

EXPORT int qemu_plugin_version = 1;
EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv);

// A block that is translated again gets a second record; the reader adds them up.
static struct block {
	uint64_t addr, insns, runs;
} blocks[BLOCKS_MAX];
static size_t block_count;
static const char *out_path;

static void finish(void)
{
	FILE *f = fopen(out_path, "we");

	if (!f) {
		perror(out_path);
		_exit(1);
	}
	for (size_t i = 0; i < block_count; i++)
		if (blocks[i].runs)
			fprintf(f, "%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", blocks[i].addr,
				blocks[i].insns, blocks[i].runs);
	_exit(fclose(f) ? 1 : 0);
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
	uint64_t addr = qemu_plugin_tb_vaddr(tb);
	struct block *block = &blocks[block_count];

	(void)id;
	if ((addr >= USER_LOW && addr < USER_LOW_END) ||
		(addr >= USER_HIGH && addr < USER_HIGH_END))
		finish();
	if (++block_count == BLOCKS_MAX) {
		fprintf(stderr, "count: more than %u blocks\n", BLOCKS_MAX);
		_exit(1);
	}
	block->addr = addr;
	block->insns = qemu_plugin_tb_n_insns(tb);
	qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD, &block->runs, 1);
}

int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
	(void)info;
	if (argc != 1 || strncmp(argv[0], "out=", 4) != 0) {
		fprintf(stderr, "count: out=FILE\n");
		return -1;
	}
	out_path = strdup(argv[0] + 4);
	if (!out_path)
		return -1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
