// SPDX-License-Identifier: Apache-2.0
// vm.ini, through inih; see the header. Any thread.
#include "vmm/config.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/base/fd.h"
#include "vmm/base/parse.h"
#include "vmm/builtin.h"

#define FILE_MAX_BYTES 65536U
#define LINE_MAX_BYTES 8192

struct key {
	const char *section;
	const char *name;
	int (*set)(struct config *config, const char *value, struct err *err);
};

struct disk_key {
	const char *name;
	int (*set)(struct config_disk *disk, const char *value, struct err *err);
};

static const char *const disk_names[CONFIG_DISKS_MAX] = {"disk", "disk2", "disk3", "disk4"};

static int set_text(char *dst, size_t size, const char *value, struct err *err)
{
	size_t len = strlen(value);

	if (len >= size)
		return err_set(err, -ERANGE, "longer than %zu bytes", size - 1);
	for (size_t i = 0; i < len; i++)
		if ((unsigned char)value[i] < ' ' || value[i] == 0x7f)
			return err_set(err, -EINVAL, "contains a control character");
	memcpy(dst, value, len + 1);
	return 0;
}

static int set_path(char dst[PATH_MAX], const char *value, struct err *err)
{
	if (value[0] && value[0] != '/')
		return err_set(err, -EINVAL, "'%.60s' is not a whole path: begin it with /", value);
	return set_text(dst, PATH_MAX, value, err);
}

static int set_kernel(struct config *config, const char *value, struct err *err)
{
	return set_path(config->kernel, value, err);
}

static int set_initramfs(struct config *config, const char *value, struct err *err)
{
	if (!strcmp(value, BUILTIN_NAME))
		return set_text(config->initramfs, sizeof(config->initramfs), value, err);
	return set_path(config->initramfs, value, err);
}

static const char *const roots[] = {
	[CONFIG_ROOT_INITRAMFS] = "initramfs",
	[CONFIG_ROOT_DISK] = "disk",
};

static int set_root(struct config *config, const char *value, struct err *err)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(roots); i++) {
		if (strcmp(value, roots[i]))
			continue;
		config->root = (enum config_root)i;
		return 0;
	}
	return err_set(err, -EINVAL, "'%.40s' is neither initramfs nor disk", value);
}

static int set_init(struct config *config, const char *value, struct err *err)
{
	if (value[0] && (value[0] != '/' || strpbrk(value, " \t\"'")))
		return err_set(err, -EINVAL,
			"'%.60s' is not a whole path without spaces, like /sbin/init", value);
	return set_text(config->init, sizeof(config->init), value, err);
}

static int set_append(struct config *config, const char *value, struct err *err)
{
	return set_text(config->append, sizeof(config->append), value, err);
}

static int set_memory(struct config *config, const char *value, struct err *err)
{
	uint64_t bytes;
	int r = parse_size(value, &bytes, err);

	if (r < 0)
		return r;
	if (bytes < CONFIG_MEMORY_MIN_BYTES)
		return err_set(err, -ERANGE, "%s is too little: at least %lluM", value,
			CONFIG_MEMORY_MIN_BYTES / MIB);
	if (bytes > CONFIG_MEMORY_MAX_BYTES)
		return err_set(err, -ERANGE, "%s is too much: at most %lluG", value,
			CONFIG_MEMORY_MAX_BYTES / GIB);
	if (bytes % PAGE_BYTES)
		return err_set(err, -EINVAL, "%s is not a multiple of the page size, 4K", value);
	config->memory_bytes = bytes;
	return 0;
}

static int set_cpus(struct config *config, const char *value, struct err *err)
{
	uint64_t cpus;
	int r = parse_uint(value, 1, CONFIG_CPUS_MAX, &cpus, err);

	if (r == 0)
		config->cpus = (unsigned int)cpus;
	return r;
}

static int set_cid(struct config *config, const char *value, struct err *err)
{
	uint64_t cid;
	int r = parse_uint(value, CONFIG_CID_MIN, UINT32_MAX - 1, &cid, err);

	if (r == 0)
		config->cid = (uint32_t)cid;
	return r;
}

static int set_disk_file(struct config_disk *disk, const char *value, struct err *err)
{
	return set_path(disk->file, value, err);
}

static const char *const disk_modes[] = {
	[CONFIG_DISK_OVERLAY] = "overlay",
	[CONFIG_DISK_RAW] = "raw",
	[CONFIG_DISK_RO] = "ro",
};

static int set_disk_mode(struct config_disk *disk, const char *value, struct err *err)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(disk_modes); i++) {
		if (strcmp(value, disk_modes[i]))
			continue;
		disk->mode = (enum config_disk_mode)i;
		return 0;
	}
	return err_set(err, -EINVAL, "'%.40s' is none of overlay, raw, ro", value);
}

static int set_disk_size(struct config_disk *disk, const char *value, struct err *err)
{
	return parse_size(value, &disk->size_bytes, err);
}

static int set_disk_quota(struct config_disk *disk, const char *value, struct err *err)
{
	return parse_size(value, &disk->quota_bytes, err);
}

static int set_disk_bytes(struct config_disk *disk, const char *value, struct err *err)
{
	return parse_size(value, &disk->bytes_per_s, err);
}

static int set_disk_ops(struct config_disk *disk, const char *value, struct err *err)
{
	return parse_uint(value, 1, UINT32_MAX, &disk->ops_per_s, err);
}

static const struct disk_key disk_keys[] = {
	{"file", set_disk_file},
	{"mode", set_disk_mode},
	{"size", set_disk_size},
	{"quota", set_disk_quota},
	{"bytes_per_s", set_disk_bytes},
	{"ops_per_s", set_disk_ops},
};

static const char *const net_modes[] = {
	[CONFIG_NET_NONE] = "none",
	[CONFIG_NET_TAP] = "tap",
	[CONFIG_NET_PASST] = "passt",
	[CONFIG_NET_ALLOWLIST] = "allowlist",
	[CONFIG_NET_NAT] = "nat",
};

static int set_net_mode(struct config *config, const char *value, struct err *err)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(net_modes); i++) {
		if (strcmp(value, net_modes[i]))
			continue;
		config->net.mode = (enum config_net_mode)i;
		return 0;
	}
	return err_set(
		err, -EINVAL, "'%.40s' is none of none, tap, passt, allowlist and nat", value);
}

static int set_net_card(struct config *config, const char *value, struct err *err)
{
	if (strcmp(value, "yes") != 0 && strcmp(value, "no") != 0)
		return err_set(err, -EINVAL, "'%.40s' is neither yes nor no", value);
	config->net.card = value[0] == 'y';
	return 0;
}

const char *config_net_name(enum config_net_mode mode)
{
	ASSERT((unsigned int)mode < ARRAY_SIZE(net_modes));
	return net_modes[mode];
}

void config_reach(const struct config *config, struct allow_list *ret)
{
	*ret = (struct allow_list){0};
	if (config->net.mode == CONFIG_NET_ALLOWLIST)
		*ret = config->keep.nr ? config->keep : config->allow;
}

static int set_net_allow(struct config *config, const char *value, struct err *err)
{
	return allow_parse(value, &config->allow, err);
}

static int set_net_keep(struct config *config, const char *value, struct err *err)
{
	return allow_parse(value, &config->keep, err);
}

static const char *const access_names[CONFIG_ACCESS_COUNT] = {
	[CONFIG_ACCESS_NONE] = "none",
	[CONFIG_ACCESS_OBSERVE] = "observe",
	[CONFIG_ACCESS_MANAGE] = "manage",
	[CONFIG_ACCESS_EXEC] = "exec",
};

const char *config_access_name(enum config_access access)
{
	ASSERT((unsigned int)access < CONFIG_ACCESS_COUNT);
	return access_names[access];
}

int config_access_parse(const char *text, enum config_access *ret, struct err *err)
{
	for (unsigned int i = 0; i < CONFIG_ACCESS_COUNT; i++) {
		if (strcmp(text, access_names[i]))
			continue;
		*ret = (enum config_access)i;
		return 0;
	}
	return err_set(err, -EINVAL, "'%.40s' is none of none, observe, manage and exec", text);
}

static int set_access(struct config *config, const char *value, struct err *err)
{
	return config_access_parse(value, &config->access, err);
}

// Takes the entry at *at, up to a comma, and moves behind it. Whether there was one.
static bool next_folder(const char **at, struct config_folder *ret)
{
	const char *start = *at + strspn(*at, " \t,"), *end = strchrnul(start, ',');
	size_t len = (size_t)(end - start);

	*at = end;
	while (len && (start[len - 1] == ' ' || start[len - 1] == '\t'))
		len--;
	ret->write = len > 3 && !memcmp(start + len - 3, ":rw", 3);
	len -= ret->write ? 3U : 0;
	while (len > 1 && start[len - 1] == '/')
		len--;
	ASSERT(len < sizeof(ret->path)); // longer than the whole list
	memcpy(ret->path, start, len);
	ret->path[len] = '\0';
	return len > 0;
}

bool config_folder(const struct config *config, unsigned int idx, struct config_folder *ret)
{
	const char *at = config->folders;

	while (next_folder(&at, ret))
		if (idx-- == 0)
			return true;
	return false;
}

static int set_folders(struct config *config, const char *value, struct err *err)
{
	struct config_folder folder;
	const char *at = value;
	int r = set_text(config->folders, sizeof(config->folders), value, err);

	for (unsigned int nr = 0; r == 0 && next_folder(&at, &folder); nr++) {
		if (nr == CONFIG_FOLDERS_MAX)
			r = err_set(err, -E2BIG, "more than %d folders", CONFIG_FOLDERS_MAX);
		else if (folder.path[0] != '/')
			r = err_set(err, -EINVAL,
				"'%.60s' is not a whole path: begin it with / (a comma ends each)",
				folder.path);
	}
	return r;
}

static int set_net_tap(struct config *config, const char *value, struct err *err)
{
	return set_text(config->net.tap, sizeof(config->net.tap), value, err);
}

static bool parse_mac(const char *text, uint8_t ret_mac[6])
{
	unsigned int b[6];
	int end = -1;

	if (sscanf(text, "%2x:%2x:%2x:%2x:%2x:%2x%n", b, b + 1, b + 2, b + 3, b + 4, b + 5, &end) !=
			6 ||
		text[end] || strlen(text) != CONFIG_MAC_BYTES - 1)
		return false;
	for (int i = 0; i < 6; i++)
		ret_mac[i] = (uint8_t)b[i];
	return !(ret_mac[0] & 1); // of one station
}

static int set_net_mac(struct config *config, const char *value, struct err *err)
{
	uint8_t mac[6];

	if (value[0] && !parse_mac(value, mac))
		return err_set(err, -EINVAL,
			"'%.40s' is not a station's address, like 02:00:00:00:00:01", value);
	return set_text(config->net.mac, sizeof(config->net.mac), value, err);
}

static int set_ip(char dst[CONFIG_IP_BYTES], const char *value, struct err *err)
{
	struct in_addr in;

	if (value[0] && inet_pton(AF_INET, value, &in) != 1)
		return err_set(
			err, -EINVAL, "'%.40s' is not an IPv4 address, like 10.0.0.1", value);
	return set_text(dst, CONFIG_IP_BYTES, value, err);
}

static int set_net_address(struct config *config, const char *value, struct err *err)
{
	const char *slash = strchr(value, '/');
	char ip[CONFIG_IP_BYTES];
	uint64_t bits;
	int r;

	if (value[0] && (!slash || slash == value || slash - value >= (long)sizeof(ip) ||
				parse_uint(slash + 1, 1, 32, &bits, NULL) < 0))
		return err_set(err, -EINVAL,
			"'%.40s' is not an address with its network's length, like 10.0.0.2/24",
			value);
	snprintf(ip, sizeof(ip), "%.*s", slash ? (int)(slash - value) : 0, value);
	r = set_ip(config->net.address, ip, err); // without its length
	return r < 0 ? r : set_text(config->net.address, CONFIG_IP_BYTES, value, err);
}

static int set_net_gateway(struct config *config, const char *value, struct err *err)
{
	return set_ip(config->net.gateway, value, err);
}

static int set_net_dns(struct config *config, const char *value, struct err *err)
{
	return set_ip(config->net.dns, value, err);
}

static int set_net_bytes_per_s(struct config *config, const char *value, struct err *err)
{
	if (strcmp(value, "0"))
		return parse_size(value, &config->net.bytes_per_s, err);
	config->net.bytes_per_s = 0;
	return 0;
}

static int set_net_packets_per_s(struct config *config, const char *value, struct err *err)
{
	return parse_uint(value, 0, UINT32_MAX, &config->net.packets_per_s, err);
}

void config_net_mac(const struct config_net *net, const char *dir, uint8_t ret_mac[6])
{
	uint64_t hash = 0xcbf29ce484222325ULL; // FNV-1a

	if (parse_mac(net->mac, ret_mac))
		return;
	for (; *dir; dir++)
		hash = (hash ^ (uint8_t)*dir) * 0x100000001b3ULL;
	ret_mac[0] = 0x02;
	for (int i = 1; i < 6; i++)
		ret_mac[i] = (uint8_t)(hash >> 8 * i);
}

static int set_limit_cpus(struct config *config, const char *value, struct err *err)
{
	double cpus;
	int end = -1;

	if (sscanf(value, "%lf%n", &cpus, &end) != 1 || value[end] || !(cpus >= 0.01) ||
		!(cpus <= 1024))
		return err_set(err, -EINVAL, "'%.40s' is no number of CPUs: 0.01 to 1024, like 1.5",
			value);
	config->limits.cpu_milli = (uint64_t)(cpus * 1000 + 0.5);
	return 0;
}

static int set_limit_weight(struct config *config, const char *value, struct err *err)
{
	return parse_uint(value, 1, 10000, &config->limits.cpu_weight, err);
}

static int set_limit_memory(struct config *config, const char *value, struct err *err)
{
	return parse_size(value, &config->limits.memory_bytes, err);
}

static int set_limit_processes(struct config *config, const char *value, struct err *err)
{
	return parse_uint(value, 16, UINT32_MAX, &config->limits.processes, err);
}

static int set_limit_io(struct config *config, const char *value, struct err *err)
{
	return parse_uint(value, 1, 10000, &config->limits.io_weight, err);
}

static const struct key keys[] = {
	{"machine", "kernel", set_kernel},
	{"machine", "initramfs", set_initramfs},
	{"machine", "root", set_root},
	{"machine", "init", set_init},
	{"machine", "append", set_append},
	{"machine", "memory", set_memory},
	{"machine", "cpus", set_cpus},
	{"vsock", "cid", set_cid},
	{"net", "mode", set_net_mode},
	{"net", "card", set_net_card},
	{"net", "tap", set_net_tap},
	{"net", "mac", set_net_mac},
	{"net", "address", set_net_address},
	{"net", "gateway", set_net_gateway},
	{"net", "dns", set_net_dns},
	{"net", "bytes_per_s", set_net_bytes_per_s},
	{"net", "packets_per_s", set_net_packets_per_s},
	{"net", "allow", set_net_allow},
	{"net", "keep", set_net_keep},
	{"limits", "cpus", set_limit_cpus},
	{"limits", "cpu_weight", set_limit_weight},
	{"limits", "memory", set_limit_memory},
	{"limits", "processes", set_limit_processes},
	{"limits", "io_weight", set_limit_io},
	{"mcp", "access", set_access},
	{"mcp", "folders", set_folders},
};

void config_defaults(struct config *config)
{
	*config = (struct config){
		.initramfs = BUILTIN_NAME,
		.memory_bytes = 128 * MIB,
		.cpus = 1,
		.cid = CONFIG_CID_MIN,
		.access = CONFIG_ACCESS_OBSERVE,
	};
}

const char *config_disk_name(unsigned int idx)
{
	ASSERT(idx < CONFIG_DISKS_MAX);
	return disk_names[idx];
}

// The number of a key: those of keys[], then those of each disk. -1 if it is none.
static int find_key(const char *section, const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (!strcmp(keys[i].section, section) && !strcmp(keys[i].name, name))
			return (int)i;
	for (size_t disk = 0; disk < CONFIG_DISKS_MAX; disk++)
		for (size_t i = 0; !strcmp(disk_names[disk], section) && i < ARRAY_SIZE(disk_keys);
			i++)
			if (!strcmp(disk_keys[i].name, name))
				return (int)(ARRAY_SIZE(keys) + disk * ARRAY_SIZE(disk_keys) + i);
	return -1;
}

int config_set(struct config *config, const char *section, const char *key, const char *value,
	struct err *err)
{
	int found = find_key(section, key), r;
	size_t i = (size_t)found - ARRAY_SIZE(keys);

	if (found < 0)
		return err_set(err, -EINVAL, "unknown key '%.40s' in [%.40s]", key, section);
	if ((size_t)found < ARRAY_SIZE(keys))
		r = keys[found].set(config, value, err);
	else
		r = disk_keys[i % ARRAY_SIZE(disk_keys)].set(
			&config->disks[i / ARRAY_SIZE(disk_keys)], value, err);
	return r < 0 ? err_wrap(err, r, "%s", key) : 0;
}

static pthread_mutex_t inih = PTHREAD_MUTEX_INITIALIZER; // of its globals

struct reader {
	struct config *config;
	struct err *err;
	int result;
	uint64_t seen; // a bit a key
};

_Static_assert(ARRAY_SIZE(keys) + CONFIG_DISKS_MAX * ARRAY_SIZE(disk_keys) <= 64,
	"struct reader counts keys in 64 bits");

static int on_key(void *user, const char *section, const char *name, const char *value)
{
	struct reader *reader = user;
	int i = find_key(section, name);

	if (i >= 0 && (reader->seen & 1ULL << i))
		reader->result = err_set(reader->err, -EINVAL, "'%.40s' stands twice", name);
	else
		reader->result = config_set(reader->config, section, name, value, reader->err);
	if (i >= 0)
		reader->seen |= 1ULL << i;
	return reader->result == 0;
}

int config_read(const char *path, struct config *ret_config, struct err *err)
{
	struct config config;
	struct err inner = {0};
	struct reader reader = {.config = &config, .err = &inner};
	CLEANUP_FREE char *text = NULL;
	size_t len;
	int r, line;

	config_defaults(&config);
	r = fd_read_file(path, FILE_MAX_BYTES, &text, &len, err);
	if (r < 0)
		return r;
	if (memchr(text, '\0', len))
		return err_set(err, -EINVAL, "%s: contains a NUL byte", path);
	// Debian's inih takes at run time what others fix when they build it. Paths are long, and
	// a ';' or an indented line is part of what the person wrote, not something to drop.
	pthread_mutex_lock(&inih);
	ini_use_stack = false;
	ini_max_line = ini_initial_alloc = LINE_MAX_BYTES;
	ini_allow_multiline = ini_allow_inline_comments = false;
	ini_stop_on_first_error = true;
	line = ini_parse_string(text, on_key, &reader);
	pthread_mutex_unlock(&inih);
	if (line > 0 && reader.result < 0)
		return err_set(err, reader.result, "%s:%d: %s", path, line, inner.msg);
	if (line > 0)
		return err_set(err, -EINVAL,
			"%s:%d: neither a [section], a key = value, nor a ; comment", path, line);
	if (line < 0)
		return err_errno(err, -ENOMEM, "%s", path);
	*ret_config = config;
	return 0;
}

static int write_disk(int fd, const char *name, const struct config_disk *disk)
{
	const struct {
		const char *key;
		uint64_t bytes;
	} sizes[] = {
		{"size", disk->size_bytes},
		{"quota", disk->quota_bytes},
		{"bytes_per_s", disk->bytes_per_s},
	};
	bool good;

	if (!config_has_disk(disk))
		return 0;
	good = dprintf(fd, "\n[%s]\nfile = %s\nmode = %s\n", name, disk->file,
		       disk_modes[disk->mode]) >= 0;
	for (size_t i = 0; good && i < ARRAY_SIZE(sizes); i++)
		if (sizes[i].bytes)
			good = dprintf(fd, "%s = %lluK\n", sizes[i].key,
				       (unsigned long long)(sizes[i].bytes / KIB)) >= 0;
	if (good && disk->ops_per_s)
		good = dprintf(fd, "ops_per_s = %llu\n", (unsigned long long)disk->ops_per_s) >= 0;
	return good ? 0 : -errno;
}

static int write_list(int fd, const char *key, const struct allow_list *list)
{
	char text[ALLOW_TEXT_BYTES];

	if (list->nr == 0)
		return 0;
	if (allow_print(list, text, sizeof(text), NULL) < 0)
		return -E2BIG;
	return dprintf(fd, "%s = %s\n", key, text) < 0 ? -errno : 0;
}

static int write_net(int fd, const struct config *config)
{
	const struct config_net *net = &config->net;
	int r = 0;

	if (net->mode == CONFIG_NET_NONE && !net->card && !config->allow.nr && !config->keep.nr)
		return 0;
	if (dprintf(fd, "\n[net]\nmode = %s\n", net_modes[net->mode]) < 0)
		return -errno;
	if (net->card && dprintf(fd, "card = yes\n") < 0)
		return -errno;
	if (config_net_has_device(net) &&
		dprintf(fd,
			"tap = %s\nmac = %s\naddress = %s\ngateway = %s\n"
			"dns = %s\nbytes_per_s = %llu%s\npackets_per_s = %llu\n",
			net->tap, net->mac, net->address, net->gateway, net->dns,
			(unsigned long long)(net->bytes_per_s / KIB), net->bytes_per_s ? "K" : "",
			(unsigned long long)net->packets_per_s) < 0)
		r = -errno;
	if (r == 0)
		r = write_list(fd, "allow", &config->allow);
	return r < 0 ? r : write_list(fd, "keep", &config->keep);
}

static int write_limits(int fd, const struct config_limits *limits)
{
	const struct {
		const char *key, *unit;
		uint64_t value;
	} keys_of[] = {
		{"cpu_weight", "", limits->cpu_weight},
		{"memory", "K", limits->memory_bytes / KIB},
		{"processes", "", limits->processes},
		{"io_weight", "", limits->io_weight},
	};
	bool any = limits->cpu_milli != 0, good = true;

	for (size_t i = 0; i < ARRAY_SIZE(keys_of); i++)
		any |= keys_of[i].value != 0;
	if (any)
		good = dprintf(fd, "\n[limits]\n") >= 0;
	if (good && limits->cpu_milli)
		good = dprintf(fd, "cpus = %llu.%03llu\n",
			       (unsigned long long)limits->cpu_milli / 1000,
			       (unsigned long long)limits->cpu_milli % 1000) >= 0;
	for (size_t i = 0; good && i < ARRAY_SIZE(keys_of); i++)
		if (keys_of[i].value)
			good = dprintf(fd, "%s = %llu%s\n", keys_of[i].key,
				       (unsigned long long)keys_of[i].value, keys_of[i].unit) >= 0;
	return good ? 0 : -errno;
}

int config_print(int fd, const struct config *config)
{
	int r = 0;

	if (dprintf(fd,
		    "[machine]\n"
		    "kernel = %s\n"
		    "initramfs = %s\n"
		    "root = %s\n"
		    "init = %s\n"
		    "append = %s\n"
		    "memory = %lluK\n"
		    "cpus = %u\n"
		    "\n"
		    "[vsock]\n"
		    "cid = %u\n",
		    config->kernel, config->initramfs, roots[config->root], config->init,
		    config->append, (unsigned long long)(config->memory_bytes / KIB), config->cpus,
		    config->cid) < 0)
		r = -errno;
	for (unsigned int i = 0; i < CONFIG_DISKS_MAX && r == 0; i++)
		r = write_disk(fd, disk_names[i], &config->disks[i]);
	if (r == 0)
		r = write_net(fd, config);
	if (r == 0)
		r = write_limits(fd, &config->limits);
	if (r == 0 && (config->access != CONFIG_ACCESS_OBSERVE || config->folders[0]) &&
		dprintf(fd, "\n[mcp]\naccess = %s\n", config_access_name(config->access)) < 0)
		r = -errno;
	if (r == 0 && config->folders[0] && dprintf(fd, "folders = %s\n", config->folders) < 0)
		r = -errno;
	return r;
}

int config_write(const char *path, const struct config *config, struct err *err)
{
	CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	int r = fd < 0 ? -errno : config_print(fd, config);

	return r < 0 ? err_errno(err, r, "%s", path) : 0;
}

// Whether the line at text is "[section]", or any section if section is NULL.
static bool is_section(const char *line, size_t len, const char *section)
{
	size_t n = section ? strlen(section) : 0;

	if (len == 0 || line[0] != '[')
		return false;
	return !section || (len > n + 1 && !strncmp(line + 1, section, n) && line[n + 1] == ']');
}

static bool is_key(const char *line, size_t len, const char *key)
{
	size_t n = strlen(key);

	if (len <= n || strncmp(line, key, n) != 0)
		return false;
	for (line += n, len -= n; len && (*line == ' ' || *line == '\t'); line++, len--)
		;
	return len && (*line == '=' || *line == ':');
}

// Where the key's line stands in text, or should: *ret_len is 0 then, and *ret_section says whether
// its section has to be written too.
static const char *find_line(
	const char *text, const char *section, const char *key, size_t *ret_len, bool *ret_section)
{
	const char *insert = NULL;
	bool inside = false;

	*ret_section = true;
	*ret_len = 0;
	for (const char *line = text; *line;) {
		const char *end = strchrnul(line, '\n');
		const char *start = line + strspn(line, " \t\r"); // as inih does
		size_t len = (size_t)(end - MIN(start, end));
		const char *next = *end ? end + 1 : end;

		if (is_section(start, len, NULL)) {
			inside = is_section(start, len, section);
			if (inside) {
				insert = next;
				*ret_section = false;
			}
		} else if (inside && is_key(start, len, key)) {
			*ret_len = (size_t)(next - line);
			return line;
		}
		line = next;
	}
	return insert ? insert : text + strlen(text);
}

unsigned int config_line(const char *text, const char *section, const char *key)
{
	unsigned int number = 1;
	bool with_section;
	size_t len;
	const char *at = find_line(text, section, key, &len, &with_section);

	if (len == 0)
		return 0;
	for (const char *p = text; p < at; p++)
		number += *p == '\n';
	return number;
}

int config_edit(const char *path, const char *section, const char *key, const char *value,
	struct config *ret_config, struct err *err)
{
	CLEANUP_FREE char *text = NULL;
	CLEANUP_FD int fd = -1;
	char fresh[PATH_MAX];
	struct config config;
	const char *at;
	size_t len, old_len;
	bool with_section;
	int r = config_read(path, &config, err);

	if (r == 0)
		r = config_set(&config, section, key, value, err);
	if (r == 0)
		r = fd_read_file(path, FILE_MAX_BYTES, &text, &len, err);
	if (r < 0)
		return r;
	if (snprintf(fresh, sizeof(fresh), "%s.new", path) >= (int)sizeof(fresh))
		return err_errno(err, -ENAMETOOLONG, "%s", path);
	ASSERT(text);
	at = find_line(text, section, key, &old_len, &with_section);
	unlink(fresh);
	fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_errno(err, -errno, "%s", fresh);
	r = fd_write_all(fd, text, (size_t)(at - text));
	if (r == 0 && at > text && at[-1] != '\n')
		r = fd_write_all(fd, "\n", 1);
	if (r == 0 && with_section && dprintf(fd, "\n[%s]\n", section) < 0)
		r = -errno;
	if (r == 0 && dprintf(fd, "%s = %s\n", key, value) < 0)
		r = -errno;
	if (r == 0)
		r = fd_write_all(fd, at + old_len, strlen(at + old_len));
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	if (r < 0)
		err_errno(err, r, "%s", fresh);
	// As it will be read from now on.
	if (r == 0)
		r = config_read(fresh, &config, err);
	if (r == 0 && rename(fresh, path) < 0)
		r = err_errno(err, -errno, "%s", path);
	if (r < 0)
		unlink(fresh);
	else if (ret_config)
		*ret_config = config;
	return r;
}
