// SPDX-License-Identifier: Apache-2.0
// The command: finds the verb and hands over. One thread.
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "vmm/base/memory_lack.h"
#include "vmm/monitor.h"

struct verb {
	const char *name;
	int (*main)(int argc, char **argv);
	const char *says; // NULL: not in the list
};

static const struct verb verbs[] = {
	{"run", run_main, "run a command in a throwaway machine"},
	{"exec", exec_main, "run a command in a machine that is up"},
	{"shell", shell_main, "an interactive shell in a machine that is up"},
	{"work", work_main, "a machine that works on this folder, and a command in it"},
	{"diff", diff_main, "what a machine has changed in its folder"},
	{"keep", keep_main, "bring that out into the folder of this host, all or nothing"},
	{"history", history_main, "what has changed in that folder, point by point, and by whom"},
	{"undo", undo_main, "take the folder in the machine back to one of these points"},
	{"discard", discard_main, "remove a machine with what it has changed"},
	{"jobs", jobs_main, "commands that run in the background of a machine"},
	{"logs", logs_main, "what a job has written, or a machine on its console"},
	{"cp", cp_main, "copy files into a machine that is up, or out of it"},
	{"watch", watch_main, "what changes in a folder of a machine that is up"},
	{"top", top_main, "load, memory, processes, services and the log of a machine that is up"},
	{"port", port_main, "ports of a machine on this host, and the other way round"},
	{"create", create_main, "make a machine that stays"},
	{"up", up_main, "start a machine"},
	{"down", down_main, "end a machine; what is not on a disk of it is lost"},
	{"restart", restart_main, "end a machine and start it again"},
	{"wait", wait_main, "until a machine has ended"},
	{"rm", rm_main, "remove a machine"},
	{"rename", rename_main, "give a machine another name"},
	{"edit", edit_main, "open what a machine is in an editor"},
	{"snapshot", snapshot_main, "keep a running machine as it is at this moment"},
	{"snapshots", snapshots_main, "list, verify, merge and remove snapshots"},
	{"restore", restore_main, "take a machine back to a snapshot"},
	{"fork", fork_main, "make machines that go on from a snapshot, or from another machine"},
	{"suspend", suspend_main, "put a machine aside; its memory returns to the host"},
	{"resume", resume_main, "go on with a machine that was put aside"},
	{"net", net_main, "what a machine may reach, live, and what it was refused"},
	{"secret", secret_main, "credentials that a machine uses and never has"},
	{"explain", explain_main, "what a machine can reach, see and use, and what says so"},
	{"mcp", mcp_main, "give a machine to an agent: its MCP endpoint"},
	{"access", access_main, "how deep an agent may reach into a machine through MCP"},
	{"approvals", approvals_main,
		"what agents have asked a machine's owner for: allow or deny it"},
	{"audit", audit_main, "what agents did with a machine"},
	{"replay", replay_main, "the same as a story, with what commands printed"},
	{"pool", pool_main, "machines that wait to be leased: make, list, remove pools of them"},
	{"eval", eval_main, "run tasks, each in a machine of its own, and verify what they did"},
	{"image", image_main, "root file systems that machines share: make, list, remove them"},
	{"ps", ps_main, "list machines"},
	{"stats", stats_main, "what a machine has counted: exits, requests, bytes, memory"},
	{"balloon", balloon_main, "ask a machine to give up memory"},
	{"inspect", inspect_main, "what a machine is, as JSON"},
	{"config", config_main, "what is in force for a machine, and where it comes from"},
	{"gc", gc_main, "remove what nothing uses"},
	{"bench", bench_main, "what a start costs on this machine"},
	{"doctor", doctor_main, "say what this host can do, what is missing, and how to mend it"},
	{"vmm", monitor_main, NULL},
	{"egress", egress_main, NULL},
	{"nat", nat_main, NULL},
};

int cli_fail(const char *verb, const struct err *err)
{
	fprintf(stderr, "mayfly %s: %s\n", verb, err->msg);
	return EXIT_FAILED;
}

int cli_bad_option(const char *verb, const struct err *err)
{
	cli_fail(verb, err);
	return err->code == -EINVAL || err->code == -ERANGE ? EXIT_USAGE : EXIT_FAILED;
}

static int usage(FILE *out, int status)
{
	fputs("Usage: mayfly VERB [OPTION]...\n\nDisposable Linux machines, each with its own "
	      "kernel.\n\n",
		out);
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
		if (verbs[i].says)
			fprintf(out, "  %-10s %s\n", verbs[i].name, verbs[i].says);
	fputs("\nmayfly VERB --help tells more. mayfly --version prints the version.\n"
	      "Exit status: the guest command's own (128+n for signal n), 125 if mayfly itself\n"
	      "failed, 2 for wrong usage.\n",
		out);
	return status;
}

// The exit status, unless what was to be printed could not be.
static int told(int status)
{
	// JSON is put together in many small pieces: one without memory is missing, that is all.
	if (status == 0 && memory_lacks()) {
		fputs("mayfly: out of memory: what was told may not be all\n", stderr);
		return EXIT_FAILED;
	}
	if (status == 0 && (fflush(stdout) != 0 || ferror(stdout))) {
		fputs("mayfly: standard output cannot be written\n", stderr);
		return EXIT_FAILED;
	}
	return status;
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : NULL;

	// With one of these closed, the next file opened would take its place, and its output.
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
			return EXIT_FAILED;
	json_set_alloc_funcs(memory_or_lack, free);
	if (!verb)
		return usage(stderr, EXIT_USAGE);
	if (!strcmp(verb, "--help") || !strcmp(verb, "-h") || !strcmp(verb, "help"))
		return told(usage(stdout, 0));
	if (!strcmp(verb, "--version")) {
		puts("mayfly " MAYFLY_VERSION);
		return told(0);
	}
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
		static char name[32]; // what getopt begins its complaints with

		if (strcmp(verb, verbs[i].name))
			continue;
		snprintf(name, sizeof(name), "mayfly %s", verb);
		argv[1] = name;
		return told(verbs[i].main(argc - 1, argv + 1));
	}
	fprintf(stderr, "mayfly: unknown verb '%s'; mayfly --help lists them\n", verb);
	return EXIT_USAGE;
}
