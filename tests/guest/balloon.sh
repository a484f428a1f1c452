# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the guest has used once and freed returns to the host, without anybody asking.
. "$(dirname "$0")/lib.sh"

BURST_MIB=16

"$MAYFLY" up --memory 128M --timeout "$GUEST_TIMEOUT" dev 2>stderr.txt
equal "up" $? 0
pid=$("$MAYFLY" ps --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["pid"])')
rss_mib() { awk '/^VmRSS:/ { print int($2 / 1024) }' "/proc/$pid/status"; }
# until_rss OPERATOR MIB: a minute is a bound for what never comes.
until_rss() {
	local i
	for ((i = 0; i < 600; i++)); do
		[ "$(rss_mib)" "$1" "$2" ] && return 0
		sleep 0.1
	done
	echo "resident: $(rss_mib) MiB"
	return 1
}

before=$(rss_mib)
"$MAYFLY" exec dev -- dd if=/dev/zero of=/tmp/burst bs=1M count=$BURST_MIB 2>stderr.txt
equal "a burst is written" $? 0
peak=$(rss_mib)
echo "resident: $before MiB before, $peak MiB at its peak"
check "the monitor grows" [ "$peak" -ge $((before + BURST_MIB * 3 / 4)) ]
"$MAYFLY" exec dev -- rm /tmp/burst
check "and shrinks again by itself" until_rss -le $((peak - BURST_MIB * 3 / 4))
equal "the guest lives on" "$("$MAYFLY" exec dev -- sh -c 'head -c 8000000 /dev/zero >/tmp/again; stat -c %s /tmp/again')" 8000000
"$MAYFLY" rm --force dev
check "nothing left" nothing_left
finish
