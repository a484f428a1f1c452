// SPDX-License-Identifier: Apache-2.0
// snapshot/lazy: pages come when they are wanted, by threads at once, by the kernel, after they
// were given back; one that cannot be had ends the process, which never sees zeros instead.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "snapshot/lazy.h"
#include "vmm/base/fd.h"

#define LOW_PAGES  70ULL // a frame lies in both regions
#define HIGH_PAGES 1201ULL
#define NR_PAGES   (LOW_PAGES + HIGH_PAGES)
#define WORDS      ((NR_PAGES + 63) / 64)
#define THREADS    4
#define LAYERS     3

static const struct guest_mem_range ranges[] = {
	{GPA(0), LOW_PAGES *PAGE_BYTES}, {GPA(4 * GIB), HIGH_PAGES *PAGE_BYTES}};

static struct guest_mem new_memory(void)
{
	struct guest_mem mem;

	assert_int_equal(guest_mem_init(&mem, ranges, 2, NULL), 0);
	return mem;
}

// What page has at the end of the chain; 0: zeros.
static uint8_t byte_of(uint64_t page)
{
	return page % 5 == 0 ? 0 : (uint8_t)(page * 7 + page % 3 + 1) | 1;
}

struct fixture {
	struct guest_mem mem;
	struct chain *chain;
	struct lazy *lazy;
	int fds[LAYERS]; // the files, still open for writing
	const struct working_set *prefetch;
};

static void save_layer(struct memory_layer *layer, int *ret_fd, const struct guest_mem *mem,
	const uint64_t *pages, unsigned int i, bool compress)
{
	const struct snapshot_id id = {{(uint8_t)(i + 1)}}, parent = {{(uint8_t)i}};
	CLEANUP_BUF struct buf index = {0};
	CLEANUP_BUF struct buf file = {0};
	struct image_section section = {.name = MEMORY_SECTION};
	char dir[] = "/tmp/mayfly-lazy-XXXXXX";
	struct memory_stats stats;
	struct image image;
	struct err err = {0};
	CLEANUP_FD int dir_fd = -1;

	assert_non_null(mkdtemp(dir));
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	*ret_fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(
		memory_write(&(struct memory_save){*ret_fd, mem, pages, &id, &parent, compress},
			&index, &stats, &err),
		0);
	section.data = index.data;
	section.len = index.len;
	assert_int_equal(image_write(&file, &id, &parent, &section, 1, &err), 0);
	assert_int_equal(image_parse(&image, file.data, file.len, &err), 0);
	assert_int_equal(memory_open(layer, dir_fd, &image, &err), 0);
	unlinkat(dir_fd, MEMORY_FILE_NAME, 0);
	rmdir(dir);
}

static void on_failed(void *opaque, const struct err *err)
{
	(void)opaque;
	_exit(err->code == -EBADMSG ? 42 : 1);
}

// A chain in which page p was last written by layer p % LAYERS, others before that.
static bool setup(struct fixture *f, bool compress)
{
	struct memory_layer layers[LAYERS];
	struct guest_mem mem = new_memory();
	struct lazy_config config = {.mem = &f->mem, .failed = on_failed, .prefetch = f->prefetch};
	struct err err = {0};
	int r;

	for (unsigned int i = 0; i < LAYERS; i++) {
		uint64_t pages[WORDS] = {0};

		for (uint64_t page = 0; page < NR_PAGES; page++) {
			if (page % LAYERS < i)
				continue;
			memset(guest_mem_at(&mem, page * PAGE_BYTES),
				page % LAYERS == i ? byte_of(page) : 0xee, PAGE_BYTES);
			pages[page / 64] |= 1ULL << page % 64;
		}
		save_layer(&layers[i], &f->fds[i], &mem, pages, i, compress);
	}
	guest_mem_fini(&mem);
	f->mem = new_memory();
	assert_int_equal(chain_create(&f->chain, layers, LAYERS, NR_PAGES * PAGE_BYTES, &err), 0);
	config.chain = f->chain;
	r = lazy_create(&f->lazy, &config, lazy_open(&err), &err);
	if (r == 0)
		return true;
	assert_true(r == -EPERM || r == -ENOSYS);
	fprintf(stderr, "skipped: %s\n", err.msg);
	chain_destroy(f->chain);
	guest_mem_fini(&f->mem);
	return false;
}

static void teardown(struct fixture *f)
{
	lazy_destroy(f->lazy);
	chain_destroy(f->chain);
	guest_mem_fini(&f->mem);
	for (unsigned int i = 0; i < LAYERS; i++)
		fd_close(&f->fds[i]);
}

static bool is_right(const struct guest_mem *mem, uint64_t page)
{
	const uint8_t *at = guest_mem_at(mem, page * PAGE_BYTES);

	return at[0] == byte_of(page) && memcmp(at, at + 1, PAGE_BYTES - 1) == 0;
}

struct toucher {
	struct fixture *f;
	unsigned int seed, wrong;
};

static void *touch(void *opaque)
{
	struct toucher *t = opaque;

	for (unsigned int i = 0; i < 3000; i++)
		t->wrong += !is_right(&t->f->mem, (uint64_t)rand_r(&t->seed) % NR_PAGES);
	for (uint64_t page = 0; page < NR_PAGES; page++)
		t->wrong += !is_right(&t->f->mem, page);
	return NULL;
}

static void pages_come_for_all_who_want_them(void **state)
{
	(void)state;
	for (int compress = 0; compress < 2; compress++) {
		struct toucher touchers[THREADS];
		pthread_t threads[THREADS];
		struct fixture f = {0};

		if (!setup(&f, compress)) {
			skip();
			return;
		}
		for (unsigned int i = 0; i < THREADS; i++) {
			touchers[i] = (struct toucher){&f, i * 1000, 0};
			assert_int_equal(pthread_create(&threads[i], NULL, touch, &touchers[i]), 0);
		}
		for (unsigned int i = 0; i < THREADS; i++) {
			pthread_join(threads[i], NULL);
			assert_int_equal(touchers[i].wrong, 0);
		}
		// A fault brings its neighbours along.
		assert_in_range(lazy_faults(f.lazy), memory_frames(NR_PAGES * PAGE_BYTES),
			THREADS * memory_frames(NR_PAGES * PAGE_BYTES));
		teardown(&f);
	}
}

// As io_uring and KVM want them.
static void pages_come_for_the_kernel(void **state)
{
	uint8_t page_bytes[PAGE_BYTES];
	struct fixture f = {0};
	int p[2];
	(void)state;

	if (!setup(&f, true)) {
		skip();
		return;
	}
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	for (uint64_t page = 3; page < NR_PAGES; page += 40) {
		assert_int_equal(write(p[1], guest_mem_at(&f.mem, page * PAGE_BYTES), PAGE_BYTES),
			PAGE_BYTES);
		// And back, into one that is absent.
		assert_int_equal(
			read(p[0], guest_mem_at(&f.mem, (page + 17) % NR_PAGES * PAGE_BYTES),
				PAGE_BYTES),
			PAGE_BYTES);
		memset(page_bytes, byte_of(page), PAGE_BYTES);
		assert_memory_equal(guest_mem_at(&f.mem, (page + 17) % NR_PAGES * PAGE_BYTES),
			page_bytes, PAGE_BYTES);
	}
	fd_close(&p[0]);
	fd_close(&p[1]);
	teardown(&f);
}

static void what_was_given_back_comes_again(void **state)
{
	struct fixture f = {0};
	(void)state;

	if (!setup(&f, false)) {
		skip();
		return;
	}
	for (int round = 0; round < 3; round++) {
		for (uint64_t page = 0; page < LOW_PAGES; page++)
			assert_true(is_right(&f.mem, page));
		assert_int_equal(guest_mem_discard(&f.mem, GPA(0), LOW_PAGES * PAGE_BYTES), 0);
	}
	teardown(&f);
}

// In the child of a fork nothing is lazy any more: it reads zeros, and is to fill what it wants.
static void a_child_fills_its_own(void **state)
{
	uint64_t all[WORDS] = {0}, present[WORDS] = {0};
	struct fixture f = {0};
	struct err err = {0};
	int status;
	pid_t pid;
	(void)state;

	if (!setup(&f, true)) {
		skip();
		return;
	}
	for (uint64_t page = 0; page < NR_PAGES; page++)
		all[page / 64] |= 1ULL << page % 64;
	for (uint64_t page = 0; page < NR_PAGES; page += 100)
		*guest_mem_at(&f.mem, page * PAGE_BYTES) ^= 0x55;
	// As a save does it: before the fork, for the descriptor shows this process's pages. What
	// the handler brings meanwhile is filled once more with the same.
	assert_int_equal(guest_mem_touched(&f.mem, true, present, &err), 0);
	pid = fork();
	if (pid == 0) {
		if (chain_fill(f.chain, &f.mem, all, present, &err) < 0)
			_exit(1);
		for (uint64_t page = 0; page < NR_PAGES; page++) {
			uint8_t *at = guest_mem_at(&f.mem, page * PAGE_BYTES);

			*at ^= page % 100 == 0 ? 0x55 : 0;
			if (!is_right(&f.mem, page))
				_exit(2);
		}
		if (chain_drop_same(f.chain, &f.mem, all, &err) < 0)
			_exit(3);
		for (size_t i = 0; i < WORDS; i++)
			if (all[i])
				_exit(4);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	teardown(&f);
}

// What a first machine wanted is there for the second before it asks.
static void what_was_wanted_is_fetched_before(void **state)
{
	static const uint64_t touched[] = {900, 3, 500, 501, 68, 3};
	static const uint32_t frames[] = {900 / 16, 0, 500 / 16, 68 / 16};
	static struct working_set wanted, again;
	struct fixture f = {0};
	(void)state;

	if (!setup(&f, true)) {
		skip();
		return;
	}
	for (size_t i = 0; i < ARRAY_SIZE(touched); i++)
		assert_true(is_right(&f.mem, touched[i]));
	lazy_wanted(f.lazy, &wanted);
	assert_int_equal(wanted.nr, ARRAY_SIZE(frames));
	assert_memory_equal(wanted.frames, frames, sizeof(frames));
	assert_int_equal(lazy_prefetched(f.lazy), 0);
	teardown(&f);

	f = (struct fixture){.prefetch = &wanted};
	assert_true(setup(&f, true));
	while (lazy_prefetched(f.lazy) < wanted.nr)
		sched_yield();
	for (size_t i = 0; i < ARRAY_SIZE(touched); i++)
		assert_true(is_right(&f.mem, touched[i]));
	assert_int_equal(lazy_faults(f.lazy), 0);
	assert_true(is_right(&f.mem, 100));
	lazy_wanted(f.lazy, &again);
	assert_int_equal(again.nr, 1);
	teardown(&f);
}

// While threads want pages in their own order; and of frames that are named twice.
static void prefetching_changes_nothing(void **state)
{
	static struct working_set all;
	(void)state;

	all.nr = 2 * (uint32_t)memory_frames(NR_PAGES * PAGE_BYTES);
	for (uint32_t i = 0; i < all.nr; i++)
		all.frames[i] = i / 2;
	for (int round = 0; round < 10; round++) {
		struct toucher touchers[THREADS];
		pthread_t threads[THREADS];
		struct fixture f = {.prefetch = &all};

		if (!setup(&f, round % 2)) {
			skip();
			return;
		}
		for (unsigned int i = 0; i < THREADS; i++) {
			touchers[i] = (struct toucher){&f, i * 1000, 0};
			assert_int_equal(pthread_create(&threads[i], NULL, touch, &touchers[i]), 0);
		}
		for (unsigned int i = 0; i < THREADS; i++) {
			pthread_join(threads[i], NULL);
			assert_int_equal(touchers[i].wrong, 0);
		}
		teardown(&f);
	}
}

// A frame that is damaged and named is nobody's concern; one that is wanted is the end.
static void what_cannot_be_fetched_is_left(void **state)
{
	static const struct working_set first = {.nr = 2, .frames = {400 / 16, 1}};
	int status;
	pid_t pid;
	(void)state;

	for (int want = 0; want < 2; want++) {
		struct fixture f = {0};

		if (!setup(&f, true)) {
			skip();
			return;
		}
		lazy_destroy(f.lazy);
		for (unsigned int i = 0; i < LAYERS; i++)
			assert_int_equal(ftruncate(f.fds[i], 100), 0);
		pid = fork();
		if (pid == 0) {
			struct lazy_config config = {.chain = f.chain,
				.mem = &f.mem,
				.failed = on_failed,
				.prefetch = &first};
			bool zero = true;

			if (lazy_create(&f.lazy, &config, lazy_open(NULL), NULL) < 0)
				_exit(2);
			if (want)
				zero = *(volatile uint8_t *)guest_mem_at(
					       &f.mem, 401 * PAGE_BYTES) == 0;
			lazy_destroy(f.lazy);
			_exit(want ? 3 + zero : 0);
		}
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_true(WIFEXITED(status));
		assert_int_equal(WEXITSTATUS(status), want ? 42 : 0);
		f.lazy = NULL;
		teardown(&f);
	}
}

// The handler fails in the middle of a fault, for a page, for the kernel.
static void a_page_that_cannot_be_had_ends_the_process(void **state)
{
	(void)state;
	for (int how = 0; how < 4; how++) {
		struct fixture f = {0};
		int status;
		pid_t pid;

		if (!setup(&f, how % 2 == 0)) {
			skip();
			return;
		}
		lazy_destroy(f.lazy);
		for (unsigned int i = 0; i < LAYERS; i++)
			assert_int_equal(ftruncate(f.fds[i], 100), 0);
		pid = fork();
		if (pid == 0) {
			struct lazy_config config = {
				.chain = f.chain, .mem = &f.mem, .failed = on_failed};
			uint8_t *at = guest_mem_at(&f.mem, 400 * PAGE_BYTES);

			if (lazy_create(&f.lazy, &config, lazy_open(NULL), NULL) < 0)
				_exit(2);
			if (how < 2)
				_exit(*(volatile uint8_t *)at == 0 ? 3 : 4);
			_exit(write(STDERR_FILENO, at, 1) == 1 ? 5 : 6);
		}
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_true(WIFEXITED(status));
		assert_int_equal(WEXITSTATUS(status), 42);
		f.lazy = NULL;
		teardown(&f);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pages_come_for_all_who_want_them),
		cmocka_unit_test(pages_come_for_the_kernel),
		cmocka_unit_test(what_was_given_back_comes_again),
		cmocka_unit_test(a_child_fills_its_own),
		cmocka_unit_test(what_was_wanted_is_fetched_before),
		cmocka_unit_test(prefetching_changes_nothing),
		cmocka_unit_test(what_cannot_be_fetched_is_left),
		cmocka_unit_test(a_page_that_cannot_be_had_ends_the_process),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
