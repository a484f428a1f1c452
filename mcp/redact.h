// SPDX-License-Identifier: Apache-2.0
// What an audit may keep of what passed: no secrets, and not much of anything. Pure; any thread.
#ifndef MAYFLY_MCP_REDACT_H
#define MAYFLY_MCP_REDACT_H

#include <jansson.h>

#include "vmm/base/util.h"

#define REDACT_TEXT_BYTES 2048U // of one string
#define REDACT_ALL_BYTES  16384U // of all strings together

// A copy of a tool's arguments: values of env are left out, contents of files and of stdin are told
// by size and SHA-256, what looks like a secret is replaced, what is long is cut.
json_t *redact_arguments(const json_t *arguments);

// A string so, of bytes that may be anything.
json_t *redact_text(const char *text, size_t len);

// SHA-256 in hexadecimal.
void redact_digest(const void *bytes, size_t len, char ret[65]);

#endif
