// SPDX-License-Identifier: Apache-2.0
// What agents did with a machine: audit.jsonl in its folder, a record a line, appended only. Each
// line ends in the SHA-256 of itself and names that of the one before, so that a line that was
// changed, taken out or put in shows. Files of 8 MiB; the newest five are kept (audit.jsonl,
// audit.jsonl.1 and so on), the chain goes on across them. Several processes may append at a time.
// Any thread.
#ifndef MAYFLY_MCP_AUDIT_H
#define MAYFLY_MCP_AUDIT_H

#include <jansson.h>

#include "vmm/base/err.h"

#define AUDIT_FILE_BYTES (8 * MIB)
#define AUDIT_OLD_FILES  4
#define AUDIT_LINE_BYTES (64 * KIB)
#define AUDIT_HASH_BYTES 65 // hexadecimal, with its NUL

// Appends a record (taken over) to the log of the machine in dir, with its number, time and hashes.
// file_bytes: when to begin a new file; 0: AUDIT_FILE_BYTES.
int audit_append(const char *dir, json_t *record, uint64_t file_bytes, struct err *err);

// Returns when what was appended is on the disk.
int audit_sync(const char *dir, struct err *err);

// Calls each() for every record that is kept, the oldest first, until it returns below 0. A line
// that is no record is -EBADMSG.
int audit_each(const char *dir, int (*each)(void *opaque, const json_t *record), void *opaque,
	struct err *err);

// The number of the last record that is kept; 0 if there is none. -EBADMSG if it is damaged.
int audit_last(const char *dir, uint64_t *ret_seq);

struct audit_summary {
	uint64_t records, first, last; // numbers of the first and the last one
	char hash[AUDIT_HASH_BYTES]; // of the last: kept elsewhere, it shows a log that was cut
};

// -EBADMSG with the file and the line where the chain breaks.
int audit_verify(const char *dir, struct audit_summary *ret, struct err *err);

#endif
