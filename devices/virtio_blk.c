// SPDX-License-Identifier: Apache-2.0
// virtio block device; see the header. Loop thread.
#include "devices/virtio_blk.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_ids.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/overlay.h"
#include "devices/rate_limit.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/loop.h"

#define QUEUE_SIZE         256U
#define SEG_MAX            (VIRTQ_CHAIN_MAX - 2) // beside header and status
#define SECTOR_BYTES       ((uint64_t)VIRTIO_BLK_SECTOR_BYTES)
#define DIRECT_ALIGN       4096U // fits all disks; the guest's file systems work in such blocks
#define DIRECT_ALIGN_SHIFT 3 // the same as a power of two of sectors
// A discard takes time in proportion to the extents that it frees, in one go.
#define DISCARD_SECTORS_MAX (1U << 21) // 1 GiB

#define FEATURES                                                        \
	(1ULL << VIRTIO_BLK_F_SEG_MAX | 1ULL << VIRTIO_BLK_F_BLK_SIZE | \
		1ULL << VIRTIO_BLK_F_TOPOLOGY)
#define FEATURES_WRITABLE                                            \
	(1ULL << VIRTIO_BLK_F_FLUSH | 1ULL << VIRTIO_BLK_F_DISCARD | \
		1ULL << VIRTIO_BLK_F_WRITE_ZEROES)

enum step {
	STEP_RUN, // the run itself
	STEP_READ_BELOW, // before it: the block that it is to change, from below
	// Of a flush of an overlay: the data, the map, the map's own.
	STEP_SYNC_DATA,
	STEP_WRITE_MAP,
	STEP_SYNC,
};

struct blk_req {
	struct loop_op op;
	struct blk *blk;
	struct guest_view status; // the one byte
	uint32_t type; // VIRTIO_BLK_T_*
	uint16_t queue_idx;
	uint16_t head;
	uint32_t used_bytes; // for the used ring
	bool punch; // zeroes may, or can only, be had by a hole
	uint64_t off; // on the disk; moves on with each run that is done
	uint64_t left_bytes;
	// What is under way of it: all of it, unless there is an overlay, where this is what lies
	// in one place and what one operation can do.
	struct overlay_run run;
	uint64_t run_off; // where on the disk it began
	uint64_t run_done; // bytes
	enum step step;
	struct blk_req *next; // in one of the lists of struct blk
	unsigned int iov_at, nr_iov;
	unsigned int cut_at; // the iovec that is shortened for the operation in flight,
	size_t cut_bytes; // by so much; 0: none is
	struct iovec iov[VIRTQ_CHAIN_MAX];
};

// What is under way on an overlay. Each list is linked by next, the first one first.
struct blk_changes {
	struct blk_req *writing; // their run changes the disk
	struct blk_req *waiting; // for the end of one that does
	struct blk_req *flushes; // the first one's flush is under way
	struct blk_req *copier; // of those that write, the one that copies a block up
	struct overlay_run below; // where that block comes from
	uint8_t *block; // and where it is put together
	bool flushing_map;
	const void *map; // the piece of it that is being written
};

struct blk {
	struct virtio_dev dev;
	int fd; // -1: an overlay
	int direct_fd; // -1: none
	struct overlay *overlay;
	uint64_t capacity_sectors;
	bool read_only;
	bool throwaway;
	char serial[VIRTIO_BLK_SERIAL_BYTES];
	uint8_t unused1[2]; // padding
	char *name;
	struct blk_req *reqs[VIRTIO_QUEUES_MAX]; // by head, while active
	struct loop_timer publish_timer; // the end of a turn with completions
	unsigned int publish_mask;
	bool draining;
	bool sync_failed; // outside of the guest's requests; told to its next FLUSH
	uint8_t unused2[2]; // padding
	struct rate_limit limit;
	struct loop_timer limit_timer;
	struct blk_changes changes;
	struct virtio_blk_stats stats;
	struct guest_view segs[VIRTQ_CHAIN_MAX];
};

static struct blk *blk_of(struct virtio_dev *dev)
{
	return container_of(dev, struct blk, dev);
}

static void publish_soon(struct blk *blk, unsigned int queue_idx)
{
	blk->publish_mask |= 1U << queue_idx;
	// Timers run after the turn's events: one that is overdue runs at the end of this turn.
	if (!blk->publish_timer.armed)
		loop_timer_set(blk->dev.env.loop, &blk->publish_timer, 0);
}

static void publish(struct blk *blk)
{
	loop_timer_cancel(blk->dev.env.loop, &blk->publish_timer);
	virtio_dev_publish(&blk->dev, blk->publish_mask);
	blk->publish_mask = 0;
}

static void on_publish(struct loop_timer *timer)
{
	publish(container_of(timer, struct blk, publish_timer));
}

// --- Lists of requests -------------------------------------------------------------------------

static void list_add(struct blk_req **list, struct blk_req *req)
{
	while (*list)
		list = &(*list)->next;
	req->next = NULL;
	*list = req;
}

static void list_del(struct blk_req **list, struct blk_req *req)
{
	while (*list != req)
		list = &(*list)->next;
	*list = req->next;
}

// --- Buffers -----------------------------------------------------------------------------------

// Moves the request on by what has been done of it.
static void advance(struct blk_req *req, uint64_t done)
{
	req->off += done;
	req->left_bytes -= done;
	while (done && req->iov_at < req->nr_iov) {
		struct iovec *iov = &req->iov[req->iov_at];
		size_t part = MIN(done, iov->iov_len);

		iov->iov_base = (uint8_t *)iov->iov_base + part;
		iov->iov_len -= part;
		done -= part;
		if (!iov->iov_len)
			req->iov_at++;
	}
}

// Shortens the buffers to the next bytes of them, until uncut(). Returns how many they are.
static unsigned int cut(struct blk_req *req, uint64_t bytes)
{
	unsigned int i = req->iov_at;

	if (bytes >= req->left_bytes)
		return req->nr_iov - req->iov_at;
	for (; bytes > req->iov[i].iov_len; i++)
		bytes -= req->iov[i].iov_len;
	req->cut_at = i;
	req->cut_bytes = req->iov[i].iov_len - bytes;
	req->iov[i].iov_len = bytes;
	return i + 1 - req->iov_at;
}

static void uncut(struct blk_req *req)
{
	if (req->cut_bytes)
		req->iov[req->cut_at].iov_len += req->cut_bytes;
	req->cut_bytes = 0;
}

static void read_zeros(struct blk_req *req, uint64_t bytes)
{
	unsigned int nr = cut(req, bytes);

	for (unsigned int i = req->iov_at; i < req->iov_at + nr; i++)
		memset(req->iov[i].iov_base, 0, req->iov[i].iov_len);
	guest_mem_mark_iov_dirty(req->blk->dev.env.mem, req->iov + req->iov_at, nr, bytes);
	uncut(req);
	req->blk->stats.read_bytes += bytes;
	advance(req, bytes);
}

// What the guest writes, into the block that is being copied up.
static void fill_block(struct blk_req *req)
{
	uint8_t *to = req->blk->changes.block + req->run_off % OVERLAY_BLOCK_BYTES;
	unsigned int nr;

	if (req->type != VIRTIO_BLK_T_OUT) {
		memset(to, 0, req->run.bytes);
		return;
	}
	nr = cut(req, req->run.bytes);
	for (unsigned int i = req->iov_at; i < req->iov_at + nr; i++) {
		memcpy(to, req->iov[i].iov_base, req->iov[i].iov_len);
		to += req->iov[i].iov_len;
	}
	uncut(req);
}

// --- Submission --------------------------------------------------------------------------------

static bool aligned(const struct blk_req *req)
{
	uint64_t mix = req->off;

	for (unsigned int i = req->iov_at; i < req->nr_iov; i++)
		mix |= (uintptr_t)req->iov[i].iov_base | req->iov[i].iov_len;
	return mix % DIRECT_ALIGN == 0;
}

static int fd_for(const struct blk_req *req)
{
	struct blk *blk = req->blk;

	if (blk->direct_fd < 0)
		return req->run.fd;
	if (aligned(req))
		return blk->direct_fd;
	blk->stats.buffered++;
	return blk->fd;
}

// Whether the run is not data but room: to be zeroed or given back.
static bool is_room(const struct blk_req *req)
{
	return (req->type == VIRTIO_BLK_T_DISCARD || req->type == VIRTIO_BLK_T_WRITE_ZEROES) &&
	       (!req->blk->overlay || req->run.kind == OVERLAY_ZEROS);
}

static void submit(struct blk_req *req)
{
	static const uint8_t zeros[OVERLAY_BLOCK_BYTES];
	struct blk *blk = req->blk;
	struct io_uring_sqe *sqe = loop_sqe(blk->dev.env.loop, &req->op);
	const struct overlay_run *run = &req->run;
	const uint64_t at = run->file_off + req->run_done;
	int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
	unsigned int nr;

	switch (req->step) {
	case STEP_READ_BELOW:
		io_uring_prep_read(sqe, blk->changes.below.fd, blk->changes.block + req->run_done,
			(unsigned int)(blk->changes.below.bytes - req->run_done),
			blk->changes.below.file_off + req->run_done);
		return;
	case STEP_WRITE_MAP:
		io_uring_prep_write(sqe, run->fd, (const uint8_t *)blk->changes.map + req->run_done,
			(unsigned int)MIN(run->bytes - req->run_done, GIB), at);
		return;
	case STEP_SYNC_DATA:
	case STEP_SYNC:
		// Of the file, whichever descriptor has written to it.
		io_uring_prep_fsync(sqe, run->fd, IORING_FSYNC_DATASYNC);
		return;
	case STEP_RUN:
		break;
	}
	if (is_room(req)) {
		if (!blk->overlay && req->type == VIRTIO_BLK_T_WRITE_ZEROES && !req->punch)
			mode = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;
		io_uring_prep_fallocate(
			sqe, run->fd, mode, (off_t)run->file_off, (off_t)run->bytes);
	} else if (run->kind == OVERLAY_COPY) {
		io_uring_prep_write(sqe, run->fd, blk->changes.block + req->run_done,
			OVERLAY_BLOCK_BYTES - (unsigned int)req->run_done, at);
	} else if (req->type == VIRTIO_BLK_T_WRITE_ZEROES) {
		io_uring_prep_write(
			sqe, run->fd, zeros, (unsigned int)(run->bytes - req->run_done), at);
	} else {
		nr = cut(req, run->bytes - req->run_done);
		if (req->type == VIRTIO_BLK_T_IN)
			io_uring_prep_readv(sqe, fd_for(req), req->iov + req->iov_at, nr, at);
		else
			io_uring_prep_writev(sqe, fd_for(req), req->iov + req->iov_at, nr, at);
	}
}

// --- Runs --------------------------------------------------------------------------------------

static void end(struct blk_req *req, int res);

static bool overlaps(const struct blk_req *a, const struct blk_req *b)
{
	const uint64_t block = OVERLAY_BLOCK_BYTES;

	return a->run_off / block <= (b->run_off + b->run.bytes - 1) / block &&
	       b->run_off / block <= (a->run_off + a->run.bytes - 1) / block;
}

// Who copies a block up writes what others are to leave alone meanwhile.
static bool has_to_wait(const struct blk_req *req)
{
	const struct blk *blk = req->blk;

	if (blk->changes.copier &&
		(req->run.kind == OVERLAY_COPY || overlaps(req, blk->changes.copier)))
		return true;
	if (req->run.kind != OVERLAY_COPY)
		return false;
	for (const struct blk_req *other = blk->changes.writing; other; other = other->next)
		if (overlaps(req, other))
			return true;
	return false;
}

// Starts the next run of a request that changes an overlay. True if it was done at once.
static bool start_change(struct blk_req *req)
{
	struct blk *blk = req->blk;
	const uint64_t in_block = req->off % OVERLAY_BLOCK_BYTES;
	const bool data = req->type == VIRTIO_BLK_T_OUT;
	const bool whole = !data && !in_block && req->left_bytes >= OVERLAY_BLOCK_BYTES;
	uint64_t len = req->left_bytes;
	int r;

	if (!data)
		len = whole ? ALIGN_DOWN(len, OVERLAY_BLOCK_BYTES)
			    : MIN(len, OVERLAY_BLOCK_BYTES - in_block);
	req->run = (struct overlay_run){OVERLAY_ZEROS, -1, 0, len};
	if (!whole) {
		r = overlay_write(blk->overlay, req->off, len, &req->run);
		if (r < 0) {
			end(req, r);
			return false;
		}
	}
	if (has_to_wait(req)) {
		if (!whole)
			overlay_wrote(blk->overlay, req->run.kind, req->off, req->run.bytes, false);
		list_add(&blk->changes.waiting, req);
		return false;
	}
	// If there is no room to be given back, that was all.
	if (whole && !overlay_zero(blk->overlay, req->off, len, &req->run)) {
		advance(req, len);
		return true;
	}
	list_add(&blk->changes.writing, req);
	if (req->run.kind == OVERLAY_COPY) {
		blk->changes.copier = req;
		blk->stats.copied++;
		memset(blk->changes.block, 0, OVERLAY_BLOCK_BYTES);
		overlay_read(blk->overlay, req->off - in_block, OVERLAY_BLOCK_BYTES,
			&blk->changes.below);
		if (blk->changes.below.kind == OVERLAY_FILE)
			req->step = STEP_READ_BELOW;
		else
			fill_block(req);
	}
	submit(req);
	return false;
}

// Starts the next run, or ends the request.
static void go_on(struct blk_req *req)
{
	struct blk *blk = req->blk;

	// Each turn moves the request on.
	while (req->left_bytes) {
		req->step = STEP_RUN;
		req->run_off = req->off;
		req->run_done = 0;
		if (!blk->overlay) {
			req->run = (struct overlay_run){
				OVERLAY_FILE, blk->fd, req->off, req->left_bytes};
			submit(req);
			return;
		}
		if (req->type != VIRTIO_BLK_T_IN) {
			if (start_change(req))
				continue;
			return;
		}
		overlay_read(blk->overlay, req->off, req->left_bytes, &req->run);
		if (req->run.kind == OVERLAY_FILE) {
			submit(req);
			return;
		}
		read_zeros(req, req->run.bytes);
	}
	end(req, 0);
}

static void end_run(struct blk_req *req, bool good)
{
	struct blk *blk = req->blk;
	struct blk_req *waiting = blk->changes.waiting;

	if (!blk->overlay || req->type == VIRTIO_BLK_T_IN)
		return;
	list_del(&blk->changes.writing, req);
	if (blk->changes.copier == req)
		blk->changes.copier = NULL;
	if (!is_room(req))
		overlay_wrote(blk->overlay, req->run.kind, req->run_off, req->run.bytes, good);
	// Each looks again; whoever has to wait still, waits again.
	blk->changes.waiting = NULL;
	while (waiting) {
		struct blk_req *next = waiting->next;

		go_on(waiting);
		waiting = next;
	}
}

// --- Flush -------------------------------------------------------------------------------------

static void begin_flush(struct blk_req *req)
{
	struct blk *blk = req->blk;

	req->run = (struct overlay_run){.fd = blk->fd};
	req->step = STEP_SYNC;
	if (blk->overlay) {
		req->run.fd = overlay_top_fd(blk->overlay);
		blk->changes.flushing_map = overlay_flush_begin(blk->overlay);
		if (blk->changes.flushing_map)
			req->step = STEP_SYNC_DATA;
	}
	submit(req);
}

static void start_flush(struct blk_req *req)
{
	struct blk *blk = req->blk;

	if (blk->overlay && blk->throwaway) {
		end(req, 0);
		return;
	}
	// One at a time on an overlay, for each has a map to write.
	if (blk->overlay) {
		list_add(&blk->changes.flushes, req);
		if (blk->changes.flushes != req)
			return;
	}
	begin_flush(req);
}

static void end_flush(struct blk_req *req, int res)
{
	struct blk *blk = req->blk;
	struct blk_req *next = NULL;

	if (blk->sync_failed && res >= 0)
		res = -EIO;
	blk->sync_failed = false;
	if (blk->overlay) {
		if (blk->changes.flushing_map)
			overlay_flush_end(blk->overlay, res >= 0);
		blk->changes.flushing_map = false;
		next = req->next;
		blk->changes.flushes = next;
	}
	end(req, res);
	if (next)
		begin_flush(next);
}

static void flush_done(struct blk_req *req, int res)
{
	struct blk *blk = req->blk;

	if (res < 0 || req->step == STEP_SYNC) {
		end_flush(req, res);
		return;
	}
	if (req->step == STEP_WRITE_MAP) {
		if (res == 0) {
			end_flush(req, -EIO);
			return;
		}
		req->run_done += (uint64_t)res;
	}
	if (req->run_done == req->run.bytes) {
		req->run_done = 0;
		req->step = overlay_flush_next(blk->overlay, &blk->changes.map, &req->run.bytes,
				    &req->run.file_off)
				    ? STEP_WRITE_MAP
				    : STEP_SYNC;
	}
	submit(req);
}

// --- Completion --------------------------------------------------------------------------------

static void finish(struct blk_req *req, uint8_t status)
{
	struct blk *blk = req->blk;

	if (status != VIRTIO_BLK_S_OK)
		blk->stats.errors++;
	guest_view_write(&req->status, 0, &status, 1);
	virtq_push(&blk->dev.queues[req->queue_idx], req->head, req->used_bytes);
	publish_soon(blk, req->queue_idx);
}

static uint8_t status_of(const struct blk_req *req, int res)
{
	if (res == -EOPNOTSUPP)
		return VIRTIO_BLK_S_UNSUPP;
	// Reading or writing nothing although there was something left: the file has shrunk.
	return res < 0 || req->left_bytes ? VIRTIO_BLK_S_IOERR : VIRTIO_BLK_S_OK;
}

// The end of a request that was in flight.
static void end(struct blk_req *req, int res)
{
	struct blk *blk = req->blk;
	uint8_t status = status_of(req, res);

	blk->stats.in_flight--;
	if (status == VIRTIO_BLK_S_IOERR)
		log_guest("blk", "%s: request of type %u at byte %llu: %s", blk->name, req->type,
			(unsigned long long)req->off, res < 0 ? strerror(-res) : "end of file");
	finish(req, status);
	if (blk->draining && !blk->stats.in_flight) {
		blk->draining = false;
		publish(blk);
		virtio_dev_drained(&blk->dev);
	}
}

static void end_bad(struct blk_req *req, int res)
{
	end_run(req, false);
	end(req, res);
}

static void below_done(struct blk_req *req, int res)
{
	struct blk *blk = req->blk;

	if (res <= 0) {
		end_bad(req, res < 0 ? res : -EIO);
		return;
	}
	req->run_done += (uint64_t)res;
	if (req->run_done == blk->changes.below.bytes) {
		req->run_done = 0;
		req->step = STEP_RUN;
		fill_block(req);
	}
	submit(req);
}

static void run_done(struct blk_req *req, int res)
{
	struct blk *blk = req->blk;
	const struct overlay_run *run = &req->run;
	const uint64_t all = run->kind == OVERLAY_COPY ? OVERLAY_BLOCK_BYTES : run->bytes;
	uint64_t done = res > 0 ? (uint64_t)res : 0;

	if (is_room(req)) {
		if (!blk->overlay && res == -EOPNOTSUPP && req->type == VIRTIO_BLK_T_WRITE_ZEROES &&
			!req->punch) {
			req->punch = true;
			submit(req);
			return;
		}
		// In an overlay it is the map that says zeros: all that is lost is the room.
		if (res == 0 || blk->overlay)
			done = run->bytes; // fallocate() does all or nothing
	}
	if (!done) {
		end_bad(req, res);
		return;
	}
	ASSERT(done <= all - req->run_done);
	req->run_done += done;
	if (req->type == VIRTIO_BLK_T_IN) {
		guest_mem_mark_iov_dirty(
			blk->dev.env.mem, req->iov + req->iov_at, req->nr_iov - req->iov_at, done);
		blk->stats.read_bytes += done;
	} else if (!is_room(req)) {
		blk->stats.written_bytes += done;
	}
	if (run->kind != OVERLAY_COPY)
		advance(req, done);
	else if (req->run_done == all)
		advance(req, run->bytes);
	if (req->run_done < all) {
		blk->stats.continued++;
		submit(req);
		return;
	}
	end_run(req, true);
	go_on(req);
}

static void on_done(struct loop_op *op, int res)
{
	struct blk_req *req = container_of(op, struct blk_req, op);

	uncut(req);
	if (res == -EAGAIN || res == -EINTR)
		submit(req);
	else if (req->type == VIRTIO_BLK_T_FLUSH)
		flush_done(req, res);
	else if (req->step == STEP_READ_BELOW)
		below_done(req, res);
	else
		run_done(req, res);
}

// --- Requests ----------------------------------------------------------------------------------

// Whether [sector, sector + bytes) is on the disk.
static bool on_disk(const struct blk *blk, uint64_t sector, uint64_t bytes)
{
	return bytes % SECTOR_BYTES == 0 && sector <= blk->capacity_sectors &&
	       bytes / SECTOR_BYTES <= blk->capacity_sectors - sector;
}

// Neighbours in guest memory become one: the guest's pages often are.
static void join(struct blk_req *req, const struct guest_view *seg, size_t off, size_t len)
{
	struct iovec *last = req->nr_iov ? &req->iov[req->nr_iov - 1] : NULL;

	if (last && (uint8_t *)last->iov_base + last->iov_len == seg->hva + off) {
		last->iov_len += len;
		return;
	}
	ASSERT(req->nr_iov < ARRAY_SIZE(req->iov));
	req->iov[req->nr_iov++] = (struct iovec){.iov_base = seg->hva + off, .iov_len = len};
}

// The data of a read or a write: [off, off + len) of the chain's writable or readable part.
static void take_data(
	struct blk_req *req, const struct virtq_chain *chain, bool writable, size_t off, size_t len)
{
	const struct guest_view *seg = chain->segs + (writable ? chain->nr_readable : 0);

	for (; len; seg++) {
		size_t part;

		if (off >= seg->len_bytes) {
			off -= seg->len_bytes;
			continue;
		}
		part = MIN(seg->len_bytes - off, len);
		join(req, seg, off, part);
		len -= part;
		off = 0;
	}
}

static uint8_t start_rw(struct blk_req *req, const struct virtq_chain *chain, uint64_t sector)
{
	struct blk *blk = req->blk;
	const bool in = req->type == VIRTIO_BLK_T_IN;
	const size_t len = in ? chain->writable_bytes - 1
			      : chain->readable_bytes - sizeof(struct virtio_blk_outhdr);

	if (!len || !on_disk(blk, sector, len) || (!in && blk->read_only))
		return VIRTIO_BLK_S_IOERR;
	take_data(req, chain, in, in ? 0 : sizeof(struct virtio_blk_outhdr), len);
	req->off = sector * SECTOR_BYTES;
	req->left_bytes = len;
	if (in) {
		req->used_bytes = chain->writable_bytes;
		blk->stats.reads++;
	} else {
		blk->stats.writes++;
	}
	return VIRTIO_BLK_S_OK;
}

static uint8_t start_discard(struct blk_req *req, const struct virtq_chain *chain)
{
	struct blk *blk = req->blk;
	const bool zeroes = req->type == VIRTIO_BLK_T_WRITE_ZEROES;
	struct virtio_blk_discard_write_zeroes range;
	uint64_t sector;
	uint32_t sectors, flags;

	// We have asked for one range at a time.
	if (chain->readable_bytes != sizeof(struct virtio_blk_outhdr) + sizeof(range))
		return VIRTIO_BLK_S_IOERR;
	virtq_chain_read(chain, sizeof(struct virtio_blk_outhdr), &range, sizeof(range));
	sector = le64toh(range.sector);
	sectors = le32toh(range.num_sectors);
	flags = le32toh(range.flags);
	// 5.2.6.2: flags that are not known, and unmap with a discard, are not supported.
	if (flags & ~(zeroes ? (uint32_t)VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP : 0))
		return VIRTIO_BLK_S_UNSUPP;
	if (blk->read_only || !sectors || sectors > DISCARD_SECTORS_MAX ||
		!on_disk(blk, sector, sectors * SECTOR_BYTES))
		return VIRTIO_BLK_S_IOERR;
	req->off = sector * SECTOR_BYTES;
	req->left_bytes = sectors * SECTOR_BYTES;
	req->punch = flags;
	blk->stats.discards++;
	if (blk->overlay && !zeroes) {
		// Whole blocks alone: of the rest the guest has no use, and we no gain.
		const uint64_t cut_bytes = MIN(-req->off % OVERLAY_BLOCK_BYTES, req->left_bytes);

		req->off += cut_bytes;
		req->left_bytes = ALIGN_DOWN(req->left_bytes - cut_bytes, OVERLAY_BLOCK_BYTES);
	}
	return VIRTIO_BLK_S_OK;
}

static uint8_t get_id(const struct blk *blk, struct blk_req *req, const struct virtq_chain *chain)
{
	size_t room = chain->writable_bytes - 1;

	virtq_chain_write(chain, 0, blk->serial, MIN(room, sizeof(blk->serial)));
	req->used_bytes = chain->writable_bytes;
	return VIRTIO_BLK_S_OK;
}

// Fills the request. True if it is to be submitted; otherwise *ret_status is its end.
static bool start(struct blk_req *req, const struct virtq_chain *chain, uint8_t *ret_status)
{
	struct blk *blk = req->blk;
	struct virtio_blk_outhdr hdr;

	virtq_chain_read(chain, 0, &hdr, sizeof(hdr));
	req->type = le32toh(hdr.type);
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
	case VIRTIO_BLK_T_OUT:
		*ret_status = start_rw(req, chain, le64toh(hdr.sector));
		return *ret_status == VIRTIO_BLK_S_OK;
	case VIRTIO_BLK_T_FLUSH:
		blk->stats.flushes++;
		return true;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		*ret_status = start_discard(req, chain);
		return *ret_status == VIRTIO_BLK_S_OK;
	case VIRTIO_BLK_T_GET_ID:
		*ret_status = get_id(blk, req, chain);
		return false;
	default:
		*ret_status = VIRTIO_BLK_S_UNSUPP;
		return false;
	}
}

// -EPROTO where there is no room for a status.
static int take_request(struct blk *blk, unsigned int queue_idx, const struct virtq_chain *chain)
{
	struct blk_req *req = &blk->reqs[queue_idx][chain->head];
	const struct guest_view *last;
	uint8_t status = VIRTIO_BLK_S_OK;
	bool good;

	if (!chain->nr_writable || chain->readable_bytes < sizeof(struct virtio_blk_outhdr))
		return -EPROTO;
	last = &chain->segs[chain->nr_readable + chain->nr_writable - 1];
	// A free one holds nothing of worth; the iovecs are not cleared.
	req->op.done = on_done;
	req->blk = blk;
	req->queue_idx = (uint16_t)queue_idx;
	req->head = chain->head;
	req->status = *last;
	req->status.hva += last->len_bytes - 1;
	req->status.len_bytes = 1;
	req->used_bytes = 1;
	req->punch = false;
	req->off = req->left_bytes = 0;
	req->iov_at = req->nr_iov = 0;
	req->cut_bytes = 0;
	req->run_done = 0;
	good = start(req, chain, &status);
	if (rate_limit_any(&blk->limit))
		rate_limit_take(&blk->limit, req->nr_iov ? req->left_bytes : 0, now_ns());
	if (!good) {
		finish(req, status);
		return 0;
	}
	blk->stats.in_flight++;
	if (req->type == VIRTIO_BLK_T_FLUSH)
		start_flush(req);
	else
		go_on(req);
	return 0;
}

static void on_limit(struct loop_timer *timer)
{
	struct blk *blk = container_of(timer, struct blk, limit_timer);

	for (unsigned int i = 0; i < blk->dev.nr_queues; i++)
		virtio_dev_notify_again(&blk->dev, i);
}

// Whether the next request has to wait; then all queues are looked at when it may go.
static bool is_limited(struct blk *blk)
{
	uint64_t at = rate_limit_any(&blk->limit) ? rate_limit_wait_ns(&blk->limit, now_ns()) : 0;

	if (at)
		loop_timer_set(blk->dev.env.loop, &blk->limit_timer, at);
	return at != 0;
}

static void blk_queue_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct blk *blk = blk_of(dev);
	struct virtq *q = &dev->queues[queue_idx];
	struct virtq_chain chain = {.segs = blk->segs};
	int r;

	if (!blk->reqs[queue_idx])
		return;
	// What the queue can hold is what there can be, for a request is not given back here
	// unless it is one that costs nothing; but those are bounded as well.
	for (unsigned int i = 0; i < 2 * QUEUE_SIZE; i++) {
		if (is_limited(blk))
			return;
		r = virtq_pop(q, &chain);
		if (r == 0 && virtq_wait(q))
			continue;
		if (r == 0)
			return;
		if (r < 0 || take_request(blk, queue_idx, &chain) < 0) {
			publish(blk);
			virtio_dev_set_needs_reset(dev, "bad request");
			return;
		}
	}
	// The rest in the next turn, with what the guest adds meanwhile.
	virtio_dev_notify_again(dev, queue_idx);
}

// --- The device ------------------------------------------------------------------------------

static void blk_activate(struct virtio_dev *dev)
{
	struct blk *blk = blk_of(dev);

	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		if (!virtq_ready(&dev->queues[i]))
			continue;
		// Touched as far as they are used.
		blk->reqs[i] = calloc(dev->queues[i].saved.size, sizeof(struct blk_req));
		if (!blk->reqs[i]) {
			virtio_dev_set_needs_reset(dev, "the host has no memory for its requests");
			return;
		}
	}
}

static bool blk_drain(struct virtio_dev *dev)
{
	struct blk *blk = blk_of(dev);

	publish(blk);
	blk->draining = blk->stats.in_flight > 0;
	return !blk->draining;
}

static void blk_reset(struct virtio_dev *dev)
{
	struct blk *blk = blk_of(dev);

	ASSERT(!blk->stats.in_flight);
	loop_timer_cancel(dev->env.loop, &blk->publish_timer);
	loop_timer_cancel(dev->env.loop, &blk->limit_timer);
	blk->publish_mask = 0;
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		free(blk->reqs[i]);
		blk->reqs[i] = NULL;
	}
}

static void blk_free(struct blk *blk)
{
	fd_close(&blk->direct_fd);
	fd_close(&blk->fd);
	overlay_close(blk->overlay);
	free(blk->changes.block);
	free(blk->name);
	free(blk);
}

static void blk_destroy(struct virtio_dev *dev)
{
	struct blk *blk = blk_of(dev);

	// The kernel may still write to the guest's memory: that has to end first.
	while (blk->stats.in_flight) {
		int r = loop_turn(dev->env.loop, UINT64_MAX, NULL);

		ASSERT(r == 0);
	}
	blk_reset(dev);
	virtio_dev_fini(dev);
	blk_free(blk);
}

#define OF_THIS_MONITOR "of this monitor"
#define NOTHING_FLIES   "nothing is in flight when it is saved"

STATE_TABLE(static, blk_state, struct blk, "blk", NULL,
	STATE_NESTED(struct blk, dev, &virtio_dev_state),
	STATE_FIXED_U64(struct blk, capacity_sectors), STATE_FIXED_BOOL(struct blk, read_only),
	STATE_FIXED_BYTES(struct blk, serial), STATE_TRANSIENT(struct blk, fd, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct blk, direct_fd, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct blk, overlay, "its layers are saved as files"),
	STATE_TRANSIENT(struct blk, throwaway, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct blk, name, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct blk, reqs, NOTHING_FLIES),
	STATE_TRANSIENT(struct blk, publish_timer, NOTHING_FLIES),
	STATE_TRANSIENT(struct blk, publish_mask, NOTHING_FLIES),
	STATE_TRANSIENT(struct blk, draining, NOTHING_FLIES),
	STATE_TRANSIENT(struct blk, sync_failed, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct blk, limit, "as configured; a tenth of a second is forgotten"),
	STATE_TRANSIENT(struct blk, limit_timer, "whatever waits is looked at after a restore"),
	STATE_TRANSIENT(struct blk, changes, NOTHING_FLIES),
	STATE_TRANSIENT(struct blk, unused1, "padding"),
	STATE_TRANSIENT(struct blk, unused2, "padding"),
	STATE_TRANSIENT(struct blk, stats, "counted anew"),
	STATE_TRANSIENT(struct blk, segs, "of the chain at hand"));

static const struct virtio_ops blk_ops = {
	.name = "blk",
	.device_id = VIRTIO_ID_BLOCK,
	.activate = blk_activate,
	.queue_notify = blk_queue_notify,
	.drain = blk_drain,
	.state = &blk_state,
	.reset = blk_reset,
	.destroy = blk_destroy,
};

void virtio_blk_get_stats(struct virtio_dev *dev, struct virtio_blk_stats *ret_stats)
{
	*ret_stats = blk_of(dev)->stats;
}

struct overlay *virtio_blk_overlay(struct virtio_dev *dev)
{
	return blk_of(dev)->overlay;
}

void virtio_blk_sync_failed(struct virtio_dev *dev)
{
	blk_of(dev)->sync_failed = true;
}

// A second description of the same file, past the cache. -1 where that cannot be had.
static int open_direct(int fd, bool read_only)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_DIRECT);
}

static int open_file(struct blk *blk, const struct virtio_blk_params *params, struct err *err)
{
	off_t bytes;

	if (params->overlay) {
		blk->capacity_sectors = overlay_disk_bytes(params->overlay) / SECTOR_BYTES;
		blk->changes.block = aligned_alloc(OVERLAY_BLOCK_BYTES, OVERLAY_BLOCK_BYTES);
		return blk->changes.block ? 0 : err_errno(err, -ENOMEM, "%s", params->name);
	}
	if (flock(params->fd, (params->read_only ? LOCK_SH : LOCK_EX) | LOCK_NB) < 0)
		return errno == EWOULDBLOCK
			       ? err_set(err, -EBUSY, "%s: in use by another machine", params->name)
			       : err_errno(err, -errno, "%s: lock", params->name);
	bytes = lseek(params->fd, 0, SEEK_END);
	if (bytes < 0)
		return err_errno(err, -errno, "%s", params->name);
	if ((uint64_t)bytes < SECTOR_BYTES)
		return err_set(err, -EINVAL, "%s: too small for a disk (%lld bytes)", params->name,
			(long long)bytes);
	blk->capacity_sectors = (uint64_t)bytes / SECTOR_BYTES;
	if (params->direct)
		blk->direct_fd = open_direct(params->fd, params->read_only);
	return 0;
}

int virtio_blk_create(struct virtio_dev **ret_dev, const struct virtio_blk_params *params,
	const struct virtio_env *env, struct err *err)
{
	struct virtio_blk_config config = {0};
	struct virtio_dev_params dev_params = {
		.features = FEATURES |
			    (params->read_only ? 1ULL << VIRTIO_BLK_F_RO : FEATURES_WRITABLE) |
			    (params->nr_queues > 1 ? 1ULL << VIRTIO_BLK_F_MQ : 0),
		.nr_queues = params->nr_queues,
		.queue_size_max = QUEUE_SIZE,
		.config = &config,
		.config_bytes = sizeof(config),
	};
	struct blk *blk = calloc(1, sizeof(*blk));
	int r;

	if (!blk)
		return err_errno(err, -ENOMEM, "%s", params->name);
	blk->fd = blk->direct_fd = -1;
	blk->read_only = params->read_only;
	blk->throwaway = params->throwaway;
	blk->limit = params->limit;
	blk->publish_timer.fire = on_publish;
	blk->limit_timer.fire = on_limit;
	// Padded by zeros; no end is needed where all bytes are in use.
	memcpy(blk->serial, params->serial, strnlen(params->serial, sizeof(blk->serial)));
	blk->name = strdup(params->name);
	if (!blk->name) {
		r = err_errno(err, -ENOMEM, "%s", params->name);
		goto fail;
	}
	r = open_file(blk, params, err);
	if (r < 0)
		goto fail;
	config.capacity = htole64(blk->capacity_sectors);
	config.seg_max = htole32(SEG_MAX);
	config.blk_size = htole32(VIRTIO_BLK_SECTOR_BYTES);
	config.physical_block_exp = DIRECT_ALIGN_SHIFT;
	config.num_queues = htole16((uint16_t)params->nr_queues);
	config.max_discard_sectors = config.max_write_zeroes_sectors = htole32(DISCARD_SECTORS_MAX);
	config.max_discard_seg = config.max_write_zeroes_seg = htole32(1);
	config.discard_sector_alignment = htole32(1U << DIRECT_ALIGN_SHIFT);
	config.write_zeroes_may_unmap = 1;
	r = virtio_dev_init(&blk->dev, &blk_ops, env, &dev_params, err);
	if (r < 0)
		goto fail;
	blk->overlay = params->overlay;
	if (!blk->overlay)
		blk->fd = params->fd;
	*ret_dev = &blk->dev;
	return 0;
fail:
	blk_free(blk);
	return r;
}
