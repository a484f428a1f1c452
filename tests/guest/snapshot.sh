# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Snapshots on a real guest: what is kept goes on, clones are not each other, nothing half is seen.
. "$(dirname "$0")/lib.sh"

in_guest() { # NAME COMMAND
	"$MAYFLY" exec "$1" -- sh -c "$2"
}
uptime_of() { in_guest "$1" 'cut -d" " -f1 /proc/uptime'; }
not_less() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(b >= a) }'; }
snapshots() { "$MAYFLY" snapshots --json | python3 -c '
import json, sys
print(len(json.load(sys.stdin)))'; }
# flip FILE OFFSET: another byte there.
flip() { python3 -c '
import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2]))
    b = f.read(1)[0] ^ 0xff
    f.seek(int(sys.argv[2]))
    f.write(bytes([b]))' "$1" "$2"; }
clean() { ! in_guest "$1" 'dmesg' | grep -iE 'soft lockup|stall|watchdog|clocksource.*unstable'; }

# A disk's first words: what is written goes past every cache, so that it is the disk's.
put() { in_guest "$1" "echo $2 | dd of=/dev/vda bs=4096 count=1 conv=sync,fsync 2>/dev/null"; }
first_word() { in_guest "$1" 'echo 1 >/proc/sys/vm/drop_caches; head -c 20 /dev/vda | tr -d "\0 " | head -n 1'; }

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --disk size=8M src 2>stderr.txt
equal "up" $? 0
put src kept
in_guest src 'echo kept >/tmp/state; (while :; do date +%s >/tmp/beat; sleep 1; done) >/dev/null 2>&1 &'
before=$(uptime_of src)
# A command that runs in the source meanwhile: its connection is not the snapshot's business.
"$MAYFLY" exec src -- sh -c 'sleep 1; echo undisturbed' >during.txt &
during=$!
"$MAYFLY" snapshot --json src one >one.json 2>stderr.txt
equal "snapshot" $? 0
wait $during
equal "snapshot: what runs is not disturbed" "$(cat during.txt)" undisturbed
"$MAYFLY" snapshot src one 2>stderr.txt
equal "the same tag again: refused" $? 125
contains "the same tag again: message" "$(cat stderr.txt)" "one"
equal "one is listed" "$(snapshots)" 1

# Two clones, asked at once: no two are alike, and each has the host's time.
"$MAYFLY" fork src@one a b 2>stderr.txt
equal "fork" $? 0
for name in a b; do
	in_guest $name 'cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id \
		/etc/machine-id; hostname' >$name.id
	early=$(date +%s%3N)
	clock=$(in_guest $name adjtimex | awk '/tv_sec/ { s = $2 } /tv_usec/ { u = $2 }
		END { printf "%.0f", s * 1000 + u / 1000 }')
	late=$(date +%s%3N)
	if [ "$clock" -ge $((early - 500)) ] && [ "$clock" -le $((late + 500)) ]; then
		ok "$name: the time is the host's, within half a second"
	elif awk -v n="$(nproc)" '{ exit !($1 > 2 * n) }' /proc/loadavg; then
		skip "$name: the time, $((late - clock)) ms behind, where all else waits for a processor, too"
	else
		fail "$name: the time is $clock, of the host $early to $late"
	fi
done
equal "clones: nothing alike" "$(sort a.id b.id | uniq -d | wc -l)" 0
equal "clones: as many ids" "$(cat a.id b.id | wc -l)" 8
equal "a clone's hostname" "$(tail -n 1 a.id)" a
equal "a clone has what was there" "$(in_guest a 'cat /tmp/state')" kept
equal "a clone has the disk that was there" "$(first_word a)" kept
put a own
equal "a clone's disk is its own" "$(first_word b) $(first_word src)" "kept kept"
check "monotonic time goes on" not_less "$before" "$(uptime_of b)"
equal "the clock's source stays" "$(in_guest a 'cat /sys/devices/system/clocksource/clocksource0/current_clocksource')" kvm-clock
check "no complaint of the kernel's" clean a
check "what ran goes on" in_guest a 'a=$(cat /tmp/beat); for i in $(seq 30); do sleep 1; \
	[ "$(cat /tmp/beat)" != "$a" ] && exit 0; done; exit 1'

# Diffs: only what has changed, over two generations; a machine goes back to each.
put src changed
in_guest src 'echo changed >/tmp/state; head -c 300000 /dev/urandom >/tmp/more; sha256sum </tmp/more' >more.sum
"$MAYFLY" snapshot --diff --json src two >two.json 2>stderr.txt
equal "diff" $? 0
python3 - <<'PY' && ok "a diff is smaller" || fail "a diff is smaller"
import json
one, two = json.load(open("one.json")), json.load(open("two.json"))
assert two["parent"] == one["id"] and one["parent"] == "", (one, two)
assert two["written_bytes"] < one["written_bytes"] / 2, (one, two)
PY
"$MAYFLY" snapshot --diff src three >/dev/null 2>stderr.txt
equal "a diff on a diff" $? 0
check "verify" "$MAYFLY" snapshots verify src@three
"$MAYFLY" snapshots rm src@one 2>stderr.txt
equal "a parent is not removed" $? 125
contains "a parent is not removed: message" "$(cat stderr.txt)" "parent"
"$MAYFLY" fork src@three c 2>stderr.txt
equal "fork of a chain" "$(in_guest c 'cat /tmp/state; sha256sum </tmp/more')" "changed
$(cat more.sum)"
"$MAYFLY" restore src one 2>stderr.txt
equal "restore" $? 0
equal "restore: as it was" "$(in_guest src 'cat /tmp/state; ls /tmp/more 2>/dev/null')" kept
equal "restore: the disk as it was" "$(first_word src)" kept
equal "fork of a chain: the disk of its moment" "$(first_word c)" changed

# Generations: a clone of a clone of a clone, from machines that run; nothing is left of that.
kept=$(snapshots)
"$MAYFLY" fork a g2 2>stderr.txt && "$MAYFLY" fork g2 g3 2>stderr.txt
equal "generations" "$(in_guest g3 'cat /tmp/state; hostname')" "kept
g3"
equal "forks of running machines keep nothing" "$(snapshots)" "$kept"

# Suspended: not there, and there again.
in_guest b 'echo $$ >/tmp/pid; echo asleep >/tmp/state'
put b asleep
"$MAYFLY" suspend b 2>stderr.txt
equal "suspend" $? 0
"$MAYFLY" exec b -- true 2>stderr.txt
equal "suspended: no exec" $? 125
contains "suspended: ps says so" "$("$MAYFLY" ps | grep '^b ')" "suspended"
# Somebody builds upon it meanwhile: it stays, but nobody takes b for suspended any more.
"$MAYFLY" fork b@suspended s 2>stderr.txt && "$MAYFLY" snapshot --diff s >/dev/null 2>stderr.txt
equal "a child of the suspended" $? 0
"$MAYFLY" resume b 2>stderr.txt
equal "resume" $? 0
equal "resume: no longer suspended" "$("$MAYFLY" snapshots list b | grep -c suspended)" 0
equal "resume: as it was" "$(in_guest b 'cat /tmp/state; hostname')" "asleep
b"
equal "resume: the disk as it was" "$(first_word b)" asleep

# Damage is told, and the machine that runs is left alone.
dir=$(python3 -c 'import json; print(json.load(open("two.json"))["dir"])')
cp -r "$dir" saved
flip "$dir/state" 200
"$MAYFLY" restore src two 2>stderr.txt
equal "a damaged snapshot: refused" $? 125
contains "a damaged snapshot: message" "$(cat stderr.txt)" "damaged"
equal "a damaged snapshot: the machine goes on" "$(in_guest src 'cat /tmp/state')" kept
cp saved/state "$dir/state"
truncate -s -4096 "$dir/memory"
"$MAYFLY" fork src@two d 2>stderr.txt
equal "a torn snapshot: refused" $? 125
contains "a torn snapshot: message" "$(cat stderr.txt)" "memory"
"$MAYFLY" exec d -- true 2>stderr.txt
equal "a torn snapshot: no machine is left" $? 125
contains "a torn snapshot: no machine is left: message" "$(cat stderr.txt)" "no machine"

# A command that dies while it saves: nothing half is listed, and the machine goes on.
kept=$(snapshots)
for delay in 0 0.005 0.02 0.05; do
	"$MAYFLY" snapshot src >/dev/null 2>&1 &
	victim=$!
	sleep $delay
	kill -9 $victim 2>/dev/null
	wait $victim 2>/dev/null
done
check "killed saves: all that is listed is whole" sh -c \
	"\"$MAYFLY\" snapshots --json | python3 -c '
import json, sys
for s in json.load(sys.stdin):
    if s[\"machine\"] == \"src\" and s[\"tag\"] == \"\": print(s[\"id\"])' | xargs -r \"$MAYFLY\" snapshots verify"
equal "killed saves: the machine goes on" "$(in_guest src 'cat /tmp/state')" kept
"$MAYFLY" snapshot src after >/dev/null 2>stderr.txt
equal "killed saves: the next one works" $? 0
check "killed saves: nothing is left of them" sh -c "! ls -d \"$MAYFLY_HOME\"/snapshots/making-*"

"$MAYFLY" rm --force s a b c g2 g3 src
equal "rm: the snapshots go with their machine" "$(snapshots)" 0

# Warm starts: the first one makes what the second goes on from.
warm() { python3 -c '
import json, sys
print("first_run_to_awake_us" in json.loads(open("stderr.txt").read().splitlines()[-1]))'; }
golden() { ls "$MAYFLY_HOME/golden" 2>/dev/null | wc -l; }
rm -rf "$MAYFLY_HOME/golden"
# (With a disk, which each of them begins anew.)
set -- --memory 96M --disk size=1M
run_guest "$@" --json -- sh -c 'head -c 5 /dev/vda | tr "\0" -; echo dirty >/dev/vda; sync; echo first'
equal "run: the first" "$out $(warm) $(golden)" "-----first False 1"
run_guest "$@" --json -- sh -c 'head -c 5 /dev/vda | tr "\0" -; echo second'
equal "run: the second is warm" "$out $(warm) $(golden)" "-----second True 1"
run_guest "$@" --cold --json -- echo third
equal "run --cold boots" "$out $(warm)" "third False"
flip "$MAYFLY_HOME"/golden/*/state 100
run_guest "$@" --json -- echo fourth
equal "run: damage costs a boot" "$out $(warm) $(golden)" "fourth False 1"
contains "run: damage is told" "$errors" "no warm start"
# Ctrl-C while the guest wakes, which takes long where ring 0 is emulated: its monitor is stopped. Where it was
# awake before we were there, once more.
set -m
for _ in 1 2 3 4 5 6 7 8 9 10; do
	"$MAYFLY" run --timeout 60s "$@" -- sleep 100 2>stderr.txt &
	victim=$!
	for ((i = 0; i < 5000000; i++)); do
		for socket in "$MAYFLY_HOME"/vms/run-*/run/waking.sock; do [ -S "$socket" ] && break 2; done
	done
	stopped=$(cat "$(dirname "$socket")/lock")
	kill -STOP "$stopped"
	waking=0
	[ -S "$socket" ] && waking=1 && break
	kill -CONT "$stopped"
	kill -INT $victim
	wait $victim
done
if [ $waking = 1 ]; then
	kill -INT $victim
	wait $victim
	equal "Ctrl-C while it wakes" $? 130
else
	skip "Ctrl-C while it wakes: ten guests were awake before we were there"
fi
set +m
run_guest "$@" -- cat /proc/sys/kernel/random/uuid
one=$out
run_guest "$@" -- cat /proc/sys/kernel/random/uuid
check "run: no two draw the same" test "$one" != "$out"

# With a network: each clone has its own address on it.
if command -v passt >/dev/null && ip route show default | grep -q .; then
	macs=
	for warmth in False True; do
		run_guest --net passt --memory 96M --json -- cat /sys/class/net/eth0/address
		equal "network: warm $warmth" "$(warm)" "$warmth"
		macs+=$out$'\n'
	done
	equal "network: an address each" "$(printf %s "$macs" | grep -E '^02(:[0-9a-f]{2}){5}$' | sort -u | wc -l)" 2
else
	skip "network: there is no passt, or this host has no way out"
fi
check "nothing left" nothing_left
finish
