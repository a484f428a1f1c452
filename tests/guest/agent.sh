# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The agent in a real guest: every way for a command to end and to be left, trees of processes, users,
# terminals, files; and nothing remains of any of it.
. "$(dirname "$0")/lib.sh"

# A shell without job control starts its background jobs with SIGINT ignored, and what is ignored stays so.
set -m

vm=agent-test
cleanup() {
	"$MAYFLY" down $vm >/dev/null 2>&1
	"$MAYFLY" rm $vm >/dev/null 2>&1
}
trap cleanup EXIT
in_vm() { "$MAYFLY" exec $vm -- "$@"; }

# status_of NAME WANTED OPTIONS…: the exit status of mayfly exec; stderr in $errors.
status_of() {
	local name=$1 wanted=$2 status
	shift 2
	"$MAYFLY" exec "$@" >stdout.txt 2>stderr.txt </dev/null
	status=$?
	errors=$(cat stderr.txt)
	equal "$name" $status "$wanted"
}

"$MAYFLY" create $vm >/dev/null && "$MAYFLY" up $vm >/dev/null || {
	fail "a machine for the tests"
	finish
}

# A machine that was booted has the host's time too, whatever its KVM told it.
clock_is_right() { # within the half of a second that a clone has
	local before guest
	before=$(date +%s%N)
	guest=$(in_vm date +%s) || return 1
	[ $((guest + 1)) -gt $(((before - 500000000) / 1000000000)) ] &&
		[ "$guest" -le $((($(date +%s%N) + 500000000) / 1000000000)) ]
}
check "its clock is right" clock_is_right

# --- How commands end ------------------------------------------------------------------------

status_of "exit 3" 3 $vm -- sh -c 'exit 3'
status_of "kill -9" 137 $vm -- sh -c 'kill -9 $$'
status_of "a missing command" 127 $vm -- no-such-command
contains "is named" "$errors" "no-such-command: command not found"
status_of "a missing file" 127 $vm -- /no/such/file
status_of "a folder" 126 $vm -- /tmp
contains "is called one" "$errors" "Is a directory"
status_of "no permission to execute" 126 $vm -- /etc/passwd
contains "is called that" "$errors" "Permission denied"
status_of "a working directory that is not there" 125 -w /no/such $vm -- true
status_of "a user that is not there" 125 -u nosuchuser $vm -- true

# A child that holds the pipes: the command's end is the end, and its output is whole.
out=$(in_vm sh -c 'echo x; sleep 1000 & echo $!')
left=${out#x?}
equal "output before a background child" "${out%?"$left"}" x
check "which lives on" in_vm kill -0 "$left"
in_vm kill -9 "$left"
equal "64 KiB written at the last moment" \
	"$(in_vm sh -c 'sleep 1000 & echo $! >/tmp/left; head -c 65536 /dev/zero' | wc -c)" 65536
in_vm sh -c 'kill -9 $(cat /tmp/left)'

# --- Trees -----------------------------------------------------------------------------------

# A child, and one in a session of its own with a child: marked by how long they would sleep.
tree='sleep 7771 & setsid sh -c "sleep 7772 & sleep 7773" & echo ready; wait'
tree_gone() { ! in_vm sh -c 'ps | grep -v grep | grep -E "sleep 777[123]"'; }

"$MAYFLY" exec --timeout 2s $vm -- sh -c "$tree" >stdout.txt 2>stderr.txt
equal "a deadline" $? 124
eventually "kills the tree" tree_gone
mkfifo fifo
"$MAYFLY" exec $vm -- sh -c "$tree" >fifo 2>/dev/null &
client=$!
read -r word <fifo
equal "a client that will vanish" "$word" ready
kill -9 $client
wait $client 2>/dev/null
eventually "takes the tree along" tree_gone
"$MAYFLY" exec $vm -- sh -c 'trap "echo got; exit 9" TERM; echo ready; while :; do sleep 0.1; done' >fifo &
client=$!
{
	read -r word
	kill -TERM $client
	read -r got
} <fifo
wait $client
equal "a signal to the client" "$?" 9
equal "reaches the command" "$got" got

# --- Limits ----------------------------------------------------------------------------------

status_of "too much memory" 137 --max-memory 8M $vm -- sh -c 'x=$(head -c 30000000 /dev/zero | tr "\\0" x)'
contains "is said" "$errors" "more memory"
status_of "memory within the limit" 0 --max-memory 8M $vm -- sh -c 'x=$(head -c 1000000 /dev/zero | tr "\\0" x)'
status_of "too much CPU time" 137 --max-cpu-time 1s $vm -- sh -c 'while :; do :; done'
contains "is said, too" "$errors" "CPU time"
status_of "CPU time of children counts" 137 --max-cpu-time 1s $vm -- sh -c 'while :; do (i=0; while [ $i -lt 99 ]; do i=$((i + 1)); done); done'
"$MAYFLY" exec --max-processes 4 $vm -- sh -c '(for i in 1 2 3 4 5 6; do sleep 7771 & done; wait); exec sleep 7772' >stdout.txt 2>stderr.txt &
client=$!
eventually "a process too many is refused" grep -q "can't fork" stderr.txt
kill -9 $client
wait $client 2>/dev/null
eventually "and the rest goes" tree_gone
no_limit() { [ "$(in_vm sh -c 'cat /sys/fs/cgroup/exec-*/memory.max | sort -u')" = max ]; }
eventually "no limit stays behind" no_limit

# --- Users, terminals, stdin, files ----------------------------------------------------------

equal "a user" "$("$MAYFLY" exec -u nobody $vm -- sh -c 'id -u; id -g' | tr '\n' ' ')" "65534 65534 "
equal "a number and a group" "$("$MAYFLY" exec -u 7:tty $vm -- sh -c 'id -u; id -g' | tr '\n' ' ')" "7 5 "
equal "a terminal" "$("$MAYFLY" exec -t $vm -- sh -c 'tty; stty size' | tr -d '\r' | tr '\n' ' ')" \
	"/dev/pts/0 24 80 "
head -c 200000 /dev/urandom >in.bin
"$MAYFLY" exec -i $vm -- sh -c 'cat; cat >/dev/null' <in.bin >out.bin
check "stdin to stdout, byte for byte" cmp in.bin out.bin

mkdir -p tree/sub
cp in.bin tree/sub/
ln -s sub/in.bin tree/link
truncate -s 1M tree/hole
check "cp into the machine" "$MAYFLY" cp tree $vm:/root/
equal "has arrived" "$(in_vm sh -c 'md5sum </root/tree/link')" "$(md5sum <in.bin)"
check "cp out of it" "$MAYFLY" cp $vm:/root/tree back
check "is the same" diff -r tree back

# --- Changes, facts --------------------------------------------------------------------------

"$MAYFLY" watch --json $vm /root/tree >watched.txt &
watcher=$!
eventually "a watch" grep -q watching watched.txt
in_vm sh -c 'cd /root/tree; mkdir -p new/deep; echo x >new/deep/file; mv new/deep/file file; rm -r new'
eventually "a change of a folder that was not there" grep -q '"path":"/root/tree/new/deep"' watched.txt
eventually "a move" grep -q '"path":"/root/tree/file"' watched.txt
eventually "a removal" grep -q '"deleted","path":"/root/tree/new"' watched.txt
kill -INT $watcher
wait $watcher
equal "interrupted" $? 0
eventually "the watch ends in the machine too" in_vm sh -c '! ps | grep "mayfly-[f]iles watch"'
"$MAYFLY" watch --count 1 $vm /root/tree/file >watched.txt &
watcher=$!
eventually "a watch of a file" grep -q watching watched.txt
in_vm sh -c 'echo y >>/root/tree/file'
wait $watcher
equal "ends after one change" $? 0
equal "which was" "$(tail -n 1 watched.txt)" "modified   /root/tree/file"
"$MAYFLY" watch $vm /no/such 2>stderr.txt
equal "a watch of nothing" $? 125
contains "is explained" "$(cat stderr.txt)" "No such file"

in_vm sh -c 'echo marked-$((40 + 2)) >/dev/kmsg'
"$MAYFLY" exec -d --job top-job $vm -- sleep 7774 >name.txt
"$MAYFLY" top --json $vm >top.json
# fact EXPRESSION: of the machine's facts, which are called j.
fact() { python3 -c 'import json, sys; j = json.load(open("top.json")); print(eval(sys.argv[1]))' "$1"; }
equal "facts: memory, load, disk" "$(fact '0 < j["memory_available_bytes"] < j["memory_total_bytes"] and j["load_1m_milli"] >= 0 and 0 < j["disk_available_bytes"] <= j["disk_total_bytes"]')" True
# It has had next to no CPU time, so that it may stand behind all of the kernel's threads.
listed() { "$MAYFLY" top -p 128 --json $vm >top.json; [ "$(fact '[p["uid"] for p in j["process_list"] if p["name"] == "sleep" and p["resident_bytes"] > 0]')" = "[0]" ]; }
eventually "processes" listed
equal "the init" "$(fact 'j["init"]')" init
equal "services" "$(fact '[s["state"] for s in j["services"] if s["name"] == "top-job"]')" "['active']"
equal "the log's end" "$(fact 'any("marked-42" in l for l in j["log"])')" True
contains "for a person" "$("$MAYFLY" top $vm)" "PARENT"
"$MAYFLY" jobs --kill $vm top-job

# --- Ports -----------------------------------------------------------------------------------

# A port of this host that is free now.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
listens() { python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1)' "$1"; }

fetch() {
	python3 -c 'import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=100).read())' "$1"
}

in_vm busybox httpd -p 127.0.0.1:8080 -h /root/tree/sub
eventually "what listens in the machine" sh -c "\"$MAYFLY\" port $vm | grep '8080   loopback'"
port=$(free_port) other=$(free_port)
mkdir served && cp in.bin served/file
(cd served && exec python3 -m http.server --bind 127.0.0.1 "$other" >/dev/null 2>&1) &
server=$!
"$MAYFLY" port -R 9000:127.0.0.1:"$other" $vm "$port:8080" 2>port.txt &
forwarder=$!
eventually "the port is there" grep -q "machine's port 8080" port.txt
fetch "http://127.0.0.1:$port/in.bin" >fetched.bin
check "through a port of the machine" cmp in.bin fetched.bin
eventually "the server is there" listens "$other"
equal "through a port of this host" \
	"$(in_vm sh -c 'wget -q -O - http://127.0.0.1:9000/file | md5sum')" "$(md5sum <in.bin)"
kill -INT $forwarder
wait $forwarder
equal "interrupted" $? 0
kill $server
wait $server 2>/dev/null
eventually "the machine listens no more" in_vm sh -c '! nc 127.0.0.1 9000 </dev/null'

# --- What is left of all that (of many commands: many.sh) --------------------------------------

equal "no zombie" "$(in_vm sh -c 'cat /proc/[0-9]*/stat 2>/dev/null | grep -c ") Z "')" 0
equal "cgroups are used again" "$(in_vm sh -c '[ $(ls -d /sys/fs/cgroup/exec-* | wc -l) -le 16 ] && echo few')" few

cleanup
check "nothing left" nothing_left
finish
