// SPDX-License-Identifier: Apache-2.0
// System.map look-up; see the header. A diagnostic that is asked for now and then: it reads the
// file each time. Any thread.
#include "vmm/symbols.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define REACH_BYTES MIB
#define NAME_BYTES  (SYMBOL_BYTES - 16)

struct best {
	uint64_t addr; // that a name is wanted for
	uint64_t at;
	char name[NAME_BYTES]; // "": none yet
};

int symbols_open(const char *kernel_path)
{
	const char *slash = strrchr(kernel_path, '/');
	int dir_len = slash ? (int)(slash - kernel_path) + 1 : 0;
	char path[PATH_MAX];

	if (snprintf(path, sizeof(path), "%.*sSystem.map", dir_len, kernel_path) >=
		(int)sizeof(path))
		return -1;
	return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

static void take_line(struct best *best, const char *line)
{
	unsigned long long at;
	char kind, name[NAME_BYTES];

	_Static_assert(NAME_BYTES == 112, "the width below");
	if (sscanf(line, "%llx %c %111s", &at, &kind, name) == 3 && at <= best->addr &&
		at >= best->at) {
		best->at = at;
		strcpy(best->name, name);
	}
}

void symbols_lookup(int map_fd, uint64_t addr, char ret[SYMBOL_BYTES])
{
	struct best best = {.addr = addr};
	char buf[4096];
	size_t have = 0;
	bool rest = false; // of a line that was too long
	off_t off = 0;
	ssize_t n;

	ret[0] = '\0';
	while ((n = pread(map_fd, buf + have, sizeof(buf) - 1 - have, off)) > 0) {
		char *line = buf, *newline;

		off += n;
		have += (size_t)n;
		while ((newline = memchr(line, '\n', (size_t)(buf + have - line)))) {
			*newline = '\0';
			if (!rest)
				take_line(&best, line);
			rest = false;
			line = newline + 1;
		}
		have -= (size_t)(line - buf);
		memmove(buf, line, have);
		if (have == sizeof(buf) - 1) {
			rest = true;
			have = 0;
		}
	}
	buf[have] = '\0';
	if (!rest)
		take_line(&best, buf);
	if (best.name[0] && addr - best.at < REACH_BYTES)
		snprintf(ret, SYMBOL_BYTES, "%s+0x%llx", best.name,
			(unsigned long long)(addr - best.at));
}
