// SPDX-License-Identifier: Apache-2.0
// How deep an agent may reach into a machine: [mcp] access of its vm.ini, read anew for every call,
// so that a change is in force at once. Any thread.
#ifndef MAYFLY_MCP_LEVEL_H
#define MAYFLY_MCP_LEVEL_H

#include "vmm/config.h"

// The level of the machine in dir. A vm.ini that cannot be read grants nothing, and is a failure.
int level_read(const char *dir, enum config_access *ret, struct err *err);

#endif
