#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tests on real guests: run-guest.sh [--lab] BUILD [NAME…]
# Natively on /dev/kvm; with --lab, or where there is no /dev/kvm, in the emulated AMD host.
# Each tests/guest/NAME.sh prints "ok", "FAIL" or "skip" lines; a script that prints none has failed.
set -u
top=$(cd "$(dirname "$0")/.." && pwd)
lab=
[ "${1:-}" = --lab ] && lab=1 && shift
build=${1:?build folder}
shift
case $build in /*) ;; *) build=$top/$build ;; esac

if [ -z "$lab" ] && [ ! -w /dev/kvm ]; then
	echo "no /dev/kvm here that may be used: running the guest tests in the lab (emulated, slow)"
	lab=1
fi
# Two suites at a time on one machine, else they starve each other.
mkdir -p /run/lock
exec 8>/run/lock/mayfly-guest-tests.1 9>/run/lock/mayfly-guest-tests.2
if ! flock -n 8 && ! flock -n 9; then
	echo "waiting: two other runs of the guest tests are under way on this machine"
	flock 8
fi
if [ -n "$lab" ]; then
	exec "$top/tests/lab/lab" run --timeout 3000 --memory 3072 --env MAYFLY_HOME=/tmp/mayfly-home \
		--cwd "$top" -- "$top/tests/run-guest.sh" "$build" "$@"
fi

export MAYFLY=$build/mayfly
export TEST_BUILD=$build
work=$(mktemp -d)
export MAYFLY_HOME=$work/home
# What a test that was ended has left running would go on for ever.
end_machines() {
	"$MAYFLY" ps --json | python3 -c '
import json, sys
for m in json.load(sys.stdin):
    if m["state"] == "running": print(m["pid"])' | xargs -r kill
	rm -rf "$MAYFLY_HOME/vms"
}
trap 'end_machines; rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- $(cd "$top/tests/guest" && ls *.sh | grep -v '^lib\.sh$' | sed 's/\.sh$//')
passed=0 failed=0 skipped=0 failures=
for name in "$@"; do
	mkdir -p "$work/$name"
	start=$(date +%s)
	(cd "$work/$name" && timeout -k 10 900 bash "$top/tests/guest/$name.sh") >"$work/out" 2>&1 8>&- 9>&-
	rc=$?
	p=$(grep -c '^ok ' "$work/out") f=$(grep -c '^FAIL ' "$work/out")
	s=$(grep -c '^skip ' "$work/out")
	if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
	if [ "$((p + f + s))" -eq 0 ]; then f=1; fi
	passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
	echo "== $name: exit $rc, $p ok, $f failed, $s skipped, $(($(date +%s) - start)) s"
	if [ "$f" -gt 0 ]; then
		failures+="$name: exit $rc: $(grep '^FAIL ' "$work/out")"$'\n'
		cat "$work/out"
		end_machines
	else
		grep -E '^(ok|skip) ' "$work/out"
	fi
done
# Last, where it is seen.
printf '%s' "$failures"
printf 'guest: %d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ]
