// SPDX-License-Identifier: Apache-2.0
// What the verbs of the command share. One thread.
#ifndef MAYFLY_CLI_H
#define MAYFLY_CLI_H

#include "vmm/base/err.h"

#define EXIT_FAILED   125 // mayfly's own failure
#define EXIT_TIMEOUT  124 // as timeout(1)
#define EXIT_USAGE    2
#define EXIT_CONFLICT 1 // of keep: nothing was changed
#define EXIT_SIGPIPE  141 // as a shell reports it

int run_main(int argc, char **argv);
int exec_main(int argc, char **argv);
int shell_main(int argc, char **argv);
int jobs_main(int argc, char **argv);
int logs_main(int argc, char **argv);
int cp_main(int argc, char **argv);
int port_main(int argc, char **argv);
int watch_main(int argc, char **argv);
int top_main(int argc, char **argv);
int create_main(int argc, char **argv);
int up_main(int argc, char **argv);
int down_main(int argc, char **argv);
int rm_main(int argc, char **argv);
int restart_main(int argc, char **argv);
int wait_main(int argc, char **argv);
int rename_main(int argc, char **argv);
int edit_main(int argc, char **argv);
int pool_main(int argc, char **argv);
int eval_main(int argc, char **argv);
int config_main(int argc, char **argv);
int image_main(int argc, char **argv);
int inspect_main(int argc, char **argv);
int gc_main(int argc, char **argv);
int ps_main(int argc, char **argv);
int stats_main(int argc, char **argv);
int balloon_main(int argc, char **argv);
int snapshot_main(int argc, char **argv);
int snapshots_main(int argc, char **argv);
int restore_main(int argc, char **argv);
int fork_main(int argc, char **argv);
int suspend_main(int argc, char **argv);
int resume_main(int argc, char **argv);
int mcp_main(int argc, char **argv);
int approvals_main(int argc, char **argv);
int audit_main(int argc, char **argv);
int replay_main(int argc, char **argv);
int secret_main(int argc, char **argv);
int explain_main(int argc, char **argv);
int net_main(int argc, char **argv);
int egress_main(int argc, char **argv);
int nat_main(int argc, char **argv);
int access_main(int argc, char **argv);
int bench_main(int argc, char **argv);
int doctor_main(int argc, char **argv);
int work_main(int argc, char **argv);
int diff_main(int argc, char **argv);
int keep_main(int argc, char **argv);
int discard_main(int argc, char **argv);
int history_main(int argc, char **argv);
int undo_main(int argc, char **argv);

// In cli/pool.c: removes what pools have left. Returns how many, or a negative errno.
int pool_gc(struct err *err);

// Prints "mayfly VERB: message" on stderr and returns EXIT_FAILED.
int cli_fail(const char *verb, const struct err *err);

// The same for what stood on the command line; returns EXIT_USAGE where the value makes no sense,
// and EXIT_FAILED where it does but, say, the file is not there.
int cli_bad_option(const char *verb, const struct err *err);

#endif
