// SPDX-License-Identifier: Apache-2.0
// .mayfly.ini; see the header. One thread.
#include "cli/work_ini.h"

#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/machine_options.h"
#include "vmm/base/fd.h"
#include "vmm/config.h"
#include "work/scan.h"

#define INI_MAX_BYTES 65536
#define INI_LINE_MAX  8192

struct reader {
	struct work_ini *ini;
	struct config *config;
	struct err err;
};

void work_ini_fini(struct work_ini *ini)
{
	for (unsigned int i = 0; i < ini->nr_cache; i++)
		free(ini->cache[i]);
	for (unsigned int i = 0; i < ini->nr_env; i++)
		free(ini->env[i]);
	for (unsigned int i = 0; i < ini->nr_persist; i++)
		free(ini->persist[i]);
	buf_fini(&ini->setup);
	*ini = (struct work_ini){0};
}

static int add(char **list, unsigned int *nr, const char *value, struct err *err)
{
	if (*nr == WORK_INI_MAX)
		return err_set(err, -EINVAL, "more than %d of them", WORK_INI_MAX);
	list[*nr] = strdup(value);
	if (!list[*nr])
		return err_errno(err, -ENOMEM, "%s", value);
	++*nr;
	return 0;
}

// Paths of the guest, whole ones; "~/" is its root's home.
static int add_paths(struct reader *r, const char *value)
{
	char path[PATH_MAX];

	while (*(value += strspn(value, " \t"))) {
		size_t len = strcspn(value, " \t");
		bool home = value[0] == '~' && len > 1 && value[1] == '/';
		int n = snprintf(path, sizeof(path), "%s%.*s", home ? "/root" : "",
			(int)(len - home), value + home);

		if (n >= (int)sizeof(path) || path[0] != '/' || !work_path_ok(path + 1))
			return err_set(&r->err, -EINVAL,
				"'%.200s': no path in the machine, like /var/cache/x or ~/.cache",
				value);
		n = add(r->ini->persist, &r->ini->nr_persist, path, &r->err);
		if (n < 0)
			return n;
		value += len;
	}
	return 0;
}

static int take(struct reader *r, const char *key, const char *value)
{
	static const struct {
		const char *key;
		int option;
	} options[] = {{"image", OPT_IMAGE}, {"memory", 'm'}, {"cpus", 'c'}, {"net", OPT_NET}};

	if (!strcmp(key, "setup")) {
		buf_append(&r->ini->setup, value, strlen(value));
		buf_append(&r->ini->setup, "\n", 1);
		return 0;
	}
	if (!strcmp(key, "cache"))
		return work_path_ok(value)
			       ? add(r->ini->cache, &r->ini->nr_cache, value, &r->err)
			       : err_set(&r->err, -EINVAL, "'%s' is no file in the folder", value);
	if (!strcmp(key, "persist"))
		return add_paths(r, value);
	if (!strcmp(key, "env"))
		return strchr(value, '=') && value[0] != '='
			       ? add(r->ini->env, &r->ini->nr_env, value, &r->err)
			       : err_set(&r->err, -EINVAL, "'%s' is not NAME=VALUE", value);
	for (size_t i = 0; i < ARRAY_SIZE(options); i++)
		if (!strcmp(key, options[i].key))
			return MIN(machine_option(r->config, options[i].option, value, &r->err), 0);
	return err_set(&r->err, -EINVAL,
		"'%s' is unknown: image, memory, cpus, net, setup, cache, persist, env", key);
}

static int on_key(void *opaque, const char *section, const char *key, const char *value)
{
	struct reader *r = opaque;

	if (r->err.code)
		return 0;
	if (strcmp(section, "work") != 0)
		err_set(&r->err, -EINVAL, "there is only the section [work]");
	else
		take(r, key, value);
	return r->err.code == 0;
}

int work_ini_read(const char *target, struct work_ini *ret, struct config *config, struct err *err)
{
	struct work_ini ini = {0};
	struct reader reader = {.ini = &ini, .config = config};
	CLEANUP_FREE char *text = NULL;
	char path[PATH_MAX];
	size_t len;
	int line, r;

	*ret = ini;
	if (snprintf(path, sizeof(path), "%s/" WORK_INI_NAME, target) >= (int)sizeof(path))
		return err_errno(err, -ENAMETOOLONG, "%s", target);
	r = fd_read_file(path, INI_MAX_BYTES, &text, &len, err);
	if (r == -ENOENT)
		return 0;
	if (r < 0)
		return r;
	// As vmm/config.c has them: what inih does is decided at run time.
	ini_use_stack = false;
	ini_max_line = ini_initial_alloc = INI_LINE_MAX;
	ini_allow_multiline = ini_allow_inline_comments = false;
	ini_stop_on_first_error = true;
	line = strlen(text) == len ? ini_parse_string(text, on_key, &reader) : 1;
	r = reader.err.code ? reader.err.code : line ? -EINVAL : buf_error(&ini.setup);
	if (reader.err.code)
		err_set(err, r, "%s:%d: %s", path, line, reader.err.msg);
	else if (r < 0)
		err_set(err, r, "%s:%d: it cannot be read", path, line);
	if (r < 0) {
		work_ini_fini(&ini);
		return r;
	}
	*ret = ini;
	return 0;
}

int work_ini_key(const struct work_ini *ini, int target_fd, const char *target, const char *inside,
	struct buf *ret, struct err *err)
{
	char text[2 * WORK_HASH_BYTES + 1];

	buf_append(ret, "work\n", 5);
	buf_append(ret, target, strlen(target));
	buf_append(ret, "\n", 1);
	buf_append(ret, inside, strlen(inside));
	buf_append(ret, "\n", 1);
	buf_append(ret, ini->setup.data, ini->setup.len);
	for (unsigned int i = 0; i < ini->nr_env; i++) {
		buf_append(ret, ini->env[i], strlen(ini->env[i]));
		buf_append(ret, "\n", 1);
	}
	for (unsigned int i = 0; i < ini->nr_cache; i++) {
		uint8_t hash[WORK_HASH_BYTES] = {0};
		const char *name;
		CLEANUP_FD int parent_fd = work_open_parent(target_fd, ini->cache[i], &name);
		CLEANUP_FD int fd = -1;
		int r = MIN(parent_fd, 0);

		if (r == 0) {
			fd = openat(
				parent_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
			r = fd < 0 ? -errno : work_hash_fd(fd, hash);
		}
		if (r < 0)
			return err_errno(
				err, r, "%s/" WORK_INI_NAME ": cache = %s", target, ini->cache[i]);
		for (size_t k = 0; k < sizeof(hash); k++)
			snprintf(text + 2 * k, 3, "%02x", hash[k]);
		buf_append(ret, text, sizeof(text) - 1);
		buf_append(ret, ini->cache[i], strlen(ini->cache[i]) + 1);
	}
	// One text: what it is made of may have had a NUL in it.
	for (size_t i = 0; i < ret->len; i++)
		if (ret->data[i] == '\0')
			ret->data[i] = '\n';
	buf_append(ret, "", 1);
	return buf_error(ret) < 0 ? err_errno(err, -ENOMEM, "set-up") : 0;
}
