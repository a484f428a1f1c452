// SPDX-License-Identifier: Apache-2.0
// Virtual CPUs: a thread each, which does nothing but KVM_RUN and what its exits ask for.
//
// To get a vCPU's attention: publish the request in `want`, set immediate_exit in its kvm_run, send
// it the kick signal. The thread clears immediate_exit before it looks at `want`, so a request is
// never lost between the look and KVM_RUN. Before it parks it enters KVM_RUN once more under
// immediate_exit, so that the port or MMIO access that its last exit was about is complete.
#ifndef MAYFLY_VCPU_H
#define MAYFLY_VCPU_H

#include <pthread.h>
#include <stdatomic.h>

#include "vmm/bus.h"
#include "vmm/kvm.h"

struct buf;
struct kvm_run;
struct vcpu;

enum vcpu_exit_kind {
	VCPU_EXIT_IO,
	VCPU_EXIT_MMIO,
	VCPU_EXIT_INTR,
	VCPU_EXIT_ASSIST,
	VCPU_EXIT_OTHER,
	VCPU_EXIT_KINDS,
};

extern const char *const vcpu_exit_names[VCPU_EXIT_KINDS];

// Why a vCPU ended the VM.
enum vcpu_stop {
	VCPU_STOP_RESET, // triple fault: the x86 way of asking for a reset
	VCPU_STOP_ERROR, // KVM or the guest failed in a way that cannot go on; err says how
};

// Where a vCPU was when it was asked.
struct vcpu_where {
	uint64_t ip;
	uint64_t sp;
	uint64_t table_root; // CR3
	unsigned int privilege; // 0 kernel, 3 user
	uint64_t exits;
};

// The surroundings that all vCPUs of a VM share. The callbacks run on a vCPU's thread.
struct vcpu_env {
	struct kvm *kvm;
	const struct guest_mem *mem;
	struct bus *mmio;
	struct bus *pio;
	unsigned int nr_vcpus;
	bool emulated_ring0; // set by vcpu_create() of vCPU 0
	void (*stopped)(void *opaque, unsigned int id, enum vcpu_stop why, const struct err *err);
	void (*where)(void *opaque, unsigned int id, const struct vcpu_where *where);
	void (*parked_one)(void *opaque); // a vCPU has parked; may be NULL
	// Confines the thread before it enters the guest; may be NULL.
	int (*confine)(void *opaque, struct err *err);
	void *opaque;

	// Parking.
	pthread_mutex_t lock;
	pthread_cond_t changed;
	unsigned int parked;
	_Atomic uint64_t first_run_ns; // CLOCK_MONOTONIC, 0 until a vCPU enters the guest
};

int vcpu_env_init(struct vcpu_env *env, struct err *err);
void vcpu_env_fini(struct vcpu_env *env);

// Makes vCPU id, from 0 upwards, without a thread yet. Main thread.
int vcpu_create(struct vcpu **ret_vcpu, struct vcpu_env *env, unsigned int id, struct err *err);

// Stops the thread if there is one, joins it and frees all. Accepts NULL.
void vcpu_destroy(struct vcpu *vcpu);

// Starts the thread, which enters the guest at once (or when resumed, if paused before).
int vcpu_start(struct vcpu *vcpu, struct err *err);

// vcpus_pause() returns when all nr vCPUs that run are parked outside of KVM_RUN with no access
// pending. One thread at a time may pause and resume. Who must not block meanwhile asks, and looks
// each time that env->parked_one() has been called.
void vcpus_pause(struct vcpu **vcpus, unsigned int nr);
void vcpus_ask_pause(struct vcpu **vcpus, unsigned int nr);
bool vcpus_parked(struct vcpu **vcpus, unsigned int nr);
void vcpus_resume(struct vcpu **vcpus, unsigned int nr);

// Asks for a call of env->where, which comes from the vCPU's thread within milliseconds.
void vcpu_ask_where(struct vcpu *vcpu);

// Appends all that the vCPU is to out. Not started, or parked by vcpus_pause(); kvm_save() has been
// called. Main thread.
// -ENOMEM, or the errno of an ioctl.
int vcpu_save(struct vcpu *vcpu, struct buf *out, struct err *err);

// The reverse, into a vCPU that has not been started yet, or is parked. All vCPUs of the VM exist,
// guest memory is in place, and kvm_restore() comes after the last one. -EINVAL for data that is
// not a vCPU's, -ENOTSUP for one that has what this host lacks, which is named; then the vCPU is of
// no more use.
int vcpu_restore(struct vcpu *vcpu, const void *data, size_t len, struct err *err);

// Number of exits of a kind so far. Any thread.
uint64_t vcpu_exits(const struct vcpu *vcpu, enum vcpu_exit_kind kind);

// For vmm/ARCH.
int vcpu_fd(const struct vcpu *vcpu);
struct kvm_run *vcpu_run(const struct vcpu *vcpu);
struct vcpu_env *vcpu_env(const struct vcpu *vcpu);
unsigned int vcpu_id(const struct vcpu *vcpu);
void **vcpu_arch(struct vcpu *vcpu);

// Implemented by vmm/ARCH. init and fini: main thread, thread not running. exit: the vCPU's thread,
// for what the common code does not know; returns 1 to go on, 0 after env->stopped for a reset (the
// common code calls it), negative with err filled for a failure.
int vcpu_arch_init(struct vcpu *vcpu, struct err *err);
void vcpu_arch_fini(struct vcpu *vcpu);
int vcpu_arch_exit(struct vcpu *vcpu, enum vcpu_exit_kind *ret_kind, struct err *err);
int vcpu_arch_where(struct vcpu *vcpu, struct vcpu_where *ret_where, struct err *err);

#endif
