# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# mayfly run: what goes in and comes out, how a command's end is reported, that nothing stays behind.
. "$(dirname "$0")/lib.sh"

run_guest -- uname -a
equal "uname: exit status" "$status" 0
contains "uname: output" "$out" "Linux "
equal "uname: nothing on stderr" "$errors" ""
check "uname: nothing left" nothing_left

# One boot for many: a shell in the guest does the rest.
run_guest -e GREETING='hello, world' -w /tmp -- sh -c '
	echo to-stdout; echo to-stderr >&2
	echo "env=$GREETING"; echo "cwd=$(pwd)"; echo "pid1=$(cat /proc/1/comm)"
	printf "proc:%s dev:%s tmp:%s\n" "$(ls -d /proc/1)" "$(ls /dev/null)" "$(stat -c %a /tmp)"
	exit 3'
equal "exit 3 is reported" "$status" 3
contains "stdout" "$out" "to-stdout"
contains "environment" "$out" "env=hello, world"
contains "working directory" "$out" "cwd=/tmp"
contains "mounts" "$out" "proc:/proc/1 dev:/dev/null tmp:1777"
equal "stderr apart" "$errors" "to-stderr"

# Binary data through stdin and stdout, whole.
head -c 300000 /dev/urandom >in.bin
"$MAYFLY" run --timeout "$GUEST_TIMEOUT" -i -- cat <in.bin >out.bin
equal "cat: exit status" "$?" 0
check "stdin to stdout, byte for byte" cmp in.bin out.bin

run_guest -- sh -c 'kill -9 $$'
equal "death by a signal is 128+n" "$status" 137

run_guest -- /no/such/thing
equal "a missing command is 127" "$status" 127
contains "a missing command is named" "$errors" "/no/such/thing"

# The guest ends itself: no hang, a clear word.
run_guest -- reboot -f
equal "reset by the guest" "$status" 125
contains "reset is explained" "$errors" "guest"

for how in "poweroff -f" "halt -f"; do
	# shellcheck disable=SC2086
	run_guest -- $how
	equal "$how ends the machine" "$status" 125
	contains "$how is explained" "$errors" "guest"
done

run_guest --append "rdinit=/bin/false" -- true
equal "a kernel panic ends the run" "$status" 125
contains "a panic is explained" "$errors" "before it was ready"

check "bench" test "$("$MAYFLY" bench --rounds 1 --json | python3 -c '
import json, sys
told = json.load(sys.stdin)
print(all(len(told[kind]) == 1 and told[kind][0]["total_us"] > 0 for kind in ("cold", "warm")))')" = True

check "nothing left" nothing_left
finish
