// SPDX-License-Identifier: Apache-2.0
// Copies between this host and a guest; see the header. One thread, and one more that sends.
#include "cli/copy.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/agent_client.h"
#include "cli/patience.h"
#include "guest/proto/frame.h"
#include "vmm/base/fd.h"

#define CONNECT_TIMEOUT_NS 60000000000ULL

// A path taken apart: where the last name is, and whether it says that it is a folder.
struct path {
	char folder[PATH_MAX];
	char name[NAME_MAX + 1]; // "" for "/", "." and what ends in ".."
	bool content; // ends in "/." or is "."
	bool slash; // ends in "/"
};

static int take_apart(const char *text, struct path *ret, struct err *err)
{
	size_t len = strlen(text), start;
	struct path p = {0};

	if (len == 0 || len >= sizeof(p.folder))
		return err_errno(err, len ? -ENAMETOOLONG : -ENOENT, "'%.40s'", text);
	p.slash = text[len - 1] == '/';
	while (len > 1 && text[len - 1] == '/')
		len--;
	p.content = text[len - 1] == '.' && (len == 1 || text[len - 2] == '/');
	for (start = len; start > 0 && text[start - 1] != '/';)
		start--;
	if (len - start > NAME_MAX)
		return err_errno(err, -ENAMETOOLONG, "'%.40s…'", text + start);
	memcpy(p.name, text + start, len - start);
	if (p.content || !strcmp(p.name, "/") || !strcmp(p.name, "..")) {
		memcpy(p.folder, text, len);
		p.name[0] = '\0';
	} else if (start == 0) {
		p.folder[0] = '.';
	} else {
		memcpy(p.folder, text, start);
	}
	*ret = p;
	return 0;
}

// Decides where a copy goes: the folder, and the name in it or NULL for the folder itself. there is
// what is at the destination (followed), 0 for nothing.
static int decide(const struct path *from, bool from_is_folder, const char *to_text,
	const struct path *to, char there, const char **ret_folder, const char **ret_name,
	struct err *err)
{
	if (there == 'd') {
		*ret_folder = to_text;
		*ret_name = from->content ? NULL : from->name;
		// The root, or "..", has no name that could be given to the copy.
		if (!from->content && !from->name[0])
			return err_set(err, -EINVAL, "name what to copy, or add \"/.\"");
		return 0;
	}
	if (there && (from_is_folder || to->slash))
		return err_errno(err, -ENOTDIR, "%s", to_text);
	if (!there && to->slash && !from_is_folder)
		return err_errno(err, -ENOENT, "%s", to_text);
	if (!to->name[0])
		return err_errno(err, -ENOENT, "%s", to_text);
	*ret_folder = to->folder;
	*ret_name = to->name;
	return 0;
}

static int open_agent(const struct copy *c, struct agent_files *ret, struct err *err)
{
	uint64_t deadline_ns = now_ns() + patience_ns(CONNECT_TIMEOUT_NS);
	int fd;

	if (c->deadline_ns)
		deadline_ns = MIN(deadline_ns, c->deadline_ns);
	fd = agent_connect(c->run_dir, c->vsock, AGENT_PORT, c->cancel_fd, deadline_ns, err);

	if (fd < 0)
		return fd;
	*ret = (struct agent_files){.conn_fd = fd,
		.signal_fd = c->signal_fd,
		.cancel_fd = c->cancel_fd,
		.deadline_ns = c->deadline_ns,
		.progress = c->progress,
		.ctx = c->ctx};
	return 0;
}

// What is at path in the guest, 0 for nothing.
static int guest_type(
	const struct copy *c, const char *path, bool follow, char *ret, struct err *err)
{
	struct agent_files files;
	struct tree_entry entry = {0};
	int rc = open_agent(c, &files, err);

	if (rc < 0)
		return rc;
	rc = agent_stat(&files, path, follow, &entry, err);
	fd_close(&files.conn_fd);
	if (rc < 0 && rc != -ENOENT)
		return rc;
	*ret = rc == 0 ? entry.type : '\0';
	return 0;
}

// The problems of a copy. One with the top, which has no name in the stream, is the copy's own.
struct problems {
	const struct copy *copy;
	int top_errno;
};

static void report(void *ctx, const char *path, int errno_value)
{
	struct problems *p = ctx;

	if (!errno_value)
		return;
	if (!path[0])
		p->top_errno = errno_value;
	else if (p->copy->problem)
		p->copy->problem(p->copy->ctx, path, errno_value);
}

const char *copy_problem_text(int errno_value)
{
	return errno_value == TREE_LEFT_OUT ? "left out: neither file, folder nor link"
					    : strerror(errno_value);
}

static int result(const struct problems *p, const char *from, int rc, struct err *err)
{
	return (rc == -EIO || rc == 0) && p->top_errno ? err_errno(err, -p->top_errno, "%s", from)
						       : rc;
}

int copy_in(const struct copy *c, const char *from, const char *to, struct err *err)
{
	struct problems problems = {.copy = c};
	struct agent_put put = {.owner = c->owner, .problem = report, .ctx = &problems};
	struct agent_files files;
	struct path source = {0}, dest = {0};
	struct stat st;
	char there;
	int rc = take_apart(from, &source, err);

	if (rc == 0)
		rc = take_apart(to, &dest, err);
	if (rc < 0)
		return rc;
	if (lstat(from, &st) < 0)
		return err_errno(err, -errno, "%s", from);
	rc = guest_type(c, to, true, &there, err);
	if (rc == 0)
		rc = decide(&source, S_ISDIR(st.st_mode), to, &dest, there, &put.folder, &put.name,
			err);
	if (rc == 0)
		rc = open_agent(c, &files, err);
	if (rc < 0)
		return rc;
	rc = agent_put(&files, from, &put, TREE_DEPTH_MAX, err);
	fd_close(&files.conn_fd);
	return result(&problems, from, rc, err);
}

int copy_out(const struct copy *c, const char *from, const char *to, struct err *err)
{
	const struct agent_get get = {.depth = TREE_DEPTH_MAX, .content = true, .owner = c->owner};
	struct problems problems = {.copy = c};
	struct tree_receive receive = {
		.owner = c->owner, .max_bytes = c->max_bytes, .done = report, .ctx = &problems};
	struct agent_files files;
	struct path source = {0}, dest = {0};
	struct stat st;
	const char *folder = ".";
	CLEANUP_FD int dir_fd = -1;
	char type = 0, there = 0;
	int rc = take_apart(from, &source, err);

	if (rc == 0)
		rc = take_apart(to, &dest, err);
	if (rc == 0)
		rc = guest_type(c, from, false, &type, err);
	if (rc == 0 && !type)
		rc = err_errno(err, -ENOENT, "%s", from);
	if (rc < 0)
		return rc;
	if (stat(to, &st) < 0 && errno != ENOENT)
		return err_errno(err, -errno, "%s", to);
	there = stat(to, &st) < 0 ? '\0' : S_ISDIR(st.st_mode) ? 'd' : 'f';
	rc = decide(&source, type == 'd', to, &dest, there, &folder, &receive.rename, err);
	if (rc < 0)
		return rc;
	dir_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd < 0)
		return err_errno(err, -errno, "%s", folder);
	receive.dir_fd = dir_fd;
	rc = open_agent(c, &files, err);
	if (rc < 0)
		return rc;
	rc = agent_get(&files, from, &get, &receive, err);
	fd_close(&files.conn_fd);
	return result(&problems, from, rc, err);
}
