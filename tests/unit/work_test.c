// SPDX-License-Identifier: Apache-2.0
// work/: manifests, what is left out, comparing, and keeping: on plain folders, and with the
// process that keeps killed at each of its system calls.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vmm/base/buf.h"
#include "vmm/base/fd.h"
#include "work/history.h"
#include "work/keep.h"
#include "work/scan.h"

static char dir[64];

static void make_dir(void)
{
	// In memory where there is such a place: thousands of trees are made and synced here.
	snprintf(dir, sizeof(dir), "%s/mayfly-work-test-XXXXXX",
		access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
	assert_non_null(mkdtemp(dir));
	assert_int_equal(chdir(dir), 0);
}

static int sh(const char *script)
{
	char command[8192];

	assert_int_equal(chdir(dir), 0); // the one that we are in may be gone
	snprintf(command, sizeof(command), "cd %s && { %s\n}", dir, script);
	return system(command);
}

static void remove_dir(void)
{
	assert_int_equal(sh("chmod -R u+w . && rm -rf \"$PWD\""), 0);
	assert_int_equal(chdir("/"), 0);
}

static int open_in(const char *name)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_true(fd >= 0);
	return fd;
}

// --- Manifests -------------------------------------------------------------------------------

static void takes_paths_of_a_tree_only(void **state)
{
	static const char *const good[] = {"a", "a/b", ".a", "..a", "a/...", "\xff\n"};
	static const char *const bad[] = {
		"", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a/../b"};
	char path[600] = "";

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(good); i++)
		assert_true(work_path_ok(good[i]));
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_false(work_path_ok(bad[i]));
	memset(path, 'x', 256);
	assert_false(work_path_ok(path));
	path[255] = '\0';
	assert_true(work_path_ok(path));
	for (unsigned int i = 0; i < WORK_DEPTH_MAX; i++)
		memcpy(path + 2 * i, "a/", 2);
	path[2 * WORK_DEPTH_MAX - 1] = '\0';
	assert_true(work_path_ok(path));
	memcpy(path + 2 * WORK_DEPTH_MAX - 1, "/a", 3);
	assert_false(work_path_ok(path));
}

static void quotes_what_would_not_print(void **state)
{
	static const struct {
		const char *path, *wanted;
	} rows[] = {
		{"plain/na me", "plain/na me"}, {"gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f"},
		{"a\nb", "\"a\\nb\""}, {"\x1b[2J", "\"\\033[2J\""}, {"\xff", "\"\\377\""},
		{"a\"b", "\"a\\\"b\""}, {"\xc0\xaf", "\"\\300\\257\""}, // overlong
		{"\xe2\x80\xae"
		 "cod",
			"\"\\342\\200\\256cod\""}, // right to left
		{"\xc2\x9b", "\"\\302\\233\""}, // a control sequence of eight bits
		{"\xe2\x80", "\"\\342\\200\""}, // cut
	};
	char quoted[WORK_QUOTED_MAX], longer[2000];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		assert_string_equal(work_quote(quoted, rows[i].path), rows[i].wanted);
	memset(longer, '\n', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	assert_true(strlen(work_quote(quoted, longer)) < sizeof(quoted));
}

static void keeps_a_manifest_on_the_disk(void **state)
{
	CLEANUP_MANIFEST struct work_manifest m = {0}, back = {0};
	struct err err = {0};
	CLEANUP_FD int fd = -1;

	(void)state;
	make_dir();
	assert_int_equal(sh("mkdir -p t/d/e && echo 1 >t/d/f && ln -s f t/d/l && touch \"$(printf "
			    "'t/\\377\\n')\" && chmod 640 t/d/f && mkfifo t/p"),
		0);
	fd = open_in("t");
	assert_int_equal(
		work_scan(&(struct work_scan){.ignore = &(struct work_ignore){0}}, fd, &m, &err),
		0);
	assert_int_equal(m.nr, 5); // no FIFO
	fd_close(&fd);
	fd = open_in(".");
	assert_int_equal(work_manifest_write(&m, fd, "m", &err), 0);
	assert_int_equal(work_manifest_read(fd, "m", &back, &err), 0);
	assert_int_equal(back.nr, m.nr);
	assert_int_equal(back.taken_ns, m.taken_ns);
	for (size_t i = 0; i < m.nr; i++) {
		assert_string_equal(m.entries[i].path, back.entries[i].path);
		assert_true(work_entry_same(&m.entries[i], &back.entries[i]));
		assert_true(work_entry_untouched(&m.entries[i], &back.entries[i]));
	}
	assert_int_equal(work_manifest_find(&back, "d/f")->mode, 0640);
	assert_string_equal(work_manifest_find(&back, "d/l")->link, "f");
	assert_null(work_manifest_find(&back, "p"));
	// One bit of it, anywhere.
	assert_int_equal(sh("python3 - <<'E'\n"
			    "b = bytearray(open('m', 'rb').read()); b[len(b) // 2] ^= 1\n"
			    "open('bad', 'wb').write(b)\n"
			    "E"),
		0);
	work_manifest_fini(&back);
	assert_int_equal(work_manifest_read(fd, "bad", &back, &err), -EBADMSG);
	assert_int_equal(work_manifest_read(fd, "none", &back, &err), -ENOENT);
	remove_dir();
}

static void refuses_a_manifest_that_makes_no_tree(void **state)
{
	static const struct work_entry good = {.path = "d", .type = 'd', .mode = 0755};
	static const struct work_entry no_parent = {.path = "x/y", .type = 'f'};
	static const struct work_entry bad[] = {
		{.path = "../x", .type = 'f'},
		{.path = "x", .type = 'c'},
		{.path = "x", .type = 'l'},
		{.path = "x", .type = 'f', .link = "y"},
		{.path = "x", .type = 'f', .mode = 04755},
	};
	CLEANUP_MANIFEST struct work_manifest m = {0};
	struct err err;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(work_manifest_add(&m, &bad[i], &err), -EINVAL);
	assert_int_equal(work_manifest_add(&m, &good, &err), 0);
	assert_int_equal(work_manifest_finish(&m, &err), 0);
	assert_int_equal(work_manifest_add(&m, &good, &err), 0);
	assert_int_equal(work_manifest_finish(&m, &err), -EINVAL);
	m.nr = 1;
	assert_int_equal(work_manifest_add(&m, &no_parent, &err), 0);
	assert_int_equal(work_manifest_finish(&m, &err), -EINVAL);
}

static void bounds_what_a_guest_may_list(void **state)
{
	CLEANUP_MANIFEST struct work_manifest m = {0};
	char path[PATH_MAX];
	struct work_entry e = {.path = path, .type = 'd'};
	struct err err = {0};
	unsigned int nr = 0;
	int r;

	(void)state;
	for (size_t i = 0; i < 16; i++) {
		memset(path + 250 * i, 'x', 249);
		path[250 * i + 249] = '/';
	}
	path[250 * 16 - 1] = '\0';
	do
		r = work_manifest_add(&m, &e, &err);
	while (r == 0 && ++nr < WORK_ENTRIES_MAX);
	assert_int_equal(r, -E2BIG);
	assert_true(nr <= WORK_STRINGS_MAX / (250 * 16) + 2);
}

// --- What is left out ------------------------------------------------------------------------

static void ignores_as_git_does(void **state)
{
	static const char text[] = "# comment\n\n*.o\n/top\nbuild/\n!keep.o\ndoc/*.txt\na/**/z\n"
				   "logs/**\n**/deep/x\r\n[ab]c?\n";
	static const struct {
		const char *path;
		bool folder, wanted;
	} rows[] = {
		{"x.o", false, true},
		{"d/x.o", false, true},
		{"d/keep.o", false, false},
		{"top", false, true},
		{"d/top", false, false},
		{"build", true, true},
		{"build", false, false},
		{"d/build/f", false, true},
		{"doc/a.txt", false, true},
		{"doc/d/a.txt", false, false},
		{"x/doc/a.txt", false, false},
		{"a/z", false, true},
		{"a/b/c/z", false, true},
		{"az", false, false},
		{"logs", true, false},
		{"logs/1", false, true},
		{"logs/a/b", false, true},
		{"deep/x", false, true},
		{"1/2/deep/x", false, true},
		{"acd", false, true},
		{"ccd", false, false},
		{"# comment", false, false},
		{WORK_STAGE_NAME, true, true},
		{WORK_STAGE_NAME "/x", false, true},
		{WORK_STAGE_NAME "er", false, false},
	};
	struct work_ignore ig = {0};
	struct err err = {0};

	(void)state;
	assert_int_equal(work_ignore_parse(text, strlen(text), &ig, &err), 0);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		if (work_ignored_within(&ig, rows[i].path, rows[i].folder) != rows[i].wanted)
			fail_msg("%s", rows[i].path);
	work_ignore_fini(&ig);
	assert_int_equal(work_ignore_parse("a\n/\n", 4, &ig, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "line 2"));
	assert_int_equal(work_ignore_parse("a\0b", 3, &ig, &err), -EINVAL);
	assert_int_equal(work_ignore_parse("**/**/**/**/x", 13, &ig, &err), -EINVAL);
}

// --- Three trees -----------------------------------------------------------------------------

// h/ is the host's tree, g/ the guest's, which begins as a copy of it. What is in g.staged, and
// nothing else, has come out of the guest.
struct work {
	struct work_ignore ignore;
	struct work_manifest base, before, host, guest;
	struct work_trees trees;
	struct work_plan plan;
	struct work_stage stage;
};

static void scan(const struct work *w, const char *name, const struct work_manifest *before,
	struct work_manifest *ret)
{
	struct work_scan how = {.ignore = &w->ignore, .before = before};
	struct err err = {0};
	CLEANUP_FD int fd = open_in(name);

	if (work_scan(&how, fd, ret, &err) < 0)
		fail_msg("%s: %s", name, err.msg);
}

static void begin(struct work *w, const char *ignore, const char *make)
{
	*w = (struct work){.stage = WORK_STAGE_NONE};
	assert_int_equal(work_ignore_parse(ignore, strlen(ignore), &w->ignore, NULL), 0);
	assert_int_equal(sh("[ ! -e g ] || chmod -R u+w h g; rm -rf h g && mkdir h"), 0);
	assert_int_equal(chdir(dir), 0);
	assert_int_equal(chdir("h"), 0);
	assert_int_equal(system(make), 0);
	assert_int_equal(sh("cp -a h g"), 0);
	scan(w, "h", NULL, &w->base);
	scan(w, "g", NULL, &w->before);
}

static void end(struct work *w)
{
	work_stage_close(&w->stage);
	work_plan_fini(&w->plan);
	work_manifest_fini(&w->base);
	work_manifest_fini(&w->before);
	work_manifest_fini(&w->host);
	work_manifest_fini(&w->guest);
	work_ignore_fini(&w->ignore);
}

// What the guest hands out: the files that are asked for.
static void hand_out(struct work *w, int guest_fd)
{
	for (size_t i = 0; i < w->guest.nr; i++) {
		struct work_entry *e = &w->guest.entries[i];
		char text[256], folder[256];
		int from, to;
		ssize_t n;

		e->hashed = false;
		if (!work_must_hash(&w->trees, e))
			continue;
		snprintf(folder, sizeof(folder), "%s", e->path);
		for (char *s = folder; (s = strchr(s, '/')); *s++ = '/') {
			*s = '\0';
			mkdirat(w->stage.tree_fd, folder, 0755);
		}
		from = openat(guest_fd, e->path, O_RDONLY | O_CLOEXEC);
		to = openat(
			w->stage.tree_fd, e->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		n = read(from, text, sizeof(text));
		assert_true(n >= 0 && n < (ssize_t)sizeof(text));
		assert_int_equal(write(to, text, (size_t)n), n);
		close(from);
		close(to);
	}
}

static int look(struct work *w, struct err *err)
{
	int home_fd = open_in("h"), guest_fd = open_in("g"), r;

	w->trees = (struct work_trees){.base = &w->base,
		.before = &w->before,
		.host = &w->host,
		.guest = &w->guest,
		.ignore = &w->ignore};
	r = work_stage_open(&w->stage, home_fd, err);
	close(home_fd);
	if (r == 0) {
		scan(w, "h", &w->base, &w->host);
		scan(w, "g", NULL, &w->guest);
		hand_out(w, guest_fd);
		r = work_stage_hash(&w->stage, &w->trees, &w->guest, true, err);
	}
	close(guest_fd);
	if (r == 0)
		r = work_compare(&w->trees, &w->plan, err);
	return r;
}

static const struct work_change *change_at(const struct work *w, const char *path)
{
	for (size_t i = 0; i < w->plan.nr; i++)
		if (!strcmp(w->plan.changes[i].path, path))
			return &w->plan.changes[i];
	return NULL;
}

// The guest does this, the host that, and all is kept.
static void both(struct work *w, const char *guest, const char *host)
{
	struct err err = {0};

	assert_int_equal(chdir(dir), 0);
	assert_int_equal(chdir("g"), 0);
	assert_int_equal(system(guest), 0);
	assert_int_equal(chdir("../h"), 0);
	assert_int_equal(system(host), 0);
	if (look(w, &err) < 0 || work_plan_settle(&w->plan, &err) < 0)
		fail_msg("%s", err.msg);
}

static void keep_all(struct work *w)
{
	struct err err = {0};

	for (size_t i = 0; i < w->plan.nr; i++)
		if (w->plan.changes[i].conflict)
			fail_msg("%s: %s", w->plan.changes[i].path, w->plan.changes[i].conflict);
	if (work_keep(&w->stage, &w->plan, &err) < 0)
		fail_msg("%s", err.msg);
	work_stage_close(&w->stage);
	assert_int_equal(sh("[ ! -e h/" WORK_STAGE_NAME " ]"), 0);
}

#define PROJECT                                                                           \
	"mkdir -p src/deep empty gone/sub ro && echo 1 >src/a && echo 2 >src/deep/b && "  \
	"echo 3 >gone/x && echo 4 >gone/sub/y && echo 5 >run.sh && ln -s src/a link && "  \
	"echo moved >old-name && echo 6 >a-b && echo 7 >ro/f && chmod 600 src/deep/b && " \
	"echo same >untouched && mkdir turns && echo 8 >turns/in && echo 9 >becomes"

#define GUEST_WORK                                                                              \
	"echo 11 >src/a && rm -r gone empty && mkdir -p new/folder && echo n >new/folder/f && " \
	"chmod +x run.sh && ln -sf src/deep/b link && mv old-name new-name && "                 \
	"rm -r turns && echo file >turns && rm becomes && mkdir becomes && "                    \
	"echo in >becomes/in && chmod 700 src/deep && rm a-b && mkdir closed && "               \
	"echo c >closed/f && chmod 555 closed && ln -s ../src new/up && : >new/nothing"

static void brings_all_kinds_of_changes_out(void **state)
{
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "", PROJECT);
	both(&w, GUEST_WORK, "echo new >host-only");
	assert_string_equal(change_at(&w, "new-name")->from, "old-name");
	assert_int_equal(change_at(&w, "run.sh")->notes, WORK_NOTE_EXEC);
	assert_int_equal(change_at(&w, "src/a")->kind, WORK_CHANGED);
	assert_int_equal(change_at(&w, "gone/x")->kind, WORK_DELETED);
	assert_int_equal(change_at(&w, "new/folder")->kind, WORK_ADDED);
	assert_null(change_at(&w, "untouched"));
	assert_null(change_at(&w, "host-only"));
	keep_all(&w);
	assert_int_equal(sh("cp h/host-only g/ && diff -r --no-dereference g h && "
			    "[ \"$(cd g && find . -printf '%p %m %l\\n' | sort)\" = \"$(cd h && "
			    "find . -printf '%p %m %l\\n' | sort)\" ]"),
		0);
	end(&w);
	remove_dir();
}

static void tells_conflicts_and_leaves_the_rest_alone(void **state)
{
	static const struct {
		const char *guest, *host, *at; // at: the conflict, NULL: none
	} rows[] = {
		{"echo g >src/a", "echo h >src/a", "src/a"},
		{"echo g >src/a", "rm src/a", "src/a"},
		{"rm src/a", "echo h >src/a", "src/a"},
		{"echo g >src/a", "chmod 600 src/a", "src/a"},
		{"echo n >n", "echo m >n", "n"},
		{"mkdir n", "echo m >n", "n"},
		{"rm -r gone", "echo h >gone/more", "gone"},
		{"rm -r gone", "echo h >gone/sub/y", "gone/sub/y"},
		{"rm -r gone && echo f >gone", "echo h >gone/more", "gone"},
		{"echo g >gone/more", "rm -r gone", "gone/more"},
		{"echo g >gone/more", "rm -r gone && echo h >gone", "gone/more"},
		{"ln -sf b link", "ln -sf c link", "link"},
		// The same on both sides, and what does not meet.
		{"echo n >n", "echo n >n", NULL},
		{"rm src/a", "rm src/a", NULL},
		{"echo g >src/a", "echo g >src/a", NULL},
		{"echo g >src/a", "echo h >src/deep/b", NULL},
		{"rm src/a", "echo h >src/more", NULL},
		{"touch src/a", "echo h >src/a", NULL},
	};
	struct work w;

	(void)state;
	make_dir();
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		begin(&w, "", PROJECT);
		both(&w, rows[i].guest, rows[i].host);
		if (rows[i].at) {
			const struct work_change *c = change_at(&w, rows[i].at);

			if (!c || !c->conflict || w.plan.conflicts == 0)
				fail_msg("%s, %s: no conflict", rows[i].guest, rows[i].host);
		} else {
			keep_all(&w);
		}
		end(&w);
	}
	remove_dir();
}

static void refuses_links_that_lead_out(void **state)
{
	static const struct {
		const char *guest;
		bool out;
	} rows[] = {
		{"ln -s /etc/passwd l", true},
		{"ln -s ../x l", true},
		{"ln -s ../../x src/l", true},
		{"ln -s ../a src/l", false},
		{"ln -s src/../a-b l", false},
		{"ln -s src/../../a-b l", true},
		{"ln -s deep src/s && ln -s src/s/../../a-b l", false},
		{"ln -s . s && ln -s s/../x l", true},
		{"ln -s .. src/up && ln -s src/up/../x l", true},
		{"ln -s b a1 && ln -s a1 b", false}, // a loop leads nowhere
		{"ln -s nowhere/../../x l", true},
		{"ln -s out l", true}, // by way of one that is the host's own
		{"ln -s out/x src/l", false}, // src/out is not there
		{"rm -r turns && ln -s . turns", true}, // turns "via" outwards
		{"ln -sf src/deep/b link", false},
	};
	struct work w;

	(void)state;
	make_dir();
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		begin(&w, "",
			PROJECT " && ln -s /usr out && ln -s turns/../../x via2 && "
				"ln -s turns/../a-b via");
		both(&w, rows[i].guest, ":");
		if ((w.plan.conflicts != 0) != rows[i].out)
			fail_msg("%s", rows[i].guest);
		end(&w);
	}
	remove_dir();
}

static void withholds_what_git_would_run(void **state)
{
	static const char *const paths[] = {".git/hooks"}, *const git = ".git";
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "",
		"mkdir -p .git/hooks && echo c >.git/config && echo r >.git/HEAD && echo 1 >f");
	both(&w,
		"echo evil >.git/config && echo evil >.git/hooks/post-checkout && chmod +x "
		".git/hooks/post-checkout && echo s >.git/HEAD && echo 2 >f && mkdir -p "
		".github/workflows && echo ci >.github/workflows/x.yml && echo l >Cargo.lock && "
		"mkdir -p vendor/.git bare/objects bare/refs && echo evil >vendor/.git/config && "
		"echo evil >bare/config && echo h >bare/HEAD && mkdir m && echo 'gitdir: ../bare' "
		">m/.git && echo 1 >README && echo 2 >Readme",
		":");
	assert_int_equal(w.plan.withheld, 5);
	assert_int_equal(change_at(&w, "Cargo.lock")->notes, WORK_NOTE_LOCK);
	assert_int_equal(change_at(&w, ".github/workflows/x.yml")->notes, WORK_NOTE_CI);
	assert_int_equal(change_at(&w, "Readme")->notes, WORK_NOTE_CASE);
	keep_all(&w);
	assert_int_equal(sh("grep -q c h/.git/config && [ ! -e h/.git/hooks/post-checkout ] && "
			    "grep -q s h/.git/HEAD && grep -q 2 h/f && [ ! -e h/bare/config ] && "
			    "[ ! -e h/m/.git ] && [ ! -e h/vendor/.git/config ]"),
		0);
	end(&w);
	// A repository that is gone is not lost by the way.
	begin(&w, "", "mkdir -p .git/refs && echo c >.git/HEAD && echo 1 >f");
	both(&w, "rm -rf .git f", ":");
	assert_int_equal(w.plan.conflicts, 1);
	assert_non_null(change_at(&w, ".git")->conflict);
	end(&w);
	begin(&w, "", "mkdir -p .git/refs && echo c >.git/HEAD && echo 1 >f");
	assert_int_equal(sh("rm -rf g/.git g/f"), 0);
	assert_int_equal(look(&w, &err), 0);
	assert_int_equal(work_plan_only(&w.plan, &git, 1, &err), 0);
	assert_int_equal(work_plan_settle(&w.plan, &err), 0);
	keep_all(&w);
	assert_int_equal(sh("[ ! -e h/.git ] && [ -e h/f ]"), 0);
	end(&w);
	// By its name it is kept, and nothing else is.
	begin(&w, "", "mkdir -p .git/hooks && echo 1 >f");
	assert_int_equal(sh("echo hook >g/.git/hooks/x && echo 2 >g/f"), 0);
	assert_int_equal(look(&w, &err), 0);
	assert_int_equal(work_plan_only(&w.plan, paths, 1, &err), 0);
	assert_int_equal(work_plan_settle(&w.plan, &err), 0);
	keep_all(&w);
	assert_int_equal(sh("grep -q hook h/.git/hooks/x && grep -q 1 h/f"), 0);
	end(&w);
	remove_dir();
}

static void keeps_what_is_named(void **state)
{
	static const char *const paths[] = {"./new/d/", "src/a"}, *const none[] = {"src/none"};
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "", PROJECT);
	assert_int_equal(sh("cd g && mkdir -p new/d && echo 1 >new/d/f && echo 2 >new/other && "
			    "echo 11 >src/a && echo 22 >src/deep/b"),
		0);
	assert_int_equal(look(&w, &err), 0);
	assert_int_equal(work_plan_only(&w.plan, none, 1, &err), -ENOENT);
	assert_int_equal(work_plan_only(&w.plan, paths, 2, &err), 0);
	assert_int_equal(work_plan_settle(&w.plan, &err), 0);
	keep_all(&w);
	assert_int_equal(sh("grep -q 1 h/new/d/f && [ ! -e h/new/other ] && grep -q 11 h/src/a && "
			    "grep -qx 2 h/src/deep/b"),
		0);
	end(&w);
	remove_dir();
}

static void leaves_alone_what_does_not_travel(void **state)
{
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "*.o\nmodules/\n",
		PROJECT " && mkdir -p gone/sub/modules && echo o >gone/x.o && "
			"echo k >gone/sub/modules/k");
	assert_int_equal(sh("cd g && find . -name '*.o' -delete && rm -r gone/sub/modules"), 0);
	work_manifest_fini(&w.before);
	scan(&w, "g", NULL, &w.before);
	both(&w, "rm -r gone && echo o >new.o && mkdir modules && echo m >modules/m", ":");
	keep_all(&w);
	assert_int_equal(sh("[ -e h/gone/x.o ] && [ -e h/gone/sub/modules/k ] && [ ! -e h/gone/x ] "
			    "&& [ ! -e h/gone/sub/y ] && [ ! -e h/new.o ] && [ ! -e h/modules ]"),
		0);
	end(&w);
	remove_dir();
}

static void trusts_no_time_that_was_set_back(void **state)
{
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "", PROJECT);
	// The same size and time: only the inode's own clock tells.
	both(&w, "touch -r src/a ref && echo X >src/a && touch -r ref src/a && rm ref", ":");
	assert_non_null(change_at(&w, "src/a"));
	keep_all(&w);
	end(&w);
	// And a folder that took another's place.
	begin(&w, "", "mkdir a b && echo 1 >a/f && echo 2 >b/f && touch -d @1 a/f b/f");
	both(&w, "mv a t && mv b a && mv t b", ":");
	assert_int_equal(w.plan.nr, 2);
	keep_all(&w);
	assert_int_equal(sh("grep -q 2 h/a/f && grep -q 1 h/b/f"), 0);
	end(&w);
	remove_dir();
}

static void believes_nothing_that_is_not_handed_out(void **state)
{
	struct err err = {0};
	struct work w;
	int home_fd, guest_fd;

	(void)state;
	make_dir();
	for (int i = 0; i < 3; i++) {
		static const char *const instead[] = {
			"rm h/.mayfly-keep/tree/src/a",
			("rm h/.mayfly-keep/tree/src/a && "
			 "ln -s /etc/passwd h/.mayfly-keep/tree/src/a"),
			"ln h/.mayfly-keep/tree/src/a h/.mayfly-keep/tree/other",
		};

		begin(&w, "", PROJECT);
		assert_int_equal(sh("echo 11 >g/src/a"), 0);
		w.trees = (struct work_trees){&w.base, &w.before, &w.host, &w.guest, &w.ignore};
		home_fd = open_in("h");
		guest_fd = open_in("g");
		assert_int_equal(work_stage_open(&w.stage, home_fd, &err), 0);
		scan(&w, "g", NULL, &w.guest);
		hand_out(&w, guest_fd);
		assert_int_equal(sh(instead[i]), 0);
		assert_int_equal(
			work_stage_hash(&w.stage, &w.trees, &w.guest, true, &err), -ESTALE);
		close(home_fd);
		close(guest_fd);
		end(&w);
	}
	remove_dir();
}

// After some of it is kept: what is known from then on, and what the next look finds.
static void goes_on_from_what_was_kept(void **state)
{
	static const char *const paths[] = {"src/a", "gone", "new"};
	struct work_manifest base = {0}, before = {0};
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin(&w, "", PROJECT);
	assert_int_equal(sh("cd g && " GUEST_WORK " && mkdir h && echo 1 >h/f && mkdir ../h/h"), 0);
	assert_int_equal(sh("rm -r h/gone/sub"), 0);
	assert_int_equal(look(&w, &err), 0);
	assert_int_equal(work_plan_only(&w.plan, paths, 3, &err), 0);
	assert_int_equal(work_plan_settle(&w.plan, &err), 0);
	keep_all(&w);
	assert_int_equal(work_rebase(&w.base, &w.plan, &w.guest, false, &base, &err), 0);
	assert_int_equal(work_rebase(&w.before, &w.plan, &w.guest, true, &before, &err), 0);
	assert_null(work_manifest_find(&base, "gone"));
	assert_null(work_manifest_find(&base, "gone/sub/y"));
	assert_non_null(work_manifest_find(&base, "run.sh"));
	assert_true(work_manifest_find(&base, "src/a")->hashed);
	assert_true(work_entry_untouched(
		work_manifest_find(&before, "src/a"), work_manifest_find(&w.guest, "src/a")));
	// Nothing of the guest's makes a file of the host's look as if it had been read before.
	assert_false(work_entry_untouched(
		work_manifest_find(&base, "src/a"), work_manifest_find(&w.guest, "src/a")));
	work_manifest_fini(&w.base);
	work_manifest_fini(&w.before);
	work_manifest_fini(&w.host);
	work_manifest_fini(&w.guest);
	work_plan_fini(&w.plan);
	w.base = base;
	w.before = before;
	assert_int_equal(sh("echo later >h/src/a"), 0);
	assert_int_equal(look(&w, &err), 0);
	assert_null(change_at(&w, "src/a"));
	assert_null(change_at(&w, "gone/x"));
	assert_null(change_at(&w, "new/folder/f"));
	assert_non_null(change_at(&w, "run.sh"));
	assert_int_equal(work_plan_settle(&w.plan, &err), 0);
	keep_all(&w);
	assert_int_equal(sh("grep -q later h/src/a && [ -x h/run.sh ] && [ -e h/h/f ]"), 0);
	end(&w);
	remove_dir();
}

// The host's tree changes between the look and the step: nothing is lost, nothing half.
static void takes_all_back_when_the_host_interferes(void **state)
{
	static const char *const interferences[] = {"echo late >h/src/a", "rm h/src/a",
		"rm h/src/a && mkdir h/src/a", "echo late >h/new", "echo late >h/gone/late",
		"rm -r h/gone && ln -s /etc h/gone", "rm -rf h/becomes && mkdir h/becomes"};
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	for (size_t i = 0; i < ARRAY_SIZE(interferences); i++) {
		begin(&w, "", PROJECT);
		both(&w, GUEST_WORK, ":");
		assert_int_equal(w.plan.conflicts, 0);
		assert_int_equal(sh(interferences[i]), 0);
		assert_int_equal(sh("rm -rf was && mkdir was && tar -C h --exclude "
				    "./" WORK_STAGE_NAME " -cf - . | tar -C was -xpf -"),
			0);
		assert_true(work_keep(&w.stage, &w.plan, &err) < 0);
		work_stage_close(&w.stage);
		if (sh("diff -r --no-dereference was h") != 0)
			fail_msg("%s", interferences[i]);
		end(&w);
	}
	remove_dir();
}

static void is_done_by_one_at_a_time(void **state)
{
	struct work_stage one = WORK_STAGE_NONE, two = WORK_STAGE_NONE;
	struct err err = {0};
	CLEANUP_FD int fd = -1;

	(void)state;
	make_dir();
	fd = open_in(".");
	assert_int_equal(work_stage_open(&one, fd, &err), 0);
	assert_int_equal(work_stage_open(&two, fd, &err), -EBUSY);
	assert_int_equal(work_recover(fd, &err), -EBUSY);
	work_stage_close(&one);
	assert_int_equal(work_recover(fd, &err), WORK_CLEAR);
	assert_int_equal(work_stage_open(&two, fd, &err), 0);
	work_stage_close(&two);
	remove_dir();
}

// An address sanitizer's fork takes long.
#ifdef __SANITIZE_ADDRESS__
#define STEP 9
#else
#define STEP 1
#endif

// --- Killed ----------------------------------------------------------------------------------

static uint64_t tree_sum(void)
{
	CLEANUP_MANIFEST struct work_manifest m = {0};
	struct work w = {0};
	uint64_t sum = 1469598103934665603ULL;

	scan(&w, "h", NULL, &m);
	for (size_t i = 0; i < m.nr; i++) {
		const struct work_entry *e = &m.entries[i];
		char text[PATH_MAX + 256];
		int n = snprintf(text, sizeof(text), "%s %c %o %s ", e->path, e->type, e->mode,
			e->link ? e->link : "");

		for (unsigned int k = 0; k < WORK_HASH_BYTES; k++)
			n += snprintf(text + n, sizeof(text) - (size_t)n, "%02x", e->hash[k]);
		for (int k = 0; k <= n; k++)
			sum = (sum ^ (unsigned char)text[k]) * 1099511628211ULL;
	}
	return sum;
}

// Runs act() in a process that dies as it makes its n-th system call. Returns whether it did.
static bool killed_at(unsigned long n, void (*act)(void *arg), void *arg)
{
	unsigned long stops = 0;
	int status, sig = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		act(arg);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(
		ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL), 0);
	for (;;) {
		assert_int_equal(ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(long)sig), 0);
		assert_int_equal(waitpid(pid, &status, 0), pid);
		if (WIFEXITED(status)) {
			assert_int_equal(WEXITSTATUS(status), 0);
			return false;
		}
		assert_true(WIFSTOPPED(status));
		sig = WSTOPSIG(status) == (SIGTRAP | 0x80) ? 0 : WSTOPSIG(status);
		if (sig == 0 && ++stops == 2 * n - 1) {
			kill(pid, SIGKILL);
			assert_int_equal(waitpid(pid, &status, 0), pid);
			return true;
		}
	}
}

static void act_keep(void *arg)
{
	struct work *w = arg;
	struct err err = {0};

	if (look(w, &err) < 0 || work_plan_settle(&w->plan, &err) < 0 || w->plan.conflicts ||
		work_keep(&w->stage, &w->plan, &err) < 0) {
		fprintf(stderr, "%s\n", err.msg);
		_exit(1);
	}
	work_stage_close(&w->stage);
}

static void act_recover(void *arg)
{
	int fd = open_in("h");

	(void)arg;
	if (work_recover(fd, NULL) < 0)
		_exit(1);
}

// The host's tree anew. The guest's and the manifests are as they were: but for the hashes of the
// host's files, which are then made again, nothing depends on whose copy it is.
static void reset(void)
{
	assert_int_equal(sh("rm -rf h && cp -a h0 h"), 0);
}

static void check_recovered(uint64_t old, uint64_t new, unsigned long n, unsigned int seen[2])
{
	CLEANUP_FD int fd = open_in("h");
	struct err err = {0};
	uint64_t sum;

	if (work_recover(fd, &err) < 0)
		fail_msg("call %lu: %s", n, err.msg);
	assert_int_equal(sh("[ ! -e h/" WORK_STAGE_NAME " ]"), 0);
	sum = tree_sum();
	if (sum != old && sum != new)
		fail_msg("call %lu: neither the old tree nor the new one", n);
	seen[sum == new]++;
}

static void killed_at_any_call_leaves_one_of_two_trees(void **state)
{
	unsigned int seen[2] = {0}, again[2] = {0};
	struct work w = {.stage = WORK_STAGE_NONE};
	unsigned long n = 1;
	uint64_t old, new;

	(void)state;
	make_dir();
	begin(&w, "", PROJECT);
	assert_int_equal(sh("cp -a h h0 && cd g && " GUEST_WORK), 0);
	old = tree_sum();
	assert_false(killed_at(1000000, act_keep, &w));
	new = tree_sum();
	assert_true(old != new);
	for (;; n += STEP) {
		reset();
		if (!killed_at(n, act_keep, &w))
			break;
		check_recovered(old, new, n, seen);
	}
	assert_true(seen[0] > 200 / STEP && seen[1] > 20 / STEP);
	// Whoever recovers may be killed as well, at any call: here of a keep that was nearly done
	// (a process may make a few calls more or less for its memory than the one before).
	for (unsigned long k = 1;; k += STEP) {
		reset();
		assert_true(killed_at(STEP * (seen[0] - 2 - 10 / STEP), act_keep, &w));
		if (!killed_at(k, act_recover, NULL))
			break;
		check_recovered(old, new, k, again);
	}
	assert_true(again[0] > 100 / STEP && again[1] == 0);
	printf("killed at %lu calls, each %d. of them: %u old, %u new; recovering at %u\n", n - 1,
		STEP, seen[0], seen[1], again[0]);
	end(&w);
	remove_dir();
}

// --- History ---------------------------------------------------------------------------------

static int who(void *ctx, uint64_t since, char ret[WORK_HISTORY_BY_MAX], struct err *err)
{
	(void)ctx;
	(void)err;
	snprintf(ret, WORK_HISTORY_BY_MAX, "[%llu]", (unsigned long long)since);
	return 0;
}

static void open_history(struct work_history *h)
{
	struct err err = {0};
	int state_fd = open_in("s");

	if (work_history_open(h, state_fd, -1, &err) < 0)
		fail_msg("%s", err.msg);
	close(state_fd);
}

static void begin_history(struct work *w, const char *ignore, const char *make)
{
	begin(w, ignore, make);
	assert_int_equal(sh("rm -rf s && mkdir -p s/history"), 0);
}

// The guest does this, and a point is taken. w->guest is the tree as it is then.
static int take(struct work *w, const char *guest)
{
	static uint64_t seq;
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP_MANIFEST struct work_manifest now = {0};
	struct work_take t = {.now = &now,
		.guest = &w->guest,
		.ignore = &w->ignore,
		.stage = &w->stage,
		.host_fd = open_in("h"),
		.seq = seq++,
		.who = who};
	int guest_fd = open_in("g"), r;
	struct err err = {0};

	assert_int_equal(fchdir(guest_fd), 0);
	assert_int_equal(system(guest), 0);
	open_history(&h);
	work_manifest_fini(&w->guest);
	assert_int_equal(work_history_now(&h, &w->base, &w->before, &now, &err), 0);
	w->trees = (struct work_trees){.before = &now, .guest = &w->guest, .ignore = &w->ignore};
	assert_int_equal(work_stage_open(&w->stage, h.dir_fd, &err), 0);
	scan(w, "g", NULL, &w->guest);
	for (size_t i = 0; i < w->guest.nr; i++)
		w->guest.entries[i].hashed = false;
	hand_out(w, guest_fd);
	assert_int_equal(work_stage_hash(&w->stage, &w->trees, &w->guest, false, &err), 0);
	r = work_history_take(&h, &t, &err);
	if (r < 0)
		fail_msg("%s", err.msg);
	work_stage_close(&w->stage);
	close(guest_fd);
	close(t.host_fd);
	return r;
}

// Goes back; -ENODATA and so on.
static int go_back(struct work *w, uint32_t nr, const char *const *paths, struct err *err)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP(work_back_fini) struct work_back back = {0};
	size_t nr_paths = 0;
	int out_fd, guest_fd, r;

	while (paths && paths[nr_paths])
		nr_paths++;
	open_history(&h);
	r = work_history_back(&h, nr, &w->guest, paths, nr_paths, &back, err);
	if (r < 0)
		return r;
	assert_int_equal(sh("rm -rf out && mkdir out"), 0);
	out_fd = open_in("out");
	if (work_back_lay_out(&h, &back, out_fd, err) < 0)
		fail_msg("%s", err->msg);
	close(out_fd);
	guest_fd = open_in("g");
	for (size_t i = back.nr; i-- > 0;) {
		const struct work_back_step *s = &back.steps[i];

		if (s->now && (!s->to || s->to->type != s->now->type))
			assert_int_equal(
				unlinkat(guest_fd, s->path, s->now->type == 'd' ? AT_REMOVEDIR : 0),
				0);
	}
	close(guest_fd);
	assert_int_equal(sh("cp -a out/. g/"), 0);
	work_history_close(&h);
	return take(w, "true");
}

#define EQUAL(a, b)                                                             \
	sh("diff -r --no-dereference " a " " b " && [ \"$(cd " a                \
	   " && find . -mindepth 1 -printf '%p %m %l\\n' | sort)\" = \"$(cd " b \
	   " && find . -mindepth 1 -printf '%p %m %l\\n' | sort)\" ]")

static void goes_back_and_forth(void **state)
{
	static const char *const only[] = {"./src/deep/", "link", NULL};
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	CLEANUP(work_point_fini) struct work_point p = {0};
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin_history(&w, "junk\n", PROJECT);
	assert_int_equal(sh("cp -a g g0"), 0);
	assert_int_equal(take(&w, "true"), 0);
	assert_int_equal(take(&w, "touch src/a; echo j >junk"), 0);
	assert_int_equal(
		take(&w, "echo 11 >src/a && rm -r gone empty && mkdir -p new/folder && "
			 "echo n >new/folder/f && chmod +x run.sh && ln -sf src/deep/b link && "
			 "mv old-name new-name && rm -r turns && echo file >turns && rm becomes && "
			 "mkdir -m 750 becomes && echo in >becomes/in && chmod 700 src/deep"),
		1);
	assert_int_equal(sh("cp -a g g1"), 0);
	assert_int_equal(take(&w, "echo 111 >src/a && rm -r new becomes && echo x >src/deep/x"), 1);
	assert_int_equal(sh("cp -a g g2"), 0);
	open_history(&h);
	assert_int_equal(h.first, 1);
	assert_int_equal(h.last, 2);
	assert_int_equal(work_history_read(&h, 2, &p, &err), 0);
	assert_string_equal(p.by, "[2]"); // that of the take before
	assert_int_equal(p.nr_deltas, 7);
	assert_string_equal(work_delta_path(&p.deltas[0]), "becomes");
	work_history_close(&h);
	// To how it came in, which is a point, back to before that, and to the middle.
	assert_int_equal(go_back(&w, 0, NULL, &err), 1);
	assert_int_equal(sh("echo j >g0/junk"), 0);
	assert_int_equal(EQUAL("g", "g0"), 0);
	assert_int_equal(go_back(&w, 2, NULL, &err), 1);
	assert_int_equal(EQUAL("g", "g2"), 0);
	assert_int_equal(go_back(&w, 1, NULL, &err), 1);
	assert_int_equal(EQUAL("g", "g1"), 0);
	// A part of it.
	assert_int_equal(go_back(&w, 0, only, &err), 1);
	assert_int_equal(
		sh("rm -r g1/src/deep && cp -a g0/src/deep g1/src/ && cp -a g0/link g1/"), 0);
	assert_int_equal(EQUAL("g", "g1"), 0);
	assert_int_equal(go_back(&w, 99, NULL, &err), -ENOENT);
	assert_non_null(strstr(err.msg, "0 to 6"));
	end(&w);
	remove_dir();
}

static void says_what_is_not_kept(void **state)
{
	static const char *const rest[] = {"src/deep", NULL};
	struct err err = {0};
	struct work w;
	int state_fd, host_fd;

	(void)state;
	make_dir();
	begin_history(&w, "", PROJECT);
	// The host has changed it before it was known that the guest has.
	assert_int_equal(sh("echo host >h/src/a"), 0);
	assert_int_equal(take(&w, "echo 11 >src/a; echo 22 >src/deep/b"), 1);
	assert_int_equal(go_back(&w, 0, NULL, &err), -ENODATA);
	assert_non_null(strstr(err.msg, "src/a"));
	assert_int_equal(go_back(&w, 0, rest, &err), 1);
	assert_int_equal(sh("[ $(cat g/src/a) = 11 ] && [ $(cat g/src/deep/b) = 2 ]"), 0);
	end(&w);
	// What is kept in between is saved first.
	begin_history(&w, "", PROJECT);
	both(&w, "echo 11 >src/a", "true");
	state_fd = open_in("s");
	host_fd = open_in("h");
	work_history_save(state_fd, host_fd, &w.plan);
	close(state_fd);
	close(host_fd);
	keep_all(&w);
	assert_int_equal(take(&w, "true"), 1);
	assert_int_equal(go_back(&w, 0, NULL, &err), 1);
	assert_int_equal(sh("[ $(cat g/src/a) = 1 ] && [ $(cat h/src/a) = 11 ]"), 0);
	// Somebody else is at it, and does not go away.
	{
		CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;

		open_history(&h);
		state_fd = open_in("s");
		host_fd = open_in("h");
		work_history_save(state_fd, host_fd, &w.plan);
		close(state_fd);
		close(host_fd);
	}
	// A content that has been damaged is not put back.
	assert_int_equal(sh("for f in s/history/objects/*; do sed -i s/./x/ $f; done"), 0);
	{
		CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
		CLEANUP(work_back_fini) struct work_back back = {0};

		open_history(&h);
		assert_int_equal(sh("rm -rf out && mkdir out"), 0);
		host_fd = open_in("out");
		assert_int_equal(work_history_back(&h, 1, &w.guest, NULL, 0, &back, &err), 0);
		assert_int_equal(work_back_lay_out(&h, &back, host_fd, &err), -EUCLEAN);
		close(host_fd);
	}
	// One that was cut counts as none.
	assert_int_equal(sh("truncate -s 0 s/history/objects/*"), 0);
	assert_int_equal(go_back(&w, 1, NULL, &err), -ENODATA);
	end(&w);
	remove_dir();
}

static void undoes_nothing_that_would_be_lost(void **state)
{
	static const char *const rest[] = {"src/deep", NULL};
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin_history(&w, "", PROJECT);
	assert_int_equal(take(&w, "echo 11 >src/a; echo 22 >src/deep/b; echo big >big"), 1);
	// As if they had been too large: what is new, and what was changed.
	assert_int_equal(sh("rm $(grep -lx -e big -e 11 s/history/objects/*)"), 0);
	assert_int_equal(go_back(&w, 0, NULL, &err), -ENODATA);
	assert_non_null(strstr(err.msg, "big, and 1 more"));
	assert_int_equal(go_back(&w, 0, rest, &err), 1);
	assert_int_equal(sh("[ $(cat g/big) = big ] && [ $(cat g/src/deep/b) = 2 ]"), 0);
	end(&w);
	// Only its rights have changed: nothing is lost with them.
	begin_history(&w, "", PROJECT);
	assert_int_equal(take(&w, "chmod +x run.sh"), 1);
	assert_int_equal(go_back(&w, 0, NULL, &err), 1);
	assert_int_equal(sh("[ ! -x g/run.sh ]"), 0);
	end(&w);
	remove_dir();
}

static void old_points_make_room(void **state)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	const unsigned int more = 5;
	struct err err = {0};
	struct work w;
	char line[64];

	(void)state;
	make_dir();
	begin_history(&w, "", "echo 0 >f; echo same >other");
	for (unsigned int i = 1; i <= WORK_HISTORY_POINTS_MAX + more; i++) {
		snprintf(line, sizeof(line), "echo %u >f", i);
		assert_int_equal(take(&w, line), 1);
	}
	open_history(&h);
	assert_int_equal(h.last, WORK_HISTORY_POINTS_MAX + more);
	assert_int_equal(h.first, more + 1);
	work_history_close(&h);
	// Of each point that is left what it became, and of the first what there was.
	snprintf(line, sizeof(line), "[ $(ls s/history/objects | wc -l) = %u ]",
		WORK_HISTORY_POINTS_MAX + 1);
	assert_int_equal(sh(line), 0);
	assert_int_equal(go_back(&w, more - 1, NULL, &err), -ENOENT);
	assert_int_equal(go_back(&w, more, NULL, &err), 1);
	assert_int_equal(sh("[ $(cat g/f) = 5 ]"), 0);
	end(&w);
	remove_dir();
}

static void large_files_that_stay_make_room(void **state)
{
	CLEANUP(work_history_close) struct work_history h = WORK_HISTORY_NONE;
	struct err err = {0};
	struct work w;

	(void)state;
	make_dir();
	begin_history(&w, "", "echo 0 >f");
	assert_int_equal(take(&w, "echo 1 >a"), 1);
	assert_int_equal(take(&w, "echo 2 >b"), 1);
	assert_int_equal(sh("truncate -s 600M s/history/objects/*"), 0);
	assert_int_equal(take(&w, "echo 3 >f"), 1);
	open_history(&h);
	assert_int_equal(h.first, 2);
	assert_int_equal(h.last, 3);
	work_history_close(&h);
	assert_int_equal(go_back(&w, 2, NULL, &err), 1);
	assert_int_equal(sh("[ $(cat g/f) = 0 ]"), 0);
	// Even when all points are gone, the numbers go on.
	assert_int_equal(sh("rm s/history/0*"), 0);
	assert_int_equal(go_back(&w, 0, NULL, &err), -ENOENT);
	assert_int_equal(take(&w, "echo 4 >f"), 1);
	open_history(&h);
	assert_int_equal(h.first, 5);
	assert_int_equal(h.last, 5);
	end(&w);
	remove_dir();
}

static void refuses_a_point_that_is_none(void **state)
{
	CLEANUP_FREE uint8_t *data = NULL;
	struct err err = {0};
	struct work_point p;
	size_t len = 0;
	struct work w;
	int fd;

	(void)state;
	make_dir();
	begin_history(&w, "", PROJECT);
	assert_int_equal(take(&w, "echo 11 >src/a; rm -r gone; ln -s a l"), 1);
	fd = open_in("s/history");
	assert_int_equal(work_file_read(fd, "00000001", MIB, &data, &len, &err), 0);
	close(fd);
	for (size_t n = 0; n < len; n++)
		assert_int_equal(work_point_parse(data, n, &p, &err), -EBADMSG);
	assert_int_equal(work_point_parse(data, len, &p, &err), 0);
	assert_int_equal(p.nr_deltas, 6);
	work_point_fini(&p);
	assert_int_equal(work_point_parse(data, len + 1, &p, &err), -EBADMSG);
	// When there must be room, it goes first, with those before it.
	assert_int_equal(take(&w, "echo 111 >src/a"), 1);
	assert_int_equal(take(&w, "echo 22 >src/deep/b"), 1);
	assert_int_equal(
		sh("echo >s/history/00000002; truncate -s 2G s/history/objects/$(echo 11 | "
		   "sha256sum | cut -d' ' -f1)"),
		0);
	assert_int_equal(take(&w, "echo 222 >src/deep/b"), 1);
	assert_int_equal(sh("[ \"$(ls s/history | tr '\\n' ,)\" = "
			    "00000003,00000004,lock,now,objects,seen, ]"),
		0);
	assert_int_equal(go_back(&w, 2, NULL, &err), 1);
	assert_int_equal(sh("[ $(cat g/src/deep/b) = 2 ]"), 0);
	end(&w);
	remove_dir();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(takes_paths_of_a_tree_only),
		cmocka_unit_test(quotes_what_would_not_print),
		cmocka_unit_test(keeps_a_manifest_on_the_disk),
		cmocka_unit_test(refuses_a_manifest_that_makes_no_tree),
		cmocka_unit_test(bounds_what_a_guest_may_list),
		cmocka_unit_test(ignores_as_git_does),
		cmocka_unit_test(brings_all_kinds_of_changes_out),
		cmocka_unit_test(tells_conflicts_and_leaves_the_rest_alone),
		cmocka_unit_test(refuses_links_that_lead_out),
		cmocka_unit_test(withholds_what_git_would_run),
		cmocka_unit_test(keeps_what_is_named),
		cmocka_unit_test(leaves_alone_what_does_not_travel),
		cmocka_unit_test(trusts_no_time_that_was_set_back),
		cmocka_unit_test(believes_nothing_that_is_not_handed_out),
		cmocka_unit_test(goes_on_from_what_was_kept),
		cmocka_unit_test(takes_all_back_when_the_host_interferes),
		cmocka_unit_test(is_done_by_one_at_a_time),
		cmocka_unit_test(goes_back_and_forth),
		cmocka_unit_test(says_what_is_not_kept),
		cmocka_unit_test(undoes_nothing_that_would_be_lost),
		cmocka_unit_test(old_points_make_room),
		cmocka_unit_test(large_files_that_stay_make_room),
		cmocka_unit_test(refuses_a_point_that_is_none),
		cmocka_unit_test(killed_at_any_call_leaves_one_of_two_trees),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
