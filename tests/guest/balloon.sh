# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the guest has used once and freed returns to the host, without anybody asking; what it is
# asked for it gives up, and takes back what it needs.
. "$(dirname "$0")/lib.sh"

BURST_MIB=16

"$MAYFLY" up --memory 64M --timeout "$GUEST_TIMEOUT" dev 2>stderr.txt
equal "up" $? 0
pid=$(monitor_pid dev)
rss_mib() { awk '/^VmRSS:/ { print int($2 / 1024) }' "/proc/$pid/status"; }
shrunk() { [ "$(rss_mib)" -le $((peak - BURST_MIB * 3 / 4)) ]; }

before=$(rss_mib)
"$MAYFLY" exec dev -- dd if=/dev/zero of=/tmp/burst bs=1M count=$BURST_MIB 2>stderr.txt
equal "a burst is written" $? 0
peak=$(rss_mib)
echo "resident: $before MiB before, $peak MiB at its peak"
check "the monitor grows" [ "$peak" -ge $((before + BURST_MIB * 3 / 4)) ]
"$MAYFLY" exec dev -- rm /tmp/burst
check "and shrinks again by itself" until_true shrunk
equal "the guest lives on" "$("$MAYFLY" exec dev -- sh -c 'head -c 2000000 /dev/zero >/tmp/again; stat -c %s /tmp/again; rm /tmp/again')" 2000000

# --- Asked for -----------------------------------------------------------------------------------

figure() { "$MAYFLY" stats --json dev | python3 -c 'import json, sys
print(json.load(sys.stdin)["balloon"][sys.argv[1]])' "$1"; }
has_given() { [ "$(figure actual_bytes)" -eq $(($1 << 20)) ]; }
total=$(figure guest_total_bytes) free=$(figure guest_free_bytes)
check "the guest tells its figures ($free bytes of $total are free)" \
	[ "$free" -lt "$total" -a "$total" -lt $((64 << 20)) -a "$free" -gt $((16 << 20)) ]
# All but 12 MiB of what is free.
ask=$(((free >> 20) - 12))
"$MAYFLY" balloon dev ${ask}M
equal "a balloon of $ask MiB" $? 0
check "is filled" until_true has_given $ask
check "and its pages were dropped" [ "$(figure inflated_bytes)" -ge $((ask << 20)) ]
equal "of the guest's own" "$(figure bad_pages)" 0
check "the guest has less" [ "$(figure guest_free_bytes)" -lt $((free - (ask << 20) + (4 << 20))) ]
if [ -n "${MAYFLY_LAB:-}" ]; then
	check "who needs more than is left gets it" "$MAYFLY" exec dev -- dd if=/dev/zero of=/dev/null bs=20M count=1
	check "out of the balloon" [ "$(figure actual_bytes)" -lt $((ask << 20)) ]
else
	skip "what the guest needs it takes back (in the lab: an interpreted kernel looks for memory for minutes first)"
fi
"$MAYFLY" balloon dev 0M
check "it is given back" until_true has_given 0
"$MAYFLY" balloon dev 64M 2>stderr.txt
equal "all of it: status" $? 125
contains "all of it: message" "$(cat stderr.txt)" "has 64M, of which it can give up a part"
"$MAYFLY" balloon dev 12 2>stderr.txt
equal "a size without a unit: status" $? 2
equal "the guest lives still" "$("$MAYFLY" exec dev -- echo alive)" alive
"$MAYFLY" rm --force dev
check "nothing left" nothing_left
finish
