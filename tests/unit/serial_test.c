// SPDX-License-Identifier: Apache-2.0
// devices/serial: what Linux's 8250 driver relies upon, and that neither a flood nor a slow reader
// costs memory.
#include "tests/support/test.h"

#include <errno.h>
#include <linux/serial_reg.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "devices/serial.h"
#include "vmm/base/fd.h"
#include "vmm/base/state.h"
#include "vmm/loop.h"

static struct {
	struct loop loop;
	struct serial *serial;
	int irq_fd;
	char *out;
	size_t out_len;
	unsigned int sink_calls;
	unsigned int room_calls;
} t;

static void sink(void *opaque, const uint8_t *data, size_t len)
{
	(void)opaque;
	assert_true(len <= SERIAL_TX_BYTES);
	t.out = realloc(t.out, t.out_len + len);
	assert_non_null(t.out);
	memcpy(t.out + t.out_len, data, len);
	t.out_len += len;
	t.sink_calls++;
}

static void input_room(void *opaque)
{
	(void)opaque;
	t.room_calls++;
}

static int setup(void **state)
{
	struct err err = {0};

	(void)state;
	memset(&t, 0, sizeof(t));
	t.irq_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (t.irq_fd < 0 || loop_init(&t.loop, &err) < 0)
		return -1;
	return serial_create(&t.serial,
		&(struct serial_config){.irq_fd = t.irq_fd, .sink = sink, .input_room = input_room},
		&t.loop, &err);
}

static int teardown(void **state)
{
	(void)state;
	serial_destroy(t.serial);
	serial_destroy(NULL);
	loop_fini(&t.loop);
	fd_close(&t.irq_fd);
	free(t.out);
	return 0;
}

static uint8_t in(unsigned int reg)
{
	uint8_t val = 0xee;

	serial_bus_ops.read(t.serial, reg, &val, 1);
	return val;
}

static void out(unsigned int reg, uint8_t val)
{
	serial_bus_ops.write(t.serial, reg, &val, 1);
}

static uint64_t irqs(void)
{
	uint64_t count = 0;

	return read(t.irq_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

static void turn_until(bool (*done)(void))
{
	struct err err = {0};
	uint64_t deadline = now_ns() + 5000000000ULL;

	while (!done()) {
		assert_true(now_ns() < deadline);
		assert_int_equal(loop_turn(&t.loop, 20000000, &err), 0);
	}
}

static bool something_printed(void)
{
	return t.out_len > 0;
}

static bool room_announced(void)
{
	return t.room_calls > 0;
}

// The probes of autoconfig() and autoconfig_16550a().
static void linux_recognises_a_16550a(void **state)
{
	(void)state;
	out(UART_IER, 0);
	assert_int_equal(in(UART_IER)&0x0f, 0);
	out(UART_IER, 0x0f);
	assert_int_equal(in(UART_IER), 0x0f);
	out(UART_IER, 0xff);
	assert_int_equal(in(UART_IER), 0x0f);
	out(UART_IER, 0);
	out(UART_MCR, UART_MCR_LOOP | UART_MCR_OUT2 | UART_MCR_RTS);
	assert_int_equal(in(UART_MSR)&0xf0, UART_MSR_DCD | UART_MSR_CTS);
	out(UART_MCR, 0);
	assert_int_equal(in(UART_MSR)&0xf0, UART_MSR_DCD | UART_MSR_DSR | UART_MSR_CTS);
	assert_int_equal(in(UART_MSR)&0x0f, 0);
	out(UART_LCR, UART_LCR_CONF_MODE_B);
	out(UART_EFR, 0);
	out(UART_LCR, 0);
	out(UART_FCR, UART_FCR_ENABLE_FIFO);
	assert_int_equal(in(UART_IIR) >> 6, 3);
	out(UART_FCR, UART_FCR_ENABLE_FIFO | UART_FCR7_64BYTE);
	assert_int_equal(in(UART_IIR) >> 5, 6); // no 64-byte FIFO
	out(UART_FCR, 0);
	assert_int_equal(in(UART_IIR), UART_IIR_NO_INT);
	out(UART_SCR, 0xa5);
	assert_int_equal(in(UART_SCR), 0xa5);
	out(UART_LCR, UART_LCR_DLAB | UART_LCR_WLEN8);
	out(UART_DLL, 1);
	out(UART_DLM, 2);
	assert_int_equal(in(UART_DLL), 1);
	assert_int_equal(in(UART_DLM), 2);
	out(UART_LCR, UART_LCR_WLEN8);
	assert_int_equal(in(UART_IER), 0);
	assert_int_equal(t.out_len, 0);
	assert_int_equal(in(UART_LSR), UART_LSR_TEMT | UART_LSR_THRE);
}

// serial8250_do_startup()'s test: enabling THRI raises it again, each time.
static void enabling_thri_raises_it_each_time(void **state)
{
	(void)state;
	for (int i = 0; i < 3; i++) {
		out(UART_IER, UART_IER_THRI);
		assert_int_equal(irqs(), 1);
		assert_int_equal(in(UART_IIR), UART_IIR_THRI);
		assert_int_equal(in(UART_IIR), UART_IIR_NO_INT);
		out(UART_IER, 0);
		assert_int_equal(in(UART_IIR), UART_IIR_NO_INT);
	}
	assert_int_equal(irqs(), 0);
}

// A handler sends 16 bytes, and is called again for the next 16: one interrupt for both.
static void each_burst_ends_in_one_thre_interrupt(void **state)
{
	(void)state;
	out(UART_IER, UART_IER_THRI);
	for (int burst = 0; burst < 100; burst++) {
		assert_int_equal(irqs(), 1);
		assert_int_equal(in(UART_IIR), UART_IIR_THRI);
		for (int i = 0; i < 16; i++)
			out(UART_TX, 'x');
	}
	assert_int_equal(irqs(), 1);
	serial_flush(t.serial);
	assert_int_equal(t.out_len, 1600);
}

// An edge that was under way when the state was saved is repeated, and none is made up.
static void resume_repeats_a_pending_interrupt(void **state)
{
	(void)state;
	serial_resume(t.serial);
	assert_int_equal(irqs(), 0);
	out(UART_IER, UART_IER_THRI);
	assert_int_equal(irqs(), 1);
	serial_resume(t.serial);
	assert_int_equal(irqs(), 1);
	assert_int_equal(in(UART_IIR), UART_IIR_THRI);
	serial_resume(t.serial);
	assert_int_equal(irqs(), 0);
}

static void input_is_queued_bounded_and_announced(void **state)
{
	static uint8_t big[SERIAL_RX_BYTES + 100];

	(void)state;
	for (size_t i = 0; i < sizeof(big); i++)
		big[i] = (uint8_t)(i * 7);
	assert_int_equal(serial_input(t.serial, big, 3), 3);
	assert_int_equal(irqs(), 0);
	out(UART_IER, UART_IER_RDI);
	assert_int_equal(irqs(), 1);
	assert_int_equal(in(UART_IIR), UART_IIR_RDI);
	assert_int_equal(in(UART_LSR)&UART_LSR_DR, UART_LSR_DR);
	for (int i = 0; i < 3; i++)
		assert_int_equal(in(UART_RX), big[i]);
	assert_int_equal(in(UART_IIR), UART_IIR_NO_INT);
	assert_int_equal(in(UART_LSR)&UART_LSR_DR, 0);
	assert_int_equal(in(UART_RX), 0);

	assert_int_equal(serial_input(t.serial, big, sizeof(big)), SERIAL_RX_BYTES);
	assert_int_equal(irqs(), 1);
	assert_int_equal(serial_input(t.serial, big, 1), 0);
	for (size_t i = 0; i < SERIAL_RX_BYTES; i++)
		assert_int_equal(in(UART_RX), big[i]);
	turn_until(room_announced);
	assert_int_equal(t.room_calls, 1);
	assert_int_equal(serial_input(t.serial, big, 1), 1);
}

// What is still behind the chip's FIFO survives the driver's clearing it at start-up.
static void clearing_the_fifo_loses_no_more_than_the_fifo(void **state)
{
	uint8_t bytes[20];

	(void)state;
	for (unsigned int i = 0; i < sizeof(bytes); i++)
		bytes[i] = (uint8_t)i;
	serial_input(t.serial, bytes, sizeof(bytes));
	out(UART_FCR, UART_FCR_ENABLE_FIFO | UART_FCR_CLEAR_RCVR | UART_FCR_CLEAR_XMIT);
	assert_int_equal(in(UART_RX), 16);
	out(UART_FCR, UART_FCR_ENABLE_FIFO | UART_FCR_CLEAR_RCVR);
	assert_int_equal(in(UART_LSR)&UART_LSR_DR, 0);
}

static void loopback_returns_what_is_sent(void **state)
{
	(void)state;
	out(UART_MCR, UART_MCR_LOOP | UART_MCR_OUT1 | UART_MCR_DTR);
	out(UART_IER, UART_IER_RDI | UART_IER_RLSI | UART_IER_MSI);
	irqs();
	in(UART_MSR);
	assert_int_equal(in(UART_MSR), UART_MSR_RI | UART_MSR_DSR);
	out(UART_TX, 'a');
	assert_int_equal(irqs(), 1);
	assert_int_equal(in(UART_IIR), UART_IIR_RDI);
	assert_int_equal(in(UART_RX), 'a');
	for (unsigned int i = 0; i <= SERIAL_RX_BYTES; i++)
		out(UART_TX, 'b');
	assert_int_equal(in(UART_IIR), UART_IIR_RLSI);
	assert_int_equal(in(UART_LSR)&UART_LSR_OE, UART_LSR_OE);
	assert_int_equal(in(UART_LSR)&UART_LSR_OE, 0);
	out(UART_FCR, 0);
	while (in(UART_LSR)&UART_LSR_DR)
		in(UART_RX);
	irqs();
	out(UART_MCR, UART_MCR_LOOP); // RI and DSR fall
	assert_int_equal(irqs(), 1);
	assert_int_equal(in(UART_IIR), UART_IIR_MSI);
	assert_int_equal(in(UART_MSR), UART_MSR_TERI | UART_MSR_DDSR);
	assert_int_equal(in(UART_IIR), UART_IIR_NO_INT);
	serial_flush(t.serial);
	assert_int_equal(t.out_len, 0);
}

static void output_arrives_in_batches(void **state)
{
	(void)state;
	for (int i = 0; i < 1000; i++)
		out(UART_TX, (uint8_t)('a' + i % 26));
	turn_until(something_printed);
	assert_int_equal(t.out_len, 1000);
	assert_int_equal(t.sink_calls, 1);
	for (int i = 0; i < 1000; i++)
		assert_int_equal(t.out[i], 'a' + i % 26);
}

// Nobody takes the output: memory stays bounded, the newest bytes stay, the rest is counted.
static void a_flood_drops_the_oldest(void **state)
{
	uint64_t bytes, dropped;

	(void)state;
	for (uint32_t i = 0; i < 3 * SERIAL_TX_BYTES + 5; i++)
		out(UART_TX, (uint8_t)(i % 251));
	serial_counts(t.serial, &bytes, &dropped);
	assert_int_equal(bytes, 3 * SERIAL_TX_BYTES + 5);
	assert_int_equal(dropped, 2 * SERIAL_TX_BYTES + 5);
	serial_flush(t.serial);
	assert_int_equal(t.out_len, SERIAL_TX_BYTES);
	for (uint32_t i = 0; i < SERIAL_TX_BYTES; i++)
		assert_int_equal((uint8_t)t.out[i], (i + 2 * SERIAL_TX_BYTES + 5) % 251);
}

static void destroy_prints_the_rest(void **state)
{
	(void)state;
	out(UART_TX, 'z');
	serial_destroy(t.serial);
	t.serial = NULL;
	assert_int_equal(t.out_len, 1);
}

static void odd_accesses_do_nothing(void **state)
{
	uint8_t wide[4] = {'a', 'b', 'c', 'd'};

	(void)state;
	serial_bus_ops.write(t.serial, UART_TX, wide, 4);
	serial_bus_ops.read(t.serial, UART_LSR, wide, 2);
	assert_int_equal(wide[0], 0);
	out(UART_LSR, 0xff);
	out(UART_MSR, 0xff);
	serial_flush(t.serial);
	assert_int_equal(t.out_len, 0);
}

#define PRINTED 200000U

static void *print_much(void *arg)
{
	for (uint32_t i = 0; i < PRINTED; i++)
		out(UART_TX, (uint8_t)(i % 251));
	return arg;
}

static bool all_accounted_for(void)
{
	uint64_t bytes, dropped;

	serial_counts(t.serial, &bytes, &dropped);
	return bytes == PRINTED && t.out_len + dropped == bytes;
}

// No byte is lost without being counted, whatever the threads do.
static void a_vcpu_prints_while_the_loop_flushes(void **state)
{
	pthread_t thread;

	(void)state;
	assert_int_equal(pthread_create(&thread, NULL, print_much, NULL), 0);
	turn_until(all_accounted_for);
	pthread_join(thread, NULL);
	assert_int_equal((uint8_t)t.out[t.out_len - 1], (PRINTED - 1) % 251);
}

// In mid-input, with an interrupt on its way: the other port has both.
static void goes_on_in_another_port(void **state)
{
	struct buf saved = {0}, again = {0};
	struct err err = {0};

	(void)state;
	if (state_check(&serial_state, &err) < 0)
		fail_msg("%s", err.msg);
	out(UART_SCR, 0x5a);
	out(UART_LCR, UART_LCR_DLAB);
	out(UART_DLL, 3);
	out(UART_LCR, UART_LCR_WLEN8);
	out(UART_FCR, UART_FCR_ENABLE_FIFO);
	out(UART_IER, UART_IER_RDI);
	assert_int_equal(serial_input(t.serial, "xhello", 6), 6);
	assert_int_equal(in(UART_RX), 'x');
	assert_int_equal(serial_save(t.serial, &saved), 0);
	assert_int_equal(teardown(NULL), 0);
	assert_int_equal(setup(NULL), 0);
	if (serial_restore(t.serial, saved.data, saved.len, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(serial_save(t.serial, &again), 0);
	assert_int_equal(saved.len, again.len);
	assert_memory_equal(saved.data, again.data, saved.len);
	assert_int_equal(irqs(), 0);
	serial_resume(t.serial);
	assert_int_equal(irqs(), 1);
	assert_int_equal(in(UART_SCR), 0x5a);
	assert_int_equal(in(UART_IIR)&0xf, UART_IIR_RDI);
	for (const char *want = "hello"; *want; want++)
		assert_int_equal(in(UART_RX), *want);
	assert_false(in(UART_LSR)&UART_LSR_DR);
	buf_fini(&saved);
	buf_fini(&again);
}

// Input beyond the ring would be read from somewhere else.
static void a_hostile_state_is_refused(void **state)
{
	static const struct {
		const char *field;
		uint8_t at, value;
	} bad[] = {{"saved.rx_head", 1, 0x10}, {"saved.rx_head", 3, 0x80},
		{"saved.rx_len", 3, 0xff}, {"saved.rx_len", 1, 0x20}};
	struct buf saved = {0};
	struct err err = {0};

	(void)state;
	assert_int_equal(serial_save(t.serial, &saved), 0);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		uint8_t *at = memmem(saved.data, saved.len, bad[i].field, strlen(bad[i].field));

		assert_non_null(at);
		at += strlen(bad[i].field) + sizeof(uint32_t) + bad[i].at;
		*at = bad[i].value;
		assert_int_equal(serial_restore(t.serial, saved.data, saved.len, &err), -EINVAL);
		assert_non_null(strstr(err.msg, "bytes of input"));
		*at = 0;
	}
	assert_int_equal(serial_restore(t.serial, saved.data, saved.len, &err), 0);
	buf_fini(&saved);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(linux_recognises_a_16550a, setup, teardown),
		cmocka_unit_test_setup_teardown(enabling_thri_raises_it_each_time, setup, teardown),
		cmocka_unit_test_setup_teardown(
			each_burst_ends_in_one_thre_interrupt, setup, teardown),
		cmocka_unit_test_setup_teardown(
			resume_repeats_a_pending_interrupt, setup, teardown),
		cmocka_unit_test_setup_teardown(
			input_is_queued_bounded_and_announced, setup, teardown),
		cmocka_unit_test_setup_teardown(
			clearing_the_fifo_loses_no_more_than_the_fifo, setup, teardown),
		cmocka_unit_test_setup_teardown(loopback_returns_what_is_sent, setup, teardown),
		cmocka_unit_test_setup_teardown(output_arrives_in_batches, setup, teardown),
		cmocka_unit_test_setup_teardown(a_flood_drops_the_oldest, setup, teardown),
		cmocka_unit_test_setup_teardown(destroy_prints_the_rest, setup, teardown),
		cmocka_unit_test_setup_teardown(goes_on_in_another_port, setup, teardown),
		cmocka_unit_test_setup_teardown(a_hostile_state_is_refused, setup, teardown),
		cmocka_unit_test_setup_teardown(odd_accesses_do_nothing, setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_vcpu_prints_while_the_loop_flushes, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
