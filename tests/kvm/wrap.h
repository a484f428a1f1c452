// SPDX-License-Identifier: Apache-2.0
// Between the code under test and the system: fails the nth call that it makes, and delays its
// KVM_RUN. The linker puts it there (--wrap, see tests.mk); the code under test knows nothing of
// it. Any thread.
#ifndef MAYFLY_TESTS_KVM_WRAP_H
#define MAYFLY_TESTS_KVM_WRAP_H

#include <stdbool.h>

// From now on the nth call (1 is the next) of those that wrap.c lists fails, once. 0: none does.
void fault_arm(long nth);

// As fault_arm(), but of the calls of this thread alone.
void fault_arm_own(long nth);

struct fault {
	bool hit;
	const char *call; // of ioctl, eventfd, mmap, …
	unsigned long request; // of ioctl
	int error; // the errno that it was given
};

// What has become of it; disarms.
struct fault fault_disarm(void);

#endif
