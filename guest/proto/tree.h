// SPDX-License-Identifier: Apache-2.0
// Files and folders as a stream of frames, from a disk and to a disk: the same code at both ends,
// so that a tree comes out as it went in. Entries come depth first, a folder before what is in it;
// after a file's entry comes its data, without its holes.
//
// Nothing in a stream can reach outside of the folder that it is unpacked in: names are taken
// apart,
// "..", empty and absolute ones are refused, and no symbolic link is ever followed on the way,
// since each folder is opened by its name in the one before. A file is made under another name and
// renamed into its place when it is whole, so nothing is ever written through what was there, and
// nobody sees half a file.
//
// Calls block on the disk. One thread a tree.
#ifndef MAYFLY_PROTO_TREE_H
#define MAYFLY_PROTO_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "guest/proto/frame.h"
#include "vmm/base/err.h"

// Folders in folders; each costs a file descriptor at both ends.
#define TREE_DEPTH_MAX 200
// The problem of a socket or a device, which are of a machine and not of a tree: it is told, but
// what is left of the tree is whole, as with tar.
#define TREE_LEFT_OUT EOPNOTSUPP

#define TREE_BLOCK_BYTES 4096U

struct tree_entry {
	const char *path; // from the top, "" for the top itself
	char type; // d folder, f file, l symbolic link, h hard link, p FIFO, s socket, c b devices
	uint32_t mode; // 07777
	bool has_owner;
	uint32_t uid, gid;
	bool has_mtime;
	int64_t mtime_ns;
	bool has_stamp;
	uint64_t ino; // with the time of the last change of it in any way: when both are as they
	int64_t ctime_ns; // were, so is the content
	uint64_t size; // of a file
	const char *link; // of a link: what it points to, or the path of the other name
};

// Reads an entry from a payload, which is overwritten and which *ret points into afterwards.
// -EPROTO for what no sender writes; the path has been checked to stay below the top.
int tree_entry_get(char *json, size_t len, struct tree_entry *ret, struct err *err);

// --- From a disk -----------------------------------------------------------------------------

struct tree_send {
	unsigned depth; // levels of folders to go into; 0: the top alone
	bool content; // also the data of files
	bool owner; // also uid and gid
	bool stamp; // also ino and ctime_ns
	bool follow; // if the top is a symbolic link: what it points to
	// Whether to leave it out, a folder with all that is in it. May be NULL.
	bool (*skip)(void *ctx, const char *path, char type);
	void *skip_ctx;
	uint64_t offset, length; // of a file's data, for the top alone; length UINT64_MAX: all

	// Takes bytes of the stream. A negative errno ends it.
	int (*write)(void *ctx, const void *bytes, size_t len, struct err *err);
	void *ctx;
};

// Sends what path names. What cannot be read becomes a problem in the stream, and the rest follows;
// only a top that is not there, and what write() returns, end it.
int tree_send(const struct tree_send *how, const char *path, struct err *err);

// Sends single files of the folder top, as next() names them until it returns NULL. One that has
// several names is sent as often as it is named.
int tree_send_named(const struct tree_send *how, const char *top, const char *(*next)(void *ctx),
	void *next_ctx, struct err *err);

// --- To a disk -------------------------------------------------------------------------------

struct tree_receive {
	int dir_fd; // the folder to unpack in; the caller's
	const char *rename; // if set, the top's name in dir_fd; else its content goes into dir_fd
	bool owner; // set uid and gid, and keep the set-id bits; needs root
	bool keep; // a file that is replaced leaves its mode and owner to the new one
	bool plain; // files and folders alone: no links that others might follow, no FIFOs
	bool readable; // whoever unpacks can read it again, whatever its mode says
	// Of the disk, in all, counted in blocks: one for each entry or problem, and those of a
	// file's data without its holes. What is replaced is not given back. 0: no limit.
	uint64_t max_bytes;
	// A file, folder or link is there now, or could not be made (errno_value): may be NULL.
	void (*done)(void *ctx, const char *path, int errno_value);
	void *ctx;
};

// A path that somebody else chose, for a person to read: nothing in it drives a terminal.
void tree_printable(char *ret, size_t size, const char *path);

struct tree_receiver;

// Returns NULL when there is no memory. how is copied, its pointers are not.
struct tree_receiver *tree_receiver_create(const struct tree_receive *how);
void tree_receiver_destroy(struct tree_receiver *r); // an unfinished file is removed

// Takes the next bytes of the stream. What cannot be made is counted and reported to done(), and
// the rest goes on; a stream that is wrong, or says too much, ends with a negative errno.
int tree_receive(struct tree_receiver *r, const uint8_t *bytes, size_t len, struct err *err);

// The stream has ended: -EPIPE if it was cut, -EIO with the first problem if there was any.
int tree_receiver_finish(struct tree_receiver *r, struct err *err);

#endif
