// SPDX-License-Identifier: Apache-2.0
// Copying memory into a snapshot while the guest runs. Loop thread, but for vm_live_write().
//
// A round writes pages to their places in the file, by io_uring, a run at a time, while the log of
// changes is on; what was written meanwhile is the next round's. A page is read after the log that
// it was in: so what is changed later is in the next log, and the last one, taken at rest, leaves
// nothing out. When what is left would be written within the time that was asked for, or the rounds
// get no smaller, the machine comes to rest for the last of it. If that is too much then, it is
// written from a fork, as all of a snapshot that is not live is.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "snapshot/memory.h"
#include "vmm/vm_private.h"

#define RUN_PAGES 256ULL // of one write
// Until something has been measured, and as the rate of what is too little to measure.
#define BYTES_PER_S  (200 * MIB)
#define MEASURE_FROM MIB

static uint64_t count(const struct vm *vm)
{
	const uint64_t *map = vm->saving.live.round;
	uint64_t pages = 0;

	for (size_t i = 0; i < guest_mem_bitmap_words(&vm->mem); i++)
		pages += (uint64_t)__builtin_popcountll(map[i]);
	return pages;
}

// How long so many pages will take, by what the rounds took.
static uint64_t estimate_ns(const struct vm *vm, uint64_t pages)
{
	const struct vm_snapshot_result *result = &vm->saving.result;
	uint64_t bytes = 0, ns = 0;

	for (unsigned int i = 0; i < result->nr_rounds; i++) {
		bytes += result->rounds[i].bytes;
		ns += result->rounds[i].ns;
	}
	if (bytes < MEASURE_FROM || ns == 0) {
		bytes = BYTES_PER_S;
		ns = 1000000000ULL;
	}
	return (uint64_t)((double)(pages * PAGE_BYTES) * (double)ns / (double)bytes);
}

// What was changed since the last time is to be copied once more; and is in no committed snapshot.
static int collect(struct vm *vm, struct err *err)
{
	struct vm_saving *saving = &vm->saving;
	int r = kvm_dirty_log(&vm->kvm, &vm->mem, saving->live.round, err);

	if (r == 0)
		guest_mem_track_collect(&vm->mem, saving->live.round);
	// What was read before an error is in no log any more.
	for (size_t i = 0; i < guest_mem_bitmap_words(&vm->mem); i++)
		saving->carried[i] |= saving->live.round[i];
	return r;
}

// The next pages in a row that are to be copied: how many, from live->page on; 0: none.
static uint64_t next_run(const struct vm *vm, uint64_t *ret_page)
{
	const struct vm_live *live = &vm->saving.live;
	uint64_t all = guest_mem_size_bytes(&vm->mem) / PAGE_BYTES;
	uint64_t first = memory_next_page(live->round, true, live->page, all), end;
	const uint8_t *hva;

	*ret_page = first;
	if (first == all)
		return 0;
	hva = guest_mem_at(&vm->mem, first * PAGE_BYTES);
	end = memory_next_page(live->round, false, first, MIN(all, first + RUN_PAGES));
	// Of one region.
	while (guest_mem_at(&vm->mem, (end - 1) * PAGE_BYTES) !=
		hva + (end - 1 - first) * PAGE_BYTES)
		end--;
	return end - first;
}

static void next_round(struct vm *vm);

static void fail(struct vm *vm, int r, struct err *err)
{
	vm_live_fini(vm);
	vm_snapshot_failed(vm, r, err);
}

static void write_next(struct vm *vm)
{
	struct vm_live *live = &vm->saving.live;

	live->nr_pages = next_run(vm, &live->page);
	if (live->nr_pages == 0) {
		next_round(vm);
		return;
	}
	live->writing = true;
	io_uring_prep_write(loop_sqe(&vm->loop, &live->op), vm->saving.request.memory_fd,
		guest_mem_at(&vm->mem, live->page * PAGE_BYTES),
		(unsigned int)(live->nr_pages * PAGE_BYTES), live->page * PAGE_BYTES);
}

static void on_abandoned(struct loop_op *op, int res)
{
	(void)res;
	container_of(op, struct vm_live, op)->writing = false;
}

static void on_written(struct loop_op *op, int res)
{
	struct vm_live *live = container_of(op, struct vm_live, op);
	struct vm *vm = container_of(live, struct vm, saving.live);
	struct err err = {0};

	live->writing = false;
	if (res == -EINTR || res == -EAGAIN)
		res = 0;
	else if (res >= 0 && res < (int)PAGE_BYTES)
		res = -ENOSPC; // the next attempt would say so
	if (res < 0) {
		err_errno(&err, res, MEMORY_FILE_NAME);
		fail(vm, res, &err);
		return;
	}
	live->page += (uint64_t)res / PAGE_BYTES;
	live->bytes += (uint64_t)res;
	write_next(vm);
}

// One is over, and tells whether there is another.
static void next_round(struct vm *vm)
{
	struct vm_saving *saving = &vm->saving;
	struct vm_live *live = &saving->live;
	struct vm_snapshot_result *result = &saving->result;
	uint64_t pages, now = now_ns();
	struct err err = {0};
	int r;

	result->rounds[result->nr_rounds].bytes = live->bytes;
	result->rounds[result->nr_rounds++].ns = now - live->start_ns;
	memset(live->round, 0, guest_mem_bitmap_words(&vm->mem) * sizeof(*live->round));
	r = collect(vm, &err);
	if (r < 0) {
		fail(vm, r, &err);
		return;
	}
	pages = count(vm);
	if (estimate_ns(vm, pages) <= saving->request.downtime_ns ||
		result->nr_rounds == VM_LIVE_ROUNDS_MAX || pages > live->last_pages / 4 * 3) {
		vm_snapshot_rest(vm);
		return;
	}
	live->last_pages = pages;
	live->page = live->bytes = 0;
	live->start_ns = now_ns();
	write_next(vm);
}

static int begin(struct vm *vm, struct err *err)
{
	struct vm_live *live = &vm->saving.live;
	uint64_t ram_bytes = guest_mem_size_bytes(&vm->mem);
	int r = vm_log_changes(vm, err);

	if (r < 0)
		return r;
	if (ftruncate(vm->saving.request.memory_fd, (off_t)(ram_bytes + PAGE_BYTES)) < 0)
		return err_errno(err, -errno, MEMORY_FILE_NAME);
	live->round = calloc(guest_mem_bitmap_words(&vm->mem), sizeof(*live->round));
	if (!live->round)
		return err_errno(err, -ENOMEM, "snapshot");
	r = guest_mem_touched(&vm->mem, false, live->round, err);
	live->op.done = on_written;
	live->last_pages = UINT64_MAX;
	live->page = live->bytes = 0;
	return r;
}

static void on_begin(void *opaque)
{
	struct vm *vm = opaque;
	struct vm_saving *saving = &vm->saving;
	struct err err = {0};
	int r = begin(vm, &err);

	if (vm->rest.resting) {
		vm_rest_end(vm);
		saving->result.begin_ns = now_ns() - saving->rest_start_ns;
	}
	if (r < 0) {
		fail(vm, r, &err);
		return;
	}
	saving->live.start_ns = now_ns();
	write_next(vm);
}

void vm_live_start(struct vm *vm)
{
	vm->saving.rest_start_ns = now_ns();
	// The log begins with a machine at rest, so that nothing is missing in it.
	if (vm->saving.logging)
		on_begin(vm);
	else
		vm_rest_start(vm, on_begin, vm);
}

int vm_live_last(struct vm *vm, bool *ret_now, struct err *err)
{
	uint64_t pages;
	int r = collect(vm, err);

	if (r < 0)
		return r;
	pages = count(vm);
	vm->saving.result.last_bytes = pages * PAGE_BYTES;
	*ret_now = estimate_ns(vm, pages) <= vm->saving.request.downtime_ns;
	vm->saving.result.forked = !*ret_now;
	return 0;
}

int vm_live_write(struct vm *vm, struct err *err)
{
	struct vm_live *live = &vm->saving.live;
	uint64_t page, nr;

	for (live->page = 0; (nr = next_run(vm, &page)) > 0; live->page = page + nr) {
		uint64_t done = 0;

		while (done < nr * PAGE_BYTES) {
			ssize_t n = pwrite(vm->saving.request.memory_fd,
				guest_mem_at(&vm->mem, page * PAGE_BYTES) + done,
				nr * PAGE_BYTES - done, (off_t)(page * PAGE_BYTES + done));

			if (n < 0 && errno == EINTR)
				continue;
			if (n <= 0)
				return err_errno(err, n < 0 ? -errno : -EIO, MEMORY_FILE_NAME);
			done += (uint64_t)n;
		}
	}
	return 0;
}

void vm_live_fini(struct vm *vm)
{
	struct vm_live *live = &vm->saving.live;

	live->op.done = on_abandoned;
	while (live->writing && loop_turn(&vm->loop, UINT64_MAX, NULL) == 0)
		;
	free(live->round);
	*live = (struct vm_live){0};
}
