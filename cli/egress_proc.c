// SPDX-License-Identifier: Apache-2.0
// The keeper from outside; see the header. One thread.
#include "cli/egress_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/lock.h"
#include "vmm/base/unix_sock.h"
#include "vmm/config.h"

#define START_NS  240000000000ULL
#define RELOAD_NS 120000000000ULL
#define STATUS_FD 3 // in the child

int egress_dir(const char *dir, char ret[PATH_MAX], struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/" EGRESS_DIR, dir) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

static int lock_path(const char *dir, char ret[PATH_MAX], struct err *err)
{
	if (snprintf(ret, PATH_MAX, "%s/" EGRESS_DIR "/" EGRESS_LOCK, dir) >= PATH_MAX)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

// --- Starting --------------------------------------------------------------------------------

// Of the environment it gets no more than this: it lives long, and there may be secrets in it.
static const char *const kept_vars[] = {"MAYFLY_HOME", "XDG_STATE_HOME", "HOME", "SSL_CERT_FILE"};

static bool is_kept(const char *var)
{
	for (size_t i = 0; i < ARRAY_SIZE(kept_vars); i++)
		if (!strncmp(var, kept_vars[i], strlen(kept_vars[i])) &&
			var[strlen(kept_vars[i])] == '=')
			return true;
	return false;
}

static int spawn(const char *dir, int status_fd)
{
	char *const argv[] = {"mayfly", "egress", "--", (char *)(uintptr_t)dir, NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	char log[PATH_MAX], *envp[ARRAY_SIZE(kept_vars) + 1];
	size_t vars = 0;
	sigset_t set;
	pid_t pid;
	int r;

	for (char **at = environ; *at && vars < ARRAY_SIZE(kept_vars); at++)
		if (is_kept(*at))
			envp[vars++] = *at;
	envp[vars] = NULL;

	if (snprintf(log, sizeof(log), "%s/egress.log", dir) >= (int)sizeof(log))
		return -ENAMETOOLONG;
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, status_fd, STATUS_FD);
	posix_spawn_file_actions_addopen(
		&actions, STDERR_FILENO, log, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
	posix_spawn_file_actions_addclosefrom_np(&actions, STATUS_FD + 1);
	sigemptyset(&set);
	posix_spawnattr_setsigmask(&attr, &set);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
	// It makes the keeper, and ends.
	r = posix_spawn(&pid, "/proc/self/exe", &actions, &attr, argv, envp);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	while (r == 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return -r;
}

// What it says before it lets go of the pipe, or of its time.
static int hear(int fd, char *ret, size_t size)
{
	const uint64_t deadline_ns = now_ns() + START_NS;
	size_t len = 0;
	ssize_t n = 1;

	while (n != 0 && len < size - 1) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		const uint64_t now = now_ns();

		if (now >= deadline_ns)
			return -ETIMEDOUT;
		if (poll(&p, 1, (int)((deadline_ns - now) / 1000000) + 1) <= 0)
			continue;
		n = read(fd, ret + len, size - 1 - len);
		if (n < 0 && errno != EINTR)
			return -errno;
		len += n > 0 ? (size_t)n : 0;
	}
	ret[len] = '\0';
	return 0;
}

static int read_config(const char *dir, struct config *ret, struct err *err)
{
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return config_read(path, ret, err);
}

int egress_start(const char *dir, struct err *err)
{
	CLEANUP_FD int read_fd = -1;
	CLEANUP_FD int write_fd = -1;
	struct config config = {0};
	char words[512];
	int p[2], r = read_config(dir, &config, err);

	if (r < 0 || config.net.mode != CONFIG_NET_ALLOWLIST)
		return r;
	if (pipe2(p, O_CLOEXEC) < 0)
		return err_errno(err, -errno, "pipe");
	read_fd = p[0];
	// Above what the child finds it as.
	write_fd = fcntl(p[1], F_DUPFD_CLOEXEC, 10);
	fd_close(&p[1]);
	if (write_fd < 0)
		return err_errno(err, -errno, "pipe");
	r = spawn(dir, write_fd);
	if (r < 0)
		return err_errno(err, r, "starting the proxy");
	fd_close(&write_fd);
	r = hear(read_fd, words, sizeof(words));
	if (r == 0 && !strcmp(words, EGRESS_READY))
		return 0;
	(void)egress_end(dir, NULL);
	if (r < 0)
		return err_errno(err, r, "the machine's proxy");
	return err_set(err, -EIO, "the machine's proxy does not start: %s",
		words[0] ? words : "it ended without a word");
}

// --- A running one ---------------------------------------------------------------------------

int egress_running(const char *dir, struct err *err)
{
	char path[PATH_MAX];
	int r = lock_path(dir, path, err);

	if (r == 0) {
		r = lock_held(path, NULL);
		if (r < 0)
			err_errno(err, r, "%s", path);
	}
	return r;
}

static int reload(const char *dir, const char *name, unsigned int *ret_cut, struct err *err)
{
	const struct timeval limit = {.tv_sec = (time_t)(RELOAD_NS / 1000000000)};
	CLEANUP_FD int fd = -1;
	char path[PATH_MAX], answer[512];
	const char *why;
	json_t *json;
	ssize_t n;
	int r = egress_dir(dir, path, err);

	if (r < 0)
		return r;
	fd = unix_connect(path, name, err);
	if (fd == -ENOENT || fd == -ECONNREFUSED)
		return err_set(err, -ESRCH, "the machine's proxy does not run");
	if (fd < 0)
		return fd;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	n = fd_read_full(fd, answer, sizeof(answer) - 1);
	if (n < 0)
		return err_errno(err, (int)n, "%s/%s", path, name);
	json = json_loadb(answer, (size_t)n, 0, NULL);
	why = json_string_value(json_object_get(json, "error"));
	if (!json || why)
		r = err_set(err, -EIO, "the machine's proxy: %s", why ? why : "it ended");
	else
		*ret_cut = (unsigned int)json_integer_value(json_object_get(json, "cut"));
	json_decref(json);
	return r;
}

int egress_reload(const char *dir, unsigned int *ret_cut, struct err *err)
{
	return reload(dir, EGRESS_SOCKET, ret_cut, err);
}

int nat_reload(const char *dir, struct err *err)
{
	unsigned int cut;
	int r = reload(dir, NAT_SOCKET, &cut, err);

	return r < 0 ? err_wrap(err, r, "the rules of its network card") : 0;
}

int egress_end(const char *dir, struct err *err)
{
	CLEANUP_FD int fd = -1;
	struct pollfd ended = {.events = POLLIN};
	char path[PATH_MAX];
	pid_t pid = 0, again = 0;
	int r = lock_path(dir, path, err);

	if (r < 0 || lock_held(path, &pid) <= 0)
		return r;
	fd = pid > 0 ? pidfd_open(pid, 0) : -1;
	// Again, so that it is not that of a later process with the same id.
	if (fd < 0 || lock_held(path, &again) <= 0 || again != pid)
		return 0;
	ended.fd = fd;
	pidfd_send_signal(fd, SIGTERM, NULL, 0);
	if (poll(&ended, 1, (int)(EGRESS_END_NS / 1000000)) > 0)
		return 0;
	pidfd_send_signal(fd, SIGKILL, NULL, 0);
	return poll(&ended, 1, (int)(EGRESS_END_NS / 1000000)) > 0
		       ? 0
		       : err_set(err, -EBUSY, "%s: the machine's proxy does not end", dir);
}
