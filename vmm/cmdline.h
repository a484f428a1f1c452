// SPDX-License-Identifier: Apache-2.0
// The kernel command line: words in the order they are added, within the kernel's bound. One thread
// at a time.
#ifndef MAYFLY_CMDLINE_H
#define MAYFLY_CMDLINE_H

#include "vmm/base/bytes.h"
#include "vmm/base/err.h"

#define CMDLINE_MAX_BYTES 2048U // COMMAND_LINE_SIZE of x86 and arm64, the NUL included

// Zeroed is empty. text is always NUL-terminated.
struct cmdline {
	char text[CMDLINE_MAX_BYTES];
	size_t len_bytes;
	bool closed; // the user's words have been added
};

// Adds what the format makes, after a space if there is something before it.
// -EINVAL for a control character, -E2BIG if it does not fit; then nothing is added.
int cmdline_add(struct cmdline *cmdline, struct err *err, const char *fmt, ...) PRINTF_LIKE(3, 4);

// Announces a virtio-mmio device of len_bytes at base to Linux' virtio_mmio driver.
int cmdline_add_virtio_mmio(
	struct cmdline *cmdline, gpa_t base, uint64_t len_bytes, unsigned int gsi, struct err *err);

// Adds the user's own words, which come last so that they win: nothing may be added after them.
// len counts bytes; text need not end in a NUL. -EINVAL also for a NUL within it.
int cmdline_add_user(struct cmdline *cmdline, const char *text, size_t len, struct err *err);

#endif
