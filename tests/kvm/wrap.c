// SPDX-License-Identifier: Apache-2.0
// Faults; see the header. Any thread.
#include "tests/kvm/wrap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>

// What the linker does to a name: the caller's call arrives here, and __real_ goes on.
#define WRAP(ret, name, ...)            \
	ret __real_##name(__VA_ARGS__); \
	ret __wrap_##name(__VA_ARGS__); \
	ret __wrap_##name(__VA_ARGS__)

struct io_uring;

static _Atomic long countdown;
static _Thread_local long own_countdown;
static struct fault last;

void fault_arm(long nth)
{
	last = (struct fault){0};
	atomic_store(&countdown, nth);
}

void fault_arm_own(long nth)
{
	last = (struct fault){0};
	own_countdown = nth;
}

struct fault fault_disarm(void)
{
	atomic_store(&countdown, 0);
	own_countdown = 0;
	return last;
}

// Whether this call is the one; then errno is set.
static bool fails(const char *call, unsigned long request, int error)
{
	long left = atomic_load(&countdown);

	while (left > 0 && !atomic_compare_exchange_weak(&countdown, &left, left - 1))
		;
	if (left != 1 && (own_countdown == 0 || --own_countdown > 0))
		return false;
	last = (struct fault){.hit = true, .call = call, .request = request, .error = error};
	errno = error;
	return true;
}

int __real_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...);

int __wrap_ioctl(int fd, unsigned long request, ...)
{
	unsigned long arg;
	va_list ap;

	va_start(ap, request);
	arg = va_arg(ap, unsigned long);
	va_end(ap);
	return fails("ioctl", request, ENFILE) ? -1 : __real_ioctl(fd, request, arg);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);

int __wrap_open(const char *path, int flags, ...)
{
	va_list ap;
	mode_t mode;

	va_start(ap, flags);
	mode = va_arg(ap, mode_t);
	va_end(ap);
	return fails("open", 0, ENFILE) ? -1 : __real_open(path, flags, mode);
}

int __real_fcntl(int fd, int cmd, ...);
int __wrap_fcntl(int fd, int cmd, ...);

int __wrap_fcntl(int fd, int cmd, ...)
{
	unsigned long arg;
	va_list ap;

	va_start(ap, cmd);
	arg = va_arg(ap, unsigned long);
	va_end(ap);
	return fails("fcntl", (unsigned long)cmd, ENFILE) ? -1 : __real_fcntl(fd, cmd, arg);
}

WRAP(int, eventfd, unsigned int count, int flags)
{
	return fails("eventfd", 0, ENFILE) ? -1 : __real_eventfd(count, flags);
}

WRAP(int, socket, int domain, int type, int protocol)
{
	return fails("socket", 0, ENFILE) ? -1 : __real_socket(domain, type, protocol);
}

WRAP(int, bind, int fd, const struct sockaddr *addr, socklen_t len)
{
	return fails("bind", 0, ENFILE) ? -1 : __real_bind(fd, addr, len);
}

WRAP(int, listen, int fd, int backlog)
{
	return fails("listen", 0, ENFILE) ? -1 : __real_listen(fd, backlog);
}

WRAP(int, fchmod, int fd, mode_t mode)
{
	return fails("fchmod", 0, ENFILE) ? -1 : __real_fchmod(fd, mode);
}

WRAP(int, fstat, int fd, struct stat *ret_stat)
{
	return fails("fstat", 0, ENFILE) ? -1 : __real_fstat(fd, ret_stat);
}

WRAP(int, sigaction, int sig, const struct sigaction *sa, struct sigaction *before)
{
	return fails("sigaction", 0, ENFILE) ? -1 : __real_sigaction(sig, sa, before);
}

WRAP(ssize_t, pread, int fd, void *buf, size_t len, off_t off)
{
	return fails("pread", 0, ENFILE) ? -1 : __real_pread(fd, buf, len, off);
}

WRAP(void *, mmap, void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	return fails("mmap", 0, ENFILE) ? (void *)-1 : __real_mmap(addr, len, prot, flags, fd, off);
}

WRAP(void *, calloc, size_t nr, size_t size)
{
	return fails("calloc", 0, ENOMEM) ? NULL : __real_calloc(nr, size);
}

WRAP(void *, malloc, size_t size)
{
	return fails("malloc", 0, ENOMEM) ? NULL : __real_malloc(size);
}

WRAP(char *, strdup, const char *text)
{
	return fails("strdup", 0, ENOMEM) ? NULL : __real_strdup(text);
}

WRAP(void *, realloc, void *old, size_t size)
{
	return fails("realloc", 0, ENOMEM) ? NULL : __real_realloc(old, size);
}

WRAP(void *, aligned_alloc, size_t align, size_t size)
{
	return fails("aligned_alloc", 0, ENOMEM) ? NULL : __real_aligned_alloc(align, size);
}

WRAP(int, pthread_create, pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
	void *arg)
{
	return fails("pthread_create", 0, EAGAIN) ? EAGAIN
						  : __real_pthread_create(thread, attr, fn, arg);
}

WRAP(int, io_uring_queue_init, unsigned int entries, struct io_uring *ring, unsigned int flags)
{
	return fails("io_uring_queue_init", 0, ENFILE)
		       ? -ENFILE
		       : __real_io_uring_queue_init(entries, ring, flags);
}
