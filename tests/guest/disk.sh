# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Disks in a real guest: what it writes is on the host, whole, and what it must not write stays.
. "$(dirname "$0")/lib.sh"

# --- A raw image of ext4, a read-only one of erofs, an overlay on ext4, a blank disk --------------

mkdir tree
head -c 100000 /dev/urandom >tree/data
seq 20000 >tree/numbers
mkfs.erofs base.erofs tree >/dev/null || fail "mkfs.erofs"
truncate -s 64M raw.img
mke2fs -q -F -t ext4 raw.img || fail "mke2fs"
truncate -s 100M base.img
mke2fs -q -F -t ext4 -b 4096 -d tree base.img || fail "mke2fs -d"
chmod 0444 base.img
sums=$(sha256sum base.erofs base.img)
run_guest --disk raw.img,mode=raw --disk base.erofs,mode=ro --disk base.img --disk size=32M,quota=1M -- sh -ec '
	cat /sys/block/vda/serial; echo
	cat /sys/block/vdb/ro
	mkdir -p /mnt/raw /mnt/ro /mnt/ov
	mount -t ext4 /dev/vda /mnt/raw
	mount -t erofs -o ro /dev/vdb /mnt/ro
	mount -t ext4 /dev/vdc /mnt/ov
	cp /mnt/ro/data /mnt/raw/copy
	seq 30000 >/mnt/raw/numbers
	cmp /mnt/ov/numbers /mnt/ro/numbers && rm /mnt/ov/numbers
	seq 10000 >/mnt/ov/new
	sync
	umount /mnt/raw
	umount /mnt/ov && mount -t ext4 /dev/vdc /mnt/ov
	cmp /mnt/ov/data /mnt/ro/data && seq 10000 | cmp - /mnt/ov/new && [ ! -e /mnt/ov/numbers ] && echo same
	dd if=/dev/zero of=/dev/vdb bs=4096 count=1 conv=fsync 2>/dev/null && echo written || echo refused
	dd if=/dev/zero of=/dev/vdd bs=65536 count=8 conv=fsync 2>/dev/null && echo written || echo refused
	dd if=/dev/zero of=/dev/vdd bs=65536 count=32 conv=fsync 2>/dev/null && echo written || echo refused'
equal "raw: status" "$status" 0
{
	read -r serial
	read -r ro
	read -r same
	read -r written
	read -r within
	read -r beyond
} <<<"$out"
equal "raw: serial" "$serial" disk
equal "ro: the guest knows" "$ro" 1
equal "ro: a write" "$written" refused
equal "overlay: what was written is there, and the base" "$same" same
equal "quota: within" "$within" written
equal "quota: beyond it is an error of I/O" "$beyond" refused
equal "the bases are as they were" "$(sha256sum base.erofs base.img)" "$sums"
check "raw: fsck on the host" e2fsck -fn raw.img
debugfs -R 'cat numbers' raw.img >numbers 2>/dev/null
equal "raw: what the guest wrote" "$(sha256sum <numbers)" "$(seq 30000 | sha256sum)"
debugfs -R 'cat copy' raw.img >copy 2>/dev/null
check "raw: what it copied from the read-only disk" cmp copy tree/data

# --- Refusals ----------------------------------------------------------------------------------

run_guest --disk /no/such.img -- true
equal "no such file: status" "$status" 125
contains "no such file: message" "$errors" "/no/such.img"
run_guest --disk "$PWD/tree,mode=raw" -- true
contains "a folder: message" "$errors" "Is a directory"
run_guest --disk raw.img,mode=rw -- true
equal "an unknown mode: status" "$status" 2
contains "an unknown mode: message" "$errors" "'rw' is none of"
: >empty.img
run_guest --disk empty.img,mode=raw -- true
contains "an empty file: message" "$errors" "too small"
run_guest --disk empty.img -- true
contains "an empty base: message" "$errors" "empty.img: empty"
flock raw.img "$MAYFLY" run --disk raw.img,mode=raw -- true 2>stderr.txt
contains "in use elsewhere: message" "$(cat stderr.txt)" "in use"
flock raw.img "$MAYFLY" run --disk raw.img -- true 2>stderr.txt
contains "written to elsewhere: message" "$(cat stderr.txt)" "writes to it"
run_guest --disk mode=ro -- true
contains "no file and no size: message" "$errors" "neither a file nor a size"
check "nothing left" nothing_left
finish
