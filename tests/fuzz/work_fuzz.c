// SPDX-License-Identifier: Apache-2.0
// Fuzzes what work/ reads: manifests, journals and points from a disk, .mayflyignore, and the tree
// of a hostile guest beside that of the host.
//
// Input: one byte: m, j, p, i or q, and then a manifest, journal or point without its hash, an
// ignore file, or a path to quote.
#include <errno.h>

#include "tests/support/fuzz_input.h"
#include "work/history.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void add(struct work_manifest *m, const char *path, char type, const char *link)
{
	const struct work_entry e = {
		.path = path, .type = type, .mode = 0755, .link = link, .hashed = type == 'f'};

	FUZZ_CHECK(work_manifest_add(m, &e, NULL) == 0);
}

// Whatever a guest's tree is, what is left of it without a conflict is in the host's.
static void compare(struct work_manifest *guest)
{
	CLEANUP_MANIFEST struct work_manifest host = {0}, before = {0};
	CLEANUP_PLAN struct work_plan plan = {0};
	const struct work_ignore ignore = {0};
	const struct work_trees trees = {&host, &before, &host, guest, &ignore};

	add(&host, "a", 'd', NULL);
	add(&host, "a/b", 'd', NULL);
	add(&host, "a/b/f", 'f', NULL);
	add(&host, "a/l", 'l', "b/../b/f");
	add(&host, "out", 'l', "/usr");
	FUZZ_CHECK(work_manifest_finish(&host, NULL) == 0);
	for (size_t i = 0; i < guest->nr; i++)
		guest->entries[i].hashed = guest->entries[i].type == 'f';
	FUZZ_CHECK(work_compare(&trees, &plan, NULL) == 0);
	FUZZ_CHECK(work_plan_settle(&plan, NULL) == 0);
	for (size_t i = 0; i < plan.nr; i++) {
		const struct work_change *c = &plan.changes[i];

		FUZZ_CHECK(i == 0 || strcmp(plan.changes[i - 1].path, c->path) < 0);
		FUZZ_CHECK(!(c->guest && (work_notes_of(c->path) & WORK_NOTE_GIT)) ||
			   c->guest->type == 'd');
		FUZZ_CHECK(!c->guest || c->guest->type != 'l' || c->conflict ||
			   c->guest->link[0] != '/');
	}
}

static void manifest(const uint8_t *data, size_t size)
{
	CLEANUP_MANIFEST struct work_manifest m = {0};
	struct err err = {0};
	int r = work_manifest_parse(data, size, &m, &err);

	if (r < 0) {
		FUZZ_CHECK(r == -EBADMSG && err.msg[0]);
		return;
	}
	for (size_t i = 0; i < m.nr; i++) {
		FUZZ_CHECK(work_path_ok(m.entries[i].path));
		FUZZ_CHECK(work_manifest_find(&m, m.entries[i].path) == &m.entries[i]);
	}
	compare(&m);
}

static void journal(const uint8_t *data, size_t size)
{
	CLEANUP_FREE struct work_step *steps = NULL;
	struct err err = {0};
	size_t nr;
	int r = work_journal_parse(data, size, &steps, &nr, &err);

	FUZZ_CHECK(r == 0 || (r == -EBADMSG && err.msg[0]));
	for (size_t i = 0; r == 0 && i < nr; i++)
		FUZZ_CHECK(work_path_ok(steps[i].path));
}

static void point(const uint8_t *data, size_t size)
{
	struct work_point p = {0};
	struct err err = {0};
	int r = work_point_parse(data, size, &p, &err);

	FUZZ_CHECK(r == 0 || (r == -EBADMSG && err.msg[0]));
	for (size_t i = 0; i < p.nr_deltas; i++) {
		FUZZ_CHECK(work_path_ok(work_delta_path(&p.deltas[i])));
		FUZZ_CHECK(i == 0 || strcmp(work_delta_path(&p.deltas[i - 1]),
					     work_delta_path(&p.deltas[i])) < 0);
	}
	work_point_fini(&p);
}

static void ignore(const char *text, size_t size)
{
	struct work_ignore ig = {0};

	if (work_ignore_parse(text, size, &ig, NULL) < 0)
		return;
	work_ignored_within(&ig, "some/where/in.a/tree", true);
	work_ignored_within(&ig, "aaaaaaaaaaaaaaaa/aaaaaaaaaaaaaaab", false);
	FUZZ_CHECK(work_ignored_within(&ig, WORK_STAGE_NAME "/x", false));
	work_ignore_fini(&ig);
}

static void quote(const uint8_t *data, size_t size)
{
	char path[1024], quoted[WORK_QUOTED_MAX];

	size = MIN(size, sizeof(path) - 1);
	memcpy(path, data, size);
	path[size] = '\0';
	work_quote(quoted, path);
	FUZZ_CHECK(strlen(quoted) < sizeof(quoted));
	for (const char *s = quoted; *s; s++)
		FUZZ_CHECK((unsigned char)*s >= ' ' && *s != 0x7f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size == 0)
		return 0;
	switch (data[0]) {
	case 'm':
		manifest(data + 1, size - 1);
		break;
	case 'j':
		journal(data + 1, size - 1);
		break;
	case 'p':
		point(data + 1, size - 1);
		break;
	case 'i':
		ignore((const char *)data + 1, size - 1);
		break;
	default:
		quote(data + 1, size - 1);
	}
	return 0;
}
