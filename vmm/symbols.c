// SPDX-License-Identifier: Apache-2.0
// System.map look-up; see the header. A diagnostic that is asked for now and then: it reads the
// file each time. Any thread.
#include "vmm/symbols.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#define REACH_BYTES MIB

void symbols_lookup(const char *kernel_path, uint64_t addr, char ret[SYMBOL_BYTES])
{
	const char *slash = strrchr(kernel_path, '/');
	int dir_len = slash ? (int)(slash - kernel_path) + 1 : 0;
	char path[PATH_MAX], line[256], best[SYMBOL_BYTES - 16] = "";
	uint64_t best_addr = 0;
	FILE *f;

	ret[0] = '\0';
	if (snprintf(path, sizeof(path), "%.*sSystem.map", dir_len, kernel_path) >=
		(int)sizeof(path))
		return;
	f = fopen(path, "re");
	if (!f)
		return;
	while (fgets(line, sizeof(line), f)) {
		unsigned long long at;
		char kind, name[sizeof(best)];

		if (sscanf(line, "%llx %c %111s", &at, &kind, name) == 3 && at <= addr &&
			at >= best_addr) {
			best_addr = at;
			strcpy(best, name);
		}
	}
	fclose(f);
	if (best[0] && addr - best_addr < REACH_BYTES)
		snprintf(ret, SYMBOL_BYTES, "%s+0x%llx", best,
			(unsigned long long)(addr - best_addr));
}
