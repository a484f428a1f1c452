# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What outlives its client: jobs and their logs; and run with files in and out, and left running.
. "$(dirname "$0")/lib.sh"

# A shell without job control starts its background jobs with SIGINT ignored, and what is ignored stays so.
set -m

# json FILE EXPRESSION: of the JSON in FILE, which is called j.
json() { python3 -c 'import json, sys; j = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
words() { cat stderr.txt; }

# --- run: files in and out, left running -----------------------------------------------------

mkdir -p in/sub outside out
head -c 100000 /dev/urandom >in/sub/data
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("in/socket")'
run_guest --in in --out out -- sh -c '
	cp /in/sub/data /out/data; ln -s /etc/passwd /out/link
	rm -r /in/sub; exit 4'
equal "run --in --out: the command's status" "$status" 4
contains "a socket stays here, and that is said" "$errors" "socket: left out"
check "a file in and out, byte for byte" cmp in/sub/data out/data
equal "a link comes out as a link" "$(readlink out/link)" /etc/passwd
"$MAYFLY" run --in no-such-folder -- true 2>stderr.txt
equal "--in of what is not there" $? 125
contains "is named" "$(words)" "no-such-folder"
"$MAYFLY" run --detach --out out -- true 2>stderr.txt
equal "--detach with --out" $? 2
# What a guest may make us write has a bound, and a copy that failed hides no status but success.
much='head -c 90000 /dev/zero >/out/much; ln -s x /out/small'
run_guest --out bounded --max-out 64K -- sh -c "$much"
equal "more than --max-out" "$status" 125
contains "is said" "$errors" "--max-out"
equal "and nothing half is left" "$(find bounded -size +0 -type f)" ""
run_guest --out bounded --max-out 64K -- sh -c "$much; exit 7"
equal "the command's own failure is not hidden by it" "$status" 7
contains "and both are told" "$errors" "--max-out"
check "nothing left" nothing_left

vm=$("$MAYFLY" run --detach --in in -- sh -c 'cat >/dev/null; md5sum </in/sub/data; echo problem >&2; exit 6')
equal "run --detach" $? 0
"$MAYFLY" jobs --wait "$vm" main
equal "its command's status" $? 6
equal "its output" "$("$MAYFLY" logs "$vm" main 2>stderr.txt)" "$(md5sum <in/sub/data)"
equal "its errors apart" "$(words)" problem

# What is there already leads nowhere, either.
ln -s ../outside out/folder
"$MAYFLY" exec "$vm" -- sh -c 'mkdir -p /out/folder; echo x >/out/folder/file; echo y >/out/other'
"$MAYFLY" cp "$vm:/out/." out 2>stderr.txt
equal "cp over a link of ours: refused" $? 125
contains "is named" "$(words)" "folder"
equal "nothing is written through it" "$(ls outside)" ""
equal "and the rest is copied" "$(cat out/other)" y
"$MAYFLY" cp --max 8K "$vm:/in/sub/data" too-much 2>stderr.txt
equal "cp --max" $? 125
contains "is told" "$(words)" "more than"
equal "and leaves nothing" "$(ls too-much .mayfly* 2>/dev/null)" ""

# --- Jobs ------------------------------------------------------------------------------------

status_of() {
	"$MAYFLY" jobs --json "$vm" "$1" >job.json && json job.json "j['$2']"
}

equal "exec --detach: the job's name" "$("$MAYFLY" exec --detach --job long "$vm" -- \
	sh -c 'echo begin; sleep 7775 & echo $! >/tmp/left; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo end; exit 7')" long
equal "it runs" "$(status_of long running)" True
"$MAYFLY" exec --detach --job long "$vm" -- true 2>stderr.txt
equal "a second of that name" $? 125
contains "is refused" "$(words)" "already"
contains "the table" "$("$MAYFLY" jobs "$vm")" "long                 running"
"$MAYFLY" jobs --forget "$vm" long 2>stderr.txt
equal "forget while it runs: refused" $? 125
"$MAYFLY" jobs --wait --timeout 100ms "$vm" long 2>stderr.txt
equal "wait --timeout" $? 124
mkfifo fifo
"$MAYFLY" logs --follow "$vm" long >fifo &
follower=$!
{
	read -r first
	"$MAYFLY" exec "$vm" -- touch /tmp/go
	read -r second
	read -r third
} <fifo
wait $follower
equal "logs --follow ends with the job" "$? $first $second $third" "0 begin end "
"$MAYFLY" jobs --wait "$vm" long
equal "wait: the job's status" $? 7
equal "logs by offset" "$("$MAYFLY" logs --offset 6 "$vm" long)" end
equal "logs from the end on" "$("$MAYFLY" logs --offset 10 "$vm" long)" ""
check "what a job leaves lives on" "$MAYFLY" exec "$vm" -- sh -c 'kill -9 $(cat /tmp/left)'
check "forget" "$MAYFLY" jobs --forget "$vm" long
"$MAYFLY" jobs "$vm" long 2>stderr.txt
equal "it is forgotten" $? 125

"$MAYFLY" exec -d --job much "$vm" -- sh -c 'head -c 300000 /dev/zero; echo last' >name.txt
"$MAYFLY" jobs --wait "$vm" much
"$MAYFLY" logs --offset 0 "$vm" much >much.txt 2>stderr.txt
equal "of a long log the newest is kept" "$(tail -c 5 much.txt | tr -d '\n')" last
equal "and no more than the bound" "$(stat -c %s much.txt)" 262144
contains "which is said" "$(words)" "begins at byte 37861"
equal "logs --tail" "$("$MAYFLY" logs --tail 1K "$vm" much | wc -c)" 1024

tree='sleep 7771 & setsid sh -c "sleep 7772 & sleep 7773" & echo ready; wait'
tree_gone() { ! "$MAYFLY" exec "$vm" -- sh -c 'ps | grep -v grep | grep -E "sleep 777[123]"'; }
"$MAYFLY" exec -d --job tree "$vm" -- sh -c "$tree" >name.txt
"$MAYFLY" logs -f "$vm" tree | { read -r word; equal "a job with a tree" "$word" ready; "$MAYFLY" jobs --kill "$vm" tree; }
"$MAYFLY" jobs --wait "$vm" tree
equal "kill" $? 137
check "all that it started is gone" tree_gone
"$MAYFLY" exec -d --job term "$vm" -- sh -c 'trap "exit 9" TERM; echo ready; while :; do sleep 0.1; done' >name.txt
"$MAYFLY" logs -f "$vm" term | { read -r word; "$MAYFLY" jobs --signal TERM "$vm" term; }
"$MAYFLY" jobs --wait "$vm" term
equal "a signal reaches a job" $? 9
"$MAYFLY" exec -d --timeout 1s --job late "$vm" -- sleep 7774 >name.txt
"$MAYFLY" jobs --wait "$vm" late
equal "a job's deadline" $? 124
contains "is shown" "$("$MAYFLY" jobs "$vm" late)" "timed out"
"$MAYFLY" exec -d "$vm" -- no-such-command 2>stderr.txt
equal "a job that cannot start" $? 127
equal "and is none" "$("$MAYFLY" jobs --json "$vm" >all.json; json all.json 'len(j)')" 5

# --- The console's log -----------------------------------------------------------------------

"$MAYFLY" exec "$vm" -- sh -c 'echo first-mark >/dev/console'
"$MAYFLY" logs --follow "$vm" >console.txt &
follower=$!
until grep -q first-mark console.txt; do sleep 0.05; done
"$MAYFLY" exec "$vm" -- sh -c 'echo second-mark >/dev/console'
"$MAYFLY" down "$vm"
wait $follower
equal "logs --follow of the console ends with the machine" $? 0
contains "and shows all of it" "$(cat console.txt)" second-mark
contains "also later" "$("$MAYFLY" logs "$vm")" second-mark
check "rm" "$MAYFLY" rm "$vm"
check "nothing left" nothing_left
finish
