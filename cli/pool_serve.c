// SPDX-License-Identifier: Apache-2.0
// The process of a pool; see the header. One thread.
#include "cli/pool_serve.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "vmm/base/fd.h"

#define BACKOFF_NS     1000000000ULL
#define BACKOFF_DOUBLE 6 // times at most: about a minute

uint64_t pool_rest_ns(uint64_t took_ns, unsigned int leased, unsigned int failures)
{
	if (failures)
		return BACKOFF_NS << MIN(failures - 1, (unsigned int)BACKOFF_DOUBLE);
	return MIN(MIN(took_ns, POOL_REST_MAX_NS) * leased, POOL_REST_MAX_NS);
}

int pool_turn(const struct pool *pool, const struct pool_maker *maker, unsigned int failures,
	struct pool_turn *ret, struct err *err)
{
	struct pool_count count;
	uint64_t start_ns;
	int r = pool_tidy(pool->name, false, maker->end, maker->opaque, &count, err);

	if (r < 0)
		return r;
	*ret = (struct pool_turn){.wait_ns = POOL_LOOK_NS, .wake = true};
	if (count.ready >= pool->size)
		return 0;
	start_ns = now_ns();
	r = maker->make(maker->opaque, pool, err);
	ret->made = r == 0;
	ret->failed = r < 0;
	pool_note(pool, r == 0 ? POOL_REFILL : POOL_FAILURE, now_ns() - start_ns);
	ret->wait_ns = pool_rest_ns(
		now_ns() - start_ns, count.leased_all, ret->failed ? failures + 1 : 0);
	ret->wake = false;
	return 0;
}

// Returns 1 if it is to stop.
static int wait_for(int stop_fd, int wake_fd, uint64_t wait_ns)
{
	struct pollfd fds[] = {
		{.fd = stop_fd, .events = POLLIN},
		{.fd = wake_fd, .events = POLLIN},
	};
	char events[4096];

	poll(fds, ARRAY_SIZE(fds), (int)((wait_ns + 999999) / 1000000));
	if (fds[1].revents && read(wake_fd, events, sizeof(events)) < 0 && errno != EAGAIN)
		return 1;
	return fds[0].revents ? 1 : 0;
}

int pool_serve(const char *name, const struct pool_maker *maker, int stop_fd, struct err *err)
{
	CLEANUP_FD int ready_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	unsigned int failures = 0;
	bool watched = false;

	if (ready_fd < 0)
		return err_errno(err, -errno, "inotify");
	for (;;) {
		struct err turn_err = {0};
		struct pool_turn turn;
		struct pool pool; // again, since it may be gone, or of another size
		char ready[PATH_MAX];
		int r = pool_open(name, &pool, err);

		if (r < 0)
			return r == -ENOENT ? 0 : r;
		// A lease takes a file out of it.
		if (!watched &&
			snprintf(ready, sizeof(ready), "%s/ready", pool.dir) < (int)sizeof(ready))
			watched = inotify_add_watch(ready_fd, ready, IN_DELETE) >= 0;
		r = pool_turn(&pool, maker, failures, &turn, &turn_err);
		if (r == 0 && !turn.failed) {
			failures = 0;
		} else {
			failures++;
			turn.wait_ns = pool_rest_ns(0, 0, failures);
			turn.wake = false;
			if (turn_err.code == -EINTR) // the signal was seen there
				return 0;
			fprintf(stderr, "mayfly pool serve: %s\n", turn_err.msg);
		}
		// Machines that it has started and that have ended.
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		if (wait_for(stop_fd, turn.wake ? ready_fd : -1, turn.wait_ns))
			return 0;
	}
}
