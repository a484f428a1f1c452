#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Includes point downward only. Each line: a folder or file, and what it may include of ours.
set -eu
cd "$(dirname "$0")/.."
bad=0

# allow FILES… -- PREFIXES…: an include of ours in FILES must begin with one of PREFIXES.
allow() {
	files=
	while [ "$1" != -- ]; do
		files="$files $1"
		shift
	done
	shift
	for f in $files; do
		[ -e "$f" ] || continue
		grep -n '^#include "' "$f" | sed 's/^\([0-9]*\):#include "\(.*\)".*/\1 \2/' |
			while read -r line inc; do
				for p in "$@"; do
					case $inc in "$p"*) continue 2 ;; esac
				done
				echo "$f:$line: may not include $inc"
			done
	done
}

# forbid FILES… -- PATTERN: no line of FILES includes what matches PATTERN.
forbid() {
	files=
	while [ "$1" != -- ]; do
		files="$files $1"
		shift
	done
	for f in $files; do
		[ -e "$f" ] || continue
		grep -nE "^#include [<\"]($2)[>\"]" "$f" | sed "s|^|$f:|; s|\$|   <- not here|" || :
	done
}

out=$(
	allow vmm/base/*.[ch] -- vmm/base/
	allow vmm/guest_mem.[ch] vmm/bus.[ch] vmm/loop.[ch] vmm/cmdline.[ch] vmm/config.[ch] \
		vmm/symbols.[ch] vmm/allow.[ch] -- vmm/base/ vmm/guest_mem.h vmm/bus.h vmm/loop.h vmm/cmdline.h \
		vmm/config.h vmm/symbols.h vmm/builtin.h vmm/allow.h
	allow devices/*.[ch] -- devices/ vmm/base/ vmm/guest_mem.h vmm/bus.h vmm/loop.h
	forbid devices/*.[ch] -- 'linux/kvm.h'
	allow snapshot/*.[ch] -- snapshot/ vmm/base/ vmm/guest_mem.h vmm/loop.h
	allow egress/*.[ch] -- egress/ vmm/base/ vmm/allow.h
	allow work/*.[ch] -- work/ vmm/base/
	allow guest/*.[ch] guest/proto/*.[ch] -- guest/ vmm/base/
	allow cli/*.[ch] -- cli/ guest/proto/ vmm/base/ vmm/config.h vmm/builtin.h vmm/cgroup.h vmm/jail.h vmm/monitor.h vmm/kvm.h \
		vmm/loop.h vmm/vcpu.h vmm/vm.h vmm/control.h vmm/guest_mem.h snapshot/ devices/overlay.h mcp/ work/ egress/ vmm/allow.h
	# A machine is reached through its control socket and its agent, and by mayfly's own verbs.
	allow mcp/*.[ch] -- mcp/ vmm/base/ vmm/config.h guest/proto/ cli/agent_client.h cli/agent_files.h \
		cli/control_client.h
	for f in cli/*.[ch]; do
		case $f in cli/mcp.c | cli/audit.c | cli/approvals.c | cli/net.c | cli/egress.c | cli/work_log.c) continue ;; esac
		forbid "$f" -- 'mcp/.*'
	done
	# Only the machine assembles devices; only kvm and vcpu know the ioctls.
	allow vmm/kvm.[ch] vmm/vcpu.[ch] vmm/x86_64/kvm_*.c vmm/x86_64/vcpu_*.[ch] -- vmm/
	for f in vmm/*.c vmm/*/*.c devices/*.c cli/*.c mcp/*.c; do
		case $f in vmm/kvm.c | vmm/vcpu.c | vmm/*/kvm_*.c | vmm/*/vcpu_*.c) continue ;; esac
		grep -nE 'ioctl\([^;]*KVM_' "$f" | sed "s|^|$f:|; s|\$|   <- KVM ioctls not here|" || :
	done
)
if [ -n "$out" ]; then
	printf '%s\n' "$out"
	exit 1
fi
echo "layers: ok"
