// SPDX-License-Identifier: Apache-2.0
// What the machine was refused on its way out (docs/egress.md) while a command ran, for its result:
// a command that ends in `|| true` does not tell. Any thread.
#ifndef MAYFLY_MCP_DENIALS_H
#define MAYFLY_MCP_DENIALS_H

#include <jansson.h>
#include <sys/types.h>

// Where the log of requests ends.
struct denials_mark {
	ino_t ino; // 0: there is none
	off_t end;
};

// The mark of the machine in dir, now.
struct denials_mark denials_now(const char *dir);

// What was refused since then: a fresh array of objects with host, port, reason and times, or NULL
// if nothing was. The mark moves behind what has been read.
json_t *denials_since(const char *dir, struct denials_mark *mark);

#endif
