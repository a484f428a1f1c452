// SPDX-License-Identifier: Apache-2.0
// The tasks of mayfly eval; see the header. One thread.
#include "cli/eval_task.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/base/fd.h"
#include "vmm/base/parse.h"

#define TEXT_MAX 65536 // of any string

// --- Pieces ----------------------------------------------------------------------------------

static int wrong(struct err *err, const char *key, const char *want)
{
	return err_set(err, -EINVAL, "key '%.40s': want %s", key, want);
}

// A member of this object, if it has one; type is that of jansson.
static int member(
	const json_t *json, const char *key, json_type type, json_t **ret, struct err *err)
{
	static const char *const names[] = {
		[JSON_OBJECT] = "an object, {…}",
		[JSON_ARRAY] = "a list, […]",
		[JSON_STRING] = "a string",
		[JSON_INTEGER] = "a whole number",
	};
	json_t *value = json_object_get(json, key);

	*ret = NULL;
	if (!value)
		return 0;
	if (json_typeof(value) != type)
		return wrong(err, key, names[type]);
	if (type == JSON_STRING &&
		(json_string_length(value) == 0 || json_string_length(value) >= TEXT_MAX))
		return wrong(err, key, "a string that is neither empty nor longer than 65535");
	if (type == JSON_ARRAY && json_array_size(value) > EVAL_ITEMS_MAX)
		return wrong(err, key, "a list of at most 256");
	*ret = value;
	return 0;
}

static int text(const json_t *json, const char *key, const char **ret, struct err *err)
{
	json_t *value;
	int r = member(json, key, JSON_STRING, &value, err);

	*ret = value ? json_string_value(value) : NULL;
	return r;
}

static int number(const json_t *json, const char *key, uint64_t min, uint64_t max, uint64_t *ret,
	struct err *err)
{
	json_t *value;
	int r = member(json, key, JSON_INTEGER, &value, err);

	if (r < 0 || !value)
		return r;
	if (json_integer_value(value) < (json_int_t)min ||
		json_integer_value(value) > (json_int_t)max)
		return err_set(err, -EINVAL, "key '%s': want %llu to %llu", key,
			(unsigned long long)min, (unsigned long long)max);
	*ret = (uint64_t)json_integer_value(value);
	return 0;
}

// Refuses what is not among these.
static int only(const json_t *json, const char *const keys[], const char *where, struct err *err)
{
	const char *key;
	json_t *value;

	json_object_foreach((json_t *)json, key, value)
	{
		size_t i = 0;

		while (keys[i] && strcmp(keys[i], key) != 0)
			i++;
		if (!keys[i])
			return err_set(err, -EINVAL,
				"unknown key '%.40s'%s (docs/pools-and-evals.md has those that "
				"there are)",
				key, where);
	}
	return 0;
}

static int guest_path(const char *path, const char *key, struct err *err)
{
	if (path[0] != '/' || strlen(path) >= PATH_MAX)
		return wrong(err, key, "a whole path in the machine, like /root/src");
	return 0;
}

// A string for `sh -c`, or a list of strings.
static int check_command(const json_t *command, const char *key, struct err *err)
{
	json_t *word;
	size_t i;

	if (json_is_string(command) && json_string_length(command) > 0 &&
		json_string_length(command) < TEXT_MAX)
		return 0;
	if (!json_is_array(command) || json_array_size(command) == 0 ||
		json_array_size(command) > EVAL_ITEMS_MAX)
		return wrong(err, key,
			"a command: \"a string for sh -c\" or [\"program\", \"argument\", …]");
	json_array_foreach(
		command, i, word) if (!json_is_string(word) ||
				      json_string_length(word) >= TEXT_MAX) return wrong(err, key,
		"words of a command that are strings");
	return json_string_length(json_array_get(command, 0)) > 0
		       ? 0
		       : wrong(err, key, "a command whose first word is a program");
}

static int commands(const json_t *json, const char *key, const json_t **ret, struct err *err)
{
	json_t *list, *command;
	size_t i;
	int r = member(json, key, JSON_ARRAY, &list, err);

	json_array_foreach(list, i, command) if (r == 0) r = check_command(command, key, err);
	*ret = list;
	return r;
}

static int check_from(const char *from, const char *key, struct err *err)
{
	const char *p = from;

	if (from[0] == '/' || strlen(from) >= PATH_MAX)
		return wrong(err, key, "\"from\" relative to the folder of the tasks");
	while (p) {
		if (!strncmp(p, "..", 2) && (p[2] == '/' || p[2] == '\0'))
			return wrong(err, key, "\"from\" without \"..\"");
		p = strchr(p, '/');
		p = p ? p + 1 : NULL;
	}
	return 0;
}

// [{"from": …, "to": …}, …]
static int files(const json_t *json, const char *key, const json_t **ret, struct err *err)
{
	static const char *const keys[] = {"from", "to", NULL};
	json_t *list, *file;
	size_t i;
	int r = member(json, key, JSON_ARRAY, &list, err);

	json_array_foreach(list, i, file)
	{
		const char *from = NULL, *to = NULL;

		if (r == 0 && !json_is_object(file))
			r = wrong(err, key, "a list of {\"from\": …, \"to\": …}");
		if (r == 0)
			r = only(file, keys, " of a file", err);
		if (r == 0)
			r = text(file, "from", &from, err);
		if (r == 0)
			r = text(file, "to", &to, err);
		if (r == 0 && (!from || !to))
			r = wrong(err, key, "both \"from\" and \"to\" of each file");
		if (r == 0)
			r = check_from(from, key, err);
		if (r == 0)
			r = guest_path(to, key, err);
	}
	*ret = list;
	return r;
}

// --- A task ----------------------------------------------------------------------------------

static int take_id(struct eval_task *task, struct err *err)
{
	const char *id;
	int r = text(task->json, "id", &id, err);

	if (r < 0)
		return r;
	if (!id || strlen(id) > EVAL_ID_MAX || !isalnum((unsigned char)id[0]) ||
		strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") <
			strlen(id))
		return wrong(err, "id",
			"1 to 64 letters, digits, '.', '_' and '-', begun with a letter or digit");
	if (!strcmp(id, EVAL_RESULTS))
		return wrong(err, "id", "another name than that of the file of results");
	strcpy(task->id, id);
	return 0;
}

// The rules, apart by spaces, as vm.ini has them. Whether they are any is for config_set() to say.
static int take_allow(struct eval_task *task, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	json_t *list, *rule;
	size_t i, len = 0;
	FILE *out;
	int r = member(task->json, "allow", JSON_ARRAY, &list, err);

	if (r < 0 || !list)
		return r;
	out = open_memstream(&text, &len);
	if (!out)
		return err_errno(err, -ENOMEM, "allow");
	json_array_foreach(list, i, rule)
	{
		if (r == 0 && (!json_is_string(rule) || strpbrk(json_string_value(rule), " ,\n")))
			r = wrong(err, "allow", "a list of \"HOST\" or \"HOST:PORT\"");
		if (r == 0)
			fprintf(out, "%s%s", i ? " " : "", json_string_value(rule));
	}
	if (fclose(out) != 0 && r == 0)
		r = err_errno(err, -ENOMEM, "allow");
	if (r == 0)
		task->allow = TAKE_PTR(text);
	return r;
}

static int take_network(struct eval_task *task, const char *network, struct err *err)
{
	static const char *const modes[][2] = {
		{"none", "none"}, {"nat", "passt"}, {"allowlist", "allowlist"}};
	int r = take_allow(task, err);

	for (size_t i = 0; network && i < ARRAY_SIZE(modes); i++)
		if (!strcmp(network, modes[i][0]))
			task->net = modes[i][1];
	if (r == 0 && network && !task->net)
		r = wrong(err, "network", "\"none\", \"nat\" or \"allowlist\"");
	if (r == 0 && task->allow && (!task->net || strcmp(task->net, "allowlist") != 0))
		r = wrong(err, "allow", "\"network\": \"allowlist\" with it");
	return r;
}

static int take_machine(struct eval_task *task, struct err *err)
{
	const char *network;
	uint64_t cpus = 0, bytes;
	int r = text(task->json, "image", &task->image, err);

	if (r == 0)
		r = text(task->json, "pool", &task->pool, err);
	if (r == 0)
		r = text(task->json, "memory", &task->memory, err);
	if (r == 0)
		r = number(task->json, "cpus", 1, 32, &cpus, err);
	if (r == 0)
		r = text(task->json, "network", &network, err);
	if (r < 0)
		return r;
	task->cpus = (unsigned int)cpus;
	if (task->memory && parse_size(task->memory, &bytes, err) < 0)
		return err_wrap(err, -EINVAL, "key 'memory'");
	r = take_network(task, network, err);
	if (r < 0)
		return r;
	if (task->pool && (task->image || task->memory || task->cpus || network))
		return err_set(err, -EINVAL,
			"key 'pool': it says what the machine is: leave image, memory, cpus and "
			"network out");
	return 0;
}

static int take_env(struct eval_task *task, struct err *err)
{
	json_t *env, *value;
	const char *name;
	int r = member(task->json, "env", JSON_OBJECT, &env, err);

	if (r == 0 && json_object_size(env) > EVAL_ITEMS_MAX)
		r = wrong(err, "env", "at most 256 variables");
	json_object_foreach(env, name, value)
	{
		if (r == 0 && (!json_is_string(value) || !name[0] || strchr(name, '=') ||
				      strlen(name) + json_string_length(value) >= TEXT_MAX))
			r = wrong(err, "env", "{\"NAME\": \"a string\", …}");
	}
	task->env = env;
	return r;
}

static int take_verifier(struct eval_task *task, struct err *err)
{
	static const char *const keys[] = {"files", "command", "result", NULL};
	json_t *verifier;
	int r = member(task->json, "verifier", JSON_OBJECT, &verifier, err);

	if (r < 0 || !verifier)
		return r;
	r = only(verifier, keys, " of the verifier", err);
	if (r == 0)
		r = files(verifier, "files", &task->verifier_files, err);
	task->verifier = json_object_get(verifier, "command");
	if (r == 0 && !task->verifier)
		r = wrong(err, "verifier", "a \"command\" in it");
	if (r == 0)
		r = check_command(task->verifier, "verifier", err);
	if (r == 0)
		r = text(verifier, "result", &task->result, err);
	if (r == 0 && task->result)
		r = guest_path(task->result, "result", err);
	return r;
}

static int take_rest(struct eval_task *task, struct err *err)
{
	json_t *out, *path;
	const char *max_out;
	size_t i;
	int r = number(task->json, "timeout_seconds", 1, EVAL_TIMEOUT_MAX_S, &task->timeout_s, err);

	if (r == 0)
		r = text(task->json, "max_out", &max_out, err);
	if (r == 0 && max_out && parse_size(max_out, &task->max_out_bytes, err) < 0)
		return err_wrap(err, -EINVAL, "key 'max_out'");
	if (r == 0 && task->max_out_bytes > EVAL_MAX_OUT_LIMIT)
		return wrong(err, "max_out", "at most 16G");
	if (r == 0)
		r = text(task->json, "workdir", &task->workdir, err);
	if (r == 0 && task->workdir)
		r = guest_path(task->workdir, "workdir", err);
	if (r == 0)
		r = text(task->json, "user", &task->user, err);
	if (r == 0)
		r = member(task->json, "files_out", JSON_ARRAY, &out, err);
	if (r < 0)
		return r;
	json_array_foreach(out, i, path)
	{
		if (!json_is_string(path))
			return wrong(err, "files_out", "a list of paths");
		r = guest_path(json_string_value(path), "files_out", err);
		if (r < 0)
			return r;
	}
	task->files_out = out;
	return 0;
}

int eval_task_parse(const char *line, size_t len, struct eval_task *ret, struct err *err)
{
	static const char *const keys[] = {"id", "image", "pool", "memory", "cpus", "network",
		"allow", "files", "setup", "commands", "env", "workdir", "user", "timeout_seconds",
		"files_out", "max_out", "verifier", NULL};
	struct eval_task task = {.timeout_s = EVAL_TIMEOUT_S, .max_out_bytes = EVAL_MAX_OUT_BYTES};
	json_error_t error;
	int r;

	if (len > EVAL_LINE_BYTES)
		return err_set(err, -EINVAL, "longer than 1 MiB: put it into a file of \"files\"");
	task.json = json_loadb(line, len, JSON_REJECT_DUPLICATES, &error);
	if (!json_is_object(task.json)) {
		r = err_set(err, -EINVAL, "not a JSON object: %s",
			task.json ? "want {\"id\": …}" : error.text);
		json_decref(task.json);
		return r;
	}
	r = only(task.json, keys, "", err);
	if (r == 0)
		r = take_id(&task, err);
	if (r == 0)
		r = take_machine(&task, err);
	if (r == 0)
		r = files(task.json, "files", &task.files, err);
	if (r == 0)
		r = commands(task.json, "setup", &task.setup, err);
	if (r == 0)
		r = commands(task.json, "commands", &task.commands, err);
	if (r == 0)
		r = take_env(&task, err);
	if (r == 0)
		r = take_rest(&task, err);
	if (r == 0)
		r = take_verifier(&task, err);
	if (r == 0 && json_array_size(task.commands) == 0 && !task.verifier)
		r = err_set(err, -EINVAL, "key 'commands': neither these nor a verifier");
	if (r < 0) {
		eval_task_fini(&task);
		return r;
	}
	*ret = task;
	return 0;
}

void eval_task_fini(struct eval_task *task)
{
	json_decref(task->json);
	free(task->allow);
	*task = (struct eval_task){0};
}

// --- A file of them --------------------------------------------------------------------------

int eval_source(const char *folder, const char *from, char ret_path[PATH_MAX], struct err *err)
{
	CLEANUP_FREE char *real = NULL;
	char path[PATH_MAX];
	size_t len = strlen(folder);

	if (snprintf(path, sizeof(path), "%s/%s", folder, from) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%.60s…", from);
	real = realpath(path, NULL);
	if (!real)
		return err_errno(err, -errno, "%s", path);
	if (strncmp(real, folder, len) != 0 || (real[len] != '/' && real[len] != '\0'))
		return err_set(err, -EINVAL, "%s leads out of the folder of the tasks", path);
	// The link itself would be copied as one.
	strcpy(ret_path, real);
	return 0;
}

static int check_sources(const char *folder, const json_t *list, const char *key, struct err *err)
{
	char path[PATH_MAX];
	json_t *file;
	size_t i;

	json_array_foreach(list, i, file)
	{
		if (eval_source(folder, json_string_value(json_object_get(file, "from")), path,
			    err) < 0)
			return err_wrap(err, -EINVAL, "key '%s'", key);
	}
	return 0;
}

static int add_line(struct eval_tasks *all, json_t *ids, const char *line, size_t len,
	size_t number_of_line, struct err *err)
{
	struct eval_task *more;
	json_t *before;
	int r;

	if (all->nr == EVAL_TASKS_MAX)
		return err_set(err, -EINVAL, "more than %d tasks", EVAL_TASKS_MAX);
	more = reallocarray(all->tasks, all->nr + 1, sizeof(*more));
	if (!more)
		return err_errno(err, -ENOMEM, "tasks");
	all->tasks = more;
	r = eval_task_parse(line, len, &more[all->nr], err);
	if (r < 0)
		return r;
	more += all->nr++;
	before = json_object_get(ids, more->id);
	if (before)
		return err_set(err, -EINVAL, "key 'id': '%s' stands in line %lld already", more->id,
			json_integer_value(before));
	json_object_set_new(ids, more->id, json_integer((json_int_t)number_of_line));
	r = check_sources(all->folder, more->files, "files", err);
	return r < 0 ? r : check_sources(all->folder, more->verifier_files, "verifier", err);
}

static bool blank(const char *line, size_t len)
{
	while (len > 0 && isspace((unsigned char)*line)) {
		line++;
		len--;
	}
	return len == 0;
}

static int find_folder(const char *path, char ret[PATH_MAX], struct err *err)
{
	CLEANUP_FREE char *real = realpath(path, NULL);

	if (!real)
		return err_errno(err, -errno, "%s", path);
	*strrchr(real, '/') = '\0';
	strcpy(ret, real);
	return 0;
}

int eval_tasks_read(const char *path, struct eval_tasks *ret, struct err *err)
{
	struct eval_tasks all = {0};
	CLEANUP_FREE char *buf = NULL;
	json_t *ids = json_object();
	size_t len = 0, number_of_line = 0;
	int r = find_folder(path, all.folder, err);

	if (r == 0)
		r = fd_read_file(path, EVAL_FILE_BYTES, &buf, &len, err);
	for (const char *line = buf, *end = buf + len; r == 0 && line < end;) {
		const char *nl = memchr(line, '\n', (size_t)(end - line));
		size_t line_len = (size_t)((nl ? nl : end) - line);

		number_of_line++;
		if (!blank(line, line_len))
			r = add_line(&all, ids, line, line_len, number_of_line, err);
		if (r < 0)
			err_wrap(err, r, "%s:%zu", path, number_of_line);
		line = nl ? nl + 1 : end;
	}
	if (r == 0 && all.nr == 0)
		r = err_set(err, -EINVAL, "%s: no task in it", path);
	json_decref(ids);
	if (r < 0) {
		eval_tasks_fini(&all);
		return r;
	}
	*ret = all;
	return 0;
}

void eval_tasks_fini(struct eval_tasks *tasks)
{
	for (size_t i = 0; i < tasks->nr; i++)
		eval_task_fini(&tasks->tasks[i]);
	free(tasks->tasks);
	*tasks = (struct eval_tasks){0};
}
