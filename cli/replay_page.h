// SPDX-License-Identifier: Apache-2.0
// The story of what agents did with a machine as one HTML page that stands alone: it loads nothing,
// runs no script but its own, and shows what came from the guest as text only. One thread.
#ifndef MAYFLY_CLI_REPLAY_PAGE_H
#define MAYFLY_CLI_REPLAY_PAGE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

struct replay_page {
	FILE *file; // the caller's
	bool any; // a record is there
};

// Each writes to page->file, whose error flag tells in the end whether all went well.
void replay_page_begin(struct replay_page *page, const char *machine);
void replay_page_add(struct replay_page *page, const json_t *record);
void replay_page_end(struct replay_page *page);

#endif
