// SPDX-License-Identifier: Apache-2.0
// Fuzzes the virtqueue: a driver that mostly plays by the rules and sometimes lies. Each chain that
// is taken or refused is compared with a naive second reading of the same memory.
//
// Input: byte 0 is the size's logarithm, byte 1 the features; then operations of a byte each, with
// their arguments.
#include <errno.h>
#include <linux/virtio_ring.h>

#include "devices/virtqueue.h"
#include "tests/support/fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RAM_BYTES 0x40000U // of which what is below HOLE is in a region of its own
#define HOLE      0x20000U
#define AFTER     0x30000U
#define DESC      0x1000U
#define AVAIL     0x3000U
#define USED      0x4000U
#define TABLES    0x5000U
#define TABLES_NR 4U
#define TABLE_LEN 300U // entries, above the most that is allowed

static struct guest_mem mem;
static struct virtq q;
static uint16_t avail_idx;
static uint16_t size;
static uint16_t model_next; // the model's position in the available ring
static bool model_in_flight[VIRTQ_SIZE_MAX];
static bool model_broken;

static uint8_t *at(uint64_t gpa)
{
	return gpa < HOLE ? mem.regions[0].hva + gpa : mem.regions[1].hva + (gpa - AFTER);
}

static bool model_range(uint64_t addr, uint64_t len)
{
	return (addr < HOLE && len <= HOLE - addr) ||
	       (addr >= AFTER && addr < RAM_BYTES && len <= RAM_BYTES - addr);
}

struct model_chain {
	unsigned int nr[2];
	uint64_t bytes[2];
	uint64_t addr[VIRTQ_CHAIN_MAX];
	uint32_t len[VIRTQ_CHAIN_MAX];
};

static bool model_walk(uint16_t head, struct model_chain *m)
{
	uint64_t table = DESC;
	uint32_t entries = size, idx = head, seen = 0, limit = size;
	bool indirect = false;

	memset(m, 0, sizeof(*m));
	for (;;) {
		const uint8_t *desc;
		uint64_t addr;
		uint32_t len;
		uint16_t flags;
		unsigned int w, nr = m->nr[0] + m->nr[1];

		if (idx >= entries || seen == limit)
			return false;
		seen++;
		desc = at(table + idx * 16ULL);
		addr = get_le64(desc);
		len = get_le32(desc + 8);
		flags = get_le16(desc + 12);
		if (flags & VRING_DESC_F_INDIRECT) {
			if (indirect || !q.indirect || flags & VRING_DESC_F_NEXT || !len ||
				len % 16 || !model_range(addr, len))
				return false;
			indirect = true;
			table = addr;
			entries = len / 16;
			idx = 0;
			seen = 0;
			limit = VIRTQ_CHAIN_MAX - nr;
			continue;
		}
		w = (flags & VRING_DESC_F_WRITE) != 0;
		if (!w && m->nr[1])
			return false;
		if (len) {
			if (m->bytes[0] + m->bytes[1] + len > UINT32_MAX || !model_range(addr, len))
				return false;
			m->addr[nr] = addr;
			m->len[nr] = len;
			m->nr[w]++;
			m->bytes[w] += len;
		}
		if (!(flags & VRING_DESC_F_NEXT))
			return true;
		idx = get_le16(desc + 14);
	}
}

static void pop_and_compare(struct virtq_chain *chain)
{
	static struct model_chain m;
	const uint16_t idx = get_le16(at(AVAIL + 2));
	const uint16_t head = get_le16(at(AVAIL + 4 + 2U * (model_next % size)));
	int want = 1, r;

	if (model_broken)
		want = -EPROTO;
	else if (idx == model_next)
		want = 0;
	else if ((uint16_t)(idx - model_next) > size || head >= size || model_in_flight[head] ||
		 !model_walk(head, &m))
		want = -EPROTO;
	r = virtq_pop(&q, chain);
	FUZZ_CHECK(r == want);
	model_broken = r < 0;
	if (r <= 0)
		return;
	model_next++;
	model_in_flight[head] = true;
	FUZZ_CHECK(chain->head == head);
	FUZZ_CHECK(chain->nr_readable == m.nr[0] && chain->nr_writable == m.nr[1]);
	FUZZ_CHECK(chain->readable_bytes == m.bytes[0] && chain->writable_bytes == m.bytes[1]);
	for (unsigned int i = 0; i < m.nr[0] + m.nr[1]; i++) {
		FUZZ_CHECK(chain->segs[i].len_bytes == m.len[i]);
		FUZZ_CHECK(chain->segs[i].hva == at(m.addr[i]));
	}
}

static void use(const struct virtq_chain *chain, uint16_t seed)
{
	uint8_t buf[300];
	struct iovec iov[5];
	size_t off = seed % 512, bytes, n;
	const size_t room = chain->writable_bytes > off ? chain->writable_bytes - off : 0;

	n = virtq_chain_read(chain, off, buf, sizeof(buf));
	FUZZ_CHECK(n == (chain->readable_bytes > off ? MIN(chain->readable_bytes - off, sizeof(buf))
						     : 0));
	virtq_chain_iov(chain, true, off, 1000, iov, ARRAY_SIZE(iov), &bytes);
	FUZZ_CHECK(bytes <= MIN(room, 1000U));
	// Only where there are no rings, of whose positions the model keeps account.
	if (seed % 7 == 0) {
		virtq_chain_iov(chain, true, off, 8, iov, ARRAY_SIZE(iov), &bytes);
		for (unsigned int i = 0; i < chain->nr_writable; i++)
			if (chain->segs[chain->nr_readable + i].region == &mem.regions[0])
				return;
		virtq_chain_write(chain, off, buf, 8);
	}
}

static uint64_t pick_addr(struct fuzz_input *in)
{
	static const uint64_t often[] = {
		0x10000, 0x18000, HOLE - 64, AFTER, AFTER + 0x8000, RAM_BYTES - 64};
	uint8_t how = fuzz_u8(in);

	if (how < 240)
		return often[how % ARRAY_SIZE(often)] + (how >> 4);
	return how < 252 ? fuzz_u32(in) : fuzz_take(in, 8);
}

static void put_desc(struct fuzz_input *in, uint8_t *desc, uint16_t entries)
{
	static const uint8_t flags_often[] = {0, 1, 1, 1, 2, 3, 3, 2};
	uint64_t addr = pick_addr(in);
	uint8_t kind = fuzz_u8(in);
	uint32_t len = fuzz_u8(in);
	uint16_t next = (uint16_t)(fuzz_u8(in) % entries);
	uint16_t flags = flags_often[kind % 8];

	if (kind >= 250) {
		flags = fuzz_u16(in);
		len = fuzz_u32(in);
		next = fuzz_u16(in);
	} else if (kind >= 200) {
		flags = VRING_DESC_F_INDIRECT;
		addr = TABLES + kind % TABLES_NR * TABLE_LEN * 16;
		len = (len % TABLE_LEN + 1) * 16;
	}
	put_le64(desc, addr);
	put_le32(desc + 8, len);
	put_le16(desc + 12, flags);
	put_le16(desc + 14, next);
}

static void start(struct fuzz_input *in)
{
	uint8_t features = (size = (uint16_t)(1U << fuzz_u8(in) % 9), fuzz_u8(in));
	struct virtq_config config = {.size = size,
		.desc = GPA(DESC),
		.avail = GPA(AVAIL),
		.used = GPA(USED),
		.event_idx = features & 1,
		.indirect = features & 2};
	uint16_t from = features & 4 ? 0xfff0 : 0;
	int r;

	for (unsigned int i = 0; i < mem.nr_regions; i++)
		memset(mem.regions[i].hva, 0, mem.regions[i].size_bytes);
	r = virtq_activate(&q, &config, VIRTQ_SIZE_MAX, &mem);
	FUZZ_CHECK(r == 0);
	// Close to the wrap of the indices, as after a restore.
	q.saved.next_avail = q.saved.next_used = q.saved.published_used = from;
	avail_idx = model_next = from;
	put_le16(at(AVAIL + 2), from);
	memset(model_in_flight, 0, sizeof(model_in_flight));
	model_broken = false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	static const struct guest_mem_range ranges[] = {
		{GPA(0), HOLE}, {GPA(AFTER), RAM_BYTES - AFTER}};
	static struct guest_view segs[VIRTQ_CHAIN_MAX];
	struct fuzz_input in = {data, len};
	struct virtq_chain chain = {.segs = segs};
	uint16_t next_used;

	if (!mem.nr_regions && guest_mem_init(&mem, ranges, ARRAY_SIZE(ranges), NULL) < 0)
		abort();
	start(&in);
	next_used = q.saved.next_used;
	while (in.left) {
		uint8_t op = fuzz_u8(&in), arg;
		bool wanted;

		switch (op % 8) {
		case 0:
			arg = fuzz_u8(&in);
			put_desc(&in, at(DESC + arg % size * 16U), size);
			break;
		case 1:
			arg = fuzz_u8(&in);
			put_desc(&in, at(TABLES + op / 8 % TABLES_NR * TABLE_LEN * 16 + arg * 16U),
				256);
			break;
		case 2: // makes a head available
		case 3:
			arg = fuzz_u8(&in);
			put_le16(at(AVAIL + 4 + 2U * (avail_idx % size)),
				op >= 250 ? fuzz_u16(&in) : arg % size);
			put_le16(at(AVAIL + 2), ++avail_idx);
			break;
		case 4:
		case 5:
			pop_and_compare(&chain);
			use(&chain, op);
			break;
		case 6: // gives one back, or undoes the pop
			arg = fuzz_u8(&in);
			for (unsigned int i = 0; i < size; i++) {
				uint16_t head = (uint16_t)((arg + i) % size);

				if (!model_in_flight[head])
					continue;
				model_in_flight[head] = false;
				virtq_push(&q, head, arg);
				next_used++;
				break;
			}
			FUZZ_CHECK(q.saved.next_used == next_used);
			break;
		default:
			arg = fuzz_u8(&in);
			if (arg == 255) {
				avail_idx = fuzz_u16(&in);
				put_le16(at(AVAIL + 2), avail_idx);
			}
			put_le16(at(USED + 2), arg); // the driver scribbles
			put_le16(at(AVAIL + 4 + 2U * size), (uint16_t)(next_used - arg % 4));
			virtq_publish(&q);
			FUZZ_CHECK(!virtq_publish(&q));
			wanted = virtq_wait(&q);
			FUZZ_CHECK(
				wanted == (model_broken || get_le16(at(AVAIL + 2)) != model_next));
			break;
		}
	}
	return 0;
}
