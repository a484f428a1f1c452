// SPDX-License-Identifier: Apache-2.0
// mayfly config: what is in force for a machine, and where each value comes from. One thread.
#include "vmm/config.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "vmm/base/fd.h"

#define TEXT_MAX 131072U

static const char help[] =
	"Usage: mayfly config [--json] NAME\n"
	"\n"
	"Prints what is in force for a machine, and where each value comes from: a line of its\n"
	"vm.ini, or the default.\n";

struct listing {
	const char *path, *text; // of vm.ini
	json_t *list;
};

static int add(struct listing *listing, const char *section, const char *key, const char *value)
{
	unsigned int line = config_line(listing->text, section, key);
	json_t *entry = json_pack("{s:s, s:s, s:s, s:s}", "section", section, "key", key, "value",
		value, "from", line ? "file" : "default");

	if (line) {
		json_object_set_new(entry, "file", json_string(listing->path));
		json_object_set_new(entry, "line", json_integer(line));
	}
	return json_array_append_new(listing->list, entry) < 0 ? -ENOMEM : 0;
}

// text is what config_print() writes: [section], and KEY = VALUE.
static int take_apart(struct listing *listing, char *text)
{
	char *section = text, *line, *value;
	int r = 0;

	while (r == 0 && (line = strsep(&text, "\n"))) {
		if (line[0] == '[') {
			section = line + 1;
			section[strcspn(section, "]")] = '\0';
			continue;
		}
		value = strstr(line, " = ");
		if (!value)
			continue;
		*value = '\0';
		r = add(listing, section, line, value + 3);
	}
	return r;
}

static int print_config(const struct config *config, char **ret_text, struct err *err)
{
	CLEANUP_FD int fd = memfd_create("config", MFD_CLOEXEC);
	char *text = calloc(1, TEXT_MAX + 1);
	int r = fd < 0 ? -errno : !text ? -ENOMEM : config_print(fd, config);

	if (r == 0 && fd_pread_full(fd, text, TEXT_MAX, 0) < 0)
		r = -EIO;
	if (r < 0) {
		free(text);
		return err_errno(err, r, "config");
	}
	*ret_text = text;
	return 0;
}

static int explain(const char *name, json_t *list, struct err *err)
{
	CLEANUP_FREE char *file = NULL;
	CLEANUP_FREE char *text = NULL;
	char dir[PATH_MAX], path[PATH_MAX];
	struct listing listing = {.path = path, .list = list};
	struct config config;
	size_t len;
	int r = home_find(name, dir, err);

	if (r < 0)
		return r;
	if (snprintf(path, sizeof(path), "%s/vm.ini", dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", dir);
	r = config_read(path, &config, err);
	if (r == 0)
		r = fd_read_file(path, TEXT_MAX, &file, &len, err);
	if (r == 0)
		r = print_config(&config, &text, err);
	if (r < 0)
		return r;
	listing.text = file;
	r = take_apart(&listing, text);
	// What is left out where it is the default.
	if (r == 0 && config.net.mode == CONFIG_NET_NONE)
		r = add(&listing, "net", "mode", "none");
	if (r == 0 && config.access == CONFIG_ACCESS_OBSERVE && !config.folders[0])
		r = add(&listing, "mcp", "access", config_access_name(config.access));
	return r < 0 ? err_errno(err, r, "config") : 0;
}

static const char *text_of(const json_t *entry, const char *key)
{
	return json_string_value(json_object_get(entry, key));
}

static void print_table(const json_t *list)
{
	const char *section = "";
	const json_t *entry;
	size_t i;

	json_array_foreach(list, i, entry)
	{
		const char *value = text_of(entry, "value");
		json_int_t line = json_integer_value(json_object_get(entry, "line"));

		if (strcmp(section, text_of(entry, "section")) != 0)
			printf("%s[%s]\n", i ? "\n" : "", text_of(entry, "section"));
		section = text_of(entry, "section");
		printf("%-14s = %-40s ; ", text_of(entry, "key"), value);
		if (line)
			printf("%s:%lld\n", text_of(entry, "file"), line);
		else
			puts("default");
	}
}

int config_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	json_t *list;
	struct err err = {0};
	bool json = false;
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'j') {
			json = true;
			continue;
		}
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	if (argc - optind != 1) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	list = json_array();
	r = explain(argv[optind], list, &err);
	if (r < 0) {
		json_decref(list);
		// What is wrong in vm.ini is not wrong on the command line.
		return cli_fail("config", &err);
	}
	if (json) {
		json_dumpf(list, stdout, JSON_INDENT(2));
		putchar('\n');
	} else {
		print_table(list);
	}
	json_decref(list);
	return 0;
}
