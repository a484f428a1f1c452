// SPDX-License-Identifier: Apache-2.0
// Memory for a library that goes on in silence where there is none: malloc() that remembers. Who
// is about to keep what such a library has made asks before and after. Any thread.
#ifndef MAYFLY_BASE_MEMORY_LACK_H
#define MAYFLY_BASE_MEMORY_LACK_H

#include <stddef.h>

void *memory_or_lack(size_t size);

// How often there was none, in this process, of what goes through the above.
unsigned int memory_lacks(void);

#endif
