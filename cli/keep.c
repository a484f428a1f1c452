// SPDX-License-Identifier: Apache-2.0
// mayfly diff, keep and discard: what a machine has changed in its folder. One thread, and one more
// that receives.
#include "cli/keep.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/life.h"
#include "cli/work_log.h"
#include "cli/work_patch.h"
#include "cli/work_persist.h"
#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "work/history.h"

// --- Telling ---------------------------------------------------------------------------------

static const struct {
	unsigned int note;
	const char *name, *text;
} notes[] = {
	{WORK_NOTE_EXEC, "exec", "executable now"},
	{WORK_NOTE_LOCK, "lock", "decides what is downloaded"},
	{WORK_NOTE_CI, "ci", "runs in CI"},
	{WORK_NOTE_TOOL, "tool", "tools on this host act upon it"},
	{WORK_NOTE_CASE, "case", "differs from another by case alone"},
	{WORK_NOTE_GIT, "git", "git on this host would run what it says"},
};

static char letter(const struct work_change *c)
{
	return c->conflict               ? '!'
	       : c->withheld             ? '-'
	       : c->kind == WORK_DELETED ? 'D'
	       : c->from                 ? 'R'
	       : c->kind == WORK_ADDED   ? 'A'
					 : 'M';
}

static void print_change(FILE *out, const struct work_change *c)
{
	char quoted[WORK_QUOTED_MAX], from[WORK_QUOTED_MAX];
	const struct work_entry *e = c->guest ? c->guest : c->host;
	const char *colon = ": ";

	if (c->moved && !c->conflict)
		return; // it is told where it went
	fprintf(out, "%c %s%s%s%s", letter(c), c->from ? work_quote(from, c->from) : "",
		c->from ? " -> " : "", work_quote(quoted, c->path), e && e->type == 'd' ? "/" : "");
	if (c->conflict)
		fprintf(out, ": %s", c->conflict);
	for (size_t i = 0; i < ARRAY_SIZE(notes); i++) {
		if (!(c->notes & notes[i].note))
			continue;
		fprintf(out, "%s%s", c->conflict ? "; " : colon, notes[i].text);
		colon = ", ";
	}
	fprintf(out, "%s\n", c->withheld ? " (kept only if it is named)" : "");
}

static json_t *change_json(const struct work_change *c)
{
	static const char *const kinds[] = {"added", "changed", "deleted"};
	char quoted[WORK_QUOTED_MAX];
	json_t *json = json_object(), *list = json_array();
	// Bytes that are no UTF-8 are no JSON either.
	json_t *path = json_string(c->path);

	json_object_set_new(json, "path", path ? path : json_string(work_quote(quoted, c->path)));
	json_object_set_new(json, "change", json_string(kinds[c->kind]));
	if (c->from)
		json_object_set_new(json, "from", json_string(work_quote(quoted, c->from)));
	if (c->guest) {
		json_object_set_new(
			json, "type", json_string((const char[]){c->guest->type, '\0'}));
		json_object_set_new(json, "mode", json_integer(c->guest->mode));
		json_object_set_new(json, "size", json_integer((json_int_t)c->guest->size));
	}
	json_object_set_new(json, "conflict", c->conflict ? json_string(c->conflict) : json_null());
	json_object_set_new(json, "withheld", json_boolean(c->withheld));
	for (size_t i = 0; i < ARRAY_SIZE(notes); i++)
		if (c->notes & notes[i].note)
			json_array_append_new(list, json_string(notes[i].name));
	json_object_set_new(json, "notes", list);
	return json;
}

static void print_json(const struct work_plan *plan)
{
	json_t *list = json_array();

	for (size_t i = 0; i < plan->nr; i++)
		json_array_append_new(list, change_json(&plan->changes[i]));
	json_dumpf(list, stdout, JSON_INDENT(2));
	putchar('\n');
	json_decref(list);
}

static void print_plan(FILE *out, const struct work_plan *plan)
{
	for (size_t i = 0; i < plan->nr; i++)
		print_change(out, &plan->changes[i]);
}

// Copies a text that the guest has a part in; on a terminal without what would drive that.
static void print_text(int fd)
{
	bool terminal = isatty(STDOUT_FILENO);
	char bytes[4096];
	ssize_t n;

	lseek(fd, 0, SEEK_SET);
	while ((n = fd_read_full(fd, bytes, sizeof(bytes))) > 0) {
		for (ssize_t i = 0; i < n && terminal; i++) {
			unsigned char c = (unsigned char)bytes[i];

			if ((c < ' ' && c != '\n' && c != '\t') || c == 0x7f ||
				(c >= 0x80 && c < 0xa0 && i > 0 &&
					(unsigned char)bytes[i - 1] == 0xc2))
				bytes[i] = '?';
		}
		fwrite(bytes, 1, (size_t)n, stdout);
	}
}

// --- keep ------------------------------------------------------------------------------------

static int write_patch(
	const struct work_machine *w, struct work_look *look, const char *path, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	int r;

	if (fd < 0)
		return err_errno(err, -errno, "%s", path);
	r = work_patch(w, look, fd, err);
	if (r < 0)
		unlink(path);
	return r;
}

// Signals wait until it is over: whoever is killed in between leaves work for the next command.
static int keep_undisturbed(
	struct work_machine *w, const struct keep *keep, struct work_look *look, struct err *err)
{
	static const char *const everything[] = {".", NULL};
	struct work_log log;
	sigset_t all, old;
	int r;

	// Here a signal still ends us: it may take its time, and nothing has changed yet.
	work_history_save(w->state_fd, w->target_fd, &look->plan);
	r = work_log_call(&log, w->m.dir, "keep", keep->nr_paths ? keep->paths : everything, err);
	if (r < 0)
		return r;
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, &old);
	r = work_keep(&look->stage, &look->plan, err);
	work_log_result(&log, r, err, -1, r == 0 ? &look->plan : NULL);
	if (r == 0) {
		work_stage_close(&look->stage);
		r = work_kept(w, look, err);
		if (r < 0)
			err_wrap(err, r, "it is kept, but that could not be noted");
	}
	sigprocmask(SIG_SETMASK, &old, NULL);
	return r;
}

static int tell_recovered(int r, const char *verb, const char *target)
{
	if (r == WORK_TAKEN_BACK || r == WORK_FINISHED)
		fprintf(stderr,
			"mayfly %s: %s: a command that was killed had begun to keep changes; %s\n",
			verb, target,
			r == WORK_TAKEN_BACK ? "that is taken back, the folder is as it was"
					     : "they are kept, and what it left is cleared away");
	return MIN(r, 0);
}

static int keep_look(
	struct work_machine *w, const struct keep *keep, struct work_look *look, struct err *err)
{
	bool instead = keep->patch || keep->branch;
	size_t withheld = 0;
	int r = tell_recovered(work_recover(w->target_fd, err), keep->verb, w->target);

	if (r == 0)
		r = work_look(w, instead ? w->state_fd : w->target_fd, keep->max_bytes, look, err);
	if (r == 0 && keep->nr_paths)
		r = work_plan_only(&look->plan, keep->paths, keep->nr_paths, err);
	if (r < 0)
		return r;
	for (size_t i = 0; i < look->plan.nr; i++)
		withheld += look->plan.changes[i].withheld;
	if (withheld && !keep->json)
		for (size_t i = 0; i < look->plan.nr; i++)
			if (look->plan.changes[i].withheld)
				print_change(stderr, &look->plan.changes[i]);
	r = work_plan_settle(&look->plan, err);
	if (r < 0)
		return r;
	if (keep->json)
		print_json(&look->plan);
	if (look->plan.conflicts) {
		for (size_t i = 0; i < look->plan.nr; i++)
			if (look->plan.changes[i].conflict)
				print_change(stderr, &look->plan.changes[i]);
		fprintf(stderr,
			"mayfly %s: %zu of %zu changes cannot be kept: nothing was (name those "
			"that "
			"can: mayfly keep %s PATH…)\n",
			keep->verb, look->plan.conflicts, look->plan.nr, w->name);
		return EXIT_CONFLICT;
	}
	if (!keep->json)
		print_plan(stdout, &look->plan);
	if (keep->patch)
		return write_patch(w, look, keep->patch, err);
	if (keep->branch)
		return work_branch(w, look, keep->branch, err);
	return look->plan.nr ? keep_undisturbed(w, keep, look, err) : 0;
}

int keep_changes(struct work_machine *w, const struct keep *keep, struct err *err)
{
	struct work_look look = WORK_LOOK_NONE;
	int r = keep_look(w, keep, &look, err);

	work_look_fini(&look);
	return r;
}

// --- diff ------------------------------------------------------------------------------------

static int show_look(struct work_machine *w, const struct keep *keep, bool stat,
	struct work_look *look, struct err *err)
{
	CLEANUP_FD int fd = -1;
	int r = tell_recovered(work_recover(w->target_fd, err), keep->verb, w->target);

	if (r == 0)
		r = work_look(w, w->state_fd, keep->max_bytes, look, err);
	if (r == 0 && keep->nr_paths)
		r = work_plan_only(&look->plan, keep->paths, keep->nr_paths, err);
	if (r == 0)
		r = work_plan_judge(&look->plan, err);
	if (r < 0)
		return r;
	if (keep->json)
		print_json(&look->plan);
	else
		print_plan(stdout, &look->plan);
	if (stat || keep->json || look->plan.nr == 0)
		return 0;
	fd = memfd_create("diff", MFD_CLOEXEC);
	if (fd < 0)
		return err_errno(err, -errno, "diff");
	r = work_patch(w, look, fd, err);
	if (r < 0)
		return r;
	putchar('\n');
	print_text(fd);
	return 0;
}

static int show_changes(struct work_machine *w, const struct keep *keep, bool stat, struct err *err)
{
	struct work_look look = WORK_LOOK_NONE;
	int r = show_look(w, keep, stat, &look, err);

	work_look_fini(&look);
	return r;
}

// --- The verbs -------------------------------------------------------------------------------

static const char diff_help[] =
	"Usage: mayfly diff [OPTION]... [NAME [PATH]...]\n"
	"\n"
	"Tells what a machine that mayfly work has made has changed in its folder, then shows the\n"
	"change of each file. Without NAME: the machine of this folder.\n"
	"\n"
	"      --stat            the names alone: A added, M changed, D deleted, R moved, ! "
	"cannot\n"
	"                        be kept (changed on this host, too, or it would do harm), - only\n"
	"                        kept if it is named, since git on this host would run it\n"
	"      --json            the same as JSON\n"
	"      --max SIZE        what the changed files may take of this host's disk (default "
	"2G)\n";

static const char keep_help[] =
	"Usage: mayfly keep [OPTION]... [NAME [PATH]...]\n"
	"\n"
	"Brings what a machine has changed in its folder, or at PATH in that, out into the folder\n"
	"of this host: all of it or nothing, whatever happens meanwhile. What has been changed\n"
	"here since it went in is a conflict, and what would do harm (links that lead out of the\n"
	"folder) is refused; then nothing is kept. Git's hooks and configuration are kept only if\n"
	"they are named. The machine goes on. Without NAME: the machine of this folder.\n"
	"\n"
	"      --as-patch FILE   write a patch instead, for git apply\n"
	"      --as-branch NAME  make a branch of one commit in the folder's git repository\n"
	"                        instead; what is checked out stays as it is\n"
	"      --json            tell what is kept as JSON\n"
	"      --max SIZE        what the changed files may take of this host's disk (default 2G)\n"
	"\n"
	"Exit status: 0, 1 if there was a conflict, 125 if it failed, 2 for wrong usage.\n";

enum { OPT_STAT = 'S', OPT_JSON = 'J', OPT_MAX = 'M', OPT_PATCH = 'P', OPT_BRANCH = 'B' };

static int diff_or_keep(int argc, char **argv, bool diff)
{
	static const struct option diff_options[] = {
		{"stat", no_argument, NULL, OPT_STAT},
		{"json", no_argument, NULL, OPT_JSON},
		{"max", required_argument, NULL, OPT_MAX},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	static const struct option keep_options[] = {
		{"as-patch", required_argument, NULL, OPT_PATCH},
		{"as-branch", required_argument, NULL, OPT_BRANCH},
		{"json", no_argument, NULL, OPT_JSON},
		{"max", required_argument, NULL, OPT_MAX},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	struct keep keep = {.verb = diff ? "diff" : "keep", .max_bytes = KEEP_MAX_BYTES};
	struct work_machine w = WORK_MACHINE_NONE;
	const char *help = diff ? diff_help : keep_help;
	char name[HOME_NAME_MAX + 1];
	struct err err = {0};
	bool stat = false;
	int opt, r;

	optind = 1;
	while ((opt = getopt_long(argc, argv, "h", diff ? diff_options : keep_options, NULL)) !=
		-1) {
		switch (opt) {
		case OPT_STAT:
			stat = true;
			break;
		case OPT_JSON:
			keep.json = true;
			break;
		case OPT_PATCH:
			keep.patch = optarg;
			break;
		case OPT_BRANCH:
			keep.branch = optarg;
			break;
		case OPT_MAX:
			if (parse_size(optarg, &keep.max_bytes, &err) < 0)
				return cli_bad_option(keep.verb, &err);
			break;
		case 'h':
			fputs(help, stdout);
			return 0;
		default:
			fputs(help, stderr);
			return EXIT_USAGE;
		}
	}
	if (keep.patch && keep.branch) {
		fputs("mayfly keep: --as-patch or --as-branch\n", stderr);
		return EXIT_USAGE;
	}
	if (optind < argc) {
		if (home_check_name(argv[optind], &err) < 0)
			return cli_bad_option(keep.verb, &err);
		snprintf(name, sizeof(name), "%s", argv[optind++]);
	} else if (work_name_here(name, &err) < 0) {
		return cli_fail(keep.verb, &err);
	}
	keep.paths = (const char *const *)argv + optind;
	keep.nr_paths = (size_t)(argc - optind);
	r = work_machine_open(&w, name, &err);
	if (r == 0) {
		w.progress = isatty(STDERR_FILENO);
		r = diff ? show_changes(&w, &keep, stat, &err) : keep_changes(&w, &keep, &err);
		work_machine_fini(&w);
	}
	return r < 0 ? cli_fail(keep.verb, &err) : r;
}

int diff_main(int argc, char **argv)
{
	return diff_or_keep(argc, argv, true);
}

int keep_main(int argc, char **argv)
{
	return diff_or_keep(argc, argv, false);
}

static int discard(const char *name, struct err *err)
{
	char dir[PATH_MAX], target[PATH_MAX];
	CLEANUP_FD int target_fd = -1;
	int r = home_find(name, dir, err);

	if (r < 0)
		return r;
	// Only what mayfly work has made; and what a killed keep has begun is ended first.
	if (work_target_of(dir, target, err) == 0) {
		target_fd = open(target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (target_fd >= 0)
			r = tell_recovered(work_recover(target_fd, err), "discard", target);
	} else if (!work_begun(dir)) {
		return err_wrap(err, -ENOENT, "%s", name);
	}
	if (r == 0) {
		r = work_persist_out(name, -1, err);
		if (r < 0)
			err_wrap(err, r,
				"%s is still there (mayfly rm --force removes it all the same)",
				name);
	}
	return r < 0 ? r : life_remove(name, true, err);
}

int discard_main(int argc, char **argv)
{
	static const char help[] =
		"Usage: mayfly discard [NAME]...\n"
		"\n"
		"Removes machines that mayfly work has made, with all that they have changed and\n"
		"that has not been kept, but for the paths of persist in .mayfly.ini. The folders "
		"of\n"
		"this host stay as they are. Without NAME:\n"
		"the machine of this folder.\n";
	char name[HOME_NAME_MAX + 1];
	struct err err = {0};
	int status = 0;

	if (argc > 1 && argv[1][0] == '-') {
		bool wanted = !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h");

		fputs(help, wanted ? stdout : stderr);
		return wanted ? 0 : EXIT_USAGE;
	}
	if (argc == 1) {
		if (work_name_here(name, &err) < 0 || discard(name, &err) < 0)
			status = cli_fail("discard", &err);
		return status;
	}
	for (int i = 1; i < argc; i++)
		if (discard(argv[i], &err) < 0)
			status = cli_fail("discard", &err);
	return status;
}
