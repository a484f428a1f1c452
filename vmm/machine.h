// SPDX-License-Identifier: Apache-2.0
// What differs between architectures when a machine is put together: where RAM and devices lie, the
// platform devices, the kernel's parameters, the boot. Implemented by vmm/ARCH/machine.c. Main
// thread.
#ifndef MAYFLY_MACHINE_H
#define MAYFLY_MACHINE_H

#include "vmm/bus.h"
#include "vmm/cmdline.h"
#include "vmm/kvm.h"
#include "vmm/loader.h"
#include "vmm/vcpu.h"

struct buf;
struct loop;
struct machine;
struct serial;

struct machine_config {
	struct kvm *kvm;
	struct loop *loop;
	struct bus *mmio;
	struct bus *pio;
	void (*console)(void *opaque, const uint8_t *data, size_t len); // loop thread
	void (*reset)(void *opaque); // any vCPU thread
	void *opaque;
};

// Where memory_bytes of RAM go. Returns the number of ranges.
int machine_ram_ranges(uint64_t memory_bytes,
	struct guest_mem_range ret_ranges[GUEST_MEM_REGIONS_MAX], struct err *err);

// Makes the platform's devices (console, reset) and puts them on the buses. The config is copied.
int machine_create(
	struct machine **ret_machine, const struct machine_config *config, struct err *err);

// After the vCPUs have stopped. Accepts NULL.
void machine_destroy(struct machine *machine);

// The platform's devices. The vCPUs are parked, or have not been started. What the guest has
// printed so far is handed to the console first. Loop thread. restore: -EINVAL for data that is not
// theirs; it also raises an interrupt again that was on its way, so that the interrupt controllers
// (kvm_restore()) come first.
int machine_save(struct machine *machine, struct buf *out, struct err *err);
int machine_restore(struct machine *machine, const void *data, size_t len, struct err *err);

struct serial *machine_console(struct machine *machine);

// The words that every guest kernel of this machine gets.
int machine_cmdline(const struct vcpu_env *env, struct cmdline *cmdline, struct err *err);

#define MACHINE_VIRTIO_SLOT_BYTES 0x1000ULL

// Address and interrupt of virtio-mmio slot idx; old: the interrupt that it had before snapshots
// told which. -ENOSPC beyond the last.
int machine_virtio_slot(
	unsigned int idx, bool old, gpa_t *ret_gpa, uint32_t *ret_gsi, struct err *err);

struct machine_boot {
	const char *kernel_path; // for messages
	int kernel_fd; // borrowed
	const struct initramfs_part *initramfs;
	unsigned int nr_initramfs;
	const char *cmdline;
};

// Loads the kernel and points vcpus[0] at it.
int machine_boot(struct guest_mem *mem, struct vcpu **vcpus, unsigned int nr_vcpus,
	const struct machine_boot *boot, struct err *err);

#endif
