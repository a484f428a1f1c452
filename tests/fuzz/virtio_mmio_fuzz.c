// SPDX-License-Identifier: Apache-2.0
// Fuzzes the transport with a real device behind it: register accesses of all widths, in mostly
// sensible orders, with rings in guest memory that the input writes.
//
// Input: operations of a byte each, with their arguments.
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <sys/random.h>

#include "devices/virtio_rng.h"
#include "tests/support/fake_driver.h"
#include "tests/support/fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
ssize_t __wrap_getrandom(void *buf, size_t len, unsigned int flags);

#define RINGS       0x10000U // where fake_alloc() begins: what the input writes
#define RINGS_BYTES 0x8000U
#define OPS_MAX     200

// So that what a device writes into its own rings is the same each time.
ssize_t __wrap_getrandom(void *buf, size_t len, unsigned int flags)
{
	(void)flags;
	memset(buf, 0xa5, len);
	return (ssize_t)len;
}

static struct fake_driver fake;

static void check(void)
{
	uint32_t status = fake_status(&fake), below = status & 15;

	FUZZ_CHECK(below == 0 || below == 1 || below == 3 || below == 11 || below == 15);
	FUZZ_CHECK(!(status & 64) || below == 15);
	FUZZ_CHECK(!fake.dev->active || below == 15);
	FUZZ_CHECK(below != 15 || fake.dev->active || (status & 64));
	FUZZ_CHECK(fake.dev->active || !fake.dev->queues[0].saved.size);
	FUZZ_CHECK(fake.dev->queues[0].nr_in_flight == 0);
	FUZZ_CHECK(fake_read(&fake, VIRTIO_MMIO_MAGIC_VALUE) == 0x74726976);
	FUZZ_CHECK((fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS) & ~3U) == 0);
}

static void access_register(struct fuzz_input *in, uint8_t how)
{
	static const uint16_t often[] = {VIRTIO_MMIO_STATUS, VIRTIO_MMIO_QUEUE_SEL,
		VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_DESC_LOW,
		VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_USED_LOW,
		VIRTIO_MMIO_DRIVER_FEATURES, VIRTIO_MMIO_DRIVER_FEATURES_SEL,
		VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_INTERRUPT_ACK,
		VIRTIO_MMIO_DEVICE_FEATURES_SEL, VIRTIO_MMIO_QUEUE_USED_HIGH};
	static const uint8_t statuses[] = {0, 1, 3, 11, 15, 128, 64, 7};
	uint64_t off = often[how % ARRAY_SIZE(often)];
	unsigned int len = 4;
	uint8_t data[8], arg = fuzz_u8(in);

	put_le64(data, arg);
	if (how >= 240) {
		off = fuzz_u16(in) % VIRTIO_MMIO_BYTES;
		len = 1U << arg % 4;
		put_le64(data, fuzz_take(in, 8));
	} else if (off == VIRTIO_MMIO_STATUS) {
		put_le32(data, arg < 240 ? statuses[arg % 8] : fuzz_u32(in));
	} else if (off >= VIRTIO_MMIO_QUEUE_DESC_LOW) {
		put_le32(data, arg < 240 ? RINGS + arg % 4 * 0x1000U : fuzz_u32(in));
	} else if (arg >= 250) {
		put_le32(data, fuzz_u32(in));
	}
	if (off + len > VIRTIO_MMIO_BYTES)
		return;
	if (how & 1)
		virtio_mmio_bus_ops.read(fake.dev, off, data, len);
	virtio_mmio_write_on_loop(fake.dev, off, data, len);
}

static void write_ring(struct fuzz_input *in)
{
	uint64_t gpa = RINGS + fuzz_u16(in) % (RINGS_BYTES - 16);
	uint8_t raw[16] = {0};
	uint8_t kind = fuzz_u8(in);

	if (kind < 128) { // a descriptor
		gpa = ALIGN_DOWN(gpa, 16U);
		put_le64(raw, kind < 120 ? 0x100000U + fuzz_u16(in) : fuzz_take(in, 8));
		put_le32(raw + 8, kind < 100 ? fuzz_u16(in) : fuzz_u32(in));
		put_le16(raw + 12, kind % 8);
		put_le16(raw + 14, fuzz_u8(in) % 16);
		guest_mem_write(&fake.mem, GPA(gpa), raw, 16);
	} else {
		put_le16(raw, fuzz_u8(in) % 16);
		guest_mem_write(&fake.mem, GPA(ALIGN_DOWN(gpa, 2U)), raw, 2);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t zeros[RINGS_BYTES];
	struct fuzz_input in = {data, size};

	if (!fake.dev) {
		struct virtio_env env;
		struct virtio_dev *dev;

		fake_init(&fake);
		env = fake_env(&fake);
		if (virtio_rng_create(&dev, &env, NULL) < 0)
			abort();
		fake_attach(&fake, dev);
	}
	guest_mem_write(&fake.mem, GPA(RINGS), zeros, sizeof(zeros));
	for (unsigned int i = 0; i < OPS_MAX && in.left; i++) {
		uint8_t op = fuzz_u8(&in);

		switch (op % 8) {
		case 0:
		case 1:
		case 2:
			access_register(&in, fuzz_u8(&in));
			break;
		case 3:
		case 4:
			write_ring(&in);
			break;
		case 5:
			fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, 0);
			fake_run(&fake);
			break;
		case 6: // what a sound driver does
			if (fake_negotiate(&fake,
				    fake_device_features(&fake) & ~((uint64_t)(op & 8) << 25)))
				fake_setup_queue(&fake, 0, (uint16_t)(1U << op / 8 % 4));
			break;
		default:
			if (fake.queues[0].size && op >= 128) {
				const struct fake_buf buf = {
					GPA(0x200000 + fuzz_u16(&in)), fuzz_u16(&in), op & 16};

				fake_put_desc(&fake, 0, op % fake.queues[0].size, buf.gpa.v,
					buf.len, buf.writable ? VRING_DESC_F_WRITE : 0, 0);
				fake_put_avail(&fake, 0, op % fake.queues[0].size);
			}
			fake_write(&fake, VIRTIO_MMIO_STATUS, 15);
			break;
		}
		check();
	}
	// Whatever state it is in, a reset mends it.
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	fake_run(&fake);
	FUZZ_CHECK(fake_status(&fake) == 0 && !fake.dev->active);
	FUZZ_CHECK(fake_read(&fake, VIRTIO_MMIO_INTERRUPT_STATUS) == 0);
	fake_irqs(&fake);
	return 0;
}
