// SPDX-License-Identifier: Apache-2.0
// cmocka with the headers that it wants before itself.
#ifndef MAYFLY_TESTS_TEST_H
#define MAYFLY_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#endif
