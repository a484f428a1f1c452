// SPDX-License-Identifier: Apache-2.0
// The command that a tool's arguments describe; see the header. A thread a call.
#include "mcp/command.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "vmm/base/fd.h"

void command_fini(struct command *c)
{
	for (size_t i = 0; c->env && c->env[i]; i++)
		free(c->env[i]);
	free(c->env);
	free(c->argv);
	fd_close(&c->in_fd);
}

static int take_env(struct command *c, const json_t *env, struct err *err)
{
	const json_t *value;
	const char *name;
	size_t nr = 0;

	c->env = calloc(json_object_size(env) + 1, sizeof(*c->env));
	if (!c->env)
		return err_errno(err, -ENOMEM, "env");
	json_object_foreach((json_t *)env, name, value)
	{
		if (!name[0] || strchr(name, '='))
			return err_set(err, -EINVAL, "env: '%.80s' is no name of a variable", name);
		if (asprintf(&c->env[nr], "%s=%s", name, json_string_value(value)) < 0) {
			c->env[nr] = NULL;
			return err_errno(err, -ENOMEM, "env");
		}
		nr++;
	}
	return 0;
}

static int take_stdin(struct command *c, const char *text, struct err *err)
{
	int r;

	if (!text)
		return 0;
	c->in_fd = memfd_create("stdin", MFD_CLOEXEC);
	if (c->in_fd < 0)
		return err_errno(err, -errno, "stdin");
	r = fd_write_all(c->in_fd, text, strlen(text));
	if (r == 0 && lseek(c->in_fd, 0, SEEK_SET) < 0)
		r = -errno;
	return r < 0 ? err_errno(err, r, "stdin") : 0;
}

int command_of(
	const struct tool_call *call, struct command *c, struct agent_exec *ret, struct err *err)
{
	const json_t *argv = json_object_get(call->arguments, "argv"), *word;
	const char *cwd = arg_text(call, "cwd", NULL);
	size_t i;
	int r;

	c->argv = calloc(json_array_size(argv) + 1, sizeof(*c->argv));
	if (!c->argv)
		return err_errno(err, -ENOMEM, "argv");
	json_array_foreach(argv, i, word) c->argv[i] = json_string_value(word);
	r = cwd ? arg_path(call, "cwd", &cwd, err) : 0;
	if (r == 0)
		r = take_env(c, json_object_get(call->arguments, "env"), err);
	if (r == 0)
		r = take_stdin(c, arg_text(call, "stdin", NULL), err);
	*ret = (struct agent_exec){
		.argv = c->argv,
		.env = (const char *const *)c->env,
		.cwd = cwd,
		.user = arg_text(call, "user", NULL),
		.in_fd = c->in_fd,
		.out_fd = -1,
		.err_fd = -1,
		.signal_fd = -1,
		.cancel_fd = call->cancel_fd,
	};
	return r;
}
