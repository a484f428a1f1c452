# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The agent as a service: busybox is init here, mounts, starts the agent and starts it again.
. "$(dirname "$0")/lib.sh"

vm=service-test
cleanup() {
	"$MAYFLY" down $vm >/dev/null 2>&1
	"$MAYFLY" rm $vm >/dev/null 2>&1
}
trap cleanup EXIT
in_vm() { "$MAYFLY" exec $vm -- "$@"; }

# The default image, and over it an init with its table.
mkdir -p root/etc root/bin
ln -s busybox root/bin/init
cat >root/etc/inittab <<'END'
::sysinit:/bin/mount -t proc proc /proc
::sysinit:/bin/mount -t devtmpfs dev /dev
::sysinit:/bin/mkdir -p /dev/pts /dev/shm
::sysinit:/bin/mount -t devpts -o mode=620,gid=5,ptmxmode=666 devpts /dev/pts
::sysinit:/bin/mount -t sysfs sysfs /sys
::sysinit:/bin/mount -t cgroup2 cgroup2 /sys/fs/cgroup
::sysinit:/bin/ifconfig lo up
::respawn:/init
END
(cd root && find . | cpio -o -H newc --quiet) >over.cpio
cat "$TEST_BUILD/initramfs.cpio" over.cpio >service.cpio
"$MAYFLY" create --initramfs service.cpio --append rdinit=/bin/init $vm >/dev/null &&
	"$MAYFLY" up $vm >/dev/null || {
	fail "a machine with another init"
	"$MAYFLY" logs $vm
	finish
}

agent=$(in_vm pidof init | tr ' ' '\n' | grep -vx 1)
equal "process 1 is another" "$(in_vm readlink /proc/1/exe)" /bin/busybox
check "and the agent runs" [ "${agent:-1}" -gt 1 ]
in_vm sh -c 'exit 3'
equal "exit 3" $? 3
equal "stdin, and stdout" "$(echo through | "$MAYFLY" exec -i $vm -- cat)" through
contains "a terminal" "$("$MAYFLY" exec -t $vm -- tty)" /dev/pts/
equal "its place in the cgroups" "$(in_vm sed 's/.*:://' "/proc/$agent/cgroup")" "/mayfly-$agent/agent"
contains "and that of a command" "$(in_vm cat /proc/self/cgroup)" "/mayfly-$agent/exec-"
tree='sleep 7771 & setsid sh -c "sleep 7772 & sleep 7773" & echo ready; wait'
tree_gone() { ! in_vm sh -c 'ps | grep -v grep | grep -E "sleep 777[123]"'; }
"$MAYFLY" exec --timeout 2s $vm -- sh -c "$tree" >stdout.txt 2>stderr.txt
equal "a deadline" $? 124
eventually "kills the tree" tree_gone
"$MAYFLY" exec --max-processes 2 $vm -- sh -c '(sleep 0 & sleep 0 & sleep 0 & wait); :' 2>stderr.txt
contains "limits work" "$(cat stderr.txt)" "can't fork"
equal "a job" "$("$MAYFLY" exec -d --job kept $vm -- sh -c 'echo out; exit 4')" kept
"$MAYFLY" jobs --wait $vm kept
equal "its status" $? 4
in_vm kill -9 "$agent"
again() { [ "$(in_vm pidof init | tr ' ' '\n' | grep -vx 1)" != "$agent" ] && in_vm true; }
eventually "its init starts it again" again
"$MAYFLY" down $vm
equal "down, through its init" $? 0
check "which has seen to it" grep -q "going down" "$MAYFLY_HOME/vms/$vm/console.log"
"$MAYFLY" rm $vm
trap - EXIT
check "nothing left" nothing_left
finish
