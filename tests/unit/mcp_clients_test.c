// SPDX-License-Identifier: Apache-2.0
// The files of MCP clients: what is put in and taken out, and that all else stays as it was.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/clients.h"
#include "vmm/base/fd.h"

typedef char *edit_fn(const char *text, const char *section, const char *name, const char *value,
	struct err *err);

// In and out again; where the text had the section already it is as it was.
static void there_and_back(
	edit_fn *edit, const char *before, const char *value, const char *after, const char *back)
{
	struct err err = {0};
	char *in = edit(before, "s", "m", value, &err), *again, *out;

	if (!in)
		fail_msg("%s: %s", before, err.msg);
	assert_string_equal(in, after);
	again = edit(in, "s", "m", value, &err);
	assert_string_equal(again, in);
	assert_null(edit(in, "s", "m", "9", &err));
	assert_int_equal(err.code, -EEXIST);
	out = edit(in, "s", "m", NULL, &err);
	if (!out)
		fail_msg("%s: %s", in, err.msg);
	assert_string_equal(out, back);
	assert_null(edit(out, "s", "m", NULL, &err));
	assert_int_equal(err.code, -ENOENT);
	free(in);
	free(again);
	free(out);
}

static void json(void **state)
{
	static const char *const bad[] = {"[]", "nonsense", "{\"s\": []}", "{\"s\": 1}", "{\"s\"",
		"{\"s\": {\"m\"", "{\"s\": {\"m\": ", "{s: {}}", "{\"a\": [1, {\"s\": \"}\", 2}",
		"{\"a\" 1}", "{\"a\": \"\\"};
	(void)state;

	there_and_back(clients_edit_json, "", "1", "{\n  \"s\": {\n    \"m\": 1\n  }\n}\n",
		"{\n  \"s\": {\n  }\n}\n");
	there_and_back(clients_edit_json, "{}", "{\"x\": [1]}",
		"{\n  \"s\": {\n    \"m\": {\"x\": [1]}\n  }\n}", "{\n  \"s\": {\n  }\n}");
	there_and_back(clients_edit_json, "{\"a\": 1.10,\n \"s\": {\"b\": \"}\\\"{\"}}\n", "1",
		"{\"a\": 1.10,\n \"s\": {\n    \"m\": 1,\"b\": \"}\\\"{\"}}\n",
		"{\"a\": 1.10,\n \"s\": {\"b\": \"}\\\"{\"}}\n");
	// With comments, a comma too many in the end, and the name elsewhere.
	there_and_back(clients_edit_json,
		"// \"s\": {}\n{ /* { */ \"t\": {\"m\": [2]}, \"s\": {\"b\": 1,}, }", "1",
		"// \"s\": {}\n{ /* { */ \"t\": {\"m\": [2]}, \"s\": {\n    \"m\": 1,\"b\": 1,}, }",
		"// \"s\": {}\n{ /* { */ \"t\": {\"m\": [2]}, \"s\": {\"b\": 1,}, }");
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct err err = {0};

		if (clients_edit_json(bad[i], "s", "m", "1", &err))
			fail_msg("%s", bad[i]);
		assert_true(err.code < 0 && err.msg[0]);
	}
}

static void the_last_member_goes_with_its_comma(void **state)
{
	struct err err = {0};
	char *out = clients_edit_json("{\"s\": {\"a\": 1, \"m\": {}}}", "s", "m", NULL, &err);
	(void)state;

	assert_string_equal(out, "{\"s\": {\"a\": 1}}");
	free(out);
}

static void toml(void **state)
{
	(void)state;
	there_and_back(clients_edit_toml, "", "c = 1\n", "[s.\"m\"]\nc = 1\n", "");
	there_and_back(clients_edit_toml, "a = 1\n\n[s.\"mm\"]\nc = 2\n", "c = 1\n",
		"a = 1\n\n[s.\"mm\"]\nc = 2\n\n[s.\"m\"]\nc = 1\n", "a = 1\n\n[s.\"mm\"]\nc = 2\n");
	there_and_back(
		clients_edit_toml, "a = 1", "c = 1\n", "a = 1\n\n[s.\"m\"]\nc = 1\n", "a = 1\n");
}

static void a_table_in_the_middle(void **state)
{
	struct err err = {0};
	char *out = clients_edit_toml(
		"a = 1\n\n[s.\"m\"]\nc = 1\n\n[z]\nb = 2\n", "s", "m", NULL, &err);
	(void)state;

	assert_string_equal(out, "a = 1\n\n[z]\nb = 2\n");
	free(out);
}

static void files(void **state)
{
	static const char *const names[] = {
		"claude-code", "codex", "cursor", "vscode", "gemini-cli"};
	static const char *const paths[] = {".claude.json", ".codex/config.toml",
		".cursor/mcp.json", ".config/Code/User/mcp.json", ".gemini/settings.json"};
	char dir[] = "/tmp/mayfly-clients-test-XXXXXX", path[200], command[200];
	struct err err = {0};
	(void)state;

	assert_non_null(mkdtemp(dir));
	setenv("HOME", dir, 1);
	unsetenv("CODEX_HOME");
	unsetenv("CLAUDE_CONFIG_DIR");
	unsetenv("XDG_CONFIG_HOME");
	setenv("MAYFLY_HOME", "/a \"b", 1);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		struct clients_entry e = {.client = names[i],
			.machine = "box.1",
			.program = "/usr/bin/mayfly",
			.access = "manage",
			.dry_run = true};
		CLEANUP_FREE char *text = NULL;
		struct stat st;
		size_t len;

		snprintf(path, sizeof(path), "%s/%s", dir, paths[i]);
		assert_int_equal(clients_uninstall(&e, &err), -ENOENT);
		assert_int_equal(clients_install(&e, &err), 0);
		assert_int_equal(stat(path, &st), -1);
		e.dry_run = false;
		if (clients_install(&e, &err) < 0)
			fail_msg("%s", err.msg);
		assert_int_equal(clients_install(&e, &err), 0);
		assert_int_equal(fd_read_file(path, 4096, &text, &len, &err), 0);
		assert_non_null(strstr(text, "mayfly-box.1"));
		assert_non_null(strstr(text, "/a \\\"b"));
		assert_int_equal(chmod(path, 0640), 0);
		e.access = NULL;
		assert_int_equal(clients_install(&e, &err), -EEXIST);
		assert_non_null(strstr(err.msg, paths[i]));
		assert_int_equal(clients_uninstall(&e, &err), 0);
		assert_int_equal(stat(path, &st), 0);
		assert_int_equal(st.st_mode & 07777, 0640);
		// A link to where the file really is stays one.
		if (i == 0) {
			snprintf(command, sizeof(command),
				"cd %s && mv .claude.json real && ln -s real .claude.json", dir);
			assert_int_equal(system(command), 0);
			assert_int_equal(clients_install(&e, &err), 0);
			assert_int_equal(lstat(path, &st), 0);
			assert_true(S_ISLNK(st.st_mode));
		}
	}
	assert_int_equal(
		clients_install(&(struct clients_entry){.client = "emacs", .machine = "x"}, &err),
		-EINVAL);
	assert_non_null(strstr(err.msg, "gemini-cli"));
	snprintf(command, sizeof(command), "rm -r %s", dir);
	assert_int_equal(system(command), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(json),
		cmocka_unit_test(the_last_member_goes_with_its_comma),
		cmocka_unit_test(toml),
		cmocka_unit_test(a_table_in_the_middle),
		cmocka_unit_test(files),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
