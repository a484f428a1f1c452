// SPDX-License-Identifier: Apache-2.0
// A whole session with a real agent behind it: both revisions, every tool, cancellation, levels
// that change while it runs, and what the audit says of it.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/approvals.h"
#include "mcp/audit.h"
#include "mcp/listen.h"
#include "mcp/rpc.h"
#include "mcp/schema.h"
#include "mcp/subscriptions.h"
#include "tests/support/fake_guest.h"
#include "tests/support/mcp_client.h"
#include "vmm/base/fd.h"
#include "vmm/base/unix_sock.h"

static char dir[] = "/tmp/mayfly-mcp-test-XXXXXX";
static struct mcp_client client;
static struct mcp_client *const c = &client;

static int sh(const char *script)
{
	char command[4096];

	snprintf(command, sizeof(command), "cd %s && { %s\n}", dir, script);
	return system(command);
}

// A path in the folder of this test, which guest and host share here.
static const char *at(const char *name)
{
	static char paths[16][256];
	static int which;

	which = (which + 1) % 16;
	snprintf(paths[which], sizeof(paths[0]), "%s/%s", dir, name);
	return paths[which];
}

static void set_level(const char *level)
{
	struct err err = {0};

	if (config_edit(at("vm.ini"), "mcp", "access", level, NULL, &err) < 0)
		fail_msg("%s", err.msg);
}

static int start(void **state)
{
	(void)state;
	set_level("exec");
	mcp_client_program(dir, "exit 0");
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	return 0;
}

static int stop(void **state)
{
	(void)state;
	if (mcp_client_stop(c) < 0)
		fail_msg("%s", c->err.msg);
	return 0;
}

// A tool's call with arguments as JSON, in which every @ is this test's folder.
static json_t *args(const char *format)
{
	char text[8192];
	size_t n = 0;
	json_t *json;

	for (; *format; format++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, *format == '@' ? "%s" : "%.1s",
			*format == '@' ? dir : format);
	assert_true(n < sizeof(text));
	json = json_loads(text, 0, NULL);
	if (!json)
		fail_msg("%s", text);
	return json;
}

static json_t *call(const char *tool, const char *arguments)
{
	return mcp_client_call(c, tool, args(arguments));
}

static void fails(const char *tool, const char *arguments, const char *words)
{
	char *text = mcp_client_fails(c, tool, args(arguments));

	if (!strstr(text, words))
		fail_msg("'%s' lacks '%s'", text, words);
	free(text);
}

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	if (!text)
		fail_msg("no %s", key);
	return text;
}

static json_int_t number_of(const json_t *object, const char *key)
{
	if (!json_is_integer(json_object_get(object, key)))
		fail_msg("no %s", key);
	return json_integer_value(json_object_get(object, key));
}

// Waits for what has no notice.
static void eventually(bool (*is)(void))
{
	const uint64_t deadline_ns = now_ns() + 60000000000ULL;

	while (!is()) {
		if (now_ns() > deadline_ns)
			fail_msg("it did not happen");
		poll(NULL, 0, 5);
	}
}

static bool pid_is_there(void)
{
	struct stat st;

	return stat(at("pid"), &st) == 0 && st.st_size > 0;
}

// Whoever inherits it may not have waited for it yet.
static bool process_is_gone(void)
{
	return sh("! grep -qE '^State:.[^ZX]' /proc/$(cat pid)/status 2>/dev/null") == 0;
}

#define SLEEPER \
	"{\"argv\":[\"sh\",\"-c\",\"sleep 1000 & echo $! >@/pid.new; mv @/pid.new @/pid; wait\"]}"

// --- The protocol ----------------------------------------------------------------------------

static void the_legacy_handshake(void **state)
{
	static const char *const versions[][2] = {{"2025-11-25", "2025-11-25"},
		{"2024-11-05", "2024-11-05"}, {"1999-01-01", "2025-11-25"}};
	json_t *answer, *result;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(versions); i++) {
		answer = mcp_client_ask(c, "initialize",
			json_pack("{s:s, s:{}, s:{s:s, s:s}}", "protocolVersion", versions[i][0],
				"capabilities", "clientInfo", "name", "te st", "version", "1"));
		result = json_object_get(answer, "result");
		assert_string_equal(text_of(result, "protocolVersion"), versions[i][1]);
		assert_string_equal(
			text_of(json_object_get(result, "serverInfo"), "name"), "mayfly");
		assert_null(json_object_get(result, "resultType"));
		json_decref(answer);
	}
	answer = mcp_client_ask(c, "ping", NULL);
	assert_int_equal(json_object_size(json_object_get(answer, "result")), 0);
	json_decref(answer);
	answer = mcp_client_ask(c, "initialize", NULL);
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_PARAMS);
	json_decref(answer);
	answer = mcp_client_ask(c, "prompts/list", NULL);
	assert_int_equal(mcp_client_code(answer), RPC_NO_METHOD);
	json_decref(answer);
	answer = mcp_client_ask(c, "server/discover", NULL);
	assert_int_equal(mcp_client_code(answer), RPC_NO_METHOD);
	json_decref(answer);
}

static void the_stateless_revision(void **state)
{
	json_t *answer, *result, *data;
	(void)state;

	c->modern = true;
	answer = mcp_client_ask(c, "server/discover", NULL);
	result = json_object_get(answer, "result");
	assert_string_equal(text_of(result, "resultType"), "complete");
	assert_string_equal(text_of(result, "cacheScope"), "private");
	assert_int_equal(number_of(result, "ttlMs"), 0);
	assert_string_equal(
		json_string_value(json_array_get(json_object_get(result, "supportedVersions"), 0)),
		"2026-07-28");
	assert_string_equal(text_of(json_object_get(json_object_get(result, "_meta"),
					    "io.modelcontextprotocol/serverInfo"),
				    "name"),
		"mayfly");
	json_decref(answer);
	answer = mcp_client_ask(c, "tools/list", NULL);
	result = json_object_get(answer, "result");
	assert_string_equal(text_of(result, "resultType"), "complete");
	assert_int_equal(number_of(result, "ttlMs"), 0);
	json_decref(answer);
	answer = mcp_client_ask(c, "tools/call",
		json_pack("{s:s, s:{s:[s]}}", "name", "exec", "arguments", "argv", "true"));
	assert_string_equal(text_of(json_object_get(answer, "result"), "resultType"), "complete");
	json_decref(answer);
	// What went with the handshake went.
	answer = mcp_client_ask(c, "ping", NULL);
	assert_int_equal(mcp_client_code(answer), RPC_NO_METHOD);
	json_decref(answer);

	c->modern = false;
	answer = mcp_client_ask(c, "tools/list",
		json_pack("{s:{s:s}}", "_meta", "io.modelcontextprotocol/protocolVersion",
			"2099-01-01"));
	assert_int_equal(mcp_client_code(answer), RPC_UNSUPPORTED_VERSION);
	data = json_object_get(json_object_get(answer, "error"), "data");
	assert_string_equal(
		json_string_value(json_array_get(json_object_get(data, "supported"), 0)),
		"2026-07-28");
	assert_string_equal(text_of(data, "requested"), "2099-01-01");
	json_decref(answer);
	answer = mcp_client_ask(c, "tools/list",
		json_pack("{s:{s:s}}", "_meta", "io.modelcontextprotocol/protocolVersion",
			"2026-07-28"));
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_PARAMS); // no capabilities
	json_decref(answer);
}

static void bad_messages_are_answered(void **state)
{
	static const struct {
		const char *text;
		int code;
	} bad[] = {
		{"{", RPC_PARSE_ERROR},
		{"nonsense", RPC_PARSE_ERROR},
		{"{\"a\":1,\"a\":2}", RPC_PARSE_ERROR},
		{"[]", RPC_INVALID_REQUEST},
		{"[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}]", RPC_INVALID_REQUEST},
		{"{}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"ping\"}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":1.5,\"method\":\"ping\"}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"ping\"}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":7}", RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":[]}",
			RPC_INVALID_REQUEST},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"pong\"}", RPC_NO_METHOD},
		{"{\"jsonrpc\":\"2.0\",\"id\":\"\\u0000\",\"method\":\"ping\"}", RPC_PARSE_ERROR},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\"}", RPC_INVALID_PARAMS},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":3}}",
			RPC_INVALID_PARAMS},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":"
		 "\"status\",\"arguments\":[]}}",
			RPC_INVALID_PARAMS},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/list\",\"params\":{\"cursor\":"
		 "\"x\"}}",
			RPC_INVALID_PARAMS},
	};
	static const char silent[] =
		"\n  \n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/none\"}\n"
		"{\"jsonrpc\":\"2.0\",\"id\":9,\"result\":{}}\n"
		"{\"jsonrpc\":\"2.0\",\"id\":9,\"error\":{}}\r\n";
	char *deep = malloc(100001), *huge = malloc(RPC_LINE_BYTES + 2);
	json_t *answer;
	(void)state;

	assert_true(deep && huge);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		mcp_client_raw(c, bad[i].text, strlen(bad[i].text));
		mcp_client_raw(c, "\n", 1);
		answer = mcp_client_receive(c);
		if (mcp_client_code(answer) != bad[i].code)
			fail_msg("%s: %d", bad[i].text, mcp_client_code(answer));
		json_decref(answer);
	}
	memset(deep, '[', 100000);
	deep[100000] = '\n';
	mcp_client_raw(c, deep, 100001);
	answer = mcp_client_receive(c);
	assert_int_equal(mcp_client_code(answer), RPC_PARSE_ERROR);
	json_decref(answer);
	// One that is too long is dropped, to its end and no further.
	memset(huge, 'x', RPC_LINE_BYTES + 1);
	huge[RPC_LINE_BYTES + 1] = '\n';
	mcp_client_raw(c, huge, RPC_LINE_BYTES + 2);
	answer = mcp_client_receive(c);
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_REQUEST);
	json_decref(answer);
	mcp_client_raw(c, silent, strlen(silent));
	answer = mcp_client_ask(c, "ping", NULL);
	assert_non_null(json_object_get(answer, "result"));
	json_decref(answer);
	free(deep);
	free(huge);
}

// --- Tools -----------------------------------------------------------------------------------

static void commands(void **state)
{
	json_t *r;
	(void)state;

	r = call("exec", "{\"argv\":[\"sh\",\"-c\",\"cat; echo $A-$PWD >&2; exit 3\"],\"stdin\":"
			 "\"in\",\"env\":{\"A\":\"b c\"},\"cwd\":\"/usr\"}");
	assert_int_equal(number_of(r, "exit_code"), 3);
	assert_string_equal(text_of(r, "stdout"), "in");
	assert_string_equal(text_of(r, "stderr"), "b c-/usr\n");
	assert_true(json_is_false(json_object_get(r, "truncated")));
	assert_null(json_object_get(r, "output"));
	json_decref(r);
	r = call("exec", "{\"argv\":[\"sh\",\"-c\",\"kill -9 $$\"]}");
	assert_int_equal(number_of(r, "exit_code"), 137);
	assert_int_equal(number_of(r, "signal"), 9);
	json_decref(r);
	r = call("exec", "{\"argv\":[\"sleep\",\"1000\"],\"timeout_seconds\":1}");
	assert_true(json_is_true(json_object_get(r, "timed_out")));
	json_decref(r);
	r = call("exec", "{\"argv\":[\"printf\",\"\\\\303\\\\050\"]}");
	assert_string_equal(text_of(r, "stdout_encoding"), "base64");
	assert_string_equal(text_of(r, "stdout"), "wyg=");
	json_decref(r);
	fails("exec", "{\"argv\":[\"no-such-program\"]}", "could not be started");
	fails("exec", "{\"argv\":[]}", "argv: at least 1 items");
	fails("exec", "{}", "argv: missing");
	fails("exec", "{\"argv\":\"ls\"}", "argv: not of type array");
	fails("exec", "{\"argv\":[\"ls\"],\"shell\":true}", "shell: there is no such argument");
	fails("exec", "{\"argv\":[\"ls\"],\"env\":{\"A=B\":\"\"}}", "no name of a variable");
	fails("exec", "{\"argv\":[\"ls\"],\"cwd\":\"tmp\"}", "whole path");
	fails("exec", "{\"argv\":[\"ls\",7]}", "argv[1]: not of type string");
}

// What the machine was refused meanwhile is told, whatever the command makes of it.
static void refused_requests_are_told(void **state)
{
	json_t *r, *denied;
	(void)state;

	assert_int_equal(sh("mkdir -p egress; echo '{\"decision\":\"denied\",\"host\":\"before\"}' "
			    ">egress/audit.jsonl"),
		0);
	r = call("exec",
		"{\"argv\":[\"sh\",\"-c\",\"cd @/egress; for h in a b a; do echo "
		"'{\\\"decision\\\":\\\"denied\\\",\\\"host\\\":\\\"'$h'\\\",\\\"port\\\":443,"
		"\\\"reason\\\":\\\"not on the list\\\"}' >>audit.jsonl; done; echo "
		"'{\\\"decision\\\":\\\"allowed\\\",\\\"host\\\":\\\"c\\\"}' >>audit.jsonl; echo x "
		">>audit.jsonl\"]}");
	denied = json_object_get(r, "denied");
	assert_int_equal(json_array_size(denied), 2);
	assert_string_equal(text_of(json_array_get(denied, 0), "host"), "a");
	assert_int_equal(number_of(json_array_get(denied, 0), "times"), 2);
	assert_int_equal(number_of(json_array_get(denied, 0), "port"), 443);
	assert_string_equal(text_of(json_array_get(denied, 1), "reason"), "not on the list");
	json_decref(r);
	// Another log in its place is read from its beginning.
	r = call("exec",
		"{\"argv\":[\"sh\",\"-c\",\"cd @/egress; mv audit.jsonl audit.jsonl.1; echo "
		"'{\\\"decision\\\":\\\"denied\\\",\\\"host\\\":\\\"d\\\"}' >audit.jsonl\"]}");
	assert_int_equal(json_array_size(json_object_get(r, "denied")), 1);
	json_decref(r);
	r = call("exec", "{\"argv\":[\"true\"]}");
	assert_null(json_object_get(r, "denied"));
	json_decref(r);
	// Written down too late for its own command: then the next one tells it.
	assert_int_equal(
		sh("echo '{\"decision\":\"denied\",\"host\":\"late\"}' >>egress/audit.jsonl"), 0);
	for (int i = 0; i < 2; i++) {
		r = call("exec", "{\"argv\":[\"true\"]}");
		assert_int_equal(json_array_size(json_object_get(r, "denied")), i == 0);
		json_decref(r);
	}
	assert_int_equal(sh("rm -r egress"), 0);
}

static void long_output_has_a_handle(void **state)
{
	char arguments[200];
	json_t *r, *more;
	char handle[64];
	(void)state;

	r = call("exec", "{\"argv\":[\"seq\",\"100000\"],\"max_output_bytes\":10}");
	assert_string_equal(text_of(r, "stdout"), "1\n2\n3\n4\n5\n");
	assert_int_equal(number_of(r, "stdout_bytes"), 588895);
	assert_true(json_is_true(json_object_get(r, "truncated")));
	snprintf(handle, sizeof(handle), "%s", text_of(r, "output"));
	json_decref(r);
	snprintf(arguments, sizeof(arguments), "{\"job\":\"%s\",\"offset\":10,\"max_bytes\":4}",
		handle);
	more = call("job_output", arguments);
	assert_string_equal(text_of(more, "output"), "6\n7\n");
	assert_int_equal(number_of(more, "next_offset"), 14);
	assert_int_equal(number_of(more, "total_bytes"), 588895);
	json_decref(more);
	snprintf(arguments, sizeof(arguments), "{\"job\":\"%s\",\"max_bytes\":7}", handle);
	more = call("job_output", arguments);
	assert_string_equal(text_of(more, "output"), "100000\n");
	json_decref(more);
	handle[6] = handle[6] == '0' ? '1' : '0';
	snprintf(arguments, sizeof(arguments), "{\"job\":\"%s\"}", handle);
	fails("job_output", arguments, "run the command again");
	// A character that is cut is left for the next piece.
	r = call("exec", "{\"argv\":[\"printf\",\"a\\u00e9\"],\"max_output_bytes\":2}");
	assert_string_equal(text_of(r, "stdout"), "a");
	json_decref(r);
}

static void files(void **state)
{
	json_t *r;
	(void)state;

	r = call("write_file", "{\"path\":\"@/f/g/one\",\"content\":\"a\\nb\\na\\n\"}");
	assert_int_equal(number_of(r, "size"), 6);
	json_decref(r);
	r = call("write_file", "{\"path\":\"@/f/run\",\"content\":\"/w==\",\"encoding\":\"base64\","
			       "\"mode\":\"0750\"}");
	json_decref(r);
	assert_int_equal(sh("[ $(stat -c %a f/run) = 750 ] && [ $(stat -c %s f/run) = 1 ]"), 0);
	r = call("read_file", "{\"path\":\"@/f/run\"}");
	assert_string_equal(text_of(r, "encoding"), "base64");
	assert_string_equal(text_of(r, "content"), "/w==");
	json_decref(r);
	r = call("read_file", "{\"path\":\"@/f/g/one\",\"offset\":2,\"limit\":2}");
	assert_string_equal(text_of(r, "content"), "b\n");
	assert_int_equal(number_of(r, "next_offset"), 4);
	assert_int_equal(number_of(r, "size"), 6);
	json_decref(r);
	fails("edit_file", "{\"path\":\"@/f/g/one\",\"old_text\":\"a\",\"new_text\":\"x\"}",
		"2 times");
	fails("edit_file", "{\"path\":\"@/f/g/one\",\"old_text\":\"q\",\"new_text\":\"x\"}",
		"is not in");
	r = call("edit_file", "{\"path\":\"@/f/g/one\",\"old_text\":\"a\",\"new_text\":\"xy\","
			      "\"replace_all\":true}");
	assert_int_equal(number_of(r, "replacements"), 2);
	json_decref(r);
	assert_int_equal(sh("[ \"$(tr '\\n' . <f/g/one)\" = xy.b.xy. ]"), 0);
	json_decref(call("mkdir", "{\"path\":\"@/f/d\"}"));
	assert_int_equal(
		sh("ln -s g f/a-link; printf 'needle here\\nNeedle: 7:there\\n' >f/hay.c"), 0);
	r = call("list_dir", "{\"path\":\"@/f\",\"limit\":2}");
	assert_int_equal(number_of(r, "total"), 5);
	assert_int_equal(json_array_size(json_object_get(r, "entries")), 2);
	json_decref(r);
	r = call("list_dir", "{\"path\":\"@/f\"}");
	assert_string_equal(
		text_of(json_array_get(json_object_get(r, "entries"), 0), "target"), "g");
	json_decref(r);
	r = call("stat", "{\"path\":\"@/f/a-link\",\"follow\":false}");
	assert_string_equal(text_of(r, "type"), "symlink");
	json_decref(r);
	r = call("search_files",
		"{\"path\":\"@/f\",\"pattern\":\"^need.e\",\"ignore_case\":true,\"name\":\"*.c\"}");
	assert_int_equal(json_array_size(json_object_get(r, "matches")), 2);
	assert_string_equal(text_of(json_array_get(json_object_get(r, "matches"), 1), "text"),
		"Needle: 7:there");
	json_decref(r);
	r = call("search_files", "{\"path\":\"@/f\",\"pattern\":\"e\",\"limit\":1}");
	assert_true(json_is_true(json_object_get(r, "truncated")));
	json_decref(r);
	r = call("search_files", "{\"path\":\"@/f\",\"name\":\"one\"}");
	assert_string_equal(
		text_of(json_array_get(json_object_get(r, "matches"), 0), "path"), at("f/g/one"));
	json_decref(r);
	r = call("search_files", "{\"path\":\"@/f\",\"pattern\":\"not there\"}");
	assert_int_equal(json_array_size(json_object_get(r, "matches")), 0);
	json_decref(r);
	fails("move", "{\"from\":\"@/f/hay.c\",\"to\":\"@/f/run\"}", "give replace");
	json_decref(call("move", "{\"from\":\"@/f/hay.c\",\"to\":\"@/f/run\",\"replace\":true}"));
	fails("remove", "{\"path\":\"@/f\"}", "give recursive");
	json_decref(call("remove", "{\"path\":\"@/f\",\"recursive\":true}"));
	fails("read_file", "{\"path\":\"@/f/run\"}", "No such file");
	fails("read_file", "{\"path\":\"@\"}", "list_dir");
	fails("list_dir", "{\"path\":\"@/vm.ini\"}", "no folder");
	fails("write_file", "{\"path\":\"@/x/..\",\"content\":\"\"}", "names no file");
	fails("write_file", "{\"path\":\"@/x\",\"content\":\"A\",\"encoding\":\"base64\"}",
		"base64");
	fails("write_file", "{\"path\":\"@/x\",\"content\":\"\",\"mode\":\"0999\"}", "octal");
	fails("search_files", "{\"path\":\"@\"}", "give a pattern");
}

static void jobs(void **state)
{
	json_t *r;
	(void)state;

	assert_int_equal(sh("rm -f go; mkfifo go"), 0);
	r = call("exec_background", "{\"job\":\"j1\",\"argv\":[\"sh\",\"-c\",\"echo one; read x "
				    "<@/go; echo two; exit 5\"]}");
	assert_string_equal(text_of(r, "job"), "j1");
	json_decref(r);
	r = call("job_output", "{\"job\":\"j1\",\"offset\":0,\"wait_seconds\":100}");
	assert_string_equal(text_of(r, "output"), "one\n");
	assert_int_equal(number_of(r, "next_offset"), 4);
	assert_true(json_is_true(json_object_get(r, "running")));
	json_decref(r);
	r = call("job_status", "{\"job\":\"j1\"}");
	assert_true(json_is_true(json_object_get(r, "running")));
	json_decref(r);
	assert_int_equal(sh("echo >go"), 0);
	r = call("job_status", "{\"job\":\"j1\",\"wait_seconds\":100}");
	assert_int_equal(number_of(r, "exit_code"), 5);
	json_decref(r);
	r = call("job_output", "{\"job\":\"j1\",\"offset\":4}");
	assert_string_equal(text_of(r, "output"), "two\n");
	json_decref(r);
	r = call("job_output", "{\"job\":\"j1\",\"max_bytes\":2}");
	assert_string_equal(text_of(r, "output"), "o\n");
	assert_int_equal(number_of(r, "offset"), 6);
	json_decref(r);
	r = call("job_kill", "{\"job\":\"j1\"}");
	assert_true(json_is_false(json_object_get(r, "was_running")));
	json_decref(r);
	r = call("exec_background", "{\"job\":\"j2\",\"argv\":[\"sleep\",\"1000\"]}");
	json_decref(r);
	fails("exec_background", "{\"job\":\"j2\",\"argv\":[\"true\"]}", "already");
	r = call("job_kill", "{\"job\":\"j2\"}");
	assert_true(json_is_true(json_object_get(r, "was_running")));
	json_decref(r);
	r = call("job_status", "{\"job\":\"j2\",\"wait_seconds\":100}");
	assert_int_equal(number_of(r, "signal"), 9);
	json_decref(r);
	r = call("jobs", "{}");
	assert_int_equal(json_array_size(json_object_get(r, "jobs")), 2);
	json_decref(r);
	fails("job_status", "{\"job\":\"j3\"}", "the tool jobs lists them");
	fails("exec_background", "{\"argv\":[\"no-such-program\"]}", "could not be started");
}

static void the_machine(void **state)
{
	json_t *r, *p, *all;
	bool found = false;
	size_t i;
	(void)state;

	r = call("status", "{}");
	assert_string_equal(text_of(r, "machine"), "box");
	assert_string_equal(text_of(r, "state"), "stopped"); // no monitor is behind this guest
	assert_string_equal(text_of(r, "access"), "exec");
	json_decref(r);
	r = call("ports", "{}");
	assert_true(json_is_array(json_object_get(r, "listening")));
	json_decref(r);
	r = call("processes", "{}");
	all = json_object_get(r, "processes");
	json_array_foreach(all, i, p) found |= number_of(p, "pid") == getpid() &&
					       number_of(p, "ppid") == getppid() &&
					       strstr(text_of(p, "args"), "mcp_session_test");
	assert_true(found || json_is_true(json_object_get(r, "truncated")));
	json_decref(r);
	assert_int_equal(
		sh("printf 'old\\n' >console.log.1; printf 'ne\\033w\\n' >console.log"), 0);
	r = call("logs", "{}");
	assert_string_equal(text_of(r, "console"), "old\nne?w\n");
	json_decref(r);
	r = call("logs", "{\"max_bytes\":3}");
	assert_string_equal(text_of(r, "console"), "?w\n");
	json_decref(r);
	fails("install_packages", "{\"packages\":[\"a;b\"]}", "no package's name");
	fails("install_packages", "{\"packages\":[\"-y\"]}", "no package's name");
}

#define SNAPSHOT_JSON                                                                         \
	"{\"id\": \"abc\", \"tag\": \"t\", \"created_s\": 5, \"written_bytes\": 6, \"dir\": " \
	"\"/\"}"

static void the_owners_verbs(void **state)
{
	json_t *r;
	(void)state;

	mcp_client_program(dir,
		"case $1 in snapshots) echo '[" SNAPSHOT_JSON "]' ;; snapshot) echo '" SNAPSHOT_JSON
		"' ;; ps) echo '[]' ;; esac");
	assert_int_equal(sh("rm -f verbs"), 0);
	r = call("snapshot", "{\"tag\":\"t\"}");
	assert_string_equal(text_of(r, "id"), "abc");
	assert_null(json_object_get(r, "dir")); // nothing of the host's
	json_decref(r);
	json_decref(call("snapshots", "{}"));
	json_decref(call("restore", "{\"tag\":\"t\"}"));
	r = call("fork", "{\"name\":\"two\"}");
	assert_string_equal(text_of(r, "machine"), "box-two");
	json_decref(r);
	json_decref(call("fork", "{\"name\":\"three\",\"tag\":\"t\"}"));
	json_decref(call("set_access", "{\"level\":\"manage\"}"));
	assert_int_equal(sh("cat >want <<'E'\n"
			    "snapshots --json -- list box\n"
			    "snapshot --json -- box t\n"
			    "snapshots --json -- list box\n"
			    "restore -- box box@t\n"
			    "ps --json\n"
			    "fork -- box box-two\n"
			    "ps --json\n"
			    "fork -- box@t box-three\n"
			    "access --lower -- box manage\n"
			    "E\n"
			    "cmp verbs want"),
		0);
	// No other machine's, and no options.
	fails("snapshot", "{\"tag\":\"other@t\"}", "no tag");
	fails("snapshot", "{\"tag\":\"-t\"}", "no tag");
	fails("snapshot", "{\"tag\":\"suspended\"}", "another tag");
	fails("restore", "{\"tag\":\"0123456789abcdef@x\"}", "no tag");
	fails("restore", "{\"tag\":\"../x\"}", "no tag");
	fails("fork", "{\"name\":\"a/b\"}", "no tag");
	fails("fork", "{\"name\":\"a\",\"tag\":\"b@c\"}", "no tag");
	mcp_client_program(dir, "echo 'mayfly: it went wrong' >&2; exit 125");
	fails("restore", "{\"tag\":\"t\"}", "mayfly: it went wrong");
	fails("snapshot", "{\"tag\":\"t\"}", "it went wrong");
	mcp_client_program(dir, "exec yes");
	fails("snapshots", "{}", "said too much");
}

// Runs a pty tool with the terminal's name, and further arguments: ",…".
static json_t *pty(const char *tool, const char *name, const char *more)
{
	char text[600];

	snprintf(text, sizeof(text), "{\"pty\":\"%s\"%s}", name, more);
	return call(tool, text);
}

static void terminals(void **state)
{
	json_t *result = call("pty_open", "{\"argv\":[\"sh\"],\"env\":{\"PS1\":\"ready> \"}}");
	char name[64], more[200];
	json_int_t next;
	(void)state;

	snprintf(name, sizeof(name), "%s", text_of(result, "pty"));
	assert_int_equal(strlen(name), 36);
	json_decref(result);
	result = pty("pty_read", name, ",\"until\":\"ready> \",\"timeout_seconds\":60");
	assert_true(json_is_true(json_object_get(result, "found")));
	json_decref(result);
	// The answer is not what was typed: it is found as the shell has made it.
	result = pty("pty_write", name,
		",\"data\":\"printf '\\\\033[31mr%s\\\\033[m\\\\n' "
		"ed\",\"enter\":true,\"until\":\"red\","
		"\"timeout_seconds\":60");
	assert_true(json_is_true(json_object_get(result, "found")));
	assert_non_null(strstr(text_of(result, "output"), "\nred"));
	assert_null(strchr(text_of(result, "output"), 033));
	next = number_of(result, "next_offset");
	json_decref(result);
	result = pty("pty_read", name, ",\"quiet_ms\":100,\"raw\":true");
	assert_non_null(strstr(text_of(result, "output"), "\033[31mred\033[m"));
	assert_null(json_object_get(result, "found"));
	json_decref(result);
	// From where the other one had ended.
	snprintf(more, sizeof(more), ",\"offset\":%lld", (long long)next);
	result = pty("pty_read", name, more);
	assert_null(strstr(text_of(result, "output"), "red"));
	assert_true(number_of(result, "next_offset") >= next);
	json_decref(result);
	json_decref(pty("pty_resize", name, ",\"rows\":33,\"columns\":77"));
	result = pty("pty_write", name,
		",\"data\":\"stty size\",\"enter\":true,\"until\":\"33 "
		"77\",\"timeout_seconds\":60");
	assert_true(json_is_true(json_object_get(result, "found")));
	json_decref(result);
	// Until the program ends, whatever is waited for.
	result = pty("pty_write", name,
		",\"data\":\"exit\",\"enter\":true,\"until\":\"never\",\"timeout_seconds\":600");
	assert_false(json_is_true(json_object_get(result, "running")));
	assert_false(json_is_true(json_object_get(result, "found")));
	json_decref(result);
	json_decref(pty("pty_close", name, ""));

	result = call("pty_open", "{\"argv\":[\"sh\",\"-c\",\"sleep 1000 & echo $! >@/pid.new; mv "
				  "@/pid.new @/pid; wait\"]}");
	snprintf(name, sizeof(name), "%s", text_of(result, "pty"));
	json_decref(result);
	eventually(pid_is_there);
	json_decref(pty("pty_close", name, ""));
	eventually(process_is_gone);
	unlink(at("pid"));
	fails("pty_read", "{\"pty\":\"pty-0\"}", "pty_open makes a new one");
	fails("pty_read", "{\"pty\":\"told\"}", "is no terminal");
	fails("pty_open", "{\"argv\":[\"/no/such\"]}", "could not be started");
}

// The owner decides in a process, and with a command, of their own.
static void the_owner_is_asked(void **state)
{
	const struct approvals owner = {.dir = c->machine.approvals_dir,
		.machine = c->machine.name,
		.machine_dir = c->machine.dir};
	json_t *result = call("publish_port", "{\"port\":81,\"host_port\":8081}"), *request = NULL;
	char id[APPROVAL_ID_BYTES];
	struct err err = {0};
	json_int_t number;
	(void)state;

	assert_string_equal(text_of(result, "state"), "pending");
	assert_null(json_object_get(result, "address"));
	snprintf(id, sizeof(id), "%s", text_of(result, "approval"));
	json_decref(result);
	number = mcp_client_send_call(
		c, "publish_port", args("{\"port\":81,\"host_port\":8081,\"wait_seconds\":600}"));
	if (approvals_decide(&owner, id, true, NULL, &request, &err) < 0)
		fail_msg("%s", err.msg);
	json_decref(request);
	result = mcp_client_receive(c);
	assert_int_equal(number_of(result, "id"), number);
	request = json_object_get(json_object_get(result, "result"), "structuredContent");
	assert_string_equal(text_of(request, "state"), "allowed");
	assert_string_equal(text_of(request, "address"), "127.0.0.1:8081");
	json_decref(result);
	result = call("publish_port", "{\"port\":81,\"host_port\":8081}");
	assert_string_equal(text_of(result, "state"), "pending");
	json_decref(result);
	if (approvals_decide(&owner, id, false, NULL, &request, &err) < 0)
		fail_msg("%s", err.msg);
	json_decref(request);
	result = call("publish_port", "{\"port\":81,\"host_port\":8081,\"wait_seconds\":600}");
	assert_string_equal(text_of(result, "state"), "denied");
	json_decref(result);
	fails("publish_port", "{\"port\":81,\"host_port\":80}", "host_port");
}

static void decide(const char *action, bool allow)
{
	const struct approvals owner = {.dir = c->machine.approvals_dir,
		.machine = c->machine.name,
		.machine_dir = c->machine.dir};
	json_t *all = NULL, *request;
	struct err err = {0};
	size_t i;

	if (approvals_list(&owner, &all, &err) < 0)
		fail_msg("%s", err.msg);
	json_array_foreach(all, i, request)
	{
		json_t *decided = NULL;

		if (strcmp(text_of(request, "state"), "pending") != 0)
			continue;
		assert_string_equal(text_of(request, "action"), action);
		if (approvals_decide(&owner, text_of(request, "id"), allow, NULL, &decided, &err) <
			0)
			fail_msg("%s", err.msg);
		json_decref(decided);
		json_decref(all);
		return;
	}
	fail_msg("nobody asks for %s", action);
}

static void has_state(const char *tool, const char *arguments, const char *state)
{
	json_t *r = call(tool, arguments);

	if (strcmp(text_of(r, "state"), state) != 0)
		fail_msg("%s %s: %s", tool, arguments, text_of(r, "state"));
	json_decref(r);
}

// The fake mayfly does not change vm.ini; what it was told to do is in verbs.
static void the_network_only_narrows(void **state)
{
	json_t *r;
	(void)state;

	mcp_client_program(dir, "exit 0");
	assert_int_equal(
		sh("cp vm.ini good; printf '\\n[net]\\nmode = allowlist\\nallow = a.example "
		   "*.b.example:443\\n' >>vm.ini; rm -f verbs"),
		0);
	r = call("set_network", "{\"reach\":[\"A.example:80\",\"x.b.example:443\"]}");
	assert_string_equal(text_of(r, "state"), "set");
	assert_int_equal(json_array_size(json_object_get(r, "reach")), 2); // as vm.ini has it
	json_decref(r);
	has_state("set_network", "{\"reach\":[]}", "set");
	// More is the owner's to give, and exactly that, once.
	has_state("set_network", "{\"reach\":[\"a.example\",\"c.example\"]}", "pending");
	has_state("set_network", "{\"reach\":[\"a.example:22\"]}", "pending");
	assert_int_equal(sh("cat >want <<'E'\n"
			    "net --tighten --keep a.example:80 x.b.example:443 -- box off\n"
			    "net --tighten -- box off\n"
			    "E\n"
			    "cmp verbs want && rm -f approvals/* verbs"),
		0);
	has_state("set_network", "{\"reach\":[\"c.example\"]}", "pending");
	decide("set_network", true);
	has_state("set_network", "{\"reach\":[\"c.example:22\"]}", "pending");
	has_state("set_network", "{\"reach\":[\"c.example\"]}", "set");
	has_state("set_network", "{\"reach\":[\"c.example\"]}", "pending");
	assert_int_equal(sh("echo 'net --keep c.example -- box off' | cmp verbs -"), 0);
	fails("set_network", "{\"reach\":[\"a b\"]}", "reach");
	assert_int_equal(sh("rm -f approvals/*; sed -i 's/^mode = .*/mode = passt/' vm.ini"), 0);
	fails("set_network", "{\"reach\":[]}", "network card");
	assert_int_equal(sh("mv good vm.ini"), 0);
}

// publish_port, as a retry or not. The result, fresh.
static json_t *ask_for_port(bool again)
{
	json_t *params = json_pack("{s:s, s:{s:i, s:i}}", "name", "publish_port", "arguments",
		"port", 82, "host_port", 8082);
	json_t *answer, *result;

	if (again) {
		json_object_set_new(params, "requestState", json_string("asked"));
		json_object_set_new(params, "inputResponses",
			json_pack("{s:{s:s, s:{}}}", "owner", "action", "accept", "content"));
	}
	answer = mcp_client_ask(c, "tools/call", params);
	result = json_incref(json_object_get(answer, "result"));
	json_decref(answer);
	return result;
}

// What the client's user answers is nothing to the owner's word.
static void a_client_is_told_to_wait(void **state)
{
	json_t *result;
	(void)state;

	assert_int_equal(sh("rm -f approvals/*"), 0);
	c->modern = true;
	result = ask_for_port(false); // it could not ask
	assert_string_equal(text_of(result, "resultType"), "complete");
	json_decref(result);
	c->elicits = true;
	result = ask_for_port(false);
	assert_string_equal(text_of(result, "resultType"), "input_required");
	assert_null(json_object_get(result, "content"));
	assert_string_equal(text_of(result, "requestState"), "asked");
	assert_non_null(strstr(
		text_of(json_object_get(
				json_object_get(json_object_get(result, "inputRequests"), "owner"),
				"params"),
			"message"),
		"mayfly approvals box"));
	json_decref(result);
	result = ask_for_port(true); // accepted, by whom it may be
	assert_string_equal(text_of(result, "resultType"), "complete");
	assert_string_equal(
		text_of(json_object_get(result, "structuredContent"), "state"), "pending");
	json_decref(result);
	decide("publish_port", true);
	result = ask_for_port(true);
	assert_string_equal(
		text_of(json_object_get(result, "structuredContent"), "state"), "allowed");
	json_decref(result);
	assert_int_equal(sh("rm -f approvals/*"), 0);
}

static void folders_of_the_host(void **state)
{
	(void)state;

	// The machine's own folders are the host's here: see the paths.
	assert_int_equal(
		sh("mkdir -p host/in/sub host/out vm; echo 1 >host/in/one; echo 2 >host/in/sub/two;"
		   "ln -s /etc host/in/etc; ln -s ../../secret host/in/up; ln -s one host/in/link;"
		   "echo 3 >secret; echo 4 >host/other; cp vm.ini good;"
		   "sed -i \"s|^folders.*|folders = $PWD/host/in/ , $PWD/host/out:rw|\" vm.ini"),
		0);
	has_state("upload", "{\"from\":\"@/host/in/one\",\"to\":\"@/vm/a/one\"}", "copied");
	has_state("upload", "{\"from\":\"@/host/in/link\",\"to\":\"@/vm/a/link\"}", "copied");
	has_state("upload", "{\"from\":\"@/host/in/sub\",\"to\":\"@/vm/sub\"}", "copied");
	assert_int_equal(sh("[ $(cat vm/a/one vm/a/link vm/sub/two | tr -d '\\n') = 112 ] && "
			    "[ ! -h vm/a/link ]"),
		0);
	// Links do not lead out.
	fails("upload", "{\"from\":\"@/host/in/etc/passwd\",\"to\":\"@/vm/x\"}", "host");
	fails("upload", "{\"from\":\"@/host/in/up\",\"to\":\"@/vm/x\"}", "host");
	fails("upload", "{\"from\":\"@/host/in/../other\",\"to\":\"@/vm/x\"}", "'..'");
	fails("upload", "{\"from\":\"host/in/one\",\"to\":\"@/vm/x\"}", "whole path");
	has_state("download", "{\"from\":\"@/vm/sub\",\"to\":\"@/host/out/sub\"}", "copied");
	assert_int_equal(sh("cmp vm/sub/two host/out/sub/two"), 0);
	// Nothing that another program of the host might follow.
	assert_int_equal(sh("ln -s /etc/passwd vm/sub/link; mkfifo vm/fifo"), 0);
	fails("download", "{\"from\":\"@/vm/sub\",\"to\":\"@/host/out/sub\"}", "'link'");
	fails("download", "{\"from\":\"@/vm/fifo\",\"to\":\"@/host/out/fifo\"}", "");
	assert_int_equal(sh("[ ! -h host/out/sub/link ] && [ ! -e host/out/fifo ]"), 0);
	fails("download", "{\"from\":\"@/vm/a/one\",\"to\":\"@/host/in/x\"}", "no folder");
	fails("download", "{\"from\":\"@/vm/a/one\",\"to\":\"@/host/outer\"}", "no folder");
	fails("download", "{\"from\":\"@/vm/a/one\",\"to\":\"@/host/out/../x\"}", "'..'");
	fails("download", "{\"from\":\"@/vm/a/one\",\"to\":\"@/host/out/\"}", "name the file");
	assert_int_equal(sh("ln -s ../in host/out/in"), 0);
	fails("download", "{\"from\":\"@/vm/a/one\",\"to\":\"@/host/out/in/x\"}", "host");
	assert_int_equal(sh("[ ! -e host/in/x ]"), 0);
	// Elsewhere: asked for, that file, once. There is no telling whether there is one.
	has_state("upload", "{\"from\":\"@/none\",\"to\":\"@/vm/x\"}", "pending");
	decide("upload", true);
	fails("upload", "{\"from\":\"@/none\",\"to\":\"@/vm/x\"}", "No such file");
	has_state("upload", "{\"from\":\"@/secret\",\"to\":\"@/vm/x\"}", "pending");
	decide("upload", true);
	assert_int_equal(sh("echo 5 >secret.new; mv secret.new secret; [ ! -e vm/x ]"), 0);
	has_state("upload", "{\"from\":\"@/secret\",\"to\":\"@/vm/x\"}", "pending");
	decide("upload", true);
	has_state("upload", "{\"from\":\"@/secret\",\"to\":\"@/vm/y\"}", "pending");
	has_state("upload", "{\"from\":\"@/secret\",\"to\":\"@/vm/x\"}", "copied");
	has_state("upload", "{\"from\":\"@/secret\",\"to\":\"@/vm/x\"}", "pending");
	assert_int_equal(sh("[ $(cat vm/x) = 5 ] && [ ! -e vm/y ]"), 0);
	assert_int_equal(sh("rm -rf host vm secret approvals/*; mv good vm.ini"), 0);
}

static void services(void **state)
{
	json_t *r = call("services", "{}");
	(void)state;

	assert_true(json_is_array(json_object_get(r, "services")));
	assert_non_null(strstr("systemd openrc sysv none", text_of(r, "manager")));
	json_decref(r);
	r = call("service", "{\"service\":\"mayfly-none\",\"action\":\"start\"}");
	assert_true(number_of(r, "exit_code") > 0);
	assert_true(number_of(r, "stdout_bytes") + number_of(r, "stderr_bytes") > 0); // it says why
	json_decref(r);
	fails("service", "{\"service\":\"--root=/\",\"action\":\"start\"}", "no service's name");
	fails("service", "{\"service\":\"../x\",\"action\":\"start\"}", "no service's name");
	fails("service", "{\"service\":\"a;b\",\"action\":\"start\"}", "no service's name");
	fails("service", "{\"service\":\"a\",\"action\":\"mask\"}", "action");
}

static void say_hello(const char *client_name)
{
	json_decref(mcp_client_ask(c, "initialize",
		json_pack("{s:s, s:{}, s:{s:s, s:s}}", "protocolVersion", "2025-11-25",
			"capabilities", "clientInfo", "name", client_name, "version", "1")));
}

// Another client's work is not one's own to throw away.
static void a_restore_over_the_work_of_others(void **state)
{
	const struct approvals owner = {.dir = c->machine.approvals_dir,
		.machine = c->machine.name,
		.machine_dir = c->machine.dir};
	json_t *all = NULL, *request = NULL, *last;
	struct err err = {0};
	(void)state;

	mcp_client_program(dir,
		"case \"$1\" in snapshots) echo '[]' ;; snapshot) echo '{\"id\":\"i\",\"tag\":"
		"\"t\",\"created_s\":1,\"written_bytes\":1}' ;; esac");
	say_hello("one");
	assert_int_equal(sh("rm -f audit.jsonl* approvals/*"), 0);
	json_decref(call("write_file", "{\"path\":\"@/mine\",\"content\":\"\"}"));
	json_decref(call("restore", "{\"tag\":\"t\"}")); // over one's own
	assert_int_equal(mcp_client_stop(c), 0);
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	say_hello("one");
	json_decref(call("restore", "{\"tag\":\"t\"}")); // in another session
	json_decref(call("write_file", "{\"path\":\"@/theirs\",\"content\":\"\"}"));
	assert_int_equal(mcp_client_stop(c), 0);
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	say_hello("two");
	fails("restore", "{\"tag\":\"t\"}", "The owner has been asked");
	if (approvals_list(&owner, &all, &err) < 0)
		fail_msg("%s", err.msg);
	last = json_array_get(all, json_array_size(all) - 1);
	assert_string_equal(text_of(last, "action"), "restore");
	if (approvals_decide(&owner, text_of(last, "id"), true, NULL, &request, &err) < 0)
		fail_msg("%s", err.msg);
	json_decref(request);
	json_decref(all);
	json_decref(call("restore", "{\"tag\":\"t\"}"));
	json_decref(call("restore", "{\"tag\":\"t\"}")); // nothing of others is left
	// Once it is kept, it is no longer in the way.
	json_decref(call("write_file", "{\"path\":\"@/theirs\",\"content\":\"\"}"));
	assert_int_equal(mcp_client_stop(c), 0);
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	say_hello("one");
	json_decref(call("read_file", "{\"path\":\"@/theirs\"}"));
	fails("restore", "{\"tag\":\"u\"}", "The owner has been asked");
	json_decref(call("snapshot", "{\"tag\":\"t\"}"));
	json_decref(call("restore", "{\"tag\":\"u\"}"));
}

static json_t *ask_result(const char *method, const char *params)
{
	json_t *answer = mcp_client_ask(c, method, args(params));
	json_t *result = json_incref(json_object_get(answer, "result"));

	if (!result)
		fail_msg("%s %s: %s", method, params,
			text_of(json_object_get(answer, "error"), "message"));
	json_decref(answer);
	return result;
}

// The first content's member of that name.
static void reads(const char *uri, const char *key, const char *text)
{
	char params[600];
	json_t *result, *content;

	snprintf(params, sizeof(params), "{\"uri\":\"%s\"}", uri); // @ becomes the folder
	result = ask_result("resources/read", params);
	content = json_array_get(json_object_get(result, "contents"), 0);
	assert_string_equal(text_of(content, key), text);
	json_decref(result);
}

static void reads_not(const char *params, int code)
{
	json_t *answer = mcp_client_ask(c, "resources/read", args(params));

	if (mcp_client_code(answer) != code)
		fail_msg("%s: %d", params, mcp_client_code(answer));
	json_decref(answer);
}

static void resources(void **state)
{
	json_t *result;
	size_t seen = 0;
	char *cursor = NULL;
	(void)state;

	assert_int_equal(sh("rm -f console.log.1; echo booted >console.log; printf '\\377' "
			    ">binary; echo hi >'a b'; "
			    "head -c 1048577 /dev/zero >big"),
		0);
	reads("mayfly://console", "text", "booted\n");
	reads("mayfly://files@/a%20b", "text", "hi\n");
	reads("mayfly://files@/binary", "blob", "/w==");
	json_decref(call("exec_background", "{\"argv\":[\"echo\",\"done\"],\"job\":\"told\"}"));
	json_decref(call("job_status", "{\"job\":\"told\",\"wait_seconds\":60}"));
	reads("mayfly://jobs/told/stdout", "text", "done\n");
	reads("mayfly://jobs/told/stderr", "text", "");
	reads_not("{\"uri\":\"mayfly://files@/none\"}", RPC_NO_RESOURCE);
	reads_not("{\"uri\":\"mayfly://files@/big\"}", RPC_INTERNAL);
	reads_not("{\"uri\":\"mayfly://jobs/told/stdin\"}", RPC_NO_RESOURCE);
	reads_not("{\"uri\":\"mayfly://files/%zz\"}", RPC_NO_RESOURCE);
	reads_not("{\"uri\":\"mayfly://files/a%00b\"}", RPC_NO_RESOURCE);
	reads_not("{\"uri\":\"file:///etc/passwd\"}", RPC_NO_RESOURCE);
	reads_not("{\"uri\":7}", RPC_INVALID_PARAMS);
	reads_not("{}", RPC_INVALID_PARAMS);
	result = ask_result("resources/templates/list", "{}");
	assert_int_equal(json_array_size(json_object_get(result, "resourceTemplates")), 2);
	json_decref(result);

	// Several pages: with this there are the console and two streams of 41 jobs.
	for (int i = 0; i < 40; i++)
		json_decref(call("exec_background", "{\"argv\":[\"true\"]}"));
	do {
		char params[60];
		size_t n;

		snprintf(params, sizeof(params), "{\"cursor\":\"%s\"}", cursor ? cursor : "0");
		free(cursor);
		cursor = NULL;
		result = ask_result("resources/list", params);
		n = json_array_size(json_object_get(result, "resources"));
		assert_true(n >= 1 && n <= 50);
		seen += n;
		if (json_object_get(result, "nextCursor"))
			cursor = strdup(text_of(result, "nextCursor"));
		json_decref(result);
	} while (cursor);
	assert_true(seen >= 83);
	c->modern = true;
	reads_not("{\"uri\":\"mayfly://files@/none\"}", RPC_INVALID_PARAMS);
	result = ask_result("resources/list", "{}");
	assert_string_equal(text_of(result, "cacheScope"), "private");
	json_decref(result);
	c->modern = false;
	result = mcp_client_ask(c, "resources/list", args("{\"cursor\":\"x\"}"));
	assert_int_equal(mcp_client_code(result), RPC_INVALID_PARAMS);
	json_decref(result);
	set_level("none");
	reads_not("{\"uri\":\"mayfly://console\"}", RPC_INVALID_PARAMS);
}

static int request_code(const char *method, const char *params)
{
	json_t *answer = mcp_client_ask(c, method, args(params));
	int code = mcp_client_code(answer);

	json_decref(answer);
	return code;
}

// Receives until that is told, with the id of its stream (0: none). What comes is of that alone.
static void is_told(const char *uri_format, json_int_t id)
{
	json_t *message = mcp_client_receive(c), *params = json_object_get(message, "params");
	json_t *wanted = args(uri_format);

	assert_string_equal(text_of(message, "method"), "notifications/resources/updated");
	assert_string_equal(text_of(params, "uri"), json_string_value(json_array_get(wanted, 0)));
	if (id)
		assert_int_equal(number_of(json_object_get(params, "_meta"),
					 "io.modelcontextprotocol/subscriptionId"),
			id);
	else
		assert_null(json_object_get(params, "_meta"));
	json_decref(wanted);
	json_decref(message);
}

// What the script does happens over and over, until stop_changes(): when a watch begins is not
// told.
static void change_over_and_over(const char *script)
{
	char text[600];

	snprintf(text, sizeof(text), "(while :; do %s; sleep 0.05; done) & echo $! >changer",
		script);
	assert_int_equal(sh(text), 0);
}

static void stop_changes(void)
{
	assert_int_equal(sh("kill $(cat changer)"), 0);
}

static void resources_are_watched(void **state)
{
	char params[64];
	json_int_t id;
	json_t *answer, *granted;
	(void)state;

	say_hello("watcher");
	assert_int_equal(sh("echo 1 >watched; echo 1 >console.log"), 0);
	assert_int_equal(
		request_code("resources/subscribe", "{\"uri\":\"mayfly://files@/watched\"}"), 0);
	change_over_and_over("echo 2 >>watched");
	is_told("[\"mayfly://files@/watched\"]", 0);
	stop_changes();
	// Another file under its name.
	change_over_and_over("echo 3 >watched.new; mv watched.new watched");
	for (int i = 0; i < 4; i++)
		is_told("[\"mayfly://files@/watched\"]", 0);
	stop_changes();
	assert_int_equal(
		request_code("resources/unsubscribe", "{\"uri\":\"mayfly://files@/watched\"}"), 0);
	assert_int_equal(request_code("resources/subscribe", "{\"uri\":\"mayfly://console\"}"), 0);
	change_over_and_over("echo 2 >>console.log");
	is_told("[\"mayfly://console\"]", 0);
	stop_changes();
	assert_int_equal(
		request_code("resources/unsubscribe", "{\"uri\":\"mayfly://console\"}"), 0);
	json_decref(
		call("exec_background", "{\"job\":\"teller\",\"argv\":[\"sh\",\"-c\",\"while :; do "
					"echo x; sleep 0.05; done\"]}"));
	assert_int_equal(
		request_code("resources/subscribe", "{\"uri\":\"mayfly://jobs/teller/stdout\"}"),
		0);
	is_told("[\"mayfly://jobs/teller/stdout\"]", 0);
	json_decref(call("job_kill", "{\"job\":\"teller\"}"));

	assert_int_equal(request_code("resources/subscribe", "{\"uri\":\"mayfly://nothing\"}"),
		RPC_NO_RESOURCE);
	assert_int_equal(request_code("resources/subscribe", "{}"), RPC_INVALID_PARAMS);
	assert_int_equal(request_code("resources/unsubscribe", "{}"), RPC_INVALID_PARAMS);
	for (unsigned int i = 0; i < SUBSCRIPTIONS_MAX; i++) { // one is the job's still
		snprintf(params, sizeof(params), "{\"uri\":\"mayfly://files/none%u\"}", i);
		assert_int_equal(request_code("resources/subscribe", params),
			i < SUBSCRIPTIONS_MAX - 1 ? 0 : RPC_BUSY);
	}
	set_level("none");
	while (request_code("resources/subscribe", "{\"uri\":\"mayfly://console\"}") == RPC_BUSY)
		;
	assert_int_equal(request_code("resources/subscribe", "{\"uri\":\"mayfly://console\"}"),
		RPC_INVALID_PARAMS);
	set_level("exec");

	// 2026-07-28: a stream for all of them, which says what it has understood.
	assert_int_equal(mcp_client_stop(c), 0);
	start(NULL);
	c->modern = true;
	assert_int_equal(request_code("resources/subscribe", "{\"uri\":\"mayfly://console\"}"),
		RPC_NO_METHOD);
	id = mcp_client_send(c, "subscriptions/listen",
		args("{\"notifications\":{\"promptsListChanged\":true,\"resourceSubscriptions\":["
		     "\"mayfly://files@/watched\",\"mayfly://nothing\"]}}"));
	answer = mcp_client_receive(c);
	assert_string_equal(text_of(answer, "method"), "notifications/subscriptions/acknowledged");
	granted = json_object_get(json_object_get(answer, "params"), "notifications");
	assert_int_equal(json_object_size(granted), 1);
	assert_int_equal(json_array_size(json_object_get(granted, "resourceSubscriptions")), 1);
	json_decref(answer);
	change_over_and_over("echo 2 >>watched");
	is_told("[\"mayfly://files@/watched\"]", id);
	stop_changes();
	for (unsigned int i = 1; i < 8; i++) {
		mcp_client_send(c, "subscriptions/listen", json_pack("{s:{}}", "notifications"));
	}
	answer = mcp_client_ask(c, "subscriptions/listen", json_pack("{s:{}}", "notifications"));
	assert_int_equal(mcp_client_code(answer), RPC_BUSY);
	json_decref(answer);
}

static void a_machine_that_is_down(void **state)
{
	(void)state;
	// The guest is a fork of this process, so it begins when no thread of ours runs.
	assert_int_equal(mcp_client_stop(c), 0);
	fake_guest_stop();
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	fails("exec", "{\"argv\":[\"true\"]}", "mayfly up box");
	fails("read_file", "{\"path\":\"/etc/passwd\"}", "mayfly up box");
	fails("jobs", "{}", "mayfly up box");
	assert_int_equal(mcp_client_stop(c), 0);
	fake_guest_start(dir);
	mcp_client_start(c, dir, CONFIG_ACCESS_EXEC);
	json_decref(call("exec", "{\"argv\":[\"true\"]}"));
}

// --- Calls at the same time ------------------------------------------------------------------

static void calls_do_not_wait_for_each_other(void **state)
{
	json_int_t slow[SESSION_CALLS_MAX];
	json_t *answer;
	(void)state;

	assert_int_equal(sh("rm -f go; mkfifo go"), 0);
	slow[0] = mcp_client_send_call(
		c, "exec", args("{\"argv\":[\"sh\",\"-c\",\"read x <@/go; echo $x\"]}"));
	json_decref(call("exec", "{\"argv\":[\"true\"]}")); // answered first
	assert_int_equal(sh("echo word >go"), 0);
	answer = mcp_client_receive(c);
	assert_int_equal(number_of(answer, "id"), slow[0]);
	assert_string_equal(
		text_of(json_object_get(json_object_get(answer, "result"), "structuredContent"),
			"stdout"),
		"word\n");
	json_decref(answer);
	// As many as there may be, and one more.
	for (size_t i = 0; i < SESSION_CALLS_MAX; i++)
		slow[i] = mcp_client_send_call(c, "exec", args("{\"argv\":[\"sleep\",\"1000\"]}"));
	answer = mcp_client_ask(
		c, "tools/call", json_pack("{s:s, s:{}}", "name", "status", "arguments"));
	assert_int_equal(mcp_client_code(answer), RPC_BUSY);
	json_decref(answer);
	answer = mcp_client_ask(c, "ping", NULL);
	assert_non_null(json_object_get(answer, "result"));
	json_decref(answer);
	// Those that are left running end with the session.
}

static void the_same_id_twice_is_refused(void **state)
{
	json_t *answer;
	(void)state;

	mcp_client_send_call(c, "exec", args("{\"argv\":[\"sleep\",\"1000\"]}"));
	c->next_id--;
	mcp_client_send_call(c, "exec", args("{\"argv\":[\"true\"]}"));
	answer = mcp_client_receive(c);
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_REQUEST);
	json_decref(answer);
}

static void cancelling_kills(void **state)
{
	char text[200];
	json_int_t id;
	json_t *answer;
	(void)state;

	unlink(at("pid"));
	id = mcp_client_send_call(c, "exec", args(SLEEPER));
	eventually(pid_is_there);
	snprintf(text, sizeof(text),
		"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{"
		"\"requestId\":%lld}}\n",
		(long long)id);
	mcp_client_raw(c, text, strlen(text));
	eventually(process_is_gone);
	// And it is not answered: the next answer is another's.
	id = mcp_client_send(c, "ping", NULL);
	answer = mcp_client_receive(c);
	assert_int_equal(number_of(answer, "id"), id);
	json_decref(answer);
	mcp_client_raw(c, text, strlen(text)); // too late: nothing
	json_decref(call("exec", "{\"argv\":[\"true\"]}"));
}

static void leaving_kills(void **state)
{
	(void)state;
	start(NULL);
	unlink(at("pid"));
	mcp_client_send_call(c, "exec", args(SLEEPER));
	eventually(pid_is_there);
	assert_int_equal(mcp_client_stop(c), 0);
	eventually(process_is_gone);
}

// --- Levels ----------------------------------------------------------------------------------

// What each level grants, apart from the program's own table.
static const struct {
	const char *tool;
	enum config_access level;
	const char *arguments; // of a call that works
} granted[] = {
	{"exec", CONFIG_ACCESS_EXEC, "{\"argv\":[\"touch\",\"@/mark\"]}"},
	{"exec_background", CONFIG_ACCESS_EXEC, "{\"argv\":[\"touch\",\"@/mark\"]}"},
	{"jobs", CONFIG_ACCESS_OBSERVE, "{}"},
	{"job_status", CONFIG_ACCESS_OBSERVE, "{\"job\":\"none\"}"},
	{"job_output", CONFIG_ACCESS_OBSERVE, "{\"job\":\"none\"}"},
	{"job_kill", CONFIG_ACCESS_EXEC, "{\"job\":\"none\"}"},
	{"install_packages", CONFIG_ACCESS_MANAGE, "{\"packages\":[\"!\"]}"},
	{"pty_open", CONFIG_ACCESS_EXEC, "{\"argv\":[\"touch\",\"@/mark\"]}"},
	{"pty_write", CONFIG_ACCESS_EXEC, "{\"pty\":\"none\",\"data\":\"\"}"},
	{"pty_read", CONFIG_ACCESS_EXEC, "{\"pty\":\"none\"}"},
	{"pty_resize", CONFIG_ACCESS_EXEC, "{\"pty\":\"none\",\"rows\":9,\"columns\":9}"},
	{"pty_close", CONFIG_ACCESS_EXEC, "{\"pty\":\"none\"}"},
	{"read_file", CONFIG_ACCESS_OBSERVE, "{\"path\":\"@/vm.ini\"}"},
	{"list_dir", CONFIG_ACCESS_OBSERVE, "{\"path\":\"/\"}"},
	{"stat", CONFIG_ACCESS_OBSERVE, "{\"path\":\"/\"}"},
	{"search_files", CONFIG_ACCESS_OBSERVE, "{\"path\":\"@/vm.ini\",\"pattern\":\"x\"}"},
	{"write_file", CONFIG_ACCESS_MANAGE, "{\"path\":\"@/mark\",\"content\":\"\"}"},
	{"edit_file", CONFIG_ACCESS_MANAGE,
		"{\"path\":\"@/fixed\",\"old_text\":\"a\",\"new_text\":\"b\"}"},
	{"mkdir", CONFIG_ACCESS_MANAGE, "{\"path\":\"@/mark\"}"},
	{"remove", CONFIG_ACCESS_MANAGE, "{\"path\":\"@/fixed\"}"},
	{"move", CONFIG_ACCESS_MANAGE, "{\"from\":\"@/fixed\",\"to\":\"@/mark\"}"},
	{"services", CONFIG_ACCESS_OBSERVE, "{}"},
	{"service", CONFIG_ACCESS_MANAGE, "{\"service\":\"mayfly-none\",\"action\":\"status\"}"},
	{"status", CONFIG_ACCESS_OBSERVE, "{}"},
	{"processes", CONFIG_ACCESS_OBSERVE, "{}"},
	{"ports", CONFIG_ACCESS_OBSERVE, "{}"},
	{"logs", CONFIG_ACCESS_OBSERVE, "{}"},
	{"snapshots", CONFIG_ACCESS_OBSERVE, "{}"},
	{"snapshot", CONFIG_ACCESS_MANAGE, "{\"tag\":\"t\"}"},
	{"restore", CONFIG_ACCESS_MANAGE, "{\"tag\":\"t\"}"},
	{"fork", CONFIG_ACCESS_MANAGE, "{\"name\":\"t\"}"},
	{"set_access", CONFIG_ACCESS_OBSERVE, "{\"level\":\"none\"}"},
	{"publish_port", CONFIG_ACCESS_EXEC, "{\"port\":80,\"host_port\":8080}"},
	{"set_network", CONFIG_ACCESS_MANAGE, "{\"reach\":[]}"},
	{"upload", CONFIG_ACCESS_MANAGE, "{\"from\":\"@/fixed\",\"to\":\"@/mark\"}"},
	{"download", CONFIG_ACCESS_MANAGE, "{\"from\":\"@/fixed\",\"to\":\"@/mark\"}"},
};

static void lists_are_by_level(void **state)
{
	struct err err = {0};
	json_t *answer, *tools, *again;
	(void)state;

	for (int level = CONFIG_ACCESS_NONE; level < CONFIG_ACCESS_COUNT; level++) {
		size_t n = 0;

		set_level(config_access_name((enum config_access)level));
		answer = mcp_client_ask(c, "tools/list", NULL);
		tools = json_object_get(json_object_get(answer, "result"), "tools");
		for (size_t i = 0; i < ARRAY_SIZE(granted); i++) {
			const json_t *tool = json_array_get(tools, n);

			if ((int)granted[i].level > level || level == CONFIG_ACCESS_NONE)
				continue;
			assert_string_equal(text_of(tool, "name"), granted[i].tool);
			if (schema_known(json_object_get(tool, "inputSchema"), &err) < 0 ||
				schema_known(json_object_get(tool, "outputSchema"), &err) < 0)
				fail_msg("%s: %s", granted[i].tool, err.msg);
			n++;
		}
		assert_int_equal(json_array_size(tools), n);
		again = mcp_client_ask(c, "tools/list", NULL);
		assert_true(json_equal(
			tools, json_object_get(json_object_get(again, "result"), "tools")));
		json_decref(again);
		json_decref(answer);
	}
}

static int check_granted(void *opaque, const json_t *record)
{
	const char *tool = text_of(record, "tool");
	enum config_access level;

	if (strcmp(text_of(record, "event"), "call") != 0)
		return 0;
	assert_int_equal(config_access_parse(text_of(record, "level"), &level, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(granted); i++)
		if (!strcmp(granted[i].tool, tool) && granted[i].level > level)
			fail_msg("%s ran at %s", tool, text_of(record, "level"));
	++*(unsigned int *)opaque;
	return 0;
}

static bool mark_is_there(void)
{
	return access(at("mark"), F_OK) == 0;
}

static bool fixed_is_whole(void)
{
	CLEANUP_FREE char *text = NULL;
	size_t len;

	return fd_read_file(at("fixed"), 100, &text, &len, NULL) == 0 && !strcmp(text, "a\n");
}

static void write_fixed(void)
{
	CLEANUP_FD int fd = open(at("fixed"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	assert_int_equal(fd_write_all(fd, "a\n", 2), 0);
}

// Any sequence of calls, at levels that change: what a level does not grant does not happen.
static void no_call_reaches_beyond_its_level(void **state)
{
	enum config_access level = CONFIG_ACCESS_EXEC;
	unsigned int seed = 7, answered = 0, refused = 0, recorded = 0;
	struct err err = {0};
	(void)state;

	assert_int_equal(sh("rm -rf mark verbs audit.jsonl*; echo a >fixed"), 0);
	for (unsigned int round = 0; round < 250; round++) {
		size_t i;
		json_t *answer;
		bool may;

		seed = seed * 1103515245 + 12345;
		if ((seed >> 16) % 5 == 0) {
			level = (enum config_access)((seed >> 20) % CONFIG_ACCESS_COUNT);
			set_level(config_access_name(level));
		}
		i = (seed >> 12) % ARRAY_SIZE(granted);
		may = granted[i].level <= level && level != CONFIG_ACCESS_NONE;
		answer = mcp_client_ask(c, "tools/call",
			json_pack("{s:s, s:o}", "name", granted[i].tool, "arguments",
				args(granted[i].arguments)));
		if (mcp_client_code(answer) != (may ? 0 : RPC_INVALID_PARAMS))
			fail_msg("%s at %s", granted[i].tool, config_access_name(level));
		json_decref(answer);
		answered += may;
		refused += !may;
		// A job may still be at it.
		if (may && (!strcmp(granted[i].tool, "exec_background") ||
				   !strcmp(granted[i].tool, "pty_open")))
			eventually(mark_is_there);
		// Nothing that only looks leaves a trace.
		if (level <= CONFIG_ACCESS_OBSERVE && (mark_is_there() || !fixed_is_whole()))
			fail_msg("%s at %s changed something", granted[i].tool,
				config_access_name(level));
		remove(at("mark"));
		write_fixed();
	}
	assert_true(answered > 40 && refused > 40);
	if (audit_each(dir, check_granted, &recorded, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(recorded, answered);
}

static void a_lower_level_ends_what_it_does_not_grant(void **state)
{
	json_int_t id;
	json_t *answer;
	bool told = false, denied = false;
	(void)state;

	answer = mcp_client_ask(c, "initialize",
		json_pack("{s:s, s:{}}", "protocolVersion", "2025-11-25", "capabilities"));
	json_decref(answer);
	unlink(at("pid"));
	id = mcp_client_send_call(c, "exec", args(SLEEPER));
	eventually(pid_is_there);
	set_level("manage");
	while (!told || !denied) {
		const char *method;

		answer = mcp_client_receive(c);
		method = json_string_value(json_object_get(answer, "method"));
		told |= method && !strcmp(method, "notifications/tools/list_changed");
		if (json_integer_value(json_object_get(answer, "id")) == id) {
			assert_true(json_is_true(
				json_object_get(json_object_get(answer, "result"), "isError")));
			denied = true;
		}
		json_decref(answer);
	}
	eventually(process_is_gone);
	json_decref(call("write_file", "{\"path\":\"@/fixed\",\"content\":\"a\\n\"}"));
}

static void the_ceiling_holds_whatever_the_owner_grants(void **state)
{
	json_t *answer;
	(void)state;

	assert_int_equal(mcp_client_stop(c), 0);
	mcp_client_start(c, dir, CONFIG_ACCESS_OBSERVE);
	answer = mcp_client_ask(c, "tools/call",
		json_pack("{s:s, s:{s:[s]}}", "name", "exec", "arguments", "argv", "true"));
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_PARAMS);
	json_decref(answer);
}

static void a_subscription_hears_of_changes(void **state)
{
	json_int_t id;
	json_t *message, *meta;
	(void)state;

	c->modern = true;
	id = mcp_client_send(c, "subscriptions/listen",
		json_pack("{s:{s:b}}", "notifications", "toolsListChanged", 1));
	for (int i = 0; i < 2; i++) {
		message = mcp_client_receive(c);
		assert_string_equal(
			text_of(message, "method"), i ? "notifications/tools/list_changed"
						      : "notifications/subscriptions/acknowledged");
		meta = json_object_get(json_object_get(message, "params"), "_meta");
		assert_int_equal(number_of(meta, "io.modelcontextprotocol/subscriptionId"), id);
		json_decref(message);
		if (i == 0)
			set_level("observe");
	}
}

// A vm.ini that cannot be read grants nothing.
static void a_broken_vm_ini_grants_nothing(void **state)
{
	json_t *answer;
	(void)state;

	assert_int_equal(sh("cp vm.ini good; echo nonsense >vm.ini"), 0);
	answer = mcp_client_ask(c, "tools/call",
		json_pack("{s:s, s:{s:[s]}}", "name", "exec", "arguments", "argv", "true"));
	assert_int_equal(mcp_client_code(answer), RPC_INVALID_PARAMS);
	assert_non_null(strstr(text_of(json_object_get(answer, "error"), "message"), "vm.ini:1"));
	json_decref(answer);
	answer = mcp_client_ask(c, "tools/list", NULL);
	assert_int_equal(mcp_client_code(answer), RPC_INTERNAL);
	json_decref(answer);
	assert_int_equal(sh("mv good vm.ini"), 0);
}

// --- On a socket -----------------------------------------------------------------------------

struct listening {
	struct mcp_session how;
	int started_fd; // an eventfd
};

static void on_started(void *opaque)
{
	const struct listening *l = opaque;
	const uint64_t one = 1;

	assert_int_equal(write(l->started_fd, &one, sizeof(one)), sizeof(one));
}

static void *listen_main(void *opaque)
{
	struct listening *l = opaque;
	struct err err = {0};

	return (void *)(intptr_t)mcp_listen_run(&l->how, on_started, l, &err);
}

// Sends a ping; whether it is answered, or the connection ends.
static bool answers(int fd)
{
	static const char ping[] = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\n";
	struct pollfd p = {.fd = fd, .events = POLLIN};
	char text[200];

	if (send(fd, ping, strlen(ping), MSG_NOSIGNAL) < 0)
		return false;
	assert_int_equal(poll(&p, 1, 60000), 1);
	return read(fd, text, sizeof(text)) > 0;
}

static void clients_on_a_socket(void **state)
{
	const uint64_t one = 1;
	struct listening l = {c->session, eventfd(0, EFD_CLOEXEC)};
	uint64_t started;
	int fds[LISTEN_SESSIONS_MAX + 1];
	struct err err = {0};
	pthread_t thread;
	struct stat st;
	void *rc;
	(void)state;

	l.how.stop_fd = eventfd(0, EFD_CLOEXEC);
	assert_int_equal(pthread_create(&thread, NULL, listen_main, &l), 0);
	assert_int_equal(read(l.started_fd, &started, sizeof(started)), sizeof(started));
	assert_int_equal(stat(at(LISTEN_SOCKET), &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(mcp_listen_run(&l.how, NULL, NULL, &err), -EADDRINUSE);
	// As many as there may be, and one more, all at the same time. Whoever found the address in
	// use has knocked, and has been a session for a moment.
	for (size_t i = 0, knocks = 0; i < ARRAY_SIZE(fds); i++) {
		bool served;

		fds[i] = unix_connect(dir, LISTEN_SOCKET, &err);
		assert_true(fds[i] >= 0);
		served = answers(fds[i]);
		if (!served && i < LISTEN_SESSIONS_MAX && knocks++ < 10000) {
			fd_close(&fds[i--]);
			poll(NULL, 0, 1);
		} else {
			assert_true(served == (i < LISTEN_SESSIONS_MAX));
		}
	}
	assert_int_equal(write(l.how.stop_fd, &one, sizeof(one)), sizeof(one));
	assert_int_equal(pthread_join(thread, &rc), 0);
	assert_int_equal((intptr_t)rc, 0);
	assert_false(answers(fds[0]));
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		fd_close(&fds[i]);
	fd_close(&l.how.stop_fd);
	fd_close(&l.started_fd);
}

// --- The audit -------------------------------------------------------------------------------

struct seen {
	unsigned int calls, results;
	bool redacted, cancelled, exited;
};

static int look(void *opaque, const json_t *record)
{
	struct seen *seen = opaque;
	const json_t *a = json_object_get(record, "arguments");
	char *text = json_dumps(record, 0);

	assert_null(strstr(text, "hunter2"));
	free(text);
	if (!strcmp(text_of(record, "event"), "call")) {
		seen->calls++;
		assert_string_equal(text_of(record, "transport"), "test");
		if (json_object_get(a, "env"))
			seen->redacted = !strcmp(
				text_of(json_object_get(a, "env"), "PASS"), "[redacted]");
		return 0;
	}
	seen->results++;
	seen->cancelled |= !strcmp(text_of(record, "outcome"), "cancelled");
	seen->exited |= json_integer_value(json_object_get(record, "exit_code")) == 4;
	return 0;
}

static void calls_are_written_down(void **state)
{
	struct audit_summary sum;
	struct seen seen = {0};
	struct err err = {0};
	(void)state;

	assert_int_equal(sh("rm -f audit.jsonl*"), 0);
	json_decref(
		call("exec", "{\"argv\":[\"sh\",\"-c\",\"echo password=hunter2; exit 4\"],\"env\":{"
			     "\"PASS\":\"hunter2\"},\"stdin\":\"hunter2\"}"));
	fails("read_file", "{\"path\":\"@/none\"}", "none");
	unlink(at("pid"));
	mcp_client_send_call(c, "exec", args(SLEEPER));
	eventually(pid_is_there);
	assert_int_equal(mcp_client_stop(c), 0);
	if (audit_verify(dir, &sum, &err) < 0 || audit_each(dir, look, &seen, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(sum.records, 6);
	assert_int_equal(seen.calls, 3);
	assert_int_equal(seen.results, 3);
	assert_true(seen.redacted && seen.cancelled && seen.exited);
	// What cannot be written down is not done.
	start(NULL);
	assert_int_equal(sh("echo broken >>audit.jsonl"), 0);
	fails("exec", "{\"argv\":[\"touch\",\"@/mark\"]}", "audit.jsonl");
	assert_int_equal(sh("[ ! -e mark ] && rm audit.jsonl"), 0);
}

struct told {
	bool shown, secret;
	unsigned int files;
};

static int look_at_result(void *opaque, const json_t *record)
{
	const json_t *files = json_object_get(record, "files");
	const char *tool = text_of(record, "tool"), *shown;
	struct told *told = opaque;

	if (strcmp(text_of(record, "event"), "result") != 0)
		return 0;
	shown = json_string_value(json_object_get(record, "stdout"));
	told->shown |= shown && !strcmp(tool, "pty_read") && strstr(shown, "seen by all");
	told->secret |= shown && strstr(shown, "hunter2");
	assert_true(!shown || strlen(shown) <= 4096);
	if (!files)
		return 0;
	told->files++;
	if (!strcmp(tool, "write_file"))
		assert_string_equal(json_string_value(json_array_get(files, 0)) + 2, at("told"));
	if (!strcmp(tool, "move")) {
		assert_int_equal(json_array_size(files), 2);
		assert_memory_equal(json_string_value(json_array_get(files, 0)), "D /", 3);
		assert_memory_equal(json_string_value(json_array_get(files, 1)), "A /", 3);
	}
	return 0;
}

static void what_was_shown_and_changed(void **state)
{
	struct told told = {0};
	struct err err = {0};
	json_t *result;
	char name[64];
	(void)state;

	assert_int_equal(sh("rm -f audit.jsonl* told*"), 0);
	result = call("pty_open",
		"{\"argv\":[\"sh\",\"-c\",\"echo seen by all; echo password=hunter2; seq "
		"9999; echo end\"]}");
	snprintf(name, sizeof(name), "%s", text_of(result, "pty"));
	json_decref(result);
	json_decref(
		pty("pty_read", name, ",\"offset\":0,\"until\":\"never\",\"timeout_seconds\":60"));
	json_decref(call("write_file", "{\"path\":\"@/told\",\"content\":\"1\"}"));
	fails("edit_file", "{\"path\":\"@/told\",\"old_text\":\"2\",\"new_text\":\"3\"}", "not in");
	json_decref(call("move", "{\"from\":\"@/told\",\"to\":\"@/told2\"}"));
	json_decref(call("remove", "{\"path\":\"@/told2\"}"));
	if (audit_each(dir, look_at_result, &told, &err) < 0)
		fail_msg("%s", err.msg);
	assert_true(told.shown && !told.secret);
	assert_int_equal(told.files, 3);
	assert_int_equal(sh("rm -f audit.jsonl*"), 0);
}

static int group_start(void **state)
{
	(void)state;
	signal(SIGPIPE, SIG_IGN);
	assert_non_null(mkdtemp(dir));
	assert_int_equal(sh("printf '[machine]\\n[mcp]\\nfolders = %s:rw\\n' \"$PWD\" >vm.ini; "
			    "echo a >fixed; mkdir approvals"),
		0);
	fake_guest_start(dir);
	return 0;
}

static int group_stop(void **state)
{
	(void)state;
	fake_guest_stop();
	return sh("cd / && rm -rf \"$OLDPWD\"");
}

#define with_session(test) cmocka_unit_test_setup_teardown(test, start, stop)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		with_session(the_legacy_handshake),
		with_session(the_stateless_revision),
		with_session(bad_messages_are_answered),
		with_session(commands),
		with_session(refused_requests_are_told),
		with_session(long_output_has_a_handle),
		with_session(files),
		with_session(jobs),
		with_session(the_machine),
		with_session(the_owners_verbs),
		with_session(terminals),
		with_session(the_owner_is_asked),
		with_session(the_network_only_narrows),
		with_session(a_client_is_told_to_wait),
		with_session(folders_of_the_host),
		with_session(services),
		with_session(a_restore_over_the_work_of_others),
		with_session(resources),
		with_session(resources_are_watched),
		with_session(a_machine_that_is_down),
		with_session(calls_do_not_wait_for_each_other),
		with_session(the_same_id_twice_is_refused),
		with_session(cancelling_kills),
		cmocka_unit_test(leaving_kills),
		with_session(lists_are_by_level),
		with_session(no_call_reaches_beyond_its_level),
		with_session(a_lower_level_ends_what_it_does_not_grant),
		with_session(the_ceiling_holds_whatever_the_owner_grants),
		with_session(a_subscription_hears_of_changes),
		with_session(a_broken_vm_ini_grants_nothing),
		with_session(clients_on_a_socket),
		with_session(calls_are_written_down),
		with_session(what_was_shown_and_changed),
	};
	int status = fake_guest_main(argc, argv);

	return status >= 0 ? status : cmocka_run_group_tests(tests, group_start, group_stop);
}
