// SPDX-License-Identifier: Apache-2.0
// Reads and writes files for the host: frames of a tree on stdout, and for "put" on stdin. What is
// wrong is a problem in the stream; a stream that ends with FRAME_END said all that there was to
// say. A process of its own, with one thread.
//
//   get PATH [depth=N] [content=0|1] [owner=0|1] [follow=0|1] [offset=N] [length=N] [stamp=0|1]
//   fetch FOLDER
//   put FOLDER [name=NAME] [owner=0|1] [keep=0|1] [parents=0|1]
//   watch PATH
//   remove PATH [recursive=0|1]
//   clear FOLDER
//   rename FROM TO [replace=0|1]
#include "guest/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/fs.h>
#include <linux/openat2.h>

#include "guest/proto/frame.h"
#include "guest/proto/tree.h"
#include "guest/watch.h"
#include "vmm/base/bytes.h"
#include "vmm/base/fd.h"

#define STATUS_PROBLEM 1 // the stream tells
#define STATUS_LOST    2 // nobody hears us

static bool lost; // stdout is closed

static int write_stdout(void *ctx, const void *bytes, size_t len, struct err *err)
{
	int rc = fd_write_all(STDOUT_FILENO, bytes, len);

	(void)ctx;
	if (rc < 0)
		lost = true;
	return rc < 0 ? err_errno(err, rc, "stdout") : 0;
}

// An entry is short, and a system call may be dear: many go at once.
static struct {
	uint8_t bytes[65536];
	size_t len;
} outgoing;

static int flush_outgoing(struct err *err)
{
	size_t len = outgoing.len;

	outgoing.len = 0;
	return len ? write_stdout(NULL, outgoing.bytes, len, err) : 0;
}

static int write_later(void *ctx, const void *bytes, size_t len, struct err *err)
{
	int rc = len > sizeof(outgoing.bytes) - outgoing.len ? flush_outgoing(err) : 0;

	if (rc == 0 && len > sizeof(outgoing.bytes))
		return write_stdout(ctx, bytes, len, err);
	if (rc == 0) {
		memcpy(outgoing.bytes + outgoing.len, bytes, len);
		outgoing.len += len;
	}
	return rc;
}

static bool say(enum frame_type type, const void *payload, size_t len)
{
	uint8_t frame[FRAME_HEADER_BYTES + FRAME_CHANGE_MAX];

	frame_header_put(frame, type, (uint32_t)len);
	if (len)
		memcpy(frame + FRAME_HEADER_BYTES, payload, len);
	return write_stdout(NULL, frame, FRAME_HEADER_BYTES + len, NULL) == 0;
}

static void say_problem(void *ctx, const char *path, int errno_value)
{
	uint8_t payload[FRAME_PROBLEM_BYTES + PATH_MAX];
	size_t len = strnlen(path, PATH_MAX);

	(void)ctx;
	if (!errno_value)
		return;
	put_le32(payload, (uint32_t)errno_value);
	memcpy(payload + FRAME_PROBLEM_BYTES, path, len);
	say(FRAME_PROBLEM, payload, FRAME_PROBLEM_BYTES + len);
}

// The whole answer is one problem, or none.
static int answer(const char *path, int errno_value)
{
	say_problem(NULL, path, errno_value);
	say(FRAME_END, NULL, 0);
	return lost ? STATUS_LOST : errno_value ? STATUS_PROBLEM : 0;
}

// name=value among the arguments; fallback when it is not there.
static const char *option(char **argv, const char *name, const char *fallback)
{
	size_t len = strlen(name);

	for (; *argv; argv++)
		if (strncmp(*argv, name, len) == 0 && (*argv)[len] == '=')
			return *argv + len + 1;
	return fallback;
}

static uint64_t option_number(char **argv, const char *name, const char *fallback)
{
	return strtoull(option(argv, name, fallback), NULL, 10);
}

static int get(const char *path, char **options)
{
	struct tree_send how = {
		.depth = (unsigned)option_number(options, "depth", "0"),
		.content = option_number(options, "content", "1") != 0,
		.owner = option_number(options, "owner", "1") != 0,
		.follow = option_number(options, "follow", "0") != 0,
		.offset = option_number(options, "offset", "0"),
		.length = option_number(options, "length", "18446744073709551615"),
		.stamp = option_number(options, "stamp", "0") != 0,
		.write = write_later,
	};
	int rc = tree_send(&how, path, NULL);

	flush_outgoing(NULL);
	if (lost)
		return STATUS_LOST;
	return rc < 0 ? answer(path, -rc) : 0;
}

// The next of the paths on stdin, each with a NUL behind it; NULL at the end.
static const char *next_path(void *ctx)
{
	static char text[2 * PATH_MAX];
	static size_t have, used;

	(void)ctx;
	for (;;) {
		char *nul = memchr(text + used, '\0', have - used);
		const char *path = text + used;
		ssize_t n;

		if (nul) {
			used = (size_t)(nul + 1 - text);
			return path;
		}
		memmove(text, text + used, have - used);
		have -= used;
		used = 0;
		n = have < sizeof(text) ? read(STDIN_FILENO, text + have, sizeof(text) - have) : 0;
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return NULL;
		have += (size_t)n;
	}
}

static int fetch(const char *folder)
{
	const struct tree_send how = {.content = true, .length = UINT64_MAX, .write = write_later};
	int rc = tree_send_named(&how, folder, next_path, NULL, NULL);

	flush_outgoing(NULL);
	if (lost)
		return STATUS_LOST;
	return rc < 0 ? answer(folder, -rc) : 0;
}

static int make_parents(char *path)
{
	for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
		int rc;

		*slash = '\0';
		rc = mkdir(path, 0755);
		*slash = '/';
		if (rc < 0 && errno != EEXIST)
			return -errno;
	}
	return mkdir(path, 0755) < 0 && errno != EEXIST ? -errno : 0;
}

// The signal by which somebody has interrupted a copy: the file that is half there goes before us.
static volatile sig_atomic_t told_to_end;

static void end_soon(int number)
{
	told_to_end = number;
}

static int put(char *folder, char **options)
{
	static uint8_t bytes[FRAME_HEADER_BYTES + FRAME_PAYLOAD_MAX];
	struct tree_receive how = {
		.rename = option(options, "name", NULL),
		.owner = option_number(options, "owner", "0") != 0,
		.keep = option_number(options, "keep", "0") != 0,
		.done = say_problem,
	};
	static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
	struct tree_receiver *r;
	CLEANUP_FD int dir_fd = -1;
	struct err err = {0};
	int rc = 0;

	if (option_number(options, "parents", "0"))
		rc = make_parents(folder);
	if (rc == 0) {
		dir_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		rc = dir_fd < 0 ? -errno : 0;
	}
	if (rc < 0)
		return answer(folder, -rc);
	how.dir_fd = dir_fd;
	// Without SA_RESTART, so that read() returns.
	for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
		sigaction(ends[i], &(struct sigaction){.sa_handler = end_soon}, NULL);
	r = tree_receiver_create(&how);
	if (!r)
		return answer(folder, ENOMEM);
	for (;;) {
		ssize_t n = read(STDIN_FILENO, bytes, sizeof(bytes));

		if (told_to_end)
			break;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			rc = -errno;
		if (n <= 0)
			break;
		rc = tree_receive(r, bytes, (size_t)n, &err);
		if (rc < 0)
			break;
	}
	if (rc == 0 && !told_to_end) {
		rc = tree_receiver_finish(r, &err);
		if (rc == -EIO) // its problems have been told one by one
			rc = 0;
	}
	tree_receiver_destroy(r);
	if (told_to_end) {
		signal(told_to_end, SIG_DFL);
		raise(told_to_end);
	}
	return answer(folder, -rc);
}

static int remove_in(int dir_fd, const char *name, unsigned depth)
{
	DIR *dir;
	int fd, rc = 0;

	if (unlinkat(dir_fd, name, 0) == 0)
		return 0;
	if (errno != EISDIR)
		return -errno;
	if (unlinkat(dir_fd, name, AT_REMOVEDIR) == 0)
		return 0;
	if ((errno != ENOTEMPTY && errno != EEXIST) || depth == 0)
		return depth ? -errno : -ENOTEMPTY;
	fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	dir = fdopendir(fd);
	if (!dir) {
		rc = -errno;
		fd_close(&fd);
		return rc;
	}
	for (;;) {
		struct dirent *entry = readdir(dir);

		if (!entry)
			break;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		rc = remove_in(dirfd(dir), entry->d_name, depth - 1);
		if (rc < 0)
			break;
	}
	closedir(dir);
	if (rc == 0 && unlinkat(dir_fd, name, AT_REMOVEDIR) < 0)
		rc = -errno;
	return rc;
}

// By no link: whoever else is in the folder may have put one there meanwhile.
static int clear_one(int dir_fd, const char *path)
{
	const struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	char parent[PATH_MAX];
	CLEANUP_FD int fd = -1;

	if (snprintf(parent, sizeof(parent), "%.*s", slash ? (int)(slash - path) : 1,
		    slash ? path : ".") >= (int)sizeof(parent))
		return -ENAMETOOLONG;
	fd = (int)syscall(SYS_openat2, dir_fd, parent, &how, sizeof(how));
	if (fd < 0)
		return -errno;
	return unlinkat(fd, name, 0) < 0 &&
			       (errno != EISDIR || unlinkat(fd, name, AT_REMOVEDIR) < 0)
		       ? -errno
		       : 0;
}

// Removes what stdin names in the folder. What is not there is none the worse, and a folder in
// which there is something else stays.
static int clear(const char *folder)
{
	CLEANUP_FD int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const char *path;

	if (fd < 0)
		return answer(folder, errno);
	while ((path = next_path(NULL)) && !lost) {
		const int rc = clear_one(fd, path);

		if (rc < 0 && rc != -ENOENT && rc != -ENOTEMPTY)
			say_problem(NULL, path, -rc);
	}
	return answer(folder, 0);
}

int files_main(int argc, char **argv)
{
	unsigned depth;
	int rc;

	if (argc >= 3 && strcmp(argv[1], "get") == 0)
		return get(argv[2], argv + 3);
	if (argc == 3 && strcmp(argv[1], "fetch") == 0)
		return fetch(argv[2]);
	if (argc >= 3 && strcmp(argv[1], "put") == 0)
		return put(argv[2], argv + 3);
	if (argc >= 3 && strcmp(argv[1], "watch") == 0) {
		rc = watch_path(argv[2], say);
		return rc == -EPIPE ? STATUS_LOST : answer(argv[2], -rc);
	}
	if (argc >= 3 && strcmp(argv[1], "remove") == 0) {
		depth = option_number(argv + 3, "recursive", "0") ? TREE_DEPTH_MAX : 0;
		rc = remove_in(AT_FDCWD, argv[2], depth);
		return answer(argv[2], -rc);
	}
	if (argc == 3 && strcmp(argv[1], "clear") == 0)
		return clear(argv[2]);
	if (argc >= 4 && strcmp(argv[1], "rename") == 0) {
		bool replace = option_number(argv + 4, "replace", "1") != 0;

		rc = (int)syscall(SYS_renameat2, AT_FDCWD, argv[2], AT_FDCWD, argv[3],
			replace ? 0 : RENAME_NOREPLACE);
		return answer(argv[2], rc < 0 ? errno : 0);
	}
	return answer(argc > 1 ? argv[1] : "", EINVAL);
}
