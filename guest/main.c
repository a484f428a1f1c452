// SPDX-License-Identifier: Apache-2.0
// mayfly-agent: PID 1 of a machine, or a service under another init. The agent's only thread.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#include "guest/agent.h"
#include "guest/boot.h"
#include "guest/files.h"
#include "guest/proto/frame.h"
#include "guest/service.h"
#include "guest/tree.h"
#include "guest/wake.h"
#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define BACKLOG 1024 // they wait here while all sessions are taken

static int listen_for_host(struct err *err)
{
	const struct sockaddr_vm addr = {
		.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = AGENT_PORT};
	CLEANUP_FD int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0 || bind(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0 ||
		listen(fd, BACKLOG) < 0)
		return err_errno(err, -errno, "vsock port %u", AGENT_PORT);
	return TAKE_FD(fd);
}

static int dial_host(uint32_t port)
{
	const struct sockaddr_vm addr = {
		.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = port};
	CLEANUP_FD int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0 && errno != EINPROGRESS)
		return -errno;
	return TAKE_FD(fd);
}

static void announce(struct agent *agent, uint64_t started_ns)
{
	const struct sockaddr_vm addr = {
		.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = AGENT_READY_PORT};
	struct err err = {0};
	int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0 || agent_announce(agent, fd, &addr, sizeof(addr), started_ns, &err) < 0)
		log_line(LOG_INFO, "agent", "%s", fd < 0 ? strerror(errno) : err.msg);
}

static int serve(bool init, uint64_t started_ns, struct err *err)
{
	struct agent_config config = {.etc_dir = "/etc", .dial = dial_host};
	struct agent *agent;
	int rc = init ? boot_root(err) : 0;

	if (rc < 0)
		return rc;
	if (init && boot_hand_over()) {
		wake_prepare("");
		init = false; // a service from here on
	}
	config.listen_fd = listen_for_host(err);
	if (config.listen_fd < 0)
		return config.listen_fd;
	rc = agent_create(&config, &agent, err);
	if (rc < 0)
		return rc;
	// While the host takes the connection, the rest of the machine is made ready. A command
	// that comes early waits for it in the socket and sees nothing half done.
	announce(agent, started_ns);
	if (init) {
		boot_late();
		wake_prepare("");
	}
	tree_pool_init(init ? "/sys/fs/cgroup" : service_cgroup());
	rc = agent_run(agent, err);
	agent_destroy(agent);
	tree_pool_fini();
	if (!init)
		service_leave();
	return rc;
}

int main(int argc, char **argv)
{
	struct err err = {0};
	struct timespec now;
	bool init;
	int rc;

	if (argc > 0 && strcmp(argv[0], FILES_NAME) == 0)
		return files_main(argc, argv);
	init = getpid() == 1;
	clock_gettime(CLOCK_BOOTTIME, &now);
	// The kernel makes "mayfly_debug=1" on its command line a variable of init's environment.
	if (getenv("mayfly_debug"))
		log_set_level(LOG_DEBUG);
	if (init)
		boot_early();
	else
		service_start();
	rc = serve(init, (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec, &err);
	if (rc < 0)
		log_line(LOG_ERROR, "agent", "%s", err.msg);
	if (getpid() == 1) // not if that is another program now
		boot_end();
	if (rc == AGENT_SHUTDOWN)
		service_reboot();
	return rc < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
