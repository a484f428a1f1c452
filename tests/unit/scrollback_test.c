// SPDX-License-Identifier: Apache-2.0
// cli/scrollback: what is shown again, and what is not, whatever the pieces it comes in.
#include "tests/support/test.h"

#include <stdlib.h>
#include <string.h>

#include "cli/scrollback.h"
#include "vmm/base/util.h"

#define E "\033"

static const struct row {
	const char *in, *out;
} rows[] = {
	{"plain\r\ntext\t\a\b", "plain\r\ntext\t\a\b"},
	{"gr\xc3\xbc\xc3\x9f \xc2\xa9 \xe2\x82\xac", "gr\xc3\xbc\xc3\x9f \xc2\xa9 \xe2\x82\xac"},
	// What draws, moves and sets the usual modes.
	{E "[1;31mred" E "[m", E "[1;31mred" E "[m"},
	{E "[H" E "[2J" E "[10;5H" E "[K" E "[3A", E "[H" E "[2J" E "[10;5H" E "[K" E "[3A"},
	{E "[?1049h" E "[?25l" E "[?2004h", E "[?1049h" E "[?25l" E "[?2004h"},
	{E "(B" E "7" E "8" E "=" E ">" E "M", E "(B" E "7" E "8" E "=" E ">" E "M"},
	{E "[2 q" E "[!p" E "[1;20r", E "[2 q" E "[!p" E "[1;20r"},
	// What the terminal would answer.
	{"a" E "[6nb", "ab"},
	{"a" E "[?6nb" E "[5n", "ab"},
	{"a" E "[cb" E "[>c" E "[=c" E "[0c" E "Z", "ab"},
	{"a" E "[18tb" E "[21t", "ab"},
	{"a" E "[?2026$pb" E "[4$p", "ab"},
	{"a" E "[>qb" E "[?u" E "[x", "ab"},
	{"a\005b", "ab"},
	{"a" E "]11;?\ab" E "]10;?" E "\\c", "abc"},
	{"a" E "P+q544e" E "\\b" E "P$qm" E "\\c", "abc"},
	{"a" E "_Gi=1,a=q;AAAA" E "\\b" E "^x" E "\\" E "Xy" E "\\c", "abc"},
	{"a" E "[5ib", "ab"}, // nor what prints
	{"a\xc2\x9b"
	 "6nb",
		"a6nb"}, // ESC [ as one character
	// Nothing that is cut or broken becomes a question.
	{"a" E "[6" E "[1mb", "a" E "[1mb"},
	{"a\xc2" E "[6nb", "ab"},
	{"a" E E "[6nb", "ab"},
	{"a" E "[\n6nb", "a6nb"},
	{"a" E "]0;title" E "[6nb", "ab"},
	{"a" E "[6", "a"},
	{"a" E "[1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1mb", "ab"},
};

static size_t filter(
	enum scrollback_state state, const char *in, size_t len, size_t piece, uint8_t *out)
{
	struct scrollback s = {.state = state};
	size_t n = 0;

	for (size_t at = 0; at < len; at += piece)
		n += scrollback_filter(&s, (const uint8_t *)in + at, MIN(piece, len - at), out + n);
	return n;
}

static void test_rows(void **state)
{
	uint8_t out[512];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		for (size_t piece = 1; piece <= strlen(rows[i].in); piece++) {
			size_t n = filter(
				SCROLLBACK_TEXT, rows[i].in, strlen(rows[i].in), piece, out);

			assert_int_equal(n, strlen(rows[i].out));
			assert_memory_equal(out, rows[i].out, n);
		}
	}
}

static void test_missing_beginning(void **state)
{
	static const struct {
		const char *in, *out;
	} cut[] = {
		{";6n rest of a line\nwhole" E "[6n", "whole"},
		{";6n rest of a line" E "[6n\nwhole", "\nwhole"},
		{"rest, and no newline ever" E "[5;5Hplaced", E "[5;5Hplaced"},
		{"rest of a title" E "\\shown", E "\\shown"},
	};
	uint8_t out[256];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cut); i++) {
		size_t n = filter(SCROLLBACK_LINE, cut[i].in, strlen(cut[i].in), 3, out);

		assert_int_equal(n, strlen(cut[i].out));
		assert_memory_equal(out, cut[i].out, n);
	}
}

// Bytes of a terminal's language at random: no question is ever among what is shown, and it fits.
static void test_random(void **state)
{
	static const char bytes[] = E E E "[[[[?>?$;16ncpqtx]P\\\a\005\xc2\x9bm !\n";
	uint8_t in[200], out[SCROLLBACK_ROOM(sizeof(in))];

	(void)state;
	srandom(1);
	for (int round = 0; round < 20000; round++) {
		struct scrollback s = {0};
		size_t n;

		for (size_t i = 0; i < sizeof(in); i++)
			in[i] = (uint8_t)bytes[(size_t)random() % (sizeof(bytes) - 1)];
		n = scrollback_filter(&s, in, sizeof(in), out);
		assert_true(n <= sizeof(in));
		for (size_t i = 0; i + 1 < n; i++) {
			assert_int_not_equal(out[i], 5);
			assert_false(out[i] == 0xc2 && out[i + 1] == 0x9b);
			if (out[i] != 0x1b)
				continue;
			assert_int_not_equal(out[i + 1], ']');
			assert_int_not_equal(out[i + 1], 'P');
			if (out[i + 1] != '[')
				continue;
			for (i += 2; i < n && (out[i] < 0x40 || out[i] > 0x7e); i++)
				;
			assert_true(i < n); // whole
			assert_null(strchr("cntx", out[i]));
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rows),
		cmocka_unit_test(test_missing_beginning),
		cmocka_unit_test(test_random),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
