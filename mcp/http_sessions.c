// SPDX-License-Identifier: Apache-2.0
// Sessions and exchanges over HTTP; see the header. Any thread, under one lock that is never held
// across anything that blocks.
#include "mcp/http_sessions.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/log.h"

#define LINES_MAX 64U // that wait to be sent; the last place is the answer's

struct http_exchange {
	struct http_session *session; // a reference
	struct http_exchange *next;
	json_t *id, *token; // of the request; owned
	bool takes_rest; // what belongs to no request
	int wake_fd; // owned
	struct http_line lines[LINES_MAX]; // a ring
	unsigned int first, nr;
};

struct http_session {
	struct http_sessions *all;
	struct http_session *next; // of those that are listed
	char id[HTTP_SESSION_ID_BYTES];
	struct mcp_session config;
	pthread_t thread;
	pthread_mutex_t say_lock; // keeps lines whole
	int fd; // to config.in_fd; both owned
	// Of the lock of all:
	unsigned int refs; // one is the list's
	bool listed;
	bool ended; // no message will come any more
	uint64_t used_ns;
	struct http_exchange *exchanges;
};

struct http_sessions {
	const struct mcp_session *how;
	uint64_t idle_ns;
	pthread_mutex_t lock;
	struct http_session *first;
	unsigned int nr;
};

// --- Messages of a session -------------------------------------------------------------------

static void wake(struct http_exchange *x)
{
	const uint64_t one = 1;

	(void)!write(x->wake_fd, &one, sizeof(one));
}

static bool is_for(const struct http_exchange *x, const json_t *message)
{
	const json_t *id = json_object_get(message, "id");
	const json_t *token = json_object_get(json_object_get(message, "params"), "progressToken");

	if (x->id && id)
		return json_equal(x->id, id);
	if (x->token && token)
		return json_equal(x->token, token);
	return x->takes_rest && !id;
}

// Takes the line over if there is room.
static bool push(struct http_exchange *x, const json_t *message, char *text, size_t len)
{
	const json_t *error = json_object_get(message, "error");
	const bool answer = json_object_get(message, "id") != NULL;

	if (x->nr + !answer >= LINES_MAX)
		return false;
	x->lines[(x->first + x->nr++) % LINES_MAX] = (struct http_line){
		.text = text,
		.len = len,
		.answer = answer,
		.code = (int)json_integer_value(json_object_get(error, "code")),
	};
	wake(x);
	return true;
}

// The session's sink: called by its thread and those of its calls.
static void deliver(void *opaque, const json_t *message, char *text, size_t len)
{
	struct http_session *s = opaque;
	struct http_exchange *x;

	pthread_mutex_lock(&s->all->lock);
	for (x = s->exchanges; x && !is_for(x, message); x = x->next)
		;
	if (x && push(x, message, text, len))
		text = NULL;
	pthread_mutex_unlock(&s->all->lock);
	free(text); // nobody waits for it any more
}

static void set_ended(struct http_session *s)
{
	s->ended = true;
	for (struct http_exchange *x = s->exchanges; x; x = x->next)
		wake(x);
}

static void *session_main(void *opaque)
{
	struct http_session *s = opaque;
	struct err err = {0};

	if (mcp_session_run(&s->config, &err) < 0)
		log_line(LOG_WARN, "mcp", "%s", err.msg);
	shutdown(s->config.in_fd, SHUT_RDWR); // who says something must not wait
	pthread_mutex_lock(&s->all->lock);
	set_ended(s);
	pthread_mutex_unlock(&s->all->lock);
	return NULL;
}

int http_session_say(struct http_session *s, const char *line, size_t len, struct err *err)
{
	int r = 0;

	// Its thread takes what is said, whatever becomes of it.
	pthread_mutex_lock(&s->say_lock);
	for (size_t done = 0; done <= len && r == 0;) {
		ssize_t n = done < len ? send(s->fd, line + done, len - done, MSG_NOSIGNAL)
				       : send(s->fd, "\n", 1, MSG_NOSIGNAL);

		if (n > 0)
			done += (size_t)n;
		else if (n < 0 && errno != EINTR)
			r = err_errno(err, -errno, "the session has ended");
	}
	pthread_mutex_unlock(&s->say_lock);
	return r;
}

// --- Sessions --------------------------------------------------------------------------------

struct http_sessions *http_sessions_create(const struct mcp_session *how, uint64_t idle_ns)
{
	struct http_sessions *all = calloc(1, sizeof(*all));

	if (!all)
		return NULL;
	all->how = how;
	all->idle_ns = idle_ns;
	pthread_mutex_init(&all->lock, NULL);
	return all;
}

static void session_free(struct http_session *s)
{
	fd_close(&s->fd);
	fd_close(&s->config.in_fd);
	pthread_mutex_destroy(&s->say_lock);
	free(s);
}

static int make_id(struct http_session *s)
{
	uint8_t random[(HTTP_SESSION_ID_BYTES - 1) / 2];

	if (getrandom(random, sizeof(random), 0) != sizeof(random))
		return -EIO;
	for (size_t i = 0; i < sizeof(random); i++)
		snprintf(s->id + 2 * i, 3, "%02x", random[i]);
	return 0;
}

static int start(struct http_session *s, struct err *err)
{
	int pair[2];
	int r = make_id(s);

	if (r < 0)
		return err_errno(err, r, "getrandom");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return err_errno(err, -errno, "socketpair");
	s->fd = pair[0];
	s->config.in_fd = pair[1];
	r = pthread_create(&s->thread, NULL, session_main, s);
	return r ? err_errno(err, -r, "a thread for the session") : 0;
}

void http_session_put(struct http_session *s)
{
	bool last;

	if (!s)
		return;
	pthread_mutex_lock(&s->all->lock);
	s->used_ns = now_ns();
	last = --s->refs == 0;
	pthread_mutex_unlock(&s->all->lock);
	if (!last)
		return;
	shutdown(s->fd, SHUT_RDWR); // the end of its input
	pthread_join(s->thread, NULL);
	session_free(s);
}

// Returns whether the list's reference is the caller's now.
static bool unlist(struct http_session *s)
{
	struct http_sessions *all = s->all;

	if (!s->listed)
		return false;
	for (struct http_session **at = &all->first; *at; at = &(*at)->next) {
		if (*at != s)
			continue;
		*at = s->next;
		break;
	}
	s->listed = false;
	all->nr--;
	set_ended(s);
	return true;
}

// Unlists the one that has been idle longest, of those that were for idle_ns or have ended; its
// reference is the caller's then. NULL: none.
static struct http_session *take_idle(struct http_sessions *all, uint64_t idle_ns)
{
	const uint64_t now = now_ns();
	struct http_session *idle = NULL;

	pthread_mutex_lock(&all->lock);
	for (struct http_session *s = all->first; s; s = s->next)
		if (s->refs == 1 && (s->ended || now - s->used_ns >= idle_ns) &&
			(!idle || s->used_ns < idle->used_ns))
			idle = s;
	if (idle)
		unlist(idle);
	pthread_mutex_unlock(&all->lock);
	return idle;
}

// Clients often leave without a word: the one that has been silent longest gives way.
static void make_room(struct http_sessions *all)
{
	bool full;

	pthread_mutex_lock(&all->lock);
	full = all->nr == HTTP_SESSIONS_MAX;
	pthread_mutex_unlock(&all->lock);
	if (full)
		http_session_put(take_idle(all, 0));
}

int http_session_open(
	struct http_sessions *all, bool listed, struct http_session **ret, struct err *err)
{
	struct http_session *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return err_errno(err, -ENOMEM, "session");
	*s = (struct http_session){.all = all, .fd = -1, .refs = 1U + listed, .used_ns = now_ns()};
	s->config = *all->how;
	s->config.in_fd = s->config.out_fd = -1;
	s->config.sink = deliver;
	s->config.sink_opaque = s;
	pthread_mutex_init(&s->say_lock, NULL);
	if (listed)
		make_room(all);
	pthread_mutex_lock(&all->lock);
	r = listed && all->nr == HTTP_SESSIONS_MAX
		    ? err_set(err, -EBUSY, "%u sessions are busy: end one (DELETE)",
			      HTTP_SESSIONS_MAX)
		    : 0;
	all->nr += r == 0 && listed; // its place
	pthread_mutex_unlock(&all->lock);
	if (r < 0) {
		session_free(s);
		return r;
	}
	r = start(s, err);
	pthread_mutex_lock(&all->lock);
	if (r < 0) {
		all->nr -= listed;
	} else if (listed) {
		s->listed = true;
		s->next = all->first;
		all->first = s;
	}
	pthread_mutex_unlock(&all->lock);
	if (r < 0)
		session_free(s);
	else
		*ret = s;
	return r;
}

struct http_session *http_session_find(struct http_sessions *all, const char *id)
{
	struct http_session *s;

	pthread_mutex_lock(&all->lock);
	for (s = all->first; s && (s->ended || strcmp(s->id, id) != 0); s = s->next)
		;
	if (s)
		s->refs++;
	pthread_mutex_unlock(&all->lock);
	return s;
}

void http_session_close(struct http_session *s)
{
	bool mine;

	pthread_mutex_lock(&s->all->lock);
	mine = unlist(s);
	pthread_mutex_unlock(&s->all->lock);
	shutdown(s->fd, SHUT_RDWR);
	if (mine)
		http_session_put(s);
}

void http_sessions_expire(struct http_sessions *all)
{
	struct http_session *s;

	while ((s = take_idle(all, all->idle_ns)))
		http_session_put(s);
}

void http_sessions_destroy(struct http_sessions *all)
{
	struct http_session *s;

	if (!all)
		return;
	while ((s = take_idle(all, 0)))
		http_session_put(s);
	ASSERT(!all->first);
	pthread_mutex_destroy(&all->lock);
	free(all);
}

const char *http_session_id(const struct http_session *s)
{
	return s->id;
}

// --- Exchanges -------------------------------------------------------------------------------

// Whether what is for the one could be taken for the other.
static bool collide(const struct http_exchange *x, const struct http_exchange *y)
{
	if (x->id && y->id && json_equal(x->id, y->id))
		return true;
	return !x->id && !y->id;
}

int http_exchange_begin(struct http_session *s, const struct rpc_message *request,
	struct http_exchange **ret, struct err *err)
{
	struct http_exchange *x = calloc(1, sizeof(*x));
	const json_t *meta;
	bool known = false;

	if (!x)
		return err_errno(err, -ENOMEM, "request");
	x->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (x->wake_fd < 0) {
		free(x);
		return err_errno(err, -errno, "eventfd");
	}
	if (request) {
		meta = json_object_get(request->params, "_meta");
		x->id = json_incref(request->id);
		x->token = json_incref(json_object_get(meta, "progressToken"));
	}
	pthread_mutex_lock(&s->all->lock);
	// A session of one request sends it everything.
	x->takes_rest = !request || !s->listed;
	for (const struct http_exchange *other = s->exchanges; other; other = other->next)
		known |= collide(x, other);
	if (!known) {
		s->refs++;
		x->session = s;
		x->next = s->exchanges;
		s->exchanges = x;
		if (s->ended)
			wake(x);
	}
	pthread_mutex_unlock(&s->all->lock);
	if (known) {
		http_exchange_end(x);
		return err_set(err, -EEXIST, "%s",
			request ? "id: that of a request that is under way"
				: "the session has a stream already");
	}
	*ret = x;
	return 0;
}

void http_exchange_end(struct http_exchange *x)
{
	struct http_session *s = x ? x->session : NULL;

	if (!x)
		return;
	if (s) {
		pthread_mutex_lock(&s->all->lock);
		for (struct http_exchange **at = &s->exchanges; *at; at = &(*at)->next) {
			if (*at != x)
				continue;
			*at = x->next;
			break;
		}
		pthread_mutex_unlock(&s->all->lock);
		http_session_put(s);
	}
	for (unsigned int i = 0; i < x->nr; i++)
		free(x->lines[(x->first + i) % LINES_MAX].text);
	json_decref(x->id);
	json_decref(x->token);
	fd_close(&x->wake_fd);
	free(x);
}

int http_exchange_fd(const struct http_exchange *x)
{
	return x->wake_fd;
}

int http_exchange_take(struct http_exchange *x, struct http_line *ret)
{
	struct http_sessions *all = x->session->all;
	uint64_t drained;
	int r;

	pthread_mutex_lock(&all->lock);
	if (x->nr) {
		*ret = x->lines[x->first];
		x->first = (x->first + 1) % LINES_MAX;
		x->nr--;
		r = 1;
	} else {
		r = x->session->ended ? -EPIPE : 0;
		if (r == 0)
			(void)!read(x->wake_fd, &drained, sizeof(drained));
	}
	pthread_mutex_unlock(&all->lock);
	return r;
}
