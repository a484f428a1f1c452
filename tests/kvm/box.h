// SPDX-License-Identifier: Apache-2.0
// A machine for the tests of KVM: a little RAM, vCPUs, one device on each bus that writes down what
// reaches it, and guests of a few instructions that stand beside their tests. Test thread, but for
// the device's functions, which the vCPUs call.
#ifndef MAYFLY_TESTS_KVM_BOX_H
#define MAYFLY_TESTS_KVM_BOX_H

#include "tests/support/test.h"
#include "vmm/base/buf.h"
#include "vmm/bus.h"
#include "vmm/guest_mem.h"
#include "vmm/kvm.h"
#include "vmm/vcpu.h"

#define BOX_RAM_BYTES  (2 * MIB)
#define BOX_CODE       0x8000ULL // where a guest's code goes, and starts
#define BOX_HANDLER    0x9000ULL // of its exception
#define BOX_DATA       0x40000ULL // RAM for its own use
#define BOX_STACK      0x80000ULL
#define BOX_MMIO       0xd0000000ULL // the device: two pages
#define BOX_MMIO_BYTES 0x2000ULL
#define BOX_PORT       0x500 // and 16 ports
#define BOX_NR_PORTS   16U
#define BOX_VCPUS_MAX  2

#define BOX_XSTR(x) #x
#define BOX_STR(x)  BOX_XSTR(x)

// Assembles text (AT&T) for 16-bit or 64-bit mode into the array name, of name_end - name bytes.
// It must not depend on its own address.
#define GUEST(name, bits, text)                                                      \
	__asm__(".pushsection .rodata\n" #name ":\n.code" #bits "\n" text "\n" #name \
		"_end:\n.code64\n.popsection\n");                                    \
	extern const uint8_t name[], name##_end[]

struct access {
	bool pio, write;
	uint64_t off;
	unsigned int len;
	uint64_t val; // little-endian, len bytes
};

struct box {
	struct kvm kvm;
	struct guest_mem mem;
	struct bus mmio, pio;
	struct vcpu_env env;
	struct vcpu *vcpus[BOX_VCPUS_MAX];
	unsigned int nr_vcpus;

	// What a read gives. NULL: zeros. vCPU thread.
	uint64_t (*answer)(struct box *box, const struct access *access);
	// Called for each write if set, instead of its being written down. vCPU thread.
	void (*on_write)(struct box *box, const struct access *access);
	void *opaque;

	// Under lock; changed is signalled.
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct access log[256]; // the first ones
	unsigned int nr_log;
	uint64_t nr_writes; // all of them
	bool stopped;
	unsigned int stopped_id;
	enum vcpu_stop stop;
	struct err stop_err;
	unsigned int nr_where;
	struct vcpu_where where[BOX_VCPUS_MAX];
};

// Skips the test, after it has said why, on a machine where /dev/kvm cannot be used.
void require_kvm(void);

// The setup and teardown of a test. A test that hangs is ended, with the whole program, after two
// minutes; a box that it has left is destroyed.
int box_setup(void **state);
int box_teardown(void **state);

// Makes the machine with identity-mapped page tables and the guest at BOX_CODE, not yet started.
// Skips or fails the test if it cannot. One at a time.
struct box *box_make(unsigned int nr_vcpus, const uint8_t *code, const uint8_t *code_end);
void box_destroy(struct box *box);

// In 64-bit mode at CPL 0 with the identity map, rdi = BOX_MMIO, rdx = BOX_PORT, rsi = BOX_DATA.
void box_enter_long_mode(struct box *box);
// In real mode, all segments 0, dx and si as above.
void box_enter_real_mode(struct box *box);
// Then: the interrupt or exception with this vector goes to the handler, in ring 0.
void box_set_handler(
	struct box *box, unsigned int vector, const uint8_t *handler, const uint8_t *handler_end);
// As in long mode, but at CPL 3, and the exception with this vector goes to the handler, in ring 0.
void box_enter_user_mode(
	struct box *box, unsigned int vector, const uint8_t *handler, const uint8_t *handler_end);
void box_start(struct box *box);

// What a snapshot holds besides RAM. The machine is paused, or has not been started.
struct box_state {
	struct buf vm, vcpus[BOX_VCPUS_MAX];
};

void box_save(struct box *box, struct box_state *state);
void box_restore(struct box *box, const struct box_state *state);
void box_state_fini(struct box_state *state);

// Destroys the VM and its vCPUs; RAM and device stay. new makes others, as after box_make().
void box_forget_vm(struct box *box);
void box_new_vm(struct box *box);

// Puts the running machine into a new VM with the same RAM, as a snapshot does. It is paused before
// and after.
void box_move(struct box *box);

// Each waits for as long as it takes (the watch for hangs is the bound).
void box_wait_log(struct box *box, unsigned int nr); // until nr accesses have been written down
void box_wait_write(struct box *box); // until the guest has written anything
void box_wait_writes(struct box *box, uint64_t nr); // until it has written nr times
uint64_t box_writes(struct box *box); // how often it has written
void box_wait_stopped(struct box *box);
void box_wait_where(struct box *box, unsigned int nr);

#endif
