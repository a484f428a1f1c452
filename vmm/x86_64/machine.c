// SPDX-License-Identifier: Apache-2.0
// The x86-64 machine: a UART, the keyboard controller's reset line, an I/O APIC with a pin for each
// virtio device. Main thread.
#include "vmm/machine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "devices/i8042.h"
#include "devices/serial.h"
#include "vmm/base/fd.h"
#include "vmm/x86_64/boot.h"
#include "vmm/x86_64/layout.h"
#include "vmm/x86_64/vcpu_x86.h"

_Static_assert(MACHINE_VIRTIO_SLOT_BYTES == LAYOUT_VIRTIO_SLOT_BYTES, "one size of a slot");

struct machine {
	struct serial *serial;
	int serial_irq_fd;
	struct i8042 i8042;
};

int machine_ram_ranges(uint64_t memory_bytes,
	struct guest_mem_range ret_ranges[GUEST_MEM_REGIONS_MAX], struct err *err)
{
	return layout_ram_ranges(memory_bytes, ret_ranges, err);
}

int machine_create(
	struct machine **ret_machine, const struct machine_config *config, struct err *err)
{
	struct machine *machine = calloc(1, sizeof(*machine));
	struct serial_config serial = {.sink = config->console, .opaque = config->opaque};
	int r;

	if (!machine)
		return err_errno(err, -ENOMEM, "machine");
	machine->i8042 = (struct i8042){.reset = config->reset, .opaque = config->opaque};
	machine->serial_irq_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (machine->serial_irq_fd < 0) {
		r = err_errno(err, -errno, "eventfd");
		goto fail;
	}
	serial.irq_fd = machine->serial_irq_fd;
	r = serial_create(&machine->serial, &serial, config->loop, err);
	if (r == 0)
		r = kvm_irqfd(config->kvm, machine->serial_irq_fd, SERIAL_COM1_IRQ, err);
	if (r == 0)
		r = bus_add(config->pio, SERIAL_COM1_PORT, SERIAL_NR_PORTS, &serial_bus_ops,
			machine->serial, err);
	if (r == 0)
		r = bus_add(config->pio, I8042_PORT, I8042_NR_PORTS, &i8042_bus_ops,
			&machine->i8042, err);
	if (r < 0)
		goto fail;
	*ret_machine = machine;
	return 0;
fail:
	machine_destroy(machine);
	return r;
}

void machine_destroy(struct machine *machine)
{
	if (!machine)
		return;
	serial_destroy(machine->serial);
	fd_close(&machine->serial_irq_fd);
	free(machine);
}

int machine_save(struct machine *machine, struct buf *out, struct err *err)
{
	int r;

	serial_flush(machine->serial);
	r = serial_save(machine->serial, out); // the i8042 has no state
	return r < 0 ? err_errno(err, r, "console") : 0;
}

int machine_restore(struct machine *machine, const void *data, size_t len, struct err *err)
{
	int r = serial_restore(machine->serial, data, len, err);

	if (r < 0)
		return err_wrap(err, r, "console");
	serial_resume(machine->serial);
	return 0;
}

struct serial *machine_console(struct machine *machine)
{
	return machine->serial;
}

int machine_cmdline(const struct vcpu_env *env, struct cmdline *cmdline, struct err *err)
{
	// reboot=k: by the keyboard controller, which is how the monitor learns of it. The TSC is
	// what KVM says it is: no calibration against timers that are slow to emulate.
	int r = cmdline_add(cmdline, err,
		"console=ttyS0 quiet reboot=k panic=-1 tsc=reliable no_timer_check "
		"mitigations=off");

	// Where the host emulates ring 0, each kernel instruction counts; docs/hosts.md has the
	// reasons for each of these.
	if (r == 0 && env->emulated_ring0)
		r = cmdline_add(cmdline, err,
			"emulated_ring0 rodata=off clearcpuid=erms,fsrm,smap,smep,popcnt,ssse3");
	return r;
}

int machine_virtio_slot(
	unsigned int idx, bool old, gpa_t *ret_gpa, uint32_t *ret_gsi, struct err *err)
{
	if (idx >= LAYOUT_VIRTIO_SLOTS)
		return err_set(err, -ENOSPC, "more than %u devices", LAYOUT_VIRTIO_SLOTS);
	*ret_gpa = layout_virtio_gpa(idx);
	*ret_gsi = old ? layout_virtio_old_gsi(idx) : layout_virtio_gsi(idx);
	return 0;
}

int machine_boot(struct guest_mem *mem, struct vcpu **vcpus, unsigned int nr_vcpus,
	const struct machine_boot *boot, struct err *err)
{
	struct boot_config config = {
		.kernel_name = boot->kernel_path,
		.kernel_fd = boot->kernel_fd,
		.want = BOOT_ANY,
		.initramfs = boot->initramfs,
		.nr_initramfs = boot->nr_initramfs,
		.cmdline = boot->cmdline,
		.nr_cpus = nr_vcpus,
	};
	struct boot_entry entry;
	int r = boot_load(mem, &config, &entry, err);

	return r < 0 ? r : vcpu_x86_boot(vcpus[0], &entry, err);
}
