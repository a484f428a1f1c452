// SPDX-License-Identifier: Apache-2.0
// Fuzzes the block device's requests: headers, layouts and ranges, mostly sound. A copy of the disk
// tells what each has to answer, what is read, and at the end what is in the file.
//
// Input: requests, one after the other.
#include <linux/virtio_blk.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <sys/mman.h>
#include <unistd.h>

#include "devices/virtio_blk.h"
#include "tests/support/fake_driver.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SECTOR       512U
#define SECTORS      64U
#define DISK_BYTES   (SECTORS * SECTOR)
#define REQUESTS_MAX 40U
#define DATA_MAX     16384U
#define PIECES_MAX   32U

static struct {
	struct fake_driver fake;
	int file; // our own descriptor
	uint8_t disk[DISK_BYTES];
	gpa_t hdr, data;
	bool up;
} t;

static void start(void)
{
	fake_start(&t.fake);
	t.hdr = fake_alloc(&t.fake, PAGE_BYTES);
	t.data = fake_alloc(&t.fake, DATA_MAX + PAGE_BYTES);
}

static void setup(void)
{
	struct virtio_blk_params params = {.nr_queues = 1, .serial = "fuzz", .name = "disk"};
	struct virtio_env env;
	struct virtio_dev *dev;

	t.file = memfd_create("disk", MFD_CLOEXEC);
	if (t.file < 0 || ftruncate(t.file, DISK_BYTES) < 0)
		abort();
	params.fd = dup(t.file);
	fake_init(&t.fake);
	env = fake_env(&t.fake);
	if (params.fd < 0 || virtio_blk_create(&dev, &params, &env, NULL) < 0)
		abort();
	fake_attach(&t.fake, dev);
	t.up = true;
}

static bool on_disk(uint64_t sector, uint64_t bytes)
{
	return bytes > 0 && bytes % SECTOR == 0 && sector < SECTORS &&
	       bytes <= (SECTORS - sector) * SECTOR;
}

static bool range_good(uint32_t type, const uint8_t *data, uint32_t bytes, uint8_t *ret_status)
{
	const uint32_t flags = get_le32(data + 12);

	*ret_status = VIRTIO_BLK_S_IOERR;
	if (bytes != 16)
		return false;
	if (flags > (type == VIRTIO_BLK_T_WRITE_ZEROES ? 1U : 0U)) {
		*ret_status = VIRTIO_BLK_S_UNSUPP;
		return false;
	}
	return on_disk(get_le64(data), (uint64_t)get_le32(data + 8) * SECTOR);
}

// What the request has to answer; does it to the copy.
static uint8_t model(uint32_t type, uint64_t sector, uint8_t *data, uint32_t bytes)
{
	uint8_t status = VIRTIO_BLK_S_OK;

	switch (type) {
	case VIRTIO_BLK_T_IN:
		if (!on_disk(sector, bytes))
			return VIRTIO_BLK_S_IOERR;
		memcpy(data, t.disk + sector * SECTOR, bytes);
		return VIRTIO_BLK_S_OK;
	case VIRTIO_BLK_T_OUT:
		if (!on_disk(sector, bytes))
			return VIRTIO_BLK_S_IOERR;
		memcpy(t.disk + sector * SECTOR, data, bytes);
		return VIRTIO_BLK_S_OK;
	case VIRTIO_BLK_T_FLUSH:
	case VIRTIO_BLK_T_GET_ID:
		return VIRTIO_BLK_S_OK;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		if (!range_good(type, data, bytes, &status))
			return status;
		memset(t.disk + get_le64(data) * SECTOR, 0, get_le32(data + 8) * (size_t)SECTOR);
		return VIRTIO_BLK_S_OK;
	default:
		return VIRTIO_BLK_S_UNSUPP;
	}
}

static uint64_t pick_sector(struct fuzz_input *in)
{
	const uint8_t how = fuzz_u8(in);

	if (how < 200)
		return how % (SECTORS + 2);
	return how < 230 ? (UINT64_MAX >> how % 12) - how % 3 : fuzz_take(in, 8);
}

static bool used(void *opaque)
{
	uint8_t idx[2];

	(void)opaque;
	guest_mem_read(&t.fake.mem, GPA(t.fake.queues[0].used.v + 2), idx, 2);
	return get_le16(idx) != t.fake.queues[0].used_idx || fake_status(&t.fake) & 64;
}

// Cuts [gpa, gpa + bytes) into pieces.
static unsigned int cut(struct fuzz_input *in, struct fake_buf *bufs, unsigned int max, gpa_t gpa,
	uint32_t bytes, bool writable)
{
	unsigned int nr = 0;

	while (bytes) {
		const uint32_t want = 1 + fuzz_u16(in) % 5000U;
		const uint32_t len = nr + 1 == max ? bytes : MIN(bytes, want);

		bufs[nr++] = (struct fake_buf){gpa, len, writable};
		gpa.v += len;
		bytes -= len;
	}
	return nr;
}

// False once the device has asked for its reset.
static bool request(struct fuzz_input *in)
{
	static const uint32_t types[] = {VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_OUT,
		VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_FLUSH,
		VIRTIO_BLK_T_GET_ID};
	static uint8_t data[DATA_MAX], back[DATA_MAX];
	struct fake_buf bufs[2 * PIECES_MAX + 1];
	const uint8_t kind = fuzz_u8(in), shape = fuzz_u8(in);
	const bool lie = shape >= 254;
	const uint32_t type = lie          ? VIRTIO_BLK_T_IN
			      : kind < 224 ? types[kind % ARRAY_SIZE(types)]
					   : fuzz_u32(in);
	const uint64_t sector = pick_sector(in);
	uint32_t bytes = shape < 200 ? shape % 32 * SECTOR : fuzz_u16(in) % DATA_MAX;
	const bool in_data = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
	const uint32_t hdr_bytes = shape == 255 ? 15 : 16;
	struct virtio_blk_outhdr hdr = {.type = htole32(type), .sector = htole64(sector)};
	uint8_t status = 0xee, want;
	unsigned int nr;

	for (uint32_t i = 0; i < DATA_MAX; i++)
		data[i] = (uint8_t)(i * 7 + kind);
	if (type == VIRTIO_BLK_T_DISCARD || type == VIRTIO_BLK_T_WRITE_ZEROES) {
		bytes = shape < 240 ? 16 : bytes;
		put_le64(data, pick_sector(in));
		put_le32(data + 8, shape % 2 ? fuzz_u8(in) % (SECTORS + 2) : fuzz_u32(in));
		put_le32(data + 12, fuzz_u8(in) % 4);
	}
	guest_mem_write(&t.fake.mem, t.hdr, &hdr, sizeof(hdr));
	guest_mem_write(&t.fake.mem, GPA(t.hdr.v + 64), &status, 1);
	guest_mem_write(&t.fake.mem, t.data, data, bytes);
	nr = cut(in, bufs, 2, t.hdr, hdr_bytes, false);
	nr += cut(in, bufs + nr, PIECES_MAX, t.data, bytes, in_data);
	if (shape != 254)
		bufs[nr++] = (struct fake_buf){GPA(t.hdr.v + 64), 1, true};
	if (fake_add_indirect(&t.fake, 0, bufs, nr, GPA(t.hdr.v + 1024)) < 0)
		abort();
	fake_kick(&t.fake, 0);
	FUZZ_CHECK(fake_run_until(&t.fake, used, NULL));
	// A lie: what of it the device could still take for a request is not for the copy to tell.
	if (lie)
		return false;
	FUZZ_CHECK(fake_get_used(&t.fake, 0, NULL, NULL));
	guest_mem_read(&t.fake.mem, GPA(t.hdr.v + 64), &status, 1);
	want = model(type, sector, data, bytes);
	FUZZ_CHECK(status == want);
	if (type == VIRTIO_BLK_T_IN && want == VIRTIO_BLK_S_OK) {
		guest_mem_read(&t.fake.mem, t.data, back, bytes);
		FUZZ_CHECK(memcmp(back, data, bytes) == 0);
	}
	return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t file[DISK_BYTES];
	struct fuzz_input in = {data, size};
	struct virtio_blk_stats stats;

	if (!t.up)
		setup();
	memset(t.disk, 0x5a, sizeof(t.disk));
	if (pwrite(t.file, t.disk, sizeof(t.disk), 0) != (ssize_t)sizeof(t.disk))
		abort();
	start();
	for (unsigned int i = 0; i < REQUESTS_MAX && in.left; i++)
		if (!request(&in))
			start();
	virtio_blk_get_stats(t.fake.dev, &stats);
	FUZZ_CHECK(stats.in_flight == 0);
	FUZZ_CHECK(lseek(t.file, 0, SEEK_END) == (off_t)DISK_BYTES);
	FUZZ_CHECK(fd_pread_full(t.file, file, sizeof(file), 0) == (ssize_t)sizeof(file));
	FUZZ_CHECK(memcmp(file, t.disk, sizeof(file)) == 0);
	fake_irqs(&t.fake);
	return 0;
}
