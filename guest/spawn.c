// SPDX-License-Identifier: Apache-2.0
// Starts one process. The child runs on a stack of its own in our memory (CLONE_VM) while we stand
// still (CLONE_VFORK): on hosts that emulate the kernel this halves the cost of a fork, elsewhere
// it is a tenth. What the child may do is limited by that: it makes bare system calls, changes
// nothing of ours but `child`, and never returns. The agent's only thread, and the child.
#include "guest/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHILD_STACK_BYTES 16384

enum stage { STAGE_SETUP, STAGE_CWD, STAGE_USER, STAGE_EXEC };

// Volatile: the compiler sees nobody who could change it during the call that starts the child.
static volatile struct {
	const struct spawn *spawn;
	enum stage stage;
	int error;
} child;

static _Alignas(16) uint8_t child_stack[CHILD_STACK_BYTES];

// libc's wrappers share state with us (errno, cancellation, the identity of all threads), so the
// child makes its calls bare. It may set errno: we have not looked at ours yet.
#define child_call(nr, ...) syscall(SYS_##nr, ##__VA_ARGS__)

// The sanitizers know nothing of the child's stack and would keep marks of frames that are never
// left.
#define CHILD __attribute__((no_sanitize("address", "thread")))

CHILD static _Noreturn void child_fail(enum stage stage, int error)
{
	child.stage = stage;
	child.error = error;
	for (;;)
		child_call(exit, 127);
}

// Replaces the child, or returns the reason why not. With look a file that is not there is found
// out first: a failed execve is costly in the kernel, a look at the permissions is not.
CHILD static int child_exec_at(const char *path, bool look)
{
	const struct spawn *s = child.spawn;
	struct stat st;

	if (!look || child_call(faccessat, AT_FDCWD, path, X_OK) == 0)
		child_call(execve, path, s->argv, s->envp);
	if (errno == EACCES) {
		if (child_call(newfstatat, AT_FDCWD, path, &st, 0) == 0 && S_ISDIR(st.st_mode))
			return EISDIR;
		return EACCES;
	}
	return errno;
}

CHILD static _Noreturn void child_exec(void)
{
	const char *file = child.spawn->file, *dir = child.spawn->path;
	const char *name = file ? file : child.spawn->argv[0];
	size_t name_len = strlen(name);
	char full[PATH_MAX];
	int result = ENOENT;

	if (strchr(name, '/'))
		child_fail(STAGE_EXEC, child_exec_at(name, false));
	while (name_len) {
		const char *colon = strchr(dir, ':');
		size_t dir_len = colon ? (size_t)(colon - dir) : strlen(dir);

		// An empty entry would mean the current directory: never what anybody wants.
		if (dir_len && dir_len + 1 + name_len < sizeof(full)) {
			int error;

			memcpy(full, dir, dir_len);
			full[dir_len] = '/';
			memcpy(full + dir_len + 1, name, name_len + 1);
			error = child_exec_at(full, true);
			if (error != ENOENT && error != ENOTDIR && error != EACCES &&
				error != EISDIR)
				child_fail(STAGE_EXEC, error);
			if (error == EACCES)
				result = EACCES;
		}
		if (!colon)
			break;
		dir = colon + 1;
	}
	child_fail(STAGE_EXEC, result);
}

CHILD static _Noreturn void child_main(void)
{
	const struct spawn *s = child.spawn;
	uint64_t no_signals = 0;

	if (child_call(setsid) < 0)
		child_fail(STAGE_SETUP, errno);
	for (int i = 0; i < 3; i++)
		if (child_call(dup3, s->fds[i], i, 0) < 0)
			child_fail(STAGE_SETUP, errno);
	if (s->tty && child_call(ioctl, 0, TIOCSCTTY, 0) < 0)
		child_fail(STAGE_SETUP, errno);
	if (s->set_user) {
		if (child_call(setgroups, s->ngroups, s->groups) < 0 ||
			child_call(setresgid, s->gid, s->gid, s->gid) < 0 ||
			child_call(setresuid, s->uid, s->uid, s->uid) < 0)
			child_fail(STAGE_USER, errno);
	}
	if (s->cwd && child_call(chdir, s->cwd) < 0)
		child_fail(STAGE_CWD, errno);
	if (child_call(rt_sigprocmask, SIG_SETMASK, &no_signals, NULL, sizeof(no_signals)) < 0)
		child_fail(STAGE_SETUP, errno);
	child_exec();
}

// In the child, leaves for child_main() on the new stack without touching ours again.
static long clone_child(struct clone_args *args)
{
#if defined(__x86_64__)
	long rc = SYS_clone3;

	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "call *%[entry]\n\t"
			 "hlt\n"
			 "1:"
			 : "+a"(rc)
			 : "D"(args), "S"(sizeof(*args)), [entry] "d"(child_main)
			 : "rcx", "r11", "r8", "r9", "r10", "memory", "cc");
	return rc;
#elif defined(__aarch64__)
	register long x0 __asm__("x0") = (long)args;
	register long x1 __asm__("x1") = (long)sizeof(*args);
	register long x8 __asm__("x8") = SYS_clone3;

	__asm__ volatile("svc #0\n\t"
			 "cbnz x0, 1f\n\t"
			 "mov x29, xzr\n\t"
			 "mov x30, xzr\n\t"
			 "br %[entry]\n"
			 "1:"
			 : "+r"(x0)
			 : "r"(x1), "r"(x8), [entry] "r"(child_main)
			 : "memory", "cc");
	return x0;
#else
#error "clone_child() is not written for this architecture"
#endif
}

static pid_t failed(const struct spawn *s, int *ret_exit_code, struct err *err)
{
	int code = child.error ? -child.error : -EIO;

	*ret_exit_code = 125;
	switch (child.stage) {
	case STAGE_CWD:
		return err_errno(err, code, "working directory %s", s->cwd);
	case STAGE_USER:
		return err_errno(err, code, "user %u", s->uid);
	case STAGE_EXEC:
		*ret_exit_code = code == -ENOENT || code == -ENOTDIR ? 127 : 126;
		if (code == -ENOENT && !strchr(s->argv[0], '/'))
			return err_set(err, code, "%s: command not found", s->argv[0]);
		return err_errno(err, code, "%s", s->argv[0]);
	default:
		return err_errno(err, code, "cannot set up the process");
	}
}

pid_t spawn(const struct spawn *s, int *ret_exit_code, struct err *err)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK,
		.exit_signal = SIGCHLD,
		.stack = (uintptr_t)child_stack,
		.stack_size = sizeof(child_stack),
	};
	long pid;

	ASSERT(s->argv && s->argv[0] && s->fds[0] > 2 && s->fds[1] > 2 && s->fds[2] > 2);
	if (s->cgroup_fd >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)s->cgroup_fd;
	}
	child.spawn = s;
	child.stage = STAGE_SETUP;
	child.error = 0;
	pid = clone_child(&args);
	if (pid < 0) {
		*ret_exit_code = 125;
		return err_errno(err, (int)pid, "cannot start a process");
	}
	if (child.error)
		return failed(s, ret_exit_code, err); // the loop reaps it
	return (pid_t)pid;
}
