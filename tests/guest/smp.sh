# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Several vCPUs: all come up, all run programs.
. "$(dirname "$0")/lib.sh"

host=$("$MAYFLY" doctor --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["host"])')
if [ "$host" != hardware ]; then
	skip "smp: on emulated ring 0 a guest with two vCPUs has been seen to stop while booting"
	finish
fi
run_guest --cpus 4 -- sh -c 'nproc; for i in 0 1 2 3; do taskset -p $((1 << i)) $$ >/dev/null && cut -d" " -f39 /proc/self/stat; done'
equal "4 vCPUs: status" "$status" 0
contains "4 vCPUs: all there" "$out" "4"
equal "4 vCPUs: a program runs on each" "$(printf '%s\n' "$out" | tail -n 4 | sort -u | wc -l)" 4
check "nothing left" nothing_left
finish
