// SPDX-License-Identifier: Apache-2.0
// mayfly inspect: what a machine is, as JSON. One thread.
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/rootfs_store.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

#define TEXT_MAX 65536

static const char help[] =
	"Usage: mayfly inspect NAME\n"
	"\n"
	"What a machine is, as JSON: whether it runs, its vm.ini as it is in force, with the\n"
	"defaults, and the image that is its root.\n";

// Sections, keys and values: what config_print() writes.
static json_t *parse(char *text)
{
	json_t *all = json_object(), *section = all;
	char *line;

	while ((line = strsep(&text, "\n"))) {
		char *equals = strstr(line, " = ");

		if (line[0] == '[') {
			line[strcspn(line, "]")] = '\0';
			section = json_object();
			json_object_set_new(all, line + 1, section);
		} else if (equals) {
			*equals = '\0';
			// What is no UTF-8 is left out.
			json_object_set_new(section, line, json_string(equals + 3));
		}
	}
	return all;
}

static int config_json(const struct config *config, json_t **ret, struct err *err)
{
	static char text[TEXT_MAX];
	CLEANUP_FD int fd = memfd_create("vm.ini", MFD_CLOEXEC);
	ssize_t n;
	int r = fd < 0 ? -errno : config_print(fd, config);

	if (r < 0)
		return err_errno(err, r, "vm.ini");
	n = fd_pread_full(fd, text, sizeof(text) - 1, 0);
	if (n < 0)
		return err_errno(err, (int)n, "vm.ini");
	text[n] = '\0';
	*ret = parse(text);
	return 0;
}

static int inspect(const char *name, struct err *err)
{
	CLEANUP_ROOTFS struct rootfs image = {0};
	char dir[PATH_MAX], ini[PATH_MAX];
	struct err no_image = {0};
	struct config config;
	json_t *says = NULL, *all;
	pid_t pid = 0;
	int running = 0, r = home_find(name, dir, err);

	if (r == 0)
		r = running = home_running(dir, &pid, err);
	if (r >= 0 && snprintf(ini, sizeof(ini), "%s/vm.ini", dir) >= (int)sizeof(ini))
		r = err_errno(err, -ENAMETOOLONG, "%s", dir);
	if (r >= 0)
		r = config_read(ini, &config, err);
	if (r >= 0)
		r = config_json(&config, &says, err);
	if (r < 0)
		return r;
	all = json_pack("{s:s, s:s, s:s, s:o}", "name", name, "dir", dir, "state",
		running ? "running" : "stopped", "config", says);
	if (running)
		json_object_set_new(all, "pid", json_integer(pid));
	r = rootfs_of_machine(&config, &image, &no_image);
	if (r == 1)
		json_object_set_new(all, "image",
			json_pack("{s:s, s:s, s:O}", "id", image.id, "source", image.source,
				"config", image.config));
	else if (r < 0)
		json_object_set_new(all, "image", json_pack("{s:s}", "error", no_image.msg));
	json_dumpf(all, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(all);
	return 0;
}

int inspect_main(int argc, char **argv)
{
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	struct err err = {0};
	int opt = getopt_long(argc, argv, "h", options, NULL);

	if (opt == 'h') {
		fputs(help, stdout);
		return 0;
	}
	if (opt != -1 || optind + 1 != argc) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	if (home_check_name(argv[optind], &err) < 0)
		return cli_bad_option("inspect", &err);
	return inspect(argv[optind], &err) < 0 ? cli_fail("inspect", &err) : 0;
}
