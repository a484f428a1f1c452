// SPDX-License-Identifier: Apache-2.0
// A disk of a machine: opens what vm.ini says it is on, and makes the device. Loop thread.
#ifndef MAYFLY_DISK_H
#define MAYFLY_DISK_H

#include "devices/virtio_mmio.h"
#include "vmm/config.h"

struct disk_params {
	const struct config_disk *config;
	const char *name; // config_disk_name(): what its files are called
	const char *dir; // the machine's folder, for messages
	int dir_fd; // and itself; borrowed until the device is destroyed
	unsigned int cpus;
	bool throwaway; // nothing of the machine outlives its monitor
};

int disk_create(struct virtio_dev **ret_dev, const struct disk_params *params,
	const struct virtio_env *env, struct err *err);

#endif
