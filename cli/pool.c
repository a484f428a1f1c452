// SPDX-License-Identifier: Apache-2.0
// mayfly pool: machines that wait to be leased. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/home.h"
#include "cli/life.h"
#include "cli/machine_options.h"
#include "cli/patience.h"
#include "cli/pool_serve.h"
#include "cli/throwaway.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"
#include "vmm/base/lock.h"
#include "vmm/base/parse.h"

#define SIZE_DEFAULT 4
#define STOP_MS      5000 // for a pool's process to end

static const char help[] =
	"Usage: mayfly pool create [OPTION]... NAME\n"
	"       mayfly pool ls [--json]\n"
	"       mayfly pool stats [--json] NAME\n"
	"       mayfly pool rm NAME...\n"
	"       mayfly pool serve NAME\n"
	"\n"
	"A pool keeps machines waiting, each a clone of one that was set up once, with ids and\n"
	"randomness of its own. `mayfly run --pool NAME` takes one within milliseconds; what was\n"
	"taken is never given to another, and goes when the command ends. A process in the\n"
	"background, at low weight, makes the next ones; it is started when need be, and `serve`\n"
	"is what it runs.\n"
	"\n"
	"create:\n"
	"      --size N          how many wait (default 4)\n"
	"      --setup COMMAND   what `sh -c` does in the machine before it is cloned\n"
	"      --timeout TIME    give up after TIME (default 10m)\n" MACHINE_OPTIONS_HELP;

static int usage(int status)
{
	fputs(help, status == 0 ? stdout : stderr);
	return status;
}

static void print_json(json_t *json)
{
	json_dumpf(json, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(json);
}

// --- Ending machines -------------------------------------------------------------------------

static int end_machine(void *opaque, const char *dir, struct err *err)
{
	(void)opaque;
	return life_down(dir, true, err);
}

int pool_gc(struct err *err)
{
	struct pool_count count;
	int swept = pool_sweep(err), r;

	if (swept < 0)
		return swept;
	r = pool_tidy(NULL, false, end_machine, NULL, &count, err);
	return r < 0 ? r : swept + (int)count.removed;
}

// --- create ----------------------------------------------------------------------------------

struct create {
	struct pool pool;
	struct throwaway machine;
	struct exec_command setup;
	const char *setup_argv[4];
};

static int set_up(struct create *c, struct err *err)
{
	struct launch *launch = &c->machine.launch;
	CLEANUP_FD int conn_fd = -1;
	int r;

	if (!c->pool.setup[0])
		return 0;
	conn_fd = agent_connect(launch->run_dir, LAUNCH_VSOCK, AGENT_PORT, launch->monitor.pid_fd,
		c->setup.deadline_ns, err);
	if (conn_fd < 0)
		return conn_fd;
	r = exec_command_run(&c->setup, conn_fd, launch->signal_fd, launch->monitor.pid_fd, err);
	if (r < 0)
		return r;
	return r == 0 ? 0
		      : err_set(err, -ECHILD, "--setup ended with status %d: no pool was made", r);
}

// The machine that all others are clones of.
static int make_snapshot(struct create *c, struct err *err)
{
	struct golden golden = {.making_fd = -1};
	CLEANUP_FD int stop_fd = launch_stop_fd();
	struct launch *launch = &c->machine.launch;
	int sig = 0;
	int r = throwaway_start(&c->machine, c->setup.deadline_ns, &sig, err);

	if (r == LAUNCH_SIGNAL)
		return err_set(err, -EINTR, "interrupted by signal %d", sig);
	if (r == LAUNCH_TIMED_OUT)
		return err_set(err, -ETIMEDOUT, "the guest did not answer in time");
	if (r == 0)
		r = set_up(c, err);
	if (r == 0)
		r = launch_settle(launch, err);
	strcpy(golden.dir, c->pool.snapshot);
	if (r == 0)
		r = golden_make(&golden, c->machine.dir, launch->run_dir, stop_fd, err);
	if (r == 0)
		r = golden_keep(&golden, err);
	golden_fini(&golden);
	if (r < 0)
		(void)launch_failure(launch, err);
	return r;
}

static int make_pool(struct create *c, struct err *err)
{
	CLEANUP_FD int lock_fd = -1;
	struct err ended = {0};
	int r = pool_begin(&c->pool, &lock_fd, err), e;

	if (r == 0)
		r = make_snapshot(c, err);
	e = throwaway_end(&c->machine, &ended);
	if (r == 0 && e < 0)
		r = err_set(err, e, "%s", ended.msg);
	c->pool.config = c->machine.config;
	if (r == 0)
		r = pool_commit(&c->pool, err);
	if (r < 0)
		pool_abort(&c->pool);
	fd_close(&lock_fd);
	throwaway_fini(&c->machine);
	return r < 0 ? r : throwaway_serve(&c->pool, err);
}

enum { OPT_SIZE = 768, OPT_SETUP, OPT_TIMEOUT };

static int create_option(struct create *c, int opt, struct err *err)
{
	uint64_t n;
	int r = machine_option(&c->machine.config, opt, optarg, err);

	if (r != 0)
		return MIN(r, 0);
	switch (opt) {
	case OPT_SIZE:
		r = parse_uint(optarg, 1, POOL_SIZE_MAX, &n, err);
		if (r == 0)
			c->pool.size = (unsigned int)n;
		return r < 0 ? err_wrap(err, r, "size") : 0;
	case OPT_SETUP:
		if (strlen(optarg) >= sizeof(c->pool.setup))
			return err_set(err, -EINVAL,
				"setup: longer than %zu bytes: put it into the image, or a "
				"script",
				sizeof(c->pool.setup) - 1);
		strcpy(c->pool.setup, optarg);
		return 0;
	case OPT_TIMEOUT:
		r = parse_duration(optarg, &n, err);
		if (r < 0)
			return err_wrap(err, r, "timeout");
		c->setup.deadline_ns = c->setup.start_ns + n;
		c->setup.timeout_text = optarg;
		return 0;
	default:
		return -EINVAL;
	}
}

static int create(struct create *c, int argc, char **argv)
{
	static const struct option options[] = {
		MACHINE_LONG_OPTIONS,
		{"size", required_argument, NULL, OPT_SIZE},
		{"setup", required_argument, NULL, OPT_SETUP},
		{"timeout", required_argument, NULL, OPT_TIMEOUT},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, MACHINE_SHORT_OPTIONS "h", options, NULL)) != -1) {
		if (opt == 'h' || opt == '?')
			return usage(opt == 'h' ? 0 : EXIT_USAGE);
		if (create_option(c, opt, &err) < 0)
			return cli_bad_option("pool create", &err);
	}
	if (argc - optind != 1)
		return usage(EXIT_USAGE);
	if (home_check_name(argv[optind], &err) < 0)
		return cli_bad_option("pool create", &err);
	// A clone that writes to a file of the host's would share it with all others.
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		if (c->machine.config.disks[i].file[0] &&
			c->machine.config.disks[i].mode == CONFIG_DISK_RAW) {
			err_set(&err, -EINVAL,
				"a pool's machines cannot all write to %s: use mode=overlay",
				c->machine.config.disks[i].file);
			return cli_bad_option("pool create", &err);
		}
	snprintf(c->pool.name, sizeof(c->pool.name), "%.63s", argv[optind]);
	c->setup_argv[0] = "sh";
	c->setup_argv[1] = "-c";
	c->setup_argv[2] = c->pool.setup;
	c->setup.argv = c->setup_argv;
	r = exec_command_image(&c->setup, &c->machine.config, &err);
	if (r == 0)
		r = make_pool(c, &err);
	return r < 0 ? cli_fail("pool create", &err) : 0;
}

static int create_pool(int argc, char **argv)
{
	struct create *c = calloc(1, sizeof(*c));
	struct err err = {0};
	int r;

	if (!c || exec_command_init(&c->setup, "pool create", 0, &err) < 0) {
		free(c);
		return EXIT_FAILED;
	}
	c->machine = (struct throwaway)THROWAWAY_INIT;
	c->machine.verb = "pool create";
	c->machine.launch.start_ns = c->setup.start_ns;
	c->setup.deadline_ns = c->setup.start_ns + 600000000000ULL;
	c->setup.timeout_text = "10m";
	c->pool.size = SIZE_DEFAULT;
	config_defaults(&c->machine.config);
	r = create(c, argc, argv);
	exec_command_fini(&c->setup);
	free(c);
	return r;
}

// --- ls and stats ----------------------------------------------------------------------------

static json_t *pool_json(const struct pool *pool, struct err *err)
{
	struct pool_count count = {0};
	pid_t pid = 0;
	json_t *json;
	int served;

	if (pool_tidy(pool->name, false, NULL, NULL, &count, err) < 0)
		return NULL;
	served = pool_served(pool, &pid, NULL);
	json = json_pack("{s:s, s:i, s:i, s:i, s:I, s:i, s:s, s:s}", "name", pool->name, "size",
		(int)pool->size, "ready", (int)count.ready, "leased", (int)count.leased,
		"memory_bytes", (json_int_t)pool->config.memory_bytes, "cpus",
		(int)pool->config.cpus, "setup", pool->setup, "dir", pool->dir);
	if (served == 1)
		json_object_set_new(json, "pid", json_integer(pid));
	return json;
}

static int list_pool(void *opaque, const char *name, const char *dir)
{
	json_t *list = opaque, *entry;
	struct pool pool;
	struct err err = {0};

	(void)dir;
	entry = pool_open(name, &pool, &err) < 0 ? NULL : pool_json(&pool, &err);
	if (!entry)
		entry = json_pack("{s:s, s:s}", "name", name, "error", err.msg);
	return json_array_append_new(list, entry) < 0 ? -ENOMEM : 0;
}

static long long number(const json_t *entry, const char *key)
{
	return json_integer_value(json_object_get(entry, key));
}

static int list(bool json)
{
	json_t *all = json_array(), *entry;
	struct err err = {0};
	size_t i;

	if (home_each_pool(list_pool, all, &err) < 0) {
		json_decref(all);
		return cli_fail("pool ls", &err);
	}
	if (json) {
		print_json(all);
		return 0;
	}
	printf("%-24s %5s %6s %7s %10s %8s\n", "NAME", "SIZE", "READY", "LEASED", "MEMORY", "PID");
	json_array_foreach(all, i, entry)
	{
		const char *error = json_string_value(json_object_get(entry, "error"));

		printf("%-24s %5lld %6lld %7lld %9lldM %8lld%s%s\n",
			json_string_value(json_object_get(entry, "name")), number(entry, "size"),
			number(entry, "ready"), number(entry, "leased"),
			number(entry, "memory_bytes") / (long long)MIB, number(entry, "pid"),
			error ? "  " : "", error ? error : "");
	}
	json_decref(all);
	return 0;
}

static json_t *stats_json(const struct pool *pool, struct err *err)
{
	struct pool_stats s;
	json_t *json;

	if (pool_stats(pool, &s, err) < 0)
		return NULL;
	json = pool_json(pool, err);
	if (!json)
		return NULL;
	json_object_update_new(json,
		json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "hits",
			(json_int_t)s.hits, "misses", (json_int_t)s.misses, "lease_p50_us",
			(json_int_t)pool_percentile(s.lease_sample_us, s.hits, 50), "lease_p95_us",
			(json_int_t)pool_percentile(s.lease_sample_us, s.hits, 95), "refills",
			(json_int_t)s.refills, "refill_failures", (json_int_t)s.failures,
			"refill_us", (json_int_t)s.refill_us, "refill_p50_us",
			(json_int_t)pool_percentile(s.refill_sample_us, s.refills, 50),
			"refill_p95_us",
			(json_int_t)pool_percentile(s.refill_sample_us, s.refills, 95)));
	return json;
}

static int stats(const char *name, bool json)
{
	struct pool pool;
	struct err err = {0};
	json_t *all = pool_open(name, &pool, &err) < 0 ? NULL : stats_json(&pool, &err);

	if (!all)
		return cli_fail("pool stats", &err);
	if (json) {
		print_json(all);
		return 0;
	}
	printf("waiting   %lld of %lld; leased %lld\n", number(all, "ready"), number(all, "size"),
		number(all, "leased"));
	printf("leases    %lld from the pool, %lld when none waited; p50 %.3f ms, p95 %.3f ms\n",
		number(all, "hits"), number(all, "misses"),
		(double)number(all, "lease_p50_us") / 1e3,
		(double)number(all, "lease_p95_us") / 1e3);
	printf("refills   %lld, in %.3f s; p50 %.3f ms, p95 %.3f ms\n", number(all, "refills"),
		(double)number(all, "refill_us") / 1e6, (double)number(all, "refill_p50_us") / 1e3,
		(double)number(all, "refill_p95_us") / 1e3);
	if (number(all, "refill_failures"))
		printf("failures  %lld (%s/" POOL_LOG ")\n", number(all, "refill_failures"),
			pool.dir);
	json_decref(all);
	return 0;
}

// --- rm --------------------------------------------------------------------------------------

// Ends the pool's process, and takes its lock, so that there will be none.
static int stop_serving(const struct pool *pool, int *ret_lock_fd, struct err *err)
{
	CLEANUP_FD int dir_fd = open(pool->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (dir_fd < 0)
		return err_errno(err, -errno, "%s", pool->dir);
	// Twice: another may be started just now.
	for (int i = 0; i < 2; i++) {
		CLEANUP_FD int pid_fd = -1;
		struct pollfd ended = {.events = POLLIN};
		pid_t pid = 0, again = 0;
		int r = pool_served(pool, &pid, err);

		if (r == 1 && pid > 0)
			pid_fd = pidfd_open(pid, 0);
		// Again, so that it is not that of a later process with the same id.
		if (pid_fd >= 0 && pool_served(pool, &again, err) == 1 && again == pid) {
			pidfd_send_signal(pid_fd, SIGTERM, NULL, 0);
			ended.fd = pid_fd;
			poll(&ended, 1, STOP_MS);
		}
		*ret_lock_fd = lock_take(dir_fd, "lock", err);
		if (*ret_lock_fd != -EBUSY)
			break;
	}
	return MIN(*ret_lock_fd, 0);
}

static int remove_pool(const char *name, struct err *err)
{
	CLEANUP_FD int lock_fd = -1;
	struct pool_count count;
	struct pool pool;
	int r = pool_open(name, &pool, err);

	// One that is damaged is removed, too.
	if (r == -EBADMSG || r == -EINVAL) {
		char pools[PATH_MAX];

		r = home_check_name(name, err);
		if (r == 0)
			r = home_pools(pools, err);
		snprintf(pool.name, sizeof(pool.name), "%.63s", name);
		if (r == 0 && snprintf(pool.dir, sizeof(pool.dir), "%s/%s", pools, name) >=
				      (int)sizeof(pool.dir))
			r = err_errno(err, -ENAMETOOLONG, "%s", pools);
	}
	if (r == 0)
		r = stop_serving(&pool, &lock_fd, err);
	// Those that are leased go when their commands end.
	if (r == 0)
		r = pool_tidy(name, true, end_machine, NULL, &count, err);
	return r < 0 ? r : home_remove(pool.dir, err);
}

// --- serve -----------------------------------------------------------------------------------

static int make_machine(void *opaque, const struct pool *pool, struct err *err)
{
	const bool *raise = opaque;

	return throwaway_refill(pool, patience_ns(LIFE_BOOT_TIMEOUT_NS), *raise, err);
}

// Whether a process of ours may leave SCHED_IDLE again.
static bool may_raise(void)
{
	struct rlimit limit;

	return geteuid() == 0 || (getrlimit(RLIMIT_NICE, &limit) == 0 && limit.rlim_cur >= 20);
}

static int serve(const char *name)
{
	struct launch signals = LAUNCH_INIT;
	struct sched_param param = {0};
	CLEANUP_FD int dir_fd = -1;
	CLEANUP_FD int lock_fd = -1;
	bool raise = may_raise();
	struct pool_maker maker = {.make = make_machine, .end = end_machine, .opaque = &raise};
	struct pool pool;
	struct err err = {0};
	int r = pool_open(name, &pool, &err);

	if (r == 0) {
		dir_fd = open(pool.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (dir_fd < 0)
			r = err_errno(&err, -errno, "%s", pool.dir);
	}
	if (r == 0) {
		lock_fd = lock_take(dir_fd, "lock", &err);
		r = MIN(lock_fd, 0);
	}
	if (r == -EBUSY) // there is one
		return 0;
	if (r == 0)
		r = launch_take_signals(&signals, &err);
	// Its machines are given their own weight again when they are ready.
	if (r == 0 && raise && sched_setscheduler(0, SCHED_IDLE, &param) < 0)
		r = err_errno(&err, -errno, "SCHED_IDLE");
	if (r == 0)
		r = pool_serve(name, &maker, signals.signal_fd, &err);
	launch_end(&signals);
	return r < 0 ? cli_fail("pool serve", &err) : 0;
}

// --- All of it -------------------------------------------------------------------------------

int pool_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	const char *verb = argc > 1 ? argv[1] : "";
	bool json = false;
	int opt, status = 0;

	if (!strcmp(verb, "create"))
		return create_pool(argc - 1, argv + 1);
	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt != 'j')
			return usage(opt == 'h' ? 0 : EXIT_USAGE);
		json = true;
	}
	argc -= optind;
	argv += optind;
	if (argc == 1 && !strcmp(argv[0], "ls"))
		return list(json);
	if (argc == 2 && !strcmp(argv[0], "stats"))
		return stats(argv[1], json);
	if (argc == 2 && !strcmp(argv[0], "serve"))
		return serve(argv[1]);
	if (argc < 2 || strcmp(argv[0], "rm") != 0)
		return usage(EXIT_USAGE);
	for (int i = 1; i < argc; i++) {
		struct err err = {0};

		if (remove_pool(argv[i], &err) < 0)
			status = cli_fail("pool rm", &err);
	}
	return status;
}
