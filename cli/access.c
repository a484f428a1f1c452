// SPDX-License-Identifier: Apache-2.0
// mayfly access: the level of a machine's MCP endpoint. One thread.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/life.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static const char help[] =
	"Usage: mayfly access [OPTION]... NAME [LEVEL]\n"
	"\n"
	"Shows or sets how deep an agent may reach into a machine through its MCP endpoint\n"
	"(mayfly mcp). It is [mcp] access in the machine's vm.ini, and in force at once, also in\n"
	"sessions that are open:\n"
	"\n"
	"  none     there is no endpoint\n"
	"  observe  look: files, processes, ports, logs, jobs (the default)\n"
	"  manage   and change files, install packages, take and restore snapshots\n"
	"  exec     and run commands: everything\n"
	"\n"
	"      --lower  refuse to raise it\n"
	"      --json   tell the level as JSON\n";

static int lower_or_set(const char *path, enum config_access level, bool lower, struct err *err)
{
	struct config now;
	int r = lower ? config_read(path, &now, err) : 0;

	if (r == 0 && lower && level > now.access)
		return err_set(err, -EPERM, "the level is %s, which only the owner may raise",
			config_access_name(now.access));
	return r < 0 ? r : config_edit(path, "mcp", "access", config_access_name(level), NULL, err);
}

int access_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"lower", no_argument, NULL, 'l'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	enum config_access level = CONFIG_ACCESS_OBSERVE;
	bool lower = false, json = false;
	CLEANUP_FD int lock_fd = -1;
	char dir[PATH_MAX], path[PATH_MAX];
	struct config config = {0};
	struct err err = {0};
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'l') {
			lower = true;
		} else if (opt == 'j') {
			json = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (argc - optind < 1 || argc - optind > 2 || (lower && argc - optind != 2)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	if (argc - optind == 2 && config_access_parse(argv[optind + 1], &level, &err) < 0)
		return cli_bad_option("access", &err);
	r = home_find(argv[optind], dir, &err);
	if (r == 0 && snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		r = err_errno(&err, -ENAMETOOLONG, "%s", dir);
	if (r == 0 && argc - optind == 2) {
		lock_fd = life_lock(dir, &err); // a restore writes vm.ini, too
		r = MIN(lock_fd, 0);
		if (r == 0)
			r = lower_or_set(path, level, lower, &err);
	}
	if (r == 0)
		r = config_read(path, &config, &err);
	if (r < 0)
		return cli_fail("access", &err);
	if (json)
		printf("{\"machine\": \"%s\", \"access\": \"%s\"}\n", argv[optind],
			config_access_name(config.access));
	else if (argc - optind == 1)
		puts(config_access_name(config.access));
	return 0;
}
