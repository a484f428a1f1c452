// SPDX-License-Identifier: Apache-2.0
// Linux' bzImage, entered at its 64-bit entry point (Linux: x86/boot.rst, protocol 2.12 and later).
// Main thread, before the vCPUs start.
#ifndef MAYFLY_X86_64_BZIMAGE_H
#define MAYFLY_X86_64_BZIMAGE_H

#include "vmm/loader.h"

// A loader_format's two functions.
bool bzimage_matches(const uint8_t *head, size_t len);
int bzimage_load(const struct loader_job *job, const uint8_t *head, size_t head_len,
	uint64_t file_bytes, struct loaded_kernel *ret_kernel, struct err *err);

// What x86-64 boots: ELF and bzImage.
extern const struct loader_arch loader_arch_x86_64;

#endif
