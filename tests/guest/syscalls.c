// SPDX-License-Identifier: Apache-2.0
// Runs in a guest: takes every way into and out of a system call that user mode has, since on a
// host that emulates ring 0 the guest kernel enters them by a page fault (kernel-config/patches).
// Static, libc alone. syscalls ENTRY [emulated], ENTRY being the address of entry_SYSCALL_64.
// Prints "ok NAME" or "FAIL NAME: ..." a check; exit 0 if none failed. A jump to ENTRY must be a
// system call and no more on an emulating host, and a segmentation fault everywhere else.
#include <errno.h>
#include <inttypes.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define FLAG_CF   UINT64_C(0x1)
#define FLAG_TF   UINT64_C(0x100)
#define FLAG_IF   UINT64_C(0x200)
#define FLAG_DF   UINT64_C(0x400)
#define FLAG_IOPL UINT64_C(0x3000)
#define FLAG_NT   UINT64_C(0x4000)
#define FLAG_AC   UINT64_C(0x40000)
#define FLAG_ID   UINT64_C(0x200000)

static int failed;

__attribute__((format(printf, 3, 4))) static void check(
	bool good, const char *name, const char *format, ...)
{
	va_list args;

	if (good) {
		printf("ok %s\n", name);
		return;
	}
	failed = 1;
	printf("FAIL %s: ", name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
}

// A child's fate, as text.
static const char *fate(int status)
{
	static char text[64];

	if (WIFEXITED(status))
		snprintf(text, sizeof(text), "exit %d", WEXITSTATUS(status));
	else if (WIFSIGNALED(status))
		snprintf(text, sizeof(text), "signal %d", WTERMSIG(status));
	else
		snprintf(text, sizeof(text), "status %#x", (unsigned)status);
	return text;
}

static int wait_for(pid_t pid)
{
	int status = 0;

	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -1;
	return status;
}

// Runs FN in a child and returns how it ended.
static int in_child(void (*fn)(void))
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		fn();
		_exit(0);
	}
	return wait_for(pid);
}

// --- Registers ---------------------------------------------------------------------------------

static void test_registers(void)
{
	register uint64_t r10 __asm__("r10") = 0x1010101010101010;
	register uint64_t r8 __asm__("r8") = 0x0808080808080808;
	register uint64_t r9 __asm__("r9") = 0x0909090909090909;
	register uint64_t r12 __asm__("r12") = 0x1212121212121212;
	register uint64_t r15 __asm__("r15") = 0x1515151515151515;
	uint64_t rax = SYS_getpid, rcx, r11, next, flags;
	uint64_t rdi = 1, rsi = 2, rdx = 3, rbx = 4;
	bool same;

	__asm__ volatile("pushfq\n\t"
			 "popq %[flags]\n\t"
			 "syscall\n"
			 "1:\tleaq 1b(%%rip), %[next]\n\t"
			 "movq %%r11, %[r11]"
			 : "+a"(rax),
			 "=&c"(rcx), [r11] "=&r"(r11), [next] "=&r"(next), [flags] "=&r"(flags),
			 "+D"(rdi), "+S"(rsi), "+d"(rdx), "+b"(rbx), "+r"(r10), "+r"(r8), "+r"(r9),
			 "+r"(r12), "+r"(r15)
			 :
			 : "r11", "memory", "cc");
	same = rdi == 1 && rsi == 2 && rdx == 3 && rbx == 4 && r10 == 0x1010101010101010 &&
	       r8 == 0x0808080808080808 && r9 == 0x0909090909090909 && r12 == 0x1212121212121212 &&
	       r15 == 0x1515151515151515;
	check(same, "the other registers stay", "they do not");
	check(rax == (uint64_t)getpid(), "result", "%#" PRIx64, rax);
	check(rcx == next, "rcx is the return address", "%#" PRIx64 ", not %#" PRIx64, rcx, next);
	check((r11 & ~UINT64_C(0x10000)) == flags, "r11 is rflags", "%#" PRIx64 ", not %#" PRIx64,
		r11, flags);
}

static uint64_t raw(uint64_t rax)
{
	__asm__ volatile("syscall" : "+a"(rax) : : "rcx", "r11", "memory", "cc");
	return rax;
}

static void test_numbers(void)
{
	check(raw(9999) == (uint64_t)-ENOSYS, "an unknown number", "%" PRId64, raw(9999));
	check(raw((uint64_t)-1) == (uint64_t)-ENOSYS, "number -1", "%" PRId64, raw((uint64_t)-1));
	check(raw(UINT64_C(0x100000000) | SYS_getpid) == (uint64_t)getpid(),
		"the number is 32 bits wide", "it is not");
}

static void test_flags(void)
{
	uint64_t want = FLAG_CF | FLAG_DF | FLAG_AC | FLAG_ID, got, rax = SYS_getpid;

	// The compiler's code must not run with these: set, call and take back in one go.
	__asm__ volatile("pushfq\n\t"
			 "pushfq\n\t"
			 "orq %[want], (%%rsp)\n\t"
			 "popfq\n\t"
			 "syscall\n\t"
			 "pushfq\n\t"
			 "popq %[got]\n\t"
			 "popfq"
			 : [got] "=&r"(got), "+a"(rax)
			 : [want] "r"(want)
			 : "rcx", "r11", "memory", "cc");
	check((got & want) == want && rax == (uint64_t)getpid(), "flags stay",
		"%#" PRIx64 " of %#" PRIx64, got & want, want);
}

// --- Processes ---------------------------------------------------------------------------------

static void exit_7(void)
{
	_exit(7);
}

static void *thread(void *arg)
{
	*(pid_t *)arg = (pid_t)raw(SYS_gettid);
	return arg;
}

static void test_processes(char *self)
{
	volatile int shared = 0;
	pthread_t t;
	pid_t pid, tid = 0;
	int status;

	status = in_child(exit_7);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 7, "fork", "%s", fate(status));

	pid = vfork();
	if (pid == 0) {
		shared = 1;
		execl(self, self, "exec", (char *)NULL);
		_exit(99);
	}
	status = wait_for(pid);
	check(shared == 1 && WIFEXITED(status) && WEXITSTATUS(status) == 23, "vfork and execve",
		"%s", fate(status));

	check(pthread_create(&t, NULL, thread, &tid) == 0 && pthread_join(t, NULL) == 0 &&
			tid > 0 && tid != getpid(),
		"clone of a thread", "tid %d", tid);
}

// --- Signals -----------------------------------------------------------------------------------

static volatile sig_atomic_t handled;

static void count(int sig)
{
	(void)sig;
	handled++;
}

static void nest(int sig)
{
	if (sig == SIGUSR1)
		raise(SIGUSR2);
	handled++;
}

static void handle(int sig, void (*fn)(int), int flags)
{
	struct sigaction action = {.sa_handler = fn, .sa_flags = flags};

	sigaction(sig, &action, NULL);
}

static volatile sig_atomic_t *told; // shared with a child

static void tell(int sig)
{
	(void)sig;
	*told = 1;
}

// A signal while a read blocks: the writer writes only once the handler has run.
static ssize_t interrupted_read(int flags)
{
	int data[2];
	char byte = 0;
	ssize_t n;
	pid_t pid;

	handle(SIGUSR1, tell, flags);
	*told = 0;
	if (pipe(data))
		return -2;
	pid = fork();
	if (pid == 0) {
		char state[256] = "";

		// Wait until the parent sleeps: its state in /proc says so.
		do {
			char path[64];
			FILE *f;

			snprintf(path, sizeof(path), "/proc/%d/stat", getppid());
			f = fopen(path, "re");
			if (!f || !fgets(state, sizeof(state), f))
				_exit(1);
			fclose(f);
		} while (!strstr(state, ") S "));
		kill(getppid(), SIGUSR1);
		while (!*told)
			sched_yield();
		if (write(data[1], "x", 1) != 1)
			_exit(1);
		_exit(0);
	}
	n = read(data[0], &byte, 1);
	if (n < 0)
		n = -errno;
	wait_for(pid);
	close(data[0]);
	close(data[1]);
	return n;
}

static void test_signals(void)
{
	struct itimerval timer = {{0, 20000}, {0, 20000}}, off = {{0, 0}, {0, 0}};
	stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536};
	pid_t me = getpid(), pid;
	int wrong = 0, status;
	ssize_t n;

	handle(SIGUSR1, nest, 0);
	handle(SIGUSR2, nest, 0);
	handled = 0;
	raise(SIGUSR1);
	check(handled == 2, "a signal within a signal", "%d handled", (int)handled);

	sigaltstack(&stack, NULL);
	handle(SIGUSR2, count, SA_ONSTACK);
	raise(SIGUSR2);
	check(handled == 3, "a signal on its own stack", "%d handled", (int)handled);

	told = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	n = interrupted_read(0);
	check(n == -EINTR, "EINTR", "%zd", n);
	n = interrupted_read(SA_RESTART);
	check(n == 1, "SA_RESTART", "%zd", n);

	// Timer signals come at any instruction, also between SYSCALL and the kernel's entry.
	handle(SIGALRM, count, 0);
	handled = 0;
	setitimer(ITIMER_REAL, &timer, NULL);
	while (handled < 20)
		wrong += raw(SYS_getpid) != (uint64_t)me;
	setitimer(ITIMER_REAL, &off, NULL);
	check(wrong == 0, "calls under a hail of signals", "%d wrong", wrong);

	pid = fork();
	if (pid == 0) {
		struct timespec begin, end, rest = {0, 300 * 1000 * 1000};

		clock_gettime(CLOCK_MONOTONIC, &begin);
		raise(SIGSTOP);
		if (syscall(SYS_nanosleep, &rest, &rest))
			_exit(1);
		clock_gettime(CLOCK_MONOTONIC, &end);
		end.tv_sec -= begin.tv_sec;
		_exit(end.tv_sec * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000 < 300);
	}
	while (waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status))
		kill(pid, SIGCONT);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "stop and continue", "%s",
		fate(status));
	free(stack.ss_sp);
}

// --- Tracing -----------------------------------------------------------------------------------

extern const char traced_syscall[], traced_next[];

static void traced(void)
{
	uint64_t a, b;

	ptrace(PTRACE_TRACEME, 0, NULL, NULL);
	raise(SIGSTOP);
	a = raw(SYS_getuid); // the tracer makes it getppid
	b = raw(SYS_getppid); // and of this the result 4711
	_exit(a == (uint64_t)getppid() && b == 4711 ? 5 : 6);
}

static void stepped(void)
{
	uint64_t rax = SYS_getppid;

	ptrace(PTRACE_TRACEME, 0, NULL, NULL);
	raise(SIGSTOP);
	__asm__ volatile(".globl traced_syscall, traced_next\n"
			 "traced_syscall:\n\tsyscall\n"
			 "traced_next:\n\tnop"
			 : "+a"(rax)
			 :
			 : "rcx", "r11", "memory");
	_exit(rax == (uint64_t)getppid() ? 5 : 6);
}

static pid_t start(void (*fn)(void))
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0)
		fn();
	wait_for(pid);
	return pid;
}

static void test_tracing(void)
{
	struct user_regs_struct regs = {0};
	int status = 0, stops = 0, parents = 0, steps;
	bool enosys = true, jumped = false;
	pid_t pid = start(traced);

	ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(uintptr_t)PTRACE_O_TRACESYSGOOD);
	while (ptrace(PTRACE_SYSCALL, pid, NULL, NULL) == 0) {
		status = wait_for(pid);
		if (!WIFSTOPPED(status) || WSTOPSIG(status) != (SIGTRAP | 0x80))
			break;
		ptrace(PTRACE_GETREGS, pid, NULL, &regs);
		if (stops % 2 == 0)
			enosys &= regs.rax == (uint64_t)-ENOSYS;
		if (stops % 2 == 0 && regs.orig_rax == SYS_getuid) {
			regs.orig_rax = SYS_getppid;
			ptrace(PTRACE_SETREGS, pid, NULL, &regs);
		} else if (stops % 2 == 1 && regs.orig_rax == SYS_getppid && ++parents == 2) {
			regs.rax = 4711;
			ptrace(PTRACE_SETREGS, pid, NULL, &regs);
		}
		stops++;
	}
	check(WIFEXITED(status) && WEXITSTATUS(status) == 5 && stops >= 5 && enosys,
		"a tracer changes call and result", "%s after %d stops", fate(status), stops);

	pid = start(stepped);
	for (steps = 0; steps < 20000 && ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0; steps++) {
		status = wait_for(pid);
		if (!WIFSTOPPED(status))
			break;
		ptrace(PTRACE_GETREGS, pid, NULL, &regs);
		if (jumped)
			break;
		jumped = regs.rip == (uintptr_t)traced_syscall;
	}
	check(jumped && regs.rip == (uintptr_t)traced_next && regs.rax == (uint64_t)getpid(),
		"a single step over SYSCALL", "%d steps, rip %#" PRIx64 ", rax %#" PRIx64, steps,
		(uint64_t)regs.rip, (uint64_t)regs.rax);
	ptrace(PTRACE_CONT, pid, NULL, NULL);
	status = wait_for(pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 5, "and on", "%s", fate(status));
}

static volatile sig_atomic_t traps;

static void trap(int sig, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;

	(void)sig;
	(void)info;
	if (++traps > 1000)
		uc->uc_mcontext.gregs[REG_EFL] &= ~(greg_t)FLAG_TF;
}

static void test_own_steps(void)
{
	struct sigaction action = {.sa_sigaction = trap, .sa_flags = SA_SIGINFO};
	uint64_t rax = SYS_getpid;

	sigaction(SIGTRAP, &action, NULL);
	__asm__ volatile("pushfq\n\t"
			 "orq %[tf], (%%rsp)\n\t"
			 "popfq\n\t"
			 "nop\n\t"
			 "syscall\n\t"
			 "nop\n\t"
			 "pushfq\n\t"
			 "andq %[no_tf], (%%rsp)\n\t"
			 "popfq"
			 : "+a"(rax)
			 : [tf] "i"(FLAG_TF), [no_tf] "i"(~FLAG_TF)
			 : "rcx", "r11", "memory", "cc");
	check(rax == (uint64_t)getpid() && traps >= 5 && traps < 20, "a process that steps itself",
		"%d traps, rax %#" PRIx64, (int)traps, rax);
}

// --- seccomp -----------------------------------------------------------------------------------

static volatile int trapped_call;
static void *volatile trapped_at;

static void sigsys(int sig, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;

	(void)sig;
	trapped_call = info->si_syscall;
	trapped_at = info->si_call_addr;
	uc->uc_mcontext.gregs[REG_RAX] = 42;
}

static void filtered(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTNAM),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getuid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getgid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
	struct sigaction action = {.sa_sigaction = sigsys, .sa_flags = SA_SIGINFO};

	sigaction(SIGSYS, &action, NULL);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
		prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		_exit(10);
	if (raw(SYS_getppid) != (uint64_t)-ENOTNAM)
		_exit(11);
	if (raw(SYS_getuid) != 42 || trapped_call != SYS_getuid || !trapped_at)
		_exit(12);
	raw(SYS_getgid);
	_exit(13);
}

static void test_seccomp(void)
{
	int status = in_child(filtered);

	check(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS, "seccomp: error, trap and kill",
		"%s", fate(status));
}

// --- Jumps to the kernel's entry ---------------------------------------------------------------

static uintptr_t entry;
static uint64_t forged_rip, forged_flags, after_flags;

// Jumps there with RAX, RCX and R11 of our choice; with no forged_rip, asks to come back here.
static uint64_t forge(uint64_t rax)
{
	__asm__ volatile("leaq 1f(%%rip), %%rcx\n\t"
			 "testq %[rip], %[rip]\n\t"
			 "cmovnzq %[rip], %%rcx\n\t"
			 "movq %[flags], %%r11\n\t"
			 "jmpq *%[entry]\n"
			 "1:\tpushfq\n\t"
			 "popq %[after]\n\t"
			 "pushq $0x202\n\t"
			 "popfq"
			 : "+a"(rax), [after] "=&r"(after_flags)
			 : [rip] "r"(forged_rip), [entry] "r"(entry), [flags] "r"(forged_flags)
			 : "rcx", "r11", "memory", "cc");
	return rax;
}

static void forge_flags(void)
{
	// All but TF, which would end in a trap.
	forged_flags = ~FLAG_TF;
	if (forge(SYS_getpid) != (uint64_t)getpid())
		_exit(2);
	if (after_flags & FLAG_IOPL || !(after_flags & FLAG_IF))
		_exit(3);
	// Interrupts off, as R11 asks.
	forged_flags = 0;
	forge(SYS_getpid);
	_exit(after_flags & FLAG_IF ? 0 : 4);
}

static void forge_io(void)
{
	forged_flags = FLAG_IOPL;
	forge(SYS_getpid);
	__asm__ volatile("outb %%al, $0x80" : : "a"(0));
}

static void forge_nt(void)
{
	forged_flags = FLAG_NT;
	forge(SYS_getpid);
	// NT while the kernel is entered and left again must do no harm.
	_exit(raw(SYS_getpid) == (uint64_t)getpid() ? 0 : 5);
}

static void forge_kernel_rip(void)
{
	forged_rip = entry - 4096;
	forge(SYS_getpid);
}

static void forge_bad_rip(void)
{
	forged_rip = UINT64_C(0x8000000000000000);
	forge(SYS_getpid);
}

static void forge_loop(void)
{
	struct itimerval timer = {{0, 0}, {0, 100000}};

	forged_rip = entry;
	setitimer(ITIMER_REAL, &timer, NULL);
	signal(SIGALRM, SIG_DFL);
	forge(SYS_getpid);
}

static void int_80(void)
{
	uint64_t rax = 20;

	__asm__ volatile("int $0x80" : "+a"(rax) : : "memory");
	_exit(rax == (uint64_t)-ENOSYS || rax == (uint64_t)getpid() ? 6 : 7);
}

static void test_jumps(bool emulated)
{
	static const struct {
		const char *name;
		void (*fn)(void);
		int signal; // on an emulating host; 0 is exit 0
	} jumps[] = {
		{"forged flags", forge_flags, 0},
		{"forged I/O privilege", forge_io, SIGSEGV},
		{"forged nested task", forge_nt, 0},
		{"forged kernel address", forge_kernel_rip, SIGSEGV},
		{"forged address that is none", forge_bad_rip, SIGSEGV},
		{"forged return to the entry", forge_loop, SIGALRM},
	};
	size_t i;
	int status;

	for (i = 0; i < sizeof(jumps) / sizeof(jumps[0]); i++) {
		int want = emulated ? jumps[i].signal : SIGSEGV;

		status = in_child(jumps[i].fn);
		check(want ? WIFSIGNALED(status) && WTERMSIG(status) == want
			   : WIFEXITED(status) && WEXITSTATUS(status) == 0,
			jumps[i].name, "%s", fate(status));
	}
	status = in_child(int_80);
	check(WIFSIGNALED(status), "int 0x80 ends the process", "%s", fate(status));
}

int main(int argc, char **argv)
{
	bool emulated = argc > 2 && strcmp(argv[2], "emulated") == 0;
	char *end;

	if (argc == 2 && strcmp(argv[1], "exec") == 0)
		return 23;
	if (argc < 2)
		return 2;
	entry = strtoull(argv[1], &end, 16);
	if (*end || entry < UINT64_C(0xffffffff80000000))
		return 2;
	test_registers();
	test_numbers();
	test_flags();
	test_processes(argv[0]);
	test_signals();
	test_tracing();
	test_own_steps();
	test_seccomp();
	test_jumps(emulated);
	return failed;
}
