// SPDX-License-Identifier: Apache-2.0
// A client of an MCP endpoint; see the header. The session's own thread, but for what is said to be
// of a call's thread.
#include "mcp/session.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "mcp/audit.h"
#include "mcp/level.h"
#include "mcp/redact.h"
#include "mcp/resources.h"
#include "mcp/schema.h"
#include "mcp/subscriptions.h"
#include "vmm/base/fd.h"

#define MODERN_VERSION MCP_MODERN_VERSION
#define META_PREFIX    MCP_META_PREFIX
#define PROGRESS_MS    5000
#define STACK_BYTES    MIB
#define EXCERPT_BYTES  2048U // of each stream, in the audit
#define PATH_BYTES     1024 // of a path, in the audit
#define LISTENS_MAX    8U

static const char *const legacy_versions[] = {
	"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"};

struct call {
	struct session *session;
	struct call *next;
	json_t *message; // owned; the next two point into it
	json_t *id;
	json_t *token; // for progress, or NULL
	bool modern;
	bool may_wait; // the client can be told to wait for the owner: see wait_result()
	const struct tool *tool;
	struct tool_call tool_call;
	char client[96]; // as it was when the call began
	uint64_t start_ns;
	uint64_t number; // in the audit
	bool cancelled; // by the client: it wants no answer
	bool denied; // the level was lowered while it ran
	enum config_access level;
};

// A stream of change notices of 2026-07-28: a request that is answered when it ends.
struct listen {
	json_t *id;
	bool tools; // changes of their list are told
};

struct session {
	const struct mcp_session *config;
	struct rpc_reader reader;
	struct rpc_writer writer;
	char id[17], client[96];
	bool legacy; // has been initialized: change notices are sent
	struct listen listens[LISTENS_MAX];
	unsigned int nr_listens;
	struct subscriptions *subscriptions; // to resources; NULL: none yet
	enum config_access level; // as it was last seen
	struct level_watcher watcher;
	pthread_mutex_t lock; // of what follows
	pthread_cond_t ended;
	struct call *calls;
	unsigned int nr_calls, nr_threads;
	uint64_t next_number;
};

// --- The level -------------------------------------------------------------------------------

static enum config_access level_now(struct session *s, struct err *err)
{
	enum config_access level = CONFIG_ACCESS_NONE;

	if (level_read(s->config->machine->dir, &level, err) < 0)
		return CONFIG_ACCESS_NONE;
	return MIN(level, s->config->ceiling);
}

static void cancel(struct call *call)
{
	const uint64_t one = 1;

	(void)!write(call->tool_call.cancel_fd, &one, sizeof(one));
}

// A notice, params (may be NULL) taken over, for that stream of 2026-07-28, or with NULL of before.
static void send_notice(struct session *s, const char *method, json_t *id, json_t *params)
{
	if (id && params)
		json_object_set_new(
			params, "_meta", json_pack("{s:O}", META_PREFIX "subscriptionId", id));
	rpc_send(&s->writer, json_pack("{s:s, s:s, s:o*}", "jsonrpc", "2.0", "method", method,
				     "params", params));
}

static void send_change(struct session *s)
{
	static const char method[] = "notifications/tools/list_changed";

	if (s->legacy)
		send_notice(s, method, NULL, NULL);
	for (unsigned int i = 0; i < s->nr_listens; i++)
		if (s->listens[i].tools)
			send_notice(s, method, s->listens[i].id, json_object());
}

static void send_updates(struct session *s)
{
	const char *uri;
	json_t *owner;

	while (subscriptions_take(s->subscriptions, &uri, &owner))
		send_notice(s, "notifications/resources/updated", owner,
			json_pack("{s:s}", "uri", uri));
}

static void end_listen(struct session *s, unsigned int i)
{
	if (s->subscriptions)
		subscriptions_remove(s->subscriptions, NULL, s->listens[i].id);
	json_decref(s->listens[i].id);
	s->listens[i] = s->listens[--s->nr_listens];
}

// vm.ini may have changed: what runs above the level ends, and the client hears of it.
static void on_change(struct session *s)
{
	enum config_access level;
	uint64_t times;

	(void)!read(s->watcher.fd, &times, sizeof(times));
	level = level_now(s, NULL);
	if (level == s->level)
		return;
	s->level = level;
	pthread_mutex_lock(&s->lock);
	for (struct call *call = s->calls; call; call = call->next) {
		// It is what lowers the level itself.
		if (call->tool->level <= level || !strcmp(call->tool->name, "set_access"))
			continue;
		call->denied = true;
		cancel(call);
	}
	pthread_mutex_unlock(&s->lock);
	if (level == CONFIG_ACCESS_NONE && s->subscriptions)
		subscriptions_clear(s->subscriptions);
	send_change(s);
}

// --- Answers ---------------------------------------------------------------------------------

// Of 2026-07-28 every result says what it is, and from whom.
static json_t *finish(json_t *result, bool modern)
{
	if (!modern)
		return result;
	if (!json_object_get(result, "resultType"))
		json_object_set_new(result, "resultType", json_string("complete"));
	json_object_set_new(result, "_meta",
		json_pack("{s:{s:s, s:s}}", META_PREFIX "serverInfo", "name", "mayfly", "version",
			MAYFLY_VERSION));
	return result;
}

static json_t *cacheable(json_t *result, bool modern)
{
	// The level may change at any moment.
	if (modern) {
		json_object_set_new(result, "ttlMs", json_integer(0));
		json_object_set_new(result, "cacheScope", json_string("private"));
	}
	return finish(result, modern);
}

static json_t *instructions(const struct session *s)
{
	return json_sprintf(
		"This is the machine '%s': a disposable Linux virtual machine of your own. "
		"Paths are whole, commands run as root unless you say otherwise, and nothing "
		"in it reaches the host. What your access level (see status) does not grant "
		"is not in the list of tools.",
		s->config->machine->name);
}

static json_t *capabilities(void)
{
	return json_pack(
		"{s:{s:b}, s:{s:b}}", "tools", "listChanged", 1, "resources", "subscribe", 1);
}

static void copy_word(char *ret, size_t size, const json_t *value)
{
	const char *text = json_string_value(value);
	size_t n = 0;

	for (; text && *text && n + 1 < size; text++)
		ret[n++] = *text > ' ' && *text < 0x7f ? *text : '_';
	ret[n] = '\0';
}

static void take_client(struct session *s, const json_t *info)
{
	char name[48], version[32];

	if (!json_is_object(info))
		return;
	copy_word(name, sizeof(name), json_object_get(info, "name"));
	copy_word(version, sizeof(version), json_object_get(info, "version"));
	pthread_mutex_lock(&s->lock);
	snprintf(s->client, sizeof(s->client), "%s/%s", name, version);
	pthread_mutex_unlock(&s->lock);
}

static void initialize(struct session *s, const struct rpc_message *m)
{
	const char *wanted = json_string_value(json_object_get(m->params, "protocolVersion"));
	const char *version = legacy_versions[0];

	if (!wanted) {
		rpc_send_error(
			&s->writer, m->id, RPC_INVALID_PARAMS, "protocolVersion: missing", NULL);
		return;
	}
	for (size_t i = 0; i < ARRAY_SIZE(legacy_versions); i++)
		if (!strcmp(wanted, legacy_versions[i]))
			version = legacy_versions[i];
	take_client(s, json_object_get(m->params, "clientInfo"));
	s->legacy = true;
	rpc_send_result(&s->writer, m->id,
		json_pack("{s:s, s:o, s:{s:s, s:s, s:s}, s:o}", "protocolVersion", version,
			"capabilities", capabilities(), "serverInfo", "name", "mayfly", "title",
			"mayfly machine", "version", MAYFLY_VERSION, "instructions",
			instructions(s)));
}

json_t *mcp_session_versions(void)
{
	json_t *versions = json_pack("[s]", MODERN_VERSION);

	for (size_t i = 0; i < ARRAY_SIZE(legacy_versions); i++)
		json_array_append_new(versions, json_string(legacy_versions[i]));
	return versions;
}

static void discover(struct session *s, const struct rpc_message *m)
{
	rpc_send_result(&s->writer, m->id,
		cacheable(json_pack("{s:o, s:o, s:o}", "supportedVersions", mcp_session_versions(),
				  "capabilities", capabilities(), "instructions", instructions(s)),
			true));
}

static void list_tools(struct session *s, const struct rpc_message *m, bool modern)
{
	enum config_access level;
	struct err err = {0};

	if (json_object_get(m->params, "cursor")) {
		rpc_send_error(&s->writer, m->id, RPC_INVALID_PARAMS,
			"cursor: the list has one page", NULL);
		return;
	}
	level = level_now(s, &err); // s->level is what on_change() has dealt with
	if (err.code) // nothing is granted, and why is for the owner to know
		rpc_send_error(&s->writer, m->id, RPC_INTERNAL, err.msg, NULL);
	else
		rpc_send_result(&s->writer, m->id,
			cacheable(json_pack("{s:o}", "tools", tools_list(level)), modern));
}

// --- A call, in its thread -------------------------------------------------------------------

// What a failure says may come from the guest, and is no text then.
static json_t *error_text(const char *text)
{
	json_t *json = json_string(text);

	return json ? json : json_string("it failed, with words that are not UTF-8");
}

// The client shows that to whoever sits before it, and calls again when there is an answer. What
// the answer is does not matter: the owner's word is in the approvals and nowhere else. Told once a
// call: a client that answers by itself must not do so for ever.
static json_t *wait_result(const struct call *call)
{
	const char *machine = call->session->config->machine->name;

	return json_pack("{s:s, s:s, s:{s:{s:s, s:{s:s, s:o, s:{s:s, s:{}}}}}}", "resultType",
		"input_required", "requestState", "asked", "inputRequests", "owner", "method",
		"elicitation/create", "params", "mode", "form", "message",
		json_sprintf("%s: the owner of '%s' has to decide on that, on the host: mayfly "
			     "approvals %s. Answer here when that is done.",
			call->tool->name, machine, machine),
		"requestedSchema", "type", "object", "properties");
}

static json_t *result_of(struct call *call, int rc, const struct err *err)
{
	json_t *structured = call->tool_call.result;
	char *text;
	json_t *result;

	if (rc < 0)
		return json_pack("{s:[{s:s, s:o}], s:b}", "content", "type", "text", "text",
			error_text(err->msg), "isError", 1);
	text = json_dumps(structured, JSON_COMPACT);
	result = json_pack("{s:[{s:s, s:s}], s:O, s:b}", "content", "type", "text", "text",
		text ? text : "", "structuredContent", structured, "isError", 0);
	free(text);
	return result;
}

// Of a method that is no tool.
static void send_method(struct call *call, int rc, const struct err *err)
{
	struct rpc_writer *w = &call->session->writer;
	json_t *uri = json_object_get(call->tool_call.arguments, "uri");
	int code = rc == -EINVAL   ? RPC_INVALID_PARAMS
		   : rc != -ENOENT ? RPC_INTERNAL
		   : call->modern  ? RPC_INVALID_PARAMS
				   : RPC_NO_RESOURCE;

	if (rc == 0)
		rpc_send_result(
			w, call->id, cacheable(json_incref(call->tool_call.result), call->modern));
	else
		rpc_send_error(
			w, call->id, code, err->msg, uri ? json_pack("{s:O}", "uri", uri) : NULL);
}

static json_t *record_of(struct call *call, const char *event)
{
	struct session *s = call->session;
	json_t *record = json_pack("{s:s, s:s, s:I, s:s}", "event", event, "session", s->id, "call",
		(json_int_t)call->number, "tool", call->tool->name);

	return record;
}

// Before it is done: what cannot be written down is not done.
static int audit_begin(struct call *call, struct err *err)
{
	struct session *s = call->session;
	json_t *record = record_of(call, "call");

	json_object_set_new(record, "client", json_string(call->client));
	json_object_set_new(record, "transport", json_string(s->config->transport));
	json_object_set_new(record, "level", json_string(config_access_name(call->level)));
	json_object_set_new(record, "arguments", redact_arguments(call->tool_call.arguments));
	return audit_append(s->config->machine->dir, record, 0, err);
}

static void add_excerpt(json_t *record, const json_t *result, const char *key)
{
	char encoding[32];
	const json_t *text = json_object_get(result, key);
	size_t len = MIN(json_string_length(text), (size_t)EXCERPT_BYTES);

	snprintf(encoding, sizeof(encoding), "%s_encoding", key);
	if (len && !strcmp(json_string_value(json_object_get(result, encoding)), "utf-8"))
		json_object_set_new(record, key, redact_text(json_string_value(text), len));
}

// What a terminal or a job has shown. The encoding is of one stream.
static void add_shown(json_t *record, const json_t *result)
{
	const json_t *text = json_object_get(result, "output");
	const char *encoding = json_string_value(json_object_get(result, "encoding"));

	if (json_string_length(text) && encoding && !strcmp(encoding, "utf-8"))
		json_object_set_new(record, "stdout",
			redact_text(json_string_value(text),
				MIN(json_string_length(text), (size_t)EXCERPT_BYTES)));
}

// The files that it has changed, as far as its arguments say so: what commands do is not known.
static void add_changes(json_t *record, const struct call *call)
{
	const char *at = call->tool->changes;
	json_t *files = json_array();

	while (at && *at) {
		size_t len = strcspn(at, " ");
		const json_t *path;
		char key[32];
		json_t *text;

		snprintf(key, sizeof(key), "%.*s", (int)len - 1, at + 1);
		path = json_object_get(call->tool_call.arguments, key);
		text = path ? redact_text(json_string_value(path),
				      MIN(json_string_length(path), (size_t)PATH_BYTES))
			    : NULL;
		if (text)
			json_array_append_new(
				files, json_sprintf("%c %s", *at, json_string_value(text)));
		json_decref(text);
		at += len + strspn(at + len, " ");
	}
	if (json_array_size(files))
		json_object_set(record, "files", files);
	json_decref(files);
}

static void audit_end(struct call *call, int rc, const struct err *err, size_t result_bytes)
{
	const struct tool_call *t = &call->tool_call;
	json_t *record = record_of(call, "result");
	const char *outcome = call->denied      ? "denied"
			      : call->cancelled ? "cancelled"
			      : rc < 0          ? "error"
						: "ok";
	struct err ignored;

	json_object_set_new(record, "outcome", json_string(outcome));
	if (rc < 0)
		json_object_set_new(record, "error", redact_text(err->msg, strlen(err->msg)));
	if (t->exit_code >= 0)
		json_object_set_new(record, "exit_code", json_integer(t->exit_code));
	json_object_set_new(record, "result_bytes", json_integer((json_int_t)result_bytes));
	json_object_set_new(record, "duration_ms",
		json_integer((json_int_t)((now_ns() - call->start_ns) / 1000000)));
	if (rc == 0 && t->exit_code >= 0) {
		add_excerpt(record, t->result, "stdout");
		add_excerpt(record, t->result, "stderr");
	} else if (rc == 0) {
		add_shown(record, t->result);
	}
	if (rc == 0 && call->tool->changes && !call->tool_call.asked_owner)
		add_changes(record, call);
	audit_append(call->session->config->machine->dir, record, 0, &ignored);
}

static void unlink_call(struct call *call)
{
	struct session *s = call->session;

	pthread_mutex_lock(&s->lock);
	for (struct call **at = &s->calls; *at; at = &(*at)->next) {
		if (*at != call)
			continue;
		*at = call->next;
		s->nr_calls--;
		break;
	}
	pthread_mutex_unlock(&s->lock);
}

static void call_free(struct call *call)
{
	json_decref(call->message);
	json_decref(call->tool_call.result);
	fd_close(&call->tool_call.cancel_fd);
	free(call);
}

static void *call_main(void *opaque)
{
	struct call *call = opaque;
	struct session *s = call->session;
	struct err err = {0};
	json_t *result;
	int rc;

	rc = audit_begin(call, &err);
	if (rc == 0)
		rc = call->tool->run(&call->tool_call, &err);
	unlink_call(call); // from here on nobody cancels it
	if (call->denied && rc < 0)
		rc = err_set(&err, -EPERM,
			"the owner has lowered the access level: '%s' is not granted any more",
			call->tool->name);
	if (rc == 0 && !call->tool_call.result)
		rc = err_set(&err, -ENOMEM, "there is no memory for the result");
	result = call->may_wait && call->tool_call.asked_owner && !call->denied
			 ? wait_result(call)
			 : result_of(call, rc, &err);
	// The audit stands before the client knows; on the disk it is soon after.
	audit_end(call, rc, &err,
		json_string_length(json_object_get(
			json_array_get(json_object_get(result, "content"), 0), "text")));
	if (call->cancelled || call->tool->is_method)
		json_decref(result);
	if (call->tool->is_method && !call->cancelled)
		send_method(call, rc, &err);
	else if (!call->cancelled)
		rpc_send_result(&s->writer, call->id, finish(result, call->modern));
	audit_sync(s->config->machine->dir, NULL);
	if (!call->tool->read_only && !call->tool->is_method)
		call_take_point(&call->tool_call);
	call_free(call);
	pthread_mutex_lock(&s->lock);
	s->nr_threads--;
	pthread_cond_signal(&s->ended);
	pthread_mutex_unlock(&s->lock);
	return NULL;
}

// --- Calls, in the session's thread ----------------------------------------------------------

static bool in_flight(struct session *s, const json_t *id)
{
	for (const struct call *call = s->calls; call; call = call->next)
		if (json_equal(call->id, id))
			return true;
	return false;
}

static int start_thread(struct call *call)
{
	pthread_attr_t attr;
	pthread_t thread;
	int r;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK_BYTES);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	r = pthread_create(&thread, &attr, call_main, call);
	pthread_attr_destroy(&attr);
	return -r;
}

// Whether its user can be shown a question, and has not been yet.
static bool can_ask(const struct rpc_message *m)
{
	const json_t *capabilities = json_object_get(
		json_object_get(m->params, "_meta"), META_PREFIX "clientCapabilities");
	const json_t *elicitation = json_object_get(capabilities, "elicitation");

	return json_is_object(elicitation) && !json_object_get(m->params, "requestState") &&
	       (json_object_size(elicitation) == 0 || json_object_get(elicitation, "form"));
}

// Takes message's root over. Returns a code of JSON-RPC with *err filled if the call cannot begin.
static int start_call(struct session *s, struct rpc_message *m, bool modern,
	const struct tool *tool, json_t *arguments, enum config_access level, struct err *err)
{
	struct call *call = calloc(1, sizeof(*call));
	json_t *token = json_object_get(json_object_get(m->params, "_meta"), "progressToken");
	int code = 0;

	if (!call)
		return err_errno(err, -ENOMEM, "call"), RPC_INTERNAL;
	call->session = s;
	call->message = json_incref(m->root);
	call->id = m->id;
	call->token = json_is_string(token) || json_is_integer(token) ? token : NULL;
	call->modern = modern;
	call->may_wait = modern && can_ask(m);
	call->tool = tool;
	call->level = level;
	call->start_ns = now_ns();
	call->tool_call = (struct tool_call){
		.machine = s->config->machine,
		.outputs = s->config->outputs,
		.client = call->client,
		.arguments = arguments,
		.cancel_fd = eventfd(0, EFD_CLOEXEC),
		.exit_code = -1,
	};
	pthread_mutex_lock(&s->lock);
	snprintf(call->client, sizeof(call->client), "%s", s->client);
	if (call->tool_call.cancel_fd < 0) {
		err_errno(err, -errno, "eventfd");
		code = RPC_INTERNAL;
	} else if (in_flight(s, m->id)) {
		err_set(err, -EEXIST, "id: that of a call that is under way");
		code = RPC_INVALID_REQUEST;
	} else if (s->nr_threads == SESSION_CALLS_MAX) {
		err_set(err, -EBUSY, "%d calls are under way: wait for one to end",
			SESSION_CALLS_MAX);
		code = RPC_BUSY;
	} else {
		call->number = s->next_number++;
		call->next = s->calls;
		s->calls = call;
		s->nr_calls++;
		s->nr_threads++;
		if (start_thread(call) < 0) {
			s->calls = call->next;
			s->nr_calls--;
			s->nr_threads--;
			err_set(err, -EAGAIN, "no thread for the call");
			code = RPC_BUSY;
		}
	}
	pthread_mutex_unlock(&s->lock);
	if (code)
		call_free(call);
	return code;
}

static void call_tool(struct session *s, struct rpc_message *m, bool modern)
{
	const char *name = json_string_value(json_object_get(m->params, "name"));
	json_t *arguments = json_object_get(m->params, "arguments"), *none = NULL;
	const json_t *schema = NULL;
	const struct tool *tool;
	enum config_access level;
	struct err err = {0};
	int code = 0;

	level = level_now(s, &err);
	tool = name ? tools_find(name, level, &schema) : NULL;
	if (!name) {
		err_set(&err, -EINVAL, "name: missing");
		code = RPC_INVALID_PARAMS;
	} else if (!tool) {
		if (!err.code)
			err_set(&err, -ENOENT, "there is no tool '%.128s' at the access level %s",
				name, config_access_name(level));
		code = RPC_INVALID_PARAMS;
	} else if (arguments && !json_is_object(arguments)) {
		err_set(&err, -EINVAL, "arguments: not an object");
		code = RPC_INVALID_PARAMS;
	}
	if (code == 0 && !arguments) {
		none = json_object();
		json_object_set_new(m->params, "arguments", none); // lives as long as the message
		arguments = none;
	}
	if (code == 0 && schema_check(schema, arguments, &err) < 0) {
		// For the model to read, and to do better.
		rpc_send_result(&s->writer, m->id,
			finish(json_pack("{s:[{s:s, s:o}], s:b}", "content", "type", "text", "text",
				       error_text(err.msg), "isError", 1),
				modern));
		return;
	}
	if (code == 0)
		code = start_call(s, m, modern, tool, arguments, level, &err);
	if (code)
		rpc_send_error(&s->writer, m->id, code, err.msg, NULL);
}

// resources/list and resources/read, whose only argument is key.
static void call_method(
	struct session *s, struct rpc_message *m, bool modern, const struct tool *method)
{
	const char *key = method == &resources_read ? "uri" : "cursor";
	json_t *value = json_object_get(m->params, key), *arguments = json_object();
	enum config_access level;
	struct err err = {0};
	int code = 0;

	level = level_now(s, &err);
	if (level < method->level) {
		err_set(&err, -ENOENT, "there are no resources at the access level %s",
			config_access_name(level));
		code = RPC_INVALID_PARAMS;
	} else if ((value || method == &resources_read) &&
		   (!json_is_string(value) || json_string_length(value) > RESOURCE_URI_BYTES)) {
		err_set(&err, -EINVAL, "%s: a string of up to %u bytes", key, RESOURCE_URI_BYTES);
		code = RPC_INVALID_PARAMS;
	}
	if (value)
		json_object_set(arguments, key, value);
	if (!m->params) {
		m->params = json_object();
		json_object_set_new(m->root, "params", m->params);
	}
	json_object_set_new(m->params, "arguments", arguments); // lives as long as the message
	if (code == 0)
		code = start_call(s, m, modern, method, arguments, level, &err);
	if (code)
		rpc_send_error(&s->writer, m->id, code, err.msg, NULL);
}

static void cancel_call(struct session *s, const struct rpc_message *m)
{
	const json_t *id = json_object_get(m->params, "requestId");

	pthread_mutex_lock(&s->lock);
	for (struct call *call = s->calls; call && id; call = call->next) {
		if (!json_equal(call->id, id))
			continue;
		call->cancelled = true;
		cancel(call);
	}
	pthread_mutex_unlock(&s->lock);
	for (unsigned int i = s->nr_listens; i-- > 0 && id;)
		if (json_equal(s->listens[i].id, id))
			end_listen(s, i);
}

// Progress of each call that asked for it: milliseconds, so that it grows.
static void send_progress(struct session *s)
{
	pthread_mutex_lock(&s->lock);
	for (const struct call *call = s->calls; call; call = call->next) {
		json_int_t ms = (json_int_t)((now_ns() - call->start_ns) / 1000000);
		unsigned long long moved = atomic_load(&call->tool_call.moved_bytes);

		if (call->token && ms >= PROGRESS_MS)
			rpc_send(&s->writer,
				json_pack("{s:s, s:s, s:{s:O, s:I, s:o}}", "jsonrpc", "2.0",
					"method", "notifications/progress", "params",
					"progressToken", call->token, "progress", ms, "message",
					json_sprintf("%s: %lld s, %llu bytes", call->tool->name,
						(long long)(ms / 1000), moved)));
	}
	pthread_mutex_unlock(&s->lock);
}

static bool wants_progress(struct session *s)
{
	bool wants = false;

	pthread_mutex_lock(&s->lock);
	for (const struct call *call = s->calls; call; call = call->next)
		wants |= call->token != NULL;
	pthread_mutex_unlock(&s->lock);
	return wants;
}

// --- Messages --------------------------------------------------------------------------------

// 0, or a code of JSON-RPC with *err filled.
static int subscribe(struct session *s, const json_t *uri, json_t *owner, struct err *err)
{
	int r;

	if (!json_is_string(uri) || json_string_length(uri) > RESOURCE_URI_BYTES)
		return err_set(err, -EINVAL, "uri: a string of up to %u bytes", RESOURCE_URI_BYTES),
		       RPC_INVALID_PARAMS;
	if (level_now(s, NULL) < CONFIG_ACCESS_OBSERVE)
		return err_set(err, -ENOENT, "there are no resources at the access level none"),
		       RPC_INVALID_PARAMS;
	if (!s->subscriptions)
		s->subscriptions = subscriptions_create(s->config->machine);
	r = s->subscriptions
		    ? subscriptions_add(s->subscriptions, json_string_value(uri), owner, err)
		    : err_errno(err, -ENOMEM, "subscription");
	return r == 0 ? 0 : r == -ENOENT ? RPC_NO_RESOURCE : r == -EBUSY ? RPC_BUSY : RPC_INTERNAL;
}

// resources/subscribe and resources/unsubscribe, which went with 2026-07-28.
static void change_subscription(struct session *s, const struct rpc_message *m, bool add)
{
	const json_t *uri = json_object_get(m->params, "uri");
	struct err err = {0};
	int code = 0;

	if (add) {
		code = subscribe(s, uri, NULL, &err);
	} else if (!json_is_string(uri)) {
		err_set(&err, -EINVAL, "uri: missing");
		code = RPC_INVALID_PARAMS;
	} else if (s->subscriptions) {
		subscriptions_remove(s->subscriptions, json_string_value(uri), NULL);
	}
	if (code)
		rpc_send_error(&s->writer, m->id, code, err.msg, NULL);
	else
		rpc_send_result(&s->writer, m->id, json_object());
}

// A stream of change notices: it lasts until it is cancelled, or the session ends. What it will
// tell of is said first.
static void listen(struct session *s, const struct rpc_message *m)
{
	const json_t *wanted = json_object_get(m->params, "notifications"), *uri;
	bool tools = json_is_true(json_object_get(wanted, "toolsListChanged"));
	json_t *granted = json_object(), *uris = json_array();
	struct err err = {0};
	size_t i;

	for (unsigned int k = s->nr_listens; k-- > 0;)
		if (json_equal(s->listens[k].id, m->id)) // who uses an id twice means it anew
			end_listen(s, k);
	if (!json_is_object(wanted) || s->nr_listens == LISTENS_MAX) {
		rpc_send_error(&s->writer, m->id,
			json_is_object(wanted) ? RPC_BUSY : RPC_INVALID_PARAMS,
			json_is_object(wanted) ? "there are 8 such streams: cancel one first"
					       : "notifications: missing",
			NULL);
		json_decref(granted);
		json_decref(uris);
		return;
	}
	s->listens[s->nr_listens++] = (struct listen){json_incref(m->id), tools};
	if (tools)
		json_object_set_new(granted, "toolsListChanged", json_true());
	json_array_foreach(json_object_get(wanted, "resourceSubscriptions"), i, uri)
	{
		if (i < SUBSCRIPTIONS_MAX && subscribe(s, uri, m->id, &err) == 0)
			json_array_append(uris, (json_t *)(uintptr_t)uri);
	}
	if (json_array_size(uris))
		json_object_set(granted, "resourceSubscriptions", uris);
	json_decref(uris);
	send_notice(s, "notifications/subscriptions/acknowledged", m->id,
		json_pack("{s:o}", "notifications", granted));
}

// Whether the request is of 2026-07-28, in *ret; or answers it, and returns false.
static bool era_of(struct session *s, const struct rpc_message *m, bool *ret)
{
	const json_t *meta = json_object_get(m->params, "_meta");
	json_t *version = json_object_get(meta, META_PREFIX "protocolVersion");

	*ret = version != NULL;
	if (!version)
		return true;
	if (!json_is_string(version) || strcmp(json_string_value(version), MODERN_VERSION) != 0) {
		rpc_send_error(&s->writer, m->id, RPC_UNSUPPORTED_VERSION,
			"this version of the protocol is not supported in _meta",
			json_pack(
				"{s:[s], s:O}", "supported", MODERN_VERSION, "requested", version));
		return false;
	}
	if (!json_is_object(json_object_get(meta, META_PREFIX "clientCapabilities"))) {
		rpc_send_error(&s->writer, m->id, RPC_INVALID_PARAMS,
			"_meta: " META_PREFIX "clientCapabilities is missing", NULL);
		return false;
	}
	take_client(s, json_object_get(meta, META_PREFIX "clientInfo"));
	return true;
}

static void on_request(struct session *s, struct rpc_message *m)
{
	bool modern;

	if (!era_of(s, m, &modern))
		return;
	if (!strcmp(m->method, "tools/call"))
		call_tool(s, m, modern);
	else if (!strcmp(m->method, "tools/list"))
		list_tools(s, m, modern);
	else if (!strcmp(m->method, "resources/list"))
		call_method(s, m, modern, &resources_list);
	else if (!strcmp(m->method, "resources/read"))
		call_method(s, m, modern, &resources_read);
	else if (!strcmp(m->method, "resources/templates/list"))
		rpc_send_result(&s->writer, m->id, cacheable(resources_templates(), modern));
	else if (!strcmp(m->method, "resources/subscribe") && !modern)
		change_subscription(s, m, true);
	else if (!strcmp(m->method, "resources/unsubscribe") && !modern)
		change_subscription(s, m, false);
	else if (!strcmp(m->method, "initialize") && !modern)
		initialize(s, m);
	else if (!strcmp(m->method, "ping") && !modern)
		rpc_send_result(&s->writer, m->id, json_object());
	else if (!strcmp(m->method, "server/discover") && modern)
		discover(s, m);
	else if (!strcmp(m->method, "subscriptions/listen") && modern)
		listen(s, m);
	else
		rpc_send_error(&s->writer, m->id, RPC_NO_METHOD, "there is no such method", NULL);
}

static void on_line(struct session *s, const char *line, size_t len)
{
	struct rpc_message m;
	struct err err = {0};
	int code = rpc_parse(line, len, &m, &err);

	if (code)
		rpc_send_error(&s->writer, m.id, code, err.msg, NULL);
	else if (m.kind == RPC_REQUEST)
		on_request(s, &m);
	else if (m.kind == RPC_NOTIFICATION && !strcmp(m.method, "notifications/cancelled"))
		cancel_call(s, &m);
	// Other notifications, and answers to what we never asked, are for nobody.
	rpc_message_fini(&m);
}

static void take_lines(struct session *s)
{
	const char *line;
	size_t len;
	int r;

	while ((r = rpc_next(&s->reader, &line, &len)) != 0 && !rpc_writer_failed(&s->writer)) {
		if (r > 0)
			on_line(s, line, len);
		else
			rpc_send_error(&s->writer, NULL, RPC_INVALID_REQUEST,
				"a message is longer than 4 MiB: write large files in pieces",
				NULL);
	}
}

// --- The session -----------------------------------------------------------------------------

static int start(struct session *s, const struct mcp_session *config, struct err *err)
{
	uint8_t random[8];

	*s = (struct session){
		.config = config, .watcher.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
	if (s->watcher.fd < 0 || getrandom(random, sizeof(random), 0) != sizeof(random)) {
		err_errno(err, -errno, "a session");
		fd_close(&s->watcher.fd);
		return err->code;
	}
	for (size_t i = 0; i < sizeof(random); i++)
		snprintf(s->id + 2 * i, 3, "%02x", random[i]);
	snprintf(s->client, sizeof(s->client), "unknown");
	rpc_reader_init(&s->reader, config->in_fd);
	rpc_writer_init(&s->writer, config->out_fd);
	s->writer.sink = config->sink;
	s->writer.sink_opaque = config->sink_opaque;
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->ended, NULL);
	level_watch_join(config->watch, &s->watcher);
	s->level = level_now(s, NULL);
	return 0;
}

// Nobody is there to be answered: all that runs ends.
static void end(struct session *s)
{
	pthread_mutex_lock(&s->lock);
	for (struct call *call = s->calls; call; call = call->next) {
		call->cancelled = true;
		cancel(call);
	}
	while (s->nr_threads)
		pthread_cond_wait(&s->ended, &s->lock);
	pthread_mutex_unlock(&s->lock);
	while (s->nr_listens)
		end_listen(s, s->nr_listens - 1);
	subscriptions_destroy(s->subscriptions);
	pthread_cond_destroy(&s->ended);
	pthread_mutex_destroy(&s->lock);
	rpc_writer_fini(&s->writer);
	rpc_reader_fini(&s->reader);
	level_watch_leave(s->config->watch, &s->watcher);
	fd_close(&s->watcher.fd);
}

int mcp_session_run(const struct mcp_session *config, struct err *err)
{
	struct session s;
	int r = start(&s, config, err);

	if (r < 0)
		return r;
	while (r == 0 && !rpc_writer_failed(&s.writer)) {
		struct pollfd p[5] = {{.fd = config->in_fd, .events = POLLIN},
			{.fd = s.watcher.fd, .events = POLLIN},
			{.fd = config->stop_fd, .events = POLLIN},
			{.fd = level_watch_fd(config->watch), .events = POLLIN},
			{.fd = s.subscriptions ? subscriptions_fd(s.subscriptions) : -1,
				.events = POLLIN}};
		int n = poll(p, ARRAY_SIZE(p), wants_progress(&s) ? PROGRESS_MS : -1);

		if (n < 0 && errno != EINTR)
			r = err_errno(err, -errno, "poll");
		if (n == 0)
			send_progress(&s);
		if (n <= 0)
			continue;
		if (p[2].revents)
			break;
		if (p[3].revents)
			level_watch_take(config->watch);
		if (p[1].revents)
			on_change(&s);
		if (p[4].revents)
			send_updates(&s);
		if (p[0].revents) {
			r = rpc_fill(&s.reader);
			take_lines(&s);
		}
	}
	if (r < 0 && r != -EPIPE && !err->code)
		err_errno(err, r, "from the client");
	if (rpc_writer_failed(&s.writer))
		r = err_set(err, -ETIMEDOUT, "the client does not read what it is sent");
	end(&s);
	return r == -EPIPE ? 0 : r;
}
