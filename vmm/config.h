// SPDX-License-Identifier: Apache-2.0
// vm.ini: what a machine is. Hand-editable; a key that is unknown, twice there or makes no sense is
// refused with the file, the line and the cure. Any thread.
#ifndef MAYFLY_CONFIG_H
#define MAYFLY_CONFIG_H

#include <limits.h>

#include "vmm/allow.h"
#include "vmm/base/err.h"

#define CONFIG_CPUS_MAX         32 // as many as the guest kernels are built for
#define CONFIG_MEMORY_MIN_BYTES (16 * MIB)
#define CONFIG_MEMORY_MAX_BYTES (1024 * GIB)
#define CONFIG_CMDLINE_BYTES    1536
#define CONFIG_CID_MIN          3U

#define CONFIG_DISKS_MAX 4

enum config_disk_mode {
	CONFIG_DISK_OVERLAY, // what the guest writes goes to a layer of the machine's own
	CONFIG_DISK_RAW, // it goes to the file itself
	CONFIG_DISK_RO, // it cannot write
};

// [disk], and [disk2] to [disk4]: /dev/vda and so on in the guest. There is such a disk if it has a
// file or a size.
struct config_disk {
	char file[PATH_MAX]; // a raw image; empty: a blank disk of the machine's own
	enum config_disk_mode mode;
	uint64_t size_bytes; // of an overlay; 0: as large as the file
	uint64_t quota_bytes; // of data in the overlay; 0: none
	uint64_t bytes_per_s, ops_per_s; // 0: no limit
};

static inline bool config_has_disk(const struct config_disk *disk)
{
	return disk->file[0] || disk->size_bytes;
}

enum config_net_mode {
	CONFIG_NET_NONE, // no network device at all
	CONFIG_NET_TAP, // a tap of the host's
	CONFIG_NET_PASST, // a network in user space, by the program passt
	CONFIG_NET_ALLOWLIST, // no device: what is on the list, through a proxy of the host's
	CONFIG_NET_NAT, // as passt, behind rules: public addresses, and named ones
};

#define CONFIG_TAP_BYTES 16 // IFNAMSIZ
#define CONFIG_IP_BYTES  20
#define CONFIG_MAC_BYTES 18

// [net]
struct config_net {
	enum config_net_mode mode;
	bool card; // one as for nat, whatever the mode: nothing goes through it in another
	char tap[CONFIG_TAP_BYTES]; // the interface's name
	char mac[CONFIG_MAC_BYTES]; // empty: see config_net_mac()
	// What the guest is to set, IPv4; empty where it is not to. Of passt's there are defaults.
	char address[CONFIG_IP_BYTES]; // A.B.C.D/BITS
	char gateway[CONFIG_IP_BYTES];
	char dns[CONFIG_IP_BYTES];
	uint64_t bytes_per_s, packets_per_s; // of each direction; 0: no limit
};

// Whether there is a network card behind rules, and whether there is one at all.
static inline bool config_net_has_rules(const struct config_net *net)
{
	return net->mode == CONFIG_NET_NAT ||
	       (net->card && (net->mode == CONFIG_NET_NONE || net->mode == CONFIG_NET_ALLOWLIST));
}

static inline bool config_net_has_device(const struct config_net *net)
{
	return net->mode == CONFIG_NET_TAP || net->mode == CONFIG_NET_PASST ||
	       config_net_has_rules(net);
}

#define CONFIG_INIT_BYTES 128

enum config_root {
	CONFIG_ROOT_INITRAMFS, // the initramfs itself, in memory
	CONFIG_ROOT_DISK, // the first disk, which the agent in the initramfs makes the root
};

// [mcp] access: how deep an agent may reach through the machine's MCP endpoint (mcp/).
enum config_access {
	CONFIG_ACCESS_NONE, // there is no endpoint
	CONFIG_ACCESS_OBSERVE, // look
	CONFIG_ACCESS_MANAGE, // and files, packages, snapshots
	CONFIG_ACCESS_EXEC, // and commands: everything
	CONFIG_ACCESS_COUNT,
};

#define CONFIG_FOLDERS_MAX   8
#define CONFIG_FOLDERS_BYTES 2048

// One of [mcp] folders: a folder of the host that agents may copy from, or to as well.
struct config_folder {
	char path[PATH_MAX];
	bool write;
};

// [limits]: of the machine's monitor, guest and all, by the host's kernel (vmm/cgroup.h). 0: none.
struct config_limits {
	uint64_t cpu_milli; // cpus = 1.5, in thousandths
	uint64_t cpu_weight, memory_bytes, processes, io_weight;
};

struct config {
	char kernel[PATH_MAX]; // [machine] kernel
	char initramfs[PATH_MAX]; // [machine] initramfs: a path, "builtin", or nothing
	enum config_root root; // [machine] root
	char init[CONFIG_INIT_BYTES]; // [machine] init: PID 1 of the root disk; empty: the agent
	char append[CONFIG_CMDLINE_BYTES]; // [machine] append: more words for the kernel
	uint64_t memory_bytes; // [machine] memory
	unsigned int cpus; // [machine] cpus
	uint32_t cid; // [vsock] cid
	struct config_disk disks[CONFIG_DISKS_MAX];
	struct config_net net;
	struct allow_list allow; // [net] allow
	struct allow_list keep; // [net] keep: if there is any, only that of the list
	struct config_limits limits;
	enum config_access access;
	char folders[CONFIG_FOLDERS_BYTES]; // [mcp] folders: see config_folder()
};

// "none" to "allowlist".
const char *config_net_name(enum config_net_mode mode);

// What the machine may reach through its proxy now: nothing in other modes than the allow-list's.
void config_reach(const struct config *config, struct allow_list *ret);

// "disk", "disk2", ...: the section of disk idx, and what its files are called.
const char *config_disk_name(unsigned int idx);

// The guest's MAC address: the one that is set, or one that is always the same for the machine in
// that folder, locally administered.
void config_net_mac(const struct config_net *net, const char *dir, uint8_t ret_mac[6]);

// "none" to "exec".
const char *config_access_name(enum config_access access);

// -EINVAL, naming those that there are.
int config_access_parse(const char *text, enum config_access *ret, struct err *err);

// Folder idx of "PATH[:rw], PATH[:rw]…". Whether there is one.
bool config_folder(const struct config *config, unsigned int idx, struct config_folder *ret);

// What is in force where nothing else is said; kernel and initramfs are empty.
void config_defaults(struct config *config);

// Sets one key as if it stood in the file; for command lines too. -EINVAL or -ERANGE, naming it.
int config_set(struct config *config, const char *section, const char *key, const char *value,
	struct err *err);

// Reads path over the defaults. Errors name path and line.
int config_read(const char *path, struct config *ret_config, struct err *err);

// Writes what is in force, as vm.ini has it. 0 or a negative errno.
int config_print(int fd, const struct config *config);

// Writes all keys to path, a new file. Values with a newline are refused (-EINVAL).
int config_write(const char *path, const struct config *config, struct err *err);

// The line, from 1, that sets a key in the text of a file that config_read() accepts; 0: none does.
unsigned int config_line(const char *text, const char *section, const char *key);

// Sets one key in a file that is there and leaves the rest of its text as it is. The file is
// replaced by another; *ret_config (may be NULL) is what it says then. Who else might do so is
// locked out by the caller.
int config_edit(const char *path, const char *section, const char *key, const char *value,
	struct config *ret_config, struct err *err);

#endif
