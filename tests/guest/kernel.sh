# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What every machine's kernel has to have, asked from inside.
. "$(dirname "$0")/lib.sh"

run_guest -- sh -c '
	cat /sys/devices/system/clocksource/clocksource0/current_clocksource
	mkdir -p /tmp/cg && mount -t cgroup2 none /tmp/cg && cat /tmp/cg/cgroup.controllers
	cut -f2 /proc/filesystems | tr "\n" " "
	echo
	ls /proc/self/ns | tr "\n" " "'
equal "kernel: status" "$status" 0
{
	read -r clock
	read -r controllers
	read -r filesystems
	read -r namespaces
} <<<"$out"
# Continuous over a snapshot, which the TSC is not.
equal "kernel: clock source" "$clock" kvm-clock
for name in cpu io memory pids; do contains "kernel: controller $name" " $controllers " " $name "; done
for name in ext4 erofs overlay tmpfs devtmpfs devpts proc sysfs fuse; do
	contains "kernel: file system $name" " $filesystems " " $name "
done
for name in cgroup ipc mnt net pid time user uts; do
	contains "kernel: namespace $name" " $namespaces " " $name "
done
check "nothing left" nothing_left
finish
