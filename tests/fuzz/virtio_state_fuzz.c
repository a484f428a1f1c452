// SPDX-License-Identifier: Apache-2.0
// Fuzzes virtio_dev_restore() of every device: what is refused is said, and what is taken runs,
// with rings in memory that the input writes, until a reset.
//
// Input: a byte for the device, two for the length of the state, the state, and what lies in the
// rings.
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_config.h>
#include <linux/virtio_mmio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "devices/virtio_balloon.h"
#include "devices/virtio_blk.h"
#include "devices/virtio_net.h"
#include "devices/virtio_rng.h"
#include "devices/virtio_vsock.h"
#include "tests/support/fake_driver.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RINGS       0x10000U // where fake_alloc() begins
#define RINGS_BYTES 0x40000U
#define DISK_BYTES  (1 << 20)

static struct fake_driver fake;
static char vsock_path[64];

static int create_balloon(struct virtio_dev **ret_dev, const struct virtio_env *env)
{
	return virtio_balloon_create(ret_dev, env, NULL);
}

static int create_rng(struct virtio_dev **ret_dev, const struct virtio_env *env)
{
	return virtio_rng_create(ret_dev, env, NULL);
}

static int create_blk(struct virtio_dev **ret_dev, const struct virtio_env *env)
{
	const struct virtio_blk_params params = {.fd = memfd_create("disk", MFD_CLOEXEC),
		.nr_queues = 2,
		.serial = "fuzz",
		.name = "disk"};

	FUZZ_CHECK(params.fd >= 0 && ftruncate(params.fd, DISK_BYTES) == 0);
	return virtio_blk_create(ret_dev, &params, env, NULL);
}

static int peer_fd = -1;

static int create_net(struct virtio_dev **ret_dev, const struct virtio_env *env)
{
	struct virtio_net_params params = {.kind = VIRTIO_NET_PACKETS, .mtu = 1500};
	int pair[2];

	FUZZ_CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	peer_fd = pair[1];
	params.fd = pair[0];
	return virtio_net_create(ret_dev, &params, env, NULL);
}

static int create_vsock(struct virtio_dev **ret_dev, const struct virtio_env *env)
{
	const struct vsock_config config = {.guest_cid = 3, .socket_path = vsock_path};

	return virtio_vsock_create(ret_dev, &config, env, NULL);
}

static int (*const creates[])(struct virtio_dev **ret_dev, const struct virtio_env *env) = {
	create_rng, create_balloon, create_blk, create_net, create_vsock};

static void run(void)
{
	for (unsigned int i = 0; i < fake.dev->nr_queues; i++)
		fake_write(&fake, VIRTIO_MMIO_QUEUE_NOTIFY, i);
	fake_run(&fake);
}

static void set_flag(void *opaque)
{
	*(bool *)opaque = true;
}

static bool flag(void *opaque)
{
	return *(bool *)opaque;
}

static void restored(void)
{
	const uint32_t below = fake_status(&fake) & 15;
	bool drained = false;
	struct buf out = {0};

	FUZZ_CHECK(below == 0 || below == 1 || below == 3 || below == 11 || below == 15);
	FUZZ_CHECK(!fake.dev->active || below == 15);
	FUZZ_CHECK(virtio_dev_save(fake.dev, &out) == 0);
	buf_fini(&out);
	virtio_dev_resume(fake.dev);
	run();
	// It can be saved again, wherever that has led.
	virtio_dev_drain(fake.dev, set_flag, &drained);
	FUZZ_CHECK(fake_run_until(&fake, flag, &drained));
	FUZZ_CHECK(virtio_dev_save(fake.dev, &out) == 0);
	buf_fini(&out);
	virtio_dev_resume(fake.dev);
	run();
	fake_write(&fake, VIRTIO_MMIO_STATUS, 0);
	FUZZ_CHECK(fake_status(&fake) == 0 && !fake.dev->active);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t zeros[RINGS_BYTES];
	struct fuzz_input in = {data, size};
	struct err err = {0};
	struct virtio_env env;
	struct virtio_dev *dev;
	uint8_t which, *state;
	size_t len;
	int r;

	if (!vsock_path[0]) {
		fake_init(&fake);
		snprintf(vsock_path, sizeof(vsock_path), "/tmp/virtio_state_fuzz.%d", getpid());
	}
	which = fuzz_u8(&in) % ARRAY_SIZE(creates);
	len = MIN((size_t)fuzz_u16(&in), in.left);
	guest_mem_write(&fake.mem, GPA(RINGS), zeros, sizeof(zeros));
	if (in.left > len)
		guest_mem_write(&fake.mem, GPA(RINGS), in.data + len,
			MIN(in.left - len, (size_t)RINGS_BYTES));
	env = fake_env(&fake);
	FUZZ_CHECK(creates[which](&dev, &env) == 0);
	fake_attach(&fake, dev);
	// Of exactly its size, for ASan.
	state = malloc(len + 1);
	FUZZ_CHECK(state);
	memcpy(state, in.data, len);
	r = virtio_dev_restore(dev, state, len, &err);
	free(state);
	FUZZ_CHECK(r == 0 || (r == -EINVAL && err.msg[0]));
	if (r == 0)
		restored();
	fake_detach(&fake);
	fake_run(&fake);
	fake_irqs(&fake);
	fd_close(&peer_fd);
	return 0;
}
