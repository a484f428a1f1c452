// SPDX-License-Identifier: Apache-2.0
// Answering page faults; see the header. A thread of its own, but for what is said.
#include "snapshot/lazy.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vmm/base/fd.h"

struct lazy {
	struct lazy_config config;
	int uffd, stop_fd;
	pthread_t thread;
	bool running;
	_Atomic uint64_t faults, prefetched;
	uint32_t next; // of the frames to prefetch
	uint64_t *loaded; // a bit a frame: it has been read once; owned
	// What was wanted, in order: those below nr_wanted do not change any more.
	_Atomic uint32_t nr_wanted;
	uint32_t wanted[WORKING_SET_FRAMES_MAX];
	uint8_t buf[MEMORY_FRAME_BYTES];
};

// The system call may be had by root, or by all where the sysctl says so; the device by those who
// may open it.
int lazy_open(struct err *err)
{
	struct uffdio_api api = {.api = UFFD_API};
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK), r = errno, dev;

	if (fd < 0) {
		dev = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
		if (dev >= 0)
			fd = ioctl(dev, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
		fd_close(&dev);
	}
	if (fd < 0)
		return err_set(err, -r,
			"userfaultfd is not allowed here (as root: sysctl "
			"vm.unprivileged_userfaultfd=1, or let this user open /dev/userfaultfd)");
	if (ioctl(fd, UFFDIO_API, &api) < 0) {
		r = err_errno(err, -errno, "userfaultfd");
		fd_close(&fd);
		return r;
	}
	return fd;
}

static int watch_ram(struct lazy *lazy, struct err *err)
{
	const struct guest_mem *mem = lazy->config.mem;

	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		struct uffdio_register reg = {
			.range = {(uintptr_t)mem->regions[i].hva, mem->regions[i].size_bytes},
			.mode = UFFDIO_REGISTER_MODE_MISSING,
		};

		if (ioctl(lazy->uffd, UFFDIO_REGISTER, &reg) < 0)
			return err_errno(err, -errno, "userfaultfd: guest memory");
	}
	return 0;
}

// Gives len bytes of RAM their content: src, or zeros if it is NULL. Pages that are there already
// stay as they are. -errno.
static int place(struct lazy *lazy, uint8_t *hva, uint8_t *src, uint64_t len)
{
	uint64_t done = 0;

	while (done < len) {
		struct uffdio_copy copy = {.dst = (uintptr_t)hva + done,
			.src = (uintptr_t)src + done,
			.len = len - done};
		struct uffdio_zeropage zero = {.range = {(uintptr_t)hva + done, len - done}};
		struct uffdio_range one = {(uintptr_t)hva + done, PAGE_BYTES};
		int64_t n;

		if (src ? ioctl(lazy->uffd, UFFDIO_COPY, &copy) == 0
			: ioctl(lazy->uffd, UFFDIO_ZEROPAGE, &zero) == 0)
			return 0;
		n = src ? copy.copy : zero.zeropage;
		if (n > 0) {
			done += (uint64_t)n;
		} else if (n == -EEXIST) {
			// Whoever waits for it came too late to be woken by who put it there.
			ioctl(lazy->uffd, UFFDIO_WAKE, &one);
			done += PAGE_BYTES;
		} else if (n != -EAGAIN) {
			return n < 0 ? (int)n : -errno;
		}
	}
	return 0;
}

static bool mark_loaded(struct lazy *lazy, uint64_t frame)
{
	uint64_t *word = &lazy->loaded[frame / 64], bit = 1ULL << frame % 64;
	bool first = !(*word & bit);

	*word |= bit;
	return first;
}

// Loads a frame, which may lie in two regions. Its pages in a row go in one call.
static int load(struct lazy *lazy, uint64_t frame, struct err *err)
{
	const struct guest_mem *mem = lazy->config.mem;
	uint64_t first = frame * MEMORY_FRAME_PAGES, ram = guest_mem_size_bytes(mem) / PAGE_BYTES;
	unsigned int nr = (unsigned int)MIN(MEMORY_FRAME_PAGES, ram - first), run;
	uint32_t there;
	int r = chain_fetch(lazy->config.chain, frame, lazy->buf, &there, err);

	for (unsigned int i = 0; i < nr && r == 0; i += run) {
		uint8_t *hva = guest_mem_at(mem, (first + i) * PAGE_BYTES);
		bool have = there >> i & 1;

		for (run = 1;
			i + run < nr && (there >> (i + run) & 1) == have &&
			guest_mem_at(mem, (first + i + run) * PAGE_BYTES) == hva + run * PAGE_BYTES;
			run++)
			;
		r = place(lazy, hva, have ? lazy->buf + i * PAGE_BYTES : NULL, run * PAGE_BYTES);
		if (r < 0)
			err_errno(err, r, "userfaultfd");
	}
	return r;
}

static void note_wanted(struct lazy *lazy, uint64_t frame)
{
	uint32_t nr = atomic_load_explicit(&lazy->nr_wanted, memory_order_relaxed);

	if (nr == WORKING_SET_FRAMES_MAX)
		return;
	lazy->wanted[nr] = (uint32_t)frame;
	// Pairs with lazy_wanted().
	atomic_store_explicit(&lazy->nr_wanted, nr + 1, memory_order_release);
}

static int answer(struct lazy *lazy, struct err *err)
{
	const struct guest_mem *mem = lazy->config.mem;
	struct uffd_msg msg;
	uint64_t frame;
	ssize_t n = read(lazy->uffd, &msg, sizeof(msg));

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n != sizeof(msg) || msg.event != UFFD_EVENT_PAGEFAULT)
		return err_errno(err, n < 0 ? -errno : -EIO, "userfaultfd");
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		const struct guest_mem_region *region = &mem->regions[i];
		uint64_t off = msg.arg.pagefault.address - (uintptr_t)region->hva;

		if (off >= region->size_bytes)
			continue;
		atomic_fetch_add_explicit(&lazy->faults, 1, memory_order_relaxed);
		frame = (region->ram_off + off) / MEMORY_FRAME_BYTES;
		if (mark_loaded(lazy, frame))
			note_wanted(lazy, frame);
		return load(lazy, frame, err);
	}
	return err_set(err, -EIO, "userfaultfd: a fault outside of guest memory");
}

static bool may_prefetch(const struct lazy *lazy)
{
	return lazy->config.prefetch && lazy->next < lazy->config.prefetch->nr;
}

// One that cannot be had is nobody's concern until it is wanted.
static void prefetch(struct lazy *lazy)
{
	const uint64_t frame = lazy->config.prefetch->frames[lazy->next++];
	struct err unwanted = {0};

	if (!mark_loaded(lazy, frame))
		return;
	if (load(lazy, frame, &unwanted) == 0)
		atomic_fetch_add_explicit(&lazy->prefetched, 1, memory_order_relaxed);
	else
		lazy->next = lazy->config.prefetch->nr;
}

static void *handler(void *opaque)
{
	struct lazy *lazy = opaque;
	struct err err = {0};

	prctl(PR_SET_NAME, "lazy-memory");
	if (lazy->config.confine)
		lazy->config.confine(lazy->config.opaque, &err);
	for (;;) {
		struct pollfd fds[] = {{.fd = lazy->uffd, .events = POLLIN},
			{.fd = lazy->stop_fd, .events = POLLIN}};

		int n;

		if (err.code < 0) {
			lazy->config.failed(lazy->config.opaque, &err);
			abort();
		}
		// Who waits comes first.
		n = poll(fds, ARRAY_SIZE(fds), may_prefetch(lazy) ? 0 : -1);
		if (n < 0 && errno != EINTR)
			err_errno(&err, -errno, "poll");
		else if (n > 0 && fds[1].revents)
			return NULL;
		else if (n > 0)
			answer(lazy, &err);
		else if (n == 0)
			prefetch(lazy);
	}
}

int lazy_create(struct lazy **ret_lazy, const struct lazy_config *config, int uffd, struct err *err)
{
	const uint64_t frames = memory_frames(guest_mem_size_bytes(config->mem));
	struct lazy *lazy = calloc(1, sizeof(*lazy));
	sigset_t all, was;
	int r;

	if (uffd < 0) {
		free(lazy);
		return uffd;
	}
	if (!lazy) {
		fd_close(&uffd);
		return err_errno(err, -ENOMEM, "lazy memory");
	}
	lazy->config = *config;
	lazy->uffd = uffd;
	lazy->loaded = calloc((size_t)frames / 64 + 1, sizeof(*lazy->loaded));
	lazy->stop_fd = eventfd(0, EFD_CLOEXEC);
	if (!lazy->loaded)
		r = err_errno(err, -ENOMEM, "lazy memory");
	else
		r = lazy->stop_fd < 0 ? err_errno(err, -errno, "eventfd") : watch_ram(lazy, err);
	if (r == 0) {
		sigfillset(&all);
		sigdelset(&all, SIGSYS); // a call that it may not make: as with vCPUs
		pthread_sigmask(SIG_SETMASK, &all, &was);
		r = -pthread_create(&lazy->thread, NULL, handler, lazy);
		pthread_sigmask(SIG_SETMASK, &was, NULL);
		lazy->running = r == 0;
		if (r < 0)
			err_errno(err, r, "lazy memory");
	}
	if (r < 0) {
		lazy_destroy(lazy);
		return r;
	}
	*ret_lazy = lazy;
	return 0;
}

void lazy_destroy(struct lazy *lazy)
{
	uint64_t one = 1;

	if (!lazy)
		return;
	if (lazy->running) {
		ssize_t ignored = write(lazy->stop_fd, &one, sizeof(one));

		(void)ignored;
		pthread_join(lazy->thread, NULL);
	}
	fd_close(&lazy->stop_fd);
	fd_close(&lazy->uffd);
	free(lazy->loaded);
	free(lazy);
}

uint64_t lazy_faults(const struct lazy *lazy)
{
	return atomic_load_explicit(&lazy->faults, memory_order_relaxed);
}

uint64_t lazy_prefetched(const struct lazy *lazy)
{
	return atomic_load_explicit(&lazy->prefetched, memory_order_relaxed);
}

void lazy_wanted(const struct lazy *lazy, struct working_set *ret_set)
{
	ret_set->nr = atomic_load_explicit(&lazy->nr_wanted, memory_order_acquire);
	memcpy(ret_set->frames, lazy->wanted, ret_set->nr * sizeof(ret_set->frames[0]));
}
