# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Disks in a real guest: what it writes is on the host, whole, and what it must not write stays.
. "$(dirname "$0")/lib.sh"

# --- A raw image of ext4, and a read-only one of erofs -----------------------------------------

mkdir tree
head -c 100000 /dev/urandom >tree/data
mkfs.erofs base.erofs tree >/dev/null || fail "mkfs.erofs"
base_sum=$(sha256sum <base.erofs)
truncate -s 64M raw.img
mke2fs -q -F -t ext4 raw.img || fail "mke2fs"
run_guest --disk raw.img --disk base.erofs,mode=ro -- sh -ec '
	mkdir -p /mnt/raw /mnt/ro
	mount -t ext4 /dev/vda /mnt/raw
	mount -t erofs -o ro /dev/vdb /mnt/ro
	cp /mnt/ro/data /mnt/raw/copy
	seq 30000 >/mnt/raw/numbers
	cat /sys/block/vda/serial; echo
	cat /sys/block/vdb/ro
	umount /mnt/raw
	dd if=/dev/zero of=/dev/vdb bs=4096 count=1 conv=fsync 2>/dev/null && echo written || echo refused'
equal "raw: status" "$status" 0
{
	read -r serial
	read -r ro
	read -r written
} <<<"$out"
equal "raw: serial" "$serial" disk
equal "ro: the guest knows" "$ro" 1
equal "ro: a write" "$written" refused
equal "ro: the file is as it was" "$(sha256sum <base.erofs)" "$base_sum"
check "raw: fsck on the host" e2fsck -fn raw.img
check "raw: what the guest wrote" cmp <(debugfs -R 'cat numbers' raw.img 2>/dev/null) <(seq 30000)
check "raw: what it copied from the read-only disk" cmp <(debugfs -R 'cat copy' raw.img 2>/dev/null) tree/data

# --- Refusals ----------------------------------------------------------------------------------

run_guest --disk /no/such.img -- true
equal "no such file: status" "$status" 125
contains "no such file: message" "$errors" "/no/such.img"
run_guest --disk "$PWD/tree" -- true
contains "a folder: message" "$errors" "Is a directory"
run_guest --disk raw.img,mode=rw -- true
equal "an unknown mode: status" "$status" 2
contains "an unknown mode: message" "$errors" "'rw' is neither"
: >empty.img
run_guest --disk empty.img -- true
contains "an empty file: message" "$errors" "too small"
flock raw.img "$MAYFLY" run --disk raw.img -- true 2>stderr.txt
contains "in use elsewhere: message" "$(cat stderr.txt)" "in use"
check "nothing left" nothing_left
finish
