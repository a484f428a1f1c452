// SPDX-License-Identifier: Apache-2.0
// mayfly approvals: what agents ask a machine's owner for, and the owner's word on it. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "mcp/approvals.h"
#include "mcp/audit.h"
#include "vmm/base/fd.h"

static const char help[] =
	"Usage: mayfly approvals [--json] NAME\n"
	"       mayfly approvals [--json] NAME show|allow|deny ID\n"
	"       mayfly approvals NAME watch\n"
	"\n"
	"Lists what agents have asked for through the machine's MCP endpoint, and decides on it.\n"
	"What nobody allows within ten minutes is denied; what is allowed holds once, for exactly\n"
	"what was asked for. Agents have no way to this command.\n"
	"\n"
	"watch stays on the terminal and asks about each request as it comes: y allows it, all "
	"else\n"
	"denies it. Ports that it allows are published until it ends (Ctrl-C).\n"
	"\n"
	"Allowing a port (publish_port) makes it reachable on 127.0.0.1 of this host, as mayfly\n"
	"port does, until you press Ctrl-C.\n"
	"\n"
	"      --json  as JSON\n"
	"\n"
	"Exit status: 0, 125 if it failed, 2 for wrong usage.\n";

static const char *text_of(const json_t *record, const char *key)
{
	const char *text = json_string_value(json_object_get(record, key));

	return text ? text : "";
}

static void print_whole(const json_t *json)
{
	char *text = json_dumps(json, JSON_ENSURE_ASCII);

	puts(text ? text : "null");
	free(text);
}

// Their words are the agent's: ASCII, with everything else escaped.
static void print_request(const json_t *request)
{
	char *arguments = json_dumps(
		json_object_get(request, "arguments"), JSON_COMPACT | JSON_ENSURE_ASCII);
	json_int_t left = json_integer_value(json_object_get(request, "expires_s")) - time(NULL);

	printf("%-18s %-8s %4lld s  %-14s %.400s\n", text_of(request, "id"),
		text_of(request, "state"), (long long)MAX(left, (json_int_t)0),
		text_of(request, "action"), arguments ? arguments : "");
	free(arguments);
}

static int list_requests(const struct approvals *a, bool json, struct err *err)
{
	json_t *all = NULL, *request;
	size_t i;
	int r = approvals_list(a, &all, err);

	if (r < 0)
		return r;
	if (json)
		print_whole(all);
	else if (json_array_size(all))
		printf("%-18s %-8s %6s  %-14s %s\n", "ID", "STATE", "LEFT", "ACTION", "ARGUMENTS");
	json_array_foreach(all, i, request)
	{
		if (!json)
			print_request(request);
	}
	json_decref(all);
	return 0;
}

static int show_request(const struct approvals *a, const char *id, bool json, struct err *err)
{
	json_t *all = NULL, *request;
	bool found = false;
	size_t i;
	int r = approvals_list(a, &all, err);

	json_array_foreach(all, i, request)
	{
		if (strcmp(text_of(request, "id"), id) != 0)
			continue;
		found = true;
		if (json)
			print_whole(request);
		else
			print_request(request);
	}
	json_decref(all);
	return r < 0 || found ? r : err_set(err, -ESRCH, "there is no request '%.40s'", id);
}

static int write_down(const struct approvals *a, const json_t *request, struct err *err)
{
	json_t *record = json_pack("{s:s, s:s, s:i, s:O, s:O, s:O, s:i, s:i}", "event", "approval",
		"session", "owner", "call", 0, "tool", json_object_get(request, "action"),
		"outcome", json_object_get(request, "state"), "approval",
		json_object_get(request, "id"), "duration_ms", 0, "result_bytes", 0);

	json_object_set(record, "arguments", json_object_get(request, "arguments"));
	return audit_append(a->machine_dir, record, 0, err);
}

static int publish(const struct approvals *a, const json_t *request)
{
	const json_t *arguments = json_object_get(request, "arguments");
	char ports[64], name[64];
	char *argv[] = {"port", name, ports, NULL};

	snprintf(name, sizeof(name), "%s", a->machine);
	snprintf(ports, sizeof(ports), "127.0.0.1:%lld:%lld",
		(long long)json_integer_value(json_object_get(arguments, "host_port")),
		(long long)json_integer_value(json_object_get(arguments, "port")));
	return port_main(3, argv);
}

static int decide(
	const struct approvals *a, const char *id, bool allow, int *ret_status, struct err *err)
{
	json_t *request = NULL;
	int r = approvals_decide(a, id, allow, write_down, &request, err);

	*ret_status = 0;
	if (r == 0)
		fprintf(stderr, "%s: %s %s\n", id, text_of(request, "action"),
			text_of(request, "state"));
	if (r == 0 && allow && !strcmp(text_of(request, "action"), APPROVAL_PUBLISH_PORT))
		*ret_status = publish(a, request);
	json_decref(request);
	return r;
}

// --- On a terminal ---------------------------------------------------------------------------

// In a process of its own, which ends with this one.
static void publish_beside(const struct approvals *a, const json_t *request)
{
	const pid_t parent = getpid(), pid = fork();

	if (pid < 0)
		fprintf(stderr, "mayfly approvals: fork: %s\n", strerror(errno));
	if (pid != 0)
		return;
	signal(SIGCHLD, SIG_DFL);
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent)
		_exit(0);
	if (dup2(open("/dev/null", O_RDWR | O_CLOEXEC), STDIN_FILENO) < 0)
		_exit(EXIT_FAILURE);
	_exit(publish(a, request));
}

// Nothing but a y that was typed after the question allows anything.
static int ask(const struct approvals *a, const json_t *request, bool *ret_end, struct err *err)
{
	char *arguments = json_dumps(
		json_object_get(request, "arguments"), JSON_COMPACT | JSON_ENSURE_ASCII);
	char answer[4100] = "", id[APPROVAL_ID_BYTES];
	json_t *decided = NULL;
	bool allow;
	int r;

	printf("\nAn agent asks for: %s %s\nAllow that in '%s', once? [y/N] ",
		text_of(request, "action"), arguments ? arguments : "", a->machine);
	free(arguments);
	tcflush(STDIN_FILENO, TCIFLUSH);
	fflush(stdout);
	*ret_end = !fgets(answer, sizeof(answer), stdin);
	if (*ret_end)
		return 0;
	allow = arguments && (!strcmp(answer, "y\n") || !strcmp(answer, "Y\n"));
	snprintf(id, sizeof(id), "%s", text_of(request, "id"));
	r = approvals_decide(a, id, allow, write_down, &decided, err);
	if (r == -ESRCH) { // it is over, or somebody else has decided
		printf("%s\n", err->msg);
		return 0;
	}
	if (r == 0)
		printf("%s: %s\n", id, text_of(decided, "state"));
	if (r == 0 && allow && !strcmp(text_of(decided, "action"), APPROVAL_PUBLISH_PORT))
		publish_beside(a, decided);
	json_decref(decided);
	return r;
}

// The oldest that waits, fresh, or NULL.
static int next_request(const struct approvals *a, json_t **ret, struct err *err)
{
	json_t *all = NULL, *request;
	size_t i;
	int r = approvals_list(a, &all, err);

	*ret = NULL;
	json_array_foreach(all, i, request)
	{
		if (!*ret && !strcmp(text_of(request, "state"), "pending"))
			*ret = json_incref(request);
	}
	json_decref(all);
	return r;
}

// Until something happens to the requests, or the terminal has gone.
static bool wait_for_requests(int fd)
{
	struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
	char events[4096];

	while (poll(p, 2, -1) < 0)
		;
	while (p[0].revents && read(fd, events, sizeof(events)) > 0)
		;
	if (p[1].revents & POLLIN) // typed before there was a question; or the end
		return fgets(events, sizeof(events), stdin) != NULL;
	return !p[1].revents;
}

static int watch(const struct approvals *a, struct err *err)
{
	CLEANUP_FD int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	bool end = false;
	int r = 0;

	if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
		return err_set(err, -ENOTTY, "watch asks on a terminal, and this is none");
	if (fd < 0 || inotify_add_watch(fd, a->dir, IN_MOVED_TO | IN_DELETE) < 0)
		return err_errno(err, -errno, "%s", a->dir);
	signal(SIGCHLD, SIG_IGN);
	printf("Waiting for what agents ask for in '%s' (Ctrl-C ends it)\n", a->machine);
	fflush(stdout);
	while (r == 0 && !end) {
		json_t *request;

		r = next_request(a, &request, err);
		if (r == 0 && request)
			r = ask(a, request, &end, err);
		else if (r == 0)
			end = !wait_for_requests(fd);
		json_decref(request);
	}
	return r;
}

int approvals_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	char dir[PATH_MAX], machine_dir[PATH_MAX];
	struct approvals a = {.dir = dir, .machine_dir = machine_dir};
	const char *verb, *id;
	struct err err = {0};
	bool json = false, on_terminal;
	int opt, status = 0, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 'j') {
			json = true;
			continue;
		}
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	argc -= optind;
	argv += optind;
	verb = argc > 1 ? argv[1] : "ls";
	id = argc == 3 ? argv[2] : NULL;
	on_terminal = !strcmp(verb, "watch");
	if (argc < 1 || argc > 3 || (!id != (on_terminal || !strcmp(verb, "ls"))) ||
		(on_terminal && json) ||
		(strcmp(verb, "ls") != 0 && !on_terminal && strcmp(verb, "show") != 0 &&
			strcmp(verb, "allow") != 0 && strcmp(verb, "deny") != 0)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	a.machine = argv[0];
	r = home_find(a.machine, machine_dir, &err);
	if (r == 0)
		r = home_approvals(dir, &err);
	if (r == 0 && on_terminal)
		r = watch(&a, &err);
	else if (r == 0 && !id)
		r = list_requests(&a, json, &err);
	else if (r == 0 && !strcmp(verb, "show"))
		r = show_request(&a, id, json, &err);
	else if (r == 0)
		r = decide(&a, id, !strcmp(verb, "allow"), &status, &err);
	return r < 0 ? cli_fail("approvals", &err) : status;
}
