// SPDX-License-Identifier: Apache-2.0
// The VM side of KVM; see the header. Main thread.
#include "vmm/kvm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "vmm/base/fd.h"

static const struct kvm_need needs[] = {
	{KVM_CAP_USER_MEMORY, "KVM_CAP_USER_MEMORY"},
	{KVM_CAP_DESTROY_MEMORY_REGION_WORKS, "KVM_CAP_DESTROY_MEMORY_REGION_WORKS"},
	{KVM_CAP_IRQCHIP, "KVM_CAP_IRQCHIP"},
	{KVM_CAP_IRQFD, "KVM_CAP_IRQFD"},
	{KVM_CAP_IOEVENTFD, "KVM_CAP_IOEVENTFD"},
	{KVM_CAP_IMMEDIATE_EXIT, "KVM_CAP_IMMEDIATE_EXIT"},
	{0, NULL},
};

int kvm_check(const struct kvm *kvm, int cap)
{
	int r = ioctl(kvm->vm_fd >= 0 ? kvm->vm_fd : kvm->fd, KVM_CHECK_EXTENSION, cap);

	return r < 0 ? 0 : r;
}

static int check_needs(const struct kvm *kvm, const struct kvm_need *need, struct err *err)
{
	for (; need->name; need++)
		if (kvm_check(kvm, need->cap) <= 0)
			return err_set(err, -ENOTSUP,
				"this host's KVM lacks %s: a newer kernel is needed", need->name);
	return 0;
}

int kvm_open(struct kvm *kvm, const char *path, struct err *err)
{
	int r;

	*kvm = (struct kvm){.fd = -1, .vm_fd = -1};
	kvm->fd = open(path, O_RDWR | O_CLOEXEC);
	if (kvm->fd < 0) {
		r = -errno;
		if (r == -ENOENT || r == -ENODEV || r == -ENXIO)
			return err_set(err, r,
				"%s: no KVM on this machine (load kvm_intel or kvm_amd, enable "
				"virtualization in the firmware, or nested virtualization of the "
				"surrounding VM)",
				path);
		if (r == -EACCES || r == -EPERM)
			return err_set(err, r,
				"%s: permission denied (join the group kvm: `sudo usermod -aG kvm "
				"$USER`, then log in again)",
				path);
		return err_errno(err, r, "%s", path);
	}
	r = ioctl(kvm->fd, KVM_GET_API_VERSION, 0);
	if (r != KVM_API_VERSION) {
		r = err_set(err, -ENOTSUP, "%s: not a KVM device of API version %d", path,
			KVM_API_VERSION);
		goto fail;
	}
	r = check_needs(kvm, needs, err);
	if (r == 0)
		r = check_needs(kvm, kvm_arch_needs, err);
	if (r < 0)
		goto fail;
	r = ioctl(kvm->fd, KVM_GET_VCPU_MMAP_SIZE, 0);
	if (r < (int)sizeof(struct kvm_run)) {
		r = err_errno(err, r < 0 ? -errno : -EINVAL, "KVM_GET_VCPU_MMAP_SIZE");
		goto fail;
	}
	kvm->run_bytes = (size_t)r;
	r = kvm_check(kvm, KVM_CAP_MAX_VCPUS);
	kvm->max_vcpus = r > 0 ? (unsigned int)r : 4; // 4 is what the API promises without it
	return 0;
fail:
	kvm_close(kvm);
	return r;
}

int kvm_create_vm(struct kvm *kvm, struct err *err)
{
	int fd;

	do
		fd = ioctl(kvm->fd, KVM_CREATE_VM, 0UL);
	while (fd < 0 && errno == EINTR);
	if (fd < 0)
		return err_errno(err, -errno, "KVM_CREATE_VM");
	kvm->vm_fd = fd;
	return kvm_arch_init_vm(kvm, err);
}

void kvm_close(struct kvm *kvm)
{
	// In a zeroed object the fds are 0, which are not ours.
	if (kvm->vm_fd > 0)
		fd_close(&kvm->vm_fd);
	if (kvm->fd > 0)
		fd_close(&kvm->fd);
	*kvm = (struct kvm){.fd = -1, .vm_fd = -1};
}

int kvm_set_ram(struct kvm *kvm, const struct guest_mem *mem, bool log_dirty, struct err *err)
{
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		const struct guest_mem_region *region = &mem->regions[i];
		struct kvm_userspace_memory_region slot = {
			.slot = i,
			.flags = log_dirty ? KVM_MEM_LOG_DIRTY_PAGES : 0,
			.guest_phys_addr = region->base.v,
			.memory_size = region->size_bytes,
			.userspace_addr = (uintptr_t)region->hva,
		};

		if (ioctl(kvm->vm_fd, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
			return err_errno(err, -errno,
				"KVM_SET_USER_MEMORY_REGION: %llu bytes at 0x%llx",
				(unsigned long long)region->size_bytes,
				(unsigned long long)region->base.v);
	}
	return 0;
}

int kvm_dirty_log(struct kvm *kvm, const struct guest_mem *mem, uint64_t *bitmap, struct err *err)
{
	for (unsigned int i = 0; i < mem->nr_regions; i++) {
		uint64_t pages = mem->regions[i].size_bytes / PAGE_BYTES;
		CLEANUP_FREE uint64_t *log = calloc((pages + 63) / 64, sizeof(*log));
		struct kvm_dirty_log request = {.slot = i, .dirty_bitmap = log};

		if (!log)
			return err_errno(err, -ENOMEM, "dirty log");
		if (ioctl(kvm->vm_fd, KVM_GET_DIRTY_LOG, &request) < 0)
			return err_errno(err, -errno, "KVM_GET_DIRTY_LOG");
		guest_mem_bitmap_add(mem, i, log, bitmap);
	}
	return 0;
}

int kvm_irqfd(struct kvm *kvm, int event_fd, uint32_t gsi, struct err *err)
{
	struct kvm_irqfd irqfd = {.fd = (uint32_t)event_fd, .gsi = gsi};

	if (ioctl(kvm->vm_fd, KVM_IRQFD, &irqfd) < 0)
		return err_errno(err, -errno, "KVM_IRQFD for interrupt %u", gsi);
	return 0;
}

int kvm_ioeventfd(struct kvm *kvm, int event_fd, gpa_t addr, uint32_t datamatch, struct err *err)
{
	struct kvm_ioeventfd ev = {
		.datamatch = datamatch,
		.addr = addr.v,
		.len = 4,
		.fd = event_fd,
		.flags = KVM_IOEVENTFD_FLAG_DATAMATCH,
	};

	if (ioctl(kvm->vm_fd, KVM_IOEVENTFD, &ev) < 0)
		return err_errno(
			err, -errno, "KVM_IOEVENTFD at 0x%llx", (unsigned long long)addr.v);
	return 0;
}
