// SPDX-License-Identifier: Apache-2.0
// The options that say what a machine is, for every verb that makes one. One thread.
#ifndef MAYFLY_CLI_MACHINE_OPTIONS_H
#define MAYFLY_CLI_MACHINE_OPTIONS_H

#include "vmm/base/err.h"

struct config;

enum {
	OPT_KERNEL = 256,
	OPT_INITRAMFS,
	OPT_APPEND,
	OPT_DISK,
	OPT_NET,
	OPT_IMAGE,
	OPT_INIT,
	OPT_ALLOW,
	OPT_LIMIT,
};

#define MACHINE_SHORT_OPTIONS "m:c:"

#define MACHINE_LONG_OPTIONS                                                              \
	{"memory", required_argument, NULL, 'm'}, {"cpus", required_argument, NULL, 'c'}, \
		{"kernel", required_argument, NULL, OPT_KERNEL},                          \
		{"initramfs", required_argument, NULL, OPT_INITRAMFS},                    \
		{"image", required_argument, NULL, OPT_IMAGE},                            \
		{"init", required_argument, NULL, OPT_INIT},                              \
		{"disk", required_argument, NULL, OPT_DISK},                              \
		{"net", required_argument, NULL, OPT_NET},                                \
		{"allow", required_argument, NULL, OPT_ALLOW},                            \
		{"limit", required_argument, NULL, OPT_LIMIT},                            \
	{                                                                                 \
		"append", required_argument, NULL, OPT_APPEND                             \
	}

#define MACHINE_OPTIONS_HELP                                                                       \
	"      --image NAME      the root file system is this image (see mayfly image), under a\n" \
	"                        layer of the machine's own; then maybe ,quota=2G and so on, as\n" \
	"                        for --disk\n"                                                     \
	"      --init PATH       what is PID 1 on it, like /sbin/init: the services of the "       \
	"image\n"                                                                                  \
	"                        run, and the agent beside them (default: the agent alone)\n"      \
	"  -m, --memory SIZE     memory of the machine, like 128M or 2G (default 128M, with an\n"  \
	"                        image 512M)\n"                                                    \
	"  -c, --cpus N          virtual CPUs, 1 to 32 (default 1)\n"                              \
	"      --kernel FILE     another guest kernel (vmlinux, PVH or bzImage); standard: the\n"  \
	"                        one that systemd and containers want (make kernel-standard)\n"    \
	"      --initramfs FILE  another initramfs (a cpio archive)\n"                             \
	"      --append WORDS    more words for the kernel's command line\n"                       \
	"      --disk FILE       a disk, /dev/vda: this raw image, read-only, under a layer of\n"  \
	"                        the machine's own that takes what it writes. Up to four.\n"       \
	"                        Further words, as in vm.ini, after commas: mode=raw (writes\n"    \
	"                        go to FILE), mode=ro, size=8G, quota=2G, bytes_per_s=,\n"         \
	"                        ops_per_s=. --disk size=8G alone: a blank one\n"                  \
	"      --net MODE        none (default); passt: the way out of this host's user;\n"        \
	"                        tap:NAME: that interface; then maybe ,address=10.0.0.2/24\n"      \
	"                        ,gateway=10.0.0.1 ,dns=10.0.0.1 ,mac= ,bytes_per_s=10M;\n"        \
	"                        allowlist: no network, but a way out to what --allow names;\n"    \
	"                        nat: the public Internet, and no private address but those\n"     \
	"                        that --allow names\n"                                             \
	"      --allow HOST      that may be reached, like pypi.org or *.debian.org:80, and\n"     \
	"                        nothing else may (--net allowlist). Any number; see mayfly net\n" \
	"      --limit KEY=N     what it may take of this host, with its monitor: cpus=1.5,\n"     \
	"                        cpu_weight= (of 100), memory=2G, processes=64, io_weight=;\n"     \
	"                        several with commas (needs cgroup v2)\n"

// Takes an option if it is one of these. Returns 1 if so, 0 if it is another, or a negative errno.
int machine_option(struct config *config, int opt, const char *value, struct err *err);

#endif
