// SPDX-License-Identifier: Apache-2.0
// Fuzzes the manifest of a snapshot, which may come from a stranger: what is listed has names that
// can be printed, and is found by them.
//
// Input: the manifest. "ID" in it stands for the id of its folder.
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/home.h"
#include "cli/store.h"
#include "tests/support/fuzz_input.h"
#include "vmm/base/fd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define ID "0123456789abcdef0123456789abcdef"

static char home[] = "/tmp/mayfly-store-XXXXXX";
static char manifest[256];
static unsigned int listed, broken;

static void clean_up(void)
{
	home_remove(home, NULL);
}

static void set_up(void)
{
	char store[PATH_MAX], folder[256];

	FUZZ_CHECK(mkdtemp(home));
	atexit(clean_up);
	FUZZ_CHECK(setenv("MAYFLY_HOME", home, 1) == 0);
	FUZZ_CHECK(home_snapshots(store, NULL) == 0);
	snprintf(folder, sizeof(folder), "%.200s/" ID, store);
	FUZZ_CHECK(mkdir(folder, 0700) == 0);
	snprintf(manifest, sizeof(manifest), "%.200s/manifest.json", folder);
}

static void check_name(const char *name, bool needed)
{
	FUZZ_CHECK(name[0] || !needed);
	for (; *name; name++)
		FUZZ_CHECK(isalnum((unsigned char)*name) || strchr("._-", *name));
}

static int each(void *opaque, const struct store_snapshot *s)
{
	struct store_snapshot *ret = opaque;

	FUZZ_CHECK(!strcmp(s->id, ID));
	FUZZ_CHECK(s->parent[0] == '\0' || strlen(s->parent) == SNAPSHOT_ID_TEXT_LEN);
	FUZZ_CHECK(strcmp(s->parent, s->id) != 0);
	check_name(s->machine, true);
	check_name(s->tag, false);
	*ret = *s;
	listed++;
	return 0;
}

static void on_broken(void *opaque, const char *dir, const struct err *err)
{
	(void)opaque;
	FUZZ_CHECK(dir[0] && err->code < 0 && err->msg[0]);
	broken++;
}

static void write_all(int fd, const char *text, size_t len)
{
	FUZZ_CHECK(fd_write_all(fd, text, len) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct store_snapshot s, found;
	struct err err = {0};
	int fd;

	if (!manifest[0])
		set_up();
	fd = open(manifest, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	FUZZ_CHECK(fd >= 0);
	for (size_t i = 0; i < size; i++) {
		if (i + 1 < size && data[i] == 'I' && data[i + 1] == 'D') {
			write_all(fd, ID, strlen(ID));
			i++;
		} else {
			write_all(fd, (const char *)data + i, 1);
		}
	}
	fd_close(&fd);
	listed = broken = 0;
	FUZZ_CHECK(store_each(each, on_broken, &s, &err) == 0);
	FUZZ_CHECK(listed + broken == 1);
	if (listed) {
		char name[160];

		FUZZ_CHECK(store_find(s.id, &found, &err) == 0);
		snprintf(name, sizeof(name), "%s@%s", s.machine, s.tag);
		FUZZ_CHECK(store_find(name, &found, &err) == 0);
		FUZZ_CHECK(!strcmp(found.tag, s.tag));
	}
	return 0;
}
