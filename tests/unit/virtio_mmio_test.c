// SPDX-License-Identifier: Apache-2.0
// devices/virtio_mmio: every sequence of register writes to depth 4 against a model, the hand-over
// between vCPU threads and the loop thread, and reset with requests in flight.
#include "tests/support/test.h"

#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "devices/virtio_mmio.h"
#include "tests/support/device_suite.h"
#include "tests/support/fake_driver.h"

#define TOY_ID      42U
#define TOY_QUEUES  2U
#define TOY_SIZE    16U
#define TOY_FEATURE 5U
#define VERSION_1   (1ULL << VIRTIO_F_VERSION_1)
#define S_RUNNING   15U

// A device that keeps its requests for a while: it fills each buffer when it completes it.
struct toy {
	struct virtio_dev dev;
	struct virtq_chain held[TOY_SIZE * TOY_QUEUES];
	struct guest_view held_segs[TOY_SIZE * TOY_QUEUES];
	unsigned int held_queue[TOY_SIZE * TOY_QUEUES];
	unsigned int nr_held;
	unsigned int unused_too; // padding
	struct guest_view segs[VIRTQ_CHAIN_MAX];
	struct loop_timer timer;
	uint64_t delay_ns; // UINT64_MAX: for ever
	pthread_t loop_thread;
	bool draining;
	bool check_thread;
	uint8_t unused[6]; // padding
	unsigned int activations, resets, completions, config_writes;
	uint32_t config_off, config_len;
};

static struct toy *the_toy;

static struct toy *toy_of(struct virtio_dev *dev)
{
	struct toy *toy = container_of(dev, struct toy, dev);

	if (toy->check_thread)
		ASSERT(pthread_equal(toy->loop_thread, pthread_self()));
	return toy;
}

static void toy_complete(struct toy *toy)
{
	static const uint8_t fill[PAGE_BYTES] = {[0 ... PAGE_BYTES - 1] = 0xdd};

	for (unsigned int i = 0; i < toy->nr_held; i++) {
		struct virtq_chain *chain = &toy->held[i];
		size_t n = virtq_chain_write(chain, 0, fill, sizeof(fill));

		virtq_push(&toy->dev.queues[toy->held_queue[i]], chain->head, (uint32_t)n);
		toy->completions++;
	}
	toy->nr_held = 0;
	virtio_dev_publish(&toy->dev, 3);
	if (toy->draining) {
		toy->draining = false;
		virtio_dev_drained(&toy->dev);
	}
}

static void toy_timer(struct loop_timer *timer)
{
	toy_complete(container_of(timer, struct toy, timer));
}

static void toy_activate(struct virtio_dev *dev)
{
	struct toy *toy = toy_of(dev);

	ASSERT(dev->active && toy->nr_held == 0);
	toy->activations++;
}

static void toy_notify(struct virtio_dev *dev, unsigned int queue_idx)
{
	struct toy *toy = toy_of(dev);
	struct virtq *q = &dev->queues[queue_idx];
	struct virtq_chain chain = {.segs = toy->segs};
	int r;

	ASSERT(virtio_dev_running(dev) && queue_idx < TOY_QUEUES);
	do {
		while ((r = virtq_pop(q, &chain)) > 0) {
			struct virtq_chain *held = &toy->held[toy->nr_held];

			*held = chain;
			held->segs = &toy->held_segs[toy->nr_held];
			held->nr_readable = 0;
			held->nr_writable = chain.nr_writable ? 1 : 0;
			if (chain.nr_writable)
				held->segs[0] = chain.segs[chain.nr_readable];
			toy->held_queue[toy->nr_held++] = queue_idx;
		}
	} while (r == 0 && virtq_wait(q));
	if (r < 0)
		virtio_dev_set_needs_reset(dev, "bad chain");
	if (!toy->nr_held || toy->timer.armed || toy->delay_ns == UINT64_MAX)
		return;
	if (toy->delay_ns)
		loop_timer_set(dev->env.loop, &toy->timer, now_ns() + toy->delay_ns);
	else
		toy_complete(toy);
}

static bool toy_drain(struct virtio_dev *dev)
{
	struct toy *toy = toy_of(dev);

	toy->draining = toy->nr_held > 0;
	return !toy->draining;
}

static void toy_reset(struct virtio_dev *dev)
{
	struct toy *toy = toy_of(dev);

	ASSERT(toy->nr_held == 0 && !virtio_dev_running(dev));
	toy->resets++;
}

static void toy_config_written(struct virtio_dev *dev, uint32_t off, uint32_t len)
{
	struct toy *toy = toy_of(dev);

	toy->config_writes++;
	toy->config_off = off;
	toy->config_len = len;
}

static void toy_destroy(struct virtio_dev *dev)
{
	struct toy *toy = container_of(dev, struct toy, dev);

	loop_timer_cancel(dev->env.loop, &toy->timer);
	virtio_dev_fini(dev);
	free(toy);
}

#define TEST "the test's"

STATE_TABLE(static, toy_state, struct toy, "toy", NULL,
	STATE_NESTED(struct toy, dev, &virtio_dev_state), STATE_TRANSIENT(struct toy, held, TEST),
	STATE_TRANSIENT(struct toy, held_segs, TEST), STATE_TRANSIENT(struct toy, held_queue, TEST),
	STATE_TRANSIENT(struct toy, nr_held, TEST), STATE_TRANSIENT(struct toy, unused_too, TEST),
	STATE_TRANSIENT(struct toy, segs, TEST), STATE_TRANSIENT(struct toy, timer, TEST),
	STATE_TRANSIENT(struct toy, delay_ns, TEST), STATE_TRANSIENT(struct toy, loop_thread, TEST),
	STATE_TRANSIENT(struct toy, draining, TEST),
	STATE_TRANSIENT(struct toy, check_thread, TEST), STATE_TRANSIENT(struct toy, unused, TEST),
	STATE_TRANSIENT(struct toy, activations, TEST), STATE_TRANSIENT(struct toy, resets, TEST),
	STATE_TRANSIENT(struct toy, completions, TEST),
	STATE_TRANSIENT(struct toy, config_writes, TEST),
	STATE_TRANSIENT(struct toy, config_off, TEST),
	STATE_TRANSIENT(struct toy, config_len, TEST));

static const struct virtio_ops toy_ops = {
	.name = "toy",
	.device_id = TOY_ID,
	.activate = toy_activate,
	.queue_notify = toy_notify,
	.config_written = toy_config_written,
	.drain = toy_drain,
	.state = &toy_state,
	.reset = toy_reset,
	.destroy = toy_destroy,
};

static int toy_create(struct virtio_dev **ret_dev, const struct virtio_env *env, struct err *err)
{
	static const uint8_t config[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
	const struct virtio_dev_params params = {
		.features = 1ULL << TOY_FEATURE,
		.nr_queues = TOY_QUEUES,
		.queue_size_max = TOY_SIZE,
		.config = config,
		.config_bytes = sizeof(config),
	};
	struct toy *toy = calloc(1, sizeof(*toy));
	int r;

	ASSERT(toy);
	r = virtio_dev_init(&toy->dev, &toy_ops, env, &params, err);
	if (r < 0) {
		free(toy);
		return r;
	}
	toy->timer.fire = toy_timer;
	the_toy = toy;
	*ret_dev = &toy->dev;
	return 0;
}

static struct fake_driver fake;

static int setup(void **state)
{
	struct virtio_env env;
	struct virtio_dev *dev;

	(void)state;
	fake_init(&fake);
	env = fake_env(&fake);
	if (toy_create(&dev, &env, NULL) < 0)
		return -1;
	fake_attach(&fake, dev);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	fake_fini(&fake);
	return 0;
}

// --- The model -------------------------------------------------------------------------------

// What the registers should be, told in other words than the device's.
struct model {
	uint32_t status;
	uint32_t sel, features_sel;
	uint64_t features;
	struct {
		uint32_t num, ready, desc;
	} q[TOY_QUEUES];
	bool active;
};

struct access {
	uint32_t off, val;
};

static const struct access alphabet[] = {
	{VIRTIO_MMIO_STATUS, 0},
	{VIRTIO_MMIO_STATUS, 1},
	{VIRTIO_MMIO_STATUS, 3},
	{VIRTIO_MMIO_STATUS, 11},
	{VIRTIO_MMIO_STATUS, 15},
	{VIRTIO_MMIO_STATUS, 7},
	{VIRTIO_MMIO_STATUS, 139},
	{VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0},
	{VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1},
	{VIRTIO_MMIO_DRIVER_FEATURES, 1},
	{VIRTIO_MMIO_DRIVER_FEATURES, 1U << TOY_FEATURE},
	{VIRTIO_MMIO_QUEUE_SEL, 0},
	{VIRTIO_MMIO_QUEUE_SEL, 1},
	{VIRTIO_MMIO_QUEUE_SEL, TOY_QUEUES},
	{VIRTIO_MMIO_QUEUE_SEL, UINT32_MAX},
	{VIRTIO_MMIO_QUEUE_NUM, TOY_SIZE},
	{VIRTIO_MMIO_QUEUE_NUM, 0x10000 + TOY_SIZE},
	{VIRTIO_MMIO_QUEUE_NUM, 3},
	{VIRTIO_MMIO_QUEUE_DESC_LOW, 0x20000},
	{VIRTIO_MMIO_QUEUE_DESC_LOW, 0x20008},
	{VIRTIO_MMIO_QUEUE_READY, 1},
	{VIRTIO_MMIO_QUEUE_READY, 0},
	{VIRTIO_MMIO_QUEUE_NOTIFY, 0},
	{VIRTIO_MMIO_INTERRUPT_ACK, UINT32_MAX},
};

static bool model_queues_good(const struct model *m)
{
	for (unsigned int i = 0; i < TOY_QUEUES; i++)
		if (m->q[i].ready && (m->q[i].num != TOY_SIZE || m->q[i].desc % 16 != 0))
			return false;
	return true;
}

static void model_status(struct model *m, uint32_t val)
{
	const bool broken = m->status & 64;
	const uint32_t now = m->status & ~64U;

	if (val == 0) {
		*m = (struct model){0};
		return;
	}
	if (now == 0 && val == 1)
		m->status = 1;
	else if (now == 1 && val == 3)
		m->status = 3;
	else if (now == 3 && val == 11 && (m->features & VERSION_1) &&
		 !(m->features & ~(VERSION_1 | 1ULL << TOY_FEATURE)))
		m->status = 11;
	else if (now == 11 && val == 15) {
		m->active = model_queues_good(m);
		m->status = m->active ? 15 : 15 | 64;
		return;
	} else if (now == 11 && val == 139)
		m->status = 139;
	if (broken)
		m->status |= 64;
}

static void model_write(struct model *m, const struct access *a)
{
	const bool set_up = (m->status & 12) == 8; // FEATURES_OK and not DRIVER_OK
	const bool queue = m->sel < TOY_QUEUES;

	switch (a->off) {
	case VIRTIO_MMIO_STATUS:
		model_status(m, a->val);
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES_SEL:
		m->features_sel = a->val;
		break;
	case VIRTIO_MMIO_DRIVER_FEATURES:
		if ((m->status & 10) != 2)
			break;
		if (m->features_sel)
			m->features = (m->features & 0xffffffffU) | (uint64_t)a->val << 32;
		else
			m->features = (m->features >> 32 << 32) | a->val;
		break;
	case VIRTIO_MMIO_QUEUE_SEL:
		m->sel = a->val;
		break;
	case VIRTIO_MMIO_QUEUE_NUM:
		if (set_up && queue && !m->q[m->sel].ready)
			m->q[m->sel].num = a->val;
		break;
	case VIRTIO_MMIO_QUEUE_DESC_LOW:
		if (set_up && queue && !m->q[m->sel].ready)
			m->q[m->sel].desc = a->val;
		break;
	case VIRTIO_MMIO_QUEUE_READY:
		if (set_up && queue)
			m->q[m->sel].ready = a->val;
		break;
	default:
		break;
	}
}

static void compare(const struct model *m)
{
	const bool queue = m->sel < TOY_QUEUES;
	const uint32_t interrupts = fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS);

	assert_int_equal(fake_status(&fake), m->status);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_NUM_MAX), queue ? TOY_SIZE : 0);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_QUEUE_READY), queue ? m->q[m->sel].ready : 0);
	assert_int_equal(fake.dev->active, m->active);
	assert_int_equal(fake.dev->features, m->active ? m->features : 0);
	assert_int_equal(interrupts & VIRTIO_MMIO_INT_VRING, 0);
	for (unsigned int i = 0; i < TOY_QUEUES; i++)
		assert_int_equal(
			fake.dev->queues[i].saved.size, m->active && m->q[i].ready ? TOY_SIZE : 0);
}

static void apply(struct model *m, const struct access *a)
{
	fake_write(&fake, a->off, a->val);
	model_write(m, a);
}

static void all_sequences_to_depth_4_agree_with_the_model(void **state)
{
	static const struct access to_driver[] = {{VIRTIO_MMIO_STATUS, 1}, {VIRTIO_MMIO_STATUS, 3}};
	static const struct access to_features[] = {{VIRTIO_MMIO_STATUS, 1},
		{VIRTIO_MMIO_STATUS, 3}, {VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1},
		{VIRTIO_MMIO_DRIVER_FEATURES, 1}, {VIRTIO_MMIO_STATUS, 11}};
	static const struct access to_queue[] = {{VIRTIO_MMIO_STATUS, 1}, {VIRTIO_MMIO_STATUS, 3},
		{VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1}, {VIRTIO_MMIO_DRIVER_FEATURES, 1},
		{VIRTIO_MMIO_STATUS, 11}, {VIRTIO_MMIO_QUEUE_SEL, 1},
		{VIRTIO_MMIO_QUEUE_NUM, TOY_SIZE}, {VIRTIO_MMIO_QUEUE_DESC_LOW, 0x20000},
		{VIRTIO_MMIO_QUEUE_READY, 1}};
	static const struct access to_running[] = {{VIRTIO_MMIO_STATUS, 1}, {VIRTIO_MMIO_STATUS, 3},
		{VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1}, {VIRTIO_MMIO_DRIVER_FEATURES, 1},
		{VIRTIO_MMIO_STATUS, 11}, {VIRTIO_MMIO_QUEUE_NUM, TOY_SIZE},
		{VIRTIO_MMIO_QUEUE_DESC_LOW, 0x20000}, {VIRTIO_MMIO_QUEUE_READY, 1},
		{VIRTIO_MMIO_STATUS, 15}};
	static const struct {
		const struct access *accesses;
		size_t nr;
	} starts[] = {{NULL, 0}, {to_driver, ARRAY_SIZE(to_driver)},
		{to_features, ARRAY_SIZE(to_features)}, {to_queue, ARRAY_SIZE(to_queue)},
		{to_running, ARRAY_SIZE(to_running)}};
	const unsigned int nr = ARRAY_SIZE(alphabet);
	unsigned int reached = 0; // as a set of states

	(void)state;
	for (unsigned int s = 0; s < ARRAY_SIZE(starts); s++) {
		for (unsigned int i = 0; i < nr * nr * nr * nr; i++) {
			struct model m = {0};

			fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
			for (size_t k = 0; k < starts[s].nr; k++)
				apply(&m, &starts[s].accesses[k]);
			for (unsigned int k = 0, rest = i; k < 4; k++, rest /= nr)
				apply(&m, &alphabet[rest % nr]);
			compare(&m);
			reached |= m.status == 15 ? 1 : m.status == (15 | 64) ? 2 : 0;
			reached |= m.status == 139 ? 4 : m.status == 0 ? 8 : 0;
		}
	}
	assert_int_equal(reached, 15);
}

// --- Configuration ---------------------------------------------------------------------------

static void configuration_is_read_and_written_by_any_width(void **state)
{
	uint8_t data[8];

	(void)state;
	fake_start(&fake);
	for (unsigned int len = 1; len <= 8; len *= 2) {
		for (unsigned int off = 0; off < 12; off++) {
			virtio_mmio_bus_ops.read(fake.dev, VIRTIO_MMIO_CONFIG + off, data, len);
			for (unsigned int i = 0; i < len; i++)
				assert_int_equal(data[i], off + i < 10 ? off + i + 1 : 0);
		}
	}
	memcpy(data, "\x11\x22\x33\x44", 4);
	virtio_mmio_write_on_loop(fake.dev, VIRTIO_MMIO_CONFIG + 6, data, 4);
	assert_int_equal(the_toy->config_writes, 1);
	assert_int_equal(the_toy->config_off, 6);
	assert_int_equal(the_toy->config_len, 4);
	assert_memory_equal(fake.dev->config + 6, data, 4);
	virtio_mmio_write_on_loop(fake.dev, VIRTIO_MMIO_CONFIG + 7, data, 4); // past its end
	assert_int_equal(the_toy->config_writes, 1);
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	virtio_mmio_write_on_loop(fake.dev, VIRTIO_MMIO_CONFIG, data, 4); // not driven
	assert_int_equal(the_toy->config_writes, 1);
}

static void a_change_of_configuration_is_announced(void **state)
{
	uint32_t generation = fake_read(&fake, VIRTIO_MMIO_CONFIG_GENERATION);

	(void)state;
	virtio_dev_set_config(fake.dev, 2, "ab", 2);
	assert_int_equal(fake_irqs(&fake), 0); // nobody there
	assert_int_not_equal(fake_read(&fake, VIRTIO_MMIO_CONFIG_GENERATION), generation);
	fake_start(&fake);
	generation = fake_read(&fake, VIRTIO_MMIO_CONFIG_GENERATION);
	virtio_dev_set_config(fake.dev, 2, "cd", 2);
	assert_int_equal(fake_irqs(&fake), 1);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_CONFIG);
	assert_int_not_equal(fake_read(&fake, VIRTIO_MMIO_CONFIG_GENERATION), generation);
	fake_write(&fake, VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_VRING);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_CONFIG);
	fake_write(&fake, VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_CONFIG);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

// --- Requests in flight ----------------------------------------------------------------------

static void many_completions_are_one_interrupt(void **state)
{
	const struct fake_buf buf = {fake_alloc(&fake, PAGE_BYTES), 16, true};
	unsigned int used = 0;

	(void)state;
	fake_start(&fake);
	fake_want_irq(&fake, 0);
	fake_want_irq(&fake, 1);
	fake_irqs(&fake);
	the_toy->delay_ns = 1000000;
	for (unsigned int i = 0; i < TOY_SIZE; i++) {
		fake_add(&fake, i % 2, &buf, 1);
		fake_kick(&fake, i % 2);
	}
	while (the_toy->completions < TOY_SIZE)
		fake_run(&fake);
	assert_int_equal(fake_irqs(&fake), 1);
	assert_int_equal(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_VRING);
	for (unsigned int queue = 0; queue < 2; queue++)
		while (fake_get_used(&fake, queue, NULL, NULL))
			used++;
	assert_int_equal(used, TOY_SIZE);
}

static void reset_waits_for_what_is_in_flight(void **state)
{
	struct fake_buf buf = {.len = PAGE_BYTES, .writable = true};
	uint8_t byte;

	(void)state;
	fake_start(&fake);
	buf.gpa = fake_alloc(&fake, PAGE_BYTES);
	the_toy->delay_ns = 20000000;
	fake_add(&fake, 0, &buf, 1);
	fake_kick(&fake, 0);
	fake_run(&fake);
	assert_int_equal(the_toy->nr_held, 1);
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	assert_int_equal(the_toy->completions, 1);
	assert_int_equal(the_toy->resets, 1);
	// The page is the driver's own again.
	guest_mem_write(&fake.mem, buf.gpa, "\x01", 1);
	fake_run(&fake);
	guest_mem_read(&fake.mem, buf.gpa, &byte, 1);
	assert_int_equal(byte, 1);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static bool flag(void *opaque)
{
	return *(bool *)opaque;
}

static void drain_waits_for_what_is_in_flight(void **state)
{
	const struct fake_buf buf = {fake_alloc(&fake, PAGE_BYTES), 16, true};
	bool drained = false;

	(void)state;
	fake_start(&fake);
	the_toy->delay_ns = 5000000;
	fake_add(&fake, 0, &buf, 1);
	fake_kick(&fake, 0);
	fake_run(&fake);
	virtio_dev_drain(fake.dev, set_flag, &drained);
	assert_false(drained);
	fake_add(&fake, 1, &buf, 1);
	fake_kick(&fake, 1);
	assert_true(fake_run_until(&fake, flag, &drained));
	assert_int_equal(the_toy->completions, 1);
	assert_int_equal(the_toy->nr_held, 0);
	the_toy->delay_ns = 0;
	virtio_dev_resume(fake.dev);
	assert_int_equal(the_toy->completions, 2);
}

// --- Threads ---------------------------------------------------------------------------------

static void vcpu_write(uint64_t off, uint32_t val)
{
	uint8_t data[4];

	put_le32(data, val);
	virtio_mmio_bus_ops.write(fake.dev, off, data, 4);
}

static uint32_t vcpu_read(uint64_t off)
{
	uint8_t data[4];

	virtio_mmio_bus_ops.read(fake.dev, off, data, 4);
	return get_le32(data);
}

struct vcpu_args {
	unsigned int seed;
	unsigned int rounds;
	_Atomic unsigned int *running; // how often the device was seen running
	_Atomic unsigned int *left; // vCPUs; the last one stops the loop
};

static void leave(struct vcpu_args *args)
{
	if (atomic_fetch_sub(args->left, 1) != 1)
		return;
	vcpu_write(VIRTIO_MMIO_STATUS, 0);
	loop_stop(&fake.loop);
}

// A driver that starts and resets the device all the time, and others that write at random.
static void *driving_vcpu(void *arg)
{
	struct vcpu_args *args = arg;

	for (unsigned int i = 0; i < args->rounds; i++) {
		vcpu_write(VIRTIO_MMIO_STATUS, 0);
		vcpu_write(VIRTIO_MMIO_STATUS, 1);
		vcpu_write(VIRTIO_MMIO_STATUS, 3);
		vcpu_write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
		vcpu_write(VIRTIO_MMIO_DRIVER_FEATURES, 1);
		vcpu_write(VIRTIO_MMIO_STATUS, 11);
		vcpu_write(VIRTIO_MMIO_QUEUE_SEL, 0);
		vcpu_write(VIRTIO_MMIO_QUEUE_NUM, TOY_SIZE);
		vcpu_write(VIRTIO_MMIO_QUEUE_DESC_LOW, 0x20000);
		vcpu_write(VIRTIO_MMIO_QUEUE_AVAIL_LOW, 0x30000);
		vcpu_write(VIRTIO_MMIO_QUEUE_USED_LOW, 0x40000);
		vcpu_write(VIRTIO_MMIO_QUEUE_READY, 1);
		vcpu_write(VIRTIO_MMIO_STATUS, 15);
		if ((vcpu_read(VIRTIO_MMIO_STATUS) & 15) == 15)
			atomic_fetch_add(args->running, 1);
		vcpu_write(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
	}
	leave(args);
	return NULL;
}

static void *wild_vcpu(void *arg)
{
	struct vcpu_args *args = arg;

	for (unsigned int i = 0; i < args->rounds * 10; i++) {
		const struct access *a;

		args->seed = args->seed * 1664525 + 1013904223;
		a = &alphabet[(args->seed >> 8) % ARRAY_SIZE(alphabet)];
		vcpu_write(a->off, a->val);
		vcpu_read(VIRTIO_MMIO_STATUS);
		vcpu_read(VIRTIO_MMIO_CONFIG);
		vcpu_write(VIRTIO_MMIO_CONFIG, i);
	}
	leave(args);
	return NULL;
}

static void vcpus_and_the_loop_agree(void **state)
{
	_Atomic unsigned int running = 0, left = 3;
	struct vcpu_args args[3] = {
		{1, 2000, &running, &left}, {2, 500, &running, &left}, {3, 500, &running, &left}};
	pthread_t vcpus[3];

	(void)state;
	// One chain that is always there.
	fake_negotiate(&fake, VERSION_1);
	uint8_t desc[16] = {0}, avail[6] = {0, 0, 1, 0, 0, 0};

	put_le64(desc, 0x50000);
	put_le32(desc + 8, 64);
	put_le16(desc + 12, VRING_DESC_F_WRITE);
	guest_mem_write(&fake.mem, GPA(0x20000), desc, sizeof(desc));
	guest_mem_write(&fake.mem, GPA(0x30000), avail, sizeof(avail));
	the_toy->delay_ns = 20000;
	the_toy->loop_thread = pthread_self();
	the_toy->check_thread = true;
	assert_int_equal(pthread_create(&vcpus[0], NULL, driving_vcpu, &args[0]), 0);
	assert_int_equal(pthread_create(&vcpus[1], NULL, wild_vcpu, &args[1]), 0);
	assert_int_equal(pthread_create(&vcpus[2], NULL, wild_vcpu, &args[2]), 0);
	assert_int_equal(loop_run(&fake.loop, NULL), 0);
	for (unsigned int i = 0; i < 3; i++)
		pthread_join(vcpus[i], NULL);
	assert_true(running > 0);
	assert_true(the_toy->activations > 0 && the_toy->completions > 0);
	assert_int_equal(the_toy->activations, the_toy->resets);
	assert_int_equal(the_toy->nr_held, 0);
}

static void *resetting_vcpu(void *arg)
{
	vcpu_write(VIRTIO_MMIO_STATUS, 0);
	vcpu_write(VIRTIO_MMIO_STATUS, 1);
	return arg;
}

// A vCPU that waits for a loop that turns no more is released.
static void stop_releases_a_waiting_vcpu(void **state)
{
	struct fake_buf buf = {.len = 16, .writable = true};
	pthread_t vcpu;

	(void)state;
	fake_start(&fake);
	buf.gpa = fake_alloc(&fake, PAGE_BYTES);
	the_toy->delay_ns = UINT64_MAX;
	fake_add(&fake, 0, &buf, 1);
	fake_kick(&fake, 0);
	fake_run(&fake);
	assert_int_equal(the_toy->nr_held, 1);
	assert_int_equal(pthread_create(&vcpu, NULL, resetting_vcpu, NULL), 0);
	while (!the_toy->draining)
		fake_run(&fake);
	virtio_dev_stop(fake.dev);
	pthread_join(vcpu, NULL);
	assert_int_equal(the_toy->resets, 0);
	toy_complete(the_toy);
	assert_int_equal(the_toy->resets, 1);
}

#define WITH(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	static const struct device_case device = {
		.name = "toy", .device_id = TOY_ID, .eager_queues = 3, .create = toy_create};
	const struct CMUnitTest tests[] = {
		WITH(all_sequences_to_depth_4_agree_with_the_model),
		WITH(configuration_is_read_and_written_by_any_width),
		WITH(a_change_of_configuration_is_announced),
		WITH(many_completions_are_one_interrupt),
		WITH(reset_waits_for_what_is_in_flight),
		WITH(drain_waits_for_what_is_in_flight),
		WITH(vcpus_and_the_loop_agree),
		WITH(stop_releases_a_waiting_vcpu),
	};

	return device_suite(&device) + cmocka_run_group_tests(tests, NULL, NULL);
}
