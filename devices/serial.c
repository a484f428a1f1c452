// SPDX-License-Identifier: Apache-2.0
// A 16550A UART. Registers: vCPU threads, under the lock. Input, flush, timer: loop thread.
#include "devices/serial.h"

#include <errno.h>
#include <linux/serial_reg.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/state.h"
#include "vmm/loop.h"

#define FIFO_BYTES   16U
#define IIR_FIFOS_ON 0xc0 // what tells a 16550A from its elders

// Causes of an interrupt. A bit each, as in IER.
#define CAUSE_RX     UART_IER_RDI
#define CAUSE_THRE   UART_IER_THRI
#define CAUSE_LINE   UART_IER_RLSI
#define CAUSE_MODEM  UART_IER_MSI
#define IER_WRITABLE (CAUSE_RX | CAUSE_THRE | CAUSE_LINE | CAUSE_MODEM)

#define MCR_WRITABLE (UART_MCR_DTR | UART_MCR_RTS | UART_MCR_OUT1 | UART_MCR_OUT2 | UART_MCR_LOOP)
// A terminal that is always there and ready.
#define MSR_LINES (UART_MSR_DCD | UART_MSR_DSR | UART_MSR_CTS)

struct serial {
	pthread_mutex_t lock;
	struct {
		uint8_t ier, lcr, mcr, fcr, scr, dll, dlm;
		uint8_t msr_lines; // the upper half of MSR
		uint8_t msr_deltas; // the lower half: changes since MSR was last read
		uint8_t overrun; // UART_LSR_OE or 0
		uint8_t thre_pending; // THR has become empty and IIR has not told so yet
		uint8_t unused; // padding
		uint32_t rx_head, rx_len;
		uint8_t rx[SERIAL_RX_BYTES];
	} saved;
	uint8_t tx[SERIAL_TX_BYTES]; // flushed before a save
	uint32_t tx_head, tx_len;
	uint32_t unused2; // padding
	uint64_t tx_bytes, tx_dropped;
	bool wake_sent; // the loop has been told to flush at its leisure
	bool hurry_sent; // and then to do so at once
	bool input_refused; // serial_input() took less than it was given
	bool room_sent; // and the loop has been told that there is room again
	uint8_t unused1[4]; // padding

	// Set once.
	struct serial_config config;
	struct loop *loop;
	int wake_fd;
	// Loop thread only.
	int wake_watch;
	struct loop_timer flush_timer;
};

static void signal_fd(int fd)
{
	uint64_t one = 1;
	// It fails only when the counter is at its end, and then the other side has been told.
	ssize_t ignored = write(fd, &one, sizeof(one));

	(void)ignored;
}

static uint8_t causes(const struct serial *s)
{
	uint8_t pending = 0;

	if (s->saved.rx_len)
		pending |= CAUSE_RX;
	if (s->saved.thre_pending)
		pending |= CAUSE_THRE;
	if (s->saved.overrun)
		pending |= CAUSE_LINE;
	if (s->saved.msr_deltas)
		pending |= CAUSE_MODEM;
	return pending & s->saved.ier;
}

// In the order of their priority.
static uint8_t read_iir(struct serial *s)
{
	uint8_t active = causes(s);
	uint8_t fifo = s->saved.fcr & UART_FCR_ENABLE_FIFO ? IIR_FIFOS_ON : 0;

	if (active & CAUSE_LINE)
		return fifo | UART_IIR_RLSI;
	if (active & CAUSE_RX)
		return fifo | UART_IIR_RDI;
	if (active & CAUSE_THRE) {
		// Telling the driver is what clears this one.
		s->saved.thre_pending = 0;
		return fifo | UART_IIR_THRI;
	}
	if (active & CAUSE_MODEM)
		return fifo | UART_IIR_MSI;
	return fifo | UART_IIR_NO_INT;
}

static void rx_push(struct serial *s, uint8_t byte)
{
	s->saved.rx[(s->saved.rx_head + s->saved.rx_len) % SERIAL_RX_BYTES] = byte;
	s->saved.rx_len++;
}

static void rx_drop(struct serial *s, uint32_t count)
{
	s->saved.rx_head = (s->saved.rx_head + count) % SERIAL_RX_BYTES;
	s->saved.rx_len -= count;
}

static void tx_push(struct serial *s, uint8_t byte)
{
	s->tx_bytes++;
	if (s->tx_len == SERIAL_TX_BYTES) {
		s->tx_head = (s->tx_head + 1) % SERIAL_TX_BYTES;
		s->tx_len--;
		s->tx_dropped++;
	}
	s->tx[(s->tx_head + s->tx_len) % SERIAL_TX_BYTES] = byte;
	s->tx_len++;
}

static void write_thr(struct serial *s, uint8_t byte)
{
	if (!(s->saved.mcr & UART_MCR_LOOP))
		tx_push(s, byte);
	else if (s->saved.rx_len < SERIAL_RX_BYTES)
		rx_push(s, byte);
	else
		s->saved.overrun = UART_LSR_OE;
	// Sent as soon as written: THR is empty again.
	s->saved.thre_pending = 1;
}

static void write_mcr(struct serial *s, uint8_t val)
{
	uint8_t lines = MSR_LINES, changed;

	s->saved.mcr = val & MCR_WRITABLE;
	if (val & UART_MCR_LOOP)
		lines = (uint8_t)((val & UART_MCR_RTS ? UART_MSR_CTS : 0) |
				  (val & UART_MCR_DTR ? UART_MSR_DSR : 0) |
				  (val & UART_MCR_OUT1 ? UART_MSR_RI : 0) |
				  (val & UART_MCR_OUT2 ? UART_MSR_DCD : 0));
	changed = lines ^ s->saved.msr_lines;
	if (changed & UART_MSR_CTS)
		s->saved.msr_deltas |= UART_MSR_DCTS;
	if (changed & UART_MSR_DSR)
		s->saved.msr_deltas |= UART_MSR_DDSR;
	if (changed & s->saved.msr_lines & UART_MSR_RI) // the trailing edge alone
		s->saved.msr_deltas |= UART_MSR_TERI;
	if (changed & UART_MSR_DCD)
		s->saved.msr_deltas |= UART_MSR_DDCD;
	s->saved.msr_lines = lines;
}

static uint8_t read_reg(struct serial *s, unsigned int reg)
{
	bool dlab = s->saved.lcr & UART_LCR_DLAB;
	uint8_t val;

	switch (reg) {
	case UART_RX:
		if (dlab)
			return s->saved.dll;
		if (!s->saved.rx_len)
			return 0;
		val = s->saved.rx[s->saved.rx_head];
		rx_drop(s, 1);
		return val;
	case UART_IER:
		return dlab ? s->saved.dlm : s->saved.ier;
	case UART_IIR:
		return read_iir(s);
	case UART_LCR:
		return s->saved.lcr;
	case UART_MCR:
		return s->saved.mcr;
	case UART_LSR:
		val = (uint8_t)(UART_LSR_THRE | UART_LSR_TEMT | s->saved.overrun |
				(s->saved.rx_len ? UART_LSR_DR : 0));
		s->saved.overrun = 0;
		return val;
	case UART_MSR:
		val = s->saved.msr_lines | s->saved.msr_deltas;
		s->saved.msr_deltas = 0;
		return val;
	default:
		return s->saved.scr;
	}
}

static void write_reg(struct serial *s, unsigned int reg, uint8_t val)
{
	bool dlab = s->saved.lcr & UART_LCR_DLAB;

	switch (reg) {
	case UART_TX:
		if (dlab)
			s->saved.dll = val;
		else
			write_thr(s, val);
		break;
	case UART_IER:
		if (dlab) {
			s->saved.dlm = val;
			break;
		}
		// THR is always empty: to enable its interrupt is to raise it. Linux relies on this
		// to start transmission, and tests for it when it opens the port.
		if (val & ~s->saved.ier & CAUSE_THRE)
			s->saved.thre_pending = 1;
		s->saved.ier = val & IER_WRITABLE;
		break;
	case UART_FCR:
		// Only what the FIFO of the chip would hold is cleared; what waits behind it has
		// not been received yet.
		if (val & UART_FCR_CLEAR_RCVR)
			rx_drop(s, MIN(s->saved.rx_len, FIFO_BYTES));
		s->saved.fcr = val & UART_FCR_ENABLE_FIFO;
		break;
	case UART_LCR:
		s->saved.lcr = val;
		break;
	case UART_MCR:
		write_mcr(s, val);
		break;
	case UART_SCR:
		s->saved.scr = val;
		break;
	default: // LSR and MSR are read-only
		break;
	}
}

static void serial_bus_read(void *opaque, uint64_t off, uint8_t *data, unsigned int len)
{
	struct serial *s = opaque;
	bool room;

	memset(data, 0, len);
	if (len != 1)
		return;
	pthread_mutex_lock(&s->lock);
	data[0] = read_reg(s, (unsigned int)off);
	room = s->input_refused && s->saved.rx_len < SERIAL_RX_BYTES / 2;
	if (room) {
		s->input_refused = false;
		s->room_sent = true;
	}
	pthread_mutex_unlock(&s->lock);
	if (room)
		signal_fd(s->wake_fd);
}

static void serial_bus_write(void *opaque, uint64_t off, const uint8_t *data, unsigned int len)
{
	struct serial *s = opaque;
	bool irq, wake = false;
	uint8_t before;

	if (len != 1)
		return;
	pthread_mutex_lock(&s->lock);
	before = causes(s);
	write_reg(s, (unsigned int)off, data[0]);
	irq = causes(s) & ~before;
	if (s->tx_len && !s->wake_sent)
		wake = s->wake_sent = true;
	if (s->tx_len > SERIAL_TX_BYTES / 2 && !s->hurry_sent)
		wake = s->hurry_sent = true;
	pthread_mutex_unlock(&s->lock);
	if (irq)
		signal_fd(s->config.irq_fd);
	if (wake)
		signal_fd(s->wake_fd);
}

const struct bus_ops serial_bus_ops = {.read = serial_bus_read, .write = serial_bus_write};

void serial_flush(struct serial *s)
{
	uint8_t chunk[4096];
	uint32_t budget;

	pthread_mutex_lock(&s->lock);
	// What is printed from here on wakes us again, so that a flood cannot hold the loop.
	s->wake_sent = s->hurry_sent = false;
	budget = s->tx_len;
	while (budget && s->tx_len) {
		uint32_t len = MIN(budget, s->tx_len);

		len = MIN(len, SERIAL_TX_BYTES - s->tx_head);
		len = MIN(len, (uint32_t)sizeof(chunk));
		memcpy(chunk, s->tx + s->tx_head, len);
		s->tx_head = (s->tx_head + len) % SERIAL_TX_BYTES;
		s->tx_len -= len;
		budget -= len;
		pthread_mutex_unlock(&s->lock);
		if (s->config.sink)
			s->config.sink(s->config.opaque, chunk, len);
		pthread_mutex_lock(&s->lock);
	}
	pthread_mutex_unlock(&s->lock);
}

static void on_flush_timer(struct loop_timer *timer)
{
	serial_flush(container_of(timer, struct serial, flush_timer));
}

static void on_wake(void *opaque, uint32_t revents)
{
	struct serial *s = opaque;
	bool hurry, room;
	uint64_t count;

	(void)revents;
	if (read(s->wake_fd, &count, sizeof(count)) != sizeof(count))
		return;
	pthread_mutex_lock(&s->lock);
	hurry = s->hurry_sent;
	room = s->room_sent;
	s->room_sent = false;
	pthread_mutex_unlock(&s->lock);
	if (hurry) {
		loop_timer_cancel(s->loop, &s->flush_timer);
		serial_flush(s);
	} else if (!s->flush_timer.armed) {
		loop_timer_set(s->loop, &s->flush_timer, now_ns() + SERIAL_FLUSH_NS);
	}
	if (room && s->config.input_room)
		s->config.input_room(s->config.opaque);
}

size_t serial_input(struct serial *s, const void *data, size_t len)
{
	const uint8_t *bytes = data;
	size_t taken = 0;
	bool irq;

	pthread_mutex_lock(&s->lock);
	while (taken < len && s->saved.rx_len < SERIAL_RX_BYTES)
		rx_push(s, bytes[taken++]);
	s->input_refused = taken < len;
	irq = causes(s) & CAUSE_RX;
	pthread_mutex_unlock(&s->lock);
	if (irq)
		signal_fd(s->config.irq_fd);
	return taken;
}

void serial_resume(struct serial *s)
{
	bool irq;

	pthread_mutex_lock(&s->lock);
	irq = causes(s);
	pthread_mutex_unlock(&s->lock);
	if (irq)
		signal_fd(s->config.irq_fd);
}

static int validate(const void *decoded, struct err *err)
{
	const struct serial *s = decoded;

	if (s->saved.rx_head >= SERIAL_RX_BYTES || s->saved.rx_len > SERIAL_RX_BYTES)
		return err_set(
			err, -EINVAL, "%u bytes of input at %u", s->saved.rx_len, s->saved.rx_head);
	return 0;
}

#define OF_THIS_MONITOR "of this monitor"
#define FLUSHED         "flushed before it is saved"

STATE_TABLE(, serial_state, struct serial, "serial", validate, STATE_U8(struct serial, saved.ier),
	STATE_U8(struct serial, saved.lcr), STATE_U8(struct serial, saved.mcr),
	STATE_U8(struct serial, saved.fcr), STATE_U8(struct serial, saved.scr),
	STATE_U8(struct serial, saved.dll), STATE_U8(struct serial, saved.dlm),
	STATE_U8(struct serial, saved.msr_lines), STATE_U8(struct serial, saved.msr_deltas),
	STATE_U8(struct serial, saved.overrun), STATE_U8(struct serial, saved.thre_pending),
	STATE_U32(struct serial, saved.rx_head), STATE_U32(struct serial, saved.rx_len),
	STATE_BYTES(struct serial, saved.rx),
	STATE_TRANSIENT(struct serial, saved.unused, "padding"),
	STATE_TRANSIENT(struct serial, unused1, "padding"),
	STATE_TRANSIENT(struct serial, unused2, "padding"),
	STATE_TRANSIENT(struct serial, lock, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, tx, FLUSHED),
	STATE_TRANSIENT(struct serial, tx_head, FLUSHED),
	STATE_TRANSIENT(struct serial, tx_len, FLUSHED),
	STATE_TRANSIENT(struct serial, tx_bytes, "counted anew"),
	STATE_TRANSIENT(struct serial, tx_dropped, "counted anew"),
	STATE_TRANSIENT(struct serial, wake_sent, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, hurry_sent, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, input_refused, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, room_sent, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, config, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, loop, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, wake_fd, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, wake_watch, OF_THIS_MONITOR),
	STATE_TRANSIENT(struct serial, flush_timer, OF_THIS_MONITOR));

int serial_save(struct serial *s, struct buf *out)
{
	int r;

	pthread_mutex_lock(&s->lock);
	r = state_encode(&serial_state, s, out);
	pthread_mutex_unlock(&s->lock);
	return r;
}

int serial_restore(struct serial *s, const void *data, size_t len, struct err *err)
{
	int r;

	pthread_mutex_lock(&s->lock);
	r = state_decode(&serial_state, data, len, s, err);
	pthread_mutex_unlock(&s->lock);
	return r;
}

void serial_counts(struct serial *s, uint64_t *ret_bytes, uint64_t *ret_dropped)
{
	pthread_mutex_lock(&s->lock);
	*ret_bytes = s->tx_bytes;
	*ret_dropped = s->tx_dropped;
	pthread_mutex_unlock(&s->lock);
}

int serial_create(struct serial **ret_serial, const struct serial_config *config, struct loop *loop,
	struct err *err)
{
	struct serial *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return err_errno(err, -ENOMEM, "serial port");
	pthread_mutex_init(&s->lock, NULL);
	s->config = *config;
	s->loop = loop;
	s->wake_watch = -1;
	s->flush_timer.fire = on_flush_timer;
	s->saved.msr_lines = MSR_LINES;
	s->saved.mcr = UART_MCR_OUT2;
	s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->wake_fd < 0) {
		r = err_errno(err, -errno, "serial port: eventfd");
		goto fail;
	}
	r = loop_watch_add(loop, s->wake_fd, POLLIN, on_wake, s, err);
	if (r < 0)
		goto fail;
	s->wake_watch = r;
	*ret_serial = s;
	return 0;
fail:
	serial_destroy(s);
	return r;
}

void serial_destroy(struct serial *s)
{
	if (!s)
		return;
	serial_flush(s);
	loop_timer_cancel(s->loop, &s->flush_timer);
	loop_watch_del(s->loop, &s->wake_watch);
	fd_close(&s->wake_fd);
	pthread_mutex_destroy(&s->lock);
	free(s);
}
