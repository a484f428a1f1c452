// SPDX-License-Identifier: Apache-2.0
// The proxy's jail; see the header. Its one thread, before there are others.
#include "egress/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY    65534
#define FILES_MAX 1024

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#else
#define ARCH AUDIT_ARCH_AARCH64
#endif

// --- Files -----------------------------------------------------------------------------------

static bool empty_root(const char *empty_dir)
{
	const bool root = geteuid() == 0;

	if (unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP |
		    (root ? 0 : CLONE_NEWUSER)) < 0)
		return false;
	return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
	       mount("none", empty_dir, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
		       "size=4k,nr_inodes=2,mode=555") == 0 &&
	       chdir(empty_dir) == 0 && syscall(SYS_pivot_root, ".", ".") == 0 &&
	       umount2(".", MNT_DETACH) == 0 && chdir("/") == 0 &&
	       mount(NULL, "/", NULL,
		       MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC,
		       NULL) == 0;
}

static bool become_nobody(void)
{
	return geteuid() != 0 ||
	       (setgroups(0, NULL) == 0 && setresgid(NOBODY, NOBODY, NOBODY) == 0 &&
		       setresuid(NOBODY, NOBODY, NOBODY) == 0);
}

static int drop_capabilities(struct err *err)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {0};

	if (syscall(SYS_capset, &header, none) < 0)
		return err_errno(err, -errno, "proxy: capset");
	return 0;
}

// --- System calls ----------------------------------------------------------------------------

static const int calls[] = {
	// sockets, here and to name servers
	__NR_connect,
	__NR_accept4,
	__NR_bind,
	__NR_shutdown,
	__NR_getsockopt,
	__NR_setsockopt,
	__NR_getsockname,
	__NR_getpeername,
	__NR_sendto,
	__NR_recvfrom,
	__NR_sendmsg,
	__NR_recvmsg,
	__NR_sendmmsg,
	__NR_read,
	__NR_write,
	__NR_writev,
	__NR_close,
	__NR_ppoll,
	__NR_fcntl,
	__NR_ioctl,
	__NR_eventfd2,
#if defined(__x86_64__)
	__NR_poll,
	__NR_time,
#endif
	// threads and their memory
	__NR_clone3,
	__NR_clone,
	__NR_futex,
	__NR_set_robust_list,
	__NR_rseq,
	__NR_gettid,
	__NR_getpid,
	__NR_tgkill,
	__NR_sched_yield,
	__NR_munmap,
	__NR_mremap,
	__NR_madvise,
	__NR_brk,
	__NR_rt_sigprocmask,
	__NR_rt_sigreturn,
	__NR_rt_sigaction,
	__NR_sigaltstack,
	__NR_exit,
	__NR_exit_group,
	__NR_restart_syscall,
	__NR_sched_getaffinity,
	__NR_prlimit64,
	// time and chance
	__NR_clock_gettime,
	__NR_gettimeofday,
	__NR_clock_nanosleep,
	__NR_getrandom,
};

#define LOAD(field)              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(what)             BPF_STMT(BPF_RET | BPF_K, (what))
#define IF_EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (yes), (no))
#define IF_ANY(bits, yes, no)    BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, (bits), (yes), (no))

#define PROGRAM_MAX 160

struct program {
	struct sock_filter at[PROGRAM_MAX];
	unsigned short len;
};

static void put(struct program *p, struct sock_filter filter)
{
	ASSERT(p->len < PROGRAM_MAX);
	p->at[p->len++] = filter;
}

// What it does not do fails as if there were no right to it.
static int filter_calls(struct err *err)
{
	const uint32_t refused = SECCOMP_RET_ERRNO | EPERM;
	struct program p = {.len = 0};
	struct sock_fprog program;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	return 0; // the sanitizers make calls of their own
#endif
	put(&p, (struct sock_filter)LOAD(arch));
	put(&p, (struct sock_filter)IF_EQUAL(ARCH, 1, 0));
	put(&p, (struct sock_filter)RETURN(SECCOMP_RET_KILL_PROCESS));
	put(&p, (struct sock_filter)LOAD(nr));
	for (size_t i = 0; i < ARRAY_SIZE(calls); i++) {
		put(&p, (struct sock_filter)IF_EQUAL((uint32_t)calls[i], 0, 1));
		put(&p, (struct sock_filter)RETURN(SECCOMP_RET_ALLOW));
	}
	// Nothing is executable that was not from the start.
	put(&p, (struct sock_filter)IF_EQUAL(__NR_mmap, 1, 0));
	put(&p, (struct sock_filter)IF_EQUAL(__NR_mprotect, 0, 4));
	put(&p, (struct sock_filter)LOAD(args[2]));
	put(&p, (struct sock_filter)IF_ANY(PROT_EXEC, 0, 1));
	put(&p, (struct sock_filter)RETURN(refused));
	put(&p, (struct sock_filter)RETURN(SECCOMP_RET_ALLOW));
	// Sockets of the Internet alone.
	put(&p, (struct sock_filter)IF_EQUAL(__NR_socket, 0, 4));
	put(&p, (struct sock_filter)LOAD(args[0]));
	put(&p, (struct sock_filter)IF_EQUAL(AF_INET, 1, 0));
	put(&p, (struct sock_filter)IF_EQUAL(AF_INET6, 0, 1));
	put(&p, (struct sock_filter)RETURN(SECCOMP_RET_ALLOW));
	put(&p, (struct sock_filter)RETURN(refused));
	program = (struct sock_fprog){.len = p.len, .filter = p.at};
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
		return err_errno(err, -errno, "proxy: seccomp");
	return 0;
}

int confine(const char *empty_dir, const char **ret_missing, struct err *err)
{
	const struct rlimit none = {0, 0}, files = {FILES_MAX, FILES_MAX};
	const char *missing = "";
	int r;

	// Its memory holds what a guest sends.
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || setrlimit(RLIMIT_CORE, &none) < 0)
		return err_errno(err, -errno, "proxy");
	(void)setrlimit(RLIMIT_NOFILE, &files); // it may be bound by less
	if (!empty_root(empty_dir))
		missing = "namespaces";
	if (!become_nobody())
		missing = missing[0] ? "namespaces and another user" : "another user";
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	// However the keeper ends; a change of user forgets it. The channel ends then, too, but a
	// thread may wait for a name server.
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	r = drop_capabilities(err);
	if (r == 0)
		r = filter_calls(err);
	if (r == 0)
		*ret_missing = missing;
	return r;
}
