// SPDX-License-Identifier: Apache-2.0
// cli/pool_store and cli/pool_serve: a machine is leased once, and nothing is left behind, whoever
// dies at whatever moment. Machines are processes that hold the locks that monitors and commands
// hold, and nothing else.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/pool_serve.h"
#include "vmm/base/fd.h"
#include "vmm/base/lock.h"

static char home[64];
static struct pool pool;

// --- Machines --------------------------------------------------------------------------------

// A process that holds run/lock of the machine in dir until it is killed.
static pid_t start_monitor(const char *dir)
{
	char path[PATH_MAX + 32];
	int p[2], dir_fd;
	pid_t pid;
	char c;

	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	snprintf(path, sizeof(path), "%s/run", dir);
	dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_true(dir_fd >= 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		int lock_fd = lock_take(dir_fd, "lock", NULL);

		if (lock_fd < 0)
			_exit(1);
		// An owner's lock is not to be held by this as well, nor whoever reads the test's
		// output to wait for it, should the test fail.
		alarm(60);
		for (int fd = 0; fd < 256; fd++)
			if (fd != lock_fd && fd != p[1])
				close(fd);
		if (write(p[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	fd_close(&dir_fd);
	fd_close(&p[1]);
	assert_int_equal(read(p[0], &c, 1), 1);
	fd_close(&p[0]);
	return pid;
}

static void kill_and_wait(pid_t pid)
{
	int pid_fd = pidfd_open(pid, 0);
	struct pollfd ended = {.fd = pid_fd, .events = POLLIN};

	assert_true(pid_fd >= 0);
	assert_int_equal(kill(pid, SIGKILL), 0);
	assert_int_equal(poll(&ended, 1, -1), 1);
	fd_close(&pid_fd);
	waitpid(pid, NULL, 0); // if it is our child
}

static int end(void *opaque, const char *dir, struct err *err)
{
	pid_t pid;
	(void)opaque;
	(void)err;

	if (home_running(dir, &pid, NULL) == 1)
		kill_and_wait(pid);
	return 0;
}

// How far the making of a machine gets.
enum stage { MADE, CLAIMED, STARTED, PUBLISHED, WHOLE };

static int fail_makes;
static unsigned int makes;

// Leaves the owner lock open: to close it is to die.
static int make_until(enum stage stage, char ret_dir[PATH_MAX], int *ret_lock_fd)
{
	assert_int_equal(home_make_throwaway(ret_dir, ret_lock_fd, NULL), 0);
	if (stage >= CLAIMED)
		assert_int_equal(pool_claim(&pool, ret_dir, NULL), 0);
	if (stage >= STARTED)
		start_monitor(ret_dir);
	if (stage >= PUBLISHED)
		assert_int_equal(pool_publish(&pool, ret_dir, NULL), 0);
	return 0;
}

static int make(void *opaque, const struct pool *p, struct err *err)
{
	char dir[PATH_MAX];
	int lock_fd = -1;
	(void)opaque;

	assert_string_equal(p->name, pool.name);
	makes++;
	if (fail_makes-- > 0)
		return err_set(err, -EIO, "no machine today");
	make_until(WHOLE, dir, &lock_fd);
	fd_close(&lock_fd);
	return 0;
}

static const struct pool_maker maker = {.make = make, .end = end};

static unsigned int nr_of_machines;

static int count_one(void *opaque, const char *name, const char *dir)
{
	(void)opaque;
	(void)name;
	(void)dir;
	nr_of_machines++;
	return 0;
}

static unsigned int machines(void)
{
	nr_of_machines = 0;
	assert_int_equal(home_each(count_one, NULL, NULL), 0);
	return nr_of_machines;
}

static unsigned int waiting(void)
{
	struct pool_count count = {0};

	assert_int_equal(pool_tidy(pool.name, false, NULL, NULL, &count, NULL), 0);
	return count.ready;
}

static struct pool_turn turn(void)
{
	struct pool_turn t = {0};
	struct err err = {0};

	assert_int_equal(pool_turn(&pool, &maker, 0, &t, &err), 0);
	return t;
}

static void fill(void)
{
	for (unsigned int i = 0; i < pool.size; i++)
		assert_true(turn().made);
	assert_false(turn().made);
	assert_int_equal(waiting(), pool.size);
}

static int setup(void **state)
{
	int lock_fd = -1;
	(void)state;

	strcpy(home, "/tmp/mayfly-pool-XXXXXX");
	assert_non_null(mkdtemp(home));
	assert_int_equal(setenv("MAYFLY_HOME", home, 1), 0);
	memset(&pool, 0, sizeof(pool));
	strcpy(pool.name, "p");
	strcpy(pool.setup, "echo \"hello\"");
	pool.size = 3;
	config_defaults(&pool.config);
	assert_int_equal(pool_begin(&pool, &lock_fd, NULL), 0);
	assert_int_equal(pool_commit(&pool, NULL), 0);
	fd_close(&lock_fd);
	fail_makes = 0;
	makes = 0;
	return 0;
}

static int teardown(void **state)
{
	struct pool_count count;
	(void)state;

	assert_int_equal(pool_tidy(NULL, true, end, NULL, &count, NULL), 0);
	return home_remove(home, NULL);
}

// --- Tests -----------------------------------------------------------------------------------

static void what_is_written_is_read(void **state)
{
	struct pool again;
	struct err err = {0};
	char path[PATH_MAX + 32];
	int lock_fd = -1, fd;
	(void)state;

	assert_int_equal(pool_open("p", &again, &err), 0);
	assert_string_equal(again.dir, pool.dir);
	assert_string_equal(again.setup, pool.setup);
	assert_int_equal(again.size, 3);
	assert_int_equal(again.config.memory_bytes, pool.config.memory_bytes);
	assert_int_equal(pool_served(&pool, NULL, &err), 0);
	assert_int_equal(pool_open("q", &again, &err), -ENOENT);
	assert_int_equal(pool_open("../p", &again, &err), -EINVAL);
	again = (struct pool){.name = "p"};
	assert_int_equal(pool_begin(&again, &lock_fd, &err), -EEXIST);
	snprintf(path, sizeof(path), "%s/pool.json", pool.dir);
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	assert_int_equal(fd_write_all(fd, "{\"size\": 0, \"setup\": \"\"}", 24), 0);
	fd_close(&fd);
	assert_int_equal(pool_open("p", &again, &err), -EBADMSG);
	assert_non_null(strstr(err.msg, "pool.json"));
}

static void a_pool_that_was_not_made_is_gone(void **state)
{
	struct pool half = {.name = "half", .size = 1};
	struct timespec old[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
	int lock_fd = -1;
	(void)state;

	config_defaults(&half.config);
	assert_int_equal(pool_begin(&half, &lock_fd, NULL), 0);
	assert_int_equal(utimensat(AT_FDCWD, half.dir, old, 0), 0);
	assert_int_equal(pool_sweep(NULL), 0); // its maker lives
	fd_close(&lock_fd);
	assert_int_equal(pool_sweep(NULL), 1);
	assert_true(access(half.dir, F_OK) < 0);
	// Two at a time: the second is told.
	strcpy(half.name, "half");
	assert_int_equal(pool_begin(&half, &lock_fd, NULL), 0);
	strcpy(half.name, "p");
	assert_int_equal(pool_commit(&half, NULL), -EEXIST);
	pool_abort(&half);
	fd_close(&lock_fd);
}

static void it_is_filled_and_leased(void **state)
{
	char dirs[3][PATH_MAX], dir[PATH_MAX], name[POOL_NAME_BYTES];
	struct pool_count count;
	int locks[3], lock_fd = -1;
	(void)state;

	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 0);
	fill();
	for (int i = 0; i < 3; i++) {
		assert_int_equal(pool_lease(&pool, dirs[i], &locks[i], NULL), 1);
		assert_true(pool_of(dirs[i], name));
		assert_string_equal(name, "p");
		for (int k = 0; k < i; k++)
			assert_string_not_equal(dirs[i], dirs[k]);
	}
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 0);
	// What is leased stays, and is counted.
	assert_int_equal(pool_tidy("p", true, end, NULL, &count, NULL), 0);
	assert_int_equal(count.leased, 3);
	assert_int_equal(count.leased_all, 3);
	assert_int_equal(count.removed, 0);
	assert_int_equal(machines(), 3);
	fill();
	assert_int_equal(machines(), 6);
	// Who had them died.
	for (int i = 0; i < 3; i++)
		fd_close(&locks[i]);
	assert_false(turn().made);
	assert_int_equal(machines(), 3);
	assert_int_equal(waiting(), 3);
}

static void no_machine_is_leased_twice(void **state)
{
	enum { LESSEES = 12, MACHINES = 6 };
	char seen[LESSEES][PATH_MAX] = {0};
	unsigned int nr = 0;
	int p[2], go[2];
	(void)state;

	pool.size = MACHINES;
	fill();
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	assert_int_equal(pipe2(go, O_CLOEXEC), 0);
	for (int i = 0; i < LESSEES; i++) {
		pid_t pid = fork();

		assert_true(pid >= 0);
		if (pid > 0)
			continue;
		char dir[PATH_MAX] = "";
		int lock_fd = -1;
		char c;

		close(go[1]);
		if (read(go[0], &c, 1) != 0) // all at once, when it is closed
			_exit(1);
		if (pool_lease(&pool, dir, &lock_fd, NULL) == 1)
			_exit(write(p[1], dir, PATH_MAX) == PATH_MAX ? 0 : 1);
		_exit(0);
	}
	fd_close(&go[1]);
	fd_close(&p[1]);
	while (fd_read_full(p[0], seen[nr], PATH_MAX) == PATH_MAX)
		nr++;
	fd_close(&p[0]);
	fd_close(&go[0]);
	// A lessee that found another at a machine went on to the next one: nobody went without.
	assert_int_equal(nr, MACHINES);
	for (unsigned int i = 0; i < nr; i++)
		for (unsigned int k = 0; k < i; k++)
			assert_string_not_equal(seen[i], seen[k]);
	assert_int_equal(waiting(), 0);
}

static void a_maker_that_dies_leaves_nothing(void **state)
{
	for (enum stage stage = MADE; stage < WHOLE; stage++) {
		struct pool_count count;
		char dir[PATH_MAX];
		int lock_fd = -1;

		make_until(stage, dir, &lock_fd);
		// While it is made it is nobody else's.
		assert_int_equal(pool_tidy(NULL, false, end, NULL, &count, NULL), 0);
		assert_int_equal(count.removed, 0);
		fd_close(&lock_fd); // the maker dies
		pool.size = 1;
		// One that had come so far is adopted; else there is another in its place.
		assert_int_equal(turn().made, stage < PUBLISHED);
		assert_int_equal(access(dir, F_OK) == 0, stage == PUBLISHED);
		assert_int_equal(waiting(), 1);
		assert_int_equal(machines(), 1);
		teardown(state);
		setup(state);
	}
}

static void one_that_died_waiting_is_replaced(void **state)
{
	char ready[PATH_MAX + 32], dir[PATH_MAX];
	struct pool_count count;
	int lock_fd = -1;
	pid_t pid;
	(void)state;

	pool.size = 1;
	fill();
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 1);
	fd_close(&lock_fd);
	fill();
	assert_int_equal(machines(), 1);
	// Its monitor is killed; a lease does not take it, and it goes.
	assert_int_equal(pool_tidy("p", false, NULL, NULL, &count, NULL), 0);
	snprintf(ready, sizeof(ready), "%s/ready", pool.dir);
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 1);
	assert_int_equal(home_running(dir, &pid, NULL), 1);
	assert_int_equal(pool_publish(&pool, dir, NULL), 0);
	fd_close(&lock_fd);
	kill_and_wait(pid);
	assert_int_equal(waiting(), 0);
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 0);
	assert_true(turn().made);
	assert_int_equal(machines(), 1);
	assert_int_equal(waiting(), 1);
	// A name of a machine that is not there at all.
	assert_int_equal(pool_publish(&pool, "/nowhere/run-gone", NULL), 0);
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 1);
	fd_close(&lock_fd);
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 0);
	assert_true(rmdir(ready) == 0);
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), -ENOENT);
}

static void machines_of_a_pool_that_is_gone_go(void **state)
{
	struct pool_count count;
	(void)state;

	fill();
	assert_int_equal(home_remove(pool.dir, NULL), 0);
	assert_int_equal(pool_tidy(NULL, false, end, NULL, &count, NULL), 0);
	assert_int_equal(count.removed, 3);
	assert_int_equal(machines(), 0);
}

static void it_rests_for_running_work(void **state)
{
	char dir[2][PATH_MAX];
	int lock_fd[2] = {-1, -1};
	struct pool_turn t;
	(void)state;

	assert_int_equal(pool_rest_ns(1000, 0, 0), 0);
	assert_int_equal(pool_rest_ns(1000, 3, 0), 3000);
	assert_int_equal(pool_rest_ns(UINT64_MAX, 9, 0), POOL_REST_MAX_NS);
	assert_int_equal(pool_rest_ns(1000, 3, 1), 1000000000);
	assert_int_equal(pool_rest_ns(1000, 3, 2), 2000000000);
	assert_int_equal(pool_rest_ns(1000, 3, 99), 64000000000);
	// A full one is looked at now and then, and when something is leased.
	fill();
	t = turn();
	assert_true(t.wake);
	assert_int_equal(t.wait_ns, POOL_LOOK_NS);
	for (int i = 0; i < 2; i++)
		assert_int_equal(pool_lease(&pool, dir[i], &lock_fd[i], NULL), 1);
	t = turn();
	assert_true(t.made && !t.wake && t.wait_ns > 0);
	fd_close(&lock_fd[0]);
	fd_close(&lock_fd[1]);
}

static void a_server_fills_stops_and_is_replaced(void **state)
{
	int stop_fd = eventfd(0, EFD_CLOEXEC), p[2], status;
	char dir[PATH_MAX];
	int lock_fd = -1;
	(void)state;

	// The first one is killed after each machine; the next goes on with what it has left.
	for (unsigned int i = 0; i < pool.size; i++) {
		assert_int_equal(pipe2(p, O_CLOEXEC), 0);
		pid_t pid = fork();

		assert_true(pid >= 0);
		if (pid == 0) {
			struct pool_turn t;
			struct err err;

			if (pool_turn(&pool, &maker, 0, &t, &err) < 0 || !t.made)
				_exit(1);
			if (write(p[1], "x", 1) != 1)
				_exit(1);
			for (;;)
				pause();
		}
		fd_close(&p[1]);
		assert_int_equal(read(p[0], dir, 1), 1);
		fd_close(&p[0]);
		kill_and_wait(pid);
	}
	assert_int_equal(waiting(), pool.size);
	assert_int_equal(makes, 0); // by us
	assert_int_equal(pool_lease(&pool, dir, &lock_fd, NULL), 1);
	fail_makes = 0;
	assert_int_equal(eventfd_write(stop_fd, 1), 0);
	// It does one turn, and stops.
	assert_int_equal(pool_serve("p", &maker, stop_fd, NULL), 0);
	assert_int_equal(makes, 1);
	assert_int_equal(waiting(), pool.size);
	fd_close(&lock_fd);
	fd_close(&stop_fd);
	// A pool that is gone ends its process.
	stop_fd = eventfd(0, EFD_CLOEXEC);
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0)
		_exit(pool_serve("p", &maker, stop_fd, NULL) == 0 ? 0 : 1);
	char gone[PATH_MAX + 32];

	snprintf(gone, sizeof(gone), "%s/gone", home);
	assert_int_equal(rename(pool.dir, gone), 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	fd_close(&stop_fd);
}

static void what_happens_is_counted(void **state)
{
	struct pool_stats s;
	char path[PATH_MAX + 32];
	int fd;
	(void)state;

	fail_makes = 1;
	assert_true(turn().failed);
	assert_true(turn().made);
	for (uint64_t i = 1; i <= 100; i++)
		pool_note(&pool, POOL_HIT, i * 1000);
	pool_note(&pool, POOL_MISS, 0);
	assert_int_equal(pool_stats(&pool, &s, NULL), 0);
	assert_int_equal(s.hits, 100);
	assert_int_equal(s.misses, 1);
	assert_int_equal(s.refills, 1);
	assert_int_equal(s.failures, 1);
	assert_int_equal(pool_percentile(s.lease_sample_us, s.hits, 50), 50);
	assert_int_equal(pool_percentile(s.lease_sample_us, s.hits, 95), 95);
	assert_int_equal(pool_percentile(s.lease_sample_us, 0, 95), 0);
	// The last ones count.
	for (uint64_t i = 0; i < POOL_SAMPLES; i++)
		pool_note(&pool, POOL_HIT, 7000000);
	assert_int_equal(pool_stats(&pool, &s, NULL), 0);
	assert_int_equal(s.hits, 100 + POOL_SAMPLES);
	assert_int_equal(pool_percentile(s.lease_sample_us, s.hits, 50), 7000);
	assert_int_equal(pool_percentile(s.lease_sample_us, s.hits, 1), 7000);
	// A file that is none begins anew.
	snprintf(path, sizeof(path), "%s/stats", pool.dir);
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	fd_close(&fd);
	assert_int_equal(pool_stats(&pool, &s, NULL), 0);
	assert_int_equal(s.hits, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(what_is_written_is_read, setup, teardown),
		cmocka_unit_test_setup_teardown(a_pool_that_was_not_made_is_gone, setup, teardown),
		cmocka_unit_test_setup_teardown(it_is_filled_and_leased, setup, teardown),
		cmocka_unit_test_setup_teardown(no_machine_is_leased_twice, setup, teardown),
		cmocka_unit_test_setup_teardown(a_maker_that_dies_leaves_nothing, setup, teardown),
		cmocka_unit_test_setup_teardown(one_that_died_waiting_is_replaced, setup, teardown),
		cmocka_unit_test_setup_teardown(
			machines_of_a_pool_that_is_gone_go, setup, teardown),
		cmocka_unit_test_setup_teardown(it_rests_for_running_work, setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_server_fills_stops_and_is_replaced, setup, teardown),
		cmocka_unit_test_setup_teardown(what_happens_is_counted, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
