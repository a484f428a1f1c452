// SPDX-License-Identifier: Apache-2.0
// Subscriptions to resources; see the header. The session's thread, but for what is said to be of a
// subscription's own.
#include "mcp/subscriptions.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "mcp/resources.h"
#include "vmm/base/fd.h"

#define STACK_BYTES MIB
#define PAUSE_MS    250 // between two changes that are told
#define CONSOLE_MS  500 // between two looks at the console's log
#define RETRY_MS    5000 // until what could not be watched is tried again

struct subscription {
	struct subscription *next;
	char *uri; // owned, as is owner
	json_t *owner; // NULL: none
	int wake_fd; // of all
	struct tool_call call; // only to reach the machine
	struct resource what;
	pthread_t thread;
	atomic_bool changed;
	// Of its thread:
	bool watching, before; // now; ever
};

struct subscriptions {
	const struct mcp_machine *machine;
	int wake_fd; // an eventfd
	struct subscription *first;
	unsigned int nr;
};

// --- In a subscription's thread --------------------------------------------------------------

static bool ends_within(const struct subscription *x, int ms)
{
	struct pollfd p = {.fd = x->call.cancel_fd, .events = POLLIN};
	int n;

	while ((n = poll(&p, 1, ms)) < 0)
		;
	return n > 0;
}

static void wake(int fd)
{
	const uint64_t one = 1;

	(void)!write(fd, &one, sizeof(one));
}

// And then nothing for a while: what comes meanwhile is told as one change.
static int tell(struct subscription *x, struct err *err)
{
	atomic_store(&x->changed, true);
	wake(x->wake_fd);
	return ends_within(x, PAUSE_MS) ? err_set(err, -ECANCELED, "cancelled") : 0;
}

// Whatever has happened while nobody looked.
static int begin(struct subscription *x, struct err *err)
{
	bool again = x->before;

	if (x->watching)
		return 0;
	x->watching = x->before = true;
	return again ? tell(x, err) : 0;
}

static int on_change(void *ctx, const struct agent_change *change, struct err *err)
{
	return strcmp(change->change, "watching") ? tell(ctx, err) : begin(ctx, err);
}

static int watch_file(struct subscription *x, struct err *err)
{
	struct agent_files files;
	int r = call_files(&x->call, &files, err);

	if (r < 0)
		return r;
	r = agent_watch(&files, x->what.name, on_change, x, err);
	fd_close(&files.conn_fd);
	return r;
}

static int on_output(void *ctx, bool is_err, const uint8_t *bytes, size_t len, struct err *err)
{
	struct subscription *x = ctx;
	(void)bytes;

	return len && is_err == x->what.is_err ? tell(x, err) : 0;
}

static void on_offset(void *ctx, bool is_err, uint64_t offset)
{
	struct subscription *x = ctx;
	struct err ignored;
	(void)is_err;
	(void)offset;

	(void)begin(x, &ignored);
}

static int watch_job(struct subscription *x, struct err *err)
{
	const struct agent_attach attach = {
		.job = x->what.name,
		.follow = true,
		.stdout_offset = x->what.is_err ? INT64_MAX : UINT64_MAX,
		.stderr_offset = x->what.is_err ? UINT64_MAX : INT64_MAX,
		.in_fd = -1,
		.out_fd = -1,
		.err_fd = -1,
		.output = on_output,
		.offset = on_offset,
		.ctx = x,
		.signal_fd = -1,
		.cancel_fd = x->call.cancel_fd,
	};
	struct agent_result result = {0};
	CLEANUP_FD int fd = call_connect(&x->call, err);

	return fd < 0 ? fd : agent_attach(fd, &attach, &result, err);
}

// It is appended to by the monitor, and begun anew under the same name.
static int watch_console(struct subscription *x, struct err *err)
{
	struct stat seen = {0}, now;
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%s/console.log", x->call.machine->dir) >=
		(int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", x->call.machine->dir);
	if (stat(path, &seen) < 0)
		return err_errno(err, -errno, "%s", path);
	if (begin(x, err) < 0)
		return -ECANCELED;
	while (!ends_within(x, CONSOLE_MS)) {
		if (stat(path, &now) < 0)
			return err_errno(err, -errno, "%s", path);
		if (now.st_ino == seen.st_ino && now.st_size == seen.st_size)
			continue;
		seen = now;
		if (tell(x, err) < 0)
			break;
	}
	return -ECANCELED;
}

// What cannot be watched now (the machine is down, or there is no such file) is tried again.
static void *thread_main(void *opaque)
{
	static int (*const watch[])(struct subscription *, struct err *) = {
		[RESOURCE_CONSOLE] = watch_console,
		[RESOURCE_JOB] = watch_job,
		[RESOURCE_FILE] = watch_file,
	};
	struct subscription *x = opaque;

	for (;;) {
		struct err err = {0};
		bool was, over;
		int r = watch[x->what.kind](x, &err);

		was = x->watching;
		x->watching = false;
		if (ends_within(x, 0) || (was && tell(x, &err) < 0))
			return NULL;
		over = r == 0 && x->what.kind == RESOURCE_JOB; // it has ended
		// A file that was written anew is another one, and there.
		if (over || ((r < 0 || !was) && ends_within(x, RETRY_MS)))
			return NULL;
	}
}

// --- The list --------------------------------------------------------------------------------

struct subscriptions *subscriptions_create(const struct mcp_machine *machine)
{
	struct subscriptions *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->machine = machine;
	s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->wake_fd < 0) {
		free(s);
		return NULL;
	}
	return s;
}

void subscriptions_destroy(struct subscriptions *s)
{
	if (!s)
		return;
	subscriptions_clear(s);
	fd_close(&s->wake_fd);
	free(s);
}

int subscriptions_fd(const struct subscriptions *s)
{
	return s->wake_fd;
}

static bool is_of(const struct subscription *x, const char *uri, const json_t *owner)
{
	return (!uri || !strcmp(x->uri, uri)) && !x->owner == !owner &&
	       (!owner || json_equal(x->owner, owner));
}

static void free_one(struct subscription *x)
{
	fd_close(&x->call.cancel_fd);
	json_decref(x->owner);
	free(x->uri);
	free(x);
}

int subscriptions_add(
	struct subscriptions *s, const char *uri, const json_t *owner, struct err *err)
{
	struct subscription *x;
	pthread_attr_t attr;
	int r;

	for (x = s->first; x; x = x->next)
		if (is_of(x, uri, owner))
			return 0;
	if (s->nr == SUBSCRIPTIONS_MAX)
		return err_set(
			err, -EBUSY, "%u resources are watched: end one first", SUBSCRIPTIONS_MAX);
	x = calloc(1, sizeof(*x));
	if (!x)
		return err_errno(err, -ENOMEM, "subscription");
	*x = (struct subscription){.uri = strdup(uri),
		.owner = json_incref((json_t *)(uintptr_t)owner),
		.wake_fd = s->wake_fd,
		.call = {.machine = s->machine, .cancel_fd = eventfd(0, EFD_CLOEXEC)}};
	r = x->uri && x->call.cancel_fd >= 0 ? resource_parse(uri, &x->what, err)
					     : err_errno(err, -ENOMEM, "subscription");
	if (r == 0) {
		pthread_attr_init(&attr);
		pthread_attr_setstacksize(&attr, STACK_BYTES);
		r = -pthread_create(&x->thread, &attr, thread_main, x);
		pthread_attr_destroy(&attr);
		if (r < 0)
			err_errno(err, r, "a thread for the subscription");
	}
	if (r < 0) {
		free_one(x);
		return r;
	}
	x->next = s->first;
	s->first = x;
	s->nr++;
	return 0;
}

// Takes the one at *at off the list.
static void end_one(struct subscriptions *s, struct subscription **at)
{
	struct subscription *x = *at;

	*at = x->next;
	s->nr--;
	wake(x->call.cancel_fd);
	pthread_join(x->thread, NULL);
	free_one(x);
}

unsigned int subscriptions_remove(struct subscriptions *s, const char *uri, const json_t *owner)
{
	unsigned int nr = 0;

	for (struct subscription **at = &s->first; *at;) {
		if (is_of(*at, uri, owner)) {
			end_one(s, at);
			nr++;
		} else {
			at = &(*at)->next;
		}
	}
	return nr;
}

void subscriptions_clear(struct subscriptions *s)
{
	while (s->first)
		end_one(s, &s->first);
}

bool subscriptions_take(struct subscriptions *s, const char **ret_uri, json_t **ret_owner)
{
	uint64_t times;

	(void)!read(s->wake_fd, &times, sizeof(times));
	for (struct subscription *x = s->first; x; x = x->next) {
		if (!atomic_exchange(&x->changed, false))
			continue;
		*ret_uri = x->uri;
		*ret_owner = x->owner;
		return true;
	}
	return false;
}
