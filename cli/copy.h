// SPDX-License-Identifier: Apache-2.0
// Copies between this host and a guest, with the rules of cp -r: into a folder that is there, or
// under the new name. One thread, and one more that sends.
#ifndef MAYFLY_CLI_COPY_H
#define MAYFLY_CLI_COPY_H

#include "cli/agent_files.h"

struct copy {
	const char *run_dir, *vsock; // the monitor's socket
	bool owner; // keep uid and gid; who receives must be root
	uint64_t max_bytes; // that copy_out() may take of the disk, see tree.h; 0: no limit
	int signal_fd, cancel_fd; // as in struct agent_exec
	uint64_t deadline_ns; // as in struct agent_exec
	// What was left out, and why: copy_problem_text(). Sockets and devices always are, which is
	// no failure; anything else makes the copy -EIO.
	void (*problem)(void *ctx, const char *path, int errno_value);
	void (*progress)(void *ctx, uint64_t bytes); // of the stream so far
	void *ctx;
};

// "from/." is the content of a folder: it goes into `to`, which is made if it is not there. A
// symbolic link is copied as such. -EIO if something that can be copied was left out, after
// everything else has been.
int copy_in(const struct copy *copy, const char *from, const char *to, struct err *err);
int copy_out(const struct copy *copy, const char *from, const char *to, struct err *err);

// Why something was left out, for people.
const char *copy_problem_text(int errno_value);

#endif
