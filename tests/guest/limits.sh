# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Limits of what a machine may take of its host, by cgroup v2: in force, told, and gone with it.
. "$(dirname "$0")/lib.sh"
trap '"$MAYFLY" rm --force dev 2>/dev/null' EXIT

# limits KEY: of the machine dev.
limits() {
	"$MAYFLY" stats --json dev | python3 -c '
import json, sys
print(json.load(sys.stdin)["limits"][sys.argv[1]])' "$1"
}
words() { cat stderr.txt; }

"$MAYFLY" create --limit cpus=lots dev 2>stderr.txt
equal "nonsense is refused" $? 2
contains "and named" "$(words)" "--limit cpus=lots: cpus: 'lots'"
"$MAYFLY" create --limit seats=4 dev 2>stderr.txt
contains "so is what there is not" "$(words)" "unknown key 'seats' in [limits]"
"$MAYFLY" create --memory 64M --limit cpus=0.5,cpu_weight=50,memory=256M,processes=64 dev
equal "create" $? 0
contains "config tells them" "$("$MAYFLY" config dev)" "processes      = 64"

if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ]; then
	"$MAYFLY" up dev 2>stderr.txt
	equal "without cgroup v2 it does not start" $? 125
	contains "and says why, and the cure" "$(words)" "systemd.unified_cgroup_hierarchy=1"
	check "rm" "$MAYFLY" rm dev
	skip "limits in force: this host has cgroup v1 alone"
	check "nothing left" nothing_left
	finish
fi

sed -i 's/^memory = 262144K/memory = 65536K/' "$MAYFLY_HOME/vms/dev/vm.ini"
"$MAYFLY" up dev 2>stderr.txt
equal "less memory than the machine has" $? 125
contains "is refused, with what is enough" "$(words)" "at least 97M"
sed -i '/^\[limits\]/,$ s/^memory = 65536K/memory = 262144K/' "$MAYFLY_HOME/vms/dev/vm.ini"

check "up" "$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev
group=$(sed 's/^0:://' "/proc/$(monitor_pid dev)/cgroup")
contains "a group of its own" "$group" "/mayfly/machine-dev-"
at=/sys/fs/cgroup$group
equal "cpus" "$(cat "$at/cpu.max")" "50000 100000"
equal "cpu_weight" "$(cat "$at/cpu.weight")" 50
equal "memory" "$(cat "$at/memory.max")" $((256 << 20))
equal "processes" "$(cat "$at/pids.max")" 64
throttled() { [ "$(limits cpu_throttled_us)" -gt 0 ]; }
"$MAYFLY" exec -d --job busy dev -- sh -c 'while :; do :; done' >/dev/null
eventually "a busy guest is held back" throttled
contains "stats has what it used" "$("$MAYFLY" stats dev)" "limits   cpu_used_us"
equal "and the limits" "$(limits memory_limit_bytes) $(limits processes_limit)" "$((256 << 20)) 64"
[ "$(limits memory_bytes)" -gt $((8 << 20)) ]
equal "memory is counted" $? 0
check "down" "$MAYFLY" down --force dev
check "its group is gone" [ ! -e "$at" ]
"$MAYFLY" run --timeout "$GUEST_TIMEOUT" --memory 64M --limit processes=64 -- true
equal "run with a limit" $? 0
check "leaves no group" [ -z "$(ls -d /sys/fs/cgroup/mayfly/machine-* 2>/dev/null)" ]

# Another user, in a group that is delegated to it as systemd does; where /dev/kvm is for a group to use.
kvm=$(stat -c %a /dev/kvm)
[ -n "${MAYFLY_LAB:-}" ] && chmod 0660 /dev/kvm && kvm=660
if case $kvm in ?[67]?) true ;; *) false ;; esac && command -v setpriv >/dev/null; then
	up=/sys/fs/cgroup/mayfly-test
	mkdir -p $up/session
	echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
	echo +cpu >$up/cgroup.subtree_control
	chown 65534 $up $up/cgroup.procs $up/session $up/session/cgroup.procs
	home=$(mktemp -d /tmp/mayfly-limits-XXXXXX)
	chown 65534 "$home"
	out=$(MAYFLY_HOME=$home sh -c 'cd / && echo 0 >/sys/fs/cgroup/mayfly-test/session/cgroup.procs && exec "$@"' sh \
		setpriv --reuid 65534 --regid 65534 --groups "$(stat -c %g /dev/kvm)" sh -c '
			"$MAYFLY" create --memory 64M --limit cpus=0.9 mine && "$MAYFLY" up --timeout "$GUEST_TIMEOUT" mine &&
				cat "/proc/$(cat "$MAYFLY_HOME/vms/mine/run/lock")/cgroup"
			"$MAYFLY" rm --force mine' 2>&1)
	contains "a user with a group delegated" "$out" "/mayfly-test/machine-mine-"
	rmdir $up/session $up
	equal "and nothing is left there" $? 0
	rm -r "$home"
else
	skip "limits of another user's machine: /dev/kvm is not for a group to use here"
fi
check "rm" "$MAYFLY" rm dev
check "nothing left" nothing_left
finish
