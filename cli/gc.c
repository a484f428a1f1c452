// SPDX-License-Identifier: Apache-2.0
// mayfly gc: removes what nothing uses. One thread.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/rootfs_store.h"
#include "cli/store.h"
#include "cli/work_persist.h"
#include "vmm/cgroup.h"

static const char help[] =
	"Usage: mayfly gc [--warm]\n"
	"\n"
	"Removes what nothing uses: what commands and machines that were killed have left, what\n"
	"machines of projects hand on whose folders are gone, and images whose names went to\n"
	"others and that no machine or snapshot needs.\n"
	"\n"
	"      --warm            also what warm starts go on from: the next mayfly run of each "
	"kind\n"
	"                        boots\n";

static int collect(bool warm, struct err *err)
{
	char golden[PATH_MAX];
	int pools = pool_gc(err), machines, snapshots, leftovers, projects, images;

	if (pools < 0)
		return pools;
	machines = home_sweep(err);
	if (machines < 0)
		return machines;
	snapshots = store_sweep(err);
	if (snapshots < 0)
		return snapshots;
	cgroup_sweep_ended();
	projects = work_persist_gc(err);
	if (projects < 0)
		return projects;
	images = rootfs_gc(&leftovers, err);
	if (images < 0)
		return images;
	printf("removed: %d leftovers, %d images\n",
		pools + machines + snapshots + leftovers + projects, images);
	if (!warm)
		return 0;
	if (home_golden(golden, err) < 0)
		return err->code;
	// Machines that go on from one have its memory open.
	return home_remove(golden, err);
}

int gc_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"warm", no_argument, NULL, 'w'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct err err = {0};
	bool warm = false;
	int opt;

	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'w') {
			warm = true;
			continue;
		}
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (optind != argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	return collect(warm, &err) < 0 ? cli_fail("gc", &err) : 0;
}
