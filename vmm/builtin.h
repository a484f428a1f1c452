// SPDX-License-Identifier: Apache-2.0
// The default initramfs, which the build puts into the program (images/builtin.S).
#ifndef MAYFLY_BUILTIN_H
#define MAYFLY_BUILTIN_H

#include <stdint.h>

#define BUILTIN_NAME "builtin" // as the value of [machine] initramfs

extern const uint8_t builtin_initramfs[]; // at the start of a page
extern const uint8_t builtin_initramfs_end[];

#endif
