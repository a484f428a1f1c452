// SPDX-License-Identifier: Apache-2.0
// The process of a pool: makes machines until as many wait as should, and removes those that are
// nobody's any more. One process a pool, which holds its lock; one thread. All that it knows is on
// disk, so one that was killed is replaced by another, which goes on.
//
// It makes one machine at a time, with SCHED_IDLE where it may, and yields to running work: after a
// machine that took t to make it rests for t times the machines that are leased, of all pools.
#ifndef MAYFLY_CLI_POOL_SERVE_H
#define MAYFLY_CLI_POOL_SERVE_H

#include "cli/pool_store.h"

// How it makes and ends machines.
struct pool_maker {
	int (*make)(void *opaque, const struct pool *pool, struct err *err);
	int (*end)(void *opaque, const char *dir, struct err *err);
	void *opaque;
};

#define POOL_LOOK_NS     2000000000ULL // how often it looks for what has died
#define POOL_REST_MAX_NS 5000000000ULL

struct pool_turn {
	bool made, failed; // a machine
	uint64_t wait_ns; // before the next turn
	bool wake; // at once if one is leased meanwhile
};

// How long to rest after a machine that took took_ns, or could not be made for the nth time in a
// row.
uint64_t pool_rest_ns(uint64_t took_ns, unsigned int leased, unsigned int failures);

// Looks, and makes at most one machine. failures: in a row before. A machine that could not be made
// is no failure of this, but told in *err.
int pool_turn(const struct pool *pool, const struct pool_maker *maker, unsigned int failures,
	struct pool_turn *ret, struct err *err);

// Serves until stop_fd is readable or the pool is gone, with its lock held by the caller.
int pool_serve(const char *name, const struct pool_maker *maker, int stop_fd, struct err *err);

#endif
