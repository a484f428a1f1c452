// SPDX-License-Identifier: Apache-2.0
// Lists of findings; see the header. One thread.
#include "cli/report.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>

#define EXIT_MISSING 1

void report_add(struct report *report, const char *name, enum verdict verdict, const char *cure,
	const char *fmt, ...)
{
	struct finding *f = &report->findings[report->nr];
	va_list ap;

	ASSERT(report->nr < ARRAY_SIZE(report->findings));
	report->nr++;
	f->name = name;
	f->verdict = verdict;
	snprintf(f->cure, sizeof(f->cure), "%s", cure ? cure : "");
	va_start(ap, fmt);
	vsnprintf(f->says, sizeof(f->says), fmt, ap);
	va_end(ap);
	// A path may hold any bytes, and a cut may fall into a character; JSON takes neither.
	for (char *p = f->says; *p; p++)
		if (*p < ' ')
			*p = '?';
}

int report_print(const struct report *report, bool json)
{
	static const char *const words[] = {"ok", "weak", "missing"};
	json_t *list = json_array();
	enum verdict worst = GOOD;

	for (unsigned int i = 0; i < report->nr; i++) {
		const struct finding *f = &report->findings[i];

		worst = MAX(worst, f->verdict);
		json_array_append_new(
			list, json_pack("{s:s, s:s, s:s, s:s}", "name", f->name, "verdict",
				      words[f->verdict], "says", f->says, "cure", f->cure));
		if (json)
			continue;
		printf("%-8s %-13s %s\n", words[f->verdict], f->name, f->says);
		if (f->verdict != GOOD && f->cure[0])
			printf("%-8s %-13s -> %s\n", "", "", f->cure);
	}
	if (json) {
		json_t *all = json_pack("{s:s*, s:b, s:O}", "host", report->host_kind, "ready",
			worst != MISSING, "checks", list);

		json_dumpf(all, stdout, JSON_INDENT(2));
		putchar('\n');
		json_decref(all);
	} else {
		printf("\n%s\n", worst == MISSING ? report->bad : report->good);
	}
	json_decref(list);
	return worst == MISSING ? EXIT_MISSING : 0;
}
