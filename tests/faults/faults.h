// SPDX-License-Identifier: Apache-2.0
// What the test of faults and the allocator that fails for it share: a page.
#ifndef MAYFLY_TESTS_FAULTS_H
#define MAYFLY_TESTS_FAULTS_H

#include <stdatomic.h>
#include <stdint.h>

#define FAULTS_ENV "FAULTS_FD"

#define FAULTS_CALLERS 12

struct faults_page {
	uint64_t fail_at; // the number of the allocation that fails, from 1; 0: none
	_Atomic uint64_t count;
	uint64_t callers[FAULTS_CALLERS]; // who asked for the one that failed; 0: none did
};

#endif
