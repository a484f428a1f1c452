# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The MCP endpoint of a real machine: a whole task through a client over stdio, then over HTTP, both
# revisions, what a level does not grant, and what the audit tells of it afterwards.
. "$(dirname "$0")/lib.sh"

"$MAYFLY" up --timeout "$GUEST_TIMEOUT" box || fail "up"
equal "access: the default" "$("$MAYFLY" access box)" observe
"$MAYFLY" access box most 2>stderr.txt
equal "access: a level that there is not" $? 2
check "access exec" "$MAYFLY" access box exec
python3 "$(dirname "$0")/mcp_task.py" "$MAYFLY" box
equal "the client" $? 0
equal "access: as the agent has lowered it" "$("$MAYFLY" access --json box)" \
	'{"machine": "box", "access": "manage"}'
"$MAYFLY" access --lower box exec 2>stderr.txt
equal "access --lower does not raise" $? 125

check "audit verify" "$MAYFLY" audit verify box
contains "audit" "$("$MAYFLY" audit box)" "write_file"
contains "audit: what the owner allowed" "$("$MAYFLY" audit box)" "publish_port     allowed"
"$MAYFLY" approvals box allow 0123456789abcdef 2>stderr.txt
equal "approvals: nothing to allow" $? 125
equal "audit --since" "$("$MAYFLY" audit --since 2100-01-01 box)" ""
contains "audit --json" "$("$MAYFLY" audit --json box | tail -n 1)" '"hash":'
contains "replay" "$("$MAYFLY" replay box)" '    | all tests pass'
check "replay --html" "$MAYFLY" replay --html page.html box
contains "the page" "$(cat page.html)" 'all tests pass'
equal "a page is for its owner" "$(stat -c %a page.html)" 600
equal "a secret is in neither" "$("$MAYFLY" audit --json box | grep -c hunter2)" 0
dir=$MAYFLY_HOME/vms/box
sed -i '3s/exec/read/' "$dir/audit.jsonl"
"$MAYFLY" audit verify box 2>stderr.txt
equal "audit verify of a log that was changed" $? 125
contains "names the line" "$(cat stderr.txt)" "audit.jsonl:3"

"$MAYFLY" mcp --http=0.0.0.0:0 box 2>stderr.txt
equal "mcp --http beyond the loopback" $? 125
contains "says what to do" "$(cat stderr.txt)" "--tls-cert"

"$MAYFLY" access box none
"$MAYFLY" mcp box </dev/null 2>stderr.txt
equal "mcp at level none" $? 125
contains "says what to do" "$(cat stderr.txt)" "mayfly access box observe"
"$MAYFLY" mcp no-such-machine </dev/null 2>stderr.txt
equal "mcp of no machine" $? 125
export HOME=$PWD
check "mcp install" "$MAYFLY" mcp install cursor box
contains "writes the client's file" "$(cat .cursor/mcp.json)" '"mayfly-box"'
check "mcp uninstall" "$MAYFLY" mcp uninstall cursor box
"$MAYFLY" mcp uninstall cursor box 2>stderr.txt
equal "mcp uninstall twice" $? 125
check "rm" "$MAYFLY" rm --force box
check "nothing left" nothing_left
finish
