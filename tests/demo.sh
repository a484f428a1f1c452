#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What `make demo` shows: a machine boots, runs a command and goes, with what each stage took.
# Snapshots and restores join it when they exist.
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
show doctor
show run --timings -- uname -a
show run --timings -- sh -c 'echo "I am $(id -un) on $(hostname), with $(nproc) CPU and this much memory:"; free -m | head -n 2'
