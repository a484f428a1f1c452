// SPDX-License-Identifier: Apache-2.0
// The system calls of a jailed monitor, who makes them and why; and the filters made of that. Any
// thread.
//
// A row is as narrow as its use. tests/guest/jail.sh fails when a row is not used by a machine that
// does all that machines do, so: no row without a test that needs it.
#include <asm/unistd.h>
#include <linux/audit.h>
#include <linux/if_tun.h>
#include <linux/kvm.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "vmm/jail.h"

#define LOOP JAIL_FOR(JAIL_LOOP)
#define VCPU JAIL_FOR(JAIL_VCPU)
#define SAVE JAIL_FOR(JAIL_SAVE)
#define LAZY JAIL_FOR(JAIL_LAZY)
#define ALL  (LOOP | VCPU | LAZY | SAVE)

const char *const jail_kind_names[JAIL_KINDS] = {
	[JAIL_LOOP] = "loop",
	[JAIL_VCPU] = "vcpu",
	[JAIL_LAZY] = "lazy",
	[JAIL_SAVE] = "save",
};

#define ROW(call, name_, kinds_, check_, arg_, value_, when_, why_)                        \
	{                                                                                  \
		.nr = __NR_##call, .kinds = (kinds_), .check = (check_), .arg = (arg_),    \
		.value = (uint32_t)(value_), .when = (when_), .name = name_, .why = (why_) \
	}
#define CALL(call, kinds, why) ROW(call, #call, kinds, JAIL_ANY, 0, 0, JAIL_ALWAYS, why)
#define RARE(call, kinds, why) ROW(call, #call, kinds, JAIL_ANY, 0, 0, JAIL_RARE, why)
#define CALL_IF(call, arg, is, kinds, why) \
	ROW(call, #call " " #is, kinds, JAIL_EQUALS, arg, is, JAIL_ALWAYS, why)
#define CALL_WITHOUT(call, arg, bits, kinds, why) \
	ROW(call, #call " without " #bits, kinds, JAIL_WITHOUT, arg, bits, JAIL_ALWAYS, why)
#define IOCTL(request, kinds, why) \
	ROW(ioctl, "ioctl " #request, kinds, JAIL_EQUALS, 1, request, JAIL_ALWAYS, why)
#define ASSIST(request, why) \
	ROW(ioctl, "ioctl " #request, VCPU, JAIL_EQUALS, 1, request, JAIL_EMULATED, why)

// Of fork(): the C library's flags. Not of threads, nor of new namespaces.
#define FORK_FLAGS (CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD)

// The process that writes a snapshot is under the loop's filter until it has its own, and under
// both from then on.
const struct jail_rule jail_rules[] = {
	// First what is called most. The rows of a call stand together.
	IOCTL(KVM_RUN, VCPU, "the guest"),
	IOCTL(KVM_GET_REGS, LOOP | VCPU, "save; where a vCPU is; assist"),
	IOCTL(KVM_GET_SREGS, LOOP | VCPU, "save; where a vCPU is; assist"),
	ROW(ioctl, "ioctl KVM_SET_REGS", VCPU, JAIL_EQUALS, 1, KVM_SET_REGS, JAIL_RARE,
		"assist, where KVM does not share registers"),
	ROW(ioctl, "ioctl KVM_SET_SREGS", VCPU, JAIL_EQUALS, 1, KVM_SET_SREGS, JAIL_RARE,
		"assist, where KVM does not share registers"),
	ASSIST(KVM_GET_XSAVE, "assist: xsave"),
	ASSIST(KVM_SET_XSAVE, "assist: xrstor"),
	ASSIST(KVM_GET_XCRS, "assist: which components xsave writes"),
	ASSIST(KVM_GET_VCPU_EVENTS, "assist: exceptions"),
	ASSIST(KVM_SET_VCPU_EVENTS, "assist: exceptions"),
	IOCTL(KVM_GET_XSAVE, LOOP, "save"),
	IOCTL(KVM_GET_XCRS, LOOP, "save"),
	IOCTL(KVM_GET_VCPU_EVENTS, LOOP, "save"),
	IOCTL(KVM_GET_DEBUGREGS, LOOP, "save"),
	IOCTL(KVM_GET_MP_STATE, LOOP, "save"),
	IOCTL(KVM_GET_LAPIC, LOOP, "save"),
	IOCTL(KVM_GET_CPUID2, LOOP, "save"),
	IOCTL(KVM_GET_TSC_KHZ, LOOP, "save"),
	IOCTL(KVM_GET_MSR_INDEX_LIST, LOOP, "save"),
	IOCTL(KVM_GET_MSRS, LOOP, "save"),
	IOCTL(KVM_KVMCLOCK_CTRL, LOOP, "save: the guest's watchdog is not to bark"),
	IOCTL(KVM_GET_IRQCHIP, LOOP, "save"),
	IOCTL(KVM_GET_PIT2, LOOP, "save"),
	IOCTL(KVM_GET_CLOCK, LOOP, "save"),
	IOCTL(KVM_GET_DIRTY_LOG, LOOP, "what a diff is to hold"),
	IOCTL(KVM_SET_USER_MEMORY_REGION, LOOP, "to start that log"),
	IOCTL(TUNSETOFFLOAD, LOOP, "the driver chooses a tap's offloads"),
	IOCTL(UFFDIO_COPY, LAZY, "a page that is wanted"),
	IOCTL(UFFDIO_ZEROPAGE, LAZY, "a page of zeros"),
	ROW(ioctl, "ioctl UFFDIO_WAKE", LAZY, JAIL_EQUALS, 1, UFFDIO_WAKE, JAIL_RARE,
		"who came too late to be woken"),

	CALL(io_uring_enter, LOOP, "all waiting, disks; see the ring's own restrictions in loop.c"),
	CALL(write, LOOP | VCPU | SAVE, "eventfds, logs, the status pipe, a snapshot's state"),
	RARE(write, LAZY, "that a page cannot be had"),
	CALL(read, LOOP | LAZY, "eventfds, signalfd, the saver's result, smaps, passt"),
	CALL(futex, LOOP | VCPU, "locks, parking"),
	RARE(futex, LAZY, "malloc"),

	// vsock, control socket, networks
	CALL_IF(socket, 0, AF_UNIX, LOOP, "the guest connects to a port of the host"),
	CALL(connect, LOOP, "the same: a socket in run/"),
	CALL(accept4, LOOP, "the host connects: vsock, control"),
	CALL(sendmsg, LOOP, "vsock, network"),
	CALL(sendto, LOOP, "vsock, control"),
	CALL(recvmsg, LOOP, "control, with files for a snapshot"),
	CALL(recvfrom, LOOP, "vsock: CONNECT line"),
	CALL(readv, LOOP, "vsock, network"),
	CALL(writev, LOOP, "tap"),
	CALL(shutdown, LOOP, "vsock, control"),
	CALL(close, LOOP, "connections"),
	CALL(rename, LOOP, "run/waking.sock becomes vsock.sock"),
	CALL(unlink, LOOP, "run/vsock.sock at the end"),

	CALL(getrandom, LOOP, "entropy for the guest"),
	CALL(poll, LAZY, "a page that is wanted, or the end"),
	CALL(poll, VCPU, "whether a log line can be written at once"),
	RARE(poll, LOOP, "the same"),
	CALL(pread64, LOOP | VCPU, "pagemap, System.map, console.log, control group"),
	CALL(pread64, LAZY | SAVE, "memory of the snapshot that the machine goes on from"),
	CALL(ftruncate, LOOP | SAVE, "a disk's new layer, console.log; a snapshot's memory file"),
	CALL(lseek, LOOP, "smaps, from its start"),
	CALL(getrusage, LOOP, "mayfly stats: faults"),

	// Memory: nothing is ever made executable.
	// Which of these malloc() calls depends on what it has and how much is asked for.
	CALL_WITHOUT(mmap, 2, PROT_EXEC, LOOP | VCPU, "malloc"),
	ROW(mmap, "mmap without PROT_EXEC", LAZY | SAVE, JAIL_WITHOUT, 2, PROT_EXEC, JAIL_RARE,
		"malloc"),
	ROW(mprotect, "mprotect without PROT_EXEC", ALL, JAIL_WITHOUT, 2, PROT_EXEC, JAIL_RARE,
		"malloc"),
	RARE(munmap, ALL, "malloc"),
	RARE(mremap, ALL, "malloc"),
	RARE(brk, ALL, "malloc"),
	CALL(madvise, LOOP | VCPU | LAZY, "balloon; a thread's stack at its end"),
	RARE(madvise, SAVE, "malloc"),

	// Snapshots
	CALL(openat, LOOP, "a new layer of a disk, in the machine's folder"),
	CALL(mkdirat, LOOP, "layers/"),
	CALL(linkat, LOOP, "its name among the layers"),
	CALL(flock, LOOP, "nobody else's"),
	CALL(renameat, LOOP, "its place as the top"),
	CALL(unlinkat, LOOP, "what a failure has left"),
	CALL(fchmod, LOOP, "a frozen layer is read-only"),
	CALL(fdatasync, LOOP, "before it is frozen"),
	CALL_IF(clone, 0, FORK_FLAGS, LOOP, "the process that writes a snapshot"),
	CALL(pipe2, LOOP, "its result"),
	CALL(wait4, LOOP, "its end"),
	// Of that process, before it has its own filter:
	CALL_IF(prctl, 0, PR_SET_PDEATHSIG, LOOP, "it ends with the monitor"),
	CALL_IF(prctl, 0, PR_SET_NAME, LOOP, "how it is called"),
	CALL(set_robust_list, LOOP, "the C library, after fork()"),
	CALL(getppid, LOOP, "whether the monitor is there still"),
	CALL(close_range, LOOP, "what it does not need"),
	CALL(setpriority, LOOP, "it gives way"),
	CALL_IF(seccomp, 0, SECCOMP_SET_MODE_FILTER, LOOP, "its filter: can but narrow"),
	CALL(pwrite64, LOOP | SAVE, "guest memory; a disk's map of blocks"),
	CALL(fsync, LOOP | SAVE, "before the snapshot gets its name"),

	// Threads, signals, the end
	CALL(getpid, LOOP, "pthread_kill()"),
	ROW(tgkill, "tgkill self", LOOP, JAIL_SELF, 0, 0, JAIL_ALWAYS, "kick a vCPU"),
	ROW(tgkill, "tgkill self", VCPU | LAZY, JAIL_SELF, 0, 0, JAIL_RARE, "abort()"),
	CALL(rt_sigprocmask, LOOP | VCPU | LAZY, "pthread_kill(), the end of a thread"),
	CALL(rt_sigreturn, VCPU, "after a kick"),
	CALL(exit, VCPU | LAZY, "the end of a thread"),
	CALL(exit_group, LOOP | SAVE, "the end"),
	RARE(exit_group, VCPU | LAZY, "a violation, or memory that is gone"),
	RARE(restart_syscall, ALL, "after SIGSTOP and SIGCONT"),
	RARE(clock_gettime, ALL, "where the clock source has no vDSO"),
	RARE(gettid, LOOP | VCPU | LAZY, "abort()"),
	RARE(rt_sigaction, LOOP | VCPU | LAZY, "abort()"),
};

const unsigned int jail_nr_rules = sizeof(jail_rules) / sizeof(jail_rules[0]);

// --- Filters ---------------------------------------------------------------------------------

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#else
#define ARCH AUDIT_ARCH_AARCH64
#endif

#define LOAD(field)          \
	(struct sock_filter) \
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(what)         (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, what)
#define IF_EQUAL(k, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, k, yes, no)
#define IF_ANY(k, yes, no)   (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, k, yes, no)

// The low half of an argument, which is all that the kernel looks at of those that are checked.
static struct sock_filter load_arg(unsigned int arg)
{
	struct sock_filter load = LOAD(args);

	load.k += (uint32_t)(arg * sizeof(uint64_t));
	return load;
}

struct program {
	struct sock_filter *at;
	unsigned int len;
};

static void put(struct program *p, struct sock_filter filter)
{
	ASSERT(p->len < JAIL_PROGRAM_MAX);
	p->at[p->len++] = filter;
}

// The rows of one call, from jail_rules[i] on.
static void put_call(struct program *p, unsigned int kinds, int pid, unsigned int i)
{
	const int nr = jail_rules[i].nr;
	const unsigned int jump = p->len;

	put(p, IF_EQUAL((uint32_t)nr, 0, 0));
	for (; i < jail_nr_rules && jail_rules[i].nr == nr; i++) {
		const struct jail_rule *rule = &jail_rules[i];

		if (!(rule->kinds & kinds))
			continue;
		if (rule->check == JAIL_ANY) {
			put(p, RETURN(SECCOMP_RET_ALLOW));
			continue;
		}
		put(p, load_arg(rule->arg));
		if (rule->check == JAIL_WITHOUT)
			put(p, IF_ANY(rule->value, 1, 0));
		else
			put(p, IF_EQUAL(rule->check == JAIL_SELF ? (uint32_t)pid : rule->value, 0,
				       1));
		put(p, RETURN(SECCOMP_RET_ALLOW));
	}
	put(p, RETURN(SECCOMP_RET_TRAP));
	ASSERT(p->len - jump - 1 <= UINT8_MAX);
	p->at[jump].jf = (uint8_t)(p->len - jump - 1);
}

unsigned int jail_program(
	enum jail_kind kind, int pid, struct sock_filter ret_program[JAIL_PROGRAM_MAX])
{
	struct program p = {.at = ret_program};
	// The process that is forked has the loop's filter too.
	const unsigned int kinds = JAIL_FOR(kind) | (kind == JAIL_LOOP ? SAVE : 0);
	unsigned int i = 0;

	put(&p, LOAD(arch));
	put(&p, IF_EQUAL(ARCH, 1, 0));
	put(&p, RETURN(SECCOMP_RET_TRAP));
	put(&p, LOAD(nr));
	while (i < jail_nr_rules) {
		unsigned int next = i;
		bool any = false;

		for (; next < jail_nr_rules && jail_rules[next].nr == jail_rules[i].nr; next++)
			any = any || (jail_rules[next].kinds & kinds);
		if (any)
			put_call(&p, kinds, pid, i);
		i = next;
	}
	put(&p, RETURN(SECCOMP_RET_TRAP));
	return p.len;
}

// --- Names -----------------------------------------------------------------------------------

static const struct {
	int nr;
	const char *name;
} names[] = {
#include "syscall_names.h"
};

const char *jail_call_name(int nr, char text[16])
{
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (names[i].nr == nr)
			return names[i].name;
	snprintf(text, 16, "call %d", nr);
	return text;
}
