# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Signals and kills at each stage of a run: it ends at once, and nothing stays behind.
. "$(dirname "$0")/lib.sh"

# A shell without job control starts its background jobs with SIGINT ignored, and what is ignored stays so.
set -m

# wait_for SECONDS COMMAND…: until the command succeeds.
wait_for() {
	local until=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $until ] || return 1
		sleep 0.05
	done
}
gone() { ! kill -0 "$1" 2>/dev/null; }

# At the earliest moments, before the guest is ready.
for sig in INT TERM HUP; do
	"$MAYFLY" run -- sleep 1000 >out.txt 2>stderr.txt &
	pid=$!
	check "$sig early: monitor came up" wait_for 20 pgrep -P $pid -x mayfly-vmm
	kill -$sig $pid
	wait $pid
	equal "$sig early: status" $? $((128 + $(kill -l $sig)))
	check "$sig early: nothing left" nothing_left
done

# kill -9 of the command: the monitor dies with it, and the next run sweeps the folder.
"$MAYFLY" run -- sleep 1000 >out.txt 2>stderr.txt &
pid=$!
wait_for 20 pgrep -P $pid -x mayfly-vmm
monitor=$(pgrep -P $pid -x mayfly-vmm)
{ kill -9 $pid; wait $pid; } 2>/dev/null
check "kill -9 of the command: the monitor ends" wait_for 20 gone "$monitor"
"$MAYFLY" doctor >/dev/null
check "kill -9 of the command: swept" nothing_left

# kill -9 of the monitor: the command says so at once.
"$MAYFLY" run -- sleep 1000 >out.txt 2>stderr.txt &
pid=$!
wait_for 20 pgrep -P $pid -x mayfly-vmm
kill -9 "$(pgrep -P $pid -x mayfly-vmm)"
wait $pid
equal "kill -9 of the monitor: status" $? 125
contains "kill -9 of the monitor: message" "$(cat stderr.txt)" "monitor"
check "kill -9 of the monitor: nothing left" nothing_left

# The time limit, before the guest is ready and while the command runs.
"$MAYFLY" run --cold --timeout 300ms -- true >out.txt 2>stderr.txt
equal "timeout before ready: status" $? 124
contains "timeout before ready: message" "$(cat stderr.txt)" "timed out after 300ms"
contains "timeout before ready: says where the vCPU is" "$(cat stderr.txt)" "vcpu"
check "timeout before ready: nothing left" nothing_left

"$MAYFLY" run -- sh -c 'echo ready; exec sleep 1000' >out.txt 2>stderr.txt &
pid=$!
check "the command runs" wait_for 240 grep -q ready out.txt
kill -INT $pid
wait $pid
equal "Ctrl-C while it runs: status" $? 130
check "Ctrl-C while it runs: nothing left" nothing_left
finish
