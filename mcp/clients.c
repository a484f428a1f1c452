// SPDX-License-Identifier: Apache-2.0
// Configuration files of MCP clients; see the header. One thread.
#include "mcp/clients.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/memory_lack.h"

#define FILE_MAX_BYTES (64 * MIB)

struct client {
	const char *name;
	const char *dir_variable; // of the environment, or NULL
	const char *dir; // below $HOME where that is not set
	const char *file; // below either
	const char *section;
	bool toml, typed; // an entry says that it is of type stdio
};

static const struct client clients[] = {
	{"claude-code", "CLAUDE_CONFIG_DIR", "", ".claude.json", "mcpServers", false, true},
	{"codex", "CODEX_HOME", ".codex/", "config.toml", "mcp_servers", true, false},
	{"cursor", NULL, ".cursor/", "mcp.json", "mcpServers", false, false},
	{"vscode", "XDG_CONFIG_HOME", ".config/", "Code/User/mcp.json", "servers", false, true},
	{"gemini-cli", NULL, ".gemini/", "settings.json", "mcpServers", false, false},
};

const char *clients_names(void)
{
	return "claude-code, codex, cursor, vscode and gemini-cli";
}

// --- JSON as text ----------------------------------------------------------------------------

// Behind blanks and comments.
static const char *skip_space(const char *at)
{
	for (;;) {
		at += strspn(at, " \t\r\n");
		if (at[0] == '/' && at[1] == '/') {
			at = strchrnul(at, '\n');
		} else if (at[0] == '/' && at[1] == '*') {
			const char *end = strstr(at + 2, "*/");

			at = end ? end + 2 : at + strlen(at);
		} else {
			return at;
		}
	}
}

// Behind the string that begins at at, or NULL if it has no end.
static const char *skip_string(const char *at)
{
	for (at++; *at && *at != '"'; at++)
		if (*at == '\\' && *++at == '\0')
			return NULL;
	return *at ? at + 1 : NULL;
}

// Behind the value that begins at at.
static const char *skip_value(const char *at)
{
	size_t depth = 0;

	do {
		at = skip_space(at);
		if (*at == '"') {
			at = skip_string(at);
			if (!at)
				return NULL;
			continue;
		}
		if (*at == '\0' || ((*at == '}' || *at == ']') && depth == 0))
			return NULL;
		if (*at == '{' || *at == '[')
			depth++;
		else if (*at == '}' || *at == ']')
			depth--;
		else
			at += strcspn(at, "{}[]\",: \t\r\n/") ? strcspn(at, "{}[]\",: \t\r\n/") - 1
							      : 0;
		at++;
	} while (depth);
	return at;
}

struct member {
	const char *before; // behind the '{' or ',' that it follows
	const char *value, *end;
	bool first;
};

// The member of that name in the object whose '{' is at open: 1, 0 if there is none, or -EINVAL if
// it is no object.
static int find_member(const char *open, const char *name, struct member *ret)
{
	const char *at = open + 1;
	size_t len = strlen(name);
	bool first = true;

	for (;;) {
		struct member m = {.before = at, .first = first};
		const char *key = skip_space(at), *key_end;

		if (*key == '}')
			return 0;
		key_end = *key == '"' ? skip_string(key) : NULL;
		if (!key_end)
			return -EINVAL;
		at = skip_space(key_end);
		if (*at != ':')
			return -EINVAL;
		m.value = skip_space(at + 1);
		m.end = skip_value(m.value);
		if (!m.end)
			return -EINVAL;
		if ((size_t)(key_end - key) == len + 2 && !strncmp(key + 1, name, len)) {
			*ret = m;
			return 1;
		}
		at = skip_space(m.end);
		if (*at == '}')
			return 0;
		if (*at++ != ',')
			return -EINVAL;
		first = false;
	}
}

static bool is_empty(const char *open)
{
	return *skip_space(open + 1) == '}';
}

static bool same_json(const char *text, size_t len, const char *value)
{
	json_t *a = json_loadb(text, len, JSON_DECODE_ANY, NULL),
	       *b = json_loads(value, JSON_DECODE_ANY, NULL);
	bool same = a && b && json_equal(a, b);

	json_decref(a);
	json_decref(b);
	return same;
}

static char *insert(
	const char *text, const char *open, const char *indent, const char *name, const char *value)
{
	char *out = NULL;
	bool empty = is_empty(open);

	return asprintf(&out, "%.*s\n%s\"%s\": %s%s%s%s", (int)(open + 1 - text), text, indent,
		       name, value, empty ? "\n" : ",",
		       empty ? indent + MIN(strlen(indent), (size_t)2) : "",
		       empty ? skip_space(open + 1) : open + 1) < 0
		       ? NULL
		       : out;
}

static char *cut(const char *text, const struct member *m)
{
	const char *from = m->before, *to = m->end, *next = skip_space(to);
	char *out = NULL;

	if (*next == ',')
		to = next + 1;
	else if (!m->first)
		from--; // the comma before it
	return asprintf(&out, "%.*s%s", (int)(from - text), text, to) < 0 ? NULL : out;
}

static char *edit_json(
	const char *text, const char *section, const char *name, const char *value, struct err *err)
{
	const char *open = skip_space(text);
	struct member servers, mine;
	char *fresh = NULL, *out = NULL;
	int r;

	if (!*open && value) {
		if (asprintf(&out, "{\n  \"%s\": {\n    \"%s\": %s\n  }\n}\n", section, name,
			    value) < 0)
			out = NULL;
		return out;
	}
	r = *open == '{' ? find_member(open, section, &servers) : *open ? -EINVAL : 0;
	if (r == 1)
		r = *servers.value == '{' ? find_member(servers.value, name, &mine) : -EINVAL;
	else if (r == 0 && value) {
		if (asprintf(&fresh, "{\n    \"%s\": %s\n  }", name, value) < 0)
			return NULL;
		out = insert(text, open, "  ", section, fresh);
		free(fresh);
		return out;
	}
	if (r < 0)
		err_set(err, r, "it is not what was expected: nothing was changed");
	else if (!value && r == 0)
		err_set(err, -ENOENT, "there is no server '%s' in it", name);
	else if (!value)
		out = cut(text, &mine);
	else if (r == 0)
		out = insert(text, servers.value, "    ", name, value);
	else if (same_json(mine.value, (size_t)(mine.end - mine.value), value))
		out = strdup(text);
	else
		err_set(err, -EEXIST, "there is another server '%s' in it: nothing was changed",
			name);
	return out;
}

static bool is_json(const char *text)
{
	json_t *json = json_loads(text, 0, NULL);

	json_decref(json);
	return json != NULL;
}

char *clients_edit_json(
	const char *text, const char *section, const char *name, const char *value, struct err *err)
{
	struct err why = {0};
	char *out = edit_json(text, section, name, value, &why);

	// What was strict JSON still is.
	if (out && is_json(text) && !is_json(out)) {
		free(out);
		out = NULL;
		err_set(&why, -EINVAL, "it is not what was expected: nothing was changed");
	}
	if (!out)
		err_set(err, why.code ? why.code : -ENOMEM, "%s",
			why.code ? why.msg : "there is no memory");
	return out;
}

// --- TOML as text ----------------------------------------------------------------------------

// The line that is header, from its beginning.
static const char *find_table(const char *text, const char *header)
{
	size_t len = strlen(header);

	for (const char *line = text; *line; line = *line ? line + 1 : line) {
		if (!strncmp(line, header, len) && line[len + strspn(line + len, " \t\r")] == '\n')
			return line;
		line = strchrnul(line, '\n');
	}
	return NULL;
}

// Where the table that begins at at ends: at the next one, or with the text.
static const char *table_end(const char *at)
{
	for (at = strchrnul(at, '\n'); *at; at = strchrnul(at + 1, '\n'))
		if (at[1] == '[')
			return at + 1;
	return at;
}

char *clients_edit_toml(
	const char *text, const char *section, const char *name, const char *value, struct err *err)
{
	CLEANUP_FREE char *header = NULL;
	const char *at, *end;
	char *out = NULL;
	size_t len = strlen(text);

	if (asprintf(&header, "[%s.\"%s\"]", section, name) < 0) {
		header = NULL;
		err_errno(err, -ENOMEM, "%s", name);
		return NULL;
	}
	at = find_table(text, header);
	if (at && value) {
		end = table_end(at);
		at = strchrnul(at, '\n') + 1;
		if ((size_t)(end - at) >= strlen(value) && !strncmp(at, value, strlen(value)))
			return strdup(text);
		err_set(err, -EEXIST, "there is another server '%s' in it: nothing was changed",
			name);
		return NULL;
	}
	if (!at && !value) {
		err_set(err, -ENOENT, "there is no server '%s' in it", name);
		return NULL;
	}
	if (value)
		len = (size_t)asprintf(&out, "%s%s%s\n%s", text,
			len == 0                ? ""
			: text[len - 1] == '\n' ? "\n"
						: "\n\n",
			header, value);
	else {
		end = table_end(at);
		// With the blank line that stands before it.
		if (at - text >= 2 && at[-1] == '\n' && at[-2] == '\n')
			at--;
		len = (size_t)asprintf(&out, "%.*s%s%s", (int)(at - text), text,
			*end && at > text ? "\n" : "", end);
	}
	if (len == (size_t)-1) {
		out = NULL;
		err_errno(err, -ENOMEM, "%s", name);
	}
	return out;
}

// --- Files -----------------------------------------------------------------------------------

static int path_of(const struct client *client, char ret[PATH_MAX], struct err *err)
{
	const char *dir = client->dir_variable ? getenv(client->dir_variable) : NULL;
	const char *home = getenv("HOME");
	char path[PATH_MAX];
	int len;

	if (dir && dir[0])
		len = snprintf(path, sizeof(path), "%s/%s", dir, client->file);
	else if (home && home[0])
		len = snprintf(path, sizeof(path), "%s/%s%s", home, client->dir, client->file);
	else
		return err_set(err, -ENOENT, "HOME is not set");
	if (len >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", client->file);
	// Many keep these files elsewhere and a link here.
	if (!realpath(path, ret))
		memcpy(ret, path, strlen(path) + 1);
	return 0;
}

static void make_parents(char *path)
{
	for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
		*slash = '\0';
		mkdir(path, 0700);
		*slash = '/';
	}
}

// In the place of the file, unless that has changed since it was read.
static int replace_file(char *path, const struct stat *was, const char *text, struct err *err)
{
	CLEANUP_FD int fd = -1;
	char fresh[PATH_MAX];
	struct stat now;
	int r;

	if (snprintf(fresh, sizeof(fresh), "%s.mayfly-new", path) >= (int)sizeof(fresh))
		return err_errno(err, -ENAMETOOLONG, "%s", path);
	make_parents(path);
	unlink(fresh);
	fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s", fresh);
	r = fd_write_all(fd, text, strlen(text));
	if (r == 0 && was && (fchmod(fd, was->st_mode & 07777) < 0 || fsync(fd) < 0))
		r = -errno;
	if (r == 0 && (stat(path, &now) == 0) != (was != NULL))
		r = -EAGAIN;
	if (r == 0 && was &&
		(now.st_ino != was->st_ino || now.st_size != was->st_size ||
			now.st_mtim.tv_sec != was->st_mtim.tv_sec ||
			now.st_mtim.tv_nsec != was->st_mtim.tv_nsec))
		r = -EAGAIN;
	if (r == 0 && rename(fresh, path) < 0)
		r = -errno;
	if (r < 0)
		unlink(fresh);
	if (r == -EAGAIN)
		return err_set(err, r, "%s: it was changed meanwhile: try again", path);
	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

static const struct client *find_client(const char *name, struct err *err)
{
	for (size_t i = 0; i < ARRAY_SIZE(clients); i++)
		if (!strcmp(clients[i].name, name))
			return &clients[i];
	err_set(err, -EINVAL, "'%.40s' is none of %s", name, clients_names());
	return NULL;
}

// What the client is to start; the caller's.
static char *value_of(const struct client *client, const struct clients_entry *entry)
{
	const char *home = getenv("MAYFLY_HOME");
	const unsigned int lacks = memory_lacks();
	json_t *args = json_pack("[s]", "mcp"), *value = json_object();
	char *text, *command, *list, *out = NULL, *env = NULL;

	if (entry->access) {
		json_array_append_new(args, json_string("--access"));
		json_array_append_new(args, json_string(entry->access));
	}
	json_array_append_new(args, json_string(entry->machine));
	if (client->typed)
		json_object_set_new(value, "type", json_string("stdio"));
	json_object_set_new(value, "command", json_string(entry->program));
	json_object_set(value, "args", args);
	if (home && home[0])
		json_object_set_new(value, "env", json_pack("{s:s}", "MAYFLY_HOME", home));
	if (!client->toml) {
		text = json_dumps(value, JSON_COMPACT);
	} else {
		// Strings and arrays of strings are the same in both.
		command = json_dumps(json_object_get(value, "command"), JSON_ENCODE_ANY);
		list = json_dumps(args, 0);
		if (home && home[0]) {
			json_t *string = json_string(home);

			env = json_dumps(string, JSON_ENCODE_ANY);
			json_decref(string);
		}
		if (!command || !list ||
			asprintf(&out, "command = %s\nargs = %s\n%s%s%s", command, list,
				env ? "env = { MAYFLY_HOME = " : "", env ? env : "",
				env ? " }\n" : "") < 0)
			out = NULL;
		free(command);
		free(list);
		free(env);
		text = out;
	}
	json_decref(value);
	json_decref(args);
	// What there was no memory for is not in it.
	if (memory_lacks() != lacks) {
		free(text);
		return NULL;
	}
	return text;
}

static int edit(const struct clients_entry *entry, bool add, struct err *err)
{
	const struct client *client = find_client(entry->client, err);
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FREE char *value = NULL;
	CLEANUP_FREE char *fresh = NULL;
	char path[PATH_MAX], name[80];
	bool there = false;
	struct stat st;
	size_t len;
	int r;

	if (!client)
		return -EINVAL;
	r = path_of(client, path, err);
	if (r < 0)
		return r;
	there = stat(path, &st) == 0;
	if (there)
		r = fd_read_file(path, FILE_MAX_BYTES, &text, &len, err);
	else
		text = strdup("");
	value = add ? value_of(client, entry) : NULL;
	if (r == 0 && (!text || (add && !value)))
		r = err_errno(err, -ENOMEM, "%s", path);
	if (r < 0)
		return r;
	ASSERT(text);
	if (there && strlen(text) != len)
		return err_set(err, -EINVAL, "%s: it is no text: nothing was changed", path);
	snprintf(name, sizeof(name), "mayfly-%.70s", entry->machine);
	fresh = client->toml ? clients_edit_toml(text, client->section, name, value, err)
			     : clients_edit_json(text, client->section, name, value, err);
	if (!fresh)
		return err_wrap(err, err->code, "%s", path);
	if (!strcmp(fresh, text)) {
		printf("%s: the server '%s' is there already\n", path, name);
		return 0;
	}
	if (!entry->dry_run)
		r = replace_file(path, there ? &st : NULL, fresh, err);
	if (r < 0)
		return r;
	printf("%s: the server '%s' %s %s\n", path, name, entry->dry_run ? "would be" : "was",
		add ? "added" : "removed");
	if (add)
		printf("%s%s", value, client->toml ? "" : "\n");
	return 0;
}

int clients_install(const struct clients_entry *entry, struct err *err)
{
	return edit(entry, true, err);
}

int clients_uninstall(const struct clients_entry *entry, struct err *err)
{
	return edit(entry, false, err);
}
