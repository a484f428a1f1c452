// SPDX-License-Identifier: Apache-2.0
// vCPU threads; see the header. Each function says whose thread runs it.
#include "vmm/vcpu.h"

#include <errno.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define WANT_PAUSE 1U
#define WANT_STOP  2U
#define WANT_WHERE 4U

#define KICK_SIGNAL (SIGRTMIN)

struct vcpu {
	struct vcpu_env *env;
	unsigned int id;
	int fd;
	struct kvm_run *run;
	bool threaded;
	pthread_t thread;
	_Atomic unsigned int want;
	_Atomic bool ended; // the thread will not enter KVM_RUN again
	_Atomic uint64_t exits[VCPU_EXIT_KINDS];
	void *arch;
};

const char *const vcpu_exit_names[VCPU_EXIT_KINDS] = {"io", "mmio", "intr", "assist", "other"};

int vcpu_fd(const struct vcpu *vcpu)
{
	return vcpu->fd;
}

struct kvm_run *vcpu_run(const struct vcpu *vcpu)
{
	return vcpu->run;
}

struct vcpu_env *vcpu_env(const struct vcpu *vcpu)
{
	return vcpu->env;
}

unsigned int vcpu_id(const struct vcpu *vcpu)
{
	return vcpu->id;
}

void **vcpu_arch(struct vcpu *vcpu)
{
	return &vcpu->arch;
}

uint64_t vcpu_exits(const struct vcpu *vcpu, enum vcpu_exit_kind kind)
{
	return atomic_load_explicit(&vcpu->exits[kind], memory_order_relaxed);
}

static void on_kick(int sig)
{
	(void)sig; // its arrival interrupts KVM_RUN, that is all
}

int vcpu_env_init(struct vcpu_env *env, struct err *err)
{
	struct sigaction sa = {.sa_handler = on_kick};

	sigemptyset(&sa.sa_mask);
	if (sigaction(KICK_SIGNAL, &sa, NULL) < 0)
		return err_errno(err, -errno, "sigaction");
	pthread_mutex_init(&env->lock, NULL);
	pthread_cond_init(&env->changed, NULL);
	return 0;
}

void vcpu_env_fini(struct vcpu_env *env)
{
	pthread_mutex_destroy(&env->lock);
	pthread_cond_destroy(&env->changed);
}

int vcpu_create(struct vcpu **ret_vcpu, struct vcpu_env *env, unsigned int id, struct err *err)
{
	struct vcpu *vcpu = calloc(1, sizeof(*vcpu));
	void *run;
	int r;

	if (!vcpu)
		return err_errno(err, -ENOMEM, "vCPU %u", id);
	vcpu->env = env;
	vcpu->id = id;
	vcpu->fd = ioctl(env->kvm->vm_fd, KVM_CREATE_VCPU, (unsigned long)id);
	if (vcpu->fd < 0) {
		r = err_errno(err, -errno, "KVM_CREATE_VCPU %u", id);
		goto fail;
	}
	run = mmap(NULL, env->kvm->run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu->fd, 0);
	if (run == MAP_FAILED) {
		r = err_errno(err, -errno, "vCPU %u: mapping kvm_run", id);
		goto fail;
	}
	vcpu->run = run;
	r = vcpu_arch_init(vcpu, err);
	if (r < 0) {
		err_wrap(err, r, "vCPU %u", id);
		goto fail;
	}
	*ret_vcpu = vcpu;
	return 0;
fail:
	vcpu_destroy(vcpu);
	return r;
}

static void kick(struct vcpu *vcpu)
{
	if (!vcpu->threaded)
		return;
	// Pairs with the fence in run_vcpu(): either it sees `want`, or KVM sees immediate_exit.
	atomic_thread_fence(memory_order_seq_cst);
	__atomic_store_n(&vcpu->run->immediate_exit, 1, __ATOMIC_RELAXED);
	pthread_kill(vcpu->thread, KICK_SIGNAL);
}

void vcpu_destroy(struct vcpu *vcpu)
{
	if (!vcpu)
		return;
	if (vcpu->threaded) {
		atomic_fetch_or(&vcpu->want, WANT_STOP);
		kick(vcpu);
		pthread_mutex_lock(&vcpu->env->lock);
		pthread_cond_broadcast(&vcpu->env->changed);
		pthread_mutex_unlock(&vcpu->env->lock);
		pthread_join(vcpu->thread, NULL);
	}
	vcpu_arch_fini(vcpu);
	if (vcpu->run)
		munmap(vcpu->run, vcpu->env->kvm->run_bytes);
	fd_close(&vcpu->fd);
	free(vcpu);
}

static void count_exit(struct vcpu *vcpu, enum vcpu_exit_kind kind)
{
	// Only this thread writes: a load and a store do, without a locked instruction.
	uint64_t n = atomic_load_explicit(&vcpu->exits[kind], memory_order_relaxed);

	atomic_store_explicit(&vcpu->exits[kind], n + 1, memory_order_relaxed);
}

static void mmio_exit(struct vcpu *vcpu)
{
	struct kvm_run *run = vcpu->run;
	struct bus *bus = vcpu->env->mmio;
	unsigned int len = run->mmio.len;

	if (len < 1 || len > sizeof(run->mmio.data))
		return;
	if (run->mmio.is_write)
		bus_write(bus, run->mmio.phys_addr, run->mmio.data, len);
	else
		bus_read(bus, run->mmio.phys_addr, run->mmio.data, len);
}

// vCPU thread. 1 to go on, 0 for a reset, negative for a failure.
static int handle_exit(struct vcpu *vcpu, struct err *err)
{
	struct kvm_run *run = vcpu->run;
	enum vcpu_exit_kind kind = VCPU_EXIT_OTHER;
	int r = 1;

	switch (run->exit_reason) {
	case KVM_EXIT_MMIO:
		kind = VCPU_EXIT_MMIO;
		mmio_exit(vcpu);
		break;
	case KVM_EXIT_INTR:
	case KVM_EXIT_IRQ_WINDOW_OPEN:
		kind = VCPU_EXIT_INTR;
		break;
	case KVM_EXIT_SHUTDOWN:
		r = 0;
		break;
	case KVM_EXIT_FAIL_ENTRY:
		r = err_set(err, -EIO,
			"KVM could not enter the guest: hardware entry failure reason 0x%llx",
			(unsigned long long)run->fail_entry.hardware_entry_failure_reason);
		break;
	default:
		r = vcpu_arch_exit(vcpu, &kind, err);
		break;
	}
	count_exit(vcpu, kind);
	return r;
}

static int run_failed(int error, struct err *err)
{
	if (error == EFAULT)
		return err_errno(err, -error,
			"KVM_RUN: memory of the guest is gone (was the kernel's file cut short, or "
			"is the host out of memory?)");
	return err_errno(err, -error, "KVM_RUN");
}

// vCPU thread. Completes the access of the last exit by entering once more under immediate_exit.
// One access may take several exits (fragments of a wide or repeated one), each of which is
// handled. Returns as handle_exit().
static int complete_pending(struct vcpu *vcpu, struct err *err)
{
	int r = 1;

	while (r > 0) {
		__atomic_store_n(&vcpu->run->immediate_exit, 1, __ATOMIC_RELAXED);
		if (ioctl(vcpu->fd, KVM_RUN, 0) == 0) {
			r = handle_exit(vcpu, err);
			continue;
		}
		if (errno == EINTR)
			return 1;
		if (errno != EAGAIN)
			return run_failed(errno, err);
	}
	return r;
}

// vCPU thread. Returns as handle_exit().
static int park(struct vcpu *vcpu, struct err *err)
{
	struct vcpu_env *env = vcpu->env;
	int r = complete_pending(vcpu, err);

	if (r <= 0)
		return r;
	pthread_mutex_lock(&env->lock);
	env->parked++;
	pthread_cond_broadcast(&env->changed);
	if (env->parked_one)
		env->parked_one(env->opaque);
	while ((atomic_load(&vcpu->want) & (WANT_PAUSE | WANT_STOP)) == WANT_PAUSE)
		pthread_cond_wait(&env->changed, &env->lock);
	env->parked--;
	pthread_cond_broadcast(&env->changed);
	pthread_mutex_unlock(&env->lock);
	return 1;
}

// vCPU thread. Returns as handle_exit().
static int tell_where(struct vcpu *vcpu, struct err *err)
{
	struct vcpu_where where = {0};
	int r;

	atomic_fetch_and(&vcpu->want, ~WANT_WHERE);
	r = complete_pending(vcpu, err);
	if (r <= 0)
		return r;
	r = vcpu_arch_where(vcpu, &where, err);
	if (r < 0)
		return r;
	for (int i = 0; i < VCPU_EXIT_KINDS; i++)
		where.exits += vcpu_exits(vcpu, (enum vcpu_exit_kind)i);
	vcpu->env->where(vcpu->env->opaque, vcpu->id, &where);
	return 1;
}

static void *run_vcpu(void *arg)
{
	struct vcpu *vcpu = arg;
	struct vcpu_env *env = vcpu->env;
	struct err err = {0};
	char name[16];
	int r = 1;

	snprintf(name, sizeof(name), "vcpu%u", vcpu->id);
	prctl(PR_SET_NAME, name);
	if (env->confine && env->confine(env->opaque, &err) < 0)
		r = -1;
	while (r > 0) {
		unsigned int want;

		__atomic_store_n(&vcpu->run->immediate_exit, 0, __ATOMIC_RELAXED);
		atomic_thread_fence(memory_order_seq_cst); // pairs with kick()
		want = atomic_load(&vcpu->want);
		if (want & WANT_STOP)
			break;
		if (want & WANT_PAUSE) {
			r = park(vcpu, &err);
			continue;
		}
		if (want & WANT_WHERE) {
			r = tell_where(vcpu, &err);
			continue;
		}
		if (!atomic_load_explicit(&env->first_run_ns, memory_order_relaxed))
			atomic_store(&env->first_run_ns, now_ns());
		if (ioctl(vcpu->fd, KVM_RUN, 0) == 0) {
			r = handle_exit(vcpu, &err);
		} else if (errno == EINTR || errno == EAGAIN) {
			count_exit(vcpu, VCPU_EXIT_INTR);
		} else {
			r = run_failed(errno, &err);
		}
	}
	pthread_mutex_lock(&env->lock);
	atomic_store(&vcpu->ended, true);
	pthread_cond_broadcast(&env->changed);
	pthread_mutex_unlock(&env->lock);
	if (r <= 0)
		env->stopped(
			env->opaque, vcpu->id, r == 0 ? VCPU_STOP_RESET : VCPU_STOP_ERROR, &err);
	return NULL;
}

int vcpu_start(struct vcpu *vcpu, struct err *err)
{
	sigset_t all, kicks, before;
	int r;

	// The thread takes the kick signal and no other. SIGBUS and SIGSYS are not for anybody to
	// be sent: they tell of the thread's own access to guest memory that is gone, and of a
	// system call that it may not make; blocked, they would end the process without a word.
	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGSYS);
	sigemptyset(&kicks);
	sigaddset(&kicks, KICK_SIGNAL);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_sigmask(SIG_UNBLOCK, &kicks, NULL);
	r = pthread_create(&vcpu->thread, NULL, run_vcpu, vcpu);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (r != 0)
		return err_errno(err, -r, "vCPU %u: thread", vcpu->id);
	vcpu->threaded = true;
	return 0;
}

void vcpus_ask_pause(struct vcpu **vcpus, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++) {
		atomic_fetch_or(&vcpus[i]->want, WANT_PAUSE);
		kick(vcpus[i]);
	}
}

// Under env->lock.
static bool all_parked(struct vcpu **vcpus, unsigned int nr)
{
	unsigned int running = 0;

	for (unsigned int i = 0; i < nr; i++)
		running += vcpus[i]->threaded && !atomic_load(&vcpus[i]->ended);
	return vcpus[0]->env->parked >= running;
}

bool vcpus_parked(struct vcpu **vcpus, unsigned int nr)
{
	struct vcpu_env *env;
	bool parked;

	if (nr == 0)
		return true;
	env = vcpus[0]->env;
	pthread_mutex_lock(&env->lock);
	parked = all_parked(vcpus, nr);
	pthread_mutex_unlock(&env->lock);
	return parked;
}

void vcpus_pause(struct vcpu **vcpus, unsigned int nr)
{
	struct vcpu_env *env;

	if (nr == 0)
		return;
	env = vcpus[0]->env;
	vcpus_ask_pause(vcpus, nr);
	pthread_mutex_lock(&env->lock);
	while (!all_parked(vcpus, nr))
		pthread_cond_wait(&env->changed, &env->lock);
	pthread_mutex_unlock(&env->lock);
}

void vcpus_resume(struct vcpu **vcpus, unsigned int nr)
{
	struct vcpu_env *env;

	if (nr == 0)
		return;
	env = vcpus[0]->env;
	pthread_mutex_lock(&env->lock);
	for (unsigned int i = 0; i < nr; i++)
		atomic_fetch_and(&vcpus[i]->want, ~WANT_PAUSE);
	pthread_cond_broadcast(&env->changed);
	// Until the last has left: else the next pause would count it as parked already.
	while (env->parked > 0)
		pthread_cond_wait(&env->changed, &env->lock);
	pthread_mutex_unlock(&env->lock);
}

void vcpu_ask_where(struct vcpu *vcpu)
{
	atomic_fetch_or(&vcpu->want, WANT_WHERE);
	kick(vcpu);
}
