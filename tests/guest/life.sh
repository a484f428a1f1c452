# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Machines that stay: create, up, ps, down, rm, and the truth about them.
. "$(dirname "$0")/lib.sh"

# state NAME: what ps says of it.
state() {
	"$MAYFLY" ps --json | python3 -c '
import json, sys
print(next((m["state"] for m in json.load(sys.stdin) if m["name"] == sys.argv[1]), "none"))' "$1"
}
words() { cat stderr.txt; }

equal "ps of nothing" "$("$MAYFLY" ps --json)" "[]"
"$MAYFLY" create --memory 64M dev 2>stderr.txt
equal "create" $? 0
equal "created: stopped" "$(state dev)" stopped
"$MAYFLY" create dev 2>stderr.txt
equal "create again: refused" $? 125
contains "create again: message" "$(words)" "already"
for name in "" . .. a/b -x 'a b' "$(printf 'x%.0s' $(seq 70))" run-abc ../etc; do
	"$MAYFLY" create -- "$name" 2>stderr.txt
	equal "bad name '$name'" $? 2
done
for verb in down rm up; do
	[ $verb = up ] || {
		"$MAYFLY" $verb nope 2>stderr.txt
		equal "$verb of no machine" $? 125
		contains "$verb of no machine: message" "$(words)" "nope"
	}
done
sed -i 's/^cpus = .*/cpus = many/' "$MAYFLY_HOME/vms/dev/vm.ini"
line=$(grep -n '^cpus' "$MAYFLY_HOME/vms/dev/vm.ini" | cut -d: -f1)
"$MAYFLY" up dev 2>stderr.txt
equal "up with a bad vm.ini" $? 125
contains "up with a bad vm.ini: names the line" "$(words)" "vm.ini:$line: cpus"
contains "ps shows a bad vm.ini" "$("$MAYFLY" ps)" "vm.ini:$line"
sed -i 's/^cpus = .*/cpus = 1/' "$MAYFLY_HOME/vms/dev/vm.ini"

# Two at once: one machine.
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev 2>up1.txt &
first=$!
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev 2>up2.txt
equal "up, twice at once: second" $? 0
wait $first
equal "up, twice at once: first" $? 0
equal "up: running" "$(state dev)" running
equal "up: one monitor" "$(pgrep -fc "mayfly vmm .*$MAYFLY_HOME/vms/dev")" 1
"$MAYFLY" up dev
equal "up of a running machine" $? 0
equal "exec: output" "$("$MAYFLY" exec dev -- sh -c 'echo one; exit 7'; echo $?)" "one
7"
"$MAYFLY" exec -i dev -- cat <"$0" >copy
check "exec -i: byte for byte" cmp "$0" copy
equal "exec: state stays between commands" \
	"$("$MAYFLY" exec dev -- sh -c 'echo kept >/tmp/state'; "$MAYFLY" exec dev -- cat /tmp/state)" kept
for i in 1 2 3 4 5 6 7 8 9 10; do
	"$MAYFLY" exec dev -- sh -c "echo $i; exit $i" >"exec.$i" &
	pids[i]=$!
done
sum=0
for i in 1 2 3 4 5 6 7 8 9 10; do
	wait "${pids[i]}"
	[ $? -eq "$i" ] && [ "$(cat "exec.$i")" = "$i" ] && sum=$((sum + 1))
done
equal "ten execs at once" $sum 10
"$MAYFLY" exec --timeout 1s dev -- sleep 1000 2>stderr.txt
equal "exec --timeout" $? 124
# It returns when the command ends, whoever still holds its output.
equal "exec with a child left behind" "$("$MAYFLY" exec dev -- sh -c 'echo x; sleep 1000 & exit 0')" x
"$MAYFLY" exec dev 2>stderr.txt
equal "exec without a command" $? 2
"$MAYFLY" up --memory 1G dev 2>stderr.txt
equal "up with options of an existing machine" $? 2
"$MAYFLY" rm dev 2>stderr.txt
equal "rm of a running machine: refused" $? 125
contains "rm of a running machine: message" "$(words)" "running"
"$MAYFLY" rename dev other 2>stderr.txt
equal "rename of a running machine: refused" $? 125
"$MAYFLY" wait --timeout 1s dev 2>stderr.txt
equal "wait: it is running still" $? 124
EDITOR='sed -i s/^cpus.*/cpus=x/' "$MAYFLY" edit dev 2>stderr.txt
equal "edit: nonsense is refused" $? 125
contains "edit: the line, and nothing is lost" "$(words)" ":$line: cpus: 'x' is not a number"
EDITOR='sed -i s/^cpus.*/cpus=1/' "$MAYFLY" edit dev 2>stderr.txt
equal "edit" "$? $(grep cpus "$MAYFLY_HOME/vms/dev/vm.ini")" "0 cpus=1"
contains "edit: when it is in force" "$(words)" "mayfly restart dev"
"$MAYFLY" wait dev &
waiter=$!
"$MAYFLY" down dev 2>stderr.txt
equal "down" $? 0
wait $waiter
equal "wait: until it has ended" $? 0
equal "down: stopped" "$(state dev)" stopped
"$MAYFLY" down dev
equal "down again" $? 0
"$MAYFLY" exec dev -- true 2>stderr.txt
equal "exec on a machine that is down" $? 125
contains "exec on a machine that is down: cure" "$(words)" "mayfly up dev"
contains "the guest shut down by itself" "$(tail -c 2000 "$MAYFLY_HOME/vms/dev/console.log")" "reboot: "

"$MAYFLY" create --memory 64M third
"$MAYFLY" rename dev third 2>stderr.txt
equal "rename to a name that there is: refused" $? 125
"$MAYFLY" rm third
"$MAYFLY" rename dev other && equal "rename" "$(state dev) $(state other)" "none stopped"
"$MAYFLY" rename other dev

# kill -9 of the monitor: ps tells the truth at once, and up works again.
"$MAYFLY" restart --timeout "$GUEST_TIMEOUT" dev 2>stderr.txt
kill -9 "$("$MAYFLY" ps --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["pid"])')"
"$MAYFLY" exec dev -- true 2>stderr.txt
equal "exec right after it" $? 125
until ! pgrep -f "mayfly vmm .*$MAYFLY_HOME/vms/dev" >/dev/null; do sleep 0.05; done
equal "kill -9 of the monitor: stopped" "$(state dev)" stopped
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev 2>stderr.txt
equal "up after it" $? 0
"$MAYFLY" rm --force dev
equal "rm --force of a running machine" $? 0
equal "rm: gone" "$(state dev)" none
check "nothing left" nothing_left

# Many in a row, with FULL=1: nothing stays on the host.
there_is() {
	find "$MAYFLY_HOME" /run/netns /dev/shm -maxdepth 1 2>/dev/null | sort
	cat /proc/mounts
	find /sys/fs/cgroup -type d ! -path '*/mayfly' 2>/dev/null | sort
	ls /sys/class/net
	readlink /proc/[0-9]*/ns/* 2>/dev/null | sort -u
	pgrep -ax mayfly.*
}
cycle() {
	"$MAYFLY" create --memory 64M "$@" cycle && "$MAYFLY" up --timeout "$GUEST_TIMEOUT" cycle &&
		"$MAYFLY" exec cycle -- true && "$MAYFLY" rm --force cycle
}
if [ -z "${FULL:-}" ]; then
	skip "two hundred machines in a row: FULL=1 does it"
	finish
fi
limit=
[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] && limit="--limit cpus=1"
cycle $limit
there_is >before.txt
for i in $(seq 200); do
	cycle $limit 2>stderr.txt || break
done
equal "two hundred machines in a row" "$i $(words)" "200 "
there_is >after.txt
check "leave nothing on the host" diff before.txt after.txt
"$MAYFLY" up --timeout "$GUEST_TIMEOUT" --memory 64M cycle && "$MAYFLY" exec cycle -- touch /tmp/mark
"$MAYFLY" restart --timeout "$GUEST_TIMEOUT" cycle
equal "restart of a running machine" $? 0
"$MAYFLY" exec cycle -- test -e /tmp/mark
equal "which is another one then" $? 1
"$MAYFLY" rm --force cycle
finish
