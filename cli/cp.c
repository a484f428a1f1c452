// SPDX-License-Identifier: Apache-2.0
// mayfly cp: copies between this host and a machine that is up. One thread, and one more that
// sends.
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/copy.h"
#include "cli/home.h"
#include "cli/launch.h"
#include "cli/running.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

#define PROGRESS_NS 200000000ULL

static const char help[] =
	"Usage: mayfly cp [OPTION]... SOURCE NAME:DESTINATION\n"
	"       mayfly cp [OPTION]... NAME:SOURCE DESTINATION\n"
	"\n"
	"Copies files and folders into a machine that is up, or out of it. A source that ends in\n"
	"/. is the content of the folder. Nothing that comes out of a machine can be written\n"
	"outside of DESTINATION.\n"
	"\n"
	"  -a, --archive         keep owners and set-id bits (as root)\n"
	"  -m, --max SIZE        out of a machine: end with an error rather than take more of\n"
	"                        the disk; each file counts 4K at least\n"
	"  -q, --quiet           no progress on a terminal\n"
	"\n"
	"Exit status: 0, 125 if something could not be copied, 2 for wrong usage.\n";

struct show {
	bool progress;
	_Atomic uint64_t last_ns;
};

static void clear_line(const struct show *show)
{
	if (show->progress)
		fputs("\r\033[K", stderr);
}

static void show_problem(void *ctx, const char *path, int errno_value)
{
	char text[PATH_MAX];

	tree_printable(text, sizeof(text), path);
	clear_line(ctx);
	fprintf(stderr, "mayfly cp: %s: %s\n", text, copy_problem_text(errno_value));
}

static void show_progress(void *ctx, uint64_t bytes)
{
	struct show *show = ctx;
	uint64_t now = now_ns();

	if (!show->progress || now - atomic_load(&show->last_ns) < PROGRESS_NS)
		return;
	atomic_store(&show->last_ns, now);
	fprintf(stderr, "\r%.1f MiB", (double)bytes / (double)MIB);
}

// "NAME:PATH": the name is a machine's, so that a local file with a colon needs only a slash.
static bool split(const char *text, char name[HOME_NAME_MAX + 1], const char **ret_path)
{
	const char *colon = strchr(text, ':');
	size_t len = colon ? (size_t)(colon - text) : 0;

	if (len == 0 || len > HOME_NAME_MAX)
		return false;
	memcpy(name, text, len);
	name[len] = '\0';
	*ret_path = colon[1] ? colon + 1 : "/";
	return home_check_name(name, NULL) == 0;
}

static int run(const char *name, const char *from, const char *to, bool in, struct copy *copy,
	struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	struct running m;
	int r = running_find(name, &m, err);

	if (r == 0)
		r = launch_take_signals(&launch, err);
	if (r == 0) {
		copy->run_dir = m.run_dir;
		copy->vsock = LAUNCH_VSOCK;
		copy->signal_fd = launch.signal_fd;
		copy->cancel_fd = -1;
		r = in ? copy_in(copy, from, to, err) : copy_out(copy, from, to, err);
		if (r < 0)
			running_explain(&m, r, err);
	}
	launch_end(&launch);
	return r;
}

int cp_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"archive", no_argument, NULL, 'a'},
		{"max", required_argument, NULL, 'm'},
		{"quiet", no_argument, NULL, 'q'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct show show = {.progress = isatty(STDERR_FILENO)};
	struct copy copy = {.problem = show_problem, .progress = show_progress, .ctx = &show};
	char from_name[HOME_NAME_MAX + 1], to_name[HOME_NAME_MAX + 1];
	const char *from, *to;
	bool from_guest, to_guest;
	struct err err = {0};
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "am:qh", options, NULL)) != -1) {
		switch (opt) {
		case 'a':
			copy.owner = true;
			break;
		case 'm':
			r = parse_size(optarg, &copy.max_bytes, &err);
			if (r < 0)
				return cli_bad_option("cp", &err);
			break;
		case 'q':
			show.progress = false;
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (argc - optind != 2) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	from = argv[optind];
	to = argv[optind + 1];
	from_guest = split(from, from_name, &from);
	to_guest = split(to, to_name, &to);
	if (from_guest == to_guest) {
		fprintf(stderr, "mayfly cp: one of SOURCE and DESTINATION is NAME:PATH\n");
		return EXIT_USAGE;
	}
	r = run(to_guest ? to_name : from_name, from, to, to_guest, &copy, &err);
	clear_line(&show);
	return r < 0 ? cli_fail("cp", &err) : 0;
}
