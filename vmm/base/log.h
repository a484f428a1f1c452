// SPDX-License-Identifier: Apache-2.0
// One line a message on stderr: "mayfly: LEVEL COMPONENT[ VM]: text". Any thread.
#ifndef MAYFLY_BASE_LOG_H
#define MAYFLY_BASE_LOG_H

#include "vmm/base/util.h"

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

// What is printed: this level and the more serious ones. The default is LOG_WARN.
void log_set_level(enum log_level level);

// Named in every line from now on; copied. NULL for none.
void log_set_vm(const char *name);

void log_line(enum log_level level, const char *component, const char *fmt, ...) PRINTF_LIKE(3, 4);

// For what a guest can provoke: at most burst lines a period, the rest counted and the count
// printed with the next line that passes. One static instance a place; any thread.
struct log_limit {
	_Atomic uint64_t window_start_ns;
	_Atomic uint32_t in_window;
	_Atomic uint32_t dropped;
};

bool log_limit_pass(struct log_limit *limit, uint32_t *ret_dropped);

#define log_guest(component, ...)                                                               \
	do {                                                                                    \
		static struct log_limit limit_;                                                 \
		uint32_t dropped_ = 0;                                                          \
		if (log_limit_pass(&limit_, &dropped_)) {                                       \
			if (dropped_)                                                           \
				log_line(LOG_WARN, component, "%u lines like the next dropped", \
					dropped_);                                              \
			log_line(LOG_WARN, component, __VA_ARGS__);                             \
		}                                                                               \
	} while (0)

#endif
