// SPDX-License-Identifier: Apache-2.0
// Which function of the guest kernel an address belongs to, for diagnostics. Any thread.
#ifndef MAYFLY_SYMBOLS_H
#define MAYFLY_SYMBOLS_H

#include "vmm/base/util.h"

#define SYMBOL_BYTES 128

// Opens the System.map beside the kernel at kernel_path. Returns the fd, the caller's; -1 if there
// is none.
int symbols_open(const char *kernel_path);

// Looks addr up in a System.map and writes "name+0x12" to ret. Writes "" if map_fd is -1 or no such
// file, or if there is no symbol at or within 1 MiB below addr. The fd's offset is not used.
void symbols_lookup(int map_fd, uint64_t addr, char ret[SYMBOL_BYTES]);

#endif
