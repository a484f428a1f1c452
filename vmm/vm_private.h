// SPDX-License-Identifier: Apache-2.0
// What the files that make up the machine share: vm.c puts it together and runs it, vm_rest.c
// brings it to rest, vm_snapshot.c saves and restores it. Not for others.
#ifndef MAYFLY_VM_PRIVATE_H
#define MAYFLY_VM_PRIVATE_H

#include "vmm/kvm.h"
#include "vmm/loop.h"
#include "vmm/vm.h"

struct chain;
struct lazy;
struct virtio_dev;
struct working_set;

#define VIRTIO_DEVICES_MAX 16

// Coming to rest: the vCPUs park, then the devices drain. The loop turns meanwhile, since a vCPU in
// a register access may wait for it.
struct vm_rest {
	int parked_fd; // an eventfd: a vCPU has parked
	int watch;
	bool asked; // on the way
	bool resting;
	unsigned int draining; // devices that are not drained yet
	void (*done)(void *opaque);
	void *opaque;
};

// A snapshot under way, and what the next diff is to hold.
enum vm_changes {
	VM_CHANGES_UNKNOWN, // there is no snapshot that RAM derives from
	VM_CHANGES_PAGES, // restored: the pages that are ours alone
	VM_CHANGES_LOG, // KVM's dirty log, and what this process has written itself
};

// Memory that is copied while the guest runs; see vm_live.c.
struct vm_live {
	struct loop_op op;
	bool writing; // op is in flight
	uint64_t *round; // a bit a page: what is still to be copied; NULL: nothing is under way
	uint64_t page, nr_pages; // of op: where, and how many; then where to look for the next
	uint64_t start_ns, bytes; // of this round
	uint64_t last_pages; // that the round before was of
};

// The disks, synced one after the other before the machine comes to rest.
struct vm_presync {
	struct loop_op op;
	bool busy; // op is in flight
	unsigned int disk;
};

struct vm_saving {
	bool busy; // from the request to its end
	bool settling; // written, not yet committed
	struct vm_snapshot_request request;
	struct vm_snapshot_result result;
	uint64_t rest_start_ns;
	bool paused; // it rests by vm_pause() and is to go on resting
	pid_t child;
	int result_fd; // a pipe: what it says at its end
	int watch;

	struct snapshot_id parent; // that changes are counted from
	enum vm_changes changes;
	// While a snapshot begins, a bit a page: what is to be written, and, with lazy memory (else
	// NULL), what is there.
	uint64_t *pages, *present;
	struct vm_live live;
	struct vm_presync presync;
	uint64_t *carried; // changed before the log was last read, and in no committed snapshot
	bool logging;
};

// Which pages the guest wants first (snapshot/working_set.h), of memory that is read lazily.
struct vm_working {
	struct working_set *set; // to fetch; NULL: none is known
	int fd; // the file to write, as long as that is to be done, or -1
	struct snapshot_id id;
	bool awake;
	uint32_t waking_conns; // that are older than that, and have not ended
};

struct vm {
	struct vm_params params;
	struct kvm kvm;
	struct loop loop;
	struct guest_mem mem;
	struct bus mmio;
	struct bus pio;
	struct machine *machine;
	struct vcpu_env env;
	bool env_up;
	struct vcpu *vcpus[CONFIG_CPUS_MAX];
	unsigned int nr_vcpus;
	struct virtio_slot {
		struct virtio_dev *dev;
		int irq_fd;
	} virtio[VIRTIO_DEVICES_MAX];
	unsigned int nr_virtio;
	unsigned int disk_idx; // of the one that make_disk() is to make
	struct virtio_dev *disks[CONFIG_DISKS_MAX]; // of them; NULL: there is none
	struct virtio_dev *vsock, *balloon; // of them
	uint64_t start_cpu_ns;
	_Atomic unsigned int where_owed; // answers to vm_log_where()
	int symbols_fd; // System.map, or -1
	int oom_fd; // /proc/self/oom_score_adj, or -1
	char oom_score[8]; // what it was at the start
	struct vm_rest rest;
	struct vm_saving saving;
	// Of one that was restored otherwise than mapped: where its memory is from. NULL: of none.
	struct chain *chain;
	struct lazy *lazy;
	struct vm_working working;

	// How it ended: the first word counts. Under lock, set by any thread.
	pthread_mutex_t lock;
	bool ended;
	enum vm_end_reason end;
	struct err end_err;
};

// Ends it; any thread.
// params.confine
int vm_confine(struct vm *vm, struct err *err);

void vm_end(struct vm *vm, enum vm_end_reason how, const struct err *err);

int vm_rest_init(struct vm *vm, struct err *err);
void vm_rest_fini(struct vm *vm);
void vm_on_vcpu_parked(void *opaque); // a vCPU thread

// As vm_pause() and vm_resume(), for snapshots, which pause a machine that may rest already.
void vm_rest_start(struct vm *vm, void (*done)(void *opaque), void *opaque);
void vm_rest_end(struct vm *vm);
void vm_resume_devices(struct vm *vm);

// For vm_live.c: the log of changes; bringing the machine to rest for the moment of the snapshot;
// giving it up.
int vm_log_changes(struct vm *vm, struct err *err);
void vm_snapshot_rest(struct vm *vm);
void vm_snapshot_failed(struct vm *vm, int r, const struct err *err);

// Takes the snapshot that was asked for live; vm_snapshot_rest() when it is time.
void vm_live_start(struct vm *vm);
// At rest: all that is left to copy is known. *ret_now: it is little enough to be written at once.
int vm_live_last(struct vm *vm, bool *ret_now, struct err *err);
// Writes it. In the forked child, too.
int vm_live_write(struct vm *vm, struct err *err);
void vm_live_fini(struct vm *vm); // waits for what is in flight

// Fills a machine that is put together but has not run from the snapshot in a folder; it rests.
int vm_load(struct vm *vm, const char *snapshot, struct err *err);

void vm_snapshot_fini(struct vm *vm);

// Looks what the last restore of the snapshot in the folder has recorded; if nothing, this one is
// to record it. Before the jail. Without either nothing is lost.
void vm_working_open(struct vm *vm, const char *snapshot, const struct snapshot_id *id);
void vm_working_awake(struct vm *vm);
void vm_on_conn_ended(void *opaque); // a connection to the guest
void vm_working_fini(struct vm *vm);

// When nobody touches guest memory any more.
void vm_memory_fini(struct vm *vm);

#endif
