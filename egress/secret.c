// SPDX-License-Identifier: Apache-2.0
// Credentials; see the header. Pure; any thread.
#include "egress/secret.h"

#include "vmm/base/memory_lack.h"
#include <errno.h>
#include <jansson.h>
#include <nettle/base64.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// What the proxy writes, or what would change where a request ends.
static bool is_ours(const char *header)
{
	static const char *const names[] = {"host", "connection", "content-length",
		"transfer-encoding", "te", "trailer", "upgrade", "expect", "accept-encoding",
		"range", "proxy-authorization"};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (!strcasecmp(header, names[i]))
			return true;
	return false;
}

static bool is_word(const char *text, const char *more)
{
	for (const char *at = text; *at; at++)
		if (!((*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
			    (*at >= '0' && *at <= '9') || strchr(more, *at)))
			return false;
	return text[0] != '\0';
}

int secret_set(struct secret *ret, const char *name, const char *host, const char *header,
	const char *value, struct err *err)
{
	struct secret s = {.name = ""};
	const size_t len = strlen(value);
	int r;

	if (strlen(name) >= sizeof(s.name) || !is_word(name, "._-"))
		return err_set(
			err, -EINVAL, "'%.60s' is no name: letters, digits, '.', '_', '-'", name);
	r = allow_host_parse(host, strlen(host), &s.host, err);
	if (r < 0)
		return r;
	// No certificate of the public kind is for an address.
	if (s.host.literal)
		return err_set(err, -EINVAL, "%.60s: a credential is for a host with a name", host);
	if (strlen(header) >= sizeof(s.header) || !is_word(header, "-_") || is_ours(header))
		return err_set(err, -EINVAL, "'%.60s' is no header that can be set", header);
	if (len < SECRET_VALUE_MIN || len >= sizeof(s.value))
		return err_set(err, -EINVAL, "the value of '%s' has %zu bytes: want %d to %d", name,
			len, SECRET_VALUE_MIN, SECRET_VALUE_BYTES - 1);
	for (size_t i = 0; i < len; i++)
		if (value[i] < ' ' || value[i] > '~')
			return err_set(err, -EINVAL,
				"the value of '%s' has a character that no header may have", name);
	if (value[0] == ' ' || value[len - 1] == ' ')
		return err_set(err, -EINVAL, "the value of '%s' begins or ends with a space", name);
	memcpy(s.name, name, strlen(name) + 1);
	memcpy(s.header, header, strlen(header) + 1);
	memcpy(s.value, value, len + 1);
	*ret = s;
	return 0;
}

static const char *text_of(const json_t *json, const char *key)
{
	const char *text = json_string_value(json_object_get(json, key));

	return text ? text : "";
}

int secrets_parse(const char *text, size_t len, struct secrets *ret, struct err *err)
{
	struct secrets secrets = {.nr = 0};
	json_t *list, *at;
	size_t i;
	int r = 0;

	if (len == 0) {
		*ret = secrets;
		return 0;
	}
	list = json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL);
	if (!json_is_array(list) || json_array_size(list) > SECRETS_MAX)
		r = err_set(err, -EBADMSG, "the file of credentials is damaged");
	json_array_foreach(list, i, at)
	{
		if (r == 0)
			r = secret_set(&secrets.all[i], text_of(at, "name"), text_of(at, "host"),
				text_of(at, "header"), text_of(at, "value"), err);
		secrets.nr = (unsigned int)i + 1;
	}
	json_decref(list);
	if (r == 0)
		*ret = secrets;
	explicit_bzero(&secrets, sizeof(secrets));
	return r;
}

char *secrets_print(const struct secrets *secrets)
{
	const unsigned int lacks = memory_lacks();
	json_t *list = json_array();
	char *text;

	for (unsigned int i = 0; i < secrets->nr; i++) {
		const struct secret *s = &secrets->all[i];

		if (json_array_append_new(list,
			    json_pack("{s:s, s:s, s:s, s:s}", "name", s->name, "host", s->host.name,
				    "header", s->header, "value", s->value)) < 0) {
			json_decref(list);
			return NULL;
		}
	}
	text = json_dumps(list, JSON_INDENT(2));
	json_decref(list);
	// It leaves out what there is no memory for.
	if (text && memory_lacks() != lacks) {
		explicit_bzero(text, strlen(text));
		free(text);
		return NULL;
	}
	return text;
}

const struct secret *secrets_of(const struct secrets *secrets, const struct allow_host *host,
	unsigned int from, unsigned int *ret_next)
{
	for (unsigned int i = from; i < secrets->nr; i++)
		if (!host->literal && !strcmp(secrets->all[i].host.name, host->name)) {
			*ret_next = i + 1;
			return &secrets->all[i];
		}
	return NULL;
}

// --- What comes back -------------------------------------------------------------------------

static int add_pattern(struct redactor *r, const char *text, size_t len)
{
	ASSERT(r->nr < REDACTOR_PATTERNS_MAX);
	if (len < SECRET_VALUE_MIN)
		return 0;
	r->patterns[r->nr].text = strndup(text, len);
	r->patterns[r->nr].len = len;
	return r->patterns[r->nr++].text ? 0 : -ENOMEM;
}

// Without the last group, which depends on what follows.
static int add_base64(struct redactor *r, const char *text, size_t len)
{
	char encoded[BASE64_ENCODE_RAW_LENGTH(SECRET_VALUE_BYTES) + 1];

	base64_encode_raw(encoded, len, (const uint8_t *)text);
	return add_pattern(r, encoded, len / 3 * 4);
}

int redactor_init(struct redactor *r, const struct secrets *secrets, const struct allow_host *host)
{
	const struct secret *s;
	unsigned int i = 0;
	int rc = 0;

	*r = (struct redactor){.nr = 0};
	while (rc == 0 && (s = secrets_of(secrets, host, i, &i))) {
		const char *space = strrchr(s->value, ' ');
		const char *word = space ? space + 1 : s->value;

		rc = add_pattern(r, s->value, strlen(s->value));
		if (rc == 0)
			rc = add_base64(r, s->value, strlen(s->value));
		if (rc == 0 && space)
			rc = add_pattern(r, word, strlen(word));
		if (rc == 0 && space)
			rc = add_base64(r, word, strlen(word));
	}
	return rc;
}

void redactor_fini(struct redactor *r)
{
	for (unsigned int i = 0; i < r->nr; i++)
		free(r->patterns[i].text);
	buf_fini(&r->held);
	*r = (struct redactor){.nr = 0};
}

// How many bytes at the end are the beginning of a pattern.
static size_t unfinished(const struct redactor *r, const char *data, size_t len)
{
	size_t most = 0;

	for (unsigned int i = 0; i < r->nr; i++)
		for (size_t n = MIN(len, r->patterns[i].len - 1); n > most; n--)
			if (!memcmp(data + len - n, r->patterns[i].text, n)) {
				most = n;
				break;
			}
	return most;
}

int redactor_feed(struct redactor *r, const void *data, size_t len, struct buf *out)
{
	size_t keep;

	if (buf_append(&r->held, data, len) < 0)
		return -ENOMEM;
	for (unsigned int i = 0; i < r->nr && r->held.len; i++) {
		uint8_t *at = r->held.data, *end = at + r->held.len;

		while ((at = memmem(
				at, (size_t)(end - at), r->patterns[i].text, r->patterns[i].len))) {
			memset(at, '*', r->patterns[i].len);
			at += r->patterns[i].len;
		}
	}
	keep = r->held.len ? unfinished(r, (const char *)r->held.data, r->held.len) : 0;
	buf_append(out, r->held.data, r->held.len - keep);
	if (keep)
		memmove(r->held.data, r->held.data + r->held.len - keep, keep);
	r->held.len = keep;
	return buf_error(out);
}

int redactor_end(struct redactor *r, struct buf *out)
{
	buf_append(out, r->held.data, r->held.len);
	r->held.len = 0;
	return buf_error(out);
}
