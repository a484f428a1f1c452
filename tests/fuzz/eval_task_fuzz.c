// SPDX-License-Identifier: Apache-2.0
// Fuzzes a line of tasks, which may come from a stranger: what is taken is of the types that its
// users rely on, is called so that it may be a file's name, and stays within its folder.
#include <ctype.h>
#include <string.h>

#include "cli/eval_task.h"
#include "tests/support/fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_command(const json_t *command)
{
	json_t *word;
	size_t i;

	if (json_is_string(command)) {
		FUZZ_CHECK(json_string_length(command) > 0);
		return;
	}
	FUZZ_CHECK(json_array_size(command) > 0 && json_array_size(command) <= EVAL_ITEMS_MAX);
	json_array_foreach(command, i, word)
	{
		FUZZ_CHECK(json_is_string(word));
	}
}

static void check_commands(const json_t *list)
{
	json_t *command;
	size_t i;

	FUZZ_CHECK(!list || json_is_array(list));
	json_array_foreach(list, i, command)
	{
		check_command(command);
	}
}

static void check_files(const json_t *list)
{
	json_t *file;
	size_t i;

	FUZZ_CHECK(!list || json_is_array(list));
	json_array_foreach(list, i, file)
	{
		const char *from = json_string_value(json_object_get(file, "from"));
		const char *to = json_string_value(json_object_get(file, "to"));

		FUZZ_CHECK(from && from[0] && from[0] != '/');
		FUZZ_CHECK(to && to[0] == '/');
		FUZZ_CHECK(strncmp(from, "../", 3) != 0 && !strstr(from, "/../"));
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct eval_task t;
	struct err err = {0};
	const char *name;
	json_t *value;
	size_t i;

	if (eval_task_parse((const char *)data, size, &t, &err) < 0) {
		FUZZ_CHECK(err.code < 0 && err.msg[0]);
		return 0;
	}
	FUZZ_CHECK(isalnum((unsigned char)t.id[0]) && !strchr(t.id, '/'));
	FUZZ_CHECK(t.cpus <= 32 && t.timeout_s > 0);
	FUZZ_CHECK(!t.pool || !(t.image || t.memory || t.cpus || t.net));
	FUZZ_CHECK(!t.allow || (t.net && !strchr(t.allow, '\n')));
	FUZZ_CHECK(t.verifier || json_array_size(t.commands) > 0);
	check_commands(t.setup);
	check_commands(t.commands);
	check_files(t.files);
	check_files(t.verifier_files);
	if (t.verifier)
		check_command(t.verifier);
	json_object_foreach((json_t *)t.env, name, value)
	{
		FUZZ_CHECK(name[0] && !strchr(name, '=') && json_is_string(value));
	}
	json_array_foreach(t.files_out, i, value)
	{
		FUZZ_CHECK(json_string_value(value)[0] == '/');
	}
	eval_task_fini(&t);
	return 0;
}
