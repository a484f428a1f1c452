# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# For the tests on real guests: sourced by each.

# How long a guest may take to answer. Only a bound for what hangs: nothing is gated on time.
export GUEST_TIMEOUT=${GUEST_TIMEOUT:-240s}

test_failed=0
ok() { echo "ok $*"; }
fail() {
	echo "FAIL $*"
	test_failed=1
}
skip() { echo "skip $*"; }
finish() { exit $test_failed; }

# check NAME COMMAND…: ok if the command succeeds.
check() {
	local name=$1
	shift
	if "$@"; then ok "$name"; else fail "$name: $*"; fi
}

# equal NAME GOT WANTED
equal() {
	if [ "$2" = "$3" ]; then ok "$1"; else fail "$1: got '$2', wanted '$3'"; fi
}

# contains NAME TEXT PART
contains() {
	case $2 in *"$3"*) ok "$1" ;; *) fail "$1: '$2' lacks '$3'" ;; esac
}

# run_guest ARGS…: mayfly run; its output in $out, its errors in $errors, its status in $status.
run_guest() {
	out=$("$MAYFLY" run --timeout "$GUEST_TIMEOUT" "$@" 2>stderr.txt)
	status=$?
	errors=$(cat stderr.txt)
}

# until_true COMMAND…: waits for it; three minutes are a bound for what never comes.
until_true() {
	local until=$((SECONDS + 180))
	until "$@"; do
		[ $SECONDS -lt $until ] || return 1
		sleep 0.1
	done
}

# eventually NAME COMMAND…: a condition that becomes true.
eventually() {
	if until_true "${@:2}" >/dev/null 2>&1; then ok "$1"; else fail "$*"; fi
}

# The process of a machine's monitor.
monitor_pid() { cat "$MAYFLY_HOME/vms/$1/run/lock"; }

# Machines and monitors that are left: none after a run. Tells what holds them.
left_behind() {
	local left
	left=$(ls "$MAYFLY_HOME/vms" 2>/dev/null)
	if [ -n "$left" ]; then
		ls -liR "$MAYFLY_HOME/vms"
		cat /proc/locks
		ps -eo pid,ppid,stat,wchan:20,etimes,args | grep '[m]ayfly'
		return 0
	fi
	pgrep -x mayfly-vmm >/dev/null && pgrep -ax mayfly-vmm | grep -F "$MAYFLY_HOME"
}
nothing_left() { ! left_behind; }
