// SPDX-License-Identifier: Apache-2.0
// The virtio-mmio transport. Registers: vCPU threads, under the lock. All else: loop thread.
#include "devices/virtio_mmio.h"

#include <errno.h>
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"
#include "vmm/loop.h"

#define MAGIC     0x74726976U // "virt"
#define VERSION   2U
#define VENDOR_ID 0x4d59464dU // "MFYM"

#define RING_FEATURES                                                   \
	(1ULL << VIRTIO_F_VERSION_1 | 1ULL << VIRTIO_RING_F_EVENT_IDX | \
		1ULL << VIRTIO_RING_F_INDIRECT_DESC)

#define S_ACKNOWLEDGE ((uint32_t)VIRTIO_CONFIG_S_ACKNOWLEDGE)
#define S_DRIVER      ((uint32_t)VIRTIO_CONFIG_S_DRIVER)
#define S_FEATURES_OK ((uint32_t)VIRTIO_CONFIG_S_FEATURES_OK)
#define S_DRIVER_OK   ((uint32_t)VIRTIO_CONFIG_S_DRIVER_OK)
#define S_NEEDS_RESET ((uint32_t)VIRTIO_CONFIG_S_NEEDS_RESET)
#define S_FAILED      ((uint32_t)VIRTIO_CONFIG_S_FAILED)

// 3.1.1: the only order in which a driver may set the bits of the status. Besides, it may set
// FAILED at any time, write what is there already, and write 0 to reset the device.
static const struct {
	uint32_t from, add;
} edges[] = {
	{0, S_ACKNOWLEDGE},
	{S_ACKNOWLEDGE, S_DRIVER},
	{S_ACKNOWLEDGE | S_DRIVER, S_FEATURES_OK},
	{S_ACKNOWLEDGE | S_DRIVER | S_FEATURES_OK, S_DRIVER_OK},
};

static void signal_fd(int fd)
{
	uint64_t one = 1;
	// It fails only when the counter is at its end, and then the other side has been told.
	ssize_t ignored = write(fd, &one, sizeof(one));

	(void)ignored;
}

static void interrupt(struct virtio_dev *dev, uint32_t bits)
{
	// Release: what the driver will look for is there before it can see the bit.
	atomic_fetch_or_explicit(&dev->interrupt_status, bits, memory_order_acq_rel);
	dev->nr_interrupts++;
	signal_fd(dev->env.irq_fd);
}

// --- The loop thread's part ------------------------------------------------------------------

static void finish_work(struct virtio_dev *dev)
{
	pthread_mutex_lock(&dev->lock);
	dev->work = VIRTIO_WORK_NONE;
	dev->work_started = false;
	pthread_cond_broadcast(&dev->work_done);
	pthread_mutex_unlock(&dev->lock);
}

static void clear_registers(struct virtio_dev *dev)
{
	uint32_t generation = dev->saved.config_generation;

	memset(&dev->saved, 0, sizeof(dev->saved));
	// The one that outlives a reset: a driver compares two reads of it.
	dev->saved.config_generation = generation;
	atomic_store_explicit(&dev->interrupt_status, 0, memory_order_release);
}

static void notify_all(struct virtio_dev *dev)
{
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		if (virtio_dev_running(dev) && virtq_ready(&dev->queues[i]))
			dev->ops->queue_notify(dev, i);
}

static struct virtq_config queue_config(const struct virtio_dev *dev, unsigned int queue_idx)
{
	const struct virtio_queue_regs *regs = &dev->saved.queues[queue_idx];

	return (struct virtq_config){
		.size = regs->size,
		.desc = GPA(regs->desc),
		.avail = GPA(regs->avail),
		.used = GPA(regs->used),
		.event_idx = dev->saved.driver_features & 1ULL << VIRTIO_RING_F_EVENT_IDX,
		.indirect = dev->saved.driver_features & 1ULL << VIRTIO_RING_F_INDIRECT_DESC,
	};
}

static void do_activate(struct virtio_dev *dev)
{
	bool good = true;

	for (unsigned int i = 0; i < dev->nr_queues && good; i++) {
		const struct virtq_config config = queue_config(dev, i);

		// A queue that the driver has no use for stays out of use.
		if (dev->saved.queues[i].ready)
			good = virtq_activate(&dev->queues[i], &config, dev->queue_size_max,
				       dev->env.mem) == 0;
	}
	pthread_mutex_lock(&dev->lock);
	dev->saved.status |= S_DRIVER_OK;
	pthread_mutex_unlock(&dev->lock);
	if (good) {
		dev->active = true;
		dev->features = dev->saved.driver_features;
		if (dev->ops->activate)
			dev->ops->activate(dev);
		notify_all(dev);
	} else {
		for (unsigned int i = 0; i < dev->nr_queues; i++)
			virtq_deactivate(&dev->queues[i]);
		virtio_dev_set_needs_reset(dev, "bad size or address of a queue");
	}
	finish_work(dev);
}

static void reset_drained(void *opaque)
{
	struct virtio_dev *dev = opaque;
	bool was_active = dev->active;

	dev->active = dev->needs_reset = dev->paused = false;
	if (was_active)
		dev->ops->reset(dev);
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		virtq_deactivate(&dev->queues[i]);
	dev->features = 0;
	pthread_mutex_lock(&dev->lock);
	clear_registers(dev);
	pthread_mutex_unlock(&dev->lock);
	finish_work(dev);
}

static void do_config(struct virtio_dev *dev)
{
	uint8_t data[8];

	put_le64(data, dev->work_data);
	pthread_mutex_lock(&dev->lock);
	memcpy(dev->config + dev->work_off, data, dev->work_len);
	pthread_mutex_unlock(&dev->lock);
	dev->ops->config_written(dev, dev->work_off, dev->work_len);
	finish_work(dev);
}

static void do_work(struct virtio_dev *dev)
{
	enum virtio_work work;

	pthread_mutex_lock(&dev->lock);
	work = dev->work_started ? VIRTIO_WORK_NONE : dev->work;
	dev->work_started = dev->work != VIRTIO_WORK_NONE;
	pthread_mutex_unlock(&dev->lock);
	switch (work) {
	case VIRTIO_WORK_NONE:
		break;
	case VIRTIO_WORK_ACTIVATE:
		do_activate(dev);
		break;
	case VIRTIO_WORK_RESET:
		virtio_dev_drain(dev, reset_drained, dev);
		break;
	case VIRTIO_WORK_CONFIG:
		do_config(dev);
		break;
	}
}

static void on_notify(void *opaque, uint32_t revents)
{
	struct virtio_notify *notify = opaque;
	struct virtio_dev *dev = notify->dev;
	unsigned int queue_idx = (unsigned int)(notify - dev->notify);
	uint64_t count;

	(void)revents;
	if (read(notify->fd, &count, sizeof(count)) != sizeof(count))
		return;
	// Queue 0's also tells of posted work: a descriptor less a device.
	if (queue_idx == 0)
		do_work(dev);
	dev->nr_notifies++;
	if (virtio_dev_running(dev) && virtq_ready(&dev->queues[queue_idx]))
		dev->ops->queue_notify(dev, queue_idx);
}

void virtio_dev_drain(struct virtio_dev *dev, void (*done)(void *opaque), void *opaque)
{
	ASSERT(!dev->drained);
	dev->paused = true;
	dev->drained = done;
	dev->drained_opaque = opaque;
	if (!dev->active || !dev->ops->drain || dev->ops->drain(dev))
		virtio_dev_drained(dev);
}

void virtio_dev_drained(struct virtio_dev *dev)
{
	void (*done)(void *opaque) = dev->drained;

	ASSERT(done);
	dev->drained = NULL;
	done(dev->drained_opaque);
}

void virtio_dev_resume(struct virtio_dev *dev)
{
	ASSERT(dev->paused && !dev->drained);
	dev->paused = false;
	if (!dev->active)
		return;
	if (dev->ops->resume)
		dev->ops->resume(dev);
	notify_all(dev);
}

bool virtio_dev_show(struct virtio_dev *dev, unsigned int queue_mask)
{
	bool wanted = false;

	for (unsigned int i = 0; i < dev->nr_queues; i++)
		if (queue_mask & 1U << i && virtq_publish(&dev->queues[i]))
			wanted = true;
	return wanted;
}

void virtio_dev_interrupt(struct virtio_dev *dev)
{
	interrupt(dev, VIRTIO_MMIO_INT_VRING);
}

void virtio_dev_publish(struct virtio_dev *dev, unsigned int queue_mask)
{
	if (virtio_dev_show(dev, queue_mask))
		virtio_dev_interrupt(dev);
}

void virtio_dev_notify_again(struct virtio_dev *dev, unsigned int queue_idx)
{
	signal_fd(dev->notify[queue_idx].fd);
}

void virtio_dev_set_config(struct virtio_dev *dev, uint32_t off, const void *data, uint32_t len)
{
	ASSERT(off <= dev->config_bytes && len <= dev->config_bytes - off);
	pthread_mutex_lock(&dev->lock);
	memcpy(dev->config + off, data, len);
	dev->saved.config_generation++;
	pthread_mutex_unlock(&dev->lock);
	if (dev->active)
		interrupt(dev, VIRTIO_MMIO_INT_CONFIG);
}

void virtio_dev_set_needs_reset(struct virtio_dev *dev, const char *why)
{
	if (dev->needs_reset)
		return;
	dev->needs_reset = true;
	log_guest(dev->ops->name, "the driver broke the rules: %s; waiting for its reset", why);
	pthread_mutex_lock(&dev->lock);
	dev->saved.status |= S_NEEDS_RESET;
	pthread_mutex_unlock(&dev->lock);
	interrupt(dev, VIRTIO_MMIO_INT_CONFIG);
}

// --- The registers ---------------------------------------------------------------------------

static struct virtio_queue_regs *selected_queue(struct virtio_dev *dev)
{
	return dev->saved.queue_sel < dev->nr_queues ? &dev->saved.queues[dev->saved.queue_sel]
						     : NULL;
}

static uint32_t read_reg(struct virtio_dev *dev, uint64_t off)
{
	const struct virtio_queue_regs *queue = selected_queue(dev);

	switch (off) {
	case VIRTIO_MMIO_DEVICE_FEATURES:
		if (dev->saved.device_features_sel > 1)
			return 0;
		return (uint32_t)(dev->features_offered >> 32 * dev->saved.device_features_sel);
	case VIRTIO_MMIO_QUEUE_NUM_MAX:
		return queue ? dev->queue_size_max : 0;
	case VIRTIO_MMIO_QUEUE_READY:
		return queue ? queue->ready : 0;
	case VIRTIO_MMIO_STATUS:
		return dev->saved.status;
	case VIRTIO_MMIO_SHM_LEN_LOW: // 4.2.2.1: all ones where there is no region
	case VIRTIO_MMIO_SHM_LEN_HIGH:
	case VIRTIO_MMIO_SHM_BASE_LOW:
	case VIRTIO_MMIO_SHM_BASE_HIGH:
		return UINT32_MAX;
	case VIRTIO_MMIO_CONFIG_GENERATION:
		return dev->saved.config_generation;
	default: // write-only, reserved
		return 0;
	}
}

static void set_half(uint64_t *reg, bool high, uint32_t val)
{
	*reg = high ? (*reg & UINT32_MAX) | (uint64_t)val << 32
		    : (*reg & ~(uint64_t)UINT32_MAX) | val;
}

static bool acceptable(const struct virtio_dev *dev, uint64_t features)
{
	return !(features & ~dev->features_offered) && features & 1ULL << VIRTIO_F_VERSION_1;
}

// Returns what is left to do on the loop thread.
static enum virtio_work write_status(struct virtio_dev *dev, uint32_t val)
{
	uint32_t now = dev->saved.status & ~S_NEEDS_RESET;

	if (val == 0) {
		if (dev->saved.status & S_DRIVER_OK)
			return VIRTIO_WORK_RESET;
		clear_registers(dev);
		return VIRTIO_WORK_NONE;
	}
	val &= ~S_NEEDS_RESET;
	if (val == now)
		return VIRTIO_WORK_NONE;
	if (val == (now | S_FAILED)) {
		dev->saved.status |= S_FAILED;
		return VIRTIO_WORK_NONE;
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(edges); i++) {
		if (edges[i].from != now || (now | edges[i].add) != val)
			continue;
		if (edges[i].add == S_DRIVER_OK)
			return VIRTIO_WORK_ACTIVATE;
		// The driver reads the bit back to learn whether its choice is accepted.
		if (edges[i].add == S_FEATURES_OK && !acceptable(dev, dev->saved.driver_features))
			return VIRTIO_WORK_NONE;
		dev->saved.status |= edges[i].add;
		return VIRTIO_WORK_NONE;
	}
	log_guest(dev->ops->name, "status 0x%x after 0x%x is out of order: ignored", val, now);
	return VIRTIO_WORK_NONE;
}

static void write_queue_reg(struct virtio_dev *dev, uint64_t off, uint32_t val)
{
	struct virtio_queue_regs *queue = selected_queue(dev);

	// Between FEATURES_OK and DRIVER_OK, and not while the queue is ready: whatever else is
	// written would not be what the device works with.
	if (!queue || (dev->saved.status & (S_FEATURES_OK | S_DRIVER_OK)) != S_FEATURES_OK ||
		(queue->ready && off != VIRTIO_MMIO_QUEUE_READY))
		return;
	switch (off) {
	case VIRTIO_MMIO_QUEUE_NUM:
		queue->size = val;
		break;
	case VIRTIO_MMIO_QUEUE_READY:
		queue->ready = val & 1;
		break;
	case VIRTIO_MMIO_QUEUE_DESC_LOW:
	case VIRTIO_MMIO_QUEUE_DESC_HIGH:
		set_half(&queue->desc, off == VIRTIO_MMIO_QUEUE_DESC_HIGH, val);
		break;
	case VIRTIO_MMIO_QUEUE_AVAIL_LOW:
	case VIRTIO_MMIO_QUEUE_AVAIL_HIGH:
		set_half(&queue->avail, off == VIRTIO_MMIO_QUEUE_AVAIL_HIGH, val);
		break;
	case VIRTIO_MMIO_QUEUE_USED_LOW:
	case VIRTIO_MMIO_QUEUE_USED_HIGH:
		set_half(&queue->used, off == VIRTIO_MMIO_QUEUE_USED_HIGH, val);
		break;
	default:
		break;
	}
}

static enum virtio_work write_reg(struct virtio_dev *dev, uint64_t off, uint32_t val)
{
	switch (off) {
	case VIRTIO_MMIO_DEVICE_FEATURES_SEL:
		dev->saved.device_features_sel = val;
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES_SEL:
		dev->saved.driver_features_sel = val;
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES:
		// Once FEATURES_OK is set they stand (3.1.1, 6).
		if ((dev->saved.status & (S_DRIVER | S_FEATURES_OK)) == S_DRIVER &&
			dev->saved.driver_features_sel < 2)
			set_half(&dev->saved.driver_features, dev->saved.driver_features_sel == 1,
				val);
		break;
	case VIRTIO_MMIO_QUEUE_SEL:
		dev->saved.queue_sel = val;
		break;
	case VIRTIO_MMIO_STATUS:
		return write_status(dev, val);
	default:
		write_queue_reg(dev, off, val);
		break;
	}
	return VIRTIO_WORK_NONE;
}

static enum virtio_work write_config(
	struct virtio_dev *dev, uint64_t off, const uint8_t *data, unsigned int len)
{
	uint8_t padded[8] = {0};

	// Before DRIVER the device is not there yet for the driver; a device without
	// config_written() has nothing to write to.
	if (!dev->ops->config_written || !(dev->saved.status & S_DRIVER) ||
		off > dev->config_bytes || len > dev->config_bytes - off)
		return VIRTIO_WORK_NONE;
	memcpy(padded, data, len);
	dev->work_off = (uint32_t)off;
	dev->work_len = len;
	dev->work_data = get_le64(padded);
	return VIRTIO_WORK_CONFIG;
}

static void read_config(struct virtio_dev *dev, uint64_t off, uint8_t *data, unsigned int len)
{
	for (unsigned int i = 0; i < len; i++)
		data[i] = off + i < dev->config_bytes ? dev->config[off + i] : 0;
}

static void wait_for_work(struct virtio_dev *dev)
{
	while (dev->work != VIRTIO_WORK_NONE && !dev->stopped)
		pthread_cond_wait(&dev->work_done, &dev->lock);
}

// The registers that need no lock. True if off is one of them.
static bool read_fast(struct virtio_dev *dev, uint64_t off, uint32_t *ret_val)
{
	switch (off) {
	case VIRTIO_MMIO_INTERRUPT_STATUS:
		*ret_val = atomic_load_explicit(&dev->interrupt_status, memory_order_acquire);
		return true;
	case VIRTIO_MMIO_MAGIC_VALUE:
		*ret_val = MAGIC;
		return true;
	case VIRTIO_MMIO_VERSION:
		*ret_val = VERSION;
		return true;
	case VIRTIO_MMIO_DEVICE_ID:
		*ret_val = dev->ops->device_id;
		return true;
	case VIRTIO_MMIO_VENDOR_ID:
		*ret_val = VENDOR_ID;
		return true;
	default:
		return false;
	}
}

static bool write_fast(struct virtio_dev *dev, uint64_t off, uint32_t val)
{
	switch (off) {
	case VIRTIO_MMIO_INTERRUPT_ACK:
		atomic_fetch_and_explicit(&dev->interrupt_status, ~val, memory_order_acq_rel);
		return true;
	case VIRTIO_MMIO_QUEUE_NOTIFY: // only where no ioeventfd stands before it
		if (val < dev->nr_queues)
			signal_fd(dev->notify[val].fd);
		return true;
	default:
		return false;
	}
}

static void mmio_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	struct virtio_dev *dev = opaque;
	uint32_t val = 0;

	memset(data, 0, len);
	if (off < VIRTIO_MMIO_CONFIG) {
		// 4.2.2.2: registers are accessed by aligned 32 bits.
		if (len != 4 || off % 4)
			return;
		if (!read_fast(dev, off, &val)) {
			pthread_mutex_lock(&dev->lock);
			wait_for_work(dev);
			val = read_reg(dev, off);
			pthread_mutex_unlock(&dev->lock);
		}
		put_le32(data, val);
		return;
	}
	pthread_mutex_lock(&dev->lock);
	wait_for_work(dev);
	read_config(dev, off - VIRTIO_MMIO_CONFIG, data, len);
	pthread_mutex_unlock(&dev->lock);
}

// With the lock held; posts the work that it leaves.
static enum virtio_work post_write(
	struct virtio_dev *dev, uint64_t off, const uint8_t *data, unsigned int len)
{
	if (off >= VIRTIO_MMIO_CONFIG)
		dev->work = write_config(dev, off - VIRTIO_MMIO_CONFIG, data, len);
	else
		dev->work = write_reg(dev, off, get_le32(data));
	return dev->work;
}

static void mmio_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	struct virtio_dev *dev = opaque;

	if (off < VIRTIO_MMIO_CONFIG &&
		(len != 4 || off % 4 || write_fast(dev, off, get_le32(data))))
		return;
	pthread_mutex_lock(&dev->lock);
	wait_for_work(dev);
	if (!dev->stopped && post_write(dev, off, data, len) != VIRTIO_WORK_NONE) {
		signal_fd(dev->notify[0].fd);
		wait_for_work(dev);
	}
	pthread_mutex_unlock(&dev->lock);
}

const struct bus_ops virtio_mmio_bus_ops = {.read = mmio_read, .write = mmio_write};

void virtio_mmio_write_on_loop(
	struct virtio_dev *dev, uint64_t off, const uint8_t *data, unsigned int len)
{
	enum virtio_work work;

	if (off < VIRTIO_MMIO_CONFIG &&
		(len != 4 || off % 4 || write_fast(dev, off, get_le32(data))))
		return;
	pthread_mutex_lock(&dev->lock);
	ASSERT(dev->work == VIRTIO_WORK_NONE);
	work = post_write(dev, off, data, len);
	pthread_mutex_unlock(&dev->lock);
	if (work == VIRTIO_WORK_NONE)
		return;
	do_work(dev);
	// A reset may have to wait for operations in flight.
	while (dev->work != VIRTIO_WORK_NONE) {
		int r = loop_turn(dev->env.loop, UINT64_MAX, NULL);

		ASSERT(r == 0);
	}
}

// --- Saved state -----------------------------------------------------------------------------

STATE_TABLE(static, queue_regs_state, struct virtio_queue_regs, "queue", NULL,
	STATE_U32(struct virtio_queue_regs, size), STATE_U32(struct virtio_queue_regs, ready),
	STATE_U64(struct virtio_queue_regs, desc), STATE_U64(struct virtio_queue_regs, avail),
	STATE_U64(struct virtio_queue_regs, used));

static bool legal_status(uint32_t status)
{
	const uint32_t below = status & ~(S_FAILED | S_NEEDS_RESET);

	for (unsigned int i = 0; i < ARRAY_SIZE(edges); i++)
		if (below == edges[i].from || below == (edges[i].from | edges[i].add))
			return true;
	return false;
}

static int validate_dev(const void *decoded, struct err *err)
{
	const struct virtio_dev *dev = decoded;
	const uint32_t status = dev->saved.status;

	if (!legal_status(status))
		return err_set(err, -EINVAL, "status 0x%x", status);
	if (status & S_FEATURES_OK && !acceptable(dev, dev->saved.driver_features))
		return err_set(err, -EINVAL,
			"the driver uses features 0x%llx, this device has 0x%llx",
			(unsigned long long)dev->saved.driver_features,
			(unsigned long long)dev->features_offered);
	// Active from DRIVER_OK on, unless that failed for a reason of the driver's.
	if ((dev->active || dev->needs_reset) != !!(status & S_DRIVER_OK) ||
		dev->needs_reset != !!(status & S_NEEDS_RESET))
		return err_set(err, -EINVAL, "active %d, needs a reset %d, status 0x%x",
			dev->active, dev->needs_reset, status);
	if (atomic_load(&dev->interrupt_status) &
		~(uint32_t)(VIRTIO_MMIO_INT_VRING | VIRTIO_MMIO_INT_CONFIG))
		return err_set(err, -EINVAL, "interrupt status");
	for (unsigned int i = 0; i < VIRTIO_QUEUES_MAX; i++) {
		const struct virtq_config config = queue_config(dev, i);
		struct virtq q = {0};

		if (dev->saved.queues[i].ready > (i < dev->nr_queues ? 1U : 0U))
			return err_set(err, -EINVAL, "queue %u is ready", i);
		if (dev->active && dev->saved.queues[i].ready &&
			virtq_activate(&q, &config, dev->queue_size_max, dev->env.mem) < 0)
			return err_set(err, -EINVAL, "queue %u has a bad size or address", i);
	}
	return 0;
}

#define PADDING         "padding"
#define OF_THIS_MONITOR "of this monitor"
#define NO_WORK_IS_LEFT "no access is half done where the vCPUs are parked"
#define DRAINED         "drained before it is saved"

STATE_TABLE(, virtio_dev_state, struct virtio_dev, "virtio", validate_dev,
	STATE_FIXED_U32(struct virtio_dev, nr_queues),
	STATE_FIXED_U32(struct virtio_dev, queue_size_max),
	STATE_U32(struct virtio_dev, saved.status),
	STATE_U32(struct virtio_dev, saved.device_features_sel),
	STATE_U32(struct virtio_dev, saved.driver_features_sel),
	STATE_U32(struct virtio_dev, saved.queue_sel),
	STATE_U32(struct virtio_dev, saved.config_generation), STATE_U32(struct virtio_dev, gsi),
	STATE_U64(struct virtio_dev, saved.driver_features),
	STATE_NESTEDS(struct virtio_dev, saved.queues, &queue_regs_state),
	STATE_U32(struct virtio_dev, interrupt_status),
	STATE_NESTEDS(struct virtio_dev, queues, &virtq_state),
	STATE_BOOL(struct virtio_dev, active), STATE_BOOL(struct virtio_dev, needs_reset),
	STATE_TRANSIENT(struct virtio_dev, unused1, PADDING),
	STATE_TRANSIENT(struct virtio_dev, saved.unused, PADDING),
	STATE_TRANSIENT(struct virtio_dev, ops, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, env, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, features_offered, "what the driver took is checked"),
	STATE_TRANSIENT(struct virtio_dev, lock, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, work_done, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, config, "made by the device, of its own state"),
	STATE_TRANSIENT(struct virtio_dev, config_bytes, "made by the device"),
	STATE_TRANSIENT(struct virtio_dev, work, NO_WORK_IS_LEFT),
	STATE_TRANSIENT(struct virtio_dev, work_off, NO_WORK_IS_LEFT),
	STATE_TRANSIENT(struct virtio_dev, work_len, NO_WORK_IS_LEFT),
	STATE_TRANSIENT(struct virtio_dev, work_data, NO_WORK_IS_LEFT),
	STATE_TRANSIENT(struct virtio_dev, work_started, NO_WORK_IS_LEFT),
	STATE_TRANSIENT(struct virtio_dev, stopped, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, features, "of an active device, the driver's"),
	STATE_TRANSIENT(struct virtio_dev, paused, DRAINED),
	STATE_TRANSIENT(struct virtio_dev, drained, DRAINED),
	STATE_TRANSIENT(struct virtio_dev, drained_opaque, DRAINED),
	STATE_TRANSIENT(struct virtio_dev, notify, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, nr_notifies, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct virtio_dev, nr_interrupts, OF_THIS_MONITOR));

int virtio_dev_save(const struct virtio_dev *dev, struct buf *out)
{
	ASSERT(dev->paused && !dev->drained && dev->work == VIRTIO_WORK_NONE);
	return state_encode(dev->ops->state, dev, out);
}

// Puts the queues into use, where they were. validate_dev() has seen that they can be.
static void continue_queues(struct virtio_dev *dev)
{
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		const struct virtq at = dev->queues[i];
		const struct virtq_config config = queue_config(dev, i);
		int r;

		dev->queues[i] = (struct virtq){0};
		if (!dev->active || !dev->saved.queues[i].ready)
			continue;
		r = virtq_activate(&dev->queues[i], &config, dev->queue_size_max, dev->env.mem);
		ASSERT(r == 0);
		virtq_continue(&dev->queues[i], at.saved.next_avail, at.saved.next_used,
			at.saved.published_used);
	}
}

int virtio_dev_restore(struct virtio_dev *dev, const void *data, size_t len, struct err *err)
{
	int r;

	ASSERT(!dev->active && !dev->drained && !dev->saved.status);
	r = state_decode(dev->ops->state, data, len, dev, err);
	if (r < 0)
		return r;
	dev->paused = true;
	continue_queues(dev);
	if (dev->active) {
		dev->features = dev->saved.driver_features;
		if (dev->ops->restored)
			r = dev->ops->restored(dev, err);
		else if (dev->ops->activate)
			dev->ops->activate(dev);
	}
	// It may have been on its way into the guest. One too many does no harm.
	if (r == 0 && atomic_load_explicit(&dev->interrupt_status, memory_order_acquire))
		signal_fd(dev->env.irq_fd);
	return r < 0 ? err_wrap(err, r, "%s", dev->ops->name) : 0;
}

void virtio_dev_stop(struct virtio_dev *dev)
{
	pthread_mutex_lock(&dev->lock);
	dev->stopped = true;
	pthread_cond_broadcast(&dev->work_done);
	pthread_mutex_unlock(&dev->lock);
}

int virtio_dev_notify_fd(const struct virtio_dev *dev, unsigned int queue_idx)
{
	ASSERT(queue_idx < dev->nr_queues);
	return dev->notify[queue_idx].fd;
}

int virtio_dev_init(struct virtio_dev *dev, const struct virtio_ops *ops,
	const struct virtio_env *env, const struct virtio_dev_params *params, struct err *err)
{
	int r;

	ASSERT(params->nr_queues >= 1 && params->nr_queues <= VIRTIO_QUEUES_MAX);
	ASSERT(params->queue_size_max <= VIRTQ_SIZE_MAX);
	ASSERT(params->config_bytes <= VIRTIO_CONFIG_MAX_BYTES);
	memset(dev, 0, sizeof(*dev));
	dev->ops = ops;
	dev->env = *env;
	dev->gsi = env->gsi;
	dev->nr_queues = params->nr_queues;
	dev->queue_size_max = params->queue_size_max;
	dev->features_offered = params->features | RING_FEATURES;
	if (params->config_bytes)
		memcpy(dev->config, params->config, params->config_bytes);
	dev->config_bytes = params->config_bytes;
	pthread_mutex_init(&dev->lock, NULL);
	pthread_cond_init(&dev->work_done, NULL);
	for (unsigned int i = 0; i < VIRTIO_QUEUES_MAX; i++)
		dev->notify[i] = (struct virtio_notify){.dev = dev, .fd = -1, .watch = -1};
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		struct virtio_notify *notify = &dev->notify[i];

		notify->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (notify->fd < 0) {
			r = err_errno(err, -errno, "%s: eventfd", ops->name);
			goto fail;
		}
		r = loop_watch_add(env->loop, notify->fd, POLLIN, on_notify, notify, err);
		if (r < 0)
			goto fail;
		notify->watch = r;
	}
	return 0;
fail:
	virtio_dev_fini(dev);
	return r;
}

void virtio_dev_fini(struct virtio_dev *dev)
{
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		loop_watch_del(dev->env.loop, &dev->notify[i].watch);
		fd_close(&dev->notify[i].fd);
	}
	pthread_cond_destroy(&dev->work_done);
	pthread_mutex_destroy(&dev->lock);
}

void virtio_dev_destroy(struct virtio_dev *dev)
{
	if (dev)
		dev->ops->destroy(dev);
}
