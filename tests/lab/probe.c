// SPDX-License-Identifier: Apache-2.0
/*
 * What the lab's machine (L1) owes to the tests: each line of its output names a feature, and says
 * "ok" or what failed. Runs in L1 only, as `lab selftest`; one thread but for the userfaultfd
 * check. Exit code: 1 if any failed.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/io_uring.h>
#include <linux/kvm.h>
#include <linux/landlock.h>
#include <linux/loop.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <linux/sockios.h>
#include <linux/userfaultfd.h>
#include <linux/vhost.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const size_t PAGE_BYTES = 4096, GUEST_BYTES = 65536, CODE_GPA = 4096;

static char why[200];

// Every check returns true, or false after saying why not.
__attribute__((format(printf, 1, 2))) static bool no(const char *fmt, ...)
{
	int error = errno, n;
	va_list ap;

	va_start(ap, fmt);
	n = vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	if (n > 0 && (size_t)n < sizeof(why) && error)
		snprintf(why + n, sizeof(why) - (size_t)n, ": %s", strerror(error));
	return false;
}

static bool file_says(const char *path, const char *expected)
{
	char text[300] = "";
	FILE *f = fopen(path, "re");

	if (!f || !fgets(text, sizeof(text), f))
		return no("read %s", path);
	fclose(f);
	text[strcspn(text, "\n")] = 0;
	errno = 0;
	return !strcmp(text, expected) || no("%s is %s, not %s", path, text, expected);
}

static bool file_write(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	bool good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (!good)
		no("write %s", path);
	if (fd >= 0)
		close(fd);
	return good;
}

// A real-mode guest writes 6 * 7 to a port and halts, on nested paging.
static bool check_kvm(void)
{
	static const uint8_t code[] = {
		0xb0, 6, // mov $6, %al
		0xb3, 7, // mov $7, %bl
		0xf6, 0xe3, // mul %bl
		0xe6, 0x10, // out %al, $0x10
		0xf4, // hlt
	};
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm, vcpu, run_bytes;
	struct kvm_userspace_memory_region region = {.memory_size = GUEST_BYTES};
	struct kvm_regs regs = {.rip = CODE_GPA, .rflags = 2};
	struct kvm_sregs sregs;
	struct kvm_run *run;
	uint8_t *memory, got;

	if (kvm < 0)
		return no("open /dev/kvm");
	if (ioctl(kvm, KVM_GET_API_VERSION, 0) != KVM_API_VERSION)
		return no("KVM_GET_API_VERSION");
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	run_bytes = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	memory = mmap(
		NULL, GUEST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (vm < 0 || run_bytes < 0 || memory == MAP_FAILED)
		return no("KVM_CREATE_VM");
	memcpy(memory + CODE_GPA, code, sizeof(code));
	region.userspace_addr = (uintptr_t)memory;
	if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region))
		return no("KVM_SET_USER_MEMORY_REGION");
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	run = vcpu < 0 ? MAP_FAILED
		       : mmap(NULL, (size_t)run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	if (run == MAP_FAILED || ioctl(vcpu, KVM_GET_SREGS, &sregs))
		return no("KVM_CREATE_VCPU");
	sregs.cs.base = 0;
	sregs.cs.selector = 0;
	if (ioctl(vcpu, KVM_SET_SREGS, &sregs) || ioctl(vcpu, KVM_SET_REGS, &regs))
		return no("KVM_SET_REGS");
	if (ioctl(vcpu, KVM_RUN, 0))
		return no("KVM_RUN");
	errno = 0;
	if (run->exit_reason != KVM_EXIT_IO || run->io.port != 0x10)
		return no("exit %u instead of I/O", run->exit_reason);
	memcpy(&got, (uint8_t *)run + run->io.data_offset, 1);
	if (got != 42)
		return no("6 * 7 is %u", got);
	if (ioctl(vcpu, KVM_RUN, 0))
		return no("KVM_RUN");
	return run->exit_reason == KVM_EXIT_HLT || no("exit %u instead of HLT", run->exit_reason);
}

static bool check_kvm_capabilities(void)
{
	static const struct {
		int number;
		const char *name;
	} caps[] = {{KVM_CAP_IRQCHIP, "IRQCHIP"}, {KVM_CAP_IRQFD, "IRQFD"},
		{KVM_CAP_IOEVENTFD, "IOEVENTFD"}, {KVM_CAP_IMMEDIATE_EXIT, "IMMEDIATE_EXIT"},
		{KVM_CAP_SYNC_REGS, "SYNC_REGS"}, {KVM_CAP_DIRTY_LOG_RING, "DIRTY_LOG_RING"},
		{KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, "MANUAL_DIRTY_LOG_PROTECT2"}};
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);

	if (kvm < 0)
		return no("open /dev/kvm");
	errno = 0;
	for (size_t i = 0; i < sizeof(caps) / sizeof(*caps); i++)
		if (ioctl(kvm, KVM_CHECK_EXTENSION, caps[i].number) <= 0)
			return no("no KVM_CAP_%s", caps[i].name);
	close(kvm);
	return true;
}

static bool check_npt(void)
{
	return file_says("/sys/module/kvm_amd/parameters/npt", "Y");
}

static uint8_t touched;

static void *touch(void *page)
{
	touched = *(volatile uint8_t *)page;
	return NULL;
}

// A thread touches a page that is not there; this one serves its fault.
static bool check_userfaultfd(void)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register reg = {.mode = UFFDIO_REGISTER_MODE_MISSING};
	struct uffdio_copy copy = {.len = PAGE_BYTES};
	struct uffd_msg msg;
	pthread_t thread;
	uint8_t *pages;

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
		return no("userfaultfd");
	pages = mmap(
		NULL, 2 * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == MAP_FAILED)
		return no("mmap");
	pages[PAGE_BYTES] = 42;
	reg.range = (struct uffdio_range){.start = (uintptr_t)pages, .len = PAGE_BYTES};
	copy.dst = (uintptr_t)pages;
	copy.src = (uintptr_t)pages + PAGE_BYTES;
	if (ioctl(fd, UFFDIO_REGISTER, &reg))
		return no("UFFDIO_REGISTER");
	if (pthread_create(&thread, NULL, touch, pages))
		return no("pthread_create");
	if (read(fd, &msg, sizeof(msg)) != sizeof(msg) || ioctl(fd, UFFDIO_COPY, &copy))
		return no("UFFDIO_COPY");
	pthread_join(thread, NULL);
	return touched == 42 || no("read %u through a fault", touched);
}

static bool check_io_uring(void)
{
	struct io_uring_params params = {0};
	int fd = (int)syscall(SYS_io_uring_setup, 8, &params);

	if (fd < 0)
		return no("io_uring_setup");
	close(fd);
	return true;
}

static bool check_tap(void)
{
	struct ifreq ifr = {.ifr_name = "probe%d", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
	int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC);

	if (fd < 0 || ioctl(fd, TUNSETIFF, &ifr))
		return no("TUNSETIFF");
	close(fd);
	return true;
}

static bool check_bridge(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCBRADDBR, "probebr") || ioctl(fd, SIOCBRDELBR, "probebr"))
		return no("SIOCBRADDBR");
	close(fd);
	return true;
}

static bool check_nftables(void)
{
	struct {
		struct nlmsghdr nl;
		struct nfgenmsg nf;
	} request = {.nl = {.nlmsg_len = sizeof(request),
			     .nlmsg_type = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN,
			     .nlmsg_flags = NLM_F_REQUEST}};
	union {
		struct nlmsghdr nl;
		char bytes[1024];
	} reply;
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);

	if (fd < 0 || send(fd, &request, sizeof(request), 0) < 0 ||
		recv(fd, &reply, sizeof(reply), 0) < (ssize_t)sizeof(reply.nl))
		return no("netlink");
	close(fd);
	errno = 0;
	return reply.nl.nlmsg_type == (NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWGEN) ||
	       no("answer of type %#x", reply.nl.nlmsg_type);
}

static bool check_vhost_vsock(void)
{
	int fd = open("/dev/vhost-vsock", O_RDWR | O_CLOEXEC);
	uint64_t cid = 1234;

	if (fd < 0 || ioctl(fd, VHOST_SET_OWNER, 0) || ioctl(fd, VHOST_VSOCK_SET_GUEST_CID, &cid))
		return no("/dev/vhost-vsock");
	close(fd);
	return true;
}

static bool check_landlock(void)
{
	long abi = syscall(
		SYS_landlock_create_ruleset, NULL, 0, (unsigned)LANDLOCK_CREATE_RULESET_VERSION);

	return abi >= 2 || no("ABI %ld", abi);
}

static bool check_seccomp(void)
{
	uint32_t action = SECCOMP_RET_KILL_PROCESS;

	return !syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) || no("seccomp");
}

static bool check_namespaces(void)
{
	int wstatus;
	pid_t pid = fork();

	if (pid == 0)
		_exit(unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID) ? errno
											 : 0);
	if (pid < 0 || waitpid(pid, &wstatus, 0) != pid)
		return no("fork");
	errno = WEXITSTATUS(wstatus);
	return wstatus == 0 || no("unshare");
}

// A group of its own with limits, entered by a child, then killed as a whole.
static bool check_cgroup(void)
{
#define GROUP "/sys/fs/cgroup/probe"
	int wstatus;
	pid_t pid;

	if (!file_write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu +memory +pids"))
		return false;
	if (mkdir(GROUP, 0755) && errno != EEXIST)
		return no("mkdir " GROUP);
	if (!file_write(GROUP "/memory.max", "64M") || !file_write(GROUP "/pids.max", "10") ||
		!file_write(GROUP "/cpu.max", "50000 100000"))
		return false;
	pid = fork();
	if (pid == 0) {
		if (!file_write(GROUP "/cgroup.procs", "0"))
			_exit(1);
		kill(getpid(), SIGSTOP);
		_exit(0);
	}
	if (pid < 0 || waitpid(pid, &wstatus, WUNTRACED) != pid || !WIFSTOPPED(wstatus))
		return no("enter " GROUP);
	if (!file_write(GROUP "/cgroup.kill", "1"))
		return false;
	if (waitpid(pid, &wstatus, 0) != pid || !WIFSIGNALED(wstatus))
		return no("cgroup.kill");
	return !rmdir(GROUP) || no("rmdir " GROUP);
}

static bool check_loop_and_ext4(void)
{
	int fd = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
	char line[100];
	FILE *f;

	if (fd < 0 || ioctl(fd, LOOP_CTL_GET_FREE, 0) < 0)
		return no("LOOP_CTL_GET_FREE");
	close(fd);
	f = fopen("/proc/filesystems", "re");
	while (f && fgets(line, sizeof(line), f)) {
		if (strcmp(line, "\text4\n") != 0)
			continue;
		fclose(f);
		return true;
	}
	return no("no ext4 in /proc/filesystems");
}

static bool check_files(void)
{
	// The first vanishes with this command, the second reaches the host.
	return file_write("/usr/probe", "x") && file_write("/lab/probe", "x") &&
	       !unlink("/lab/probe");
}

int main(void)
{
	static const struct {
		const char *name;
		bool (*run)(void);
	} checks[] = {
		{"kvm runs a guest", check_kvm},
		{"kvm capabilities", check_kvm_capabilities},
		{"nested paging", check_npt},
		{"userfaultfd", check_userfaultfd},
		{"io_uring", check_io_uring},
		{"tap", check_tap},
		{"bridge", check_bridge},
		{"nftables", check_nftables},
		{"vhost-vsock", check_vhost_vsock},
		{"landlock", check_landlock},
		{"seccomp", check_seccomp},
		{"namespaces", check_namespaces},
		{"cgroup v2", check_cgroup},
		{"loop and ext4", check_loop_and_ext4},
		{"overlay and share", check_files},
	};
	int failed = 0;

	for (size_t i = 0; i < sizeof(checks) / sizeof(*checks); i++) {
		bool good = checks[i].run();

		failed += !good;
		printf("%-18s %s\n", checks[i].name, good ? "ok" : why);
		fflush(stdout);
	}
	return failed > 0;
}
