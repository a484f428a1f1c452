# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Every way into and out of a system call; and that a jump to the kernel's entry from user mode is
# one where ring 0 is emulated (the guest's command line says so), and a fault elsewhere.
. "$(dirname "$0")/lib.sh"

entry=$(awk '$3 == "entry_SYSCALL_64" { print $1 }' "$TEST_BUILD/System.map")
out=$("$MAYFLY" run --timeout "$GUEST_TIMEOUT" -i -- sh -c '
	cat >/tmp/syscalls && chmod +x /tmp/syscalls || exit 99
	mode=native
	grep -q emulated_ring0 /proc/cmdline && mode=emulated
	echo "mode: $mode"
	exec /tmp/syscalls "$1" $mode' sh "$entry" <"$TEST_BUILD/tests/guest/syscalls")
status=$?
echo "$out"
equal "syscalls: status" "$status" 0
contains "syscalls: the last check was made" "$out" "int 0x80 ends the process"
check "nothing left" nothing_left
finish
