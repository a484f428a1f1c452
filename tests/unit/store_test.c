// SPDX-License-Identifier: Apache-2.0
// cli/store: snapshots are listed when whole and not before, whoever dies; names, parents and tags
// are kept apart, whoever races; damage is told and passed over.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/store.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

static char home[64], store[PATH_MAX];

static int setup(void **state)
{
	struct err err = {0};
	(void)state;

	strcpy(home, "/tmp/mayfly-store-XXXXXX");
	assert_non_null(mkdtemp(home));
	assert_int_equal(setenv("MAYFLY_HOME", home, 1), 0);
	return home_snapshots(store, &err);
}

static int teardown(void **state)
{
	struct err err = {0};
	(void)state;

	return home_remove(home, &err);
}

static int make(const char *machine, const char *tag, const char *parent,
	struct store_snapshot *ret, struct err *err)
{
	struct store_writer writer = {.dir_fd = -1};
	struct config config;
	int r = store_begin(&writer, err);

	config_defaults(&config);
	*ret = (struct store_snapshot){0};
	snprintf(ret->machine, sizeof(ret->machine), "%s", machine);
	snprintf(ret->tag, sizeof(ret->tag), "%s", tag);
	snprintf(ret->parent, sizeof(ret->parent), "%s", parent);
	if (r == 0)
		r = store_commit(&writer, ret, &config, err);
	store_end(&writer);
	return r;
}

static int count_one(void *opaque, const struct store_snapshot *s)
{
	(void)s;
	(*(unsigned int *)opaque)++;
	return 0;
}

static void count_broken(void *opaque, const char *dir, const struct err *err)
{
	(void)opaque;
	(void)dir;
	assert_true(err->code < 0 && err->msg[0]);
}

static unsigned int listed(void)
{
	struct err err = {0};
	unsigned int nr = 0;

	assert_int_equal(store_each(count_one, count_broken, &nr, &err), 0);
	return nr;
}

// All entries of the folder, whatever they are called.
static unsigned int entries(void)
{
	char command[PATH_MAX + 32], text[16] = "";
	FILE *f;

	snprintf(command, sizeof(command), "ls -A %s | wc -l", store);
	f = popen(command, "re");
	assert_non_null(f);
	assert_non_null(fgets(text, sizeof(text), f));
	pclose(f);
	return (unsigned int)atoi(text);
}

static void what_was_committed_is_found(void **state)
{
	struct store_snapshot a, b, found;
	struct err err = {0};
	char name[128];
	(void)state;

	assert_int_equal(make("vm", "one", "", &a, &err), 0);
	assert_int_equal(make("vm", "", a.id, &b, &err), 0);
	assert_int_equal(listed(), 2);
	assert_int_equal(store_find("vm@one", &found, &err), 0);
	assert_string_equal(found.id, a.id);
	assert_int_equal(store_find("vm@", &found, &err), 0);
	assert_string_equal(found.id, b.id); // of one second: a child after its parent
	assert_string_equal(found.parent, a.id);
	snprintf(name, sizeof(name), "%.8s", a.id);
	assert_int_equal(store_find(name, &found, &err), 0);
	assert_string_equal(found.dir, a.dir);
	assert_int_equal(store_find("vm@two", &found, &err), -ENOENT);
	assert_int_equal(store_find("other@", &found, &err), -ENOENT);
	assert_int_equal(store_find("abc", &found, &err), -EINVAL);
	assert_int_equal(make("vm", "one", "", &b, &err), -EEXIST);
	assert_int_equal(entries(), 2); // and nothing is left of that
}

static void a_parent_is_not_removed_nor_built_upon_when_gone(void **state)
{
	struct store_snapshot a, b, c;
	struct err err = {0};
	(void)state;

	assert_int_equal(make("vm", "one", "", &a, &err), 0);
	assert_int_equal(make("other", "two", a.id, &b, &err), 0);
	assert_int_equal(store_remove(&a, &err), -EBUSY);
	assert_non_null(strstr(err.msg, "other@two"));
	// Its machine goes: what others need stays.
	assert_int_equal(store_forget("vm", &err), 0);
	assert_int_equal(listed(), 2);
	assert_int_equal(store_remove(&b, &err), 0);
	assert_int_equal(store_remove(&a, &err), 0);
	assert_int_equal(make("vm", "", a.id, &c, &err), -ENOENT);
	assert_int_equal(entries(), 0);
	// One that is a parent loses but its tag.
	assert_int_equal(make("vm", "suspended", "", &a, &err), 0);
	assert_int_equal(store_check_free("vm", "suspended", &err), -EEXIST);
	assert_int_equal(make("vm", "x", a.id, &b, &err), 0);
	assert_int_equal(store_release(&a, &err), 0);
	assert_int_equal(store_check_free("vm", "suspended", &err), 0);
	assert_int_equal(store_find("vm@suspended", &c, &err), -ENOENT);
	assert_int_equal(store_find(a.id, &c, &err), 0);
	assert_string_equal(c.machine, "vm");
	assert_int_equal(store_release(&b, &err), 0);
	assert_int_equal(store_release(&c, &err), 0);
	assert_int_equal(entries(), 0);
	// A chain of one machine goes in one go.
	assert_int_equal(make("vm", "", "", &a, &err), 0);
	assert_int_equal(make("vm", "", a.id, &b, &err), 0);
	assert_int_equal(make("vm", "", b.id, &c, &err), 0);
	assert_int_equal(store_forget("vm", &err), 0);
	assert_int_equal(entries(), 0);
}

// What a command that died was making goes when the next one makes something; what is being made
// does not.
static void sweeping_takes_what_is_nobodys(void **state)
{
	struct store_writer mine = {.dir_fd = -1}, other = {.dir_fd = -1};
	struct store_snapshot a;
	struct err err = {0};
	pid_t pid;
	int status;
	(void)state;

	assert_int_equal(store_begin(&mine, &err), 0);
	pid = fork();
	if (pid == 0) {
		struct store_writer dead = {.dir_fd = -1};

		_exit(store_begin(&dead, &err) == 0 ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(entries(), 2);
	assert_int_equal(listed(), 0);
	assert_int_equal(store_begin(&other, &err), 0);
	assert_int_equal(entries(), 2);
	assert_int_equal(access(mine.dir, F_OK), 0);
	assert_int_equal(access(other.dir, F_OK), 0);
	store_end(&other);
	store_end(&mine);
	assert_int_equal(make("vm", "", "", &a, &err), 0);
	assert_int_equal(entries(), 1);
}

// Many at once: of one tag there is one, and no child without its parent.
static void races_leave_what_belongs_together(void **state)
{
	enum { PROCS = 8, ROUNDS = 12 };
	struct store_snapshot base;
	struct err err = {0};
	pid_t pids[PROCS];
	(void)state;

	assert_int_equal(make("vm", "base", "", &base, &err), 0);
	for (unsigned int p = 0; p < PROCS; p++) {
		pids[p] = fork();
		if (pids[p] != 0)
			continue;
		for (unsigned int round = 0; round < ROUNDS; round++) {
			struct store_snapshot s;
			char tag[16];
			int r;

			snprintf(tag, sizeof(tag), "t%u", round);
			r = make("vm", tag, base.id, &s, &err);
			if (r < 0 && r != -EEXIST &&
				(r != -ENOENT || store_find(base.id, &s, NULL) == 0))
				_exit(2);
			// Some go again, and somebody always tries to take the base away.
			if (r == 0 && round % 3 == 0 && store_remove(&s, &err) < 0)
				_exit(3);
			r = store_remove(&base, &err);
			if (r < 0 && r != -EBUSY && r != -ENOENT)
				_exit(4);
		}
		_exit(0);
	}
	for (unsigned int p = 0; p < PROCS; p++) {
		int status = -1;

		assert_int_equal(waitpid(pids[p], &status, 0), pids[p]);
		assert_int_equal(status, 0);
	}
	// Either the base is there, or none that builds upon it.
	if (store_find(base.id, &base, NULL) == 0) {
		struct store_snapshot s;

		for (unsigned int round = 0; round < ROUNDS; round++) {
			char name[16];

			snprintf(name, sizeof(name), "vm@t%u", round);
			if (round % 3)
				assert_int_equal(store_find(name, &s, &err), 0);
		}
		assert_true(listed() <= ROUNDS + 1);
	} else {
		assert_int_equal(listed(), 0);
	}
	assert_int_equal(entries(), listed());
}

static void write_manifest(const char *dir, const char *text)
{
	char path[PATH_MAX];
	int fd;

	assert_true(snprintf(path, sizeof(path), "%s/manifest.json", dir) < (int)sizeof(path));
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	fd_close(&fd);
}

static void damaged_manifests_are_told_and_passed_over(void **state)
{
	// What stands in place of the good ones, one at a time; NULL: its own id.
	static const struct {
		const char *key, *value;
	} fields[] = {
		{"machine", "\"\""},
		{"machine", "\"a b\""},
		{"machine", "\"a\\u001b[2J\""},
		{"machine", "7"},
		{"tag", "\"a/b\""},
		{"tag", "null"},
		{"parent", "\"xyz\""},
		{"parent", NULL},
		{"memory_bytes", "-1"},
		{"created_s", "-1"},
		{"id", "\"0123456789abcdef0123456789abcdef\""},
	};
	struct store_snapshot good, bad, found;
	struct err err = {0};
	(void)state;

	assert_int_equal(make("vm", "good", "", &good, &err), 0);
	assert_int_equal(make("vm", "bad", "", &bad, &err), 0);
	for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
		char own[64], text[512];

		snprintf(own, sizeof(own), "\"%s\"", bad.id);
		// Of a name that comes twice the later counts.
		snprintf(text, sizeof(text),
			"{\"id\":\"%s\",\"parent\":\"\",\"machine\":\"vm\",\"tag\":\"bad\","
			"\"%s\":%s}",
			bad.id, fields[i].key, fields[i].value ? fields[i].value : own);
		write_manifest(bad.dir, text);
		assert_int_equal(listed(), 1);
		assert_int_equal(store_find("vm@bad", &found, &err), -ENOENT);
		assert_int_equal(store_find("vm@good", &found, &err), 0);
	}
	write_manifest(bad.dir, "{");
	assert_int_equal(listed(), 1);
	write_manifest(bad.dir, "");
	assert_int_equal(listed(), 1);
	assert_int_equal(make("vm", "after", "", &found, &err), 0);
}

static void tags_are_words(void **state)
{
	static const char *const bad[] = {"", "-x", ".x", "a b", "a/b", "a@b", "\xc3\xa4",
		"0123456789012345678901234567890123456789012345678901234567890123"};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(store_check_tag(bad[i], NULL), -EINVAL);
	assert_int_equal(store_check_tag("a.b_c-1", NULL), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(what_was_committed_is_found, setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_parent_is_not_removed_nor_built_upon_when_gone, setup, teardown),
		cmocka_unit_test_setup_teardown(sweeping_takes_what_is_nobodys, setup, teardown),
		cmocka_unit_test_setup_teardown(races_leave_what_belongs_together, setup, teardown),
		cmocka_unit_test_setup_teardown(
			damaged_manifests_are_told_and_passed_over, setup, teardown),
		cmocka_unit_test(tags_are_words),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
