# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# mayfly config, and pools of machines that wait: leased once, replaced, and nothing left, whoever is killed.
set -mu
. "$(dirname "$0")/lib.sh"
trap '"$MAYFLY" pool rm p 2>/dev/null' EXIT

# field KEY: of the pool p.
field() {
	"$MAYFLY" pool stats p --json | python3 -c '
import json, sys
print(json.load(sys.stdin).get(sys.argv[1], ""))' "$1"
}
is() { [ "$(field "$1")" = "$2" ]; }
at_least() { [ "$(field "$1")" -ge "$2" ]; }
nr_of_machines() { "$MAYFLY" ps --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))'; }
machines_are() { [ "$(nr_of_machines)" = "$1" ]; }
served_anew() { [ -n "$(field pid)" ] && ! is pid "$server"; }
# A program, so that only it can have made it so.
in_pool() { "$MAYFLY" run --timeout "$GUEST_TIMEOUT" --pool p "$@"; }

"$MAYFLY" create x --memory 96M
contains 'config says what is in force' "$("$MAYFLY" config x)" "$MAYFLY_HOME/vms/x/vm.ini:"
contains 'and where it is from' "$("$MAYFLY" config x --json | tr -d ' \n')" '"key":"mode","value":"none","from":"default"'
"$MAYFLY" rm x

out=$("$MAYFLY" pool create p --size 2 --setup 'exit 3' 2>&1)
equal 'a set-up that fails makes no pool' $? 125
contains 'and says so' "$out" 'status 3'
out=$("$MAYFLY" pool create p --size 2 --memory 96M --setup 'echo kept >/tmp/mark; hostname' 2>&1)
equal 'a pool is made' $? 0
until_true is ready 2
equal 'it fills' "$(field ready)" 2

first=$(in_pool --timings --json -- sh -c 'cat /tmp/mark; cat /proc/sys/kernel/random/boot_id' 2>timings)
equal 'one is leased' $? 0
contains 'it was set up' "$first" kept
contains 'at once' "$(cat timings)" '"pool":"hit"'
second=$(in_pool -- cat /proc/sys/kernel/random/boot_id /tmp/mark)
[ "$(echo "$first" | tail -n 1)" != "$(echo "$second" | head -n 1)" ]
equal 'another is another machine' $? 0
in_pool -- sh -c 'exit 7'
equal 'the exit status is the command'\''s' $? 7
now=$(date +%s) there=$(in_pool -- date +%s)
[ $((there - now)) -ge -2 ] && [ $((there - now)) -le "${GUEST_TIMEOUT%s}" ]
equal 'one that has waited knows the time' $? 0
out=$(in_pool --memory 1G -- true 2>&1)
equal 'its options are the pool'\''s' $? 2

# The pool's process dies: what waits goes on waiting, and the next lease starts another.
until_true is ready 2
server=$(field pid)
kill -KILL "$server"
until_true is pid ''
equal 'without its process they still wait' "$(field ready)" 2
hits=$(field hits)
in_pool -- true
equal 'and are leased' "$? $(field hits)" "0 $((hits + 1))"
until_true served_anew
check 'another process serves' served_anew
until_true is ready 2
equal 'and fills it' "$(field ready) $(nr_of_machines)" '2 2'

# Nobody waits.
kill -STOP "$(field pid)"
"$MAYFLY" run --pool p -- sleep 1000 &
holder=$!
until_true is leased 1
"$MAYFLY" run --pool p -- sleep 1000 &
other=$!
until_true is leased 2
misses=$(field misses)
out=$(in_pool --timings --json -- cat /tmp/mark 2>timings)
equal 'when none waits one is made as the pool does' "$out" kept
contains 'and it says so' "$(cat timings)" '"pool":"miss"'
equal 'which is counted' "$(field misses)" $((misses + 1))

# Who has leased one dies: it goes.
kill -KILL $holder
kill -TERM $other
wait $other
equal 'a signal ends the command' $? 143
kill -CONT "$(field pid)"
until_true is ready 2
until_true machines_are 2
equal 'a killed command leaves no machine' "$(nr_of_machines) $(field leased)" '2 0'
check 'refills are counted' at_least refills 5
contains 'ls has it' "$("$MAYFLY" pool ls)" 'p '

server=$(field pid)
check 'rm' "$MAYFLY" pool rm p
eventually 'its process is gone' test ! -e "/proc/$server"
check 'nothing is left' nothing_left
equal 'and no pool' "$("$MAYFLY" pool ls --json)" '[]'
finish
