// SPDX-License-Identifier: Apache-2.0
// Numbers with units as people write them. Whole text or nothing: "12x", "", "-1" and what
// overflows are refused with -EINVAL or -ERANGE, and the output is untouched. Any thread.
#ifndef MAYFLY_BASE_PARSE_H
#define MAYFLY_BASE_PARSE_H

#include "vmm/base/err.h"

// Decimal, within [min, max].
int parse_uint(const char *text, uint64_t min, uint64_t max, uint64_t *ret, struct err *err);

// "512M", "2G", "64K", "1T" (powers of 1024, upper or lower case, an optional "iB" or "B"); a
// number without a unit is refused, since bytes and megabytes are both plausible.
int parse_size(const char *text, uint64_t *ret_bytes, struct err *err);

// "30s", "500ms", "5m", "2h", "1d". A number without a unit is seconds.
int parse_duration(const char *text, uint64_t *ret_ns, struct err *err);

#endif
