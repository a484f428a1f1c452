# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The jail of a monitor: what the kernel says is in force, while a machine does all that machines
# do; and that each row of the table of system calls is needed for that.
. "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

says() { "$MAYFLY" doctor --vm "$1" --json | python3 -c '
import json, sys
for c in json.load(sys.stdin)["checks"]:
    print(c["verdict"], c["name"] + ":", c["says"])'; }

equal "--calls: a reason for each" "$("$MAYFLY" doctor --calls | grep -c .)" \
	"$("$MAYFLY" doctor --calls --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))')"
"$MAYFLY" doctor --vm nobody 2>stderr.txt
equal "--vm of no machine" $? 125
contains "--vm of no machine: message" "$(cat stderr.txt)" nobody

# A machine with a disk of its own layer and, for root, a network card, traced.
tap=
if ip tuntap add mode tap "mayfly$$" 2>/dev/null && ip link set "mayfly$$" up; then
	tap=mayfly$$
	trap 'ip link del "$tap"' EXIT
fi
truncate -s 1M disk.img
"$MAYFLY" create --memory 96M --disk "$PWD/disk.img" ${tap:+--net "tap:$tap"} dev 2>stderr.txt
equal "create" $? 0
mkdir traces
strace -qq -ff -e raw=all -o traces/boot "$MAYFLY" up --timeout "$GUEST_TIMEOUT" dev 2>up.txt &
strace=$!
until "$MAYFLY" exec dev -- true 2>exec.txt || ! kill -0 $strace 2>/dev/null; do sleep 0.2; done
equal "a traced machine answers" "$("$MAYFLY" exec dev -- echo yes)" yes
says dev >says.txt
"$MAYFLY" doctor --vm dev >doctor.txt
equal "doctor --vm: status" $? 0
contains "doctor --vm: verdict" "$(tail -n 1 doctor.txt)" confined
contains "no capabilities" "$(cat says.txt)" "ok capabilities: none"
contains "no new privileges" "$(cat says.txt)" "ok new privileges: never"
contains "every thread's calls are filtered" "$(cat says.txt)" "ok system calls: filtered, in each thread: mayfly-vmm vcpu0"
contains "no folder is open" "$(cat says.txt)" "no folder but its own"
contains "core dumps" "$(cat says.txt)" "core dumps 0 bytes"
if "$MAYFLY" doctor | grep -q '^ok *jail'; then
	contains "namespaces" "$(cat says.txt)" "its own: user mnt net ipc uts cgroup; the host's: pid"
	contains "a root of its own" "$(cat says.txt)" "ok root: the machine's own folder; 2 mounts, writable: /"
else
	skip "namespaces, root: $("$MAYFLY" doctor | grep jail)"
fi

# What machines do.
pid=$(head -n 1 "$MAYFLY_HOME/vms/dev/run/lock")
head -c 300000 /dev/urandom >data
"$MAYFLY" cp data dev:/tmp/data 2>>stderr.txt && "$MAYFLY" cp dev:/tmp/data back 2>>stderr.txt
check "data goes in and out" cmp data back
"$MAYFLY" exec dev -- sh -c 'cat /dev/vda >/dev/null; echo layer >/dev/vda; sync; head -c 64 /dev/hwrng >/dev/null; echo words >/dev/console'
if [ -n "$tap" ]; then
	"$MAYFLY" exec dev -- sh -c 'ip link set eth0 up; ip addr add 10.9.8.2/24 dev eth0; ping -c 1 -w 1 10.9.8.1; true' >/dev/null 2>&1
fi
"$MAYFLY" snapshot --json dev one >/dev/null 2>stderr.txt
equal "snapshot" $? 0
"$MAYFLY" exec dev -- sh -c 'echo another >/dev/vda; sync'
"$MAYFLY" snapshot --diff --compress --json dev two >/dev/null 2>stderr.txt
equal "diff" $? 0
"$MAYFLY" stats dev >/dev/null
# Asked until it is in the kernel, whose symbols are looked up.
where() {
	kill -USR1 "$pid"
	grep -q 'is at 0x.* in kernel mode' "$MAYFLY_HOME/vms/dev/monitor.log"
}
eventually "where it is" where
# A request that is too long: its sender is cut off.
python3 -c 'import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try:
    s.sendall(b"x" * 200000)
    s.recv(1)
except OSError:
    pass' "$MAYFLY_HOME/vms/dev/run/control.sock"
"$MAYFLY" down dev 2>stderr.txt
equal "down" $? 0
wait $strace
strace -qq -ff -e raw=all -o traces/restore "$MAYFLY" restore dev two 2>up.txt & # compressed: memory is read when it is wanted
strace=$!
until "$MAYFLY" exec dev -- true 2>exec.txt || ! kill -0 $strace 2>/dev/null; do sleep 0.2; done
equal "a restored machine answers" "$("$MAYFLY" exec dev -- echo yes)" yes
"$MAYFLY" snapshot --diff --json dev three >/dev/null 2>stderr.txt
equal "diff of a restored machine" $? 0
"$MAYFLY" down dev 2>stderr.txt
wait $strace
equal "no word of a violation" "$(grep -c jail "$MAYFLY_HOME/vms/dev/monitor.log")" 0

"$MAYFLY" doctor --calls --json >table.json
host=$("$MAYFLY" doctor --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["host"])')
[ "$host" = hardware ] && hardware=--hardware
if [ -n "$tap" ]; then
	check "no row of the table is for nothing" python3 "$here/jail_calls.py" \
		${hardware:+"$hardware"} table.json traces/*
else
	skip "no row of the table is for nothing: no tap for this user"
fi
"$MAYFLY" rm dev

# Who has less: the machine runs, and doctor says what is missing. With a guest that ends at once.
if [ -x "$TEST_BUILD/tests/escape/hostile" ]; then
	mkdir -m 711 less
	mkdir -m 700 less/m less/home
	cp "$MAYFLY" "$TEST_BUILD/tests/escape/hostile" less/
	printf '[machine]\nkernel = %s\ninitramfs =\nmemory = 64M\nappend = rounds=0\n' "$PWD/less/hostile" >less/m/vm.ini
	# short WHO COMMAND…: how a monitor that COMMAND starts ends, and what doctor says of its jail.
	short() {
		local who=$1
		shift
		MAYFLY_HOME=$PWD/less/home "$@" "$PWD/less/mayfly" vmm --status-fd 1 "$PWD/less/m" >ended.txt 2>stderr.txt
		contains "$who: runs" "$(cat ended.txt stderr.txt)" '"reason":"reset"'
		jail=$(MAYFLY_HOME=$PWD/less/home "$@" "$PWD/less/mayfly" doctor 2>&1 | grep '^[a-z]* *jail ')
		rm -rf less/m/run less/m/console.log*
	}
	short "as before"
	whole=$jail
	if unshare -Ur sh -c 'echo 0 >/proc/sys/user/max_user_namespaces' 2>/dev/null; then
		short "no user namespaces" unshare -Ur sh -c 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"' sh
		contains "no user namespaces: told" "$jail" "without: user namespaces"
		short "no namespaces at all" unshare -Ur sh -c 'echo 0 >/proc/sys/user/max_user_namespaces
			exec setpriv --bounding-set=-all --inh-caps=-all "$@"' sh
		contains "no namespaces at all: told" "$jail" "without: user namespaces, the other namespaces, a root of its own"
	else
		skip "hosts without user namespaces: there are none to take away here"
	fi
	# An ordinary user in the group of /dev/kvm.
	if [ "$(id -u)" = 0 ] && mknod less/kvm c 10 232 && chown 0:54322 less/kvm && chmod 660 less/kvm; then
		user=$(mktemp -d /tmp/mayfly-user-XXXXXX)
		chmod 711 "$user"
		cp -a less/. "$user/"
		chown -R 54321:54321 "$user/m" "$user/home"
		sed -i "s|^kernel = .*|kernel = $user/hostile|" "$user/m/vm.ini"
		as_user() {
			unshare -m sh -c 'mount --bind "$0/kvm" /dev/kvm && exec setpriv --reuid 54321 --regid 54321 \
				--groups 54322 --inh-caps=-all --bounding-set=-all env MAYFLY_HOME="$0/home" "$@"' "$user" "$@"
		}
		as_user "$user/mayfly" vmm --status-fd 1 "$user/m" >ended.txt 2>stderr.txt
		contains "an ordinary user: runs" "$(cat ended.txt stderr.txt)" '"reason":"reset"'
		equal "an ordinary user: the same jail as root" "$(as_user "$user/mayfly" doctor | grep '^[a-z]* *jail ')" "$whole"
		rm -r "$user"
	else
		skip "an ordinary user: only root can be another"
	fi
	rm -r less
fi
check "nothing left" nothing_left
finish
