// SPDX-License-Identifier: Apache-2.0
// A client's bytes, in pieces as they may arrive: the reader finds the lines that a naive one
// finds; a message is one or is refused with a code of JSON-RPC; arguments that pass a tool's
// schema are what the tool may rely on; and what an audit would keep of them is bounded and JSON.
//
// Input: byte 0 is the size of a piece. Then the stream.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mcp/folders.h"
#include "mcp/redact.h"
#include "mcp/resources.h"
#include "mcp/rpc.h"
#include "mcp/schema.h"
#include "mcp/tool.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STREAM_MAX 32768U
#define KEPT_MAX   (128U * 1024)

// A path of the host that is taken is whole, and has no part that leads up.
static void check_host_path(const json_t *path)
{
	const char *text = json_string_value(path);
	char *copy = text ? strdup(text) : NULL, *at = NULL;
	struct err err = {0};

	ASSERT(!text || copy);
	if (text && folders_check(text, &err) == 0) {
		ASSERT(text[0] == '/');
		for (char *part = strtok_r(copy, "/", &at); part; part = strtok_r(NULL, "/", &at))
			ASSERT(strcmp(part, ".") != 0 && strcmp(part, "..") != 0);
	} else {
		ASSERT(!text || err.msg[0]);
	}
	free(copy);
}

static void check_arguments(const struct rpc_message *m)
{
	const char *name = json_string_value(json_object_get(m->params, "name"));
	json_t *arguments = json_object_get(m->params, "arguments"), *kept;
	const json_t *schema, *argv;
	struct err err = {0};
	char *text;

	if (!name || !json_is_object(arguments))
		return;
	check_host_path(json_object_get(arguments, "from"));
	kept = redact_arguments(arguments);
	text = json_dumps(kept, JSON_COMPACT);
	ASSERT(text && strlen(text) < KEPT_MAX);
	free(text);
	json_decref(kept);
	if (!tools_find(name, CONFIG_ACCESS_EXEC, &schema))
		return;
	if (schema_check(schema, arguments, &err) < 0) {
		ASSERT(err.msg[0]);
		return;
	}
	argv = json_object_get(arguments, "argv");
	ASSERT(!argv || (json_is_array(argv) && json_array_size(argv) >= 1));
	ASSERT(!argv || json_is_string(json_array_get(argv, 0)));
	ASSERT(!json_object_get(arguments, "path") ||
		json_is_string(json_object_get(arguments, "path")));
	ASSERT(json_integer_value(json_object_get(arguments, "timeout_seconds")) >= 0);
}

// What a URI names is a whole path, or a word, of at most what the URI has.
static void check_uri(const json_t *uri)
{
	struct resource *what = malloc(sizeof(*what));
	const char *text = json_string_value(uri);
	struct err err = {0};

	ASSERT(what);
	if (text && resource_parse(text, what, &err) == 0) {
		ASSERT(strlen(what->name) <= strlen(text));
		ASSERT(what->kind != RESOURCE_FILE || what->name[0] == '/');
		ASSERT(what->kind != RESOURCE_JOB || what->name[0]);
	} else {
		ASSERT(!text || err.msg[0]);
	}
	free(what);
}

static void check_line(const char *line, size_t len)
{
	struct rpc_message m;
	struct err err = {0};
	int code = rpc_parse(line, len, &m, &err);

	ASSERT(code == 0 || code == RPC_PARSE_ERROR || code == RPC_INVALID_REQUEST);
	ASSERT((code == 0) == (err.code == 0));
	if (code == 0) {
		ASSERT(m.kind == RPC_RESPONSE || m.method);
		ASSERT(m.kind != RPC_REQUEST || json_is_string(m.id) || json_is_integer(m.id));
		ASSERT(!m.params || json_is_object(m.params));
		check_arguments(&m);
		check_uri(json_object_get(m.params, "uri"));
	}
	rpc_message_fini(&m);
}

// How many lines with something on them a naive reader sees.
static size_t lines_of(const uint8_t *data, size_t size)
{
	size_t n = 0;
	bool something = false;

	for (size_t i = 0; i < size; i++) {
		if (data[i] == '\n') {
			n += something;
			something = false;
		} else if (data[i] != ' ' && data[i] != '\t' && data[i] != '\r') {
			something = true;
		}
	}
	return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct rpc_reader r;
	const char *line;
	size_t piece, len, seen = 0;
	int pair[2], rc;

	if (size < 1)
		return 0;
	piece = 1 + data[0] * 16U;
	data++;
	size = MIN(size - 1, (size_t)STREAM_MAX);
	ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	rpc_reader_init(&r, pair[1]);
	for (size_t off = 0; off < size; off += MIN(piece, size - off)) {
		ASSERT(fd_write_all(pair[0], data + off, MIN(piece, size - off)) == 0);
		ASSERT(rpc_fill(&r) == 0);
		while ((rc = rpc_next(&r, &line, &len)) == 1) {
			check_line(line, len);
			seen++;
		}
		ASSERT(rc == 0);
	}
	fd_close(&pair[0]);
	ASSERT(rpc_fill(&r) < 0);
	ASSERT(seen == lines_of(data, size));
	rpc_reader_fini(&r);
	fd_close(&pair[1]);
	return 0;
}
