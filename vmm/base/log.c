// SPDX-License-Identifier: Apache-2.0
// Log lines on stderr. Any thread: a line is one write().
#include "vmm/base/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LIMIT_PERIOD_NS 10000000000ULL
#define LIMIT_BURST     5

static enum log_level max_level = LOG_WARN;
static char vm_name[65];

void log_set_level(enum log_level level)
{
	max_level = level;
}

void log_set_vm(const char *name)
{
	snprintf(vm_name, sizeof(vm_name), "%s", name ? name : "");
}

void log_line(enum log_level level, const char *component, const char *fmt, ...)
{
	static const char *const names[] = {"error", "warning", "info", "debug"};
	char line[1024];
	va_list ap;
	int len;

	if (level > max_level)
		return;
	len = snprintf(line, sizeof(line), "mayfly: %s: %s%s%s: ", names[level], component,
		vm_name[0] ? " " : "", vm_name);
	va_start(ap, fmt);
	len += vsnprintf(line + len, sizeof(line) - (size_t)len, fmt, ap);
	va_end(ap);
	if ((size_t)len > sizeof(line) - 2)
		len = (int)sizeof(line) - 2;
	// A guest's bytes may be in the text: they must not start a line of their own or drive
	// the terminal.
	for (int i = 0; i < len; i++)
		if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
			line[i] = '?';
	line[len++] = '\n';
	// A reader of the log that has stalled must not stall the loop or a vCPU: a pipe or a
	// terminal that is ready takes a line whole. What cannot be written has nowhere to be
	// reported.
	if (poll(&(struct pollfd){.fd = STDERR_FILENO, .events = POLLOUT}, 1, 0) <= 0)
		return;
	ssize_t ignored = write(STDERR_FILENO, line, (size_t)len);
	(void)ignored;
}

bool log_limit_pass(struct log_limit *limit, uint32_t *ret_dropped)
{
	uint64_t now = now_ns();
	uint64_t start = atomic_load_explicit(&limit->window_start_ns, memory_order_relaxed);

	if (start == 0 || now - start > LIMIT_PERIOD_NS) {
		// Two threads may both open the window: a line too many, no harm.
		atomic_store_explicit(&limit->window_start_ns, now, memory_order_relaxed);
		atomic_store_explicit(&limit->in_window, 0, memory_order_relaxed);
	}
	if (atomic_fetch_add_explicit(&limit->in_window, 1, memory_order_relaxed) >= LIMIT_BURST) {
		atomic_fetch_add_explicit(&limit->dropped, 1, memory_order_relaxed);
		return false;
	}
	*ret_dropped = atomic_exchange_explicit(&limit->dropped, 0, memory_order_relaxed);
	return true;
}
