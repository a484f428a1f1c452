// SPDX-License-Identifier: Apache-2.0
// Kept output; see the header. Any thread.
#include "mcp/outputs.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define PREFIX    "out-"
#define KEPT_MAX  64U
#define BYTES_MAX (32 * MIB)

struct kept {
	char handle[OUTPUTS_HANDLE_BYTES];
	struct buf streams[2];
};

struct outputs {
	pthread_mutex_t lock;
	struct kept kept[KEPT_MAX]; // a ring
	size_t first, nr;
	uint64_t bytes;
	bool marked;
	struct denials_mark told;
};

struct outputs *outputs_create(void)
{
	struct outputs *o = calloc(1, sizeof(*o));

	if (o)
		pthread_mutex_init(&o->lock, NULL);
	return o;
}

static uint64_t size_of(const struct kept *k)
{
	return k->streams[0].len + k->streams[1].len;
}

static void drop_first(struct outputs *o)
{
	struct kept *k = &o->kept[o->first];

	o->bytes -= size_of(k);
	buf_fini(&k->streams[0]);
	buf_fini(&k->streams[1]);
	o->first = (o->first + 1) % KEPT_MAX;
	o->nr--;
}

void outputs_destroy(struct outputs *o)
{
	if (!o)
		return;
	while (o->nr)
		drop_first(o);
	pthread_mutex_destroy(&o->lock);
	free(o);
}

bool outputs_is_handle(const char *name)
{
	return !strncmp(name, PREFIX, strlen(PREFIX));
}

int outputs_keep(struct outputs *o, struct buf streams[2], char ret_handle[OUTPUTS_HANDLE_BYTES],
	struct err *err)
{
	struct kept k = {.streams = {streams[0], streams[1]}};
	uint8_t random[16];
	size_t len;

	streams[0] = streams[1] = (struct buf){0};
	if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
		buf_fini(&k.streams[0]);
		buf_fini(&k.streams[1]);
		return err_set(err, -EIO, "getrandom");
	}
	len = (size_t)snprintf(k.handle, sizeof(k.handle), PREFIX);
	for (size_t i = 0; i < sizeof(random); i++)
		len += (size_t)snprintf(k.handle + len, sizeof(k.handle) - len, "%02x", random[i]);
	memcpy(ret_handle, k.handle, sizeof(k.handle));
	pthread_mutex_lock(&o->lock);
	while (o->nr && (o->nr == KEPT_MAX || o->bytes + size_of(&k) > BYTES_MAX))
		drop_first(o);
	o->kept[(o->first + o->nr++) % KEPT_MAX] = k;
	o->bytes += size_of(&k);
	pthread_mutex_unlock(&o->lock);
	return 0;
}

int outputs_read(struct outputs *o, const char *handle, bool is_err, uint64_t *offset,
	size_t max_bytes, struct buf *ret, uint64_t *ret_total, struct err *err)
{
	int r = -ENOENT;

	pthread_mutex_lock(&o->lock);
	for (size_t i = 0; i < o->nr && r == -ENOENT; i++) {
		const struct kept *k = &o->kept[(o->first + i) % KEPT_MAX];
		const struct buf *s = &k->streams[is_err];
		size_t from;

		if (strcmp(k->handle, handle) != 0)
			continue;
		if (*offset == UINT64_MAX)
			*offset = s->len - MIN(s->len, max_bytes);
		from = (size_t)MIN(*offset, (uint64_t)s->len);
		*ret_total = s->len;
		r = s->len > from ? buf_append(ret, s->data + from, MIN(max_bytes, s->len - from))
				  : 0;
	}
	pthread_mutex_unlock(&o->lock);
	if (r == -ENOENT)
		return err_set(err, r,
			"there is no output '%.40s' any more: run the command again, with its "
			"output in a file",
			handle);
	return r < 0 ? err_errno(err, r, "output") : 0;
}

struct denials_mark outputs_untold(struct outputs *o, struct denials_mark now)
{
	struct denials_mark told;

	pthread_mutex_lock(&o->lock);
	if (!o->marked)
		o->told = now;
	o->marked = true;
	told = o->told;
	pthread_mutex_unlock(&o->lock);
	return told;
}

void outputs_told(struct outputs *o, struct denials_mark mark)
{
	pthread_mutex_lock(&o->lock);
	o->told = mark;
	pthread_mutex_unlock(&o->lock);
}
