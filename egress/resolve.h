// SPDX-License-Identifier: Apache-2.0
// Names to addresses, by the host's /etc/hosts and the servers of its /etc/resolv.conf, which are
// read once: afterwards no file is needed. One thread an object.
#ifndef MAYFLY_EGRESS_RESOLVE_H
#define MAYFLY_EGRESS_RESOLVE_H

#include "egress/address.h"
#include "vmm/base/err.h"

#define RESOLVE_ADDRESSES_MAX 16U

struct resolve;

// The host's own names. Owned; may be shared by many.
struct resolve_hosts {
	char *text;
};

// A file that is not there is an empty one.
int resolve_hosts_read(const char *path, struct resolve_hosts *ret, struct err *err);
void resolve_hosts_fini(struct resolve_hosts *hosts);

// Whether its lines name it: how many addresses, up to RESOLVE_ADDRESSES_MAX.
unsigned int resolve_hosts_find(const struct resolve_hosts *hosts, const char *name,
	struct address ret[RESOLVE_ADDRESSES_MAX]);

int resolve_create(struct resolve **ret, struct err *err);
void resolve_destroy(struct resolve *resolve); // NULL too

// The addresses of the answer of a name server; of AF_INET or AF_INET6. Appends to ret, of
// which nr are there, and returns how many there are then; -EBADMSG for what is no answer.
int resolve_answer(const uint8_t *answer, size_t len, int family,
	struct address ret[RESOLVE_ADDRESSES_MAX], unsigned int nr);

// Takes as long as the servers do, at most some 20 s. How many addresses, at least one; -ENOENT for
// a name that has none.
int resolve_name(struct resolve *resolve, const struct resolve_hosts *hosts, const char *name,
	struct address ret[RESOLVE_ADDRESSES_MAX], struct err *err);

#endif
