// SPDX-License-Identifier: Apache-2.0
// The device's half of a split virtqueue (virtio 1.2, 2.7), with EVENT_IDX and indirect
// descriptors.
//
// The ring lies in guest memory and the guest writes to it while we read. So each descriptor is
// copied once, the copy is checked, and only the copy is used; our positions in the rings are our
// own and never read back. What a driver may not do (a head or a next out of range, a loop, a
// buffer outside of RAM, a head that is in flight already, ...) gives -EPROTO, once and for ever:
// the owner then reports DEVICE_NEEDS_RESET. Loop thread only.
#ifndef MAYFLY_DEVICES_VIRTQUEUE_H
#define MAYFLY_DEVICES_VIRTQUEUE_H

#include "vmm/base/state.h"
#include "vmm/guest_mem.h"

#define VIRTQ_SIZE_MAX  256U
#define VIRTQ_CHAIN_MAX 256U // descriptors in a chain, those of an indirect table included

struct virtq {
	struct {
		uint16_t size; // power of two, <= VIRTQ_SIZE_MAX; 0 while the queue is not in use
		uint16_t next_avail; // the next entry of the available ring that we take
		uint16_t next_used; // the next entry of the used ring that we fill
		uint16_t published_used; // what the driver sees as the used index
	} saved;
	// Made at activation from the transport's registers.
	const struct guest_mem *mem;
	struct guest_view desc, avail, used;
	bool event_idx, indirect;
	bool broken;
	uint8_t unused[1]; // padding
	uint32_t nr_in_flight; // popped and not yet pushed; at most size
	uint64_t in_flight[VIRTQ_SIZE_MAX / 64]; // a bit a head
};

extern const struct state_table virtq_state;

struct virtq_config {
	uint32_t size;
	gpa_t desc, avail, used;
	bool event_idx, indirect; // as negotiated
};

// Puts a queue into use, with empty rings. -EINVAL for a size that is not a power of two or above
// size_max, for a misaligned address, or for a ring that is not wholly in RAM; then the queue
// stays out of use.
int virtq_activate(struct virtq *q, const struct virtq_config *config, uint32_t size_max,
	const struct guest_mem *mem);

// Where an active queue that has been restored goes on. What is popped and not pushed yet was
// popped by nobody: see virtq_hold().
void virtq_continue(
	struct virtq *q, uint16_t next_avail, uint16_t next_used, uint16_t published_used);

// Makes head one that is in flight, as it was when it was saved. -EINVAL if it cannot have been.
int virtq_hold(struct virtq *q, uint16_t head);

// Out of use; nothing in guest memory is touched. Accepts a zeroed queue.
void virtq_deactivate(struct virtq *q);

static inline bool virtq_ready(const struct virtq *q)
{
	return q->saved.size != 0;
}

// A chain of buffers: first those that the device reads, then those that it writes. Buffers of
// length 0 are left out. The views stay valid for as long as guest memory exists.
struct virtq_chain {
	struct guest_view *segs; // room for VIRTQ_CHAIN_MAX, the caller's
	uint16_t head;
	uint16_t nr_readable;
	uint16_t nr_writable;
	uint32_t readable_bytes;
	uint32_t writable_bytes;
};

// Takes the next chain; ret_chain->segs is set by the caller. Returns 1, 0 when there is none (or
// the queue is not in use), or -EPROTO.
int virtq_pop(struct virtq *q, struct virtq_chain *ret_chain);

// Gives the latest popped chain back, as if it had not been popped. Several in reverse order.
void virtq_unpop(struct virtq *q, uint16_t head);

// Returns a chain to the driver, with written_bytes of its writable part filled. The driver sees
// it after virtq_publish() only, so that many cost one interrupt.
void virtq_push(struct virtq *q, uint16_t head, uint32_t written_bytes);

// Shows the driver what was pushed. True if it wants an interrupt for that.
bool virtq_publish(struct virtq *q);

// Asks the driver to notify us of the next chain; to be called before waiting for one. True if
// there is one already, or the queue is broken: then pop again instead of waiting.
bool virtq_wait(struct virtq *q);

// Asks the driver to notify us when it adds a chain, whatever waits already, and returns the index
// that is to move then; virtq_avail_idx() tells whether it has. The queue is in use.
uint16_t virtq_wait_for_more(struct virtq *q);
uint16_t virtq_avail_idx(const struct virtq *q);

// Copies from the readable part, at off, as much as there is of len bytes; returns how much.
size_t virtq_chain_read(const struct virtq_chain *chain, size_t off, void *dst, size_t len);

// The same to the writable part.
size_t virtq_chain_write(const struct virtq_chain *chain, size_t off, const void *src, size_t len);

// Describes [off, off + len) of the readable or writable part for readv() and the like, as far as
// it exists and fits into max_iov entries. Returns the number of entries and their sum. After I/O
// into a writable part, virtq_chain_mark_dirty().
unsigned int virtq_chain_iov(const struct virtq_chain *chain, bool writable, size_t off, size_t len,
	struct iovec *iov, unsigned int max_iov, size_t *ret_bytes);
void virtq_chain_mark_dirty(const struct virtq_chain *chain, size_t off, size_t len);

#endif
