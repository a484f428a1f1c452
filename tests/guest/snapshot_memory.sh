# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What a snapshot has is what the guest had: along a chain of diffs, while it writes by all that it
# has; by each way of reading it; compressed, and merged.
. "$(dirname "$0")/lib.sh"
here=$(cd "$(dirname "$0")" && pwd)

in_guest() { # NAME COMMAND
	"$MAYFLY" exec "$1" -- sh -c "$2"
}

verify() { "$MAYFLY" snapshots verify "$@" >/dev/null; }

cpus=1
[ "$("$MAYFLY" doctor --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["host"])')" != hardware ] || cpus=2
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --memory 64M --cpus $cpus --disk size=8M src 2>stderr.txt
equal "up" $? 0
in_guest src 'head -c 100000 /dev/urandom >/tmp/kept; sha256sum </tmp/kept' >kept.sum
# Memory, the console, the entropy device, vsock, and the processors' state.
"$MAYFLY" exec src -- sh -c 'while :; do head -c 8000 /dev/urandom >/tmp/w.$((i % 7)); i=$((i + 1));
	echo "beat $i" >/dev/kmsg; head -c 64 /dev/hwrng >/tmp/rng 2>/dev/null; rm -f /tmp/w.$((i % 5));
	echo $i; cat /tmp/w.* | head -c 3000; done' >flow 2>&1 &
flow=$!
bad= sizes=
for i in $(seq 0 10); do
	diff=--diff
	[ "$i" -gt 0 ] || diff=
	told=$(python3 "$here/ram.py" same "$MAYFLY_HOME/vms/src/run" "$PWD/whole$i" -- \
		"$MAYFLY" snapshot $diff src "s$i" 2>stderr.txt)
	[ "$told" = same ] || bad="$bad s$i: $told $(cat stderr.txt)"
	sizes="$sizes $(du -k "$MAYFLY_HOME/snapshots/$("$MAYFLY" snapshots --json | python3 -c '
import json, sys
print([s["id"] for s in json.load(sys.stdin) if s["tag"] == sys.argv[1]][0])' "s$i")/memory" | cut -f1)"
	rm -rf "whole$i"
	before=$(wc -c <flow)
	for _ in $(seq 100); do [ "$(wc -c <flow)" -gt $((before + 300)) ] && break; sleep 0.1; done
done
check "a chain of ten diffs under load: RAM is the same at each (KiB:$sizes)" test -z "$bad"
[ -z "$bad" ] || echo "$bad"
check "the load went on" kill -0 $flow
check "the chain is whole" verify src@s10
"$MAYFLY" snapshot --diff --compress src z >z.id 2>stderr.txt
equal "a compressed diff on it" $? 0
"$MAYFLY" snapshot --compress src full >/dev/null 2>stderr.txt
equal "a compressed one that stands alone" $? 0
check "compressed: whole" verify src@z src@full
# Merged, it has the same memory, stands alone, and is still what the compressed one builds upon.
s10=$("$MAYFLY" snapshots --json | python3 -c '
import json, sys
print([s["dir"] for s in json.load(sys.stdin) if s["tag"] == "s10"][0])')
before=$(python3 "$here/ram.py" hash "$s10")
"$MAYFLY" snapshots merge src@s10 2>stderr.txt
equal "merge" "$? $(cat stderr.txt)" "0 "
equal "merged: the same memory" "$(python3 "$here/ram.py" hash "$s10")" "$before"
"$MAYFLY" snapshots rm src@s9 2>stderr.txt
equal "merged: nothing builds upon its parent any more" $? 0
check "merged: what builds upon it is whole" verify src@z src@s10
"$MAYFLY" snapshots merge src@z 2>stderr.txt
check "merged: the compressed one" verify src@z
# Pruned: what has a tag stays.
"$MAYFLY" snapshot --diff src >/dev/null && "$MAYFLY" snapshot --diff src >/dev/null &&
	"$MAYFLY" snapshot --diff src >/dev/null
"$MAYFLY" snapshots prune --keep 1 src 2>stderr.txt
equal "prune" "$? $("$MAYFLY" snapshots list src | grep -c .)" "0 14"
check "pruned: what stays is whole" verify src@
# Copied while it writes: what is there at the end is what it has then, and what a diff builds upon.
in_guest src 'for i in 1 2; do (while :; do for n in 1 2 3 4 5 6 7 8 9; do echo $n$n$n$n$n; done >/tmp/live.$i; done) \
	>/dev/null 2>&1 </dev/null & done'
before=$(wc -c <flow)
bad=
for i in 1 2 3; do
	told=$(python3 "$here/ram.py" live "$MAYFLY_HOME/vms/src/run" "$PWD/live$i" "$PWD/whole$i" 2>&1)
	echo "$told" >>live.txt
	case $told in "same "*" 0") bad="$bad nothing was written: $told" ;; same*) ;; *) bad="$bad $told" ;; esac
	rm -rf "live$i" "whole$i"
done
check "live, with $cpus vCPUs: RAM is the same ($(tr '\n' ';' <live.txt))" test -z "$bad"
in_guest src 'echo one | dd of=/dev/vda bs=4096 conv=sync,fsync 2>/dev/null'
"$MAYFLY" snapshot --live --json src live >live.json 2>stderr.txt
equal "snapshot --live" "$? $(cat stderr.txt)" "0 "
check "snapshot --live: what it tells" python3 -c '
import json
told = json.load(open("live.json"))
assert told["parent"] == "" and told["blackout_ns"] > 0 and 1 <= len(told["live"]["rounds"]) <= 8, told
assert 0 < told["written_bytes"] <= told["memory_bytes"] and told["live"]["rounds"][0]["bytes"] > 0, told'
check "snapshot --live: whole" verify src@live
in_guest src 'echo two | dd of=/dev/vda bs=4096 conv=sync,fsync 2>/dev/null'
equal "a diff on it: RAM is the same" "$(python3 "$here/ram.py" same "$MAYFLY_HOME/vms/src/run" "$PWD/wholel" -- \
	"$MAYFLY" snapshot --diff src live1 2>stderr.txt)" same
rm -rf wholel
"$MAYFLY" fork src@live1 l 2>stderr.txt
equal "a fork of it" "$(in_guest l 'sha256sum </tmp/kept; head -c 3 /dev/vda')" "$(cat kept.sum)
two"
"$MAYFLY" rm --force l
"$MAYFLY" snapshot --live --diff src 2>stderr.txt
equal "--live --diff: refused" $? 2
contains "--live --diff: why" "$(cat stderr.txt)" "--diff"
load_went_on() { [ "$(wc -c <flow)" -gt "$before" ]; }
eventually "the load goes on" load_went_on
# The layers that its disk has from them are one when they have gone and it is down.
"$MAYFLY" snapshots rm src@live1 src@live
layers() { ls "$MAYFLY_HOME/vms/src/layers" | wc -l; }
was=$(layers)
"$MAYFLY" down --force src
"$MAYFLY" snapshots prune --keep 1 src 2>stderr.txt
equal "prune: layers of its disk that no snapshot has" "$? $was $(layers)" "0 3 2"
wait $flow 2>/dev/null

balloon_is() { "$MAYFLY" stats --json c | python3 -c '
import json, sys
sys.exit(json.load(sys.stdin)["balloon"]["actual_bytes"] != int(sys.argv[1]))' "$1"; }
way_of() { # NAME: what its monitor says of the way
	grep -c 'read at once' "$MAYFLY_HOME/vms/$1/monitor.log"
}
fault_count() { # NAME WHICH
	python3 "$here/ram.py" faults "$MAYFLY_HOME/vms/$1/run" "$2"
}
# Each way gives the same guest, which goes on, is saved again, and restored again.
for way in mapped lazy eager auto; do
	for from in s10 z full; do
		"$MAYFLY" fork --memory-restore $way "src@$from" c 2>stderr.txt
		status=$?
		if [ $way = mapped ] && [ $from != s10 ]; then
			equal "$way $from: refused" $status 125
			contains "$way $from: why" "$(cat stderr.txt)" "compressed"
			continue
		fi
		equal "$way $from" "$status $(in_guest c 'sha256sum </tmp/kept')" "0 $(cat kept.sum)"
		if [ $from = z ] && [ $way = lazy ]; then
			first_faults=$(fault_count c lazy)
			equal "lazy: the first has nothing to fetch before" "$(fault_count c prefetched)" 0
		elif [ $from = z ] && [ $way = auto ] && [ "$first_faults" -gt 0 ]; then
			check "lazy: the next one fetches what that wanted ($first_faults frames; now waits for $(fault_count c lazy))" \
				test "$(fault_count c prefetched)" -gt 0 -a "$(fault_count c lazy)" -lt "$first_faults"
		fi
		[ $from = full ] || { "$MAYFLY" rm --force c; continue; }
		# The host's kernel takes from and puts into pages that nobody has touched.
		equal "$way: a disk's data from and to memory that is absent" "$(in_guest c \
			'dd if=/tmp/kept of=/dev/vda bs=8k conv=fsync 2>/dev/null
			echo 3 >/proc/sys/vm/drop_caches; head -c 100000 /dev/vda | sha256sum')" \
			"$(cat kept.sum)"
		if [ $way = lazy ]; then
			"$MAYFLY" balloon c 16M
			check "$way: a balloon is filled" until_true balloon_is $((16 << 20))
			"$MAYFLY" balloon c 0M
			check "$way: and emptied" until_true balloon_is 0
			equal "$way: what it has given up and got back is its own" \
				"$(in_guest c 'sha256sum </tmp/kept')" "$(cat kept.sum)"
		fi
		in_guest c 'echo mine >/tmp/mine'
		"$MAYFLY" snapshot --diff --json c d >d.json 2>stderr.txt
		equal "$way: a diff of it" $? 0
		check "$way: only what has changed" python3 -c '
import json
d = json.load(open("d.json"))
assert d["written_bytes"] < d["memory_bytes"] / 8, d'
		"$MAYFLY" restore --memory-restore $way c d 2>stderr.txt
		equal "$way: its diff restored" \
			"$(in_guest c 'cat /tmp/mine; sha256sum </tmp/kept')" "mine
$(cat kept.sum)"
		"$MAYFLY" rm --force c
	done
done

# Pages that cannot be had: no guest runs on zeros.
if [ "$("$MAYFLY" fork --memory-restore lazy src@full e 2>stderr.txt; way_of e)" = 0 ]; then
	"$MAYFLY" rm --force e
	dir=$("$MAYFLY" snapshots --json | python3 -c '
import json, sys
print([s["dir"] for s in json.load(sys.stdin) if s["tag"] == "full"][0])')
	python3 - "$dir/memory" <<'PY'
import os, sys
size = os.path.getsize(sys.argv[1]) - 4096
with open(sys.argv[1], "r+b") as f:
    for at in range(1000, size, 3001):
        f.seek(at)
        f.write(b"\x5a\xa5\x5a\xa5")
PY
	"$MAYFLY" fork src@full e 2>stderr.txt
	equal "damaged frames: no machine" $? 125
	contains "damaged frames: why" "$(cat stderr.txt)" "damaged"
else
	skip "lazy memory: userfaultfd is not allowed here"
fi
"$MAYFLY" rm --force src
check "nothing left" nothing_left
finish
