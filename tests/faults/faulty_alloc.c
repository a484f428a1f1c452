// SPDX-License-Identifier: Apache-2.0
// The allocator of a mayfly that is linked for tests/faults/faults.c: the libc's, but that its n-th
// allocation fails. FAULTS_FD is a page that is shared with the test; without it nothing fails. Any
// thread.
#include <errno.h>
#include <execinfo.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/faults/faults.h"

#define EXPORT __attribute__((visibility("default")))

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t nr, size_t size);
void *__libc_realloc(void *at, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static struct faults_page *page;

__attribute__((constructor)) static void begin(void)
{
	void *none;
	const char *fd = getenv(FAULTS_ENV);
	void *at;

	if (!fd)
		return;
	at = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
	if (at == MAP_FAILED)
		abort();
	close(atoi(fd));
	unsetenv(FAULTS_ENV);
	backtrace(&none, 1); // which loads what it needs
	page = at;
}

static bool fails(void)
{
	void *callers[FAULTS_CALLERS] = {0};

	if (!page || atomic_fetch_add(&page->count, 1) + 1 != page->fail_at)
		return false;
	backtrace(callers, FAULTS_CALLERS);
	memcpy(page->callers, callers, sizeof(callers));
	errno = ENOMEM;
	return true;
}

EXPORT void *malloc(size_t size)
{
	return fails() ? NULL : __libc_malloc(size);
}

EXPORT void *calloc(size_t nr, size_t size)
{
	return fails() ? NULL : __libc_calloc(nr, size);
}

EXPORT void *realloc(void *at, size_t size)
{
	return fails() ? NULL : __libc_realloc(at, size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
	return fails() ? NULL : __libc_memalign(alignment, size);
}

EXPORT int posix_memalign(void **ret, size_t alignment, size_t size)
{
	*ret = fails() ? NULL : __libc_memalign(alignment, size);
	return *ret ? 0 : ENOMEM;
}
