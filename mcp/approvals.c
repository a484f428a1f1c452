// SPDX-License-Identifier: Apache-2.0
// Requests to the owner; see the header. Any thread; a lock on the folder keeps processes apart.
#include "mcp/approvals.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mcp/redact.h"
#include "vmm/base/fd.h"
#include "vmm/base/memory_lack.h"

#define FILE_BYTES (16 * KIB)
#define NAME_BYTES 128U // MACHINE@ID
#define FILES_MAX  4096U // that are looked at

static const char *const state_names[] = {"pending", "allowed", "denied"};

const char *approval_state_name(enum approval_state state)
{
	return state_names[state];
}

static int lock(const struct approvals *a, struct err *err)
{
	CLEANUP_FD int fd = open(a->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0 || flock(fd, LOCK_EX) < 0)
		return err_errno(err, -errno, "%s", a->dir);
	return TAKE_FD(fd);
}

// What a request is bound to: another machine of the same name has another folder.
static json_t *request_of(
	const struct approvals *a, const char *action, const json_t *arguments, struct err *err)
{
	json_t *request;
	char folder[96];
	struct statx st;

	if (statx(AT_FDCWD, a->machine_dir, AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_BTIME, &st) <
		0) {
		err_errno(err, -errno, "%s", a->machine_dir);
		return NULL;
	}
	snprintf(folder, sizeof(folder), "%u:%u:%llu:%lld.%u", st.stx_dev_major, st.stx_dev_minor,
		(unsigned long long)st.stx_ino, (long long)st.stx_btime.tv_sec,
		st.stx_btime.tv_nsec);
	request = json_pack("{s:s, s:s, s:s, s:O}", "machine", a->machine, "folder", folder,
		"action", action, "arguments", arguments);
	if (!request)
		err_errno(err, -ENOMEM, "request");
	return request;
}

static int name_of(const struct approvals *a, const char *id, char ret[NAME_BYTES], struct err *err)
{
	if (snprintf(ret, NAME_BYTES, "%s@%s", a->machine, id) >= (int)NAME_BYTES)
		return err_errno(err, -ENAMETOOLONG, "%s", a->machine);
	return 0;
}

// The file's object, the caller's; NULL if there is none that is still good. What is over goes.
static json_t *load(int dir_fd, const char *name)
{
	CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	CLEANUP_FREE char *text = fd < 0 ? NULL : malloc(FILE_BYTES);
	ssize_t n = text ? fd_read_full(fd, text, FILE_BYTES) : -1;
	json_t *entry = n < 0 ? NULL : json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, NULL);

	if (fd < 0 ||
		(entry && json_integer_value(json_object_get(entry, "expires_s")) > time(NULL)))
		return entry;
	json_decref(entry);
	unlinkat(dir_fd, name, 0);
	return NULL;
}

static int store(int dir_fd, const char *name, const json_t *entry, struct err *err)
{
	const unsigned int lacks = memory_lacks();
	CLEANUP_FREE char *text = json_dumps(entry, JSON_COMPACT);
	CLEANUP_FD int fd = -1;
	int r;

	if (!text || memory_lacks() != lacks)
		return err_errno(err, -ENOMEM, "request");
	if (strlen(text) >= FILE_BYTES)
		return err_set(err, -E2BIG, "the request is too long");
	// Its name is no request's: nobody takes half of one for a whole.
	fd = openat(dir_fd, "new", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	r = fd < 0 ? -errno : fd_write_all(fd, text, strlen(text));
	if (r == 0 && renameat(dir_fd, "new", dir_fd, name) < 0)
		r = -errno;
	return r < 0 ? err_errno(err, r, "the request") : 0;
}

static enum approval_state state_of(const json_t *entry)
{
	const char *text = json_string_value(json_object_get(entry, "state"));

	for (size_t i = 0; text && i < ARRAY_SIZE(state_names); i++)
		if (!strcmp(text, state_names[i]))
			return (enum approval_state)i;
	return APPROVAL_DENIED;
}

// Those of this machine, and all that is over is taken away: a fresh array.
static json_t *load_all(const struct approvals *a, int dir_fd, struct err *err)
{
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	const size_t len = strlen(a->machine);
	json_t *all = json_array();
	const struct dirent *file;

	if (!dir) {
		fd_close(&fd);
		json_decref(all);
		err_errno(err, -errno, "%s", a->dir);
		return NULL;
	}
	for (size_t i = 0; i < FILES_MAX && (file = readdir(dir)); i++) {
		json_t *entry = strchr(file->d_name, '@') ? load(dir_fd, file->d_name) : NULL;

		if (entry && !strncmp(file->d_name, a->machine, len) && file->d_name[len] == '@')
			json_array_append(all, entry);
		json_decref(entry);
	}
	closedir(dir);
	return all;
}

static json_t *fresh(const char *id, json_t *request)
{
	json_int_t now = time(NULL);

	return json_pack("{s:s, s:s, s:I, s:I, s:O}", "id", id, "state",
		state_names[APPROVAL_PENDING], "created_s", now, "expires_s", now + APPROVAL_S,
		"request", request);
}

static int make(const struct approvals *a, int dir_fd, const char *name, const char *id,
	json_t *request, struct err *err)
{
	json_t *all = load_all(a, dir_fd, err), *entry;
	size_t nr = json_array_size(all);
	int r;

	if (!all)
		return err->code;
	json_decref(all);
	if (nr >= APPROVALS_MAX)
		return err_set(err, -EBUSY,
			"%zu requests wait for the owner already (mayfly approvals %s)", nr,
			a->machine);
	entry = fresh(id, request);
	r = store(dir_fd, name, entry, err);
	json_decref(entry);
	return r;
}

// The same for the same request, and for no other.
static int id_of(const json_t *request, char ret[APPROVAL_ID_BYTES], struct err *err)
{
	CLEANUP_FREE char *text = json_dumps(request, JSON_COMPACT | JSON_SORT_KEYS);
	char digest[65];

	if (!text)
		return err_errno(err, -ENOMEM, "request");
	redact_digest(text, strlen(text), digest);
	snprintf(ret, APPROVAL_ID_BYTES, "%.16s", digest);
	return 0;
}

int approvals_ask(const struct approvals *a, const char *action, const json_t *arguments,
	char ret_id[APPROVAL_ID_BYTES], enum approval_state *ret, struct err *err)
{
	json_t *request = request_of(a, action, arguments, err), *entry = NULL;
	char id[APPROVAL_ID_BYTES], name[NAME_BYTES];
	enum approval_state state = APPROVAL_PENDING;
	CLEANUP_FD int dir_fd = -1;
	int r = request ? id_of(request, id, err) : err->code;

	if (r == 0)
		r = name_of(a, id, name, err);
	if (r == 0)
		r = MIN(dir_fd = lock(a, err), 0);
	if (r == 0) {
		entry = load(dir_fd, name);
		if (!entry)
			r = make(a, dir_fd, name, id, request, err);
		else if (json_equal(json_object_get(entry, "request"), request))
			state = state_of(entry);
		else // not in this world
			r = err_set(err, -EEXIST, "another request has this one's id");
	}
	// What was allowed is used up before anybody acts on it.
	if (r == 0 && state == APPROVAL_ALLOWED && unlinkat(dir_fd, name, 0) < 0)
		r = err_errno(err, -errno, "the request");
	json_decref(entry);
	json_decref(request);
	if (r < 0)
		return r;
	memcpy(ret_id, id, sizeof(id));
	*ret = state;
	return 0;
}

static json_t *told(const json_t *entry)
{
	const json_t *request = json_object_get(entry, "request");

	return json_pack("{s:O, s:O, s:O, s:O, s:O, s:O}", "id", json_object_get(entry, "id"),
		"action", json_object_get(request, "action"), "arguments",
		json_object_get(request, "arguments"), "state", json_object_get(entry, "state"),
		"created_s", json_object_get(entry, "created_s"), "expires_s",
		json_object_get(entry, "expires_s"));
}

static int by_age(const void *a, const void *b)
{
	json_int_t x = json_integer_value(json_object_get(*(json_t *const *)a, "created_s"));
	json_int_t y = json_integer_value(json_object_get(*(json_t *const *)b, "created_s"));

	return x < y ? -1 : x > y;
}

// Whether the machine is still the one that has asked.
static bool is_of(const struct approvals *a, const json_t *entry)
{
	const json_t *request = json_object_get(entry, "request");
	json_t *now = request_of(a, "", json_null(), NULL);
	bool same = now &&
		    json_equal(json_object_get(now, "folder"), json_object_get(request, "folder"));

	json_decref(now);
	return same;
}

int approvals_list(const struct approvals *a, json_t **ret, struct err *err)
{
	CLEANUP_FD int dir_fd = lock(a, err);
	json_t *all = dir_fd < 0 ? NULL : load_all(a, dir_fd, err), *list = json_array();
	const json_t *sorted[APPROVALS_MAX];
	size_t nr = MIN(json_array_size(all), (size_t)APPROVALS_MAX);

	for (size_t i = 0; i < nr; i++)
		sorted[i] = json_array_get(all, i);
	qsort(sorted, nr, sizeof(*sorted), by_age);
	for (size_t i = 0; i < nr; i++)
		if (is_of(a, sorted[i]))
			json_array_append_new(list, told(sorted[i]));
	if (!all) {
		json_decref(list);
		return err->code;
	}
	json_decref(all);
	*ret = list;
	return 0;
}

int approvals_decide(const struct approvals *a, const char *id, bool allow,
	int (*record)(const struct approvals *a, const json_t *request, struct err *err),
	json_t **ret, struct err *err)
{
	CLEANUP_FD int dir_fd = lock(a, err);
	char name[NAME_BYTES];
	json_t *entry = NULL, *decided = NULL;
	int r = MIN(dir_fd, 0);

	if (r == 0 && strspn(id, "0123456789abcdef") == APPROVAL_ID_BYTES - 1 &&
		!id[APPROVAL_ID_BYTES - 1] && (r = name_of(a, id, name, err)) == 0)
		entry = load(dir_fd, name);
	if (r == 0 && (!entry || state_of(entry) != APPROVAL_PENDING || !is_of(a, entry)))
		r = err_set(err, -ESRCH,
			"no request '%.40s' of '%s' waits any more: see mayfly approvals %s", id,
			a->machine, a->machine);
	if (r == 0) {
		enum approval_state state = allow ? APPROVAL_ALLOWED : APPROVAL_DENIED;

		json_object_set_new(entry, "state", json_string(state_names[state]));
		json_object_set_new(entry, "expires_s", json_integer(time(NULL) + APPROVAL_S));
		decided = told(entry);
		if (record)
			r = record(a, decided, err);
		if (r == 0)
			r = store(dir_fd, name, entry, err);
	}
	if (r == 0)
		*ret = json_incref(decided);
	json_decref(decided);
	json_decref(entry);
	return r;
}
