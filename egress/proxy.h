// SPDX-License-Identifier: Apache-2.0
// A machine's way out: takes connections that come out of the guest, reads what they want, and
// makes those that the list admits. It resolves names itself, connects to the very address that it
// has judged, and reports each request before it does anything for it. One process a machine, that
// may do nothing else (see confine.h): its main thread, and one a connection.
//
// The channel is a socket of packets. What comes in is 'L' and a list as allow_parse() reads it, in
// force at once: connections that it no longer admits are cut, and then {"event": "applied", "cut":
// N} goes out. Requests go out as {"event": "egress", "decision": "admitted" | "denied" | "failed"
// | "ended", ...}; of a credential no
// more than its name. The end of the channel is the end of it all.
#ifndef MAYFLY_EGRESS_PROXY_H
#define MAYFLY_EGRESS_PROXY_H

#include "egress/resolve.h"
#include "egress/secret.h"
#include "vmm/base/err.h"

#define PROXY_CONNECTIONS_MAX 64U
#define PROXY_PACKET_BYTES    8192U

struct proxy_params {
	int listen_fd; // non-blocking; the caller's
	int channel_fd; // SOCK_SEQPACKET; the caller's
	const char *hosts_path; // as /etc/hosts
	// What is put into requests for http://HOST, which then go to HOST over TLS; the caller's.
	// With any, the certificates to verify the servers by are read.
	const struct secrets *secrets; // not NULL
	const char *authorities_path;
	// Called when all files have been read, before the first byte of anybody's is.
	int (*confine)(void *opaque, struct err *err);
	void *opaque;
};

// Serves until the channel ends (0), or a negative errno.
int proxy_run(const struct proxy_params *params, struct err *err);

#endif
