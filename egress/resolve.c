// SPDX-License-Identifier: Apache-2.0
// Names to addresses; see the header. No getaddrinfo(): a static program would load the host's
// modules for it.
// Brings a MIN and a MAX of its own.
#include <resolv.h>
#undef MIN
#undef MAX

#include "egress/resolve.h"

#include <arpa/nameser.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "vmm/base/fd.h"

#define HOSTS_BYTES  (1U << 20)
#define ANSWER_BYTES 4096
#define TRIES        2
#define TRY_SECONDS  3

struct resolve {
	struct __res_state state;
};

int resolve_hosts_read(const char *path, struct resolve_hosts *ret, struct err *err)
{
	struct err why = {0};
	size_t len;
	int r = fd_read_file(path, HOSTS_BYTES, &ret->text, &len, &why);

	if (r == -ENOENT) {
		ret->text = strdup("");
		r = ret->text ? 0 : -ENOMEM;
	}
	return r < 0 ? err_set(err, r, "%s", why.msg) : 0;
}

void resolve_hosts_fini(struct resolve_hosts *hosts)
{
	free(hosts->text);
	hosts->text = NULL;
}

unsigned int resolve_hosts_find(const struct resolve_hosts *hosts, const char *name,
	struct address ret[RESOLVE_ADDRESSES_MAX])
{
	static const char blanks[] = " \t\r";
	unsigned int nr = 0;

	for (const char *line = hosts->text; *line && nr < RESOLVE_ADDRESSES_MAX;) {
		const char *next = strchrnul(line, '\n');
		const char *end = line + strcspn(line, "#\n"), *at = line;
		struct address address = {0};
		bool first = true;

		for (size_t len;; at += len) {
			char word[256];

			at += strspn(at, blanks);
			len = at < end ? strcspn(at, " \t\r\n#") : 0;
			if (len == 0 || len >= sizeof(word))
				break;
			memcpy(word, at, len);
			word[len] = '\0';
			if (first && !address_parse(word, &address))
				break;
			if (!first && !strcasecmp(word, name)) {
				ret[nr++] = address;
				break;
			}
			first = false;
		}
		line = *next ? next + 1 : next;
	}
	return nr;
}

int resolve_create(struct resolve **ret, struct err *err)
{
	struct resolve *resolve = calloc(1, sizeof(*resolve));

	if (!resolve)
		return err_errno(err, -ENOMEM, "resolver");
	if (res_ninit(&resolve->state) != 0) {
		free(resolve);
		return err_set(err, -EIO, "/etc/resolv.conf cannot be read");
	}
	resolve->state.retry = TRIES;
	resolve->state.retrans = TRY_SECONDS;
	*ret = resolve;
	return 0;
}

void resolve_destroy(struct resolve *resolve)
{
	if (resolve)
		res_nclose(&resolve->state);
	free(resolve);
}

int resolve_answer(const uint8_t *answer, size_t len, int family,
	struct address ret[RESOLVE_ADDRESSES_MAX], unsigned int nr)
{
	ns_msg msg;
	ns_rr rr;

	if (ns_initparse(answer, (int)len, &msg) < 0)
		return -EBADMSG;
	for (int i = 0; i < ns_msg_count(msg, ns_s_an) && nr < RESOLVE_ADDRESSES_MAX; i++) {
		struct address address = {.family = family};
		const size_t bytes = family == AF_INET ? 4 : 16;

		if (ns_parserr(&msg, ns_s_an, i, &rr) < 0)
			return -EBADMSG;
		if (ns_rr_type(rr) != (family == AF_INET ? ns_t_a : ns_t_aaaa) ||
			ns_rr_class(rr) != ns_c_in || ns_rr_rdlen(rr) != bytes)
			continue;
		memcpy(&address.v6, ns_rr_rdata(rr), bytes);
		ret[nr++] = address;
	}
	return (int)nr;
}

static int ask(struct resolve *resolve, const char *name, int family,
	struct address ret[RESOLVE_ADDRESSES_MAX], unsigned int nr)
{
	uint8_t answer[ANSWER_BYTES];
	int len = res_nquery(&resolve->state, name, ns_c_in, family == AF_INET ? ns_t_a : ns_t_aaaa,
		answer, sizeof(answer));

	if (len < 0)
		return (int)nr;
	len = resolve_answer(answer, MIN((size_t)len, sizeof(answer)), family, ret, nr);
	return len < 0 ? (int)nr : len;
}

int resolve_name(struct resolve *resolve, const struct resolve_hosts *hosts, const char *name,
	struct address ret[RESOLVE_ADDRESSES_MAX], struct err *err)
{
	unsigned int nr = resolve_hosts_find(hosts, name, ret);

	if (nr == 0) {
		nr = (unsigned int)ask(resolve, name, AF_INET, ret, 0);
		nr = (unsigned int)ask(resolve, name, AF_INET6, ret, nr);
	}
	if (nr == 0)
		return err_set(err, -ENOENT, "the name has no address");
	return (int)nr;
}
