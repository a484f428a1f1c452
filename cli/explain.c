// SPDX-License-Identifier: Apache-2.0
// mayfly explain: what a machine can reach, see and use, and which setting says so. One thread.
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/secret.h"
#include "vmm/config.h"

static const char help[] =
	"Usage: mayfly explain [--json] NAME\n"
	"\n"
	"Tells what a machine can reach, see and use, and which setting of its vm.ini "
	"says so.\n";

// One line: a verb, what it is about, and where that is set.
static void say(json_t *list, const char *can, const char *setting, const char *fmt, ...)
	PRINTF_LIKE(4, 5);

static void say(json_t *list, const char *can, const char *setting, const char *fmt, ...)
{
	char text[ALLOW_HOST_BYTES + PATH_MAX];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	json_array_append_new(
		list, json_pack("{s:s, s:s, s:s}", "can", can, "what", text, "setting", setting));
}

static void say_rules(json_t *list, const struct allow_list *rules, const char *setting)
{
	for (unsigned int i = 0; i < rules->nr; i++) {
		char rule[ALLOW_HOST_BYTES + 16];

		allow_rule_print(&rules->rules[i], rule, sizeof(rule));
		say(list, "reach", setting, "%s%s", rule,
			rules->rules[i].port ? "" : " (ports 80 and 443)");
	}
}

static int explain_net(json_t *list, const char *dir, const struct config *config, struct err *err)
{
	int up = home_running(dir, NULL, err), proxy;

	switch (config->net.mode) {
	case CONFIG_NET_NONE:
		say(list, "reach", "[net] mode = none", "nothing: it has no %s and no proxy",
			config->net.card ? "network card that leads anywhere" : "network card");
		break;
	case CONFIG_NET_TAP:
		say(list, "reach", "[net] mode = tap", "all that the host's interface %s leads to",
			config->net.tap);
		break;
	case CONFIG_NET_PASST:
		say(list, "reach", "[net] mode = passt",
			"all that this host's user reaches, services of the host but for its "
			"loopback interface among it");
		break;
	case CONFIG_NET_NAT:
		say(list, "reach", "[net] mode = nat",
			"the public Internet's addresses (IPv4), but none of this host's");
		say_rules(list, &config->allow, "[net] allow");
		break;
	case CONFIG_NET_ALLOWLIST:
		if (!config->allow.nr && !config->keep.nr)
			say(list, "reach", "[net] allow", "nothing: the list is empty");
		say_rules(list, config->keep.nr ? &config->keep : &config->allow,
			config->keep.nr ? "[net] keep" : "[net] allow");
		proxy = up == 1 ? egress_running(dir, err) : 0;
		if (proxy < 0)
			return proxy;
		if (up == 1 && !proxy)
			say(list, "reach", "the proxy has ended: mayfly net NAME allowlist",
				"nothing at the moment");
		break;
	}
	return MIN(up, 0);
}

static int explain_secrets(json_t *list, const char *name, struct err *err)
{
	static struct secrets secrets;
	int r = secrets_load(name, &secrets, err);

	for (unsigned int i = 0; r == 0 && i < secrets.nr; i++)
		say(list, "use", "mayfly secret",
			"the credential '%s' towards %s, without having it", secrets.all[i].name,
			secrets.all[i].host.name);
	explicit_bzero(&secrets, sizeof(secrets));
	return r;
}

static void explain_disks(json_t *list, const struct config *config)
{
	static const char *const modes[] = {
		[CONFIG_DISK_OVERLAY] = "what it writes goes to a layer of its own",
		[CONFIG_DISK_RAW] = "and write to it",
		[CONFIG_DISK_RO] = "read-only",
	};

	for (unsigned int i = 0; i < CONFIG_DISKS_MAX; i++) {
		const struct config_disk *disk = &config->disks[i];
		char setting[32];

		if (!config_has_disk(disk))
			continue;
		snprintf(setting, sizeof(setting), "[%s]", config_disk_name(i));
		if (disk->file[0])
			say(list, "see", setting, "the file %s: %s", disk->file, modes[disk->mode]);
		else
			say(list, "use", setting, "a blank disk of %lluM",
				(unsigned long long)(disk->size_bytes / MIB));
	}
	say(list, "see", "there is no setting for more", "no other file of this host");
}

static void explain_agents(json_t *list, const struct config *config)
{
	const enum config_access access = config->access;
	struct config_folder folder;

	static const char *const may[] = {
		[CONFIG_ACCESS_NONE] = "nothing: there is no endpoint",
		[CONFIG_ACCESS_OBSERVE] = "look into it",
		[CONFIG_ACCESS_MANAGE] =
			"look into it and change its files, packages and snapshots",
		[CONFIG_ACCESS_EXEC] = "do all in it, commands too",
	};
	char setting[64];

	snprintf(setting, sizeof(setting), "[mcp] access = %s", config_access_name(access));
	say(list, "agents", setting, "%s", may[access]);
	for (unsigned int i = 0;
		access >= CONFIG_ACCESS_MANAGE && config_folder(config, i, &folder); i++)
		say(list, "agents", "[mcp] folders", "copy files between it and %s of this host%s",
			folder.path, folder.write ? ", both ways" : ": into the machine");
}

static int explain(const char *name, json_t *list, struct err *err)
{
	static struct config config; // it is large
	char dir[PATH_MAX], ini[PATH_MAX];
	int r = home_find(name, dir, err);

	if (r == 0 && snprintf(ini, sizeof(ini), "%s/vm.ini", dir) >= (int)sizeof(ini))
		r = err_errno(err, -ENAMETOOLONG, "%s", dir);
	if (r == 0)
		r = config_read(ini, &config, err);
	if (r == 0)
		r = explain_net(list, dir, &config, err);
	if (r < 0)
		return r;
	r = explain_secrets(list, name, err);
	if (r < 0)
		return r;
	explain_disks(list, &config);
	say(list, "use", "[machine] cpus, memory", "%u processor%s and %lluM of memory",
		config.cpus, config.cpus == 1 ? "" : "s",
		(unsigned long long)(config.memory_bytes / MIB));
	explain_agents(list, &config);
	return 0;
}

int explain_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	json_t *list = json_array(), *at;
	struct err err = {0};
	bool json = false;
	size_t i;
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) == 'j')
		json = true;
	if (opt != -1 || argc - optind != 1) {
		json_decref(list);
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	r = explain(argv[optind], list, &err);
	if (r == 0 && json) {
		json_dumpf(list, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	json_array_foreach(list, i, at)
	{
		if (r == 0 && !json)
			printf("%-7s %-60s  %s\n", json_string_value(json_object_get(at, "can")),
				json_string_value(json_object_get(at, "what")),
				json_string_value(json_object_get(at, "setting")));
	}
	json_decref(list);
	return r < 0 ? cli_bad_option("explain", &err) : 0;
}
