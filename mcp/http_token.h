// SPDX-License-Identifier: Apache-2.0
// The token that every request over HTTP has to bear: a file that only its owner may read. Any
// thread.
#ifndef MAYFLY_MCP_HTTP_TOKEN_H
#define MAYFLY_MCP_HTTP_TOKEN_H

#include "vmm/base/err.h"

#define HTTP_TOKEN_FILE  "mcp.token" // in the machine's folder
#define HTTP_TOKEN_BYTES 257U // at most, with the NUL

// Reads it. With create, a file that is not there is made, with 256 random bits. -EPERM for one
// that others may read, -EINVAL for one that holds no token of 16 or more characters.
int http_token_load(const char *path, bool create, char ret[HTTP_TOKEN_BYTES], struct err *err);

#endif
