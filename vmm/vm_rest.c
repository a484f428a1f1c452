// SPDX-License-Identifier: Apache-2.0
// Bringing a machine to rest and on again; see the headers. Loop thread, but for what is said.
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "devices/virtio_mmio.h"
#include "vmm/base/fd.h"
#include "vmm/vm_private.h"

// A vCPU thread.
void vm_on_vcpu_parked(void *opaque)
{
	struct vm *vm = opaque;
	uint64_t one = 1;
	ssize_t ignored = write(vm->rest.parked_fd, &one, sizeof(one));

	(void)ignored;
}

static void on_drained(void *opaque)
{
	struct vm *vm = opaque;

	ASSERT(vm->rest.draining > 0);
	if (--vm->rest.draining > 0)
		return;
	vm->rest.asked = false;
	vm->rest.resting = true;
	vm->rest.done(vm->rest.opaque);
}

static void on_parked(void *opaque, uint32_t revents)
{
	struct vm *vm = opaque;
	uint64_t count;

	(void)revents;
	if (read(vm->rest.parked_fd, &count, sizeof(count)) < 0)
		return;
	if (!vm->rest.asked || vm->rest.draining || !vcpus_parked(vm->vcpus, vm->nr_vcpus))
		return;
	// One more than there are, so that it is over only when all have been asked.
	vm->rest.draining = vm->nr_virtio + 1;
	for (unsigned int i = 0; i < vm->nr_virtio; i++)
		virtio_dev_drain(vm->virtio[i].dev, on_drained, vm);
	on_drained(vm);
}

int vm_rest_init(struct vm *vm, struct err *err)
{
	int r;

	vm->rest.parked_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (vm->rest.parked_fd < 0)
		return err_errno(err, -errno, "eventfd");
	r = loop_watch_add(&vm->loop, vm->rest.parked_fd, POLLIN, on_parked, vm, err);
	if (r < 0)
		return r;
	vm->rest.watch = r;
	return 0;
}

void vm_rest_fini(struct vm *vm)
{
	vm_snapshot_fini(vm);
	if (vm->loop.up)
		loop_watch_del(&vm->loop, &vm->rest.watch);
	fd_close(&vm->rest.parked_fd);
}

void vm_rest_start(struct vm *vm, void (*done)(void *opaque), void *opaque)
{
	ASSERT(!vm->rest.asked && !vm->rest.resting);
	vm->rest.asked = true;
	vm->rest.done = done;
	vm->rest.opaque = opaque;
	vcpus_ask_pause(vm->vcpus, vm->nr_vcpus);
	vm_on_vcpu_parked(vm); // if none runs any more
}

void vm_resume_devices(struct vm *vm)
{
	vm->rest.resting = false;
	for (unsigned int i = 0; i < vm->nr_virtio; i++)
		virtio_dev_resume(vm->virtio[i].dev);
}

void vm_rest_end(struct vm *vm)
{
	vm_resume_devices(vm);
	vcpus_resume(vm->vcpus, vm->nr_vcpus);
}

int vm_pause(struct vm *vm, void (*done)(void *opaque), void *opaque, struct err *err)
{
	if (vm->rest.asked || vm->saving.busy)
		return err_set(err, -EBUSY, "a snapshot is being taken, or it is being paused");
	if (vm->rest.resting)
		return err_set(err, -EBUSY, "the machine is paused already");
	vm_rest_start(vm, done, opaque);
	return 0;
}

bool vm_is_paused(const struct vm *vm)
{
	return vm->rest.resting && !vm->saving.busy;
}

int vm_resume(struct vm *vm, struct err *err)
{
	if (!vm->rest.resting || vm->saving.busy)
		return err_set(err, -EINVAL, "the machine is not paused");
	vm_rest_end(vm);
	return 0;
}
