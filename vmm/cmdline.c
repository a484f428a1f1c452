// SPDX-License-Identifier: Apache-2.0
// The kernel command line. One thread at a time.
#include "vmm/cmdline.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static int add_bytes(struct cmdline *cmdline, const char *text, size_t len, struct err *err)
{
	size_t gap = cmdline->len_bytes ? 1 : 0, room;

	ASSERT(!cmdline->closed && cmdline->len_bytes < sizeof(cmdline->text));
	if (len == 0)
		return 0;
	room = sizeof(cmdline->text) - 1 - cmdline->len_bytes;
	if (len > room || gap > room - len)
		return err_set(err, -E2BIG,
			"kernel command line: %zu bytes more do not fit: the kernel takes %u, %zu "
			"are in use",
			len, CMDLINE_MAX_BYTES - 1, cmdline->len_bytes);
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];

		if (c < 0x20 || c == 0x7f)
			return err_set(err, -EINVAL,
				"kernel command line: control character 0x%02x at byte %zu of what "
				"is added",
				c, i);
	}
	if (gap)
		cmdline->text[cmdline->len_bytes] = ' ';
	memcpy(cmdline->text + cmdline->len_bytes + gap, text, len);
	cmdline->len_bytes += gap + len;
	cmdline->text[cmdline->len_bytes] = '\0';
	return 0;
}

int cmdline_add(struct cmdline *cmdline, struct err *err, const char *fmt, ...)
{
	char text[CMDLINE_MAX_BYTES];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	ASSERT(n >= 0);
	if ((size_t)n >= sizeof(text))
		return err_set(err, -E2BIG,
			"kernel command line: %d bytes do not fit: the kernel takes %u", n,
			CMDLINE_MAX_BYTES - 1);
	return add_bytes(cmdline, text, (size_t)n, err);
}

int cmdline_add_virtio_mmio(
	struct cmdline *cmdline, gpa_t base, uint64_t len_bytes, unsigned int gsi, struct err *err)
{
	ASSERT(len_bytes % KIB == 0 && len_bytes > 0);
	return cmdline_add(cmdline, err, "virtio_mmio.device=%lluK@0x%llx:%u", len_bytes / KIB,
		(unsigned long long)base.v, gsi);
}

int cmdline_add_user(struct cmdline *cmdline, const char *text, size_t len, struct err *err)
{
	int r = add_bytes(cmdline, text, len, err);

	if (r < 0)
		return r;
	cmdline->closed = true;
	return 0;
}
