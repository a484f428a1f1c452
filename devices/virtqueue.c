// SPDX-License-Identifier: Apache-2.0
// Split virtqueue, device side; see the header. Loop thread.
#include "devices/virtqueue.h"

#include <errno.h>
#include <linux/virtio_ring.h>

// Layout of the rings (2.7.6, 2.7.8): two little-endian 16-bit fields, the ring, and the other
// side's event index behind it.
#define RING_FLAGS 0
#define RING_IDX   2
#define RING_ARRAY 4

#define AVAIL_ELEM_BYTES 2U
#define USED_ELEM_BYTES  8U
#define DESC_BYTES       16U

struct desc {
	uint64_t addr;
	uint32_t len;
	uint16_t flags;
	uint16_t next;
};

#define FROM_REGISTERS "made from the transport's registers"

STATE_TABLE(, virtq_state, struct virtq, "virtq", NULL, STATE_U16(struct virtq, saved.next_avail),
	STATE_U16(struct virtq, saved.next_used), STATE_U16(struct virtq, saved.published_used),
	STATE_TRANSIENT(struct virtq, saved.size, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, mem, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, desc, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, avail, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, used, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, event_idx, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, indirect, FROM_REGISTERS),
	STATE_TRANSIENT(struct virtq, unused, "padding"),
	STATE_TRANSIENT(struct virtq, broken, "the device needs a reset then, which is saved"),
	STATE_TRANSIENT(struct virtq, nr_in_flight, "a device says what it holds: virtq_hold()"),
	STATE_TRANSIENT(struct virtq, in_flight, "a device says what it holds: virtq_hold()"));

static size_t used_event_off(const struct virtq *q)
{
	return RING_ARRAY + (size_t)q->saved.size * AVAIL_ELEM_BYTES;
}

static size_t avail_event_off(const struct virtq *q)
{
	return RING_ARRAY + (size_t)q->saved.size * USED_ELEM_BYTES;
}

int virtq_activate(struct virtq *q, const struct virtq_config *config, uint32_t size_max,
	const struct guest_mem *mem)
{
	uint32_t size = config->size;
	struct guest_view desc, avail, used;

	ASSERT(size_max <= VIRTQ_SIZE_MAX);
	if (size == 0 || size > size_max || (size & (size - 1)))
		return -EINVAL;
	if (config->desc.v % VRING_DESC_ALIGN_SIZE || config->avail.v % VRING_AVAIL_ALIGN_SIZE ||
		config->used.v % VRING_USED_ALIGN_SIZE)
		return -EINVAL;
	if (guest_mem_view(mem, config->desc, (size_t)size * DESC_BYTES, &desc) < 0 ||
		guest_mem_view(mem, config->avail,
			RING_ARRAY + (size_t)size * AVAIL_ELEM_BYTES + sizeof(uint16_t),
			&avail) < 0 ||
		guest_mem_view(mem, config->used,
			RING_ARRAY + (size_t)size * USED_ELEM_BYTES + sizeof(uint16_t), &used) < 0)
		return -EINVAL;
	*q = (struct virtq){
		.saved.size = (uint16_t)size,
		.mem = mem,
		.desc = desc,
		.avail = avail,
		.used = used,
		.event_idx = config->event_idx,
		.indirect = config->indirect,
	};
	return 0;
}

void virtq_deactivate(struct virtq *q)
{
	*q = (struct virtq){0};
}

void virtq_continue(
	struct virtq *q, uint16_t next_avail, uint16_t next_used, uint16_t published_used)
{
	q->saved.next_avail = next_avail;
	q->saved.next_used = next_used;
	q->saved.published_used = published_used;
}

int virtq_hold(struct virtq *q, uint16_t head)
{
	if (head >= q->saved.size || (q->in_flight[head / 64] & 1ULL << head % 64))
		return -EINVAL;
	q->in_flight[head / 64] |= 1ULL << head % 64;
	q->nr_in_flight++;
	return 0;
}

static int broken(struct virtq *q)
{
	q->broken = true;
	return -EPROTO;
}

// The one read of a descriptor.
static void copy_desc(const struct guest_view *table, uint32_t idx, struct desc *ret_desc)
{
	uint8_t raw[DESC_BYTES];

	guest_view_read(table, (size_t)idx * DESC_BYTES, raw, sizeof(raw));
	// Without this the compiler might read a field from the guest's memory a second time
	// rather than from the copy.
	__asm__ volatile("" : "+m"(raw));
	ret_desc->addr = get_le64(raw);
	ret_desc->len = get_le32(raw + 8);
	ret_desc->flags = get_le16(raw + 12);
	ret_desc->next = get_le16(raw + 14);
}

static int add_seg(const struct virtq *q, struct virtq_chain *chain, const struct desc *desc)
{
	bool writable = desc->flags & VRING_DESC_F_WRITE;
	uint32_t *bytes = writable ? &chain->writable_bytes : &chain->readable_bytes;
	unsigned int at = chain->nr_readable + chain->nr_writable;
	uint32_t total;

	// 2.7.4.2: the writable ones come after all of the readable ones.
	if (!writable && chain->nr_writable)
		return -EPROTO;
	if (desc->len == 0)
		return 0;
	// 2.7.5.2: no chain is longer than 2^32 bytes.
	if (__builtin_add_overflow(
		    chain->readable_bytes + chain->writable_bytes, desc->len, &total))
		return -EPROTO;
	ASSERT(at < VIRTQ_CHAIN_MAX);
	if (guest_mem_view(q->mem, GPA(desc->addr), desc->len, &chain->segs[at]) < 0)
		return -EPROTO;
	*bytes += desc->len;
	if (writable)
		chain->nr_writable++;
	else
		chain->nr_readable++;
	return 0;
}

static int walk(const struct virtq *q, struct virtq_chain *chain)
{
	struct guest_view table = q->desc;
	uint32_t nr_entries = q->saved.size, idx = chain->head;
	uint32_t ttl = q->saved.size; // descriptors that may still come: ends loops
	bool in_indirect = false;

	for (;;) {
		struct desc desc;

		if (idx >= nr_entries || ttl-- == 0)
			return -EPROTO;
		copy_desc(&table, idx, &desc);
		if (desc.flags & VRING_DESC_F_INDIRECT) {
			// 2.7.5.3: at the end of a chain of plain descriptors, not nested, and
			// VRING_DESC_F_WRITE on it means nothing.
			if (!q->indirect || in_indirect || (desc.flags & VRING_DESC_F_NEXT) ||
				desc.len == 0 || desc.len % DESC_BYTES ||
				guest_mem_view(q->mem, GPA(desc.addr), desc.len, &table) < 0)
				return -EPROTO;
			in_indirect = true;
			nr_entries = desc.len / DESC_BYTES;
			idx = 0;
			// The specification bounds the whole chain by the queue's size, but Linux
			// keeps to the device's own limit here (seg_max and the like).
			ttl = VIRTQ_CHAIN_MAX - chain->nr_readable - chain->nr_writable;
			continue;
		}
		if (add_seg(q, chain, &desc) < 0)
			return -EPROTO;
		if (!(desc.flags & VRING_DESC_F_NEXT))
			return 0;
		idx = desc.next;
	}
}

int virtq_pop(struct virtq *q, struct virtq_chain *ret_chain)
{
	uint16_t avail_idx, head, waiting;
	uint64_t *word;

	if (!virtq_ready(q))
		return 0;
	if (q->broken)
		return -EPROTO;
	// Acquire: pairs with the driver's write barrier between filling descriptors and ring, and
	// moving the index.
	avail_idx = guest_view_load16(&q->avail, RING_IDX);
	waiting = (uint16_t)(avail_idx - q->saved.next_avail);
	if (waiting == 0)
		return 0;
	if (waiting > q->saved.size)
		return broken(q);
	head = guest_view_load16(&q->avail,
		RING_ARRAY + (size_t)(q->saved.next_avail % q->saved.size) * AVAIL_ELEM_BYTES);
	if (head >= q->saved.size)
		return broken(q);
	// A head that comes a second time before we have given it back would have its buffers
	// used for two requests. It also keeps what is in flight below the queue's size.
	word = &q->in_flight[head / 64];
	if (*word & 1ULL << head % 64)
		return broken(q);
	ret_chain->head = head;
	ret_chain->nr_readable = ret_chain->nr_writable = 0;
	ret_chain->readable_bytes = ret_chain->writable_bytes = 0;
	if (walk(q, ret_chain) < 0)
		return broken(q);
	*word |= 1ULL << head % 64;
	q->nr_in_flight++;
	q->saved.next_avail++;
	return 1;
}

static void land(struct virtq *q, uint16_t head)
{
	uint64_t bit = 1ULL << head % 64;

	ASSERT(head < q->saved.size && (q->in_flight[head / 64] & bit) && q->nr_in_flight);
	q->in_flight[head / 64] &= ~bit;
	q->nr_in_flight--;
}

void virtq_unpop(struct virtq *q, uint16_t head)
{
	land(q, head);
	q->saved.next_avail--;
}

void virtq_push(struct virtq *q, uint16_t head, uint32_t written_bytes)
{
	uint8_t elem[USED_ELEM_BYTES];

	land(q, head);
	put_le32(elem, head);
	put_le32(elem + 4, written_bytes);
	guest_view_write(&q->used,
		RING_ARRAY + (size_t)(q->saved.next_used % q->saved.size) * USED_ELEM_BYTES, elem,
		sizeof(elem));
	q->saved.next_used++;
}

bool virtq_publish(struct virtq *q)
{
	uint16_t old = q->saved.published_used, new = q->saved.next_used;

	if (!virtq_ready(q) || old == new)
		return false;
	// Release: pairs with the driver's read barrier between the index and the elements.
	guest_view_store16(&q->used, RING_IDX, new);
	q->saved.published_used = new;
	// A full barrier between showing the index and asking whether the driver sleeps; its
	// partner stands in the driver between asking to be woken (used_event, or the flag) and
	// looking at the index once more. One of the two sees the other.
	atomic_thread_fence(memory_order_seq_cst);
	if (!q->event_idx)
		return !(guest_view_load16(&q->avail, RING_FLAGS) & VRING_AVAIL_F_NO_INTERRUPT);
	return vring_need_event(guest_view_load16(&q->avail, used_event_off(q)), new, old);
}

bool virtq_wait(struct virtq *q)
{
	if (!virtq_ready(q))
		return false;
	// Without EVENT_IDX the driver notifies each time: the flag that could stop it stays clear.
	if (q->event_idx) {
		guest_view_store16(&q->used, avail_event_off(q), q->saved.next_avail);
		// A full barrier between asking for a notification and looking once more; its
		// partner stands in the driver between moving the available index and reading
		// avail_event.
		atomic_thread_fence(memory_order_seq_cst);
	}
	return q->broken || guest_view_load16(&q->avail, RING_IDX) != q->saved.next_avail;
}

uint16_t virtq_avail_idx(const struct virtq *q)
{
	return guest_view_load16(&q->avail, RING_IDX);
}

uint16_t virtq_wait_for_more(struct virtq *q)
{
	const uint16_t idx = virtq_avail_idx(q);

	if (q->event_idx) {
		guest_view_store16(&q->used, avail_event_off(q), idx);
		atomic_thread_fence(memory_order_seq_cst); // as in virtq_wait()
	}
	return idx;
}

size_t virtq_chain_read(const struct virtq_chain *chain, size_t off, void *dst, size_t len)
{
	size_t done = 0;

	for (unsigned int i = 0; i < chain->nr_readable && done < len; i++) {
		const struct guest_view *seg = &chain->segs[i];
		size_t part;

		if (off >= seg->len_bytes) {
			off -= seg->len_bytes;
			continue;
		}
		part = MIN(seg->len_bytes - off, len - done);
		guest_view_read(seg, off, (uint8_t *)dst + done, part);
		done += part;
		off = 0;
	}
	return done;
}

size_t virtq_chain_write(const struct virtq_chain *chain, size_t off, const void *src, size_t len)
{
	size_t done = 0;

	for (unsigned int i = 0; i < chain->nr_writable && done < len; i++) {
		const struct guest_view *seg = &chain->segs[chain->nr_readable + i];
		size_t part;

		if (off >= seg->len_bytes) {
			off -= seg->len_bytes;
			continue;
		}
		part = MIN(seg->len_bytes - off, len - done);
		guest_view_write(seg, off, (const uint8_t *)src + done, part);
		done += part;
		off = 0;
	}
	return done;
}

unsigned int virtq_chain_iov(const struct virtq_chain *chain, bool writable, size_t off, size_t len,
	struct iovec *iov, unsigned int max_iov, size_t *ret_bytes)
{
	const struct guest_view *segs = chain->segs + (writable ? chain->nr_readable : 0);
	unsigned int nr_segs = writable ? chain->nr_writable : chain->nr_readable, nr = 0;
	size_t done = 0;

	for (unsigned int i = 0; i < nr_segs && done < len && nr < max_iov; i++) {
		size_t part;

		if (off >= segs[i].len_bytes) {
			off -= segs[i].len_bytes;
			continue;
		}
		part = MIN(segs[i].len_bytes - off, len - done);
		iov[nr++] = (struct iovec){.iov_base = segs[i].hva + off, .iov_len = part};
		done += part;
		off = 0;
	}
	*ret_bytes = done;
	return nr;
}

void virtq_chain_mark_dirty(const struct virtq_chain *chain, size_t off, size_t len)
{
	for (unsigned int i = 0; i < chain->nr_writable && len; i++) {
		const struct guest_view *seg = &chain->segs[chain->nr_readable + i];
		size_t part;

		if (off >= seg->len_bytes) {
			off -= seg->len_bytes;
			continue;
		}
		part = MIN(seg->len_bytes - off, len);
		guest_view_mark_dirty(seg, off, part);
		len -= part;
		off = 0;
	}
}
