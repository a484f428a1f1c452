// SPDX-License-Identifier: Apache-2.0
// A guest's driver; see the header. It shares no code with devices/: what both get wrong alike
// would go unseen.
#include "tests/support/fake_driver.h"

#include <dirent.h>
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define NEVER_IN_TIME_NS 10000000000ULL
#define RAM_START        0x10000U // the first pages stay unused, so that address 0 is a bug

void fake_init(struct fake_driver *fake)
{
	const struct guest_mem_range range = {GPA(0), FAKE_RAM_BYTES};
	struct err err = {0};
	int r;

	memset(fake, 0, sizeof(*fake));
	r = guest_mem_init(&fake->mem, &range, 1, &err);
	ASSERT(r == 0);
	r = loop_init(&fake->loop, &err);
	ASSERT(r == 0);
	fake->irq_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ASSERT(fake->irq_fd >= 0);
	fake->next_free = RAM_START;
}

struct virtio_env fake_env(struct fake_driver *fake)
{
	return (struct virtio_env){
		.mem = &fake->mem, .loop = &fake->loop, .irq_fd = fake->irq_fd, .gsi = FAKE_GSI};
}

void fake_attach(struct fake_driver *fake, struct virtio_dev *dev)
{
	ASSERT(!fake->dev);
	fake->dev = dev;
}

void fake_detach(struct fake_driver *fake)
{
	virtio_dev_destroy(TAKE_PTR(fake->dev));
	memset(fake->queues, 0, sizeof(fake->queues));
}

void fake_fini(struct fake_driver *fake)
{
	fake_detach(fake);
	loop_fini(&fake->loop);
	fd_close(&fake->irq_fd);
	guest_mem_fini(&fake->mem);
}

uint32_t fake_read(struct fake_driver *fake, uint64_t off)
{
	uint8_t data[4];

	virtio_mmio_bus_ops.read(fake->dev, off, data, 4);
	return get_le32(data);
}

void fake_write(struct fake_driver *fake, uint64_t off, uint32_t val)
{
	uint8_t data[4];

	put_le32(data, val);
	virtio_mmio_write_on_loop(fake->dev, off, data, 4);
}

uint32_t fake_status(struct fake_driver *fake)
{
	return fake_read(fake, VIRTIO_MMIO_STATUS);
}

uint64_t fake_device_features(struct fake_driver *fake)
{
	uint64_t features;

	fake_write(fake, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
	features = (uint64_t)fake_read(fake, VIRTIO_MMIO_DEVICE_FEATURES) << 32;
	fake_write(fake, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
	return features | fake_read(fake, VIRTIO_MMIO_DEVICE_FEATURES);
}

bool fake_negotiate(struct fake_driver *fake, uint64_t features)
{
	memset(fake->queues, 0, sizeof(fake->queues));
	fake->next_free = RAM_START;
	fake_write(fake, VIRTIO_MMIO_STATUS, 0);
	fake_write(fake, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE);
	fake_write(fake, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER);
	fake->features = features;
	fake_write(fake, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
	fake_write(fake, VIRTIO_MMIO_DRIVER_FEATURES, (uint32_t)features);
	fake_write(fake, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	fake_write(fake, VIRTIO_MMIO_DRIVER_FEATURES, (uint32_t)(features >> 32));
	fake_write(fake, VIRTIO_MMIO_STATUS,
		VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK);
	return fake_status(fake) & VIRTIO_CONFIG_S_FEATURES_OK;
}

void fake_write_queue(struct fake_driver *fake, unsigned int queue_idx, uint32_t size,
	uint64_t desc, uint64_t avail, uint64_t used)
{
	fake_write(fake, VIRTIO_MMIO_QUEUE_SEL, queue_idx);
	fake_write(fake, VIRTIO_MMIO_QUEUE_NUM, size);
	fake_write(fake, VIRTIO_MMIO_QUEUE_DESC_LOW, (uint32_t)desc);
	fake_write(fake, VIRTIO_MMIO_QUEUE_DESC_HIGH, (uint32_t)(desc >> 32));
	fake_write(fake, VIRTIO_MMIO_QUEUE_AVAIL_LOW, (uint32_t)avail);
	fake_write(fake, VIRTIO_MMIO_QUEUE_AVAIL_HIGH, (uint32_t)(avail >> 32));
	fake_write(fake, VIRTIO_MMIO_QUEUE_USED_LOW, (uint32_t)used);
	fake_write(fake, VIRTIO_MMIO_QUEUE_USED_HIGH, (uint32_t)(used >> 32));
	fake_write(fake, VIRTIO_MMIO_QUEUE_READY, 1);
}

void fake_setup_queue(struct fake_driver *fake, unsigned int queue_idx, uint16_t size)
{
	struct fake_queue *queue = &fake->queues[queue_idx];

	ASSERT(size > 0 && size <= VIRTQ_SIZE_MAX);
	*queue = (struct fake_queue){
		.size = size,
		.desc = fake_alloc(fake, (size_t)size * 16),
		.avail = fake_alloc(fake, 6 + (size_t)size * 2),
		.used = fake_alloc(fake, 6 + (size_t)size * 8),
		.nr_free = size,
	};
	for (uint16_t i = 0; i < size; i++)
		queue->next[i] = (uint16_t)(i + 1);
	fake_write_queue(fake, queue_idx, size, queue->desc.v, queue->avail.v, queue->used.v);
}

void fake_start_with(struct fake_driver *fake, uint64_t features, uint16_t size)
{
	bool taken = fake_negotiate(fake, features);

	ASSERT(taken);
	for (unsigned int i = 0; i < fake->dev->nr_queues; i++)
		fake_setup_queue(fake, i, size);
	fake_write(fake, VIRTIO_MMIO_STATUS,
		VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK |
			VIRTIO_CONFIG_S_DRIVER_OK);
	ASSERT(fake_status(fake) == 15);
}

void fake_start(struct fake_driver *fake)
{
	fake_start_with(fake, fake_device_features(fake),
		(uint16_t)fake_read(fake, VIRTIO_MMIO_QUEUE_NUM_MAX));
}

gpa_t fake_alloc(struct fake_driver *fake, size_t bytes)
{
	static const uint8_t zeros[PAGE_BYTES];
	gpa_t gpa = GPA(fake->next_free);
	uint64_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES;

	fake->next_free += pages * PAGE_BYTES;
	ASSERT(fake->next_free <= FAKE_RAM_BYTES);
	for (uint64_t i = 0; i < pages; i++) {
		int r = guest_mem_write(
			&fake->mem, GPA(gpa.v + i * PAGE_BYTES), zeros, sizeof(zeros));

		ASSERT(r == 0);
	}
	return gpa;
}

static void put16(struct fake_driver *fake, uint64_t gpa, uint16_t val)
{
	struct guest_view view;
	int r = guest_mem_view(&fake->mem, GPA(gpa), 2, &view);

	ASSERT(r == 0);
	guest_view_store16(&view, 0, val);
}

static uint16_t get16(struct fake_driver *fake, uint64_t gpa)
{
	struct guest_view view;
	int r = guest_mem_view(&fake->mem, GPA(gpa), 2, &view);

	ASSERT(r == 0);
	return guest_view_load16(&view, 0);
}

static void put_desc_at(struct fake_driver *fake, uint64_t gpa, uint64_t addr, uint32_t len,
	uint16_t flags, uint16_t next)
{
	uint8_t raw[16];
	int r;

	put_le64(raw, addr);
	put_le32(raw + 8, len);
	put_le16(raw + 12, flags);
	put_le16(raw + 14, next);
	r = guest_mem_write(&fake->mem, GPA(gpa), raw, sizeof(raw));
	ASSERT(r == 0);
}

void fake_put_desc(struct fake_driver *fake, unsigned int queue_idx, uint16_t idx, uint64_t addr,
	uint32_t len, uint16_t flags, uint16_t next)
{
	put_desc_at(fake, fake->queues[queue_idx].desc.v + idx * 16U, addr, len, flags, next);
}

void fake_put_avail_idx(struct fake_driver *fake, unsigned int queue_idx, uint16_t idx)
{
	fake->queues[queue_idx].avail_idx = idx;
	put16(fake, fake->queues[queue_idx].avail.v + 2, idx);
}

void fake_put_avail(struct fake_driver *fake, unsigned int queue_idx, uint16_t head)
{
	struct fake_queue *queue = &fake->queues[queue_idx];

	put16(fake, queue->avail.v + 4 + 2U * (queue->avail_idx % queue->size), head);
	fake_put_avail_idx(fake, queue_idx, (uint16_t)(queue->avail_idx + 1));
}

static uint16_t take_desc(struct fake_queue *queue)
{
	uint16_t idx = queue->free_head;

	ASSERT(queue->nr_free > 0 && idx < queue->size);
	queue->free_head = queue->next[idx];
	queue->nr_free--;
	return idx;
}

static uint16_t flags_of(const struct fake_buf *buf, bool last)
{
	return (uint16_t)((buf->writable ? VRING_DESC_F_WRITE : 0) |
			  (last ? 0 : VRING_DESC_F_NEXT));
}

int fake_add(struct fake_driver *fake, unsigned int queue_idx, const struct fake_buf *bufs,
	unsigned int nr)
{
	struct fake_queue *queue = &fake->queues[queue_idx];
	uint16_t head = queue->free_head;

	if (nr > queue->nr_free)
		return -1;
	for (unsigned int i = 0; i < nr; i++) {
		uint16_t idx = take_desc(queue);

		fake_put_desc(fake, queue_idx, idx, bufs[i].gpa.v, bufs[i].len,
			flags_of(&bufs[i], i + 1 == nr), queue->free_head);
	}
	queue->chain_len[head] = (uint16_t)nr;
	fake_put_avail(fake, queue_idx, head);
	return head;
}

int fake_add_indirect(struct fake_driver *fake, unsigned int queue_idx, const struct fake_buf *bufs,
	unsigned int nr, gpa_t table)
{
	struct fake_queue *queue = &fake->queues[queue_idx];
	uint16_t head;

	if (!queue->nr_free)
		return -1;
	if (!table.v)
		table = fake_alloc(fake, nr * 16U);
	for (unsigned int i = 0; i < nr; i++)
		put_desc_at(fake, table.v + i * 16U, bufs[i].gpa.v, bufs[i].len,
			flags_of(&bufs[i], i + 1 == nr), (uint16_t)(i + 1));
	head = take_desc(queue);
	fake_put_desc(fake, queue_idx, head, table.v, nr * 16U, VRING_DESC_F_INDIRECT, 0);
	queue->chain_len[head] = 1;
	fake_put_avail(fake, queue_idx, head);
	return head;
}

void fake_kick(struct fake_driver *fake, unsigned int queue_idx)
{
	struct fake_queue *queue = &fake->queues[queue_idx];
	uint16_t old = queue->kicked_idx, new = queue->avail_idx;
	uint64_t one = 1;
	ssize_t n;

	if (old == new)
		return;
	queue->kicked_idx = new;
	// Its partner stands in virtq_wait().
	atomic_thread_fence(memory_order_seq_cst);
	if (fake->features & 1ULL << VIRTIO_RING_F_EVENT_IDX) {
		uint16_t event = get16(fake, queue->used.v + 4 + 8U * queue->size);

		if ((uint16_t)(new - event - 1) >= (uint16_t)(new - old))
			return;
	} else if (get16(fake, queue->used.v) & VRING_USED_F_NO_NOTIFY) {
		return;
	}
	queue->nr_kicks++;
	n = write(virtio_dev_notify_fd(fake->dev, queue_idx), &one, sizeof(one));
	ASSERT(n == sizeof(one));
}

void fake_want_irq(struct fake_driver *fake, unsigned int queue_idx)
{
	struct fake_queue *queue = &fake->queues[queue_idx];

	put16(fake, queue->avail.v + 4 + 2U * queue->size, queue->used_idx);
	// Its partner stands in virtq_publish().
	atomic_thread_fence(memory_order_seq_cst);
}

bool fake_get_used(struct fake_driver *fake, unsigned int queue_idx, int *ret_head,
	uint32_t *ret_written_bytes)
{
	struct fake_queue *queue = &fake->queues[queue_idx];
	uint8_t elem[8];
	uint32_t head;
	uint16_t last;
	int r;

	if (get16(fake, queue->used.v + 2) == queue->used_idx)
		return false;
	r = guest_mem_read(&fake->mem,
		GPA(queue->used.v + 4 + 8U * (queue->used_idx % queue->size)), elem, sizeof(elem));
	ASSERT(r == 0);
	head = get_le32(elem);
	ASSERT(head < queue->size && queue->chain_len[head] > 0);
	last = (uint16_t)head;
	for (uint16_t i = 1; i < queue->chain_len[head]; i++)
		last = queue->next[last];
	queue->next[last] = queue->free_head;
	queue->free_head = (uint16_t)head;
	queue->nr_free = (uint16_t)(queue->nr_free + queue->chain_len[head]);
	queue->chain_len[head] = 0;
	queue->used_idx++;
	if (ret_head)
		*ret_head = (int)head;
	if (ret_written_bytes)
		*ret_written_bytes = get_le32(elem + 4);
	return true;
}

void fake_run(struct fake_driver *fake)
{
	// A watch that has fired is armed again in the next turn; two without anything to wait for
	// see all that was there.
	for (int i = 0; i < 3; i++) {
		int r = loop_turn(&fake->loop, 0, NULL);

		ASSERT(r == 0);
	}
}

bool fake_run_until(struct fake_driver *fake, bool (*cond)(void *opaque), void *opaque)
{
	uint64_t deadline = now_ns() + NEVER_IN_TIME_NS;

	while (!cond(opaque)) {
		int r;

		if (now_ns() > deadline)
			return false;
		r = loop_turn(&fake->loop, 1000000, NULL);
		ASSERT(r == 0);
	}
	return true;
}

uint64_t fake_irqs(struct fake_driver *fake)
{
	uint64_t count = 0;

	return read(fake->irq_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

unsigned int fake_count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	unsigned int count = 0;

	ASSERT(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}
