#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tests on real guests: run-guest.sh [--lab] BUILD [NAME…]
# Natively on /dev/kvm; with --lab, or where there is no /dev/kvm, in the emulated AMD host.
# Each tests/guest/NAME.sh prints "ok", "FAIL" or "skip" lines; a script that prints none has failed.
# Two run at a time where there are two CPUs, each pair of hands with a MAYFLY_HOME of its own.
set -u
top=$(cd "$(dirname "$0")/.." && pwd)

# On one machine two tests run at a time, whoever asked for them, else they starve each other.
take_slot() {
	exec 8>/run/lock/mayfly-guest-tests.1 9>/run/lock/mayfly-guest-tests.2
	flock -n 8 || flock -n 9 || flock $((8 + RANDOM % 2))
}

# What a test that was ended has left running would go on for ever.
end_machines() {
	[ -d "$MAYFLY_HOME/vms" ] || return 0
	"$MAYFLY" ps --json | python3 -c '
import json, sys
for m in json.load(sys.stdin):
    if m["state"] == "running": print(m["pid"])' | xargs -r kill
	rm -rf "$MAYFLY_HOME/vms"
}

# One test, as xargs calls us: HANDS is who runs it. Its lines go to $work/out/NAME, its counts to $work/counts.
if [ "${1:-}" = --one ]; then
	name=$2
	export MAYFLY_HOME=$work/home.$HANDS
	take_slot
	mkdir -p "$work/$name"
	start=$(date +%s)
	(cd "$work/$name" && timeout -k 10 1200 bash "$top/tests/guest/$name.sh") >"$work/out/$name" 2>&1 8>&- 9>&-
	rc=$?
	p=$(grep -c '^ok ' "$work/out/$name") f=$(grep -c '^FAIL ' "$work/out/$name")
	s=$(grep -c '^skip ' "$work/out/$name")
	if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
	if [ "$((p + f + s))" -eq 0 ]; then f=1; fi
	exec 7>>"$work/counts"
	flock 7 # what is told of one test stays together
	echo "$name $p $f $s $rc" >&7
	echo "== $name: exit $rc, $p ok, $f failed, $s skipped, $(($(date +%s) - start)) s"
	if [ "$f" -gt 0 ]; then
		cat "$work/out/$name"
		end_machines
	else
		grep -E '^(ok|skip) ' "$work/out/$name"
	fi
	exit 0
fi

lab=
[ "${1:-}" = --lab ] && lab=1 && shift
build=${1:?build folder}
shift
case $build in /*) ;; *) build=$top/$build ;; esac
mkdir -p /run/lock

if [ -z "$lab" ] && [ ! -w /dev/kvm ]; then
	echo "no /dev/kvm here that may be used: running the guest tests in the lab (emulated, slow)"
	lab=1
fi
if [ -n "$lab" ]; then
	take_slot
	exec "$top/tests/lab/lab" run --timeout 3000 --memory 3072 --env MAYFLY_HOME=/tmp/mayfly-home \
		--cwd "$top" -- "$top/tests/run-guest.sh" "$build" "$@"
fi

export MAYFLY=$build/mayfly
export TEST_BUILD=$build
work=$(mktemp -d)
export work
end_all() {
	for MAYFLY_HOME in "$work"/home.*; do
		export MAYFLY_HOME
		end_machines
	done
	rm -rf "$work"
}
trap end_all EXIT
mkdir "$work/out"
if [ $# -eq 0 ]; then
	for test in "$top"/tests/guest/*.sh; do
		test=${test##*/}
		[ "$test" = lib.sh ] || set -- "$@" "${test%.sh}"
	done
fi
printf '%s\n' "$@" | xargs -n 1 -P $(($(nproc) > 1 ? 2 : 1)) --process-slot-var=HANDS "$0" --one
# Last, where it is seen.
awk '$3 { print $1, $5 }' "$work/counts" | while read -r name rc; do
	echo "$name: exit $rc: $(grep '^FAIL ' "$work/out/$name")"
done
awk -v wanted=$# '{ p += $2; f += $3; s += $4 }
	END {
		if (NR != wanted) { print wanted - NR " tests did not end"; f++ }
		printf "guest: %d passed, %d failed, %d skipped\n", p, f, s
		exit f > 0
	}' "$work/counts"
