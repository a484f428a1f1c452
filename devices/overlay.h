// SPDX-License-Identifier: Apache-2.0
// A disk as layers of 4 KiB blocks: a shared read-only base, frozen layers, and on top the one
// private layer that takes the writes. docs/disk-format.md has the format and the reasons.
//
// This module says where each byte of the disk lies and keeps the map of the top layer; the I/O on
// data is its caller's (virtio_blk), who tells it what has been done. What it reads from a file is
// hostile until checked. Loop thread.
#ifndef MAYFLY_DEVICES_OVERLAY_H
#define MAYFLY_DEVICES_OVERLAY_H

#include "vmm/base/err.h"

#define OVERLAY_BLOCK_BYTES 4096U
#define OVERLAY_LAYERS_MAX  100U // the top one included
#define OVERLAY_DISK_MAX    (1024 * GIB)
#define OVERLAY_NAME_BYTES  33U // of a frozen layer: its id in hexadecimal

struct overlay;

struct overlay_params {
	// Where DISK.overlay, the top, is or is to be made, and below it layers/ID, the frozen
	// ones.
	int dir_fd; // borrowed until overlay_close()
	const char *disk; // as in DISK.overlay; copied
	int base_fd; // open for reading, or -1 for a disk that begins blank; taken over on success
	const char *base_name; // for messages
	uint64_t size_bytes; // 0: the base's. Rounded up to whole blocks
	uint64_t quota_bytes; // of data in the top layer; 0: none
	// The layer does not outlive the monitor: nothing is written for the sake of a power cut.
	bool throwaway;
};

// Opens the disk, or makes it if there is no DISK.overlay yet. -EBUSY if another machine uses the
// top or writes to the base; -EUCLEAN for a file that is not what it should be; -ESTALE for another
// base than it was made on; -EINVAL for a size that cannot be.
int overlay_open(struct overlay **ret_ov, const struct overlay_params *params, struct err *err);

// Writes what is left of the map, unless throwaway. Accepts NULL. Nothing is in flight.
void overlay_close(struct overlay *ov);

uint64_t overlay_disk_bytes(const struct overlay *ov);
uint64_t overlay_used_bytes(const struct overlay *ov); // of data in the top layer

// --- Layers, for snapshots ---------------------------------------------------------------------

// Makes the top layer immutable, as layers/ID, and puts a new, empty one on it; nothing at all if
// nothing was written since the last time. All or nothing, also in a power cut. Nothing is in
// flight; it blocks until the data is on disk, unless throwaway. -EMLINK if there are too many
// layers.
int overlay_freeze(struct overlay *ov, struct err *err);

// The frozen layers, the lowest first: the names of files in layers/. Returns how many.
unsigned int overlay_frozen(
	const struct overlay *ov, char ret_names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES]);

// The same of a folder, down from a layer, the highest first. Returns how many. -EUCLEAN for a file
// that is not what its name says, -EMLINK.
int overlay_chain(int dir_fd, const char *layer,
	char ret_names[OVERLAY_LAYERS_MAX][OVERLAY_NAME_BYTES], struct err *err);

// Makes dir_fd's DISK.overlay an empty top on layers/LAYER, in the place of any that is there; the
// layers below it have to be in layers/ too when it is opened. For restores and clones. throwaway:
// it is not synced.
int overlay_create_on(
	int dir_fd, const char *disk, const char *layer, bool throwaway, struct err *err);

// Makes one frozen layer of those of DISK.overlay that are in no other folder, if they are at least
// so many (2 or more), in the place and by the name of the highest; the disk stays as it is, also
// in a power cut. Nobody opens or links its layers meanwhile, but for a monitor: -EBUSY. Returns
// how many are fewer. It copies their data, or shares it where the file system can.
int overlay_merge(int dir_fd, const char *disk, unsigned int at_least, struct err *err);

// --- Data --------------------------------------------------------------------------------------
// [off, off + len) is on the disk, and len is not 0.

// The next piece of a request that can be done by one operation. Pieces that are written are ended
// with overlay_wrote().
struct overlay_run {
	enum overlay_run_kind {
		OVERLAY_FILE, // read, or write in place, at fd and file_off
		OVERLAY_ZEROS, // reads as zeros
		OVERLAY_NEW, // whole blocks, to be written at fd and file_off
		// Part of a block that is not in the top layer: the block is to be read as
		// overlay_read() says, changed, and written as a whole, at fd and file_off, while
		// nobody else writes to it. bytes is the part's.
		OVERLAY_COPY,
	} kind;
	int fd;
	uint64_t file_off;
	uint64_t bytes; // at most len
};

void overlay_read(
	const struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run);

// -ENOSPC if the quota has no room; it is reserved until overlay_wrote().
int overlay_write(struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run);

// The write of a run that began at off has ended, well or not. kind and bytes as overlay_write()
// gave them.
void overlay_wrote(
	struct overlay *ov, enum overlay_run_kind kind, uint64_t off, uint64_t bytes, bool good);

// Whole blocks read as zeros from now on, whatever is below. True if there was data in them: then
// a hole in ret_run gives its room back.
bool overlay_zero(struct overlay *ov, uint64_t off, uint64_t len, struct overlay_run *ret_run);

// --- Flush -------------------------------------------------------------------------------------
// After overlay_flush_begin() has returned true: fdatasync() of the fd; then what
// overlay_flush_next() gives, piece by piece, is written to it; then fdatasync() again;
// overlay_flush_end(). False: fdatasync() is all. One flush at a time; writes go on meanwhile.

bool overlay_flush_begin(struct overlay *ov);
bool overlay_flush_next(
	struct overlay *ov, const void **ret_data, uint64_t *ret_bytes, uint64_t *ret_file_off);
void overlay_flush_end(struct overlay *ov, bool good);

int overlay_top_fd(const struct overlay *ov);

#endif
