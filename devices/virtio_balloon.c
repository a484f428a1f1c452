// SPDX-License-Identifier: Apache-2.0
// virtio memory balloon; see the header. Loop thread.
#include "devices/virtio_balloon.h"

#include <errno.h>
#include <linux/virtio_balloon.h>
#include <linux/virtio_ids.h>
#include <stdlib.h>

// 5.5.2 numbers five queues, but Linux leaves no gap for one that was not negotiated. Ours have no
// FREE_PAGE_HINT queue; so the reports come on 4, on 3, or without statistics on 2.
enum { INFLATE_QUEUE, DEFLATE_QUEUE, STATS_QUEUE, NR_QUEUES = 5 };

#define QUEUE_SIZE      128U
#define CHAINS_PER_TURN 16U // each may name a thousand pages, or hundreds of megabytes
#define PFN_BYTES       ((uint64_t)1 << VIRTIO_BALLOON_PFN_SHIFT)
#define PFNS_PER_CHAIN  1024U // Linux sends 256 at most

#define FEATURES                                                                       \
	(1ULL << VIRTIO_BALLOON_F_STATS_VQ | 1ULL << VIRTIO_BALLOON_F_DEFLATE_ON_OOM | \
		1ULL << VIRTIO_BALLOON_F_REPORTING)

#define CONFIG_BYTES (2 * sizeof(uint32_t)) // num_pages, actual

struct balloon {
	struct virtio_dev dev;
	struct {
		uint64_t target_bytes;
		uint32_t actual_pages; // as the guest says
		// The guest's buffer for its figures, which it gets back as the request for new
		// ones.
		bool stats_held;
		bool stats_asked;
		uint16_t stats_head;
	} saved;
	struct virtio_balloon_stats stats;
	struct guest_view segs[VIRTQ_CHAIN_MAX];
};

static struct balloon *balloon_of(struct virtio_dev *dev)
{
	return container_of(dev, struct balloon, dev);
}

static void drop(struct balloon *b, uint64_t gpa, uint64_t len, uint64_t *ret_dropped_bytes)
{
	if (guest_mem_discard(b->dev.env.mem, GPA(gpa), len) < 0)
		b->stats.bad_pages += len / PFN_BYTES;
	else
		*ret_dropped_bytes += len;
}

static void take_inflate(struct balloon *b, const struct virtq_chain *chain)
{
	uint64_t from = 0, len = 0;
	uint8_t pfns[PFNS_PER_CHAIN * sizeof(uint32_t)];
	size_t bytes = virtq_chain_read(chain, 0, pfns, sizeof(pfns));

	// Neighbours, in either direction, go in one system call.
	for (size_t i = 0; i + sizeof(uint32_t) <= bytes; i += sizeof(uint32_t)) {
		const uint64_t gpa = (uint64_t)get_le32(pfns + i) * PFN_BYTES;

		if (len && gpa == from + len) {
			len += PFN_BYTES;
		} else if (len && gpa + PFN_BYTES == from) {
			from = gpa;
			len += PFN_BYTES;
		} else {
			if (len)
				drop(b, from, len, &b->stats.inflated_bytes);
			from = gpa;
			len = PFN_BYTES;
		}
	}
	if (len)
		drop(b, from, len, &b->stats.inflated_bytes);
}

// The buffers themselves are the free blocks.
static void take_report(struct balloon *b, const struct virtq_chain *chain)
{
	for (unsigned int i = 0; i < chain->nr_writable; i++) {
		const struct guest_view *seg = &chain->segs[chain->nr_readable + i];

		drop(b, seg->region->base.v + (uint64_t)(seg->hva - seg->region->hva),
			seg->len_bytes, &b->stats.reported_bytes);
	}
}

static void take_figure(struct virtio_balloon_stats *stats, uint16_t tag, uint64_t val)
{
	switch (tag) {
	case VIRTIO_BALLOON_S_SWAP_IN:
		stats->swap_in_bytes = val;
		break;
	case VIRTIO_BALLOON_S_SWAP_OUT:
		stats->swap_out_bytes = val;
		break;
	case VIRTIO_BALLOON_S_MAJFLT:
		stats->major_faults = val;
		break;
	case VIRTIO_BALLOON_S_MINFLT:
		stats->minor_faults = val;
		break;
	case VIRTIO_BALLOON_S_MEMFREE:
		stats->free_bytes = val;
		break;
	case VIRTIO_BALLOON_S_MEMTOT:
		stats->total_bytes = val;
		break;
	case VIRTIO_BALLOON_S_AVAIL:
		stats->available_bytes = val;
		break;
	case VIRTIO_BALLOON_S_CACHES:
		stats->caches_bytes = val;
		break;
	default: // of a newer guest
		break;
	}
}

static void forget_figures(struct virtio_balloon_stats *stats)
{
	stats->updated_ns = 0;
	stats->free_bytes = stats->available_bytes = VIRTIO_BALLOON_UNKNOWN;
	stats->total_bytes = stats->caches_bytes = VIRTIO_BALLOON_UNKNOWN;
	stats->major_faults = stats->minor_faults = VIRTIO_BALLOON_UNKNOWN;
	stats->swap_in_bytes = stats->swap_out_bytes = VIRTIO_BALLOON_UNKNOWN;
}

static void ask(struct balloon *b)
{
	if (!b->saved.stats_held || !virtio_dev_running(&b->dev))
		return;
	b->saved.stats_held = b->saved.stats_asked = false;
	virtq_push(&b->dev.queues[STATS_QUEUE], b->saved.stats_head, 0);
	virtio_dev_publish(&b->dev, 1U << STATS_QUEUE);
}

// Keeps the buffer. Linux has one; of several the older ones go back.
static void take_stats(struct balloon *b, const struct virtq_chain *chain)
{
	uint8_t raw[sizeof(struct virtio_balloon_stat)];

	if (b->saved.stats_held)
		virtq_push(&b->dev.queues[STATS_QUEUE], b->saved.stats_head, 0);
	else if (b->stats.updated_ns || chain->readable_bytes)
		forget_figures(&b->stats);
	for (size_t off = 0; virtq_chain_read(chain, off, raw, sizeof(raw)) == sizeof(raw) &&
			     off < VIRTIO_BALLOON_S_NR * 4 * sizeof(raw);
		off += sizeof(raw))
		take_figure(&b->stats, get_le16(raw), get_le64(raw + 2));
	b->stats.updated_ns = now_ns();
	b->saved.stats_held = true;
	b->saved.stats_head = chain->head;
}

static bool is_stats(const struct virtio_dev *dev, unsigned int queue_idx)
{
	return queue_idx == STATS_QUEUE && dev->features & 1ULL << VIRTIO_BALLOON_F_STATS_VQ;
}

static void take(struct balloon *b, unsigned int queue_idx, const struct virtq_chain *chain)
{
	if (is_stats(&b->dev, queue_idx)) {
		take_stats(b, chain);
		return;
	}
	if (queue_idx == INFLATE_QUEUE)
		take_inflate(b, chain);
	else if (queue_idx != DEFLATE_QUEUE) // what is deflated comes back by itself, at first use
		take_report(b, chain);
	virtq_push(&b->dev.queues[queue_idx], chain->head, 0);
}

static void balloon_queue_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct balloon *b = balloon_of(dev);
	struct virtq *q = &dev->queues[queue_idx];
	struct virtq_chain chain = {.segs = b->segs};
	unsigned int nr = 0;
	int r;

	do {
		r = 0;
		while (nr < CHAINS_PER_TURN && (r = virtq_pop(q, &chain)) > 0) {
			take(b, queue_idx, &chain);
			nr++;
		}
	} while (r == 0 && nr < CHAINS_PER_TURN && virtq_wait(q));
	virtio_dev_publish(dev, 1U << queue_idx);
	if (r < 0)
		virtio_dev_set_needs_reset(dev, "bad descriptor chain");
	else if (nr == CHAINS_PER_TURN)
		virtio_dev_notify_again(dev, queue_idx);
	if (b->saved.stats_asked)
		ask(b);
}

void virtio_balloon_ask_stats(struct virtio_dev *dev)
{
	struct balloon *b = balloon_of(dev);

	b->saved.stats_asked = true; // as soon as there is a buffer
	ask(b);
}

void virtio_balloon_set_target(struct virtio_dev *dev, uint64_t bytes)
{
	struct balloon *b = balloon_of(dev);
	le32_t pages = le32_of((uint32_t)MIN(bytes / PFN_BYTES, (uint64_t)UINT32_MAX));

	b->saved.target_bytes = (uint64_t)le32_get(pages) * PFN_BYTES;
	virtio_dev_set_config(dev, 0, &pages, sizeof(pages));
}

void virtio_balloon_get_stats(struct virtio_dev *dev, struct virtio_balloon_stats *ret_stats)
{
	struct balloon *b = balloon_of(dev);

	*ret_stats = b->stats;
	ret_stats->target_bytes = b->saved.target_bytes;
	ret_stats->actual_bytes = b->saved.actual_pages * PFN_BYTES;
}

// What the guest says of itself (actual) is only ever shown.
static void balloon_config_written(struct virtio_dev *dev, uint32_t off, uint32_t len)
{
	struct balloon *b = balloon_of(dev);
	le32_t pages = le32_of((uint32_t)(b->saved.target_bytes / PFN_BYTES));

	(void)len;
	b->saved.actual_pages = get_le32(dev->config + sizeof(uint32_t));
	// The target is ours.
	if (off < sizeof(pages))
		virtio_dev_set_config(dev, 0, &pages, sizeof(pages));
}

static void balloon_reset(struct virtio_dev *dev)
{
	struct balloon *b = balloon_of(dev);
	static const uint8_t none[sizeof(uint32_t)];

	// The driver's pages are its own again (5.5.6.1).
	virtio_dev_set_config(dev, sizeof(uint32_t), none, sizeof(none));
	b->saved.actual_pages = 0;
	b->saved.stats_held = false;
	forget_figures(&b->stats);
}

static void balloon_destroy(struct virtio_dev *dev)
{
	virtio_dev_fini(dev);
	free(balloon_of(dev));
}

static int validate(const void *decoded, struct err *err)
{
	const struct balloon *b = decoded;
	const uint64_t target = b->saved.target_bytes;

	if (target % PFN_BYTES || target / PFN_BYTES > UINT32_MAX)
		return err_set(err, -EINVAL, "target of %llu bytes", (unsigned long long)target);
	return !b->saved.stats_held || b->dev.active
		       ? 0
		       : err_set(err, -EINVAL, "a buffer of an inactive queue");
}

static int balloon_restored(struct virtio_dev *dev, struct err *err)
{
	struct balloon *b = balloon_of(dev);

	put_le32(dev->config, (uint32_t)(b->saved.target_bytes / PFN_BYTES));
	put_le32(dev->config + sizeof(uint32_t), b->saved.actual_pages);
	if (b->saved.stats_held && virtq_hold(&dev->queues[STATS_QUEUE], b->saved.stats_head) < 0)
		return err_set(err, -EINVAL, "buffer %u is none", b->saved.stats_head);
	return 0;
}

STATE_TABLE(static, balloon_state, struct balloon, "balloon", validate,
	STATE_NESTED(struct balloon, dev, &virtio_dev_state),
	STATE_U64(struct balloon, saved.target_bytes),
	STATE_U32(struct balloon, saved.actual_pages), STATE_BOOL(struct balloon, saved.stats_held),
	STATE_BOOL(struct balloon, saved.stats_asked), STATE_U16(struct balloon, saved.stats_head),
	STATE_TRANSIENT(struct balloon, stats, "counted anew"),
	STATE_TRANSIENT(struct balloon, segs, "of the chain at hand"));

static const struct virtio_ops balloon_ops = {
	.name = "balloon",
	.device_id = VIRTIO_ID_BALLOON,
	.queue_notify = balloon_queue_notify,
	.config_written = balloon_config_written,
	.restored = balloon_restored,
	.state = &balloon_state,
	.reset = balloon_reset,
	.destroy = balloon_destroy,
};

int virtio_balloon_create(
	struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	static const uint8_t config[CONFIG_BYTES];
	const struct virtio_dev_params params = {
		.features = FEATURES,
		.nr_queues = NR_QUEUES,
		.queue_size_max = QUEUE_SIZE,
		.config = config,
		.config_bytes = sizeof(config),
	};
	struct balloon *b = calloc(1, sizeof(*b));
	int r;

	if (!b)
		return err_errno(err, -ENOMEM, "balloon");
	forget_figures(&b->stats);
	r = virtio_dev_init(&b->dev, &balloon_ops, env, &params, err);
	if (r < 0) {
		free(b);
		return r;
	}
	*ret_dev = &b->dev;
	return 0;
}
