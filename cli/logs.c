// SPDX-License-Identifier: Apache-2.0
// mayfly logs: what a job has written, or what a machine has printed on its console. One thread.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/cli.h"
#include "cli/exec_options.h"
#include "cli/home.h"
#include "cli/running.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

static const char help[] =
	"Usage: mayfly logs [OPTION]... NAME [JOB]\n"
	"\n"
	"What a job (see mayfly jobs) has written, its standard output and error apart; without\n"
	"JOB what the machine has printed on its console, also when it is not running any more.\n"
	"The newest 256 KiB of each stream of a job are kept, and of a console 512 KiB or more.\n"
	"\n"
	"  -f, --follow          go on until the job, or the machine, ends\n"
	"  -n, --tail SIZE       begin with the last SIZE of it, like 4K\n"
	"      --offset N        of a job: begin with byte N of its standard output, counted\n"
	"                        from its start (mayfly jobs tells how many there are)\n"
	"      --stderr-offset N and of its standard error\n"
	"\n"
	"Exit status: 0, 125 if it failed, 2 for wrong usage.\n";

struct logs {
	const char *name, *job;
	bool follow;
	uint64_t tail_bytes, offset, stderr_offset; // UINT64_MAX: not given
};

// --- Of a job --------------------------------------------------------------------------------

// What was asked for and is gone is told, rather than left out silently.
static void on_offset(void *ctx, bool is_err, uint64_t offset)
{
	const struct logs *l = ctx;
	uint64_t wanted = is_err ? l->stderr_offset : l->offset;

	if (wanted < offset)
		fprintf(stderr,
			"mayfly logs: %s begins at byte %llu: what was before is not kept\n",
			is_err ? "standard error" : "standard output", (unsigned long long)offset);
}

static int job_logs(const struct logs *l, const struct running *m, struct err *err)
{
	CLEANUP_FD int fd = running_connect(m, err);
	const struct agent_attach attach = {
		.job = l->job,
		.follow = l->follow,
		.tail_bytes = l->tail_bytes,
		.stdout_offset = l->offset,
		.stderr_offset = l->stderr_offset,
		.in_fd = -1,
		.out_fd = STDOUT_FILENO,
		.err_fd = STDERR_FILENO,
		.offset = on_offset,
		.ctx = (void *)l,
		.signal_fd = -1,
		.cancel_fd = -1,
	};
	struct agent_result result = {0};
	int rc = fd < 0 ? fd : agent_attach(fd, &attach, &result, err);

	if (rc < 0)
		running_explain(m, rc, err);
	return rc;
}

// --- Of the console --------------------------------------------------------------------------

// On a terminal what the guest printed is text, and drives nothing.
static int show(uint8_t *bytes, size_t n, struct err *err)
{
	int rc;

	if (isatty(STDOUT_FILENO))
		for (size_t i = 0; i < n; i++)
			if ((bytes[i] < ' ' && !strchr("\r\n\t", bytes[i])) || bytes[i] == 0x7f ||
				bytes[i] == 0)
				bytes[i] = '?';
	rc = fd_write_all(STDOUT_FILENO, bytes, n);
	return rc < 0 ? err_errno(err, rc, "output") : 0;
}

static int show_rest(int fd, struct err *err)
{
	uint8_t bytes[65536];
	ssize_t n;
	int rc = 0;

	while (rc == 0 && (n = read(fd, bytes, sizeof(bytes))) != 0) {
		if (n < 0)
			return err_errno(err, -errno, "console.log");
		rc = show(bytes, (size_t)n, err);
	}
	return rc;
}

static int open_log(int dir_fd, const char *name, off_t *ret_size)
{
	struct stat st;
	int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

	*ret_size = fd >= 0 && fstat(fd, &st) == 0 ? st.st_size : 0;
	return fd;
}

static void skip(int fd, off_t size, uint64_t keep_bytes)
{
	if (fd >= 0 && (uint64_t)size > keep_bytes)
		lseek(fd, size - (off_t)keep_bytes, SEEK_SET);
}

// Shows what is new. Where the monitor has cut console.log off since, what we have not seen of it
// is in console.log.1, which was written before.
static int follow(int fd, int old_fd, struct err *err)
{
	off_t seen = lseek(fd, 0, SEEK_CUR);
	struct stat st;
	int rc = 0;

	if (fstat(fd, &st) < 0)
		return err_errno(err, -errno, "console.log");
	if (st.st_size < seen) {
		lseek(old_fd, seen, SEEK_SET);
		lseek(fd, 0, SEEK_SET);
		rc = show_rest(old_fd, err);
	}
	return rc < 0 ? rc : show_rest(fd, err);
}

static int console_logs(const struct logs *l, struct err *err)
{
	CLEANUP_FD int dir_fd = -1, old_fd = -1, fd = -1, monitor_fd = -1, watch_fd = -1;
	off_t old_size, size;
	char dir[PATH_MAX], events[4096];
	int rc = home_find(l->name, dir, err);

	if (rc < 0)
		return rc;
	dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	watch_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (dir_fd < 0 || watch_fd < 0 ||
		inotify_add_watch(watch_fd, dir, IN_MODIFY | IN_CREATE | IN_MOVED_TO) < 0)
		return err_errno(err, -errno, "%s", dir);
	if (l->follow) {
		monitor_fd = running_pidfd(dir, err);
		if (monitor_fd < 0 && monitor_fd != -ESRCH)
			return monitor_fd;
	}
	old_fd = open_log(dir_fd, "console.log.1", &old_size);
	fd = open_log(dir_fd, "console.log", &size);
	skip(old_fd, old_size, l->tail_bytes > (uint64_t)size ? l->tail_bytes - (uint64_t)size : 0);
	skip(fd, size, l->tail_bytes);
	if (old_fd >= 0)
		rc = show_rest(old_fd, err);
	if (rc == 0 && fd >= 0)
		rc = show_rest(fd, err);
	while (rc == 0 && monitor_fd >= 0 && fd >= 0) {
		struct pollfd p[2] = {
			{.fd = watch_fd, .events = POLLIN}, {.fd = monitor_fd, .events = POLLIN}};

		if (poll(p, 2, -1) < 0 && errno != EINTR)
			return err_errno(err, -errno, "poll");
		(void)!read(watch_fd, events, sizeof(events));
		rc = follow(fd, old_fd, err);
		if (p[1].revents)
			break; // and that was the last of it
	}
	return rc;
}

// --- The command line ------------------------------------------------------------------------

enum { OPT_OFFSET = 'O', OPT_STDERR_OFFSET = 'E' };

static int take_option(struct logs *l, int opt, struct err *err)
{
	switch (opt) {
	case 'f':
		l->follow = true;
		return 0;
	case 'n':
		return parse_size(optarg, &l->tail_bytes, err);
	case OPT_OFFSET:
		return parse_uint(optarg, 0, INT64_MAX, &l->offset, err);
	case OPT_STDERR_OFFSET:
		return parse_uint(optarg, 0, INT64_MAX, &l->stderr_offset, err);
	default:
		return 1;
	}
}

int logs_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"follow", no_argument, NULL, 'f'},
		{"tail", required_argument, NULL, 'n'},
		{"offset", required_argument, NULL, OPT_OFFSET},
		{"stderr-offset", required_argument, NULL, OPT_STDERR_OFFSET},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct logs l = {
		.tail_bytes = UINT64_MAX, .offset = UINT64_MAX, .stderr_offset = UINT64_MAX};
	struct running m;
	struct err err = {0};
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "fn:h", options, NULL)) != -1) {
		r = take_option(&l, opt, &err);
		if (r < 0)
			return cli_bad_option("logs", &err);
		if (r == 0)
			continue;
		fputs(help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	l.name = argv[optind];
	l.job = argc - optind == 2 ? argv[optind + 1] : NULL;
	if (argc - optind < 1 || argc - optind > 2 ||
		(!l.job && (l.offset & l.stderr_offset) != UINT64_MAX)) {
		fputs(help, stderr);
		return EXIT_USAGE;
	}
	if (l.job) {
		r = running_find(l.name, &m, &err);
		if (r == 0)
			r = job_logs(&l, &m, &err);
	} else {
		r = console_logs(&l, &err);
	}
	if (r == -EPIPE)
		return EXIT_SIGPIPE;
	return r < 0 ? cli_fail("logs", &err) : 0;
}
