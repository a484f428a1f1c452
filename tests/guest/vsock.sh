# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Streams between host and guest: every byte arrives, a thousand connections at once, and nobody
# waits for one who does not read. FULL=1: a GiB each way, and a thousand connections natively too.
. "$(dirname "$0")/lib.sh"

# An interpreted kernel moves a few hundred KB a second, and takes 0.1 s for a connection.
if [ -n "${MAYFLY_LAB:-}" ]; then bytes=32000000 many=1000; else bytes=1000000 many=50; fi
[ -z "${FULL:-}" ] || bytes=$((1 << 30)) many=1000

stream=$TEST_BUILD/tests/guest/stream
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev 2>stderr.txt
equal "up" $? 0
"$MAYFLY" cp "$stream" dev:/tmp/stream
"$MAYFLY" exec --detach --job server dev -- /tmp/stream serve vsock:4294967295:5000 >/dev/null
equal "the guest's server starts" $? 0
listens() { "$MAYFLY" logs dev server | grep -q ready; }
check "and listens" until_true listens
run=$MAYFLY_HOME/vms/dev/run
into=unix:$run/vsock.sock:5000

count_fds() { ls "/proc/$(monitor_pid dev)/fd" | wc -l; }
fds=$(count_fds)
seconds() { echo "$(($(date +%s) - started)) s for $1"; }
started=$(date +%s)
check "$bytes bytes out of the guest" "$stream" get "$into" $bytes
check "$bytes bytes into it" "$stream" put "$into" $bytes
seconds "both"
started=$(date +%s)
check "$many connections at once, 1000 bytes over each" "$stream" many "$into" $many 1000
seconds "$many connections"
# Each held one fills every buffer on its way, and stays so until the others are through.
check "readers that do not read hold up nobody" "$stream" beside "$into" 3 $((bytes / 20))

# The guest's own connections, to a socket beside its own.
"$stream" serve "unix:$run/vsock.sock_5000" >ready.txt 2>&1 &
server=$!
serves() { grep -q ready ready.txt; }
check "the host listens" until_true serves
check "the guest connects, and gets" "$MAYFLY" exec dev -- /tmp/stream get vsock:2:5000 $((bytes / 4))
check "and puts" "$MAYFLY" exec dev -- /tmp/stream put vsock:2:5000 $((bytes / 4))
"$MAYFLY" exec dev -- /tmp/stream get vsock:2:5001 10 2>stderr.txt
equal "where nobody listens it is refused" $? 1
kill $server
wait $server 2>/dev/null
as_before() { [ "$(count_fds)" -le "$fds" ]; }
check "the monitor has closed what it opened" until_true as_before
"$MAYFLY" rm --force dev
check "nothing left" nothing_left
finish
