// SPDX-License-Identifier: Apache-2.0
// The replay's page: what came from a guest cannot get out of its place, and is still there.
#include "tests/support/test.h"

#include <nettle/base64.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/replay_page.h"
#include "vmm/base/util.h"

static char *make(const char *machine, const char *const *words, size_t nr)
{
	char *text = NULL;
	size_t len = 0;
	struct replay_page page = {.file = open_memstream(&text, &len)};

	assert_non_null(page.file);
	replay_page_begin(&page, machine);
	for (size_t i = 0; i < nr; i++) {
		json_t *record = json_pack("{s:s, s:s}", "event", "result", "stdout", words[i]);

		assert_non_null(record);
		replay_page_add(&page, record);
		json_decref(record);
	}
	replay_page_end(&page);
	assert_int_equal(ferror(page.file), 0);
	fclose(page.file);
	return text;
}

static size_t count(const char *text, const char *part)
{
	size_t n = 0;

	for (; (text = strstr(text, part)); text += strlen(part))
		n++;
	return n;
}

static void a_guest_stays_in_its_place(void **state)
{
	static const char *const words[] = {"</script><script>alert(1)</script>", "<!--<script>",
		"]]>&amp;&lt;", "\342\200\250\303\251\360\237\230\200", "\"\\\x01\x7f", ""};
	static const char open[] = "<script type=\"application/json\" id=\"records\">";
	char *text = make("a<b>", words, ARRAY_SIZE(words));
	char *data = strstr(text, open), *end;
	json_t *records;
	(void)state;

	// Two script elements, whatever the guest said; and it never says a letter that HTML knows.
	assert_int_equal(count(text, "<script"), 2);
	assert_int_equal(count(text, "</script"), 2);
	assert_int_equal(count(text, "<!--"), 0);
	assert_int_equal(count(text, "a<b>"), 0);
	assert_int_equal(count(text, "a&#60;b&#62;"), 2);
	assert_non_null(data);
	data += strlen(open);
	end = strstr(data, "</script>");
	assert_non_null(end);
	for (const char *at = data; at < end; at++)
		assert_true(*at > 0 && !strchr("<>&", *at));
	records = json_loadb(data, (size_t)(end - data), 0, NULL);
	assert_int_equal(json_array_size(records), ARRAY_SIZE(words));
	for (size_t i = 0; i < ARRAY_SIZE(words); i++)
		assert_string_equal(
			json_string_value(json_object_get(json_array_get(records, i), "stdout")),
			words[i]);
	json_decref(records);
	free(text);
}

// Whether the policy names what is in the last such element.
static bool is_allowed(const char *text, const char *begin, const char *end)
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	char code[BASE64_ENCODE_RAW_LENGTH(SHA256_DIGEST_SIZE) + 1] = "";
	const char *from = text, *next;
	struct sha256_ctx sha;

	while ((next = strstr(from, begin)))
		from = next + strlen(begin);
	sha256_init(&sha);
	sha256_update(&sha, (size_t)(strstr(from, end) - from), (const uint8_t *)from);
	sha256_digest(&sha, sizeof(digest), digest);
	base64_encode_raw(code, sizeof(digest), digest);
	return strstr(text, code);
}

static void it_loads_nothing(void **state)
{
	char *text = make("box", NULL, 0);
	(void)state;

	assert_non_null(strstr(text, "Content-Security-Policy\" content=\"default-src 'none';"));
	assert_int_equal(count(text, "'sha256-"), 2);
	assert_true(is_allowed(text, "<script>", "</script>"));
	assert_true(is_allowed(text, "<style>", "</style>"));
	assert_null(strstr(text, "unsafe"));
	assert_null(strstr(text, "http:"));
	assert_null(strstr(text, "https:"));
	assert_null(strstr(text, "src="));
	assert_null(strstr(text, "innerHTML"));
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_guest_stays_in_its_place),
		cmocka_unit_test(it_loads_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
