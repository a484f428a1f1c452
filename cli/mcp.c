// SPDX-License-Identifier: Apache-2.0
// mayfly mcp: a machine's MCP endpoint, over stdin and stdout, a socket, or HTTP. The main thread
// reads, or waits for the end; see mcp/session.h.
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/home.h"
#include "cli/launch.h"
#include "mcp/clients.h"
#include "mcp/http.h"
#include "mcp/http_tls.h"
#include "mcp/http_token.h"
#include "mcp/level.h"
#include "mcp/listen.h"
#include "mcp/outputs.h"
#include "mcp/session.h"
#include "vmm/base/fd.h"

static const char help[] =
	"Usage: mayfly mcp [OPTION]... NAME\n"
	"       mayfly mcp install|uninstall [OPTION]... CLIENT NAME\n"
	"\n"
	"Gives a machine to an agent: speaks the Model Context Protocol on standard input and\n"
	"output, until the input ends. What the agent may do is set by mayfly access; what it\n"
	"did is told by mayfly audit. Folders of this host are closed to it, but for [mcp] "
	"folders\n"
	"of the machine's vm.ini (PATH[:rw], ...); what else it asks its owner for is told by\n"
	"mayfly approvals.\n"
	"\n"
	"install puts it into the configuration of an agent's program, and uninstall takes it out\n"
	"again; all else in there stays as it is. CLIENT is claude-code, codex, cursor, vscode or\n"
	"gemini-cli.\n"
	"\n"
	"      --socket        serve on the socket run/mcp.sock of the machine's folder instead,\n"
	"                      up to 8 clients, until SIGINT or SIGTERM\n"
	"      --http[=[ADDRESS:]PORT]\n"
	"                      serve over HTTP on the loopback instead, until SIGINT or SIGTERM:\n"
	"                      prints the URL and the file of the token that clients have to bear\n"
	"                      (default: 127.0.0.1 and a port that is free)\n"
	"      --token-file FILE\n"
	"                      the token for --http (default: mcp.token in the machine's folder,\n"
	"                      which is made)\n"
	"      --tls-cert FILE, --tls-key FILE\n"
	"                      of --http: speak TLS, with this certificate and key (PEM); with "
	"that\n"
	"                      ADDRESS may be any of this host\n"
	"      --access LEVEL  no more than LEVEL in this session, whatever the machine grants\n"
	"      --dry-run       of install and uninstall: only tell what would be done\n"
	"\n"
	"Exit status: 0, 125 if it failed, 2 for wrong usage.\n";

static int find(const char *name, struct mcp_machine *ret, char program[PATH_MAX], struct err *err)
{
	ssize_t len;
	int r = home_find(name, ret->dir, err);

	if (r < 0)
		return r;
	if (snprintf(ret->run_dir, sizeof(ret->run_dir), "%s/run", ret->dir) >=
		(int)sizeof(ret->run_dir))
		return err_errno(err, -ENAMETOOLONG, "%s", ret->dir);
	len = readlink("/proc/self/exe", program, PATH_MAX - 1);
	if (len < 0)
		return err_errno(err, -errno, "/proc/self/exe");
	program[len] = '\0';
	snprintf(ret->name, sizeof(ret->name), "%s", name);
	ret->vsock = LAUNCH_VSOCK;
	ret->program = program;
	return home_approvals(ret->approvals_dir, err);
}

static void say_listening(void *opaque)
{
	const struct mcp_machine *machine = opaque;

	printf("%s/" LISTEN_SOCKET "\n", machine->run_dir);
	fflush(stdout);
}

// How it is served; NULL for what is not wanted.
struct serving {
	enum config_access ceiling;
	bool on_socket;
	const char *http_address, *token_file, *tls_cert, *tls_key;
};

static void say_http(void *opaque, const char *url)
{
	printf("%s\ntoken: %s\n", url, (const char *)opaque);
	fflush(stdout);
}

static int serve_http(
	const struct mcp_session *session, const struct serving *serving, struct err *err)
{
	char token[HTTP_TOKEN_BYTES], path[PATH_MAX];
	struct http_config config = {.how = session,
		.address = serving->http_address,
		.token = token,
		.idle_ns = HTTP_IDLE_NS,
		.rate = HTTP_RATE};
	const char *token_path = serving->token_file ? serving->token_file : path;
	int r;

	if (snprintf(path, sizeof(path), "%s/" HTTP_TOKEN_FILE, session->machine->dir) >=
		(int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", session->machine->dir);
	r = http_token_load(token_path, !serving->token_file, token, err);
	if (r == 0 && serving->tls_cert)
		r = http_tls_load(serving->tls_cert, serving->tls_key, &config.tls, err);
	return r < 0 ? r : http_run(&config, say_http, (void *)(uintptr_t)token_path, err);
}

// On a socket or over HTTP: until a signal.
static int serve_clients(
	struct mcp_session *session, const struct serving *serving, struct err *err)
{
	sigset_t ends;
	int r;

	sigemptyset(&ends);
	sigaddset(&ends, SIGINT);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGHUP);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	session->transport = serving->on_socket ? "unix" : "http";
	session->stop_fd = signalfd(-1, &ends, SFD_CLOEXEC);
	if (session->stop_fd < 0)
		return err_errno(err, -errno, "signalfd");
	r = serving->on_socket ? mcp_listen_run(session, say_listening,
					 (void *)(uintptr_t)session->machine, err)
			       : serve_http(session, serving, err);
	fd_close(&session->stop_fd);
	return r;
}

static int serve(const struct mcp_machine *machine, const struct serving *serving, struct err *err)
{
	struct mcp_session session = {
		.machine = machine,
		.outputs = outputs_create(),
		.ceiling = serving->ceiling,
		.transport = "stdio",
		.in_fd = STDIN_FILENO,
		.out_fd = STDOUT_FILENO,
		.stop_fd = -1,
	};
	enum config_access level;
	int r = session.outputs ? 0 : err_errno(err, -ENOMEM, "mcp");

	if (r == 0 && !(session.watch = level_watch_create(machine->dir, err)))
		r = err->code;
	if (r == 0)
		r = level_read(machine->dir, &level, err);
	if (r == 0 && MIN(level, serving->ceiling) == CONFIG_ACCESS_NONE)
		r = err_set(err, -EPERM,
			"'%s' has no endpoint: its access level is none (mayfly access %s observe)",
			machine->name, machine->name);
	if (r == 0)
		r = serving->on_socket || serving->http_address
			    ? serve_clients(&session, serving, err)
			    : mcp_session_run(&session, err);
	level_watch_destroy(session.watch);
	outputs_destroy(session.outputs);
	return r;
}

// mayfly mcp install|uninstall CLIENT NAME.
static int configure(
	const char *what, struct clients_entry *entry, char program[PATH_MAX], struct err *err)
{
	struct mcp_machine machine = {0};
	bool add = !strcmp(what, "install");
	int r = home_check_name(entry->machine, err);

	// One that has gone can still be taken out.
	if (r == 0 && add)
		r = find(entry->machine, &machine, program, err);
	entry->program = program;
	if (r == 0)
		r = add ? clients_install(entry, err) : clients_uninstall(entry, err);
	return r;
}

int mcp_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"access", required_argument, NULL, 'a'},
		{"socket", no_argument, NULL, 's'},
		{"http", optional_argument, NULL, 'H'},
		{"token-file", required_argument, NULL, 't'},
		{"tls-cert", required_argument, NULL, 'c'},
		{"tls-key", required_argument, NULL, 'k'},
		{"dry-run", no_argument, NULL, 'n'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct clients_entry entry = {0};
	struct serving serving = {.ceiling = CONFIG_ACCESS_EXEC};
	struct mcp_machine machine = {0};
	char program[PATH_MAX] = "";
	struct err err = {0};
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (opt) {
		case 'a':
			if (config_access_parse(optarg, &serving.ceiling, &err) < 0)
				return cli_bad_option("mcp", &err);
			entry.access = optarg;
			break;
		case 's':
			serving.on_socket = true;
			break;
		case 'H':
			serving.http_address = optarg ? optarg : "0";
			break;
		case 't':
			serving.token_file = optarg;
			break;
		case 'c':
			serving.tls_cert = optarg;
			break;
		case 'k':
			serving.tls_key = optarg;
			break;
		case 'n':
			entry.dry_run = true;
			break;
		default:
			fputs(help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (argc - optind == 3 &&
		(!strcmp(argv[optind], "install") || !strcmp(argv[optind], "uninstall"))) {
		entry.client = argv[optind + 1];
		entry.machine = argv[optind + 2];
		r = configure(argv[optind], &entry, program, &err);
		if (r == -EINVAL)
			return cli_bad_option("mcp", &err);
		return r < 0 ? cli_fail("mcp", &err) : 0;
	}
	if (argc - optind != 1 || entry.dry_run || (serving.on_socket && serving.http_address) ||
		((serving.token_file || serving.tls_cert) && !serving.http_address) ||
		!serving.tls_cert != !serving.tls_key) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	signal(SIGPIPE, SIG_IGN);
	r = find(argv[optind], &machine, program, &err);
	if (r == 0)
		r = serve(&machine, &serving, &err);
	return r < 0 ? cli_fail("mcp", &err) : 0;
}
