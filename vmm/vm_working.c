// SPDX-License-Identifier: Apache-2.0
// The working set of a machine whose memory is read lazily: what it wants from its restore until
// the first connection after that has ended, its first command, as a rule. Loop thread.
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "devices/virtio_vsock.h"
#include "snapshot/lazy.h"
#include "vmm/base/fd.h"
#include "vmm/vm_private.h"

void vm_working_open(struct vm *vm, const char *snapshot, const struct snapshot_id *id)
{
	const int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
	struct working_set *set = malloc(sizeof(*set));
	char path[PATH_MAX];
	struct stat st;
	CLEANUP_FD int fd = -1;

	if (set && snprintf(path, sizeof(path), "%s/" WORKING_SET_FILE_NAME, snapshot) <
			   (int)sizeof(path)) {
		fd = open(path, O_RDONLY | flags);
		if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
			working_set_read(set, fd, id, guest_mem_size_bytes(&vm->mem)) == 0) {
			vm->working.set = set;
			return;
		}
		fd_close(&fd);
		fd = open(path, O_WRONLY | O_CREAT | flags, 0600);
		if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
			vm->working.fd = TAKE_FD(fd);
	}
	vm->working.id = *id;
	free(set);
}

void vm_working_awake(struct vm *vm)
{
	struct virtio_vsock_stats stats;

	virtio_vsock_get_stats(vm->vsock, &stats);
	vm->working.waking_conns = stats.nr_conns;
	vm->working.awake = true;
}

void vm_on_conn_ended(void *opaque)
{
	struct vm *vm = opaque;
	struct vm_working *working = &vm->working;
	struct working_set *set;

	if (!working->awake || working->fd < 0)
		return;
	if (working->waking_conns > 0) {
		working->waking_conns--;
		return;
	}
	set = vm->lazy ? malloc(sizeof(*set)) : NULL;
	if (set) {
		lazy_wanted(vm->lazy, set);
		// Where it cannot be written the next one tries again.
		(void)working_set_write(
			working->fd, set, &working->id, guest_mem_size_bytes(&vm->mem));
	}
	free(set);
	fd_close(&working->fd);
}

void vm_working_fini(struct vm *vm)
{
	free(TAKE_PTR(vm->working.set));
	if (vm->working.fd > 0)
		fd_close(&vm->working.fd);
}
