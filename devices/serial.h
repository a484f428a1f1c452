// SPDX-License-Identifier: Apache-2.0
// A 16550A UART: the guest's console.
//
// The vCPU threads reach the registers through serial_bus_ops; the loop thread gives input, takes
// output and makes everything else. One lock, held for the time of a register access alone.
//
// Output goes to a ring of SERIAL_TX_BYTES, which the loop hands to the sink in batches, at most
// one every SERIAL_FLUSH_NS unless the ring runs full: no system call a byte. A guest that prints
// faster than the sink takes loses the oldest bytes, which are counted.
#ifndef MAYFLY_DEVICES_SERIAL_H
#define MAYFLY_DEVICES_SERIAL_H

#include "vmm/base/err.h"
#include "vmm/bus.h"

struct buf;
struct loop;
struct serial;
struct state_table;

#define SERIAL_COM1_PORT 0x3f8
#define SERIAL_COM1_IRQ  4
#define SERIAL_NR_PORTS  8

#define SERIAL_TX_BYTES 16384U
#define SERIAL_RX_BYTES 4096U
#define SERIAL_FLUSH_NS 5000000ULL

struct serial_config {
	// Signalled for each rising edge of the interrupt line. Non-blocking; the caller's, and
	// stays open until destroy.
	int irq_fd;
	// Takes output, at most SERIAL_TX_BYTES a call. May be NULL. Loop thread.
	void (*sink)(void *opaque, const uint8_t *data, size_t len);
	// Called once there is room again after serial_input() took less than it was given. May be
	// NULL. Loop thread.
	void (*input_room)(void *opaque);
	void *opaque;
};

// -ENOMEM or the errno of eventfd(). Loop thread, or before it runs.
int serial_create(struct serial **ret_serial, const struct serial_config *config, struct loop *loop,
	struct err *err);

// What is in the ring still goes to the sink. Accepts NULL. After the vCPUs have stopped.
void serial_destroy(struct serial *serial);

// SERIAL_NR_PORTS bytes of ports; the opaque is the struct serial. Any thread.
extern const struct bus_ops serial_bus_ops;

// Queues input for the guest and returns how many bytes were taken, which is fewer than len when
// the queue is full. Loop thread.
size_t serial_input(struct serial *serial, const void *data, size_t len);

// Hands what is in the ring to the sink now. Loop thread, or after it has ended.
void serial_flush(struct serial *serial);

// What the guest has printed is not part of it: serial_flush() comes first. The vCPUs do not run.
// save: 0 or -ENOMEM. restore: -EINVAL, and nothing has changed; serial_resume() comes after it.
int serial_save(struct serial *serial, struct buf *out);
int serial_restore(struct serial *serial, const void *data, size_t len, struct err *err);

// Of the whole struct, for tests.
extern const struct state_table serial_state;

// Signals the interrupt again if one is pending: an edge that was on its way when the machine
// was saved is not in the saved state, and a driver that waits for it would wait for ever.
void serial_resume(struct serial *serial);

// Bytes that the guest has printed, and those of them that were dropped. Any thread.
void serial_counts(struct serial *serial, uint64_t *ret_bytes, uint64_t *ret_dropped);

#endif
