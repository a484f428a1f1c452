// SPDX-License-Identifier: Apache-2.0
// Files of the guest, through the agent: each call takes a fresh connection to it, which cannot be
// used again. What the guest sends is unpacked by tree_receive(), out of which nothing escapes. One
// thread a connection, and one more for what is sent.
#ifndef MAYFLY_CLI_AGENT_FILES_H
#define MAYFLY_CLI_AGENT_FILES_H

#include <stdbool.h>
#include <stdint.h>

#include "guest/proto/tree.h"
#include "vmm/base/err.h"

struct agent_files {
	int conn_fd; // the caller's
	const char *user; // as whom; NULL: root
	int signal_fd; // as in struct agent_exec
	int cancel_fd; // as in struct agent_exec
	uint64_t deadline_ns, idle_ns; // as in struct agent_exec
	// Told now and then how many bytes of the stream have passed; may be NULL. From the
	// sending thread if it sends.
	void (*progress)(void *ctx, uint64_t bytes);
	void *ctx;
};

struct agent_get {
	unsigned depth; // levels of folders; 0: the path alone
	bool content, owner, follow;
	bool stamp; // entries tell when they were touched at last: see struct tree_entry
	uint64_t offset, length; // of the file that path names; length 0: all of it
};

// See agent_watch().
struct agent_change {
	const char *change; // one of those in docs/agent-protocol.md
	const char *path; // from the watched one, "" for itself
	const char *from; // of what has moved, else NULL
	bool folder;
};

// The guest's tree at path as entries: what is there, or what is in it. An entry's strings live as
// long as the call. problem() is told what could not be read.
struct agent_list {
	int (*entry)(void *ctx, const struct tree_entry *entry, struct err *err);
	void (*problem)(void *ctx, const char *path, int errno_value);
	int (*data)(void *ctx, uint64_t offset, const uint8_t *bytes, size_t len, struct err *err);
	int (*change)(void *ctx, const struct agent_change *change, struct err *err);
	void *ctx;
};

// -ENOENT and so on when path itself cannot be read.
int agent_list(const struct agent_files *files, const char *path, const struct agent_get *what,
	const struct agent_list *to, struct err *err);

// One entry. If name is not NULL its strings are not kept.
int agent_stat(const struct agent_files *files, const char *path, bool follow,
	struct tree_entry *ret, struct err *err);

// Tells what changes at path, until path is gone, then 0, or change() returns less than 0, or as
// for all calls.
int agent_watch(const struct agent_files *files, const char *path,
	int (*change)(void *ctx, const struct agent_change *change, struct err *err), void *ctx,
	struct err *err);

// At most max_bytes of a file from offset on, in a fresh buffer with a NUL behind, the caller's;
// and the size of the whole file (may be NULL).
int agent_read(const struct agent_files *files, const char *path, uint64_t offset, size_t max_bytes,
	char **ret, size_t *ret_len, uint64_t *ret_size, struct err *err);

// Unpacks the guest's tree at path. -EIO with the first problem if something could not be copied,
// after everything else has been; -EPIPE if the stream was cut or the agent's process died.
int agent_get(const struct agent_files *files, const char *path, const struct agent_get *what,
	const struct tree_receive *to, struct err *err);

// Unpacks single files of the guest's folder, those that fd, the caller's, tells: paths from there,
// each with a NUL behind it. As agent_get().
int agent_fetch(const struct agent_files *files, const char *folder, int fd,
	const struct tree_receive *to, struct err *err);

struct agent_put {
	const char *folder; // in the guest
	const char *name; // of the top in it; NULL: the content goes into folder
	bool owner; // keep uid and gid
	bool keep; // a file that is replaced leaves its mode and owner to the new one
	bool parents; // make folder if it is not there
	bool follow; // if the local path is a symbolic link: what it points to
	// What is not sent, as in struct tree_send; called by the sending thread.
	bool (*skip)(void *ctx, const char *path, char type);
	void *skip_ctx;
	void (*problem)(void *ctx, const char *path, int errno_value);
	void *ctx;
};

// Sends the local tree at path. As agent_get().
int agent_put(const struct agent_files *files, const char *path, const struct agent_put *to,
	unsigned depth, struct err *err);

// Writes one file, whole or not at all.
int agent_write(const struct agent_files *files, const struct agent_put *to, uint32_t mode,
	const void *bytes, size_t len, struct err *err);

// A folder with its parents; one that is there already is none the worse.
int agent_mkdir(const struct agent_files *files, const char *path, struct err *err);

int agent_remove(
	const struct agent_files *files, const char *path, bool recursive, struct err *err);

// Removes what fd, the caller's, names in the folder, as in agent_fetch(): what is in a folder
// before that. What is not there, and a folder that holds more, is no problem.
int agent_clear(const struct agent_files *files, const char *folder, int fd, struct err *err);

int agent_rename(const struct agent_files *files, const char *from, const char *to, bool replace,
	struct err *err);

#endif
