// SPDX-License-Identifier: Apache-2.0
// Faults of the host: each verb of the command that needs no guest is run again and again, and each
// time another of its system calls or allocations fails, until none is left to. It must not crash
// or hang; where it fails, it must say so, and what there was is as before or as it was to become,
// with nothing beside it, so that the same command once more succeeds. Where it does not, it must
// have done and printed what it was to.
//
//   faults MAYFLY [VERB…]     MAYFLY is linked with tests/faults/faulty_alloc.c; VERB as in the
//   table
//
// One thread. x86-64 only: how the result of a call is set is the processor's.
#include "tests/faults/faults.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/util.h"
#include <limits.h>

#define TEXT_BYTES (1U << 20)
#define RUN_S      60U // a bound for what hangs
#define FAULTS_MAX 6000ULL // of one verb and kind
#define SHOWN_MAX  12U

enum kind {
	NTH_CALL, // the n-th system call fails
	NO_ROOM, // from the n-th on all that need room on the disk do
	NO_FILES, // from the n-th on all that open a file do
	NTH_ALLOC, // the n-th allocation fails
	KINDS,
};

static const char *const kind_names[KINDS] = {"call", "no room", "no files", "allocation"};

#define READS 1U // its output is compared, and nothing may change
#define SLOW  8U // only if it is named, or FULL is set
#define FAILS 4U // it always does, and nothing changes
#define STEPS 2U // it may be half done when it fails; but not when it is done again

struct verb {
	const char *name;
	const char *setup; // of sh, with $M for the program and $MAYFLY_HOME
	const char *command; // the same; only mayfly itself is made to fail
	unsigned int flags;
	const char *cure; // what brings it to its end after a failure; NULL: the same again
};

static const struct verb verbs[] = {
	{"create", "$M create other", "$M create --allow example.com --disk size=64M box", 0, NULL},
	{"ps", "$M create a; $M create b", "$M ps", READS, NULL},
	{"ps-json", "$M create a; $M create b", "$M ps --json", READS, NULL},
	{"inspect", "$M create a", "$M inspect a", READS, NULL},
	{"rm",
		"$M create --allow x.org a; $M create b; echo s3cret-value >$W/f; $M secret add "
		"--host x.org --from-file $W/f "
		"a key",
		"$M rm a", STEPS, "$M rm a 2>/dev/null || :; $M gc"},
	{"config", "$M create --allow example.com a", "$M config a", READS, NULL},
	{"explain", "$M create --allow example.com a", "$M explain --json a", READS, NULL},
	{"access", "$M create a", "$M access a exec", 0, NULL},
	{"net", "$M create --allow example.com a", "$M net a", READS, NULL},
	{"net-allow", "$M create --allow example.com a",
		"$M net a allow example.org '*.example.net:80'", 0, NULL},
	{"net-deny", "$M create --allow example.com --allow example.org a",
		"$M net a deny example.org", 0, NULL},
	{"net-off", "$M create --allow example.com a", "$M net a --keep example.net off", 0, NULL},
	{"secret-add", "$M create --allow x.org a; echo s3cret-value >$W/f",
		"$M secret add --host x.org --from-file $W/f a key", 0, NULL},
	{"secret-ls",
		"$M create --allow x.org a; echo s3cret-value >$W/f; $M secret add --host x.org "
		"--from-file $W/f a "
		"key",
		"$M secret ls --json a", READS, NULL},
	{"secret-rm",
		"$M create --allow x.org a; echo s3cret-value >$W/f; for k in k1 k2; do $M secret "
		"add --host x.org "
		"--from-file $W/f a $k; done",
		"$M secret rm a k1", 0, NULL},
	{"image-import", "mkdir -p $W/root/bin; echo x >$W/root/bin/x",
		"$M image import -q img $W/root", STEPS | SLOW,
		"$M gc; $M image import -q img $W/root"},
	{"image-ls", "mkdir -p $W/root/bin; $M image import -q img $W/root", "$M image ls --json",
		READS, NULL},
	{"image-inspect", "mkdir -p $W/root/bin; $M image import -q img $W/root",
		"$M image inspect img", READS, NULL},
	{"image-rm", "mkdir -p $W/root/bin; $M image import -q img $W/root", "$M image rm img",
		STEPS, "$M image rm img 2>/dev/null || :; $M gc"},
	{"image-rm-needed",
		"mkdir -p $W/root/bin; $M image import -q img $W/root; $M create --image img a",
		"$M image rm img", FAILS, NULL},
	{"gc-images", "mkdir -p $W/root/bin; $M image import -q img $W/root", "$M gc", READS, NULL},
	{"gc-needed",
		"mkdir -p $W/root/bin $W/root2/sbin; $M image import -q img $W/root; $M create "
		"--image "
		"img a; $M image import -q img $W/root2",
		"$M gc", READS, NULL},
	{"audit", "$M create a", "$M audit a", READS, NULL},
	{"approvals", "$M create a", "$M approvals --json a", READS, NULL},
	{"snapshots", "$M create a", "$M snapshots --json", READS, NULL},
	{"pool-ls", "$M create a", "$M pool ls --json", READS, NULL},
	{"gc", "$M create a; mkdir -p $MAYFLY_HOME/vms/run-gone/run", "$M gc", 0, NULL},
	{"mcp-install", "$M create a; echo '{\"other\": 1}' >$MAYFLY_HOME/.claude.json",
		"env HOME=$MAYFLY_HOME $M mcp install claude-code a", 0, NULL},
};

static struct {
	const char *mayfly;
	char dir[64], home[80];
	struct faults_page *page;
	int page_fd;
	unsigned int runs, failed, bad;
} t;

// --- The tree --------------------------------------------------------------------------------

struct text {
	char *at;
	size_t len;
};

static int shell(const char *command)
{
	const pid_t pid = fork();
	int status;

	if (pid == 0) {
		const int fd = open("/dev/null", O_RDWR);

		dup2(fd, STDIN_FILENO);
		dup2(fd, STDOUT_FILENO);
		execl("/bin/sh", "sh", "-ec", command, NULL);
		_exit(127);
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 ? 0 : -1;
}

static void must(const char *command)
{
	if (shell(command) == 0)
		return;
	fprintf(stderr, "faults: %s: failed\n", command);
	exit(1);
}

static void read_all(int fd, struct text *text)
{
	ssize_t n;

	text->len = 0;
	while (text->len < TEXT_BYTES - 1 &&
		(n = pread(fd, text->at + text->len, TEXT_BYTES - 1 - text->len,
			 (off_t)text->len)) > 0)
		text->len += (size_t)n;
	text->at[text->len] = '\0';
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
	return strcmp((*a)->fts_name, (*b)->fts_name);
}

static uint64_t hash_file(const char *path)
{
	uint64_t hash = 0xcbf29ce484222325ULL;
	char data[4096];
	const int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	while (fd >= 0 && (n = read(fd, data, sizeof(data))) > 0)
		for (ssize_t i = 0; i < n; i++)
			hash = (hash ^ (unsigned char)data[i]) * 0x100000001b3ULL;
	close(fd);
	return hash;
}

// Puts one character in the place of an id, which is another one each time. Whether there was one.
static bool hide_ids(char *text)
{
	bool hidden = false;

	while (*text) {
		const size_t len = strspn(text, "0123456789abcdef");

		if (len >= 32) {
			memmove(text + 1, text + len, strlen(text + len) + 1);
			*text = '#';
			hidden = true;
		}
		text += len >= 32 ? 1 : MAX(len, (size_t)1);
	}
	return hidden;
}

// What there is: names, kinds and modes, and what small files say.
static void take_tree(struct text *text)
{
	char *const roots[] = {t.home, NULL};
	FTS *fts = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, by_name);
	FTSENT *e;

	text->len = 0;
	text->at[0] = '\0';
	while (fts && (e = fts_read(fts)) && text->len < TEXT_BYTES - 2 * PATH_MAX) {
		char name[PATH_MAX];
		bool file = e->fts_info == FTS_F && e->fts_statp->st_size < 65536;

		// The folders of each kind are made by whoever needs one, and stay.
		if (e->fts_info == FTS_DP || e->fts_level == 0 ||
			(e->fts_level == 1 && e->fts_info == FTS_D))
			continue;
		snprintf(name, sizeof(name), "%s", e->fts_path + strlen(t.home));
		file &= !hide_ids(name);
		text->len += (size_t)sprintf(text->at + text->len, "%s %o %llx\n", name,
			e->fts_statp->st_mode,
			file ? (unsigned long long)hash_file(e->fts_accpath) : 0);
	}
	fts_close(fts);
}

// --- Running ---------------------------------------------------------------------------------

struct outcome {
	int status; // as waitpid() has it
	bool hit, hung;
	char what[96]; // the fault
	const char *error; // as strerror() has it
	bool removes; // it was of a call that cleans up
	bool mute; // it was of the word itself
	struct text out, err;
};

static bool is_one_of(long nr, const long *list, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (list[i] == nr)
			return true;
	return false;
}

#define IS_ONE_OF(nr, ...)                         \
	is_one_of(nr, (const long[]){__VA_ARGS__}, \
		sizeof((const long[]){__VA_ARGS__}) / sizeof(long))

// What the kernel never lets fail, or nobody could do anything about.
static bool never_fails(long nr)
{
	return IS_ONE_OF(nr, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_rt_sigprocmask,
		SYS_rt_sigaction, SYS_futex, SYS_munmap, SYS_madvise, SYS_getpid, SYS_gettid,
		SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_umask, SYS_getrandom,
		SYS_wait4, SYS_waitid, SYS_kill, SYS_tgkill, SYS_clock_nanosleep, SYS_close,
		SYS_close_range, SYS_restart_syscall, SYS_execve, SYS_rseq, SYS_set_robust_list,
		SYS_getppid, SYS_prctl, SYS_poll, SYS_ppoll, SYS_rt_sigtimedwait);
}

static bool removes(long nr)
{
	return IS_ONE_OF(nr, SYS_unlink, SYS_unlinkat, SYS_rmdir);
}

static bool opens(long nr)
{
	return IS_ONE_OF(nr, SYS_open, SYS_openat, SYS_socket, SYS_socketpair, SYS_pipe2, SYS_dup,
		SYS_eventfd2, SYS_epoll_create1, SYS_memfd_create, SYS_pidfd_open, SYS_accept4,
		SYS_signalfd4, SYS_timerfd_create);
}

static bool needs_room(long nr, const uint64_t *args)
{
	return IS_ONE_OF(nr, SYS_mkdir, SYS_mkdirat, SYS_write, SYS_pwrite64, SYS_writev,
		       SYS_rename, SYS_renameat, SYS_renameat2, SYS_link, SYS_linkat, SYS_symlink,
		       SYS_symlinkat, SYS_copy_file_range, SYS_fallocate) ||
	       (nr == SYS_openat && (args[2] & O_CREAT)) || (nr == SYS_open && (args[1] & O_CREAT));
}

static int errno_of(long nr, const uint64_t *args)
{
	if (needs_room(nr, args))
		return ENOSPC;
	if (opens(nr))
		return EMFILE;
	if (IS_ONE_OF(nr, SYS_mmap, SYS_brk, SYS_mremap, SYS_mprotect))
		return ENOMEM;
	if (IS_ONE_OF(nr, SYS_fork, SYS_vfork, SYS_clone, SYS_clone3))
		return EAGAIN;
	return EIO;
}

// A failing stdout or stderr is something else than a full disk.
static bool is_meant(enum kind kind, long nr, const uint64_t *args)
{
	switch (kind) {
	case NTH_CALL:
		return !never_fails(nr);
	case NO_ROOM:
		return needs_room(nr, args) &&
		       !(IS_ONE_OF(nr, SYS_write, SYS_writev) && args[0] < 3);
	case NO_FILES:
		return opens(nr);
	default:
		return false;
	}
}

static void fail_call(pid_t pid, long nr, int error)
{
	struct user_regs_struct regs;
	int status;

	ptrace(PTRACE_GETREGS, pid, NULL, &regs);
	regs.orig_rax = (unsigned long long)-1;
	ptrace(PTRACE_SETREGS, pid, NULL, &regs);
	if (ptrace(PTRACE_SYSCALL, pid, NULL, NULL) < 0 || waitpid(pid, &status, __WALL) != pid ||
		!WIFSTOPPED(status))
		return;
	ptrace(PTRACE_GETREGS, pid, NULL, &regs);
	// That of brk() is the old end.
	regs.rax = nr == SYS_brk ? 0 : (unsigned long long)-error;
	ptrace(PTRACE_SETREGS, pid, NULL, &regs);
}

static _Noreturn void child(const struct verb *verb, const int *outs)
{
	char fd[16], command[1024];

	setpgid(0, 0);
	dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
	dup2(outs[0], STDOUT_FILENO);
	dup2(outs[1], STDERR_FILENO);
	snprintf(fd, sizeof(fd), "%d", t.page_fd);
	setenv(FAULTS_ENV, fd, 1);
	if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
		_exit(127);
	raise(SIGSTOP);
	snprintf(command, sizeof(command), "exec %s", verb->command);
	execl("/bin/sh", "sh", "-c", command, NULL);
	_exit(127);
}

struct tracing {
	enum kind kind;
	uint64_t n, seen;
	bool counting; // main() has begun
	struct outcome *outcome;
};

// A stop at a system call's entry or exit.
static void at_call(struct tracing *tr, pid_t pid)
{
	struct __ptrace_syscall_info info;
	struct outcome *o = tr->outcome;
	const uint64_t *args = info.entry.args;
	long nr;

	if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(info), &info) <= 0 ||
		info.op != PTRACE_SYSCALL_INFO_ENTRY)
		return;
	nr = (long)info.entry.nr;
	// The first of main()'s own.
	if (!tr->counting)
		tr->counting = nr == SYS_fcntl && args[0] == 0 && args[1] == F_GETFD;
	if (nr == SYS_fcntl && args[1] == F_GETFD)
		return;
	if (!tr->counting || !is_meant(tr->kind, nr, args) || ++tr->seen < tr->n)
		return;
	if (tr->kind == NTH_CALL && tr->seen > tr->n)
		return;
	if (!o->hit)
		snprintf(o->what, sizeof(o->what), "call %ld fails: %s", nr,
			strerror(errno_of(nr, args)));
	o->hit = true;
	o->error = strerror(errno_of(nr, args));
	// Without files there is no looking into a folder.
	o->removes |= removes(nr) || tr->kind == NO_FILES;
	o->mute |= IS_ONE_OF(nr, SYS_write, SYS_writev) && args[0] == 2;
	fail_call(pid, nr, errno_of(nr, args));
}

static bool is_ours(pid_t pid)
{
	char link[32], exe[PATH_MAX];
	ssize_t len;

	snprintf(link, sizeof(link), "/proc/%d/exe", pid);
	len = readlink(link, exe, sizeof(exe) - 1);
	exe[MAX(len, 0)] = '\0';
	return !strcmp(exe, t.mayfly) || strstr(exe, "/dash") || strstr(exe, "/env");
}

// Until the command has ended; then nothing of it is left.
static void trace(struct tracing *tr, pid_t main_pid)
{
	pid_t pid;
	int status, sig;

	while ((pid = waitpid(-1, &status, __WALL)) > 0 || errno == EINTR) {
		if (pid < 0) {
			tr->outcome->hung = true;
			kill(-main_pid, SIGKILL);
			continue;
		}
		if (!WIFSTOPPED(status)) {
			if (pid != main_pid)
				continue;
			tr->outcome->status = status;
			kill(-main_pid, SIGKILL);
			continue;
		}
		sig = 0;
		if (WSTOPSIG(status) == (SIGTRAP | 0x80))
			at_call(tr, pid);
		else if (status >> 8 == (SIGTRAP | PTRACE_EVENT_EXEC << 8) && !is_ours(pid)) {
			ptrace(PTRACE_DETACH, pid, NULL, NULL);
			continue;
		} else if (status >> 16 == 0 && WSTOPSIG(status) != SIGSTOP)
			sig = WSTOPSIG(status);
		ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(long)sig);
	}
}

static void on_alarm(int sig)
{
	(void)sig;
}

static void run(const struct verb *verb, enum kind kind, uint64_t n, struct outcome *ret)
{
	struct tracing tr = {.kind = kind, .n = n, .outcome = ret};
	const int outs[] = {memfd_create("out", MFD_CLOEXEC), memfd_create("err", MFD_CLOEXEC)};
	int status;
	pid_t pid;

	ret->hit = ret->hung = ret->removes = ret->mute = false;
	ret->status = 0;
	ret->error = "unknown";
	ret->what[0] = '\0';
	memset(t.page, 0, sizeof(*t.page));
	t.page->fail_at = kind == NTH_ALLOC ? n : 0;
	pid = fork();
	if (pid == 0)
		child(verb, outs);
	if (pid < 0 || waitpid(pid, &status, 0) != pid) {
		perror("fork");
		exit(1);
	}
	ptrace(PTRACE_SETOPTIONS, pid, NULL,
		PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC |
			PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE);
	ptrace(PTRACE_SYSCALL, pid, NULL, NULL);
	alarm(RUN_S);
	trace(&tr, pid);
	alarm(0);
	if (t.page->callers[0]) {
		ret->hit = true;
		ret->error = strerror(ENOMEM);
		snprintf(ret->what, sizeof(ret->what), "an allocation fails");
	}
	read_all(outs[0], &ret->out);
	read_all(outs[1], &ret->err);
	close(outs[0]);
	close(outs[1]);
	t.runs++;
}

// --- Judging ---------------------------------------------------------------------------------

static void reset(void)
{
	char command[256];

	snprintf(
		command, sizeof(command), "rm -rf %s && cp -a %s/before %s", t.home, t.dir, t.home);
	must(command);
}

static void print_changes(const struct text *was, const struct text *is)
{
	char a[96], b[96], command[320];
	FILE *f;

	snprintf(a, sizeof(a), "%s/was", t.dir);
	snprintf(b, sizeof(b), "%s/is", t.dir);
	f = fopen(a, "w");
	fwrite(was->at, 1, was->len, f);
	fclose(f);
	f = fopen(b, "w");
	fwrite(is->at, 1, is->len, f);
	fclose(f);
	snprintf(command, sizeof(command), "diff -U0 %s %s | grep '^[-+]/' >&2", a, b);
	(void)!system(command);
}

static bool same(const struct text *a, const struct text *b)
{
	return a->len == b->len && !memcmp(a->at, b->at, a->len);
}

static struct text new_text(void)
{
	return (struct text){.at = malloc(TEXT_BYTES)};
}

struct judge {
	const struct verb *verb;
	struct text before, after, now, out; // trees; and what it prints when all is well
};

// What is wrong about it; NULL: nothing.
static const char *judge(struct judge *j, const struct outcome *o)
{
	const bool fails = j->verb->flags & FAILS;
	const bool good = WIFEXITED(o->status) && WEXITSTATUS(o->status) == 0;

	take_tree(&j->now);
	if (o->hung)
		return "hangs";
	if (!WIFEXITED(o->status))
		return "dies of a signal";
	if (good && fails)
		return "does what it must not";
	if (good && !same(&j->now, &j->after))
		return "says that it is done, and it is not";
	if (good && (j->verb->flags & READS) && !same(&o->out, &j->out) &&
		!strstr(o->out.at, o->error) && !strstr(o->err.at, o->error))
		return "has not printed all, and does not say so";
	if (!good && o->err.len == 0 && !o->mute)
		return "fails without a word";
	if (!good && !o->removes && !(j->verb->flags & STEPS) && !same(&j->now, &j->before) &&
		!same(&j->now, &j->after))
		return "leaves something half done";
	return NULL;
}

// And once more, now that nothing fails.
static const char *again(struct judge *j, struct outcome *o)
{
	const bool done = same(&j->now, &j->after) && !same(&j->after, &j->before);

	if (same(&j->now, &j->before) || done)
		return NULL; // as it is known to be
	if (j->verb->cure)
		must(j->verb->cure);
	else
		run(j->verb, NTH_CALL, 0, o);
	take_tree(&j->now);
	return (j->verb->cure || o->status == 0) && same(&j->now, &j->after)
		       ? NULL
		       : "and then it can not be done again";
}

static void report(
	struct judge *j, enum kind kind, uint64_t n, const struct outcome *o, const char *wrong)
{
	t.bad++;
	fprintf(stderr, "FAIL %s, %s %llu (%s", j->verb->name, kind_names[kind],
		(unsigned long long)n, o->what);
	fprintf(stderr, "): %s\n", wrong);
	if (t.page->callers[0]) {
		char command[1024];
		int len = sprintf(command, "addr2line -fse %.300s", t.mayfly);

		for (size_t i = 0; i < FAULTS_CALLERS; i++)
			len += sprintf(
				command + len, " %#llx", (unsigned long long)t.page->callers[i]);
		sprintf(command + len, " | grep -v '^?' | paste - - | head -n 7 >&2");
		(void)!system(command);
	}
	fprintf(stderr, "  status %#x, says: %.*s\n", o->status, (int)MIN(o->err.len, 300U),
		o->err.at);
	if (!same(&j->now, &j->before))
		print_changes(&j->before, &j->now);
}

static void try_verb(const struct verb *verb)
{
	struct judge j = {verb, new_text(), new_text(), new_text(), new_text()};
	struct outcome o = {.out = new_text(), .err = new_text()};
	char command[256];
	const unsigned int runs = t.runs, bad = t.bad;
	unsigned int failed = 0;

	snprintf(command, sizeof(command), "rm -rf %s %s/before && mkdir -m 700 %s", t.home, t.dir,
		t.home);
	must(command);
	must(verb->setup);
	snprintf(command, sizeof(command), "cp -a %s %s/before", t.home, t.dir);
	must(command);
	take_tree(&j.before);
	run(verb, NTH_CALL, 0, &o);
	take_tree(&j.after);
	if ((o.status != 0) != ((verb->flags & FAILS) != 0) || o.hung) {
		fprintf(stderr, "FAIL %s: %s: %.*s\n", verb->name, verb->command, (int)o.err.len,
			o.err.at);
		t.bad++;
	}
	memcpy(j.out.at, o.out.at, o.out.len);
	j.out.len = o.out.len;
	for (enum kind kind = 0; kind < KINDS && t.bad < bad + SHOWN_MAX; kind++) {
		for (uint64_t n = 1; t.bad < bad + SHOWN_MAX; n++) {
			const char *wrong;

			take_tree(&j.now);
			if (!same(&j.now, &j.before))
				reset();
			run(verb, kind, n, &o);
			wrong = judge(&j, &o);
			if (wrong)
				report(&j, kind, n, &o, wrong);
			if (!o.hit)
				break;
			failed += o.status != 0;
			wrong = again(&j, &o);
			if (wrong)
				report(&j, kind, n, &o, wrong);
			if (n == FAULTS_MAX) {
				report(&j, kind, n, &o, "there is no end of it");
				break;
			}
		}
	}
	t.failed += failed;
	if (t.bad == bad)
		printf("ok   %-16s %4u runs, %4u of them failed, each with a word\n", verb->name,
			t.runs - runs, failed);
	fflush(stdout);
	free(j.before.at);
	free(j.after.at);
	free(j.now.at);
	free(j.out.at);
	free(o.out.at);
	free(o.err.at);
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_alarm};
	char command[128];

	if (argc < 2 || argv[1][0] != '/') {
		fputs("usage: faults /PATH/TO/MAYFLY [VERB...]\n", stderr);
		return 2;
	}
	t.mayfly = argv[1];
	snprintf(t.dir, sizeof(t.dir), "%s/mayfly-faults.XXXXXX",
		access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
	t.page_fd = memfd_create("faults", 0);
	if (!mkdtemp(t.dir) || t.page_fd < 0 || ftruncate(t.page_fd, sizeof(*t.page)) < 0) {
		perror("faults");
		return 1;
	}
	t.page = mmap(NULL, sizeof(*t.page), PROT_READ | PROT_WRITE, MAP_SHARED, t.page_fd, 0);
	if (t.page == MAP_FAILED) {
		perror("faults");
		return 1;
	}
	snprintf(t.home, sizeof(t.home), "%s/home", t.dir);
	sigaction(SIGALRM, &action, NULL);
	setenv("M", t.mayfly, 1);
	setenv("W", t.dir, 1);
	setenv("MAYFLY_HOME", t.home, 1);
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
		bool wanted = argc == 2 && (!(verbs[i].flags & SLOW) || getenv("FULL"));

		for (int k = 2; k < argc; k++)
			wanted |= !strcmp(argv[k], verbs[i].name);
		if (wanted)
			try_verb(&verbs[i]);
	}
	snprintf(command, sizeof(command), "rm -rf %s", t.dir);
	must(command);
	printf("faults: %u runs, %u failed as they should, %u not\n", t.runs, t.failed, t.bad);
	return t.bad > 0;
}
