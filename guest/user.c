// SPDX-License-Identifier: Apache-2.0
// Whom a command runs as. getpwnam() would bring in name service switching, which a static program
// cannot have. The agent's only thread.
#include "guest/user.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/base/fd.h"

#define FILE_MAX_BYTES (4U << 20)
#define NO_ID          ((uint32_t)-1) // to the kernel it means "leave it as it is"

static bool parse_id(const char *text, uint32_t *ret)
{
	uint64_t v = 0;

	if (!*text)
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9')
			return false;
		v = v * 10 + (uint64_t)(*text - '0');
		if (v >= NO_ID)
			return false;
	}
	*ret = (uint32_t)v;
	return true;
}

// Cuts a line into at most n fields at its colons; returns how many there are.
static int split(char *line, char **fields, int n)
{
	int count = 0;

	while (line && count < n)
		fields[count++] = strsep(&line, ":");
	return count;
}

static int read_etc(const char *etc_dir, const char *name, char **ret_text, struct err *err)
{
	char path[256];
	size_t len;
	int rc;

	snprintf(path, sizeof(path), "%s/%s", etc_dir, name);
	rc = fd_read_file(path, FILE_MAX_BYTES, ret_text, &len, err);
	if (rc != -ENOENT)
		return rc;
	*ret_text = calloc(1, 1); // a guest without the file has no entries
	return *ret_text ? 0 : err_errno(err, -ENOMEM, "%s", path);
}

// Fills in u from the entry of this name, or of u->uid when name is NULL.
static bool find_user(char *passwd, const char *name, struct user *u)
{
	char *line;

	while ((line = strsep(&passwd, "\n"))) {
		char *f[7];
		uint32_t uid, gid;

		if (split(line, f, 7) < 6 || !parse_id(f[2], &uid) || !parse_id(f[3], &gid))
			continue;
		if (name ? strcmp(f[0], name) != 0 : uid != u->uid)
			continue;
		u->uid = uid;
		u->gid = gid;
		snprintf(u->name, sizeof(u->name), "%s", f[0]);
		if (f[5][0])
			snprintf(u->home, sizeof(u->home), "%s", f[5]);
		return true;
	}
	return false;
}

static bool find_group(char *group, const char *name, gid_t *ret)
{
	char *line;

	while ((line = strsep(&group, "\n"))) {
		char *f[4];

		if (split(line, f, 4) >= 3 && strcmp(f[0], name) == 0 && parse_id(f[2], ret))
			return true;
	}
	return false;
}

static void find_member(char *group, struct user *u)
{
	char *line;

	while ((line = strsep(&group, "\n")) && u->ngroups < USER_GROUPS_MAX) {
		char *f[4], *member;
		gid_t gid;

		if (split(line, f, 4) < 4 || !parse_id(f[2], &gid) || gid == u->gid)
			continue;
		while ((member = strsep(&f[3], ","))) {
			if (strcmp(member, u->name) == 0) {
				u->groups[u->ngroups++] = gid;
				break;
			}
		}
	}
}

int user_lookup(const char *etc_dir, const char *spec, struct user *ret, struct err *err)
{
	CLEANUP_FREE char *passwd = NULL;
	CLEANUP_FREE char *group = NULL;
	struct user u = {.home = "/"};
	const char *colon = strchr(spec, ':');
	char name[sizeof(u.name)];
	size_t name_len = colon ? (size_t)(colon - spec) : strlen(spec);
	bool found, number;
	int rc;

	if (name_len == 0 || name_len >= sizeof(name) || (colon && !colon[1]))
		return err_set(err, -EINVAL,
			"user \"%.80s\": want NAME or UID, then :GROUP or :GID", spec);
	memcpy(name, spec, name_len);
	name[name_len] = '\0';

	rc = read_etc(etc_dir, "passwd", &passwd, err);
	if (rc < 0)
		return rc;
	number = parse_id(name, &u.uid);
	u.gid = u.uid;
	snprintf(u.name, sizeof(u.name), "%s", name);
	found = find_user(passwd, number ? NULL : name, &u);
	if (!found && !number)
		return err_set(err, -ENOENT, "there is no user \"%s\" in the guest", name);

	if (colon && parse_id(colon + 1, &u.gid)) {
		*ret = u;
		return 0;
	}
	if (!colon && !found) {
		*ret = u;
		return 0;
	}
	rc = read_etc(etc_dir, "group", &group, err);
	if (rc < 0)
		return rc;
	if (!colon)
		find_member(group, &u);
	else if (!find_group(group, colon + 1, &u.gid))
		return err_set(err, -ENOENT, "there is no group \"%.64s\" in the guest", colon + 1);
	*ret = u;
	return 0;
}
