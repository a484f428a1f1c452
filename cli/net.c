// SPDX-License-Identifier: Apache-2.0
// mayfly net: what a machine may reach, live, and what it was refused. One thread.
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/egress_proc.h"
#include "cli/home.h"
#include "cli/life.h"
#include "mcp/audit.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

#define DENIALS_MAX 256U // lines; the newest

static const char help[] =
	"Usage: mayfly net [OPTION]... NAME [WHAT]\n"
	"\n"
	"Shows or sets what a machine may reach. It has no network card then: its programs reach "
	"a\n"
	"proxy of this host (HTTP_PROXY and HTTPS_PROXY in their environment), which lets through\n"
	"what is on the machine's list, and writes each request down. It is [net] in the "
	"machine's\n"
	"vm.ini; what is set here is in force at once, and cuts what is no longer allowed.\n"
	"\n"
	"  allow [METHOD@]HOST[:PORT]...\n"
	"                        add to the list: a name, *.NAME for all names below it, or an\n"
	"                        address; without a port: 80 and 443. With a\n"
	"                        method (GET@HOST): that alone, where it is seen: not in TLS\n"
	"  deny HOST[:PORT]...   take from the list\n"
	"  allowlist             what is on the list can be reached\n"
	"  nat                   the public Internet can, through a network card, and of private\n"
	"                        addresses those on the list; of a machine that was started so\n"
	"  off, none             nothing can be; the list stays\n"
	"  denials               what was refused, and why\n"
	"  log                   all requests\n"
	"\n"
	"      --keep HOST[:PORT]  of off: leave this one reachable (or several: HOST,HOST)\n"
	"      --tighten           of off: refuse to leave more than can be reached now\n"
	"      --json              tell it as JSON\n"
	"\n"
	"Names that lead to addresses of private networks, of this host or of metadata services "
	"are\n"
	"refused, unless the address is on the list, too.\n";

struct net {
	const char *name;
	char dir[PATH_MAX], ini[PATH_MAX];
	struct config config;
	const char *keep;
	bool tighten, json;
};

// --- Requests --------------------------------------------------------------------------------

static const char *text_of(const json_t *record, const char *key)
{
	const char *text = json_string_value(json_object_get(record, key));

	return text ? text : "";
}

static long long number_of(const json_t *record, const char *key)
{
	return (long long)json_integer_value(json_object_get(record, key));
}

// A guest may have had a word in it: nothing of it drives a terminal.
static void print_text(const char *text)
{
	for (; *text; text++)
		putchar((unsigned char)*text >= ' ' && *text != 0x7f ? *text : '?');
}

static void print_json_line(const json_t *record)
{
	char *text = json_dumps(record, JSON_COMPACT | JSON_ENSURE_ASCII);

	if (text)
		puts(text);
	free(text);
}

static int log_record(void *opaque, const json_t *record)
{
	const struct net *net = opaque;

	if (net->json) {
		print_json_line(record);
		return 0;
	}
	printf("%-24s %-8s %-7s ", text_of(record, "time"), text_of(record, "decision"),
		text_of(record, "method"));
	print_text(text_of(record, "host"));
	printf(":%lld", number_of(record, "port"));
	if (json_object_get(record, "bytes_in"))
		printf(" %lld in, %lld out", number_of(record, "bytes_in"),
			number_of(record, "bytes_out"));
	if (json_object_get(record, "reason")) {
		printf("  ");
		print_text(text_of(record, "reason"));
	}
	putchar('\n');
	return 0;
}

// Those of the same kind together: how often, and when last.
static int add_denial(void *opaque, const json_t *record)
{
	json_t *list = opaque, *known = NULL;
	size_t i;

	if (strcmp(text_of(record, "decision"), "denied") != 0)
		return 0;
	for (i = 0; i < json_array_size(list) && !known; i++) {
		json_t *at = json_array_get(list, i);

		if (!strcmp(text_of(at, "host"), text_of(record, "host")) &&
			!strcmp(text_of(at, "reason"), text_of(record, "reason")) &&
			number_of(at, "port") == number_of(record, "port"))
			known = json_incref(at);
	}
	if (known)
		json_array_remove(list, i - 1);
	else
		known = json_pack("{s:s, s:I, s:s, s:i}", "host", text_of(record, "host"), "port",
			(json_int_t)number_of(record, "port"), "reason", text_of(record, "reason"),
			"times", 0);
	json_object_set_new(known, "times", json_integer(number_of(known, "times") + 1));
	json_object_set_new(known, "last", json_string(text_of(record, "time")));
	if (json_array_size(list) == DENIALS_MAX)
		json_array_remove(list, 0);
	return json_array_append_new(list, known) < 0 ? -ENOMEM : 0;
}

static void print_denials(const json_t *list)
{
	const json_t *at;
	size_t i;

	printf("%6s %-24s %-40s %s\n", "TIMES", "LAST", "HOST", "WHY");
	json_array_foreach(list, i, at)
	{
		char host[ALLOW_HOST_BYTES + 8];

		snprintf(host, sizeof(host), "%s:%lld", text_of(at, "host"), number_of(at, "port"));
		printf("%6lld %-24s ", number_of(at, "times"), text_of(at, "last"));
		print_text(host);
		printf("%*s ", (int)(strlen(host) < 40 ? 40 - strlen(host) : 0), "");
		print_text(text_of(at, "reason"));
		putchar('\n');
	}
}

static int show_requests(struct net *net, bool denials, struct err *err)
{
	char dir[PATH_MAX];
	json_t *list = json_array();
	int r = egress_dir(net->dir, dir, err);

	// Nothing was ever asked for.
	if (r == 0) {
		r = audit_each(dir, denials ? add_denial : log_record,
			denials ? (void *)list : (void *)net, err);
		r = r == -ENOENT ? 0 : r;
	}
	if (r == 0 && denials && net->json) {
		json_dumpf(list, stdout, JSON_INDENT(2) | JSON_ENSURE_ASCII);
		putchar('\n');
	} else if (r == 0 && denials) {
		print_denials(list);
	}
	json_decref(list);
	return r;
}

// --- The list --------------------------------------------------------------------------------

static bool is_in_force(const struct config *config, const struct allow_rule *rule)
{
	if (config->net.mode == CONFIG_NET_NAT)
		return rule->host.literal && !rule->method[0];
	return config->net.mode == CONFIG_NET_ALLOWLIST && !config->keep.nr;
}

static int show(const struct net *net, struct err *err)
{
	const struct config *config = &net->config;
	int running = egress_running(net->dir, err);
	json_t *rules = json_array(), *all;

	if (running < 0) {
		json_decref(rules);
		return running;
	}
	if (!net->json)
		printf("%s\n", config_net_name(config->net.mode));
	for (unsigned int i = 0; i < config->allow.nr; i++) {
		char rule[ALLOW_HOST_BYTES + 16];

		allow_rule_print(&config->allow.rules[i], rule, sizeof(rule));
		json_array_append_new(rules, json_string(rule));
		if (!net->json)
			printf("  %s%s\n", rule,
				is_in_force(config, &config->allow.rules[i]) ? "" : "  (not now)");
	}
	for (unsigned int i = 0; i < net->config.keep.nr && !net->json; i++) {
		char rule[ALLOW_HOST_BYTES + 16];

		allow_rule_print(&net->config.keep.rules[i], rule, sizeof(rule));
		printf("  only %s (mayfly net %s allowlist ends that)\n", rule, net->name);
	}
	if (net->json) {
		all = json_pack("{s:s, s:s, s:O, s:b}", "machine", net->name, "mode",
			config_net_name(net->config.net.mode), "allow", rules, "proxy", running);
		json_dumpf(all, stdout, JSON_INDENT(2));
		putchar('\n');
		json_decref(all);
	}
	json_decref(rules);
	return 0;
}

// A network card is part of the machine that runs, or was suspended.
static int check_mode(const struct net *net, struct err *err)
{
	int up;

	if (net->config.net.mode != CONFIG_NET_TAP && net->config.net.mode != CONFIG_NET_PASST)
		return 0;
	up = home_running(net->dir, NULL, err);
	if (up == 0)
		up = suspended_is(net->dir, err);
	return up <= 0 ? up
		       : err_set(err, -EBUSY,
				 "'%s' has a network card (%s), which cannot be taken out while it "
				 "runs: mayfly down %s first",
				 net->name, config_net_name(net->config.net.mode), net->name);
}

// And cannot be put in.
static int check_stopped(const struct net *net, struct err *err)
{
	int up = home_running(net->dir, NULL, err);

	if (up == 0)
		up = suspended_is(net->dir, err);
	return up <= 0 ? up
		       : err_set(err, -EBUSY,
				 "'%s' runs without a network card: mayfly down %s first",
				 net->name, net->name);
}

static int edit(struct net *net, const char *key, const char *value, struct err *err)
{
	return config_edit(net->ini, "net", key, value, &net->config, err);
}

static int edit_list(
	struct net *net, const char *key, const struct allow_list *list, struct err *err)
{
	char text[ALLOW_TEXT_BYTES];
	int r = allow_print(list, text, sizeof(text), err);

	return r < 0 ? r : edit(net, key, text, err);
}

// Whether nothing is on the list that cannot be reached now.
static int check_tighter(const struct net *net, const struct allow_list *keep, struct err *err)
{
	struct allow_list now, within = *keep;

	config_reach(&net->config, &now);
	allow_narrow(&within, &now);
	return within.nr == keep->nr ? 0
				     : err_set(err, -EPERM, "%s is more than '%s' can reach now",
					       net->keep, net->name);
}

static int set_mode(struct net *net, enum config_net_mode mode, struct err *err)
{
	struct allow_list keep = {0};
	const bool card = config_net_has_rules(&net->config.net);
	int r = check_mode(net, err);

	if (r == 0 && mode == CONFIG_NET_NAT && !card)
		r = check_stopped(net, err);
	// It is there as long as the machine may run, or go on from a snapshot.
	if (r == 0 && card && !net->config.net.card)
		r = edit(net, "card", "yes", err);
	if (r == 0 && net->keep)
		r = allow_parse(net->keep, &keep, err);
	if (r == 0 && net->tighten)
		r = check_tighter(net, &keep, err);
	// The list that is kept first: nothing is ever wider than what was asked for.
	if (r == 0 && (keep.nr || (net->config.keep.nr && mode == CONFIG_NET_ALLOWLIST)))
		r = edit_list(net, "keep", &keep, err);
	return r < 0 ? r
		     : edit(net, "mode", config_net_name(keep.nr ? CONFIG_NET_ALLOWLIST : mode),
			       err);
}

static int change_list(struct net *net, bool add, char **hosts, int nr, struct err *err)
{
	struct allow_list list = net->config.allow;
	int r = 0;

	for (int i = 0; i < nr && r == 0; i++) {
		struct allow_rule rule;

		r = allow_rule_parse(hosts[i], strlen(hosts[i]), &rule, err);
		if (r == 0 && add)
			r = allow_add(&list, &rule, err);
		else if (r == 0 && allow_remove(&list, &rule) == 0)
			r = err_set(err, -ENOENT, "%s is not on the list (mayfly net %s shows it)",
				hosts[i], net->name);
	}
	return r < 0 ? r : edit_list(net, "allow", &list, err);
}

// What vm.ini says now is what holds for the machine that runs.
static int put_in_force(struct net *net, struct err *err)
{
	unsigned int cut = 0;
	int r = home_running(net->dir, NULL, err);

	if (r <= 0)
		return r;
	// Of the two ways out, one is closed before the other is opened.
	if (net->config.net.mode == CONFIG_NET_NAT) {
		r = egress_end(net->dir, err);
		return r < 0 ? r : nat_reload(net->dir, err);
	}
	r = 0;
	if (config_net_has_rules(&net->config.net))
		r = nat_reload(net->dir, err);
	if (r == -ESRCH) // a guest can end what its card hangs on: nothing goes through there any
			 // more
		r = 0;
	// Whatever became of the card, the proxy is closed, or no wider than it may be.
	if (net->config.net.mode != CONFIG_NET_ALLOWLIST) {
		int ended = egress_end(net->dir, r < 0 ? NULL : err);

		return r < 0 ? r : ended;
	}
	if (r < 0) {
		egress_reload(net->dir, &cut, NULL);
		return r;
	}
	r = egress_reload(net->dir, &cut, err);
	if (r == -ESRCH)
		r = egress_start(net->dir, err);
	if (r == 0 && cut)
		fprintf(stderr, "mayfly net: %u connection%s cut\n", cut, cut == 1 ? "" : "s");
	return r;
}

static int change(struct net *net, const char *what, char **hosts, int nr, struct err *err)
{
	CLEANUP_FD int lock_fd = life_lock(net->dir, err); // a restore writes vm.ini, too
	int r = MIN(lock_fd, 0);

	if (r == 0)
		r = config_read(net->ini, &net->config, err);
	if (r < 0)
		return r;
	if (!strcmp(what, "allow") || !strcmp(what, "deny"))
		r = change_list(net, what[0] == 'a', hosts, nr, err);
	else
		r = set_mode(net,
			!strcmp(what, "allowlist") ? CONFIG_NET_ALLOWLIST
			: !strcmp(what, "nat")     ? CONFIG_NET_NAT
						   : CONFIG_NET_NONE,
			err);
	if (r == 0)
		r = put_in_force(net, err);
	if (r == 0 && !strcmp(what, "allow") && net->config.net.mode != CONFIG_NET_ALLOWLIST &&
		net->config.net.mode != CONFIG_NET_NAT)
		fprintf(stderr,
			"mayfly net: the mode is %s: the list counts after mayfly net %s "
			"allowlist\n",
			config_net_name(net->config.net.mode), net->name);
	return r;
}

static bool is_one_of(const char *what, const char *const *words)
{
	for (; *words; words++)
		if (!strcmp(what, *words))
			return true;
	return false;
}

int net_main(int argc, char **argv)
{
	static const char *const lists[] = {"allow", "deny", NULL};
	static const char *const others[] = {
		"allowlist", "nat", "off", "none", "denials", "log", NULL};
	static const struct option options[] = {
		{"keep", required_argument, NULL, 'k'},
		{"tighten", no_argument, NULL, 't'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	static struct net net;
	struct err err = {0};
	const char *what;
	int opt, r, nr;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'k') {
			net.keep = optarg;
		} else if (opt == 't') {
			net.tighten = true;
		} else if (opt == 'j') {
			net.json = true;
		} else {
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	nr = argc - optind - 2;
	what = nr >= 0 ? argv[optind + 1] : "";
	if (nr < -1 ||
		(nr >= 0 &&
			(is_one_of(what, lists) ? nr == 0 : nr > 0 || !is_one_of(what, others))) ||
		((net.keep || net.tighten) && strcmp(what, "off") != 0)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	net.name = argv[optind];
	r = home_find(net.name, net.dir, &err);
	if (r == 0 &&
		snprintf(net.ini, sizeof(net.ini), "%s/vm.ini", net.dir) >= (int)sizeof(net.ini))
		r = err_errno(&err, -ENAMETOOLONG, "%s", net.dir);
	if (r == 0 && nr < 0) {
		r = config_read(net.ini, &net.config, &err);
		if (r == 0)
			r = show(&net, &err);
	} else if (r == 0 && (!strcmp(what, "denials") || !strcmp(what, "log"))) {
		r = show_requests(&net, what[0] == 'd', &err);
	} else if (r == 0) {
		r = change(&net, what, argv + optind + 2, nr, &err);
	}
	return r < 0 ? cli_bad_option("net", &err) : 0;
}
