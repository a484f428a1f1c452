# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The standard kernel under a Debian with systemd: all of its services, and a container. `make test-standard`
# builds both and runs this in the lab, where it takes some minutes.
. "$(dirname "$0")/lib.sh"

if [ -z "${FULL:-}" ]; then
	skip "systemd and a container on the standard kernel: make test-standard does it"
	finish
fi
trap '"$MAYFLY" rm --force web 2>/dev/null' EXIT
in_vm() { "$MAYFLY" exec --timeout 300s web -- "$@"; }
in_sh() { "$MAYFLY" exec --timeout 300s web -- sh -c "$1"; }

mkdir -p "$MAYFLY_HOME"
ln -s "$TEST_BUILD/standard/images" "$MAYFLY_HOME/images"
# On a loaded host that emulates another one, systemd's own patience is too short.
"$MAYFLY" up --timeout 900s --kernel standard --image server --init /sbin/init --memory 1G \
	--append "systemd.default_timeout_start_sec=1800 systemd.service_watchdogs=no" web
equal "up, with systemd as PID 1" "$? $(in_vm readlink /proc/1/exe)" "0 /usr/lib/systemd/systemd"
state=$("$MAYFLY" exec --timeout 1800s web -- sh -c 'while :; do
	state=$(systemctl is-system-running 2>/dev/null)
	case $state in running | degraded) echo "$state"; exit ;; esac
	sleep 1
done')
equal "systemd says" "$state" running
[ "$state" = running ] || in_sh 'systemctl --failed --no-legend --plain | cut -d" " -f1 | xargs -r systemctl status --no-pager'
equal "units that failed" "$(in_vm systemctl --failed --no-legend --plain)" ""
contains "the journal is kept" "$(in_vm journalctl -b -n 100 --no-pager)" "Reached target"
equal "a unit with limits" \
	"$(in_vm systemd-run -q --wait --pipe -p MemoryMax=64M -p TasksMax=20 sh -c 'cat "/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/memory.max"')" \
	$((64 << 20))
equal "and one that may reach no device" \
	"$(in_sh 'systemd-run -q --wait --pipe -p DevicePolicy=strict sh -c "cat /dev/vda | wc -c" 2>/dev/null')" 0

# --- A container ------------------------------------------------------------------------------

# config JSON, as the OCI's runtime specification has it: a memory limit, every namespace, a network that
# the test connects.
"$MAYFLY" exec -i web -- sh -c 'mkdir -p /c/low/bin /c/low/proc /c/low/sys /c/low/dev /c/up /c/work /c/rootfs &&
	cat >/c/config.json' <<'JSON'
{"ociVersion": "1.0.0", "hostname": "box", "root": {"path": "rootfs"},
 "process": {"args": ["sh", "-c", "hostname; echo $$; cat /sys/fs/cgroup/memory.max; echo new >/bin/new; ping -c 1 -W 30 10.9.9.1 | grep -c 'bytes from'; unshare -U true; echo $?"],
  "env": ["PATH=/bin"], "cwd": "/", "user": {"uid": 0, "gid": 0},
  "capabilities": {"bounding": ["CAP_NET_RAW"], "effective": ["CAP_NET_RAW"], "permitted": ["CAP_NET_RAW"]}},
 "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
  {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
  {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]}],
 "linux": {"cgroupsPath": "/box", "resources": {"memory": {"limit": 33554432}, "pids": {"limit": 32},
   "devices": [{"allow": false, "access": "rwm"}]},
  "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
   "syscalls": [{"names": ["unshare"], "action": "SCMP_ACT_ERRNO"}]},
  "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "cgroup"},
   {"type": "network", "path": "/run/netns/box"}]}}
JSON
in_sh 'cd /c && cp /bin/busybox low/bin && for a in sh hostname cat ping grep unshare true; do ln -s busybox low/bin/$a; done &&
	mount -t overlay -o lowerdir=low,upperdir=up,workdir=work overlay rootfs'
equal "its root: an overlay" $? 0
in_sh 'ip link add br0 type bridge && ip addr add 10.9.9.1/24 dev br0 && ip link set br0 up &&
	ip netns add box && ip link add v0 master br0 type veth peer name eth0 netns box && ip link set v0 up &&
	ip -n box addr add 10.9.9.2/24 dev eth0 && ip -n box link set eth0 up'
equal "its network: a bridge and a pair" $? 0
equal "crun runs it" "$(in_sh 'cd /c && crun --cgroup-manager=cgroupfs run box')" "box
1
33554432
1
1"
equal "what it wrote is in the layer" "$(in_sh 'cat /c/up/bin/new; ls /c/low/bin/new 2>/dev/null')" new

# --- The rest ---------------------------------------------------------------------------------

in_sh 'nft add table inet t && nft "add chain inet t out { type nat hook postrouting priority 100; }" &&
	nft add rule inet t out ip saddr 10.9.9.0/24 counter masquerade && nft add set inet t s "{ type ipv4_addr; flags timeout; }"'
equal "nftables" $? 0
contains "and what it counts" "$(in_vm nft list ruleset)" "masquerade"
in_sh 'iptables -t nat -A POSTROUTING -s 10.8.0.0/24 -m comment --comment c -j MASQUERADE &&
	iptables -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT'
equal "iptables" $? 0
in_sh 'ip link add wg0 type wireguard && ip link add vx type vxlan id 7 dstport 4789 local 10.9.9.1 && ip tuntap add t0 mode tap'
equal "WireGuard, VXLAN, taps" $? 0
in_sh 'truncate -s 16M /l && mkfs.ext4 -q /l && mkdir -p /m && mount -o loop /l /m && echo 1 >/m/f && umount /m'
equal "a loop device with ext4" $? 0
equal "FUSE" "$(in_sh 'test -c /dev/fuse && grep -c fuse /proc/filesystems')" 3
check "down" "$MAYFLY" down web
contains "as systemd ends it" "$(tail -c 4000 "$MAYFLY_HOME/vms/web/console.log" | tr -d '\r')" "reboot: "
check "rm" "$MAYFLY" rm web
check "nothing left" nothing_left
finish
