// SPDX-License-Identifier: Apache-2.0
// Tools for the machine's services, through its own service manager: systemd, OpenRC, or the
// scripts of /etc/init.d. A thread a call.
#include <errno.h>
#include <string.h>

#include "mcp/command.h"
#include "mcp/text.h"
#include "mcp/tool.h"

#define TIMEOUT_S    120U // the default; the schema says so
#define LIST_BYTES   (256 * KIB)
#define SERVICES_MAX 1000U

// Sets $manager: the one that runs, not one that only lies on the disk.
#define FIND_MANAGER                                                             \
	"has() { command -v \"$1\" >/dev/null 2>&1; }\n"                         \
	"if [ -d /run/systemd/system ] && has systemctl; then manager=systemd\n" \
	"elif has rc-service; then manager=openrc\n"                             \
	"elif has service && [ -d /etc/init.d ]; then manager=sysv\n"            \
	"else manager=none; fi\n"

// "MANAGER", then a line a service: "NAME\tRUNNING\tSTATE\tDESCRIPTION".
static const char list_script[] = FIND_MANAGER
	"say() { printf '%s\\t%s\\t%s\\t%s\\n' \"$@\"; }\n"
	"echo $manager\n"
	"case $manager in\n"
	"systemd)\n"
	"	systemctl list-units --type=service --all --no-legend --no-pager --plain |\n"
	"	while read -r unit load active sub description; do\n"
	"		case $load in not-found) continue ;; esac\n"
	"		case $active in active | reloading) running=1 ;; *) running=0 ;; esac\n"
	"		say \"${unit%.service}\" $running \"$active ($sub)\" \"$description\"\n"
	"	done ;;\n"
	"openrc)\n"
	"	rc-status --all --format ini |\n"
	"	while read -r name is state rest; do\n"
	"		case $is in =) ;; *) continue ;; esac\n"
	"		case $state in started) running=1 ;; *) running=0 ;; esac\n"
	"		say \"$name\" $running \"$state\" ''\n"
	"	done ;;\n"
	"sysv)\n"
	"	service --status-all 2>&1 |\n"
	"	while read -r open mark close name; do\n"
	"		case $mark in\n"
	"		+) say \"$name\" 1 running '' ;;\n"
	"		-) say \"$name\" 0 stopped '' ;;\n"
	"		'?') say \"$name\" 0 unknown '' ;;\n"
	"		esac\n"
	"	done ;;\n"
	"esac\n";

static const char service_script[] = FIND_MANAGER
	"action=$1 name=$2\n"
	"case $manager-$action in\n"
	"systemd-status) exec systemctl --no-pager --full --lines=20 status -- \"$name\" ;;\n"
	"systemd-*) exec systemctl --no-pager \"$action\" -- \"$name\" ;;\n"
	"openrc-enable) exec rc-update add \"$name\" ;;\n"
	"openrc-disable) exec rc-update del \"$name\" ;;\n"
	"openrc-*) exec rc-service \"$name\" \"$action\" ;;\n"
	"sysv-enable | sysv-disable)\n"
	"	has update-rc.d && exec update-rc.d \"$name\" \"$action\"\n"
	"	echo 'this machine cannot enable or disable services: it has no update-rc.d' >&2\n"
	"	exit 127 ;;\n"
	"sysv-*) exec service \"$name\" \"$action\" ;;\n"
	"*)\n"
	"	echo \"this machine has no service manager (its init is $(readlink /proc/1/exe)): "
	"\"\\\n"
	"		'what is to run can be started as a job, with exec_background' >&2\n"
	"	exit 127 ;;\n"
	"esac\n";

// --- The list --------------------------------------------------------------------------------

// Takes a field off the line, up to a tab or its end.
static json_t *field(const char **at, const char *end)
{
	const char *tab = memchr(*at, '\t', (size_t)(end - *at));
	const char *stop = tab ? tab : end;
	json_t *text = text_printable(*at, (size_t)(stop - *at));

	*at = tab ? tab + 1 : end;
	return text;
}

static json_t *tell_service(const char *line, size_t len)
{
	const char *at = line, *end = line + len;
	json_t *name = field(&at, end), *running = field(&at, end), *state = field(&at, end);
	json_t *description = field(&at, end);
	json_t *told = json_pack("{s:O, s:b, s:O}", "name", name, "running",
		!strcmp(json_string_value(running), "1"), "state", state);

	if (json_string_length(description))
		json_object_set(told, "description", description);
	json_decref(name);
	json_decref(running);
	json_decref(state);
	json_decref(description);
	return told;
}

static const char *manager_of(const char *line, size_t len)
{
	static const char *const managers[] = {"systemd", "openrc", "sysv"};

	for (size_t i = 0; i < ARRAY_SIZE(managers); i++)
		if (len == strlen(managers[i]) && !memcmp(line, managers[i], len))
			return managers[i];
	return "none";
}

static int services_run(struct tool_call *call, struct err *err)
{
	static const char *const argv[] = {"sh", "-c", list_script, NULL};
	json_t *services = json_array();
	const char *manager = "none";
	struct buf out = {0};
	bool cut = false;
	int r = call_ask(call, argv, LIST_BYTES, &out, &cut, err);

	for (size_t at = 0, len; r >= 0 && at < out.len; at += len + 1) {
		const char *line = (char *)out.data + at;
		const char *end = memchr(line, '\n', out.len - at);

		len = end ? (size_t)(end - line) : out.len - at;
		if (at == 0)
			manager = manager_of(line, len);
		else if (!end || json_array_size(services) == SERVICES_MAX)
			cut = true; // a line that was cut is none
		else
			json_array_append_new(services, tell_service(line, len));
	}
	if (r >= 0)
		call->result = json_pack("{s:s, s:O, s:b}", "manager", manager, "services",
			services, "truncated", cut);
	buf_fini(&out);
	json_decref(services);
	return MIN(r, 0);
}

// --- One of them -----------------------------------------------------------------------------

static int service_run(struct tool_call *call, struct err *err)
{
	const char *name = arg_text(call, "service", "");
	const char *argv[] = {
		"sh", "-c", service_script, "service", arg_text(call, "action", ""), name, NULL};
	const struct agent_exec x = {
		.argv = argv,
		.timeout_ms = 1000 * arg_number(call, "timeout_seconds", TIMEOUT_S),
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
	};

	// No option, no path, no pattern.
	if (name[0] == '-' || name[0] == '.' ||
		strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
			     "@._:+\\-") != strlen(name))
		return err_set(err, -EINVAL, "service: '%.80s' is no service's name", name);
	return command_run(call, &x, err);
}

// --- What they are called and take -----------------------------------------------------------

// clang-format off
const struct tool service_tools[] = {
	{
		.name = "services", .title = "List services", .level = CONFIG_ACCESS_OBSERVE,
		.description = "Lists the services that the machine's service manager has loaded, and whether they run.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{}}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"manager\":{\"type\":\"string\",\"enum\":[\"systemd\",\"openrc\",\"sysv\",\"none\"],"
				"\"description\":\"none: the machine has no services; what is to run is started with exec_background\"},"
			"\"services\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
				"\"name\":{\"type\":\"string\"},\"running\":{\"type\":\"boolean\"},"
				"\"state\":{\"type\":\"string\",\"description\":\"in the manager's own words\"},"
				"\"description\":{\"type\":\"string\"}},\"required\":[\"name\",\"running\",\"state\"]}},"
			"\"truncated\":{\"type\":\"boolean\"}},\"required\":[\"manager\",\"services\",\"truncated\"]}",
		.read_only = true, .idempotent = true, .run = services_run,
	},
	{
		.name = "service", .title = "Control a service", .level = CONFIG_ACCESS_MANAGE,
		.description = "Starts, stops or otherwise controls a service of the machine, and returns what the service "
			"manager printed. enable and disable set whether it starts at boot.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"service\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":200,\"description\":\"its name, as services tells it\"},"
			"\"action\":{\"type\":\"string\",\"enum\":[\"status\",\"start\",\"stop\",\"restart\",\"reload\",\"enable\",\"disable\"]},"
			"\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":86400,\"default\":120},"
			MAX_OUTPUT_PROPERTY "},\"required\":[\"service\",\"action\"]}",
		.output = COMMAND_RESULT, .destructive = true, .run = service_run,
	},
};
// clang-format on

const size_t nr_service_tools = ARRAY_SIZE(service_tools);
