// SPDX-License-Identifier: Apache-2.0
// cli/eval_task: what is no task is refused with file, line, key and cure, and no task names a file
// of this host that is not the tasks' own.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/eval_task.h"
#include "vmm/base/fd.h"

static char folder[64];

static void path_of(char ret[256], const char *name)
{
	snprintf(ret, 256, "%.60s/%.100s", folder, name);
}

static void write_file(const char *name, const char *text)
{
	char path[256];
	int fd;

	path_of(path, name);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(fd_write_all(fd, text, strlen(text)), 0);
	fd_close(&fd);
}

static int setup(void **state)
{
	char path[256];
	(void)state;

	strcpy(folder, "/tmp/mayfly-eval-XXXXXX");
	assert_non_null(mkdtemp(folder));
	write_file("in", "text");
	path_of(path, "src");
	return mkdir(path, 0700);
}

static int teardown(void **state)
{
	static const char *const names[] = {"in", "tasks.jsonl", "link", "inner"};
	char path[256];
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		path_of(path, names[i]);
		unlink(path);
	}
	path_of(path, "src");
	rmdir(path);
	return rmdir(folder);
}

static int parse(const char *line, struct eval_task *ret, struct err *err)
{
	*err = (struct err){0};
	return eval_task_parse(line, strlen(line), ret, err);
}

static void all_keys_are_taken(void **state)
{
	struct eval_task t;
	struct err err;
	(void)state;

	assert_int_equal(
		parse("{\"id\": \"a.b-1\", \"image\": \"debian-12\", \"memory\": \"1G\", \"cpus\": "
		      "2, \"network\": \"nat\", \"files\": [{\"from\": \"src\", \"to\": "
		      "\"/root/src\"}], \"setup\": [\"true\", [\"echo\", \"x\"]], \"commands\": "
		      "[\"make\"], \"env\": {\"A\": \"b=c\"}, \"workdir\": \"/root\", \"user\": "
		      "\"1000:1000\", \"timeout_seconds\": 7, \"files_out\": [\"/root/out\"], "
		      "\"max_out\": \"1M\", \"verifier\": {\"files\": [{\"from\": \"in\", \"to\": "
		      "\"/v\"}], \"command\": [\"sh\", \"/v\"], \"result\": \"/r\"}}",
			&t, &err),
		0);
	assert_string_equal(t.id, "a.b-1");
	assert_string_equal(t.image, "debian-12");
	assert_null(t.pool);
	assert_int_equal(t.cpus, 2);
	assert_string_equal(t.net, "passt");
	assert_int_equal(json_array_size(t.setup), 2);
	assert_int_equal(json_array_size(t.commands), 1);
	assert_int_equal(t.timeout_s, 7);
	assert_int_equal(t.max_out_bytes, MIB);
	assert_int_equal(json_array_size(t.verifier_files), 1);
	assert_true(json_is_array(t.verifier));
	assert_string_equal(t.result, "/r");
	assert_string_equal(t.user, "1000:1000");
	eval_task_fini(&t);
	assert_int_equal(parse("{\"id\": \"x\", \"commands\": [\"true\"]}", &t, &err), 0);
	assert_null(t.net);
	assert_int_equal(t.timeout_s, EVAL_TIMEOUT_S);
	assert_null(t.verifier);
	eval_task_fini(&t);
	assert_int_equal(
		parse("{\"id\": \"x\", \"commands\": [\"true\"], \"network\": \"allowlist\", "
		      "\"allow\": [\"a.example\", \"b.example:22\"]}",
			&t, &err),
		0);
	assert_string_equal(t.net, "allowlist");
	assert_string_equal(t.allow, "a.example b.example:22");
	eval_task_fini(&t);
}

static void what_makes_no_sense_is_refused(void **state)
{
	static const struct {
		const char *line, *says;
	} bad[] = {
		{"", "JSON"},
		{"[]", "JSON object"},
		{"{\"id\": \"a\", \"id\": \"b\"}", "duplicate"},
		{"{\"commands\": [\"x\"]}", "'id'"},
		{"{\"id\": 7, \"commands\": [\"x\"]}", "'id'"},
		{"{\"id\": \"../x\", \"commands\": [\"x\"]}", "'id'"},
		{"{\"id\": \".x\", \"commands\": [\"x\"]}", "'id'"},
		{"{\"id\": \"results.jsonl\", \"commands\": [\"x\"]}", "file of results"},
		{"{\"id\": \"a/b\", \"commands\": [\"x\"]}", "'id'"},
		{"{\"id\": \"a\"}", "'commands'"},
		{"{\"id\": \"a\", \"commands\": []}", "'commands'"},
		{"{\"id\": \"a\", \"commands\": \"x\"}", "a list"},
		{"{\"id\": \"a\", \"commands\": [\"\"]}", "a command"},
		{"{\"id\": \"a\", \"commands\": [[]]}", "a command"},
		{"{\"id\": \"a\", \"commands\": [[\"\"]]}", "a program"},
		{"{\"id\": \"a\", \"commands\": [[\"x\", 1]]}", "words"},
		{"{\"id\": \"a\", \"command\": [\"x\"]}", "unknown key 'command'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"cpus\": 0}", "'cpus'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"cpus\": 1.5}", "whole number"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"memory\": \"1\"}", "'memory'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"timeout_seconds\": -1}", "want 1 to"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"allow\": []}", "with it"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"network\": \"tap\"}", "\"none\""},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"pool\": \"p\", \"image\": \"i\"}",
			"'pool'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"pool\": \"p\", \"cpus\": 1}", "'pool'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"env\": {\"A=\": \"b\"}}", "'env'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"env\": {\"A\": 1}}", "'env'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"workdir\": \"x\"}", "'workdir'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files_out\": [\"x\"]}", "'files_out'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files_out\": [1]}", "'files_out'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"max_out\": \"17G\"}", "'max_out'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": \"a\"}]}",
			"\"to\""},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [1]}", "'files'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": \"a\", \"to\": "
		 "\"/b\", "
		 "\"mode\": 1}]}",
			"unknown key 'mode'"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": \"a\", \"to\": "
		 "\"b\"}]}",
			"whole path"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": \"/etc/shadow\", "
		 "\"to\": \"/b\"}]}",
			"relative"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": \"x/../../y\", "
		 "\"to\": "
		 "\"/b\"}]}",
			"\"..\""},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"network\": \"allowlist\", \"allow\": "
		 "[1]}",
			"HOST"},
		{"{\"id\": \"a\", \"commands\": [\"x\"], \"network\": \"allowlist\", \"allow\": "
		 "[\"a b\"]}",
			"HOST"},
		{"{\"id\": \"a\", \"verifier\": {}}", "\"command\""},
		{"{\"id\": \"a\", \"verifier\": {\"command\": 1}}", "a command"},
		{"{\"id\": \"a\", \"verifier\": {\"command\": \"x\", \"result\": \"r\"}}",
			"'result'"},
		{"{\"id\": \"a\", \"verifier\": {\"command\": \"x\", \"timeout\": 1}}",
			"of the verifier"},
		{"{\"id\": \"a\\u0000\", \"commands\": [\"x\"]}", "JSON"},
	};
	struct eval_task t;
	struct err err;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		if (parse(bad[i].line, &t, &err) != -EINVAL)
			fail_msg("%s is taken", bad[i].line);
		if (!strstr(err.msg, bad[i].says))
			fail_msg("%s: '%s' lacks '%s'", bad[i].line, err.msg, bad[i].says);
	}
}

static int read_text(const char *text, struct eval_tasks *ret, struct err *err)
{
	char path[256];

	write_file("tasks.jsonl", text);
	path_of(path, "tasks.jsonl");
	*err = (struct err){0};
	return eval_tasks_read(path, ret, err);
}

static void a_file_is_read_as_a_whole_or_not(void **state)
{
	struct eval_tasks tasks;
	struct err err;
	(void)state;

	assert_int_equal(read_text("{\"id\": \"a\", \"commands\": [\"x\"]}\n\n"
				   "{\"id\": \"b\", \"commands\": [\"x\"], \"files\": "
				   "[{\"from\": \"src\", \"to\": \"/s\"}]}",
				 &tasks, &err),
		0);
	assert_int_equal(tasks.nr, 2);
	assert_string_equal(tasks.tasks[1].id, "b");
	assert_string_equal(tasks.folder, folder);
	eval_tasks_fini(&tasks);
	assert_int_equal(read_text("\n", &tasks, &err), -EINVAL);
	assert_int_equal(
		read_text("{\"id\": \"a\", \"commands\": [\"x\"]}\n{}\n", &tasks, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "tasks.jsonl:2: key 'id'"));
	assert_int_equal(read_text("{\"id\": \"a\", \"commands\": [\"x\"]}\n"
				   "{\"id\": \"a\", \"commands\": [\"y\"]}\n",
				 &tasks, &err),
		-EINVAL);
	assert_non_null(strstr(err.msg, "line 1 already"));
	assert_int_equal(eval_tasks_read("/nowhere/tasks", &tasks, &err), -ENOENT);
}

static void files_are_the_tasks_own(void **state)
{
	static const char line[] = "{\"id\": \"a\", \"commands\": [\"x\"], \"files\": [{\"from\": "
				   "\"%s\", \"to\": \"/b\"}]}\n";
	struct eval_tasks tasks;
	char path[256], text[512], real[PATH_MAX];
	struct err err;
	(void)state;

	path_of(path, "link");
	assert_int_equal(symlink("/etc/passwd", path), 0);
	path_of(path, "inner");
	assert_int_equal(symlink("in", path), 0);
	snprintf(text, sizeof(text), line, "missing");
	assert_int_equal(read_text(text, &tasks, &err), -ENOENT);
	assert_non_null(strstr(err.msg, ":1: key 'files'"));
	snprintf(text, sizeof(text), line, "link");
	assert_int_equal(read_text(text, &tasks, &err), -EINVAL);
	assert_non_null(strstr(err.msg, "out of the folder"));
	snprintf(text, sizeof(text), line, "inner");
	assert_int_equal(read_text(text, &tasks, &err), 0);
	eval_tasks_fini(&tasks);
	assert_int_equal(eval_source(folder, "inner", real, &err), 0);
	path_of(path, "in");
	assert_string_equal(real, path);
	// A neighbour whose name begins as the folder's.
	snprintf(text, sizeof(text), "%.60sx", folder);
	assert_int_equal(mkdir(text, 0700), 0);
	path_of(path, "link");
	assert_int_equal(unlink(path), 0);
	assert_int_equal(symlink(text, path), 0);
	assert_int_equal(eval_source(folder, "link", real, &err), -EINVAL);
	assert_int_equal(rmdir(text), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_keys_are_taken),
		cmocka_unit_test(what_makes_no_sense_is_refused),
		cmocka_unit_test_setup_teardown(a_file_is_read_as_a_whole_or_not, setup, teardown),
		cmocka_unit_test_setup_teardown(files_are_the_tasks_own, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
