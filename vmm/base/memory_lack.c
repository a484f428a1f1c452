// SPDX-License-Identifier: Apache-2.0
// malloc() that remembers; see the header. Any thread.
#include "vmm/base/memory_lack.h"

#include <stdatomic.h>
#include <stdlib.h>

static atomic_uint lacks;

void *memory_or_lack(size_t size)
{
	void *at = malloc(size);

	if (!at)
		atomic_fetch_add(&lacks, 1);
	return at;
}

unsigned int memory_lacks(void)
{
	return atomic_load(&lacks);
}
