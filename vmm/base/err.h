// SPDX-License-Identifier: Apache-2.0
// Errors of the host side: a negative errno that code can act upon, and a sentence for the person.
//
// The contract, for every function that takes a `struct err *`:
//  - it returns 0 (or a non-negative result) on success and a negative errno on failure;
//  - on failure it has filled *err exactly once, unless err is NULL; `ret_` outputs are untouched;
//  - callers on the way up add context with err_wrap(); only the top prints.
// A message names the file or value and, where there is one, the cure. Any thread.
#ifndef MAYFLY_BASE_ERR_H
#define MAYFLY_BASE_ERR_H

#include "vmm/base/util.h"

struct err {
	int code; // negative errno, 0 while there is no error
	char msg[496];
};

// Fills err and returns code, which must be negative. err may be NULL.
int err_set(struct err *err, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

// As err_set(), with ": " and the text of the errno appended.
int err_errno(struct err *err, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

// Puts "context: " before the message and returns err->code. err must hold an error, or be NULL,
// in which case code is returned.
int err_wrap(struct err *err, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

#endif
