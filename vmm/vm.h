// SPDX-License-Identifier: Apache-2.0
// Puts a machine together out of its parts, runs it, takes it apart. The only module that knows
// them all. Loop thread.
#ifndef MAYFLY_VM_H
#define MAYFLY_VM_H

#include "snapshot/image.h"
#include "vmm/config.h"
#include "vmm/jail.h"
#include "vmm/vcpu.h"

struct vm;

// In the working directory of the process, which is the machine's run folder.
#define VM_VSOCK_SOCKET  "vsock.sock"
#define VM_WAKING_SOCKET "waking.sock" // its name until vm_awake()

// The sections of a snapshot that say, for the disk of that index, on which frozen layer it goes
// on: its name in layers/, as text with a NUL. Who restores puts layers and a new top in place
// first (devices/overlay.h).
#define VM_DISK_SECTION "disk.%u"

enum vm_end_reason {
	VM_END_RESET, // the guest asked for a reset, which ends the VM
	VM_END_STOPPED, // vm_stop()
	VM_END_ERROR, // something failed: err says what
};

// How the memory of a snapshot gets into the guest.
enum vm_memory_way {
	VM_MEMORY_AUTO, // mapped if it can be, else lazy, else eager
	VM_MEMORY_MAPPED, // copy on write from the file, which must not be compressed
	VM_MEMORY_LAZY, // read when wanted, through userfaultfd; where that is not allowed, as auto
	VM_MEMORY_EAGER, // read at once
};

// "auto", "mapped", "lazy", "eager". -EINVAL.
int vm_memory_way_parse(const char *text, enum vm_memory_way *ret_way, struct err *err);

struct vm_params {
	const struct config *config; // borrowed until vm_destroy()
	const char *dir; // the machine's folder, which is its identity; borrowed likewise
	// The folder of a snapshot to go on from, instead of booting; NULL: none. Borrowed. The
	// vsock socket has its other name until vm_awake(), so that only who wakes the guest
	// reaches it.
	const char *snapshot;
	enum vm_memory_way memory_way;
	int dir_fd; // the folder of dir; borrowed likewise
	bool throwaway; // its folder goes when the monitor does
	// What the guest prints. Loop thread. It must not block.
	void (*console)(void *opaque, const uint8_t *data, size_t len);
	// Confines the process: from vm_create(), when all files are open and before there are
	// other threads; NULL: not at all.
	int (*confine)(void *opaque, struct err *err);
	// Confines the calling thread, or the process that writes a snapshot, to what its kind
	// does; NULL: not at all.
	int (*confine_thread)(enum jail_kind kind, struct err *err);
	// All vCPUs have answered to vm_log_where(). A vCPU thread.
	void (*where_told)(void *opaque);
	// The guest waits for memory that cannot be had: nothing is left but to end the process.
	// Any thread; must not return.
	void (*fatal)(void *opaque, const struct err *err);
	void *opaque;
};

// Makes the machine, with its kernel loaded, ready to run.
int vm_create(struct vm **ret_vm, const struct vm_params *params, struct err *err);

// Accepts NULL.
void vm_destroy(struct vm *vm);

// Runs until the guest or somebody ends it. *ret_end is set in any case; negative only with
// VM_END_ERROR.
int vm_run(struct vm *vm, enum vm_end_reason *ret_end, struct err *err);

// Ends it. Any thread, not from a signal handler.
void vm_stop(struct vm *vm);

// Logs where each vCPU is, with the kernel's symbol if System.map lies beside the kernel.
void vm_log_where(struct vm *vm);

// --- Rest and snapshots; loop thread ----------------------------------------------------------

// Brings the machine to rest, its vCPUs parked and no I/O in flight, and calls done, from the loop.
// -EBUSY if it rests already or is about to.
int vm_pause(struct vm *vm, void (*done)(void *opaque), void *opaque, struct err *err);

// -EINVAL if it does not rest on account of vm_pause().
int vm_resume(struct vm *vm, struct err *err);

bool vm_is_paused(const struct vm *vm);

// After a restore: the guest is itself, whoever wants to may speak to it.
int vm_awake(struct vm *vm, struct err *err);

#define VM_LIVE_ROUNDS_MAX 8

struct vm_snapshot_result {
	struct snapshot_id parent; // none: it stands alone
	uint64_t blackout_ns; // for so long the guest did not run
	uint64_t held_pages, written_bytes, state_bytes;
	// Of one that was taken live: before, it did not run for so long, so that its writes are
	// logged; the rounds while it ran; and what was left for the end, written while it did not
	// run, or, if that would have been too long, from a fork.
	uint64_t begin_ns;
	unsigned int nr_rounds;
	struct {
		uint64_t bytes, ns;
	} rounds[VM_LIVE_ROUNDS_MAX];
	uint64_t last_bytes;
	bool forked;
};

// Writes a snapshot called id to its files "state" and "memory", which are empty, and taken over in
// any case; synced; the disks' layers that belong to it are frozen where they are
// (VM_DISK_SECTION). -ENOTSUP if a disk cannot be frozen. diff: only what has changed since the
// last one that was committed, or that the machine was restored from (-ENOENT if there is none).
// track: another diff may follow, so that changes are to be recorded from now on. done is called
// from the loop; after success vm_snapshot_settle() must follow. -EBUSY if another one is under
// way.
// live: memory is copied while the guest runs, in rounds, each of what was changed during the one
// before; it stands still for what is left when that takes no longer than downtime_ns. Stands
// alone; not of a machine that is paused (-EINVAL). Not synced, and the state lacks the section
// "memory", which the caller makes (memory_index()).
// hold: the machine rests from that moment on, until vm_resume().
struct vm_snapshot_request {
	struct snapshot_id id;
	int state_fd, memory_fd;
	bool diff, track;
	bool unsynced; // the caller syncs the files, later; their folder it does in any case
	bool compress; // the memory
	bool live, hold;
	uint64_t downtime_ns;
	void (*done)(void *opaque, int r, const struct vm_snapshot_result *result,
		const struct err *err);
	void *opaque;
};
int vm_snapshot(struct vm *vm, const struct vm_snapshot_request *request, struct err *err);

// The snapshot that a diff would build upon, as text; "" if there is none.
void vm_changes_since(const struct vm *vm, char ret_text[SNAPSHOT_ID_TEXT_LEN + 1]);

// Whether it has been committed: only then later diffs may build upon it.
void vm_snapshot_settle(struct vm *vm, bool committed);

struct vm_stats {
	uint64_t first_run_ns; // CLOCK_MONOTONIC of the first KVM_RUN, 0 if none
	uint64_t first_run_cpu_ns; // CPU time of this process until about then
	uint64_t exits[VCPU_EXIT_KINDS];
	uint64_t unclaimed; // accesses that no device answered
	uint64_t console_bytes;
	uint64_t console_dropped;
	uint64_t lazy_faults; // of memory that is read when it is wanted
	uint64_t prefetched; // frames of it that were read before (snapshot/working_set.h)
	bool emulated_ring0;
};

void vm_stats(struct vm *vm, struct vm_stats *ret_stats);

// Whether an address of this process lies in the guest's RAM.
bool vm_is_guest_ram(const struct vm *vm, const void *addr);

struct loop *vm_loop(struct vm *vm);

// Every machine has one: for virtio_balloon_set_target() and its sisters. Loop thread.
struct virtio_dev *vm_balloon(struct vm *vm);

#endif
