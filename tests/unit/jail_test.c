// SPDX-License-Identifier: Apache-2.0
// vmm/jail_calls and vmm/jail: the filters say of every call what the table says, in a model of
// BPF; and a forked process that is confined cannot do what it is not to do, and says what it did.
#include "tests/support/test.h"

#include <asm/unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/kvm.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/jail.h"

#define PID 4321

// --- The filters -----------------------------------------------------------------------------

// Classic BPF as the kernel runs it, of the instructions that seccomp takes; refuses all others,
// jumps out of the program, and a program without an end.
static uint32_t run(const struct sock_filter *program, unsigned int len, struct seccomp_data data)
{
	uint32_t a = 0;

	for (unsigned int pc = 0; pc < len; pc++) {
		const struct sock_filter *f = &program[pc];

		switch (f->code) {
		case BPF_LD | BPF_W | BPF_ABS:
			assert_true(f->k % 4 == 0 && f->k < sizeof(data));
			memcpy(&a, (const char *)&data + f->k, sizeof(a));
			break;
		case BPF_JMP | BPF_JEQ | BPF_K:
			pc += a == f->k ? f->jt : f->jf;
			break;
		case BPF_JMP | BPF_JSET | BPF_K:
			pc += a & f->k ? f->jt : f->jf;
			break;
		case BPF_RET | BPF_K:
			return f->k;
		default:
			fail_msg("instruction %u: code 0x%x", pc, f->code);
		}
	}
	fail_msg("it has no end");
	return 0;
}

static bool table_allows(unsigned int kinds, const struct seccomp_data *data)
{
	for (unsigned int i = 0; i < jail_nr_rules; i++) {
		const struct jail_rule *rule = &jail_rules[i];
		const uint32_t arg = (uint32_t)data->args[rule->arg];

		if (rule->nr != data->nr || !(rule->kinds & kinds))
			continue;
		if (rule->check == JAIL_ANY || (rule->check == JAIL_EQUALS && arg == rule->value) ||
			(rule->check == JAIL_WITHOUT && !(arg & rule->value)) ||
			(rule->check == JAIL_SELF && arg == PID))
			return true;
	}
	return false;
}

static unsigned int kinds_of(enum jail_kind kind)
{
	// The process that writes a snapshot has the loop's filter, too.
	return JAIL_FOR(kind) | (kind == JAIL_LOOP ? JAIL_FOR(JAIL_SAVE) : 0);
}

// Arguments that the table names, and their neighbours.
static uint64_t some_arg(unsigned int i)
{
	const struct jail_rule *rule = &jail_rules[i / 4 % jail_nr_rules];

	switch (i % 4) {
	case 0:
		return rule->value;
	case 1:
		return rule->value + 1;
	case 2:
		return rule->value | 0xffffffff00000000ULL;
	default:
		return i % 8 == 3 ? PID : 0;
	}
}

static void filters_say_what_the_table_says(void **state)
{
	static struct sock_filter program[JAIL_PROGRAM_MAX];
	(void)state;

	for (int kind = 0; kind < JAIL_KINDS; kind++) {
		unsigned int len = jail_program((enum jail_kind)kind, PID, program);
		unsigned int allowed = 0;

		assert_true(len > 0 && len <= JAIL_PROGRAM_MAX);
		for (int nr = -1; nr < 600; nr++) {
			for (unsigned int i = 0; i < jail_nr_rules * 4; i++) {
				struct seccomp_data data = {.nr = nr, .arch = AUDIT_ARCH_X86_64};
				uint32_t verdict;

				for (int arg = 0; arg < 6; arg++)
					data.args[arg] = some_arg(i);
				verdict = run(program, len, data);
				assert_int_equal(
					verdict, table_allows(kinds_of((enum jail_kind)kind), &data)
							 ? SECCOMP_RET_ALLOW
							 : SECCOMP_RET_TRAP);
				allowed += verdict == SECCOMP_RET_ALLOW;
				// The same number of another table of calls is another call.
				data.arch = AUDIT_ARCH_I386;
				assert_int_equal(run(program, len, data), SECCOMP_RET_TRAP);
				data.arch = AUDIT_ARCH_X86_64;
				data.nr = nr | 0x40000000; // x32
				assert_int_equal(run(program, len, data), SECCOMP_RET_TRAP);
			}
		}
		assert_true(allowed > 0);
	}
}

static void nobody_may(void **state)
{
	static const int calls[] = {__NR_execve, __NR_execveat, __NR_open, __NR_openat2,
		__NR_ptrace, __NR_process_vm_readv, __NR_process_vm_writev, __NR_kill,
		__NR_pidfd_open, __NR_pidfd_getfd, __NR_pidfd_send_signal, __NR_setuid, __NR_capset,
		__NR_unshare, __NR_setns, __NR_mount, __NR_clone3, __NR_fork, __NR_vfork, __NR_bpf,
		__NR_perf_event_open, __NR_userfaultfd, __NR_io_uring_setup, __NR_io_uring_register,
		__NR_keyctl, __NR_add_key, __NR_memfd_create, __NR_chmod, __NR_link, __NR_symlink,
		__NR_mknod, __NR_mkdir, __NR_bind, __NR_listen, __NR_socketpair, __NR_init_module,
		__NR_kexec_load, __NR_modify_ldt, __NR_personality, __NR_shmget, __NR_msgget,
		__NR_prlimit64};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
		for (unsigned int r = 0; r < jail_nr_rules; r++)
			assert_int_not_equal(jail_rules[r].nr, calls[i]);
}

static void rows_of_a_call_stand_together(void **state)
{
	(void)state;

	// The filters are made a call at a time: a second group would never be reached.
	for (unsigned int i = 0; i < jail_nr_rules; i++)
		for (unsigned int j = i + 1; j < jail_nr_rules; j++)
			if (jail_rules[j].nr == jail_rules[i].nr)
				assert_int_equal(jail_rules[j - 1].nr, jail_rules[i].nr);
}

static void every_row_has_its_reason(void **state)
{
	char text[16];
	(void)state;

	for (unsigned int i = 0; i < jail_nr_rules; i++) {
		const struct jail_rule *rule = &jail_rules[i];
		const char *name = jail_call_name(rule->nr, text);

		assert_true(rule->kinds && rule->kinds < JAIL_FOR(JAIL_KINDS));
		assert_true(rule->why && rule->why[0]);
		assert_memory_equal(rule->name, name, strlen(name));
	}
	assert_string_equal(jail_call_name(__NR_openat, text), "openat");
	assert_string_equal(jail_call_name(1234, text), "call 1234");
}

// --- A process in the jail -------------------------------------------------------------------

struct fixture {
	char dir[32], run[40], ini[48];
	char report[600]; // what came through the status pipe
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));
	int fd;

	if (!f)
		return -1;
	strcpy(f->dir, "/tmp/mayfly-jail-XXXXXX");
	if (!mkdtemp(f->dir))
		return -1;
	snprintf(f->run, sizeof(f->run), "%s/run", f->dir);
	snprintf(f->ini, sizeof(f->ini), "%s/vm.ini", f->dir);
	fd = open(f->ini, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	if (fd < 0 || mkdir(f->run, 0700) < 0)
		return -1;
	close(fd);
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char path[64];

	snprintf(path, sizeof(path), "%s/new", f->dir);
	unlink(path);
	unlink(f->ini);
	rmdir(f->run);
	rmdir(f->dir);
	free(f);
	return 0;
}

// What a process that jail_enter() has confined exits with, or minus the signal that ended it.
static int in_jail(struct fixture *f, bool writable, int (*body)(int missing))
{
	int p[2], status;
	ssize_t n;
	pid_t pid;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		struct jail_params params = {
			.dir_fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
			.run_fd = open(f->run, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
			.writable = writable,
			.status_fd = p[1],
		};
		struct err err = {0};
		int missing = jail_enter(&params, &err);

		if (missing < 0)
			fprintf(stderr, "%s\n", err.msg);
		_exit(missing < 0 ? 99 : body(missing));
	}
	close(p[1]);
	n = read(p[0], f->report, sizeof(f->report) - 1);
	f->report[n > 0 ? n : 0] = '\0';
	close(p[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static bool refused(int result, int with)
{
	return result < 0 && errno == with;
}

static int look_around(int missing)
{
	struct sockaddr_un abstract = {.sun_family = AF_UNIX, .sun_path = "\0mayfly-jail-test"};
	int sock;

	if (missing & (JAIL_NAMESPACES | JAIL_ROOT))
		return 77;
	if (!refused(open("/etc/passwd", O_RDONLY), ENOENT) ||
		!refused(open("../../../../etc/passwd", O_RDONLY), ENOENT) ||
		!refused(open("/new", O_CREAT | O_WRONLY, 0600), EROFS) ||
		open("/vm.ini", O_WRONLY) >= 0 || unlink("/vm.ini") == 0 ||
		rename("/vm.ini", "/run/vm.ini") == 0 || access("/proc/self", F_OK) == 0)
		return 1;
	if (!(missing & JAIL_LANDLOCK) && open("/vm.ini", O_RDONLY) >= 0)
		return 2;
	if (setuid(12345) == 0 || unshare(CLONE_NEWNET) == 0 || chroot("/run") == 0)
		return 3;
	// Who listens there is in another network namespace.
	sock = socket(AF_UNIX, SOCK_STREAM, 0);
	if (connect(sock, (struct sockaddr *)&abstract, sizeof(abstract)) == 0)
		return 4;
	return prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 ? 0 : 5;
}

static void nothing_is_outside(void **state)
{
	struct sockaddr_un abstract = {.sun_family = AF_UNIX, .sun_path = "\0mayfly-jail-test"};
	int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), r;

#ifdef __SANITIZE_THREAD__
	print_message(
		"skip nothing is outside: a jail has no room for ThreadSanitizer's own thread\n");
	skip();
#endif
	assert_int_equal(bind(sock, (struct sockaddr *)&abstract, sizeof(abstract)), 0);
	assert_int_equal(listen(sock, 1), 0);
	r = in_jail(*state, false, look_around);
	close(sock);
	if (r == 77) {
		puts("skip nothing is outside: no namespaces for this user");
		skip();
	}
	assert_int_equal(r, 0);
}

static int write_there(int missing)
{
	if (missing & (JAIL_NAMESPACES | JAIL_ROOT))
		return 77;
	// Layers of disks are made in the folder, vm.ini says what the next monitor opens.
	if (open("/new", O_CREAT | O_WRONLY, 0600) < 0)
		return 1;
	if (open("/vm.ini", O_WRONLY) >= 0 || unlink("/vm.ini") == 0 ||
		rename("/new", "/vm.ini") == 0 || rename("/vm.ini", "/old") == 0)
		return 2;
	return open("/etc/passwd", O_RDONLY) < 0 ? 0 : 3;
}

static void a_writable_folder_keeps_its_ini(void **state)
{
	int r = in_jail(*state, true, write_there);

	if (r == 77) {
		puts("skip a writable folder keeps its vm.ini: no namespaces for this user");
		skip();
	}
	assert_int_equal(r, 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static int open_one(int missing)
{
	(void)missing;
	if (jail_thread(JAIL_VCPU, NULL) < 0)
		return 1;
	syscall(SYS_openat, 17, "x", O_RDONLY);
	return 2;
}

static int make_executable(int missing)
{
	(void)missing;
	if (jail_thread(JAIL_LOOP, NULL) < 0)
		return 1;
	mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return 2;
}

static int signal_another(int missing)
{
	(void)missing;
	if (jail_thread(JAIL_LOOP, NULL) < 0)
		return 1;
	syscall(SYS_tgkill, getpid(), getpid(), 0);
	syscall(SYS_tgkill, 1, 1, 0);
	return 2;
}

static int allowed_only(int missing)
{
	(void)missing;
	if (jail_thread(JAIL_LOOP, NULL) < 0 || jail_thread(JAIL_SAVE, NULL) < 0)
		return 1;
	free(malloc(1 << 20));
	return write(STDERR_FILENO, "", 0) == 0 ? 0 : 2;
}

static void violations_are_told(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(in_jail(f, false, open_one), 125);
	assert_non_null(
		strstr(f->report, "{\"event\":\"error\",\"message\":\"jail: the vcpu thread "
				  "called openat(0x11, "));
	assert_int_equal(in_jail(f, false, make_executable), 125);
	assert_non_null(strstr(f->report, "the loop thread called mmap(0x0, 0x1000)"));
	assert_int_equal(in_jail(f, false, signal_another), 125);
	assert_non_null(strstr(f->report, "called tgkill(0x1, 0x1)"));
	assert_int_equal(in_jail(f, false, allowed_only), 0);
	assert_string_equal(f->report, "");
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(filters_say_what_the_table_says),
		cmocka_unit_test(nobody_may),
		cmocka_unit_test(rows_of_a_call_stand_together),
		cmocka_unit_test(every_row_has_its_reason),
		cmocka_unit_test_setup_teardown(nothing_is_outside, setup, teardown),
		cmocka_unit_test_setup_teardown(a_writable_folder_keeps_its_ini, setup, teardown),
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
		cmocka_unit_test_setup_teardown(violations_are_told, setup, teardown),
#endif
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
