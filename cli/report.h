// SPDX-License-Identifier: Apache-2.0
// What mayfly doctor finds: a list of verdicts, each with its cure. One thread.
#ifndef MAYFLY_CLI_REPORT_H
#define MAYFLY_CLI_REPORT_H

#include <stdbool.h>

#include "vmm/base/util.h"

enum verdict {
	GOOD,
	WEAK, // mayfly runs, something is slower or absent
	MISSING,
};

struct finding {
	const char *name;
	enum verdict verdict;
	char says[512];
	char cure[512];
};

struct report {
	struct finding findings[16];
	unsigned int nr;
	const char *host_kind; // NULL: it is not about a host
	const char *good, *bad; // the last line, if nothing is missing or something is
};

// cure may be NULL.
void report_add(struct report *report, const char *name, enum verdict verdict, const char *cure,
	const char *fmt, ...) PRINTF_LIKE(5, 6);

// On stdout. Returns the exit status: 0, or 1 if anything is missing.
int report_print(const struct report *report, bool json);

#endif
