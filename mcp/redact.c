// SPDX-License-Identifier: Apache-2.0
// What is left out of an audit; see the header. Pure; any thread.
#include "mcp/redact.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include <nettle/sha2.h>

#include "mcp/text.h"
#include "vmm/base/buf.h"

#define REDACTED     "[redacted]"
#define TOKEN_MIN    12U // of a token behind its prefix
#define DEPTH_MAX    8U
#define ELEMENTS_MAX 128U
#define TRUNCATED    "[...]"

void redact_digest(const void *bytes, size_t len, char ret[65])
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	struct sha256_ctx ctx;

	sha256_init(&ctx);
	sha256_update(&ctx, len, bytes);
	sha256_digest(&ctx, sizeof(digest), digest);
	for (size_t i = 0; i < sizeof(digest); i++)
		snprintf(ret + 2 * i, 3, "%02x", digest[i]);
}

// --- What looks like a secret ----------------------------------------------------------------

static bool starts(const char *text, size_t len, const char *with)
{
	size_t n = strlen(with);

	return len >= n && strncasecmp(text, with, n) == 0;
}

static bool is_token_char(char c)
{
	return isalnum((unsigned char)c) || strchr("_-.+/=~", c);
}

static size_t token_len(const char *text, size_t len)
{
	size_t n = 0;

	while (n < len && text[n] && is_token_char(text[n]))
		n++;
	return n;
}

// The length of a token that says itself that it is one, 0 if none stands here.
static size_t known_token(const char *text, size_t len)
{
	static const char *const prefixes[] = {"ghp_", "gho_", "ghs_", "ghu_", "ghr_",
		"github_pat_", "glpat-", "sk-", "sk_live_", "rk_live_", "xoxb-", "xoxp-", "xoxa-",
		"AKIA", "ASIA", "AIza", "npm_", "pypi-", "hf_", "eyJ", "dop_v1_", "SG."};

	for (size_t i = 0; i < ARRAY_SIZE(prefixes); i++) {
		size_t n = strlen(prefixes[i]);

		if (len >= n && !strncmp(text, prefixes[i], n) &&
			token_len(text + n, len - n) >= TOKEN_MIN)
			return n + token_len(text + n, len - n);
	}
	return 0;
}

static bool is_secret_name(const char *name, size_t len)
{
	static const char *const words[] = {"password", "passwd", "passphrase", "secret", "token",
		"api_key", "apikey", "api-key", "access_key", "access-key", "private_key",
		"private-key", "credential", "authorization", "cookie"};

	for (size_t at = 0; at < len; at++)
		for (size_t i = 0; i < ARRAY_SIZE(words); i++)
			if (starts(name + at, len - at, words[i]))
				return true;
	return false;
}

static bool is_name_char(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '-';
}

// What stands between a name and its value: = or :, blanks and quotes around it. 0: nothing.
static size_t separator(const char *text, size_t len)
{
	size_t n = 0;
	bool seen = false;

	while (n < len && text[n] && strchr("=: \t\"'", text[n])) {
		seen |= text[n] == '=' || text[n] == ':';
		n++;
	}
	return seen ? n : 0;
}

static size_t value_len(const char *text, size_t len)
{
	size_t n = 0;

	while (n < len && text[n] && !strchr(" \t\r\n\"'&;,", text[n]))
		n++;
	return n;
}

// A name with a secret behind it: how much of it is shown, and how much is not.
static bool named_secret(const char *text, size_t len, size_t *ret_show, size_t *ret_hide)
{
	size_t name = 0, gap, scheme;

	while (name < len && is_name_char(text[name]))
		name++;
	if (starts(text, len, "bearer ") || starts(text, len, "basic ")) {
		*ret_show = name + 1;
	} else if (name + 3 < len && !strncmp(text + name, "://", 3)) {
		const char *at = text + name + 3; // SCHEME://USER:PASSWORD@HOST
		size_t n = value_len(at, len - name - 3);
		const char *host = memchr(at, '@', n), *colon = memchr(at, ':', n);

		if (!host || !colon || colon > host)
			return false;
		*ret_show = (size_t)(colon + 1 - text);
		*ret_hide = (size_t)(host - colon) - 1;
		return true;
	} else {
		gap = separator(text + name, len - name);
		if (!gap || !is_secret_name(text, name))
			return false;
		*ret_show = name + gap;
		for (size_t i = 0; i < 2; i++) {
			scheme = (size_t[]){7, 6}[i];
			if (starts(text + *ret_show, len - *ret_show, i ? "basic " : "bearer ")) {
				*ret_show += scheme;
				break;
			}
		}
	}
	*ret_hide = value_len(text + *ret_show, len - *ret_show);
	return *ret_hide > 0;
}

static void redact(struct buf *out, const char *text, size_t len)
{
	size_t show, hide;

	for (size_t i = 0; i < len;) {
		bool begins = i == 0 || !is_name_char(text[i - 1]);

		if (starts(text + i, len - i, "-----BEGIN ") &&
			memmem(text + i, MIN(len - i, (size_t)64), "PRIVATE KEY", 11)) {
			buf_append(out, REDACTED, strlen(REDACTED));
			return;
		}
		hide = begins ? known_token(text + i, len - i) : 0;
		show = 0;
		if (!hide && (!begins || !named_secret(text + i, len - i, &show, &hide))) {
			buf_append(out, text + i++, 1);
			continue;
		}
		buf_append(out, text + i, show);
		buf_append(out, REDACTED, strlen(REDACTED));
		i += show + hide;
	}
}

json_t *redact_text(const char *text, size_t len)
{
	// Further than what is shown, so that no secret is cut before it is seen to be one.
	size_t n = MIN(len, (size_t)2 * REDACT_TEXT_BYTES), shown;
	struct buf out = {0};
	json_t *json;
	bool cut_off;

	redact(&out, text, n);
	shown = MIN(out.len, (size_t)REDACT_TEXT_BYTES);
	cut_off = n < len || shown < out.len;
	json = text_printable(out.data, shown);
	buf_fini(&out);
	if (cut_off && json) {
		char more[64];
		json_t *cut = NULL;

		snprintf(more, sizeof(more), TRUNCATED " (%zu bytes)", len);
		cut = json_sprintf("%s%s", json_string_value(json), more);
		json_decref(json);
		json = cut;
	}
	return json;
}

// --- Arguments -------------------------------------------------------------------------------

static json_t *digest_of(const json_t *string)
{
	char hex[65];

	redact_digest(json_string_value(string), json_string_length(string), hex);
	return json_pack(
		"{s:I, s:s}", "bytes", (json_int_t)json_string_length(string), "sha256", hex);
}

struct walk {
	size_t left; // bytes
};

static json_t *copy(struct walk *w, const json_t *value, const char *key, unsigned int depth);

static json_t *copy_text(struct walk *w, const json_t *value)
{
	size_t len = json_string_length(value);

	if (MIN(len, (size_t)REDACT_TEXT_BYTES) > w->left)
		return json_string(TRUNCATED);
	w->left -= MIN(len, (size_t)REDACT_TEXT_BYTES);
	return redact_text(json_string_value(value), len);
}

static bool is_secret_option(const json_t *word)
{
	const char *text = json_string_value(word);

	return text && text[0] == '-' && !strpbrk(text, "= ") && is_secret_name(text, strlen(text));
}

static json_t *copy_array(struct walk *w, const json_t *value, unsigned int depth)
{
	json_t *out = json_array(), *item;
	bool hide = false;
	size_t i;

	json_array_foreach(value, i, item)
	{
		if (i == ELEMENTS_MAX) {
			json_array_append_new(out, json_string(TRUNCATED));
			break;
		}
		json_array_append_new(
			out, hide ? json_string(REDACTED) : copy(w, item, NULL, depth + 1));
		hide = !hide && is_secret_option(item);
	}
	return out;
}

static json_t *copy_object(
	struct walk *w, const json_t *value, const char *name, unsigned int depth)
{
	json_t *out = json_object(), *member;
	const char *key;
	size_t i = 0;

	json_object_foreach((json_t *)value, key, member)
	{
		size_t len = strlen(key);

		if (i++ == ELEMENTS_MAX || len > w->left)
			break;
		w->left -= len;
		if ((name && !strcmp(name, "env")) || is_secret_name(key, len))
			json_object_set_new(out, key, json_string(REDACTED));
		else
			json_object_set_new(out, key, copy(w, member, key, depth + 1));
	}
	return out;
}

static json_t *copy(struct walk *w, const json_t *value, const char *key, unsigned int depth)
{
	static const char *const contents[] = {"content", "stdin", "data", "old_text", "new_text"};

	for (size_t i = 0; key && json_is_string(value) && i < ARRAY_SIZE(contents); i++)
		if (!strcmp(key, contents[i]))
			return digest_of(value);
	if (depth > DEPTH_MAX)
		return json_string(TRUNCATED);
	if (json_is_string(value))
		return copy_text(w, value);
	if (json_is_array(value))
		return copy_array(w, value, depth);
	if (json_is_object(value))
		return copy_object(w, value, key, depth);
	return json_deep_copy(value);
}

json_t *redact_arguments(const json_t *arguments)
{
	struct walk w = {.left = REDACT_ALL_BYTES};

	return arguments ? copy(&w, arguments, NULL, 0) : json_object();
}
