#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What `make demo` shows: a machine boots and runs a command, another goes on from a snapshot of that
# boot; a machine that stays is kept as it is and forked. With what each stage took.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
build=${1:?build folder}
case $build in /*) ;; *) build=$top/$build ;; esac

if [ ! -w /dev/kvm ] && [ -z "${MAYFLY_IN_LAB:-}" ]; then
	echo "There is no /dev/kvm here that may be used: the demo runs in the lab, an emulated AMD machine. It is slow."
	exec "$top/tests/lab/lab" run --timeout 600 --env MAYFLY_IN_LAB=1 \
		--env MAYFLY_HOME=/tmp/mayfly-home --cwd "$top" -- "$top/tests/demo.sh" "$build"
fi
show() {
	printf '\n$ mayfly %s\n' "$*"
	"$build/mayfly" "$@"
}
# Its own home, so that it shows the same every time and leaves nothing.
MAYFLY_HOME=$(mktemp -d)
export MAYFLY_HOME
trap '"$build/mayfly" rm --force demo one two >/dev/null 2>&1 || :; rm -rf "$MAYFLY_HOME"' EXIT
show doctor
printf '\nThe first machine of its kind boots.\n'
show run --timings -- uname -a
printf '\nThe next one goes on from a snapshot of that boot.\n'
show run --timings -- sh -c 'echo "I am $(id -un) on $(hostname), with $(nproc) CPU and this much memory:"; free -m | head -n 2'
printf '\nA machine that stays, kept as it is at one moment, and two more that go on from there.\n'
show up demo
show exec demo -- sh -c 'echo "warmed up" >/tmp/state'
show snapshot --json demo ready
show fork --timings demo@ready one two
show exec one -- sh -c 'cat /tmp/state; hostname; cat /proc/sys/kernel/random/uuid'
show exec two -- sh -c 'cat /tmp/state; hostname; cat /proc/sys/kernel/random/uuid'
show exec demo -- rm /tmp/state
show restore --timings demo ready
show exec demo -- cat /tmp/state
show ps
