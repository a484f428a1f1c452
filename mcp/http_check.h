// SPDX-License-Identifier: Apache-2.0
// What the headers of a request over HTTP say, which may come from a hostile page in the owner's
// browser as well as from a client. Pure; any thread.
#ifndef MAYFLY_MCP_HTTP_CHECK_H
#define MAYFLY_MCP_HTTP_CHECK_H

#include <stdbool.h>

// Each accepts NULL for a header that is not there, which never is what is asked for.

// Whether a Host header means the loopback of this host: localhost, 127.0.0.0/8 or [::1], with a
// port or without. A name that somebody else's DNS leads here is none of these.
bool http_host_is_loopback(const char *host);

// The same of an Origin header: http or https, and such a host.
bool http_origin_is_loopback(const char *origin);

// Whether it is that of the endpoint itself, over TLS, as the client names it (NULL: no name).
bool http_origin_is(const char *origin, const char *host);

// Whether an Authorization header bears the token; takes as long for a wrong one as for a right one
// of that length.
bool http_bears(const char *authorization, const char *token);

// Whether a Content-Type or Accept header names a media type ("application/json"); Accept may also
// say "*/*" or "application/*".
bool http_is_type(const char *content_type, const char *type);
bool http_accepts(const char *accept, const char *type);

// Whether a header's value is text: as it is, or in base64 as "=?base64?…?=".
bool http_says(const char *header, const char *text);

#endif
