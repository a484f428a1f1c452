// SPDX-License-Identifier: Apache-2.0
// mayfly history and undo: what a machine has changed in its folder, point by point, and back. One
// thread, and one more that sends.
#include "cli/history.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/work_log.h"
#include "vmm/base/buf.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "work/history.h"

#define SHOWN_MAX 10 // changes of a point, in the list of all
// Others wait for the lock meanwhile, and a guest can be as slow as it likes.
#define TAKE_NS 300000000000ULL
#define BACK_NS 600000000000ULL

// --- Taking a point --------------------------------------------------------------------------

static int who(void *ctx, uint64_t since, char ret[WORK_HISTORY_BY_MAX], struct err *err)
{
	const struct work_machine *w = ctx;

	return work_log_who(w->m.dir, since, ret, WORK_HISTORY_BY_MAX, err);
}

// Returns 1 if there is a new point, 0 if nothing has changed since the last one. ret_now, the
// caller's: the tree as it is; may be NULL.
static int take_point(struct work_machine *w, struct work_history *h, struct work_manifest *ret_now,
	struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest now = {0};
	CLEANUP(work_look_fini) struct work_look look = WORK_LOOK_NONE;
	CLEANUP(work_point_fini) struct work_point point = {0};
	const uint64_t seq = work_log_last(w->m.dir);
	int r = work_history_now(h, &w->base, &w->before, &now, err);

	w->deadline_ns = now_ns() + TAKE_NS;
	if (r == 0)
		r = work_look_since(w, h->dir_fd, &now, WORK_HISTORY_BYTES_MAX / 2, &look, err);
	if (r == 0) {
		const struct work_take take = {.now = &now,
			.guest = &look.guest,
			.ignore = &w->ignore,
			.stage = &look.stage,
			.host_fd = w->target_fd,
			.seq = seq,
			.who = who,
			.ctx = w};

		r = work_history_take(h, &take, err);
		if (r == 1 && work_history_read(h, h->last, &point, NULL) == 0)
			work_log_point(w->m.dir, &point);
	}
	if (r >= 0 && ret_now) {
		*ret_now = look.guest;
		look.guest = (struct work_manifest){0};
	}
	return r;
}

static int take_now(const char *name, int state_fd, int wait_fd, struct err *err)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP(work_machine_fini) struct work_machine w = WORK_MACHINE_NONE;
	int r = work_history_open(&h, state_fd, wait_fd, err);

	if (r == 0)
		r = work_machine_open(&w, name, err);
	return r == 0 ? take_point(&w, &h, NULL, err) : r;
}

static void close_others(int low, int high)
{
	if (low > STDERR_FILENO + 1)
		close_range(STDERR_FILENO + 1, (unsigned int)low - 1, 0);
	if (high > low + 1)
		close_range((unsigned int)low + 1, (unsigned int)high - 1, 0);
	close_range((unsigned int)high + 1, ~0U, 0);
}

void history_later(const char *name, int state_fd)
{
	int wait_fd = work_history_wait(state_fd), null_fd;
	struct err err = {0};
	sigset_t none;

	// Somebody waits who will see this as well; or there is no history.
	if (wait_fd < 0)
		return;
	if (fork() != 0) { // without a child the next one takes the point
		fd_close(&wait_fd);
		return;
	}
	// Nothing of our caller's stays open.
	setsid();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	null_fd = open("/dev/null", O_RDWR);
	if (null_fd < 0 || chdir("/") < 0)
		_exit(EXIT_FAILED);
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		dup2(null_fd, fd);
	close_others(MIN(state_fd, wait_fd), MAX(state_fd, wait_fd));
	take_now(name, state_fd, wait_fd, &err);
	_exit(err.code ? EXIT_FAILED : 0);
}

// --- Telling ---------------------------------------------------------------------------------

static const struct work_entry *either(const struct work_delta *d)
{
	return d->new.type ? &d->new : &d->old;
}

static json_t *path_json(const char *path)
{
	char quoted[WORK_QUOTED_MAX];
	json_t *json = json_string(path); // NULL if it is no UTF-8

	return json ? json : json_string(work_quote(quoted, path));
}

static void format_time(int64_t time_ns, char ret[32])
{
	time_t s = (time_t)(time_ns / 1000000000);
	struct tm tm;

	gmtime_r(&s, &tm);
	strftime(ret, 32, "%FT%TZ", &tm);
}

static json_t *point_json(const struct work_point *p)
{
	json_t *by = json_loads(p->by, 0, NULL), *list = json_array();
	char when[32];

	format_time(p->time_ns, when);
	for (size_t i = 0; i < p->nr_deltas; i++) {
		const struct work_delta *d = &p->deltas[i];

		json_array_append_new(list, json_pack("{s:o, s:s, s:s}", "path",
						    path_json(work_delta_path(d)), "change",
						    !d->old.type   ? "added"
						    : !d->new.type ? "deleted"
								   : "changed",
						    "type", (const char[]){either(d)->type, '\0'}));
	}
	return json_pack("{s:I, s:s, s:o, s:o}", "point", (json_int_t)p->nr, "time", when, "by",
		by ? by : json_array(), "changes", list);
}

static void print_who(FILE *out, const char *text)
{
	json_t *by = json_loads(text, 0, NULL), *call;
	size_t i;

	if (!json_array_size(by))
		fputs("nobody that is on record", out);
	json_array_foreach(by, i, call)
	{
		const char *client = json_string_value(json_object_get(call, "client"));
		const char *tool = json_string_value(json_object_get(call, "tool"));
		const char *what = json_string_value(json_object_get(call, "what"));

		fprintf(out, "%s%s%s%s: %.120s", i ? "; " : "", client ? client : "",
			client ? " " : "", tool ? tool : "", what ? what : "");
	}
	json_decref(by);
}

static void print_point(FILE *out, const char *name, const struct work_point *p, size_t max)
{
	char when[32], quoted[WORK_QUOTED_MAX];

	format_time(p->time_ns, when);
	fprintf(out, "%5u %s  ", p->nr, when);
	print_who(out, p->by);
	fputc('\n', out);
	for (size_t i = 0; i < MIN(p->nr_deltas, max); i++) {
		const struct work_delta *d = &p->deltas[i];

		fprintf(out, "      %c %s%s\n",
			!d->old.type   ? 'A'
			: !d->new.type ? 'D'
				       : 'M',
			work_quote(quoted, work_delta_path(d)), either(d)->type == 'd' ? "/" : "");
	}
	if (p->nr_deltas > max)
		fprintf(out, "      and %zu more (mayfly history %s %u)\n", p->nr_deltas - max,
			name, p->nr);
}

static int tell(FILE *out, const char *name, const struct work_history *h, uint32_t only, bool json,
	struct err *err)
{
	json_t *list = json ? json_array() : NULL;
	int r = 0;

	if (only && (only < h->first || only > h->last))
		r = err_set(err, -ENOENT, "there is no point %u", only);
	for (uint32_t nr = only ? only : h->first; nr <= (only ? only : h->last) && r == 0; nr++) {
		CLEANUP(work_point_fini) struct work_point p = {0};

		r = work_history_read(h, nr, &p, err);
		if (r == -EBADMSG && !only) {
			if (!json)
				fprintf(out, "%5u cannot be read\n", nr);
			r = 0;
			continue;
		}
		if (r == 0 && json)
			json_array_append_new(list, point_json(&p));
		else if (r == 0)
			print_point(out, name, &p, only ? SIZE_MAX : SHOWN_MAX);
	}
	if (r == 0 && json) {
		json_dumpf(list, out, JSON_INDENT(2) | JSON_ENSURE_ASCII);
		fputc('\n', out);
	}
	json_decref(list);
	return r;
}

// --- history ---------------------------------------------------------------------------------

static const char history_help[] =
	"Usage: mayfly history [--json] [NAME [POINT]]\n"
	"       mayfly history --take [NAME]\n"
	"\n"
	"Tells what has changed in the folder of a machine that mayfly work has made, point by\n"
	"point: when, by which commands or calls of agents, and which paths (A added, M changed,\n"
	"D deleted); of POINT all of them. A point is taken after each command and call that has\n"
	"changed files, and by mayfly history itself. The last 200 are kept, and 1 GiB of what "
	"was\n"
	"in the files. Without NAME: the machine of this folder.\n"
	"\n"
	"      --take   only have a point taken, if anything has changed: nobody waits for it\n"
	"      --json   as JSON\n";

static int history(const char *name, uint32_t only, bool take, bool json, struct err *err)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP(work_machine_fini) struct work_machine w = WORK_MACHINE_NONE;
	CLEANUP_FD int state_fd = -1;
	CLEANUP_FREE char *text = NULL;
	char dir[PATH_MAX];
	size_t len = 0;
	FILE *out;
	int r = home_find(name, dir, err);

	if (r == 0) {
		state_fd = work_state_open(dir, err);
		r = state_fd < 0 ? err_wrap(err, state_fd, "%s", name) : 0;
	}
	if (r < 0)
		return r;
	if (take) {
		history_later(name, state_fd);
		return 0;
	}
	r = work_history_open(&h, state_fd, -1, err);
	if (r < 0)
		return err_wrap(err, r, "%s", name);
	// Of one that does not run there is what there is.
	r = home_running(dir, NULL, err);
	if (r == 1)
		r = work_machine_open(&w, name, err);
	if (r == 0 && w.target_fd >= 0)
		r = take_point(&w, &h, NULL, err);
	if (r < 0)
		return r;
	// Who reads it, a pager say, takes all the time there is: the lock is let go first.
	out = open_memstream(&text, &len);
	if (!out)
		return err_errno(err, -errno, "%s", name);
	r = tell(out, name, &h, only, json, err);
	if (fclose(out) != 0 && r == 0)
		r = err_errno(err, -ENOMEM, "%s", name);
	work_history_close(&h);
	if (r == 0)
		fwrite(text, 1, len, stdout);
	return r;
}

// The name and the point on the command line.
static int take_arguments(int argc, char **argv, char ret_name[HOME_NAME_MAX + 1],
	uint64_t *ret_point, struct err *err)
{
	int r = optind < argc ? home_check_name(argv[optind], err) : work_name_here(ret_name, err);

	if (r == 0 && optind < argc)
		snprintf(ret_name, HOME_NAME_MAX + 1, "%s", argv[optind++]);
	if (r == 0 && optind < argc)
		r = parse_uint(argv[optind++], 0, UINT32_MAX, ret_point, err);
	return r;
}

int history_main(int argc, char **argv)
{
	static const struct option options[] = {
		{"take", no_argument, NULL, 't'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	char name[HOME_NAME_MAX + 1];
	bool take = false, json = false;
	struct err err = {0};
	uint64_t point = 0;
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (opt == 't') {
			take = true;
		} else if (opt == 'j') {
			json = true;
		} else {
			fputs(history_help, opt == 'h' ? stdout : stderr);
			return opt == 'h' ? 0 : EXIT_USAGE;
		}
	}
	if (take_arguments(argc, argv, name, &point, &err) < 0)
		return cli_bad_option("history", &err);
	if (optind < argc || (take && (json || point))) {
		fputs(history_help, stderr);
		return EXIT_USAGE;
	}
	return history(name, (uint32_t)point, take, json, &err) < 0 ? cli_fail("history", &err) : 0;
}

// --- undo ------------------------------------------------------------------------------------

static const char undo_help[] =
	"Usage: mayfly undo [NAME [POINT [PATH]...]]\n"
	"\n"
	"Takes the folder in a machine that mayfly work has made back to how it was at POINT of\n"
	"mayfly history (0: as it came in), or what is at PATH in it; without POINT, to before "
	"the\n"
	"last one. Only files are taken back: what runs in the machine goes on. Nothing is lost:\n"
	"what there was is a point, and going back is one, which undo takes back, too. The folder\n"
	"of this host is not touched. Without NAME: the machine of this folder.\n";

static void put_problem(void *ctx, const char *path, int errno_value)
{
	char quoted[WORK_QUOTED_MAX];

	(void)ctx;
	fprintf(stderr, "mayfly undo: %s: %s\n", work_quote(quoted, path), strerror(errno_value));
}

// What is there and must go, or make room for something of another kind: the inner before the
// outer.
static int clear(struct work_machine *w, const struct work_back *back, struct err *err)
{
	CLEANUP_FD int fd = memfd_create("paths", MFD_CLOEXEC);
	CLEANUP_BUF struct buf paths = {0};
	struct agent_files files;
	int r;

	for (size_t i = back->nr; i-- > 0;) {
		const struct work_back_step *s = &back->steps[i];

		if (s->now && (!s->to || (s->to->type == 'd') != (s->now->type == 'd')))
			buf_append(&paths, s->path, strlen(s->path) + 1);
	}
	r = fd < 0 ? -errno : buf_error(&paths);
	if (r == 0)
		r = fd_write_all(fd, paths.data, paths.len);
	if (r == 0 && lseek(fd, 0, SEEK_SET) < 0)
		r = -errno;
	if (r < 0)
		return err_errno(err, r, "paths");
	r = paths.len ? work_files(w, &files, err) : 1;
	if (r != 0)
		return MIN(r, 0);
	r = agent_clear(&files, w->inside, fd, err);
	fd_close(&files.conn_fd);
	return r;
}

static int put_back(struct work_machine *w, const struct work_history *h,
	const struct work_back *back, struct err *err)
{
	const struct agent_put put = {.folder = w->inside, .problem = put_problem};
	CLEANUP(work_stage_close) struct work_stage stage = WORK_STAGE_NONE;
	CLEANUP_FD int dir_fd = -1;
	struct agent_files files;
	char path[PATH_MAX];
	int r = work_stage_open(&stage, h->dir_fd, err);

	if (r < 0)
		return r;
	if (mkdirat(stage.dir_fd, "diff", 0700) == 0)
		dir_fd = openat(stage.dir_fd, "diff", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd < 0)
		return err_errno(err, -errno, WORK_STAGE_NAME);
	r = home_format(path, err, "%s/work/" WORK_HISTORY "/" WORK_STAGE_NAME "/diff", w->m.dir);
	if (r == 0)
		r = work_back_lay_out(h, back, dir_fd, err);
	if (r == 0)
		r = clear(w, back, err);
	if (r == 0)
		r = work_files(w, &files, err);
	if (r < 0)
		return r;
	r = agent_put(&files, path, &put, TREE_DEPTH_MAX, err);
	fd_close(&files.conn_fd);
	return r;
}

static int undo(const char *name, const uint64_t *point, const char *const *paths, size_t nr_paths,
	struct err *err)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP(work_machine_fini) struct work_machine w = WORK_MACHINE_NONE;
	CLEANUP(work_back_fini) struct work_back back = {0};
	CLEANUP_MANIFEST struct work_manifest now = {0};
	char quoted[WORK_QUOTED_MAX], number[24];
	const char *words[] = {number, NULL};
	struct work_log log;
	uint32_t to, last;
	int r = work_machine_open(&w, name, err);

	if (r == 0)
		r = work_history_open(&h, w.state_fd, -1, err);
	if (r == 0)
		r = take_point(&w, &h, &now, err);
	if (r < 0)
		return r;
	to = point ? (uint32_t)*point : h.last ? h.last - 1 : 0;
	r = work_history_back(&h, to, &now, paths, nr_paths, &back, err);
	if (r < 0)
		return r;
	if (!back.nr) {
		printf("nothing differs from point %u\n", to);
		return 0;
	}
	snprintf(number, sizeof(number), "%u", to);
	r = work_log_call(&log, w.m.dir, "undo", words, err);
	if (r < 0)
		return r;
	w.deadline_ns = now_ns() + BACK_NS;
	r = put_back(&w, &h, &back, err);
	work_log_result(&log, r, err, -1, NULL);
	if (r < 0)
		return err_wrap(
			err, r, "going back to point %u (what there was is point %u)", to, h.last);
	r = take_point(&w, &h, NULL, err);
	last = h.last;
	work_history_close(&h);
	for (size_t i = 0; i < back.nr; i++)
		printf("%c %s\n",
			!back.steps[i].now  ? 'A'
			: !back.steps[i].to ? 'D'
					    : 'M',
			work_quote(quoted, back.steps[i].path));
	if (r >= 0)
		printf("as it was at point %u; this is point %u\n", to, last);
	return r;
}

int undo_main(int argc, char **argv)
{
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	char name[HOME_NAME_MAX + 1];
	struct err err = {0};
	uint64_t point = 0;
	bool given;
	int opt;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		fputs(undo_help, opt == 'h' ? stdout : stderr);
		return opt == 'h' ? 0 : EXIT_USAGE;
	}
	given = argc - optind > 1;
	if (take_arguments(argc, argv, name, &point, &err) < 0)
		return cli_bad_option("undo", &err);
	return undo(name, given ? &point : NULL, (const char *const *)argv + optind,
		       (size_t)(argc - optind), &err) < 0
		       ? cli_fail("undo", &err)
		       : 0;
}
