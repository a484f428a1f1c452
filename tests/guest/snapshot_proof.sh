# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Snapshots that are disturbed: whoever dies, at whatever system call, the old or the new one is
# whole, and the machine goes on or starts again; a full disk; many restores; many clones at once.
# With FULL=1 at every call, 1,000 restores, 200 clones. (Many restores in one process: tests/kvm.)
. "$(dirname "$0")/lib.sh"
here=$(cd "$(dirname "$0")" && pwd)
kill_at=$TEST_BUILD/tests/guest/kill_at
FULL=${FULL:-}

in_guest() { # NAME COMMAND
	"$MAYFLY" exec "$1" -- sh -c "$2"
}
listed() { "$MAYFLY" snapshots --json | python3 -c '
import json, sys
print(len(json.load(sys.stdin)))'; }
verify() { "$MAYFLY" snapshots verify "$@" >/dev/null; }
monitor_of() { cat "$MAYFLY_HOME/vms/$1/run/lock"; }
running() { "$MAYFLY" ps --json | python3 -c '
import json, sys
print({m["name"]: m["state"] for m in json.load(sys.stdin)}.get(sys.argv[1]))' "$1"; }
# killing NAME HOW COMMAND…: COMMAND, with the n-th call of the saving process of NAME the last one
# of that (-c) or of the monitor (-p), or COMMAND's own n-th (cmd). $n is set. What kill_at said is in
# $said.
killing() {
	local name=$1 how=$2
	shift 2
	rc=
	if [ "$how" = cmd ]; then
		said=$("$kill_at" "$n" "$@" 2>kill.err | grep -vE '^[0-9a-f]{32}$' | tail -n 1)
		return
	fi
	rm -f kill.pipe
	mkfifo kill.pipe
	"$kill_at" "$n" "$how" "$(monitor_of "$name")" >kill.pipe 2>kill.err &
	exec 8<kill.pipe
	read -r said <&8
	[ "$said" = ready ] || { fail "kill_at: $(cat kill.err)"; exec 8<&-; return; }
	"$@" >/dev/null 2>stderr.txt
	rc=$?
	said=$(cat <&8 | tr '\n' ' ')
	exec 8<&-
	wait
}

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --memory 96M src 2>stderr.txt
equal "up" $? 0
in_guest src 'echo old >/tmp/state'
"$MAYFLY" snapshot src old >/dev/null 2>stderr.txt
equal "the old one" $? 0

# The saving process, the command, and the monitor, killed at one call after the other until they
# come to their end.
for who in -c cmd live -p; do
	how=$who kind=--diff
	case $who in -c) step=29 what="the saving process" ;; cmd) step=31 what="the command" ;;
	live) how=cmd kind=--live step=97 what="the command of a live save" ;;
	-p) step=90 what="the monitor" ;; esac
	[ -n "$FULL" ] && case $who in -p) ;; live) step=13 ;; *) step=1 ;; esac
	n=1 bad= kills=0
	while :; do
		before=$(listed)
		killing src $how "$MAYFLY" snapshot $kind src
		after=$(listed)
		case $said in
		*orphan*) bad="$bad $n:orphan" ;;
		*killed*) kills=$((kills + 1)) ;;
		*) break ;;
		esac
		# Whoever is killed may have done all but its own end: then it is the new one.
		[ "$after" = "$before" ] ||
			{ [ "$after" = $((before + 1)) ] && [ "$how$rc" != -c125 ]; } ||
			bad="$bad $n:$after listed, $before before"
		if [ $how = -p ]; then
			equal "$what killed at call $n: ps knows" "$(running src)" stopped
			check "$what killed at call $n: what is there is whole" \
				verify src@
			"$MAYFLY" restore src old 2>stderr.txt || bad="$bad $n:$(cat stderr.txt)"
		fi
		[ "$(in_guest src 'cat /tmp/state')" = old ] || bad="$bad $n:the machine is gone"
		n=$((n + step))
		[ $n -lt 20000 ] || { bad="$bad no end"; break; }
	done
	check "$what killed at $kills calls of about $n: nothing half, all goes on" test -z "$bad"
	[ -z "$bad" ] || echo "$bad"
	check "$what killed: it was" test "$kills" -ge 2
	check "$what killed: all that is there is whole" verify \
		$("$MAYFLY" snapshots --json | python3 -c '
import json, sys
print(*[s["id"] for s in json.load(sys.stdin)])')
done
# A merge, killed at one call after the other: the snapshot is as it was or as it will be.
"$MAYFLY" snapshot --diff src merged >/dev/null 2>stderr.txt
hash_of() { python3 "$here/ram.py" hash "$("$MAYFLY" snapshots --json | python3 -c '
import json, sys
print([s["dir"] for s in json.load(sys.stdin) if s["tag"] == sys.argv[1]][0])' "$1")"; }
merge_step=${FULL:+1}
merge_step=${merge_step:-61}
want=$(hash_of merged) n=1 bad= kills=0
while [ $n -lt 3000 ]; do
	killing src cmd "$MAYFLY" snapshots merge src@merged
	[ "$said" = killed ] || break
	kills=$((kills + 1))
	verify src@merged 2>stderr.txt || bad="$bad $n:$(cat stderr.txt)"
	n=$((n + merge_step))
done
check "a merge killed at $kills calls of about $n: whole" test -z "$bad" -a "$kills" -ge 2
equal "a merge killed: the same memory" "$(hash_of merged)" "$want"
"$MAYFLY" snapshot src after >/dev/null 2>stderr.txt
equal "the next save" $? 0
check "nothing is left of the killed" sh -c "! ls -d \"$MAYFLY_HOME\"/snapshots/making-* 2>/dev/null"

# No room: the save fails and says why; what changed meanwhile is in the next one.
store=$MAYFLY_HOME/snapshots
cp -r --sparse=always "$store" kept
if mount -t tmpfs -o size=1g tmpfs "$store" 2>/dev/null; then
	cp -r --sparse=always kept/. "$store/"
	in_guest src 'echo no room >/tmp/state; head -c 300000 /dev/urandom >/tmp/more; sha256sum </tmp/more' >sum
	used=$(df --output=used -k "$store" | tail -n 1)
	for room in 4 40 200; do
		mount -o remount,size=$((used + room))k "$store"
		"$MAYFLY" snapshot --diff src >/dev/null 2>stderr.txt
		equal "$room KiB of room: the save fails" $? 125
		contains "$room KiB of room: it says why" "$(cat stderr.txt)" "No space"
	done
	mount -o remount,size=1g "$store"
	"$MAYFLY" snapshot --diff src room >/dev/null 2>stderr.txt
	equal "with room again" $? 0
	"$MAYFLY" fork src@room c 2>stderr.txt
	equal "with room again: nothing is missing" \
		"$(in_guest c 'cat /tmp/state; sha256sum </tmp/more')" "no room
$(cat sum)"
	"$MAYFLY" rm --force c
	umount "$store"
else
	skip "a full disk: no right to mount one here"
fi

# Restored again and again: nothing piles up.
count_all() { # descriptors of the monitor, files, its memory, processes
	local pid
	pid=$(monitor_of src)
	echo "$(ls /proc/"$pid"/fd | wc -l) $(find "$MAYFLY_HOME" -type f | wc -l)" \
		"$(ls "$MAYFLY_HOME/snapshots" | wc -l) $(pgrep -fc "mayfly vmm .*$MAYFLY_HOME/vms")"
}
restores=${FULL:+1000}
restores=${restores:-20}
failed=0
"$MAYFLY" restore src old 2>stderr.txt
first=$(count_all) first_kib=$(awk '/^VmRSS/ { print $2 }' "/proc/$(monitor_of src)/status")
for i in $(seq "$restores"); do
	"$MAYFLY" restore src old 2>stderr.txt || { failed=$((failed + 1)); cat stderr.txt; }
done
equal "$restores restores" "$failed failed" "0 failed"
# A connection that has just ended may still be there.
as_at_first() {
	local now
	now=$(count_all)
	[ "${now%% *}" -le "${first%% *}" ] && [ "${now#* }" = "${first#* }" ]
}
check "$restores restores: descriptors, files, snapshots, processes ($first)" until_true as_at_first
last_kib=$(awk '/^VmRSS/ { print $2 }' "/proc/$(monitor_of src)/status")
check "$restores restores: memory ($first_kib KiB, now $last_kib)" \
	test "$last_kib" -lt $((first_kib + 4096))

# Many clones at once, each its own; what they really use.
clones=${FULL:+200}
clones=${clones:-20}
names=$(seq -f 'c%g' "$clones")
printf '%s\n' $names | xargs -P "$clones" -I{} "$MAYFLY" fork src@old {} 2>stderr.txt
equal "$clones forks at once" $? 0
for name in $names; do in_guest "$name" 'cat /proc/sys/kernel/random/boot_id'; done >ids
equal "$clones forks at once: each answers, as itself" "$(sort -u ids | wc -l)" "$clones"
for name in $names; do
	cat "/proc/$(monitor_of "$name")/smaps_rollup"
done | awk '/^Pss:/ { pss += $2 } /^Private_(Dirty|Clean):/ { own += $2 } /^Rss:/ { rss += $2; n++ }
	END { printf "ok clones: each %d KiB resident, %d KiB of its own, PSS %d KiB\n", rss / n, own / n, pss / n }'
"$MAYFLY" rm --force src $names
check "nothing left" nothing_left
finish
