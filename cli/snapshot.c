// SPDX-License-Identifier: Apache-2.0
// Snapshots as people use them: snapshot, snapshots, restore, fork, suspend, resume. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "cli/chains.h"
#include "cli/cli.h"
#include "cli/control_client.h"
#include "cli/home.h"
#include "cli/layers.h"
#include "cli/life.h"
#include "cli/running.h"
#include "cli/store.h"
#include "snapshot/memory.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/config.h"
#include "vmm/vm.h"

#define SUSPENDED_TAG "suspended"
#define DOWNTIME_NS   5000000ULL
#define CHAIN_MAX     16 // a fork of a running machine begins a new chain beyond
#define CALL_NS       60000000000ULL

static const char *base_name(const char *dir)
{
	const char *slash = strrchr(dir, '/');

	return slash ? slash + 1 : dir;
}

static int read_config(const char *dir, struct config *ret_config, struct err *err)
{
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return config_read(path, ret_config, err);
}

// --- Taking one ------------------------------------------------------------------------------

struct take {
	const struct running *machine;
	const char *tag;
	bool diff;
	bool track; // later diffs are to build upon it
	bool compress;
	bool live;
	uint64_t downtime_ns; // of that, as far as the guest's writes make it
	int control_fd;
};

// What a raw disk holds is the host's: it would not be that of the same moment.
static int check_disks(const struct config *config, struct err *err)
{
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++)
		if (config->disks[i].file[0] && config->disks[i].mode == CONFIG_DISK_RAW)
			return err_set(err, -ENOTSUP,
				"%s writes to a file of the host (%s), which a snapshot cannot "
				"hold: use mode=overlay",
				config_disk_name(i), config->disks[i].file);
	return 0;
}

static int check_parent(int control_fd, struct err *err)
{
	struct store_snapshot parent;
	json_t *status = NULL;
	const char *id;
	int r = control_call(control_fd, "status", NULL, -1, now_ns() + CALL_NS, &status, err);

	if (r < 0)
		return r;
	id = json_string_value(json_object_get(status, "changes_since"));
	if (!id || !id[0])
		r = err_set(err, -ENOENT,
			"there is no snapshot of it that a diff could build upon: take one without "
			"--diff first");
	else if (store_find(id, &parent, NULL) < 0)
		r = err_set(err, -ENOENT,
			"the snapshot that a diff would build upon, %.12s, has been removed: take "
			"one without --diff",
			id);
	json_decref(status);
	return r;
}

// *ret_live (may be NULL): what the monitor says of one that was taken live; the caller's.
static int take(const struct take *take, struct store_snapshot *ret_info, json_t **ret_live,
	struct err *err)
{
	struct store_snapshot info = {0};
	struct memory_stats stats = {0};
	struct store_writer writer = {.dir_fd = -1};
	struct config config = {0};
	json_t *result = NULL;
	const char *parent;
	int r = read_config(take->machine->dir, &config, err);

	if (r == 0)
		r = check_disks(&config, err);
	if (r == 0 && take->diff)
		r = check_parent(take->control_fd, err);
	if (r == 0)
		r = store_check_free(base_name(take->machine->dir), take->tag, err);
	if (r == 0)
		r = store_begin(&writer, err);
	if (r < 0)
		return r;
	r = control_snapshot(take->control_fd,
		json_pack("{s:s, s:b, s:b, s:b, s:b, s:b, s:I}", "id", writer.id, "diff",
			take->diff, "track", take->track, "compress", take->compress, "live",
			take->live, "unsynced", take->live, "downtime_ns",
			(json_int_t)take->downtime_ns),
		writer.dir_fd, -1, UINT64_MAX, &result, err);
	if (r == 0) {
		parent = json_string_value(json_object_get(result, "parent"));
		snprintf(info.parent, sizeof(info.parent), "%s", parent ? parent : "");
		snprintf(
			info.machine, sizeof(info.machine), "%.63s", base_name(take->machine->dir));
		snprintf(info.tag, sizeof(info.tag), "%s", take->tag);
		info.memory_bytes = config.memory_bytes;
		info.held_bytes = PAGE_BYTES * (uint64_t)json_integer_value(
						       json_object_get(result, "held_pages"));
		info.written_bytes = (uint64_t)json_integer_value(
			json_object_get(result, "written_bytes"));
		info.blackout_ns = (uint64_t)json_integer_value(
			json_object_get(result, "blackout_ns"));
		if (take->live) {
			r = chains_index(writer.dir_fd, &stats, err);
			info.held_bytes = stats.held_pages * PAGE_BYTES;
			info.written_bytes = stats.written_bytes;
		}
		if (r == 0)
			r = layers_keep(writer.dir_fd, take->machine->dir, err);
		if (r == 0)
			r = layers_sync(writer.dir_fd, err);
		if (r == 0)
			r = store_commit(&writer, &info, &config, err);
		// Without the monitor there is nobody who could build upon it.
		control_call(take->control_fd, r == 0 && take->track ? "commit" : "abort", NULL, -1,
			now_ns() + CALL_NS, NULL, NULL);
	}
	if (r == 0 && ret_live)
		*ret_live = json_incref(json_object_get(result, "live"));
	json_decref(result);
	store_end(&writer);
	if (r == 0)
		*ret_info = info;
	return r;
}

// How it went, in a line.
static void print_live(const struct store_snapshot *info, const json_t *live)
{
	const json_t *rounds = json_object_get(live, "rounds"), *round;
	size_t i;

	fprintf(stderr, "mayfly snapshot: while it ran");
	json_array_foreach(rounds, i, round) fprintf(stderr, "%s %.1f", i ? "," : "",
		(double)json_integer_value(json_object_get(round, "bytes")) / MIB);
	fprintf(stderr, " MiB; at the end %.1f MiB%s; it stood still for %.2f ms",
		(double)json_integer_value(json_object_get(live, "last_bytes")) / MIB,
		json_is_true(json_object_get(live, "forked"))
			? ", from a fork, since it writes faster than that can be copied"
			: "",
		(double)info->blackout_ns / 1e6);
	if (json_integer_value(json_object_get(live, "begin_ns")) > 0)
		fprintf(stderr, " (and %.2f before, to begin)",
			(double)json_integer_value(json_object_get(live, "begin_ns")) / 1e6);
	fputc('\n', stderr);
}

static json_t *snapshot_json(const struct store_snapshot *s)
{
	return json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:s}", "id", s->id,
		"parent", s->parent, "machine", s->machine, "tag", s->tag, "created_s",
		(json_int_t)s->created_s, "memory_bytes", (json_int_t)s->memory_bytes, "held_bytes",
		(json_int_t)s->held_bytes, "written_bytes", (json_int_t)s->written_bytes,
		"blackout_ns", (json_int_t)s->blackout_ns, "dir", s->dir);
}

static void print_json(json_t *json)
{
	json_dumpf(json, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(json);
}

int snapshot_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly snapshot [OPTION]... NAME [TAG]\n"
		"\n"
		"Keeps a running machine as it is at this moment: memory, processors, devices. "
		"The\n"
		"machine stands still for the moment alone; the writing goes on beside it.\n"
		"\n"
		"      --diff   write only what has changed since the last snapshot, or since the "
		"one\n"
		"               that the machine was restored from; that one is needed to restore "
		"it\n"
		"      --compress\n"
		"               take less room, for more time; its memory is then read when it is "
		"wanted\n"
		"      --live   copy its memory while it runs, and again what changes meanwhile: "
		"for "
		"\n"
		"               machines with much memory, whose moment is longer otherwise\n"
		"      --downtime TIME\n"
		"               stop with that when the rest takes no longer (default 5ms)\n"
		"      --json   tell what was written as JSON\n";
	static const struct option options[] = {
		{"diff", no_argument, NULL, 'd'},
		{"compress", no_argument, NULL, 'c'},
		{"live", no_argument, NULL, 'l'},
		{"downtime", required_argument, NULL, 'D'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct take what = {.track = true, .tag = "", .control_fd = -1};
	json_t *live = NULL, *out;
	struct store_snapshot info = {0};
	struct running machine;
	struct err err = {0};
	bool json = false, bounded = false;
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'd') {
			what.diff = true;
		} else if (opt == 'c') {
			what.compress = true;
		} else if (opt == 'l') {
			what.live = true;
		} else if (opt == 'D') {
			if (parse_duration(optarg, &what.downtime_ns, &err) < 0)
				return cli_bad_option("snapshot", &err);
			bounded = true;
		} else if (opt == 'j') {
			json = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (argc - optind < 1 || argc - optind > 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	if ((what.live && (what.diff || what.compress)) || (bounded && !what.live)) {
		err_set(&err, -EINVAL, "%s",
			what.live ? "--live is of all memory, as it is: not with --diff or "
				    "--compress"
				  : "--downtime is for --live");
		return cli_bad_option("snapshot", &err);
	}
	if (!bounded)
		what.downtime_ns = DOWNTIME_NS;
	if (argc - optind == 2) {
		what.tag = argv[optind + 1];
		if (store_check_tag(what.tag, &err) < 0)
			return cli_bad_option("snapshot", &err);
	}
	r = running_find(argv[optind], &machine, &err);
	what.machine = &machine;
	if (r == 0) {
		what.control_fd = control_connect(machine.run_dir, &err);
		r = MIN(what.control_fd, 0);
	}
	if (r == 0)
		r = take(&what, &info, &live, &err);
	fd_close(&what.control_fd);
	if (r < 0)
		return cli_fail("snapshot", &err);
	if (json) {
		out = snapshot_json(&info);
		if (live)
			json_object_set(out, "live", live);
		print_json(out);
	} else {
		printf("%s\n", info.id);
		if (live)
			print_live(&info, live);
	}
	json_decref(live);
	return 0;
}

// --- snapshots -------------------------------------------------------------------------------

struct listing {
	const char *machine; // NULL: all
	json_t *json; // NULL: a table
};

static int list_one(void *opaque, const struct store_snapshot *s)
{
	const struct listing *listing = opaque;
	char when[32] = "";
	time_t t = (time_t)s->created_s;
	struct tm tm;

	if (listing->machine && strcmp(listing->machine, s->machine) != 0)
		return 0;
	if (listing->json) {
		json_array_append_new(listing->json, snapshot_json(s));
		return 0;
	}
	if (localtime_r(&t, &tm))
		strftime(when, sizeof(when), "%F %T", &tm);
	printf("%-12.12s %-20s %-16s %-19s %8lluM %8lluM %s%.12s\n", s->id, s->machine, s->tag,
		when, (unsigned long long)(s->memory_bytes / MIB),
		(unsigned long long)((s->written_bytes + MIB - 1) / MIB), s->parent[0] ? "on " : "",
		s->parent);
	return 0;
}

static void list_broken(void *opaque, const char *dir, const struct err *err)
{
	(void)opaque;
	fprintf(stderr, "mayfly snapshots: %s: %s\n", dir, err->msg);
}

static int list(const char *machine, bool json)
{
	struct listing listing = {.machine = machine, .json = json ? json_array() : NULL};
	struct err err = {0};

	if (!json)
		printf("%-12s %-20s %-16s %-19s %9s %9s %s\n", "ID", "MACHINE", "TAG", "TAKEN",
			"MEMORY", "WRITTEN", "BUILDS");
	if (store_each(list_one, list_broken, &listing, &err) < 0) {
		json_decref(listing.json);
		return cli_fail("snapshots", &err);
	}
	if (json)
		print_json(listing.json);
	return 0;
}

static int verify_one(const struct store_snapshot *s, struct err *err)
{
	int r = chains_check(s, true, err);

	if (r == 0)
		printf("%s is whole\n", s->id);
	return r;
}

// And the layers of the machine's disks that no snapshot has any more; while it runs they are in
// use.
static int merge_disks(const char *machine, struct err *err)
{
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX];

	if (home_find(machine, dir, NULL) < 0)
		return 0;
	lock_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (lock_fd < 0 || flock(lock_fd, LOCK_EX | LOCK_NB) < 0 ||
		home_running(dir, NULL, NULL) != 0)
		return 0;
	return MIN(layers_merge(dir, 2, err), 0);
}

static int merge_one(const struct store_snapshot *s, struct err *err)
{
	int r = chains_merge(s, err);

	return r < 0 ? r : merge_disks(s->machine, err);
}

int snapshots_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly snapshots [--json] [list [NAME]]\n"
		"       mayfly snapshots verify|merge|rm SNAPSHOT...\n"
		"       mayfly snapshots prune [--keep N] MACHINE...\n"
		"\n"
		"Lists snapshots, of one machine or of all; verifies that they are as they were\n"
		"written, with what they build upon; merges into each what it builds upon, so that "
		"it\n"
		"stands alone; removes them. One that another builds upon is not removed. A "
		"SNAPSHOT is\n"
		"MACHINE@TAG, MACHINE@ for its latest, or the beginning of an id.\n"
		"\n"
		"prune removes those of a machine that have no tag, but for the latest N (default "
		"0);\n"
		"what stays is merged where it builds upon one that goes. Merge and prune also "
		"make "
		"one\n"
		"layer of those of the machine's disks that no snapshot has any more, if it is "
		"down.\n";
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"keep", required_argument, NULL, 'k'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	int (*act)(const struct store_snapshot *s, struct err *err) = NULL;
	struct err bad = {0};
	uint64_t keep = 0;
	const char *what;
	bool json = false, prune;
	int opt, status = 0;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'j') {
			json = true;
			continue;
		}
		if (opt == 'k') {
			if (parse_uint(optarg, 0, UINT32_MAX, &keep, &bad) < 0)
				return cli_bad_option("snapshots", &bad);
			continue;
		}
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	what = optind < argc ? argv[optind++] : "list";
	if (!strcmp(what, "list") && argc - optind <= 1)
		return list(optind < argc ? argv[optind] : NULL, json);
	if (!strcmp(what, "verify"))
		act = verify_one;
	else if (!strcmp(what, "rm"))
		act = store_remove;
	else if (!strcmp(what, "merge"))
		act = merge_one;
	prune = !strcmp(what, "prune");
	if ((!act && !prune) || optind == argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	for (; optind < argc; optind++) {
		struct store_snapshot s;
		struct err err = {0};
		int r;

		if (prune) {
			r = chains_prune(argv[optind], (unsigned int)keep, &err);
			if (r == 0)
				r = merge_disks(argv[optind], &err);
		} else {
			r = store_find(argv[optind], &s, &err);
			if (r == 0)
				r = act(&s, &err);
		}
		if (r < 0)
			status = cli_fail("snapshots", &err);
	}
	return status;
}

// --- restore ---------------------------------------------------------------------------------

// The options that those verbs share which start machines. Returns 0 to go on, or the exit status
// plus one.
#define START_OPTIONS_HELP                                                                        \
	"      --memory-restore auto|mapped|lazy|eager\n"                                         \
	"                      how its memory is read (default auto: mapped from the file, or,\n" \
	"                      of one that is compressed, when it is wanted)\n"                   \
	"      --timeout TIME  give up after TIME (default 3m)\n"                                 \
	"      --timings       tell on stderr what took how long\n"

static int start_options(int argc, char **argv, const char *verb, const char *help,
	struct life_start *ret_start, bool *ret_timings)
{
	static const struct option options[] = {
		{"memory-restore", required_argument, NULL, 'm'},
		{"timeout", required_argument, NULL, 'T'},
		{"timings", no_argument, NULL, 't'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	enum vm_memory_way way;
	struct err err = {0};
	int opt;

	*ret_start = (struct life_start){.timeout_ns = LIFE_BOOT_TIMEOUT_NS};
	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'T') {
			if (parse_duration(optarg, &ret_start->timeout_ns, &err) < 0)
				return 1 + cli_bad_option(verb, &err);
		} else if (opt == 'm') {
			if (vm_memory_way_parse(optarg, &way, &err) < 0)
				return 1 + cli_bad_option(verb, &err);
			ret_start->memory_way = optarg;
		} else if (opt == 't') {
			*ret_timings = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return 1 + (opt == 'h' ? 0 : EXIT_USAGE);
		}
	}
	return 0;
}

static void print_timings(const struct life_start *start)
{
	fprintf(stderr, "%-30s %10.3f ms\n%-30s %10.3f ms\n", "start to restored",
		(double)start->restored_ns / 1e6, "restored to awake",
		(double)(start->ready_ns - start->restored_ns) / 1e6);
}

// How deep an agent may reach, and into which folders of the host, is the owner's word of today,
// not that of the snapshot's day: what was lowered since stays low, in the machine and in what is
// forked from its snapshots.
static void keep_access(const char *dir, bool raise, struct config *config)
{
	struct config now = {0};

	if (read_config(dir, &now, NULL) < 0)
		now = (struct config){.access = CONFIG_ACCESS_OBSERVE};
	if (raise || now.access < config->access)
		config->access = now.access;
	if (raise || strcmp(now.folders, config->folders) != 0)
		snprintf(config->folders, sizeof(config->folders), "%s", raise ? now.folders : "");
}

// And what it may reach. A network card is part of the machine that the snapshot holds: it does not
// come back where the owner has taken it away since. What is forked has no more than either.
static int keep_reach(const char *dir, bool raise, struct config *config, struct err *err)
{
	static struct config now; // it is large
	const bool rules = config_net_has_rules(&config->net);
	const bool card = config_net_has_device(&config->net);

	if (read_config(dir, &now, NULL) < 0)
		config_defaults(&now);
	if (rules ? !config_net_has_rules(&now.net) : card && now.net.mode != config->net.mode)
		return err_set(err, -EPERM,
			"the snapshot has a network card (%s) and the machine has none any more: "
			"set "
			"[net] mode in %s/vm.ini to %s if it is to be so again",
			config_net_name(config->net.mode), dir, config_net_name(config->net.mode));
	if (rules) {
		config->net.card = true;
		if (raise)
			config->net.mode = now.net.mode;
		else if (config->net.mode != now.net.mode)
			config->net.mode = CONFIG_NET_NONE;
	} else if (card || now.net.mode == CONFIG_NET_TAP || now.net.mode == CONFIG_NET_PASST) {
		return 0;
	} else if (now.net.mode != CONFIG_NET_NAT && (raise || now.net.mode == CONFIG_NET_NONE)) {
		// Whether or not it has a card now: the snapshot's machine has none.
		config->net.mode = now.net.mode;
	}
	if (raise) {
		config->allow = now.allow;
		config->keep = now.keep;
		return 0;
	}
	allow_narrow(&config->allow, &now.allow);
	if (config->keep.nr && now.keep.nr) {
		allow_narrow(&config->keep, &now.keep);
		if (!config->keep.nr) // which would mean all of the list
			config->net.mode = CONFIG_NET_NONE;
	} else if (now.keep.nr) {
		config->keep = now.keep;
	}
	return 0;
}

// The machine is that of the snapshot again, so its vm.ini is.
static int replace_config(const char *dir, struct config *config, struct err *err)
{
	char fresh[PATH_MAX], path[PATH_MAX];
	int r;

	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path) ||
		snprintf(fresh, sizeof(fresh), "%s/vm.ini.new", dir) >= (int)sizeof(fresh))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	unlink(fresh);
	r = config_write(fresh, config, err);
	if (r == 0 && rename(fresh, path) < 0)
		r = err_errno(err, -errno, "%s", path);
	return r;
}

// A snapshot by its full name, or by a tag of this machine.
static int find_of(
	const char *machine, const char *name, struct store_snapshot *ret, struct err *err)
{
	char full[HOME_NAME_MAX + STORE_TAG_MAX + 2];

	if (!strchr(name, '@') && store_check_tag(name, NULL) == 0) {
		snprintf(full, sizeof(full), "%.*s@%.*s", HOME_NAME_MAX, machine, STORE_TAG_MAX,
			name);
		if (store_find(full, ret, NULL) == 0)
			return 0;
	}
	return store_find(name, ret, err);
}

int restore_main(int argc, char **argv)
{
	static const char help[] = "Usage: mayfly restore [OPTION]... NAME SNAPSHOT\n"
				   "\n"
				   "Takes a machine back to a snapshot, and goes on from there; "
				   "what it is now is lost.\n"
				   "It stays who it is. The guest gets the time of day and fresh "
				   "randomness. SNAPSHOT is\n"
				   "a tag of this machine, MACHINE@TAG, MACHINE@ for its latest, "
				   "or the beginning of an "
				   "id.\n"
				   "\n" START_OPTIONS_HELP;
	struct life_start start;
	struct store_snapshot snapshot = {0};
	struct config config = {0}, before = {0};
	char dir[PATH_MAX] = "";
	struct err err = {0};
	CLEANUP_FD int lock_fd = -1;
	bool timings = false;
	int r = start_options(argc, argv, "restore", help, &start, &timings);

	if (r > 0)
		return r - 1;
	if (argc - optind != 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = home_find(argv[optind], dir, &err);
	if (r == 0)
		r = find_of(argv[optind], argv[optind + 1], &snapshot, &err);
	// Before the machine is ended: whether it will do.
	if (r == 0)
		r = chains_check(&snapshot, false, &err);
	if (r == 0)
		r = read_config(snapshot.dir, &config, &err);
	if (r == 0)
		r = check_disks(&config, &err);
	if (r == 0)
		r = keep_reach(dir, true, &config, &err);
	if (r == 0)
		r = life_down(dir, true, &err);
	if (r == 0) {
		lock_fd = life_lock(dir, &err);
		r = MIN(lock_fd, 0);
	}
	if (r == 0)
		r = read_config(dir, &before, &err);
	if (r == 0) {
		keep_access(dir, true, &config);
		r = keep_reach(dir, true, &config, &err);
	}
	if (r == 0)
		r = replace_config(dir, &config, &err);
	start.dir = dir;
	start.snapshot = snapshot.dir;
	if (r == 0) {
		r = life_up(&start, &err);
		// It can still be started as it was.
		if (r < 0)
			(void)replace_config(dir, &before, NULL);
	}
	if (r < 0)
		return cli_fail("restore", &err);
	if (timings)
		print_timings(&start);
	return 0;
}

// --- fork ------------------------------------------------------------------------------------

static int fork_one(const char *name, const struct store_snapshot *snapshot,
	struct life_start *start, struct err *err)
{
	CLEANUP_FD int lock_fd = -1;
	struct config config = {0};
	char dir[PATH_MAX];
	int r = read_config(snapshot->dir, &config, err);

	if (r == 0)
		r = check_disks(&config, err);
	if (r == 0 && home_find(snapshot->machine, dir, NULL) == 0) {
		keep_access(dir, false, &config);
		r = keep_reach(dir, false, &config, err);
	}
	if (r == 0)
		r = home_create(name, &config, dir, err);
	if (r < 0)
		return r;
	lock_fd = life_lock(dir, err);
	r = MIN(lock_fd, 0);
	start->dir = dir;
	start->snapshot = snapshot->dir;
	start->hostname = name;
	if (r == 0)
		r = life_up(start, err);
	start->dir = start->snapshot = start->hostname = NULL;
	if (r < 0)
		(void)home_remove(dir, NULL);
	return r;
}

// How many snapshots a diff would build upon.
static unsigned int chain_length(const char *id)
{
	struct store_snapshot s;
	unsigned int length = 0;

	while (id[0] && length <= CHAIN_MAX && store_find(id, &s, NULL) == 0) {
		length++;
		id = s.parent;
	}
	return length;
}

// A snapshot of a running machine, for its forks alone. Nobody builds upon it.
static int take_for_forks(const char *name, struct store_snapshot *ret, struct err *err)
{
	struct take what = {.tag = "", .control_fd = -1};
	struct running machine;
	json_t *status = NULL;
	const char *since;
	int r = running_find(name, &machine, err);

	what.machine = &machine;
	if (r == 0) {
		what.control_fd = control_connect(machine.run_dir, err);
		r = MIN(what.control_fd, 0);
	}
	if (r == 0)
		r = control_call(
			what.control_fd, "status", NULL, -1, now_ns() + CALL_NS, &status, err);
	if (r == 0) {
		since = json_string_value(json_object_get(status, "changes_since"));
		what.diff = since && chain_length(since) > 0 && chain_length(since) < CHAIN_MAX;
		r = take(&what, ret, NULL, err);
	}
	json_decref(status);
	fd_close(&what.control_fd);
	return r;
}

int fork_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly fork [OPTION]... SOURCE NAME...\n"
		"\n"
		"Makes machines that go on from SOURCE: a machine that is running (it stays as it "
		"is),\n"
		"or a snapshot (MACHINE@TAG, MACHINE@ for its latest, or the beginning of an id). "
		"Each\n"
		"has a hostname (its NAME), a machine id, a boot id and randomness of its own "
		"before\n"
		"anything else happens in it.\n"
		"\n" START_OPTIONS_HELP;
	struct store_snapshot snapshot;
	struct life_start options;
	char dir[PATH_MAX];
	struct err err = {0};
	bool timings = false, own;
	int r = start_options(argc, argv, "fork", help, &options, &timings), status = 0;

	if (r > 0)
		return r - 1;
	if (argc - optind < 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	for (int i = optind + 1; i < argc; i++)
		if (home_check_name(argv[i], &err) < 0)
			return cli_bad_option("fork", &err);
	own = !strchr(argv[optind], '@') && home_find(argv[optind], dir, NULL) == 0;
	r = own ? take_for_forks(argv[optind], &snapshot, &err)
		: store_find(argv[optind], &snapshot, &err);
	if (r < 0)
		return cli_fail("fork", &err);
	for (int i = optind + 1; i < argc && r == 0; i++) {
		struct life_start start = options;

		r = fork_one(argv[i], &snapshot, &start, &err);
		if (r < 0)
			status = cli_fail("fork", &err);
		else if (timings)
			print_timings(&start);
	}
	// The forks have it open: that is enough.
	if (own && store_remove(&snapshot, &err) < 0)
		status = cli_fail("fork", &err);
	return status;
}

// --- suspend and resume ----------------------------------------------------------------------

static int suspended_name(const char *dir, char ret_name[128], struct err *err)
{
	if (snprintf(ret_name, 128, "%s@" SUSPENDED_TAG, base_name(dir)) >= 128)
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	return 0;
}

int suspended_resume(struct life_start *start, struct err *err)
{
	struct store_snapshot snapshot;
	char name[128];
	int r = suspended_name(start->dir, name, err);

	if (r < 0)
		return r;
	r = store_find(name, &snapshot, err);
	if (r == -ENOENT)
		return 0;
	start->snapshot = snapshot.dir;
	if (r == 0)
		r = life_up(start, err);
	start->snapshot = NULL;
	if (r < 0)
		return r;
	// It runs, whatever becomes of that; but it must not be taken for suspended again.
	if (store_release(&snapshot, err) < 0)
		fprintf(stderr, "mayfly: the snapshot that it was suspended as stays: %s\n",
			err->msg);
	return 1;
}

int suspended_is(const char *dir, struct err *err)
{
	struct store_snapshot snapshot;
	struct err why = {0};
	char name[128];
	int r = suspended_name(dir, name, &why);

	if (r == 0)
		r = store_find(name, &snapshot, &why);
	return r == -ENOENT ? 0 : r < 0 ? err_set(err, r, "%s", why.msg) : 1;
}

static int suspend(const char *name, struct err *err)
{
	struct take what = {.tag = SUSPENDED_TAG, .control_fd = -1};
	struct store_snapshot snapshot, stale;
	struct running machine;
	char full[128];
	int r = running_find(name, &machine, err);

	what.machine = &machine;
	if (r == 0)
		r = suspended_name(machine.dir, full, err);
	// The machine runs: what it was once suspended as is of no more use.
	if (r == 0 && store_find(full, &stale, NULL) == 0)
		r = store_release(&stale, err);
	if (r == 0) {
		what.control_fd = control_connect(machine.run_dir, err);
		r = MIN(what.control_fd, 0);
	}
	if (r == 0)
		r = control_call(what.control_fd, "pause", NULL, -1, now_ns() + CALL_NS, NULL, err);
	if (r == 0) {
		r = take(&what, &snapshot, NULL, err);
		// Nothing is lost: it goes on as if nobody had asked.
		if (r < 0)
			control_call(what.control_fd, "resume", NULL, -1, now_ns() + CALL_NS, NULL,
				NULL);
	}
	fd_close(&what.control_fd);
	return r < 0 ? r : life_down(machine.dir, true, err);
}

int suspend_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly suspend NAME...\n"
		"\n"
		"Puts machines aside: all that they are is kept, and their memory returns to the\n"
		"host. `mayfly resume`, or `mayfly up`, goes on with them.\n";
	int opt, status = 0;
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (optind == argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	for (; optind < argc; optind++) {
		struct err err = {0};

		if (suspend(argv[optind], &err) < 0)
			status = cli_fail("suspend", &err);
	}
	return status;
}

int resume_main(int argc, char **argv)
{
	static const char help[] = "Usage: mayfly resume [OPTION]... NAME\n"
				   "\n"
				   "Goes on with a machine that `mayfly suspend` has put aside. It "
				   "gets the time of day\n"
				   "and fresh randomness.\n"
				   "\n" START_OPTIONS_HELP;
	struct life_start start;
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX];
	struct err err = {0};
	bool timings = false;
	int r = start_options(argc, argv, "resume", help, &start, &timings);

	if (r > 0)
		return r - 1;
	if (argc - optind != 1) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	r = home_find(argv[optind], dir, &err);
	if (r == 0) {
		lock_fd = life_lock(dir, &err);
		r = MIN(lock_fd, 0);
	}
	if (r == 0)
		r = home_running(dir, NULL, &err);
	if (r == 1)
		return 0; // as up: what is wanted is so
	start.dir = dir;
	if (r == 0) {
		r = suspended_resume(&start, &err);
		if (r == 0)
			r = err_set(&err, -ENOENT, "'%s' is not suspended (mayfly up %s)",
				argv[optind], argv[optind]);
	}
	if (r < 0)
		return cli_fail("resume", &err);
	if (timings)
		print_timings(&start);
	return 0;
}
