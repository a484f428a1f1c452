// SPDX-License-Identifier: Apache-2.0
// A machine that exists for one purpose and goes with it: one that waits in a pool, else one that
// goes on from a snapshot, else one that boots. One thread.
#ifndef MAYFLY_CLI_THROWAWAY_H
#define MAYFLY_CLI_THROWAWAY_H

#include "cli/golden.h"
#include "cli/launch.h"
#include "cli/pool_store.h"

// Until the guest is ready. Generous: a host that emulates ring 0 takes ten seconds at best.
#define THROWAWAY_BOOT_NS   180000000000ULL
#define THROWAWAY_BOOT_TEXT "3m"

struct throwaway {
	const char *verb; // for messages
	struct config config; // of a pool's machine: the pool's
	const struct pool *pool; // borrowed; NULL: none
	bool cold; // boot, whether there is something to go on from or not
	bool show_console;
	// Of those that make a machine since none of the pool's waits: as many of these as there
	// are processors, until they end. (Of others one at a time, until it is ready.)
	bool hold_turn;
	// Set by throwaway_start():
	bool leased; // it had waited in the pool
	char dir[PATH_MAX];
	int lock_fd, turn_fd;
	struct golden golden;
	struct launch launch; // of the machine that answers
};

#define THROWAWAY_INIT                                                                            \
	{                                                                                         \
		.lock_fd = -1, .turn_fd = -1, .golden = {.making_fd = -1}, .launch = LAUNCH_INIT, \
	}

// Starts it and returns when it answers, as launch_wait(). The process's signals are taken.
int throwaway_start(struct throwaway *t, uint64_t deadline_ns, int *ret_signal, struct err *err);

// Ends it and takes its folder away. Then throwaway_fini() frees what there is.
int throwaway_end(struct throwaway *t, struct err *err);
void throwaway_fini(struct throwaway *t);

// --- The pool's side -------------------------------------------------------------------------

// Makes one more machine that waits. raise: we are of SCHED_IDLE, and it is not to stay so.
int throwaway_refill(const struct pool *pool, uint64_t timeout_ns, bool raise, struct err *err);

// Starts the pool's process if there is none.
int throwaway_serve(const struct pool *pool, struct err *err);

#endif
