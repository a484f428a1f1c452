// SPDX-License-Identifier: Apache-2.0
// virtio entropy device; see the header. Loop thread.
#include "devices/virtio_rng.h"

#include <errno.h>
#include <linux/virtio_ids.h>
#include <stdlib.h>
#include <sys/random.h>

struct rng {
	struct virtio_dev dev;
	struct guest_view segs[VIRTQ_CHAIN_MAX];
};

static struct rng *rng_of(struct virtio_dev *dev)
{
	return container_of(dev, struct rng, dev);
}

// Straight into the guest's buffers. Fewer bytes than asked are fine (5.4.6.1).
static uint32_t fill(const struct virtq_chain *chain)
{
	struct iovec iov[8];
	size_t bytes;
	uint32_t done = 0;
	unsigned int nr = virtq_chain_iov(
		chain, true, 0, VIRTIO_RNG_REQUEST_BYTES, iov, ARRAY_SIZE(iov), &bytes);

	for (unsigned int i = 0; i < nr; i++) {
		ssize_t n = getrandom(iov[i].iov_base, iov[i].iov_len, 0);

		// A signal may cut a large request short; the guest then gets what there is.
		if (n > 0)
			done += (uint32_t)n;
		if (n != (ssize_t)iov[i].iov_len)
			break;
	}
	virtq_chain_mark_dirty(chain, 0, done);
	return done;
}

static void rng_queue_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct virtq *q = &dev->queues[queue_idx];
	struct virtq_chain chain = {.segs = rng_of(dev)->segs};
	uint32_t done = 0;
	int r;

	do {
		while ((r = virtq_pop(q, &chain)) > 0 && done < VIRTIO_RNG_TURN_BYTES) {
			uint32_t bytes = fill(&chain);

			virtq_push(q, chain.head, bytes);
			done += MAX(bytes, 64U); // empty requests are not free
		}
		if (r > 0) {
			virtq_unpop(q, chain.head);
			virtio_dev_notify_again(dev, queue_idx);
			break;
		}
	} while (r == 0 && virtq_wait(q));
	virtio_dev_publish(dev, 1U << queue_idx);
	if (r < 0)
		virtio_dev_set_needs_reset(dev, "bad descriptor chain");
}

static void rng_reset(struct virtio_dev *dev)
{
	(void)dev; // nothing is kept
}

static void rng_destroy(struct virtio_dev *dev)
{
	struct rng *rng = rng_of(dev);

	virtio_dev_fini(dev);
	free(rng);
}

STATE_TABLE(static, rng_state, struct rng, "rng", NULL,
	STATE_NESTED(struct rng, dev, &virtio_dev_state),
	STATE_TRANSIENT(struct rng, segs, "of the chain at hand"));

static const struct virtio_ops rng_ops = {
	.name = "rng",
	.device_id = VIRTIO_ID_RNG,
	.queue_notify = rng_queue_notify,
	.state = &rng_state,
	.reset = rng_reset,
	.destroy = rng_destroy,
};

int virtio_rng_create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	// Linux has one request in flight.
	const struct virtio_dev_params params = {.nr_queues = 1, .queue_size_max = 8};
	struct rng *rng = calloc(1, sizeof(*rng));
	int r;

	if (!rng)
		return err_errno(err, -ENOMEM, "rng");
	r = virtio_dev_init(&rng->dev, &rng_ops, env, &params, err);
	if (r < 0) {
		free(rng);
		return r;
	}
	*ret_dev = &rng->dev;
	return 0;
}
