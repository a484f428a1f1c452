// SPDX-License-Identifier: Apache-2.0
// mayfly nat: the network of a machine with [net] mode = nat, started by its monitor with a socket
// for the guest's frames. In user, process and network namespaces of its own:
//
//   guest - socket - passt - [ nft's rules in the network namespace ] - pasta - the host's user
//
// so that the rules stand where no packet gets around them, and the host's tables are never
// touched. The first process here (the init of the process namespace) ends when one of the others
// does, and all end with it; passt ends when the monitor does. The keeper gives nft the rules of
// vm.ini, again whenever somebody connects to egress/nat.sock. Each process has one thread.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <jansson.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "egress/address.h"
#include "egress/nat_rules.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"
#include "vmm/config.h"

#define FRAMES_FD 3 // of the guest; passt's
#define BACKLOG   16

struct nat {
	const char *dir, *address, *gateway, *dns, *mtu;
	char ini[PATH_MAX], egress_dir[PATH_MAX];
	struct nat_rules rules;
};

// --- Programs --------------------------------------------------------------------------------

// Runs a program to its end, or until its daemon serves. in_fd and keep_fd: its standard input, and
// what it finds under the same number; or -1.
static int run(char *const *argv, int in_fd, int keep_fd, struct err *err)
{
	char path[64];
	posix_spawn_file_actions_t actions;
	int r, status = 0;
	pid_t pid;

	posix_spawn_file_actions_init(&actions);
	if (in_fd >= 0)
		posix_spawn_file_actions_adddup2(&actions, in_fd, STDIN_FILENO);
	// Onto itself: it is let through.
	if (keep_fd >= 0)
		posix_spawn_file_actions_adddup2(&actions, keep_fd, keep_fd);
	r = posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ);
	// Where only root has it in its PATH.
	snprintf(path, sizeof(path), "/usr/sbin/%s", argv[0]);
	if (r == ENOENT)
		r = posix_spawn(&pid, path, &actions, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	if (r != 0)
		return err_errno(err, -r, "%s", argv[0]);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return err_errno(err, -errno, "%s", argv[0]);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0
		       ? 0
		       : err_set(err, -EIO, "%s has failed", argv[0]);
}

static int start_pasta(const struct nat *nat, int netns_fd, struct err *err)
{
	char netns[32];
	char *argv[] = {"pasta", "-q", "-4", "--runas", "0", "--netns-only", "--netns", netns,
		"--config-net", "--no-map-gw", "-t", "none", "-u", "none", "-T", "none", "-U",
		"none", "--dns-forward", (char *)(uintptr_t)nat->dns, NULL};

	snprintf(netns, sizeof(netns), "/proc/self/fd/%d", netns_fd);
	return run(argv, -1, netns_fd, err);
}

static int start_passt(const struct nat *nat, struct err *err)
{
	const char *slash = strchr(nat->address, '/');
	char address[32];
	char *argv[] = {"passt", "-q", "-4", "--runas", "0", "-F", "3", "-t", "none", "-u", "none",
		"--no-map-gw", "-a", address, "-n", (char *)(uintptr_t)(slash + 1), "-g",
		(char *)(uintptr_t)nat->gateway, "-m", (char *)(uintptr_t)nat->mtu, NULL};

	snprintf(address, sizeof(address), "%.*s", (int)(slash - nat->address), nat->address);
	return run(argv, -1, FRAMES_FD, err);
}

// --- Rules -----------------------------------------------------------------------------------

// What cannot be read lets nothing through, and is told in *ret_bad.
static int apply(struct nat *nat, struct err *ret_bad, struct err *err)
{
	static char text[NAT_RULES_BYTES];
	static struct config config; // it is large
	char *argv[] = {"nft", "-f", "-", NULL};
	CLEANUP_FD int fd = memfd_create("rules", MFD_CLOEXEC);
	int r;

	if (config_read(nat->ini, &config, ret_bad) < 0)
		config_defaults(&config);
	nat->rules.open = config.net.mode == CONFIG_NET_NAT;
	nat->rules.named = &config.allow;
	r = nat_rules_print(&nat->rules, text, err);
	if (r < 0)
		return r;
	if (fd < 0 || fd_write_all(fd, text, strlen(text)) < 0 || lseek(fd, 0, SEEK_SET) < 0)
		return err_errno(err, -errno, "the rules of the network");
	r = run(argv, fd, -1, err);
	if (r == -ENOENT)
		return err_set(err, r, "nft is not installed: apt-get install nftables");
	return r;
}

// A negative errno if other rules hold than those that vm.ini asks for.
static int answer(struct nat *nat, int control_fd)
{
	CLEANUP_FD int fd = accept4(control_fd, NULL, NULL, SOCK_CLOEXEC);
	struct err err = {0}, failed = {0};
	json_t *json;
	char *text;
	int r;

	if (fd < 0)
		return 0;
	r = apply(nat, &err, &failed);
	if (r < 0)
		err = failed;
	json = err.code ? json_pack("{s:s}", "error", err.msg) : json_pack("{s:i}", "cut", 0);
	text = json_dumps(json, JSON_COMPACT);
	if (text)
		(void)send(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
	free(text);
	json_decref(json);
	return r;
}

// --- The processes ---------------------------------------------------------------------------

// A string with its end: the other side may have the pipe open still.
static void report(int fd, const struct err *err)
{
	(void)!write(fd, err->code ? err->msg : "", err->code ? strlen(err->msg) + 1 : 1);
}

// What is said from now on is nobody's to hear.
static void fall_silent(void)
{
	const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	dup2(fd, STDERR_FILENO);
}

// Rules first: there is no moment without. Then it tells its namespace, and goes on when pasta is
// there. It never returns.
static _Noreturn void keeper_main(struct nat *nat, int tell_fd, int go_fd, int status_fd)
{
	CLEANUP_FD int control_fd = -1;
	struct err err = {0}, bad = {0};
	int netns_fd = -1, r = 0;
	char c;

	prctl(PR_SET_NAME, "mayfly-nat");
	if (unshare(CLONE_NEWNET) < 0)
		r = err_errno(&err, -errno, "a network namespace");
	if (r == 0)
		r = apply(nat, &bad, &err);
	if (r == 0)
		netns_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	if (r == 0 && netns_fd < 0)
		r = err_errno(&err, -errno, "/proc/self/ns/net");
	// The descriptor is the init's, too; what is opened from now on is not.
	if (r == 0 && (write(tell_fd, &netns_fd, sizeof(netns_fd)) != sizeof(netns_fd) ||
			      read(go_fd, &c, 1) != 1 || unshare(CLONE_FILES) < 0))
		r = err_set(&err, -EPIPE, "the network ends");
	if (r == 0)
		r = start_passt(nat, &err);
	if (r == 0 && mkdir(nat->egress_dir, 0700) < 0 && errno != EEXIST)
		r = err_errno(&err, -errno, "%s", nat->egress_dir);
	if (r == 0)
		r = control_fd = unix_listen(nat->egress_dir, NAT_SOCKET, BACKLOG, &err);
	if (r >= 0) {
		close(FRAMES_FD);
		fall_silent();
		err.code = 0;
	}
	report(status_fd, &err);
	close(status_fd);
	// Rather none than others: with us all of it ends.
	while (r >= 0)
		r = answer(nat, control_fd);
	_exit(EXIT_FAILED);
}

static _Noreturn void init_main(struct nat *nat, int status_fd)
{
	int told[2], go[2], netns_fd, r;
	struct err err = {0};
	pid_t keeper;

	setsid();
	prctl(PR_SET_NAME, "mayfly-nat");
	// Until all are there: whoever started us may give up on one that hangs.
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (pipe2(told, O_CLOEXEC) < 0 || pipe2(go, O_CLOEXEC) < 0)
		_exit(EXIT_FAILED);
	// As fork(), but that it has one table of descriptors with us.
	keeper = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
	if (keeper == 0)
		keeper_main(nat, told[1], go[0], status_fd);
	// If it fails it reports it itself, and ends.
	for (;;) {
		struct pollfd p = {.fd = told[0], .events = POLLIN};

		if (poll(&p, 1, 20) > 0)
			break;
		if (waitpid(keeper, NULL, WNOHANG) != 0)
			_exit(EXIT_FAILED);
	}
	if (read(told[0], &netns_fd, sizeof(netns_fd)) != sizeof(netns_fd))
		_exit(EXIT_FAILED);
	r = start_pasta(nat, netns_fd, &err);
	if (r == -ENOENT)
		err_set(&err, r, "pasta is not installed: apt-get install passt");
	if (r < 0) {
		report(status_fd, &err);
		_exit(EXIT_FAILED);
	}
	prctl(PR_SET_PDEATHSIG, 0);
	(void)!write(go[1], "", 1);
	// One that ends is the end of all: pasta, passt, the keeper.
	fall_silent();
	while (waitpid(-1, NULL, 0) < 0 && errno == EINTR)
		;
	_exit(0);
}

static int write_file(const char *path, const char *text, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		return err_errno(err, -errno, "%s", path);
	return 0;
}

static int enter(struct err *err)
{
	const unsigned int uid = geteuid(), gid = getegid();
	char text[64];
	int r;

	if (unshare(CLONE_NEWUSER | CLONE_NEWPID) < 0)
		return err_errno(err, -errno, "user and process namespaces (mayfly doctor)");
	snprintf(text, sizeof(text), "0 %u 1", uid);
	r = write_file("/proc/self/uid_map", text, err);
	if (r == 0)
		r = write_file("/proc/self/setgroups", "deny", err);
	snprintf(text, sizeof(text), "0 %u 1", gid);
	return r < 0 ? r : write_file("/proc/self/gid_map", text, err);
}

// A host's services are not for its guests, on whatever address they listen.
static int find_hosts(struct nat_rules *rules, struct err *err)
{
	struct ifaddrs *all;

	if (getifaddrs(&all) < 0)
		return err_errno(err, -errno, "the host's addresses");
	for (const struct ifaddrs *at = all; at; at = at->ifa_next) {
		struct address address = {.family = AF_INET};

		if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET)
			continue;
		address.v4 = ((const struct sockaddr_in *)(const void *)at->ifa_addr)->sin_addr;
		// Those that are not public are refused in any case.
		if (!address_not_public(&address) && rules->nr_hosts < NAT_HOSTS_MAX)
			rules->hosts[rules->nr_hosts++] = address.v4;
	}
	freeifaddrs(all);
	return rules->nr_hosts < NAT_HOSTS_MAX
		       ? 0
		       : err_set(err, -E2BIG, "the host has more than %u addresses",
				 NAT_HOSTS_MAX - 1);
}

static int prepare(struct nat *nat, struct err *err)
{
	int r = egress_dir(nat->dir, nat->egress_dir, err);

	if (r == 0 && snprintf(nat->ini, sizeof(nat->ini), "%s/vm.ini", nat->dir) >=
			      (int)sizeof(nat->ini))
		r = err_errno(err, -ENAMETOOLONG, "%s", nat->dir);
	if (r == 0 &&
		(inet_pton(AF_INET, nat->dns, &nat->rules.dns) != 1 || !strchr(nat->address, '/')))
		r = err_set(err, -EINVAL, "an address and a resolver are needed");
	if (r == 0 && fcntl(FRAMES_FD, F_SETFD, FD_CLOEXEC) < 0)
		r = err_errno(err, -errno, "the socket for frames");
	if (r == 0)
		r = find_hosts(&nat->rules, err);
	return r < 0 ? r : enter(err);
}

int nat_main(int argc, char **argv)
{
	static struct nat nat;
	struct err err = {0};
	char words[512] = "it ended without a word", text[512];
	size_t len = 0;
	ssize_t n;
	int p[2] = {-1, -1}, r;
	pid_t pid;

	if (argc != 7 || strcmp(argv[1], "--") != 0) {
		fputs("mayfly nat: started by a machine's monitor\n", stderr);
		return EXIT_USAGE;
	}
	nat.dir = argv[2];
	nat.address = argv[3];
	nat.gateway = argv[4];
	nat.dns = argv[5];
	nat.mtu = argv[6];
	r = prepare(&nat, &err);
	if (r == 0 && pipe2(p, O_CLOEXEC) < 0)
		r = err_errno(&err, -errno, "pipe");
	if (r < 0)
		return cli_fail("nat", &err);
	pid = fork();
	if (pid == 0) {
		close(p[0]);
		init_main(&nat, p[1]);
	}
	close(p[1]);
	while (pid > 0 && len < sizeof(words) - 1 && (len == 0 || text[len - 1] != '\0') &&
		(n = read(p[0], text + len, sizeof(words) - 1 - len)) > 0)
		len += (size_t)n;
	text[len] = '\0';
	if (len == 0 || text[0]) {
		if (len)
			memcpy(words, text, len + 1);
		fprintf(stderr, "mayfly nat: %s\n", words);
		return EXIT_FAILED;
	}
	return 0;
}
