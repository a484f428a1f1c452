// SPDX-License-Identifier: Apache-2.0
// The tasks of mayfly eval: a JSON object a line (docs/pools-and-evals.md). They may come from a
// stranger: what is not understood is refused, with file, line, key and cure, and no file of this
// host outside of the tasks' own folder can be named. One thread.
#ifndef MAYFLY_CLI_EVAL_TASK_H
#define MAYFLY_CLI_EVAL_TASK_H

#include <jansson.h>
#include <limits.h>

#include "vmm/base/err.h"

#define EVAL_RESULTS       "results.jsonl" // beside the tasks' folders, so no task's id
#define EVAL_START_LOCK    ".start-" // likewise, and a number
#define EVAL_TASKS_MAX     100000
#define EVAL_LINE_BYTES    (1U << 20)
#define EVAL_FILE_BYTES    (1U << 28)
#define EVAL_ID_MAX        64
#define EVAL_ITEMS_MAX     256 // of any list
#define EVAL_TIMEOUT_S     600
#define EVAL_TIMEOUT_MAX_S 604800
#define EVAL_MAX_OUT_BYTES (64 * MIB)
#define EVAL_MAX_OUT_LIMIT (16 * GIB)
#define EVAL_RESULT_BYTES  65536U // of a verifier's result file

// A task that was accepted: each of these members of json is there or not, of its type, and makes
// sense. Strings are json's.
struct eval_task {
	json_t *json;
	char id[EVAL_ID_MAX + 1]; // fit for a file's name
	const char *image, *pool, *memory, *workdir, *user; // NULL: not said
	unsigned int cpus; // 0: not said
	const char *net; // [net] mode of vm.ini; NULL: not said
	char *allow; // [net] allow, owned; NULL: not said
	uint64_t timeout_s; // of set-up, commands and verifier, each as a whole
	uint64_t max_out_bytes;
	const json_t *files, *verifier_files; // arrays of {from, to}, or NULL
	const json_t *setup, *commands; // arrays of commands, or NULL: a string or an array of them
	const json_t *env; // an object of strings, or NULL
	const json_t *files_out; // an array of paths in the guest, or NULL
	const json_t *verifier; // a command, or NULL
	const char *result; // a path in the guest, or NULL
};

// One line. -EINVAL, naming the key and the cure.
int eval_task_parse(const char *line, size_t len, struct eval_task *ret, struct err *err);
void eval_task_fini(struct eval_task *task);

struct eval_tasks {
	char folder[PATH_MAX]; // of the file: what "from" is relative to
	struct eval_task *tasks;
	size_t nr;
};

// All of a file. Each id stands there once, and each "from" is a file or folder within the tasks'
// folder.
int eval_tasks_read(const char *path, struct eval_tasks *ret, struct err *err);
void eval_tasks_fini(struct eval_tasks *tasks);

// Where "from" is on this host. -EINVAL if that is not within folder.
int eval_source(const char *folder, const char *from, char ret_path[PATH_MAX], struct err *err);

#endif
