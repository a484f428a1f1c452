// SPDX-License-Identifier: Apache-2.0
// The configuration files of the programs that agents run in: a machine's endpoint is put into the
// client's own file and taken out again, as text, so that all else in it stays as it was, comments
// too. One thread.
#ifndef MAYFLY_MCP_CLIENTS_H
#define MAYFLY_MCP_CLIENTS_H

#include "vmm/base/err.h"

struct clients_entry {
	const char *client; // one of those that clients_names() tells
	const char *machine;
	const char *program; // mayfly
	const char *access; // NULL, or a level for --access
	bool dry_run; // only tell
};

// "claude-code, codex, …": for messages.
const char *clients_names(void);

// Prints on stdout what it did. -EINVAL for a client that is not known; -EEXIST if there is another
// server of that name; a file that cannot be understood is left alone.
int clients_install(const struct clients_entry *entry, struct err *err);

// -ENOENT if there is none.
int clients_uninstall(const struct clients_entry *entry, struct err *err);

// --- For tests: the text alone ---------------------------------------------------------------

// Puts "name": value into the object section of the JSON text (with comments, perhaps), or takes it
// out if value is NULL. Returns the new text, the caller's, or NULL with *err filled.
char *clients_edit_json(const char *text, const char *section, const char *name, const char *value,
	struct err *err);

// The same for a table [section."name"] of a TOML text; value is its lines.
char *clients_edit_toml(const char *text, const char *section, const char *name, const char *value,
	struct err *err);

#endif
