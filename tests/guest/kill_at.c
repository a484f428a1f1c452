// SPDX-License-Identifier: Apache-2.0
// Kills a process when it makes its n-th system call, on the host; one thread:
//
//   kill_at N COMMAND…      COMMAND itself
//   kill_at N -c PID        the next process that thread PID forks (its process must not die of it)
//   kill_at N -p PID        the same child is counted, and its parent killed
//
// Prints "ready" when it watches, then "killed", or "ended" if there were fewer calls; with -p also
// "orphan" if the child did not die of its parent's death.
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

// Lets the tracee go on to its next stop, with the signal that it is to get, and waits for that.
static int step(pid_t pid, int sig, int *ret_status)
{
	if (ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(long)sig) < 0 && errno != ESRCH)
		return -1;
	return waitpid(pid, ret_status, __WALL) == pid ? 0 : -1;
}

// Counts the tracee's calls, of which it is in none; kills victim at the n-th. 1 if it did.
static int count(pid_t pid, unsigned long n, pid_t victim)
{
	unsigned long stops = 0;
	int status, sig = 0;

	for (;;) {
		if (step(pid, sig, &status) < 0)
			return -1;
		sig = 0;
		if (WIFEXITED(status) || WIFSIGNALED(status))
			return 0;
		if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
			// At entry and at exit.
			if (++stops < 2 * n - 1)
				continue;
			kill(victim, SIGKILL);
			return 1;
		}
		if (status >> 16 == 0)
			sig = WSTOPSIG(status);
	}
}

static int run_command(unsigned long n, char **argv)
{
	int status, r;
	pid_t pid = fork();

	if (pid == 0) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		execvp(argv[0], argv);
		_exit(127);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return fail("fork");
	ptrace(PTRACE_SETOPTIONS, pid, NULL,
		PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC);
	puts("ready");
	fflush(stdout);
	r = count(pid, n, pid);
	if (r < 0)
		return fail("ptrace");
	puts(r ? "killed" : "ended");
	return 0;
}

static int follow_child(unsigned long n, pid_t parent, int kill_parent)
{
	struct pollfd gone = {.fd = (int)syscall(SYS_pidfd_open, parent, 0), .events = POLLIN};
	unsigned long child = 0;
	int status, r;

	if (gone.fd < 0)
		return fail("pidfd_open");
	if (ptrace(PTRACE_SEIZE, parent, NULL, PTRACE_O_TRACEFORK | PTRACE_O_TRACESYSGOOD) < 0)
		return fail("ptrace");
	puts("ready");
	fflush(stdout);
	while (!child) {
		if (waitpid(parent, &status, __WALL) != parent || !WIFSTOPPED(status))
			return fail("the parent has ended");
		if (status >> 16 == PTRACE_EVENT_FORK)
			ptrace(PTRACE_GETEVENTMSG, parent, NULL, &child);
		ptrace(child ? PTRACE_DETACH : PTRACE_CONT, parent, NULL,
			(void *)(long)(status >> 16 ? 0 : WSTOPSIG(status)));
	}
	// It begins with a stop of its own.
	if (waitpid((pid_t)child, &status, __WALL) != (pid_t)child)
		return fail("waitpid");
	r = count((pid_t)child, n, kill_parent ? parent : (pid_t)child);
	if (r < 0)
		return fail("ptrace");
	if (r && kill_parent && poll(&gone, 1, 60000) != 1)
		return fail("the parent does not end");
	// It is stopped in its call, and must not come to the end of its work.
	while (r && kill_parent && step((pid_t)child, 0, &status) == 0 && WIFSTOPPED(status))
		;
	if (r && kill_parent && WIFEXITED(status) && WEXITSTATUS(status) == 0)
		puts("orphan");
	puts(r ? "killed" : "ended");
	return 0;
}

int main(int argc, char **argv)
{
	unsigned long n = argc > 2 ? strtoul(argv[1], NULL, 10) : 0;

	if (n == 0 || (argv[2][0] == '-' && argc != 4)) {
		fputs("usage: kill_at N COMMAND… | N -c PID | N -p PID\n", stderr);
		return 2;
	}
	if (argv[2][0] != '-')
		return run_command(n, argv + 2);
	return follow_child(n, (pid_t)strtol(argv[3], NULL, 10), argv[2][1] == 'p');
}
