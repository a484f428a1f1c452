// SPDX-License-Identifier: Apache-2.0
// From three trees to a plan; see the header. Any thread.
#include "work/compare.h"

#include <ctype.h>
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define LINK_HOPS_MAX 40

void work_plan_fini(struct work_plan *plan)
{
	free(plan->changes);
	*plan = (struct work_plan){0};
}

static int out_of_memory(struct err *err)
{
	return err_errno(err, -ENOMEM, "comparing");
}

// --- What a path tells -----------------------------------------------------------------------

struct pattern {
	const char *glob; // of the whole path, or without a slash of the last name
	unsigned int note;
};

// fnmatch() without FNM_PATHNAME: a star takes slashes too.
static const struct pattern patterns[] = {
	{".github/workflows/*", WORK_NOTE_CI},
	{".github/actions/*", WORK_NOTE_CI},
	{".gitlab-ci.yml", WORK_NOTE_CI},
	{".circleci/*", WORK_NOTE_CI},
	{".woodpecker/*", WORK_NOTE_CI},
	{".woodpecker.y*ml", WORK_NOTE_CI},
	{".buildkite/*", WORK_NOTE_CI},
	{".travis.yml", WORK_NOTE_CI},
	{".drone.yml", WORK_NOTE_CI},
	{"azure-pipelines*.yml", WORK_NOTE_CI},
	{"bitbucket-pipelines.yml", WORK_NOTE_CI},
	{"jenkinsfile", WORK_NOTE_CI},
	{".ci/*", WORK_NOTE_CI},
	{"package-lock.json", WORK_NOTE_LOCK},
	{"npm-shrinkwrap.json", WORK_NOTE_LOCK},
	{"yarn.lock", WORK_NOTE_LOCK},
	{"pnpm-lock.yaml", WORK_NOTE_LOCK},
	{"bun.lock*", WORK_NOTE_LOCK},
	{"cargo.lock", WORK_NOTE_LOCK},
	{"poetry.lock", WORK_NOTE_LOCK},
	{"uv.lock", WORK_NOTE_LOCK},
	{"pipfile.lock", WORK_NOTE_LOCK},
	{"composer.lock", WORK_NOTE_LOCK},
	{"gemfile.lock", WORK_NOTE_LOCK},
	{"mix.lock", WORK_NOTE_LOCK},
	{"flake.lock", WORK_NOTE_LOCK},
	{"go.sum", WORK_NOTE_LOCK},
	{".npmrc", WORK_NOTE_LOCK},
	{".vscode/*", WORK_NOTE_TOOL},
	{"*/.vscode/*", WORK_NOTE_TOOL},
	{".idea/*", WORK_NOTE_TOOL},
	{".husky/*", WORK_NOTE_TOOL},
	{".githooks/*", WORK_NOTE_TOOL},
	{".devcontainer/*", WORK_NOTE_TOOL},
	{".claude/*", WORK_NOTE_TOOL},
	{".mcp.json", WORK_NOTE_TOOL},
	{".envrc", WORK_NOTE_TOOL},
	{".pre-commit-config.yaml", WORK_NOTE_TOOL},
	{".gitmodules", WORK_NOTE_TOOL},
	{".gitattributes", WORK_NOTE_TOOL},
	{".mayfly.ini", WORK_NOTE_TOOL},
	{WORK_IGNORE_NAME, WORK_NOTE_TOOL},
};

// The names that some file system takes for ".git".
static bool is_dot_git(const char *name)
{
	static const char *const names[] = {".git", "git~1"};
	size_t len = strcspn(name, "/");

	// Trailing dots and blanks are nothing to some.
	while (len && (name[len - 1] == '.' || name[len - 1] == ' '))
		len--;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (len == strlen(names[i]) && !strncasecmp(name, names[i], len))
			return true;
	return false;
}

static const char *last_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

// Of a repository's folder: what git would run, or read what to run from.
static bool git_would_run(const char *path)
{
	const char *name = last_name(path);

	for (const char *part = path; *part;) {
		size_t len = strcspn(part, "/");

		if (is_dot_git(part)) {
			// Itself: a file or link says where another one is.
			if (!part[len])
				return true;
			for (const char *in = part + len; *in; in += strcspn(in, "/")) {
				in++;
				if (!strncasecmp(in, "hooks", 5) && (in[5] == '/' || !in[5]))
					return true;
			}
			return !strncasecmp(name, "config", 6) || !strcasecmp(name, "commondir") ||
			       !strcasecmp(name, "gitdir") || !strcasecmp(name, "attributes") ||
			       !strcasecmp(name, "alternates");
		}
		part += len + (part[len] == '/');
	}
	return false;
}

unsigned int work_notes_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	char lower[PATH_MAX];
	unsigned int notes = git_would_run(path) ? WORK_NOTE_GIT : 0;
	size_t i;

	for (i = 0; path[i] && i + 1 < sizeof(lower); i++)
		lower[i] = (char)tolower((unsigned char)path[i]);
	lower[i] = '\0';
	for (i = 0; i < ARRAY_SIZE(patterns); i++) {
		const char *glob = patterns[i].glob;
		const char *text = strchr(glob, '/') || !slash ? lower : lower + (slash + 1 - path);

		if (fnmatch(glob, text, 0) == 0)
			notes |= patterns[i].note;
	}
	return notes;
}

// --- The changes -----------------------------------------------------------------------------

// A repository without ".git" around it: git takes a folder with these for one.
static bool of_bare_repository(const struct work_manifest *guest, const char *path)
{
	static const char *const beside[] = {"HEAD", "objects", "refs"};
	const char *slash = strrchr(path, '/');
	const char *name = slash ? slash + 1 : path;
	char other[PATH_MAX + 16];

	if (strcasecmp(name, "config") != 0)
		return false;
	for (size_t i = 0; i < ARRAY_SIZE(beside); i++) {
		memcpy(other, path, (size_t)(name - path));
		strcpy(other + (name - path), beside[i]);
		if (!work_manifest_find(guest, other))
			return false;
	}
	return true;
}

static const char repository_gone[] =
	"the machine has removed the repository: keep that by its name";

static int add_change(struct work_plan *plan, const struct work_trees *trees, const char *path,
	const struct work_entry *base, const struct work_entry *host,
	const struct work_entry *guest, struct err *err)
{
	struct work_change c = {.path = path, .host = host, .guest = guest};

	if (plan->nr == plan->cap) {
		size_t cap = plan->cap ? 2 * plan->cap : 64;
		struct work_change *more = reallocarray(plan->changes, cap, sizeof(*more));

		if (!more)
			return out_of_memory(err);
		plan->changes = more;
		plan->cap = cap;
	}
	c.kind = !guest ? WORK_DELETED : base || host ? WORK_CHANGED : WORK_ADDED;
	if (!work_entry_same(base, host))
		c.conflict = !host  ? "deleted on this host meanwhile"
			     : base ? "changed on this host meanwhile, too"
				    : "made on this host meanwhile, too";
	if (!c.conflict && !guest && host->type == 'd' && is_dot_git(last_name(path)))
		c.conflict = repository_gone;
	c.notes = work_notes_of(path);
	if (guest && of_bare_repository(trees->guest, path))
		c.notes |= WORK_NOTE_GIT;
	if (guest && guest->type == 'd')
		c.notes = 0; // what is in it is what counts
	if (guest && guest->type == 'f' && (guest->mode & 0111) &&
		!(host && host->type == 'f' && (host->mode & 0111)))
		c.notes |= WORK_NOTE_EXEC;
	c.withheld = guest && (c.notes & WORK_NOTE_GIT);
	plan->changes[plan->nr++] = c;
	return 0;
}

bool work_must_hash(const struct work_trees *trees, const struct work_entry *guest)
{
	return guest->type == 'f' && !work_ignored_within(trees->ignore, guest->path, false) &&
	       !work_entry_untouched(work_manifest_find(trees->before, guest->path), guest);
}

// The entry at *i if it is at path; then *i goes on.
static const struct work_entry *take(const struct work_manifest *m, size_t *i, const char *path)
{
	if (*i < m->nr && !strcmp(m->entries[*i].path, path))
		return &m->entries[(*i)++];
	return NULL;
}

static void lowest(const struct work_manifest *m, size_t i, const char **path)
{
	if (i < m->nr && (!*path || strcmp(m->entries[i].path, *path) < 0))
		*path = m->entries[i].path;
}

static int by_content(const void *a, const void *b)
{
	const struct work_change *x = *(const struct work_change *const *)a;
	const struct work_change *y = *(const struct work_change *const *)b;
	int r = memcmp(x->host->hash, y->host->hash, WORK_HASH_BYTES);

	return r ? r : strcmp(x->path, y->path);
}

// A file that is gone here and new there. Of several the first, each once.
static int find_renames(struct work_plan *plan, struct err *err)
{
	CLEANUP_FREE struct work_change **gone = calloc(plan->nr + 1, sizeof(struct work_change *));
	size_t nr = 0;

	if (!gone)
		return out_of_memory(err);
	for (size_t i = 0; i < plan->nr; i++) {
		struct work_change *c = &plan->changes[i];

		if (c->kind == WORK_DELETED && c->host && c->host->type == 'f' && c->host->size)
			gone[nr++] = c;
	}
	if (nr)
		qsort(gone, nr, sizeof(struct work_change *), by_content);
	for (size_t i = 0; i < plan->nr && nr; i++) {
		struct work_change *c = &plan->changes[i];
		size_t lo = 0, hi = nr;

		if (c->kind != WORK_ADDED || c->guest->type != 'f' || !c->guest->size)
			continue;
		while (lo < hi) {
			size_t mid = (lo + hi) / 2;

			if (memcmp(gone[mid]->host->hash, c->guest->hash, WORK_HASH_BYTES) < 0)
				lo = mid + 1;
			else
				hi = mid;
		}
		while (lo < nr && gone[lo]->moved)
			lo++;
		if (lo < nr && !memcmp(gone[lo]->host->hash, c->guest->hash, WORK_HASH_BYTES)) {
			gone[lo]->moved = true;
			c->from = gone[lo]->path;
		}
	}
	return 0;
}

int work_compare(const struct work_trees *trees, struct work_plan *ret, struct err *err)
{
	CLEANUP_PLAN struct work_plan plan = {.host = trees->host};
	size_t b = 0, f = 0, h = 0, g = 0;
	int r = 0;

	while (r == 0) {
		const struct work_entry *base, *before, *host, *guest;
		const char *path = NULL;

		lowest(trees->base, b, &path);
		lowest(trees->before, f, &path);
		lowest(trees->host, h, &path);
		lowest(trees->guest, g, &path);
		if (!path)
			break;
		base = take(trees->base, &b, path);
		before = take(trees->before, &f, path);
		host = take(trees->host, &h, path);
		guest = take(trees->guest, &g, path);
		if (work_ignored_within(trees->ignore, path,
			    (guest && guest->type == 'd') ||
				    (!guest && before && before->type == 'd')))
			continue;
		if (work_entry_untouched(before, guest))
			continue;
		ASSERT(!guest || guest->type != 'f' || guest->hashed);
		// Nothing new for the host; or there already.
		if (work_entry_same(base, guest) || work_entry_same(host, guest))
			continue;
		// A folder with what does not travel in it stays, for that.
		if (!guest && host && host->type == 'd' && host->holds_more)
			continue;
		r = add_change(&plan, trees, path, base, host, guest, err);
	}
	if (r == 0)
		r = find_renames(&plan, err);
	if (r < 0)
		return r;
	*ret = plan;
	plan = (struct work_plan){0};
	return 0;
}

// --- The plan as a whole ---------------------------------------------------------------------

static struct work_change *find_change(const struct work_plan *plan, const char *path, size_t len)
{
	size_t lo = 0, hi = plan->nr;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;
		const char *at = plan->changes[mid].path;
		int order = strncmp(at, path, len);

		if (order == 0 && at[len])
			order = 1;
		if (order == 0)
			return &plan->changes[mid];
		if (order < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return NULL;
}

static bool within(const char *path, const char *top, size_t len)
{
	return !strncmp(path, top, len) && (path[len] == '/' || !path[len]);
}

int work_plan_only(struct work_plan *plan, const char *const *paths, size_t nr, struct err *err)
{
	CLEANUP_FREE bool *wanted = calloc(plan->nr + 1, sizeof(bool));
	char quoted[WORK_QUOTED_MAX];
	size_t kept = 0;

	if (!wanted)
		return out_of_memory(err);
	for (size_t k = 0; k < nr; k++) {
		const char *top = paths[k];
		size_t len, found = 0;

		while (!strncmp(top, "./", 2))
			top += 2;
		len = strlen(top);
		while (len && top[len - 1] == '/')
			len--;
		for (size_t i = 0; i < plan->nr; i++) {
			struct work_change *c = &plan->changes[i];

			if (!within(c->path, top, len))
				continue;
			wanted[i] = true;
			found++;
			// Named is the file itself, or a folder of the repository's own.
			if (!c->path[len] || work_notes_of(top) & WORK_NOTE_GIT) {
				c->withheld = false;
				if (c->conflict == repository_gone)
					c->conflict = NULL;
			}
		}
		if (!found)
			return err_set(err, -ENOENT, "%s: nothing has changed there",
				work_quote(quoted, paths[k]));
	}
	// The new folders that they are in.
	for (size_t i = 0; i < plan->nr; i++) {
		const char *path = plan->changes[i].path;

		if (!wanted[i] || !plan->changes[i].guest)
			continue;
		for (const char *s = path; (s = strchr(s, '/')); s++) {
			struct work_change *c = find_change(plan, path, (size_t)(s - path));

			if (c && c->guest && c->guest->type == 'd')
				wanted[c - plan->changes] = true;
		}
	}
	for (size_t i = 0; i < plan->nr; i++)
		if (wanted[i])
			plan->changes[kept++] = plan->changes[i];
	plan->nr = kept;
	return 0;
}

// What will be at path: NULL for nothing.
static const struct work_entry *final_at(const struct work_plan *plan, const char *path)
{
	const struct work_change *c = find_change(plan, path, strlen(path));

	return c ? c->guest : work_manifest_find(plan->host, path);
}

static bool append(char *text, const char *part, size_t len)
{
	size_t have = strlen(text);

	if (have + 1 + len >= PATH_MAX)
		return false;
	if (have)
		text[have++] = '/';
	memcpy(text + have, part, len);
	text[have + len] = '\0';
	return true;
}

// Follows a link as the kernel would, with the tree's top as the end of the world. What is not in
// the tree's manifest may be anything, so nothing leads back out of it.
static bool leads_out(const struct work_entry *(*at)(const struct work_plan *, const char *),
	const struct work_plan *plan, const struct work_entry *link)
{
	char rest[2 * PATH_MAX], next[2 * PATH_MAX], here[PATH_MAX] = "";
	const char *slash = strrchr(link->path, '/');
	bool unknown = false;

	if (link->link[0] == '/')
		return true;
	if (slash && !append(here, link->path, (size_t)(slash - link->path)))
		return true;
	strcpy(rest, link->link);
	for (int hops = 0; *rest;) {
		size_t len = strcspn(rest, "/");
		const struct work_entry *e;
		char *last;

		memcpy(next, rest, len);
		next[len] = '\0';
		memmove(rest, rest + len + (rest[len] == '/'),
			strlen(rest + len + (rest[len] == '/')) + 1);
		if (len == 0 || !strcmp(next, "."))
			continue;
		if (!strcmp(next, "..")) {
			if (!*here || unknown)
				return true;
			last = strrchr(here, '/');
			*(last ? last : here) = '\0';
			continue;
		}
		if (!append(here, next, len))
			return true;
		if (unknown)
			continue;
		e = at(plan, here);
		unknown = !e;
		if (!e || e->type != 'l')
			continue;
		if (++hops > LINK_HOPS_MAX)
			return false; // it leads nowhere
		if (e->link[0] == '/' || strlen(e->link) + 1 + strlen(rest) >= sizeof(rest))
			return true;
		last = strrchr(here, '/');
		*(last ? last : here) = '\0';
		strcpy(next, e->link);
		if (*rest) {
			strcat(next, "/");
			strcat(next, rest);
		}
		strcpy(rest, next);
	}
	return false;
}

static const struct work_entry *host_at(const struct work_plan *plan, const char *path)
{
	return work_manifest_find(plan->host, path);
}

static void judge_links(struct work_plan *plan)
{
	size_t links = 0;

	for (size_t i = 0; i < plan->nr; i++) {
		struct work_change *c = &plan->changes[i];

		if (!c->guest || c->guest->type != 'l')
			continue;
		links++;
		if (!c->conflict && leads_out(final_at, plan, c->guest))
			c->conflict = "a symbolic link that leads out of the folder";
	}
	// A new one on the way of one that was there may turn that.
	for (size_t i = 0; links && i < plan->host->nr; i++) {
		const struct work_entry *e = &plan->host->entries[i];

		if (e->type != 'l' || final_at(plan, e->path) != e ||
			!leads_out(final_at, plan, e) || leads_out(host_at, plan, e))
			continue;
		for (size_t k = 0; k < plan->nr; k++) {
			struct work_change *c = &plan->changes[k];

			if (c->guest && c->guest->type == 'l' && !c->conflict)
				c->conflict =
					"a symbolic link that makes another lead out of the folder";
		}
		return;
	}
}

// Each entry must be in a folder, and each folder that goes must be empty.
static void judge_folders(struct work_plan *plan)
{
	char folder[PATH_MAX];

	for (size_t i = 0; i < plan->nr; i++) {
		struct work_change *c = &plan->changes[i];
		const char *slash = strrchr(c->path, '/');
		const struct work_entry *parent;

		if (c->conflict)
			continue;
		if (c->guest && slash) {
			memcpy(folder, c->path, (size_t)(slash - c->path));
			folder[slash - c->path] = '\0';
			parent = final_at(plan, folder);
			if (!parent || parent->type != 'd')
				c->conflict = "its folder is not there on this host";
		}
		if (c->host && c->host->type == 'd' && (!c->guest || c->guest->type != 'd')) {
			size_t len = strlen(c->path);
			const struct work_entry *e = work_manifest_find(plan->host, c->path);

			if (c->host->holds_more)
				c->conflict = "a folder that holds what does not travel";
			// What is in it is not always right behind it: "a-b" comes before "a/b".
			for (e++; e < plan->host->entries + plan->host->nr &&
				  !strncmp(e->path, c->path, len);
				e++)
				if (e->path[len] == '/' && final_at(plan, e->path))
					c->conflict = "a folder in which this host has more";
		}
	}
}

struct folded {
	char *lower;
	struct work_change *change; // NULL: it stays as it is
};

static int by_lower(const void *a, const void *b)
{
	const struct folded *x = a, *y = b;

	return strcmp(x->lower, y->lower);
}

static void fold(char *lower)
{
	for (; *lower; lower++)
		*lower = (char)tolower((unsigned char)*lower);
}

static int find_case_clashes(struct work_plan *plan, struct err *err)
{
	struct folded *all = calloc(plan->nr + plan->host->nr + 1, sizeof(*all));
	size_t nr = 0;
	bool failed = !all;

	for (size_t i = 0; !failed && i < plan->nr + plan->host->nr; i++) {
		struct work_change *c = i < plan->nr ? &plan->changes[i] : NULL;
		const struct work_entry *e = c ? c->guest : &plan->host->entries[i - plan->nr];

		if (!e || (!c && find_change(plan, e->path, strlen(e->path))))
			continue;
		all[nr] = (struct folded){.lower = strdup(e->path), .change = c};
		failed = !all[nr].lower;
		if (!failed)
			fold(all[nr++].lower);
	}
	if (nr)
		qsort(all, nr, sizeof(*all), by_lower);
	for (size_t i = 1; i < nr; i++) {
		if (strcmp(all[i].lower, all[i - 1].lower) != 0)
			continue;
		if (all[i].change)
			all[i].change->notes |= WORK_NOTE_CASE;
		if (all[i - 1].change)
			all[i - 1].change->notes |= WORK_NOTE_CASE;
	}
	for (size_t i = 0; i < nr; i++)
		free(all[i].lower);
	free(all);
	return failed ? out_of_memory(err) : 0;
}

int work_plan_judge(struct work_plan *plan, struct err *err)
{
	int r;

	judge_links(plan);
	judge_folders(plan);
	r = find_case_clashes(plan, err);
	plan->conflicts = 0;
	for (size_t i = 0; i < plan->nr; i++)
		plan->conflicts += plan->changes[i].conflict != NULL;
	return r;
}

int work_plan_settle(struct work_plan *plan, struct err *err)
{
	size_t kept = 0;

	for (size_t i = 0; i < plan->nr; i++) {
		if (plan->changes[i].withheld)
			plan->withheld++;
		else
			plan->changes[kept++] = plan->changes[i];
	}
	plan->nr = kept;
	return work_plan_judge(plan, err);
}

static int by_path_of_entry(const void *a, const void *b)
{
	const struct work_entry *x = a, *y = b;

	return strcmp(x->path, y->path);
}

// --- Afterwards ------------------------------------------------------------------------------

// Whether the plan leaves anything at path, and in the folders that it is in.
static bool stays(const struct work_plan *plan, const char *path)
{
	const char *s = path;

	for (;;) {
		const struct work_change *c;

		s = strchr(s, '/');
		c = find_change(plan, path, s ? (size_t)(s - path) : strlen(path));
		if (!s)
			return !c; // what has changed is added anew
		if (c && (!c->guest || c->guest->type != 'd'))
			return false;
		s++;
	}
}

// The folders that the entry is in, as the guest has them, where nobody has told of them.
static int add_parents(struct work_manifest *m, const struct work_manifest *old,
	const struct work_plan *plan, const struct work_manifest *guest, const char *path,
	struct err *err)
{
	char folder[PATH_MAX];
	int r = 0;

	for (const char *s = path; r == 0 && (s = strchr(s, '/')); s++) {
		const struct work_entry *e;

		memcpy(folder, path, (size_t)(s - path));
		folder[s - path] = '\0';
		e = work_manifest_find(guest, folder);
		if (e && !work_manifest_find(old, folder) &&
			!find_change(plan, folder, strlen(folder)))
			r = work_manifest_add(m, e, err);
	}
	return r;
}

int work_rebase(const struct work_manifest *old, const struct work_plan *plan,
	const struct work_manifest *guest, bool of_guest, struct work_manifest *ret,
	struct err *err)
{
	CLEANUP_MANIFEST struct work_manifest m = {.taken_ns = old->taken_ns};
	size_t kept = 0;
	int r = 0;

	for (size_t i = 0; i < old->nr && r == 0; i++)
		if (stays(plan, old->entries[i].path))
			r = work_manifest_add(&m, &old->entries[i], err);
	for (size_t i = 0; i < plan->nr && r == 0; i++) {
		const struct work_change *c = &plan->changes[i];
		struct work_entry e;

		if (!c->guest)
			continue;
		e = *c->guest;
		// The guest's word for when it was touched is none for a file of the host's.
		if (!of_guest) {
			e.ino = 0;
			e.ctime_ns = INT64_MAX;
		}
		r = work_manifest_add(&m, &e, err);
		if (r == 0)
			r = add_parents(&m, old, plan, guest, c->path, err);
	}
	if (m.nr)
		qsort(m.entries, m.nr, sizeof(*m.entries), by_path_of_entry);
	for (size_t i = 0; i < m.nr; i++)
		if (i == 0 || strcmp(m.entries[i].path, m.entries[kept - 1].path) != 0)
			m.entries[kept++] = m.entries[i];
	m.nr = kept;
	if (r == 0)
		r = work_manifest_finish(&m, err);
	if (r < 0)
		return r;
	*ret = m;
	m = (struct work_manifest){0};
	return 0;
}
