// SPDX-License-Identifier: Apache-2.0
// What can be read of a machine by a URI: its console, the output of its jobs, its files. Each is
// what a tool tells, in the form that MCP has for resources. A thread a call.
#ifndef MAYFLY_MCP_RESOURCES_H
#define MAYFLY_MCP_RESOURCES_H

#include "mcp/tool.h"

#define RESOURCE_URI_BYTES 8192U

enum resource_kind { RESOURCE_CONSOLE, RESOURCE_JOB, RESOURCE_FILE };

struct resource {
	enum resource_kind kind;
	char name[4097]; // of a job; the whole path of a file
	bool is_err; // of a job's streams
};

// mayfly://console, mayfly://jobs/NAME/stdout (or stderr), mayfly://files/PATH, in which %XX is a
// byte. -ENOENT for what is none of them. Pure.
int resource_parse(const char *uri, struct resource *ret, struct err *err);

// Methods of MCP as calls: they are at every level from observe on, and are written down as tools
// are. Their results are whole; a failure is an error of JSON-RPC.
extern const struct tool resources_list, resources_read;

// The result of resources/templates/list: fresh.
json_t *resources_templates(void);

#endif
