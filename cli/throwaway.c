// SPDX-License-Identifier: Apache-2.0
// Machines for one purpose; see the header. One thread.
#include "cli/throwaway.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/control_client.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/layers.h"
#include "cli/patience.h"
#include "cli/running.h"
#include "vmm/base/fd.h"
#include "vmm/cgroup.h"

#define TURN_RETRY_MS 20

// For a monitor to pause, or to go on with, its machine.
#define PAUSE_NS 10000000000ULL

static int write_config(const char *dir, const struct config *config, struct err *err)
{
	char ini[PATH_MAX];

	if (snprintf(ini, sizeof(ini), "%s/vm.ini", dir) >= (int)sizeof(ini))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return config_write(ini, config, err);
}

static int ask_monitor(const char *run_dir, const char *method, struct err *err)
{
	CLEANUP_FD int fd = control_connect(run_dir, err);

	return fd < 0 ? fd
		      : control_call(
				fd, method, NULL, -1, now_ns() + patience_ns(PAUSE_NS), NULL, err);
}

// --- From a pool -----------------------------------------------------------------------------

int throwaway_serve(const struct pool *pool, struct err *err)
{
	char *const argv[] = {"mayfly", "pool", "serve", (char *)pool->name, NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	char log[PATH_MAX];
	sigset_t none;
	pid_t pid;
	int r = pool_served(pool, NULL, err);

	if (r != 0)
		return MIN(r, 0);
	if (snprintf(log, sizeof(log), "%s/" POOL_LOG, pool->dir) >= (int)sizeof(log))
		return err_errno(err, -ENAMETOOLONG, "%s", pool->dir);
	sigemptyset(&none);
	posix_spawn_file_actions_init(&actions);
	posix_spawnattr_init(&attr);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log,
		O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW, 0600);
	posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
	posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
	r = posix_spawn(&pid, "/proc/self/exe", &actions, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&actions);
	return r ? err_errno(err, -r, "starting the process of pool '%s'", pool->name) : 0;
}

// Returns 1 with a machine that goes on, 0 if none was to be had.
static int lease(struct throwaway *t, struct err *err)
{
	struct launch *launch = &t->launch;
	int r;

	while ((r = pool_lease(t->pool, t->dir, &t->lock_fd, err)) == 1) {
		if (snprintf(launch->run_dir, sizeof(launch->run_dir), "%s/run", t->dir) >=
			(int)sizeof(launch->run_dir))
			return err_errno(err, -ENAMETOOLONG, "%s", t->dir);
		launch->dir = t->dir;
		r = running_pidfd(t->dir, NULL);
		if (r >= 0) {
			monitor_proc_adopt(&launch->monitor, r);
			r = ask_monitor(launch->run_dir, "resume", NULL);
		}
		if (r >= 0) {
			launch->ready_ns = now_ns();
			t->leased = true;
			return 1;
		}
		// It has died just now: the next one. Each turn takes one away.
		monitor_proc_end(&launch->monitor);
		(void)home_remove(t->dir, NULL);
		t->dir[0] = '\0';
		fd_close(&t->lock_fd);
	}
	return r;
}

// One of the turns to make a machine, if it is to be had: -EWOULDBLOCK.
static int take_turn(const struct throwaway *t, struct err *err)
{
	const long nr = t->hold_turn ? MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L) : 1;
	char path[PATH_MAX];

	for (long i = 0; i < nr; i++) {
		CLEANUP_FD int fd = -1;
		int r = t->hold_turn
				? home_format(path, err, "%s/" POOL_TURN "-%ld", t->pool->dir, i)
				: home_format(path, err, "%s/" POOL_TURN, t->pool->dir);

		if (r < 0)
			return r;
		fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
		if (fd < 0)
			return err_errno(err, -errno, "%s", path);
		if (flock(fd, LOCK_EX | LOCK_NB) == 0)
			return TAKE_FD(fd);
	}
	return -EWOULDBLOCK;
}

// Of those that find nobody waiting few at a time make a machine: if all did, none would come to
// an end in time. Whoever waits for a turn may still get one of the pool's. As launch_wait(); with
// 0 either t->leased is set, or it is this one's turn for as long as t->turn_fd is open.
static int lease_or_turn(
	struct throwaway *t, uint64_t deadline_ns, int *ret_signal, struct err *err)
{
	int r = lease(t, err);

	// Without the pool's process the machine is there all the same, or is made.
	if (r >= 0)
		(void)throwaway_serve(t->pool, NULL);
	while (r == 0 && (t->turn_fd = take_turn(t, err)) == -EWOULDBLOCK) {
		struct pollfd signals = {.fd = t->launch.signal_fd, .events = POLLIN};

		if (now_ns() >= deadline_ns)
			return LAUNCH_TIMED_OUT;
		if (poll(&signals, 1, TURN_RETRY_MS) > 0 &&
			(*ret_signal = launch_signal(&t->launch)) != 0)
			return LAUNCH_SIGNAL;
		r = lease(t, err);
	}
	return r != 0 ? MIN(r, 0) : MIN(t->turn_fd, 0);
}

// All threads of a monitor, which has inherited that it runs when nobody else wants to.
static int raise_weight(pid_t pid, struct err *err)
{
	struct sched_param param = {0};
	const struct dirent *e;
	char path[64];
	DIR *dir;
	int r = 0;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	if (!dir)
		return err_errno(err, -errno, "%s", path);
	while (r == 0 && (e = readdir(dir)))
		if (e->d_name[0] != '.' &&
			sched_setscheduler(
				(pid_t)strtol(e->d_name, NULL, 10), SCHED_OTHER, &param) < 0 &&
			errno != ESRCH)
			r = err_errno(err, -errno, "weight of the monitor");
	closedir(dir);
	return r;
}

int throwaway_refill(const struct pool *pool, uint64_t timeout_ns, bool raise, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX] = "";
	int sig = 0, r;

	launch.start_ns = now_ns();
	launch.snapshot = pool->snapshot;
	launch.new_identity = true;
	r = launch_take_signals(&launch, err);
	if (r == 0)
		r = home_make_throwaway(dir, &lock_fd, err);
	if (r == 0)
		r = pool_claim(pool, dir, err);
	if (r == 0)
		r = write_config(dir, &pool->config, err);
	if (r == 0)
		r = layers_give(pool->snapshot, dir, true, err);
	// Not tied to us: if we die, the next one goes on with it.
	if (r == 0)
		r = launch_start(&launch, dir, false, false, err);
	if (r == 0)
		r = launch_wait(&launch, launch.start_ns + timeout_ns, &sig, err);
	if (r > 0)
		r = r == LAUNCH_SIGNAL ? err_set(err, -EINTR, "interrupted by signal %d", sig)
				       : err_set(err, -ETIMEDOUT, "the guest did not answer");
	// While it waits it costs memory, and no time.
	if (r == 0)
		r = ask_monitor(launch.run_dir, "pause", err);
	if (r == 0 && raise)
		r = raise_weight(launch.monitor.pid, err);
	if (r == 0)
		r = pool_publish(pool, dir, err);
	if (r == 0)
		launch_let_go(&launch);
	launch_end(&launch);
	if (r < 0 && dir[0])
		(void)home_remove(dir, NULL);
	return r;
}

// --- From a snapshot, or cold ----------------------------------------------------------------

// What a warm start goes on from may be of no use (another processor, a damaged file). What was
// done in a pool's machine before cannot be had by booting.
static int boot_instead(struct throwaway *t, struct err *err)
{
	if (t->pool)
		return err_wrap(err, err->code, "pool '%s'", t->pool->name);
	fprintf(stderr, "mayfly %s: no warm start: %s; booting\n", t->verb, err->msg);
	golden_failed(&t->golden, err->code);
	t->launch.snapshot = NULL;
	t->launch.restored_ns = 0;
	return layers_clear(t->dir, err);
}

static int start(struct throwaway *t, struct err *err)
{
	int r = 0;

	if (!t->config.kernel[0])
		r = home_find_kernel(t->config.kernel, err);
	if (r == 0 && t->pool) {
		t->launch.snapshot = t->pool->snapshot;
	} else if (r == 0 && !t->cold) {
		r = golden_find(&t->golden, &t->config, NULL, err);
		t->launch.snapshot = r == 1 ? t->golden.dir : NULL;
	}
	t->launch.new_identity = t->launch.snapshot != NULL;
	if (r >= 0)
		r = home_make_throwaway(t->dir, &t->lock_fd, err);
	if (r == 0)
		r = write_config(t->dir, &t->config, err);
	if (r == 0 && t->launch.snapshot && layers_give(t->launch.snapshot, t->dir, true, err) < 0)
		r = boot_instead(t, err);
	return r < 0 ? r : launch_start(&t->launch, t->dir, true, t->show_console, err);
}

// Waits until the machine is ready. If what it goes on from is of no use, it boots after all; not
// if somebody killed the monitor.
static int wait_ready(struct throwaway *t, uint64_t deadline_ns, int *ret_signal, struct err *err)
{
	struct launch *launch = &t->launch;
	int r = launch_wait(launch, deadline_ns, ret_signal, err);
	bool told = launch->monitor.failed || launch->monitor.ended || launch->monitor.pid > 0;

	if (r >= 0 || !launch->snapshot || !told)
		return r;
	monitor_proc_end(&launch->monitor);
	fd_close(&launch->ready_fd);
	fd_close(&launch->console_fd);
	r = boot_instead(t, err);
	if (r == 0)
		r = launch_start(launch, t->dir, true, t->show_console, err);
	return r < 0 ? r : launch_wait(launch, deadline_ns, ret_signal, err);
}

// For those that come after it. This one goes on without, if that fails; -EINTR if a signal came.
static int make_golden(struct throwaway *t)
{
	struct err err = {0};
	CLEANUP_FD int stop_fd = -1;
	int r;

	if (t->cold || t->launch.snapshot)
		return 0;
	stop_fd = launch_stop_fd();
	// It has said that it is ready, and goes on to make its machine so meanwhile: what is left
	// of that would be done by every one that goes on from here.
	r = launch_settle(&t->launch, &err);
	if (r == 0)
		r = golden_make(&t->golden, t->dir, t->launch.run_dir, stop_fd, &err);
	if (r < 0)
		golden_fini(&t->golden);
	if (r < 0 && r != -EINTR)
		fprintf(stderr, "mayfly %s: the next start will be no faster: %s\n", t->verb,
			err.msg);
	return r == -EINTR ? r : 0;
}

int throwaway_start(struct throwaway *t, uint64_t deadline_ns, int *ret_signal, struct err *err)
{
	int r = launch_take_signals(&t->launch, err);

	if (r == 0 && t->pool) {
		r = lease_or_turn(t, deadline_ns, ret_signal, err);
		if (r == 0)
			pool_note(t->pool, t->leased ? POOL_HIT : POOL_MISS,
				now_ns() - t->launch.start_ns);
		if (r == 0 && t->leased)
			return egress_start(t->dir, err);
	}
	if (r == 0)
		r = start(t, err);
	if (r == 0)
		r = wait_ready(t, deadline_ns, ret_signal, err);
	if (!t->hold_turn)
		fd_close(&t->turn_fd);
	if (r == 0 && make_golden(t) == -EINTR) {
		*ret_signal = launch_signal(&t->launch);
		r = LAUNCH_SIGNAL;
	}
	return r == 0 ? egress_start(t->dir, err) : r;
}

int throwaway_end(struct throwaway *t, struct err *err)
{
	struct err ignored;
	int r = 0;

	monitor_proc_end(&t->launch.monitor);
	if (cgroup_wanted(&t->config.limits))
		cgroup_sweep_ended();
	// Which ends with it, but may be writing to its folder.
	if (t->dir[0])
		r = egress_end(t->dir, err);
	if (t->dir[0] && r == 0)
		r = home_remove(t->dir, err);
	t->dir[0] = '\0';
	if (golden_keep(&t->golden, r == 0 ? err : &ignored) < 0 && r == 0)
		r = err ? err->code : -EIO;
	return r;
}

void throwaway_fini(struct throwaway *t)
{
	golden_fini(&t->golden);
	launch_end(&t->launch);
	fd_close(&t->lock_fd);
	fd_close(&t->turn_fd);
}
