// SPDX-License-Identifier: Apache-2.0
// Assertions and the few macros that every module uses. Any thread.
#ifndef MAYFLY_BASE_UTIL_H
#define MAYFLY_BASE_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A broken invariant of our own. Always compiled in; the condition must have no side effects.
// Never used for what a guest, a file or a person supplies: those are errors.
#define ASSERT(cond) \
	(__builtin_expect(!!(cond), 1) ? (void)0 : assert_failed(#cond, __FILE__, __LINE__))

_Noreturn void assert_failed(const char *cond, const char *file, int line);

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#define PASTE_(a, b) a##b
#define PASTE(a, b)  PASTE_(a, b)

// Each use has variables of its own, so that uses may be nested.
#define MIN(a, b) MIN_(a, b, PASTE(min_a_, __COUNTER__), PASTE(min_b_, __COUNTER__))
#define MAX(a, b) MAX_(a, b, PASTE(max_a_, __COUNTER__), PASTE(max_b_, __COUNTER__))

#define MIN_(a, b, va, vb)            \
	({                            \
		__auto_type va = (a); \
		__auto_type vb = (b); \
		va < vb ? va : vb;    \
	})
#define MAX_(a, b, va, vb)            \
	({                            \
		__auto_type va = (a); \
		__auto_type vb = (b); \
		va > vb ? va : vb;    \
	})

// align must be a power of two; the caller has checked that the result does not wrap.
#define ALIGN_DOWN(x, align) ((x) & ~((__typeof__(x))(align)-1))
#define ALIGN_UP(x, align)   ALIGN_DOWN((x) + (__typeof__(x))(align)-1, align)

#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

// Moves a pointer out of a variable with a cleanup attribute, leaving NULL behind.
#define TAKE_PTR(p)                      \
	({                               \
		__auto_type take_ = (p); \
		(p) = NULL;              \
		take_;                   \
	})

void cleanup_free_(void *pp);
#define CLEANUP_FREE __attribute__((cleanup(cleanup_free_)))
#define CLEANUP(fn)  __attribute__((cleanup(fn)))

#define KIB (1024ULL)
#define MIB (1024ULL * KIB)
#define GIB (1024ULL * MIB)

#define PAGE_BYTES 4096ULL // the guest's page, and that of both architectures we serve

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

// CLOCK_MONOTONIC in nanoseconds.
uint64_t now_ns(void);

#endif
