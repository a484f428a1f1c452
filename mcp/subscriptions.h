// SPDX-License-Identifier: Apache-2.0
// Resources (mcp/resources.h) whose changes a client wants to hear of. Each has a thread that waits
// for them, in the machine or beside its console's log; everything here is the session's thread's.
#ifndef MAYFLY_MCP_SUBSCRIPTIONS_H
#define MAYFLY_MCP_SUBSCRIPTIONS_H

#include "mcp/tool.h"

#define SUBSCRIPTIONS_MAX 16U // of a session

struct subscriptions;

// NULL if there is no memory. machine is borrowed.
struct subscriptions *subscriptions_create(const struct mcp_machine *machine);

// Accepts NULL.
void subscriptions_destroy(struct subscriptions *s);

// Readable when subscriptions_take() may have something to tell.
int subscriptions_fd(const struct subscriptions *s);

// owner (borrowed, may be NULL) is told with each change. One that is there already is none the
// worse. -ENOENT for no resource, -EBUSY for too many.
int subscriptions_add(
	struct subscriptions *s, const char *uri, const json_t *owner, struct err *err);

// Ends that of uri, or all with NULL, of that owner. Returns how many.
unsigned int subscriptions_remove(struct subscriptions *s, const char *uri, const json_t *owner);

// Ends all of them.
void subscriptions_clear(struct subscriptions *s);

// Whether there is another change to tell: its URI and owner (NULL: none) are borrowed until the
// next call here.
bool subscriptions_take(struct subscriptions *s, const char **ret_uri, json_t **ret_owner);

#endif
