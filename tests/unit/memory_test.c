// SPDX-License-Identifier: Apache-2.0
// snapshot/memory and chain: memory is the same after a chain of diffs, compressed or not, by each
// way of reading it; files that are damaged or do not belong together are refused.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "snapshot/chain.h"
#include "vmm/base/fd.h"

#define FIXTURES "tests/fixtures/snapshot-format-1/"

ssize_t __real_pwrite(int fd, const void *buf, size_t len, off_t off);
ssize_t __wrap_pwrite(int fd, const void *buf, size_t len, off_t off);
int __real_ftruncate(int fd, off_t len);
int __wrap_ftruncate(int fd, off_t len);

// The how-manieth call fails for want of room; 0: none. Every one is short if wanted.
static unsigned int fail_at, calls;
static bool short_writes;

ssize_t __wrap_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	if (++calls == fail_at) {
		errno = ENOSPC;
		return -1;
	}
	return __real_pwrite(fd, buf, short_writes ? MIN(len, (size_t)1000) : len, off);
}

int __wrap_ftruncate(int fd, off_t len)
{
	if (++calls == fail_at) {
		errno = ENOSPC;
		return -1;
	}
	return __real_ftruncate(fd, len);
}

#define LOW_PAGES  70ULL
#define HIGH_PAGES 1200ULL
#define NR_PAGES   (LOW_PAGES + HIGH_PAGES)
#define CHAIN      10

static const struct guest_mem_range ranges[] = {
	{GPA(0), LOW_PAGES *PAGE_BYTES}, {GPA(4 * GIB), HIGH_PAGES *PAGE_BYTES}};

static struct guest_mem new_memory(void)
{
	struct guest_mem mem;
	struct err err = {0};

	assert_int_equal(guest_mem_init(&mem, ranges, 2, &err), 0);
	return mem;
}

static struct snapshot_id id_of(unsigned int i)
{
	return i == 0 ? (struct snapshot_id){0} : (struct snapshot_id){{(uint8_t)i, 0x55}};
}

static bool compress;

static void write_state(int dir_fd, const struct snapshot_id *id, const struct snapshot_id *parent,
	const struct buf *index)
{
	struct image_section section = {MEMORY_SECTION, index->data, index->len};
	CLEANUP_BUF struct buf file = {0};
	CLEANUP_FD int fd = openat(dir_fd, "state", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	struct err err = {0};

	assert_int_equal(image_write(&file, id, parent, &section, 1, &err), 0);
	assert_int_equal(fd_write_all(fd, file.data, file.len), 0);
}

// Writes snapshot i, whose parent is i - 1 (0: none), to a folder of its own.
static int save(char dir[static 32], const struct guest_mem *mem, unsigned int i,
	const uint64_t *pages, struct memory_stats *ret_stats)
{
	const struct snapshot_id id = id_of(i), parent = id_of(i - 1);
	CLEANUP_BUF struct buf index = {0};
	struct err err = {0};
	int dir_fd, fd;

	snprintf(dir, 32, "/tmp/mayfly-memory-XXXXXX");
	assert_non_null(mkdtemp(dir));
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(memory_write(&(struct memory_save){fd, mem, pages, &id, &parent, compress},
				 &index, ret_stats, &err),
		0);
	fd_close(&fd);
	write_state(dir_fd, &id, &parent, &index);
	return dir_fd;
}

static int load(int dir_fd, struct memory_layer *ret_layer, struct err *err)
{
	char path[64];
	CLEANUP_FREE char *text = NULL;
	struct image image;
	size_t len;

	snprintf(path, sizeof(path), "/proc/self/fd/%d/state", dir_fd);
	assert_int_equal(fd_read_file(path, IMAGE_FILE_BYTES_MAX, &text, &len, err), 0);
	assert_int_equal(image_parse(&image, text, len, err), 0);
	return memory_open(ret_layer, dir_fd, &image, err);
}

// Opens the snapshots in some folders as a chain.
static int open_chain(
	struct chain **ret_chain, const int *dir_fds, unsigned int nr, struct err *err)
{
	struct memory_layer layers[CHAIN] = {0};
	int r = 0;

	for (unsigned int i = 0; i < nr; i++)
		assert_int_equal(load(dir_fds[i], &layers[i], err), 0);
	r = chain_create(ret_chain, layers, nr, NR_PAGES * PAGE_BYTES, err);
	for (unsigned int i = 0; i < nr; i++) {
		assert_true(r < 0 || layers[i].fd == -1);
		memory_close(&layers[i]);
	}
	return r;
}

static void read_into(struct guest_mem *mem, const int *dir_fds, unsigned int nr)
{
	struct chain *chain;
	struct err err = {0};

	assert_int_equal(open_chain(&chain, dir_fds, nr, &err), 0);
	assert_int_equal(chain_read(chain, mem, &err), 0);
	chain_destroy(chain);
}

static void forget(char dir[static 32], int dir_fd)
{
	unlinkat(dir_fd, "state", 0);
	unlinkat(dir_fd, MEMORY_FILE_NAME, 0);
	fd_close(&dir_fd);
	assert_int_equal(rmdir(dir), 0);
}

static void assert_same(const struct guest_mem *a, const struct guest_mem *b, const char *how)
{
	for (uint64_t page = 0; page < NR_PAGES; page++)
		if (memcmp(guest_mem_at(a, page * PAGE_BYTES), guest_mem_at(b, page * PAGE_BYTES),
			    PAGE_BYTES) != 0)
			fail_msg("%s: page %llu differs", how, (unsigned long long)page);
}

// Fills some pages, zeroes others, leaves most; tells which in pages.
static void scribble(struct guest_mem *mem, uint64_t *pages, unsigned int seed)
{
	for (unsigned int i = 0; i < 120; i++) {
		uint64_t page = (uint64_t)rand_r(&seed) % NR_PAGES;
		unsigned int run = rand_r(&seed) % 4 ? 1 : 40;

		for (; run > 0 && page < NR_PAGES; run--, page++) {
			uint8_t *at = guest_mem_at(mem, page * PAGE_BYTES);

			if (rand_r(&seed) % 3)
				memset(at, rand_r(&seed), PAGE_BYTES);
			else
				memset(at, 0, PAGE_BYTES);
			pages[page / 64] |= 1ULL << page % 64;
		}
	}
}

static void chain_of_diffs(bool (*compressed)(unsigned int i))
{
	struct guest_mem mem = new_memory();
	struct memory_layer layer;
	struct chain *chain;
	char dirs[CHAIN][32];
	int dir_fds[CHAIN];
	struct err err = {0};

	for (unsigned int i = 0; i < CHAIN; i++) {
		uint64_t pages[(NR_PAGES + 63) / 64] = {0};
		struct guest_mem mapped = new_memory(), read = new_memory();
		struct memory_stats stats;
		int r;

		scribble(&mem, pages, 100 + i);
		compress = compressed(i);
		dir_fds[i] = save(dirs[i], &mem, i + 1, pages, &stats);
		assert_true(stats.written_pages < stats.held_pages);
		assert_true(compress ? stats.written_bytes < stats.written_pages * PAGE_BYTES / 4
				     : stats.written_bytes == stats.written_pages * PAGE_BYTES);
		assert_int_equal(load(dir_fds[i], &layer, &err), 0);
		assert_int_equal(chain_verify_layer(&layer, &err), 0);
		memory_close(&layer);
		read_into(&read, dir_fds, i + 1);
		assert_same(&mem, &read, "read");
		assert_int_equal(open_chain(&chain, dir_fds, i + 1, &err), 0);
		r = chain_map(chain, &mapped, &err);
		assert_int_equal(r, chain_compressed(chain) ? -ENOTSUP : 0);
		if (r == 0)
			assert_same(&mem, &mapped, "mapped");
		chain_destroy(chain);
		guest_mem_fini(&mapped);
		guest_mem_fini(&read);
	}
	compress = false;
	// Without its parent a diff is nothing.
	assert_int_equal(open_chain(&chain, dir_fds + 1, CHAIN - 1, &err), -EBADMSG);
	for (unsigned int i = 0; i < CHAIN; i++)
		forget(dirs[i], dir_fds[i]);
	guest_mem_fini(&mem);
}

static bool never(unsigned int i)
{
	return i == CHAIN;
}

static bool always(unsigned int i)
{
	return i < CHAIN;
}

static bool every_third(unsigned int i)
{
	return i % 3 == 1;
}

static void a_chain_of_diffs_is_the_memory(void **state)
{
	(void)state;
	chain_of_diffs(never);
}

static void a_compressed_chain_is_the_memory(void **state)
{
	(void)state;
	chain_of_diffs(always);
}

static void a_mixed_chain_is_the_memory(void **state)
{
	(void)state;
	chain_of_diffs(every_third);
}

// What a machine that read its memory at once or when it wanted it has to do for a diff.
static void what_is_the_same_is_dropped_and_what_is_absent_filled(void **state)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0}, all[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory(), part = new_memory();
	struct memory_stats stats;
	struct chain *chain;
	struct err err = {0};
	char dir[32];
	int dir_fd;
	(void)state;

	scribble(&mem, pages, 21);
	compress = true;
	dir_fd = save(dir, &mem, 1, pages, &stats);
	compress = false;
	assert_int_equal(open_chain(&chain, &dir_fd, 1, &err), 0);
	for (uint64_t page = 0; page < NR_PAGES; page++)
		all[page / 64] |= 1ULL << page % 64;
	memset(pages, 0, sizeof(pages));
	// Three are there, and their own.
	for (uint64_t page = 10; page <= 1210; page += 600) {
		memset(guest_mem_at(&part, page * PAGE_BYTES), 0x77, PAGE_BYTES);
		memset(guest_mem_at(&mem, page * PAGE_BYTES), 0x77, PAGE_BYTES);
		pages[page / 64] |= 1ULL << page % 64;
	}
	assert_int_equal(chain_fill(chain, &part, all, pages, &err), 0);
	assert_same(&mem, &part, "filled");
	assert_int_equal(chain_drop_same(chain, &part, all, &err), 0);
	assert_memory_equal(all, pages, sizeof(all));
	chain_destroy(chain);
	forget(dir, dir_fd);
	guest_mem_fini(&mem);
	guest_mem_fini(&part);
}

static void a_damaged_frame_is_not_run_on(void **state)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory(), again = new_memory();
	struct memory_layer layer;
	struct memory_stats stats;
	struct chain *chain;
	struct err err = {0};
	unsigned int found = 0, tried = 0;
	char dir[32], byte;
	int dir_fd, fd, r;
	(void)state;

	for (uint64_t page = 0; page < NR_PAGES; page += 7) {
		memset(guest_mem_at(&mem, page * PAGE_BYTES), (int)page, PAGE_BYTES / 2);
		pages[page / 64] |= 1ULL << page % 64;
	}
	compress = true;
	dir_fd = save(dir, &mem, 1, pages, &stats);
	compress = false;
	fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CLOEXEC);
	for (uint64_t at = 3; at < stats.written_bytes; at += 61) {
		assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
		byte ^= 0x10;
		assert_int_equal(__real_pwrite(fd, &byte, 1, (off_t)at), 1);
		assert_int_equal(load(dir_fd, &layer, &err), 0);
		r = chain_verify_layer(&layer, &err);
		memory_close(&layer);
		assert_int_equal(open_chain(&chain, &dir_fd, 1, &err), 0);
		assert_int_equal(chain_read(chain, &again, &err), r);
		chain_destroy(chain);
		// Of a frame's header one bit means nothing.
		if (r == 0)
			assert_same(&mem, &again, "a bit without a meaning");
		else
			assert_non_null(strstr(err.msg, "damaged"));
		found += r == -EBADMSG;
		tried++;
		byte ^= 0x10;
		assert_int_equal(__real_pwrite(fd, &byte, 1, (off_t)at), 1);
	}
	assert_true(found > tried * 9 / 10);
	fd_close(&fd);
	forget(dir, dir_fd);
	guest_mem_fini(&mem);
	guest_mem_fini(&again);
}

// What a machine that was restored saves, as a whole and as a diff by its pages.
static void a_restored_machine_saves_what_it_has(void **state)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0}, touched[(NR_PAGES + 63) / 64] = {0},
					 changed[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory(), clone = new_memory(), again = new_memory();
	struct memory_layer layers[2] = {0}, whole = {0};
	struct memory_stats stats;
	char dirs[3][32];
	struct err err = {0};
	int fds[3];
	(void)state;

	scribble(&mem, pages, 5);
	fds[0] = save(dirs[0], &mem, 1, pages, &stats);
	assert_int_equal(load(fds[0], &layers[0], &err), 0);
	assert_int_equal(memory_map(&clone, layers, 1, &err), 0);
	memset(guest_mem_at(&clone, 3 * PAGE_BYTES), 'x', PAGE_BYTES);
	memset(guest_mem_at(&clone, 900 * PAGE_BYTES), 0, PAGE_BYTES);
	assert_int_equal(guest_mem_touched(&clone, true, changed, &err), 0);
	fds[1] = save(dirs[1], &clone, 2, changed, &stats);
	assert_int_equal(stats.held_pages, 2);
	assert_int_equal(load(fds[1], &layers[1], &err), 0);
	read_into(&again, fds, 2);
	assert_same(&clone, &again, "diff");
	// As a whole: also the pages that nobody has looked at are in it.
	guest_mem_fini(&again);
	again = new_memory();
	assert_int_equal(guest_mem_touched(&clone, false, touched, &err), 0);
	fds[2] = save(dirs[2], &clone, 1, touched, &stats);
	assert_int_equal(load(fds[2], &whole, &err), 0);
	assert_int_equal(memory_map(&again, &whole, 1, &err), 0);
	assert_same(&clone, &again, "whole");
	memory_close(&layers[0]);
	memory_close(&layers[1]);
	memory_close(&whole);
	for (int i = 0; i < 3; i++)
		forget(dirs[i], fds[i]);
	guest_mem_fini(&mem);
	guest_mem_fini(&clone);
	guest_mem_fini(&again);
}

static void damage_and_mixed_files_are_found(void **state)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory();
	struct memory_layer layer = {0};
	struct memory_stats stats;
	char a[32], b[32], byte = 'd';
	struct err err = {0};
	int fds[2], fd;
	(void)state;

	scribble(&mem, pages, 9);
	memset(guest_mem_at(&mem, 2 * PAGE_BYTES), 'm', PAGE_BYTES);
	pages[0] |= 4;
	fds[0] = save(a, &mem, 1, pages, &stats);
	fds[1] = save(b, &mem, 1, pages, &stats);
	fd = openat(fds[0], MEMORY_FILE_NAME, O_RDWR | O_CLOEXEC);
	assert_int_equal(pwrite(fd, &byte, 1, 2 * PAGE_BYTES + 77), 1);
	assert_int_equal(load(fds[0], &layer, &err), 0);
	assert_int_equal(chain_verify_layer(&layer, &err), -EBADMSG);
	assert_non_null(strstr(err.msg, "between 0 and 2 MiB"));
	memory_close(&layer);
	// Another snapshot's memory, of the same size.
	assert_int_equal(pwrite(fd, &byte, 1, (off_t)(NR_PAGES * PAGE_BYTES + 10)), 1);
	assert_int_equal(load(fds[0], &layer, &err), -EBADMSG);
	assert_non_null(strstr(err.msg, "belong together"));
	assert_int_equal(ftruncate(fd, (off_t)(NR_PAGES * PAGE_BYTES)), 0);
	assert_int_equal(load(fds[0], &layer, &err), -EBADMSG);
	fd_close(&fd);
	unlinkat(fds[0], MEMORY_FILE_NAME, 0);
	assert_int_equal(load(fds[0], &layer, &err), -ENOENT);
	assert_int_equal(symlinkat("/etc/passwd", fds[0], MEMORY_FILE_NAME), 0);
	assert_int_equal(load(fds[0], &layer, &err), -ELOOP);
	forget(a, fds[0]);
	forget(b, fds[1]);
	guest_mem_fini(&mem);
}

static void lying_index(bool small)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory();
	const struct snapshot_id id = id_of(1), none = {0};
	CLEANUP_BUF struct buf index = {0};
	CLEANUP_FD int file = memfd_create("memory", MFD_CLOEXEC);
	CLEANUP_FD int dir_fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct memory_stats stats;
	struct err err = {0};

	assert_int_equal(memory_write(&(struct memory_save){file, &mem, pages, &id, &none, small},
				 &index, &stats, &err),
		0);
	// Any byte of its header, any length: none is believed, none is read beyond.
	for (size_t i = 0; i < 16 * 8 + index.len; i++) {
		struct image_section section = {MEMORY_SECTION, index.data, index.len};
		CLEANUP_BUF struct buf image_file = {0};
		struct memory_layer layer;
		struct image image;
		int r;

		if (i < 16 * 8)
			index.data[i / 8] ^= (uint8_t)(1U << i % 8);
		else
			section.len = i - 16 * 8;
		assert_int_equal(image_write(&image_file, &id, &none, &section, 1, &err), 0);
		assert_int_equal(image_parse(&image, image_file.data, image_file.len, &err), 0);
		r = memory_open(&layer, dir_fd, &image, &err);
		if (r != -EBADMSG && r != -ENOENT)
			fail_msg("%zu: %d", i, r);
		if (i < 16 * 8)
			index.data[i / 8] ^= (uint8_t)(1U << i % 8);
	}
	guest_mem_fini(&mem);
}

static void an_index_that_lies_is_refused(void **state)
{
	(void)state;
	lying_index(false);
	lying_index(true);
}

// A disk that is full at any moment is said to be; once there is room, the same pages are written.
static void full_disk(bool small)
{
	const struct snapshot_id id = id_of(1), none = {0};
	uint64_t pages[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory(), again = new_memory();
	struct memory_layer layer = {0};
	struct memory_stats stats;
	struct err err = {0};
	char dir[32];
	int r, dir_fd;

	scribble(&mem, pages, 3);
	fail_at = 0;
	do {
		CLEANUP_BUF struct buf index = {0};
		FILE *file = tmpfile();

		assert_non_null(file);
		fail_at++;
		calls = 0;
		r = memory_write(
			&(struct memory_save){fileno(file), &mem, pages, &id, &none, small}, &index,
			&stats, &err);
		assert_true(r == 0 || (r == -ENOSPC && strstr(err.msg, "No space")));
		fclose(file);
	} while (r < 0);
	assert_true(fail_at > 10);
	fail_at = 0;
	short_writes = true;
	compress = small;
	dir_fd = save(dir, &mem, 1, pages, &stats);
	short_writes = compress = false;
	assert_int_equal(load(dir_fd, &layer, &err), 0);
	assert_int_equal(chain_verify_layer(&layer, &err), 0);
	memory_close(&layer);
	read_into(&again, &dir_fd, 1);
	assert_same(&mem, &again, "short writes");
	forget(dir, dir_fd);
	guest_mem_fini(&mem);
	guest_mem_fini(&again);
}

static void a_full_disk_fails_the_save_and_no_more(void **state)
{
	(void)state;
	full_disk(false);
	full_disk(true);
}

// As a live save leaves it: pages in their places, some of them zeros, no index.
static void pages_in_their_places_get_an_index(void **state)
{
	const struct snapshot_id id = id_of(1), none = {0};
	struct guest_mem mem = new_memory(), read = new_memory();
	char dir[32] = "/tmp/mayfly-memory-XXXXXX";
	uint64_t pages[(NR_PAGES + 63) / 64] = {0}, written = 0;
	struct memory_layer layer = {.fd = -1};
	struct memory_stats stats;
	struct err err = {0};
	int dir_fd, fd;

	(void)state;
	assert_non_null(mkdtemp(dir));
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(ftruncate(fd, (off_t)((NR_PAGES + 1) * PAGE_BYTES)), 0);
	for (unsigned int round = 0; round < 3; round++) {
		scribble(&mem, pages, round + 10);
		for (uint64_t page = 0; page < NR_PAGES; page++)
			if (pages[page / 64] >> page % 64 & 1)
				assert_int_equal(pwrite(fd, guest_mem_at(&mem, page * PAGE_BYTES),
							 PAGE_BYTES, (off_t)(page * PAGE_BYTES)),
					PAGE_BYTES);
	}
	for (uint64_t page = 0; page < NR_PAGES; page++)
		written += !memory_is_zero(guest_mem_at(&mem, page * PAGE_BYTES));
	for (fail_at = 0; fail_at < 2; fail_at++) {
		CLEANUP_BUF struct buf index = {0};

		calls = 0;
		if (fail_at == 1) {
			assert_int_equal(memory_index(fd, &id, &index, &stats, &err), -ENOSPC);
			continue;
		}
		assert_int_equal(memory_index(fd, &id, &index, &stats, &err), 0);
		write_state(dir_fd, &id, &none, &index);
	}
	fail_at = 0;
	assert_int_equal(stats.written_pages, written);
	assert_int_equal(stats.held_pages, NR_PAGES);
	assert_int_equal(load(dir_fd, &layer, &err), 0);
	assert_int_equal(chain_verify_layer(&layer, &err), 0);
	memory_close(&layer);
	read_into(&read, &dir_fd, 1);
	assert_same(&mem, &read, "indexed");
	// Zeros that were written are holes.
	assert_true(lseek(fd, 0, SEEK_END) == (off_t)((NR_PAGES + 1) * PAGE_BYTES));
	for (uint64_t page = 0; page < NR_PAGES; page++)
		if (memory_is_zero(guest_mem_at(&mem, page * PAGE_BYTES)))
			assert_true(lseek(fd, (off_t)(page * PAGE_BYTES), SEEK_DATA) >=
				    (off_t)((page + 1) * PAGE_BYTES));
	// Of a length that cannot be.
	for (unsigned int i = 0; i < 3; i++) {
		static const off_t lengths[] = {0, PAGE_BYTES, 3 * PAGE_BYTES + 1};
		CLEANUP_BUF struct buf index = {0};

		assert_int_equal(ftruncate(fd, lengths[i]), 0);
		assert_int_equal(memory_index(fd, &id, &index, &stats, &err), -EBADMSG);
	}
	fd_close(&fd);
	forget(dir, dir_fd);
	guest_mem_fini(&mem);
	guest_mem_fini(&read);
}

static void what_is_in_a_hole_is_found(void **state)
{
	uint64_t pages[(NR_PAGES + 63) / 64] = {0};
	struct guest_mem mem = new_memory();
	struct memory_layer layer = {0};
	struct memory_stats stats;
	struct err err = {0};
	char dir[32];
	int dir_fd, fd;
	(void)state;

	for (unsigned int i = 0; i < 3; i++) {
		pages[i * 8] = 2;
		memset(guest_mem_at(&mem, (i * 512 + 1) * PAGE_BYTES), 'x', PAGE_BYTES);
	}
	dir_fd = save(dir, &mem, 1, pages, &stats);
	assert_int_equal(load(dir_fd, &layer, &err), 0);
	assert_int_equal(chain_verify_layer(&layer, &err), 0);
	fd = openat(dir_fd, MEMORY_FILE_NAME, O_RDWR | O_CLOEXEC);
	assert_int_equal(pwrite(fd, "", 1, 700 * PAGE_BYTES), 1); // zeros are none
	assert_int_equal(chain_verify_layer(&layer, &err), 0);
	assert_int_equal(pwrite(fd, "y", 1, 700 * PAGE_BYTES + 5), 1);
	assert_int_equal(chain_verify_layer(&layer, &err), -EBADMSG);
	assert_non_null(strstr(err.msg, "hole"));
	fd_close(&fd);
	memory_close(&layer);
	forget(dir, dir_fd);
	guest_mem_fini(&mem);
}

// What the first version of format 1 wrote: kept, so that those to come read it.
static void files_of_format_1_are_read(void **state)
{
	static const char *const dirs[] = {FIXTURES "10000000000000000000000000000001",
		FIXTURES "20000000000000000000000000000002"};
	// Pages of one byte each; page 0 was zeroed, 2 and 15 written by the diff.
	static const uint8_t full[16] = {1, 2, 0, 4, 5, 0, 7, 8, 0, 10, 11, 0, 13, 14, 0, 16},
			     both[16] = {0, 2, 0xdd, 4, 5, 0, 7, 8, 0, 10, 11, 0, 13, 14, 0, 0xee};
	const struct guest_mem_range range = {GPA(0), 16 * PAGE_BYTES};
	struct memory_layer layers[2] = {0};
	struct err err = {0};
	(void)state;

	for (unsigned int i = 0; i < 2; i++) {
		int dir_fd = open(dirs[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);

		assert_true(dir_fd >= 0);
		assert_int_equal(load(dir_fd, &layers[i], &err), 0);
		assert_int_equal(chain_verify_layer(&layers[i], &err), 0);
		fd_close(&dir_fd);
	}
	for (unsigned int nr = 1; nr <= 2; nr++) {
		struct guest_mem mem;

		assert_int_equal(guest_mem_init(&mem, &range, 1, &err), 0);
		assert_int_equal(memory_map(&mem, layers, nr, &err), 0);
		for (size_t i = 0; i < 16 * PAGE_BYTES; i++)
			assert_int_equal(*guest_mem_at(&mem, ALIGN_DOWN(i, PAGE_BYTES)),
				(nr == 1 ? full : both)[i / PAGE_BYTES]);
		guest_mem_fini(&mem);
	}
	memory_close(&layers[0]);
	memory_close(&layers[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_full_disk_fails_the_save_and_no_more),
		cmocka_unit_test(pages_in_their_places_get_an_index),
		cmocka_unit_test(what_is_in_a_hole_is_found),
		cmocka_unit_test(files_of_format_1_are_read),
		cmocka_unit_test(a_chain_of_diffs_is_the_memory),
		cmocka_unit_test(a_compressed_chain_is_the_memory),
		cmocka_unit_test(a_mixed_chain_is_the_memory),
		cmocka_unit_test(what_is_the_same_is_dropped_and_what_is_absent_filled),
		cmocka_unit_test(a_damaged_frame_is_not_run_on),
		cmocka_unit_test(a_restored_machine_saves_what_it_has),
		cmocka_unit_test(damage_and_mixed_files_are_found),
		cmocka_unit_test(an_index_that_lies_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
