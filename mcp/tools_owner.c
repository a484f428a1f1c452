// SPDX-License-Identifier: Apache-2.0
// Tools for what is not the machine's but its owner's: ports, folders and the network of the host.
// What the owner has not allowed beforehand is asked for (see approvals.h). A thread a call.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/folders.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"

#define DOWNLOAD_BYTES GIB // of one call

static int read_config(const struct tool_call *call, struct config *ret, struct err *err)
{
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/vm.ini", call->machine->dir) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", call->machine->dir);
	return config_read(path, ret, err);
}

// Asks with arguments, taken over, and makes the answer the call's result. Returns 1 if it is to be
// done now.
static int ask(struct tool_call *call, const char *action, json_t *arguments, struct err *err)
{
	enum approval_state state = APPROVAL_PENDING;
	char id[APPROVAL_ID_BYTES];
	int r = arguments ? call_ask_owner(call, action, arguments, id, &state, err)
			  : err_errno(err, -ENOMEM, "arguments");

	json_decref(arguments);
	if (r < 0)
		return r;
	call->result = json_pack("{s:s, s:s}", "state", approval_state_name(state), "approval", id);
	return state == APPROVAL_ALLOWED;
}

static void set_state(struct tool_call *call, const char *state)
{
	if (!call->result)
		call->result = json_object();
	json_object_set_new(call->result, "state", json_string(state));
}

// --- Ports -----------------------------------------------------------------------------------

static int publish_port(struct tool_call *call, struct err *err)
{
	const json_int_t port = (json_int_t)arg_number(call, "port", 0);
	const json_int_t host_port = (json_int_t)arg_number(call, "host_port", (uint64_t)port);
	int r = ask(call, APPROVAL_PUBLISH_PORT,
		json_pack("{s:I, s:I}", "port", port, "host_port", host_port), err);

	// It is the owner's process that publishes it.
	if (r == 1)
		json_object_set_new(call->result, "address",
			json_sprintf("127.0.0.1:%lld", (long long)host_port));
	return MIN(r, 0);
}

// --- The network -----------------------------------------------------------------------------

static int take_reach(const struct tool_call *call, struct allow_list *ret, struct err *err)
{
	const json_t *reach = json_object_get(call->arguments, "reach"), *host;
	size_t i;

	*ret = (struct allow_list){0};
	json_array_foreach(reach, i, host)
	{
		struct allow_rule rule;
		int r = allow_rule_parse(
			json_string_value(host), json_string_length(host), &rule, err);

		if (r == 0)
			r = allow_add(ret, &rule, err);
		if (r < 0)
			return err_wrap(err, r, "reach");
	}
	return 0;
}

static json_t *tell_reach(const struct allow_list *list)
{
	json_t *told = json_array();

	for (unsigned int i = 0; i < list->nr; i++) {
		char text[ALLOW_HOST_BYTES + 16];

		allow_rule_print(&list->rules[i], text, sizeof(text));
		json_array_append_new(told, json_string(text));
	}
	return told;
}

static bool is_within(const struct allow_list *list, const struct allow_list *wide)
{
	struct allow_list narrow = *list;

	allow_narrow(&narrow, wide);
	return narrow.nr == list->nr;
}

// As vm.ini has it from then on; tighten: only if that is not more than it has now.
static int set_reach(
	struct tool_call *call, const struct allow_list *reach, bool tighten, struct err *err)
{
	char keep[ALLOW_TEXT_BYTES];
	const char *argv[9] = {"mayfly", "net"};
	struct buf out = {0};
	size_t n = 2;
	int r = allow_print(reach, keep, sizeof(keep), err);

	if (tighten)
		argv[n++] = "--tighten";
	if (reach->nr) {
		argv[n++] = "--keep";
		argv[n++] = keep;
	}
	argv[n++] = "--";
	argv[n++] = call->machine->name;
	argv[n] = "off";
	if (r == 0)
		r = call_own(call, argv, true, &out, err);
	buf_fini(&out);
	return r;
}

static int set_network(struct tool_call *call, struct err *err)
{
	CLEANUP_FREE struct config *config = calloc(1, sizeof(*config));
	struct allow_list reach = {0}, now;
	bool tighten;
	int r;

	if (!config)
		return err_errno(err, -ENOMEM, "vm.ini");
	r = read_config(call, config, err);
	if (r == 0)
		r = take_reach(call, &reach, err);
	if (r < 0)
		return r;
	if (config_net_has_device(&config->net))
		return err_set(err, -EPERM,
			"the machine has a network card (%s): only its owner can take it out, "
			"while "
			"it is down",
			config_net_name(config->net.mode));
	config_reach(config, &now);
	tighten = is_within(&reach, &now);
	r = tighten ? 1
		    : ask(call, APPROVAL_NETWORK, json_pack("{s:o}", "reach", tell_reach(&reach)),
			      err);
	if (r == 1) {
		r = set_reach(call, &reach, tighten, err);
		set_state(call, "set");
	}
	if (r == 0)
		r = read_config(call, config, err);
	if (r < 0)
		return r;
	config_reach(config, &now);
	json_object_set_new(call->result, "reach", tell_reach(&now));
	return 0;
}

// --- Files of the host -----------------------------------------------------------------------

// Folder and name of a path that is not "/"; the folder is the caller's to free.
static int split(const char *path, char **ret_folder, const char **ret_name, struct err *err)
{
	const char *slash = strrchr(path, '/');

	if (!slash || !slash[1])
		return err_set(err, -EINVAL, "'%.80s': name the file or folder itself", path);
	if (strlen(slash + 1) > NAME_MAX)
		return err_set(err, -ENAMETOOLONG, "'%.80s…': a name has at most 255 bytes", path);
	*ret_folder = slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
	*ret_name = slash + 1;
	return *ret_folder ? 0 : err_errno(err, -ENOMEM, "path");
}

// What was asked for is this file, and no other that has its name later. Nothing tells the agent
// whether there is one.
static int ask_upload(
	struct tool_call *call, const char *from, const char *to, int *ret_fd, struct err *err)
{
	CLEANUP_FD int fd = folders_open_elsewhere(from);
	struct stat st;
	json_t *inode = json_null();
	int r;

	if (fd >= 0 && fstat(fd, &st) == 0)
		inode = json_sprintf(
			"%llu:%llu", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
	r = ask(call, APPROVAL_UPLOAD,
		json_pack("{s:s, s:s, s:o}", "from", from, "to", to, "inode", inode), err);
	// Its id would tell one inode from another.
	json_object_del(call->result, "approval");
	if (r == 1 && fd < 0)
		r = err_errno(err, fd, "%s on the host", from);
	if (r == 1)
		*ret_fd = TAKE_FD(fd);
	return r;
}

// The first of what could not be copied, for its message.
struct problem {
	char path[PATH_MAX];
	int errno_value;
};

static void take_problem(void *ctx, const char *path, int errno_value)
{
	struct problem *p = ctx;

	if (!errno_value || p->errno_value)
		return;
	p->errno_value = errno_value;
	tree_printable(p->path, sizeof(p->path), path);
}

static int explain(const struct problem *p, int r, struct err *err)
{
	return r == -EIO && p->errno_value
		       ? err_errno(err, -EIO,
				 "all was copied but this, and maybe more: '%.200s': %s", p->path,
				 strerror(p->errno_value))
		       : r;
}

static void count(void *ctx, uint64_t bytes)
{
	atomic_store((atomic_uint_fast64_t *)ctx, bytes);
}

static int send_tree(struct tool_call *call, int fd, const char *to, struct err *err)
{
	CLEANUP_FREE struct problem *problem = calloc(1, sizeof(*problem));
	struct agent_files files = {.conn_fd = -1};
	struct agent_put put = {
		.parents = true, .follow = true, .problem = take_problem, .ctx = problem};
	CLEANUP_FREE char *folder = NULL;
	char path[32];
	struct stat st;
	int r;

	if (!problem)
		return err_errno(err, -ENOMEM, "upload");
	r = split(to, &folder, &put.name, err);
	put.folder = folder;
	if (r == 0 && (fstat(fd, &st) < 0 || (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))))
		r = err_set(err, -EINVAL, "from: neither a file nor a folder");
	if (r == 0)
		r = call_files(call, &files, err);
	if (r < 0)
		return r;
	files.progress = count;
	files.ctx = &call->moved_bytes;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	r = explain(problem, agent_put(&files, path, &put, TREE_DEPTH_MAX, err), err);
	fd_close(&files.conn_fd);
	return r;
}

static int upload(struct tool_call *call, struct err *err)
{
	CLEANUP_FREE struct config *config = calloc(1, sizeof(*config));
	const char *from = arg_text(call, "from", ""), *to = "";
	CLEANUP_FD int fd = -1;
	int r;

	if (!config)
		return err_errno(err, -ENOMEM, "vm.ini");
	r = folders_check(from, err);
	if (r == 0)
		r = arg_path(call, "to", &to, err);
	if (r == 0)
		r = read_config(call, config, err);
	if (r == 0) {
		fd = folders_open(config, from, false, O_PATH, err);
		r = fd == -EACCES ? ask_upload(call, from, to, &fd, err) : fd < 0 ? fd : 1;
	}
	if (r == 1) {
		r = send_tree(call, fd, to, err);
		set_state(call, "copied");
	}
	return r;
}

static int download(struct tool_call *call, struct err *err)
{
	const struct agent_get get = {.depth = TREE_DEPTH_MAX, .content = true};
	CLEANUP_FREE struct config *config = calloc(1, sizeof(*config));
	CLEANUP_FREE struct problem *problem = calloc(1, sizeof(*problem));
	struct tree_receive receive = {
		.plain = true, .max_bytes = DOWNLOAD_BYTES, .done = take_problem, .ctx = problem};
	const char *from = "", *to = arg_text(call, "to", "");
	struct agent_files files = {.conn_fd = -1};
	CLEANUP_FREE char *folder = NULL;
	CLEANUP_FD int dir_fd = -1;
	int r;

	if (!config || !problem)
		return err_errno(err, -ENOMEM, "vm.ini");
	r = folders_check(to, err);
	if (r == 0)
		r = arg_path(call, "from", &from, err);
	if (r == 0)
		r = split(to, &folder, &receive.rename, err);
	if (r == 0)
		r = read_config(call, config, err);
	if (r == 0)
		r = dir_fd = folders_open(config, folder, true, O_RDONLY | O_DIRECTORY, err);
	if (r >= 0)
		r = call_files(call, &files, err);
	if (r < 0)
		return r;
	receive.dir_fd = dir_fd;
	files.progress = count;
	files.ctx = &call->moved_bytes;
	r = explain(problem, agent_get(&files, from, &get, &receive, err), err);
	fd_close(&files.conn_fd);
	set_state(call, "copied");
	return r;
}

// --- What they are called and take -----------------------------------------------------------

// clang-format off
#define WAIT_PROPERTY \
	"\"wait_seconds\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":600,\"default\":0," \
		"\"description\":\"wait so long for the owner where the owner has to be asked\"}"
#define STATE_PROPERTY(done) "\"state\":{\"type\":\"string\",\"enum\":[\"pending\",\"" done "\",\"denied\"]}"
#define APPROVAL_PROPERTY "\"approval\":{\"type\":\"string\",\"description\":\"the owner's name of the request\"}"
#define PATH_PROPERTY(name, says) "\"" name "\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":4095,\"description\":\"" says "\"}"

const struct tool owner_tools[] = {
	{
		.name = "publish_port", .title = "Publish a port", .level = CONFIG_ACCESS_EXEC,
		.description = "Asks the machine's owner to make a TCP port of the machine reachable on the owner's host, at "
			"127.0.0.1. The owner decides outside of this session; call it again with the same arguments, or with "
			"wait_seconds, to hear what was decided.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"port\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":65535,\"description\":\"in the machine\"},"
			"\"host_port\":{\"type\":\"integer\",\"minimum\":1024,\"maximum\":65535,\"description\":\"on the host (default: the same)\"},"
			WAIT_PROPERTY "},\"required\":[\"port\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" STATE_PROPERTY("allowed") "," APPROVAL_PROPERTY ","
			"\"address\":{\"type\":\"string\",\"description\":\"where it is, as long as the owner keeps it there\"}},"
			"\"required\":[\"state\"]}",
		.run = publish_port,
	},
	{
		.name = "set_network", .title = "Narrow the network", .level = CONFIG_ACCESS_MANAGE,
		.description = "Sets all that the machine may reach from now on. Less than now is in force at once; for more its "
			"owner is asked, outside of this session: call it again with the same arguments, or with wait_seconds.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			"\"reach\":{\"type\":\"array\",\"maxItems\":64,\"items\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":262},"
				"\"description\":\"hosts: NAME, *.NAME or an address, each with :PORT or without (80 and 443); [] for none\"},"
			WAIT_PROPERTY "},\"required\":[\"reach\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" STATE_PROPERTY("set") "," APPROVAL_PROPERTY ","
			"\"reach\":{\"type\":\"array\",\"items\":{\"type\":\"string\"},\"description\":\"what is in force now\"}},"
			"\"required\":[\"state\",\"reach\"]}",
		.destructive = true, .idempotent = true, .run = set_network,
	},
	{
		.name = "upload", .title = "Copy from the host", .level = CONFIG_ACCESS_MANAGE,
		.description = "Copies a file or folder of the owner's host into the machine, under the name to; folders on the "
			"way are made. For what is in no folder that the owner has allowed, the owner is asked: call it again with "
			"the same arguments, or with wait_seconds.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("from", "whole path on the host") "," PATH_PROPERTY("to", "whole path in the machine") ","
			WAIT_PROPERTY "},\"required\":[\"from\",\"to\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" STATE_PROPERTY("copied") "},\"required\":[\"state\"]}",
		.destructive = true, .idempotent = true, .run = upload, .changes = "Ato",
	},
	{
		.name = "download", .title = "Copy to the host", .level = CONFIG_ACCESS_MANAGE,
		.description = "Copies a file or folder of the machine to the owner's host, up to 1 GiB, under the name to, in a "
			"folder that is there and that the owner has allowed to be written to. Links cannot be copied.",
		.input = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{"
			PATH_PROPERTY("from", "whole path in the machine") "," PATH_PROPERTY("to", "whole path on the host") "},"
			"\"required\":[\"from\",\"to\"]}",
		.output = "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{" STATE_PROPERTY("copied") "},\"required\":[\"state\"]}",
		.destructive = true, .idempotent = true, .run = download,
	},
};
// clang-format on

const size_t nr_owner_tools = ARRAY_SIZE(owner_tools);
