// SPDX-License-Identifier: Apache-2.0
// Which function of the guest kernel an address belongs to, for diagnostics. Any thread.
#ifndef MAYFLY_SYMBOLS_H
#define MAYFLY_SYMBOLS_H

#include "vmm/base/util.h"

#define SYMBOL_BYTES 128

// Looks addr up in the System.map beside the kernel at kernel_path and writes "name+0x12" to ret.
// Writes "" if there is no such file, or no symbol at or within 1 MiB below addr.
void symbols_lookup(const char *kernel_path, uint64_t addr, char ret[SYMBOL_BYTES]);

#endif
