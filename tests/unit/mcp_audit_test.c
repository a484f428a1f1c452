// SPDX-License-Identifier: Apache-2.0
// The audit's chain under every kind of damage and with several writers; and what it leaves out.
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mcp/audit.h"
#include "mcp/redact.h"
#include "mcp/text.h"
#include "vmm/base/fd.h"

static char dir[] = "/tmp/mayfly-audit-test-XXXXXX";

static const char *at(const char *name)
{
	static char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static int clean(void **state)
{
	static const char *const names[] = {"audit.jsonl", "audit.jsonl.1", "audit.jsonl.2",
		"audit.jsonl.3", "audit.jsonl.4", "audit.lock"};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		unlink(at(names[i]));
	return 0;
}

static void append(const char *word, uint64_t file_bytes)
{
	struct err err = {0};

	if (audit_append(dir, json_pack("{s:s}", "word", word), file_bytes, &err) < 0)
		fail_msg("%s", err.msg);
}

static struct audit_summary whole(void)
{
	struct audit_summary sum;
	struct err err = {0};
	uint64_t last;

	if (audit_verify(dir, &sum, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(audit_last(dir, &last), 0);
	assert_int_equal(last, sum.last);
	return sum;
}

static void broken(const char *where)
{
	struct audit_summary sum;
	struct err err = {0};

	assert_int_equal(audit_verify(dir, &sum, &err), -EBADMSG);
	if (!strstr(err.msg, where))
		fail_msg("'%s' lacks '%s'", err.msg, where);
}

static char *contents(const char *name, size_t *ret_len)
{
	struct err err = {0};
	char *text;

	if (fd_read_file(at(name), 1 << 20, &text, ret_len, &err) < 0)
		fail_msg("%s", err.msg);
	return text;
}

static void replace(const char *name, const char *text, size_t len)
{
	CLEANUP_FD int fd = open(at(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	assert_int_equal(fd_write_all(fd, text, len), 0);
}

static void a_chain(void **state)
{
	struct audit_summary sum = whole();
	(void)state;

	assert_int_equal(sum.records, 0);
	append("one", 0);
	append("two", 0);
	append("three", 0);
	sum = whole();
	assert_int_equal(sum.records, 3);
	assert_int_equal(sum.first, 1);
	assert_int_equal(sum.last, 3);
	assert_int_equal(audit_sync(dir, NULL), 0);
}

static void damage_shows(void **state)
{
	char *text, *line, *next;
	char other[4096];
	size_t len;
	(void)state;

	append("one", 0);
	append("two", 0);
	append("three", 0);
	text = contents("audit.jsonl", &len);
	// Every byte counts, but the last newline, without which the line is not there yet.
	for (size_t i = 0; i + 1 < len; i++) {
		struct audit_summary sum;

		text[i] ^= 1;
		replace("audit.jsonl", text, len);
		assert_int_equal(audit_verify(dir, &sum, NULL), -EBADMSG);
		text[i] ^= 1;
	}
	line = strchr(text, '\n') + 1;
	next = strchr(line, '\n') + 1;
	// A line taken out, one twice, two the other way round.
	len = (size_t)snprintf(other, sizeof(other), "%.*s%s", (int)(line - text), text, next);
	replace("audit.jsonl", other, len);
	broken("audit.jsonl:2");
	len = (size_t)snprintf(other, sizeof(other), "%.*s%s", (int)(next - text), text, line);
	replace("audit.jsonl", other, len);
	broken("audit.jsonl:3");
	len = (size_t)snprintf(other, sizeof(other), "%.*s%.*s%s", (int)(next - line), line,
		(int)(line - text), text, next);
	replace("audit.jsonl", other, len);
	broken("audit.jsonl:2");
	// The first of all taken out: then the second would have to be the oldest that is kept,
	// which is for the reader to see.
	replace("audit.jsonl", line, strlen(line));
	assert_int_equal(whole().first, 2);
	free(text);
}

static void a_line_that_was_cut_is_taken_away(void **state)
{
	struct audit_summary sum;
	char *text;
	size_t len;
	(void)state;

	append("one", 0);
	append("two", 0);
	text = contents("audit.jsonl", &len);
	for (size_t cut = (size_t)(strchr(text, '\n') + 1 - text); cut < len; cut++) {
		replace("audit.jsonl", text, cut);
		assert_int_equal(whole().records, 1);
		append("again", 0);
		sum = whole();
		assert_int_equal(sum.records, 2);
	}
	// What is whole and wrong is not.
	replace("audit.jsonl", "{}\n", 3);
	assert_int_equal(audit_append(dir, json_object(), 0, NULL), -EBADMSG);
	free(text);
}

static int count(void *opaque, const json_t *record)
{
	(void)record;
	++*(unsigned int *)opaque;
	return 0;
}

static void old_files_go(void **state)
{
	struct audit_summary sum;
	unsigned int seen = 0;
	struct stat st;
	(void)state;

	for (int i = 0; i < 100; i++)
		append("a record of some length", 1000);
	sum = whole();
	assert_int_equal(sum.last, 100);
	assert_true(sum.first > 1 && sum.records == 101 - sum.first);
	assert_int_equal(stat(at("audit.jsonl.4"), &st), 0);
	assert_true(st.st_size < 2000);
	assert_int_equal(stat(at("audit.jsonl.5"), &st), -1);
	assert_int_equal(audit_each(dir, count, &seen, NULL), 0);
	assert_int_equal(seen, sum.records);
	// One in the middle that is missing shows.
	unlink(at("audit.jsonl.2"));
	broken("audit.jsonl.1:1");
}

static void *writer(void *opaque)
{
	(void)opaque;
	for (int i = 0; i < 50; i++)
		assert_int_equal(audit_append(dir, json_object(), 2000, NULL), 0);
	return NULL;
}

static void several_writers(void **state)
{
	pthread_t threads[4];
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		assert_int_equal(pthread_create(&threads[i], NULL, writer, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		pthread_join(threads[i], NULL);
	assert_int_equal(whole().last, 200);
}

static void what_cannot_be_written_fails(void **state)
{
	char *huge = malloc(AUDIT_LINE_BYTES + 1);
	(void)state;

	memset(huge, 'x', AUDIT_LINE_BYTES);
	huge[AUDIT_LINE_BYTES] = '\0';
	append("one", 0);
	assert_int_equal(audit_append(dir, json_pack("{s:s}", "x", huge), 0, NULL), -EFBIG);
	assert_int_equal(whole().records, 1);
	assert_int_equal(audit_append("/nonexistent", json_object(), 0, NULL), -ENOENT);
	free(huge);
}

// --- What is left out ------------------------------------------------------------------------

static void secrets_are_left_out(void **state)
{
	static const char *const pairs[][2] = {
		{"nothing secret here", "nothing secret here"},
		{"PASSWORD=hunter2 next", "PASSWORD=[redacted] next"},
		{"db_password: 'hunter2'", "db_password: '[redacted]'"},
		{"{\"api_key\": \"abc\"}", "{\"api_key\": \"[redacted]\"}"},
		{"curl -H 'Authorization: Bearer abc.def'",
			"curl -H 'Authorization: Bearer [redacted]'"},
		{"bearer abcdef", "bearer [redacted]"},
		{"https://me:hunter2@host/x", "https://me:[redacted]@host/x"},
		{"https://host:80/x?token=abc&y=1", "https://host:80/x?token=[redacted]&y=1"},
		{"ghp_0123456789abcdefghij", "[redacted]"},
		{"see sk-ant-0123456789abcdef.", "see [redacted]"},
		{"AKIAIOSFODNN7EXAMPLE and more", "[redacted] and more"},
		{"task-0123456789abcdef", "task-0123456789abcdef"},
		{"x\n-----BEGIN RSA PRIVATE KEY-----\nabc", "x\n[redacted]"},
		{"token", "token"},
		{"secret=", "secret="},
		{"\xff\x1b[0m", "??[0m"},
	};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
		json_t *json = redact_text(pairs[i][0], strlen(pairs[i][0]));

		assert_string_equal(json_string_value(json), pairs[i][1]);
		json_decref(json);
	}
}

static void arguments_are_bounded(void **state)
{
	json_t *args = json_pack("{s:{s:s}, s:s, s:[s,s,s,s], s:s, s:i, s:{s:s}}", "env", "HOME",
		"/x", "content", "hello", "argv", "login", "--password", "hunter2", "-v", "stdin",
		"", "n", 5, "deep", "auth_token", "x");
	json_t *out = redact_arguments(args), *big = json_array(), *small;
	char *text = json_dumps(out, JSON_COMPACT), *longest = malloc(100001);
	(void)state;

	assert_string_equal(text,
		"{\"env\":{\"HOME\":\"[redacted]\"},\"content\":{\"bytes\":5,\"sha256\":"
		"\"2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824\"},"
		"\"argv\":[\"login\",\"--password\",\"[redacted]\",\"-v\"],\"stdin\":{\"bytes\":0,"
		"\"sha256\":\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"},"
		"\"n\":5,\"deep\":{\"auth_token\":\"[redacted]\"}}");
	free(text);
	json_decref(out);
	json_decref(args);
	memset(longest, 'a', 100000);
	longest[100000] = '\0';
	for (int i = 0; i < 5000; i++)
		json_array_append_new(big, json_string(longest));
	small = json_pack("{s:o}", "argv", big);
	out = redact_arguments(small);
	text = json_dumps(out, JSON_COMPACT);
	assert_true(strlen(text) < 32768);
	free(text);
	free(longest);
	json_decref(out);
	json_decref(small);
	out = redact_arguments(NULL);
	assert_int_equal(json_object_size(out), 0);
	json_decref(out);
}

// --- Text ------------------------------------------------------------------------------------

static void bytes_there_and_back(void **state)
{
	(void)state;
	for (size_t len = 0; len < 70; len++) {
		uint8_t bytes[70];
		struct buf back = {0};
		json_t *object = json_object();

		for (size_t i = 0; i < len; i++)
			bytes[i] = (uint8_t)(0xff - 3 * i);
		assert_int_equal(text_put(object, "b", "e", bytes, len, false, true), len);
		assert_string_equal(json_string_value(json_object_get(object, "e")), "base64");
		assert_int_equal(text_get(json_object_get(object, "b"), true, &back, NULL), 0);
		assert_int_equal(back.len, len);
		if (len)
			assert_memory_equal(back.data, bytes, len);
		buf_fini(&back);
		json_decref(object);
	}
}

static void what_is_text(void **state)
{
	static const struct {
		const char *bytes;
		ssize_t len;
	} cases[] = {
		{"", 0},
		{"abc", 3},
		{"\xc3\xa9", 2},
		{"a\xc3", 1},
		{"\xe2\x82", 0},
		{"\xf0\x9f\x98\x80", 4},
		{"\xc0\x80", -1},
		{"\xed\xa0\x80", -1},
		{"\x80", -1},
		{"\xf4\x90\x80\x80", -1},
		{"\xe0\x9f\xbf", -1},
		{"\xf5", -1},
		{"\xc3(", -1},
	};
	static const char *const bad[] = {"A", "A===", "AA=", "!!!!", "AAAAA", "=AAA", "AA==AA=="};
	json_t *object = json_object(), *text;
	struct buf out = {0};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		assert_int_equal(text_len(cases[i].bytes, strlen(cases[i].bytes)), cases[i].len);
	assert_int_equal(text_len("a\0b", 3), -1);
	// A character that is cut: left for later if more follows, else it is no text.
	assert_int_equal(text_put(object, "b", "e", "a\xc3", 2, true, false), 1);
	assert_int_equal(text_put(object, "b", "e", "a\xc3", 2, false, false), 2);
	assert_string_equal(json_string_value(json_object_get(object, "e")), "base64");
	json_decref(object);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		text = json_string(bad[i]);
		if (text_get(text, true, &out, NULL) != -EINVAL)
			fail_msg("%s", bad[i]);
		json_decref(text);
		buf_fini(&out);
	}
}

static int has_run(void *opaque, const json_t *record)
{
	(void)opaque;
	assert_string_equal(json_string_value(json_object_get(record, "run")), "0123");
	return 0;
}

// The machine's folder, and the folder in it that has the log of requests.
static void all_logs_have_the_run(void **state)
{
	struct err err = {0};
	char egress[256];

	(void)state;
	snprintf(egress, sizeof(egress), "%s", at("egress"));
	assert_int_equal(mkdir(egress, 0700), 0);
	assert_int_equal(mkdir(at("work"), 0700), 0);
	assert_int_equal(symlink("0123", at("work/run")), 0);
	append("one", 0);
	assert_int_equal(audit_append(egress, json_pack("{s:s}", "word", "two"), 0, &err), 0);
	assert_int_equal(audit_each(dir, has_run, NULL, &err), 0);
	assert_int_equal(audit_each(egress, has_run, NULL, &err), 0);
	assert_int_equal(unlink(at("work/run")), 0);
	assert_int_equal(rmdir(at("work")), 0);
	assert_int_equal(unlink(at("egress/audit.jsonl")), 0);
	assert_int_equal(unlink(at("egress/audit.lock")), 0);
	assert_int_equal(rmdir(egress), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_chain, clean),
		cmocka_unit_test_setup(damage_shows, clean),
		cmocka_unit_test_setup(a_line_that_was_cut_is_taken_away, clean),
		cmocka_unit_test_setup(old_files_go, clean),
		cmocka_unit_test_setup(several_writers, clean),
		cmocka_unit_test_setup_teardown(what_cannot_be_written_fails, clean, clean),
		cmocka_unit_test(secrets_are_left_out),
		cmocka_unit_test(arguments_are_bounded),
		cmocka_unit_test(bytes_there_and_back),
		cmocka_unit_test_setup(all_logs_have_the_run, clean),
		cmocka_unit_test(what_is_text),
	};
	int status;

	if (!mkdtemp(dir))
		return 1;
	status = cmocka_run_group_tests(tests, NULL, NULL);
	rmdir(dir);
	return status;
}
