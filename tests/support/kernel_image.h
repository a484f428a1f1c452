// SPDX-License-Identifier: Apache-2.0
// Small, sound kernel images for the loader's tests and fuzzer to spoil: a kernel of a few pages
// that has everything the loader looks at. The numbers below are where things lie.
#ifndef MAYFLY_TESTS_KERNEL_IMAGE_H
#define MAYFLY_TESTS_KERNEL_IMAGE_H

#include <stddef.h>
#include <stdint.h>

// The ELF: text (aligned, so that its whole page can be mapped and its tail must be read), data
// (not aligned), and a note segment with a foreign note and the PVH entry.
#define IMAGE_ELF_BYTES    0x2500
#define IMAGE_PHDR_OFF     64
#define IMAGE_PHDR_BYTES   56
#define IMAGE_NR_PHDRS     3
#define IMAGE_TEXT_PHDR    0
#define IMAGE_DATA_PHDR    1
#define IMAGE_NOTE_PHDR    2
#define IMAGE_NOTE_OFF     0x100
#define IMAGE_NOTE_BYTES   48
#define IMAGE_PVH_NOTE_OFF (IMAGE_NOTE_OFF + 24)
#define IMAGE_TEXT_OFF     0x1000
#define IMAGE_TEXT_BYTES   0x1180
#define IMAGE_DATA_OFF     0x2400
#define IMAGE_DATA_BYTES   0x100
#define IMAGE_TEXT_GPA     0x1000000ULL
#define IMAGE_DATA_GPA     0x1002000ULL
#define IMAGE_DATA_MEM     0x3000ULL
#define IMAGE_END_GPA      (IMAGE_DATA_GPA + IMAGE_DATA_MEM)
#define IMAGE_ENTRY64      (IMAGE_TEXT_GPA + 0x10)
#define IMAGE_ENTRY_PVH    (IMAGE_TEXT_GPA + 0x20)
#define IMAGE_PHDR(i)      (IMAGE_PHDR_OFF + (i)*IMAGE_PHDR_BYTES)

// The bzImage: one setup sector after the boot sector, then the code.
#define IMAGE_BZ_BYTES       0x800
#define IMAGE_BZ_CODE_OFF    0x400
#define IMAGE_BZ_CODE_BYTES  0x400
#define IMAGE_BZ_GPA         0x1000000ULL
#define IMAGE_BZ_INIT_BYTES  0x5000
#define IMAGE_BZ_CMDLINE_MAX 255
#define IMAGE_BZ_INITRD_MAX  0x7fffffffU

#define IMAGE_BYTES_MAX IMAGE_ELF_BYTES

// Fill buf, and return the image's size.
size_t image_make_elf(uint8_t buf[static IMAGE_BYTES_MAX]);
size_t image_make_bzimage(uint8_t buf[static IMAGE_BYTES_MAX]);

// A memfd with the bytes; the caller closes it. Aborts if there is none to be had.
int image_fd(const uint8_t *bytes, size_t len);

#endif
