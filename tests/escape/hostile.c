// SPDX-License-Identifier: Apache-2.0
// A guest that attacks its monitor, with nothing between: it is the kernel. It reads and writes
// every port and register, makes devices up and lies to them in every ring, and says on the console
// how often it tried what. It ends the machine by the keyboard controller, as a guest may.
//
// Booted as an ELF kernel with the identity mapping of 4 GiB that the loader makes. One vCPU, no
// interrupts, no C library. Words on its command line: seed=N, rounds=N.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_mmio.h>
#include <linux/virtio_ring.h>
#include <linux/virtio_vsock.h>

#define SLOTS       0xd0000000UL
#define SLOT_BYTES  0x1000UL
#define NR_SLOTS    16U
#define MMIO_GAP    0xc0000000UL
#define ARENA       0x2000000UL // 32 MiB: what devices may be told to write to
#define ARENA_BYTES 0x1000000UL
#define RINGS       ARENA
#define RING_BYTES  0x4000UL // for each of a device's queues
#define QUEUES_MAX  4U
#define BUFFERS     (ARENA + 0x100000UL)
#define RAM_END     0x4000000UL // the test gives 64 MiB
#define QUEUE_SIZE  64U

static struct {
	uint64_t ports, registers, setups, chains, refused, packets, requests;
} did;

// --- Odds and ends ---------------------------------------------------------------------------

static uint64_t seed = 1;

static uint64_t rnd(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed;
}

static uint32_t below(uint32_t n)
{
	return (uint32_t)(rnd() >> 32) % n;
}

static bool one_in(uint32_t n)
{
	return below(n) == 0;
}

// Numbers at which programs break, and any others.
static uint64_t odd_number(void)
{
	static const uint64_t odd[] = {0, 1, 2, 7, 44, 255, 256, 4095, 4096, 65535, 65536,
		0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 1ULL << 55, 1ULL << 63, -1ULL,
		RAM_END - 1, RAM_END, MMIO_GAP, SLOTS};

	return one_in(3) ? rnd() : odd[below(sizeof(odd) / sizeof(odd[0]))] + below(3) - 1;
}

static void out8(uint16_t port, uint8_t val)
{
	__asm__ volatile("outb %0, %1" ::"a"(val), "Nd"(port));
}

static void put_char(char c)
{
	out8(0x3f8, (uint8_t)c);
}

static void say(const char *text)
{
	while (*text)
		put_char(*text++);
}

static void say_count(const char *what, uint64_t n)
{
	char digits[24];
	int i = 0;

	do
		digits[i++] = (char)('0' + n % 10);
	while (n /= 10);
	say(" ");
	say(what);
	say("=");
	while (i)
		put_char(digits[--i]);
}

// The number behind name in the command line.
static uint64_t word(const char *line, const char *name, uint64_t otherwise)
{
	for (; *line; line++) {
		size_t i = 0;
		uint64_t n = 0;

		while (name[i] && line[i] == name[i])
			i++;
		if (name[i])
			continue;
		for (; line[i] >= '0' && line[i] <= '9'; i++)
			n = n * 10 + (uint64_t)(line[i] - '0');
		return n;
	}
	return otherwise;
}

static uint32_t get(unsigned long addr)
{
	return *(volatile uint32_t *)addr;
}

static void set(unsigned long addr, uint64_t val)
{
	*(volatile uint32_t *)addr = (uint32_t)val;
}

// --- Ports and registers ---------------------------------------------------------------------

static void any_port(void)
{
	uint16_t port = (uint16_t)(one_in(2) ? below(0x400) : rnd());
	uint32_t val = (uint32_t)odd_number();

	// A reset ends the machine, and that is for later. The console is for the last words.
	if (port == 0x64 || port == 0x61 || (port >= 0x3f8 && port < 0x400))
		return;
	did.ports++;
	switch (below(6)) {
	case 0:
		__asm__ volatile("outb %b0, %1" ::"a"(val), "Nd"(port));
		break;
	case 1:
		__asm__ volatile("outw %w0, %1" ::"a"(val), "Nd"(port));
		break;
	case 2:
		__asm__ volatile("outl %0, %1" ::"a"(val), "Nd"(port));
		break;
	case 3:
		__asm__ volatile("inb %1, %b0" : "=a"(val) : "Nd"(port));
		break;
	case 4:
		__asm__ volatile("inw %1, %w0" : "=a"(val) : "Nd"(port));
		break;
	default:
		__asm__ volatile("inl %1, %0" : "=a"(val) : "Nd"(port));
		break;
	}
}

static void any_register(void)
{
	unsigned long addr = SLOTS + below(NR_SLOTS) * SLOT_BYTES;
	uint64_t val = odd_number();

	addr += one_in(4) ? below(SLOT_BYTES) : below(0x44) * 4;
	if (one_in(50))
		addr = MMIO_GAP + below(0x3ec00000); // below the interrupt controllers
	did.registers++;
	switch (below(8)) {
	case 0:
		*(volatile uint8_t *)addr = (uint8_t)val;
		break;
	case 1:
		*(volatile uint16_t *)addr = (uint16_t)val;
		break;
	case 2:
	case 3:
	case 4:
		*(volatile uint32_t *)addr = (uint32_t)val;
		break;
	case 5:
		*(volatile uint64_t *)addr = val;
		break;
	case 6:
		(void)*(volatile uint8_t *)addr;
		break;
	default:
		(void)*(volatile uint32_t *)addr;
		break;
	}
}

// --- Devices ---------------------------------------------------------------------------------

struct device {
	unsigned long base;
	uint32_t id;
	uint32_t nr_queues;
	uint16_t avail[QUEUES_MAX];
};

static struct device devices[NR_SLOTS];
static unsigned int nr_devices;

static unsigned long ring_of(uint32_t queue)
{
	return RINGS + queue * RING_BYTES;
}

static struct vring_desc *desc_of(uint32_t queue)
{
	return (struct vring_desc *)ring_of(queue);
}

static volatile uint16_t *avail_of(uint32_t queue)
{
	return (volatile uint16_t *)(ring_of(queue) + 0x1000);
}

static void find_devices(void)
{
	for (unsigned int i = 0; i < NR_SLOTS; i++) {
		unsigned long base = SLOTS + i * SLOT_BYTES;

		if (get(base + VIRTIO_MMIO_MAGIC_VALUE) != 0x74726976 ||
			!get(base + VIRTIO_MMIO_DEVICE_ID))
			continue;
		devices[nr_devices++] = (struct device){
			.base = base, .id = get(base + VIRTIO_MMIO_DEVICE_ID)};
	}
}

static void set_address(unsigned long low_register, uint64_t addr)
{
	set(low_register, addr);
	set(low_register + 4, addr >> 32);
}

// As a driver does it, but for a lie now and then.
static void set_up(struct device *d)
{
	const bool lie = one_in(4);

	did.setups++;
	set(d->base + VIRTIO_MMIO_STATUS, 0);
	for (int i = 0; i < 1000 && get(d->base + VIRTIO_MMIO_STATUS); i++)
		;
	set(d->base + VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE);
	set(d->base + VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER);
	for (uint32_t sel = 0; sel < 2; sel++) {
		uint32_t features;

		set(d->base + VIRTIO_MMIO_DEVICE_FEATURES_SEL, sel);
		features = get(d->base + VIRTIO_MMIO_DEVICE_FEATURES);
		if (lie && one_in(8))
			features = (uint32_t)rnd();
		else if (one_in(2))
			features &= (uint32_t)rnd() | sel; // VERSION_1 is bit 0 of the second
		set(d->base + VIRTIO_MMIO_DRIVER_FEATURES_SEL, sel);
		set(d->base + VIRTIO_MMIO_DRIVER_FEATURES, features);
	}
	set(d->base + VIRTIO_MMIO_STATUS,
		VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK);
	for (d->nr_queues = 0; d->nr_queues < QUEUES_MAX; d->nr_queues++) {
		uint32_t q = d->nr_queues;

		set(d->base + VIRTIO_MMIO_QUEUE_SEL, q);
		if (!get(d->base + VIRTIO_MMIO_QUEUE_NUM_MAX))
			break;
		for (unsigned long at = ring_of(q); at < ring_of(q) + QUEUE_SIZE * 16; at += 8)
			*(volatile uint64_t *)at = 0;
		d->avail[q] = 0;
		avail_of(q)[1] = 0;
		set(d->base + VIRTIO_MMIO_QUEUE_NUM, lie && one_in(8) ? odd_number() : QUEUE_SIZE);
		set_address(d->base + VIRTIO_MMIO_QUEUE_DESC_LOW,
			lie && one_in(8) ? odd_number() : ring_of(q));
		set_address(d->base + VIRTIO_MMIO_QUEUE_AVAIL_LOW,
			lie && one_in(8) ? odd_number() : ring_of(q) + 0x1000);
		// What the device writes must not be this program.
		set_address(d->base + VIRTIO_MMIO_QUEUE_USED_LOW,
			lie && one_in(8) ? RAM_END - below(0x1000) : ring_of(q) + 0x2000);
		set(d->base + VIRTIO_MMIO_QUEUE_READY, 1);
	}
	set(d->base + VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER |
						  VIRTIO_CONFIG_S_FEATURES_OK |
						  VIRTIO_CONFIG_S_DRIVER_OK);
}

// An address that is the arena's or no RAM at all.
static uint64_t any_address(void)
{
	switch (below(120)) {
	case 0:
		return RAM_END - below(64);
	case 1:
		return MMIO_GAP + rnd() % 0x40000000;
	case 2:
		return -(uint64_t)below(4096);
	default:
		return BUFFERS + below(0xe00) * 4096UL + (one_in(4) ? below(4096) : 0);
	}
}

static uint32_t any_length(void)
{
	return one_in(60) ? (uint32_t)odd_number() : one_in(2) ? below(70000) : below(64);
}

// Descriptors first to first + nr - 1, of this and the next one's flags; mostly well-formed.
static void put_desc(uint32_t queue, uint16_t i, uint64_t addr, uint32_t len, uint16_t flags)
{
	struct vring_desc *d = &desc_of(queue)[i % QUEUE_SIZE];

	d->addr = addr;
	d->len = len;
	d->flags = flags;
	d->next = (uint16_t)(one_in(300) ? rnd() : (i + 1) % QUEUE_SIZE);
	if (one_in(300))
		d->flags = (uint16_t)rnd();
}

static void put_any_chain(uint32_t queue, uint16_t head)
{
	uint32_t nr = 1 + below(5);

	for (uint32_t i = 0; i < nr; i++)
		put_desc(queue, (uint16_t)(head + i), any_address(), any_length(),
			(uint16_t)((i + 1 < nr ? VRING_DESC_F_NEXT : 0) |
				   (below(3) ? VRING_DESC_F_WRITE : 0)));
}

// A packet that could be one: each field right, or odd.
static void put_packet(uint16_t head)
{
	struct virtio_vsock_hdr *hdr = (struct virtio_vsock_hdr *)(BUFFERS + below(1024) * 4096UL);
	static const uint32_t ports[] = {0, 1, 1024, 1025, 52, 5000, 8080, 0xffffffff};

	hdr->src_cid = one_in(20) ? odd_number() : 3;
	hdr->dst_cid = one_in(20) ? odd_number() : 2;
	hdr->src_port = one_in(2) ? below(64) : (uint32_t)rnd();
	hdr->dst_port = one_in(2) ? ports[below(8)] : below(70000);
	hdr->len = one_in(4) ? any_length() : 0;
	hdr->type = (uint16_t)(one_in(20) ? rnd() : VIRTIO_VSOCK_TYPE_STREAM);
	hdr->op = (uint16_t)(one_in(3) ? VIRTIO_VSOCK_OP_REQUEST : below(9));
	hdr->flags = (uint32_t)(one_in(2) ? 0 : rnd());
	hdr->buf_alloc = (uint32_t)odd_number();
	hdr->fwd_cnt = (uint32_t)odd_number();
	did.packets++;
	put_desc(1, head, (uint64_t)hdr, sizeof(*hdr), hdr->len ? VRING_DESC_F_NEXT : 0);
	if (hdr->len)
		put_desc(1, (uint16_t)(head + 1), any_address(), any_length(), 0);
}

static void put_request(uint32_t queue, uint16_t head)
{
	struct virtio_blk_outhdr *hdr =
		(struct virtio_blk_outhdr *)(BUFFERS + below(1024) * 4096UL);

	hdr->type = one_in(8) ? (uint32_t)rnd() : below(14);
	hdr->ioprio = 0;
	hdr->sector = one_in(2) ? below(4096) : odd_number();
	did.requests++;
	put_desc(queue, head, (uint64_t)hdr, sizeof(*hdr), VRING_DESC_F_NEXT);
	put_desc(queue, (uint16_t)(head + 1), any_address(), one_in(3) ? any_length() : 4096,
		(uint16_t)(VRING_DESC_F_NEXT | (one_in(2) ? VRING_DESC_F_WRITE : 0)));
	put_desc(queue, (uint16_t)(head + 2), BUFFERS, 1, VRING_DESC_F_WRITE);
}

static void offer(struct device *d)
{
	uint32_t queue = d->nr_queues ? below(d->nr_queues) : 0;
	uint16_t head = (uint16_t)(below(QUEUE_SIZE / 8) * 8);
	volatile uint16_t *avail = avail_of(queue);
	uint32_t nr = 1 + below(3);

	for (uint32_t i = 0; i < nr; i++, head = (uint16_t)((head + 8) % QUEUE_SIZE)) {
		if (one_in(20))
			put_any_chain(queue, head);
		else if (d->id == VIRTIO_ID_VSOCK && queue == 1)
			put_packet(head);
		else if (d->id == VIRTIO_ID_BLOCK)
			put_request(queue, head);
		else
			put_desc(queue, head, any_address(), any_length(),
				d->id == VIRTIO_ID_BALLOON || (d->id == VIRTIO_ID_NET && queue == 1)
					? 0
					: VRING_DESC_F_WRITE);
		avail[2 + d->avail[queue]++ % QUEUE_SIZE] = (uint16_t)(one_in(400) ? rnd() : head);
		did.chains++;
	}
	if (one_in(200))
		d->avail[queue] = (uint16_t)rnd();
	avail[0] = (uint16_t)(one_in(50) ? rnd() : 0);
	__atomic_store_n(&avail[1], d->avail[queue], __ATOMIC_SEQ_CST);
	set(d->base + VIRTIO_MMIO_QUEUE_NOTIFY, one_in(100) ? odd_number() : queue);
	if (get(d->base + VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET) {
		did.refused++;
		set_up(d);
	}
}

// --- All of it -------------------------------------------------------------------------------

// Balloon: page numbers of the arena, or of nowhere.
static void fill_buffers(void)
{
	for (uint32_t i = 0; i < 4096; i++)
		((volatile uint32_t *)BUFFERS)[i] =
			(uint32_t)(one_in(8) ? rnd() : (ARENA + 0x800000) / 4096 + below(2048));
}

// Those of the loader are where devices can be told to write.
static void own_tables(void)
{
	static uint64_t tables[6][512] __attribute__((aligned(4096)));

	tables[0][0] = (uint64_t)tables[1] | 3;
	for (unsigned int i = 0; i < 4; i++)
		tables[1][i] = (uint64_t)tables[2 + i] | 3;
	for (uint64_t i = 0; i < 2048; i++)
		tables[2 + i / 512][i % 512] = i << 21 | 0x83; // 2 MiB each
	__asm__ volatile("mov %0, %%cr3" ::"r"(tables) : "memory");
}

static void attack(const char *line)
{
	// First: it may come to overwrite its own command line.
	const uint64_t rounds = word(line, "rounds=", 100), flood = word(line, "flood=", 0);

	own_tables();
	seed = word(line, "seed=", 1) * 0x9e3779b97f4a7c15ULL | 1;
	say("hostile: begins\n");
	find_devices();
	fill_buffers();
	for (uint64_t round = 0; round < rounds; round++) {
		struct device *d = &devices[round % nr_devices];

		for (int i = 0; i < 20; i++)
			any_port();
		set_up(d);
		for (int i = 0; i < 60; i++)
			offer(d);
		for (int i = 0; i < 40; i++)
			any_register();
	}
	// The console gets its own: more than its log holds.
	for (uint64_t i = 0; i < flood; i += 1024) {
		const uint8_t *from = (const uint8_t *)BUFFERS;
		uint64_t count = 1024;

		__asm__ volatile("rep outsb" : "+S"(from), "+c"(count) : "d"(0x3f8) : "memory");
	}
	for (int i = 0; i < 1000; i++) // but for its last words
		out8((uint16_t)(0x3f9 + below(6)), (uint8_t)rnd());
	out8(0x3fb, 3);
	out8(0x3f9, 0);
	out8(0x3fc, 3);
	say("\nhostile:");
	say_count("devices", nr_devices);
	say_count("ports", did.ports);
	say_count("registers", did.registers);
	say_count("setups", did.setups);
	say_count("chains", did.chains);
	say_count("packets", did.packets);
	say_count("requests", did.requests);
	say_count("refused", did.refused);
	say(" done\n");
	out8(0x64, 0xfe);
}

__attribute__((used)) static void enter(const uint8_t *boot_params)
{
	// The setup header's cmd_line_ptr.
	attack((const char *)(uintptr_t) * (const uint32_t *)(boot_params + 0x228));
	for (;;)
		__asm__ volatile("cli; hlt");
}

static char stack[65536] __attribute__((aligned(16), used));

__attribute__((naked, used, section(".text.start"))) void _start(void);
__attribute__((naked, used, section(".text.start"))) void _start(void)
{
	__asm__("cli\n"
		"	lea stack+65536(%rip), %rsp\n"
		"	mov %rsi, %rdi\n"
		"	call enter\n");
}
