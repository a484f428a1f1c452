// SPDX-License-Identifier: Apache-2.0
// The options that say what a machine is; see the header. One thread.
#include "cli/machine_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/home.h"
#include "cli/rootfs_store.h"
#include "vmm/config.h"

#define IMAGE_MEMORY_BYTES (512 * MIB)

// A file that the monitor, whose working directory is another, is to find.
static int set_path(struct config *config, const char *section, const char *key, const char *path,
	struct err *err)
{
	CLEANUP_FREE char *absolute = realpath(path, NULL);

	if (!absolute)
		return err_errno(err, -errno, "%s", path);
	return config_set(config, section, key, absolute, err);
}

// KEY=VALUE[,KEY=VALUE]..., of that section. Accepts NULL; takes it apart.
static int set_words(struct config *config, const char *section, char *rest, struct err *err)
{
	char *word, *equals;
	int r = 0;

	while (r == 0 && (word = strsep(&rest, ","))) {
		equals = strchr(word, '=');
		if (!equals)
			return err_set(err, -EINVAL, "'%.40s' is not KEY=VALUE", word);
		*equals = '\0';
		r = config_set(config, section, word, equals + 1, err);
	}
	return r;
}

// FILE[,KEY=VALUE]..., with the keys of [disk] in vm.ini: the next disk.
static int add_disk(struct config *config, const char *value, struct err *err)
{
	CLEANUP_FREE char *text = strdup(value);
	const char *section;
	unsigned int disk = 0;
	char *rest = text, *word;
	int r = 0;

	while (disk < CONFIG_DISKS_MAX && config_has_disk(&config->disks[disk]))
		disk++;
	if (disk == CONFIG_DISKS_MAX)
		return err_set(err, -EINVAL, "more than %d disks", CONFIG_DISKS_MAX);
	section = config_disk_name(disk);
	if (!text)
		return err_errno(err, -ENOMEM, "%s", value);
	// The file comes first, or is left out.
	if (!memchr(text, '=', strcspn(text, ","))) {
		word = strsep(&rest, ",");
		r = set_path(config, section, "file", word, err);
	}
	if (r == 0)
		r = set_words(config, section, rest, err);
	if (r == 0 && !config_has_disk(&config->disks[disk]))
		r = err_set(err, -EINVAL, "neither a file nor a size");
	return r < 0 ? err_wrap(err, r, "--disk %s", value) : 0;
}

// NAME[,KEY=VALUE]..., with the keys of [disk]: the root, which is the first disk.
static int set_image(struct config *config, const char *value, struct err *err)
{
	CLEANUP_FREE char *text = strdup(value);
	CLEANUP_ROOTFS struct rootfs image = {0};
	char file[PATH_MAX], *rest = text, *name;
	int r;

	if (!text)
		return err_errno(err, -ENOMEM, "%s", value);
	if (config->root == CONFIG_ROOT_DISK)
		return err_set(err, -EINVAL, "--image %s: there is one already", value);
	if (config_has_disk(&config->disks[CONFIG_DISKS_MAX - 1]))
		return err_set(err, -EINVAL, "--image %s: more than %d disks with it", value,
			CONFIG_DISKS_MAX);
	name = strsep(&rest, ",");
	r = rootfs_find(name, &image, err);
	if (r < 0)
		return r;
	if (snprintf(file, sizeof(file), "%s/" ROOTFS_DISK, image.dir) >= (int)sizeof(file))
		return err_errno(err, -ENAMETOOLONG, "%s", image.dir);
	memmove(&config->disks[1], &config->disks[0],
		sizeof(config->disks[0]) * (CONFIG_DISKS_MAX - 1));
	config->disks[0] = (struct config_disk){0};
	config->root = CONFIG_ROOT_DISK;
	r = config_set(config, "disk", "file", file, err);
	if (r == 0)
		r = set_words(config, "disk", rest, err);
	return r < 0 ? err_wrap(err, r, "--image %s", value) : 0;
}

// MODE[,KEY=VALUE]..., with the keys of [net]; tap:NAME names the tap as well.
static int set_net(struct config *config, const char *value, struct err *err)
{
	CLEANUP_FREE char *text = strdup(value);
	char *rest = text, *mode, *tap;
	int r;

	if (!text)
		return err_errno(err, -ENOMEM, "%s", value);
	tap = strsep(&rest, ",");
	mode = strsep(&tap, ":");
	r = config_set(config, "net", "mode", mode, err);
	if (r == 0 && (tap != NULL) != (config->net.mode == CONFIG_NET_TAP))
		r = err_set(err, -EINVAL, tap ? "a name is for a tap only" : "write it tap:NAME");
	if (r == 0 && tap)
		r = config_set(config, "net", "tap", tap, err);
	if (r == 0)
		r = set_words(config, "net", rest, err);
	if (r == 0 && config->allow.nr && config->net.mode != CONFIG_NET_ALLOWLIST &&
		config->net.mode != CONFIG_NET_NAT)
		r = err_set(err, -EINVAL, "--allow is for --net allowlist or nat");
	return r < 0 ? err_wrap(err, r, "--net %s", value) : 0;
}

static int set_limits(struct config *config, const char *value, struct err *err)
{
	CLEANUP_FREE char *text = strdup(value);
	int r = text ? set_words(config, "limits", text, err) : err_errno(err, -ENOMEM, "limits");

	return r < 0 ? err_wrap(err, r, "--limit %s", value) : 0;
}

static int add_allow(struct config *config, const char *value, struct err *err)
{
	struct allow_rule rule;
	int r = allow_rule_parse(value, strlen(value), &rule, err);

	if (r == 0 && config_net_has_device(&config->net) && !config_net_has_rules(&config->net))
		r = err_set(err, -EINVAL, "not with --net %s, which reaches all",
			config_net_name(config->net.mode));
	if (r == 0)
		r = allow_add(&config->allow, &rule, err);
	if (config->net.mode != CONFIG_NET_NAT)
		config->net.mode = CONFIG_NET_ALLOWLIST;
	return r < 0 ? err_wrap(err, r, "--allow %s", value) : 0;
}

int machine_option(struct config *config, int opt, const char *value, struct err *err)
{
	static bool memory_given; // one command line, one machine
	int r;

	switch (opt) {
	case 'm':
		r = config_set(config, "machine", "memory", value, err);
		memory_given = true;
		break;
	case 'c':
		r = config_set(config, "machine", "cpus", value, err);
		break;
	case OPT_KERNEL:
		r = strcmp(value, "standard") != 0
			    ? set_path(config, "machine", "kernel", value, err)
			    : home_find_standard_kernel(config->kernel, err);
		break;
	case OPT_INITRAMFS:
		r = set_path(config, "machine", "initramfs", value, err);
		break;
	case OPT_APPEND:
		r = config_set(config, "machine", "append", value, err);
		break;
	case OPT_DISK:
		r = add_disk(config, value, err);
		break;
	case OPT_IMAGE:
		r = set_image(config, value, err);
		// What a distribution's package manager needs.
		if (!memory_given)
			config->memory_bytes = IMAGE_MEMORY_BYTES;
		break;
	case OPT_INIT:
		r = config_set(config, "machine", "init", value, err);
		break;
	case OPT_NET:
		r = set_net(config, value, err);
		break;
	case OPT_LIMIT:
		r = set_limits(config, value, err);
		break;
	case OPT_ALLOW:
		r = add_allow(config, value, err);
		break;
	default:
		return 0;
	}
	return r < 0 ? r : 1;
}
