// SPDX-License-Identifier: Apache-2.0
// Confinement of a monitor; see the header. Main thread, but for jail_thread().
#include "vmm/jail.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define EXIT_VIOLATION 125

// With room for the kernel's own threads of an io_uring.
#define PROCESSES_MAX 256

// --- Namespaces and root ---------------------------------------------------------------------

#define OTHER_NAMESPACES \
	(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

// No namespace of processes: the monitor would have to be started into it, and it can neither
// signal nor trace others anyway. Nor are ids mapped: what it makes in run/ is its user's all the
// same.
static int enter_namespaces(void)
{
	if (unshare(CLONE_NEWUSER | OTHER_NAMESPACES) == 0)
		return 0;
	// Root needs none, where there are none.
	return JAIL_USER_NS | (unshare(OTHER_NAMESPACES) == 0 ? 0 : JAIL_NAMESPACES);
}

// A mount of path alone, with what is mounted below.
static int copy_mount(const char *path, bool read_only)
{
	struct mount_attr attr = {
		.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC |
			    (read_only ? MOUNT_ATTR_RDONLY : 0),
	};
	CLEANUP_FD int fd = open_tree(AT_FDCWD, path,
		OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | AT_SYMLINK_NOFOLLOW);

	if (fd < 0 || mount_setattr(fd, "", AT_EMPTY_PATH | AT_RECURSIVE, &attr, sizeof(attr)) < 0)
		return -1;
	return TAKE_FD(fd);
}

static bool reopen(int fd, const char *path)
{
	CLEANUP_FD int again = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

	return again >= 0 && dup3(again, fd, O_CLOEXEC) >= 0;
}

// The machine's folder becomes all that there is. Only run/ may change or, if it has disks' layers,
// the folder, but for vm.ini: that says what the next monitor opens before it is in its jail.
static int enter_root(const struct jail_params *params, struct err *err)
{
	CLEANUP_FD int root = -1;
	CLEANUP_FD int inner = -1;
	const char *const inner_path = params->writable ? "../vm.ini" : "../run";

	// Paths are from the working directory, which has come along into the new namespace, as the
	// descriptors have not.
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
		return JAIL_ROOT;
	root = copy_mount("..", !params->writable);
	inner = copy_mount(inner_path, params->writable);
	if (root < 0 || inner < 0 ||
		move_mount(root, "", AT_FDCWD, "..", MOVE_MOUNT_F_EMPTY_PATH) < 0 ||
		move_mount(inner, "", root, inner_path + 3, MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return JAIL_ROOT;
	// From here on there is no way back.
	if (fchdir(root) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 ||
		umount2(".", MNT_DETACH) < 0 || chdir("/run") < 0 || !reopen(params->dir_fd, "/") ||
		!reopen(params->run_fd, "/run"))
		return err_errno(err, -errno, "jail: making the machine's folder the root");
	return 0;
}

// --- Landlock --------------------------------------------------------------------------------

// Of <linux/landlock.h> as of Linux 6.12, which grows with each version of its interface.
struct ruleset {
	uint64_t fs, net, scoped;
};

#define FS_REFER     (1ULL << 13) // version 2
#define FS_TRUNCATE  (1ULL << 14) // 3
#define FS_IOCTL_DEV (1ULL << 15) // 5
#define NET_ALL      3ULL // 4: bind and connect, TCP
#define SCOPED_ALL   3ULL // 6: abstract Unix sockets, signals

static int allow_beneath(int ruleset_fd, int dir_fd, uint64_t access)
{
	struct landlock_path_beneath_attr beneath = {.allowed_access = access, .parent_fd = dir_fd};

	return (int)syscall(
		SYS_landlock_add_rule, ruleset_fd, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0);
}

static int enter_landlock(const struct jail_params *params, struct err *err)
{
	const long version = syscall(
		SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
	struct ruleset all = {
		.fs = (FS_REFER - 1) | (version >= 2 ? FS_REFER : 0) |
		      (version >= 3 ? FS_TRUNCATE : 0) | (version >= 5 ? FS_IOCTL_DEV : 0),
		.net = version >= 4 ? NET_ALL : 0,
		.scoped = version >= 6 ? SCOPED_ALL : 0,
	};
	const size_t size = version >= 6 ? sizeof(all) : version >= 4 ? 16 : 8;
	const uint64_t files = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE |
			       LANDLOCK_ACCESS_FS_READ_DIR | LANDLOCK_ACCESS_FS_REMOVE_FILE |
			       LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_MAKE_DIR |
			       FS_REFER | FS_TRUNCATE;
	CLEANUP_FD int fd = -1;

	// The first version cannot let a layer be linked into its folder.
	if (version < 1 || (version < 2 && params->writable))
		return JAIL_LANDLOCK;
	fd = (int)syscall(SYS_landlock_create_ruleset, &all, size, 0);
	if (fd < 0 ||
		allow_beneath(fd, params->run_fd,
			LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_SOCK) < 0 ||
		(params->writable && allow_beneath(fd, params->dir_fd, files & all.fs) < 0) ||
		syscall(SYS_landlock_restrict_self, fd, 0) < 0)
		return err_errno(err, -errno, "jail: landlock");
	return 0;
}

// --- Capabilities and limits -----------------------------------------------------------------

static int drop_capabilities(struct err *err)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {0};

	// Those that an execve() could bring back, if there were one.
	for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
		prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (syscall(SYS_capset, &header, none) < 0)
		return err_errno(err, -errno, "jail: capset");
	return 0;
}

// No limit of file sizes: it would have to be the largest of the disks, and bounds nothing.
static int set_limits(bool own_user_ns, struct err *err)
{
	const struct rlimit core = {0, 0}; // it would hold the guest's secrets
	struct rlimit files;
	struct rlimit processes = {PROCESSES_MAX, PROCESSES_MAX};

	if (getrlimit(RLIMIT_NOFILE, &files) < 0)
		return err_errno(err, -errno, "jail: limits");
	files.rlim_max = files.rlim_cur;
	if (setrlimit(RLIMIT_CORE, &core) < 0 || setrlimit(RLIMIT_NOFILE, &files) < 0)
		return err_errno(err, -errno, "jail: limits");
	// Elsewhere all of the user's processes are counted as one.
	if (own_user_ns && setrlimit(RLIMIT_NPROC, &processes) < 0 && errno != EPERM)
		return err_errno(err, -errno, "jail: limits");
	return 0;
}

// --- Violations ------------------------------------------------------------------------------

static int violation_fd = -1;
static _Thread_local enum jail_kind this_kind;

#if defined(__x86_64__)
#define FIRST_ARG(uc)  ((unsigned long long)(uc)->uc_mcontext.gregs[REG_RDI])
#define SECOND_ARG(uc) ((unsigned long long)(uc)->uc_mcontext.gregs[REG_RSI])
#else
#define FIRST_ARG(uc)  ((unsigned long long)(uc)->uc_mcontext.regs[0])
#define SECOND_ARG(uc) ((unsigned long long)(uc)->uc_mcontext.regs[1])
#endif

// At the call itself, so that nothing is interrupted in the middle.
static void on_violation(int sig, siginfo_t *info, void *context)
{
	const ucontext_t *uc = context;
	char name[16], text[256], line[400];
	int len;

	(void)sig;
	snprintf(text, sizeof(text),
		"jail: the %s thread called %s(0x%llx, 0x%llx), which it never does: a defect of "
		"mayfly, or a guest that has broken into its monitor; the machine was ended",
		jail_kind_names[this_kind], jail_call_name(info->si_syscall, name), FIRST_ARG(uc),
		SECOND_ARG(uc));
	len = snprintf(line, sizeof(line), "{\"event\":\"error\",\"message\":\"%s\"}\n", text);
	// Whoever started us may have let go: then the log has it.
	if (violation_fd < 0 || write(violation_fd, line, (size_t)len) < 0) {
		len = snprintf(line, sizeof(line), "mayfly: error: %s\n", text);
		(void)!write(STDERR_FILENO, line, (size_t)len);
	}
	_exit(EXIT_VIOLATION);
}

int jail_thread(enum jail_kind kind, struct err *err)
{
	struct sock_filter filter[JAIL_PROGRAM_MAX];
	struct sock_fprog program = {
		.len = (unsigned short)jail_program(kind, (int)getpid(), filter), .filter = filter};

	this_kind = kind;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	return 0; // the sanitizers make calls of their own
#endif
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0 && errno != ENOSYS)
		return err_errno(err, -errno, "jail: seccomp");
	return 0;
}

int jail_enter(const struct jail_params *params, struct err *err)
{
	const struct sigaction violation = {.sa_sigaction = on_violation, .sa_flags = SA_SIGINFO};
	const uint32_t trap = SECCOMP_RET_TRAP;
	int missing, r;

	violation_fd = params->status_fd;
	if (sigaction(SIGSYS, &violation, NULL) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return err_errno(err, -errno, "jail");
	if (fchdir(params->run_fd) < 0)
		return err_errno(err, -errno, "jail: run/");
	missing = enter_namespaces();
	if (!(missing & JAIL_NAMESPACES))
		r = enter_root(params, err);
	else
		r = JAIL_ROOT;
	if (r < 0)
		return r;
	missing |= r;
	r = enter_landlock(params, err);
	if (r < 0)
		return r;
	missing |= r;
	r = drop_capabilities(err);
	if (r == 0)
		r = set_limits(!(missing & JAIL_USER_NS), err);
	if (r < 0)
		return r;
	if (syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &trap) < 0)
		missing |= JAIL_SECCOMP;
	return missing;
}
