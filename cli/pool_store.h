// SPDX-License-Identifier: Apache-2.0
// Warm pools on disk: $MAYFLY_HOME/pools/NAME/. One thread; several processes at a time.
//
//   vm.ini     what its machines are         golden/ready  the snapshot that they go on from
//   pool.json  how many are to wait          ready/RUN     a file for each machine that waits
//   lock       held by the pool's process    stats         what was counted
//   turn       held by one that finds none waiting, while it makes a machine
//   turn-N     held by a task of an evaluation that finds none waiting, until it ends
//
// A pool's machine is a throwaway, vms/run-…, with the pool's name in its file `pool`. Whoever
// makes it or has it holds its owner lock (cli/home.h); a lease takes that lock and then removes
// the file in ready/, so that of two leases one succeeds. The lock is free while a machine waits,
// and when whoever had it has died: then there is no file in ready/, and the machine is anybody's
// to remove.
#ifndef MAYFLY_CLI_POOL_STORE_H
#define MAYFLY_CLI_POOL_STORE_H

#include <limits.h>
#include <sys/types.h>

#include "vmm/config.h"

#define POOL_SIZE_MAX   256
#define POOL_SNAPSHOT   "golden/ready" // in the pool's folder
#define POOL_LOG        "serve.log" // likewise, of the pool's process
#define POOL_TURN       "turn" // likewise
#define POOL_SETUP_MAX  8192
#define POOL_NAME_BYTES 64
#define POOL_SAMPLES    512

struct pool {
	char name[POOL_NAME_BYTES];
	char dir[PATH_MAX];
	char snapshot[PATH_MAX]; // the folder of the one that its machines go on from
	char setup[POOL_SETUP_MAX]; // what was run before that was taken; "": nothing
	unsigned int size; // how many machines are to wait
	struct config config;
};

// --- The pool --------------------------------------------------------------------------------

// -EINVAL for what is no name, -ENOENT if there is none, -EBADMSG if it is damaged.
int pool_open(const char *name, struct pool *ret, struct err *err);

// Makes a folder for a pool that is not there yet: pool->dir and snapshot. It is the caller's for
// as long as *ret_lock_fd is open. -EEXIST.
int pool_begin(struct pool *pool, int *ret_lock_fd, struct err *err);

// Writes what it is and gives it its name; its snapshot is there. -EEXIST.
int pool_commit(struct pool *pool, struct err *err);

// Removes what is being made. Accepts a pool that was not begun, or is complete.
void pool_abort(struct pool *pool);

// Removes what those who made a pool and died have left. Returns how many, or a negative errno.
int pool_sweep(struct err *err);

// 1 if a process serves the pool, with its id in *ret_pid (may be NULL); 0; or a negative errno.
int pool_served(const struct pool *pool, pid_t *ret_pid, struct err *err);

// --- Its machines ----------------------------------------------------------------------------

// The machine in dir, a throwaway whose owner lock the caller holds, belongs to the pool from now
// on; before it is started.
int pool_claim(const struct pool *pool, const char *dir, struct err *err);

// It is ready, and can be leased as soon as its owner lock is free.
int pool_publish(const struct pool *pool, const char *dir, struct err *err);

// Takes one of those that wait: its folder, and its owner lock. Returns 1; 0 if there is none.
int pool_lease(const struct pool *pool, char ret_dir[PATH_MAX], int *ret_lock_fd, struct err *err);

// The pool that the machine in dir is of; false: of none.
bool pool_of(const char *dir, char ret_name[POOL_NAME_BYTES]);

struct pool_count {
	unsigned int ready; // of this pool
	unsigned int leased, leased_all; // of this and of all pools
	unsigned int removed; // of this: dead, half made, or left by a command that died
};

// Looks at all machines of pools, and removes those of this one that are nobody's any more; name
// NULL: those of all pools, and of pools that are gone. all: also those that wait. end() ends the
// machine in dir, if it runs; without it nothing is removed.
int pool_tidy(const char *name, bool all,
	int (*end)(void *opaque, const char *dir, struct err *err), void *opaque,
	struct pool_count *ret, struct err *err);

// --- What was counted ------------------------------------------------------------------------

struct pool_stats {
	uint64_t hits, misses; // leases
	uint64_t refills, failures, refill_us; // machines made, and the time that it took in all
	uint64_t lease_sample_us[POOL_SAMPLES], refill_sample_us[POOL_SAMPLES]; // the last ones
};

enum pool_event { POOL_HIT, POOL_MISS, POOL_REFILL, POOL_FAILURE };

// A failure to count is none to speak of.
void pool_note(const struct pool *pool, enum pool_event event, uint64_t took_ns);

int pool_stats(const struct pool *pool, struct pool_stats *ret, struct err *err);

// Of the samples of nr events so far, the one that percent of them do not exceed; 0 of none.
uint64_t pool_percentile(const uint64_t samples[POOL_SAMPLES], uint64_t nr, unsigned int percent);

#endif
