// SPDX-License-Identifier: Apache-2.0
// Patches and branches; see the header. One thread.
#include "cli/work_patch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/tool.h"
#include "vmm/base/fd.h"
#include "work/scan.h"

#define PACKAGE "git"

static int fail(int code, const char *path, struct err *err)
{
	char quoted[WORK_QUOTED_MAX];

	return err_errno(err, code, "%s", work_quote(quoted, path));
}

static bool of_git(const char *path)
{
	return !strncmp(path, ".git/", 5) || !strcmp(path, ".git") || strstr(path, "/.git/");
}

static int lay_out(int from_fd, const struct work_entry *e, int to_fd, struct err *err)
{
	int r = 0;

	if (!e || e->type == 'd') // git knows no empty folders
		return 0;
	r = work_make_parents(to_fd, e->path);
	if (r == 0 && e->type == 'l')
		r = symlinkat(e->link, to_fd, e->path) < 0 ? -errno : 0;
	else if (r == 0)
		r = work_copy(from_fd, e->path, to_fd, e->path, 0600 | (e->mode & 0111));
	return r < 0 ? fail(r, e->path, err) : 0;
}

// Nothing but what is said here decides what git does.
static void quiet_git(void)
{
	setenv("GIT_CONFIG_NOSYSTEM", "1", 1);
	setenv("GIT_ATTR_NOSYSTEM", "1", 1);
	setenv("GIT_TERMINAL_PROMPT", "0", 1);
	setenv("LC_ALL", "C", 1);
	unsetenv("GIT_DIR");
	unsetenv("GIT_WORK_TREE");
	unsetenv("GIT_INDEX_FILE");
	unsetenv("GIT_EXTERNAL_DIFF");
	unsetenv("GIT_DIFF_OPTS");
}

// Runs a script of sh with $1 and $2.
static int run_git(const char *script, const char *one, const char *two, int in_fd, int out_fd,
	struct err *err)
{
	const char *const argv[] = {"sh", "-c", script, "sh", one, two, NULL};
	const struct tool tool = {.argv = argv,
		.package = PACKAGE,
		.stdin_fd = in_fd,
		.stdout_fd = out_fd,
		.signal_fd = -1};

	quiet_git();
	return tool_run(&tool, err);
}

int work_patch(const struct work_machine *w, struct work_look *look, int patch_fd, struct err *err)
{
	// In a folder of ours, above which git looks for nothing.
	static const char script[] =
		"cd \"$1\" && export GIT_CONFIG_GLOBAL=/dev/null "
		"GIT_CEILING_DIRECTORIES=\"$(dirname \"$(pwd -P)\")\""
		" && git -c core.hooksPath=/dev/null -c core.attributesFile=/dev/null "
		"-c core.quotePath=true diff --no-index --no-prefix --no-ext-diff --no-textconv "
		"--no-color --binary --full-index --no-renames a b; [ $? -le 1 ]";
	CLEANUP_FD int diff_fd = -1;
	CLEANUP_FD int a_fd = -1;
	CLEANUP_FD int b_fd = -1;
	char path[64];
	int r = 0;

	if (mkdirat(look->stage.dir_fd, "diff", 0700) < 0)
		return err_errno(err, -errno, "diff");
	diff_fd = openat(look->stage.dir_fd, "diff", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (diff_fd < 0 || mkdirat(diff_fd, "a", 0700) < 0 || mkdirat(diff_fd, "b", 0700) < 0)
		return err_errno(err, -errno, "diff");
	a_fd = openat(diff_fd, "a", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	b_fd = openat(diff_fd, "b", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (a_fd < 0 || b_fd < 0)
		return err_errno(err, -errno, "diff");
	for (size_t i = 0; i < look->plan.nr && r == 0; i++) {
		const struct work_change *c = &look->plan.changes[i];

		if (of_git(c->path))
			continue;
		r = lay_out(w->target_fd, c->host, a_fd, err);
		if (r == 0)
			r = lay_out(look->stage.tree_fd, c->guest, b_fd, err);
	}
	if (r < 0)
		return r;
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)getpid(), diff_fd);
	return run_git(script, path, "", -1, patch_fd, err);
}

int work_branch(
	const struct work_machine *w, struct work_look *look, const char *branch, struct err *err)
{
	// The author is the person's own, from the own configuration.
	static const char script[] =
		"set -e; cd \"$1\"; g() { git -c core.hooksPath=/dev/null -c core.fsmonitor=false "
		"-c commit.gpgSign=false \"$@\"; }\n"
		"g check-ref-format --branch \"$2\" >/dev/null\n"
		"if g rev-parse -q --verify \"refs/heads/$2\" >/dev/null; then "
		"echo \"there is a branch $2 already\" >&2; exit 1; fi\n"
		"index=$(mktemp); trap 'rm -f \"$index\" \"$index.lock\"' EXIT\n"
		"export GIT_INDEX_FILE=\"$index\"; rm -f \"$index\"; g read-tree HEAD\n"
		"top=$(g rev-parse --show-prefix)\n"
		"g apply --cached --directory=\"$top\" -\n"
		"tree=$(g write-tree)\n"
		"if [ \"$tree\" = \"$(g rev-parse 'HEAD^{tree}')\" ]; then "
		"echo 'nothing that git knows of has changed' >&2; exit 1; fi\n"
		"commit=$(g commit-tree -p HEAD -m \"Work of a machine\" \"$tree\")\n"
		"g update-ref \"refs/heads/$2\" \"$commit\" \"\"\n";
	CLEANUP_FD int patch_fd = memfd_create("patch", MFD_CLOEXEC);
	int r;

	if (patch_fd < 0)
		return err_errno(err, -errno, "patch");
	r = work_patch(w, look, patch_fd, err);
	if (r == 0 && lseek(patch_fd, 0, SEEK_SET) < 0)
		r = err_errno(err, -errno, "patch");
	return r < 0 ? r : run_git(script, w->target, branch, patch_fd, -1, err);
}
