// SPDX-License-Identifier: Apache-2.0
// mayfly watch: tells what changes in the files of a machine, a line a change. One thread.
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "cli/agent_files.h"
#include "cli/cli.h"
#include "cli/launch.h"
#include "cli/running.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

static const char help[] =
	"Usage: mayfly watch [OPTION]... NAME PATH\n"
	"\n"
	"Prints a line for each change of the file PATH in a machine that is up, or of the folder\n"
	"PATH and all that is in it: created, modified, attributes, deleted, or moved, and the "
	"path.\n"
	"The first line, watching, says that from now on nothing is missed; lost says that "
	"something\n"
	"was.\n"
	"\n"
	"  -n, --count N         end after N changes\n"
	"      --timeout TIME    end after TIME, like 30s or 5m, with status 124\n"
	"      --json            an object a line: change, path, from (of what moved), folder\n"
	"\n"
	"Exit status: 0, also when it is interrupted or PATH is gone; 124 after --timeout; 125 if "
	"it\n"
	"failed, 2 for wrong usage.\n";

struct watch {
	const char *path;
	bool as_json;
	uint64_t left; // changes until the end; UINT64_MAX: for ever
};

// A path below the watched one.
static void full_path(char *ret, size_t size, const char *top, const char *path)
{
	size_t len = strlen(top);
	bool slash = path[0] && len && top[len - 1] != '/';

	snprintf(ret, size, "%s%s%s", top, slash ? "/" : "", path);
}

// A name need not be text: then what is not ASCII in it becomes "?".
static json_t *text(const char *name)
{
	json_t *s = json_string(name);
	char plain[2 * PATH_MAX];
	size_t i;

	if (s)
		return s;
	for (i = 0; name[i] && i < sizeof(plain) - 1; i++)
		plain[i] = (unsigned char)name[i] < 0x80 ? name[i] : '?';
	plain[i] = '\0';
	return json_string(plain);
}

static void print_json(const struct agent_change *c)
{
	json_t *o = json_object();

	json_object_set_new(o, "change", json_string(c->change));
	json_object_set_new(o, "path", text(c->path));
	if (c->from)
		json_object_set_new(o, "from", text(c->from));
	json_object_set_new(o, "folder", json_boolean(c->folder));
	json_dumpf(o, stdout, JSON_COMPACT | JSON_ENSURE_ASCII);
	putchar('\n');
	json_decref(o);
}

static int print(void *ctx, const struct agent_change *change, struct err *err)
{
	struct watch *w = ctx;
	char full[2 * PATH_MAX], path[2 * PATH_MAX], from[2 * PATH_MAX];
	struct agent_change c = *change;

	full_path(full, sizeof(full), w->path, c.path);
	tree_printable(path, sizeof(path), full);
	c.path = path;
	if (c.from) {
		full_path(full, sizeof(full), w->path, c.from);
		tree_printable(from, sizeof(from), full);
		c.from = from;
	}
	if (w->as_json)
		print_json(&c);
	else if (c.from)
		printf("%-10s %s -> %s\n", c.change, c.from, c.path);
	else
		printf("%-10s %s%s\n", c.change, c.path, c.folder && c.path[1] ? "/" : "");
	if (fflush(stdout) != 0)
		return err_errno(err, -errno, "standard output");
	if (strcmp(c.change, "watching") != 0 && w->left != UINT64_MAX && --w->left == 0)
		return err_set(err, -ECANCELED, "seen enough");
	return 0;
}

static int run(const char *name, struct watch *w, uint64_t timeout_ns, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	struct running m;
	CLEANUP_FD int fd = -1;
	int r = running_find(name, &m, err);

	if (r == 0)
		r = fd = running_connect(&m, err);
	if (r >= 0)
		r = launch_take_signals(&launch, err);
	if (r == 0) {
		const struct agent_files files = {.conn_fd = fd,
			.signal_fd = launch.signal_fd,
			.cancel_fd = -1,
			.deadline_ns = timeout_ns ? now_ns() + timeout_ns : 0};

		r = agent_watch(&files, w->path, print, w, err);
		if (r < 0 && w->left && r != -EINTR && r != -ETIMEDOUT && r != -EPIPE)
			running_explain(&m, r, err);
	}
	launch_end(&launch);
	return r;
}

enum { OPT_TIMEOUT = 'T', OPT_JSON = 'J' };

int watch_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"count", required_argument, NULL, 'n'},
		{"timeout", required_argument, NULL, OPT_TIMEOUT},
		{"json", no_argument, NULL, OPT_JSON},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct watch w = {.left = UINT64_MAX};
	uint64_t timeout_ns = 0;
	struct err err = {0};
	int opt, r = 0;

	optind = 1;
	while (r == 0 && (opt = getopt_long(argc, argv, "n:h", options, NULL)) != -1) {
		switch (opt) {
		case 'n':
			r = parse_uint(optarg, 1, INT64_MAX, &w.left, &err);
			break;
		case OPT_TIMEOUT:
			r = parse_duration(optarg, &timeout_ns, &err);
			break;
		case OPT_JSON:
			w.as_json = true;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (r < 0)
		return cli_bad_option("watch", &err);
	if (argc - optind != 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	w.path = argv[optind + 1];
	r = run(argv[optind], &w, timeout_ns, &err);
	if (r == 0 || r == -EINTR || (r == -ECANCELED && w.left == 0))
		return 0;
	if (r == -ETIMEDOUT && timeout_ns)
		return EXIT_TIMEOUT;
	if (r == -EPIPE) // whoever reads has heard enough
		return EXIT_SIGPIPE;
	return cli_fail("watch", &err);
}
