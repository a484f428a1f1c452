// SPDX-License-Identifier: Apache-2.0
// What all virtio devices share: the virtio-mmio transport, version 2 (virtio 1.2, 4.2).
//
// The transport owns status, features, selectors, interrupt status and the queues' registers. A
// device sees activated, validated queues only, and is one struct virtio_ops plus its own struct,
// with a struct virtio_dev embedded in it.
//
// Threads, in one rule: a device and its queues belong to the loop thread, and its ops are called
// there alone, so that a device has no lock. The vCPU threads touch the registers, under
// virtio_dev.lock, which is held for a few instructions. A register write that concerns the device
// (DRIVER_OK, reset of an active device, configuration) is posted to the loop thread, and the vCPU
// waits for its end, without the lock. Hence whoever waits for vCPUs on the loop thread keeps
// turning the loop meanwhile, and who will not turn it any more calls virtio_dev_stop(). The
// registers of the data path (InterruptStatus, InterruptACK, QueueNotify) take no lock at all.
//
//              virtio_dev_init                                        virtio_dev_fini
//                    |                                                      ^
//                    v      DRIVER_OK: activate()                           |
//                 inactive ----------------------> active --> needs reset   |
//                    ^                               |            |         |
//                    +---- reset: drain(), reset() <-+------------+         |
//                    +------------------------------------------------------+
#ifndef MAYFLY_DEVICES_VIRTIO_MMIO_H
#define MAYFLY_DEVICES_VIRTIO_MMIO_H

#include <pthread.h>

#include "devices/virtqueue.h"
#include "vmm/base/state.h"
#include "vmm/bus.h"

struct loop;
struct virtio_dev;

#define VIRTIO_MMIO_BYTES       0x200U // of address space a device; on a page of its own
#define VIRTIO_MMIO_NOTIFY_OFF  0x50U // 4 bytes; the value written is the queue's index
#define VIRTIO_QUEUES_MAX       8U
#define VIRTIO_CONFIG_MAX_BYTES 128U

struct virtio_ops {
	const char *name; // for logs
	uint32_t device_id; // VIRTIO_ID_*

	// The queues that the driver has set up are active, dev->features is what was negotiated.
	// queue_notify() for each of them follows at once. May be NULL.
	void (*activate)(struct virtio_dev *dev);

	// The driver has made buffers available, maybe. Only while active.
	void (*queue_notify)(struct virtio_dev *dev, unsigned int queue_idx);

	// The driver has written to dev->config, [off, off + len) of it. NULL: it is read-only.
	void (*config_written)(struct virtio_dev *dev, uint32_t off, uint32_t len);

	// Take no more requests. True if none is in flight; otherwise the device calls
	// virtio_dev_drained() when that is so. NULL: nothing ever is in flight.
	bool (*drain)(struct virtio_dev *dev);

	// Go on after drain(), as if nothing had happened; queue_notify() for each queue follows.
	// May be NULL.
	void (*resume)(struct virtio_dev *dev);

	// The device has been restored, active and drained: makes anew what activate() makes.
	// -EINVAL for a state that cannot be. NULL: activate() does.
	int (*restored)(struct virtio_dev *dev, struct err *err);

	// Of the device's own struct, which begins with its struct virtio_dev.
	const struct state_table *state;

	// Back to the state before activate(), from that after drain(). The queues are still there
	// but will not be after it.
	void (*reset)(struct virtio_dev *dev);

	// Frees the device, on virtio_dev_destroy(). Calls virtio_dev_fini().
	void (*destroy)(struct virtio_dev *dev);
};

// What a device is given when it is made. All of it outlives the device.
struct virtio_env {
	const struct guest_mem *mem;
	struct loop *loop;
	int irq_fd; // signalled for each interrupt, an edge
	uint32_t gsi; // which interrupt that is, for a guest that boots, or one whose snapshot is
		      // silent
};

struct virtio_queue_regs {
	uint32_t size;
	uint32_t ready;
	uint64_t desc, avail, used;
};

enum virtio_work { VIRTIO_WORK_NONE, VIRTIO_WORK_ACTIVATE, VIRTIO_WORK_RESET, VIRTIO_WORK_CONFIG };

struct virtio_dev {
	const struct virtio_ops *ops;
	struct virtio_env env;
	unsigned int nr_queues;
	uint32_t queue_size_max;
	uint64_t features_offered;

	// The registers; under lock.
	pthread_mutex_t lock;
	pthread_cond_t work_done;
	struct {
		uint32_t status;
		uint32_t device_features_sel;
		uint32_t driver_features_sel;
		uint32_t queue_sel;
		uint32_t config_generation;
		uint32_t unused; // padding
		uint64_t driver_features;
		struct virtio_queue_regs queues[VIRTIO_QUEUES_MAX];
	} saved;
	uint8_t config[VIRTIO_CONFIG_MAX_BYTES];
	uint32_t config_bytes;
	enum virtio_work work; // posted and not yet done; register accesses wait
	uint32_t work_off, work_len;
	uint64_t work_data;
	bool stopped;
	uint8_t unused1[3]; // padding

	_Atomic uint32_t interrupt_status; // saved

	// Loop thread only.
	struct virtq queues[VIRTIO_QUEUES_MAX];
	uint64_t features; // negotiated; 0 while inactive
	bool active;
	bool needs_reset;
	bool paused; // drained, or about to be
	bool work_started;
	uint32_t gsi; // the interrupt that the guest was told of; its VM's affair
	void (*drained)(void *opaque);
	void *drained_opaque;
	struct virtio_notify {
		struct virtio_dev *dev;
		int fd;
		int watch;
	} notify[VIRTIO_QUEUES_MAX];
	uint64_t nr_notifies, nr_interrupts;
};

// --- For the VM ------------------------------------------------------------------------------

// VIRTIO_MMIO_BYTES of MMIO; the opaque is the struct virtio_dev. vCPU threads.
extern const struct bus_ops virtio_mmio_bus_ops;

// The eventfd that stands for a write of queue_idx to VIRTIO_MMIO_NOTIFY_OFF; for
// KVM_IOEVENTFD. queue_idx < dev->nr_queues.
int virtio_dev_notify_fd(const struct virtio_dev *dev, unsigned int queue_idx);

// Stops intake and calls done (maybe at once) when nothing is in flight. The vCPUs have stopped.
// resume() undoes it. Loop thread.
void virtio_dev_drain(struct virtio_dev *dev, void (*done)(void *opaque), void *opaque);
void virtio_dev_resume(struct virtio_dev *dev);

// Appends the state of a drained device. 0 or -ENOMEM. Loop thread.
int virtio_dev_save(const struct virtio_dev *dev, struct buf *out);

// The reverse, into a device that was just made, over the guest memory that was saved along with
// it, before the vCPUs run and after kvm_restore(), since an interrupt that the driver has not
// acknowledged is sent again. It is drained then: virtio_dev_resume() starts it. -EINVAL for a
// state that no such device can be in, or another device's; then this one is good for
// virtio_dev_destroy() alone.
int virtio_dev_restore(struct virtio_dev *dev, const void *data, size_t len, struct err *err);

// The interrupt that the guest knows it by.
static inline uint32_t virtio_dev_gsi(const struct virtio_dev *dev)
{
	return dev->gsi;
}

// Releases vCPU threads that wait for the loop thread, for good. Any thread.
void virtio_dev_stop(struct virtio_dev *dev);

// Frees the device. Accepts NULL. The vCPUs have stopped, the loop still exists, and operations in
// flight have been drained. Loop thread, or after it has ended.
void virtio_dev_destroy(struct virtio_dev *dev);

// A register write from the loop thread itself, its work included; for tests and fuzzers.
void virtio_mmio_write_on_loop(
	struct virtio_dev *dev, uint64_t off, const uint8_t *data, unsigned int len);

// The part of a device's state that all have; nested in the device's own table.
extern const struct state_table virtio_dev_state;

// --- For devices; loop thread ----------------------------------------------------------------

struct virtio_dev_params {
	uint64_t features; // of the device type; those of the ring are added
	unsigned int nr_queues; // 1 to VIRTIO_QUEUES_MAX
	uint32_t queue_size_max; // power of two, at most VIRTQ_SIZE_MAX
	const void *config; // copied
	uint32_t config_bytes;
};

// 0, or the errno of eventfd() or -ENOMEM; then there is nothing to fini.
int virtio_dev_init(struct virtio_dev *dev, const struct virtio_ops *ops,
	const struct virtio_env *env, const struct virtio_dev_params *params, struct err *err);
void virtio_dev_fini(struct virtio_dev *dev);

// What drain() has waited for.
void virtio_dev_drained(struct virtio_dev *dev);

// Shows the driver what was pushed on the queues of the mask. True if it wants an interrupt for it,
// which virtio_dev_interrupt() is then to send, soon; virtio_dev_publish() does both at once.
bool virtio_dev_show(struct virtio_dev *dev, unsigned int queue_mask);
void virtio_dev_interrupt(struct virtio_dev *dev);
void virtio_dev_publish(struct virtio_dev *dev, unsigned int queue_mask);

// Calls queue_notify() again in the next turn of the loop, so that the others have theirs.
void virtio_dev_notify_again(struct virtio_dev *dev, unsigned int queue_idx);

// Changes the configuration and tells the driver.
void virtio_dev_set_config(struct virtio_dev *dev, uint32_t off, const void *data, uint32_t len);

// The driver has lied: no more of its buffers are taken until it resets the device. why is for
// the log.
void virtio_dev_set_needs_reset(struct virtio_dev *dev, const char *why);

// Whether requests are to be taken from the queues.
static inline bool virtio_dev_running(const struct virtio_dev *dev)
{
	return dev->active && !dev->needs_reset && !dev->paused;
}

#endif
