// SPDX-License-Identifier: Apache-2.0
// A terminal to come back to; see the header. One thread.
#include "cli/session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/job_list.h"
#include "cli/launch.h"
#include "cli/scrollback.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"

// Whoever is left may have left more than text on our terminal: the alternate screen, a hidden
// cursor, mouse and paste reports, colours, keypad and cursor keys of applications.
#define TERMINAL_RESET                                                                \
	"\033[?1049l\033[?25h\033[?1000l\033[?1002l\033[?1003l\033[?1006l\033[?2004l" \
	"\033[?1l\033>\033[m"

struct replay {
	struct scrollback filter;
	uint64_t next; // offset of what comes next
	uint8_t out[SCROLLBACK_ROOM(FRAME_PAYLOAD_MAX)];
};

static void replay_offset(void *ctx, bool is_err, uint64_t offset)
{
	struct replay *r = ctx;

	if (is_err)
		return;
	if (offset != r->next)
		r->filter = (struct scrollback){.state = SCROLLBACK_LINE};
	r->next = offset;
}

static int replay_output(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct replay *r = ctx;
	size_t n;
	int rc;

	if (is_err)
		return 0;
	r->next += len;
	n = scrollback_filter(&r->filter, bytes, len, r->out);
	rc = fd_write_all(STDOUT_FILENO, r->out, n);
	return rc < 0 ? err_errno(err, rc, "output") : 0;
}

// Shows what is there. *ret_next: where what is new begins.
static int replay(const struct running *m, const char *session, int signal_fd, uint64_t *ret_next,
	struct agent_result *ret, struct err *err)
{
	CLEANUP_FREE struct replay *r = calloc(1, sizeof(*r));
	CLEANUP_FD int fd = running_connect(m, err);
	struct agent_attach attach = {
		.job = session,
		.tail_bytes = UINT64_MAX,
		.stdout_offset = UINT64_MAX,
		.stderr_offset = UINT64_MAX,
		.in_fd = -1,
		.output = replay_output,
		.offset = replay_offset,
		.ctx = r,
		.signal_fd = signal_fd,
		.cancel_fd = -1,
		.deadline_ns = now_ns() + EXEC_ANSWER_NS,
	};
	int rc;

	if (fd < 0)
		return fd;
	if (!r)
		return err_errno(err, -ENOMEM, "session");
	rc = agent_attach(fd, &attach, ret, err);
	*ret_next = r->next;
	return rc;
}

// Makes the session unless it is there. *ret_old: it was. *ret_tty: it has a terminal.
static int find_or_start(const struct running *m, const struct exec_command *cmd,
	const char *session, bool *ret_old, bool *ret_tty, struct agent_result *ret,
	struct err *err)
{
	struct exec_command own = *cmd;
	CLEANUP_FD int fd = -1;
	const json_t *job;
	json_t *jobs = NULL;
	int rc = job_list_get(m, &jobs, err);

	if (rc < 0)
		return rc;
	job = job_list_find(jobs, session);
	*ret_old = job != NULL;
	*ret_tty = !job || json_is_true(json_object_get(job, "tty"));
	json_decref(jobs);
	if (*ret_old)
		return 0;
	own.tty = own.use_stdin = true;
	fd = running_connect(m, err);
	rc = fd < 0 ? fd : exec_command_start(&own, fd, session, -1, NULL, ret, err);
	// Somebody else was a moment earlier.
	if (rc == -EEXIST) {
		*ret_old = true;
		rc = 0;
	}
	return rc;
}

static int attach(const struct running *m, const char *session, int signal_fd, bool tty,
	bool redraw, uint64_t offset, struct agent_result *ret, struct err *err)
{
	CLEANUP_FD int fd = running_connect(m, err);
	const struct agent_attach how = {
		.job = session,
		.follow = true,
		.stdout_offset = offset,
		.stderr_offset = UINT64_MAX,
		.tail_bytes = tty ? 0 : UINT64_MAX,
		.tty = tty,
		.redraw = redraw,
		.in_fd = STDIN_FILENO,
		.out_fd = STDOUT_FILENO,
		.err_fd = STDERR_FILENO,
		.signal_fd = signal_fd,
		.cancel_fd = -1,
	};

	return fd < 0 ? fd : agent_attach(fd, &how, ret, err);
}

// Shows what an old one has shown and goes on with it. Our terminal is raw from the start: what is
// typed early is for the session, and not echoed among the old.
static int show(const struct running *m, const char *session, bool old, bool tty,
	struct agent_result *ret, struct err *err)
{
	struct launch launch = LAUNCH_INIT;
	struct termios saved;
	uint64_t offset = UINT64_MAX;
	bool raw = false;
	int rc = launch_take_signals(&launch, err);

	if (rc == 0 && tty) {
		raw = agent_raw_mode(STDIN_FILENO, &saved);
		offset = 0;
		if (old)
			rc = replay(m, session, launch.signal_fd, &offset, ret, err);
	}
	if (rc == 0 && (!old || !tty || ret->running))
		rc = attach(m, session, launch.signal_fd, tty, old, offset, ret, err);
	if (raw)
		tcsetattr(STDIN_FILENO, TCSADRAIN, &saved);
	launch_end(&launch);
	return rc;
}

int session_main(const struct running *m, const struct exec_command *cmd, const char *session,
	struct err *err)
{
	struct agent_result result = {0};
	bool old = false, tty = true;
	CLEANUP_FD int fd = -1;
	int rc = find_or_start(m, cmd, session, &old, &tty, &result, err);

	if (rc < 0 && result.exit_code >= 126) {
		cli_fail("shell", err);
		return result.exit_code;
	}
	if (rc == 0) {
		rc = show(m, session, old, tty, &result, err);
		if (isatty(STDOUT_FILENO) && tty && (rc < 0 || result.running))
			fputs(TERMINAL_RESET "\r\n", stdout);
	}
	fflush(stdout);
	if (rc < 0 && rc != -EINTR)
		running_explain(m, rc, err);
	if (rc == -EINTR) // this terminal is gone, or the person means us: the session stays
		return result.exit_code;
	if (rc == -ESTALE) // it ended, and another who looked has seen to it
		return 0;
	if (rc < 0)
		return rc;
	if (result.running) {
		fprintf(stderr, "left '%s', which goes on (mayfly shell -s %s %s)\n", session,
			session, m->name);
		return 0;
	}
	// Seen to its end: the name is free again.
	fd = running_connect(m, NULL);
	if (fd >= 0)
		agent_job_forget(fd, session, -1, now_ns() + EXEC_ANSWER_NS, NULL);
	return result.exit_code;
}
