// SPDX-License-Identifier: Apache-2.0
// A driver over guest memory, as a guest's would be, for unit tests, fuzzers and the bench: it
// talks to one device through its registers and rings, and can be made to lie.
//
// Whoever calls it is the loop thread of the device as well: turns of the loop happen in
// fake_run(), fake_run_until() and register writes alone.
#ifndef MAYFLY_TESTS_FAKE_DRIVER_H
#define MAYFLY_TESTS_FAKE_DRIVER_H

#include "devices/virtio_mmio.h"
#include "vmm/loop.h"

#define FAKE_RAM_BYTES (16 * MIB)
#define FAKE_GSI       5U

struct fake_buf {
	gpa_t gpa;
	uint32_t len;
	bool writable;
};

struct fake_queue {
	uint16_t size; // 0: not set up
	gpa_t desc, avail, used;
	uint16_t avail_idx, used_idx; // the driver's own
	uint16_t kicked_idx; // what the device has been told of
	uint16_t free_head, nr_free;
	uint16_t next[VIRTQ_SIZE_MAX]; // of a free descriptor
	uint16_t chain_len[VIRTQ_SIZE_MAX]; // by head
	uint64_t nr_kicks;
};

struct fake_driver {
	struct guest_mem mem;
	struct loop loop;
	int irq_fd;
	struct virtio_dev *dev; // owned once attached
	uint64_t features;
	struct fake_queue queues[VIRTIO_QUEUES_MAX];
	uint64_t next_free; // guest memory handed out so far
};

// RAM, a loop, an interrupt. Then a device is made with fake_env() and attached.
void fake_init(struct fake_driver *fake);
struct virtio_env fake_env(struct fake_driver *fake);
void fake_attach(struct fake_driver *fake, struct virtio_dev *dev);
// Destroys the device, so that another may be attached; memory and loop stay.
void fake_detach(struct fake_driver *fake);
void fake_fini(struct fake_driver *fake);

uint32_t fake_read(struct fake_driver *fake, uint64_t off);
void fake_write(struct fake_driver *fake, uint64_t off, uint32_t val);
uint32_t fake_status(struct fake_driver *fake);
uint64_t fake_device_features(struct fake_driver *fake);

// Reset, ACKNOWLEDGE, DRIVER, features (of those that the device offers), FEATURES_OK. True if the
// device took them.
bool fake_negotiate(struct fake_driver *fake, uint64_t features);
// Gives a queue its rings, of the given size, and makes it ready.
void fake_setup_queue(struct fake_driver *fake, unsigned int queue_idx, uint16_t size);
// The same, without rings: writes the registers as they are.
void fake_write_queue(struct fake_driver *fake, unsigned int queue_idx, uint32_t size,
	uint64_t desc, uint64_t avail, uint64_t used);
// All of it, with all queues at their largest and every feature. Asserts that it went well.
void fake_start(struct fake_driver *fake);
void fake_start_with(struct fake_driver *fake, uint64_t features, uint16_t size);

// Zeroed guest memory at a page boundary, until the next fake_negotiate().
gpa_t fake_alloc(struct fake_driver *fake, size_t bytes);

// Makes a chain available and returns its head, or -1 when there are too few descriptors.
int fake_add(struct fake_driver *fake, unsigned int queue_idx, const struct fake_buf *bufs,
	unsigned int nr);
// The same with an indirect table (in fresh guest memory unless table is not 0).
int fake_add_indirect(struct fake_driver *fake, unsigned int queue_idx, const struct fake_buf *bufs,
	unsigned int nr, gpa_t table);
// Notifies the device, if it wants to be.
void fake_kick(struct fake_driver *fake, unsigned int queue_idx);
// Takes the next used element. True if there was one; then its descriptors are free again.
bool fake_get_used(struct fake_driver *fake, unsigned int queue_idx, int *ret_head,
	uint32_t *ret_written_bytes);
// Asks for an interrupt for the next used element.
void fake_want_irq(struct fake_driver *fake, unsigned int queue_idx);

// For lies.
void fake_put_desc(struct fake_driver *fake, unsigned int queue_idx, uint16_t idx, uint64_t addr,
	uint32_t len, uint16_t flags, uint16_t next);
void fake_put_avail(struct fake_driver *fake, unsigned int queue_idx, uint16_t head);
void fake_put_avail_idx(struct fake_driver *fake, unsigned int queue_idx, uint16_t idx);

// Turns of the loop until nothing happens at once.
void fake_run(struct fake_driver *fake);
// Until the condition holds; false after ten seconds without.
bool fake_run_until(struct fake_driver *fake, bool (*cond)(void *opaque), void *opaque);

// Interrupts since last asked.
uint64_t fake_irqs(struct fake_driver *fake);

// What is open in this process.
unsigned int fake_count_fds(void);

#endif
