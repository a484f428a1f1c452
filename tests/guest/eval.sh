# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Evaluation runs: one machine a task, the verifier's files after the commands' end, resume.
set -mu
. "$(dirname "$0")/lib.sh"
trap '"$MAYFLY" pool rm p 2>/dev/null' EXIT

# of ID KEY…: from the last result of a task.
of() {
	python3 - eval/results.jsonl "$@" <<'EOF'
import json, sys
path, id, *keys = sys.argv[1:]
value = [r for r in map(json.loads, open(path)) if r["id"] == id][-1]
for key in keys: value = value.get(key, "") if isinstance(value, dict) else ""
print(value)
EOF
}
lines() { wc -l <"$1"; }

mkdir -p src && echo 'print me' >src/text && echo 'test "$(cat /work/answer)" = 42 && echo "{\"score\": 1}" >/result' >check.sh
cat >bad.jsonl <<'EOF'
{"id": "one", "commands": ["true"]}
{"id": "two", "comands": ["true"]}
EOF
out=$("$MAYFLY" eval run --out bad bad.jsonl 2>&1)
equal 'a bad line is refused' $? 2
contains 'and named' "$out" "bad.jsonl:2: unknown key 'comands'"
check 'before anything is there' test ! -e bad
echo '{"id": "src", "commands": ["true"]}' >bad.jsonl
out=$("$MAYFLY" eval run --resume --out . bad.jsonl 2>&1)
equal 'a folder that is not of an evaluation is left alone' "$? $(cat src/text)" '125 print me'
echo '{"id": "x", "pool": "nobody", "commands": ["true"]}' >bad.jsonl
out=$("$MAYFLY" eval run --out bad bad.jsonl 2>&1)
contains 'a pool that is not there, too' "$out" "no pool 'nobody'"

check 'a pool' "$MAYFLY" pool create p --size 2 --memory 96M --setup 'mkdir /work'
verifier='"verifier": {"files": [{"from": "check.sh", "to": "/verify/check.sh"}], "command": ["sh", "/verify/check.sh"], "result": "/result"}'
# What a task leaves running would write over the answer, or the result, and looks for the verifier.
spoiler='(while :; do echo 7 >/work/answer; echo spoilt >/result; ls /verify >>/work/seen 2>/dev/null; done) >/dev/null 2>&1 &'
cat >tasks.jsonl <<EOF
{"id": "good", "pool": "p", "files": [{"from": "src", "to": "/work/src"}], "setup": ["test -e /work/src/text"], "commands": ["cat src/text", ["sh", "-c", "echo \$ANSWER >answer"]], "workdir": "/work", "env": {"ANSWER": "42"}, "files_out": ["/work/answer", "/work/none"], $verifier}
{"id": "wrong", "pool": "p", "commands": ["echo 41 >/work/answer; exit 3", "echo never"], $verifier}
{"id": "spoiler", "pool": "p", "commands": ["$spoiler sleep 1", "echo done"], "files_out": ["/work/seen"], "verifier": {"files": [{"from": "check.sh", "to": "/verify/check.sh"}], "command": "rm -f /work/seen; echo 42 >/work/answer; sleep 1; sh /verify/check.sh && test ! -e /work/seen", "result": "/result"}}
{"id": "slow", "pool": "p", "timeout_seconds": 2, "commands": ["sleep 1000"]}
{"id": "no-setup", "pool": "p", "setup": ["exit 5"], "commands": ["true"]}
EOF
out=$("$MAYFLY" eval run --jobs 2 --json --out eval tasks.jsonl 2>errors)
equal 'some failed' $? 1
equal 'the summary' "$(echo "$out" | python3 -c 'import json, sys; s = json.load(sys.stdin); print(s["passed"], s["failed"], s["errors"])')" '2 2 1'
equal 'a task passed' "$(of good status) $(of good commands)" 'passed [0, 0]'
equal 'its result was read' "$(of good verifier result)" '{"score": 1}'
equal 'its files came out' "$(cat eval/good/files/answer)" 42
contains 'and what was not there is told' "$(of good files_missing)" '/work/none'
equal 'its log' "$(cat eval/good/commands.log)" 'print me'
equal 'a task failed' "$(of wrong status) $(of wrong commands) $(of wrong verifier exit)" 'failed [3] 1'
equal 'what a task left running did not see the verifier' "$(of spoiler status) $(of spoiler verifier result)" 'passed {"score": 1}'
equal 'one was too slow' "$(of slow status) $(of slow commands) $(of slow timed_out)" 'failed [124] True'
contains 'a set-up failed' "$(of no-setup status) $(of no-setup error)" 'error set-up ended with status 5'
out=$("$MAYFLY" eval run --out eval tasks.jsonl 2>&1)
equal 'a folder is not used twice' $? 125

# Interrupted: what was done stays done, what was not is done by another.
sed -i '/"no-setup"/d' tasks.jsonl
echo '{"id": "long", "pool": "p", "commands": ["sleep 1000"]}' >>tasks.jsonl
before=$(lines eval/results.jsonl)
printf '{"id": "half' >>eval/results.jsonl
"$MAYFLY" eval run --jobs 2 --resume --out eval tasks.jsonl >resumed 2>&1 &
job=$!
# It sleeps: the only one that is to run.
until_true test -e eval/long/commands.log
kill -INT $job
wait $job
equal 'interrupted' $? 130
contains 'it says what was not run' "$(cat resumed)" '1 not run'
equal 'nothing was recorded' "$(lines eval/results.jsonl) $(grep -c half eval/results.jsonl)" "$before 0"
sed -i 's/sleep 1000"\]}$/true"]}/' tasks.jsonl
"$MAYFLY" eval run --resume --out eval tasks.jsonl >resumed 2>&1
equal 'resumed, some have failed before' $? 1
contains 'and one was run' "$(cat resumed)" '5 tasks: 3 passed, 2 failed, 0 errors'
equal 'alone' "$(of long status) $(lines eval/results.jsonl)" "passed $((before + 1))"

# Killed: the machines go, too.
sed -i 's/"long", "pool": "p", "commands": \["true/"other", "pool": "p", "commands": ["sleep 1000/' tasks.jsonl
"$MAYFLY" eval run --resume --out eval tasks.jsonl >killed 2>&1 &
job=$!
until_true test -e eval/other/commands.log
kill -KILL $job
leased() { "$MAYFLY" pool stats p --json | grep -q '"leased": 0'; }
until_true leased
check 'a kill ends the tasks' leased
check 'the pool goes' "$MAYFLY" pool rm p
eventually 'nothing is left' nothing_left
finish
