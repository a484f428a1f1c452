// SPDX-License-Identifier: Apache-2.0
// mayfly doctor: what this host can do, found out by trying. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/confinement.h"
#include "cli/home.h"
#include "cli/report.h"
#include "vmm/base/fd.h"
#include "vmm/cgroup.h"
#include "vmm/kvm.h"
#include "vmm/loop.h"
#include "vmm/vcpu.h"

#define MEMORY_WANTED_KIB (256 * KIB)
#define DISK_WANTED_BYTES (256 * MIB)

static void no_stop(void *opaque, unsigned int id, enum vcpu_stop why, const struct err *err)
{
	(void)opaque;
	(void)id;
	(void)why;
	(void)err;
}

// Makes a VM with a vCPU, which tells what kind of host this is.
static int try_vm(struct kvm *kvm, bool *ret_emulated, struct err *err)
{
	struct vcpu_env env = {.kvm = kvm, .nr_vcpus = 1, .stopped = no_stop};
	struct vcpu *vcpu = NULL;
	int r = kvm_create_vm(kvm, err);

	if (r < 0)
		return r;
	r = vcpu_env_init(&env, err);
	if (r < 0)
		return r;
	r = vcpu_create(&vcpu, &env, 0, err);
	if (r == 0)
		*ret_emulated = env.emulated_ring0;
	vcpu_destroy(vcpu);
	vcpu_env_fini(&env);
	return r;
}

static void check_kvm(struct report *report)
{
	struct kvm kvm;
	struct err err = {0};
	bool emulated = false;

	if (kvm_open(&kvm, "/dev/kvm", &err) < 0) {
		report->host_kind = "none";
		report_add(report, "kvm", MISSING,
			"see above; without KVM only the lab of the source tree can run guests "
			"(`make demo` uses it), in software and slowly",
			"%s", err.msg);
		return;
	}
	if (try_vm(&kvm, &emulated, &err) < 0) {
		report->host_kind = "unknown";
		report_add(report, "kvm", MISSING,
			"another hypervisor may hold the processor's VT-x or SVM",
			"a VM cannot be made: %s", err.msg);
	} else if (emulated) {
		report->host_kind = "emulated ring 0";
		report_add(report, "kvm", WEAK,
			"guests start in seconds, not milliseconds: prefer snapshots of warmed "
			"ones",
			"works; guest kernel code is interpreted here, guest programs run "
			"natively");
	} else {
		report->host_kind = "hardware";
		report_add(report, "kvm", GOOD, NULL,
			"works, on hardware virtualization; at most %u vCPUs", kvm.max_vcpus);
	}
	kvm_close(&kvm);
}

static void check_io_uring(struct report *report)
{
	struct loop loop = {0};
	struct err err = {0};

	if (loop_init(&loop, &err) < 0)
		report_add(report, "io_uring", MISSING,
			"sysctl kernel.io_uring_disabled=0; in a container, allow it in the "
			"seccomp "
			"profile",
			"%s", err.msg);
	else
		report_add(report, "io_uring", GOOD, NULL, "works");
	loop_fini(&loop);
}

static void check_userfaultfd(struct report *report)
{
	CLEANUP_FD int dev_fd = -1;
	CLEANUP_FD int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0) {
		dev_fd = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
#ifdef USERFAULTFD_IOC_NEW
		if (dev_fd >= 0)
			fd = ioctl(dev_fd, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
#endif
	}
	if (fd < 0)
		report_add(report, "userfaultfd", WEAK,
			"sysctl vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd",
			"not for this user: restores are not lazy");
	else
		report_add(report, "userfaultfd", GOOD, NULL, "works");
}

static void check_memory(struct report *report)
{
	CLEANUP_FREE char *text = NULL;
	struct err err = {0};
	unsigned long long kib;
	const char *at;
	size_t len;

	if (fd_read_file("/proc/meminfo", 65536, &text, &len, &err) < 0 ||
		!(at = strstr(text, "MemAvailable:"))) {
		report_add(report, "memory", WEAK, NULL, "cannot tell how much is free");
		return;
	}
	kib = strtoull(at + strlen("MemAvailable:"), NULL, 10);
	if (kib < MEMORY_WANTED_KIB)
		report_add(report, "memory", MISSING,
			"end other programs, or give the machine more",
			"%llu MiB available, a guest wants %llu", kib / KIB,
			(unsigned long long)MEMORY_WANTED_KIB / KIB);
	else
		report_add(report, "memory", GOOD, NULL, "%llu MiB available", kib / KIB);
}

static void check_kernel(struct report *report)
{
	char path[PATH_MAX];
	struct err err = {0};

	if (home_find_kernel(path, &err) < 0)
		report_add(report, "guest kernel", MISSING, "make kernel", "%s", err.msg);
	else if (access(path, R_OK) < 0)
		report_add(report, "guest kernel", MISSING, "make kernel, or correct MAYFLY_KERNEL",
			"%s: %s", path, strerror(errno));
	else
		report_add(report, "guest kernel", GOOD, NULL, "%s", path);
}

static void check_home(struct report *report)
{
	char dir[PATH_MAX];
	CLEANUP_FD int lock_fd = -1;
	struct err err = {0};
	struct statvfs fs;

	if (home_make_throwaway(dir, &lock_fd, &err) < 0) {
		report_add(report, "home", MISSING, "set MAYFLY_HOME to a folder of yours", "%s",
			err.msg);
		return;
	}
	if (statvfs(dir, &fs) == 0 && (uint64_t)fs.f_bavail * fs.f_frsize < DISK_WANTED_BYTES)
		report_add(report, "home", WEAK, "make room, or set MAYFLY_HOME to another disk",
			"%.*s: only %llu MiB free", (int)(strrchr(dir, '/') - dir), dir,
			(unsigned long long)(fs.f_bavail * fs.f_frsize / MIB));
	else
		report_add(report, "home", GOOD, NULL, "%.*s", (int)(strrchr(dir, '/') - dir), dir);
	home_remove(dir, NULL);
}

static void check_tun(struct report *report)
{
	CLEANUP_FD int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		report_add(report, "tun", WEAK, "modprobe tun; tap networks need root besides",
			"/dev/net/tun: %s: no network cards for guests", strerror(errno));
	else
		report_add(report, "tun", GOOD, NULL, "works");
}

static void check_limits(struct report *report)
{
	char base[PATH_MAX];
	struct err err = {0};

	if (cgroup_base(base, &err) < 0)
		report_add(report, "limits", WEAK,
			"systemd.unified_cgroup_hierarchy=1 on this host's kernel command line",
			"cgroup v2 is not at /sys/fs/cgroup: no --limit");
	else
		report_add(
			report, "limits", GOOD, NULL, "cgroup v2; groups of machines in %s", base);
}

static int usage(FILE *out, int status)
{
	fputs("Usage: mayfly doctor [--json]\n"
	      "       mayfly doctor --vm NAME [--json]\n"
	      "       mayfly doctor --calls [--json]\n"
	      "\n"
	      "Tries what mayfly needs of this host and says what is missing and how to mend it.\n"
	      "\n"
	      "  --vm NAME  how the monitor of a running machine is confined, as the kernel says "
	      "it "
	      "is\n"
	      "  --calls    the system calls that a monitor may make, which of its threads, and "
	      "why\n"
	      "\n"
	      "Exit status: 0 if machines can run here, or the machine is confined; 1 if "
	      "something\n"
	      "that they need, or a piece of the confinement that every host has, is missing.\n",
		out);
	return status;
}

static int look_at_machine(const char *name, bool json)
{
	struct report report = {.good = "confined", .bad = "Not confined as it should be."};
	char dir[PATH_MAX];
	struct err err = {0};
	pid_t pid = 0;
	int r = home_find(name, dir, &err);

	if (r == 0)
		r = home_running(dir, &pid, &err);
	if (r == 0)
		r = err_set(&err, -ESRCH, "'%s' is not running (mayfly up %s)", name, name);
	if (r > 0)
		r = confinement_look(&report, pid, dir, &err);
	return r < 0 ? cli_fail("doctor", &err) : report_print(&report, json);
}

int doctor_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"vm", required_argument, NULL, 'v'},
		{"calls", no_argument, NULL, 'c'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct report report = {0};
	bool json = false, calls = false;
	const char *vm = NULL;
	char good[128], bad[128];
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (opt) {
		case 'j':
			json = true;
			break;
		case 'v':
			vm = optarg;
			break;
		case 'c':
			calls = true;
			break;
		case 'h':
			return usage(stdout, 0);
		default:
			return usage(stderr, EXIT_USAGE);
		}
	}
	if (optind != argc || (vm && calls))
		return usage(stderr, EXIT_USAGE);
	if (vm)
		return look_at_machine(vm, json);
	if (calls) {
		confinement_calls(json);
		return 0;
	}
	check_kvm(&report);
	check_io_uring(&report);
	check_userfaultfd(&report);
	check_memory(&report);
	check_kernel(&report);
	check_home(&report);
	check_tun(&report);
	check_limits(&report);
	confinement_try(&report);
	snprintf(good, sizeof(good), "host: %s. mayfly can run machines here.", report.host_kind);
	snprintf(bad, sizeof(bad), "host: %s. Something that mayfly needs is missing.",
		report.host_kind);
	report.good = good;
	report.bad = bad;
	return report_print(&report, json);
}
